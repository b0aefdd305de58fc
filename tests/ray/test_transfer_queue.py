"""TransferQueue passes the suite of every data plane, and what is its own about it."""

from __future__ import annotations

import gc
import json
import os
import pickle
import shutil
import signal
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import pytest
import ray
import torch

from sc_core.errors import (
    BundleDamaged,
    CallTimeout,
    ConfigChanged,
    ConfigError,
    DataPlaneError,
    MissingRows,
    RestoreError,
    RestoreOrderError,
    SaveError,
)
from sc_core.ports import DataPlane
from sc_core.testing.conformance import ROW_CHECKS, Check, Subject, snapshot_restores_the_store
from sc_ray import partition
from sc_ray.bridge import within
from sc_ray.transfer_queue import (
    RowsClient,
    TransferQueueBootstrap,
    TransferQueueDataPlane,
    TransferQueueSpec,
)

pytestmark = pytest.mark.anyio

ONE_CLOCK_EACH = pytest.mark.parametrize("anyio_backend", [("asyncio", {}), ("trio", {})])
ON_ASYNCIO = pytest.mark.parametrize("anyio_backend", [("asyncio", {})])
DTYPES = {"int": torch.int64, "float": torch.float32, "bool": torch.bool}


def tensor(*numbers: float, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype)


def subject_of(bootstrap: TransferQueueBootstrap) -> Subject:
    async def connect() -> DataPlane:
        return await anyio.to_thread.run_sync(bootstrap.spec.connect)

    return Subject(
        bootstrap,
        connect,
        value=lambda kind, numbers: torch.tensor(numbers, dtype=DTYPES[kind]),
        same=lambda one, other: one.dtype == other.dtype and torch.equal(one, other),
    )


@pytest.fixture
async def plane(bootstrap: TransferQueueBootstrap) -> AsyncIterator[TransferQueueDataPlane]:
    """A client of a store that is empty afterwards."""
    async with client(bootstrap.spec) as plane:
        yield plane
        await plane.clear_samples(sorted(await plane.list_sample_ids()))


@asynccontextmanager
async def client(spec: TransferQueueSpec) -> AsyncIterator[TransferQueueDataPlane]:
    plane = await anyio.to_thread.run_sync(spec.connect)
    try:
        yield plane
    finally:
        await plane.aclose()


def threads_of(pid: int) -> list[Path]:
    return list(Path(f"/proc/{pid}/task").iterdir())


@contextmanager
def stopped_index() -> Iterator[Any]:
    """TransferQueue's index actor does not answer; yields a function that lets it go on."""
    actor = ray.get_actor(partition.CONTROLLER, namespace=partition.NAMESPACE)
    pid = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))
    os.kill(pid, signal.SIGSTOP)
    while not all(") T" in (task / "stat").read_text() for task in threads_of(pid)):
        time.sleep(0.001)  # each thread stops when it is its turn
    try:
        yield lambda: os.kill(pid, signal.SIGCONT)
    finally:
        os.kill(pid, signal.SIGCONT)


# the first test finds the store as it was started


@ON_ASYNCIO
async def test_a_row_of_any_partition_ever_put_counts_as_touch(
    bootstrap: TransferQueueBootstrap,
) -> None:
    if not await bootstrap.is_untouched():
        await bootstrap.discard()
    assert await bootstrap.is_untouched()
    async with client(msgspec.structs.replace(bootstrap.spec, partition="another")) as plane:
        assert await bootstrap.is_untouched()
        await plane.put_samples(["a"], {"x": [tensor(1)]})
        assert not await bootstrap.is_untouched()
        assert await bootstrap.list_sample_ids() == frozenset()
        # the whole partition goes: the index knows nothing more, the storage units do
        other = plane._partition._client
        await plane._awaited("clear", lambda: other.async_clear_partition("another"))
        assert await plane._awaited("list", other.async_kv_list) == {}
    assert not await bootstrap.is_untouched()


@ONE_CLOCK_EACH
async def test_snapshot(bootstrap: TransferQueueBootstrap, tmp_path: Path) -> None:
    await snapshot_restores_the_store(subject_of(bootstrap), tmp_path / "snapshot")


