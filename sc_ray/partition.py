"""One partition of TransferQueue, through one client: its calls, and the checks it leaves out.

Everything here runs on the asyncio loop of that client and knows no deadline; the clients in
`transfer_queue` add both.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import ray
import torch
from ray.exceptions import RayError
from tensordict import TensorDict
from transfer_queue import StorageKeyNotFoundError
from transfer_queue.client import AsyncTransferQueueClient
from transfer_queue.metadata import BatchMeta

from sc_core import (
    LOCAL,
    BundleDamaged,
    Columns,
    ConfigChanged,
    DataPlaneError,
    MissingRows,
    RestoreError,
    RestoreOrderError,
    SampleId,
    SaveError,
    check_put,
)

CONTROLLER = "TransferQueueController"
NAMESPACE = "transfer_queue"

# The files of a snapshot, as TransferQueue's own save and load name them.
METADATA_FILE = "metadata.json"
CONTROLLER_FILE = "controller_state.pkl"
UNITS_DIRECTORY = "simple_storage"
UNITS_FILE = "storage_unit_info.json"


class Partition:
    """Rows of 1-D tensors, any length per row, one dtype per column."""

    def __init__(self, name: str, client: AsyncTransferQueueClient) -> None:
        self.name = name
        self._client = client

    @classmethod
    def connect(cls, name: str, deadline_s: float) -> Partition:
        """A client of the TransferQueue that runs in this Ray cluster. Blocks.

        Raises:
            DataPlaneError: none runs there, or it does not answer.
        """
        if not ray.is_initialized():  # looking for an actor would start a Ray of our own
            raise DataPlaneError("TransferQueue needs Ray: call ray.init() first")
        try:
            controller = ray.get_actor(CONTROLLER, namespace=NAMESPACE)
            config = ray.get(controller.get_config.remote(), timeout=deadline_s)
        except (ValueError, RayError) as exc:
            raise DataPlaneError(
                f"no TransferQueue answers in this Ray cluster; start one on the driver: {exc}"
            ) from exc
        if config is None:
            raise DataPlaneError("TransferQueue is still starting; connect when it has started")
        client = AsyncTransferQueueClient(
            client_id=f"sc_ray_{os.getpid()}_{uuid4().hex[:8]}",
            controller_info=config.controller.zmq_info,
        )
        backend = config.backend.storage_backend
        client.initialize_storage_manager(backend, config.backend[backend])
        return cls(name, client)

    def close(self) -> None:
        """Let go of the client's sockets. Its loop must have ended."""
        self._client.close()

    @property
    def storage_units(self) -> int:
        return len(self._client.storage_manager.storage_unit_infos)

    # rows ------------------------------------------------------------------------------

    async def put(
        self,
        sample_ids: Sequence[SampleId],
        fields: Columns,
        tags: Sequence[Mapping[str, Any]] | None,
    ) -> None:
        check_put(sample_ids, fields, tags)
        if not sample_ids:
            return
        columns = {name: jagged(name, sample_ids, values) for name, values in fields.items()}
        meta = await self._meta(sample_ids, create=True)
        if tags is not None:
            meta.update_custom_meta([dict(tag) for tag in tags])
        if columns:
            await self._client.async_put(TensorDict(columns, batch_size=len(sample_ids)), meta)
            await self._check_written(sample_ids, columns)
        elif tags is not None:
            await self._client.async_set_custom_meta(meta)

    async def get(
        self, sample_ids: Sequence[SampleId], names: Sequence[str]
    ) -> dict[str, list[torch.Tensor]]:
        if not sample_ids:
            return {name: [] for name in names}
        meta = await self._meta(sample_ids)
        if meta.size < len(sample_ids):
            listed = await self.list_ids()
            raise MissingRows([one for one in sample_ids if one not in listed] or sample_ids)
        if not meta.field_names or not set(names) <= set(meta.field_names):
            raise await self._why_unreadable(sample_ids, names)
        if not names:
            return {}
        try:
            data = await self._client.async_get_data(meta.select_fields(list(names)))
        except StorageKeyNotFoundError:  # cleared meanwhile
            raise MissingRows(sample_ids) from None
        # a row cleared meanwhile gives its index to the next new row, whose values these may be
        if (await self._meta(sample_ids)).global_indexes != meta.global_indexes:
            raise MissingRows(sample_ids)
        return {name: _rows(name, data[name]) for name in names}

    async def get_all(self, sample_ids: Sequence[SampleId]) -> dict[str, list[torch.Tensor]]:
        """`get` of every column that any of the rows has."""
        metas = await asyncio.gather(*(self._meta([one]) for one in sample_ids))
        names = sorted({name for meta in metas for name in meta.field_names})
        if not names:
            raise MissingRows(sample_ids)
        return await self.get(sample_ids, names)

    async def clear(self, sample_ids: Sequence[SampleId]) -> None:
        if not sample_ids:
            return
        meta = await self._meta(sample_ids)
        if meta.size:
            await self._client.async_clear_samples(meta)

    async def list_ids(self) -> frozenset[SampleId]:
        partitions = await self._client.async_kv_list(self.name)
        return frozenset(partitions.get(self.name, ()))

    async def _meta(self, sample_ids: Sequence[SampleId], *, create: bool = False) -> BatchMeta:
        return await self._client.async_kv_retrieve_meta(list(sample_ids), self.name, create)

    async def _check_written(
        self, sample_ids: Sequence[SampleId], columns: Mapping[str, torch.Tensor]
    ) -> None:
        # TransferQueue only logs it when the news of a write is not accepted
        schema = (await self._meta(sample_ids)).field_schema
        for name, column in columns.items():
            if name not in schema:
                raise DataPlaneError(f"put_samples: column {name} was not taken over; repeat it")
            if schema[name]["dtype"] != column.dtype:
                raise DataPlaneError(
                    f"put_samples: column {name} holds {schema[name]['dtype']} and got "
                    f"{column.dtype}; clear these rows"
                )

    async def _why_unreadable(
        self, sample_ids: Sequence[SampleId], names: Sequence[str]
    ) -> DataPlaneError:
        metas = await asyncio.gather(*(self._meta([one]) for one in sample_ids))
        held = {one: set(meta.field_names) for one, meta in zip(sample_ids, metas, strict=True)}
        if missing := [one for one, columns in held.items() if not columns]:
            return MissingRows(missing)
        for name in names:
            if without := [one for one, columns in held.items() if name not in columns]:
                return DataPlaneError(
                    f"column {name} is not in {len(without)} rows, as {without[0]}"
                )
        return DataPlaneError("rows changed while they were read; repeat the call")

    # snapshot --------------------------------------------------------------------------

    async def is_untouched(self) -> bool:
        if await self._client.async_kv_list():
            return False
        manager = self._client.storage_manager
        states = await asyncio.gather(
            *(
                manager._probe_storage_unit(target_storage_unit=unit)
                for unit in manager.storage_unit_infos
            )
        )
        return not any(set(state["arrivals_by_op"]) - {"GET_METRICS"} for state in states)

    async def save(self, directory: Path, metadata: Mapping[str, Any]) -> None:
        directory = LOCAL.real(directory)
        try:
            content = json.dumps({"storage_saved": True, "user_metadata": dict(metadata)}, indent=2)
            LOCAL.make_dir(directory)
            # first, so that a disk that can't be written is met here and not in an actor
            LOCAL.write(directory / METADATA_FILE, content.encode())
            await self._client.async_save_controller_checkpoint(str(directory / CONTROLLER_FILE))
            await self._client.async_save_storage_checkpoint(str(directory))
        except (OSError, TypeError, RuntimeError) as exc:
            raise SaveError(f"TransferQueue's snapshot in {directory} failed: {exc}") from exc

    async def load(self, directory: Path) -> Mapping[str, Any]:
        directory = LOCAL.real(directory)
        metadata = self._check_snapshot(directory)
        if not await self.is_untouched():
            raise RestoreOrderError("load_checkpoint needs an untouched store; call discard first")
        try:
            await self._client.async_load_storage_checkpoint(str(directory))
            await self._client.async_load_controller_checkpoint(str(directory / CONTROLLER_FILE))
        except Exception as exc:
            raise RestoreError(
                f"TransferQueue could not load {directory}, and holds parts of it; "
                f"call discard: {exc}"
            ) from exc
        return metadata

    def _check_snapshot(self, directory: Path) -> Mapping[str, Any]:
        """Everything that can be refused before the store is changed."""
        units = directory / UNITS_DIRECTORY
        for path in (directory, units):
            _check_private(directory, path)
        saved = _read_json(directory, METADATA_FILE)
        positions = _read_json(directory, f"{UNITS_DIRECTORY}/{UNITS_FILE}")
        if len(positions) != self.storage_units:
            raise ConfigChanged(
                f"{directory} was written by {len(positions)} storage units and TransferQueue "
                f"has {self.storage_units}: set storage_units to {len(positions)}"
            )
        expected = [
            f"{UNITS_DIRECTORY}/su_{one['position']}_{one['storage_unit_id']}.pkl"
            for one in positions
        ]
        for name in (CONTROLLER_FILE, *expected):
            if not (directory / name).is_file():
                raise BundleDamaged(str(directory), name, "is missing")
        metadata: Mapping[str, Any] = saved["user_metadata"]
        return metadata


