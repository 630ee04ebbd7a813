"""Least recently used: who goes first, and what does not matter."""

from hypothesis import given, settings
from hypothesis import strategies as st

from manthan.policies import EvictionPolicy, SessionView, get_policy

view = SessionView


def used(*session_ids: str) -> EvictionPolicy:
    policy = get_policy("lru")()
    for session_id in session_ids:
        policy.used(view(session_id))
    return policy


def test_the_one_unused_for_longest_goes_first() -> None:
    assert list(used("a", "b", "c").victims()) == ["a", "b", "c"]


def test_a_use_moves_to_the_end() -> None:
    assert list(used("a", "b", "c", "a").victims()) == ["b", "c", "a"]


def test_who_is_forgotten_is_no_victim_and_comes_back_as_new() -> None:
    policy = used("a", "b")
    policy.forget("a")
    assert list(policy.victims()) == ["b"]
    policy.used(view("a"))
    assert list(policy.victims()) == ["b", "a"]


def test_forgetting_somebody_unknown_does_nothing() -> None:
    policy = used("a")
    policy.forget("b")
    assert list(policy.victims()) == ["a"]


def test_size_and_number_of_uses_do_not_matter() -> None:
    policy = used()
    policy.used(view("big", tokens=10**6, nbytes=10**9, uses=99))
    policy.used(view("small"))
    assert list(policy.victims()) == ["big", "small"]


def test_nobody_is_no_victim() -> None:
    assert list(used().victims()) == []


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 7).map(str), st.booleans()), max_size=60))
def test_the_order_is_that_of_the_last_uses(requests: list[tuple[str, bool]]) -> None:
    """Of requests by name, before some of which their session has left."""
    policy = used()
    for number, (name, leaves) in enumerate(requests):
        if leaves:
            policy.forget(name)
        policy.used(view(name, last_used=float(number)))
    last = {name: number for number, (name, _) in enumerate(requests)}
    assert list(policy.victims()) == sorted(last, key=last.__getitem__)
