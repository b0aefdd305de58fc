from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from sc_core.cut import cut_digest, decode_cut, encode_cut
from sc_core.errors import BundleInconsistent, ConfigChanged, Conservation, SaveError
from sc_core.ledger import Cause, Ledger
from sc_core.places import Places
from sc_core.ports import SamplerView
from sc_core.records import Cut, FinishedSibling, Group, LedgerRecord, PulledPrompt, Stamp, State

P, G = 4, 2


def ledger_with(
    *states: State, target: int | None = None, step: int = 0, payload: Any = "text"
) -> Ledger:
    """A ledger of weight version `step` whose records 0, 1, … are in these states."""
    ledger = Ledger(prompts_per_step=P)
    ledger.step = ledger.weight_version = step
    for ordinal, state in enumerate(states):
        ledger.pull(PulledPrompt(payload, ordinal + 1))
        if state != "waiting":
            ledger.dispatch(ordinal, Stamp(target))
        if state in ("committed", "selected"):
            group = commit(ledger, ordinal)
            if state == "selected":
                ledger.select([group])
    return ledger


def commit(ledger: Ledger, ordinal: int, *, end: int | None = None) -> Group:
    return ledger.commit(
        ordinal,
        rewards=[0.0, 1.0],
        tokens=10,
        end_weight_version=ledger.weight_version if end is None else end,
    )


def cut_of(ledger: Ledger, sampler: str = "windowed") -> Cut:
    return ledger.cut(
        incarnation="one",
        event_seq=7,
        group_size=G,
        sampler=sampler,
        sampler_state={},
        source_fingerprint="f",
        suspects=["lost.0_g0"],
    )


def restored(ledger: Ledger) -> Ledger:
    cut = decode_cut(encode_cut(cut_of(ledger)))
    return Ledger.restored(cut, prompts_per_step=P, group_size=G)


def everything(ledger: Ledger) -> Any:
    """All there is to see, as plain data."""
    return msgspec.to_builtins(
        (cut_of(ledger), ledger.live_count, ledger.unadmitted_count, ledger.in_flight_count)
    )


# one prompt


def test_a_prompt_from_source_to_trained() -> None:
    ledger = Ledger(prompts_per_step=1)
    pulled = ledger.pull(PulledPrompt({"text": "2+2"}, "after 2+2"))
    assert pulled == LedgerRecord(ordinal=0, payload={"text": "2+2"})
    assert (ledger.position, ledger.next_ordinal) == ("after 2+2", 1)
    assert (ledger.waiting_count, ledger.unadmitted_count, ledger.live_count) == (1, 1, 0)

    sent = ledger.dispatch(0, Stamp(target_step=0))
    assert sent == replace(
        pulled, state="in_flight", admitted=True, target_step=0, start_weight_version=0
    )
    assert (ledger.in_flight_count, ledger.unadmitted_count, ledger.live_count) == (1, 0, 1)
    assert (ledger.live_of_target(0), ledger.in_flight_of_version(0)) == (1, 1)

    group = ledger.commit(0, rewards=[0.0, 0.5, 1.0], tokens=30, end_weight_version=0)
    assert group == Group(
        group_id=sent.group_id,
        ordinal=0,
        sample_ids=("0.0_g0", "0.0_g1", "0.0_g2"),
        start_weight_version=0,
        end_weight_version=0,
        commit_seq=0,
        target_step=0,
        reward=0.5,
        tokens=30,
    )
    assert ledger.index.get(group.group_id) == group
    assert ledger.in_flight_of_version(0) == 0
    assert ledger.oldest_live_version() == 0

    ledger.select([group])
    assert ledger.index.is_selected(group.group_id)
    assert ledger.oldest_live_version() is None
    assert (ledger.live_count, ledger.live_of_target(0)) == (1, 1)  # until the step is finished

    ledger.train([group])
    assert (ledger.step, ledger.weight_version) == (1, 1)
    assert (len(ledger), len(ledger.index), ledger.live_count) == (0, 0, 0)
    assert ledger.digest == ledger.index.digest == 0
    done = {"committed": 1, "trained": 1, "samples": 3, "tokens": 30}
    assert ledger.counters == dict.fromkeys(ledger.counters, 0) | done


