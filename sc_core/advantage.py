"""The advantage stage: read columns, estimate, write the new columns back to the same rows.

The three run side by side over slices of a chunk, so that the estimator computes while the
data plane reads the next slice and writes the one before. An estimator whose scope is the chunk
gets it whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from sc_core.barrier import CheckpointBarrier
from sc_core.calls import at_once, ended_from_outside, in_tree, settle
from sc_core.errors import WrongAnswer
from sc_core.estimates import MASKED, check_estimates, check_reads_masks
from sc_core.ports import AdvantageEstimator, Runner
from sc_core.records import Batch, Group, masks_of
from sc_core.returned import check_columns
from sc_core.rows import Rows
from sc_core.spans import ESTIMATE, READ, WRITE, Spans

_GROUPS_PER_SLICE = 16
"""A slice is one read, one estimate and one write: small enough to overlap, large enough that
the three calls cost less than the rows they move."""

_ESTIMATE = "estimator.estimate"
_Slice = tuple[tuple[str, ...], tuple[int, ...], dict[str, list[Any]]]


class AdvantageStage:
    def __init__(
        self,
        rows: Rows,
        barrier: CheckpointBarrier,
        estimator: AdvantageEstimator,
        runner: Runner,
        *,
        deadline_s: float,
        spans: Spans,
    ) -> None:
        self._rows = rows
        self._barrier = barrier
        self._estimator = estimator
        self._runner = runner
        self._spans = spans
        self._names: frozenset[str] | None = None  #: of the columns that the estimator makes
        self._deadline_s = deadline_s  #: of a heavy estimate; a light one can't be ended

    async def run(self, batch: Batch) -> None:
        """Give every row of `batch` its advantage columns.

        A cancel may leave some rows written and others not; running the stage again on the
        same rows gives the same columns.

        Raises:
            EstimatorError: it returned what can't be trained on, or does not know of masked
                rows and was given some; names the group.
            WrongAnswer, CallFailed, CallTimeout: the estimator's fault.
            DataPlaneError, CallTimeout: the data plane's.
        """
        check_reads_masks(batch, self._estimator.select_fields)
        read, to_estimate = anyio.create_memory_object_stream[_Slice](1)
        estimated, to_write = anyio.create_memory_object_stream[_Slice](1)
        written = 0
        with read, to_estimate, estimated, to_write:  # also when a task never came to start
            async with anyio.create_task_group() as stage:
                stage.start_soon(in_tree, self._fetch, batch, read, name="fetch")
                stage.start_soon(in_tree, self._estimate, to_estimate, estimated, name="estimate")
                written = await in_tree(self._write_back, to_write)
        if written < len(batch.sample_ids):
            raise ended_from_outside("the advantage stage")

    async def _write_back(self, receive: MemoryObjectReceiveStream[_Slice]) -> int:
        written = 0
        async for ids, _, columns in receive:
            async with self._barrier.mutation("advantage write-back"):
                with self._spans(WRITE, "write back"):
                    await self._rows.write_back(ids, columns)
            written += len(ids)
        return written

    async def _fetch(self, batch: Batch, send: MemoryObjectSendStream[_Slice]) -> None:
        wanted = self._estimator.select_fields
        stored = [name for name in wanted if name != MASKED]
        async with send:
            for groups in _slices(batch.groups, self._groups_per_call(batch)):
                ids = tuple(row for group in groups for row in group.sample_ids)
                with self._spans(READ, "read"):
                    columns = await self._rows.get(ids, stored)
                if MASKED in wanted:
                    columns[MASKED] = [one for group in groups for one in masks_of(group)]
                await send.send((ids, tuple(len(g.sample_ids) for g in groups), columns))

    def _groups_per_call(self, batch: Batch) -> int:
        return _GROUPS_PER_SLICE if self._estimator.scope == "group" else len(batch.groups)

    async def _estimate(
        self,
        receive: MemoryObjectReceiveStream[_Slice],
        send: MemoryObjectSendStream[_Slice],
    ) -> None:
        estimate = self._estimator.estimate
        async with receive, send:
            async for ids, sizes, columns in receive:
                with self._spans(ESTIMATE, "estimate"):
                    if self._estimator.heavy:
                        estimated = await settle(
                            _ESTIMATE,
                            self._deadline_s,
                            partial(self._runner, estimate, columns, sizes),
                        )
                    else:
                        estimated = at_once(_ESTIMATE, estimate, columns, sizes)
                read = self._estimator.select_fields
                columns = check_columns(estimated, _ESTIMATE, (), len(ids), WrongAnswer)
                self._names = check_estimates(columns, ids, read=read, names=self._names)
                await send.send((ids, sizes, columns))


def _slices(groups: tuple[Group, ...], size: int) -> Iterator[tuple[Group, ...]]:
    for start in range(0, len(groups), size):
        yield groups[start : start + size]
