from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sc_core.config import AsyncRlConfig, ControllerConfig, GrpoConfig, SamplerConfig, decode
from sc_core.errors import ConfigError, RestoreError
from sc_core.index import ReplayIndex
from sc_core.ledger import Ledger
from sc_core.ports import Sampler
from sc_core.records import Group, LedgerRecord, PulledPrompt, Stamp, State
from sc_core.samplers import (
    InOrder,
    ReadyFirst,
    WeightFifo,
    Windowed,
    build_sampler,
    check_capacity,
)

KINDS = ("in_order", "weight_fifo", "ready_first", "windowed", "windowed-freshest")


def make(kind: str, bound: int) -> Sampler:
    name, _, variant = kind.partition("-")
    settings = {
        "name": name,
        "max_staleness_versions": bound,
        "max_lookahead_versions": bound,
        "sample_freshest_first": bool(variant),
    }
    return build_sampler(decode(settings, SamplerConfig), 2)


class Spec(NamedTuple):
    """A group: when it started, what for, and how far it got."""

    start: int
    target: int | None = None
    state: State = "committed"


def ledger_of(specs: Sequence[Spec], *, version: int, prompts_per_step: int = 2) -> Ledger:
    """One record per spec, by ordinal, in a ledger of this weight version.

    Groups are committed from the highest ordinal down, so that the orders differ.
    """
    ledger = Ledger(prompts_per_step=prompts_per_step)
    for ordinal, spec in enumerate(specs):
        ledger.pull(PulledPrompt(ordinal, ordinal))
        ledger.weight_version = spec.start
        ledger.dispatch(ordinal, Stamp(spec.target))
    ledger.weight_version = version
    for ordinal, spec in reversed(list(enumerate(specs))):
        if spec.state == "waiting":
            ledger.retry(ordinal, "infra")
        elif spec.state != "in_flight":
            group = ledger.commit(ordinal, rewards=[1.0], tokens=0, end_weight_version=version)
            if spec.state == "selected":
                ledger.select([group])
    return ledger


def ordinals(groups: Sequence[Group]) -> list[int]:
    return [group.ordinal for group in groups]


# each sampler


def test_in_order_stamps_the_lowest_target_with_room() -> None:
    sampler, ledger = InOrder(max_lookahead_versions=2), ledger_of([], version=7)
    stamped = []
    while (stamp := sampler.admit(ledger)) is not None:
        ordinal = ledger.pull(PulledPrompt("text", 0)).ordinal
        stamped.append(ledger.dispatch(ordinal, stamp).target_step)
    assert stamped == [7, 7, 8, 8, 9, 9]
    ledger.drop(2, "test")
    assert sampler.admit(ledger) == Stamp(target_step=8)


def test_in_order_trains_what_is_meant_for_now_and_waits_for_the_rest() -> None:
    sampler = InOrder(max_lookahead_versions=2)
    groups = [Spec(3, 5), Spec(2, 5), Spec(5, 6), Spec(4, 5, "in_flight"), Spec(1, 4), Spec(1)]
    ledger = ledger_of(groups, version=5, prompts_per_step=3)
    assert ordinals(sampler.select(ledger, 2, 3)) == [1, 0]
    assert ordinals(sampler.select(ledger, 3, 3)) == []
    assert ordinals(sampler.select(ledger, 1, 1)) == [1]
    assert ordinals(sampler.evict(ledger)) == [5, 4]
    assert not sampler.may_abort(0, 100)


def test_weight_fifo_waits_for_the_oldest_version() -> None:
    sampler = WeightFifo(max_staleness_versions=1)
    groups = [Spec(5), Spec(3, state="in_flight"), Spec(3), Spec(4), Spec(2)]
    ledger = ledger_of(groups, version=5)
    assert ordinals(sampler.select(ledger, 2, 4)) == [4, 2]
    assert ordinals(sampler.select(ledger, 3, 4)) == []
    ledger.commit(1, rewards=[1.0], tokens=0, end_weight_version=5)
    assert ordinals(sampler.select(ledger, 3, 4)) == [4, 1, 2, 3]
    assert sampler.evict(ledger) == ()
    assert not sampler.may_abort(0, 100)


@pytest.mark.parametrize("state", ["in_flight", "waiting"])
def test_weight_fifo_waits_also_where_nothing_older_is_ready(state: State) -> None:
    sampler = WeightFifo(max_staleness_versions=1)
    ledger = ledger_of([Spec(3, state=state), Spec(5), Spec(5)], version=5)
    assert ordinals(sampler.select(ledger, 1, 2)) == []
    ledger.drop(0, "test")
    assert ordinals(sampler.select(ledger, 1, 2)) == [1, 2]


