"""Tier in a folder of a local file system, whose blocks outlive the process; and the folder of all ranks.

    FOLDER/lock      locked by the process that uses the folder
    FOLDER/blocks    one sparse file of records

docs/disk.md lists the files of all ranks. The file `lock` in the folder that `open_root` locks has the ids of
the process that locked it, and of this process's parent.

A record is a header, and a body: a compressed block. A record begins at a multiple of PAGE. The header has HEADER
bytes, little-endian:

    magic "MNDB" · version u16 · length of the block hash u16 · KV cache group u32 · number of extents u32
    sequence u64 · size of the body u64 · xxh3-64 of the body u64 · block hash, padded with zeros, 64 bytes
    start and size of each extent, 24 times u64, u64
    offset at which each part of the body but the last ends (see `tier.part_ends`), 4 times u32, 0 for no part
    xxh3-64 of all earlier bytes of the header u64

The record takes its extents, runs of bytes in the file, in order: first the header, then the body. The first extent
starts at the header's own address, so a copy of a header inside of a body is not taken for a header.

A process may be killed at any moment: the body is written before the header, and the system still writes its page cache
to the disk. A power failure may cost the blocks written in the last SYNC_S seconds: a body that does not match its
xxh3-64 counts as absent. `sequence` counts writes. Of two records of a block, or of two records that overlap, only the
record with the higher sequence is valid.

A dropped block is erased by punching a hole, or by writing zeros if the file system has no holes. The new header of a
cut block (see `Tier.trim`) is written before the end is erased, but not if the block is cut again or dropped first. If
a process is killed before it has erased a block, the next process finds the record again. Opening a tier erases the
bytes outside of records. The engine then drops blocks that no session needs.
"""

import errno
import fcntl
import logging
import os
import re
import shutil
import struct
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
import xxhash

from manthan.manager.config.model import ConfigError
from manthan.manager.pool import BlockName
from manthan.manager.sparing import Sparing
from manthan.manager.tiers import arena
from manthan.manager.tiers.arena import Arena, Extent
from manthan.manager.tiers.arena_tier import ArenaTier, Placed, RamTier
from manthan.manager.tiers.disk_files import erase, lock, make_folder, open_file, sync_folder, write_all
from manthan.manager.tiers.joined import Shard
from manthan.manager.tiers.journal import JOURNAL
from manthan.manager.tiers.tier import STORE_FULL, Buffer, Found
from manthan.manager.transfer import STORE_DOWN

logger = logging.getLogger("vllm.manthan.disk")

BLOCKS, LOCK = "blocks", "lock"
PAGE = 4096  # unit of allocation, and of holes, in file systems
HEADER, MOST_EXTENTS, MOST_KEY, MOST_INNER = 512, 24, 64, 4
MAGIC, VERSION = b"MNDB", 1
_FIELDS = struct.Struct(f"<4sHHIIQQQ64s{2 * MOST_EXTENTS}Q{MOST_INNER}I")  # all but the header's checksum
DISK = "disk"  # cause of a failure of the disk
SYNC_S, CLOSE_S = 5.0, 5.0  # seconds between two syncs, and most seconds that `close` waits for the disk
READERS, WRITERS, AHEAD = 8, 4, 16  # threads that read; threads that write; most runs that the threads read ahead
RUN_BYTES, SCAN_BYTES = 1 << 20, 1 << 20
"""Approximate bytes of a run, the blocks that a thread reads in a row; bytes searched for a header at a time."""
QUIET_S = 60.0  # least seconds between two log lines about the same failure


def room(nbytes: int) -> int:
    """Return the bytes that a block of `nbytes` bytes takes in the file, in whole pages."""
    return _pages(HEADER + nbytes)


def usable(max_bytes: int) -> int:
    """Return the most bytes of a budget that blocks should take, in whole pages; see `arena.usable`."""
    return arena.usable(max_bytes) // PAGE * PAGE


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


