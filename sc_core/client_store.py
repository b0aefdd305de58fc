"""A data plane made of a client of somebody else's: what our port demands, and it may lack."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import anyio

from sc_core.calls import at_once, in_thread, settle, told
from sc_core.clients import AsyncClient, FieldsCodec, PlainFields
from sc_core.errors import (
    CallTimeout,
    DataPlaneError,
    MissingRows,
    RestoreError,
    RestoreOrderError,
    SaveError,
    ScError,
)
from sc_core.ports import Columns, DataPlane, Runner
from sc_core.records import SampleId
from sc_core.restore import ReadyStore
from sc_core.returned import check_put

logger = logging.getLogger(__name__)
R = TypeVar("R")
Tags = Sequence[Mapping[str, Any]] | None
_NAMES = "sc_core.columns"  #: in the metadata of a snapshot, under `put="insert"`


class ClientStore:
    """A `RowStore` on a client of yours; give it to `open_run`.

    A call is awaited whatever is cancelled around it, for at most its deadline; past it, whether
    it took effect is unknown. A put that failed or was left may be repeated and then has the
    effect of one. Values are what `fields` and the client make of them.

    Args:
        build: makes a client of a new store, without blocking. Called before anything else, and
            by `discard`, after `close` of the one before.
        partition: the name that every call is given.
        fields: how the client wants its columns.
        put: what the client does with a row that exists. `merge`: it writes the columns given,
            and keeps the others. `insert`: it refuses the row, replaces it, or has it twice; the
            store then reads, clears and writes the whole row, so that all writes have to go
            through it.
        deadline_s: of each call for rows.
        snapshot_deadline_s: of a save, a load and `close`.
        runner: what looks at the disk.
    """

    def __init__(
        self,
        build: Callable[[], AsyncClient],
        *,
        partition: str = "rollouts",
        fields: FieldsCodec | None = None,
        put: Literal["merge", "insert"] = "merge",
        deadline_s: float = 60.0,
        snapshot_deadline_s: float = 600.0,
        runner: Runner = in_thread,
    ) -> None:
        self.partition = partition
        self._build = build
        self._fields = fields or PlainFields()
        self._inserts = put == "insert"
        self._deadline_s = deadline_s
        self._snapshot_deadline_s = snapshot_deadline_s
        self._runner = runner
        self._client: AsyncClient | None = None
        self.builds = 0  #: stores before this one
        self._touched = False
        self._names: dict[SampleId, frozenset[str]] = {}  #: columns of rows that were put here
        self._unwritten: dict[SampleId, dict[str, Any]] = {}
        """Under `insert`: whole rows that were cleared to be put again, and may not have been."""
        self._in_use: dict[SampleId, anyio.Event] = {}
        """Under `insert`: rows of calls under way; each is set when its call is over."""

    def __repr__(self) -> str:
        return f"<ClientStore of partition {self.partition}, build {self.builds}>"

    async def __aenter__(self) -> ClientStore:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the client; if the body failed, a failure to close is a warning in the log."""
        try:
            await self.aclose()
        except ScError as exc:
            if error is None:
                raise
            logger.warning("%r did not close: %s", self, exc)

    async def connect(self, ready: ReadyStore) -> DataPlane:
        """The data plane of a controller. Closing it leaves the store open."""
        return self.client()

    def client(self) -> DataPlane:
        """The rows for somebody else in this process; good until `discard`."""
        return _Plane(self, self.builds)

    async def is_untouched(self) -> bool:
        """Whether nobody wrote or loaded a row since `build`, as far as this process knows, and
        the client lists none."""
        return not self._touched and not await self.list_sample_ids()

    async def load_checkpoint(self, directory: Path) -> Mapping[str, Any]:
        """Fill the untouched store; if this ends early, only `discard` helps.

        Raises:
            RestoreOrderError: the store was touched.
            RestoreError: the client could not load it.
            CallTimeout: the deadline passed.
        """
        if not await self.is_untouched():
            raise RestoreOrderError("load_checkpoint needs an untouched store; call discard first")
        client = self._opened()
        self._touched = True

        async def load() -> dict[str, Any]:
            loaded = dict(await client.load_checkpoint(directory))
            kept = loaded.pop(_NAMES, {})
            self._names = {one: frozenset(names) for one, names in kept.items()}
            return loaded

        return await self._call(
            "load_checkpoint", load, self._snapshot_deadline_s, error=RestoreError
        )

    async def discard(self) -> None:
        """Close the client, and build a new store."""
        await self.aclose()
        self._opened()

    async def aclose(self) -> None:
        """Close the client, and with it the store. May be called again.

        Raises:
            DataPlaneError, CallTimeout: it did not close.
        """
        client, self._client = self._client, None
        self._touched, self._names, self._unwritten = False, {}, {}
        if client is not None:
            self.builds += 1
            await self._call("close", client.close, self._snapshot_deadline_s)

    # rows ------------------------------------------------------------------------------

    async def put_samples(
        self, sample_ids: Sequence[SampleId], fields: Columns, tags: Tags = None
    ) -> None:
        """As of `DataPlane`."""
        check_put(sample_ids, fields, tags)
        if not sample_ids:
            return
        client = self._opened()
        self._touched = True
        columns = {name: list(values) for name, values in fields.items()}
        given = None if tags is None else [dict(tag) for tag in tags]
        write = self._insert if self._inserts else self._merge
        async with self._alone_with(sample_ids):
            await self._call(
                "put_samples", partial(write, client, list(sample_ids), columns, given)
            )

    async def get_samples(
        self, sample_ids: Sequence[SampleId], select_fields: Sequence[str]
    ) -> dict[str, list[Any]]:
        """As of `DataPlane`."""
        ids, names = list(sample_ids), list(select_fields)
        if not ids:
            return {name: [] for name in names}
        client = self._opened()

        async def read() -> dict[str, list[Any]]:
            return self._fields.decode(await client.get_samples(ids, self.partition, names), names)

        if bare := [one for one in ids if self._names.get(one, {""}) == frozenset()]:
            raise MissingRows(bare)
        try:
            async with self._alone_with(ids):
                columns = await self._call("get_samples", read)
        except CallTimeout:
            raise
        except DataPlaneError as exc:
            await self._check_there(ids, exc)
            raise
        if any(len(values) != len(ids) for values in columns.values()):
            await self._check_there(ids, None)
            found = {name: len(values) for name, values in columns.items()}
            raise DataPlaneError(f"get_samples: {len(ids)} rows exist, and it returned {found}")
        return columns

    async def clear_samples(self, sample_ids: Iterable[SampleId]) -> None:
        """As of `DataPlane`."""
        client, doomed = self._opened(), set(sample_ids)

        async def clear() -> None:
            listed = await self._listed(client)
            if there := sorted(doomed.intersection(listed)):  # none might stand for all
                await client.clear_samples(there, self.partition)

        if doomed:
            async with self._alone_with(doomed):
                await self._call("clear_samples", clear)
                for one in doomed:
                    self._names.pop(one, None)
                    self._unwritten.pop(one, None)

    async def list_sample_ids(self) -> frozenset[SampleId]:
        """As of `DataPlane`."""
        client = self._opened()
        return await self._call("list_sample_ids", lambda: self._listed(client))

    async def save_checkpoint(self, directory: Path, metadata: Mapping[str, Any]) -> None:
        """As of `DataPlane`."""
        client = self._opened()
        kept = {_NAMES: {one: sorted(names) for one, names in self._names.items()}}

        async def save() -> None:
            if await self._runner(os.path.lexists, directory):
                raise SaveError(f"{directory} is there already; a snapshot needs a new directory")
            told_too = kept if self._inserts else {}
            await client.save_checkpoint(directory, metadata={**metadata, **told_too})

        await self._call("save_checkpoint", save, self._snapshot_deadline_s, error=SaveError)

    # how a client puts ------------------------------------------------------------------

    async def _merge(
        self, client: AsyncClient, ids: list[SampleId], columns: Columns, tags: Any
    ) -> None:
        await self._put(client, ids, columns, tags)
        for one in ids:
            self._names[one] = self._names.get(one, frozenset()).union(columns)

    async def _insert(
        self, client: AsyncClient, ids: list[SampleId], columns: Columns, tags: Any
    ) -> None:
        there = sorted((await self._listed(client)).intersection(ids))
        rows = {one: dict(self._unwritten.get(one, {})) for one in ids}
        await self._read_back(client, [one for one in there if one not in self._unwritten], rows)
        for at, one in enumerate(ids):
            rows[one].update({name: values[at] for name, values in columns.items()})
        self._unwritten.update(rows)
        if there:
            await client.clear_samples(there, self.partition)
        alike = defaultdict(list)
        for at, one in enumerate(ids):
            alike[tuple(rows[one])].append(at)
        for names, places in alike.items():
            group = [ids[at] for at in places]
            whole = {name: [rows[one][name] for one in group] for name in names}
            await self._put(client, group, whole, tags and [tags[at] for at in places])
        for one in ids:
            self._names[one] = frozenset(self._unwritten.pop(one))

    async def _read_back(
        self, client: AsyncClient, ids: list[SampleId], rows: dict[SampleId, dict[str, Any]]
    ) -> None:
        alike = defaultdict(list)
        for one in ids:
            if one not in self._names:
                raise DataPlaneError(f"put_samples: row {one} was put by somebody else")
            alike[tuple(sorted(self._names[one]))].append(one)
        for names, group in alike.items():
            if names:
                read = await client.get_samples(group, self.partition, list(names))
                for name, values in self._fields.decode(read, names).items():
                    for one, value in zip(group, values, strict=True):
                        rows[one][name] = value

    async def _put(
        self, client: AsyncClient, ids: list[SampleId], columns: Columns, tags: Any
    ) -> None:
        encoded = self._fields.encode(columns, len(ids)) if columns else None
        await client.put_samples(ids, self.partition, encoded, tags)

    # calls of the client ----------------------------------------------------------------

    @asynccontextmanager
    async def _alone_with(self, ids: Iterable[SampleId]) -> AsyncIterator[None]:
        """Under `insert`, wait until no other call of this store has one of these rows.

        One write of a row would lose the columns of another, and a read could find it cleared.
        """
        if not self._inserts:
            yield
            return
        mine, over = set(ids), anyio.Event()
        while taken := mine.intersection(self._in_use):
            await self._in_use[min(taken)].wait()
        self._in_use |= dict.fromkeys(mine, over)
        try:
            yield
        finally:
            for one in mine:
                del self._in_use[one]
            over.set()

    async def _listed(self, client: AsyncClient) -> frozenset[SampleId]:
        listed = await client.list_sample_ids(self.partition)
        rows = frozenset() if isinstance(listed, str) else frozenset(listed)
        if isinstance(listed, str) or not all(isinstance(one, str) for one in rows):
            raise DataPlaneError(f"list_sample_ids returned {listed!r:.80}, which are no row ids")
        return rows

    async def _check_there(self, ids: list[SampleId], error: Exception | None) -> None:
        """Raise `MissingRows`, if that is why a read failed."""
        listed = await self.list_sample_ids()
        if missing := [one for one in ids if one not in listed]:
            raise MissingRows(missing) from error

    def _opened(self) -> AsyncClient:
        if self._client is None:
            self._client = at_once("build", self._build)
        return self._client

    async def _call(
        self,
        call: str,
        work: Callable[[], Awaitable[R]],
        deadline_s: float | None = None,
        *,
        error: type[ScError] = DataPlaneError,
    ) -> R:
        async def one() -> R:
            try:
                return await work()
            except ScError:
                raise
            except Exception as exc:
                raise error(f"{call}: {told(exc)}") from exc

        return await settle(call, deadline_s or self._deadline_s, one)


