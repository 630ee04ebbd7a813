"""Memory for compressed blocks if the codec runs on a GPU: tiers (pinned RAM, GPU memory) and staging buffers."""

import mmap
import threading
import time
from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import repeat
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from vllm.logger import init_logger

from manthan.manager.config.resolve import ConfigError, human_bytes
from manthan.manager.tiers.arena import GRANULE, Arena, Extent, room, split
from manthan.manager.tiers.tier import Buffer
from manthan.vllm_hooks import compat

logger = init_logger("vllm.manthan.worker")

PIECE = 256 << 20  # bytes of RAM pinned at once, a multiple of a huge page
PAGE, HUGE = 4096, 2 << 20
Name = tuple[int, bytes]  # KV cache group and block hash
Places = Sequence[tuple[Extent, ...]]
"""Extents of each of several blocks. An extent is a contiguous range of a buffer: start and size in bytes."""
Numbers = npt.NDArray[np.int64]
START, NBYTES, EXACT, FIRST_TOKEN, MARK, CODEC, PIECES = range(7)
"""Rows of a tier's table, which has a column for each block. START: start of the first extent. PIECES: number of
extents. The rows between are fields of `Stored`."""


class Stored(NamedTuple):
    """Compressed block in a tier.

    A compressed block begins with a header, and is not decoded unless that has the same `exact`, `first_token` and
    `mark`.
    """

    extents: tuple[Extent, ...]  # memory of the block; several only if no hole was large enough
    nbytes: int
    exact: int  # number of the block's first tokens whose KV is stored unchanged
    first_token: int  # position of the block's first token in the session
    mark: int = 0  # value of `manthan.manager.pool.Mark`: whether the KV was computed or decoded
    codec: int = 0  # index in the group's `CudaEngine.codecs`
    inner: tuple[int, ...] = ()
    """If the block has refinements (parts that add precision), end in bytes of each part but the last. The first part
    is the base."""


class Run(NamedTuple):
    """Consecutive stored blocks of a load, in one tier, with the same codec and number of exact first tokens."""

    tier: "Slab"
    in_place: bool  # True to decode from the tier's memory itself, without a copy in a staging buffer
    exact: int
    starts: Numbers  # [n], of each block the offset in the tier
    nbytes: Numbers
    first_tokens: Numbers  # [n], of each block the position of its first token in the session
    marks: Numbers
    pieces: Mapping[int, tuple[Extent, ...]]  # extents of blocks with several extents, by index in the run
    codec: int = 0

    def part(self, start: int, end: int) -> "Run":
        """Return the run of blocks `start` to `end`, exclusive."""
        some = slice(start, end)
        pieces = {at - start: extents for at, extents in self.pieces.items() if start <= at < end}
        arrays = self.starts[some], self.nbytes[some], self.first_tokens[some], self.marks[some]
        return Run(self.tier, self.in_place, self.exact, *arrays, pieces, self.codec)

    @property
    def extents(self) -> list[tuple[Extent, ...]]:
        """Extents of each block."""
        whole = zip(self.starts.tolist(), self.nbytes.tolist(), strict=True)
        return [self.pieces.get(at) or (Extent(start, room(size)),) for at, (start, size) in enumerate(whole)]


