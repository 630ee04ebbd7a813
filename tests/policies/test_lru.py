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


def test_size_and_number_of_uses_do_not_matter() -> None:
    policy = used()
    policy.used(view("big", tokens=10**6, nbytes=10**9, uses=99))
    policy.used(view("small"))
    assert list(policy.victims()) == ["big", "small"]


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
