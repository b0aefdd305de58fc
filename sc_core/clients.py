"""Clients of a data plane whose calls take the name of a partition, awaited or blocking.

The calls are those of NeMo RL's data-plane client. `ClientStore` makes a data plane of one that
is awaited; `ThreadedClient` is such a one, made of a client that blocks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import anyio
import anyio.to_thread

from sc_core.errors import DataPlaneError
from sc_core.ports import Columns, Runner

R = TypeVar("R")


class SyncClient(Protocol):
    """A client whose calls block."""

    def put_samples(
        self, sample_ids: list[str], partition_id: str, fields: Any, tags: Any, /
    ) -> object:
        """Write rows: `fields` as the `FieldsCodec` makes them, or None; tags or None."""

    def get_samples(
        self, sample_ids: list[str], partition_id: str, select_fields: list[str], /
    ) -> Any:
        """These columns, as the `FieldsCodec` takes them, in the order of the ids."""

    def clear_samples(self, sample_ids: list[str], partition_id: str, /) -> object:
        """Remove rows, all of which exist; there is one at least."""

    def list_sample_ids(self, partition_id: str, /) -> Collection[str]:
        """Every row of the partition."""

    def save_checkpoint(self, checkpoint_dir: Path, /, *, metadata: dict[str, Any]) -> object:
        """Write everything, and what JSON can hold of metadata, to a new directory."""

    def load_checkpoint(self, checkpoint_dir: Path, /) -> Mapping[str, Any]:
        """Fill a store that nobody has used; returns the metadata."""

    def close(self) -> object:
        """Let go of the store, which goes away with its last client."""


class AsyncClient(Protocol):
    """A client whose calls are awaited; else as `SyncClient`."""

    async def put_samples(
        self, sample_ids: list[str], partition_id: str, fields: Any, tags: Any, /
    ) -> object:
        """As of a `SyncClient`."""

    async def get_samples(
        self, sample_ids: list[str], partition_id: str, select_fields: list[str], /
    ) -> Any:
        """As of a `SyncClient`."""

    async def clear_samples(self, sample_ids: list[str], partition_id: str, /) -> object:
        """As of a `SyncClient`."""

    async def list_sample_ids(self, partition_id: str, /) -> Collection[str]:
        """As of a `SyncClient`."""

    async def save_checkpoint(self, checkpoint_dir: Path, /, *, metadata: dict[str, Any]) -> object:
        """As of a `SyncClient`."""

    async def load_checkpoint(self, checkpoint_dir: Path, /) -> Mapping[str, Any]:
        """As of a `SyncClient`."""

    async def close(self) -> object:
        """As of a `SyncClient`."""


class FieldsCodec(Protocol):
    """How a client wants to be given columns, and how it gives them."""

    def encode(self, columns: Columns, rows: int) -> Any:
        """Columns of so many rows, of which there is one of each at least.

        Raises:
            DataPlaneError: a value can't be given to this client; names the column.
        """

    def decode(self, fields: Any, names: Sequence[str]) -> dict[str, list[Any]]:
        """One value per row of each column named."""


class PlainFields:
    """The `FieldsCodec` of a client that takes and gives a mapping of lists."""

    def encode(self, columns: Columns, rows: int) -> Any:
        """A dict of lists."""
        return {name: list(values) for name, values in columns.items()}

    def decode(self, fields: Any, names: Sequence[str]) -> dict[str, list[Any]]:
        """Those of a mapping."""
        return {name: list(fields[name]) for name in names}


async def _in_left_thread(work: Callable[..., R], *args: Any) -> R:
    return await anyio.to_thread.run_sync(work, *args, abandon_on_cancel=True)


class ThreadedClient:
    """An `AsyncClient` that makes each call of a `SyncClient` in a thread.

    A cancel leaves the thread to itself. As long as `calls_at_once` of them have not returned,
    every further call raises `DataPlaneError`: a client is not asked beside a call that hangs.

    Args:
        build: makes the client, and the store with it; called in a thread too, when first needed.
        calls_at_once: how many threads may use the client together.
        runner: what makes a call, and leaves it when cancelled.
    """

    def __init__(
        self,
        build: Callable[[], SyncClient],
        *,
        calls_at_once: int = 1,
        runner: Runner = _in_left_thread,
    ) -> None:
        self._build = build
        self._client: SyncClient | None = None
        self._building = threading.Lock()
        self._runner = runner
        self._most = calls_at_once
        self._turns = anyio.Semaphore(calls_at_once)
        self._under_way: dict[int, str] = {}  #: calls whose threads have not returned
        self._count = 0

    async def put_samples(
        self, sample_ids: list[str], partition_id: str, fields: Any, tags: Any, /
    ) -> object:
        """In a thread, as each of these."""
        return await self._call(
            "put_samples",
            lambda client: client.put_samples(sample_ids, partition_id, fields, tags),
        )

    async def get_samples(
        self, sample_ids: list[str], partition_id: str, select_fields: list[str], /
    ) -> Any:
        """In a thread, as each of these."""
        return await self._call(
            "get_samples",
            lambda client: client.get_samples(sample_ids, partition_id, select_fields),
        )

    async def clear_samples(self, sample_ids: list[str], partition_id: str, /) -> object:
        """In a thread, as each of these."""
        return await self._call(
            "clear_samples", lambda client: client.clear_samples(sample_ids, partition_id)
        )

    async def list_sample_ids(self, partition_id: str, /) -> Collection[str]:
        """In a thread, as each of these."""
        return await self._call(
            "list_sample_ids", lambda client: client.list_sample_ids(partition_id)
        )

    async def save_checkpoint(self, checkpoint_dir: Path, /, *, metadata: dict[str, Any]) -> object:
        """In a thread, as each of these."""
        return await self._call(
            "save_checkpoint",
            lambda client: client.save_checkpoint(checkpoint_dir, metadata=metadata),
        )

    async def load_checkpoint(self, checkpoint_dir: Path, /) -> Mapping[str, Any]:
        """In a thread, as each of these."""
        return await self._call(
            "load_checkpoint", lambda client: client.load_checkpoint(checkpoint_dir)
        )

    async def close(self) -> object:
        """In a thread, as each of these."""
        return await self._call("close", lambda client: client.close())

    async def _call(self, call: str, work: Callable[[SyncClient], R]) -> R:
        async with self._turns:
            if len(self._under_way) >= self._most:
                hanging = ", ".join(self._under_way.values())
                raise DataPlaneError(f"{call}: the client is busy: {hanging} has not returned")
            self._count += 1
            number, under_way = self._count, self._under_way

            def counted() -> R:
                try:
                    return work(self._built())
                finally:
                    del under_way[number]

            under_way[number] = call
            return await self._runner(counted)

    def _built(self) -> SyncClient:
        with self._building:
            if self._client is None:
                self._client = self._build()
            return self._client
