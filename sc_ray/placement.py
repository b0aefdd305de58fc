"""Where each process of a run goes: to the driver's node, or over the cluster.

Over the cluster by a placement group: Ray keeps room for all of them, or none is started.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import msgspec
import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from sc_core import (
    ConfigError,
)
from sc_ray.cluster import living_nodes, this_node
from sc_ray.settings import TrainConfig
from sc_ray.trainer.seat import worker_name

Strategy = Any
"""What Ray calls a scheduling strategy; it has no type of its own."""
CONTROLLER = "the controller"
INDEX = "TransferQueue's index"
_ANYWHERE = "SPREAD"  #: Ray's word for the node that has least to do
_SOON_S = 2.0  #: a wait of which nothing needs to be said
_NODE_ID = "ray.io/node-id"  #: Ray's label of a node


def unit_name(rank: int) -> str:
    """What a storage unit is called in errors and logs."""
    return f"TransferQueue's storage unit {rank}"


def engine_name(rank: int) -> str:
    return f"generation-{rank}"


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """One that needs a place."""

    name: str
    kind: str
    gpus: float = 0

    @property
    def resources(self) -> dict[str, float]:
        return {"CPU": 1, "GPU": self.gpus} if self.gpus else {"CPU": 1}


class Places(msgspec.Struct, frozen=True, kw_only=True):
    """A place for each process of a run, by its name; crosses to the controller's process."""

    strategies: Mapping[str, Strategy]
    beyond: Strategy  #: for generation workers that there may be more
    nodes: Mapping[str, str]  #: ids of the nodes of those whose node is known

    def of(self, name: str) -> Strategy:
        return self.strategies.get(name, self.beyond)


def reserve(
    config: TrainConfig,
    device: str,
    on_exit: ExitStack,
    say: Callable[[str], None] = lambda _: None,
) -> Places:
    """Find a place for every process, as `cluster.placement` says. Blocks until there is room.

    A placement group ends when `on_exit` closes, or with the driver.

    Args:
        device: that the trainer computes on.

    Raises:
        ConfigError: there was no room by `cluster.start_deadline_s`; says what for, and what the
            cluster has.
    """
    here = ray.get_runtime_context().get_node_id()
    processes = _processes(config, device)
    names = [CONTROLLER, INDEX, *(process.name for process in processes)]
    if config.cluster.placement == "driver_node":
        beyond: Strategy = _ANYWHERE if config.cluster.spread_generation else this_node()
        engines = {process.name for process in processes if process.kind == "engine"}
        strategies = {name: beyond if name in engines else this_node() for name in names}
        known = [name for name, strategy in strategies.items() if strategy != _ANYWHERE]
        return Places(strategies=strategies, beyond=beyond, nodes=dict.fromkeys(known, here))
    first, *others = processes
    home = {**first.resources, "CPU": 3.0}  # and the two of `names` that are no workers
    bundles = [home, *(process.resources for process in others)]
    group = placement_group(
        bundles,
        strategy=config.cluster.placement.upper(),
        bundle_label_selector=[{_NODE_ID: here}, *({} for _ in others)],
    )
    on_exit.callback(_remove, group)
    deadline_s = config.cluster.start_deadline_s
    if not group.wait(_SOON_S):
        say(f"waiting for room in the cluster: {_asked(bundles)}")
        if not group.wait(deadline_s):
            raise ConfigError(
                f"cluster.placement is {config.cluster.placement}, and within {deadline_s:g} s"
                f" (cluster.start_deadline_s) Ray found no room for {_asked(bundles)};"
                f" {_what_there_is()}"
            )
    nodes: dict[int, str] = dict(placement_group_table(group)["bundles_to_node_id"])
    homes = dict.fromkeys((CONTROLLER, INDEX, first.name), 0)
    indexes = homes | deal(others, bundles, nodes, there=[(first.kind, here)])
    return Places(
        strategies={
            name: PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            for name, index in indexes.items()
        },
        beyond=_ANYWHERE,
        nodes={name: nodes[index] for name, index in indexes.items()},
    )


def deal(
    processes: Sequence[Process],
    bundles: Sequence[Mapping[str, float]],
    nodes: Mapping[int, str],
    *,
    there: Sequence[tuple[str, str]] = (),
) -> dict[str, int]:
    """Give each process a bundle of its size, so that each kind is on many nodes.

    Ray itself spreads bundles, whatever they are for.

    Args:
        bundles: the first of them is taken.
        nodes: of the bundles, by their index.
        there: kinds of processes that have a place, and its node.
    """
    free = set(range(1, len(bundles)))
    of_kind = Counter(there)
    dealt: dict[str, int] = {}
    for process in processes:
        left = Counter(nodes[index] for index in free)
        index = min(
            (of_kind[process.kind, nodes[index]], -left[nodes[index]], index)
            for index in free
            if bundles[index] == process.resources
        )[-1]
        dealt[process.name] = index
        free.remove(index)
        of_kind[process.kind, nodes[index]] += 1
    return dealt


def _processes(config: TrainConfig, device: str) -> list[Process]:
    """Trainer workers first."""
    gpus = 1 if device == "cuda" else 0
    return [
        *(
            Process(name=worker_name(rank), kind="trainer", gpus=gpus)
            for rank in range(config.policy.workers)
        ),
        *(
            Process(name=engine_name(rank), kind="engine", gpus=config.generation.gpus)
            for rank in range(config.generation.workers)
        ),
        *(
            Process(name=unit_name(rank), kind="storage unit")
            for rank in range(config.cluster.storage_units)
        ),
    ]


def _remove(group: PlacementGroup) -> None:
    with suppress(Exception):  # Ray is gone, and the group with it
        remove_placement_group(group)


# what is said of it --------------------------------------------------------------------


def _asked(bundles: Sequence[Mapping[str, float]]) -> str:
    home, *others = bundles
    counted = Counter(_amount(bundle) for bundle in others)
    sizes = ", ".join(f"{count} x {size}" for size, count in counted.items())
    return f"{_amount(home)} on the driver's node and {sizes} on any"


def _what_there_is() -> str:
    here = ray.get_runtime_context().get_node_id()
    sizes = [
        _amount(node["Resources"]) + (" (the driver's)" if node_id == here else "")
        for node_id, node in living_nodes().items()
    ]
    return (
        f"the cluster has {len(sizes)} {'node' if len(sizes) == 1 else 'nodes'}:"
        f" {', '.join(sizes)}; free of all that: {_amount(ray.available_resources())}"
    )


def _amount(resources: Mapping[str, float]) -> str:
    cpus, gpus = resources.get("CPU", 0.0), resources.get("GPU", 0.0)
    told = f"{cpus:g} CPU{'' if cpus == 1 else 's'}"
    return f"{told} and {gpus:g} GPU{'' if gpus == 1 else 's'}" if gpus else told
