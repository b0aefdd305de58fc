"""The actor around a controller: steering, cancelling, and failures that arrive as text."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
import ray
from ray.exceptions import RayActorError, RayTaskError, TaskCancelledError

from sc_core.barrier import BarrierStatistics
from sc_core.controller import ControllerStatistics, RunResult
from sc_core.errors import CallTimeout, Conservation, SaveError
from sc_ray.actor import SingleControllerActor
from sc_ray.failures import ControllerFailed
from sc_ray.hosted import EventLoop, HostedController, in_abandonable_thread

LOOPS = ["asyncio", "uvloop", "trio"]


def make_fake() -> type:
    """A controller that waits until it is stopped; made here so that it pickles by value."""

    class FakeController:
        def __init__(self, run: Any, audit: Exception | None, blocks_in_saves: bool) -> None:
            self._run, self._audit, self._blocks_in_saves = run, audit, blocks_in_saves
            self.stop_reason: str | None = None
            self.saves = 0
            self._news = anyio.Event()

        async def run(self) -> RunResult:
            if self._run is not None:
                await self._run()
            while self.stop_reason is None:
                await self._news.wait()
                self._news = anyio.Event()
            await anyio.sleep(0.05)  # the last bundle
            return RunResult(reason="stopped", step=self.saves, weight_version=0, counters={})

        def stop(self, reason: str = "stopped", *, checkpoint: bool = True) -> None:
            self.stop_reason = reason if checkpoint else f"{reason}, without a bundle"
            self._news.set()

        def request_checkpoint(self) -> None:
            if self._blocks_in_saves:
                time.sleep(2)  # and the loop with it
            self.saves += 1
            self._news.set()

        def audit(self) -> None:
            if self._audit is not None:
                raise self._audit

        def statistics(self) -> ControllerStatistics:
            return ControllerStatistics(
                step=self.saves,
                weight_version=0,
                waiting=0,
                in_flight=0,
                committed=0,
                selected=0,
                places_held=0,
                places_capacity=1,
                gate_closed_for=None,
                stop_reason=self.stop_reason,
                barrier=BarrierStatistics(
                    mutations=0, checkpointing=False, waiting=0, holders=(), waiters=()
                ),
                engines=(),
                engines_out={},
                last_metrics={},
            )

    return FakeController


def make_args(
    run: Any = None,
    event_loop: EventLoop = "asyncio",
    audit: Exception | None = None,
    blocks_in_saves: bool = False,
) -> Any:
    fake = make_fake()

    class Args:
        def __init__(self) -> None:
            self.event_loop = event_loop

        @asynccontextmanager
        async def open(self) -> AsyncIterator[Any]:
            yield fake(run, audit, blocks_in_saves)

    return Args()


def hosted(run: Any = None, event_loop: EventLoop = "asyncio") -> HostedController:
    args = make_args(run, event_loop)
    return HostedController(args.open, event_loop)


# a controller in its own thread --------------------------------------------------------


@pytest.mark.parametrize("event_loop", LOOPS)
def test_calls_reach_the_controller_on_its_own_loop(event_loop: EventLoop) -> None:
    controller = hosted(event_loop=event_loop)
    early = controller.call(lambda c: c.request_checkpoint())
    assert controller.state == "starting"
    assert not early.done()  # nobody is there yet
    controller.start()
    early.result(10)
    thread = controller.call(lambda _: threading.current_thread().name).result(10)
    assert thread == "controller"
    assert controller.state == "running"
    assert not controller.ended.done()
    controller.call(lambda c: c.stop("enough"))
    assert controller.ended.result(10).step == 1
    assert controller.state == "ended"


@pytest.mark.parametrize("event_loop", LOOPS)
def test_it_runs_on_the_loop_that_was_asked_for(event_loop: EventLoop) -> None:
    found: list[str] = []

    async def note_loop() -> None:
        found.append(type(anyio.lowlevel.current_token().native_token).__module__)

    controller = hosted(note_loop, event_loop)
    controller.call(lambda c: c.stop())
    controller.start()
    controller.ended.result(10)
    assert found[0].split(".")[0] == event_loop


def test_a_call_after_the_end_is_answered_at_once() -> None:
    controller = hosted()
    controller.call(lambda c: c.stop("over"))
    controller.start()
    controller.ended.result(10)
    assert controller.call(lambda c: c.statistics().stop_reason).result(0) == "over"


def test_a_call_to_a_controller_that_never_opened_is_cancelled() -> None:
    @asynccontextmanager
    async def broken() -> AsyncIterator[Any]:
        raise OSError("no store")
        yield

    controller = HostedController(broken)
    early = controller.call(lambda c: c.stop())
    controller.start()
    with pytest.raises(ControllerFailed, match="OSError: no store"):
        controller.ended.result(10)
    assert early.cancelled()
    assert controller.call(lambda c: c.stop()).cancelled()


def test_an_error_in_a_call_goes_to_the_caller_alone() -> None:
    controller = hosted()
    controller.start()

    def bad(_: Any) -> None:
        raise ValueError("not mine")

    with pytest.raises(ValueError, match="not mine"):
        controller.call(bad).result(10)
    controller.call(lambda c: c.stop())
    assert controller.ended.result(10).reason == "stopped"


@pytest.mark.parametrize("event_loop", LOOPS)
def test_a_thread_that_hangs_does_not_outlast_its_deadline(event_loop: EventLoop) -> None:
    release = threading.Event()

    async def run() -> None:
        with anyio.fail_after(0.05):
            await in_abandonable_thread(release.wait, 60)

    controller = hosted(run, event_loop)
    controller.start()
    try:
        with pytest.raises(ControllerFailed, match="TimeoutError"):
            controller.ended.result(10)
    finally:
        release.set()


# what a failure says -------------------------------------------------------------------


def test_a_failure_survives_pickling() -> None:
    failure = ControllerFailed("ValueError", "odd", "Traceback…", False, True)
    copy = pickle.loads(pickle.dumps(failure))
    assert str(copy) == "ValueError: odd"
    assert (copy.traceback_text, copy.cancelled, copy.may_still_write) == (
        "Traceback…",
        False,
        True,
    )


def test_a_late_call_is_found_behind_the_error_that_it_caused() -> None:
    late = SaveError("publishing failed")
    late.__cause__ = CallTimeout("publishing a bundle", 5)
    failure = ControllerFailed.of(ExceptionGroup("run", [ValueError("first"), late]))
    assert failure.type_name == "ValueError"
    assert failure.may_still_write
    assert not ControllerFailed.of(ValueError("only")).may_still_write


def test_an_error_that_cannot_be_printed_still_has_a_name() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    failure = ControllerFailed.of(Mute())
    assert failure.type_name == "Mute"
    assert "RuntimeError" in failure.message


# in Ray --------------------------------------------------------------------------------


@pytest.fixture
def start(local_ray: None) -> Iterator[Callable[..., Any]]:
    actors: list[Any] = []

    def start_actor(args: Any, **options: Any) -> Any:
        actor = ray.remote(SingleControllerActor).options(num_cpus=1, **options).remote(args)
        actors.append(actor)
        return actor

    yield start_actor
    for actor in actors:
        ray.kill(actor)


def failing(kind: str) -> Any:
    """What each controller of H24 does, made here so that it pickles by value."""

    async def run() -> None:
        async def fail(error: BaseException) -> None:
            raise error

        class HoldsALock(Exception):
            def __init__(self) -> None:
                super().__init__("holds a lock")
                self.lock = threading.Lock()

        class WantsFive(Exception):
            def __init__(self, a: int, b: int, c: int, d: int, e: int) -> None:
                super().__init__(f"{a}{b}{c}{d}{e}")

        if kind == "group":
            async with anyio.create_task_group() as tg:
                tg.start_soon(fail, ValueError("in a group"))
        if kind == "keyboard":
            raise BaseExceptionGroup("both", [KeyboardInterrupt(), ValueError("beside it")])
        if kind == "lock":
            raise HoldsALock
        if kind == "five":
            raise WantsFive(1, 2, 3, 4, 5)
        if kind == "both":
            async with anyio.create_task_group() as pumps:
                pumps.start_soon(fail, ValueError("rollout pump"))
                pumps.start_soon(fail, KeyError("train pump"))
        if kind == "cancelled":
            import asyncio

            raise asyncio.CancelledError

    return run


@pytest.mark.parametrize(
    ("kind", "type_name", "message"),
    [
        ("group", "ValueError", "in a group"),
        ("keyboard", "ValueError", "beside it"),
        ("lock", "HoldsALock", "holds a lock"),
        ("five", "WantsFive", "12345"),
        ("both", "ValueError", "rollout pump"),
        ("cancelled", "CancelledError", ""),
    ],
    ids=["a", "b", "d", "e", "f", "c"],
)
def test_h24_the_caller_gets_one_plain_error_with_the_root_cause(
    start: Callable[[Any], Any], kind: str, type_name: str, message: str
) -> None:
    actor = start(make_args(failing(kind)))
    with pytest.raises(ControllerFailed) as caught:
        ray.get(actor.run.remote(), timeout=60)
    failure = caught.value.cause if isinstance(caught.value, RayTaskError) else caught.value
    assert (failure.type_name, failure.message) == (type_name, message)
    assert failure.cancelled == (kind == "cancelled")
    assert "in run" in failure.traceback_text
    assert type_name in failure.traceback_text
    assert ray.get(actor.status.remote(), timeout=60)["state"] == "ended"


@pytest.mark.parametrize("event_loop", LOOPS)
def test_steering_a_run(start: Callable[[Any], Any], event_loop: EventLoop) -> None:
    actor = start(make_args(event_loop=event_loop))
    run = actor.run.remote()
    assert ray.get(actor.ping.remote(), timeout=60) > 0
    ray.get(actor.request_checkpoint.remote(), timeout=60)
    status = until_running(actor)
    assert (status["state"], status["step"], status["audit"]) == ("running", 1, "ok")
    ray.get(actor.stop.remote("enough"), timeout=60)
    assert ray.get(run, timeout=60) == RunResult(
        reason="stopped", step=1, weight_version=0, counters={}
    )
    assert ray.get(actor.status.remote(), timeout=60)["stop_reason"] == "enough"


def until_running(actor: Any) -> dict[str, Any]:
    """An answer of the controller itself, once it is there."""
    for _ in range(200):
        status: dict[str, Any] = ray.get(actor.status.remote(), timeout=60)
        if status["state"] != "starting" and status["age_s"] == 0:
            return status
        time.sleep(0.05)
    raise AssertionError("the controller never came up")


def test_ray_cancel_stops_the_controller_first(start: Callable[[Any], Any]) -> None:
    actor = start(make_args())
    run = actor.run.remote()
    until_running(actor)
    ray.cancel(run)
    with pytest.raises(TaskCancelledError):
        ray.get(run, timeout=60)
    for _ in range(200):
        status = ray.get(actor.status.remote(), timeout=60)
        if status["state"] == "ended":
            break
        time.sleep(0.05)
    assert (status["state"], status["stop_reason"]) == ("ended", "cancelled")


def test_a_busy_controller_still_answers(start: Callable[[Any], Any]) -> None:
    actor = start(make_args(blocks_in_saves=True))
    run = actor.run.remote()
    until_running(actor)
    ray.get(actor.request_checkpoint.remote(), timeout=60)
    status = ray.get(actor.status.remote(), timeout=60)
    assert status["age_s"] > 0
    assert (status["state"], status["audit"], status["step"]) == ("running", "ok", 0)
    assert ray.get(actor.ping.remote(), timeout=60) > 0
    assert not ray.wait([run], timeout=0)[0]
    ray.get(actor.stop.remote(), timeout=60)
    assert ray.get(run, timeout=60).step == 1


def test_status_says_what_the_audit_found(start: Callable[[Any], Any]) -> None:
    actor = start(make_args(audit=Conservation("ordinal 7 is in two states")))
    actor.run.remote()
    assert until_running(actor)["audit"] == "ordinal 7 is in two states"


def test_a_call_that_may_still_write_ends_the_process(start: Callable[[Any], Any]) -> None:
    async def late() -> None:
        raise CallTimeout("data_plane.save_checkpoint", 5)

    actor = start(make_args(late))
    with pytest.raises(ControllerFailed, match="data_plane.save_checkpoint did not return"):
        ray.get(actor.run.remote(), timeout=60)
    with pytest.raises(RayActorError):
        for _ in range(200):
            ray.get(actor.ping.remote(), timeout=60)
            time.sleep(0.05)


def test_a_second_run_joins_the_first(start: Callable[[Any], Any]) -> None:
    actor = start(make_args())
    runs = [actor.run.remote(), actor.run.remote()]
    until_running(actor)
    ray.get(actor.stop.remote("enough", checkpoint=False), timeout=60)
    first, second = ray.get(runs, timeout=60)
    assert (first, second.reason) == (second, "stopped")
    assert until_running(actor)["stop_reason"] == "enough, without a bundle"


def test_a_process_that_ray_restarted_refuses_to_go_on(start: Callable[..., Any]) -> None:
    """Also in answer to the `run` under way, which Ray sends again."""
    actor = start(make_args(), max_restarts=1, max_task_retries=1)
    run = actor.run.remote()
    until_running(actor)
    os.kill(ray.get(actor.ping.remote(), timeout=60), signal.SIGKILL)
    for refused in (run, actor.request_checkpoint.remote(), actor.stop.remote()):
        with pytest.raises(ControllerFailed, match="start a new actor") as caught:
            ray.get(refused, timeout=60)
        assert caught.value.type_name == "ControllerRestarted"
    assert ray.get(actor.status.remote(), timeout=60) == {"state": "restarted", "age_s": 0.0}


def test_a_killed_actor_is_dead_to_every_caller(start: Callable[..., Any]) -> None:
    actor = start(make_args())
    run = actor.run.remote()
    until_running(actor)
    ray.kill(actor)
    for call in (run, actor.status.remote()):
        with pytest.raises(RayActorError):
            ray.get(call, timeout=60)


def test_status_tells_what_the_log_warns_of(start: Callable[..., Any]) -> None:
    async def warn() -> None:
        for number in range(7):
            logging.getLogger("sc_ray.somewhere").warning("engine %d went away", number)

    actor = start(make_args(warn))
    actor.run.remote()
    status = until_running(actor)
    assert status["warnings"] == 7
    assert status["last_warnings"] == [f"engine {number} went away" for number in range(2, 7)]
