"""A resume under other settings than those the bundle was saved under."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
from test_controller import at, settings, uneven

from sc_core.audit import audit
from sc_core.config import ControllerConfig
from sc_core.errors import ConfigChanged
from sc_core.events import Event
from sc_core.records import Cut, Prompt
from sc_core.testing import MemoryRun
from sc_core.verify import verify

pytestmark = pytest.mark.anyio


async def saved(config: ControllerConfig, **options: Any) -> tuple[MemoryRun, Cut]:
    """A run that was killed at its first bundle, of step 3, with all committed that could be."""
    run = MemoryRun(config, range(500), **{"latency": uneven, **options})
    save = run.trainer.save

    async def save_late(directory: Path) -> None:
        await save(directory)
        await anyio.sleep(40)

    run.trainer.save = save_late  # type: ignore[method-assign]
    assert await run.run(crash_when=at("checkpoint", 1)) is None
    return run, verify(run.directory / "step_3", run.disk).cut


def events(run: MemoryRun, kind: str) -> list[Event]:
    """Of the last life."""
    mine = run.log.incarnation
    return [e for e in run.log.events if e.incarnation == mine and e.event == kind]


async def finish(run: MemoryRun) -> None:
    result = await run.run()
    assert result is not None and result.step == 12
    assert run.controller is not None
    run.controller.audit()
    report = audit(run.log.events)
    assert report.ok, report.violations


def places(number: int, **rl: Any) -> dict[str, Any]:
    return {"max_buffered_rollouts": number, **rl}


async def test_more_places_are_used_at_once() -> None:
    run, cut = await saved(settings("windowed", async_rl=places(8)))
    run.config = settings("windowed", async_rl=places(20))
    held: list[int] = []

    async def look(prompt: Prompt, sibling: int, version: int) -> None:
        assert run.controller is not None
        held.append(run.controller.statistics().places_held)

    run.script = look
    await finish(run)
    assert len(cut.records) <= 9 and max(held) == 20


@pytest.mark.parametrize("sampler", ["in_order-2", "windowed", "weight_fifo", "ready_first"])
async def test_fewer_places_keep_all_and_admit_nothing_new_until_under(sampler: str) -> None:
    run, cut = await saved(settings(sampler, async_rl=places(12)))
    live = [record.ordinal for record in cut.records if record.admitted]
    assert len(live) > 6
    run.config = settings(sampler, async_rl=places(6))
    await finish(run)
    held = len(live)
    kept = set(live)
    for event in [e for e in run.log.events if e.incarnation == run.log.incarnation]:
        if event.event in ("trained", "dropped"):
            held -= 1
            kept.discard(event.ordinal or 0)
        if event.event == "dispatched" and event.ordinal not in live:
            held += 1
            assert held <= 6
    assert kept == set()


@pytest.mark.parametrize(
    "sampler", ["in_order-0", "in_order-2", "windowed", "weight_fifo", "ready_first"]
)
@pytest.mark.parametrize("per_step", [2, 5])
async def test_another_number_of_groups_per_step_goes_on(sampler: str, per_step: int) -> None:
    run, cut = await saved(settings(sampler))
    run.config = settings(sampler, grpo={"num_prompts_per_step": per_step})
    await finish(run)
    assert [len(step) for step in run.trainer.trained] == [per_step] * 9
    dropped = {event.ordinal for event in events(run, "dropped")}
    trained = [ordinal for step in run.trainer.trained for ordinal in step]
    assert {record.ordinal for record in cut.records if record.admitted} <= {*trained, *dropped}
    if sampler.startswith("in_order"):  # restamped in ordinal order
        assert trained == sorted(trained) and not dropped


SWITCHES = [
    ("windowed", "in_order-2"),
    ("windowed", "weight_fifo"),
    ("in_order-2", "windowed"),
    ("ready_first", "windowed"),
    ("ready_first", "in_order-0"),
    ("weight_fifo", "ready_first"),
]


@pytest.mark.parametrize(("before", "after"), SWITCHES)
async def test_committed_groups_are_offered_to_another_sampler(before: str, after: str) -> None:
    run, cut = await saved(settings(before))
    run.config = settings(after)
    await finish(run)
    again = {ordinal for ordinal, _, _ in run.engines.rollouts}
    dropped = {event.ordinal for event in events(run, "dropped")}
    trained = {ordinal for step in run.trainer.trained for ordinal in step}
    for group in cut.groups:
        assert group.ordinal in trained | dropped
        assert group.ordinal not in again


@pytest.mark.parametrize("on_stale", ["drop", "requeue"])
async def test_what_another_sampler_can_never_select_follows_on_stale_prompt(
    on_stale: str,
) -> None:
    """ready_first leaves two slow groups of version 0 behind, too old for a window of none."""

    async def slow(prompt: Prompt, sibling: int, version: int) -> None:
        if prompt.ordinal in (4, 5) and version == 0:
            await anyio.sleep(29)

    config = settings("ready_first", checkpointing={"save_period": 3})
    run, cut = await saved(config, script=slow, latency=lambda prompt, sibling: 0.0)
    old = {group.ordinal for group in cut.groups if group.start_weight_version == 0}
    assert old == {4, 5}
    run.config = settings(
        "windowed",
        async_rl={
            "sampler": {"name": "windowed", "max_staleness_versions": 0},
            "on_stale_prompt": on_stale,
        },
    )
    await finish(run)
    evicted = {e.ordinal: e.reason for e in reversed(events(run, "evicted"))}  # the first of each
    assert evicted.keys() >= old
    assert {evicted[ordinal] for ordinal in old} == {"stale: 3 versions old"}
    gone = {event.ordinal for event in events(run, "dropped")}
    again = {ordinal for ordinal, _, _ in run.engines.rollouts}
    assert old <= (gone if on_stale == "drop" else again)
    assert old.isdisjoint(again if on_stale == "drop" else gone)


async def test_other_prompts_go_on_only_if_that_is_allowed() -> None:
    run, cut = await saved(settings())
    run.prompts = range(1000, 1500)
    with pytest.raises(ConfigChanged, match=r"prompts have fingerprint .*allow_changed_source"):
        await run.run()
    run.config = settings(checkpointing={"allow_changed_source": True})
    await finish(run)
    assert run.source.pulled[0] == 1000 + cut.position


@pytest.mark.parametrize(
    "sampler", ["in_order-0", "in_order-2", "windowed", "weight_fifo", "ready_first"]
)
async def test_without_the_replay_buffer_rows_go_and_the_same_prompts_come_again(
    sampler: str,
) -> None:
    run, cut = await saved(settings(sampler))
    committed = {group.ordinal for group in cut.groups}
    assert committed
    run.config = settings(sampler, checkpointing={"load_replay_buffer": False})
    at_resume: list[int] = []

    def look(event: Event) -> bool:
        if event.event == "resumed":
            at_resume.append(len(run.store.rows))
        return False

    result = await run.run(crash_when=look)
    assert result is not None and result.step == 12
    assert at_resume == [0]
    assert audit(run.log.events).ok
    first = {e.ordinal: e for e in reversed(events(run, "dispatched"))}
    for ordinal in committed:
        assert first[ordinal].group_id == f"{ordinal}.1"
        assert first[ordinal].weight_version == 3  # generated anew, on the restored weights
    payloads = {record.ordinal: record.payload for record in cut.records}
    assert committed.isdisjoint(run.source.pulled)
    assert {payloads[ordinal] for ordinal in committed} == committed


# the restore order as types ------------------------------------------------------------

RIGHT = """
from sc_core import (
    BootstrapDataPlane, BundleStore, ControllerConfig, Ports, SingleController, inline, restore
)

