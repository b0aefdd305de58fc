"""Every prompt's state as the events of a run tell it, and where they contradict themselves.

Memory grows with the live prompts, plus one byte for each that is trained or dropped.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping

import msgspec

from sc_core.events import Event
from sc_core.ports import EventKind
from sc_core.records import Cut
from sc_core.served import Served

MAX_VIOLATIONS = 1000  #: kept; the others are only counted

_MOVES: Mapping[EventKind, tuple[tuple[str, ...], str]] = {
    "dispatched": (("waiting",), "in_flight"),
    "redispatched": (("in_flight", "waiting", "aborted", "committed", "evicted"), "waiting"),
    "aborted": (("in_flight",), "aborted"),
    "committed": (("in_flight",), "committed"),
    "evicted": (("committed",), "evicted"),
    "selected": (("committed",), "selected"),
    "abandoned": (("selected",), "committed"),
    "trained": (("selected",), "trained"),
    "dropped": (("waiting", "in_flight", "aborted", "committed", "evicted"), "dropped"),
}
"""From which states an event may come, and to which it leads. `aborted` and `evicted` are on
their way to `waiting` or `dropped`."""

_AFTER_RESUME = {"in_flight": "waiting", "aborted": "waiting", "selected": "committed"}
_UNSEEN, _LIVE, _TRAINED, _DROPPED = range(4)
_OUTCOMES = ("never admitted", "admitted", "trained", "dropped")
_GROUP_ID = re.compile(r"(\d{1,18})\.(\d{1,18})", re.ASCII)


class Violation(msgspec.Struct, frozen=True):
    seq: int  #: of the event that breaks the law
    ordinal: int | None
    problem: str

    def __str__(self) -> str:
        prompt = "" if self.ordinal is None else f"ordinal {self.ordinal}: "
        return f"seq {self.seq}: {prompt}{self.problem}"


class Findings:
    """Violations, the first ones in full."""

    def __init__(self) -> None:
        self.kept: list[Violation] = []
        self.count = 0

    def add(self, seq: int, ordinal: int | None, problem: str) -> None:
        self.count += 1
        if self.count <= MAX_VIOLATIONS:
            self.kept.append(Violation(seq, ordinal, problem))


class Prompt(msgspec.Struct):
    """A live prompt."""

    state: str
    group_id: str | None = None  #: of the last attempt that was dispatched
    attempt: int = -1
    weight_version: int | None = None  #: that attempt's stamp
    dispatched: int = 0  #: sequence number of that dispatch
    begun: int | None = None  #: of the first one
    resumed: bool = False  #: it was live in an earlier incarnation


class Instant(msgspec.Struct, frozen=True, kw_only=True):
    """What the log can know of a bundle's cut: no payloads, no rows."""

    bundle: str
    seq: int
    step: int
    weight_version: int
    next_ordinal: int
    states: dict[int, str]
    group_ids: dict[int, str]
    short_steps: dict[int, int]

    @staticmethod
    def of(bundle: str, cut: Cut) -> Instant:
        return Instant(
            bundle=bundle,
            seq=cut.event_seq,
            step=cut.step,
            weight_version=cut.weight_version,
            next_ordinal=cut.next_ordinal,
            states={record.ordinal: record.state for record in cut.records},
            group_ids={group.ordinal: group.group_id for group in cut.groups},
            short_steps=dict(cut.short_steps),
        )


