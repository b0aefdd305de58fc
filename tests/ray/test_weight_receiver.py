"""An engine's part in a broadcast: what vLLM is asked, and what half an update means."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sc_core.errors import WeightSyncError, WorkerDied
from sc_ray.generation import Request
from sc_ray.generation.engine import GenerationSpec, VllmConfig
from sc_ray.generation.vllm_engine import VllmEngine
from sc_ray.generation.vllm_start import _arguments
from sc_ray.generation.worker import GenerationWorker
from sc_ray.model import ModelConfig
from sc_ray.tasks import Task
from sc_ray.tasks.arithmetic import right_digit
from sc_ray.tokenizer import Tokenizer

pytestmark = pytest.mark.anyio
HALF = "it did not get all of the weights that were broadcast to it"


@pytest.fixture
def anyio_backend() -> str:
    """That of vLLM."""
    return "asyncio"


class Llm:
    """vLLM's `AsyncLLM`, as far as it is asked things here."""

    output_handler = None

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.version = "default"
        self.fails: set[str] = set()

    async def generate(self, *_: Any) -> AsyncIterator[Any]:
        span = SimpleNamespace(version=self.version)
        output = SimpleNamespace(
            token_ids=[1],
            logprobs=[{1: SimpleNamespace(logprob=-1.0)}],
            weight_versions=[span],
            finish_reason="stop",
        )
        yield SimpleNamespace(outputs=[output])

    async def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        self.asked.append(f"{method} {kwargs}" if kwargs else method)
        if method in self.fails:
            raise RuntimeError(f"{method} failed")

    async def pause_generation(self, **_: Any) -> None:
        self.asked.append("pause")

    async def resume_generation(self) -> None:
        self.asked.append("resume")

    async def reset_prefix_cache(self) -> None:
        self.asked.append("reset_prefix_cache")

    async def update_weight_version(self, version: str) -> None:
        self.asked.append(f"version {version}")
        self.version = version

    async def get_weight_version(self) -> str:
        return self.version

    async def is_paused(self) -> bool:
        return True


def spec(engine: str = "vllm", **settings: Any) -> GenerationSpec:
    tokenizer = Tokenizer.of_characters("0123456789,=")
    return GenerationSpec(
        model=ModelConfig(),
        tokenizer=tokenizer,
        task=Task(name="larger_digit", prompts=(), reward=right_digit, max_new_tokens=4),
        engine=engine,
        **settings,
    )


@pytest.fixture
def llm() -> Llm:
    return Llm()


@pytest.fixture
async def engine(llm: Llm, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[VllmEngine]:
    started = SimpleNamespace(
        llm=llm,
        dead_error=EOFError,
        room=64,
        eos_ids=frozenset({1}),
        workers=4,
        translated=lambda request: (None, None),
        check_file=lambda path: None,
        end=lambda: None,
    )
    monkeypatch.setattr("sc_ray.generation.vllm_engine.start_vllm", lambda *_: started)
    made = VllmEngine(spec())
    await made.start()
    llm.asked.clear()
    yield made
    made.close()


async def test_an_update_is_confirmed_before_anything_is_generated(
    engine: VllmEngine, llm: Llm
) -> None:
    receiver = engine.receiver
    assert await receiver.workers() == 4
    await receiver.meet({"rank_offset": 3})
    await engine.pause()
    await receiver.begin()
    await receiver.receive({"names": ["x"]})
    await engine.check()
    assert await receiver.finish(7) == 7
    await engine.resume()
    assert llm.asked == [
        "shutdown_weight_transfer_engine",
        "init_weight_transfer_engine {'init_info': {'rank_offset': 3}}",
        "pause",
        "start_weight_update",
        "update_weights {'update_info': {'names': ['x']}}",
        "finish_weight_update",
        "reset_prefix_cache",
        "version 7",
        "resume",
    ]
    (got,) = await engine.generate([Request(prompt_ids=[2], seed=0, max_new_tokens=1)])
    assert got.weight_version == 7


async def test_an_engine_that_is_not_paused_takes_none_and_goes_on(
    engine: VllmEngine, llm: Llm
) -> None:
    with pytest.raises(WeightSyncError, match="it is not"):
        await engine.receiver.begin()
    assert llm.asked == []
    await engine.resume()
    await engine.check()


@pytest.mark.parametrize("fails", ["update_weights", "finish_weight_update", ""])
@pytest.mark.parametrize("then", ["resume", "begin", "meet", "load"])
async def test_half_an_update_is_the_end_of_an_engine(
    engine: VllmEngine, llm: Llm, tmp_path: Path, fails: str, then: str
) -> None:
    llm.fails = {fails}
    await engine.pause()
    await engine.receiver.begin()
    if fails == "update_weights":
        with pytest.raises(RuntimeError, match="update_weights failed"):
            await engine.receiver.receive({})
    elif fails:
        await engine.receiver.receive({})
        with pytest.raises(RuntimeError, match="finish_weight_update failed"):
            await engine.receiver.finish(7)
    llm.asked.clear()
    call = {
        "resume": lambda: engine.resume(),
        "begin": lambda: engine.receiver.begin(),
        "meet": lambda: engine.receiver.meet({}),
        "load": lambda: engine.load(tmp_path / "w", 7),
    }[then]
    for again in (call, engine.check, engine.pause):
        with pytest.raises(WorkerDied, match=HALF):
            await again()
    assert llm.asked == []


async def test_an_engine_that_is_asked_while_a_file_is_loaded_lives(
    engine: VllmEngine, llm: Llm, tmp_path: Path
) -> None:
    async def reload(method: str, kwargs: dict[str, Any]) -> None:
        await engine.check()

    llm.collective_rpc = reload  # type: ignore[method-assign]
    assert await engine.load(tmp_path / "w", 7) == 7

    async def fail(method: str, kwargs: dict[str, Any]) -> None:
        raise OSError("disk")

    llm.collective_rpc = fail  # type: ignore[method-assign]
    with pytest.raises(WorkerDied, match="did not finish to load version 8"):
        await engine.load(tmp_path / "w", 8)
    with pytest.raises(WorkerDied, match="did not finish to load version 8"):
        await engine.check()


async def test_an_engine_that_takes_files_only_says_so() -> None:
    worker = GenerationWorker(spec("torch"))
    for call in (
        worker.transfer_workers(),
        worker.meet_trainer({}),
        worker.begin_update(),
        worker.receive_weights({}),
        worker.finish_update(1),
    ):
        with pytest.raises(WeightSyncError, match="torch can't take weights by broadcast"):
            await call


def test_vllm_is_told_of_it_and_a_setting_of_its_own_wins() -> None:
    def config(**settings: Any) -> Any:
        told = _arguments(spec(**settings), Path("model"), has_gpu=True)
        return told.get("weight_transfer_config")

    assert config() is None
    assert config(weight_transfer="nccl") == {"backend": "nccl"}
    other = VllmConfig(engine_args={"weight_transfer_config": {"backend": "store"}})
    assert config(weight_transfer="nccl", vllm=other) == {"backend": "store"}
