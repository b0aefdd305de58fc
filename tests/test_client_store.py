"""Clients of somebody else's, awaited or blocking, as our data plane."""

from __future__ import annotations

import json
import operator
import threading
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from sc_core import (
    CallTimeout,
    ClientStore,
    ControllerConfig,
    DataPlane,
    DataPlaneError,
    MissingRows,
    PromptList,
    RestoreError,
    Sample,
    SaveError,
    SyncClient,
    ThreadedClient,
    audit_run,
    decode,
    in_thread,
    inline,
    open_run,
)
from sc_core.records import Prompt
from sc_core.testing import (
    ROW_CHECKS,
    MemoryTrainer,
    Subject,
    snapshot_restores_the_store,
)
from sc_core.testing.conformance import Check

pytestmark = pytest.mark.anyio
REAL_CLOCKS = pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])


class Client:
    """A blocking client with rows in a list: a put of a row that exists makes it anew."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, dict[str, Any]]] = []
        self.calls: list[str] = []

    def find(self, sample_id: str) -> dict[str, Any] | None:
        return next((columns for one, columns in self.rows if one == sample_id), None)

    def put_samples(self, ids: list[str], partition: str, fields: Any, tags: Any) -> None:
        assert partition == "rollouts" and ids
        self.calls.append("put")
        for at, one in enumerate(ids):
            given = {name: values[at] for name, values in (fields or {}).items()}
            self.put_row(one, given)

    def put_row(self, sample_id: str, columns: dict[str, Any]) -> None:
        there = self.find(sample_id)
        if there is None:
            self.rows.append((sample_id, columns))
        else:
            there.update(columns)

    def get_samples(self, ids: list[str], partition: str, names: list[str]) -> Any:
        self.calls.append("get")
        rows = [self.find(one) for one in ids]
        return {name: [row[name] for row in rows if row is not None] for name in names}

    def clear_samples(self, ids: list[str], partition: str) -> None:
        assert ids, "which means everything to some clients"
        self.calls.append("clear")
        assert all(self.find(one) is not None for one in ids)
        self.rows = [row for row in self.rows if row[0] not in ids]

    def list_sample_ids(self, partition: str) -> Collection[str]:
        return [one for one, _ in self.rows]

    def save_checkpoint(self, directory: Path, *, metadata: dict[str, Any]) -> None:
        directory.mkdir(exist_ok=True)  # it would replace one that is there
        (directory / "all.json").write_text(json.dumps([self.rows, metadata]))

    def load_checkpoint(self, directory: Path) -> Mapping[str, Any]:
        rows, metadata = json.loads((directory / "all.json").read_text())
        self.rows = [(one, columns) for one, columns in rows]
        return dict(metadata)

    def close(self) -> None:
        self.calls.append("close")


class Refuses(Client):
    def put_row(self, sample_id: str, columns: dict[str, Any]) -> None:
        if self.find(sample_id) is not None:
            raise KeyError(f"{sample_id} exists")
        super().put_row(sample_id, columns)


class Replaces(Client):
    def put_row(self, sample_id: str, columns: dict[str, Any]) -> None:
        self.rows = [row for row in self.rows if row[0] != sample_id]
        super().put_row(sample_id, columns)


class Doubles(Client):
    def put_row(self, sample_id: str, columns: dict[str, Any]) -> None:
        self.rows.append((sample_id, columns))


class RaisesForMissing(Client):
    def get_samples(self, ids: list[str], partition: str, names: list[str]) -> Any:
        there = dict(self.rows)
        return {name: [there[one][name] for one in ids] for name in names}


class Awaited:
    """The same, awaited, without any thread."""

    def __init__(self, client: SyncClient) -> None:
        self.client = client

    async def put_samples(self, ids: list[str], partition: str, fields: Any, tags: Any) -> None:
        await anyio.lowlevel.checkpoint()
        self.client.put_samples(ids, partition, fields, tags)
        await anyio.lowlevel.checkpoint()

    async def get_samples(self, ids: list[str], partition: str, names: list[str]) -> Any:
        await anyio.lowlevel.checkpoint()
        return self.client.get_samples(ids, partition, names)

    async def clear_samples(self, ids: list[str], partition: str) -> None:
        await anyio.lowlevel.checkpoint()
        self.client.clear_samples(ids, partition)
        await anyio.lowlevel.checkpoint()

    async def list_sample_ids(self, partition: str) -> Collection[str]:
        await anyio.lowlevel.checkpoint()
        return self.client.list_sample_ids(partition)

    async def save_checkpoint(self, directory: Path, *, metadata: dict[str, Any]) -> None:
        self.client.save_checkpoint(directory, metadata=metadata)

    async def load_checkpoint(self, directory: Path) -> Mapping[str, Any]:
        return self.client.load_checkpoint(directory)

    async def close(self) -> None:
        self.client.close()


def store_of(client: type[Client], **how: Any) -> ClientStore:
    return ClientStore(lambda: Awaited(client()), runner=inline, **how)


STORES: dict[str, Any] = {
    "awaited": lambda: store_of(Client),
    "awaited-raises": lambda: store_of(RaisesForMissing),
    "inserts-refuses": lambda: store_of(Refuses, put="insert"),
    "inserts-replaces": lambda: store_of(Replaces, put="insert"),
    "inserts-doubles": lambda: store_of(Doubles, put="insert"),
    "inline": lambda: ClientStore(lambda: ThreadedClient(Client, runner=inline), runner=inline),
}


def subject_of(store: ClientStore) -> Subject:
    async def connect() -> DataPlane:
        return store.client()

    return Subject(store, connect, lambda kind, numbers: list(numbers), operator.eq)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("check", ROW_CHECKS, ids=lambda check: check.__name__)
async def test_rows(check: Check, store: str) -> None:
    made = STORES[store]()
    await check(subject_of(made))
    assert await made.list_sample_ids() == frozenset()


@pytest.mark.parametrize("store", STORES)
async def test_snapshot(store: str, tmp_path: Path) -> None:
    await snapshot_restores_the_store(subject_of(STORES[store]()), tmp_path / "snapshot")


@REAL_CLOCKS
@pytest.mark.parametrize("check", ROW_CHECKS, ids=lambda check: check.__name__)
async def test_rows_in_threads(check: Check, anyio_backend: str) -> None:
    await check(subject_of(ClientStore(lambda: ThreadedClient(Client))))


@REAL_CLOCKS
async def test_snapshot_in_threads(anyio_backend: str, tmp_path: Path) -> None:
    store = ClientStore(lambda: ThreadedClient(Client))
    await snapshot_restores_the_store(subject_of(store), tmp_path / "snapshot")


@pytest.mark.parametrize("client", [Client, Refuses, Replaces, Doubles])
async def test_a_put_that_broke_off_half_way_may_be_repeated(client: type[Client]) -> None:
    made = client()
    store = ClientStore(lambda: Awaited(made), put="merge" if client is Client else "insert")
    await store.put_samples(["a", "b", "c"], {"x": [1, 2, 3]})
    whole, left = made.put_row, 2

    def breaks(sample_id: str, columns: dict[str, Any]) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise ConnectionError("gone")
        whole(sample_id, columns)

    made.put_row = breaks  # type: ignore[method-assign]
    with pytest.raises(DataPlaneError, match="put_samples: ConnectionError: gone"):
        await store.put_samples(["a", "b", "c"], {"y": [4, 5, 6]})
    made.put_row = whole  # type: ignore[method-assign]
    await store.put_samples(["a", "b", "c"], {"y": [4, 5, 6]})
    columns = await store.get_samples(["c", "a", "b"], ["x", "y"])
    assert columns == {"x": [3, 1, 2], "y": [6, 4, 5]}
    assert sorted(one for one, _ in made.rows) == ["a", "b", "c"]


async def test_a_row_put_by_somebody_else_is_not_overwritten_in_part(tmp_path: Path) -> None:
    made = Replaces()
    store = ClientStore(lambda: Awaited(made), put="insert")
    await store.is_untouched()
    made.put_row("a", {"x": 1})
    with pytest.raises(DataPlaneError, match="row a was put by somebody else"):
        await store.put_samples(["a"], {"y": [1]})
    assert made.find("a") == {"x": 1}


async def test_a_store_that_lists_rows_is_not_untouched() -> None:
    made = Client()
    store = ClientStore(lambda: Awaited(made))
    assert await store.is_untouched()
    made.put_row("a", {})
    assert not await store.is_untouched()


async def test_a_client_of_a_store_that_was_discarded_or_of_its_own_close_is_refused() -> None:
    store = store_of(Client)
    before, closed = store.client(), store.client()
    await before.put_samples(["a"], {"x": [1]})
    await closed.aclose()
    with pytest.raises(DataPlaneError, match="list_sample_ids: this client was closed"):
        await closed.list_sample_ids()
    await store.discard()
    with pytest.raises(DataPlaneError, match="put_samples: the store was discarded"):
        await before.put_samples(["a"], {"x": [1]})
    assert await store.is_untouched()


async def test_the_clients_errors_are_named_by_their_call(tmp_path: Path) -> None:
    made = Client()
    async with ClientStore(lambda: Awaited(made), runner=inline) as store:
        with pytest.raises(RestoreError, match="load_checkpoint: FileNotFoundError"):
            await store.load_checkpoint(tmp_path / "nowhere")
        await store.discard()
        made.save_checkpoint = None  # type: ignore[assignment]
        with pytest.raises(SaveError, match="save_checkpoint: TypeError"):
            await store.save_checkpoint(tmp_path / "snapshot", {})
    assert made.calls == ["close", "close"]


async def test_a_client_that_returns_fewer_rows_than_it_lists_is_an_error() -> None:
    class Short(Client):
        def get_samples(self, ids: list[str], partition: str, names: list[str]) -> Any:
            return super().get_samples(ids[1:], partition, names)

    store = ClientStore(lambda: Awaited(Short()))
    await store.put_samples(["a", "b"], {"x": [1, 2]})
    with pytest.raises(DataPlaneError, match="2 rows exist, and it returned {'x': 1}") as caught:
        await store.get_samples(["a", "b"], ["x"])
    assert not isinstance(caught.value, MissingRows)


# threads --------------------------------------------------------------------------------


class Hangs(Client):
    def __init__(self) -> None:
        super().__init__()
        self.may_go_on = threading.Event()
        self.hanging = threading.Event()

    def put_samples(self, ids: list[str], partition: str, fields: Any, tags: Any) -> None:
        self.hanging.set()
        assert self.may_go_on.wait(30)
        super().put_samples(ids, partition, fields, tags)


@REAL_CLOCKS
async def test_no_call_is_made_beside_one_that_hangs(anyio_backend: str) -> None:
    made = Hangs()
    store = ClientStore(lambda: ThreadedClient(lambda: made), deadline_s=0.1)
    with pytest.raises(CallTimeout, match=r"put_samples did not return within 0\.1 s"):
        await store.put_samples(["a"], {"x": [1]})
    with pytest.raises(DataPlaneError, match="the client is busy: put_samples has not returned"):
        await store.list_sample_ids()
    made.may_go_on.set()
    for _ in range(1000):  # until its thread has ended
        await anyio.sleep(0.01)
        with suppress(DataPlaneError):
            assert await store.list_sample_ids() == {"a"}
            return
    raise AssertionError


@REAL_CLOCKS
async def test_a_cancelled_put_has_happened_when_the_cancel_takes_effect(
    anyio_backend: str,
) -> None:
    made = Hangs()
    store = ClientStore(lambda: ThreadedClient(lambda: made))
    async with anyio.create_task_group() as tg:
        tg.start_soon(store.put_samples, ["a"], {"x": [1]})
        await in_thread(made.hanging.wait)
        tg.cancel_scope.cancel()
        made.may_go_on.set()
    assert await store.get_samples(["a"], ["x"]) == {"x": [1]}


@REAL_CLOCKS
@pytest.mark.parametrize("at_once", [1, 3])
async def test_a_client_is_used_by_so_many_threads_at_once(
    anyio_backend: str, at_once: int
) -> None:
    class Counts(Client):
        most = now = 0
        lock = threading.Lock()
        together = threading.Barrier(at_once, timeout=30.0)

        def list_sample_ids(self, partition: str) -> Collection[str]:
            with self.lock:
                self.now += 1
                self.most = max(self.most, self.now)
            self.together.wait()  # for as many as may be here
            with self.lock:
                self.now -= 1
            return ()

    made = Counts()
    store = ClientStore(lambda: ThreadedClient(lambda: made, calls_at_once=at_once))
    async with anyio.create_task_group() as tg:
        for _ in range(6):
            tg.start_soon(store.list_sample_ids)
    assert made.most == at_once


# a whole run ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["awaited", "inserts-refuses", "inserts-replaces", "inline"])
async def test_a_run_that_crashes_and_resumes_is_audited(name: str, tmp_path: Path) -> None:
    config = decode(
        {
            "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2,
                     "max_num_steps": 8},
            "checkpointing": {"save_period": 2},
            "rollout_recovery": {"default_granularity": "sibling"},
        },
        ControllerConfig,
    )  # fmt: skip

    class Worker:
        async def rollout(self, prompt: Prompt, sibling: int, weight_version: int) -> Sample:
            await anyio.sleep(1 + (prompt.ordinal * 3 + sibling) % 5)
            reward = float((prompt.ordinal + sibling) % 3)
            fields = {"tokens": [prompt.payload, sibling], "reward": reward}
            return Sample(fields=fields, reward=reward)

    async def live(crash_after_s: float) -> list[tuple[int, ...]]:
        store = STORES[name]()
        trainer = MemoryTrainer(store.client())
        with anyio.move_on_after(crash_after_s):
            async with open_run(
                tmp_path, config, store=store, source=PromptList(range(50)), worker=Worker(),
                trainer=trainer, runner=inline, clock=anyio.current_time,
            ) as controller:  # fmt: skip
                await controller.run()
                listed = await store.list_sample_ids()
                assert listed == controller.rows() | controller.suspects()
        return trainer.trained

    first = await live(17.5)
    assert 2 < len(first) < 8
    last = await live(1000.0)
    assert len(first) + len(last) >= 8
    report = audit_run(tmp_path)
    assert report.ok, report.violations


class Slow:
    """An awaited client that refuses a row that exists; each call takes a second."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}

    async def put_samples(self, ids: list[str], partition: str, fields: Any, tags: Any) -> None:
        await anyio.sleep(1)
        for at, one in enumerate(ids):
            assert one not in self.rows
            self.rows[one] = {name: values[at] for name, values in fields.items()}

    async def get_samples(self, ids: list[str], partition: str, names: list[str]) -> Any:
        await anyio.sleep(1)
        return {name: [self.rows[one][name] for one in ids] for name in names}

    async def clear_samples(self, ids: list[str], partition: str) -> None:
        await anyio.sleep(1)
        for one in ids:
            del self.rows[one]

    async def list_sample_ids(self, partition: str) -> Any:
        await anyio.sleep(1)
        return list(self.rows)

    async def save_checkpoint(self, directory: Path, *, metadata: dict[str, Any]) -> None:
        raise NotImplementedError

    async def load_checkpoint(self, directory: Path) -> Any:
        return {}

    async def close(self) -> None:
        raise OSError("it is stuck")


