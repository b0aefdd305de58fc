"""The weight gate and the sync behind it.

The gate closes in the step that counts the new version, so no group can be stamped with a
version that no engine serves; it opens once every engine in service has confirmed that version.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TypeVar

import anyio

from sc_core.calls import at_once, settle, writable
from sc_core.config import AsyncRlConfig
from sc_core.errors import (
    CallFailed,
    CallTimeout,
    EnginesFailed,
    WeightSyncError,
    WorkerDied,
    WrongAnswer,
)
from sc_core.ports import EngineFleet, WeightSync
from sc_core.returned import check_count, check_mapping
from sc_core.spans import SYNC, TRAIN
from sc_core.state import DRAINED, GATE_OPEN, RunState
from sc_core.watched import Watched

logger = logging.getLogger(__name__)
R = TypeVar("R")


class TurnGate:
    """The weight gate for a worker whose siblings take several requests each, one after another.

    Give the same one to the worker and to `Ports`. `drain` then waits for the turns under way
    instead of whole siblings, and later turns wait until the weights have moved.
    """

    def __init__(self) -> None:
        self._state: RunState | None = None
        self.under_way = Watched(0)

    def attach(self, state: RunState) -> None:
        """The controller's part: the run whose gate this is."""
        self._state = state

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[int]:
        """Around one request. Entering waits for the gate; gives the version that is served.

        The wait counts towards `deadlines.rollout_s`. Leaving never waits.
        """
        state = self._state
        assert state is not None, "a TurnGate belongs into Ports.turns"
        while state.gate_closed_for is not None:
            await state.wait_until(_gate_is_open, GATE_OPEN)
        self.under_way.set(self.under_way.value + 1)
        try:
            yield state.ledger.weight_version
        finally:
            self.under_way.set(self.under_way.value - 1)


def _gate_is_open(state: RunState) -> bool:
    return state.gate_closed_for is None


