"""What the path with a GPU asks of CUDA, on the CPU: streams whose work is done at once, and events that fail."""

import ctypes
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pytest
import torch

from manthan.benchmarks import made_up
from manthan.codec import wire
from manthan.codec.block import BlockFormat, sections
from manthan.codec.errors import CodecError, NonFiniteError, WireError
from manthan.codec.gpu.cuda_codec import Job
from manthan.codec.gpu.paged import BAD_CHECKSUM, BAD_HEADER, GOOD, Batch, PagedCodec, PagedLayout, RawLayout
from manthan.codec.gpu.raw import RawPagedCodec
from manthan.codec.model import ModelFacts
from manthan.vllm_hooks import compat
from manthan.vllm_hooks.worker.engine_cpu import PagedMemory
from manthan.vllm_hooks.worker.layout import Layer
from manthan.vllm_hooks.worker.slabs import Slab, Slabs

LAYERS, HEADS, TOKENS, DIM, BLOCKS = 2, 2, 8, 32, 64


Clock: TypeAlias = dict["Stream | None", int]
"""How many uses of memory by each stream, and by the CPU (None), come before."""


class Use(NamedTuple):
    """Use number `number` of memory by a stream or the CPU."""

    start: int
    end: int
    writes: bool
    by: "Stream | None"
    number: int


class Gpu:
    """events: so many were recorded. reached: and those before this one are reached. broken: whatever is asked of the
    device raises.

    All work is done at once. `use` raises where a real device might do it together with other work that it disturbs.
    raced: that error, should nobody hear of it.
    """

    events = 0
    reached = math.inf
    broken = False

    def __init__(self) -> None:
        self.ended: Clock = {}
        """Uses of which the CPU knows that they have ended. What is begun now comes after them."""
        self.under_way: list[Use] = []
        self.raced = ""
        self.on = threading.local()
        """`stream`: the thread's current one."""
        self._lock = threading.Lock()

    def check(self) -> None:
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def end(self, clock: Clock) -> None:
        """The CPU has seen that this has ended."""
        with self._lock:
            merge(self.ended, clock)
            self.under_way = [use for use in self.under_way if use.number > self.ended.get(use.by, 0)]

    def use(self, start: int, nbytes: int, writes: bool) -> None:
        """Note a use of memory on the current stream, or by the CPU without one."""
        by, end = getattr(self.on, "stream", None), start + nbytes
        with self._lock:
            clock = self.ended if by is None else by.clock
            merge(clock, self.ended)
            for other in self.under_way:
                overlaps = other.start < end and start < other.end and (writes or other.writes)
                if overlaps and other.by is not by and other.number > clock.get(other.by, 0):
                    self.raced = f"{Use(start, end, writes, by, 0)} may come while {other} is under way"
                    raise RuntimeError(self.raced)
            clock[by] = clock.get(by, 0) + 1
            if by is not None:
                self.under_way.append(Use(start, end, writes, by, clock[by]))


def merge(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        clock[stream] = max(number, clock.get(stream, 0))


class Event:
    def __init__(self, gpu: Gpu, clock: Clock) -> None:
        self._gpu, self._number, self.clock = gpu, gpu.events, dict(clock)
        gpu.events += 1

    def query(self) -> bool:
        self._gpu.check()
        is_reached = self._number < self._gpu.reached
        if is_reached:
            self._gpu.end(self.clock)
        return is_reached

    def synchronize(self) -> None:
        self._gpu.check()
        self._gpu.end(self.clock)


class Stream:
    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.clock: Clock = {}

    def record_event(self) -> Event:
        self._gpu.check()
        return Event(self._gpu, self.clock)

    def wait_event(self, event: Event) -> None:
        self._gpu.check()
        merge(self.clock, event.clock)

    def wait_stream(self, stream: "Stream") -> None:
        self._gpu.check()
        merge(self.clock, stream.clock)

    def query(self) -> bool:
        self._gpu.check()
        return True

    def synchronize(self) -> None:
        self._gpu.check()
        self._gpu.end(self.clock)


def install(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    model = Stream(gpu)
    torch.set_num_threads(1)

    @contextmanager
    def current(stream: Stream) -> Iterator[None]:
        before, gpu.on.stream = getattr(gpu.on, "stream", None), stream
        try:
            yield
        finally:
            gpu.on.stream = before

    def copy(sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor) -> None:
        gpu.check()
        for source, target, size in zip(*(part.tolist() for part in (sources, targets, sizes)), strict=True):
            gpu.use(source, size, writes=False)
            gpu.use(target, size, writes=True)
            ctypes.memmove(target, source, size)

    def watch(owner: Any, name: str, extents: Callable[..., Iterable[tuple[int, int, int]]]) -> None:
        """Note the memory that a method uses."""
        call = getattr(owner, name)

        def watched(self: Any, *args: Any) -> Any:
            for base, start, nbytes in extents(self, *args):
                gpu.use(base + start, nbytes, writes=name in ("encode", "write"))
            return call(self, *args)

        monkeypatch.setattr(owner, name, watched)

    for name in ("encode", "verify", "decode"):
        watch(
            FormatCodec, name, lambda _, batch, buffer: _extents(buffer, zip(batch.offsets, batch.nbytes, strict=True))
        )
    watch(Slab, "write", lambda slab, extents, _: _extents(slab.buffer, extents))
    watch(Slab, "read", lambda slab, stored: _extents(slab.buffer, stored.extents))
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: Stream(gpu))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: model)
    monkeypatch.setattr(torch.cuda, "stream", current)
    monkeypatch.setattr(compat, "copy_blocks", copy)
    return gpu


