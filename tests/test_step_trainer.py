"""A trainer whose step is one function."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio.lowlevel
import pytest

from sc_core import BundleDamaged, Columns, SaveError, StepTrainer, inline, step_trainer
from sc_core.records import Batch, Group, GroupId

pytestmark = pytest.mark.anyio


class Sums(StepTrainer):
    columns = ("x", "advantage")

    def learn(self, columns: Columns) -> dict[str, float] | None:
        self.state["sum"] += sum(columns["x"])
        self.state["seen"].append(list(columns["x"]))
        self.thread = threading.get_ident()
        return {"loss": 1.0} if columns["x"] else None


async def fetch(sample_ids: Sequence[str], names: Sequence[str]) -> dict[str, list[Any]]:
    await anyio.lowlevel.checkpoint()
    return {name: [int(one.partition(".")[0]) for one in sample_ids] for name in names}


def trainer(cls: type[StepTrainer] = Sums, **how: Any) -> Any:
    return cls(fetch, {"sum": 0, "seen": []}, **{"runner": inline, **how})


def batch(*ordinals: int, masked: tuple[int, ...] = ()) -> Batch:
    groups = tuple(
        Group(
            group_id=GroupId(f"{at}.0"), ordinal=at, sample_ids=(f"{at}.0_g0", f"{at}.0_g1"),
            start_weight_version=0, end_weight_version=0, commit_seq=at, masked=masked,
        )
        for at in ordinals
    )  # fmt: skip
    return Batch(step=1, weight_version=0, groups=groups)


async def test_a_step_learns_once_from_all_its_chunks() -> None:
    made = trainer()
    await made.begin_step(1)
    for chunk in (batch(1, 2), batch(3)):
        await made.prepare(chunk)
        await made.train_microbatches(chunk)
    assert made.state == {"sum": 0, "seen": []}
    assert await made.finish_step() == {"loss": 1.0}
    assert made.state == {"sum": 12, "seen": [[1, 1, 2, 2, 3, 3]]}


async def test_an_abandoned_step_leaves_nothing() -> None:
    made = trainer()
    await made.begin_step(1)
    await made.train_microbatches(batch(1))
    await made.abandon_step()
    await made.begin_step(1)
    await made.train_microbatches(batch(2))
    await made.finish_step()
    assert made.state["seen"] == [[2, 2]]


async def test_masked_rows_are_left_out_and_no_rows_are_a_step_too() -> None:
    made = trainer()
    await made.begin_step(1)
    await made.train_microbatches(batch(4, masked=(0,)))
    await made.finish_step()
    await made.begin_step(2)
    await made.train_microbatches(batch(4, masked=(0, 1)))
    assert await made.finish_step() == {}
    assert made.state["seen"] == [[4], []]


async def test_state_is_saved_and_loaded(tmp_path: Path) -> None:
    made, other = trainer(), trainer()
    made.state = {"sum": 3, 5: [1.5, None, b"x"]}
    await made.save(tmp_path)
    await made.finalize_save()
    await other.load(tmp_path)
    assert other.state == made.state


async def test_a_state_that_cannot_be_read_is_damage(tmp_path: Path) -> None:
    for content in (None, b"\xc1", b"\x91" * 100_000):
        if content is not None:
            (tmp_path / "state.msgpack").write_bytes(content)
        with pytest.raises(BundleDamaged, match=r"policy/state\.msgpack"):
            await trainer().load(tmp_path)


@pytest.mark.parametrize("state", [object(), 2**64, {"text": "\ud800"}])
async def test_a_state_that_no_file_can_hold_is_told_at_the_save(
    state: Any, tmp_path: Path
) -> None:
    made = trainer()
    made.state = state
    with pytest.raises(SaveError, match="can't be saved as msgpack"):
        await made.save(tmp_path)


async def test_a_state_that_no_start_would_read_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_trainer, "MOST_BYTES", 100)
    made = trainer()
    made.state = b"x" * 98
    await made.save(tmp_path)
    await made.load(tmp_path)
    made.state = b"x" * 99
    with pytest.raises(SaveError, match="takes 101 bytes"):
        await made.save(tmp_path)


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
@pytest.mark.parametrize("heavy", [False, True])
async def test_a_heavy_one_learns_in_a_thread(anyio_backend: str, heavy: bool) -> None:
    class Heavy(Sums):
        pass

    Heavy.heavy = heavy
    made = Heavy(fetch, {"sum": 0, "seen": []})
    await made.begin_step(1)
    await made.finish_step()
    assert (made.thread != threading.get_ident()) == heavy
