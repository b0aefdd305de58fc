"""Every port call, with every fault, under every sampler: each ends well, or with a name.

A cell is a whole run in which one call goes wrong. It must end in success, in a recorded drop, or
in an `ScError` that names the call, within a few deadlines of virtual time, and leave nothing
behind. Then a new process resumes from the newest bundle and makes one more step. Cells take turns
on asyncio and trio.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import os
import re
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
import trio
from msgspec.structs import replace
from trio.testing import MockClock
from virtual_clock import VirtualClockLoop

from sc_core.audit import audit
from sc_core.bundle import BundleStore
from sc_core.calls import in_thread
from sc_core.config import ControllerConfig, SamplerConfig, decode
from sc_core.controller import SingleController
from sc_core.errors import BarrierTimeout, CallTimeout, ScError
from sc_core.ports import SamplerView
from sc_core.records import Group, PulledPrompt
from sc_core.samplers import ReadyFirst
from sc_core.testing import MemoryDataPlane, MemoryRun, faults
from sc_core.testing.faults import Fault, Struck, strike
from sc_core.verify import candidates, verify

DEADLINE_S = 20.0  #: of every call
BOUND_S = 5 * DEADLINE_S + 10  #: from the first fault to the end of a run that fails
FOR_EVER_S = 1e6
STEPS = 3
EVERY_CELL = "SC_EVERY_CELL" in os.environ
"""Every sampler with every position: thrice as many cells. Else the samplers take turns."""


class NewestCommits(ReadyFirst):
    """Somebody's own sampler."""

    name = "newest_commits"

    def __init__(self, config: SamplerConfig, prompts_per_step: int) -> None:
        super().__init__(config.max_staleness_versions)

    def select(self, view: SamplerView, at_least: int, at_most: int) -> Any:
        ready: list[Group] = list(view.index.ready_in_commit_order())[::-1][:at_most]
        return ready if len(ready) >= at_least else ()


SAMPLERS: dict[str, dict[str, Any]] = {
    "in_order": {"name": "in_order", "max_lookahead_versions": 1},
    "weight_fifo": {"name": "weight_fifo", "max_staleness_versions": 1},
    "ready_first": {"name": "ready_first", "max_staleness_versions": 1},
    "windowed": {"name": "windowed", "max_staleness_versions": 1},
    "freshest": {"name": "windowed", "max_staleness_versions": 1, "sample_freshest_first": True},
    "custom": {"name": "custom", "target": f"{__name__}:NewestCommits"},
}


@cache
def settings(sampler: str, granularity: str, steps: int = STEPS) -> ControllerConfig:
    deadlines = ("rollout", "source", "data_plane", "snapshot", "estimator", "trainer",
                 "weight_sync", "disk")  # fmt: skip
    data = {
        "grpo": {
            "num_prompts_per_step": 2,
            "num_generations_per_prompt": 2,
            "max_num_steps": steps,
        },
        "async_rl": {
            "sampler": SAMPLERS[sampler],
            "max_buffered_rollouts": 4,
            "deadlines": {f"{name}_s": DEADLINE_S for name in deadlines},
            "rollout_failure": {
                "max_infra_attempts_per_prompt": 2,
                "max_consecutive_dropped_prompts": 2,
            },
        },
        "rollout_recovery": {"default_granularity": granularity},
        "checkpointing": {"save_period": 1, "ft_keep_latest_k": 1},
    }
    return decode(data, ControllerConfig)


# faults ----------------------------------------------------------------------------------


class Stuck(BaseException):
    """Blocking work that never goes on from here."""


class Cell(NamedTuple):
    call: str  #: port and method
    fault: str
    position: str
    sampler: str
    granularity: str
    backend: str


def broken() -> ConnectionError:
    return ConnectionError("the wire was cut")


