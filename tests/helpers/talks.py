"""A small engine without vLLM, to try the manager and the driver by example.

A word is a block: "sys a b" is a prompt of three full blocks, and two texts share the blocks of their common beginning.
Time stands still unless a test moves `now`. Transfers end at once, unless results are held.

    talks = Talks(capacity=4)
    talks.talk("sys a b c", "alice")  # asks "sys a b", and "c" is the answer
    talks.rest()  # it is idle for long enough, and is saved
    assert talks.states() == {"alice": "cold"}
    talks.overwrite()  # the pool has lost everything
    request = talks.start("sys a b c d", "alice")
    assert talks.running[request].loaded == 4
    talks.finish(request, "sys a b c d e")
    assert talks.texts() == {"alice": "sys a b c d e"}
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from itertools import count
from typing import Any, TypeVar

import numpy as np

from manthan.benchmarks.simulator.pool import SimulatedPool
from manthan.manager.driver import Driver, Work
from manthan.manager.events import BlocksDropped, BlocksTrimmed, DropCause, Event, Events
from manthan.manager.pool import BlockName
from manthan.manager.session.blocks import NO_GROUP, SAVED, GroupShape, MemoryShape
from manthan.manager.session.hints import parse_hints
from manthan.manager.session.manager import Outcome, PointParts, SessionManager
from manthan.manager.session.table import Session
from manthan.manager.transfer import Transfer, TransferResult
from manthan.policies import EvictionPolicy, get_policy

IDLE_AFTER_S = 10.0
HASH_NBYTES = 64
GROUP = GroupShape(tokens=16, pool_nbytes=500, bounds={0: 100, 4: 150, 16: 500})
SHAPE = MemoryShape({0: GROUP})
MOST_STEPS = 10_000
"""A driver that finds something to do for longer than this never comes to rest."""

AnyEvent = TypeVar("AnyEvent", bound=Event)
_TEXTS: dict[bytes, str] = {}
"""By block hash."""


def name(text: str) -> bytes:
    """Return the block hash of a text's last word. It covers all words before, and shows them if they are few."""
    words = " ".join(text.split())
    block_hash = words.encode().ljust(HASH_NBYTES, b"_")
    if len(block_hash) > HASH_NBYTES:
        block_hash = sha256(block_hash).hexdigest().encode()
    _TEXTS[block_hash] = words
    return block_hash


def names(text: str) -> list[bytes]:
    """Return the block hashes of a text."""
    words = text.split()
    return [name(" ".join(words[: at + 1])) for at in range(len(words))]


def text_of(block_hash: bytes) -> str:
    """Return the text that a block hash covers."""
    return _TEXTS[block_hash]


def long_text(stem: str, words: int) -> str:
    """Return a text of this number of words, which are the stem with a number."""
    return " ".join(f"{stem}{number}" for number in range(words))


def last_words(block_hashes: Iterable[bytes]) -> str:
    """Return the last word of each block hash, in their order."""
    return " ".join(text_of(block_hash).rpartition(" ")[2] for block_hash in block_hashes)


@dataclass
class Running:
    """A request, and what became of it.

    block_ids: its blocks of the pool. beside: block ids of other KV cache groups, by name. resident, loaded: number of
    its blocks that were found in the pool, and that were or are being loaded; None while it waits.
    """

    hashes: Sequence[bytes]
    tokens: int
    block_ids: list[int] = field(default_factory=list)
    beside: dict[BlockName, int] = field(default_factory=dict)
    resident: int | None = None
    loaded: int | None = None
    is_loading: bool = False


