"""Engine on the CPU's cores: threads encode KV blocks into tiers (RAM, disk, Redis), and decode blocks for loads."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController
from vllm.logger import init_logger

from manthan.codec import wire
from manthan.codec.base import Numbers
from manthan.codec.block import BlockFormat, BlockShape
from manthan.codec.errors import CodecError, WireError
from manthan.manager.tiers.tier import Buffer, Found, Tier
from manthan.manager.transfer import NEEDED, Transfer
from manthan.vllm_hooks.messages import ManthanMetadata
from manthan.vllm_hooks.worker.capacity import COPIES_BYTES
from manthan.vllm_hooks.worker.engine import (
    MISSING,
    CancelledError,
    Engine,
    JobThreads,
    Storing,
    allowed_cpus,
    behind,
    cause_of,
    model_event,
    other_causes,
)
from manthan.vllm_hooks.worker.layout import Layer

logger = init_logger("vllm.manthan.worker")

BATCH = 16  # most blocks that a thread encodes and stores together
Arrays: TypeAlias = tuple[Numbers, ...]
"""A block's arrays, in the order of `BlockShape.arrays`: keys, values, and bytes of layers without a codec if any. If
all layers are stored as bytes, the first array has the bytes, and the second is empty."""


class PagedMemory:
    """Paged cache, in the CPU's memory or a GPU's, as the CPU reads and writes it.

    Keys and values are [layers, heads, tokens, head_dim], bf16 and fp8 as their bits. `BlockShape.arrays` has the shape
    and dtype of each array. A call waits only for the current stream of its own thread. coded: layers with keys and
    values, or with latents (MLA). raw: layers stored as bytes: all layers if the shape `is_raw`, else the layers of
    `BlockShape.opaque`.
    """

    def __init__(self, shape: BlockShape, coded: Sequence[Layer], raw: Sequence[Layer] = ()) -> None:
        self._shape, self._coded = shape, coded
        self._rows, self._raw = [layer.rows for layer in coded], [layer.rows for layer in raw]
        self._device = (*self._rows, *self._raw)[0].device
        self._is_host = self._device.type == "cpu"

    def gather(self, block_id: int) -> Arrays:
        """Return a block's arrays."""
        if self._is_host:  # `_arrays` copies the numbers, in their final order
            return self._arrays([rows[block_id] for rows in self._rows], [rows[block_id] for rows in self._raw])
        gathered = self.gather_soon(block_id)
        self._wait()
        return gathered()

    def gather_soon(self, block_id: int) -> Callable[[], Arrays]:
        """Begin to gather a block on the current stream. Return a function for the arrays, to call after the copies."""
        coded = _copied(torch.stack([rows[block_id] for rows in self._rows])) if self._rows else ()
        raw = [_copied(torch.cat([rows[block_id] for rows in self._raw]))] if self._raw else []
        return lambda: self._arrays(coded, raw)

    def scatter(self, block_id: int, *numbers: Numbers) -> None:
        """Write arrays into a block of the cache, and wait until all are written. numbers: as `gather` returns them."""
        if self._rows:
            there = [rows[block_id] for rows in self._rows]
            new: Numbers = np.empty((0 if self._is_host else len(there), there[0].numel()), numbers[0].dtype)
            rows = map(_as_numpy, there) if self._is_host else new
            for n, (row, layer) in enumerate(zip(rows, self._coded, strict=True)):
                row[layer.keys], row[layer.values] = numbers[0][n].reshape(-1), numbers[1][n].reshape(-1)
            if not self._is_host:
                torch._foreach_copy_(there, list(torch.from_numpy(new).view(there[0].dtype).to(self._device)))
        if self._raw:
            octets = torch.from_numpy(numbers[2 if self._rows else 0].reshape(-1).copy())  # torch wants writable memory
            parts = octets.to(self._device).split([rows.shape[1] for rows in self._raw])
            torch._foreach_copy_([rows[block_id] for rows in self._raw], parts)
        self._wait()

    def _arrays(self, coded: Iterable[torch.Tensor], raw: Sequence[torch.Tensor]) -> Arrays:
        """Return a block's arrays. coded: numbers of each coded layer, in the order of memory. raw: bytes, in parts."""
        octets = np.concatenate([part.numpy() for part in raw]) if raw else None
        if octets is not None and self._shape.is_raw:
            return octets.reshape(self._shape.numbers), np.empty(self._shape.value_numbers, np.uint8)
        (numbers, dtype), (value_numbers, _), *_ = self._shape.arrays
        keys, values = np.empty(numbers, dtype), np.empty(value_numbers, dtype)
        for n, (row, layer) in enumerate(zip(map(_as_numpy, coded), self._coded, strict=True)):
            # With mode="clip" numpy needs no buffer. All positions are in range.
            np.take(row, layer.keys, out=keys[n].reshape(-1), mode="clip")
            np.take(row, layer.values, out=values[n].reshape(-1), mode="clip")
        if octets is None or self._shape.opaque is None:
            return keys, values
        return keys, values, octets.reshape(self._shape.opaque.numbers)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def _copied(there: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the CPU's memory: `there` itself, or a pinned copy that the current stream makes."""
    if there.is_cpu:
        return there
    here = torch.empty(there.shape, dtype=there.dtype, pin_memory=True)
    return here.copy_(there, non_blocking=True)


def _as_numpy(tensor: torch.Tensor) -> NDArray[Any]:
    """Return an array of the tensor's memory, with bf16 as bits in uint16."""
    return (tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor).numpy()


class CpuBlocks:
    """Blocks of a KV cache group, gathered, encoded and decoded on the CPU's cores. Thread-safe."""

    def __init__(self, memory: PagedMemory, *formats: BlockFormat, exacts: Sequence[int] = (0,)) -> None:
        """Compile all kernels now.

        formats: of compressed blocks; the first for jobs that name no codec, each for jobs that name its codec. exacts:
        possible counts of exact tokens, which are stored bit for bit, at the begin of a block.
        """
        self.formats, self._memory, self.format, self._exacts = tuple[BlockFormat, ...](), memory, formats[0], exacts
        self.nbytes = self.format.shape.nbytes  # of a gathered block
        for each in formats:
            self.add(each)

    def add(self, format: BlockFormat) -> None:
        """Decode blocks of `format`, too, and encode blocks in `format` for transfers that name the format's codec."""
        format.warm_up(self._exacts)
        self.formats = (*self.formats, format)

    def _format_of(self, buf: Buffer) -> BlockFormat:
        """Return the format with the fingerprint in a block's header; else the first, which refuses the block."""
        mark = np.frombuffer(buf, np.uint8)[wire.FINGERPRINT].tobytes()
        return next((format for format in self.formats if format.fingerprint == mark), self.formats[0])

    def gather(self, job: Transfer) -> list[Arrays]:
        """Return arrays copied from the blocks of a store (job from the paged cache to the tiers)."""
        return [self._memory.gather(block_id) for block_id in job.block_ids.tolist()]

    def encode(self, job: Transfer, copies: list[Arrays]) -> list[Buffer | str]:
        """Return a store's compressed blocks, in order; for a block that cannot be encoded, the cause."""
        shape, formats = self.format.shape, {"": self.format} | {each.codec: each for each in self.formats}
        format = formats["" if shape.is_raw else job.codec]
        told = zip(job.block_hashes, copies, job.first_tokens(shape.tokens), job.exacts(shape.tokens), strict=True)
        encoded: list[Buffer | str] = []
        for key, numbers, first_token, exact in told:
            try:
                encoded.append(format.encode(*numbers, key=key, first_token=first_token, exact=exact, mark=job.mark))
            except CodecError as error:
                logger.warning("Manthan: a block is not kept cold: %s", error)
                encoded.append("encode")
        return encoded

    def decode(self, key: bytes, block_id: int, found: Found) -> str | None:
        """Check a compressed block, and decode it into the paged cache. Return the cause of a failure, or None.

        found: result of reading a tier, a store of compressed blocks. A block of another engine may be several shards
        (parts that its ranks had), one behind the other.
        """
        if found is None or isinstance(found, str):
            return MISSING if found is None else found
        try:
            shards = [self._format_of(shard).decode_shard(shard, key=key) for shard in wire.split(found)]
            if any(shard.ignored for shard in shards):
                return "checksum"  # a refinement, which adds precision, is damaged: the block is worse than noted
            numbers = self.format.joined(shards)
        except WireError as error:
            return error.cause
        except CodecError:
            return "decode"
        self._memory.scatter(block_id, *numbers)
        return None


@dataclass(eq=False, kw_only=True)
class Gathering(Storing):
    """Store whose blocks a thread gathers, which means: copies from the paged cache."""

    store: Tier  # for the blocks
    cancelled: threading.Event  # set to end the job
    is_begun: bool = False  # True once the first blocks are being gathered
    is_given_up: bool = False  # True if no more blocks may be gathered, because requests need them


class CpuEngine(Engine):
    """Engine that encodes on the CPU's cores, for a cache in the CPU's memory or a GPU's.

    Stores, requests' loads, and prefetches (loads without a request) have separate threads, so that none waits for the
    others. A store gathers blocks ahead of their encoding, so that the pool may soon reuse the blocks. blocks: by KV
    cache group, formats and paged memory. store: the rank's tiers. device: of the cache. On a GPU, jobs use new
    streams, which wait for the model's work before the job.
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
        self._cancelled = threading.Event()  # set to end the jobs submitted since the last `cancels`
        self._ungathered: list[Gathering] = []
        self._staged = 0  # bytes of blocks gathered and not encoded yet: see COPIES_BYTES
        self._gatherers = JobThreads(1, "manthan-gather", cpus)
        self._encoders = JobThreads(encode_threads, "manthan-encode", cpus)
        self._loaders = JobThreads(1, "manthan-restore", cpus)
        self._prefetchers = JobThreads(1, "manthan-prefetch", cpus)
        self._all = (self._gatherers, self._encoders, self._loaders, self._prefetchers)
        # Further threads of numpy's BLAS would wait busily on the cores of the model and of other codec threads.
        ThreadpoolController().select(prefix="libscipy_openblas").limit(limits=1)

    def _prepare(self, metadata: ManthanMetadata) -> None:
        if metadata.cancels:
            self._cancelled.set()
            self._cancelled = threading.Event()
        if metadata.revokes:
            self._give_up()
        if metadata.place is not None:
            self.store = self.store.cleared(metadata.place)
        self._drop(metadata, self.store)

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

    def _encode(self, gathering: Gathering, start: int, part: Transfer, copies: list[Arrays]) -> None:
        """Encode some of a store's blocks, from index `start` on, and put them into the tiers together."""
        blocks, sizes = self.blocks[part.group], dict[int, Sequence[int]]()
        try:
            if gathering.cancelled.is_set():
                raise CancelledError
            encoded = dict(enumerate(blocks.encode(part, copies), start))
            failed = {at: buf for at, buf in encoded.items() if isinstance(buf, str)}
            bufs = {at: buf for at, buf in encoded.items() if not isinstance(buf, str)}
            sizes, causes = self._put(gathering.store, gathering.job, bufs)
            failed |= causes
        except Exception as error:  # any error costs these blocks, not the thread
            failed = dict.fromkeys(range(start, start + len(part)), cause_of(error))
        self._leave(len(part) * blocks.nbytes)
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
        self._answer_load(job, sizes[:good], failed, began)
        self._loaded(job, good)