def _extents(buffer: torch.Tensor, extents: Iterable[Any]) -> Iterator[tuple[int, int, int]]:
    return ((buffer.data_ptr(), int(start), int(nbytes)) for start, nbytes in extents)


class Seals:
    """What `seal` and `verify` of seal.cu do, in this process's memory."""

    def launch(self, name: str, job: Job, warps: int) -> None:
        def at(address: int, nbytes: int) -> np.ndarray:
            return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))

        offsets, head = at(job.offsets, 8 * job.n).view(np.int64), job.head_nbytes
        headers = at(job.headers, head * job.n).reshape(job.n, head)
        nbytes = at(job.nbytes, 8 * job.n).view(np.int64)
        for i, offset in enumerate(offsets.tolist()):
            block = at(job.buffer + offset, int(nbytes[i]))
            if name == "seal":
                block[:head] = headers[i]
                wire.seal(block)
                continue
            sealed, differs = wire.seal(block.copy()), block[:head] != headers[i]
            differs[wire.CHECKSUM] = False
            first = BAD_HEADER - int(differs.argmax()) if differs.any() else GOOD
            at(job.status, 4 * job.n).view(np.int32)[i] = first if np.array_equal(sealed, block) else BAD_CHECKSUM


def copy_exact(job: Job, block_id: int, block: np.ndarray, itemsize: int, *, out: bool) -> None:
    """Do to one encoded block what exact.cu does, in this process's memory. out: from the paged cache."""
    caches = np.ctypeslib.as_array((ctypes.c_int64 * job.layers).from_address(job.caches))
    size = job.vector_nbytes
    for kind, layer, head, token in np.ndindex(job.kinds, job.layers, job.heads, job.tokens):
        elements = block_id * job.block_stride + job.at[kind] + head * job.head_stride + token * job.token_stride
        address = int(caches[layer]) + itemsize * elements
        vector = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
        at = job.payload[kind] + ((layer * job.heads + head) * job.tokens + token) * size
        here = block[at : at + size]
        here[:], vector[:] = (vector, vector) if out else (here, here)


def raw_codec(layout: RawLayout, format: BlockFormat) -> RawPagedCodec:
    return RawPagedCodec(layout, format, Seals())


