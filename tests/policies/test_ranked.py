"""Policies that rank sessions by a number, and the order of numbers that change."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from manthan.policies import SessionView
from manthan.policies.lru import LRU
from manthan.policies.ranking import Ranking


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 7).map(str), st.booleans()), max_size=60))
def test_lru_orders_by_the_last_use_whatever_size_and_uses(requests: list[tuple[str, bool]]) -> None:
    policy = LRU()
    for number, (name, leaves) in enumerate(requests):
        if leaves:
            policy.forget(name)
        policy.used(SessionView(name, number * 997 % 13, number * 991 % 17, last_used=float(number), uses=number % 5))
    last = {name: number for number, (name, _) in enumerate(requests)}
    order = list(policy.victims())
    assert order == sorted(last, key=last.__getitem__)
    for victim in order:  # one look gives the order in which they go one by one
        assert next(policy.victims()) == victim
        policy.evicted(victim)


def test_a_ranking_orders_by_the_last_numbers_and_stays_small() -> None:
    rng, ranking = random.Random(0), Ranking()
    expected: dict[str, tuple[int, int]] = {}
    for step in range(20_000):
        key = f"k{rng.randrange(40)}"
        if rng.random() < 0.8:
            expected[key] = rng.randrange(10), step
            ranking.set(key, expected[key][0])
        else:
            expected.pop(key, None)
            ranking.discard(key)
        if step % 50 == 0:
            order = sorted(expected, key=expected.__getitem__)
            gone, seen = set(rng.sample(order, len(order) // 4)), []
            for passed in ranking.in_order():
                seen.append(passed)
                if passed in gone:
                    expected.pop(passed)
                    ranking.discard(passed)
            assert seen == order
        first = ranking.first()
        assert (first and first.key) == min(expected, key=expected.__getitem__, default=None)
        assert (len(ranking._entries), key in ranking) == (len(expected), key in expected)
    for step in range(20_000):
        ranking.set(f"k{step % 500}", step)
        assert len(ranking._heap) <= 2 * len(ranking._entries) + 65
