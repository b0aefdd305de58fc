"""Turns a staged bundle into a published one, beside training."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import anyio

from sc_core.bundle import BundleStore, Staged
from sc_core.calls import failed, settle
from sc_core.config import ControllerConfig
from sc_core.errors import SaveError
from sc_core.ports import EventSink, Runner, Trainer
from sc_core.records import Cut
from sc_core.retention import prune
from sc_core.spans import FINALISER
from sc_core.state import PUBLISHED, RunState
from sc_core.watched import Watched

logger = logging.getLogger(__name__)


class Job(NamedTuple):
    """A staged bundle, and what goes into it yet."""

    staged: Staged
    cut: Cut
    digest: str
    metrics: dict[str, float]
    ft_only: bool


class BundleFinaliser:
    """Finishes weight files, hashes, publishes and prunes, one bundle at a time."""

    def __init__(
        self,
        state: RunState,
        store: BundleStore,
        trainer: Trainer,
        events: EventSink,
        config: ControllerConfig,
        settings: dict[str, Any],
        runner: Runner,
        protected: frozenset[int],
    ) -> None:
        self._state = state
        self._store = store
        self._trainer = trainer
        self._events = events
        self._config = config
        self._settings = settings  #: what `config.yaml` shows
        self._runner = runner
        self._protected = protected
        self._job: Watched[Job | None] = Watched(None)
        self._failure: Exception | None = None
        self.longest_s = 0.0  #: that a publication took

    def submit(self, job: Job) -> None:
        """Hand over a staged bundle. Call `settled` first."""
        assert self._job.value is None
        self._job.set(job)

    async def settled(self) -> None:
        """Wait for the bundle under way.

        Raises:
            SaveError: it could not be published. Raised once; the run should end.
        """
        await self._job.wait_until(lambda job: job is None, PUBLISHED)
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    async def run(self) -> None:
        """Finalise whatever is submitted, until cancelled; a publish under way is finished."""
        while True:
            await self._job.wait_until(lambda job: job is not None, "a bundle to publish")
            job = self._job.value
            assert job is not None
            began = anyio.current_time()
            try:
                deadlines = self._config.async_rl.deadlines
                with self._state.spans(FINALISER, "finalize_save", step=job.cut.step):
                    await settle(
                        "trainer.finalize_save", deadlines.trainer_s, self._trainer.finalize_save
                    )
                with self._state.spans(FINALISER, "publish", step=job.cut.step):
                    await settle(
                        "publishing a bundle",
                        deadlines.disk_s,
                        lambda job=job: self._publish(job),  # type: ignore[misc]
                    )
            except Exception as exc:
                self._failure = exc if isinstance(exc, SaveError) else SaveError(str(exc))
                self._failure.__cause__ = exc
                logger.error("step_%d was not published: %s", job.staged.step, exc)
            finally:
                self.longest_s = max(self.longest_s, anyio.current_time() - began)
                self._job.set(None)
                self._state.touch()  # whoever keeps to the time looks at the reserve

    async def _publish(self, job: Job) -> None:
        cut = job.cut

        def on_disk() -> None:
            # the log up to the cut must not be younger than the bundle
            try:
                self._events.sync()
            except Exception as exc:
                raise failed("event log sync", exc) from exc
            self._store.publish(
                job.staged,
                cut=cut,
                digest=job.digest,
                config=self._settings,
                metrics=job.metrics,
                ft_only=job.ft_only,
            )

        await self._runner(on_disk)
        self._state.saved(step=cut.step, weight_version=cut.weight_version, digest=job.digest)
        checkpointing = self._config.checkpointing
        for failure in await self._runner(prune, self._store, checkpointing, self._protected):
            logger.warning("an old bundle could not be pruned: %s", failure)
