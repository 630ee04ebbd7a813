"""Prefetched blocks in vLLM's own block pool: they are what vLLM would have made of them, and nobody loses any."""

from collections.abc import Sequence
from itertools import count
from typing import Any

import jobs
import pytest
import torch
from spills import spilled, take_spills
from vllm import EngineArgs, SamplingParams
from vllm.distributed.kv_events import BlockStored
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    KVCacheBlock,
    get_block_hash,
    get_request_block_hasher,
    init_none_hash,
    maybe_convert_block_hash,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request
from vllm_engine import MODEL

from manthan.manager.observer import Observer, Restored
from manthan.manager.prefetcher import RETRY_S, Prefetcher
from manthan.manager.sessions.hints import Hints
from manthan.manager.sessions.manager import SessionMemoryManager
from manthan.manager.sessions.pressure import Runway
from manthan.manager.sessions.session import MemoryShape, Place
from manthan.manager.transfer import Transfer
from manthan.policies import get_policy
from manthan.vllm_hooks import kv_transfer_config
from manthan.vllm_hooks.compat import VllmPool
from manthan.vllm_hooks.scheduler_half import LEAD_S, SchedulerHalf

TOKENS = 16
GROUP, WINDOW = 0, 1
BLOCKS = 20
SPARE = 4
IDLE_AFTER_S = 10.0
HASH = get_request_block_hasher(TOKENS, sha256)


@pytest.fixture(scope="module", autouse=True)
def _none_hash() -> None:
    init_none_hash(sha256)


def request(name: str, blocks: int, head: str = "") -> Request:
    """One whose full blocks follow from its name; the first two, with `head`, from that."""
    tokens = [hash_of((head if n < 2 * TOKENS and head else name), n) for n in range(blocks * TOKENS + 1)]
    return Request(name, tokens, SamplingParams(max_tokens=1), None, block_hasher=HASH)


def hash_of(text: str, n: int) -> int:
    return int.from_bytes(f"{text}{n}".encode()) % 50_000


class Counted(Observer):
    """Counts what is told of prefetches."""

    def __init__(self) -> None:
        self.prefetches, self.blocks, self.hits = 0, 0, 0

    def restored(self, restored: Restored) -> None:
        assert restored.is_prefetch
        self.prefetches += 1
        self.blocks += restored.good

    def prefetch_hit(self) -> None:
        self.hits += 1


def told_of(name: tuple[int, bytes], medium: str) -> BlockStored:
    group, key = name
    return BlockStored([maybe_convert_block_hash(BlockHash(key))], None, [], TOKENS, None, medium, None, None, group)


