"""Directories in memory: who lives keeps its own, whoever cleans up beside it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from sc_ray.memory import MemoryDirectory, _lock, remove_leftovers


@pytest.mark.parametrize("cleaner", ["is done", "is at work"])
def test_one_that_is_being_made_while_another_process_cleans_up_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cleaner: str
) -> None:
    """Engines of a run start side by side, and each removes what a dead one has left."""
    make: Any = tempfile.mkdtemp
    made: list[str] = []

    def mkdtemp(**arguments: Any) -> str:
        made.append(make(**arguments))
        if len(made) == 1 and cleaner == "is done":
            remove_leftovers("run", parent=tmp_path)
        elif len(made) == 1:
            assert _lock(Path(made[0])) is not None
        path: str = made[-1]
        return path

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    memory = MemoryDirectory("run", parent=tmp_path)
    assert memory.path == Path(made[1]) and memory.path.is_dir()
    remove_leftovers("run", parent=tmp_path)
    assert memory.path.is_dir(), "it lives"
    memory.close()
    assert not memory.path.exists()


def test_what_a_dead_one_left_is_removed_also_if_that_was_cut_short(tmp_path: Path) -> None:
    for name in ("single-controller.run.a", "single-controller.run.b.gone"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text("w")
    remove_leftovers("run", parent=tmp_path)
    assert list(tmp_path.iterdir()) == []