class FolderBusyError(ConfigError):
    """Error: another server uses the folder."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"tiers.disk.path is {str(path)!r}, which another server uses: give each a folder of its own.")


class DiskTier(ArenaTier):
    """Tier of a rank in a folder on disk. A missing folder is made.

    Args:
        timeout_s: Most seconds that one `read` waits for the disk in all, and `put_all` for each block.
        is_left: True for the folder of an earlier server. Several ranks then read and drop blocks, and none writes.

    Raises:
        BlockingIOError: Another process uses the folder.
        OSError: The folder is unusable.
    """

    def __init__(self, folder: Path, max_bytes: int, timeout_s: float = 10.0, is_left: bool = False) -> None:
        self.folder, self._path, self._timeout_s = folder, folder / BLOCKS, timeout_s
        make_folder(folder)
        self._folder_lock = lock(folder / LOCK, is_left)
        self._fd = open_file(self._path)
        sync_folder(folder)
        weakref.finalize(self, os.close, self._fd)  # not before the last thread has finished
        blocks = records_in(self._fd)
        max_bytes = max_bytes // PAGE * PAGE
        super().__init__(max_bytes, self._arena_around(blocks.values(), max_bytes))
        self._blocks.update(blocks)
        self._sequence = max((placed.sequence for placed in blocks.values()), default=0)
        self._is_dirty, self._is_apart, self._sparing = True, False, Sparing(QUIET_S)
        self._readers = ThreadPoolExecutor(READERS, "manthan-disk-read")
        self._writers = ThreadPoolExecutor(WRITERS, "manthan-disk-write")
        self._stuck: Future[Any] | None = None  # the job that was last given up
        self._closing = threading.Event()
        self._syncer = threading.Thread(target=self._sync_regularly, name="manthan-disk-sync", daemon=True)
        self._syncer.start()

    def put_all(self, group: int, blocks: Mapping[bytes, Buffer], tenant: str = "") -> dict[bytes, str]:
        if self._is_down:
            return dict.fromkeys(blocks, STORE_DOWN)
        jobs = {key: self._writers.submit(self._put, (group, key), buf) for key, buf in blocks.items()}
        causes: dict[bytes, str | None] = {}
        try:
            for key, job in jobs.items():
                causes[key] = job.result(self._timeout_s)
        except TimeoutError:
            self._stuck = job
            given_up = {key: job for key, job in jobs.items() if job.cancel() or not job.done()}
            self.drop(group, given_up)
            causes = {key: STORE_DOWN if key in given_up else job.result() for key, job in jobs.items()}
            self._complain("blocks are not stored: the disk does not answer")
        return {key: cause for key, cause in causes.items() if cause is not None}

    def read(self, group: int, keys: Sequence[bytes], tenant: str = "") -> Iterator[Found]:
        """See Tier. Threads read blocks ahead of the caller."""
        names, done, left_s = [(group, key) for key in keys], 0, self._timeout_s
        sizes = [placed.nbytes for placed in map(self._blocks.get, names) if placed is not None]
        length = max(1, RUN_BYTES * len(sizes) // max(1, sum(sizes)))
        runs = (names[at : at + length] for at in range(0, len(names), length))
        ahead: deque[Future[list[Found]]] = deque()
        try:
            while done < len(keys):
                if self._is_down:
                    yield from [STORE_DOWN] * (len(keys) - done)
                    return
                ahead += [self._readers.submit(self._read_run, run) for run in islice(runs, AHEAD - len(ahead))]
                began = time.monotonic()
                try:
                    found = ahead[0].result(max(0.0, left_s))
                except TimeoutError:
                    self._stuck = ahead[0]
                    self._complain("blocks are not read: the disk does not answer")
                    left_s = 0.0
                    continue
                left_s -= time.monotonic() - began
                ahead.popleft()
                done += len(found)
                yield from found
        finally:
            for job in ahead:
                job.cancel()

    def cleared(self, place: str) -> "DiskTier":
        """Return this tier. The file loses its name soon, before any write, so that no process finds the file later."""
        super().cleared(place)
        self._is_apart = True
        return self

    def close(self) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        self._readers.shutdown(wait=False, cancel_futures=True)
        finisher = threading.Thread(target=self._finish, name="manthan-disk-close", daemon=True)
        finisher.start()
        finisher.join(CLOSE_S)
        if finisher.is_alive():
            logger.warning("Manthan: %s: the disk does not answer; it is left as it is.", self.folder)
            return
        with self._lock:
            self._blocks.clear()
            self._folder_lock.close()

    def room(self, nbytes: int) -> int:
        return room(nbytes)

    # -- threads ----------------------------------------------------------------------------------------

    @property
    def _is_down(self) -> bool:
        return self._closing.is_set() or (self._stuck is not None and not self._stuck.done())

    def _read_run(self, names: Sequence[BlockName]) -> list[Found]:
        return [self._read(name) for name in names]

    def _read(self, name: BlockName) -> Found:
        if (placed := self._blocks.get(name)) is None:
            return None
        try:
            body = self._read_body(placed)
        except OSError as error:
            self._complain(f"a block cannot be read: {error.strerror}")
            return DISK
        if placed.digest is None or _digest(body) == placed.digest:
            return body
        if not placed.is_dropped:
            self._complain("a block is not what was written")
        return None

    def _read_body(self, placed: Placed) -> Buffer:
        body, at = np.empty(placed.nbytes, np.uint8), 0
        for start, size in _body(placed):
            at += os.preadv(self._fd, [body[at : at + size].data], start)
        return body

    def _write(self, name: BlockName, placed: Placed, buf: Buffer) -> str | None:
        if len(placed.extents) > MOST_EXTENTS or len(name[1]) > MOST_KEY:
            return STORE_FULL
        with self._lock:
            self._sequence += 1
            placed.sequence, placed.inner = self._sequence, placed.inner[:MOST_INNER]
        placed.digest = _digest(buf)
        try:
            self._leave()
            self._is_dirty, at = True, 0
            for start, size in _body(placed):
                write_all(self._fd, buf[at : at + size].data, start)
                at += size
            write_all(self._fd, memoryview(_header(name, placed)), placed.extents[0].start)
        except OSError as error:
            self._complain(f"a block cannot be written: {error.strerror}")
            return STORE_FULL if error.errno in (errno.ENOSPC, errno.EDQUOT) else DISK
        return None

    def _erase(self, extents: tuple[Extent, ...]) -> None:
        """Erase the extents, in order, so that the header in the first extent goes before the body."""
        self._is_dirty = True
        try:
            for extent in extents:
                erase(self._fd, *extent)
        except OSError as error:
            self._complain(f"a dropped block cannot be erased: {error.strerror}")

    def _shorten(self, name: BlockName, placed: Placed) -> None:
        try:
            placed.digest = _digest(self._read_body(placed))
            write_all(self._fd, memoryview(_header(name, placed)), placed.extents[0].start)
        except OSError as error:
            self._complain(f"the header of a block that was cut cannot be written: {error.strerror}")

    def _arena_around(self, blocks: Iterable[Placed], nbytes: int) -> Arena:
        """Return an arena in which the extents of `blocks` are taken. Erase the file's other bytes. Raises OSError."""
        taken = sorted(extent for placed in blocks for extent in placed.extents)
        end = sum(taken[-1]) if taken else 0
        found = Arena(max(end, nbytes))
        os.ftruncate(self._fd, end)
        os.ftruncate(self._fd, found.nbytes)
        found.allocate(found.nbytes)
        bounds = [Extent(0, 0), *taken, Extent(found.nbytes, 0)]
        gaps = [Extent(sum(one), following.start - sum(one)) for one, following in pairwise(bounds)]
        for gap in gaps:
            if gap.nbytes and gap.start < end:
                erase(self._fd, *gap)
        found.free(gaps)
        return found

    def _leave(self) -> None:
        """Remove the file's name from the folder if `cleared` was called. Raises OSError."""
        if self._is_apart and self._path.exists():
            self._path.unlink(missing_ok=True)
            sync_folder(self.folder)

    def _sync_regularly(self) -> None:
        while not self._closing.wait(SYNC_S):
            self._sync()

    def _sync(self) -> None:
        """Write all changes of the file to the disk itself, so that they outlast a crash of the machine."""
        try:
            self._leave()
            if self._is_dirty:
                self._is_dirty = False
                os.fdatasync(self._fd)
        except OSError as error:
            self._is_dirty = True
            self._complain(f"a crash of the machine may lose the last writes: {error.strerror}")

    def _finish(self) -> None:
        self._writers.shutdown(wait=True, cancel_futures=True)
        self._syncer.join()
        while self._erase_one():
            pass
        self._sync()

    def _complain(self, of: str) -> None:
        if count := self._sparing.due(of):
            logger.warning("Manthan: %s: %s%s", self._path, of, f" ({count} times)" if count > 1 else "")


