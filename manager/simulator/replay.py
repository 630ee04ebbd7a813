"""What a trace is replayed on, what a replay comes to, and the simplest replay: one cache, no KV pool."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from manthan.manager.config.model import ManthanConfig
from manthan.manager.observer import Observer
from manthan.manager.sessions.hints import NO_HINTS, Hints
from manthan.manager.sessions.manager import SessionMemoryManager
from manthan.manager.sessions.session import Drop, Eviction, MemoryShape
from manthan.manager.simulator.cost_model import CostModel
from manthan.manager.simulator.traces import MOONCAKE_BLOCK_TOKENS, TracedRequest
from manthan.policies import EvictionPolicy, PolicyOptions

PROGRESS_EVERY = 200
"""Requests."""

_DEFAULTS = ManthanConfig()


@dataclass(frozen=True)
class Setup:
    """What a trace is replayed on.

    hot_blocks: of the KV pool; 0 for no pool: requests come strictly one after the other, a session goes cold as soon
    as its request ends, and all that is found is found in the cold store. prefill_slots: prompts computed at a time; 0
    for any number. first_measured: number of the first request that counts; those before fill the caches.
    """

    policy: type[EvictionPolicy]
    options: PolicyOptions | None = None
    hot_blocks: int = 0
    cold_blocks: int = 0
    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    cost: CostModel = CostModel()  # noqa: RUF009 it is frozen
    idle_after_s: float = _DEFAULTS.idle_after_s
    min_tokens: int = _DEFAULTS.min_tokens
    low_watermark: float = _DEFAULTS.hot_pool.low_watermark
    high_watermark: float = _DEFAULTS.hot_pool.high_watermark
    prefill_slots: int = 0
    first_measured: int = 0

    def manager(self) -> SessionMemoryManager:
        """A fresh manager whose cold store has room for `cold_blocks`. With a pool, heads that sessions share are kept
        exact, as a server keeps them."""
        hot_nbytes = round(self.cost.kv_bytes_per_token * self.block_tokens)
        exact = {self.block_tokens: hot_nbytes} if self.hot_blocks else {}
        bounds = {0: round(self.cost.code_bytes_per_token * self.block_tokens), **exact}
        shape = MemoryShape(self.block_tokens, hot_nbytes, bounds)
        return SessionMemoryManager(
            self.policy,
            shape,
            capacity_nbytes=self.cold_blocks * shape.cold_nbytes,
            idle_after_s=self.idle_after_s if self.hot_blocks else 0.0,
            min_tokens=self.min_tokens,
            options=self.options,
        )


class Served(NamedTuple):
    """Where the blocks of one prompt came from, partial ones counted among those asked; seconds to the first token."""

    asked: int
    hot: int
    restored: int
    first_token_s: float


class Action(NamedTuple):
    """What happened to blocks, in order.

    what: `spill` (encoding begins), `stored` (it has ended), `cold` (a session went), `restore` or `drop`.
    who: the request restored, the session gone cold, the drop's cause; nobody for `spill` and `stored`.
    """

    what: str
    who: str
    keys: Sequence[bytes]


@dataclass
class Tally:
    """What a replay came to. Counts begin with the first request that is measured.

    served: by request. order: the numbers of the requests as they were let in; some may pass one that waits for room.
    moved_out, moved_in, dropped: blocks. peak_hot, peak_cold: the most blocks of the pool in use, or being encoded, and
    of the cold store taken or reserved, over all of the trace.
    """

    served: list[Served | None]
    order: list[int] = field(default_factory=list)
    journal: list[Action] | None = None
    evictions: int = 0
    moved_out: int = 0
    moved_in: int = 0
    dropped: int = 0
    peak_hot: int = 0
    peak_cold: int = 0
    measuring: bool = field(default=False, repr=False)

    def note(self, what: str, who: str, keys: Sequence[bytes]) -> None:
        if self.journal is not None:
            self.journal.append(Action(what, who, keys))


def hints_of(request: TracedRequest) -> Hints:
    said, tool = request.expect_return_s, request.tool
    return NO_HINTS if said is None and not tool else Hints(expect_return_s=said, tool=tool)


class Replay(ABC):
    """What both kinds of replay have in common: the manager, the tally and how actions are counted."""

    def __init__(self, requests: Sequence[TracedRequest], setup: Setup, journal: bool) -> None:
        self.requests, self.setup, self.cost = requests, setup, setup.cost
        self.manager = setup.manager()
        self.tally = Tally([None] * len(requests), journal=[] if journal else None)

    @abstractmethod
    def run(self, progress: Callable[[int], None]) -> None:
        """Serve all requests; `progress` is called every PROGRESS_EVERY with the number of those that have come."""

    def arrived(self, number: int) -> None:
        self.tally.measuring = number >= self.setup.first_measured

    def asked(self, request: TracedRequest) -> int:
        return -(-request.input_tokens // self.setup.block_tokens)

    def usable(self, request: TracedRequest) -> int:
        """How many of its blocks may be found: the last token of a prompt is always computed."""
        return min(request.prompt_blocks, (request.input_tokens - 1) // self.setup.block_tokens)


class Counting(Observer):
    """Counts what a replay's manager does."""

    def __init__(self, tally: Tally, manager: SessionMemoryManager) -> None:
        self._tally, self._manager = tally, manager

    def dropped(self, drop: Drop) -> None:
        self._tally.dropped += len(drop.keys) * self._tally.measuring
        self._tally.note("drop", drop.cause, drop.keys)

    def evicted(self, eviction: Eviction) -> None:
        self._tally.evictions += self._tally.measuring
        if self._tally.journal is not None:
            session = self._manager.table.by_id.get(eviction.session_id)
            self._tally.note("cold", eviction.session_id, [block.key for block in session.chain] if session else [])

    def restoring(self, who: str, keys: Sequence[bytes]) -> None:
        self._tally.moved_in += len(keys) * self._tally.measuring
        self._tally.note("restore", who, keys)

    def stored(self, keys: Sequence[bytes]) -> None:
        self._tally.moved_out += len(keys) * self._tally.measuring
        if keys:
            self._tally.note("stored", "", keys)

    def look_at_store(self) -> None:
        """Before codes are dropped: the most that the cold store ever holds, or has promised."""
        cold = self._manager.cold_blocks
        if cold > self._tally.peak_cold:
            self._tally.peak_cold = cold


