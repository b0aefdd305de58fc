"""The rollout pump: which prompt goes out next, and what becomes of each attempt.

A sampler's yes lets a prompt leave the source; a place, an in-flight slot and the open weight
gate let it be dispatched. Stamp and dispatch are one synchronous step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import anyio
from anyio.abc import TaskGroup

from sc_core.barrier import CheckpointBarrier
from sc_core.calls import in_tree
from sc_core.config import ControllerConfig
from sc_core.errors import (
    CallTimeout,
    DataFailure,
    DataPlaneError,
    EndOfPrompts,
    PromptDropped,
    RolloutError,
    RowsNotCleared,
    WorkerDied,
    root_cause,
)
from sc_core.ledger import Cause
from sc_core.ports import GroupFilter, PromptSource, RolloutWorker
from sc_core.records import LedgerRecord, Prompt, Sample, Stamp, sample_ids
from sc_core.returned import check_sample
from sc_core.rows import Rows
from sc_core.state import RunState

logger = logging.getLogger(__name__)


class RolloutPump:
    """Keeps prompts flowing from the source to committed groups until it is cancelled."""

    def __init__(
        self,
        state: RunState,
        config: ControllerConfig,
        source: PromptSource,
        worker: RolloutWorker,
        rows: Rows,
        barrier: CheckpointBarrier,
        group_filter: GroupFilter | None,
        *,
        max_inflight: int,
    ) -> None:
        self._state = state
        self._source = source
        self._worker = worker
        self._rows = rows
        self._barrier = barrier
        self._filter = group_filter
        self._siblings = config.grpo.num_generations_per_prompt
        self._failures = config.async_rl.rollout_failure
        self._deadlines = config.async_rl.deadlines
        self._max_inflight = max_inflight
        self._dropped_in_a_row = 0  #: after failures, since the last commit
        self._backing_off: set[int] = set()  #: ordinals that wait before their next attempt
        self._free: list[_FreeSlot] = []  #: tasks that wait for another attempt to make

    async def run(self) -> None:
        """Pull and dispatch for ever; a cancel ends every attempt and leaves no half group."""
        async with anyio.create_task_group() as attempts:
            attempts.start_soon(in_tree, self._pull, attempts)
            while True:  # restored prompts, retries, and whatever a closed gate kept waiting
                await self._state.wait_until(lambda _: self._next_dispatch() is not None)
                self._dispatch(attempts)

    def _dispatch(self, attempts: TaskGroup) -> None:
        """Start every attempt that may start now."""
        requests = self._state.requests
        while (ready := self._next_dispatch()) is not None:
            # Counted here, not where each begins: a drain must not overlook those about to.
            requests.set(requests.value + self._siblings)
            record = self._state.dispatched(*ready)
            if self._free:
                self._free.pop().give(record)
            else:
                attempts.start_soon(in_tree, self._run_slot, record)

    # choosing --------------------------------------------------------------------------

    def _may_pull(self, state: RunState) -> bool:
        """No prompt leaves the source before the sampler wants it and a place is free."""
        ledger = state.ledger
        return (
            not ledger.exhausted
            and state.stop_reason is None
            and ledger.unadmitted_count == 0
            and state.places.free > 0
            and state.sampler.admit(ledger) is not None
        )

    async def _pull(self, attempts: TaskGroup) -> None:
        state, deadline_s = self._state, self._deadlines.source_s
        with anyio.CancelScope() as in_time:  # one for all calls: its deadline moves
            while True:
                await state.wait_until(self._may_pull)
                if not self._may_pull(state):
                    continue
                in_time.deadline = anyio.current_time() + deadline_s
                try:
                    pulled = await self._source.next_prompt()
                except EndOfPrompts:
                    state.end_of_prompts()
                    return
                in_time.deadline = math.inf
                state.pulled(pulled)
                self._dispatch(attempts)
        raise CallTimeout("source.next_prompt", deadline_s)

    def _next_dispatch(self) -> tuple[int, Stamp | None] | None:
        """The lowest waiting ordinal that may leave now, with its stamp if it needs one."""
        state, ledger = self._state, self._state.ledger
        if (
            state.gate_closed_for is not None
            or state.stop_reason is not None
            or ledger.in_flight_count >= self._max_inflight
            or not ledger.waiting_count
        ):
            return None
        record = ledger.next_waiting(self._backing_off)
        if record is None:
            return None
        if record.admitted:  # a retry, or restored: it has its place, and its target
            return record.ordinal, None
        if record.ordinal not in state.places and state.places.free == 0:
            return None
        stamp = state.sampler.admit(ledger)
        return None if stamp is None else (record.ordinal, stamp)

    # one attempt -----------------------------------------------------------------------

    async def _run_slot(self, record: LedgerRecord) -> None:
        """Make one attempt after another: waking a task costs half of starting one."""
        while True:
            await self._attempt(record)
            slot = _FreeSlot()
            self._free.append(slot)
            record = await slot.given()

    async def _attempt(self, record: LedgerRecord) -> None:
        error: BaseException
        try:
            samples = await self._generate(record)
        except Exception as exc:
            error = root_cause(exc)
            if isinstance(error, WorkerDied):  # nobody is left to try it again
                raise
        else:
            try:
                await self._commit(record, samples)
                return
            except RowsNotCleared:
                raise
            except (DataPlaneError, DataFailure) as exc:  # the rows are gone again
                error = exc
        await self._failed(record, error)

    async def _generate(self, record: LedgerRecord) -> list[Sample]:
        assert record.start_weight_version is not None
        version = record.start_weight_version
        prompt = Prompt(ordinal=record.ordinal, group_id=record.group_id, payload=record.payload)
        requests = self._state.requests
        finished: dict[int, Sample] = {}

        async def one(sibling: int) -> None:
            try:
                with anyio.move_on_after(self._deadlines.rollout_s):
                    finished[sibling] = check_sample(
                        await in_tree(self._worker.rollout, prompt, sibling, version),
                        prompt.group_id,
                        sibling,
                        weight_versions=range(version, self._state.ledger.weight_version + 1),
                    )
                    return
                raise RolloutError(
                    f"sibling {sibling} of group {prompt.group_id} took longer than"
                    f" {self._deadlines.rollout_s:g} s"
                )
            finally:
                requests.set(requests.value - 1)

        if self._siblings == 1:
            await one(0)
        else:
            async with anyio.create_task_group() as others:
                for sibling in range(1, self._siblings):
                    others.start_soon(one, sibling)
                await one(0)  # in this task: a group has a task less to pay for
        if len(finished) < self._siblings:
            raise RolloutError(
                f"group {prompt.group_id}: {len(finished)} of {self._siblings} siblings"
                " came back; the others were cancelled outside this run"
            )
        return [finished[sibling] for sibling in range(self._siblings)]

    async def _commit(self, record: LedgerRecord, samples: Sequence[Sample]) -> None:
        """Either the group is in the data plane and the index, or nothing changed."""
        state, ordinal = self._state, record.ordinal
        rewards = [sample.reward for sample in samples]
        if self._filter is not None and not self._filter.keep(rewards):
            state.dropped(ordinal, "filtered")
            return
        names = samples[0].fields.keys()
        if any(sample.fields.keys() != names for sample in samples):
            raise DataFailure(f"siblings of group {record.group_id} have different columns")
        fields: dict[str, list[Any]] = {n: [s.fields[n] for s in samples] for n in names}
        ends = [s.end_weight_version for s in samples if s.end_weight_version is not None]

        def arrived(_: None) -> None:
            self._dropped_in_a_row = 0
            state.committed(
                ordinal,
                rewards=rewards,
                tokens=sum(sample.tokens for sample in samples),
                end_weight_version=max(ends, default=state.ledger.weight_version),
            )

        group_id = record.group_id
        section = self._barrier.mutation(f"commit {group_id}")
        async with section:
            state.commit_wait_s += section.waited_s
            await self._rows.put(
                sample_ids(group_id, self._siblings),
                fields,
                [{"reward": reward} for reward in rewards],
                then=arrived,
            )

    async def _failed(self, record: LedgerRecord, error: BaseException) -> None:
        """Retry after a back-off, or follow `on_dropped_prompt`. Never a stand-in group."""
        state, ordinal = self._state, record.ordinal
        reason = f"{type(error).__name__}: {error}"
        cause: Cause = "data" if isinstance(error, DataFailure) else "infra"
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
            self._dropped_in_a_row += 1
            in_a_row = self._failures.max_consecutive_dropped_prompts
            if self._failures.on_dropped_prompt == "fail" or self._dropped_in_a_row > in_a_row:
                raise PromptDropped(record.group_id, reason) from error
            state.dropped(ordinal, f"{cause} failure: {reason}")
            return
        self._backing_off.add(ordinal)
        state.retried(ordinal, cause, reason)
        backoff_s = self._failures.backoff_base_s * 2.0 ** min(failed, 100)  # far above any maximum
        await anyio.sleep(min(backoff_s, self._failures.max_backoff_s))
        self._backing_off.remove(ordinal)
        state.touch()


class _FreeSlot:
    """A task that waits to be given its next attempt."""

    __slots__ = ("_record", "_woken")

    _record: LedgerRecord  # unset until given

    def __init__(self) -> None:
        self._woken = anyio.Event()

    def give(self, record: LedgerRecord) -> None:
        self._record = record
        self._woken.set()

    async def given(self) -> LedgerRecord:
        await self._woken.wait()
        return self._record
