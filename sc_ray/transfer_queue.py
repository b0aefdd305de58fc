"""TransferQueue as the data plane: the controller's client, the driver's, and the workers'.

Every value is a 1-D tensor, of any length per row (a reward is one of length 1); a column has
one dtype, which it keeps. Anything else is refused by name rather than converted, for what went
in must be what comes out. Tensors are taken off their device and graph on the way in.
"""

from __future__ import annotations

import atexit
import concurrent.futures
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.to_thread
import msgspec
import ray

from sc_core import (
    CallTimeout,
    Columns,
    ConfigError,
    DataPlaneError,
    RestoreError,
    SampleId,
    ScError,
    WorkerDied,
    settle,
)
from sc_ray.bridge import LoopThread, await_future, result_within, within
from sc_ray.cluster import this_node
from sc_ray.lazy import lazy
from sc_ray.placement import INDEX, Places, unit_name
from sc_ray.store_actors import StoreActors, is_there, unit_actors

if TYPE_CHECKING:
    import torch

    from sc_ray import partition
else:
    torch = lazy("torch")
    partition = lazy("sc_ray.partition")

R = TypeVar("R")
Work = Callable[[], Coroutine[Any, Any, R]]


class TransferQueueSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Where the rows are. Plain data: send it to whichever process shall connect."""

    partition: str = "rollouts"
    storage_units: int = 2
    """Actors that hold the rows, each on one CPU of Ray's; the actor with the index takes one
    more. A snapshot can be loaded by the same number only."""
    deadline_s: float = 60.0  #: of one call for rows
    snapshot_deadline_s: float = 600.0
    """Of a save or a load. Beyond 200 s the storage units need telling too: set
    TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT, in seconds, in the environment of every process."""
    start_deadline_s: float = 300.0  #: of starting TransferQueue, stopping it, connecting to it

    def __post_init__(self) -> None:
        if self.storage_units < 1:
            raise ConfigError(f"storage_units is {self.storage_units}; it must be at least 1")
        if min(self.deadline_s, self.snapshot_deadline_s, self.start_deadline_s) <= 0:
            raise ConfigError(f"{self}: every deadline must be above 0 s")

    def connect(self) -> TransferQueueDataPlane:
        """A client for the controller. Blocks for some 10 ms: call it outside the event loop.

        Raises:
            DataPlaneError: no TransferQueue runs in this Ray cluster.
        """
        return TransferQueueDataPlane(self)

    def connect_rows(self) -> RowsClient:
        """A client for the process of a trainer or generator. Raises like `connect`."""
        return RowsClient(self)


class _Client:
    """A connection of its own, and the loop in whose thread it lives."""

    def __init__(self, spec: TransferQueueSpec) -> None:
        self.spec = spec
        self._open()

    def __repr__(self) -> str:
        state = "closed" if self._loop is None else "open"
        return f"<{type(self).__name__} of partition {self.spec.partition}, {state}>"

    def _open(self) -> None:
        spec = self.spec
        self._partition = within(
            spec.start_deadline_s,
            "connecting to TransferQueue",
            partial(partition.Partition.connect, spec.partition, spec.start_deadline_s),
        )
        self._loop: LoopThread | None = LoopThread("TransferQueue client")
        # Keeps a client that nobody closed alive until the process ends: collecting it would
        # end its sockets under the hands of its loop, which can hang.
        atexit.register(self._close)

    def _close(self) -> None:
        atexit.unregister(self._close)
        loop, self._loop = self._loop, None
        if loop is not None and loop.close():
            self._partition.close()

    def _submit(self, call: str, work: Work[R]) -> concurrent.futures.Future[R]:
        if self._loop is None:
            raise DataPlaneError(f"{call}: this client was closed; open another one")
        return self._loop.submit(_translated(call, work))

    async def _awaited(self, call: str, work: Work[R]) -> R:
        future = self._submit(call, work)
        try:
            return await await_future(future)
        except concurrent.futures.CancelledError as exc:
            raise DataPlaneError(f"{call}: this client was closed meanwhile") from exc
        finally:
            future.cancel()  # if it is not done: send nothing more

    async def _settled(self, call: str, deadline_s: float, work: Work[R]) -> R:
        """For what changes something: known to be done, or failed, or past its deadline."""
        return await settle(call, deadline_s, partial(self._awaited, call, work))

    async def _read(self, call: str, work: Work[R]) -> R:
        """For what changes nothing: ends at once on a cancel."""
        try:
            with anyio.fail_after(self.spec.deadline_s) as deadline:
                return await self._awaited(call, work)
        except TimeoutError:
            if deadline.cancelled_caught:
                raise CallTimeout(call, self.spec.deadline_s) from None
            raise


class TransferQueueDataPlane(_Client):
    """A `DataPlane` on the TransferQueue that runs in this Ray cluster; it starts and stops none.

    Usable from any thread and from asyncio, uvloop and trio: the client runs on a loop of its
    own, and no thread waits for it. A put, clear or save is awaited even when cancelled, so it
    has happened, or failed, when the cancel takes effect; only one that outlives its deadline
    (`CallTimeout`) may have happened in part. After the driver's `discard`, calls of an earlier
    client run into their deadline.
    """

    async def put_samples(
        self,
        sample_ids: Sequence[SampleId],
        fields: Columns,
        tags: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Write the named columns, and the given tags; others of existing rows stay.

        Raises:
            DataPlaneError: a value is no 1-D tensor, a column has two dtypes, lengths differ,
                or TransferQueue failed. Rows may be listed without data then.
            CallTimeout: the deadline passed; the rows may be there, listed without data, or not.
        """
        work = partial(self._partition.put, sample_ids, fields, tags)
        await self._settled("put_samples", self.spec.deadline_s, work)

    async def get_samples(
        self, sample_ids: Sequence[SampleId], select_fields: Sequence[str]
    ) -> dict[str, list[Any]]:
        """Read columns as lists of 1-D tensors, rows in the order asked for.

        Raises:
            MissingRows: some rows don't exist, or exist without any data.
            DataPlaneError: a row has data, but not a column asked for.
            CallTimeout: the deadline passed.
        """
        return await self._read(
            "get_samples", partial(self._partition.get, sample_ids, select_fields)
        )

    async def clear_samples(self, sample_ids: Sequence[SampleId]) -> None:
        """Remove these rows; ids that do not exist are no error. Raises like `put_samples`."""
        work = partial(self._partition.clear, sample_ids)
        await self._settled("clear_samples", self.spec.deadline_s, work)

    async def list_sample_ids(self) -> frozenset[SampleId]:
        """All rows of the partition, also those without data."""
        return await self._read("list_sample_ids", self._partition.list_ids)

    async def save_checkpoint(self, directory: Path, metadata: Mapping[str, Any]) -> None:
        """Write TransferQueue's snapshot, of all partitions, and what JSON can hold of metadata.

        Nothing may be put or cleared meanwhile: the snapshot would restore rows without data, or
        with another row's values. The directory must be one path for every node, and is made
        with mode 0700. Nothing is synced to disk.

        Raises:
            SaveError: the directory is there already, or something can't be written.
            CallTimeout: the deadline passed; actors may still be writing.
        """
        work = partial(self._partition.save, directory, metadata)
        await self._settled("save_checkpoint", self.spec.snapshot_deadline_s, work)

    async def aclose(self) -> None:
        """Let go of the client; the store stays."""
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._close)


