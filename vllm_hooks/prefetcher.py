"""Sessions that are expected are restored before their request: room, blocks, loads, and vLLM's prefix cache."""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import TYPE_CHECKING, NamedTuple

from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    make_block_hash_with_group_id,
    maybe_convert_block_hash,
)

from manthan.manager.sessions.manager import SessionMemoryManager
from manthan.manager.sessions.pressure import Runway
from manthan.manager.sessions.session import SessionState
from manthan.manager.stores.redis.client import StoreDownError
from manthan.vllm_hooks.messages import Load, LoadResult
from manthan.vllm_hooks.pool_queue import PoolQueue
from manthan.vllm_hooks.telemetry.log import tell_restore
from manthan.vllm_hooks.telemetry.metrics import StatsRecorder

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

GROUP = 0
HOT_STATES = (SessionState.HOT, SessionState.IDLE)
RETRY_S = 0.1
"""How soon room is looked for again where there was none: every look walks the free queue."""


@dataclass
class UnderWay:
    """A prefetch: the session's chain, a block for each of its keys, and what of it is being loaded.

    All blocks are referenced, those that were hot as well. is_stale: the KV is void since it began.
    """

    session_id: str
    blocks: "dict[BlockHash, KVCacheBlock]"
    load: Load
    loading: frozenset[bytes]
    answers: list[LoadResult] = field(default_factory=list)
    is_stale: bool = False


class Ready(NamedTuple):
    """A session that was prefetched and that no request has used since."""

    session_id: str
    chain: Sequence[bytes]


