"""Scheduler half of the connector: passes vLLM's calls to the driver, and the driver's orders to the workers.

The driver (`manager.driver`) decides which blocks are stored, loaded and dropped. Compressed blocks are in the cold
store, which has tiers: RAM, GPU memory, disk, Redis. A resident block is in vLLM's prefix cache. KV is lossy if a lossy
codec has decoded it, or if it was computed behind such KV. The guard measures codecs and chooses the codec in use. A
recheck computes a restored prompt again, to measure the loss. A resume point is a length of a session at which every KV
cache group has the blocks needed to continue.
"""

import os
import secrets
import socket
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from math import inf
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.distributed.kv_events import KVCacheEvent
from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import Request

from manthan.codec.cpu.exact import EXACT
from manthan.codec.registry import finer_codecs, needs_profile
from manthan.manager.config.profiles import CALIBRATED
from manthan.manager.config.resolve import choose_policy
from manthan.manager.driver import Driver
from manthan.manager.events import Events
from manthan.manager.guard import Choice, Guard
from manthan.manager.histories import Histories
from manthan.manager.pool import Asker
from manthan.manager.session.blocks import SAVED
from manthan.manager.session.manager import PointParts, SessionManager
from manthan.manager.session.persist import JournalLink, RedisLink
from manthan.manager.session.prefetch import LEAD_S, lead_s
from manthan.manager.session.table import SessionState, Shares
from manthan.manager.sweeper import Sweeper
from manthan.manager.tiers.redis import FALL
from manthan.manager.transfer import on_each
from manthan.vllm_hooks.compat import Core, Lookups, VllmPool, replace_waiting, tokens_to_load, under_construction
from manthan.vllm_hooks.events import KvEvents
from manthan.vllm_hooks.fingerprint import Sharding, namespace_of
from manthan.vllm_hooks.groups import Part, config_for, on_all_ranks
from manthan.vllm_hooks.http.hints import answer_to, hints_of, lossy_prefill_tokens, tenant_of
from manthan.vllm_hooks.http.salts import salts_of
from manthan.vllm_hooks.lasting import DiskBooks, make_sessions
from manthan.vllm_hooks.memory import Shards, memory_shapes
from manthan.vllm_hooks.messages import Candidate, ManthanMetadata, ManthanWorkerMetadata
from manthan.vllm_hooks.ordering import ReturnsFirstQueue, StepLimit
from manthan.vllm_hooks.queries import METHOD, Queries
from manthan.vllm_hooks.rechecks import Rechecks
from manthan.vllm_hooks.settled import APPROVED, CALIBRATES, settled_profile
from manthan.vllm_hooks.support import UnsupportedError
from manthan.vllm_hooks.telemetry.log import (
    announce,
    check_capacity,
    tell_approved,
    tell_guard,
    tell_left_out,
    tell_rechecks,
)
from manthan.vllm_hooks.telemetry.telemetry import Telemetry
from manthan.vllm_hooks.telemetry.traces import make_traces
from manthan.vllm_hooks.transfer_config import abort_at_shutdown, settings
from manthan.vllm_hooks.worker.calibrator import LEAST
from manthan.vllm_hooks.worker.capacity import fast_tiers, room_in, usable_nbytes
from manthan.vllm_hooks.worker.half import get_ready, groups_of_worker
from manthan.vllm_hooks.worker.weights import loaded_digest, loads, weights_state

logger = init_logger("vllm.manthan")

SOURCES = {
    "device": CacheHitSource.DEVICE,
    "host": CacheHitSource.HOST,
    "disk": CacheHitSource.DISK,
    "redis": CacheHitSource.EXTERNAL_UNSPECIFIED,
}
"""vLLM's source of a cache hit, by the tier's name. vLLM has no source for a store on a network."""


def _ending(request: Request) -> str:
    """Return, as text, the stop token or string that ended an answer, else a list of the token before the last token.

    Return "" for an answer that did not stop by itself. A policy can tell an answer with a tool call by its ending.
    """
    if str(request.get_finished_reason()) != "stop":
        return ""
    last = list(request.output_token_ids[-2:-1])
    return str(last if request.stop_reason is None else request.stop_reason)


