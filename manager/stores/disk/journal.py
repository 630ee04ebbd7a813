"""Which sessions there are, on disk: what the next process is to know of them, in SQLite.

The scheduler's thread only leaves news here; a thread beside it writes them, the last of each session. A process that
is killed loses what was not written yet: blocks that nobody names are dropped by the next one.
"""

import json
import logging
import sqlite3
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

logger = logging.getLogger("vllm.manthan.disk")

SCHEMA = 1
"""Its version. A journal of another one is begun anew."""
TABLE = """
CREATE TABLE IF NOT EXISTS sessions (
    id TEXT PRIMARY KEY,
    facts TEXT NOT NULL,  -- JSON
    chain BLOB NOT NULL   -- what is stored of it; see _packed
) WITHOUT ROWID"""
_BLOCK = struct.Struct("<HHIQ")


class JournalBlock(NamedTuple):
    """One block of a chain, or of an anchor: its key, its KV cache group, how many tokens are exact, and its bytes of
    all ranks together."""

    key: bytes
    group: int
    exact: int
    nbytes: int


@dataclass(frozen=True)
class JournalSession:
    """A session as the next process finds it. facts: what JSON can hold. Of one that is gone the chain is empty."""

    session_id: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    chain: tuple[JournalBlock, ...] = ()


class Journal:
    """folder: where it lies. Raises OSError and sqlite3.Error where it cannot be opened."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "sessions.sqlite"
        self._news: dict[str, JournalSession] = {}
        self._is_cleared = False
        self._wake = threading.Condition()
        self._closing = False
        self._db = sqlite3.connect(self.path, check_same_thread=False, isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        if self._db.execute("PRAGMA user_version").fetchone()[0] != SCHEMA:
            self._db.execute("DROP TABLE IF EXISTS sessions")
            self._db.execute(f"PRAGMA user_version={SCHEMA}")
        self._db.execute(TABLE)
        self._thread = threading.Thread(target=self._run, name="manthan-journal", daemon=True)
        self._thread.start()

    def sessions(self) -> Iterator[JournalSession]:
        """All that were written. What cannot be read is left out."""
        for session_id, facts, chain in self._db.execute("SELECT id, facts, chain FROM sessions"):
            try:
                yield JournalSession(session_id, json.loads(facts), _unpacked(chain))
            except (ValueError, struct.error):
                logger.warning("Manthan: %s: session %s cannot be read.", self.path, session_id)

    def tell(self, sessions: Iterable[JournalSession]) -> None:
        """These are not what they were."""
        with self._wake:
            self._news.update((session.session_id, session) for session in sessions)
            if self._news:
                self._wake.notify()

    def clear(self) -> None:
        """No session is known any more."""
        with self._wake:
            self._news.clear()
            self._is_cleared = True
            self._wake.notify()

    def close(self) -> None:
        """All that was told is written."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        self._db.close()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._news or self._is_cleared or self._closing)
                news, self._news = self._news, {}
                is_cleared, self._is_cleared = self._is_cleared, False
                if self._closing and not (news or is_cleared):
                    return
            try:
                self._write(news.values(), is_cleared)
            except sqlite3.Error as error:  # a full disk, most likely; the sessions live on in this process
                logger.warning("Manthan: %s: sessions were not written: %s", self.path, error)

    def _write(self, news: Iterable[JournalSession], is_cleared: bool) -> None:
        """All or nothing. Raises sqlite3.Error."""
        kept = [(s.session_id, json.dumps(s.facts), _packed(s.chain)) for s in news if s.chain]
        gone = [(s.session_id,) for s in news if not s.chain]
        self._db.execute("BEGIN IMMEDIATE")
        try:
            if is_cleared:
                self._db.execute("DELETE FROM sessions")
            self._db.executemany("DELETE FROM sessions WHERE id = ?", gone)
            self._db.executemany("INSERT OR REPLACE INTO sessions VALUES (?, ?, ?)", kept)
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise


def _packed(chain: Iterable[JournalBlock]) -> bytes:
    return b"".join(_BLOCK.pack(len(b.key), b.group, b.exact, b.nbytes) + b.key for b in chain)


def _unpacked(data: bytes) -> tuple[JournalBlock, ...]:
    """Raises struct.error or ValueError."""
    blocks, at = [], 0
    while at < len(data):
        length, group, exact, nbytes = _BLOCK.unpack_from(data, at)
        at += _BLOCK.size
        key = data[at : at + length]
        if len(key) < length:
            raise ValueError("the chain ends within a key.")
        blocks.append(JournalBlock(key, group, exact, nbytes))
        at += length
    return tuple(blocks)
