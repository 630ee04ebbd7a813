"""Between the manager and the directory of a cold store that engines share: lookups, news, and answers."""

import logging
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from manthan.manager.observer import Observer
from manthan.manager.sessions.manager import SessionMemoryManager, SpillOrder
from manthan.manager.sessions.session import CodeState, Drop, Session
from manthan.manager.stores.directory import Directory, Room
from manthan.manager.stores.redis.schema import SessionRecord, StoredBlock

logger = logging.getLogger("vllm.manthan")


class Lookup(NamedTuple):
    """A request's prompt blocks, of which the store was asked from the `first` of them on."""

    keys: list[bytes]
    first: int
    deadline: float


class Heard(NamedTuple):
    """What became of blocks that wait for room: to be encoded; stored by others, in so many bytes; refused, and why."""

    granted: Sequence[bytes] = ()
    stored: Sequence[tuple[bytes, int]] = ()
    refused: Sequence[tuple[bytes, str]] = ()


class DirectoryLink:
    """Never waits. wait_s: how long a request waits for the answer to its lookup, at most."""

    def __init__(self, directory: Directory, manager: SessionMemoryManager, observer: Observer, wait_s: float) -> None:
        self._directory, self._manager, self._observer, self._wait_s = directory, manager, observer, wait_s
        self._group = manager.shape.main_group
        self._lookups: dict[str, Lookup] = {}
        self.start, self.close = directory.start, directory.close

    @property
    def has_answers(self) -> bool:
        return self._directory.has_answers

    @property
    def is_up(self) -> bool:
        return self._directory.is_up

    # -- lookups --------------------------------------------------------------------------------------

    def look_up(self, request_id: str, keys: Sequence[bytes], now: float) -> None:
        """Ask for what this engine does not have of a prompt's blocks, as soon as the request is known."""
        first = self._manager.elsewhere.known(keys)
        if not self._manager.min_blocks <= len(keys) > first:
            return
        if self._directory.look_up(request_id, self._group, keys[first:]):
            self._lookups[request_id] = Lookup(list(keys), first, now + self._wait_s)

    def awaits(self, request_id: str, now: float) -> bool:
        """Whether a request should wait for the answer to its lookup."""
        lookup = self._lookups.get(request_id)
        if lookup is None:
            return False
        if self._directory.is_up and now < lookup.deadline:
            return True
        del self._lookups[request_id]
        self._observer.looked_up("unanswered")
        return False

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._lookups.pop(request_id, None)

    # -- answers and news -----------------------------------------------------------------------------

    def reserve(self, orders: Iterable[SpillOrder]) -> None:
        """Ask for room for blocks; each is heard of as granted, stored or refused."""
        self._directory.reserve([Room(order.key, self._group, order.nbytes) for order in orders])

    def hear(self, now: float) -> Heard:
        """Pass on to the manager what came back; the caller sees to what was granted, stored and refused."""
        if not self._directory.has_answers:
            return Heard()
        answers, elsewhere = self._directory.take(), self._manager.elsewhere
        if answers.emptied:
            logger.warning("Manthan: what was stored in Redis is gone; sessions are stored again as they go cold.")
            elsewhere.emptied()
        for request_id, sizes in answers.found.items():
            lookup = self._lookups.pop(request_id, None)
            if lookup is not None:
                self._observer.looked_up("found" if sizes else "nothing")
                if sizes:
                    elsewhere.found(request_id, lookup.keys[: lookup.first + len(sizes)], sizes)
        elsewhere.not_stored([key for _, key in answers.lost])
        elsewhere.expire(answers.expired)
        if answers.used is not None or answers.strangers is not None:
            offset = time.time() - now
            strangers = answers.strangers and [s._replace(last_used=s.last_used - offset) for s in answers.strangers]
            elsewhere.counted(answers.used, strangers)
        return Heard(
            [key for _, key in answers.granted],
            [(key, nbytes) for _, key, nbytes in answers.stored],
            [(key, cause) for _, key, cause in answers.refused],
        )

    def tell(self, drops: Iterable[Drop], now: float) -> None:
        """Say what has changed since the last call."""
        elsewhere = self._manager.elsewhere
        offset = time.time() - now
        records = [self._record(session_id, session, offset) for session_id, session in elsewhere.take_changes()]
        self._directory.tell(records, drops, elsewhere.take_departed())

    def _record(self, session_id: str, session: Session | None, offset: float) -> SessionRecord:
        """offset: from the manager's clock to Unix seconds. A session without stored blocks has an empty chain."""
        info = self._manager.session(session_id)
        if session is None or info is None:
            return SessionRecord(session_id)
        chain = session.chain
        end = next((i for i in range(len(chain), 0, -1) if chain[i - 1].code is CodeState.COLD), 0)
        stored = tuple(
            StoredBlock(block.key, self._group, block.code is CodeState.COLD, block.encoding.nbytes)
            for block in chain[:end]
        )
        in_unix_time = info._replace(created=info.created + offset, last_used=info.last_used + offset)
        return SessionRecord(session_id, in_unix_time, stored)

    def reset(self) -> str:
        """See Directory.reset."""
        self._lookups.clear()
        return self._directory.reset()
