"""`manthan.codec.wht` by CUDA kernels: encoded bytes and decoded numbers equal the CPU's.

A row is a layer's keys or values; a run is one head's part of a row. Blocks are processed in groups, which bounds the
temporaries: quantized whole numbers and, while encoding, each row's 16-bit words of the entropy coder. A row's position
in the encoded block is known only after the earlier rows are encoded. A kernel, not the host, doubles the steps of a
section (all keys or all values) that exceeds its bound, so that the host never waits for the device.
"""

import ctypes
from functools import lru_cache
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from manthan.codec.base import Dtype, Kind
from manthan.codec.block import BlockFormat, sections
from manthan.codec.cpu.rans import MOST_DOUBLINGS, START, VERSION, streams_of
from manthan.codec.gpu.cuda_codec import Job, addresses, constants, exact_jobs, is_aligned, scales_of, sources
from manthan.codec.gpu.nvrtc import ALONE, Module
from manthan.codec.gpu.paged import GOOD, Batch, Form, PagedCodec, PagedLayout
from manthan.codec.rope import Rope
from manthan.codec.tables.frequencies import ESCAPE, SCALE, family
from manthan.codec.wht import (
    LIMIT_BITS,
    LIMITS,
    MEAN_BITS,
    PRESETS,
    ROW_STEP_END,
    TABLES,
    Parts,
)
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
SOURCES = (
    "common.cu",
    "exact.cu",
    "seal.cu",
    "sections.cu",
    "runs.cu",
    "octets.cu",
    "wht.cu",
    "coder.cu",
    "whole.cu",
)
ALL = slice(None)
KINDS: tuple[Kind, ...] = ("key", "value")

Entries = npt.NDArray[np.uint32]


