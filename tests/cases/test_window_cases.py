"""H13, H17, H22 and H23 on whole runs: what a cut, a publication and a clear may meet."""

from __future__ import annotations

import errno
import logging
import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest
from lives import Lives, effective, last_life, of_kind, settings, states, trained
from make_bundles import reseal

from sc_core.audit import audit
from sc_core.cut import cut_digest, encode_cut
from sc_core.disk import LOCAL
from sc_core.errors import BundleInconsistent, InventoryMismatch, SaveError
from sc_core.manifest import CUT, INFO, POSITION, saved_position, training_info
from sc_core.records import Cut, Prompt, rows_of
from sc_core.testing import MemoryRun
from sc_core.testing.data_plane import MemoryBootstrap, MemoryStore
from sc_core.testing.disk import Crashed
from sc_core.verify import verify

pytestmark = pytest.mark.anyio

# H13: one instant ------------------------------------------------------------------------------

BEFORE_THE_CUT = ["stage before", "stage after", "save before", "save after", "while it waits"]
INSIDE = [
    "cut_digest before",
    "cut_digest after",
    "list_sample_ids before",
    "list_sample_ids after",
    "check_inventory before",
    "check_inventory after",
    "save_checkpoint before",
    "save_checkpoint midway",
    "save_checkpoint after",
]
AFTER = ["finalize_save before", "finalize_save after", "on_disk before", "on_disk after",
         "prune before", "prune after"]  # fmt: skip


class OneMoreBatch(Lives):
    """Lets the rollout pump have one more batch at one position of the save of step 2."""

    def __init__(self, position: str) -> None:
        self.position = position
        self.gap_open = False
        self.committed_in_the_gap = -1
        config = settings("in_order", p=2, k=2, steps=8, checkpointing={"save_period": 2})
        super().__init__(
            config,
            range(100),
            pulls=8,
            step_s=2,
            hooks=self.hook,
            latency=lambda prompt, sibling: 0.1,
        )

        async def runner(work: Callable[..., Any], *args: Any) -> Any:
            await anyio.lowlevel.checkpoint()
            name = (work.func if isinstance(work, partial) else work).__name__
            await self.at(f"{name} before")
            result = work(*args)
            await self.at(f"{name} after")
            return result

        self.runner = runner

    def start_life(self) -> None:
        super().start_life()
        for name in ("save", "finalize_save"):
            setattr(self.trainer, name, self.with_gaps(name, getattr(self.trainer, name)))

    def with_gaps(self, name: str, call: Any) -> Any:
        async def with_gaps(*args: Any) -> None:
            await self.at(f"{name} before")
            await call(*args)
            await self.at(f"{name} after")
            if self.position == "while it waits" and name == "save" and not self.gap_open:
                self.let_in()
                await anyio.sleep(0.15)  # the two are being put when the checkpoint asks

        return with_gaps

    async def hook(self, call: str, point: str) -> None:
        if self.position == "while it waits" and (call, point) == ("put_samples", "midway"):
            await anyio.sleep(1 if self.gap_open else 0)
        await self.at(f"{call} {point}")

    def let_in(self) -> None:
        self.gap_open = True
        self.pulls.set(10)

    async def at(self, position: str) -> None:
        saving = self.controller is not None and self.controller.statistics().step == 2
        if self.gap_open or position != self.position or not saving:
            return
        committed = len(of_kind(self.log.events, "committed"))
        self.let_in()
        await anyio.sleep(1.5)
        self.committed_in_the_gap = len(of_kind(self.log.events, "committed")) - committed


@pytest.mark.parametrize("position", [*BEFORE_THE_CUT, *INSIDE, *AFTER])
async def test_h13_whatever_happens_during_a_save_its_cut_is_of_one_instant(
    position: str,
) -> None:
    run = OneMoreBatch(position)
    assert await run.run(crash_when=lambda e: e.event == "trained" and e.step == 4) is None
    cut = verify(run.directory / "step_2", run.disk).cut
    report = audit(run.log.events, [("step_2", cut)])
    assert report.ok and report.bundles == ("step_2",)
    assert states(cut) == {"committed": list(range(4, cut.next_ordinal))}
    if position == "while it waits":
        assert cut.next_ordinal == 10
    else:
        assert run.committed_in_the_gap == (0 if position in INSIDE else 2)
        assert cut.next_ordinal == (10 if position in BEFORE_THE_CUT else 8)
    store = await snapshot_of(run, 2)
    assert store.rows.keys() == set(rows_of(cut.groups, cut.records))
    assert all(row.columns for row in store.rows.values())

    result = await run.run()
    assert result is not None and (result.reason, result.step) == ("max_steps", 8)
    assert trained(run) == {step: [2 * step - 2, 2 * step - 1] for step in range(1, 9)}


