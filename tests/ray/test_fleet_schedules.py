"""A fleet in random schedules: deaths, lost nodes, hangs, syncs, stops and cancels at any instant.

The parts are the real ones but for Ray: engines are fake, and the clock jumps instead of waiting.
"""

from __future__ import annotations

import concurrent.futures
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import anyio
import anyio.lowlevel
import pytest
from ray.exceptions import ActorDiedError
from trio.testing import MockClock
from virtual_clock import VirtualClockLoop

from sc_core import EnginesFailed, GenerationFleetHealthConfig, Prompt, RolloutError, WorkerDied
from sc_core.records import GroupId
from sc_ray.generation import Completion, port
from sc_ray.generation.fleet import RayFleet
from sc_ray.generation.health import FleetHealth
from sc_ray.generation.port import RayEngine, RayRollouts
from sc_ray.generation.worker import Rollouts
from sc_ray.weights import EngineWeightSync

pytestmark = pytest.mark.anyio
START_S, LONG_S = 60.0, 1200.0
TROUBLES = (
    *("dies", "loses its node", "is said to be dead"),
    *("hangs", "unreachable", "can't load"),
)
SCHEDULES = 20


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """Nothing here is real: no thread, no process."""
    if request.param == "trio":
        return "trio", {"clock": MockClock(autojump_threshold=0)}
    return "asyncio", {"loop_factory": VirtualClockLoop}


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port.ray, "cancel", lambda ref: ref.cancel())


class Ref:
    """An answer that an engine owes."""

    def __init__(self) -> None:
        self.answer: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def future(self) -> concurrent.futures.Future[Any]:
        return self.answer

    def cancel(self) -> None:
        if not self.answer.done():
            self.answer.set_exception(RolloutError("cancelled"))


class Engine:
    def __init__(self, world: World, name: str) -> None:
        assert not [it for it in world.engines if it.name == name and it.lives], "two of one name"
        self.world, self.name = world, name
        self.mood = "well"
        self.ended = self.died = self.node_gone = False
        self.loaded: int | None = None
        self.owed: set[Ref] = set()
        world.engines.append(self)

    @property
    def lives(self) -> bool:
        return not (self.ended or self.died)

    def die(self) -> None:
        self.died = True
        for ref in tuple(self.owed):
            if not ref.answer.done():
                ref.answer.set_exception(ActorDiedError())
        self.owed.clear()

    async def answers(self, most_s: float = 2.0) -> None:
        await anyio.sleep(self.world.random.random() * most_s)
        while self.mood == "hangs" and self.lives:  # noqa: ASYNC110 - on a virtual clock
            await anyio.sleep(1)
        if not self.lives:
            raise WorkerDied(self.name, "it is gone")

    async def check(self) -> None:
        await self.answers()
        if self.mood == "unreachable":
            raise RolloutError("no route to it")

    async def ready(self) -> None:
        await self.answers(30)

    async def pause(self) -> None:
        await self.answers()

    async def resume(self) -> None:
        await self.answers()

    async def load(self, version: int) -> int:
        await self.answers(5)
        if self.mood == "can't load":
            raise RuntimeError("no memory")
        self.loaded = version
        return version

    async def node_is_gone(self) -> bool:
        await anyio.sleep(self.world.random.choice((0, 0, 1)))
        return self.node_gone

    def end(self) -> None:
        self.ended = True
        self.die()

    def send(self, prompt: Prompt, siblings: Sequence[int], weight_version: int) -> Ref:
        world = self.world
        assert not self.ended, "a request to an engine that was ended"
        assert world.health_state(self) == "serving", "a request to one that does not serve"
        assert self.loaded is not None
        assert self.loaded >= world.version - world.syncing, "a request to one with old weights"
        ref = Ref()
        if self.died:
            ref.answer.set_exception(ActorDiedError())
            return ref
        self.owed.add(ref)
        world.tasks.start_soon(self.serve, ref, len(siblings))
        return ref

    async def serve(self, ref: Ref, count: int) -> None:
        try:
            await self.answers(10)
        except WorkerDied:
            return
        self.owed.discard(ref)
        if not ref.answer.done():
            row = Completion(
                token_ids=[1], logprobs=[0.0], text="", finish_reason="eos", weight_version=1
            )
            ref.answer.set_result(
                Rollouts(prompt_ids=[1], completions=[row] * count, rewards=[1.0] * count)
            )