@pytest.mark.parametrize("sampler", [WeightFifo(1), ReadyFirst(1)], ids=lambda s: s.name)
def test_bounded_admission(sampler: Sampler) -> None:
    ledger = ledger_of([Spec(0), Spec(0, state="selected"), Spec(0, state="in_flight")], version=0)
    assert sampler.admit(ledger) == Stamp()
    ledger.pull(PulledPrompt("text", 0))
    assert sampler.admit(ledger) == Stamp()  # not live before it is admitted
    ledger.dispatch(3, Stamp())
    assert sampler.admit(ledger) is None


def test_ready_first_goes_by_commit_order_and_never_evicts() -> None:
    sampler = ReadyFirst(max_staleness_versions=0)
    ledger = ledger_of([Spec(9), Spec(0), Spec(4, state="in_flight"), Spec(3)], version=9)
    assert ordinals(sampler.select(ledger, 3, 3)) == [3, 1, 0]
    assert ordinals(sampler.select(ledger, 1, 2)) == [3, 1]
    assert ordinals(sampler.select(ledger, 4, 4)) == []
    assert sampler.evict(ledger) == ()
    assert not sampler.may_abort(0, 100)


@pytest.mark.parametrize(("freshest_first", "order"), [(False, [0, 4, 1, 3]), (True, [1, 3, 4, 0])])
def test_windowed_takes_the_window_and_evicts_what_is_older(
    freshest_first: bool, order: list[int]
) -> None:
    sampler = Windowed(max_staleness_versions=2, freshest_first=freshest_first)
    groups = [Spec(3), Spec(5), Spec(2), Spec(5), Spec(4), Spec(0), Spec(3, state="in_flight")]
    ledger = ledger_of(groups, version=5)
    assert sampler.admit(ledger) == Stamp()
    assert ordinals(sampler.select(ledger, 4, 8)) == order
    assert ordinals(sampler.select(ledger, 2, 3)) == order[:3]
    assert ordinals(sampler.select(ledger, 5, 8)) == []
    assert ordinals(sampler.evict(ledger)) == [5, 2]
    assert [sampler.may_abort(start, 5) for start in (2, 3)] == [True, False]


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_ledger(kind: str) -> None:
    sampler, ledger = make(kind, 1), ledger_of([], version=3)
    assert list(sampler.select(ledger, 1, 2)) == list(sampler.evict(ledger)) == []
    stamp = sampler.admit(ledger)
    assert stamp is not None
    assert (stamp.target_step is not None) is sampler.stamps_targets


@pytest.mark.parametrize("kind", KINDS)
def test_samplers_keep_no_state(kind: str) -> None:
    sampler = make(kind, 1)
    assert sampler.name == kind.partition("-")[0]
    assert sampler.state() == {}
    sampler.restore({})
    with pytest.raises(RestoreError, match=f"sampler {sampler.name} keeps no state, but.* cursor"):
        sampler.restore({"cursor": 3})


# from settings


@pytest.mark.parametrize("name", ["in_order", "weight_fifo", "ready_first", "windowed"])
def test_the_settings_name_the_sampler(name: str) -> None:
    config = decode({"name": name}, SamplerConfig)
    assert build_sampler(config, 2).name == name
    assert build_sampler(config, 2).required_capacity(3) == 3


class Picky(ReadyFirst):
    """A custom sampler that looks at two steps' groups at once."""

    name = "picky"

    def __init__(self, config: SamplerConfig, prompts_per_step: int) -> None:
        super().__init__(config.max_staleness_versions)
        self.built_for = prompts_per_step

    def required_capacity(self, prompts_per_step: int) -> int:
        return 2 * prompts_per_step


class Incomplete:
    name = "incomplete"

    def __init__(self, config: SamplerConfig, prompts_per_step: int) -> None: ...

    def admit(self, view: Any) -> None: ...


NOT_A_CLASS = 3


def custom(target: str | None) -> SamplerConfig:
    return SamplerConfig(name="custom", target=target, max_staleness_versions=4)


