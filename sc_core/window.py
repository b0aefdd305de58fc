"""The checkpoint window: the one moment in which a cut and a snapshot describe the same rows.

Only this section stops commits and clears; generation, and everything before and after the
section, goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import anyio
import anyio.lowlevel

from sc_core.barrier import CheckpointBarrier
from sc_core.bundle import BundleStore, Staged
from sc_core.calls import ended_from_outside, in_tree, settle
from sc_core.config import DeadlinesConfig
from sc_core.cut import cut_digest
from sc_core.errors import InventoryMismatch, root_cause
from sc_core.finaliser import BundleFinaliser, Job
from sc_core.ports import DataPlane, Runner, Trainer
from sc_core.records import Cut, SampleId, rows_of
from sc_core.returned import check_rows
from sc_core.spans import HELD, SAVE, SNAPSHOT, TRAIN, TRAINER, WAITED, Spans
from sc_core.state import Stopwatch


class CheckpointWindow:
    def __init__(
        self,
        barrier: CheckpointBarrier,
        plane: DataPlane,
        trainer: Trainer,
        store: BundleStore,
        finaliser: BundleFinaliser,
        deadlines: DeadlinesConfig,
        runner: Runner,
        take_cut: Callable[[], tuple[Cut, tuple[int, int]]],
        spans: Spans,
    ) -> None:
        self._barrier = barrier
        self._plane = plane
        self._trainer = trainer
        self._store = store
        self._finaliser = finaliser
        self._deadlines = deadlines
        self._runner = runner
        self._take_cut = take_cut  #: with the digests of its groups and records; no await
        self._spans = spans
        self.timings: Mapping[str, float] = {}  #: of the last save, in seconds
        self._longest_s = 0.0

    @property
    def longest_save_s(self) -> float:
        """What the longest staging and the longest publication so far took, together."""
        return self._longest_s + self._finaliser.longest_s

    async def save(self, step: int, metrics: Mapping[str, float], *, ft_only: bool) -> None:
        """Stage a bundle of the present and hand it to the finaliser.

        `step` is the last finished step; `ft_only` as in `TrainingInfo`. A cancel before the
        hand-over leaves a `tmp_step_N` that nothing ever reads.

        Raises:
            SaveError: the bundle before this one could not be published, or this one staged.
            InventoryMismatch: the data plane's rows are not those of the cut.
            BarrierTimeout, CallTimeout: naming who holds the barrier, or which call hung.
        """
        lap, spans = Stopwatch(), self._spans
        with lap("total_save_seconds"), spans(TRAIN, SAVE, step=step):
            with spans(TRAIN, "wait for the bundle before", step=step):
                await self._finaliser.settled()
            began = anyio.current_time()
            disk_s = self._deadlines.disk_s
            with spans(TRAIN, "stage", step=step):
                staged = await settle(
                    "staging a bundle", disk_s, lambda: self._runner(self._store.stage, step)
                )
            with spans(TRAIN, "trainer saves", step=step), spans(TRAINER, "save", step=step):
                await settle(
                    "trainer.save",
                    self._deadlines.trainer_s,
                    lambda: self._trainer.save(staged.policy_dir),
                )
            await anyio.lowlevel.checkpoint_if_cancelled()  # the calls before were shielded
            asked, asked_at = anyio.current_time(), spans.now()
            async with self._barrier.checkpoint(
                f"checkpoint of step {step}", deadline_s=self._deadlines.trainer_s
            ):
                lap.add("barrier_wait_seconds", anyio.current_time() - asked)
                spans.add(TRAIN, WAITED, asked_at, step=step)
                with lap("exclusive_hold_seconds"), spans(TRAIN, HELD, step=step):
                    cut, digest = await self._snapshot(staged, lap)
            await anyio.lowlevel.checkpoint_if_cancelled()
            self._finaliser.submit(Job(staged, cut, digest, dict(metrics), ft_only))
            self._longest_s = max(self._longest_s, anyio.current_time() - began)
        self.timings = lap.seconds

    async def _snapshot(self, staged: Staged, lap: Stopwatch) -> tuple[Cut, str]:
        with self._spans(TRAIN, "cut"):
            cut, (groups, records) = self._take_cut()
            hashing = partial(cut_digest, cut, groups_digest=groups, records_digest=records)
            digest = await settle(
                "hashing the cut", self._deadlines.disk_s, lambda: self._runner(hashing)
            )
        call = "data_plane.list_sample_ids"
        with self._spans(TRAIN, "list rows"):
            listed = check_rows(
                await settle(call, self._deadlines.data_plane_s, self._plane.list_sample_ids), call
            )
        checked = False

        async def check() -> None:
            nonlocal checked
            await settle(
                "the check of the rows",
                self._deadlines.disk_s,
                lambda: self._runner(check_inventory, cut, listed),
            )
            checked = True

        try:
            async with anyio.create_task_group() as tg:  # nothing changes: both look at the same
                tg.start_soon(in_tree, check, name="check of the rows")
                with lap("tq_save_seconds"), self._spans(TRAIN, SNAPSHOT, step=cut.step):
                    await in_tree(
                        settle,
                        "data_plane.save_checkpoint",
                        self._deadlines.snapshot_s,
                        lambda: self._plane.save_checkpoint(
                            staged.data_plane_dir, snapshot_metadata(cut, digest)
                        ),
                    )
        except ExceptionGroup as group:
            raise root_cause(group) from group
        if not checked:
            raise ended_from_outside("the check of the rows")
        return cut, digest


def check_inventory(cut: Cut, listed: frozenset[SampleId]) -> None:
    """Compare the rows of a store with those of a cut; suspects may be there or not.

    Raises:
        InventoryMismatch: naming the first rows that are missing or unexpected.
    """
    # Row by row, where sets would keep the interpreter, and the event loop, for all of them.
    expected: set[SampleId] = set(cut.suspects)
    missing = []
    for row in rows_of(cut.groups, cut.records):
        expected.add(row)
        if row not in listed:
            missing.append(row)
    unexpected = [row for row in listed if row not in expected]
    if missing or unexpected:
        raise InventoryMismatch(sorted(missing), sorted(unexpected))


def snapshot_metadata(cut: Cut, digest: str) -> dict[str, object]:
    """What the data plane's snapshot says about the cut it belongs to."""
    return {
        "cut_digest": digest,
        "step": cut.step,
        "weight_version": cut.weight_version,
        "groups": len(cut.groups),
        "rows": sum(1 for _ in rows_of(cut.groups, cut.records)),
    }
