"""TensorBoard, W&B, MLflow and trackio, each by itself: the real package, and no network."""

from __future__ import annotations

import json
import logging
import math
import os
import sqlite3
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sc_core.errors import ConfigError
from sc_core.events import JsonlMetrics
from sc_ray.watching.background import InBackground
from sc_ray.watching.config import LoggerConfig, MlflowConfig, TrackioConfig, WandbConfig
from sc_ray.watching.identity import Identity
from sc_ray.watching.mlflow import Mlflow
from sc_ray.watching.numbers import flat, numbers_of
from sc_ray.watching.services import services
from sc_ray.watching.sink import WatchedMetrics
from sc_ray.watching.tensorboard import TensorBoard

SETTINGS = {"grpo": {"seed": 3, "max_num_epochs": None}, "generation": {"vllm": {"tags": [1, 2]}}}
ROW = {"train/reward": 0.5, "timing/train/total_step_time": 1.25, "odd": math.nan}


class Recorder:
    """A service that keeps what it gets, or does as it is told."""

    name = "recorder"

    def __init__(self, *, on_write: Callable[[int], None] = lambda step: None) -> None:
        self.told: list[Any] = []
        self.on_write = on_write

    def start(self) -> None:
        self.told.append("start")

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self.on_write(step)
        self.told.append((step, dict(numbers)))

    def finish(self) -> None:
        self.told.append("finish")


# between the run and a service --------------------------------------------------------


def test_a_row_is_in_the_file_before_any_service_has_it(tmp_path: Path) -> None:
    gate = threading.Event()
    slow = Recorder(on_write=lambda step: None if gate.wait(60) else None)
    sink = WatchedMetrics(JsonlMetrics(tmp_path / "metrics.jsonl"), [slow])
    sink.write({"step": 1, "incarnation": "a", "train/reward": 0.5, "none": None})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["train/reward"] == 0.5
    assert slow.told in ([], ["start"])
    gate.set()
    sink.close()
    assert slow.told == ["start", (1, {"train/reward": 0.5}), "finish"]


def fail(step: int) -> None:
    raise OSError(f"no route at step {step}")


