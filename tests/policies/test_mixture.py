"""The policy `returns`: the leader that it follows, its shadows, and that it finds about as much as the best."""

import random
from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import EXCERPT

from manthan.benchmarks.simulator.one_cache import one_cache
from manthan.benchmarks.simulator.traces import read_trace
from manthan.policies import EvictionPolicy, SessionView
from manthan.policies.lru import LRU
from manthan.policies.returns import DECAY, LOOK_EVERY, SAMPLE, Contest, Mixture, Returns, ShadowCache

WORST = 0.01
"""Most that it may find less than lru, as a part of that."""


def view(name: str, at: float, uses: int = 1, nbytes: int = 1000, gap: float | None = None) -> SessionView:
    return SessionView(name, nbytes // 10, nbytes, last_used=at, uses=uses, gap=gap)


def in_and_out(policy: EvictionPolicy, session: SessionView) -> None:
    """A request begins and ends."""
    policy.used(session)
    policy.used(session)


def told(policy: EvictionPolicy) -> EvictionPolicy:
    """Sessions of different ages, sizes and numbers of requests."""
    for number in range(12):
        for uses in range(1, 1 + number * 5 % 7 + 1):
            in_and_out(policy, view(f"s{number}", 10.0 * number + uses, uses, 100 * (number * 7 % 11 + 1)))
    return policy


def test_lru_is_followed_until_the_prediction_has_surely_found_more() -> None:
    policy = told(Mixture())
    policy.superseded("s11")
    assert list(policy.victims()) == list(told(LRU()).victims())
    for _ in range(10):
        policy._contest.add([1000.0, 0.0])
    policy._contest.look()
    assert next(policy.victims()) == "s11"


def test_whoever_goes_on_from_the_middle_of_another_finds_its_kv_in_the_shadows() -> None:
    policy, forked = Mixture(), view("f", 2.0, 2, 800)._replace(created=1.0, left_tokens=50, added_tokens=30)
    in_and_out(policy, view("s", 1.0)._replace(created=1.0))
    policy.superseded("s")
    in_and_out(policy, forked)
    contest = policy._contest
    assert contest.found == [800 - 300] * 2
    assert all(set(shadow.kept) == {"f"} for shadow in policy._shadows)


@pytest.mark.slow
def test_a_crowd_of_sessions_is_sampled() -> None:
    policy, rng = Mixture(), random.Random(0)
    for number in range(12_000):
        in_and_out(policy, view(f"s{number}", float(number)))
        if number == SAMPLE:
            for running in range(100):
                policy.used(view(f"r{running}", float(number)))
        if number > 4000:
            back = rng.randrange(4000)
            in_and_out(policy, view(f"s{number - back}", number + 0.5, 2, gap=float(back)))
            for victim in policy.victims():
                policy.evicted(victim)
                break
    sizes = [len(shadow.kept) for shadow in policy._shadows]
    assert policy._mask
    assert SAMPLE / 4 < max(sizes) <= 2 * SAMPLE + LOOK_EVERY
    assert len(policy._told) < 20 * SAMPLE
    assert all(policy._is_sampled(name) for shadow in policy._shadows for name in shadow.kept)
    assert all(map(policy._is_sampled, policy._running))


def test_a_victim_that_loses_a_part_only_and_is_then_released_leaves_the_shadows() -> None:
    policy = Mixture()
    for number in range(4):
        in_and_out(policy, view(f"s{number}", float(number)))
    victim = next(iter(policy.victims()))
    policy.forget(victim)
    assert not any(victim in shadow.kept for shadow in policy._shadows)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 20), st.booleans(), st.booleans()), max_size=150))
def test_shadows_hold_nobody_who_is_over(events: list[tuple[int, bool, bool]]) -> None:
    """A session that is over leaves the shadows; a victim may stay there."""
    policy, over, uses = Mixture(), set[str](), dict[str, int]()
    for at, (number, is_over, is_full) in enumerate(events):
        name = f"s{number}"
        uses[name] = uses.get(name, 0) + 1
        over.discard(name)
        in_and_out(policy, view(name, float(at), uses[name]))
        if is_full:
            policy.evicted(next(iter(policy.victims())))
        elif is_over:
            policy.forget(name)
            over.add(name)
        for shadow in policy._shadows:
            assert shadow.nbytes == sum(shadow.kept.values())
            assert not over & set(shadow.kept)


@pytest.mark.parametrize("percent", [2, 20])
def test_it_is_never_much_worse_than_lru(percent: int) -> None:
    trace = read_trace(EXCERPT)
    found = {
        policy: sum(one_cache(trace.requests, policy, None, trace.distinct_blocks * percent // 100, trace.block_tokens))
        for policy in (LRU, Mixture)
    }
    assert found[Mixture] >= (1 - WORST) * found[LRU] > 0


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
        for _ in range(512):
            race([(rng.choice((0, 10)), rng.choice((0, 10)))], contest)
            changes += contest.leader != leader
            leader = contest.leader
    assert changes < 30, "looking after each request; without asking whether it is sure there are hundreds"


def test_findings_fade() -> None:
    contest = race([(100, 0)] + [(0, 0)] * 512 + [(0, 1)])
    assert contest.found == pytest.approx([50 * DECAY, 1])
    contest = Contest(("a", "b"), "a")
    for found in [(0, 1000)] * 5 + [(0, 0)] * 512:
        contest.add(found)
    contest.look()
    assert contest.leader == "b", "it is as sure as it was before"


ROOM = 1000
REQUESTS = st.lists(st.tuples(st.integers(0, 9).map(str), st.integers(1, 400), st.booleans()), max_size=80)
"""Session, bytes by which it grows, and whether it was over before."""


@given(REQUESTS)
def test_a_shadow_of_lru_is_a_plain_lru_cache(events: list[tuple[str, int, bool]]) -> None:
    shadow, books = ShadowCache(LRU()), ShadowCache(Returns())
    plain, sizes = OrderedDict[str, int](), dict[str, int]()
    for number, (name, more, is_over) in enumerate(events):
        if is_over:
            sizes.pop(name, None)
            plain.pop(name, None)
            shadow.forget(name)
        known = sizes.get(name, 0)
        sizes[name] = known + more
        session = SessionView(name, sizes[name], sizes[name], last_used=number, uses=number + 1)
        assert shadow.request(session, known, ROOM) == min(plain.pop(name, 0), known)
        plain[name] = sizes[name]
        while (over := sum(plain.values()) - ROOM) > 0:  # the tail of the one unused for longest goes first
            first, size = next(iter(plain.items()))
            plain[first] = size - over
            if size <= over:
                del plain[first]
        assert shadow.kept == plain
        books.request(session, known, ROOM)
        assert books.nbytes == sum(books.kept.values()) <= ROOM
        assert sorted(books.policy.victims()) == sorted(books.kept)