async def snapshot_of(run: MemoryRun, step: int) -> MemoryStore:
    store = MemoryStore()
    bootstrap = MemoryBootstrap(store, disk=run.disk)
    await bootstrap.load_checkpoint(run.directory / f"step_{step}" / "data_plane")
    return store


def put_cut(bundle: Path, cut: Cut) -> None:
    """Make every file of a bundle agree with another cut, as whoever edits it by hand might."""
    info = verify(bundle).info
    changed = training_info(cut, created=info.created, metrics=info.metrics, ft_only=info.ft_only)
    (bundle / CUT).write_bytes(encode_cut(cut))
    (bundle / POSITION).write_bytes(msgspec.msgpack.encode(saved_position(cut)))
    (bundle / INFO).write_bytes(msgspec.json.encode(changed))
    reseal(bundle, cut_digest=cut_digest(cut))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"next_ordinal": 7}, r"step_2: ledger: prompt 9 has a record, but the next .* is 7"),
        ({"prompts_per_step": 1}, r"step_2: in_order: 2 live groups have target step 2, .* 1"),
        ({"weight_version": 1}, r"step_2: weight_version is 2 in MANIFEST.json and 1 in replay_"),
    ],
)  # fmt: skip
async def test_h13_an_edited_cursor_is_refused_with_both_numbers(
    tmp_path: Path, edit: dict[str, int], message: str
) -> None:
    config = settings("in_order", p=2, k=2, steps=2)
    run = Lives(config, range(100), directory=tmp_path / "checkpoints")
    run.disk, run.lives = LOCAL, 0  # type: ignore[assignment]
    run.start_life()
    result = await run.run()
    assert result is not None and result.step == 2
    bundle = run.directory / "step_2"
    cut = verify(bundle).cut
    assert {record.target_step for record in cut.records} == {2, 3, 4} and cut.next_ordinal == 10
    put_cut(bundle, msgspec.structs.replace(cut, **edit))
    run.config = settings("in_order", p=2, k=2, steps=4)
    with pytest.raises(BundleInconsistent, match=message):
        await run.run()
    assert run.engines.rollouts == []


# H17: publishing or pruning fails behind the run's back ---------------------------------------


def refusing(effect: str, name: str, code: int) -> Callable[[str, Path], None]:
    def hook(what: str, path: Path) -> None:
        if (what, path.name) == (effect, name):
            raise OSError(code, os.strerror(code), str(path))

    return hook


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
@pytest.mark.parametrize(("steps", "raised_at"), [(8, 6), (4, 4)], ids=["next-save", "end"])
async def test_h17_a_rename_that_failed_in_the_background_is_raised(
    steps: int, raised_at: int, code: int
) -> None:
    checkpointing = {"save_period": 2, "ft_keep_latest_k": 1}
    run = MemoryRun(
        settings("in_order", p=2, k=1, steps=steps, checkpointing=checkpointing), range(100)
    )
    run.disk.hook = refusing("rename", "tmp_step_4", code)
    with pytest.raises(SaveError, match=rf"publishing .*step_4 .*{os.strerror(code)}"):
        await run.run()
    assert len(run.trainer.trained) == raised_at
    assert run.bundles() == [2]
    assert [event.step for event in of_kind(run.log.events, "checkpoint")] == [2]
    assert (run.log.events[-1].reason or "").startswith("failed: SaveError: ")

    run.disk.hook = None
    result = await run.run()
    assert result is not None and result.step == steps
    assert of_kind(last_life(run), "resumed")[0].step == 2
    assert run.bundles() == [2, steps]  # what it was resumed from stays
    trained(run)


async def test_h17_a_pruning_that_failed_is_told_and_the_new_bundle_stands(
    caplog: pytest.LogCaptureFixture,
) -> None:
    checkpointing = {"save_period": 2, "ft_keep_latest_k": 1}
    run = MemoryRun(
        settings("in_order", p=2, k=1, steps=6, checkpointing=checkpointing), range(100)
    )
    run.disk.hook = refusing("rename", "step_2", errno.EIO)
    with caplog.at_level(logging.WARNING):
        result = await run.run()
    assert result is not None and (result.reason, result.step) == ("max_steps", 6)
    assert run.bundles() == [2, 6]
    told = [record.getMessage() for record in caplog.records]
    assert any("could not be pruned: deleting /checkpoints/step_2 failed" in one for one in told)


