"""Weights by broadcast: who is sent to, in which group, and what becomes of those that fail."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import torch
from anyio.lowlevel import checkpoint
from ray.exceptions import RayActorError, RayTaskError

from sc_core.config import AsyncRlConfig
from sc_core.errors import CallTimeout, EnginesFailed, WeightSyncError, WorkerDied
from sc_core.ledger import Ledger
from sc_core.places import Places
from sc_core.samplers import Windowed
from sc_core.state import RunState
from sc_core.testing import MemoryEventLog
from sc_core.weights import WeightUpdates
from sc_ray.broadcast import SendPlan, Sent, VllmTransport
from sc_ray.trainer import sender as sender_module
from sc_ray.trainer.engine_calls import EngineCalls
from sc_ray.trainer.sender import Declared, FullWeights, WeightSender
from sc_ray.weight_transport import WeightFiles
from sc_ray.weights import EngineWeightSync

pytestmark = pytest.mark.anyio


# the controller's part ------------------------------------------------------------------


class Engine:
    """Has weights as text: of a broadcast, or of a file."""

    far = False

    def __init__(self, name: str) -> None:
        self.name = name
        self.handle = self
        self.weights = ""
        self.log: list[str] = []

    async def pause(self) -> None:
        self.log.append("pause")
        await checkpoint()

    async def resume(self) -> None:
        self.log.append("resume")
        await checkpoint()

    async def load_weights(self, path: Path, version: int) -> int:
        self.log.append("load")
        await checkpoint()
        self.weights = path.read_text()
        return version


class Trainer:
    def __init__(self) -> None:
        self.steps = 0
        self.plans: list[SendPlan] = []
        self.exports: list[Path] = []
        self.failed: dict[str, str] = {}
        self.dead: dict[str, str] = {}
        self.on_send: Callable[[], object] = lambda: None

    async def export_weights(self, path: Path) -> int:
        self.exports.append(path)
        await checkpoint()
        path.write_text(f"w{self.steps}")
        return self.steps

    async def send_weights(self, plan: SendPlan) -> Sent:
        self.plans.append(plan)
        self.on_send()
        await checkpoint()
        guilty = {**self.failed, **self.dead}.keys() & plan.engines.keys()
        failed = {name: why for name, why in self.failed.items() if name in guilty}
        dead = {name: why for name, why in self.dead.items() if name in guilty}
        if guilty:
            return Sent(steps=self.steps, failed=failed, dead=dead)
        for engine in plan.engines.values():
            engine.weights = f"w{self.steps}"
        return Sent(steps=self.steps, confirmed=dict.fromkeys(plan.engines, plan.version))

    @property
    def groups(self) -> list[tuple[int, tuple[str, ...]]]:
        return [(plan.group, tuple(plan.engines)) for plan in self.plans]


@pytest.fixture
def trainer() -> Trainer:
    return Trainer()


@pytest.fixture
def engines() -> list[Engine]:
    return [Engine("a"), Engine("b"), Engine("c")]


Sync = EngineWeightSync[Any]


@pytest.fixture
def files(tmp_path: Path) -> WeightFiles:
    return WeightFiles("run-1", parent=tmp_path)


def sync_of(trainer: Trainer, engines: list[Engine], files: WeightFiles) -> Sync:
    return EngineWeightSync(VllmTransport(trainer, files, send_s=7.0), engines, engine_s=9.0)


async def sync_once(sync: Sync, trainer: Trainer, version: int) -> object:
    trainer.steps = 100 + version
    await sync.pause()
    confirmed = await sync.transfer(version)
    await sync.resume()
    return confirmed


async def test_a_group_lasts_as_long_as_the_same_engines_take_part(
    trainer: Trainer, engines: list[Engine], files: WeightFiles
) -> None:
    with sync_of(trainer, engines, files) as sync:
        for version in (1, 2):
            confirmed = await sync_once(sync, trainer, version)
            assert confirmed == {"a": version, "b": version, "c": version}
            assert {engine.weights for engine in engines} == {f"w{100 + version}"}
        assert trainer.exports == [] and not list(files.directory.glob("*.safetensors"))
        sync.leave("b")
        await sync_once(sync, trainer, 3)
        await sync_once(sync, trainer, 4)
        await sync.join(Engine("b"), within_s=10)  # another one of that name
        await sync_once(sync, trainer, 5)
        plan = trainer.plans[-1]
        assert (plan.deadline_s, plan.far) == (7.0, False)
        engines[0].far = True
        await sync_once(sync, trainer, 6)
        assert trainer.plans[-1].far
    abc, ac, acb = ("a", "b", "c"), ("a", "c"), ("a", "c", "b")
    assert trainer.groups == [(1, abc), (1, abc), (2, ac), (2, ac), (3, acb), (3, acb)]
    assert [engine.log[:2] for engine in engines] == [["pause", "resume"]] * 3


async def test_it_goes_on_without_the_dead_and_never_in_a_group_that_failed(
    trainer: Trainer, engines: list[Engine], files: WeightFiles
) -> None:
    with sync_of(trainer, engines, files) as sync:
        await sync_once(sync, trainer, 1)
        trainer.dead = {"b": "it was killed"}
        await sync.pause()
        assert await sync.transfer(2) == {"a": 2, "c": 2}
        assert sync.engines == ("a", "c")
        trainer.failed = {"a": "it can't"}
        with pytest.raises(EnginesFailed) as caught:
            await sync.transfer(3)
        assert caught.value.failures == {"a": "it can't"}, "c is not to blame"
        trainer.failed = {}
        assert await sync.transfer(3) == {"a": 3, "c": 3}
        with anyio.CancelScope() as scope:
            trainer.on_send = scope.cancel
            await sync.transfer(4)
        assert scope.cancelled_caught
        assert await sync.transfer(4) == {"a": 4, "c": 4}
    abc, ac = ("a", "b", "c"), ("a", "c")
    expected = [(1, abc), (1, abc), (2, ac), (2, ac), (3, ac), (3, ac), (4, ac)]
    assert trainer.groups == expected


async def test_who_joins_between_two_broadcasts_gets_a_file_of_the_same_weights(
    trainer: Trainer, engines: list[Engine], files: WeightFiles
) -> None:
    first, late, later = engines
    with sync_of(trainer, [first], files) as sync:
        assert await sync.join(late, within_s=10) is None, "before the first there is nothing"
        assert trainer.exports == []
        sync.leave("b")
        await sync_once(sync, trainer, 1)
        assert await sync.join(late, within_s=10) == 1
        assert await sync.join(later, within_s=10) == 1
        assert {engine.weights for engine in engines} == {"w101"}
        assert len(trainer.exports) == 1, "one file is enough for both"
        await sync_once(sync, trainer, 2)
        assert {engine.weights for engine in engines} == {"w102"}
        assert not trainer.exports[0].exists()
        sync.leave("b")
        assert await sync.join(late, within_s=10) == 2
        assert late.weights == "w102"


async def test_who_comes_when_the_trainer_is_ahead_waits_for_the_next_broadcast(
    trainer: Trainer, engines: list[Engine], files: WeightFiles
) -> None:
    first, late, _ = engines
    with sync_of(trainer, [first], files) as sync:
        await sync_once(sync, trainer, 1)
        trainer.steps = 102
        with pytest.raises(CallTimeout, match="join of engine b"):
            await sync.join(late, within_s=0.05)
        assert "load" not in late.log, "it would take weights of 2 for those of 1"
        async with anyio.create_task_group() as tg:
            tg.start_soon(lambda: sync.join(late, within_s=10))
            await anyio.wait_all_tasks_blocked()
            assert "load" not in late.log
            await sync_once(sync, trainer, 2)
        assert (late.weights, sync.engines) == ("w102", ("a", "b"))


async def test_a_file_that_was_written_while_the_version_moved_is_not_used(
    trainer: Trainer, engines: list[Engine], files: WeightFiles
) -> None:
    first, late, _ = engines
    with sync_of(trainer, [first], files) as sync:
        await sync_once(sync, trainer, 1)
        write = trainer.export_weights

        async def slow(path: Path) -> int:
            trainer.export_weights = write  # type: ignore[method-assign]
            await sync_once(sync, trainer, 2)
            return await write(path)

        trainer.export_weights = slow  # type: ignore[method-assign]
        assert await sync.join(late, within_s=10) == 2
        assert (late.weights, late.log) == ("w102", ["load"])


class Hope:
    def __init__(self) -> None:
        self.dead: list[str] = []

    def died(self, engine: Any, reason: str) -> None:
        self.dead.append(f"{engine.name}: {reason}")

    def expects_more(self) -> bool:
        return True


@pytest.mark.parametrize("dies", ["before", "within"])
async def test_a_sync_that_has_no_engine_left_waits_for_the_one_that_joins(
    trainer: Trainer, engines: list[Engine], files: WeightFiles, dies: str
) -> None:
    only, late, _ = engines
    with sync_of(trainer, [only], files) as sync:
        sync.keeper = keeper = Hope()
        await sync_once(sync, trainer, 1)
        if dies == "before":
            sync.leave("a")
        else:
            trainer.dead = {"a": "it was killed"}
        async with anyio.create_task_group() as tg:
            tg.start_soon(lambda: sync.join(late, within_s=10))
            assert await sync_once(sync, trainer, 2) == {"b": 2}
        assert (late.weights, sync.engines) == ("w102", ("b",))
        assert keeper.dead == ([] if dies == "before" else ["a: it was killed"])
        await sync_once(sync, trainer, 3)
        assert late.weights == "w103"
        assert trainer.groups[-1][1] == ("b",)


@pytest.mark.parametrize("guilty", ["c", "trainer"])
async def test_a_run_goes_on_without_the_engine_that_fails_but_not_without_the_trainer(
    trainer: Trainer, engines: list[Engine], files: WeightFiles, guilty: str
) -> None:
    class Fleet:
        def put_out(self, engine: str, reason: str) -> int:
            return sync.leave(engine)

    state = RunState(Ledger(prompts_per_step=1), Places(1), Windowed(0), MemoryEventLog())
    with sync_of(trainer, engines, files) as sync:
        updates = WeightUpdates(state, sync, AsyncRlConfig(), fleet=Fleet())
        await updates.update()
        if guilty == "c":
            trainer.failed = {"c": "it can't"}
            await updates.update()
            assert (state.engines, state.gate_closed_for) == (("a", "b"), None)
            assert state.engines_out == {"c": "it can't"}
        else:

            async def can_not(plan: SendPlan) -> Sent:
                raise WeightSyncError("the trainer could not send its weights: no NCCL")

            trainer.send_weights = can_not  # type: ignore[method-assign]
            with pytest.raises(WeightSyncError, match="no NCCL"):
                await updates.update()
            assert state.engines_out == {}, "no engine is to blame"
        assert {engine.log[-1] for engine in engines[:2]} == {"resume"}


# the trainer's part ---------------------------------------------------------------------


class Handle:
    """A generation worker as seen from another process; a method may hang, or raise."""

    def __init__(self, name: str, told: list[str], workers: int = 1) -> None:
        self.name, self._told, self._workers = name, told, workers
        self.does: dict[str, Any] = {}
        self.infos: list[Any] = []

    def __getattr__(self, method: str) -> Any:
        def remote(*arguments: Any) -> Any:
            self._told.append(f"{self.name}.{method}")
            self.infos += arguments
            does = self.does.get(method, {"transfer_workers": self._workers}.get(method))
            answer: concurrent.futures.Future[Any] = concurrent.futures.Future()
            if method == "finish_update" and does is None:
                does = arguments[0]
            if isinstance(does, BaseException):
                answer.set_exception(does)
            elif does != "hang":
                answer.set_result(does)
            return SimpleNamespace(future=lambda: answer)

        return SimpleNamespace(remote=remote)


def killed() -> RayActorError:
    return RayActorError(error_msg="it was killed")


class Endpoint:
    """What vLLM's NCCL engine does in the trainer, without NCCL."""

    def __init__(self, ranks: int, calls: EngineCalls, weights: FullWeights) -> None:
        self.ranks, self.calls, self.weights = ranks, calls, weights
        self.sent: dict[str, torch.Tensor] = {}
        self.ended = threading.Event()
        self.hangs = self.deaf = False

    def send_weights(self) -> None:
        declared = self.weights.metadata()
        self.calls.start_weight_update()
        aside = concurrent.futures.ThreadPoolExecutor(1)
        receiving = aside.submit(self.calls.update_weights, {"names": [d.name for d in declared]})
        aside.shutdown(wait=False)
        self.sent = {}
        for place, (name, tensor) in enumerate(self.weights):
            assert declared[place] == Declared(name, tensor.dtype, tuple(tensor.shape))
            if self.hangs and place == 1:
                self.ended.wait(60)
                raise RuntimeError("the communicator was aborted")
            self.sent[name] = tensor
        receiving.result()
        self.calls.finish_weight_update()

    def shutdown(self) -> None:
        if not self.deaf:
            self.ended.set()


