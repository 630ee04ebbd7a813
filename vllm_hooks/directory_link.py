"""Between the manager and the directory of its cold store: lookups for requests that come in, news, and answers."""

import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from vllm.logger import init_logger

from manthan.manager.sessions.session import CodeState, Drop, Session
from manthan.manager.sessions.shared import SharedSessionManager
from manthan.manager.stores.directory import Answers, Directory
from manthan.manager.stores.redis.schema import SessionRecord, StoredBlock
from manthan.vllm_hooks.telemetry.metrics import StatsRecorder

logger = init_logger("vllm.manthan")


class Lookup(NamedTuple):
    """A request's prompt blocks, of which the store was asked from the `first` of them on."""

    keys: list[bytes]
    first: int
    deadline: float


class DirectoryLink:
    """Lives on the scheduler's thread and never waits.

    wait_s: how long a request waits for the answer to its lookup, at most.
    """

    def __init__(
        self, directory: Directory, manager: SharedSessionManager, stats: StatsRecorder, wait_s: float
    ) -> None:
        self._directory, self._manager, self._stats, self._wait_s = directory, manager, stats, wait_s
        self._lookups: dict[str, Lookup] = {}
        self.start, self.close, self.reserve = directory.start, directory.close, directory.reserve

    @property
    def has_answers(self) -> bool:
        return self._directory.has_answers

    # -- lookups --------------------------------------------------------------------------------------

    def look_up(self, request_id: str, keys: Sequence[bytes]) -> None:
        """Ask for what this engine does not have of a prompt's blocks, as soon as the request is known."""
        if not self._directory.is_shared:
            return
        first = self._manager.known(keys)
        if self._manager.min_blocks <= len(keys) > first and self._directory.look_up(request_id, keys[first:]):
            self._lookups[request_id] = Lookup(list(keys), first, time.monotonic() + self._wait_s)

    def awaits(self, request_id: str) -> bool:
        """Whether a request should wait for the answer to its lookup."""
        lookup = self._lookups.get(request_id)
        if lookup is None:
            return False
        if self._directory.is_up and time.monotonic() < lookup.deadline:
            return True
        del self._lookups[request_id]
        self._stats.looked_up("unanswered")
        return False

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._lookups.pop(request_id, None)

    # -- answers and news -----------------------------------------------------------------------------

    def hear(self) -> Answers:
        """Pass on to the manager what came back; the caller sees to what was granted, stored and refused."""
        self._stats.store_is_up = self._directory.is_up
        if not self._directory.has_answers:
            return Answers()
        answers, manager = self._directory.take(), self._manager
        if answers.emptied:
            logger.warning("Manthan: what was stored in Redis is gone; sessions are stored again as they go cold.")
            manager.emptied()
        for request_id, found in answers.found.items():
            lookup = self._lookups.pop(request_id, None)
            if lookup is not None:
                self._stats.looked_up("found" if found else "nothing")
                if found:
                    manager.found(request_id, lookup.keys[: lookup.first + found], lookup.first)
        manager.not_stored(answers.lost)
        manager.expire(answers.expired)
        if answers.used is not None or answers.strangers is not None:
            offset = time.time() - time.monotonic()
            strangers = answers.strangers and [s._replace(last_used=s.last_used - offset) for s in answers.strangers]
            manager.counted(answers.used, strangers)
        return answers

    def tell(self, drops: Iterable[Drop]) -> None:
        """Say what has changed since the last call."""
        changes, departed = self._manager.take_changes(), self._manager.take_departed()
        if not self._directory.is_shared:
            return
        offset = time.time() - time.monotonic()
        records = [_record(session_id, session, offset) for session_id, session in changes]
        self._directory.tell(records, drops, departed)

    def reset(self) -> str:
        """See Directory.reset."""
        self._lookups.clear()
        return self._directory.reset()


def _record(session_id: str, session: Session | None, offset: float) -> SessionRecord:
    """offset: from the manager's clock to Unix seconds. A session without stored blocks has an empty chain."""
    if session is None:
        return SessionRecord(session_id, "gone", (), 0.0, 0.0, 0)
    chain = session.chain
    end = next((i for i in range(len(chain), 0, -1) if chain[i - 1].code is CodeState.COLD), 0)
    stored = tuple(StoredBlock(block.key, block.code is CodeState.COLD) for block in chain[:end])
    return SessionRecord(
        session_id, str(session.state), stored, session.created + offset, session.last_used + offset, session.uses
    )
