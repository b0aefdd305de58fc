"""Metrics as TensorBoard's event files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from sc_ray.watching.numbers import flat


class TensorBoard:
    """One file for each start, all in one directory.

    Args:
        resumed_step: of the bundle that the run goes on from; 0 afresh. TensorBoard then hides
            what earlier files have of later steps.
    """

    name = "TensorBoard"

    def __init__(self, directory: Path, settings: Mapping[str, Any], resumed_step: int) -> None:
        self._directory = directory
        self._settings = settings
        self._purge_step = resumed_step + 1 if resumed_step else 0

    def start(self) -> None:
        self._writer = SummaryWriter(str(self._directory), purge_step=self._purge_step)
        events: Any = self._writer.file_writer  # `add_hparams` would make another directory
        for summary in hparams(flat(self._settings), {}):  # type: ignore[no-untyped-call]
            events.add_summary(summary)
        self._writer.flush()

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # whoever looks sees each step at once

    def finish(self) -> None:
        self._writer.close()
