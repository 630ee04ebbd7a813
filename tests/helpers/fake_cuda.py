"""What the path beside a GPU asks of CUDA, on the CPU: streams whose work is done at once, and events that fail."""

import ctypes
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from manthan.codec.block import BlockFormat
from manthan.codec.gpu.paged import PagedLayout
from manthan.codec.gpu.torch_codec import TorchPagedCodec
from manthan.vllm_hooks import compat

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


def paged_codec(name: str = "k4v3", dtype: torch.dtype = torch.bfloat16, **more: Any) -> TorchPagedCodec:
    """Over a cache of random numbers, tokens outside heads."""
    torch.manual_seed(1)
    caches = tuple(torch.randn(BLOCKS, TOKENS * HEADS * 2 * DIM).to(dtype) for _ in range(LAYERS))
    strides = (TOKENS * HEADS * 2 * DIM, 2 * DIM, HEADS * 2 * DIM)
    layout = PagedLayout(caches, HEADS, TOKENS, DIM, *strides, key_at=0, value_at=DIM)
    return TorchPagedCodec(layout, BlockFormat(name, layout.shape, b"f" * 16, **more))
