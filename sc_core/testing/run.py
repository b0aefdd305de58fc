"""A whole run on in-memory ports, with crashes and resumes, in milliseconds and without Ray."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import anyio

from sc_core.bundle import BundleStore
from sc_core.calls import inline
from sc_core.config import ControllerConfig
from sc_core.controller import Ports, RunResult, SingleController
from sc_core.events import Event
from sc_core.ports import AdvantageEstimator, DataPlane, GroupFilter, Runner, Sampler, SpanSink
from sc_core.restore import ReadyStore, restore
from sc_core.testing.data_plane import Hooks, MemoryBootstrap, MemoryDataPlane, MemoryStore
from sc_core.testing.disk import MemoryDisk
from sc_core.testing.events import MemoryEventLog
from sc_core.testing.ports import (
    Latency,
    ListPrompts,
    ListValidation,
    MeanBaseline,
    MemoryEngines,
    MemoryMetrics,
    MemoryTrainer,
    Script,
)
from sc_core.verify import candidates, verify
from sc_core.weights import TurnGate


class MemoryRun:
    """One run of a controller: a directory of bundles, an event log, and process lives.

    Every call of `run` is one incarnation with a fresh store, trainer and engines, as a new
    process would have. `crash_when` is asked at every event; once it says yes, the power goes:
    the next incarnation finds what the disk of that very instant may have kept, and the log up
    to then, or (for odd seeds) up to its last sync.
    """

    def __init__(
        self,
        config: ControllerConfig,
        prompts: Sequence[Any],
        *,
        directory: Path = Path("/checkpoints"),
        epochs: int = 1,
        batch: int = 1,
        latency: Latency = lambda prompt, sibling: 0.0,
        script: Script | None = None,
        hooks: Hooks | None = None,
        group_filter: GroupFilter | None = None,
        sampler: Sampler | None = None,
        held_out: Sequence[Any] | None = None,
        engines: int = 1,
        replaceable: bool = False,
        turns: bool = False,
    ) -> None:
        """`replaceable`: the run goes on without an engine that fails. `turns`: `self.turns` is a
        `TurnGate` for `script`."""
        self.directory = directory
        self.config = config
        self.prompts = prompts
        self.epochs = epochs
        self.batch = batch
        self.latency = latency
        self.script = script
        self.hooks = hooks
        self.group_filter = group_filter
        self.sampler = sampler
        self.estimator: AdvantageEstimator = MeanBaseline()
        self.held_out = held_out  #: prompts for evaluations; None: no port for them
        self.engine_count = engines
        self.replaceable = replaceable
        self._has_turns = turns
        self.resume: Literal["auto", "never"] | Path = "auto"
        self.runner: Runner = inline
        self.spans: Callable[[str], SpanSink] | None = None  #: makes a life's, of its incarnation
        self.log = MemoryEventLog()
        self.disk = MemoryDisk()
        self.lives = 0
        self._lived = False
        self.start_life()

    def start_life(self) -> None:
        """Build what a new process would build; `run` does so for every life but the first."""
        self.lives += 1
        self.store = MemoryStore()
        self.trainer = MemoryTrainer(MemoryDataPlane(self.store), disk=self.disk)
        self.engines = MemoryEngines(
            self.trainer, engines=self.engine_count, latency=self.latency, script=self.script
        )
        self.turns = TurnGate() if self._has_turns else None
        self.bootstrap = MemoryBootstrap(self.store, disk=self.disk)
        self.source = ListPrompts(self.prompts, epochs=self.epochs, batch=self.batch)
        self.estimator = MeanBaseline()
        self.metrics = MemoryMetrics()
        self.controller: SingleController | None = None

    async def open(self, bundles: BundleStore) -> SingleController:
        """Restore into the fresh store and build the controller of this life."""
        ready = await restore(
            bundles,
            self.bootstrap,
            self.config,
            runner=self.runner,
            resume=self.resume,
            source_fingerprint=self.source.fingerprint(),
        )

        async def connect(token: ReadyStore) -> DataPlane:
            return MemoryDataPlane(self.store, self.hooks, disk=self.disk)

        ports = Ports(
            connect=connect,
            source=self.source,
            worker=self.engines,
            trainer=self.trainer,
            weight_sync=self.engines,
            estimator=self.estimator,
            events=self.log,
            metrics=self.metrics,
            bundles=bundles,
            group_filter=self.group_filter,
            sampler=self.sampler,
            validation=None if self.held_out is None else ListValidation(self.held_out),
            fleet=self.engines if self.replaceable else None,
            spans=None if self.spans is None else self.spans(self.log.incarnation),
            turns=self.turns,
        )
        controller = SingleController(
            self.config, ready, ports, runner=self.runner, clock=anyio.current_time
        )
        self.engines.on_join = lambda engine, version: controller.engine_is(
            engine, "serving", confirmed=version
        )
        return controller

    async def run(
        self, *, crash_when: Callable[[Event], bool] | None = None, seed: int = 0
    ) -> RunResult | None:
        """Live once: resume if there is a bundle, run to the end. None: it crashed."""
        if self._lived:
            self.log = self.log.after_crash()
            self.start_life()
        self._lived = True
        self._left: tuple[MemoryDisk, MemoryEventLog] | None = None
        bundles = BundleStore(self.directory, disk=self.disk, now=lambda: 0.0)
        bundles.open()
        try:
            with anyio.CancelScope() as life:
                if crash_when is not None:
                    self._arm(crash_when, seed, life)
                self.controller = await self.open(bundles)
                return await self.controller.run()
        finally:
            bundles.close()
            if self._left is not None:
                self.disk, self.log = self._left
        return None

    def _arm(self, crash_when: Callable[[Event], bool], seed: int, life: anyio.CancelScope) -> None:
        append_many = self.log.append_many

        def append_and_look(kind: Any, each: Any) -> int:
            seq = append_many(kind, each)
            if self._left is None and any(map(crash_when, self.log.events[-len(each) :])):
                log = self.log.after_crash(self.log.incarnation, lose_unsynced=seed % 2 == 1)
                self._left = self.disk.after_crash(seed), log
                life.cancel()
            return seq

        self.log.append_many = append_and_look  # type: ignore[method-assign]

    def bundles(self) -> list[int]:
        """Steps that have a published bundle, ascending."""
        if not self._lived:
            return []
        return [verify(path, self.disk).step for path in candidates(self.directory, self.disk)][
            ::-1
        ]
