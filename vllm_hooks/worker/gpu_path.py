"""Encoding and decoding on the GPU, on streams beside the model's; codes, not bf16, cross PCIe.

No thread, and no wait: work is queued on side streams behind what the model's stream was given before, each chunk of it
ends in an event, and the events are polled once a step. Blocks are worked on where they lie in the tier on the device;
all others, by way of a staging buffer on the device. Room in the tiers is given and taken on the caller's thread, in
the order in which the streams use it; where it changes hands between streams, one waits for the other.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby, product
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
from vllm.logger import init_logger

from manthan.codec.gpu.paged import GOOD, Batch, PagedCodec, status_cause
from manthan.manager.tiers.arena import Extent, room
from manthan.manager.work import FailedBlock, GroupBlocks, Load, LoadResult, SpillBlock, SpillResult
from manthan.vllm_hooks import compat
from manthan.vllm_hooks.messages import ManthanMetadata
from manthan.vllm_hooks.worker.capacity import RESTORE_STAGING_BYTES, RESTORE_STAGINGS, STAGING_BYTES
from manthan.vllm_hooks.worker.path import WorkerPath
from manthan.vllm_hooks.worker.staging import Places, Staging, pieces
from manthan.vllm_hooks.worker.tiers import Demotion, Numbers, Run, Stored, Taken, Tier, Tiers

logger = init_logger("vllm.manthan.worker")

LOAD_CHUNK = 4096
"""Blocks of a restore that are begun at once, at most: the GPU works on them while more are prepared."""
PAUSE_S = 1e-3
"""What vLLM's engine core sleeps after a step in which the model computes nothing."""


class Lane:
    """A stream and its staging buffer; jobs on the same one follow each other."""

    def __init__(self, nbytes: int, device: torch.device, priority: int = 0) -> None:
        self.staging = Staging(nbytes, device)
        self.stream = torch.cuda.Stream(device, priority=priority)


@dataclass
class Chunk:
    """A part of a job. status, nbytes: of each block, int32 and int64 [n], valid once `checked` is reached. done: all
    work on it has ended."""

    status: torch.Tensor
    nbytes: torch.Tensor
    checked: torch.cuda.Event
    done: torch.cuda.Event


class Encoding(NamedTuple):
    """Blocks that are encoded together, and the room in a tier for the codes of each: nbytes, the most that they take.
    in_place: they are made there."""

    codec: PagedCodec
    spills: Sequence[SpillBlock]
    tier: Tier
    places: Places
    in_place: bool
    nbytes: int


class Decoding(NamedTuple):
    """A chunk of a load whose codes are checked, and are to be decoded."""

    codec: PagedCodec
    stream: torch.cuda.Stream
    chunk: Chunk
    batch: Batch
    codes: torch.Tensor


class Spill(NamedTuple):
    """copied: when the pool's blocks are not read any more."""

    encoding: Encoding
    chunk: Chunk
    began: float
    copied: torch.cuda.Event


@dataclass
class Restore:
    """A load that is being carried out. answered: vLLM has been told, and the model's stream waits for the rest. Nobody
    is told of a prefetch so soon. broken: the GPU or we have failed, and nothing of it is good."""

    load: Load
    chunks: list[Chunk] = field(default_factory=list)
    answered: bool = False
    broken: bool = False
    began: float = field(default_factory=time.monotonic)


