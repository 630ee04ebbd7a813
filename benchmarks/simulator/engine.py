"""Replay a trace on a simulated KV pool and a simulated cold store, which keeps compressed KV blocks.

    tally = replay(trace.requests, Setup(get_policy("lru"), pool_blocks=4000, cold_blocks=20000))

Manthan's session manager, and its driver, which vLLM's scheduler would call, are real. See docs/simulate.md.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from manthan.benchmarks.simulator.pool import SimulatedPool
from manthan.benchmarks.simulator.traces import MOONCAKE_BLOCK_TOKENS, TracedRequest
from manthan.manager.config.model import ManthanConfig
from manthan.manager.driver import Driver
from manthan.manager.events import BlocksDropped, BlocksSaved, Event, Events, Evicted
from manthan.manager.session.blocks import LEVELS, GroupShape, MemoryShape
from manthan.manager.session.manager import SessionManager
from manthan.manager.session.prefetch import lead_s
from manthan.manager.transfer import Transfer, TransferResult
from manthan.policies import EvictionPolicy, PolicyOptions

_DEFAULTS = ManthanConfig()
# Times to first token on an H200, with Qwen3-8B's shape and a prompt of 32,000 tokens, in seconds (docs/benchmarks.md):
# KV in the pool, compressed KV in pinned RAM, and KV computed again.
_TOKENS = 32_000
_RESIDENT_S, _HOST_S, _RECOMPUTED_S = 0.0246, 0.0511, 1.2305
# The share of a prefill that grows with the square of its length follows from the shape: FLOPs of the projections, and
# of attention over half of all pairs. 36 layers, hidden size 4,096, 8 KV heads of 128, MLP of 12,288.
_LINEAR = 2 * 36 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288) * _TOKENS
_SQUARE = 2 * 36 * 4096 * _TOKENS**2
_SQUARE_SHARE = _SQUARE / (_LINEAR + _SQUARE)
_RESTORE = (_HOST_S - _RESIDENT_S) / _TOKENS


@dataclass(frozen=True)
class CostModel:
    """Seconds and bytes of an H200 with a model of Qwen3-8B's shape and compressed blocks in pinned RAM.

    Args:
        first_token_s: time of a prompt whose KV is all in the pool.
        prefill_s_per_token: time of each computed prompt token.
        prefill_s_per_token2: further time of a computed prompt token at position p, divided by 2 * p.
        restore_s_per_token, store_s_per_token: time to decompress and compress a token's KV, assumed to be equal.
        decode_s_per_token: time between two tokens of an answer.
    """

    first_token_s: float = _RESIDENT_S
    prefill_s_per_token: float = (1 - _SQUARE_SHARE) * (_RECOMPUTED_S - _RESIDENT_S) / _TOKENS
    prefill_s_per_token2: float = _SQUARE_SHARE * (_RECOMPUTED_S - _RESIDENT_S) / _TOKENS**2
    restore_s_per_token: float = _RESTORE
    store_s_per_token: float = _RESTORE
    decode_s_per_token: float = 0.0071
    kv_bytes_per_token: float = 147_456
    cold_bytes_per_token: float = 28_800

    def prefill_s(self, first: int, last: int) -> float:
        """Return the seconds to compute the tokens from position `first` to `last`, the latter excluded."""
        return self.prefill_s_per_token * (last - first) + self.prefill_s_per_token2 * (last**2 - first**2)


@dataclass(frozen=True)
class Setup:
    """KV pool, cold store and eviction policy that a trace is replayed on.

    pool_blocks: size of the KV pool. cold_blocks: size of the cold store, in compressed blocks of the cost model.
    level: quality at which a calibrated codec compresses blocks, 0 for the coarsest; None for a codec without levels.
    shrinks: True if a full store cuts blocks to coarser levels. first_measured: index of the first request that counts.
    """

    policy: type[EvictionPolicy]
    pool_blocks: int
    options: PolicyOptions | None = None
    cold_blocks: int = 0
    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    cost: CostModel = CostModel()
    level: int | None = None
    shrinks: bool = True
    idle_after_s: float = _DEFAULTS.idle.after_s
    min_tokens: int = _DEFAULTS.idle.min_tokens
    first_measured: int = 0

    def manager(self) -> SessionManager:
        """Return a new manager. As on a server, common first blocks of sessions are stored without loss."""
        pool_nbytes = round(self.cost.kv_bytes_per_token * self.block_tokens)
        cold_nbytes = round(self.cost.cold_bytes_per_token * self.block_tokens)
        *inner, nbytes = [cold_nbytes] if self.level is None else self.parts
        group = GroupShape(self.block_tokens, pool_nbytes, {0: nbytes, self.block_tokens: pool_nbytes})
        shape = MemoryShape({0: replace(group, levels=1 + len(inner) * self.shrinks, level=self.level or 0)})
        return SessionManager(
            self.policy,
            shape,
            capacity_nbytes=self.cold_blocks * cold_nbytes,
            idle_after_s=self.idle_after_s,
            events=Events(),
            min_tokens=self.min_tokens,
            options=self.options,
            is_exclusive=True,
        )

    @property
    def parts(self) -> list[int]:
        """Bytes of a calibrated codec's compressed block at level 0, at level 1, and so on up to `level`."""
        nbytes = self.cost.kv_bytes_per_token * self.block_tokens
        return [round(nbytes / level.ratio) for level in LEVELS[: (self.level or 0) + 1]]