class Engine:
    """A block pool of vLLM's with sessions in it, and the prefetcher; codes are stored and loaded at once."""

    def __init__(self, ranks: int = 1, window: int = 0) -> None:
        """window: so many last blocks of a session are needed of a second KV cache group; 0 for none."""
        self.pool, self.window = BlockPool(BLOCKS + 1, True, TOKENS, enable_kv_cache_events=True), window
        shape = MemoryShape(TOKENS, 500, {0: 100}, beside={WINDOW: {0: 100}} if window else {})
        self.manager = SessionMemoryManager(get_policy("lru"), shape, 10_000, IDLE_AFTER_S, prefetch_lead_s=1.0)
        self.counted = Counted()
        blocks = VllmPool(self.pool, GROUP, TOKENS, told_of)
        runway = Runway(blocks, self.manager, ahead=9)
        self.blocks = blocks
        self.prefetcher = Prefetcher(self.manager, blocks, runway, ranks, BLOCKS, SPARE, self.counted, count())
        self.now = 0.0

    def compute(self, asked: Request, **hints: Any) -> None:
        """vLLM computes a request of the session of that name, and caches its blocks."""
        name, keys = asked.request_id, asked.block_hashes
        self.manager.request_started(name, keys, name, self.now, hints=Hints(**hints))
        hot: list[KVCacheBlock] = []
        while len(hot) < len(keys) and (found := self.pool.get_cached_block(keys[len(hot)], [0])):
            hot += found
        self.pool.touch(hot)
        blocks = hot + self.pool.get_new_blocks(len(keys) - len(hot))
        self.pool.cache_full_blocks(asked, blocks, len(hot), len(keys), TOKENS, 0)
        self.pool.free_blocks(reversed(blocks))
        self.manager.request_finished(name, keys, self.now, places=[Place(len(keys), self.compute_window(keys))])

    def compute_window(self, keys: list[Any]) -> list[tuple[int, bytes, int]]:
        """Group, key and depth of the last blocks of the second group, which vLLM caches."""
        parts = [(WINDOW, keys[at], at) for at in range(max(0, len(keys) - self.window), len(keys))]
        blocks = self.pool.get_new_blocks(len(parts))
        for block, (group, key, at) in zip(blocks, parts, strict=True):
            self.blocks.cache(block, key, at, group)
        self.pool.free_blocks(blocks)
        return parts

    def overwrite_all(self) -> None:
        """Other requests take all blocks for a moment."""
        self.pool.free_blocks(self.pool.get_new_blocks(self.pool.get_num_free_blocks()))

    def evict(self) -> None:
        """All that is idle goes cold, and leaves the pool."""
        self.now += IDLE_AFTER_S
        self.manager.sweep(self.now)
        for order in take_spills(self.manager, 1000):
            spilled(self.manager, order.key, 100, self.now, order.group)
        self.blocks.release(self.manager.take_releases())  # what returns is restored

    def prefetch(self, *names: str) -> Sequence[Transfer]:
        self.compute(request("who asks", 1), prefetch=names)
        return self.step()

    def step(self) -> Sequence[Transfer]:
        return self.prefetcher.step(self.now)

    def answer(self, load: Transfer, *failed: int, cause: str = "missing") -> None:
        self.prefetcher.answered(jobs.done(load, failed=dict.fromkeys(failed, cause)), self.now)

    def queue(self) -> list[bytes | None]:
        """What the free blocks hold, the next to be overwritten first."""
        blocks = self.pool.free_block_queue.get_all_free_blocks()
        return [None if b.block_hash is None else get_block_hash(b.block_hash) for b in blocks]

    def cached(self, asked: Request) -> list[bool]:
        return [self.pool.get_cached_block(key, [0]) is not None for key in asked.block_hashes]

    def admitted(self, asked: Request, hot: int) -> None:
        usable = (asked.num_tokens - 1) // TOKENS
        self.prefetcher.admitted(asked.request_id, asked.block_hashes, hot, usable)


def in_window(engine: Engine, asked: Request) -> list[bool]:
    return [engine.pool.get_cached_block(key, [WINDOW]) is not None for key in asked.block_hashes]


def cold_with_window() -> tuple[Engine, Request]:
    engine, a = Engine(window=2), request("a", 5)
    engine.compute(a)
    engine.evict()
    engine.overwrite_all()
    return engine, a


def test_a_window_is_prefetched_with_its_chain() -> None:
    engine, a = cold_with_window()
    engine.pool.take_events()
    chain, window = engine.prefetch("a")
    assert (chain.group, chain.block_hashes) == (GROUP, a.block_hashes)
    assert (window.group, window.block_hashes) == (WINDOW, a.block_hashes[3:])
    engine.answer(chain)
    assert engine.prefetcher.is_loading(a.block_hashes[0]), "one job of two has ended"
    engine.answer(window)
    assert engine.cached(a) == [True] * 5
    assert in_window(engine, a) == [False] * 3 + [True] * 2
    [last] = engine.pool.get_cached_block(a.block_hashes[4], [WINDOW]) or []
    assert (last.block_id, last.block_hash_num_tokens) == (window.block_ids[1], 5 * TOKENS)
    told = [event for event in engine.pool.take_events() if isinstance(event, BlockStored)]
    assert [event.group_idx for event in told[-7:]] == [GROUP] * 5 + [WINDOW] * 2
    assert engine.pool.get_num_free_blocks() == BLOCKS
    engine.admitted(request("a", 6), hot=5)
    assert engine.counted.hits == 1


