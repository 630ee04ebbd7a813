"""Sessions that are loaded before their request comes: which ones, when, and into which room."""

from dataclasses import replace
from math import inf

import pytest
from integrity import check_integrity
from talks import GROUP, Talks, names

from manthan.manager.events import BlocksDropped, DropCause, PrefetchHit, Restored
from manthan.manager.session.blocks import GroupShape, MemoryShape
from manthan.manager.session.prefetch import LOOKED_AT, RETRY_S
from manthan.manager.transfer import STORE_DOWN

LEAD_S = 2.0


class Prefetching(Talks):
    """An engine that prefetches. The arguments are those of Talks."""

    def __init__(self, **more: object) -> None:
        super().__init__(driver={"prefetch_lead_s": LEAD_S}, **more)

    def go_cold(self, text: str, who: str, **hints: object) -> None:
        """Have a session talk, and be saved. The pool loses everything."""
        self.talk(text, who, **hints)
        self.rest()
        self.overwrite()

    def taken(self) -> list[list[bytes]]:
        """Return the block hashes of the loads that a step begins."""
        return [list(load.block_hashes) for load in self.step().loads]

    def prefetches(self) -> int:
        return sum(event.request_id is None for event in self.told(Restored))


@pytest.fixture
def talks() -> Prefetching:
    return Prefetching()


# -- which, and when ----------------------------------------------------------------------------------


def test_a_session_is_loaded_some_time_before_it_is_expected(talks: Prefetching) -> None:
    talks.go_cold("a b c", "A", expect_return_s=20)
    assert talks.driver.next_deadline == 20 - LEAD_S
    talks.now = 17.9
    assert talks.taken() == []
    talks.now = 18.0
    assert talks.taken() == [names("a b c")]
    assert talks.resident("a b c") == 3
    assert talks.states() == {"A": "cold"}
    assert talks.taken() == []
    assert talks.driver.next_deadline == inf


def test_a_session_that_does_not_fit_is_loaded_later_until_its_time_has_passed() -> None:
    talks = Prefetching(blocks=6)
    for text, who in (("a b c", "A"), ("x y", "X")):
        talks.talk(text, who, expect_return_s=20)
    talks.rest()
    talks.overwrite()
    request = talks.ask("p q r s")
    talks.now = 18.0
    assert (talks.taken(), talks.taken()) == ([names("x y")], [])
    talks.finish(request, "")
    talks.now = 20.0
    assert talks.taken() == [names("a b c")]
    talks.talk("q r s", "Q", expect_return_s=5)
    talks.rest(100.0)
    talks.overwrite()
    assert (talks.taken(), talks.prefetches()) == ([], 2)


def test_a_session_that_was_back_meanwhile_is_not_loaded_when_it_is_cold_again(talks: Prefetching) -> None:
    talks.go_cold("a b c", "A")
    talks.talk("x y", "X", prefetch=("A",))
    talks.go_cold("a b c d", "A")
    assert (talks.states()["A"], talks.taken(), talks.prefetches()) == ("cold", [], 0)


def test_a_session_that_is_on_its_way_is_not_loaded_again(talks: Prefetching) -> None:
    talks.go_cold("a b c", "A")
    talks.talk("x y", "X", prefetch=("A",))
    talks.holds = True
    [load] = talks.step().loads
    talks.talk("x y z", "X", prefetch=("A",))
    assert talks.taken() == []
    talks.answer([load], failed={2: "missing"})
    assert talks.told(BlocksDropped) == [BlocksDropped(0, names("a b c")[2:], DropCause.FAILED)]
    check_integrity(talks.manager)
    talks.overwrite()
    assert talks.taken() == [names("a b")]


# -- room ---------------------------------------------------------------------------------------------


def test_a_session_that_no_pool_can_hold_is_not_waited_for() -> None:
    talks = Prefetching(blocks=10, low=0.2)
    talks.go_cold("a b c d e f g h i", "A")
    talks.go_cold("a b c d e f g x", "B")
    talks.talk("q r", "Q", prefetch=("A", "B"))
    talks.overwrite()
    assert talks.taken() == [names("a b c d e f g x")]
    assert talks.taken() + talks.taken() == []
    assert talks.driver.prefetcher.look_at == inf


def test_room_that_a_waiting_request_needs_is_left_to_it() -> None:
    talks = Prefetching(blocks=12)
    talks.go_cold("a b c d e f g h", "A")
    request = talks.ask("p q r s t")
    talks.talk("x", "X", prefetch=("A",))
    assert talks.taken() == []
    talks.finish(request, "")
    assert talks.taken() == [], "it does not look again at once"
    assert talks.driver.prefetcher.look_at == talks.now + RETRY_S
    talks.now += RETRY_S
    assert talks.taken() == [names("a b c d e f g h")]
    assert talks.driver.prefetcher.look_at == inf


