"""Time to live: renewed by use, and stretched by what the client said."""

from manthan.policies import SessionView
from manthan.policies.ttl import TTL, TTLOptions


def test_the_life_that_ends_first_goes_first_and_a_use_renews_it() -> None:
    policy = TTL(TTLOptions(ttl_s=10))
    for session_id, now in (("a", 1), ("b", 2), ("c", 3), ("a", 4)):
        policy.used(SessionView(session_id, last_used=now))
    assert list(policy.victims()) == ["b", "c", "a"]


def test_who_is_expected_lives_until_then() -> None:
    def order(ttl_s: float) -> list[str]:
        policy = TTL(TTLOptions(ttl_s=ttl_s))
        policy.used(SessionView("tool", last_used=0, expected=100))
        policy.used(SessionView("chat", last_used=50))
        return list(policy.victims())

    assert order(10) == ["chat", "tool"]
    assert order(60) == ["tool", "chat"]


def test_being_expected_sooner_does_not_shorten_a_life() -> None:
    policy = TTL(TTLOptions(ttl_s=100))
    policy.used(SessionView("old", last_used=0))
    policy.used(SessionView("soon", last_used=1, expected=2))
    assert list(policy.victims()) == ["old", "soon"]