class _Outcomes:
    """One byte per ordinal, in pages that exist where ordinals do."""

    _PAGE = 1 << 14

    def __init__(self) -> None:
        self._pages: dict[int, bytearray] = {}
        self.end = 0  #: the highest ordinal seen, plus one

    def __getitem__(self, ordinal: int) -> int:
        page = self._pages.get(ordinal // self._PAGE)
        return _UNSEEN if page is None else page[ordinal % self._PAGE]

    def __setitem__(self, ordinal: int, outcome: int) -> None:
        page = self._pages.get(ordinal // self._PAGE)
        if page is None:
            page = self._pages[ordinal // self._PAGE] = bytearray(self._PAGE)
        page[ordinal % self._PAGE] = outcome
        self.end = max(self.end, ordinal + 1)

    def unseen(self) -> Iterator[range]:
        """Runs of ordinals below `end` that were never seen."""
        seen_until = 0
        for at in sorted(self._pages):
            for run in re.finditer(rb"[^\0]+", self._pages[at]):
                first = at * self._PAGE + run.start()
                if first > seen_until:
                    yield range(seen_until, first)
                seen_until = at * self._PAGE + run.end()


class Books:
    """The state of every prompt, step and weight version so far. Goes on after a violation."""

    def __init__(self, findings: Findings) -> None:
        self.live: dict[int, Prompt] = {}
        self.prompts = self.trained = self.step = self.weight_version = 0
        self.dropped: Counter[str] = Counter()  #: by reason, up to its first colon
        self.short_steps: Counter[int] = Counter()  #: groups that each step goes without
        self.served = Served(self._wrong, self._oldest_dispatch)
        self._outcomes = _Outcomes()
        self._findings = findings
        self._seq = 0
        self._finished_here: int | None = None  #: the last step that this incarnation finished
        self._stopped = False

    def enter(self, event: Event) -> None:
        """Take the next event of the effective history."""
        self._seq = event.seq
        kind = event.event
        if kind == "run_started":
            self.step, self.weight_version = event.step or 0, event.weight_version or 0
        elif kind == "resumed":
            self._resumed(event)
        elif kind in ("weight_sync", "stopped"):
            self._stopped = kind == "stopped"
            if event.step is not None and event.step < self.step:
                self._wrong(event, f"{kind} goes back to step {event.step} from step {self.step}")
        elif kind not in ("engine", "checkpoint", "exhausted"):
            self._of_prompt(event)
        if kind in ("resumed", "trained", "weight_sync"):
            self._at_version(event)
        self.served.enter(event)

    def close(self) -> None:
        """Check what can only be said at the end of the log."""
        for run in self._outcomes.unseen():
            which = f"{run[0]} to {run[-1]} were" if len(run) > 1 else f"{run[0]} was"
            self._findings.add(
                self._seq, run[0], f"{which} never admitted; {self._outcomes.end - 1} was"
            )
        if self._stopped:  # a run that was killed may have got no further
            self._no_loose_ends(self._seq)

    def compare(self, cut: Instant) -> None:
        """Check that a bundle recorded what the log says of its instant."""
        for what, logged, recorded in (
            ("finished steps", self.step, cut.step),
            ("prompts that left the source", self._outcomes.end, cut.next_ordinal),
        ):
            if logged != recorded:
                problem = f"{cut.bundle} has {recorded} {what}; the log has {logged}"
                self._findings.add(cut.seq, None, problem)
        short = {step: n for step, n in self.short_steps.items() if step >= cut.weight_version}
        if short != cut.short_steps:
            problem = f"{cut.bundle} has the short steps {cut.short_steps}; the log has {short}"
            self._findings.add(cut.seq, None, problem)
        if cut.weight_version < self.weight_version:
            problem = (
                f"{cut.bundle} has weight version {cut.weight_version};"
                f" the log has {self.weight_version}"
            )
            self._findings.add(cut.seq, None, problem)
        for ordinal in sorted(cut.states.keys() | self.live.keys()):
            logged_as, recorded_as = self._both(ordinal, cut)
            if logged_as != recorded_as:
                problem = f"{recorded_as} in {cut.bundle}; {logged_as} in the log"
                self._findings.add(cut.seq, ordinal, problem)

    def _both(self, ordinal: int, cut: Instant) -> tuple[str, str]:
        """What the log and the bundle say of a prompt."""
        recorded = cut.states.get(ordinal, "not live")
        prompt = self.live.get(ordinal)
        if prompt is None:
            return _OUTCOMES[self._outcomes[ordinal]], recorded
        logged = "waiting" if prompt.state == "aborted" else prompt.state
        if ordinal not in cut.group_ids:
            return logged, recorded
        return f"{logged} as {prompt.group_id}", f"{recorded} as {cut.group_ids[ordinal]}"

    # the run --------------------------------------------------------------------------

    def _resumed(self, event: Event) -> None:
        if event.step is not None and event.step != self.step:
            self._wrong(
                event,
                f"resumed at step {event.step}; its history ends with step {self.step}",
            )
        self._no_loose_ends(event.seq)
        for prompt in self.live.values():
            prompt.state = _AFTER_RESUME.get(prompt.state, prompt.state)
            prompt.resumed = True
        self._finished_here = None

    def _no_loose_ends(self, seq: int) -> None:
        for ordinal, prompt in self.live.items():
            if prompt.state == "evicted":
                self._findings.add(seq, ordinal, "evicted, then neither dropped nor redispatched")
                prompt.state = "waiting"

    def _at_version(self, event: Event) -> None:
        version = event.weight_version
        if version is None:
            return
        if version < self.weight_version:
            self._wrong(
                event,
                f"{event.event} goes back to weight version {version}"
                f" from version {self.weight_version}",
            )
        self.weight_version = max(self.weight_version, version)

    # a prompt -------------------------------------------------------------------------

    def _of_prompt(self, event: Event) -> None:
        ordinal = event.ordinal
        if ordinal is None:
            self._wrong(event, f"{event.event} without an ordinal")
        elif event.event != "admitted":
            self._moved(event, ordinal)
        elif self._outcomes[ordinal] == _UNSEEN:
            self._comes_alive(ordinal, "waiting")
        else:
            self._wrong(event, f"admitted after it was {_OUTCOMES[self._outcomes[ordinal]]}")

    def _comes_alive(self, ordinal: int, state: str) -> Prompt:
        self.prompts += 1
        self._outcomes[ordinal] = _LIVE
        prompt = self.live[ordinal] = Prompt(state)
        return prompt

    def _moved(self, event: Event, ordinal: int) -> None:
        kind = event.event
        allowed, state = _MOVES[kind]
        prompt = self.live.get(ordinal)
        if prompt is None:
            self._wrong(event, f"{kind} after it was {_OUTCOMES[self._outcomes[ordinal]]}")
            if self._outcomes[ordinal] != _UNSEEN:
                return
            prompt = self._comes_alive(ordinal, allowed[0])  # so that it is said once
            prompt.group_id = event.group_id
        if prompt.state in allowed:
            self._check_group(event, ordinal, prompt)
        else:
            self._wrong(event, f"{kind} while {prompt.state}, not {' or '.join(allowed)}")
        prompt.state = state
        if kind != "redispatched":
            prompt.group_id = event.group_id
        if kind == "dispatched":
            prompt.attempt = max(prompt.attempt, _attempt(ordinal, event.group_id))
            self._stamped(event, prompt)
            prompt.dispatched = event.seq
            if prompt.begun is None:
                prompt.begun = event.seq
        elif kind == "committed":
            self.served.commit(event, dispatched=prompt.dispatched, kept=prompt.resumed)
        elif kind in ("selected", "abandoned"):
            if event.step is not None and event.step <= self.step:
                self._wrong(event, f"{kind} for step {event.step}; step {self.step} is finished")
        elif kind == "trained":
            self._end(ordinal, _TRAINED)
            self.trained += 1
            self._step_finished(event)
        elif kind == "dropped":
            self._end(ordinal, _DROPPED)
            self.dropped[(event.reason or "").partition(":")[0]] += 1
            if not event.reason:
                self._wrong(event, "dropped without a reason")
            if event.step is not None:
                self.short_steps[event.step] += 1

    def _end(self, ordinal: int, outcome: int) -> None:
        del self.live[ordinal]
        self._outcomes[ordinal] = outcome

    def _check_group(self, event: Event, ordinal: int, prompt: Prompt) -> None:
        kind, group = event.event, event.group_id
        attempt = _attempt(ordinal, group)
        if attempt < 0:
            self._wrong(event, f"{kind} as group {group}, which is no attempt at this prompt")
        elif kind in ("dispatched", "redispatched"):
            if attempt <= prompt.attempt:
                self._wrong(event, f"{kind} as group {group}; {prompt.group_id} went out before")
        elif kind != "dropped" and group != prompt.group_id:
            self._wrong(event, f"{kind} as group {group}; {prompt.group_id} went out last")
        elif kind == "committed" and prompt.weight_version is not None:
            if event.weight_version != prompt.weight_version:
                self._wrong(
                    event,
                    f"committed with start version {event.weight_version};"
                    f" it went out with version {prompt.weight_version}",
                )

    def _stamped(self, event: Event, prompt: Prompt) -> None:
        """A first attempt has the newest version; a later one may keep an older stamp."""
        if prompt.weight_version is None:
            self._at_version(event)
        elif event.weight_version is not None and event.weight_version < prompt.weight_version:
            self._wrong(
                event,
                f"dispatched with weight version {event.weight_version};"
                f" an earlier attempt had version {prompt.weight_version}",
            )
        prompt.weight_version = event.weight_version

    def _step_finished(self, event: Event) -> None:
        step = event.step
        if step is None or step not in (self.step + 1, self._finished_here):
            self._wrong(event, f"trained in step {step}; the last finished step is {self.step}")
        if step is not None:
            self.step = self._finished_here = max(self.step, step)

    def _oldest_dispatch(self) -> int:
        """Of a prompt that may still be committed: siblings of its first attempt may be kept."""
        open_ones = (p for p in self.live.values() if p.state in ("in_flight", "waiting"))
        return min((p.begun for p in open_ones if p.begun is not None), default=self._seq)

    def _wrong(self, event: Event, problem: str) -> None:
        self._findings.add(event.seq, event.ordinal, problem)


def _attempt(ordinal: int, group: str | None) -> int:
    """The number of the attempt in a group id of this prompt, else -1."""
    named = _GROUP_ID.fullmatch(group or "")
    return int(named[2]) if named is not None and int(named[1]) == ordinal else -1
