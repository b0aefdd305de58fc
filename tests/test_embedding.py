"""`open_run`: in the only order that works, and closed again however it ends."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from sc_core import (
    BundleStore,
    ConfigChanged,
    ConfigError,
    ControllerConfig,
    DataPlane,
    PromptList,
    ReadyStore,
    RestoreOrderError,
    RunInUse,
    Runner,
    Sample,
    SingleController,
    audit_run,
    candidates,
    decode,
    in_thread,
    inline,
    open_run,
)
from sc_core.records import Prompt
from sc_core.spans import read_spans
from sc_core.testing import (
    MeanBaseline,
    MemoryBootstrap,
    MemoryDataPlane,
    MemoryStore,
    MemoryTrainer,
)

pytestmark = pytest.mark.anyio
STEPS = 6


class Store(MemoryBootstrap):
    async def connect(self, ready: ReadyStore) -> DataPlane:
        return MemoryDataPlane(self.store)


class Life:
    """What a process brings. It generates with the trainer's own weights."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.store = Store(MemoryStore())
        self.trainer = MemoryTrainer(MemoryDataPlane(self.store.store))

    async def rollout(self, prompt: Prompt, sibling: int, weight_version: int) -> Sample:
        await anyio.sleep(0.01 * (1 + (prompt.ordinal + sibling) % 3))
        reward = float((prompt.ordinal + sibling) % 4)
        return Sample(fields={"tokens": [prompt.ordinal, sibling], "reward": reward}, reward=reward)

    def open(
        self, runner: Runner = inline, ports: Mapping[str, Any] = {}, **settings: Any
    ) -> AbstractAsyncContextManager[SingleController]:
        config = decode(
            {
                "grpo": {
                    "num_prompts_per_step": 2,
                    "num_generations_per_prompt": 2,
                    "max_num_steps": STEPS,
                },
                "checkpointing": {"save_period": 2},
                **settings,
            },
            ControllerConfig,
        )
        return open_run(
            self.run_dir,
            config,
            store=self.store,
            worker=self,
            trainer=self.trainer,
            runner=runner,
            clock=anyio.current_time,
            **{"source": PromptList(range(100)), **ports},
        )


def is_free(run_dir: Path) -> bool:
    other = BundleStore(run_dir / "checkpoints")
    try:
        other.open()
    except RunInUse:
        return False
    other.close()
    return True


async def test_a_run_is_stopped_resumed_and_audited_by_its_directory(tmp_path: Path) -> None:
    run_dir = tmp_path / "deep" / "run"
    async with Life(run_dir).open() as controller:
        controller.stop("half way")
        assert (await controller.run()).reason == "stopped"
        assert not is_free(run_dir)
    assert is_free(run_dir)
    life = Life(run_dir)
    async with life.open() as controller:
        assert (await controller.run()).step == STEPS
    assert len(life.trainer.trained) == STEPS
    report = audit_run(run_dir)
    assert report.ok, report.violations
    assert (run_dir / "metrics.jsonl").read_text().count("\n") == STEPS
    assert len({span.incarnation for span in read_spans(run_dir / "spans.jsonl")}) == 2
    assert [path.name for path in candidates(run_dir / "checkpoints")][0] == f"step_{STEPS}"


async def test_without_checkpoints_it_still_has_one_writer(tmp_path: Path) -> None:
    async with Life(tmp_path).open(checkpointing={"enabled": False}) as controller:
        assert not is_free(tmp_path)
        await controller.run()
    assert candidates(tmp_path / "checkpoints") == []


async def test_a_directory_in_use_is_refused_and_stays_its_owners(tmp_path: Path) -> None:
    async with Life(tmp_path).open() as controller:
        with pytest.raises(RunInUse):
            async with Life(tmp_path).open():
                raise AssertionError
        assert not is_free(tmp_path)
        await controller.run()


