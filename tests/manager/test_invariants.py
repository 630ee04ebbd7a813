"""Invariants that hold under random requests, hints, stores, loads, failures and resets.

`make fuzz` runs the same machines for longer.
"""

from collections import Counter

import pytest
from examples import examples
from fuzz import run
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from machine import CONFIGURATIONS, PROFILE, Sessions
from world import Setup

from manthan.policies import policy_names

CAME: dict[str, tuple[str, ...]] = {
    "Sessions": ("loaded", "load failed", "Evicted", "Overwritten", "Pinned", "encoded exact"),
    "Points": ("loaded", "load failed", "dropped of 1: abandoned", "dropped of 1: budget", "encoded derived"),
    "Alone": ("loaded", "load failed", "dropped of 1: abandoned", "Evicted"),
}
"""Of some configurations, events without which a run proves little."""


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_invariants_hold(name: str) -> None:
    seen = run(CONFIGURATIONS[name], PROFILE)
    assert all(seen[what] for what in CAME.get(name, ())), f"too little has come to pass: {seen}"


@pytest.mark.parametrize("name", [name for name in policy_names() if name != Sessions.setup.policy])
def test_invariants_hold_under_every_policy(name: str) -> None:
    class SessionsOfPolicy(Sessions):
        setup = Setup(policy=name)

    run_state_machine_as_test(SessionsOfPolicy, settings=settings(PROFILE, max_examples=examples(60)))