class Talks:
    """A manager, a driver and a pool, and requests that come, are served, and end.

    Args:
        capacity: number of compressed blocks that the tiers have room for. They have 99 bytes more.
        blocks: number of blocks in the pool.
        ranks, low, high, again: as the driver has them. Without watermarks, memory is never short.
        holds: True if transfers end only when `answer` is called.
        pool: to be used instead of a new one.
        driver: more arguments of the driver.
        manager: more arguments of the manager.
    """

    def __init__(
        self,
        capacity: float = 100,
        *,
        blocks: int = 200,
        policy: str | type[EvictionPolicy] = "lru",
        shape: MemoryShape = SHAPE,
        idle_after_s: float = IDLE_AFTER_S,
        ranks: int = 1,
        low: float = 0.0,
        high: float = 0.0,
        again: int = 0,
        holds: bool = False,
        pool: SimulatedPool | None = None,
        driver: Mapping[str, Any] = {},
        **manager: Any,
    ) -> None:
        self.seen: list[Event] = []
        events = Events()
        events.subscribe(self.seen.append)
        nbytes = int(capacity * shape.groups[shape.main].cold_nbytes) + 99
        kind = get_policy(policy) if isinstance(policy, str) else policy
        self.manager = SessionManager(kind, shape, nbytes, idle_after_s, events, **manager)
        self.pool = pool or SimulatedPool(blocks)
        self.ranks, self.again, self.holds = ranks, again, holds
        options = {"bursts": (0.0, 0.0)} | dict(driver)
        self.driver = Driver(self.manager, self.pool, ranks=ranks, low=low, high=high, again=again, **options)
        self.now = 0.0
        self.running: dict[str, Running] = {}
        self.tier: dict[BlockName, int] = {}
        """Bytes of each block that the tier has. What a test removes from it is missing when it is loaded."""
        self.jobs: dict[int, Transfer] = {}
        """Jobs under way, by id."""
        self.nbytes: int | None = None
        """Bytes that every compressed block takes; None for its bound."""
        self.parts: Sequence[int] = ()
        """Bytes that a compressed block without exact tokens takes with one part, two, and so on; () for one part."""
        self.refuses: Callable[[BlockName], str] = lambda block: ""
        """Cause for which a block is not stored; empty if it is."""
        self._ids = count(1)

    # -- requests -------------------------------------------------------------------------------------

    def ask(self, prompt: str, who: str | None = None, tenant: str = "", request_id: str = "", **hints: Any) -> str:
        """Have a request come, and return its id. It waits until it is served."""
        request_id = request_id or f"r{next(self._ids)}"
        hashes, tokens = names(prompt), self.tokens(prompt)
        request = self.manager.request_started(
            request_id, hashes, who, self.now, tokens=tokens, hints=parse_hints(hints), tenant=tenant
        )
        self.driver.started(request, len(hashes))
        self.running[request_id] = Running(hashes, tokens)
        return request_id

    def serve(self, request_id: str, is_again: bool = False) -> bool:
        """Let a request that waits find, load and compute its prompt. Return False if it must go on waiting.

        is_again: after a preemption.
        """
        one = self.running[request_id]
        usable = self.driver.usable(one.tokens)
        group = self.manager.shape.main
        hits = self.pool.hit(
            one.hashes[:usable], partial(self.pool.marks.serves, asker=self.driver.asker(request_id)), group
        )
        while hits and not self._resumes(one.hashes[len(hits) - 1]):
            hits.pop()
        hits = hits[: max(0, len(hits) - self.again)]
        loaded = self.driver.matched(request_id, len(hits), usable, len(one.hashes), self.now)
        free = len(self.pool) - sum(not self.pool.users(block) for block in hits)
        if loaded is None or len(one.hashes) - len(hits) > free:
            return False
        one.resident, one.loaded = len(hits), loaded
        self.pool.hold(hits)
        self.driver.hits(request_id, [hits])
        one.block_ids = hits
        more = len(one.hashes) - len(hits)
        self.driver.admitted(request_id, len(hits), usable, len(one.hashes), is_again=is_again)
        one.block_ids = hits + self.pool.take(more)
        if loaded:
            end = len(hits) + loaded
            one.beside = {block: self.pool.take(1)[0] for block in self._point(one.hashes[end + self.again - 1])}
            beside = [(number, [block_hash], [at]) for (number, block_hash), at in one.beside.items()]
            self.driver.loading(request_id, len(hits), end + self.again, one.block_ids[len(hits) : end], beside)
            one.is_loading = True
            if not self.holds:
                self.answer(self.driver.loads_of(request_id))
        else:
            self._compute(request_id, one, len(hits))
        return True

    def start(self, prompt: str, who: str | None = None, tenant: str = "", **hints: Any) -> str:
        """Have a request come and be served at once, and return its id."""
        request_id = self.ask(prompt, who, tenant, **hints)
        assert self.serve(request_id), f"{prompt!r} must wait"
        return request_id

    def finish(self, request_id: str, text: str | None = None, points: Sequence[PointParts] = ()) -> Outcome | None:
        """End a request.

        Args:
            text: prompt and answer; None for no answer.
            points: resume points that the pool has.
        """
        one = self.running.pop(request_id)
        hashes = one.hashes if text is None else names(text)
        before = len(one.block_ids)
        if more := max(0, len(hashes) - before) if one.resident is not None else 0:
            self.driver.runway.taken(more)
            one.block_ids += self.pool.take(more)
            self._enter(request_id, one.block_ids[before:], hashes[before:])
        tokens = 16 * len(hashes) + 1
        outcome = self.driver.finished(request_id, hashes, self.now, tokens, points)
        self.pool.free([*one.beside.values(), *one.block_ids[::-1]])
        return outcome

    def talk(self, text: str, who: str | None = None, tenant: str = "", **hints: Any) -> Outcome:
        """Have a request ask all words of a text but the last, which is the answer."""
        outcome = self.finish(self.start(text.rpartition(" ")[0], who, tenant, **hints), text)
        assert outcome is not None
        return outcome

    def tokens(self, prompt: str) -> int:
        """Return the number of a prompt's tokens: one more than those of its words."""
        return self.manager.shape.block_tokens * len(prompt.split()) + 1

    def _point(self, block_hash: bytes) -> list[BlockName]:
        """Return the blocks of other groups at the resume point behind a block."""
        blocks = self.manager.blocks
        row = blocks.row(self.manager.shape.session_group, block_hash)
        point = self.manager.points.at.get(row)
        return [] if point is None else [blocks.name(part) for part in point.rows.tolist()]

    def _resumes(self, block_hash: bytes) -> bool:
        """True if the pool has all that a request needs to go on behind a block."""
        needed = self._point(block_hash)
        is_there = all(self.pool.lookup(group, [part])[0] >= 0 for group, part in needed)
        return not self.manager.points.is_needed or (bool(needed) and is_there)

    def _compute(self, request_id: str, one: Running, found: int) -> None:
        self._enter(request_id, one.block_ids[found:], one.hashes[found:])
        self.driver.cached(request_id, len(one.hashes))

    def _enter(self, request_id: str, block_ids: Sequence[int], hashes: Sequence[bytes]) -> None:
        self.driver.computed(request_id, block_ids)
        self.pool.cache_all(block_ids, hashes, self.manager.shape.main)

    # -- steps and results ----------------------------------------------------------------------------

    def step(self, taken: int = 0) -> Work:
        """Take one step, and answer its transfers unless results are held."""
        work = self.driver.step(taken, self.now)
        self.driver.sent()
        for drop in work.drops:
            for block_hash in drop.block_hashes:
                if isinstance(drop, BlocksTrimmed):
                    self.tier[drop.group, block_hash] = self.parts[drop.level]
                else:
                    self.tier.pop((drop.group, block_hash), None)
        known = {job.job_id for job in self.jobs.values()}
        loads = [job for job in work.loads if job.request_id is None or self.driver.loads_of(job.request_id)]
        self.jobs.update((job.job_id, job) for job in (*work.stores, *loads) if job.job_id not in known)
        if not self.holds:
            self.gathered(work.stores)
            self.answer()
        return work

    def gathered(self, stores: Iterable[Transfer] | None = None) -> None:
        """Let all ranks gather the blocks of stores, or of all that are under way."""
        jobs = self.jobs.values() if stores is None else stores
        ids = [job.job_id for job in jobs if job.direction == "store"]
        for _ in range(self.ranks):
            self.driver.gathered(ids)

    def answer(self, jobs: Iterable[Transfer] | None = None, failed: Mapping[int, str] = {}) -> None:
        """End jobs, or all that are under way.

        Args:
            failed: by index in each job, the cause for which a block fails.
        """
        for job in list(self.jobs.values() if jobs is None else jobs):
            self.jobs.pop(job.job_id, None)
            self.driver.answered([self._result(job, dict(failed), rank) for rank in range(self.ranks)], self.now)
        for request_id, one in self.running.items():
            if one.is_loading and not self.driver.loads_of(request_id):
                one.is_loading = False
                found = self.driver.found(request_id) // self.manager.shape.block_tokens
                self._enter(request_id, one.block_ids[:found][one.resident :], one.hashes[:found][one.resident :])
                if found > (one.resident or 0):
                    for (group, block_hash), at in one.beside.items():
                        self.pool.cache(at, group, block_hash)
                self._compute(request_id, one, found)

    def _result(self, job: Transfer, failed: dict[int, str], rank: int) -> TransferResult:
        """Result of a job on a rank. The ranks share the bytes of a block."""
        group = self.manager.shape.groups[job.group]
        sizes, inner = [0] * len(job), dict[int, list[int]]()
        for at, (block_hash, exact) in enumerate(zip(job.block_hashes, job.exacts(group.tokens), strict=True)):
            block = job.group, block_hash
            if job.direction == "load":
                if block not in self.tier:
                    failed.setdefault(at, "missing")
                nbytes = self.tier.get(block, 0)
            else:
                if cause := self.refuses(block):
                    failed.setdefault(at, cause)
                nbytes = group.bounds[exact] if self.nbytes is None else self.nbytes
                if self.parts and not exact:
                    *fewer, nbytes = self.parts
                    inner[at] = [size // self.ranks for size in fewer]
                if at not in failed:
                    self.tier[block] = nbytes
            if at not in failed:
                sizes[at] = nbytes // self.ranks + (rank < nbytes % self.ranks)
        return TransferResult(job.job_id, np.array(sizes, np.int64), failed, inner=inner)

    def save(self) -> list[bytes]:
        """Take steps until nothing is left to do, and return the block hashes that were stored, in their order."""
        stored: list[bytes] = []
        for _ in range(MOST_STEPS):
            work = self.step()
            stored += [block_hash for job in work.stores for block_hash in job.block_hashes]
            if not work.stores and not self.driver.has_orders:
                return stored
        raise AssertionError("there is always something left to do")

    def rest(self, seconds: float | None = None) -> list[bytes]:
        """Let time pass, and save what is due then.

        Args:
            seconds: that pass; None for the time after which idle sessions are saved.
        """
        self.now += self.manager.idle_after_s if seconds is None else seconds
        return self.save()

    def go_cold(self, *texts: str, **hints: Any) -> None:
        """Have sessions that are called as their texts. Each is saved before the next one comes."""
        for text in texts:
            self.talk(text, text, **hints)
            self.rest()

    def overwrite(self, blocks: int | None = None) -> None:
        """Overwrite this number of free blocks of the pool, or all."""
        taken = self.pool.take(len(self.pool) if blocks is None else blocks)
        self.driver.runway.taken(len(taken))
        self.pool.free(taken[::-1])

    def point(self, text: str, groups: Mapping[int, int]) -> PointParts:
        """Have the pool hold what other KV cache groups need behind a text, and return it as a resume point.

        Args:
            groups: by KV cache group, the number of last blocks that it needs.
        """
        hashes = names(text)
        parts = [(group, hashes[at], at) for group, most in groups.items() for at in range(len(hashes))[-most:]]
        for group, block_hash, at in parts:
            [block] = self.pool.take(1)
            self.pool.cache(block, group, block_hash, at)
            self.pool.free([block])
        self.driver.runway.taken(len(parts))
        return PointParts(len(hashes), parts)

    # -- what there is --------------------------------------------------------------------------------

    def session(self, session_id: str) -> Session:
        """Return a session with KV or a request."""
        return self.manager.table.by_id[session_id]

    def text(self, session: Session) -> str:
        """Return the text whose blocks a session has."""
        return text_of(self.manager.blocks.hashes(session.rows[-1:])[0]) if len(session.rows) else ""

    def texts(self) -> dict[str, str]:
        """Return the text of each session, by session id."""
        return {session.session_id: self.text(session) for session in self.manager.table.by_id.values()}

    def states(self) -> dict[str, str]:
        """Return the state of each session, by session id."""
        return {session.session_id: session.state.value for session in self.manager.table.by_id.values()}

    def saved(self, group: int | None = None) -> set[str]:
        """Return the texts of all blocks of a group that are saved. None stands for the sessions' group."""
        blocks, rows = self.manager.blocks, self.manager.blocks.rows()
        wanted = self.manager.shape.session_group if group is None else group
        rows = rows[(blocks.group[rows] == wanted) & (blocks.status[rows] & SAVED > 0)]
        return set(map(text_of, blocks.hashes(rows))) if wanted != NO_GROUP and len(rows) else set()

    def dropped(self) -> list[tuple[str, DropCause]]:
        """Return the last words of the blocks that were dropped together, and the cause, in their order."""
        return [(last_words(event.block_hashes), event.cause) for event in self.told(BlocksDropped)]

    def resident(self, text: str) -> int:
        """Return how many of a text's blocks, from the first on, are in the prefix cache."""
        return len(self.pool.hit(names(text), group=self.manager.shape.main))

    def told(self, kind: type[AnyEvent]) -> list[AnyEvent]:
        """Return the events of this kind so far."""
        return [event for event in self.seen if isinstance(event, kind)]
