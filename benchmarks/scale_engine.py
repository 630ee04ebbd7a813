"""Run Manthan's heart on a simulated engine, to time the heart alone. There is no model, no KV and no stored byte.

The heart is the session manager and its driver, which vLLM's scheduler calls. The KV pool is the simulator's. The tier,
a memory for compressed blocks, is simulated, too: blocks are saved within a step. Timed are the scheduler's calls for a
request and for a step, in CPU time of this thread, so that other processes do not count.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, count
from time import thread_time_ns
from typing import Any, NamedTuple

import numpy as np

from manthan.benchmarks.simulator.pool import SimulatedPool
from manthan.manager.driver import Driver
from manthan.manager.events import Events, Evicted, Turn
from manthan.manager.histories import Histories
from manthan.manager.pool import Mark
from manthan.manager.session.blocks import GroupShape, MemoryShape
from manthan.manager.session.manager import SessionManager
from manthan.manager.session.table import SessionState, digest_of
from manthan.manager.transfer import Transfer, TransferResult
from manthan.policies import get_policy

BLOCK_TOKENS = 16
BLOCK_NBYTES = BLOCK_TOKENS * 144 << 10
"""Bytes of a Qwen3-8B block in the pool. A compressed block takes a fifth."""
COLD_NBYTES = BLOCK_NBYTES // 5
POOL_BLOCKS = 32_768
"""Blocks of the pool: 524,288 tokens, about what fits on an H200 next to the model."""
HASH_NBYTES = 32
ANSWER_BLOCKS = 16
IDLE_AFTER_S = 2.0
ENOUGH = 1 << 60
"""Bytes of a tier that never fills up."""
WHOLE = 64
"""Number of sessions that `fill` makes by requests: the last ones. The pool holds this number, of 8,192 tokens each."""
AT_ONCE = 64  # most sessions that `fill` makes at a time without requests
STEP_S = 0.02
FILL_S = 0.05
"""Simulated seconds between two new sessions."""


@dataclass(slots=True, eq=False)
class Running:
    """Running request. session: index of the session. hashes: block hashes of prompt and answer.

    prompt: number of prompt blocks. blocks: ids of pool blocks. computed: number of blocks with KV. left: steps left.
    """

    request_id: str
    session: int
    hashes: Sequence[bytes]
    prompt: int
    blocks: list[int]
    computed: int
    left: int


class Times(NamedTuple):
    """Nanoseconds in the heart for each step, and for each request's start and end together."""

    steps: list[int]
    requests: list[int]


