"""vLLM's block pool as the driver sees it: what it holds, and which blocks it overwrites first."""

import pytest
from real_pool import RealPool
from talks import Talks, last_words, names

from manthan.manager.pool import Mark

MAIN, WINDOW = 0, 1


@pytest.fixture
def pool() -> RealPool:
    """Return a pool of nine blocks that had two requests, and three blocks of another group."""
    pool = RealPool(9, windows=1)
    for text, group in (("a b", MAIN), ("c d", MAIN), ("u v w", WINDOW)):
        pool.free(enter(pool, text, group)[::-1])
    assert pool.queue() == "- - b a d c w v u"
    return pool


def enter(pool: RealPool, text: str, group: int = MAIN) -> list[int]:
    """Have the pool hold a text whose blocks are referenced, and return them."""
    blocks = pool.take(len(text.split()))
    pool.cache_all(blocks, names(text), group)
    return blocks


def test_a_block_that_is_handed_out_is_neither_saved_nor_marked(pool: RealPool) -> None:
    pool.keep(MAIN, names("a b"))
    pool.marks.set([1, 2], Mark.DECODED, None)
    blocks = pool.take(3)
    assert blocks[2:] == [1]
    assert pool.lookup(MAIN, names("a")) == [-1]
    assert pool.marks.lossy([1, 2]) == {2}
    pool.cache_all([1], names("z"))
    pool.free(blocks)
    assert last_words(each.block_hash for each in pool.unsaved(9)) == "d c w v u z"


def test_a_loaded_block_is_saved_until_it_is_handed_out(pool: RealPool) -> None:
    for saved, queue in ((True, "y x b a d c w v u"), (False, "b a d c w v u y x")):
        blocks = pool.take(2)
        if saved:
            pool.loaded(blocks)
        pool.cache_all(blocks, names("x y"))
        pool.free(blocks[::-1])
        assert pool.queue() == queue


def test_saved_blocks_of_all_groups_are_overwritten_before_unsaved_ones(pool: RealPool) -> None:
    pool.keep(WINDOW, names("u v w")[::-1])
    pool.keep(MAIN, names("c d")[::-1])
    assert pool.queue() == "- - w v u d c b a"
    assert pool.runway(9) == 7


def test_nothing_is_saved_after_a_reset(pool: RealPool) -> None:
    pool.keep(MAIN, names("a b"))
    pool.marks.set([3], Mark.DECODED, None)
    assert pool.vllm.reset_prefix_cache()
    assert not pool.marks
    assert pool.runway(9) == 9
    pool.free(enter(pool, "a b c d e f g h i"))
    assert pool.runway(9) == 0


def test_a_copy_of_a_saved_block_is_known_as_saved_when_its_session_is_cold_again() -> None:
    """vLLM computes the last block of a prompt although it has it."""
    pool = RealPool(12)
    talks = Talks(pool=pool)
    talks.talk("a b c", "alice")
    talks.rest()
    request = talks.start("a b c", "alice")
    blocks = pool.take(1)
    pool.cache_all(blocks, names("a b c")[2:])
    talks.finish(request, "a b c")
    pool.free(blocks)
    assert pool.runway(12) == 11
    talks.rest()
    assert pool.runway(12) == 12
