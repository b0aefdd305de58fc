"""The generating process: batching, pauses, rewards; and the port that spreads siblings over it."""

from __future__ import annotations

import asyncio
import functools
import re
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
import ray
import torch
from anyio.lowlevel import checkpoint
from ray.exceptions import ActorDiedError, TaskCancelledError

from sc_core.errors import ConfigError, DataFailure, RolloutError, WeightSyncError, WorkerDied
from sc_core.records import Prompt, Sample, group_id
from sc_ray.bridge import await_ref
from sc_ray.generation import Completion, Request, request_seed, rollout_row
from sc_ray.generation.batching import BatchingEngine
from sc_ray.generation.engine import GenerationSpec
from sc_ray.generation.port import RayEngine, RayRollouts
from sc_ray.generation.torch_engine import TorchEngine
from sc_ray.generation.worker import (
    GenerationActor,
    GenerationWorker,
    Rollouts,
)
from sc_ray.model import ModelConfig, build_model, save_weights
from sc_ray.parcels import Parcels
from sc_ray.tasks import Task
from sc_ray.tasks.arithmetic import right_digit
from sc_ray.tokenizer import Tokenizer
from sc_ray.trainer.policy import Policy
from sc_ray.weights import FileWeightSync

pytestmark = pytest.mark.anyio

TOKENIZER = Tokenizer.of_characters("0123456789,=")
MODEL = ModelConfig(hidden_size=32, intermediate_size=64, num_attention_heads=2)
RUN_SEED = 11


def spec(reward: Any = right_digit) -> GenerationSpec:
    task = Task(name="larger_digit", prompts=(), reward=reward, max_new_tokens=4)
    return GenerationSpec(
        model=MODEL, tokenizer=TOKENIZER, task=task, run_seed=RUN_SEED, batch_invariant=True
    )


def prompt_of(ordinal: int, text: str | None = None) -> Prompt:
    left, right = ordinal % 10, ordinal * 3 % 10
    payload = {"prompt": text or f"{left},{right}=", "answer": str(max(left, right))}
    return Prompt(ordinal=ordinal, group_id=group_id(ordinal, 0), payload=payload)


def same(left: Sample, right: Sample) -> bool:
    return (left.reward, left.tokens, left.end_weight_version) == (
        right.reward,
        right.tokens,
        right.end_weight_version,
    ) and all(torch.equal(left.fields[name], right.fields[name]) for name in left.fields)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "first.safetensors"
    save_weights(build_model(MODEL, TOKENIZER, seed=1), path)
    return path


async def gather(*calls: Callable[[], Awaitable[Any]]) -> list[Any]:
    """The results of calls made in the same tick."""
    results: dict[int, Any] = {}

    async def one(number: int, call: Callable[[], Awaitable[Any]]) -> None:
        results[number] = await call()

    async with anyio.create_task_group() as tg:
        for number, call in enumerate(calls):
            tg.start_soon(one, number, call)
    return [results[number] for number in range(len(calls))]


# the engine's queue ---------------------------------------------------------------------


class GatedEngine:
    """Stands in for a `TorchEngine`: each batch waits for a permit; all is written down."""

    def __init__(self) -> None:
        self.weight_version = 0
        self.log: list[Any] = []
        self.began = threading.Semaphore(0)
        self.permits = threading.Semaphore(0)

    def generate_batch(self, requests: Sequence[Request]) -> list[Completion]:
        self.log.append([request.seed for request in requests])
        self.began.release()
        self.permits.acquire()
        if any(len(request.prompt_ids) == 0 for request in requests):
            raise DataFailure("a prompt needs at least one token")
        return [
            Completion(
                token_ids=[request.seed],
                logprobs=[0.0],
                text="",
                finish_reason="length",
                weight_version=self.weight_version,
            )
            for request in requests
        ]

    def load(self, path: Path, version: int) -> None:
        self.log.append(f"load {version}")
        self.weight_version = version


@pytest.fixture
def engine() -> Iterator[GatedEngine]:
    engine = GatedEngine()
    yield engine
    engine.permits.release(100)  # a test that failed leaves no thread behind


