"""Somebody's own data-plane client in a Ray actor, and one that takes a TensorDict.

    store = ClientStore(lambda: ActorClient(Client.remote()), fields=TensorDictFields())

gives `open_run` a data plane on an actor with the calls of NeMo RL's client. For such a client in
this process, `ThreadedClient` takes the place of `ActorClient`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sc_core import Columns, DataPlaneError
from sc_ray.lazy import lazy
from sc_ray.workers import answer

if TYPE_CHECKING:
    import tensordict
    import torch

    from sc_ray import partition
else:
    tensordict = lazy("tensordict")
    torch = lazy("torch")
    partition = lazy("sc_ray.partition")


class ActorClient:
    """An `AsyncClient` on an actor's handle: each call is one of the actor's method of that name.

    No thread waits, and it is usable from asyncio, uvloop and trio. A cancel ends the wait and
    leaves the call going; whether it happened is unknown. An error is the one that the method
    raised. `save_checkpoint` and `load_checkpoint` get a path of the actor's node.

    Raises:
        WorkerDied: from each call: the actor's process is gone.
    """

    def __init__(self, actor: Any, *, name: str = "the data plane's client") -> None:
        """`name` is what errors call the actor."""
        self._actor = actor
        self._name = name

    async def put_samples(
        self, sample_ids: list[str], partition_id: str, fields: Any, tags: Any, /
    ) -> object:
        """As of a `SyncClient`."""
        method = self._actor.put_samples
        return await answer(self._name, method.remote(sample_ids, partition_id, fields, tags))

    async def get_samples(
        self, sample_ids: list[str], partition_id: str, select_fields: list[str], /
    ) -> Any:
        """As of a `SyncClient`."""
        method = self._actor.get_samples
        return await answer(self._name, method.remote(sample_ids, partition_id, select_fields))

    async def clear_samples(self, sample_ids: list[str], partition_id: str, /) -> object:
        """As of a `SyncClient`."""
        method = self._actor.clear_samples
        return await answer(self._name, method.remote(sample_ids, partition_id))

    async def list_sample_ids(self, partition_id: str, /) -> Collection[str]:
        """As of a `SyncClient`."""
        listed: Collection[str] = await answer(
            self._name, self._actor.list_sample_ids.remote(partition_id)
        )
        return listed

    async def save_checkpoint(self, checkpoint_dir: Path, /, *, metadata: dict[str, Any]) -> object:
        """As of a `SyncClient`."""
        method = self._actor.save_checkpoint
        return await answer(self._name, method.remote(checkpoint_dir, metadata=metadata))

    async def load_checkpoint(self, checkpoint_dir: Path, /) -> Mapping[str, Any]:
        """As of a `SyncClient`."""
        loaded: Mapping[str, Any] = await answer(
            self._name, self._actor.load_checkpoint.remote(checkpoint_dir)
        )
        return loaded

    async def close(self) -> object:
        """Call the actor's `close`; the actor lives as long as somebody has its handle."""
        return await answer(self._name, self._actor.close.remote())


class TensorDictFields:
    """The `FieldsCodec` of a client that takes and gives a `TensorDict`.

    A value is a 1-D tensor of any length, as everywhere in sc_ray, and a column has one dtype. It
    is given as a jagged nested tensor; a dense one that comes back, and a column of one number per
    row, are taken apart into rows again.
    """

    def encode(self, columns: Columns, rows: int) -> Any:
        """A `TensorDict` of so many rows.

        Raises:
            DataPlaneError: a value is no 1-D tensor, or a column has two dtypes; names the column.
        """
        places = [str(at) for at in range(rows)]
        nested = {name: partition.jagged(name, places, list(v)) for name, v in columns.items()}
        return tensordict.TensorDict(nested, batch_size=rows)

    def decode(self, fields: Any, names: Sequence[str]) -> dict[str, list[Any]]:
        """Lists of 1-D tensors.

        Raises:
            DataPlaneError: a column is not there, or is no tensor.
        """
        return {name: self._rows(name, fields) for name in names}

    def _rows(self, name: str, fields: Any) -> list[torch.Tensor]:
        column = fields.get(name, None)
        if not isinstance(column, torch.Tensor):
            found = "missing" if column is None else f"a {type(column).__name__}, no tensor"
            raise DataPlaneError(f"get_samples: column {name} is {found}")
        return [row.reshape(1) if row.dim() == 0 else row for row in column.unbind()]
