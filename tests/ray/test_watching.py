"""A whole run, watched: its file, TensorBoard, Prometheus and a terminal tell the same."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_live import HIDES, emulated, on_a_terminal
from test_prometheus import scrape
from test_train_command import FOR_EVER, SMALL, Run, start

from sc_ray.__main__ import DONE, main
from sc_ray.run_directory import last_report
from sc_ray.watching.numbers import numbers_of
from sc_ray.watching.prometheus import metric_name

PATIENCE_S = 300.0
PARTS = """
def parts(prompt, completion, answer):
    return {"long": min(1.0, len(completion) / 16), "short": 1.0 if len(completion) < 4 else 0.0}
"""
__all__ = ["start"]


def steps_in(metrics: Path) -> dict[int, dict[str, float]]:
    """The numbers of each step, as it was made last."""
    lines = map(json.loads, metrics.read_text().splitlines())
    return {line["step"]: numbers_of(line) for line in lines}


def watch(run: Run) -> tuple[list[str], str]:
    """Wait until it trains; the stages that its status named until then, and its endpoint."""
    stages: list[str] = []
    give_up = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up and run.is_alive:
        told = last_report(run.path)
        if told.get("pid") == run.pid and "stage" in told and told["stage"] not in stages:
            stages.append(told["stage"])
        if told.get("pid") == run.pid and told.get("step", 0) >= 2:
            return stages, told["prometheus"]
        time.sleep(0.02)
    run.kill()
    raise AssertionError(f"no step; {stages}: {run.end()}")


def test_every_number_of_a_step_is_the_same_wherever_it_is_shown(
    start: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "watched"
    with (tmp_path / "my_rewards.py").open("a") as rewards:
        rewards.write(PARTS)
    parts = "task.reward=my_rewards:parts"
    run = start(out, FOR_EVER, parts, "logger.prometheus_port=0")
    stages, url = watch(run)
    assert stages[0] == "starting Ray" and "starting TransferQueue" in stages
    port = int(url.rpartition(":")[2].partition("/")[0])
    scraped: dict[int, dict[str, float]] = {}
    give_up = time.monotonic() + PATIENCE_S
    while max(scraped, default=0) < 5 and time.monotonic() < give_up:
        found = scrape(port)
        if "sc_step" in found:  # what a step has late is there in a later scrape
            scraped[int(found["sc_step"])] = found
        time.sleep(0.02)
    assert main(["status", str(out)]) == DONE
    assert f"metrics: {url}" in capsys.readouterr().out
    run.kill()

    steps = steps_in(out / "metrics.jsonl")
    whole = 0
    for step in steps.keys() & scraped.keys():
        expected = {metric_name(name): value for name, value in steps[step].items()}
        shown = {name: scraped[step][name] for name in expected.keys() & scraped[step].keys()}
        for name, value in shown.items():
            assert value == expected[name] or (math.isnan(value) and math.isnan(expected[name]))
        whole += shown.keys() == expected.keys()
    assert whole
    last = scraped[max(scraped)]
    assert last["sc_staleness_versions_count"] == 2 * last["sc_live_step"]  # groups of each step
    assert last["sc_events_total{trained}"] == 2 * last["sc_live_step"]
    assert last["sc_live_engines{serving}"] == 1 and last["sc_barrier_entered_total"] > 0
    assert math.isclose(
        last["sc_train_reward"], last["sc_train_reward_long"] + last["sc_train_reward_short"]
    )

    # Killed in step 5 or later, with bundles of even steps: the next start makes some again.
    final = max(steps) + 2
    again = [sys.executable, "-m", "sc_ray", "train", "--out", str(out), *SMALL, parts]
    again += [f"grpo.max_num_steps={final}", f"logger.prometheus_port={port}"]
    status, written = on_a_terminal(again, columns=80, cwd=tmp_path)
    assert status == DONE, written
    assert "staleness" in written and HIDES not in written
    lines = emulated(written, 80)
    assert any(line.startswith("resuming from ") for line in lines)
    assert any(line.startswith(f"metrics for Prometheus at {url[:30]}") for line in lines)
    assert f"done: step {final} of {final}" in " ".join(lines)
    assert not any(line.startswith(("╭", "│", "╰")) for line in lines)

    steps = steps_in(out / "metrics.jsonl")
    events = EventAccumulator(str(out / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    names = {name for row in steps.values() for name in row} - {"step"}
    assert names == set(events.Tags()["scalars"])
    for name in names:
        shown = [(event.step, event.value) for event in events.Scalars(name)]
        made = [(step, row[name]) for step, row in sorted(steps.items()) if name in row]
        assert [step for step, _ in shown] == [step for step, _ in made], name
        assert [value for _, value in shown] == pytest.approx(
            [value for _, value in made], rel=1e-6, nan_ok=True
        )
    assert (out / "config.yaml").is_file() and (out / "config.1.yaml").is_file()
