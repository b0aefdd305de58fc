"""A data plane in memory, as torn by a cancel, a hang or a failure as a real one is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import anyio.lowlevel
import msgspec

from sc_core.disk import LOCAL, Disk
from sc_core.errors import (
    BundleDamaged,
    DataPlaneError,
    MissingRows,
    RestoreOrderError,
    SaveError,
)
from sc_core.ports import Columns
from sc_core.records import SampleId
from sc_core.returned import check_put

Hooks = Callable[[str, str], Awaitable[None]]
"""Awaited as `hooks(call, point)` with the point `before`, `midway` or `after`.

Whatever it raises, leaves the call; so does a cancel that arrives while it waits. `midway` lies
where a real store holds half of the effect, and exists for put, clear, save and load.
"""

ROWS_FILE = "rows.msgpack"
METADATA_FILE = "metadata.json"
MOST_BYTES = 2**32  #: of one file of a snapshot


class Row(msgspec.Struct):
    """One row. Without columns it is listed and can't be read: a put that did not finish."""

    columns: dict[str, msgspec.Raw] = {}  #: each value as msgpack, so that no caller shares it
    tags: dict[str, Any] = {}


class Call(NamedTuple):
    """One call that began, finished or not."""

    name: str
    sample_ids: tuple[SampleId, ...] = ()


class MemoryStore:
    """The rows of one partition, shared by every client made from it."""

    def __init__(self) -> None:
        self.rows: dict[SampleId, Row] = {}
        self.touched = False  #: it held a row, or a load began, since it was built
        self.build = 0  #: counts discards; a client of an earlier build is refused

    def __repr__(self) -> str:
        return f"<MemoryStore build {self.build}, {len(self.rows)} rows, touched={self.touched}>"

    def row(self, sample_id: SampleId) -> Row:
        """The row of that id, made if there is none."""
        self.touched = True
        return self.rows.setdefault(sample_id, Row())

    def replace(self, rows: dict[SampleId, Row]) -> None:
        self.touched = True
        self.rows = rows

    def rebuild(self) -> None:
        self.rows, self.touched, self.build = {}, False, self.build + 1


class _Client:
    """What the two ends share: the store, the hooks, the disk and the call log."""

    def __init__(self, store: MemoryStore, hooks: Hooks | None = None, disk: Disk = LOCAL) -> None:
        self.store = store
        self.hooks = hooks
        self.disk = disk
        self.calls: list[Call] = []  #: in the order in which they began

    async def _begin(self, name: str, sample_ids: Sequence[SampleId] = ()) -> None:
        self.calls.append(Call(name, tuple(sample_ids)))
        await self._at(name, "before")

    async def _at(self, name: str, point: str) -> None:
        await anyio.lowlevel.checkpoint()
        if self.hooks is not None:
            await self.hooks(name, point)

    async def list_sample_ids(self) -> frozenset[SampleId]:
        await self._begin("list_sample_ids")
        listed = frozenset(self.store.rows)
        await self._at("list_sample_ids", "after")
        return listed


