"""What every data plane must do, as checks to put an implementation through.

Describe yours as a `Subject`, then, with pytest:

    @pytest.mark.parametrize("check", ROW_CHECKS, ids=lambda check: check.__name__)
    async def test_rows(check, subject):
        await check(subject)

    async def test_snapshot(subject, tmp_path):
        await snapshot_restores_the_store(subject, tmp_path / "snapshot")

A check raises `AssertionError` with what it saw. It opens clients of its own and clears its rows,
so that checks can share one store; they must not run at the same time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.lowlevel

from sc_core.errors import (
    DataPlaneError,
    MissingRows,
    RestoreOrderError,
    SaveError,
    ScError,
)
from sc_core.ports import BootstrapDataPlane, DataPlane
from sc_core.records import SampleId

Kind = Literal["int", "float", "bool"]


@dataclass(frozen=True)
class Subject:
    """An implementation under test, and how its values look."""

    bootstrap: BootstrapDataPlane
    connect: Callable[[], Awaitable[DataPlane]]  #: opens one more client of the same store
    value: Callable[[Kind, Sequence[float]], Any]  #: a value of that many numbers, maybe none
    same: Callable[[Any, Any], bool]  #: equal in numbers and in kind


Check = Callable[[Subject], Awaitable[None]]


async def rows_come_back_in_the_order_asked_for(subject: Subject) -> None:
    async with _client(subject) as plane:
        ids = _ids("order", 7)
        values = [subject.value("int", [at]) for at in range(7)]
        await plane.put_samples(ids, {"x": values})
        for order in ([0, 1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1, 0], [3, 0, 6], [5], []):
            got = await plane.get_samples([ids[at] for at in order], ["x"])
            _same(subject, got, {"x": [values[at] for at in order]})
        await plane.clear_samples(ids)


async def kinds_and_lengths_are_kept(subject: Subject) -> None:
    async with _client(subject) as plane:
        ids = _ids("kinds", 4)
        columns = {
            "int": [subject.value("int", row) for row in ([2**53 + 1], [], [-1, 0, 7], [5] * 40)],
            "float": [subject.value("float", row) for row in ([], [0.5, -0.25], [1.0] * 33, [2.0])],
            "bool": [subject.value("bool", row) for row in ([True], [False, True], [], [True] * 9)],
            "none": [subject.value("float", []) for _ in ids],
        }
        await plane.put_samples(ids, columns)
        got = await plane.get_samples(ids, list(columns))
        _same(subject, got, columns)
        _expect(list(got) == list(columns), f"columns {list(got)}, asked for {list(columns)}")
        await plane.clear_samples(ids)


async def a_write_keeps_other_columns(subject: Subject) -> None:
    async with _client(subject) as plane:
        ids = _ids("partial", 3)
        one, two, three = ([subject.value("int", [at, n]) for at in range(3)] for n in (1, 2, 3))
        await plane.put_samples(ids, {"a": one, "b": one})
        await plane.put_samples(ids[1:], {"b": two[1:], "c": three[1:]})
        got = await plane.get_samples(ids, ["a", "b"])
        _same(subject, got, {"a": one, "b": [one[0], *two[1:]]})
        _same(subject, await plane.get_samples(ids[1:], ["c"]), {"c": three[1:]})
        await plane.put_samples(ids, {}, [{"tag": at} for at in range(3)])
        _same(subject, await plane.get_samples(ids, ["a"]), {"a": one})
        await plane.clear_samples(ids)


async def put_and_clear_may_be_repeated(subject: Subject) -> None:
    async with _client(subject) as plane:
        ids = _ids("again", 3)
        values = [subject.value("float", [at / 2]) for at in range(3)]
        before = await plane.list_sample_ids()
        for _ in range(3):
            await plane.put_samples(ids, {"x": values}, [{"at": at} for at in range(3)])
            _expect(await plane.list_sample_ids() == before | set(ids), "a repeated put adds rows")
            _same(subject, await plane.get_samples(ids, ["x"]), {"x": values})
        for _ in range(3):
            await plane.clear_samples(ids)
            _expect(await plane.list_sample_ids() == before, "cleared rows are still listed")
        longer = [subject.value("float", [at / 4] * 5) for at in range(3)]
        await plane.put_samples(ids, {"x": longer})
        _same(subject, await plane.get_samples(ids, ["x"]), {"x": longer})
        await plane.clear_samples(ids)


async def a_missing_row_is_named(subject: Subject) -> None:
    async with _client(subject) as plane:
        ids = _ids("missing", 4)
        await plane.put_samples(ids, {"x": [subject.value("int", [1]) for _ in ids]})
        await plane.clear_samples(ids[2:])
        with _raises(MissingRows) as caught:
            await plane.get_samples(ids, ["x"])
        _expect(caught.error.missing == tuple(ids[2:]), f"named {caught.error.missing}")
        # a tag makes a row, and gives it nothing to read
        await plane.put_samples([ids[3]], {}, [{"tag": 1}])
        _expect(ids[3] in await plane.list_sample_ids(), "a row without data is not listed")
        with _raises(MissingRows) as caught:
            await plane.get_samples([ids[0], ids[3]], ["x"])
        _expect(caught.error.missing == (ids[3],), f"named {caught.error.missing}")
        await plane.clear_samples(ids)


async def a_missing_column_is_an_error(subject: Subject) -> None:
    async with _client(subject) as plane:
        ids = _ids("column", 2)
        values = [subject.value("int", [1]) for _ in ids]
        await plane.put_samples(ids, {"x": values})
        await plane.put_samples(ids[:1], {"y": values[:1]})
        for columns in (["nowhere"], ["x", "y"]):
            with _raises(DataPlaneError):
                await plane.get_samples(ids, columns)
        await plane.clear_samples(ids)


async def unequal_lengths_are_refused_and_leave_nothing(subject: Subject) -> None:
    async with _client(subject) as plane:
        ids = _ids("unequal", 2)
        two = [subject.value("int", [1]) for _ in ids]
        before = await plane.list_sample_ids()
        calls: list[tuple[Sequence[SampleId], dict[str, Any], Any]] = [
            (ids, {"x": two, "y": two[:1]}, None),
            (ids, {"x": [*two, two[0]]}, None),
            (ids, {"x": two}, [{}]),
            ([ids[0], ids[0]], {"x": two}, None),
        ]
        for sample_ids, fields, tags in calls:
            with _raises(DataPlaneError):
                await plane.put_samples(sample_ids, fields, tags)
        _expect(await plane.list_sample_ids() == before, "a refused put left rows")


async def nothing_may_be_asked_for(subject: Subject) -> None:
    async with _client(subject) as plane:
        before = await plane.list_sample_ids()
        await plane.put_samples([], {"x": []})
        await plane.clear_samples([])
        _expect(await plane.get_samples([], ["x"]) == {"x": []}, "no rows, yet values")
        await plane.clear_samples(_ids("unknown", 3))
        _expect(await plane.list_sample_ids() == before, "calls about nothing changed rows")


async def clients_see_each_other(subject: Subject) -> None:
    async with _client(subject) as one, _client(subject) as two:
        ids = _ids("clients", 2)
        values = [subject.value("int", [at]) for at in range(2)]
        before = await two.list_sample_ids()
        await one.put_samples(ids, {"x": values})
        _expect(await two.list_sample_ids() == before | set(ids), "not what another one put")
        _expect(await subject.bootstrap.list_sample_ids() == before | set(ids), "bootstrap differs")
        _same(subject, await two.get_samples(ids, ["x"]), {"x": values})
        await two.clear_samples(ids)
        _expect(await one.list_sample_ids() == before, "not what another one cleared")


async def a_cancelled_call_may_be_repeated(subject: Subject) -> None:
    """Wherever a put or clear was cancelled, the same call afterwards gives what it would have."""
    async with _client(subject) as plane:
        ids = _ids("cancelled", 4)
        before = await plane.list_sample_ids()
        for steps in range(8):
            values = [subject.value("int", [at, steps]) for at in range(4)]

            async def put(values: list[Any] = values) -> None:
                await plane.put_samples(ids, {"x": values}, [{"at": at} for at in range(4)])

            async def clear() -> None:
                await plane.clear_samples(ids)

            await _cancel_after(steps, put)
            _expect(await plane.list_sample_ids() <= before | set(ids), "rows nobody put")
            await put()
            _same(subject, await plane.get_samples(ids, ["x"]), {"x": values})
            await _cancel_after(steps, clear)
            await clear()
            _expect(await plane.list_sample_ids() == before, "a repeated clear left rows")
            await _cancel_after(steps, put)
            await clear()
            _expect(await plane.list_sample_ids() == before, "a cancelled put came back")


async def many_puts_at_once(subject: Subject) -> None:
    async with _client(subject) as plane:
        groups = [_ids(f"many{number}", 4) for number in range(64)]
        before = await plane.list_sample_ids()

        async def put(number: int) -> None:
            values = [subject.value("int", [number] * (at + 1)) for at in range(4)]
            await plane.put_samples(groups[number], {"x": values, "y": values})

        async with anyio.create_task_group() as tg:
            for number in range(64):
                tg.start_soon(put, number)
        everything = [one for group in groups for one in group]
        _expect(await plane.list_sample_ids() == before | set(everything), "rows got lost")
        want = [subject.value("int", [n] * (at + 1)) for n in range(64) for at in range(4)]
        _same(subject, await plane.get_samples(everything, ["x", "y"]), {"x": want, "y": want})
        await plane.clear_samples(everything)


async def snapshot_restores_the_store(subject: Subject, directory: Path) -> None:
    """Save, discard, load; and when a load is refused. `directory` is where the snapshot goes.

    The store may hold anything before, which is lost. It holds the restored rows afterwards.
    """
    bootstrap = subject.bootstrap
    metadata = {"digest": "d1", "step": 3, "rows": {"count": 5, "some": ["a", "b"]}}
    ids = _ids("saved", 5)
    columns = {
        "x": [subject.value("int", [at] * at) for at in range(5)],
        "y": [subject.value("float", [at / 8, -at]) for at in range(5)],
    }
    async with _client(subject) as plane:
        await plane.clear_samples(sorted(await plane.list_sample_ids()))
        await plane.put_samples(ids, columns, [{"at": at} for at in range(5)])
        await plane.save_checkpoint(directory, metadata)
        with _raises(SaveError):
            await plane.save_checkpoint(directory, metadata)
        with _raises(RestoreOrderError):
            await bootstrap.load_checkpoint(directory)
        await plane.clear_samples(ids)
    _expect(not await bootstrap.is_untouched(), "an emptied store passes for untouched")
    with _raises(RestoreOrderError):
        await bootstrap.load_checkpoint(directory)

    await bootstrap.discard()
    _expect(await bootstrap.is_untouched(), "a discarded store is not untouched")
    _expect(not await bootstrap.list_sample_ids(), "a discarded store has rows")
    async with _client(subject) as early:
        _expect(await early.list_sample_ids() == frozenset(), "a discarded store has rows")
        _expect(await bootstrap.is_untouched(), "looking at a store touches it")
        loaded = await bootstrap.load_checkpoint(directory)
        _expect(dict(loaded) == metadata, f"metadata {loaded}, saved {metadata}")
        try:  # a client from before the load either sees the rows, or says that it can't
            _same(subject, await early.get_samples(ids, list(columns)), columns)
        except ScError as exc:
            _expect(not isinstance(exc, MissingRows), "a client from before misses restored rows")
    _expect(await bootstrap.list_sample_ids() == set(ids), "not the rows that were saved")
    _expect(not await bootstrap.is_untouched(), "a restored store passes for untouched")
    with _raises(RestoreOrderError):
        await bootstrap.load_checkpoint(directory)
    async with _client(subject) as late:
        new = _ids("new", 3)
        await late.put_samples(new, {"x": [subject.value("int", [9]) for _ in new]})
        await late.put_samples(ids[:1], {"z": [subject.value("int", [1])]})
        _same(subject, await late.get_samples(ids, list(columns)), columns)
        _expect(await late.list_sample_ids() == {*ids, *new}, "new rows displace restored ones")


ROW_CHECKS: tuple[Check, ...] = (
    rows_come_back_in_the_order_asked_for,
    kinds_and_lengths_are_kept,
    a_write_keeps_other_columns,
    put_and_clear_may_be_repeated,
    a_missing_row_is_named,
    a_missing_column_is_an_error,
    unequal_lengths_are_refused_and_leave_nothing,
    nothing_may_be_asked_for,
    clients_see_each_other,
    a_cancelled_call_may_be_repeated,
    many_puts_at_once,
)
"""Checks of rows. Beside them there is `snapshot_restores_the_store`."""


class _raises:
    """A block that must raise `kind`; `error` is what it raised."""

    error: Any

    def __init__(self, kind: type[Exception]) -> None:
        self._kind = kind

    def __enter__(self) -> _raises:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, traceback: Any) -> bool:
        _expect(kind is not None, f"did not raise {self._kind.__name__}")
        self.error = error
        return isinstance(error, self._kind)


def _expect(fact: bool, otherwise: str) -> None:
    if not fact:
        raise AssertionError(otherwise)


def _same(subject: Subject, got: Mapping[str, list[Any]], want: Mapping[str, list[Any]]) -> None:
    for name, values in want.items():
        _expect(len(got[name]) == len(values), f"{name}: {len(got[name])} rows of {len(values)}")
        for at, (one, other) in enumerate(zip(got[name], values, strict=True)):
            _expect(subject.same(one, other), f"{name}, row {at}: {one} where {other} was put")


def _ids(name: str, count: int) -> list[SampleId]:
    return [f"{name}.0_g{at}" for at in range(count)]


@asynccontextmanager
async def _client(subject: Subject) -> AsyncIterator[DataPlane]:
    plane = await subject.connect()
    try:
        yield plane
    finally:
        await plane.aclose()


async def _cancel_after(steps: int, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async with anyio.create_task_group() as tg:
        tg.start_soon(call)
        for _ in range(steps):
            await anyio.lowlevel.checkpoint()
        tg.cancel_scope.cancel()