class NoTier(RamTier):
    """Tier that stores nothing, for a disk that cannot be used."""

    def __init__(self) -> None:
        super().__init__(0)

    def put_all(self, group: int, blocks: Mapping[bytes, Buffer], tenant: str = "") -> dict[bytes, str]:
        return dict.fromkeys(blocks, DISK)


def check_folder(path: str, patience_s: float = 0.0) -> None:
    """Raise ConfigError if a folder is missing, may not be written to by this user, or is used by another server.

    patience_s: Most seconds to wait until the folder is free, because processes of a killed server may end later.
    """
    folder = Path(path)
    if not folder.is_dir():
        why = "that is no folder" if folder.exists() else "there is no such folder"
        raise ConfigError(f"tiers.disk.path is {path!r}, but {why}: name one that is there, on a local file system.")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise ConfigError(
                f"tiers.disk.path is {path!r}, but nothing can be written there ({error.strerror}): name a folder that "
                "this user may write to."
            ) from None
        logger.warning("Manthan: nothing can be written to %s now: %s", path, error.strerror)
    until = time.monotonic() + patience_s
    for held in (folder / LOCK, *folder.glob(f"replica-*/{LOCK}")):
        while not _is_ours(held):
            if time.monotonic() >= until:
                raise FolderBusyError(folder)
            time.sleep(0.1)


