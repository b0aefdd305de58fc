"""The driver while the actor runs: signals in, progress out."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

import anyio
import anyio.lowlevel
from ray.exceptions import RayError

from sc_core import (
    RunResult,
    root_cause,
)
from sc_ray.bridge import await_ref
from sc_ray.progress import Console, engines_away
from sc_ray.run_directory import CHECKPOINTS, LOGS, RunDirectory, published
from sc_ray.workers import answer

_LOOK_EVERY_S = 0.5
"""A terminal shows no more, and a status call costs the controller's loop well below 1 ms."""
_PULSE_EVERY_S = 1.0
"""Between two questions whether a process lives: against deadlines of minutes, at once."""
_ENDS = (signal.SIGTERM, signal.SIGINT)


class Interrupted(KeyboardInterrupt):
    """A signal came before there was a run that could be stopped."""


class Signals:
    """SIGTERM and SIGINT stop the run, a second one leaves at once; SIGUSR1 saves.

    Until `steer` has named somebody to tell, the first raises `Interrupted`.
    """

    def __init__(self) -> None:
        self.stopped_by: str | None = None
        self.on_leave: Callable[[], None] = lambda: None  #: the second one ends the process
        self._before: dict[signal.Signals, Any] = {}
        self._on_stop: Callable[[str], None] | None = None
        self._on_save: Callable[[], None] = lambda: None

    def __enter__(self) -> Signals:
        for number in (*_ENDS, signal.SIGUSR1):
            self._before[number] = signal.getsignal(number)
        for number in _ENDS:
            signal.signal(number, self._end)
        signal.signal(signal.SIGUSR1, lambda *_: self._on_save())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def steer(self, on_stop: Callable[[str], None], on_save: Callable[[], None]) -> None:
        """Whom to tell from now on. Both are called between two steps of the main thread."""
        self._on_stop, self._on_save = on_stop, on_save

    def unsteer(self) -> None:
        """There is nobody to tell any more: from now on the first signal raises again."""
        self._on_stop, self._on_save = None, lambda: None

    def _end(self, number: int, _: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.stopped_by is not None:
            self.on_leave()
            os._exit(1)  # Ray's processes end with this one
        self.stopped_by = name
        if self._on_stop is None:
            raise Interrupted(name)
        self._on_stop(name)


async def supervise(
    actor: Any,
    run: RunDirectory,
    console: Console,
    signals: Signals,
    *,
    max_steps: int,
    vital: Mapping[str, Any] = {},
    resumed_from: str | None = None,
) -> RunResult:
    """Run the actor to its end, show its progress, and pass signals on to it.

    `vital` are handles, by name, of other actors whose death ends the run: those whose callers
    would otherwise hear of it by a deadline only. `resumed_from` is the bundle that the run goes on
    from: newer ones were rejected, and are not shown until they are replaced.

    Raises:
        ControllerFailed: the run failed.
        RayActorError: the actor's process died.
        WorkerDied: one of the vital ones did. The actor may still be at work: kill it.
    """
    view = _View(actor, run, console, signals, max_steps, resumed_from)
    try:
        async with anyio.create_task_group() as tg:
            tg.start_soon(_pass_on, actor, console, signals)
            tg.start_soon(view.keep_up)
            for name, handle in vital.items():
                tg.start_soon(_feel_pulse, name, handle)
            result: RunResult = await await_ref(actor.run.remote())
            tg.cancel_scope.cancel()
    except ExceptionGroup as group:
        raise root_cause(group) from group
    finally:
        signals.steer(on_stop=lambda _: None, on_save=lambda: None)  # it is ending
        console.rest()
    await view.look(last=True)
    return result


async def _feel_pulse(name: str, actor: Any) -> None:
    """Raise WorkerDied soon after the actor's process is gone."""
    while True:
        await answer(name, actor.__ray_ready__.remote())
        await anyio.sleep(_PULSE_EVERY_S)


async def _pass_on(actor: Any, console: Console, signals: Signals) -> None:
    wishes: list[str] = []
    wished = anyio.Event()
    loop: Any = anyio.lowlevel.current_token().native_token

    def wish(what: str) -> None:
        wishes.append(what)
        loop.call_soon_threadsafe(lambda: wished.set())  # ends a wait of this very loop, too

    signals.steer(on_stop=wish, on_save=lambda: wish("SIGUSR1"))
    while True:
        await wished.wait()
        wished = anyio.Event()
        while wishes:
            what = wishes.pop(0)
            if what == "SIGUSR1":
                console.say("SIGUSR1: saving a checkpoint, then going on")
                await _answered(actor.request_checkpoint.remote())
            else:
                console.say(f"{what}: saving a checkpoint, then ending; once more ends at once")
                await _answered(actor.stop.remote(what))


class _View:
    """Looks at the run and shows what has changed, on the terminal and in `status.json`."""

    def __init__(
        self,
        actor: Any,
        run: RunDirectory,
        console: Console,
        signals: Signals,
        max_steps: int,
        resumed_from: str | None = None,
    ) -> None:
        self._actor = actor
        self._run = run
        self._console = console
        self._signals = signals
        self._max_steps = max_steps
        self._bundles = published(run.path)
        names = list(self._bundles)
        taken = os.path.basename(resumed_from or "")
        newer = names[: names.index(taken)] if taken in names else []
        self._rejected = {name: self._bundles[name] for name in newer}
        self._last: Mapping[str, Any] = {}  #: what the controller last said of itself
        self._evaluation: Mapping[str, float] = {}  #: the last finished one, also while one runs
        self._warnings = 0  #: of the controller that were shown
        self._away: dict[str, str] = {}  #: engines that don't serve, and why, as shown

    async def keep_up(self) -> None:
        while True:
            await self.look()
            await anyio.sleep(_LOOK_EVERY_S)

    async def look(self, *, last: bool = False) -> None:
        self.show(await _answered(self._actor.status.remote()) or {})
        if last:
            self._console.rest()

    def show(self, status: Mapping[str, Any]) -> None:
        bundles = published(self._run.path)
        good = [name for name, identity in bundles.items() if self._rejected.get(name) != identity]
        self._evaluation = status.get("last_evaluation") or self._evaluation
        self._last = status if "step" in status else self._last
        told = {"max_steps": self._max_steps, "bundles": good, **self._last, **status}
        told["last_evaluation"] = self._evaluation
        if "step" in status:  # else there is no controller yet, or not any more
            self._console.show(told)
        self._warn(status)
        self._tell_of_engines(status)
        for name, identity in reversed(bundles.items()):
            if self._bundles.get(name) != identity:
                self._console.say(f"saved {self._run.path / CHECKPOINTS / name}")
        self._bundles = bundles
        phase = "running" if self._signals.stopped_by is None else "stopping"
        self._run.report(phase, told)

    def _tell_of_engines(self, status: Mapping[str, Any]) -> None:
        """Show which engines were lost or came back since the last look."""
        if "engines" not in status:
            return
        away = engines_away(status)
        for engine, told in away.items():
            if self._away.get(engine) != told:
                self._console.say(f"{engine} is {told}")
        for engine in self._away.keys() & set(status["engines"]):
            came = "has joined" if self._away[engine].startswith("awaited") else "is back"
            self._console.say(f"{engine} {came}")
        self._away = away

    def _warn(self, status: Mapping[str, Any]) -> None:
        """Show what the controller's log has of warnings and errors since the last look."""
        count = status.get("warnings", 0)
        new, self._warnings = count - self._warnings, count
        last = status.get("last_warnings", ())
        for text in last[max(0, len(last) - new) :] if new > 0 else ():
            self._console.say(f"warning: {text}")
        if new > len(last):
            log = self._run.path / LOGS / "controller.log"
            self._console.say(f"warning: {new - len(last)} more before these are in {log}")


async def _answered(ref: Any) -> Any:
    """None from an actor that is gone: the end of `run` says why."""
    with suppress(RayError):
        return await await_ref(ref)
    return None
