"""Engine on the GPU's cores, on side streams; compressed blocks, not bf16, cross PCIe.

The model's thread never waits. Work is queued on side streams: a store's behind all the model's work so far, a load's
behind that of earlier steps, so that a load and the step in which it begins go on together. Each chunk of work ends in
an event, and the events are polled once a step. Blocks in GPU memory (the tier "device") are read and written in place,
if in one extent. All other blocks pass through a staging buffer on the device. Room in the tiers is given and taken in
the order in which the streams use the room. Where room changes hands between streams, the second stream waits for the
first. Freed bytes are erased on a separate stream, before anything is written there.

GPU memory and pinned RAM (the tier "host") are primary tiers. A disk or Redis is a secondary tier. Separate threads
copy bytes between pinned RAM and the secondary tier. A load finds the copied blocks in pinned RAM.
"""

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, groupby, product
from operator import attrgetter
from typing import Literal, NamedTuple

import numpy as np
import torch
from vllm.logger import init_logger

from manthan.codec.gpu.paged import GOOD, Batch, PagedCodec, status_cause
from manthan.manager.events import BlocksTrimmed
from manthan.manager.tiers.arena import Extent, room
from manthan.manager.tiers.tier import STORE_FULL, Buffer, Found, Tier
from manthan.manager.transfer import NEEDED, RESET, Transfer, TransferResult
from manthan.vllm_hooks import compat
from manthan.vllm_hooks.messages import ManthanMetadata
from manthan.vllm_hooks.worker.capacity import RESTORE_STAGING_BYTES, RESTORE_STAGINGS, STAGING_BYTES
from manthan.vllm_hooks.worker.codecs import Codecs
from manthan.vllm_hooks.worker.engine import MISSING, Ended, Engine, JobThreads, Storing, cause_of
from manthan.vllm_hooks.worker.promotion import Primary, Reading
from manthan.vllm_hooks.worker.slabs import (
    Demotion,
    Name,
    Numbers,
    Places,
    Run,
    Slab,
    Slabs,
    Staging,
    Stored,
    Taken,
    pieces,
)

logger = init_logger("vllm.manthan.worker")

LOAD_CHUNK = 4096
"""Most blocks of a load begun at once: the GPU handles them while more are prepared."""
ERASE_BYTES = 1 << 20
"""Most bytes that one copy of zeros erases."""
PAUSE_S = 1e-3
"""Seconds that vLLM's engine core sleeps after a step without compute. `_pause` waits no longer."""
TIMED_DECODES = 50
"""Number of decodes, the fastest of which gives a codec's time for a token."""


@dataclass(eq=False)
class Chunk:
    """Part of a job: n blocks that kernels handle together.

    status, nbytes: of each block, int32 and int64 [n], valid once event `checked` is reached. ends: ends of each
    block's parts in bytes, int64 [n, parts], 0 behind the last part. done: event after all work on the chunk. end: for
    a load, index in the job behind the chunk's last block.
    """

    status: torch.Tensor
    nbytes: torch.Tensor
    ends: torch.Tensor
    checked: torch.cuda.Event
    done: torch.cuda.Event
    end: int = 0


@dataclass(eq=False, kw_only=True)
class CudaStoring(Storing):
    """Store in progress.

    age: the engine's number of resets at the store's begin. secondary: final tier of the blocks, if any. planned:
    number of first blocks that have room or are refused. uncopied: number of encodings that still read the pool's
    blocks.
    """

    age: int
    secondary: Tier | None
    planned: int = 0
    uncopied: int = 0


class Encoding(NamedTuple):
    """Blocks of a store encoded together, from the block at `start` on, with room in a tier for each.

    nbytes: most bytes of one block. in_place: True if the kernel writes into the tier, False if into a staging buffer.
    """

    storing: CudaStoring
    start: int
    codec: PagedCodec
    exact: int
    tier: Slab
    places: Places
    in_place: bool
    nbytes: int


@dataclass(eq=False)
class Begun:
    """Running encoding. copied: event after the last read of the pool's blocks."""

    encoding: Encoding
    chunk: Chunk
    copied: torch.cuda.Event
    is_copied: bool = False


class Decoding(NamedTuple):
    """Chunk of a load with checked compressed blocks, ready to decode."""

    codec: PagedCodec
    stream: torch.cuda.Stream
    chunk: Chunk
    batch: Batch
    buffer: torch.Tensor


