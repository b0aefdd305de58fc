"""`Ledger`: one record per prompt that left the source and is neither trained nor dropped."""

from __future__ import annotations

import math
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

from msgspec.structs import replace

from sc_core.conservation import check_counts, check_index, check_places, check_recount
from sc_core.counts import Counts, Tally
from sc_core.cut import check_cut
from sc_core.digest import payload_digest, record_digest
from sc_core.errors import ConfigChanged, Conservation, SaveError
from sc_core.index import ReplayIndex
from sc_core.ordered import OrderedKeys
from sc_core.records import (
    Cut,
    Evaluation,
    FinishedSibling,
    Group,
    LedgerRecord,
    PulledPrompt,
    SampleId,
    Stamp,
    State,
    owns_group,
    rows_of,
    sample_ids,
)

Failure = Literal["infra", "data"]
Cause = Literal["infra", "data", "commit"]
COUNTERS = (
    "committed", "trained", "dropped", "evicted", "requeued", "aborted", "redispatched",
    "infra_drops", "data_drops", "shortfall",
    "infra_failures", "data_failures", "samples", "tokens",
)  # fmt: skip
"""Groups, except the last four. `evicted` ones left the index untrained: dropped, or `requeued`.
`aborted` ones became stale in flight. `infra_drops` and `data_drops` are those of the `dropped`
that had no attempt left, and `shortfall` those of them that a step went without; `*_failures` are
attempts that were followed by another. `samples` and `tokens` were trained on."""


