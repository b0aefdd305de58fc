"""The Ray actor around a controller: five methods, and nothing decided here."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
import time
from collections import deque
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import msgspec
import ray

from sc_core import (
    Conservation,
    RunResult,
)
from sc_ray.failures import ControllerFailed
from sc_ray.hosted import Controller, EventLoop, HostedController

_PATIENCE_S = 0.05
"""How long `status` waits for a busy controller before it answers with what it saw last. The
longest stretch of a healthy one is some 15 ms, and who asks shall have an answer in 100."""
_LAST_WARNINGS = 5
_AT_MOST_CHARACTERS = 500  #: of one of them
_LAST_WORDS_S = 2.0
"""Between reporting a call that may still be writing and ending the process: Ray needs some
milliseconds to send the report, and every further moment is one beside that call."""


class ControllerArgs(Protocol):
    """One picklable argument that holds everything an actor needs."""

    @property
    def event_loop(self) -> EventLoop: ...

    def open(self) -> AbstractAsyncContextManager[Controller]:
        """Open clients and build the controller; entered on the controller's own loop."""


class SingleControllerActor:
    """Hosts one controller. `run` starts it; the other methods answer at any time.

    The controller has its own thread and loop: `ray.cancel`, a native cancel that ignores
    shields, meets only the method that waits, and a busy controller leaves this loop free.

    A process that Ray started in place of one that died (`max_restarts`) has lost what that one
    knew, and its workers have gone on. It refuses all but `ping` and `status`: the way on is a
    new store, restored from the newest bundle, and a new actor.
    """

    def __init__(self, args: ControllerArgs) -> None:
        # Every module is imported by now. A collection that went through them, again and again,
        # would stop the controller's loop for some 0.2 s each time.
        gc.collect()
        gc.freeze()
        self._restarted = ray.get_runtime_context().was_current_actor_reconstructed
        self._warnings = _Warnings()
        self._hosted = HostedController(args.open, args.event_loop)
        self._seen: dict[str, Any] = {}  #: the last answer of the controller itself
        self._seen_at = time.monotonic()

    async def run(self) -> RunResult:
        """Run the controller to its end. A second call, such as Ray's own retry, joins the first.

        Being cancelled asks the controller to stop, which saves a last bundle; the cancel takes
        effect when it has ended. After a call that may still be writing, the process ends hard.

        Raises:
            ControllerFailed: the run failed; carries the root cause as text.
        """
        self._refuse_if_restarted("run")
        self._hosted.start()
        ended = asyncio.wrap_future(self._hosted.ended)
        cancelled: asyncio.CancelledError | None = None
        while not ended.done():
            try:
                await asyncio.wait([ended])
            except asyncio.CancelledError as exc:
                cancelled = exc
                self._hosted.call(lambda controller: controller.stop("cancelled"))
        failure = ended.exception()
        if isinstance(failure, ControllerFailed) and failure.may_still_write:
            threading.Timer(_LAST_WORDS_S, os._exit, [1]).start()
        if failure is not None:
            raise failure
        if cancelled is not None:
            raise cancelled
        return ended.result()

    async def ping(self) -> int:
        """The process id."""
        return os.getpid()

    async def status(self) -> dict[str, Any]:
        """Plain data: `state`, the controller's statistics, `audit` (`ok`, or what is wrong), and
        of the controller's log `warnings`, how many there were, and `last_warnings`.

        `age_s` says how old that is; above 0 while the controller is too busy to answer. The
        state is `starting`, `running`, `ended` or, of a process that refuses to, `restarted`.
        """
        if self._restarted:
            return {"state": "restarted", "age_s": 0.0}
        asked = asyncio.wrap_future(self._hosted.call(_describe))
        if self._hosted.state != "starting":
            await asyncio.wait([asked], timeout=_PATIENCE_S)
        if asked.done() and not asked.cancelled():
            self._seen, self._seen_at = asked.result(), time.monotonic()
            age_s = 0.0
        else:
            asked.cancel()
            age_s = time.monotonic() - self._seen_at
        count, last = self._warnings.count, list(self._warnings.last)
        told = {"state": self._hosted.state, "age_s": age_s, **self._seen}
        return {**told, "warnings": count, "last_warnings": last}

    async def request_checkpoint(self) -> None:
        """Save a bundle as soon as the train pump can, and go on."""
        self._refuse_if_restarted("request_checkpoint")
        self._hosted.call(lambda controller: controller.request_checkpoint())

    async def stop(self, reason: str = "stopped", checkpoint: bool = True) -> None:
        """Ask the run to end, with a last bundle unless `checkpoint` is false.

        Returns at once; `run` returns when it has ended.
        """
        self._refuse_if_restarted("stop")
        self._hosted.call(lambda controller: controller.stop(reason, checkpoint=checkpoint))

    def _refuse_if_restarted(self, method: str) -> None:
        if self._restarted:
            raise ControllerFailed(
                "ControllerRestarted",
                f"{method}: Ray restarted the controller's process, and what the run was about to"
                " do is lost with the old one; nothing was written since. Go on from the newest"
                " bundle: end the run's workers, restore, and start a new actor"
                " (setup_single_controller with resume='auto', then start_actor), which"
                " cluster.max_controller_restarts does by itself",
            )


class _Warnings(logging.Handler):
    """The last warnings and errors that anything in this process logged, for others to see."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.count = 0
        self.last: deque[str] = deque(maxlen=_LAST_WARNINGS)
        for name in ("sc_core", "sc_ray"):
            logging.getLogger(name).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.last.append(record.getMessage()[:_AT_MOST_CHARACTERS])
        self.count += 1


def _describe(controller: Controller) -> dict[str, Any]:
    try:
        controller.audit()
    except Conservation as exc:
        audit = str(exc)
    else:
        audit = "ok"
    statistics: dict[str, Any] = msgspec.to_builtins(controller.statistics())
    return {**statistics, "audit": audit}
