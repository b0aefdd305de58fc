"""The trainer's process on real rows: the same bits as a policy that was given them directly."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
import ray
import torch

from sc_core.errors import ConfigError, MissingRows, SaveError, ScError, WorkerDied
from sc_core.records import Batch, Group, group_id, sample_ids
from sc_ray.model import ModelConfig, read_tensors
from sc_ray.tokenizer import Tokenizer
from sc_ray.trainer.config import OptimizerConfig
from sc_ray.trainer.policy import Policy
from sc_ray.trainer.port import RayTrainer
from sc_ray.trainer.worker import TrainerActor, TrainerSpec
from sc_ray.transfer_queue import RowsClient, TransferQueueBootstrap

pytestmark = pytest.mark.anyio

SIBLINGS = 3
TOKENIZER = Tokenizer.of_characters("0123456789,=")
MODEL = ModelConfig(hidden_size=32, intermediate_size=64, num_attention_heads=2)
OPTIMIZER = OptimizerConfig(lr=1e-2, microbatch_rows=4)


def batch_of(step: int, ordinals: Sequence[int]) -> Batch:
    groups = [
        Group(
            group_id=group_id(ordinal, 0),
            ordinal=ordinal,
            sample_ids=sample_ids(group_id(ordinal, 0), SIBLINGS),
            start_weight_version=0,
            end_weight_version=0,
            commit_seq=ordinal,
        )
        for ordinal in ordinals
    ]
    return Batch(step=step, weight_version=step - 1, groups=tuple(groups))


def row_of(sample_id: str) -> dict[str, torch.Tensor]:
    """A row that follows from its id, with its advantage."""
    own = torch.Generator().manual_seed(sum(ord(c) * 31**i for i, c in enumerate(sample_id)))
    before, after = torch.randint(2, 6, (2,), generator=own).tolist()
    return {
        "input_ids": torch.randint(2, TOKENIZER.vocab_size, (before + after,), generator=own),
        "completion_mask": torch.tensor([0] * before + [1] * after),
        "generation_logprobs": -torch.rand(before + after, generator=own),
        "advantage": torch.randn(1, generator=own),
    }


def policy() -> Policy:
    return Policy(MODEL, TOKENIZER, optimizer=OPTIMIZER, seed=5)


def train_directly(policy: Policy, chunks: Sequence[Batch]) -> dict[str, float]:
    policy.begin_step()
    for chunk in chunks:
        rows = [row_of(sample_id) for sample_id in chunk.sample_ids]
        for row, logprobs in zip(rows, policy.logprobs(rows), strict=True):
            row["prev_logprobs"] = logprobs
        policy.accumulate(rows)
    return policy.finish_step()


async def train(trainer: RayTrainer, chunks: Sequence[Batch]) -> dict[str, float]:
    await trainer.begin_step(chunks[0].step)
    for chunk in chunks:
        await trainer.prepare(chunk)
        await trainer.train_microbatches(chunk)
    return dict(await trainer.finish_step())


@pytest.fixture(scope="module")
def rows(bootstrap: TransferQueueBootstrap) -> Iterator[RowsClient]:
    """The rows of 8 groups, put in an order that no batch has."""
    with bootstrap.spec.connect_rows() as client:
        for ordinal in (6, 2, 7, 0, 3, 5, 1, 4):
            ids = batch_of(1, [ordinal]).sample_ids[::-1]
            made = [row_of(sample_id) for sample_id in ids]
            client.put(ids, {name: [row[name] for row in made] for name in made[0]})
        yield client


@pytest.fixture(scope="module")
def actor(bootstrap: TransferQueueBootstrap, tmp_path_factory: Any) -> Iterator[tuple[Any, Path]]:
    """The worker, and what it saved when it was new."""
    spec = TrainerSpec(
        model=MODEL, tokenizer=TOKENIZER, rows=bootstrap.spec, optimizer=OPTIMIZER, seed=5
    )
    actor = TrainerActor.remote(spec)
    new = tmp_path_factory.mktemp("policies") / "new"
    ray.get(actor.save.remote(new))
    ray.get(actor.finalize_save.remote())
    yield actor, new
    ray.kill(actor)


@pytest.fixture
async def trainer(actor: tuple[Any, Path], rows: RowsClient) -> RayTrainer:
    """As good as new."""
    trainer = RayTrainer({"trainer-0": actor[0]})
    await trainer.abandon_step()
    await trainer.load(actor[1])
    return trainer


@pytest.fixture
def weights(tmp_path: Path) -> Callable[[RayTrainer | Policy], Awaitable[dict[str, torch.Tensor]]]:
    """The weights of a trainer, or of a policy."""

    async def weights_of(trained: RayTrainer | Policy) -> dict[str, torch.Tensor]:
        path = tmp_path / "weights.safetensors"
        if isinstance(trained, Policy):
            trained.export_weights(path)
        else:
            await trained.export_weights(path)
        return read_tensors(path)

    return weights_of


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


async def test_steps_on_rows_of_the_store_give_the_bits_of_a_policy_that_was_handed_them(
    trainer: RayTrainer, rows: RowsClient, weights: Any
) -> None:
    direct = policy()
    steps = [
        [batch_of(1, [0, 1]), batch_of(1, [2, 3])],
        [batch_of(2, [4, 5, 6, 7])],
    ]
    for chunks in steps:
        assert await train(trainer, chunks) == train_directly(direct, chunks)
        assert same(await weights(trainer), await weights(direct))


async def test_prepare_writes_the_log_probs_of_each_row(
    trainer: RayTrainer, rows: RowsClient
) -> None:
    batch = batch_of(1, [3, 5])
    await trainer.prepare(batch)
    expected = policy().logprobs([row_of(sample_id) for sample_id in batch.sample_ids])
    written = rows.fetch(batch.sample_ids, ["prev_logprobs"])["prev_logprobs"]
    assert all(torch.equal(*pair) for pair in zip(written, expected, strict=True))


async def test_what_was_saved_goes_on_as_if_never_interrupted(
    trainer: RayTrainer, weights: Any, tmp_path: Path
) -> None:
    await train(trainer, [batch_of(1, [0, 1])])
    await trainer.save(tmp_path / "policy")
    await trainer.finalize_save()
    saved = await weights(trainer)
    metrics = await train(trainer, [batch_of(2, [2, 3])])
    trained = await weights(trainer)
    assert not same(trained, saved)

    await trainer.load(tmp_path / "policy")
    assert await trainer.ping() == 1
    assert same(await weights(trainer), saved)
    assert await train(trainer, [batch_of(2, [2, 3])]) == metrics
    assert same(await weights(trainer), trained)


async def test_an_abandoned_step_leaves_nothing_behind(trainer: RayTrainer, weights: Any) -> None:
    await trainer.begin_step(1)
    await trainer.prepare(batch_of(1, [6, 7]))
    with anyio.CancelScope() as scope:  # whose answer nobody awaits
        scope.cancel()
        await trainer.train_microbatches(batch_of(1, [6, 7]))
    await trainer.abandon_step()
    await trainer.abandon_step()

    direct = policy()
    chunks = [batch_of(1, [0, 1])]
    assert await train(trainer, chunks) == train_directly(direct, chunks)
    assert same(await weights(trainer), await weights(direct))


async def test_a_step_that_does_not_follow_the_weights_is_refused(trainer: RayTrainer) -> None:
    with pytest.raises(ScError, match=r"step 7 was asked for.*0 steps behind them"):
        await trainer.begin_step(7)
    await trainer.begin_step(1)
    with pytest.raises(ScError, match="a step is open"):
        await trainer.begin_step(1)


async def test_an_error_arrives_as_the_worker_raised_it(trainer: RayTrainer) -> None:
    with pytest.raises(MissingRows) as caught:
        await trainer.prepare(batch_of(1, [0, 99]))
    assert set(caught.value.missing) == {"99.0_g0", "99.0_g1", "99.0_g2"}


async def test_a_save_is_a_copy_that_is_written_while_the_worker_goes_on(
    trainer: RayTrainer, tmp_path: Path
) -> None:
    slow, behind = tmp_path / "slow", tmp_path / "behind"
    slow.mkdir()
    os.mkfifo(slow / "config.json")  # who writes into it waits for a reader
    await trainer.save(slow)
    await trainer.save(behind)
    async with anyio.create_task_group() as tg:
        tg.start_soon(trainer.finalize_save)
        await train(trainer, [batch_of(1, [0, 1])])
        assert not behind.exists()
        await anyio.to_thread.run_sync((slow / "config.json").read_bytes)
    assert (slow / "optimizer.json").exists()
    await trainer.load(behind)
    assert await trainer.ping() == 0, "it is of before the step"


async def test_a_save_that_fails_says_so_when_it_is_finalised(
    trainer: RayTrainer, tmp_path: Path
) -> None:
    (tmp_path / "taken").write_text("a file")
    await trainer.save(tmp_path / "taken")
    with pytest.raises(FileExistsError, match="taken"):
        await trainer.finalize_save()
    await trainer.save(tmp_path / "free")
    await trainer.finalize_save()


# a worker that is gone ------------------------------------------------------------------

once = pytest.mark.parametrize("anyio_backend", ["trio"])


def fragile(*, healthy: bool) -> Any:
    @ray.remote(num_cpus=0)
    class Fragile:
        def __init__(self) -> None:
            if not healthy:
                raise ConfigError("model.hidden_size is 7\nand that is odd")

        def finish_step(self) -> None:
            os._exit(1)

        def save(self, directory: Path) -> None:
            raise SaveError(f"{directory} is full")

    return Fragile.remote()


@once
async def test_a_worker_that_dies_is_named_in_one_line(local_ray: None) -> None:
    trainer = RayTrainer({"trainer-3": fragile(healthy=True)})
    with pytest.raises(SaveError, match="/policy is full"):
        await trainer.save(Path("/policy"))
    for _ in range(2):
        with pytest.raises(WorkerDied, match=r"^trainer-3 died: .*process") as caught:
            await trainer.finish_step()
        assert "\n" not in str(caught.value)
        assert caught.value.worker == "trainer-3"


@once
async def test_a_worker_that_can_not_start_says_why(local_ray: None) -> None:
    with pytest.raises(WorkerDied) as caught:
        await RayTrainer({"trainer-0": fragile(healthy=False)}).finish_step()
    assert str(caught.value) == (
        "trainer-0 died: it could not start: "
        "sc_core.errors.ConfigError: model.hidden_size is 7 and that is odd"
    )
