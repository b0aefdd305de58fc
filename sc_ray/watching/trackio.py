"""Metrics for trackio."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import trackio

from sc_ray.watching.config import TrackioConfig
from sc_ray.watching.identity import Identity
from sc_ray.watching.numbers import flat


class Trackio:
    """One trackio run for all starts of a run.

    Of a step that was made again after a resume it keeps both.
    """

    name = "trackio"

    def __init__(
        self,
        config: TrackioConfig,
        settings: Mapping[str, Any],
        identity: Identity,
        run_name: str,
    ) -> None:
        self._config = config
        self._settings = settings
        self._identity = identity
        self._run_name = run_name

    def start(self) -> None:
        name = self._identity.kept()
        if name is None:  # it knows runs by their names alone
            name = self._config.name or f"{self._run_name}-{self._identity.new()}"
            self._identity.keep(name)
        self._run = trackio.init(
            self._config.project,
            name,
            resume="allow",
            config=flat(self._settings),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def finish(self) -> None:
        self._run.finish()  # type: ignore[no-untyped-call]
