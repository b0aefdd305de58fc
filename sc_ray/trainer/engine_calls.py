"""What the trainer's process asks of engines while weights go there; errors by engine."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Mapping
from typing import Any

from ray.exceptions import RayActorError, RayTaskError

from sc_core import (
    WeightSyncError,
    WorkerDied,
)
from sc_ray.broadcast import SendPlan
from sc_ray.workers import died

GRACE_S = 5.0
"""For those who fail only because another one has, until they notice."""


class EngineCalls:
    """vLLM's `VLLMWeightSyncClient`: every call goes to all engines of a group at once, and blocks.

    Args:
        engines: handles of generation workers, by name, in the order of their ranks in the group.

    Raises:
        WeightSyncError: from every call that one of them failed, or did not answer in time.
    """

    def __init__(self, engines: Mapping[str, Any]) -> None:
        self._engines = dict(engines)
        self._workers: dict[str, int] = {}  #: processes that take weights, by engine
        self._version = 0
        self._allowed_s: float | None = None
        self._deadline: float | None = None
        self.confirmed: dict[str, int] = {}
        self.failed: dict[str, str] = {}
        self.dead: dict[str, str] = {}
        self.broken: concurrent.futures.Future[None] = concurrent.futures.Future()
        """Done once an engine has failed: whoever waits for it may give up."""

    def begin(self, plan: SendPlan) -> None:
        """Forget the last broadcast."""
        self._version, self._allowed_s = plan.version, plan.deadline_s
        self._deadline = None if plan.deadline_s is None else time.monotonic() + plan.deadline_s
        self.confirmed, self.failed, self.dead = {}, {}, {}
        self.broken = concurrent.futures.Future()

    def count_workers(self) -> int:
        """How many processes of engines take weights; each has a rank in the group."""
        self._workers = self._all(
            "counting its workers", lambda _, engine: engine.transfer_workers.remote()
        )
        return sum(self._workers.values())

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Each engine gets its own ranks: vLLM numbers those of one engine only."""
        rank, told = int(init_info["rank_offset"]), {}
        for name in self._engines:
            told[name] = {**init_info, "rank_offset": rank}
            rank += self._workers[name]
        self._all(
            "meeting the trainer", lambda name, engine: engine.meet_trainer.remote(told[name])
        )

    def start_weight_update(self) -> None:
        self._all("beginning an update", lambda _, engine: engine.begin_update.remote())

    def update_weights(self, update_info: Mapping[str, Any]) -> None:
        self._all("receiving weights", lambda _, engine: engine.receive_weights.remote(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Each engine confirms the version of the plan."""
        self.confirmed = self._all(
            "finishing an update", lambda _, engine: engine.finish_update.remote(self._version)
        )

    def _all(self, what: str, ask: Callable[[str, Any], Any]) -> dict[str, Any]:
        asked = {name: ask(name, engine).future() for name, engine in self._engines.items()}
        left_s = None if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)
        concurrent.futures.wait(
            asked.values(), left_s, return_when=concurrent.futures.FIRST_EXCEPTION
        )
        answers: dict[str, Any] = {}
        if any(future.done() and future.exception() for future in asked.values()):
            self._break()
            concurrent.futures.wait(asked.values(), GRACE_S)
        silent = []
        for name, future in asked.items():
            if not future.done():
                silent.append(name)
                continue
            try:
                answers[name] = future.result()
            except Exception as exc:  # raised below, with the others
                self._blame(name, what, exc)
        guilty = ", ".join([*self.failed, *self.dead])
        for name in silent:
            late = f"{what} did not return within {self._allowed_s:g} s"
            self.failed[name] = f"{what} did not return, after {guilty} failed" if guilty else late
        if self.failed or self.dead:
            self._break()
            raise WeightSyncError(f"{what} failed on {', '.join([*self.failed, *self.dead])}")
        return answers

    def _blame(self, name: str, what: str, error: Exception) -> None:
        cause: BaseException = error
        while isinstance(cause, RayTaskError) and cause.cause is not None:
            cause = cause.cause
        if isinstance(cause, RayActorError):
            self.dead[name] = died(name, cause).reason
        elif isinstance(cause, WorkerDied):
            self.dead[name] = cause.reason
        else:
            self.failed[name] = f"{what}: {cause}"

    def _break(self) -> None:
        if not self.broken.done():
            self.broken.set_result(None)
