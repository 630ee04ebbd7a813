"""The sessions of this engine, on disk, in SQLite, for the next process.

The scheduler's thread only leaves news here. A thread writes the last news of each session. A process that is killed
loses what was not written yet: the next process drops blocks that no session names.
"""

import json
import logging
import os
import shutil
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain as chained
from pathlib import Path
from typing import Any, NamedTuple

from manthan.manager.tiers.disk_files import is_damage, make_folder, set_aside
from manthan.manager.tiers.sealed import Sealer, SealError

logger = logging.getLogger("vllm.manthan.disk")

JOURNAL = "sessions.sqlite"
SCHEMA = 5
"""Version. A journal of another one is begun anew."""
CLOSE_S = 5.0
REST_S = 1.0
"""Seconds until a write that failed is tried again."""
TABLE = """
CREATE TABLE IF NOT EXISTS sessions (
    id TEXT PRIMARY KEY,
    facts BLOB NOT NULL,  -- JSON
    chain BLOB NOT NULL   -- JSON: blocks, resume points, and notes of both
) WITHOUT ROWID"""
ID = "id"
"""Field of sealed facts: the session's id. Its row is called otherwise."""
ABOUT = ("journal",)
"""What sealed rows are bound to, besides their ids."""
FAULTS = (sqlite3.Error, OSError, UnicodeDecodeError)
"""Exceptions of SQLite and the disk. The last one is of names in a damaged schema."""
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, SealError)


class JournalBlock(NamedTuple):
    """A block of a session, or of a resume point.

    Args:
        key: Block hash.
        group: KV cache group.
        at: Place among the blocks of its group.
        exact: Number of its first tokens that are exact.
        mark: See `manthan.manager.sessions.marks`.
    """

    key: bytes
    group: int
    at: int
    exact: int
    mark: int = 0


class JournalAnchor(NamedTuple):
    """Blocks that other KV cache groups have at a resume point, `depth` blocks into the session."""

    depth: int
    parts: tuple[JournalBlock, ...]


class JournalChain(NamedTuple):
    """Saved blocks of a session."""

    blocks: tuple[JournalBlock, ...]
    anchors: tuple[JournalAnchor, ...] = ()

    def all(self) -> Iterator[JournalBlock]:
        """Yield the session's blocks, and then those of each resume point."""
        return chained(self.blocks, *(anchor.parts for anchor in self.anchors))


GONE = JournalChain(())


@dataclass(frozen=True)
class JournalSession:
    """A session as the next process finds it.

    Args:
        facts: What JSON can hold.
        chain: None if it has not changed; without blocks if the session is gone.
        notes: Bytes that another part keeps with each block of the chain. They do not change if the chain does not.
    """

    session_id: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    chain: JournalChain | None = GONE
    notes: tuple[bytes, ...] = ()


