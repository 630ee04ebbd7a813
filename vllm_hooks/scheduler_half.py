"""The scheduler half of the connector: vLLM's events to the manager, the manager's decisions to blocks and messages."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from manthan.manager.config.registered import choose_policy
from manthan.manager.sessions.cold_side import Shares
from manthan.manager.sessions.pressure import Pressure
from manthan.manager.sessions.shared import SharedSessionManager
from manthan.manager.sessions.table import MemoryShape
from manthan.manager.stores.redis.client import StoreDownError
from manthan.manager.sweeper import Sweeper
from manthan.vllm_hooks.compat import engine_waker
from manthan.vllm_hooks.directory_link import DirectoryLink
from manthan.vllm_hooks.http.hints import answer_to, hints_of, tenant_of
from manthan.vllm_hooks.messages import (
    Load,
    LoadResult,
    ManthanMetadata,
    ManthanWorkerMetadata,
    SpillBlock,
    SpillResult,
)
from manthan.vllm_hooks.pool_queue import PoolQueue
from manthan.vllm_hooks.prefetcher import Prefetcher
from manthan.vllm_hooks.shared_store import engine_name, make_directory, namespace_of
from manthan.vllm_hooks.support import full_attention_spec
from manthan.vllm_hooks.telemetry.log import (
    Complaints,
    announce,
    check_capacity,
    encoded_block_nbytes,
    parts_of_copy,
    tell_eviction,
    tell_restore,
)
from manthan.vllm_hooks.telemetry.metrics import StatsRecorder
from manthan.vllm_hooks.transfer_config import from_vllm_config
from manthan.vllm_hooks.worker.capacity import TierBytes, fast_tier

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = init_logger("vllm.manthan")

GROUP = [0]


@dataclass
class Restore:
    """A restore under way: which session, which load, and how many ranks have answered."""

    session_id: str
    load: Load
    answers: list[LoadResult]


class SchedulerHalf:
    """Runs on the scheduler's thread, inside its calls. It decides and counts; it never waits, encodes or stores."""

    def __init__(self, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> None:
        self._config = config = from_vllm_config(vllm_config)
        self._ranks = vllm_config.parallel_config.world_size
        spec = full_attention_spec(kv_cache_config)
        layers = len(kv_cache_config.kv_cache_groups[0].layer_names)
        self._block_size = spec.block_size
        cold_nbytes = encoded_block_nbytes(config.codec.name, spec, layers)
        self._shape = MemoryShape(
            block_tokens=spec.block_size,
            hot_nbytes=spec.page_size_bytes * layers * self._ranks,
            cold_nbytes=cold_nbytes * self._ranks,
            exact_parts=parts_of_copy(config.codec, spec, layers),
        )
        capacity = TierBytes.of_a_rank(config.cold_store, self._ranks).blocks(cold_nbytes)
        check_capacity(config, self._shape, capacity)
        shared = config.cold_store.is_shared
        namespace = namespace_of(vllm_config, config, spec, layers) if shared else None
        owner = engine_name()
        chosen = choose_policy(config.policy)
        self.manager = SharedSessionManager(
            chosen.policy,
            self._shape,
            capacity_nbytes=capacity * self._shape.cold_nbytes,
            idle_after_s=config.idle_after_s,
            min_tokens=config.min_tokens,
            label=owner if shared else "",
            options=chosen.options,
            fast=fast_tier(config.cold_store),
            shares=Shares(config.quotas.pinned_share, config.quotas.default_share, config.quotas.tenants),
            prefetch_lead_s=config.prefetch.lead_s if config.prefetch.enabled else None,
            sink_tokens=config.codec.sink_tokens,
            window_tokens=config.codec.window_tokens,
        )
        self.stats = StatsRecorder(self.manager, self._shape)
        directory = make_directory(vllm_config, config, namespace, self._shape, capacity, owner, self._ring)
        self._directory = DirectoryLink(directory, self.manager, self.stats, config.redis.timeout_s)
        self._pool: BlockPool | None = None
        self._hashes: object = None
        self._held: dict[bytes, KVCacheBlock] = {}
        self._answers: dict[bytes, list[SpillResult]] = {}
        self._to_load: list[Load] = []
        self._restores: dict[str, Restore] = {}
        self._session_of: dict[str, str] = {}
        self._first_external: dict[str, int] = {}
        self._unserved: set[str] = set()  # requests for which a store did not answer: they do not ask again
        self._granted: list[bytes] = []
        self._place: str | None = None
        self._complaints = Complaints()
        self._deadline: float | None = None
        self._rung = False
        self._wake = engine_waker()
        self._sweeper = Sweeper(config.sweep_interval_s, config.idle_after_s, self._is_due, self._ring)
        announce(vllm_config, config, self._shape, capacity, namespace.name if namespace else "")

    def bind(self, pool: "BlockPool") -> None:
        """The pool exists: from now on there is something to watch."""
        self._pool = pool
        self._hashes = pool.cached_block_hash_to_block
        blocks = pool.num_gpu_blocks - 1  # the null block is never free
        marks = self._config.hot_pool
        self._pressure = Pressure(
            self.manager, PoolQueue(pool), blocks, low=marks.low_watermark, high=marks.high_watermark
        )
        self._prefetcher = Prefetcher(
            self.manager,
            self.stats,
            pool,
            self._block_size,
            self._ranks,
            self._pressure.runway,
            spare=self._pressure.low,
        )
        self._sweeper.start()
        self._directory.start()

    # -- requests -------------------------------------------------------------------------------------

    def new_request(self, request: "Request") -> None:
        self._notice_reset()
        hints = hints_of(request)
        self.stats.hinted(hints)
        self._session_of[request.request_id] = self.manager.request_started(
            request.request_id,
            request.block_hashes,
            request.session_id or None,
            time.monotonic(),
            tokens=request.num_prompt_tokens,
            hints=hints,
            tenant=tenant_of(request),
        )
        self._prefetcher.waits(request)
        self._directory.look_up(request.request_id, request.block_hashes[: self._usable(request)])

    def match(self, request: "Request", computed: int) -> tuple[int | None, bool]:
        """Tokens that can be restored after the first `computed`; None asks vLLM to come back in a moment."""
        self._notice_reset()
        self._hear()
        self._prefetcher.waits(request)
        needed = -(-request.num_tokens // self._block_size) - computed // self._block_size
        if self._pressure.must_wait(request.request_id, needed, time.monotonic()):
            return None, False
        if request.request_id in self._restores:  # an earlier load for it, before it was preempted, is not settled
            return None, False
        if self._directory.awaits(request.request_id):
            return None, False
        if request.skip_reading_prefix_cache or request.request_id in self._unserved:
            return 0, False
        first = computed // self._block_size
        needed = request.block_hashes[first : self._usable(request)]
        if needed and self._prefetcher.is_loading(needed[0]):
            return None, False
        tokens = self.manager.match(needed) * self._block_size
        self._first_external[request.request_id] = first
        return tokens, tokens > 0

    def _usable(self, request: "Request") -> int:
        """How many of its blocks may come from elsewhere: the last token is always computed."""
        return (request.num_tokens - 1) // self._block_size

    def allocated(self, request: "Request", block_ids: Sequence[int], tokens: int) -> None:
        """vLLM has allocated the request's blocks; `tokens` tokens behind its hot ones are to be restored."""
        request_id = request.request_id
        self._pressure.runway.taken(len(block_ids))
        self._pressure.admitted(request_id)
        first = self._first_external.pop(request_id, 0)
        self._prefetcher.admitted(request, hot=first)
        if not tokens:
            return
        last = first + tokens // self._block_size
        keys = list(request.block_hashes[first:last])
        load = Load(request_id, keys, list(block_ids[first:last]), exact=self.manager.copies.of(keys))
        self.manager.restore_started(request_id, load.keys)
        self._restores[request_id] = Restore(self._session_of.get(request_id, "?"), load, [])
        self._to_load.append(load)

    def finished(self, request: "Request", blocks: int) -> dict[str, Any] | None:
        """A request ended, with KV computed for that many blocks; returns what its client is told of its hints."""
        for by_request in (self._first_external, self._session_of):
            by_request.pop(request.request_id, None)
        self._pressure.admitted(request.request_id)
        self._unserved.discard(request.request_id)
        self._prefetcher.forget(request.request_id)
        self._directory.forget(request.request_id)
        computed = min(blocks, request.num_computed_tokens // self._block_size)
        outcome = self.manager.request_finished(
            request.request_id, request.block_hashes[:computed], time.monotonic(), tokens=request.num_tokens
        )
        self._set_deadline()
        self.stats.answered(outcome)
        return answer_to(hints_of(request), outcome)

    # -- a step ---------------------------------------------------------------------------------------

    def step(self, scheduled_tokens: int, scheduled_requests: int) -> ManthanMetadata:
        """What the workers are to do in this step, in which the model computes so much."""
        self._rung = False
        self._notice_reset()
        now = time.monotonic()
        self.manager.sweep(now)
        self._pressure.runway.taken(-(-scheduled_tokens // self._block_size) + scheduled_requests)
        self._pressure.relieve(now)
        drops = self.manager.take_drops()
        for drop in drops:
            self.stats.dropped(drop)
            self._pressure.runway.forget()  # what was dropped may be hot
        self._release(self.manager.take_releases())
        self._directory.tell(drops)  # before room is asked for, which it may make
        self._hold_for_spills(now)
        self._hear()
        self._to_load += self._prefetcher.step(now)
        exact = self.manager.copies.of(self._granted)
        metadata = ManthanMetadata(
            place=self._place,
            drops=[key for drop in drops for key in drop.keys],
            copy_drops=self.manager.copies.take_drops(),
            go_first=self.manager.take_moves(),
            spills=[SpillBlock(key, self._held[key].block_id, key in exact) for key in self._granted],
            loads=self._to_load,
            model_rests=not scheduled_tokens,
        )
        self._place, self._granted, self._to_load = None, [], []
        self._log_evictions()
        self._set_deadline()
        return metadata

    def worker_output(self, report: ManthanWorkerMetadata) -> None:
        """What ended on the workers. A block or a restore is settled when every rank has answered."""
        now = time.monotonic()
        for result in report.spills:
            answers = self._answers.setdefault(result.key, [])
            answers.append(result)
            if len(answers) == self._ranks:
                self._settle_spill(self._answers.pop(result.key), now)
        for load in report.loads:
            if load.is_prefetch:
                self._prefetcher.answered(load, now)
                continue
            restore = self._restores[load.request_id]
            restore.answers.append(load)
            if len(restore.answers) == self._ranks:
                self._settle_restore(self._restores.pop(load.request_id))
        self._release(self.manager.take_releases())
        self._log_evictions()
        self._set_deadline()

    @property
    def has_work(self) -> bool:
        """Whether the engine should run a step although no request asks for one; vLLM asks before it goes to sleep."""
        self._notice_reset()
        waits = self._prefetcher.is_busy or self._directory.has_answers
        return self._rung or self._place is not None or self.manager.has_work or waits

    @property
    def holds_blocks(self) -> bool:
        """Whether blocks come free by themselves when what is being encoded, or prefetched, is done."""
        return bool(self._held) or self._prefetcher.is_busy

    def reset(self) -> None:
        """Empty the cold store: the KV that vLLM computes from now on is another's."""
        assert self._pool is not None
        self._hashes = self._pool.cached_block_hash_to_block
        self.manager.reset()
        self._prefetcher.reset()
        self._place = self._directory.reset()
        granted, self._granted = self._granted, []
        for key in granted:
            self._refused(key, "reset")
        logger.info("Manthan: the cold store is emptied together with the prefix cache.")

    def shutdown(self) -> None:
        self._sweeper.stop()
        self._directory.close()

    # -- blocks ---------------------------------------------------------------------------------------

    def _hold_for_spills(self, now: float) -> None:
        """Take references on blocks to be encoded, so that nobody overwrites them meanwhile, and ask for room."""
        assert self._pool is not None
        held = []
        for key in self.manager.take_spills(self._pressure.max_in_flight - len(self._held)):
            found = self._pool.get_cached_block(key, GROUP)
            if found is None:
                self.manager.lost(key, now)
                continue
            self._pool.touch(found)
            self._held[key] = found[0]
            held.append(key)
        self._directory.reserve(held)

    def _hear(self) -> None:
        """What the store's directory says of blocks that wait for room, and of all else."""
        answers = self._directory.hear()
        self._granted += answers.granted
        for key in answers.stored:
            self._let_go(key)
            self.manager.spilled(key, time.monotonic())
        for key, cause in answers.refused:
            self._refused(key, cause)

    def _refused(self, key: bytes, cause: str) -> None:
        self._let_go(key)
        self.stats.spill_failed({cause})
        self._complaints.not_stored({cause})
        self.manager.spill_failed(key, time.monotonic())

    def _let_go(self, key: bytes) -> None:
        assert self._pool is not None
        self._pool.free_blocks([self._held.pop(key)])

    def _settle_spill(self, answers: list[SpillResult], now: float) -> None:
        key = answers[0].key
        self._let_go(key)
        causes = {answer.cause for answer in answers if answer.cause is not None}
        if causes:
            self.stats.spill_failed(causes)
            self._complaints.not_stored(causes)
            self.manager.spill_failed(key, now)
        else:
            spoiled = {answer.copy_cause for answer in answers if answer.copy_cause is not None}
            self.stats.spilled(answers)
            self.stats.copies_failed(spoiled)
            self.manager.spilled(key, now, copied=not spoiled)

    def _settle_restore(self, restore: Restore) -> None:
        failed = dict(pair for answer in restore.answers for pair in answer.failed)
        keys = restore.load.keys
        blocks = len(keys)
        good = next(i for i, key in enumerate(keys) if key in failed) if failed else blocks
        bad = [key for key, cause in failed.items() if cause != StoreDownError.cause]
        if len(bad) < len(failed):
            self._unserved.add(restore.load.request_id)
        spoiled = dict(pair for answer in restore.answers for pair in answer.spoiled)
        self.manager.restore_finished(restore.load.request_id, bad, spoiled)
        self.stats.restored(restore.answers, good, failed.values())
        self.stats.copies_failed(spoiled.values())
        tell_restore(restore.session_id, blocks, good, self._block_size, restore.answers, failed.values())

    def _release(self, keys: Sequence[bytes]) -> None:
        """Take blocks that no request uses out of the prefix cache, and put them at the head of the free queue."""
        assert self._pool is not None
        for key in keys:
            while (found := self._pool.get_cached_block(key, GROUP)) and found[0].ref_cnt == 0:
                self._pool.touch(found)
                self._pool.evict_blocks({found[0].block_id})
                self._pool.free_blocks(found)

    # -- the rest -------------------------------------------------------------------------------------

    def _set_deadline(self) -> None:
        deadlines = (self.manager.next_deadline, self._prefetcher.deadline)
        self._deadline = min((when for when in deadlines if when is not None), default=None)

    def _is_due(self) -> bool:
        return self._deadline is not None and self._deadline <= time.monotonic()

    def _ring(self) -> None:
        self._rung = True
        self._wake()

    def _notice_reset(self) -> None:
        """vLLM tells connectors of a reset only if the caller asks for it; a new hash map tells of all."""
        assert self._pool is not None
        if self._pool.cached_block_hash_to_block is not self._hashes:
            self.reset()

    def _log_evictions(self) -> None:
        for eviction in self.manager.take_evictions():
            self.stats.evicted(eviction)
            tell_eviction(eviction, self._shape)
