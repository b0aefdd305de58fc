"""What the pumps share. Ledger, places, event log and wake-ups move together, or not at all.

Every method that changes something is synchronous: between two awaits of anybody, the run is
in exactly one state, and the event log says how it got there.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import anyio

from sc_core.barrier import Section
from sc_core.calls import ended_from_outside, failed, writable
from sc_core.errors import Conservation
from sc_core.ledger import Cause, Failure, Ledger
from sc_core.places import Places
from sc_core.ports import EngineState, EventKind, EventSink, Sampler
from sc_core.records import Cut, Evaluation, Group, LedgerRecord, PulledPrompt, SampleId, Stamp
from sc_core.spans import COMMITS, WAITED, Spans
from sc_core.watched import Watched

logger = logging.getLogger(__name__)

GROUPS_READY = "groups to train on"
EVALUATED = "the results of an evaluation"
DRAINED = "the end of all rollout requests"
GATE_OPEN = "the weight gate"
PUBLISHED = "the bundle under way"
_REASONS = 3  #: of failures and drops, kept for a report; the event log has all


class RunState:
    """The live state of one run."""

    def __init__(
        self,
        ledger: Ledger,
        places: Places,
        sampler: Sampler,
        events: EventSink,
        *,
        spans: Spans | None = None,
        clock: Callable[[], float] = anyio.current_time,
    ) -> None:
        self._clock = clock  #: a replay has none
        self.spans = spans or Spans()
        self.ledger = ledger
        self.places = places
        self.sampler = sampler
        self.events = events
        self.gate_closed_for: str | None = "start"  #: who closed the weight gate; None: open
        self.engines: tuple[str, ...] = ()  #: that confirmed the last sync, or joined since
        self.engines_away: dict[str, str] = {}  #: neither serving nor out: what, and why
        self.engines_out: dict[str, str] = {}  #: put out of service, and why
        self._synced: tuple[str, ...] | None = None  #: what the last `weight_sync` event says
        self._confirmed: dict[str, int] = {}  #: versions, in the sync under way
        self._left: set[str] = set()  #: engines that ceased to serve since it began
        self.trained_at: float | None = None  #: when the last step was, on the loop's clock
        self.last_failures: deque[str] = deque(maxlen=_REASONS)  #: of attempts to be repeated
        self.last_drops: deque[str] = deque(maxlen=_REASONS)
        self.stop_reason: str | None = None  #: set once somebody asked the run to stop
        self.save_on_stop = True
        self.save_requested = False
        self.requests = Watched(0)  #: rollout calls under way, or about to begin
        self.evaluating = 0  #: in-flight slots that an evaluation holds or waits for
        self.progress = 0
        """Trained steps, evaluations, syncs and saves so far; what the watchdog looks at."""
        self.log_failure: Exception | None = None  #: why the event log took no more
        self.commit_wait_s = 0.0  #: total time that commits waited for the barrier
        self._changes: Watched[RunState] = Watched(self)

    async def wait_until(self, accepts: Callable[[RunState], bool], what: str = "") -> None:
        """Return once `accepts` has held; the caller re-checks, and acts without an await."""
        await self._changes.wait_until(accepts, what)

    def touch(self) -> None:
        """Let those who wait look again."""
        self._changes.touch()

    @property
    def nothing_more(self) -> bool:
        """Whether no group can become ready any more: what is ready now is all there is."""
        ledger = self.ledger
        return ledger.exhausted and not ledger.waiting_count and not ledger.in_flight_count

    # prompts --------------------------------------------------------------------------

    def pulled(self, pulled: PulledPrompt) -> LedgerRecord:
        record = self.ledger.pull(pulled)
        self._append_many("admitted", [{"ordinal": record.ordinal}])
        return record

    def end_of_prompts(self) -> None:
        self.ledger.end_of_prompts()
        self._emit("exhausted")

    def dispatched(self, ordinal: int, stamp: Stamp | None) -> LedgerRecord:
        if ordinal not in self.places:
            self.places.take(ordinal)
        record = self.ledger.dispatch(ordinal, stamp)
        self._emit(
            "dispatched",
            ordinal=ordinal,
            group_id=record.group_id,
            weight_version=record.start_weight_version,
            step=record.target_step,
        )
        return record

    def retried(self, ordinal: int, cause: Cause, reason: str) -> LedgerRecord:
        record = self.ledger.retry(ordinal, cause)
        self.last_failures.append(reason)
        self._emit("redispatched", ordinal=ordinal, group_id=record.group_id, reason=reason)
        return record

    def dropped(
        self,
        ordinal: int,
        reason: str,
        *,
        after: Failure | None = None,
        short_step: int | None = None,
    ) -> LedgerRecord:
        record = self.ledger.drop(ordinal, reason, after=after, short_step=short_step)
        self._gone(record, reason, short_step)
        return record

    def _gone(self, record: LedgerRecord, reason: str, short_step: int | None = None) -> None:
        self.last_drops.append(reason)
        ordinal = record.ordinal
        if ordinal in self.places:
            self.places.release(ordinal)
        self.close_gap()
        self._emit(
            "dropped", ordinal=ordinal, group_id=record.group_id, reason=reason, step=short_step
        )

    def aborted(self, record: LedgerRecord, *, requeue: bool, reason: str) -> None:
        """A group in flight that has become too old: its prompt goes out again, or is dropped."""
        left = self.ledger.abort(record.ordinal, requeue=requeue)
        if self.sampler.stamps_targets:
            self.ledger.retarget(untargeted=True)
        ordinal = record.ordinal
        self._emit("aborted", ordinal=ordinal, group_id=record.group_id, reason=reason)
        if requeue:
            self._emit("redispatched", ordinal=ordinal, group_id=left.group_id, reason=reason)
        else:
            self._gone(left, reason)

    def skipped(self, ordinal: int, after: Failure, reason: str, *, shorten: bool) -> None:
        """Drop a prompt that used up its attempts; with `shorten` a step goes without it."""
        step, record = None, self.ledger.get(ordinal)
        if shorten and record is not None:
            step = self.ledger.can_shorten(self.sampler.step_of(self.ledger, record))
        kind = f"{after} failure" if step is None else f"{after} failure, step made shorter"
        self.dropped(ordinal, f"{kind}: {reason}", after=after, short_step=step)

    def close_gap(self) -> None:
        """Let later groups move up where the next step is short of groups and none can come.

        That is so while more are live than there are places: the settings were changed.
        """
        ledger = self.ledger
        version = ledger.weight_version
        short = ledger.live_of_target(version) < ledger.groups_of_target(version)
        if self.sampler.stamps_targets and short and not self.places.free:
            ledger.retarget()

    # groups ---------------------------------------------------------------------------

    def committed(
        self,
        ordinal: int,
        *,
        rewards: Sequence[float],
        tokens: int,
        end_weight_version: int,
        rows: Sequence[SampleId] | None = None,
        masked: Sequence[int] = (),
        served: Mapping[str, tuple[int, ...]] | None = None,
        components: Sequence[Mapping[str, float]] = (),
    ) -> Group:
        group = self.ledger.commit(
            ordinal,
            rewards=rewards,
            tokens=tokens,
            end_weight_version=end_weight_version,
            rows=rows,
            masked=masked,
            components=components,
        )
        self._emit(
            "committed",
            ordinal=ordinal,
            group_id=group.group_id,
            weight_version=group.start_weight_version,
            served=served,
        )
        return group

    def selected(self, groups: Sequence[Group], step: int) -> None:
        self.ledger.select(groups)
        try:
            self._record_each("selected", groups, step=step)
        except Exception:
            self.ledger.abandon(groups)
            raise

    def abandoned(self, groups: Sequence[Group], step: int) -> None:
        self.ledger.abandon(groups)
        self._record_each("abandoned", groups, step=step)
        self.touch()

    def trained(self, groups: Sequence[Group]) -> None:
        """One finished step: the groups are gone, the version is the next, the gate is closed."""
        self.ledger.train(groups)
        for group in groups:
            self.places.release(group.ordinal)
        self.close_gap()
        self.gate_closed_for = f"weight sync of version {self.ledger.weight_version}"
        self.progress += 1
        self.trained_at = self._clock()
        self._record_each(
            "trained", groups, step=self.ledger.step, weight_version=self.ledger.weight_version
        )
        self.touch()

    def evicted(self, group: Group, *, requeue: bool, reason: str) -> None:
        """A committed group that has become too old: its prompt goes out again, or is dropped.

        Raises:
            Conservation: a sampler gave up a group that is not ready; nothing has changed.
        """
        index = self.ledger.index
        if group.group_id not in index or index.is_selected(group.group_id):
            raise Conservation(
                f"sampler {self.sampler.name} gives up group {group.group_id}, which is not ready"
            )
        self._emit("evicted", ordinal=group.ordinal, group_id=group.group_id, reason=reason)
        if requeue:
            self.regenerated(group, reason)
        else:
            self.dropped(group.ordinal, reason)

    def regenerated(self, group: Group, reason: str) -> None:
        """A committed group is given up and its prompt goes out again. It keeps its place."""
        record = self.ledger.requeue(group.ordinal)
        self._emit("redispatched", ordinal=group.ordinal, group_id=record.group_id, reason=reason)

    # the run --------------------------------------------------------------------------

    def restored(self, cut: Cut, *, load_replay_buffer: bool) -> None:
        """Make the ledger of `cut` fit the settings of now, before anything starts.

        Targets are given anew where sampler or step size changed, or where the committed groups
        go out again.
        """
        ledger = self.ledger
        if not load_replay_buffer:
            for group in ledger.index.groups():
                self.regenerated(group, reason="load_replay_buffer is false")
        now = self.sampler.name, ledger.prompts_per_step
        changed = (cut.sampler, cut.prompts_per_step) != now
        if self.sampler.stamps_targets and (changed or not load_replay_buffer):
            ledger.retarget(untargeted=True)
        self.close_gap()

    def record(self, kind: EventKind, **fields: Any) -> None:
        """Tell the event log of something that changes neither ledger nor places."""
        self._append_many(kind, [fields])

    def engine_is(
        self,
        engine: str,
        now: EngineState,
        reason: str = "",
        *,
        confirmed: int | None = None,
        log: bool = True,
    ) -> None:
        """An engine's state has changed, or it has confirmed a version between two syncs.

        Of one that ceases to serve in a sync, the log gets to know what it had confirmed in it.
        """
        if now == "serving":
            self._left.discard(engine)
        else:
            self._left.add(engine)
            if confirmed is None:
                confirmed = self._confirmed.pop(engine, None)
        self.engines = tuple(name for name in self.engines if name != engine)
        for others in (self.engines_away, self.engines_out):
            others.pop(engine, None)
        told = writable(f"{now}: {reason}" if reason else now)
        if now == "serving":
            self.engines = tuple(sorted((*self.engines, engine)))
        elif now == "out":
            self.engines_out[engine] = reason
        else:
            self.engines_away[engine] = told
        if log:
            self.record("engine", engines=(engine,), weight_version=confirmed, reason=told)

    def engine_out(self, engine: str, reason: str) -> None:
        """An engine was put out of service."""
        logger.error("engine %s is out of service: %s", engine, reason)
        self.engine_is(engine, "out", reason)

    def sync_begins(self) -> None:
        """The weights are about to move."""
        self._confirmed, self._left = {}, set()

    def sync_confirmed(self, confirmed: Mapping[str, int], *, back: Iterable[str]) -> None:
        """These engines have loaded; `back` had been put out, and others came under their names."""
        self._confirmed = dict(confirmed)
        self._left.difference_update(back)

    def open_gate(self, engines: Iterable[str], *, reason: str | None = None) -> None:
        """These engines have confirmed the current version: dispatching may go on.

        Those that have ceased to serve meanwhile are none of them.
        """
        confirmed = tuple(sorted({*engines} - self._left))
        self._confirmed = {}
        for others in (self.engines_away, self.engines_out):
            for back in others.keys() & confirmed:
                del others[back]
        same, self._synced = confirmed == self._synced, confirmed
        self.engines = confirmed
        self.gate_closed_for = None
        self.progress += 1
        self._emit(
            "weight_sync",
            weight_version=self.ledger.weight_version,
            step=self.ledger.step,
            engines=None if same else confirmed,
            reason=reason,
        )

    def saved(self, **fields: Any) -> None:
        self.progress += 1
        self._emit("checkpoint", **fields)

    def waited(self, section: Section, group_id: str) -> None:
        """What a group wanted to write has waited for the barrier."""
        self.commit_wait_s += section.waited_s
        if self.spans.on:
            began = self.spans.now() - section.waited_s
            self.spans.add(COMMITS, WAITED, began, group_id=group_id, note=section.label)

    def evaluated(self, evaluation: Evaluation) -> None:
        """The evaluation under way is a result further, or finished."""
        self.ledger.evaluation = evaluation
        self.progress += evaluation.summary is not None
        self.touch()

    def request_stop(self, reason: str, *, save: bool = True) -> None:
        """The first reason counts; one request without a save is enough for there to be none."""
        self.save_on_stop = self.save_on_stop and save
        if self.stop_reason is None:
            self.stop_reason = writable(reason)
            self.touch()

    def request_save(self) -> None:
        self.save_requested = True
        self.touch()

    def audit(self) -> None:
        """Check the conservation law over ledger, index and places.

        Raises:
            Conservation: naming the first ordinal or count that is wrong.
        """
        self.ledger.audit(self.places.holders())

    def _emit(self, kind: EventKind, **fields: Any) -> None:
        self._append_many(kind, [fields])
        self.touch()

    def _record_each(self, kind: EventKind, groups: Sequence[Group], **fields: Any) -> None:
        self._append_many(
            kind, [{"ordinal": g.ordinal, "group_id": g.group_id, **fields} for g in groups]
        )

    def _append_many(self, kind: EventKind, each: Sequence[Mapping[str, Any]]) -> None:
        """Once one append has failed, all others do: a log with a hole would contradict itself."""
        self.require_log()
        try:
            if len(each) == 1:
                self.events.append(kind, **each[0])
            else:
                self.events.append_many(kind, each)
        except Exception as exc:
            self.log_failure = failed(f"appending {kind} to the event log", exc)
            raise self.log_failure from exc
        except BaseException as exc:  # of a cancel that no await was there for
            call = f"appending {kind} to the event log"
            self.log_failure = ended_from_outside(call)
            exc.add_note(call)
            raise

    def require_log(self) -> None:
        """Raise what an earlier append raised: no cut may tell of what the log does not."""
        if self.log_failure is not None:
            raise self.log_failure


class Stopwatch:
    """Adds up seconds per name, for `timing/…` metrics."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = anyio.current_time()
        try:
            yield
        finally:
            self.add(name, anyio.current_time() - started)
