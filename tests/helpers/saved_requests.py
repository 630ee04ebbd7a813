"""Requests whose sessions go cold, and the KV events of their blocks: vLLM's own, and Manthan's."""

from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import CacheConfig
from vllm.distributed.kv_events import BlockStored, KVCacheEvent
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import Request

from manthan.benchmarks.simulator.pool import SimulatedPool
from manthan.manager.events import Events
from manthan.manager.pool import Runway
from manthan.manager.session.blocks import GroupShape, MemoryShape
from manthan.manager.session.hints import NO_HINTS, Hints
from manthan.manager.session.manager import PointParts, SessionManager, Store
from manthan.policies import get_policy
from manthan.vllm_hooks.events import KvEvents
from manthan.vllm_hooks.groups import groups_of

TOKENS, BLOCKS = 16, 6
HEADS: dict[str, Any] = {"num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(block_size=TOKENS, **HEADS)
WINDOW = SlidingWindowSpec(block_size=2 * TOKENS, sliding_window=TOKENS, **HEADS)


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
        self.manager.bind(Runway(SimulatedPool(99), 0))
        self.groups = groups_of(config, CacheConfig())
        self.events = KvEvents(self.manager, self.groups, config, place)
        self.now = 0.0

    def theirs(self, request: Request, group: int = 0) -> BlockStored:
        size = (FULL, WINDOW)[group].block_size
        blocks = BLOCKS * TOKENS // size
        self.pool.cache_full_blocks(request, self.pool.get_new_blocks(blocks), 0, blocks, size, group)
        [event] = self.pool.take_events()
        return event

    def ours(self, request: Request, is_known: bool = True, hints: Hints = NO_HINTS) -> list[KVCacheEvent]:
        """It is answered, its session is named for the request, and goes cold."""
        hashes, manager = request.block_hashes, self.manager
        parts = list(self.groups.parts(BLOCKS))
        beside = [(part.group, hashes[part.end // TOKENS - 1], part.at) for part in parts]
        for group, block_hash, at in [*((0, block_hash, at) for at, block_hash in enumerate(hashes)), *beside]:
            [block_id] = manager.pool.take(1)
            manager.pool.cache(block_id, group, block_hash, at)
            manager.pool.free([block_id])
        manager.request_started("r", hashes, request.session_id, self.now, hints=hints)
        points = [PointParts(BLOCKS, beside)] if beside else []
        _, plans = manager.request_finished("r", hashes, self.now, points=points)
        self.store(plans)
        if is_known:
            self.events.remember(request, BLOCKS, parts)
        self.now += 20.0
        self.store(manager.plan_stores(self.now, 99, 0))
        return list(self.events.take())

    def store(self, plans: list[Store]) -> None:
        for plan in plans:
            self.manager.stored(plan, dict.fromkeys(range(len(plan.rows)), 100), self.now, {})
            self.manager.pool.free(plan.transfer.block_ids.tolist())

    def forget(self) -> list[KVCacheEvent]:
        self.manager.reset()
        return list(self.events.take())
