"""What must always hold, under random requests, hints, evictions, failures, restores and resets.

On one rank and on two, without exact copies and with them, and under every policy.
"""

import pytest
from examples import examples
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from machine import PROFILE, Sessions

from manthan.policies import policy_names


class SessionsOnTwoRanks(Sessions):
    ranks = 2


class SessionsWithCopies(Sessions):
    copies = True
    cold_blocks = 12


class SessionsWithCopiesOnTwoRanks(SessionsWithCopies):
    ranks = 2


TestOneRank = Sessions.TestCase
TestOneRank.settings = PROFILE
TestTwoRanks = SessionsOnTwoRanks.TestCase
TestTwoRanks.settings = PROFILE
TestCopies = SessionsWithCopies.TestCase
TestCopies.settings = PROFILE
TestCopiesOnTwoRanks = SessionsWithCopiesOnTwoRanks.TestCase
TestCopiesOnTwoRanks.settings = PROFILE


@pytest.mark.parametrize("name", [name for name in policy_names() if name != Sessions.policy])
def test_under_every_policy(name: str) -> None:
    class SessionsOfPolicy(SessionsWithCopies):
        policy = name

    run_state_machine_as_test(SessionsOfPolicy, settings=settings(PROFILE, max_examples=examples(75)))
