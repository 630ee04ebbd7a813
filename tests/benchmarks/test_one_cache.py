"""One cache against a plain one, and the clairvoyant bound against all choices that there are."""

from collections import OrderedDict
from collections.abc import Sequence
from functools import cache
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from traces import BLOCK, agent_requests, request

from manthan.benchmarks.simulator.one_cache import clairvoyant, one_cache
from manthan.benchmarks.simulator.traces import MOONCAKE_BLOCK_TOKENS, TracedRequest
from manthan.policies import SessionView, get_policy
from manthan.policies.lru import LRU

TEXTS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=6)


def run_length(hashes: Sequence[bytes], kept: object) -> int:
    return next((at for at, one in enumerate(hashes) if one not in kept), len(hashes))  # type: ignore[operator]


def best_of_all(requests: Sequence[TracedRequest], capacity: int) -> int:
    """Return the blocks found by the best of all choices of what to keep after each request."""

    @cache
    def best(number: int, kept: frozenset[bytes]) -> int:
        if number == len(requests):
            return 0
        hashes = requests[number].hashes
        known = sorted(kept | set(hashes))
        choices = map(frozenset, combinations(known, min(capacity, len(known))))
        return run_length(hashes, kept) + max(best(number + 1, choice) for choice in choices)

    return best(0, frozenset())


@given(TEXTS, st.integers(1, 4))
def test_no_choice_finds_more_than_the_clairvoyant_and_one_as_much(texts: list[str], capacity: int) -> None:
    requests = [request(float(at), text) for at, text in enumerate(texts)]
    assert sum(clairvoyant(requests, capacity, BLOCK)) == best_of_all(requests, capacity)


@given(st.lists(st.sampled_from(["aa", "bbb", "cc", "dddd"]), max_size=12), st.integers(1, 12))
def test_one_cache_of_lru_is_a_plain_cache_of_sessions(prompts: list[str], capacity: int) -> None:
    """Prompts that share nothing. The tail of the session unused for longest goes first, and no more than is needed."""
    requests = [request(float(at), prompt) for at, prompt in enumerate(prompts)]
    kept, expected = OrderedDict[str, int](), []
    for prompt in prompts:
        expected.append(kept.pop(prompt, 0))
        kept[prompt] = len(prompt)
        while (over := sum(kept.values()) - capacity) > 0:
            first = next(iter(kept))
            kept[first] -= min(over, kept[first])
            if not kept[first]:
                del kept[first]
    assert one_cache(requests, get_policy("lru"), None, capacity, BLOCK) == expected


def test_the_last_token_is_always_computed() -> None:
    for rest, found in ((1, 3), (0, 2)):
        requests = [request(float(at), "abc", rest=rest) for at in range(2)]
        assert clairvoyant(requests, 9, BLOCK) == one_cache(requests, get_policy("lru"), None, 9, BLOCK) == [0, found]


def test_policies_are_told_how_the_last_answer_ended() -> None:
    told = []

    class Hearing(LRU):
        def used(self, session: SessionView) -> None:
            told.append(session.ending)
            super().used(session)

    requests = [request(0.0, "a")._replace(stop="tool_use"), request(1.0, "ab")._replace(tool="grep")]
    one_cache(requests, Hearing, None, 9, BLOCK)
    assert {"", "tool_use", "grep"} == set(told)
    assert told[-1] == "grep"


@pytest.mark.slow
@pytest.mark.parametrize(("percent", "bar"), [(1, 0.6), (2, 0.6), (5, 0.5)])
def test_returns_closes_half_of_the_gap_on_agents(percent: int, bar: float) -> None:
    requests = agent_requests()
    capacity = len({one for each in requests for one in each.hashes}) * percent // 100
    best = sum(clairvoyant(requests, capacity, MOONCAKE_BLOCK_TOKENS))
    lru, returns = (
        sum(one_cache(requests, get_policy(name), None, capacity, MOONCAKE_BLOCK_TOKENS)) for name in ("lru", "returns")
    )
    assert returns - lru >= bar * (best - lru) > 0