@ON_ASYNCIO
async def test_load_that_fails_midway_leaves_a_store_that_says_so(
    bootstrap: TransferQueueBootstrap, tmp_path: Path
) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    async with client(bootstrap.spec) as plane:
        await plane.put_samples(["a", "b"], {"x": [tensor(1), tensor(2)]})
        await plane.save_checkpoint(good, {"step": 1})
    shutil.copytree(good, bad)
    index = bad / partition.CONTROLLER_FILE
    index.write_bytes(index.read_bytes()[:-20])
    await bootstrap.discard()
    with pytest.raises(RestoreError, match="holds parts of it; call discard"):
        await bootstrap.load_checkpoint(bad)
    assert not await bootstrap.is_untouched()
    assert await bootstrap.list_sample_ids() == frozenset()  # looking empty is not enough
    with pytest.raises(RestoreOrderError):
        await bootstrap.load_checkpoint(good)


@pytest.mark.parametrize("check", ROW_CHECKS, ids=lambda check: check.__name__)
async def test_rows(bootstrap: TransferQueueBootstrap, check: Check) -> None:
    before = await bootstrap.list_sample_ids()
    await check(subject_of(bootstrap))
    assert await bootstrap.list_sample_ids() == before


# values --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (1.5, "a float"),
        (3, "a int"),
        ("text", "a str"),
        ([1, 2], "a list"),
        (torch.tensor(1.0), "a tensor of 0 dimensions"),
        (torch.ones(2, 2), "a tensor of 2 dimensions"),
    ],
)
@ON_ASYNCIO
async def test_what_is_no_row_of_numbers_is_refused_by_name(
    plane: TransferQueueDataPlane, value: Any, found: str
) -> None:
    with pytest.raises(DataPlaneError, match=rf"column reward, row b: .*this is {found}$"):
        await plane.put_samples(["a", "b"], {"reward": [tensor(1), value]})
    assert await plane.list_sample_ids() == frozenset()


@ON_ASYNCIO
async def test_dtypes_are_kept_and_tensors_leave_their_graph(plane: TransferQueueDataPlane) -> None:
    columns = {
        str(dtype): [torch.tensor([1, 0, 1], dtype=dtype), torch.tensor([], dtype=dtype)]
        for dtype in (torch.int32, torch.int64, torch.float32, torch.float64, torch.bfloat16)
    }
    columns["grad"] = [torch.ones(2, requires_grad=True), torch.ones(1)]
    await plane.put_samples(["a", "b"], columns)
    got = await plane.get_samples(["a", "b"], list(columns))
    for name, values in columns.items():
        for one, other in zip(got[name], values, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other.detach())
            assert not one.requires_grad


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@ON_ASYNCIO
async def test_a_column_has_one_dtype(plane: TransferQueueDataPlane) -> None:
    with pytest.raises(DataPlaneError, match="column x, row b: torch.int64 beside torch.float32"):
        await plane.put_samples(["a", "b"], {"x": [torch.ones(1), tensor(1)]})
    await plane.put_samples(["a"], {"x": [torch.ones(1)]})
    with pytest.raises(DataPlaneError, match="column x holds torch.float32 and got torch.int64"):
        await plane.put_samples(["b"], {"x": [tensor(1)]})
    with pytest.raises(DataPlaneError, match="column x holds values of several dtypes"):
        await plane.get_samples(["a", "b"], ["x"])


# what TransferQueue would pass over in silence ------------------------------------------


