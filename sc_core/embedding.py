"""`open_run`: a run in a directory, opened in the only order that works, and closed again."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import anyio
import anyio.lowlevel

from sc_core.audit import CHECKPOINTS, EVENTS
from sc_core.bundle import BundleStore
from sc_core.calls import ended_from_outside, in_thread, settle
from sc_core.config import ControllerConfig, check_config
from sc_core.controller import Ports, SingleController
from sc_core.defaults import GroupAdvantages, SharedWeights
from sc_core.errors import root_cause
from sc_core.estimates import check_scope
from sc_core.events import JsonlEventLog, JsonlMetrics
from sc_core.ports import (
    AdvantageEstimator,
    BootstrapDataPlane,
    DataPlane,
    EngineFleet,
    GroupFilter,
    PromptSource,
    RolloutWorker,
    Runner,
    Sampler,
    Trainer,
    ValidationPrompts,
    WeightSync,
)
from sc_core.restore import ReadyStore, restore
from sc_core.samplers import build_sampler, check_capacity
from sc_core.spans import SPANS, JsonlSpans
from sc_core.weights import TurnGate

METRICS = "metrics.jsonl"
R = TypeVar("R")


class RowStore(BootstrapDataPlane, Protocol):
    """The store of a data plane from before a restore to its client after it."""

    async def connect(self, ready: ReadyStore) -> DataPlane:
        """A client of the store, which has been restored, or proven untouched, by now."""


@asynccontextmanager
async def open_run(
    run_dir: Path,
    config: ControllerConfig,
    *,
    store: RowStore,
    source: PromptSource,
    worker: RolloutWorker,
    trainer: Trainer,
    weight_sync: WeightSync | None = None,
    estimator: AdvantageEstimator | None = None,
    group_filter: GroupFilter | None = None,
    sampler: Sampler | None = None,
    validation: ValidationPrompts | None = None,
    fleet: EngineFleet | None = None,
    turns: TurnGate | None = None,
    resume: Literal["auto", "never"] | Path = "auto",
    key: bytes | None = None,
    runner: Runner = in_thread,
    settings: Mapping[str, Any] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[SingleController]:
    """Open or resume the run in `run_dir`; gives its controller, for one `await run()`.

        async with open_run(run_dir, config, store=…, source=…, …) as controller:
            result = await controller.run()

    To end with a bundle on SIGTERM, run this in a task beside it:

        with anyio.open_signal_receiver(signal.SIGTERM) as signals:
            async for number in signals:
                controller.stop(number.name)

    Takes the directory's lock, restores the newest bundle of `checkpoints/` into `store`, and
    opens `events.jsonl`, `metrics.jsonl` and `spans.jsonl`; leaving, in whatever way, closes them
    and gives the lock back. A cancel while it opens takes effect when the call under way has
    returned, leaves nothing open, and changes no bundle; the store may have been filled, so a
    process that tries again discards it, or starts with another.

    Args:
        run_dir: made if it is not there, with mode 0700. `python -m sc_core` reads it.
        weight_sync: None: `SharedWeights`, for a worker that uses the trainer's own weights.
        estimator: None: `GroupAdvantages`.
        resume: `auto`: from the newest bundle that verifies; `never`: the directory must have
            none; or the path of one.
        key: signs bundles, and refuses those without that signature.
        runner: what runs work on disk, and heavy estimates.
        settings: what a bundle's `config.yaml` shows; None: `config`.
        clock: dates barrier sections in reports; on a virtual clock, `anyio.current_time`.

    The other ports are those of `Ports`.

    Raises:
        ConfigError: these are no settings, or can never fill a step; nothing was opened.
        RunInUse: another process has this directory.
        SaveError: it can't be written, or others may write to it.
        RestoreError: no bundle can be used, or the settings can't go on from it.
        RestoreOrderError: the store was touched before.
        CallTimeout: disk or store did not answer in time.
    """
    check_config(config)
    estimator = estimator or GroupAdvantages()
    check_capacity(
        config,
        sampler or build_sampler(config.async_rl.sampler, config.grpo.num_prompts_per_step),
    )
    check_scope(config, estimator)
    bundles = BundleStore(run_dir / CHECKPOINTS, key=key)
    disk_s = config.async_rl.deadlines.disk_s

    async def on_disk(call: str, work: Callable[[], R]) -> R:
        return await settle(f"{call} {run_dir}", disk_s, lambda: runner(work))

    async def opening() -> SingleController:
        await on_disk("opening", bundles.open)
        ready = await restore(
            bundles,
            store,
            config,
            runner=runner,
            resume=resume,
            source_fingerprint=source.fingerprint(),
        )
        events = await on_disk("reading the event log of", lambda: JsonlEventLog(run_dir / EVENTS))
        opened.callback(events.close)
        metrics = await on_disk("reading the metrics of", lambda: JsonlMetrics(run_dir / METRICS))
        opened.callback(metrics.close)
        spans = JsonlSpans(run_dir / SPANS, incarnation=events.incarnation)
        opened.callback(spans.close)
        ports = Ports(
            connect=store.connect,
            source=source,
            worker=worker,
            trainer=trainer,
            weight_sync=weight_sync or SharedWeights(),
            estimator=estimator,
            events=events,
            metrics=metrics,
            spans=spans,
            bundles=bundles,
            group_filter=group_filter,
            sampler=sampler,
            validation=validation,
            fleet=fleet,
            turns=turns,
        )
        return SingleController(config, ready, ports, runner=runner, settings=settings, clock=clock)

    with ExitStack() as opened:
        opened.callback(bundles.close)  # also if it was being opened
        controller = await _in_child(opening)
        await anyio.lowlevel.checkpoint_if_cancelled()  # the calls before were shielded
        yield controller


async def _in_child(work: Callable[[], Awaitable[R]]) -> R:
    """Run `work` in a child task, where no native cancel arrives: shields hold there."""
    results: list[R] = []

    async def child() -> None:
        results.append(await work())

    try:
        async with anyio.create_task_group() as tg:
            tg.start_soon(child, name="open the run")
    except ExceptionGroup as group:
        raise root_cause(group) from group
    if not results:
        raise ended_from_outside("opening the run")
    return results[0]