class Rig:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[str] = []
        self.handles = {"a": Handle("a", self.told, workers=2), "b": Handle("b", self.told)}
        self.endpoints: list[Endpoint] = []
        self.gathered: list[str] = []
        self.hangs = self.deaf = False
        self.weights = {name: torch.full((2, 3), value) for value, name in enumerate("xyz", 1)}
        policy: Any = SimpleNamespace(steps=5, weights=lambda: self.weights)
        self.first, self.second = (
            WeightSender(policy, first=first, connect=self.connect) for first in (True, False)
        )
        monkeypatch.setattr(sender_module, "whole", self.whole)
        monkeypatch.setattr(sender_module, "GRACE_S", 0.3)
        monkeypatch.setattr("sc_ray.trainer.engine_calls.GRACE_S", 0.05)

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        (name,) = (name for name, known in self.weights.items() if known is tensor)
        self.gathered.append(name)
        return tensor

    def connect(
        self, address: str, port: int, ranks: int, calls: EngineCalls, weights: FullWeights
    ) -> Endpoint:
        assert address == "127.0.0.1" and port > 0
        calls.init_weight_transfer_engine({"rank_offset": 1, "world_size": ranks})
        self.endpoints.append(Endpoint(ranks, calls, weights))
        self.endpoints[-1].hangs, self.endpoints[-1].deaf = self.hangs, self.deaf
        return self.endpoints[-1]

    def plan(self, version: int, group: int, deadline_s: float | None = 60.0) -> SendPlan:
        return SendPlan(
            version=version, group=group, engines=self.handles, far=False, deadline_s=deadline_s
        )

    def send(self, version: int, group: int, deadline_s: float | None = 60.0) -> Sent:
        self.gathered.clear()
        return self.first.send(self.plan(version, group, deadline_s))


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    rig = Rig(monkeypatch)
    yield rig
    for endpoint in rig.endpoints:
        endpoint.ended.set()


