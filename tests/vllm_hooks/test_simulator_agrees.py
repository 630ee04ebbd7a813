"""The simulator against a real engine: 130 requests, one after the other, more sessions than there is room for.

The engine says which requests it served; the simulator is told no more than their block hashes, lengths and order.
"""

from collections import Counter
from functools import partial
from typing import Any

import pytest
from scripts import run_script
from traces import watched
from vllm_engine import BLOCK

from manthan.benchmarks.simulator import engine
from manthan.benchmarks.simulator.engine import CostModel, Setup
from manthan.benchmarks.simulator.traces import TracedRequest
from manthan.policies import get_policy

POOL, COLD = 95, 200
CODE_NBYTES, EXACT_NBYTES = 25856, 131328
IDLE_AFTER_S, EVERY_S = 2.0, 1000.0
BURSTS = 0.0, 0.0
"""Watermarks for bursts: they follow an engine's steps, which the simulator does not have."""
INSTANT = CostModel(
    restore_s_per_token=1e-6,
    store_s_per_token=0,
    kv_bytes_per_token=EXACT_NBYTES / BLOCK,
    cold_bytes_per_token=CODE_NBYTES / BLOCK,
)
"""As the engine's threads are waited for after each step. What is stored in the step in which a request is restored is
settled before that request goes on."""


def real(policy: str, count: int) -> dict[str, Any]:
    """What an engine does."""
    manthan = {
        "policy": policy,
        "idle.min_tokens": 64,
        "idle": IDLE_AFTER_S,
        "codec": {"name": "k3v3", "sink_tokens": 0, "guard": False},  # blocks that all take as much
        "tiers": {"max_bytes": COLD * CODE_NBYTES},
    }
    job = {"blocks": POOL + 1, "requests": count, "seed": 7, "every_s": EVERY_S, "manthan": manthan, "bursts": BURSTS}
    report: dict[str, Any] = run_script("stepped_engine.py", job)[0]
    return report


def traced(number: int, said: dict[str, Any]) -> TracedRequest:
    hashes = [bytes.fromhex(name) for name in said["hashes"]]
    full = said["input_tokens"] // BLOCK
    return TracedRequest(number * EVERY_S, said["session"], hashes, full, said["input_tokens"], said["output_tokens"])


@pytest.mark.slow
def test_the_same_blocks_are_stored_dropped_and_restored_in_the_same_order(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = "lru"
    monkeypatch.setattr(engine, "Driver", partial(engine.Driver, bursts=BURSTS))
    report = real(policy, 130)
    requests = [traced(number, said) for number, said in enumerate(report["requests"])]
    setup = Setup(
        get_policy(policy),
        pool_blocks=POOL,
        cold_blocks=report["cold_blocks"],
        block_tokens=BLOCK,
        cost=INSTANT,
        idle_after_s=IDLE_AFTER_S,
        min_tokens=64,
    )
    world = watched(requests, setup)
    what = ("store", "drop", "restore")
    simulated = [[action.what, name.hex()] for action in world.journal if action.what in what for name in action.hashes]
    assert min(Counter(action[0] for action in simulated).values()) > 15
    assert [list(served[1:3]) for served in world.tally.served if served] == [
        said["found"] for said in report["requests"]
    ]
    assert simulated == report["actions"]
