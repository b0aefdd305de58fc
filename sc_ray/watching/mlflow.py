"""Metrics for MLflow."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag

from sc_ray.watching.config import MlflowConfig
from sc_ray.watching.identity import Identity
from sc_ray.watching.numbers import flat

_PARAMS_PER_CALL = 100  #: MLflow takes no more
_LONGEST_VALUE = 6000  #: characters of a parameter; likewise


class Mlflow:
    """One MLflow run for all starts of a run.

    It keeps every value of a metric: of a step made again after a resume both, the later one by
    its time. Its parameters can't change; a setting that did since becomes the tag `now/KEY`.
    """

    name = "MLflow"

    def __init__(
        self,
        config: MlflowConfig,
        directory: Path,
        settings: Mapping[str, Any],
        identity: Identity,
        run_name: str,
    ) -> None:
        uri = config.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or directory.as_uri()
        if uri.startswith("file:"):  # else it refuses files, and mlflow-skinny has no database
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._uri = uri
        self._config = config
        self._settings = settings
        self._identity = identity
        self._run_name = config.run_name or run_name

    def start(self) -> None:
        self._client = client = MlflowClient(tracking_uri=self._uri)
        run_id = self._identity.kept()
        if run_id is None:
            run = client.create_run(self._experiment(), run_name=self._run_name)
            run_id = run.info.run_id
            self._identity.keep(run_id)
        else:
            run = client.get_run(run_id)
            client.update_run(run_id, status="RUNNING")
        self._run_id = run_id
        told = {key: str(value)[:_LONGEST_VALUE] for key, value in flat(self._settings).items()}
        before = run.data.params
        new = [Param(key, value) for key, value in told.items() if key not in before]
        for first in range(0, len(new), _PARAMS_PER_CALL):
            client.log_batch(run_id, params=new[first : first + _PARAMS_PER_CALL])
        changed = [
            RunTag(f"now/{key}", value)
            for key, value in told.items()
            if before.get(key, value) != value
        ]
        if changed:
            client.log_batch(run_id, tags=changed)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        metrics = [Metric(name, value, now_ms, step) for name, value in numbers.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def finish(self) -> None:
        self._client.set_terminated(self._run_id)

    def _experiment(self) -> str:
        name = self._config.experiment_name
        found = self._client.get_experiment_by_name(name)
        if found is None:
            return str(self._client.create_experiment(name))
        return str(found.experiment_id)
