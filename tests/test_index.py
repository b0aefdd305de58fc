from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from sc_core import ordered
from sc_core.digest import MODULUS, group_digest
from sc_core.index import ReplayIndex
from sc_core.ports import IndexView
from sc_core.records import Group, GroupId, group_id, sample_ids


def group(
    ordinal: int,
    *,
    attempt: int = 0,
    version: int = 0,
    target: int | None = None,
    commit_seq: int | None = None,
) -> Group:
    name = group_id(ordinal, attempt)
    return Group(
        group_id=name,
        ordinal=ordinal,
        sample_ids=sample_ids(name, 2),
        start_weight_version=version,
        end_weight_version=version,
        commit_seq=ordinal if commit_seq is None else commit_seq,
        target_step=target,
    )


def index_of(*groups: Group) -> ReplayIndex:
    index = ReplayIndex()
    for each in groups:
        index.add(each)
    return index


def views(index: ReplayIndex) -> tuple[Any, ...]:
    """Everything there is to see."""
    versions, targets = index.ready_versions(), index.ready_targets()
    return (
        index.ready_count,
        index.selected_count,
        list(index.ready_in_commit_order()),
        {version: list(index.ready_of_version(version)) for version in versions},
        {target: list(index.ready_of_target(target)) for target in (None, *targets)},
        index.groups(),
        index.digest,
    )


def test_orders_of_ready_groups() -> None:
    a = group(7, version=1, target=2, commit_seq=0)
    b = group(3, version=1, target=2, commit_seq=1)
    c = group(5, version=0, target=2, commit_seq=2)
    d = group(1, version=0, commit_seq=3)
    index: IndexView = index_of(c, a, d, b)
    assert list(index.ready_in_commit_order()) == [a, b, c, d]
    assert list(index.ready_of_version(1)) == [b, a]
    assert list(index.ready_of_target(2)) == [c, b, a]
    assert list(index.ready_of_target(None)) == [d]
    assert list(index.ready_of_target(3)) == list(index.ready_of_version(2)) == []
    assert list(index.ready_versions()) == [0, 1]
    assert list(index.ready_targets()) == [2]


def test_unselected_groups_are_back_in_their_old_places() -> None:
    groups = [group(n, version=n % 2, target=n % 3) for n in range(9)]
    index = index_of(*groups)
    before = views(index)
    index.select([groups[4], groups[0]])
    assert list(index.ready_in_commit_order()) == [*groups[1:4], *groups[5:]]
    assert index.is_selected(groups[4].group_id)
    assert not index.is_selected(groups[1].group_id)
    assert views(index) != before
    index.unselect([groups[0], groups[4]])
    assert views(index) == before


def test_replacing_moves_a_group_in_the_orders() -> None:
    index = index_of(group(0, target=5), group(1, target=5))
    index.select([group(1)])
    for ordinal in (0, 1):
        index.replace(group(ordinal, target=6))
    assert list(index.ready_of_target(5)) == []
    assert list(index.ready_of_target(6)) == [group(0, target=6)]
    index.unselect([group(1)])
    assert list(index.ready_of_target(6)) == [group(0, target=6), group(1, target=6)]
    assert index.digest == index_of(group(1, target=6), group(0, target=6)).digest


A, B = group(0), group(1)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda i: i.add(A), ValueError, "0.0 of prompt 0 can't be added"),
        (lambda i: i.add(group(0, attempt=1)), ValueError, "the index has group 0.0"),
        (
            lambda i: i.add(replace(group(9), group_id=A.group_id)),
            ValueError,
            "the index has group 0.0",
        ),
        (lambda i: i.select([A, group(2)]), KeyError, "2.0 is not in the index"),
        (lambda i: i.select([A, B]), ValueError, "1.0 is selected already"),
        (lambda i: i.select([A, A]), ValueError, "0.0 was given twice"),
        (lambda i: i.unselect([B, A]), ValueError, "0.0 is ready already"),
        (lambda i: i.unselect([B, B]), ValueError, "1.0 was given twice"),
        (lambda i: i.remove(GroupId("5.0")), KeyError, "5.0 is not in the index"),
        (lambda i: i.replace(group(0, attempt=1)), KeyError, "0.1 is not in the index"),
        (
            lambda i: i.replace(replace(group(9), group_id=A.group_id)),
            ValueError,
            "0.0 is of prompt 0, not 9",
        ),
    ],
)
def test_a_refused_change_changes_nothing(
    call: Callable[[ReplayIndex], object], error: type[Exception], message: str
) -> None:
    index = index_of(A, B)
    index.select([B])
    before = views(index)
    with pytest.raises(error, match=message):
        call(index)
    assert views(index) == before