def test_a_custom_sampler_is_built_from_its_target() -> None:
    sampler = build_sampler(custom(f"{__name__}:Picky"), 3)
    assert isinstance(sampler, Picky)
    assert sampler.built_for == 3
    ledger = ledger_of([Spec(0)] * 14, version=0, prompts_per_step=3)
    assert sampler.admit(ledger) == Stamp()  # below (4 + 1) * 3


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (None, r"async_rl\.sampler\.target is None; .*`module:Class`"),
        ("no.colon", r"async_rl\.sampler\.target is 'no\.colon'; .*`module:Class`"),
        ("no_such_module:Thing", "can't be imported: No module named 'no_such_module'"),
        (f"{__name__}:Missing", "can't be imported: .*no attribute 'Missing'"),
        ("not a name:Thing", "can't be imported: invalid format"),
        (f"{__name__}:NOT_A_CLASS", "is no class, but 3"),
        (
            f"{__name__}:Incomplete",
            "lacks evict, may_abort, required_capacity, restore, select, stamps_targets, state",
        ),
    ],
)
def test_a_custom_target_that_is_no_sampler_is_refused(target: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_sampler(custom(target), 2)


def settings_with(sampler: SamplerConfig, groups: int, **async_rl: int) -> ControllerConfig:
    return ControllerConfig(
        grpo=GrpoConfig(num_prompts_per_step=groups),
        async_rl=AsyncRlConfig(sampler=sampler, **async_rl),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("sampler", "async_rl", "places", "in_flight"),
    [
        (SamplerConfig(name="windowed", max_staleness_versions=2), {}, 12, 12),
        (SamplerConfig(name="weight_fifo", max_staleness_versions=0), {}, 4, 4),
        (SamplerConfig(name="in_order", max_lookahead_versions=1), {}, 8, 8),
        (custom(f"{__name__}:Picky"), {}, 8, 8),
        (SamplerConfig(), {"max_buffered_rollouts": 5}, 5, 5),
        (SamplerConfig(), {"max_inflight_prompts": 3}, 8, 3),
        (SamplerConfig(), {"max_inflight_prompts": 99}, 8, 8),
    ],
)
def test_places_and_slots(
    sampler: SamplerConfig, async_rl: dict[str, int], places: int, in_flight: int
) -> None:
    config = settings_with(sampler, 4, **async_rl)
    assert check_capacity(config, build_sampler(sampler, 4)) == (places, in_flight)


@pytest.mark.parametrize(
    ("sampler", "required"),
    [(SamplerConfig(), 4), (custom(f"{__name__}:Picky"), 8)],
    ids=["stock", "custom"],
)
def test_too_few_places_are_refused_with_the_numbers(sampler: SamplerConfig, required: int) -> None:
    built = build_sampler(sampler, 4)
    check_capacity(settings_with(sampler, 4, max_buffered_rollouts=required), built)
    message = (
        rf"max_buffered_rollouts is {required - 1}, but a step of 4 groups .*{required} places"
    )
    with pytest.raises(ConfigError, match=message):
        check_capacity(settings_with(sampler, 4, max_buffered_rollouts=required - 1), built)


# against plain models


def live(ledger: Ledger) -> list[LedgerRecord]:
    return [record for record in ledger.records() if record.admitted]


def ready(ledger: Ledger) -> list[Group]:
    return [g for g in ledger.index.groups() if not ledger.index.is_selected(g.group_id)]


def by_age(groups: Sequence[Group]) -> list[Group]:
    return sorted(groups, key=lambda group: (group.start_weight_version, group.ordinal))


def model_selectable(kind: str, bound: int, ledger: Ledger, version: int) -> list[Group]:
    """All that could be selected at this version, in order."""
    groups = ready(ledger)
    match kind:
        case "in_order":
            return by_age([group for group in groups if group.target_step == version])
        case "weight_fifo":
            unfinished = [
                record.start_weight_version
                for record in ledger.records()
                if record.state in ("waiting", "in_flight")
                and record.start_weight_version is not None
            ]
            wait_for = min(unfinished, default=version)
            return by_age([group for group in groups if group.start_weight_version <= wait_for])
        case "ready_first":
            return groups
    window = [group for group in groups if 0 <= version - group.start_weight_version <= bound]
    if kind == "windowed":
        return by_age(window)
    return sorted(window, key=lambda group: (-group.start_weight_version, group.ordinal))


def model_evicted(kind: str, bound: int, ledger: Ledger) -> list[Group]:
    groups, version = ready(ledger), ledger.weight_version
    match kind:
        case "in_order":
            return [g for g in groups if g.target_step is None or g.target_step < version]
        case "windowed" | "windowed-freshest":
            return [g for g in groups if version - g.start_weight_version > bound]
    return []


def model_stamp(kind: str, bound: int, ledger: Ledger) -> Stamp | None:
    groups, version, size = live(ledger), ledger.weight_version, ledger.prompts_per_step
    match kind:
        case "in_order":
            for target in range(version, version + bound + 1):
                if sum(group.target_step == target for group in groups) < size:
                    return Stamp(target)
            return None
        case "weight_fifo" | "ready_first":
            return Stamp() if len(groups) < (bound + 1) * size else None
    return Stamp()


@dataclass(frozen=True)
class AtVersion:
    """The same groups, seen from a later weight version."""

    ledger: Ledger
    weight_version: int

    @property
    def prompts_per_step(self) -> int:
        return self.ledger.prompts_per_step

    @property
    def index(self) -> ReplayIndex:
        return self.ledger.index

    @property
    def live_count(self) -> int:
        return self.ledger.live_count

    def live_of_target(self, step: int) -> int:
        return self.ledger.live_of_target(step)

    def in_flight_of_version(self, version: int) -> int:
        return self.ledger.in_flight_of_version(version)

    def oldest_live_version(self) -> int | None:
        return self.ledger.oldest_live_version()


VERSION = 5
SPECS = st.lists(
    st.builds(
        Spec,
        start=st.integers(0, VERSION),
        target=st.none() | st.integers(0, VERSION + 4),
        state=st.sampled_from(["waiting", "in_flight", "committed", "committed", "selected"]),
    ),
    max_size=12,
)
EVERYTHING = 1000


def snapshot(ledger: Ledger) -> Any:
    return ledger.records(), ledger.index.groups(), ready(ledger), ledger.digest


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150)
@given(specs=SPECS, bound=st.integers(0, 4), at_least=st.integers(1, 5), more=st.integers(0, 3))
def test_choices_are_those_of_the_model(
    kind: str, specs: list[Spec], bound: int, at_least: int, more: int
) -> None:
    sampler, ledger = make(kind, bound), ledger_of(specs, version=VERSION)
    before = snapshot(ledger)
    selectable = model_selectable(kind, bound, ledger, VERSION)
    wanted = selectable[: at_least + more] if len(selectable) >= at_least else []
    assert list(sampler.select(ledger, at_least, at_least + more)) == wanted
    evicted = sampler.evict(ledger)
    assert sorted(ordinals(evicted)) == sorted(ordinals(model_evicted(kind, bound, ledger)))
    assert sampler.admit(ledger) == model_stamp(kind, bound, ledger)
    windowed = kind.startswith("windowed")
    for start in range(VERSION + 1):
        assert sampler.may_abort(start, VERSION) is (windowed and VERSION - start > bound)
    assert snapshot(ledger) == before


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150)
@given(specs=SPECS, bound=st.integers(0, 4))
def test_evict_takes_exactly_what_no_select_could_return(
    kind: str, specs: list[Spec], bound: int
) -> None:
    sampler, ledger = make(kind, bound), ledger_of(specs, version=VERSION)
    evicted = list(sampler.evict(ledger))
    assert all(group in ready(ledger) for group in evicted)
    for record in ledger.records():  # what is not ready is its owner's to finish
        if record.state == "in_flight":
            ledger.commit(record.ordinal, rewards=[1.0], tokens=0, end_weight_version=VERSION)
        elif record.state == "waiting":
            ledger.drop(record.ordinal, "test")
    selectable = {
        group.ordinal
        for version in range(VERSION, VERSION + 5)
        for group in sampler.select(AtVersion(ledger, version), 1, EVERYTHING)
    }
    for group in ready(ledger):
        finished_since = specs[group.ordinal].state == "in_flight"
        if not finished_since:
            assert (group.ordinal in selectable) is (group not in evicted)