class Heart:
    """Heart of an engine with simulated sessions, which are made, and then asked again by a few requests at a time.

    Args:
        tokens: tokens of each session when it is made.
        policy: name of the eviction policy.
        seed: seed of block hashes, and of the order in which sessions are asked again.
    """

    def __init__(self, tokens: int, policy: str, seed: int) -> None:
        self.blocks = tokens // BLOCK_TOKENS
        sizes = {0: COLD_NBYTES, BLOCK_TOKENS: BLOCK_NBYTES}
        shape = MemoryShape({0: GroupShape(BLOCK_TOKENS, BLOCK_NBYTES, sizes)})
        events = Events()
        self.manager = SessionManager(get_policy(policy), shape, ENOUGH, IDLE_AFTER_S, events, is_exclusive=True)
        self.histories = Histories(self.manager, lambda: self.now)
        events.subscribe(self.histories)
        self.pool = SimulatedPool(POOL_BLOCKS)
        self.driver = Driver(self.manager, self.pool)
        self.now = 0.0
        self.sessions = 0
        """Number of sessions made."""
        self.longest_ns = 0
        """Nanoseconds of the longest call that entered blocks in `_adopt`. That call enlarges the table of blocks."""
        self._lengths: dict[int, int] = {}
        """Number of blocks of each session that was asked again, by session number."""
        self._seed, self._ids, self._chance = seed, count(), random.Random(seed)
        self._sent: Sequence[Transfer] = ()
        self._running: list[Running] = []
        self._spent = 0
        """Nanoseconds in the heart since the last `_lap`."""

    # -- sessions -------------------------------------------------------------------------------------

    def fill(self, sessions: int) -> None:
        """Make cold sessions until there are `sessions`, the last WHOLE of them through real requests."""
        while self.sessions < sessions:
            number = self.sessions
            if (adopted := min(AT_ONCE, sessions - WHOLE - number)) > 0:
                self._adopt(number, adopted)
                self.sessions += adopted
            else:
                self.sessions += 1
                self.now += FILL_S
                request = self._begin(number, self.blocks - ANSWER_BLOCKS, self.blocks)
                self._answer(request, self.blocks)
                self._finish(request)
                self.step(self.blocks)
        self.settle()

    def _adopt(self, first: int, sessions: int) -> None:
        """Make `sessions` cold sessions without requests, from number `first` on. The pool has none of the blocks."""
        manager, table, began, nbytes = self.manager, self.manager.table, self.now, self.blocks * COLD_NBYTES
        hashes = [self.hashes(number, self.blocks) for number in range(first, first + sessions)]
        depths = np.tile(np.arange(self.blocks, dtype=np.int32), sessions)
        rows = self._heart(manager.blocks.enter, 0, list(chain.from_iterable(hashes)), depths)
        self.longest_ns = max(self.longest_ns, self._lap())
        manager.blocks.save(rows, COLD_NBYTES, 0, Mark.EXACT, "")
        for number, named, own in zip(count(first), hashes, rows.reshape(sessions, -1), strict=False):
            self.now += FILL_S
            session = table.create(f"session-{number}", "", self.now)
            session.tokens = session.prompt_tokens = session.added_tokens = self.blocks * BLOCK_TOKENS
            session.uses = 1
            table.extend(session, own)
            table.enter_prompt(session, digest_of("", named, b"1"))
            table.set_cold(session, True)
            table.remember(session)
            table.enter_order(session)
            table.resident.leave(session.session_id)
            manager.events(Turn(session.session_id, session.tokens, self.blocks, 0.0, 0, 0))
            facts = (self.blocks, 0, session.tokens, self.blocks * BLOCK_NBYTES, self.blocks, nbytes, nbytes, 0)
            manager.events(Evicted(session.session_id, *facts, self.now - began, 0.0, False))

    def settle(self) -> None:
        """Advance the time until all sessions are cold."""
        while self.manager.table.states[SessionState.IDLE] or self.driver.has_orders:
            self.now += IDLE_AFTER_S
            self.step(0)
        self._lap()

    def hashes(self, session: int, blocks: int) -> list[bytes]:
        """Return the hashes of a session's first `blocks` blocks."""
        drawn = np.random.default_rng((self._seed, session)).bytes(blocks * HASH_NBYTES)
        return [drawn[at : at + HASH_NBYTES] for at in range(0, len(drawn), HASH_NBYTES)]

    # -- a request ------------------------------------------------------------------------------------

    def _heart(self, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        began = thread_time_ns()
        result = call(*arguments, **named)
        self._spent += thread_time_ns() - began
        return result

    def _lap(self) -> int:
        spent, self._spent = self._spent, 0
        return spent

    def _begin(self, session: int, prompt: int, whole: int) -> Running:
        """Return a new request whose prompt of `prompt` full blocks has KV. whole: blocks of prompt and answer."""
        driver, pool, heart = self.driver, self.pool, self._heart
        hashes, request_id = self.hashes(session, whole), f"request-{next(self._ids)}"
        asked, tokens, usable = hashes[:prompt], prompt * BLOCK_TOKENS + 1, prompt
        name = f"session-{session}"
        started = heart(self.manager.request_started, request_id, asked, name, self.now, tokens=tokens, tail=b"1")
        heart(driver.started, started, prompt + 1)
        hits = pool.hit(asked)
        cold = heart(driver.matched, request_id, len(hits), usable, prompt + 1, self.now)
        pool.hold(hits)
        blocks = hits + pool.take(prompt - len(hits))
        heart(driver.hits, request_id, [hits])
        heart(driver.admitted, request_id, len(hits), usable, prompt)
        found = len(hits) + cold
        if cold:
            heart(driver.loading, request_id, len(hits), found, blocks[len(hits) : found])
            results = [TransferResult(job.job_id, np.zeros(len(job), np.int64)) for job in driver.loads_of(request_id)]
            heart(driver.answered, results, self.now)
            heart(driver.admitted, request_id, found, usable, prompt)
        heart(driver.computed, request_id, blocks[len(hits) :])
        pool.cache_all(blocks[len(hits) :], hashes[len(hits) : prompt])
        return Running(request_id, session, hashes, prompt, blocks, prompt, 0)

    def _answer(self, request: Running, blocks: int) -> None:
        """Compute the request's answer until the request has `blocks` blocks."""
        new = self.pool.take(blocks - request.computed)
        self._heart(self.driver.computed, request.request_id, new)
        self.pool.cache_all(new, request.hashes[request.computed : blocks])
        request.blocks += new
        request.computed = blocks

    def _finish(self, request: Running) -> None:
        hashes = request.hashes[: request.computed]
        tokens = request.computed * BLOCK_TOKENS + 1
        self._heart(self.driver.finished, request.request_id, hashes, self.now, tokens)
        self.pool.free(request.blocks[::-1])

    # -- a step ---------------------------------------------------------------------------------------

    def step(self, taken: int) -> None:
        """Make a step's calls: answer the previous step's stores, and begin new ones. taken: as in `Driver.step`."""
        driver, job_ids = self.driver, [job.job_id for job in self._sent]
        results = [TransferResult(job.job_id, np.full(len(job), COLD_NBYTES, np.int64)) for job in self._sent]
        began = thread_time_ns()
        if results:
            driver.gathered(job_ids)
            driver.answered(results, self.now)
        if driver.wanted(self.now):
            for request in self._running:
                driver.cached(request.request_id, request.computed)
        work = driver.step(taken, self.now)
        _ = driver.next_deadline, driver.has_work
        self._spent += thread_time_ns() - began
        self._sent = work.stores

    def serve(self, steps: int, running: int, is_full: bool = True) -> Times:
        """Ask random sessions again, `running` at a time. Return times of each step and of each request that ended.

        A prompt is the session and one more block. The answer has ANSWER_BLOCKS blocks, one for each BLOCK_TOKENS
        steps. is_full: True for a full tier, as after a long run: each new block needs the room of a dropped one.
        """
        self.manager.budget_nbytes = self.manager.blocks.taken_nbytes if is_full else ENOUGH
        times, slots = Times([], []), self._running
        spent: dict[str, int] = {}
        self._lap()
        for at in range(steps):
            self.now += STEP_S
            while len(slots) < running:
                request = self._return(slots)
                request.left = ANSWER_BLOCKS * BLOCK_TOKENS * (len(slots) + 1) // running if at == 0 else request.left
                spent[request.request_id] = self._lap()
                slots.append(request)
            self._lap()
            for request in slots:
                request.left -= 1
                if request.left % BLOCK_TOKENS == 0:
                    self._answer(request, request.computed + 1)
            self.step(running)
            times.steps.append(self._lap())
            for request in [each for each in slots if not each.left]:
                slots.remove(request)
                self._finish(request)
                self._lengths[request.session] = request.computed
                times.requests.append(spent.pop(request.request_id) + self._lap())
        for request in slots:
            self._finish(request)
            self._lengths[request.session] = request.computed
        slots.clear()
        self.manager.budget_nbytes = ENOUGH
        self.settle()
        return times

    def _return(self, slots: Sequence[Running]) -> Running:
        busy = {each.session for each in slots}
        session = next(n for n in iter(lambda: self._chance.randrange(self.sessions), -1) if n not in busy)
        known = self._lengths.get(session, self.blocks)
        request = self._begin(session, known + 1, known + 1 + ANSWER_BLOCKS)
        request.left = ANSWER_BLOCKS * BLOCK_TOKENS
        return request
