"""Constants and arguments (jobs) of CUDA kernels, and jobs for exact sections: parts of a block kept bit for bit."""

import ctypes
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Self

import numpy as np
import torch

from manthan.codec.base import Dtype
from manthan.codec.cpu.numbers import LARGEST_BF16
from manthan.codec.gpu import xxh3
from manthan.codec.gpu.nvrtc import THREADS
from manthan.codec.gpu.paged import Batch, Form, PagedLayout
from manthan.codec.tables.rotation import block_sizes, rotation

DTYPES = (Dtype.BFLOAT16, Dtype.FLOAT16, Dtype.FLOAT32, Dtype.FLOAT8_E4M3, Dtype.FLOAT8_E5M2)
"""Dtypes. A dtype's index is the value of the kernels' macro DTYPE."""
ALIGNMENT = 16
"""Bytes that a thread reads at once, if all vectors begin at multiples of this number."""


class Job(ctypes.Structure):
    """Argument of kernels: `struct Job` of common.cu."""

    _fields_ = (
        *(
            (name, ctypes.c_uint64)
            for name in ("caches", "block_ids", "offsets", "buffer", "headers", "status", "sizes")
        ),
        *((name, ctypes.c_int64) for name in ("nbytes", "head_nbytes", "block_stride")),
        ("at", ctypes.c_int64 * 2),
        ("payload", ctypes.c_int64 * 2),
        ("ends", ctypes.c_int64 * 4),
        *((name, ctypes.c_int32) for name in ("head_stride", "token_stride", "n", "layers", "heads", "tokens")),
        *((name, ctypes.c_int32) for name in ("kinds", "vector_nbytes")),
    )

    @classmethod
    def plan(
        cls,
        layout: PagedLayout,
        caches: torch.Tensor,
        form: Form,
        first_token: int,
        tokens: int,
        payload: Sequence[int],
    ) -> Self:
        """Return the job for sections of `tokens` tokens of a block, from `first_token` on, without a batch of blocks.

        caches: addresses of the layers. payload: byte offsets of keys and of values in an encoded block.
        """
        return cls(
            caches=caches.data_ptr(),
            nbytes=form.nbytes,
            head_nbytes=form.header.nbytes,
            block_stride=layout.block_stride,
            head_stride=layout.head_stride,
            token_stride=layout.token_stride,
            at=tuple(at + first_token * layout.token_stride for at in layout.ats),
            payload=tuple(payload),
            layers=len(layout.caches),
            heads=layout.heads,
            tokens=tokens,
            kinds=len(layout.ats),
            vector_nbytes=layout.head_dim * layout.number.itemsize,
        )

    def of(self, batch: Batch, buffer: torch.Tensor) -> Self:
        """Return a copy of the job for the batch's blocks."""
        job = type(self).from_buffer_copy(self)
        job.block_ids, job.offsets = batch.block_ids.data_ptr(), batch.offsets.data_ptr()
        job.headers, job.status = batch.headers.data_ptr(), batch.status.data_ptr()
        job.buffer, job.n = buffer.data_ptr(), len(batch.block_ids)
        return job


def addresses(layout: PagedLayout) -> torch.Tensor:
    """Return the addresses of the caches, then of the layers of opaque bytes: int64 [layers], on the caches' device."""
    opaque = layout.opaque.caches if layout.opaque else ()
    return torch.tensor([layer.data_ptr() for layer in (*layout.caches, *opaque)], device=layout.caches[0].device)


def exact_jobs(layout: PagedLayout, caches: torch.Tensor, form: Form, exact: int) -> list[Job]:
    """Return the jobs for exact sections, opaque bytes first, if `exact` tokens are exact. caches: see `addresses`."""
    jobs, first, at = [], len(layout.caches), form.starts[0]
    for run in layout.raw():
        jobs.append(Job.plan(run, caches[first:], form, 0, 1, (at, at)))
        first, at = first + len(run.caches), at + len(run.caches) * jobs[-1].vector_nbytes
    places = list(zip(form.starts, form.sizes, strict=True))[int(layout.opaque is not None) :]
    return jobs + [
        Job.plan(each, caches, form, 0, tokens, (start, start + size // 2))
        for (each, tokens), (start, size) in zip(layout.kept(exact), places, strict=False)
    ]


def scales_of(layout: PagedLayout, form: Form) -> dict[str, int]:
    """Return kernel arguments for the scales of latents, fields of `struct Sections`. Empty without scales."""
    if layout.scales is None:
        return {}
    section = int(layout.scales.place == 0 and layout.opaque is not None)
    return {"kept_at": form.starts[section], "kept_stride": layout.scales.stride}


def is_aligned(layout: PagedLayout) -> bool:
    """True if all vectors begin at multiples of ALIGNMENT bytes, and have a multiple of ALIGNMENT bytes."""
    parts = [layout, layout.coded, *layout.raw()]
    numbers = [
        number
        for part in parts
        for number in (part.block_stride, part.head_stride, part.token_stride, part.head_dim, *part.ats)
    ]
    return not any(number * layout.number.itemsize % ALIGNMENT for number in numbers) and not any(
        layer.data_ptr() % ALIGNMENT for part in parts for layer in part.caches
    )


def sources(names: Sequence[str]) -> str:
    """Return the joined text of kernel source files."""
    folder = resources.files("manthan.codec.gpu").joinpath("kernels")
    return "\n".join((folder / name).read_text() for name in names)


def constants(
    head_dim: int, dtype: Dtype, aligned: bool, macros: Mapping[str, object] = {}, words: Mapping[str, list[int]] = {}
) -> str:
    """Return the source text of constants and macros, to precede the kernels' sources.

    Args:
        head_dim: count of numbers in a vector.
        dtype: dtype of the cache's numbers.
        aligned: see `is_aligned`.
        macros: a codec's further macros, by name.
        words: a codec's further constants, arrays of unsigned int, by name.
    """
    made = rotation(head_dim)
    shared = {"THREADS": THREADS, "HEAD_DIM": head_dim, "DTYPE": DTYPES.index(dtype), "ALIGNED": int(aligned)}
    shared["SCALES"] = 0
    lines = [f"#define {name} {value}" for name, value in (shared | dict(macros)).items()]
    for name, value in (("ROOT", made.root), ("LARGEST", LARGEST_BF16)):
        lines.append(f"#define {name} 0x{value.view(np.uint32):08x}u")
    sizes = [size for size in block_sizes(head_dim) for _ in range(size)]
    for name, values in ({"WEIGHTS": as_bits(made.weights), "BLOCK_SIZE_OF": sizes} | dict(words)).items():
        lines.append(_array("unsigned int", name, values))
    hashing = ("START", "SECRET", "LAST", "MERGE")
    lines += [_array("unsigned long long", name, getattr(xxh3, name)) for name in hashing]
    return "\n".join(lines)


def as_bits(floats: np.ndarray) -> list[int]:
    """Return the bits of numbers as float32."""
    found: list[int] = np.asarray(floats, np.float32).view(np.uint32).tolist()
    return found


def _array(kind: str, name: str, values: "list[int] | tuple[int, ...]") -> str:
    suffix = "ull" if "long" in kind else "u"
    return f"__constant__ {kind} {name}[{len(values)}] = {{{', '.join(f'0x{v:x}{suffix}' for v in values)}}};"
