"""What happened in a run, from its log, its metrics and its spans; memory does not grow with it.

Everything is read line by line. Curves keep some 2,000 points; what else is kept grows with the
live prompts, the restarts and the checkpoints.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from sc_core.audit import EVENTS, AuditReport, audit_log
from sc_core.events import Event
from sc_core.seeing.lives import METRICS, Life, Lives, read_lives
from sc_core.seeing.rows import metric_rows, number
from sc_core.seeing.standing import Prompts
from sc_core.seeing.thinned import Thinned
from sc_core.seeing.windows import Window, Windows
from sc_core.spans import SPANS, read_spans

PARTS = {
    "exposed_generation": "waiting for groups",
    "policy_and_reference_logprobs": "log-probabilities",
    "advantage_calculation": "advantages",
    "policy_training": "training",
    "weight_sync": "weight sync",
    "rest": "clearing rows, and the rest",
}
"""What a step's time goes to: names of metrics below `timing/train/`, and what they are."""

_ENDS = 10  #: steps whose mean reward is shown, of the first and of the last ones
_EXAMPLES = 5  #: full drop reasons that are shown of each kind


class Drops(msgspec.Struct):
    """Prompts dropped for one reason: the part up to its first colon."""

    count: int = 0
    first_step: int = 0  #: the last finished one at that time
    last_step: int = 0
    examples: list[str] = []  #: what came after the colon, the first different ones


class Curves(msgspec.Struct):
    """By step, of the effective history; `again` are steps that a restart undid."""

    reward: Thinned = msgspec.field(default_factory=Thinned)
    loss: Thinned = msgspec.field(default_factory=Thinned)
    staleness_mean: Thinned = msgspec.field(default_factory=Thinned)
    staleness_max: Thinned = msgspec.field(default_factory=Thinned)
    val_reward: Thinned = msgspec.field(default_factory=Thinned)
    reward_again: Thinned = msgspec.field(default_factory=Thinned)
    parts: dict[str, Thinned] = msgspec.field(
        default_factory=lambda: {name: Thinned() for name in PARTS}
    )


class Levels(msgspec.Struct):
    """By time, seconds that lives had lasted by then; of all lives, as it was."""

    places: Thinned = msgspec.field(default_factory=Thinned)
    in_flight: Thinned = msgspec.field(default_factory=Thinned)
    ready: Thinned = msgspec.field(default_factory=Thinned)


class History(msgspec.Struct, kw_only=True):
    lives: Lives
    audit: AuditReport
    curves: Curves
    levels: Levels
    staleness: Counter[int]  #: trained groups, by the versions that their weights lagged behind
    drops: dict[str, Drops]  #: of the effective history, most frequent first
    windows: list[Window]  #: of all lives, in the order in which they were held
    steps: int  #: that the effective history has
    metric_rows: int
    seconds: dict[str, float]  #: by part of a step, over the effective history
    first_rewards: list[float]
    last_rewards: list[float]
    commit_wait_s: float  #: that commits waited for the barrier, over all lives

    @property
    def restarts(self) -> list[Life]:
        return [life for life in self.lives.all.values() if life.number > 1]

    @property
    def staleness_mean(self) -> float | None:
        groups = self.staleness.total()
        return sum(lag * n for lag, n in self.staleness.items()) / groups if groups else None


def read_history(run: str | Path) -> History:
    """Read a run, which may be going on.

    Raises:
        CannotShow: there is no event log, or nothing in it yet.
        RestoreError: a complete line of the log is not an event.
    """
    lives = read_lives(run)
    report = audit_log(Path(run) / EVENTS)
    history = History(
        lives=lives,
        audit=report,
        curves=Curves(),
        levels=Levels(),
        staleness=Counter(),
        drops={},
        windows=[],
        steps=0,
        metric_rows=0,
        seconds=dict.fromkeys(PARTS, 0.0),
        first_rewards=[],
        last_rewards=[],
        commit_wait_s=0.0,
    )
    windows = Windows()
    _read_events(history, windows)
    _read_metrics(history, windows)
    if (lives.run / SPANS).is_file():
        for span in read_spans(lives.run / SPANS):
            windows.see_span(span)
    history.windows = windows.all()
    by_count = sorted(history.drops.items(), key=lambda drop: -drop[1].count)
    history.drops = dict(by_count)
    return history


