"""A tier in a folder of a local file system. Its blocks outlive the process.

    FOLDER/lock                          locked by the process that uses the folder
    FOLDER/blocks/GROUP-HASH-SEQUENCE    a compressed block, and then its xxh3-64, little-endian

GROUP is the block's KV cache group and HASH its hash in hexadecimal. Of two files of one block the one with the higher
SEQUENCE holds.

A process may be killed at any moment: a file is complete before it gets its name, and the page cache is the system's. A
power failure costs what was written in the last SYNC_S seconds, because a file that is not whole is a miss.

The file of what is dropped is removed. If a process is killed before that, the next one finds it again. Whoever opens a
tier drops what no session needs.
"""

import errno
import logging
import os
import re
import shutil
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path

import numpy as np
import xxhash

from manthan.manager.sparing import Sparing
from manthan.manager.tiers.disk_files import lock, make_folder, remove, sync_all, write_all
from manthan.manager.tiers.local import LocalTier, Name, Placed
from manthan.manager.tiers.tier import STORE_FULL, Buffer, Found
from manthan.manager.transfer import STORE_DOWN

logger = logging.getLogger("vllm.manthan.disk")

BLOCKS, APART = "blocks", "apart"
"""Folders of blocks that the next process finds, and of those that it does not, because they were put after a reset."""
NAME = re.compile(r"(\d+)-([0-9a-f]*)-(\d+)")
PAGE = 4096
"""File systems allocate in multiples of this."""
_DIGEST = struct.Struct("<Q")
DISK = "disk"
"""Cause of a failure of the disk."""
SYNC_S, CLOSE_S = 5.0, 5.0
"""Seconds between two syncs, and that a disk without an answer is waited for at the end."""
READERS, WRITERS, AHEAD = 8, 4, 32
"""Threads, and blocks that are read ahead for one reader."""
QUIET_S = 60.0
"""Seconds in which a failure of many blocks is logged once."""