def requests(*seeds: int, prompt_ids: Any = (1,)) -> list[Request]:
    return [Request(prompt_ids=prompt_ids, seed=seed, max_new_tokens=1) for seed in seeds]


async def began(engine: GatedEngine) -> None:
    await anyio.to_thread.run_sync(engine.began.acquire)


def seeds_of(completions: Sequence[Completion]) -> list[int]:
    return [completion.token_ids[0] for completion in completions]


async def test_calls_that_come_while_the_engine_is_busy_run_together(engine: GatedEngine) -> None:
    batching = BatchingEngine(engine, max_batch_rows=4)
    results: dict[int, list[int]] = {}

    async def call(*seeds: int) -> None:
        results[seeds[0]] = seeds_of(await batching.generate(requests(*seeds)))

    async with anyio.create_task_group() as tg:
        tg.start_soon(call, 1)
        await began(engine)
        for seeds in ((20, 21), (30, 31), (40,)):
            tg.start_soon(call, *seeds)
            await checkpoint()
        await anyio.wait_all_tasks_blocked()
        engine.permits.release(3)
    first, second, third = engine.log
    assert (first, len(second), len(third)) == ([1], 4, 1), "no batch of more than 4 rows"
    assert sorted(second + third) == [20, 21, 30, 31, 40]
    assert results == {1: [1], 20: [20, 21], 30: [30, 31], 40: [40]}


async def test_a_pause_waits_for_the_batch_and_holds_what_comes_until_the_resume(
    engine: GatedEngine,
) -> None:
    batching = BatchingEngine(engine, max_batch_rows=64)
    paused = anyio.Event()

    async def pause() -> None:
        await batching.pause()
        paused.set()

    async with anyio.create_task_group() as tg:
        tg.start_soon(batching.generate, requests(1))
        await began(engine)
        tg.start_soon(pause)
        await anyio.wait_all_tasks_blocked()
        assert not paused.is_set()
        engine.permits.release()
        await paused.wait()
        tg.start_soon(batching.generate, requests(2))
        await anyio.wait_all_tasks_blocked()
        assert await batching.load(Path(__file__), 7) == 7  # whatever was to run has run
        assert engine.log == [[1], "load 7"]
        engine.permits.release()
        await batching.resume()
        await batching.resume()
    assert engine.log == [[1], "load 7", [2]]


async def test_a_cancelled_call_is_never_generated(engine: GatedEngine) -> None:
    batching = BatchingEngine(engine, max_batch_rows=64)
    await batching.pause()
    async with anyio.create_task_group() as tg:
        tg.start_soon(batching.generate, requests(1))
        await anyio.wait_all_tasks_blocked()
        tg.cancel_scope.cancel()
    engine.permits.release()
    async with anyio.create_task_group() as tg:
        tg.start_soon(batching.generate, requests(2))
        await anyio.wait_all_tasks_blocked()
        await batching.resume()
    assert engine.log == [[2]]


async def test_a_prompt_at_fault_spoils_no_other(engine: GatedEngine) -> None:
    engine.permits.release(10)
    batching = BatchingEngine(engine, max_batch_rows=64)
    await batching.pause()
    results: list[list[int]] = []

    async def good(seed: int) -> None:
        results.append(seeds_of(await batching.generate(requests(seed))))

    async def bad() -> None:
        with pytest.raises(DataFailure, match="at least one token"):
            await batching.generate(requests(2, prompt_ids=()))

    async with anyio.create_task_group() as tg:
        tg.start_soon(good, 1)
        tg.start_soon(bad)
        tg.start_soon(good, 3)
        await anyio.wait_all_tasks_blocked()
        await batching.resume()
    assert sorted(results) == [[1], [3]]


async def test_an_engine_that_breaks_tells_every_caller(engine: GatedEngine) -> None:
    batching = BatchingEngine(engine, max_batch_rows=64)
    engine.permits.release()
    with pytest.raises(TypeError, match="NoneType"):
        await batching.generate(requests(1, prompt_ids=None))
    engine.permits.release()
    assert seeds_of(await batching.generate(requests(2))) == [2], "it goes on"


