"""One attempt at a prompt: its missing siblings side by side, then the whole group at once.

By default a group's rows are written together, when all siblings are there. With
`rollout_recovery.default_granularity: sibling` each row is written as its sibling finishes, so
that a failed attempt, or a restart, generates only those that are missing.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import anyio
import anyio.lowlevel

from sc_core.barrier import CheckpointBarrier
from sc_core.calls import at_once, in_tree
from sc_core.config import ControllerConfig
from sc_core.errors import (
    DataFailure,
    DataPlaneError,
    RolloutError,
    RowsNotCleared,
    TooManyFiltered,
    WorkerDied,
    WrongAnswer,
)
from sc_core.ports import GroupFilter, RolloutWorker
from sc_core.records import (
    FinishedSibling,
    GroupId,
    LedgerRecord,
    Prompt,
    Sample,
    SampleId,
    sample_ids,
)
from sc_core.returned import check_sample
from sc_core.rows import Rows
from sc_core.spans import ENGINES
from sc_core.state import RunState

logger = logging.getLogger(__name__)
_KEEP = "group_filter.keep"
_MANY = 100  #: groups filtered in a row that are worth a warning, or a tenth of the bound


class AttemptFailed(Exception):
    """The attempt left nothing behind that a retry would collide with."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(reason)
        self.reason = reason


