"""H15, H18, H22 and H23 with the real TransferQueue."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
import torch
from bundle_corpus import corpus, judge
from make_bundles import make_cut

from sc_core.audit import audit
from sc_core.barrier import CheckpointBarrier
from sc_core.bundle import BundleStore
from sc_core.calls import in_thread
from sc_core.config import ControllerConfig, DeadlinesConfig, decode
from sc_core.controller import Ports, SingleController
from sc_core.cut import cut_digest
from sc_core.disk import LOCAL
from sc_core.errors import InventoryMismatch, MissingRows
from sc_core.events import Event
from sc_core.ports import Columns, DataPlane
from sc_core.records import Prompt, rows_of
from sc_core.restore import ReadyStore, restore
from sc_core.rows import Rows
from sc_core.testing import MemoryRun
from sc_core.testing.ports import MeanBaseline
from sc_core.verify import verify
from sc_core.window import check_inventory, snapshot_metadata
from sc_ray.model import ModelConfig
from sc_ray.tasks import larger_digit
from sc_ray.tokenizer import Tokenizer
from sc_ray.trainer.policy import Policy
from sc_ray.transfer_queue import TransferQueueBootstrap, TransferQueueDataPlane

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("anyio_backend", [("asyncio", {})]),
]

IDS = [f"7.0_g{sibling}" for sibling in range(4)]
NEW = [f"8.0_g{sibling}" for sibling in range(4)]
TOKENIZER = Tokenizer.of_characters(larger_digit().alphabet())
SMALL = ModelConfig(hidden_size=64, intermediate_size=64, num_attention_heads=2)


def numbers(start: int) -> list[torch.Tensor]:
    return [torch.tensor([start + row]) for row in range(4)]


async def open_client(bootstrap: TransferQueueBootstrap) -> TransferQueueDataPlane:
    return await anyio.to_thread.run_sync(bootstrap.spec.connect)


# H22: rows that are being deleted ---------------------------------------------------------------


async def test_h22_what_comes_in_the_gap_of_a_slow_delete_is_not_hit_by_it(
    bootstrap: TransferQueueBootstrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The delete of four rows stands still; a group arrives, and a late column of one of them."""
    plane, other = await open_client(bootstrap), await open_client(bootstrap)
    await plane.put_samples(IDS, {"x": numbers(0)})
    manager = plane._partition._client.storage_manager
    delete, in_the_gap, go_on = manager.clear_data, threading.Event(), threading.Event()

    async def slow(metadata: Any) -> None:
        in_the_gap.set()
        await anyio.to_thread.run_sync(go_on.wait)
        await delete(metadata)

    monkeypatch.setattr(manager, "clear_data", slow)
    try:
        async with anyio.create_task_group() as tg:
            tg.start_soon(plane.clear_samples, IDS)
            await anyio.to_thread.run_sync(in_the_gap.wait)
            await other.put_samples(NEW, {"x": numbers(100)})
            with pytest.raises(MissingRows):
                await other.get_samples(IDS, ["x"])
            await other.put_samples(IDS[1:2], {"late": [torch.tensor([9])]})
            go_on.set()
    finally:
        go_on.set()
    got = await other.get_samples(NEW, ["x"])
    assert [row.tolist() for row in got["x"]] == [[100 + at] for at in range(4)]
    with pytest.raises(MissingRows):
        await other.get_samples(IDS, ["x"])
    assert await other.list_sample_ids() == frozenset(NEW)  # the late column went with its row
    await plane.clear_samples([*NEW, *IDS])
    await plane.aclose()
    await other.aclose()


async def test_h22_a_late_write_is_a_row_of_nobody_which_no_window_takes(
    bootstrap: TransferQueueBootstrap,
) -> None:
    """TransferQueue takes a late write for a new row. Ids are not used twice, so it hits none."""
    plane = await open_client(bootstrap)
    await plane.put_samples(IDS, {"x": numbers(0)})
    await plane.clear_samples(IDS)
    await plane.put_samples(NEW, {"x": numbers(100)})  # in the places of the rows that went
    await plane.put_samples(IDS[1:2], {"late": [torch.tensor([9])]})
    got = await plane.get_samples(NEW, ["x"])
    assert [row.tolist() for row in got["x"]] == [[100 + at] for at in range(4)]
    listed = await plane.list_sample_ids()
    cut = make_cut()
    with pytest.raises(InventoryMismatch) as refused:
        check_inventory(cut, listed | frozenset(rows_of(cut.groups, cut.records)) - frozenset(NEW))
    assert IDS[1] in refused.value.unexpected
    await plane.clear_samples([*IDS, *NEW])
    assert await plane.list_sample_ids() == frozenset()
    await plane.aclose()


