"""Trainer workers that act as one: how they meet, and what they tell each other.

What goes between them is gradients, sums and votes; rows never do. Worker `r` of N has rank `r`.
"""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Callable
from typing import TypeVar

import psutil
import ray
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sc_core import (
    ScError,
)
from sc_ray.trainer.seat import LOOPBACK, PeerFailed, Seat, worker_name

R = TypeVar("R")


class Rendezvous:
    """Where the workers find each other: a port that the system chose, on loopback.

    Belongs to the driver. Close it once the workers have ended.

    Args:
        host: an address of this node that the others reach, if there are workers on others.
    """

    def __init__(
        self,
        workers: int,
        *,
        host: str = LOOPBACK,
        start_s: float = 600.0,
        call_s: float = 1800.0,
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, 0), family=family)
        listening.listen(max(workers, 16))
        self._host = host
        self._port: int = listening.getsockname()[1]
        self._workers, self._start_s, self._call_s = workers, start_s, call_s
        self._store: TCPStore | None = TCPStore(
            host,
            self._port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),  # else it would listen on every network
        )

    @property
    def seats(self) -> list[Seat]:
        """One for each worker, by rank."""
        return [
            Seat(
                rank=rank,
                workers=self._workers,
                port=self._port,
                host=self._host,
                start_s=self._start_s,
                call_s=self._call_s,
            )
            for rank in range(self._workers)
        ]

    def missing(self) -> list[str]:
        """Names of the workers that have not come up yet."""
        return _missing(self._store, self._workers) if self._store is not None else []

    def close(self) -> None:
        """Listen no more. May be called again."""
        self._store = None


class Peers:
    """A worker's ties to the others. Each method must be called on all of them, in one order.

    A worker that does not come, or died, makes the others raise `RuntimeError`: at once where
    its connection ends, else after `Seat.call_s`. They can't act as one again after that.
    """

    def __init__(self, seat: Seat, device: str = "cpu") -> None:
        """Meet the others: over gloo, and nccl for what is on a GPU. Blocks.

        Raises:
            ScError: some were not up by `Seat.start_s`; it names them.
        """
        self.rank, self.workers = seat.rank, seat.workers
        _choose_network(seat.host)
        start = datetime.timedelta(seconds=seat.start_s)
        store = TCPStore(seat.host, seat.port, is_master=False, timeout=start)
        store.set(_up(seat.rank), "")
        try:
            store.wait([_up(rank) for rank in range(seat.workers)], start)
        except dist.DistStoreError as exc:
            late = ", ".join(_missing(store, seat.workers))
            raise ScError(
                f"{worker_name(seat.rank)} waited {seat.start_s:g} s for {late}, which did not"
                " come up"
            ) from exc
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
            store=PrefixStore("group", store),
            rank=seat.rank,
            world_size=seat.workers,
            timeout=datetime.timedelta(seconds=seat.call_s),
        )
        self.mesh: DeviceMesh = init_device_mesh(device, (seat.workers,))

    def sum(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by its sum over the workers."""
        dist.all_reduce(tensor)

    def max(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by its maximum over the workers, element by element."""
        dist.all_reduce(tensor, dist.ReduceOp.MAX)

    def each(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors that the workers gave, of one shape and dtype, by rank."""
        found = [torch.empty_like(tensor) for _ in range(self.workers)]
        dist.all_gather(found, tensor)
        return found

    def together(self, call: str, work: Callable[[], R]) -> R:
        """Do what may fail on one worker alone, and go on with it on all of them or on none.

        Raises:
            PeerFailed: it succeeded here, and not everywhere. Its own errors pass unchanged.
        """
        failed = torch.zeros(self.workers, dtype=torch.int32)
        try:
            result = work()
        except BaseException:
            failed[self.rank] = 1
            self.sum(failed)
            raise
        self.sum(failed)
        if others := failed.nonzero().flatten().tolist():
            raise PeerFailed(call, [worker_name(rank) for rank in others])
        return result

    def close(self) -> None:
        """Part from the others, who must do the same."""
        dist.destroy_process_group()


def _choose_network(host: str) -> None:
    """gloo would listen at the address that this machine's name stands for."""
    address = LOOPBACK if host == LOOPBACK else ray.util.get_node_ip_address()
    name = interface_of(address)
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def interface_of(address: str) -> str | None:
    """The network interface of this machine that has an address; None if none does."""
    name: str
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            return name
    return None


def _up(rank: int) -> str:
    return f"up/{rank}"


def _missing(store: Store, workers: int) -> list[str]:
    return [worker_name(rank) for rank in range(workers) if not store.check([_up(rank)])]
