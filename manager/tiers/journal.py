"""Journal: an engine's sessions on disk, in SQLite, for the next engine.

The scheduler's thread only hands records over. Another thread writes the latest record of each session. A killed
process loses the records not yet written. The next engine drops the stored blocks that no session of the journal has.
"""

import logging
import os
import shutil
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from manthan.manager.pool import BlockName
from manthan.manager.tiers.disk_files import is_damage, make_folder, set_aside
from manthan.manager.tiers.sealed import Sealer, SealError

logger = logging.getLogger("vllm.manthan.disk")

JOURNAL = "sessions.sqlite"
SCHEMA = 8  # version of the format. A journal of another version is emptied
CLOSE_S = 5.0  # most seconds that `close` waits
REST_S = 1.0  # seconds until the next try after a failed write
TABLE = """
CREATE TABLE IF NOT EXISTS sessions (
    id TEXT PRIMARY KEY,
    facts BLOB NOT NULL,  -- JSON
    saved BLOB NOT NULL   -- JSON: blocks and resume points
) WITHOUT ROWID"""
ID = "id"  # field of sealed (encrypted) facts with the session's id, because the row's id is then a digest
ABOUT = "journal"  # first part of the name to which sealed rows are bound; see `Sealer.seal`
FAULTS = (sqlite3.Error, OSError, UnicodeDecodeError)  # of SQLite; of the disk; of a damaged schema
UNREADABLE = (msgspec.MsgspecError, KeyError, TypeError, SealError)  # errors of a damaged row


class JournalBlock(NamedTuple):
    """Saved block of a session, or of a resume point: a length at which a model with windows or states can continue.

    The numbers have bounds, because a damaged row may have any number.
    """

    block_hash: bytes
    group: Annotated[int, Meta(ge=0, lt=1 << 7)]
    position: Annotated[int, Meta(ge=0, lt=1 << 31)]  # index among the session's blocks of the same KV cache group
    exact: Annotated[int, Meta(ge=0, lt=1 << 16)]  # number of the block's first tokens that are stored exact
    mark: Annotated[int, Meta(ge=0, lt=2)] = 0  # see `manthan.manager.pool.Mark`
    note: bytes = b""  # content of the block's KV events; see `BlockNotes`

    @property
    def name(self) -> BlockName:
        return self.group, self.block_hash


class JournalPoint(NamedTuple):
    """Resume point behind the session's first `depth` blocks. parts: blocks of further KV cache groups needed there."""

    depth: int
    parts: tuple[JournalBlock, ...]


class SavedBlocks(NamedTuple):
    """Saved blocks and resume points of a session."""

    blocks: tuple[JournalBlock, ...]
    points: tuple[JournalPoint, ...] = ()


GONE = SavedBlocks(())


@dataclass(frozen=True)
class JournalSession:
    """Record of a session, for the next process."""

    session_id: str
    facts: Mapping[str, Any] = field(default_factory=dict)  # values that JSON can hold
    saved: SavedBlocks | None = GONE  # None: as in the session's last record. GONE: remove the session from the journal