async def test_h22_a_delete_that_fails_is_repeated_and_its_rows_are_named_until_then(
    bootstrap: TransferQueueBootstrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = await open_client(bootstrap)
    await plane.put_samples(IDS, {"x": numbers(0)})
    barrier = CheckpointBarrier()
    rows = Rows(plane, barrier, DeadlinesConfig())
    manager = plane._partition._client.storage_manager
    with monkeypatch.context() as patch:

        async def fail(metadata: Any) -> None:
            raise ConnectionError("storage unit is restarting")

        patch.setattr(manager, "clear_data", fail)
        async with barrier.mutation("clear"):
            await rows.clear(IDS)
        assert rows.suspects == set(IDS)
    async with barrier.mutation("clear"):
        await rows.clear(())
    assert rows.suspects == set()
    assert await plane.list_sample_ids() == frozenset()
    async with barrier.mutation("clear"):
        await rows.clear(IDS)  # what is gone is no error
    await plane.put_samples(NEW, {"x": numbers(100)})
    got = await plane.get_samples(NEW, ["x"])
    assert [row.tolist() for row in got["x"]] == [[100 + at] for at in range(4)]
    await plane.clear_samples(NEW)
    await plane.aclose()


# H15 and H18: a bundle of TransferQueue and torch -----------------------------------------------


async def test_h15_h18_every_damage_to_a_real_bundle_is_refused_by_name(
    bootstrap: TransferQueueBootstrap,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    pytestconfig: pytest.Config,
) -> None:
    store = BundleStore(tmp_path / "checkpoints")
    store.open()
    plane = await open_client(bootstrap)
    for step in (2, 4, 6):
        cut = make_cut(step)
        ids = sorted(frozenset(rows_of(cut.groups, cut.records)))
        await plane.put_samples(ids, {"x": [torch.tensor([step, at]) for at in range(len(ids))]})
        staged = store.stage(step)
        Policy(SMALL, TOKENIZER, seed=step).save(staged.policy_dir)
        digest = cut_digest(cut)
        await plane.save_checkpoint(staged.data_plane_dir, snapshot_metadata(cut, digest))
        store.publish(staged, cut=cut, digest=digest, config={"step": step}, metrics={})
        await plane.clear_samples(ids)
    await plane.aclose()
    store.close()
    names = {path.suffix for path in (store.directory / "step_6").rglob("*") if path.is_file()}
    assert {".pkl", ".safetensors"} <= names
    marker = tmp_path / "marker"
    verdicts: Counter[str] = Counter()
    wrong = []
    for case in corpus(store.directory, marker, short=True):
        try:
            verdicts[judge(case, store.directory, tmp_path / "scratch", marker)] += 1
        except AssertionError as exc:
            wrong.append(str(exc).splitlines()[0])
    with capsys.disabled():
        pytestconfig.get_terminal_writer().line(
            f"\ncorpus of TransferQueue and torch: {verdicts.total()} damaged bundles:"
            f" {verdicts['refused']} refused by name, {verdicts['harmless']} unchanged in content"
        )
    assert not wrong, "\n".join(wrong)
    assert verdicts["refused"] >= 200


# H23: prompts in flight at two restarts in a row ------------------------------------------------


class AsNumbers:
    """A `DataPlane` of plain numbers and lists of them, over one of tensors."""

    def __init__(self, plane: TransferQueueDataPlane) -> None:
        self._plane = plane
        self.list_sample_ids = plane.list_sample_ids
        self.clear_samples = plane.clear_samples
        self.save_checkpoint = plane.save_checkpoint
        self.aclose = plane.aclose

    async def put_samples(
        self,
        sample_ids: Sequence[str],
        fields: Columns,
        tags: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        def tensor(value: Any) -> torch.Tensor:
            return torch.tensor(value if isinstance(value, list) else [value]).double()

        columns = {name: [tensor(one) for one in values] for name, values in fields.items()}
        await self._plane.put_samples(sample_ids, columns, tags)

    async def get_samples(
        self, sample_ids: Sequence[str], select_fields: Sequence[str]
    ) -> dict[str, list[Any]]:
        found = await self._plane.get_samples(sample_ids, select_fields)
        return {
            name: [row.tolist() if name == "tokens" else row.item() for row in rows]
            for name, rows in found.items()
        }


class OnTransferQueue(MemoryRun):
    """Every life on a TransferQueue of its own; a kill is a cancel, which saves nothing."""

    def __init__(self, bootstrap: TransferQueueBootstrap, *args: Any, **options: Any) -> None:
        self.queue = bootstrap
        super().__init__(*args, **options)
        self.disk = LOCAL  # type: ignore[assignment]
        self.lives = 0
        self.start_life()

    async def open(self, bundles: BundleStore) -> SingleController:
        if not await self.queue.is_untouched():
            await self.queue.discard()
        ready = await restore(
            bundles,
            self.queue,
            self.config,
            runner=in_thread,
            source_fingerprint=self.source.fingerprint(),
        )
        self.trainer._plane = AsNumbers(await open_client(self.queue))

        async def connect(token: ReadyStore) -> DataPlane:
            return AsNumbers(await open_client(self.queue))

        ports = Ports(
            connect=connect,
            source=self.source,
            worker=self.engines,
            trainer=self.trainer,
            weight_sync=self.engines,
            estimator=MeanBaseline(),
            events=self.log,
            metrics=self.metrics,
            bundles=bundles,
        )
        return SingleController(self.config, ready, ports)

    def _arm(self, crash_when: Callable[[Event], bool], seed: int, life: anyio.CancelScope) -> None:
        append_many = self.log.append_many

        def append_and_look(kind: Any, each: Any) -> int:
            seq = append_many(kind, each)
            if self._left is None and any(map(crash_when, self.log.events[-len(each) :])):
                self._left = self.disk, self.log.after_crash(self.log.incarnation)
                life.cancel()
            return seq

        self.log.append_many = append_and_look  # type: ignore[method-assign]


@pytest.mark.parametrize("recovery", ["sibling"])  # tests/cases has both, in memory
async def test_h23_prompts_in_flight_survive_two_restarts_of_transfer_queue(
    bootstrap: TransferQueueBootstrap, tmp_path: Path, recovery: str
) -> None:
    payloads = [{"text": f"question {n}", "raw": bytes([n, 0, 255])} for n in range(8)]
    listed: list[frozenset[str]] = []

    async def held(prompt: Prompt, sibling: int, version: int) -> None:
        if run.lives < 3 and prompt.ordinal in (2, 3) and (prompt.ordinal, sibling) != (2, 0):
            await anyio.sleep_forever()

    def second_save(event: Event) -> bool:
        if event.event == "weight_sync" and run.controller is not None:
            run.controller.request_checkpoint()
        return event.event == "checkpoint"

    config = decode(
        {
            "grpo": {
                "num_prompts_per_step": 2,
                "num_generations_per_prompt": 2,
                "max_num_steps": 4,
            },
            "async_rl": {"sampler": {"name": "in_order", "max_lookahead_versions": 1}},
            "rollout_recovery": {"default_granularity": recovery},
            "checkpointing": {"save_period": 1},
        },
        ControllerConfig,
    )
    directory = tmp_path / "checkpoints"
    run = OnTransferQueue(bootstrap, config, payloads, directory=directory, script=held)
    assert await run.run(crash_when=lambda event: event.event == "checkpoint") is None
    first = verify(directory / "step_1").cut
    listed.append(await bootstrap.list_sample_ids())
    assert await run.run(crash_when=second_save) is None
    second = verify(directory / "step_1").cut
    listed.append(await bootstrap.list_sample_ids())
    assert second.incarnation != first.incarnation
    for cut in (first, second):
        assert [record.ordinal for record in cut.records[:2]] == [2, 3]
        assert [record.payload for record in cut.records[:2]] == payloads[2:4]
    kept = {"2.0_g0"} if recovery == "sibling" else set()
    for rows in listed:
        assert {row for row in rows if row.startswith(("2.", "3."))} == kept

    result = await run.run()
    assert result is not None and (result.reason, result.step) == ("max_steps", 4)
    report = audit(run.log.events)
    assert report.ok, report.violations
    assert (report.trained, result.counters["samples"]) == (8, 16)
    assert run.trainer.trained == [(2, 3), (4, 5), (6, 7)]
    lineage = {e.ordinal: e.group_id for e in run.log.events if e.event == "trained"}
    assert (lineage[2], lineage[3]) == ("2.2", "3.2")
    assert await bootstrap.list_sample_ids() == frozenset()