@dataclass(eq=False)
class CudaLoading:
    """Load in progress. earlier: event after which nothing else uses the pool's blocks that the load fills.

    begun: number of blocks whose check and decoding are queued. decoded: number of chunks known to be decoded.
    answered: True once vLLM has been told, so that the model's stream waits for the decoding; never for prefetches.
    broken: True if the GPU or Manthan has failed. No block is then good. lost: True if a block is in no primary tier.
    """

    job: Transfer
    reading: Reading
    earlier: torch.cuda.Event
    chunks: list[Chunk] = field(default_factory=list)
    begun: int = 0
    decoded: int = 0
    lost: bool = False
    answered: bool = False
    broken: bool = False
    began: float = field(default_factory=time.monotonic)


class CudaEngine(Engine):
    """Engine of a rank with paged codecs on the rank's GPU.

    Args:
        codecs: as in Codecs, by KV cache group.
        tiers: primary tiers.
        forms: counts of exact first tokens in a block for which kernels are warmed up. Further counts work, too.
        secondary: final tier of every block, if any. Pinned RAM then has the most recently used blocks.
        keeps: see Engine. If False, blocks stay on the host only while a load needs them.
    """

    def __init__(
        self,
        codecs: Mapping[int, Sequence[PagedCodec]],
        tiers: Slabs,
        fails_whole: bool = False,
        forms: Sequence[int] = (0,),
        secondary: Tier | None = None,
        keeps: bool = True,
    ) -> None:
        super().__init__(fails_whole, keeps)
        self.tiers, self.store = tiers, secondary
        self._codecs = Codecs(codecs)
        self.codecs = {group: self._codecs.get(group) for group in codecs}
        self._device = next(iter(self.codecs.values())).device
        largest = max(codec.form(codec.layout.tokens).nbytes for codec in self.codecs.values())
        self._stores, self._prefetches = (Staging(max(STAGING_BYTES, largest), self._device) for _ in range(2))
        nbytes = max(RESTORE_STAGING_BYTES, largest)
        self._restores = [Staging(nbytes, self._device, priority=-1) for _ in range(RESTORE_STAGINGS)]
        self._stagings = (self._stores, self._prefetches, *self._restores)
        self._zeros = torch.zeros(ERASE_BYTES, dtype=torch.uint8, device=self._device)
        self._eraser = torch.cuda.Stream(self._device)
        self._erased: torch.cuda.Event = self._eraser.record_event()
        """Event behind the last erasure. Every write to a tier waits for the event."""
        self._waiting: deque[CudaStoring] = deque()
        """Stores without room yet."""
        self._encodings: deque[Begun] = deque()
        self._written: deque[tuple[Encoding, Mapping[int, Stored], Mapping[int, Sequence[int]], Mapping[int, str]]] = (
            deque()
        )
        """Encodings written to the secondary tier, with good blocks, bytes there and causes by index in the job."""
        self._loadings: list[CudaLoading] = []
        self._primary: Primary | None = None
        """Tier on the host; None without a secondary tier."""
        if secondary is not None:
            assert tiers.host is not None
            self._primary = Primary(tiers.host, self._codecs.look_into, self._lock, self._erase, keeps)
        self._earlier = self._model()
        """Event behind the model's work of earlier steps. No later work uses blocks that a load of this step fills."""
        self._age = self._writing = 0
        """Number of resets; number of encodings being copied to the secondary tier."""
        self._demoted: torch.cuda.Event | None = None
        self._may_pause = False
        self._forms = forms
        self.decode_s = self._warm_up(forms)
        self._stores.buffer.zero_()
        threads = int(secondary is not None)
        self._writers = JobThreads(threads, "manthan-write")
        self._readers = [JobThreads(threads, f"manthan-{name}") for name in ("restore", "prefetch")]

    def begin_step(self) -> None:
        self._earlier = self._model()

    def _prepare(self, metadata: ManthanMetadata) -> None:
        for slab in self.tiers.all:
            slab.start()
        self._may_pause = not metadata.tokens
        if metadata.cancels or metadata.place is not None:
            self._stop(self._loadings)
        if metadata.cancels:
            self._give_up(RESET)
        if metadata.revokes:
            self._give_up(NEEDED)
        if metadata.place is not None:
            self._age += 1
            with self._lock:
                self.tiers.clear()
            if self.store is not None:
                self.store = self.store.cleared(metadata.place)
        for drop in metadata.drops:
            tiers: list[Slabs | Tier] = [self.tiers, *([] if self.store is None else [self.store])]
            for tier in tiers:
                with self._lock:
                    if isinstance(drop, BlocksTrimmed):
                        tier.trim(drop.group, drop.block_hashes, drop.level + 1)
                    else:
                        tier.drop(drop.group, drop.block_hashes)
        with suppress(Exception), self._lock:  # a GPU that does not erase reads nothing either
            self._erase()

    def read(self, group: int, keys: Sequence[bytes], tenant: str = "") -> Iterator[Found]:
        """See Engine. Finds only blocks in pinned RAM or in the secondary tier."""
        for key in keys:
            found: Found = self._in_ram((group, key))
            if found is None and self.store is not None:
                found = next(self.store.read(group, [key], tenant))
            yield found

    def _in_ram(self, name: Name) -> Buffer | None:
        """Return a copy of a block in RAM; None if the block is absent, or dropped meanwhile."""
        tier = self.tiers.all[-1]
        with self._lock:
            stored = tier.stored(name)
        buf = None if stored is None else tier.read(stored).copy()
        with self._lock:  # if the block was dropped, the bytes may be those of another block
            return buf if tier.stored(name) == stored else None

    def take_ended(self) -> Ended:
        """Poll the streams. vLLM calls `take_ended` first in every step."""
        self._end_encodings()
        self._end_writes()
        self._begin_stores()
        for loading in self._loadings:
            self._begin_more(loading)
            self._unpin_decoded(loading)
        self._pause()
        self._poll()
        left = []
        for loading in self._loadings:  # ended only after decoding, so that requests read a prefetch's final blocks
            is_told = loading.answered or loading.job.request_id is None
            if is_told and self._is_reached(loading, "done"):
                self._end_load(loading)
            else:
                left.append(loading)
        self._loadings = left
        return super().take_ended()

    def _poll(self) -> None:
        for loading in self._loadings:
            if not loading.answered and loading.job.request_id is not None and self._is_reached(loading, "checked"):
                self._answer_load(loading)

    def wait(self) -> None:
        self._give_up(RESET)
        for loading in self._loadings:
            if loading.begun < len(loading.job):
                self._lose(loading, RESET)
        for stream in (self._eraser, *(staging.stream for staging in self._stagings)):
            stream.synchronize()

    def shutdown(self) -> None:
        self._stop(self._loadings)
        for threads in (*self._readers, self._writers):
            threads.shutdown()
        self.wait()
        for slab in self.tiers.all:
            slab.release()
        if self.store is not None:
            self.store.close()

    def _awaits_threads(self) -> bool:
        news = any(loading.reading.there > loading.begun for loading in self._loadings)
        return not news and any(not loading.reading.is_read for loading in self._loadings)

    def _stop(self, loadings: Sequence[CudaLoading]) -> None:
        """Read no more blocks for these loads."""
        with self._lock:
            for loading in loadings:
                loading.reading.is_stopped = True
            self._lock.notify_all()

    # -- store ----------------------------------------------------------------------------------------

    def _store(self, job: Transfer) -> None:
        self._waiting.append(CudaStoring(job, age=self._age, secondary=self.store))
        self._begin_stores()

    def _begin_stores(self) -> None:
        """Begin stores as far as the tiers have room."""
        while self._waiting:
            storing = self._waiting[0]
            try:
                encodings, demotions = self._planned(storing)
            except Exception as error:
                self._refuse_rest(storing, cause_of(error))
                encodings, demotions = [], []
            try:
                if encodings or demotions:
                    self._make_room(demotions)
            except Exception as error:
                with self._lock:
                    for demotion in demotions:
                        self.tiers.drop(demotion.name[0], [demotion.name[1]])
                for encoding in encodings:
                    self._fail(encoding, error)
                encodings = []
            for encoding in encodings:
                try:
                    self._encode(encoding)
                except Exception as error:  # any error costs these blocks, not the model's thread
                    self._fail(encoding, error)
            if storing.planned < len(storing.job):
                return
            self._waiting.popleft()

    def _refuse_rest(self, storing: CudaStoring, cause: str) -> None:
        rest, storing.planned = range(storing.planned, len(storing.job)), len(storing.job)
        if not storing.uncopied:
            self._gathered(storing.job)
        self._stored(storing, {}, dict.fromkeys(rest, cause))

    def _give_up(self, cause: str) -> None:
        """Refuse all waiting stores, and the rest of a partly begun store."""
        waiting, self._waiting = self._waiting, deque()
        for storing in waiting:
            self._refuse_rest(storing, cause)

    def _planned(self, storing: CudaStoring) -> tuple[list[Encoding], list[Demotion]]:
        """Return encodings with room for a store's next blocks, and demotions to copy before the room is used.

        Blocks without room are refused. With a secondary tier they wait while blocks under way may make room.
        """
        job, encodings, demotions = storing.job, list[Encoding](), list[Demotion]()
        codec, refused, start = self._codecs.get(job.group, job.codec), list[int](), storing.planned
        with self._lock:
            self._erase()
            for exact, some in groupby(job.exacts(codec.layout.tokens)[start:]):
                count, nbytes = len(list(some)), codec.form(exact).nbytes
                if self._primary is not None:
                    self._primary.evict(nbytes, count)
                taken, moved = self.tiers.take(nbytes, count)
                encodings += self._split(storing, start, codec, exact, taken)
                demotions += moved
                if self._primary is not None and len(taken) < count:
                    start += len(taken)
                    break
                refused += range(start + len(taken), start + count)
                start += count
            waits = encodings or self._encodings or self._writing or (self._primary and self._primary.pins)
        storing.planned, storing.uncopied = start, storing.uncopied + len(encodings)
        if start < len(job) and not waits:
            self._refuse_rest(storing, STORE_FULL)
        if refused:
            if not encodings:
                self._gathered(job)
            self._stored(storing, {}, dict.fromkeys(refused, STORE_FULL))
        return encodings, demotions

    def _make_room(self, demotions: Sequence[Demotion]) -> None:
        """Queue demotions, copies from GPU memory to RAM, on the stream of stores, which then waits for the erasure.

        Demotions wait for all streams' work, because earlier work may still read a dropped or demoted block.
        """
        stream = self._stores.stream
        stream.wait_event(self._model())
        for staging in self._stagings:
            stream.wait_stream(staging.stream)
        device, host = self.tiers.device, self.tiers.host
        if demotions and device is not None and host is not None:
            stream.wait_event(self._erased)
            with torch.cuda.stream(stream):
                _, sources, targets, nbytes = zip(*demotions, strict=True)
                _copy(device.buffer, sources, host.buffer, targets, nbytes)
                self._demoted = stream.record_event()
        with self._lock:
            stream.wait_event(self._erase())

    def _erase(self) -> torch.cuda.Event:
        """Overwrite freed bytes on a separate stream. Return the event after the erasure.

        The caller holds the lock. With a secondary tier, loads wait for the event, so that no other work may delay the
        erasure. No stream then uses freed bytes, because blocks in use are pinned.
        """
        for tier in self.tiers.all:
            freed, tier.freed = tier.freed, []
            if not freed:
                continue
            for staging in self._stagings if self._primary is None else ():  # a block may still be read, or in transfer
                self._eraser.wait_stream(staging.stream)
            with torch.cuda.stream(self._eraser):
                self._eraser.query()  # sets this thread's CUDA context, which the driver's copies do not
                zeros = [(Extent(0, ERASE_BYTES),) * -(-size // ERASE_BYTES) for _, size in freed]
                _copy(self._zeros, zeros, tier.buffer, [(extent,) for extent in freed], [size for _, size in freed])
                self._erased = self._eraser.record_event()
        return self._erased

    def _split(
        self, storing: CudaStoring, start: int, codec: PagedCodec, exact: int, taken: Sequence[Taken]
    ) -> Iterator[Encoding]:
        """Yield encodings of blocks for one tier, in parts that fit into the staging buffer unless `in_place`."""
        nbytes = codec.form(exact).nbytes
        for (tier, in_place), some in groupby(taken, attrgetter("tier", "in_place")):
            places = [one.extents for one in some]
            step = len(places) if in_place else len(self._stores.places(nbytes))
            for first in range(0, len(places), step):
                part = places[first : first + step]
                yield Encoding(storing, start, codec, exact, tier, part, in_place, nbytes)
                start += len(part)

    def _encode(self, encoding: Encoding) -> None:
        storing, start, codec, exact, tier, places, in_place, nbytes = encoding
        staging, job = self._stores, storing.job.part(start, start + len(places), codec.layout.tokens)
        buffer, ours = (tier.buffer, places) if in_place else (staging.buffer, staging.places(nbytes)[: len(places)])
        with torch.cuda.stream(staging.stream):
            offsets, firsts = [place[0].start for place in ours], job.first_tokens(codec.layout.tokens)
            told = job.block_hashes, job.block_ids.astype(np.int64), firsts, offsets
            batch = codec.batch(exact, *told, marks=[job.mark] * len(job))
            codec.encode(batch, buffer)
            copied = staging.stream.record_event()
            if not in_place:  # all of the room, because a block's size is not known yet
                _copy(buffer, ours, tier.buffer, places, [nbytes] * len(places))
                buffer[
                    : len(ours) * nbytes
                ].zero_()  # the next block here may be shorter, and all of its room is copied
            self._encodings.append(Begun(encoding, self._chunk(codec, batch, staging.stream), copied))

    def _end_encodings(self) -> None:
        """Report stores that read the pool's blocks no longer, and keep blocks whose encoding has ended."""
        for begun in self._encodings:
            with suppress(Exception):  # the loop below meets and handles the same error
                if not begun.is_copied and begun.copied.query():
                    begun.is_copied = True
                    self._copied(begun.encoding.storing)
        while self._encodings:
            begun = self._encodings[0]
            chunk = begun.chunk
            try:
                if not chunk.done.query():
                    return
                statuses, sizes, ends = chunk.status.tolist(), chunk.nbytes.tolist(), chunk.ends.tolist()
            except Exception as error:
                self._encodings.popleft()
                self._fail(begun.encoding, error, begun.is_copied)
                continue
            self._encodings.popleft()
            if not begun.is_copied:
                self._copied(begun.encoding.storing)
            self._keep(begun.encoding, statuses, sizes, ends)

    def _copied(self, storing: CudaStoring) -> None:
        """Note that one more of a store's encodings reads the pool's blocks no longer."""
        storing.uncopied -= 1
        if not storing.uncopied and storing.planned == len(storing.job):
            self._gathered(storing.job)

    def _keep(
        self, encoding: Encoding, statuses: Sequence[int], sizes: Sequence[int], ends: Sequence[Sequence[int]]
    ) -> None:
        """Enter encoded blocks into their tier. With a secondary tier, have a thread write them there first."""
        storing, tier, number = encoding.storing, encoding.tier, self._codecs.number(encoding.codec)
        tokens, job, good = encoding.codec.layout.tokens, storing.job, dict[int, Stored]()
        failed, made = dict[int, str](), zip(encoding.places, statuses, sizes, ends, strict=True)
        for at, (place, status, nbytes, parts) in enumerate(made, encoding.start):
            if status == GOOD:
                first_token = job.first_token + at * tokens
                inner = tuple(end for end in parts if 0 < end < nbytes)
                good[at] = Stored(place, nbytes, encoding.exact, first_token, job.mark, number, inner)
            else:
                failed[at] = "encode"
        if storing.secondary is not None:
            self._writing += 1
            self._writers.submit(self._write, encoding, good, failed)
            return
        with self._lock:
            self.tiers.put(tier, {(job.group, job.block_hashes[at]): stored for at, stored in good.items()})
            for at in failed:
                tier.free(encoding.places[at - encoding.start])
        self._stored(storing, {at: [*map(room, (*stored.inner, stored.nbytes))] for at, stored in good.items()}, failed)

    def _write(self, encoding: Encoding, good: Mapping[int, Stored], failed: dict[int, str]) -> None:
        """Copy encoded blocks to the secondary tier, on the secondary tier's thread."""
        job, secondary, sizes = encoding.storing.job, encoding.storing.secondary, dict[int, list[int]]()
        try:
            assert secondary is not None
            bufs = {job.block_hashes[at]: encoding.tier.read(stored) for at, stored in good.items()}
            causes = secondary.put_all(job.group, bufs, job.tenant)
            failed |= {at: causes[job.block_hashes[at]] for at in good if job.block_hashes[at] in causes}
            sizes = {at: secondary.rooms(bufs[job.block_hashes[at]]) for at in good if at not in failed}
        except Exception as error:
            failed |= dict.fromkeys(good, cause_of(error))
        with self._lock:
            self._written.append((encoding, good, sizes, failed))

    def _end_writes(self) -> None:
        """Enter blocks written to the secondary tier into the primary tier, and answer their stores."""
        while self._written:
            encoding, good, sizes, failed = self._written.popleft()
            self._writing -= 1
            storing, tier = encoding.storing, encoding.tier
            with self._lock:
                kept = {} if storing.age != self._age else {at: good[at] for at in good if at not in failed}
                job = storing.job
                self.tiers.put(tier, {(job.group, job.block_hashes[at]): stored for at, stored in kept.items()})
                for at, place in enumerate(encoding.places, encoding.start):
                    if at not in kept:
                        tier.free(place)
                self._lock.notify_all()
            self._stored(storing, sizes, failed)

    def _fail(self, encoding: Encoding, error: Exception, is_copied: bool = False) -> None:
        with self._lock:
            for place in encoding.places:
                encoding.tier.free(place)
        if not is_copied:
            self._copied(encoding.storing)
        blocks = range(encoding.start, encoding.start + len(encoding.places))
        self._stored(encoding.storing, {}, dict.fromkeys(blocks, cause_of(error)))

    # -- load -----------------------------------------------------------------------------------------

    def _load(self, job: Transfer) -> None:
        reading, near = Reading(job, job.group, len(job), is_read=True), list[bool]()
        if self._primary is not None:
            reading, near = self._primary.begin(job)
        loading = CudaLoading(job, reading, self._earlier)
        self._loadings.append(loading)  # from here on `take_ended` answers the load
        if reading.is_read:
            self._begin_more(loading)
        elif self._primary is not None:
            self._readers[job.request_id is None].submit(self._primary.read, reading, near, self.store)

    def _begin_more(self, loading: CudaLoading) -> None:
        start, end = loading.begun, loading.reading.there
        if start == end or loading.broken or loading.lost:
            return
        try:
            self._begin_load(loading, start, end)
        except Exception as error:  # vLLM must get an answer, whatever happened
            self._break(loading, error)

    def _begin_load(self, loading: CudaLoading, start: int, end: int) -> None:
        """Queue copy, check and decoding of a load's blocks from `start` to `end`, in chunks.

        Chunks of a request's load use two streams by turns, chunks of a prefetch the stream of prefetches. Blocks read
        in place are all checked before any is decoded, so that vLLM is told sooner.
        """
        later, job = list[Decoding](), loading.job
        stagings = [self._prefetches] if job.request_id is None else self._restores
        block_ids = job.block_ids.astype(np.int64)
        for codec, run in self._runs(loading.reading, start, end, stagings[0]):
            staging, exact, sizes = stagings[len(loading.chunks) % len(stagings)], run.exact, run.nbytes
            some = slice(loading.begun, loading.begun + len(sizes))
            buffer = run.tier.buffer if run.in_place else staging.buffer
            with torch.cuda.stream(staging.stream):
                if self._demoted is not None:
                    staging.stream.wait_event(self._demoted)
                offsets = run.starts
                if not run.in_place:
                    offsets = codec.form(exact).nbytes * np.arange(len(sizes))
                    _copy_run(run, buffer, offsets)
                told = job.block_hashes[some], block_ids[some], run.first_tokens
                batch = codec.batch(exact, *told, offsets, sizes, run.marks)
                codec.verify(batch, buffer)
                chunk = self._chunk(codec, batch, staging.stream, torch.from_numpy(sizes))
            loading.chunks.append(chunk)
            loading.begun = chunk.end = some.stop
            decoding = Decoding(codec, staging.stream, chunk, batch, buffer)
            if run.in_place:
                later.append(decoding)
            else:  # the next chunk but one needs the same staging buffer
                self._decode(decoding, loading.earlier)
        for one in later:
            self._decode(one, loading.earlier)
        if loading.begun < end:
            self._lose(loading, MISSING)

    def _lose(self, loading: CudaLoading, cause: str) -> None:
        """Load no more of a load's blocks."""
        with self._lock:
            loading.reading.failed.setdefault(loading.begun, cause)
        loading.lost = True
        self._stop([loading])

    def _runs(self, reading: Reading, start: int, end: int, staging: Staging) -> Iterator[tuple[PagedCodec, Run]]:
        """Yield a load's blocks up to the first absent block, in runs of one codec, one tier and one exact count."""
        job = reading.job
        while start < end:
            with self._lock:
                run = self.tiers.find(reading.group, job.block_hashes[start : min(end, start + LOAD_CHUNK)])
            if run is None:
                return
            codec, count = self._codecs.numbered(job.group, run.codec), len(run.starts)
            step = count if run.in_place else len(staging.places(codec.form(run.exact).nbytes))
            for first in range(0, count, step):
                yield codec, run.part(first, first + step)
            start += count

    def _decode(self, decoding: Decoding, earlier: torch.cuda.Event) -> None:
        """Decode a chunk's good blocks after event `earlier`."""
        codec, stream, chunk, batch, buffer = decoding
        stream.wait_event(earlier)
        with torch.cuda.stream(stream):
            codec.decode(batch, buffer)
            chunk.done = stream.record_event()

    def _pause(self) -> None:
        """Wait a moment for the checks of blocks in GPU memory if the step has no compute.

        Otherwise vLLM would sleep longer before the next poll.
        """
        if self._may_pause and self._loadings and self.tiers.first is self.tiers.device:
            until = time.monotonic() + PAUSE_S
            while not self._is_reached(self._loadings[-1], "checked") and time.monotonic() < until:
                time.sleep(PAUSE_S / 20)

    def _is_reached(self, loading: CudaLoading, event: Literal["checked", "done"]) -> bool:
        """True if all chunks of a load have begun and reached `event`."""
        reading = loading.reading
        if not reading.is_read or not (loading.broken or loading.lost or loading.begun == reading.there):
            return False
        try:
            return loading.broken or all(getattr(chunk, event).query() for chunk in loading.chunks)
        except Exception as error:
            self._break(loading, error)
            return True

    def _unpin_decoded(self, loading: CudaLoading) -> None:
        """Unpin the blocks of decoded chunks in RAM, so that they may be evicted."""
        try:
            while self._primary is not None and not loading.broken and loading.decoded < len(loading.chunks):
                chunk = loading.chunks[loading.decoded]
                if not chunk.done.query():
                    return
                loading.decoded += 1
                self._primary.unpin(loading.reading, chunk.end)
        except Exception as error:
            self._break(loading, error)

    def _break(self, loading: CudaLoading, error: Exception) -> None:
        logger.warning("Manthan: a session is recomputed: %s: %s", type(error).__name__, error)
        loading.broken = True
        self._stop([loading])
        with suppress(Exception):  # a GPU that does not even wait computes nothing either
            for staging in self._stagings:  # queued work must write to the pool's blocks before their next owners do
                torch.cuda.current_stream(self._device).wait_stream(staging.stream)

    def _answer_load(self, loading: CudaLoading) -> None:
        """Tell vLLM of a load whose blocks are checked. Later compute of the model waits for the decoding."""
        try:
            for chunk in loading.chunks:
                torch.cuda.current_stream(self._device).wait_event(chunk.done)
        except Exception as error:
            self._break(loading, error)
        loading.answered = True
        self._loaded(loading.job, self._good(loading))

    def _good(self, loading: CudaLoading) -> int:
        """Number of good blocks before the first bad block."""
        statuses = [status for chunk in loading.chunks for status in chunk.status.tolist()]
        bad = next((at for at, status in enumerate(statuses) if status != GOOD), len(statuses))
        return 0 if loading.broken else bad

    def _end_load(self, loading: CudaLoading) -> None:
        job, good = loading.job, self._good(loading)
        failed = {} if loading.broken else dict(loading.reading.failed)
        if good < len(job):
            statuses = [status for chunk in loading.chunks for status in chunk.status.tolist()]
            is_unknown = loading.broken or good >= len(statuses)
            failed.setdefault(good, "internal" if is_unknown else status_cause(statuses[good]) or "internal")
        sizes = [nbytes for chunk in loading.chunks for nbytes in chunk.nbytes.tolist()][:good]
        if self._primary is not None:
            self._primary.unpin(loading.reading, loading.reading.there)
        nbytes = np.array([*sizes, *[0] * (len(job) - len(sizes))], np.int64)
        self._answer(TransferResult(job.job_id, nbytes, failed, time.monotonic() - loading.began))

    # -- the rest -------------------------------------------------------------------------------------

    def _model(self) -> torch.cuda.Event:
        """Return an event after the work queued on the model's stream."""
        event: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return event

    def _chunk(
        self, codec: PagedCodec, batch: Batch, stream: torch.cuda.Stream, nbytes: torch.Tensor | None = None
    ) -> Chunk:
        """Return the chunk of a batch that is queued on `stream`. nbytes: bytes of each block, if known."""
        form, status, ends = codec.form(batch.exact), self._soon(batch.status), self._soon(batch.ends)
        if nbytes is None:
            nbytes = self._soon(batch.nbytes) if form.varies else torch.tensor([form.nbytes] * len(status))
        reached = stream.record_event()
        return Chunk(status, nbytes, ends, reached, reached)

    def _soon(self, there: torch.Tensor) -> torch.Tensor:
        """Return a copy in pinned memory, made later by the current stream."""
        here = torch.empty(there.shape, dtype=there.dtype, pin_memory=self._device.type == "cuda")
        return here.copy_(there, non_blocking=True)

    def _warm_up(self, forms: Sequence[int]) -> dict[str, float]:
        """Return the seconds to decode a token, by codec of the main group. forms: counts of exact first tokens.

        Before, encode and decode block 0, vLLM's null block, in each codec and form on each stream. The first jobs then
        find kernels, tables and pinned memory ready.
        """
        by_group = list(self._codecs.by_group.values())
        for codec in chain.from_iterable(by_group):
            exacts = (0,) if codec.format.shape.is_raw else {min(each, codec.layout.tokens) for each in forms}
            for staging, exact in product(self._stagings, exacts):
                self._try(codec, staging, exact)
        return {codec.format.codec: self._try(codec, self._prefetches, 0, 64, TIMED_DECODES) for codec in by_group[0]}

    def add(self, group: int, codec: PagedCodec) -> None:
        """Decode blocks of a codec, too, and encode in transfers that name the codec. Any thread may call `add`."""
        staging = Staging(max(STAGING_BYTES, codec.form(codec.layout.tokens).nbytes), self._device)
        for exact in self._forms:
            self._try(codec, staging, min(exact, codec.layout.tokens))
        assert self.decode_s is not None
        self.decode_s[codec.format.codec] = self._try(codec, staging, 0, 64, TIMED_DECODES)
        self._codecs.add(group, codec)

    def _try(self, codec: PagedCodec, staging: Staging, exact: int, most: int = 1, times: int = 1) -> float:
        """Encode as many copies of block 0 as fit, at most `most`, and decode them `times` times.

        Return the least seconds to decode a token: the model may use the GPU, too.
        """
        with torch.cuda.stream(staging.stream):
            places = staging.places(codec.form(exact).nbytes)[:most]
            none, offsets = [0] * len(places), [place[0].start for place in places]
            made = codec.batch(exact, [b""] * len(none), none, none, offsets)
            codec.encode(made, staging.buffer)
            chunk = self._chunk(codec, made, staging.stream)
            chunk.done.synchronize()
            if bool((chunk.status != GOOD).any()):
                return 0.0
            batch = codec.batch(exact, [b""] * len(none), none, none, offsets, made.nbytes.cpu().numpy())
            codec.verify(batch, staging.buffer)
            least = math.inf
            for _ in range(times):
                staging.stream.synchronize()
                began = time.perf_counter()
                codec.decode(batch, staging.buffer)
                staging.stream.synchronize()
                least = min(least, time.perf_counter() - began)
        return least / (len(none) * codec.layout.tokens)


def _copy_run(run: Run, target: torch.Tensor, offsets: Numbers) -> None:
    """Copy stored blocks, each to an offset of `offsets` in buffer `target`, on the current stream."""
    if run.pieces:
        tos = [(Extent(start, len(target)),) for start in offsets.tolist()]
        _copy(run.tier.buffer, run.extents, target, tos, run.nbytes.tolist())
        return
    froms, tos_there = run.starts + run.tier.buffer.data_ptr(), offsets + target.data_ptr()
    compat.copy_blocks(*map(torch.from_numpy, (froms, tos_there, np.ascontiguousarray(run.nbytes))))


def _copy(source: torch.Tensor, froms: Places, target: torch.Tensor, tos: Places, nbytes: Sequence[int]) -> None:
    """Copy encoded blocks between buffers, by the copy engines, on the current stream."""
    starts, ends, sizes = pieces(froms, tos, nbytes)
    compat.copy_blocks(starts + source.data_ptr(), ends + target.data_ptr(), sizes)