def _keep(path: Path) -> None:
    """Rename a profile made from traffic, so that the next start finds it."""
    try:
        found = path.replace(path.with_suffix(".safetensors"))
        logger.info("Manthan: a profile made from traffic is used: %s", found)
    except OSError as error:
        logger.warning("Manthan: a profile made from traffic is used, and not kept: %s", error)


class SchedulerHalf:
    """Scheduler half of the connector. All methods but `_wake` and `_is_due` run on the scheduler's thread. From the
    engine's start to its shutdown, they do no I/O there, encode nothing, and wait for workers only to ask about weights
    that may have changed.

    Args:
        ask: `ManthanConnector._ask`, which calls a method of this class and catches exceptions.
    """

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, ask: Callable[..., Any]) -> None:
        self._vllm_config, self.ask = vllm_config, ask
        abort_at_shutdown(vllm_config)
        self._core = Core(self)
        self._ranks = vllm_config.parallel_config.world_size
        self.groups = on_all_ranks(self._core.ask(groups_of_worker))
        self.config = config = config_for(vllm_config, self.groups)
        self._group, self._block_size = self.groups.main.index, self.groups.main.tokens
        self._hashes_a_block = self._block_size // self.groups.hash_tokens
        profile = settled_profile(vllm_config) if needs_profile(config.codec.name) else None
        can_trim = not (config.tiers.is_shared or config.sealing.key_file)
        sharding = Sharding.of(vllm_config, self.groups)
        kept = sharding.kept(vllm_config)
        self._storing = kept.shards
        shards = Shards(self._ranks, room_in(config), can_trim, kept.copies)
        shapes = memory_shapes(config.codec, self.groups, shards, profile)
        self._capacity = partial(usable_nbytes, vllm_config, config.tiers, self._storing)
        self._choices = [Choice(shape, self._capacity(shape)) for shape in shapes]
        self._shape, capacity = self._choices[0]
        check_capacity(config, self._shape, capacity)
        shared = config.tiers.is_shared
        if shared and not self.groups.is_even:
            raise UnsupportedError(
                f"tiers.kind is {config.tiers.kind}, but the model has layers with sliding windows and "
                f"{'blocks of several sizes' if self.groups.is_whole else 'none with full attention'}: use host."
            )
        namespace = None
        if config.tiers.is_lasting:
            weights = set(self._core.ask(loaded_digest))
            if len(weights) > 1:
                raise UnsupportedError(
                    f"tiers.kind is {config.tiers.kind}, but ranks read different weights, so that blocks of another "
                    "model could not be told apart: use host or device."
                )
            namespace = namespace_of(vllm_config, config, self.groups, weights.pop())
        owner = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"  # this engine's unique name
        self._core.prepare_requests(salts_of(config), config.tiers.is_lasting)
        chosen = choose_policy(config.policy)
        shares = Shares(config.tiers.pinned_share, config.tenants.shares)
        self.manager = SessionManager(
            chosen.policy,
            self._shape,
            capacity,
            config.idle.after_s,
            Events(),
            min_tokens=config.idle.min_tokens,
            label=owner if shared else "",
            options=chosen.options,
            shares=shares._replace(heads=0.0) if shared else shares,
            sink_tokens=config.codec.sink_tokens,
            quality=config.codec.quality,
            is_shared=shared,
            ttl_s=config.tiers.redis.ttl_s * (1 - FALL) if shared else None,
            is_exclusive=not config.tiers.is_lasting,
        )
        self._fronts = fast_tiers(config.tiers, self._storing)
        histories = Histories(self.manager, time.time) if config.api.enabled else None
        self.telemetry = Telemetry(self.manager, make_traces(vllm_config, config.tiers.places), histories)
        self.rechecks = Rechecks(vllm_config, config.codec.guard and config.api.enabled)
        if config.api.enabled:
            self._core.offer(METHOD, Queries(self).reply)
        self._events: KvEvents | None = None
        if (told := vllm_config.kv_events_config) is not None and told.enable_kv_cache_events:
            self._events = KvEvents(self.manager, self.groups, kv_cache_config, config.tiers.places[-1])
        self._redis: RedisLink | None = None
        self._books: DiskBooks | None = None
        self._journal: JournalLink | None = None
        if namespace is not None and config.tiers.is_on_disk:
            self._books = DiskBooks(vllm_config, config, namespace.name, sharding)
            if not shared:
                self._journal = self._books.link(self.manager, self._fronts, self._events)
        if namespace is not None and shared:
            sessions = make_sessions(vllm_config, config, namespace, owner, self._wake, sharding)
            parts = self._parts if self.groups.at_points else None
            self._redis = RedisLink(sessions, self.manager, self._fronts, parts)
        self.driver: Driver
        self._requests: dict[str, Request] = {}
        self._waiting: ReturnsFirstQueue | None = None
        """Manthan's queue of the scheduler's waiting requests; None if the scheduler still has vLLM's own queue."""
        self.limit: StepLimit | None = None  # limits on a step's tokens; None if only vLLM's own limits apply
        self._resident: dict[str, int] = {}
        """By id of a request that `match` has answered and that has no blocks yet, number of its resident blocks."""
        self._found = set[str]()  # ids of requests for which `Lookups` has called `found`, until `allocated`
        self._place: str | None = None  # argument for `Tier.cleared` after a reset, until workers are told
        self._deadline = inf
        self._drained_at: float | None = None
        """Time until which sessions are saved at the engine's end; None before the shutdown, 0 once it has passed."""
        self._woken = False  # True to have vLLM run a step though there may be no request; cleared by the step
        self._cancels = False  # True to have workers end transfers early
        self._weights: list[tuple[int, str]] | None = None
        """`weights_state` of each worker when the KV in the cold store was computed; None if unknown."""
        self._has_new_weights = False  # True until the workers are told
        self._was_called = False  # True if workers were called since the last `_heed_calls`, maybe to load weights
        self._is_unsure = False  # True to compare weights before the next request: a load or a reset was tried
        self._drops = False  # True if the next request empties the cold store, as the caller of a pause has asked
        self._calibrates = bool(settings(vllm_config).get(CALIBRATES))
        self._has_left_out = False  # True if the log has said that a step with a tenant's request made no profile
        self._candidate: Candidate | None = None
        """Profile (a codec's tables) made from requests' KV, until the guard uses its codec; None without a profile."""
        self._sweeper = Sweeper(min(config.idle.after_s, LEAD_S), self._is_due, self._wake)
        announce(vllm_config, config, self._shape, capacity, namespace.name if namespace else "")

    def bind(self, pool: BlockPool) -> None:
        """Make the driver and the parts that need `pool`. vLLM calls this inside the scheduler's constructor."""
        scheduler = under_construction(Scheduler)
        if self.config.ordering == "returns":
            scheduling = scheduler.scheduler_config
            waiting = ReturnsFirstQueue(
                scheduling.max_num_batched_tokens,
                scheduling.policy == "priority",
                self.config.admission_s,
                pool.get_num_free_blocks,
            )
            if replace_waiting(scheduler, waiting):
                self._waiting = waiting
                self.telemetry.passed = lambda: waiting.passed(time.time())
                if scheduling.enable_chunked_prefill and not scheduling.disable_chunked_mm_input:
                    largest = max(group.tokens for group in self.groups.stored)
                    self.limit = StepLimit(scheduler, waiting, largest)
        event = None if self._events is None else self._events.event
        block_tokens = {each.group.index: each.group.tokens for each in self.groups.at_points}
        self.pool = VllmPool(pool, block_tokens | {self._group: self._block_size}, event)
        self.guard: Guard | None = None
        if (codec := self.config.codec).guard:
            is_approved = bool(settings(self._vllm_config).get(APPROVED))
            if is_approved:
                tell_approved(codec.name)
            else:
                tell_guard(codec.name, [codec.name, *finer_codecs(codec.name)][-1])
            self.guard = Guard(self.manager, self._choices, self._ranks, is_approved)
        self.driver = Driver(
            self.manager,
            self.pool,
            ranks=self._ranks,
            storing=self._storing,
            fronts=self._fronts,
            prefetch_lead_s=lead_s(self.config.idle.after_s) if self.groups.is_expected else None,
            redis=self._redis,
            journal=self._journal,
            guard=self.guard,
            again=self.groups.again,
            last_tokens=self.groups.last_tokens,
            weigh=sum if self.config.tiers.is_shared else on_each(self._storing),
            fails_whole=self.groups.fails_whole,
        )
        if self._books is not None and self._journal is not None:
            self._books.adopt(self._journal)
        Lookups(scheduler.kv_cache_manager, self.pool.marks, self)
        self._core.ask(get_ready)  # vLLM has warmed up
        try:
            self._weights = self._core.ask(weights_state)
        except Exception as error:  # the engine continues after any error
            logger.warning("Manthan: the weights cannot be compared later: %s: %s", type(error).__name__, error)
        self._sweeper.start()
        if self._redis is not None:
            self._redis.start()

    # -- vLLM's local prefix cache; see `Lookups` ----------------------------------------------------

    def asker(self, request: Request) -> Asker | None:
        """Return the asker for `Marks.serves`; None for a request that may use no lossy blocks."""
        return self.rechecks.asker(request.request_id) or self.driver.asker(request.request_id)

    def found(self, request: Request, block_ids: Sequence[Sequence[int]]) -> None:
        """Note the blocks that vLLM has found for the request in its prefix cache, by KV cache group."""
        self.driver.hits(request.request_id, block_ids)
        self._found.add(request.request_id)

    def computed(self, request: Request, block_ids: Sequence[int]) -> bool:
        """Mark blocks that vLLM is entering into its prefix cache for the request, and return True.

        Return False for a recheck's request, whose blocks, if lossy, may serve no other request.
        """
        if request.request_id in self.rechecks:
            return False
        self.driver.computed(request.request_id, block_ids)
        return True

    @property
    def used_codec(self) -> str:
        """Name of the codec in which the main group's new blocks are stored."""
        if self.guard is not None and self.guard.is_exact:
            return EXACT
        shape = self.manager.shape
        return shape.groups[shape.main].codec or self.config.codec.name

    # -- requests -------------------------------------------------------------------------------------

    def new_request(self, request: Request) -> None:
        if request.request_id in self.rechecks:
            return
        hints, prompt, tail = hints_of(request), request.prompt_token_ids, None
        if prompt is not None:  # tail: the prompt's tokens behind its last full block
            tail = np.array(prompt[len(prompt) // self._block_size * self._block_size :], np.int64).tobytes()
        self._requests[request.request_id] = request
        started = self.manager.request_started(
            request.request_id,
            self._keys(request),
            request.session_id or None,
            time.monotonic(),
            tokens=request.num_prompt_tokens,
            hints=hints,
            tenant=tenant_of(request),
            tail=tail,
        )
        session = started.session
        self.telemetry.began(request, hints, started.tokens - session.added_tokens if session.uses > 1 else None)
        self.driver.started(started, self._blocks(request))
        if self._waiting is not None:
            self._waiting.update(request, self._to_compute(request))

    def _to_compute(self, request: Request) -> int:
        """Return the number of a request's tokens from the first block on that is neither resident nor saved in a tier.

        Found by a binary search, so that the number is an estimate if later blocks are present.
        """
        hashes, blocks, group = self._keys(request), self.manager.blocks, self._shape.session_group

        def is_gone(at: int) -> bool:
            row = blocks.row(group, hashes[at])
            is_saved = row >= 0 and bool(blocks.status[row] & SAVED)
            return not is_saved and self.pool.lookup(self._group, [hashes[at]]) == [-1]

        found = bisect_left(range(self._usable(request)), True, key=is_gone)
        if found:
            [block_id] = self.pool.lookup(self._group, [hashes[found - 1]])
            if block_id >= 0:
                self.pool.count_on(block_id, request)
        return request.num_tokens - found * self._block_size

    def _reorder(self) -> None:
        """Update the tokens to compute of waiting requests, after changes of sessions and overwritten blocks."""
        changed, self.telemetry.changed = self.telemetry.changed, set()
        names = [request.request_id for request in self.pool.take_bereft()]
        if (waiting := self._waiting) is None:
            return
        for session in filter(None, map(self.manager.table.by_id.get, changed)):
            names += session.requests
        for request_id in names:
            if (request := waiting.get(request_id)) is not None:
                waiting.update(request, self._to_compute(request))

    def match(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """Return the number of tokens to load behind the first `computed` tokens, and True if there are any.

        None instead of a number asks vLLM to call again later. True tells vLLM that the load is asynchronous. All loads
        are, because vLLM would compute with the blocks of a synchronous load before Manthan has checked them. If the
        check then failed, vLLM would drop only the current step's token, while asynchronous scheduling has begun the
        next step with the same bad blocks.
        """
        self._begin_again()
        resident, usable = computed // self._block_size, self._usable(request)
        blocks = self.driver.matched(request.request_id, resident, usable, self._blocks(request), time.monotonic())
        if blocks is None:
            return None, False
        self._resident[request.request_id] = resident
        return blocks * self._block_size, blocks > 0

    def _usable(self, request: Request) -> int:
        return 0 if request.skip_reading_prefix_cache else self.driver.usable(request.num_tokens)

    def _blocks(self, request: Request) -> int:
        return self.groups.held(request.num_tokens, self._vllm_config.max_in_flight_tokens)

    def allocated(self, request: Request, blocks: KVCacheBlocks, tokens: int) -> None:
        """Note the blocks that vLLM has allocated, and begin to load `tokens` tokens behind the resident blocks."""
        is_new = request.request_id in self._resident  # else the load has ended
        resident = self._resident.pop(request.request_id, 0)
        brought = tokens_to_load(request) - tokens if is_new else 0  # tokens loaded by another connector
        usable = self.driver.usable(request.num_tokens)
        if self._events is not None and self._redis is not None:  # another engine may have stored the request's blocks
            self._events.remember(request, usable)
        taken = sum(map(len, blocks.blocks))
        is_again, by_others = request.num_preemptions > 0, brought // self._block_size
        self.driver.admitted(request.request_id, resident, usable, taken, by_others, is_again)
        if request.request_id in self._found:
            self._found.remove(request.request_id)
        else:  # a connector loads, and vLLM caches the blocks later
            self.driver.hits(request.request_id, blocks.get_block_ids())
        if brought and (decoded := lossy_prefill_tokens(request.kv_transfer_params)):
            self._handed(request.request_id, blocks, decoded)
        if tokens:
            block_ids, end = blocks.get_block_ids(), resident + tokens // self._block_size
            found, others = end + self.groups.again, []
            for group, parts in groupby(self.groups.parts(found), attrgetter("group")):
                cold = [part for part in parts if part.first_token >= resident * self._block_size]
                named = [self._key_of(part, request) for part in cold]
                others.append((group, named, [block_ids[group][part.at] for part in cold]))
            self.driver.loading(request.request_id, resident, found, block_ids[self._group][resident:end], others)
            if self.telemetry.traces is not None:
                self.telemetry.traces.restoring(request.request_id, list(self._tiers(request.request_id, tokens)))

    def _handed(self, request_id: str, blocks: KVCacheBlocks, decoded: float) -> None:
        """Mark new blocks in the first `decoded` tokens as decoded by a codec, later ones as computed behind these."""
        sizes = {group.index: group.tokens for group in self.groups.stored}
        first, behind = ([list[int]() for _ in blocks.blocks] for _ in range(2))
        for group, of_group in enumerate(blocks.blocks):
            size = sizes.get(group, self._block_size)
            for at, block in enumerate(of_group):
                if block.block_hash is None and not block.is_null:
                    (first if at * size < decoded else behind)[group].append(block.block_id)
        self.driver.handed(request_id, first, behind)

    def loaded_into(self, request_id: str, block_ids: Sequence[int], tokens: int) -> Sequence[int]:
        """Return the ids of the request's blocks, of the main group, into which `tokens` tokens are loaded."""
        resident = self._resident.get(request_id, 0)
        return block_ids[resident : resident + tokens // self._block_size]

    def sources(self, request: Request, tokens: int) -> dict[CacheHitSource, int]:
        """Return the number of tokens that a request loads, by vLLM's source of a cache hit. tokens: their sum."""
        return {SOURCES[tier]: count for tier, count in self._tiers(request.request_id, tokens).items()}

    def _tiers(self, request_id: str, tokens: int) -> dict[str, int]:
        """Return the number of tokens that a request loads, by tier, as estimated by `FrontTiers`. tokens: their sum.

        In a model whose blocks are stored for resume points only, all tokens count for the slowest tier of the load.
        """
        blocks, names, is_whole = self.manager.blocks, self.config.tiers.tier_names, self.groups.is_whole
        if not any(blocks.moved_nbytes):
            return {names[0]: tokens}
        jobs = [job for job in self.driver.loads_of(request_id) if job.group == self._group or not is_whole]
        rows = [row for job in jobs for row in blocks.find(job.group, job.block_hashes).tolist()]
        tiers = Counter(self.driver.fronts.tier_of(row) if row >= 0 else 0 for row in rows)
        if not is_whole:
            return {names[max(tiers, default=0)]: tokens}
        behind = {names[tier]: self._block_size * count for tier, count in sorted(tiers.items()) if tier}
        first = tokens - sum(behind.values())
        return {names[0]: first} | behind if first else behind

    def finished(self, request: Request, blocks: int) -> dict[str, Any] | None:
        """Note a request's end. Return kv_transfer_params for its output. blocks: number of its main group's blocks."""
        self._resident.pop(request.request_id, None)
        self._found.discard(request.request_id)
        if request.request_id in self.rechecks:
            self.driver.finished(request.request_id, (), time.monotonic(), 0)
            if request.cache_salt:  # no other request can find these blocks
                for group in self.groups.stored:
                    step = group.tokens // self.groups.hash_tokens
                    self.pool.release(group.index, request.block_hashes[step - 1 :: step])
            return None
        self.rechecks.ended()
        self._requests.pop(request.request_id, None)
        if self.limit is not None and not self._requests:
            self.limit.rest()
        found = self.driver.found(request.request_id)
        is_loading = bool(self.driver.loads_of(request.request_id))  # vLLM counts these tokens as computed already
        new = 0 if is_loading else max(0, min(request.num_prompt_tokens, request.num_computed_tokens) - found)
        keys = self._keys(request)[: min(blocks, request.num_computed_tokens // self._block_size)]
        computed = self.groups.deepest(len(keys) if is_loading else self._entered(keys))
        keys = keys[:computed]
        prompt_depth = self.groups.deepest(self.driver.usable(request.num_prompt_tokens))
        depths = dict.fromkeys((computed, min(computed, prompt_depth)))  # the same prompt may come again
        points = [
            PointParts(depth, [(part.group, self._key_of(part, request), part.at) for part in self.groups.parts(depth)])
            for depth in depths
            if depth and self.groups.at_points
        ]
        now, ending = time.monotonic(), _ending(request)
        if (asker := self.driver.returned(request.request_id)) is not None:
            depth = found // self._block_size - self.groups.again
            if depth > 0:
                self.rechecks.offer(request, asker, self._keys(request)[:depth], depth * self._block_size)
        outcome = self.driver.finished(request.request_id, keys, now, request.num_tokens, points, ending)
        if self._events is not None:
            self._events.remember(request, computed, (part for depth in depths for part in self.groups.parts(depth)))
        self._set_deadline()
        self.telemetry.ended(request, outcome, found, new)
        return answer_to(hints_of(request), outcome)

    def _entered(self, keys: Sequence[BlockHash]) -> int:
        """Return the length of `keys` without last blocks that vLLM's prefix cache lacks.

        vLLM enters blocks when it schedules the next step, and with asynchronous scheduling one step later. The last
        blocks are missing if tokens of the last step or of a draft filled them, or if a draft is still to read them.
        """
        entered, config = len(keys), self._vllm_config
        late = config.num_speculative_tokens + config.num_prefill_lookahead_tokens
        late += bool(config.scheduler_config.async_scheduling)
        for _ in range(-(-late // self._block_size)):
            if entered and self.pool.lookup(self._group, [keys[entered - 1]]) == [-1]:
                entered -= 1
        return entered

    def _keys(self, request: Request) -> Sequence[BlockHash]:
        """Return the block hashes of a request's full blocks of the main group."""
        step = self._hashes_a_block
        return request.block_hashes if step == 1 else request.block_hashes[step - 1 :: step]

    def _parts(self, depth: int) -> Iterator[tuple[int, int]]:
        return ((part.group, part.at) for part in self.groups.parts(depth))

    def _key_of(self, part: Part, request: Request) -> bytes:
        return request.block_hashes[part.end // self.groups.hash_tokens - 1]

    def recheck(self) -> dict[str, Any] | None:
        """Return the task of a recheck for an API server; None if no restore is due, or none can be rechecked now."""
        found = self.rechecks.due
        if found is None or self._requests or self.is_out_of_use:
            return None
        blocks = self.groups.held(len(found.prompt) + 1, self._vllm_config.max_in_flight_tokens)
        if self.driver.runway.length(blocks) < blocks:  # KV that is not saved would be overwritten
            return None
        if -1 in self.pool.lookup(self._group, found.hashes):
            self.rechecks.forget()
            return None
        return self.rechecks.take(found)

    def rechecked(self, secret: str, divergence: float, is_same: bool) -> None:
        """Take the result of a recheck. divergence: in nats. is_same: True if the likeliest next token is the same."""
        if not self.rechecks.accept(secret):
            return
        self.telemetry.rechecked(divergence, is_same)
        if self.guard is not None and (mean := self.guard.rechecked(divergence)) is not None:
            tell_rechecks(mean)
        self.steered()  # because metrics are sent in a step

    # -- a step ---------------------------------------------------------------------------------------

    def step(self, scheduled_tokens: int, scheduled_requests: int) -> ManthanMetadata:
        """Return the orders to workers for a step. The arguments count what vLLM computes in the step."""
        self._woken = False
        if self.is_out_of_use and not scheduled_tokens:
            return ManthanMetadata()
        self._heed_calls()
        if self._is_unsure and scheduled_tokens:
            self._begin_again()
        taken = self.groups.taken(scheduled_tokens, scheduled_requests) if scheduled_tokens else 0
        now = time.monotonic()
        if self.driver.wanted(now):
            for request in self._requests.values():
                self.driver.cached(request.request_id, request.num_computed_tokens // self._block_size)
        work = self.driver.step(taken, now)
        self._reorder()
        if self.limit is not None:
            self.limit.begin(scheduled_tokens, now, len(self._requests))
        metadata = ManthanMetadata(
            self._place,
            self._has_new_weights,
            work.drops,
            work.stores,
            work.loads,
            tokens=scheduled_tokens,
            cancels=self._cancels,
            revokes=work.revokes,
            may_calibrate=self._may_calibrate(scheduled_tokens),
        )
        self._place, self._has_new_weights = None, False
        self._set_deadline()
        return metadata

    def _may_calibrate(self, tokens: int) -> bool:
        """True if workers may make a profile of the KV of a step with `tokens` tokens."""
        if not self._calibrates or tokens < LEAST:
            return False
        has_tenants = any(map(tenant_of, self._requests.values()))
        if has_tenants and not self._has_left_out:
            self._has_left_out = True
            tell_left_out()
        return not has_tenants

    def worker_output(self, report: ManthanWorkerMetadata) -> None:
        """Take results of workers. A transfer is settled when every rank that takes part in it has answered."""
        gathered, report.gathered = report.gathered, []  # after an error `drain` gets the same report
        self.driver.gathered(gathered)
        if report.candidate is not None and self.guard is not None:
            path, shape = report.candidate
            main = replace(shape.groups[shape.main], codec=CALIBRATED)  # other groups keep their codecs
            shape = replace(shape, groups={**self._shape.groups, shape.main: main})
            self._calibrates, self._candidate = False, Candidate(path, shape)
            self.guard.offer(Choice(shape, self._capacity(shape)))
        self.telemetry.measured(report.measured, self.config.codec.name, self.used_codec)
        self.driver.answered(report.results, time.monotonic(), report.verdicts)
        if self._candidate is not None and self.manager.shape is self._candidate.shape:
            path, self._candidate = self._candidate.path, None
            threading.Thread(target=_keep, args=(path,), name="manthan-profile", daemon=True).start()
        self._reorder()
        self._set_deadline()

    def has_work(self) -> bool:
        """True if the engine should run a step even without requests."""
        if self._core.is_halting:
            return self._core.is_moving
        if self._core.is_ending:
            return self._drains()
        if self.is_out_of_use:
            return False
        if self._woken or self._place is not None:
            return True
        if self.driver.rests:
            return self.driver.holds_blocks
        return self.driver.has_work or (self._events is not None and self._events.has_news)

    def _drains(self) -> bool:
        """True while sessions are being saved at the engine's end, in tiers that outlive the engine."""
        tiers, now = self.config.tiers, time.monotonic()
        if not (tiers.is_lasting and tiers.drain_s) or self.is_out_of_use or self._is_unsure:
            return False
        if self._drained_at is None:
            self._drained_at = now + tiers.drain_s
            if saving := self.manager.save_all(now):
                logger.info("Manthan: %d sessions are saved before the engine ends.", saving)
        if now < self._drained_at:
            return self.driver.has_work
        if self._drained_at and self.manager.saving:
            left = len(self.manager.saving)
            logger.warning(f"Manthan: {left} sessions were not saved within tiers.drain_s, {tiers.drain_s:g} s.")
        self._drained_at = 0.0  # vLLM calls `has_work` again
        return False

    def take_events(self) -> Sequence[KVCacheEvent]:
        return () if self._events is None else self._events.take()

    # -- resets and sleep -----------------------------------------------------------------------------

    def reset(self) -> None:
        """Empty the cold store, and take the blocks out of all sessions. During a pause, do nothing."""
        if self._core.is_pausing:  # `paused` decides what to drop
            return
        self.telemetry.changed.update(self.manager.table.by_id)
        self._place = self.driver.reset(time.monotonic())
        self.rechecks.forget()
        logger.info("Manthan: the cold store is emptied.")

    def halt(self) -> None:
        """Begin no transfer, and have workers end running transfers early."""
        self._cancels = True
        self.driver.halt(time.monotonic())

    def is_moving(self) -> bool:
        return self.driver.is_moving

    def go_on(self, was_reset: bool) -> None:
        """End a reset of the prefix cache, done or failed. No transfer begins before a request: weights may change."""
        self._cancels, self._is_unsure = False, True
        self.rechecks.forget()
        if was_reset:
            self.telemetry.changed.update(self.manager.table.by_id)
            self.driver.forget_resident(time.monotonic())
            self._woken = True  # because a step sends KV events and metrics of the reset
            if self._events is not None:
                self._events.repeats = True
            cold = self.manager.table.states[SessionState.COLD]
            if cold:
                logger.info("Manthan: the prefix cache is reset; %d cold sessions stay, if the weights do.", cold)
        self.driver.rests = self._is_unsure
        self._reorder()

    @property
    def is_out_of_use(self) -> bool:
        return self._core.is_asleep

    def paused(self, drops: bool) -> None:
        """Note a pause of the engine, or a sleep that keeps the weights. drops: True to drop cold sessions after it."""
        self._drops = drops

    def _begin_again(self) -> None:
        """Empty the cold store before a request, if weights may have changed or the caller of a pause asked for it.

        Weights are compared no earlier, because vLLM's users may load them before or after a reset.
        """
        self.driver.rests = False
        self._heed_calls()
        if self._is_unsure:
            before, self._weights = self._weights, self._core.ask(weights_state)
            self._is_unsure = False
            if self._weights is None or self._weights != before:
                logger.info("Manthan: the weights have changed, or may have.")
                self._drops = self._has_new_weights = True
        if self._drops:
            self._drops = False
            self.reset()

    def called(self, has_loaded: bool) -> None:
        """Note that vLLM or its user has called the workers. has_loaded: True if it loaded weights, or tried."""
        self._was_called = True
        if has_loaded:
            self._weights, self._is_unsure = None, True

    def doubt(self) -> None:
        """Note that vLLM did not do a reset of the prefix cache, which a user may have asked for due to new weights."""
        self._is_unsure = True

    def _heed_calls(self) -> None:
        """If workers were called, set `_is_unsure` unless their number of loads of weights is as before."""
        if self._was_called and not self._is_unsure:
            before = None if self._weights is None else [count for count, _ in self._weights]
            self._is_unsure = self._core.ask(loads) != before
        self._was_called = False

    # -- after an error -------------------------------------------------------------------------------

    def give_up(self) -> None:
        """Stop after an error: give back the pool's blocks of stores and prefetches that no worker has been told of."""
        self._sweeper.stop()
        self.driver.abandon()

    def drain(self, report: ManthanWorkerMetadata) -> None:
        """Give back the pool's blocks of stores and prefetches that ended after `give_up`."""
        self.driver.gathered(report.gathered)
        self.driver.drain(report.results)

    def shutdown(self) -> None:
        self._sweeper.stop()
        for opened in (self._redis, self._journal, self._books):
            if opened is not None:
                opened.close()

    # -- deadlines ------------------------------------------------------------------------------------

    def steered(self) -> None:
        """Have the engine run a step after a call of the HTTP API, such as a change of a session."""
        self._set_deadline()
        self._woken = True

    def _set_deadline(self) -> None:
        self._deadline = self.driver.next_deadline

    def _is_due(self) -> bool:
        return not self.is_out_of_use and self._deadline <= time.monotonic()

    def _wake(self) -> None:
        self._woken = True
        self._core.wake()
