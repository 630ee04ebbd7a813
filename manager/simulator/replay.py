"""What a trace is replayed on, and what a replay comes to."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from manthan.manager.config.model import ManthanConfig
from manthan.manager.events import BlocksDropped, BlocksSaved, Event, Events, Evicted
from manthan.manager.session.blocks import GroupShape, MemoryShape
from manthan.manager.session.hints import NO_HINTS, Hints
from manthan.manager.session.manager import SessionManager
from manthan.manager.simulator.cost_model import CostModel
from manthan.manager.simulator.traces import MOONCAKE_BLOCK_TOKENS, TracedRequest
from manthan.policies import EvictionPolicy, PolicyOptions

_DEFAULTS = ManthanConfig()


@dataclass(frozen=True)
class Setup:
    """What a trace is replayed on.

    pool_blocks: of the KV pool. cold_blocks: that the cold store has room for. first_measured: number of the first
    request that counts; those before fill the caches.
    """

    policy: type[EvictionPolicy]
    pool_blocks: int
    options: PolicyOptions | None = None
    cold_blocks: int = 0
    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    cost: CostModel = CostModel()  # noqa: RUF009 it is frozen
    idle_after_s: float = _DEFAULTS.idle.after_s
    min_tokens: int = _DEFAULTS.idle.min_tokens
    first_measured: int = 0

    def manager(self) -> SessionManager:
        """Return a new manager. Heads that sessions share are kept exact, as on a server."""
        pool_nbytes = round(self.cost.kv_bytes_per_token * self.block_tokens)
        bounds = {0: round(self.cost.cold_bytes_per_token * self.block_tokens), self.block_tokens: pool_nbytes}
        shape = MemoryShape({0: GroupShape(self.block_tokens, pool_nbytes, bounds)})
        return SessionManager(
            self.policy,
            shape,
            capacity_nbytes=self.cold_blocks * shape.cold_nbytes,
            idle_after_s=self.idle_after_s,
            events=Events(),
            min_tokens=self.min_tokens,
            options=self.options,
            is_exclusive=True,
        )


class Served(NamedTuple):
    """Where the blocks of one prompt came from, partial ones counted among those asked; seconds to the first token."""

    asked: int
    resident: int
    restored: int
    first_token_s: float


class Action(NamedTuple):
    """What happened to blocks, in order.

    what: `store` (it begins), `stored` (it has ended), `cold` (a session went), `restore` or `drop`.
    who: the request restored, the session gone cold, the drop's cause; nobody for `store` and `stored`.
    """

    what: str
    who: str
    hashes: Sequence[bytes]


@dataclass
class Tally:
    """What a replay came to. Counts begin with the first request that is measured.

    served: by request. order: the numbers of the requests as they were let in; some may pass one that waits for room.
    stored, restored, dropped: blocks. peak_used, peak_cold: the most blocks of the pool in use, or being encoded, and
    of the cold store taken or reserved, over all of the trace.
    """

    served: list[Served | None]
    order: list[int] = field(default_factory=list)
    journal: list[Action] | None = None
    evictions: int = 0
    stored: int = 0
    restored: int = 0
    dropped: int = 0
    peak_used: int = 0
    peak_cold: int = 0
    measuring: bool = field(default=False, repr=False)

    def note(self, what: str, who: str, hashes: Sequence[bytes]) -> None:
        """Write an action into the journal, if there is one."""
        if self.journal is not None:
            self.journal.append(Action(what, who, hashes))


def hints_of(request: TracedRequest) -> Hints:
    """Return the hints that a client gave with a request."""
    said, tool = request.expect_return_s, request.tool
    return NO_HINTS if said is None and not tool else Hints(expect_return_s=said, tool=tool)


class Counting:
    """Counts what a replay's manager does."""

    def __init__(self, tally: Tally, manager: SessionManager) -> None:
        self._tally, self._manager = tally, manager
        manager.events.subscribe(self._happened)

    def _happened(self, event: Event) -> None:
        tally = self._tally
        match event:
            case BlocksSaved():
                tally.stored += len(event.block_hashes) * tally.measuring
                tally.note("stored", "", event.block_hashes)
            case BlocksDropped():
                tally.dropped += len(event.block_hashes) * tally.measuring
                tally.note("drop", event.cause, event.block_hashes)
            case Evicted():
                tally.evictions += tally.measuring
                if tally.journal is not None:
                    rows = self._manager.table.by_id[event.session_id].rows
                    tally.note("cold", event.session_id, self._manager.blocks.hashes(rows))
            case _:
                pass

    def restoring(self, request: str, hashes: Sequence[bytes]) -> None:
        """Note that blocks are loaded for a request."""
        self._tally.restored += len(hashes) * self._tally.measuring
        self._tally.note("restore", request, hashes)

    def look_at_store(self) -> None:
        """Note how many blocks the cold store has or has promised room for."""
        blocks = self._manager.blocks
        self._tally.peak_cold = max(self._tally.peak_cold, blocks.storing + sum(blocks.saved_blocks.values()))