FAULTS: dict[str, Callable[[HostileRun], Fault]] = {
    "raises once": lambda run: faults.raises(broken()),
    "raises always": lambda run: faults.raises(broken()),
    "raises after its effect": lambda run: faults.raises_late(broken()),
    "hangs once": lambda run: faults.hangs,
    "hangs always": lambda run: faults.hangs,
    "hangs, and takes effect later": lambda run: run.takes_effect_later,
    "is cancelled": lambda run: faults.is_cancelled,
    "is cancelled natively": lambda run: faults.raises(asyncio.CancelledError()),
    "its task is cancelled": lambda run: run.cancels_its_task,
    "the run is cancelled": lambda run: run.cancels_the_run,
    "returns after its deadline": lambda run: faults.minds_no_cancel(1.5 * DEADLINE_S),
    "answers a cancel with an error": lambda run: faults.answers_a_cancel(broken()),
    "answers a cancel with None": lambda run: faults.answers_a_cancel(None),
}
ALWAYS = ("raises always", "hangs always")
AGAIN = ("engines.", "plane.put", "plane.write", "plane.clear", "disk.", "events.")
"""Calls that are made again after a fault. Of others the first fault is the last."""
ON_ASYNCIO = ("is cancelled natively", "its task is cancelled")
AT_ONCE = ("raises once", "raises always", "raises after its effect",
           "is cancelled natively", "the run is cancelled")  # fmt: skip
"""Faults of a call that is not awaited."""


def give_write_back(plane: Any) -> None:
    """Have a method of its own for puts into rows that are there."""
    put = plane.put_samples

    async def write_back(sample_ids: Any, fields: Any) -> None:
        await put(sample_ids, fields)

    async def put_samples(sample_ids: Any, fields: Any, tags: Any = None) -> None:
        if tags is None:
            await plane.write_back(sample_ids, fields)
        else:
            await put(sample_ids, fields, tags)

    plane.write_back, plane.put_samples = write_back, put_samples


