"""A small vLLM around the manager: a pool of bf16 blocks, ranks with cold stores, requests. No tensors, no threads.

A block's content is its key and the epoch in which it was computed; a reset begins a new epoch. So a wrong KV shows.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np

from manthan.manager.sessions.budget import Shares
from manthan.manager.sessions.fast_tier import Fast
from manthan.manager.sessions.hints import parse_hints
from manthan.manager.sessions.manager import SessionMemoryManager, SpillOrder
from manthan.manager.sessions.session import CodeState, DropCause, MemoryShape
from manthan.manager.stores.cold_store import Buffer, HostStore
from manthan.policies import get_policy

BOUNDS = {0: 1024, 10: 1536, 16: 2048}
"""Of one rank's block, by how many of its tokens are kept exact: none, the first ten, all."""
SINK_TOKENS, WINDOW_TOKENS = 10, 20  # ten of one block, and two blocks
IDLE_AFTER_S = 10.0
OPTIONS: dict[str, dict[str, object]] = {"returns": {"window": 64, "refit_every": 4}}
"""Of policies that would not get to learn anything in a short test."""


def chain(text: str) -> list[bytes]:
    """The block keys of a text of one letter a block; each covers all letters up to its own."""
    return [text[: i + 1].encode() for i in range(len(text))]


def encoded(content: bytes, rank: int, exact: int) -> Buffer:
    """Codes of some size up to the bound, which is another for each content and rank."""
    size = BOUNDS[exact] - crc32(content + bytes([rank])) % 900
    return np.frombuffer(content.ljust(size), np.uint8)


def decoded(buf: Buffer) -> bytes:
    return buf.tobytes().rstrip()


def get(store: HostStore, key: bytes) -> Buffer | None:
    return next(store.read(0, [key]))


class Pool:
    """Blocks by key, reference counts, and a queue of the unreferenced, which are overwritten from its head on."""

    def __init__(self, blocks: int) -> None:
        self.content: dict[int, bytes] = {}
        self.refs: Counter[int] = Counter()
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))
        self.cached: dict[bytes, int] = {}

    def touch(self, block: int) -> int:
        self.free.pop(block, None)
        self.refs[block] += 1
        return block

    def give_back(self, blocks: list[int]) -> None:
        for block in reversed(blocks):  # so that tails are overwritten before heads
            self.refs[block] -= 1
            if not self.refs[block]:
                self.free[block] = None

    def allocate(self) -> int:
        block = next(iter(self.free))
        self.uncache(block)
        return self.touch(block)

    def uncache(self, block: int) -> None:
        self.cached = {key: other for key, other in self.cached.items() if other != block}

    def release(self, keys: Iterable[bytes]) -> None:
        """To the head of the queue, unless a request uses it."""
        for key in keys:
            block = self.cached.get(key)
            if block is not None and not self.refs[block]:
                self.uncache(block)
                self.free.move_to_end(block, last=False)


@dataclass
class Request:
    request_id: str
    keys: list[bytes]
    prompt: int
    """How many of the keys are asked; the rest is the answer."""
    blocks: list[int] = field(default_factory=list)
    restore: "Restore | None" = None

    @property
    def waiting(self) -> bool:
        return not self.blocks


@dataclass
class Restore:
    request: Request
    keys: list[bytes]
    blocks: list[int]
    orphan: bool = False
    """Whether the request has ended, or the cache was reset, meanwhile."""


