"""The trainer's end of a broadcast of weights: the first worker sends, others gather with it."""

from __future__ import annotations

import concurrent.futures
import logging
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import ray
import torch

from sc_core import (
    WeightSyncError,
)
from sc_ray.bridge import begin_in_thread
from sc_ray.broadcast import SendPlan, Sent
from sc_ray.trainer.engine_calls import GRACE_S, EngineCalls
from sc_ray.trainer.policy import Policy
from sc_ray.trainer.sharding import whole

_LOOPBACK = "127.0.0.1"
logger = logging.getLogger(__name__)


class Declared(NamedTuple):
    """What vLLM calls a `ParamMeta`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class FullWeights:
    """What vLLM calls a `WeightSource`: all tensors of a policy, whole, one after the other.

    Each one is gathered when its turn comes, by all trainer workers together: whatever becomes
    of a broadcast, every worker must go through all of them.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._pass: Iterator[tuple[str, torch.Tensor]] = iter(())

    def metadata(self) -> list[Declared]:
        return [
            Declared(name, tensor.dtype, tuple(tensor.shape))
            for name, tensor in self._policy.weights().items()
        ]

    def begin(self) -> None:
        """Start at the first one; until the next time, there is this one pass."""
        self._pass = self._gather()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._pass

    def finish(self) -> None:
        """Gather what is left of the pass, for nobody."""
        for _ in self._pass:
            pass

    def _gather(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._policy.weights().items():
            yield name, whole(tensor)


Connect = Callable[[str, int, int, EngineCalls, FullWeights], Any]
"""From an address, a port and the number of ranks: what vLLM calls a
`TrainerWeightTransferEngine`, once all ranks have met. Blocks."""


def over_nccl(address: str, port: int, ranks: int, calls: EngineCalls, weights: FullWeights) -> Any:
    """On this process's own GPU, the only one that Ray lets it see."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    endpoint = WeightTransferTrainerFactory.trainer_init(
        NCCLTrainerInitInfo(master_address=address, master_port=port, world_size=ranks, rank=0),
        client=calls,
        source=weights,
    )
    if endpoint.model_update_group.disabled:  # each broadcast would silently do nothing
        raise WeightSyncError("vLLM found no NCCL, or VLLM_DISABLE_PYNCCL is set")
    return endpoint


class WeightSender:
    """Sends a policy's weights; every worker has one, and all get the same calls.

    Args:
        first: whether this is the worker that sends.
    """

    def __init__(self, policy: Policy, *, first: bool, connect: Connect = over_nccl) -> None:
        self._policy = policy
        self._first = first
        self._connect = connect
        self._group: _Group | None = None
        self._stuck: concurrent.futures.Future[None] | None = None

    def send(self, plan: SendPlan) -> Sent:
        """Bring the current weights to all engines of the plan. Blocks.

        What an engine does wrong is told in the result, not raised.

        Raises:
            WeightSyncError: the trainer could not send.
        """
        steps = self._policy.steps
        if not self._first:
            weights = FullWeights(self._policy)
            weights.begin()
            weights.finish()
            return Sent(steps=steps)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the step, before another thread reads what it wrote
        group = self._group_for(plan)
        group.weights.begin()
        group.calls.begin(plan)
        failure = self._broadcast(group, plan)
        group.weights.finish()
        if failure is None:
            return Sent(steps=steps, confirmed=group.calls.confirmed)
        self._group = None
        group.close()
        if not (group.calls.failed or group.calls.dead):
            raise WeightSyncError(f"the trainer could not send its weights: {failure}") from failure
        return Sent(steps=steps, failed=group.calls.failed, dead=group.calls.dead)

    def _group_for(self, plan: SendPlan) -> _Group:
        if self._group is None or self._group.number != plan.group:
            if self._group is not None:
                self._group.close()
            self._group = _Group(plan, FullWeights(self._policy))
        return self._group

    def _broadcast(self, group: _Group, plan: SendPlan) -> BaseException | None:
        """None, or what it failed of. It does not outlive its deadline by much."""
        if self._stuck is not None and not self._stuck.done():
            return WeightSyncError("an earlier broadcast still hangs in this process")
        at_work = begin_in_thread("broadcast", lambda: group.send(plan, self._connect))
        allowed_s = None if plan.deadline_s is None else plan.deadline_s + GRACE_S
        concurrent.futures.wait(
            [at_work, group.calls.broken], allowed_s, return_when=concurrent.futures.FIRST_COMPLETED
        )
        concurrent.futures.wait([at_work], 0.1)  # it may be about to say why
        if not at_work.done():
            group.close()  # the way out of a broadcast that an engine does not receive
            concurrent.futures.wait([at_work], GRACE_S)
        if not at_work.done():
            logger.error("a broadcast of weights hangs, and can't be ended")
            self._stuck = at_work
            return TimeoutError("it hangs")
        return at_work.exception()


class _Group:
    """Trainer and engines that have met, or are about to."""

    def __init__(self, plan: SendPlan, weights: FullWeights) -> None:
        self.number = plan.group
        self.weights = weights
        self.calls = EngineCalls(plan.engines)
        self._endpoint: Any = None
        self._closed = False

    def send(self, plan: SendPlan, connect: Connect) -> None:
        if self._endpoint is None:
            address = ray.util.get_node_ip_address() if plan.far else _LOOPBACK
            ranks = 1 + self.calls.count_workers()
            self._endpoint = connect(address, _free_port(address), ranks, self.calls, self.weights)
        if self._closed:
            self._endpoint.shutdown()
            raise WeightSyncError("it was given up while trainer and engines met")
        self._endpoint.send_weights()

    def close(self) -> None:
        """Part from the engines: a broadcast under way is aborted. May be called again."""
        self._closed = True
        if self._endpoint is not None:
            self._endpoint.shutdown()


def _free_port(address: str) -> int:
    """vLLM wants to be told one, and takes it itself a moment later."""
    with socket.socket() as there:
        there.bind((address, 0))
        port: int = there.getsockname()[1]
        return port