@pytest.mark.parametrize("seed", range(4))
async def test_h17_killed_between_data_and_rename_the_step_is_saved_by_the_next_life(
    seed: int,
) -> None:
    run = MemoryRun(
        settings("in_order", p=2, k=1, steps=6, checkpointing={"save_period": 2}), range(100)
    )

    def power_cut(what: str, path: Path) -> None:
        if (what, path.name) == ("rename", "tmp_step_4"):
            run.disk.crashed = True
            raise Crashed("before the rename")

    run.disk.hook = power_cut
    with pytest.raises(Crashed):
        await run.run()
    run.disk = run.disk.after_crash(seed)
    assert run.bundles() == [2]
    result = await run.run()
    assert result is not None and result.step == 6
    assert of_kind(last_life(run), "resumed")[0].step == 2
    assert run.bundles() == [2, 4, 6]
    assert "tmp_step_4" not in run.disk.entries(run.directory)
    trained(run)


# H22: rows that are being deleted ---------------------------------------------------------------


def owned(run: MemoryRun) -> set[str]:
    assert run.controller is not None
    records = run.controller.ledger_records()
    groups = [r.group_id for r in records if r.state in ("committed", "selected")]
    return {f"{group}_g{sibling}" for group in groups for sibling in range(2)}


@pytest.mark.parametrize("sampler", ["in_order", "windowed"])
async def test_h22_rows_are_hidden_before_they_are_deleted_and_ids_are_not_used_again(
    sampler: str,
) -> None:
    """Also of groups that were evicted as stale, or tried again after a torn put."""
    torn = Counter[str]()
    gaps = 0

    async def slow_and_flaky(call: str, point: str) -> None:
        nonlocal gaps
        if point != "midway":
            return
        if call == "clear_samples":
            going = {one for one, row in run.store.rows.items() if not row.columns}
            assert going.isdisjoint(owned(run))
            gaps += bool(going)
            await anyio.sleep(3)
            assert going.isdisjoint(owned(run))
        if call == "put_samples" and torn["put"] < 3:
            torn["put"] += 1
            raise ConnectionError("torn in the middle")

    def uneven(prompt: Prompt, sibling: int) -> float:
        return 0.3 + prompt.ordinal * 7 % 11

    config = settings(sampler, p=2, k=1, steps=12, checkpointing={"save_period": 3})
    run = Lives(config, range(200), latency=uneven, hooks=slow_and_flaky)
    result = await run.run()
    assert result is not None and result.step == 12
    assert gaps >= 12 and torn["put"] == 3
    committed = [event.group_id for event in of_kind(effective(run), "committed")]
    dispatched = [event.group_id for event in of_kind(effective(run), "dispatched")]
    assert len(set(committed)) == len(committed)
    assert len(set(dispatched)) == len(dispatched)
    assert run.store.rows.keys() == owned(run)
    trained(run)


@pytest.mark.parametrize("point", ["before", "midway", "after"])
async def test_h22_a_snapshot_has_each_group_whole_or_not_at_all(point: str) -> None:
    """A save is asked for while the rows of a trained step are being deleted."""
    asked = 0

    async def ask(call: str, at: str) -> None:
        nonlocal asked
        if (call, at) == ("clear_samples", point):
            assert run.controller is not None
            asked += 1
            run.controller.request_checkpoint()
            await anyio.sleep(5)

    config = settings("windowed", p=2, k=2, steps=6)
    run = Lives(config, range(100), hooks=ask)
    result = await run.run()
    assert result is not None and asked == 6
    assert run.bundles() == [1, 2, 3, 4, 5, 6]
    for step in run.bundles():
        cut = verify(run.directory / f"step_{step}", run.disk).cut
        store = await snapshot_of(run, step)
        assert store.rows.keys() == set(rows_of(cut.groups, cut.records))
        assert all({"tokens", "reward"} <= row.columns.keys() for row in store.rows.values())


