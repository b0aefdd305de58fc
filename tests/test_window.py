"""The checkpoint window: rows compared with the cut, beside the snapshot and never after it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest
from msgspec.structs import replace

from sc_core.config import ControllerConfig, decode
from sc_core.cut import cut_digest, decode_cut, digest_of_encoded, encode_cut
from sc_core.errors import InventoryMismatch, RestoreError, WorkerDied
from sc_core.records import Prompt
from sc_core.testing import MemoryDataPlane, MemoryRun
from sc_core.window import check_inventory
from tests.make_bundles import make_cut

pytestmark = pytest.mark.anyio

ROWS = frozenset({"10.0_g0", "10.0_g1"})


def test_suspects_may_be_there_or_not() -> None:
    cut = replace(make_cut(), suspects=("7.0_g0",))
    check_inventory(cut, ROWS)
    check_inventory(cut, ROWS | {"7.0_g0"})


def test_what_is_missing_or_too_much_is_named() -> None:
    with pytest.raises(InventoryMismatch) as caught:
        check_inventory(make_cut(), frozenset({"10.0_g1", "8.0_g1", "8.0_g0"}))
    assert caught.value.missing == ("10.0_g0",)
    assert caught.value.unexpected == ("8.0_g0", "8.0_g1")


def test_a_cut_is_encoded_record_by_record_as_it_would_be_at_once() -> None:
    cut = make_cut()
    assert decode_cut(encode_cut(cut)) == cut
    assert digest_of_encoded(encode_cut(cut)) == cut_digest(cut)


@pytest.mark.parametrize("part", ["records", "groups"])
def test_bytes_that_are_no_cut_have_no_digest(part: str) -> None:
    raw = encode_cut(make_cut())
    for broken in (raw[:-1], raw.replace(part.encode(), part[::-1].encode())):
        with pytest.raises(RestoreError, match="the cut is unreadable"):
            digest_of_encoded(broken)


async def test_a_mismatch_ends_the_run_and_leaves_no_bundle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = MemoryRun(SHORT, prompts=range(100))
    saved: list[Path] = []
    save = MemoryDataPlane.save_checkpoint

    async def slow(self: MemoryDataPlane, directory: Path, metadata: Mapping[str, Any]) -> None:
        await anyio.sleep(5)
        await save(self, directory, metadata)
        saved.append(directory)

    async def one_too_many(self: MemoryDataPlane) -> frozenset[str]:
        trained = any(event.event == "trained" for event in run.log.events)
        return await listed(self) | ({"x"} if trained else frozenset())

    listed = MemoryDataPlane.list_sample_ids
    monkeypatch.setattr(MemoryDataPlane, "save_checkpoint", slow)
    monkeypatch.setattr(MemoryDataPlane, "list_sample_ids", one_too_many)
    with pytest.raises(InventoryMismatch, match="1 unexpected"):
        await run.run()
    assert len(saved) == 1, "a save that has begun is awaited"
    assert not [name for name in run.disk.entries(run.directory) if name.startswith("step_")]


async def test_without_anybody_left_to_generate_the_run_ends_at_once() -> None:
    async def gone(prompt: Prompt, sibling: int, version: int) -> None:
        if version == 2:
            raise WorkerDied("every generation worker", "a died: it was killed")

    run = MemoryRun(SHORT, prompts=range(100), script=gone)
    with pytest.raises(WorkerDied, match="a died: it was killed"):
        await run.run()
    assert not [event for event in run.log.events if event.event in ("dropped", "redispatched")]


SHORT = decode(
    {
        "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "max_num_steps": 4},
        "checkpointing": {"save_period": 1},
    },
    ControllerConfig,
)
