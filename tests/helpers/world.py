"""A small vLLM around the driver: requests, a pool of blocks, and ranks with tiers whose results come late. No tensors.

The KV of each block is known apart from what Manthan notes of it, so that a wrong one shows at the action that uses it.
"""

import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from zlib import crc32

import numpy as np
from kv import packed

from manthan.benchmarks.simulator.pool import SimulatedPool
from manthan.codec import wire
from manthan.codec.base import Section, SectionKind
from manthan.codec.errors import WireError
from manthan.manager.driver import Driver, Work
from manthan.manager.events import BlocksDropped, BlocksSaved, BlocksTrimmed, DropCause, Event, Events
from manthan.manager.pool import BlockName, Mark, Owner
from manthan.manager.session.blocks import HIGH, LOSSLESS, SAVED, FrontTier, GroupShape, MemoryShape
from manthan.manager.session.hints import NO_HINTS, Hints, parse_hints
from manthan.manager.session.manager import PointParts, Request, SessionManager, Shares
from manthan.manager.session.table import Session, qualified
from manthan.manager.tiers.arena_tier import ArenaTier, RamTier
from manthan.manager.tiers.joined import StackedTier
from manthan.manager.tiers.tier import STORE_FULL, Buffer, part_ends
from manthan.manager.transfer import NEEDED, RESET, STORE_DOWN, Transfer, TransferResult, on_each
from manthan.policies import get_policy

TOKENS = 16
SINK_TOKENS = 26  # a block, and ten tokens of the next
BOUNDS = {0: 1024, 10: 1536, TOKENS: 2048}
"""Most bytes of one rank's block, by the number of its first tokens that are kept exact."""
STATE_BOUNDS = {0: 1536}
IDLE_AFTER_S = 10.0
STORE_BLOCKS = 4
"""Most blocks of stores that nobody has gathered. The driver's own limit would be 2 for so small a pool."""
OPTIONS: dict[str, dict[str, object]] = {"returns": {"window": 64, "refit_every": 4}}
"""Of policies that learn nothing in a short test otherwise."""


@dataclass(frozen=True)
class Setup:
    """A model, its memory and its configuration.

    windows: by KV cache group, the number of last blocks that a request needs to go on; None for all.
    lossless: groups whose codec gives back every bit. states: groups whose blocks have no first tokens. levels: of the
    codec of the other groups.
    """

    ranks: int = 1
    policy: str = "lru"
    sink_tokens: int = 0
    windows: Mapping[int, int | None] = field(default_factory=lambda: {0: None})
    lossless: frozenset[int] = frozenset()
    states: frozenset[int] = frozenset()
    levels: int = 1
    pool_blocks: int = 24
    cold_blocks: int = 12
    front_blocks: int = 0
    is_exclusive: bool = False
    prefetch_lead_s: float | None = 1.0

    @property
    def stores_main(self) -> bool:
        """True if group 0 has full attention."""
        return self.windows[0] is None

    @property
    def needs_points(self) -> bool:
        """True if requests go on from resume points only."""
        return len(self.windows) > 1 or not self.stores_main

    def bounds(self, group: int) -> Mapping[int, int]:
        """Return the most bytes of one rank's block of a group."""
        bounds = STATE_BOUNDS if group in self.states else BOUNDS
        return {exact: nbytes * (3 if self.levels > 1 else 1) for exact, nbytes in bounds.items()}

    def shape(self) -> MemoryShape:
        """Return the sizes of all ranks together."""
        groups = {
            group: GroupShape(
                TOKENS,
                3000 * self.ranks,
                {exact: nbytes * self.ranks for exact, nbytes in self.bounds(group).items()},
                is_lossless=group in self.lossless,
                levels=self.levels,
            )
            for group in self.windows
        }
        return MemoryShape(groups, stores_main=self.stores_main)

    def needed(self, depth: int, others: bool = False) -> Iterator[tuple[int, int]]:
        """Yield group and position of the blocks that a request needs to go on behind `depth` blocks.

        others: leave out a group that is needed as a whole.
        """
        for group, last in self.windows.items():
            if last is not None:
                yield from ((group, at) for at in range(max(0, depth - last), depth))
            elif not others:
                yield from ((group, at) for at in range(depth))


def hashes_of(text: str) -> list[bytes]:
    """Return the block hashes of a text with one letter for each block. A hash covers all letters up to its own."""
    return [text[: at + 1].encode().ljust(TOKENS, b"_") for at in range(len(text))]


class KV(NamedTuple):
    """Content of a block of the pool, or of a compressed block.

    epoch: number of resets before the model computed it. generation: number of times that a lossy codec had it.
    is_exact: True if it is what the model computes without Manthan. is_coarse: True if it is not for requests of high
    quality.
    """

    epoch: int
    group: int
    block_hash: bytes
    generation: int = 0
    is_exact: bool = True
    is_coarse: bool = False

    @property
    def name(self) -> BlockName:
        """Group and block hash."""
        return self.group, self.block_hash

    @property
    def mark(self) -> Mark:
        """The mark that it must have."""
        return Mark.DECODED if self.generation else Mark.EXACT if self.is_exact else Mark.DERIVED


_HEAD = struct.Struct("<IhHH??16s")
_SECTION = Section(SectionKind.KEYS, "any", 1, TOKENS, 1, 8)


