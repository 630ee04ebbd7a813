"""One rank's encoded blocks in a folder of a local file system: a log of segments, and an index of it in memory.

Blocks are appended. What is dropped stays where it is until its segment is compacted: its living blocks are written
again at the log's end, and the file goes. A process may be killed at any moment: what `put_all` has confirmed is found
again, since the page cache is the system's. When the power fails, what was written in the last SYNC_S seconds is
lost; a record that is not whole is never taken for one.

As in log-structured file systems (Rosenblum and Ousterhout, 1992): the segment that has the most of what was dropped
is compacted first.
"""

import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from manthan.manager.sparing import Sparing
from manthan.manager.tiers.disk_files import is_damage, lock, make_folder, set_aside
from manthan.manager.tiers.disk_segment import (
    APART,
    PAGE,
    SUFFIX,
    Record,
    Segment,
    digest_of,
    numbered,
    room,
    run_nbytes,
    sync_folder,
)
from manthan.manager.tiers.disk_segment import newest as newest
from manthan.manager.tiers.disk_writers import HangsError, Writers
from manthan.manager.tiers.ram import RamTier
from manthan.manager.tiers.tier import STORE_FULL, Buffer, FrontTier, Landing, TierError
from manthan.manager.work import STORE_DOWN

logger = logging.getLogger("vllm.manthan.disk")

SEGMENT_BYTES = 128 << 20
SHARE, MOST_SEGMENTS = 32, 512
"""A budget has room for so many segments, if they are smaller than SEGMENT_BYTES; never for more than these, each of
which is an open file."""
SPARE = 0.1
"""This share of the budget, and two segments, are for what is dropped and not compacted yet."""
SYNC_S = 5.0
"""Seconds between two syncs of written segments."""
CLOSE_S = 5.0
"""How long a disk that does not answer is waited for at the end."""
READERS, AHEAD = 8, 12
"""Threads that read, and how many runs of one reader they are ahead."""
QUIET_S = 60.0
"""A disk that fails does so for thousands of blocks: so often it is said."""
RUN_BYTES = 4 << 20
"""Blocks that lie one behind the other are read at once, so many bytes at most."""
CHECKED = 2
"""So many of the last segments are read whole when a store is opened: only there may bodies be torn."""

Name = tuple[int, bytes]
"""Of a block: its KV cache group, and its key."""