class Served(NamedTuple):
    """Figures of a request. asked: number of the prompt's blocks, a partial one included. resident: found in the pool.

    restored: found in the cold store. first_token_s: seconds from the arrival to the first token.
    """

    asked: int
    resident: int
    restored: int
    first_token_s: float


@dataclass
class Tally:
    """Result of a replay. All but `served` count from the arrival of request `Setup.first_measured` on.

    served: for each request, None until answered. evictions: how often all blocks of an idle session were stored.
    stored, restored, dropped: numbers of blocks. divergence: sum of `Level.divergence` over restored lossy blocks.
    """

    served: list[Served | None]
    evictions: int = 0
    stored: int = 0
    restored: int = 0
    dropped: int = 0
    divergence: float = 0.0


@dataclass(slots=True, eq=False)
class _Request:
    """Request in progress. number: index in the trace. blocks: ids of the request's pool blocks.

    resident, restored: numbers of blocks found in the pool and in the cold store. entered: number of blocks in the
    prefix cache. began: time of the first token.
    """

    number: int
    name: str
    traced: TracedRequest
    blocks: list[int] = field(default_factory=list)
    resident: int = 0
    restored: int = 0
    entered: int = 0
    began: float = 0.0


class EngineReplay:
    """Simulation by events: requests arrive, wait, are restored, computed and answered.

    A scheduler step follows each event and each deadline of the driver. A request is admitted when the pool has room
    for prompt and answer, and takes blocks when needed.
    """

    def __init__(self, requests: Sequence[TracedRequest], setup: Setup) -> None:
        self.requests, self.setup, self.cost = requests, setup, setup.cost
        self.manager = setup.manager()
        self.manager.events.subscribe(self._count, BlocksSaved, BlocksDropped, Evicted)
        self.tally = Tally([None] * len(requests))
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._order = count()
        self._pool = SimulatedPool(setup.pool_blocks)
        self._driver = Driver(self.manager, self._pool, prefetch_lead_s=lead_s(setup.idle_after_s))
        self._waiting: deque[_Request] = deque()
        self._starved: list[tuple[Callable[[_Request], None], _Request]] = []
        self._promised = 0  # blocks still to be taken by admitted requests
        self._taken = 0  # blocks taken since the last step, except for loads
        self._encoded_until = 0.0
        self._is_measuring = False

    def run(self) -> None:
        if self.requests:
            self._at(self.requests[0].at, self._arrive, 0)
        while self._events:
            due = self._driver.next_deadline
            if self.now < due < self._events[0][0]:  # a deadline up to `now` had its step; its work waits for a load
                self.now = due
            else:
                self.now, _, happen, what = heapq.heappop(self._events)
                happen(what)
            if self._starved:
                self._feed()
            if self._waiting:
                self._admit()
            self._step()

    def _at(self, time: float, happen: Callable[[Any], None], what: object) -> None:
        heapq.heappush(self._events, (max(time, self.now), next(self._order), happen, what))

    def _count(self, event: Event) -> None:
        if self._is_measuring:
            match event:
                case BlocksSaved():
                    self.tally.stored += len(event.block_hashes)
                case BlocksDropped():
                    self.tally.dropped += len(event.block_hashes)
                case _:
                    self.tally.evictions += 1

    # -- requests -------------------------------------------------------------------------------------

    def _arrive(self, number: int) -> None:
        if number + 1 < len(self.requests):
            self._at(self.requests[number + 1].at, self._arrive, number + 1)
        self._is_measuring = number >= self.setup.first_measured
        request = _Request(number, str(number), self.requests[number])
        traced = request.traced
        started = self.manager.request_started(
            request.name,
            traced.hashes[: traced.prompt_blocks],
            traced.session,
            self.now,
            tokens=traced.input_tokens,
            hints=traced.hints,
        )
        self._driver.started(started, traced.asked_blocks(self.setup.block_tokens))
        self._waiting.append(request)

    def _admit(self) -> None:
        """Admit waiting requests in order, up to the first that does not fit.

        A request whose blocks are being prefetched is skipped, and keeps its turn, as in vLLM.
        """
        passed = []
        while self._waiting:
            request, block_tokens = self._waiting[0], self.setup.block_tokens
            traced = request.traced
            usable, blocks = traced.usable_blocks(block_tokens), traced.asked_blocks(block_tokens)
            hits = self._pool.hit(
                traced.hashes[:usable], partial(self._pool.marks.serves, asker=self._driver.asker(request.name))
            )
            cold = self._driver.matched(request.name, len(hits), usable, blocks, self.now)
            if cold is None:
                passed.append(self._waiting.popleft())
            elif self._fits(request, hits, blocks - len(hits)):
                self._waiting.popleft()
                self._start(request, hits, cold)
            else:
                break
        self._waiting.extendleft(reversed(passed))

    def _fits(self, request: _Request, hits: Sequence[int], needed: int) -> bool:
        """True if there is room for the prompt now, and for the answer later."""
        free, revived = len(self._pool), sum(not self._pool.users(block) for block in hits)
        in_the_end = request.traced.total_blocks(self.setup.block_tokens) + self._promised
        return needed + revived <= free and in_the_end - len(hits) + revived <= free

    def _start(self, request: _Request, hits: list[int], cold: int) -> None:
        resident, name, traced, block_tokens = len(hits), request.name, request.traced, self.setup.block_tokens
        self._pool.hold(hits)
        self._driver.hits(name, [hits])
        self._driver.admitted(name, resident, traced.usable_blocks(block_tokens), taken=resident + cold)
        request.blocks, request.resident, request.restored, request.entered = hits, resident, cold, resident
        self._promised += traced.total_blocks(block_tokens) - resident
        if cold:
            self._grow(request, resident + cold)
            self._taken -= cold
            self._driver.loading(name, resident, resident + cold, request.blocks[resident:])
            self.tally.restored += cold * self._is_measuring
            blocks, rows = self.manager.blocks, self.manager.requests[name].rows[resident : resident + cold]
            levels = blocks.level[rows[blocks.exact[rows] == 0]].tolist()
            self.tally.divergence += sum(LEVELS[level].divergence for level in levels) * self._is_measuring
            seconds = self.cost.restore_s_per_token * cold * block_tokens
            self._at(self.now + seconds, self._restored, request)
        else:
            self._compute(request)

    def _restored(self, request: _Request) -> None:
        jobs = self._driver.loads_of(request.name)
        self._driver.answered([TransferResult(job.job_id, np.zeros(len(job), np.int64)) for job in jobs], self.now)
        self._enter(request, len(request.blocks))
        self._compute(request)

    def _compute(self, request: _Request) -> None:
        """Compute the rest of the prompt. Full blocks enter the prefix cache when this begins, as in vLLM."""
        traced, cached = request.traced, request.resident + request.restored
        if not self._grow(request, traced.asked_blocks(self.setup.block_tokens)):
            self._starved.append((self._compute, request))
            return
        self._driver.cached(request.name, cached)
        self._enter(request, traced.prompt_blocks)
        seconds = self.cost.first_token_s + self.cost.prefill_s(cached * self.setup.block_tokens, traced.input_tokens)
        self._at(self.now + seconds, self._answer, request)

    def _answer(self, request: _Request) -> None:
        traced, request.began = request.traced, self.now
        self.tally.served[request.number] = Served(
            traced.asked_blocks(self.setup.block_tokens), request.resident, request.restored, self.now - traced.at
        )
        self._driver.cached(request.name, request.entered)
        self._go_on(request)

    def _go_on(self, request: _Request) -> None:
        """Compute the answer until the next block is needed, or to the end."""
        traced, block_tokens = request.traced, self.setup.block_tokens
        more = len(request.blocks) < traced.total_blocks(block_tokens)
        tokens = len(request.blocks) * block_tokens - traced.input_tokens if more else traced.output_tokens - 1
        end = request.began + max(0, tokens) * self.cost.decode_s_per_token
        self._at(end, self._next_block if more else self._finish, request)

    def _next_block(self, request: _Request) -> None:
        full = len(request.blocks)
        if not self._grow(request, full + 1):
            self._starved.append((self._next_block, request))
            return
        self._enter(request, full)
        self._go_on(request)

    def _finish(self, request: _Request) -> None:
        self._enter(request, len(request.blocks))
        traced = request.traced
        tokens = traced.input_tokens + traced.output_tokens
        self._driver.finished(request.name, traced.hashes, self.now, tokens, ending=traced.stop)
        self._pool.free(request.blocks[::-1])

    # -- blocks ---------------------------------------------------------------------------------------

    def _grow(self, request: _Request, length: int) -> bool:
        """Take blocks until the request has `length`. Return False, and take none, if too few are free."""
        more = length - len(request.blocks)
        if more > len(self._pool):
            return False
        request.blocks += self._pool.take(more)
        self._promised -= more
        self._taken += more
        return True

    def _enter(self, request: _Request, length: int) -> None:
        """Enter the first `length` blocks into the prefix cache, as far as the trace has their hashes."""
        hashes = request.traced.hashes[request.entered : length]
        blocks = request.blocks[request.entered : length]
        self._driver.computed(request.name, blocks)
        self._pool.cache_all(blocks[: len(hashes)], hashes)
        request.entered += len(hashes)

    def _feed(self) -> None:
        starved, self._starved = self._starved, []
        for go_on, request in starved:
            go_on(request)

    def _look_again(self, _: None) -> None:
        """Do nothing: a step follows each event."""

    # -- a step ---------------------------------------------------------------------------------------

    def _step(self) -> None:
        work = self._driver.step(self._taken, self.now)
        self._taken = 0
        if work.stores:
            self._driver.gathered(job.job_id for job in work.stores)
            seconds = self.cost.store_s_per_token * sum(map(len, work.stores)) * self.setup.block_tokens
            self._encoded_until = max(self.now, self._encoded_until) + seconds
            self._at(self._encoded_until, self._encoded, work.stores)
        for load in work.loads:
            if load.request_id is None:
                seconds = self.cost.restore_s_per_token * len(load) * self.setup.block_tokens
                self._at(self.now + seconds, self._prefetched, load)
        if work.drops or self._driver.has_orders:
            self._at(self.now, self._look_again, None)

    def _encoded(self, jobs: Sequence[Transfer]) -> None:
        shape, inner = self.manager.shape, self.setup.parts[:-1] if self.setup.shrinks else []
        bounds = shape.groups[shape.main].bounds
        for job in jobs:
            exacts = job.exacts(shape.block_tokens)
            nbytes = np.array([bounds[exact] for exact in exacts])
            known = {at: inner for at, exact in enumerate(exacts) if inner and not exact}
            self._driver.answered([TransferResult(job.job_id, nbytes, inner=known)], self.now)

    def _prefetched(self, load: Transfer) -> None:
        self._driver.answered([TransferResult(load.job_id, np.zeros(len(load), np.int64))], self.now)


def replay(requests: Sequence[TracedRequest], setup: Setup) -> Tally:
    """Return the tally of a replay. requests: in order of arrival; each must fit into the pool."""
    world = EngineReplay(requests, setup)
    world.run()
    return world.tally
