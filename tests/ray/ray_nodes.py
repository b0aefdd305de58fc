"""A Ray of several nodes on this machine, whose nodes and processes can be lost."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import Any

from ray.cluster_utils import Cluster

from sc_ray.kills import actors_of, descendants

HEALTH = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 3,
}
"""Ray gives up a node that is silent after at most 18 s, and not after its usual minute."""


class RayNodes:
    """The first node, `head`, is the one that drivers are on."""

    def __init__(self, head_cpus: int) -> None:
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": head_cpus,
                "include_dashboard": False,
                "_system_config": HEALTH,
            },
        )
        self.address = f"cluster.address={self._cluster.address}"
        self.head = _raylet(self._cluster.head_node)
        self._frozen: set[int] = set()

    def add(self, cpus: int) -> int:
        """A node more; returns the pid of its raylet, by which it goes here."""
        return _raylet(self._cluster.add_node(num_cpus=cpus))

    def kinds(self, node: int, *kinds: str) -> tuple[int, ...]:
        """How many actors of each kind are on a node."""
        return tuple(len(actors_of(node, kind)) for kind in kinds)

    def kill_one(self, kind: str) -> None:
        """SIGKILL a process of the first node."""
        os.kill(actors_of(self.head, kind)[0], signal.SIGKILL)

    def lose(self, node: int) -> None:
        """A node is gone with all that ran there, as when its power fails."""
        for pid in (gone := descendants(node)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        for pid in gone:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def cut_off(self, node: int) -> None:
        """A node goes silent, as behind a broken switch: nothing there ends, and no connection."""
        found = descendants(node)
        self._frozen |= found
        for pid in found:
            os.kill(pid, signal.SIGSTOP)

    def close(self) -> None:
        for pid in self._frozen:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._cluster.shutdown()


def _raylet(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)
