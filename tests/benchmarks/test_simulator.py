"""Replays: what is found was there, budgets hold, and the same comes out twice."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import BLOCK, EXCERPT, check_journal, request, watched

from manthan.benchmarks.simulator.engine import CostModel, Setup, Tally, replay
from manthan.benchmarks.simulator.traces import TracedRequest, read_trace
from manthan.policies import get_policy, policy_names

LRU = Setup(get_policy("lru"), pool_blocks=1, block_tokens=BLOCK, min_tokens=0)
SLOW = CostModel(first_token_s=1, prefill_s_per_token=0.1, restore_s_per_token=0.05, store_s_per_token=0.2)


@pytest.fixture(scope="module")
def conversations() -> list[TracedRequest]:
    return read_trace(EXCERPT).requests


def found(tally: Tally) -> int:
    return sum(one.resident + one.restored for one in tally.served if one is not None)


def check(requests: list[TracedRequest], setup: Setup) -> None:
    """Check what must hold of every replay, and that the same comes out twice."""
    world, again = watched(requests, setup), watched(requests, setup)
    tally = world.tally
    assert (tally, world.journal, world.order) == (again.tally, again.journal, again.order)
    check_journal(world.journal, setup.cold_blocks)
    assert world.peak_cold <= setup.cold_blocks
    assert world.peak_used <= setup.pool_blocks
    assert sorted(world.order) == list(range(len(requests)))
    computed: set[bytes] = set()
    for number in world.order:
        one, served = requests[number], tally.served[number]
        assert served is not None, "a request was never answered"
        usable = one.hashes[: (one.input_tokens - 1) // setup.block_tokens]
        assert computed.issuperset(usable[: served.resident + served.restored])
        assert served.asked == -(-one.input_tokens // setup.block_tokens)
        computed.update(one.hashes)


# -- a pool and a cold store ------------------------------------------------------------------------------


def test_with_a_pool_for_all_nothing_goes_cold(conversations) -> None:
    setup = Setup(get_policy("lru"), pool_blocks=40000, cold_blocks=100, idle_after_s=1e9)
    tally = replay(conversations, setup)
    seen: set[bytes] = set()
    again = 0
    for one in conversations:
        again += sum(name in seen for name in one.hashes[: (one.input_tokens - 1) // 512])
        seen.update(one.hashes)
    assert found(tally) == again > 0
    assert (tally.stored, tally.restored, tally.evictions, tally.dropped) == (0, 0, 0, 0)


TEXTS = st.lists(
    st.tuples(st.floats(0, 8), st.text("ab", min_size=1, max_size=6), st.text("a", max_size=3), st.integers(0, 3)),
    min_size=1,
    max_size=14,
)


@given(TEXTS, st.integers(10, 20), st.integers(1, 20), st.sampled_from([0.5, 3.0, 1e9]))
@settings(deadline=None)
def test_whatever_comes_is_served_within_the_budgets(texts, hot, cold, idle_after_s) -> None:
    requests, now = [], 0.0
    for wait, text, answer, rest in texts:
        now += wait
        requests.append(request(now, text, answer=answer, rest=rest))
    setup = replace(LRU, pool_blocks=hot, cold_blocks=cold, cost=SLOW, idle_after_s=idle_after_s)
    check(requests, setup)


def test_a_request_waits_for_room() -> None:
    both = [request(0, "abcdef"), request(0, "ghijkl")]
    room, tight = replace(LRU, pool_blocks=14, cost=SLOW), replace(LRU, pool_blocks=8, cost=SLOW)
    alone = replay(both[:1], room).served[0]
    assert alone is not None
    assert [served.first_token_s for served in replay(both, room).served if served] == [alone.first_token_s] * 2
    served = replay(both, tight).served
    assert [one.first_token_s for one in served if one] == [alone.first_token_s, 2 * alone.first_token_s]


# -- what is counted --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_first_part_may_only_fill_the_caches(conversations) -> None:
    setup = Setup(get_policy("lru"), pool_blocks=600, cold_blocks=1000)
    whole, second = replay(conversations, setup), replay(conversations, replace(setup, first_measured=500))
    assert second.served == whole.served
    assert 0 < second.stored < whole.stored
    assert 0 < second.dropped < whole.dropped
    assert 0 < second.evictions < whole.evictions


@pytest.mark.parametrize("policy", policy_names())
def test_the_same_comes_out_twice_for_every_policy(conversations, policy) -> None:
    setup, some = Setup(get_policy(policy), pool_blocks=600, cold_blocks=800), conversations[:300]
    check(some, setup)


def test_the_cost_model_gives_back_what_it_was_derived_from() -> None:
    cost = CostModel()
    assert cost.first_token_s + cost.prefill_s(0, 32_000) == pytest.approx(1.2305)
    assert cost.first_token_s + 32_000 * cost.restore_s_per_token == pytest.approx(0.0511)
    assert cost.prefill_s(0, 100) + cost.prefill_s(100, 300) == pytest.approx(cost.prefill_s(0, 300))
