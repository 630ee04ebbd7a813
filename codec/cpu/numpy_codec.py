"""The numpy backend: plain numpy everywhere, the fused kernels where numba is installed; both write the same
bytes."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise
from types import ModuleType

import numpy as np

from manthan.codec.base import Codec, CodecSpec, Codes, Vectors
from manthan.codec.cpu import plain
from manthan.codec.tables.constants import Tables, tables

THREAD_MIN = 1024  # vectors: a thread is not woken for fewer


class NumpyCodec(Codec):
    """fused: True for the numba kernels, False for plain numpy, None for whichever is there."""

    backend = "numpy"

    def __init__(self, spec: CodecSpec, head_dim: int, *, fused: bool | None = None) -> None:
        super().__init__(spec, head_dim)
        self.threads = _cores()
        self._fused = fused

    @property
    def fused(self) -> bool:
        """Whether calls run the numba kernels. Imports numba."""
        return self._kernels() is not plain

    def warm_up(self) -> None:
        """Compile the kernels, or load them from numba's cache: seconds the first time on a machine, then 0.5
        s."""
        self._kernels()

    def _kernels(self) -> ModuleType:
        if self._fused is None:
            self._fused = _numba_kernels() is not None
        return (_numba_kernels() if self._fused else None) or plain

    def _tables(self, bits: int) -> Tables:
        return tables(self.head_dim, bits, self.spec.rotated, self.spec.unbiased)

    def _encode(self, x: Vectors, bits: int, scales: Codes, planes: Codes) -> int:
        run, constants, width = self._kernels().encode, self._tables(bits), bits * self.head_dim // 8
        words = _words(np.require(x, requirements=["C", "A"]))

        def part(a: int, b: int) -> int:
            rows = slice(a * width, b * width)
            return int(run(words[a:b], x.dtype == np.uint16, constants, bits, scales[2 * a : 2 * b], planes[rows]))

        return self._spread(part, len(x))

    def _decode(self, scales: Codes, planes: Codes, bits: int, out: Vectors) -> int:
        run, constants, width = self._kernels().decode, self._tables(bits), bits * self.head_dim // 8
        words = _words(out)

        def part(a: int, b: int) -> int:
            rows = slice(a * width, b * width)
            return int(run(scales[2 * a : 2 * b], planes[rows], constants, bits, out.dtype == np.uint16, words[a:b]))

        return self._spread(part, len(out))

    def _spread(self, part: Callable[[int, int], int], n: int) -> int:
        """Run part(a, b) over slices of n vectors, on several threads if it pays; the first index it
        complains of."""
        count = max(1, min(self.threads, n // THREAD_MIN))
        if count == 1:
            return part(0, n)
        edges = [n * i // count for i in range(count + 1)]
        others = [_pool().submit(part, a, b) for a, b in pairwise(edges[1:])]
        found = [part(0, edges[1]), *(other.result() for other in others)]
        return next((a + bad for a, bad in zip(edges, found, strict=False) if bad >= 0), -1)


def _words(x: Vectors) -> np.ndarray:
    """The vectors' bits: uint16 for bf16, uint32 for float32."""
    return x if x.dtype == np.uint16 else x.view(np.uint32)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@lru_cache
def _numba_kernels() -> ModuleType | None:
    try:
        from manthan.codec.cpu import numba_kernels
    except ImportError:
        return None
    return numba_kernels


@lru_cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(_cores(), os.cpu_count() or 1), thread_name_prefix="manthan-codec")


if hasattr(os, "register_at_fork"):  # a forked child has the pool but not its threads
    os.register_at_fork(after_in_child=_pool.cache_clear)
