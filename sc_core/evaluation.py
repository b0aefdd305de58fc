"""Evaluation in the loop: how the present weights do on prompts that are never trained on.

The train pump runs one between the weight sync of a step and the next step, and no sync begins
before it has ended: all its samples are of one weight version, and a sample of another counts
as a failure. Training rollouts go on meanwhile. An evaluation takes in-flight slots, one per
prompt, and gets them before training does; it takes no places, and makes no rows and no events.
Its prompts are sampled as those of training are.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup
from msgspec.structs import replace

from sc_core.calls import in_tree, told
from sc_core.config import ControllerConfig
from sc_core.errors import ConfigError, DataFailure, RolloutError, WorkerDied, WrongAnswer
from sc_core.ports import RolloutWorker, ValidationPrompts
from sc_core.records import EvaluatedPrompt, Evaluation, GroupId, Prompt, Sample
from sc_core.returned import check_sample
from sc_core.spans import ENGINES, TRAIN
from sc_core.state import EVALUATED, RunState

logger = logging.getLogger(__name__)


class _Attempt(NamedTuple):
    number: int  #: of the prompt
    infra_failures: int = 0
    data_failures: int = 0


class Evaluator:
    """Evaluates the held-out prompts when that is due.

    Every finished result is in the ledger, and so in every cut: a resumed run evaluates what is
    missing, each prompt once, and never repeats what was finished. Attempts that failed are
    forgotten then.
    """

    def __init__(
        self,
        state: RunState,
        config: ControllerConfig,
        worker: RolloutWorker,
        prompts: ValidationPrompts,
        *,
        max_inflight: int,
    ) -> None:
        """Raises ConfigError if there are no prompts."""
        self._state = state
        self._grpo = config.grpo
        self._failures = config.async_rl.rollout_failure
        self._rollout_s = config.async_rl.deadlines.rollout_s
        self._worker = worker
        self._max_inflight = max_inflight
        self._payloads = list(prompts.prompts())[: config.grpo.max_val_samples]
        if not self._payloads:
            raise ConfigError("an evaluation is asked for, and there are no held-out prompts")
        self._siblings = config.grpo.num_val_generations_per_prompt
        whole = f"{prompts.fingerprint()} {len(self._payloads)} {self._siblings}"
        self._fingerprint = hashlib.sha256(whole.encode()).hexdigest()
        self._waiting: deque[_Attempt] = deque()  #: for a slot
        self._held = 0  #: slots
        self._reason = "it did in an earlier process life"  #: of the last prompt that failed

    def is_due(self, *, at_end: bool = False) -> bool:
        """Whether the present weights want an evaluation, or the rest of one.

        `at_end`: no step follows, whatever `max_num_steps` says.
        """
        grpo, last, step = self._grpo, self._state.ledger.evaluation, self._state.ledger.step
        if last is not None and last.weight_version == self._state.ledger.weight_version:
            return last.summary is None
        if grpo.val_at_end and (at_end or step >= grpo.max_num_steps):
            return True
        if step == 0:
            return grpo.val_at_start
        return grpo.val_period > 0 and step % grpo.val_period == 0

    @property
    def is_interrupted(self) -> bool:
        """Whether one has begun and is not finished."""
        evaluation = self._state.ledger.evaluation
        return evaluation is not None and evaluation.summary is None

    async def run(self, save: Callable[[], Awaitable[None]]) -> Mapping[str, float]:
        """Evaluate the prompts without a result; nothing is returned if a stop request ends it.

        `save` is called when somebody asks for a bundle; requests go on meanwhile. A cancel ends
        all requests, and keeps what is finished in the ledger, as a stop request does.

        Prompts that used up their attempts are counted as `val/failed`, and the other metrics are
        those of the rest. If there is no rest, `val/reward` is missing, and the run goes on: what
        is wrong with the held-out prompts alone must not cost it a step, and what is wrong with
        the engines ends it by the rules of training.

        Raises:
            WorkerDied: nobody is left to generate.
            WrongAnswer: the worker returned no sample.
        """
        ledger = self._state.ledger
        with self._state.spans(
            TRAIN, "evaluation", step=ledger.step, weight_version=ledger.weight_version
        ):
            return await self._run(save)

    async def _run(self, save: Callable[[], Awaitable[None]]) -> Mapping[str, float]:
        state, began = self._state, anyio.current_time()
        evaluation = self._begun()
        finished = {result.number for result in evaluation.results}
        missing = [n for n in range(len(self._payloads)) if n not in finished]
        self._waiting.extend(map(_Attempt, missing))
        state.evaluating = len(missing)
        try:
            async with anyio.create_task_group() as tg:
                tg.start_soon(in_tree, self._start_attempts, tg, name="evaluation")
                while self._missing and state.stop_reason is None:
                    if state.save_requested:
                        await save()
                    await state.wait_until(lambda _: self._worth_a_look(), EVALUATED)
                tg.cancel_scope.cancel()
        finally:
            self._waiting.clear()
            state.evaluating = self._held = 0
            state.touch()  # the slots are free
        if self._missing:
            return {}
        evaluation = self._now()
        summary = _summary(evaluation)
        if not summary["val/prompts"]:
            logger.error(
                "evaluation after step %d: none of %d prompts could be evaluated; the last failed"
                " as %s",
                state.ledger.step,
                evaluation.prompts,
                self._reason,
            )
        state.evaluated(replace(evaluation, results=(), summary=summary))
        return {**summary, "timing/val/total": anyio.current_time() - began}

    def _begun(self) -> Evaluation:
        """The evaluation of the present weights, new or as far as it is."""
        ledger = self._state.ledger
        evaluation = ledger.evaluation
        if (
            evaluation is None
            or evaluation.weight_version != ledger.weight_version
            or evaluation.fingerprint != self._fingerprint
        ):
            evaluation = Evaluation(
                weight_version=ledger.weight_version,
                fingerprint=self._fingerprint,
                prompts=len(self._payloads),
            )
            self._state.evaluated(evaluation)
        return evaluation

    def _now(self) -> Evaluation:
        evaluation = self._state.ledger.evaluation
        assert evaluation is not None
        return evaluation

    @property
    def _missing(self) -> int:
        return len(self._payloads) - len(self._now().results)

    # slots -----------------------------------------------------------------------------

    def _worth_a_look(self) -> bool:
        state = self._state
        return not self._missing or state.stop_reason is not None or state.save_requested

    async def _start_attempts(self, tg: TaskGroup) -> None:
        """Start one in every slot that becomes free, for ever."""
        while True:
            await self._state.wait_until(
                lambda _: self._may_start(), "a slot for a held-out prompt"
            )
            while self._may_start():
                self._held += 1
                attempt = self._waiting.popleft()
                tg.start_soon(in_tree, self._evaluate, attempt, name="held-out prompt")

    def _may_start(self) -> bool:
        in_flight = self._state.ledger.in_flight_count
        return bool(self._waiting) and in_flight + self._held < self._max_inflight

    def _release(self) -> None:
        self._held -= 1
        self._state.evaluating -= 1

    # one attempt -----------------------------------------------------------------------

    async def _evaluate(self, attempt: _Attempt) -> None:
        """Keep the result, or have the prompt wait for another attempt, if it has one left."""
        number, infra, data = attempt
        group = GroupId(f"val{self._state.ledger.step}.{number}.{infra + data}")
        prompt = Prompt(ordinal=-1 - number, group_id=group, payload=self._payloads[number])
        try:
            samples = await self._generate(prompt)
        except (WorkerDied, WrongAnswer):  # nobody is left to try it again, or it can't heal
            raise
        except Exception as exc:
            await anyio.lowlevel.checkpoint_if_cancelled()  # its answer to a cancel is none
            await self._failed(attempt, group, exc)
            return
        self._release()
        rewards = tuple(sample.reward for sample in samples)
        tokens = sum(sample.tokens for sample in samples)
        self._keep(EvaluatedPrompt(number=number, rewards=rewards, tokens=tokens))

    async def _failed(self, attempt: _Attempt, group: GroupId, error: Exception) -> None:
        self._reason = told(error)
        logger.warning("group %s of an evaluation failed: %s", group, self._reason)
        number, infra, data = attempt
        if isinstance(error, DataFailure):
            failed, allowed = data, self._failures.max_data_attempts_per_prompt
            data += 1
        else:
            failed, allowed = infra, self._failures.max_infra_attempts_per_prompt
            infra += 1
        self._release()
        if failed + 1 >= allowed:
            self._keep(EvaluatedPrompt(number=number))
            return
        self._state.touch()  # while it backs off, its slot is for others
        backoff_s = self._failures.backoff_base_s * 2.0 ** min(failed, 100)
        backoff_s = min(backoff_s, self._failures.max_backoff_s)
        await anyio.sleep(backoff_s)
        self._waiting.append(_Attempt(number, infra, data))
        self._state.evaluating += 1
        self._state.touch()

    def _keep(self, result: EvaluatedPrompt) -> None:
        evaluation = self._now()
        self._state.evaluated(replace(evaluation, results=(*evaluation.results, result)))

    async def _generate(self, prompt: Prompt) -> list[Sample]:
        """All siblings, side by side; the first failure of one is raised, and ends the others."""
        samples: dict[int, Sample] = {}
        failures: list[Exception] = []

        async def one(sibling: int) -> None:
            try:
                samples[sibling] = await self._rollout(prompt, sibling)
            except Exception as exc:
                failures.append(exc)
                tg.cancel_scope.cancel()

        async with anyio.create_task_group() as tg:
            for sibling in range(self._siblings):
                tg.start_soon(one, sibling, name="sibling")
        if failures:
            final = (one for one in failures if isinstance(one, WorkerDied | WrongAnswer))
            raise next(final, failures[0])
        if len(samples) < self._siblings:
            raise RolloutError(f"group {prompt.group_id}: siblings were cancelled outside this run")
        return [samples[sibling] for sibling in range(self._siblings)]

    async def _rollout(self, prompt: Prompt, sibling: int) -> Sample:
        version, spans = self._state.ledger.weight_version, self._state.spans
        began, engine = spans.now(), None
        try:
            with anyio.move_on_after(self._rollout_s) as in_time:
                answer = await in_tree(self._worker.rollout, prompt, sibling, version)
                if not isinstance(answer, Sample):
                    await anyio.lowlevel.checkpoint_if_cancelled()  # that was it, not an answer
                alone = range(version, version + 1)
                sample = check_sample(answer, prompt.group_id, sibling, weight_versions=alone)
                engine = sample.engine
                if not in_time.cancel_called:
                    return sample
        finally:
            spans.add(
                ENGINES,
                f"{prompt.group_id}_g{sibling}",
                began,
                group_id=prompt.group_id,
                sibling=sibling,
                engine=engine,
                weight_version=version,
                note="evaluation",
            )
        raise RolloutError(
            f"sibling {sibling} of group {prompt.group_id} took longer than {self._rollout_s:g} s"
        )


def _summary(evaluation: Evaluation) -> dict[str, float]:
    """`VAL_METRICS`, whatever the order of arrival. All are floats, as they are read back."""
    results = sorted(evaluation.results, key=lambda result: result.number)
    means = [math.fsum(one.rewards) / len(one.rewards) for one in results if one.rewards]
    summary = {
        "val/prompts": float(len(means)),
        "val/failed": float(len(results) - len(means)),
        "val/tokens": float(sum(one.tokens for one in results)),
    }
    if means:
        mean = math.fsum(means) / len(means)
        squares = math.fsum((one - mean) ** 2 for one in means)
        summary |= {"val/reward": mean, "val/reward_std": math.sqrt(squares / len(means))}
    return summary