def test_abandoned_groups_are_committed_again() -> None:
    ledger = ledger_with("committed", "committed", "committed")
    before = everything(ledger)
    groups = ledger.index.groups()[:2]
    ledger.select(iter(groups))
    assert ledger.index.selected_count == 2
    assert everything(ledger) != before
    ledger.abandon(iter(groups))
    assert everything(ledger) == before
    assert ledger.step == 0
    ledger.select(groups)
    ledger.train(iter(groups))
    assert ledger.counters["trained"] == 2


def test_what_a_ledger_says_about_itself() -> None:
    ledger = ledger_with("waiting", "in_flight", "selected", step=5)
    assert repr(ledger) == ("<Ledger of step 5: 1 waiting, 1 in_flight, 0 committed, 1 selected>")
    assert [ordinal in ledger for ordinal in (0, 2, 3)] == [True, True, False]
    assert ledger.get(3) is None


@pytest.mark.parametrize(
    ("cause", "field", "counter"),
    [
        ("infra", "infra_failures", "infra_failures"),
        ("commit", "infra_failures", "infra_failures"),
        ("data", "data_failures", "data_failures"),
    ],
)
def test_a_retry_keeps_place_and_target_and_counts_its_cause(
    cause: Cause, field: str, counter: str
) -> None:
    ledger = ledger_with("in_flight", target=3, step=3)
    again = ledger.retry(0, cause)
    assert (again.state, again.admitted, again.target_step, again.attempt) == (
        "waiting",
        True,
        3,
        1,
    )
    counts = msgspec.structs.asdict(again)
    fields = ("infra_failures", "data_failures", "stale_requeues")
    assert {name: counts[name] for name in fields} == dict.fromkeys(fields, 0) | {field: 1}
    assert ledger.counters == dict.fromkeys(ledger.counters, 0) | {counter: 1}
    assert (ledger.live_count, ledger.live_of_target(3), ledger.waiting_count) == (1, 1, 1)
    assert ledger.in_flight_of_version(3) == 1  # it may still become a group of version 3 … or 4
    ledger.step = ledger.weight_version = 4
    sent = ledger.dispatch(0, None)
    assert (sent.start_weight_version, sent.target_step, sent.group_id) == (4, 3, "0.1")
    assert ledger.counters["redispatched"] == 1


def test_requeue_gives_the_group_up_and_its_place_not() -> None:
    ledger = ledger_with("committed", target=3, step=3)
    ledger.step = ledger.weight_version = 4
    again = ledger.requeue(0)
    assert again == LedgerRecord(
        ordinal=0, payload="text", admitted=True, attempt=1, stale_requeues=1
    )
    assert len(ledger.index) == 0
    assert (ledger.live_count, ledger.live_of_target(3)) == (1, 0)
    assert ledger.oldest_live_version() is None
    assert (ledger.counters["evicted"], ledger.counters["requeued"]) == (1, 1)
    sent = ledger.dispatch(0, Stamp(target_step=5))
    assert (sent.target_step, sent.start_weight_version) == (5, 4)


@pytest.mark.parametrize("requeue", [True, False])
def test_an_abort_is_counted_and_leaves_nothing_of_the_attempt(requeue: bool) -> None:
    ledger = ledger_with("in_flight", target=3, step=3)
    ledger.step = ledger.weight_version = 4
    left = ledger.abort(0, requeue=requeue)
    assert ledger.in_flight_of_version(3) == 0 and ledger.oldest_live_version() is None
    counted = {"aborted": 1} if requeue else {"aborted": 1, "dropped": 1}
    assert ledger.counters == dict.fromkeys(ledger.counters, 0) | counted
    if requeue:
        assert (
            left
            == ledger.get(0)
            == LedgerRecord(ordinal=0, payload="text", admitted=True, attempt=1, stale_requeues=1)
        )
    else:
        assert (left.group_id, len(ledger)) == ("0.0", 0)


def test_without_targets_an_admitted_prompt_goes_out_again_without_a_stamp() -> None:
    ledger = ledger_with("in_flight", "committed", step=3)
    ledger.retry(0, "infra")
    ledger.requeue(1)
    for ordinal in (0, 1):
        sent = ledger.dispatch(ordinal, None)
        assert (sent.state, sent.target_step, sent.attempt) == ("in_flight", None, 1)