class HostileRun(MemoryRun):
    """A `MemoryRun` in whose first life one call goes wrong.

    Its saves take no time, but for that of step 2.
    """

    def __init__(self, cell: Cell, odd: Fault | None) -> None:
        self.cell: Cell | None = None  # `super` starts a life
        self.struck = Struck()
        super().__init__(
            settings(cell.sampler, cell.granularity),
            range(40),
            latency=lambda prompt, sibling: 0.5 + (prompt.ordinal * 7 + sibling * 3) % 4,
            hooks=self._slow_snapshot,
        )
        self.cell = cell
        self.odd = odd
        self.saving = False
        self.cancel: Callable[[], object] = lambda: None
        self.later: list[Callable[[], Awaitable[Any]]] = []
        self.runner = self.hostile_runner  # type: ignore[assignment]
        self.inside_runner = False
        self.takes_long = False  #: the work in the runner, after it is done

    @property
    def step(self) -> int:
        return 0 if self.controller is None else self.controller.statistics().step

    async def _slow_snapshot(self, call: str, point: str) -> None:
        if (call, point, self.step) == ("save_checkpoint", "midway", 2):
            await anyio.sleep(1)

    async def open(self, bundles: BundleStore) -> SingleController:
        cell, trainer = self.cell, self.trainer
        if cell is None:
            return await super().open(bundles)
        save, finalize = trainer.save, trainer.finalize_save

        async def slow_save(directory: Any) -> None:
            self.saving = True
            await anyio.sleep(self.step == 2)
            await save(directory)

        async def slow_finalize() -> None:
            await anyio.sleep(4 * (self.step >= 2 and self.saving))
            await finalize()

        def appended(_: str) -> None:
            if self.log.events[-1].event == "checkpoint":
                self.saving = False

        trainer.save, trainer.finalize_save = slow_save, slow_finalize  # type: ignore[method-assign]
        self.log.done = appended
        port, _, method = cell.call.partition(".")
        here = {
            "engines": self.engines,
            "trainer": trainer,
            "source": self.source,
            "events": self.log,
            "metrics": self.metrics,
            "store": self.bootstrap,
            "estimator": self.estimator,
            "heavy": self.estimator,
        }
        self.estimator.heavy = port == "heavy"
        if port in here:
            self.arm(here[port], method)
        elif cell.call in ("disk.read", "disk.sha256"):
            self.arm(self.disk, method)
        elif port == "disk":
            self.disk.hook = self.disk_hook
        controller = await super().open(bundles)
        connect = controller._ports.connect

        async def connected(token: Any) -> Any:
            plane = await connect(token)
            if port == "plane":
                if method == "write_back":
                    give_write_back(plane)
                self.arm(plane, method)
            return plane

        ports = SimpleNamespace(connect=connected)
        if port == "connect":
            self.arm(ports, method)
        controller._ports = replace(controller._ports, connect=ports.connect)
        return controller

    async def until_the_first_bundle(self) -> None:
        cell, config, self.cell = self.cell, self.config, None
        assert cell is not None
        self.config = settings(cell.sampler, cell.granularity, 1)
        assert await self.run() is not None
        self.cell, self.config = cell, config

    def arm(self, port: object, method: str) -> None:
        assert self.cell is not None
        fault = self.odd or FAULTS[self.cell.fault](self)
        if self.cell.call in IN_THE_RUNNER and self.cell.fault in WAITING:
            fault = self.in_the_runner
        self.struck = strike(port, method, fault, when=self.when)

    def when(self, number: int) -> bool:
        if self.cell is None:
            return False
        if self.struck.strikes:
            return "always" in self.cell.fault
        match self.cell.position:
            case "first" | "at a resume":
                return True
            case "mid-run":
                return self.step >= 1
            case _:
                return self.step >= 2 and self.saving

    # faults that need the run ----------------------------------------------------------

    async def takes_effect_later(self, call: Callable[[], Awaitable[Any]]) -> None:
        self.later.append(call)
        await anyio.sleep_forever()

    async def cancels_its_task(self, call: Callable[[], Awaitable[Any]]) -> Any:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await anyio.lowlevel.checkpoint()
        return await call()

    async def cancels_the_run(self, call: Callable[[], Awaitable[Any]]) -> Any:
        self.cancel()
        return await call()

    # blocking work ---------------------------------------------------------------------

    async def hostile_runner(self, work: Callable[..., Any], *args: Any) -> Any:
        await anyio.lowlevel.checkpoint()
        self.inside_runner = True
        try:
            result = work(*args)
        except Stuck:
            self.inside_runner = False
            await anyio.sleep_forever()
        finally:
            self.inside_runner = False
        if self.takes_long:
            self.takes_long = False
            with anyio.CancelScope(shield=True):
                await anyio.sleep(1.5 * DEADLINE_S)
        return result

    async def in_the_runner(self, call: Callable[[], Awaitable[Any]]) -> Any:
        assert self.cell is not None
        if self.cell.fault == "returns after its deadline":
            self.takes_long = True
            return await call()
        raise Stuck

    def disk_hook(self, effect: str, path: Any) -> None:
        assert self.cell is not None
        wanted = self.cell.call.partition(".")[2]
        if not self.inside_runner or wanted not in effect:
            return
        self.struck.calls += 1
        if not self.when(self.struck.calls):
            return
        if not self.struck.strikes:
            self.struck.first_at = anyio.current_time()
        self.struck.strikes += 1
        match self.cell.fault:
            case "raises once" | "raises always":
                raise OSError(5, "Input/output error", str(path))
            case "hangs once" | "hangs always":
                raise Stuck
            case "returns after its deadline":
                self.takes_long = True
            case "the run is cancelled":
                self.cancel()


WAITING = ("hangs once", "hangs always", "returns after its deadline")
IN_THE_RUNNER = ("heavy.estimate", "events.sync", "disk.read", "disk.sha256")


# calls -----------------------------------------------------------------------------------

EVERYWHERE = ("first", "mid-run", "during a save")
IN_SAVES = ("first", "mid-run")  #: what is called in saves only
ONCE = ("first",)
SUCCESS = "success"
DROPS = "success, PromptDropped or TooManyDropped"


