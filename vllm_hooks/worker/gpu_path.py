"""Encoding and decoding on the GPU, on streams beside the model's; codes, not bf16, cross PCIe.

No thread, and no wait: work is queued on side streams behind what the model's stream was given before, each chunk of it
ends in an event, and the events are polled once a step. The codes of a chunk fit a staging buffer on the device; a tier
on the device needs no staging. Slots in the tiers are given and taken on the caller's thread, in
the order in which the streams use them; where a slot changes hands between streams, one waits for the other.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from vllm import _custom_ops as ops
from vllm.logger import init_logger

from manthan.codec import wire
from manthan.codec.gpu.paged import GOOD, PagedCodec, status_cause
from manthan.vllm_hooks.messages import Load, LoadResult, ManthanMetadata, SpillBlock, SpillResult
from manthan.vllm_hooks.worker.capacity import STAGING_BYTES, STAGINGS
from manthan.vllm_hooks.worker.path import WorkerPath
from manthan.vllm_hooks.worker.tiers import Demotion, Taken, Tier, Tiers

logger = init_logger("vllm.manthan.worker")

LOAD_CHUNK = 1024
"""Blocks of a restore that are begun at once, at most: the GPU works on them while more are prepared."""
PAUSE_S = 1e-3
"""What vLLM's engine core sleeps after a step in which the model computes nothing."""


