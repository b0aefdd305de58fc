"""What is written when a life of a run ends, and what happens if it can't be."""

from __future__ import annotations

from pathlib import Path

import pytest

from sc_core import JsonlEventLog
from sc_ray import views
from sc_ray.views import write_views


def begun(run: Path) -> None:
    log = JsonlEventLog(run / "events.jsonl")
    log.append("run_started", step=0, weight_version=0)
    log.close()


def test_report_and_trace_are_written_without_a_word(tmp_path: Path) -> None:
    begun(tmp_path)
    said: list[str] = []
    write_views(tmp_path, said.append)
    assert said == []
    assert (tmp_path / "report.html").stat().st_size > 1_000_000
    assert b"life 1" in (tmp_path / "trace.json").read_bytes()


def test_of_a_run_that_never_began_nothing_is_written(tmp_path: Path) -> None:
    said: list[str] = []
    write_views(tmp_path, said.append)
    assert said == [] and not list(tmp_path.iterdir())


def test_what_cannot_be_written_is_a_line_each_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(tmp_path)
    (tmp_path / "report.html").mkdir()

    def broken(run: Path) -> Path:
        raise KeyError("of a bug")

    monkeypatch.setattr(views, "write_trace", broken)
    said: list[str] = []
    write_views(tmp_path, said.append)
    assert len(said) == 2
    assert said[0].startswith("warning: report.html was not written: [Errno 21] Is a directory")
    assert said[1] == "warning: trace.json was not written: 'of a bug'"
