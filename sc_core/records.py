"""What the controller remembers: frozen, typed, and the same in memory as on disk.

New fields get defaults, which are left out when written, so that older bundles still decode and
keep their digests; a new meaning gets a new tag.
`gc=False`: a record is a tree of plain data, and in no cycle for the collector to find.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NewType

import msgspec

GroupId = NewType("GroupId", str)  #: `{ordinal}.{attempt}`
SampleId = str  #: of one row: `{group_id}_g{sibling}`
State = Literal["waiting", "in_flight", "committed", "selected"]


def group_id(ordinal: int, attempt: int) -> GroupId:
    """The id of one attempt at a prompt: a late write of an old attempt can't touch a new one."""
    return GroupId(f"{ordinal}.{attempt}")


def sample_ids(group: GroupId, siblings: int) -> tuple[SampleId, ...]:
    """The ids of the rows of a group, in sibling order."""
    return tuple(f"{group}_g{sibling}" for sibling in range(siblings))


class PulledPrompt(msgspec.Struct, frozen=True):
    """What a prompt source gives: a prompt, and the source's position *after* it."""

    payload: Any  #: what msgpack can hold; goes into the cut with the ledger
    position: Any  #: opaque to the controller; what `seek` takes


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt on its way to a rollout worker."""

    ordinal: int
    """Position in the stream over all epochs, never reused; of held-out prompt i, -1 - i."""
    group_id: GroupId  #: of this attempt at it
    payload: Any  #: what the source gave; the same object for all siblings

    @property
    def held_out(self) -> bool:
        """Whether this is a prompt of an evaluation, which is not trained on."""
        return self.ordinal < 0


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One finished sibling, as a rollout worker returns it. It becomes one row."""

    fields: Mapping[str, Any]  #: columns of the row; opaque to the controller
    reward: float  #: what filters, evaluations and reports look at
    tokens: int = 0  #: generated tokens
    end_weight_version: int | None = None
    """Version that produced the last token; None stands for the controller's at completion."""
    masked: bool = False
    """Not to be trained on (cut off at the length limit, say): it moves no baseline, and has no
    part in the loss. It counts as a sibling like any other."""
    engine: str | None = None
    """Who generated it, by the name that weight syncs know. An audit then wants to see that this
    engine had confirmed `end_weight_version`: let the controller hear of it, by `engine_is`, when
    one joins between syncs."""
    components: Mapping[str, float] = {}
    """What the reward is made of, by name, for the metrics `train/reward/NAME` alone."""


