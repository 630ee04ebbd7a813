"""Invariants that hold under random requests, hints, stores, loads, failures and resets.

`make fuzz` runs the same machines for longer.
"""

from collections import Counter

import pytest
from examples import examples
from fuzz import run
from machine import CONFIGURATIONS, Sessions
from world import Setup

from manthan.policies import policy_names

CAME: dict[str, tuple[str, ...]] = {
    "Sessions": ("Evicted", "Overwritten", "Pinned", "StoreFailed", "dropped of 0: budget"),
    "Points": ("dropped of 1: abandoned", "dropped of 1: budget", "dropped of 1: failed"),
    "Alone": ("dropped of 1: abandoned", "dropped of 1: budget"),
}
"""Of some configurations, events without which a run proves little."""
OF_ALL = ("loaded", "load failed", "encoded exact", "encoded derived")


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_invariants_hold(name: str) -> None:
    seen: Counter[str] = Counter()
    for number in range(examples(10)):
        seen += run(CONFIGURATIONS[name], number)
    assert all(seen[what] for what in (*OF_ALL, *CAME.get(name, ()))), f"too little has come to pass: {seen}"


@pytest.mark.parametrize("name", [name for name in policy_names() if name != Sessions.setup.policy])
def test_invariants_hold_under_every_policy(name: str) -> None:
    class SessionsOfPolicy(Sessions):
        setup = Setup(policy=name)

    for number in range(examples(5)):
        run(SessionsOfPolicy, number)
