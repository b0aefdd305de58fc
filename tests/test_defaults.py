"""Ports that a run has unless it brings its own."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sc_core import ConfigError, ControllerConfig, EndOfPrompts, RestoreError, decode
from sc_core.defaults import GroupAdvantages, PromptList, SharedWeights
from sc_core.testing import MemoryRun

pytestmark = pytest.mark.anyio


async def taken(source: PromptList, count: int) -> list[Any]:
    return [(await source.next_prompt()).payload for _ in range(count)]


async def test_prompts_come_in_order_epoch_after_epoch_and_end() -> None:
    source = PromptList(range(3), epochs=2)
    assert await taken(source, 6) == [0, 1, 2, 0, 1, 2]
    with pytest.raises(EndOfPrompts, match="2 epochs of 3 prompts"):
        await source.next_prompt()


async def test_each_epoch_is_shuffled_in_an_order_of_its_own_and_always_the_same() -> None:
    first, second = PromptList(range(50), seed=7), PromptList(range(50), seed=7)
    orders = [await taken(first, 50) for _ in range(3)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert orders[0] != orders[1] != orders[2] != list(range(50))
    assert await taken(second, 150) == sum(orders, [])


@pytest.mark.parametrize("at", [0, 1, 4, 5, 9, 12])
async def test_a_position_is_found_again(at: int) -> None:
    whole = await taken(PromptList(range(5), seed=1), 15)
    source = PromptList(range(5), seed=1)
    position = None
    for _ in range(at):
        position = (await source.next_prompt()).position
    other = PromptList(range(5), seed=1)
    await taken(other, 13)  # wherever it was
    await other.seek(position)
    assert await taken(other, 15 - at) == whole[at:]


@pytest.mark.parametrize("position", [-1, "3", 1.0, True, [1]])
async def test_what_is_no_position_is_refused(position: Any) -> None:
    with pytest.raises(RestoreError, match="no position"):
        await PromptList(range(3)).seek(position)


def test_the_fingerprint_is_of_prompts_order_and_seed() -> None:
    same = PromptList([[1, 2], [3]], epochs=1).fingerprint()
    assert same == PromptList(((1, 2), (3,)), epochs=4).fingerprint()
    assert len({same, *(PromptList(p, seed=s).fingerprint() for p, s in (
        ([[3], [1, 2]], None), ([[1, 2], [3]], 0), ([[1, 2], [3]], 1), ([[1], [2, 3]], None),
    ))}) == 5  # fmt: skip


async def test_a_payload_is_what_it_will_be_after_a_resume() -> None:
    assert await taken(PromptList([(1, 2)]), 1) == [[1, 2]]


def in_itself() -> list[Any]:
    prompt: list[Any] = []
    prompt.append(prompt)
    return prompt


@pytest.mark.parametrize(
    "prompts, why",
    [([], "no prompts")]
    + [([1, odd], "prompt 1 can't be kept") for odd in (object(), "\ud800", 2**64, in_itself())],
)
def test_prompts_that_no_bundle_can_keep_are_refused(prompts: list[Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        PromptList(prompts)


def advantages(rewards: list[float], masked: list[bool], sizes: list[int], **how: bool) -> Any:
    columns = {"reward": rewards, "masked": masked}
    return GroupAdvantages(**how).estimate(columns, sizes)["advantage"]


def test_advantages_are_of_each_group_alone() -> None:
    got = advantages([1.0, 3.0, 10.0, 10.0, 40.0], [False] * 5, [2, 3])
    third = math.sqrt(300)
    assert got == pytest.approx(
        [-1 / math.sqrt(2), 1 / math.sqrt(2), -10 / third, -10 / third, 20 / third]
    )
    assert advantages([1.0, 3.0, 5.0], [False] * 3, [3], normalize=False) == [-2.0, 0.0, 2.0]


def test_masked_rows_move_no_baseline() -> None:
    got = advantages([1.0, 99.0, 3.0], [False, True, False], [3])
    assert got == pytest.approx([-1 / math.sqrt(2), 0.0, 1 / math.sqrt(2)])


@pytest.mark.parametrize("rewards", [[], [0.1], [0.1, 0.1, 0.1]])
def test_a_group_without_a_difference_teaches_nothing(rewards: list[float]) -> None:
    assert advantages(rewards, [False] * len(rewards), [len(rewards)]) == [0.0] * len(rewards)
    assert advantages([*rewards, 9.0], [*[False] * len(rewards), True], [len(rewards) + 1]) == (
        [0.0] * (len(rewards) + 1)
    )


@pytest.mark.parametrize("apart", [1e-300, 1e-170, 1e-17, 1.0, 1e37, 1e200])
def test_a_difference_of_any_size_counts_as_much(apart: float) -> None:
    half = math.sqrt(0.5)
    got = advantages([-apart, apart], [False, False], [2])
    assert got == pytest.approx([-half, half])
    assert advantages([0.0] * 9 + [5e-324], [False] * 10, [10]) == [0.0] * 9 + [3.0]


def test_a_lone_row_has_no_advantage_whatever_its_reward() -> None:
    assert advantages([math.nan, 3.0], [False, True], [2]) == [0.0, 0.0]


async def test_a_whole_run_on_them_passes() -> None:
    run = MemoryRun(decode({"grpo": {"max_num_steps": 3}}, ControllerConfig), range(100))
    run.estimator = GroupAdvantages()
    result = await run.run()
    assert result is not None and result.step == 3


async def test_shared_weights_confirm_what_they_are_told() -> None:
    shared = SharedWeights()
    await shared.pause()
    assert await shared.transfer(7) == {"trainer": 7}
    await shared.resume()