class Ledger:
    """Every prompt under way, with its state; owns the index, so that both change in one step.

    Implements `SamplerView`. Everything is synchronous, and a call that raises has changed
    nothing: an operation on a prompt in the wrong state raises Conservation and names both.
    """

    def __init__(self, *, prompts_per_step: int) -> None:
        # Invariant: next_ordinal == len(_records) + trained + dropped; _records ascend by
        # ordinal; the index has a group exactly for the committed and the selected ones.
        self.prompts_per_step = prompts_per_step
        self.index = ReplayIndex()
        self.position: Any = None  #: the prompt source's, after the last prompt pulled
        self.next_ordinal = 0
        self.exhausted = False  #: the source has nothing more
        self.step = 0  #: finished training steps; changed by `train` alone
        self.weight_version = 0  #: likewise
        self.counters: dict[str, int] = dict.fromkeys(COUNTERS, 0)
        self.short_steps = Tally()  #: as in `Cut`
        self._records: dict[int, LedgerRecord] = {}
        self._digests: dict[int, int] = {}
        self._payload_digests: dict[int, bytes] = {}
        self._waiting = OrderedKeys()
        self._counts = Counts()
        self._next_commit_seq = 0
        self.siblings_finished = 0  #: ahead of their groups, in this process life
        self.evaluation: Evaluation | None = None  #: the last one, maybe still under way

    def __repr__(self) -> str:
        states = ", ".join(f"{count} {state}" for state, count in self._counts.of_state.items())
        return f"<Ledger of step {self.step}: {states}>"

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, ordinal: object) -> bool:
        return ordinal in self._records

    def get(self, ordinal: int) -> LedgerRecord | None:
        return self._records.get(ordinal)

    def records(self) -> tuple[LedgerRecord, ...]:
        """All records, by ordinal."""
        return tuple(self._records.values())

    def rows(self) -> Iterator[SampleId]:
        """The rows that groups and finished siblings own, in no particular order."""
        return rows_of(self.index.groups(), self._records.values())

    def next_waiting(self, skip: Container[int] = ()) -> LedgerRecord | None:
        """The waiting record with the lowest ordinal that is not in `skip`."""
        for (ordinal,) in self._waiting:
            if ordinal not in skip:
                return self._records[ordinal]
        return None

    # what they add up to --------------------------------------------------------------

    @property
    def digest(self) -> int:
        """Of the records that own a group; see `sc_core.digest`. The others come and go."""
        return self._counts.digest

    @property
    def waiting_count(self) -> int:
        return self._counts.of_state["waiting"]

    @property
    def unadmitted_count(self) -> int:
        """Prompts that wait for the sampler's first yes."""
        return self._counts.unadmitted

    @property
    def in_flight_count(self) -> int:
        return self._counts.of_state["in_flight"]

    @property
    def live_count(self) -> int:
        """Admitted groups, in any state."""
        return self._counts.live

    def live_of_target(self, step: int) -> int:
        return self._counts.of_target.get(step, 0)

    def in_flight_of_version(self, version: int) -> int:
        """Groups in flight, or waiting for a retry, with this start version."""
        return self._counts.uncommitted_of_version.get(version, 0)

    def oldest_live_version(self) -> int | None:
        """Lowest start version of a group that is not selected; a retry keeps its last one."""
        return min(self._counts.unselected_of_version, default=None)

    @property
    def short_count(self) -> int:
        """How many groups steps to come go without, all together."""
        return sum(self.short_steps.values()) if self.short_steps else 0

    def groups_of_target(self, step: int) -> int:
        """P, less the groups that this step goes without; at least one."""
        if not self.short_steps:
            return self.prompts_per_step
        return max(1, self.prompts_per_step - self.short_steps.get(step, 0))

    def groups_of_next(self, steps: int) -> int:
        """What the next so many steps take together, the one under way included."""
        if not self.short_steps:
            return self.prompts_per_step * steps
        version = self.weight_version
        return sum(map(self.groups_of_target, range(version, version + steps)))

    @property
    def skipped_count(self) -> int:
        """Prompts dropped after failures, over the effective history."""
        return self.counters["infra_drops"] + self.counters["data_drops"]

    # one prompt -----------------------------------------------------------------------

    def pull(self, pulled: PulledPrompt) -> LedgerRecord:
        """Record a prompt under a new ordinal, and the source's position with it.

        Raises:
            SaveError: msgpack can't hold the payload.
            Conservation: the source had already ended.
        """
        if self.exhausted:
            raise Conservation(f"pull: prompt {self.next_ordinal} came after the end of prompts")
        try:
            payload = payload_digest(pulled.payload)
        except (TypeError, ValueError, OverflowError, RecursionError) as exc:
            raise SaveError(
                f"prompt {self.next_ordinal}: its payload can't be saved as msgpack: {exc}"
            ) from exc
        record = LedgerRecord(ordinal=self.next_ordinal, payload=pulled.payload)
        self._payload_digests[record.ordinal] = payload
        self._put(record)
        self.next_ordinal += 1
        self.position = pulled.position
        return record

    def end_of_prompts(self) -> None:
        self.exhausted = True

    def dispatch(self, ordinal: int, stamp: Stamp | None) -> LedgerRecord:
        """Waiting to in flight, started under the present weight version, or its oldest sibling's.

        An admitted record needs no stamp and keeps its target step; only where it has none
        does it take that of the stamp.
        """
        old = self._in_state("dispatch", ordinal, "waiting")
        if stamp is None and not old.admitted:
            raise Conservation(f"dispatch: prompt {ordinal} has no stamp and was never admitted")
        if old.attempt:
            self.counters["redispatched"] += 1
        target = old.target_step
        if target is None and stamp is not None:
            target = stamp.target_step
        if target is not None and (type(target) is not int or target < 0):
            raise Conservation(f"dispatch: prompt {ordinal} is stamped with target {target!r}")
        return self._put(
            replace(
                old,
                state="in_flight",
                admitted=True,
                target_step=target,
                start_weight_version=(
                    old.start_weight_version if old.finished else self.weight_version
                ),
            )
        )

    def finish_sibling(self, ordinal: int, finished: FinishedSibling) -> LedgerRecord:
        """Note that a sibling of a group in flight has its row; the group is not whole yet."""
        old = self._in_state("finish_sibling", ordinal, "in_flight")
        if any(one.sibling == finished.sibling for one in old.finished):
            raise Conservation(
                f"finish_sibling: prompt {ordinal} has its sibling {finished.sibling} already"
            )
        kept = sorted((*old.finished, finished), key=lambda one: one.sibling)
        self.siblings_finished += 1
        return self._put(replace(old, finished=tuple(kept)))

    def forget_siblings(self, ordinal: int) -> tuple[SampleId, ...]:
        """Give up the finished siblings of a waiting record; returns their rows, to be cleared."""
        old = self._in_state("forget_siblings", ordinal, "waiting")
        self._put(replace(old, finished=()))
        return tuple(one.sample_id for one in old.finished)

    def retry(self, ordinal: int, cause: Cause) -> LedgerRecord:
        """In flight to waiting, as a new attempt with the same target step and finished siblings.

        `infra` and `commit` count as failures of the infrastructure, `data` as one of the
        prompt.
        """
        old = self._in_state("retry", ordinal, "in_flight")
        infra, data = old.infra_failures, old.data_failures
        match cause:
            case "infra" | "commit":
                infra += 1
                self.counters["infra_failures"] += 1
            case "data":
                data += 1
                self.counters["data_failures"] += 1
        return self._put(
            replace(
                old,
                state="waiting",
                attempt=old.attempt + 1,
                infra_failures=infra,
                data_failures=data,
            )
        )

    def commit(
        self,
        ordinal: int,
        *,
        rewards: Sequence[float],
        tokens: int,
        end_weight_version: int,
        rows: Sequence[SampleId] | None = None,
        masked: Sequence[int] = (),
        components: Sequence[Mapping[str, float]] = (),
    ) -> Group:
        """In flight to committed; the index has its group, of one row per reward.

        `rows` are those of finished siblings; None: those of this attempt. `masked` are the
        siblings that are not trained on. `components` are those of each reward, if any has some.
        """
        old = self._in_state("commit", ordinal, "in_flight")
        start = old.start_weight_version
        if start is None or not start <= end_weight_version <= self.weight_version:
            raise Conservation(
                f"commit: group {old.group_id} ended at weight version {end_weight_version}, not"
                f" between its start at {start} and the present {self.weight_version}"
            )
        if not rewards:
            raise Conservation(f"commit: group {old.group_id} has no rows")
        group_id = old.group_id
        counted = [n for n in range(len(rewards)) if n not in masked] if masked else ()
        told = [rewards[n] for n in counted] if counted else rewards
        group = Group(
            group_id=group_id,
            ordinal=ordinal,
            sample_ids=sample_ids(group_id, len(rewards)) if rows is None else tuple(rows),
            start_weight_version=start,
            end_weight_version=end_weight_version,
            commit_seq=self._next_commit_seq,
            target_step=old.target_step,
            reward=math.fsum(told) / len(told),
            tokens=tokens,
            masked=tuple(masked),
            components=_means(components, counted) if any(components) else {},
        )
        self.index.add(group)
        self._put(replace(old, state="committed", finished=()))
        self._next_commit_seq += 1
        self.counters["committed"] += 1
        return group

    def drop(
        self,
        ordinal: int,
        reason: str,
        *,
        after: Failure | None = None,
        short_step: int | None = None,
    ) -> LedgerRecord:
        """Forget a prompt in any state, and its group if it has one; returns its last record.

        `after` is what it failed of, if that is why; `short_step` a step that now goes without
        its group, one that `can_shorten`.
        """
        old = self._in_state(f"drop ({reason})", ordinal, *get_args(State))
        if owns_group(old):
            self.index.remove(old.group_id)
            self.counters["evicted"] += 1
        self._forget(old)
        self.counters["dropped"] += 1
        if after is not None:
            self.counters[f"{after}_drops"] += 1
        if short_step is not None:
            self.short_steps.shift(short_step, 1)
            self.counters["shortfall"] += 1
        return old

    def can_shorten(self, step: int | None) -> int | None:
        """That step, if it can go without a group, or the next if it has all of its groups.

        None: it is none to come, or would be left with no group.

        Raises:
            Conservation: a sampler named something that is no step.
        """
        version = self.weight_version
        if step is not None and type(step) is not int:
            raise Conservation(f"a step can't go without a group: {step!r} is no weight version")
        if step is None or step < version:
            return None
        if step == version and self.index.selected_count >= self.groups_of_target(version):
            step += 1
        return step if self.groups_of_target(step) > 1 else None

    def requeue(self, ordinal: int) -> LedgerRecord:
        """Committed to waiting, as a new attempt that has not started.

        A target step that has passed is cleared, and the sampler has to stamp it anew.
        """
        old = self._in_state("requeue", ordinal, "committed")
        self.index.remove(old.group_id)
        self.counters["evicted"] += 1
        self.counters["requeued"] += 1
        return self._anew(old)

    def abort(self, ordinal: int, *, requeue: bool) -> LedgerRecord:
        """In flight to waiting as in `requeue`, without its finished siblings; or dropped."""
        old = self._in_state("abort", ordinal, "in_flight")
        self.counters["aborted"] += 1
        return self._anew(old) if requeue else self.drop(ordinal, "aborted")

    def _anew(self, old: LedgerRecord) -> LedgerRecord:
        target = old.target_step
        if target is not None and target < self.weight_version:
            target = None
        return self._put(
            replace(
                old,
                state="waiting",
                attempt=old.attempt + 1,
                stale_requeues=old.stale_requeues + 1,
                target_step=target,
                start_weight_version=None,
                finished=(),
            )
        )

    # one step -------------------------------------------------------------------------

    def select(self, groups: Iterable[Group]) -> None:
        """Committed to selected."""
        self._shift("select", groups, "committed", "selected")

    def abandon(self, groups: Iterable[Group]) -> None:
        """Selected to committed, each in its old place."""
        self._shift("abandon", groups, "selected", "committed")

    def train(self, groups: Iterable[Group]) -> None:
        """Selected to gone: one more finished step, and the next weight version."""
        groups = list(groups)
        for old in self._all_in_state("train", groups, "selected"):
            group = self.index.remove(old.group_id)
            self._forget(old)
            self.counters["trained"] += 1
            self.counters["samples"] += len(group.sample_ids)
            self.counters["tokens"] += group.tokens
        self.short_steps.pop(self.weight_version, None)
        self.step += 1
        self.weight_version += 1
        if self.evaluation is not None and self.evaluation.summary is None:
            self.evaluation = None  # nobody finished it, and nobody can any more

    def retarget(self, *, untargeted: bool = False) -> None:
        """Give live groups the lowest targets from the present version on, by ordinal.

        Selected groups keep theirs; so do groups without one, unless `untargeted`. Closes the
        gaps that a changed step size, smaller capacity or the end of prompts leaves, not those
        of short steps.
        """
        taken = Tally()
        for record in self._records.values():
            if record.state == "selected" and record.target_step is not None:
                taken.shift(record.target_step, 1)
        target = self.weight_version
        for record in self.records():
            if not record.admitted or record.state == "selected":
                continue
            if record.target_step is None and not untargeted:
                continue
            while taken.get(target, 0) >= self.groups_of_target(target):
                target += 1
            taken.shift(target, 1)
            if record.target_step == target:
                continue
            self._put(replace(record, target_step=target))
            group = self.index.get(record.group_id)
            if group is not None:
                self.index.replace(replace(group, target_step=target))

    def _shift(self, operation: str, groups: Iterable[Group], before: State, after: State) -> None:
        groups = list(groups)
        records = self._all_in_state(operation, groups, before)
        (self.index.select if after == "selected" else self.index.unselect)(groups)
        for old in records:
            self._put(replace(old, state=after), self._digests[old.ordinal])

    # save and restore -----------------------------------------------------------------

    def cut(
        self,
        *,
        incarnation: str,
        event_seq: int,
        group_size: int,
        sampler: str,
        sampler_state: Mapping[str, Any],
        source_fingerprint: str,
        suspects: Iterable[SampleId],
    ) -> Cut:
        """Everything, as of now. Costs one copy of the lists of records and groups."""
        return Cut(
            incarnation=incarnation,
            event_seq=event_seq,
            step=self.step,
            weight_version=self.weight_version,
            group_size=group_size,
            prompts_per_step=self.prompts_per_step,
            next_ordinal=self.next_ordinal,
            position=self.position,
            exhausted=self.exhausted,
            source_fingerprint=source_fingerprint,
            records=self.records(),
            groups=self.index.groups(),
            sampler=sampler,
            sampler_state=dict(sampler_state),
            suspects=tuple(suspects),
            counters=dict(self.counters),
            evaluation=self.evaluation,
            short_steps=dict(self.short_steps),
        )

    @classmethod
    def restored(cls, cut: Cut, *, prompts_per_step: int, group_size: int) -> Ledger:
        """The ledger of `cut`, with nothing in flight and no step open.

        What was in flight waits for a new attempt, which counts as no failure, and keeps its
        finished siblings; what was selected is committed.

        Raises:
            BundleInconsistent: the cut contradicts itself.
            ConfigChanged: its groups are of another size.
        """
        check_cut(cut)
        if cut.group_size != group_size:
            raise ConfigChanged(
                f"the cut's groups have {cut.group_size} rows and this run's {group_size}"
            )
        ledger = cls(prompts_per_step=prompts_per_step)
        ledger.position, ledger.exhausted = cut.position, cut.exhausted
        ledger.next_ordinal = cut.next_ordinal
        ledger.step, ledger.weight_version = cut.step, cut.weight_version
        ledger.counters |= cut.counters
        ledger.evaluation = cut.evaluation
        ledger.short_steps.update(cut.short_steps)
        for record in cut.records:
            if record.state == "in_flight":
                record = replace(record, state="waiting", attempt=record.attempt + 1)
            elif record.state == "selected":
                record = replace(record, state="committed")
            ledger._payload_digests[record.ordinal] = payload_digest(record.payload)
            ledger._put(record)
        for group in cut.groups:
            ledger.index.add(group)
            ledger._next_commit_seq = group.commit_seq + 1
        ledger._next_commit_seq = max(ledger._next_commit_seq, ledger.counters["committed"])
        return ledger

    def audit(self, holders: Iterable[Hashable] | None = None) -> None:
        """Check the conservation law by counting everything anew, in O(records).

        `holders` are the ordinals that hold a place: every admitted one, and none that is gone.

        Raises:
            Conservation: the first thing that is wrong.
        """
        check_counts(self.next_ordinal, self._records.values(), self.counters)
        check_index(self._records.values(), self.index)
        check_recount(self._records.values(), self._counts)
        if holders is not None:
            check_places(self._records, frozenset(holders))

    # every change of a record goes through these --------------------------------------

    def _put(self, record: LedgerRecord, digest: int | None = None) -> LedgerRecord:
        ordinal = record.ordinal
        if digest is None:
            payload = self._payload_digests[ordinal]
            digest = record_digest(record, payload) if owns_group(record) else 0
        if ordinal in self._records:
            self._count_out(self._records[ordinal])
        self._records[ordinal] = record
        self._digests[ordinal] = digest
        self._counts.shift(record, digest, 1)
        if record.state == "waiting":
            self._waiting.add((ordinal,))
        return record

    def _forget(self, record: LedgerRecord) -> None:
        self._count_out(record)
        del self._records[record.ordinal], self._payload_digests[record.ordinal]

    def _count_out(self, record: LedgerRecord) -> None:
        self._counts.shift(record, self._digests.pop(record.ordinal), -1)
        if record.state == "waiting":
            self._waiting.remove((record.ordinal,))

    def _in_state(self, operation: str, ordinal: int, *states: State) -> LedgerRecord:
        record = self._records.get(ordinal)
        if record is None:
            raise Conservation(
                f"{operation}: prompt {ordinal} is not live; it was trained, dropped or not pulled"
            )
        if record.state not in states:
            raise Conservation(
                f"{operation}: prompt {ordinal} is {record.state}, not {' or '.join(states)}"
            )
        return record

    def _all_in_state(
        self, operation: str, groups: Sequence[Group], state: State
    ) -> list[LedgerRecord]:
        records = {
            group.ordinal: self._in_state(operation, group.ordinal, state) for group in groups
        }
        if len(records) != len(groups):
            raise Conservation(f"{operation}: {len(groups)} groups of {len(records)} prompts")
        for group in groups:
            record = records[group.ordinal]
            if record.group_id != group.group_id:
                raise Conservation(
                    f"{operation}: group {group.group_id} is not of the present attempt"
                    f" {record.group_id}"
                )
        return list(records.values())


def _means(components: Sequence[Mapping[str, float]], counted: Sequence[int]) -> dict[str, float]:
    """By name, over the siblings counted, or all of them; one that has no such number has 0."""
    each = [components[n] for n in counted] if counted else components
    names = sorted({name for one in components for name in one})
    return {name: math.fsum(one.get(name, 0.0) for one in each) / len(each) for name in names}