class GroupBuilder:
    def __init__(
        self,
        state: RunState,
        config: ControllerConfig,
        worker: RolloutWorker,
        rows: Rows,
        barrier: CheckpointBarrier,
        group_filter: GroupFilter | None,
    ) -> None:
        self._state = state
        self._worker = worker
        self._rows = rows
        self._barrier = barrier
        self._filter = group_filter
        self._max_filtered = config.async_rl.max_consecutive_filtered_groups
        self._filtered_in_a_row = 0  #: since the last commit
        self._worth_a_warning: int | None = _MANY  #: so many; None: there was one
        if self._max_filtered is not None:
            self._worth_a_warning = min(_MANY, -(-self._max_filtered // 10))
        self._siblings = config.grpo.num_generations_per_prompt
        self._rollout_s = config.async_rl.deadlines.rollout_s
        self._keeps_siblings = config.rollout_recovery.default_granularity == "sibling"

    async def build(self, record: LedgerRecord, weight_version: int) -> bool:
        """Generate what `record` has no finished sibling for, and commit the group.

        Returns whether it was committed: the filter may have dropped it. A cancel leaves no half
        group: the siblings that had finished are gone, or in the ledger with their rows.

        Raises:
            AttemptFailed: it may be tried again; finished siblings are kept as configured.
            WorkerDied: nobody is left to generate.
            WrongAnswer: the worker returned no sample.
            TooManyFiltered: the filter keeps nothing; nothing has changed.
            RowsNotCleared, CallTimeout: the state of the data plane is unknown.
        """
        samples = await self._generate(record, weight_version)
        if self._keeps_siblings:
            committed = await self._commit_kept(record.ordinal)
        else:
            whole = [samples[number] for number in range(self._siblings)]
            committed = await self._commit(record, whole)
        if committed:
            self._filtered_in_a_row = 0
        return committed

    def forgo(self, record: LedgerRecord) -> None:
        """Take back what a dispatch counted for an attempt that is not made."""
        requests = self._state.requests
        requests.set(requests.value - (self._siblings - len(record.finished)))

    async def drop(self, ordinal: int, drop: Callable[[], object]) -> None:
        """Call `drop` for a prompt that is not committed; clear the rows of finished siblings."""
        record = self._state.ledger.get(ordinal)
        if record is None or not record.finished:
            drop()
            return
        async with self._barrier.mutation(f"drop {record.group_id}"):
            drop()
            await self._rows.clear(one.sample_id for one in record.finished)

    def missing_siblings(self, ordinal: int) -> int:
        """How many the next attempt has to generate; forgets finished ones that are too old.

        A group is as old as its oldest sibling, and must still be trainable.
        """
        state, record = self._state, self._state.ledger.get(ordinal)
        if record is None or not record.finished or record.start_weight_version is None:
            return self._siblings
        if state.sampler.may_abort(record.start_weight_version, state.ledger.weight_version):
            self._rows.suspects.update(state.ledger.forget_siblings(ordinal))
            return self._siblings
        return self._siblings - len(record.finished)

    # generating ------------------------------------------------------------------------

    async def _generate(self, record: LedgerRecord, weight_version: int) -> Mapping[int, Sample]:
        prompt = Prompt(ordinal=record.ordinal, group_id=record.group_id, payload=record.payload)
        kept = {one.sibling: one.columns for one in record.finished}
        missing = [number for number in range(self._siblings) if number not in kept]
        columns = next(filter(None, kept.values()), None)
        begun: set[int] = set()
        finished: dict[int, Sample] = {}
        failures: list[AttemptFailed] = []

        async def one(sibling: int) -> None:
            nonlocal columns
            begun.add(sibling)
            try:
                sample = await self._rollout(prompt, sibling, weight_version)
                if self._keeps_siblings:
                    columns = columns or _columns(sample)
                    if _columns(sample) != columns:
                        raise AttemptFailed(_different_columns(prompt))
                    await self._keep(prompt, sibling, sample)
                finished[sibling] = sample
            except AttemptFailed as failed:
                if not self._keeps_siblings:
                    raise
                failures.append(failed)  # the others go on: what they finish is kept

        try:
            await self._side_by_side(one, missing)
        finally:  # a task that was cancelled outside this run may never have begun
            requests = self._state.requests
            requests.set(requests.value - (len(missing) - len(begun)))
        if failures:
            raise failures[0]
        if len(finished) < len(missing):
            raise AttemptFailed(
                RolloutError(
                    f"group {prompt.group_id}: {len(finished)} of {len(missing)} siblings"
                    " came back; the others were cancelled outside this run"
                )
            )
        return finished

    async def _side_by_side(
        self, one: Callable[[int], Awaitable[None]], missing: Sequence[int]
    ) -> None:
        if len(missing) == 1:
            await one(missing[0])
        elif missing:
            first, *others = missing
            try:
                async with anyio.create_task_group() as tg:
                    for sibling in others:
                        tg.start_soon(in_tree, one, sibling, name="sibling")
                    await in_tree(one, first)  # in this task: a group has a task less to pay for
            except BaseExceptionGroup as group:
                failed, fatal = group.split(AttemptFailed)
                if fatal is not None:  # or a cancel, beside which a failure is no news
                    raise fatal from None
                assert failed is not None
                raise _first(failed) from None

    async def _rollout(self, prompt: Prompt, sibling: int, weight_version: int) -> Sample:
        requests, spans = self._state.requests, self._state.spans
        began = spans.now() if spans.on else 0.0
        sample: Sample | None = None
        try:
            with anyio.move_on_after(self._rollout_s) as in_time:
                answer = await in_tree(self._worker.rollout, prompt, sibling, weight_version)
                if not isinstance(answer, Sample):
                    await anyio.lowlevel.checkpoint_if_cancelled()  # that was it, not an answer
                sample = check_sample(
                    answer,
                    prompt.group_id,
                    sibling,
                    weight_versions=range(weight_version, self._state.ledger.weight_version + 1),
                )
                if not in_time.cancel_called:  # else it did not mind
                    return sample
            raise RolloutError(
                f"sibling {sibling} of group {prompt.group_id} took longer than"
                f" {self._rollout_s:g} s"
            )
        except (WorkerDied, WrongAnswer):  # nobody is left to try it again, or it can't heal
            raise
        except Exception as exc:
            raise AttemptFailed(exc) from exc
        finally:
            requests.set(requests.value - 1)
            if spans.on:
                spans.add(
                    ENGINES,
                    f"{prompt.group_id}_g{sibling}",
                    began,
                    group_id=prompt.group_id,
                    sibling=sibling,
                    engine=None if sample is None else sample.engine,
                    weight_version=weight_version,
                    note="no sample" if sample is None else None,
                )

    # committing ------------------------------------------------------------------------

    async def _commit(self, record: LedgerRecord, samples: Sequence[Sample]) -> bool:
        """Either the group is in the data plane and the index, or nothing changed."""
        state, group_id = self._state, record.group_id
        rewards = [sample.reward for sample in samples]
        masked = [number for number, sample in enumerate(samples) if sample.masked]
        if self._rejects(group_id, rewards, masked):
            state.dropped(record.ordinal, "filtered")
            return False
        names = samples[0].fields.keys()
        if any(sample.fields.keys() != names for sample in samples):
            raise AttemptFailed(_different_columns(record))
        fields: dict[str, list[Any]] = {n: [s.fields[n] for s in samples] for n in names}

        def arrived(_: None) -> None:
            state.committed(
                record.ordinal,
                rewards=rewards,
                tokens=sum(sample.tokens for sample in samples),
                end_weight_version=max(self._end_version(sample) for sample in samples),
                masked=masked,
                served=_served((s.engine, self._end_version(s)) for s in samples),
                components=[s.components for s in samples],
            )

        section = self._barrier.mutation(f"commit {group_id}")
        async with section:
            if section.waited_s:
                state.waited(section, group_id)
            await self._put(sample_ids(group_id, self._siblings), fields, rewards, arrived)
        return True

    def _rejects(self, group: GroupId, rewards: Sequence[float], masked: Sequence[int]) -> bool:
        """Whether the filter drops a group.

        Raises:
            TooManyFiltered: as it has so many before it, with none committed since.
        """
        if self._filter is None or at_once(_KEEP, self._filter.keep, _trained(rewards, masked)):
            return False
        bound = self._max_filtered
        if bound is not None and self._filtered_in_a_row >= bound:
            raise TooManyFiltered(group, bound)
        self._filtered_in_a_row += 1
        if self._filtered_in_a_row == self._worth_a_warning:
            self._worth_a_warning = None
            logger.warning(
                "group_filter.keep has rejected %d groups and none was committed since;"
                " async_rl.max_consecutive_filtered_groups is %s",
                self._filtered_in_a_row,
                bound,
            )
        return True

    async def _commit_kept(self, ordinal: int) -> bool:
        """Every row is in the data plane: only ledger and index change."""
        record = self._state.ledger.get(ordinal)
        assert record is not None
        rewards = [one.reward for one in record.finished]
        masked = [one.sibling for one in record.finished if one.masked]
        if self._rejects(record.group_id, rewards, masked):
            await self.drop(ordinal, lambda: self._state.dropped(ordinal, "filtered"))
            return False
        section = self._barrier.mutation(f"commit {record.group_id}")
        async with section:
            if section.waited_s:
                self._state.waited(section, record.group_id)
            self._state.committed(
                ordinal,
                rewards=rewards,
                tokens=sum(one.tokens for one in record.finished),
                end_weight_version=max(one.end_weight_version for one in record.finished),
                rows=[one.sample_id for one in record.finished],
                masked=masked,
                served=_served((one.engine, one.end_weight_version) for one in record.finished),
                components=[one.components for one in record.finished],
            )
        return True

    async def _keep(self, prompt: Prompt, sibling: int, sample: Sample) -> None:
        """Either the sibling is in the data plane and the ledger, or nothing changed."""
        row = sample_ids(prompt.group_id, self._siblings)[sibling]

        def arrived(_: None) -> None:
            self._state.ledger.finish_sibling(
                prompt.ordinal,
                FinishedSibling(
                    sibling=sibling,
                    sample_id=row,
                    reward=sample.reward,
                    tokens=sample.tokens,
                    end_weight_version=self._end_version(sample),
                    columns=_columns(sample),
                    masked=sample.masked,
                    engine=sample.engine,
                    components=sample.components,
                ),
            )

        section = self._barrier.mutation(f"row {row}")
        async with section:
            if section.waited_s:
                self._state.waited(section, prompt.group_id)
            fields = {name: [value] for name, value in sample.fields.items()}
            await self._put((row,), fields, (sample.reward,), arrived)

    async def _put(
        self,
        rows: Sequence[SampleId],
        fields: Mapping[str, list[Any]],
        rewards: Sequence[float],
        arrived: Callable[[None], None],
    ) -> None:
        try:
            await self._rows.put(rows, fields, [{"reward": r} for r in rewards], then=arrived)
        except RowsNotCleared:
            raise
        except (DataPlaneError, DataFailure) as exc:  # the rows are gone again
            raise AttemptFailed(exc) from exc

    def _end_version(self, sample: Sample) -> int:
        end = sample.end_weight_version
        return self._state.ledger.weight_version if end is None else end


def _first(failed: BaseExceptionGroup[AttemptFailed]) -> AttemptFailed:
    error: BaseException = failed
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, AttemptFailed)
    return error


def _trained(rewards: Sequence[float], masked: Sequence[int]) -> Sequence[float]:
    """The rewards of the siblings that are trained on."""
    return [r for number, r in enumerate(rewards) if number not in masked] if masked else rewards


def _served(siblings: Iterable[tuple[str | None, int]]) -> dict[str, tuple[int, ...]] | None:
    """The end versions of siblings, by the engines that made them; None if nobody says which."""
    found: dict[str, tuple[int, ...]] = {}
    for engine, version in siblings:
        if engine is not None:
            versions = found.get(engine, ())
            if version not in versions:
                found[engine] = (*versions, version)
    return found or None


def _columns(sample: Sample) -> tuple[str, ...]:
    return tuple(sorted(sample.fields))


def _different_columns(of: Prompt | LedgerRecord) -> DataFailure:
    return DataFailure(f"siblings of group {of.group_id} have different columns")
