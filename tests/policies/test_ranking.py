"""An order of keys whose numbers change, against one that is sorted anew each time."""

import random

import pytest

from manthan.policies.ranking import Ranking


@pytest.mark.parametrize("seed", range(20))
def test_the_order_is_that_of_the_last_numbers(seed: int) -> None:
    rng, ranking = random.Random(seed), Ranking()
    expected: dict[str, tuple[int, int]] = {}
    for step in range(3000):
        key = f"k{rng.randrange(40)}"
        if rng.random() < 0.8:
            expected[key] = rng.randrange(10), step
            ranking.set(key, expected[key][0])
        else:
            expected.pop(key, None)
            ranking.discard(key)
        if step % 50 == 0:
            order = sorted(expected, key=expected.__getitem__)
            gone = set(rng.sample(order, len(order) // 4))
            seen = []
            for passed in ranking.in_order():
                seen.append(passed)
                for name in gone & {passed}:
                    expected.pop(name)
                    ranking.discard(name)
            assert seen == order
        first = min(expected, key=expected.__getitem__, default=None)
        entry = ranking.first()
        assert (entry and entry[2]) == first
        assert len(ranking) == len(expected)
        assert (key in ranking) == (key in expected)


def test_what_is_out_of_date_does_not_pile_up() -> None:
    ranking = Ranking()
    most = 0
    for step in range(20_000):
        ranking.set(f"k{step % 500}", step)
        most = max(most, len(ranking._heap) + len(ranking._old))
    assert most < 4 * 500
