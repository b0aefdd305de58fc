"""The train pump: one optimizer step after another, from ready groups to moved weights."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, TypeVar

import anyio.lowlevel

from sc_core.advantage import AdvantageStage
from sc_core.barrier import CheckpointBarrier
from sc_core.budget import MUST_SAVE_BY
from sc_core.calls import at_once, settle
from sc_core.config import ControllerConfig
from sc_core.counts import Tally
from sc_core.errors import Conservation
from sc_core.evaluation import Evaluator
from sc_core.manifest import TrainingInfo
from sc_core.ports import MetricsSink, Trainer
from sc_core.records import Batch, Group
from sc_core.returned import check_metrics
from sc_core.rows import Rows
from sc_core.spans import STEP, TRAIN, TRAINER
from sc_core.state import GROUPS_READY, RunState, Stopwatch
from sc_core.weights import WeightUpdates
from sc_core.window import CheckpointWindow

EndReason = Literal["max_steps", "exhausted", "stopped", "must_save_by"]
R = TypeVar("R")
logger = logging.getLogger(__name__)


class TrainPump:
    """Selects groups, trains on them, moves the weights and saves, until there is no more to do."""

    def __init__(
        self,
        state: RunState,
        config: ControllerConfig,
        trainer: Trainer,
        advantages: AdvantageStage,
        rows: Rows,
        barrier: CheckpointBarrier,
        weights: WeightUpdates,
        window: CheckpointWindow | None,
        metrics: MetricsSink,
        evaluator: Evaluator | None,
    ) -> None:
        self._state = state
        self._spans = state.spans
        self._config = config
        self._trainer = trainer
        self._advantages = advantages
        self._rows = rows
        self._barrier = barrier
        self._weights = weights
        self._window = window
        self._metrics = metrics
        self._evaluator = evaluator
        self._groups_per_chunk = (
            config.async_rl.min_groups_for_streaming_train or config.grpo.num_prompts_per_step
        )
        self._drops_short_step = config.grpo.short_last_step == "drop"
        self._saved: tuple[int, ...] | None = None  #: `_progress` at the last bundle
        self._lasting_step: int | None = None  #: of the last bundle that is not `ft_only`
        self._resumed_metrics: Mapping[str, float | None] = {}
        self._longest_step_s = 0.0  #: without waiting for groups
        self._cpu_s = 0.0  #: that this thread had computed at the end of the last step
        self._evicted = 0
        self._dropped = (0, 0)  #: prompts dropped after failures and shortfalls, at the last step
        self._aborted = state.ledger.counters["aborted"]  #: at the end of the last step
        self.last_metrics: dict[str, Any] = {}
        self.trained_by_staleness = Tally()  #: groups, in this life, by versions behind

    @property
    def reserve_s(self) -> float:
        """Time that must be left for the step under way and a bundle after it."""
        save_s = 0.0 if self._window is None else self._window.longest_save_s
        return self._longest_step_s + save_s

    async def run(self, *, resumed: TrainingInfo | None) -> EndReason:
        """Train until the last step, the end of prompts, or a stop request; then save."""
        ledger = self._state.ledger
        if resumed is not None:
            self._saved = self._progress()
            self._lasting_step = None if resumed.ft_only else resumed.step
            self._resumed_metrics = resumed.metrics
        self._dropped = self._dropped_so_far()
        self._cpu_s = time.thread_time()
        reason: EndReason = "max_steps"
        if await self._evaluate():
            self._write_metrics()
        while ledger.step < self._config.grpo.max_num_steps:
            lap, step, version = Stopwatch(), ledger.step + 1, ledger.weight_version
            with lap("timing/train/total_step_time"):
                with self._spans(TRAIN, f"{STEP} {step}", step=step, weight_version=version):
                    ended = await self._step(lap)
            self._spans.flush()
            if ended is not None:
                reason = ended
                break
            busy = lap.seconds["timing/train/total_step_time"]
            busy -= lap.seconds["timing/train/exposed_generation"]
            if busy > self._longest_step_s:
                self._longest_step_s = busy
                self._state.touch()  # whoever keeps to the time looks at the reserve
            self._report(lap)
            try:
                await self._evaluate()
            finally:
                self._write_metrics()
            if self._save_is_due():
                await self._save()
        if reason == "exhausted" and await self._evaluate(at_end=True):
            self._write_metrics()
        if self._evaluator is not None and self._evaluator.is_interrupted:
            reason = self._stopped()
        stopped = reason in ("stopped", MUST_SAVE_BY)
        if self._state.save_requested or self._is_unsaved(step_alone=not stopped):
            await self._save(lasting=not stopped)
        return reason

    async def _evaluate(self, *, at_end: bool = False) -> bool:
        """Evaluate if that is due, and say whether `last_metrics` has the result."""
        if self._evaluator is None or not self._evaluator.is_due(at_end=at_end):
            return False
        found = await self._evaluator.run(self._save)
        if found:
            ledger = self._state.ledger
            numbers = {k: v for k, v in self._resumed_metrics.items() if v is not None}
            self.last_metrics = {
                **(self.last_metrics or numbers),
                "step": ledger.step,
                "weight_version": ledger.weight_version,
                "incarnation": self._state.events.incarnation,
                **found,
            }
        return bool(found)

    # one step --------------------------------------------------------------------------

    async def _step(self, lap: Stopwatch) -> EndReason | None:
        """Make one step, or say why there is none.

        Until `finish_step` is called, a cancel or an error abandons the open step: its groups
        are committed again, whole. `finish_step` itself is awaited to its end, and its groups
        count as trained in the same synchronous step.
        """
        state, ledger = self._state, self._state.ledger
        step = ledger.step + 1
        groups: list[Group] = []
        opened = finishing = False
        self._evicted = 0
        try:
            while self._missing(groups):
                with lap("timing/train/exposed_generation"), self._spans(TRAIN, "wait for groups"):
                    chunk = await self._next_chunk(step, groups)
                if not chunk:
                    break
                groups.extend(chunk)
                if not opened:
                    opened = True
                    await self._call("begin_step", lambda: self._trainer.begin_step(step))
                await self._train_on(
                    Batch(step=step, weight_version=ledger.weight_version, groups=tuple(chunk)),
                    lap,
                )
            is_short = self._missing(groups) > 0
            if is_short and (state.stop_reason or self._drops_short_step):
                await self._abandon(step, groups, opened)
                groups = []
            if not groups:
                if state.stop_reason:
                    return self._stopped()
                if self._drops_short_step:
                    await self._drop_tail()
                return "exhausted"
            await anyio.lowlevel.checkpoint_if_cancelled()  # the calls before it were shielded
            finishing = True
            with lap("timing/train/policy_training"), self._spans(TRAIN, "finish_step"):
                trained = await self._call(
                    "finish_step", self._trainer.finish_step, then=lambda _: self._trained(groups)
                )
        except BaseException:
            if not finishing:
                await self._abandon(step, groups, opened)
            raise
        self._weights.version_moved()
        await self._clear(groups)
        trained = check_metrics(trained, "trainer.finish_step")
        self.last_metrics = self._metrics_of(groups, trained)
        with lap("timing/train/weight_sync"):
            await self._weights.update()
        return None

    def _missing(self, groups: Sequence[Group]) -> int:
        """How many more the open step takes; a drop may make it fewer at any time."""
        ledger = self._state.ledger
        return ledger.groups_of_target(ledger.weight_version) - len(groups)

    async def _next_chunk(self, step: int, groups: Sequence[Group]) -> list[Group]:
        """Wait for more groups to train on, in ordinal order; none when the step has no more."""
        state, ledger, sampler = self._state, self._state.ledger, self._state.sampler
        while True:
            await self._evict()
            at_most = self._missing(groups)
            if at_most <= 0:  # what it waited for was dropped, and it goes without
                return []
            if state.stop_reason is not None:  # nor may it move targets: no event tells of that
                return []
            at_least = min(self._groups_per_chunk, at_most)
            chosen = list(sampler.select(ledger, at_least, at_most))
            if state.nothing_more and len(chosen) < at_most:  # the tail makes one short step
                if self._drops_short_step and ledger.index.ready_count < at_most:
                    return []
                ledger.retarget()
                chosen = list(sampler.select(ledger, 1, at_most))
            if len(chosen) > at_most:
                raise Conservation(
                    f"sampler {sampler.name} selected {len(chosen)} groups of {at_most} at most"
                )
            if chosen:
                chosen.sort(key=lambda group: group.ordinal)
                state.selected(chosen, step)
                return chosen
            if state.nothing_more:
                return []
            if state.save_requested:
                await self._save()
                continue
            await state.wait_until(lambda _: self._worth_a_look(groups), GROUPS_READY)

    def _worth_a_look(self, groups: Sequence[Group]) -> bool:
        state = self._state
        at_most = self._missing(groups)
        at_least = min(self._groups_per_chunk, at_most)
        return bool(
            at_most <= 0
            or state.stop_reason is not None
            or state.nothing_more
            or state.save_requested
            or (
                state.ledger.index.ready_count >= at_least  # O(1), and false most of the time
                and state.sampler.select(state.ledger, at_least, at_most)
            )
            or state.sampler.evict(state.ledger)
        )

    async def _evict(self) -> None:
        """Give up ready groups that are too old: the index first, then their rows."""
        state = self._state
        if not state.sampler.evict(state.ledger):
            return
        async with self._barrier.mutation("evict"):
            stale = state.sampler.evict(state.ledger)
            rl = self._config.async_rl
            for group in stale:
                age = state.ledger.weight_version - group.start_weight_version
                record = state.ledger.get(group.ordinal)
                requeue = (
                    rl.on_stale_prompt == "requeue"
                    and record is not None
                    and record.stale_requeues < rl.max_stale_requeues
                )
                state.evicted(group, requeue=requeue, reason=f"stale: {age} versions old")
            if state.sampler.stamps_targets:
                state.ledger.retarget(untargeted=True)
            self._evicted += len(stale)
            await self._rows.clear(row for group in stale for row in group.sample_ids)

    async def _drop_tail(self) -> None:
        """Give up the groups that are too few for a step: the prompts have ended."""
        state = self._state
        ready = list(state.ledger.index.ready_in_commit_order())
        reason = f"short last step: {len(ready)} of {self._missing(())} groups"
        logger.warning("%s; grpo.short_last_step is drop", reason)
        async with self._barrier.mutation("drop the short last step"):
            for group in ready:
                state.evicted(group, requeue=False, reason=reason)
            await self._rows.clear(row for group in ready for row in group.sample_ids)

    async def _train_on(self, batch: Batch, lap: Stopwatch) -> None:
        spans = self._spans
        with lap("timing/train/policy_and_reference_logprobs"), spans(TRAIN, "prepare"):
            async with self._barrier.mutation(f"prepare step {batch.step}"):
                await self._call("prepare", lambda: self._trainer.prepare(batch))
        with lap("timing/train/advantage_calculation"), spans(TRAIN, "advantage"):
            await self._advantages.run(batch)
        with lap("timing/train/policy_training"), spans(TRAIN, "microbatches"):
            await self._call("train_microbatches", lambda: self._trainer.train_microbatches(batch))

    async def _abandon(self, step: int, groups: Sequence[Group], opened: bool) -> None:
        try:
            if groups:
                self._state.abandoned(groups, step)
        finally:
            if opened:
                try:
                    await self._call("abandon_step", self._trainer.abandon_step)
                except Exception as exc:  # what led here says more, if it was an error
                    logger.error("step %d could not be abandoned: %s", step, exc)

    def _trained(self, groups: Sequence[Group]) -> None:
        try:
            self._state.trained(groups)
        except BaseException:  # the log's: nobody owns the rows any more
            self._rows.suspects.update(row for group in groups for row in group.sample_ids)
            raise

    async def _clear(self, groups: Sequence[Group]) -> None:
        async with self._barrier.mutation("clear trained rows"):
            with self._spans(TRAIN, "clear"):
                await self._rows.clear(row for group in groups for row in group.sample_ids)

    async def _call(
        self,
        name: str,
        work: Callable[[], Awaitable[R]],
        then: Callable[[R], None] | None = None,
    ) -> R:
        deadline_s = self._config.async_rl.deadlines.trainer_s
        with self._spans(TRAINER, name, step=self._state.ledger.step + 1):
            return await settle(f"trainer.{name}", deadline_s, work, then=then)

    # after a step ----------------------------------------------------------------------

    def _save_is_due(self) -> bool:
        if self._window is None:
            return False
        step, periods = self._state.ledger.step, self._config.checkpointing
        ft_period = periods.ft_save_period or periods.save_period
        return (
            self._state.save_requested or step % periods.save_period == 0 or step % ft_period == 0
        )

    async def _save(self, *, lasting: bool = False) -> None:
        """Save what is there; what was asked for, or is `lasting`, is not `ft_only`."""
        lasting, self._state.save_requested = lasting or self._state.save_requested, False
        if self._window is None:
            return
        step = self._state.ledger.step
        on_period = step % self._config.checkpointing.save_period == 0
        is_last = step == self._config.grpo.max_num_steps
        ft_only = not (lasting or on_period or is_last or step == self._lasting_step)
        numbers = _numbers(self.last_metrics or self._resumed_metrics)
        rules = self._config.checkpointing
        if rules.keep_top_k is not None and not ft_only and rules.ranked_by not in numbers:
            logger.warning(
                "the bundle of step %d has no number %s: with keep_top_k it comes last",
                step,
                rules.ranked_by or "(checkpointing.metric_name is not set)",
            )
        await self._window.save(step, numbers, ft_only=ft_only)
        self._saved = self._progress()
        if not ft_only:
            self._lasting_step = step

    def _progress(self) -> tuple[int, ...]:
        """Steps, the version evaluated last, and what was generated for what is to come."""
        ledger, last = self._state.ledger, self._state.ledger.evaluation
        evaluated = -1 if last is None or last.summary is None else last.weight_version
        results = 0 if last is None else len(last.results)
        generated = ledger.counters["committed"], ledger.siblings_finished, results
        return ledger.step, evaluated, *generated

    def _is_unsaved(self, *, step_alone: bool) -> bool:
        """Whether there were steps, or an evaluation, since the last bundle; any progress at all,
        if not `step_alone`."""
        now = self._progress()
        return self._saved is None or (
            self._saved[:2] != now[:2] if step_alone else self._saved != now
        )

    def _stopped(self) -> EndReason:
        return MUST_SAVE_BY if self._state.stop_reason == MUST_SAVE_BY else "stopped"

    def _metrics_of(self, groups: Sequence[Group], trained: Mapping[str, float]) -> dict[str, Any]:
        ledger = self._state.ledger
        lags = [ledger.weight_version - 1 - group.start_weight_version for group in groups]
        for lag in lags:
            self.trained_by_staleness.shift(lag, 1)
        dropped, shortfall = self._dropped_so_far()
        dropped_now, shortfall_now = dropped - self._dropped[0], shortfall - self._dropped[1]
        self._dropped = dropped, shortfall
        return {
            "step": ledger.step,
            "weight_version": ledger.weight_version,
            "incarnation": self._state.events.incarnation,
            **{f"train/{name}": value for name, value in trained.items()},
            "train/reward": math.fsum(group.reward for group in groups) / len(groups),
            **_components(groups),
            "train/groups": len(groups),
            "train/tokens": sum(group.tokens for group in groups),
            "train/staleness_versions_mean": math.fsum(lags) / len(lags),
            "train/staleness_versions_max": max(lags),
            "train/evicted_stale_prompt_groups": self._evicted,
            "train/dropped_prompt_groups": dropped_now,
            "train/replaced_prompt_groups": dropped_now - shortfall_now,
        }

    def _dropped_so_far(self) -> tuple[int, int]:
        ledger = self._state.ledger
        return ledger.skipped_count, ledger.counters["shortfall"]

    def _report(self, lap: Stopwatch) -> None:
        state, counters = self._state, self._state.ledger.counters
        before, self._aborted = self._aborted, counters["aborted"]
        cpu_s_before, self._cpu_s = self._cpu_s, time.thread_time()
        self.last_metrics |= {
            **lap.seconds,
            "timing/train/controller_cpu_time": self._cpu_s - cpu_s_before,
            "train/aborted_stale_inflight_groups": self._aborted - before,
            "rollout/committed_total": counters["committed"],
            "rollout/dropped_total": counters["dropped"],
            "rollout/skipped_total": state.ledger.skipped_count,
            "rollout/infra_drops_total": counters["infra_drops"],
            "rollout/data_drops_total": counters["data_drops"],
            "rollout/redispatch_total": counters["redispatched"],
            "rollout/inflight": state.ledger.in_flight_count,
            "rollout/places_used": state.places.held,
            "rollout/commit_wait_s": state.commit_wait_s,
        }
        if self._window is not None:
            timings = self._window.timings
            self.last_metrics |= {f"timing/rollout_checkpoint/{k}": v for k, v in timings.items()}

    def _write_metrics(self) -> None:
        at_once("metrics.write", self._metrics.write, self.last_metrics)


def _components(groups: Sequence[Group]) -> dict[str, float]:
    """The mean of each component of the reward, over the groups that have it."""
    found: dict[str, list[float]] = {}
    for group in groups:
        for name, value in group.components.items():
            found.setdefault(name, []).append(value)
    return {
        f"train/reward/{name}": math.fsum(values) / len(values) for name, values in found.items()
    }


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Those that are numbers, also of other libraries; a bundle is ranked by one of them."""
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        if not isinstance(value, str):
            with suppress(TypeError, ValueError, OverflowError):
                numbers[name] = float(value)
    return numbers
