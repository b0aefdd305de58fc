"""report.html, as a person sees it: in Chromium, from a file, with nothing else to load."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from browser import Watched, open_page
from playwright.sync_api import Browser
from recorded import HOSTILE, RecordedRun, write_run

from sc_core.__main__ import main
from sc_core.audit import audit
from sc_core.errors import CannotShow
from sc_core.seeing import write_report
from sc_core.seeing.words import duration

SECTIONS = ("learning", "stale", "buffer", "time", "checkpoints", "dropped", "lives", "engines")
FIGURES = ("reward", "loss", "staleness", "lag", "levels", "parts", "windows")
WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 420, "height": 900}


@pytest.fixture(scope="module")
def shown(run: RecordedRun, browser: Browser) -> Iterator[Watched]:
    with open_page(browser, viewport=WIDE, color_scheme="light") as seen:
        visit(seen, write_report(run.out))
        yield seen


def visit(seen: Watched, report: Path) -> None:
    seen.page.goto(report.resolve().as_uri())
    seen.until("document.documentElement.dataset.drawn !== undefined")


def rows(seen: Watched, table: str) -> list[list[str]]:
    """The cells of a table's body."""
    script = (
        "table => [...document.querySelectorAll(`#${table} tbody tr`)]"
        ".map(row => [...row.cells].map(cell => cell.innerText))"
    )
    return list(seen.page.evaluate(script, table))


def tiles(seen: Watched) -> dict[str, str]:
    script = (
        "() => Object.fromEntries([...document.querySelectorAll('.tile')].map(tile =>"
        " [tile.querySelector('dt').innerText, tile.querySelector('dd').firstChild.data]))"
    )
    return dict(seen.page.evaluate(script))


def test_it_asks_for_nothing_and_complains_of_nothing(shown: Watched) -> None:
    assert shown.requests == []
    assert shown.complaints == []


def test_every_section_is_there_and_every_curve_is_drawn(shown: Watched) -> None:
    for name in SECTIONS:
        section = shown.page.locator(f"section#{name}")
        assert section.locator("h2").inner_text()
        assert len(section.locator("h2 + p").inner_text()) > 30  # how to read it
        assert section.locator(".none").count() == 0
    for name in FIGURES:
        assert shown.page.locator(f"#{name} svg.main-svg").count() > 0
        assert shown.page.locator(f"#{name} .trace path").count() > 0


def test_windows_and_restarts_are_those_of_the_log(run: RecordedRun, shown: Watched) -> None:
    events = run.log.events
    published = [f"{e.step}" for e in events if e.event == "checkpoint"]
    windows = rows(shown, "windows-table")
    assert [row[0] for row in windows if row[-1].startswith("published")] == published
    assert all(row[1:5] == ["0", "820 ms", "800 ms", "1.12 s"] for row in windows)
    resumed = [f"resumed from step {e.step}" for e in events if e.event == "resumed"]
    lives = rows(shown, "lives-table")
    assert [row[2] for row in lives] == ["a fresh start", *resumed]
    assert [row[6] for row in lives] == ["killed", "killed", "max_steps"]
    assert tiles(shown)["Restarts"] == f"{len(resumed)}"
    lines = "#{} .shapelayer path".format
    assert all(shown.page.locator(lines(name)).count() == 2 for name in ("reward", "levels"))


def test_the_headline_is_the_audits_and_the_metrics(run: RecordedRun, shown: Watched) -> None:
    report = audit(run.log.events)
    by_step = {row["step"]: row["train/reward"] for row in run.rows}
    rewards = [by_step[step] for step in range(1, 201)]
    first, last = sum(rewards[:10]) / 10, sum(rewards[-10:]) / 10
    told = tiles(shown)
    assert told["Steps"] == "200"
    assert "10 more undone by restarts" in shown.page.inner_text(".tiles")
    assert told["Mean reward"] == f"{first:.3f} → {last:.3f}"
    assert told["Prompts trained"] == f"{report.trained:,}"
    assert told["Dropped"] == f"{sum(report.dropped.values())}"
    assert told["Pending"] == f"{sum(report.pending.values())}"
    assert told["Mean staleness"] == "1.96"
    assert told["Commits waited"] == "5.16 s"
    verdict = shown.page.inner_text("#audit")
    assert verdict.startswith("Every prompt is accounted for.")
    assert "No engine served a version that it had not confirmed." in verdict
    assert "they go on if the run is resumed" in verdict
    assert "Done, all steps made" in shown.page.inner_text("header")


def test_what_comes_from_the_run_is_text_and_not_html(run: RecordedRun, shown: Watched) -> None:
    drops = rows(shown, "drops-table")
    report = audit(run.log.events)
    assert {row[0]: int(row[1]) for row in drops} == report.dropped
    assert any(HOSTILE in row[-1] for row in drops)
    assert shown.page.inner_text("h1") == run.out.name
    assert shown.page.title().startswith(run.out.name)
    assert shown.page.locator("img, b b").count() == 0