def test_the_first_worker_sends_everything_to_every_engine(rig: Rig) -> None:
    assert rig.send(3, group=1) == Sent(steps=5, confirmed={"a": 3, "b": 3})
    calls = ("transfer_workers", "meet_trainer")
    update = ("begin_update", "receive_weights", "finish_update")
    expected = [f"{name}.{call}" for call in (*calls, *update) for name in "ab"]
    assert rig.told == expected
    (endpoint,) = rig.endpoints
    assert endpoint.ranks == 4, "the trainer's own, two of a, one of b"
    assert [rig.handles[name].infos[0]["rank_offset"] for name in "ab"] == [1, 3]
    assert endpoint.sent == rig.weights
    rig.told.clear()
    assert rig.send(4, group=1, deadline_s=None).confirmed == {"a": 4, "b": 4}
    assert rig.told == [f"{name}.{call}" for call in update for name in "ab"], "they have met"
    del rig.handles["b"]
    assert rig.send(5, group=2).confirmed == {"a": 5}
    assert [endpoint.ended.is_set() for endpoint in rig.endpoints] == [True, False]


def test_the_others_gather_and_ask_nobody(rig: Rig) -> None:
    assert rig.second.send(rig.plan(3, group=1)) == Sent(steps=5)
    assert (rig.gathered, rig.told) == (["x", "y", "z"], [])