class PinnedRam:
    """Pinned RAM, which a GPU reads and writes directly. nbytes: final size. device: GPU.

    The first piece is pinned at once, and a thread pins the others after `start`, so that no caller waits for all.
    `start` comes with the first served step. Earlier, vLLM captures CUDA graphs, and the CUDA driver would break off a
    capture if memory were pinned meanwhile. Most of the time goes to the operating system, which gives and clears
    pages. Huge pages (`madvise`) are 512 times fewer. Pages are written before the driver pins them, so that the
    driver's locks, which copies need, are held for less time.

    Each piece is pinned separately, and the driver refuses a copy across pieces. An unused GRANULE behind each piece
    keeps a block's extent from spanning two. Raises ConfigError if RAM is lacking or the first piece cannot be pinned.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes, self._device = nbytes, device
        self._pinned, self._stopped = 0, False
        self._thread: threading.Thread | None = None
        try:
            self.buffer = _pages(nbytes + GRANULE * (max(0, nbytes - 1) // (PIECE - GRANULE)))
            starts = range(0, len(self.buffer), PIECE)
            self._spans = [Extent(at, min(PIECE - GRANULE, len(self.buffer) - at)) for at in starts]
            if self._spans:
                self._pin_next()
        except (OSError, RuntimeError) as error:
            raise ConfigError(
                f"the cold store's {human_bytes(nbytes)} of RAM cannot be pinned ({error}): lower "
                "tiers.max_bytes or host_bytes, or raise the memlock limit (ulimit -l)."
            ) from None

    @property
    def spans(self) -> Sequence[Extent]:
        """Extents of `buffer` that are pinned so far."""
        return self._spans[: self._pinned]

    @property
    def is_whole(self) -> bool:
        return self._pinned == len(self._spans)

    def start(self) -> None:
        """Pin the remaining pieces on a thread, unless an earlier call did."""
        if self._thread is None and not self.is_whole:
            size = human_bytes(self.nbytes)
            logger.info(f"Manthan: pinning {size} of RAM for compressed blocks; pinned parts are used already")
            self._thread = threading.Thread(target=self._pin_others, name="manthan-pin", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop pinning after the current piece, and unpin all pieces. The object is of no use afterwards."""
        self._stopped = True
        if self._thread is not None:
            self._thread.join()
        for span in self.spans:
            with suppress(RuntimeError):  # the GPU does not respond
                torch.cuda.cudart().cudaHostUnregister(self._bytes_of(span).data_ptr())
        self._spans, self._pinned = [], 0
        self.buffer = torch.empty(0, dtype=torch.uint8)

    def _pin_others(self) -> None:
        size, began = human_bytes(self.nbytes), time.monotonic()
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            with suppress(ImportError):  # without cuda-bindings: graphs are captured already
                from cuda.bindings import runtime

                relaxed = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
                runtime.cudaThreadExchangeStreamCaptureMode(relaxed)  # else pinning breaks off another thread's capture
        while not (self.is_whole or self._stopped):
            try:
                self._pin_next()
            except RuntimeError as error:
                done = human_bytes(sum(span.nbytes for span in self.spans))
                logger.warning(
                    f"Manthan: only {done} of the cold store's {size} of RAM could be pinned ({error}), and no more is "
                    "used: lower tiers.max_bytes or host_bytes, or raise the memlock limit (ulimit -l)."
                )
                return
        if self.is_whole:
            seconds = time.monotonic() - began
            logger.info(f"Manthan: {size} of RAM for compressed blocks are pinned, in {seconds:.1f} s")

    def _pin_next(self) -> None:
        piece = self._bytes_of(self._spans[self._pinned])
        piece.numpy()[::PAGE] = 0  # the system gives the pages now, not inside the driver's call
        compat.pin(piece)
        self._pinned += 1

    def _bytes_of(self, span: Extent) -> torch.Tensor:
        return self.buffer[span.start : span.start + span.nbytes]


