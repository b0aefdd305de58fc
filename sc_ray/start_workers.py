"""The workers of a run, from the driver: what they are told, where they go, until they are up."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import ray

from sc_core import (
    CallTimeout,
)
from sc_ray.cluster import kill
from sc_ray.generation.engine import GenerationSpec
from sc_ray.generation.port import RayEngine
from sc_ray.generation.start import GenerationStart
from sc_ray.placement import CONTROLLER, Places, engine_name, unit_name
from sc_ray.settings import TrainConfig
from sc_ray.shared_files import Use, check_files
from sc_ray.trainer.port import RayTrainer
from sc_ray.trainer.seat import LOOPBACK, Seat, worker_name
from sc_ray.trainer.worker import TrainerActor, TrainerSpec
from sc_ray.transfer_queue import TransferQueueSpec

if TYPE_CHECKING:
    from sc_ray.trainer.peers import Rendezvous

from sc_ray.prepared import Prepared


def check_run_files(config: TrainConfig, run_dir: Path, places: Places, *, shares: bool) -> None:
    """Storage units write their part of a bundle, and read it, as trainer workers read theirs."""
    here = places.nodes[CONTROLLER]
    units = {unit_name(rank) for rank in range(config.cluster.storage_units)}
    trainers = {worker_name(rank) for rank in range(config.policy.workers)}
    uses: dict[str, Use] = {}
    for name, node in places.nodes.items():
        if node != here:
            use = uses.setdefault(node, Use())
            use.processes.append(name)
            use.shares |= shares and name in units | trainers
            use.writes |= shares and name in units
    if uses:
        model = config.policy.model.pretrained and os.path.abspath(config.policy.model.pretrained)
        deadline_s = config.cluster.start_deadline_s
        check_files(run_dir, uses, model=model or None, deadline_s=deadline_s)


def start_generation(
    config: TrainConfig,
    prepared: Prepared,
    run_id: str,
    places: Places,
    on_exit: ExitStack,
) -> tuple[GenerationStart, dict[str, Any]]:
    spec = GenerationSpec(
        model=config.policy.model,
        tokenizer=prepared.tokenizer,
        task=prepared.task,
        run_seed=config.grpo.seed,
        run_id=run_id,
        temperature=config.task.temperature,
        val_temperature=config.task.val_temperature,
        chat=prepared.chat,
        system_prompt=config.task.system_prompt,
        engine=config.generation.engine,
        batch_invariant=config.generation.batch_invariant,
        max_batch_rows=config.generation.max_batch_rows,
        threads=config.generation.threads,
        weight_transfer=config.generation.weight_transfer,
        vllm=config.generation.vllm,
    )
    start = GenerationStart(spec=spec, places=places, gpus=config.generation.gpus)
    actors: dict[str, Any] = {}
    for rank in range(config.generation.workers):
        name = engine_name(rank)
        actors[name] = start.start(name)
        on_exit.callback(kill, actors[name])
    return start, actors


def start_trainer(
    config: TrainConfig,
    prepared: Prepared,
    rows: TransferQueueSpec,
    device: str,
    places: Places,
    on_exit: ExitStack,
) -> tuple[dict[str, Any], Rendezvous | None]:
    workers = config.policy.workers
    spec = TrainerSpec(
        model=config.policy.model,
        tokenizer=prepared.tokenizer,
        rows=rows,
        optimizer=config.policy.optimizer,
        scheduler=config.policy.scheduler.over(config.grpo.max_num_steps),
        loss=config.policy.loss,
        temperature=config.task.temperature,
        seed=config.grpo.seed,
        threads=config.policy.threads,
        device=device,
        sharding=config.policy.sharding,
        reference=config.policy.loss.needs_reference,
    )
    rendezvous, seats = None, list[Seat | None]([None])
    if workers > 1:
        start_s, call_s = config.cluster.start_deadline_s, config.async_rl.deadlines.trainer_s
        from sc_ray.trainer.peers import Rendezvous  # torch comes with it

        names = [worker_name(rank) for rank in range(workers)]
        one_node = len({places.nodes[name] for name in names}) == 1
        host = LOOPBACK if one_node else ray.util.get_node_ip_address()
        rendezvous = Rendezvous(workers, host=host, start_s=start_s, call_s=call_s)
        on_exit.callback(rendezvous.close)
        seats = list(rendezvous.seats)
    actors: dict[str, Any] = {}
    for rank, seat in enumerate(seats):
        name = worker_name(rank)
        where = TrainerActor.options(
            scheduling_strategy=places.of(name), num_gpus=1 if device == "cuda" else 0
        )
        actors[name] = where.remote(spec, seat)
        on_exit.callback(kill, actors[name])
    return actors, rendezvous


async def until_up(
    trainer: RayTrainer,
    rendezvous: Rendezvous | None,
    generation: Mapping[str, Any],
    deadline_s: float,
) -> frozenset[str]:
    """Wait for every worker; returns the names of those that are on another node."""
    with anyio.move_on_after(deadline_s) as deadline:
        await trainer.ping()
    if deadline.cancelled_caught:
        late = None if rendezvous is None else rendezvous.missing()
        raise CallTimeout(f"starting {', '.join(late or trainer.names)}", deadline_s)
    here = ray.get_runtime_context().get_node_id()
    nodes = await _nodes_of(generation, deadline_s)
    return frozenset(name for name, node in nodes.items() if node != here)


async def _nodes_of(generation: Mapping[str, Any], deadline_s: float) -> dict[str, str]:
    """Wait for the generation workers; returns the node of each."""
    nodes: dict[str, str] = {}
    for name, actor in generation.items():
        with anyio.move_on_after(deadline_s) as deadline:
            engine = RayEngine(actor, name=name)
            await engine.ready()
            nodes[name] = await engine.node_id()
        if deadline.cancelled_caught:
            raise CallTimeout(f"starting {name}", deadline_s)
    return nodes
