"""Where a log and a sampler part: the decision, both answers, and what the sampler saw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from sc_core.events import Event
from sc_core.records import Group
from sc_core.state import RunState

Decision = Literal["admit", "select", "evict", "abort", "ledger"]


class View(msgspec.Struct, frozen=True, kw_only=True):
    """What the sampler saw, in numbers of groups."""

    step: int  #: finished ones
    weight_version: int
    groups_per_step: int  #: that the step under way takes
    live: int
    waiting: int
    in_flight: int
    ready: int
    selected: int
    places_free: int
    ready_of_version: Mapping[int, int]
    ready_of_target: Mapping[int, int]
    live_of_target: Mapping[int, int]

    @staticmethod
    def of(state: RunState) -> View:
        ledger = state.ledger
        ready = list(ledger.index.ready_in_commit_order())
        live = (record.target_step for record in ledger.records() if record.admitted)
        return View(
            step=ledger.step,
            weight_version=ledger.weight_version,
            groups_per_step=ledger.groups_of_target(ledger.weight_version),
            live=ledger.live_count,
            waiting=ledger.waiting_count,
            in_flight=ledger.in_flight_count,
            ready=len(ready),
            selected=ledger.index.selected_count,
            places_free=state.places.free,
            ready_of_version=_counted(group.start_weight_version for group in ready),
            ready_of_target=_counted(group.target_step for group in ready),
            live_of_target=_counted(live),
        )

    def __str__(self) -> str:
        parts = [
            f"step {self.step}",
            f"v {self.weight_version}",
            f"P {self.groups_per_step}",
            f"live {self.live}",
            f"waiting {self.waiting}",
            f"in flight {self.in_flight}",
            f"ready {self.ready}",
            f"selected {self.selected}",
            f"places free {self.places_free}",
        ]
        for name, numbers in (
            ("ready by version", self.ready_of_version),
            ("ready by target", self.ready_of_target),
            ("live by target", self.live_of_target),
        ):
            if numbers:
                parts.append(f"{name} " + " ".join(f"{k}:{n}" for k, n in numbers.items()))
        return ", ".join(parts)


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Where the log and the sampler part. `ledger`: what follows from decisions differs."""

    seq: int  #: of the event in the log
    ordinal: int | None  #: of the prompt, if it is about one
    decision: Decision  #: what was decided there
    logged: str  #: what the log says
    answer: str  #: the sampler's, or what ledger and places say
    view: View | None  #: before the decision; None: before there was a ledger

    def __str__(self) -> str:
        view = "" if self.view is None else f" ({self.view})"
        return f"seq {self.seq}: {self.decision}: the log {self.logged}; {self.answer}{view}"


class Differs(Exception):
    def __init__(self, difference: Difference) -> None:
        super().__init__(str(difference))
        self.difference = difference


def describe(event: Event) -> str:
    parts: list[str] = [event.event]
    if event.group_id is not None or event.ordinal is not None:
        parts.append(event.group_id or str(event.ordinal))
    if event.weight_version is not None:
        parts.append(f"v{event.weight_version}")
    return " ".join(parts) + for_step(event.step)


def for_step(step: int | None) -> str:
    return "" if step is None else f" for step {step}"


def describe_groups(groups: Iterable[Group]) -> str:
    return " ".join(group.group_id for group in groups) or "nothing"


def _counted(numbers: Iterable[int | None]) -> dict[int, int]:
    return dict(sorted(Counter(number for number in numbers if number is not None).items()))