def _pages(nbytes: int) -> torch.Tensor:
    """Return unpinned memory, uint8 [nbytes], in huge pages if the system has some. Raises OSError."""
    pages = mmap.mmap(-1, nbytes + HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    found = torch.frombuffer(pages, dtype=torch.uint8)
    begin = -found.data_ptr() % HUGE
    return found[begin : begin + nbytes]


class Slab:
    """Tier of a rank: compressed blocks in a buffer, least recently used first if the owner reports uses to `used`.

    buffer: uint8 [nbytes]. A byte is free, taken (a block is being written), or part of a stored block. The
    facts of a block are a column of an array, so that the facts of thousands of blocks are read at once.
    """

    def __init__(self, buffer: torch.Tensor, ram: PinnedRam | None = None) -> None:
        """ram: RAM of `buffer`, pinned in part so far; None for GPU memory."""
        self.buffer, self._ram = buffer, ram
        self.arena = Arena(0 if ram else len(buffer))
        self.freed: list[Extent] = []  # extents whose bytes are not erased yet
        self._spans = 0
        self._columns: OrderedDict[Name, int] = OrderedDict()
        self._table = np.zeros((PIECES + 1, 0), np.int64)
        self._spare: list[int] = []  # columns of no block
        self._pieces: dict[int, tuple[Extent, ...]] = {}  # by column: blocks in several extents
        self._inner: dict[int, tuple[int, ...]] = {}  # by column: blocks with refinements
        self.grow()

    @classmethod
    def on_device(cls, max_bytes: int, device: torch.device) -> "Slab":
        """Return a slab of GPU memory, allocated now. Raises ConfigError without enough memory."""
        try:
            return cls(torch.zeros(max_bytes, dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError:
            free, _ = torch.cuda.mem_get_info(device)
            raise ConfigError(
                f"tiers.max_bytes asks for {human_bytes(max_bytes)} of memory on {device}, where {human_bytes(free)} "
                "are free: lower tiers.max_bytes, or lower --gpu-memory-utilization."
            ) from None

    @classmethod
    def pinned(cls, max_bytes: int, device: torch.device) -> "Slab":
        """Return a slab of RAM for direct access by the GPU, with a first part pinned at once.

        Raises ConfigError if that part cannot be pinned.
        """
        ram = PinnedRam(max_bytes, device)
        return cls(ram.buffer, ram)

    def start(self) -> None:
        """Begin to pin the rest of the RAM. Called in every step, but only the first call does it."""
        if self._ram is not None:
            self._ram.start()

    def grow(self) -> None:
        """Add newly pinned RAM to the arena."""
        if self._ram is not None:
            for span in self._ram.spans[self._spans :]:
                self.arena.join(span)
                self._spans += 1

    def __contains__(self, name: Name) -> bool:
        return name in self._columns

    def blocks(self) -> dict[Name, Stored]:
        """Return all blocks, the least recently used first."""
        return {name: self._facts(column) for name, column in self._columns.items()}

    def stored(self, name: Name) -> Stored | None:
        """Return a block's facts; None if the tier has no such block."""
        column = self._columns.get(name)
        return None if column is None else self._facts(column)

    def _facts(self, column: int) -> Stored:
        start, nbytes, *told = self._table[: CODEC + 1, column].tolist()
        return Stored(self._extents(column, start, nbytes), nbytes, *told)._replace(inner=self._inner.get(column, ()))

    def put(self, blocks: Mapping[Name, Stored]) -> None:
        """Enter new blocks with the extents allocated for them. Copy no bytes.

        Bytes allocated beyond a block's size become free again.
        """
        if len(self._spare) < len(blocks):
            there = self._table.shape[1]
            more = max(there, len(blocks))
            self._table = np.pad(self._table, ((0, 0), (0, more)))
            self._spare += range(there, there + more)
        columns, rows = [self._spare.pop() for _ in blocks], []
        for column, (name, (extents, nbytes, *told, inner)) in zip(columns, blocks.items(), strict=True):
            taken = extents[0][1] if len(extents) == 1 else sum(size for _, size in extents)
            if taken - nbytes >= GRANULE:
                extents, rest = split(extents, nbytes)
                self.free(rest)
            if len(extents) > 1:
                self._pieces[column] = extents
            if inner:
                self._inner[column] = inner
            rows.append((extents[0][0] if extents else 0, nbytes, *told, len(extents)))
            self._columns[name] = column
        if rows:
            self._table[:, columns] = np.array(rows, np.int64).T

    def run(self, group: int, keys: Sequence[bytes], in_place: bool) -> Run | None:
        """Return the run that begins with the first of `keys`; None if that is absent.

        The run ends before a block that is absent, or has another codec or number of exact tokens. in_place: True to
        read blocks in the tier if possible. The run then has either only blocks with one extent, read in place, or only
        blocks with several, to be copied.
        """
        columns = list(map(self._columns.get, zip(repeat(group), keys)))
        there = np.array(columns[: columns.index(None)] if None in columns else columns, np.int64)
        if not len(there):
            return None
        found = self._table[:, there]
        same = (found[EXACT] == found[EXACT, 0]) & (found[CODEC] == found[CODEC, 0])
        if in_place:
            same &= (found[PIECES] == 1) == (found[PIECES, 0] == 1)
        count = len(same) if same.all() else int(same.argmin())
        found = found[:, :count]
        several = (found[PIECES] > 1).nonzero()[0].tolist() if self._pieces else ()
        pieces = {at: self._pieces[int(there[at])] for at in several}
        arrays = found[START], found[NBYTES], found[FIRST_TOKEN], found[MARK]
        return Run(self, in_place and not pieces, int(found[EXACT, 0]), *arrays, pieces, int(found[CODEC, 0]))

    def used(self, group: int, keys: Iterable[bytes]) -> None:
        """Make these blocks the most recently used, the last of `keys` most of all. All must be in the tier."""
        for key in keys:
            self._columns.move_to_end((group, key))

    def oldest(self, others: Container[Name] = ()) -> Name | None:
        """Return the least recently used block that is not in `others`; None without one."""
        return next((name for name in self._columns if name not in others), None)

    def write(self, extents: Iterable[Extent], buf: Buffer) -> None:
        """Copy a block into the tier, which must be in RAM."""
        for start, nbytes in extents:
            part, buf = buf[:nbytes], buf[nbytes:]
            self.buffer.numpy()[start : start + len(part)] = part

    def read(self, stored: Stored) -> Buffer:
        """Return a block's bytes, without a copy if contiguous. The tier must be in RAM."""
        parts = [self.buffer.numpy()[start : start + nbytes] for start, nbytes in stored.extents]
        found: Buffer = (parts[0] if len(parts) == 1 else np.concatenate(parts))[: stored.nbytes]
        return found

    def drop(self, names: Iterable[Name]) -> None:
        """Remove blocks; unknown names are ignored."""
        gone = [column for name in names if (column := self._columns.pop(name, None)) is not None]
        for column, start, nbytes in zip(gone, *self._table[START : NBYTES + 1, gone].tolist(), strict=True):
            self.free(self._extents(column, start, nbytes))
            self._pieces.pop(column, None)
            self._inner.pop(column, None)
        self._spare += gone

    def trim(self, names: Iterable[Name], parts: int) -> None:
        """Keep the first `parts` parts of blocks; see `Tier.trim`."""
        for name in names:
            column = self._columns.get(name, -1)
            if parts <= len(inner := self._inner.get(column, ())):
                start, nbytes = self._table[START : NBYTES + 1, column].tolist()
                kept, rest = split(self._extents(column, start, nbytes), inner[parts - 1])
                self.free(rest)
                self._pieces.pop(column, None)
                self._pieces |= {column: kept} if len(kept) > 1 else {}
                self._inner[column] = inner[: parts - 1]
                self._table[[NBYTES, PIECES], column] = inner[parts - 1], len(kept)

    def clear(self) -> None:
        """Remove all blocks. The bytes of blocks being written stay taken."""
        self.drop(list(self._columns))

    def free(self, extents: Sequence[Extent]) -> None:
        """Free extents, or parts of extents. `CudaEngine` erases `freed` before the next write."""
        self.arena.free(extents)
        self.freed += extents

    def _extents(self, column: int, start: int, nbytes: int) -> tuple[Extent, ...]:
        return self._pieces.get(column) or (Extent(start, room(nbytes)),)

    def release(self) -> None:
        """Unpin the RAM if any, and make `buffer` empty. The memory is freed with the last tensor that views it."""
        if self._ram is not None:
            self._ram.close()
        self.buffer = self.buffer[:0]


class Demotion(NamedTuple):
    """Block that moves from GPU memory to pinned RAM to make room. Its `nbytes` bytes are still to be copied."""

    name: Name
    source: tuple[Extent, ...]
    target: tuple[Extent, ...]
    nbytes: int


class Taken(NamedTuple):
    """Room for a new block."""

    tier: Slab
    extents: tuple[Extent, ...]
    in_place: bool  # True to encode directly there, without a staging buffer


class Slabs:
    """Tiers of a rank: only GPU memory (device), only pinned RAM (host), or both, with the device first.

    New blocks go to the first tier. When the device is full, the least recently used blocks move to the host. No block
    can move while all blocks of the device are still being written, or if the host lacks room for the least recently
    used one. New blocks that fit then go directly to the host. The manager never reserves more than `TierBytes.usable`
    bytes of both together.
    """

    def __init__(self, device: Slab | None, host: Slab | None) -> None:
        self.device, self.host = device, host
        self.all = [tier for tier in (device, host) if tier is not None]
        self.first = self.all[0]

    def take(self, nbytes: int, count: int) -> tuple[list[Taken], list[Demotion]]:
        """Return room for up to `count` blocks of `nbytes` bytes, and the demotions to copy before the room is used."""
        for tier in self.all:
            tier.grow()
        arena, demotions = self.first.arena, list[Demotion]()
        found = arena.allocate_some(nbytes, count)
        while len(found) < count and nbytes <= arena.nbytes and self._demote(demotions):
            found += arena.allocate_some(nbytes, count - len(found))
        on_device, behind = self.first is self.device, None if self.host is self.first else self.host
        taken = [Taken(self.first, extents, on_device and len(extents) == 1) for extents in found]
        while len(taken) < count and behind is not None and (extents := behind.arena.allocate(nbytes)) is not None:
            taken.append(Taken(behind, extents, False))
        return taken, demotions

    def find(self, group: int, keys: Sequence[bytes]) -> Run | None:
        """Return the run that begins with the first of these blocks; None if no tier has it."""
        for tier in self.all:
            if (run := tier.run(group, keys, tier is self.device)) is not None:
                if len(self.all) > 1:  # the order of use matters for demotion only
                    tier.used(group, reversed(keys[: len(run.starts)]))  # a session's last blocks move down first
                return run
        return None

    def put(self, tier: Slab, blocks: Mapping[Name, Stored]) -> None:
        """Enter blocks into the tier in which they have room, and drop older copies from all tiers."""
        for other in self.all:
            other.drop([name for name in blocks if name in other])
        tier.put(blocks)

    def drop(self, group: int, keys: Sequence[bytes]) -> None:
        for tier in self.all:
            tier.drop(zip(repeat(group), keys))

    def trim(self, group: int, keys: Sequence[bytes], parts: int) -> None:
        for tier in self.all:
            tier.trim(zip(repeat(group), keys), parts)

    def clear(self) -> None:
        for tier in self.all:
            tier.clear()

    def _demote(self, demotions: list[Demotion]) -> bool:
        """Move the device's least recently used block to the host. Return False without such a block, host or room."""
        if self.host is None or self.host is self.first or (name := self.first.oldest()) is None:
            return False
        stored = self.first.stored(name)
        assert stored is not None
        target = self.host.arena.allocate(stored.nbytes)
        if target is None:
            return False
        self.first.drop([name])
        self.host.put({name: stored._replace(extents=target)})
        demotions.append(Demotion(name, stored.extents, target, stored.nbytes))
        return True


class Staging:
    """Buffer in GPU memory, uint8 [nbytes], and the stream of its jobs. priority: of the stream, low numbers first."""

    def __init__(self, nbytes: int, device: torch.device, priority: int = 0) -> None:
        self.buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.stream = torch.cuda.Stream(device, priority=priority)

    def fits(self, nbytes: int) -> int:
        """Return the number of blocks of `nbytes` bytes that fit into the buffer."""
        return len(self.buffer) // nbytes


def pieces(sources: Places, targets: Places, nbytes: Sequence[int]) -> torch.Tensor:
    """Return a table of the copies that move blocks from `sources` to `targets`: int64 [3, copies], in bytes.

    The rows are offsets in the source, offsets in the target, and sizes. nbytes: size of each block.
    """
    if max(map(len, sources)) == max(map(len, targets)) == 1:
        starts = [source[0].start for source in sources], [target[0].start for target in targets]
        return torch.tensor([*starts, nbytes], dtype=torch.int64)
    found = [piece for one in zip(sources, targets, nbytes, strict=True) for piece in _pieces(*one)]
    return torch.tensor(found, dtype=torch.int64).t().contiguous()


def _pieces(source: tuple[Extent, ...], target: tuple[Extent, ...], left: int) -> Iterator[tuple[int, int, int]]:
    """Yield the copies that move one block. Each ends where the block, or an extent of source or target, ends."""
    froms, tos = iter(source), iter(target)
    (at, here), (to, there) = next(froms), next(tos)
    while left:
        size = min(here, there, left)
        yield at, to, size
        left -= size
        at, here, to, there = at + size, here - size, to + size, there - size
        if left and not here:
            at, here = next(froms)
        if left and not there:
            to, there = next(tos)


def copy_run(run: Run, target: torch.Tensor, offsets: Numbers) -> None:
    """Copy stored blocks, each to an offset of `offsets` in buffer `target`, on the current stream."""
    if run.pieces:
        tos = [(Extent(start, len(target)),) for start in offsets.tolist()]
        copy(run.tier.buffer, run.extents, target, tos, run.nbytes.tolist())
        return
    froms, tos_there = run.starts + run.tier.buffer.data_ptr(), offsets + target.data_ptr()
    compat.copy_blocks(*map(torch.from_numpy, (froms, tos_there, np.ascontiguousarray(run.nbytes))))


def copy(source: torch.Tensor, froms: Places, target: torch.Tensor, tos: Places, nbytes: Sequence[int]) -> None:
    """Copy bytes between buffers, by the copy engines, on the current stream. Arguments: see `pieces`."""
    starts, ends, sizes = pieces(froms, tos, nbytes)
    compat.copy_blocks(starts + source.data_ptr(), ends + target.data_ptr(), sizes)
