"""Every policy on the real engine: forty sessions, where the pool holds five and the cold store ten."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
from vllm.distributed.kv_transfer import get_kv_transfer_group

from manthan.policies import policy_names

pytestmark = pytest.mark.slow
"""Each policy has the manager's side of this in tests/manager, and other engines' tests run under pressure too."""
SESSIONS = 40
RETURNS = 50
OPTIONS = {"returns": {"window": 64, "refit_every": 8}}
"""Of policies that would not get to learn anything in so short a test."""


def store_figures(worker: Any) -> tuple[int, int]:
    """Peak bytes of the worker's store, and its budget."""
    store = get_kv_transfer_group().worker.path.store
    return store.peak, store.max_bytes


@pytest.fixture(scope="module", params=policy_names())
def pressed(request: pytest.FixtureRequest, start_engine: Any) -> Iterator[Any]:
    policy = {"name": request.param, **OPTIONS.get(request.param, {})}
    yield from start_engine(blocks=96, idle_after_s=3600, cold_store={"max_bytes": 190 * 25856}, policy=policy)


def test_answers_are_right_under_pressure(pressed, table) -> None:
    tables = [
        table(seed) for seed in range(103, 103 + SESSIONS)
    ]  # exact KV answers all of these rightly, not all others
    chance = random.Random(0)
    order = [*range(SESSIONS), *(min(int(chance.expovariate(1 / 8)), SESSIONS - 1) for _ in range(RETURNS))]
    for turn, number in enumerate(order):
        prompt, right = tables[number].question(turn % 16)
        assert pressed.ask(prompt, f"user-{number}").text == right
    pressed.wait_until_quiet()
    assert pressed.metric("manthan_evictions_total") >= SESSIONS - 5
    assert pressed.metric("manthan_restores_total") > 0
    assert pressed.metric("manthan_dropped_blocks_total", cause="budget") > 0
    assert pressed.failures() == 0
    peak, budget = pressed.on_worker(store_figures)
    assert 0.9 * budget < peak <= budget
