"""Driver between vLLM's scheduler, or the simulator, and a SessionManager, which decides what KV is saved and loaded.

A store compresses KV blocks of vLLM's pool and saves them in tiers, such as RAM or a disk. A load brings KV back; a
prefetch is a load before a request comes. A lossy block has KV decoded by a lossy codec (DECODED), or computed behind
such KV (DERIVED). A session lists the block hashes of one KV cache group, the main.

    a request   started -> matched (how much can be loaded?) -> admitted -> loading -> ... -> finished
    each step   step: due sessions, memory pressure, stores, drops, prefetches
    results     gathered: id of a store, from each storing rank. answered: a transfer's result, from each rank in it

A rank has gathered a store when the rank has read the store's blocks from the pool, or failed to. Once all storing
ranks have, the pool gets the blocks back. The driver does no I/O, never waits, and reads no clock.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from manthan.manager.events import BlocksDropped, BlocksTrimmed, Loading, Overwritten, StoreFailed, Verdict
from manthan.manager.fronts import FrontTiers
from manthan.manager.guard import Guard
from manthan.manager.pool import MARKS, Asker, Mark, Pool, Runway
from manthan.manager.session.blocks import FrontTier
from manthan.manager.session.manager import Outcome, PointParts, Request, SessionManager, Store
from manthan.manager.session.prefetch import Prefetcher
from manthan.manager.session.table import Session
from manthan.manager.transfer import NEEDED, RESET, STORE_DOWN, Answers, Transfer, TransferResult, Weigh, weighed

if TYPE_CHECKING:
    from manthan.manager.session.persist import JournalLink, RedisLink

A_STEP = 512  # a step begins stores only while fewer blocks are being stored. A GPU encodes about this number in a step
LOW_WATERMARK, HIGH_WATERMARK = 0.1, 0.25
"""Watermarks of the number of blocks in the free queue before the first unsaved block, as shares of the pool.