@pytest.mark.parametrize(
    "call", ["transfer_workers", "meet_trainer", "begin_update", "receive_weights", "finish_update"]
)
@pytest.mark.parametrize("how", ["fails", "died", "core died"])
def test_an_engine_that_fails_is_told_from_those_that_do_not(rig: Rig, call: str, how: str) -> None:
    error: Exception = {
        "fails": OSError("it can't"),
        "died": killed(),
        "core died": RayTaskError("f", "text", WorkerDied("vLLM's engine", "its core has ended")),
    }[how]
    rig.hangs = call == "receive_weights"  # as the sender does, when one does not receive
    rig.handles["b"].does[call] = error
    sent = rig.send(3, group=1)
    assert sent.confirmed == {} and {*sent.failed, *sent.dead} == {"b"}
    if how == "fails":
        assert sent.failed["b"].endswith(": it can't")
    else:
        assert sent.dead["b"] == ("it was killed" if how == "died" else "its core has ended")
    assert rig.gathered == ["x", "y", "z"], "other workers wait for it in every gather"
    rig.hangs, rig.handles["b"].does = False, {}
    assert rig.send(3, group=2).confirmed == {"a": 3, "b": 3}
    assert all(endpoint.ended.is_set() for endpoint in rig.endpoints[:-1])


