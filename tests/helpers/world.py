"""A small vLLM around the manager: a pool of bf16 blocks, ranks with cold stores, requests. No tensors, no threads.

A block's content is its key and the epoch in which it was computed; a reset begins a new epoch. So a wrong KV shows.
Behind decoded blocks it is marked as lossy, in the pool and in the stores, apart from what the manager knows.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np
from spills import SpillOrder, spilled, take_spills

from manthan.manager.sessions.budget import Shares
from manthan.manager.sessions.fast_tier import Fast
from manthan.manager.sessions.hints import parse_hints
from manthan.manager.sessions.manager import SessionMemoryManager
from manthan.manager.sessions.marks import Mark, Marks, Owner
from manthan.manager.sessions.session import Block, BlockName, DropCause, MemoryShape, Place
from manthan.manager.tiers.arena import room
from manthan.manager.tiers.ram import RamTier
from manthan.manager.tiers.tier import Buffer
from manthan.manager.work import on_each
from manthan.policies import get_policy

BOUNDS = {0: 1024, 10: 1536, 16: 2048}
"""Of one rank's block, by how many of its tokens are kept exact: none, the first ten, all."""
SINK_TOKENS = 26  # a block, and ten of the next
IDLE_AFTER_S = 10.0
BESIDE = {1: 2, 2: 1}
"""Groups beside the chains', a window and a state: how many of the last blocks whoever goes on needs of each."""
BESIDE_BOUNDS = {1: BOUNDS, 2: {0: 1536}}
LOSSY = b"~"
BESIDE_POOL_BLOCKS = 14
"""Few, and they are overwritten in the order in which they were computed: they are lost before the chains' are."""
OPTIONS: dict[str, dict[str, object]] = {"returns": {"window": 64, "refit_every": 4}}
"""Of policies that would not get to learn anything in a short test."""


def chain(text: str) -> list[bytes]:
    """The block keys of a text of one letter a block; each covers all letters up to its own."""
    return [text[: i + 1].encode() for i in range(len(text))]


def encoded(content: bytes, rank: int, exact: int, group: int = 0) -> Buffer:
    """Codes of some size up to the bound, which is another for each content and rank."""
    size = (BESIDE_BOUNDS[group] if group else BOUNDS)[exact] - crc32(content + bytes([rank])) % 900
    return np.frombuffer(content.ljust(size), np.uint8)


def decoded(buf: Buffer) -> bytes:
    return buf.tobytes().rstrip().removesuffix(LOSSY)


def is_lossy(buf: Buffer) -> bool:
    """True if what was encoded had been decoded, or computed behind decoded blocks."""
    return buf.tobytes().rstrip().endswith(LOSSY)


def get(store: RamTier, key: bytes, group: int = 0) -> Buffer | None:
    return next(store.read(group, [key]))


def name_of(group: int, key: bytes) -> bytes:
    """What a block is called in the pool of those beside the chains'."""
    return b"%d/%s" % (group, key)


