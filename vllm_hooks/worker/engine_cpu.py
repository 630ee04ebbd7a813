"""Engine on the CPU's cores: threads encode KV blocks into tiers (RAM, disk, Redis), and decode blocks for loads."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from manthan.manager.events import BlocksTrimmed
from manthan.manager.tiers.tier import Found, Tier
from manthan.manager.transfer import NEEDED, Transfer, TransferResult
from manthan.vllm_hooks.messages import ManthanMetadata
from manthan.vllm_hooks.worker.blocks import Copies, CpuBlocks
from manthan.vllm_hooks.worker.capacity import COPIES_BYTES
from manthan.vllm_hooks.worker.engine import (
    CancelledError,
    Engine,
    JobThreads,
    Storing,
    allowed_cpus,
    cause_of,
    other_causes,
)

BATCH = 16
"""Most blocks that a thread encodes and stores together."""


@dataclass(eq=False, kw_only=True)
class Gathering(Storing):
    """Store whose blocks a thread gathers, which means: copies from the paged cache.

    store: tiers for the blocks. cancelled: set to end the job. is_begun: True once the first blocks are being gathered.
    is_given_up: True if no more blocks may be gathered, because requests need them.
    """

    store: Tier
    cancelled: threading.Event
    is_begun: bool = False
    is_given_up: bool = False


class CpuEngine(Engine):
    """Engine that encodes on the CPU's cores, for a cache in the CPU's memory or a GPU's.

    Stores, requests' loads, and prefetches (loads without a request) have separate threads, so that none waits for the
    others. A store gathers blocks ahead of their encoding, so that the pool may soon reuse the blocks.

    Args:
        blocks: by KV cache group, formats and paged memory.
        store: the rank's tiers.
        encode_threads: number of threads that encode.
        device: device of the cache. On a GPU, jobs use new streams, which wait for the model's work before the job.
    """

    def __init__(
        self,
        blocks: Mapping[int, CpuBlocks],
        store: Tier,
        encode_threads: int,
        device: torch.device,
        fails_whole: bool = False,
        keeps: bool = True,
    ) -> None:
        super().__init__(fails_whole, keeps)
        self.blocks, self.store = blocks, store
        self._device = device
        cpus = allowed_cpus() if device.type == "cpu" else set()
        self._cancelled = threading.Event()
        """Set to cancel the jobs submitted since the last reset."""
        self._ungathered: list[Gathering] = []
        self._staged = 0
        """Bytes of blocks gathered and not encoded yet: COPIES_BYTES at most, or a single larger part of a store."""
        self._gatherers = JobThreads(1, "manthan-gather", cpus)
        self._encoders = JobThreads(encode_threads, "manthan-encode", cpus)
        self._loaders = JobThreads(1, "manthan-restore", cpus)
        self._prefetchers = JobThreads(1, "manthan-prefetch", cpus)
        self._all = (self._gatherers, self._encoders, self._loaders, self._prefetchers)

    def _prepare(self, metadata: ManthanMetadata) -> None:
        if metadata.cancels:
            self._cancelled.set()
            self._cancelled = threading.Event()
        if metadata.revokes:
            self._give_up()
        if metadata.place is not None:
            self.store = self.store.cleared(metadata.place)
        for drop in metadata.drops:
            if isinstance(drop, BlocksTrimmed):
                self.store.trim(drop.group, drop.block_hashes, drop.level + 1)
            else:
                self.store.drop(drop.group, drop.block_hashes)

    def _load(self, job: Transfer) -> None:
        threads = self._prefetchers if job.request_id is None else self._loaders
        threads.submit(self._read, job, self.store, model_event(self._device), self._cancelled)

    def _store(self, job: Transfer) -> None:
        model = model_event(self._device)
        gathering = Gathering(job, store=self.store, cancelled=self._cancelled)
        with self._lock:
            self._ungathered.append(gathering)
        self._gatherers.submit(self._gather, gathering, model)

    def read(self, group: int, keys: Sequence[bytes], tenant: str = "") -> Iterator[Found]:
        return self.store.read(group, keys, tenant)

    def wait(self) -> None:
        for threads in self._all:
            threads.wait()

    def shutdown(self) -> None:
        for threads in self._all:
            threads.shutdown()
        self.store.close()

    def _awaits_threads(self) -> bool:
        return bool(self._open) and not self._ended.requests

    # -- store ----------------------------------------------------------------------------------------

    def _give_up(self) -> None:
        """Give up stores' blocks that are not gathered yet, because requests need these blocks of the pool."""
        with self._lock:
            given_up, self._ungathered = self._ungathered, []
            for gathering in given_up:
                gathering.is_given_up = True
            self._lock.notify_all()
            not_begun = [gathering.job for gathering in given_up if not gathering.is_begun]
        for job in not_begun:
            self._refuse(job, NEEDED)

    def _gather(self, gathering: Gathering, model: torch.cuda.Event | None) -> None:
        """Copy a store's blocks, some at a time, as COPIES_BYTES allows, and have the copies encoded."""
        job, blocks = gathering.job, self.blocks[gathering.job.group]
        step = max(1, min(BATCH, COPIES_BYTES // blocks.nbytes))
        for start in range(0, len(job), step):
            part = job.part(start, start + step, blocks.format.shape.tokens)
            nbytes = len(part) * blocks.nbytes
            with self._lock:
                while self._staged and self._staged + nbytes > COPIES_BYTES and not gathering.is_given_up:
                    self._lock.wait()
                if gathering.is_given_up and not start:
                    return
                gathering.is_begun = True
                self._staged += nbytes
            try:
                if gathering.is_given_up:
                    raise CancelledError(NEEDED)
                if gathering.cancelled.is_set():
                    raise CancelledError
                with behind(model, self._device):
                    copies = blocks.gather(part)
            except Exception as error:
                self._leave(nbytes)
                self._gathered(job)
                self._stored(gathering, {}, dict.fromkeys(range(start, len(job)), cause_of(error)))
                break
            if start + step >= len(job):
                self._gathered(job)
            self._encoders.submit(self._encode, gathering, start, part, copies)
        with self._lock:
            self._ungathered = [other for other in self._ungathered if other is not gathering]

    def _leave(self, nbytes: int) -> None:
        with self._lock:
            self._staged -= nbytes
            self._lock.notify_all()

    def _encode(self, gathering: Gathering, start: int, part: Transfer, copies: Copies) -> None:
        """Encode some of a store's blocks, from index `start` on, and put them into the tiers together."""
        blocks, store, keys = self.blocks[part.group], gathering.store, part.block_hashes
        sizes: dict[int, Sequence[int]] = {}
        try:
            if gathering.cancelled.is_set():
                raise CancelledError
            encoded = dict(zip(keys, blocks.encode(part, copies), strict=True))
            bufs = {key: buf for key, buf in encoded.items() if not isinstance(buf, str)}
            causes = {key: buf for key, buf in encoded.items() if isinstance(buf, str)}
            causes |= store.put_all(part.group, bufs, part.tenant)
            sizes = {at: store.rooms(bufs[key]) for at, key in enumerate(keys, start) if key not in causes}
        except Exception as error:  # any error costs these blocks, not the thread
            causes = dict.fromkeys(keys, cause_of(error))
        self._leave(len(part) * blocks.nbytes)
        failed = {at: causes[key] for at, key in enumerate(keys, start) if key in causes}
        self._stored(gathering, sizes, failed)

    # -- load -----------------------------------------------------------------------------------------

    def _read(self, job: Transfer, store: Tier, model: torch.cuda.Event | None, cancelled: threading.Event) -> None:
        blocks, keys, began = self.blocks[job.group], job.block_hashes, time.monotonic()
        sizes: list[int] = []
        failed: dict[int, str] = {}
        try:
            with behind(model, self._device):
                values = store.read(job.group, keys, job.tenant)
                for at, found in enumerate(values):
                    if cancelled.is_set():
                        raise CancelledError
                    if (cause := blocks.decode(keys[at], int(job.block_ids[at]), found)) is not None:
                        failed[at] = cause
                        failed.update(other_causes(job, range(at + 1, len(job)), found, values, store))
                        break
                    sizes.append(0 if found is None else len(found))
                if not failed and len(sizes) < len(keys):
                    raise ValueError(f"the store has answered for {len(sizes)} of {len(keys)} blocks")
        except Exception as error:  # vLLM must get an answer, whatever happened
            failed.setdefault(min(len(sizes), len(job) - 1), cause_of(error))
        good = min(failed, default=len(job))
        nbytes = np.array([*sizes[:good], *[0] * (len(job) - good)], np.int64)
        self._answer(TransferResult(job.job_id, nbytes, failed, time.monotonic() - began))
        self._loaded(job, good)


def model_event(device: torch.device) -> torch.cuda.Event | None:
    """Return an event after the work queued on the model's stream; None on a CPU. Call on the model's thread."""
    return None if device.type == "cpu" else torch.cuda.current_stream(device).record_event()


def behind(model: torch.cuda.Event | None, device: torch.device) -> torch.cuda.StreamContext:
    """Return a context with a new stream that waits for event `model`; without an event, one that changes nothing."""
    stream = None
    if model is not None:
        stream = torch.cuda.Stream(device)
        stream.wait_event(model)
    return torch.cuda.stream(stream)