@dataclass
class Spill:
    order: SpillOrder
    block: int
    waiting: set[int]
    """Ranks that have not answered."""
    failed: bool = False
    nbytes: int = 0

    @property
    def key(self) -> bytes:
        return self.order.key


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
        shared: bool = False,
    ) -> None:
        self.shape = MemoryShape(16, 500, {tokens: nbytes * ranks for tokens, nbytes in BOUNDS.items()})
        chosen = get_policy(policy)
        self.manager = SessionMemoryManager(
            chosen,
            self.shape,
            cold_blocks * self.shape.cold_nbytes,
            IDLE_AFTER_S,
            options=chosen.Options(**OPTIONS.get(policy, {})),
            shares=Shares(pinned=0.5, tenants={"small": 0.5}),
            fast=Fast(fast_blocks * self.shape.cold_nbytes, True) if fast_blocks else None,
            prefetch_lead_s=1.0,
            sink_tokens=SINK_TOKENS if exact else 0,
            window_tokens=WINDOW_TOKENS if exact else 0,
            is_shared=shared,
        )
        self.stores = [HostStore(cold_blocks * BOUNDS[0]) for _ in range(ranks)]
        self.pool = Pool(pool_blocks)
        self.now = 0.0
        self.epoch = 0
        self.clear = False
        self.count = 0
        self.requests: list[Request] = []
        self.restores: list[Restore] = []
        self.spills: list[Spill] = []
        self.unreadable: set[bytes] = set()
        """Codes that were stored and then could not be read."""

    def content(self, key: bytes) -> bytes:
        return b"%d:%s" % (self.epoch, key)

    # -- requests ---------------------------------------------------------------------------------------

    def start(self, text: str, prompt: int, name: str | None, tenant: str = "", **hints: object) -> None:
        self.count += 1
        request = Request(f"r{self.count}", chain(text), prompt)
        self.manager.request_started(
            request.request_id, request.keys[:prompt], name, self.now, hints=parse_hints(hints), tenant=tenant
        )
        self.requests.append(request)

    def admit(self, request: Request) -> None:
        """Give a waiting request its blocks: those still hot, those to be restored, and empty ones."""
        hot = 0
        while hot < request.prompt and request.keys[hot] in self.pool.cached:
            hot += 1
        held = [self.pool.touch(self.pool.cached[key]) for key in request.keys[:hot]]
        if len(request.keys) - hot > len(self.pool.free):
            self.pool.give_back(held)
            return
        cold = self.manager.match(request.keys[hot : request.prompt])
        request.blocks = held + [self.pool.allocate() for _ in request.keys[hot:]]
        if cold:
            end = hot + cold
            keys = request.keys[hot:end]
            request.restore = Restore(request, keys, request.blocks[hot:end])
            self.manager.restore_started(request.request_id, keys)
            self.restores.append(request.restore)
        else:
            self.compute(request, request.prompt)

    def compute(self, request: Request, end: int) -> None:
        """The first `end` blocks hold their KV now: hot ones have, the others are computed."""
        for key, block in zip(request.keys[:end], request.blocks[:end], strict=True):
            if self.pool.cached.setdefault(key, block) == block:
                self.pool.content[block] = self.content(key)

    def end_restore(self, restore: Restore, unreadable: set[int]) -> None:
        """The ranks have read and decoded the codes, but for those that were unreadable."""
        failed = []
        for i, key in enumerate(restore.keys):
            codes = [get(store, key) for store in self.stores]
            if not restore.orphan:
                assert all(buf is not None for buf in codes), f"{key!r} was dropped while it was read"
                assert {decoded(buf) for buf in codes if buf is not None} == {self.content(key)}
            if i in unreadable or any(buf is None for buf in codes):
                failed.append(key)
        self.restores.remove(restore)
        self.unreadable.update(failed)
        self.manager.restore_finished(restore.request.request_id, failed)
        if restore.orphan:
            self.pool.give_back(restore.blocks)
        else:
            restore.request.restore = None
            self.compute(restore.request, restore.request.prompt)

    def finish(self, request: Request, computed: int) -> None:
        """A request ends, or is aborted after `computed` of its blocks."""
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
        self.manager.request_finished(request.request_id, request.keys[:computed], self.now)

    def reset(self) -> None:
        """New weights: requests start over, what is being restored is given up, nothing computed is valid."""
        for request in list(self.requests):
            if request.restore is not None:
                self.finish(request, 0)
            else:
                self.pool.give_back(request.blocks)
                request.blocks = []
        self.pool.cached.clear()
        self.epoch += 1
        self.clear = True
        for restore in self.restores:
            restore.orphan = True
        self.manager.reset()

    # -- a step -----------------------------------------------------------------------------------------

    def step(self, relieve: int, limit: int) -> None:
        self.manager.sweep(self.now)
        if relieve:
            self.manager.relieve(relieve, self.now)
        self.drop()
        self.release()
        for order in self.manager.take_spills(limit):
            assert order.first_token == 16 * (len(order.key) - 1)
            block = self.pool.cached.get(order.key)
            if block is None:
                self.manager.lost(order.key, self.now)
            else:
                self.spills.append(Spill(order, self.pool.touch(block), set(range(len(self.stores)))))
        for key in self.manager.take_moves():
            moved = self.manager.blocks.get(key)
            assert moved is not None
            assert moved.code is CodeState.COLD

    def drop(self) -> None:
        if self.clear:
            for store in self.stores:
                store.cleared("")
            self.clear = False
        for drop in self.manager.take_drops():
            for store in self.stores:
                store.drop(drop.group, drop.keys)
            if drop.cause is DropCause.BUDGET:
                self.assert_given_up(drop.keys)

    def release(self) -> None:
        for key in self.manager.take_releases():
            block = self.manager.blocks.get(key)
            if block is not None:  # otherwise it is nobody's: the policy gave it up, or it was lost
                assert self.stored_everywhere(key) or key in self.unreadable, f"{key!r} is released without codes"
                assert not block.hot
            self.pool.release([key])

    def answer(self, spill: Spill, rank: int, ok: bool) -> None:
        """One rank has encoded and stored a block, or has failed to."""
        spill.waiting.remove(rank)
        spill.failed |= not ok
        if ok:
            buf = encoded(self.pool.content[spill.block], rank, spill.order.exact)
            assert self.stores[rank].put_all(0, {spill.key: buf}) == {}, "the manager asks for what fits"
            spill.nbytes += self.stores[rank].room(buf.nbytes)
        if not spill.waiting:
            self.spills.remove(spill)
            self.pool.give_back([spill.block])
            self.unreadable.discard(spill.key)
            if spill.failed:
                self.manager.spill_failed(spill.key, self.now)
            else:
                self.manager.spilled(spill.key, spill.nbytes, self.now)
            self.release()

    def stored_everywhere(self, key: bytes) -> bool:
        bufs = [get(store, key) for store in self.stores]
        return all(buf is not None and decoded(buf) == self.content(key) for buf in bufs)

    def assert_given_up(self, keys: Sequence[bytes]) -> None:
        """Codes that the policy gave up were nobody's tail, or their bf16 is still in the pool's hands."""
        for key in keys:
            block = self.manager.blocks.get(key)
            assert block is None or block.hot or not block.users, f"{key!r} is missed by a cold session"
            sessions = self.manager.table.by_id.values()
            assert not any(s.pinned and block in s.chain for s in sessions), f"{key!r} is of a pinned session"
