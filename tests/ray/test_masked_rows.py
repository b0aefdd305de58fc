"""A trainer worker and masked rows; without Ray, over rows in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from test_policy import SMALL, TOKENIZER, made_up_rows

from sc_core import Batch, Group
from sc_core.records import group_id, sample_ids
from sc_ray.trainer.worker import TrainerSpec, TrainerWorker


class Rows:
    """In place of a TransferQueue."""

    def __init__(self) -> None:
        ids = [row for ordinal in range(4) for row in sample_ids(group_id(ordinal, 0), 3)]
        self.of = dict(zip(ids, made_up_rows(len(ids)), strict=True))
        self.fetched: list[str] = []

    def connect_rows(self) -> Rows:
        return self

    def fetch(self, sample_ids: Sequence[str], names: Sequence[str]) -> dict[str, list[Any]]:
        assert sample_ids
        self.fetched += sample_ids
        return {name: [self.of[row][name] for row in sample_ids] for name in names}


def batch(masked: dict[int, tuple[int, ...]]) -> Batch:
    groups = [
        Group(
            group_id=group_id(ordinal, 0),
            ordinal=ordinal,
            sample_ids=sample_ids(group_id(ordinal, 0), 3),
            start_weight_version=0,
            end_weight_version=0,
            commit_seq=ordinal,
            masked=masked.get(ordinal, ()),
        )
        for ordinal in range(4)
    ]
    return Batch(step=1, weight_version=0, groups=tuple(groups))


def step(rows: Rows, masked: dict[int, tuple[int, ...]]) -> dict[str, float]:
    spec: Any = TrainerSpec(model=SMALL, tokenizer=TOKENIZER, rows=rows)  # type: ignore[arg-type]
    worker = TrainerWorker(spec)
    worker.begin_step(1)
    worker.train_microbatches(batch(masked))
    return dict(worker.finish_step())


def test_masked_rows_are_no_part_of_the_gradient_or_of_its_mean() -> None:
    rows = Rows()
    metrics = step(rows, {1: (0, 2), 3: (0, 1, 2)})
    assert rows.fetched == ["0.0_g0", "0.0_g1", "0.0_g2", "1.0_g1", "2.0_g0", "2.0_g1", "2.0_g2"]
    assert metrics["tokens"] == sum(
        int(rows.of[row]["completion_mask"].sum()) for row in rows.fetched
    )
    for row in set(rows.of) - set(rows.fetched):
        rows.of[row]["advantage"] = torch.tensor([float("nan")])
    assert step(rows, {1: (0, 2), 3: (0, 1, 2)}) == metrics


def test_a_step_in_which_all_is_masked_is_finished() -> None:
    metrics = step(Rows(), dict.fromkeys(range(4), (0, 1, 2)))
    assert metrics["loss"] == metrics["tokens"] == 0.0