async def test_h22_a_delete_that_failed_is_repeated_also_after_a_restart() -> None:
    """The first life can't delete at all: its bundle names the rows, and the next one does it."""
    refusals = 0

    async def refuse(call: str, point: str) -> None:
        nonlocal refusals
        if (call, point) == ("clear_samples", "midway") and run.lives == 1:
            refusals += 1
            raise ConnectionError("storage unit is restarting")

    config = settings("windowed", p=2, k=1, steps=4, checkpointing={"save_period": 2})
    run = Lives(config, range(100), hooks=refuse)
    cut = await run.until_saved()
    gone = {f"{ordinal}.0_g{sibling}" for ordinal in range(4) for sibling in range(2)}
    assert set(cut.suspects) == gone and refusals == 4
    assert gone.isdisjoint(rows_of(cut.groups, cut.records))
    restored: list[set[str]] = []

    def look(event: Any) -> bool:
        if event.event == "resumed":
            restored.append(set(run.store.rows))
        return False

    result = await run.run(crash_when=look)
    assert result is not None and result.step == 4
    assert restored == [set(rows_of(cut.groups, cut.records))]
    assert run.store.rows.keys() == owned(run)
    trained(run)


async def test_h22_a_late_write_is_found_before_it_gets_into_a_bundle() -> None:
    """Nobody can refuse a write to the store; no group owns such a row, so no save takes it."""

    def write_late(event: Any) -> bool:
        if event.event == "trained" and event.step == 3:
            run.store.row("0.0_g1").columns["late"] = msgspec.Raw(b"\x01")
        return False

    config = settings("windowed", p=2, k=1, steps=8, checkpointing={"save_period": 2})
    run = Lives(config, range(100))
    with pytest.raises(InventoryMismatch, match=r"1 unexpected \(0\.0_g1\)"):
        await run.run(crash_when=write_late)
    assert run.bundles() == [2]
    result = await run.run()
    assert result is not None and result.step == 8
    assert run.store.rows.keys() == owned(run)
    trained(run)


# H23: prompts in flight at two restarts in a row ----------------------------------------------


@pytest.mark.parametrize("recovery", ["prompt_group", "sibling"])
async def test_h23_prompts_in_flight_survive_two_restarts_with_payload_and_one_lineage(
    recovery: str,
) -> None:
    """Two prompts never finish in two lives; of one of them the first of two siblings does."""
    payloads = [{"text": f"question {n}", "raw": bytes([n, 0, 255])} for n in range(8)]

    async def held(prompt: Prompt, sibling: int, version: int) -> None:
        if run.lives < 3 and prompt.ordinal in (2, 3) and (prompt.ordinal, sibling) != (2, 0):
            await anyio.sleep_forever()

    def second_save(event: Any) -> bool:
        if event.event == "weight_sync" and run.controller is not None:
            run.controller.request_checkpoint()
        return bool(event.event == "checkpoint")

    config = settings(
        "in_order",
        p=2,
        k=1,
        steps=4,
        checkpointing={"save_period": 1},
        rollout_recovery={"default_granularity": recovery},
    )
    kept = {"2.0_g0"} if recovery == "sibling" else set()
    run = Lives(config, payloads, script=held, pulls=4)
    first = await run.until_saved()
    assert await run.run(crash_when=second_save) is None
    second = verify(run.directory / "step_1", run.disk).cut
    assert second.incarnation != first.incarnation
    for cut in (first, second):
        assert [record.ordinal for record in cut.records[:2]] == [2, 3]
        assert [record.payload for record in cut.records[:2]] == payloads[2:4]
    assert cut_payloads(first) == cut_payloads(second)[:2]
    rows = (await snapshot_of(run, 1)).rows
    assert {row for row in rows if row.startswith(("2.", "3."))} == kept

    result = await run.run()
    assert result is not None and result.step == 4
    assert trained(run) == {1: [0, 1], 2: [2, 3], 3: [4, 5], 4: [6, 7]}
    lineage = {e.ordinal: e.group_id for e in of_kind(effective(run), "trained")}
    assert (lineage[2], lineage[3]) == ("2.2", "3.2")
    calls = Counter(ordinal for ordinal, _, _ in run.engines.rollouts)
    assert (calls[2], calls[3]) == (2 - len(kept), 2)
    assert result.counters["samples"] == 16
    assert run.store.rows.keys() == owned(run) == set()


def cut_payloads(cut: Cut) -> list[bytes]:
    return [msgspec.msgpack.encode(record.payload) for record in cut.records]
