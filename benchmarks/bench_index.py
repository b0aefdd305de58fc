"""Does choosing groups, and taking a cut of them, stay cheap when there are many?

- choose: the sampler's choice of 32 groups out of 1,000 and 100,000 ready ones; against a scan
  over parallel lists, the usual way to keep a replay buffer.
- take: the same choice, and ledger and index changed accordingly.
- cut: everything that a checkpoint remembers of 10,000 groups of 8 rows, with its digest; against
  hashing the groups as one JSON document. While it is taken, the event loop stands still.

Targets are for a quiet machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from time import perf_counter

import anyio
import msgspec

from benchmarks.measure import Ratio, Target, arguments, interleaved, report
from sc_core.cut import cut_digest
from sc_core.ledger import Ledger
from sc_core.ports import Sampler
from sc_core.records import Group, PulledPrompt, Stamp
from sc_core.samplers import InOrder, ReadyFirst, WeightFifo, Windowed

CHOSEN = 32
FEW, MANY = 1_000, 100_000
IN_CUT, ROWS = 10_000, 8
VERSIONS = 10  #: start versions that ready groups have

CHOOSE_FEW = f"choose {CHOSEN} of {FEW:,}"
CHOOSE_MANY = f"choose {CHOSEN} of {MANY:,}"
TAKE_FEW = f"take {CHOSEN} of {FEW:,}"
TAKE_MANY = f"take {CHOSEN} of {MANY:,}"
SCAN_MANY = f"choose {CHOSEN} of {MANY:,} by scanning lists"
CUT = f"cut and digest of {IN_CUT:,} groups"
JSON = f"hash of {IN_CUT:,} groups as JSON"
MSGSPEC_JSON = f"hash of {IN_CUT:,} groups as JSON, by msgspec"
MILLISECOND = "one millisecond"

SAMPLERS: tuple[Sampler, ...] = (
    InOrder(max_lookahead_versions=1),
    WeightFifo(max_staleness_versions=VERSIONS),
    ReadyFirst(max_staleness_versions=VERSIONS),
    Windowed(max_staleness_versions=VERSIONS),
)
NAMES = [sampler.name for sampler in SAMPLERS]

RATIOS = {
    "select_growth": Ratio(CHOOSE_MANY, CHOOSE_FEW, dict.fromkeys(NAMES, Target(at_most=2.0))),
    "take_growth": Ratio(TAKE_MANY, TAKE_FEW, {}),
    "list_scan_over_select": Ratio(
        SCAN_MANY, CHOOSE_MANY, dict.fromkeys(NAMES, Target(at_least=100.0))
    ),
    "cut_ms_10k": Ratio(CUT, MILLISECOND, {"all": Target(at_most=15.0)}),
    "json_digest_over_cut": Ratio(JSON, CUT, {"all": Target(at_least=30.0)}),
    "msgspec_json_digest_over_cut": Ratio(MSGSPEC_JSON, CUT, {}),
}


def ledger_of(count: int) -> Ledger:
    """`count` ready groups; a step's worth of them for each target step from the present one."""
    ledger = Ledger(prompts_per_step=CHOSEN)
    for ordinal in range(count):
        ledger.pull(PulledPrompt({"prompt": f"What is {ordinal} + {ordinal}?"}, ordinal + 1))
        ledger.weight_version = ordinal * VERSIONS // count
        ledger.dispatch(ordinal, Stamp(target_step=VERSIONS + ordinal // CHOSEN))
    ledger.weight_version = VERSIONS
    for ordinal in range(count):
        ledger.commit(ordinal, rewards=[1.0] * ROWS, tokens=100, end_weight_version=VERSIONS)
    return ledger


class ParallelLists:
    """A replay buffer as one list per property, all in commit order."""

    def __init__(self, groups: Iterable[Group]) -> None:
        ordered = list(groups)
        self.ordinals = [group.ordinal for group in ordered]
        self.start_versions = [group.start_weight_version for group in ordered]
        self.targets = [group.target_step for group in ordered]
        self.selected = [False] * len(ordered)

    def usable(self, sampler: str) -> Iterator[int]:
        ready = (at for at, selected in enumerate(self.selected) if not selected)
        match sampler:
            case "in_order":
                return (at for at in ready if self.targets[at] == VERSIONS)
            case "weight_fifo":
                oldest = min(self.start_versions)
                return (at for at in ready if self.start_versions[at] == oldest)
            case "windowed":
                return (at for at in ready if 0 <= self.start_versions[at] <= VERSIONS)
        return ready

    def choose(self, sampler: str) -> list[int]:
        found = list(self.usable(sampler))
        if sampler != "ready_first":
            found.sort(key=lambda at: (self.start_versions[at], self.ordinals[at]))
        return found[:CHOSEN]


async def choosing(sampler: Sampler, ledger: Ledger, times: int) -> float:
    """Seconds per choice."""
    started = perf_counter()
    for _ in range(times):
        chosen = sampler.select(ledger, CHOSEN, CHOSEN)
    taken = perf_counter() - started
    assert len(chosen) == CHOSEN
    return taken / times


async def taking(sampler: Sampler, ledger: Ledger, times: int) -> float:
    """Seconds per choice and selection; putting the groups back is not counted."""
    taken = 0.0
    for _ in range(times):
        started = perf_counter()
        chosen = sampler.select(ledger, CHOSEN, CHOSEN)
        ledger.select(chosen)
        taken += perf_counter() - started
        ledger.abandon(chosen)
    return taken / times


async def scanning(sampler: Sampler, lists: ParallelLists) -> float:
    started = perf_counter()
    chosen = lists.choose(sampler.name)
    taken = perf_counter() - started
    assert len(chosen) == CHOSEN
    return taken


async def cutting(ledger: Ledger) -> float:
    started = perf_counter()
    cut = ledger.cut(
        incarnation="bench",
        event_seq=0,
        group_size=ROWS,
        sampler="windowed",
        sampler_state={},
        source_fingerprint="",
        suspects=(),
    )
    cut_digest(cut, groups_digest=ledger.index.digest, records_digest=ledger.digest)
    return perf_counter() - started


async def hashing(ledger: Ledger, encode: Callable[[object], bytes]) -> float:
    started = perf_counter()
    hashlib.sha256(encode(ledger.index.groups())).hexdigest()
    return perf_counter() - started


def standard_json(groups: object) -> bytes:
    return json.dumps(msgspec.to_builtins(groups)).encode()


async def one_millisecond() -> float:
    return 1e-3


async def measure(quick: bool) -> dict[str, dict[str, list[float]]]:
    rounds, times = (3, 5) if quick else (25, 40)
    few, many, in_cut = ledger_of(FEW), ledger_of(MANY), ledger_of(IN_CUT)
    lists = ParallelLists(many.index.groups())
    taken = {
        sampler.name: await interleaved(
            {
                CHOOSE_FEW: partial(choosing, sampler, few, times),
                CHOOSE_MANY: partial(choosing, sampler, many, times),
                TAKE_FEW: partial(taking, sampler, few, times),
                TAKE_MANY: partial(taking, sampler, many, times),
                SCAN_MANY: partial(scanning, sampler, lists),
            },
            rounds,
        )
        for sampler in SAMPLERS
    }
    taken["all"] = await interleaved(
        {
            CUT: partial(cutting, in_cut),
            JSON: partial(hashing, in_cut, standard_json),
            MSGSPEC_JSON: partial(hashing, in_cut, msgspec.json.encode),
            MILLISECOND: one_millisecond,
        },
        rounds,
    )
    return taken


def main() -> None:
    asked = arguments(__doc__)
    report(anyio.run(measure, asked.quick), RATIOS, asked.json)


if __name__ == "__main__":
    main()
