"""The crash explorer: that runs survive it, that it counts right, and that it would notice."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest

from sc_core.bundle import BundleStore, Staged
from sc_core.cut import cut_digest
from sc_core.records import Cut, Group
from sc_core.state import Stopwatch
from sc_core.testing import (
    MemoryDisk,
    MemoryEventLog,
    MemoryRun,
    MemoryTrainer,
    MemoryWorld,
    Violation,
    count_points,
    explore,
    replay,
)
from sc_core.testing.__main__ import main
from sc_core.testing.scenarios import (
    GRANULARITIES,
    SAMPLERS,
    SCENARIOS,
    memory_run,
    parts_of,
    settings,
)
from sc_core.testing.schedule import Deadlock, Endless, Stepped, run_alone
from sc_core.train import TrainPump
from sc_core.window import CheckpointWindow, snapshot_metadata

NAMES = list(SCENARIOS)
SAMPLE = 2000  #: crash points over all scenarios, an eighth of them after an earlier crash


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def tiny(steps: int = 2, sampler: str = "in_order") -> MemoryWorld:
    config = settings(sampler, "prompt_group")
    grpo = msgspec.structs.replace(config.grpo, max_num_steps=steps)
    config = msgspec.structs.replace(config, grpo=grpo)
    return MemoryWorld(lambda: memory_run(config), bit_equal=sampler == "in_order")


# runs survive ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_of_the_crashes_of_each_scenario(name: str) -> None:
    points = count_points(SCENARIOS[name]())
    step = points * len(NAMES) * 8 // (SAMPLE * 7) - 1 | 1  # odd: all kinds of points in turn
    found = explore(SCENARIOS[name], points=range(0, points, step), nest_every=150)
    assert found.violations == ()
    assert found.points >= SAMPLE / len(NAMES)
    assert found.nested > 0 < found.awaits and found.effects > 0


def test_every_sampler_and_granularity_has_a_scenario() -> None:
    assert {f"{s}-{g}" for s in SAMPLERS for g in GRANULARITIES} == {*NAMES} - {"evaluation"}
    assert {"in_order", "weight_fifo", "ready_first", "windowed"} <= SAMPLERS.keys()


def test_all_points_of_a_tiny_run_as_an_independent_count_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = logged = 0
    run_handle = asyncio.Handle._run
    append_many, sync = MemoryEventLog.append_many, MemoryEventLog.sync

    def count_step(handle: asyncio.Handle) -> None:
        nonlocal steps
        steps += not isinstance(handle, asyncio.TimerHandle)
        run_handle(handle)

    def count_log(self: MemoryEventLog, *args: Any) -> Any:
        nonlocal logged
        logged += 1
        return (append_many if args else sync)(self, *args)

    whole = tiny()
    with monkeypatch.context() as patch:
        patch.setattr(asyncio.Handle, "_run", count_step)
        patch.setattr(MemoryEventLog, "append_many", count_log)
        patch.setattr(MemoryEventLog, "sync", count_log)
        points = count_points(whole)
    effects = whole.run.disk.effects + logged
    assert points == steps * 2 + effects * 4  # before and amid each effect; a kill, a power cut
    assert points > 900
    found = explore(tiny)
    assert found.violations == () and found.nested == 0
    assert found.effects == effects * 4
    assert abs(found.points - points) < 20  # as tasks are cancelled in the order of a set
    assert 0 < found.lives < found.points


def test_a_crash_during_the_restore_after_a_crash() -> None:
    points = range(0, count_points(tiny()), 61)
    without, found = explore(tiny, points=points), explore(tiny, points=points, nest_every=4)
    assert found.violations == ()
    assert found.points - found.nested == without.points
    assert found.nested > found.points / 2


def test_a_step_is_every_callback_that_the_loop_runs() -> None:
    order: list[str] = []

    async def task(name: str) -> None:
        for _ in range(3):
            order.append(name)
            await anyio.lowlevel.checkpoint()

    async def both() -> None:
        async with anyio.create_task_group() as tg:
            tg.start_soon(task, "a")
            tg.start_soon(task, "b")

    assert run_alone(both(), lambda: order.append("step")) == []
    names = [name for name in order if name != "step"]
    assert names == ["a", "b"] * 3
    assert all(order[at - 1] == "step" for at, name in enumerate(order) if name != "step")


def test_blocking_work_takes_turns_with_the_loop() -> None:
    seen: list[str] = []
    stepped = Stepped(1.0)

    def work(name: str) -> str:
        for _ in range(2):
            stepped.pause()
            seen.append(f"{name} at {loop.time():g}")
        return name

    async def life() -> None:
        async with anyio.create_task_group() as tg:
            tg.start_soon(stepped, work, "a")
            await anyio.sleep(0.5)
            seen.append(f"the loop at {loop.time():g}")
            seen.append(await stepped(work, "b"))
        with pytest.raises(ZeroDivisionError):
            await stepped(lambda: 1 // 0)
        stepped.pause()  # outside such work: nothing

    async def with_loop() -> None:
        nonlocal loop
        loop = asyncio.get_running_loop()
        await life()

    loop: asyncio.AbstractEventLoop
    assert run_alone(with_loop()) == []
    assert seen == ["the loop at 0.5", "a at 2", "b at 2.5", "a at 3", "b at 3.5", "b"]


def test_a_life_that_can_t_end_is_a_violation() -> None:
    async def forever() -> None:
        while True:
            await anyio.lowlevel.checkpoint()

    with pytest.raises(Deadlock):
        run_alone(anyio.Event().wait())
    with pytest.raises(Endless):
        run_alone(forever())

    class Stuck(MemoryWorld):
        async def live(self) -> None:
            await anyio.Event().wait()

    found = explore(lambda: Stuck(lambda: memory_run(settings("windowed", "prompt_group"))))
    assert "Deadlock" in found.violations[0].problem


# broken copies are caught ----------------------------------------------------------------


def cut_in_two_parts(patch: pytest.MonkeyPatch) -> None:
    save = CheckpointWindow.save
    early: list[Cut] = []

    async def read_the_source_first(self: CheckpointWindow, *args: Any, **more: Any) -> None:
        early[:] = [self._take_cut()[0]]
        await anyio.sleep(2)
        await save(self, *args, **more)

    async def snapshot(self: CheckpointWindow, staged: Staged, lap: Stopwatch) -> tuple[Cut, str]:
        late, _ = self._take_cut()
        cut = msgspec.structs.replace(
            late, next_ordinal=early[0].next_ordinal, position=early[0].position
        )
        digest = cut_digest(cut)
        metadata = snapshot_metadata(cut, digest)
        await self._plane.save_checkpoint(staged.data_plane_dir, metadata)
        return cut, digest

    patch.setattr(CheckpointWindow, "save", read_the_source_first)
    patch.setattr(CheckpointWindow, "_snapshot", snapshot)


def no_sync_of_the_parent(patch: pytest.MonkeyPatch) -> None:
    put_in_place = BundleStore._put_in_place

    def put(self: BundleStore, staged: Staged, final: Path) -> None:
        with patch.context() as inner:
            inner.setattr(self.disk, "sync_dir", lambda path: None)
            put_in_place(self, staged, final)

    patch.setattr(BundleStore, "_put_in_place", put)


def no_sync_of_the_log(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryEventLog, "sync", lambda self: None)


def clear_outside_the_section(patch: pytest.MonkeyPatch) -> None:
    async def clear(self: TrainPump, groups: list[Group]) -> None:
        rows = [row for group in groups for row in group.sample_ids]
        started.append(asyncio.ensure_future(self._rows._plane.clear_samples(rows)))

    started: list[asyncio.Future[None]] = []
    patch.setattr(TrainPump, "_clear", clear)


def trainer_not_restored(patch: pytest.MonkeyPatch) -> None:
    async def load(self: MemoryTrainer, directory: Path) -> None:
        await anyio.lowlevel.checkpoint()

    patch.setattr(MemoryTrainer, "load", load)


def source_bundle_written_to(patch: pytest.MonkeyPatch) -> None:
    load = MemoryTrainer.load

    async def load_and_write(self: MemoryTrainer, directory: Path) -> None:
        await load(self, directory)
        self._disk.write(directory / "weights.json", b"[]")

    patch.setattr(MemoryTrainer, "load", load_and_write)


def bundle_under_its_name_too_early(patch: pytest.MonkeyPatch) -> None:
    """Published before it is sealed, as a program might that knows nothing of crashes."""
    seal = Staged.seal

    def early(self: Staged) -> int:
        final = self.path.with_name(f"step_{self.step}")
        self._disk.rename(self.path, final)
        self._disk.rename(final, self.path)
        return seal(self)

    patch.setattr(Staged, "seal", early)


async def slowly(call: str, point: str) -> None:
    if call == "clear_samples" and point == "midway":
        await anyio.sleep(20)


def slow_clear() -> MemoryWorld:
    make = tiny(3)._make

    def run() -> MemoryRun:
        made = make()
        made.hooks = slowly
        return made

    return MemoryWorld(run, bit_equal=True)


@pytest.mark.parametrize(
    "broken, problem",
    [
        (cut_in_two_parts, "was admitted|the next to be pulled is|conservation is broken"),
        (no_sync_of_the_parent, "step_[123] was reported as published, and is gone"),
        (no_sync_of_the_log, "the log has lost some"),
        (clear_outside_the_section, "the run failed: InventoryMismatch"),
        (trainer_not_restored, "the weights are not those of the uninterrupted run"),
        (source_bundle_written_to, "was resumed from, and is not what it was"),
        (bundle_under_its_name_too_early, "none is valid|step_[123] is damaged"),
    ],
)
def test_a_broken_copy_is_caught(
    broken: Callable[[pytest.MonkeyPatch], None], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = {
        clear_outside_the_section: slow_clear,
        cut_in_two_parts: lambda: tiny(3, "windowed"),  # which goes on dispatching meanwhile
    }.get(broken, lambda: tiny(3))
    points = range(0, count_points(make()), 7)  # and without a crash nothing is wrong
    broken(monkeypatch)
    found = explore(make, points=points)
    caught = [one for one in found.violations if re.search(problem, one.problem)]
    assert caught, found.violations[:5]
    assert str(caught[0]).startswith(f"{caught[0].path or '-'}: after ")

    def is_shown_again(one: Violation) -> bool:
        try:
            return one.problem in replay(make, one.path)
        except ValueError:  # the last points of a life may shift by one or two
            return False

    assert any(map(is_shown_again, caught))
    monkeypatch.undo()
    assert replay(make, re.split(r"\D", caught[0].path)[0]) == []


# the parts -------------------------------------------------------------------------------


def test_a_kill_keeps_what_is_written_and_leaves_it_to_the_next_power_cut() -> None:
    disk = MemoryDisk()
    disk.make_dir(Path("/a"))
    disk.sync_dir(Path("/"))
    disk.write(Path("/a/one"), b"12345678")
    killed = disk.after_kill()
    assert killed.read(Path("/a/one"), 9) == b"12345678"
    assert killed.state() == disk.state()
    assert {bytes(killed.after_kill(torn=Path("/a/one"), seed=s).read(Path("/a/one"), 9))
            for s in range(40)} == {b"12345678"[:n] for n in range(9)}  # fmt: skip
    assert {"one" in killed.after_crash(seed).entries(Path("/a")) for seed in range(20)} == {
        True,
        False,
    }
    killed.sync_dir(Path("/a"))
    assert killed.state() != disk.state()
    assert all("one" in killed.after_crash(seed).entries(Path("/a")) for seed in range(20))
    killed.rename(Path("/a/one"), Path("/two"))
    again = killed.after_kill()
    assert again.state() == killed.state() and list(again.entries(Path("/a"))) == []


def test_a_log_keeps_the_first_events_and_those_synced_survive_a_second_crash() -> None:
    log = MemoryEventLog("a")
    log.append("run_started")
    log.sync()
    log.append_many("admitted", [{"ordinal": 0}, {"ordinal": 1}])
    killed = log.after_crash("b", keep=2)
    assert [event.ordinal for event in killed.events] == [None, 0]
    assert len(killed.after_crash("c", lose_unsynced=True).events) == 1
    assert len(log.after_crash("d", lose_unsynced=True, keep=3).after_crash(
        "e", lose_unsynced=True).events) == 3  # fmt: skip


def test_the_result_says_how_much_was_explored_and_how_to_see_a_violation_again() -> None:
    found = explore(tiny, points=range(40, 43))
    twice = found + found
    assert (twice.points, twice.lives) == (2 * found.points, 2 * found.lives) == (6, twice.lives)
    assert str(found).startswith("explored 3 crash points (") and str(found).endswith(
        "0 violations"
    )
    assert found.as_dict()["points"] == 3 and found.as_dict()["violations"] == []
    with pytest.raises(ValueError, match="no crash point 999999 in a life that has 0 to"):
        replay(tiny, "999999")


@pytest.mark.parametrize(
    "wrong",
    [["--sample", "0"], ["--processes", "-1"], ["--replay", "abc"], ["--replay", "99999999"]],
    ids=str,
)
def test_wrong_usage_of_the_command_is_status_2(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["in_order-prompt_group", *wrong])
    assert left.value.code == 2
    assert ": error: " in capsys.readouterr().err


def test_the_command_prints_its_result_last(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["windowed-prompt_group", "--sample", "8", "--processes", "1"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith("explored ") and last.endswith(": 0 violations")
    assert main(["windowed-prompt_group", "--replay", "600"]) == 0
    assert capsys.readouterr().out == "windowed-prompt_group 600: 0 problems\n"
    with pytest.raises(SystemExit):
        main(["nothing"])


def test_the_parts_are_all_of_a_scenario() -> None:
    name = "in_order-prompt_group"
    total = count_points(SCENARIOS[name]())
    whole = [point for _, points in parts_of(name, None, 1) for point in points]
    assert whole == list(range(len(whole))) and abs(len(whole) - total) < 20
    some = [point for _, points in parts_of(name, 100, 1) for point in points]
    assert some == list(range(0, some[-1] + 1, some[1])) and 100 <= len(some) < 120
    assert some[1] % 2 == 1
