"""The data plane in memory passes the suite, and the suite notices planes that should not."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from sc_core.errors import (
    BundleDamaged,
    DataPlaneError,
    MissingRows,
    RestoreOrderError,
    SaveError,
)
from sc_core.ports import DataPlane
from sc_core.testing import conformance
from sc_core.testing.conformance import ROW_CHECKS, Check, Subject, snapshot_restores_the_store
from sc_core.testing.data_plane import MemoryBootstrap, MemoryDataPlane, MemoryStore

pytestmark = pytest.mark.anyio


def subject_of(
    store: MemoryStore,
    plane: type[MemoryDataPlane] = MemoryDataPlane,
    bootstrap: type[MemoryBootstrap] = MemoryBootstrap,
) -> Subject:
    async def connect() -> DataPlane:
        return plane(store)

    return Subject(bootstrap(store), connect, lambda kind, numbers: list(numbers), operator.eq)


@pytest.mark.parametrize("check", ROW_CHECKS, ids=lambda check: check.__name__)
async def test_rows_in_memory(check: Check) -> None:
    store = MemoryStore()
    await check(subject_of(store))
    assert store.rows == {}


async def test_snapshot_in_memory(tmp_path: Path) -> None:
    await snapshot_restores_the_store(subject_of(MemoryStore()), tmp_path / "snapshot")


# planes that a real client could turn into ----------------------------------------------


class ForgetsOrder(MemoryDataPlane):
    async def get_samples(
        self, sample_ids: Sequence[str], select_fields: Sequence[str]
    ) -> dict[str, list[Any]]:
        return await super().get_samples(sorted(sample_ids), select_fields)


class ReplacesRows(MemoryDataPlane):
    async def put_samples(
        self,
        sample_ids: Sequence[str],
        fields: Mapping[str, Sequence[Any]],
        tags: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        for one in sample_ids:
            if one in self.store.rows:
                self.store.rows[one].columns.clear()
        await super().put_samples(sample_ids, fields, tags)


class ReturnsFewerRows(MemoryDataPlane):
    async def get_samples(
        self, sample_ids: Sequence[str], select_fields: Sequence[str]
    ) -> dict[str, list[Any]]:
        there = [one for one in sample_ids if one in self.store.rows]
        return await super().get_samples(there, select_fields)


class RefusesUnknownIds(MemoryDataPlane):
    async def clear_samples(self, sample_ids: Sequence[str]) -> None:
        if missing := [one for one in sample_ids if one not in self.store.rows]:
            raise MissingRows(missing)
        await super().clear_samples(sample_ids)


class HidesTornRows(MemoryDataPlane):
    async def list_sample_ids(self) -> frozenset[str]:
        listed = await super().list_sample_ids()
        return frozenset(one for one in listed if self.store.rows[one].columns)


class KeepsRowsOfItsOwn(MemoryDataPlane):
    def __init__(self, store: MemoryStore) -> None:
        super().__init__(MemoryStore())


class ClearsNothingTwice(MemoryDataPlane):
    """Clears what can be read only, so a clear that was cut short can't be finished."""

    async def clear_samples(self, sample_ids: Sequence[str]) -> None:
        rows = self.store.rows
        await super().clear_samples(
            [one for one in sample_ids if one in rows and rows[one].columns]
        )