def test_requeue_keeps_a_target_that_is_still_ahead() -> None:
    ledger = ledger_with("committed", target=3, step=3)
    assert ledger.requeue(0).target_step == 3
    assert ledger.dispatch(0, Stamp(target_step=4)).target_step == 3


@pytest.mark.parametrize("state", get_args(State))
def test_a_drop_leaves_nothing_behind(state: State) -> None:
    ledger = ledger_with(state, "waiting", target=0)
    other = ledger_with("waiting", "waiting")
    other.drop(0, "for comparison")
    assert ledger.drop(0, "filtered").state == state
    assert ledger.records() == other.records()
    assert (ledger.digest, ledger.index.digest) == (other.digest, 0)
    assert ledger.counters["dropped"] == 1
    assert ledger.counters["evicted"] == (state in ("committed", "selected"))
    assert ledger.next_waiting() == ledger.get(1)
    ledger.audit()


def test_next_waiting_is_the_lowest_ordinal_not_skipped() -> None:
    ledger = ledger_with("in_flight", "waiting", "committed", "waiting")
    assert ledger.next_waiting() == ledger.get(1)
    assert ledger.next_waiting({1}) == ledger.get(3)
    assert ledger.next_waiting({1, 3}) is None
    ledger.retry(0, "infra")
    assert ledger.next_waiting() == ledger.get(0)


def test_the_oldest_live_version_counts_what_is_not_selected() -> None:
    ledger = ledger_with("committed", "in_flight", "waiting")
    ledger.step = ledger.weight_version = 1
    ledger.dispatch(2, Stamp())
    view: SamplerView = ledger
    assert view.oldest_live_version() == 0
    ledger.select(ledger.index.groups())
    assert view.oldest_live_version() == 0
    ledger.drop(1, "test")
    assert view.oldest_live_version() == 1
    ledger.retry(2, "infra")
    assert view.oldest_live_version() == 1
    assert view.in_flight_of_version(1) == 1


def test_prompts_end() -> None:
    ledger = ledger_with("waiting")
    assert not ledger.exhausted
    ledger.end_of_prompts()
    assert ledger.exhausted
    with pytest.raises(Conservation, match="prompt 1 came after the end of prompts"):
        ledger.pull(PulledPrompt("one more", 2))
    assert (ledger.next_ordinal, ledger.position) == (1, 1)


# refusals


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda u: u.dispatch(1, Stamp()), "dispatch: prompt 1 is in_flight, not waiting"),
        (lambda u: u.dispatch(9, Stamp()), "dispatch: prompt 9 is not live"),
        (lambda u: u.dispatch(0, None), "prompt 0 has no stamp and was never admitted"),
        (lambda u: u.retry(2, "infra"), "retry: prompt 2 is committed, not in_flight"),
        (lambda u: commit(u, 0), "commit: prompt 0 is waiting, not in_flight"),
        (lambda u: commit(u, 1, end=6), "ended at weight version 6, not between its start at 5"),
        (lambda u: commit(u, 1, end=4), "ended at weight version 4, not between its start at 5"),
        (
            lambda u: u.commit(1, rewards=[], tokens=0, end_weight_version=5),
            "group 1.0 has no rows",
        ),
        (lambda u: u.requeue(3), "requeue: prompt 3 is selected, not committed"),
        (lambda u: u.drop(9, "stale"), r"drop \(stale\): prompt 9 is not live"),
        (lambda u: u.select(u.index.groups()), "select: prompt 3 is selected, not committed"),
        (lambda u: u.abandon(u.index.groups()), "abandon: prompt 2 is committed, not selected"),
        (lambda u: u.train(u.index.groups()[::-1]), "train: prompt 2 is committed, not selected"),
        (lambda u: u.train([u.index.groups()[1]] * 2), "train: 2 groups of 1 prompts"),
        (
            lambda u: u.select([replace(u.index.groups()[0], group_id="2.9")]),
            "select: group 2.9 is not of the present attempt 2.0",
        ),
    ],
)
def test_a_wrong_state_is_refused_and_nothing_changes(
    call: Callable[[Ledger], object], message: str
) -> None:
    ledger = ledger_with("waiting", "in_flight", "committed", "selected", step=5)
    before = everything(ledger)
    with pytest.raises(Conservation, match=message):
        call(ledger)
    assert everything(ledger) == before
    ledger.audit()


