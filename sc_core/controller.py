"""`SingleController`: one run, from a ready store to its result, as one tree of tasks."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import anyio
import msgspec

from sc_core.advantage import AdvantageStage
from sc_core.attempt import GroupBuilder
from sc_core.barrier import BarrierStatistics, CheckpointBarrier
from sc_core.budget import MUST_SAVE_BY, stop_in_time
from sc_core.bundle import BundleStore
from sc_core.calls import at_once, ended_from_outside, in_thread, in_tree, settle, told
from sc_core.config import ControllerConfig, check_config
from sc_core.decisions import DecisionSettings
from sc_core.errors import (
    ConfigError,
    RestoreOrderError,
    ScError,
    StallError,
    WrongAnswer,
    root_cause,
)
from sc_core.estimates import check_scope
from sc_core.evaluation import Evaluator
from sc_core.filters import ZeroVarianceFilter
from sc_core.finaliser import BundleFinaliser
from sc_core.ledger import Ledger
from sc_core.places import Places
from sc_core.ports import (
    AdvantageEstimator,
    DataPlane,
    EngineFleet,
    EngineState,
    EventSink,
    GroupFilter,
    MetricsSink,
    PromptSource,
    RolloutWorker,
    Runner,
    Sampler,
    SpanSink,
    Trainer,
    ValidationPrompts,
    WeightSync,
)
from sc_core.records import Cut, LedgerRecord, SampleId
from sc_core.report import Reporter, StallReport
from sc_core.restore import ReadyStore, keeps_siblings
from sc_core.returned import check_rows
from sc_core.rollout import RolloutPump
from sc_core.rows import Rows
from sc_core.samplers import build_sampler, check_capacity
from sc_core.spans import Spans
from sc_core.stale import StaleAttempts
from sc_core.state import RunState
from sc_core.train import EndReason, TrainPump
from sc_core.verify import VerifiedBundle
from sc_core.watchdog import Watchdog
from sc_core.weights import TurnGate, WeightUpdates
from sc_core.window import CheckpointWindow, check_inventory

logger = logging.getLogger(__name__)


class Ports(msgspec.Struct, frozen=True, kw_only=True):
    """The world around a controller."""

    connect: Callable[[ReadyStore], Awaitable[DataPlane]]  #: opens the data plane of that store
    source: PromptSource  #: prompts, and the place in them
    worker: RolloutWorker  #: generates
    trainer: Trainer  #: weights and optimizer
    weight_sync: WeightSync  #: moves weights to who generates
    estimator: AdvantageEstimator  #: makes advantages of rewards
    events: EventSink  #: remembers what happened, for a resume and an audit
    metrics: MetricsSink  #: one object per finished step
    bundles: BundleStore | None = None  #: None, or `checkpointing.enabled: false`: no checkpoints
    group_filter: GroupFilter | None = None  #: None: every finished group may train
    sampler: Sampler | None = None  #: None: the one that the settings name
    validation: ValidationPrompts | None = None  #: needed for `grpo.val_period` and its like
    fleet: EngineFleet | None = None  #: None: the run ends with the first engine that fails
    spans: SpanSink | None = None  #: what took how long, for people; None: nobody wants to know
    turns: TurnGate | None = None  #: for a worker that makes several requests for a sibling


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended that did not fail."""

    reason: EndReason  #: `max_steps`, `exhausted`, `stopped`, or that its time was up
    stop_reason: str | None = None  #: who asked for it, where it was stopped
    step: int  #: finished training steps, over all incarnations
    weight_version: int  #: weight syncs so far, over all incarnations
    counters: Mapping[str, int]  #: totals over the effective history


class ControllerStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A moment's view of a run."""

    step: int  #: finished training steps, over all incarnations
    weight_version: int  #: that groups are stamped with now
    waiting: int  #: prompts not dispatched yet, or waiting for a retry
    in_flight: int  #: prompts being generated
    committed: int  #: groups that are ready to train on
    selected: int  #: groups of the open step
    places_held: int  #: units of buffer capacity in use
    places_capacity: int  #: all of them
    gate_closed_for: str | None  #: what nothing is dispatched for: a weight sync; None: open
    stop_reason: str | None  #: of a stop that was asked for
    barrier: BarrierStatistics  #: who holds it, who waits
    engines: tuple[str, ...]  #: that serve: they confirmed the last sync, or joined since
    engines_out: Mapping[str, str]  #: put out of service since they last confirmed, and why
    last_metrics: Mapping[str, Any]  #: of the last finished step
    last_evaluation: Mapping[str, float] = {}  #: metrics of the last finished one
    evaluating: int = 0  #: in-flight slots that an evaluation holds or waits for
    quiet_s: float = 0.0  #: since the last step, evaluation, weight sync or save
    engines_away: Mapping[str, str] = {}  #: what it is and why, as `restarting: why`
    barrier_entered: int = 0  #: barrier sections in this process life
    counters: Mapping[str, int] = {}  #: totals over the effective history, as in `RunResult`
    trained_by_staleness: Mapping[int, int] = {}
    """Groups trained in this process life, by how many versions they were behind."""


