"""Segment files: records one after the other, each of which says by itself whether it is whole.

A record begins at a multiple of PAGE with a header of HEADER bytes, little-endian:

    magic "MNDS" · version u16 · length of the key u16 · group u32 · number of the segment u32
    offset in the segment u64 · sequence u64 · length of the body u64 · xxh3-64 of the body u64
    key, padded with zeros, 64 bytes · zeros, 8 bytes · xxh3-64 of the 120 bytes before u64

Its body follows, an encoded block. A header names its own place, so that bytes which only look like one are
not taken for one. Writers work side by side, and a process may end between any two bytes: where no header is, the next
one is looked for page by page.
"""

import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from manthan.manager.tiers.tier import Buffer

PAGE = 4096
"""Records begin at multiples of this; so large are a file system's blocks and, at most, a disk's sectors."""
HEADER = 128
MAGIC, VERSION = b"MNDS", 1
MOST_KEY = 64
_FIELDS = struct.Struct("<4sHHIIQQQQ64s8x")
_DIGEST = struct.Struct("<Q")
assert _FIELDS.size + _DIGEST.size == HEADER
SUFFIX, APART = ".seg", ".apart"
"""What files' names end with; those that no other process is to find are named otherwise."""
SCAN = 1 << 20
"""Bytes that are read at once where a header is looked for."""


class Record(NamedTuple):
    """A block under its KV cache group and its key, and where it lies. nbytes, digest: of its body.

    sequence: of records of the same block the one with the highest holds.
    """

    group: int
    key: bytes
    sequence: int
    offset: int
    nbytes: int
    digest: int

    @property
    def room(self) -> int:
        """What it takes of the file."""
        return room(self.nbytes)


def room(nbytes: int) -> int:
    """What a record with a body of so many bytes takes: whole pages."""
    return -(-(HEADER + nbytes) // PAGE) * PAGE


def run_nbytes(run: Sequence[Record]) -> int:
    """From the begin of the first of such records to the end of the last one's body."""
    return run[-1].offset + HEADER + run[-1].nbytes - run[0].offset


def digest_of(body: Buffer) -> int:
    return xxhash.xxh3_64(body.data).intdigest()  # an object lets other threads run meanwhile


class Segment:
    """One file. It is open as long as somebody holds this object, also when it has been removed from its folder.

    Raises OSError, as all of its methods do.
    """

    def __init__(self, folder: Path, number: int, *, new: bool = False, suffix: str = SUFFIX) -> None:
        self.number, self.path = number, folder / f"{number:08d}{suffix}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL if new else os.O_RDWR
        self._fd = -1  # opening may raise
        self._fd = os.open(self.path, flags | os.O_CLOEXEC, 0o600)
        self.end = -(-os.fstat(self._fd).st_size // PAGE) * PAGE
        """Where the next record begins; set by whoever writes."""
        self._is_dirty = False
        """Whether something was written since the last sync."""
        self._is_new = new

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def write(self, record: Record, body: Buffer) -> None:
        """At the record's offset."""
        self._is_dirty = True
        head, at = self._header(record), record.offset
        pieces = [memoryview(head), body.data]
        while pieces:
            done = os.pwritev(self._fd, pieces, at)
            at += done
            while pieces and done >= len(pieces[0]):
                done -= len(pieces.pop(0))
            if pieces:
                pieces[0] = pieces[0][done:]

    def read(self, record: Record) -> Buffer | None:
        """The record's body; None if it is not what was written."""
        return self.read_run([record], np.empty(run_nbytes([record]), np.uint8))[0]

    def read_run(self, run: Sequence[Record], memory: Buffer) -> list[Buffer | None]:
        """The bodies of records that lie one behind the other, each as `read` gives it.

        memory: uint8 [run_nbytes(run)], which they come to lie in.
        """
        begin = run[0].offset
        view, at = memory.data, begin
        while view:
            count = os.preadv(self._fd, [view], at)
            if not count:
                break  # somebody has made the file shorter
            view, at = view[count:], at + count
        return [self._body(record, memory[record.offset - begin : max(0, at - begin)]) for record in run]

    def _body(self, record: Record, found: Buffer) -> Buffer | None:
        """found: what the file has from the record on."""
        body = found[HEADER : HEADER + record.nbytes]
        return body if len(body) == record.nbytes and digest_of(body) == record.digest else None

    def records(self) -> Iterator[Record]:
        """All whose headers are right, in order; a body may be torn."""
        size, at = os.fstat(self._fd).st_size, 0
        while at + HEADER <= size:
            record = self._parse(os.pread(self._fd, HEADER, at), at)
            if record is None:
                at = self._next(at + PAGE, size)
            else:
                yield record
                at += record.room

    def spoil(self, record: Record) -> None:
        """It is none any more. A torn one must not come to life when the file grows, nor hide what is written there."""
        os.pwrite(self._fd, bytes(HEADER), record.offset)
        self._is_dirty = True

    def sync(self) -> None:
        """What was written is on the disk, even if the machine stops."""
        if self._is_dirty:
            self._is_dirty = False
            try:
                os.fdatasync(self._fd)
            except OSError:
                self._is_dirty = True
                raise
        if self._is_new:
            self._is_new = False
            sync_folder(self.path.parent)

    def _header(self, record: Record) -> bytes:
        group, key, sequence, offset, nbytes, digest = record
        head = _FIELDS.pack(MAGIC, VERSION, len(key), group, self.number, offset, sequence, nbytes, digest, key)
        return head + _DIGEST.pack(xxhash.xxh3_64_intdigest(head))

    def _parse(self, head: bytes, at: int) -> Record | None:
        fields, (digest,) = head[: _FIELDS.size], _DIGEST.unpack(head[_FIELDS.size :])
        if fields[:4] != MAGIC or xxhash.xxh3_64_intdigest(fields) != digest:
            return None
        _, version, length, group, number, offset, sequence, nbytes, body, key = _FIELDS.unpack(fields)
        if (version, number, offset) != (VERSION, self.number, at):
            return None
        return Record(group, key[:length], sequence, offset, nbytes, body)

    def _next(self, at: int, size: int) -> int:
        """The next page from there on that begins as a header does."""
        while at < size:
            some = os.pread(self._fd, SCAN, at)
            for page in range(0, len(some), PAGE):
                if some.startswith(MAGIC, page):
                    return at + page
            at += SCAN
        return size


def sync_folder(folder: Path) -> None:
    """Names of files that were made or removed in it stay so, even if the machine stops."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def numbered(folder: Path) -> list[tuple[int, Path]]:
    """Number and path of each segment in a folder, in order."""
    return sorted((int(path.stem), path) for path in folder.glob(f"*{SUFFIX}") if path.stem.isdigit())


def segments(folder: Path) -> list[Segment]:
    """Return the segments in a folder that can be opened, by number."""
    found = []
    for number, _ in numbered(folder):
        with suppress(OSError):
            found.append(Segment(folder, number))
    return found


def newest(folder: Path) -> dict[tuple[int, bytes], Record]:
    """By KV cache group and key, the records in a folder that hold. Bodies are not looked at."""
    found: dict[tuple[int, bytes], Record] = {}
    for segment in segments(folder):
        with suppress(OSError):
            for record in segment.records():
                known = found.get((record.group, record.key))
                if known is None or known.sequence < record.sequence:
                    found[record.group, record.key] = record
    return found