class Call(NamedTuple):
    says: str  #: what its errors match
    positions: tuple[str, ...] = EVERYWHERE
    at_once: bool = False  #: it is not awaited
    odd: dict[str, Fault] = {}
    ends: dict[str, str] = {}  #: by fault: how, if not in an error
    granularities: tuple[str, ...] = ("prompt_group",)


def fewer(columns: Any) -> dict[str, Any]:
    return {name: values[:-1] for name, values in columns.items()}


def returns(answer: object) -> Fault:
    return faults.answers(lambda _: answer)


BOTH = ("prompt_group", "sibling")
GOES_ON_ANYWAY = dict.fromkeys(
    ["raises once", "raises after its effect", "hangs once", "hangs, and takes effect later",
     "is cancelled", "is cancelled natively", "its task is cancelled",
     "returns after its deadline", "answers a cancel with an error",
     "answers a cancel with None"],
    SUCCESS,
)  # fmt: skip
IGNORED = {"returns rubbish": returns(17)}
TAKEN = {"returns rubbish": SUCCESS}
REPEATED = dict.fromkeys(["raises once", "raises after its effect"], SUCCESS)
CALLS: dict[str, Call] = {
    "engines.rollout": Call(
        r"^group \d+\.\d used up its attempts|^worker\.rollout returned .* not a Sample",
        odd={
            "returns None": returns(None),
            "returns a sample without fields": faults.answers(lambda s: replace(s, fields={})),
            "returns a sample without tokens": faults.answers(lambda s: replace(s, tokens=None)),
            "returns the fields alone": faults.answers(lambda s: s.fields),
        },
        ends=GOES_ON_ANYWAY
        | dict.fromkeys(ALWAYS, DROPS)
        | dict.fromkeys(
            ["returns None", "returns a sample without fields", "returns a sample without tokens"],
            SUCCESS,
        ),  # fmt: skip
        granularities=BOTH,
    ),
    "plane.put_samples": Call(
        r"data_plane\.put_samples|group \d+\.\d used up its attempts|held by mutation '\w+ \d+\.\d",
        odd=IGNORED,
        ends=TAKEN
        | {"raises once": SUCCESS, "raises after its effect": SUCCESS, "raises always": DROPS},
        granularities=BOTH,
    ),
    "plane.write_back": Call(r"data_plane\.put_samples", odd=IGNORED, ends=TAKEN | REPEATED),
    "plane.get_samples": Call(
        r"data_plane\.get_samples",
        odd={
            "returns None": returns(None),
            "returns no columns": returns({}),
            "returns fewer rows": faults.answers(fewer),
            "returns no values": faults.answers(lambda columns: dict.fromkeys(columns)),
        },
    ),
    "plane.clear_samples": Call(
        r"data_plane\.clear_samples",
        odd=IGNORED,
        ends=TAKEN
        | dict.fromkeys(
            [
                "raises once",
                "raises always",
                "raises after its effect",
                "hangs once",
                "hangs, and takes effect later",
                "returns after its deadline",
                "answers a cancel with an error",
                "answers a cancel with None",
            ],
            SUCCESS,
        ),  # fmt: skip
    ),
    "plane.list_sample_ids": Call(
        r"data_plane\.list_sample_ids|rows missing",
        IN_SAVES,
        odd={"returns None": returns(None), "returns a list": faults.answers(list)},
    ),
    "plane.save_checkpoint": Call(
        r"data_plane\.save_checkpoint|the data plane saved nothing",
        IN_SAVES,
        odd={"does nothing": faults.skipped()},
    ),
    "plane.aclose": Call(
        r"data_plane\.aclose", ONCE, ends={"the run is cancelled": "cancelled or success"}
    ),
    "trainer.prepare": Call(r"trainer\.prepare", odd=IGNORED, ends=TAKEN),
    "trainer.begin_step": Call(r"trainer\.begin_step", odd=IGNORED, ends=TAKEN),
    "trainer.train_microbatches": Call(r"trainer\.train_microbatches", odd=IGNORED, ends=TAKEN),
    "trainer.finish_step": Call(
        r"trainer\.finish_step",
        odd={"returns None": returns(None), "returns a list": returns([("loss", 1.0)])},
    ),
    "trainer.save": Call(
        r"trainer\.save|the trainer saved nothing", IN_SAVES, odd={"does nothing": faults.skipped()}
    ),
    "trainer.finalize_save": Call(r"trainer\.finalize_save", IN_SAVES, odd=IGNORED, ends=TAKEN),
    "engines.pause": Call(r"weight_sync\.pause", odd=IGNORED, ends=TAKEN | REPEATED),
    "engines.transfer": Call(
        r"weight_sync\.transfer|weight version \d",
        odd={
            "returns None": returns(None),
            "always returns None": returns(None),
            "always returns no engine": returns({}),
            "always returns an engine that lags": faults.answers(lambda at: at | {"engine1": -1}),
            "always returns an engine without a version": returns({"engine0": None}),
        },
        ends=REPEATED | {"returns None": SUCCESS},
    ),
    "engines.resume": Call(r"weight_sync\.resume", odd=IGNORED, ends=TAKEN | REPEATED),
    "estimator.estimate": Call(
        r"estimator\.estimate",
        at_once=True,
        odd={
            "returns None": returns(None),
            "returns fewer rows": faults.answers(fewer),
            "returns no values": returns({"advantage": None}),
        },
    ),
    "heavy.estimate": Call(
        r"estimator\.estimate",
        odd={"returns None": returns(None), "returns fewer rows": faults.answers(fewer)},
    ),
    "source.next_prompt": Call(
        r"source\.next_prompt|prompt \d",
        ends=dict.fromkeys(
            [
                "hangs once",
                "hangs always",
                "hangs, and takes effect later",
                "answers a cancel with an error",
                "answers a cancel with None",
            ],
            "CallTimeout or success",  # where there are prompts enough for what is left
        ),  # fmt: skip
        odd={
            "returns None": returns(None),
            "returns a tuple": faults.answers(lambda p: (p.payload, p.position)),
            "returns what can't be saved": returns(PulledPrompt(object(), 1)),
            "returns a position that can't be saved": returns(PulledPrompt(1, object())),
        },
    ),
    "source.fingerprint": Call(r"source\.fingerprint", ("mid-run",), at_once=True),
    "disk.write": Call(r"disk|failed at|bundle", IN_SAVES),
    "disk.sync": Call(r"disk|failed at|bundle", IN_SAVES),
    "disk.rename": Call(r"disk|failed at|bundle", IN_SAVES),
    "disk.remove": Call(
        r"disk|failed at|bundle", ONCE, ends={"raises once": SUCCESS, "raises always": SUCCESS}
    ),
    "events.append_many": Call(r"event log", at_once=True),
    "events.sync": Call(r"event log sync|bundle", IN_SAVES),
    "metrics.write": Call(r"metrics\.write", at_once=True, odd=IGNORED, ends=TAKEN),
}


