"""Several trainer workers: real processes, real exchanges, rows of a real store."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.to_thread
import pytest
import ray
import torch
from test_trainer_worker import MODEL, TOKENIZER, row_of, same

from sc_core.errors import MissingRows, ScError, WorkerDied
from sc_core.records import Batch, Group, group_id, sample_ids
from sc_ray.broadcast import SendPlan, Sent
from sc_ray.model import read_tensors, write_tensors
from sc_ray.trainer.config import OptimizerConfig
from sc_ray.trainer.peers import Rendezvous
from sc_ray.trainer.policy import Policy
from sc_ray.trainer.port import RayTrainer
from sc_ray.trainer.sender import WeightSender
from sc_ray.trainer.shares import shares_of
from sc_ray.trainer.snapshot import SavedPolicy
from sc_ray.trainer.worker import TrainerSpec, TrainerWorker
from sc_ray.transfer_queue import RowsClient, TransferQueueBootstrap

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]

OPTIMIZER = OptimizerConfig(lr=1e-2, microbatch_rows=2, max_grad_norm=1e9)
SIZES = (5, 1, 3, 4)
"""Rows of each group: never the same, and once fewer than there are workers."""
SHARDINGS = ("fsdp2", "replicated")


def batch_of(step: int, *ordinals: int, masked: tuple[int, ...] = ()) -> Batch:
    """Groups of uneven sizes and lengths; `masked` siblings are those of the first one."""
    groups = []
    for ordinal in ordinals:
        ids = sample_ids(group_id(ordinal, 0), SIZES[ordinal])
        groups.append(
            Group(
                group_id=group_id(ordinal, 0),
                ordinal=ordinal,
                sample_ids=ids,
                start_weight_version=0,
                end_weight_version=0,
                commit_seq=ordinal,
                tokens=10 * ordinal + 3,
                masked=masked if ordinal == ordinals[0] else (),
            )
        )
    return Batch(step=step, weight_version=step - 1, groups=tuple(groups))


STEPS = (
    (batch_of(1, 0, 2, masked=(0, 3)), batch_of(1, 1), batch_of(1, 1, masked=(0,))),
    (batch_of(2, 0, 1, 2, 3),),
)
"""Chunks: some masked rows, one row alone, nothing but a masked row; then all at once."""


def policy() -> Policy:
    return Policy(MODEL, TOKENIZER, optimizer=OPTIMIZER, seed=5)


def train_directly(policy: Policy, chunks: tuple[Batch, ...]) -> dict[str, float]:
    policy.begin_step()
    for chunk in chunks:
        rows = {sample_id: row_of(sample_id) for sample_id in chunk.sample_ids}
        found = policy.logprobs(list(rows.values()))
        for row, logprobs in zip(rows.values(), found, strict=True):
            row["prev_logprobs"] = logprobs
        policy.accumulate([rows[sample_id] for sample_id in chunk.trained_ids])
    return policy.finish_step()


async def train(trainer: RayTrainer, chunks: tuple[Batch, ...]) -> dict[str, float]:
    await trainer.begin_step(chunks[0].step)
    for chunk in chunks:
        await trainer.prepare(chunk)
        await trainer.train_microbatches(chunk)
    return dict(await trainer.finish_step())


async def saved(trainer: RayTrainer, directory: Path) -> SavedPolicy:
    await trainer.save(directory)
    await trainer.finalize_save()
    return SavedPolicy.read(directory)


@pytest.fixture(scope="module")
def rows(bootstrap: TransferQueueBootstrap) -> Iterator[RowsClient]:
    with bootstrap.spec.connect_rows() as client:
        ids = batch_of(1, 0, 1, 2, 3).sample_ids
        made = [row_of(sample_id) for sample_id in ids]
        client.put(ids, {name: [row[name] for row in made] for name in made[0]})
        yield client


@pytest.fixture(scope="module")
def hosts(rows: RowsClient) -> Iterator[list[Any]]:
    """Three processes that can become workers of any number."""

    class Host(TrainerWorker):
        def __init__(self) -> None:
            self._peers = None

        def become(self, spec: TrainerSpec, seat: Any) -> None:
            if self._peers is not None:
                self._peers.close()
            TrainerWorker.__init__(self, spec, seat)

        def weights(self) -> dict[str, torch.Tensor]:
            return {name: t.detach().clone() for name, t in self._policy._parameters.items()}

        def spoil(self) -> None:
            def fail(*_: Any) -> None:
                raise ValueError("out of memory")

            self._policy._token_logprobs = fail  # type: ignore[assignment, method-assign]

        def send_into(self, path: Path) -> None:
            """Have `send_weights` write a file, in the place of a broadcast."""

            def connect(*given: Any) -> Any:
                *_, calls, weights = given
                calls.init_weight_transfer_engine({"rank_offset": 1})

                def send() -> None:
                    write_tensors(dict(weights), path)
                    calls.finish_weight_update()

                return SimpleNamespace(send_weights=send, shutdown=lambda: None)

            first = self._peers is None or self._peers.rank == 0
            self._sender = WeightSender(self._policy, first=first, connect=connect)

    made = ray.remote(num_cpus=1, concurrency_groups={"aside": 1})(Host)
    actors = [made.remote() for _ in range(3)]
    yield actors
    for actor in actors:
        ray.kill(actor)


@pytest.fixture(scope="module")
def receiver(local_ray: None) -> Iterator[Any]:
    """An engine that confirms whatever it is sent."""

    class Receiver:
        def transfer_workers(self) -> int:
            return 1

        def meet_trainer(self, info: Any) -> None:
            assert info == {"rank_offset": 1}

        def finish_update(self, version: int) -> int:
            return version

    actor = ray.remote(num_cpus=0)(Receiver).remote()
    yield actor
    ray.kill(actor)


Crew = Callable[..., RayTrainer]


@pytest.fixture(scope="module")
def crew(hosts: list[Any], bootstrap: TransferQueueBootstrap) -> Crew:
    def become(workers: int, sharding: Any = "fsdp2", call_s: float = 600) -> RayTrainer:
        spec = TrainerSpec(
            model=MODEL,
            tokenizer=TOKENIZER,
            rows=bootstrap.spec,
            optimizer=OPTIMIZER,
            seed=5,
            sharding=sharding,
            reference=True,
        )
        rendezvous = Rendezvous(workers, start_s=300, call_s=call_s)
        seats = rendezvous.seats if workers > 1 else [None]
        ray.get([hosts[rank].become.remote(spec, seat) for rank, seat in enumerate(seats)])
        return RayTrainer({f"trainer-{rank}": hosts[rank] for rank in range(workers)})

    return become


# the same steps ------------------------------------------------------------------------


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("workers", [2, 3])
async def test_workers_make_the_steps_of_one_that_has_all_rows(
    crew: Crew,
    rows: RowsClient,
    hosts: list[Any],
    receiver: Any,
    tmp_path: Path,
    workers: int,
    sharding: str,
) -> None:
    trainer, direct = crew(workers, sharding), policy()
    for number, chunks in enumerate(STEPS):
        metrics, expected = await train(trainer, chunks), train_directly(direct, chunks)
        assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)
        found = await saved(trainer, tmp_path / str(number))
        alone = direct.snapshot()
        assert alone is not None and found.steps == alone.steps == number + 1
        assert found.optimizer.keys() == alone.optimizer.keys()
        for name, moment in alone.optimizer.items():
            torch.testing.assert_close(
                found.optimizer[name], moment, atol=1e-6, rtol=1e-3, msg=name
            )
    written = rows.fetch(STEPS[1][0].sample_ids, ["prev_logprobs", "reference_logprobs"])
    at_first = policy().logprobs([row_of(row) for row in STEPS[1][0].sample_ids])
    for row, reference in zip(written["reference_logprobs"], at_first, strict=True):
        torch.testing.assert_close(row, reference, atol=1e-5, rtol=0)
    assert not torch.allclose(written["prev_logprobs"][0], at_first[0], atol=1e-3)
    await trainer.export_weights(tmp_path / "exported")
    assert same(SavedPolicy.read(tmp_path / "1").weights, read_tensors(tmp_path / "exported"))
    ray.get([host.send_into.remote(tmp_path / "sent") for host in hosts[:workers]])
    plan = SendPlan(version=7, group=1, engines={"a": receiver}, far=False, deadline_s=60)
    assert await trainer.send_weights(plan) == Sent(steps=len(STEPS), confirmed={"a": 7})
    assert same(read_tensors(tmp_path / "sent"), read_tensors(tmp_path / "exported"))
    if sharding == "replicated":
        each = ray.get([host.weights.remote() for host in hosts[:workers]])
        assert all(same(each[0], other) for other in each[1:])


async def test_what_some_saved_any_number_goes_on_with(crew: Crew, tmp_path: Path) -> None:
    direct = policy()
    before = None
    for step, (workers, sharding) in enumerate(
        [(1, "fsdp2"), (2, "fsdp2"), (3, "replicated"), (3, "fsdp2"), (1, "fsdp2")]
    ):
        trainer = crew(workers, sharding)
        if before is not None:
            last = tmp_path / str(step - 1)
            await trainer.load(last)
            assert await trainer.ping() == step
            again = await saved(trainer, tmp_path / "again")
            assert same(again.weights, before.weights)
            assert same(again.optimizer, before.optimizer)
            kept = min(len(again.rng), len(before.rng))
            assert len(again.rng) == workers
            assert all(torch.equal(again.rng[r], before.rng[r]) for r in range(kept))
            assert len({state.numpy().tobytes() for state in again.rng}) == workers
        chunks = (batch_of(step + 1, 0, 2, 3),)
        metrics = await train(trainer, chunks)
        assert metrics == pytest.approx(train_directly(direct, chunks), rel=1e-2, abs=1e-4)
        before = await saved(trainer, tmp_path / str(step))


async def test_a_save_is_written_while_all_go_on_and_its_failure_is_told(
    crew: Crew, tmp_path: Path
) -> None:
    trainer, slow = crew(2), tmp_path / "slow"
    slow.mkdir()
    os.mkfifo(slow / "config.json")  # who writes into it waits for a reader
    await trainer.save(slow)
    async with anyio.create_task_group() as tg:
        tg.start_soon(trainer.finalize_save)
        await train(trainer, STEPS[0])
        assert not (slow / "optimizer.json").exists()
        await anyio.to_thread.run_sync((slow / "config.json").read_bytes)
    assert SavedPolicy.read(slow).steps == 0, "it is of before the step"
    (tmp_path / "taken").write_text("a file")
    await trainer.save(tmp_path / "taken")
    with pytest.raises(FileExistsError, match="taken"):
        await trainer.finalize_save()


# failures ------------------------------------------------------------------------------


@pytest.mark.parametrize("sharding", SHARDINGS)
async def test_rows_that_one_worker_can_not_fetch_fail_the_call_on_all_and_the_step_can_be_redone(
    crew: Crew, sharding: str
) -> None:
    trainer = crew(3, sharding)
    missing = Group(
        group_id="9.0",
        ordinal=9,
        sample_ids=("9.0_g0",),
        start_weight_version=0,
        end_weight_version=0,
        commit_seq=9,
    )
    good = batch_of(1, 0)
    bad = Batch(step=1, weight_version=0, groups=(*good.groups, missing))
    assert sum("9.0_g0" in share for share in shares_of(bad, 3, trained=True)) == 1
    await trainer.begin_step(1)
    await trainer.prepare(good)
    await trainer.train_microbatches(good)
    for call in (trainer.prepare, trainer.train_microbatches):
        with pytest.raises(MissingRows) as caught:
            await call(bad)
        assert caught.value.__notes__ == ["raised by trainer-2"]
    await trainer.abandon_step()
    expected = train_directly(policy(), STEPS[0])
    assert await train(trainer, STEPS[0]) == pytest.approx(expected, rel=1e-4, abs=1e-6)


# The last two leave no whole crew behind.


async def test_a_worker_killed_while_others_wait_for_it_is_named(
    crew: Crew, hosts: list[Any]
) -> None:
    trainer = crew(3, "replicated", call_s=600)
    await trainer.begin_step(1)
    await trainer.prepare(STEPS[0][0])
    await trainer.train_microbatches(STEPS[0][0])
    began = time.monotonic()
    ray.kill(hosts.pop())
    for call in (trainer.finish_step, trainer.abandon_step):
        with pytest.raises(WorkerDied, match=r"^trainer-2 died: "):
            await call()
    assert time.monotonic() - began < 300, "nobody waited until the end of the exchange"


async def test_a_worker_that_fails_alone_in_the_midst_of_an_exchange_parts_them(
    crew: Crew, hosts: list[Any]
) -> None:
    trainer = crew(2, "fsdp2", call_s=600)
    await train(trainer, STEPS[0])
    ray.get(hosts[1].spoil.remote())
    await trainer.begin_step(2)
    began = time.monotonic()
    with pytest.raises(ValueError, match="out of memory") as caught:
        await trainer.train_microbatches(STEPS[1][0])
    assert caught.value.__notes__ == ["raised by trainer-1"]
    with pytest.raises(ScError, match=r"failed on trainer-1 .*trainer-0 waited for it"):
        await trainer.abandon_step()
    assert time.monotonic() - began < 300, "nobody waited until the end of the exchange"