async def test_weights_that_are_not_there_are_refused_before_anything_is_touched(
    engine: GatedEngine, tmp_path: Path
) -> None:
    batching = BatchingEngine(engine, max_batch_rows=64)
    with pytest.raises(WeightSyncError, match=r"no weights at .*/gone"):
        await batching.load(tmp_path / "gone", 3)
    assert engine.log == []


# the worker -----------------------------------------------------------------------------


def crashes(prompt: str, completion: str, answer: str) -> float:
    raise ZeroDivisionError("by nought")


@pytest.fixture(scope="module")
def worker_without_weights() -> GenerationWorker:
    return GenerationWorker(spec())


@pytest.fixture(scope="module")
def shared_worker() -> GenerationWorker:
    return GenerationWorker(spec())


@pytest.fixture
async def worker(shared_worker: GenerationWorker, weights: Path) -> GenerationWorker:
    await shared_worker.load_weights(weights, 1)
    return shared_worker


async def test_a_worker_returns_what_its_engine_makes_and_the_reward_of_its_text(
    worker: GenerationWorker,
) -> None:
    rollouts = await worker.rollouts(prompt_of(3), [2, 0], 1)
    engine = TorchEngine(build_model(MODEL, TOKENIZER, seed=1), TOKENIZER, batch_invariant=True)
    prompt_ids = TOKENIZER.encode("3,9=")
    assert rollouts.prompt_ids == prompt_ids
    for sibling, made, reward in zip([2, 0], rollouts.completions, rollouts.rewards, strict=True):
        expected = engine.generate(prompt_ids, request_seed(RUN_SEED, 3, sibling, 1), 4)
        found = (list(made.token_ids), list(made.logprobs))
        assert found == (expected.token_ids, expected.logprobs)
        assert made.weight_version == 1
        assert reward == right_digit("3,9=", made.text, "9")


async def test_the_last_siblings_can_be_looked_at(worker: GenerationWorker) -> None:
    rollouts = await worker.rollouts(prompt_of(3), range(70), 1)
    shown = await worker.examples(5)
    assert [e.completion for e in shown] == [c.text for c in rollouts.completions[-5:]]
    assert [e.reward for e in shown] == rollouts.rewards[-5:]
    assert {(e.prompt, e.weight_version) for e in shown} == {("3,9=", 1)}
    assert len(await worker.examples(1000)) == 64
    assert await worker.examples(0) == []


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        ({"prompt": "3?9=", "answer": "9"}, r"no token for '\?' in '3\?9='"),
        ({"prompt": "1" * 300, "answer": "9"}, "exceed the model's 256 positions"),
        ({"prompt": "", "answer": "9"}, "at least one token"),
        ({"prompt": "3,9="}, "prompt 3 has no text under the key 'answer'"),
        ("3,9=", "prompt 3 is a str, not an object"),
    ],
)
async def test_a_prompt_at_fault_is_a_data_failure(
    worker: GenerationWorker, payload: Any, says: str
) -> None:
    with pytest.raises(DataFailure, match=says):
        await worker.rollouts(
            Prompt(ordinal=3, group_id=group_id(3, 0), payload=payload), range(2), 1
        )


@pytest.mark.parametrize(
    ("reward", "name"),
    [
        (crashes, r"test_generation_worker:crashes"),
        (functools.partial(crashes), r"functools.partial\(<function crashes"),
    ],
)
async def test_a_reward_function_that_raises_is_named_with_the_prompt(
    weights: Path, reward: Any, name: str
) -> None:
    worker = GenerationWorker(spec(reward))
    await worker.load_weights(weights, 1)
    with pytest.raises(DataFailure) as caught:
        await worker.rollouts(prompt_of(3), [0], 1)
    says = str(caught.value)
    assert "ZeroDivisionError: by nought" in says
    assert "failed on prompt '3,9=' and completion" in says
    assert re.search(f"reward function {name}", says)


