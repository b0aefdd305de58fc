"""Everything before the actor: checks, Ray, TransferQueue, the restore, the workers.

It happens on the driver, in this order, and what was started is shut down in the reverse one.
"""

from __future__ import annotations

import difflib
import hashlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import anyio
import msgspec
import ray

from sc_core import (
    AdvantageEstimator,
    BundleStore,
    CallTimeout,
    ConfigError,
    DataPlane,
    JsonlEventLog,
    JsonlMetrics,
    JsonlSpans,
    Ports,
    ReadyStore,
    RunInUse,
    SentStore,
    SingleController,
    build_sampler,
    candidates,
    check_capacity,
    check_resume,
    check_scope,
    in_thread,
    restore,
)
from sc_ray.actor import SingleControllerActor
from sc_ray.annotated import plain
from sc_ray.broadcast import VllmTransport
from sc_ray.cluster import check_cpus, kill, start_ray
from sc_ray.generation.engine import GenerationSpec, check_engine
from sc_ray.generation.fleet import RayFleet
from sc_ray.generation.health import FleetHealth
from sc_ray.generation.port import RayEngine, RayRollouts
from sc_ray.generation.start import EngineMaker, GenerationStart
from sc_ray.gpus import trainer_device
from sc_ray.hosted import EventLoop, LoopCalls, in_abandonable_thread
from sc_ray.lazy import much_is_imported
from sc_ray.memory import remove_leftovers
from sc_ray.parcels import Parcels
from sc_ray.phrasing import Phrasing
from sc_ray.placement import CONTROLLER, Places, engine_name, reserve, unit_name
from sc_ray.prompts import HeldOutPrompts, TaskPrompts
from sc_ray.run_directory import CHECKPOINTS, EVENTS, LOGS, METRICS, SPANS, keep_config
from sc_ray.settings import TaskConfig, TrainConfig, to_plain
from sc_ray.shared_files import Use, check_files
from sc_ray.tasks import (
    Task,
    guess_digit,
    hold_out,
    larger_digit,
    load_environment,
    load_jsonl,
    load_reward,
    two_digit_sums,
)
from sc_ray.tasks.jsonl import read_prompts
from sc_ray.tokenizer import Tokenizer
from sc_ray.trainer.port import RayTrainer
from sc_ray.trainer.seat import LOOPBACK, Seat, worker_name
from sc_ray.trainer.worker import TrainerActor, TrainerSpec
from sc_ray.transfer_queue import TransferQueueBootstrap, TransferQueueSpec
from sc_ray.watching.config import LoggerConfig
from sc_ray.watching.services import load, services
from sc_ray.watching.sink import WatchedMetrics
from sc_ray.weight_transport import WeightFiles
from sc_ray.weights import EngineWeightSync, FileWeightSync

if TYPE_CHECKING:
    from sc_ray.trainer.peers import Rendezvous

Resume = Literal["auto", "never"] | Path

_ORPHANS_LIVE_S = 60.0
"""A killed driver's actor ends as soon as Ray's daemons, which die with the driver, are gone."""


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """What the settings amount to, once they have been checked; starts nothing."""

    task: Task
    tokenizer: Tokenizer
    chat: bool = False  #: whether prompts go into the chat template

    @classmethod
    def of(cls, config: TrainConfig) -> Prepared:
        """Check what can be checked without Ray.

        Raises:
            ConfigError: the task, its reward, a model or a logger is not there; a step could
                never fill; or Ray would have too few CPUs.
        """
        config.logger.check()
        task = build_task(config.task, seed=config.grpo.seed)
        pretrained = config.policy.model.pretrained
        if pretrained and not Path(pretrained).is_dir():
            raise ConfigError(f"policy.model.pretrained: there is no directory {pretrained}")
        tokenizer = (
            Tokenizer.load(Path(pretrained))
            if pretrained
            else Tokenizer.of_characters(task.alphabet())
        )
        chat = _uses_chat_template(config, tokenizer)
        phrasing = Phrasing(tokenizer=tokenizer, chat=chat, system_prompt=config.task.system_prompt)
        phrasing.check(task)
        check_engine(config.generation.engine, batch_invariant=config.generation.batch_invariant)
        check_scope(config.controller, build_estimator(config))
        sampler = build_sampler(config.async_rl.sampler, config.grpo.num_prompts_per_step)
        check_capacity(config.controller, sampler)
        if config.cluster.address is None:
            check_cpus(config, config.cluster.num_cpus)
        return cls(task=task, tokenizer=tokenizer, chat=chat)


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
    _become_writer(store, say)  # before Ray: it refuses a directory that can't be written
    keep_config(run_dir, plain(config))
    on_exit.callback(remove_leftovers, run_id(run_dir))  # of an actor that did not live to do it
    with ExitStack() as here:
        here.callback(store.close)  # the actor opens it again
        check_resume(store, resume)
        port = _metrics_port(config.logger)
        say("starting Ray")
        start_ray(config, run_dir / LOGS, on_exit)
        device = trainer_device(config)
        places = reserve(config, device, on_exit, say)
        shares = config.checkpointing.enabled or bool(candidates(run_dir / CHECKPOINTS))
        _check_files(config, run_dir, places, shares=shares)
        start, generation = _start_generation(config, prepared, run_id(run_dir), places, on_exit)
        say("starting TransferQueue")
        deadlines = config.async_rl.deadlines
        rows = TransferQueueSpec(
            storage_units=config.cluster.storage_units,
            deadline_s=deadlines.data_plane_s,
            snapshot_deadline_s=deadlines.snapshot_s,
        )
        bootstrap = TransferQueueBootstrap(rows, places)
        on_exit.callback(bootstrap.close)
        trainers, rendezvous = _start_trainer(config, prepared, rows, device, places, on_exit)
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
            _until_up,
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


