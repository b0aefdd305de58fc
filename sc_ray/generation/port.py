"""The controller's way to the generation workers."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import anyio.lowlevel
import ray
from ray.exceptions import ActorDiedError, RayActorError, RayTaskError

from sc_core import (
    ConfigError,
    DataFailure,
    GroupId,
    Prompt,
    RolloutError,
    Sample,
    ScError,
    WorkerDied,
    in_thread,
)
from sc_ray.bridge import await_future
from sc_ray.cluster import kill, living_nodes
from sc_ray.generation import rollout_row
from sc_ray.generation.worker import Example, Rollouts
from sc_ray.parcels import Parcels
from sc_ray.weights import Keeper, Nobody
from sc_ray.workers import answer, died

Choice = Literal["least_loaded", "by_ordinal"]
logger = logging.getLogger(__name__)


class RayEngine:
    """One generation worker, by its name. Errors are those that the worker raised.

    Args:
        parcels: for a worker on another node, which gets weights through them and not by path.
        node: id of the node that it is on, if that is known.

    Raises:
        WorkerDied: from every coroutine, once the worker's process is gone.
    """

    def __init__(
        self,
        actor: Any,
        *,
        name: str,
        parcels: Parcels | None = None,
        node: str | None = None,
    ) -> None:
        self.name = name
        self._actor = actor
        self._node = node
        self._parcels = parcels

    @property
    def handle(self) -> Any:
        """Of the worker: by it, other processes call it too."""
        return self._actor

    @property
    def far(self) -> bool:
        """Whether it is on another node than the controller and the trainer."""
        return self._parcels is not None

    def send(
        self, prompt: Prompt, siblings: Sequence[int], weight_version: int
    ) -> ray.ObjectRef[Rollouts]:
        """Ask for siblings; never waits."""
        return self._actor.rollouts.remote(prompt, siblings, weight_version)

    async def pause(self) -> None:
        await answer(self.name, self._actor.pause.remote())

    async def resume(self) -> None:
        await answer(self.name, self._actor.resume.remote())

    async def load_weights(self, path: Path, version: int) -> int:
        if self._parcels is None:
            call = self._actor.load_weights.remote(path, version)
        else:
            call = self._actor.load_content.remote(await self._parcels.of(path), version)
        loaded: int = await answer(self.name, call)
        return loaded

    async def examples(self, count: int) -> list[Example]:
        found: list[Example] = await answer(self.name, self._actor.examples.remote(count))
        return found

    async def check(self) -> None:
        """Return if the worker answers and its engine lives.

        Raises:
            WorkerDied: the worker's process is gone, or it says that its engine is.
            RolloutError: it is out of reach at the moment.
        """
        try:
            await answer(self.name, self._actor.check.remote())
        except WorkerDied as death:
            report = death.__cause__
            if isinstance(report, RayActorError) and not isinstance(report, ActorDiedError):
                raise RolloutError(str(death)) from death
            raise
        except Exception as exc:  # the worker's own
            raise WorkerDied(self.name, f"its engine: {type(exc).__name__}: {exc}") from exc

    async def node_is_gone(self) -> bool:
        """Whether Ray has given up the node that the worker is, or was, on."""
        return self._node is not None and self._node not in await in_thread(living_nodes)

    def end(self) -> None:
        """End the worker's process, if it is still there."""
        kill(self._actor)

    async def ready(self) -> None:
        """Wait until the worker's engine is built.

        Raises:
            ConfigError: it can't be.
        """
        await answer(self.name, self._actor.ready.remote())

    async def ping(self) -> None:
        """Wait until the worker is up."""
        await answer(self.name, self._actor.ping.remote())

    async def node_id(self) -> str:
        """The node it runs on; waits until the worker is up."""
        node: str = await answer(self.name, self._actor.node_id.remote())
        return node