class Group(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A committed group: which rows it has and which weights made them. No tensors."""

    group_id: GroupId  #: of the attempt that was committed
    ordinal: int  #: of its prompt
    sample_ids: tuple[SampleId, ...]  #: its rows, in sibling order
    start_weight_version: int  #: stamped before the first request left
    end_weight_version: int  #: the newest that made a token of it
    commit_seq: int  #: position in the order of commits, over the whole run
    target_step: int | None = None  #: weight version it is meant for, under `in_order`
    reward: float = 0.0  #: mean over the siblings that are not masked; if all are, over all
    tokens: int = 0  #: generated tokens, all siblings together
    masked: tuple[int, ...] = ()  #: siblings that are not trained on, ascending
    components: Mapping[str, float] = {}  #: of `reward`, likewise means


def masks_of(group: Group) -> list[bool]:
    """Of each row of a group, whether it is masked."""
    if not group.masked:
        return [False] * len(group.sample_ids)
    return [sibling in group.masked for sibling in range(len(group.sample_ids))]


class FinishedSibling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A sibling whose row is in the data plane while its group is not whole yet."""

    sibling: int
    sample_id: SampleId  #: under the id of the attempt that made it
    reward: float
    tokens: int
    end_weight_version: int
    columns: tuple[str, ...] = ()  #: names, sorted: all siblings of a group have the same
    masked: bool = False  #: as in `Sample`
    engine: str | None = None  #: as in `Sample`
    components: Mapping[str, float] = {}  #: as in `Sample`


class LedgerRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A prompt that left the source and is neither trained nor dropped."""

    ordinal: int  #: position in the stream over all epochs
    payload: Any  #: what the source gave
    state: State = "waiting"  #: where it is on its way
    admitted: bool = False  #: the sampler let it in; it has a place until it is trained or dropped
    attempt: int = 0  #: the present one, or the next
    infra_failures: int = 0  #: attempts that failed, through no fault of the prompt
    data_failures: int = 0  #: attempts that failed because of the prompt itself
    stale_requeues: int = 0  #: times that it went out again for having become too old
    target_step: int | None = None  #: weight version it is meant for, under `in_order`
    start_weight_version: int | None = None  #: of the last attempt, or of the oldest sibling kept
    finished: tuple[FinishedSibling, ...] = ()  #: kept ones, by sibling; none once committed

    @property
    def group_id(self) -> GroupId:
        """Of the present attempt."""
        return group_id(self.ordinal, self.attempt)


def owns_group(record: LedgerRecord) -> bool:
    """Whether the index has a group of it."""
    return record.state == "committed" or record.state == "selected"


class Stamp(msgspec.Struct, frozen=True, gc=False):
    """A sampler's yes to one more group."""

    target_step: int | None = None  #: weight version that the group is meant for; None: for any


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """Groups that train together, in ordinal order, and the rows they own."""

    step: int  #: the step being made, counted from 1
    weight_version: int  #: of the weights that the step starts from
    groups: tuple[Group, ...]  #: by ordinal

    @property
    def sample_ids(self) -> tuple[SampleId, ...]:
        """All rows, group by group, siblings in order."""
        return tuple(row for group in self.groups for row in group.sample_ids)

    @property
    def trained_ids(self) -> tuple[SampleId, ...]:
        """The rows that are not masked: what a gradient may come from. There may be none."""
        if not any(group.masked for group in self.groups):
            return self.sample_ids
        return tuple(
            row
            for group in self.groups
            for row, masked in zip(group.sample_ids, masks_of(group), strict=True)
            if not masked
        )

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Rows of each group."""
        return tuple(len(group.sample_ids) for group in self.groups)


class EvaluatedPrompt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What became of one prompt of an evaluation."""

    number: int  #: among the prompts of the evaluation, from 0
    rewards: tuple[float, ...] = ()  #: by sibling; none if its attempts were used up
    tokens: int = 0  #: generated tokens, all siblings together


class Evaluation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The last evaluation of a run: under way, or finished."""

    weight_version: int  #: of every sample
    fingerprint: str  #: of its prompts, and of how often each is answered
    prompts: int  #: how many are evaluated
    results: tuple[EvaluatedPrompt, ...] = ()  #: so far, in order of arrival
    summary: Mapping[str, float] | None = None  #: its metrics, in place of `results`; None: not yet


class Cut(msgspec.Struct, frozen=True, kw_only=True, tag="cut.v1"):
    """The controller's whole memory at one instant, taken without an await."""

    incarnation: str  #: that took it
    event_seq: int  #: of the last event that belongs to this instant
    step: int  #: finished training steps
    weight_version: int  #: of the weights saved with it
    group_size: int  #: siblings per group (G)
    prompts_per_step: int  #: groups per step (P)
    next_ordinal: int  #: of the next prompt; so many have left the source
    position: Any  #: the prompt source's, after the last prompt recorded; None: untouched
    exhausted: bool = False  #: the source said that it has nothing more
    source_fingerprint: str = ""  #: of the prompts that `position` is a position in
    records: tuple[LedgerRecord, ...] = ()  #: by ordinal
    groups: tuple[Group, ...] = ()  #: by commit order; those of committed and selected records
    sampler: str = ""  #: its name
    sampler_state: Mapping[str, Any] = {}  #: what its `state` returned
    suspects: tuple[SampleId, ...] = ()  #: rows that may exist and must not; cleared on restore
    counters: Mapping[str, int] = {}  #: totals over the effective history
    evaluation: Evaluation | None = None  #: left out when written, as long as there was none
    short_steps: Mapping[int, int] = {}
    """Groups that steps to come go without, by the weight version they start from. Their prompts
    were dropped after failures, under `on_dropped_prompt: shortfall`."""


def rows_of(groups: Iterable[Group], records: Iterable[LedgerRecord]) -> Iterator[SampleId]:
    """The rows that groups and finished siblings own."""
    for group in groups:
        yield from group.sample_ids
    for record in records:
        for one in record.finished:
            yield one.sample_id
