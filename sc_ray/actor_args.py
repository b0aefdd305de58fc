"""All that the controller's actor needs, and how it becomes a controller there."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec

from sc_core import (
    DataPlane,
    JsonlEventLog,
    JsonlMetrics,
    JsonlSpans,
    Ports,
    ReadyStore,
    SentStore,
    SingleController,
    in_thread,
)
from sc_ray.broadcast import VllmTransport
from sc_ray.generation.fleet import RayFleet
from sc_ray.generation.health import FleetHealth
from sc_ray.generation.port import RayEngine, RayRollouts
from sc_ray.generation.start import EngineMaker, GenerationStart
from sc_ray.hosted import EventLoop, LoopCalls, in_abandonable_thread
from sc_ray.lazy import much_is_imported
from sc_ray.parcels import Parcels
from sc_ray.placement import Places, engine_name
from sc_ray.prepared import build_estimator, build_held_out, build_prompts
from sc_ray.run_directory import EVENTS, LOGS, METRICS, SPANS
from sc_ray.run_store import open_store, run_id
from sc_ray.settings import TrainConfig, to_plain
from sc_ray.tasks import (
    Task,
)
from sc_ray.trainer.port import RayTrainer
from sc_ray.transfer_queue import TransferQueueSpec
from sc_ray.watching.services import load, services
from sc_ray.watching.sink import WatchedMetrics
from sc_ray.weight_transport import WeightFiles
from sc_ray.weights import EngineWeightSync, FileWeightSync


class SingleControllerActorArgs(msgspec.Struct, frozen=True, kw_only=True):
    """All that the actor needs: handles of the workers, and how to open its own clients."""

    config: TrainConfig
    run_dir: Path
    sent: SentStore
    rows: TransferQueueSpec
    task: Task
    trainers: Mapping[str, Any]  #: handles of `TrainerActor`s, by name, in the order of ranks
    generation: Mapping[str, Any]  #: handles of `GenerationActor`s, by name
    generation_start: GenerationStart  #: of others like them
    places: Places
    far: frozenset[str] = frozenset()  #: names of those on other nodes than the driver's
    log_dir: Path  #: what the services of `config.logger` may write into
    prometheus_port: int | None = None  #: that is free; None: no endpoint

    def __post_init__(self) -> None:
        """Import what `open` uses: the actor wants it there when it gets these arguments."""
        with much_is_imported():
            import sc_ray.partition  # noqa: F401
        load(self.config.logger)

    @property
    def metrics_url(self) -> str | None:
        """Of the endpoint for Prometheus, if there is one."""
        host = self.config.logger.prometheus_host
        host = f"[{host}]" if ":" in host else host
        port = self.prometheus_port
        return None if port is None else f"http://{host}:{port}/metrics"

    @property
    def event_loop(self) -> EventLoop:
        return self.config.event_loop

    @asynccontextmanager
    async def open(self) -> AsyncIterator[SingleController]:
        """Become the writer of the run directory, and build the controller on this event loop.

        As long as this is open, the engines are looked after.

        Raises:
            RunInUse: another process writes bundles there.
            RestoreError: the bundle changed since the driver restored from it.
        """
        config, run_dir, runner = self.config, self.run_dir, in_abandonable_thread
        with ExitStack() as opened:
            logs = logging.FileHandler(run_dir / LOGS / "controller.log")
            logs.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
            for name in ("sc_core", "sc_ray"):
                logging.getLogger(name).addHandler(logs)
            store = open_store(run_dir)
            await runner(store.open)
            opened.callback(store.close)
            ready = await self.sent.receive(
                store, runner=runner, deadlines=config.controller.async_rl.deadlines
            )
            events = await runner(JsonlEventLog, run_dir / EVENTS)
            opened.callback(events.close)
            bundle = ready.bundle
            metrics = WatchedMetrics(
                JsonlMetrics(run_dir / METRICS),
                services(
                    config.logger,
                    self.log_dir,
                    run_dir,
                    to_plain(config),
                    None if bundle is None else bundle.step,
                ),
            )
            opened.callback(metrics.close)
            spans = JsonlSpans(run_dir / SPANS, incarnation=events.incarnation)
            opened.callback(spans.close)
            trainer = RayTrainer(self.trainers)
            parcels = Parcels()
            engines = [
                RayEngine(actor, name=name, parcels=parcels if name in self.far else None)
                for name, actor in self.generation.items()
            ]
            sync = build_weight_sync(config, trainer, engines, run_id(run_dir))
            opened.callback(sync.close)
            rollouts = RayRollouts(engines, overlong_filtering=config.grpo.overlong_filtering)
            maker = EngineMaker(self.generation_start, parcels)
            opened.callback(maker.close)
            fleet = RayFleet(sync, rollouts)
            health = FleetHealth(
                fleet,
                engines,
                config.async_rl.generation_fleet_health,
                make=maker.make,
                optional=optional_engines(config),
                come=maker.come,
                start_s=config.cluster.start_deadline_s,
                in_thread=in_thread,
            )
            fleet.attach(health)
            ports = Ports(
                connect=self._connect,
                source=build_prompts(config, self.task),
                worker=rollouts,
                trainer=trainer,
                weight_sync=sync,
                fleet=fleet,
                estimator=build_estimator(config),
                events=events,
                metrics=metrics,
                spans=spans,
                bundles=store if config.checkpointing.enabled else None,
                validation=build_held_out(self.task),
            )
            controller = SingleController(
                config.controller, ready, ports, runner=runner, settings=to_plain(config)
            )
            if self.prometheus_port is not None:
                from sc_ray.watching.prometheus import PrometheusEndpoint

                ask = partial(LoopCalls().call, controller.statistics)
                host = config.logger.prometheus_host
                endpoint = PrometheusEndpoint(host, self.prometheus_port, ask)
                opened.callback(endpoint.close)
            async with anyio.create_task_group() as beside:
                beside.start_soon(health.run, controller, name="engine health")
                yield controller
                beside.cancel_scope.cancel()

    async def _connect(self, ready: ReadyStore) -> DataPlane:
        return await in_thread(self.rows.connect)


def optional_engines(config: TrainConfig) -> list[str]:
    """Names of those that join once there is room for them."""
    most = config.generation.max_workers or config.generation.workers
    return [engine_name(rank) for rank in range(config.generation.workers, most)]


def build_weight_sync(
    config: TrainConfig, trainer: RayTrainer, engines: Sequence[RayEngine], run_id: str
) -> EngineWeightSync[RayEngine]:
    """Of the kind that `generation.weight_transfer` names."""
    engine_s = config.async_rl.deadlines.weight_sync_s / 2  # the rest is for the others
    if config.generation.weight_transfer == "file":
        return FileWeightSync(trainer, engines, run_id=run_id, engine_s=engine_s)
    transport = VllmTransport(trainer, WeightFiles(run_id), send_s=engine_s)
    return EngineWeightSync(transport, engines, engine_s=engine_s)
