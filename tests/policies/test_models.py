"""LRU, FIFO and LFU against models that say the same in the plainest way."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manthan.policies import EvictionPolicy, SessionView, get_policy
from manthan.policies.lfu import LFU, LFUOptions

Requests = list[tuple[str, bool]]
NAMES = st.integers(0, 7).map(str)
REQUESTS = st.lists(st.tuples(NAMES, st.booleans()), max_size=60)
"""Whose request, and whether the session leaves first."""


def run(policy: EvictionPolicy, requests: Requests, gap_s: float = 1) -> list[str]:
    uses: dict[str, int] = {}
    for number, (name, leaves) in enumerate(requests):
        if leaves:
            policy.forget(name)
        uses[name] = uses.get(name, 0) + 1
        begin = next(i for i, (other, _) in enumerate(requests) if other == name)
        view = SessionView(name, created=begin * gap_s, last_used=number * gap_s, uses=uses[name])
        policy.used(view)
        policy.used(view)
    return list(policy.victims())


@settings(deadline=None)
@given(REQUESTS)
def test_lru(requests: Requests) -> None:
    last = {name: number for number, (name, _) in enumerate(requests)}
    assert run(get_policy("lru")(), requests) == sorted(last, key=last.__getitem__)


@settings(deadline=None)
@given(REQUESTS)
def test_fifo(requests: Requests) -> None:
    entered: dict[str, int] = {}
    for number, (name, leaves) in enumerate(requests):
        entered[name] = number if leaves else entered.get(name, number)
    assert run(get_policy("fifo")(), requests) == sorted(entered, key=entered.__getitem__)


@pytest.mark.parametrize("half_life_s", [1, 5, 10_000])
@settings(deadline=None)
@given(requests=REQUESTS, gap_s=st.sampled_from([0.0, 0.3, 7.0]))
def test_lfu(half_life_s: float, requests: Requests, gap_s: float) -> None:
    times: dict[str, list[float]] = {}
    first: dict[str, float] = {}
    uses: dict[str, int] = {}
    for number, (name, leaves) in enumerate(requests):
        now = number * gap_s
        begin = first.setdefault(name, now)
        uses[name] = uses.get(name, 0) + 1
        if leaves and uses[name] > 1:  # who enters with a history is taken to have come at even distances
            times[name] = [begin + (now - begin) * i / (uses[name] - 1) for i in range(uses[name])]
        else:
            times.setdefault(name, []).append(now)
    end = len(requests) * gap_s
    count = {name: sum(2 ** ((t - end) / half_life_s) for t in times[name]) for name in times}
    order = run(LFU(LFUOptions(half_life_s=half_life_s)), requests, gap_s)
    assert set(order) == set(count)
    assert all(count[a] <= count[b] * (1 + 1e-9) for a, b in pairwise(order))
