"""Between the manager and the journal of a cold store that outlives the engine: what the next engine is to know, and
what an earlier one left."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from itertools import takewhile
from operator import attrgetter
from typing import Any, NamedTuple

from manthan.manager.sessions.adoption import FACTS, HISTORY, LeftAnchor, LeftSession, Part
from manthan.manager.sessions.manager import SessionMemoryManager
from manthan.manager.sessions.session import NO_CODES, Anchor, Block, CodeState, Encoding, Session, SessionState
from manthan.manager.tiers.journal import (
    GONE,
    Journal,
    JournalAnchor,
    JournalBlock,
    JournalChain,
    JournalSession,
)
from manthan.manager.work import Name, on_each


class Found(NamedTuple):
    """What became of what an earlier engine left.

    sessions: that are cold here now, of so many that were `written`. blocks, nbytes: theirs, of all groups and ranks.
    dropped: blocks that no session needs, or that some rank does not have.
    """

    sessions: int
    written: int
    blocks: int
    nbytes: int
    dropped: int


class Stored(NamedTuple):
    """What a session has in the store that can be gone on from."""

    chain: Sequence[Block]
    anchors: Sequence[Anchor]

    @property
    def mark(self) -> tuple[bytes, ...]:
        """What tells it from what the session has at another time; nothing if it has nothing."""
        last = [self.chain[-1].key] if self.chain else []
        return (*last, *(anchor.key for anchor in self.anchors))


class JournalLink:
    """Never waits. In the journal, times are seconds on a clock that the next engine has too: clock, Unix time.

    notes: what somebody else knows of blocks, by group and key, to be kept with them; None where nobody does.
    """

    def __init__(
        self,
        journal: Journal,
        manager: SessionMemoryManager,
        notes: MutableMapping[Name, bytes] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._journal, self._manager, self._notes, self._clock = journal, manager, notes, clock
        self._told: dict[str, tuple[bytes, ...] | None] = {}
        """By session, the mark of what was told last of it; None if the journal has something else."""
        self._gaps: dict[str, Block] = {}
        """By cold session, the first block of its chain without codes. Another session has it hot, and whoever encodes
        it then knows nothing of this one."""
        self._is_void = False
        manager.table.changed = {}

    # -- what the next engine is to know --------------------------------------------------------------

    def tell(self, now: float) -> None:
        """Write down what has changed since the last call."""
        changes = dict(self._manager.table.take_changes())
        if not self._is_void:
            closed = [session_id for session_id, block in self._gaps.items() if block.has_codes]
            changes |= {session_id: self._manager.table.by_id.get(session_id) for session_id in closed}
            self._journal.tell(list(self._records(changes.items(), now)))

    def reset(self) -> None:
        """The KV is void. What is computed from now on may be of other weights than those that the next engine has: it
        is not to know of it."""
        self._is_void = True
        self._journal.clear()

    def close(self) -> None:
        self._journal.close()

    def _records(self, changes: Iterable[tuple[str, Session | None]], now: float) -> Iterator[JournalSession]:
        offset = self._clock() - now
        for session_id, session in changes:
            self._mind_gap(session_id, session)
            if session is not None and session.state is SessionState.EVICTING:
                continue  # it changes again when that has ended
            stored = self._stored(session)
            if session is None or not stored.chain:
                if session_id in self._told:
                    del self._told[session_id]
                    yield JournalSession(session_id)
                continue
            is_same = self._told.get(session_id) == stored.mark
            self._told[session_id] = stored.mark
            chain = None if is_same else self._chain(stored)
            yield JournalSession(session_id, _facts(session, offset), chain, self._noted(chain))

    def _mind_gap(self, session_id: str, session: Session | None) -> None:
        self._gaps.pop(session_id, None)
        if session is not None and session.state is SessionState.COLD:
            gap = next((block for block in session.chain if not block.has_codes), None)
            if gap is not None:
                self._gaps[session_id] = gap

    def _stored(self, session: Session | None) -> Stored:
        if session is None:
            return Stored([], [])
        chain = list(takewhile(attrgetter("has_codes"), session.chain))
        anchors = [anchor for anchor in session.anchors if anchor.depth <= len(chain) and anchor.stands]
        if self._needs_anchors:
            chain = chain[: anchors[-1].depth] if anchors else []
        return Stored(chain, anchors)

    def _chain(self, stored: Stored) -> JournalChain:
        anchors = (JournalAnchor(anchor.depth, tuple(map(self._block, anchor.parts))) for anchor in stored.anchors)
        return JournalChain(tuple(map(self._block, stored.chain)), tuple(anchors))

    def _noted(self, chain: JournalChain | None) -> tuple[bytes, ...]:
        if self._notes is None or chain is None:
            return ()
        return tuple(self._notes.get((block.group, block.key), b"") for block in chain.all())

    def _block(self, block: Block) -> JournalBlock:
        group = self._manager.shape.main_group if block.group is None else block.group
        return JournalBlock(block.key, group, block.depth, block.encoding.exact, block.mark)

    @property
    def _needs_anchors(self) -> bool:
        return bool(self._manager.shape.beside)

    # -- what an earlier one left ---------------------------------------------------------------------

    def adopt(self, ranks: Sequence[Mapping[Name, int]], now: float) -> Found:
        """Take in what the journal names and all ranks have; the rest is dropped.

        ranks: of each, by group and key, what its blocks take of its part of the budget.
        """
        manager, offset, weigh = self._manager, self._clock() - now, on_each(len(ranks))
        whole = [name for name in ranks[0] if all(name in rank for rank in ranks)]
        sizes = {name: weigh([rank[name] for rank in ranks]) for name in whole}
        written = list(self._journal.sessions())
        lengths = manager.adopt([left for each in written if (left := self._left(each, sizes, offset))], now)
        self._take_notes(written)
        changes = dict(manager.table.take_changes())
        for each in written:
            is_whole = each.chain is not None and lengths.get(each.session_id) == len(each.chain.blocks)
            self._told[each.session_id] = self._stored(changes[each.session_id]).mark if is_whole else None
        again = [(name, changes.get(name)) for name, mark in self._told.items() if mark is None]
        self._journal.tell(list(self._records(again, now)))
        strays = {name for rank in ranks for name in rank if not self._is_needed(name)}
        manager.disown(strays)
        return Found(len(lengths), len(written), manager.blocks.cold, manager.blocks.cold_nbytes, len(strays))

    def _take_notes(self, written: Iterable[JournalSession]) -> None:
        """Those of blocks that the manager knows."""
        main, known = self._manager.shape.main_group, self._manager.blocks.get
        for each in written if self._notes is not None else ():
            for block, note in zip(each.chain.all() if each.chain else (), each.notes, strict=False):
                group = None if block.group == main else block.group
                if note and self._notes is not None and (known(block.key, group) or known(block.key, block.group)):
                    self._notes[block.group, block.key] = note

    def _is_needed(self, name: Name) -> bool:
        group, key = name
        block = self._manager.blocks.get(key, None if group == self._manager.shape.group else group)
        return block is not None and block.code is CodeState.COLD

    def _left(self, written: JournalSession, sizes: Mapping[Name, int], offset: float) -> LeftSession | None:
        """What of it is there; None if that is of no use, or it says too little of itself."""
        blocks, anchors = written.chain or GONE
        chain = list(takewhile(lambda block: self._was_stored(block, sizes), blocks))
        codes: dict[Part, Encoding] = {(None, block.key): self._code(block, sizes) for block in chain}
        derived: set[Part] = {(None, block.key) for block in chain if block.mark}
        standing = []
        for depth, parts in anchors:
            if depth <= len(chain) and all((part.group, part.key) in sizes for part in parts):
                codes |= {
                    (part.group, part.key): Encoding.of(sizes[part.group, part.key], part.exact) for part in parts
                }
                derived |= {(part.group, part.key) for part in parts if part.mark}
                standing.append(LeftAnchor(depth, [(part.group, part.key, part.at) for part in parts]))
        if not chain or (self._needs_anchors and not standing):
            return None
        try:
            facts = _shifted(written.facts, offset)
        except (KeyError, TypeError):
            return None
        return LeftSession(written.session_id, facts, [block.key for block in chain], standing, codes, derived)

    def _was_stored(self, block: JournalBlock, sizes: Mapping[Name, int]) -> bool:
        """Whether a chain's block has what it is to have."""
        return self._manager.shape.group is None or (block.group, block.key) in sizes

    def _code(self, block: JournalBlock, sizes: Mapping[Name, int]) -> Encoding:
        if self._manager.shape.group is None:
            return NO_CODES
        return Encoding.of(sizes[block.group, block.key], block.exact)


def _facts(session: Session, offset: float) -> dict[str, object]:
    """offset: from the manager's clock to the journal's."""
    return {
        **{name: getattr(session, name) for name in HISTORY},
        "asked_id": session.asked_id,
        "tenant": session.tenant,
        "pinned": session.pinned and session.pinned_until is None,
        "created": session.created + offset,
        "last_used": session.last_used + offset,
        "expected": session.expected and session.expected + offset,
    }


def _shifted(facts: Mapping[str, Any], offset: float) -> dict[str, Any]:
    """Return what `_facts` made, on the manager's clock. Raises KeyError and TypeError for other facts."""
    times = {name: facts[name] - offset for name in ("created", "last_used")}
    expected = facts["expected"] and facts["expected"] - offset
    return {name: facts[name] for name in FACTS} | times | {"expected": expected}
