"""Ends groups in flight that no step could train on any more: `weight_sync_mode: abort_stale`."""

from __future__ import annotations

import anyio

from sc_core.attempt import AttemptFailed, GroupBuilder
from sc_core.barrier import CheckpointBarrier
from sc_core.config import AsyncRlConfig
from sc_core.records import LedgerRecord
from sc_core.rows import Rows
from sc_core.state import RunState


class StaleAttempts:
    """Knows the attempts under way by their start version; `abort` ends those too old.

    An abort is a cancel of the attempt alone. A put under way is awaited, so a group that was
    just being committed is committed, whole, and the train pump evicts it; otherwise nothing of
    the group is left.
    """

    def __init__(
        self,
        state: RunState,
        config: AsyncRlConfig,
        builder: GroupBuilder,
        rows: Rows,
        barrier: CheckpointBarrier,
    ) -> None:
        self._state = state
        self._config = config
        self._builder = builder
        self._rows = rows
        self._barrier = barrier
        self._under_way: dict[int, dict[int, anyio.CancelScope]] = {}  #: by version, by ordinal

    def abort(self) -> None:
        """End every attempt that is too old for the present version, in O(those)."""
        ledger, may_abort = self._state.ledger, self._state.sampler.may_abort
        for start in [at for at in self._under_way if may_abort(at, ledger.weight_version)]:
            for scope in self._under_way.pop(start).values():
                scope.cancel()

    async def build(self, record: LedgerRecord, weight_version: int) -> bool:
        """`GroupBuilder.build`; False also if the attempt was aborted, and is dropped or requeued.

        Raises: as `GroupBuilder.build`.
        """
        state, start = self._state, record.start_weight_version
        assert start is not None
        if state.sampler.may_abort(start, state.ledger.weight_version):
            self._builder.forgo(record)  # the version moved before this task ran
            await self._give_up(record.ordinal)
            return False
        with anyio.CancelScope() as scope:
            self._under_way.setdefault(start, {})[record.ordinal] = scope
            try:
                return await self._builder.build(record, weight_version)
            except AttemptFailed:
                if not scope.cancel_called:
                    raise
            finally:
                self._forget(start, record.ordinal)
        await self._give_up(record.ordinal)
        return False

    def _forget(self, start: int, ordinal: int) -> None:
        same_start = self._under_way.get(start, {})
        same_start.pop(ordinal, None)
        if not same_start:
            self._under_way.pop(start, None)

    async def _give_up(self, ordinal: int) -> None:
        state, rl = self._state, self._config
        record = state.ledger.get(ordinal)
        assert record is not None and record.start_weight_version is not None
        age = state.ledger.weight_version - record.start_weight_version
        reason = f"stale: {age} versions old"
        requeue = rl.on_stale_prompt == "requeue" and record.stale_requeues < rl.max_stale_requeues
        if not record.finished:
            state.aborted(record, requeue=requeue, reason=reason)
            return
        async with self._barrier.mutation(f"abort {record.group_id}"):
            state.aborted(record, requeue=requeue, reason=reason)
            await self._rows.clear(one.sample_id for one in record.finished)
