"""Two whole trainers of somebody else's, each on one page: killed, resumed, audited, learning."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import sc_core
import sc_core.events

EXAMPLES = Path(__file__).parent.parent / "examples"
PATIENCE_S = 120.0
both = pytest.mark.parametrize("name", ["asyncio_trainer.py", "trio_trainer.py"])


def command(name: str, run_dir: Path) -> list[str]:
    return [sys.executable, "-W", "error", str(EXAMPLES / name), str(run_dir)]


def environment() -> dict[str, str]:
    """As of a user who has installed this package, wherever it lies."""
    return {**os.environ, "PYTHONPATH": str(Path(sc_core.__file__).parent.parent)}


def begun(name: str, run_dir: Path, published: str) -> subprocess.Popen[str]:
    """A run that has just published that bundle."""
    process = subprocess.Popen(
        command(name, run_dir), env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    give_up = time.monotonic() + PATIENCE_S
    while not (run_dir / "checkpoints" / published).exists():
        assert process.poll() is None and time.monotonic() < give_up
        time.sleep(0.005)
    return process


def finished(name: str, run_dir: Path) -> str:
    done = subprocess.run(
        command(name, run_dir), env=environment(), text=True, capture_output=True,
        timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout


def asked(*arguments: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "sc_core", *map(str, arguments)],
        env=environment(), text=True, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@both
def test_an_example_has_at_most_60_lines_of_at_most_100_characters(name: str) -> None:
    lines = (EXAMPLES / name).read_text().splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 100


@both
def test_an_example_learns_although_it_is_killed_in_the_middle(name: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = begun(name, run_dir, "step_30")
    process.kill()
    assert process.wait() == -signal.SIGKILL
    process.communicate()
    told = finished(name, run_dir)
    found = re.fullmatch(r"reward (.*), then (.*); conservation holds: .*\n", told)
    assert found is not None, told
    assert float(found[1]) < 0.6 and float(found[2]) > 0.9
    events = (run_dir / "events.jsonl").read_text()
    assert events.count('"resumed"') == 1
    assert "conservation holds" in asked("audit", "--replay", run_dir)
    assert "ok" in asked("verify", run_dir)
    assert "step                100" in asked("inspect", run_dir)


def test_sigterm_stops_the_asyncio_example_with_a_bundle(tmp_path: Path) -> None:
    name, run_dir = "asyncio_trainer.py", tmp_path / "run"
    process = begun(name, run_dir, "step_10")
    process.terminate()
    told, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0 and errors == "", errors
    assert "conservation holds" in told
    assert '"reason":"stopped: SIGTERM"' in (run_dir / "events.jsonl").read_text()
    events = list(sc_core.events.read_events(run_dir / "events.jsonl"))
    *_, saved = (event for event in events if event.event == "checkpoint")
    stopped = events[-1]
    assert stopped.event == "stopped"
    assert saved.step == stopped.step and 10 <= (saved.step or 0) < 100
    assert (run_dir / "checkpoints" / f"step_{saved.step}").exists()
    finished(name, run_dir)


@pytest.mark.parametrize(
    ("name", "run_dir"), [("asyncio_trainer.py", "runs/sums"), ("trio_trainer.py", "runs/moves")]
)
def test_an_example_without_an_argument_has_a_directory_of_its_own(
    name: str, run_dir: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)], cwd=tmp_path, env=environment(), text=True,
        capture_output=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / run_dir / "checkpoints" / "step_100").is_dir()


@both
def test_the_readme_shows_it_whole(name: str) -> None:
    assert (EXAMPLES / name).read_text() in (EXAMPLES.parent / "README.md").read_text()
