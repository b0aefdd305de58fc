"""An audit of who served what: hand-made logs of engines that had confirmed, and of some that had
not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sc_core import Prompt
from sc_core.__main__ import main
from sc_core.audit import AuditReport, audit
from sc_core.books import Books, Findings
from sc_core.events import JsonlEventLog
from sc_core.records import group_id
from sc_core.testing import MemoryEventLog, MemoryRun
from sc_core.testing.scenarios import settings

A, B = "engine-a", "engine-b"


class Story:
    """A run told event by event. Each prompt goes out once, and each step trains one group."""

    def __init__(self, granularity: str = "prompt_group") -> None:
        self.log = MemoryEventLog("one")
        self.version = 0
        self.settings = {"granularity": granularity}
        self.log.append("run_started", step=0, weight_version=0, settings=self.settings)

    def sync(self, *engines: str) -> Story:
        names = engines or None
        version = self.version
        self.log.append("weight_sync", step=version, weight_version=version, engines=names)
        return self

    def engine(self, name: str, state: str, version: int | None = None) -> Story:
        self.log.append("engine", engines=(name,), reason=state, weight_version=version)
        return self

    def out(self, ordinal: int) -> Story:
        self.log.append("admitted", ordinal=ordinal)
        return self.again(ordinal, 0)

    def again(self, ordinal: int, attempt: int, start: int | None = None) -> Story:
        version = self.version if start is None else start
        self._tell("dispatched", ordinal, attempt, weight_version=version)
        return self

    def commit(
        self,
        ordinal: int,
        served: dict[str, tuple[int, ...]],
        *,
        attempt: int = 0,
        start: int | None = None,
    ) -> Story:
        version = self.version if start is None else start
        self._tell("committed", ordinal, attempt, weight_version=version, served=served)
        return self

    def train(self, ordinal: int, attempt: int = 0) -> Story:
        """Without the weight sync that follows."""
        self.version += 1
        self._tell("selected", ordinal, attempt, step=self.version)
        version = self.version
        self._tell("trained", ordinal, attempt, step=version, weight_version=version)
        return self

    def resume(self) -> Story:
        seq = self.log.seq
        self.log = self.log.after_crash("two")
        self.log.append(
            "resumed",
            parent="one",
            parent_seq=seq,
            digest="d",
            step=self.version,
            weight_version=self.version,
            settings=self.settings,
        )
        return self

    def _tell(self, kind: Any, ordinal: int, attempt: int, **fields: Any) -> None:
        self.log.append(kind, ordinal=ordinal, group_id=group_id(ordinal, attempt), **fields)

    def report(self) -> AuditReport:
        return audit(self.log.events)


def begun() -> Story:
    return Story().sync(A, B)


GOOD: dict[str, Story] = {
    "siblings on two engines": begun().out(0).commit(0, {A: (0,), B: (0,)}),
    "a worker that names none": begun().out(0).commit(0, {}),
    "the version moved on its way": begun().out(0).out(1).commit(0, {A: (0,)}).train(0).sync()
    .commit(1, {A: (0, 1)}, start=0),
    "it came back before the sync was over": begun().out(0).out(1).commit(0, {A: (0,)}).train(0)
    .commit(1, {A: (1,)}, start=0).sync(),
    "and its engine failed to resume": begun().out(0).out(1).commit(0, {A: (0,)}).train(0)
    .commit(1, {A: (1,)}, start=0).engine(A, "out: resume failed", 1).sync(B),
    "finished by an engine that then died": begun().out(0).engine(A, "restarting: it died")
    .commit(0, {A: (0,)}),
    "and that is dead at the next sync": begun().out(0).out(1).commit(0, {B: (0,)}).train(0)
    .sync(B).commit(1, {A: (0,)}, start=0),
    "a restarted engine that confirmed": begun().engine(A, "restarting: it died").out(0)
    .engine(A, "serving", 0).commit(0, {A: (0,)}),
    "and took part in the syncs that followed": Story().sync(A).engine(A, "restarting: it died")
    .engine(A, "serving", 0).out(0).commit(0, {A: (0,)}).train(0).sync().out(1)
    .commit(1, {A: (1,)}),
    "a new engine": begun().engine("engine-c", "serving", 0).out(0).commit(0, {"engine-c": (0,)}),
    "a request that outlived a quarantine": begun().out(0).engine(A, "quarantined: slow")
    .commit(0, {A: (0,)}),
    "and ended by what it came back with": begun().out(0).out(1).engine(A, "quarantined: slow")
    .commit(0, {B: (0,)}).train(0).sync(B).commit(1, {A: (1,)}, start=0).engine(A, "serving", 1),
    "or by what it got while the next version came": begun().out(0).out(1)
    .engine(A, "quarantined: slow").commit(0, {B: (0,)}).train(0).sync(B)
    .commit(1, {A: (1,)}, start=0).train(1).engine(A, "quarantined: slow", 1).sync(B)
    .engine(A, "serving", 2),
    "after a resume": begun().out(0).commit(0, {A: (0,)}).train(0).resume().sync(A).out(1)
    .commit(1, {A: (1,)}),
    "a sibling kept by a resume": Story("sibling").sync(A).out(0).resume().sync(B)
    .again(0, 1).commit(0, {A: (0,), B: (0,)}, attempt=1),
    "the log ends in the midst of a sync": begun().out(0).out(1).commit(0, {A: (0,)}).train(0)
    .commit(1, {A: (1,)}, start=0),
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_a_group_of_an_engine_that_had_confirmed_is_in_order(name: str) -> None:
    report = GOOD[name].report()
    assert report.violations == ()


BAD: dict[str, tuple[Story, str]] = {
    "it never confirmed": (
        begun().out(0).commit(0, {"engine-c": (0,)}),
        "engine-c at version 0, which it had not confirmed: nothing in this incarnation",
    ),
    "it has older weights": (
        begun().out(0).commit(0, {A: (0,)}).train(0).sync(B).out(1).commit(1, {A: (1,)}),
        "engine-a at version 1, which it had not confirmed: version 0 last, and lost it at seq 8",
    ),
    "older than the stamp": (
        begun().out(0).commit(0, {A: (0,)}).train(0).sync().out(1).commit(1, {A: (0,)}),
        "engine-a at version 0, and its start version is 1",
    ),
    "its process was restarted, and has not confirmed": (
        begun().engine(A, "restarting: it died").out(0).commit(0, {A: (0,)}),
        "engine-a at version 0, which it had not confirmed: version 0 last, and lost it at seq 3",
    ),
    "it got a group in quarantine": (
        begun().engine(A, "quarantined: slow").out(0).commit(0, {A: (0,)}).engine(A, "out: dead")
        .out(1).commit(1, {B: (0,)}).train(1).sync(B),
        "engine-a at version 0, which it had not confirmed: version 0 last, and lost it at seq 3",
    ),
    "it confirmed before the resume only": (
        begun().out(0).resume().sync(B).again(0, 1).commit(0, {A: (0,)}, attempt=1),
        "engine-a at version 0, which it had not confirmed: nothing in this incarnation",
    ),
    "of a prompt that the resume could have kept nothing of": (
        Story("sibling").sync(A).out(0).resume().sync(B).out(1).commit(1, {A: (0,)}),
        "engine-a at version 0, which it had not confirmed: nothing in this incarnation",
    ),
    "the sync that it was ahead of came without it": (
        begun().out(0).out(1).commit(0, {A: (0,)}).train(0).commit(1, {A: (1,)}, start=0).sync(B),
        "engine-a at version 1, which it had not confirmed: version 0 last, and lost it at seq 11",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_one_that_had_not_is_named_with_group_and_versions(name: str) -> None:
    story, problem = BAD[name]
    report = story.report()
    assert [violation.problem.partition(" was served by ")[2] for violation in report.violations] \
        == [problem]  # fmt: skip
    at = report.violations[0]
    (commit,) = [event for event in story.log.events if event.seq == at.seq]
    assert commit.event == "committed" and f"group {commit.group_id} " in at.problem


def test_the_report_counts_what_each_engine_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    story = begun().out(0).commit(0, {A: (0,), B: (0,)}).train(0).sync()
    story.engine(A, "restarting: it died").engine(A, "serving", 1).out(1).commit(1, {A: (1,)})
    engines = story.report().engines
    assert [(name, e.groups, e.confirmed, e.joined) for name, e in engines.items()] == [
        (A, 2, 3, 1),
        (B, 1, 2, 0),
    ]
    log = JsonlEventLog(tmp_path / "events.jsonl", incarnation="one")
    for event in story.log.events:
        fields = {name: getattr(event, name) for name in FIELDS}
        log.append(event.event, **fields)
    log.close()
    assert main(["audit", str(tmp_path / "events.jsonl")]) == 0
    assert (
        "engine-a served 2 groups, confirmed 3 versions (1 of them when it joined);"
        " engine-b served 1 groups, confirmed 2 versions" in capsys.readouterr().out
    )
    assert main(["audit", "--json", str(tmp_path / "events.jsonl")]) == 0
    assert json.loads(capsys.readouterr().out)["engines"][B]["groups"] == 1


FIELDS = (
    "ordinal", "group_id", "step", "weight_version", "reason", "engines", "served", "settings",
)  # fmt: skip


def test_a_long_history_keeps_few_confirmations() -> None:
    story = begun()
    for step in range(300):
        story.out(step).commit(step, {A: (step,)}).train(step).sync()
    books = Books(Findings())
    for event in story.log.events:
        books.enter(event)
    assert max(map(len, books.served._spans.values())) <= 65
    assert story.report().ok


@pytest.mark.parametrize("state", ["in flight", "waiting"])
def test_a_long_history_keeps_what_siblings_of_an_old_attempt_need(state: str) -> None:
    story = Story("sibling").sync(A, B).out(999)  # siblings of it are kept, made by version 0
    for step in range(300):
        if step == 10:
            story._tell("redispatched", 999, 1, reason="infra: it died")
        if step == (11 if state == "in flight" else 299):
            story.again(999, 1, start=0)
        story.out(step).commit(step, {A: (step,)}).train(step).sync()
    story.commit(999, {B: (0,), A: (300,)}, attempt=1, start=0)
    assert [v for v in story.report().violations if v.ordinal == 999] == []


@pytest.mark.anyio
@pytest.mark.parametrize("granularity", ["prompt_group", "sibling"])
async def test_a_run_names_its_engines_in_the_log_and_in_reports(granularity: str) -> None:
    async def script(prompt: Prompt, sibling: int, version: int) -> None:
        assert run.controller is not None
        if prompt.ordinal == 4 and not told:
            told.append("")
            run.controller.engine_is("engine9", "restarting", "it died")
            told.append(str(run.controller.report()))
            assert run.controller.statistics().engines_away == {"engine9": "restarting: it died"}
            run.controller.engine_is("engine9", "quarantined", "it is slow")
            run.controller.engine_is("engine9", "out", "it died again")
            told.append(str(run.controller.report()))

    told: list[str] = []
    run = MemoryRun(settings("windowed", granularity), range(100), engines=2, script=script)
    assert await run.run() is not None
    commits = [event for event in run.log.events if event.event == "committed"]
    assert commits and all(event.served for event in commits)
    assert {name for event in commits for name in event.served or {}} == {"engine0", "engine1"}
    assert "engine9 is restarting: it died" in told[1]
    assert "engine9 is out: it died again" in told[2] and "restarting" not in told[2]
    said = [event for event in run.log.events if event.event == "engine"]
    assert [(event.engines, event.reason) for event in said] == [
        (("engine9",), "restarting: it died"),
        (("engine9",), "quarantined: it is slow"),
        (("engine9",), "out: it died again"),
    ]
    assert audit(run.log.events).ok