@pytest.mark.parametrize("payload", [object(), 1 << 70, "\ud800"], ids=["type", "int", "text"])
def test_a_payload_that_no_bundle_could_hold_is_refused_at_once(payload: Any) -> None:
    ledger = ledger_with("waiting")
    with pytest.raises(SaveError, match="prompt 1: its payload"):
        ledger.pull(PulledPrompt(payload, 2))
    assert (len(ledger), ledger.next_ordinal, ledger.position) == (1, 1, 1)
    ledger.audit()


# restamping


def test_retarget_closes_gaps_in_ordinal_order() -> None:
    ledger = Ledger(prompts_per_step=2)
    ledger.step = ledger.weight_version = 7
    for ordinal, target in enumerate([7, 7, 9, 8, 9, 9, None]):
        ledger.pull(PulledPrompt("text", ordinal))
        ledger.dispatch(ordinal, Stamp(target))
    groups = [commit(ledger, ordinal) for ordinal in (0, 2, 3, 5)]
    ledger.drop(1, "test")
    ledger.select(groups[:1])  # an open step of one group: its target is half taken
    ledger.pull(PulledPrompt("not admitted", 7))
    ledger.retarget()
    targets = [record.target_step for record in ledger.records()]
    assert targets == [7, 7, 8, 8, 9, None, None]
    assert [group.target_step for group in ledger.index.groups()] == [7, 7, 8, 9]
    ledger.audit()
    ledger.prompts_per_step = 3
    ledger.retarget(untargeted=True)
    assert [record.target_step for record in ledger.records()] == [7, 7, 7, 8, 8, 8, None]
    ledger.audit()


# the cut, and back


def test_the_cut_has_everything() -> None:
    ledger = ledger_with("waiting", "in_flight", "committed", "selected", step=5)
    ledger.drop(0, "test")
    cut = cut_of(ledger)
    assert cut == Cut(
        incarnation="one",
        event_seq=7,
        step=5,
        weight_version=5,
        group_size=G,
        prompts_per_step=P,
        next_ordinal=4,
        position=4,
        exhausted=False,
        source_fingerprint="f",
        records=ledger.records(),
        groups=ledger.index.groups(),
        sampler="windowed",
        sampler_state={},
        suspects=("lost.0_g0",),
        counters=dict(ledger.counters),
    )
    assert [record.state for record in cut.records] == ["in_flight", "committed", "selected"]
    later = cut_digest(cut, groups_digest=ledger.index.digest, records_digest=ledger.digest)
    ledger.drop(1, "after the cut")
    assert cut_digest(cut) == later  # what comes after a cut is not in it
    assert cut.counters["dropped"] == 1


def test_a_restored_ledger_has_nothing_in_flight_and_no_open_step() -> None:
    ledger = ledger_with("waiting", "in_flight", "committed", "selected", target=5, step=5)
    ledger.end_of_prompts()
    again = restored(ledger)
    again.audit()
    waiting, in_flight, committed, selected = ledger.records()
    assert again.records() == (
        waiting,
        replace(in_flight, state="waiting", attempt=1),
        committed,
        replace(selected, state="committed"),
    )
    assert again.index.groups() == ledger.index.groups()
    assert (again.index.ready_count, again.index.selected_count) == (2, 0)
    for name in ("position", "next_ordinal", "exhausted", "step", "weight_version", "counters"):
        assert vars(again)[name] == vars(ledger)[name]
    assert (again.live_count, again.live_of_target(5), again.in_flight_of_version(5)) == (3, 3, 1)
    again.dispatch(1, None)
    assert commit(again, 1).commit_seq == 2


def test_commit_numbers_go_on_after_everything_was_trained() -> None:
    ledger = ledger_with("selected", "selected")
    ledger.train(ledger.index.groups())
    again = restored(ledger)
    again.pull(PulledPrompt("text", 3))
    again.dispatch(2, Stamp())
    assert commit(again, 2).commit_seq == 2


def test_commit_numbers_go_on_where_the_cut_did_not_count_commits() -> None:
    cut = replace(cut_of(ledger_with("in_flight", "committed", "committed")), counters={})
    again = Ledger.restored(cut, prompts_per_step=P, group_size=G)
    again.dispatch(0, None)
    assert commit(again, 0).commit_seq == 2


