"""Marks in vLLM's own block pool: of new blocks and copies, of blocks that take others' hashes, of parts of blocks."""

from collections.abc import Sequence
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_request_block_hasher, init_none_hash
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request

from manthan.manager.sessions.marks import Mark, Owner
from manthan.vllm_hooks.compat import VllmPool, watch_lookups

TOKENS, PART = 32, 16
"""Of a block, and between two hashes."""
ALICE, BOB = ("", "alice"), ("", "bob")
HASH = get_request_block_hasher(PART, sha256)


@pytest.fixture(scope="module", autouse=True)
def _none_hash() -> None:
    init_none_hash(sha256)


class Asked:
    """vLLM's pool with four blocks of a prompt, which alice's session has brought back."""

    def __init__(self) -> None:
        self.pool = BlockPool(20, True, PART)
        self.blocks = VllmPool(self.pool, 0, TOKENS)
        self.marks = self.blocks.marks
        watch_lookups(self.pool, self.marks, self)
        self.lossy_for: Owner | None = None
        self.request = Request(
            "r", list(range(4 * TOKENS + PART)), SamplingParams(max_tokens=1), None, block_hasher=HASH
        )
        self.decoded = self.pool.get_new_blocks(4)
        self.marks.set(self.blocks.block_ids(self.decoded), Mark.DECODED, ALICE)
        self.enter(self.decoded)

    def computed(self, request: Request, block_ids: Sequence[int]) -> bool:
        """A request behind decoded blocks computes what has no mark."""
        if self.lossy_for is not None:
            new = [block_id for block_id in block_ids if not self.marks[block_id]]
            self.marks.set(new, Mark.DERIVED, self.lossy_for)
        return True

    def asker(self, request: Any) -> Owner | None: ...

    def found(self, request: Any, block_ids: Any) -> None: ...

    def enter(self, blocks: list[KVCacheBlock], first: int = 0) -> None:
        self.pool.cache_full_blocks(self.request, blocks, first, len(blocks), TOKENS, 0)

    def served(self, at: int, owner: Owner | None, tokens: int = TOKENS) -> list[KVCacheBlock] | None:
        """What a lookup of the hash behind so many blocks of `tokens` finds for this asker."""
        pool: Any = self.pool
        pool.manthan_asks = owner
        try:
            found: list[KVCacheBlock] | None = pool.get_cached_block(
                self.request.block_hashes[(at + 1) * tokens // PART - 1], [0]
            )
            return found
        finally:
            pool.manthan_asks = False


@pytest.fixture
def asked() -> Asked:
    return Asked()


def test_a_block_serves_whom_it_may(asked: Asked) -> None:
    assert asked.served(0, ALICE) == asked.decoded[:1]
    assert asked.served(0, BOB) is None
    assert asked.served(0, None) is None


def test_an_allocated_block_has_no_mark(asked: Asked) -> None:
    asked.pool.free_blocks(reversed(asked.decoded))
    asked.pool.get_new_blocks(len(asked.blocks))
    assert not asked.marks


def test_a_copy_has_the_mark_of_its_source(asked: Asked) -> None:
    source, [copy, moved] = asked.decoded[0], asked.pool.get_new_blocks(2)
    manager: Any = FullAttentionManager.__new__(FullAttentionManager)
    manager.block_pool, manager.req_to_blocks, manager._pending_cow_copies = asked.pool, {"r": [source]}, []
    manager._apply_cow("r", 0, source, copy)
    asked.pool.move_block_hashes(source, moved)
    assert [asked.marks[block.block_id] for block in (copy, moved)] == [Mark.DECODED] * 2
    assert asked.served(0, ALICE) == [moved]
    assert asked.served(0, BOB) is None


def test_an_exact_copy_takes_the_hash_from_lossy_ones(asked: Asked) -> None:
    exact = asked.pool.get_new_blocks(2)
    asked.enter(exact)
    assert (
        [asked.served(at, ALICE) for at in (0, 1)] == [asked.served(at, None) for at in (0, 1)] == [[b] for b in exact]
    )
    assert asked.decoded[0].block_hash is None
    assert asked.served(2, ALICE) == asked.decoded[2:3]


def test_a_lossy_copy_takes_no_hash(asked: Asked) -> None:
    exact = asked.pool.get_new_blocks(1)
    asked.enter(exact)
    asked.lossy_for = BOB
    derived = asked.pool.get_new_blocks(1)
    asked.enter(derived)
    assert asked.marks[derived[0].block_id] is Mark.DERIVED
    assert asked.served(0, None) == asked.served(0, BOB) == exact


@pytest.mark.parametrize("is_lossy", [True, False])
def test_a_part_of_a_block_is_marked_as_the_block(asked: Asked, is_lossy: bool) -> None:
    """vLLM 0.32 finds the beginnings of blocks in hybrid models."""
    asked.lossy_for = ALICE if is_lossy else None
    [block] = asked.pool.get_new_blocks(1)
    asked.pool.cache_partial_block(asked.request, block, 4 * TOKENS + PART, 0, TOKENS)
    assert asked.served(8, BOB, PART) == (None if is_lossy else [block])
    assert asked.served(8, ALICE, PART) == [block]
    assert asked.marks[block.block_id] is (Mark.DERIVED if is_lossy else Mark.EXACT)


def test_an_exact_part_takes_the_hash_from_a_lossy_one(asked: Asked) -> None:
    parts = asked.pool.get_new_blocks(2)
    for asked.lossy_for, block in zip((ALICE, None), parts, strict=True):
        asked.pool.cache_partial_block(asked.request, block, 4 * TOKENS + PART, 0, TOKENS)
    assert asked.served(8, None, PART) == asked.served(8, ALICE, PART) == parts[1:]