async def test_nothing_is_served_by_weights_older_than_the_stamp(
    worker: GenerationWorker, worker_without_weights: GenerationWorker
) -> None:
    with pytest.raises(
        RolloutError, match="version 2 was asked for, and this engine has version 1"
    ):
        await worker.rollouts(prompt_of(3), [0], 2)
    with pytest.raises(RolloutError, match="version 0 was asked for, and this engine has none"):
        await worker_without_weights.rollouts(prompt_of(3), [0], 0)
    assert (await worker.rollouts(prompt_of(3), [0], 0)).completions[0].weight_version == 1


# the port, over processes ---------------------------------------------------------------


class Recorded(RayEngine):
    """Remembers its calls: ordinal, siblings, and the reference to the answer."""

    def __init__(self, actor: Any, *, name: str, parcels: Parcels | None = None) -> None:
        super().__init__(actor, name=name, parcels=parcels)
        self.calls: list[tuple[int, tuple[int, ...]]] = []
        self.refs: list[Any] = []

    def send(self, prompt: Prompt, siblings: Sequence[int], weight_version: int) -> Any:
        ref = super().send(prompt, siblings, weight_version)
        self.calls.append((prompt.ordinal, tuple(siblings)))
        self.refs.append(ref)
        return ref


@pytest.fixture(scope="module")
def actors(local_ray: None) -> Iterator[dict[str, Any]]:
    names = ("generation-0", "generation-1")
    actors = {name: GenerationActor.remote(spec(), name) for name in names}
    yield actors
    for actor in actors.values():
        ray.kill(actor)


@pytest.fixture
async def engines(actors: dict[str, Any], weights: Path) -> list[Recorded]:
    engines = [Recorded(actor, name=name) for name, actor in actors.items()]
    for engine in engines:
        await engine.load_weights(weights, 1)
    return engines


async def test_a_sample_is_the_same_alone_among_others_and_on_another_worker(
    engines: list[Recorded],
) -> None:
    one, other = (RayRollouts([engine]) for engine in engines)
    alone = await one.rollout(prompt_of(3), 1, 1)
    crowd = await gather(
        *(functools.partial(one.rollout, prompt_of(o), s, 1) for o in range(8) for s in range(4))
    )
    assert same(alone, crowd[3 * 4 + 1])
    assert same(alone, await other.rollout(prompt_of(3), 1, 1))
    assert not same(alone, crowd[3 * 4 + 2])


async def test_a_sample_has_the_columns_that_a_trainer_reads(engines: list[Recorded]) -> None:
    sample = await RayRollouts(engines).rollout(prompt_of(3), 1, 1)
    engine = TorchEngine(build_model(MODEL, TOKENIZER, seed=1), TOKENIZER, batch_invariant=True)
    prompt_ids = TOKENIZER.encode("3,9=")
    made = engine.generate(prompt_ids, request_seed(RUN_SEED, 3, 1, 1), 4)
    reward = right_digit("3,9=", made.text, "9")
    fields = rollout_row(prompt_ids, made, reward=reward)
    expected = Sample(
        fields=fields, reward=reward, tokens=len(made.token_ids), end_weight_version=1
    )
    assert sample.fields.keys() == fields.keys()
    assert same(sample, expected)


async def test_a_sibling_that_was_cut_off_is_masked_if_that_is_asked_for(
    engines: list[Recorded],
) -> None:
    for asked_for in (True, False):
        rollouts = RayRollouts(engines, overlong_filtering=asked_for)
        samples = await gather(
            *(functools.partial(rollouts.rollout, prompt_of(3), s, 1) for s in range(24))
        )
        ended = [sample.fields["input_ids"][-1] == TOKENIZER.eos_id for sample in samples]
        assert 0 < sum(ended) < 24
        assert [sample.masked for sample in samples] == [asked_for and not end for end in ended]


async def test_siblings_of_one_tick_make_one_call(engines: list[Recorded]) -> None:
    rollouts = RayRollouts(engines[:1])
    await gather(
        *(functools.partial(rollouts.rollout, prompt_of(o), s, 1) for o in (4, 5) for s in range(3))
    )
    calls = [(ordinal, sorted(siblings)) for ordinal, siblings in engines[0].calls]
    assert sorted(calls) == [(4, [0, 1, 2]), (5, [0, 1, 2])]
    await rollouts.rollout(prompt_of(4), 1, 1)
    assert engines[0].calls[2:] == [(4, (1,))]