@ON_ASYNCIO
async def test_a_write_that_the_index_does_not_take_over_is_an_error(
    plane: TransferQueueDataPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lose(*args: Any, **kwargs: Any) -> None:
        """What TransferQueue does, beside logging it, when no answer comes."""

    manager = plane._partition._client.storage_manager
    with monkeypatch.context() as patch:
        patch.setattr(manager, "notify_data_update", lose)
        with pytest.raises(DataPlaneError, match="column x was not taken over; repeat it"):
            await plane.put_samples(["a"], {"x": [tensor(1)]})
    with pytest.raises(MissingRows):
        await plane.get_samples(["a"], ["x"])
    await plane.put_samples(["a"], {"x": [tensor(1)]})
    assert (await plane.get_samples(["a"], ["x"]))["x"][0].tolist() == [1]


@ON_ASYNCIO
async def test_a_row_cleared_while_it_is_read_is_missing_not_someone_elses(
    bootstrap: TransferQueueBootstrap,
    plane: TransferQueueDataPlane,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await plane.put_samples(["a", "b"], {"x": [tensor(1), tensor(2)]})
    real = plane._partition._client.async_get_data
    new = [f"new{at}" for at in range(1000)]  # enough to reach the indexes of a and b
    async with client(bootstrap.spec) as other:

        async def replace_then_read(meta: Any) -> Any:
            await other._partition.clear(["a", "b"])
            await other._partition.put(new, {"x": [tensor(3) for _ in new]}, None)
            return await real(meta)

        monkeypatch.setattr(plane._partition._client, "async_get_data", replace_then_read)
        with pytest.raises(MissingRows, match="a, b"):
            await plane.get_samples(["a", "b"], ["x"])


# deadlines and cancels -------------------------------------------------------------------


async def test_calls_of_a_store_that_hangs_end_at_their_deadline(
    bootstrap: TransferQueueBootstrap, plane: TransferQueueDataPlane
) -> None:
    await plane.put_samples(["a"], {"x": [tensor(1)]})
    spec = msgspec.structs.replace(bootstrap.spec, deadline_s=0.3, snapshot_deadline_s=0.3)
    async with client(spec) as hasty:
        with stopped_index():
            calls = {
                "put_samples": lambda: hasty.put_samples(["b"], {"x": [tensor(2)]}),
                "get_samples": lambda: hasty.get_samples(["a"], ["x"]),
                "clear_samples": lambda: hasty.clear_samples(["a"]),
                "list_sample_ids": hasty.list_sample_ids,
            }
            for name, call in calls.items():
                with pytest.raises(CallTimeout, match=rf"^{name} did not return within 0\.3 s$"):
                    await call()
        # the put goes no further by itself; whatever happened of it, repeating it puts it right
        for _ in range(5):
            await plane.put_samples(["c"], {"x": [tensor(3)]})
        with pytest.raises(MissingRows):
            await plane.get_samples(["b"], ["x"])
    await plane.put_samples(["a", "b"], {"x": [tensor(1), tensor(2)]})
    got = await plane.get_samples(["b", "a"], ["x"])
    assert [one.tolist() for one in got["x"]] == [[2], [1]]


async def test_a_cancelled_put_ends_when_it_is_known_to_be_done(
    plane: TransferQueueDataPlane,
) -> None:
    ended = anyio.Event()

    async def put() -> None:
        try:
            await plane.put_samples(["a"], {"x": [tensor(1)]})
        finally:
            ended.set()

    with stopped_index() as go_on:
        async with anyio.create_task_group() as tg:
            tg.start_soon(put)
            await anyio.sleep(0.05)
            tg.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.05)
                assert not ended.is_set()
                go_on()
    assert (await plane.get_samples(["a"], ["x"]))["x"][0].tolist() == [1]


async def test_a_cancelled_get_ends_at_once(plane: TransferQueueDataPlane) -> None:
    await plane.put_samples(["a"], {"x": [tensor(1)]})
    with stopped_index(), anyio.move_on_after(0.05) as scope:
        await plane.get_samples(["a"], ["x"])
    assert scope.cancelled_caught
    assert len((await plane.get_samples(["a"], ["x"]))["x"]) == 1


async def wait_until_it_is_closed(plane: TransferQueueDataPlane) -> None:
    with pytest.raises(DataPlaneError, match="list_sample_ids: this client was closed meanwhile"):
        await plane.list_sample_ids()


async def test_a_closed_client_says_so(bootstrap: TransferQueueBootstrap) -> None:
    async with client(bootstrap.spec) as plane:
        assert "open" in repr(plane)
        with stopped_index():
            async with anyio.create_task_group() as tg:
                tg.start_soon(wait_until_it_is_closed, plane)
                await anyio.sleep(0.05)
                await plane.aclose()
    await plane.aclose()
    assert "closed" in repr(plane)
    with pytest.raises(DataPlaneError, match="put_samples: this client was closed"):
        await plane.put_samples(["a"], {"x": [tensor(1)]})


# snapshots -------------------------------------------------------------------------------


@pytest.fixture
async def snapshot(plane: TransferQueueDataPlane, tmp_path: Path) -> Path:
    await plane.put_samples(["a"], {"x": [tensor(1)]})
    await plane.save_checkpoint(tmp_path / "snapshot", {"step": 1})
    return tmp_path / "snapshot"


@ON_ASYNCIO
async def test_snapshot_is_private_and_small(plane: TransferQueueDataPlane, tmp_path: Path) -> None:
    ids = [f"row{at}" for at in range(64)]
    await plane.put_samples(ids, {"x": [torch.zeros(1000) for _ in ids]})
    directory = tmp_path / "snapshot"
    await plane.save_checkpoint(directory, {"step": 1})
    assert directory.stat().st_mode & 0o777 == 0o700
    content = sum(one.stat().st_size for one in directory.rglob("*") if one.is_file())
    assert content < 1.5 * 64 * 4000  # a dense column would be written 64 times
    assert json.loads((directory / "metadata.json").read_bytes())["user_metadata"] == {"step": 1}


@ON_ASYNCIO
async def test_another_number_of_storage_units_is_refused_before_loading(
    bootstrap: TransferQueueBootstrap, snapshot: Path
) -> None:
    units = snapshot / "simple_storage" / "storage_unit_info.json"
    units.write_text(json.dumps([*json.loads(units.read_text())] * 2))
    with pytest.raises(ConfigChanged, match=r"by 4 storage units .* has 2: set storage_units to 4"):
        await bootstrap.load_checkpoint(snapshot)


@ON_ASYNCIO
async def test_what_others_can_write_is_not_opened(
    bootstrap: TransferQueueBootstrap, snapshot: Path
) -> None:
    inside = snapshot / "simple_storage"
    for path, mode in [
        (snapshot, 0o777),
        (inside, 0o720),
        (snapshot / "controller_state.pkl", 0o620),
        (next(inside.glob("su_0_*")), 0o602),
    ]:
        before = path.stat().st_mode
        path.chmod(mode)
        with pytest.raises(RestoreError, match="can be changed by other users"):
            await bootstrap.load_checkpoint(snapshot)
        path.chmod(before)
    index = snapshot / "controller_state.pkl"
    index.rename(index.with_suffix(".real"))
    index.symlink_to(index.with_suffix(".real"))
    with pytest.raises(RestoreError, match="is a link"):
        await bootstrap.load_checkpoint(snapshot)


@pytest.mark.parametrize(
    "name", ["metadata.json", "controller_state.pkl", "simple_storage/storage_unit_info.json"]
)
@ON_ASYNCIO
async def test_a_missing_file_is_named_before_loading(
    bootstrap: TransferQueueBootstrap, snapshot: Path, name: str
) -> None:
    (snapshot / name).unlink()
    with pytest.raises(BundleDamaged) as caught:
        await bootstrap.load_checkpoint(snapshot)
    assert caught.value.file == name


@ON_ASYNCIO
async def test_a_missing_storage_file_is_named_before_loading(
    bootstrap: TransferQueueBootstrap, snapshot: Path
) -> None:
    lost = next((snapshot / "simple_storage").glob("su_1_*"))
    lost.unlink()
    with pytest.raises(BundleDamaged, match=lost.name):
        await bootstrap.load_checkpoint(snapshot)


@ON_ASYNCIO
async def test_a_save_that_can_not_work_is_an_error_and_the_store_goes_on(
    plane: TransferQueueDataPlane, tmp_path: Path
) -> None:
    await plane.put_samples(["a"], {"x": [tensor(1)]})
    with pytest.raises(SaveError, match="No such file"):
        await plane.save_checkpoint(tmp_path / "nowhere" / "snapshot", {})
    with pytest.raises(SaveError, match="not JSON serializable"):
        await plane.save_checkpoint(tmp_path / "snapshot", {"x": object()})
    assert not (tmp_path / "snapshot").exists()
    await plane.save_checkpoint(tmp_path / "snapshot", {})


# from other processes --------------------------------------------------------------------


@ray.remote(num_cpus=0)
def use_rows(spec: TransferQueueSpec) -> tuple[list[list[int]], int, tuple[str, ...]]:
    torch.set_num_threads(3)
    with spec.connect_rows() as rows:
        fetched = rows.fetch(["b", "a"], ["x"])["x"]
        rows.put(["a"], {"y": [torch.tensor([0.5])]}, [{"seen": True}])
        try:
            rows.fetch(["a", "nobody"], ["x"])
        except MissingRows as exc:
            missing = exc.missing
    threads = within(10, "count", torch.get_num_threads)  # as a new thread would be told
    return [one.tolist() for one in fetched], threads, missing


@ON_ASYNCIO
async def test_worker_processes_fetch_and_put(
    bootstrap: TransferQueueBootstrap, plane: TransferQueueDataPlane
) -> None:
    await plane.put_samples(["a", "b"], {"x": [tensor(1), tensor(2, 3)]})
    fetched, threads, missing = await anyio.to_thread.run_sync(
        lambda: ray.get(use_rows.remote(bootstrap.spec))
    )
    assert fetched == [[2, 3], [1]]
    assert threads == 3  # TransferQueue would have left another number
    assert missing == ("nobody",)
    got = await plane.get_samples(["a"], ["x", "y"])
    assert [got["x"][0].tolist(), got["y"][0].tolist()] == [[1], [0.5]]


def test_blocking_calls_end_at_their_deadline_and_with_close(
    bootstrap: TransferQueueBootstrap,
) -> None:
    rows = RowsClient(msgspec.structs.replace(bootstrap.spec, deadline_s=0.2))
    with stopped_index(), pytest.raises(CallTimeout, match=r"^fetch did not .* 0\.2 s$"):
        rows.fetch(["a"], ["x"])
    rows.close()
    rows.close()
    with pytest.raises(DataPlaneError, match="fetch: this client was closed"):
        rows.fetch(["a"], ["x"])


def test_a_forgotten_client_is_kept_until_it_is_closed(bootstrap: TransferQueueBootstrap) -> None:
    rows = RowsClient(bootstrap.spec)
    forgotten = weakref.ref(rows)
    del rows
    gc.collect()
    kept = forgotten()
    assert kept is not None
    kept.put(["a"], {"x": [tensor(1)]})
    kept.close()
    del kept
    gc.collect()
    assert forgotten() is None


# starting --------------------------------------------------------------------------------


def test_one_transfer_queue_per_cluster(bootstrap: TransferQueueBootstrap) -> None:
    with pytest.raises(DataPlaneError, match="has a TransferQueue already"):
        TransferQueueBootstrap(bootstrap.spec)


def test_too_few_cpus_are_refused_with_both_numbers(
    local_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition, "NAMESPACE", "of nobody")
    with pytest.raises(ConfigError, match="40 storage units need 41 CPUs and Ray has 16"):
        TransferQueueBootstrap(TransferQueueSpec(storage_units=40))


def test_connecting_to_nothing_says_what_to_do(
    local_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition, "NAMESPACE", "of nobody")
    with pytest.raises(DataPlaneError, match="start one on the driver"):
        TransferQueueSpec().connect()
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(DataPlaneError, match=r"call ray\.init\(\) first"):
        TransferQueueSpec().connect()


def test_spec_is_plain_data() -> None:
    spec = TransferQueueSpec(partition="p", storage_units=3, deadline_s=1.5)
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert msgspec.json.decode(msgspec.json.encode(spec), type=TransferQueueSpec) == spec
    with pytest.raises(ConfigError, match="storage_units is 0"):
        TransferQueueSpec(storage_units=0)
    with pytest.raises(ConfigError, match="deadline_s=0"):
        TransferQueueSpec(deadline_s=0)
