"""What is put off until it is used, and that a mistake is told before it."""

from __future__ import annotations

import gc
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from sc_ray.lazy import lazy, much_is_imported

HEAVY = {"ray", "tensordict", "torch", "transfer_queue", "transformers", "vllm"}


def loaded_by(program: str, libraries: set[str] = HEAVY) -> set[str]:
    """Which of these libraries a process has imported after `program`."""
    script = f"{program}\nimport sys\nprint('\\n', *({libraries!r} & set(sys.modules)))"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("setting", ["grpo.max_num_step=3", "task.jsonl=/nowhere"])
def test_a_mistake_in_the_settings_is_told_before_torch_is_imported(
    tmp_path: Path, setting: str
) -> None:
    asked = ["train", "--out", str(tmp_path / "run"), setting]
    program = f"from sc_ray.__main__ import WRONG_USAGE, main\nassert main({asked}) == WRONG_USAGE"
    assert loaded_by(program) <= {"ray"}


def test_looking_at_a_run_imports_nothing_that_only_its_start_needs(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text('{"phase": "running", "step": 3}')
    program = (
        f"from sc_ray.__main__ import DONE, main\nassert main({['status', str(tmp_path)]}) == DONE"
    )
    watching = {
        "rich",
        "tensorboard",
        "prometheus_client",
        "wandb",
        "mlflow",
        "trackio",
        "omegaconf",
    }
    assert loaded_by(program, HEAVY | watching) == set()
    assert loaded_by("import sc_ray.settings", HEAVY | watching) <= {"ray", "omegaconf"}


def test_the_controllers_process_imports_no_model() -> None:
    assert "transformers" not in loaded_by("import sc_ray.setup, sc_ray.partition")


def test_a_lazy_module_is_imported_by_its_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    colours = lazy("colorsys")
    again = pickle.loads(pickle.dumps(colours))
    assert "colorsys" not in sys.modules
    assert colours.rgb_to_hsv is sys.modules["colorsys"].rgb_to_hsv
    assert again.rgb_to_hsv is colours.rgb_to_hsv
    with pytest.raises(AttributeError, match="no attribute 'smell'"):
        _ = colours.smell


def test_the_collector_rests_while_much_is_imported_and_is_left_as_it_was() -> None:
    assert gc.isenabled()
    with pytest.raises(ImportError), much_is_imported():
        with much_is_imported():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    try:
        with much_is_imported():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
