"""The manager by example: which blocks have exact copies, and which go first. A copy takes three blocks' room."""

from typing import Any

import engine as engines
import pytest
from engine import Engine, chain

from manthan.manager.sessions.cold_side import Fast, Shares
from manthan.manager.sessions.session import DropCause
from manthan.manager.sessions.table import MemoryShape

PARTS = 3


@pytest.fixture(autouse=True)
def _copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "SHAPE", MemoryShape(16, 500, 100, exact_parts=PARTS))


def keeping(capacity: int = 100, sink_tokens: int = 4, window_tokens: int = 17, **more: Any) -> Engine:
    """A block in the sink, and two in the window."""
    return Engine(capacity, sink_tokens=sink_tokens, window_tokens=window_tokens, **more)


def copies(engine: Engine) -> str:
    """The last words of blocks with a copy, those that go first first."""
    return " ".join(key.decode().split()[-1] for key in engine.manager.blocks.copies)


def lost(engine: Engine) -> str:
    """Of copies that are to be dropped."""
    return " ".join(key.decode().split()[-1] for key in engine.manager.copies.take_drops())


def restore(engine: Engine, text: str) -> str:
    request = engine.start(text)
    keys = chain(text)[: engine.manager.match(chain(text))]
    engine.manager.restore_started(request, keys)
    return request


def come_back(engine: Engine, old: str, new: str) -> None:
    """A cold session is restored and goes on."""
    request = restore(engine, old)
    engine.manager.restore_finished(request)
    engine.finish(request, new)


def test_the_first_and_the_last_blocks_have_copies() -> None:
    engine = keeping()
    engine.talk("a b c d e f")
    engine.evict()
    assert sorted(copies(engine)) == sorted("a e f")
    assert engine.manager.blocks.reserved == 6 + 3 * PARTS
    assert engine.manager.copies.of(chain("a b c d e f")) == {chain("a b c d e f")[i] for i in (0, 4, 5)}
    (eviction,) = engine.manager.take_evictions()
    assert (eviction.encoded, eviction.exact) == (6, 3)


@pytest.mark.parametrize(("sink", "window", "expected"), [(0, 1, "d"), (17, 0, "b a"), (0, 0, ""), (64, 64, "d c b a")])
def test_tokens_are_rounded_up_to_blocks(sink: int, window: int, expected: str) -> None:
    engine = keeping(sink_tokens=sink, window_tokens=window)
    engine.talk("a b c d")
    engine.evict()
    assert copies(engine) == expected


def test_nothing_is_exact_by_default() -> None:
    engine = Engine()
    engine.talk("a b c d")
    engine.evict()
    assert engine.manager.blocks.reserved == 4


def test_a_short_session_has_each_copy_once() -> None:
    engine = keeping()
    engine.talk("a b")
    engine.evict()
    assert engine.manager.blocks.reserved == 2 + 2 * PARTS


def test_what_falls_out_of_the_window_loses_its_copy_and_keeps_its_codes() -> None:
    engine = keeping()
    engine.talk("a b c d")
    engine.evict()
    come_back(engine, "a b c d", "a b c d e")
    assert lost(engine) == ""  # not before it is evicted again
    assert engine.evict() == chain("a b c d e")[4:]
    assert lost(engine) == "c"
    assert sorted(copies(engine)) == sorted("a d e")
    assert engine.cold() == set("abcde")
    assert engine.manager.take_drops() == []


def test_codes_that_are_there_get_no_copy_later() -> None:
    """The bf16 that was restored from them has lost already."""
    engine = keeping()
    engine.talk("a b c d e")
    engine.evict()
    engine.talk("a b x", name="fork")
    assert engine.evict() == chain("a b x")[2:]
    assert set(copies(engine).split()) == set("adex")  # b is in the fork's window, but its codes came first


def test_a_copy_stays_as_long_as_one_session_has_it_in_its_window() -> None:
    engine = keeping(sink_tokens=0)
    for name in "mn":
        engine.talk("a b c", name=name)
    engine.evict()
    assert copies(engine) == "b c"
    request = restore(engine, "a b c")
    engine.manager.restore_finished(request)
    engine.finish(request, "")
    for name, gone in (("m", ""), ("n", "b c")):
        request = engine.start("a b c", name=name)
        engine.finish(request, f"a b c {name}1 {name}2")
        engine.evict()
        assert lost(engine) == gone
    assert set(copies(engine).split()) == {"m1", "m2", "n1", "n2"}


def test_a_copy_goes_with_the_session_in_whose_window_it_is() -> None:
    """Another session needs the codes, but has left that place long ago."""
    engine = keeping(sink_tokens=0, window_tokens=1)
    engine.talk("a b", name="m")
    engine.evict()
    engine.finish(engine.start("a b", name="n"), "a b c d")
    engine.evict()
    assert copies(engine) == "b d"
    engine.manager._cut(engine.session("m"), 0, DropCause.RELEASED)
    assert lost(engine) == "b"
    assert engine.cold() == set("abcd")


def test_a_copy_that_is_read_stays_until_the_restore_ends() -> None:
    engine = keeping(sink_tokens=0, window_tokens=1)
    engine.talk("a b")
    engine.evict()
    engine.manager.restore_started("reader", chain("a b"))
    request = engine.start("a b")
    engine.finish(request, "a b c")
    engine.evict()
    assert lost(engine) == ""
    engine.manager.restore_finished("reader")
    assert lost(engine) == "b"
    assert copies(engine) == "c"


