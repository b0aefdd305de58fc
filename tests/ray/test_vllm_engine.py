"""What `VllmEngine` asks of vLLM and when, with a vLLM that does what a test tells it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sc_core.errors import RolloutError, WeightSyncError, WorkerDied
from sc_ray.generation import Request, vllm_engine
from sc_ray.generation.engine import GenerationSpec
from sc_ray.generation.vllm_engine import VllmEngine
from sc_ray.generation.vllm_start import Started
from sc_ray.memory import MemoryDirectory
from sc_ray.model import ModelConfig
from sc_ray.tasks import Task
from sc_ray.tasks.arithmetic import right_digit
from sc_ray.tokenizer import Tokenizer

TOKENIZER = Tokenizer.of_characters("0123456789,=")
SPEC = GenerationSpec(
    model=ModelConfig(),
    tokenizer=TOKENIZER,
    task=Task(name="t", prompts=(), reward=right_digit, max_new_tokens=4),
    run_id=f"test-{os.getpid()}",
    engine="vllm",
)
ASKED = Request(prompt_ids=[2], seed=1, max_new_tokens=2)


class Vllm:
    """An `AsyncLLM` with gates: a call that has one waits until it is opened."""

    def __init__(self) -> None:
        self.output_handler: asyncio.Task[None] | None = None
        self.calls: list[str] = []
        self.gates: dict[str, asyncio.Event] = {}
        self.fails: set[str] = set()
        self.paused = False
        self.version = 0
        self.weights = ""
        self.finish_reason = "stop"
        self.loading = False
        self.ended = False

    async def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.gates:
            await self.gates[name].wait()
        if name in self.fails:
            raise ValueError(f"no {name} today")

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        await self._call("pause")
        self.paused = True

    async def resume_generation(self) -> None:
        await self._call("resume")
        assert not self.loading, "it would generate by half of the weights"
        self.paused = False

    async def is_paused(self) -> bool:
        await self._call("is_paused")
        return self.paused

    async def collective_rpc(self, method: str, kwargs: dict[str, str]) -> None:
        assert self.paused, "requests are running"
        self.loading = True
        await self._call("load")
        self.weights = (Path(kwargs["weights_path"]) / "model.safetensors").read_text()
        self.loading = False

    async def reset_prefix_cache(self) -> None:
        await self._call("reset")

    async def update_weight_version(self, version: str) -> None:
        self.version = int(version)

    async def get_weight_version(self) -> str:
        return str(self.version)

    async def generate(self, prompt: Any, parameters: Any, number: str) -> AsyncIterator[Any]:
        if self.output_handler is None:
            self.output_handler = asyncio.create_task(asyncio.sleep(3600))
        assert not self.paused
        await self._call("generate")
        token = TOKENIZER.eos_id
        yield SimpleNamespace(
            outputs=[
                SimpleNamespace(
                    finish_reason=self.finish_reason,
                    token_ids=[token],
                    logprobs=[{token: SimpleNamespace(logprob=-0.5)}],
                    weight_versions=[SimpleNamespace(version=str(self.version))],
                )
            ]
        )

    def shutdown(self, timeout: float) -> None:
        self.ended = True


class Fake(Started, frozen=True, kw_only=True, eq=False):
    def translated(self, request: Request) -> tuple[Any, Any]:
        return request, None

    def check_file(self, path: Path) -> None:
        if not path.is_file():
            raise WeightSyncError(f"there are no weights at {path}")


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Vllm:
    llm = Vllm()

    def start(spec: GenerationSpec, memory: Path) -> Started:
        return Fake(
            llm=llm,
            dead_error=ConnectionError,
            room=99,
            eos_ids=TOKENIZER.eos_ids,
            tensors={},
            workers=1,
        )

    monkeypatch.setattr(vllm_engine, "start_vllm", start)
    return llm


@pytest.fixture
def engine(vllm: Vllm) -> Iterator[VllmEngine]:
    engine = VllmEngine(SPEC)
    yield engine
    engine.close()
    assert vllm.ended
    assert not list(Path("/dev/shm").glob(f"*{SPEC.run_id}*"))


@pytest.fixture
def file() -> Iterator[Path]:
    memory = MemoryDirectory(f"weights-{os.getpid()}")  # where a run has them
    path = memory.path / "weights"
    path.write_text("w1")
    yield path
    memory.close()


async def until(vllm: Vllm, call: str) -> None:
    while call not in vllm.calls:  # noqa: ASYNC110 - within a few turns of the loop
        await asyncio.sleep(0)


@pytest.mark.parametrize("paused", [True, False])
def test_an_engine_that_loads_is_alive_and_what_is_asked_of_it_waits(
    vllm: Vllm, engine: VllmEngine, file: Path, paused: bool
) -> None:
    """A probe, a later turn or a repeated pause may come in the midst of a load."""

    async def main() -> None:
        await engine.start()
        if paused:
            await engine.pause()
        vllm.gates["load"] = asyncio.Event()
        load = asyncio.create_task(engine.load(file, 1))
        await until(vllm, "load")
        await engine.check()
        asked = asyncio.create_task(engine.generate([ASKED]))
        await asyncio.sleep(0.01)
        assert not asked.done()
        vllm.gates["load"].set()
        assert await load == 1
        await engine.resume()
        assert [one.weight_version for one in await asked] == [1]

    asyncio.run(main())


def test_a_load_that_failed_in_its_midst_leaves_an_engine_that_says_so(
    vllm: Vllm, engine: VllmEngine, file: Path
) -> None:
    async def main() -> None:
        await engine.start()
        await engine.pause()
        vllm.fails.add("load")
        with pytest.raises(WeightSyncError, match="could not load version 1: no load today"):
            await engine.load(file, 1)
        for call in (engine.check(), engine.generate([ASKED]), engine.load(file, 1)):
            with pytest.raises(WorkerDied, match="did not finish to load version 1: no load today"):
                await call

    asyncio.run(main())


def test_a_cancelled_load_goes_on_and_nothing_runs_before_its_end(
    vllm: Vllm, engine: VllmEngine, file: Path
) -> None:
    async def main() -> None:
        await engine.start()
        vllm.gates["load"] = asyncio.Event()
        load = asyncio.create_task(engine.load(file, 1))
        await until(vllm, "load")
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
        asked = asyncio.create_task(engine.generate([ASKED]))
        again = asyncio.create_task(engine.load(file, 2))
        await asyncio.sleep(0.01)
        assert (vllm.calls.count("load"), asked.done()) == (1, False)
        vllm.gates["load"].set()
        assert await again == 2
        assert [one.weight_version for one in await asked] in ([1], [2])

    asyncio.run(main())


def test_a_file_that_goes_before_vllm_has_opened_it_is_there_nonetheless(
    vllm: Vllm, engine: VllmEngine, file: Path
) -> None:
    """Who joins late may still load, in a long pause, what the next sync has removed."""

    async def main() -> None:
        await engine.start()
        vllm.gates["pause"] = asyncio.Event()
        load = asyncio.create_task(engine.load(file, 1))
        await until(vllm, "pause")
        file.unlink()
        vllm.gates["pause"].set()
        assert await load == 1
        assert vllm.weights == "w1"
        with pytest.raises(WeightSyncError, match="no weights at"):
            await engine.load(file, 2)
        await engine.check()

    asyncio.run(main())


def test_a_pause_that_failed_in_a_load_holds_nobody(
    vllm: Vllm, engine: VllmEngine, file: Path
) -> None:
    async def main() -> None:
        await engine.start()
        vllm.fails.add("pause")
        with pytest.raises(ValueError, match="no pause today"):
            await engine.load(file, 1)
        (got,) = await engine.generate([ASKED])
        assert got.weight_version == -1

    asyncio.run(main())


def test_a_request_that_vllm_gave_up_is_no_sample(vllm: Vllm, engine: VllmEngine) -> None:
    async def main() -> None:
        await engine.start()
        vllm.finish_reason = "error"
        with pytest.raises(RolloutError, match="given up"):
            await engine.generate([ASKED])

    asyncio.run(main())


def test_what_a_dead_engine_left_in_memory_goes_when_another_takes_its_place(vllm: Vllm) -> None:
    left = Path(f"/dev/shm/single-controller.{SPEC.run_id}.dead")
    left.mkdir()
    VllmEngine(SPEC).close()
    assert not left.exists()


def test_a_cancel_in_the_midst_of_a_pause_leaves_one_that_can_be_repeated(
    vllm: Vllm, engine: VllmEngine, file: Path
) -> None:
    async def main() -> None:
        await engine.start()
        vllm.gates["pause"] = asyncio.Event()
        pause = asyncio.create_task(engine.pause())
        await until(vllm, "pause")
        held = [asyncio.create_task(engine.generate([ASKED])) for _ in range(2)]
        pause.cancel()
        held[0].cancel()
        await asyncio.sleep(0.01)
        assert [one.done() for one in held] == [True, False]
        vllm.gates["pause"].set()
        await engine.pause()
        await engine.load(file, 1)
        await engine.resume()
        assert (await held[1])[0].weight_version == 1

    asyncio.run(main())


def test_a_close_in_the_midst_of_a_start_waits_for_it_and_ends_it(
    vllm: Vllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    started: Any = vllm_engine.start_vllm

    def slow(spec: GenerationSpec, memory: Path) -> Started:
        go.wait()
        found: Started = started(spec, memory)
        return found

    monkeypatch.setattr(vllm_engine, "start_vllm", slow)
    engine = VllmEngine(SPEC)

    async def main() -> None:
        asked = asyncio.create_task(engine.generate([ASKED]))
        await engine.check()  # it says nothing yet, and at once
        closing = asyncio.create_task(asyncio.to_thread(engine.close))
        await asyncio.sleep(0.01)
        assert not closing.done()
        go.set()
        await closing
        assert vllm.ended
        asked.cancel()
        with pytest.raises(WorkerDied, match="it was closed"):
            await engine.start()

    asyncio.run(main())