def segment_nbytes(max_bytes: int) -> int:
    """Of the segments of a store with this budget."""
    return max(min(SEGMENT_BYTES, max_bytes // SHARE), max_bytes // MOST_SEGMENTS, PAGE)


def usable(max_bytes: int) -> int:
    """Bytes that blocks may take of a budget; the rest is for what was dropped."""
    return max(0, max_bytes - int(max_bytes * SPARE) - 2 * segment_nbytes(max_bytes))


class DiskError(TierError):
    """The disk does not do what was asked."""

    cause = "disk"


class DiskSlowError(TierError):
    """The disk did not give what was asked within the time that somebody waits for it."""

    cause = STORE_DOWN


class FolderInUseError(TierError):
    """Another process has this folder."""


class _Kept(NamedTuple):
    """A block, and the segment that it is in."""

    segment: Segment
    record: Record


_Reading: TypeAlias = "Future[list[Buffer | DiskError | None]]"


class _Run(NamedTuple):
    """Blocks that lie one behind the other in a segment; or none, for one that is not there."""

    segment: Segment | None
    records: list[Record]

    def goes_on_with(self, kept: _Kept | None) -> bool:
        """Whether it may, and is short enough."""
        first, last = self.records[0], self.records[-1]
        return (
            kept is not None
            and kept.segment is self.segment
            and kept.record.offset == last.offset + last.room
            and kept.record.offset + kept.record.room - first.offset <= RUN_BYTES
        )

    def memory(self, into: Landing | None) -> Buffer:
        """What it can be read into."""
        nbytes = run_nbytes(self.records) if self.records else 0
        return np.empty(nbytes, np.uint8) if into is None or not nbytes else into.room(nbytes, len(self.records))

    def read(self, memory: Buffer) -> list[Buffer | DiskError | None]:
        """The blocks; behind an error there are none."""
        if self.segment is None:
            return [None]
        try:
            found: list[Buffer | DiskError | None] = [*self.segment.read_run(self.records, memory)]
        except OSError as error:
            if len(self.records) == 1:
                return [DiskError(f"{self.segment.path}: {error.strerror}")]
            found = []
            for record in self.records:  # which one is it?
                found += _Run(self.segment, [record]).read(np.empty(run_nbytes([record]), np.uint8))
                if isinstance(found[-1], DiskError):
                    break
            return found
        if any(buf is None for buf in found):
            logger.warning("Manthan: %s: a block is not what was written.", self.segment.path)
        return found


class DiskTier(FrontTier):
    """folder: made if it is not there; one process at a time has it. max_bytes: what files may take.

    timeout_s: how long a reader waits for the disk, all in all, and a writer for any answer of it. What was dropped may
    be found again after a restart, until it is dropped again. Raises FolderInUseError, and OSError where the folder
    cannot be used.
    """

    def __init__(self, folder: Path, max_bytes: int, timeout_s: float = 10.0) -> None:
        self.folder, self.max_bytes, self._timeout_s = folder, max_bytes, timeout_s
        self.segment_bytes = segment_nbytes(max_bytes)
        self._appending = threading.Lock()
        """Of who takes room at the log's end, or makes some; taken before the other one."""
        self._lock = threading.Lock()
        """Of all below."""
        self._written = threading.Condition(self._lock)
        self._index: dict[Name, _Kept] = {}
        self._logs: dict[int, _Log] = {}
        self._void: list[Segment] = []
        """To be removed."""
        self._suffix = SUFFIX
        self._sequence = self._last_number = 0
        make_folder(folder)
        held = lock(folder / "lock")
        if held is None:
            raise FolderInUseError(f"{folder} is in use by another process.")
        self._folder_lock = held
        self._open()
        self._readers, self._writers = ThreadPoolExecutor(READERS, "manthan-disk"), Writers(timeout_s)
        self._sparing = Sparing(QUIET_S)
        self._stuck: _Reading | None = None
        """What a reader has given up waiting for."""
        self._closing = False
        self._is_due = threading.Event()
        self._syncer = threading.Thread(target=self._sync_again_and_again, name="manthan-sync", daemon=True)
        self._syncer.start()

    # -- what is asked of it --------------------------------------------------------------------------

    def put_all(self, group: int, blocks: Mapping[bytes, Buffer], tenant: str = "") -> dict[bytes, str]:
        batch = _Batch(group, blocks)
        try:
            return self._writers.run(partial(self._put_batch, batch))
        except HangsError:
            with self._lock:
                batch.is_given_up = True
                for name in batch.begun:
                    self._forget(name)
            self._complain("blocks are not kept: the disk does not answer")
            return dict.fromkeys(blocks, DiskSlowError.cause)

    def _put_batch(self, batch: "_Batch") -> dict[bytes, str]:
        group, blocks, refused = batch.group, batch.blocks, dict[bytes, str]()
        left = list(blocks)
        while left:
            try:
                placed = self._place_some(group, left, batch)
            except OSError as error:
                refused[left[0]], placed = self._cause(error), []
            if not placed:
                refused.setdefault(left[0], STORE_FULL)
            left = left[max(1, len(placed)) :]
            refused |= self._write_some(placed, batch)
        return refused

    def read(
        self, group: int, keys: Sequence[bytes], tenant: str = "", into: Landing | None = None
    ) -> Iterator[Buffer | None]:
        """Raises DiskError, and DiskSlowError, which says nothing about the blocks. Some are read ahead."""
        if self._stuck is not None and not self._stuck.done():
            raise DiskSlowError(f"{self.folder}: the disk does not answer.")
        runs, waited = self._runs(group, keys), 0.0
        ahead: deque[_Reading] = deque()
        try:
            while True:
                for run in islice(runs, AHEAD - len(ahead)):
                    memory = run.memory(into)
                    ahead.append(self._readers.submit(run.read, memory))
                if not ahead:
                    return
                began = time.monotonic()
                try:
                    bufs = ahead[0].result(max(0.0, self._timeout_s - waited))
                except TimeoutError:
                    self._stuck = ahead[0]
                    raise DiskSlowError(f"{self.folder}: the disk took {self._timeout_s:g} s.") from None
                waited += time.monotonic() - began
                ahead.popleft()
                for buf in bufs:
                    if isinstance(buf, DiskError):
                        raise buf
                    yield buf
        finally:
            under_way = [future for future in ahead if not future.cancel()]
            if into is not None and any(not future.done() for future in under_way):
                into.lose()

    def _runs(self, group: int, keys: Sequence[bytes]) -> Iterator["_Run"]:
        """The blocks, in order, those that lie one behind the other together."""
        run = _Run(None, [])
        for kept in (self._index.get((group, key)) for key in keys):
            if run.records and not run.goes_on_with(kept):
                yield run
                run = _Run(None, [])
            if kept is None:
                yield run
                continue
            run = _Run(kept.segment, [*run.records, kept.record])
        if run.records:
            yield run

    def absent(self, group: int, keys: Sequence[bytes]) -> list[bytes]:
        with self._lock:
            return [key for key in keys if (group, key) not in self._index]

    def drop(self, group: int, keys: Iterable[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._forget((group, key))

    def cleared(self, place: str) -> "DiskTier":
        """This one; what is being put is not kept. Files are removed in a moment, on another thread.

        No process finds again what is put from now on: it may be of other weights than those that the next one has.
        """
        with self._lock:
            self._index.clear()
            self._void += [log.segment for log in self._logs.values()]
            self._logs, self._suffix = {}, APART
        self._is_due.set()
        return self

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._is_due.set()
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._syncer.join(CLOSE_S)
        try:
            if self._syncer.is_alive():
                raise HangsError
            self._writers.run(self._tidy)
        except HangsError:
            logger.warning("Manthan: %s: the disk does not answer; it is left as it is.", self.folder)
            return
        finally:
            self._writers.shutdown()
        with self._appending, self._lock:
            self._index.clear()
            self._logs.clear()
            self._folder_lock.close()

    def room(self, nbytes: int) -> int:
        return room(nbytes)

    @property
    def usable(self) -> int:
        return usable(self.max_bytes)

    @property
    def used(self) -> int:
        with self._lock:
            return self._used()

    @property
    def on_disk(self) -> int:
        """Bytes of all files."""
        with self._lock:
            return self._on_disk()

    def blocks(self) -> dict[Name, int]:
        """What is there, and how many bytes each has."""
        with self._lock:
            return {name: kept.record.nbytes for name, kept in self._index.items()}

    def names(self) -> list[Name]:
        with self._lock:
            return sorted(self._index, key=lambda name: self._index[name].record.sequence)

    def sync(self) -> None:
        """What was written is on the disk, even if the machine stops. Raises OSError."""
        with self._lock:
            segments = [log.segment for log in self._logs.values()]
        for segment in segments:
            segment.sync()
            self._writers.answered()

    # -- the log --------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Find what is there. Segments that are damaged are set aside."""
        for path in self.folder.glob(f"*{APART}"):
            with suppress(OSError):
                path.unlink()
        paths = numbered(self.folder)
        self._last_number = max((number for number, _ in paths), default=0)
        for number, path in paths:
            try:
                self._find(Segment(self.folder, number), number > self._last_number - CHECKED)
            except OSError as error:
                self._lose(number)
                if is_damage(error):
                    set_aside(path, error.strerror)
                else:
                    logger.warning("Manthan: %s is not used: %s", path, error.strerror)

    def _find(self, segment: Segment, is_checked: bool) -> None:
        """Take up what a segment has. Raises OSError."""
        self._logs[segment.number] = _Log(segment)
        for record in segment.records():
            self._sequence = max(self._sequence, record.sequence)
            if is_checked and segment.read(record) is None:
                segment.spoil(record)
                continue
            name = record.group, record.key
            known = self._index.get(name)
            if known is None or known.record.sequence < record.sequence:
                self._forget(name)
                self._keep(name, _Kept(segment, record))

    def _lose(self, number: int) -> None:
        """Forget a segment, and what it has."""
        for name in [name for name, kept in self._index.items() if kept.segment.number == number]:
            self._forget(name)
        self._logs.pop(number, None)

    def _place_some(self, group: int, keys: Sequence[bytes], batch: "_Batch") -> "list[_Placed]":
        """The first of these blocks, one behind the other at the log's end, so that they can be read at once; none if
        there is no room for the first. Raises OSError."""
        placed: list[_Placed] = []
        nbytes = 0
        with self._appending:
            for key in keys:
                name, buf = (group, key), batch.blocks[key]
                need = room(buf.nbytes)
                log = placed[0].log if placed else None
                if log is not None and (nbytes + need > RUN_BYTES or log.segment.end + need > self.segment_bytes):
                    break
                with self._lock:
                    if batch.is_given_up:
                        break
                    batch.begun.append(name)
                    self._forget(name)
                    if self._used() + need > self.usable:
                        break
                if log is None:  # only the first makes room: others would wait for what is placed already
                    log = self._end(need)
                if log is None:
                    break
                placed.append(_Placed(name, buf, log, self._place(log, name, buf)))
                nbytes += need
        return placed

    def _write_some(self, placed: "Sequence[_Placed]", batch: "_Batch") -> dict[bytes, str]:
        """Returns those that are not kept, each with the cause."""
        refused, left = dict[bytes, str](), deque(placed)
        try:
            while left:
                one = left.popleft()
                try:
                    if not self._write(one, batch):
                        refused[one.name[1]] = STORE_FULL
                except OSError as error:
                    refused[one.name[1]] = self._cause(error)
        finally:
            for one in left:
                self._let_go(one)
        return refused

    def _write(self, one: "_Placed", batch: "_Batch") -> bool:
        """Whether it is kept. Raises OSError."""
        name, buf, log, kept = one
        try:
            if batch.is_given_up:
                return False
            kept.segment.write(kept.record, buf)
        finally:
            self._let_go(one)
        self._writers.answered()
        with self._lock:
            if batch.is_given_up or self._logs.get(log.segment.number) is not log:  # all was cleared meanwhile
                return False
            self._forget(name)  # somebody else may have put it meanwhile
            self._keep(name, kept)
        return True

    def _let_go(self, one: "_Placed") -> None:
        """It is not being written any more."""
        with self._lock:
            one.log.writing -= 1
            one.log.alive -= one.kept.record.room
            self._written.notify_all()

    def _cause(self, error: OSError) -> str:
        """Why a block is not kept."""
        self._complain(f"a block could not be written: {error.strerror}")
        return STORE_FULL if error.errno in (errno.ENOSPC, errno.EDQUOT) else DiskError.cause

    def _complain(self, of: str) -> None:
        if count := self._sparing.due(of):
            logger.warning("Manthan: %s: %s%s", self.folder, of, f" ({count} times)" if count > 1 else "")

    def _end(self, need: int) -> "_Log | None":
        """A segment with so much room behind its end; None if there is none to be made. Whoever asks is appending."""
        self._remove_void()
        last = next(reversed(self._logs.values()), None)
        if last is not None and last.segment.end + need <= self.segment_bytes:
            return last
        while self.on_disk + max(need, self.segment_bytes) + self.segment_bytes > self.max_bytes:
            if not self._compact():
                return None
        last = next(reversed(self._logs.values()), None)
        if last is not None and last.segment.end + need <= self.segment_bytes:
            return last  # begun for what was alive
        return self._begin()

    def _begin(self) -> "_Log":
        self._last_number += 1
        log = _Log(Segment(self.folder, self._last_number, new=True, suffix=self._suffix))
        with self._lock:
            if log.segment.path.suffix == self._suffix:
                self._logs[self._last_number] = log
            else:  # all was cleared meanwhile
                self._void.append(log.segment)
        return log

    def _place(self, log: "_Log", name: Name, buf: Buffer) -> _Kept:
        """At the segment's end, for a block that is about to be written there."""
        with self._lock:
            self._sequence += 1
            segment, need = log.segment, room(buf.nbytes)
            record = Record(*name, self._sequence, segment.end, buf.nbytes, digest_of(buf))
            segment.end += need
            log.writing += 1
            log.alive += need
            return _Kept(segment, record)

    def _compact(self) -> bool:
        """Write the living blocks of one segment again, at the log's end, and remove it. False if that gains nothing.

        Blocks that cannot be read are dropped. Raises OSError.
        """
        with self._lock:
            while True:
                logs = [log for log in self._logs.values() if not log.writing]
                if logs or not self._logs:
                    break
                self._written.wait()
            least = min(logs, key=lambda log: log.alive - log.segment.end, default=None)  # most is gained there
            if least is None or least.alive >= least.segment.end:
                return False
        for record in least.segment.records():
            self._move((record.group, record.key), least)
        with self._lock:
            if least.alive:  # headers that cannot be read any more
                for name in [name for name, kept in self._index.items() if kept.segment is least.segment]:
                    self._forget(name)
        self.sync()  # what was written again is on the disk before it goes from here
        with self._lock:
            self._logs.pop(least.segment.number, None)
            self._void.append(least.segment)
        self._remove_void()
        return True

    def _move(self, name: Name, log: "_Log") -> None:
        with self._lock:
            kept = self._index.get(name)
        if kept is None or kept.segment is not log.segment:
            return
        buf = kept.segment.read(kept.record)
        if buf is None:
            with self._lock:
                self._forget(name)
            return
        last = next(reversed(self._logs.values()), None)
        need = kept.record.room
        if last is None or last is log or last.segment.end + need > self.segment_bytes:
            last = self._begin()
        moved = self._place(last, name, buf)
        try:
            moved.segment.write(moved.record, buf)
        finally:
            with self._lock:
                last.writing -= 1
                last.alive -= need
        self._writers.answered()
        with self._lock:
            if self._index.get(name) is kept:
                self._forget(name)
                self._keep(name, moved)

    def _sync_again_and_again(self) -> None:
        while not self._closing:
            self._is_due.wait(SYNC_S)
            self._is_due.clear()
            self._tidy()

    def _tidy(self) -> None:
        try:
            self._remove_void()
            self.sync()
        except OSError as error:
            self._complain(f"what was written may not last: {error.strerror}")

    def _remove_void(self) -> None:
        """Raises OSError."""
        with self._lock:
            void = list(self._void)
        if not void:
            return
        for segment in void:
            segment.path.unlink(missing_ok=True)
        sync_folder(self.folder)
        with self._lock:
            self._void = [segment for segment in self._void if segment not in void]

    # -- books; whoever calls has the lock ------------------------------------------------------------

    def _used(self) -> int:
        return sum(log.alive for log in self._logs.values())

    def _on_disk(self) -> int:
        segments = [*(log.segment for log in self._logs.values()), *self._void]
        return sum(segment.end for segment in segments)

    def _keep(self, name: Name, kept: _Kept) -> None:
        self._index[name] = kept
        self._logs[kept.segment.number].alive += kept.record.room

    def _forget(self, name: Name) -> None:
        kept = self._index.pop(name, None)
        if kept is not None:
            self._logs[kept.segment.number].alive -= kept.record.room


@dataclass(eq=False)
class _Batch:
    """What is put at once. is_given_up: nobody waits for it any more, and none of it is kept."""

    group: int
    blocks: Mapping[bytes, Buffer]
    begun: list[Name] = field(default_factory=list)
    is_given_up: bool = False


@dataclass(eq=False)
class _Log:
    """What is known of a segment. alive: bytes of what is in the index, or being written. writing: how many records
    are being written."""

    segment: Segment
    alive: int = 0
    writing: int = 0


class _Placed(NamedTuple):
    """A block, and where it is about to be written."""

    name: Name
    buf: Buffer
    log: _Log
    kept: _Kept


class NoTier(RamTier):
    """In place of a disk that cannot be used: it has no room, and says that the disk is why."""

    def __init__(self) -> None:
        super().__init__(0)

    def put_all(self, group: int, blocks: Mapping[bytes, Buffer], tenant: str = "") -> dict[bytes, str]:
        return dict.fromkeys(blocks, DiskError.cause)