HOLD_A_SECTION = (
    "plane.put_samples", "plane.write_back", "plane.clear_samples", "plane.list_sample_ids",
    "plane.save_checkpoint", "trainer.prepare",
)  # fmt: skip
"""Once past its deadline, such a call keeps its section: it may still be writing."""


RESUME = ("at a resume",)
IN_OUR_TASK = dict.fromkeys(
    ["is cancelled", "is cancelled natively", "its task is cancelled"], "cancelled"
)
"""`restore` runs in the task of who calls it, which others may cancel."""
RESTORE_CALLS: dict[str, Call] = {
    "store.is_untouched": Call(
        r"store\.is_untouched|touched",
        RESUME,
        odd={"returns None": returns(None)},
        ends=IN_OUR_TASK,
    ),
    "store.load_checkpoint": Call(
        r"store\.load_checkpoint|metadata|cut_digest",
        RESUME,
        odd={"returns None": returns(None), "returns nothing": returns({})},
        ends=IN_OUR_TASK,
    ),
    "store.list_sample_ids": Call(
        r"store\.list_sample_ids|rows missing",
        RESUME,
        odd={
            "returns None": returns(None),
            "returns a row too many": faults.answers(lambda rows: rows | {"9.0_g0"}),
        },
        ends=IN_OUR_TASK,
    ),
    "disk.read": Call(r"step_1|reading the bundles", RESUME, ends=IN_OUR_TASK),
    "disk.sha256": Call(r"step_1|reading the bundles", RESUME, ends=IN_OUR_TASK),
    "connect.connect": Call(r"connect", RESUME, odd={"returns None": returns(None)}),
    "trainer.load": Call(r"trainer\.load", RESUME, odd=IGNORED, ends=TAKEN),
    "source.seek": Call(r"source\.seek", RESUME, odd=IGNORED, ends=TAKEN),
}
"""What is called only where there is a bundle to go on from."""


