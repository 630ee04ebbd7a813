"""Between the manager and a Redis that engines share: lookups, and news of sessions."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from manthan.manager.observer import Observer
from manthan.manager.sessions.manager import SessionMemoryManager
from manthan.manager.sessions.session import CodeState, Drop, FoundAnchor, Session
from manthan.manager.tiers.redis_schema import iso, sample, shared_blocks
from manthan.manager.tiers.redis_sessions import LookupResult, Needed, RedisSessions, SessionRecord

WAIT_S = 0.005
"""Seconds that a request which could begin waits for its lookup."""


@dataclass
class Lookup:
    """A request's prompt blocks. Redis was asked for those from the `first` on.

    Args:
        deadline: When the request goes on without an answer; None until it could begin.
    """

    session_id: str
    keys: list[bytes]
    first: int
    deadline: float | None = None


class RedisLink:
    """Never waits.

    Args:
        beside: Returns group and place of each block of other groups that a request needs to go on behind so many
            blocks; None for a model without such groups.
    """

    def __init__(
        self,
        sessions: RedisSessions,
        manager: SessionMemoryManager,
        observer: Observer,
        beside: Callable[[int], Iterable[tuple[int, int]]] | None,
    ) -> None:
        self._sessions, self._manager, self._observer = sessions, manager, observer
        self._beside = beside
        self._group = manager.shape.main_group
        self._lookups: dict[str, Lookup] = {}
        self.start, self.close = sessions.start, sessions.close

    @property
    def has_answers(self) -> bool:
        return self._sessions.has_answers

    @property
    def is_up(self) -> bool:
        return self._sessions.is_up

    def look_up(self, request_id: str, session_id: str, keys: Sequence[bytes], now: float) -> None:
        """Ask for the prompt's blocks that this engine does not have, as soon as the request is known."""
        first = self._manager.remote.known(keys)
        if not self._manager.min_blocks <= len(keys) > first:
            return
        lookup = Lookup(session_id, list(keys), first)
        needed = self._needed(lookup) if self._beside is not None else None
        if self._sessions.look_up(request_id, session_id, self._group, keys[first:], needed):
            self._lookups[request_id] = lookup

    def _needed(self, lookup: Lookup) -> Needed:
        return lambda count: [(group, key) for group, key, _ in self._parts(lookup, count)]

    def _parts(self, lookup: Lookup, count: int) -> list[tuple[int, bytes, int]]:
        """Group, key and depth of what is needed behind `count` of the blocks that were asked for."""
        assert self._beside is not None
        return [(group, lookup.keys[at], at) for group, at in self._beside(lookup.first + count)]

    def awaits(self, request_id: str, now: float) -> bool:
        """True if a request, which could begin now, should wait for the answer to its lookup."""
        lookup = self._lookups.get(request_id)
        if lookup is None:
            return False
        if lookup.deadline is None:
            lookup.deadline = now + WAIT_S
        if self._sessions.is_up and now < lookup.deadline:
            return True
        del self._lookups[request_id]
        self._observer.looked_up("unanswered")
        return False

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._lookups.pop(request_id, None)

    def hear(self) -> None:
        """Pass on to the manager what was found."""
        if not self._sessions.has_answers:
            return
        for request_id, found in self._sessions.take().items():
            lookup = self._lookups.pop(request_id, None)
            if lookup is not None:
                self._found(request_id, lookup, found)

    def _found(self, request_id: str, lookup: Lookup, found: LookupResult) -> None:
        sizes, anchored, sampled = found
        is_of_use = sizes and (self._beside is None or anchored is not None)
        self._observer.looked_up("found" if is_of_use else "nothing")
        if not sizes:
            return
        anchor = None
        if anchored is not None:
            parts = self._parts(lookup, anchored.blocks)
            anchor = FoundAnchor(lookup.first + anchored.blocks, parts, anchored.sizes)
        self._manager.remote.found(request_id, lookup.keys[: lookup.first + len(sizes)], sizes, anchor)
        self._manager.served_elsewhere(request_id, shared_blocks(sampled, lookup.keys))
        self._observer.arrived(lookup.session_id)

    def tell(self, drops: Iterable[Drop], now: float) -> None:
        """Leave word of what has changed since the last call."""
        offset, changes = time.time() - now, self._manager.table.take_changes()
        self._sessions.tell([self._record(session_id, session, offset) for session_id, session in changes], drops)

    def _record(self, session_id: str, session: Session | None, offset: float) -> SessionRecord:
        """offset: from the manager's clock to Unix seconds."""
        if session is None:
            return SessionRecord(session_id)
        cold = CodeState.COLD  # looking it up takes longer than what is asked of a block
        stored = [block for block in (*session.chain, *session.beside) if block.code is cold]
        blocks = [(self._group if block.group is None else block.group, block.key, block.depth) for block in stored]
        fields = {
            "tenant": session.tenant,
            "state": session.state,
            "tokens": len(session.chain) * self._manager.shape.block_tokens,
            "blocks": len(blocks),
            "bytes": sum([block.encoding.nbytes for block in stored]),
            "requests": session.uses,
            "hashes": sample([block.key for block in session.chain]),
            "created": iso(session.created + offset),
            "last_used": iso(session.last_used + offset),
        }
        return SessionRecord(session_id, fields, session.last_used + offset, blocks)

    def reset(self) -> str:
        """Return the name of the namespace that blocks are stored in from now on."""
        self._lookups.clear()
        return self._sessions.reset()