async def test_a_call_is_freed_once_its_last_sibling_is_cancelled(engines: list[Recorded]) -> None:
    engine = engines[0]
    rollouts = RayRollouts([engine])
    await engine.pause()
    async with anyio.create_task_group() as rest:
        async with anyio.create_task_group() as tg:
            tg.start_soon(rollouts.rollout, prompt_of(6), 0, 1)
            tg.start_soon(rollouts.rollout, prompt_of(6), 1, 1)
            rest.start_soon(rollouts.rollout, prompt_of(7), 0, 1)
            rest.start_soon(rollouts.rollout, prompt_of(7), 1, 1)
            while len(engine.refs) < 2:
                await checkpoint()
            await engine.ping()
            tg.cancel_scope.cancel()
        cancelled, kept = sorted(
            zip(engine.calls, engine.refs, strict=True), key=lambda pair: pair[0][0]
        )
        with pytest.raises(TaskCancelledError):
            await await_ref(cancelled[1])
        await engine.resume()
    assert {e.prompt for e in await engine.examples(2)} == {"7,1="}
    assert len((await await_ref(kept[1])).completions) == 2


async def test_errors_of_the_worker_come_with_its_name(engines: list[Recorded]) -> None:
    rollouts = RayRollouts(engines[:1])
    with pytest.raises(DataFailure, match=r"^generation-0: the tokenizer has no token for '\?'"):
        await rollouts.rollout(prompt_of(3, "?"), 0, 1)
    with pytest.raises(RolloutError, match="^generation-0: weight version 9 was asked for"):
        await rollouts.rollout(prompt_of(3), 0, 9)
    unsendable = Prompt(ordinal=1, group_id=group_id(1, 0), payload=threading.Lock())

    async def refused(sibling: int) -> None:
        with pytest.raises(TypeError, match="lock"):
            await rollouts.rollout(unsendable, sibling, 1)

    async with anyio.create_task_group() as tg:
        tg.start_soon(refused, 0)
        tg.start_soon(refused, 1)


async def test_after_a_transfer_all_engines_generate_by_the_trainers_weights(
    engines: list[Recorded], tmp_path: Path
) -> None:
    policy = Policy(MODEL, TOKENIZER, seed=2)

    class Source:
        async def export_weights(self, path: Path) -> None:
            policy.export_weights(path)

    rollouts = RayRollouts(engines, choice="by_ordinal")
    with FileWeightSync(Source(), engines, run_id="test", parent=tmp_path) as sync:
        await sync.pause()
        held: list[Sample] = []

        async def rollout(ordinal: int) -> None:
            held.append(await rollouts.rollout(prompt_of(ordinal), 0, 1))

        async with anyio.create_task_group() as tg:
            tg.start_soon(rollout, 0)
            tg.start_soon(rollout, 1)
            while not all(engine.refs for engine in engines):
                await checkpoint()
            assert await sync.transfer(2) == {"generation-0": 2, "generation-1": 2}
            await sync.resume()
    assert [engine.calls for engine in engines] == [[(0, (0,))], [(1, (0,))]]
    for sample in held:
        assert sample.end_weight_version == 2, "it was held until after the transfer"
        (expected,) = policy.logprobs([sample.fields])
        torch.testing.assert_close(sample.fields["generation_logprobs"], expected)
    with pytest.raises(WeightSyncError, match="no weights at"):
        await engines[0].load_weights(tmp_path / "gone", 3)
    again = await RayRollouts(engines[:1]).rollout(prompt_of(0), 0, 1)
    assert any(same(again, sample) for sample in held)


