"""The serving loop: requests and answers in, orders out. It drives the manager over a KV pool, real or simulated.

    request comes      started -> wanted (how much can be restored?) -> admitted -> restoring -> ... -> finished
    each step          step: sweep, relieve, drop, release, hold blocks to be encoded, prefetch
    each answer        answered, once for each rank

Like the manager it waits for nobody, and reads no clock.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, filterfalse
from typing import TYPE_CHECKING, Generic

from manthan.manager.guard import Guard
from manthan.manager.observer import Observer, Restored
from manthan.manager.pool import B, Pool
from manthan.manager.prefetcher import Prefetcher
from manthan.manager.sessions.deadlines import earliest
from manthan.manager.sessions.hints import NO_HINTS, Hints
from manthan.manager.sessions.manager import SessionMemoryManager, SpillRun
from manthan.manager.sessions.marks import Mark, Owner
from manthan.manager.sessions.pressure import HIGH_WATERMARK, LOW_WATERMARK, Pressure
from manthan.manager.sessions.session import Outcome, Place
from manthan.manager.tiers.tier import STORE_FULL
from manthan.manager.work import (
    NEEDED,
    RESET,
    STORE_DOWN,
    GroupBlocks,
    GroupKeys,
    Load,
    LoadResult,
    Name,
    SpillBlock,
    SpillBlocks,
    SpillResult,
    StoredBlocks,
    Verdict,
    Weigh,
)

if TYPE_CHECKING:
    from manthan.manager.journal_link import JournalLink
    from manthan.manager.redis_link import RedisLink


A_STEP = 512
"""So many blocks are begun to be encoded in a step, at most, and as many released: a session of a million tokens has
62,500, and others wait for a step's end. It is about what a GPU encodes while a step is computed."""


@dataclass
class Restore:
    """A restore under way: which session, which load, and what the ranks have answered."""

    session_id: str
    load: Load
    answers: list[LoadResult] = field(default_factory=list)


