"""What the path beside a GPU asks of CUDA, on the CPU: streams whose work is done at once, and events that fail."""

import ctypes
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from manthan.benchmarks import made_up
from manthan.codec import wire
from manthan.codec.block import BlockFormat
from manthan.codec.errors import NonFiniteError, WireError
from manthan.codec.gpu.paged import BAD_HEADER, GOOD, Batch, PagedCodec, PagedLayout
from manthan.codec.gpu.torch_codec import TorchPagedCodec
from manthan.codec.model import ModelFacts
from manthan.vllm_hooks import compat
from manthan.vllm_hooks.worker.blocks import DeviceMemory

LAYERS, HEADS, TOKENS, DIM, BLOCKS = 2, 2, 8, 32, 64


class Gpu:
    """events: so many were recorded. reached: and those before this one are reached. broken: whatever is asked of the
    device raises."""

    events = 0
    reached = math.inf
    broken = False

    def check(self) -> None:
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self._number = gpu, gpu.events
        gpu.events += 1

    def query(self) -> bool:
        self._gpu.check()
        return self._number < self._gpu.reached

    def synchronize(self) -> None:
        self._gpu.check()


class Stream:
    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def record_event(self) -> Event:
        self._gpu.check()
        return Event(self._gpu)

    def wait_event(self, event: Event) -> None:
        self._gpu.check()

    def wait_stream(self, stream: "Stream") -> None:
        self._gpu.check()

    def synchronize(self) -> None:
        self._gpu.check()


def install(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    torch.set_num_threads(1)

    @contextmanager
    def current(stream: Stream) -> Iterator[None]:
        yield

    def copy(sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor) -> None:
        gpu.check()
        for source, target, size in zip(*(part.tolist() for part in (sources, targets, sizes)), strict=True):
            ctypes.memmove(target, source, size)

    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: Stream(gpu))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: Stream(gpu))
    monkeypatch.setattr(torch.cuda, "stream", current)
    monkeypatch.setattr(compat, "copy_blocks", copy)
    return gpu


class FormatCodec(PagedCodec):
    """What a GPU would do with blocks whose sizes vary, by numpy."""

    def encode(self, batch: Batch, codes: torch.Tensor) -> None:
        for i, (key, first_token, at) in enumerate(self._told(batch)):
            numbers = DeviceMemory(self.layout).gather(int(batch.block_ids[i]))
            try:
                block = self.format.encode(*numbers, key=key, first_token=first_token, exact=batch.exact)
            except NonFiniteError as error:
                batch.status[i] = error.index
                continue
            codes[at : at + len(block)] = torch.from_numpy(block)
            batch.nbytes[i], batch.status[i] = len(block), GOOD

    def verify(self, batch: Batch, codes: torch.Tensor) -> None:
        for i, (key, first_token, at) in enumerate(self._told(batch)):
            block = codes[at : at + int(batch.nbytes[i])].numpy()
            try:
                found = wire.parse(block, key=key, fingerprint=self.format.fingerprint, group=self.format.group).header
                cause = "key" if found.first_token != first_token else None
                cause = cause if self.format.exact_of(found) == batch.exact else "size"
            except WireError as error:
                cause = error.cause
            batch.status[i] = GOOD if cause is None else BAD_HEADER - dict(wire.FIELD_ENDS)[cause] + 1

    def decode(self, batch: Batch, codes: torch.Tensor) -> None:
        for i, (key, _, at) in enumerate(self._told(batch)):
            if batch.status[i] == GOOD:
                block = codes[at : at + int(batch.nbytes[i])].numpy()
                DeviceMemory(self.layout).scatter(int(batch.block_ids[i]), *self.format.decode(block, key=key))

    def _told(self, batch: Batch) -> Iterator[tuple[bytes, int, int]]:
        """Key, first token and offset of each block."""
        for header, at in zip(batch.headers.numpy(), batch.offsets.tolist(), strict=True):
            front = wire.Front(*wire.HEADER.unpack_from(header.data))
            yield front.key[: front.key_len], front.first_token, at


def paged_codec(name: str = "k4v3", dtype: torch.dtype = torch.bfloat16, **more: Any) -> TorchPagedCodec:
    """Over a cache of random numbers, tokens outside heads."""
    torch.manual_seed(1)
    caches = tuple(torch.randn(BLOCKS, TOKENS * HEADS * 2 * DIM).to(dtype) for _ in range(LAYERS))
    strides = (TOKENS * HEADS * 2 * DIM, 2 * DIM, HEADS * 2 * DIM)
    layout = PagedLayout(caches, HEADS, TOKENS, DIM, *strides, key_at=0, value_at=DIM)
    return TorchPagedCodec(layout, BlockFormat(name, layout.shape, b"f" * 16, **more))


def varying_codec(name: str = "klt-8x", **more: Any) -> FormatCodec:
    """The same cache, and a codec whose blocks are of many sizes."""
    layout = paged_codec().layout
    profile = made_up.profile(LAYERS, HEADS, DIM, made_up.rope_of(DIM))
    facts = ModelFacts(profile.info.rope, profile)
    return FormatCodec(layout, BlockFormat(name, layout.shape, b"f" * 16, facts=facts, **more))