def cells_of(call: str) -> Iterator[tuple[Cell, Fault | None]]:
    spec = (CALLS | RESTORE_CALLS)[call]
    names: dict[str, Fault | None] = {}
    if spec.at_once:
        names |= dict.fromkeys(AT_ONCE)
    elif call in IN_THE_RUNNER:
        names |= dict.fromkeys((*AT_ONCE, *WAITING))
    elif call.startswith("disk"):
        names |= dict.fromkeys(("raises once", "raises always", *WAITING, "the run is cancelled"))
    else:
        names |= dict.fromkeys(FAULTS)
    if not call.startswith(AGAIN):
        names = {fault: odd for fault, odd in names.items() if fault not in ALWAYS}
    names |= spec.odd
    for turn, (fault, odd) in enumerate(names.items()):
        for granularity in spec.granularities:
            for number, sampler in enumerate(SAMPLERS):
                for place, position in enumerate(spec.positions):
                    on_trio = (
                        number // len(spec.positions) + place
                    ) % 2 and fault not in ON_ASYNCIO
                    backend = "trio" if on_trio else "asyncio"
                    if EVERY_CELL or (number + turn + place) % len(spec.positions) == 0:
                        yield Cell(call, fault, position, sampler, granularity, backend), odd


# one cell --------------------------------------------------------------------------------


async def live(run: HostileRun) -> str | BaseException:
    """The first life. Returns `success`, `cancelled`, or the error that it ended with."""
    cell = run.cell
    assert cell is not None
    if cell.backend == "asyncio":
        task = asyncio.current_task()
        assert task is not None
        run.cancel = task.cancel
        try:
            result = await run.run()
        except asyncio.CancelledError:
            task.uncancel()
            return "cancelled"
        except Exception as exc:
            return exc
    else:
        with anyio.CancelScope() as scope:
            run.cancel = scope.cancel
            try:
                result = await run.run()
            except Exception as exc:
                return exc
            except trio.Cancelled:
                if not scope.cancel_called:
                    return "cancelled"
                raise
        if scope.cancelled_caught:
            return "cancelled"
    assert result is not None and result.step == STEPS, result
    return SUCCESS


async def lived(cell: Cell, odd: Fault | None) -> str:
    """Live in a cell, look at what is left, and resume. Returns how it ended."""
    run = HostileRun(cell, odd)
    if cell.call in RESTORE_CALLS:
        await run.until_the_first_bundle()
    tasks, threads = anyio.get_running_tasks(), threading.enumerate()
    with anyio.fail_after(FOR_EVER_S):
        end = await live(run)
    took_s = anyio.current_time() - run.struck.first_at
    assert run.struck.strikes, f"the fault never struck, and it ended in {end!r}"
    problems = list(check_end(run, end, took_s))
    assert anyio.get_running_tasks() == tasks and threading.enumerate() == threads
    for call in run.later:
        await call_of_the_past(run, call)
    problems += check_left(run, end)
    assert not problems, "; ".join(problems)
    await check_resume(run)
    return end if isinstance(end, str) else type(end).__name__


