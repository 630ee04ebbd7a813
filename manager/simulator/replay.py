"""What a trace is replayed on, and what a replay comes to."""

from collections.abc import Sequence
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

_DEFAULTS = ManthanConfig()


@dataclass(frozen=True)
class Setup:
    """What a trace is replayed on.

    hot_blocks: of the KV pool. first_measured: number of the first request that counts; those before fill the caches.
    """

    policy: type[EvictionPolicy]
    hot_blocks: int
    options: PolicyOptions | None = None
    cold_blocks: int = 0
    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    cost: CostModel = CostModel()  # noqa: RUF009 it is frozen
    idle_after_s: float = _DEFAULTS.idle.after_s
    min_tokens: int = _DEFAULTS.idle.min_tokens
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
            idle_after_s=self.idle_after_s,
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

    def saved(self, keys: Sequence[bytes]) -> None:
        self._tally.moved_out += len(keys) * self._tally.measuring
        if keys:
            self._tally.note("stored", "", keys)

    def look_at_store(self) -> None:
        """Before codes are dropped: the most that the cold store ever holds, or has promised."""
        cold = self._manager.on_their_way + self._manager.blocks.cold
        if cold > self._tally.peak_cold:
            self._tally.peak_cold = cold