async def test_engines_on_other_nodes_get_weights_by_their_content(
    actors: dict[str, Any], engines: list[Recorded], weights: Path, tmp_path: Path
) -> None:
    near = await RayRollouts(engines[:1]).rollout(prompt_of(3), 1, 1)
    parcels = Parcels()
    far = [Recorded(actor, name=name, parcels=parcels) for name, actor in actors.items()]
    moving = tmp_path / "weights"
    Policy(MODEL, TOKENIZER, seed=3).export_weights(moving)
    other = await parcels.of(moving)
    assert await parcels.of(moving) == other, "it is put once"
    assert [await engine.load_weights(moving, 2) for engine in far] == [2, 2]
    changed = await RayRollouts(far[:1]).rollout(prompt_of(3), 1, 1)
    assert not same(near, changed)
    moving.write_bytes(weights.read_bytes())
    assert await parcels.of(moving) != other, "another file of that name"
    assert await far[1].load_weights(moving, 1) == 1
    assert same(near, await RayRollouts(far[1:]).rollout(prompt_of(3), 1, 1))
    moving.unlink()
    with pytest.raises(FileNotFoundError):
        await far[0].load_weights(moving, 2)


# the port's choices ---------------------------------------------------------------------


class Puppet(RayEngine):
    """An engine that answers when a test lets it."""

    def __init__(self, actor: Any, *, name: str) -> None:
        super().__init__(actor, name=name)
        self.actor = actor
        self.sent: list[int] = []

    def send(self, prompt: Prompt, siblings: Sequence[int], weight_version: int) -> Any:
        self.sent.append(prompt.ordinal)
        return self.actor.rollouts.remote(len(siblings))


def stand_in() -> Any:
    made = Completion(token_ids=[1], logprobs=[0.0], text="", finish_reason="eos", weight_version=1)

    @ray.remote(num_cpus=0)
    class StandIn:
        def __init__(self) -> None:
            self.gate = asyncio.Event()

        async def close(self) -> None:
            self.gate.clear()

        async def open(self) -> None:
            self.gate.set()

        async def rollouts(self, count: int) -> Any:
            await self.gate.wait()
            return Rollouts(prompt_ids=[1], completions=[made] * count, rewards=[1.0] * count)

    return StandIn.remote()


@pytest.fixture(scope="module")
def stand_ins(local_ray: None) -> Iterator[list[Any]]:
    actors = [stand_in(), stand_in()]
    yield actors
    for actor in actors:
        ray.kill(actor)


@pytest.fixture
def puppets(stand_ins: list[Any]) -> list[Puppet]:
    return [Puppet(actor, name=name) for actor, name in zip(stand_ins, "ab", strict=True)]


async def test_a_group_goes_to_the_engine_with_the_fewest_siblings(puppets: list[Puppet]) -> None:
    for puppet in puppets:
        await await_ref(puppet.actor.close.remote())
    rollouts = RayRollouts(puppets)

    async def group(ordinal: int, siblings: int) -> None:
        for sibling in range(siblings):
            tg.start_soon(rollouts.rollout, prompt_of(ordinal), sibling, 1)
        await anyio.wait_all_tasks_blocked()

    async with anyio.create_task_group() as tg:
        await group(0, 3)  # a: 3
        await group(1, 1)  # b: 1
        await group(2, 1)  # b: 2
        await group(3, 2)  # b: 4
        await group(4, 2)  # a: 5
        assert (puppets[0].sent, puppets[1].sent) == ([0, 4], [1, 2, 3])
        for puppet in puppets:
            await await_ref(puppet.actor.open.remote())
    async with anyio.create_task_group() as tg:
        await group(5, 1)  # nothing is under way any more
    assert puppets[0].sent == [0, 4, 5]


async def test_requests_of_an_engine_put_out_end_at_once(puppets: list[Puppet]) -> None:
    for puppet in puppets:
        await await_ref(puppet.actor.close.remote())
    rollouts = RayRollouts(puppets)
    ended: list[str] = []

    async def ask(sibling: int) -> None:
        with pytest.raises(RolloutError) as caught:
            await rollouts.rollout(prompt_of(0), sibling, 1)
        ended.append(str(caught.value))

    async with anyio.create_task_group() as tg:
        tg.start_soon(ask, 0)
        tg.start_soon(ask, 1)
        await anyio.wait_all_tasks_blocked()
        rollouts.put_out("a", "it does not answer")
    assert ended == ["it does not answer"] * 2
    await await_ref(puppets[1].actor.open.remote())
    assert (await rollouts.rollout(prompt_of(1), 0, 1)).reward == 1
    assert (puppets[0].sent, puppets[1].sent) == ([0], [1])
    assert not any(rollouts._calls.values())


