"""The rollout pump: which prompt goes out next, and what becomes of each attempt.

A sampler's yes lets a prompt leave the source; a place, an in-flight slot that no evaluation
waits for, and the open weight gate let it be dispatched. Stamp and dispatch are one synchronous
step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from sc_core.attempt import AttemptFailed, GroupBuilder
from sc_core.calls import ended_from_outside, failed, in_tree, told
from sc_core.config import ControllerConfig
from sc_core.errors import (
    CallTimeout,
    DataFailure,
    EndOfPrompts,
    PromptDropped,
    ScError,
    TooManyDropped,
)
from sc_core.ledger import Failure
from sc_core.ports import PromptSource
from sc_core.records import LedgerRecord, Stamp
from sc_core.returned import check_pulled
from sc_core.spans import PROMPTS
from sc_core.state import RunState

logger = logging.getLogger(__name__)
_Attempt = tuple[LedgerRecord, int]  #: with the weight version that it was dispatched under


class RolloutPump:
    """Keeps prompts flowing from the source to committed groups until it is cancelled."""

    def __init__(
        self,
        state: RunState,
        config: ControllerConfig,
        source: PromptSource,
        builder: GroupBuilder,
        *,
        max_inflight: int,
        build: Callable[[LedgerRecord, int], Awaitable[bool]] | None = None,
    ) -> None:
        """`build` is called for `builder.build`, which it may end early."""
        self._state = state
        self._source = source
        self._builder = builder
        self._build = build or builder.build
        self._failures = config.async_rl.rollout_failure
        self._reserve = self._failures.replacement_reserve_prompts
        self._deadlines = config.async_rl.deadlines
        self._max_inflight = max_inflight
        self._dropped_in_a_row = 0  #: after failures, since the last commit
        self._backing_off: set[int] = set()  #: ordinals that wait before their next attempt
        self._free: list[_FreeSlot] = []  #: tasks that wait for another attempt to make

    async def run(self) -> None:
        """Pull and dispatch for ever; a cancel ends every attempt and leaves no half group."""
        try:
            async with anyio.create_task_group() as attempts:
                attempts.start_soon(in_tree, self._pull, attempts, name="prompts")
                while True:  # restored prompts, retries, and whatever a closed gate kept waiting
                    await self._state.wait_until(
                        lambda _: self._next_dispatch() is not None, "a prompt that may go out"
                    )
                    self._dispatch(attempts)
        finally:  # a task may have been cancelled before it took the attempt it was given
            self._state.requests.set(0)
        raise ended_from_outside("an attempt")

    def _dispatch(self, attempts: TaskGroup) -> None:
        """Start every attempt that may start now."""
        requests = self._state.requests
        while (ready := self._next_dispatch()) is not None:
            # Counted here, not where each begins: a drain must not overlook those about to.
            requests.set(requests.value + self._builder.missing_siblings(ready[0]))
            attempt = self._state.dispatched(*ready), self._state.ledger.weight_version
            if self._free:
                self._free.pop().give(attempt)
            else:
                attempts.start_soon(in_tree, self._run_slot, attempt, name="attempt")

    # choosing --------------------------------------------------------------------------

    def _may_pull(self, state: RunState) -> bool:
        """Beyond the reserve, none leaves the source before the sampler and a place want it."""
        ledger, ahead = state.ledger, state.ledger.unadmitted_count
        if ledger.exhausted or state.stop_reason is not None:
            return False
        return ahead < self._reserve or (
            ahead == 0 and self._has_room() and state.sampler.admit(ledger) is not None
        )

    def _lacking(self) -> str:
        """What the next prompt lacks before it may leave the source; empty if nothing."""
        state, ledger = self._state, self._state.ledger
        if self._may_pull(state):
            return ""
        if state.gate_closed_for is not None:
            return "the weight gate"
        if ledger.in_flight_count + state.evaluating >= self._max_inflight:
            return "an in-flight slot"
        return "the sampler" if self._has_room() else "a place"

    def _has_room(self) -> bool:
        """Whether a place is free, beyond those of groups that steps to come go without.

        Else a sampler that only places bound would make more than these steps can take. Never so
        many that the step to fill could not.
        """
        places, ledger = self._state.places, self._state.ledger
        kept = ledger.short_count
        if kept:
            kept = min(kept, places.capacity - ledger.groups_of_target(ledger.weight_version))
        return places.free > kept

    async def _pull(self, attempts: TaskGroup) -> None:
        state, deadline_s = self._state, self._deadlines.source_s
        call = "source.next_prompt"
        with anyio.CancelScope() as in_time:  # one for all calls: its deadline moves
            while True:
                began = state.spans.now() if state.spans.on else 0.0
                lacking = self._lacking() if state.spans.on else ""
                await state.wait_until(self._may_pull, "room for one more prompt")
                if lacking:
                    state.spans.add(PROMPTS, f"wait for {lacking}", began)
                if not self._may_pull(state):
                    continue
                in_time.deadline = anyio.current_time() + deadline_s
                try:
                    pulled = check_pulled(await self._source.next_prompt())
                except Exception as exc:
                    await anyio.lowlevel.checkpoint_if_cancelled()  # its answer to a cancel is none
                    if isinstance(exc, EndOfPrompts):
                        state.end_of_prompts()
                        return
                    if isinstance(exc, ScError):
                        raise
                    raise failed(call, exc) from exc
                except anyio.get_cancelled_exc_class() as exc:
                    exc.add_note(call)  # for `in_tree`, if it is not ours
                    raise
                if in_time.cancel_called:  # it did not mind
                    break
                in_time.deadline = math.inf
                state.pulled(pulled)
                self._dispatch(attempts)
        raise CallTimeout(call, deadline_s)

    def _next_dispatch(self) -> tuple[int, Stamp | None] | None:
        """The lowest waiting ordinal that may leave now, with its stamp if it needs one."""
        state, ledger = self._state, self._state.ledger
        if (
            state.gate_closed_for is not None
            or state.stop_reason is not None
            or ledger.in_flight_count + state.evaluating >= self._max_inflight
            or ledger.waiting_count <= len(self._backing_off)
        ):
            return None
        record = ledger.next_waiting(self._backing_off)
        if record is None:
            return None
        if record.admitted:  # a retry, or restored: it has its place, and its target
            return record.ordinal, None
        if record.ordinal not in state.places and not self._has_room():
            return None
        stamp = state.sampler.admit(ledger)
        return None if stamp is None else (record.ordinal, stamp)

    # one attempt -----------------------------------------------------------------------

    async def _run_slot(self, attempt: _Attempt) -> None:
        """Make one attempt after another: waking a task costs half of starting one."""
        while True:
            await self._make(*attempt)
            slot = _FreeSlot()
            self._free.append(slot)
            attempt = await slot.given()

    async def _make(self, record: LedgerRecord, weight_version: int) -> None:
        try:
            if await self._build(record, weight_version):
                self._dropped_in_a_row = 0
        except AttemptFailed as failed:
            await anyio.lowlevel.checkpoint_if_cancelled()  # that was it, not the attempt
            await self._failed(record, failed.reason)

    async def _failed(self, record: LedgerRecord, error: Exception) -> None:
        """Retry after a back-off, or follow `on_dropped_prompt`. Never a stand-in group."""
        state, ordinal = self._state, record.ordinal
        reason = told(error)
        cause: Failure = "data" if isinstance(error, DataFailure) else "infra"
        if cause == "data":
            failed, allowed = record.data_failures, self._failures.max_data_attempts_per_prompt
        else:
            failed, allowed = record.infra_failures, self._failures.max_infra_attempts_per_prompt
        logger.warning(
            "group %s failed (%s): %s",
            record.group_id,
            cause,
            reason,
            exc_info=error if self._dropped_in_a_row == failed == 0 else None,  # one is enough
        )
        if failed + 1 >= allowed:
            try:
                await self._builder.drop(ordinal, lambda: self._skip(record, cause, reason))
            except PromptDropped as exc:
                raise exc from error
            return
        self._backing_off.add(ordinal)
        state.retried(ordinal, cause, reason)
        backoff_s = self._failures.backoff_base_s * 2.0 ** min(failed, 100)  # far above any maximum
        backoff_s = min(backoff_s, self._failures.max_backoff_s)
        await anyio.sleep(backoff_s)
        self._backing_off.remove(ordinal)
        state.touch()

    def _skip(self, record: LedgerRecord, cause: Failure, reason: str) -> None:
        """Drop a prompt without attempts left.

        Raises:
            PromptDropped, TooManyDropped: the settings forbid it; nothing has changed.
        """
        limits, group = self._failures, record.group_id
        if limits.on_dropped_prompt == "fail":
            raise PromptDropped(group, reason)
        skipped, at_most = self._state.ledger.skipped_count, limits.max_skipped_prompts
        if at_most is not None and skipped >= at_most:
            said = f"{skipped} prompts had been dropped"
            raise TooManyDropped(group, reason, said, f"max_skipped_prompts is {at_most}")
        in_a_row = limits.max_consecutive_dropped_prompts
        if self._dropped_in_a_row >= in_a_row:
            said = f"{in_a_row} prompts had been dropped and no group committed since"
            limit = f"max_consecutive_dropped_prompts is {in_a_row}"
            raise TooManyDropped(group, reason, said, limit)
        self._dropped_in_a_row += 1
        shorten = limits.on_dropped_prompt == "shortfall"
        self._state.skipped(record.ordinal, cause, reason, shorten=shorten)


class _FreeSlot:
    """A task that waits to be given its next attempt."""

    __slots__ = ("_attempt", "_woken")

    _attempt: _Attempt  # unset until given

    def __init__(self) -> None:
        self._woken = anyio.Event()

    def give(self, attempt: _Attempt) -> None:
        self._attempt = attempt
        self._woken.set()

    async def given(self) -> _Attempt:
        await self._woken.wait()
        return self._attempt
