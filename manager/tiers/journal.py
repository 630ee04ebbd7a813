"""Which sessions there are, on disk: what the next process is to know of them, in SQLite.

The scheduler's thread only leaves news here; a thread beside it writes them, the last of each session. A process that
is killed loses what was not written yet: blocks that nobody names are dropped by the next one.
"""

import json
import logging
import os
import shutil
import sqlite3
import struct
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
SCHEMA = 4
"""Its version. A journal of another one is begun anew."""
CLOSE_S = 5.0
REST_S = 1.0
"""After how long it is tried again to write what could not be written."""
TABLE = """
CREATE TABLE IF NOT EXISTS sessions (
    id TEXT PRIMARY KEY,
    facts TEXT NOT NULL,  -- JSON
    chain BLOB NOT NULL,  -- what is stored of it; see _pack
    notes BLOB NOT NULL   -- of the blocks of that, if there are any; see _pack_notes
) WITHOUT ROWID"""
ID = "id"
"""Among sealed facts, the session's; its row is called otherwise."""
ABOUT = ("journal",)
"""What sealed rows are about, besides what they are called."""
PARTS = ("facts", "chain", "notes")
"""Of a row, each sealed by itself."""
FAULTS = (sqlite3.Error, OSError, UnicodeDecodeError)
"""Exceptions of SQLite and the disk. The last one is of names in a damaged schema."""
_COUNTS = struct.Struct("<II")
_LENGTH = struct.Struct("<I")
_BLOCK = struct.Struct("<HHIIB")


class JournalBlock(NamedTuple):
    """One block of a chain, or of an anchor: its key, its KV cache group, its place among the blocks of that, and how
    many of its tokens are exact. mark: see `manthan.manager.sessions.marks`."""

    key: bytes
    group: int
    at: int
    exact: int
    mark: int = 0


class JournalAnchor(NamedTuple):
    """What other KV cache groups have behind so many blocks of a chain."""

    depth: int
    parts: tuple[JournalBlock, ...]


class JournalChain(NamedTuple):
    """What is stored of a session."""

    blocks: tuple[JournalBlock, ...]
    anchors: tuple[JournalAnchor, ...] = ()

    def all(self) -> Iterator[JournalBlock]:
        """Those of the chain, and then those of each anchor."""
        return chained(self.blocks, *(anchor.parts for anchor in self.anchors))


GONE = JournalChain(())


@dataclass(frozen=True)
class JournalSession:
    """A session as the next process finds it. facts: what JSON can hold. chain: None if it is as it was; without blocks
    if the session is gone. notes: what else is known of each block of its chain and then of its anchors, in order, or
    nothing; they are as they were where the chain is."""

    session_id: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    chain: JournalChain | None = GONE
    notes: tuple[bytes, ...] = ()


class Journal:
    """folder: where it lies. sealer: of what it says; None to write that down as it is.

    A damaged one is set aside, and a new one is begun. Where none can be, sessions are known to this process only.
    """

    def __init__(self, folder: Path, sealer: Sealer | None = None) -> None:
        self._sealer = sealer
        self.path = folder / JOURNAL
        self._news: dict[str, JournalSession] = {}
        self._is_cleared = False
        self._rest_s = 0.0
        self._wake = threading.Condition()
        self._closing = False
        self._db = self._opened_somehow()
        self._thread = threading.Thread(target=self._run, name="manthan-journal", daemon=True)
        self._thread.start()

    def _opened_somehow(self) -> sqlite3.Connection:
        try:
            make_folder(self.path.parent)
            try:
                return _opened_whole(self.path)
            except FAULTS as error:
                if not (_is_damage(error) and _set_aside(self.path, error)):
                    raise
                return _opened_whole(self.path)
        except FAULTS as error:
            logger.warning("Manthan: %s cannot be used: no session outlives this process: %s", self.path, error)
            return _opened_whole(None)

    def sessions(self) -> Iterator[JournalSession]:
        """All that were written. What cannot be read is left out, and removed."""
        bad = []
        for row_id, *values in self._rows():
            try:
                facts, chain, notes = (self._opened(*each, row_id) for each in zip(values, PARTS, strict=True))
                found: dict[str, Any] = json.loads(facts)
                session_id = found.pop(ID) if self._sealer is not None else row_id
                yield JournalSession(session_id, found, _unpack(chain), _unpack_notes(notes))
            except (ValueError, KeyError, TypeError, AttributeError, struct.error, SealError):
                bad.append((row_id,))
        if bad:
            logger.warning("Manthan: %s: %d sessions cannot be read, and are forgotten.", self.path, len(bad))
            with suppress(sqlite3.Error):
                self._db.executemany("DELETE FROM sessions WHERE id = ?", bad)

    def _rows(self) -> Iterator[tuple[Any, ...]]:
        """Rows up to the first that SQLite cannot find."""
        try:
            yield from self._db.execute("SELECT id, facts, chain, notes FROM sessions")
        except FAULTS as error:
            logger.warning("Manthan: %s: sessions cannot be read: %s", self.path, error)

    def tell(self, sessions: Iterable[JournalSession]) -> None:
        """These are not what they were."""
        with self._wake:
            for session in sessions:
                self._add(session)
            if self._news:
                self._wake.notify()

    def _add(self, session: JournalSession) -> None:
        """Over what was told before and is not written yet."""
        before = self._news.get(session.session_id)
        if session.chain is None and before is not None:
            session = replace(session, chain=before.chain, notes=before.notes)
        self._news[session.session_id] = session

    def clear(self) -> None:
        """No session is known any more."""
        with self._wake:
            self._news.clear()
            self._is_cleared = True
            self._wake.notify()

    def close(self) -> None:
        """All that was told is written, if that is possible within a bounded time."""
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

    def _row(self, session: JournalSession) -> "_Row":
        """What is written of it."""
        sealer, chain = self._sealer, session.chain
        packed = b"" if chain is not None and not chain.blocks else chain and _pack(chain)
        notes = _pack_notes(session.notes)
        if sealer is None:
            return _Row(session.session_id, json.dumps(session.facts), packed, notes)
        row_id = sealer.name(session.session_id)
        facts = json.dumps({**session.facts, ID: session.session_id}).encode()
        sealed = [
            part and sealer.seal(part, "", *ABOUT, row_id, name)
            for part, name in zip((facts, packed, notes), PARTS, strict=True)
        ]
        return _Row(row_id, sealed[0] or b"", sealed[1], sealed[2] or b"")

    def _opened(self, value: bytes | str, part: str, row_id: str) -> bytes:
        """Raises SealError, and ValueError for what was never sealed."""
        if self._sealer is None or not value:
            return value.encode() if isinstance(value, str) else value
        if isinstance(value, str):
            raise ValueError("it is not sealed.")
        return self._sealer.open(value, "", *ABOUT, row_id, part)

    def _take_back(self, news: dict[str, JournalSession], was_cleared: bool) -> None:
        """What could not be written is still to be, but for what was told since."""
        since, self._news = self._news, {} if self._is_cleared else news
        self._is_cleared |= was_cleared
        for session in since.values():
            self._add(session)

    def _write(self, news: Iterable[JournalSession], is_cleared: bool) -> None:
        """All or nothing. Raises sqlite3.Error."""
        rows = list(map(self._row, news))
        kept = [row for row in rows if row.chain]
        same = [(row.facts, row.id) for row in rows if row.chain is None]
        gone = [(row.id,) for row in rows if row.chain == b""]
        self._db.execute("BEGIN IMMEDIATE")
        try:
            if is_cleared:
                self._db.execute("DELETE FROM sessions")
            self._db.executemany("INSERT OR REPLACE INTO sessions VALUES (?, ?, ?, ?)", kept)
            self._db.executemany("UPDATE sessions SET facts = ? WHERE id = ?", same)
            self._db.executemany("DELETE FROM sessions WHERE id = ?", gone)
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise


def _opened_whole(path: Path | None) -> sqlite3.Connection:
    """The database, for its owner only, with its table; in memory where there is no path. Raises FAULTS."""
    if path is not None:  # SQLite's other files get the same mode
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    db = sqlite3.connect(path or ":memory:", check_same_thread=False, isolation_level=None)
    try:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        if (found := db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise sqlite3.DatabaseError(found)
        if db.execute("PRAGMA user_version").fetchone()[0] != SCHEMA:
            db.execute("DROP TABLE IF EXISTS sessions")
            db.execute(f"PRAGMA user_version={SCHEMA}")
        db.execute(TABLE)
        db.execute("SELECT id, facts, chain, notes FROM sessions LIMIT 1").fetchone()
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


class _Row(NamedTuple):
    """A session as it is written. chain: None if it is as it was, as the notes then are; nothing if the session is
    gone."""

    id: str
    facts: bytes | str
    chain: bytes | None
    notes: bytes


def _pack(chain: JournalChain) -> bytes:
    blocks, anchors = chain
    parts = [_COUNTS.pack(len(blocks), len(anchors)), *map(_pack_block, blocks)]
    for anchor in anchors:
        parts += [_COUNTS.pack(anchor.depth, len(anchor.parts)), *map(_pack_block, anchor.parts)]
    return b"".join(parts)


def _pack_block(block: JournalBlock) -> bytes:
    return _BLOCK.pack(len(block.key), block.group, block.at, block.exact, block.mark) + block.key


def _pack_notes(notes: Iterable[bytes]) -> bytes:
    return b"".join(part for note in notes for part in (_LENGTH.pack(len(note)), note))


def _unpack_notes(data: bytes) -> tuple[bytes, ...]:
    """Raises struct.error or ValueError."""
    notes, at = [], 0
    while at < len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size + length
        if at > len(data):
            raise ValueError("the notes end within one.")
        notes.append(data[at - length : at])
    return tuple(notes)


def _unpack(data: bytes) -> JournalChain:
    """Raises struct.error or ValueError."""
    reader = _Reader(data)
    count, anchors = reader.counts()
    blocks = reader.blocks(count)
    found = [(depth, reader.blocks(size)) for depth, size in (reader.counts() for _ in range(anchors))]
    return JournalChain(blocks, tuple(JournalAnchor(*each) for each in found))


class _Reader:
    """Of what `_pack` made."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def counts(self) -> tuple[int, int]:
        first, second = _COUNTS.unpack_from(self._data, self._at)
        self._at += _COUNTS.size
        return first, second

    def blocks(self, count: int) -> tuple[JournalBlock, ...]:
        return tuple(self._block() for _ in range(count))

    def _block(self) -> JournalBlock:
        length, group, at, exact, mark = _BLOCK.unpack_from(self._data, self._at)
        end = self._at + _BLOCK.size + length
        key = self._data[end - length : end]
        if len(key) < length:
            raise ValueError("the chain ends within a key.")
        self._at = end
        return JournalBlock(key, group, at, exact, mark)
