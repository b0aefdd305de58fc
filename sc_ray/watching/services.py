"""Which services a run has."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sc_ray.lazy import much_is_imported
from sc_ray.watching.background import Service
from sc_ray.watching.config import LoggerConfig
from sc_ray.watching.identity import Identity


def load(config: LoggerConfig) -> None:
    """Import the libraries that are asked for, and no other: it may take seconds."""
    with much_is_imported():
        for asked, name in (
            (config.tensorboard_enabled, "tensorboard"),
            (config.wandb_enabled, "wandb"),
            (config.mlflow_enabled, "mlflow"),
            (config.trackio_enabled, "trackio"),
            (config.prometheus_port is not None, "prometheus"),
        ):
            if asked:
                importlib.import_module(f"sc_ray.watching.{name}")


def services(
    config: LoggerConfig,
    directory: Path,
    run_dir: Path,
    settings: Mapping[str, Any],
    resumed_step: int | None,
) -> list[Service]:
    """Those that are asked for; `load` has imported them. They are not started yet.

    Args:
        directory: `config.directory` of the run.
        settings: of the whole run; services take them for its hyper-parameters.
        resumed_step: of the bundle that the run goes on from; None: afresh.
    """
    afresh, name = resumed_step is None, run_dir.resolve().name
    found: list[Service] = []
    if config.tensorboard_enabled:
        from sc_ray.watching.tensorboard import TensorBoard

        found.append(TensorBoard(directory / "tensorboard", settings, resumed_step or 0))
    if config.wandb_enabled:
        from sc_ray.watching.wandb import WeightsAndBiases

        identity = Identity(run_dir, "wandb", afresh=afresh)
        found.append(WeightsAndBiases(config.wandb, directory, settings, identity, name))
    if config.mlflow_enabled:
        from sc_ray.watching.mlflow import Mlflow

        identity = Identity(run_dir, "mlflow", afresh=afresh)
        found.append(Mlflow(config.mlflow, directory / "mlruns", settings, identity, name))
    if config.trackio_enabled:
        from sc_ray.watching.trackio import Trackio

        identity = Identity(run_dir, "trackio", afresh=afresh)
        found.append(Trackio(config.trackio, settings, identity, name))
    return found
