"""A model spread over the trainer workers (FSDP2), and its tensors whole again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from sc_ray.trainer.peers import Peers


def shard(model: torch.nn.Module, peers: Peers) -> None:
    """Leave each worker its part of every parameter; a forward gathers one block at a time.

    Gradients become the *sum* over the workers. From here on, every forward and backward is an
    exchange: all workers must make equally many.
    """
    # It loads, now, what a first forward would wait for.
    torch.compiler.disable(lambda: None)  # type: ignore[no-untyped-call]
    transformer: Any = model
    blocks = set(transformer._no_split_modules or ())  # names of the classes of its layers
    for module in model.modules():
        if type(module).__name__ in blocks:
            fully_shard(module, mesh=peers.mesh)
    # The root, too: what it gathered would else outlive a load in a forward without backward.
    fully_shard(model, mesh=peers.mesh, reshard_after_forward=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo can't do it in another way


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor; every worker calls this, for the same ones in one order."""
    full: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full


def copies(tensors: Mapping[str, torch.Tensor], peers: Peers | None) -> dict[str, torch.Tensor]:
    """Whole tensors, copied to the CPU; none on other workers than the first. As `whole`."""
    found = {}
    for name, tensor in tensors.items():
        full = whole(tensor)
        if peers is None or peers.rank == 0:
            found[name] = full.detach().to("cpu", copy=True)
    return found


def parts(
    tensors: Mapping[str, torch.Tensor], like: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """This worker's parts of whole tensors, spread as those of the same name. Asks nobody.

    One that has another shape, or no namesake, is left as it is.
    """
    found = dict(tensors)
    for name, target in like.items():
        if isinstance(target, DTensor) and name in found and found[name].shape == target.shape:
            found[name] = distribute_tensor(
                found[name].to(target.device),
                target.device_mesh,
                target.placements,
                src_data_rank=None,  # everyone has the whole tensor already
            )
    return found
