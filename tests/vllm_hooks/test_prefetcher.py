"""Prefetched blocks in vLLM's own block pool: they are as vLLM would have made them, and nobody loses any."""

from collections.abc import Sequence

import pytest
from real_pool import TOKENS, RealPool
from talks import GROUP, Talks, names
from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from manthan.manager.events import PrefetchHit, Restored
from manthan.manager.pool import BlockName
from manthan.manager.session.blocks import GroupShape, MemoryShape
from manthan.manager.session.prefetch import RETRY_S
from manthan.manager.transfer import Transfer

MAIN, WINDOW = 0, 1
BLOCKS = 20
TEXT = "a b c d e"
WINDOWS = MemoryShape({MAIN: GROUP, WINDOW: GroupShape(TOKENS, 500, {0: 100})})
"""Sizes of a model with sliding windows."""


def told_of(name: BlockName, medium: str) -> BlockStored:
    group, block_hash = name
    hashes = [maybe_convert_block_hash(BlockHash(block_hash))]
    return BlockStored(hashes, None, [], TOKENS, None, medium, None, None, group)


class Prefetching(Talks):
    """A session with TEXT is cold and expected. Its load is under way.

    window: number of blocks that it needs of a second KV cache group; 0 for none.
    """

    def __init__(self, window: int = 0) -> None:
        self.real = RealPool(BLOCKS, windows=1, event=told_of)
        more = {"shape": WINDOWS} if window else {}
        super().__init__(pool=self.real, driver={"prefetch_lead_s": 1.0}, **more)
        points = [self.point(TEXT, {WINDOW: window})] if window else []
        self.finish(self.start(TEXT, "a"), TEXT, points)
        self.rest()
        self.overwrite()
        self.talk("who asks", "b", prefetch=["a"])
        self.entered()
        self.holds = True
        self.loads: Sequence[Transfer] = self.step().loads

    def found(self, group: int = MAIN) -> list[bool]:
        """Return for each block of TEXT whether the pool has it."""
        return [block > 0 for block in self.pool.lookup(group, names(TEXT))]

    def entered(self) -> list[BlockStored]:
        """Return what routers are told of blocks that came into the pool since the last call."""
        return [event for event in self.real.vllm.take_events() if isinstance(event, BlockStored)]

    def is_loading(self) -> bool:
        row = self.manager.blocks.row(MAIN, names(TEXT)[0])
        load = self.driver.prefetcher.load
        return load is not None and load.brings(row)


def test_a_window_is_prefetched_with_its_session() -> None:
    talks = Prefetching(window=2)
    main, window = talks.loads
    assert (main.group, main.block_hashes) == (MAIN, names(TEXT))
    assert (window.group, window.block_hashes) == (WINDOW, names(TEXT)[3:])
    talks.answer([main])
    assert (talks.is_loading(), talks.found()) == (True, [False] * 5), "one job of two has ended"
    talks.answer([window])
    assert (talks.is_loading(), talks.found(), talks.found(WINDOW)) == (False, [True] * 5, [False] * 3 + [True] * 2)
    last = talks.real.vllm.blocks[window.block_ids[1]]
    assert talks.pool.lookup(WINDOW, names(TEXT)[4:]) == [last.block_id]
    assert last.block_hash_num_tokens == 5 * TOKENS
    assert talks.real.queue().split()[-9:] == ["e", "d", "e", "d", "c", "b", "a", "asks", "who"], "windows first"
    assert [event.group_idx for event in talks.entered()] == [MAIN] * 5 + [WINDOW] * 2
    assert len(talks.pool) == BLOCKS
    talks.start(f"{TEXT} f", "a")
    assert len(talks.told(PrefetchHit)) == 1


@pytest.mark.parametrize(("group", "at", "main"), [(WINDOW, 0, 5), (MAIN, 2, 2)])
def test_blocks_behind_a_failure_are_not_entered(group: int, at: int, main: int) -> None:
    """Workers end a load at the first block that they cannot read, and name no other."""
    talks = Prefetching(window=2)
    for job in talks.loads:
        talks.answer([job], failed={at: "missing"} if job.group == group else {})
    assert [event.group_idx for event in talks.entered()] == [MAIN] * main
    assert "a" not in talks.states(), "its only resume point is lost"
    assert (talks.found(), talks.found(WINDOW), len(talks.pool)) == ([False] * 5, [False] * 5, BLOCKS)


def test_prefetched_blocks_lie_in_the_pool_as_vllm_s_own_do() -> None:
    talks = Prefetching()
    [load] = talks.loads
    assert load.block_hashes == names(TEXT)
    assert (len(talks.pool), talks.found()) == (BLOCKS - 5, [False] * 5), "nothing is checked yet"
    talks.answer([load])
    assert talks.real.queue().split() == ["-"] * (BLOCKS - 7) + ["e", "d", "c", "b", "a", "asks", "who"]
    assert talks.pool.lookup(MAIN, names(TEXT)) == load.block_ids.tolist()
    assert [talks.real.vllm.blocks[at].block_hash_num_tokens for at in load.block_ids] == [16, 32, 48, 64, 80]
    told = [[maybe_convert_block_hash(BlockHash(block_hash))] for block_hash in names(TEXT)]
    assert [event.block_hashes for event in talks.entered()] == told
    assert talks.real.vllm.reset_prefix_cache()


def test_after_a_reset_nothing_is_entered() -> None:
    talks = Prefetching()
    assert talks.is_loading()
    assert not talks.real.vllm.reset_prefix_cache(), "blocks are referenced"
    talks.driver.reset(talks.now)
    assert not talks.is_loading()
    talks.talk(TEXT, "a")
    talks.overwrite()
    talks.answer(talks.loads)
    assert talks.found() == [False] * 5
    assert talks.real.vllm.reset_prefix_cache()
    assert (talks.told(Restored), talks.driver.prefetcher.load) == ([], None)


def test_a_pool_that_overwrites_unsaved_blocks_next_has_no_room() -> None:
    talks = Talks(low=0.2, pool=RealPool(10), driver={"prefetch_lead_s": 1.0})
    talks.talk("a b c", "A", expect_return_s=20)
    talks.rest()
    talks.overwrite()
    talks.now = 18.5
    talks.talk("p q r s t u v w x y", "P")
    talks.now = 19.0
    assert not talks.step().loads
    talks.rest()
    talks.overwrite()
    talks.now += RETRY_S
    assert [list(load.block_hashes) for load in talks.step().loads] == [names("a b c")]
