"""Spans: what took how long, and that nothing depends on them."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import pytest
from recorded import RecordedRun, at, settings

from sc_core import Ports
from sc_core.ports import SpanSink
from sc_core.records import Prompt
from sc_core.spans import JsonlSpans, Span, Spans, read_spans

pytestmark = pytest.mark.anyio


async def recorded(tmp_path: Path, steps: int = 12, **sections: Any) -> list[Span]:
    run = RecordedRun(tmp_path, settings(steps, **sections), engines=2)
    assert (await run.live()).step == steps
    return list(read_spans(tmp_path / "spans.jsonl"))


def inside(inner: Span, outer: Span) -> bool:
    return outer.t <= inner.t and inner.t + inner.duration_s <= outer.t + outer.duration_s + 1e-6


async def test_a_step_has_a_span_for_each_of_its_stages(tmp_path: Path) -> None:
    spans = await recorded(tmp_path)
    (step,) = [span for span in spans if span.name == "step 5"]
    assert (step.track, step.step, step.weight_version) == ("train pump", 5, 4)
    within = [span for span in spans[: spans.index(step) + 1] if inside(span, step)]
    assert Counter(span.name for span in within if span.track == "train pump") == Counter(
        ["step 5", "wait for groups", "prepare", "advantage", "microbatches", "finish_step"]
        + ["clear", "weight sync", "pause", "transfer", "resume"]
    )
    trainer = [span.name for span in within if span.track == "trainer"]
    assert trainer == ["begin_step", "prepare", "train_microbatches", "finish_step"]
    tracks = {span.track for span in within}
    assert {"advantage: read", "advantage: estimate", "advantage: write back"} <= tracks
    assert sum(s.duration_s for s in within if s.name == "microbatches") == pytest.approx(0.5)


async def test_a_save_has_a_span_for_its_wait_its_hold_and_what_is_written(tmp_path: Path) -> None:
    spans = await recorded(tmp_path)
    (save,) = [s for s in spans if (s.track, s.name, s.step) == ("train pump", "save", 10)]
    spans = spans[: spans.index(save) + 1]
    within = [s.name for s in spans if s.track == "train pump" and inside(s, save)]
    assert within == [
        "wait for the bundle before", "stage", "trainer saves", "wait for the barrier", "cut",
        "list rows", "data plane saves", "barrier held alone", "save",
    ]  # fmt: skip


async def test_a_publication_has_spans_of_its_own(tmp_path: Path) -> None:
    spans = [s for s in await recorded(tmp_path) if s.track == "finaliser"]
    published = [f"{s.name} {s.step}" for s in spans]
    assert published == ["finalize_save 10", "publish 10", "finalize_save 12", "publish 12"]


async def test_a_sibling_names_its_engine_and_an_evaluation_says_that_it_is_one(
    tmp_path: Path,
) -> None:
    sections = {"grpo": {"val_period": 6}}
    run = RecordedRun(tmp_path, settings(12, **sections), engines=2, held_out=["a", "b"])
    await run.live()
    spans = list(read_spans(tmp_path / "spans.jsonl"))
    siblings = [span for span in spans if span.track == "engines"]
    training = [span for span in siblings if span.note is None]
    assert {span.engine for span in training} == {"engine0", "engine1"}
    trained = {event.group_id for event in run.log.events if event.event == "trained"}
    made = {(span.group_id, span.sibling) for span in training}
    assert {(group, number) for group in trained for number in (0, 1)} <= made
    assert all(span.name == f"{span.group_id}_g{span.sibling}" for span in siblings)
    assert len([span for span in siblings if span.note == "evaluation"]) == 4
    assert [s.step for s in spans if s.name == "evaluation"] == [6, 12]


async def test_a_commit_that_waits_for_a_window_says_how_long(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, settings(10))

    await run.live()
    spans = list(read_spans(tmp_path / "spans.jsonl"))
    waits = [span for span in spans if span.track == "commits"]
    held = [span for span in spans if span.name == "barrier held alone"]
    assert waits
    assert all(any(inside(wait, hold) for hold in held) for wait in waits)
    assert sum(span.duration_s for span in waits) == pytest.approx(
        run.controller._state.commit_wait_s  # type: ignore[union-attr]
    )


async def test_siblings_that_are_kept_wait_for_a_window_one_by_one(tmp_path: Path) -> None:
    by_sibling = {"rollout_recovery": {"default_granularity": "sibling"}}
    run = RecordedRun(tmp_path, settings(20, p=8, g=3, **by_sibling))
    await run.live()
    spans = list(read_spans(tmp_path / "spans.jsonl"))
    waits = [span for span in spans if span.track == "commits"]
    assert {(span.note or "").split()[0] for span in waits} <= {"row", "commit"}
    assert sum(span.duration_s for span in waits) == pytest.approx(
        run.controller._state.commit_wait_s  # type: ignore[union-attr]
    )


async def test_a_prompt_that_waits_says_for_what(tmp_path: Path) -> None:
    spans = await recorded(tmp_path)
    waits = Counter(span.name for span in spans if span.track == "rollout pump")
    assert waits["wait for a place"]
    pulled = sum(span.track == "engines" for span in spans) / 2
    assert waits.total() < pulled  # one that need not wait has no span
    spans = await recorded(tmp_path, 20, async_rl={"max_inflight_prompts": 3})
    waits = Counter(span.name for span in spans if span.track == "rollout pump")
    assert waits["wait for an in-flight slot"]


async def test_a_gate_that_closes_before_a_prompt_is_pulled_is_what_it_waits_for(
    tmp_path: Path,
) -> None:
    async def drained(prompt: Prompt, sibling: int, version: int) -> None:
        await anyio.sleep(1.0)

    config = settings(12, async_rl={"weight_sync_mode": "drain"})
    run = RecordedRun(tmp_path, config, script=drained)
    await run.live()
    spans = list(read_spans(tmp_path / "spans.jsonl"))
    assert any(span.name == "wait for the weight gate" for span in spans)
    drains = [span for span in spans if span.name == "drain"]
    assert len(drains) == 13
    assert max(span.duration_s for span in drains) > 0.5


async def test_a_killed_life_leaves_whole_lines_and_the_next_goes_on(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, settings(30))
    assert await run.live(at("trained", 14)) is None
    path = tmp_path / "spans.jsonl"
    steps = [s.step for s in read_spans(path) if s.name.startswith("step ")]
    assert steps == list(range(1, 14))
    with path.open("ab") as file:
        file.write(b'{"track":"train pu')
    assert (await run.live()).step == 30
    lives = Counter(s.incarnation for s in read_spans(path) if s.name.startswith("step "))
    assert list(lives.values()) == [13, 20]
    assert all(map(json.loads, path.read_bytes().splitlines()))  # the torn one was cut off


class Broken:
    """A sink whose disk is full."""

    calls = 0

    def now(self) -> float:
        return 0.0

    def add(self, track: str, name: str, began: float, **of: Any) -> None:
        self.calls += 1
        raise OSError(28, "No space left on device", "spans.jsonl")

    flush = now


async def test_a_sink_that_fails_is_warned_of_once_and_the_run_goes_on(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    sink = Broken()
    as_port: SpanSink = sink  # type: ignore[assignment]
    run = RecordedRun(tmp_path, settings(5))
    run.spans = lambda incarnation: as_port
    with caplog.at_level(logging.WARNING, logger="sc_core.spans"):
        result = await run.run()
    assert result is not None and result.step == 5
    assert sink.calls == 1
    assert [r.getMessage() for r in caplog.records if r.name == "sc_core.spans"] == [
        "no more spans of this run are recorded: [Errno 28] No space left on device: 'spans.jsonl'"
    ]


def test_a_span_whose_body_fails_is_recorded_with_the_kind_of_error(tmp_path: Path) -> None:
    sink = JsonlSpans(tmp_path / "spans.jsonl", incarnation="a")
    with pytest.raises(KeyError), Spans(sink)("trainer", "prepare", step=3):
        raise KeyError
    sink.close()
    (span,) = read_spans(tmp_path / "spans.jsonl")
    assert (span.name, span.step, span.note) == ("prepare", 3, "KeyError")


def test_without_a_sink_nothing_is_recorded() -> None:
    spans = Spans(None)
    assert not spans.on
    with spans("train pump", "step 1"):
        pass
    spans.add("train pump", "step 1", 0.0)
    spans.flush()
    assert Ports.__struct_defaults__ and "spans" in Ports.__struct_fields__


def test_a_file_that_cannot_be_written_is_told_at_the_flush(tmp_path: Path) -> None:
    sink = JsonlSpans(tmp_path / "missing" / "spans.jsonl", incarnation="a")
    sink.add("trainer", "save", sink.now())
    with pytest.raises(OSError, match="missing"):
        sink.flush()
    sink.add("trainer", "save", sink.now())
    sink.close()  # a warning at most


def test_spans_wait_in_memory_up_to_a_bound(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    sink = JsonlSpans(path, incarnation="a", now=lambda: 5.0)
    for _ in range(1023):
        sink.add("trainer", "prepare", 4.0)
    assert not path.exists()
    sink.add("trainer", "prepare", 7.0)  # a clock that was set back: no span is negative
    spans = list(read_spans(path))
    assert len(spans) == 1024
    sink.close()
    assert list(read_spans(path)) == spans
    assert (spans[0].duration_s, spans[-1].duration_s) == (1.0, 0.0)


def test_lines_that_are_no_spans_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    sink = JsonlSpans(path, incarnation="a")
    sink.add("trainer", "prepare", sink.now())
    sink.close()
    deep = b'{"note":' + b"[" * 100_000 + b"\n"
    path.write_bytes(b"\0\0\n" + deep + path.read_bytes() + b'{"track":"tra')
    assert [span.name for span in read_spans(path)] == ["prepare"]


@pytest.mark.parametrize("odd", [{"engine": "\ud800"}, {"step": object()}])
def test_a_span_that_no_file_can_hold_is_a_warning_at_the_close(
    odd: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = JsonlSpans(tmp_path / "spans.jsonl", incarnation="a")
    sink.add("engines", "generate", sink.now(), **odd)
    sink.close()
    assert caplog.messages[-1].startswith("the last spans of this run are lost: ")