class MemoryDataPlane(_Client):
    """A `DataPlane` over a `MemoryStore`. A value may be whatever msgpack can hold.

    Every point named in `Hooks` is a checkpoint too, hooks or not. A put that ends between
    `before` and `after` leaves its new rows listed without data; a clear leaves its rows so. A
    save lists the rows, then reads them: what is put in between is missing from the snapshot,
    what is cleared in between is in it without data.
    """

    def __init__(self, store: MemoryStore, hooks: Hooks | None = None, disk: Disk = LOCAL) -> None:
        super().__init__(store, hooks, disk)
        self._build = store.build
        self._closed = False

    async def _begin(self, name: str, sample_ids: Sequence[SampleId] = ()) -> None:
        if self._closed:
            raise DataPlaneError(f"{name}: this client was closed; open another one")
        await super()._begin(name, sample_ids)
        if self._build != self.store.build:
            raise DataPlaneError(f"{name}: the store was discarded; open a client of the new one")

    async def put_samples(
        self,
        sample_ids: Sequence[SampleId],
        fields: Columns,
        tags: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Write the named columns, and the given tags; others of existing rows stay.

        Raises:
            DataPlaneError: a column or `tags` is not one value per row, or an id comes twice.
        """
        encoded = _encode_columns(sample_ids, fields, tags)
        await self._begin("put_samples", sample_ids)
        for sample_id in sample_ids:
            self.store.row(sample_id)
        await self._at("put_samples", "midway")
        for place, sample_id in enumerate(sample_ids):
            row = self.store.row(sample_id)
            row.columns.update({name: values[place] for name, values in encoded.items()})
            row.tags.update(tags[place] if tags is not None else {})
        await self._at("put_samples", "after")

    async def get_samples(
        self, sample_ids: Sequence[SampleId], select_fields: Sequence[str]
    ) -> dict[str, list[Any]]:
        """Read columns, rows in the order asked for.

        Raises:
            MissingRows: some rows don't exist, or exist without any data.
            DataPlaneError: a row has data, but not a column asked for.
        """
        await self._begin("get_samples", sample_ids)
        rows = self.store.rows
        missing = [one for one in sample_ids if one not in rows or not rows[one].columns]
        if missing:
            raise MissingRows(missing)
        columns = {name: self._column(name, sample_ids) for name in select_fields}
        await self._at("get_samples", "after")
        return columns

    def _column(self, name: str, sample_ids: Sequence[SampleId]) -> list[Any]:
        without = [one for one in sample_ids if name not in self.store.rows[one].columns]
        if without:
            raise DataPlaneError(f"column {name} is not in {len(without)} rows, as {without[0]}")
        return [msgspec.msgpack.decode(self.store.rows[one].columns[name]) for one in sample_ids]

    async def clear_samples(self, sample_ids: Sequence[SampleId]) -> None:
        """Remove these rows; ids that do not exist are no error."""
        await self._begin("clear_samples", sample_ids)
        for sample_id in sample_ids:
            if sample_id in self.store.rows:
                self.store.rows[sample_id].columns.clear()
        await self._at("clear_samples", "midway")
        for sample_id in sample_ids:
            self.store.rows.pop(sample_id, None)
        await self._at("clear_samples", "after")

    async def save_checkpoint(self, directory: Path, metadata: Mapping[str, Any]) -> None:
        """Write `rows.msgpack` and `metadata.json` (what JSON can hold) into a new directory.

        Raises:
            SaveError: the directory is there already, or can't be written.
        """
        await self._begin("save_checkpoint")
        listed = list(self.store.rows)
        await self._at("save_checkpoint", "midway")
        rows = {one: self.store.rows.get(one, Row()) for one in listed}
        _write(self.disk, directory, rows, metadata)
        await self._at("save_checkpoint", "after")

    async def aclose(self) -> None:
        """Let go of the client: every further call is refused. The store stays."""
        self._closed = True
        await self._at("aclose", "after")


class MemoryBootstrap(_Client):
    """A `BootstrapDataPlane` over a `MemoryStore`.

    A client opened before a load sees the restored rows; one opened before a discard is
    refused with `DataPlaneError`.
    """

    async def is_untouched(self) -> bool:
        """Whether the store never held a row since it was built, whoever put it there."""
        await self._begin("is_untouched")
        answer = not self.store.touched
        await self._at("is_untouched", "after")
        return answer

    async def load_checkpoint(self, directory: Path) -> Mapping[str, Any]:
        """Fill the untouched store from a snapshot; returns the metadata saved with it.

        If this ends early, the store counts as touched, and only `discard` helps.

        Raises:
            RestoreOrderError: the store was touched before.
            BundleDamaged: a file of the snapshot is missing or can't be decoded.
        """
        await self._begin("load_checkpoint")
        if self.store.touched:
            raise RestoreOrderError("load_checkpoint needs an untouched store; call discard first")
        self.store.touched = True
        rows: dict[SampleId, Row] = _decode(
            self.disk, directory / ROWS_FILE, msgspec.msgpack.Decoder(dict[SampleId, Row])
        )
        self.store.replace({one: Row() for one in rows})
        await self._at("load_checkpoint", "midway")
        metadata: dict[str, Any] = _decode(
            self.disk, directory / METADATA_FILE, msgspec.json.Decoder(dict[str, Any])
        )
        self.store.replace(rows)
        await self._at("load_checkpoint", "after")
        return metadata

    async def discard(self) -> None:
        """Throw the rows away; the store is untouched, and its clients must be opened anew."""
        await self._begin("discard")
        self.store.rebuild()
        await self._at("discard", "after")


def _encode_columns(
    sample_ids: Sequence[SampleId], fields: Columns, tags: Sequence[Mapping[str, Any]] | None
) -> dict[str, list[msgspec.Raw]]:
    check_put(sample_ids, fields, tags)
    encode = msgspec.msgpack.encode
    try:
        return {
            name: [msgspec.Raw(encode(value)) for value in values]
            for name, values in fields.items()
        }
    except TypeError as exc:
        raise DataPlaneError(f"put_samples: a value msgpack can't hold: {exc}") from exc


def _write(
    disk: Disk, directory: Path, rows: dict[SampleId, Row], metadata: Mapping[str, Any]
) -> None:
    try:
        content = msgspec.json.encode(metadata)
        disk.make_dir(directory)
        disk.write(directory / ROWS_FILE, msgspec.msgpack.encode(rows))
        disk.write(directory / METADATA_FILE, content)
    except (OSError, TypeError) as exc:
        raise SaveError(f"the store's snapshot can't be written: {exc}") from exc


def _decode(disk: Disk, file: Path, decoder: Any) -> Any:
    try:
        return decoder.decode(disk.read(file, MOST_BYTES))
    except (OSError, msgspec.DecodeError) as exc:
        raise BundleDamaged(str(file.parent), file.name, str(exc)) from exc
