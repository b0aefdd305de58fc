"""Makes engines, and is cancelled, fails and is closed at any instant: no process is left over."""

from __future__ import annotations

import concurrent.futures
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from sc_core import WorkerDied
from sc_ray.generation import port, start
from sc_ray.generation.start import EngineMaker

pytestmark = pytest.mark.anyio


class Actor:
    """A worker that is asked, and answers when it is told to."""

    def __init__(self) -> None:
        self.killed = False
        self.asked: dict[str, concurrent.futures.Future[Any]] = {}
        self.ready = SimpleNamespace(remote=lambda: self._asks("ready"))
        self.node_id = SimpleNamespace(remote=lambda: self._asks("node_id"))

    def _asks(self, what: str) -> Any:
        answer = self.asked[what] = concurrent.futures.Future()
        return SimpleNamespace(future=lambda: answer)


class Starts:
    def __init__(self) -> None:
        self.actors: list[Actor] = []

    def start(self, name: str) -> Actor:
        self.actors.append(Actor())
        return self.actors[-1]


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Starts:
    def kill(actor: Actor) -> None:
        actor.killed = True

    here = SimpleNamespace(get_node_id=lambda: "here")
    monkeypatch.setattr(start, "kill", kill)
    monkeypatch.setattr(port, "kill", kill)
    monkeypatch.setattr(start.ray, "get_runtime_context", lambda: here)
    return Starts()


async def asked(starts: Starts, what: str) -> concurrent.futures.Future[Any]:
    while not (starts.actors and what in starts.actors[-1].asked):  # noqa: ASYNC110
        await anyio.sleep(0.001)
    return starts.actors[-1].asked[what]


@pytest.mark.parametrize("end", ["cancel", "death"])
@pytest.mark.parametrize(
    ("how", "last"), [("make", "ready"), ("make", "node_id"), ("come", "node_id")]
)
async def test_what_is_not_made_to_the_end_is_ended(
    starts: Starts, how: str, last: str, end: str
) -> None:
    maker = EngineMaker(cast("Any", starts), cast("Any", object()))
    deaths: list[WorkerDied] = []

    async def make() -> None:
        try:
            await (maker.make if how == "make" else maker.come)("e0")
        except WorkerDied as death:
            deaths.append(death)

    with anyio.fail_after(20):
        async with anyio.create_task_group() as tg:
            tg.start_soon(make)
            if last == "node_id" and how == "make":
                (await asked(starts, "ready")).set_result(None)
            answer = await asked(starts, last)
            if end == "cancel":
                tg.cancel_scope.cancel()
            else:
                answer.set_exception(WorkerDied("e0", "it was killed"))
    assert len(deaths) == (end == "death")
    assert [actor.killed for actor in starts.actors] == [True]


async def test_a_close_ends_all_that_were_made_and_who_is_far_gets_parcels(starts: Starts) -> None:
    maker = EngineMaker(cast("Any", starts), cast("Any", object()))
    with anyio.fail_after(20):
        for node in ("here", "far"):
            async with anyio.create_task_group() as tg:

                async def come(node: str = node) -> None:
                    engine = await maker.come(node)
                    assert engine.far == (node == "far")

                tg.start_soon(come)
                while len(starts.actors) < 1 + (node == "far"):  # noqa: ASYNC110
                    await anyio.sleep(0.001)
                (await asked(starts, "node_id")).set_result(node)
    assert [actor.killed for actor in starts.actors] == [False, False]
    maker.close()
    maker.close()
    assert [actor.killed for actor in starts.actors] == [True, True]