class RayRollouts:
    """A `RolloutWorker` over generation workers; works on asyncio, uvloop and trio.

    Siblings of a group that are asked for in the same tick of the event loop make one call to
    one worker. Once the last of them has been cancelled, so is the call. Engines may join and
    leave at any time, from any thread or event loop. While there is none and the `keeper` expects
    one, siblings wait for it.

    Args:
        choice: `least_loaded` gives a group to the worker with the fewest siblings under way;
            `by_ordinal` gives a prompt always to the same one, as long as all live.

        overlong_filtering: whether a sibling that was cut off at a length limit is masked.

    Raises:
        ConfigError: no engines, or two of one name.
    """

    def __init__(
        self,
        engines: Sequence[RayEngine],
        *,
        choice: Choice = "least_loaded",
        overlong_filtering: bool = False,
    ) -> None:
        self._engines = {engine.name: engine for engine in engines}
        if not engines or len(self._engines) < len(engines):
            names = [engine.name for engine in engines]
            raise ConfigError(f"rollouts need engines of different names, and got {names}")
        self._choice = choice
        self._overlong_filtering = overlong_filtering
        self._lock = threading.Lock()  #: over changes of `_engines`, which is replaced, not changed
        self._calls: dict[str, set[_Call]] = {}  #: under way, by engine
        self._under_way = dict.fromkeys(self._engines, 0)  #: siblings, by engine
        self._deaths: dict[str, str] = {}  #: what became of it, by engine
        self._gathering: dict[tuple[GroupId, int], _Call] = {}
        self._news: concurrent.futures.Future[None] = concurrent.futures.Future()
        """Of the next engine that joins, or of an end of expectations; then there is another."""
        self.keeper: Keeper = Nobody()

    def look_again(self) -> None:
        """Let those who wait see that the keeper expects others than before."""
        with self._lock:
            news, self._news = self._news, concurrent.futures.Future()
        news.set_result(None)

    def join(self, engine: RayEngine) -> None:
        """Send requests to an engine more, which has weights to generate by.

        Raises:
            ConfigError: there is one of that name, and it lives.
        """
        with self._lock:
            if engine.name in self._engines and engine.name not in self._deaths:
                raise ConfigError(f"there is an engine {engine.name} already")
            self._deaths.pop(engine.name, None)
            self._under_way.setdefault(engine.name, 0)
            self._engines = {**self._engines, engine.name: engine}
        self.look_again()

    def leave(self, name: str, why: str = "") -> None:
        """Send an engine no more requests. Those it has go on."""
        if name in self._engines:
            self._bury(name, why or f"{name} has left")

    def put_out(self, name: str, why: str) -> None:
        """Send an engine no more requests; those it has end in a RolloutError. On their loop."""
        if name in self._engines:
            self._bury(name, why)
        for call in tuple(self._calls.get(name, ())):
            call.fail(RolloutError(why))

    async def rollout(self, prompt: Prompt, sibling: int, weight_version: int) -> Sample:
        """One sibling, with the columns of `rollout_row`.

        Raises:
            DataFailure: the prompt is at fault, or the reward function fails on it.
            RolloutError: a worker failed or died; another attempt goes to one that lives.
            WorkerDied: none is left, and none is expected.
        """
        key = (prompt.group_id, weight_version)
        while (call := self._gathering.get(key)) is None and not self._some_live():
            await self._somebody()
        first = call is None
        if call is None:
            call = self._gathering[key] = _Call(self._choose(prompt.ordinal))
            self._calls.setdefault(call.engine.name, set()).add(call)
        place = call.join(sibling)
        self._under_way[call.engine.name] += 1
        try:
            if first:
                try:  # siblings that start in this tick join
                    await anyio.lowlevel.cancel_shielded_checkpoint()
                finally:
                    del self._gathering[key]
                    call.send(prompt, weight_version)
            return await self._sample(call, place)
        finally:
            self._under_way[call.engine.name] -= 1
            if call.leave():
                self._calls[call.engine.name].discard(call)

    def _some_live(self) -> bool:
        return len(self._engines) > len(self._deaths)

    async def _somebody(self) -> None:
        """Wait for news, unless no engine will come."""
        news = self._news
        if not self._some_live():
            if not self.keeper.expects_more():
                raise self._none_left()
            await await_future(news)

    def _choose(self, ordinal: int) -> RayEngine:
        alive = [engine for name, engine in self._engines.items() if name not in self._deaths]
        if not alive:
            raise self._none_left()
        if self._choice == "by_ordinal":
            return alive[ordinal % len(alive)]
        return min(alive, key=lambda engine: self._under_way[engine.name])

    def _bury(self, name: str, told: str) -> None:
        with self._lock:
            if name in self._deaths:
                return
            self._deaths[name] = told
            left = len(self._engines) - len(self._deaths)
        logger.info("%s; %d of %d generation workers serve", told, left, len(self._engines))

    def _none_left(self) -> WorkerDied:
        return WorkerDied("every generation worker", "; ".join(self._deaths.values()))

    async def _sample(self, call: _Call, place: int) -> Sample:
        name = call.engine.name
        try:
            rollouts = await await_future(call.answer)
        except RayActorError as report:
            death = died(name, report)
            dead = isinstance(report, ActorDiedError)  # not one that is only out of reach
            if dead and self._engines.get(name) is call.engine:  # and not its successor
                self._bury(name, str(death))
                self.keeper.died(call.engine, death.reason)
            if not self._some_live() and not self.keeper.expects_more():
                raise self._none_left() from report
            raise RolloutError(str(death)) from report
        except RayTaskError as report:
            cause = report.cause
            if isinstance(cause, WorkerDied) and self._engines.get(name) is call.engine:
                self._bury(name, str(cause))  # the worker lives, its engine does not
                self.keeper.died(call.engine, cause.reason)
            kind = DataFailure if isinstance(cause, DataFailure) else RolloutError
            what = "" if isinstance(cause, ScError) else f"{type(cause).__name__}: "
            raise kind(f"{name}: {what}{cause}") from report  # its own for each sibling
        except RolloutError as out:  # of `put_out`; likewise
            raise RolloutError(str(out)) from out
        completion, reward = rollouts.completions[place], rollouts.rewards[place]
        components = rollouts.components[place] if rollouts.components else ()
        row = rollout_row(rollouts.prompt_ids, completion, reward=reward, components=components)
        return Sample(
            fields=row,
            reward=reward,
            tokens=int(row["completion_mask"].sum()),
            end_weight_version=completion.weight_version,
            engine=name,
            components=dict(zip(rollouts.component_names, components, strict=False)),
            masked=self._overlong_filtering and completion.finish_reason == "length",
        )


