"""Calibrated sections by CUDA kernels, and cuBLAS between them: `manthan.codec.cpu.klt` on a GPU.

Blocks are handled in groups, and within a group some rows (a layer's keys, or values) at a time, which bounds the
memory between two kernels. Encoding a group: rows are gathered and multiplied by the transform. After all rows, each
row is entropy-coded into separate room. Then the positions of the words in the blocks are known.

The entropy coder writes the CPU's words for equal integers, and either backend reads the other's blocks. The integers
may differ: sums are rounded in different steps, and to fp16 before the rounding to whole numbers. One integer in some
hundreds or thousands differs by 1. Decoded numbers differ from the CPU's by about 2**-12 of their distance from the
mean.
"""

import ctypes
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from manthan.codec.base import Dtype, Kind
from manthan.codec.block import BlockFormat
from manthan.codec.cpu.klt import MOST_DOUBLINGS
from manthan.codec.cpu.rans import VERSION, streams_of
from manthan.codec.errors import ProfileError
from manthan.codec.gpu.cuda_codec import Job, addresses, constants, exact_jobs, is_aligned, sources
from manthan.codec.gpu.klt_tables import RowTables, Transforms
from manthan.codec.gpu.nvrtc import ALONE, Module
from manthan.codec.gpu.paged import GOOD, Batch, Form, PagedCodec, PagedLayout
from manthan.codec.profile import Profile
from manthan.codec.rope import Rope

SCRATCH_BYTES = 256 * 2**20
"""Temporaries of a group of blocks, without the products'."""
ENCODING, DECODING = 3, 2
"""Bytes of temporaries for each number."""
PRODUCTS_AT_ONCE = 2**24
"""Numbers of rows multiplied at once: 2 bytes each for encoding, 4 for decoding."""
WORD_NUMBERS = 2
"""Numbers of a row for each word of room. A row with more words doubles the section's steps."""
ROW_THREADS = 1024
KINDS: tuple[Kind, ...] = ("key", "value")
ALL = slice(None)
SOURCES = (
    "common.cu",
    "exact.cu",
    "seal.cu",
    "sections.cu",
    "runs.cu",
    "coder.cu",
    "rows.cu",
    "quads.cu",
    "transform.cu",
)


