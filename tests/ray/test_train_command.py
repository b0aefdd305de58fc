"""`python -m sc_ray`: whole runs over real Ray and TransferQueue, and wrong input."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from sc_core.controller import RunResult
from sc_core.disk import LOCAL
from sc_core.errors import RunInUse, ScError, WorkerDied
from sc_ray.__main__ import DONE, FAILED, STOPPED, WRONG_USAGE, main
from sc_ray.kills import kill_tree
from sc_ray.lives import left_behind
from sc_ray.progress import PlainConsole, learning_curve, step_line
from sc_ray.run_directory import RunDirectory, last_report, published, running_pid
from sc_ray.supervise import Interrupted, Signals, _View

# wrong input: one line, and nothing started -------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], status: int, *arguments: str | Path) -> str:
    """The one line that a wrong command leaves on stderr."""
    assert main([str(argument) for argument in arguments]) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("sc_ray: error: ")
    assert err.count("\n") == 1
    return err


def test_an_unknown_key(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = refused(capsys, WRONG_USAGE, "train", "--out", tmp_path / "run", "grpo.max_num_step=3")
    assert "did you mean grpo.max_num_steps?" in line
    assert not (tmp_path / "run").exists()


def test_no_such_configuration(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert "did you mean demo?" in refused(
        capsys, WRONG_USAGE, "train", "--config", "dem", "--out", out
    )


def test_a_run_directory_that_can_not_be_made(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    line = refused(capsys, FAILED, "train", "--out", tmp_path / "file" / "run")
    assert "can't be written: Not a directory; choose another one by --out" in line


def test_a_run_in_use(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with RunDirectory(tmp_path):
        line = refused(capsys, FAILED, "train", "--out", tmp_path)
    assert f"{tmp_path} is in use by pid {os.getpid()}" in line


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=",\n', ":2: not a line of JSON"),
        ('{"prompt": "1+1=", "answer": "2"}\n\n{"prompt": "1+2="}\n', ":3: the key 'answer'"),
        ("", "has no prompts"),
    ],
)
def test_broken_prompts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, says: str
) -> None:
    (tmp_path / "prompts.jsonl").write_text(content)
    line = refused(
        capsys,
        WRONG_USAGE,
        "train",
        "--out",
        tmp_path / "run",
        f"task.jsonl={tmp_path / 'prompts.jsonl'}",
    )
    assert f"{tmp_path / 'prompts.jsonl'}{says if says[0] == ':' else ' ' + says}" in line


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("task.name=larger_digits", "did you mean larger_digit?"),
        ("task.reward=sc_ray.tasks.rewards:exact_math", "did you mean exact_match?"),
        ("task.reward=no_such_module:reward", "importing no_such_module failed"),
        ("task.jsonl=/nowhere/prompts.jsonl", "/nowhere/prompts.jsonl can't be read"),
        ("task.val_jsonl=/nowhere/held_out.jsonl", "/nowhere/held_out.jsonl can't be read"),
        ("policy.model.pretrained=/nowhere/model", "there is no directory /nowhere/model"),
        ("task.held_out=100", "none would be left to train on"),
        ("grpo.num_generations_per_prompt=1", "needs groups of at least 2 siblings, not 1"),
        ("async_rl.max_buffered_rollouts=3", "async_rl.max_buffered_rollouts is 3"),
        ("cluster.num_cpus=3", "needs 6 CPUs of Ray and the cluster has 3: set cluster.num_cpus=6"),
    ],
)
def test_what_the_settings_ask_for_is_not_there(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, setting: str, says: str
) -> None:
    assert says in refused(capsys, WRONG_USAGE, "train", "--out", tmp_path / "run", setting)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("logger.wandb_enabled=true", "not installed: pip install 'single-controller[wandb]'"),
        ("logger.prometheus_port=PORT", "can't be listened on: Address already in use"),
    ],
)
def test_watching_that_can_not_be_is_told_before_ray_starts(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    asked: str,
    says: str,
) -> None:
    def nothing_starts(*args: Any) -> None:
        raise AssertionError("Ray was started")

    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda n: None if n == "wandb" else found(n))
    monkeypatch.setattr("sc_ray.setup.start_ray", nothing_starts)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        asked = asked.replace("PORT", str(taken.getsockname()[1]))
        status = main(["train", "--out", str(tmp_path / "run"), asked])
    err = capsys.readouterr().err
    assert status == WRONG_USAGE
    assert says in err and err.count("\n") == 1


def test_no_such_checkpoint(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = refused(capsys, WRONG_USAGE, "train", "--out", tmp_path, "--resume", tmp_path / "step_7")
    assert f"there is no checkpoint {tmp_path / 'step_7'}" in line


@pytest.mark.parametrize("command", ["status", "checkpoint", "stop"])
def test_nobody_to_talk_to(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    assert f"no run is going on in {tmp_path}" in refused(capsys, FAILED, command, tmp_path)
    assert list(tmp_path.iterdir()) == []


# who runs a directory -----------------------------------------------------------------


def test_a_run_is_found_by_its_lock_alone(tmp_path: Path) -> None:
    assert running_pid(tmp_path) is None
    with RunDirectory(tmp_path) as run:
        run.report("running", {"step": 3})
        assert running_pid(tmp_path) == os.getpid()
        with pytest.raises(RunInUse):
            RunDirectory(tmp_path)
    assert running_pid(tmp_path) is None  # the process lives, and has let go
    assert last_report(tmp_path)["step"] == 3


def test_the_lock_of_a_dead_process_is_not_touched(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    told = f"pid {gone.pid} on {os.uname().nodename}\n"
    (tmp_path / "lock").write_text(told)
    assert running_pid(tmp_path) is None
    assert (tmp_path / "lock").read_text() == told


def test_a_run_on_another_machine_can_not_be_signalled(tmp_path: Path) -> None:
    lock = LOCAL.lock(tmp_path / "lock")
    (tmp_path / "lock").write_text("pid 1 on elsewhere\n")
    with pytest.raises(RunInUse, match="pid 1 on elsewhere"):
        running_pid(tmp_path)
    lock.release()


# what is shown ------------------------------------------------------------------------


def test_the_checkpoints_are_there_also_while_a_start_is_under_way(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "checkpoints" / "step_4").mkdir(parents=True)
    with RunDirectory(tmp_path) as run:
        run.report("starting")
        assert main(["status", str(tmp_path)]) == DONE
    assert "checkpoints: step_4" in capsys.readouterr().out


def test_a_step_and_a_warning_are_shown_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Between the end of a step and its metrics, `step` is ahead of them."""
    metrics = {
        "timing/train/total_step_time": 1.0,
        "train/reward": 0.5,
        "train/staleness_versions_mean": 0.0,
    }
    shown = {"places_held": 1, "places_capacity": 2, "last_warnings": ["b", "c"]}
    answers = [
        {**shown, "step": 1, "last_metrics": {**metrics, "step": 1}, "warnings": 0},
        {**shown, "step": 2, "last_metrics": {**metrics, "step": 1}, "warnings": 3},
        {**shown, "step": 2, "last_metrics": {**metrics, "step": 2}, "warnings": 3},
    ]
    clock = iter(range(0, 100, 5))
    console = PlainConsole(sys.stdout, clock=lambda: next(clock))
    with RunDirectory(tmp_path) as run, Signals() as signals:
        view = _View(None, run, console, signals, 9)
        for answer in answers:
            view.show(answer)
    told = [line[:10] for line in capsys.readouterr().out.splitlines()]
    assert told == ["step 1/9  ", "warning: b", "warning: c", "warning: 1", "step 2/9  "]