async def start(
    store: BundleStore, bootstrap: BootstrapDataPlane, config: ControllerConfig, ports: Ports
) -> None:
    ready = await restore(store, bootstrap, config, runner=inline)
    await SingleController(config, ready, ports).run()
"""


def mypy(source: str, tmp_path: Path) -> str:
    snippet = tmp_path / "snippet.py"
    snippet.write_text(source)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache")]
    done = subprocess.run([*command, str(snippet)], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_the_wrong_order_of_a_restore_does_not_type_check(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    assert "Success: no issues found" in mypy(RIGHT, tmp_path)
    wrong = {
        "a controller on a bundle that was only verified": (
            "ready = await restore(store, bootstrap, config, runner=inline)",
            "from sc_core import newest_valid\n    ready = newest_valid(store.directory)",
            'has incompatible type "VerifiedBundle | None"; expected "ReadyStore"',
        ),
        "a controller on a store that nobody proved": (
            "SingleController(config, ready, ports)",
            "SingleController(config, bootstrap, ports)",
            'has incompatible type "BootstrapDataPlane"; expected "ReadyStore"',
        ),
        "a restore that was not awaited": (
            "await restore(",
            "restore(",
            'expected "ReadyStore"',
        ),
        "a restore into a plane that is open already": (
            "await SingleController(",
            "from sc_core import DataPlane\n"
            "    async def again(plane: DataPlane) -> None:\n"
            "        await restore(store, plane, config, runner=inline)\n"
            "    await SingleController(",
            'has incompatible type "DataPlane"; expected "BootstrapDataPlane"',
        ),
    }
    for what, (right, instead, told) in wrong.items():
        assert right in RIGHT
        assert told in mypy(RIGHT.replace(right, instead), tmp_path), what
