"""The serving loop: requests and answers in, orders out. It drives the manager over a KV pool, real or simulated.

    request comes      started -> wanted (how much can be restored?) -> admitted -> restoring -> ... -> finished
    each step          step: sweep, relieve, drop, release, hold blocks to be encoded, prefetch
    each report        gathered, then answered: ids of jobs, and results, once for each rank

Like the manager it waits for nobody, and reads no clock.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, filterfalse
from typing import TYPE_CHECKING, Generic

import numpy as np

from manthan.manager.guard import Guard
from manthan.manager.observer import Observer, Restored
from manthan.manager.pool import B, Pool
from manthan.manager.prefetcher import Prefetcher
from manthan.manager.sessions.deadlines import earliest
from manthan.manager.sessions.hints import NO_HINTS, Hints
from manthan.manager.sessions.manager import SessionMemoryManager, SpillRun
from manthan.manager.sessions.marks import Mark, Owner
from manthan.manager.sessions.pressure import HIGH_WATERMARK, LOW_WATERMARK, Pressure
from manthan.manager.sessions.session import BlockName, Drop, Outcome, Place
from manthan.manager.tiers.tier import STORE_FULL
from manthan.manager.transfer import JOB_BLOCKS, Answers, Transfer, TransferResult
from manthan.manager.work import NEEDED, RESET, STORE_DOWN, Verdict, Weigh

if TYPE_CHECKING:
    from manthan.manager.journal_link import JournalLink
    from manthan.manager.redis_link import RedisLink


A_STEP = 512
"""So many blocks are begun to be encoded in a step, at most, and as many released: a session of a million tokens has
62,500, and others wait for a step's end. It is about what a GPU encodes while a step is computed."""


@dataclass
class Restore:
    """A restore under way: which session, and what the ranks have answered."""

    session_id: str
    loads: Answers


@dataclass
class Store(Generic[B]):
    """A store under way. blocks: of the pool, the first first, referenced until all ranks have gathered them.

    gathered: number of ranks that have.
    """

    job: Transfer
    answers: Answers
    blocks: list[B]
    gathered: int = 0


@dataclass
class Work:
    """What is to be done now, in this order."""

    drops: Sequence[Drop]
    stores: Sequence[Transfer]
    loads: Sequence[Transfer]
    lost: int = 0
    """Blocks that were to be encoded and were not in the pool any more."""
    revokes: bool = False
    """True if blocks of earlier `stores` that nobody reads yet are to be given back."""


NOTHING = Work((), (), ())