def test_many_sessions_without_room_hide_no_small_one() -> None:
    talks = Prefetching(blocks=12, capacity=1000)
    large = [f"large {n}" for n in range(LOOKED_AT)]
    for n, who in enumerate(large):
        talks.go_cold(" ".join(f"{n}-{word}" for word in "abcdefgh"), who)
    talks.go_cold("s", "small")
    request = talks.ask("p q r s t")
    for wanted in (tuple(large), ("small",)):
        talks.talk("x", "X", prefetch=wanted)
    assert talks.taken() == []
    talks.now += RETRY_S
    assert talks.taken() == [names("s")]
    talks.finish(request, "")


@pytest.mark.parametrize("is_lossless", [False, True])
def test_resident_kv_of_others_is_not_overwritten_if_only_a_lossy_copy_is_left_of_it(is_lossless: bool) -> None:
    talks = Prefetching(blocks=10, shape=MemoryShape({0: replace(GROUP, is_lossless=is_lossless)}))
    talks.go_cold("a b c d", "A", expect_return_s=50)
    talks.talk("p q r s t u v", "P")
    talks.rest()
    assert talks.states() == {"A": "cold", "P": "cold"}
    talks.now = 60
    assert talks.taken() == ([names("a b c d")] if is_lossless else [])
    talks.overwrite()
    talks.now += RETRY_S
    assert talks.taken() == ([] if is_lossless else [names("a b c d")])


@pytest.mark.parametrize("is_lossless", [False, True])
def test_resident_blocks_of_a_window_have_the_codec_of_their_own_group(is_lossless: bool) -> None:
    window = GroupShape(16, 200, {0: 50}, is_lossless=is_lossless)
    talks = Prefetching(blocks=8, shape=MemoryShape({0: window, 1: GroupShape(16, 1000, {0: 100})}, 1))
    for text, who in (("a b c d e", "A"), ("p q", "P")):
        request = talks.start(text, who, **({"expect_return_s": 50} if who == "A" else {}))
        talks.finish(request, text, [talks.point(text, {0: 2})])
        talks.rest()
        if who == "A":
            talks.overwrite()
    talks.pool.release(1, names("p q"))
    assert talks.states() == {"A": "cold", "P": "cold"}
    talks.now = 60
    assert [load.group for load in talks.step().loads] == ([1, 0] if is_lossless else [])


def test_a_session_s_own_resident_blocks_are_no_hindrance() -> None:
    talks = Prefetching(blocks=8)
    talks.talk("a b c d e f", "A", expect_return_s=50)
    talks.rest()
    talks.pool.release(0, names("a b c d e f")[4:])
    talks.now = 60
    assert talks.taken() == [names("a b c d e f")[4:]]


# -- results ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("resident", "hits"), [(5, 1), (4, 0), (0, 0)])
def test_a_hit_is_a_request_that_finds_all_of_it(talks: Prefetching, resident: int, hits: int) -> None:
    text = "a b c d e"
    talks.go_cold(text, "A")
    talks.talk("x y", "X", prefetch=("A",))
    assert talks.taken() == [names(text)]
    talks.pool.release(0, names(text)[resident:])
    talks.talk(f"{text} f g", "A")
    assert len(talks.told(PrefetchHit)) == hits
    if resident:
        talks.talk(f"{text} f g h i", "A")
        assert len(talks.told(PrefetchHit)) == hits, "a prefetch counts once"


def test_compressed_blocks_in_a_store_that_is_down_are_kept(talks: Prefetching) -> None:
    talks.go_cold("a b c", "A")
    talks.talk("x y", "X", prefetch=("A",))
    talks.holds = True
    [load] = talks.step().loads
    talks.answer([load], failed={0: STORE_DOWN})
    assert (talks.texts()["A"], talks.resident("a b c")) == ("a b c", 0)


def test_answers_that_no_prompt_brings_back_make_way_for_a_prefetch() -> None:
    talks = Prefetching(blocks=10)
    talks.go_cold("a b c d", "A", expect_return_s=50)
    talks.manager._left_out = talks.manager.enough
    talks.finish(talks.start("p q r s", "P"), "p q r s think1 think2 think3 think4")
    talks.rest()
    talks.now = 60
    assert talks.taken() == [names("a b c d")]
    assert talks.resident("p q r s") == 4