class Prefetcher:
    """Lives on the scheduler's thread. One session at a time, so that whoever comes meanwhile waits for no other's.

    ranks: how many answer each load. spare: blocks of the pool that are left to requests whatever comes.
    """

    def __init__(
        self,
        manager: SessionMemoryManager,
        stats: StatsRecorder,
        pool: "BlockPool",
        block_size: int,
        ranks: int,
        runway: Runway,
        spare: int,
    ) -> None:
        self._manager, self._stats, self._pool, self._runway = manager, stats, pool, runway
        self._block_size, self._ranks, self._spare = block_size, ranks, spare
        self._queue = PoolQueue(pool)
        self._under_way: UnderWay | None = None
        self._count = 0
        self._waiting: dict[str, int] = {}  # by request id, the blocks that it will take
        self._ready: dict[bytes, Ready] = {}  # by the first key that was loaded
        self._look_after = 0.0
        self._must_look = False

    # -- requests -------------------------------------------------------------------------------------

    def waits(self, request: "Request") -> None:
        """A request is waiting for its blocks."""
        self._waiting[request.request_id] = -(-request.num_tokens // self._block_size)

    def admitted(self, request: "Request", hot: int) -> None:
        """A request got its blocks, of which so many were hot."""
        self.forget(request.request_id)
        keys = request.block_hashes
        first = next((key for key in reversed(keys[:hot]) if key in self._ready), None) if self._ready else None
        if first is None:
            return
        pairs = zip(self._ready.pop(first).chain, keys, strict=False)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if hot >= min(common, (request.num_tokens - 1) // self._block_size):  # the last token is always computed
            self._stats.prefetch_hit()

    def forget(self, request_id: str) -> None:
        """A request waits no longer."""
        self._waiting.pop(request_id, None)

    def is_loading(self, key: bytes) -> bool:
        """Whether this block will be hot in a moment: a request that needs it should not restore it as well."""
        under_way = self._under_way
        return under_way is not None and not under_way.is_stale and key in under_way.loading

    # -- a step ---------------------------------------------------------------------------------------

    def step(self, now: float) -> list[Load]:
        """What the workers are to load, if a session is due and there is room that nobody would miss."""
        if self._under_way is not None:
            return []
        if now < self._look_after:
            self._must_look = True
            return []
        self._must_look = False
        most = self._pool.num_gpu_blocks - 1 - self._spare  # the null block is never free
        wanted = self._manager.prefetch_blocks(now, most)
        if not wanted:
            return []
        taken = self._manager.take_prefetches(self._room(wanted), now, limit=1)
        if not taken:
            self._look_after = now + RETRY_S
            return []
        self._under_way = self._begin(taken[0].session_id, taken[0].keys)
        if not self._under_way.load.keys:
            self._settle(self._under_way, now)
            return []
        return [self._under_way.load]

    def answered(self, answer: LoadResult, now: float) -> None:
        """A rank is done with its load."""
        under_way = self._under_way
        assert under_way is not None
        under_way.answers.append(answer)
        if len(under_way.answers) == self._ranks:
            self._settle(under_way, now)

    def reset(self) -> None:
        """The KV is void. What is being loaded is not entered into the prefix cache."""
        self._ready.clear()
        if self._under_way is not None:
            self._under_way.is_stale = True

    @property
    def is_busy(self) -> bool:
        """Whether an answer is outstanding, with which blocks come free."""
        return self._under_way is not None

    @property
    def deadline(self) -> float | None:
        """When to look for room again, if something may have changed since the last look."""
        return self._look_after if self._must_look else None

    # -- blocks ---------------------------------------------------------------------------------------

    def _room(self, wanted: int) -> int:
        """How many blocks at the head of the free queue nobody would miss, up to so many.

        Not counted are those that are left to requests, those that waiting requests need, and whatever comes after a
        block of a session that is hot: prefetching evicts nobody, whether there are codes or not.
        """
        left = self._spare + sum(self._waiting.values())
        wanted = min(wanted, self._pool.get_num_free_blocks() - left)
        if wanted <= 0:
            return 0
        ahead = islice(self._queue.keys(), left + wanted)
        return max(0, sum(1 for _ in takewhile(self._is_worthless, ahead)) - left)

    def _is_worthless(self, key: bytes | None) -> bool:
        block = None if key is None else self._manager.blocks.get(key)
        return block is None or not (block.hot or block.in_flight)

    def _begin(self, session_id: str, chain: Sequence[bytes]) -> UnderWay:
        """Hold what of the chain is hot, and take blocks for the rest."""
        keys = [BlockHash(key) for key in chain]
        hot = {}
        for key in keys:
            if found := self._pool.get_cached_block(key, [GROUP]):
                self._pool.touch(found)
                hot[key] = found[0]
        missing = [key for key in keys if key not in hot]
        both = hot | dict(zip(missing, self._pool.get_new_blocks(len(missing)), strict=True))
        self._runway.taken(len(keys))
        self._count += 1
        ids, exact = [both[key].block_id for key in missing], self._manager.copies.of(missing)
        load = Load(f"prefetch-{self._count}", [*missing], ids, is_prefetch=True, exact=exact)
        return UnderWay(session_id, {key: both[key] for key in keys}, load, frozenset(missing))

    def _settle(self, ended: UnderWay, now: float) -> None:
        """Every rank has answered: what is good becomes hot, and all blocks are vLLM's again."""
        self._under_way = None
        failed = dict(pair for answer in ended.answers for pair in answer.failed)
        if not ended.is_stale:
            self._enter(ended, failed)
        self._pool.free_blocks(reversed(ended.blocks.values()))  # vLLM overwrites tails first
        if ended.is_stale:
            return
        bad = [key for key, cause in failed.items() if cause != StoreDownError.cause]
        spoiled = dict(pair for answer in ended.answers for pair in answer.spoiled)
        self._manager.prefetch_finished(ended.session_id, not failed, bad, now, spoiled)
        keys = ended.load.keys
        if keys and not failed:
            self._ready = self._still_hot() | {keys[0]: Ready(ended.session_id, list(ended.blocks))}
        good = next(i for i, key in enumerate(keys) if key in failed) if failed else len(keys)
        self._stats.prefetched(good, failed.values())
        self._stats.copies_failed(spoiled.values())
        tell_restore(
            ended.session_id, len(keys), good, self._block_size, ended.answers, failed.values(), verb="prefetched"
        )

    def _enter(self, ended: UnderWay, failed: Container[bytes]) -> None:
        """Enter what was loaded into the prefix cache, up to the first that failed or that nobody wants any more.

        vLLM does the same with a block that it has computed. Where somebody else has computed one meanwhile, the chain
        goes on with that one, and ours is not entered beside it.
        """
        parent = None
        for depth, (key, block) in enumerate(ended.blocks.items()):
            known = self._manager.blocks.get(key)
            if key in failed or known is None or not known.users:
                break
            if key in ended.loading:
                if other := self._pool.get_cached_block(key, [GROUP]):
                    self._pool.touch(other)
                    self._pool.free_blocks([block])
                    ended.blocks[key] = other[0]
                else:
                    key_of_group = make_block_hash_with_group_id(key, GROUP)
                    block.set_block_hash(key_of_group, num_tokens=(depth + 1) * self._block_size)
                    self._pool.cached_block_hash_to_block.insert(key_of_group, block)
                    self._announce(key, parent)
            parent = key

    def _announce(self, key: BlockHash, parent: BlockHash | None) -> None:
        """Tell who listens to vLLM's KV events of a block in the cache; as in vLLM's own offloading, without tokens."""
        if self._pool.enable_kv_cache_events:
            self._pool.kv_event_queue.append(
                BlockStored(
                    block_hashes=[maybe_convert_block_hash(key)],
                    parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
                    token_ids=[],
                    block_size=self._block_size,
                    lora_id=None,
                    medium=self._pool.medium,
                    lora_name=None,
                    group_idx=GROUP,
                )
            )

    # -- what came of it ------------------------------------------------------------------------------

    def _still_hot(self) -> dict[bytes, Ready]:
        """What was prefetched, but for sessions that have gone cold again."""
        sessions = self._manager.table.by_id
        idle = {key: ready for key, ready in self._ready.items() if ready.session_id in sessions}
        return {key: ready for key, ready in idle.items() if sessions[ready.session_id].state in HOT_STATES}
