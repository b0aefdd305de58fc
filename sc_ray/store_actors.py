"""The actors that TransferQueue consists of: started where they shall be, and ended.

Its own `init` puts storage units on every node in turn, whether a CPU is free there or not, and
waits for them without an end. These are the same actors, of its own classes, under the names and
with the configuration by which its clients find them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

import ray
from omegaconf import OmegaConf
from ray.exceptions import GetTimeoutError, RayError

from sc_core import (
    CallTimeout,
    DataPlaneError,
)
from sc_ray.cluster import kill
from sc_ray.lazy import lazy

if TYPE_CHECKING:
    import transfer_queue.controller as controllers
    import transfer_queue.storage.simple_storage as storage

    from sc_ray import partition
else:
    controllers = lazy("transfer_queue.controller")
    storage = lazy("transfer_queue.storage.simple_storage")
    partition = lazy("sc_ray.partition")

_BACKEND = "SimpleStorage"
_STARTING, _STOPPING = "starting TransferQueue", "stopping TransferQueue"


class StoreActors:
    """TransferQueue's index and storage units. They end with this object, or with its process."""

    def __init__(self, index: Any, units: Sequence[Any], *, deadline_s: float) -> None:
        """Start them, and wait until clients can connect. Blocks for some seconds.

        Args:
            index: Ray's scheduling strategy for the index.
            units: one for each storage unit.

        Raises:
            CallTimeout: they were not up by the deadline; none is left.
            DataPlaneError: one could not start; none is left.
        """
        give_up = time.monotonic() + deadline_s
        config = OmegaConf.load(str(resources.files("transfer_queue") / "config.yaml"))
        config._set_flag("allow_objects", True)
        config.backend.storage_backend = _BACKEND
        of_units = config.backend[_BACKEND]
        of_units.num_data_storage_units = len(units)
        self._index = controllers.TransferQueueController.options(
            name=partition.CONTROLLER, namespace=partition.NAMESPACE, scheduling_strategy=index
        ).remote()
        self._units = {
            name: storage.SimpleStorageUnit.options(name=name, scheduling_strategy=where).remote(
                config=OmegaConf.to_container(of_units)
            )
            for name, where in zip(unit_actors(len(units)), units, strict=True)
        }

        def get(ref: Any) -> Any:
            return ray.get(ref, timeout=max(give_up - time.monotonic(), 0.0))

        try:
            found = [actor.get_zmq_server_info.remote() for actor in self._all]
            config.controller.zmq_info, *infos = get(found)
            of_units.zmq_info = dict(zip(self._units, infos, strict=True))
            get(self._index.store_config.remote(config))
        except BaseException as exc:
            self.kill()
            if isinstance(exc, GetTimeoutError):
                raise CallTimeout(_STARTING, deadline_s) from exc
            if isinstance(exc, RayError):
                raise DataPlaneError(f"{_STARTING}: {exc}") from exc
            raise

    @property
    def _all(self) -> list[Any]:
        return [self._index, *self._units.values()]

    def stop(self, deadline_s: float) -> None:
        """End them, and wait until their names are free: a start would else find them dying.

        Raises:
            CallTimeout: they were not gone by the deadline.
        """
        self.kill()
        give_up = time.monotonic() + deadline_s
        while is_there(partition.CONTROLLER, partition.NAMESPACE) or any(
            is_there(name, None) for name in self._units
        ):
            if time.monotonic() > give_up:
                raise CallTimeout(_STOPPING, deadline_s)
            time.sleep(0.02)

    def kill(self) -> None:
        """End them; their names may be taken for a moment yet."""
        for actor in self._all:
            kill(actor)


def unit_actors(count: int) -> list[str]:
    """What the actors of storage units are called in Ray."""
    return [f"TransferQueueStorageUnit#{rank}" for rank in range(count)]


def is_there(name: str, namespace: str | None) -> bool:
    """Whether Ray knows a living actor of that name."""
    try:
        ray.get_actor(name, namespace=namespace)
    except ValueError:
        return False
    return True