def room(nbytes: int) -> int:
    """Return the bytes of the disk that a block takes: whole pages."""
    return -(-(nbytes + _DIGEST.size) // PAGE) * PAGE


class DiskTier(LocalTier):
    """Tier of one rank in a folder on disk, which is made if it is not there.

    Args:
        timeout_s: Seconds that a reader waits for the disk in all, and a writer for each block.
        is_left: True for the folder of an earlier server, which several ranks read and drop from. None writes to it.

    Raises:
        BlockingIOError: Another process uses the folder.
        OSError: The folder cannot be used.
    """

    def __init__(self, folder: Path, max_bytes: int, timeout_s: float = 10.0, is_left: bool = False) -> None:
        super().__init__(max_bytes)
        self.folder, self._timeout_s = folder, timeout_s
        make_folder(folder)
        self._folder_lock = lock(folder / "lock", is_left)
        shutil.rmtree(folder / APART, ignore_errors=True)
        if (folder / BLOCKS).is_file():
            logger.warning("Manthan: %s is of an earlier version of Manthan, and is removed.", folder / BLOCKS)
            (folder / BLOCKS).unlink()
        make_folder(folder / BLOCKS)
        self._fd = os.open(folder / BLOCKS, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)  # not before the last thread has done with it
        for placed in blocks_in(folder / BLOCKS):
            self._taken += placed.room
            self._remove(placed.name)
            self._blocks[placed.name] = placed
        self._sequence = max((placed.sequence for placed in self._blocks.values()), default=0)
        self._is_dirty, self._is_apart, self._sparing = True, False, Sparing(QUIET_S)
        self._readers = ThreadPoolExecutor(READERS, "manthan-disk-read")
        self._writers = ThreadPoolExecutor(WRITERS, "manthan-disk-write")
        self._stuck: Future[Found] | Future[str | None] | None = None  # what somebody gave up waiting for
        self._closing = threading.Event()
        self._syncer = threading.Thread(target=self._sync_regularly, name="manthan-disk-sync", daemon=True)
        self._syncer.start()

    def put_all(self, group: int, blocks: Mapping[bytes, Buffer], tenant: str = "") -> dict[bytes, str]:
        if self._closing.is_set() or self._is_stuck:
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
        """See Tier. Some blocks are read ahead."""
        wanted, done, left_s = (self._blocks.get((group, key)) for key in keys), 0, self._timeout_s
        ahead: deque[Future[Found]] = deque()
        try:
            while done < len(keys):
                if self._closing.is_set() or self._is_stuck:
                    yield from [STORE_DOWN] * (len(keys) - done)
                    return
                ahead += [self._readers.submit(self._read, placed) for placed in islice(wanted, AHEAD - len(ahead))]
                began = time.monotonic()
                try:
                    found = ahead[0].result(max(0.0, left_s))
                except TimeoutError:
                    self._stuck = ahead[0]
                    self._complain("blocks are not read: the disk does not answer")
                    continue
                left_s -= time.monotonic() - began
                ahead.popleft()
                done += 1
                yield found
        finally:
            for job in ahead:
                job.cancel()

    def cleared(self, place: str) -> "DiskTier":
        """Return this one. Its folder gets another name before a block is put again."""
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
    def _is_stuck(self) -> bool:
        return self._stuck is not None and not self._stuck.done()

    def _read(self, placed: Placed | None) -> Found:
        if placed is None:
            return None
        memory = np.empty(placed.nbytes + _DIGEST.size, np.uint8)
        try:
            fd = os.open(_file(placed), os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._fd)
            try:
                os.preadv(fd, [memory.data], 0)
            finally:
                os.close(fd)
        except FileNotFoundError:
            memory[:] = 0
        except OSError as error:
            self._complain(f"a block cannot be read: {error.strerror}")
            return DISK
        body = memory[: placed.nbytes]
        if memory[placed.nbytes :].tobytes() == _digest(body):
            return body
        if not placed.is_dropped:
            self._complain("a block is not what was written")
        return None

    def _write(self, placed: Placed, buf: Buffer) -> str | None:
        with self._lock:
            self._sequence += 1
            placed.sequence = self._sequence
        name, part = _file(placed), f"{_file(placed)}.part"
        try:
            self._leave()
            self._is_dirty = True
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600, dir_fd=self._fd)
            try:
                write_all(fd, buf.data, 0)
                write_all(fd, memoryview(_digest(buf)), buf.nbytes)
            finally:
                os.close(fd)
            os.rename(part, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except OSError as error:
            with suppress(OSError):
                os.unlink(part, dir_fd=self._fd)
            self._complain(f"a block cannot be written: {error.strerror}")
            return STORE_FULL if error.errno in (errno.ENOSPC, errno.EDQUOT) else DISK
        return None

    def _erase(self, placed: Placed) -> None:
        self._is_dirty = True
        try:
            os.unlink(_file(placed), dir_fd=self._fd)
        except FileNotFoundError:  # it could not be written, or another rank was first
            pass
        except OSError as error:
            self._complain(f"a dropped block cannot be removed: {error.strerror}")

    def _leave(self) -> None:
        """Give the folder of blocks another name, once all was cleared. Raises OSError."""
        if self._is_apart and (self.folder / BLOCKS).exists():
            with suppress(FileNotFoundError):  # another thread was first
                (self.folder / BLOCKS).rename(self.folder / APART)

    def _sync_regularly(self) -> None:
        while not self._closing.wait(SYNC_S):
            self._sync()

    def _sync(self) -> None:
        """Make what was written and removed last if the machine stops."""
        try:
            self._leave()
            if self._is_dirty:
                self._is_dirty = False
                sync_all(self._fd)
        except OSError as error:
            self._is_dirty = True
            self._complain(f"what was written may not last: {error.strerror}")

    def _finish(self) -> None:
        self._writers.shutdown(wait=True, cancel_futures=True)
        self._syncer.join()
        while self._erase_one():
            pass
        self._sync()
        shutil.rmtree(self.folder / APART, ignore_errors=True)

    def _complain(self, of: str) -> None:
        if count := self._sparing.due(of):
            logger.warning("Manthan: %s: %s%s", self.folder, of, f" ({count} times)" if count > 1 else "")


def blocks_in(folder: Path) -> list[Placed]:
    """Return the blocks of a folder in the order of writing. What was not completed is removed. Raises OSError."""
    found = []
    for entry in os.scandir(folder):
        with suppress(FileNotFoundError):  # another rank has dropped it
            match, nbytes = NAME.fullmatch(entry.name), entry.stat(follow_symlinks=False).st_size - _DIGEST.size
            if match is None or nbytes < 0 or not entry.is_file(follow_symlinks=False):
                remove(Path(entry))
                continue
            name: Name = int(match[1]), bytes.fromhex(match[2])
            found.append(Placed(name, nbytes, room(nbytes), sequence=int(match[3])))
    return sorted(found, key=lambda placed: placed.sequence)


def _file(placed: Placed) -> str:
    group, key = placed.name
    return f"{group}-{key.hex()}-{placed.sequence}"


def _digest(body: Buffer) -> bytes:
    return _DIGEST.pack(xxhash.xxh3_64(body.data).intdigest())  # an object lets other threads run meanwhile
