"""`python -m sc_ray status`, without a run behind it."""

from __future__ import annotations

from pathlib import Path

import pytest

from sc_ray.__main__ import main
from sc_ray.run_directory import RunDirectory


def test_it_says_that_nothing_moves_and_which_engines_are_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunDirectory(tmp_path) as run:
        run.report("running", {"quiet_s": 754.0, "engines_out": {"generation-1": "it hangs"}})
        assert main(["status", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "no step, evaluation, sync or save for 754 s" in lines
    assert "generation-1 is out: it hangs" in lines


def test_a_run_that_goes_well_says_nothing_of_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunDirectory(tmp_path) as run:
        run.report("running", {"quiet_s": 5.0, "engines_out": {}})
        assert main(["status", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["running", "checkpoints:"]
