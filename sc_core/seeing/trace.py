"""`trace.json`: a run in time, in the format of Chrome's traces, for ui.perfetto.dev.

Tracks: what the controller's pumps did, one for each engine, a line for each group from its
dispatch to its end, and counters. What a later life undid or made again says so in its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from sc_core.events import Event
from sc_core.seeing.lanes import Slice, in_lanes
from sc_core.seeing.lifelines import Level, Phase, phases_and_levels
from sc_core.seeing.lives import Life, Lives, read_lives
from sc_core.spans import (
    COMMITS,
    ENGINES,
    ESTIMATE,
    FINALISER,
    HELD,
    PROMPTS,
    READ,
    SPANS,
    STEP,
    TRAIN,
    TRAINER,
    WAITED,
    WRITE,
    Span,
    read_spans,
)

LIVES, GATE, WINDOWS = "lives", "weight gate", "checkpoint windows"
_CONTROLLER, _GROUPS, _FIRST_ENGINE = 1, 2, 3  #: processes of the trace
_LATEST = 2.0**53  #: microseconds: viewers read numbers as JavaScript does
_FIRST_THREAD = 1000  #: no thread may have the number of a process: it would count as its first
_TRACKS = (LIVES, TRAIN, TRAINER, READ, ESTIMATE, WRITE, GATE, WINDOWS, COMMITS, FINALISER, PROMPTS)
Json = dict[str, Any]


def trace_events(run: str | Path, *, steps: int) -> Iterator[Json]:
    """The events of the trace, as `write_trace` writes them; raises what it raises."""
    lives = read_lives(run, keep_steps=steps)
    trace = _Trace(lives, _begin(lives, steps) if steps else lives.began)
    spans = list(trace.wanted(read_spans(lives.run / SPANS))) if has_spans(lives.run) else []
    recorded = {span.incarnation for span in spans if span.track == TRAIN}
    yield from trace.names()
    yield from trace.of_log(recorded)
    yield from trace.of_spans(spans)


def has_spans(run: Path) -> bool:
    return (run / SPANS).is_file()


def _begin(lives: Lives, steps: int) -> float:
    """When the last `steps` steps of the effective history began."""
    wanted = steps
    for life in reversed(lives.all.values()):
        if life.until_step < 0:
            continue
        counted = [t for step, t in life.steps if step <= life.until_step]
        if len(counted) > wanted:
            return counted[wanted]
        wanted -= len(counted)
        if wanted <= 0:
            return life.began
    return lives.began


class _Trace:
    """Times are whole microseconds since `begin`: rounded alike, what was nested stays so."""

    def __init__(self, lives: Lives, begin: float) -> None:
        self._lives = lives
        self._begin = begin
        self._tids = count(_FIRST_THREAD)
        self._tracks: dict[str, list[Slice[Json]]] = {track: [] for track in _TRACKS}

    def at(self, t: float) -> int:
        return max(0, round(min((t - self._begin) * 1e6, _LATEST)))

    def _slice(self, began: float, ended: float, of: Json) -> Slice[Json]:
        """The log's clock may have been set back meanwhile: no slice is negative."""
        return Slice(self.at(began), max(self.at(began), self.at(ended)), of)

    def wanted(self, spans: Iterable[Span]) -> Iterator[Span]:
        for span in spans:
            if span.t + span.duration_s >= self._begin and span.incarnation in self._lives.all:
                yield span

    # names -----------------------------------------------------------------------------

    def names(self) -> Iterator[Json]:
        yield from self._process(_CONTROLLER, f"controller of {self._lives.name}")
        yield from self._process(_GROUPS, "groups")
        for life in self._lives.all.values():
            if life.ended >= self._begin:
                self._tracks[LIVES].append(self._life(life))

    def _life(self, life: Life) -> Slice[Json]:
        args = _filled(
            incarnation=life.incarnation,
            from_step=life.from_step,
            last_step=life.last_step,
            steps_undone=life.steps_undone,
            end=life.end or "killed, or it still runs",
        )
        of = {"name": f"life {life.number}", "cat": LIVES, "args": args}
        return self._slice(life.began, life.ended, of)

    def _process(self, pid: int, name: str) -> Iterator[Json]:
        yield _meta("process_name", pid, 0, {"name": name})
        yield _meta("process_sort_index", pid, 0, {"sort_index": pid})

    # the log ---------------------------------------------------------------------------

    def of_log(self, recorded: set[str]) -> Iterator[Json]:
        """Lifelines, counters, restarts, and the gate; steps too, of lives without spans."""
        groups: dict[str, list[Phase]] = {}
        gate = _Gate()
        steps = _Steps()
        level: Level | None = None
        for one in phases_and_levels(self._lives):
            if isinstance(one, Phase):
                if one.ended >= self._begin:
                    groups.setdefault(one.group_id, []).append(one)
                    if one.outcome is not None:
                        yield from self._lifeline(groups.pop(one.group_id))
            elif isinstance(one, Level):
                if one.t >= self._begin:
                    if level is not None and one.t != level.t:
                        yield from self._counters(level)
                    level = one
            else:
                life = self._lives.all[one.incarnation]
                yield from self._instant(one, life)
                self._draw(gate.enter(one), life, GATE)
                step = steps.enter(one)
                if one.incarnation not in recorded:
                    self._draw(step, life, TRAIN)
        if level is not None:
            yield from self._counters(level)

    def _draw(self, found: tuple[str, float, float, Json] | None, life: Life, track: str) -> None:
        if found is None or found[2] < self._begin:
            return
        name, began, ended, args = found
        step = args.get("step")
        if isinstance(step, int) and step > life.until_step:
            name += _again(life)
        of = {"name": name, "cat": track, "args": {**args, "incarnation": life.incarnation}}
        self._tracks[track].append(self._slice(began, ended, of))

    def _instant(self, event: Event, life: Life) -> Iterator[Json]:
        name = ""
        if event.event == "resumed":
            name = f"restart: resumed from step {event.step}"
        elif event.event == "checkpoint":
            name = f"checkpoint of step {event.step} published"
        elif event.event == "stopped":
            name = f"stopped: {event.reason}"
        elif event.event == "engine" and event.engines:
            name = f"{event.engines[0]} is {event.reason}"
        if name and event.t >= self._begin:
            yield {
                "ph": "i",
                "s": "t",
                "name": name,
                "cat": event.event,
                "ts": self.at(event.t),
                "pid": _CONTROLLER,
                "tid": _FIRST_THREAD,  # that of `LIVES`, which comes first
                "args": {"incarnation": life.incarnation, "seq": event.seq},
            }

    def _counters(self, level: Level) -> Iterator[Json]:
        for name, value in (
            ("places held", level.places),
            ("groups in flight", level.in_flight),
            ("groups ready", level.ready),
            ("weight version", level.weight_version),
        ):
            name, what = name.split()[0], name.partition(" ")[2]
            yield {
                "ph": "C",
                "name": name,
                "ts": self.at(level.t),
                "pid": _CONTROLLER,
                "args": {what: value},
            }

    def _lifeline(self, phases: list[Phase]) -> Iterator[Json]:
        first, last = phases[0], phases[-1]
        life = self._lives.all[last.incarnation]
        undone = last.outcome == "trained" and (last.step or 0) > life.until_step
        outcome = f"{last.outcome}{_again(life) if undone else ''}"
        name = f"{first.group_id}: {outcome}"
        common = {
            "cat": "group",
            "pid": _GROUPS,
            "tid": 0,
            "id2": {"local": f"{first.group_id} of life {life.number}"},
        }
        yield {**common, "ph": "n", "name": "lifelines", "ts": self.at(first.began)}
        yield {
            **common,
            "ph": "b",
            "name": name,
            "ts": self.at(first.began),
            "args": _filled(
                group=first.group_id,
                ordinal=first.ordinal,
                start_version=first.start_version,
                outcome=outcome,
                reason=last.reason,
                step=last.step,
                incarnation=life.incarnation,
            ),
        }
        at = 0
        for phase in phases:
            begin = max(at, self.at(phase.began))
            at = max(begin, self.at(phase.ended))
            yield {**common, "ph": "b", "name": phase.state, "ts": begin}
            yield {**common, "ph": "e", "name": phase.state, "ts": at}
        yield {**common, "ph": "e", "name": name, "ts": at}

    # spans -----------------------------------------------------------------------------

    def of_spans(self, spans: Iterable[Span]) -> Iterator[Json]:
        tracks = self._tracks
        engines: dict[str, list[Slice[Json]]] = {}
        for span in spans:
            one = self._slice(span.t, span.t + span.duration_s, self._named(span))
            if span.track == ENGINES:
                engines.setdefault(span.engine or "no sample", []).append(one)
                continue
            tracks.setdefault(span.track, []).append(one)
            if span.track == TRAIN and span.name in (WAITED, HELD):
                tracks[WINDOWS].append(one)
        for track, slices in tracks.items():
            yield from self._track(track, slices)
        for number, (engine, slices) in enumerate(sorted(engines.items()), _FIRST_ENGINE):
            yield from self._process(
                number, engine if engine.startswith("engine") else f"engine {engine}"
            )
            yield from self._lanes(number, 0, engine, in_lanes(slices, nest=False))

    def _named(self, span: Span) -> Json:
        life = self._lives.all[span.incarnation]
        name = span.name
        if name.startswith(f"{STEP} ") and span.step is not None and span.step > life.until_step:
            name += _again(life)
        args = _filled(
            step=span.step,
            weight_version=span.weight_version,
            group=span.group_id,
            sibling=span.sibling,
            note=span.note,
            incarnation=span.incarnation,
        )
        return {"name": name, "cat": span.track, "args": args}

    def _track(self, track: str, slices: list[Slice[Json]]) -> Iterator[Json]:
        nest = track != COMMITS
        at = _TRACKS.index(track) if track in _TRACKS else len(_TRACKS)
        yield from self._lanes(_CONTROLLER, at, track, in_lanes(slices, nest=nest))

    def _lanes(
        self, pid: int, at: int, name: str, lanes: list[list[Slice[Json]]]
    ) -> Iterator[Json]:
        for number, lane in enumerate(lanes):
            tid = next(self._tids)
            more = f" ({number + 1})" if number else ""
            yield _meta("thread_name", pid, tid, {"name": name + more})
            yield _meta("thread_sort_index", pid, tid, {"sort_index": 1000 * at + number})
            for one in lane:
                yield {
                    "ph": "X",
                    "ts": one.begin,
                    "dur": one.end - one.begin,
                    "pid": pid,
                    "tid": tid,
                    **one.of,
                }


