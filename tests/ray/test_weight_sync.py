"""Weights through a file: what is left of it, who confirmed it, and who is resumed."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
from anyio.lowlevel import checkpoint

from sc_core.config import AsyncRlConfig
from sc_core.errors import CallTimeout, ConfigError, EnginesFailed, WeightSyncError, WorkerDied
from sc_core.ledger import Ledger
from sc_core.places import Places
from sc_core.samplers import Windowed
from sc_core.state import RunState
from sc_core.testing import MemoryEventLog
from sc_core.weights import WeightUpdates
from sc_ray.generation.fleet import RayFleet
from sc_ray.generation.port import RayEngine, RayRollouts
from sc_ray.weights import FileWeightSync

pytestmark = pytest.mark.anyio


class Trainer:
    def __init__(self) -> None:
        self.weights = "w0"

    async def export_weights(self, path: Path) -> None:
        await checkpoint()
        path.write_text(self.weights)


class Engine:
    def __init__(self, name: str) -> None:
        self.name = name
        self.log: list[str] = []
        self.weights = ""
        self.broken: set[str] = set()
        self.dead = False
        self.hangs: set[str] = set()
        self.on_load: Callable[[], object] = lambda: None
        self.confirms: Callable[[int], int] = lambda version: version

    async def pause(self) -> None:
        await self._note("pause")

    async def resume(self) -> None:
        await self._note("resume")

    async def load_weights(self, path: Path, version: int) -> int:
        await self._note("load")
        self.on_load()
        self.weights = path.read_text()
        return self.confirms(version)

    async def _note(self, call: str) -> None:
        self.log.append(call)
        await checkpoint()
        if call in self.hangs:
            await anyio.sleep_forever()
        if call in self.broken:
            raise OSError("it can't")
        if self.dead:
            raise WorkerDied(self.name, "it was killed")


@pytest.fixture
def trainer() -> Trainer:
    return Trainer()


@pytest.fixture
def engines() -> list[Engine]:
    return [Engine("a"), Engine("b"), Engine("c")]


def files(sync: FileWeightSync) -> list[str]:
    return sorted(path.name for path in sync.directory.glob("*.safetensors"))


def left_in(parent: Path) -> list[str]:
    return sorted(path.name for path in parent.iterdir())


async def test_every_engine_confirms_what_it_loaded_and_older_files_go(
    trainer: Trainer, engines: list[Engine], tmp_path: Path
) -> None:
    with FileWeightSync(trainer, engines, run_id="run-1", parent=tmp_path) as sync:
        for version in (4, 5):
            trainer.weights = f"w{version}"
            assert await sync.transfer(version) == {"a": version, "b": version, "c": version}
            assert {engine.weights for engine in engines} == {f"w{version}"}
            assert files(sync) == [f"run-1-v{version}.safetensors"]
        engines[1].confirms = lambda version: 5
        assert await sync.transfer(6) == {"a": 6, "b": 5, "c": 6}
        assert len(files(sync)) == 2, "nothing is removed before all have confirmed"


async def test_nobody_else_can_look_into_the_directory(
    trainer: Trainer, engines: list[Engine], tmp_path: Path
) -> None:
    with FileWeightSync(trainer, engines, run_id="run-1", parent=tmp_path) as sync:
        assert stat.S_IMODE(sync.directory.stat().st_mode) == 0o700
        await sync.transfer(1)
    sync.close()
    assert left_in(tmp_path) == []


def test_weights_lie_in_shared_memory_where_there_is_some(
    trainer: Trainer, engines: list[Engine]
) -> None:
    shared = Path("/dev/shm")
    with FileWeightSync(trainer, engines, run_id="test-of-place") as sync:
        if os.access(shared, os.W_OK):
            assert sync.directory.parent == shared
    assert not sync.directory.exists()


async def test_an_engine_that_fails_is_named_and_the_others_load(
    trainer: Trainer, engines: list[Engine], tmp_path: Path
) -> None:
    engines[0].broken = engines[2].broken = {"load"}
    with FileWeightSync(trainer, engines, run_id="run-1", parent=tmp_path) as sync:
        with pytest.raises(EnginesFailed) as caught:
            await sync.transfer(3)
    assert caught.value.failures == {"a": "it can't", "c": "it can't"}
    assert str(caught.value) == ("load of version 3 failed on a: it can't; c: it can't")
    assert isinstance(caught.value.__cause__, OSError)
    assert engines[1].weights == "w0"


async def test_all_engines_are_paused_and_resumed_whichever_fails(
    trainer: Trainer, engines: list[Engine], tmp_path: Path
) -> None:
    engines[0].broken = {"pause", "resume"}
    with FileWeightSync(trainer, engines, run_id="run-1", parent=tmp_path) as sync:
        for call in (sync.pause, sync.resume):
            with pytest.raises(WeightSyncError, match="failed on a: it can't$"):
                await call()
    assert [engine.log for engine in engines] == [["pause", "resume"]] * 3


async def test_an_engine_that_died_is_left_out_until_none_is_left(
    trainer: Trainer, engines: list[Engine], tmp_path: Path
) -> None:
    with FileWeightSync(trainer, engines, run_id="run-1", parent=tmp_path) as sync:
        await sync.pause()
        engines[0].dead = True
        assert await sync.transfer(3) == {"b": 3, "c": 3}
        assert files(sync) == ["run-1-v3.safetensors"]
        await sync.resume()
        assert [engine.log[2:] for engine in engines] == [[], ["resume"], ["resume"]]
        engines[1].dead, engines[2].broken = True, {"pause"}
        with pytest.raises(WeightSyncError, match="pause failed on c: it can't"):
            await sync.pause()
        engines[2].dead, engines[2].broken = True, set()
        with pytest.raises(WorkerDied, match="every engine that was left died: c died: it was"):
            await sync.pause()


async def test_a_failed_export_asks_nothing_of_the_engines(
    trainer: Trainer, engines: list[Engine], tmp_path: Path
) -> None:
    with FileWeightSync(trainer, engines, run_id="run-1", parent=tmp_path) as sync:
        (sync.directory / "run-1-v1.safetensors").mkdir()
        with pytest.raises(IsADirectoryError):
            await sync.transfer(1)
    assert [engine.log for engine in engines] == [[], [], []]


async def test_an_engine_that_does_not_answer_is_named_and_the_others_go_on(
    trainer: Trainer, engines: list[Engine], tmp_path: Path
) -> None:
    engines[1].hangs = {"load"}
    with FileWeightSync(trainer, engines, run_id="run-1", parent=tmp_path, engine_s=0.02) as sync:
        with pytest.raises(EnginesFailed, match=r"on b: load of version 3 did not return within"):
            await sync.transfer(3)
        assert (engines[0].weights, engines[2].weights) == ("w0", "w0")
        assert sync.leave("b") == 2
        assert await sync.transfer(3) == {"a": 3, "c": 3}


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize("begun", [False, True])
def test_a_call_cancelled_by_something_else_has_a_name(
    trainer: Trainer, engines: list[Engine], tmp_path: Path, begun: bool
) -> None:
    """A native cancel of the task that asks one engine, which no scope has sent."""

    async def cancel_one(sync: FileWeightSync) -> None:
        before = asyncio.all_tasks()
        pausing = asyncio.create_task(sync.pause())
        while not (asked := asyncio.all_tasks() - before - {pausing}):  # noqa: ASYNC110
            await asyncio.sleep(0)
        if begun:
            await asyncio.sleep(0)
        asked.pop().cancel()
        with pytest.raises(EnginesFailed, match=r"on [abc]: pause was cancelled by something"):
            await pausing

    for engine in engines:
        engine.hangs = {"pause"} if begun else set()

    async def main() -> None:
        with FileWeightSync(
            trainer, engines, run_id="run-1", parent=tmp_path, engine_s=0.1
        ) as sync:
            await cancel_one(sync)

    asyncio.run(main())
    gc.collect()  # the warning that a coroutine was never awaited belongs here


# engines that come and go ---------------------------------------------------------------


async def test_an_engine_that_joins_has_the_weights_of_the_last_sync(
    trainer: Trainer, engines: list[Engine], tmp_path: Path
) -> None:
    *first, late = engines
    with FileWeightSync(trainer, first, run_id="run-1", parent=tmp_path) as sync:
        await sync.transfer(4)
        await sync.resume()
        trainer.weights = "w5, which no engine has"
        await sync.join(late, within_s=10)
        assert (late.weights, sync.engines) == ("w0", ("a", "b", "c"))
        with pytest.raises(ConfigError, match="an engine c already"):
            await sync.join(late, within_s=10)
        sync.leave("a")
        assert await sync.transfer(5) == {"b": 5, "c": 5}


async def test_who_joins_during_a_sync_comes_after_it(
    trainer: Trainer, engines: list[Engine], tmp_path: Path
) -> None:
    *first, late = engines
    with FileWeightSync(trainer, first, run_id="run-1", parent=tmp_path) as sync:
        await sync.transfer(4)
        await sync.resume()
        await sync.pause()
        with pytest.raises(CallTimeout, match="join of engine c"):
            await sync.join(late, within_s=0.01)
        async with anyio.create_task_group() as tg:

            async def join() -> None:
                await sync.join(late, within_s=10)

            tg.start_soon(join)
            await anyio.wait_all_tasks_blocked()
            trainer.weights = "w5"
            assert await sync.transfer(5) == {"a": 5, "b": 5}
            assert late.log == []
            await sync.resume()
        assert (late.weights, sync.engines) == ("w5", ("a", "b", "c"))


@pytest.mark.parametrize("had_loaded", [False, True])
async def test_who_joins_while_the_version_moves_loads_again(
    trainer: Trainer, engines: list[Engine], tmp_path: Path, had_loaded: bool
) -> None:
    *first, late = engines
    with FileWeightSync(trainer, first, run_id="run-1", parent=tmp_path) as sync:
        await sync.transfer(4)
        await sync.resume()
        syncs = [5]

        async def another() -> None:
            trainer.weights = "w5"
            await sync.transfer(5)
            await sync.resume()

        def in_between() -> None:
            if syncs:
                syncs.clear()
                thread = threading.Thread(target=anyio.run, args=(another,))
                thread.start()
                thread.join()

        def confirm_late(version: int) -> int:
            in_between()
            return version

        if had_loaded:
            late.confirms = confirm_late
        else:
            late.on_load = in_between  # the file has gone by then
        overtaken: list[int] = []
        assert await sync.join(late, within_s=10, overtaken=overtaken.append) == 5
        assert (late.log, late.weights) == (["load", "load"], "w5")
        assert overtaken == ([4] if had_loaded else [])


async def test_who_can_t_load_or_comes_too_late_does_not_join(
    trainer: Trainer, engines: list[Engine], tmp_path: Path
) -> None:
    *first, late = engines
    with FileWeightSync(trainer, first, run_id="run-1", parent=tmp_path) as sync:
        await sync.transfer(4)
        await sync.resume()
        late.confirms = lambda version: 3
        with pytest.raises(WeightSyncError, match="c can't join: .* it has version 3"):
            await sync.join(late, within_s=10)
        await sync.pause()
        async with anyio.create_task_group() as tg:

            async def too_late() -> None:
                with pytest.raises(WeightSyncError, match="c can't join: the run is over"):
                    await sync.join(late, within_s=10)

            tg.start_soon(too_late)
            await anyio.wait_all_tasks_blocked()
            sync.close()
        assert sync.engines == ("a", "b")


async def test_a_fleet_gives_weights_then_requests_from_any_thread(
    trainer: Trainer, tmp_path: Path
) -> None:
    class Known(RayEngine):
        loaded: int | None = None

        async def load_weights(self, path: Path, version: int) -> int:
            await checkpoint()
            assert self not in {rollouts._choose(ordinal) for ordinal in range(4)}
            self.loaded = version
            return version

    def known(name: str) -> Known:
        return Known(None, name=name)

    async def join() -> None:
        await fleet.join(late, within_s=10)

    one, late = known("a"), known("b")
    rollouts = RayRollouts([one], choice="by_ordinal")
    with FileWeightSync(trainer, [one], run_id="run-1", parent=tmp_path) as sync:
        fleet = RayFleet(sync, rollouts)
        await anyio.to_thread.run_sync(anyio.run, join)  # before the first sync
        rollouts.leave("b")
        sync.leave("b")
        sync._version = 7
        await anyio.to_thread.run_sync(anyio.run, join)
        assert late.loaded == 7
        assert {rollouts._choose(ordinal).name for ordinal in range(4)} == {"a", "b"}
        fleet.leave("a")
        assert {rollouts._choose(ordinal) for ordinal in range(4)} == {late}
        for name in "ab":
            with pytest.raises(ConfigError, match=f"engine {name} can't leave"):
                fleet.leave(name)
        assert fleet.put_out("b", "it is slow") == 0
        with pytest.raises(WorkerDied, match="a has left; b was put out of service: it is slow"):
            rollouts._choose(0)


@pytest.mark.parametrize("after", ["pause", "transfer", "resume"])
async def test_who_leaves_in_the_midst_of_a_sync_is_resumed_and_not_looked_after(
    trainer: Trainer, tmp_path: Path, after: str
) -> None:
    class Known(RayEngine):
        def __init__(self, name: str) -> None:
            super().__init__(None, name=name)
            self.log: list[str] = []

        async def pause(self) -> None:
            self.log.append("pause")

        async def resume(self) -> None:
            self.log.append("resume")

        async def load_weights(self, path: Path, version: int) -> int:
            self.log.append("load")
            return version

    class Keeper(Hope):
        left: str | None = None

        def was_put_out(self, engine: str, reason: str) -> None:
            raise AssertionError

        def has_left(self, engine: str) -> None:
            self.left = engine

        def expected(self) -> int:
            return 0

    engines = [Known("a"), Known("b")]
    with FileWeightSync(trainer, engines, run_id="run-1", parent=tmp_path) as sync:
        fleet = RayFleet(sync, RayRollouts(engines))
        fleet.attach(keeper := Keeper())
        for name, call in (
            ("pause", sync.pause),
            ("transfer", functools.partial(sync.transfer, 1)),
            ("resume", sync.resume),
            ("", sync.resume),
        ):
            await call()
            if name == after:
                fleet.leave("b")
    assert keeper.left == "b"
    loads = [] if after == "pause" else ["load"]
    assert engines[1].log == ["pause", *loads, "resume"]


class Hope:
    """A keeper that expects an engine as long as it is told to."""

    def __init__(self) -> None:
        self.hopes = True
        self.dead: list[str] = []

    def died(self, engine: object, reason: str) -> None:
        assert isinstance(engine, Engine)
        self.dead.append(f"{engine.name}: {reason}")

    def expects_more(self) -> bool:
        return self.hopes


@pytest.mark.parametrize("dies_in", ["pause", "load", "before"])
async def test_a_sync_that_has_no_engine_left_waits_for_the_one_that_joins(
    trainer: Trainer, engines: list[Engine], tmp_path: Path, dies_in: str
) -> None:
    only, late, later = engines
    with FileWeightSync(trainer, [only], run_id="run-1", parent=tmp_path) as sync:
        sync.keeper = keeper = Hope()
        await sync.transfer(4)
        await sync.resume()
        trainer.weights = "w5"
        if dies_in == "before":
            sync.leave("a")
        only.dead = dies_in == "pause"
        await sync.pause()
        only.dead = dies_in != "before"
        confirmed: list[object] = []

        async def transfer() -> None:
            confirmed.append(await sync.transfer(5))

        async def join(engine: Engine) -> None:
            confirmed.append(await sync.join(engine, within_s=10))

        async with anyio.create_task_group() as tg:
            tg.start_soon(join, late)
            await anyio.wait_all_tasks_blocked()
            assert (late.log, confirmed) == ([], []), "these would be the weights of before"
            tg.start_soon(transfer)
        assert confirmed == [5, {"b": 5}] and late.weights == "w5"
        assert sync.syncing
        async with anyio.create_task_group() as tg:
            tg.start_soon(join, later)
            await anyio.wait_all_tasks_blocked()
            assert later.log == [], "the sync has an engine: the others come after it"
            await sync.resume()
        assert sync.engines == ("b", "c") and not sync.syncing
        assert late.log == ["load", "resume"]
        assert keeper.dead == ([] if dies_in == "before" else ["a: it was killed"])


@pytest.mark.parametrize("of_what", ["the hope", "the run"])
async def test_a_sync_that_waits_ends_with_its_reason(
    trainer: Trainer, engines: list[Engine], tmp_path: Path, of_what: str
) -> None:
    with FileWeightSync(trainer, engines[:1], run_id="run-1", parent=tmp_path) as sync:
        sync.keeper = keeper = Hope()
        sync.leave("a")
        async with anyio.create_task_group() as tg:

            async def transfer() -> None:
                with pytest.raises(WorkerDied, match="every engine died: none is left"):
                    await sync.transfer(5)

            tg.start_soon(transfer)
            await anyio.wait_all_tasks_blocked()
            if of_what == "the run":
                RayFleet(sync, RayRollouts([RayEngine(None, name="a")])).stop_waiting()
            else:
                keeper.hopes = False
                sync.look_again()
        engines[1].dead = True
        await sync.resume()
        await sync.join(engines[2], within_s=10)
        assert engines[2].weights == "w0"


async def test_a_fleet_tells_its_keeper_whom_it_puts_out_and_counts_who_will_come(
    trainer: Trainer, tmp_path: Path
) -> None:
    class Keeper(Hope):
        out: str | None = None

        def was_put_out(self, engine: str, reason: str) -> None:
            self.out = f"{engine}: {reason}"

        def has_left(self, engine: str) -> None:
            raise AssertionError

        def expected(self) -> int:
            return 0 if self.out is None else 3

    rollouts = RayRollouts([RayEngine(None, name=name) for name in "ab"])
    engines = [RayEngine(None, name=name) for name in "ab"]
    with FileWeightSync(trainer, engines, run_id="run-1", parent=tmp_path) as sync:
        fleet = RayFleet(sync, rollouts)
        keeper = Keeper()
        fleet.attach(keeper)
        assert fleet.put_out("a", "it is slow") == 1 + 3
        assert keeper.out == "a: it is slow"
        fleet.quarantine("b", "b is quarantined: it hangs")
        assert sync.engines == () and not rollouts._some_live()
        told: list[int | None] = []
        await fleet.join(RayEngine(None, name="b"), within_s=1, confirmed=told.append)
        assert told == [None] and sync.engines == ("b",) and rollouts._some_live()


@pytest.mark.parametrize("call", ["pause", "load", "resume"])
async def test_a_run_goes_on_without_the_engine_that_fails(
    trainer: Trainer, engines: list[Engine], tmp_path: Path, call: str
) -> None:
    engines[1].broken = {call}
    state = RunState(Ledger(prompts_per_step=1), Places(1), Windowed(0), MemoryEventLog())
    rollouts = RayRollouts([RayEngine(None, name=engine.name) for engine in engines])
    with FileWeightSync(trainer, engines, run_id="run-1", parent=tmp_path) as sync:
        fleet = RayFleet(sync, rollouts)
        updates = WeightUpdates(state, sync, AsyncRlConfig(), fleet=fleet)
        await updates.update()
        await updates.update()
    assert (state.engines, state.gate_closed_for) == (("a", "c"), None)
    assert state.engines_out == {"b": "it can't"} and sync.engines == ("a", "c")
    assert [engine.log[-3:] for engine in (engines[0], engines[2])] == [LAST_SYNC, LAST_SYNC]
    assert engines[1].log.count(call) == 2, "it was asked twice, then left out"
    assert "b" not in {rollouts._choose(ordinal).name for ordinal in range(9)}


LAST_SYNC = ["pause", "load", "resume"]


# other runs -----------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
from sc_ray.weights import FileWeightSync
class Engine: name = "a"
FileWeightSync(None, [Engine()], run_id="run-1", parent=Path(sys.argv[1]))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_run_left_is_removed_by_the_next_of_its_name(
    trainer: Trainer, engines: list[Engine], tmp_path: Path
) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert killed.returncode == -9
    (left,) = left_in(tmp_path)
    with FileWeightSync(trainer, engines, run_id="run", parent=tmp_path):
        assert left in left_in(tmp_path), "that was another run"
    with FileWeightSync(trainer, engines, run_id="run-1", parent=tmp_path) as sync:
        assert left_in(tmp_path) == [sync.directory.name]


def test_a_run_that_lives_keeps_its_files(
    trainer: Trainer, engines: list[Engine], tmp_path: Path
) -> None:
    with FileWeightSync(trainer, engines, run_id="run-1", parent=tmp_path) as one:
        with FileWeightSync(trainer, engines, run_id="run-1", parent=tmp_path) as other:
            assert left_in(tmp_path) == sorted([one.directory.name, other.directory.name])


def test_nothing_but_directories_of_our_own_is_removed(
    trainer: Trainer, engines: list[Engine], tmp_path: Path
) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("x")
    parent = tmp_path / "parent"
    parent.mkdir()
    (parent / "single-controller.run-1.link").symlink_to(precious)
    (parent / "single-controller.run-1.file").write_text("x")
    with FileWeightSync(trainer, engines, run_id="run-1", parent=parent):
        pass
    assert left_in(parent) == ["single-controller.run-1.file", "single-controller.run-1.link"]
    assert left_in(precious) == ["file"]


@pytest.mark.parametrize("run_id", ["", "../up", "a b", "a*", "ä"])
def test_a_run_id_must_be_fit_for_a_file_name(
    trainer: Trainer, engines: list[Engine], tmp_path: Path, run_id: str
) -> None:
    with pytest.raises(ConfigError, match="run id"):
        FileWeightSync(trainer, engines, run_id=run_id, parent=tmp_path)
    with pytest.raises(ConfigError, match="at least one engine"):
        FileWeightSync(trainer, [], run_id="run-1", parent=tmp_path)
    assert left_in(tmp_path) == []


async def test_a_cancelled_transfer_can_be_repeated(
    trainer: Trainer, engines: list[Engine], tmp_path: Path
) -> None:
    with FileWeightSync(trainer, engines, run_id="run-1", parent=tmp_path) as sync:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await sync.transfer(1)
        assert scope.cancelled_caught
        trainer.weights = "w1"
        assert await sync.transfer(1) == {"a": 1, "b": 1, "c": 1}
        assert {engine.weights for engine in engines} == {"w1"}
