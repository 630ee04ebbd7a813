"""Hints obeyed: pins, ranges of tokens, times to live, priorities, release, sessions that stay out of the tiers."""

import pytest
from integrity import check_empty, check_integrity
from talks import GROUP, IDLE_AFTER_S, Talks, last_words, names

from manthan.manager.events import DropCause
from manthan.manager.session.blocks import MemoryShape
from manthan.manager.session.table import Shares

# -- pins ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pin", [True, False])
def test_a_pinned_session_stays_while_younger_ones_go(pin: bool) -> None:
    talks = Talks(capacity=8)
    assert talks.talk("a b", "old", pin=True).is_pinned
    assert talks.talk("a b", "old", pin=None if pin else False).is_pinned is pin
    talks.rest()
    talks.go_cold(*(f"c{at} d{at} e{at}" for at in range(3)))
    assert ("a b" in talks.saved()) is pin
    assert len(talks.saved()) == 8


def test_a_pin_beyond_the_share_is_refused_in_a_sentence() -> None:
    talks = Talks(capacity=8)
    talks.talk("a", "first", pin=True)
    assert talks.talk("c d", "second", pin=True)[:3] == (
        "second",
        False,
        "pin is refused: pinned sessions may take 224 bytes of the cold store (tiers.pinned_share is 0.25), 100 are "
        "taken, and this session needs 200",
    )


def test_a_pinned_session_that_outgrows_the_share_goes_in_its_turn() -> None:
    talks = Talks(capacity=8)
    talks.talk("a b", "old", pin=True)
    outcome = talks.talk("a b c", "old")
    assert (outcome.is_pinned, outcome.refused[:14]) == (False, "pin is refused")
    talks.rest()
    talks.go_cold("s t u v w x y z")
    assert set(talks.texts()) == {"s t u v w x y z"}


# -- time to live, priority, release ------------------------------------------------------------------


def test_a_session_is_forgotten_when_its_time_is_over() -> None:
    talks = Talks()
    talks.talk("a b", "short", ttl_s=100)
    talks.talk("c d", "long")
    talks.rest()
    assert talks.driver.next_deadline == 100
    for talks.now, texts in ((99.9, {"short": "a b", "long": "c d"}), (100, {"long": "c d"})):
        talks.step()
        assert talks.texts() == texts
    assert talks.dropped() == [("a b", DropCause.EXPIRED)]


def test_each_use_begins_the_time_anew() -> None:
    talks = Talks()
    talks.talk("a b", "s", ttl_s=5)
    talks.now = 4
    request = talks.start("a b c", "s")
    talks.now = 9
    talks.step()
    talks.finish(request, "a b c d")
    for talks.now, texts in ((13.9, {"s": "a b c d"}), (14, {})):
        talks.step()
        assert talks.texts() == texts


def test_lower_priorities_go_first_whatever_the_policy_says() -> None:
    talks = Talks(capacity=4)
    talks.go_cold("a b", priority=3)
    talks.go_cold("c d", priority=-1)
    talks.go_cold("e f", priority=3)
    assert set(talks.texts()) == {"a b", "e f"}


def test_a_released_session_leaves_only_what_others_have() -> None:
    talks = Talks()
    talks.talk("sys a b", "s")
    talks.talk("sys c", "other")
    talks.rest()
    talks.talk("sys a b d e", "s", release=True)
    assert talks.dropped() == [("a b", DropCause.RELEASED)]
    assert talks.texts() == {"other": "sys c"}
    assert (talks.resident("sys a"), talks.resident("sys c")) == (1, 2)


# -- sessions that stay out of the tiers --------------------------------------------------------------


def test_nothing_of_a_session_is_stored_until_its_client_allows_it() -> None:
    talks = Talks()
    talks.talk("a b", "s", store=False)
    assert talks.rest() == []
    talks.talk("a b c d", "s", pin=True)
    assert talks.rest() == [], "later requests stay out too"
    assert talks.states() == {"s": "idle"}
    talks.talk("a b c d e", "s", store=True)
    assert last_words(talks.rest()) == "a b c d e"


def test_a_session_that_stays_out_is_not_saved_when_memory_is_short_or_on_demand() -> None:
    talks = Talks(blocks=4, low=1, high=1)
    talks.talk("a b", "idle", store=False)
    talks.start("x y", "runs", store=False)
    assert talks.manager.save_all(talks.now) == 0
    refused = talks.driver.steer("evict", talks.session("idle"), talks.now)
    assert refused == "its client said that nothing of it is to be stored"
    assert talks.save() == []


def test_a_session_that_stays_out_is_forgotten_when_the_pool_has_lost_it() -> None:
    talks = Talks(blocks=8)
    talks.talk("a b", "s", store=False)
    talks.rest()
    assert talks.texts() == {"s": "a b"}
    talks.pool.release(0, names("a b")[1:])
    talks.rest(100)
    assert talks.texts() == {"s": "a"}
    talks.overwrite()
    talks.rest(1000)
    check_empty(talks.manager)


def test_a_request_that_stays_out_takes_its_session_out_of_saving() -> None:
    talks = Talks(blocks=16, holds=True)
    talks.talk("a b", "s")
    talks.now = IDLE_AFTER_S
    assert len(talks.step().stores) == 1
    talks.finish(talks.start("a b", "s", store=False), "a b")
    talks.holds = False
    talks.answer()
    assert talks.rest() == []


def test_others_may_store_what_they_have_in_common_with_a_session_that_stays_out() -> None:
    talks = Talks()
    talks.talk("sys a", "out", store=False)
    talks.talk("sys a b", "other")
    assert last_words(talks.rest()) == "sys a b"
    assert talks.states() == {"out": "idle", "other": "cold"}


# -- ranges of tokens that are kept -------------------------------------------------------------------


