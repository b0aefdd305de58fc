"""`python -m sc_ray status`, without a run behind it."""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sc_ray.__main__ import main
from sc_ray.driver_log import warnings_in
from sc_ray.progress import PlainConsole, ago
from sc_ray.run_directory import RunDirectory, last_report
from sc_ray.supervise import Signals, _View


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


@pytest.mark.parametrize(
    ("age_s", "says"),
    [
        (3.14, "3.1 s ago"),
        (703.7, "12 min ago"),
        (7300, "2 h ago"),
        (5 * 86400, "5 days ago"),
    ],
)
def test_an_age_is_told_as_people_say_it(age_s: float, says: str) -> None:
    assert ago(age_s) == says


def shown(run: RunDirectory, answers: list[dict[str, Any]], resumed_from: str | None) -> list[Any]:
    """What is shown, and reported last, as the controller answers this."""
    seen: list[Any] = []

    class Seen(PlainConsole):
        def show(self, status: Mapping[str, Any]) -> None:
            seen.append(status["bundles"])

    with Signals() as signals:
        view = _View(None, run, Seen(io.StringIO()), signals, 9, resumed_from)
        for answer in answers:
            view.show(answer)
    return seen


def test_the_last_evaluation_and_step_are_kept_while_another_one_runs_and_at_the_end(
    tmp_path: Path,
) -> None:
    with RunDirectory(tmp_path) as run:
        evaluated = {"step": 2, "last_evaluation": {"val/reward": 0.5}}
        shown(run, [evaluated, {"step": 3, "last_evaluation": {}}, {}], None)
    told = last_report(tmp_path)
    assert (told["step"], told["last_evaluation"]) == (3, {"val/reward": 0.5})


def test_a_rejected_bundle_is_not_the_last_checkpoint_until_it_is_replaced(tmp_path: Path) -> None:
    bundles = tmp_path / "checkpoints"
    for step in (2, 4):
        (bundles / f"step_{step}").mkdir(parents=True)
    with RunDirectory(tmp_path) as run:
        assert shown(run, [{"step": 2}], str(bundles / "step_2")) == [["step_2"]]
        assert shown(run, [{"step": 4}], str(bundles / "step_4")) == [["step_4", "step_2"]]
        with Signals() as signals:
            console = PlainConsole(io.StringIO())
            view = _View(None, run, console, signals, 9, str(bundles / "step_2"))
            (bundles / "step_4").rename(tmp_path / "damaged")
            (bundles / "step_4").mkdir()
            view.show({"step": 4})
    assert last_report(tmp_path)["bundles"] == ["step_4", "step_2"]


def test_warnings_of_the_driver_are_in_its_log(tmp_path: Path) -> None:
    with (tmp_path / "driver.log").open("w") as log, warnings_in(log):
        logging.getLogger("sc_core.restore").warning("not resuming from %s", "step_20")
        logging.getLogger("sc_ray.setup").info("not worth it")
    logging.getLogger("sc_core.restore").warning("after its end")
    (line,) = (tmp_path / "driver.log").read_text().splitlines()
    assert line.endswith("WARNING sc_core.restore: not resuming from step_20")