class Sections(ctypes.Structure):
    """`struct Sections` of sections.cu."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("caches", "block_ids", "offsets", "codes", "headers", "status")),
        *((name, ctypes.c_uint64) for name in ("nbytes", "turns", "mean", "gain", "tables", "table_of", "vectors")),
        *((name, ctypes.c_uint64) for name in ("back", "numbers", "words", "states", "sizes", "places", "far")),
        *((name, ctypes.c_uint64) for name in ("fronts", "doublings", "starts")),
        ("block_stride", ctypes.c_int64),
        ("at", ctypes.c_int64 * 2),
        ("head_stride", ctypes.c_int32),
        ("token_stride", ctypes.c_int32),
        *((name, ctypes.c_int64) for name in ("tables_nbytes", "pool", "head_nbytes", "start")),
        ("limits", ctypes.c_int64 * 2),
        ("parts", ctypes.c_int64 * 2),
        ("fronts_nbytes", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("n", "layers", "heads", "tokens", "streams", "first_token")),
        *((name, ctypes.c_int32) for name in ("block_tokens", "first_row", "rows", "width")),
        ("room", ctypes.c_uint32),
        ("rope_scale", ctypes.c_float),
    )

    @classmethod
    def plan(cls, layout: PagedLayout, caches: Tensor, form: Form, exact: int, rope: Rope) -> Self:
        """Return the job for the sections of lossy tokens. caches: `addresses`."""
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
        )

    def of(self, batch: Batch, codes: Tensor, some: slice = ALL) -> Self:
        """Return a copy of the job for blocks `some` of a batch."""
        job = type(self).from_buffer_copy(self)
        job.block_ids, job.offsets = batch.block_ids[some].data_ptr(), batch.offsets[some].data_ptr()
        job.headers, job.turns = batch.headers[some].data_ptr(), batch.turns[some].data_ptr()
        job.status, job.nbytes = batch.status[some].data_ptr(), batch.nbytes[some].data_ptr()
        job.codes, job.n = codes.data_ptr(), len(batch.block_ids[some])
        return job


class KltPlan(NamedTuple):
    """Arguments of the kernels for blocks of a form.

    exact: exact sections. sections: None if all tokens are exact.
    seal: without a header if the header is written earlier.
    """

    exact: list[Job]
    sections: Sections | None
    seal: Job


class Group:
    """Blocks handled together, and the memory between the kernels.

    job: arguments of the kernels, with all rows. numbers: before or after rounding, float16 [rows, C, tokens of all
    blocks and up to 7 more]. vectors: some rows before the transform, float16, or after the inverse, float32: [rows,
    same tokens, C].
    """

    def __init__(self, job: Sections, components: int, vectors: torch.dtype, device: torch.device) -> None:
        rows, self.job = job.rows, job
        job.width = -(-job.n * job.tokens // 8) * 8
        self.at_once = min(rows, max(1, PRODUCTS_AT_ONCE // (components * job.width)))
        self.numbers = torch.empty((rows, components, job.width), dtype=torch.float16, device=device)
        self.vectors = torch.empty((self.at_once, job.width, components), dtype=vectors, device=device)
        self._zeros = torch.zeros((2, job.n, 2), dtype=torch.int32, device=device)
        self._books = torch.empty(job.n * (2 * rows + 2), dtype=torch.int32, device=device)
        sizes, places, starts = self._books.split((job.n * rows, job.n * rows, job.n * 2))
        job.numbers, job.sizes, job.places, job.starts = (x.data_ptr() for x in (self.numbers, sizes, places, starts))
        job.doublings, job.far = (zeros.data_ptr() for zeros in self._zeros)

    def pieces(self) -> Iterator[tuple[slice, Sections]]:
        """Yield all rows in pieces of one multiplication, with a job for each piece."""
        for first in range(0, self.job.rows, self.at_once):
            job = Sections.from_buffer_copy(self.job)
            job.first_row, job.rows = first, min(self.at_once, job.rows - first)
            yield slice(first, first + job.rows), job


class KltPagedCodec(PagedCodec):
    """`PagedCodec` for calibrated codecs, on a CUDA device of compute capability 8.0 or newer.

    The blocks are of keys and values, or of latents. Raises CompileError, ProfileError.
    """

    layout: PagedLayout

    def __init__(self, layout: PagedLayout, format: BlockFormat) -> None:
        profile = format.facts.profile
        if not isinstance(profile, Profile):
            raise ProfileError(f"codec {format.codec} needs a profile of the model: run `manthan calibrate MODEL`.")
        super().__init__(layout, format, profile.info.rope)
        self._coded, self._rope = layout.coded, profile.info.rope or Rope(())
        self._components, self._kinds = self._coded.heads * self._coded.head_dim, len(self._coded.ats)
        self._addresses = addresses(layout)
        self._transforms = Transforms.of(profile, format.codec, self.device)
        self._tables = RowTables.of(profile, format.codec, self.device)
        self._plans: dict[int, KltPlan] = {}
        largest = max(self._tables.encoding.nbytes, self._tables.decoding.nbytes)
        properties: Any = torch.cuda.get_device_properties(self.device)  # more attributes than in the stubs
        self._shared = largest <= properties.shared_memory_per_block_optin
        shape, pairs = (self._coded.head_dim, layout.dtype), (len(self._rope.frequencies), self._rope.interleaved)
        self._kernels = _module(*shape, self.device, is_aligned(layout), self._shared, *pairs, self._kinds)

    def encode(self, batch: Batch, codes: Tensor) -> None:
        """Set a status to a vector's index also if the vector is 32,768 or more steps from the profile's mean.

        Because numbers are fp16 between kernels, such sections are encoded on the CPU only. For a layer with an
        infinite number, the status may be the first vector's index: all heads are transformed together.
        """
        plan = self._plan(batch.exact)
        batch.status.fill_(GOOD)
        for kept in plan.exact:
            self._launch_exact("encode_exact", kept, batch, codes)
        if plan.sections is not None:
            with torch.inference_mode():
                for job in self._jobs(plan.sections, batch, codes, ENCODING):
                    self._encode(job)
        self._launch_one("seal", plan.seal, batch, codes)

    def verify(self, batch: Batch, codes: Tensor) -> None:
        plan = self._plan(batch.exact)
        if plan.sections is None:
            self._launch_one("verify", plan.seal, batch, codes)
        else:
            self._launch("verify_sections", plan.sections.of(batch, codes), ALONE)

    def decode(self, batch: Batch, codes: Tensor) -> None:
        """Set a status to 0 or more also for bytes never written by an encoder."""
        plan = self._plan(batch.exact)
        if plan.sections is not None:
            with torch.inference_mode():
                for job in self._jobs(plan.sections, batch, codes, DECODING):
                    self._decode(job)
        for kept in plan.exact:
            self._launch_exact("decode_exact", kept, batch, codes)

    def _encode(self, job: Sections) -> None:
        transforms, group = self._transforms, Group(job, self._components, torch.float16, self.device)
        job.room = self._components * job.tokens // WORD_NUMBERS
        words = torch.empty((job.rows, job.n, job.room), dtype=torch.int16, device=self.device)
        states = torch.empty((job.n, job.rows, job.streams), dtype=torch.int32, device=self.device)
        job.words, job.states = words.data_ptr(), states.data_ptr()
        job.vectors, job.gain = group.vectors.data_ptr(), transforms.gain.data_ptr()
        for rows, part in group.pieces():
            self._launch("gather", part, part.rows * part.heads)
            vectors = group.vectors[: part.rows].transpose(1, 2)
            torch.bmm(transforms.forward[rows].transpose(1, 2), vectors, out=group.numbers[rows])
        self._launch_rows("encode_rows", job, self._tables.encoding, self._tables.of_components[0])
        warps = job.n * self._kinds * (ROW_THREADS // 32)
        self._kernels.launch("double_steps", job, warps, threads=ROW_THREADS)
        self._launch("lay_out", job, ALONE)
        self._launch("pack", job, job.rows)

    def _decode(self, job: Sections) -> None:
        transforms, group = self._transforms, Group(job, self._components, torch.float32, self.device)
        job.back, job.gain = group.vectors.data_ptr(), transforms.gain_back.data_ptr()
        self._launch("find_rows", job, ALONE)
        self._launch_rows("decode_rows", job, self._tables.decoding, self._tables.of_components[1])
        for rows, part in group.pieces():
            numbers, out = group.numbers[rows].transpose(1, 2), group.vectors[: part.rows]
            torch.bmm(numbers, transforms.inverse[rows], out_dtype=torch.float32, out=out)
            self._launch("scatter", part, part.rows * part.heads)

    def _jobs(self, plan: Sections, batch: Batch, codes: Tensor, each: int) -> Iterator[Sections]:
        """Yield the batch in even groups of at most SCRATCH_BYTES, or of a single block. each: bytes for a number."""
        n, most = len(batch.block_ids), max(1, SCRATCH_BYTES // (plan.rows * self._components * plan.tokens * each))
        groups = -(-n // most)
        for group in range(groups):
            yield plan.of(batch, codes, slice(group * n // groups, (group + 1) * n // groups))

    def _launch(self, name: str, job: Sections, warps: int) -> None:
        """Launch a kernel. warps: the most useful warps for a block of the batch."""
        self._kernels.launch(name, job, job.n * warps)

    def _launch_rows(self, name: str, job: Sections, tables: Tensor, of_components: Tensor) -> None:
        """Launch a kernel with a warp for each row, or for several rows of fewer streams."""
        job.tables, job.tables_nbytes, job.table_of = tables.data_ptr(), tables.nbytes, of_components.data_ptr()
        warps = job.rows * -(-job.n * job.streams // 32) * (ROW_THREADS // 32)
        shared = tables.nbytes if self._shared else 0
        self._kernels.launch(name, job, warps, threads=ROW_THREADS, shared=shared)

    def _launch_exact(self, name: str, job: Job, batch: Batch, codes: Tensor) -> None:
        of_batch = job.of(batch, codes)
        self._kernels.launch(name, of_batch, of_batch.n * of_batch.kinds * of_batch.layers * of_batch.heads)

    def _launch_one(self, name: str, job: Job, batch: Batch, codes: Tensor) -> None:
        """A warp for each block."""
        of_batch = job.of(batch, codes)
        of_batch.sizes = batch.nbytes.data_ptr()
        self._kernels.launch(name, of_batch, of_batch.n * ALONE)

    def _plan(self, exact: int) -> KltPlan:
        if exact not in self._plans:
            layout, form = self.layout, self.form(exact)
            kept = exact_jobs(layout, self._addresses, form, exact)
            if exact == layout.tokens:
                self._plans[exact] = KltPlan(kept, None, kept[-1])
            else:
                sections = Sections.plan(self._coded, self._addresses, form, exact, self._rope)
                sections.mean, sections.pool = self._transforms.mean.data_ptr(), self._tables.pool
                self._plans[exact] = KltPlan(kept, sections, Job())
        return self._plans[exact]


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
) -> Module:
    """Return the kernels for vectors of `head_dim` numbers of `dtype`.

    Args:
        aligned: see `cuda_codec.constants`.
        shared: True if tables fit into a block's shared memory.
        pairs, interleaved: of RoPE.
        kinds: 1 for latents.
    """
    macros = {"KINDS": kinds, "SHARED_TABLES": int(shared), "PAIRS": pairs, "INTERLEAVED": int(interleaved)}
    macros |= {"SECTION_VERSION": VERSION, "MOST_DOUBLINGS": MOST_DOUBLINGS}
    return Module(f"{constants(head_dim, dtype, aligned, macros)}\n{sources(SOURCES)}", device)