def test_taking_a_few_of_many_touches_a_few() -> None:
    class Counting(dict[int, Group]):
        read = 0

        def __getitem__(self, ordinal: int) -> Group:
            self.read += 1
            return super().__getitem__(ordinal)

    index = index_of(*(group(n, version=n % 4, target=n % 5) for n in range(5000)))
    groups = index._groups = Counting(index._groups)
    for iterator in (
        index.ready_in_commit_order(),
        index.ready_of_version(3),
        index.ready_of_target(4),
    ):
        assert len(list(islice(iterator, 32))) == 32
    assert index.ready_versions() == (0, 1, 2, 3)
    assert groups.read == 3 * 32


def test_a_change_ends_iterators_instead_of_skipping() -> None:
    index = index_of(*(group(n) for n in range(4)))
    with pytest.raises(RuntimeError, match="changed during iteration"):
        for each in index.ready_in_commit_order():
            index.remove(each.group_id)


class IndexModel(RuleBasedStateMachine):
    """The index beside a plain dict of groups, each ready or selected."""

    def __init__(self) -> None:
        super().__init__()
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(ordered, "_BLOCK", 2)
        self.index = ReplayIndex()
        self.model: dict[GroupId, tuple[Group, bool]] = {}
        self.commits = 0

    def teardown(self) -> None:
        self._patch.undo()

    def some(self, data: st.DataObject, *, selected: bool) -> list[Group]:
        names = [name for name, (_, state) in self.model.items() if state is selected]
        chosen = data.draw(st.lists(st.sampled_from(names), unique=True)) if names else []
        return [self.model[name][0] for name in chosen]

    @rule(
        ordinal=st.integers(0, 40),
        attempt=st.integers(0, 1),
        version=st.integers(0, 4),
        meant_for=st.none() | st.integers(0, 4),
    )
    def add(self, ordinal: int, attempt: int, version: int, meant_for: int | None) -> None:
        new = group(
            ordinal, attempt=attempt, version=version, target=meant_for, commit_seq=self.commits
        )
        if any(there.ordinal == ordinal for there, _ in self.model.values()):
            with pytest.raises(ValueError, match="can't be added"):
                self.index.add(new)
            return
        self.index.add(new)
        self.model[new.group_id] = new, False
        self.commits += 1

    @rule(data=st.data(), selected=st.booleans())
    def move(self, data: st.DataObject, selected: bool) -> None:
        groups = self.some(data, selected=selected)
        (self.index.unselect if selected else self.index.select)(groups)
        for each in groups:
            self.model[each.group_id] = each, not selected

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        assert self.index.remove(name) == self.model.pop(name)[0]

    @precondition(lambda self: self.model)
    @rule(data=st.data(), version=st.integers(0, 4), meant_for=st.none() | st.integers(0, 4))
    def replace(self, data: st.DataObject, version: int, meant_for: int | None) -> None:
        old, selected = self.model[data.draw(st.sampled_from(sorted(self.model)))]
        new = replace(old, start_weight_version=version, target_step=meant_for)
        self.index.replace(new)
        self.model[new.group_id] = new, selected

    @invariant()
    def agrees(self) -> None:
        index, model = self.index, self.model
        everything = [each for each, _ in model.values()]
        ready = [each for each, selected in model.values() if not selected]
        assert len(index) == len(model)
        assert (index.ready_count, index.selected_count) == (len(ready), len(model) - len(ready))
        assert all(name in index and index.get(name) == each for name, (each, _) in model.items())
        assert all(index.is_selected(name) is state for name, (_, state) in model.items())
        assert index.groups() == tuple(sorted(everything, key=lambda g: g.commit_seq))
        assert index.digest == sum(map(group_digest, everything)) % MODULUS
        assert list(index.ready_in_commit_order()) == sorted(ready, key=lambda g: g.commit_seq)
        assert index.ready_versions() == tuple(sorted({g.start_weight_version for g in ready}))
        for version in range(5):
            assert list(index.ready_of_version(version)) == sorted(
                (g for g in ready if g.start_weight_version == version), key=lambda g: g.ordinal
            )
        targets = {g.target_step for g in ready if g.target_step is not None}
        assert index.ready_targets() == tuple(sorted(targets))
        for target in (None, *range(5)):
            assert list(index.ready_of_target(target)) == sorted(
                (g for g in ready if g.target_step == target),
                key=lambda g: (g.start_weight_version, g.ordinal),
            )


TestIndexModel = IndexModel.TestCase
TestIndexModel.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


def test_unknown_groups() -> None:
    index = index_of(A)
    assert index.get(GroupId("5.0")) is None
    assert GroupId("5.0") not in index
    assert not index.is_selected(GroupId("5.0"))
    assert repr(index) == "<ReplayIndex 1 ready, 0 selected>"
