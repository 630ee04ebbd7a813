"""Questions of the HTTP API to an engine core, answered on the scheduler's thread between two steps.

Answers are encoded as JSON here, because vLLM's output thread would end on an answer that it cannot encode. Times are
Unix seconds.
"""

import time
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json

from manthan.manager.config.resolve import choose_policy
from manthan.manager.events import FIRST_BLOCKS
from manthan.manager.listing import Listing, Query
from manthan.vllm_hooks.http.models import (
    CoreState,
    Measuring,
    Policy,
    PoolState,
    SessionWithHistory,
    StoreState,
    TierState,
)

if TYPE_CHECKING:
    from manthan.vllm_hooks.scheduler_half import SchedulerHalf

METHOD = "manthan_query"  # name of the utility call that the engine core offers to API servers
ORDER = 50  # limit of sessions named in the answer to "state": the next ones to evict, by the policy's order
UNKNOWN, NOT_NOW, ASLEEP = 404, 409, 503  # HTTP statuses of refusals

Answer = dict[str, Any]  # a refusal has only the key `refused`: HTTP status, and a sentence


class Queries:
    def __init__(self, half: "SchedulerHalf") -> None:
        self._half, self._manager, self._store = half, half.manager, half.config.tiers

    @cached_property
    def _listing(self) -> Listing:
        return Listing(self._manager, self._half.driver.fronts, self._store.tier_names)

    def reply(self, what: str, asked: dict[str, Any]) -> bytes:
        return to_json(self.answer(what, asked), inf_nan_mode="constants", fallback=str)  # str: options of a policy

    def answer(self, what: str, asked: dict[str, Any]) -> Any:
        """Return the answer to a question; or act on a session, and return it. "session" and actions may be refused.

        Args:
            what: "sessions", "session", "state", "recheck" or "rechecked"; or an action of `Driver.steer`.
            asked: arguments. `bound`: tenant that asks; None for access to all tenants. For "sessions", also the fields
                of `Query`; for "session" and actions, `id`; for actions, `seconds` and `tool`; for "rechecked", see
                `SchedulerHalf.rechecked`.
        """
        offset, bound = time.time() - time.monotonic(), asked["bound"]
        if what == "sessions":
            page = self._listing.page(Query(**asked), offset)
            return {"total": page.total, "now": time.time(), "keys": page.keys, "sessions": page.sessions}
        if what == "state":
            return self._state(bound)
        if what == "recheck":
            return self._half.recheck()
        if what == "rechecked":
            return self._half.rechecked(asked["secret"], asked["divergence"], asked["is_same"])
        session = self._listing.find(asked["id"], bound)
        if session is None:
            least = self._half.config.idle.min_tokens
            short = f" (sessions of fewer than {least} tokens are not: idle.min_tokens)" if least else ""
            return _refused(
                UNKNOWN, f"No blocks of a session {asked['id']!r} are kept: none ever were{short}, or all were dropped."
            )
        shown = self._listing.info(session, bound, offset)
        if what == "session":
            histories = self._half.telemetry.histories
            return SessionWithHistory(**vars(shown), life=tuple(histories.of(session) if histories is not None else ()))
        if self._half.is_out_of_use:
            return _refused(ASLEEP, "The engine sleeps.")
        said = {name: value for name, value in asked.items() if name not in ("id", "bound")}
        refused = self._half.driver.steer(what, session, time.monotonic(), **said)
        self._half.steered()
        if refused:
            return _refused(NOT_NOW, f"Not now: {refused}.")
        return shown if what == "release" else self._listing.info(session, bound, offset)

    def _state(self, bound: str | None) -> CoreState:
        half, manager = self._half, self._manager
        usage, shape, config = manager.usage(), manager.shape, half.config
        main, blocks, verdict, codec = shape.groups[shape.main], half.pool.size, half.telemetry.verdict, half.used_codec
        measuring = None
        if half.guard is not None and verdict == "none" and config.codec.name != codec:
            measuring = Measuring(codec=config.codec.name, blocks=half.telemetry.measured_blocks, of=FIRST_BLOCKS)
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
                codec=codec,
                verdict=verdict,
                measuring=measuring,
                tiers=self._tiers(usage.saved_nbytes, usage.budget_nbytes),
            ),
            pool=PoolState(
                block_tokens=shape.block_tokens,
                blocks=blocks,
                free_blocks=len(half.pool),
                bytes=blocks * main.pool_nbytes,
                session_bytes=usage.unsaved_blocks * shape.pool_nbytes,
            ),
            sessions=self._listing.states(bound),
            token_s=None if half.limit is None else half.limit.token_s,
            totals=half.telemetry.totals,
        )

    def _tiers(self, saved: int, budget: int) -> list[TierState]:
        """Return each tier's state.

        saved, budget: bytes saved, and allowed, in all tiers. Copies that front tiers hold count in neither.
        """
        fronts, moved = self._half.driver.fronts, self._manager.blocks.moved_nbytes
        used = [saved - moved[tier] for tier in range(len(fronts))]
        used.append(saved if fronts.keeps_behind else saved - used[0])
        budgets = [*fronts.budgets, budget if fronts.keeps_behind else budget - fronts.budgets[0]]
        parts = zip(self._store.tier_names, used, budgets, strict=True)
        return [TierState(name=name, used_bytes=nbytes, budget_bytes=most) for name, nbytes, most in parts]


def _refused(status: int, why: str) -> Answer:
    return {"refused": [status, why]}