def tokens(end: int, seconds: float, start: int = 0) -> dict[str, object]:
    """Return a range up to the end of this block."""
    return {"from": 16 * start, "to": 16 * end, "seconds": seconds}


def test_the_first_tokens_of_a_session_stay_for_their_time_and_its_tail_goes() -> None:
    talks = Talks(capacity=8)
    talks.talk("a b c d", "old", keep=[tokens(2, 100, start=1)])
    talks.rest()
    talks.go_cold("k l m n o p", "q r s t u v")
    assert talks.texts() == {"old": "a b", "q r s t u v": "q r s t u v"}
    assert "old" not in list(talks.manager.table.order.victims()), "nobody looks at it in vain"
    talks.now = 100
    talks.go_cold("x")
    assert "old" in talks.texts(), "its turn comes again"
    assert talks.saved() & {"a", "a b"} == {"a"}


def test_each_range_has_its_time() -> None:
    talks = Talks(capacity=12)
    talks.talk("a b c d", "old", keep=[tokens(3, 60), tokens(1, 200), tokens(2, 100)])
    for talks.now, left in ((10, "a b c"), (70, "a b"), (110, "a")):
        talks.step()
        talks.go_cold(f"{talks.now}")
        talks.go_cold(" ".join(f"{talks.now}{at}" for at in range(12)))
        assert talks.texts()["old"] == left
    talks.rest(100)
    talks.go_cold("x", " ".join(f"y{at}" for at in range(12)))
    assert "old" not in talks.texts()


def test_a_shared_head_is_kept_by_the_longest() -> None:
    talks = Talks(capacity=8)
    talks.talk("sys a b", "short", keep=[tokens(1, 50)])
    talks.talk("sys c d", "long", keep=[tokens(1, 500)])
    for talks.now, kept in ((10, True), (100, True), (510, False)):
        talks.step()
        talks.go_cold(f"{talks.now}", *(" ".join(f"{talks.now}{at}{n}" for at in range(8)) for n in "12"))
        assert ("sys" in talks.saved()) is kept
        check_integrity(talks.manager, talks.driver)


def test_what_is_kept_counts_as_pinned_and_is_refused_in_a_sentence() -> None:
    talks = Talks(capacity=8)
    assert talks.talk("a b", "first", keep=[tokens(1, 100)]).refused == ""
    refused = (
        "keep is refused: pinned sessions may take 224 bytes of the cold store (tiers.pinned_share is 0.25), 100 are "
        "taken, and this session needs 200"
    )
    assert talks.talk("c d e", "second", keep=[tokens(2, 100)]).refused == refused
    assert talks.talk("c d e f", "second", keep=[tokens(1, 100)]).refused == ""
    assert talks.talk("g h", "third", pin=True).refused.startswith("pin is refused: pinned sessions may take 224")
    talks.rest(100)
    assert talks.talk("g h i", "third", pin=True).is_pinned is False
    assert talks.talk("x y", "fourth", pin=True).is_pinned, "nothing is kept any more"


def test_a_range_that_a_session_has_not_reached_is_kept_as_it_grows() -> None:
    talks = Talks(capacity=20, shares=Shares(pinned=0.15))
    talks.talk("a b", "old", keep=[tokens(4, 100)])
    assert talks.session("old").kept == 2
    assert talks.talk("a b c", "old").refused == ""
    assert talks.session("old").kept == 3
    assert talks.talk("a b c d e", "old").refused.startswith("keep is refused")
    assert talks.session("old").kept == 0


@pytest.mark.parametrize("over", ["by itself", "by an operator", ""])
def test_a_pin_counts_the_whole_session_and_the_range_counts_again_when_it_ends(over: str) -> None:
    talks = Talks(capacity=20)
    talks.talk("a b c", "old", keep=[tokens(2, 1000)])
    talks.manager.steer("pin", talks.session("old"), talks.now, 50.0)
    assert talks.manager.said.pinned == {talks.session("old"): 300}
    talks.rest(60 if over == "by itself" else 40)
    if over == "by an operator":
        talks.manager.steer("unpin", talks.session("old"), talks.now)
    assert talks.manager.said.pinned == {talks.session("old"): 200 if over else 300}
    check_integrity(talks.manager, talks.driver)


def test_with_resume_points_the_whole_session_is_kept() -> None:
    shape = MemoryShape({0: GROUP, 1: GROUP})
    talks = Talks(capacity=40, shape=shape)
    talks.finish(talks.start("a b", "old", keep=[tokens(1, 1000)]), "a b c", [talks.point("a b c", {1: 1})])
    assert talks.session("old").kept == 3
    assert talks.manager.said.pinned == {talks.session("old"): 400}


def test_redundant_copies_of_what_is_kept_stay() -> None:
    talks = Talks(capacity=4, is_exclusive=True, shares=Shares(pinned=1.0), blocks=6, low=0.5, high=0.5)
    talks.go_cold("a b")
    talks.go_cold("c d", keep=[tokens(2, 1000)])
    talks.start("c d", "c d")
    talks.talk("x y", "x y")
    talks.save()
    assert {"c", "c d"} <= talks.saved()


def test_a_time_that_passes_during_a_request_counts_from_its_end_also_if_it_becomes_a_branch() -> None:
    talks = Talks()
    talks.talk("sys q x", "A", ttl_s=30)
    first, second = talks.start("sys q x r", "A"), talks.start("sys q x r", "A")
    talks.finish(first, "sys q x r s")
    talks.rest(31)
    talks.finish(second, "sys q x r t")
    assert set(talks.texts()) == {"A", "A~2"}
    talks.rest(29)
    assert set(talks.texts()) == {"A", "A~2"}
    talks.rest(1)
    check_empty(talks.manager)