async def test_two_writes_and_a_read_of_one_row_at_once_lose_nothing() -> None:
    client = Slow()
    store = ClientStore(lambda: client, put="insert")
    await store.put_samples(["r", "s"], {"a": [1, 2]})

    async def read() -> None:
        await anyio.sleep(2.5)
        assert await store.get_samples(["r"], ["a"]) == {"a": [1]}

    async with anyio.create_task_group() as tg:
        tg.start_soon(store.put_samples, ["r"], {"b": [3]})
        tg.start_soon(store.put_samples, ["r", "s"], {"c": [4, 5]})
        tg.start_soon(read)
    assert client.rows == {"r": {"a": 1, "b": 3, "c": 4}, "s": {"a": 2, "c": 5}}


@pytest.mark.parametrize("after_s", [0.5, 1.5, 2.5, 3.5, 4.5])
async def test_a_row_that_is_cleared_while_it_is_written_stays_away(after_s: float) -> None:
    client = Slow()
    store = ClientStore(lambda: client, put="insert")
    await store.put_samples(["r"], {"a": [1]})
    async with anyio.create_task_group() as tg:
        tg.start_soon(store.put_samples, ["r"], {"b": [3]})
        await anyio.sleep(after_s)
        tg.start_soon(store.clear_samples, ["r"])
    assert client.rows == {}
    await store.put_samples(["r"], {"c": [1]})
    assert client.rows == {"r": {"c": 1}}


