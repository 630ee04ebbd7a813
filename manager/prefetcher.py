"""Sessions that are expected are restored before their request: room, blocks, loads, and the pool's prefix cache."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice, takewhile
from operator import itemgetter
from typing import Generic, NamedTuple

import numpy as np

from manthan.manager.observer import Observer, Restored
from manthan.manager.pool import B, Pool
from manthan.manager.sessions.manager import SessionMemoryManager
from manthan.manager.sessions.marks import Owner
from manthan.manager.sessions.pressure import Runway
from manthan.manager.sessions.session import BlockName, Prefetch
from manthan.manager.transfer import Answers, Transfer, TransferResult
from manthan.manager.work import RESET, STORE_DOWN, Name

RETRY_S = 0.1
"""How soon room is looked for again where there was none: every look walks the free queue."""


@dataclass
class UnderWay(Generic[B]):
    """A prefetch: the session, a block for each of its chain's keys and of its anchor, and which of them are being
    loaded.

    beside: of the anchor, by group and key. All blocks are referenced, those that were hot as well. is_stale: the KV is
    void since it began.
    """

    session: Prefetch
    blocks: dict[bytes, B]
    beside: dict[Name, B]
    loads: Answers
    loading: frozenset[Name]
    is_stale: bool = False


class Ready(NamedTuple):
    """A session that was prefetched and that no request has used since."""

    session_id: str
    chain: Sequence[bytes]


class Prefetcher(Generic[B]):
    """One session at a time, so that whoever comes meanwhile waits for no other's.

    ranks: how many answer each load. blocks: of the pool; `spare` of them are left to requests whatever comes. job_ids:
    the driver's, each is taken once.
    """

    def __init__(
        self,
        manager: SessionMemoryManager,
        pool: Pool[B],
        runway: Runway,
        ranks: int,
        blocks: int,
        spare: int,
        observer: Observer,
        job_ids: Iterator[int],
    ) -> None:
        self._manager, self._pool, self._runway, self._observer = manager, pool, runway, observer
        self._ranks, self._spare, self._most = ranks, spare, blocks - spare
        self._group = manager.shape.main_group
        self._under_way: UnderWay[B] | None = None
        self._job_ids = job_ids
        self._waiting: dict[str, int] = {}  # by request id, the blocks that it will take
        self._ready: dict[bytes, Ready] = {}  # by the first key that was loaded
        self._look_after = 0.0
        self._must_look = False
        self._was_settled = False

    # -- requests -------------------------------------------------------------------------------------

    def waits(self, request_id: str, blocks: int) -> None:
        """A request is waiting for so many blocks."""
        self._waiting[request_id] = blocks

    def admitted(self, request_id: str, keys: Sequence[bytes], hot: int, usable: int) -> None:
        """A request got its blocks, of which so many were hot; `usable` could have been."""
        self.forget(request_id)
        first = next((key for key in reversed(keys[:hot]) if key in self._ready), None) if self._ready else None
        if first is None:
            return
        pairs = zip(self._ready.pop(first).chain, keys, strict=False)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if hot >= min(common, usable):
            self._observer.prefetch_hit()

    def forget(self, request_id: str) -> None:
        """A request waits no longer."""
        self._waiting.pop(request_id, None)

    @property
    def first_waiting(self) -> int:
        """How many blocks the request takes that waits for longest; 0 if none waits."""
        return next(iter(self._waiting.values()), 0)

    def is_loading(self, key: bytes) -> bool:
        """Whether a session with this block, which is not to be had hot, will be so in a moment: a request that needs
        it should not restore it as well."""
        under_way = self._under_way
        return under_way is not None and not under_way.is_stale and key in under_way.blocks

    # -- a step ---------------------------------------------------------------------------------------

    def step(self, now: float) -> Sequence[Transfer]:
        """What the workers are to load, if a session is due and there is room that nobody would miss."""
        if self._under_way is not None:
            return []
        self._was_settled = False
        if now < self._look_after:
            self._must_look = True
            return []
        self._must_look = False
        wanted = self._manager.prefetch_blocks(now, self._most)
        if not wanted:
            return []
        session = self._manager.take_prefetch(self._room(wanted), now)
        if session is None:
            self._look_after = now + RETRY_S
            return []
        self._under_way = self._begin(session)
        jobs = self._under_way.loads.jobs
        if not jobs:
            self._settle(self._under_way, now)
        return jobs

    def answered(self, result: TransferResult, now: float) -> None:
        """A rank is done with a job of the load under way."""
        under_way = self._under_way
        assert under_way is not None
        if under_way.loads.add(result):
            self._settle(under_way, now)

    def reset(self) -> None:
        """The KV is void. What is being loaded is not entered into the prefix cache."""
        self._ready.clear()
        if self._under_way is not None:
            self._under_way.is_stale = True

    def abandon(self) -> list[B]:
        """Forget the load under way. Return its blocks."""
        ended, self._under_way = self._under_way, None
        return [] if ended is None else [*ended.beside.values(), *ended.blocks.values()]

    def drain(self, result: TransferResult) -> list[B]:
        """Forget the load under way once all ranks have answered, and return its blocks."""
        loads = None if self._under_way is None else self._under_way.loads
        if loads is None or all(job.job_id != result.job_id for job in loads.jobs):
            return []
        return self.abandon() if loads.add(result) else []

    @property
    def is_busy(self) -> bool:
        """Whether an answer is outstanding, with which blocks come free."""
        return self._under_way is not None

    @property
    def has_work(self) -> bool:
        """Whether an answer is outstanding, or one came since the last look: the next session's turn may have come."""
        return self._under_way is not None or self._was_settled

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
        wanted = min(wanted, len(self._pool) - left)
        if wanted <= 0:
            return 0
        ahead = islice(self._pool.names(), left + wanted)
        is_missed = self._manager.is_missed
        return max(0, sum(1 for _ in takewhile(lambda name: name is None or not is_missed(name), ahead)) - left)

    def _begin(self, session: Prefetch) -> UnderWay[B]:
        """Hold what of the session is hot, and take blocks for the rest."""
        own = self._group
        names: list[Name] = [*((own, key) for key in session.keys), *((group, key) for group, key, _ in session.beside)]
        blocks = {name: block for name in names if (block := self._pool.hold(self._name(name))) is not None}
        missing = [name for name in names if name not in blocks]
        blocks |= zip(missing, self._pool.take(len(missing)), strict=True)
        self._runway.taken(len(names))
        jobs = []
        for group, some in groupby(missing, itemgetter(0)):
            keys = [key for _, key in some]
            ids = np.array(self._pool.block_ids([blocks[group, key] for key in keys]), np.int32)
            jobs.append(Transfer(next(self._job_ids), "load", group, keys, ids, tenant=session.tenant))
        chain = {key: blocks[own, key] for key in session.keys}
        beside = {(group, key): blocks[group, key] for group, key, _ in session.beside}
        return UnderWay(session, chain, beside, Answers(jobs, self._ranks), frozenset(missing))

    def _name(self, name: Name) -> BlockName:
        """Return the pool's name of a block."""
        return name[1] if name[0] == self._group else name

    def _settle(self, ended: UnderWay[B], now: float) -> None:
        """Every rank has answered: what is good becomes hot, and all blocks are the pool's again."""
        failed = ended.loads.failed
        if not ended.is_stale:
            self._enter(ended, failed)
        held, self._was_settled = self.abandon(), True
        self._pool.give_back(list(reversed(held)))  # tails are overwritten first
        if ended.is_stale:
            return
        self._pool.keep([*reversed(ended.blocks)])
        session_id, own = ended.session.session_id, self._group
        bad = [name for name, cause in failed.items() if cause not in (STORE_DOWN, RESET)]
        in_chain, beside = [key for group, key in bad if group == own], [name for name in bad if name[0] != own]
        self._manager.prefetch_finished(session_id, not failed, in_chain, now, beside)
        names = [(job.group, key) for job in ended.loads.jobs for key in job.block_hashes]
        if names and not failed:
            first = next((key for group, key in names if group == own), ended.session.keys[-1])
            self._ready = self._still_hot() | {first: Ready(session_id, ended.session.keys)}
        self._observer.restored(Restored.of(session_id, self._manager.shape, ended.loads))

    def _enter(self, ended: UnderWay[B], failed: Collection[Name]) -> None:
        """Enter what was loaded into the prefix cache, up to the first that failed or that nobody wants any more, and
        the anchor if nothing failed: what follows a failure may not have been loaded.

        vLLM does the same with a block that it has computed. Where somebody else has computed one meanwhile, the chain
        goes on with that one, and ours is not entered beside it.
        """
        own, owner = self._group, self._manager.session_owner(ended.session.session_id)
        for depth, (key, block) in enumerate(ended.blocks.items()):
            if (own, key) in failed or not self._manager.is_used(key):
                return
            if (own, key) in ended.loading:
                ended.blocks[key] = self._entered((own, key), block, depth, owner)
        for group, key, depth in ended.session.beside if not failed else ():
            name = group, key
            if name in ended.loading:
                ended.beside[name] = self._entered(name, ended.beside[name], depth, owner)

    def _entered(self, name: Name, block: B, depth: int, owner: Owner | None) -> B:
        """The block that holds this now; it is referenced."""
        if (other := self._pool.hold(self._name(name))) is not None:
            self._pool.give_back([block])
            return other
        group, key = name
        [mark] = self._manager.stored_marks([key], None if group == self._group else group)
        self._pool.marks.set(self._pool.block_ids([block]), mark, owner)
        self._pool.cache(block, key, depth, None if group == self._group else group)
        return block

    # -- what came of it ------------------------------------------------------------------------------

    def _still_hot(self) -> dict[bytes, Ready]:
        """What was prefetched, but for sessions that have gone cold again."""
        return {key: ready for key, ready in self._ready.items() if self._manager.is_hot(ready.session_id)}