class TransferQueueBootstrap(_Client):
    """The `BootstrapDataPlane` of the driver, which owns TransferQueue from start to close.

    TransferQueue is one per Ray cluster, and ends for everyone when the process that started it
    does. A client opened before a load sees the restored rows.
    """

    def __init__(self, spec: TransferQueueSpec, places: Places | None = None) -> None:
        """Start TransferQueue and connect. Blocks for some 10 s: call it outside the event loop.

        Args:
            places: for its actors; None: they go to this node.

        Raises:
            DataPlaneError: Ray isn't running, or has a TransferQueue already.
            ConfigError: Ray has too few CPUs for its actors.
            CallTimeout: they were not up by the deadline.
        """
        self._places = places
        self._actors = _start(spec, places)
        try:
            super().__init__(spec)
        except BaseException:
            self._actors.kill()
            raise

    def __enter__(self) -> TransferQueueBootstrap:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def is_untouched(self) -> bool:
        """Whether no process put a row, or began a load, since TransferQueue was started.

        Asks the index for partitions, which stay when emptied, and every storage unit for the
        requests that it ever got.
        """
        return await self._read("is_untouched", self._partition.is_untouched)

    async def load_checkpoint(self, directory: Path) -> Mapping[str, Any]:
        """Fill the untouched store from a snapshot; returns the metadata saved with it.

        A snapshot consists of pickles, and opening one runs what it holds: the caller has
        verified the hash of every file. If this ends early, cancelled or killed, the store
        counts as touched and only `discard` helps.

        Raises:
            RestoreError: other users can write to the directory or what is in it; or loading
                failed midway.
            BundleDamaged: a file is missing or unreadable; nothing was loaded.
            ConfigChanged: it was written by another number of storage units; nothing was loaded.
            RestoreOrderError: the store was touched before.
            CallTimeout: the deadline passed.
        """
        work = partial(self._partition.load, directory)
        return await self._settled("load_checkpoint", self.spec.snapshot_deadline_s, work)

    async def list_sample_ids(self) -> frozenset[SampleId]:
        """All rows of the partition, also those without data."""
        return await self._read("list_sample_ids", self._partition.list_ids)

    async def get_rows(self, sample_ids: Sequence[SampleId]) -> dict[str, list[Any]]:
        """Every column of these rows, which have the same; else like `get_samples`.

        Raises:
            MissingRows: some rows don't exist, or exist without any data.
            DataPlaneError: a column is in some of the rows only, or can't be read.
            CallTimeout: the deadline passed.
        """
        return await self._read("get_rows", partial(self._partition.get_all, sample_ids))

    async def discard(self) -> None:
        """Stop TransferQueue and start it anew, which takes some 10 s.

        Clients opened before are of no more use. A cancel takes effect afterwards.

        Raises:
            RestoreError: the new store is not untouched: someone else uses it.
            CallTimeout: stopping or starting did not end by its deadline.
        """
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._rebuild)
            if not await self.is_untouched():
                raise RestoreError("TransferQueue was started anew and someone put rows already")

    def close(self) -> None:
        """Stop TransferQueue, for every process. Blocks; may be called again."""
        if self._loop is not None:
            self._close()
            self._actors.stop(self.spec.start_deadline_s)

    def _rebuild(self) -> None:
        self._close()
        self._actors.stop(self.spec.start_deadline_s)
        self._actors = _start(self.spec, self._places)
        self._open()