class GpuPath(WorkerPath):
    """One rank's blocks to codes and back by paged codecs on its GPU.

    codecs: by KV cache group, that of the chains' blocks first; all on one device. forms: how many first tokens of a
    block may have to be kept exact; it can do others, but has not prepared for them. make: a group's codec by its name,
    should blocks be ordered in another one, and names: those that may be.
    """

    def __init__(
        self,
        codecs: Mapping[int, PagedCodec],
        tiers: Tiers,
        fails_whole: bool = False,
        forms: Sequence[int] = (0,),
        make: Callable[[int, str], PagedCodec] | None = None,
        names: Sequence[str] = (),
    ) -> None:
        super().__init__(fails_whole)
        self.codecs, self.tiers, self._make = dict(codecs), tiers, make
        self._chain = next(iter(self.codecs))
        self._device = self.codecs[self._chain].device
        least = max(codec.form(codec.layout.tokens).nbytes for codec in self.codecs.values())
        self._spill_lane, self._prefetch_lane = (Lane(max(STAGING_BYTES, least), self._device) for _ in range(2))
        nbytes = max(RESTORE_STAGING_BYTES, least)
        self._load_lanes = [Lane(nbytes, self._device, priority=-1) for _ in range(RESTORE_STAGINGS)]
        self._lanes = (self._spill_lane, self._prefetch_lane, *self._load_lanes)
        self._spills: deque[Spill] = deque()
        self._uncopied: deque[Spill] = deque()
        self._restores: deque[Restore] = deque()
        self._prefetches: deque[Restore] = deque()
        self._demoted: torch.cuda.Event | None = None
        self._may_pause = False
        self._others: dict[tuple[int, str], PagedCodec] = {}
        self._names: list[str] = []
        self.decode_s = self._warm_up(forms, names)

    def submit_loads(self, metadata: ManthanMetadata) -> None:
        self.begun = []
        self.tiers.start()
        self._may_pause = metadata.model_rests
        if metadata.place is not None:
            self.tiers.clear()
        for group, keys in metadata.drops:
            self.tiers.drop(group, keys)
        for load in metadata.loads:
            restore = Restore(load)  # from here on it is answered once, by those who poll
            (self._prefetches if load.is_prefetch else self._restores).append(restore)
            self.begun.append(load)
            try:
                self._begin_load(restore)
            except Exception as error:  # vLLM must get an answer, whatever happened
                self._break(restore, error)

    def submit_spills(self, metadata: ManthanMetadata) -> None:
        """Find room for blocks, and encode those that got some."""
        try:
            for group, name in {(spill.group, spill.codec) for spill in metadata.spills}:
                self._codec(group, name)
        except Exception as error:
            logger.warning("Manthan: blocks are not kept cold: %s: %s", type(error).__name__, error)
            self._copied(metadata.spills)
            self._spilled([SpillResult(spill.key, spill.group, "internal", 0.0) for spill in metadata.spills])
            self.begun += metadata.spills
            return
        encodings: list[Encoding] = []
        demotions: list[Demotion] = []
        for (group, name, exact), spills in _by_form(metadata.spills).items():
            codec = self._codec(group, name)
            taken, moved = self.tiers.take(codec.form(exact).nbytes, len(spills))
            encodings += self._encodings(codec, exact, spills, taken)
            demotions += moved
            refused = spills[len(taken) :]
            self._copied(refused)
            self._spilled([SpillResult(spill.key, spill.group, "store_full", 0.0) for spill in refused])
            self.begun += spills
        if not (encodings or demotions):
            return
        try:
            self._make_room(demotions)
        except Exception as error:
            for demotion in demotions:
                self.tiers.drop(demotion.name[0], [demotion.name[1]])
            for encoding in encodings:
                self._copied(encoding.spills)
                self._fail(encoding, error)
            return
        for encoding in encodings:
            try:
                self._encode(encoding)
            except Exception as error:  # whatever it is costs these blocks, not the model's thread
                self._copied(encoding.spills)
                self._fail(encoding, error)

    def take_finished_loads(self) -> set[str]:
        """Polls; vLLM asks for this first in every step."""
        self._end_spills()
        self._pause()
        for restore in self._restores:
            if not restore.answered and self._is_checked(restore):
                self._answer(restore)
        while self._restores and self._restores[0].answered and self._is_done(self._restores[0]):
            self._end_restore(self._restores.popleft())
        while self._prefetches and self._is_done(self._prefetches[0]):  # decoded: whoever reads it now comes after
            self._end_restore(self._prefetches.popleft())
        return super().take_finished_loads()

    def wait(self) -> None:
        for lane in self._lanes:
            lane.stream.synchronize()

    def shutdown(self) -> None:
        self.wait()
        self.tiers.release()

    # -- evict ----------------------------------------------------------------------------------------

    def _codec(self, group: int, name: str) -> PagedCodec:
        """A group's codec of this name, or the configured one; bytes as they are have no other."""
        codec = self.codecs[group]
        if name in ("", codec.format.codec) or codec.format.shape.is_raw:
            return codec
        if (group, name) not in self._others:
            assert self._make is not None
            self._others[group, name] = self._make(group, name)
        return self._others[group, name]

    def _number(self, codec: PagedCodec) -> int:
        """The number by which a tier knows a codec."""
        name = codec.format.codec
        if name not in self._names:
            self._names.append(name)
        return self._names.index(name)

    def _make_room(self, demotions: Sequence[Demotion]) -> None:
        """Behind what the model and the other lanes were given: a block that was dropped or demoted may still be
        read."""
        stream = self._spill_lane.stream
        stream.wait_event(self._model())
        for lane in self._lanes:
            stream.wait_stream(lane.stream)
        device, host = self.tiers.device, self.tiers.host
        if not demotions or device is None or host is None:
            return
        with torch.cuda.stream(stream):
            _, sources, targets, nbytes = zip(*demotions, strict=True)
            _copy(device.codes, sources, host.codes, targets, nbytes)
            self._demoted = stream.record_event()

    def _encodings(
        self, codec: PagedCodec, exact: int, spills: Sequence[SpillBlock], taken: Sequence[Taken]
    ) -> Iterator[Encoding]:
        """Blocks that go the same way, as many as fit into the staging buffer if they go through it."""
        nbytes, start = codec.form(exact).nbytes, 0
        for (tier, in_place), some in groupby(taken, attrgetter("tier", "in_place")):
            places = [one.extents for one in some]
            step = len(places) if in_place else len(self._spill_lane.staging.places(nbytes))
            for first in range(0, len(places), step):
                part = places[first : first + step]
                yield Encoding(codec, spills[start : start + len(part)], tier, part, in_place, nbytes)
                start += len(part)

    def _encode(self, encoding: Encoding) -> None:
        codec, spills, tier, places, in_place, nbytes = encoding
        began, lane = time.monotonic(), self._spill_lane
        codes, ours = (
            (tier.codes, places) if in_place else (lane.staging.codes, lane.staging.places(nbytes)[: len(places)])
        )
        exact = spills[0].exact
        keys, block_ids, first_tokens = zip(*((s.key, s.block_id, s.first_token) for s in spills), strict=True)
        with torch.cuda.stream(lane.stream):
            offsets, marks = [place[0].start for place in ours], [spill.mark for spill in spills]
            batch = codec.batch(exact, keys, block_ids, first_tokens, offsets, marks=marks)
            codec.encode(batch, codes)
            copied = lane.stream.record_event()
            if not in_place:  # how much of its room a block takes is not known yet
                _copy(codes, ours, tier.codes, places, [nbytes] * len(places))
            spill = Spill(encoding, self._chunk(codec, batch, lane.stream), began, copied)
            self._spills.append(spill)
            self._uncopied.append(spill)

    def _end_spills(self) -> None:
        """Report those whose blocks the pool may have back, and those whose codes are there."""
        with suppress(Exception):  # it is met again below
            while self._uncopied and self._uncopied[0].copied.query():
                self._copied(self._uncopied.popleft().encoding.spills)
        while self._spills:
            encoding, chunk, began, _ = self._spills[0]
            try:
                if not chunk.done.query():
                    return
                statuses, sizes = chunk.status.tolist(), chunk.nbytes.tolist()
            except Exception as error:
                self._leave()
                self._fail(encoding, error)
                continue
            self._leave()
            self._put(encoding, statuses, sizes, (time.monotonic() - began) / len(statuses))

    def _leave(self) -> None:
        """The first is answered for: its blocks are copied, if nobody could say so before."""
        ended = self._spills.popleft()
        if self._uncopied and self._uncopied[0] is ended:
            self._copied(self._uncopied.popleft().encoding.spills)

    def _put(self, encoding: Encoding, statuses: Sequence[int], sizes: Sequence[int], seconds: float) -> None:
        """What was encoded is in its tier now."""
        number = self._number(encoding.codec)
        tier, blocks = encoding.tier, list(zip(encoding.spills, encoding.places, statuses, sizes, strict=True))
        stored = {
            (spill.group, spill.key): Stored(place, nbytes, spill.exact, spill.first_token, spill.mark, number)
            for spill, place, status, nbytes in blocks
            if status == GOOD
        }
        self.tiers.put(tier, stored)
        for _, place, status, _ in blocks:
            if status != GOOD:
                tier.arena.free(place)
        self._spilled(
            [
                SpillResult(spill.key, spill.group, None, seconds, room(nbytes))
                if status == GOOD
                else SpillResult(spill.key, spill.group, "encode", seconds)
                for spill, _, status, nbytes in blocks
            ]
        )

    def _fail(self, encoding: Encoding, error: Exception) -> None:
        logger.warning("Manthan: blocks are not kept cold: %s: %s", type(error).__name__, error)
        for place in encoding.places:
            encoding.tier.arena.free(place)
        self._spilled([SpillResult(spill.key, spill.group, "internal", 0.0) for spill in encoding.spills])

    # -- restore --------------------------------------------------------------------------------------

    def _begin_load(self, restore: Restore) -> None:
        """Copy codes in, check and decode them, a chunk at a time, on two lanes by turns; prefetches have their own.

        Codes on the device are all checked before any is decoded: vLLM can be told sooner.
        """
        model, later = self._model(), list[Decoding]()
        for part in restore.load.parts:
            if not self._begin_part(restore, part, model, later):
                break  # what follows is of no use
        for one in later:
            self._decode(one, model)

    def _begin_part(self, restore: Restore, part: GroupBlocks, model: torch.cuda.Event, later: list[Decoding]) -> bool:
        """The same of a group's blocks; whether all of them are there. later: gets what is not to be decoded yet."""
        lanes = [self._prefetch_lane] if restore.load.is_prefetch else self._load_lanes
        done = 0
        block_ids = np.asarray(part.block_ids, np.int64)
        for codec, run in self._runs(part, lanes[0]):
            lane, exact, sizes = lanes[len(restore.chunks) % len(lanes)], run.exact, run.nbytes
            some = slice(done, done := done + len(sizes))
            codes = run.tier.codes if run.in_place else lane.staging.codes
            with torch.cuda.stream(lane.stream):
                if self._demoted is not None:
                    lane.stream.wait_event(self._demoted)
                offsets = run.starts
                if not run.in_place:
                    offsets = lane.staging.starts(codec.form(exact).nbytes)[: len(sizes)]
                    _copy_run(run, codes, offsets)
                told = part.keys[some], block_ids[some], run.first_tokens
                batch = codec.batch(exact, *told, offsets, sizes, run.marks)
                codec.verify(batch, codes)
                chunk = self._chunk(codec, batch, lane.stream, torch.from_numpy(sizes))
            restore.chunks.append(chunk)
            decoding = Decoding(codec, lane.stream, chunk, batch, codes)
            if run.in_place:
                later.append(decoding)
            else:  # the staging buffer is needed for the next but one
                self._decode(decoding, model)
        return done == len(part.keys)

    def _runs(self, part: GroupBlocks, lane: Lane) -> Iterator[tuple[PagedCodec, Run]]:
        """A group's blocks of a load up to the first that is in no tier, in runs that can be worked on together."""
        group, keys, _ = part
        done = 0
        while done < len(keys) and (run := self.tiers.find(group, keys[done : done + LOAD_CHUNK])):
            codec, count = self._codec(group, self._names[run.codec]), len(run.starts)
            step = count if run.in_place else len(_places(codec, lane, run.exact))
            for start in range(0, count, step):
                yield codec, run.part(start, start + step)
            done += count

    def _decode(self, decoding: Decoding, model: torch.cuda.Event) -> None:
        """Decode what is good of a chunk, once the model is done with the blocks."""
        codec, stream, chunk, batch, codes = decoding
        stream.wait_event(model)
        with torch.cuda.stream(stream):
            codec.decode(batch, codes)
            chunk.done = stream.record_event()

    def _pause(self) -> None:
        """Where the model has nothing to compute, give codes on the device a moment to be checked: vLLM would sleep for
        longer before it asks again."""
        if self._may_pause and self._restores and self.tiers.first is self.tiers.device:
            until = time.monotonic() + PAUSE_S
            while not self._is_checked(self._restores[-1]) and time.monotonic() < until:
                time.sleep(PAUSE_S / 20)

    def _is_checked(self, restore: Restore) -> bool:
        return self._is_reached(restore, lambda chunk: chunk.checked)

    def _is_done(self, restore: Restore) -> bool:
        return self._is_reached(restore, lambda chunk: chunk.done)

    def _is_reached(self, restore: Restore, event: Callable[[Chunk], torch.cuda.Event]) -> bool:
        if not restore.broken:
            try:
                return all(event(chunk).query() for chunk in restore.chunks)
            except Exception as error:
                self._break(restore, error)
        return True

    def _break(self, restore: Restore, error: Exception) -> None:
        logger.warning("Manthan: a session is recomputed: %s: %s", type(error).__name__, error)
        restore.broken = True
        with suppress(Exception):  # a GPU that does not even wait computes nothing either
            for lane in self._lanes:  # what was begun writes to the blocks before whoever has them next
                torch.cuda.current_stream(self._device).wait_stream(lane.stream)

    def _answer(self, restore: Restore) -> None:
        """Tell vLLM that the load is finished; what the model computes from now on comes after its decoding."""
        try:
            for chunk in restore.chunks:
                torch.cuda.current_stream(self._device).wait_event(chunk.done)
        except Exception as error:
            self._break(restore, error)
        restore.answered = True
        self._finished(restore.load, self._good(restore))

    def _good(self, restore: Restore) -> int:
        """How many blocks are good before the first that is not."""
        good = 0
        for chunk in [] if restore.broken else restore.chunks:
            bad = (chunk.status != GOOD).nonzero()
            if len(bad):
                return good + int(bad[0])
            good += len(chunk.status)
        return good

    def _end_restore(self, ended: Restore) -> None:
        load, good = ended.load, self._good(ended)
        failed = []
        if good < sum(len(part.keys) for part in load.parts):
            blocks = [(part.group, key) for part in load.parts for key in part.keys]
            failed.append(FailedBlock(*blocks[good], self._cause(ended, good)))
        nbytes, left = 0, good
        for chunk in ended.chunks:
            nbytes += int(chunk.nbytes[:left].sum())
            left -= min(left, len(chunk.status))
        seconds = time.monotonic() - ended.began
        self._loaded(LoadResult(load.request_id, failed, nbytes, seconds, load.is_prefetch))

    def _cause(self, ended: Restore, at: int) -> str:
        """Of the failure of a restore's block number `at`."""
        if ended.broken:
            return "internal"
        statuses = [status for chunk in ended.chunks for status in chunk.status.tolist()]
        return status_cause(statuses[at]) or "internal" if at < len(statuses) else "missing"

    # -- the rest -------------------------------------------------------------------------------------

    def _model(self) -> torch.cuda.Event:
        """What the model's stream has been given up to now."""
        event: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return event

    def _chunk(
        self, codec: PagedCodec, batch: Batch, stream: torch.cuda.Stream, nbytes: torch.Tensor | None = None
    ) -> Chunk:
        """nbytes: where it is known."""
        form, status = codec.form(batch.exact), self._soon(batch.status)
        if nbytes is None:
            nbytes = self._soon(batch.nbytes) if form.varies else torch.tensor([form.nbytes] * len(status))
        reached = stream.record_event()
        return Chunk(status, nbytes, reached, reached)

    def _soon(self, there: torch.Tensor) -> torch.Tensor:
        """A copy in pinned memory, made on the current stream."""
        here = torch.empty(there.shape, dtype=there.dtype, pin_memory=self._device.type == "cuda")
        return here.copy_(there, non_blocking=True)

    def _warm_up(self, forms: Sequence[int], names: Sequence[str]) -> dict[str, float]:
        """Do what first jobs would otherwise pay for: load kernels and tables, allocate pinned memory.

        Block 0 is encoded and decoded, which the pool does not use, in each codec and form on each stream.

        Returns:
            Seconds to decode a token, by codec.
        """
        for group in self.codecs:
            for codec in {self._codec(group, name) for name in ("", *names)}:
                exacts = (0,) if codec.format.shape.is_raw else {min(each, codec.layout.tokens) for each in forms}
                for lane, exact in product(self._lanes, exacts):
                    self._try(codec, lane, exact)
        chain, lane = self._chain, self._prefetch_lane
        return {name: self._try(self._codec(chain, name), lane, 0, 64) for name in names}

    def _try(self, codec: PagedCodec, lane: Lane, exact: int, most: int = 1) -> float:
        """Encode and decode block 0, so many times as fit; seconds to decode a token."""
        with torch.cuda.stream(lane.stream):
            places = _places(codec, lane, exact)[:most]
            none, offsets = [0] * len(places), [place[0].start for place in places]
            made = codec.batch(exact, [b""] * len(none), none, none, offsets)
            codec.encode(made, lane.staging.codes)
            chunk = self._chunk(codec, made, lane.stream)
            chunk.done.synchronize()
            if bool((chunk.status != GOOD).any()):
                return 0.0
            batch = codec.batch(exact, [b""] * len(none), none, none, offsets, made.nbytes.cpu().numpy())
            codec.verify(batch, lane.staging.codes)
            lane.stream.synchronize()
            began = time.perf_counter()
            codec.decode(batch, lane.staging.codes)
            lane.stream.synchronize()
        return (time.perf_counter() - began) / (len(none) * codec.layout.tokens)


