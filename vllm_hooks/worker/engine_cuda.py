"""Engine on the GPU's cores, on side streams; compressed blocks, not bf16, cross PCIe.

In a step that computes, the model's thread does not wait. Work is queued on side streams: stores behind all the model's
work so far, decoding behind that of earlier steps, so that a load and the step in which it begins go on together. Each
chunk of work ends in an event, and the events are polled in each step. Blocks in GPU memory (the tier "device") are
read and written in place, if in one extent. All other blocks pass through a staging buffer on the device. Room in the
tiers is given and taken in the order in which the streams use the room. If room passes from a stream to another, the
other stream waits for the first. Freed bytes are erased on a separate stream, before anything is written there.

GPU memory and pinned RAM (the tier "host") are primary tiers. Disk, Redis and another rank's tiers are secondary tiers:
threads copy bytes between pinned RAM and a secondary tier, and loads find the copied blocks in pinned RAM.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, product
from operator import attrgetter
from typing import Literal

import numpy as np
import torch
from vllm.logger import init_logger

from manthan.codec.gpu.paged import GOOD, Batch, PagedCodec, status_cause
from manthan.manager.tiers.arena import Extent, room
from manthan.manager.tiers.tier import STORE_FULL, Found, Tier
from manthan.manager.transfer import NEEDED, RESET, Transfer
from manthan.vllm_hooks.messages import ManthanMetadata
from manthan.vllm_hooks.worker.capacity import RESTORE_STAGING_BYTES, RESTORE_STAGINGS, STAGING_BYTES
from manthan.vllm_hooks.worker.engine import MISSING, Ended, Engine, JobThreads, Storing, cause_of
from manthan.vllm_hooks.worker.promotion import Primary, Reading
from manthan.vllm_hooks.worker.slabs import Demotion, Places, Run, Slab, Slabs, Staging, Stored, Taken, copy, copy_run

logger = init_logger("vllm.manthan.worker")

LOAD_CHUNK = 4096  # most blocks of a load begun at once: the GPU handles them while more are prepared
ERASE_BYTES = 1 << 20  # most bytes that one copy of zeros erases
PAUSE_S = 1e-3  # seconds that vLLM's engine core sleeps after a step without compute. `rest` polls no longer
TIMED_DECODES = 50  # number of decodes, the fastest of which gives a codec's time for a token


@dataclass(eq=False)
class Chunk:
    """Part of a job: n blocks that kernels handle together."""

    status: torch.Tensor  # int32 [n], before any decoding. The three tensors are valid once `checked` is reached
    nbytes: torch.Tensor  # of each block, int64 [n]
    ends: torch.Tensor  # see `Batch`
    checked: torch.cuda.Event
    done: torch.cuda.Event  # after all work on the chunk; equal to `checked` until decoding is queued
    end: int = 0  # for a load, index in the job behind the chunk's last block


@dataclass(eq=False, kw_only=True)
class CudaStoring(Storing):
    """Store in progress."""

    age: int  # the engine's number of resets at the store's begin
    secondary: Tier | None  # final tier of the blocks, if any
    planned: int = 0  # number of first blocks that have room or are refused
    uncopied: int = 0  # number of encodings that still read the pool's blocks


@dataclass(eq=False)
class Encoding:
    """Blocks of a store encoded together, from the block at `start` on, with room in a tier for each."""

    storing: CudaStoring
    start: int
    codec: PagedCodec
    exact: int
    tier: Slab
    places: Places
    in_place: bool  # True if the kernel writes into the tier, False if into a staging buffer
    chunk: Chunk = field(init=False)  # this and `copied` are set by `_encode`
    copied: torch.cuda.Event = field(init=False)  # after the last read of the pool's blocks
    is_copied: bool = False  # True once `_copied` was called


@dataclass(eq=False, kw_only=True)
class CudaLoading(Reading):
    """Load in progress."""

    earlier: torch.cuda.Event  # after which nothing else uses the pool's blocks that the load fills
    chunks: list[Chunk] = field(default_factory=list)
    begun: int = 0  # number of blocks whose check and decoding are queued
    decoded: int = 0  # number of chunks known to be decoded
    lost: bool = False  # True if no more blocks will be begun
    answered: bool = False  # True once vLLM was told, and the model's stream waits; never for prefetches
    broken: bool = False  # True if the GPU or Manthan has failed. No block is then good
    began: float = field(default_factory=time.monotonic)


class CudaEngine(Engine):
    """Engine of a rank with paged codecs on the rank's GPU.

    codecs: by KV cache group, the group's configured codec, then further codecs. The first group is the main group,
    whose block hashes make up sessions. tiers: primary tiers. forms: counts of exact first tokens in a block for which
    kernels are warmed up. Further counts work, too. secondary: final tier of every block, if any. Pinned RAM then has
    the most recently used blocks. fails_whole, keeps: see Engine. A rank that does not keep drops blocks after loads.
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
        self.tiers, self.store, self._forms = tiers, secondary, forms
        self.codecs: dict[int, list[PagedCodec]] = {group: [] for group in codecs}  # tiers keep a codec's index
        self._main, firsts = next(iter(codecs)), [some[0] for some in codecs.values()]
        self._device = firsts[0].device
        largest = max(codec.form(codec.layout.tokens).nbytes for codec in firsts)
        self._stores, self._prefetches = (Staging(max(STAGING_BYTES, largest), self._device) for _ in range(2))
        nbytes = max(RESTORE_STAGING_BYTES, largest)
        self._restores = [Staging(nbytes, self._device, priority=-1) for _ in range(RESTORE_STAGINGS)]
        self._stagings = (self._stores, *self._restores, self._prefetches)
        self._zeros = torch.zeros(ERASE_BYTES, dtype=torch.uint8, device=self._device)
        self._eraser = torch.cuda.Stream(self._device)
        self._erased: torch.cuda.Event = self._eraser.record_event()
        """Event behind the last erasure. Every write to a tier waits for the event."""
        self._waiting: deque[CudaStoring] = deque()  # stores without room yet
        self._encodings: deque[Encoding] = deque()
        self._written: deque[Callable[[], None]] = deque()  # calls of `_enter` after writes to the secondary tier
        self._loadings: list[CudaLoading] = []
        self._primary: Primary | None = None  # tier on the host; None without a secondary tier
        if secondary is not None:
            assert tiers.host is not None
            self._primary = Primary(tiers.host, self.codecs, self._lock, self._erase, keeps)
        self._earlier = self._model()
        """Event behind the model's work of earlier steps. No later work uses blocks that a load of this step fills."""
        self._age = self._writing = 0  # number of resets; of encodings being copied to the secondary tier
        self._demoted: torch.cuda.Event | None = None
        for group, some in codecs.items():
            for codec in some:
                self.add(group, codec, self._stagings)
        self._stores.buffer.zero_()
        threads = int(secondary is not None)
        self._writers = JobThreads(threads, "manthan-write")
        self._readers = [JobThreads(threads, f"manthan-{name}") for name in ("restore", "prefetch")]

    def begin_step(self) -> None:
        self._earlier = self._model()

    def _prepare(self, metadata: ManthanMetadata) -> None:
        for slab in self.tiers.all:
            slab.start()
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
        with self._lock:
            self._drop(metadata, self.tiers, *([] if self.store is None else [self.store]))
        with suppress(Exception), self._lock:  # a GPU that does not erase reads nothing either
            self._erase()

    def read(self, group: int, keys: Sequence[bytes], tenant: str = "") -> Iterator[Found]:
        """See Engine. Finds only blocks in pinned RAM or in the secondary tier."""
        tier = self.tiers.all[-1]
        for key in keys:
            with self._lock:
                stored = tier.stored((group, key))
            found: Found = None if stored is None else tier.read(stored).copy()
            with self._lock:  # if the block was dropped, the bytes may be those of another block
                found = found if tier.stored((group, key)) == stored else None
            if found is None and self.store is not None:
                found = next(self.store.read(group, [key], tenant))
            yield found

    def take_ended(self) -> Ended:
        """Poll the streams. Called at the end of every step."""
        self._end_encodings()
        while self._written:
            self._writing -= 1
            self._written.popleft()()
        self._begin_stores()
        for loading in self._loadings:
            self._begin_more(loading)
            self._unpin_decoded(loading)
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
        """See Engine. vLLM hears of bad blocks only with the load's result, because it then computes them anew."""
        for loading in self._loadings:
            if loading.answered or loading.job.request_id is None or not self._is_reached(loading, "checked"):
                continue
            if self._outcome(loading)[0] < len(loading.job) and not self._is_reached(loading, "done"):
                continue
            try:
                for chunk in loading.chunks:  # later compute of the model waits for the decoding
                    torch.cuda.current_stream(self._device).wait_event(chunk.done)
            except Exception as error:
                self._break(loading, error)
            loading.answered = True
            self._loaded(loading.job, self._outcome(loading)[0])

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
        with suppress(Exception):  # a broken GPU must not keep the secondary tier from its end
            self.wait()
        for slab in self.tiers.all:
            slab.release()
        if self.store is not None:
            self.store.close()

    def rest(self) -> None:
        """Wait also, PAUSE_S at most, for checks of blocks in GPU memory: vLLM would sleep longer before it polls."""
        super().rest()
        if self._loadings and self.tiers.first is self.tiers.device:
            until = time.monotonic() + PAUSE_S
            while not self._is_reached(self._loadings[-1], "checked") and time.monotonic() < until:
                time.sleep(PAUSE_S / 20)

    def _awaits_threads(self) -> bool:
        news = any(loading.there > loading.begun for loading in self._loadings)
        return not news and any(not loading.is_read for loading in self._loadings)

    def _stop(self, loadings: Sequence[CudaLoading]) -> None:
        """Have the threads read no more blocks for these loads."""
        with self._lock:
            for loading in loadings:
                loading.is_stopped = True
            self._lock.notify_all()

    # -- store ----------------------------------------------------------------------------------------

    def _store(self, job: Transfer) -> None:
        self._waiting.append(CudaStoring(job, age=self._age, secondary=self.store))
        self._begin_stores()

    def _begin_stores(self) -> None:
        """Begin stores as far as the tiers have room."""
        while self._waiting:
            storing, encodings, demotions = self._waiting[0], list[Encoding](), list[Demotion]()
            try:
                self._plan(storing, encodings, demotions)
                if encodings or demotions:
                    self._make_room(demotions)
            except Exception as error:
                with self._lock:
                    for demotion in demotions:
                        self.tiers.drop(demotion.name[0], [demotion.name[1]])
                for encoding in encodings:
                    self._fail(encoding, error)
                self._refuse_rest(storing, cause_of(error))
                encodings = []
            for encoding in encodings:
                try:
                    self._encode(encoding)
                except Exception as error:  # any error costs these blocks, not the model's thread
                    self._fail(encoding, error)
            if storing.planned < len(storing.job):
                return
            self._waiting.popleft()

    def _plan(self, storing: CudaStoring, encodings: list[Encoding], demotions: list[Demotion]) -> None:
        """Take room for a store's next blocks. Add encodings with room, and demotions to copy before the room is used.

        Blocks without room are refused. With a secondary tier they wait while blocks under way may make room.
        """
        job, refused = storing.job, list[int]()
        codecs = self.codecs[job.group]
        codec = next((codec for codec in codecs if codec.format.codec == job.codec), codecs[0])
        try:
            with self._lock:
                self._erase()
                for exact, some in groupby(job.exacts(codec.layout.tokens)[storing.planned :]):
                    count, nbytes = len(list(some)), codec.form(exact).nbytes
                    if self._primary is not None:
                        self._primary.evict(nbytes, count)
                    taken, moved = self.tiers.take(nbytes, count)
                    demotions += moved
                    encodings += self._split(storing, codec, exact, taken)
                    end, storing.planned = storing.planned + count, storing.planned + len(taken)
                    if self._primary is not None and storing.planned < end:
                        break
                    refused += range(storing.planned, end)
                    storing.planned = end
                waits = encodings or self._encodings or self._writing or (self._primary and self._primary.pins)
        finally:  # an error in a later run leaves no block without an answer
            if refused:
                self._refuse_blocks(storing, refused, STORE_FULL)
        if not waits:
            self._refuse_rest(storing, STORE_FULL)

    def _split(self, storing: CudaStoring, codec: PagedCodec, exact: int, taken: Sequence[Taken]) -> Iterator[Encoding]:
        """Yield encodings of blocks for one tier, in parts that fit into the staging buffer unless `in_place`."""
        start = storing.planned
        for (tier, in_place), some in groupby(taken, attrgetter("tier", "in_place")):
            places = [one.extents for one in some]
            step = len(places) if in_place else self._stores.fits(codec.form(exact).nbytes)
            for first in range(0, len(places), step):
                part = places[first : first + step]
                storing.uncopied += 1
                yield Encoding(storing, start, codec, exact, tier, part, in_place)
                start += len(part)

    def _refuse_rest(self, storing: CudaStoring, cause: str) -> None:
        rest, storing.planned = range(storing.planned, len(storing.job)), len(storing.job)
        if rest:
            self._refuse_blocks(storing, rest, cause)

    def _refuse_blocks(self, storing: CudaStoring, blocks: Sequence[int], cause: str) -> None:
        self._report_gathered(storing)
        self._stored(storing, {}, dict.fromkeys(blocks, cause))

    def _give_up(self, cause: str) -> None:
        """Refuse all waiting stores, and the rest of a partly begun store."""
        waiting, self._waiting = self._waiting, deque()
        for storing in waiting:
            self._refuse_rest(storing, cause)

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
                copy(device.buffer, sources, host.buffer, targets, nbytes)
                self._demoted = stream.record_event()
        with self._lock:
            stream.wait_event(self._erase())

    def _erase(self) -> torch.cuda.Event:
        """Overwrite freed bytes on a separate stream. Return the event after the erasure.

        The caller holds the lock. With a secondary tier, loads wait for the event, so that no other work may delay the
        erasure. Evicted blocks are not in use: those in use are pinned. A reset may erase a load's blocks too early.
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
                copy(self._zeros, zeros, tier.buffer, [(extent,) for extent in freed], [size for _, size in freed])
                self._erased = self._eraser.record_event()
        return self._erased

    def _encode(self, encoding: Encoding) -> None:
        codec, places, staging, tokens = encoding.codec, encoding.places, self._stores, encoding.codec.layout.tokens
        job = encoding.storing.job.part(encoding.start, encoding.start + len(places), tokens)
        nbytes = codec.form(encoding.exact).nbytes
        buffer, ours = encoding.tier.buffer, places
        if not encoding.in_place:
            buffer, ours = staging.buffer, [(Extent(n * nbytes, nbytes),) for n in range(len(places))]
        with torch.cuda.stream(staging.stream):
            offsets, block_ids = [place[0].start for place in ours], job.block_ids.astype(np.int64)
            told = job.block_hashes, block_ids, job.first_tokens(tokens), offsets
            batch = codec.batch(encoding.exact, *told, marks=[job.mark] * len(job))
            codec.encode(batch, buffer)
            encoding.copied = staging.stream.record_event()
            if not encoding.in_place:  # all of the room, because a block's size is not known yet
                copy(buffer, ours, encoding.tier.buffer, places, [nbytes] * len(places))
                buffer[: len(ours) * nbytes].zero_()  # the next block may be shorter, and all of its room is copied
            encoding.chunk = self._chunk(codec, batch, staging.stream)
        self._encodings.append(encoding)

    def _end_encodings(self) -> None:
        """Report stores that read the pool's blocks no longer, and keep blocks whose encoding has ended."""
        for encoding in self._encodings:
            with suppress(Exception):  # the loop below meets and handles the same error
                if not encoding.is_copied and encoding.copied.query():
                    self._copied(encoding)
        while self._encodings:
            encoding = self._encodings[0]
            try:
                if not encoding.chunk.done.query():
                    return
            except Exception as error:
                self._encodings.popleft()
                self._fail(encoding, error)
                continue
            self._encodings.popleft()
            self._copied(encoding)
            self._keep(encoding)

    def _copied(self, encoding: Encoding) -> None:
        """Note that an encoding reads the pool's blocks no longer, unless it is noted."""
        if not encoding.is_copied:
            encoding.is_copied = True
            encoding.storing.uncopied -= 1
            self._report_gathered(encoding.storing)

    def _report_gathered(self, storing: CudaStoring) -> None:
        """Report a store as gathered if all its blocks are copied or refused."""
        if not storing.uncopied and storing.planned == len(storing.job):
            self._gathered(storing.job)

    def _keep(self, encoding: Encoding) -> None:
        """Enter encoded blocks into their tier. With a secondary tier, have a thread write them there first."""
        storing, chunk = encoding.storing, encoding.chunk
        number = self.codecs[storing.job.group].index(encoding.codec)
        good, failed, tokens = dict[int, Stored](), dict[int, str](), encoding.codec.layout.tokens
        made = zip(encoding.places, chunk.status.tolist(), chunk.nbytes.tolist(), chunk.ends.tolist(), strict=True)
        for at, (place, status, nbytes, parts) in enumerate(made, encoding.start):
            if status == GOOD:
                first_token = storing.job.first_token + at * tokens
                inner = tuple(end for end in parts if 0 < end < nbytes)
                good[at] = Stored(place, nbytes, encoding.exact, first_token, storing.job.mark, number, inner)
            else:
                failed[at] = "encode"
        if storing.secondary is None:
            sizes = {at: [*map(room, (*stored.inner, stored.nbytes))] for at, stored in good.items()}
            self._enter(encoding, good, sizes, failed)
        else:
            self._writing += 1
            self._writers.submit(self._write, encoding, storing.secondary, good, failed)

    def _write(self, encoding: Encoding, secondary: Tier, good: Mapping[int, Stored], failed: dict[int, str]) -> None:
        """Copy encoded blocks to the secondary tier. Runs on the engine's thread for writes."""
        sizes: Mapping[int, Sequence[int]] = {}
        try:
            bufs = {at: encoding.tier.read(stored) for at, stored in good.items()}
            sizes, causes = self._put(secondary, encoding.storing.job, bufs)
        except Exception as error:  # any error costs these blocks, not the store's answer
            causes = dict.fromkeys(good, cause_of(error))
        self._written.append(partial(self._enter, encoding, good, sizes, failed | causes))

    def _enter(
        self,
        encoding: Encoding,
        good: Mapping[int, Stored],
        sizes: Mapping[int, Sequence[int]],
        failed: Mapping[int, str],
    ) -> None:
        """Enter good blocks into their tier, free the room of the others, and note the outcome.

        good: by index in the job. sizes, failed: see `_stored`.
        """
        storing, tier, job = encoding.storing, encoding.tier, encoding.storing.job
        with self._lock:
            kept = {} if storing.age != self._age else {at: good[at] for at in good if at not in failed}
            self.tiers.put(tier, {(job.group, job.block_hashes[at]): stored for at, stored in kept.items()})
            for at, place in enumerate(encoding.places, encoding.start):
                if at not in kept:
                    tier.free(place)
            self._lock.notify_all()
        self._stored(storing, sizes, failed)

    def _fail(self, encoding: Encoding, error: Exception) -> None:
        with self._lock:
            for place in encoding.places:
                encoding.tier.free(place)
            self._lock.notify_all()
        self._copied(encoding)
        blocks = range(encoding.start, encoding.start + len(encoding.places))
        self._stored(encoding.storing, {}, dict.fromkeys(blocks, cause_of(error)))

    # -- load -----------------------------------------------------------------------------------------

    def _load(self, job: Transfer) -> None:
        loading, near = CudaLoading(job=job, group=job.group, earlier=self._earlier), list[bool]()
        if self._primary is None:
            loading.there, loading.is_read = len(job), True
        else:
            near = self._primary.begin(loading)
        self._loadings.append(loading)  # from here on `take_ended` answers the load
        if loading.is_read:
            self._begin_more(loading)
        elif self._primary is not None:
            self._readers[job.request_id is None].submit(self._primary.read, loading, near, self.store)

    def _begin_more(self, loading: CudaLoading) -> None:
        start, end = loading.begun, loading.there
        if start == end or loading.broken or loading.lost:
            return
        try:
            self._begin_load(loading, start, end)
        except Exception as error:  # vLLM must get an answer, whatever happened
            self._break(loading, error)

    def _begin_load(self, loading: CudaLoading, start: int, end: int) -> None:
        """Queue copy, check and decoding of a load's blocks from `start` to `end`, in chunks.

        Chunks of a request's load use two streams by turns, chunks of a prefetch the stream of prefetches. Blocks read
        in place are decoded after all checks are queued, so that vLLM is told sooner.
        """
        later, job = list[partial[None]](), loading.job
        stagings = [self._prefetches] if job.request_id is None else self._restores
        block_ids = job.block_ids.astype(np.int64)
        for codec, run in self._runs(loading, start, end, stagings[0]):
            staging, exact, sizes = stagings[len(loading.chunks) % len(stagings)], run.exact, run.nbytes
            some = slice(loading.begun, loading.begun + len(sizes))
            buffer = run.tier.buffer if run.in_place else staging.buffer
            with torch.cuda.stream(staging.stream):
                if self._demoted is not None:
                    staging.stream.wait_event(self._demoted)
                offsets = run.starts
                if not run.in_place:
                    offsets = codec.form(exact).nbytes * np.arange(len(sizes))
                    copy_run(run, buffer, offsets)
                told = job.block_hashes[some], block_ids[some], run.first_tokens
                batch = codec.batch(exact, *told, offsets, sizes, run.marks)
                codec.verify(batch, buffer)
                chunk = self._chunk(codec, batch, staging.stream, torch.from_numpy(sizes))
            loading.chunks.append(chunk)
            loading.begun = chunk.end = some.stop
            decode = partial(self._decode, codec, staging.stream, chunk, batch, buffer, loading.earlier)
            if run.in_place:
                later.append(decode)
            else:  # the next chunk but one needs the same staging buffer
                decode()
        for decode in later:
            decode()
        if loading.begun < end:
            self._lose(loading, MISSING)

    def _lose(self, loading: CudaLoading, cause: str) -> None:
        """Load no more of a load's blocks."""
        with self._lock:
            loading.failed.setdefault(loading.begun, cause)
        loading.lost = True
        self._stop([loading])

    def _runs(self, loading: CudaLoading, start: int, end: int, staging: Staging) -> Iterator[tuple[PagedCodec, Run]]:
        """Yield a load's blocks up to the first absent block, in runs (see `Slab.run`) that fit into `staging`."""
        job = loading.job
        while start < end:
            with self._lock:
                run = self.tiers.find(loading.group, job.block_hashes[start : min(end, start + LOAD_CHUNK)])
            if run is None:
                return
            codec, count = self.codecs[job.group][run.codec], len(run.starts)
            step = count if run.in_place else staging.fits(codec.form(run.exact).nbytes)
            for first in range(0, count, step):
                yield codec, run.part(first, first + step)
            start += count

    def _decode(
        self,
        codec: PagedCodec,
        stream: torch.cuda.Stream,
        chunk: Chunk,
        batch: Batch,
        buffer: torch.Tensor,
        earlier: torch.cuda.Event,
    ) -> None:
        """Decode a chunk's good blocks after event `earlier`."""
        stream.wait_event(earlier)
        with torch.cuda.stream(stream):
            codec.decode(batch, buffer)
            chunk.done = stream.record_event()

    def _is_reached(self, loading: CudaLoading, event: Literal["checked", "done"]) -> bool:
        """True if no more chunks will begin, and all have reached `event`; or if the load is broken."""
        if not loading.is_read or not (loading.broken or loading.lost or loading.begun == loading.there):
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
                self._primary.unpin(loading, chunk.end)
        except Exception as error:
            self._break(loading, error)

    def _break(self, loading: CudaLoading, error: Exception) -> None:
        logger.warning("Manthan: a session is recomputed: %s: %s", type(error).__name__, error)
        loading.broken = True
        self._stop([loading])
        with suppress(Exception):  # a GPU that does not even wait computes nothing either
            for staging in self._stagings:  # queued work must write to the pool's blocks before their next owners do
                torch.cuda.current_stream(self._device).wait_stream(staging.stream)

    def _outcome(self, loading: CudaLoading) -> tuple[int, str]:
        """Return the number of first blocks whose checks are good, and the next block's cause ("internal" if none)."""
        statuses = [] if loading.broken else [status for chunk in loading.chunks for status in chunk.status.tolist()]
        good = next((at for at, status in enumerate(statuses) if status != GOOD), len(statuses))
        return good, (status_cause(statuses[good]) if good < len(statuses) else None) or "internal"

    def _end_load(self, loading: CudaLoading) -> None:
        good, cause = self._outcome(loading)
        failed = {} if loading.broken else dict(loading.failed)
        if good < len(loading.job):
            failed.setdefault(good, cause)
        sizes = [nbytes for chunk in loading.chunks for nbytes in chunk.nbytes.tolist()][:good]
        if self._primary is not None:
            self._primary.unpin(loading, loading.there)
        self._answer_load(loading.job, sizes, failed, loading.began)

    # -- the rest -------------------------------------------------------------------------------------

    def _model(self) -> torch.cuda.Event:
        """Return an event after the work queued on the model's stream."""
        event: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return event

    def _chunk(
        self, codec: PagedCodec, batch: Batch, stream: torch.cuda.Stream, nbytes: torch.Tensor | None = None
    ) -> Chunk:
        """Return the chunk of a batch whose encoding or check is queued on `stream`. nbytes: of blocks, if known."""
        form, status, ends = codec.form(batch.exact), self._soon(batch.status), self._soon(batch.ends)
        if nbytes is None:
            nbytes = self._soon(batch.nbytes) if form.varies else torch.tensor([form.nbytes] * len(status))
        reached = stream.record_event()
        return Chunk(status, nbytes, ends, reached, reached)

    def _soon(self, there: torch.Tensor) -> torch.Tensor:
        """Return a copy in pinned memory, made later by the current stream."""
        here = torch.empty(there.shape, dtype=there.dtype, pin_memory=self._device.type == "cuda")
        return here.copy_(there, non_blocking=True)

    def add(self, group: int, codec: PagedCodec, stagings: Sequence[Staging] = ()) -> None:
        """Decode blocks of a codec, too, and encode in transfers that name the codec. Any thread may call `add`.

        Before, encode and decode block 0, vLLM's null block, in each of `forms`, so that the first jobs find kernels,
        tables and pinned memory ready. stagings: buffers and streams for that; a new one if empty.
        """
        tokens = codec.layout.tokens
        stagings = stagings or [Staging(max(STAGING_BYTES, codec.form(tokens).nbytes), self._device)]
        exacts = {0} if codec.format.shape.is_raw else {min(each, tokens) for each in self._forms}
        for staging, exact in product(stagings, exacts):
            self._try(codec, staging, exact)
        if group == self._main:
            self.decode_s[codec.format.codec] = self._try(codec, stagings[-1], 0, 64, TIMED_DECODES)
        self.codecs[group].append(codec)

    def _try(self, codec: PagedCodec, staging: Staging, exact: int, most: int = 1, times: int = 1) -> float:
        """Encode as many copies of block 0 as fit, at most `most`, and decode them `times` times.

        Return a token's seconds in the fastest decode, because the model may use the GPU too; 0 if encoding fails.
        """
        with torch.cuda.stream(staging.stream):
            nbytes = codec.form(exact).nbytes
            none = [0] * min(most, staging.fits(nbytes))
            offsets = [n * nbytes for n in range(len(none))]
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
