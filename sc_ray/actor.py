"""The Ray actor around a controller: five methods, and nothing decided here."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import msgspec

from sc_core import (
    Conservation,
    RunResult,
)
from sc_ray.failures import ControllerFailed
from sc_ray.hosted import Controller, EventLoop, HostedController

_PATIENCE_S = 1.0
"""How long `status` waits for a busy controller before it answers with what it saw last."""
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
    """Hosts one controller. `run` is called once; the other methods answer at any time.

    The controller has its own thread and loop: `ray.cancel`, a native cancel that ignores
    shields, meets only the method that waits, and a busy controller leaves this loop free.
    """

    def __init__(self, args: ControllerArgs) -> None:
        # Every module is imported by now. A collection that went through them, again and again,
        # would stop the controller's loop for some 0.2 s each time.
        gc.collect()
        gc.freeze()
        self._hosted = HostedController(args.open, args.event_loop)
        self._seen: dict[str, Any] = {}  #: the last answer of the controller itself
        self._seen_at = time.monotonic()

    async def run(self) -> RunResult:
        """Run the controller to its end.

        Being cancelled asks the controller to stop, which saves a last bundle; the cancel takes
        effect when it has ended. After a call that may still be writing, the process ends hard.

        Raises:
            ControllerFailed: the run failed; carries the root cause as text.
        """
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
        """Plain data: `state`, the controller's statistics, `audit` (`ok`, or what is wrong).

        `age_s` says how old that is; above 0 while the controller is too busy to answer.
        """
        asked = asyncio.wrap_future(self._hosted.call(_describe))
        if self._hosted.state != "starting":
            await asyncio.wait([asked], timeout=_PATIENCE_S)
        if asked.done() and not asked.cancelled():
            self._seen, self._seen_at = asked.result(), time.monotonic()
            age_s = 0.0
        else:
            asked.cancel()
            age_s = time.monotonic() - self._seen_at
        return {"state": self._hosted.state, "age_s": age_s, **self._seen}

    async def request_checkpoint(self) -> None:
        """Save a bundle as soon as the train pump can, and go on."""
        self._hosted.call(lambda controller: controller.request_checkpoint())

    async def stop(self, reason: str = "stopped") -> None:
        """Ask the run to end with a last bundle. Returns at once; `run` returns when it has."""
        self._hosted.call(lambda controller: controller.stop(reason))


def _describe(controller: Controller) -> dict[str, Any]:
    try:
        controller.audit()
    except Conservation as exc:
        audit = str(exc)
    else:
        audit = "ok"
    statistics: dict[str, Any] = msgspec.to_builtins(controller.statistics())
    return {**statistics, "audit": audit}
