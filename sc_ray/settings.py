"""One run's settings: the controller's, and those of the world around it.

A configuration is a YAML or JSON file, or the name of a built-in one, then `key=value` pairs
with dotted keys: `grpo.max_num_steps=20 policy.optimizer.lr=1e-3`. `config_files` says more.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from sc_core import (
    AsyncRlConfig,
    CheckpointingConfig,
    ConfigError,
    ControllerConfig,
    GrpoConfig,
    RolloutRecoveryConfig,
    check_keys,
    decode,
)
from sc_ray.config_files import Layer, builtin_configs, merge, override_layer, read_layers
from sc_ray.elsewhere import ELSEWHERE
from sc_ray.estimators import AdvantagesConfig
from sc_ray.generation.engine import VllmConfig, WeightTransfer
from sc_ray.hosted import EventLoop
from sc_ray.losses import LossConfig
from sc_ray.model import ModelConfig
from sc_ray.trainer.config import OptimizerConfig, SchedulerConfig, Sharding
from sc_ray.watching.config import LoggerConfig

HOLDS_OUT = frozenset({"two_digit_sums"})  #: built-in tasks with held-out prompts of their own
_LEAST_GPUS = 1e-4  #: that Ray counts


class _Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class TaskConfig(_Settings, frozen=True):
    """What is trained on: a built-in task, or a JSONL file; and how it is put to the model."""

    name: str = "larger_digit"  #: of a built-in task; of no account if `jsonl` is given
    jsonl: str | None = None
    """Path of a file with one `{"prompt": …, "answer": …}` per line; `messages`, a list of
    `{"role": …, "content": …}`, may take the place of `prompt`."""
    val_jsonl: str | None = None
    """Path of such a file with the prompts of evaluations. They are sampled as those of training
    are, unless `val_temperature` says otherwise, and judged by the same reward."""
    held_out: int = 0
    """So many prompts of a built-in task are not trained on, but kept for evaluations. Like `name`,
    of no account if `jsonl` is given."""
    reward: str | None = None
    """`module:function`, called with prompt, completion and answer; None: the task's own, or an
    exact match. It returns a number, or several by name: see `Reward`."""
    environment: str | None = None
    """`module:Class`: what answers the model, turn by turn, and rewards it; see `Environment`. For
    prompts of a JSONL file, which need no `answer` then."""
    max_turns: int | None = None  #: completions of an episode; None: the task's own, or 8
    max_new_tokens: int | None = None  #: per completion; None: the task's own
    characters: str = ""
    """That the model of an `environment` reads or writes, besides those of prompts and answers; for
    a model from random weights, whose tokens are characters."""
    chat_template: bool | Literal["auto"] = "auto"
    """Whether a prompt is put to the model as a user's message in the chat template of its
    tokenizer, and an environment's reply as the next one. `auto`: if a pretrained model brings
    a template."""
    system_prompt: str | None = None
    """In front of such a prompt; None: what the template itself puts there, if anything."""
    temperature: float = 1.0  #: of sampling; above 0
    val_temperature: float | None = None
    """Of sampling in evaluations: 0 takes the likeliest token each time; None: as in training."""
    shuffle: bool = True  #: each epoch in an order of its own
    drop_last: bool = False
    """Leave out the last prompts of each epoch, as its order has them, where they are too few for
    a step. Otherwise a step may take some of one epoch and the rest of the next."""


class PolicyConfig(_Settings, frozen=True):
    """The model and how it learns."""

    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    loss: LossConfig = LossConfig()
    workers: int = 1
    """Processes that train, data-parallel, where `cluster.placement` says: each takes its share of
    every batch, and together they make the same steps as one, but for rounding. Can change between
    restarts."""
    sharding: Sharding = "fsdp2"
    """What each of several workers holds: with `fsdp2` its part of weights, gradients and
    optimizer, with `replicated` all of them."""
    device: Literal["cpu", "cuda", "auto"] = "auto"
    """What they compute on; `auto`: GPUs, if Ray has one for each worker beside those that
    `generation.gpus` takes, and torch can use them."""
    threads: int = 1  #: of torch, in each of them


class GenerationConfig(_Settings, frozen=True):
    """The processes that generate, and what computes in them."""

    workers: int = 1  #: processes that generate, and without which no run starts
    max_workers: int | None = None
    """So many there may be, if Ray finds room for them; None: `workers`. Those above `workers` are
    asked of Ray once the run goes, so that an autoscaler sees the demand. Each joins as soon as
    there is room, with the current weights; on which nodes, `cluster.placement` says. A run does
    not need them: it ends as well without, and if a node of theirs is lost, they are awaited
    anew."""
    engine: str = "torch"
    """What computes in them: `torch`, a small one of our own; `vllm`, where it is installed; or
    `module:Class`, which is called with a `sc_ray.generation.engine.GenerationSpec`."""
    batch_invariant: bool = False
    """Log-probs don't depend on what else is being generated. Of `torch` alone."""
    max_batch_rows: int = 256  #: completions that one worker makes at a time; bounds its memory
    threads: int = 1  #: of torch, in each of them
    gpus: float = 0
    """Of each of them, that Ray keeps for it: vLLM uses those. As many as its
    `tensor_parallel_size`."""
    weight_transfer: WeightTransfer = "file"
    """How weights get there. `file`: the trainer writes them into memory, and each engine loads
    them. `nccl`: the trainer's first worker sends them from its GPU straight into those of the
    engines; for `vllm`, and whole GPUs of their own."""
    vllm: VllmConfig = VllmConfig()

    def __post_init__(self) -> None:
        if not self.gpus >= 0:
            raise ConfigError(f"generation.gpus is {self.gpus}; it must be at least 0")
        if self.gpus > 1 and self.gpus % 1 or 0 < self.gpus < _LEAST_GPUS:
            raise ConfigError(
                f"generation.gpus is {self.gpus:g}; Ray keeps whole GPUs for an engine, or a share"
                f" of one, {_LEAST_GPUS:g} at least"
            )
        if self.engine == "vllm" and self.gpus and self.vllm.gpus > max(self.gpus, 1):
            raise ConfigError(
                f"generation.gpus is {self.gpus:g}, and generation.vllm.engine_args spread an"
                f" engine over {self.vllm.gpus}"
            )
        if self.weight_transfer == "nccl" and self.engine != "vllm":
            raise ConfigError(
                f"generation.weight_transfer is nccl, which is vLLM's: generation.engine is"
                f" {self.engine}"
            )
        if self.weight_transfer == "nccl" and self.gpus < 1:
            raise ConfigError(
                "generation.weight_transfer is nccl, from GPU to GPU: generation.gpus is"
                f" {self.gpus:g}; it must be at least 1"
            )


