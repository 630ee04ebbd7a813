"""The simulator's pool against vLLM's own, operation by operation."""

from types import SimpleNamespace

from examples import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from talks import names
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_block_hash

from manthan.benchmarks.simulator.pool import SimulatedPool
from manthan.manager.pool import Pool
from manthan.vllm_hooks.compat import VllmPool

BLOCKS = 12
WINDOW = 1
"""KV cache group besides group 0."""
GROUPS = st.sampled_from([0, WINDOW])
TEXT = st.text("ab", min_size=1, max_size=5).map(" ".join)
SOME = st.lists(TEXT, max_size=4).map(lambda texts: [block_hash for text in texts for block_hash in names(text)])


class TwoPools(RuleBasedStateMachine):
    """Block n of the simulator is block n + 1 of vLLM, which never uses its first one."""

    def __init__(self) -> None:
        super().__init__()
        self.ours = SimulatedPool(BLOCKS)
        self.vllm = BlockPool(BLOCKS + 1, enable_caching=True, hash_block_size=16)
        self.theirs = VllmPool(self.vllm, {0: 16, WINDOW: 16})
        self.both: list[tuple[Pool, int]] = [(self.ours, 0), (self.theirs, 1)]
        self.held: list[list[int]] = []
        """Blocks of each request or transfer."""

    def of_vllm(self, blocks: list[int]) -> list[KVCacheBlock]:
        return [self.vllm.blocks[block + 1] for block in blocks]

    @rule(text=TEXT, more=st.integers(0, 2))
    def run_a_request(self, text: str, more: int) -> None:
        """vLLM computes the last full block of a prompt in any case; `more` others are not full."""
        hashes = names(text)
        hits = self.ours.hit(hashes[:-1])
        free = sum(not self.ours.users(block) for block in hits)
        wanted = len(hashes) + more - len(hits)
        if wanted + free > len(self.ours):
            return
        self.ours.hold(hits)
        self.vllm.touch(self.of_vllm(hits))
        blocks = hits + self.ours.take(wanted)
        assert self.vllm.get_new_blocks(wanted) == self.of_vllm(blocks[len(hits) :])
        self.ours.cache_all(blocks[len(hits) : len(hashes)], hashes[len(hits) :])
        request = SimpleNamespace(block_hashes=hashes)
        self.vllm.cache_full_blocks(request, self.of_vllm(blocks), len(hits), len(hashes), 16, 0)
        self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end_a_request(self, data: st.DataObject) -> None:
        blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))[::-1]
        self.ours.free(blocks)
        self.vllm.free_blocks(self.of_vllm(blocks))

    @rule(text=TEXT, group=GROUPS, is_saved=st.booleans(), is_cached=st.booleans())
    def load(self, text: str, group: int, is_saved: bool, is_cached: bool) -> None:
        """Enter one block, which stays referenced. A request that is aborted does not enter the loaded block."""
        if len(self.ours):
            self.held.append(self.ours.take(1))
            assert self.theirs.take(1) == [self.held[-1][0] + 1]
            for pool, first in self.both:
                if is_saved:
                    pool.loaded([self.held[-1][0] + first])
                if is_cached:
                    pool.cache(self.held[-1][0] + first, group, names(text)[-1], len(names(text)) - 1)

    @rule(text=TEXT, group=GROUPS)
    def hold(self, text: str, group: int) -> None:
        found = [block for block in self.ours.lookup(group, names(text)) if block >= 0]
        for pool, first in self.both:
            pool.hold([block + first for block in found])
        self.held.append(found)

    @rule(hashes=SOME, group=GROUPS)
    def release(self, hashes: list[bytes], group: int) -> None:
        for pool, _ in self.both:
            pool.release(group, hashes)

    @rule(hashes=SOME, group=GROUPS)
    def give_up(self, hashes: list[bytes], group: int) -> None:
        for pool, _ in self.both:
            pool.give_up(group, hashes)

    @rule(hashes=SOME, group=GROUPS)
    def keep(self, hashes: list[bytes], group: int) -> None:
        for pool, _ in self.both:
            pool.keep(group, hashes[::-1])

    @rule(hashes=SOME, group=GROUPS)
    def lead(self, hashes: list[bytes], group: int) -> None:
        for pool, _ in self.both:
            pool.lead(group, hashes)

    @rule(hashes=SOME, group=GROUPS)
    def forget(self, hashes: list[bytes], group: int) -> None:
        for pool, _ in self.both:
            pool.forget(group, hashes)

    @precondition(lambda self: not any(self.held))
    @rule()
    def reset(self) -> None:
        assert self.vllm.reset_prefix_cache()
        self.ours.clear()
        self.ours._empty.sort(key=[block.block_id - 1 for block in self.queue()].index, reverse=True)

    def queue(self) -> list[KVCacheBlock]:
        return self.vllm.free_block_queue.get_all_free_blocks()

    @invariant()
    def the_same_blocks_are_free_in_the_same_order(self) -> None:
        queue, ours = self.queue(), self.ours
        assert len(ours) == len(self.theirs) == len(queue)
        assert [*ours._empty[::-1], *ours._kept, *ours._rest] == [block.block_id - 1 for block in queue]
        held = [None if block.block_hash is None else get_block_hash(block.block_hash) for block in queue]
        assert held == [(ours._name[block.block_id - 1] or (0, None))[1] for block in queue]

    @invariant()
    def blocks_that_hold_nothing_stand_before_saved_ones_and_these_before_the_others(self) -> None:
        ranks = [0 if one.block_hash is None else 2 - (one.block_id in self.theirs._saved) for one in self.queue()]
        assert ranks == sorted(ranks)

    @invariant()
    def both_answer_alike(self) -> None:
        ours, theirs = self.ours, self.theirs
        every = [name for text in ("a b a b a", "b a b b b", "a a a a a", "b b a a b") for name in names(text)]
        for group in (0, WINDOW):
            assert [block + (block >= 0) for block in ours.lookup(group, every)] == theirs.lookup(group, every)
        for count in (0, 3, 7, BLOCKS):
            assert ours.runway(count) == theirs.runway(count)
            unsaved, redundant = (
                [(each.group, each.block_hash, each.block_id + 1) for each in found]
                for found in (ours.unsaved(count), ours.redundant(count))
            )
            assert unsaved == list(theirs.unsaved(count))
            saved = [(at, (each.group, each.block_hash, each.block_id + 1)) for at, each in ours.saved(count)]
            assert saved == list(theirs.saved(count))
            assert sorted(redundant) == sorted(theirs.redundant(count))
            free = [each for each in redundant if not self.vllm.blocks[each[2]].ref_cnt]
            assert free == [each for each in theirs.redundant(count) if not self.vllm.blocks[each.block_id].ref_cnt]