def test_in_a_file_each_step_has_a_line_and_each_second(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = [0.0]
    console = PlainConsole(sys.stdout, clock=lambda: now[0])
    for at, step in ((0.0, 1), (0.5, 2), (1.0, 3), (2.5, 3), (3.0, 4)):
        now[0] = at
        last = {
            "step": step,
            "train/reward": 0.5,
            "train/staleness_versions_mean": 1,
            "timing/train/total_step_time": 2,
        }
        console.show({"last_metrics": last, "max_steps": 9, "places_held": 1, "places_capacity": 4})
    told = [line.partition("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert told == ["step 1/9", "step 3/9", "step 4/9"]


def test_a_step_that_is_not_over_has_no_line() -> None:
    assert step_line({}, 10) == ""
    assert step_line({"last_metrics": {"step": 3, "train/reward": 1.0}}, 10) == ""


def test_the_last_evaluation_is_shown_beside_every_step() -> None:
    last = {
        "step": 3,
        "train/reward": 0.5,
        "train/staleness_versions_mean": 1,
        "timing/train/total_step_time": 2,
    }
    status = {"last_metrics": last, "places_held": 1, "places_capacity": 4}
    assert "reward 0.500  staleness" in step_line(status, 10)
    shown = step_line({**status, "last_evaluation": {"val/reward": 0.25}}, 10)
    assert "reward 0.500  val 0.250  staleness" in shown


def test_the_learning_curve_counts_a_step_made_twice_once(tmp_path: Path) -> None:
    rewards = [(1, 0.0), (2, 0.0), (3, 0.9), (3, 0.5), (4, 1.0)]
    lines = [json.dumps({"step": step, "train/reward": reward}) for step, reward in rewards]
    (tmp_path / "m").write_text("\n".join([*lines, '{"torn']))
    assert learning_curve(tmp_path / "m") == (
        "mean reward 0.000 in the first 2 steps, 0.750 in the last 2"
    )
    with (tmp_path / "m").open("a") as file:
        file.write('\n{"step": 4, "val/reward": 0.25}\n')
    assert learning_curve(tmp_path / "m").endswith("; 0.250 on held-out prompts after step 4")
    assert learning_curve(tmp_path / "none") == ""


# signals ------------------------------------------------------------------------------


def test_a_signal_before_the_run_interrupts() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Signals() as signals:
        signal.raise_signal(signal.SIGUSR1)  # nothing to save yet
        with pytest.raises(Interrupted, match="SIGTERM"):
            signal.raise_signal(signal.SIGTERM)
        assert signals.stopped_by == "SIGTERM"
    assert signal.getsignal(signal.SIGTERM) is before


def test_signals_are_passed_on() -> None:
    told: list[str] = []
    with Signals() as signals:
        signals.steer(on_stop=told.append, on_save=lambda: told.append("save"))
        for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGUSR1):
            signal.raise_signal(number)
    assert told == ["save", "SIGINT", "save"]


def test_a_second_signal_leaves_at_once() -> None:
    program = """
import signal
from sc_ray.supervise import Signals
with Signals() as signals:
    signals.steer(on_stop=lambda name: print(name, flush=True), on_save=lambda: None)
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    print("not reached")
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120
    )
    assert (ended.returncode, ended.stdout) == (FAILED, "SIGTERM\n")


def test_the_processes_of_ray_get_no_signal_meant_for_ours() -> None:
    program = """
import os, subprocess
from sc_ray.cluster import _other_process_group
before = os.getpgrp()
with _other_process_group():
    child = subprocess.Popen(["sleep", "60"])
print(os.getpgid(child.pid) != before, os.getpgrp() == before)
child.kill()
child.wait()
"""
    shell = ["sh", "-c", '"$0" -c "$1"; true', sys.executable, program]  # not the group's leader
    ended = subprocess.run(
        shell,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert ended.stdout == "True True\n"


# a controller that died ---------------------------------------------------------------


def lives(monkeypatch: pytest.MonkeyPatch, *ends: Exception | str) -> list[Any]:
    """Have the lives of a run end like this; returns, as they come, what each resumes from."""
    resumed: list[Any] = []

    def live(signals: Any, config: Any, run: Any, console: Any, prepared: Any, resume: Any) -> Any:
        resumed.append(resume)
        end = ends[len(resumed) - 1]
        if end == "stopped meanwhile":
            signals.steer(on_stop=lambda _: None, on_save=lambda: None)
            signal.raise_signal(signal.SIGTERM)
            raise death()
        if isinstance(end, Exception):
            raise end
        if end == "stopped":
            return RunResult(reason="stopped", step=3, weight_version=3, counters={})
        return RunResult(reason="max_steps", step=3, weight_version=3, counters={})

    monkeypatch.setattr("sc_ray.__main__._live", live)
    return resumed


def death(worker: str = "the controller", *, in_its_start: bool = False) -> WorkerDied:
    died = WorkerDied(worker, "killed")
    died.__cause__ = report = ActorDiedError()
    report._actor_init_failed = in_its_start
    return died


def test_a_controller_that_died_is_started_again_as_often_as_wished(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    resumed = lives(monkeypatch, death(), death(), "done")
    asked = ["train", "--out", str(tmp_path), "--resume", "never"]
    assert main([*asked, "cluster.max_controller_restarts=2"]) == DONE
    assert resumed == ["never", "auto", "auto"]
    said = capsys.readouterr().out.splitlines()
    again = "the controller died: killed; going on from the newest checkpoint, restart"
    assert said[:2] == [f"{again} 1 of 2", f"{again} 2 of 2"]


def test_a_stop_says_how_to_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lives(monkeypatch, "stopped", "stopped")
    assert main(["train", "--out", str(tmp_path)]) == FAILED  # it saved nothing
    assert "goes on" not in capsys.readouterr().out

    def live(*_: Any) -> RunResult:
        (tmp_path / "checkpoints" / "step_3").mkdir(parents=True)
        return RunResult(reason="stopped", step=3, weight_version=3, counters={})

    monkeypatch.setattr("sc_ray.__main__._live", live)
    assert main(["train", "--out", str(tmp_path)]) == STOPPED
    assert capsys.readouterr().out.endswith("step_3\nthe same command goes on from there\n")


@pytest.mark.parametrize(
    "end",
    [
        death("trainer-0"),
        death(in_its_start=True),
        ScError("ValueError: it would come again"),
        "stopped meanwhile",
    ],
    ids=["another part", "its start failed", "an error", "stopped"],
)
def test_what_a_restart_would_not_mend_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, end: Exception | str
) -> None:
    resumed = lives(monkeypatch, end)
    assert main(["train", "--out", str(tmp_path), "cluster.max_controller_restarts=2"]) == FAILED
    assert resumed == ["auto"]


def test_no_controller_is_started_again_unless_asked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lives(monkeypatch, death())
    assert "the controller died: killed" in refused(capsys, FAILED, "train", "--out", tmp_path)
    assert last_report(tmp_path)["phase"] == "failed"


# whole runs ---------------------------------------------------------------------------

FOR_EVER = "grpo.max_num_steps=100000"
SMALL = (
    "--config",
    "exact",
    "task.jsonl=prompts.jsonl",
    "task.val_jsonl=held_out.jsonl",
    "task.reward=my_rewards:longest",
    "grpo.val_period=2",
    "grpo.num_prompts_per_step=2",
    "grpo.num_generations_per_prompt=4",
    "checkpointing.save_period=2",
    "cluster.storage_units=1",
    "policy.model.hidden_size=64",
    "policy.model.num_attention_heads=2",
    "policy.model.num_key_value_heads=1",
)
REWARDS = """
def longest(prompt, completion, answer):
    return min(1.0, len(completion) / 16)
"""
PATIENCE_S = 300.0


class Run:
    """One start of the command, in the directory where prompts and rewards are."""

    def __init__(self, run: Path, *settings: str) -> None:
        self.path = run
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sc_ray", "train", "--out", str(run), *SMALL, *settings],
            cwd=run.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.pid = self._process.pid

    def until(self, step: int) -> None:
        """Wait until some step is done."""
        give_up = time.monotonic() + PATIENCE_S
        while time.monotonic() < give_up and self._process.poll() is None:
            told = last_report(self.path)
            if told.get("pid") == self.pid and told.get("step", 0) >= step:
                return
            time.sleep(0.02)
        self.kill()
        raise AssertionError(f"step {step} was never reached: {self._process.communicate()[0]}")

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def end(self) -> tuple[int, str]:
        """Wait for its end: the status, and all that it printed."""
        output = self._process.communicate(timeout=PATIENCE_S)[0]
        return self._process.returncode, output

    def kill(self) -> int:
        return kill_tree(self.pid)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    prompts = [json.dumps({"prompt": f"{n}=", "answer": str(n)}) for n in range(12)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(prompts))
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "7=7=", "answer": "7"}\n' * 3)
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    runs: list[Run] = []

    def start_run(path: Path, *settings: str) -> Run:
        runs.append(Run(path, *settings))
        return runs[-1]

    yield start_run
    for run in runs:
        run.kill()
        run.end()


def steps_of(run: Path) -> list[int]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def evaluations_of(run: Path) -> dict[int, float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["val/reward"] for line in lines if "val/reward" in line}


def weights_of(run: Path, step: int) -> str:
    file = run / "checkpoints" / f"step_{step}" / "policy" / "model.safetensors"
    return hashlib.sha256(file.read_bytes()).hexdigest()


def audit_of(run: Path) -> str:
    audit = [sys.executable, "-m", "sc_core", "audit", str(run)]
    return subprocess.run(audit, capture_output=True, text=True, check=True).stdout


def test_a_run_that_is_killed_stopped_and_resumed_ends_like_one_that_was_not(
    start: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On another event loop each time, and with the same weights to the last bit."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"

    def command(status: int, *arguments: str) -> str:
        assert main(list(arguments)) == status
        out, err = capsys.readouterr()
        return out + err

    killed = start(broken, FOR_EVER, "event_loop=trio")
    killed.until(3)
    assert killed.kill() > 5  # the driver, Ray's daemons, the workers

    stopped = start(broken, FOR_EVER, "event_loop=uvloop")
    stopped.until(5)
    told = json.loads(command(DONE, "status", str(broken), "--json"))
    assert (told["phase"], told["audit"], told["state"]) == ("running", "ok", "running")
    in_use = command(FAILED, "train", "--out", str(broken))
    assert f"is in use by pid {stopped.pid}" in in_use
    saved = command(DONE, "checkpoint", str(broken))
    assert saved.startswith(f"saved {broken / 'checkpoints' / 'step_'}")
    assert command(DONE, "stop", str(broken)).startswith("stopped at step ")
    status, output = stopped.end()
    assert status == STOPPED, output
    assert "resuming from" in output
    assert "SIGTERM: saving a checkpoint, then ending" in output
    assert left_behind(broken) == []
    shown = command(DONE, "status", str(broken))
    assert shown.startswith("stopped (not running)")
    assert "conservation: ok" in shown

    last = int(next(iter(published(broken))).removeprefix("step_")) + 3
    to_the_end = f"grpo.max_num_steps={last}"
    status, output = start(broken, to_the_end).end()
    assert status == DONE, output
    assert f"done: step {last} of {last}" in output.splitlines()[-1]
    assert "conservation holds" in audit_of(broken).splitlines()[-1]
    assert "warning" not in output
    report, trace = (broken / "report.html").read_text(), (broken / "trace.json").read_text()
    assert report.count("resumed from step") == 2 and "Every prompt is accounted for" in report
    assert all(track in trace for track in ("train pump", "generation-0", f"step {last}"))

    status, output = start(whole, to_the_end).end()
    assert status == DONE, output
    assert steps_of(whole) == list(range(1, last + 1))
    assert weights_of(broken, last) == weights_of(whole, last)
    assert list(evaluations_of(whole)) == list(range(2, last + 1, 2))
    assert evaluations_of(broken) == evaluations_of(whole)
    assert "  val " in output

    bundles = published(broken)
    status, output = start(broken, "grpo.num_generations_per_prompt=3").end()
    assert status == FAILED
    assert output.splitlines()[-1] == (
        "sc_ray: error: the checkpoint's groups have 4 siblings and"
        " grpo.num_generations_per_prompt is 3: a run can't change its group size"
    )
    assert published(broken) == bundles
    assert left_behind(broken) == []