def test_no_chart_has_a_toolbar(shown: Watched) -> None:
    for name in FIGURES:
        shown.page.hover(f"#{name}")
    assert shown.page.locator(".modebar").count() == 0


def test_no_table_is_wider_than_a_desktop_page(
    older: RecordedRun, browser: Browser, tmp_path: Path
) -> None:
    slow = [{k: 754.0 if "checkpoint/" in k else v for k, v in r.items()} for r in older.rows]
    write_run(tmp_path, older.log.events, slow)
    with open_page(browser, viewport=WIDE) as seen:
        visit(seen, write_report(tmp_path))
        windows = rows(seen, "windows-table")
        assert windows[0][1] == "12 min 34 s"
        assert "published, then passed over" in [row[-1] for row in windows]
        wide = "all => all.map(each => each.scrollWidth - each.clientWidth)"
        assert set(seen.page.eval_on_selector_all(".scroll", wide)) == {0}


def test_what_a_restart_undid_is_not_called_killed(older: RecordedRun, browser: Browser) -> None:
    with open_page(browser, viewport=WIDE) as seen:
        visit(seen, write_report(older.out))
        assert "undone by a restart" in str(seen.page.text_content("#reward .legend"))
        before = seen.page.inner_text("main").partition("Lives and restarts\n")[0]
        assert "kill" not in before
        assert "without what lay between them" in seen.page.inner_text("#buffer")
        assert "seconds of running" in str(seen.page.text_content("#levels .xtitle"))


def test_a_run_without_losses_and_names_of_engines_speaks_of_neither(
    run: RecordedRun, browser: Browser, tmp_path: Path
) -> None:
    unnamed = [msgspec.structs.replace(event, served=None) for event in run.log.events]
    lossless = [{k: v for k, v in row.items() if k != "train/loss"} for row in run.rows]
    write_run(tmp_path, unnamed, lossless)
    with open_page(browser, viewport=WIDE) as seen:
        visit(seen, write_report(tmp_path))
        assert seen.page.inner_text("#learning h2") == "Reward"
        assert "Loss" not in seen.page.inner_text("nav").title()
        assert "loss" not in seen.page.inner_text("#learning").lower()
        assert "engine" not in seen.page.inner_text("#audit")
        assert "No group of this run names" in seen.page.inner_text("#engines .none")
        write_run(tmp_path, run.log.events[:3000], [{**r, "train/reward": None} for r in lossless])
        visit(seen, write_report(tmp_path))
        said = seen.page.inner_text("#learning .none")
        assert said == "The metrics have no reward and no loss."


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_telephone_in_both_colour_schemes(
    run: RecordedRun, browser: Browser, scheme: Any
) -> None:
    with open_page(browser, viewport=NARROW, color_scheme=scheme) as seen:
        visit(seen, write_report(run.out))
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= 420
        paper = seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
        ink = seen.page.evaluate(
            "getComputedStyle(document.querySelector('#reward .xtick text')).fill"
        )
        dark = [sum(map(int, c.strip("rgb()").split(", "))) < 384 for c in (paper, ink)]
        assert dark == [scheme == "dark", scheme == "light"]
        assert seen.complaints == []


def test_it_follows_the_reader_from_light_to_dark_and_to_paper(
    run: RecordedRun, browser: Browser
) -> None:
    ink = "getComputedStyle(document.querySelector('#reward .xtick text')).fill"
    with open_page(browser, viewport=WIDE, color_scheme="light") as seen:
        visit(seen, write_report(run.out))
        light = seen.page.evaluate(ink)
        seen.page.emulate_media(color_scheme="dark")
        seen.until(f"{ink} !== '{light}'")
        dark = seen.page.evaluate(ink)
        seen.page.emulate_media(color_scheme="dark", media="print")
        seen.until(f"{ink} !== '{dark}'")
        assert seen.page.evaluate("getComputedStyle(document.body).backgroundColor") == (
            "rgb(255, 255, 255)"
        )
        assert not seen.page.is_visible("nav")
        assert seen.page.pdf()[:4] == b"%PDF"


def test_a_run_without_metrics_or_spans_has_what_the_log_tells(
    run: RecordedRun, browser: Browser, tmp_path: Path
) -> None:
    write_run(tmp_path, run.log.events[:3000], [])
    with open_page(browser, viewport=WIDE) as seen:
        visit(seen, write_report(tmp_path))
        assert seen.complaints == []
        assert "There are no metrics yet" in seen.page.inner_text("#learning")
        assert tiles(seen)["Mean reward"] == "– → –"
        assert rows(seen, "windows-table")[0][1:5] == ["–"] * 4
        assert "running, or killed" in seen.page.inner_text("header").lower()
        assert "go on if" not in seen.page.inner_text("#audit")  # they do, for all we know


