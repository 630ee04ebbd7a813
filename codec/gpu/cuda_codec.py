"""The CUDA kernels: their constants, their arguments, and the paged codec that runs them."""

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from importlib import resources
from typing import NamedTuple, Self

import numpy as np
import torch

from manthan.codec.base import CodecSpec, Dtype, align16
from manthan.codec.block import BlockFormat
from manthan.codec.gpu import xxh3
from manthan.codec.gpu.nvrtc import ALONE, THREADS, Module
from manthan.codec.gpu.paged import GOOD, Batch, Form, PagedCodec, PagedLayout
from manthan.codec.registry import SPECS
from manthan.codec.tables.constants import tables
from manthan.codec.tables.rotation import block_sizes, sign

DTYPES = (Dtype.BFLOAT16, Dtype.FLOAT16, Dtype.FLOAT32, Dtype.FLOAT8_E4M3, Dtype.FLOAT8_E5M2)
"""As DTYPE numbers them."""
TENSOR_CORE_DIMS = (*range(32, 128, 16), *range(128, 257, 32))
ALIGNMENT = 16
"""Bytes that kernels read at once where all vectors begin at multiples."""
TILE = 8
CODE_THREADS = 128
"""Of a block of threads that encodes or decodes vectors of their own."""


class Occupancy(NamedTuple):
    """How many such blocks a processor is to hold while it encodes, and decodes, which bounds a thread's registers; and
    how many tiles of codes are read ahead. Measured on an H200."""

    encode: int
    decode: int
    ahead: int


OCCUPANCY = {
    64: Occupancy(6, 7, 2),
    80: Occupancy(4, 6, 2),
    96: Occupancy(4, 6, 1),
    112: Occupancy(4, 5, 2),
    128: Occupancy(4, 5, 2),
    160: Occupancy(3, 4, 2),
    192: Occupancy(3, 4, 1),
    256: Occupancy(2, 3, 2),
}
"""By head size; others take the next one's."""