class Staging:
    """A stream and a buffer on the device; jobs on the same one follow each other."""

    def __init__(self, nbytes: int, device: torch.device, priority: int = 0) -> None:
        self.codes = torch.empty(max(1, STAGING_BYTES // nbytes), nbytes, dtype=torch.uint8, device=device)
        self.stream = torch.cuda.Stream(device, priority=priority)
        self.addresses = torch.arange(len(self.codes)) * nbytes + self.codes.data_ptr()


class Batch(NamedTuple):
    """Arguments of the paged codec on the device, for n blocks; see PagedCodec."""

    block_ids: torch.Tensor
    slots: torch.Tensor
    headers: torch.Tensor
    status: torch.Tensor


@dataclass
class Chunk:
    """A part of a job. status: int32 [n], pinned, valid once `checked` is reached. done: all work on it has ended."""

    status: torch.Tensor
    checked: torch.cuda.Event
    done: torch.cuda.Event


@dataclass
class Spill:
    spills: list[SpillBlock]
    tier: Tier
    slots: list[int]
    chunk: Chunk
    began: float


@dataclass
class Restore:
    """answered: vLLM has been told, and the model's stream waits for the rest. Nobody is told of a prefetch so soon."""

    load: Load
    answered: bool = False
    chunks: list[Chunk] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)


class GpuPath(WorkerPath):
    """One rank's blocks to codes and back by a paged codec on its GPU.

    header: what all encoded blocks have in common.
    """

    def __init__(self, codec: PagedCodec, header: wire.BlockHeader, tiers: Tiers) -> None:
        super().__init__()
        self.codec, self.tiers = codec, tiers
        self._header = header
        self._device = codec.layout.caches[0].device
        self._spill_staging = Staging(codec.nbytes, self._device)
        self._prefetch_staging = Staging(codec.nbytes, self._device)
        self._load_stagings = [Staging(codec.nbytes, self._device, priority=-1) for _ in range(STAGINGS - 2)]
        self._stagings = (self._spill_staging, self._prefetch_staging, *self._load_stagings)
        self._spills: deque[Spill] = deque()
        self._restores: deque[Restore] = deque()
        self._prefetches: deque[Restore] = deque()
        self._demoted: torch.cuda.Event | None = None
        self._may_pause = False
        self._warm_up()

    def submit(self, metadata: ManthanMetadata) -> None:
        self._may_pause = metadata.model_rests
        if metadata.place is not None:
            self.tiers.clear()
        self.tiers.drop(metadata.drops)
        self.tiers.go_first(metadata.go_first)
        if not (metadata.spills or metadata.loads):
            return
        model = torch.cuda.current_stream(self._device).record_event()
        for load in metadata.loads:
            self._guard_load(load, model)
        for start in range(0, len(metadata.spills), len(self._spill_staging.codes)):
            self._begin_spills(metadata.spills[start : start + len(self._spill_staging.codes)], model)

    def take_finished_loads(self) -> set[str]:
        """Polls; vLLM asks for this first in every step."""
        while self._spills and self._spills[0].chunk.done.query():
            self._end_spill(self._spills.popleft())
        self._pause()
        for restore in self._restores:
            if not restore.answered and self._is_checked(restore):
                self._answer(restore)
        while self._restores and self._restores[0].answered and self._is_done(self._restores[0]):
            self._end_restore(self._restores.popleft())
        while self._prefetches and self._is_done(self._prefetches[0]):  # decoded: whoever reads it now comes after
            self._end_restore(self._prefetches.popleft())
        return super().take_finished_loads()

    def shutdown(self) -> None:
        for staging in self._stagings:
            staging.stream.synchronize()
        self.tiers.release()

    # -- evict ----------------------------------------------------------------------------------------

    def _begin_spills(self, spills: list[SpillBlock], model: torch.cuda.Event) -> None:
        """Find slots for a chunk of blocks, and encode those that got one."""
        taken = [self.tiers.take() for _ in spills]
        self._spilled([SpillResult(s.key, "store_full", 0.0) for s, t in zip(spills, taken, strict=True) if t is None])
        for tier in (self.tiers.device, self.tiers.host):
            kept = [(spill, t) for spill, t in zip(spills, taken, strict=True) if t is not None and t.tier is tier]
            if tier is not None and kept:
                self._guard_encode(tier, [spill for spill, _ in kept], [t for _, t in kept], model)

    def _guard_encode(self, tier: Tier, kept: list[SpillBlock], taken: list[Taken], model: torch.cuda.Event) -> None:
        slots = [t.slot for t in taken]
        try:
            self._encode(tier, kept, slots, [t.demotion for t in taken if t.demotion is not None], model)
        except Exception as error:  # whatever it is costs these blocks, not the model's thread
            logger.warning("Manthan: blocks are not kept cold: %s: %s", type(error).__name__, error)
            for slot in slots:
                tier.slots.give_back(slot)
            self._spilled([SpillResult(spill.key, "internal", 0.0) for spill in kept])

    def _encode(
        self,
        tier: Tier,
        kept: list[SpillBlock],
        slots: list[int],
        demotions: list[Demotion],
        model: torch.cuda.Event,
    ) -> None:
        """Encode into slots of a tier, by way of the staging buffer if that is the host."""
        began, staging = time.monotonic(), self._spill_staging
        on_host = tier is self.tiers.host
        staging.stream.wait_event(model)
        for reading in self._stagings:  # a slot that was dropped or demoted may still be read
            staging.stream.wait_stream(reading.stream)
        with torch.cuda.stream(staging.stream):
            self._demote(demotions)
            rows = range(len(kept)) if on_host else slots
            batch = self._batch([spill.key for spill in kept], [spill.block_id for spill in kept], rows)
            self.codec.encode(batch.block_ids, staging.codes if on_host else tier.codes, *batch[1:])
            if on_host:
                self._copy(staging.addresses[: len(kept)], tier.addresses(slots))
            self._spills.append(Spill(kept, tier, slots, self._chunk(batch), began))

    def _demote(self, demotions: Sequence[Demotion]) -> None:
        device, host = self.tiers.device, self.tiers.host
        if demotions and device is not None and host is not None:
            self._copy(
                device.addresses([move.device_slot for move in demotions]),
                host.addresses([move.host_slot for move in demotions]),
            )
            self._demoted = torch.cuda.current_stream(self._device).record_event()

    def _end_spill(self, ended: Spill) -> None:
        seconds = (time.monotonic() - ended.began) / len(ended.spills)
        results = []
        for spill, slot, status in zip(ended.spills, ended.slots, ended.chunk.status.tolist(), strict=True):
            good = status == GOOD
            if good:
                ended.tier.slots.put(spill.key, slot)
            else:
                ended.tier.slots.give_back(slot)
            results.append(SpillResult(spill.key, None if good else "encode", seconds))
        self._spilled(results)

    # -- restore --------------------------------------------------------------------------------------

    def _guard_load(self, load: Load, model: torch.cuda.Event) -> None:
        try:
            self._begin_load(load, model)
        except Exception as error:  # vLLM must get an answer, whatever happened
            logger.warning("Manthan: a session is recomputed: %s: %s", type(error).__name__, error)
            for staging in self._stagings:  # what was begun writes to the blocks before whoever has them next
                torch.cuda.current_stream(self._device).wait_stream(staging.stream)
            if not load.is_prefetch:
                self._finished(load, 0)
            self._loaded(LoadResult(load.request_id, [(load.keys[0], "internal")], 0, 0.0, load.is_prefetch))

    def _begin_load(self, load: Load, model: torch.cuda.Event) -> None:
        """Copy codes in, check and decode them, a chunk at a time, on two streams by turns; prefetches have their own.

        Codes on the device are all checked before any is decoded: vLLM can be told sooner.
        """
        stagings = [self._prefetch_staging] if load.is_prefetch else self._load_stagings
        restore, later = Restore(load), []
        done = 0
        while done < len(load.keys) and (found := self.tiers.find(load.keys[done : done + LOAD_CHUNK])):
            tier, slots = found
            staging = stagings[len(restore.chunks) % len(stagings)]
            on_host = tier is self.tiers.host
            slots = slots[: len(staging.codes)] if on_host else slots
            end = done + len(slots)
            with torch.cuda.stream(staging.stream):
                if self._demoted is not None:
                    staging.stream.wait_event(self._demoted)
                if on_host:
                    self._copy(tier.addresses(slots), staging.addresses[: len(slots)])
                codes, rows = (staging.codes, range(len(slots))) if on_host else (tier.codes, slots)
                batch = self._batch(load.keys[done:end], load.block_ids[done:end], rows)
                self.codec.verify(codes, *batch[1:])
                chunk = self._chunk(batch)
            restore.chunks.append(chunk)
            later.append((staging.stream, chunk, batch, codes))
            if on_host:  # the staging buffer is needed for the next but one
                self._decode(*later.pop(), model)
            done = end
        for one in later:
            self._decode(*one, model)
        (self._prefetches if load.is_prefetch else self._restores).append(restore)

    def _decode(
        self, stream: torch.cuda.Stream, chunk: Chunk, batch: Batch, codes: torch.Tensor, model: torch.cuda.Event
    ) -> None:
        """Decode what is good of a chunk, once the model is done with the blocks."""
        stream.wait_event(model)
        with torch.cuda.stream(stream):
            self.codec.decode(batch.block_ids, codes, batch.slots, batch.status)
            chunk.done = stream.record_event()

    def _pause(self) -> None:
        """Where the model has nothing to compute, give codes on the device a moment to be checked: vLLM would sleep for
        longer before it asks again."""
        if self._may_pause and self._restores and self.tiers.first is self.tiers.device:
            until = time.monotonic() + PAUSE_S
            while not self._is_checked(self._restores[-1]) and time.monotonic() < until:
                time.sleep(PAUSE_S / 20)

    def _is_checked(self, restore: Restore) -> bool:
        return all(chunk.checked.query() for chunk in restore.chunks)

    def _is_done(self, restore: Restore) -> bool:
        return all(chunk.done.query() for chunk in restore.chunks)

    def _answer(self, restore: Restore) -> None:
        """Tell vLLM that the load is finished; what the model computes from now on comes after its decoding."""
        for chunk in restore.chunks:
            torch.cuda.current_stream(self._device).wait_event(chunk.done)
        restore.answered = True
        self._finished(restore.load, self._good(restore))

    def _good(self, restore: Restore) -> int:
        """How many blocks are good before the first that is not."""
        good = 0
        for chunk in restore.chunks:
            bad = (chunk.status != GOOD).nonzero()
            if len(bad):
                return good + int(bad[0])
            good += len(chunk.status)
        return good

    def _end_restore(self, ended: Restore) -> None:
        load, good = ended.load, self._good(ended)
        failed = []
        if good < len(load.keys):
            status = torch.cat([chunk.status for chunk in ended.chunks]) if ended.chunks else torch.empty(0)
            cause = status_cause(int(status[good])) if good < len(status) else "missing"
            failed.append((load.keys[good], cause or "internal"))
        seconds = time.monotonic() - ended.began
        self._loaded(LoadResult(load.request_id, failed, good * self.codec.nbytes, seconds, load.is_prefetch))

    # -- the rest -------------------------------------------------------------------------------------

    def _batch(self, keys: Sequence[bytes], block_ids: Sequence[int], slots: Sequence[int]) -> Batch:
        """One upload for all arguments: two rows of int64, then the headers."""
        n = len(keys)
        numbers = np.array([block_ids, slots], np.int64)
        headers = wire.header_rows(self._header, keys)
        both = torch.from_numpy(np.concatenate([numbers.view(np.uint8).ravel(), headers.ravel()])).pin_memory()
        there = both.to(self._device, non_blocking=True)
        ids, rows = there[: 16 * n].view(torch.int64).view(2, n)
        return Batch(ids, rows, there[16 * n :].view(n, -1), torch.empty(n, dtype=torch.int32, device=self._device))

    def _chunk(self, batch: Batch) -> Chunk:
        status = torch.empty(batch.status.shape, dtype=torch.int32, pin_memory=True)
        status.copy_(batch.status, non_blocking=True)
        reached = torch.cuda.current_stream(self._device).record_event()
        return Chunk(status, reached, reached)

    def _warm_up(self) -> None:
        """Do now what the first job would otherwise pay for: load the kernels, allocate pinned memory."""
        null_block = [0] * len(self._spill_staging.codes)
        for staging in self._stagings:
            with torch.cuda.stream(staging.stream):
                batch = self._batch([b""] * len(null_block), null_block, range(len(null_block)))
                self.codec.encode(batch.block_ids, staging.codes, *batch[1:])
                self._chunk(batch).done.synchronize()

    def _copy(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy encoded blocks between addresses, by the copy engines, on the current stream."""
        ops.swap_blocks_batch(sources, targets, torch.full_like(sources, self.codec.nbytes))
