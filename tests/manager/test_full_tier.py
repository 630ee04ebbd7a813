"""A full tier that need not hold what the pool holds: which blocks are overwritten next, and that all comes to rest."""

import random
from collections import Counter
from typing import Any

import pytest
from integrity import check_integrity
from talks import Talks, long_text, text_of

from manthan.manager.driver import BURSTS, HIGH_WATERMARK, LOW_WATERMARK
from manthan.manager.events import Evicted
from manthan.policies import policy_names

LONGEST = 13
"""Blocks of a session, and of what a request takes."""


def free_queue(talks: Talks) -> list[str]:
    """Return what the free blocks hold, in the order in which they are overwritten. They are not taken."""
    pool = talks.pool
    held = [pool._name[block] for block in (*pool._kept, *pool._rest)]
    return [text_of(block_name[1]) for block_name in held if block_name is not None]


def full(low: float = 0.0, high: float = 0.0) -> Talks:
    """Return an engine with a saved session that fills the tier, and one that was refused twice."""
    talks = Talks(capacity=4, blocks=20, is_exclusive=True, low=low, high=high)
    talks.go_cold("a b c d")
    talks.talk("x y z", "x")
    talks.rest()
    talks.rest(2 * talks.manager.idle_after_s)
    assert talks.states() == {"a b c d": "cold", "x": "idle"}
    return talks


@pytest.mark.parametrize("policy", policy_names())
@pytest.mark.parametrize("capacity", [3, 12, 20, 30])
def test_about_as_much_is_stored_as_is_taken(policy: str, capacity: int) -> None:
    """A block that makes room for others is given up. Otherwise they would make room for it when its turn comes."""
    rng = random.Random(0)
    talks = Talks(capacity, blocks=64, is_exclusive=True, policy=policy, low=0.25, high=0.5)
    lengths = Counter[str]()
    for _ in range(150):
        who = f"s{rng.randrange(20)}"
        lengths[who] = (lengths[who] + rng.randrange(1, 4)) % LONGEST
        talks.now += rng.choice([0.1, 30.0])
        talks.finish(talks.start(long_text(who, 1 + lengths[who]), who))
        stored = talks.save() + talks.rest()
        assert len(stored) == len(set(stored))
        assert len(stored) < 1.5 * LONGEST
        check_integrity(talks.manager, talks.driver)


@pytest.mark.parametrize(("blocks", "found"), [(80, 12), (350, 14), (650, 19), (1000, 25)])
def test_what_pool_and_tier_hold_comes_back_whole(blocks: int, found: int) -> None:
    """Of sessions of 62 blocks the tier holds 12. A prompt gets all its blocks at once, from 6 to 77% of the pool."""
    marks: dict[str, Any] = {"low": LOW_WATERMARK, "high": HIGH_WATERMARK, "driver": {"bursts": BURSTS}}
    talks = Talks(12 * 62, blocks=blocks, is_exclusive=True, **marks)
    texts = [long_text(f"{number}-", 62) for number in range(blocks // 62 + 20)]
    returned = list[bool]()
    for text in (*texts, *texts[::-1]):
        request_id = talks.start(text, text[:4])
        one = talks.running[request_id]
        returned.append((one.resident or 0) + (one.loaded or 0) >= 61)
        for seconds in (0.0, 0.3):
            talks.now += seconds
            talks.step(taken=1)
        talks.finish(request_id)
        talks.rest(3.0)
    returned = returned[len(texts) :]
    assert returned == [True] * found + [False] * (len(texts) - found)


def test_saved_blocks_of_a_session_without_room_are_overwritten_by_age() -> None:
    """Otherwise all that was not saved would stand behind what was used just now."""
    talks = full()
    talks.talk("a b c d e", "a b c d")
    assert free_queue(talks)[:4] == ["a b c d", "a b c", "a b", "a"], "it is saved but for its answer"
    talks.rest()
    ages = ["x y z", "x y", "x", "a b c d e"]
    assert [text for text in free_queue(talks) if text in ages] == ages
    assert free_queue(talks)[:3] == ages[:3]


def test_a_session_whose_blocks_are_saved_bit_by_bit_goes_cold_once() -> None:
    talks = Talks(12, blocks=32, low=0.25, high=0.3, is_exclusive=True)
    talks.go_cold(long_text("first", 12))
    talks.overwrite()
    talks.finish(talks.start(long_text("old", 12), "old"))
    assert talks.rest() == []
    saved = []
    for number in range(12):
        talks.start(long_text(f"{number}-", 2))
        saved.append(len(talks.save()))
    assert sum(saved) == 12 > max(saved)
    assert talks.states()["old"] == "cold"
    talks.rest()
    [event] = [event for event in talks.told(Evicted) if event.session_id == "old"]
    assert (event.blocks, event.stored, event.is_pressed) == (12, 12, True)