def check_end(run: HostileRun, end: str | BaseException, took_s: float) -> Iterator[str]:
    cell = run.cell
    assert cell is not None
    spec = (CALLS | RESTORE_CALLS)[cell.call]
    told = f"{type(end).__name__}: {end}"
    cancels = cell.fault == "the run is cancelled"
    wanted = spec.ends.get(cell.fault, "cancelled" if cancels else "error")
    if isinstance(end, str):
        if end not in wanted:
            yield f"it ended in {end}, not in {wanted}"
    else:
        if wanted != "error" and type(end).__name__ not in wanted:
            yield f"it ended in {told}, not in {wanted}"
        if not isinstance(end, ScError) or not re.search(spec.says, str(end)):
            yield f"it ended in an error without a name: {told}"
        if took_s > BOUND_S:
            yield f"it ended {took_s:g} s after the fault: {told}"


async def call_of_the_past(run: HostileRun, call: Callable[[], Awaitable[Any]]) -> None:
    """What the world does when nobody waits for it any more."""
    work = call.func  # type: ignore[attr-defined]
    if inspect.ismethod(work) and isinstance(
        work.__self__, MemoryDataPlane
    ):  # the client is closed, and what it sent is sent
        plane = MemoryDataPlane(run.store, disk=run.disk)
        call = partial(getattr(plane, work.__name__), *call.args)  # type: ignore[attr-defined]
    with suppress(Exception):
        await call()


def check_left(run: HostileRun, end: str | BaseException) -> Iterator[str]:
    controller = run.controller
    if controller is None:  # it failed while it was restored
        return
    now, records = controller.statistics(), controller.ledger_records()
    controller.audit()
    report = audit(run.log.events)
    if not report.ok:
        yield str(report)
    if now.places_held != sum(record.admitted for record in records):
        yield f"{now.places_held} places are held for {records}"
    if now.barrier.waiters:
        yield f"somebody waits for the barrier: {now.barrier}"
    assert run.cell is not None
    closed = holds_timeout(end) and run.cell.call in HOLD_A_SECTION
    closed = closed and run.cell[:3:2] != ("plane.list_sample_ids", "first")  # before any section
    if closed != bool(now.barrier.holders):
        yield f"the barrier should{' not' * (not closed)} have stayed closed: {now.barrier}"
    rows = run.store.rows.keys()
    if stray := sorted(rows - controller.rows() - controller.suspects()):
        yield f"rows that nobody owns: {stray}"
    if lost := sorted(controller.rows() - rows):
        yield f"rows are lost: {lost}"


def holds_timeout(end: object) -> bool:
    late = CallTimeout | BarrierTimeout  # the latter where a late put was waited for
    while isinstance(end, BaseException) and not isinstance(end, late):
        end = end.__cause__
    return isinstance(end, late)


async def check_resume(run: HostileRun) -> None:
    run.cell = None
    bundles = run.bundles()
    newest = bundles[-1] if bundles else 0
    run.cell, run.hooks, run.config = None, None, settings("windowed", "prompt_group", newest + 1)
    run.disk.hook = None
    result = await run.run()
    assert result is not None and result.step == newest + 1
    life = [e for e in run.log.events if e.incarnation == run.log.incarnation]
    assert life[0].event == ("resumed" if bundles else "run_started") and life[0].step == newest
    cuts = [(path.name, verify(path, run.disk).cut) for path in candidates(run.directory, run.disk)]
    report = audit(run.log.events, cuts)
    assert report.ok, report
    assert run.controller is not None
    run.controller.audit()
    assert run.store.rows.keys() == run.controller.rows()


def options(backend: str) -> dict[str, Any]:
    if backend == "trio":
        return {"clock": MockClock(autojump_threshold=0)}
    return {"loop_factory": VirtualClockLoop}


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(trio._core._run, "_ALLOW_DETERMINISTIC_SCHEDULING", True)
    trio._core._run._r.seed(0)
    logging.disable(logging.CRITICAL)
    thresholds = gc.get_threshold()
    gc.set_threshold(50_000, 20, 100)
    yield
    gc.set_threshold(*thresholds)
    logging.disable(logging.NOTSET)