class Journal:
    """Database of sessions in a folder.

    A damaged file is set aside, and a new one is begun. Where no file can be used, sessions are lost with the process.

    Args:
        sealer: Seals the rows; None to write them as they are.
    """

    def __init__(self, folder: Path, sealer: Sealer | None = None) -> None:
        self._sealer, self.path = sealer, folder / JOURNAL
        self._news: dict[str, JournalSession] = {}
        self._is_cleared = self._closing = False
        self._rest_s = 0.0
        self._wake = threading.Condition()
        self._db = _open(self.path)
        self._thread = threading.Thread(target=self._run, name="manthan-journal", daemon=True)
        self._thread.start()

    def sessions(self) -> Iterator[JournalSession]:
        """Yield the sessions that were written. Remove those that cannot be read."""
        bad = []
        for row_id, facts, chain in self._rows():
            try:
                found: dict[str, Any] = json.loads(self._opened(facts, row_id, "facts"))
                session_id = row_id if self._sealer is None else found.pop(ID)
                yield JournalSession(session_id, found, *_unpacked(self._opened(chain, row_id, "chain")))
            except UNREADABLE:
                bad.append((row_id,))
        if bad:
            logger.warning("Manthan: %s: %d sessions cannot be read, and are forgotten.", self.path, len(bad))
            with suppress(sqlite3.Error), self._db:
                self._db.executemany("DELETE FROM sessions WHERE id = ?", bad)

    def _rows(self) -> Iterator[tuple[Any, ...]]:
        """Yield the rows up to the first that SQLite cannot read."""
        try:
            yield from self._db.execute("SELECT id, facts, chain FROM sessions")
        except FAULTS as error:
            logger.warning("Manthan: %s: sessions cannot be read: %s", self.path, error)

    def tell(self, sessions: Iterable[JournalSession]) -> None:
        """Leave sessions that have changed."""
        with self._wake:
            for session in sessions:
                self._add(session)
            if self._news:
                self._wake.notify()

    def _add(self, session: JournalSession) -> None:
        """Replace earlier news of a session that are not written yet."""
        before = self._news.get(session.session_id)
        if session.chain is None and before is not None:
            session = replace(session, chain=before.chain, notes=before.notes)
        self._news[session.session_id] = session

    def clear(self) -> None:
        """Forget all sessions."""
        with self._wake:
            self._news.clear()
            self._is_cleared = True
            self._wake.notify()

    def close(self) -> None:
        """Write all that was told, if that is possible within CLOSE_S."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._db.close()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closing, self._rest_s)
                self._wake.wait_for(lambda: self._news or self._is_cleared or self._closing)
                news, self._news = self._news, {}
                is_cleared, self._is_cleared = self._is_cleared, False
                if self._closing and not (news or is_cleared):
                    return
            try:
                self._write(news.values(), is_cleared)
                self._rest_s = 0.0
            except FAULTS as error:  # a full disk, most likely; the sessions live on in this process
                if not self._rest_s:
                    logger.warning("Manthan: %s: sessions are not written until that is possible: %s", self.path, error)
                self._rest_s = REST_S
                with self._wake:
                    if self._closing:
                        return
                    self._take_back(news, is_cleared)

    def _sealed(self, text: str, row_id: str, part: str) -> bytes:
        return text.encode() if self._sealer is None else self._sealer.seal(text.encode(), "", *ABOUT, row_id, part)

    def _opened(self, value: bytes, row_id: str, part: str) -> bytes:
        """Return what `_sealed` was given. Raises UNREADABLE."""
        return value if self._sealer is None else self._sealer.open(value, "", *ABOUT, row_id, part)

    def _take_back(self, news: dict[str, JournalSession], was_cleared: bool) -> None:
        """Leave news again that could not be written. News since then replace them."""
        since, self._news = self._news, {} if self._is_cleared else news
        self._is_cleared |= was_cleared
        for session in since.values():
            self._add(session)

    def _write(self, news: Iterable[JournalSession], is_cleared: bool) -> None:
        """Write all news in one transaction. Raises sqlite3.Error."""
        with self._db:
            if is_cleared:
                self._db.execute("DELETE FROM sessions")
            for session in news:
                self._write_session(session)

    def _write_session(self, session: JournalSession) -> None:
        row_id = session.session_id if self._sealer is None else self._sealer.name(session.session_id)
        if session.chain is not None and not session.chain.blocks:
            self._db.execute("DELETE FROM sessions WHERE id = ?", (row_id,))
            return
        said = {} if self._sealer is None else {ID: session.session_id}
        facts = self._sealed(json.dumps({**session.facts, **said}), row_id, "facts")
        if session.chain is None:
            self._db.execute("UPDATE sessions SET facts = ? WHERE id = ?", (facts, row_id))
            return
        chain = self._sealed(_packed(session.chain, session.notes), row_id, "chain")
        self._db.execute("INSERT OR REPLACE INTO sessions VALUES (?, ?, ?)", (row_id, facts, chain))


def _open(path: Path) -> sqlite3.Connection:
    """Open a journal. A damaged one is set aside. Where no file can be used, open one in memory."""
    try:
        make_folder(path.parent)
        try:
            return _connect(path)
        except FAULTS as error:
            if not (_is_damage(error) and _set_aside(path, error)):
                raise
            return _connect(path)
    except FAULTS as error:
        logger.warning("Manthan: %s cannot be used: no session outlives this process: %s", path, error)
        return _connect(None)


def _connect(path: Path | None) -> sqlite3.Connection:
    """Open the database, for its owner only, with its table; in memory without a path. Raises FAULTS."""
    if path is not None:  # SQLite's other files get the same mode
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    db = sqlite3.connect(path or ":memory:", check_same_thread=False, isolation_level="IMMEDIATE")
    try:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        if (found := db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise sqlite3.DatabaseError(found)
        if db.execute("PRAGMA user_version").fetchone()[0] != SCHEMA:
            db.execute("DROP TABLE IF EXISTS sessions")
            db.execute(f"PRAGMA user_version={SCHEMA}")
        db.execute(TABLE)
        db.execute("SELECT id, facts, chain FROM sessions LIMIT 1").fetchone()
    except BaseException:
        db.close()
        raise
    return db


def _is_damage(error: Exception) -> bool:
    """True if the file is at fault, not the disk."""
    if isinstance(error, OSError):
        return is_damage(error)
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
    return code not in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_NOMEM)


def _set_aside(path: Path, error: Exception) -> bool:
    """Rename a damaged journal and what SQLite keeps beside it. False if that is not possible."""
    if not set_aside(path, error):
        return False
    for end in ("-wal", "-shm"):
        file = Path(f"{path}{end}")
        with suppress(OSError):
            if file.is_dir():
                shutil.rmtree(file)
            elif file.exists():
                file.replace(f"{file}.bad")
    return True


def _packed(chain: JournalChain, notes: Iterable[bytes]) -> str:
    anchors = [(depth, _hexed(parts)) for depth, parts in chain.anchors]
    return json.dumps((_hexed(chain.blocks), anchors, [note.hex() for note in notes]))


def _hexed(blocks: Iterable[JournalBlock]) -> list[tuple[str | int, ...]]:
    return [(block.key.hex(), *block[1:]) for block in blocks]


def _unpacked(data: bytes) -> tuple[JournalChain, tuple[bytes, ...]]:
    """Return what `_packed` was given. Raises UNREADABLE."""
    blocks, anchors, notes = json.loads(data)
    found = tuple(JournalAnchor(int(depth), _unhexed(parts)) for depth, parts in anchors)
    return JournalChain(_unhexed(blocks), found), tuple(map(bytes.fromhex, notes))


def _unhexed(blocks: Iterable[tuple[str, int, int, int, int]]) -> tuple[JournalBlock, ...]:
    return tuple(JournalBlock(bytes.fromhex(key), *map(int, numbers)) for key, *numbers in blocks)
