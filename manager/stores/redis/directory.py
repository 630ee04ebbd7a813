"""The books of a cold store in Redis, kept on a thread beside the engine's.

The engine's thread leaves questions and news here and fetches answers. What cannot be said while Redis is down is said
when it is back, as it is then: news of one session replace what was to be said of it before.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from manthan.manager.sessions.session import Drop, DropCause, Stranger
from manthan.manager.stores.cold_store import STORE_FULL, ColdStoreError
from manthan.manager.stores.directory import Anchored, Answers, Directory, Needed, Room
from manthan.manager.stores.redis.client import Circuit
from manthan.manager.stores.redis.index import BATCH, Grant, RedisIndex, batches
from manthan.manager.stores.redis.schema import SESSION, BlockId, Namespace, SessionRecord
from manthan.manager.stores.sealed import Sealer, sealed_text

logger = logging.getLogger("vllm.manthan.redis")
T = TypeVar("T")

COLLECT_S = 10.0
"""How often what has expired is removed, and the store's use is counted."""
STRANGERS = 256
"""Other engines' sessions that are looked at, at most: those to expire first."""
CLOSE_S = 5.0
REST_S = 0.5
"""How long to wait before something is tried again for which there is no circuit."""


class _Lookup(NamedTuple):
    """What a request asks for."""

    request_id: str
    group: int
    keys: Sequence[bytes]
    needed: Needed | None


