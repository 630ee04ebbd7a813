"""What must always hold, under random requests, hints, evictions, failures, restores and resets.

On one rank and on two, with codes of random sizes, without exact tokens and with them, and under every policy.
"""

from collections import Counter

import pytest
from examples import examples
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from machine import PROFILE, Sessions
from world import BESIDE

from manthan.policies import policy_names


class SessionsOnTwoRanks(Sessions):
    ranks = 2


class SessionsWithExactTokens(Sessions):
    exact = True
    cold_blocks = 12


class SessionsWithAnchors(Sessions):
    beside = BESIDE
    cold_blocks = 24


class SessionsWithAnchorsAndExactTokensOnTwoRanks(SessionsWithAnchors):
    ranks = 2
    exact = True
    cold_blocks = 32


class SessionsWithExactTokensOnTwoRanks(SessionsWithExactTokens):
    ranks = 2


TestOneRank = Sessions.TestCase
TestOneRank.settings = PROFILE
TestTwoRanks = SessionsOnTwoRanks.TestCase
TestTwoRanks.settings = PROFILE
TestExactTokens = SessionsWithExactTokens.TestCase
TestExactTokens.settings = PROFILE
TestExactTokensOnTwoRanks = SessionsWithExactTokensOnTwoRanks.TestCase
TestExactTokensOnTwoRanks.settings = PROFILE
TestAnchorsAndExactTokensOnTwoRanks = SessionsWithAnchorsAndExactTokensOnTwoRanks.TestCase
TestAnchorsAndExactTokensOnTwoRanks.settings = PROFILE


def test_with_windows_and_states_beside_the_chains() -> None:
    seen: Counter[str] = Counter()

    class Watched(SessionsWithAnchors):
        def teardown(self) -> None:
            super().teardown()
            seen.update(self.world.seen)

    run_state_machine_as_test(Watched, settings=settings(PROFILE, max_examples=4 * PROFILE.max_examples))
    causes = (f"dropped beside: {cause}" for cause in ("budget", "failed", "abandoned", "reset"))
    came = ("restored", "encoded exact", "encoded derived", "anchors unreadable", "lost", "lost beside", *causes)
    assert all(seen[what] for what in came), f"too little has come to pass: {seen}"


@pytest.mark.parametrize("name", [name for name in policy_names() if name != Sessions.policy])
def test_under_every_policy(name: str) -> None:
    class SessionsOfPolicy(SessionsWithExactTokens):
        policy = name

    run_state_machine_as_test(SessionsOfPolicy, settings=settings(PROFILE, max_examples=examples(75)))
