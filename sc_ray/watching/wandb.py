"""Metrics for Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from sc_ray.watching.config import WandbConfig
from sc_ray.watching.identity import Identity


class WeightsAndBiases:
    """One W&B run for all starts of a run.

    Its own step only grows, so the training step is a metric, `step`, and the x-axis of all
    others. Of a step that was made again after a resume it shows both, at the same place; the
    later one comes later in the table.
    """

    name = "W&B"

    def __init__(
        self,
        config: WandbConfig,
        directory: Path,
        settings: Mapping[str, Any],
        identity: Identity,
        run_name: str,
    ) -> None:
        self._config = config
        self._directory = directory
        self._settings = settings
        self._identity = identity
        self._run_name = config.name or run_name

    def start(self) -> None:
        config = self._config
        self._directory.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=config.project,
            name=self._run_name,
            entity=config.entity,
            group=config.group,
            tags=config.tags,
            mode=config.mode,
            id=self._identity.kept_or_new(),
            resume="allow" if config.mode == "online" else None,  # offline, `wandb sync` joins them
            dir=str(self._directory),
            config=dict(self._settings),
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log({"step": step, **numbers})

    def finish(self) -> None:
        self._run.finish()