class FormatCodec(PagedCodec):
    """What a GPU would do, by numpy, block by block: whatever codec, layout and kind of numbers."""

    def encode(self, batch: Batch, buffer: torch.Tensor) -> None:
        for i, (key, first_token, mark, at) in enumerate(self._told(batch)):
            numbers = self._numbers(int(batch.block_ids[i]))
            told = {"key": key, "first_token": first_token, "exact": batch.exact, "mark": mark}
            try:
                block = self.format._encode(numbers, *told.values())
            except NonFiniteError as error:
                batch.status[i] = error.index
                continue
            buffer[at : at + len(block)] = torch.from_numpy(block)
            batch.nbytes[i], batch.status[i] = len(block), GOOD
            ends = wire.part_ends(block)
            if len(ends) > 1:
                batch.ends[i, : len(ends)] = torch.tensor(ends)

    def verify(self, batch: Batch, buffer: torch.Tensor) -> None:
        for i, (key, first_token, mark, at) in enumerate(self._told(batch)):
            block = buffer[at : at + int(batch.nbytes[i])].numpy()
            try:
                found = wire.parse(block, key=key, fingerprint=self.format.fingerprint, group=self.format.group).header
                cause = "key" if (found.first_token, found.mark) != (first_token, mark) else None
                told = sections(self.format.codec, self.format.shape, batch.exact, self.format.first_head)
                cause = cause if (found.tokens, found.sections) == (self.format.shape.tokens, told) else "size"
            except WireError as error:
                cause = error.cause
            ends = {**dict(wire.FIELD_ENDS), "checksum": 0}
            status = GOOD if cause is None else BAD_HEADER - ends.get(cause, ends["size"]) + 1
            batch.status[i] = BAD_CHECKSUM if cause == "checksum" else status

    def decode(self, batch: Batch, buffer: torch.Tensor) -> None:
        for i, (key, _, _, at) in enumerate(self._told(batch)):
            if batch.status[i] != GOOD:
                continue
            try:
                parts = self.format.decode(buffer[at : at + int(batch.nbytes[i])].numpy(), key=key)
            except CodecError:
                batch.status[i] = 0
                continue
            for part, view in zip(parts, self._views(int(batch.block_ids[i])), strict=True):
                ends = np.cumsum([layer.numel() for layer in view])[:-1]
                for numbers, layer in zip(np.split(part.reshape(-1), ends), view, strict=True):
                    layer.copy_(torch.from_numpy(numbers.copy()).view(layer.dtype).view(layer.shape))

    def _views(self, block: int) -> list[list[torch.Tensor]]:
        """Keys of each layer, and values, or what stands for them."""
        layout = self.layout
        latents = [(layout.latents, layout.latents.key_at)] if layout.latents else []
        found = [
            [
                cache.as_strided(
                    (part.heads, part.tokens, part.head_dim),
                    (part.head_stride, part.token_stride, 1),
                    cache.storage_offset() + block * part.block_stride + at,
                )
                for cache in part.caches
            ]
            for part, at in [*((layout, at) for at in layout.ats), *latents]
        ]
        return [*found, [cache[block] for cache in layout.opaque.caches]] if layout.opaque else found

    def _numbers(self, block: int) -> list[np.ndarray]:
        """Of a block, as `BlockFormat` has them."""
        found = [torch.cat([layer.reshape(-1) for layer in layers]) for layers in self._views(block)]
        plain = [(x.view(torch.uint16) if x.dtype is torch.bfloat16 else x).numpy() for x in found]
        return [x.reshape(shape) for x, (shape, _) in zip(plain, self.format.shape.arrays, strict=True)]

    def _told(self, batch: Batch) -> Iterator[tuple[bytes, int, int, int]]:
        """Key, first token, mark and offset of each block."""
        for header, at in zip(batch.headers.numpy(), batch.offsets.tolist(), strict=True):
            front = wire.Front(*wire.HEADER.unpack_from(header.data))
            yield front.key[: front.key_len], front.first_token, front.mark, at


def paged_codec(name: str = "k3v3", dtype: torch.dtype = torch.bfloat16, **more: Any) -> FormatCodec:
    """Over a cache of random numbers, tokens outside heads."""
    torch.manual_seed(1)
    caches = tuple(torch.randn(BLOCKS, TOKENS * HEADS * 2 * DIM).to(dtype) for _ in range(LAYERS))
    strides = (TOKENS * HEADS * 2 * DIM, 2 * DIM, HEADS * 2 * DIM)
    layout = PagedLayout(caches, HEADS, TOKENS, DIM, *strides, key_at=0, value_at=DIM)
    return FormatCodec(layout, BlockFormat(name, layout.shape, b"f" * 16, **more))


def used(tiers: Slabs) -> int:
    """Stored and taken bytes of all tiers."""
    return sum(tier.arena.used for tier in tiers.all)


def memory_of(layout: PagedLayout) -> PagedMemory:
    """The layout's cache, as the CPU reads and writes it."""
    head, token, number = np.ogrid[: layout.heads, : layout.tokens, : layout.head_dim]
    at = (head * layout.head_stride + token * layout.token_stride + number).reshape(-1)
    layers = [Layer("", cache, layout.key_at + at, (layout.value_at or 0) + at) for cache in layout.caches]
    memory = PagedMemory(layout.shape, layers)
    memory._is_host = False
    return memory


def varying_codec(name: str = "klt-8x", **more: Any) -> FormatCodec:
    """The same cache, and a codec whose blocks are of many sizes."""
    layout = paged_codec().layout
    profile = made_up.profile(LAYERS, HEADS, DIM, made_up.rope_of(DIM))
    facts = ModelFacts(profile.info.rope, profile)
    return FormatCodec(layout, BlockFormat(name, layout.shape, b"f" * 16, facts=facts, **more))