class Driver(Generic[B]):
    """One engine's loop.

    ranks: how many answer each spill and each load. low, high: watermarks of the pool, as shares of its `blocks`.
    redis: finds what other engines have stored, and tells them; None without Redis. journal: of a cold store that
    outlives the engine, writes down what the next engine is to know.
    guard: chooses the codec by what ranks measure; None to use the configured one.
    again: how many blocks at the end of those that are found, hot and cold together, the engine computes nevertheless;
    an anchor behind them is what it needs to go on before them. last_tokens: how many of a prompt's tokens it computes
    although all are found.
    weigh: what a block takes of the budget, from what it takes on each rank; see `manthan.manager.work.on_each`.
    """

    def __init__(
        self,
        manager: SessionMemoryManager,
        pool: Pool[B],
        blocks: int,
        low: float = LOW_WATERMARK,
        high: float = HIGH_WATERMARK,
        ranks: int = 1,
        observer: Observer | None = None,
        redis: "RedisLink | None" = None,
        journal: "JournalLink | None" = None,
        guard: Guard | None = None,
        again: int = 0,
        last_tokens: int = 1,
        weigh: Weigh = sum,
    ) -> None:
        self._again, self._last_tokens, self._journal, self._weigh = again, last_tokens, journal, weigh
        self.manager, self._pool, self._ranks, self._redis = manager, pool, ranks, redis
        self._guard = guard
        manager.mark = pool.mark
        self._lossy: dict[str, int] = {}
        """By request id, cached tokens of its prompt that were decoded, or computed behind such."""
        self._exact = defaultdict[str, set[int]](set)
        """By request id, blocks that were loaded for it and are exact, wherever decoded ones are."""
        self._observer = Observer() if observer is None else observer
        self._job_ids = count()
        self.pressure = Pressure(manager, pool, blocks, low=low, high=high)
        self.prefetcher: Prefetcher[B] = Prefetcher(
            manager, pool, self.pressure.runway, ranks, blocks, self.pressure.low, self._observer, self._job_ids
        )
        self._group, self._main_group = manager.shape.group, manager.shape.main_group
        self._session_of: dict[str, str] = {}  # by request id
        self._found: dict[str, int] = {}  # by request id, blocks of its prompt that were hot or restored
        self._stores: dict[int, Store[B]] = {}  # by job id
        self._taken = self._lost = 0  # blocks that the last step's requests took at most; blocks that were gone
        self._granted: list[Transfer] = []
        self._done: list[B] = []  # to be given back, all at once
        self._restores: dict[str, Restore] = {}  # by request id
        self._requests: dict[int, str] = {}  # that a load is for, by job id
        self._loads: list[Transfer] = []
        self._ordered = NOTHING
        """What the last step ordered, until the workers are told."""
        self._was_answered = False
        self._unserved: set[str] = set()  # requests for which a store did not answer: they do not ask again
        self.rests = False
        """Whether nothing new is begun, neither an encoding nor a prefetch."""

    # -- requests -------------------------------------------------------------------------------------

    def started(
        self,
        request_id: str,
        keys: Sequence[bytes],
        asked_id: str | None,
        now: float,
        *,
        tokens: int,
        blocks: int,
        hints: Hints = NO_HINTS,
        tenant: str = "",
        tail: bytes | None = None,
    ) -> None:
        """A request came, with a prompt of so many tokens; it will take so many blocks.

        tail: the prompt's tokens behind its full blocks.
        """
        self._session_of[request_id] = self.manager.request_started(
            request_id, keys, asked_id, now, tokens=tokens, hints=hints, tenant=tenant, tail=tail
        )
        self.prefetcher.waits(request_id, blocks)
        if self._redis is not None:
            self._redis.look_up(request_id, self._session_of[request_id], keys[: self.usable(tokens)], now)

    def usable(self, tokens: int) -> int:
        """How many blocks of a prompt may be found, here or elsewhere."""
        return (tokens - self._last_tokens) // self.manager.shape.block_tokens

    def wanted(self, request_id: str, keys: Sequence[bytes], hot: int, blocks: int, now: float) -> int | None:
        """How many blocks behind its hot ones can be restored for a request; None for ask again in a moment.

        keys: of those that may come from elsewhere. hot: how many the engine takes from the pool. blocks: what the
        request needs in all.
        """
        self.hear()
        self.prefetcher.waits(request_id, blocks)
        if request_id in self._restores:  # an earlier load for it, before it was preempted, is not settled
            return None
        if self._redis is not None and self._redis.awaits(request_id, now):
            return None
        if request_id in self._unserved:
            return 0
        cold = keys[hot:]
        if cold and self.prefetcher.is_loading(cold[0]):
            return None
        return max(0, self.manager.match(cold, request_id) - self._again)

    def admitted(self, request_id: str, keys: Sequence[bytes], hot: int, usable: int, taken: int) -> None:
        """A request got its blocks, `taken` of them at most out of the queue; `hot` of its keys were there."""
        self.pressure.runway.taken(taken)
        if request_id not in self._found and (lost := self.manager.unsaved(keys[hot:usable])):
            self._observer.overwritten(lost)
        self._found.setdefault(request_id, hot)  # it is admitted again once its restore has ended
        self.prefetcher.admitted(request_id, keys, hot + self._again if hot else 0, usable)

    def hits(self, request_id: str, block_ids: Sequence[Sequence[int]]) -> None:
        """The pool has these blocks of a request's prompt, by KV cache group, and serves them to it."""
        self._exact.pop(request_id, None)
        if lossy := max((len(self._pool.marks.lossy(of_group)) for of_group in block_ids), default=0):
            self._lossy[request_id] = lossy * self.manager.shape.block_tokens
        else:
            self._lossy.pop(request_id, None)

    def computed(self, request_id: str, block_ids: Sequence[int]) -> None:
        """Mark blocks of a request that computes behind decoded ones; those that were loaded keep their marks."""
        if request_id in self._lossy:
            marks = self._pool.marks
            derived = set(block_ids) - marks.lossy(block_ids) - self._exact.get(request_id, set())
            marks.set(derived, Mark.DERIVED, self.manager.owner(request_id))

    def serves(self, request_id: str, block_id: int) -> bool:
        """True if a block of the pool may be served to a request."""
        return self._pool.marks.serves(block_id, self.manager.asker(request_id))

    def restoring(
        self,
        request_id: str,
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        beside: Sequence[tuple[int, Sequence[bytes], Sequence[int]]] = (),
    ) -> None:
        """Codes of these keys, but for the last ones, which are computed again, are to be decoded into these blocks of
        the request; beside: those of other groups, with block hashes and block ids of each."""
        chain = () if self._group is None else ((self._group, keys[: len(block_ids)], block_ids),)
        tenant = self.manager.restore_started(request_id, keys)
        jobs = [
            Transfer(
                next(self._job_ids), "load", group, names, np.array(ids, np.int32), tenant=tenant, request_id=request_id
            )
            for group, names, ids in (*chain, *beside)
        ]
        self._restores[request_id] = Restore(self._session_of.get(request_id, "?"), Answers(jobs, self._ranks))
        self._requests.update((job.job_id, request_id) for job in jobs)
        self._loads += jobs
        for job in jobs:
            self._mark(job, self.manager.owner(request_id), self._exact[request_id])
        if lossy := self._lossy_tokens(jobs):
            self._lossy[request_id] = self._lossy.get(request_id, 0) + lossy

    def _mark(self, job: Transfer, owner: Owner | None, exact: set[int]) -> None:
        """Mark the blocks that a load writes. exact: gets those that are exact."""
        marks = self.manager.stored_marks(job.block_hashes, None if job.group == self._group else job.group)
        for mark in set(marks):
            marked = [block_id for block_id, own in zip(job.block_ids.tolist(), marks, strict=True) if own is mark]
            self._pool.marks.set(marked, mark, owner)
            if mark is Mark.EXACT:
                exact.update(marked)

    def _lossy_tokens(self, jobs: Sequence[Transfer]) -> int:
        """Tokens of lossy blocks among those of a load, of the group that has most of them."""
        lossy = (len(self._pool.marks.lossy(job.block_ids.tolist())) for job in jobs)
        return max(lossy, default=0) * self.manager.shape.block_tokens

    def loads_of(self, request_id: str) -> Sequence[Transfer]:
        """Jobs of what is being restored for a request."""
        restore = self._restores.get(request_id)
        return () if restore is None else restore.loads.jobs

    def found(self, request_id: str) -> int:
        """How many tokens of a request's prompt were hot or restored."""
        return self._found.get(request_id, 0) * self.manager.shape.block_tokens

    def finished(
        self,
        request_id: str,
        keys: Sequence[bytes],
        now: float,
        tokens: int,
        places: Sequence[Place] = (),
    ) -> Outcome | None:
        """A request ended, with KV computed for these blocks; tokens: of prompt and answer.

        places: from where it can be gone on, the end of these blocks first, and what other groups need for that: in the
        pool until the next request takes it, and held at once.
        """
        self._session_of.pop(request_id, None)
        self._unserved.discard(request_id)
        self.prefetcher.forget(request_id)
        if self._redis is not None:
            self._redis.forget(request_id)
        found, lossy = self.found(request_id), self._lossy.pop(request_id, 0)
        self._exact.pop(request_id, None)
        self._found.pop(request_id, None)
        outcome = self.manager.request_finished(
            request_id, keys, now, tokens=tokens, places=places, found=found, lossy=lossy
        )
        self._observer.served_lossy(lossy)
        if places:
            self._hold(now)
        self.tell_news()
        return outcome

    # -- a step ---------------------------------------------------------------------------------------

    def step(self, taken: int, now: float) -> Work:
        """What is to be done now. taken: blocks that the step's requests take out of the queue, at most."""
        self.manager.sweep(now)
        self._taken, self._was_answered = taken, False
        self.pressure.runway.taken(taken)
        self.pressure.relieve(now)
        drops = self.manager.take_drops()
        for drop in drops:
            self._observer.dropped(drop)
            self.pressure.runway.dropped(drop)
            if drop.group == self._main_group:
                self._pool.forget(drop.keys)
        self._release()
        if self._redis is not None:
            self._redis.tell(drops, now)
        if self._journal is not None:
            self._journal.tell(now)
        revokes = self._holding > 0 and self._is_short
        self._hold(now)
        self.manager.settle_tiers()
        self.hear()
        if not self.rests:
            self._loads += self.prefetcher.step(now)
        work = Work(
            drops=drops,
            stores=self._granted,
            loads=self._loads,
            lost=self._lost,
            revokes=revokes,
        )
        self._ordered = work
        self._granted, self._loads, self._lost = [], [], 0
        self.tell_news()
        return work

    def sent(self) -> None:
        """Take note that the workers are told what the last step ordered."""
        self._ordered = NOTHING

    def _hold(self, now: float) -> None:
        """Order blocks to be encoded, no more than can be begun now."""
        if self.rests:
            return
        for run in self.manager.take_spill_runs(self._room):
            for key in self._begin(run):
                self.manager.lost(key, now, run.group)

    @property
    def _is_short(self) -> bool:
        """True if fewer blocks are free than a running request may take, or the first that waits needs."""
        return len(self._pool) < max(self._taken, self.prefetcher.first_waiting)

    @property
    def _room(self) -> int:
        """Number of further blocks that can be begun to be encoded: what is referenced until it is gathered is out of
        everybody's reach, and must be of nobody's need."""
        free, first = len(self._pool) - 2 * self._taken, self.prefetcher.first_waiting
        if first <= free:
            free -= first  # where the first in line does not fit anyhow, it waits for others' blocks
        window = self.pressure.window - self._holding
        return max(0, min(window, free, A_STEP - self.manager.blocks.spilling))

    def _begin(self, run: SpillRun) -> list[bytes]:
        """Have these blocks encoded, referenced until they are gathered. Returns those that are in the pool no more."""
        keys = run.keys
        found = [self._pool.hold(self._pool_name(run.group, key)) for key in keys]
        gone = [at for at, block in enumerate(found) if block is None or self._is_decoded(block)]
        self._done += [block for at in gone if (block := found[at]) is not None]
        left, lost = run.without(gone), set(gone)
        blocks = [block for at, block in enumerate(found) if block is not None and at not in lost]
        if blocks:
            ids = self._pool.block_ids(blocks)
            marks = [self._pool.marks[block_id] for block_id in ids]
            for key, mark in zip(left.keys, marks, strict=True):
                self.manager.encodes(key, run.group, mark)
            self._observer.encodes(marks)
            for job, own in self._jobs(left, ids, marks):
                self._stores[job.job_id] = Store(job, Answers([job], self._ranks), [blocks[at] for at in own])
                self._granted.append(job)
        if gone:
            self._lost += len(gone)
            self._observer.overwritten(len(gone))
        return [keys[at] for at in gone]

    def _jobs(
        self, run: SpillRun, ids: Sequence[int], marks: Sequence[Mark]
    ) -> Iterator[tuple[Transfer, Sequence[int]]]:
        """Stores of a run's blocks, the tail's first, and the places in the run of each one's blocks."""
        tokens, firsts = self.manager.shape.tokens_of(run.group), run.first_tokens
        places = range(len(firsts))
        is_tail_first = firsts[-1] < firsts[0]
        jobs: list[list[int]] = []
        for at in reversed(places) if is_tail_first else places:
            before = jobs[-1][-1] if jobs else at
            own, other = run.encodings[at], run.encodings[before]
            goes_on = (
                firsts[at] == firsts[before] + tokens
                and (own.codec, marks[at]) == (other.codec, marks[before])
                and (not own.exact or other.exact == tokens)
                and len(jobs[-1]) < JOB_BLOCKS
            )
            if goes_on:
                jobs[-1].append(at)
            else:
                jobs.append([at])
        for places_of in reversed(jobs) if is_tail_first else jobs:
            first = places_of[0]
            exact = sum(run.encodings[at].exact for at in places_of)
            job = Transfer(
                next(self._job_ids),
                "store",
                self._main_group if run.group is None else run.group,
                [run.keys[at] for at in places_of],
                np.array([ids[at] for at in places_of], np.int32),
                firsts[first],
                firsts[first] + exact if exact else 0,
                run.encodings[first].codec,
                marks[first],
                run.tenant,
            )
            yield job, places_of

    def _pool_name(self, group: int | None, key: bytes) -> BlockName:
        """A block as the pool calls it. group: as the manager calls it."""
        return key if group is None else (group, key)

    def _is_decoded(self, block: B) -> bool:
        """True if a block may not be encoded, whatever became of its compressed copy."""
        [block_id] = self._pool.block_ids([block])
        return self._pool.marks[block_id] is Mark.DECODED

    @property
    def _holding(self) -> int:
        """Number of blocks that are referenced until they are gathered."""
        return sum(len(store.blocks) for store in self._stores.values())

    def _group_of(self, job: Transfer) -> int | None:
        """A job's group as the manager calls it."""
        return None if job.group == self._group else job.group

    def hear(self) -> None:
        """Take what was found in Redis."""
        if self._redis is not None:
            self._redis.hear()
            self._observer.store_answers(self._redis.is_up)

    # -- answers --------------------------------------------------------------------------------------

    def gathered(self, job_ids: Iterable[int]) -> None:
        """Take note that a rank has gathered the blocks of these stores: nobody reads the pool's once all have."""
        for job_id in job_ids:
            if (store := self._stores.get(job_id)) is not None:
                store.gathered += 1
                if store.gathered == self._ranks:
                    self._let_go(store)
        self._give_back()

    def answered(self, results: Iterable[TransferResult], now: float, verdicts: Sequence[Verdict] = ()) -> None:
        """Take results of ranks, and what they have measured.

        What every rank has answered is settled, and what is not needed any more released.
        """
        for result in results:
            if (store := self._stores.get(result.job_id)) is not None:
                if store.answers.add(result):
                    del self._stores[result.job_id]
                    self._settle_store(store, now)
            elif (request_id := self._requests.get(result.job_id)) is not None:
                if self._restores[request_id].loads.add(result):
                    self._settle(request_id, self._restores.pop(request_id))
            else:
                self.prefetcher.answered(result, now)
        if verdicts and self._guard is not None:
            self._guard.answered(verdicts)
        self._give_back()
        self._release()
        self.tell_news()

    def _settle_store(self, store: Store[B], now: float) -> None:
        """Every rank has answered: what all have stored is saved, from the tail on."""
        job, results = store.job, store.answers.results
        self._let_go(store)
        self._was_answered = True
        causes: dict[int, set[str]] = {}
        for result in results:
            for at, cause in result.failed.items():
                causes.setdefault(at, set()).add(cause)
        for at in causes:
            self._refuse(job, at, causes[at], now)
        good = [at for at in reversed(range(len(job))) if at not in causes]
        if good:
            self._observer.stored(len(good), store.answers.seconds / len(job))
            sizes = [result.nbytes.tolist() for result in results]
            weights = [self._weigh([of_rank[at] for of_rank in sizes]) for at in good]
            self.manager.all_spilled([job.block_hashes[at] for at in good], weights, now, self._group_of(job))

    def _settle(self, request_id: str, restore: Restore) -> None:
        jobs, failed = restore.loads.jobs, restore.loads.failed
        for job in jobs:
            del self._requests[job.job_id]
        bad = [name for name, cause in failed.items() if cause not in (STORE_DOWN, RESET)]
        if STORE_DOWN in failed.values():
            self._unserved.add(request_id)
        self.manager.restore_finished(
            request_id,
            [key for group, key in bad if group == self._group],
            [name for name in bad if name[0] != self._group],
        )
        restored = Restored.of(restore.session_id, self.manager.shape, restore.loads, request_id)
        if failed:
            self._computed_instead(request_id, jobs, restored.good)
        if request_id in self._found:
            self._found[request_id] += restored.good
        self._observer.restored(restored)

    def _computed_instead(self, request_id: str, jobs: Sequence[Transfer], good: int) -> None:
        """The model computes what a load did not bring, all but the first `good` blocks of the chain."""
        before, exact = self._lossy_tokens(jobs), self._exact.get(request_id, set())
        for job in jobs:
            lost = job.block_ids.tolist()[good if job.group == self._main_group else 0 :]
            self._pool.marks.clear(lost)
            exact.difference_update(lost)
        left = self._lossy.get(request_id, 0) - before + self._lossy_tokens(jobs)
        if left > 0:
            self._lossy[request_id] = left
        else:
            self._lossy.pop(request_id, None)

    def _refuse(self, job: Transfer, at: int, causes: set[str], now: float) -> None:
        """A block of a store is not saved."""
        if causes != {NEEDED}:
            self._observer.not_stored(causes - {NEEDED})
        self.manager.spill_failed(job.block_hashes[at], now, self._group_of(job), STORE_FULL in causes)

    def _refuse_granted(self, now: float) -> None:
        granted, self._granted = self._granted, []
        for job in granted:
            self._let_go(self._stores.pop(job.job_id))
            for at in range(len(job)):
                self._refuse(job, at, {RESET}, now)

    def _let_go(self, store: Store[B]) -> None:
        """The pool has a store's blocks back, the tail first."""
        self._done += reversed(store.blocks)
        store.blocks = []

    def _give_back(self) -> None:
        if self._done:
            done, self._done = self._done, []
            self._pool.give_back(done)

    def _release(self) -> None:
        if keys := self.manager.take_releases(A_STEP):
            self._pool.keep(list(filter(self.manager.is_saved, keys)))
            self._pool.release(list(filterfalse(self.manager.is_used, keys)))

    def tell_news(self) -> None:
        """Of sessions, to the observer."""
        for eviction in self.manager.take_evictions():
            self._observer.evicted(eviction)
        for news in self.manager.take_news():
            self._observer.happened(news)

    # -- the rest -------------------------------------------------------------------------------------

    def reset(self, now: float) -> str:
        """The KV is void, hot and cold. Returns where codes are kept from now on, as stores understand it."""
        self.manager.reset()
        self.prefetcher.reset()
        if self._guard is not None:
            self._guard.reset()
        if self._journal is not None:
            self._journal.reset()
        place = "" if self._redis is None else self._redis.reset()
        self._refuse_granted(now)
        self._give_back()
        return place

    def halt(self, now: float) -> None:
        """Begin no transfer until `rests` is unset, and give back the blocks of transfers that have not begun."""
        self.rests = True
        self._refuse_granted(now)
        self._give_back()

    def forget_hot(self, now: float) -> None:
        """The pool has lost all that it had; codes are as good as ever."""
        self.manager.forget_hot(now)
        self.prefetcher.reset()
        self._found.clear()

    # -- after an error -------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Give back the blocks of jobs that no worker is told of; the books are not to be trusted any more."""
        for job in chain(self._granted, self._ordered.stores):
            if (store := self._stores.pop(job.job_id, None)) is not None:
                self._let_go(store)
        if any(job.request_id is None for job in chain(self._loads, self._ordered.loads)):
            self._done += self.prefetcher.abandon()
        self._give_back()

    def drain(self, results: Iterable[TransferResult]) -> None:
        """Give back the blocks of jobs that have ended since `abandon`."""
        for result in results:
            if (store := self._stores.get(result.job_id)) is None:
                self._done += self.prefetcher.drain(result)
            elif store.answers.add(result):
                self._let_go(self._stores.pop(result.job_id))
        self._give_back()

    @property
    def has_work(self) -> bool:
        """Whether a step is of use although no request asks for one."""
        told = self._redis is not None and self._redis.has_answers
        asks = bool(self._granted) or self._was_answered
        return self.manager.has_work or asks or self.prefetcher.has_work or told

    @property
    def has_orders(self) -> bool:
        """Whether another step would have something to order at once."""
        return (self.manager.blocks.queued > 0 and self._room > 0) or self.manager.has_orders

    @property
    def holds_blocks(self) -> bool:
        """True while an encoding or a prefetch has not been answered."""
        return self.holds_any() or self.manager.blocks.spilling > 0

    def holds_any(self) -> bool:
        """True while blocks of the pool are referenced."""
        return self._holding > 0 or self.prefetcher.is_busy

    @property
    def frees_soon(self) -> bool:
        """Whether blocks come free by themselves that running requests may wait for: not for what is encoded."""
        return self.prefetcher.is_busy

    @property
    def is_moving(self) -> bool:
        """True while a transfer is under way."""
        return self.holds_blocks or bool(self._restores)

    @property
    def next_deadline(self) -> float | None:
        """When a step is due at the latest, if anything is."""
        return earliest(self.manager.next_deadline, self.prefetcher.deadline)
