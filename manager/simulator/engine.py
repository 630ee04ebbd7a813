"""A replay on a KV pool and a cold store: what vLLM and the scheduler half do, event by event.

    tally = replay(trace.requests, Setup(get_policy("lru"), pool_blocks=4000, cold_blocks=20000))

docs/simulate.md says what is taken from reality and what is simplified.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from manthan.manager.driver import Driver
from manthan.manager.session.prefetch import lead_s
from manthan.manager.simulator.pool import SimulatedPool
from manthan.manager.simulator.replay import Counting, Served, Setup, Tally, hints_of
from manthan.manager.simulator.traces import TracedRequest
from manthan.manager.transfer import Transfer, TransferResult


def total_blocks(request: TracedRequest, block_tokens: int) -> int:
    """Return the blocks that a request has in the end. The KV of its last token is never computed."""
    return -(-(request.input_tokens + max(0, request.output_tokens - 1)) // block_tokens)


@dataclass(slots=True, eq=False)
class _Request:
    """A request that has come, and its blocks of the pool.

    resident, restored: number of its blocks that were found. entered: number of them in the prefix cache. began: time
    of its first token.
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
    """Requests arrive, wait, are restored, computed and answered; between any two of these events there is a step.

    A request is let in when its prompt and its answer fit, and takes its blocks as they are needed. The driver is that
    of a real engine.
    """

    def __init__(self, requests: Sequence[TracedRequest], setup: Setup, journal: bool) -> None:
        self.requests, self.setup, self.cost = requests, setup, setup.cost
        self.manager = setup.manager()
        self.tally = Tally([None] * len(requests), journal=[] if journal else None)
        largest = max(map(self._size, requests), default=0)
        if largest > setup.pool_blocks:
            raise ValueError(f"pool_blocks must be {largest} or more, as the largest request, not {setup.pool_blocks}")
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._order = count()
        self._pool = SimulatedPool(setup.pool_blocks)
        self._counting = Counting(self.tally, self.manager)
        self._driver = Driver(self.manager, self._pool, prefetch_lead_s=lead_s(setup.idle_after_s))
        self._waiting: deque[_Request] = deque()
        self._starved: list[tuple[Callable[[_Request], None], _Request]] = []
        self._promised = 0  # blocks that those let in will yet take
        self._taken = 0  # blocks since the last step, for what is computed
        self._encoded_until = 0.0

    def _size(self, request: TracedRequest) -> int:
        return total_blocks(request, self.setup.block_tokens)

    def run(self) -> None:
        """Serve all requests."""
        if self.requests:
            self._at(self.requests[0].at, self._arrive, 0)
        while self._events:
            due = self._driver.next_deadline
            if self.now < due < self._events[0][0]:  # what was due before had its step, and waits for a load
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

    def asked(self, request: TracedRequest) -> int:
        """Return the blocks of a prompt, a partial one included."""
        return -(-request.input_tokens // self.setup.block_tokens)

    def usable(self, request: TracedRequest) -> int:
        """Return the blocks that may be found: the last token of a prompt is always computed."""
        return min(request.prompt_blocks, (request.input_tokens - 1) // self.setup.block_tokens)

    # -- requests -------------------------------------------------------------------------------------

    def _arrive(self, number: int) -> None:
        if number + 1 < len(self.requests):
            self._at(self.requests[number + 1].at, self._arrive, number + 1)
        self.tally.measuring = number >= self.setup.first_measured
        request = _Request(number, str(number), self.requests[number])
        traced = request.traced
        self._driver.started(
            request.name,
            traced.hashes[: traced.prompt_blocks],
            traced.session,
            self.now,
            tokens=traced.input_tokens,
            blocks=self.asked(traced),
            hints=hints_of(traced),
        )
        self._waiting.append(request)

    def _admit(self) -> None:
        """Let in whoever fits, in order; whose KV is just being prefetched is passed by, as in vLLM."""
        passed = []
        while self._waiting:
            request = self._waiting[0]
            usable, blocks = self.usable(request.traced), self.asked(request.traced)
            hits = self._pool.hit(request.traced.hashes[:usable], partial(self._driver.serves, request.name))
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
        """True if there is room for its prompt now, and for its answer when that is computed."""
        free, users = len(self._pool), self._pool.users
        in_the_end = self._size(request.traced) + self._promised
        if in_the_end <= free:  # even if nobody else uses what it has found
            return True
        if needed + sum(not users(block) for block in hits) > free:
            return False
        revived = sum(not users(block) for block in hits)
        return in_the_end - len(hits) + revived <= free

    def _start(self, request: _Request, hits: list[int], cold: int) -> None:
        resident, name = len(hits), request.name
        self._pool.hold(hits)
        self._driver.hits(name, [hits])
        self._driver.admitted(name, resident, self.usable(request.traced), taken=resident + cold)
        request.blocks, request.resident, request.restored, request.entered = hits, resident, cold, resident
        self._promised += self._size(request.traced) - resident
        self.tally.order.append(request.number)
        if cold:
            self._grow(request, resident + cold)
            self._taken -= cold
            self._driver.loading(name, resident, resident + cold, request.blocks[resident:])
            self._counting.restoring(name, request.traced.hashes[resident : resident + cold])
            seconds = self.cost.restore_s_per_token * cold * self.setup.block_tokens
            self._at(self.now + seconds, self._restored, request)
        else:
            self._compute(request)

    def _restored(self, request: _Request) -> None:
        jobs = self._driver.loads_of(request.name)
        self._driver.answered([TransferResult(job.job_id, np.zeros(len(job), np.int64)) for job in jobs], self.now)
        self._enter(request, len(request.blocks))
        self._compute(request)

    def _compute(self, request: _Request) -> None:
        """Compute the rest of the prompt. Others find its blocks at once, as in vLLM."""
        traced, cached = request.traced, request.resident + request.restored
        if not self._grow(request, self.asked(traced)):
            self._starved.append((self._compute, request))
            return
        self._driver.cached(request.name, cached)
        self._enter(request, traced.prompt_blocks)
        seconds = self.cost.first_token_s + self.cost.prefill_s(cached * self.setup.block_tokens, traced.input_tokens)
        self._at(self.now + seconds, self._answer, request)

    def _answer(self, request: _Request) -> None:
        traced, request.began = request.traced, self.now
        self.tally.served[request.number] = Served(
            self.asked(traced), request.resident, request.restored, self.now - traced.at
        )
        self._driver.cached(request.name, request.entered)
        self._go_on(request)

    def _go_on(self, request: _Request) -> None:
        """Compute the answer until the next block is needed, or to its end."""
        traced, block_tokens = request.traced, self.setup.block_tokens
        more = len(request.blocks) < self._size(traced)
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
        """Take blocks until the request has `length`. Return False if too many are being gathered."""
        more = length - len(request.blocks)
        if more > len(self._pool):
            return False
        request.blocks += self._pool.take(more)
        self._promised -= more
        self._taken += more
        return True

    def _enter(self, request: _Request, length: int) -> None:
        """Enter the first `length` blocks, which are full, into the prefix cache, as far as their hashes are known."""
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
        """Do nothing but take the step that follows."""

    # -- a step ---------------------------------------------------------------------------------------

    def _step(self) -> None:
        work = self._driver.step(self._taken, self.now)
        self._taken = 0
        self._counting.look_at_store()
        if work.stores:
            hashes = [block_hash for job in work.stores for block_hash in job.block_hashes]
            self._driver.gathered(job.job_id for job in work.stores)
            self.tally.note("store", "", hashes)
            seconds = self.cost.store_s_per_token * len(hashes) * self.setup.block_tokens
            self._encoded_until = max(self.now, self._encoded_until) + seconds
            self._at(self._encoded_until, self._encoded, work.stores)
        for load in work.loads:
            if load.request_id is None:
                seconds = self.cost.restore_s_per_token * len(load) * self.setup.block_tokens
                self._at(self.now + seconds, self._prefetched, load)
        if work.drops or self._driver.has_orders:
            self._at(self.now, self._look_again, None)
        self.tally.peak_used = max(self.tally.peak_used, self.setup.pool_blocks - len(self._pool))

    def _encoded(self, jobs: Sequence[Transfer]) -> None:
        shape = self.manager.shape
        bounds = shape.groups[shape.main].bounds
        results = [
            TransferResult(job.job_id, np.array([bounds[exact] for exact in job.exacts(shape.block_tokens)]))
            for job in jobs
        ]
        self._driver.answered(results, self.now)

    def _prefetched(self, load: Transfer) -> None:
        self._driver.answered([TransferResult(load.job_id, np.zeros(len(load), np.int64))], self.now)


def replay(requests: Sequence[TracedRequest], setup: Setup, journal: bool = False) -> Tally:
    """Replay requests, which are in the order of their arrival.

    Args:
        journal: True if every action is to be noted.

    Raises:
        ValueError: A request does not fit into the pool.
    """
    world = EngineReplay(requests, setup, journal)
    world.run()
    return world.tally