class Sections(ctypes.Structure):
    """`struct Sections` of sections.cu."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("caches", "block_ids", "offsets", "buffer", "headers", "status")),
        *((name, ctypes.c_uint64) for name in ("nbytes", "turns", "words", "states", "sizes", "places")),
        *((name, ctypes.c_uint64) for name in ("far", "fronts", "doublings", "starts")),
        ("block_stride", ctypes.c_int64),
        ("at", ctypes.c_int64 * 2),
        ("head_stride", ctypes.c_int32),
        ("token_stride", ctypes.c_int32),
        *((name, ctypes.c_int64) for name in ("head_nbytes", "start", "kept_at")),
        ("limits", ctypes.c_int64 * 2),
        ("parts", ctypes.c_int64 * 2),
        ("fronts_nbytes", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("n", "layers", "heads", "tokens", "streams", "first_token")),
        *((name, ctypes.c_int32) for name in ("block_tokens", "rows", "kept_stride")),
        ("room", ctypes.c_uint32),
        ("rope_scale", ctypes.c_float),
    )

    @classmethod
    def plan(cls, paged: PagedLayout, caches: Tensor, form: Form, exact: int, rope: Rope) -> Self:
        """Return the job for the sections of lossy tokens, without a batch. caches: result of `addresses`."""
        layout = paged.coded
        layers, tokens, kinds = len(layout.caches), layout.tokens - exact, KINDS[: len(layout.ats)]
        return cls(
            caches=caches.data_ptr(),
            block_stride=layout.block_stride,
            at=tuple(at + exact * layout.token_stride for at in layout.ats),
            head_stride=layout.head_stride,
            token_stride=layout.token_stride,
            head_nbytes=form.header.nbytes,
            start=form.starts[-len(kinds)],
            limits=form.sizes[-len(kinds) :],
            layers=layers,
            heads=layout.heads,
            tokens=tokens,
            streams=streams_of(tokens * layout.heads * layout.head_dim),
            first_token=exact,
            block_tokens=layout.tokens,
            rows=len(kinds) * layers,
            rope_scale=rope.scale,
            **scales_of(paged, form),
        )

    def of(self, batch: Batch, buffer: Tensor, some: slice = ALL) -> Self:
        """Return a copy of the job for blocks `some` of a batch."""
        job = type(self).from_buffer_copy(self)
        job.block_ids, job.offsets = batch.block_ids[some].data_ptr(), batch.offsets[some].data_ptr()
        job.headers, job.turns = batch.headers[some].data_ptr(), batch.turns[some].data_ptr()
        job.status, job.nbytes = batch.status[some].data_ptr(), batch.nbytes[some].data_ptr()
        job.buffer, job.n = buffer.data_ptr(), len(batch.block_ids[some])
        return job


class Wht(ctypes.Structure):
    """`struct Wht` of wht.cu."""

    _fields_ = (
        ("all", Sections),
        *((name, ctypes.c_uint64) for name in ("fronts", "rounded", "spare", "encoding", "decoding")),
        *((name, ctypes.c_int64) for name in ("means_at", "row_steps_at", "scales_at")),
        ("tables_at", ctypes.c_int64 * 2),
        ("row_room", ctypes.c_uint32),
        ("limits", ctypes.c_uint32 * len(LIMITS)),
        ("one_token", ctypes.c_float),
        ("one_number", ctypes.c_float),
        ("key_step", ctypes.c_float),
        ("value_step", ctypes.c_float),
        ("abreast", ctypes.c_int32),
        ("staged", ctypes.c_int32),
    )

    @classmethod
    def plan(cls, paged: PagedLayout, format: BlockFormat, caches: Tensor, form: Form, exact: int, rope: Rope) -> Self:
        """Return the job for the sections of lossy tokens, without a batch. caches: result of `addresses`."""
        made, layout = cls(all=Sections.plan(paged, caches, form, exact, rope)), paged.coded
        all = made.all
        parts = [Parts.of(section) for section in sections(format.codec, format.shape, exact)[-len(layout.ats) :]]
        numbers = all.heads * layout.head_dim * all.tokens
        for kind, part in enumerate(parts):
            all.parts[kind], made.tables_at[kind] = part.end - START, part.tables.start - START
        all.fronts_nbytes = align16(max(all.parts))
        all.room = numbers
        made.means_at, made.row_steps_at = parts[0].means.start - START, parts[0].row_steps.start - START
        made.scales_at = parts[-1].scales.start - START
        made.row_room = -(-numbers // (OCTET * all.streams)) * OCTET * all.streams
        made.limits[:] = np.ceil(LIMITS * (layout.head_dim * all.tokens)).astype(np.int64).tolist()
        abreast, rest = divmod(all.tokens, all.streams)
        made.abreast = abreast if not rest and abreast in (1, 2, 4) and layout.head_dim <= 256 else 0
        preset = PRESETS[format.codec]
        made.key_step, made.value_step = preset.key_step, preset.value_step
        made.one_token, made.one_number = np.float32(1 / all.tokens), np.float32(1 / numbers)
        return made

    def of(self, batch: Batch, buffer: Tensor, some: slice = ALL) -> Self:
        """Return a copy of the job for blocks `some` of a batch."""
        job = type(self).from_buffer_copy(self)
        job.all = self.all.of(batch, buffer, some)
        return job

    def part(self, some: range, turns_nbytes: int) -> Self:
        """Return a copy for blocks `some` of the job. turns_nbytes: bytes of a block's cosines and sines."""
        job = type(self).from_buffer_copy(self)
        steps = {"block_ids": 8, "offsets": 8, "headers": self.all.head_nbytes, "status": 4, "nbytes": 8}
        steps |= {"turns": turns_nbytes, "sizes": 4 * self.all.rows, "places": 4 * self.all.rows}
        for name, step in (steps | {"doublings": 8, "starts": 8}).items():
            setattr(job.all, name, getattr(self.all, name) + some.start * step)
        job.all.n = len(some)
        return job


class Threads(NamedTuple):
    """Threads of a launch.

    warps: in a block of threads. shared: bytes of dynamic shared memory in a block of threads. blocks: most blocks of
    threads, 0 for no bound.
    """

    warps: int
    shared: int
    blocks: int = 0


class WhtPlan(NamedTuple):
    """Arguments of the kernels for blocks of one form.

    exact: jobs of the exact sections. rows: job of the lossy sections, None if all tokens are exact. seal: job of the
    kernel that writes header and checksum; without header, which `lay_out` writes, if `rows` is not None.
    """

    exact: list[Job]
    rows: Wht | None
    seal: Job