def open_root(path: Path) -> IO[bytes] | None:
    """Lock the folder of `tiers.disk.path` for this process. Make a missing folder. Raises FolderBusyError.

    Returns: the lock's file, locked until closed; None if no file can be made.
    """
    try:
        if not path.is_dir():
            make_folder(path)
        file = lock(path / LOCK)
    except BlockingIOError:
        raise FolderBusyError(path) from None
    except OSError as error:
        logger.warning("Manthan: %s cannot be locked: %s", path, error)
        return None
    with suppress(OSError):  # a full disk
        file.truncate(0)
        file.write(f"{os.getpid()} {os.getppid()}\n".encode())
    return file


def open_rank(path: Path, name: str, shard: Shard, max_bytes: int, is_left: bool = False) -> ArenaTier:
    """Return the tier of a rank, or NoTier if the disk cannot be used. Raises FolderBusyError.

    path: Folder that `open_root` locks. name: Namespace, and folder in `path`. shard: Part of each block that the rank
    stores. is_left: See `DiskTier`.
    """
    try:
        if not path.is_dir():
            make_folder(path)
        make_folder(path / name)
        return DiskTier(path / name / f"rank-{shard}", max_bytes, is_left=is_left)
    except BlockingIOError:
        raise FolderBusyError(path) from None
    except OSError as error:
        logger.warning("Manthan: %s cannot be used: nothing is kept on this disk: %s", path / name, error)
        return NoTier()


def counts_in(folder: Path) -> list[int]:
    """Return each number of shards, sorted, in which a server has stored blocks in the folder of a namespace."""
    counts = {each.parent.name.rpartition("-")[2] for each in folder.glob(f"rank-*-of-*/{BLOCKS}")}
    return sorted(int(count) for count in counts if count.isdecimal())  # a folder set aside ends in .bad


def found_in(folder: Path, shard: Shard) -> dict[BlockName, list[int]]:
    """Return the bytes that each stored block of a rank takes, even if another process has the rank's tier open.

    A block's list has the bytes of its first part, of its first two parts, and so on to all; see `tier.part_ends`.

    folder: Folder of a namespace. shard: Shard of each block that the rank stores.
    """
    with suppress(OSError), open(folder / f"rank-{shard}" / BLOCKS, "rb") as file:
        records = records_in(file.fileno())
        return {name: [room(end) for end in (*placed.inner, placed.nbytes)] for name, placed in records.items()}
    return {}


def remove_others(path: Path, name: str, counts: Container[int]) -> dict[str, int]:
    """Remove Manthan's folders of other namespaces than `name`, and in `name` those of other numbers of shards.

    counts: Numbers of shards in which stored blocks can be read.

    Returns: Bytes of each removed folder, by name relative to `path`.
    """
    gone = [
        folder for of in counts_in(path / name) if of not in counts for folder in path.glob(f"{name}/rank-*-of-{of}")
    ]
    for other in path.glob("*"):
        is_named = other.is_dir() and re.fullmatch(r".+-[0-9a-f]{12}", other.name) and other.name != name
        if is_named and ((other / JOURNAL).exists() or any(other.glob(f"rank-0*/{LOCK}"))):
            gone.append(other)
    removed = {}
    for folder in gone:
        files = (file for file in folder.rglob("*") if file.is_file())
        removed[str(folder.relative_to(path))] = sum(file.stat().st_size for file in files)
        shutil.rmtree(folder, ignore_errors=True)
    return removed


