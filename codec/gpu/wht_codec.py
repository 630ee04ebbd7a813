"""`manthan.codec.wht` by CUDA kernels: encoded bytes and decoded numbers equal the CPU's.

A row is a layer's keys or values; a run is one head's part of a row. Blocks are processed in groups, which bounds the
temporaries: quantized whole numbers and, while encoding, each row's 16-bit words of the entropy coder. A row's position
in the encoded block is known only after the earlier rows are encoded. A kernel, not the host, doubles the steps of a
section (all keys or all values) that exceeds its bound, so that the host never waits for the device.
"""

import ctypes
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from manthan.codec.block import BlockFormat, sections
from manthan.codec.cpu.rans import MOST_DOUBLINGS, START, VERSION, streams_of
from manthan.codec.gpu.cuda_codec import CudaCodec, Job, Lossy, fields
from manthan.codec.gpu.nvrtc import ALONE
from manthan.codec.gpu.paged import Batch, Form, PagedLayout
from manthan.codec.rope import Rope
from manthan.codec.tables.frequencies import ESCAPE, SCALE, family
from manthan.codec.wht import LIMIT_BITS, LIMITS, MEAN_BITS, PRESETS, ROW_STEP_END, TABLES, Parts
from manthan.codec.wire import align16

SCRATCH_BYTES = 320 * 2**20
"""Approximate limit of temporaries for a group of blocks, in bytes; a single block may exceed it."""
ENCODING, DECODING = 4, 2
"""Bytes of temporaries for each number of a block, to encode and to decode."""
OCTET = 8
"""Number of consecutive numbers of an rANS stream that a thread handles together."""
WARPS = 8
"""Most warps in a block of threads of `round_rows` and `restore_rows`."""
STAGE_BYTES = 48 * 2**10
"""Most bytes of shared memory for a block of threads of `restore_rows`, unless one warp needs more."""
SPARE_BLOCKS = 128
"""Most blocks of threads of `round_rows` if a row does not fit into shared memory."""
ENCODE_THREADS, DECODE_THREADS = 512, 1024
SOURCES = "common.cu", "exact.cu", "seal.cu", "coder.cu", "sections.cu", "octets.cu", "wht.cu", "whole.cu"

Entries = npt.NDArray[np.uint32]


class Sections(Lossy):
    """`struct Sections` of sections.cu."""

    _fields_ = (
        *fields(ctypes.c_uint64, "words states sizes firsts far fronts doublings starts"),
        ("limits", ctypes.c_int64 * 2),
        ("parts", ctypes.c_int64 * 2),
        ("fronts_nbytes", ctypes.c_int64),
        *fields(ctypes.c_int32, "streams rows"),
        ("room", ctypes.c_uint32),
    )


