from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sc_core import ordered
from sc_core.ordered import OrderedKeys

KEYS = st.tuples(st.integers(0, 6), st.integers(0, 6))


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    """Blocks of two to three keys, so that a few keys already split and empty them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ordered, "_BLOCK", 2)
        yield


def blocks_are_sound(keys: OrderedKeys) -> bool:
    return (
        all(keys._blocks)
        and max(map(len, keys._blocks), default=0) < 2 * ordered._BLOCK
        and keys._last == [block[-1] for block in keys._blocks]
    )


@settings(max_examples=200)
@given(st.lists(KEYS, unique=True), st.lists(st.tuples(st.booleans(), KEYS), max_size=30))
def test_behaves_like_a_sorted_list(
    first: list[tuple[int, int]], changes: list[tuple[bool, tuple[int, int]]]
) -> None:
    keys, model = OrderedKeys(), set[tuple[int, int]]()
    for add, key in [*((True, key) for key in first), *changes]:
        if add and key not in model:
            keys.add(key)
            model.add(key)
        elif not add and key in model:
            keys.remove(key)
            model.remove(key)
        elif not add:
            with pytest.raises(KeyError):
                keys.remove(key)
        assert blocks_are_sound(keys)
    sorted_model = sorted(model)
    assert list(keys) == sorted_model
    assert len(keys) == len(model)
    assert keys.heads() == sorted({head for head, _ in model})
    for head in range(8):
        assert list(keys.at_or_after((head,))) == [k for k in sorted_model if k[0] >= head]
        assert list(keys.beginning(head)) == [k for k in sorted_model if k[0] == head]
    for probe in sorted_model:
        assert list(keys.at_or_after(probe)) == sorted_model[bisect_left(sorted_model, probe) :]


def test_removing_what_is_not_there_changes_nothing() -> None:
    keys = OrderedKeys()
    with pytest.raises(KeyError):
        keys.remove((1,))
    keys.add((1,))
    for missing in ((0,), (2,)):
        with pytest.raises(KeyError):
            keys.remove(missing)
    assert list(keys) == [(1,)]


@pytest.mark.parametrize("change", ["add", "remove"])
def test_a_change_ends_iterators(change: str) -> None:
    keys = OrderedKeys()
    for n in range(10):
        keys.add((n,))
    iterator = iter(keys)
    assert next(iterator) == (0,)
    keys.add((20,)) if change == "add" else keys.remove((0,))
    with pytest.raises(RuntimeError, match="changed during iteration"):
        next(iterator)


def test_emptied_blocks_are_given_up() -> None:
    keys = OrderedKeys()
    for n in range(1000):
        keys.add((n,))
        if n >= 10:
            keys.remove((n - 10,))
    assert len(keys) == 10
    assert len(keys._blocks) <= 10
