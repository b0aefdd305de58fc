"""`Places`: capacity is held in a name, given back once, and handed on without a gap."""

from __future__ import annotations

import pickle

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sc_core.errors import ConfigError, PlaceAlreadyHeld, PlaceNotHeld
from sc_core.places import Places, PlacesStatistics


def test_a_place_is_taken_in_a_name_and_given_back() -> None:
    places = Places(2)
    places.take("a")
    assert (places.capacity, places.held, places.free) == (2, 1, 1)
    places.take("b")
    assert places.statistics() == PlacesStatistics(capacity=2, held=2, free=0, holders=("a", "b"))
    assert repr(places) == "<Places 2 of 2 held>"
    places.release("a")
    assert places.holders() == ("b",)
    assert places.free == 1


def test_taking_when_none_is_free_would_block_and_changes_nothing() -> None:
    places = Places(1)
    places.take("a")
    with pytest.raises(anyio.WouldBlock):
        places.take("b")
    assert places.holders() == ("a",)


def test_a_name_holds_one_place_at_most() -> None:
    places = Places(2)
    places.take("a")
    for again in (places.take, places.restore):
        with pytest.raises(ValueError, match="'a' already holds a place"):
            again("a")
    assert places.held == 1


def test_a_name_that_holds_a_place_is_told_so_even_when_none_is_free() -> None:
    places = Places(1)
    places.take("a")
    with pytest.raises(PlaceAlreadyHeld):
        places.take("a")


def test_a_place_is_given_back_once() -> None:
    places = Places(1)
    places.take("a")
    places.release("a")
    with pytest.raises(KeyError, match="'a' holds no place: it was released twice"):
        places.release("a")
    assert places.free == 1


def test_restored_names_get_a_place_beyond_the_capacity() -> None:
    places = Places(1)
    for name in "abc":
        places.restore(name)
    assert (places.held, places.free) == (3, 0)
    places.release("a")
    places.release("b")
    with pytest.raises(anyio.WouldBlock):
        places.take("d")
    places.release("c")
    places.take("d")


def test_a_transfer_passes_the_place_on_without_freeing_it() -> None:
    places = Places(1)
    places.restore("first attempt")
    places.restore("other")
    places.transfer("first attempt", "second attempt")
    assert places.holders() == ("other", "second attempt")
    with pytest.raises(PlaceNotHeld):
        places.transfer("first attempt", "third attempt")
    with pytest.raises(PlaceAlreadyHeld):
        places.transfer("second attempt", "other")
    assert places.holders() == ("other", "second attempt")


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_capacity_that_admits_nobody_is_refused(capacity: int) -> None:
    with pytest.raises(ConfigError, match=f"at least 1, got {capacity}"):
        Places(capacity)


@pytest.mark.parametrize("error", [PlaceNotHeld("'a'"), PlaceAlreadyHeld("'a'")])
def test_the_errors_survive_pickling(error: Exception) -> None:
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@given(
    st.integers(1, 3),
    st.lists(st.tuples(st.sampled_from(["take", "restore", "release"]), st.integers(0, 4))),
)
@settings(max_examples=200, deadline=None)
def test_places_agree_with_a_set_of_names(capacity: int, steps: list[tuple[str, int]]) -> None:
    places, held = Places(capacity), set()
    for verb, name in steps:
        try:
            getattr(places, verb)(name)
        except PlaceAlreadyHeld:
            assert verb != "release" and name in held
        except PlaceNotHeld:
            assert verb == "release" and name not in held
        except anyio.WouldBlock:
            assert verb == "take" and name not in held and len(held) >= capacity
        else:
            held ^= {name}
        assert set(places.holders()) == held
        assert places.free == max(0, capacity - len(held))