class _Call:
    """Siblings that go to one engine together."""

    def __init__(self, engine: RayEngine) -> None:
        self.engine = engine
        self.answer: concurrent.futures.Future[Rollouts] = concurrent.futures.Future()
        self._siblings: list[int] = []
        self._listeners = 0
        self._ref: ray.ObjectRef[Rollouts] | None = None

    def join(self, sibling: int) -> int:
        """Add a sibling; returns its place in the answer."""
        self._siblings.append(sibling)
        self._listeners += 1
        return len(self._siblings) - 1

    def leave(self) -> bool:
        """One sibling less that listens; returns whether it was the last."""
        self._listeners -= 1
        if not self._listeners and self._ref is not None and not self.answer.done():
            ray.cancel(self._ref)
        return not self._listeners

    def fail(self, error: Exception) -> None:
        """Answer every sibling with this error, and let the engine forget the call."""
        running = None if self.answer.done() else self._ref
        self._fail(error)  # before the answer to the cancel, which says less
        if running is not None:
            ray.cancel(running)

    def _fail(self, error: BaseException) -> None:
        with suppress(concurrent.futures.InvalidStateError):  # the answer and a `fail` may meet
            self.answer.set_exception(error)

    def send(self, prompt: Prompt, weight_version: int) -> None:
        try:
            self._ref = self.engine.send(prompt, self._siblings, weight_version)
        except Exception as exc:  # carried to every sibling
            self._fail(exc)
        else:
            self._ref.future().add_done_callback(self._answered)

    def _answered(self, reply: concurrent.futures.Future[Rollouts]) -> None:
        """Called in a thread of Ray's."""
        error = reply.exception()
        if error is not None:
            self._fail(error)
            return
        with suppress(concurrent.futures.InvalidStateError):
            self.answer.set_result(reply.result())