def _metrics_port(config: LoggerConfig) -> int | None:
    """A port that can be listened on now: the last life of the run is over."""
    if config.prometheus_port is None:
        return None
    from sc_ray.watching.prometheus import free_port

    return free_port(config.prometheus_host, config.prometheus_port)


def _become_writer(store: BundleStore, say: Callable[[str], None]) -> None:
    """Open the store, once the processes of a driver that was killed have noticed and ended."""
    give_up = time.monotonic() + _ORPHANS_LIVE_S
    waiting = False
    while True:
        try:
            return store.open()
        except RunInUse:
            if time.monotonic() > give_up:
                raise
        if not waiting:
            say("waiting for the processes of an earlier start to end")
            waiting = True
        time.sleep(0.1)


def start_actor(args: SingleControllerActorArgs, on_exit: ExitStack) -> Any:
    """The actor's handle. It runs on this node: it shares run directory and memory with others."""
    actor = (
        ray.remote(SingleControllerActor)
        .options(num_cpus=1, max_restarts=0, scheduling_strategy=args.places.of(CONTROLLER))
        .remote(args)
    )
    on_exit.callback(kill, actor)
    return actor


def build_task(config: TaskConfig, *, seed: int) -> Task:
    """The task that the settings name.

    Raises:
        ConfigError: there is no such task, file or reward function, or a line is no prompt.
    """
    reward = None if config.reward is None else load_reward(config.reward)
    environment = None if config.environment is None else load_environment(config.environment)
    turns = config.max_turns
    if config.jsonl is not None:
        task = load_jsonl(Path(config.jsonl), reward=reward, environment=environment)
        turns = turns or (_TURNS if environment else None)
    elif config.name in _BUILT_IN:
        task = _BUILT_IN[config.name](seed=seed)
        if config.held_out:
            task = hold_out(task, config.held_out)
    else:
        near = difflib.get_close_matches(config.name, _BUILT_IN, n=1)
        hint = f"did you mean {near[0]}?" if near else f"built in: {', '.join(_BUILT_IN)}"
        raise ConfigError(f"task.name: there is no task {config.name}; {hint}")
    if config.val_jsonl is not None:
        held_out = read_prompts(Path(config.val_jsonl), answers=task.environment is None)
        task = msgspec.structs.replace(task, held_out=held_out)
    if reward is not None and task.environment is not None:
        raise ConfigError(f"task.reward is set, and task {task.name} has an environment")
    return msgspec.structs.replace(
        task,
        reward=reward or task.reward,
        max_turns=turns or task.max_turns,
        max_new_tokens=config.max_new_tokens or task.max_new_tokens,
        characters=task.characters + config.characters,
    )


def _uses_chat_template(config: TrainConfig, tokenizer: Tokenizer) -> bool:
    wanted = config.task.chat_template
    if wanted == "auto":
        return bool(config.policy.model.pretrained) and tokenizer.has_chat_template
    if wanted and not tokenizer.has_chat_template:
        raise ConfigError("task.chat_template is true, and the tokenizer has no chat template")
    return wanted


def build_prompts(config: TrainConfig, task: Task) -> TaskPrompts:
    """The stream of the task's prompts, from its beginning."""
    return TaskPrompts(
        task.prompts,
        seed=config.grpo.seed,
        shuffle=config.task.shuffle,
        max_epochs=config.grpo.max_num_epochs,
        batch=config.grpo.num_prompts_per_step if config.task.drop_last else 1,
    )


def build_held_out(task: Task) -> HeldOutPrompts | None:
    """The prompts of evaluations; None if the task has none."""
    return HeldOutPrompts(task.held_out) if task.held_out else None


def build_estimator(config: TrainConfig) -> AdvantageEstimator:
    """Raises ConfigError if a group is too small for it."""
    loss = config.policy.loss
    return config.advantages.build(
        group_size=config.grpo.num_generations_per_prompt,
        kl_in_reward=loss.reference_policy_kl_penalty if loss.use_kl_in_reward else 0.0,
    )


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


def open_store(run_dir: Path) -> BundleStore:
    """The run's bundles, not opened yet. `SC_BUNDLE_KEY` signs their manifests, if it is set."""
    key = os.environ.get("SC_BUNDLE_KEY")
    return BundleStore(run_dir / CHECKPOINTS, key=key.encode() if key else None)


def run_id(run_dir: Path) -> str:
    """The same for every start of a run on this machine, so that a start finds leftovers."""
    return hashlib.sha256(os.fsencode(run_dir.resolve())).hexdigest()[:16]


_BUILT_IN = {
    "larger_digit": larger_digit,
    "guess_digit": guess_digit,
    "two_digit_sums": two_digit_sums,
}
_TURNS = 8
"""Of an episode with an environment of the user's, unless the settings say more."""


# workers -------------------------------------------------------------------------------


def _check_files(config: TrainConfig, run_dir: Path, places: Places, *, shares: bool) -> None:
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


def _start_generation(
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


def _start_trainer(
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


async def _until_up(
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
