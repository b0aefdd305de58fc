"""What is read back of a run: the numbers of its audit and its metrics, in bounded memory."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from recorded import NIGHT_S, RecordedRun, at, recorded, settings, write_run

from sc_core.audit import audit
from sc_core.errors import CannotShow
from sc_core.events import Event
from sc_core.seeing import write_trace
from sc_core.seeing.history import History, read_history
from sc_core.seeing.lives import read_lives
from sc_core.seeing.rows import metric_rows, number
from sc_core.seeing.standing import Prompts
from sc_core.seeing.thinned import Thinned
from sc_core.seeing.windows import Windows
from sc_core.seeing.words import when
from sc_core.spans import COMMITS, HELD, TRAIN, WAITED, Span


@pytest.fixture(scope="module")
def history(run: RecordedRun) -> History:
    return read_history(run.out)


def test_the_numbers_are_those_of_the_audit(run: RecordedRun, history: History) -> None:
    report = audit(run.log.events)
    assert report.ok
    assert history.audit == report
    assert history.steps == report.step == 200
    assert {reason: drop.count for reason, drop in history.drops.items()} == report.dropped
    assert history.staleness.total() == report.trained


def test_the_numbers_are_those_of_the_metrics(run: RecordedRun, history: History) -> None:
    by_step: dict[int, dict[str, Any]] = {}
    for row in run.rows:
        by_step[row["step"]] = {**by_step.get(row["step"], {}), **row}
    effective = [by_step[step] for step in range(1, 201)]
    assert history.curves.reward.y == [row["train/reward"] for row in effective]
    assert history.curves.loss.y == [row["train/loss"] for row in effective]
    assert history.first_rewards == [row["train/reward"] for row in effective[:10]]
    assert history.last_rewards == [row["train/reward"] for row in effective[-10:]]
    spent = sum(row["timing/train/total_step_time"] for row in effective)
    assert sum(history.seconds.values()) == pytest.approx(spent)
    lag = sum(row["train/staleness_versions_mean"] * row["train/groups"] for row in effective)
    assert history.staleness_mean == pytest.approx(lag / sum(r["train/groups"] for r in effective))
    assert history.curves.val_reward.x == list(range(20, 201, 20))


def test_restarts_are_those_of_the_log_and_say_what_they_undid(
    run: RecordedRun, history: History
) -> None:
    resumed = [event for event in run.log.events if event.event == "resumed"]
    assert [life.from_step for life in history.restarts] == [event.step for event in resumed]
    lives = list(history.lives.all.values())
    assert [life.steps_undone for life in lives] == [7, 3, 0]
    assert [life.end for life in lives] == [None, None, "max_steps"]
    assert len(history.curves.reward_again) == 6 + 3  # the row of step 77 died with its process


def test_every_published_bundle_is_a_window_with_its_times(
    run: RecordedRun, history: History
) -> None:
    published = [e.step for e in run.log.events if e.event == "checkpoint"]
    assert [window.step for window in history.windows if window.published] == published
    rows = {row["step"]: row for row in run.rows if row["incarnation"] == run.log.incarnation}
    for window in history.windows:
        assert window.held_s == pytest.approx(0.82, abs=1e-3)
        row = rows.get(window.step + 1)
        if row is not None and window.incarnation == run.log.incarnation:
            told = row["timing/rollout_checkpoint/total_save_seconds"]
            assert window.total_s == pytest.approx(told, abs=1e-3)
    waited = sum(run_waits(run).values())
    assert history.commit_wait_s == pytest.approx(waited)
    assert 0 < max(w.commit_wait_s or 0.0 for w in history.windows) <= 0.83


def run_waits(run: RecordedRun) -> dict[str, float]:
    """What the commits of each life had waited when it wrote its last metrics."""
    return {row["incarnation"]: row["rollout/commit_wait_s"] for row in run.rows}


def test_levels_are_never_negative_and_end_as_the_controller_has_them(
    run: RecordedRun, history: History
) -> None:
    prompts = Prompts(read_lives(run.out).cuts)
    for event in run.log.events:
        prompts.enter(event)
        counts = [prompts.places, *(prompts.count(s) for s in ("in flight", "ready", "selected"))]
        assert min(counts) >= 0
        assert prompts.places <= 24
    end = run.end
    assert end is not None and run.controller is not None
    assert prompts.places == end.places_held
    assert prompts.count("ready") == end.committed
    assert prompts.weight_version == end.weight_version
    assert set(prompts.live) == {r.ordinal for r in run.controller.ledger_records()}


def test_a_resume_brings_back_the_prompts_of_its_cut(run: RecordedRun) -> None:
    lives = read_lives(run.out)
    prompts = Prompts(lives.cuts)
    kept: dict[int, Counter[str]] = {}
    for event in run.log.events:
        prompts.enter(event)
        states = Counter(one.state for one in prompts.live.values())
        if event.seq in lives.cuts:
            kept[event.seq] = states
        if event.event == "resumed":
            assert event.parent_seq is not None
            before = kept[event.parent_seq]
            assert states["ready"] == before["ready"] + before["selected"]
            assert states["waiting"] == before["waiting"] + before["in flight"]


def test_without_spans_the_metrics_tell_of_the_windows(run: RecordedRun, tmp_path: Path) -> None:
    write_run(tmp_path, run.log.events, run.rows)
    history = read_history(tmp_path)
    published = [e.step for e in run.log.events if e.event == "checkpoint"]
    assert [window.step for window in history.windows] == published
    told = [window.held_s for window in history.windows if window.held_s is not None]
    assert len(told) >= len(published) - 3  # the last save of a life has no row after it
    assert all(held == pytest.approx(0.82) for held in told)
    assert all(window.commit_wait_s is None for window in history.windows)


def test_a_window_whose_bundle_was_never_published_is_told_apart(tmp_path: Path) -> None:
    async def live(run: RecordedRun) -> None:
        assert await run.live(lambda event: event.event == "selected" and event.step == 13) is None

    run = recorded(tmp_path, live, config=settings(30))
    events = [event for event in run.log.events if event.event != "checkpoint"]
    write_run(tmp_path, events, run.rows)
    assert [(w.step, w.published) for w in read_history(tmp_path).windows] == [(10, False)]


def test_a_killed_run_without_a_bundle_has_a_life_that_does_not_count(tmp_path: Path) -> None:
    async def live(run: RecordedRun) -> None:
        assert await run.live(at("trained", 3)) is None
        assert await run.live() is not None

    history = read_history(recorded(tmp_path, live, config=settings(5)).out)
    first, second = history.lives.all.values()
    assert (first.steps_undone, second.steps_undone) == (3, 0)
    assert history.audit.trained == 20
    assert history.staleness.total() == 20


def test_a_live_run_is_read_as_far_as_it_is(run: RecordedRun, tmp_path: Path) -> None:
    cut = next(i for i, e in enumerate(run.log.events) if e.event == "trained" and e.step == 31)
    write_run(tmp_path, run.log.events[:cut], run.rows[:28])
    for name in ("events.jsonl", "metrics.jsonl"):
        with (tmp_path / name).open("ab") as file:
            file.write(b'{"step": 29, "t')
    history = read_history(tmp_path)
    assert (history.steps, len(history.curves.reward)) == (30, 28)
    assert history.lives.last.end is None


def test_what_is_appended_while_it_is_read_is_left_out(run: RecordedRun, tmp_path: Path) -> None:
    write_run(tmp_path, run.log.events[:100], [])
    lives = read_lives(tmp_path)
    write_run(tmp_path, run.log.events[:4000], [])  # of another life, too
    assert [event.seq for event in lives.events()] == list(range(1, 101))


def test_time_between_lives_is_no_time_of_the_levels(older: RecordedRun) -> None:
    history = read_history(older.out)
    first, second, third = history.lives.all.values()
    assert third.began - second.ended > NIGHT_S
    assert (first.after_s, second.after_s) == (0.0, first.lasted_s)
    assert third.after_s == first.lasted_s + second.lasted_s
    lived_s = sum(life.lasted_s for life in history.lives.all.values())
    assert history.lives.lived_s == pytest.approx(lived_s)
    levels = history.levels.places
    assert levels.x == sorted(levels.x)
    assert levels.x[-1] == pytest.approx(lived_s)
    assert lived_s < NIGHT_S
    broken = [x for x, y in zip(levels.x, levels.y, strict=True) if y is None]
    assert broken == pytest.approx([second.after_s, third.after_s])


def test_a_step_counts_up_to_the_oldest_cut_that_a_later_life_went_on_from(
    older: RecordedRun,
) -> None:
    history = read_history(older.out)
    lives = list(history.lives.all.values())
    assert [life.from_step for life in lives] == [0, 20, 10]
    assert [life.until_step for life in lives] == [10, -1, 30]
    assert [life.steps_undone for life in lives] == [15, 8, 0]
    assert history.curves.reward.x == list(range(1, 31))
    assert history.audit.ok and history.staleness.total() == history.audit.trained == 120


def test_a_run_that_has_just_begun_is_a_history(tmp_path: Path, run: RecordedRun) -> None:
    write_run(tmp_path, run.log.events[:1], [])
    (tmp_path / "metrics.jsonl").unlink(missing_ok=True)
    history = read_history(tmp_path)
    assert (history.steps, history.metric_rows, history.windows) == (0, 0, [])
    assert history.staleness_mean is None


def test_where_there_is_no_run_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(CannotShow, match=r"has no events\.jsonl: is it the directory of a run"):
        read_history(tmp_path)
    (tmp_path / "events.jsonl").touch()
    with pytest.raises(CannotShow, match=r"events\.jsonl has no events yet"):
        read_history(tmp_path)


def test_curves_keep_a_bounded_number_of_points_and_the_whole_mean() -> None:
    curve = Thinned(at_most=2000)
    for x in range(100_003):
        curve.add(x, x % 10)
    assert 1000 <= len(curve) <= 2000
    assert curve.x == sorted(curve.x)
    assert curve.each == 64
    counts = [64] * (len(curve) - 1) + [100_003 - 64 * (len(curve) - 1)]
    whole = sum((y or 0.0) * n for y, n in zip(curve.y, counts, strict=True))
    assert whole == pytest.approx(sum(x % 10 for x in range(100_003)))


def test_a_curve_stays_broken_where_it_was_interrupted() -> None:
    curve = Thinned(at_most=100)
    curve.interrupt()
    for life in range(3):
        for x in range(1000):
            curve.add(life * 10_000 + x, life)
        curve.interrupt()
        curve.interrupt()
    assert len(curve) <= 103
    assert curve.y.count(None) == 3
    assert {y for y in curve.y if y is not None} == {0.0, 1.0, 2.0}
    assert curve.x == sorted(curve.x)


def test_the_levels_of_a_long_run_are_thinned(run: RecordedRun, history: History) -> None:
    assert len(run.log.events) > 9000
    assert 0 < len(history.levels.places) <= 2000
    assert history.levels.places.y.count(None) == 2  # while no process lived
    assert history.levels.places.x[-1] <= history.lives.lived_s + 1e-3


def test_the_row_of_a_late_evaluation_repeats_no_step(run: RecordedRun, tmp_path: Path) -> None:
    rows = [row for row in run.rows if row["step"] <= 30]
    again = {**rows[-1], "val/reward": 0.625}  # as after the end of the prompts
    write_run(tmp_path, run.log.events[:2000], [*rows, again])
    history = read_history(tmp_path)
    assert history.curves.reward.x == list(range(1, 31))
    assert (history.curves.val_reward.x[-1], history.curves.val_reward.y[-1]) == (30, 0.625)


def test_a_number_that_is_none_is_left_out(run: RecordedRun, tmp_path: Path) -> None:
    write_run(tmp_path, run.log.events[:2000], [])
    rows = [
        {"step": 1, "incarnation": "x", "train/reward": None, "train/loss": "high"},
        {"step": 2, "train/reward": 0.5, "timing/train/total_step_time": 1.0, "train/loss": None},
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "metrics.jsonl").write_text(lines + "[1]\nno json\n")
    history = read_history(tmp_path)
    assert history.curves.reward.y == [0.5]
    assert not len(history.curves.loss)


def held(step: int, until: float) -> Span:
    return Span(track=TRAIN, name=HELD, t=until - 1.0, duration_s=1.0, incarnation="a", step=step)


def waited(began: float, seconds: float) -> Span:
    return Span(track=COMMITS, name=WAITED, t=began, duration_s=seconds, incarnation="a")


def published(step: int) -> Event:
    return Event(seq=step, t=0.0, incarnation="a", event="checkpoint", step=step)


def test_a_commit_that_waits_later_did_not_wait_for_this_window() -> None:
    windows = Windows()
    windows.see_checkpoint(published(10))
    windows.see_span(waited(50.0, 1.0))  # before any
    windows.see_span(held(10, until=100.0))
    windows.see_span(waited(99.5, 0.5))
    windows.see_span(waited(98.5, 1.5))
    windows.see_span(waited(130.0, 9.0))  # for one that was never held
    (window,) = windows.all()
    assert (window.commits, window.commit_wait_s) == (2, 1.5)


def test_windows_whose_spans_were_lost_keep_their_place() -> None:
    windows = Windows()
    for step in (10, 20, 30, 40):
        windows.see_checkpoint(published(step))
    windows.see_metrics({"incarnation": "a", "step": 12, **times(0.5)})
    windows.see_metrics({"incarnation": "a", "step": 31, **times(0.75)})
    windows.see_metrics({"incarnation": "b", "step": 99, **times(9.0)})
    for step in (20, 25, 40):
        windows.see_span(held(step, until=float(step)))
    told = [(w.step, w.published, w.held_s) for w in windows.all()]
    assert told == [
        (10, True, 0.5), (20, True, 1.0), (25, False, 1.0), (30, True, 0.75), (40, True, 1.0),
    ]  # fmt: skip


def times(held_s: float) -> dict[str, float]:
    return {"timing/rollout_checkpoint/exclusive_hold_seconds": held_s}


def test_rows_that_no_controller_wrote_are_left_out(run: RecordedRun, tmp_path: Path) -> None:
    write_run(tmp_path, run.log.events, run.rows)
    before = read_history(tmp_path)
    odd = [b'{"step":' + b"9" * 400, b'{"step":true', b'{"step":-1', b'{"step":1,"incarnation":[1]']
    lines = [line + b',"train/reward":1.0,"rollout/commit_wait_s":9.0}' for line in odd]
    lines += [b'{"step":1,"a":' + b'{"a":' * 100_000, b"[]", b"null", b'"\xff"']
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b"\n".join(lines) + b"\n")
    after = read_history(tmp_path)
    assert len(list(metric_rows(tmp_path / "metrics.jsonl"))) == before.metric_rows
    assert after.commit_wait_s == before.commit_wait_s
    assert after.curves.reward.y == before.curves.reward.y


def test_numbers_that_no_controller_wrote_are_none() -> None:
    row: dict[str, Any] = {"huge": 10**400, "far": 1e300, "flag": True, "text": "1", "ok": -2}
    assert {name: number(row, name) for name in [*row, "absent"]} == {
        **dict.fromkeys([*row, "absent"]),
        "ok": -2.0,
    }
    windows = Windows()
    windows.see_checkpoint(Event(seq=1, t=1.0, incarnation="a", event="checkpoint", step=1))
    timing = "timing/rollout_checkpoint/barrier_wait_seconds"
    windows.see_metrics({"step": 2, "incarnation": "a", timing: 10**400})
    assert windows.all()[0].waited_s is None


def test_a_clock_that_was_out_of_its_mind_spoils_no_trace_and_no_date(
    run: RecordedRun, tmp_path: Path
) -> None:
    write_run(tmp_path, run.log.events, run.rows)
    lines = (run.out / "spans.jsonl").read_bytes().splitlines(keepends=True)
    odd = {**json.loads(lines[0]), "t": 1e308, "duration_s": 1e308}
    far = {**odd, "step": 10**30}
    (tmp_path / "spans.jsonl").write_bytes(b"".join(lines))
    with (tmp_path / "spans.jsonl").open("a") as file:
        file.write(f"{json.dumps(odd)}\n{json.dumps(far)}\n")
    made = json.loads(write_trace(tmp_path, steps=0).read_text())["traceEvents"]
    assert max(event.get("ts", 0) for event in made) == 2**53
    assert when(1e308) == "1e+308 s after 1970"
    assert when(0.0) == "1970-01-01 00:00:00 UTC"
