"""The health of a fleet, step by step: fake engines, and a clock that jumps instead of waiting."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from trio.testing import MockClock
from virtual_clock import VirtualClockLoop

from sc_core import GenerationFleetHealthConfig, RolloutError, ScError, WorkerDied
from sc_ray.generation.health import FleetHealth

pytestmark = pytest.mark.anyio
SETTINGS: dict[str, Any] = {
    "probe_interval_s": 10.0,
    "probe_timeout_s": 5.0,
    "unhealthy_threshold": 3,
    "healthy_threshold": 2,
}


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """Nothing here is real: no thread, no process."""
    if request.param == "trio":
        return "trio", {"clock": MockClock(autojump_threshold=0)}
    return "asyncio", {"loop_factory": VirtualClockLoop}


class Engine:
    def __init__(self, name: str, life: int = 0) -> None:
        self.name, self.life = name, life
        self.mood = "well"  #: or `hangs`, `unreachable`, `dead`
        self.node_lives = True
        self.looking_s = 0.0  #: for its node
        self.ended = False

    def __repr__(self) -> str:
        return f"{self.name}/{self.life}"

    async def check(self) -> None:
        await anyio.lowlevel.checkpoint()
        if self.mood == "hangs":
            await anyio.sleep_forever()
        if self.mood == "unreachable":
            raise RolloutError("no route to it")
        if self.mood == "dead":
            raise WorkerDied(self.name, "it was killed")

    async def ready(self) -> None:
        await anyio.sleep(20)
        if self.mood == "hangs":
            await anyio.sleep_forever()

    async def node_is_gone(self) -> bool:
        await anyio.sleep(self.looking_s)
        return not self.node_lives

    def end(self) -> None:
        self.ended = True

    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def load_weights(self, path: Any, version: int) -> int:
        return version


class World:
    """A fleet, what makes its engines, and who hears of it."""

    def __init__(self, count: int, optional: tuple[str, ...] = (), **settings: Any) -> None:
        self.syncing = False
        self.version = 7
        self.moves = False  #: the version, while the next engine joins
        self.log: list[str] = []  #: calls of the fleet, and what the run hears
        self.failures: list[ScError] = []
        self.served: dict[str, Engine] = {}
        self.made: list[Engine] = []
        self.making: Callable[[Engine], Any] = lambda engine: None
        self.join_fails: Exception | None = None
        self.looked = 0
        self.room = anyio.Event()  #: for one more engine
        self.coming = 0  #: asked for, without room
        self.waits = True
        self.stopping = anyio.Event()
        engines = [Engine(f"e{number}") for number in range(count)]
        self.served.update({engine.name: engine for engine in engines})
        self.first = dict(self.served)
        self.health = FleetHealth(
            self,
            engines,
            GenerationFleetHealthConfig(**(SETTINGS | settings)),
            make=self.make,
            optional=optional,
            come=self.come,
            start_s=100.0,
            in_thread=self.inline,
        )

    async def inline(self, work: Callable[[], None]) -> None:
        await anyio.lowlevel.checkpoint()
        work()

    async def make(self, name: str) -> Engine:
        engine = Engine(name, 1 + len(self.made))
        self.made.append(engine)
        await anyio.sleep(20)
        wait = self.making(engine)
        if wait is not None:
            await wait
        return engine

    async def come(self, name: str) -> Engine:
        engine = Engine(name, 1 + len(self.made))
        self.coming += 1
        try:
            await self.room.wait()
        finally:
            self.coming -= 1
        self.room = anyio.Event()
        self.made.append(engine)
        wait = self.making(engine)
        if wait is not None:
            await wait
        return engine

    async def join(
        self, engine: Engine, *, within_s: float, confirmed: Any, overtaken: Any
    ) -> None:
        await anyio.sleep(1)
        if self.moves:
            self.moves = False
            overtaken(self.version)
            self.version += 1
            await anyio.sleep(1)
        if self.join_fails is not None:
            raise self.join_fails
        if engine.mood == "dead":
            raise WorkerDied(engine.name, "it was killed again")
        confirmed(self.version)
        self.served[engine.name] = engine
        self.log.append(f"{engine!r} gets requests")

    def quarantine(self, name: str, why: str) -> None:
        del self.served[name]

    def cut_off(self, name: str, why: str) -> int:
        self.served.pop(name, None)
        return len(self.served)

    def look_again(self) -> None:
        self.looked += 1

    def stop_waiting(self) -> None:
        self.waits = False

    async def stop_requested(self) -> str:
        await self.stopping.wait()
        return "by hand"

    def engine_is(
        self, engine: str, now: str, reason: str = "", *, confirmed: int | None = None
    ) -> None:
        at = "" if confirmed is None else f" at {confirmed}"
        self.log.append(f"{engine} {now}{at}{': ' if reason else ''}{reason}")

    def fail(self, error: ScError) -> None:
        self.failures.append(error)

    @asynccontextmanager
    async def looked_after(self) -> AsyncIterator[None]:
        async with anyio.create_task_group() as tg:
            tg.start_soon(self.health.run, self)
            yield
            tg.cancel_scope.cancel()


async def test_engines_that_are_well_are_left_alone() -> None:
    world = World(2)
    async with world.looked_after():
        await anyio.sleep(1000)
    assert (world.log, world.failures, len(world.served)) == ([], [], 2)
    assert not world.health.expects_more()


@pytest.mark.parametrize("mood", ["hangs", "unreachable"])
async def test_failed_probes_in_a_row_quarantine_and_good_ones_bring_back(mood: str) -> None:
    world = World(2)
    engine = world.first["e1"]
    async with world.looked_after():
        for _ in range(3):  # never three in a row
            engine.mood = mood
            await anyio.sleep(19)
            engine.mood = "well"
            await anyio.sleep(30)
        assert world.log == []
        engine.mood = mood
        while "e1" in world.served:  # noqa: ASYNC110 - on a virtual clock
            await anyio.sleep(1)
        why = "no answer within 5 s" if mood == "hangs" else "RolloutError: no route to it"
        assert world.log == [f"e1 quarantined: 3 probes failed: {why}"]
        assert (world.health.expected(), engine.ended) == (1, False)
        engine.mood = "well"
        world.version = 9
        await anyio.sleep(40)
    assert world.log[1:] == ["e1 serving at 9", "e1/0 gets requests"]
    assert not world.health.expects_more() and world.failures == []


async def test_probes_that_fail_in_the_midst_of_a_sync_do_not_count() -> None:
    """Who loads weights is busy, and has deadlines of its own for that."""
    world = World(1)
    world.syncing = True
    engine = world.first["e0"]
    async with world.looked_after():
        for syncing in (True, False, True):
            world.syncing, engine.mood = syncing, "hangs"
            await anyio.sleep(100 if syncing else 29)
            engine.mood = "well"
        assert world.log == []
        world.syncing, engine.mood = False, "hangs"
        await anyio.sleep(60)
        assert world.log == ["e0 quarantined: 3 probes failed: no answer within 5 s"]


async def test_a_version_that_came_too_late_for_one_in_quarantine_is_in_the_log() -> None:
    """The requests that it still has may have ended by those weights."""
    world = World(2)
    engine = world.first["e0"]
    async with world.looked_after():
        engine.mood = "unreachable"
        await anyio.sleep(31)
        engine.mood, world.moves = "well", True
        await anyio.sleep(50)
    quarantined, *others = world.log
    assert others == [
        quarantined.replace(" quarantined:", " quarantined at 7:"),
        "e0 serving at 8",
        "e0/0 gets requests",
    ]


@pytest.mark.parametrize("when", ["well", "dead", "probed"])
async def test_who_has_left_is_not_restarted_whatever_becomes_of_it(when: str) -> None:
    world = World(2, unhealthy_threshold=1)
    engine = world.first["e1"]
    async with world.looked_after():
        engine.mood = "hangs" if when == "probed" else "well"
        await anyio.sleep(12)
        if when == "dead":
            world.health.died(engine, "it was killed")
        world.health.has_left("e1")
        engine.mood = "dead"
        await anyio.sleep(1000)
        world.health.died(engine, "it was ended")
        await anyio.sleep(1000)
    assert world.log == ["e1 out: it has left"]
    assert not (engine.ended or world.made or world.failures or world.health.expects_more())


async def test_who_can_t_come_back_stays_in_quarantine_and_tries_again() -> None:
    world = World(2)
    engine = world.first["e0"]
    async with world.looked_after():
        engine.mood = "unreachable"
        await anyio.sleep(31)
        engine.mood, world.join_fails = "well", RuntimeError("another version")
        await anyio.sleep(50)
        assert "e0" not in world.served and len(world.log) == 1
        world.join_fails = None
        await anyio.sleep(25)
        assert world.served["e0"] is engine


async def test_who_stays_silent_in_quarantine_counts_as_dead() -> None:
    world = World(2)
    world.first["e1"].mood = "hangs"
    async with world.looked_after():
        await anyio.sleep(200)
    told = "6 probes failed: no answer within 5 s"
    assert world.log[1:] == [
        f"e1 restarting: e1 died, as it seems: {told}; restart 1 of 3",
        "e1 serving at 7",
        "e1/1 gets requests",
    ]
    assert world.first["e1"].ended and not world.made[0].ended


@pytest.mark.parametrize("found", ["probe", "request", "sync"])
async def test_a_dead_engine_is_made_anew_under_its_name(found: str) -> None:
    world = World(2)
    dead = world.first["e0"]
    async with world.looked_after():
        await anyio.sleep(1)
        if found == "probe":
            dead.mood = "dead"
            await anyio.sleep(10)
        elif found == "request":
            world.health.died(dead, "it was killed")
            assert world.health.expects_more(), "at once, before any task has run"
            await anyio.sleep(1)
        else:
            world.health.was_put_out("e0", "it can't load")
            assert world.health.expected() == 1
            await anyio.sleep(1)
        assert "e0" not in world.served and dead.ended
        why = "was put out of service: it can't load" if found == "sync" else "died: it was killed"
        assert world.log == [f"e0 restarting: e0 {why}; restart 1 of 3"]
        assert world.health.expects_more()
        world.health.died(dead, "told once more")
        await anyio.sleep(21)
        assert world.log[1:] == ["e0 serving at 7", "e0/1 gets requests"]
        world.health.died(dead, "told too late")
        await anyio.sleep(30)
    assert len(world.log) == 3 and not world.health.expects_more()
    assert [repr(engine) for engine in world.made] == ["e0/1"] and world.failures == []


async def test_a_run_that_is_stopped_waits_for_no_engine_and_they_are_looked_after_on() -> None:
    world = World(1)
    async with world.looked_after():
        world.health.died(world.first["e0"], "it was killed")
        await anyio.sleep(1)
        assert world.waits
        world.stopping.set()
        await anyio.wait_all_tasks_blocked()
        assert not world.waits and world.health.expects_more(), "rollouts do wait"
        await anyio.sleep(50)
    assert world.served["e0"].life == 1


async def test_restarts_back_off_and_end_after_as_many_as_are_allowed() -> None:
    world = World(2)
    started: list[float] = []

    def fail(engine: Engine) -> None:
        started.append(anyio.current_time() - 20)
        raise WorkerDied(engine.name, "it could not start")

    world.making = fail
    async with world.looked_after():
        world.health.died(world.first["e1"], "it was killed")
        await anyio.sleep(200)
    gaps = [later - earlier - 20 for earlier, later in zip(started, started[1:], strict=False)]
    assert gaps == [pytest.approx(1), pytest.approx(2)]
    once = "e1 could not be restarted: e1 died: it could not start, after "
    assert world.log[-1] == f"e1 out: {3 * once}e1 died: it was killed"
    assert world.looked == 1 and not world.health.expects_more() and world.failures == []


async def test_restarts_are_counted_over_the_life_of_the_run() -> None:
    world = World(2, max_restart_attempts_per_shard=2)
    async with world.looked_after():
        for _ in range(3):
            world.health.died(world.served["e0"], "it was killed")
            await anyio.sleep(100)
    assert [line for line in world.log if " gets " in line] == [
        "e0/1 gets requests",
        "e0/2 gets requests",
    ]
    assert world.log[-1] == "e0 out: e0 died: it was killed"


async def test_a_start_without_an_end_is_given_up() -> None:
    world = World(2, max_restart_attempts_per_shard=1)
    world.making = lambda engine: anyio.sleep(math.inf)
    async with world.looked_after():
        world.health.died(world.first["e0"], "it was killed")
        await anyio.sleep(99)
        assert world.health.expects_more()
        await anyio.sleep(2)
        assert world.log[-1].startswith("e0 out: e0 could not be restarted: its start did not ret")


async def test_one_that_dies_while_it_joins_is_ended_and_followed_by_another() -> None:
    world = World(2)

    def first_dies(engine: Engine) -> None:
        engine.mood = "dead" if engine.life == 1 else "well"

    world.making = first_dies
    async with world.looked_after():
        world.health.died(world.first["e0"], "it was killed")
        await anyio.sleep(60)
    assert [engine.ended for engine in world.made] == [True, False]
    assert world.served["e0"].life == 2


@pytest.mark.parametrize("settings", [{"on_dead_shard": "leave_out"}, {"enabled": False}])
async def test_by_rule_a_dead_engine_is_left_out_until_too_few_live(settings: Any) -> None:
    world = World(2, **settings)
    async with world.looked_after():
        world.health.died(world.first["e1"], "it was killed")
        assert not world.health.expects_more()
        await anyio.sleep(1000)
        assert world.log == ["e1 out: e1 died: it was killed"]
        assert world.failures == [] and world.first["e1"].ended and world.made == []
        world.health.died(world.first["e0"], "it ran out of memory")
        await anyio.sleep(1)
    assert [str(failure) for failure in world.failures] == [
        "every generation worker died: e0 died: it ran out of memory; e1 died: it was killed"
    ]


async def test_without_health_nobody_is_probed() -> None:
    world = World(1, enabled=False)
    world.first["e0"].mood = "dead"
    async with world.looked_after():
        await anyio.sleep(1000)
    assert world.log == []


async def test_fewer_than_wanted_end_the_run_and_say_what_each_died_of() -> None:
    world = World(3, on_dead_shard="leave_out", min_healthy_shards=2)
    async with world.looked_after():
        world.health.died(world.first["e1"], "it was killed")
        await anyio.sleep(1)
        assert world.failures == []
        world.health.died(world.first["e2"], "it was killed too")
        await anyio.sleep(1)
    assert str(world.failures[0]) == (
        "too many generation workers died: 1 of 3 are left, and"
        " async_rl.generation_fleet_health.min_healthy_shards is 2: e1 died: it was killed;"
        " e2 died: it was killed too"
    )


async def test_by_rule_the_first_death_ends_the_run() -> None:
    world = World(3, on_dead_shard="fail")
    async with world.looked_after():
        world.health.died(world.first["e1"], "it was killed")
        assert not world.health.expects_more()
        await anyio.sleep(1)
    assert [str(failure) for failure in world.failures] == ["e1 died: it was killed"]


# engines that a run can do without -----------------------------------------------------

AWAITED = "e9 awaited: it joins once there is room for it"


async def test_one_that_the_run_can_do_without_joins_when_there_is_room_for_it() -> None:
    world = World(1, ("e9",))
    async with world.looked_after():
        await anyio.sleep(50_000)  # far longer than any start may take
        assert (world.log, world.coming, world.made) == ([AWAITED], 1, [])
        assert not world.health.expects_more(), "it may never come"
        world.room.set()
        await anyio.sleep(22)
        assert world.log == [AWAITED, "e9 serving at 7", "e9/1 gets requests"]
        for engine in world.served.values():  # it is looked after as the others are
            engine.mood = "unreachable"
        await anyio.sleep(31)
    assert [line.partition(":")[0] for line in world.log[3:]] == [
        "e0 quarantined",
        "e9 quarantined",
    ]
    assert world.failures == []


async def test_nobody_waits_for_one_that_may_never_come() -> None:
    world = World(1, ("e9",), max_restart_attempts_per_shard=0)
    async with world.looked_after():
        await anyio.sleep(1)
        world.health.died(world.first["e0"], "it was killed")
        await anyio.sleep(1)
    assert [str(failure) for failure in world.failures] == [
        "every generation worker died: e0 died: it was killed"
    ]


async def test_one_that_has_joined_counts_as_long_as_it_lives() -> None:
    world = World(1, ("e9",), max_restart_attempts_per_shard=0)
    async with world.looked_after():
        world.room.set()
        await anyio.sleep(30)
        world.health.died(world.first["e0"], "it was killed")
        await anyio.sleep(1)
        assert world.failures == [] and list(world.served) == ["e9"]
        world.health.died(world.served["e9"], "it was killed too")
        assert not world.health.expects_more()
        await anyio.sleep(1)
    assert str(world.failures[0]).startswith("every generation worker died: e0 died: it was killed")


async def test_one_that_went_down_with_its_node_is_awaited_anew_as_often_as_that_happens() -> None:
    world = World(1, ("e9",), max_restart_attempts_per_shard=1, on_dead_shard="leave_out")
    async with world.looked_after():
        for life in (1, 2, 3):
            world.room.set()
            await anyio.sleep(30)
            engine = world.served["e9"]
            assert engine.life == life
            engine.node_lives = False
            world.health.died(engine, "its node is gone")
            await anyio.sleep(1)
            assert world.log[-1] == "e9 awaited: e9 died: its node is gone"
            assert (world.coming, engine.ended, list(world.served)) == (1, True, ["e0"])
    assert world.failures == []


async def test_what_comes_after_a_lost_node_and_fails_counts() -> None:
    world = World(1, ("e9",), max_restart_attempts_per_shard=1)
    async with world.looked_after():
        world.room.set()
        await anyio.sleep(30)
        engine = world.served["e9"]
        engine.mood = "unreachable"
        await anyio.sleep(31)
        assert world.health.expects_more(), "it is quarantined"
        engine.node_lives = False
        world.health.died(engine, "its node is gone")
        assert not world.health.expects_more()

        def fail(engine: Engine) -> None:
            raise WorkerDied(engine.name, "it can't import sc_ray")

        world.making = fail
        world.room.set()
        await anyio.sleep(1)
        assert world.log[-1].endswith("; restart 1 of 1"), world.log
        world.room.set()
        await anyio.sleep(1)
    assert world.log[-1].startswith("e9 out: e9 could not be restarted: e9 died: it can't import")
    assert world.failures == []


@pytest.mark.parametrize("trouble", ["dies", "hangs", "can't start", "can't load"])
async def test_one_that_fails_on_a_node_that_lives_is_awaited_as_often_as_it_may_be_restarted(
    trouble: str,
) -> None:
    world = World(1, ("e9",), max_restart_attempts_per_shard=2)
    came: list[float] = []

    def making(engine: Engine) -> Any:
        came.append(anyio.current_time())
        world.room.set()
        engine.mood = {"dies": "dead", "hangs": "hangs"}.get(trouble, "well")
        if trouble == "can't start":
            raise WorkerDied(engine.name, "there is no such module")

    world.making = making
    if trouble == "can't load":
        world.join_fails = RuntimeError("weights of another model")
    async with world.looked_after():
        world.room.set()
        await anyio.sleep(500)
    assert len(came) == 3 and world.coming == 0
    lost_s = {"hangs": 100, "can't start": 0}.get(trouble, 21)
    gaps = [later - earlier for earlier, later in zip(came, came[1:], strict=False)]
    assert gaps == [pytest.approx(lost_s), pytest.approx(lost_s + 1)]
    assert [line.partition(":")[0] for line in world.log] == 3 * ["e9 awaited"] + ["e9 out"]
    assert world.log[1].startswith("e9 awaited: e9 could not be started: ")
    assert world.log[1].endswith("; restart 1 of 2")
    assert [engine.ended for engine in world.made] == 3 * [trouble != "can't start"]
    assert world.failures == [] and not world.health.expects_more()


@pytest.mark.parametrize("settings", [{"on_dead_shard": "fail"}, {"enabled": False}])
async def test_by_no_rule_does_one_that_the_run_can_do_without_end_it(settings: Any) -> None:
    world = World(1, ("e9",), **settings)
    async with world.looked_after():
        world.room.set()
        await anyio.sleep(30)
        world.health.died(world.served["e9"], "it was killed")
        await anyio.sleep(1000)
    assert world.log[-1] == "e9 out: e9 died: it was killed"
    assert world.failures == [] and world.coming == 0


@pytest.mark.parametrize("of", ["rollouts", "counts"])
async def test_the_last_one_that_is_awaited_anew_leaves_nobody_waiting(of: str) -> None:
    """Who waited for it while it was quarantined would wait until there is room again."""
    world = World(1, ("e9",), on_dead_shard="leave_out")
    async with world.looked_after():
        world.room.set()
        await anyio.sleep(30)
        world.health.died(world.first["e0"], "it was killed")
        await anyio.sleep(1)
        engine = world.served["e9"]
        if of == "rollouts":
            engine.mood = "unreachable"
            await anyio.sleep(35)
            assert world.health.expects_more() and not world.served
        looked = world.looked
        engine.node_lives = False
        world.health.died(engine, "its node is gone")
        await anyio.sleep(1)
        assert world.looked == looked + 1 and not world.health.expects_more()
    assert world.log[-1] == "e9 awaited: e9 died: its node is gone"
    assert [str(failure) for failure in world.failures] == [
        "every generation worker died: e0 died: it was killed; e9 died: its node is gone"
    ]


async def test_one_that_is_awaited_anew_is_missing_from_those_that_must_live() -> None:
    world = World(2, ("e9",), on_dead_shard="leave_out", min_healthy_shards=2)
    async with world.looked_after():
        world.room.set()
        await anyio.sleep(30)
        world.health.died(world.first["e0"], "it was killed")
        await anyio.sleep(1)
        assert world.failures == []
        world.served["e9"].node_lives = False
        world.health.died(world.served["e9"], "its node is gone")
        await anyio.sleep(1)
    assert str(world.failures[0]).startswith("too many generation workers died: 1 of 3 are left")
    assert str(world.failures[0]).endswith("e0 died: it was killed; e9 died: its node is gone")


@pytest.mark.parametrize("node_lives", [True, False])
async def test_one_that_leaves_while_its_node_is_looked_up_is_not_awaited(node_lives: bool) -> None:
    world = World(1, ("e9",), max_restart_attempts_per_shard=0)
    async with world.looked_after():
        world.room.set()
        await anyio.sleep(30)
        engine = world.served["e9"]
        engine.node_lives, engine.looking_s = node_lives, 3.0
        world.health.died(engine, "it was killed")
        await anyio.sleep(1)
        world.health.has_left("e9")
        world.room.set()
        await anyio.sleep(100)
    assert world.log[-1] == "e9 out: it has left"
    assert not engine.ended and len(world.made) == 1


async def test_a_node_that_can_t_be_looked_up_counts_as_one_that_lives() -> None:
    world = World(1, ("e9",), max_restart_attempts_per_shard=1)
    async with world.looked_after():
        world.room.set()
        await anyio.sleep(30)
        world.served["e9"].node_is_gone = no_answer  # type: ignore[method-assign]
        world.health.died(world.served["e9"], "it was killed")
        await anyio.sleep(1)
        assert world.log[-1] == "e9 awaited: e9 died: it was killed; restart 1 of 1"
    assert world.failures == []


async def no_answer() -> bool:
    raise RuntimeError("Ray does not answer")


async def test_what_a_node_lost_while_it_joined_is_told_once_however_often_it_happens() -> None:
    world = World(1, ("e9",))

    def making(engine: Engine) -> None:
        engine.node_lives, engine.mood = False, "dead"

    async with world.looked_after():
        world.room.set()
        await anyio.sleep(30)
        world.served["e9"].node_lives = False
        world.health.died(world.served["e9"], "its node is gone")
        world.making = making
        for _ in range(20):
            await anyio.sleep(30)
            world.room.set()
        await anyio.sleep(30)
    told = "e9 awaited: e9 could not be restarted: e9 died: it was killed again"
    assert world.log[-1] == told and world.log.count(told) == 20
