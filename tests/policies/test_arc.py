"""Adaptive replacement: two lists, their ghosts, and how the share of each adapts."""

import pytest
from policy_place import Place


def test_who_was_used_once_goes_before_who_was_used_again() -> None:
    place = Place("arc")
    place.request("a", "b", "c", "d", "b", "a")
    assert list(place.policy.victims()) == ["c", "d", "b", "a"]


@pytest.mark.parametrize(("policy", "kept"), [("arc", 5), ("lru", 0)])
def test_a_scan_does_not_push_out_who_comes_back(policy: str, kept: int) -> None:
    working = [f"w{number}" for number in range(5)]
    place = Place(policy, capacity=10)
    place.request(*working, *working, *(f"s{number}" for number in range(100)))
    assert len(place.present.keys() & set(working)) == kept


@pytest.fixture
def place() -> Place:
    """Full: a was used again, and b, c, d once. x went to make room, and is a ghost of those that were used once."""
    place = Place("arc", capacity=4)
    assert place.request("a", "a", "x", "b", "c", "d") == ["x"]
    return place


def test_a_ghost_of_the_once_used_makes_room_for_their_kind(place: Place) -> None:
    assert place.request("x") == ["b"]
    assert list(place.policy.victims()) == ["c", "a", "x", "d"]  # one of them may stay: p = 1


def test_a_ghost_of_the_used_again_takes_the_room_back(place: Place) -> None:
    place.request("x", "d")
    assert place.request("e") == ["a"]  # c is as much as p = 1 grants
    assert place.request("a") == ["c"]
    assert list(place.policy.victims()) == ["e", "x", "d", "a"]  # p = 0


@pytest.mark.parametrize(("nbytes", "first"), [(2, "b"), (60, "a")])
def test_a_ghost_weighs_as_much_as_its_bytes(nbytes: int, first: str) -> None:
    place = Place("arc")
    place.request("a", "a", nbytes=10)
    place.request("x", nbytes=nbytes)
    place.request("b", nbytes=20)
    assert place.evict() == "x"
    place.request("x", nbytes=nbytes)
    assert next(place.policy.victims()) == first  # b is 20 bytes of those used once


def test_the_rarer_a_kind_of_ghosts_the_more_a_hit_weighs() -> None:
    place = Place("arc")
    place.request("a", "b", "c", "a", "b", "c")
    place.evict_all()
    place.request("x", "y", "z", "w")
    assert place.evict() == "x"
    place.request("x")  # the only ghost of those used once, beside three of the others: p = 3
    assert list(place.policy.victims()) == ["x", "y", "z", "w"]


def test_that_holds_for_both_kinds() -> None:
    place = Place("arc")
    place.request("x", "y", "z")
    place.evict_all()
    place.request("x", "y", "z")  # p = 3
    assert place.evict() == "x"
    place.request(*"abcdef")
    assert [place.evict() for _ in range(3)] == ["a", "b", "c"]
    place.request("x")  # the only ghost of those used again, beside three of the others: p = 0
    assert list(place.policy.victims()) == ["d", "e", "f", "y", "z", "x"]


@pytest.mark.parametrize(("uses", "ghost"), [(1, "s990"), (2, "s985")])
def test_ghosts_are_forgotten_in_the_end(uses: int, ghost: str) -> None:
    place = Place("arc", capacity=10)
    for number in range(1000):
        place.request(*[f"s{number}"] * uses)
    place.request(ghost, "s0")
    remaining = list(place.policy.victims())
    assert remaining.index("s0") < remaining.index(ghost)  # s0 is new, the ghost is not
    assert remaining[-1] == ghost


def test_forgetting_takes_no_ghost_away(place: Place) -> None:
    place.policy.forget("x")
    place.request("x")
    assert list(place.policy.victims()) == ["c", "a", "x", "d"]


def test_who_is_forgotten_leaves_no_ghost(place: Place) -> None:
    place.policy.forget("d")
    del place.present["d"]
    place.request("d")
    assert list(place.policy.victims()) == ["b", "c", "d", "a"]
