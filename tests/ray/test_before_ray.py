"""What `train` refuses, or finds done, before Ray: the directory stays as it was."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest
from make_bundles import fill, make_cut

from sc_core.cut import cut_digest
from sc_core.records import Evaluation
from sc_ray.__main__ import DONE, FAILED, WRONG_USAGE, main
from sc_ray.prepared import Prepared, build_prompts
from sc_ray.run_directory import RunDirectory, last_report, published
from sc_ray.run_store import open_store
from sc_ray.settings import TrainConfig, load_config, to_plain

SETTINGS = ("grpo.num_generations_per_prompt=2", "grpo.max_num_steps=4", "grpo.val_period=3")
LAST = {"step": 4, "max_steps": 4, "last_metrics": {"step": 4}}


def save(run: Path, step: int, config: TrainConfig, evaluation: Evaluation | None = None) -> None:
    prepared = Prepared.of(config)
    cut = msgspec.structs.replace(
        make_cut(step),
        source_fingerprint=build_prompts(config, prepared.task).fingerprint(),
        evaluation=evaluation,
    )
    store = open_store(run)
    store.open()
    try:
        staged = fill(store, step)
        prepared.tokenizer.save(staged.policy_dir)
        store.publish(staged, cut=cut, digest=cut_digest(cut), config=to_plain(config), metrics={})
    finally:
        store.close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that has ended with `step_4`."""
    with RunDirectory(tmp_path / "run") as directory:
        for step in (2, 4):
            save(directory.path, step, load_config("demo", SETTINGS))
        (directory.path / "config.yaml").write_text("of the start that ran\n")
        directory.report("done", LAST)
        return directory.path


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ray never starts; that something would have is in here."""
    asked: list[str] = []

    def live(*_: Any) -> Any:
        asked.append("a life")
        raise OSError("Ray was started")

    monkeypatch.setattr("sc_ray.__main__._live", live)
    return asked


def contents(run: Path) -> dict[str, bytes]:
    """Every file but the lock, which names the last process that had it."""
    files = (file for file in sorted(run.rglob("*")) if file.is_file())
    return {str(file): file.read_bytes() for file in files if file.name != "lock"}


def train(run: Path, *more: str) -> int:
    return main(["train", "--config", "demo", "--out", str(run), *SETTINGS, *more])


@pytest.mark.parametrize(
    ("more", "status", "says"),
    [
        (["--resume", "never"], FAILED, "holds 2 checkpoints: resume from"),
        (["--resume", "RUN/checkpoints/step_999"], WRONG_USAGE, "there is no checkpoint RUN/check"),
        (["--resume", "RUN/checkpoints/step_2"], FAILED, "also holds step_4: move them away"),
        (["logger.prometheus_port=PORT"], WRONG_USAGE, "Address already in use"),
        (["policy.model.hidden_size=-1"], WRONG_USAGE, "it must be at least 1"),
        (
            ["policy.model.hidden_size=64"],
            FAILED,
            "policy.model.hidden_size was 128 and is 64: RUN/checkpoints/step_4 has weights",
        ),
        (
            ["policy.model.tie_word_embeddings=true"],
            FAILED,
            "policy.model.tie_word_embeddings was False and is True",
        ),
        (["task.characters=é"], FAILED, "1 of them others ('é'): RUN/checkpoints/step_4 is of an"),
        (["grpo.num_generations_per_prompt=3"], FAILED, "a run can't change its group size"),
        (["grpo.seed=5"], FAILED, "the checkpoint's prompts have fingerprint"),
    ],
)
def test_a_refused_start_leaves_the_run_as_it_was(
    capsys: pytest.CaptureFixture[str],
    run: Path,
    started: list[str],
    more: list[str],
    status: int,
    says: str,
) -> None:
    before = contents(run)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        asked = [one.replace("RUN", str(run)).replace("PORT", port) for one in more]
        assert train(run, *asked) == status
    out, err = capsys.readouterr()
    assert says.replace("RUN", str(run)) in err and err.count("\n") == 1 and out == ""
    assert contents(run) == before
    assert started == []


def test_a_key_that_the_bundles_were_not_signed_with_is_told_before_ray(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, run: Path
) -> None:
    before = contents(run)
    monkeypatch.setenv("SC_BUNDLE_KEY", "secret")
    assert train(run) == FAILED
    assert "step_4: MANIFEST.json" in capsys.readouterr().err
    assert contents(run) == before


@pytest.mark.parametrize(
    "wrong", [["logger.prometheus_port=PORT"], ["--resume", "/nowhere/step_4"], ["task.name=x"]]
)
def test_a_refused_start_makes_no_directory(tmp_path: Path, wrong: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert train(tmp_path / "run", *(one.replace("PORT", port) for one in wrong)) != DONE
    assert not (tmp_path / "run").exists()


def test_a_run_with_nothing_left_to_do_says_so_and_starts_nothing(
    capsys: pytest.CaptureFixture[str], run: Path, started: list[str]
) -> None:
    before = contents(run)
    assert train(run) == DONE
    line = f"nothing left to do: step 4 of 4 is in {run / 'checkpoints' / 'step_4'}\n"
    assert capsys.readouterr() == (line, "")
    assert train(run, "--resume", str(run / "checkpoints" / "step_4")) == DONE
    assert contents(run) == before
    assert started == []


def evaluated(finished: bool) -> Evaluation:
    summary = {"val/reward": 0.5} if finished else None
    return Evaluation(weight_version=4, fingerprint="held out", prompts=1, summary=summary)


@pytest.mark.parametrize(
    ("more", "last", "goes_on"),
    [
        ("grpo.max_num_steps=5", None, True),
        ("grpo.val_at_end=true", None, True),
        ("grpo.val_at_end=true", evaluated(finished=True), False),
        ("grpo.val_at_end=true", evaluated(finished=False), True),
        ("grpo.val_period=4", None, True),
    ],
)
def test_what_is_left_is_done(
    tmp_path: Path, started: list[str], more: str, last: Evaluation | None, goes_on: bool
) -> None:
    with RunDirectory(tmp_path) as directory:
        save(tmp_path, 4, load_config("demo", SETTINGS), last)
        directory.report("done", LAST)
    assert train(tmp_path, more) == (FAILED if goes_on else DONE)
    assert len(started) == goes_on


def test_after_a_kill_or_damage_a_run_at_its_last_step_is_ended_in_order(
    run: Path, started: list[str]
) -> None:
    with RunDirectory(run) as directory:
        directory.report("running", LAST)
    assert train(run) == FAILED
    with RunDirectory(run) as directory:
        directory.report("done", LAST)
    (run / "checkpoints" / "step_4" / "policy" / "weights.bin").write_bytes(b"other")
    assert train(run, "grpo.max_num_steps=2") == FAILED
    assert len(started) == 2


def test_a_start_that_fails_later_keeps_the_numbers_of_the_last_step(
    capsys: pytest.CaptureFixture[str], run: Path
) -> None:
    assert train(run, "grpo.max_num_steps=9") == FAILED
    told = last_report(run)
    assert (told["phase"], told["error"], told["pid"]) == ("failed", "Ray was started", os.getpid())
    assert {name: told[name] for name in LAST} == LAST
    assert list(published(run)) == ["step_4", "step_2"]
    json.dumps(told)