class RowsClient(_Client):
    """Rows for a process without an event loop: each call blocks until done or too late.

    torch's number of threads, which TransferQueue changes for the whole process, is put back.
    """

    def __enter__(self) -> RowsClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def fetch(
        self, sample_ids: Sequence[SampleId], fields: Sequence[str]
    ) -> dict[str, list[torch.Tensor]]:
        """Read columns as lists of 1-D tensors, rows in the order asked for.

        Raises like `TransferQueueDataPlane.get_samples`.
        """
        return self._blocking("fetch", partial(self._partition.get, sample_ids, fields))

    def put(
        self,
        sample_ids: Sequence[SampleId],
        columns: Columns,
        tags: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Write the named columns. Raises like `TransferQueueDataPlane.put_samples`."""
        self._blocking("put", partial(self._partition.put, sample_ids, columns, tags))

    def close(self) -> None:
        """Let go of the client; the store stays. May be called again."""
        self._close()

    def _blocking(self, call: str, work: Work[R]) -> R:
        threads = torch.get_num_threads()
        try:
            return result_within(self.spec.deadline_s, call, self._submit(call, work))
        finally:
            torch.set_num_threads(threads)


def processes_of(spec: TransferQueueSpec) -> dict[str, Any]:
    """Handles of the actors that the TransferQueue of this Ray cluster consists of, by name.

    Raises:
        WorkerDied: one is not there.
    """
    wanted: dict[str, tuple[str, str | None]] = {INDEX: (partition.CONTROLLER, partition.NAMESPACE)}
    for rank, name in enumerate(unit_actors(spec.storage_units)):
        wanted[unit_name(rank)] = (name, None)
    found = {}
    for shown, (name, namespace) in wanted.items():
        try:
            found[shown] = ray.get_actor(name, namespace=namespace)
        except ValueError as exc:
            raise WorkerDied(shown, f"there is no actor {name}") from exc
    return found


async def _translated(call: str, work: Callable[[], Awaitable[R]]) -> R:
    """TransferQueue raises `RuntimeError` for almost everything, which says little."""
    try:
        return await work()
    except ScError:
        raise
    except Exception as exc:
        raise DataPlaneError(f"{call}: {exc}") from exc


def _start(spec: TransferQueueSpec, places: Places | None) -> StoreActors:
    if not ray.is_initialized():
        raise DataPlaneError("TransferQueue needs Ray: call ray.init() first")
    if is_there(partition.CONTROLLER, partition.NAMESPACE):
        raise DataPlaneError("this Ray cluster has a TransferQueue already, and it can't have two")
    if places is None:
        needed, there = spec.storage_units + 1, ray.cluster_resources().get("CPU", 0)
        if there < needed:
            raise ConfigError(
                f"{spec.storage_units} storage units need {needed} CPUs and Ray has {there:g}: "
                f"start Ray with a larger num_cpus, which need not be real ones"
            )
        units: list[Any] = [this_node()] * spec.storage_units
        return StoreActors(this_node(), units, deadline_s=spec.start_deadline_s)
    units = [places.of(unit_name(rank)) for rank in range(spec.storage_units)]
    return StoreActors(places.of(INDEX), units, deadline_s=spec.start_deadline_s)
