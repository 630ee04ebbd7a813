"""Invariants that hold under random requests, hints, stores, loads, failures and resets.

`make fuzz` runs the same machines for longer.
"""

import ast
import subprocess
import sys
from typing import Any

import fuzz
import pytest
from examples import examples
from machine import CONFIGURATIONS, Sessions
from world import Setup

from manthan.policies import policy_names

CAME: dict[str, tuple[str, ...]] = {
    "Sessions": ("Evicted", "Overwritten", "Pinned", "StoreFailed", "dropped of 0: budget"),
    "Points": ("dropped of 1: abandoned", "dropped of 1: budget", "dropped of 1: failed"),
    "Refined": ("cut to level 0", "cut to level 1", "cut to level 2", "cut to level 3", "dropped of 0: budget"),
    "RefinedPoints": ("cut to level 0", "cut to level 3"),
    "Alone": ("dropped of 1: abandoned", "dropped of 1: budget"),
}
"""Of some configurations, events without which a run proves little."""
LONGER = {"Two": 3, "RefinedPoints": 3, "Alone": 3}
"""Of some configurations, so many times more steps, until those have come to pass."""
OF_ALL = ("loaded", "load failed", "encoded exact", "encoded derived")
FAST = ("Sessions", "Points", "Refined", "Everything")
"""`make test` tries these: whatever a setup can have, one of them has."""


def configurations() -> list[Any]:
    return [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGURATIONS]


@pytest.mark.parametrize("name", configurations())
def test_invariants_hold(name: str) -> None:
    """In a process of its own: hypothesis draws from constants of all modules that are loaded."""
    steps = str(1300 * LONGER.get(name, 1) * examples(10))
    command = [sys.executable, fuzz.__file__, "--only", name, "--steps", steps]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-8000:]
    seen: dict[str, int] = ast.literal_eval(ended.stdout.splitlines()[-1].partition(": ")[2])
    assert not {*OF_ALL, *CAME.get(name, ())} - seen.keys(), f"too little has come to pass: {seen}"


@pytest.mark.parametrize("name", [name for name in policy_names() if name != Sessions.setup.policy])
def test_invariants_hold_under_every_policy(name: str) -> None:
    class SessionsOfPolicy(Sessions):
        setup = Setup(policy=name)

    for number in range(examples(10)):
        fuzz.run(SessionsOfPolicy, number)


def test_spare_points_stay_within_their_share_when_what_they_shared_is_theirs_alone() -> None:
    """Sessions part from heads that they had in common."""
    state = CONFIGURATIONS["Alone"]()
    said = {"more": "", "name": None}
    state.converse(answer="baab", at=486, base=234, fault=2, has_slept=True, hints={"ttl_s": 5}, **said)
    state.all_work(fault=0)
    state.converse(
        answer="b", at=514, base=32, fault=1, has_slept=False, hints={"quality": "exact"}, more="b", name=None
    )
    state.wait(seconds=10.0)
    state.converse(answer="a", at=97, base=150, fault=2, has_slept=True, hints={"priority": -1}, more="baab", name=None)
    state.all_work(fault=4)
    state.all_work(fault=0)
    state.converse(answer="", at=960, base=591, fault=0, has_slept=False, hints={"quality": "exact"}, **said)
    state.converse(answer="aabb", at=147, base=858, fault=2, has_slept=True, hints={"priority": -1}, **said)
    state.all_is_right()