def test_a_cut_that_contradicts_itself_is_no_ledger() -> None:
    cut = replace(cut_of(ledger_with("committed")), groups=())
    with pytest.raises(BundleInconsistent, match="prompt 0 is committed, but the index"):
        Ledger.restored(cut, prompts_per_step=P, group_size=G)


def test_a_changed_group_size_is_refused_with_both_numbers() -> None:
    cut = cut_of(ledger_with("committed"))
    with pytest.raises(ConfigChanged, match=r"have 2 rows and this run's 8"):
        Ledger.restored(cut, prompts_per_step=P, group_size=8)


def test_fewer_groups_per_step_keeps_all() -> None:
    cut = cut_of(ledger_with("committed", "committed", "committed", "committed", target=0))
    ledger = Ledger.restored(cut, prompts_per_step=2, group_size=G)
    assert ledger.prompts_per_step == 2
    ledger.retarget()
    assert [record.target_step for record in ledger.records()] == [0, 0, 1, 1]


# the audit


def forget(ledger: Ledger, ordinal: int) -> None:
    del ledger._records[ordinal]


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (lambda u: forget(u, 0), "5 prompts have left the source, but 4 are live"),
        (lambda u: u.counters.update(trained=2), "5 are live, 2 were trained and 0 dropped"),
        (
            lambda u: u._records.update({0: u._records.pop(0)}),
            "the record of prompt 0 comes after that of 4",
        ),
        (
            lambda u: u._records.update({4: replace(u.get(4), ordinal=5)}),
            "the record of prompt 5 comes after that of 3, and 5 is the next",
        ),
        (
            lambda u: u._records.update({4: replace(u.get(4), ordinal=3)}),
            "the record of prompt 3 comes after that of 3",
        ),
        (lambda u: u.index.remove("2.0"), "prompt 2 is committed, and group 2.0 is not in the"),
        (lambda u: u.index.add(group_of(u, 1)), "prompt 1 is in_flight, and group 1.0 is in the"),
        (lambda u: u.index.add(group_of(u, 8)), "index has 3 groups, and 2 records"),
        (lambda u: u.index.select([group_of(u, 2)]), "prompt 2 is committed in the ledger only"),
        (
            lambda u: u.index.replace(replace(group_of(u, 2), target_step=3)),
            r"prompt 2: ordinal, start version and target step are \(2, 0, None\)",
        ),
        (
            lambda u: u._records.update({4: replace(u.get(4), admitted=True)}),
            "the ledger's live is kept as 3 and counts 4",
        ),
        (lambda u: u.get(4).payload.append("changed"), "the ledger's digest is kept as"),
    ],
)
def test_the_audit_sees(tamper: Callable[[Ledger], object], message: str) -> None:
    ledger = ledger_with("waiting", "in_flight", "committed", "selected", "waiting", payload=[])
    ledger.audit()
    tamper(ledger)
    with pytest.raises(Conservation, match=message):
        ledger.audit()


def group_of(ledger: Ledger, ordinal: int) -> Group:
    like = ledger.index.groups()[0]
    return replace(like, ordinal=ordinal, group_id=f"{ordinal}.0")


def test_the_audit_compares_places_with_admitted_prompts() -> None:
    ledger = ledger_with("waiting", "in_flight", "committed", "selected")
    places = Places(5)
    for ordinal in (1, 2, 3):
        places.take(ordinal)
    ledger.audit(places.holders())
    places.take(0)  # it has its place, and will be dispatched in a moment
    ledger.audit(places.holders())
    places.take(17)
    with pytest.raises(Conservation, match="a place is held for 17, which is no live prompt"):
        ledger.audit(places.holders())
    places.transfer(17, "spare")
    places.release("spare")
    places.release(2)
    with pytest.raises(Conservation, match="prompt 2 is committed and holds no place"):
        ledger.audit(places.holders())


# against a model