class RedisDirectory(Directory):
    """make_index: what keeps the books of a namespace. facts: what the namespace and its sessions say of themselves.

    ring: called on this directory's thread when there is something to take. sealer: of what sessions are called; None
    to call them what they are.
    """

    def __init__(
        self,
        make_index: Callable[[Namespace], RedisIndex],
        namespace: Namespace,
        circuit: Circuit,
        facts: Mapping[str, object],
        ring: Callable[[], None],
        collect_s: float = COLLECT_S,
        sealer: Sealer | None = None,
    ) -> None:
        self._sealer = sealer
        self._make_index, self._circuit, self._facts, self._ring = make_index, circuit, facts, ring
        self._index = make_index(namespace)
        self._base = namespace
        self._collect_s = collect_s
        self._wake = threading.Condition()
        self._answers = Answers()
        self._lookups: list[_Lookup] = []
        self._rooms: list[Room] = []
        self._records: dict[str, SessionRecord] = {}
        self._drops: dict[BlockId, bool] = {}  # whether to force it
        self._strangers: list[Stranger] = []
        self._old: list[tuple[RedisIndex, list[str]]] = []
        self._names: dict[str, str] = {}  # what a session is called in Redis, where that is not its id
        self._saved: set[str] = set()
        self._incarnation = ""
        self._next_collect = 0.0
        self._was_up = True
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="manthan-redis", daemon=True)

    # -- the engine's thread --------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def reserve(self, rooms: Sequence[Room]) -> None:
        with self._wake:
            self._rooms += rooms
            self._wake.notify()

    def look_up(self, request_id: str, group: int, keys: Sequence[bytes], needed: Needed | None = None) -> bool:
        if not self._circuit.is_up:
            return False
        with self._wake:
            self._lookups.append(_Lookup(request_id, group, tuple(keys), needed))
            self._wake.notify()
        return True

    def tell(self, records: Iterable[SessionRecord], drops: Iterable[Drop], departed: Iterable[Stranger]) -> None:
        with self._wake:
            for record in records:
                self._records[record.session_id] = record
            for drop in drops:
                if drop.cause is not DropCause.RESET:
                    blocks = [(drop.group, key) for key in drop.keys]
                    self._drops.update(dict.fromkeys(blocks, drop.cause is DropCause.FAILED))
                if drop.cause is DropCause.FAILED:
                    self._next_collect = 0.0  # perhaps all is gone
            self._strangers += departed
            if self._has_news():
                self._wake.notify()

    def reset(self) -> str:
        """From now on the KV is perhaps another model's: what other engines have stored is not read any more, and
        nothing of this one's is stored where they read."""
        with self._wake:
            self._old.append((self._index, list(self._saved)))
            self._index = self._make_index(self._base.apart(secrets.token_hex(4)))
            self._incarnation = ""
            self._records, self._drops, self._strangers, self._saved, self._names = {}, {}, [], set(), {}
            said = self._answers
            asked = [*said.found, *(lookup.request_id for lookup in self._lookups)]
            self._answers = Answers(refused=said.refused, found={request_id: [] for request_id in asked})
            blocks = [*said.granted, *((group, key) for group, key, _ in said.stored)]
            self._answers.refused += [(*block, "reset") for block in blocks]
            self._refuse(self._rooms, "reset")
            self._lookups, self._rooms = [], []
            self._wake.notify()
            return self._index.namespace.name

    def take(self) -> Answers:
        with self._wake:
            taken, self._answers = self._answers, Answers()
            return taken

    @property
    def has_answers(self) -> bool:
        return self._answers != Answers()

    @property
    def is_up(self) -> bool:
        return self._circuit.is_up

    def close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            logger.warning("Manthan: Redis does not answer; what was not said to it yet is left unsaid.")

    # -- the directory's thread -----------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing or (self._has_news() and self._circuit.is_up):
            with self._wake:
                self._wake.wait_for(self._is_due, timeout=self._pause())
                lookups, rooms = self._lookups, self._rooms
                self._lookups, self._rooms = [], []
                index = self._index
            self._look_up(index, lookups)
            self._try(self._say, index)  # first: a reservation may need the room
            self._reserve_all(index, rooms)
            if time.monotonic() >= self._next_collect or not self._incarnation:
                self._try(self._look_around, index)
            if lookups or rooms:
                self._ring()
            self._log_state()

    def _has_news(self) -> bool:
        return bool(self._records or self._drops or self._strangers or self._old)

    def _is_due(self) -> bool:
        is_asked = self._lookups or self._rooms
        return bool(is_asked or self._closing or (self._has_news() and not self._circuit.wait_s))

    def _pause(self) -> float:
        """Seconds until there is something to do without being asked."""
        return max(self._circuit.wait_s, self._next_collect - time.monotonic(), 0.01)

    def _try(self, what: Callable[[RedisIndex], None], index: RedisIndex) -> None:
        if self._circuit.wait_s:
            return
        try:
            what(index)
        except ColdStoreError:
            self._next_collect = 0.0  # the circuit remembers why; what was not said is still there
            if not self._circuit.wait_s:  # it does answer, but its memory is full
                time.sleep(REST_S)
        except Exception:
            logger.exception("Manthan: the books in Redis are behind")
            time.sleep(REST_S)

    def _look_up(self, index: RedisIndex, lookups: Sequence[_Lookup]) -> None:
        for lookup in lookups:
            found: list[int] = []
            anchored: Anchored | None = None
            try:
                found = index.look_up(lookup.group, lookup.keys)
                if lookup.needed is not None:
                    anchored = index.anchored(len(found), lookup.needed)
            except ColdStoreError:
                pass
            except Exception:  # the request must get an answer, and this thread must live
                logger.exception("Manthan: a lookup in Redis failed")
            with self._wake:
                if index is self._index:
                    self._answers.found[lookup.request_id] = found
                    if anchored is not None:
                        self._answers.anchored[lookup.request_id] = anchored

    def _reserve_all(self, index: RedisIndex, rooms: Sequence[Room]) -> None:
        for some in batches(rooms, BATCH):
            try:
                self._reserve(index, some)
            except ColdStoreError as error:
                with self._wake:
                    self._refuse(some, error.cause)
            except Exception:
                logger.exception("Manthan: a reservation in Redis failed")
                with self._wake:
                    self._refuse(some, "internal")

    def _reserve(self, index: RedisIndex, rooms: Sequence[Room]) -> None:
        answered, used = index.reserve(rooms)
        with self._wake:
            if index is not self._index:
                self._refuse(rooms, "reset")
                return
            answers = self._answers
            for room, (grant, nbytes) in zip(rooms, answered, strict=True):
                if grant is Grant.FULL:
                    self._refuse([room], STORE_FULL)
                    self._next_collect = 0.0  # somebody else's sessions may have to go
                elif grant is Grant.STORED:
                    answers.stored.append((room.group, room.key, nbytes))
                else:
                    answers.granted.append((room.group, room.key))
            answers.used = None if self._has_news() else used  # what is not told yet is counted otherwise here

    def _refuse(self, rooms: Iterable[Room], cause: str) -> None:
        self._answers.refused += [(room.group, room.key, cause) for room in rooms]

    def _look_around(self, index: RedisIndex) -> None:
        """Enter the namespace, or see whether it is still there; remove what has expired; count."""
        if not self._incarnation or index.incarnation() != self._incarnation:
            found = index.attach(self._facts, secrets.token_hex(8))
            with self._wake:
                if index is not self._index:
                    return
                self._answers.emptied |= bool(self._incarnation) and found != self._incarnation
                if self._answers.emptied:
                    self._records.clear()
                    self._drops.clear()
                    self._saved.clear()
                self._incarnation = found
        expired, used = index.collect()
        strangers = index.strangers(STRANGERS)
        with self._wake:
            self._next_collect = time.monotonic() + self._collect_s
            if index is self._index:
                own = {name: session_id for session_id, name in self._names.items()}
                self._answers.expired += [own.get(name, name) for name in expired]
                self._answers.strangers = strangers
                self._answers.used = None if self._has_news() else used
        self._ring()

    def _say(self, index: RedisIndex) -> None:
        """Strangers' sessions go first, and then ours are written: the room is needed."""
        while self._old:
            old, names = self._old[0]
            old.leave(names)
            self._old.pop(0)
        while stranger := self._first(index, self._strangers):
            index.forget(stranger.session_id, owned=False, until=stranger.expires)
            with self._wake:
                self._strangers = [other for other in self._strangers if other is not stranger]
        while record := self._first(index, self._records.values()):
            self._save(index, record)
            with self._wake:
                if self._records.get(record.session_id) is record:
                    del self._records[record.session_id]
        for force in (False, True):
            with self._wake:
                blocks = [block for block, forced in self._drops.items() if forced is force and index is self._index]
            index.release(blocks, force=force)
            with self._wake:
                for block in blocks:
                    if self._drops.get(block) is force:  # it may be told to be forced meanwhile
                        del self._drops[block]

    def _first(self, index: RedisIndex, news: Iterable[T]) -> T | None:
        """The next of some news, if they are still of this index's namespace."""
        with self._wake:
            return next(iter(news), None) if index is self._index else None

    def _save(self, index: RedisIndex, record: SessionRecord) -> None:
        session_id = record.session_id
        name = self._names.get(session_id) or self._name(session_id, session_id)
        if not record.chain:
            if name in self._saved:
                index.forget(name)
            self._saved.discard(name)
            self._names.pop(session_id, None)
            return
        self._saved.add(name)
        saved = index.save(record._replace(session_id=name), self._about(index, record, name))
        if saved.verdict == "conflict":
            name = self._name(session_id, f"{session_id}~{index.owner}")
            self._saved.add(name)
            saved = index.save(record._replace(session_id=name), self._about(index, record, name))
        for absorbed in saved.absorbed:
            index.forget(absorbed, owned=False)
        if saved.lost:
            with self._wake:
                if index is self._index:
                    self._answers.lost += saved.lost
            self._ring()

    def _name(self, session_id: str, told: str) -> str:
        """What a session is called in Redis from now on, where those who may know it call it what is told."""
        name = told if self._sealer is None else self._sealer.names.session(told)
        if name != session_id:
            self._names[session_id] = name
        return name

    def _about(self, index: RedisIndex, record: SessionRecord, name: str) -> Mapping[str, object]:
        """Further fields of a session's record."""
        if self._sealer is None or record.info is None:
            return self._facts
        sealer = self._sealer.at(index.namespace.name)
        return {**self._facts, "sealed": sealed_text(sealer, record.session_id, record.info.tenant, *SESSION, name)}

    def _log_state(self) -> None:
        if self._circuit.is_up is not self._was_up:
            self._was_up = self._circuit.is_up
            if self._was_up:
                logger.info("Manthan: Redis answers again.")
                self._next_collect = 0.0
            else:
                logger.warning(
                    "Manthan: Redis does not serve (%s). Sessions stay hot or are recomputed until it does.",
                    self._circuit.last_error,
                )
