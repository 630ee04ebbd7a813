"""CUDA kernels for blocks of a paged cache: their arguments, their sources, and exact sections (kept bit for bit)."""

import ctypes
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import resources
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch

from manthan.codec.base import Dtype
from manthan.codec.block import BlockFormat
from manthan.codec.cpu.numbers import LARGEST_BF16
from manthan.codec.gpu.nvrtc import ALONE, THREADS, Module
from manthan.codec.gpu.paged import ALIGNMENT, GOOD, Batch, Form, PagedCodec, PagedLayout
from manthan.codec.rope import Rope
from manthan.codec.tables.rotation import block_sizes, rotation

DTYPES = (Dtype.BFLOAT16, Dtype.FLOAT16, Dtype.FLOAT32, Dtype.FLOAT8_E4M3, Dtype.FLOAT8_E5M2)
"""Dtypes. A dtype's index is the value of the kernels' macro DTYPE."""
ALL = slice(None)
L = TypeVar("L")


def fields(kind: Any, names: str) -> tuple[tuple[str, Any], ...]:
    """Return the fields, all of one ctypes type, for the names in `names`."""
    return tuple((name, kind) for name in names.split())


class Blocks(ctypes.Structure):
    """`struct Blocks` of common.cu: what the arguments (jobs) of all kernels begin with."""

    _fields_ = (
        *fields(ctypes.c_uint64, "caches block_ids offsets buffer headers status nbytes"),
        *fields(ctypes.c_int64, "head_nbytes block_stride"),
        ("at", ctypes.c_int64 * 2),
        *fields(ctypes.c_int32, "head_stride token_stride n layers heads tokens"),
    )

    @classmethod
    def plan(cls, layout: PagedLayout, caches: torch.Tensor, form: Form, first: int, tokens: int, **more: Any) -> Self:
        """Return the job for `tokens` tokens of a block, from token `first` on, without a batch of blocks.

        caches: addresses of the layers. more: further fields.
        """
        return cls(
            caches=caches.data_ptr(),
            head_nbytes=form.header.nbytes,
            block_stride=layout.block_stride,
            at=tuple(at + first * layout.token_stride for at in layout.ats),
            head_stride=layout.head_stride,
            token_stride=layout.token_stride,
            layers=len(layout.caches),
            heads=layout.heads,
            tokens=tokens,
            **more,
        )

    def of(self, batch: Batch, buffer: torch.Tensor, some: slice = ALL) -> Self:
        """Return a copy of the job for blocks `some` of a batch."""
        job = type(self).from_buffer_copy(self)
        for name in ("block_ids", "offsets", "headers", "status", "nbytes"):
            setattr(job, name, getattr(batch, name)[some].data_ptr())
        job.buffer, job.n = buffer.data_ptr(), len(batch.block_ids[some])
        return job


class Job(Blocks):
    """`struct Job` of common.cu."""

    _fields_ = (
        ("payload", ctypes.c_int64 * 2),
        ("ends", ctypes.c_int64 * 4),
        *fields(ctypes.c_int32, "kinds vector_nbytes"),
    )

    @classmethod
    def fixed(
        cls, layout: PagedLayout, caches: torch.Tensor, form: Form, tokens: range, payload: Sequence[int]
    ) -> Self:
        """Return the job for sections of a fixed rate; see `plan`. payload: byte offsets of keys and of values."""
        more = {"kinds": len(layout.ats), "vector_nbytes": layout.head_dim * layout.number.itemsize}
        return cls.plan(layout, caches, form, tokens.start, len(tokens), payload=tuple(payload), **more)


class Lossy(Blocks):
    """`struct Lossy` of coder.cu."""

    _fields_ = (
        ("turns", ctypes.c_uint64),
        *fields(ctypes.c_int64, "start kept_at"),
        *fields(ctypes.c_int32, "first_token block_tokens kept_stride"),
        ("rope_scale", ctypes.c_float),
    )

    @classmethod
    def lossy(
        cls, paged: PagedLayout, caches: torch.Tensor, form: Form, exact: int, rope: Rope, start: int, **more: Any
    ) -> Self:
        """Return the job for the tokens behind the first `exact`; see `plan`. start: of the first lossy section."""
        layout = paged.coded
        more |= {"start": start, "first_token": exact, "block_tokens": layout.tokens, "rope_scale": rope.scale}
        return cls.plan(layout, caches, form, exact, layout.tokens - exact, **scales_of(paged, form), **more)

    def of(self, batch: Batch, buffer: torch.Tensor, some: slice = ALL) -> Self:
        job = super().of(batch, buffer, some)
        job.turns = batch.turns[some].data_ptr()
        return job