class WeightUpdates:
    """`fleet` can go on without an engine that fails; `abort_stale` ends groups too old."""

    def __init__(
        self,
        state: RunState,
        sync: WeightSync,
        config: AsyncRlConfig,
        *,
        fleet: EngineFleet | None = None,
        turns: TurnGate | None = None,
        abort_stale: Callable[[], None] | None = None,
    ) -> None:
        self._state = state
        self._sync = sync
        self._fleet = fleet
        self._abort_stale = abort_stale
        self._deadline_s = config.deadlines.weight_sync_s
        self._attempts = config.weight_sync_attempts
        self._drain = config.weight_sync_mode == "drain"
        self._drain_s = config.deadlines.rollout_s + self._deadline_s
        self._requests = state.requests if turns is None else turns.under_way
        self._put_out: dict[str, str] = {}  #: engines, in the sync under way
        if turns is not None:
            turns.attach(state)

    def version_moved(self) -> None:
        """End what has become too old; to be called when the version has moved, without a wait."""
        if self._abort_stale is not None:
            self._abort_stale()

    async def update(self) -> None:
        """Give the current version to the engines, then open the gate.

        Pause, transfer and resume are awaited to their end although cancelled. Whatever fails,
        engines that were paused are resumed, or declared out of service by name. A failure
        leaves the gate closed and must end the run, as a cancel does. Each try of a call takes
        `weight_sync_s` at most, and there are as many as `weight_sync_attempts`, plus one for
        each time that engines are put out of service.

        Of a run that was asked to stop, and has no engine left, the gate just stays closed.

        Raises:
            EnginesFailed: engines failed that the fleet can't do without.
            WeightSyncError: something else failed, or no engine answered.
            WorkerDied: no engine is left, and nobody asked for a stop.
            CallTimeout: pause, transfer or resume outlived its deadline, or requests that were to
                be drained outlived theirs.
        """
        state, version = self._state, self._state.ledger.weight_version
        self._put_out = {}
        with state.spans(TRAIN, SYNC, step=state.ledger.step, weight_version=version):
            await self._update(version)

    async def _update(self, version: int) -> None:
        state = self._state
        state.sync_begins()
        if self._drain:
            with state.spans(TRAIN, "drain", weight_version=version):
                await self._wait_for_requests()
        try:
            await self._each("pause", self._sync.pause)
            confirmed = await self._each("transfer", lambda: self._transfer(version))
            back = self._put_out.keys() & confirmed  # under that name, there is a new one
            state.sync_confirmed(confirmed, back=back)
            for engine in back:
                del self._put_out[engine]
        except BaseException as error:
            try:
                await self._resume()
            except Exception as exc:  # the error under way says more than this one
                logger.error("engines may still be paused: %s", exc)
            if isinstance(error, WorkerDied) and state.stop_reason is not None:
                logger.warning("weight version %d is not sent before the end: %s", version, error)
                return
            raise
        await self._resume()
        out = "; ".join(f"{engine}: {reason}" for engine, reason in self._put_out.items())
        state.open_gate(
            confirmed.keys() - self._put_out.keys(),
            reason=writable(f"engines out of service: {out}") if out else None,
        )

    async def _wait_for_requests(self) -> None:
        """Each ends within `rollout_s`, unless it can't be cancelled."""
        with anyio.move_on_after(self._drain_s):
            await self._requests.wait_until(lambda under_way: under_way == 0, DRAINED)
            return
        groups = [r.group_id for r in self._state.ledger.records() if r.state == "in_flight"]
        call = f"weight_sync.drain of {self._requests.value} requests (groups {', '.join(groups)})"
        logger.error("%s: they don't end, and may hold up the end of the run too", call)
        raise CallTimeout(call, self._drain_s)

    async def _transfer(self, version: int) -> Mapping[str, int]:
        confirmed = check_mapping(
            await self._sync.transfer(version),
            "weight_sync.transfer",
            "the version that each engine confirmed",
        )
        if not confirmed:
            raise WeightSyncError(f"weight version {version} was confirmed by no engine")
        for engine in confirmed:
            if not isinstance(engine, str):  # no log with it could be read again
                raise WrongAnswer(f"weight_sync.transfer names an engine {engine!r}, no string")
        wrong = {e: f"it has version {at}" for e, at in confirmed.items() if at != version}
        if wrong:
            raise EnginesFailed(f"transfer of weight version {version}", wrong)
        return confirmed

    async def _each(self, name: str, work: Callable[[], Awaitable[R]]) -> R:
        """Ask every engine; repeat what failed, in the end without the engines that did."""
        attempts_left = self._attempts
        while True:
            try:
                with self._state.spans(TRAIN, name):
                    return await settle(f"weight_sync.{name}", self._deadline_s, work)
            except (TimeoutError, WorkerDied):  # what it did is unknown; nobody is left
                raise
            except Exception as exc:
                if isinstance(exc, CallFailed) and isinstance(exc.__cause__, TimeoutError):
                    raise
                attempts_left -= 1
                if attempts_left <= 0:
                    if not isinstance(exc, EnginesFailed):
                        if isinstance(exc, WeightSyncError):
                            raise
                        raise WeightSyncError(str(exc)) from exc
                    if not self._go_on_without(exc.failures):
                        raise
                logger.warning("weight_sync.%s is repeated: %s", name, exc)

    def _go_on_without(self, failures: Mapping[str, str]) -> bool:
        """Put these engines out of service; False if that is not possible, or leaves none."""
        if self._fleet is None or failures.keys() & self._put_out.keys():
            return False
        left = 0
        for engine, reason in failures.items():
            left = check_count(
                at_once("fleet.put_out", self._fleet.put_out, engine, reason),
                "fleet.put_out",
                "how many engines are left",
            )
            self._put_out[engine] = reason
            self._state.engine_out(engine, reason)
        return left > 0

    async def _resume(self) -> None:
        try:
            await self._each("resume", self._sync.resume)
        except EnginesFailed as exc:
            for engine in exc.failures.keys() - self._put_out.keys():
                self._state.engine_out(engine, exc.failures[engine])
            raise
