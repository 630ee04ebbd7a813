"""Marks in vLLM's own block pool: of new blocks and copies, of blocks that take others' hashes, of parts of blocks."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.request import Request

from manthan.manager.pool import Mark, Owner
from manthan.vllm_hooks.compat import Lookups, VllmPool
from manthan.vllm_hooks.scheduler_half import SchedulerHalf

TOKENS, PART = 32, 16
"""Of a block, and between two hashes."""
PROMPT = list(range(4 * TOKENS + PART + 1))
"""Four blocks, and the beginning of one."""
ALICE, BOB = ("", "alice"), ("", "bob")
SPEC = FullAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)


@pytest.fixture(scope="module", autouse=True)
def _none_hash() -> None:
    init_none_hash(sha256)


def ids(blocks: Sequence[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]


class Asked:
    """vLLM's KV cache with four blocks of a prompt, which alice's session has brought back.

    Args:
        tokens: between two hashes. vLLM looks up parts of blocks in hybrid models only, and enters them in all.
    """

    def __init__(self, tokens: int = TOKENS) -> None:
        config = KVCacheConfig(26, [], [KVCacheGroupSpec(["layer"], SPEC)])
        self.manager = KVCacheManager(config, 1024, scheduler_block_size=TOKENS, hash_block_size=TOKENS)
        self.pool = self.manager.block_pool
        self.pool.hash_block_size = tokens
        self.hash = get_request_block_hasher(tokens, sha256)
        self.blocks = VllmPool(self.pool, {0: TOKENS})
        self.marks = self.blocks.marks
        Lookups(self.manager, self.marks, self)
        self.owner: Owner | None = None
        """Whose request looks blocks up."""
        self.lossy_for: Owner | None = None
        """Whose requests compute behind lossy blocks."""
        self.told: list[list[int]] = []
        """Blocks that were found for a request, by group."""
        self.count = 0
        self.decoded = self.enter(4 * TOKENS, Mark.DECODED)

    def ask(self, call: Callable[..., Any], *args: Any, otherwise: Any) -> Any:
        return call(*args)

    def computed(self, request: Request, block_ids: Sequence[int]) -> bool:
        """Mark the blocks without a mark as computed behind lossy ones."""
        if self.lossy_for is not None:
            self.marks.set(set(block_ids) - self.marks.lossy(block_ids), Mark.DERIVED, self.lossy_for)
        return True

    def asker(self, request: Any) -> Owner | None:
        return self.owner

    def found(self, request: Any, block_ids: Any) -> None:
        self.told = block_ids

    def request(self) -> Request:
        self.count += 1
        return Request(str(self.count), PROMPT, SamplingParams(max_tokens=1), None, block_hasher=self.hash)

    def enter(self, tokens: int, mark: Mark = Mark.EXACT) -> list[KVCacheBlock]:
        """Return the blocks of a request that has computed or loaded this number of the prompt's tokens."""
        request = self.request()
        new = self.manager.allocate_slots(request, len(PROMPT), delay_cache_blocks=True)
        assert new is not None
        blocks = list(new.blocks[0])
        if mark:
            self.marks.set(ids(blocks[:4]), mark, ALICE)
        request.num_computed_tokens = tokens
        self.manager.cache_blocks(request, tokens)
        return blocks

    def served(self, owner: Owner | None) -> list[KVCacheBlock]:
        """Return the blocks that a lookup of the prompt finds for this asker."""
        self.owner = owner
        found, _, _ = self.manager.get_computed_blocks(self.request())
        return list(found.blocks[0])


@pytest.fixture
def asked() -> Asked:
    return Asked()


def test_a_block_serves_whom_it_may(asked: Asked) -> None:
    assert asked.served(ALICE) == asked.decoded[:4]
    assert asked.served(BOB) == asked.served(None) == []


def test_a_request_is_told_of_when_it_is_admitted(asked: Asked) -> None:
    request = asked.request()
    asked.owner = ALICE
    found, tokens, _ = asked.manager.get_computed_blocks(request)
    asked.manager.allocate_slots(request, 1, tokens, found)
    assert asked.told[0][:4] == ids(asked.decoded[:4])
    asked.told = []
    request.num_computed_tokens = tokens + 1
    asked.manager.allocate_slots(request, 1)
    assert asked.told == []


def test_a_copy_has_the_mark_of_its_source(asked: Asked) -> None:
    source, [copy, moved] = asked.decoded[0], asked.pool.get_new_blocks(2)
    [manager] = asked.manager.coordinator.single_type_managers
    manager.req_to_blocks["r"] = [source]
    manager._apply_cow("r", 0, source, copy)
    asked.pool.move_block_hashes(source, moved)
    manager._pending_cow_copies.append((source, moved))  # as vLLM does then
    asked.enter(0)
    assert [asked.marks[block.block_id] for block in (copy, moved)] == [Mark.DECODED] * 2
    assert asked.served(ALICE) == [moved, *asked.decoded[1:4]]
    assert asked.served(BOB) == []