def test_a_copy_that_is_made_stays_until_that_ends() -> None:
    engine = keeping(sink_tokens=0, window_tokens=1)
    engine.talk("a b")
    engine.sweep()
    (first,) = engine.spill(1)
    assert first == chain("a b")[1]
    engine.finish(engine.start("a b"), "a b c")
    engine.sweep()
    assert copies(engine) == "b c"
    engine.stored([first])
    assert lost(engine) == "b"
    engine.stored(engine.spill())
    assert copies(engine) == "c"


def test_an_eviction_that_is_taken_back_leaves_no_reservation() -> None:
    engine = keeping()
    engine.talk("a b c")
    engine.sweep()
    assert engine.manager.blocks.reserved == 3 + 3 * PARTS
    engine.start("a b c")
    assert engine.manager.blocks.reserved == 0


def test_copies_make_room_before_any_codes_the_oldest_first() -> None:
    engine = keeping(capacity=20)
    for text in ("a b c d", "x y z"):
        engine.talk(text)
        engine.evict()
    assert lost(engine) == "c d"  # of a's session: its sink goes last
    assert copies(engine) == "a y z x"
    engine.talk("m n o p q")
    engine.evict()
    assert lost(engine).split()[0] == "a"
    assert engine.cold() == set("abcdxyzmnopq")
    assert engine.manager.take_drops() == []
    assert engine.manager.blocks.reserved <= 20


def test_copies_are_left_out_where_there_is_no_room_for_them() -> None:
    engine = keeping(capacity=8)
    for text in ("a b c", "x y z"):
        engine.talk(text)
        engine.evict()
    assert copies(engine) == ""
    assert engine.cold() == set("abcxyz")
    assert engine.manager.take_drops() == []


def test_a_session_that_is_used_keeps_its_copies_longer() -> None:
    engine = keeping(capacity=20, sink_tokens=0, window_tokens=16)
    for text in ("a b", "x y"):
        engine.talk(text)
        engine.evict()
    come_back(engine, "a b", "a b")
    engine.evict()
    assert copies(engine) == "y b"


def test_a_session_with_a_request_keeps_its_copies_longer() -> None:
    engine = keeping(capacity=13, sink_tokens=0, window_tokens=16)
    for text in ("a b", "x y"):
        engine.talk(text)
        engine.evict()
    engine.start("a b")
    engine.talk("m n")
    engine.evict()
    assert copies(engine) == "b n"


def test_a_session_does_not_give_up_its_first_tokens_for_its_last() -> None:
    engine = keeping(capacity=8, window_tokens=16)
    engine.talk("a b")
    engine.evict()
    come_back(engine, "a b", "a b c")
    engine.evict()
    assert copies(engine) == "a"
    assert engine.cold() == set("abc")


def test_a_tenant_makes_room_among_its_own_copies() -> None:
    engine = keeping(capacity=20, sink_tokens=0, window_tokens=16, shares=Shares(tenants={"small": 0.25}))
    engine.talk("x y")
    engine.talk("a", tenant="small")
    engine.evict()
    assert set(copies(engine).split()) == {"y", "a"}
    engine.talk("m n o", tenant="small")
    engine.evict()
    assert copies(engine) == "y"
    assert engine.manager.blocks.reserved_of["small"] == 4
    assert engine.cold() == set("xyamno")


def test_a_copy_that_failed_gives_its_room_back_and_the_codes_stay() -> None:
    engine = keeping()
    engine.talk("a b c d")
    engine.sweep()
    keys = engine.spill()
    for key in keys:
        engine.manager.spilled(key, engine.now, copied=key != chain("a b c d")[0])
    assert lost(engine) == "a"
    assert engine.cold() == set("abcd")
    assert set(copies(engine).split()) == {"c", "d"}
    assert engine.manager.take_releases() == keys


def test_a_spoiled_copy_is_dropped_and_the_codes_stay() -> None:
    engine = keeping()
    engine.talk("a b c d")
    engine.evict()
    request = restore(engine, "a b c d")
    engine.manager.restore_finished(request, spoiled=[chain("a")[0], b"unknown"])
    assert lost(engine) == "a"
    assert engine.cold() == set("abcd")


def test_copies_go_with_the_codes() -> None:
    engine = keeping()
    engine.talk("a b c d")
    engine.evict()
    engine.manager._cut(engine.session("anonymous-1"), 0, DropCause.RELEASED)
    assert engine.manager.blocks.reserved == 0
    assert [len(drop.keys) for drop in engine.manager.take_drops()] == [4]
    assert lost(engine) == ""


def test_a_reset_forgets_all_copies() -> None:
    engine = keeping()
    for text in ("a b c d", "e f g"):
        engine.talk(text)
        engine.sweep()
    keys = engine.spill(2)
    engine.manager.reset()
    assert set(engine.manager.blocks.copies) <= set(keys)  # what is being made keeps its room until it is answered for
    engine.stored(keys)
    assert engine.manager.blocks.reserved == 0
    assert not engine.manager.blocks.copies


def test_codes_that_leave_the_fast_tier_take_their_copy_along() -> None:
    engine = keeping(sink_tokens=0, window_tokens=16, fast=Fast(600, False))
    engine.talk("a b")
    engine.evict()
    engine.talk("x y")
    engine.sweep()
    keys = engine.spill()
    assert engine.manager.take_moves() == chain("a b")[1:]  # four blocks' room with its copy
    engine.stored(keys)
    assert engine.manager.blocks.moved == 1 + PARTS
    assert engine.manager.take_moves() == []