class WhtPagedCodec(PagedCodec):
    """`PagedCodec` for `manthan.codec.wht`, on a CUDA device of compute capability 8.0 or newer.

    Raises CompileError.
    """

    layout: PagedLayout

    def __init__(self, layout: PagedLayout, format: BlockFormat) -> None:
        super().__init__(layout, format, format.facts.rope)
        self._rope = format.facts.rope or Rope(())
        self._addresses, self._coded = addresses(layout), layout.coded
        self._tables = [torch.from_numpy(x.view(np.uint8)).to(self.device) for x in (_encoding(), _decoding())]
        self._most_shared: int = properties_of(self.device).shared_memory_per_block_optin
        self._plans: dict[int, WhtPlan] = {}
        self._shared = self._tables[1].nbytes <= self._most_shared
        shape, pairs = (self._coded.head_dim, layout.dtype), (len(self._rope.frequencies), self._rope.interleaved)
        kinds, scales = len(self._coded.ats), layout.scales.nbytes if layout.scales else 0
        self._kernels = _module(*shape, self.device, is_aligned(layout), self._shared, *pairs, kinds, scales)

    def encode(self, batch: Batch, buffer: Tensor) -> None:
        """Encode the batch. Magnitudes of 2**`wht.LIMIT` or more, in lossy tokens, are refused like infinities."""
        plan = self._plan(batch.exact)
        batch.status.fill_(GOOD)
        for kept in plan.exact:
            self._launch_exact("encode_exact", kept, batch, buffer)
        if plan.rows is not None:
            for some in _groups(plan.rows, len(batch.block_ids), ENCODING):
                self._encode(plan.rows.of(batch, buffer, slice(some.start, some.stop)))
        self._launch_one("seal", plan.seal, batch, buffer)

    def verify(self, batch: Batch, buffer: Tensor) -> None:
        plan = self._plan(batch.exact)
        if plan.rows is None:
            self._launch_one("verify", plan.seal, batch, buffer)
        else:
            job = plan.rows.all.of(batch, buffer)
            self._kernels.launch("verify_sections", job, job.n * ALONE)

    def decode(self, batch: Batch, buffer: Tensor) -> None:
        """Decode the batch. A good block's status becomes 0 if no encoder writes its bytes."""
        plan = self._plan(batch.exact)
        if plan.rows is not None:
            self._decode(plan.rows.of(batch, buffer), batch.turns[:1].nbytes)
        for kept in plan.exact:
            self._launch_exact("decode_exact", kept, batch, buffer)

    def _encode(self, job: Wht) -> None:
        all = job.all
        rows, threads = all.n * all.rows, self._rounding(job)
        rounded, words = (self._scratch(2 * rows * room) for room in (job.row_room, all.room))
        fronts, states = self._scratch(2 * all.n * all.fronts_nbytes), self._scratch(4 * rows * all.streams)
        spare = self._scratch(threads.blocks * 4 * all.heads * all.tokens * (self._coded.head_dim + 4))
        books, far = self._scratch(4 * (2 * rows + 4 * all.n)), self._scratch(8 * all.n).zero_()
        job.rounded, job.spare = rounded.data_ptr(), spare.data_ptr()
        job.fronts = all.fronts = fronts.data_ptr()
        all.words, all.states, all.far = words.data_ptr(), states.data_ptr(), far.data_ptr()
        _keep_books(all, books)
        blocks = min(rows, threads.blocks or rows)
        self._launch("round_rows", job, blocks * threads.warps, 32 * threads.warps, threads.shared)
        self._launch_words("encode_words", job, self._tables[0], ENCODE_THREADS, shared=True)
        kinds = all.rows // all.layers
        self._kernels.launch("double_steps", job, all.n * kinds * (ENCODE_THREADS // 32), threads=ENCODE_THREADS)
        for name, warps in (("lay_out", ALONE), ("pack", all.rows)):
            self._kernels.launch(name, all, all.n * warps)

    def _decode(self, job: Wht, turns_nbytes: int) -> None:
        """Decode. Only kernels that use `rounded` run for each group: launches take time of the model's thread."""
        all, threads, groups = job.all, self._restoring(job), _groups(job, job.all.n, DECODING)
        rounded = self._scratch(2 * max(map(len, groups), default=0) * all.rows * job.row_room)
        books = self._scratch(4 * all.n * (2 * all.rows + 4))
        job.rounded = rounded.data_ptr()
        _keep_books(all, books)
        self._kernels.launch("find_rows", all, all.n * ALONE)
        self._launch("check_fronts", job, 2 * all.n * ALONE)
        for some in groups:
            part = job.part(some, turns_nbytes)
            self._launch_words("decode_words", part, self._tables[1], DECODE_THREADS, shared=self._shared)
            self._launch("restore_rows", part, len(some) * all.rows * all.heads, 32 * threads.warps, threads.shared)

    def _scratch(self, nbytes: int) -> Tensor:
        """Return uninitialized memory of the current CUDA stream. Kernels launched so far may use it after `del`."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def _rounding(self, job: Wht) -> Threads:
        """Return the threads of `round_rows`. A row is in shared memory if it fits, else in `spare`."""
        all, dim = job.all, self._coded.head_dim
        warps, vectors = min(WARPS, all.heads), all.heads * all.tokens
        shared = 4 * (2 * _even(vectors) + _even(all.heads) + warps * dim)
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
        each = fixed + 2 * job.all.tokens * (dim + 8)
        job.staged = not job.abreast and each <= self._most_shared
        if not job.staged:
            return Threads(WARPS, WARPS * fixed)
        warps = max(1, min(WARPS, STAGE_BYTES // each))
        return Threads(warps, warps * each)

    def _launch(self, name: str, job: Wht, warps: int, threads: int = 0, shared: int = 0) -> None:
        if threads:
            self._kernels.launch(name, job, warps, threads=threads, shared=shared)
        else:
            self._kernels.launch(name, job, warps)

    def _launch_words(self, name: str, job: Wht, tables: Tensor, threads: int, *, shared: bool) -> None:
        """Launch a kernel with a busy warp for each row, or for several rows if their streams fit into one warp.

        The launch has a block of threads for each busy warp, so that rows spread over all multiprocessors.
        """
        all = job.all
        job.encoding = job.decoding = tables.data_ptr()
        warps = all.rows * -(-all.n * all.streams // 32) * (threads // 32)
        self._kernels.launch(name, job, warps, threads=threads, shared=tables.nbytes if shared else 0)

    def _launch_exact(self, name: str, job: Job, batch: Batch, buffer: Tensor) -> None:
        of_batch = job.of(batch, buffer)
        self._kernels.launch(name, of_batch, of_batch.n * of_batch.kinds * of_batch.layers * of_batch.heads)

    def _launch_one(self, name: str, job: Job, batch: Batch, buffer: Tensor) -> None:
        """Launch a kernel with a block of threads for each encoded block."""
        of_batch = job.of(batch, buffer)
        of_batch.sizes = batch.nbytes.data_ptr()
        self._kernels.launch(name, of_batch, of_batch.n * ALONE)

    def _plan(self, exact: int) -> WhtPlan:
        if exact not in self._plans:
            layout, form = self.layout, self.form(exact)
            kept = exact_jobs(layout, self._addresses, form, exact)
            if exact == layout.tokens:
                self._plans[exact] = WhtPlan(kept, None, kept[-1])
            else:
                rows = Wht.plan(layout, self.format, self._addresses, form, exact, self._rope)
                self._plans[exact] = WhtPlan(kept, rows, Job())
        return self._plans[exact]


def properties_of(device: torch.device) -> Any:
    """Return the device's properties as Any, because PyTorch's type stubs lack some of them."""
    return torch.cuda.get_device_properties(device)


def _groups(plan: Wht, n: int, each: int) -> list[range]:
    """Return even ranges of `n` blocks, each of one block or within SCRATCH_BYTES. each: bytes for a number."""
    count = -(-n // max(1, SCRATCH_BYTES // (plan.all.rows * plan.row_room * each)))
    return [range(group * n // count, (group + 1) * n // count) for group in range(count)]


def _keep_books(all: Sections, books: Tensor) -> None:
    """Divide `books` into sizes and positions of rows, and doublings and starts of sections."""
    rows = 4 * all.n * all.rows
    parts = books.split((rows, rows, 8 * all.n, 8 * all.n))
    all.sizes, all.places, all.doublings, all.starts = (part.data_ptr() for part in parts)


def _abreast(head_dim: int) -> int:
    """Return VECTORS of octets.cu: number of vectors that a warp holds."""
    holders = -(-head_dim // (8 if head_dim <= 256 else 16))
    return 32 // max(4, 1 << (holders - 1).bit_length())


def _even(count: int) -> int:
    """Return `count`, rounded up to a multiple of 4."""
    return -(-count // 4) * 4


@lru_cache
def _module(
    head_dim: int,
    dtype: Dtype,
    device: torch.device,
    aligned: bool,
    shared: bool,
    pairs: int,
    interleaved: bool,
    kinds: int,
    scales: int,
) -> Module:
    """Return the kernels for vectors of `head_dim` numbers of `dtype`. aligned: see `cuda_codec.constants`.

    shared: True if the decoding tables fit into shared memory. pairs, interleaved: number and order of RoPE's pairs.
    kinds: 2 for keys and values, 1 for latents. scales: bytes of one scale of a latent, 0 without scales.
    """
    macros = {
        "KINDS": kinds,
        "SCALES": scales,
        "SHARED_TABLES": int(shared),
        "PAIRS": pairs,
        "INTERLEAVED": int(interleaved),
        "MEAN_BITS": MEAN_BITS,
        "SECTION_VERSION": VERSION,
        "MOST_DOUBLINGS": MOST_DOUBLINGS,
        "ROW_STEP_END": ROW_STEP_END,
        "WHT_LIMIT_BITS": f"{LIMIT_BITS}u",
    }
    return Module(f"{constants(head_dim, dtype, aligned, macros)}\n{sources(SOURCES)}", device)


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