class _Gate:
    """From the step that counted a version to the sync that moved it, nothing is dispatched."""

    def __init__(self) -> None:
        self._closed: float | None = None

    def enter(self, event: Event) -> tuple[str, float, float, Json] | None:
        if event.event in ("run_started", "resumed"):
            self._closed = event.t
        elif event.event == "trained" and self._closed is None:
            self._closed = event.t
        elif event.event == "weight_sync" and self._closed is not None:
            closed, self._closed = self._closed, None
            version = event.weight_version
            args = _filled(step=event.step, weight_version=version, note=event.reason)
            return f"closed for version {version}", closed, event.t, args
        return None


class _Steps:
    """Steps as the log has them: from the first group selected to the end of the sync."""

    def __init__(self) -> None:
        self._began: float | None = None

    def enter(self, event: Event) -> tuple[str, float, float, Json] | None:
        if event.event in ("run_started", "resumed", "abandoned"):
            self._began = None
        elif event.event == "selected" and self._began is None:
            self._began = event.t
        elif event.event == "weight_sync" and self._began is not None:
            began, self._began = self._began, None
            return f"{STEP} {event.step}", began, event.t, _filled(step=event.step)
        return None


def _again(life: Life) -> str:
    return f" (of life {life.number}, undone by a restart)"


def _meta(name: str, pid: int, tid: int, args: Mapping[str, Any]) -> Json:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}


def _filled(**args: Any) -> Json:
    return {name: value for name, value in args.items() if value is not None}
