"""Everything before the actor: checks, Ray, TransferQueue, the restore, the workers.

It happens on the driver, in this order, and what was started is shut down in the reverse one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import ray

from sc_core import (
    candidates,
    check_resume,
    in_thread,
    restore,
)
from sc_ray.actor import SingleControllerActor
from sc_ray.actor_args import SingleControllerActorArgs
from sc_ray.annotated import plain
from sc_ray.before_ray import Resume, metrics_port
from sc_ray.cluster import kill, start_ray
from sc_ray.gpus import trainer_device
from sc_ray.memory import remove_leftovers
from sc_ray.placement import CONTROLLER, reserve
from sc_ray.prepared import Prepared, build_prompts
from sc_ray.run_directory import CHECKPOINTS, LOGS, keep_config
from sc_ray.run_store import become_writer, open_store, run_id
from sc_ray.settings import TrainConfig
from sc_ray.start_workers import check_run_files, start_generation, start_trainer, until_up
from sc_ray.trainer.port import RayTrainer
from sc_ray.transfer_queue import TransferQueueBootstrap, TransferQueueSpec


def setup_single_controller(
    config: TrainConfig,
    run_dir: Path,
    resume: Resume = "auto",
    *,
    on_exit: ExitStack,
    prepared: Prepared | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> SingleControllerActorArgs:
    """Start and restore everything that a controller needs; `say` hears of each stage.

    Blocks, for some 20 s. Call it in the main thread: Ray's processes end with the thread that
    started them. Whatever was started is shut down when `on_exit` closes, also if this raises.

    Raises:
        ConfigError: what the settings ask for is not there, or more than the cluster has.
        RunInUse: another process writes to `run_dir`.
        RestoreError: no bundle can be used, or the settings can't go on from it.
        WorkerDied: a worker could not start.
        CallTimeout: one was not up by `cluster.start_deadline_s`.
    """
    prepared = prepared or Prepared.of(config)
    (run_dir / LOGS).mkdir(parents=True, exist_ok=True)
    store = open_store(run_dir)
    become_writer(store, say)  # before Ray: it refuses a directory that can't be written
    on_exit.callback(remove_leftovers, run_id(run_dir))  # of an actor that did not live to do it
    with ExitStack() as here:
        here.callback(store.close)  # the actor opens it again
        check_resume(store, resume)
        port = metrics_port(config.logger)
        keep_config(run_dir, plain(config))
        say("starting Ray")
        start_ray(config, run_dir / LOGS, on_exit)
        device = trainer_device(config)
        places = reserve(config, device, on_exit, say)
        shares = config.checkpointing.enabled or bool(candidates(run_dir / CHECKPOINTS))
        check_run_files(config, run_dir, places, shares=shares)
        start, generation = start_generation(config, prepared, run_id(run_dir), places, on_exit)
        say("starting TransferQueue")
        deadlines = config.async_rl.deadlines
        rows = TransferQueueSpec(
            storage_units=config.cluster.storage_units,
            deadline_s=deadlines.data_plane_s,
            snapshot_deadline_s=deadlines.snapshot_s,
        )
        bootstrap = TransferQueueBootstrap(rows, places)
        on_exit.callback(bootstrap.close)
        trainers, rendezvous = start_trainer(config, prepared, rows, device, places, on_exit)
        say("restoring")
        ready = anyio.run(
            partial(
                restore,
                store,
                bootstrap,
                config.controller,
                runner=in_thread,
                resume=resume,
                source_fingerprint=build_prompts(config, prepared.task).fingerprint(),
            )
        )
        bundle = ready.bundle
        say(
            "starting afresh"
            if bundle is None
            else f"resuming from {bundle.path}, step {bundle.step} of {config.grpo.max_num_steps}"
        )
        say("waiting for trainers and engines")
        far = anyio.run(
            until_up,
            RayTrainer(trainers),
            rendezvous,
            generation,
            config.cluster.start_deadline_s,
        )
    return SingleControllerActorArgs(
        config=config,
        run_dir=run_dir,
        sent=ready.send(),
        rows=rows,
        task=prepared.task,
        trainers=trainers,
        generation=generation,
        generation_start=start,
        places=places,
        far=far,
        log_dir=config.logger.directory(run_dir),
        prometheus_port=port,
    )


def start_actor(args: SingleControllerActorArgs, on_exit: ExitStack) -> Any:
    """The actor's handle. It runs on this node: it shares run directory and memory with others."""
    actor = (
        ray.remote(SingleControllerActor)
        .options(num_cpus=1, max_restarts=0, scheduling_strategy=args.places.of(CONTROLLER))
        .remote(args)
    )
    on_exit.callback(kill, actor)
    return actor
