"""Which policy leads: another one takes over once it has surely found more, and not by chance."""

import random

import pytest

from manthan.policies.contest import GROWTH, HALF_LIFE, Contest


def race(found: list[tuple[float, float]], contest: Contest | None = None) -> Contest:
    contest = contest or Contest(("a", "b"), "a")
    for both in found:
        contest.add(both)
        contest.look()
    return contest


def test_one_large_session_is_chance_and_several_are_not() -> None:
    one = race([(0, 1000), (50, 50)])
    assert one.leader == "a"
    assert race([(0, 1000)] * 4, one).leader == "b"


def test_two_alike_seldom_change_places() -> None:
    changes = 0
    for seed in range(20):
        rng, contest, leader = random.Random(seed), Contest(("a", "b"), "a"), "a"
        for _ in range(HALF_LIFE):
            race([(rng.choice((0, 10)), rng.choice((0, 10)))], contest)
            changes += contest.leader != leader
            leader = contest.leader
    assert changes < 30, "looking after each request; without asking whether it is sure there are hundreds"


@pytest.mark.parametrize("growths", [HALF_LIFE, 600 * HALF_LIFE])
def test_what_was_found_fades(growths: int) -> None:
    contest = race([(100, 0)] * 50)
    for _ in range(growths):
        contest.add((0, 0))
    contest.add((0, 1))
    shown = [nbytes / contest._unit for nbytes in contest.found]
    assert shown == pytest.approx([sum(100 / GROWTH ** (growths + 1 + i) for i in range(50)), 1])
