"""Before anything is encoded: what does the codec do to KV of this very model?

The first idle session's blocks are held and measured by every rank. Until all have answered, nobody is evicted. The
first codec that is faithful on each rank is used from then on: the configured one, a finer one, or none, with all
tokens kept exact.
"""

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Generic, NamedTuple

from manthan.manager.observer import Observer
from manthan.manager.pool import B, Pool
from manthan.manager.sessions.manager import SessionMemoryManager
from manthan.manager.sessions.session import MemoryShape, Session
from manthan.manager.work import SpillBlock, Verdict

SAMPLE_TOKENS = 256
"""So many tokens are measured, or as many as the session has."""


class Choice(NamedTuple):
    """A codec that may be used: what blocks weigh in it, and how many bytes of them the cold store holds."""

    shape: MemoryShape
    capacity_nbytes: int


class Guard(Generic[B]):
    """choices: the configured codec first, then finer ones, "exact" last, where all tokens are kept as they are. ranks:
    how many answer."""

    def __init__(
        self,
        manager: SessionMemoryManager,
        pool: Pool[B],
        choices: Sequence[Choice],
        ranks: int,
        observer: Observer,
    ) -> None:
        self._manager, self._pool, self._choices, self._ranks, self._observer = manager, pool, choices, ranks, observer
        self._held: list[B] = []
        self._kept: list[list[B]] = []
        self._verdicts: list[Verdict] = []
        self._gone: dict[str, float] = {}
        """Sessions of which nothing was left in the pool, by when they became idle."""
        self._is_open = manager.may_evict = False

    def keep(self, most: int) -> None:
        """Hold what sessions that have ended need of groups beside the chains', which the pool would lose first, until
        they may go cold: at most so many blocks, the newest."""
        for beside in self._manager.take_unheld():
            found = [self._pool.hold_beside(group, key) for group, key, _ in beside]
            self._kept.append([block for block in found if block is not None])
        while self._kept and sum(map(len, self._kept)) > most:
            self._pool.give_back(self._kept.pop(0))

    @property
    def is_measuring(self) -> bool:
        """Whether blocks are held until all ranks have answered."""
        return bool(self._held)

    @property
    def has_orders(self) -> bool:
        """Whether there is something to measure."""
        idle = () if self._is_open or self._held else self._manager.table.idle.values()
        return any(self._is_new(session) for session in idle)

    def step(self) -> list[SpillBlock]:
        """Blocks that ranks are to measure, if it is time."""
        if self._is_open or self._held:
            return []
        orders = self._hold()
        if not orders:
            self.let_go()  # nobody knows when there will be something to measure
        return orders

    def answered(self, verdicts: Sequence[Verdict]) -> list[B]:
        """What ranks have found. Returns blocks to be given back as soon as those that have been ordered are held."""
        self._verdicts += verdicts
        if self._is_open or len(self._verdicts) < self._ranks:
            return []
        worst = max(self._verdicts, key=attrgetter("place"))
        if (at := worst.place) > 0:
            self._manager.recode(*self._choices[at], all_exact=at == len(worst.measured))
        self._is_open = True
        self._manager.begin_evicting()
        self._observer.judged(worst)
        done, self._held, self._kept = [*self._held, *chain.from_iterable(self._kept)], [], []
        return done

    def abandon(self) -> list[B]:
        """Forget what is being measured; returns its blocks."""
        held, self._held = self._held, []
        return held

    def let_go(self) -> None:
        """Give back all blocks that are held and not being measured."""
        kept, self._kept = self._kept, []
        self._pool.give_back(list(chain.from_iterable(kept)))

    def _hold(self) -> list[SpillBlock]:
        """Hold the first blocks of an idle session, and name them."""
        group, tokens = self._manager.shape.main_group, self._manager.shape.block_tokens
        orders: list[SpillBlock] = []
        for session, found in self._manager.samples(-(-SAMPLE_TOKENS // tokens)):
            for order in found if self._is_new(session) else ():
                block = self._pool.hold(order.key)
                if block is not None:
                    self._held.append(block)
                    [block_id] = self._pool.block_ids((block,))
                    orders.append(SpillBlock(order.key, group, block_id, order.first_token, order.exact))
            if orders:
                break
            self._gone[session.session_id] = session.idle_since
        return orders

    def _is_new(self, session: Session) -> bool:
        return self._gone.get(session.session_id) != session.idle_since