def test_a_service_that_fails_is_warned_of_once_and_gets_later_steps(
    caplog: pytest.LogCaptureFixture,
) -> None:
    service = Recorder(on_write=lambda step: fail(step) if step < 3 else None)
    background = InBackground(service)
    for step in (1, 2, 3):
        background.put(step, {})
    background.close(time.monotonic() + 60)
    assert service.told == ["start", (3, {}), "finish"]
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "recorder failed, and gets the next step again: OSError: no route at step 1",
        "recorder misses the metrics of 2 steps",
    ]


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("not a word")


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), Mute()])
def test_a_service_that_would_end_its_thread_gets_later_steps_too(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def write(step: int) -> None:
        if step == 1:
            raise error

    service = Recorder(on_write=write)
    background = InBackground(service)
    for step in (1, 2):
        background.put(step, {})
    background.close(time.monotonic() + 60)
    assert service.told == ["start", (2, {}), "finish"]
    assert f"recorder failed, and gets the next step again: {type(error).__name__}" in caplog.text
    assert caplog.messages[-1] == "recorder misses the metrics of 1 steps"


def test_a_service_that_always_fails_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    tried: list[int] = []

    def write(step: int) -> None:
        tried.append(step)
        fail(step)

    background = InBackground(Recorder(on_write=write))
    for step in range(9):
        background.put(step, {})
    background.close(time.monotonic() + 60)
    assert tried == [0, 1, 2, 3, 4]
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 3
    assert "recorder is left out after 5 failures: OSError" in caplog.text


def test_only_failures_in_a_row_count() -> None:
    service = Recorder(on_write=lambda step: fail(step) if step % 5 else None)
    background = InBackground(service)
    for step in range(1, 16):
        background.put(step, {})
    background.close(time.monotonic() + 60)
    assert service.told == ["start", (5, {}), (10, {}), (15, {}), "finish"]


def test_a_service_that_could_not_start_is_started_again_with_the_next_step() -> None:
    class Late(Recorder):
        def start(self) -> None:
            super().start()
            if len(self.told) < 3:
                raise TimeoutError("not there yet")

    service = Late()
    background = InBackground(service)
    for step in (1, 2):
        background.put(step, {})
    background.close(time.monotonic() + 60)
    assert service.told == ["start", "start", "start", (2, {}), "finish"]


def test_a_service_that_hangs_holds_up_neither_a_step_nor_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = threading.Event()
    writing = threading.Event()

    def write(step: int) -> None:
        writing.set()
        gate.wait(60)

    background = InBackground(Recorder(on_write=write), queued_rows=2)
    background.put(1, {})
    assert writing.wait(60)
    for step in (2, 3, 4, 5):
        background.put(step, {})
    began = time.monotonic()
    background.close(began + 0.2)
    assert time.monotonic() - began < 30
    assert [record.getMessage() for record in caplog.records] == [
        "recorder is too slow: it misses the metrics of step 4, and maybe of later ones",
        "recorder is not done in time: 4 rows or more did not reach it",
    ]
    gate.set()


def test_what_is_a_number() -> None:
    class Scalar:
        def __float__(self) -> float:
            return 2.0

    metrics = {"step": 3, "a": Scalar(), "text": "3", "none": None, "list": [1], "nan": math.nan}
    found = numbers_of({**metrics, "huge": 10**999, "inf": math.inf})
    assert math.isnan(found.pop("nan"))
    assert found == {"step": 3.0, "a": 2.0, "inf": math.inf}
    assert flat(SETTINGS) == {
        "grpo.seed": 3,
        "grpo.max_num_epochs": "None",
        "generation.vllm.tags": "[1, 2]",
    }


# what is asked for --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "extra"),
    [
        ({"wandb_enabled": True}, "wandb"),
        ({"mlflow_enabled": True}, "mlflow"),
        ({"trackio_enabled": True}, "trackio"),
        ({"prometheus_port": 0}, "ray"),
        ({}, "ray"),
    ],
)
def test_what_is_not_installed_is_named_with_what_brings_it(
    asked: dict[str, Any], extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = LoggerConfig(**{"tensorboard_enabled": not asked, **asked})
    config.check()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    key = next(iter(asked), "tensorboard_enabled")
    with pytest.raises(ConfigError, match=rf"logger.{key} asks for .*controller\[{extra}\]'"):
        config.check()
    LoggerConfig(tensorboard_enabled=False).check()


def test_only_what_is_asked_for_is_imported(tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
import sys
from sc_ray.watching.config import LoggerConfig
from sc_ray.watching.services import services
here = Path({str(tmp_path)!r})
assert services(LoggerConfig(tensorboard_enabled=False), here, here, {{}}, None) == []
print(*({{"wandb", "mlflow", "trackio", "torch", "tensorboard"}} & set(sys.modules)))
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == []


def test_log_dir_has_a_directory_for_each_run(tmp_path: Path) -> None:
    config = LoggerConfig(log_dir=str(tmp_path / "logs"))
    assert config.directory(tmp_path / "run") == tmp_path / "logs" / "run"
    assert LoggerConfig().directory(tmp_path / "run") == tmp_path / "run"
    (found,) = services(config, tmp_path / "logs" / "run", tmp_path / "run", {}, None)
    assert found.name == "TensorBoard"


def test_an_identity_lasts_until_a_run_starts_afresh(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    first = Identity(tmp_path, "wandb", afresh=True).kept_or_new()
    assert Identity(tmp_path, "wandb", afresh=False).kept_or_new() == first
    assert Identity(tmp_path, "mlflow", afresh=False).kept() is None
    assert Identity(tmp_path, "wandb", afresh=True).kept_or_new() != first


# each service -------------------------------------------------------------------------


def tensorboard(directory: Path) -> EventAccumulator:
    events = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    events.Reload()
    return events


def test_tensorboard_shows_steps_made_again_once(tmp_path: Path) -> None:
    for resumed, steps, reward in ((0, (0, 1, 2, 3), 0.25), (2, (3, 4), 0.75)):
        service = TensorBoard(tmp_path, SETTINGS, resumed)
        service.start()
        for step in steps:
            service.write(step, {**ROW, "train/reward": reward})
        service.finish()
    events = tensorboard(tmp_path)
    shown = [(event.step, event.value) for event in events.Scalars("train/reward")]
    assert shown == [(0, 0.25), (1, 0.25), (2, 0.25), (3, 0.75), (4, 0.75)]
    assert all(math.isnan(event.value) for event in events.Scalars("odd"))
    assert "_hparams_/session_start_info" in events.summary_metadata


def test_tensorboard_shows_nothing_of_a_run_that_was_started_afresh_since(tmp_path: Path) -> None:
    for steps in ((1, 2, 3), (1,)):
        service = TensorBoard(tmp_path, SETTINGS, 0)
        service.start()
        for step in steps:
            service.write(step, ROW)
        service.finish()
    assert [event.step for event in tensorboard(tmp_path).Scalars("train/reward")] == [1]


def test_mlflow_goes_on_with_the_same_run(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    config = MlflowConfig(tracking_uri=(tmp_path / "ml").as_uri(), experiment_name="mine")
    for seed, steps, afresh in ((3, (1, 2), True), (4, (2, 3), False)):
        settings = {"grpo": {"seed": seed}, "many": {str(n): n for n in range(150)}}
        identity = Identity(tmp_path, "mlflow", afresh=afresh)
        service = Mlflow(config, tmp_path / "mlruns", settings, identity, "a run")
        service.start()
        for step in steps:
            service.write(step, {**ROW, "train/reward": step * seed})
        service.finish()
    client = service._client
    experiment = client.get_experiment_by_name("mine")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("a run", "FINISHED")
    assert len(run.data.params) == 151
    assert (run.data.params["grpo.seed"], run.data.tags["now/grpo.seed"]) == ("3", "4")
    history = client.get_metric_history(run.info.run_id, "train/reward")
    kept = sorted((metric.timestamp, metric.step, metric.value) for metric in history)
    assert [entry[1:] for entry in kept] == [(1, 3.0), (2, 6.0), (2, 8.0), (3, 12.0)]
    assert math.isnan(client.get_metric_history(run.info.run_id, "odd")[0].value)


IN_A_PROCESS_OF_ITS_OWN = """
import json, sys
from pathlib import Path
from sc_ray.watching.config import TrackioConfig, WandbConfig
from sc_ray.watching.identity import Identity
here, steps, afresh = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3] == "afresh"
settings = {"grpo": {"seed": 3, "max_num_epochs": None}}
row = {"train/reward": 0.5, "odd": float("nan")}
"""
WANDB = """
from sc_ray.watching.wandb import WeightsAndBiases
identity = Identity(here, "wandb", afresh=afresh)
config = WandbConfig(mode="offline", tags=("a",))
service = WeightsAndBiases(config, here, settings, identity, "a run")
"""
TRACKIO = """
from sc_ray.watching.trackio import Trackio
service = Trackio(TrackioConfig(), settings, Identity(here, "trackio", afresh=afresh), "a run")
"""
GO = """
service.start()
for step in steps:
    service.write(step, {**row, "train/reward": step / 4})
service.finish()
"""


def in_a_process_of_its_own(service: str, here: Path, steps: list[int], afresh: str) -> None:
    """As in a run: these libraries keep the state of a process."""
    (here / "logs").mkdir(exist_ok=True)
    program = IN_A_PROCESS_OF_ITS_OWN + service + GO
    environment = {**os.environ, "TRACKIO_DIR": str(here / "trackio"), "WANDB_SILENT": "true"}
    command = [sys.executable, "-c", program, str(here), json.dumps(steps), afresh]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr


def records_of(file: Path) -> Iterator[Any]:
    """What a .wandb file holds: LevelDB's log format, after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # the rest of a block is padding
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def test_wandb_offline_has_one_run_with_the_step_as_its_axis(tmp_path: Path) -> None:
    in_a_process_of_its_own(WANDB, tmp_path, [1, 2], "afresh")
    in_a_process_of_its_own(WANDB, tmp_path, [2, 3], "resumed")
    rows, runs, axes, config = [], set(), set(), {}
    for file in sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb")):
        for record in records_of(file):
            if record.HasField("run"):
                run = record.run
                runs.add((run.run_id, run.project, run.display_name, tuple(run.tags)))
                config |= {one.key: json.loads(one.value_json) for one in run.config.update}
            if record.HasField("metric"):
                metric = record.metric
                axes.add((metric.name or metric.glob_name, metric.step_metric))
            if record.HasField("history"):
                items = record.history.item
                rows.append({i.key or i.nested_key[0]: json.loads(i.value_json) for i in items})
    identity = (tmp_path / "logs" / "wandb.id").read_text().strip()
    assert runs == {(identity, "single-controller", "a run", ("a",))}
    made = [(row["step"], row["train/reward"]) for row in rows]
    assert made == [(1, 0.25), (2, 0.5), (2, 0.5), (3, 0.75)]
    assert math.isnan(rows[0]["odd"])
    assert ("*", "step") in axes
    assert config["grpo"] == {"seed": 3, "max_num_epochs": None}


def test_trackio_goes_on_with_the_same_run(tmp_path: Path) -> None:
    in_a_process_of_its_own(TRACKIO, tmp_path, [1, 2], "afresh")
    in_a_process_of_its_own(TRACKIO, tmp_path, [2, 3], "resumed")
    (database,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(database) as opened:
        rows = opened.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
        ids = opened.execute("SELECT DISTINCT run_id FROM metrics").fetchall()
    opened.close()
    name = (tmp_path / "logs" / "trackio.id").read_text().strip()
    assert name.startswith("a run-") and len(ids) == 1
    assert [(row[0], row[1], json.loads(row[2])["train/reward"]) for row in rows] == [
        (name, 1, 0.25),
        (name, 2, 0.5),
        (name, 2, 0.5),
        (name, 3, 0.75),
    ]


def test_the_settings_have_nemo_rls_names() -> None:
    assert {
        "log_dir",
        "tensorboard_enabled",
        "wandb_enabled",
        "mlflow_enabled",
        "wandb",
        "mlflow",
    } <= {field.name for field in msgspec.structs.fields(LoggerConfig)}
    assert {"project", "name"} <= set(WandbConfig.__struct_fields__)
    assert {"project", "name"} <= set(TrackioConfig.__struct_fields__)
    assert {"experiment_name", "run_name", "tracking_uri"} <= set(MlflowConfig.__struct_fields__)