class LosesConcurrentPuts(MemoryDataPlane):
    async def put_samples(
        self,
        sample_ids: Sequence[str],
        fields: Mapping[str, Sequence[Any]],
        tags: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        rows = dict(self.store.rows)
        await super().put_samples(sample_ids, fields, tags)
        self.store.rows = rows | {one: self.store.row(one) for one in sample_ids}


BROKEN_PLANES = [
    (ForgetsOrder, conformance.rows_come_back_in_the_order_asked_for),
    (ReplacesRows, conformance.a_write_keeps_other_columns),
    (ReturnsFewerRows, conformance.a_missing_row_is_named),
    (RefusesUnknownIds, conformance.nothing_may_be_asked_for),
    (HidesTornRows, conformance.a_missing_row_is_named),
    (KeepsRowsOfItsOwn, conformance.clients_see_each_other),
    (ClearsNothingTwice, conformance.a_cancelled_call_may_be_repeated),
    (LosesConcurrentPuts, conformance.many_puts_at_once),
]


@pytest.mark.parametrize(("plane", "check"), BROKEN_PLANES)
async def test_suite_notices_a_broken_plane(plane: type[MemoryDataPlane], check: Check) -> None:
    await check(subject_of(MemoryStore()))
    with pytest.raises((AssertionError, DataPlaneError)):
        await check(subject_of(MemoryStore(), plane))


class LooksAtRowsOnly(MemoryBootstrap):
    async def is_untouched(self) -> bool:
        return not await self.list_sample_ids()


class LoadsOverAnything(MemoryBootstrap):
    async def load_checkpoint(self, directory: Path) -> Mapping[str, Any]:
        self.store.touched = False
        return await super().load_checkpoint(directory)


class DiscardsRowsOnly(MemoryBootstrap):
    async def discard(self) -> None:
        self.store.rows.clear()
        await anyio.lowlevel.checkpoint()


class LosesMetadata(MemoryBootstrap):
    async def load_checkpoint(self, directory: Path) -> Mapping[str, Any]:
        await super().load_checkpoint(directory)
        return {}


class LoadsRowsWithoutData(MemoryBootstrap):
    async def load_checkpoint(self, directory: Path) -> Mapping[str, Any]:
        metadata = await super().load_checkpoint(directory)
        self.store.rows["saved.0_g3"].columns.clear()
        return metadata


BROKEN_BOOTSTRAPS = [
    LooksAtRowsOnly,
    LoadsOverAnything,
    DiscardsRowsOnly,
    LosesMetadata,
    LoadsRowsWithoutData,
]


@pytest.mark.parametrize("bootstrap", BROKEN_BOOTSTRAPS, ids=lambda broken: broken.__name__)
async def test_suite_notices_a_broken_bootstrap(
    bootstrap: type[MemoryBootstrap], tmp_path: Path
) -> None:
    subject = subject_of(MemoryStore(), bootstrap=bootstrap)
    with pytest.raises(AssertionError):
        await snapshot_restores_the_store(subject, tmp_path / "snapshot")


# what the memory plane does beyond the port ---------------------------------------------


class Gate:
    """Hooks that stop a call at one point, by waiting there for ever or by raising."""

    def __init__(self, call: str, point: str, failure: Exception | None = None) -> None:
        self.where = (call, point)
        self.failure = failure
        self.reached = anyio.Event()

    async def __call__(self, call: str, point: str) -> None:
        if (call, point) == self.where:
            self.reached.set()
            if self.failure is not None:
                raise self.failure
            await anyio.sleep_forever()


async def cancel_at(call: str, point: str, plane: MemoryDataPlane, *args: Any) -> None:
    gate = Gate(call, point)
    plane.hooks = gate
    async with anyio.create_task_group() as tg:
        tg.start_soon(getattr(plane, call), *args)
        await gate.reached.wait()
        tg.cancel_scope.cancel()
    plane.hooks = None


@pytest.mark.parametrize(
    ("point", "listed", "readable"),
    [("before", False, False), ("midway", True, False), ("after", True, True)],
)
async def test_put_cut_short_leaves_what_its_point_says(
    point: str, listed: bool, readable: bool
) -> None:
    plane = MemoryDataPlane(MemoryStore())
    await cancel_at("put_samples", point, plane, ["a"], {"x": [1]})
    assert ("a" in await plane.list_sample_ids()) is listed
    if readable:
        assert await plane.get_samples(["a"], ["x"]) == {"x": [1]}
    else:
        with pytest.raises(MissingRows):
            await plane.get_samples(["a"], ["x"])


@pytest.mark.parametrize(
    ("point", "listed", "readable"),
    [("before", True, True), ("midway", True, False), ("after", False, False)],
)
async def test_clear_cut_short_leaves_what_its_point_says(
    point: str, listed: bool, readable: bool
) -> None:
    plane = MemoryDataPlane(MemoryStore())
    await plane.put_samples(["a"], {"x": [1]})
    await cancel_at("clear_samples", point, plane, ["a"])
    assert ("a" in await plane.list_sample_ids()) is listed
    if readable:
        assert await plane.get_samples(["a"], ["x"]) == {"x": [1]}
    else:
        with pytest.raises(MissingRows):
            await plane.get_samples(["a"], ["x"])


async def test_hooks_can_fail_a_call_and_the_log_shows_it_began() -> None:
    plane = MemoryDataPlane(MemoryStore(), Gate("put_samples", "before", OSError("gone")))
    with pytest.raises(OSError, match="gone"):
        await plane.put_samples(["a"], {"x": [1]})
    assert [call.name for call in plane.calls] == ["put_samples"]
    assert plane.calls[0].sample_ids == ("a",)
    assert not plane.store.touched


async def test_snapshot_is_torn_by_what_happens_meanwhile(tmp_path: Path) -> None:
    """As with a real store: this is what the checkpoint barrier is there to prevent."""
    store = MemoryStore()
    other = MemoryDataPlane(store)
    await other.put_samples(["kept", "cleared"], {"x": [1, 2]})

    async def meddle(call: str, point: str) -> None:
        if (call, point) == ("save_checkpoint", "midway"):
            await other.clear_samples(["cleared"])
            await other.put_samples(["late"], {"x": [3]})

    await MemoryDataPlane(store, meddle).save_checkpoint(tmp_path / "torn", {})
    bootstrap = MemoryBootstrap(store)
    await bootstrap.discard()
    await bootstrap.load_checkpoint(tmp_path / "torn")
    plane = MemoryDataPlane(store)
    assert await plane.list_sample_ids() == {"kept", "cleared"}
    with pytest.raises(MissingRows, match="cleared"):
        await plane.get_samples(["kept", "cleared"], ["x"])


async def test_a_load_that_fails_leaves_a_store_only_discard_helps(tmp_path: Path) -> None:
    store = MemoryStore()
    plane, bootstrap = MemoryDataPlane(store), MemoryBootstrap(store)
    await plane.put_samples(["a"], {"x": [1]})
    await plane.save_checkpoint(tmp_path / "good", {"step": 1})
    await plane.save_checkpoint(tmp_path / "bad", {"step": 1})
    (tmp_path / "bad" / "metadata.json").write_bytes(b"{")
    await bootstrap.discard()
    with pytest.raises(BundleDamaged, match=r"metadata\.json"):
        await bootstrap.load_checkpoint(tmp_path / "bad")
    assert not await bootstrap.is_untouched()
    with pytest.raises(RestoreOrderError):
        await bootstrap.load_checkpoint(tmp_path / "good")
    await bootstrap.discard()
    assert await bootstrap.load_checkpoint(tmp_path / "good") == {"step": 1}


async def test_values_are_copied_in_and_out() -> None:
    plane = MemoryDataPlane(MemoryStore())
    value = [1, 2]
    await plane.put_samples(["a"], {"x": [value]})
    value.append(3)
    (await plane.get_samples(["a"], ["x"]))["x"][0].append(4)
    assert await plane.get_samples(["a"], ["x"]) == {"x": [[1, 2]]}


async def test_what_can_not_be_kept_is_refused(tmp_path: Path) -> None:
    plane = MemoryDataPlane(MemoryStore())
    with pytest.raises(DataPlaneError, match="msgpack"):
        await plane.put_samples(["a"], {"x": [object()]})
    with pytest.raises(SaveError):
        await plane.save_checkpoint(tmp_path / "new", {"x": object()})
    assert not (tmp_path / "new").exists()


async def test_clients_end_with_close_and_with_discard() -> None:
    store = MemoryStore()
    closed, stale = MemoryDataPlane(store), MemoryDataPlane(store)
    await closed.aclose()
    with pytest.raises(DataPlaneError, match="closed"):
        await closed.list_sample_ids()
    await MemoryBootstrap(store).discard()
    with pytest.raises(DataPlaneError, match="discarded"):
        await stale.put_samples(["a"], {"x": [1]})
    assert not store.touched


async def test_store_shows_its_state() -> None:
    store = MemoryStore()
    assert repr(store) == "<MemoryStore build 0, 0 rows, touched=False>"
    await MemoryDataPlane(store).put_samples(["a"], {})
    assert repr(store) == "<MemoryStore build 0, 1 rows, touched=True>"