def test_an_engine_that_does_not_answer_is_named_at_the_deadline(rig: Rig) -> None:
    rig.handles["b"].does["receive_weights"] = "hang"
    sent = rig.send(3, group=1, deadline_s=0.2)
    assert sent.failed == {"b": "receiving weights did not return within 0.2 s"}
    rig.handles["a"].does["receive_weights"] = OSError("it can't")
    sent = rig.send(3, group=2, deadline_s=60)
    assert sent.failed == {
        "a": "receiving weights: it can't",
        "b": "receiving weights did not return, after a failed",
    }


def test_a_broadcast_that_can_not_be_ended_leaves_a_sender_that_says_so(rig: Rig) -> None:
    rig.hangs = rig.deaf = True
    rig.handles["b"].does["receive_weights"] = killed()
    assert rig.send(3, group=1).dead == {"b": "it was killed"}
    assert rig.gathered == ["x", "y", "z"]
    rig.hangs = rig.deaf = False
    rig.handles["b"].does = {}
    with pytest.raises(WeightSyncError, match="an earlier broadcast still hangs"):
        rig.send(3, group=2)
    assert rig.gathered == ["x", "y", "z"]
    rig.endpoints[0].ended.set()
    concurrent.futures.wait([rig.first._stuck])  # type: ignore[list-item]
    assert rig.send(3, group=3).confirmed == {"a": 3, "b": 3}


def test_what_the_trainer_fails_of_is_raised_and_no_engine_blamed(rig: Rig) -> None:
    def can_not(*_: Any) -> Any:
        raise OSError("no such device")

    rig.first._connect = can_not
    with pytest.raises(WeightSyncError, match="could not send its weights: no such device"):
        rig.send(3, group=1)
    rig.first._connect = rig.connect
    rig.hangs = True
    with pytest.raises(WeightSyncError, match="could not send its weights: the communicator was"):
        rig.send(3, group=2, deadline_s=0.1)
