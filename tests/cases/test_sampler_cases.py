"""H21, H25 and H26, as far as samplers, ledger and index decide them: no task, no clock."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from sc_core.config import AsyncRlConfig, ControllerConfig, GrpoConfig, SamplerConfig, SamplerName
from sc_core.cut import decode_cut, encode_cut
from sc_core.errors import ConfigError
from sc_core.ledger import Ledger
from sc_core.places import Places
from sc_core.ports import Sampler
from sc_core.records import Group, PulledPrompt, Stamp
from sc_core.samplers import build_sampler, check_capacity

GATED: tuple[SamplerName, ...] = ("in_order", "weight_fifo", "ready_first")
ALL: tuple[SamplerName, ...] = (*GATED, "windowed")


def sampler_of(name: SamplerName, versions: int, groups_per_step: int) -> Sampler:
    config = SamplerConfig(
        name=name, max_staleness_versions=versions, max_lookahead_versions=versions
    )
    return build_sampler(config, groups_per_step)


class Run:
    """Both pumps in lock step. A tick is the time in which one step can be trained."""

    def __init__(
        self,
        sampler: Sampler,
        ledger: Ledger,
        *,
        places: int,
        slots: int | None = None,
        chunk: int | None = None,
        ticks_of: Callable[[int], int] = lambda ordinal: 1,
        stale_requeues: int = 0,
    ) -> None:
        self.sampler, self.ledger = sampler, ledger
        self.places, self.slots = Places(places), slots or places
        self.groups_per_step = ledger.prompts_per_step
        self.chunk = chunk or self.groups_per_step
        self.ticks_of, self.stale_requeues = ticks_of, stale_requeues
        self.left: dict[int, int] = {}  #: ticks until each group in flight is finished
        self.open: list[Group] = []
        self.generations: Counter[int] = Counter()
        self.dropped: list[int] = []
        self.trained: dict[int, int] = {}  #: lag of each, by ordinal
        for record in ledger.records():
            if record.admitted:
                self.places.restore(record.ordinal)

    def tick(self) -> bool:
        """Dispatch all that may go, let time pass, train; whether anything at all happened."""
        happened = False
        while self.dispatch():
            happened = True
        for ordinal in list(self.left):
            happened = True
            self.left[ordinal] -= 1
            if not self.left[ordinal]:
                del self.left[ordinal]
                version = self.ledger.weight_version
                self.ledger.commit(ordinal, rewards=[1.0], tokens=1, end_weight_version=version)
        happened |= self.train()
        self.ledger.audit(self.places.holders())
        return happened

    def dispatch(self) -> bool:
        ledger, record = self.ledger, self.ledger.next_waiting()
        if ledger.in_flight_count >= self.slots:
            return False
        stamp = None
        if record is None or not record.admitted:
            stamp = self.sampler.admit(ledger)
            if stamp is None or not self.places.free:
                return False
        if record is None:
            record = ledger.pull(PulledPrompt("text", ledger.next_ordinal + 1))
        if record.ordinal not in self.places:
            self.places.take(record.ordinal)
        ledger.dispatch(record.ordinal, stamp)
        self.generations[record.ordinal] += 1
        self.left[record.ordinal] = self.ticks_of(record.ordinal)
        return True

    def train(self) -> bool:
        ledger, before = self.ledger, len(self.open)
        for group in self.sampler.evict(ledger):
            record = ledger.get(group.ordinal)
            assert record is not None
            if record.stale_requeues < self.stale_requeues:
                ledger.requeue(group.ordinal)
            else:
                ledger.drop(group.ordinal, "stale")
                self.places.release(group.ordinal)
                self.dropped.append(group.ordinal)
        while missing := self.groups_per_step - len(self.open):
            chosen = self.sampler.select(ledger, min(self.chunk, missing), missing)
            if not chosen:
                return len(self.open) > before
            ledger.select(chosen)
            self.open += chosen
        for group in self.open:
            assert group.ordinal not in self.trained
            self.trained[group.ordinal] = ledger.weight_version - group.start_weight_version
            self.places.release(group.ordinal)
        ledger.train(self.open)
        self.open = []
        return True

    def until_step(self, step: int) -> bool:
        """Whether that step is ever finished."""
        while self.ledger.step < step:
            if not self.tick():
                return False
        return True


# H21: admission after a restore


def restored_with(groups: int, version: int, sampler: Sampler) -> Ledger:
    """P=4, K=1, `groups` committed at `version`; the first four of them started one before."""
    before = Ledger(prompts_per_step=4)
    for ordinal in range(groups):
        before.step = before.weight_version = max(0, version - (ordinal < 4))
        before.pull(PulledPrompt("text", ordinal + 1))
        ordered = sampler.name == "in_order"
        before.dispatch(ordinal, Stamp(version + ordinal // 4 if ordered else None))
    before.step = before.weight_version = version
    for ordinal in range(groups):
        before.commit(ordinal, rewards=[1.0], tokens=1, end_weight_version=version)
    cut = before.cut(
        incarnation="before",
        event_seq=0,
        group_size=1,
        sampler=sampler.name,
        sampler_state=sampler.state(),
        source_fingerprint="",
        suspects=(),
    )
    return Ledger.restored(decode_cut(encode_cut(cut)), prompts_per_step=4, group_size=1)


@pytest.mark.parametrize("name", GATED)
@pytest.mark.parametrize(
    ("version", "groups", "admitted"), [(50, 5, 3), (0, 0, 8), (50, 0, 8), (50, 8, 0)]
)
def test_h21_a_restored_version_admits_what_the_bound_leaves_room_for(
    name: SamplerName, version: int, groups: int, admitted: int
) -> None:
    sampler = sampler_of(name, 1, groups_per_step=4)
    ledger = restored_with(groups, version, sampler)
    run = Run(sampler, ledger, places=1000)  # the sampler alone holds back
    while run.dispatch():
        pass
    assert ledger.in_flight_count == admitted
    assert run.until_step(version + 20)
    assert len(run.trained) == 80
    assert not run.dropped
    if name != "ready_first":
        assert max(run.trained.values()) <= 1


# H25: slow prompts under each policy

P, K, EPOCH, SLOW = 4, 2, 8, 3


def forty_steps(name: SamplerName, *, stale_requeues: int = 0) -> Run:
    """Prompt 3 of the 8 of each epoch takes K+2 steps to generate, the others one."""
    run = Run(
        sampler_of(name, K, P),
        Ledger(prompts_per_step=P),
        places=(K + 1) * P,
        ticks_of=lambda ordinal: K + 2 if ordinal % EPOCH == SLOW else 1,
        stale_requeues=stale_requeues,
    )
    assert run.until_step(40)
    return run


def slow(ordinals: object) -> list[int]:
    assert isinstance(ordinals, (dict, list))
    return [ordinal for ordinal in ordinals if ordinal % EPOCH == SLOW]


@pytest.mark.parametrize("name", ["in_order", "weight_fifo"])
def test_h25_a_slow_prompt_is_waited_for_and_trained_once(name: SamplerName) -> None:
    run = forty_steps(name)
    assert run.dropped == []
    assert sorted(run.trained) == list(range(40 * P))  # every prompt of 20 epochs, in order
    assert len(slow(run.trained)) == 20
    assert max(run.trained.values()) <= K
    assert set(run.generations.values()) == {1}


def test_h25_ready_first_trains_slow_prompts_late_and_says_so() -> None:
    run = forty_steps("ready_first")
    assert run.dropped == []
    assert len(run.trained) == 40 * P
    share = len(slow(run.trained)) / len(run.trained)
    assert share == pytest.approx(1 / EPOCH, abs=0.02)
    assert min(run.trained[ordinal] for ordinal in slow(run.trained)) > K
    assert set(run.generations.values()) == {1}


def test_h25_windowed_drops_slow_prompts_and_records_each() -> None:
    run = forty_steps("windowed")
    assert slow(run.trained) == []
    assert run.dropped == slow(list(range(run.dropped[-1] + 1)))
    assert run.ledger.counters["dropped"] == run.ledger.counters["evicted"] == len(run.dropped)
    assert max(run.trained.values()) <= K


def test_h25_windowed_requeues_slow_prompts_at_most_twice() -> None:
    run = forty_steps("windowed", stale_requeues=2)
    assert len(run.dropped) >= 2
    assert all(run.generations[ordinal] == 3 for ordinal in run.dropped)
    assert max(run.generations.values()) == 3
    assert run.ledger.counters["requeued"] >= 2 * len(run.dropped)
    assert max(run.trained.values()) <= K


# H26: select, evict and capacity agree


def test_h26_in_order_goes_by_target_also_when_a_staleness_is_configured_beside_it() -> None:
    config = SamplerConfig(name="in_order", max_lookahead_versions=3, max_staleness_versions=1)
    sampler = build_sampler(config, 1)
    ledger = Ledger(prompts_per_step=1)
    ledger.weight_version = 9
    ledger.pull(PulledPrompt("text", 1))
    ledger.dispatch(0, Stamp(target_step=12))
    ledger.weight_version = 12
    group = ledger.commit(0, rewards=[1.0], tokens=1, end_weight_version=12)
    assert list(sampler.evict(ledger)) == []
    assert list(sampler.select(ledger, 1, 1)) == [group]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("versions", [0, 1, 3])
def test_h26_exactly_the_settings_that_can_fill_a_step_are_accepted(
    name: SamplerName, versions: int
) -> None:
    table = itertools.product([1, 2, 4], [1, 2, 3, 4, 5, 8], [None, 1, 2], [None, 1, 3])
    verdicts = set()
    for groups, capacity, chunk, slots in table:
        if chunk is not None and chunk > groups:
            continue
        config = ControllerConfig(
            grpo=GrpoConfig(num_prompts_per_step=groups),
            async_rl=AsyncRlConfig(
                sampler=SamplerConfig(
                    name=name, max_staleness_versions=versions, max_lookahead_versions=versions
                ),
                max_buffered_rollouts=capacity,
                min_groups_for_streaming_train=chunk,
                max_inflight_prompts=slots,
            ),
        )
        sampler = build_sampler(config.async_rl.sampler, groups)
        run = Run(
            sampler,
            Ledger(prompts_per_step=groups),
            places=capacity,
            slots=slots,
            chunk=chunk,
            ticks_of=lambda ordinal: 1 + ordinal * 7 % 4,
        )
        fills = run.until_step(6)
        try:
            check_capacity(config, sampler)
            accepted = True
        except ConfigError as exc:
            accepted = False
            assert f"max_buffered_rollouts is {capacity}" in str(exc)
            assert f"{groups} groups" in str(exc)
        assert accepted is fills, f"P={groups} places={capacity} chunk={chunk} slots={slots}"
        verdicts.add(accepted)
    assert verdicts == {True, False}


@pytest.mark.parametrize("name", ALL)
def test_h26_left_out_the_places_let_generation_run_ahead_by_k_steps(name: SamplerName) -> None:
    sampler = sampler_of(name, 2, groups_per_step=4)
    config = ControllerConfig(
        grpo=GrpoConfig(num_prompts_per_step=4),
        async_rl=AsyncRlConfig(
            sampler=SamplerConfig(name=name, max_staleness_versions=2, max_lookahead_versions=2)
        ),
    )
    places, slots = check_capacity(config, sampler)
    assert (places, slots) == (12, 12)
    run = Run(sampler, Ledger(prompts_per_step=4), places=places)
    while run.dispatch():
        pass
    assert run.ledger.in_flight_count == 12
    capped = replace(config, async_rl=replace(config.async_rl, max_inflight_prompts=5))
    assert check_capacity(capped, sampler) == (12, 5)
