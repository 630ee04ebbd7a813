"""What the HTTP API asks of an engine core, answered on the scheduler's thread: between two steps, or while there are
none.

Answers leave as JSON: vLLM's output thread, which every request needs, ends with what it cannot encode. Times are Unix
seconds.
"""

import time
from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json

from manthan.manager.config.registered import choose_policy
from manthan.manager.sessions.listing import Listing, Query
from manthan.manager.sessions.session import Session
from manthan.vllm_hooks.http.models import CoreState, Policy, PoolState, SessionWithLife, StoreState, TierState

if TYPE_CHECKING:
    from manthan.vllm_hooks.scheduler_half import SchedulerHalf

METHOD = "manthan_inquiry"
"""What the engine core offers it as."""
ORDER = 50
"""How many of those that go first are named."""
UNKNOWN, NOT_NOW, ASLEEP = 404, 409, 503

Answer = dict[str, Any]
"""`refused`: status and a sentence; or what was asked for, see `manthan.vllm_hooks.http.models`."""


class Inquiries:
    """half: of the engine core that these are about."""

    def __init__(self, half: "SchedulerHalf") -> None:
        self._half, self._manager, self._store = half, half.manager, half.config.tiers
        self._listing = Listing(half.manager.table, self._store.tier_names)

    def reply(self, what: str, asked: dict[str, Any]) -> bytes:
        """The answer in JSON; what that does not know, as an option of a policy may be, as text."""
        return to_json(self.answer(what, asked), inf_nan_mode="constants", fallback=str)

    def answer(self, what: str, asked: dict[str, Any]) -> Any:
        """what: sessions, session, state, or what is to be done with a session. asked: its arguments; `bound` is the
        tenant that asks, None for somebody who may see all."""
        self._offset, bound = time.time() - time.monotonic(), asked["bound"]
        if what == "sessions":
            page = self._listing.page(Query(**asked), self._offset)
            return {"total": page.total, "now": time.time(), "keys": page.keys, "sessions": page.sessions}
        if what == "state":
            return self._state(bound)
        session = self._listing.find(asked["id"], bound)
        if session is None:
            return _refused(UNKNOWN, f"There is no session {asked['id']!r}.")
        shown = self._listing.info(session, bound, self._offset)
        if what == "session":
            lives = self._half.telemetry.lives
            events = lives.of(session.session_id) if lives is not None else ()
            return SessionWithLife(**vars(shown), life=tuple(events))
        refused = self._steer(what, session, asked)
        if refused is not None or what == "release":
            return refused or shown
        return self._listing.info(session, bound, self._offset)

    def _state(self, bound: str | None) -> CoreState:
        half, manager = self._half, self._manager
        usage, shape, config = manager.usage, manager.shape, half.config
        blocks = half.pool.usable_blocks
        return CoreState(
            now=time.time(),
            policy=Policy(
                name=config.policy.name,
                options=dict(choose_policy(config.policy).options),
                order=list(islice(self._listing.order(bound), ORDER)),
            ),
            store=StoreState(
                kind=self._store.kind,
                up=half.telemetry.store_is_up,
                codec=shape.codec or config.codec.name,
                verdict=half.telemetry.verdict,
                tiers=self._tiers(usage.cold_nbytes, usage.budget_nbytes),
            ),
            pool=PoolState(
                block_tokens=shape.block_tokens,
                blocks=blocks,
                free_blocks=len(half.pool),
                bytes=blocks * (shape.hot_nbytes or shape.pool_nbytes(shape.main_group)),
                session_bytes=usage.hot_blocks * shape.hot_nbytes,
            ),
            sessions=self._listing.states(bound),
            totals=half.telemetry.totals,
        )

    def _tiers(self, cold: int, budget: int) -> list[TierState]:
        """What each tier has of so many bytes of codes, and its part of the budget."""
        fronts, moved = self._manager.table.fronts, self._manager.blocks.moved
        used = [cold - moved[tier] for tier in range(len(fronts))]
        used.append(cold if fronts.keeps_behind else cold - used[0])
        budgets = [*fronts.budgets, budget if fronts.keeps_behind else budget - fronts.budgets[0]]
        parts = zip(self._store.tier_names, used, budgets, strict=True)
        return [TierState(name=name, used_bytes=nbytes, budget_bytes=most) for name, nbytes, most in parts]

    # -- steering -------------------------------------------------------------------------------------

    def _steer(self, what: str, session: Session, asked: Mapping[str, Any]) -> Answer | None:
        """Do it, or say why not."""
        if self._half.is_out_of_use:
            return _refused(ASLEEP, "The engine sleeps.")
        said = {name: value for name, value in asked.items() if name not in ("id", "bound")}
        refused = self._manager.steer(what, session, time.monotonic(), **said)
        self._half.steered()
        return _refused(NOT_NOW, f"Not now: {refused}.") if refused else None


def _refused(status: int, why: str) -> Answer:
    return {"refused": [status, why]}