async def test_settings_that_never_fill_a_step_open_nothing(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with pytest.raises(ConfigError, match="max_buffered_rollouts"):
        async with Life(run_dir).open(async_rl={"max_buffered_rollouts": 1}):
            raise AssertionError
    assert not run_dir.exists()


async def test_an_estimator_that_compares_over_more_than_a_chunk_opens_nothing(
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run"
    ports = {"estimator": MeanBaseline(scope="chunk")}
    with pytest.raises(ConfigError, match="min_groups_for_streaming_train"):
        async with Life(run_dir).open(ports=ports, async_rl={"min_groups_for_streaming_train": 1}):
            raise AssertionError
    assert not run_dir.exists()


@pytest.mark.parametrize(
    "ports, why", [({"source": PromptList("abc")}, "fingerprint"), ({"resume": "never"}, "holds")]
)
async def test_what_a_run_can_not_go_on_with_is_refused(
    ports: dict[str, Any], why: str, tmp_path: Path
) -> None:
    await with_a_bundle(tmp_path)
    with pytest.raises(ConfigChanged, match=why):
        async with Life(tmp_path).open(ports=ports):
            raise AssertionError
    assert is_free(tmp_path)


async def test_a_run_that_ended_has_closed_its_files(tmp_path: Path) -> None:
    await with_a_bundle(tmp_path / "warm")  # what is opened once in a process
    before = descriptors()
    await with_a_bundle(tmp_path / "run")
    assert descriptors() == before


async def test_a_store_that_was_touched_is_refused_and_the_lock_given_back(tmp_path: Path) -> None:
    life = Life(tmp_path)
    await MemoryDataPlane(life.store.store).put_samples(["0.0_g0"], {"x": [1]})
    with pytest.raises(RestoreOrderError):
        async with life.open():
            raise AssertionError
    assert is_free(tmp_path)


async def test_an_error_of_the_body_passes_and_the_lock_is_given_back(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        async with Life(tmp_path).open():
            raise ZeroDivisionError
    assert is_free(tmp_path)


async def with_a_bundle(run_dir: Path) -> None:
    async with Life(run_dir).open() as controller:
        await controller.run()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_a_cancel_at_any_step_of_opening_leaves_nothing_open(tmp_path: Path) -> None:
    await with_a_bundle(tmp_path)
    steps, opened = 0, False
    before = descriptors()
    while not opened:

        async def opening() -> None:
            nonlocal opened
            async with Life(tmp_path).open():
                opened = True
                await anyio.sleep_forever()

        async with anyio.create_task_group() as tg:
            tg.start_soon(opening)
            for _ in range(steps):
                await anyio.lowlevel.checkpoint()
            tg.cancel_scope.cancel()
        assert is_free(tmp_path), f"after {steps} steps"
        assert descriptors() == before, f"after {steps} steps"
        steps += 1
    assert steps > 10
    await with_a_bundle(tmp_path)


def slowly(log: list[str]) -> Runner:
    """Threads that are under way for a moment, so that cancels meet them."""

    async def runner(work: Callable[..., Any], *args: Any) -> Any:
        def slow() -> Any:
            log.append("began")
            try:
                return work(*args)
            finally:
                log.append("ended")

        return await in_thread(slow)

    return runner


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("passes", range(0, 80, 3))
async def test_a_native_cancel_waits_for_the_thread_that_takes_the_lock(
    tmp_path: Path, passes: int, anyio_backend: str
) -> None:
    await with_a_bundle(tmp_path)
    log: list[str] = []

    async def opening() -> None:
        async with Life(tmp_path).open(runner=slowly(log)):
            await anyio.sleep_forever()

    task = asyncio.create_task(opening())
    for _ in range(passes):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert log.count("began") == log.count("ended")
    assert is_free(tmp_path)


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_a_signal_stops_a_run_with_a_bundle(tmp_path: Path, anyio_backend: str) -> None:
    async def stop_on_sigterm(controller: SingleController) -> None:
        with anyio.open_signal_receiver(signal.SIGTERM) as signals:
            os.kill(os.getpid(), signal.SIGTERM)
            async for number in signals:
                controller.stop(number.name)

    async with (
        Life(tmp_path).open(grpo={"max_num_steps": 10_000}) as controller,
        anyio.create_task_group() as tg,
    ):
        tg.start_soon(stop_on_sigterm, controller)
        result = await controller.run()
        tg.cancel_scope.cancel()
    assert (result.reason, result.stop_reason) == ("stopped", "SIGTERM")
    assert [path.name for path in candidates(tmp_path / "checkpoints")][0] == f"step_{result.step}"


async def test_plain_data_in_place_of_settings_is_refused_with_how_to_make_them(
    tmp_path: Path,
) -> None:
    life = Life(tmp_path / "run")
    plain: Any = {"grpo": {"max_num_steps": 1}}
    says = r"type dict, not a ControllerConfig; sc_core\.decode\(…, ControllerConfig\) makes one"
    ports: Any = {"store": life.store, "source": PromptList(range(9), seed=0)}
    with pytest.raises(ConfigError, match=says):
        async with open_run(life.run_dir, plain, worker=life, trainer=life.trainer, **ports):
            pass
    assert not life.run_dir.exists()
    nothing: Any = None
    with pytest.raises(ConfigError, match=says):
        SingleController(plain, nothing, nothing)