class CudaCodec(PagedCodec, Generic[L]):
    """`PagedCodec` of keys and values, or of latents, by kernels. L: a job for lossy sections. Raises CompileError.

    sources: names of the kernels' source files. macros, words: see `constants`.
    """

    layout: PagedLayout

    def __init__(
        self,
        layout: PagedLayout,
        format: BlockFormat,
        rope: Rope | None,
        sources: tuple[str, ...],
        macros: Mapping[str, object] = {},
        words: Mapping[str, list[int]] = {},
    ) -> None:
        super().__init__(layout, format, rope)
        self._addresses, self._coded, self._rope = addresses(layout), layout.coded, rope or Rope(())
        shared = {"PAIRS": len(self._rope.frequencies), "INTERLEAVED": int(self._rope.interleaved)}
        shared["SCALES"] = layout.scales.nbytes if layout.scales else 0
        text = constants(layout.coded.head_dim, layout.dtype, is_aligned(layout), shared | dict(macros), words)
        self._kernels = module(text, sources, self.device)
        self._plans: dict[int, tuple[list[Job], L | None]] = {}

    def encode(self, batch: Batch, buffer: torch.Tensor) -> None:
        kept, lossy = self._plan(batch.exact)
        batch.status.fill_(GOOD)
        self._launch_exact("encode_exact", kept, batch, buffer)
        if lossy is None:
            self._launch_alone("seal", kept[-1], batch, buffer)
        else:
            self._encode_lossy(lossy, batch, buffer)

    def verify(self, batch: Batch, buffer: torch.Tensor) -> None:
        kept, lossy = self._plan(batch.exact)
        if lossy is None:
            self._launch_alone("verify", kept[-1], batch, buffer)
        else:
            self._verify_lossy(lossy, batch, buffer)

    def decode(self, batch: Batch, buffer: torch.Tensor) -> None:
        """See `PagedCodec`. Lossy sections come first, so that exact tokens of an undecodable block are not written."""
        kept, lossy = self._plan(batch.exact)
        if lossy is not None:
            self._decode_lossy(lossy, batch, buffer)
        self._launch_exact("decode_exact", kept, batch, buffer)

    @abstractmethod
    def _lossy(self, form: Form, exact: int) -> L:
        """Return the job for the lossy sections of blocks with `exact` exact tokens."""

    @abstractmethod
    def _encode_lossy(self, lossy: L, batch: Batch, buffer: torch.Tensor) -> None:
        """Encode the lossy sections, and seal the blocks."""

    @abstractmethod
    def _verify_lossy(self, lossy: L, batch: Batch, buffer: torch.Tensor) -> None: ...

    @abstractmethod
    def _decode_lossy(self, lossy: L, batch: Batch, buffer: torch.Tensor) -> None: ...

    def _plan(self, exact: int) -> tuple[list[Job], L | None]:
        """Return the jobs for the exact sections, and for the lossy ones if any."""
        if exact not in self._plans:
            form = self.form(exact)
            lossy = self._lossy(form, exact) if exact < self.layout.tokens else None
            self._plans[exact] = exact_jobs(self.layout, self._addresses, form, exact), lossy
        return self._plans[exact]

    def _launch_exact(self, name: str, kept: list[Job], batch: Batch, buffer: torch.Tensor) -> None:
        for each in kept:
            job = each.of(batch, buffer)
            self._kernels.launch(name, job, job.n * job.kinds * job.layers * job.heads)

    def _launch_alone(self, name: str, of: Blocks, batch: Batch, buffer: torch.Tensor) -> None:
        """Launch a kernel with a block of threads for each encoded block."""
        job = of.of(batch, buffer)
        self._kernels.launch(name, job, job.n * ALONE)


def addresses(layout: PagedLayout) -> torch.Tensor:
    """Return the addresses of the caches, then of the layers of opaque bytes: int64 [layers], on the caches' device."""
    opaque = layout.opaque.caches if layout.opaque else ()
    return torch.tensor([layer.data_ptr() for layer in (*layout.caches, *opaque)], device=layout.caches[0].device)


def exact_jobs(layout: PagedLayout, caches: torch.Tensor, form: Form, exact: int) -> list[Job]:
    """Return the jobs for exact sections, opaque bytes first, if `exact` tokens are exact. caches: see `addresses`."""
    jobs, first, at = [], len(layout.caches), form.starts[0]
    for run in layout.raw():
        jobs.append(Job.fixed(run, caches[first:], form, range(1), (at, at)))
        first, at = first + len(run.caches), at + len(run.caches) * jobs[-1].vector_nbytes
    places = list(zip(form.starts, form.sizes, strict=True))[int(layout.opaque is not None) :]
    return jobs + [
        Job.fixed(each, caches, form, range(tokens), (start, start + size // 2))
        for (each, tokens), (start, size) in zip(layout.kept(exact), places, strict=False)
    ]


def scales_of(layout: PagedLayout, form: Form) -> dict[str, int]:
    """Return the fields of `Lossy` for the scales of latents. Empty without scales."""
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


@lru_cache
def module(constants: str, names: tuple[str, ...], device: torch.device) -> Module:
    """Return the compiled kernels of source files. constants: text ahead of the sources. Raises CompileError."""
    folder = resources.files("manthan.codec.gpu").joinpath("kernels")
    return Module("\n".join([constants, *((folder / name).read_text() for name in names)]), device)


def constants(
    head_dim: int, dtype: Dtype, aligned: bool, macros: Mapping[str, object] = {}, words: Mapping[str, list[int]] = {}
) -> str:
    """Return the source text of constants and macros, to precede the kernels' sources.

    aligned: see `is_aligned`. macros, words: a codec's further macros, and constant arrays of unsigned int, by name.
    """
    made = rotation(head_dim)
    shared = {"THREADS": THREADS, "HEAD_DIM": head_dim, "DTYPE": DTYPES.index(dtype), "ALIGNED": int(aligned)}
    lines = [f"#define {name} {value}" for name, value in (shared | dict(macros)).items()]
    for name, value in (("ROOT", made.root), ("LARGEST", LARGEST_BF16)):
        lines.append(f"#define {name} 0x{value.view(np.uint32):08x}u")
    sizes = [size for size in block_sizes(head_dim) for _ in range(size)]
    for name, values in ({"WEIGHTS": as_bits(made.weights), "BLOCK_SIZE_OF": sizes} | dict(words)).items():
        listed = ", ".join(f"0x{value:x}u" for value in values)
        lines.append(f"__constant__ unsigned int {name}[{len(values)}] = {{{listed}}};")
    return "\n".join(lines)


def as_bits(floats: np.ndarray) -> list[int]:
    """Return the bits of numbers as float32."""
    found: list[int] = np.asarray(floats, np.float32).view(np.uint32).tolist()
    return found
