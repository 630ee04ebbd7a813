"""A process that asks a folder of compiled kernels for many, at the same time as others."""

import multiprocessing as mp
from pathlib import Path

from manthan.codec.gpu.kernel_cache import KernelCache


def content(i: int) -> bytes:
    """Of kernel i: 400 KB that no other has."""
    return bytes([i]) * 400_000


def ask(folder: Path, begin: "mp.synchronize.Barrier", answers: "mp.Queue[bool]") -> None:
    """Whether all that is compiled, or found, is what it should be."""
    begin.wait()
    cache = KernelCache(folder)
    answers.put(all(cache.compiled((f"kernel {i}",), lambda i=i: content(i)) == content(i) for i in range(40)))