class Files:
    """A transport."""

    async def send(self, version: int, engines: Any, each: Any) -> dict[str, int]:
        await anyio.sleep(1)
        confirmed: dict[str, int] = await each("load", lambda engine: engine.load(version))
        return confirmed

    async def give(self, engine: Any, version: int) -> int:
        loaded: int = await engine.load(version)
        return loaded

    async def confirmed(self) -> None: ...
    def close(self) -> None: ...


class World:
    """A run about a fleet, and all that may happen to it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        pick = self.random.choice
        self.engines: list[Engine] = []
        self.version, self.syncing = 0, False
        self.over = ""  #: why the run has ended
        self.states: dict[str, list[str]] = {}
        self.served = self.synced = 0
        self.left: set[str] = set()
        self.room = pick((0, 2))
        self.troubles = self.random.sample(TROUBLES, pick((1, 2, 3, 6)))
        self.starts = self.random.sample(("hangs", "can't load", "fails"), pick((0, 0, 1, 3)))
        self.wanted = anyio.Event()
        self.stopping = anyio.Event()
        self.ended = anyio.Event()
        required = pick((1, 1, 2, 3))
        first = [Engine(self, f"e{number}") for number in range(required)]
        for engine in first:
            engine.loaded = 0
        optional = [f"o{number}" for number in range(pick((0, 1, 1, 2)))]
        settings = GenerationFleetHealthConfig(
            enabled=pick((True, True, True, False)),
            probe_interval_s=10.0,
            probe_timeout_s=5.0,
            unhealthy_threshold=pick((1, 2)),
            healthy_threshold=pick((1, 2)),
            on_dead_shard=pick(("restart", "restart", "leave_out", "fail")),
            max_restart_attempts_per_shard=pick((0, 1, 2, 5)),
            min_healthy_shards=pick((1, required)),
        )
        self.settings = settings
        engines = cast("list[RayEngine]", first)
        self.sync = EngineWeightSync(cast("Any", Files()), engines, engine_s=100.0)
        self.sync._version = 0
        self.rollouts = RayRollouts(engines)
        self.fleet = RayFleet(self.sync, self.rollouts)
        self.health: FleetHealth[Any] = FleetHealth(
            self.fleet,
            engines,
            settings,
            make=self.make,
            optional=optional,
            come=self.come,
            start_s=START_S,
            in_thread=self.inline,
        )
        self.fleet.attach(self.health)

    def health_state(self, engine: Engine) -> str:
        return self.states.get(engine.name, ["serving"])[-1]

    async def inline(self, work: Callable[[], None]) -> None:
        await anyio.lowlevel.checkpoint()
        work()

    async def make(self, name: str) -> Any:
        engine = Engine(self, name)
        try:
            engine.mood = self.random.choice(("well", *self.starts))
            await engine.ready()
            if engine.mood == "fails":
                raise WorkerDied(name, "it can't start")
            return engine
        except BaseException:
            engine.end()
            raise

    async def come(self, name: str) -> Any:
        while not self.room:
            await self.wanted.wait()
        self.room -= 1
        self.wanted = anyio.Event()
        engine = Engine(self, name)
        try:
            await engine.answers()
            engine.mood = self.random.choice(("well", *self.starts))
            if engine.mood == "fails":
                raise WorkerDied(name, "it can't start")
            return engine
        except BaseException:
            engine.end()
            raise

    # what hears of it -------------------------------------------------------------------

    async def stop_requested(self) -> str:
        await self.stopping.wait()
        return "by hand"

    def engine_is(
        self, engine: str, now: str, reason: str = "", *, confirmed: int | None = None
    ) -> None:
        before = self.states.setdefault(engine, ["awaited" if engine[0] == "o" else "serving"])
        assert before[-1] != "out", f"{engine} is out, and then {now}"
        follows = {
            "serving": ("quarantined", "restarting", "awaited"),
            "quarantined": ("serving", "quarantined"),
            "restarting": ("serving", "quarantined", "restarting"),
            "awaited": ("serving", "quarantined", "awaited"),
            "out": ("serving", "quarantined", "restarting", "awaited"),
        }
        assert before[-1] in follows[now], f"{engine} is {now} after {before[-1]}"
        if now == "serving":
            assert confirmed is not None
        before.append(now)

    def fail(self, error: Exception) -> None:
        self.end(str(error))

    def end(self, why: str) -> None:
        self.over = self.over or why
        self.ended.set()

    # what goes on -----------------------------------------------------------------------

    async def syncs(self) -> None:
        while True:
            served = self.served
            await anyio.sleep(self.random.uniform(5, 60))
            while self.served == served:  # noqa: ASYNC110 - there is nothing to train on
                await anyio.sleep(5)
            self.syncing = True
            try:
                await self.all_do(self.sync.pause)
                self.version += 1
                await self.all_do(lambda: self.sync.transfer(self.version))
                await self.all_do(self.sync.resume)
            except WorkerDied as death:
                return self.end(f"sync: {death}")
            self.syncing = False
            self.synced += 1

    async def all_do(self, what: Callable[[], Any]) -> None:
        """As the controller does: once more without those that failed."""
        while True:
            try:
                return await what()
            except EnginesFailed as failed:
                for name, reason in failed.failures.items():
                    if self.fleet.put_out(name, reason) == 0:
                        raise WorkerDied("every engine", reason) from failed

    async def requests(self, ordinals: Iterator[int]) -> None:
        for ordinal in ordinals:
            await anyio.sleep(self.random.uniform(0, 20))
            prompt = Prompt(ordinal=ordinal, group_id=cast("GroupId", f"g{ordinal}"), payload=None)
            async with anyio.create_task_group() as siblings:
                for sibling in range(2):
                    siblings.start_soon(self.request, prompt, sibling)

    async def request(self, prompt: Prompt, sibling: int) -> None:
        while True:
            try:
                await self.rollouts.rollout(prompt, sibling, self.version)
            except RolloutError:
                await anyio.sleep(1)
                continue
            except WorkerDied as death:
                return self.end(f"rollouts: {death}")
            self.served += 1
            return

    async def events(self) -> None:
        pick = self.random.choice
        for _ in range(self.random.randrange(40)):
            await anyio.sleep(pick((0, 0, 1, 5, 20, 70)))
            if (roll := self.random.random()) < 0.2:
                self.make_room()
            elif roll < 0.21:
                self.stopping.set()
            elif roll < 0.23 and len(self.sync.engines) > 1:
                name = pick(self.sync.engines)
                self.fleet.leave(name)
                self.left.add(name)
            elif living := [engine for engine in self.engines if engine.lives]:
                self.befalls(pick(living))

    def befalls(self, engine: Engine) -> None:
        match trouble := self.random.choice((*self.troubles, "well", "well")):
            case "dies":
                engine.die()
            case "loses its node":
                engine.node_gone = True
                engine.die()
            case "is said to be dead":
                self.health.died(cast("Any", engine), "as they say")
            case _:
                engine.mood = trouble

    def make_room(self) -> None:
        self.room += 1
        self.wanted.set()

    async def go(self, cancel_s: float) -> str:
        """How the run ended; empty if it goes on."""
        async with anyio.create_task_group() as self.tasks:
            with anyio.move_on_after(cancel_s):
                async with anyio.create_task_group() as run:
                    run.start_soon(self.health.run, self)
                    run.start_soon(self.syncs)
                    for number in range(3):
                        run.start_soon(self.requests, iter(range(number, 10**9, 3)))
                    run.start_soon(self.stay)
                    await self.ended.wait()
                    run.cancel_scope.cancel()
            self.tasks.cancel_scope.cancel()
        return self.over

    async def stay(self) -> None:
        """Let things happen, then have all be well; see that the run goes on or has ended."""
        await self.events()
        for _ in range(3):
            for engine in self.engines:
                engine.mood = "well"
            await anyio.sleep(LONG_S / 3)
        served, synced = self.served, self.synced
        await anyio.sleep(LONG_S)
        if not self.over:
            assert self.served > served, f"rollouts wait: {self.told()}"
            assert self.synced > synced, f"syncs wait: {self.told()}"
            if self.settings.enabled:
                for name in set(self.rollouts._engines) - set(self.rollouts._deaths):
                    assert self.states.get(name, ["serving"])[-1] == "serving"
        self.ended.set()

    def told(self) -> str:
        return f"{self.states}, {self.sync.engines}, expected {self.health.expected()}"


@pytest.mark.parametrize("seed", range(SCHEDULES))
async def test_a_run_ends_or_goes_on_whatever_befalls_its_engines(seed: int) -> None:
    world = World(seed)
    await world.go(math.inf)


@pytest.mark.parametrize("seed", range(SCHEDULES))
async def test_a_cancel_at_any_instant_leaves_no_two_of_a_name_and_nobody_who_waits(
    seed: int,
) -> None:
    world = World(seed)
    await world.go(world.random.uniform(0, 300))
    for name in {engine.name for engine in world.engines}:
        assert sum(engine.lives for engine in world.engines if engine.name == name) <= 1
