"""What must always hold, under random requests, hints, evictions, failures, restores and resets.

On one rank and on two, with codes of random sizes, without exact tokens and with them, and under every policy.
"""

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
    cold_blocks = 16


class SessionsWithAnchorsAndExactTokensOnTwoRanks(SessionsWithAnchors):
    ranks = 2
    exact = True
    cold_blocks = 24


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
TestAnchors = SessionsWithAnchors.TestCase
TestAnchors.settings = PROFILE
TestAnchorsAndExactTokensOnTwoRanks = SessionsWithAnchorsAndExactTokensOnTwoRanks.TestCase
TestAnchorsAndExactTokensOnTwoRanks.settings = PROFILE


@pytest.mark.parametrize("name", [name for name in policy_names() if name != Sessions.policy])
def test_under_every_policy(name: str) -> None:
    class SessionsOfPolicy(SessionsWithExactTokens):
        policy = name

    run_state_machine_as_test(SessionsOfPolicy, settings=settings(PROFILE, max_examples=examples(75)))
