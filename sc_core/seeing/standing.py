"""Where every live prompt stands, event by event, as the lives of a run had it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from copy import copy
from dataclasses import dataclass

from sc_core.events import Event

_TO = {
    "admitted": "waiting",
    "dispatched": "in flight",
    "committed": "ready",
    "selected": "selected",
    "abandoned": "ready",
    "aborted": "waiting",
    "evicted": "waiting",
    "redispatched": "waiting",
}
_AFTER_RESUME = {"in flight": "waiting", "selected": "ready"}


@dataclass(slots=True)
class Standing:
    """A live prompt."""

    state: str
    since: float  #: unix seconds
    group_id: str | None = None
    start_version: int | None = None
    placed: bool = False  #: it holds a place


class Prompts:
    """All live prompts. A life that resumes goes on with those of its bundle.

    Args:
        cuts: the sequence numbers of events after which lives went on.
    """

    def __init__(self, cuts: Collection[int]) -> None:
        self.live: dict[int, Standing] = {}
        self.places = 0  #: held
        self.weight_version = 0
        self._states: Counter[str] = Counter()
        self._cuts = cuts
        self._kept: dict[int, dict[int, Standing]] = {}

    def count(self, state: str) -> int:
        return self._states[state]

    def enter(self, event: Event) -> Standing | None:
        """Take the next event of the file; returns how its prompt stood before, if it lived."""
        before = self._enter(event)
        if event.seq in self._cuts:
            self._kept[event.seq] = {at: copy(one) for at, one in self.live.items()}
        return before

    def _enter(self, event: Event) -> Standing | None:
        kind, ordinal = event.event, event.ordinal
        if kind in ("run_started", "resumed"):
            self._starts(event)
        if kind in ("run_started", "resumed", "trained", "weight_sync"):
            self.weight_version = event.weight_version or 0
        if ordinal is None:
            return None
        prompt = self.live.get(ordinal)
        before = None if prompt is None else copy(prompt)
        if kind in ("trained", "dropped"):
            if prompt is not None:
                del self.live[ordinal]
                self._states[prompt.state] -= 1
                self.places -= prompt.placed
            return before
        state = _TO.get(kind)
        if state is None:
            return before
        if prompt is None:
            prompt = self.live[ordinal] = Standing(state, event.t)
        else:
            self._states[prompt.state] -= 1
        self._states[state] += 1
        if prompt.state != state:
            prompt.state, prompt.since = state, event.t
        if kind != "redispatched":
            prompt.group_id = event.group_id
        if kind in ("dispatched", "committed"):
            prompt.start_version = event.weight_version
        if kind == "dispatched" and not prompt.placed:
            prompt.placed = True
            self.places += 1
        return before

    def _starts(self, event: Event) -> None:
        kept = self._kept.get(event.parent_seq if event.parent_seq is not None else -1, {})
        self.live = {at: copy(one) for at, one in kept.items()}
        self._states = Counter()
        for one in self.live.values():
            one.state, one.since = _AFTER_RESUME.get(one.state, one.state), event.t
            self._states[one.state] += 1
        self.places = sum(one.placed for one in self.live.values())