async def kill(actor: Any) -> None:
    """Kill an actor and wait until it is known to be dead; Ray may still answer a call or two."""
    ray.kill(actor)
    with pytest.raises(ActorDiedError):
        while True:
            await await_ref(actor.open.remote())


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_a_dead_engine_gets_no_more_and_without_any_there_is_an_end(
    local_ray: None,
) -> None:
    puppets = [Puppet(stand_in(), name=name) for name in "ab"]
    rollouts = RayRollouts(puppets)
    for puppet in puppets:
        await await_ref(puppet.actor.open.remote())
    await kill(puppets[0].actor)
    with pytest.raises(RolloutError, match="^a died: .*killed") as caught:
        await rollouts.rollout(prompt_of(0), 0, 1)
    assert "\n" not in str(caught.value)
    for ordinal in range(1, 4):
        assert (await rollouts.rollout(prompt_of(ordinal), 0, 1)).reward == 1
    assert (puppets[0].sent, puppets[1].sent) == ([0], [1, 2, 3])
    await kill(puppets[1].actor)
    for ordinal in (5, 6):  # the one that meets the last death, and the next
        with pytest.raises(WorkerDied, match="every generation worker died: a died: .*; b died: "):
            await rollouts.rollout(prompt_of(ordinal), 0, 1)


class Hope:
    """A keeper that expects an engine as long as it is told to."""

    def __init__(self) -> None:
        self.hopes = True
        self.dead: list[object] = []

    def died(self, engine: object, reason: str) -> None:
        self.dead.append(engine)

    def expects_more(self) -> bool:
        return self.hopes


async def test_without_any_engine_siblings_wait_for_one_that_is_expected(
    puppets: list[Puppet], local_ray: None
) -> None:
    late = puppets[1]
    await await_ref(late.actor.open.remote())
    only = Puppet(stand_in(), name="a")
    rollouts = RayRollouts([only])
    rollouts.keeper = keeper = Hope()
    samples: list[Sample] = []

    async def one(sibling: int) -> None:
        samples.append(await rollouts.rollout(prompt_of(1), sibling, 1))

    await kill(only.actor)
    with pytest.raises(RolloutError, match="^a died: "):  # and not that none is left
        await rollouts.rollout(prompt_of(0), 0, 1)
    assert keeper.dead == [only]
    async with anyio.create_task_group() as tg:
        tg.start_soon(one, 0)
        tg.start_soon(one, 1)
        await anyio.wait_all_tasks_blocked()
        assert samples == []
        rollouts.join(late)
    assert [sample.engine for sample in samples] == ["b", "b"] and only.sent == [0]
    rollouts.leave("b")
    async with anyio.create_task_group() as tg:

        async def none_comes() -> None:
            with pytest.raises(WorkerDied, match="every generation worker died: a died: .*; b has"):
                await rollouts.rollout(prompt_of(2), 0, 1)

        tg.start_soon(none_comes)
        await anyio.wait_all_tasks_blocked()
        keeper.hopes = False
        rollouts.look_again()


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_a_check_tells_a_dead_engine_from_one_that_answers(local_ray: None) -> None:
    @ray.remote(num_cpus=0)
    class Checked:
        def __init__(self) -> None:
            self.broken = False

        async def check(self) -> None:
            self.broken, was = True, self.broken
            if was:
                raise OSError("the engine's process has ended")

        async def open(self) -> None: ...

    actor = Checked.remote()  # type: ignore[attr-defined]
    engine = RayEngine(actor, name="a")
    await engine.check()
    with pytest.raises(WorkerDied, match="^a died: its engine: OSError: the engine's process has"):
        await engine.check()
    await kill(actor)
    with pytest.raises(WorkerDied, match="^a died: .*killed"):
        await engine.check()


def test_engines_need_different_names() -> None:
    for names in ("", "aa"):
        with pytest.raises(ConfigError, match="engines of different names"):
            RayRollouts([RayEngine(None, name=name) for name in names])