def test_what_follows_a_failure_is_not_entered() -> None:
    """Workers leave a load at the first block that they cannot read, and name no other."""
    for group, at in ((WINDOW, 3), (GROUP, 2)):
        engine, a = cold_with_window()
        for job in engine.prefetch("a"):
            engine.answer(job, *[job.block_hashes.index(a.block_hashes[at])] if job.group == group else [])
        assert in_window(engine, a) == [False] * 5
        assert engine.cached(a) == [True] * (5 if group == WINDOW else 2) + [False] * (0 if group == WINDOW else 3)
        assert engine.manager.match(a.block_hashes) == 0
        assert engine.pool.get_num_free_blocks() == BLOCKS


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_the_next_session_s_turn_asks_for_a_step(engine: Engine) -> None:
    """An engine without requests steps only while there is work."""
    names = ("alice", "bob", "carol")
    for name in names:
        engine.compute(request(name, 3))
    engine.evict()
    [load] = engine.prefetch(*names)
    for _ in names[1:]:
        assert engine.prefetcher.has_work
        engine.answer(load)
        assert engine.prefetcher.has_work
        [load] = engine.step()
    engine.answer(load)
    assert engine.step() == []
    assert not engine.prefetcher.has_work
    assert engine.counted.prefetches == 3


def test_a_prefetched_chain_lies_in_the_pool_as_vllm_s_own_does(engine: Engine) -> None:
    a = request("a", 5)
    engine.compute(a)
    engine.compute(request("who asks", 1))
    own = [(engine.pool.get_cached_block(key, [0]) or [])[0].block_hash_num_tokens for key in a.block_hashes]
    engine.evict()
    assert engine.queue() == [None] * BLOCKS
    engine.pool.take_events()
    [load] = engine.prefetch("a")
    assert load.block_hashes == a.block_hashes
    assert engine.pool.get_num_free_blocks() == BLOCKS - 5
    assert engine.cached(a) == [False] * 5  # until every code was checked
    engine.answer(load)
    assert engine.pool.get_num_free_blocks() == BLOCKS
    assert engine.queue()[-6:-1] == a.block_hashes[::-1]  # they are saved, and what the one has who asked is not
    assert engine.queue()[:-6] == [None] * (BLOCKS - 6)
    blocks = [(engine.pool.get_cached_block(key, [0]) or [])[0] for key in a.block_hashes]
    assert [block.block_hash_num_tokens for block in blocks] == own == [16, 32, 48, 64, 80]
    assert [block.block_id for block in blocks] == load.block_ids.tolist()
    told = [event for event in engine.pool.take_events() if isinstance(event, BlockStored)][1:]  # after who asked
    names = [maybe_convert_block_hash(key) for key in a.block_hashes]
    assert [event.block_hashes for event in told] == [[name] for name in names]
    assert engine.pool.reset_prefix_cache()


def test_a_block_that_was_computed_meanwhile_is_not_entered_twice(engine: Engine) -> None:
    a, other = request("a", 5, head="system"), request("other", 3, head="system")
    engine.compute(a)
    engine.evict()
    [load] = engine.prefetch("a")
    engine.compute(other)
    theirs = [(engine.pool.get_cached_block(key, [0]) or [])[0].block_id for key in other.block_hashes]
    engine.answer(load)
    for key, block_id in zip(other.block_hashes, theirs, strict=True):
        [found] = engine.pool.get_cached_block(key, [0]) or []
        assert engine.pool.cached_block_hash_to_block._cache[found.block_hash] is found  # not one of two
        assert found.block_id == block_id
    unsaved = [key for key in engine.queue() if key is not None and not engine.manager.is_saved(key)]
    held = [key for key in engine.queue() if key is not None]
    assert held == [*a.block_hashes[::-1], *unsaved]
    assert engine.pool.get_num_free_blocks() == BLOCKS


def test_only_the_run_before_a_failure_is_entered_and_all_blocks_come_back() -> None:
    engine = Engine(ranks=2)
    a = request("a", 6)
    engine.compute(a)
    engine.evict()
    [load] = engine.prefetch("a")
    engine.answer(load, 4)
    assert engine.prefetcher.is_busy  # the other rank
    assert engine.cached(a) == [False] * 6
    engine.answer(load, 2)
    assert engine.cached(a) == [True, True, False, False, False, False]
    assert engine.pool.get_num_free_blocks() == BLOCKS
    assert engine.queue()[:4] == [None] * 4
    assert engine.manager.table.by_id["a"].state == "cold"
    assert len(engine.manager.table.by_id["a"].chain) == 2  # the codes that could not be read are dropped
    assert engine.pool.reset_prefix_cache()


def test_codes_in_a_store_that_is_down_are_kept(engine: Engine) -> None:
    engine.compute(request("a", 3))
    engine.evict()
    [load] = engine.prefetch("a")
    engine.answer(load, 0, cause="store_down")
    assert len(engine.manager.table.by_id["a"].chain) == 3
    assert engine.cached(request("a", 3)) == [False] * 3