class Pool:
    """Blocks by key, reference counts, and a queue of the unreferenced, which are overwritten from its head on."""

    def __init__(self, blocks: int) -> None:
        self.content: dict[int, bytes] = {}
        self.generation: Counter[int] = Counter()
        """By block, how often a lossy codec has been over its KV: kept apart from `marks`, to check them by."""
        self.lossy: dict[int, Owner | None] = {}
        """By block, who brought KV back that was decoded, or computed behind such: kept apart from `marks` too."""
        self.marks = Marks(blocks)
        self.refs: Counter[int] = Counter()
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))
        self.cached: dict[bytes, int] = {}
        self.kept: OrderedDict[int, None] = OrderedDict()
        """Free blocks that are overwritten before others of `free` that hold something."""
        self.saved: set[int] = set()
        """Blocks that stand among those whenever they are free."""

    def touch(self, block: int) -> int:
        self.kept.pop(block, None)
        self.free.pop(block, None)
        self.refs[block] += 1
        return block

    def give_back(self, blocks: list[int]) -> None:
        for block in reversed(blocks):  # so that tails are overwritten before heads
            self.refs[block] -= 1
            if not self.refs[block]:
                self.free[block] = None
                if block in self.saved and block in self.cached.values():
                    self.kept[block] = None

    def allocate(self) -> int:
        block = self.next
        self.uncache(block)
        self.marks.clear([block])
        self.generation[block] = 0
        self.saved.discard(block)
        self.lossy.pop(block, None)
        return self.touch(block)

    @property
    def next(self) -> int:
        """The free block that is overwritten next: one that holds nothing, else a kept one, else another."""
        full = set(self.cached.values())
        return next((block for block in self.free if block not in full), next(iter(self.kept or self.free)))

    def serves(self, key: bytes, owner: Owner | None) -> bool:
        block = self.cached.get(key)
        return block is not None and self.marks.serves(block, owner)

    def uncache(self, block: int) -> None:
        self.cached = {key: other for key, other in self.cached.items() if other != block}

    def release(self, keys: Iterable[bytes]) -> None:
        """To the head of the queue, unless a request uses it."""
        for key in keys:
            block = self.cached.get(key)
            if block is not None and not self.refs[block]:
                self.uncache(block)
                self.kept.pop(block, None)
                self.free.move_to_end(block, last=False)

    def keep(self, keys: Iterable[bytes]) -> None:
        """Behind those that were kept before, the first first."""
        for key in keys:
            block = self.cached.get(key)
            if block is not None:
                self.saved.add(block)
                self.kept.pop(block, None)
                if not self.refs[block]:
                    self.kept[block] = None

    def forget(self, keys: Sequence[bytes]) -> None:
        """Free blocks go to the end of the queue, the first last."""
        for key in reversed(keys):
            block = self.cached.get(key)
            if block is not None:
                self.saved.discard(block)
                self.kept.pop(block, None)
                if not self.refs[block]:
                    self.free.move_to_end(block)


@dataclass
class Request:
    request_id: str
    keys: list[bytes]
    prompt: int
    """How many of the keys are asked; the rest is the answer."""
    blocks: list[int] = field(default_factory=list)
    restore: "Restore | None" = None
    owner: Owner | None = None
    is_lossy: bool = False
    """True if what it computes is behind decoded blocks."""
    wants_exact: bool = False
    had: int = 0
    """How many of its blocks were hot when it was admitted, or were restored."""

    @property
    def waiting(self) -> bool:
        return not self.blocks


@dataclass
class Restore:
    request: Request
    keys: list[bytes]
    blocks: list[int]
    beside: list[tuple[int, bytes]]
    """Blocks of other groups, by group and key."""
    orphan: bool = False
    """Whether the request has ended, or the cache was reset, meanwhile."""


@dataclass
class Spill:
    order: SpillOrder
    block: int
    waiting: set[int]
    """Ranks that have not answered."""
    failed: bool = False
    sizes: list[int] = field(default_factory=list)

    @property
    def key(self) -> bytes:
        return self.order.key

    @property
    def group(self) -> int:
        return self.order.group or 0


