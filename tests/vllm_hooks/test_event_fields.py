"""An event of a saved block says what vLLM's own said of the block when it was in the pool."""

from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.config import CacheConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import Request

from manthan.manager.events import Events
from manthan.manager.session.blocks import GroupShape, MemoryShape
from manthan.manager.session.manager import PointParts, SessionManager, StorePlan
from manthan.manager.simulator.pool import SimulatedPool
from manthan.policies import get_policy
from manthan.vllm_hooks.events import KvEvents
from manthan.vllm_hooks.groups import groups_of

TOKENS, BLOCKS = 16, 6
HEADS: dict[str, Any] = {"num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(block_size=TOKENS, **HEADS)
WINDOW = SlidingWindowSpec(block_size=2 * TOKENS, sliding_window=TOKENS, **HEADS)
IMAGE = MultiModalFeatureSpec(None, "image", "picture", PlaceholderRange(offset=20, length=30))


@pytest.fixture(autouse=True)
def _none_hash() -> None:
    init_none_hash(sha256)


def asked(**options: Any) -> Request:
    tokens, params = list(range(100, 100 + BLOCKS * TOKENS + 3)), SamplingParams(max_tokens=1)
    hasher = get_request_block_hasher(TOKENS, sha256)
    return Request("r", tokens, params, None, block_hasher=hasher, **options)


class Engine:
    """Requests whose sessions go cold, and events of vLLM's pool and of ours."""

    def __init__(self, place: str = "host", windows: bool = False) -> None:
        specs = [FULL, WINDOW][: 1 + windows]
        config = KVCacheConfig(99, [], [KVCacheGroupSpec([f"layer-{n}"], spec) for n, spec in enumerate(specs)])
        self.pool = BlockPool(99, True, TOKENS, enable_kv_cache_events=True)
        shape = MemoryShape({n: GroupShape(spec.block_size, 500, {0: 100}) for n, spec in enumerate(specs)})
        self.manager = SessionManager(get_policy("lru"), shape, 10_000, 10.0, Events())
        self.manager.bind(SimulatedPool(99), 0, lambda: None)
        self.groups = groups_of(config, CacheConfig())
        self.events = KvEvents(self.manager, self.groups, config, place)
        self.now = 0.0

    def theirs(self, request: Request, group: int = 0) -> BlockStored:
        size = (FULL, WINDOW)[group].block_size
        blocks = BLOCKS * TOKENS // size
        self.pool.cache_full_blocks(request, self.pool.get_new_blocks(blocks), 0, blocks, size, group)
        [event] = self.pool.take_events()
        return event

    def ours(self, request: Request, is_known: bool = True) -> list[KVCacheEvent]:
        """It is answered, its session is named for the request, and goes cold."""
        hashes, manager = request.block_hashes, self.manager
        parts = list(self.groups.parts(BLOCKS))
        beside = [(part.group, hashes[part.end // TOKENS - 1], part.at) for part in parts]
        for group, block_hash, at in [*((0, block_hash, at) for at, block_hash in enumerate(hashes)), *beside]:
            [block_id] = manager.pool.take(1)
            manager.pool.cache(block_id, group, block_hash, at)
            manager.pool.free([block_id])
        manager.request_started("r", hashes, request.session_id, self.now)
        points = [PointParts(BLOCKS, beside)] if beside else []
        _, plans = manager.request_finished("r", hashes, self.now, points=points)
        self.store(plans)
        if is_known:
            self.events.remember(request, BLOCKS, parts)
        self.now += 20.0
        self.store(manager.plan_stores(self.now, 99, 0))
        return list(self.events.take())

    def store(self, plans: list[StorePlan]) -> None:
        for plan in plans:
            self.manager.stored(plan, dict.fromkeys(range(len(plan.rows)), 100), self.now, 0.0)
            self.manager.pool.free(plan.transfer.block_ids.tolist())

    def forget(self) -> list[KVCacheEvent]:
        self.manager.reset()
        return list(self.events.take())


SAME = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "lora_name", "extra_keys")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"session_id": "alice"},
        {"cache_salt": "salt"},
        {"lora_request": LoRARequest("adapter", 7, "/nowhere")},
        {"mm_features": [IMAGE]},
        {"mm_features": [IMAGE], "lora_request": LoRARequest("adapter", 7, "/nowhere"), "cache_salt": "salt"},
    ],
    ids=["plain", "named", "salt", "adapter", "image", "all"],
)
def test_an_event_has_what_vllm_s_own_has(options: dict[str, Any]) -> None:
    engine, request = Engine(), asked(**options)
    theirs, [ours] = engine.theirs(request), engine.ours(request)
    assert isinstance(ours, BlockStored)
    for name in (*SAME, "group_idx", "session_id"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert (ours.kv_cache_spec_kind, ours.medium, ours.locality, ours.ownership) == (
        "full_attention",
        "CPU",
        "LOCAL",
        "manthan",
    )
    [gone] = engine.forget()
    assert gone == BlockRemoved(theirs.block_hashes, "CPU", 0, "LOCAL", "manthan")
    assert engine.events.notes == {}


@pytest.mark.parametrize(
    ("place", "where"),
    [("device", ("CPU", "LOCAL")), ("disk", ("STORAGE", "LOCAL")), ("redis", ("STORAGE", "REMOTE"))],
)
def test_where_blocks_are(place: str, where: tuple[str, str]) -> None:
    engine = Engine(place)
    for event in (*engine.ours(asked()), *engine.forget()):
        assert (event.medium, event.locality) == where


def test_blocks_of_a_window_that_are_larger_have_their_own_tokens() -> None:
    engine, request = Engine(windows=True), asked(session_id="alice")
    theirs = engine.theirs(request, 1)
    full, window = engine.ours(request)
    assert isinstance(window, BlockStored)
    assert len(full.block_hashes) == BLOCKS
    assert (window.group_idx, window.block_size, window.kv_cache_spec_sliding_window) == (1, 2 * TOKENS, TOKENS)
    assert window.block_hashes == theirs.block_hashes[-1:]
    assert window.parent_block_hash == theirs.block_hashes[-2]
    assert window.token_ids == theirs.token_ids[-2 * TOKENS :]
    assert {event.group_idx for event in engine.forget()} == {0, 1}
    assert engine.events.notes == {}


def test_a_block_that_is_saved_before_its_tokens_are_known_is_told_once_they_are() -> None:
    engine, request = Engine(), asked()
    assert engine.ours(request, is_known=False) == []
    engine.events.remember(request, BLOCKS)
    assert engine.events.has_news
    [told] = engine.events.take()
    assert len(told.block_hashes) == BLOCKS
    assert not engine.events.has_news
    assert len(engine.forget()) == 1


def test_a_damaged_note_says_nothing() -> None:
    engine, request = Engine(), asked()
    engine.ours(request, is_known=False)
    block_hash = request.block_hashes[0]
    engine.events.notes[0, block_hash] = b"\x93\x00"
    assert engine.events.event((0, block_hash), "GPU") is None
    engine.events.notes.clear()
    engine.events.remember(request, 1)
    told = engine.events.event((0, block_hash), "GPU")
    assert told is not None
    assert (told.medium, told.locality, told.ownership, told.token_ids) == ("GPU", None, None, list(range(100, 116)))


def test_a_reset_of_vllm_s_cache_has_all_that_is_stored_told_again() -> None:
    engine = Engine()
    [stored] = engine.ours(asked())
    engine.events.repeat()
    removed, again = engine.events.take()
    assert removed == BlockRemoved(stored.block_hashes, "CPU", 0, "LOCAL", "manthan")
    assert again == stored
    assert engine.events.take() == []
