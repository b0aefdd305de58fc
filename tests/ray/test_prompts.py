"""A task's prompts as a stream: epochs, positions, fingerprints."""

from __future__ import annotations

from typing import Any

import anyio
import msgspec
import pytest

from sc_core.config import ControllerConfig, decode
from sc_core.errors import ConfigError, EndOfPrompts, RestoreError
from sc_core.testing import MemoryRun
from sc_core.verify import verify
from sc_ray.prompts import HeldOutPrompts, TaskPrompts

pytestmark = pytest.mark.anyio

PROMPTS = [{"prompt": f"{n}=", "answer": str(n), "level": n} for n in range(20)]


async def take(source: TaskPrompts, count: int) -> list[int]:
    return [(await source.next_prompt()).payload["level"] for _ in range(count)]


async def test_each_epoch_has_every_prompt_once_in_an_order_of_its_own() -> None:
    source = TaskPrompts(PROMPTS, seed=1)
    epochs = [await take(source, len(PROMPTS)) for _ in range(3)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


async def test_the_order_follows_from_the_seed() -> None:
    orders = {seed: await take(TaskPrompts(PROMPTS, seed=seed), 60) for seed in (1, 2)}
    assert orders[1] == await take(TaskPrompts(PROMPTS, seed=1), 60)
    assert orders[1] != orders[2]


async def test_the_order_is_the_same_in_every_version() -> None:
    assert await take(TaskPrompts(PROMPTS[:8], seed=0), 8) == [3, 6, 5, 0, 4, 7, 1, 2]


async def test_without_shuffling_the_order_is_that_of_the_task() -> None:
    assert await take(TaskPrompts(PROMPTS, seed=1, shuffle=False), 40) == [*range(20), *range(20)]


async def test_any_position_is_found_again_after_a_trip_through_a_checkpoint() -> None:
    source = TaskPrompts(PROMPTS, seed=3, max_epochs=3)
    pulled = [await source.next_prompt() for _ in range(60)]
    assert pulled[19].position == {"epoch": 0, "index": 20}
    assert pulled[20].position == {"epoch": 1, "index": 1}
    for number in (0, 18, 19, 20, 39, 58):
        kept = msgspec.msgpack.decode(msgspec.msgpack.encode(pulled[number].position))
        other = TaskPrompts(PROMPTS, seed=3, max_epochs=3)
        await other.seek(kept)
        assert await other.next_prompt() == pulled[number + 1]


async def test_seeking_none_is_the_very_beginning() -> None:
    source = TaskPrompts(PROMPTS, seed=3)
    first = await take(source, 25)
    await source.seek(None)
    assert await take(source, 25) == first


async def test_it_ends_after_its_epochs_and_stays_ended() -> None:
    source = TaskPrompts(PROMPTS, seed=1, max_epochs=2)
    await take(source, 40)
    for _ in range(2):
        with pytest.raises(EndOfPrompts, match="2 epochs of 20 prompts"):
            await source.next_prompt()
    await source.seek({"epoch": 1, "index": 19})
    assert len(await take(source, 1)) == 1


async def test_the_short_last_batch_of_each_epoch_may_be_left_out() -> None:
    source = TaskPrompts(PROMPTS, seed=3, max_epochs=2, batch=8)
    assert await take(source, 32) == [
        *(await take(TaskPrompts(PROMPTS, seed=3), 40))[:16],
        *(await take(TaskPrompts(PROMPTS, seed=3), 40))[20:36],
    ]
    with pytest.raises(EndOfPrompts, match="2 epochs"):
        await source.next_prompt()
    await source.seek({"epoch": 0, "index": 18})  # by a run with other batches
    assert (await source.next_prompt()).position == {"epoch": 1, "index": 1}
    assert source.fingerprint() == TaskPrompts(PROMPTS, seed=3).fingerprint()
    with pytest.raises(ConfigError, match="20 prompts, too few for one batch of 21"):
        TaskPrompts(PROMPTS, seed=3, batch=21)


@pytest.mark.parametrize(("batch", "steps", "epoch"), [(4, 3, (2, 4)), (1, 5, (2, 6))])
async def test_h07_the_final_state_says_how_many_epochs_there_were(
    batch: int, steps: int, epoch: tuple[int, int]
) -> None:
    """Six prompts, steps of four, three epochs; and no fourth after a resume."""
    data = {
        "grpo": {"num_prompts_per_step": 4, "num_generations_per_prompt": 1, "max_num_steps": 10},
        "checkpointing": {"save_period": 100},
    }
    run = MemoryRun(decode(data, ControllerConfig), ())
    start_life = run.start_life

    def with_task() -> None:
        start_life()
        run.source = TaskPrompts(PROMPTS[:6], seed=1, max_epochs=3, batch=batch)  # type: ignore[assignment]

    run.start_life = with_task  # type: ignore[method-assign]
    run.start_life()
    for _ in range(2):
        result = await run.run()
        assert result is not None and (result.reason, result.step) == ("exhausted", steps)
        cut = verify(run.directory / f"step_{steps}", run.disk).cut
        assert (cut.position["epoch"], cut.position["index"]) == epoch
        assert cut.exhausted


async def test_a_cancelled_pull_loses_nothing() -> None:
    source = TaskPrompts(PROMPTS, seed=1)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await source.next_prompt()
    assert scope.cancelled_caught
    assert await take(source, 5) == await take(TaskPrompts(PROMPTS, seed=1), 5)


async def test_what_the_controller_does_to_a_payload_does_not_come_back() -> None:
    source = TaskPrompts(PROMPTS, seed=1, shuffle=False)
    (await source.next_prompt()).payload["prompt"] = "changed"
    await source.seek(None)
    assert (await source.next_prompt()).payload == PROMPTS[0]


def test_the_fingerprint_changes_with_whatever_changes_the_stream() -> None:
    same = TaskPrompts(PROMPTS, seed=1).fingerprint()
    assert TaskPrompts(tuple(dict(item) for item in PROMPTS), seed=1).fingerprint() == same
    assert TaskPrompts(PROMPTS, seed=1, max_epochs=3).fingerprint() == same
    others = [
        TaskPrompts(PROMPTS, seed=2),
        TaskPrompts(PROMPTS, seed=1, shuffle=False),
        TaskPrompts(PROMPTS[:-1], seed=1),
        TaskPrompts(PROMPTS[::-1], seed=1),
        TaskPrompts([{**PROMPTS[0], "answer": "x"}, *PROMPTS[1:]], seed=1),
    ]
    assert len({same, *(other.fingerprint() for other in others)}) == 6


@pytest.mark.parametrize(
    "position", [7, {"epoch": 0}, {"epoch": 0, "index": 21}, {"epoch": -1, "index": 0}, "start"]
)
async def test_a_position_of_something_else_is_refused(position: Any) -> None:
    source = TaskPrompts(PROMPTS, seed=1)
    first = await take(source, 3)
    with pytest.raises(RestoreError, match="position"):
        await source.seek(position)
    assert first + await take(source, 30) == await take(TaskPrompts(PROMPTS, seed=1), 33)


def test_prompts_that_no_checkpoint_could_hold_are_refused() -> None:
    with pytest.raises(ConfigError, match="no prompts"):
        TaskPrompts([], seed=1)
    with pytest.raises(ConfigError, match="prompt 1 can't be kept in a checkpoint"):
        TaskPrompts([PROMPTS[0], {"prompt": "a", "answer": object()}], seed=1)


def test_held_out_prompts_keep_their_order_and_are_known_by_their_fingerprint() -> None:
    held_out = HeldOutPrompts(PROMPTS)
    assert list(held_out.prompts()) == PROMPTS
    same = held_out.fingerprint()
    assert HeldOutPrompts(tuple(dict(item) for item in PROMPTS)).fingerprint() == same
    for other in (PROMPTS[:-1], PROMPTS[::-1], [{**PROMPTS[0], "answer": "x"}, *PROMPTS[1:]]):
        assert HeldOutPrompts(other).fingerprint() != same