class Job(ctypes.Structure):
    """`struct Job` of common.cu."""

    _fields_ = (
        *(
            (name, ctypes.c_uint64)
            for name in ("caches", "block_ids", "offsets", "codes", "headers", "status", "sizes")
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
        """For sections that hold so many tokens of a block. caches: `addresses`. payload: where keys and values begin
        in an encoded block."""
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

    def of(self, batch: Batch, codes: torch.Tensor) -> Self:
        """The same for these blocks."""
        job = type(self).from_buffer_copy(self)
        job.block_ids, job.offsets = batch.block_ids.data_ptr(), batch.offsets.data_ptr()
        job.headers, job.status = batch.headers.data_ptr(), batch.status.data_ptr()
        job.codes, job.n = codes.data_ptr(), len(batch.block_ids)
        return job


class Plan(NamedTuple):
    """How blocks of one form are worked on. jobs: by kernel, what it is to do and how many warps a block can put to
    work; a form without exact or coded sections lacks some."""

    kernels: Module
    jobs: dict[str, tuple[Job, int]]


class CudaPagedCodec(PagedCodec):
    """`PagedCodec` of keys and values on one CUDA device of compute capability 8.0 or newer. Raises CompileError."""

    layout: PagedLayout

    def __init__(self, layout: PagedLayout, format: BlockFormat) -> None:
        super().__init__(layout, format)
        self.spec = SPECS[format.codec]
        self._addresses = addresses(layout)
        self._plans: dict[int, Plan] = {}
        self._plan(0)  # compiled now

    def prepare(self, exact: int) -> None:
        self._plan(exact)

    def encode(self, batch: Batch, codes: torch.Tensor) -> None:
        batch.status.fill_(GOOD)
        for name in ("encode_exact", "encode", "seal"):
            self.launch(name, batch, codes)

    def verify(self, batch: Batch, codes: torch.Tensor) -> None:
        self.launch("verify", batch, codes)

    def decode(self, batch: Batch, codes: torch.Tensor) -> None:
        for name in ("decode_exact", "decode"):
            self.launch(name, batch, codes)

    def launch(self, name: str, batch: Batch, codes: torch.Tensor) -> None:
        """Run one kernel if it has something to do: encode, decode, the same with _exact, seal or verify."""
        plan = self._plan(batch.exact)
        if name not in plan.jobs:
            return
        template, warps = plan.jobs[name]
        job = template.of(batch, codes)
        threads = CODE_THREADS if name in ("encode", "decode") else THREADS
        plan.kernels.launch(name, job, job.n * warps, threads=threads)

    def _plan(self, exact: int) -> Plan:
        """Compiles, at the first form whose heads have whole tiles, and at the first other."""
        if exact not in self._plans:
            layout, coded = self.layout, self.layout.tokens - exact
            whole = coded % TILE == 0
            kernels = module(self.spec, layout.head_dim, layout.dtype, self.device, is_aligned(layout), whole)
            heads = 2 * len(layout.caches) * layout.heads
            jobs: dict[str, tuple[Job, int]] = {}
            for job in exact_jobs(layout, self._addresses, self.form(exact), exact):
                jobs |= dict.fromkeys(("encode_exact", "decode_exact", "seal", "verify"), (job, heads))
            if coded:
                tiles = heads * -(-coded // TILE)
                jobs |= dict.fromkeys(("encode", "decode", "seal", "verify"), (self._coded_job(exact), tiles))
            jobs |= {name: (jobs[name][0], ALONE) for name in ("seal", "verify")}
            self._plans[exact] = Plan(kernels, jobs)
        return self._plans[exact]

    def _coded_job(self, exact: int) -> Job:
        layout, form = self.layout, self.form(exact)
        tokens = layout.tokens - exact
        job = Job.plan(layout, self._addresses, form, exact, tokens, form.starts[-2:])
        vectors, ends = len(layout.caches) * layout.heads * tokens, []
        for start, bits in zip(form.starts[-2:], (self.spec.key_bits, self.spec.value_bits), strict=True):
            planes = start + align16(2 * vectors)
            ends += [start + 2 * vectors, planes + vectors * bits * layout.head_dim // 8]
        job.ends[:] = ends
        return job


def addresses(layout: PagedLayout) -> torch.Tensor:
    """Of the caches, int64 [layers], on their device."""
    return torch.tensor([layer.data_ptr() for layer in layout.caches], device=layout.caches[0].device)


def exact_jobs(layout: PagedLayout, caches: torch.Tensor, form: Form, exact: int) -> list[Job]:
    """The sections that stay as they are, where so many first tokens do. caches: `addresses`."""
    return [
        Job.plan(each, caches, form, 0, tokens, (start, start + size // 2))
        for (each, tokens), start, size in zip(layout.kept(exact), form.starts, form.sizes, strict=False)
    ]


def is_aligned(layout: PagedLayout) -> bool:
    """Whether all vectors begin at multiples of ALIGNMENT, and are of as many bytes."""
    parts = [layout, layout.coded]
    numbers = [
        number
        for part in parts
        for number in (part.block_stride, part.head_stride, part.token_stride, part.head_dim, *part.ats)
    ]
    return not any(number * layout.number.itemsize % ALIGNMENT for number in numbers) and not any(
        layer.data_ptr() % ALIGNMENT for layer in layout.caches
    )


@lru_cache
def module(spec: CodecSpec, head_dim: int, dtype: Dtype, device: torch.device, aligned: bool, whole: bool) -> Module:
    """The kernels for vectors of this size and dtype, compiled at the first call (a second or two).

    aligned: whether all vectors begin at multiples of 16 bytes. whole: whether a head's coded tokens in a block are a
    multiple of TILE. Raises CompileError.
    """
    return Module(f"{constants(spec, head_dim, dtype, aligned, whole)}\n{sources(SOURCES)}", device)


SOURCES = ("common.cu", "vector.cu", "tile.cu", "blocks.cu", "exact.cu", "seal.cu")


def sources(names: Sequence[str]) -> str:
    """These files, one behind the other."""
    folder = resources.files("manthan.codec.gpu").joinpath("kernels")
    return "\n".join((folder / name).read_text() for name in names)


def constants(spec: CodecSpec, head_dim: int, dtype: Dtype, aligned: bool, whole: bool) -> str:
    """What the sources expect ahead of them."""
    macros = {
        "THREADS": THREADS,
        "HEAD_DIM": head_dim,
        "KEY_BITS": spec.key_bits,
        "VALUE_BITS": spec.value_bits,
        "ROTATED": int(spec.rotated),
        "UNBIASED": int(spec.unbiased),
        "DTYPE": DTYPES.index(dtype),
        "ALIGNED": int(aligned),
        "WHOLE": int(whole),
        "FAST": int(aligned and spec.rotated and head_dim in TENSOR_CORE_DIMS and dtype.numpy.itemsize == 2),
    }
    tuned = OCCUPANCY[min((dim for dim in OCCUPANCY if dim >= head_dim), default=256)]
    macros |= {"CODE_THREADS": CODE_THREADS, "ENCODE_BLOCKS": tuned.encode, "DECODE_BLOCKS": tuned.decode}
    macros["AHEAD"] = tuned.ahead
    made = tables(head_dim, 3, spec.rotated)
    sizes = block_sizes(head_dim)
    roots = [size**-0.5 for size in sizes for _ in range(size // 16)]
    signs = [sum((sign(i + j) < 0) << j for j in range(32)) for i in range(0, head_dim, 32)]
    words = {
        "WEIGHTS": _bits(made.weights),
        "SIGNS": signs,
        "BLOCK_SIZE_OF": [size for size in sizes for _ in range(size)],
        "ROOTS": _bits(np.array(roots)),
    }
    for bits in (2, 3, 4):
        levels = tables(head_dim, bits, spec.rotated).levels
        words[f"LEVELS_{bits}"] = _bits(levels)
        words[f"CUTS_{bits}"] = _bits(tables(head_dim, bits, spec.rotated).thresholds)
    lines = [f"#define {name} {value}" for name, value in macros.items()]
    rms, root = np.float32((sizes[0] / head_dim) ** 0.5), np.float32(sizes[0] ** -0.5)
    for name, value in (("ROOT", made.root), ("LARGEST", made.largest), ("RMS", rms), ("BLOCK_ROOT", root)):
        lines.append(f"#define {name} 0x{value.view(np.uint32):08x}u")
    lines += [_array("unsigned int", name, values) for name, values in words.items()]
    for bits in (2, 3, 4):
        rows = ", ".join("{" + ", ".join(f"0x{word:08x}u" for word in row) + "}" for row in _halves(bits))
        lines.append(f"__constant__ unsigned int HALVES_{bits}[2][4] = {{{rows}}};")
    for name in ("START", "SECRET", "LAST", "MERGE"):
        lines.append(_array("unsigned long long", name, getattr(xxh3, name)))
    return "\n".join(lines)


def _halves(bits: int) -> list[list[int]]:
    """The levels as a sum of two fp16: for each of the two, 8 low bytes and 8 high bytes, in words for prmt.

    Up to 3 bits an entry for each code, sign included; at 4 for each magnitude.
    """
    levels = tables(128, bits, True).levels
    signed = np.resize(np.concatenate([levels, -levels]), 8) if bits < 4 else levels
    high = signed.astype(np.float16)
    low = (signed - high.astype(np.float32)).astype(np.float16)
    halves = (part.view(np.uint16) for part in (high, low))
    return [np.concatenate([half & 255, half >> 8]).astype(np.uint8).view("<u4").tolist() for half in halves]


def _bits(floats: np.ndarray) -> list[int]:
    found: list[int] = np.asarray(floats, np.float32).view(np.uint32).tolist()
    return found


def _array(kind: str, name: str, values: "list[int] | tuple[int, ...]") -> str:
    suffix = "ull" if "long" in kind else "u"
    return f"__constant__ {kind} {name}[{len(values)}] = {{{', '.join(f'0x{v:x}{suffix}' for v in values)}}};"
