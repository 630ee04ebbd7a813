"""Least frequently used, and how counts fade."""

from policy_place import Place

from manthan.policies import SessionView
from manthan.policies.lfu import LFU, LFUOptions


def lfu(half_life_s: float) -> LFU:
    return LFU(LFUOptions(half_life_s=half_life_s))


def requests(policy: LFU, *times: tuple[str, float]) -> list[str]:
    uses: dict[str, list[float]] = {}
    for session_id, now in times:
        uses.setdefault(session_id, []).append(now)
        policy.used(SessionView(session_id, created=uses[session_id][0], last_used=now, uses=len(uses[session_id])))
    return list(policy.victims())


def test_the_fewest_requests_go_first() -> None:
    place = Place(lfu(10**6))
    place.request("a", "a", "a", "b", "c", "c")
    assert list(place.policy.victims()) == ["b", "c", "a"]


def test_begin_and_end_of_a_request_count_once() -> None:
    policy = lfu(10**6)
    for now in range(9):
        policy.used(SessionView("a", last_used=now, uses=1))
    policy.used(SessionView("b", last_used=9, uses=1))
    policy.used(SessionView("b", last_used=9, uses=2))
    assert list(policy.victims()) == ["a", "b"]


def test_old_counts_fade() -> None:
    history = [("a", float(now)) for now in range(4)]
    assert requests(lfu(100), *history, ("b", 50)) == ["b", "a"]
    assert requests(lfu(10), *history, ("b", 50)) == ["a", "b"]


def test_a_count_is_worth_half_after_a_half_life() -> None:
    assert requests(lfu(10), ("a", 0), ("a", 0), ("b", 9.9)) == ["b", "a"]
    assert requests(lfu(10), ("a", 0), ("a", 0), ("b", 10.1)) == ["a", "b"]


def test_who_was_evicted_comes_back_with_its_history() -> None:
    place = Place(lfu(10**6))
    place.request("a", "a", "a", "a", "b")
    place.evict_all()
    place.request("b", "a", "c")
    assert list(place.policy.victims()) == ["c", "b", "a"]


def test_another_session_of_a_name_that_is_free_again_starts_anew() -> None:
    place = Place(lfu(10**6))
    place.request("a", "a", "a")
    place.policy.forget("a")
    del place.uses["a"], place.created["a"]
    place.request("b", "b", "a")
    assert list(place.policy.victims()) == ["a", "b"]


def test_the_history_of_one_that_enters_fades_too() -> None:
    policy = lfu(10)
    policy.used(SessionView("long ago", created=0, last_used=1000, uses=3))  # counts 1 and next to nothing
    policy.used(SessionView("twice", created=999, last_used=1000, uses=2))
    policy.used(SessionView("once", created=1000, last_used=1000, uses=1))
    assert list(policy.victims())[-1] == "twice"


def test_times_far_from_zero_and_many_half_lives_apart() -> None:
    assert requests(lfu(1), ("a", 1e9), ("a", 1e9), ("b", 1e9 + 5000)) == ["a", "b"]