# the log -------------------------------------------------------------------------------


def _read_events(history: History, windows: Windows) -> None:
    lives, levels = history.lives, history.levels
    prompts = Prompts(lives.cuts)
    step = 0
    for event in lives.events():
        before = prompts.enter(event)
        kind, life = event.event, lives.all[event.incarnation]
        if kind in ("run_started", "resumed"):
            step = life.from_step
            for curve in (levels.places, levels.in_flight, levels.ready):
                curve.interrupt()
        elif kind == "trained":
            step = event.step or step
        elif kind == "checkpoint":
            windows.see_checkpoint(event)
        if kind != "engine":
            at = life.after_s + event.t - life.began
            levels.places.add(at, prompts.places)
            levels.in_flight.add(at, prompts.count("in flight"))
            levels.ready.add(at, prompts.count("ready"))
        if life.undone(event):
            continue
        history.steps = max(history.steps, step)
        if kind == "trained" and before is not None and before.start_version is not None:
            history.staleness[(event.weight_version or 0) - 1 - before.start_version] += 1
        elif kind == "dropped":
            _see_drop(history.drops, event, step)


def _see_drop(drops: dict[str, Drops], event: Event, step: int) -> None:
    reason, _, more = (event.reason or "").partition(":")
    drop = drops.setdefault(reason, Drops(first_step=step))
    drop.count += 1
    drop.last_step = step
    more = more.strip()
    if more and len(drop.examples) < _EXAMPLES and more not in drop.examples:
        drop.examples.append(more)


# the metrics ---------------------------------------------------------------------------


def _read_metrics(history: History, windows: Windows) -> None:
    curves = history.curves
    waits: dict[object, float] = {}
    last: deque[float] = deque(maxlen=_ENDS)
    seen: tuple[object, int] | None = None  #: life and step of the last row that counted
    for row in metric_rows(history.lives.run / METRICS):
        history.metric_rows += 1
        step, incarnation = row["step"], row.get("incarnation")
        windows.see_metrics(row)
        waited_s = number(row, "rollout/commit_wait_s")
        if waited_s is not None:
            waits[incarnation] = max(waits.get(incarnation, 0.0), waited_s)
        reward = number(row, "train/reward")
        if not history.lives.counts_step(incarnation, step):
            if reward is not None:
                curves.reward_again.add(step, reward)
            continue
        val = number(row, "val/reward")
        if val is not None:
            curves.val_reward.add(step, val)
        if seen is not None and step <= seen[1]:
            continue  # an evaluation's row has the numbers of the step before it once more
        seen = incarnation, step
        if number(row, "timing/train/total_step_time") is None:
            continue  # before the first step of a life
        if reward is not None:
            curves.reward.add(step, reward)
            last.append(reward)
            if len(history.first_rewards) < _ENDS:
                history.first_rewards.append(reward)
        for name, curve in (
            ("train/loss", curves.loss),
            ("train/staleness_versions_mean", curves.staleness_mean),
            ("train/staleness_versions_max", curves.staleness_max),
        ):
            value = number(row, name)
            if value is not None:
                curve.add(step, value)
        _add_parts(history, row, step)
    history.last_rewards = list(last)
    history.commit_wait_s = sum(waits.values())


def _add_parts(history: History, row: Mapping[str, Any], step: int) -> None:
    rest = number(row, "timing/train/total_step_time") or 0.0
    for name, curve in history.curves.parts.items():
        seconds = number(row, f"timing/train/{name}") or 0.0
        if name == "rest":
            seconds = max(0.0, rest)
        rest -= seconds
        history.seconds[name] += seconds
        curve.add(step, seconds)