def units_of(directory: Path) -> int:
    """How many storage units wrote a snapshot.

    Raises:
        BundleDamaged: it does not say.
    """
    return len(_read_json(directory, f"{UNITS_DIRECTORY}/{UNITS_FILE}"))


def jagged(name: str, sample_ids: Sequence[SampleId], values: Sequence[Any]) -> torch.Tensor:
    """One column of rows that are 1-D tensors of one dtype, whatever their lengths."""
    for sample_id, value in zip(sample_ids, values, strict=True):
        if not isinstance(value, torch.Tensor) or value.dim() != 1:
            found = (
                f"a tensor of {value.dim()} dimensions"
                if isinstance(value, torch.Tensor)
                else f"a {type(value).__name__}"
            )
            raise DataPlaneError(
                f"put_samples: column {name}, row {sample_id}: a value must be a 1-D tensor, "
                f"this is {found}"
            )
        if value.dtype != values[0].dtype:
            raise DataPlaneError(
                f"put_samples: column {name}, row {sample_id}: {value.dtype} beside "
                f"{values[0].dtype}; a column has one dtype"
            )
    # Dense columns would grow 5-10 times on disk: every row would pickle its whole batch.
    return torch.nested.as_nested_tensor(
        [value.detach().cpu() for value in values], layout=torch.jagged
    )


def _rows(name: str, column: Any) -> list[torch.Tensor]:
    # TransferQueue falls back to another layout, and promotes values, when dtypes differ
    if not isinstance(column, torch.Tensor) or column.layout is not torch.jagged:
        raise DataPlaneError(f"column {name} holds values of several dtypes")
    return list(column.unbind())


def _check_private(directory: Path, path: Path) -> None:
    try:
        names = [path, *(path / name for name in LOCAL.entries(path))]
        shared = [str(one) for one in names if not LOCAL.is_private(one)]
    except OSError as exc:
        raise BundleDamaged(str(directory), path.name, str(exc)) from exc
    if shared:
        raise RestoreError(
            f"{shared[0]} can be changed by other users, or is a link, and a snapshot is opened "
            f"as pickle, which runs what it holds: take the right to write from all but yourself"
        )


def _read_json(directory: Path, name: str) -> Any:
    try:
        return json.loads(LOCAL.read(directory / name, at_most=2**26))
    except (OSError, ValueError) as exc:
        raise BundleDamaged(str(directory), name, str(exc)) from exc