class ClusterConfig(_Settings, frozen=True):
    """The Ray that everything runs in."""

    num_cpus: int = 16
    """Of the Ray that the run starts. Logical: each process takes one, whatever the machine has."""
    storage_units: int = 2  #: processes that hold the rows; can't change between restarts
    placement: Literal["driver_node", "pack", "spread"] = "driver_node"
    """Where trainer workers, engines and storage units go. `driver_node`: to the driver's node, all
    of them. `pack` and `spread`: where a placement group of Ray's has reserved room for each before
    the first one starts, on as few nodes as possible or over as many. The controller,
    TransferQueue's index and the first trainer worker, which writes the weights, stay on the
    driver's node in any case. On each node, this code, the reward and `policy.model.pretrained`
    must be there by the same paths; so must the run directory, on a filesystem that they share,
    where there is a storage unit or a trainer worker."""
    address: str | None = None  #: of a running Ray to use instead of starting one; `auto` finds it
    spread_generation: bool = False
    """With the placement `driver_node`: whether generation workers alone go to any node of the
    cluster. On other nodes than the driver's they get weights through Ray's object store, which
    needs room for them; code and files must be there as with `spread`."""
    start_deadline_s: float = 600.0
    """Of all workers together, until they are up; before that, of the wait for room for them."""
    max_controller_restarts: int = 0
    """How often a start that lost its controller's process ends what is left, restores and goes
    on from the newest bundle by itself. A run that failed by an error is not started again."""


