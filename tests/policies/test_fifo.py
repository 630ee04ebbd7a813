"""First in, first out."""

from policy_place import Place


def test_uses_do_not_matter() -> None:
    place = Place("fifo")
    place.request("a", "b", "c", "a", "a", "b")
    assert list(place.policy.victims()) == ["a", "b", "c"]


def test_who_was_evicted_comes_back_as_the_last() -> None:
    place = Place("fifo", capacity=3)
    assert place.request("a", "b", "c", "d", "a") == ["a", "b"]
    assert list(place.policy.victims()) == ["c", "d", "a"]