def test_a_run_that_has_just_begun_has_a_page(
    run: RecordedRun, browser: Browser, tmp_path: Path
) -> None:
    write_run(tmp_path, run.log.events[:1], [])
    with open_page(browser, viewport=WIDE) as seen:
        visit(seen, write_report(tmp_path))
        assert seen.complaints == []
        assert tiles(seen)["Steps"] == "0"
        for name in ("learning", "stale", "time", "checkpoints", "dropped", "engines"):
            assert seen.page.locator(f"section#{name} .none").count() == 1


def test_a_log_that_contradicts_itself_is_told_at_the_top(run: RecordedRun, tmp_path: Path) -> None:
    events = list(run.log.events[:2000])
    at = next(i for i, e in enumerate(events) if e.event == "committed" and i > 1000)
    engine = next(iter(events[at].served or {}))
    events[at] = msgspec.structs.replace(events[at], served={engine: (1,)})
    write_run(tmp_path, events, [])
    report = audit(events)
    assert not report.ok and report.served.startswith("engines served versions that they had not")
    html = write_report(tmp_path).read_text()
    assert 'class="verdict bad"' in html
    assert f"Engines served versions that they had not confirmed: {engine} did, 1 times." in html


def test_its_curves_keep_to_some_thousands_of_points(run: RecordedRun, tmp_path: Path) -> None:
    write_run(tmp_path, run.log.events, [])
    row = {"timing/train/total_step_time": 1.0, "train/loss": 0.5, "train/reward": 0.25}
    lines = (json.dumps({"step": step, **row}) for step in range(1, 30_001))
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    html = write_report(tmp_path).read_text()
    _, _, embedded = html.partition('id="figures">')
    figures = json.loads(embedded.partition("</script>")[0])
    sizes = [len(one["x"]) for figure in figures.values() for one in figure["data"]]
    assert 1000 <= max(sizes) <= 2000
    assert "Each point is the mean of 16 steps." in html


def test_without_plotly_it_names_the_extra(
    run: RecordedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(CannotShow, match=r"pip install 'single-controller\[report\]'"):
        write_report(run.out)
    assert main(["report", str(run.out)]) == 1
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert main(["trace", str(run.out)]) == 0  # needs none of it


def test_commands_print_where_they_wrote(
    run: RecordedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command, name in (("report", "report.html"), ("trace", "trace.json")):
        assert main([command, str(run.out)]) == 0
        assert capsys.readouterr().out == f"{run.out / name}\n"
        other = tmp_path / f"other-{name}"
        assert main([command, str(run.out), "--out", str(other), "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told == {"ok": True, "path": str(other), "bytes": other.stat().st_size}


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["report", "nowhere"], 2, "nowhere does not exist"),
        (["trace", "."], 2, "has no events.jsonl: is it the directory of a run?"),
        (["trace", ".", "--steps", "-1"], 2, "invalid step_count value: '-1'"),
        (["report", "empty"], 1, "events.jsonl has no events yet"),
        (["trace", "torn"], 1, "line 1 is not an event"),
        (["report", "fine", "--out", "missing/report.html"], 1, "No such file or directory"),
        (["report", "fine", "--out", "."], 1, "Is a directory"),
        (["trace", "fine", "--out", "/"], 1, "Is a directory"),
    ],
)
def test_what_cannot_be_shown_is_one_line_and_a_status(
    arguments: list[str],
    status: int,
    said: str,
    run: RecordedRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in (("empty", ""), ("torn", '{"seq": 1}\n{"seq": 2}\n')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "events.jsonl").write_text(content)
    (tmp_path / "fine").mkdir()
    write_run(tmp_path / "fine", run.log.events[:5], [])
    try:
        ended = main(arguments)
    except SystemExit as exc:
        ended = exc.code  # type: ignore[assignment]
    told = capsys.readouterr()
    assert ended == status
    assert said in (told.out + told.err).splitlines()[-1]
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (None, "–"),
        (0.0, "0"),
        (0.4e-6, "0"),
        (0.000_19, "190 µs"),
        (0.000_9996, "1 ms"),
        (0.0123, "12.3 ms"),
        (0.9996, "1 s"),
        (12.34, "12.3 s"),
        (99.97, "1 min 40 s"),
        (120.0, "2 min"),
        (3599.6, "1 h"),
        (7500.0, "2 h 5 min"),
    ],
)
def test_times_are_as_people_read_them(seconds: float | None, said: str) -> None:
    assert duration(seconds) == said