class Wht(Sections):
    """`struct Wht` of wht.cu."""

    _fields_ = (
        *fields(ctypes.c_uint64, "rounded spare encoding decoding"),
        *fields(ctypes.c_int64, "means_at row_steps_at scales_at"),
        ("tables_at", ctypes.c_int64 * 2),
        ("row_room", ctypes.c_uint32),
        ("bounds", ctypes.c_uint32 * len(LIMITS)),
        *fields(ctypes.c_float, "one_token one_number key_step value_step"),
        *fields(ctypes.c_int32, "abreast staged"),
    )

    @classmethod
    def of_form(
        cls, paged: PagedLayout, format: BlockFormat, caches: Tensor, form: Form, exact: int, rope: Rope
    ) -> Self:
        """Return the job for the sections of lossy tokens, without a batch. caches: result of `addresses`."""
        layout = paged.coded
        kinds = len(layout.ats)
        made = cls.lossy(paged, caches, form, exact, rope, form.starts[-kinds], limits=form.sizes[-kinds:])
        numbers = made.heads * layout.head_dim * made.tokens
        made.streams, made.rows, made.room = streams_of(numbers), kinds * made.layers, numbers
        parts = [Parts.of(section) for section in sections(format.codec, format.shape, exact)[-kinds:]]
        for kind, part in enumerate(parts):
            made.parts[kind], made.tables_at[kind] = part.end - START, part.tables.start - START
        made.fronts_nbytes = align16(max(made.parts))
        made.means_at, made.row_steps_at = parts[0].means.start - START, parts[0].row_steps.start - START
        made.scales_at = parts[-1].scales.start - START
        made.row_room = -(-numbers // (OCTET * made.streams)) * OCTET * made.streams
        made.bounds[:] = np.ceil(LIMITS * (layout.head_dim * made.tokens)).astype(np.int64).tolist()
        abreast, rest = divmod(made.tokens, made.streams)
        made.abreast = abreast if not rest and abreast in (1, 2, 4) and layout.head_dim <= 256 else 0
        preset = PRESETS[format.codec]
        made.key_step, made.value_step = preset.key_step, preset.value_step
        made.one_token, made.one_number = np.float32(1 / made.tokens), np.float32(1 / numbers)
        return made

    def part(self, some: range, turns_nbytes: int) -> Self:
        """Return a copy for blocks `some` of the job. turns_nbytes: bytes of a block's cosines and sines."""
        job = type(self).from_buffer_copy(self)
        steps = {"block_ids": 8, "offsets": 8, "headers": self.head_nbytes, "status": 4, "nbytes": 8}
        steps |= {"turns": turns_nbytes, "sizes": 4 * self.rows, "firsts": 4 * self.rows}
        for name, step in (steps | {"doublings": 8, "starts": 8}).items():
            setattr(job, name, getattr(self, name) + some.start * step)
        job.n = len(some)
        return job


class Threads(NamedTuple):
    """Threads of a launch: warps and bytes of dynamic shared memory in a block; most blocks, 0 for no bound."""

    warps: int
    shared: int
    blocks: int = 0


class WhtPagedCodec(CudaCodec[Wht]):
    """`PagedCodec` for `manthan.codec.wht`, on a CUDA device of compute capability 8.0 or newer.

    Magnitudes of 2**`wht.LIMIT` or more, in lossy tokens, are refused like infinities. Raises CompileError.
    """

    def __init__(self, layout: PagedLayout, format: BlockFormat) -> None:
        tables, device = (_encoding(), _decoding()), layout.caches[0].device
        self._most_shared: int = properties_of(device).shared_memory_per_block_optin
        self._shared = tables[1].nbytes <= self._most_shared
        macros: dict[str, object] = {
            "KINDS": len(layout.coded.ats),
            "SHARED_TABLES": int(self._shared),
            "MEAN_BITS": MEAN_BITS,
            "SECTION_VERSION": VERSION,
            "MOST_DOUBLINGS": MOST_DOUBLINGS,
            "ROW_STEP_END": ROW_STEP_END,
            "WHT_LIMIT_BITS": f"{LIMIT_BITS}u",
        }
        super().__init__(layout, format, format.facts.rope, SOURCES, macros)
        self._tables = [torch.from_numpy(table.view(np.uint8)).to(device) for table in tables]

    def _lossy(self, form: Form, exact: int) -> Wht:
        return Wht.of_form(self.layout, self.format, self._addresses, form, exact, self._rope)

    def _encode_lossy(self, lossy: Wht, batch: Batch, buffer: Tensor) -> None:
        for some in _groups(lossy, len(batch.block_ids), ENCODING):
            self._encode(lossy.of(batch, buffer, slice(some.start, some.stop)))
        self._launch_alone("seal", Job(), batch, buffer)  # `lay_out` has written the headers

    def _verify_lossy(self, lossy: Wht, batch: Batch, buffer: Tensor) -> None:
        self._launch_alone("verify_sections", lossy, batch, buffer)

    def _decode_lossy(self, lossy: Wht, batch: Batch, buffer: Tensor) -> None:
        """Decode. Only kernels that use `rounded` run for each group: launches take time of the model's thread."""
        job = lossy.of(batch, buffer)
        threads, groups = self._restoring(job), _groups(job, job.n, DECODING)
        rounded = self._scratch(2 * max(map(len, groups), default=0) * job.rows * job.row_room)
        books = self._scratch(4 * job.n * (2 * job.rows + 4))
        job.rounded = rounded.data_ptr()
        _keep_books(job, books)
        self._kernels.launch("find_rows", job, job.n * ALONE)
        self._kernels.launch("check_fronts", job, 2 * job.n * ALONE)
        for some in groups:
            part = job.part(some, batch.turns[:1].nbytes)
            self._launch_words("decode_words", part, self._tables[1], DECODE_THREADS, shared=self._shared)
            warps, of_block = len(some) * job.rows * job.heads, 32 * threads.warps
            self._kernels.launch("restore_rows", part, warps, threads=of_block, shared=threads.shared)

    def _encode(self, job: Wht) -> None:
        rows, threads = job.n * job.rows, self._rounding(job)
        rounded, words = (self._scratch(2 * rows * room) for room in (job.row_room, job.room))
        fronts, states = self._scratch(2 * job.n * job.fronts_nbytes), self._scratch(4 * rows * job.streams)
        spare = self._scratch(threads.blocks * 4 * job.heads * job.tokens * (self._coded.head_dim + 4))
        books, far = self._scratch(4 * (2 * rows + 4 * job.n)), self._scratch(8 * job.n).zero_()
        job.rounded, job.spare = rounded.data_ptr(), spare.data_ptr()
        job.fronts = fronts.data_ptr()
        job.words, job.states, job.far = words.data_ptr(), states.data_ptr(), far.data_ptr()
        _keep_books(job, books)
        warps, of_block = min(rows, threads.blocks or rows) * threads.warps, 32 * threads.warps
        self._kernels.launch("round_rows", job, warps, threads=of_block, shared=threads.shared)
        self._launch_words("encode_words", job, self._tables[0], ENCODE_THREADS, shared=True)
        kinds = job.rows // job.layers
        self._kernels.launch("double_steps", job, job.n * kinds * (ENCODE_THREADS // 32), threads=ENCODE_THREADS)
        for name, warps in (("lay_out", ALONE), ("pack", job.rows)):
            self._kernels.launch(name, job, job.n * warps)

    def _scratch(self, nbytes: int) -> Tensor:
        """Return uninitialized memory of the current CUDA stream. Kernels launched so far may use it after `del`."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def _rounding(self, job: Wht) -> Threads:
        """Return the threads of `round_rows`. A row is in shared memory if it fits, else in `spare`."""
        dim = self._coded.head_dim
        warps, vectors = min(WARPS, job.heads), job.heads * job.tokens
        even, even_heads = -(-vectors // 4) * 4, -(-job.heads // 4) * 4
        shared = 4 * (2 * even + even_heads + warps * dim)
        row = 4 * vectors * (dim + 4)
        if shared + row <= self._most_shared:
            return Threads(warps, shared + row)
        return Threads(WARPS, shared + 4 * (WARPS - warps) * dim, SPARE_BLOCKS)

    def _restoring(self, job: Wht) -> Threads:
        """Return the threads of `restore_rows`. Set `job.staged`: True to copy each warp's run to shared memory first.

        Each warp also has room there for a mean and for the vectors that RoPE turns at once.
        """
        dim = self._coded.head_dim
        fixed = 4 * dim * (1 + _abreast(dim))
        each = fixed + 2 * job.tokens * (dim + 8)
        job.staged = not job.abreast and each <= self._most_shared
        if not job.staged:
            return Threads(WARPS, WARPS * fixed)
        warps = max(1, min(WARPS, STAGE_BYTES // each))
        return Threads(warps, warps * each)

    def _launch_words(self, name: str, job: Wht, tables: Tensor, threads: int, *, shared: bool) -> None:
        """Launch a kernel with a busy warp for each row, or for several rows if their streams fit into one warp.

        The launch has a block of threads for each busy warp, so that rows spread over all multiprocessors.
        """
        job.encoding = job.decoding = tables.data_ptr()
        warps = job.rows * -(-job.n * job.streams // 32) * (threads // 32)
        self._kernels.launch(name, job, warps, threads=threads, shared=tables.nbytes if shared else 0)


def properties_of(device: torch.device) -> Any:
    """Return the device's properties as Any, because PyTorch's type stubs lack some of them."""
    return torch.cuda.get_device_properties(device)


def _groups(plan: Wht, n: int, each: int) -> list[range]:
    """Return even ranges of `n` blocks, each of one block or within SCRATCH_BYTES. each: bytes for a number."""
    count = -(-n // max(1, SCRATCH_BYTES // (plan.rows * plan.row_room * each)))
    return [range(group * n // count, (group + 1) * n // count) for group in range(count)]


def _keep_books(job: Sections, books: Tensor) -> None:
    """Divide `books` into sizes and positions of rows, and doublings and starts of sections."""
    rows = 4 * job.n * job.rows
    parts = books.split((rows, rows, 8 * job.n, 8 * job.n))
    job.sizes, job.firsts, job.doublings, job.starts = (part.data_ptr() for part in parts)


def _abreast(head_dim: int) -> int:
    """Return VECTORS of octets.cu: number of vectors that a warp holds."""
    holders = -(-head_dim // (8 if head_dim <= 256 else 16))
    return 32 // max(4, 1 << (holders - 1).bit_length())


def _frequencies() -> tuple[Entries, Entries]:
    """Return each symbol's frequency, and the sum of earlier symbols' frequencies, both [tables, 256]."""
    often = family()[TABLES].astype(np.uint32)
    return often, np.cumsum(often, axis=1, dtype=np.uint32) - often


def _encoding() -> Entries:
    """Return the tables for encoding, [tables, 256, 2], as whole.cu describes them."""
    often, before = _frequencies()
    entries = before << np.uint32(12) | often
    entries[:, ESCAPE] |= np.uint32(1 << 31)
    rare = often == 0
    entries = np.where(rare, entries[:, ESCAPE:], entries)
    often = np.where(rare, often[:, ESCAPE:], often)
    inverses = np.minimum((1 << 32) // often.astype(np.uint64), (1 << 32) - 1).astype(np.uint32)
    return np.stack([entries, inverses], axis=2)


def _decoding() -> npt.NDArray[np.uint8]:
    """Return the tables for decoding as bytes, as whole.cu describes them."""
    often, before = _frequencies()
    symbols = np.tile(np.arange(256, dtype=np.uint8), len(often))
    slots = np.repeat(symbols, often.ravel()).reshape(len(often), SCALE)
    return np.concatenate([slots.ravel(), (often << np.uint32(16) | before).ravel().view(np.uint8)])
