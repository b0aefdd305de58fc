"""The process lives of a run, and how much of each still counts."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import msgspec

from sc_core.audit import EVENTS, history_of, lives_in
from sc_core.books import Findings
from sc_core.errors import CannotShow
from sc_core.events import Event, read_events

METRICS = "metrics.jsonl"
_NOTHING = -1
_MOST_STEPS = 2**31  #: more than any run has; and as many as a deque may


class Life(msgspec.Struct, kw_only=True):
    """One incarnation. Its events after `until_seq`, and its steps after `until_step`, do not
    count: a later life began from before them."""

    incarnation: str
    number: int  #: from 1, in the order in which they began
    began: float  #: unix seconds
    ended: float  #: of its last event
    after_s: float = 0.0  #: how long the lives before it lasted, all together
    last_seq: int
    last_step: int = 0  #: that it finished, or began with
    events: int = 0
    until_seq: int = _NOTHING
    until_step: int = _NOTHING
    parent: str | None = None
    parent_seq: int | None = None
    from_step: int = 0  #: of the bundle that it resumed from
    end: str | None = None  #: reason of its last event, `stopped`; None: it was killed, or runs
    places: int | None = None
    steps: deque[tuple[int, float]] = msgspec.field(default_factory=deque)
    """The last steps that it finished, and when; the newest first."""

    @property
    def lasted_s(self) -> float:
        return max(0.0, self.ended - self.began)

    @property
    def steps_undone(self) -> int:
        """How many of its finished steps were lost or made again."""
        return self.last_step - max(self.from_step, min(self.until_step, self.last_step))

    def undone(self, event: Event) -> bool:
        return event.seq > self.until_seq


class Lives(msgspec.Struct, frozen=True):
    """All lives of a run, in the order in which they began; there is at least one."""

    run: Path
    all: dict[str, Life]

    @property
    def last(self) -> Life:
        return list(self.all.values())[-1]

    @property
    def began(self) -> float:
        return next(iter(self.all.values())).began

    @property
    def ended(self) -> float:
        return max(life.ended for life in self.all.values())

    @property
    def lived_s(self) -> float:
        """How long all lives lasted, without what lay between them."""
        return self.last.after_s + self.last.lasted_s

    @property
    def name(self) -> str:
        return Path(os.path.abspath(self.run)).name

    @property
    def cuts(self) -> frozenset[int]:
        """Sequence numbers of events after which some life went on."""
        return frozenset(
            life.parent_seq for life in self.all.values() if life.parent_seq is not None
        )

    def counts_step(self, incarnation: object, step: int) -> bool:
        """Whether a step of that life is part of what the run now is; an unknown life's is."""
        life = self.all.get(str(incarnation))
        return life is None or step <= life.until_step

    def events(self) -> Iterator[Event]:
        """All events, up to those that were there when the lives were read."""
        last_seq = max(life.last_seq for life in self.all.values())
        for event in read_events(self.run / EVENTS):
            if event.seq > last_seq:
                return
            yield event


def read_lives(run: str | Path, *, keep_steps: int = 0) -> Lives:
    """Read the log once. Of each life, when its last `keep_steps` steps ended is kept.

    Raises:
        CannotShow: there is no event log, or nothing in it yet.
        RestoreError: a complete line of the log is not an event.
    """
    run = Path(run)
    if not (run / EVENTS).is_file():
        raise CannotShow(f"{run} has no {EVENTS}: is it the directory of a run?")
    lives: dict[str, Life] = {}

    def look() -> Iterator[Event]:
        for event in read_events(run / EVENTS):
            life = lives.get(event.incarnation)
            if life is None:
                life = lives[event.incarnation] = _born(event, list(lives.values()), keep_steps)
            life.events += 1
            life.ended, life.last_seq = event.t, event.seq
            life.end = event.reason or "" if event.event == "stopped" else None
            if event.event == "trained" and event.step is not None:
                life.last_step = max(life.last_step, event.step)
                if not life.steps or life.steps[0][0] != event.step:
                    life.steps.appendleft((event.step, event.t))
            yield event

    findings = Findings()
    known = lives_in(look(), findings)
    if not lives:
        raise CannotShow(f"{run / EVENTS} has no events yet")
    step = None
    for part in reversed(history_of(known, findings)):
        life = lives[part.incarnation]
        life.until_seq = part.last_seq
        life.until_step = life.last_step if step is None else step
        step = life.from_step
    return Lives(run, lives)


def _born(event: Event, before: list[Life], keep_steps: int) -> Life:
    settings = event.settings or {}
    places = settings.get("places")
    return Life(
        incarnation=event.incarnation,
        number=len(before) + 1,
        began=event.t,
        ended=event.t,
        after_s=sum(life.lasted_s for life in before),
        last_seq=event.seq,
        last_step=event.step or 0,
        parent=event.parent,
        parent_seq=event.parent_seq,
        from_step=event.step or 0,
        places=places if isinstance(places, int) else None,
        steps=deque(maxlen=min(keep_steps, _MOST_STEPS) + 1),
    )