class SingleController:
    """Decides which prompts go out, which groups train, when weights move, what a bundle holds.

    Build it, then `await run()` once. `stop`, `request_checkpoint`, `engine_is`, `fail`,
    `statistics`, `report` and `audit` may be called from the same event loop while it runs.
    """

    def __init__(
        self,
        config: ControllerConfig,
        ready: ReadyStore,
        ports: Ports,
        *,
        runner: Runner = in_thread,
        settings: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`settings` is what a bundle's `config.yaml` shows; by default, `config` itself.

        `clock` dates barrier sections in reports; on a virtual clock, `anyio.current_time`.

        Raises:
            ConfigError: these are no settings; they can never fill a step, or stream it in chunks
                that are too small for the estimator, and the message has the numbers; or they ask
                for an evaluation, and `ports` have no prompts for it.
        """
        check_config(config)
        self._config = config
        self._ports = ports
        self._ready = ready
        self._runner = runner
        self._settings: dict[str, Any] = dict(settings or msgspec.to_builtins(config))
        self._sampler = ports.sampler or build_sampler(
            config.async_rl.sampler, config.grpo.num_prompts_per_step
        )
        capacity, self._max_inflight = check_capacity(config, self._sampler)
        check_scope(config, ports.estimator)
        bundle = ready.bundle
        self._bundle = bundle
        self._state = RunState(
            self._ledger_from(bundle),
            Places(capacity),
            self._sampler,
            ports.events,
            spans=Spans(ports.spans),
        )
        for record in self._state.ledger.records():
            if record.admitted:
                self._state.places.restore(record.ordinal)
        self._evaluator = self._build_evaluator()
        self._barrier = CheckpointBarrier(clock=clock)
        self._reporter = Reporter(self._state, self._barrier, config)
        self._watchdog = Watchdog(
            self._state,
            self._reporter,
            stall_timeout_s=config.async_rl.stall_watchdog.stall_timeout_s,
            stop_grace_s=config.async_rl.stop_grace_s,
        )
        self._pumping: anyio.CancelScope | None = None  #: around all that a hasty stop ends
        self._pump: TrainPump | None = None
        self._rows: Rows | None = None
        self._failure: ScError | None = None  #: that somebody beside the run has found
        self._failed = anyio.Event()
        self._begun = False  #: the log says that this incarnation started or resumed

    async def run(self) -> RunResult:
        """Train to the last step, the end of prompts, or a stop request.

        Ends with every task gone, every place and barrier section given back, and the last
        bundle published.

        Raises:
            ScError: the root cause, if anything failed; other tasks' errors are logged.
        """
        if self._pump is not None:
            raise RestoreOrderError("this controller has run; build another one")
        results: list[RunResult] = []

        until_the_end = anyio.CancelScope(shield=True)

        async def stay() -> None:
            with until_the_end:
                longest_s = max(msgspec.structs.astuple(self._config.async_rl.deadlines))
                await self._watchdog.see_end_through(longest_s)

        async def tree() -> None:
            self._reporter.root = anyio.get_current_task().id
            async with anyio.create_task_group() as tg:
                tg.start_soon(stay, name="end in time")
                try:
                    results.append(await in_tree(self._run))
                finally:
                    until_the_end.cancel()

        try:
            # A native asyncio cancel reaches the caller's task, which waits here; the tree is in
            # a child, so it is cancelled through its scope, and its shields hold.
            async with anyio.create_task_group() as tg:
                tg.start_soon(tree, name="train pump")
            if not results:
                raise ended_from_outside("the run")
            return results[0]
        except BaseException as error:
            cause = root_cause(error)
            if isinstance(cause, Exception):
                reason = told(cause)
                if isinstance(cause, StallError):  # the report is in the log already
                    reason = f"{type(cause).__name__}: {cause.cause}"
                logger.error("the run failed: %s", reason)
                if self._begun and self._state.log_failure is None:
                    with suppress(Exception):  # the error under way says more than this one
                        self._ports.events.append("stopped", reason=f"failed: {reason}")
            if cause is error:
                raise
            raise cause from error

    def stop(self, reason: str = "stopped", *, checkpoint: bool = True) -> None:
        """Ask the run to end; `run` returns when it has, within `async_rl.stop_grace_s`.

        A step that is being finished is finished, one that still waits for groups is abandoned,
        and a last bundle is saved. Without `checkpoint` the open step is abandoned at once and
        nothing is saved; a bundle that is being published is.

        May be repeated: the first reason counts, and its time runs on. A repetition without
        `checkpoint` gives up the save of an earlier stop, unless it is being published already;
        one with it brings none back.
        """
        self._state.request_stop(reason, save=checkpoint)
        if not checkpoint and self._pumping is not None:
            self._pumping.cancel()

    async def stop_requested(self) -> str:
        """Wait until somebody, or the run's time budget, asks it to end; returns the reason.

        For whoever waits for something beside the run, such as an engine: it is not needed any
        more.
        """
        state = self._state
        await state.wait_until(lambda state: state.stop_reason is not None, "a stop request")
        assert state.stop_reason is not None
        return state.stop_reason

    def fail(self, error: ScError) -> None:
        """End the run with this error, as if one of its own tasks had raised it."""
        self._failure = self._failure or error
        self._failed.set()

    def engine_is(
        self, engine: str, now: EngineState, reason: str = "", *, confirmed: int | None = None
    ) -> None:
        """Hear of an engine what happens to it between syncs: into statistics and event log.

        `confirmed` is the weight version of one that joins or comes back; say so before it gets
        its first request. Whoever watches over engines calls this, with `serving` for such a one,
        unless nobody had a version to give yet.
        """
        self._state.engine_is(engine, now, reason, confirmed=confirmed, log=self._begun)

    def report(self) -> StallReport:
        """What the run waits for now, and the likeliest reason if it does not go on.

        Looks at the stack of every task: for people and for stalls, not for every second. Call it
        in a task: a callback of the loop, such as a signal handler, may see none.
        """
        return self._watchdog.report()

    def request_checkpoint(self) -> None:
        """Ask for a bundle as soon as the train pump can, also in the middle of a step."""
        self._state.request_save()

    def audit(self) -> None:
        """Check the conservation law now.

        Raises:
            Conservation: it is broken.
        """
        self._state.audit()

    def ledger_records(self) -> tuple[LedgerRecord, ...]:
        """The live prompts, by ordinal."""
        return self._state.ledger.records()

    def rows(self) -> frozenset[SampleId]:
        """The rows of the data plane that groups, and finished siblings, own at this instant."""
        return frozenset(self._state.ledger.rows())

    def suspects(self) -> frozenset[SampleId]:
        """Rows that may be there and must not: the next clear, or a restore, takes them away."""
        return frozenset() if self._rows is None else frozenset(self._rows.suspects)

    def statistics(self) -> ControllerStatistics:
        """What the run is doing at this instant; cheap enough to ask every second."""
        state, ledger = self._state, self._state.ledger
        return ControllerStatistics(
            step=ledger.step,
            weight_version=ledger.weight_version,
            waiting=ledger.waiting_count,
            in_flight=ledger.in_flight_count,
            committed=ledger.index.ready_count,
            selected=ledger.index.selected_count,
            places_held=state.places.held,
            places_capacity=state.places.capacity,
            gate_closed_for=state.gate_closed_for,
            stop_reason=state.stop_reason,
            barrier=self._barrier.statistics(),
            engines=state.engines,
            engines_away=dict(state.engines_away),
            engines_out=dict(state.engines_out),
            last_metrics={} if self._pump is None else self._pump.last_metrics,
            last_evaluation=(ledger.evaluation and ledger.evaluation.summary) or {},
            evaluating=state.evaluating,
            quiet_s=self._watchdog.quiet_s,
            barrier_entered=self._barrier.entered,
            counters=dict(ledger.counters),
            trained_by_staleness={}
            if self._pump is None
            else dict(self._pump.trained_by_staleness),
        )

    # the task tree ---------------------------------------------------------------------

    async def _run(self) -> RunResult:
        deadline_s = self._config.async_rl.deadlines.data_plane_s
        self._started_at = anyio.current_time()
        self._ready.use()
        plane = await settle("connect", deadline_s, lambda: self._ports.connect(self._ready))
        if plane is None:
            raise WrongAnswer("connect returned None, not a DataPlane")
        try:
            result = await self._run_on(plane)
        except BaseException:
            try:
                await settle("data_plane.aclose", deadline_s, plane.aclose)
            except Exception as exc:  # the error under way says more than this one
                logger.error("the data plane's client could not be closed: %s", exc)
            raise
        await settle("data_plane.aclose", deadline_s, plane.aclose)
        return result

    async def _run_on(self, plane: DataPlane) -> RunResult:
        config, ports, state = self._config, self._ports, self._state
        deadlines = config.async_rl.deadlines
        suspects = self._bundle.cut.suspects if self._bundle is not None else ()
        self._rows = rows = Rows(plane, self._barrier, deadlines, suspects)
        keep = ports.group_filter
        if keep is None and config.grpo.use_dynamic_sampling:
            keep = ZeroVarianceFilter()
        builder = GroupBuilder(state, config, ports.worker, rows, self._barrier, keep)
        stale = None
        if config.async_rl.weight_sync_mode == "abort_stale":
            stale = StaleAttempts(state, config.async_rl, builder, rows, self._barrier)
        weights = WeightUpdates(
            state,
            ports.weight_sync,
            config.async_rl,
            fleet=ports.fleet,
            turns=ports.turns,
            abort_stale=None if stale is None else stale.abort,
        )
        window = finaliser = None
        if ports.bundles is not None and config.checkpointing.enabled:
            if self._bundle is not None:
                ports.bundles.expected_bytes = self._bundle.manifest.total_bytes
            finaliser = BundleFinaliser(
                state,
                ports.bundles,
                ports.trainer,
                ports.events,
                config,
                self._settings,
                self._runner,
                frozenset() if self._bundle is None else frozenset({self._bundle.step}),
            )
            window = CheckpointWindow(
                self._barrier,
                plane,
                ports.trainer,
                ports.bundles,
                finaliser,
                deadlines,
                self._runner,
                lambda: self._take_cut(rows),
                state.spans,
            )
        advantages = AdvantageStage(
            rows,
            self._barrier,
            ports.estimator,
            self._runner,
            deadline_s=deadlines.estimator_s,
            spans=state.spans,
        )
        rollouts = RolloutPump(
            state,
            config,
            ports.source,
            builder,
            max_inflight=self._max_inflight,
            build=None if stale is None else stale.build,
        )
        self._pump = TrainPump(
            state,
            config,
            ports.trainer,
            advantages,
            rows,
            self._barrier,
            weights,
            window,
            ports.metrics,
            self._evaluator,
        )
        await self._settle_in(plane, rows)
        reason: EndReason | None = None
        async with anyio.create_task_group() as tg:
            tg.start_soon(in_tree, self._watchdog.watch, name="watchdog")
            tg.start_soon(in_tree, self._until_failed, name="failure")
            budget_s, pump = config.checkpointing.must_save_by_s, self._pump

            def reserve_s() -> float:
                return pump.reserve_s

            ending = self._watchdog.see_stop_through
            tg.start_soon(in_tree, ending, reserve_s, name="stop in time")
            if budget_s is not None:
                deadline = self._started_at + budget_s
                tg.start_soon(in_tree, stop_in_time, state, deadline, reserve_s, name="time budget")
            if finaliser is not None:
                tg.start_soon(in_tree, finaliser.run, name="finaliser")
            ended: EndReason = "stopped"
            with anyio.CancelScope() as self._pumping:
                if not state.save_on_stop:
                    self._pumping.cancel()
                # every engine confirms the version before a prompt goes out
                await in_tree(weights.update)
                tg.start_soon(in_tree, rollouts.run, name="rollout pump")
                resumed = None if self._bundle is None else self._bundle.info
                ended = await in_tree(partial(pump.run, resumed=resumed))
            if finaliser is not None:
                await finaliser.settled()
            reason = ended
            tg.cancel_scope.cancel()  # nothing left to generate for
        if reason is None:
            raise ended_from_outside("a task of the run")
        stopped_by = state.stop_reason if reason in ("stopped", MUST_SAVE_BY) else None
        said = reason if stopped_by in (None, reason) else f"{reason}: {stopped_by}"
        ledger = state.ledger
        state.record("stopped", reason=said, step=ledger.step)
        await settle("event log sync", deadlines.disk_s, lambda: self._runner(ports.events.sync))
        return RunResult(
            reason=reason,
            stop_reason=stopped_by,
            step=ledger.step,
            weight_version=ledger.weight_version,
            counters=dict(ledger.counters),
        )

    async def _until_failed(self) -> None:
        await self._failed.wait()
        assert self._failure is not None
        raise self._failure

    # from a bundle ---------------------------------------------------------------------

    def _build_evaluator(self) -> Evaluator | None:
        ports = self._ports
        if not self._config.grpo.evaluates:
            return None
        if ports.validation is None:
            raise ConfigError(
                "grpo.val_period, val_at_start or val_at_end asks for an evaluation, and there are"
                " no prompts for it: give the controller a port `validation`"
            )
        return Evaluator(
            self._state,
            self._config,
            ports.worker,
            ports.validation,
            max_inflight=self._max_inflight,
        )

    def _ledger_from(self, bundle: VerifiedBundle | None) -> Ledger:
        grpo = self._config.grpo
        if bundle is None:
            return Ledger(prompts_per_step=grpo.num_prompts_per_step)
        cut = bundle.cut
        if cut.sampler == self._sampler.name:
            self._sampler.restore(cut.sampler_state)
        return Ledger.restored(
            cut,
            prompts_per_step=grpo.num_prompts_per_step,
            group_size=grpo.num_generations_per_prompt,
        )

    async def _settle_in(self, plane: DataPlane, rows: Rows) -> None:
        """Bring store, trainer and source to the bundle's instant, before any pump starts."""
        config, ports, state, bundle = self._config, self._ports, self._state, self._bundle
        deadlines, ledger = config.async_rl.deadlines, state.ledger
        settings = msgspec.to_builtins(
            DecisionSettings.of(config, state.places.capacity, ports.sampler)
        )
        call = "data_plane.list_sample_ids"
        listed = check_rows(await settle(call, deadlines.data_plane_s, plane.list_sample_ids), call)
        if bundle is None:
            if listed:
                raise RestoreOrderError(
                    f"a fresh start found {len(listed)} rows in the data plane: the store was"
                    " touched after it was proven untouched"
                )
            state.record("run_started", step=0, weight_version=0, settings=settings)
            self._begun = True
            return
        cut = bundle.cut
        await settle(
            "the check of the rows",
            deadlines.data_plane_s,
            lambda: self._runner(check_inventory, cut, listed),
        )
        async with self._barrier.mutation("restore"):
            if not config.checkpointing.load_replay_buffer:
                for group in ledger.index.groups():
                    rows.suspects.update(group.sample_ids)
            if not keeps_siblings(config):
                for record in ledger.records():
                    if record.finished:
                        rows.suspects.update(ledger.forget_siblings(record.ordinal))
            await rows.clear(())
        state.record(
            "resumed",
            parent=cut.incarnation,
            parent_seq=cut.event_seq,
            digest=bundle.digest,
            step=cut.step,
            weight_version=cut.weight_version,
            settings=settings,
        )
        self._begun = True
        state.restored(cut, load_replay_buffer=config.checkpointing.load_replay_buffer)
        await settle(
            "trainer.load", deadlines.trainer_s, lambda: ports.trainer.load(bundle.policy_dir)
        )
        await settle("source.seek", deadlines.source_s, lambda: ports.source.seek(cut.position))
        ledger.exhausted = False  # it says so again, unless it was given more epochs meanwhile

    def _take_cut(self, rows: Rows) -> tuple[Cut, tuple[int, int]]:
        ports, ledger = self._ports, self._state.ledger
        self._state.require_log()
        cut = ledger.cut(
            incarnation=ports.events.incarnation,
            event_seq=ports.events.seq,
            group_size=self._config.grpo.num_generations_per_prompt,
            sampler=self._sampler.name,
            sampler_state=self._sampler.state(),
            source_fingerprint=at_once("source.fingerprint", ports.source.fingerprint),
            suspects=sorted(rows.suspects),
        )
        return cut, (ledger.index.digest, ledger.digest)