@pytest.mark.parametrize("after_s", [0.5, 1.5, 3.5, 4.5, 5.5])
async def test_a_cancel_of_a_write_that_waits_leaves_the_row_to_others(after_s: float) -> None:
    client = Slow()
    store = ClientStore(lambda: client, put="insert")
    await store.put_samples(["r"], {"a": [1]})
    async with anyio.create_task_group() as tg:
        tg.start_soon(store.put_samples, ["r"], {"b": [3]})
        await anyio.sleep(0.1)
        with anyio.move_on_after(after_s):
            await store.put_samples(["r"], {"c": [4]})
    with anyio.fail_after(10):
        await store.put_samples(["r"], {"d": [5]})
    row = client.rows["r"]
    assert (row["a"], row["b"], row["d"]) == (1, 3, 5)


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()])
async def test_a_store_that_does_not_close_hides_no_error(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(type(error)) as caught:
        async with ClientStore(Slow) as store:
            await store.list_sample_ids()
            raise error
    assert caught.value is error
    assert "did not close: close: OSError: it is stuck" in caplog.messages[-1]
    with pytest.raises(DataPlaneError, match="it is stuck"):
        async with ClientStore(Slow) as store:
            await store.list_sample_ids()


@pytest.mark.parametrize("rubbish", [None, 3, "row", [["row"]], [None]])
async def test_a_client_that_lists_rubbish_has_failed(rubbish: Any) -> None:
    class Lists(Slow):
        async def list_sample_ids(self, partition: str) -> Any:
            return rubbish

    store = ClientStore(Lists)
    for call in (store.list_sample_ids, store.is_untouched):
        with pytest.raises(DataPlaneError, match="list_sample_ids"):
            await call()
    with pytest.raises(DataPlaneError):
        await store.clear_samples(["row"])


@pytest.mark.parametrize(
    "rubbish", [None, 3, "row", [3], {"sc_core.columns": 3}, {"sc_core.columns": {"r": None}}]
)
async def test_a_client_that_loads_rubbish_has_not_loaded(rubbish: Any, tmp_path: Path) -> None:
    class Loads(Slow):
        async def load_checkpoint(self, directory: Path) -> Any:
            return rubbish

    with pytest.raises(RestoreError, match="load_checkpoint: "):
        await ClientStore(Loads).load_checkpoint(tmp_path)