class _Plane:
    """A `DataPlane` of one build of the store."""

    def __init__(self, store: ClientStore, build: int) -> None:
        self._store: ClientStore | None = store
        self._build = build

    async def put_samples(
        self, sample_ids: Sequence[SampleId], fields: Columns, tags: Tags = None
    ) -> None:
        await self._of("put_samples").put_samples(sample_ids, fields, tags)

    async def get_samples(
        self, sample_ids: Sequence[SampleId], select_fields: Sequence[str]
    ) -> dict[str, list[Any]]:
        return await self._of("get_samples").get_samples(sample_ids, select_fields)

    async def clear_samples(self, sample_ids: Sequence[SampleId]) -> None:
        await self._of("clear_samples").clear_samples(sample_ids)

    async def list_sample_ids(self) -> frozenset[SampleId]:
        return await self._of("list_sample_ids").list_sample_ids()

    async def save_checkpoint(self, directory: Path, metadata: Mapping[str, Any]) -> None:
        await self._of("save_checkpoint").save_checkpoint(directory, metadata)

    async def aclose(self) -> None:
        self._store = None

    def _of(self, call: str) -> ClientStore:
        if self._store is None:
            raise DataPlaneError(f"{call}: this client was closed; open another one")
        if self._store.builds != self._build:
            raise DataPlaneError(f"{call}: the store was discarded; open a client of the new one")
        return self._store