TwoPools.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
TestTwoPools = TwoPools.TestCase


def test_a_block_given_up_is_an_unsaved_one_once_a_request_has_used_it() -> None:
    pools = TwoPools()
    pools.run_a_request("a b a", 0)
    for pool, first in pools.both:
        pool.free([block + first for block in pools.held[0][::-1]])
        pool.give_up(0, names("a b a"))
        assert pool.runway(BLOCKS) == BLOCKS
        assert pool.lookup(0, names("a b a")) == [block + first for block in pools.held[0]]
        used = pool.lookup(0, names("a b"))
        pool.hold(used)
        pool.free(used[::-1])
        assert pool.runway(BLOCKS) == BLOCKS - 2
    pools.the_same_blocks_are_free_in_the_same_order()
    pools.both_answer_alike()


def test_after_a_hit_on_a_block_given_up_saved_blocks_are_still_overwritten_before_unsaved_ones() -> None:
    pools = TwoPools()
    pools.run_a_request("a b a b", 0)
    last = names("a b a b")[-1:]
    for pool, first in pools.both:
        pool.free([block + first for block in pools.held[0][::-1]])
        pool.give_up(0, last)
        used = pool.lookup(0, last)
        pool.hold(used)
        pool.free(used)
        pool.keep(0, names("a b"))
        assert pool.runway(BLOCKS) == BLOCKS - 2
    pools.the_same_blocks_are_free_in_the_same_order()
