"""Notices a run that goes on without getting anywhere, or that does not end when it should."""

from __future__ import annotations

import logging
from collections.abc import Callable

import anyio

from sc_core.errors import StallError, StopTimeout
from sc_core.report import Reporter, StallReport
from sc_core.state import RunState
from sc_core.waits import seconds

logger = logging.getLogger(__name__)


class Watchdog:
    """Bounds every wait of a run that has no deadline of its own."""

    def __init__(
        self, state: RunState, reporter: Reporter, *, stall_timeout_s: float, stop_grace_s: float
    ) -> None:
        self._state = state
        self._reporter = reporter
        self._stall_timeout_s = stall_timeout_s
        self._stop_grace_s = stop_grace_s
        self._quiet_since: float | None = None  #: the last progress; None: nobody watched yet
        self._ending = anyio.Event()  #: the tasks of the run were told to end

    @property
    def quiet_s(self) -> float:
        """Time since the last progress, or the start; 0 outside the event loop."""
        try:
            now = anyio.current_time()
        except anyio.NoEventLoopError:
            return 0.0
        return 0.0 if self._quiet_since is None else now - self._quiet_since

    def report(self) -> StallReport:
        """What the run waits for now. May be asked at any time; costs a look at every task."""
        quiet_s = self.quiet_s
        return self._reporter.report(now=(self._quiet_since or 0.0) + quiet_s, quiet_s=quiet_s)

    async def watch(self) -> None:
        """Wait for ever while steps, evaluations, syncs and saves keep coming, not just commits.

        Raises:
            StallError: nothing of that kind for `stall_timeout_s`; its message is the report.
        """
        state = self._state
        try:
            while True:
                seen, self._quiet_since = state.progress, anyio.current_time()
                self._reporter.progress_seen()
                with anyio.move_on_after(self._stall_timeout_s):
                    await state.wait_until(_moved_past(seen), "progress")
                    continue
                report = self._told(f"no progress for {seconds(self._stall_timeout_s)}")
                logger.error("%s", report)  # now: calls under way may take their time to end
                raise StallError(report)
        finally:
            self._ending.set()

    async def see_stop_through(self, reserve_s: Callable[[], float]) -> None:
        """Wait for a stop request, then for the run to end.

        Raises:
            StopTimeout: it did not within `stop_grace_s` and what a step and a save may take,
                `reserve_s()`; its message is the report.
        """
        state = self._state
        await state.wait_until(lambda state: state.stop_reason is not None, "a stop request")
        grace_s = self._stop_grace_s + reserve_s()
        await anyio.sleep(grace_s)
        report = self._told(
            f"the stop ({state.stop_reason}) did not end the run within {seconds(grace_s)}"
        )
        logger.error("%s", report)
        raise StopTimeout(report)

    async def see_end_through(self, deadline_s: float) -> None:
        """Say in the log which task is still there `deadline_s` after all were told to end.

        It ignores its cancel, and nothing but the end of the process can end it.
        """
        await self._ending.wait()
        await anyio.sleep(deadline_s)
        told = (
            f"the run has not ended within {seconds(deadline_s)}, although every task was told to"
        )
        logger.critical("%s", self._told(told))

    def _told(self, what: str) -> str:
        try:
            report = self.report()
        except Exception as exc:  # a sampler that is asked why may be what is wrong
            logger.exception("no report could be written")
            return f"{what}: no report could be written: {type(exc).__name__}: {exc}"
        return "\n".join([f"{what}: {report.cause}", *report.details()])


def _moved_past(seen: int) -> Callable[[RunState], bool]:
    return lambda state: state.progress != seen