class OneCacheReplay(Replay):
    """No pool: each request is over before the next one comes, and its session goes cold at once."""

    def run(self, progress: Callable[[int], None]) -> None:
        self._counting = Counting(self.tally, self.manager)
        for number, request in enumerate(self.requests):
            self.arrived(number)
            self._serve(number, request)
            if number % PROGRESS_EVERY == 0:
                progress(number)

    def _serve(self, number: int, request: TracedRequest) -> None:
        manager, now, name = self.manager, request.at, str(number)
        prompt = request.keys[: request.prompt_blocks]
        manager.request_started(
            name, prompt, request.session, now, tokens=request.input_tokens, hints=hints_of(request)
        )
        found = manager.match(request.keys[: self.usable(request)])
        if found:
            self._counting.restoring(name, request.keys[:found])
            manager.restore_started(name, request.keys[:found])
            manager.restore_finished(name)
        cached = found * self.setup.block_tokens
        first_token_s = (
            self.cost.first_token_s
            + self.cost.restore_s_per_token * cached
            + self.cost.prefill_s(cached, request.input_tokens)
        )
        self.tally.order.append(number)
        self.tally.served[number] = Served(self.asked(request), 0, found, first_token_s)
        manager.request_finished(name, request.keys, now, tokens=request.input_tokens + request.output_tokens)
        self._go_cold(now)

    def _go_cold(self, now: float) -> None:
        manager, counting = self.manager, self._counting
        manager.sweep(now)
        while manager.has_work:
            counting.look_at_store()
            for drop in manager.take_drops():
                counting.dropped(drop)
            manager.take_releases()
            keys = [order.key for order in manager.take_spills(self.setup.cold_blocks)]
            self.tally.note("spill", "", keys)
            counting.stored(keys)
            nbytes = manager.shape.cold_nbytes
            manager.all_spilled(keys, [nbytes] * len(keys), now)
        for eviction in manager.take_evictions():
            counting.evicted(eviction)