@dataclass
class Work:
    """What is to be done now, in this order."""

    drops: Sequence[GroupKeys]
    runs: Sequence[SpillBlocks]
    loads: Sequence[Load]
    lost: int = 0
    """Blocks that were to be encoded and were not in the pool any more."""
    revokes: bool = False
    """True if blocks of earlier `runs` that nobody reads yet are to be given back."""

    @property
    def spills(self) -> list[SpillBlock]:
        """The blocks of `runs`, as who encodes them is told."""
        return [spill for run in self.runs for spill in run.one_by_one()]


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
    in_flight: how many blocks may be ordered to be encoded and not be answered for: those who encode hold no more.
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
        in_flight: int = A_STEP,
    ) -> None:
        self._in_flight = in_flight
        self._again, self._last_tokens, self._journal, self._weigh = again, last_tokens, journal, weigh
        self.manager, self._pool, self._ranks, self._redis = manager, pool, ranks, redis
        self._guard = guard
        manager.mark = pool.mark
        self._lossy: dict[str, int] = {}
        """By request id, cached tokens of its prompt that were decoded, or computed behind such."""
        self._exact = defaultdict[str, set[int]](set)
        """By request id, blocks that were loaded for it and are exact, wherever decoded ones are."""
        self._observer = Observer() if observer is None else observer
        self.pressure = Pressure(manager, pool, blocks, low=low, high=high)
        self.prefetcher: Prefetcher[B] = Prefetcher(
            manager, pool, self.pressure.runway, ranks, blocks, self.pressure.low, self._observer
        )
        self._group, self._main_group = manager.shape.group, manager.shape.main_group
        self._session_of: dict[str, str] = {}  # by request id
        self._found: dict[str, int] = {}  # by request id, blocks of its prompt that were hot or restored
        self._held = defaultdict[int, dict[bytes, B]](dict)  # by group and key, referenced until they are copied
        self._copies: dict[Name, int] = {}  # by how many ranks, of those that some have copied
        self._taken = self._lost = 0  # blocks that the last step's requests took at most; blocks that were gone
        self._granted: list[SpillBlocks] = []
        self._done: list[B] = []  # to be given back, all at once
        self._answers: dict[Name, list[SpillResult]] = {}
        self._restores: dict[str, Restore] = {}
        self._loads: list[Load] = []
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
        self, request_id: str, keys: Sequence[bytes], block_ids: Sequence[int], beside: Sequence[GroupBlocks] = ()
    ) -> None:
        """Codes of these keys, but for the last ones, which are computed again, are to be decoded into these blocks of
        the request; beside: those of other groups."""
        chain = () if self._group is None else (GroupBlocks(self._group, keys[: len(block_ids)], block_ids),)
        tenant = self.manager.restore_started(request_id, keys)
        load = Load(request_id, (*chain, *beside), tenant=tenant)
        self._restores[request_id] = Restore(self._session_of.get(request_id, "?"), load)
        self._loads.append(load)
        self._mark(load, self.manager.owner(request_id), self._exact[request_id])
        if lossy := self._lossy_tokens(load):
            self._lossy[request_id] = self._lossy.get(request_id, 0) + lossy

    def _mark(self, load: Load, owner: Owner | None, exact: set[int]) -> None:
        """Mark the blocks that a load writes. exact: gets those that are exact."""
        for group, keys, block_ids in load.parts:
            marks = self.manager.stored_marks(keys, None if group == self._group else group)
            for mark in set(marks):
                marked = [block_id for block_id, own in zip(block_ids, marks, strict=True) if own is mark]
                self._pool.marks.set(marked, mark, owner)
                if mark is Mark.EXACT:
                    exact.update(marked)

    def _lossy_tokens(self, load: Load) -> int:
        """Tokens of lossy blocks among those of a load, of the group that has most of them."""
        lossy = (len(self._pool.marks.lossy(part.block_ids)) for part in load.parts)
        return max(lossy, default=0) * self.manager.shape.block_tokens

    def load_of(self, request_id: str) -> Load | None:
        """What is being restored for a request."""
        restore = self._restores.get(request_id)
        return None if restore is None else restore.load

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
            drops=[GroupKeys(drop.group, drop.keys) for drop in drops],
            runs=self._granted,
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
        """How many blocks more can be begun to be encoded: what is referenced until it is copied is out of everybody's
        reach, and must be of nobody's need."""
        free, first = len(self._pool) - 2 * self._taken, self.prefetcher.first_waiting
        if first <= free:
            free -= first  # where the first in line does not fit anyhow, it waits for others' blocks
        window = self.pressure.window - self._holding
        return max(0, min(window, free, A_STEP, self._in_flight - self.manager.blocks.spilling))

    def _begin(self, run: SpillRun) -> list[bytes]:
        """Have these blocks encoded, referenced until they are copied. Returns those that are in the pool no more."""
        keys, group = run.keys, run.group
        found = [self._pool.hold(key if group is None else (group, key)) for key in keys]
        gone = [at for at, block in enumerate(found) if block is None or self._is_decoded(block)]
        self._done += [block for at in gone if (block := found[at]) is not None]
        left, lost = run.without(gone), set(gone)
        blocks = [block for at, block in enumerate(found) if block is not None and at not in lost]
        if blocks:
            ids = self._pool.block_ids(blocks)
            marks = [self._pool.marks[block_id] for block_id in ids]
            for key, mark in zip(left.keys, marks, strict=True):
                self.manager.encodes(key, group, mark)
            self._observer.encodes(marks)
            group = self._main_group if group is None else group
            self._held[group].update(zip(left.keys, blocks, strict=True))
            told = left.first_tokens, left.encodings, left.tenant, marks
            self._granted.append(SpillBlocks(left.keys, group, ids, *told))
        if gone:
            self._lost += len(gone)
            self._observer.overwritten(len(gone))
        return [keys[at] for at in gone]

    def _is_decoded(self, block: B) -> bool:
        """True if a block may not be encoded, whatever became of its compressed copy."""
        [block_id] = self._pool.block_ids([block])
        return self._pool.marks[block_id] is Mark.DECODED

    @property
    def _holding(self) -> int:
        """How many blocks are referenced until they are copied."""
        return sum(map(len, self._held.values()))

    def _group_of(self, name: Name) -> int | None:
        """As the manager calls it."""
        return None if name[0] == self._group else name[0]

    def hear(self) -> None:
        """Take what was found in Redis."""
        if self._redis is not None:
            self._redis.hear()
            self._observer.store_answers(self._redis.is_up)

    # -- answers --------------------------------------------------------------------------------------

    def copied(self, names: Iterable[Name]) -> None:
        """A rank has copied these blocks, each once, before it says anything else of them: nobody reads the pool's any
        more when all have."""
        for name in names:
            group, key = name
            count = self._copies.pop(name, 0) + 1
            if count < self._ranks:
                self._copies[name] = count
            elif (block := self._held[group].pop(key, None)) is not None:
                self._done.append(block)
        self._give_back()

    def answered(
        self,
        spills: Iterable[SpillResult],
        loads: Iterable[LoadResult],
        now: float,
        verdicts: Sequence[Verdict] = (),
        stored: Sequence[StoredBlocks] = (),
    ) -> None:
        """Ranks have encoded blocks and stored them, or have not; have decoded what was asked for, or not all of it;
        have measured what codecs do. stored: of what every rank has stored, where that is heard of at once.

        What every rank has answered is settled, and what is not needed any more released.
        """
        for run in chain(self._stored(spills, now), stored):
            self._settle_spills(run, now)
            self._was_answered = self._was_answered or bool(run.keys)
        for load in loads:
            self._load_answered(load, now)
        if verdicts and self._guard is not None:
            self._guard.answered(verdicts)
        self._give_back()
        self._release()
        self.tell_news()

    def _stored(self, spills: Iterable[SpillResult], now: float) -> Iterator[StoredBlocks]:
        """What every rank has stored, in the order of the answers, in which others are refused."""
        group, keys, sizes = self._main_group, list[bytes](), list[int]()
        for answer in spills:
            name = answer.group, answer.key
            answers = (answer,) if self._ranks == 1 else self._all_answers(name, answer)
            causes = {one.cause for one in answers if one.cause is not None}
            if causes or answer.group != group:
                yield StoredBlocks(group, keys, sizes)
                group, keys, sizes = answer.group, [], []
            if causes:
                self._refuse(name, causes, now)
            elif answers:
                self._observer.spilled(answers)
                keys.append(answer.key)
                sizes.append(self._weigh([one.nbytes for one in answers]))
        yield StoredBlocks(group, keys, sizes)

    def _settle_spills(self, run: StoredBlocks, now: float) -> None:
        group, keys, sizes = run
        if held := self._held[group]:
            self._done += [held.pop(key) for key in keys if key in held]
        self.manager.all_spilled(keys, sizes, now, None if group == self._group else group)

    def _all_answers(self, name: Name, answer: SpillResult) -> Sequence[SpillResult]:
        """What all ranks have said of a block; nothing until the last of them has."""
        answers = [*self._answers.pop(name, ()), answer]
        if len(answers) < self._ranks:
            self._answers[name] = answers
            return ()
        return answers

    def _load_answered(self, answer: LoadResult, now: float) -> None:
        if answer.is_prefetch:
            self.prefetcher.answered(answer, now)
            return
        restore = self._restores[answer.request_id]
        restore.answers.append(answer)
        if len(restore.answers) == self._ranks:
            del self._restores[answer.request_id]
            self._settle(restore)

    def _settle(self, restore: Restore) -> None:
        failed = {(block.group, block.key): block.cause for answer in restore.answers for block in answer.failed}
        bad = [name for name, cause in failed.items() if cause not in (STORE_DOWN, RESET)]
        if STORE_DOWN in failed.values():
            self._unserved.add(restore.load.request_id)
        self.manager.restore_finished(
            restore.load.request_id,
            [key for group, key in bad if group == self._group],
            [name for name in bad if name[0] != self._group],
        )
        shape, request_id = self.manager.shape, restore.load.request_id
        restored = Restored.of(restore.session_id, shape, restore.load, restore.answers, failed)
        if failed:
            self._computed_instead(restore.load, restored.good)
        if request_id in self._found:
            self._found[request_id] += restored.good
        self._observer.restored(restored)

    def _computed_instead(self, load: Load, good: int) -> None:
        """The model computes what a load did not bring, all but the first `good` blocks of the chain."""
        before, exact = self._lossy_tokens(load), self._exact.get(load.request_id, set())
        for group, _, block_ids in load.parts:
            lost = block_ids[good:] if group == self._main_group else block_ids
            self._pool.marks.clear(lost)
            exact.difference_update(lost)
        left = self._lossy.get(load.request_id, 0) - before + self._lossy_tokens(load)
        if left > 0:
            self._lossy[load.request_id] = left
        else:
            self._lossy.pop(load.request_id, None)

    def _refuse(self, name: Name, causes: set[str], now: float) -> None:
        self._let_go(name)
        if causes != {NEEDED}:
            self._observer.not_spilled(causes - {NEEDED})
        self.manager.spill_failed(name[1], now, self._group_of(name), STORE_FULL in causes)

    def _refuse_granted(self, now: float) -> None:
        granted, self._granted = self._granted, []
        for run in granted:
            for key in run.keys:
                self._refuse((run.group, key), {RESET}, now)

    def _let_go(self, name: Name) -> None:
        self._copies.pop(name, None)
        group, key = name
        if (block := self._held[group].pop(key, None)) is not None:
            self._done.append(block)

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
        """Give back the blocks of orders that no worker is told of; the books are not to be trusted any more."""
        for run in chain(self._granted, self._ordered.runs):
            held = self._held[run.group]
            self._done += [held.pop(key) for key in run.keys if key in held]
        if any(load.is_prefetch for load in chain(self._loads, self._ordered.loads)):
            self._done += self.prefetcher.abandon()
        self._give_back()

    def drain(self, loads: Iterable[LoadResult]) -> None:
        """Give back the blocks of prefetches that have ended since `abandon`."""
        for answer in loads:
            if answer.is_prefetch:
                self._done += self.prefetcher.drain(answer)
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
