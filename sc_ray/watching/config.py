"""The settings of what watches a run; names are NeMo RL's, but for trackio and Prometheus."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Literal

import msgspec

from sc_core import (
    ConfigError,
)


class _Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class WandbConfig(_Settings, frozen=True):
    """Of W&B. A resume goes on with the same run there."""

    project: str = "single-controller"  #: that the run belongs to; made if it is not there
    name: str | None = None  #: of the run; None: that of RUN's directory
    entity: str | None = None  #: user or team; None: the account's own
    group: str | None = None  #: of runs that are shown together
    tags: tuple[str, ...] = ()  #: of the run
    mode: Literal["online", "offline"] = "online"
    """`offline` writes into the log directory alone, for `wandb sync` later."""


class MlflowConfig(_Settings, frozen=True):
    """Of MLflow. A resume goes on with the same run there."""

    experiment_name: str = "single-controller"  #: that the run belongs to; made if it is not there
    run_name: str | None = None  #: None: that of RUN's directory
    tracking_uri: str | None = None
    """Of the server, or `file:PATH`. None: the environment's MLFLOW_TRACKING_URI, or files in the
    log directory."""


class TrackioConfig(_Settings, frozen=True):
    """Of trackio, which keeps runs on this machine: TRACKIO_DIR, or its usual place."""

    project: str = "single-controller"  #: that the run belongs to; made if it is not there
    name: str | None = None  #: of the run; None: that of RUN's directory and an id


class LoggerConfig(_Settings, frozen=True):
    """Who else gets the metrics that `RUN/metrics.jsonl` has. None of them can hold up the run.

    Raises:
        ConfigError: the port is none.
    """

    log_dir: str | None = None
    """Directory in which each run gets one of its own name, for what the services below write on
    this machine. None: RUN itself."""
    tensorboard_enabled: bool = True  #: event files, in `tensorboard` there
    wandb_enabled: bool = False  #: needs `pip install 'single-controller[wandb]'`
    mlflow_enabled: bool = False  #: needs `pip install 'single-controller[mlflow]'`
    trackio_enabled: bool = False  #: needs `pip install 'single-controller[trackio]'`
    wandb: WandbConfig = WandbConfig()
    mlflow: MlflowConfig = MlflowConfig()
    trackio: TrackioConfig = TrackioConfig()
    prometheus_port: int | None = None
    """TCP port on which `/metrics` answers, as long as the controller runs. 0: any free one, which
    the terminal and `status` then name. None: there is none."""
    prometheus_host: str = "127.0.0.1"
    """Address to listen on. Whoever reaches it can read the metrics: there is no password."""

    def __post_init__(self) -> None:
        if self.prometheus_port is not None and not 0 <= self.prometheus_port < 65536:
            raise ConfigError(
                f"logger.prometheus_port is {self.prometheus_port}; it must be in 0 … 65535"
            )

    def check(self) -> None:
        """Look for what was asked for.

        Raises:
            ConfigError: it is not installed; names the extra that brings it.
        """
        for key, asked, module, extra in (
            ("tensorboard_enabled", self.tensorboard_enabled, "tensorboard", "ray"),
            ("wandb_enabled", self.wandb_enabled, "wandb", "wandb"),
            ("mlflow_enabled", self.mlflow_enabled, "mlflow", "mlflow"),
            ("trackio_enabled", self.trackio_enabled, "trackio", "trackio"),
            ("prometheus_port", self.prometheus_port is not None, "prometheus_client", "ray"),
        ):
            if asked and importlib.util.find_spec(module) is None:
                raise ConfigError(
                    f"logger.{key} asks for {module}, which is not installed: pip install"
                    f" 'single-controller[{extra}]'"
                )

    def directory(self, run_dir: Path) -> Path:
        """What the services may write into. Call it on the driver: `log_dir` may be relative."""
        if self.log_dir is None:
            return run_dir.resolve()
        return Path(self.log_dir).resolve() / run_dir.resolve().name