def encoded(kv: KV, is_lossy: bool, rank: int, bound: int, levels: int = 1) -> Buffer:
    """Return a compressed block of a size up to the bound that depends on content and rank.

    levels: beyond 1, a lossy block has fewer refinements, as many on all ranks.
    """
    head = _HEAD.pack(kv.epoch, kv.group, rank, kv.generation, kv.is_exact, is_lossy, kv.block_hash)
    seed, refinements = crc32(head), crc32(kv.block_hash) % levels if is_lossy else 0
    size = (bound - seed % 780) // (1 + refinements) // 16 * 16
    body = np.frombuffer(head.ljust(size - wire.HEADER.size - wire.ENTRY.size, b"."), np.uint8)
    block = packed(wire.BlockHeader(kv.block_hash, bytes(16), TOKENS, (_SECTION,)), [body])
    sizes = (size * ((seed >> 3 * n) % 8 + 1) // 8 - 32 for n in range(refinements))
    return wire.refined(block, [np.full(nbytes, n, np.uint8) for n, nbytes in enumerate(sizes)])


def decoded(buf: Buffer, rank: int) -> KV | None:
    """Return the KV of a compressed block; None if it is damaged."""
    try:
        block = wire.parse(buf)
    except WireError:
        return None
    if block.ignored:
        return None
    epoch, group, of_rank, generation, is_exact, is_coded, block_hash = _HEAD.unpack_from(block.payloads[0].data)
    assert of_rank == rank
    level = len(block.refinements)
    is_lossy = is_coded and level < LOSSLESS
    return KV(epoch, group, block_hash, generation + is_lossy, is_exact and not is_lossy, is_lossy and level < HIGH)


class Ram(RamTier):
    """A tier in RAM that starts no thread. Bytes of dropped blocks are erased when their room is needed."""

    def _erase_soon(self) -> None:
        pass


class Uid(NamedTuple):
    """A client that may be served what it has brought itself. number: of a session without a name."""

    owner: Owner
    number: int


NOBODY = Uid(("", ""), -1)


class WatchedPool(SimulatedPool):
    """The simulator's pool, with the KV of each block on each rank.

    busy: number of transfers that have yet to read or write a block. fresh: blocks that the model computes in the next
    step. uids: of blocks whose KV is not exact, who brought it. lost: names of blocks that requests have overwritten.
    """

    def __init__(self, blocks: int, ranks: int) -> None:
        super().__init__(blocks)
        self.epoch = 0
        self.kv: list[list[KV | None]] = [[None] * blocks for _ in range(ranks)]
        self.busy = [0] * blocks
        self.fresh: set[int] = set()
        self.uids: dict[int, Uid] = {}
        self.lost: set[BlockName] = set()
        self._is_taking = False
        self.is_asked: Callable[[bytes], bool] = lambda block_hash: False
        """True if a block is in the prompt of a request."""

    def write(self, block: int, kv: KV | None) -> None:
        """Set the content of a block on all ranks."""
        for of_rank in self.kv:
            of_rank[block] = kv

    def content(self, block: int) -> KV:
        """Return the content of a block. It is as lossy as on the worst rank: one may have stored it again already."""
        kvs = [of_rank[block] for of_rank in self.kv]
        found = [kv for kv in kvs if kv is not None]
        assert len(found) == len(kvs), f"ranks have {kvs} in block {block}"
        assert len({(kv.epoch, kv.name) for kv in found}) == 1, f"ranks have {kvs} in block {block}"
        return max(found, key=lambda kv: (kv.mark, kv.is_coarse))

    def take(self, count: int) -> list[int]:
        self._is_taking = True
        blocks = super().take(count)
        self._is_taking = False
        for block in blocks:
            assert not self.busy[block], f"block {block} is overwritten while a transfer uses it"
            self.write(block, None)
            self.uids.pop(block, None)
            self.fresh.discard(block)
        return blocks

    def free(self, block_ids: Iterable[int]) -> None:
        block_ids = list(block_ids)
        for block, times in Counter(block_ids).items():
            assert self.users(block) >= times, f"block {block} is given back by somebody who does not have it"
        super().free(block_ids)

    def cache_all(self, block_ids: Sequence[int], block_hashes: Sequence[bytes], group: int = 0) -> None:
        for block, block_hash in zip(block_ids, block_hashes, strict=True):
            kv = self.content(block)
            assert kv.name == (group, block_hash), f"{kv} is entered as {block_hash!r} of group {group}"
            assert kv.epoch == self.epoch, f"{kv} is of an epoch before {self.epoch}"
            self.lost.discard(kv.name)
        super().cache_all(block_ids, block_hashes, group)

    def release(self, group: int, block_hashes: Iterable[bytes]) -> None:
        block_hashes = list(block_hashes)
        for block_hash in block_hashes:  # an answer that is the same as one that is forgotten goes with it
            if any(map(self.users, self._blocks_of(group, [block_hash]))) and not self.is_asked(block_hash):
                self.lost.add((group, block_hash))
        super().release(group, block_hashes)

    def named(self) -> Iterator[tuple[int, BlockName]]:
        """Yield the blocks that hold something, and their names."""
        return ((block, name) for block, name in enumerate(self._name) if name is not None)

    def _lose(self, block: int) -> None:
        name = self._name[block]
        super()._lose(block)
        if self._is_taking and name is not None and name not in self._cached:
            self.lost.add(name)


@dataclass(eq=False)
class Asked:
    """A request as vLLM has it.

    hashes: of prompt and answer. prompt: number of full blocks of the prompt. rest: tokens of it behind them.
    known: number of blocks whose tokens are known. blocks: that it references, by group and position. had: number of
    first blocks with KV. resident, end: what is loaded is between them. is_private: True if nothing of it may reach a
    tier.
    """

    request: Request
    hashes: list[bytes]
    prompt: int
    rest: int
    uid: Uid
    is_private: bool
    known: int
    blocks: dict[tuple[int, int], int] = field(default_factory=dict)
    had: int = 0
    resident: int = 0
    end: int = 0
    is_running: bool = False
    is_loading: bool = False
    was_loaded: bool = False
    is_gone: bool = False
    is_lossy: bool = False

    @property
    def request_id(self) -> str:
        """Id of the request."""
        return self.request.request_id

    @property
    def wants_exact(self) -> bool:
        """True if it asked for exact KV."""
        return self.request.hints.quality == "exact"

    @property
    def tokens(self) -> int:
        """Number of tokens known."""
        return self.known * TOKENS + self.rest

    @property
    def waits(self) -> bool:
        """True if it may be admitted."""
        return not self.is_running and not self.is_loading


@dataclass(eq=False)
class Job:
    """A transfer on one rank. copies: what a store has gathered. epoch: in which it began."""

    transfer: Transfer
    rank: int
    epoch: int
    copies: list[KV] | None = None
    is_cancelled: bool = False


class Stored(NamedTuple):
    """A compressed block that one rank has, the mark of what was encoded, and its bytes of the budget.

    is_bad: True if it was lost or damaged.
    """

    kv: KV
    mark: Mark
    nbytes: int
    is_bad: bool = False


class Report(NamedTuple):
    """A rank's word on a job: a result, or None for "gathered"."""

    job: Job
    result: TransferResult | None


class World:
    """Does what the driver orders, as vLLM and the workers do, and asserts what must hold at each action."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        policy, shape, front = get_policy(setup.policy), setup.shape(), setup.front_blocks
        self.events = Events()
        self.manager = SessionManager(
            policy,
            shape,
            setup.cold_blocks * shape.groups[0].cold_nbytes,
            IDLE_AFTER_S,
            self.events,
            options=policy.Options(**OPTIONS.get(setup.policy, {})),
            shares=Shares(pinned=0.5, tenants={"small": 0.5}),
            sink_tokens=setup.sink_tokens,
            is_exclusive=setup.is_exclusive,
        )
        self.manager.enough = 2
        self.pool = WatchedPool(setup.pool_blocks, setup.ranks)
        self.pool.is_asked = self._is_asked
        self.driver = Driver(
            self.manager,
            self.pool,
            ranks=setup.ranks,
            low=0.25,
            high=0.5,
            fronts=[FrontTier(front * shape.groups[0].cold_nbytes, True)] if front else [],
            prefetch_lead_s=setup.prefetch_lead_s,
            weigh=on_each(setup.ranks),
        )
        self.driver._window = STORE_BLOCKS
        self.events.subscribe(self._happened)
        self.tiers = [self._tier() for _ in range(setup.ranks)]
        self.stored: list[dict[BlockName, Stored]] = [{} for _ in range(setup.ranks)]
        """What each rank's tier must have."""
        self.torn: set[tuple[int, BlockName]] = set()
        """Ranks and blocks of which a store has failed midway, until they are dropped or stored."""
        self.jobs: list[Job] = []
        """Transfers that ranks work on."""
        self.reports: list[list[Report]] = [[] for _ in range(setup.ranks)]
        """What each rank has to say, the first first."""
        self.unanswered: Counter[int] = Counter()
        """By job id, the number of ranks from which the driver has no result."""
        self.reading: dict[int, Transfer] = {}
        """Loads under way whose blocks nobody may drop."""
        self.asked: list[Asked] = []
        self.loading: dict[str, tuple[Asked, list[Transfer], dict[BlockName, str]]] = {}
        """By request id, requests whose load has not ended, its jobs, and what has failed. Some requests are gone."""
        self.seen: Counter[str] = Counter()
        """What came to pass, for tests that it did."""
        self.allowed: set[bytes] = set()
        """Block hashes of requests whose KV may be stored."""
        self.brought: dict[bytes, set[Uid]] = {}
        """By block hash, clients that had it in a prompt or an answer."""
        self.kept: dict[Session, list[bytes]] = {}
        """Saved blocks of heads that sessions keep, when all was checked last."""
        self._private: dict[Session, bool] = {}
        self._numbers: dict[Owner, int] = {}
        self.now, self.count, self.taken, self.clears = 0.0, 0, 0, False

    def _is_asked(self, block_hash: bytes) -> bool:
        return any(block_hash in asked.hashes[: asked.prompt] for asked in self.asked)

    def _tier(self) -> Ram | StackedTier:
        behind = Ram(self.setup.cold_blocks * self.setup.bounds(0)[0])
        front = self.setup.front_blocks * self.setup.bounds(0)[0]
        return StackedTier(Ram(front), behind) if front else behind

    @property
    def rams(self) -> list[ArenaTier]:
        """The tier of each rank that has all blocks."""
        return [tier.behind if isinstance(tier, StackedTier) else tier for tier in self.tiers]  # type: ignore[misc]

    def _know(self, session: Session) -> None:
        """Note which session without a name has an id now."""
        if session.owner[1] == f"#{session.number}":
            self._numbers[session.owner] = session.number

    def _uid(self, owner: Owner) -> Uid:
        return Uid(owner, self._numbers.get(owner, 0))

    # -- requests -------------------------------------------------------------------------------------

    def start(self, text: str, prompt: int, rest: int, name: str | None, tenant: str, hints: dict[str, object]) -> None:
        """A request comes. rest: tokens of its prompt behind the full blocks."""
        self.count += 1
        hashes, parsed = hashes_of(text), parse_hints(hints) if hints else NO_HINTS
        request = self.manager.request_started(
            f"r{self.count}",
            hashes[:prompt],
            name,
            self.now,
            tokens=prompt * TOKENS + rest,
            hints=parsed,
            tenant=tenant,
            tail=bytes(rest),
        )
        self.driver.started(request, (prompt + 1) * len(self.setup.windows))
        session = request.session
        assert session.tenant == tenant, "the session is another tenant's"
        assert name in (None, session.name), "the session has another name"
        self._know(session)
        if parsed.store is not None:
            self._say_store(session, parsed.store)
        is_private = self._private.get(session, False)
        uid = self._uid(session.owner)
        self.asked.append(Asked(request, hashes, prompt, rest, uid, is_private, prompt))

    def _say_store(self, session: Session, may_store: bool) -> None:
        """Note what a client said of all sessions of a name. What it allows may be of earlier requests."""
        sessions = self.manager.table.by_id.values()
        named = [one for one in sessions if (one.tenant, one.name) == (session.tenant, session.name or "")]
        for one in {session, *named}:
            self._private[one] = not may_store
            if may_store:
                self.allowed.update(self.manager.blocks.hashes(one.rows))
                for asked in self.asked:
                    asked.is_private &= asked.request.session is not one
                    self._allow(asked, len(asked.hashes))

    def _hits(self, asked: Asked, usable: int) -> int:
        """Return how many blocks the pool may serve, where all that is needed behind them is there."""
        hashes, found = asked.hashes[:usable], {}
        for group in self.setup.windows:
            ids = self.pool.lookup(group, hashes)
            found[group] = [at for at, block in enumerate(ids) if block >= 0 and self._serves(asked, block)]
        whole = next((at for at in range(usable) if at not in found[0]), usable) if self.setup.stores_main else usable
        return next(
            depth for depth in range(whole, -1, -1) if all(at in found[g] for g, at in self.setup.needed(depth, True))
        )

    def _serves(self, asked: Asked, block: int) -> bool:
        return self.pool.marks.serves(block, self.driver.asker(asked.request_id))

    def admit(self, asked: Asked, chunk: int) -> None:
        """Give a waiting request its blocks, and load what is saved, or compute its first `chunk` blocks."""
        if asked.was_loaded:
            self._admit_loaded(asked, chunk)
            return
        usable = self.driver.usable(asked.tokens)
        resident = self._hits(asked, usable)
        count = self.driver.matched(asked.request_id, resident, usable, len(asked.hashes), self.now)
        if count is None:
            self.seen["asked to wait"] += 1
            return
        end = resident + count
        held = {
            (group, at): block
            for group, at in self.setup.needed(resident)
            for block in self.pool.lookup(group, [asked.hashes[at]])
        }
        more = [part for part in self.setup.needed(end) if part[1] >= resident] if count else []
        free = len(self.pool) - sum(not self.pool.users(block) for block in held.values())
        if len(more) > free or (not count and free < 2 * len(self.setup.windows)):
            return
        self.pool.hold(held.values())
        asked.blocks, asked.had, asked.resident = held, resident, resident
        asked.is_lossy = False
        for block in held.values():
            self._check_served(asked, block, self.pool.content(block))
        if not count:
            self._tell_hits(asked)
            asked.is_running = True
            self._compute(asked, max(1, chunk))
            self.driver.admitted(asked.request_id, resident, usable, len(asked.blocks))
            return
        self._allow(asked, end)
        asked.blocks |= zip(more, self.pool.take(len(more)), strict=True)
        self.driver.admitted(asked.request_id, resident, usable, len(asked.blocks))
        self._tell_hits(asked)
        self._load(asked, end, more)

    def _tell_hits(self, asked: Asked) -> None:
        ids = [[block for (of, _), block in asked.blocks.items() if of == group] for group in self.setup.windows]
        self.driver.hits(asked.request_id, ids)

    def _check_served(self, asked: Asked, block: int, kv: KV) -> None:
        """Assert that a request may have this KV."""
        assert kv.epoch == self.pool.epoch, f"{kv} is of an epoch before {self.pool.epoch}"
        if not kv.is_exact:
            asked.is_lossy = True
            assert not asked.wants_exact, "exact KV was asked for"
            assert not kv.is_coarse or asked.request.hints.quality != "high", "fine KV was asked for"
            assert self.pool.uids[block] == asked.uid, f"{self.pool.uids[block]} brought what {asked.uid} is served"

    def _admit_loaded(self, asked: Asked, chunk: int) -> None:
        """Go on behind what was loaded. vLLM tells connectors of such a request's blocks again."""
        if len(self.pool) < 2 * len(self.setup.windows):
            return
        self._tell_hits(asked)
        self.driver.admitted(asked.request_id, 0, self.driver.usable(asked.tokens), len(asked.blocks))
        asked.was_loaded, asked.is_running = False, True
        self._compute(asked, max(1, chunk))

    def _load(self, asked: Asked, end: int, parts: Sequence[tuple[int, int]]) -> None:
        saved = [part for part in parts if part[0] or self.setup.stores_main]
        if not self.setup.stores_main:
            saved = list(parts)
        for group, at in saved:
            name = group, asked.hashes[at]
            assert all(name in stored for stored in self.stored), f"{name} is offered and not in a tier"
        main, beside = [], []
        for group, last in self.setup.windows.items():
            of_group = [at for of, at in parts if of == group]
            ids = [asked.blocks[group, at] for at in of_group]
            if last is None:
                main = ids
            elif of_group:
                beside.append((group, [asked.hashes[at] for at in of_group], ids))
        self.driver.loading(asked.request_id, asked.resident, end, main, beside)
        jobs = list(self.driver.loads_of(asked.request_id))
        assert sum(map(len, jobs)) == len(parts), "a load does not write all of its blocks"
        asked.is_loading, asked.end = True, end
        self.loading[asked.request_id] = asked, jobs, {}
        self._begin(jobs)

    def _begin(self, jobs: Iterable[Transfer]) -> None:
        """Note that nobody may drop what these loads read, nor touch the blocks that they write."""
        for job in jobs:
            self.reading[job.job_id] = job
            self._occupy(job)

    def _occupy(self, job: Transfer) -> None:
        for block in job.block_ids.tolist():
            assert self.pool.users(block), f"a transfer uses block {block}, which nobody references"
            self.pool.busy[block] += self.setup.ranks
        self.unanswered[job.job_id] = self.setup.ranks

    def _compute(self, asked: Asked, count: int) -> None:
        """Schedule the next `count` blocks of a running request, as far as there is room."""
        pool, windows = self.pool, self.setup.windows
        end = min(len(asked.hashes), asked.had + count, asked.had + len(pool) // len(windows))
        self._allow(asked, end)
        new = range(asked.had, end)
        for group in windows:
            missing = [at for at in new if (group, at) not in asked.blocks]
            asked.blocks |= zip([(group, at) for at in missing], pool.take(len(missing)), strict=True)
            self.taken += len(missing)
            ids, hashes = [asked.blocks[group, at] for at in new], asked.hashes[new.start : new.stop]
            for block, block_hash in zip(ids, hashes, strict=True):
                pool.write(block, KV(pool.epoch, group, block_hash, is_exact=not asked.is_lossy))
                pool.fresh.add(block)
                if asked.is_lossy:
                    pool.uids[block] = asked.uid
            self.driver.computed(asked.request_id, ids)
            pool.cache_all(ids, hashes, group)
        assert not (asked.is_lossy and asked.wants_exact), "exact KV was asked for"
        asked.had, asked.known = end, max(asked.known, end)
        needed = set(self.setup.needed(end))
        passed = [part for part in asked.blocks if part not in needed]
        pool.free([asked.blocks.pop(part) for part in sorted(passed, reverse=True)])

    def compute(self, asked: Asked, count: int) -> None:
        """A running request goes on."""
        self._compute(asked, count)

    def _allow(self, asked: Asked, end: int) -> None:
        """Note the blocks that a request has now."""
        if not asked.is_private:
            self.allowed.update(asked.hashes[:end])

    def preempt(self, asked: Asked) -> None:
        """Take a running request's blocks, or those of one that was loaded. The driver is not told."""
        self._free(asked)
        asked.had, asked.is_running, asked.is_loading, asked.was_loaded = 0, False, False, False

    def _free(self, asked: Asked) -> None:
        self.pool.free([asked.blocks[part] for part in sorted(asked.blocks, reverse=True)])
        asked.blocks = {}

    def crowd(self, most: int) -> None:
        """Requests take up to `most` blocks and give them back, holding nothing that anybody could find."""
        blocks = self.pool.take(min(most, len(self.pool)))
        self.taken += len(blocks)
        self.pool.free(blocks)

    def finish(self, asked: Asked, missing: int, is_claimed: bool = False) -> None:
        """A request ends, without its last `missing` blocks.

        is_claimed: count the blocks of a load that has not ended, as vLLM does.
        """
        self.asked.remove(asked)
        asked.is_gone = True
        had = asked.end * is_claimed if asked.is_loading else asked.had
        had = max(0, had - missing)
        hashes, session = asked.hashes[:had], asked.request.session
        depths = dict.fromkeys((had, min(had, self.driver.usable(asked.prompt * TOKENS + asked.rest))))
        points = [
            PointParts(depth, [(group, hashes[at], at) for group, at in self.setup.needed(depth, True)])
            for depth in depths
            if depth and self.setup.needs_points
        ]
        self._allow(asked, had)
        for block_hash in hashes:
            self.brought.setdefault(block_hash, set()).add(asked.uid)
        was_out = self._private.get(session, False)
        outcome = self.driver.finished(asked.request_id, hashes, self.now, asked.tokens, points)
        assert outcome is not None
        home = self.manager.table.by_id.get(qualified(outcome.session_id, session.tenant))
        if home is not None and home is not session:
            self._private[home] = was_out or self._private.get(home, False)
            self._know(home)
            for block_hash in hashes:
                self.brought[block_hash].add(self._uid(home.owner))
        if not asked.is_loading:
            self._free(asked)

    # -- a step ---------------------------------------------------------------------------------------

    def step(self) -> None:
        """The driver orders; the model computes what was scheduled; the ranks begin."""
        driver = self.driver
        if driver.wanted(self.now):
            for asked in self.asked:
                if asked.is_running:
                    driver.cached(asked.request_id, asked.had)
        before = driver.prefetcher.load
        work = driver.step(self.taken, self.now)
        assert driver.runway._left <= self.pool.runway(self.pool.size), "fewer free blocks are saved than it counts"
        self.taken = 0
        load = driver.prefetcher.load
        if load is not before and load is not None:
            session = self.manager.table.by_number[load.number]
            assert {job.tenant for job in load.answers.jobs} <= {session.tenant}
            self._begin(load.answers.jobs)
        self.pool.fresh.clear()
        for job in work.stores:
            self._occupy(job)
            again = all((job.group, block_hash) in self.stored[0] for block_hash in job.block_hashes)
            self.seen["stored again"] += again
        for rank in range(self.setup.ranks):
            self._take_orders(rank, work)
        self.clears = False
        driver.sent()
        self.seen["revoked"] += work.revokes

    def _take_orders(self, rank: int, work: Work) -> None:
        tier, stored = self.tiers[rank], self.stored[rank]
        if work.revokes:
            for job in [job for job in self.jobs if job.rank == rank and job.transfer.direction == "store"]:
                if job.copies is None:
                    self._refuse(job, NEEDED)
        if self.clears:
            self.tiers[rank] = tier = tier.cleared("")
            stored.clear()
        for drop in work.drops:
            if isinstance(drop, BlocksTrimmed):
                self._trim(rank, drop)
                continue
            tier.drop(drop.group, drop.block_hashes)
            for block_hash in drop.block_hashes:
                stored.pop((drop.group, block_hash), None)
                self.torn.discard((rank, (drop.group, block_hash)))
        self.jobs += [Job(job, rank, self.pool.epoch) for job in (*work.loads, *work.stores)]

    def _trim(self, rank: int, trim: BlocksTrimmed) -> None:
        tier, stored = self.tiers[rank], self.stored[rank]
        tier.trim(trim.group, trim.block_hashes, trim.level + 1)
        for block_hash in trim.block_hashes:
            if (known := stored.get(name := (trim.group, block_hash))) is not None:
                [buf] = tier.read(trim.group, [block_hash])
                kv = decoded(buf, rank) if isinstance(buf, np.ndarray) else None  # what was damaged may be cut away
                assert known.is_bad or (kv is not None and len(part_ends(buf)) == trim.level + 1)
                nbytes = tier.room(buf.nbytes) if isinstance(buf, np.ndarray) else 0
                stored[name] = Stored(known.kv if kv is None else kv, known.mark, nbytes, kv is None)

    # -- ranks ----------------------------------------------------------------------------------------

    def work(self, job: Job, cause: str = "", at: int = 0) -> None:
        """A rank does the next thing for a job. cause: of its failure, at one of its blocks."""
        if job.transfer.direction == "load":
            self._read(job, cause, at % len(job.transfer))
        elif job.copies is None:
            self._gather(job, cause)
        else:
            self._put(job, cause, at % len(job.transfer))

    def _release(self, job: Job) -> None:
        for block in job.transfer.block_ids.tolist():
            self.pool.busy[block] -= 1

    def _refuse(self, job: Job, cause: str) -> None:
        self._release(job)
        if job.transfer.direction == "store":
            self.reports[job.rank].append(Report(job, None))
        self._end(job, TransferResult.refused(job.transfer, cause))

    def _end(self, job: Job, result: TransferResult) -> None:
        self.jobs.remove(job)
        self.reports[job.rank].append(Report(job, result))

    def _gather(self, job: Job, cause: str) -> None:
        transfer, rank = job.transfer, job.rank
        if job.is_cancelled or cause == "internal":
            self._refuse(job, RESET if job.is_cancelled else cause)
            return
        job.copies = []
        for block, block_hash in zip(transfer.block_ids.tolist(), transfer.block_hashes, strict=True):
            kv = self.pool.kv[rank][block]
            assert kv is not None, f"block {block} is stored and holds nothing"
            assert block not in self.pool.fresh, f"{kv} is stored before it is computed"
            assert kv.name == (transfer.group, block_hash), f"{kv} is stored as {block_hash!r}"
            assert kv.epoch == job.epoch, f"{kv} is of an epoch before {job.epoch}"
            assert not kv.generation, f"decoded KV of {block_hash!r} is encoded again"
            assert kv.mark is transfer.mark, f"{kv} is stored as {transfer.mark!r}"
            job.copies.append(kv)
        self._release(job)
        self.reports[rank].append(Report(job, None))
        self.seen[f"encoded {transfer.mark.name.lower()}"] += 1

    def _put(self, job: Job, cause: str, bad: int) -> None:
        transfer, rank = job.transfer, job.rank
        assert job.copies is not None
        group, tier, stored = transfer.group, self.tiers[rank], self.stored[rank]
        bounds, nbytes, failed = self.setup.bounds(group), [0] * len(transfer), {}
        inner: dict[int, list[int]] = {}
        if group not in self.setup.states:
            assert transfer.first_token == TOKENS * (len(transfer.block_hashes[0].rstrip(b"_")) - 1)
        for at, (kv, exact) in enumerate(zip(job.copies, transfer.exacts(TOKENS), strict=True)):
            name = group, kv.block_hash
            if job.is_cancelled or (cause and at >= bad):
                failed[at] = RESET if job.is_cancelled else cause
                if cause == "disk":  # a put that fails midway leaves nothing, also of what was there before
                    tier.drop(group, [kv.block_hash])
                    stored.pop(name, None)
                    self.torn.add((rank, name))
                continue
            is_lossy = exact < TOKENS and group not in self.setup.lossless
            buf = encoded(kv, is_lossy, rank, bounds[exact], self.setup.levels)
            assert kv.block_hash in self.allowed, f"{name} is stored, and only requests that may not be had it"
            refused = tier.put_all(group, {kv.block_hash: buf}, transfer.tenant)
            assert not refused, f"a tier has no room for what was reserved: {refused}"
            *fewer, nbytes[at] = tier.rooms(buf)
            if fewer:
                inner[at] = fewer
            now = decoded(buf, rank)
            assert now is not None
            stored[name] = Stored(now, kv.mark, nbytes[at])
            self.torn.discard((rank, name))
        used, most = self.rams[rank].used, self.rams[rank].max_bytes
        assert used <= most, f"{used} bytes are used of {most}"
        self._end(job, TransferResult(transfer.job_id, np.array(nbytes, np.int64), failed, 0.1, inner))

    def _read(self, job: Job, cause: str, bad: int) -> None:
        transfer, rank = job.transfer, job.rank
        stored, nbytes, failed = self.stored[rank], [0] * len(transfer), dict[int, str]()
        is_void = transfer.job_id not in self.reading
        if cause == STORE_DOWN:
            bad = 0
        found = self.tiers[rank].read(transfer.group, transfer.block_hashes, transfer.tenant)
        for at, buf in enumerate(found):
            name, block = (transfer.group, transfer.block_hashes[at]), int(transfer.block_ids[at])
            assert self.pool.users(block), f"{name} is loaded into block {block}, which nobody references"
            is_bad = (known := stored.get(name)) is not None and known.is_bad
            if job.is_cancelled or (cause and at == bad):
                failed[at] = RESET if job.is_cancelled else cause
            elif not isinstance(buf, np.ndarray):
                assert is_void or is_bad or (rank, name) in self.torn, f"{name} was dropped while it was read"
                failed[at] = "missing"
            elif (kv := decoded(buf, rank)) is None:
                assert is_bad, f"{name} is damaged"
                failed[at] = "corrupt"
            else:
                assert kv.name == name, f"{kv} is loaded as {name}"
                assert is_void or kv.epoch == self.pool.epoch, f"{kv} is of an epoch before {self.pool.epoch}"
                if not failed:
                    self.pool.kv[rank][block] = kv
                    nbytes[at] = self.tiers[rank].room(buf.nbytes)
        self._release(job)
        self._end(job, TransferResult(transfer.job_id, np.array(nbytes, np.int64), failed, 0.1))

    def spoil(self, rank: int, which: int, is_lost: bool) -> None:
        """A rank's tier loses a compressed block, or damages it."""
        stored, tier = self.stored[rank], self.tiers[rank]
        names = [name for name, each in stored.items() if not each.is_bad and not self._is_storing(name)]
        if not names:
            return
        group, block_hash = name = names[which % len(names)]
        stored[name] = stored[name]._replace(is_bad=True)
        if is_lost:
            tier.drop(group, [block_hash])
            return
        rams = [tier.front, tier.behind] if isinstance(tier, StackedTier) else [tier]
        for ram in rams:
            assert isinstance(ram, Ram)
            if (placed := ram._blocks.get(name)) is not None:
                at = placed.nbytes // 2
                for piece in ram._pieces(placed.extents, placed.nbytes):
                    if 0 <= at < len(piece):
                        piece[at] ^= 1
                    at -= len(piece)

    def _is_storing(self, name: BlockName) -> bool:
        return any(name == (job.transfer.group, each) for job in self.jobs for each in job.transfer.block_hashes)

    # -- results --------------------------------------------------------------------------------------

    def report(self, rank: int, most: int) -> None:
        """The driver hears the first of what a rank has to say."""
        reports = self.reports[rank]
        said, reports[:] = reports[:most], reports[most:]
        for job, result in said:
            if result is None:
                self.driver.gathered([job.transfer.job_id])
            else:
                self._answer(job, result)

    def _answer(self, job: Job, result: TransferResult) -> None:
        job_id, request_id = result.job_id, job.transfer.request_id
        self.unanswered[job_id] -= 1
        prefetch = self.driver.prefetcher.load
        if not self.unanswered[job_id]:
            del self.unanswered[job_id]
        is_load = job.transfer.direction == "load"
        if is_load and request_id is None and prefetch is not None:
            is_last = all(not self.unanswered[each.job_id] for each in prefetch.answers.jobs)
            self.unanswered = +self.unanswered
            if is_last:
                self._owns(prefetch.number, prefetch.answers.jobs)
        if is_load and request_id is not None:
            asked, jobs, failed = self.loading[request_id]
            failed |= {(job.transfer.group, job.transfer.block_hashes[at]): why for at, why in result.failed.items()}
            is_last = not any(each.job_id in self.unanswered for each in jobs)
            if is_last:
                del self.loading[request_id]
                for each in jobs:
                    self.reading.pop(each.job_id, None)
            self.driver.answered([result], self.now)
            if is_last:
                self._end_load(asked, jobs, failed)
            return
        self.driver.answered([result], self.now)

    def _owns(self, number: int, jobs: Sequence[Transfer]) -> None:
        """Note who brought what a prefetch has loaded."""
        session = self.manager.table.by_number.get(number)
        for job in jobs:
            self.reading.pop(job.job_id, None)
            for block in job.block_ids.tolist():
                self.pool.uids[block] = NOBODY if session is None else self._uid(session.owner)

    def _end_load(self, asked: Asked, jobs: Sequence[Transfer], failed: Mapping[BlockName, str]) -> None:
        """vLLM hears that a load has ended, and what it may not use."""
        self.seen["load failed" if failed else "loaded"] += 1
        asked.is_loading = False
        if asked.is_gone:
            self._free(asked)
            return
        if failed and self.setup.needs_points:  # nothing of it is used
            self.preempt(asked)
            return
        good = 0
        for job in jobs:
            names = [(job.group, block_hash) for block_hash in job.block_hashes]
            count = next((at for at, name in enumerate(names) if name in failed), len(names))
            ids = job.block_ids.tolist()[:count]
            for block, name in zip(ids, names, strict=False):
                kv = self.pool.content(block)
                if not kv.is_exact:
                    assert asked.uid in self.brought.get(name[1], ()), f"{asked.uid} did not bring {name}"
                    self.pool.uids[block] = asked.uid
                self._check_served(asked, block, kv)
            good = max(good, count)
            self.driver.computed(asked.request_id, ids)
            self.pool.cache_all(ids, job.block_hashes[:count], job.group)
        asked.had = asked.end if self.setup.needs_points else asked.resident + good
        asked.was_loaded = True

    # -- what the driver says -------------------------------------------------------------------------

    def _happened(self, event: Event) -> None:
        if isinstance(event, BlocksDropped):
            self.seen[f"dropped of {min(event.group, 1)}: {event.cause}"] += 1
            self._check_drop(event)
        elif isinstance(event, BlocksTrimmed):
            self.seen[f"cut to level {event.level}"] += 1
            self._check_trim(event)
        elif isinstance(event, BlocksSaved):
            for block_hash in event.block_hashes:
                assert all((event.group, block_hash) in stored for stored in self.stored), "a rank did not store it"
        else:
            self.seen[type(event).__name__] += 1

    def _check_trim(self, event: BlocksTrimmed) -> None:
        """Assert that blocks which are cut have refinements, and that nobody reads, keeps or shares them."""
        names = {(event.group, block_hash) for block_hash in event.block_hashes}
        read = {(job.group, block_hash) for job in self.reading.values() for block_hash in job.block_hashes}
        assert not names & read, f"{names & read} are cut while they are read"
        blocks = self.manager.blocks
        for row in blocks.find(event.group, event.block_hashes).tolist():
            found = blocks.level[row] > event.level, blocks.status[row], blocks.users[row]
            assert found == (True, SAVED, 1), f"{blocks.name(row)} is cut to level {event.level}, and is {found}"
            sessions = self.manager.table.by_id.values()
            [user] = [one for one in sessions if row in one.rows or any(row in point.rows for point in one.points)]
            is_kept = user.is_pinned or row in user.rows[: user.kept]
            assert not is_kept, f"a block that {user.session_id} keeps is cut"

    def _check_drop(self, event: BlocksDropped) -> None:
        """Assert that nobody needs what is dropped."""
        cause, group = event.cause, event.group
        if cause is DropCause.RESET:
            return
        names = {(group, block_hash) for block_hash in event.block_hashes}
        read = {(job.group, block_hash) for job in self.reading.values() for block_hash in job.block_hashes}
        assert not names & read, f"{names & read} are dropped while they are read"
        if cause in (DropCause.FAILED, DropCause.NOT_STORED):
            return
        blocks = self.manager.blocks
        if cause in (DropCause.BUDGET, DropCause.REDUNDANT) and group == self.manager.shape.session_group:
            for session, hashes in self.kept.items():
                lost = set(hashes[: session.kept]) & set(event.block_hashes)
                assert not lost, f"{lost} of a head that {session.session_id} keeps make room"
        for block_hash in event.block_hashes:
            row = blocks.row(group, block_hash)
            if row < 0:
                continue
            depth = int(blocks.depth[row])
            users = [s for s in self.manager.table.by_id.values() if s.has(row, depth)]
            users += [s for s in self.manager.table.by_id.values() for point in s.points if row in point.rows]
            if not users:
                continue
            assert cause in (DropCause.BUDGET, DropCause.REDUNDANT), (
                f"{block_hash!r} is dropped, {cause}, and {len(users)} sessions use it"
            )
            assert len(users) == 1, f"{block_hash!r} makes room, and {len(users)} sessions use it"
            assert not users[0].is_pinned, f"{block_hash!r} of a pinned session makes room"
            [block] = self.pool.lookup(group, [block_hash])
            assert block >= 0, f"{block_hash!r} makes room, and the session that keeps it has it nowhere"
            assert not self.pool.content(block).generation, f"{block_hash!r} makes room, and the pool has it decoded"

    # -- resets ---------------------------------------------------------------------------------------

    def reset(self, clears_pool: bool) -> None:
        """All KV is dropped, while transfers are under way. clears_pool: vLLM drops its own, too."""
        if clears_pool:
            for asked in list(self.asked):
                if asked.is_loading:
                    self.finish(asked, 0)
                else:
                    self.preempt(asked)
            self.pool.clear()
            self.pool.epoch += 1
        self.reading.clear()
        self.driver.reset(self.now)
        self.clears = True
        if clears_pool:
            self.driver.forget_resident(self.now)

    def halt(self) -> None:
        """Transfers are about to end, one way or the other."""
        self.driver.halt(self.now)
        for job in self.jobs:
            job.is_cancelled = True

    def go_on(self) -> None:
        """Transfers may begin again."""
        self.driver.rests = False

    def forget_resident(self) -> None:
        """vLLM drops what the pool has, once no transfer is under way."""
        for asked in self.asked:
            self.preempt(asked)
        self.pool.clear()
        self.driver.forget_resident(self.now)

    # -- questions ------------------------------------------------------------------------------------

    def offered(self, hashes: Sequence[bytes]) -> int:
        """Return how many of these blocks a session that has brought them could load."""
        rows = self.manager.blocks.find(self.manager.shape.session_group, hashes)
        count = next((at for at, row in enumerate(rows.tolist()) if row < 0), len(rows))
        asker = Session("probe", None, "", 0, 0, 0)
        probe = Request("probe", asker, hashes, rows[:count], len(rows) * TOKENS, self.now, Hints(), count)
        return self.manager.match(probe, 0, count)

    def check(self) -> None:
        """Assert that pool and tiers are as the manager believes."""
        self._check_marks()
        self._check_stored()
        self._check_holes()
        blocks, sessions = self.manager.blocks, self.manager.table.by_id.values()
        self.kept = {one: blocks.hashes(one.rows[: min(one.kept, blocks.saved_prefix(one.rows))]) for one in sessions}

    def _check_marks(self) -> None:
        for block, name in self.pool.named():
            kv, mark = self.pool.content(block), self.pool.marks[block]
            assert mark is kv.mark, f"{kv} is marked {mark.name}"
            assert kv.name == name, f"{kv} is named {name}"
            assert kv.is_exact or block in self.pool.uids, f"nobody has brought {kv}"

    def _check_stored(self) -> None:
        blocks, shape = self.manager.blocks, self.manager.shape
        rows = blocks.rows()
        rows = rows[blocks.group[rows] >= 0]
        names = list(zip(blocks.group[rows].tolist(), blocks.hashes(rows), strict=True))
        status = dict(zip(names, blocks.status[rows].tolist(), strict=True))
        dropped = {(each.group, block_hash) for each in self.driver._drops for block_hash in each.block_hashes}
        cut = {
            (each.group, block_hash)
            for each in self.driver._drops
            if isinstance(each, BlocksTrimmed)
            for block_hash in each.block_hashes
        }
        for rank, stored in enumerate(self.stored):
            there = {name for name, each in stored.items() if not each.is_bad}
            has = set(self.rams[rank]._blocks)
            assert there <= has <= stored.keys(), "a tier has other blocks than it was given"
            if not self.clears:
                left = {name for name in stored if not status.get(name)} - dropped
                assert not left, f"{left} stay in a tier, and nobody removes them"
        if self.clears:
            return
        saved = rows[blocks.is_saved(rows) & ~np.isin(rows, list(self.manager._torn))]
        columns = (blocks.nbytes, blocks.exact, blocks.mark, blocks.level, blocks.status)
        for name, nbytes, exact, mark, level, state in zip(
            zip(blocks.group[saved].tolist(), blocks.hashes(saved), strict=True),
            *(column[saved].tolist() for column in columns),
            strict=True,
        ):
            if state != SAVED or name in cut:  # it is being replaced, or ranks are about to cut it
                continue
            each = [stored.get(name) for stored in self.stored]
            assert None not in each, f"{name} counts as saved, and a tier does not have it"
            kvs = {one.kv for one in each if one is not None}
            is_whole = not any(one.is_bad for one in each if one is not None)
            if not is_whole:
                continue
            assert len(kvs) == 1, f"ranks have {kvs}"
            [kv] = kvs
            refinements = [len(ram._blocks[name].inner) for ram in self.rams]
            assert refinements == [level] * len(self.rams), f"{name} counts as of level {level}, not {refinements}"
            assert kv.epoch == self.pool.epoch, f"{kv} is of an epoch before {self.pool.epoch}"
            assert nbytes == self.setup.ranks * max(one.nbytes for one in each if one is not None)
            assert mark in {one.mark for one in each if one is not None}, f"{kv} has the mark {mark}"
            is_whole = shape.groups[name[0]].is_lossless or exact >= shape.groups[name[0]].tokens
            is_exact = (is_whole or level == LOSSLESS) and mark == Mark.EXACT
            assert kv.is_exact == is_exact, f"{kv} counts as exact: {is_exact}"

    def _check_holes(self) -> None:
        """Assert that no session keeps a block which neither a tier nor the pool has.

        Left out are blocks that were overwritten, which the manager finds out later, and those that a request has in
        its prompt: it computes them, unless it is aborted.
        """
        if not self.setup.stores_main:
            return
        blocks = self.manager.blocks
        for session in self.manager.table.by_id.values():
            rows = session.rows[blocks.status[session.rows] == 0]
            names = [(0, block_hash) for block_hash in blocks.hashes(rows)]
            self.pool.lost.update(name for row, name in zip(rows, names, strict=True) if blocks.holds[row])
            if session.requests:
                continue
            found = self.pool.lookup(0, [block_hash for _, block_hash in names])
            nowhere = {name for name, block in zip(names, found, strict=True) if block < 0} - self.pool.lost
            assert not nowhere, f"{session.session_id} has {nowhere} nowhere"


FAULTS = {"store": ("disk", STORE_FULL, STORE_DOWN, "internal"), "load": ("disk", STORE_DOWN)}
"""Causes of failures, by the direction of a transfer."""