If this number, plus that of blocks being stored, is below the low watermark, blocks are saved up to the high watermark.
"""
BURSTS = 1.5, 2.5  # both watermarks as multiples of the burst: the most blocks that requests took in a recent step
BURST_DECAY = 127 / 128  # factor on the burst in a step in which requests take some blocks, but fewer than the burst
RUNNING_S = 0.1  # seconds until the next look for blocks to save, after a look found none
LED = 256  # saved blocks moved to the free queue's head at a time; more if more were taken from it since
WINDOW_SHARE = 16  # stores of free blocks begin only while stores reference fewer than 1 / WINDOW_SHARE of the pool


@dataclass(frozen=True, slots=True)
class Work:
    """Orders of a step. Workers obey `revokes` first and then `drops`, then begin `loads`, and last `stores`."""

    drops: Sequence[BlocksDropped | BlocksTrimmed] = ()
    stores: Sequence[Transfer] = ()
    loads: Sequence[Transfer] = ()
    revokes: bool = False  # true to give up storing the blocks not gathered yet, so that requests get these blocks


class Driver:
    """Driver of a SessionManager.

    Args:
        ranks: number of ranks, each of which answers every load.
        storing: number of ranks that gather and answer every store; None for all. Other ranks save no blocks.
        low, high: watermarks, as shares of the pool; see LOW_WATERMARK.
        bursts: multiples of the burst, see BURSTS. A watermark is the larger of its share of the pool and its multiple.
        fronts: fast tiers in front of the last tier, the fastest first.
        prefetch_lead_s: seconds from a prefetch to the session's expected request; None for no prefetches.
        guard: chooses the codec; None for the configured codec.
        again: number of blocks at the end of a prefix cache hit that vLLM computes again, as with EAGLE.
        last_tokens: number of prompt tokens that vLLM computes on a full hit.
        weigh: returns the bytes that a block takes of the tiers' whole budget, from its bytes on each rank.
    """

    def __init__(
        self,
        manager: SessionManager,
        pool: Pool,
        *,
        ranks: int = 1,
        storing: int | None = None,
        low: float = LOW_WATERMARK,
        high: float = HIGH_WATERMARK,
        bursts: tuple[float, float] = BURSTS,
        fronts: Sequence[FrontTier] = (),
        prefetch_lead_s: float | None = None,
        redis: "RedisLink | None" = None,
        journal: "JournalLink | None" = None,
        guard: Guard | None = None,
        again: int = 0,
        last_tokens: int = 1,
        weigh: Weigh = sum,
        fails_whole: bool = False,
    ) -> None:
        self.manager, self._pool, self._weigh = manager, pool, weigh
        self._fails_whole = fails_whole or manager.points.is_needed
        self._ranks, self._storing = ranks, storing or ranks
        self._redis, self._journal, self._guard = redis, journal, guard
        self._again, self._last_tokens = again, last_tokens
        self._low, self._high = int(low * pool.size), int(high * pool.size)
        self._least, self._bursts = (self._low, self._high), bursts
        self._window = max(1, pool.size // WINDOW_SHARE)
        self.runway = Runway(pool, self._high)
        manager.bind(self.runway)
        self.fronts = FrontTiers(manager, fronts)
        self.prefetcher = Prefetcher(manager, ranks, self._low, prefetch_lead_s)
        self._main = manager.shape.main
        self._requests = manager.requests
        self._stores: dict[int, Store] = {}  # stores under way, by job id
        self._loading: dict[str, Answers] = {}  # loads under way, by request id; a request may end before its load does
        self._load_of: dict[int, str] = {}  # by job id, the id of the request that the job loads for
        self._granted: list[Transfer] = []  # stores for the next step's orders
        self._loads: list[Transfer] = []  # loads for the next step's orders
        self._drops: list[BlocksDropped | BlocksTrimmed] = []  # for the next step's orders
        manager.events.subscribe(self._drops.append, BlocksDropped, BlocksTrimmed)
        self._waiting: dict[str, int] = {}  # by id of a waiting request, the number of blocks that it needs
        self._ordered = Work()  # orders of the last step, until the workers have them
        self._taken = 0  # most blocks that the last step's requests can have taken
        self._taking, self._burst = 0, 0.0  # blocks allocated to requests since the last step; the burst, see BURSTS
        self._overwritten = 0  # most blocks that can have left the free queue's head since the last `lead_overwritten`
        self._looks_after = 0.0  # time until which the free queue is not searched for blocks to save
        self._look_at = inf  # time of the next search, if a request ended while none was allowed; else infinity
        self._was_answered = self._has_finished = False
        self.rests = False  # true while no store and no prefetch may begin; see `halt`

    def started(self, request: Request, blocks: int) -> None:
        """Take a request that `SessionManager.request_started` has made. blocks: number of blocks that it needs."""
        self._waiting[request.request_id] = blocks
        self.prefetcher.expect(request.hints.prefetch, request.session.tenant, request.began)
        if self._redis is not None:
            self._redis.look_up(request, self.usable(request.tokens))

    def usable(self, tokens: int) -> int:
        """Return the number of first blocks of `tokens` tokens that may be found. vLLM computes the last tokens."""
        return (tokens - self._last_tokens) // self.manager.shape.block_tokens

    def matched(self, request_id: str, resident: int, usable: int, blocks: int, now: float) -> int | None:
        """Return the number of blocks to load behind a request's resident blocks; None to have vLLM ask again later.

        Args:
            resident: number of the prompt's first blocks that vLLM found in the pool.
            usable: number of the prompt's first blocks that may be found; see the method `usable`.
            blocks: number of pool blocks that the request needs in all, of all groups.
        """
        if self._redis is not None:
            self._redis.hear()
        self._waiting[request_id] = blocks
        request = self._requests.get(request_id)
        if request is None:
            return 0
        request.taken = 0
        if request_id in self._loading:  # an earlier load, before a preemption, still lacks a rank's result
            return None
        if self._redis is not None and self._redis.awaits(request_id, now):
            return None
        if request.is_unserved or resident >= usable:
            return 0
        rows, prefetch = request.rows, self.prefetcher.load
        if prefetch is not None and resident < len(rows) and prefetch.brings(int(rows[resident])):
            return None
        return max(0, self.manager.match(request, resident, usable) - self._again)

    def admitted(
        self, request_id: str, resident: int, usable: int, taken: int, brought: int = 0, is_again: bool = False
    ) -> None:
        """Note that vLLM has allocated a request's blocks. Called again after a load of the request.

        Args:
            resident, usable: see `matched`.
            taken: number of the request's blocks. Resident blocks count, because they too may have left the free queue.
            brought: number of blocks that another KV connector loads behind the resident blocks.
            is_again: True if the request was preempted before.
        """
        request = self._requests.get(request_id)
        has_waited = self._waiting.pop(request_id, None) is not None
        new = taken - (0 if request is None else request.taken)
        self.runway.taken(new)
        self._overwritten += new - resident
        self._taking += new - resident
        if request is None:
            return
        request.taken, rows = taken, request.rows
        is_new = request.found is None
        if has_waited:
            request.is_again = is_again and not is_new
            request.found = request.found if request.is_again else resident + brought
        if is_new:
            blocks, missed = self.manager.blocks, rows[resident + brought : usable]
            missed = missed[blocks.status[missed] == 0]
            if len(missed) and (lost := int((blocks.users[missed] > 0).sum())):
                self.manager.events(Overwritten(lost))
        if self.prefetcher.ready and resident:
            self.prefetcher.admitted(rows, resident + self._again, usable)

    def hits(self, request_id: str, block_ids: Sequence[Sequence[int]]) -> None:
        """Note the blocks of the prefix cache that a request uses. block_ids: a list for each KV cache group."""
        if (request := self._requests.get(request_id)) is not None:
            request.exact, request.lossy = set(), self._lossy_tokens(block_ids)

    def handed(self, request_id: str, decoded: Sequence[Sequence[int]], derived: Sequence[Sequence[int]]) -> None:
        """Mark blocks with KV that another engine has computed and handed over. See `Mark`.

        decoded, derived: for each KV cache group, ids of the blocks with this mark.
        """
        request = self._requests.get(request_id)
        if request is None:
            return
        marks, owner = self._pool.marks, request.session.owner
        for mark, groups in ((Mark.DECODED, decoded), (Mark.DERIVED, derived)):
            for block_ids in groups:
                # the other engine's codec may be too coarse for the hint `quality: high`
                marks.set(block_ids, mark, owner, is_coarse=mark is Mark.DECODED)
        request.lossy += self._lossy_tokens([[*first, *behind] for first, behind in zip(decoded, derived, strict=True)])

    def computed(self, request_id: str, block_ids: Sequence[int]) -> None:
        """Mark as DERIVED the blocks that a request has computed behind lossy blocks. Leave loaded blocks alone."""
        request = self._requests.get(request_id)
        if request is None or not request.lossy:
            return
        marks = self._pool.marks
        if derived := set(block_ids) - marks.lossy(block_ids) - request.exact:
            marks.set(derived, Mark.DERIVED, request.session.owner)

    def cached(self, request_id: str, blocks: int) -> None:
        """Note that at least a request's first `blocks` full blocks are in the prefix cache; 0 if it does not run."""
        if (request := self._requests.get(request_id)) is not None:
            request.computed = max(request.computed, blocks) if blocks else 0

    def asker(self, request_id: str) -> Asker | None:
        """Return `Request.asker`, the owner of the request's session; None if unknown, or if only exact KV will do."""
        request = self._requests.get(request_id)
        return None if request is None else request.asker

    def loading(
        self,
        request_id: str,
        resident: int,
        end: int,
        block_ids: Sequence[int],
        further: Sequence[tuple[int, Sequence[bytes], Sequence[int]]] = (),
    ) -> None:
        """Begin a load for a request.

        Args:
            resident, end: bounds of the prompt's blocks found in tiers, from `resident` to before `end`.
            block_ids: ids of the main group's blocks to load into; none for the last `again` of the found blocks.
            further: for each further KV cache group, its index, block hashes, and ids of blocks to load into.
        """
        request, manager = self._requests[request_id], self.manager
        rows = request.rows[resident:end]
        manager.load_started(request_id, rows)
        main = self._main, request.hashes[resident : resident + len(block_ids)], block_ids
        parts = [main, *further] if manager.shape.stores_main else further
        jobs = [manager.load_job(*part, request.session, request_id) for part in parts]
        depth = 0 if manager.shape.stores_main else len(rows)
        self._loading[request_id] = Answers(jobs, request.session.session_id, depth)
        self._load_of.update((job.job_id, request_id) for job in jobs)
        self._loads += jobs
        lossy = 0
        for job in jobs:
            is_main = job.group == manager.shape.session_group
            found = rows[: len(job)] if is_main else manager.blocks.find(job.group, job.block_hashes)
            marks, ids = manager.loaded_marks(found), job.block_ids
            kinds = 2 * marks + manager.is_coarse(found)
            for kind in np.flatnonzero(np.bincount(kinds)).tolist():
                some = ids[kinds == kind].tolist()
                self._pool.marks.set(some, MARKS[kind >> 1], request.session.owner, bool(kind & 1))
                if kind < 2:
                    request.exact.update(some)
            lossy = max(lossy, int(np.count_nonzero(marks)))
            if manager.shape.groups[job.group].levels > 1:
                manager.events(Loading(manager.blocks.level[found[marks == Mark.DECODED]].tolist()))
        request.lossy += lossy * manager.shape.block_tokens

    def _lossy_tokens(self, block_ids: Iterable[Sequence[int]]) -> int:
        """Return the number of lossy tokens, by the group with most lossy blocks. block_ids: a list for each group."""
        lossy = (len(self._pool.marks.lossy(of_group)) for of_group in block_ids)
        return max(lossy, default=0) * self.manager.shape.block_tokens

    def loads_of(self, request_id: str) -> Sequence[Transfer]:
        """Return the jobs of a request's load under way, one for each group; empty without a load."""
        answers = self._loading.get(request_id)
        return () if answers is None else answers.jobs

    def found(self, request_id: str) -> int:
        """Return the number of tokens of a request's prompt that were resident or loaded."""
        request = self._requests.get(request_id)
        return (0 if request is None else request.found or 0) * self.manager.shape.block_tokens

    def returned(self, request_id: str) -> Asker | None:
        """Return `asker` of a request that uses lossy KV and for which a load has brought blocks; else None."""
        request = self._requests.get(request_id)
        return request.asker if request is not None and request.was_loaded and request.lossy else None

    def finished(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        now: float,
        tokens: int,
        points: Sequence[PointParts] = (),
        ending: str = "",
    ) -> Outcome | None:
        """Note the end of a request. Return the answer to the client's hints; None for an unknown request.

        Arguments: see `SessionManager.request_finished`.
        """
        self._waiting.pop(request_id, None)
        if self._redis is not None:
            self._redis.forget(request_id)
        if request_id not in self._requests:
            return None
        self._has_finished = True
        if now < self._looks_after:
            self._look_at = self._looks_after
        points, manager = () if self.rests else points, self.manager
        outcome, plans = manager.request_finished(request_id, hashes, now, tokens=tokens, points=points, ending=ending)
        self._begin(plans)
        return outcome

    def step(self, taken: int, now: float) -> Work:
        """Return the orders of this step. taken: most blocks that the step's requests can have taken from the pool."""
        manager = self.manager
        self._taken, self._was_answered = taken, False
        self._overwritten += taken
        self._expect_burst(taken)
        self.runway.taken(taken)
        manager.said.expire(now)
        if now >= self._looks_after:
            self._look_at = inf
        # True if stores hold blocks, and a step or the first waiting request may need more blocks than are free.
        revokes = self._holding > 0 and len(self._pool) < max(taken, self._first_waiting)
        if not self.rests:
            wanted, room = self.wanted(now), self._room
            self._begin(manager.plan_stores(now, room, wanted))
            if wanted > 0:
                self._save_running(now)
                if room > 0 and not self._stores:  # all is saved, or the tiers are full
                    self._looks_after = now + RUNNING_S
            if (self._has_finished or self._overwritten > LED) and taken + wanted > 0:
                manager.lead_overwritten(max(LED, self._overwritten))
                self._has_finished, self._overwritten = False, 0
            manager.order_some()
        if self.fronts.budgets:
            self.fronts.settle()
        drops = self._drops.copy()
        self._drops.clear()
        if self._journal is not None:
            self._journal.tell(now)
        if self._redis is not None:
            self._redis.tell([drop for drop in drops if isinstance(drop, BlocksDropped)], now)
            self._redis.hear()
        prefetcher = self.prefetcher
        looks = prefetcher.was_settled or min(prefetcher.expected.least, prefetcher.look_at) <= now
        if (prefetcher.to_load or looks) and not self.rests:
            self._loads += prefetcher.step(now, sum(self._waiting.values()))
        work = self._ordered = Work(drops, self._granted, self._smallest_first(self._loads), revokes)
        self._granted, self._loads = [], []
        return work

    def _smallest_first(self, loads: Sequence[Transfer]) -> Sequence[Transfer]:
        """Return loads sorted by the sum of bytes that their request loads, the fewest first. Prefetches come last."""
        groups, nbytes = self.manager.shape.groups, Counter[str | None]()
        for job in loads:
            nbytes[job.request_id] += len(job) * groups[job.group].pool_nbytes
        return sorted(loads, key=lambda job: (job.request_id is None, nbytes[job.request_id]))

    def _expect_burst(self, taken: int) -> None:
        """Set the watermarks so that a step which takes a burst of blocks overwrites no unsaved block; see BURSTS.

        Otherwise a prompt that takes much of the pool may overwrite the unsaved first blocks of a session. The saved
        blocks behind them are worthless then. taken: see `step`.
        """
        blocks, self._taking = max(self._taking, taken), 0
        if not blocks:
            return
        self._burst = max(blocks, self._burst * BURST_DECAY)
        wanted = (int(share * self._burst) for share in self._bursts)
        self._low, self._high = (min(self._pool.size, max(pair)) for pair in zip(self._least, wanted, strict=True))
        self.runway.ahead = self._high

    def sent(self) -> None:
        """Note that the workers have the last step's orders."""
        self._ordered = Work()

    def wanted(self, now: float) -> int:
        """Return the number of blocks to save if memory is short; 0 if not, or if a look for blocks just found none."""
        storing = self.manager.blocks.storing
        short = self._low - storing
        if short <= 0 or now < self._looks_after or (left := self.runway.length(short)) >= short:
            return 0
        return max(0, self._high - left - storing)  # `left` is exact: the walk met an unsaved block there

    @property
    def _first_waiting(self) -> int:
        """Number of blocks that the first of `_waiting` needs; 0 if no request waits."""
        return next(iter(self._waiting.values()), 0)

    @property
    def _room(self) -> int:
        """Most free blocks that new stores may reference. No request gets these until storing ranks gathered them."""
        free, first = len(self._pool) - 2 * self._taken, self._first_waiting
        if first <= free:
            free -= first  # if the first request does not fit, it waits for running requests' blocks
        window = self._window - self._holding
        return max(0, min(window, free, A_STEP - self.manager.blocks.storing))

    def _save_running(self, now: float) -> None:
        """Begin to store blocks of running requests. The requests reference these, so that none is free."""
        for request in self._requests.values():
            room = A_STEP - self.manager.blocks.storing
            if room <= 0:
                return
            if request.computed and request.saves_after <= now:
                plans = self.manager.save_running(request, room, now)
                self._begin(plans)
                if not plans:  # all is saved, or there is no room: no use to look again at once
                    request.saves_after = now + RUNNING_S

    def _begin(self, stores: Iterable[Store]) -> None:
        for store in stores:
            self.runway.taken(len(store.rows))  # a saved block that is stored again leaves the free queue
            self._stores[store.transfer.job_id] = store
            self._granted.append(store.transfer)

    @property
    def _holding(self) -> int:
        """Number of blocks that stores reference, because not all storing ranks have gathered them."""
        return sum(len(store.block_ids) for store in self._stores.values())

    def gathered(self, job_ids: Iterable[int]) -> None:
        """Take ids of stores, each once for a rank that gathered it. Free blocks that all storing ranks gathered."""
        for job_id in job_ids:
            if (store := self._stores.get(job_id)) is not None:
                store.gathered += 1
                if store.gathered == self._storing:
                    self._let_go(store)

    def answered(self, results: Iterable[TransferResult], now: float, verdicts: Sequence[Verdict] = ()) -> None:
        """Take results of transfers, and ranks' measurements of codecs. The last rank's result settles a transfer."""
        for result in results:
            if (store := self._stores.get(result.job_id)) is not None:
                if store.answers.add(result, self._storing):
                    del self._stores[result.job_id]
                    self._settle_store(store, now)
            elif (request_id := self._load_of.get(result.job_id)) is not None:
                self._answer_load(request_id, result)
            else:
                self.prefetcher.answered(result, now)
        if verdicts and self._guard is not None:
            self._guard.answered(verdicts)

    def _settle_store(self, store: Store, now: float) -> None:
        results = store.answers.results
        self._let_go(store)  # before the pool is told of saved blocks, and orders them
        self._was_answered = True
        failed = {at for result in results for at in result.failed}
        causes = {at: {result.failed[at] for result in results if at in result.failed} for at in failed}
        torn = [at for at in failed if any(result.failed.get(at) not in (NEEDED, RESET) for result in results)]
        if store.is_void:
            causes, torn = {at: {RESET} for at in range(len(store.rows))}, []
        self._refuse(store, causes, now, torn)
        sizes = np.array([result.nbytes for result in results])
        if good := [at for at in range(len(store.rows)) if at not in causes]:
            nbytes = {at: self._weigh(sizes[:, at].tolist()) for at in good}
            inner = {at: weighed((each.inner.get(at, ()) for each in results), self._weigh) for at in results[0].inner}
            self.manager.stored(store, nbytes, now, inner)

    def _refuse(self, store: Store, causes: dict[int, set[str]], now: float, torn: Sequence[int] = ()) -> None:
        """Tell the manager which blocks of a store are not saved. torn: see `SessionManager.store_failed`.

        causes: by index in the store, the causes on the ranks.
        """
        failures = [sorted(true) for told in causes.values() if (true := told - {NEEDED, RESET})]
        if causes:
            self.manager.store_failed(store, list(causes), now, bool(failures), torn)
        for each in failures:
            self.manager.events(StoreFailed(each))

    def _answer_load(self, request_id: str, result: TransferResult) -> None:
        answers = self._loading[request_id]
        if not answers.add(result, self._ranks):
            return
        del self._loading[request_id]
        for job in answers.jobs:
            del self._load_of[job.job_id]
        failed = answers.failed
        bad = [name for name, cause in failed.items() if cause not in (STORE_DOWN, RESET)]
        self.manager.load_finished(request_id, bad)
        event = answers.restored(self._main, self._fails_whole, request_id)
        if (request := self._requests.get(request_id)) is not None:
            request.was_loaded |= event.good > 0
            request.is_unserved |= STORE_DOWN in failed.values()
            if not failed:
                for job in answers.jobs:
                    self._pool.loaded(job.block_ids.tolist())
            else:  # vLLM computes all blocks behind the good ones
                loaded = [job.block_ids.tolist() for job in answers.jobs]
                request.lossy -= self._lossy_tokens(loaded)
                for job, block_ids in zip(answers.jobs, loaded, strict=True):
                    lost = block_ids[event.good if job.group == self._main else 0 :]
                    self._pool.marks.clear(lost)
                    request.exact.difference_update(lost)
                request.lossy = max(0, request.lossy + self._lossy_tokens(loaded))
            if request.found is not None and not request.is_again:
                request.found += event.good
        self.manager.events(event)

    def _let_go(self, store: Store) -> None:
        """Give a store's blocks back to the pool, the last block first."""
        self._pool.free(store.block_ids[::-1])
        store.block_ids = []

    def _refuse_granted(self, now: float) -> None:
        """Take back stores that no worker has been told of."""
        granted, self._granted = self._granted, []
        for job in granted:
            store = self._stores.pop(job.job_id)
            self._let_go(store)
            self._refuse(store, {at: {RESET} for at in range(len(job))}, now)

    def steer(self, what: str, session: Session, now: float, seconds: float | None = None, tool: str = "") -> str:
        """Obey an operator's order: "prefetch", or see `SessionManager.steer`. Return a reason for a refusal, or ""."""
        if what != "prefetch":
            return self.manager.steer(what, session, now, seconds, tool)
        if not self.prefetcher.is_on:
            return "sessions of this model cannot be prefetched"
        self.prefetcher.expect([session.told_id], session.tenant, now)
        return ""

    def reset(self, now: float) -> str:
        """Empty the sessions; drop all saved KV. Return Redis's new namespace, for `Tier.cleared`, or ""."""
        for store in self._stores.values():
            store.is_void = True
        self.manager.reset()
        self.prefetcher.reset()
        if self._guard is not None:
            self._guard.reset()
        if self._journal is not None:
            self._journal.reset()
        name = "" if self._redis is None else self._redis.reset()
        self._refuse_granted(now)
        return name

    def halt(self, now: float) -> None:
        """Set `rests`: begin no store and no prefetch. Give back the blocks of stores that no worker knows."""
        self.rests = True
        self._refuse_granted(now)

    def forget_resident(self, now: float) -> None:
        """Note that the pool has lost all KV. KV in tiers stays valid."""
        self.manager.forget_resident(now)
        self.prefetcher.reset()
        for request in self._requests.values():
            request.found, request.computed = None, 0

    def abandon(self) -> None:
        """Give back blocks of stores and prefetches that no worker knows. Leave the manager alone: it may be wrong."""
        for job in chain(self._granted, self._ordered.stores):
            if (store := self._stores.pop(job.job_id, None)) is not None:
                self._let_go(store)
        if any(job.request_id is None for job in chain(self._loads, self._ordered.loads)):
            self._pool.free(self.prefetcher.abandon())

    def drain(self, results: Iterable[TransferResult]) -> None:
        """Give back the blocks of stores and prefetches that ended after `abandon`."""
        for result in results:
            if (store := self._stores.get(result.job_id)) is None:
                self._pool.free(self.prefetcher.drain(result))
            elif store.answers.add(result, self._storing):
                self._let_go(self._stores.pop(result.job_id))

    @property
    def has_work(self) -> bool:
        """True if the engine should run a step even if no request runs or waits."""
        told = self._redis is not None and self._redis.sessions.has_answers
        changed = bool(self.manager.table.changed) or bool(self._drops)
        looks = self._was_answered or self.prefetcher.was_settled
        return self.holds_blocks or changed or looks or told or self.has_orders

    @property
    def has_orders(self) -> bool:
        """True if a further step would at once have orders for the workers, or for the pool by `order_some`."""
        orders = self._drops or self._granted or (self.manager.to_order and not self.rests)
        return bool(orders) or (bool(self.manager.saving) and not self._stores and self._room > 0)

    @property
    def holds_blocks(self) -> bool:
        """True while a rank's result of a store or of a prefetch is due."""
        return bool(self._stores) or self.prefetcher.load is not None

    def holds_any(self) -> bool:
        """True while a store or a prefetch references blocks of the pool."""
        return self._holding > 0 or self.prefetcher.load is not None

    @property
    def is_moving(self) -> bool:
        """True while a rank's result of any transfer is due."""
        return self.holds_blocks or bool(self._loading)

    @property
    def next_deadline(self) -> float:
        """Time at which a step will have work even without further calls of the driver; infinity if never."""
        said, prefetcher = self.manager.said, self.prefetcher
        of_sessions = self.manager.due.least, said.ttls.least, said.pins.least, prefetcher.expected.least
        return min(*of_sessions, prefetcher.look_at, self._look_at)