class Journal:
    """Journal in a folder. `sealer` encrypts the rows; None to write plain rows.

    A damaged journal is renamed to NAME.bad, and a new one is begun. If no file can be opened, the journal is in
    memory, and ends with this process.
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
        """Yield all sessions in the journal. Remove rows that cannot be read."""
        bad = []
        try:
            for row_id, facts, saved in self._db.execute("SELECT id, facts, saved FROM sessions"):
                try:
                    found = msgspec.json.decode(self._opened(facts, row_id, "facts"), type=dict[str, Any])
                    session_id = row_id if self._sealer is None else found.pop(ID)
                    blocks = msgspec.json.decode(self._opened(saved, row_id, "saved"), type=SavedBlocks)
                    yield JournalSession(session_id, found, blocks)
                except UNREADABLE:
                    bad.append((row_id,))
        except FAULTS as error:  # no row behind a damaged one is read
            logger.warning("Manthan: %s: sessions cannot be read: %s", self.path, error)
        if bad:
            logger.warning("Manthan: %s: %d sessions cannot be read, and are forgotten.", self.path, len(bad))
            with suppress(sqlite3.Error), self._db:
                self._db.executemany("DELETE FROM sessions WHERE id = ?", bad)

    def tell(self, sessions: Iterable[JournalSession]) -> None:
        """Have the thread write the sessions."""
        with self._wake:
            for session in sessions:
                before = self._news.get(session.session_id)
                if session.saved is None and before is not None:
                    session = replace(session, saved=before.saved)
                self._news[session.session_id] = session
            if self._news:
                self._wake.notify()

    def clear(self) -> None:
        """Have the thread empty the journal. Records handed over before are not kept."""
        with self._wake:
            self._news.clear()
            self._is_cleared = True
            self._wake.notify()

    def close(self) -> None:
        """Write the records handed over before, and end the thread. Wait CLOSE_S seconds at most."""
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
                news, is_cleared, self._is_cleared = dict(self._news), self._is_cleared, False
                if self._closing and not (news or is_cleared):
                    return
            try:
                self._write(news.values(), is_cleared)
                self._rest_s = 0.0
                with self._wake:
                    for session_id, session in news.items():
                        if self._news.get(session_id) is session:
                            del self._news[session_id]
            except FAULTS as error:  # most likely a full disk; the records stay in `_news`
                if not self._rest_s:
                    logger.warning("Manthan: %s: sessions are not written until that is possible: %s", self.path, error)
                self._rest_s = REST_S
                with self._wake:
                    self._is_cleared |= is_cleared
                    if self._closing:
                        return

    def _sealed(self, value: object, row_id: str, part: str) -> bytes:
        data = msgspec.json.encode(value)
        return data if self._sealer is None else self._sealer.seal(data, "", ABOUT, row_id, part)

    def _opened(self, value: bytes, row_id: str, part: str) -> bytes:
        return value if self._sealer is None else self._sealer.open(value, "", ABOUT, row_id, part)

    def _write(self, news: Iterable[JournalSession], is_cleared: bool) -> None:
        """Write all of the records or none. Raises sqlite3.Error."""
        with self._db:
            if is_cleared:
                self._db.execute("DELETE FROM sessions")
            for session in news:
                row_id = session.session_id if self._sealer is None else self._sealer.name(session.session_id)
                hidden = {} if self._sealer is None else {ID: session.session_id}
                facts = self._sealed({**session.facts, **hidden}, row_id, "facts")
                if session.saved is None:
                    self._db.execute("UPDATE sessions SET facts = ? WHERE id = ?", (facts, row_id))
                elif session.saved.blocks:
                    saved = self._sealed(session.saved, row_id, "saved")
                    self._db.execute("INSERT OR REPLACE INTO sessions VALUES (?, ?, ?)", (row_id, facts, saved))
                else:
                    self._db.execute("DELETE FROM sessions WHERE id = ?", (row_id,))


def _open(path: Path) -> sqlite3.Connection:
    """Open a journal. A damaged journal is renamed. Without a usable file, open a journal in memory."""
    try:
        make_folder(path.parent)
        try:
            return _connect(path)
        except FAULTS as error:
            if not (_is_damage(error) and set_aside(path, error)):
                raise
            for file in (Path(f"{path}-wal"), Path(f"{path}-shm")):  # SQLite's other files of the journal
                with suppress(OSError):
                    if file.is_dir():
                        shutil.rmtree(file)
                    elif file.exists():
                        file.replace(f"{file}.bad")
            return _connect(path)
    except FAULTS as error:
        logger.warning("Manthan: %s cannot be used: no session outlives this process: %s", path, error)
        return _connect(None)


def _connect(path: Path | None) -> sqlite3.Connection:
    """Open the database at `path`, for the owner only; in memory without a path. Make the table. Raises FAULTS."""
    if path is not None:  # the file is made here, so that SQLite gives its -wal and -shm files the same mode
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
        db.execute("SELECT id, facts, saved FROM sessions LIMIT 1").fetchone()
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
