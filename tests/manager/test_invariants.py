"""What must always hold, under random requests, evictions, failures, restores and resets, on one rank and on two."""

from machine import PROFILE, Sessions


class SessionsOnTwoRanks(Sessions):
    ranks = 2


TestOneRank = Sessions.TestCase
TestOneRank.settings = PROFILE
TestTwoRanks = SessionsOnTwoRanks.TestCase
TestTwoRanks.settings = PROFILE