def check_cells(call: str, record_property: Callable[[str, object], None]) -> None:
    failures: list[str] = []
    count = 0
    for cell, odd in cells_of(call):
        count += 1
        try:
            anyio.run(lived, cell, odd, backend=cell.backend, backend_options=options(cell.backend))
        except Exception as exc:
            text = str(exc).partition("\nassert ")[0]
            failures.append(f"{' / '.join(cell)}: {type(exc).__name__}: {text}")
    record_property("cells", count)
    assert not failures, f"{len(failures)} of {count} cells:\n" + "\n".join(failures[:20])


@pytest.mark.parametrize("call", CALLS)
def test_every_fault_of_a_call_ends_well_or_with_its_name(
    call: str, record_property: Callable[[str, object], None]
) -> None:
    check_cells(call, record_property)


@pytest.mark.parametrize("call", RESTORE_CALLS)
def test_every_fault_of_a_resume_ends_well_or_with_its_name(
    call: str, record_property: Callable[[str, object], None]
) -> None:
    check_cells(call, record_property)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_sample_that_came_after_its_deadline_is_generated_again(backend: str) -> None:
    async def main() -> None:
        run = MemoryRun(settings("in_order", "prompt_group"), range(40))
        late = faults.minds_no_cancel(1.5 * DEADLINE_S)
        strike(run.engines, "rollout", late, when=lambda number: number == 1)
        result = await run.run()
        assert result is not None and result.step == STEPS
        assert [e.ordinal for e in run.log.events if e.event == "redispatched"] == [0]

    anyio.run(main, backend=backend, backend_options=options(backend))


# threads that nothing can end --------------------------------------------------------------


async def abandonable(work: Callable[..., Any], *args: Any) -> Any:
    """As sc_ray's runner, whose process ends hard after a `CallTimeout`."""
    return await anyio.to_thread.run_sync(work, *args, abandon_on_cancel=True)


def stuck_snapshot(runner: Any, until: threading.Event, for_s: float = 60) -> MemoryRun:
    """A run whose snapshots are written by a thread that goes on until then, in real time."""
    config = settings("windowed", "prompt_group")
    deadlines = replace(config.async_rl.deadlines, snapshot_s=0.05)
    run = MemoryRun(
        replace(config, async_rl=replace(config.async_rl, deadlines=deadlines)), [0] * 9
    )

    async def hooks(call: str, point: str) -> None:
        if (call, point) == ("save_checkpoint", "midway"):
            await runner(until.wait, for_s)

    run.hooks = hooks
    return run


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_thread_that_can_t_be_ended_is_named_and_keeps_its_section(backend: str) -> None:
    """The run ends; its process must end as well, and nothing may begin beside the thread."""
    until = threading.Event()

    async def main() -> None:
        run = stuck_snapshot(abandonable, until)
        with pytest.raises(CallTimeout, match=r"^data_plane\.save_checkpoint did not return"):
            await run.run()
        assert run.controller is not None
        barrier = run.controller.statistics().barrier
        assert barrier.checkpointing and barrier.holders[0].label == "checkpoint of step 1"
        assert not until.is_set() and threading.active_count() > 1
        run.controller.audit()
        assert run.bundles() == []
        until.set()

    try:
        anyio.run(main, backend=backend)
    finally:
        until.set()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_what_a_thread_finished_after_its_deadline_is_no_success(backend: str) -> None:
    """A cancel, and so a deadline, waits for a thread of this runner."""

    async def main() -> None:
        run = stuck_snapshot(in_thread, threading.Event(), for_s=0.2)
        with pytest.raises(CallTimeout, match=r"^data_plane\.save_checkpoint did not return"):
            await run.run()
        assert run.bundles() == []

    anyio.run(main, backend=backend)
