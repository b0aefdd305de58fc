"""Who gets the GPUs of a run. Ray shows each process none but its own."""

from __future__ import annotations

import math

import ray

from sc_core import (
    ConfigError,
)
from sc_ray.settings import TrainConfig


def trainer_device(config: TrainConfig) -> str:
    """`cpu` or `cuda`: what the trainer computes on, beside the engines of this Ray cluster.

    Raises: as `share_gpus`.
    """
    there = ray.cluster_resources().get("GPU", 0.0)
    usable = False
    if there:
        import torch

        usable = torch.cuda.is_available()
    return share_gpus(config, there, usable=usable)


def share_gpus(config: TrainConfig, there: float, *, usable: bool) -> str:
    """As `trainer_device`, with so many GPUs, which torch can use or not.

    Raises:
        ConfigError: engines or trainer would wait for GPUs for ever, or meet on the same one.
    """
    generation, workers = config.generation, config.policy.workers
    engines = taken(generation.workers, generation.gpus)
    if engines > there:
        raise ConfigError(
            f"generation.gpus is {generation.gpus:g}: {generation.workers} generation workers need"
            f" {engines:g} GPUs of Ray, which has {there:g}"
        )
    if usable and generation.engine == "vllm" and not generation.gpus:
        raise ConfigError(
            "generation.gpus is 0, and vLLM would take a GPU that Ray keeps for nobody: set it to"
            " the GPUs of each engine, tensor_parallel_size of them"
        )
    enough = usable and there - engines >= workers
    if config.policy.device == "cuda" and not usable:
        raise ConfigError(
            f"policy.device is cuda, and torch finds no GPU that it can use; Ray has {there:g}"
        )
    if config.policy.device == "cuda" and not enough:
        raise ConfigError(
            f"policy.device is cuda: {workers} trainer workers need as many GPUs of Ray, which has"
            f" {there:g}, and {engines:g} of them are for generation"
        )
    if generation.weight_transfer == "nccl" and not enough:
        raise ConfigError(
            f"generation.weight_transfer is nccl: {workers} trainer workers need a GPU each, beside"
            f" {engines:g} for generation; Ray has {there:g}"
            + ("" if usable else ", and torch can use none")
        )
    return "cuda" if enough and config.policy.device != "cpu" else "cpu"


def taken(engines: int, gpus: float) -> float:
    """GPUs that so many engines take; a share of one lies on one GPU, beside others that fit."""
    if not 0 < gpus < 1:
        return engines * gpus
    return math.ceil(engines / math.floor(1 / gpus + 1e-9))
