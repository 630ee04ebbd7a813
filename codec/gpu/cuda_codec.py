"""The CUDA kernels: their constants, their arguments, and the paged codec that runs them."""

import ctypes
from functools import lru_cache
from importlib import resources

import numpy as np
import torch

from manthan.codec.base import CodecSpec
from manthan.codec.gpu import xxh3
from manthan.codec.gpu.nvrtc import THREADS, Module
from manthan.codec.gpu.paged import GOOD, PagedCodec, PagedLayout
from manthan.codec.tables.constants import tables
from manthan.codec.tables.rotation import block_sizes, sign
from manthan.codec.wire import HEADER, BlockHeader, payload_sizes

DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
TENSOR_CORE_DIMS = (64, 128, 256)
ALIGNMENT = 16
"""Bytes that the tensor core kernels read at once: vectors must begin at multiples."""
TILE = 8


class Job(ctypes.Structure):
    """`struct Job` of common.cu."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("caches", "block_ids", "slots", "codes", "headers", "status")),
        *((name, ctypes.c_int64) for name in ("slot_stride", "nbytes", "block_stride")),
        ("at", ctypes.c_int64 * 2),
        ("payload", ctypes.c_int64 * 2),
        *((name, ctypes.c_int32) for name in ("head_stride", "token_stride", "n", "layers", "heads", "tokens")),
        *((name, ctypes.c_int32) for name in ("kinds", "first_kind")),
    )

    @property
    def warps(self) -> int:
        """How many warps the encode and decode kernels can put to work: one for each tile."""
        return int(self.n * self.kinds * self.layers * self.heads * -(-self.tokens // TILE))


class CudaPagedCodec(PagedCodec):
    """`PagedCodec` on one CUDA device of compute capability 8.0 or newer. Raises CompileError."""

    def __init__(self, spec: CodecSpec, layout: PagedLayout, header: BlockHeader) -> None:
        super().__init__(spec, layout, header)
        cache = layout.caches[0]
        strides = (layout.block_stride, layout.head_stride, layout.token_stride, layout.key_at, layout.value_at)
        aligned = all(stride * cache.itemsize % ALIGNMENT == 0 for stride in strides) and all(
            cache.data_ptr() % ALIGNMENT == 0 for cache in layout.caches
        )
        whole = layout.tokens % TILE == 0
        self._module = module(spec, layout.head_dim, cache.dtype, cache.device, aligned, whole)
        self._addresses = torch.tensor([cache.data_ptr() for cache in layout.caches], device=cache.device)
        keys, _ = payload_sizes(header)
        self._job = Job(
            caches=self._addresses.data_ptr(),
            nbytes=self.nbytes,
            block_stride=layout.block_stride,
            head_stride=layout.head_stride,
            token_stride=layout.token_stride,
            at=(layout.key_at, layout.value_at),
            payload=(HEADER.size, HEADER.size + keys),
            layers=len(layout.caches),
            heads=layout.heads,
            tokens=layout.tokens,
            kinds=2,
        )

    def encode(
        self,
        block_ids: torch.Tensor,
        codes: torch.Tensor,
        slots: torch.Tensor,
        headers: torch.Tensor,
        status: torch.Tensor,
    ) -> None:
        job = self._filled(block_ids, codes, slots, headers, status)
        status.fill_(GOOD)
        self._module.launch("encode", job, job.warps)
        self._module.launch("seal", job, job.n)

    def seal(self, codes: torch.Tensor, slots: torch.Tensor, headers: torch.Tensor) -> None:
        job = self._filled(slots, codes, slots, headers, slots)  # neither blocks nor a status play a part
        self._module.launch("seal", job, job.n)

    def verify(self, codes: torch.Tensor, slots: torch.Tensor, headers: torch.Tensor, status: torch.Tensor) -> None:
        job = self._filled(slots, codes, slots, headers, status)
        self._module.launch("verify", job, job.n)

    def decode(self, block_ids: torch.Tensor, codes: torch.Tensor, slots: torch.Tensor, status: torch.Tensor) -> None:
        job = self._filled(block_ids, codes, slots, None, status)
        self._module.launch("decode", job, job.warps)

    def launch(
        self,
        name: str,
        block_ids: torch.Tensor,
        codes: torch.Tensor,
        slots: torch.Tensor,
        headers: torch.Tensor,
        status: torch.Tensor,
    ) -> None:
        """Run one kernel alone: encode, seal, verify or decode. For measurements."""
        job = self._filled(block_ids, codes, slots, headers, status)
        self._module.launch(name, job, job.n if name in ("seal", "verify") else job.warps)

    def _filled(
        self,
        block_ids: torch.Tensor,
        codes: torch.Tensor,
        slots: torch.Tensor,
        headers: torch.Tensor | None,
        status: torch.Tensor,
    ) -> Job:
        job = Job.from_buffer_copy(self._job)
        job.block_ids, job.slots = block_ids.data_ptr(), slots.data_ptr()
        job.headers = 0 if headers is None else headers.data_ptr()
        job.codes, job.slot_stride, job.status = codes.data_ptr(), codes.stride(0), status.data_ptr()
        job.n = len(block_ids)
        return job


@lru_cache
def module(
    spec: CodecSpec, head_dim: int, dtype: torch.dtype, device: torch.device, aligned: bool, whole: bool
) -> Module:
    """The kernels for vectors of this size and dtype, compiled at the first call (a second or two).

    aligned: whether all vectors begin at multiples of 16 bytes. whole: whether a head's tokens in a block are a
    multiple of TILE. Raises CompileError.
    """
    folder = resources.files("manthan.codec.gpu").joinpath("kernels")
    parts = [constants(spec, head_dim, dtype, aligned, whole), *((folder / name).read_text() for name in SOURCES)]
    return Module("\n".join(parts), device)


SOURCES = ("common.cu", "vector.cu", "tile.cu", "blocks.cu", "seal.cu")


def constants(spec: CodecSpec, head_dim: int, dtype: torch.dtype, aligned: bool, whole: bool) -> str:
    """What the sources expect ahead of them."""
    macros = {
        "THREADS": THREADS,
        "HEAD_DIM": head_dim,
        "KEY_BITS": spec.key_bits,
        "VALUE_BITS": spec.value_bits,
        "ROTATED": int(spec.rotated),
        "UNBIASED": int(spec.unbiased),
        "DTYPE": DTYPES[dtype],
        "WHOLE": int(whole),
        "FAST": int(aligned and spec.rotated and head_dim in TENSOR_CORE_DIMS and dtype is not torch.float32),
    }
    made = tables(head_dim, 3, spec.rotated)
    signs = [sum((sign(i + j) < 0) << j for j in range(32)) for i in range(0, head_dim, 32)]
    words = {
        "WEIGHTS": _bits(made.weights),
        "SIGNS": signs,
        "BLOCK_SIZE_OF": [size for size in block_sizes(head_dim) for _ in range(size)],
    }
    for bits in (2, 3, 4):
        levels = tables(head_dim, bits, spec.rotated).levels
        words[f"LEVELS_{bits}"] = _bits(levels)
        words[f"CUTS_{bits}"] = _bits(tables(head_dim, bits, spec.rotated).thresholds)
    lines = [f"#define {name} {value}" for name, value in macros.items()]
    for name, value in (("ROOT", made.root), ("LARGEST", made.largest)):
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
