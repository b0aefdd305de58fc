"""Each group's life as the log tells it, in phases, and the counters beside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from sc_core.events import Event
from sc_core.seeing.lives import Lives
from sc_core.seeing.standing import Prompts, Standing

_PHASES = ("in flight", "ready", "selected")
Outcome = Literal["trained", "dropped", "again", "killed", "still live"]


class Phase(msgspec.Struct, kw_only=True):
    """From one event of a group to the next."""

    group_id: str
    ordinal: int
    state: str
    began: float  #: unix seconds
    ended: float
    start_version: int | None
    incarnation: str
    outcome: Outcome | None = None  #: None: another phase of the group follows
    reason: str | None = None
    step: int | None = None  #: that trained it


class Level(msgspec.Struct, kw_only=True):
    """The counters after an event."""

    t: float
    places: int
    in_flight: int
    ready: int
    weight_version: int


def phases_and_levels(lives: Lives) -> Iterator[Phase | Level | Event]:
    """All events of the log; before each, the phases that it ended, and after it the counters.

    A phase that a kill ended, ends with the last event of its life; one that is going on, with
    the last of the log.
    """
    prompts = Prompts(lives.cuts)
    given_up: dict[int, Phase] = {}  # whose prompt is dropped, or goes out again, by the next event
    current = ""
    last_t = lives.began
    for event in lives.events():
        if event.incarnation != current:
            yield from (*given_up.values(), *_all(prompts, current, last_t, "killed"))
            given_up = {}
            current = event.incarnation
        last_t = max(last_t, event.t)
        before = prompts.enter(event)
        ordinal = event.ordinal
        if ordinal is not None and ordinal in given_up:
            phase = given_up.pop(ordinal)
            phase.outcome = "dropped" if event.event == "dropped" else "again"
            yield phase
        elif ordinal is not None and before is not None and before.state in _PHASES:
            phase = _ended(event, ordinal, before)
            if event.event in ("aborted", "evicted"):
                given_up[ordinal] = phase
            else:
                yield phase
        yield event
        yield Level(
            t=event.t,
            places=prompts.places,
            in_flight=prompts.count("in flight"),
            ready=prompts.count("ready"),
            weight_version=prompts.weight_version,
        )
    yield from (*given_up.values(), *_all(prompts, current, last_t, "still live"))


def _all(prompts: Prompts, incarnation: str, t: float, outcome: Outcome) -> Iterator[Phase]:
    for ordinal, one in prompts.live.items():
        if one.state in _PHASES:
            yield _phase(one, ordinal, incarnation, t, outcome=outcome)


def _ended(event: Event, ordinal: int, before: Standing) -> Phase:
    outcome: Outcome | None = None
    if event.event in ("trained", "dropped"):
        outcome = "trained" if event.event == "trained" else "dropped"
    elif event.event in ("redispatched", "aborted", "evicted"):
        outcome = "again"
    return _phase(
        before,
        ordinal,
        event.incarnation,
        event.t,
        outcome=outcome,
        reason=event.reason,
        step=event.step if event.event == "trained" else None,
    )


def _phase(
    of: Standing,
    ordinal: int,
    incarnation: str,
    t: float,
    *,
    outcome: Outcome | None,
    reason: str | None = None,
    step: int | None = None,
) -> Phase:
    return Phase(
        group_id=of.group_id or str(ordinal),
        ordinal=ordinal,
        state=of.state,
        began=of.since,
        ended=max(of.since, t),
        start_version=of.start_version,
        incarnation=incarnation,
        outcome=outcome,
        reason=reason,
        step=step,
    )
