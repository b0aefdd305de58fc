"""Real runs over real Ray and TransferQueue, killed at random moments."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sc_ray.chaos import MOMENTS, main


def test_a_kill_of_each_kind_loses_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(
        ["--out", str(tmp_path / "chaos"), "--kills", "4", "--seed", "23", "--steps", "10"]
    )
    out, err = capsys.readouterr()
    assert (status, err) == (0, ""), out + err
    last = out.splitlines()[-1]
    told = re.fullmatch(r"chaos: 4 kills over \d+ runs? \((.*)\): .*, every audit clean", last)
    assert told is not None, last
    assert {each.split(" at ")[1] for each in told[1].split(", ")} == set(MOMENTS)


def test_what_is_there_already_is_not_touched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").touch()
    assert main(["--out", str(tmp_path)]) == 1
    assert "is not empty; remove it first" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