class TrainConfig(_Settings, frozen=True):
    """All settings of a run.

    Raises:
        ConfigError: a value is impossible, by itself or beside another one.
    """

    grpo: GrpoConfig = GrpoConfig()
    async_rl: AsyncRlConfig = AsyncRlConfig()
    rollout_recovery: RolloutRecoveryConfig = RolloutRecoveryConfig()
    checkpointing: CheckpointingConfig = CheckpointingConfig()
    task: TaskConfig = TaskConfig()
    policy: PolicyConfig = PolicyConfig()
    generation: GenerationConfig = GenerationConfig()
    advantages: AdvantagesConfig = AdvantagesConfig()
    cluster: ClusterConfig = ClusterConfig()
    logger: LoggerConfig = LoggerConfig()
    event_loop: EventLoop = "asyncio"  #: that the controller runs on

    def __post_init__(self) -> None:
        for key, value in (
            ("policy.workers", self.policy.workers),
            ("policy.threads", self.policy.threads),
            ("generation.workers", self.generation.workers),
            ("generation.threads", self.generation.threads),
            ("generation.max_batch_rows", self.generation.max_batch_rows),
            ("cluster.num_cpus", self.cluster.num_cpus),
            ("cluster.storage_units", self.cluster.storage_units),
            ("task.max_new_tokens", self.task.max_new_tokens),
            ("task.max_turns", self.task.max_turns),
        ):
            if value is not None and value < 1:
                raise ConfigError(f"{key} is {value}; it must be at least 1")
        most = self.generation.max_workers
        if most is not None and most < self.generation.workers:
            raise ConfigError(
                f"generation.max_workers is {most}, less than the {self.generation.workers} of"
                " generation.workers"
            )
        at_least = self.async_rl.generation_fleet_health.min_healthy_shards
        if at_least > self.generation.workers:
            raise ConfigError(
                f"async_rl.generation_fleet_health.min_healthy_shards is {at_least}, more than the"
                f" {self.generation.workers} of generation.workers"
            )
        if self.generation.weight_transfer == "nccl" and self.policy.device == "cpu":
            raise ConfigError(
                "generation.weight_transfer is nccl, from GPU to GPU: policy.device is cpu"
            )
        if self.cluster.max_controller_restarts < 0:
            raise ConfigError(
                f"cluster.max_controller_restarts is {self.cluster.max_controller_restarts}; it"
                " must be at least 0"
            )
        if not self.cluster.start_deadline_s > 0:
            raise ConfigError(
                f"cluster.start_deadline_s is {self.cluster.start_deadline_s}; it must be above 0"
            )
        if self.task.held_out < 0:
            raise ConfigError(f"task.held_out is {self.task.held_out}; it must be at least 0")
        own = self.task.held_out or self.task.name in HOLDS_OUT
        mine = self.task.jsonl is None and own
        if self.grpo.evaluates and self.task.val_jsonl is None and not mine:
            raise ConfigError(
                "grpo.val_period, val_at_start or val_at_end asks for an evaluation, and there are"
                " no prompts for it: set task.val_jsonl, or task.held_out of a built-in task"
            )
        if not 0 < self.task.temperature < math.inf:
            raise ConfigError(
                f"task.temperature is {self.task.temperature}; it must be above 0, and finite:"
                " training compares samples (of evaluations, task.val_temperature may be 0)"
            )
        at = self.task.val_temperature
        if at is not None and not 0 <= at < math.inf:
            raise ConfigError(f"task.val_temperature is {at}; it must be at least 0, and finite")
        if (
            self.advantages.reward_weights is not None
            and self.task.reward is None
            and self.task.environment is None
        ):
            raise ConfigError(
                "advantages.reward_weights is set, and the task's own reward is one number: set"
                " task.reward or task.environment to what gives several by name"
            )
        if self.task.reward is not None and self.task.environment is not None:
            raise ConfigError(
                "task.reward and task.environment are both set; an environment gives rewards itself"
            )
        if self.task.environment is not None and self.task.jsonl is None:
            raise ConfigError("task.environment is set, and its prompts are not: set task.jsonl")
        loop = self.event_loop
        if loop != "asyncio" and importlib.util.find_spec(loop) is None:
            raise ConfigError(
                f"event_loop is {loop}, which is not installed: pip install"
                f" 'single-controller[{loop}]'"
            )
        self.policy.scheduler.over(self.grpo.max_num_steps)  # as does this
        _ = self.controller  # it refuses what is impossible

    @property
    def controller(self) -> ControllerConfig:
        """The part that the controller knows."""
        return ControllerConfig(
            grpo=self.grpo,
            async_rl=self.async_rl,
            rollout_recovery=self.rollout_recovery,
            checkpointing=self.checkpointing,
        )

    @property
    def cpus_needed(self) -> int:
        """Ray CPUs of all processes: trainers, generation, controller, and TransferQueue's own."""
        controller = index = 1
        workers = self.policy.workers + self.generation.workers
        return workers + controller + index + self.cluster.storage_units

    @property
    def cpus_needed_here(self) -> int:
        """Those of them that must be on the driver's node."""
        if self.cluster.placement != "driver_node":
            return 3  # the controller, TransferQueue's index and the first trainer worker
        elsewhere = self.generation.workers if self.cluster.spread_generation else 0
        return self.cpus_needed - elsewhere


