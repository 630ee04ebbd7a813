"""A full tier that need not hold what the pool holds: which blocks are overwritten next, and that all comes to rest."""

import random
from collections import Counter
from typing import Any

import pytest
from integrity import check_integrity
from talks import Talks, long_text

from manthan.manager.driver import BURSTS, HIGH_WATERMARK, LOW_WATERMARK
from manthan.policies import policy_names

LONGEST = 13
"""Blocks of a session, and of what a request takes."""


@pytest.mark.parametrize("policy", policy_names())
@pytest.mark.parametrize("capacity", [3, *[pytest.param(blocks, marks=pytest.mark.slow) for blocks in (12, 20)], 30])
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