class SamplerModel(RuleBasedStateMachine):
    """A whole run by one sampler: its choices beside a model's, and what it promises."""

    kind = ""
    lag_is_bounded = True

    @initialize(groups=st.integers(1, 3), bound=st.integers(0, 2), spare=st.integers(0, 4))
    def start(self, groups: int, bound: int, spare: int) -> None:
        self.groups, self.bound, self.capacity = groups, bound, groups + spare
        self.sampler = make(self.kind, bound)
        self.ledger = Ledger(prompts_per_step=groups)
        self.open: list[Group] = []

    def in_state(self, state: State) -> list[int]:
        return [record.ordinal for record in self.ledger.records() if record.state == state]

    def dispatch_next(self) -> bool:
        """What the rollout pump does: a retry first, else a new prompt if it may have a place."""
        waiting = self.ledger.next_waiting()
        if waiting is not None:
            self.ledger.dispatch(waiting.ordinal, None)
            return True
        stamp = self.sampler.admit(self.ledger)
        assert stamp == model_stamp(self.kind, self.bound, self.ledger)
        if stamp is None or self.ledger.live_count >= self.capacity:
            return False
        ordinal = self.ledger.pull(PulledPrompt("text", 0)).ordinal
        self.ledger.dispatch(ordinal, stamp)
        return True

    def finish(self, ordinal: int) -> None:
        version = self.ledger.weight_version
        self.ledger.commit(ordinal, rewards=[1.0], tokens=0, end_weight_version=version)

    def select_and_train(self, at_least: int) -> bool:
        """What the train pump does; whether a step was finished."""
        ledger, sampler = self.ledger, self.sampler
        evicted = list(sampler.evict(ledger))
        wanted = model_evicted(self.kind, self.bound, ledger)
        assert sorted(ordinals(evicted)) == sorted(ordinals(wanted))
        for group in evicted:
            ledger.drop(group.ordinal, "stale")
        missing = self.groups - len(self.open)
        at_least = min(at_least, missing)
        chosen = list(sampler.select(ledger, at_least, missing))
        selectable = model_selectable(self.kind, self.bound, ledger, ledger.weight_version)
        assert chosen == (selectable[:missing] if len(selectable) >= at_least else [])
        ledger.select(chosen)
        self.open += chosen
        if len(self.open) < self.groups:
            return False
        for group in self.open:
            lag = ledger.weight_version - group.start_weight_version
            assert lag <= self.bound or not self.lag_is_bounded
        ledger.train(self.open)
        self.open = []
        return True

    @rule(times=st.integers(1, 4))
    def dispatch(self, times: int) -> None:
        for _ in range(times):
            self.dispatch_next()

    @precondition(lambda self: self.in_state("in_flight"))
    @rule(data=st.data())
    def finish_some(self, data: st.DataObject) -> None:
        in_flight = self.in_state("in_flight")
        for ordinal in data.draw(st.lists(st.sampled_from(in_flight), min_size=1, unique=True)):
            self.finish(ordinal)

    @precondition(lambda self: self.in_state("in_flight"))
    @rule(data=st.data(), retry=st.booleans())
    def fail(self, data: st.DataObject, retry: bool) -> None:
        ordinal = data.draw(st.sampled_from(self.in_state("in_flight")))
        if retry:
            self.ledger.retry(ordinal, "infra")
        else:
            self.ledger.drop(ordinal, "test")

    @rule(at_least=st.integers(1, 3))
    def train(self, at_least: int) -> None:
        self.select_and_train(at_least)

    @rule()
    def restart(self) -> None:
        """At most the open step and what was in flight have to be done again."""
        cut = self.ledger.cut(
            incarnation="",
            event_seq=0,
            group_size=1,
            sampler=self.sampler.name,
            sampler_state=self.sampler.state(),
            source_fingerprint="",
            suspects=(),
        )
        self.sampler = make(self.kind, self.bound)
        self.sampler.restore(cut.sampler_state)
        self.ledger = Ledger.restored(cut, prompts_per_step=self.groups, group_size=1)
        self.open = []

    @invariant()
    def admission_kept_its_bound(self) -> None:
        ledger, most = self.ledger, (self.bound + 1) * self.groups
        if self.kind in ("weight_fifo", "ready_first"):
            assert ledger.live_count <= most
        elif self.kind == "in_order":
            assert ledger.live_count <= most
            version = ledger.weight_version
            targets = range(version, version + self.bound + 1)
            assert all(record.target_step in targets for record in live(ledger))
            assert all(ledger.live_of_target(target) <= self.groups for target in targets)

    def teardown(self) -> None:
        """Whatever happened, the next steps fill."""
        if not hasattr(self, "ledger"):
            return
        for _ in range(3):
            while self.dispatch_next():
                pass
            trained = False
            while not trained:
                for ordinal in self.in_state("in_flight"):
                    self.finish(ordinal)
                trained = self.select_and_train(1)
                assert self.dispatch_next() or trained
        self.ledger.audit()


def machine(name: str, *, lag_is_bounded: bool = True) -> type:
    model = type(name, (SamplerModel,), {"kind": name, "lag_is_bounded": lag_is_bounded})
    case = model.TestCase  # type: ignore[attr-defined]
    case.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
    return case  # type: ignore[no-any-return]


TestInOrder = machine("in_order")
TestWeightFifo = machine("weight_fifo")
TestReadyFirst = machine("ready_first", lag_is_bounded=False)
TestWindowed = machine("windowed")
TestWindowedFreshest = machine("windowed-freshest")
