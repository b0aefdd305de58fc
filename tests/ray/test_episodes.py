"""Several turns: a worker, its environments, and the rows that a trainer gets of them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from sc_core.errors import DataFailure, RolloutError
from sc_core.records import Prompt, group_id
from sc_ray.generation import Completion, Request, request_seed, rollout_row
from sc_ray.generation.worker import GenerationSpec, GenerationWorker, Rollouts
from sc_ray.model import ModelConfig, build_model, save_weights
from sc_ray.phrasing import Phrasing
from sc_ray.tasks import Reply, Task
from sc_ray.tokenizer import Tokenizer
from sc_ray.trainer.policy import Policy

pytestmark = pytest.mark.anyio

TOKENIZER = Tokenizer.of_characters("0123456789<>?:-")
MODEL = ModelConfig(
    hidden_size=32, intermediate_size=64, num_attention_heads=2, max_position_embeddings=32
)
RUN_SEED = 5
PROMPT = Prompt(ordinal=3, group_id=group_id(3, 0), payload={"prompt": "2-7:", "answer": "5"})


class Counts:
    """Says `<` `item["turns"]` times, then ends; each turn is worth a quarter."""

    def __init__(self, item: Mapping[str, Any]) -> None:
        self.left = item.get("turns", 2)
        self.heard: list[str] = []

    def respond(self, completion: str) -> Reply:
        self.heard.append(completion)
        self.left -= 1
        return Reply("<" if self.left >= 0 else None, 0.25)


class CountsLater(Counts):
    async def respond(self, completion: str) -> Reply:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().respond(completion)


def task(environment: Any = Counts, **changes: Any) -> Task:
    settings: dict[str, Any] = {"max_turns": 4, "max_new_tokens": 3, **changes}
    return Task(name="counts", prompts=(), environment=environment, **settings)


def prompt(**item: Any) -> Prompt:
    return Prompt(ordinal=3, group_id=group_id(3, 0), payload={**PROMPT.payload, **item})


@pytest.fixture
def anyio_backend() -> Any:
    """That of an actor."""
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "first.safetensors"
    save_weights(build_model(MODEL, TOKENIZER, seed=1), path)
    return path


async def worker_of(weights: Path, task: Task, **changes: Any) -> GenerationWorker:
    settings = {"tokenizer": TOKENIZER, "run_seed": RUN_SEED, "batch_invariant": True, **changes}
    worker = GenerationWorker(GenerationSpec(model=MODEL, task=task, **settings))
    await worker.load_weights(weights, 1)
    return worker


def spoken(rollouts: Rollouts) -> list[list[tuple[bool, str]]]:
    """Of each sibling, who said what: true for the model."""
    told = []
    for completion in rollouts.completions:
        runs: list[tuple[bool, str]] = []
        mask = rollout_row([], completion, reward=0)["completion_mask"].tolist()
        for sampled, token in zip(mask, completion.token_ids, strict=True):
            text = TOKENIZER.decode([token])
            if runs and runs[-1][0] == bool(sampled):
                runs[-1] = (bool(sampled), runs[-1][1] + text)
            else:
                runs.append((bool(sampled), text))
        told.append(runs)
    return told


@pytest.mark.parametrize("environment", [Counts, CountsLater])
async def test_replies_stand_between_turns_and_are_not_sampled(
    weights: Path, environment: Any
) -> None:
    worker = await worker_of(weights, task(environment))
    rollouts = await worker.rollouts(PROMPT, range(4), 1)
    assert rollouts.prompt_ids == TOKENIZER.encode("2-7:")
    assert rollouts.rewards == [0.75] * 4, "the sum over three turns"
    for completion, runs in zip(rollouts.completions, spoken(rollouts), strict=True):
        assert [sampled for sampled, _ in runs] == [True, False, True, False, True]
        assert [text for sampled, text in runs if not sampled] == ["<", "<"]
        row = rollout_row(rollouts.prompt_ids, completion, reward=0.75)
        assert row["completion_mask"][:4].tolist() == [0] * 4
        assert row["generation_logprobs"][row["completion_mask"] == 0].tolist() == [0.0] * 6
        assert (row["generation_logprobs"][row["completion_mask"] == 1] < 0).all()
    assert len({tuple(completion.token_ids) for completion in rollouts.completions}) == 4


@pytest.mark.parametrize("batch_invariant", [True, False])
async def test_the_trainer_finds_the_same_logprobs_in_rows_of_several_turns(
    weights: Path, batch_invariant: bool
) -> None:
    worker = await worker_of(weights, task(), batch_invariant=batch_invariant)
    rollouts = await worker.rollouts(PROMPT, range(6), 1)
    policy = Policy(MODEL, TOKENIZER, seed=1)
    rows = [rollout_row(rollouts.prompt_ids, one, reward=0) for one in rollouts.completions]
    for row, found in zip(rows, policy.logprobs(rows), strict=True):
        difference = (row["generation_logprobs"] - found).abs().max()
        assert difference <= 1e-4, "masked positions are 0 in both"


async def test_a_turn_is_drawn_from_its_own_seed_and_reads_all_before(weights: Path) -> None:
    worker = await worker_of(weights, task())
    asked: list[Request] = []
    generate = worker._engine.generate

    async def recorded(requests: Sequence[Request]) -> list[Completion]:
        asked.extend(requests)
        return await generate(requests)

    worker._engine.generate = recorded  # type: ignore[method-assign]
    (whole,) = (await worker.rollouts(PROMPT, [2], 1)).completions
    assert [request.seed for request in asked] == [
        request_seed(RUN_SEED, 3, 2, 1, turn) for turn in range(3)
    ]
    assert request_seed(RUN_SEED, 3, 2, 1, 0) == request_seed(RUN_SEED, 3, 2, 1)
    assert len({request.seed for request in asked}) == 3
    read = [*TOKENIZER.encode("2-7:"), *whole.token_ids]
    ends = [end for _, end in whole.replies]
    assert [list(request.prompt_ids) for request in asked] == [
        read[: 4 + end] for end in (0, *ends)
    ]


async def test_siblings_whose_episode_goes_on_make_one_batch_a_turn(weights: Path) -> None:
    class Some(Counts):
        """Half of them end at once."""

        made = 0

        def __init__(self, item: Mapping[str, Any]) -> None:
            super().__init__({"turns": 2 * (Some.made % 2)})
            Some.made += 1

    worker = await worker_of(weights, task(Some))
    sizes: list[int] = []
    generate = worker._engine.generate

    async def recorded(requests: Sequence[Request]) -> list[Completion]:
        sizes.append(len(requests))
        return await generate(requests)

    worker._engine.generate = recorded  # type: ignore[method-assign]
    rollouts = await worker.rollouts(PROMPT, range(6), 1)
    assert sizes == [6, 3, 3]
    assert rollouts.rewards == [0.25, 0.75] * 3


async def test_a_sibling_is_the_same_alone_and_among_others(weights: Path) -> None:
    crowd = await (await worker_of(weights, task())).rollouts(PROMPT, range(8), 1)
    alone = await (await worker_of(weights, task())).rollouts(PROMPT, [5], 1)
    assert crowd.completions[5] == alone.completions[0]


async def test_the_last_turn_ends_an_episode_whatever_is_replied(weights: Path) -> None:
    worker = await worker_of(weights, task(max_turns=2))
    rollouts = await worker.rollouts(prompt(turns=9), range(2), 1)
    assert rollouts.rewards == [0.5, 0.5]
    for runs in spoken(rollouts):
        assert [sampled for sampled, _ in runs] == [True, False, True], "no reply is left over"


async def test_want_of_room_ends_an_episode_as_cut_off(weights: Path) -> None:
    worker = await worker_of(weights, task(max_turns=50, max_new_tokens=6))
    rollouts = await worker.rollouts(prompt(turns=50), range(4), 1)
    for completion in rollouts.completions:
        length = 4 + len(completion.token_ids)
        assert completion.finish_reason == "length"
        assert length <= 32 < length + 1 + 6, "as long as the next turn would have fitted"
        assert all(end < len(completion.token_ids) for _, end in completion.replies)
    with pytest.raises(DataFailure, match="exceed the model's 32 positions"):
        await worker.rollouts(prompt(prompt="2" * 27), [0], 1)


async def test_an_episode_with_a_turn_that_was_cut_off_is_cut_off(weights: Path) -> None:
    worker = await worker_of(weights, task(max_new_tokens=1))
    rollouts = await worker.rollouts(PROMPT, range(30), 1)
    eos = TOKENIZER.eos_id
    for completion in rollouts.completions:
        sampled = [
            token
            for place, token in enumerate(completion.token_ids)
            if not any(start <= place < end for start, end in completion.replies)
        ]
        assert completion.finish_reason == ("eos" if set(sampled) == {eos} else "length")


async def test_the_stamp_is_of_the_last_turn_and_no_turn_is_older_than_asked(
    weights: Path,
) -> None:
    worker = await worker_of(weights, task())
    generate, versions = worker._engine.generate, iter([1, 2, 3, 1, 0])

    async def served(requests: Sequence[Request]) -> list[Completion]:
        version = next(versions)
        made = await generate(requests)
        return [replace(one, weight_version=version) for one in made]

    worker._engine.generate = served  # type: ignore[method-assign]
    (mixed,) = (await worker.rollouts(PROMPT, [0], 1)).completions
    assert mixed.weight_version == 3
    with pytest.raises(RolloutError, match="version 1 was asked for, .* has version 0"):
        await worker.rollouts(PROMPT, [0], 1)


async def test_an_environment_at_fault_is_named_with_its_prompt(weights: Path) -> None:
    class Breaks(Counts):
        def respond(self, completion: str) -> Reply:
            raise ZeroDivisionError("by nought")

    class Mumbles(Counts):
        def respond(self, completion: str) -> Reply:
            return Reply("~")

    class Flatters(Counts):
        def respond(self, completion: str) -> Reply:
            return Reply(None, math.inf)

    worker = await worker_of(weights, task(Breaks))
    with pytest.raises(DataFailure, match=r"environment .*Breaks failed on prompt '2-7:' .*nought"):
        await worker.rollouts(PROMPT, [0], 1)
    worker = await worker_of(weights, task(Mumbles))
    with pytest.raises(DataFailure, match=r"reply .* no token for '~' .* task.characters"):
        await worker.rollouts(PROMPT, [0], 1)
    worker = await worker_of(weights, task(Flatters))
    with pytest.raises(DataFailure, match=r"^the reward of task counts .* is inf; it must be"):
        await worker.rollouts(PROMPT, [0], 1)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
async def test_a_reward_that_wants_to_end_its_process_fails_alone(
    weights: Path, error: type[BaseException]
) -> None:
    asked = []

    def exits_at_first(prompt: str, completion: str, answer: str) -> float:
        asked.append(completion)
        if len(asked) == 1:
            raise error
        return 1.0

    judged = task(environment=None, reward=exits_at_first, max_turns=1)
    worker = await worker_of(weights, judged)
    with pytest.raises(DataFailure, match=f"reward function .* failed .*: {error.__name__}"):
        await worker.rollouts(PROMPT, [0], 1)
    assert (await worker.rollouts(PROMPT, [0], 1)).rewards == [1.0]


async def test_a_cancelled_rollout_ends_the_wait_of_its_environment(weights: Path) -> None:
    asked, ended = asyncio.Event(), asyncio.Event()
    here = asyncio.get_running_loop()

    class Waits(Counts):
        async def respond(self, completion: str) -> Reply:  # type: ignore[override]
            here.call_soon_threadsafe(asked.set)
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                here.call_soon_threadsafe(ended.set)
            return Reply(None)

    worker = await worker_of(weights, task(Waits))
    waiting = asyncio.ensure_future(worker.rollouts(PROMPT, [0], 1))
    await asked.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await ended.wait()


async def test_components_become_a_column_in_the_order_of_their_names(weights: Path) -> None:
    class Parts(Counts):
        def respond(self, completion: str) -> Reply:
            super().respond(completion)
            return Reply("<" if self.left >= 0 else None, {"right": 0.5, "brief": -0.125})

    worker = await worker_of(weights, task(Parts))
    rollouts = await worker.rollouts(PROMPT, range(2), 1)
    assert rollouts.components == [[-0.375, 1.5]] * 2
    assert rollouts.rewards == [1.125] * 2
    row = rollout_row([1], rollouts.completions[0], reward=1.125, components=[-0.375, 1.5])
    torch.testing.assert_close(row["rewards"], torch.tensor([-0.375, 1.5]))
    assert row["reward"].tolist() == [1.125]
    assert "rewards" not in rollout_row([1], rollouts.completions[0], reward=1)


async def test_components_are_the_same_for_every_row(weights: Path) -> None:
    def judge(prompt: str, completion: str, answer: str) -> dict[str, float]:
        return {"right": 1.0} if prompt == "2-7:" else {"wrong": 1.0}

    one = Task(name="parts", prompts=(), reward=judge, max_new_tokens=2)
    worker = await worker_of(weights, one)
    await worker.rollouts(PROMPT, [0], 1)
    with pytest.raises(DataFailure, match="'3-7:' has the components wrong, and an earlier"):
        await worker.rollouts(prompt(prompt="3-7:"), [0], 1)


async def test_evaluations_may_have_a_temperature_of_their_own(weights: Path) -> None:
    worker = await worker_of(weights, task(), val_temperature=0.0)
    held_out = Prompt(ordinal=-1, group_id=group_id(-1, 0), payload=PROMPT.payload)
    greedy = (await worker.rollouts(held_out, range(3), 1)).completions
    assert len({tuple(one.token_ids) for one in greedy}) == 1
    sampled = (await worker.rollouts(PROMPT, range(3), 1)).completions
    assert len({tuple(one.token_ids) for one in sampled}) == 3


def test_plain_phrasing_takes_texts_as_they_are() -> None:
    phrasing = Phrasing(tokenizer=TOKENIZER)
    assert phrasing.prompt_ids({"prompt": "2-7:"}) == TOKENIZER.encode("2-7:")
    assert phrasing.reply_ids("<", after_eos=True) == TOKENIZER.encode("<")
    with pytest.raises(DataFailure, match="needs a chat template"):
        phrasing.prompt_ids({"messages": [{"role": "user", "content": "2"}]})