class LedgerModel(RuleBasedStateMachine):
    """The ledger beside a plain dict from ordinal to record, with restarts."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(prompts_per_step=P)
        self.model: dict[int, LedgerRecord] = {}
        self.gone: Counter[str] = Counter()
        self.version = 0
        self.commits: list[int] = []  #: ordinals, in commit order

    def in_state(self, *states: State) -> list[int]:
        return [ordinal for ordinal, record in self.model.items() if record.state in states]

    def pick(self, data: st.DataObject, *states: State) -> int:
        return data.draw(st.sampled_from(self.in_state(*states)))

    def pick_groups(self, data: st.DataObject, state: State) -> list[Group]:
        ordinals = data.draw(st.lists(st.sampled_from(self.in_state(state)), unique=True))
        groups = {group.ordinal: group for group in self.ledger.index.groups()}
        return [groups[ordinal] for ordinal in ordinals]

    def put(self, ordinal: int, **changes: Any) -> None:
        self.model[ordinal] = replace(self.model[ordinal], **changes)

    @rule(payload=st.recursive(st.integers(0, 9) | st.text(max_size=2), st.lists, max_leaves=3))
    def pull(self, payload: Any) -> None:
        ordinal = self.ledger.pull(PulledPrompt(payload, ["after", payload])).ordinal
        assert ordinal == len(self.model) + self.gone.total()
        self.model[ordinal] = LedgerRecord(ordinal=ordinal, payload=payload)

    @precondition(lambda self: self.in_state("waiting"))
    @rule(data=st.data(), meant_for=st.none() | st.integers(0, 3))
    def dispatch(self, data: st.DataObject, meant_for: int | None) -> None:
        ordinal = self.pick(data, "waiting")
        old = self.model[ordinal]
        stamped = meant_for is not None or not old.admitted
        self.ledger.dispatch(ordinal, Stamp(meant_for) if stamped else None)
        self.put(
            ordinal,
            state="in_flight",
            admitted=True,
            target_step=meant_for if old.target_step is None else old.target_step,
            start_weight_version=old.start_weight_version if old.finished else self.version,
        )

    @precondition(lambda self: self.in_state("in_flight"))
    @rule(data=st.data())
    def finish_sibling(self, data: st.DataObject) -> None:
        ordinal = self.pick(data, "in_flight")
        old = self.model[ordinal]
        missing = set(range(G)) - {one.sibling for one in old.finished}
        if not missing:
            return
        sibling = data.draw(st.sampled_from(sorted(missing)))
        one = FinishedSibling(
            sibling=sibling,
            sample_id=f"{old.group_id}_g{sibling}",
            reward=1.0,
            tokens=10,
            end_weight_version=self.version,
        )
        self.ledger.finish_sibling(ordinal, one)
        finished = sorted((*old.finished, one), key=lambda one: one.sibling)
        self.put(ordinal, finished=tuple(finished))

    @precondition(lambda self: self.in_state("waiting"))
    @rule(data=st.data())
    def forget_siblings(self, data: st.DataObject) -> None:
        ordinal = self.pick(data, "waiting")
        rows = tuple(one.sample_id for one in self.model[ordinal].finished)
        assert self.ledger.forget_siblings(ordinal) == rows
        self.put(ordinal, finished=())

    @precondition(lambda self: self.in_state("in_flight"))
    @rule(data=st.data(), cause=st.sampled_from(get_args(Cause)))
    def retry(self, data: st.DataObject, cause: Cause) -> None:
        ordinal = self.pick(data, "in_flight")
        self.ledger.retry(ordinal, cause)
        old = self.model[ordinal]
        self.put(
            ordinal,
            state="waiting",
            attempt=old.attempt + 1,
            infra_failures=old.infra_failures + (cause in ("infra", "commit")),
            data_failures=old.data_failures + (cause == "data"),
        )

    @precondition(lambda self: self.in_state("in_flight"))
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        ordinal = self.pick(data, "in_flight")
        kept = [one.sample_id for one in self.model[ordinal].finished]
        if len(kept) == G:
            group = self.ledger.commit(
                ordinal, rewards=[1.0] * G, tokens=30, end_weight_version=self.version, rows=kept
            )
            assert list(group.sample_ids) == kept
        else:
            commit(self.ledger, ordinal)
        self.put(ordinal, state="committed", finished=())
        self.commits.append(ordinal)

    @precondition(lambda self: self.in_state("committed"))
    @rule(data=st.data())
    def select(self, data: st.DataObject) -> None:
        groups = self.pick_groups(data, "committed")
        self.ledger.select(groups)
        for group in groups:
            self.put(group.ordinal, state="selected")

    @precondition(lambda self: self.in_state("selected"))
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        groups = self.pick_groups(data, "selected")
        self.ledger.abandon(groups)
        for group in groups:
            self.put(group.ordinal, state="committed")

    @precondition(lambda self: self.in_state("selected"))
    @rule(data=st.data())
    def train(self, data: st.DataObject) -> None:
        groups = self.pick_groups(data, "selected")
        self.ledger.train(groups)
        for group in groups:
            self.remove(group.ordinal)
        self.gone["trained"] += len(groups)
        self.version += 1

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        ordinal = self.pick(data, *get_args(State))
        assert self.ledger.drop(ordinal, "model") == self.model[ordinal]
        self.remove(ordinal)
        self.gone["dropped"] += 1

    def remove(self, ordinal: int) -> None:
        if self.model.pop(ordinal).state in ("committed", "selected"):
            self.commits.remove(ordinal)

    @precondition(lambda self: self.in_state("committed"))
    @rule(data=st.data())
    def requeue(self, data: st.DataObject) -> None:
        ordinal = self.pick(data, "committed")
        self.ledger.requeue(ordinal)
        old = self.model[ordinal]
        ahead = old.target_step is not None and old.target_step >= self.version
        self.put(
            ordinal,
            state="waiting",
            attempt=old.attempt + 1,
            stale_requeues=old.stale_requeues + 1,
            target_step=old.target_step if ahead else None,
            start_weight_version=None,
        )
        self.commits.remove(ordinal)

    @precondition(lambda self: self.in_state("in_flight"))
    @rule(data=st.data(), again=st.booleans())
    def abort(self, data: st.DataObject, again: bool) -> None:
        ordinal = self.pick(data, "in_flight")
        left, old = self.ledger.abort(ordinal, requeue=again), self.model[ordinal]
        if not again:
            assert left == old
            self.remove(ordinal)
            self.gone["dropped"] += 1
            return
        ahead = old.target_step is not None and old.target_step >= self.version
        self.put(
            ordinal,
            state="waiting",
            attempt=old.attempt + 1,
            stale_requeues=old.stale_requeues + 1,
            target_step=old.target_step if ahead else None,
            start_weight_version=None,
            finished=(),
        )

    @rule()
    def restart(self) -> None:
        self.ledger = restored(self.ledger)
        for ordinal in self.in_state("in_flight"):
            self.put(ordinal, state="waiting", attempt=self.model[ordinal].attempt + 1)
        for ordinal in self.in_state("selected"):
            self.put(ordinal, state="committed")

    @invariant()
    def agrees(self) -> None:
        ledger, model = self.ledger, self.model
        ledger.audit()
        assert ledger.records() == tuple(model[ordinal] for ordinal in sorted(model))
        assert [group.ordinal for group in ledger.index.groups()] == self.commits
        assert (ledger.step, ledger.weight_version) == (self.version, self.version)
        assert all(ledger.counters[name] == count for name, count in self.gone.items())
        records = list(model.values())
        live = [record for record in records if record.admitted]
        assert ledger.live_count == len(live)
        assert ledger.unadmitted_count == len(records) - len(live)
        assert ledger.waiting_count == len(self.in_state("waiting"))
        assert ledger.in_flight_count == len(self.in_state("in_flight"))
        waiting = self.in_state("waiting")
        first = ledger.next_waiting()
        assert (first and first.ordinal) == min(waiting, default=None)
        for target in range(4):
            assert ledger.live_of_target(target) == sum(r.target_step == target for r in live)
        for version in range(self.version + 1):
            assert ledger.in_flight_of_version(version) == sum(
                r.start_weight_version == version and r.state in ("waiting", "in_flight")
                for r in records
            )
        versions = [r.start_weight_version for r in live if r.state != "selected"]
        assert ledger.oldest_live_version() == min(
            (v for v in versions if v is not None), default=None
        )

    @invariant()
    def the_digest_that_is_kept_up_is_that_of_the_bytes(self) -> None:
        cut = cut_of(self.ledger)
        kept = cut_digest(
            cut, groups_digest=self.ledger.index.digest, records_digest=self.ledger.digest
        )
        assert cut_digest(decode_cut(encode_cut(cut))) == kept


TestLedgerModel = LedgerModel.TestCase
TestLedgerModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