def test_an_exact_copy_takes_the_hash_from_lossy_ones(asked: Asked) -> None:
    exact = asked.enter(2 * TOKENS)[:2]
    assert asked.served(None) == exact
    assert asked.served(ALICE) == [*exact, *asked.decoded[2:4]]
    assert asked.decoded[0].block_hash is None


def test_a_lossy_copy_takes_no_hash(asked: Asked) -> None:
    exact = asked.enter(TOKENS)[:1]
    asked.lossy_for = BOB
    derived = asked.enter(TOKENS)[0]
    assert asked.marks[derived.block_id] is Mark.DERIVED
    assert asked.served(None) == asked.served(BOB) == exact


@pytest.mark.parametrize("is_lossy", [True, False])
def test_a_part_of_a_block_is_marked_as_the_block(is_lossy: bool) -> None:
    asked = Asked(PART)
    asked.enter(4 * TOKENS)
    asked.lossy_for = ALICE if is_lossy else None
    part = asked.enter(len(PROMPT))[4]
    assert asked.pool.cached_block_hash_to_block.get_one_block(part.block_hash) is part
    assert asked.marks[part.block_id] is (Mark.DERIVED if is_lossy else Mark.EXACT)
    assert asked.marks.serves(part.block_id, BOB) is not is_lossy


def test_an_exact_part_takes_the_hash_from_a_lossy_one() -> None:
    asked = Asked(PART)
    asked.enter(4 * TOKENS)
    for asked.lossy_for in (ALICE, None):
        part = asked.enter(len(PROMPT))[4]
    assert asked.pool.cached_block_hash_to_block.get_one_block(part.block_hash) is part
    assert asked.marks.serves(part.block_id, BOB)


def states_after(chunks: Sequence[int], prompt: int, is_ours: bool) -> list[list[int]]:
    """Return, after each chunk, the numbers of tokens whose recurrent state the prefix cache has."""
    full = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
    state = MambaSpec(
        block_size=16,
        shapes=((8, 8),),
        dtypes=(torch.float32,),
        mamba_cache_mode="align",
        num_prefill_checkpoint_blocks=1,
        prefill_checkpoint_alignment=16,
    )
    groups = [KVCacheGroupSpec(["attention"], full), KVCacheGroupSpec(["mamba"], state)]
    config = KVCacheConfig(99, [], groups, prefix_cache_retention_interval=0)
    manager = KVCacheManager(config, 1024, scheduler_block_size=16, hash_block_size=16)
    if is_ours:
        half = SimpleNamespace(found=None, computed=None, asker=None, ask=lambda *_, otherwise: otherwise)
        Lookups(manager, VllmPool(manager.block_pool, {0: 16, 1: 16}).marks, half)  # type: ignore[arg-type]
    hasher = get_request_block_hasher(16, sha256)
    request = Request("a", list(range(prompt)), SamplingParams(max_tokens=1), None, block_hasher=hasher)
    found = []
    for tokens in chunks:
        manager.new_step_starts()
        assert manager.allocate_slots(request, tokens) is not None
        request.num_computed_tokens += tokens
        blocks = manager.coordinator.single_type_managers[1].req_to_blocks["a"]
        found.append([block.block_hash_num_tokens for block in blocks if block.block_hash and not block.is_null])
    return found


def test_states_inside_a_prompt_are_those_that_vllm_keeps() -> None:
    """Each chunk but the last leaves states behind that vLLM uses again at once."""
    chunks = (128, 128, 128, 15)
    assert states_after(chunks, 399, is_ours=True) == states_after(chunks, 399, is_ours=False)


# -- the end of an answer ---------------------------------------------------------------------------------


def test_a_block_of_the_step_under_way_is_not_the_sessions() -> None:
    """AsyncScheduler has scheduled the last token, and enters its block one step later, which does not come."""
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
    config = KVCacheConfig(20, [], [KVCacheGroupSpec(["layer"], spec)])
    manager = KVCacheManager(config, 256, scheduler_block_size=16, hash_block_size=16)
    hasher = get_request_block_hasher(16, sha256)
    request = Request("a", list(range(14)), SamplingParams(max_tokens=50), None, block_hasher=hasher)

    def schedule(tokens: int) -> None:
        manager.allocate_slots(request, tokens)
        request.num_computed_tokens += tokens
        request.num_output_placeholders += 1

    def output(token: int) -> None:
        request.append_output_token_ids([token])
        request.num_output_placeholders -= 1
        manager.cache_blocks(request, request.num_computed_tokens - request.num_output_placeholders)

    schedule(14)
    schedule(1)
    output(100)
    schedule(1)
    output(101)
    half: Any = object.__new__(SchedulerHalf)
    half._hashes_a_block, half._group, half._block_size = 1, 0, 16
    scheduler = SimpleNamespace(async_scheduling=True)
    half._vllm_config = SimpleNamespace(
        num_speculative_tokens=0, num_prefill_lookahead_tokens=0, scheduler_config=scheduler
    )
    half.pool = VllmPool(manager.block_pool, {0: 16})
    keys = half._keys(request)[: request.num_computed_tokens // 16]
    assert (len(keys), half._entered(keys)) == (1, 0)
