"""The simulator's pool against vLLM's own, operation by operation."""

import hashlib
from types import SimpleNamespace

from examples import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_block_hash

from manthan.manager.simulator.pool import SimulatedPool
from manthan.vllm_hooks.compat import VllmPool

BLOCKS = 12
GROUP = [0]


def keys_of(text: str) -> list[bytes]:
    return [hashlib.sha256(text[: i + 1].encode()).digest() for i in range(len(text))]


class TwoPools(RuleBasedStateMachine):
    """Block n of ours is block n + 1 of vLLM's, whose first one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.ours = SimulatedPool(BLOCKS)
        self.theirs = BlockPool(BLOCKS + 1, enable_caching=True, hash_block_size=16)
        self.of_driver = VllmPool(self.theirs, 0, 16)
        self.requests: list[list[int]] = []
        self.held: list[int] = []

    def of_vllm(self, blocks: list[int]) -> list:
        return [self.theirs.blocks[block + 1] for block in blocks]

    @rule(text=st.text("ab", min_size=1, max_size=5), more=st.integers(0, 2))
    def run_a_request(self, text: str, more: int) -> None:
        """Those of its blocks that are there, and new ones; all but `more` are full and can be found."""
        keys = keys_of(text)
        hits = self.ours.hit(keys[:-1])
        found = []
        for key in keys[:-1]:
            if not (block := self.theirs.get_cached_block(key, GROUP)):
                break
            found += block
        assert [block.block_id - 1 for block in found] == hits
        free = sum(not self.ours.users(block) for block in hits)
        wanted = len(keys) + more - len(hits)
        if wanted + free > len(self.ours):
            return
        self.ours.touch(hits)
        self.theirs.touch(found)
        blocks = hits + self.ours.take(wanted)
        assert [block.block_id - 1 for block in found + self.theirs.get_new_blocks(wanted)] == blocks
        for block, key in zip(blocks[len(hits) : len(keys)], keys[len(hits) :], strict=True):
            self.ours.cache(block, key)
        self.theirs.cache_full_blocks(
            SimpleNamespace(block_hashes=keys), self.of_vllm(blocks), len(hits), len(keys), 16, 0
        )
        self.requests.append(blocks)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end_a_request(self, data: st.DataObject) -> None:
        blocks = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
        self.ours.give_back(reversed(blocks))
        self.theirs.free_blocks(reversed(self.of_vllm(blocks)))

    @rule(text=st.text("ab", min_size=1, max_size=5))
    def hold(self, text: str) -> None:
        key = keys_of(text)[-1]
        block = self.ours._cached.get(key)
        found = self.theirs.get_cached_block(key, GROUP)
        if block is None:
            assert found is None
            return
        self.ours.touch([block])
        assert self.of_driver.hold(key) is found[0]
        self.held.append(block)

    @precondition(lambda self: self.held)
    @rule()
    def let_go(self) -> None:
        block = self.held.pop(0)
        self.ours.give_back([block])
        self.theirs.free_blocks(self.of_vllm([block]))

    @rule(texts=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4))
    def release(self, texts: list[str]) -> None:
        """As the scheduler half does it."""
        keys = [keys_of(text)[-1] for text in texts]
        self.ours.release(keys)
        self.of_driver.release(keys)

    @rule(texts=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4))
    def keep(self, texts: list[str]) -> None:
        keys = [key for text in texts for key in reversed(keys_of(text))]
        self.ours.keep(keys)
        self.of_driver.keep(keys)

    @rule(texts=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4))
    def forget(self, texts: list[str]) -> None:
        keys = [key for text in texts for key in keys_of(text)]
        self.ours.forget(keys)
        self.of_driver.forget(keys)

    @rule()
    def reset(self) -> None:
        if self.theirs.reset_prefix_cache():
            self.ours.release([key for key in self.ours._key if key is not None])
            self.ours._empty = [block.block_id - 1 for block in self.theirs.free_block_queue.get_all_free_blocks()][
                ::-1
            ]

    @invariant()
    def blocks_that_hold_nothing_are_overwritten_first_and_saved_ones_next(self) -> None:
        free = [block.block_id - 1 for block in self.theirs.free_block_queue.get_all_free_blocks()]
        ranks = [0 if block in self.ours._empty else 1 if block in self.ours._kept else 2 for block in free]
        assert ranks == sorted(ranks)
        assert self.theirs.get_num_free_blocks() == len(free)

    @invariant()
    def the_same_blocks_are_free_in_the_same_order(self) -> None:
        queue = self.theirs.free_block_queue.get_all_free_blocks()
        assert len(self.ours) == len(queue) == self.theirs.get_num_free_blocks()
        assert [*reversed(self.ours._empty), *self.ours._kept, *self.ours._queue] == [
            block.block_id - 1 for block in queue
        ]
        hashes = [block.block_hash for block in queue]
        assert list(self.ours.names()) == [None if one is None else get_block_hash(one) for one in hashes]


TwoPools.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
TestTwoPools = TwoPools.TestCase


def test_of_other_groups_blocks_the_pool_tells_their_groups() -> None:
    """They have the same keys as those of the chain, and whether somebody would miss them is another question."""
    pool, keys = BlockPool(7, enable_caching=True, hash_block_size=16), keys_of("ab")
    for group in (1, 0):
        blocks = pool.get_new_blocks(2)
        pool.cache_full_blocks(SimpleNamespace(block_hashes=keys), blocks, 0, 2, 16, group)
        pool.free_blocks(blocks)
    chains = VllmPool(pool, 1, 16)
    told = list(chains.names())
    named = [*keys, *((0, key) for key in keys)]
    assert (len(told), sorted(filter(None, told), key=named.index)) == (6, named)
    assert chains.hold((0, keys[0])).block_id == blocks[0].block_id