class World:
    """Carries out what the manager says, as the connector does, and asserts what must hold at each action."""

    def __init__(
        self,
        ranks: int,
        pool_blocks: int,
        cold_blocks: int,
        policy: str = "lru",
        fast_blocks: int = 0,
        exact: bool = False,
        beside: Mapping[int, int] | None = None,
    ) -> None:
        """beside: of each group beside the chains', how many of the last blocks are needed; see BESIDE."""
        self.beside = beside or {}

        def of_all_ranks(bounds: Mapping[int, int]) -> dict[int, int]:
            return {tokens: nbytes * ranks for tokens, nbytes in bounds.items()}

        bounds_beside = {group: of_all_ranks(BESIDE_BOUNDS[group]) for group in self.beside}
        self.shape = MemoryShape(16, 500, of_all_ranks(BOUNDS), beside=bounds_beside)
        chosen = get_policy(policy)
        self.manager = SessionMemoryManager(
            chosen,
            self.shape,
            cold_blocks * self.shape.cold_nbytes,
            IDLE_AFTER_S,
            options=chosen.Options(**OPTIONS.get(policy, {})),
            shares=Shares(pinned=0.5, tenants={"small": 0.5}),
            fast=[Fast(tier * self.shape.cold_nbytes, True) for tier in (fast_blocks, 2 * fast_blocks) if tier],
            prefetch_lead_s=None if self.beside else 1.0,
            sink_tokens=SINK_TOKENS if exact else 0,
            mark=self.mark,
        )
        orders = self.manager._orders
        self._forget_codes, orders.forget_codes = orders.forget_codes, self.forget_codes
        self.weigh = on_each(ranks)
        self.stores = [RamTier(cold_blocks * BOUNDS[0]) for _ in range(ranks)]
        self.pool, self.beside_pool = Pool(pool_blocks), Pool(BESIDE_POOL_BLOCKS)
        self.seen: Counter[str] = Counter()
        """What has come to pass, for tests that it did."""
        self.now = 0.0
        self.epoch = 0
        self.clear = False
        self.count = 0
        self.requests: list[Request] = []
        self.restores: list[Restore] = []
        self.held: list[Spill] = []
        """To be begun with the next step."""
        self.spills: list[Spill] = []
        self.unreadable: set[bytes] = set()
        """Codes that were stored and then could not be read."""

    def content(self, key: bytes, group: int = 0) -> bytes:
        return b"%d:%d:%s" % (self.epoch, group, key)

    def needed(self, keys: Sequence[bytes]) -> Iterator[tuple[int, bytes, int]]:
        """Group, key and depth of each block of other groups that is needed to go on behind these."""
        for group, last in self.beside.items():
            yield from ((group, keys[at], at) for at in range(max(0, len(keys) - last), len(keys)))

    # -- requests ---------------------------------------------------------------------------------------

    def start(self, text: str, prompt: int, name: str | None, tenant: str = "", **hints: object) -> None:
        self.count += 1
        request = Request(f"r{self.count}", chain(text), prompt, wants_exact=hints.get("quality") == "exact")
        self.manager.request_started(
            request.request_id, request.keys[:prompt], name, self.now, hints=parse_hints(hints), tenant=tenant
        )
        self.requests.append(request)

    def admit(self, request: Request) -> None:
        """Give a waiting request its blocks: those still hot, those to be restored, and empty ones."""
        hot = self.hot(request.keys[: request.prompt], self.manager.asker(request.request_id))
        held = [self.pool.cached[key] for key in request.keys[:hot]]
        if len(request.keys) - hot > len(self.pool.free.keys() - held):
            return
        for block in held:
            self.pool.touch(block)
        cold = self.manager.match(request.keys[hot : request.prompt], request.request_id)
        request.blocks = held + [self.allocate() for _ in request.keys[hot:]]
        request.had = hot + cold
        request.owner = self.manager.owner(request.request_id)
        for block in held:
            if block in self.pool.lossy:
                assert not request.wants_exact, "exact KV was asked for"
                assert self.pool.lossy[block] == request.owner, "another session brought this back"
        request.is_lossy = any(block in self.pool.lossy for block in held)
        if cold:
            end = hot + cold
            keys = request.keys[hot:end]
            beside = [(group, key) for group, key, at in self.needed(request.keys[:end]) if at >= hot]
            assert all(self.stored_everywhere(key) for key in keys), "what is offered is not cold"
            assert all(self.stored_everywhere(key, group) for group, key in beside), "no anchor stands there"
            request.restore = Restore(request, keys, request.blocks[hot:end], beside)
            self.manager.restore_started(request.request_id, keys)
            for key, block in zip(keys, request.blocks[hot:end], strict=True):
                self.pool.marks.set([block], self.manager.stored_marks([key])[0], request.owner)
                stored = self.manager.blocks.get(key)
                self.pool.generation[block] = stored is None or stored.encoding.exact < 16
                if self.pool.generation[block] or self.is_stored_lossy(key):
                    self.pool.lossy[block] = request.owner
            request.is_lossy |= any(block in self.pool.lossy for block in request.blocks[hot:end])
            request.is_lossy |= any(self.is_beside_lossy(group, key) for group, key in beside)
            assert not (request.wants_exact and request.is_lossy), "exact KV was asked for"
            self.restores.append(request.restore)
        else:
            self.compute(request, request.prompt)

    def allocate(self) -> int:
        """Take the next block. It is not an unsaved one while one that holds nothing, or is saved, is free."""
        pool = self.pool
        held = {block: key for key, block in pool.cached.items()}
        key = held.get(pool.next)
        if key is not None and self.manager.is_missed(key) and not self.manager.is_saved(key):
            self.seen["overwritten unsaved"] += 1
            assert held.keys() >= pool.free.keys(), "a block that holds nothing is free"
            if not self.manager._orders.releases:
                assert not any(self.manager.is_saved(held[block]) for block in pool.free), "a saved block is free"
        return pool.allocate()

    def hot(self, keys: Sequence[bytes], owner: Owner | None) -> int:
        """How many of these are in the pool for this owner, with all that other groups need behind them."""
        hot = next((at for at, key in enumerate(keys) if not self.pool.serves(key, owner)), len(keys))
        while not all(self.beside_pool.serves(name_of(g, key), owner) for g, key, _ in self.needed(keys[:hot])):
            hot -= 1
        return hot

    def mark(self, name: BlockName) -> Mark | None:
        """Mark of the block that the pool finds under a name."""
        if isinstance(name, bytes):
            pool, block = self.pool, self.pool.cached.get(name)
        else:
            pool, block = self.beside_pool, self.beside_pool.cached.get(name_of(*name))
        return None if block is None else pool.marks[block]

    def compute(self, request: Request, end: int) -> None:
        """The first `end` blocks hold their KV now: hot ones have, the others are computed."""
        marks = self.pool.marks
        for at, (key, block) in enumerate(zip(request.keys[:end], request.blocks[:end], strict=True)):
            if at >= request.had and request.is_lossy:
                marks.set([block], Mark.DERIVED, request.owner)
                self.pool.lossy[block] = request.owner
            first = self.pool.cached.setdefault(key, block)
            if first != block and marks[first] and not marks[block]:  # the exact copy takes the hash
                self.pool.cached[key] = first = block
            if first == block:
                self.pool.content[block] = self.content(key)
        for key in request.keys[request.had : end]:
            for group in self.beside:
                self.cache_beside(group, key, Mark.DERIVED if request.is_lossy else Mark.EXACT, request.owner)
        request.had = max(request.had, end)

    def cache_beside(self, group: int, key: bytes, mark: Mark, owner: Owner | None) -> None:
        """A block of another group is in the pool from now on, until others take it: nobody holds it."""
        pool, name = self.beside_pool, name_of(group, key)
        if name not in pool.cached and pool.free:
            block = pool.allocate()
            pool.cached[name], pool.content[block] = block, self.content(key, group)
            pool.marks.set([block], mark, owner)
            pool.generation[block] = mark is Mark.DECODED
            if mark:
                pool.lossy[block] = owner
            pool.give_back([block])

    def end_restore(self, restore: Restore, unreadable: set[int]) -> None:
        """The ranks have read and decoded the codes, but for those that were unreadable; -1 is the last."""
        failed, names = [], [*((0, key) for key in restore.keys), *restore.beside]
        for i, (group, key) in enumerate(names):
            codes = [get(store, key, group) for store in self.stores]
            if not restore.orphan:
                assert all(buf is not None for buf in codes), f"{key!r} was dropped while it was read"
                assert {decoded(buf) for buf in codes if buf is not None} == {self.content(key, group)}
            if {i, i - len(names)} & unreadable or any(buf is None for buf in codes):
                failed.append((group, key))
        self.restores.remove(restore)
        bad, beside = [key for group, key in failed if not group], [name for name in failed if name[0]]
        self.unreadable.update(bad)
        self.manager.restore_finished(restore.request.request_id, bad, beside)
        self.seen["anchors unreadable" if beside else "chains unreadable" if bad else "restored"] += 1
        if restore.orphan:
            self.pool.give_back(restore.blocks)
        elif failed and self.beside:  # the load has failed as a whole: it is asked anew
            self.preempt(restore.request)
        else:
            for group, key in restore.beside:
                self.cache_beside(group, key, self.manager.stored_marks([key], group)[0], restore.request.owner)
            restore.request.restore = None
            self.compute(restore.request, restore.request.prompt)

    def preempt(self, request: Request) -> None:
        """A request gives its blocks back and waits to be admitted anew; the manager is not told."""
        self.pool.give_back(request.blocks)
        request.blocks, request.restore, request.had = [], None, 0

    def finish(self, request: Request, computed: int, limit: int = 99) -> None:
        """A request ends, or is aborted after `computed` of its blocks. limit: how many blocks are held at once."""
        self.requests.remove(request)
        blocks = request.blocks
        if request.restore is not None:  # its blocks are written to: they stay referenced until that ends
            computed, request.restore.orphan = 0, True
            blocks = [block for block in blocks if block not in request.restore.blocks]
        elif request.waiting:
            computed = 0
        else:
            self.compute(request, max(computed, request.prompt))
        self.pool.give_back(blocks)
        keys = request.keys[:computed]
        depths = dict.fromkeys((len(keys), min(len(keys), request.prompt - 1))) if self.beside else ()
        places = [Place(depth, list(self.needed(keys[:depth]))) for depth in depths if depth > 0]
        self.manager.request_finished(request.request_id, keys, self.now, places=places)
        if places:
            self.hold(limit)

    def reset(self) -> None:
        """New weights: requests start over, what is being restored is given up, nothing computed is valid."""
        for request in list(self.requests):
            if request.restore is not None:
                self.finish(request, 0)
            else:
                self.pool.give_back(request.blocks)
                request.blocks = []
        self.pool.cached.clear()
        self.beside_pool.cached.clear()
        self.epoch += 1
        self.clear = True
        for restore in self.restores:
            restore.orphan = True
        self.manager.reset()
        for spill in self.held:
            self.pool_of(spill.group).give_back([spill.block])
            self.manager.spill_failed(spill.key, self.now, spill.order.group)
        self.held.clear()

    def forget_hot(self) -> None:
        """The pool's memory is gone for a while, which vLLM sees to when nothing is read or written: requests start
        over, and what is cold stays."""
        for request in self.requests:
            self.preempt(request)
        self.pool.cached.clear()
        self.beside_pool.cached.clear()
        self.manager.forget_hot(self.now)

    # -- a step -----------------------------------------------------------------------------------------

    def step(self, relieve: int, limit: int) -> None:
        self.manager.sweep(self.now)
        if relieve:
            self.manager.relieve(relieve, self.now)
        self.drop()
        self.release()
        self.hold(limit)
        self.spills += self.held
        self.held.clear()
        self.manager.settle_tiers()

    def hold(self, limit: int) -> None:
        """Take references on blocks to be encoded; some are not there any more."""
        for order in take_spills(self.manager, limit):
            assert order.first_token == 16 * (len(order.key) - 1)
            pool, name = self.pool_of(order.group), name_of(order.group, order.key) if order.group else order.key
            block = pool.cached.get(name)
            if block is None:
                self.manager.lost(order.key, self.now, order.group)
                self.seen["lost beside" if order.group else "lost"] += 1
            else:
                assert not pool.generation[block], f"decoded KV of {order.key!r} is to be encoded again"
                assert pool.marks[block] is (Mark.DERIVED if block in pool.lossy else Mark.EXACT)
                self.manager.encodes(order.key, order.group, pool.marks[block])
                self.seen[f"encoded {pool.marks[block].name.lower()}"] += 1
                self.held.append(Spill(order, pool.touch(block), set(range(len(self.stores)))))

    def pool_of(self, group: int | None) -> Pool:
        return self.beside_pool if group else self.pool

    def drop(self) -> None:
        if self.clear:
            for store in self.stores:
                store.cleared("")
            self.clear = False
        for drop in self.manager.take_drops():
            for store in self.stores:
                store.drop(drop.group, drop.keys)
            self.seen[f"dropped beside: {drop.cause}" if drop.group else f"dropped: {drop.cause}"] += 1
            if not drop.group:
                self.pool.forget(drop.keys)
            if drop.group:
                assert all(
                    self.manager.blocks.get(key, drop.group) is None or self.is_made_again(drop.group, key)
                    for key in drop.keys
                )
            elif drop.cause is DropCause.BUDGET:
                self.assert_given_up(drop.keys)

    def release(self) -> None:
        for key in self.manager.take_releases():
            block = self.manager.blocks.get(key)
            if block is not None:  # otherwise it is nobody's: the policy gave it up, or it was lost
                assert self.stored_everywhere(key) or key in self.unreadable, f"{key!r} is released without codes"
            if self.manager.is_saved(key):
                self.pool.keep([key])
            if not self.manager.is_used(key):
                self.pool.release([key])

    def answer(self, spill: Spill, rank: int, ok: bool) -> None:
        """One rank has encoded and stored a block, or has failed to."""
        spill.waiting.remove(rank)
        if ok:
            pool = self.pool_of(spill.group)
            content = pool.content[spill.block] + LOSSY * (spill.block in pool.lossy)
            buf = encoded(content, rank, spill.order.exact, spill.group)
            failed = self.stores[rank].put_all(spill.group, {spill.key: buf})
            assert failed == {}, "the manager asks for what fits"
            spill.sizes.append(self.stores[rank].room(buf.nbytes))
        spill.failed |= not ok
        if not spill.waiting:
            self.spills.remove(spill)
            self.pool_of(spill.group).give_back([spill.block])
            if not spill.group:
                self.unreadable.discard(spill.key)
            if spill.failed:
                is_full = len(spill.key) % 2 == 0
                self.manager.spill_failed(spill.key, self.now, spill.order.group, is_full)
            else:
                spilled(self.manager, spill.key, self.weigh(spill.sizes), self.now, spill.order.group)
            self.release()

    @property
    def stored_nbytes(self) -> int:
        """What the blocks in the stores take of the budget."""
        names = {name for store in self.stores for name in store.names()}
        bufs = {(group, key): [get(store, key, group) for store in self.stores] for group, key in names}
        return sum(self.weigh([room(buf.nbytes) for buf in each if buf is not None]) for each in bufs.values())

    def stored_everywhere(self, key: bytes, group: int = 0) -> bool:
        bufs = [get(store, key, group) for store in self.stores]
        return all(buf is not None and decoded(buf) == self.content(key, group) for buf in bufs)

    def is_stored_lossy(self, key: bytes, group: int = 0) -> bool:
        """True if the compressed block was made of a lossy one, whatever its codec."""
        return any(is_lossy(buf) for store in self.stores if (buf := get(store, key, group)) is not None)

    def is_beside_lossy(self, group: int, key: bytes) -> bool:
        """True if a block of another group comes back lossy."""
        stored = self.manager.blocks.get(key, group)
        return stored is None or stored.encoding.exact < 16 or self.is_stored_lossy(key, group)

    def is_made_again(self, group: int, key: bytes) -> bool:
        """Whether a dropped block of another group has been ordered anew since."""
        block = self.manager.blocks.get(key, group)
        return block is not None and block.in_flight

    def assert_given_up(self, keys: Sequence[bytes]) -> None:
        """Codes that the policy gave up were nobody's tail, or the bf16 is there, or is on its way to the store."""
        for key in keys:
            block = self.manager.blocks.get(key)
            assert block is None or block.hot or block.in_flight or not block.users, f"{key!r} is missed"

    def forget_codes(self, blocks: Sequence[Block], cause: DropCause) -> None:
        """Assert that no codes of a pinned session make room. It may be pinned before the drop is carried out."""
        if cause is DropCause.BUDGET:
            pinned = {block for s in self.manager.table.by_id.values() if s.pinned for block in s.chain}
            assert pinned.isdisjoint(blocks), f"{blocks} are of a pinned session"
        self._forget_codes(blocks, cause)
