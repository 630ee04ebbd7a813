"""Three FIFO queues: small, main and ghosts."""

import random
from collections import Counter, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_place import Place

from manthan.policies.s3fifo import S3FIFO, S3FIFOOptions


def in_main(*session_ids: str, nbytes: int = 1) -> Place:
    """A place whose main queue has these, without a hit to their credit, and whose small queue has nobody."""
    place = Place("s3fifo")
    for session_id in session_ids:
        place.request(*[session_id] * 3, nbytes=nbytes)
    place.request("last", nbytes=nbytes)
    assert place.evict() == "last"
    return place


def test_who_came_once_leaves_early_and_who_comes_often_stays() -> None:
    place = Place("s3fifo", capacity=10)
    place.request("often", "often", "often", *(f"s{number}" for number in range(100)))
    assert "often" in place.present


def test_who_came_back_only_once_leaves_too() -> None:
    place = Place("s3fifo", capacity=10)
    assert place.request("twice", "twice", *(f"s{number}" for number in range(10))) == ["twice"]


def test_who_comes_back_as_a_ghost_enters_the_main_queue() -> None:
    place = Place("s3fifo", capacity=3)
    place.request("a", "b", "c", "d")
    assert place.request("a") == ["b"]
    place.request("e", "f")
    assert list(place.policy.victims()) == ["e", "f", "a"]


def test_ghosts_are_forgotten_in_the_end() -> None:
    place = Place("s3fifo", capacity=10)
    place.request(*(f"s{number}" for number in range(1000)))
    place.request("s985", "s0")
    assert list(place.policy.victims())[-2:] == ["s0", "s985"]


def test_forgetting_leaves_no_ghost_and_takes_none_away() -> None:
    place = Place("s3fifo", capacity=3)
    place.request("a", "b", "c", "d")
    place.policy.forget("a")  # a ghost
    place.policy.forget("d")
    del place.present["d"]
    place.request("d", "a", "e")
    assert list(place.policy.victims()) == ["d", "e", "a"]


def test_a_use_is_worth_another_round_in_the_main_queue() -> None:
    place = in_main("a", "b", "c")
    place.request("a")
    assert list(place.policy.victims()) == ["b", "c", "a"]


def test_a_round_costs_a_use() -> None:
    place = in_main("a", "b", "c")
    place.request("a")
    assert place.evict() == "b"  # a was passed, and has nothing left
    place.request("c")
    assert list(place.policy.victims()) == ["a", "c"]


def test_three_uses_are_as_many_as_count() -> None:
    place = in_main("a", "b")
    place.request(*["a"] * 10, *["b"] * 3)
    assert list(place.policy.victims()) == ["a", "b"]


@pytest.mark.parametrize(("share", "nbytes", "first"), [(0.1, 5, "big"), (0.1, 20, "new"), (0.01, 5, "new")])
def test_the_small_queue_gives_way_above_its_share_of_the_bytes(share: float, nbytes: int, first: str) -> None:
    place = in_main("big", nbytes=100)
    place.policy.options = S3FIFOOptions(small_share=share)
    place.request("new", nbytes=nbytes)
    assert next(place.policy.victims()) == first


class Plain:
    """The same in so many words: queues are moved on when somebody is evicted, and nobody looks ahead."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.small: deque[str] = deque()
        self.main: deque[str] = deque()
        self.ghosts: deque[str] = deque()
        self.hits: Counter[str] = Counter()

    def request(self, name: str) -> list[str]:
        if name in self.small or name in self.main:
            self.hits[name] = min(3, self.hits[name] + 1)
            return []
        gone = [self.evict()] if len(self.small) + len(self.main) == self.capacity else []
        self.hits[name] = 0
        if name in self.ghosts:
            self.ghosts.remove(name)
            self.main.append(name)
        else:
            self.small.append(name)
        return gone

    def evict(self) -> str:
        while len(self.small) >= 0.1 * (len(self.small) + len(self.main)):
            name = self.small.popleft()
            if self.hits[name] <= 1:
                self.ghosts.append(name)
                if len(self.ghosts) > 0.9 * self.capacity:
                    self.ghosts.popleft()
                return name
            self.hits[name] = 0
            self.main.append(name)
        while self.hits[name := self.main.popleft()]:
            self.hits[name] -= 1
            self.main.append(name)
        return name


@settings(deadline=None)
@given(st.lists(st.integers(0, 30).map(str), max_size=300), st.integers(1, 20))
def test_evictions_are_those_of_the_plain_algorithm(names: list[str], capacity: int) -> None:
    place, plain = Place(S3FIFO(), capacity), Plain(capacity)
    for name in names:
        assert place.request(name) == plain.request(name)


@pytest.mark.parametrize("capacity", [3, 10, 30, 60])
def test_the_same_with_favourites(capacity: int) -> None:
    place, plain, rng = Place(S3FIFO(), capacity), Plain(capacity), random.Random(capacity)
    for _ in range(5000):
        name = str(int(100 * rng.random() ** 3))
        assert place.request(name) == plain.request(name)


def test_who_was_passed_over_comes_up_once_when_another_goes_meanwhile() -> None:
    place = in_main("main")
    place.request("main", "often", "often", "often", "once")
    victims = place.policy.victims()
    assert next(victims) == "once"
    place.policy.evicted("once")  # which moves `often` to the main queue, and `main` to its end
    assert list(victims) == ["often", "main"]


def test_an_eviction_moves_nobody_who_has_left() -> None:
    place = in_main("a", "b", "c")
    place.request("a")
    assert next(place.policy.victims()) == "b"  # a was passed
    place.policy.forget("a")
    place.policy.evicted("b")
    assert list(place.policy.victims()) == ["c"]


def test_an_eviction_does_not_take_back_a_hit_that_came_since_one_looked() -> None:
    place = in_main("a", "b", "c")
    place.request("a")
    assert next(place.policy.victims()) == "b"
    place.request("a")  # two hits now
    place.policy.evicted("b")
    place.request("c")
    assert list(place.policy.victims()) == ["c", "a"]


def test_each_eviction_of_a_look_moves_only_whom_it_passed_itself() -> None:
    place = in_main("a", "b", "c", "d", "e")
    place.request("a", "a", "c")
    victims = place.policy.victims()
    for victim in ("b", "d"):
        assert next(victims) == victim
        place.policy.evicted(victim)
    place.request("e")  # the queue is e, a, c; the hits are 1, 1, 0
    assert list(place.policy.victims()) == ["c", "e", "a"]


def test_who_leaves_after_being_passed_over_does_not_come_up_again() -> None:
    place = in_main("a", "b", "c")
    place.request("a", "b")
    victims = place.policy.victims()
    assert next(victims) == "c"
    place.policy.forget("a")
    assert list(victims) == ["b"]
