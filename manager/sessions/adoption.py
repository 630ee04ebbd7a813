"""Sessions that an earlier process left in a cold store that outlives it: they are as if they had gone cold here."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from manthan.manager.sessions.anchors import Anchors
from manthan.manager.sessions.budget import ColdBudget
from manthan.manager.sessions.marks import Mark
from manthan.manager.sessions.session import CodeState, Encoding, Session, SessionState
from manthan.manager.sessions.table import SessionTable
from manthan.manager.sessions.wishes import Wishes

Part = tuple[int | None, bytes]
"""KV cache group and key of a block; no group for one of chains."""
HISTORY = (
    "uses",
    "gap",
    "tokens",
    "added_tokens",
    "answer_tokens",
    "left_tokens",
    "prompt_depth",
    "prompt_end",
    "ttl_s",
    "priority",
    "expected",
)
"""Fields of a session in the journal, besides those that `SessionTable.adopt` takes."""
FACTS = (*HISTORY, "asked_id", "tenant", "pinned", "created", "last_used")
"""All fields of a session in the journal."""


class LeftAnchor(NamedTuple):
    """What other KV cache groups have behind so many blocks of a chain: group, key and place in its group of each."""

    depth: int
    parts: Sequence[tuple[int, bytes, int]]


@dataclass(frozen=True)
class LeftSession:
    """What an earlier process knew of a session. Times are seconds on the manager's clock.

    facts: values of FACTS. codes: what the blocks of its chain and its anchors have in the store. derived:
    those of them that were computed behind decoded blocks.
    """

    session_id: str
    facts: Mapping[str, Any]
    chain: Sequence[bytes]
    anchors: Sequence[LeftAnchor]
    codes: Mapping[Part, Encoding]
    derived: Collection[Part] = ()

    def parts(self, length: int) -> list[Part]:
        """The blocks of so much of it, and of the anchors that it keeps."""
        beside = ((group, key) for anchor in self.kept(length) for group, key, _ in anchor.parts)
        return list(dict.fromkeys([*((None, key) for key in self.chain[:length]), *beside]))

    def kept(self, length: int) -> list[LeftAnchor]:
        """Its anchors in so much of it that sessions keep: that at the end, and that where the last prompt ends."""
        depths = {length, min(length, self.facts["prompt_depth"])}
        return [anchor for anchor in self.anchors if anchor.depth in depths]


class Adoption:
    """Takes sessions in, within the budget and its shares."""

    def __init__(self, table: SessionTable, anchors: Anchors, budget: ColdBudget, wishes: Wishes) -> None:
        self._table, self._blocks, self._anchors = table, table.blocks, anchors
        self._budget, self._wishes = budget, wishes

    def adopt(self, left: Iterable[LeftSession], now: float) -> dict[str, int]:
        """Take in those for which there is room, the ones used last before others, and heads before tails.

        Returns how many blocks of its chain each has, by id.
        """
        newest_first = sorted(left, key=lambda session: session.facts["last_used"], reverse=True)
        entered = [(self._enter(each), each.facts["pinned"]) for each in newest_first]
        for session, was_pinned in reversed(entered):  # in the order in which policies would have seen them
            if session is None:
                continue
            self._table.set_state(session, SessionState.COLD, now)
            self._table.remember(session)
            self._wishes.adopted(session, was_pinned, now)
        return {session.session_id: len(session.chain) for session, _ in entered if session is not None}

    def _enter(self, left: LeftSession) -> Session | None:
        """The session with all of it that there is room for; it is HOT for a moment."""
        facts = left.facts
        self._budget.enter_tenant(facts["tenant"])
        length = self._fitting(left)
        if not length or left.session_id in self._table.by_id:
            return None
        known = (facts[name] for name in ("asked_id", "tenant", "created", "last_used"))
        session = self._table.adopt(left.session_id, *known)
        for name in HISTORY:
            setattr(session, name, facts[name])
        self._table.extend(session, left.chain[:length])
        prompt = int(session.prompt_end.partition(":")[0] or 0)
        if prompt <= length:
            self._table.tips.asks(session, left.chain[:prompt])
        for part in left.parts(length):
            if part[0] is None:
                self._store(part, left)
        for anchor in left.kept(length):
            placed = self._anchors.place(session, anchor.depth, anchor.parts)
            for group, key, _ in anchor.parts:
                self._store((group, key), left)
            self._anchors.settle(placed)
        return session

    def _fitting(self, left: LeftSession) -> int:
        """How much of it fits: up to an anchor, where those are needed."""
        room = min(self._budget.free, self._budget.left(left.facts["tenant"]))
        if self._anchors.is_needed:
            depths = sorted((anchor.depth for anchor in left.anchors), reverse=True)
            return next((depth for depth in depths if sum(self._sizes(left, depth)) <= room), 0)
        return sum(1 for total in accumulate(self._sizes(left, len(left.chain))) if total <= room)

    def _sizes(self, left: LeftSession, length: int) -> list[int]:
        """What its blocks take, in order, beside those that others have."""
        return [0 if self._is_stored(part) else left.codes[part].nbytes for part in left.parts(length)]

    def _is_stored(self, part: Part) -> bool:
        group, key = part
        block = self._blocks.get(key, group)
        return block is not None and block.code is CodeState.COLD

    def _store(self, part: Part, left: LeftSession) -> None:
        group, key = part
        block = self._blocks.get(key, group)
        if block is not None and block.code is CodeState.NONE:
            self._blocks.store(block, left.codes[part], left.facts["tenant"])
            block.mark = Mark.DERIVED if part in left.derived else Mark.EXACT
            self._blocks.mark_moved(block, self._table.fronts.all_moved)