def _is_ours(path: Path) -> bool:
    """True if the file is not locked, or cannot be opened, or if this process, a child or a sibling has locked it."""
    try:
        with open(path, "r+b", buffering=0) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                holder, *parents = file.read(64).decode(errors="replace").split() or [""]
    except OSError:
        return True  # `open_root` tells why
    return holder == str(os.getpid()) or bool({*parents} & {str(os.getpid()), str(os.getppid())})


# -- the file -------------------------------------------------------------------------------------------


def records_in(fd: int) -> dict[BlockName, Placed]:
    """Return the `Placed` of each valid record in an open file, in the order of writing. Raises OSError."""
    newest: dict[BlockName, Placed] = {}
    for name, placed in _scanned(fd):
        if name not in newest or newest[name].sequence < placed.sequence:
            newest[name] = placed
    last, void = None, set[BlockName]()
    for extent, name in sorted((extent, name) for name, placed in newest.items() for extent in placed.extents):
        if last is not None and extent.start < sum(last[0]):
            older = min(last[1], name, key=lambda each: newest[each].sequence)
            void.add(older)
            if older == name:
                continue
        last = extent, name
    valid = [(name, placed) for name, placed in newest.items() if name not in void]
    return dict(sorted(valid, key=lambda one: one[1].sequence))


def _scanned(fd: int) -> Iterator[tuple[BlockName, Placed]]:
    """Yield name and `Placed` of each record with a valid header, in the order of addresses. Raises OSError."""
    at, size = 0, os.fstat(fd).st_size
    while at < size:
        try:
            at = os.lseek(fd, at, os.SEEK_DATA) // PAGE * PAGE
        except OSError as error:
            if error.errno == errno.ENXIO:  # holes to the end
                return
            raise
        if record := _parsed(os.pread(fd, HEADER, at), at):
            yield record
            at += record[1].extents[0].nbytes
        elif some := os.pread(fd, SCAN_BYTES, at):
            pages = range(PAGE, len(some), PAGE)
            at += next((page for page in pages if some.startswith(MAGIC, page)), _pages(len(some)))
        else:
            return


def _header(name: BlockName, placed: Placed) -> bytes:
    group, key = name
    count, facts = len(placed.extents), (placed.sequence, placed.nbytes, placed.digest)
    extents = [*chain.from_iterable(placed.extents), *bytes(2 * (MOST_EXTENTS - count))]
    inner = [*placed.inner, *bytes(MOST_INNER - len(placed.inner))]
    head = _FIELDS.pack(MAGIC, VERSION, len(key), group, count, *facts, key, *extents, *inner)
    return head + xxhash.xxh3_64_intdigest(head).to_bytes(8, "little")


def _parsed(head: bytes, at: int) -> tuple[BlockName, Placed] | None:
    if len(head) < HEADER or not head.startswith(MAGIC):
        return None
    _, version, length, group, count, sequence, nbytes, digest, key, *numbers = _FIELDS.unpack_from(head)
    checksum = xxhash.xxh3_64_intdigest(head[: _FIELDS.size])
    if version != VERSION or int.from_bytes(head[_FIELDS.size :], "little") != checksum:
        return None
    extents = tuple(map(Extent, numbers[: 2 * count : 2], numbers[1 : 2 * count : 2]))
    inner = tuple(end for end in numbers[2 * MOST_EXTENTS :] if end)
    placed = Placed(extents, nbytes, digest, sequence, inner=inner)
    return ((group, key[:length]), placed) if extents[0].start == at else None


def _body(placed: Placed) -> Iterator[Extent]:
    """Yield the runs of addresses of a block's body, which begins behind the header."""
    left, skip = placed.nbytes, HEADER
    for start, size in placed.extents:
        yield Extent(start + skip, min(left, size - skip))
        left -= min(left, size - skip)
        skip = 0


def _digest(body: Buffer) -> int:
    return xxhash.xxh3_64(body.data).intdigest()  # unlike xxh3_64_intdigest, xxh3_64 releases the GIL
