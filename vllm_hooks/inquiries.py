"""What the HTTP API asks of an engine core, answered on the scheduler's thread: between two steps, or while there are
none.

Answers leave as JSON: vLLM's output thread, which every request needs, ends with what it cannot encode. Times are Unix
seconds.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json

from manthan.manager.config.registered import choose_policy
from manthan.manager.lives import Event, in_words
from manthan.manager.sessions.listing import Query, Sort
from manthan.manager.sessions.session import Held, Session, SessionInfo, SessionState

if TYPE_CHECKING:
    from manthan.vllm_hooks.scheduler_half import SchedulerHalf

METHOD = "manthan_inquiry"
"""What the engine core offers it as."""
ORDER = 50
"""How many of those that go first are named."""
UNKNOWN, NOT_NOW, ASLEEP = 404, 409, 503

Answer = dict[str, Any]
"""`refused`: status and a sentence; or what was asked for."""


class Inquiries:
    """half: of the engine core that these are about."""

    def __init__(self, half: "SchedulerHalf") -> None:
        self._half, self._manager, self._store = half, half.manager, half.config.cold_store
        self._listing, steering = half.manager.listing, half.manager.steering
        self._does: dict[str, Callable[..., str]] = {
            "evict": steering.evict,
            "prefetch": steering.prefetch,
            "expect": steering.expect,
            "pin": steering.pin,
            "unpin": steering.unpin,
            "release": steering.release,
        }

    def reply(self, what: str, asked: dict[str, Any]) -> bytes:
        """The answer in JSON; what that does not know, as an option of a policy may be, as text."""
        return to_json(self.answer(what, asked), inf_nan_mode="constants", fallback=str)

    def answer(self, what: str, asked: dict[str, Any]) -> Answer:
        """what: sessions, session, state, or what is to be done with a session. asked: its arguments; `bound` is the
        tenant that asks, None for somebody who may see all."""
        self._offset = time.time() - time.monotonic()
        if what == "sessions":
            return self._sessions(asked)
        if what == "state":
            return self._state(asked["bound"])
        session = self._listing.find(asked["id"], asked["bound"])
        if session is None:
            return _refused(UNKNOWN, f"There is no session {asked['id']!r}.")
        shown = self._session(session, asked["bound"])
        if what == "session":
            return shown | {"life": self._life(session)}
        refused = self._steer(what, session, asked)
        if refused is not None or what == "release":
            return refused or shown
        return self._session(session, asked["bound"])

    # -- looking on -----------------------------------------------------------------------------------

    def _sessions(self, asked: Mapping[str, Any]) -> Answer:
        tier, names = asked["tier"], self._store.tier_names
        if tier is not None and tier not in names:
            return {"total": 0, "now": time.time(), "keys": [], "sessions": []}
        page = self._listing.page(
            Query(
                states=None if asked["states"] is None else {*map(SessionState, asked["states"])},
                bound=asked["bound"],
                tenant=asked["tenant"],
                tier=None if tier is None else names.index(tier),
                pinned=asked["pinned"],
                prefix=asked["prefix"],
                sort=Sort(asked["sort"]),
                descending=asked["descending"],
                limit=asked["limit"],
                offset=asked["offset"],
            )
        )
        shown = [self._shown(info, asked["bound"]) for info in page.sessions]
        return {"total": page.total, "now": time.time(), "keys": [list(key) for key in page.keys], "sessions": shown}

    def _session(self, session: Session, bound: str | None) -> Answer:
        return self._shown(self._listing.info(session), bound)

    def _life(self, session: Session) -> list[Answer]:
        lives = self._half.telemetry.lives
        return [_event(event) for event in (lives.of(session.session_id) if lives is not None else ())]

    def _shown(self, info: SessionInfo, bound: str | None) -> Answer:
        expected = info.expected
        return {
            "id": info.session_id if bound is None else info.told_id,
            "tenant": info.tenant,
            "state": str(info.state),
            "tokens": info.tokens,
            "blocks": info.blocks,
            "hot_blocks": info.hot_blocks,
            "cold_blocks": info.cold_blocks,
            "hot_bytes": info.hot_nbytes,
            "cold_bytes": info.cold_nbytes,
            "tiers": self._tiers(info.tiers),
            "created": self._time(info.created),
            "last_used": self._time(info.last_used),
            "requests": info.requests,
            "pinned": info.pinned,
            "priority": info.priority,
            "expected_return": None if expected is None else self._time(expected),
            "tool": info.awaits,
            "lossy_tokens": info.lossy_tokens,
        }

    def _time(self, seconds: float) -> float:
        """Of the manager's clock; the same each time, although two clocks are never read at once."""
        return round(seconds + self._offset, 3)

    def _tiers(self, held: Sequence[Held]) -> Answer:
        """What each tier has of a session, of those that have something."""
        tokens = self._manager.shape.block_tokens
        return {
            name: {"tokens": blocks * tokens, "blocks": blocks, "bytes": nbytes}
            for name, (blocks, nbytes) in zip(self._store.tier_names, held, strict=True)
            if nbytes
        }

    def _tiers_in_all(self, cold: int, budget: int) -> list[Answer]:
        """What each tier has of so many bytes of codes, and its part of the budget."""
        fronts, moved, names = self._manager.table.fronts, self._manager.blocks.moved, self._store.tier_names
        used = [cold - moved[tier] for tier in range(len(fronts))]
        used.append(cold if fronts.keeps_behind else cold - used[0])
        budgets = [*fronts.budgets, budget if fronts.keeps_behind else budget - fronts.budgets[0]]
        return [
            {"name": name, "used_bytes": nbytes, "budget_bytes": most}
            for name, nbytes, most in zip(names, used, budgets, strict=True)
        ]

    def _state(self, bound: str | None) -> Answer:
        half, manager = self._half, self._manager
        usage, shape, config = manager.usage, manager.shape, half.config
        return {
            "now": time.time(),
            "policy": {
                "name": config.policy.name,
                "options": dict(choose_policy(config.policy).options),
                "order": list(islice(self._listing.order(bound), ORDER)),
            },
            "store": {
                "kind": self._store.kind,
                "up": half.telemetry.store_is_up,
                "codec": shape.codec or config.codec.name,
                "verdict": half.telemetry.verdict,
                "tiers": self._tiers_in_all(usage.cold_nbytes, usage.budget_nbytes),
            },
            "pool": {
                "block_tokens": shape.block_tokens,
                "blocks": half.pool.usable_blocks,
                "free_blocks": len(half.pool),
                "bytes": half.pool.usable_blocks * (shape.hot_nbytes or shape.pool_nbytes(shape.main_group)),
                "session_bytes": usage.hot_blocks * shape.hot_nbytes,
            },
            "sessions": {str(state): count for state, count in self._listing.states(bound).items()},
            "totals": dict(half.telemetry.totals),
        }

    # -- steering -------------------------------------------------------------------------------------

    def _steer(self, what: str, session: Session, asked: Mapping[str, Any]) -> Answer | None:
        """Do it, or say why not."""
        if self._half.is_out_of_use:
            return _refused(ASLEEP, "The engine sleeps.")
        said = {name: value for name, value in asked.items() if name not in ("id", "bound")}
        refused = self._does[what](session, time.monotonic(), **said)
        self._half.steered()
        return _refused(NOT_NOW, f"Not now: {refused}.") if refused else None


def _refused(status: int, why: str) -> Answer:
    return {"refused": [status, why]}


def _event(event: Event) -> Answer:
    return {
        "at": event.at,
        "kind": str(event.kind),
        "tokens": event.tokens,
        "blocks": event.blocks,
        "bytes": event.nbytes,
        "seconds": event.seconds,
        "saved_tokens": event.saved,
        "text": in_words(event),
    }