def _places(codec: PagedCodec, lane: Lane, exact: int) -> Places:
    """For as many blocks with so many exact tokens as fit into the staging buffer."""
    return lane.staging.places(codec.form(exact).nbytes)


def _by_form(spills: Sequence[SpillBlock]) -> dict[tuple[int, str, int], list[SpillBlock]]:
    """By KV cache group, codec, and how many first tokens are kept exact."""
    found: dict[tuple[int, str, int], list[SpillBlock]] = {}
    for spill in spills:
        found.setdefault((spill.group, spill.codec, spill.exact), []).append(spill)
    return found


def _copy_run(run: Run, target: torch.Tensor, offsets: Numbers) -> None:
    """Copy stored blocks one behind the other, each to its offset in another buffer."""
    if run.pieces:
        tos = [(Extent(start, len(target)),) for start in offsets.tolist()]
        _copy(run.tier.codes, run.extents, target, tos, run.nbytes.tolist())
        return
    froms, tos_there = run.starts + run.tier.codes.data_ptr(), offsets + target.data_ptr()
    compat.copy_blocks(*map(torch.from_numpy, (froms, tos_there, np.ascontiguousarray(run.nbytes))))


def _copy(source: torch.Tensor, froms: Places, target: torch.Tensor, tos: Places, nbytes: Sequence[int]) -> None:
    """Copy encoded blocks from one buffer to another, by the copy engines, on the current stream."""
    starts, ends, sizes = pieces(froms, tos, nbytes)
    compat.copy_blocks(starts + source.data_ptr(), ends + target.data_ptr(), sizes)
