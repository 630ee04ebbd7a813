"""Between the manager and the directory of a cold store that engines share: lookups, news, and answers."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from manthan.manager.observer import Observer
from manthan.manager.sessions.manager import SessionMemoryManager, SpillOrder
from manthan.manager.sessions.session import Block, CodeState, Drop, FoundAnchor, Session
from manthan.manager.stores.directory import Anchored, Directory, Needed, Room
from manthan.manager.stores.redis.schema import SessionRecord, StoredBlock, StoredChain
from manthan.manager.work import Name

logger = logging.getLogger("vllm.manthan")


class Lookup(NamedTuple):
    """A request's prompt blocks, of which the store was asked from the `first` of them on."""

    keys: list[bytes]
    first: int
    deadline: float


class Heard(NamedTuple):
    """What became of blocks that wait for room: to be encoded; stored by others, in so many bytes; refused, and why."""

    granted: Sequence[Name] = ()
    stored: Sequence[tuple[Name, int]] = ()
    refused: Sequence[tuple[Name, str]] = ()


class DirectoryLink:
    """Never waits.

    wait_s: how long a request waits for the answer to its lookup, at most. beside: which blocks of other groups who
    goes on behind so many blocks of a chain needs, by group and place in it; None for a model without such groups.
    """

    def __init__(
        self,
        directory: Directory,
        manager: SessionMemoryManager,
        observer: Observer,
        wait_s: float,
        beside: Callable[[int], Iterable[tuple[int, int]]] | None = None,
    ) -> None:
        self._directory, self._manager, self._observer, self._wait_s = directory, manager, observer, wait_s
        self._beside = beside
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
        lookup = Lookup(list(keys), first, now + self._wait_s)
        needed = self._needed(lookup) if self._beside is not None else None
        if self._directory.look_up(request_id, self._group, keys[first:], needed):
            self._lookups[request_id] = lookup

    def _needed(self, lookup: Lookup) -> Needed:
        def needed(count: int) -> list[Name]:
            return [(group, key) for group, key, _ in self._parts(lookup, count)]

        return needed

    def _parts(self, lookup: Lookup, count: int) -> list[tuple[int, bytes, int]]:
        """Group, key and depth of what is needed behind so many of the blocks that were asked for."""
        assert self._beside is not None
        return [(group, lookup.keys[at], at) for group, at in self._beside(lookup.first + count)]

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
        self._directory.reserve(
            [Room(order.key, self._group if order.group is None else order.group, order.nbytes) for order in orders]
        )

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
                self._found(request_id, lookup, sizes, answers.anchored.get(request_id))
        lost = answers.lost
        elsewhere.not_stored(
            [key for group, key in lost if group == self._group], [name for name in lost if name[0] != self._group]
        )
        elsewhere.expire(answers.expired)
        if answers.used is not None or answers.strangers is not None:
            offset = time.time() - now
            strangers = answers.strangers and [s._replace(last_used=s.last_used - offset) for s in answers.strangers]
            elsewhere.counted(answers.used, strangers)
        return Heard(
            answers.granted,
            [((group, key), nbytes) for group, key, nbytes in answers.stored],
            [((group, key), cause) for group, key, cause in answers.refused],
        )

    def _found(self, request_id: str, lookup: Lookup, sizes: Sequence[int], anchored: Anchored | None) -> None:
        is_of_use = sizes and (self._beside is None or anchored is not None)
        self._observer.looked_up("found" if is_of_use else "nothing")
        if not sizes:
            return
        first, anchor = lookup.first, None
        if anchored is not None:
            anchor = FoundAnchor(first + anchored.blocks, self._parts(lookup, anchored.blocks), anchored.sizes)
        self._manager.elsewhere.found(request_id, lookup.keys[: first + len(sizes)], sizes, anchor)

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
        cold = CodeState.COLD  # looking it up takes longer than what is asked of a block
        stored = bytes([block.code is cold for block in session.chain])
        end = stored.rfind(1) + 1
        anchors = [anchor for anchor in session.anchors if any(part.code is CodeState.COLD for part in anchor.parts)]
        end = max([end, *(anchor.depth for anchor in anchors)])  # what is stored at once must be somebody's
        beside = dict.fromkeys(part for anchor in anchors for part in anchor.parts if part.code is CodeState.COLD)
        in_unix_time = info._replace(created=info.created + offset, last_used=info.last_used + offset)
        some = session.chain[:end]
        keys, sizes = tuple([block.key for block in some]), tuple([block.encoding.nbytes for block in some])
        chain = StoredChain(self._group, keys, stored[:end], sizes)
        return SessionRecord(session_id, in_unix_time, chain, tuple(map(self._stored, beside)))

    def _stored(self, block: Block) -> StoredBlock:
        group = self._group if block.group is None else block.group
        return StoredBlock(block.key, group, block.code is CodeState.COLD, block.encoding.nbytes)

    def reset(self) -> str:
        """See Directory.reset."""
        self._lookups.clear()
        return self._directory.reset()