def test_after_a_reset_nothing_is_entered(engine: Engine) -> None:
    a = request("a", 3)
    engine.compute(a)
    engine.evict()
    [load] = engine.prefetch("a")
    assert engine.prefetcher.is_loading(a.block_hashes[1])
    assert not engine.pool.reset_prefix_cache()  # blocks are in use
    engine.manager.reset()
    engine.prefetcher.reset()
    assert not engine.prefetcher.is_loading(a.block_hashes[1])
    engine.compute(a)  # anew, and overwritten at once
    engine.pool.evict_blocks({engine.pool.get_cached_block(key, [0])[0].block_id for key in a.block_hashes})
    engine.answer(load)
    assert engine.cached(a) == [False] * 3
    assert engine.pool.reset_prefix_cache()
    assert (engine.counted.prefetches, engine.prefetcher.is_busy) == (0, False)


SAVED_AFTER_S = 5.0


def test_a_session_is_due_two_seconds_before_it_is_expected() -> None:
    transfer = kv_transfer_config(idle={"after_s": SAVED_AFTER_S, "min_tokens": 64})
    vllm_config = EngineArgs(MODEL, skip_tokenizer_init=True, kv_transfer_config=transfer).create_engine_config()
    spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=128, dtype=torch.bfloat16)
    group = KVCacheGroupSpec([f"model.layers.{n}" for n in range(4)], spec)
    half = SchedulerHalf(vllm_config, KVCacheConfig(10, [], [group]), lambda call, *args, otherwise: call(*args))
    keys = [bytes([n]) * 32 for n in range(8)]
    half.manager.request_started("r", keys, "expected", 0.0, hints=Hints(expect_return_s=20))
    half.manager.request_finished("r", keys, 0.0)
    assert half.manager.next_deadline == SAVED_AFTER_S
    half.manager.sweep(SAVED_AFTER_S)
    for order in take_spills(half.manager, len(keys)):
        spilled(half.manager, order.key, 100, SAVED_AFTER_S)
    assert half.manager.next_deadline == 20 - LEAD_S


# -- room ---------------------------------------------------------------------------------------------


def test_a_session_that_is_longer_than_what_the_pool_can_spare_is_not_waited_for(engine: Engine) -> None:
    engine.compute(request("a", BLOCKS - SPARE + 1))
    engine.compute(request("b", BLOCKS - SPARE))
    engine.evict()
    engine.compute(request("who asks", 1), prefetch=["a"])
    assert engine.step() == []
    engine.evict()
    assert (engine.step(), engine.manager.prefetch_blocks(engine.now)) == ([], 0)
    engine.compute(request("who asks", 1), prefetch=["b"])
    assert engine.step() == []
    engine.evict()
    [load] = engine.step()
    assert len(load.block_hashes) == BLOCKS - SPARE


def test_room_that_a_waiting_request_needs_is_left_to_it(engine: Engine) -> None:
    engine.compute(request("a", 8))
    engine.evict()
    engine.prefetcher.waits("waiting", 10)
    assert engine.prefetch("a") == []
    engine.admitted(request("waiting", 9), hot=0)
    assert engine.step() == []  # not at once
    assert engine.prefetcher.deadline == engine.now + RETRY_S
    engine.now += RETRY_S
    assert len(engine.step()) == 1
    assert engine.prefetcher.deadline is None


def test_an_aborted_request_waits_for_nothing(engine: Engine) -> None:
    engine.compute(request("a", 8))
    engine.evict()
    engine.prefetcher.waits("waiting", 10)
    engine.prefetcher.forget("waiting")
    assert len(engine.prefetch("a")) == 1


# -- hits ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("hot", "hits"), [(5, 1), (4, 0), (0, 0)])
def test_a_hit_is_a_request_that_finds_all_of_it(engine: Engine, hot: int, hits: int) -> None:
    a = request("a", 5)
    engine.compute(a)
    engine.evict()
    [load] = engine.prefetch("a")
    engine.answer(load)
    engine.admitted(a, hot=hot)
    assert engine.counted.hits == hits
    engine.admitted(a, hot=5)
    assert engine.counted.hits == (1 if hot != 4 else 0)  # each prefetch is used once
