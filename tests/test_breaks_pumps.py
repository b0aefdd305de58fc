"""What went wrong when settings, faults, stops and crashes of whole runs met at random."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from test_controller import SAMPLERS, fates, settings, uneven
from virtual_clock import VirtualClockLoop

from sc_core.audit import audit
from sc_core.config import ControllerConfig, decode
from sc_core.errors import (
    CallFailed,
    ConfigError,
    Conservation,
    EnginesFailed,
    SaveError,
    WeightSyncError,
    WrongAnswer,
)
from sc_core.events import Event, JsonlEventLog, read_events
from sc_core.ports import EventKind, SamplerView
from sc_core.records import Cut, LedgerRecord, Prompt, PulledPrompt
from sc_core.replay import replay
from sc_core.report import StallReport
from sc_core.samplers import InOrder
from sc_core.testing import ListPrompts, MemoryRun
from sc_core.verify import candidates, verify

pytestmark = pytest.mark.anyio
on_both = pytest.mark.parametrize("anyio_backend", ["asyncio", "trio-0"], indirect=True)


def cuts(run: MemoryRun) -> list[tuple[str, Cut]]:
    return [(path.name, verify(path, run.disk).cut) for path in candidates(run.directory, run.disk)]


def in_order_again(run: MemoryRun) -> None:
    """Law and decisions, from the log alone."""
    report = audit(run.log.events, cuts(run))
    assert report.ok, report
    again = replay(run.log.events, cuts(run))
    assert again.ok, again.difference


@pytest.mark.parametrize("sampler", SAMPLERS)
@on_both
async def test_the_replay_of_a_run_that_was_given_more_epochs_goes_on(sampler: str) -> None:
    run = MemoryRun(settings(sampler, steps=100), range(10), latency=uneven)
    result = await run.run()
    assert result is not None and (result.reason, result.step) == ("exhausted", 3)
    run.epochs = 2
    result = await run.run()
    assert result is not None and result.reason == "exhausted"
    assert fates(run)["trained"] + fates(run)["dropped"] == 20
    in_order_again(run)


@on_both
async def test_a_stop_at_the_end_of_prompts_moves_no_target() -> None:
    """The log would not tell of it, and the next life admits by targets."""

    async def script(prompt: Prompt, sibling: int, version: int) -> None:
        if run.lives == 1 and prompt.ordinal == 4:
            await anyio.sleep(50)
            raise ConnectionError("engine went away")

    failure = {"rollout_failure": {"max_infra_attempts_per_prompt": 1}}
    config = settings("in_order-2", steps=100, async_rl=failure)
    run = MemoryRun(config, range(10), script=script)

    def stop(event: Event) -> bool:
        if run.lives == 1 and event.event == "dropped":
            assert run.controller is not None
            run.controller.stop()  # with target 1 a group short, and two groups of target 2
        return False

    result = await run.run(crash_when=stop)
    assert result is not None and (result.reason, result.step) == ("stopped", 1)
    assert run.controller is not None
    targets = [record.target_step for record in run.controller.ledger_records()]
    assert targets == [1, 1, 1, 2, 2]
    run.epochs = 2
    await run.run()
    again = replay(run.log.events)
    assert again.ok, again.difference


@on_both
async def test_a_run_that_resumes_past_its_last_step_is_evaluated_at_its_end_all_the_same() -> None:
    grpo = {"val_at_end": True}
    run = MemoryRun(settings(steps=6), range(100), held_out=["a", "b"])
    await run.run()
    run.config = settings(steps=4, grpo=grpo)
    result = await run.run()
    assert result is not None and (result.reason, result.step) == ("max_steps", 6)
    assert [line["val/prompts"] for line in run.metrics.steps] == [2.0]
    await run.run()
    assert run.metrics.steps == []  # it is in the bundle


class Rough(InOrder):
    """Says that a step is what it is not."""

    def __init__(self, step: Any) -> None:
        super().__init__(0)
        self._step = step

    def step_of(self, view: SamplerView, record: LedgerRecord) -> int | None:
        step: int = self._step
        return step


@pytest.mark.parametrize("step", [2.5, "2", True], ids=repr)
@on_both
async def test_a_sampler_that_shortens_what_is_no_step_ends_the_run_before_the_log_has_it(
    step: Any,
) -> None:
    async def script(prompt: Prompt, sibling: int, version: int) -> None:
        if prompt.ordinal == 5:
            raise ConnectionError("engine went away")

    failure = {"max_infra_attempts_per_prompt": 1, "on_dropped_prompt": "shortfall"}
    config = settings(async_rl={"rollout_failure": failure})
    run = MemoryRun(config, range(100), script=script, sampler=Rough(step))
    with pytest.raises(Conservation, match="is no weight version"):
        await run.run()
    assert all(event.event != "dropped" for event in run.log.events)
    assert audit(run.log.events).ok


HALF = b"disk \xff".decode(errors="surrogateescape")  #: as a file name may be in an error


@on_both
async def test_a_message_that_no_file_can_hold_costs_an_attempt_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL")  # the traceback has it raw, which xdist can't send

    async def script(prompt: Prompt, sibling: int, version: int) -> None:
        if prompt.group_id in ("2.0", "3.0", "3.1", "3.2"):
            raise OSError(HALF)

    config = settings(async_rl={"weight_sync_attempts": 1})
    run = MemoryRun(config, range(100), script=script, engines=2, replaceable=True)
    log = JsonlEventLog(tmp_path / "events.jsonl")
    run.log = log  # type: ignore[assignment]

    async def transfer(version: int) -> Any:
        if version == 2 and len(run.engines.serves) == 2:
            raise EnginesFailed("transfer", {"engine1": HALF})
        return await real(version)

    real = run.engines.transfer
    run.engines.transfer = transfer  # type: ignore[method-assign]
    result = await run.run()
    log.close()
    assert result is not None and result.step == 12
    events = [event for event in read_events(tmp_path / "events.jsonl") if event.reason]
    assert [event.reason.endswith("disk \\udcff") for event in events] == [True] * 6 + [False]
    assert [event.event for event in events][4:] == ["engine", "weight_sync", "stopped"]


@pytest.mark.parametrize("answer", [{0: 1}, {"engine0": 1, None: 1}], ids=repr)
@on_both
async def test_an_engine_without_a_name_is_refused_before_the_log_has_it(answer: Any) -> None:
    run = MemoryRun(settings(), range(100))

    async def transfer(version: int) -> Any:
        return dict.fromkeys(answer, version)

    run.engines.transfer = transfer  # type: ignore[method-assign]
    with pytest.raises(WeightSyncError, match=r"names an engine (0|None), no string"):
        await run.run()
    assert all(event.event != "weight_sync" for event in run.log.events)


@pytest.mark.parametrize("broken", ["raises", "None"])
@on_both
async def test_a_fleet_that_fails_to_put_out_an_engine_is_named(broken: str) -> None:
    run = MemoryRun(settings(), range(100), engines=2, replaceable=True)

    def put_out(engine: str, reason: str) -> Any:
        if broken == "raises":
            raise KeyError(engine)

    run.engines.put_out = put_out  # type: ignore[method-assign]
    run.engines.fail("pause", "engine1", 9)
    error = CallFailed if broken == "raises" else WrongAnswer
    with pytest.raises(error, match=r"fleet\.put_out"):
        await run.run()


class OnePosition(ListPrompts):
    """Counts in a position of its own, which it gives away with every prompt."""

    def __init__(self, prompts: Sequence[Any]) -> None:
        super().__init__(prompts)
        self.position = {"next": 0}

    async def next_prompt(self) -> PulledPrompt:
        self.position["next"] += 1
        await anyio.sleep(1)  # meanwhile it counts a prompt that nobody has
        pulled = await super().next_prompt()
        return PulledPrompt(pulled.payload, self.position)

    async def seek(self, position: Any) -> None:
        self.position = position or {"next": 0}
        await super().seek(self.position["next"])


@on_both
async def test_a_source_that_counts_on_in_the_position_it_gave_loses_no_prompt() -> None:
    run = MemoryRun(settings("windowed"), range(200), latency=lambda *_: 1.5)
    pulled: list[Any] = []
    for stop_at in (3, 6, 12):
        if pulled:
            run.start_life()
            run.log = run.log.after_crash()
        run.source = OnePosition(range(200))

        def stop(event: Event, at: int = stop_at) -> bool:
            if event.event == "trained" and event.step == at < 12:
                assert run.controller is not None
                run.controller.stop()
            return False

        run._lived = False  # this life is built already
        result = await run.run(crash_when=stop)
        assert result is not None and result.step == stop_at
        assert run.controller is not None
        pulled += run.source.pulled[: run.controller._state.ledger.next_ordinal - len(pulled)]
        assert pulled == list(range(len(pulled)))


@on_both
async def test_a_save_says_that_a_worker_has_changed_a_prompt() -> None:
    async def script(prompt: Prompt, sibling: int, version: int) -> None:
        prompt.payload["messages"].append("another turn")

    prompts = [{"messages": [f"question {number}"]} for number in range(100)]
    run = MemoryRun(settings(), prompts, latency=uneven, script=script)
    with pytest.raises(SaveError, match="changed where it lay, maybe a prompt's payload by a"):
        await run.run()
    assert run.bundles() == []


@on_both
async def test_no_request_is_left_of_attempts_that_ended_before_they_began() -> None:
    """They are counted before their task begins, or is woken, and that may never be."""
    run = MemoryRun(settings("windowed"), range(100), latency=uneven)
    append = run.log.append

    def full(kind: EventKind, **fields: Any) -> int:
        if kind == "dispatched" and fields["ordinal"] == 10:
            raise OSError(28, "No space left")
        return append(kind, **fields)

    run.log.append = full  # type: ignore[method-assign]
    with pytest.raises(CallFailed, match="dispatched to the event log"):
        await run.run()
    assert run.controller is not None
    assert run.controller.report().requests == 0


def test_a_report_from_a_callback_of_the_loop_does_not_say_that_the_run_is_over() -> None:
    run = MemoryRun(settings(), range(100), latency=uneven)
    reports: list[StallReport] = []

    def look() -> None:
        assert run.controller is not None
        run.controller._barrier._clock = lambda: 5.0  # the virtual one is for tasks
        reports.append(run.controller.report())

    async def live() -> None:
        asyncio.get_running_loop().call_later(5, look)
        await run.run()

    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        runner.run(live())
    assert "or this was asked outside the tasks of its event loop" in reports[0].cause


@pytest.mark.parametrize(
    "section",
    [
        {"rollout_failure": {"backoff_base_s": -1.0}},
        {"rollout_failure": {"max_backoff_s": -0.5}},
        {"rollout_failure": {"backoff_base_s": math.nan}},
        {"stop_grace_s": -1.0},
        {"stop_grace_s": math.nan},
        {"stall_watchdog": {"stall_timeout_s": math.nan}},
        {"max_stale_requeues": -1},
    ],
    ids=str,
)
def test_no_wait_of_negative_length_is_accepted(section: dict[str, Any]) -> None:
    (key, value), *_ = section.items()
    if isinstance(value, dict):
        ((inner, _),) = value.items()
        key = f"{key}.{inner}"
    with pytest.raises(ConfigError, match=rf"async_rl\.{key} is (-|nan).*at least 0"):
        decode({"async_rl": section}, ControllerConfig)