def load_config(source: str, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a configuration file, or the built-in one of that name, and apply `key=value` pairs.

    A file's `defaults` names another one that it changes. The evaluations of a built-in one are
    of its own task: a `task.jsonl` without `task.val_jsonl` turns them off. Likewise, its
    `advantages.normalize` is of `grpo` alone.

    Raises:
        ConfigError: no such configuration, unreadable, an unknown key (with the nearest known
            one, or the one that does what a NeMo RL user knows it for), an interpolation of what
            is not there, or an impossible value.
    """
    layers = read_layers(source)
    for layer in layers:  # so that a mistake is reported where it was made
        check_keys(layer.data, TrainConfig, source=layer.source, elsewhere=ELSEWHERE)
    if overrides:
        layers.append(override_layer(overrides, layers))

    def decoded(layers: Sequence[Layer]) -> TrainConfig:
        data = merge(layers)
        if source in builtin_configs():
            _evaluate_no_other_task(data, overrides)
            _normalize_no_other_estimator(data, overrides)
        return decode(data, TrainConfig, source=layers[-1].source, elsewhere=ELSEWHERE)

    try:
        return decoded(layers)
    except ConfigError as found:
        wrong = found
    for last in range(len(layers) - 1, 0, -1):  # back to the first layer that leaves it wrong
        try:
            decoded(layers[:last])
        except ConfigError as earlier:
            wrong = earlier
        else:
            break
    raise wrong


def _evaluate_no_other_task(data: dict[str, Any], overrides: Sequence[str]) -> None:
    task = data.get("task") or {}
    if task.get("jsonl") is not None and task.get("val_jsonl") is None:
        asked_for = {pair.partition("=")[0] for pair in overrides}
        for key in ("val_period", "val_at_start", "val_at_end"):
            if f"grpo.{key}" not in asked_for:
                data.get("grpo", {}).pop(key, None)


def _normalize_no_other_estimator(data: dict[str, Any], overrides: Sequence[str]) -> None:
    advantages = data.get("advantages")
    asked_for = any(pair.startswith("advantages.normalize=") for pair in overrides)
    if isinstance(advantages, dict) and not asked_for:
        if advantages.get("estimator", "grpo") != "grpo":
            advantages.pop("normalize", None)


def to_plain(config: TrainConfig) -> Mapping[str, Any]:
    """The settings as plain data, which `decode` reads back."""
    plain: dict[str, Any] = msgspec.to_builtins(config)
    return plain
