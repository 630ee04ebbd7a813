"""`manthan.codec.cpu.klt` on a GPU: CUDA kernels, and cuBLAS for the transforms.

Blocks are processed in runs of consecutive blocks; SCRATCH_BYTES bounds a run's temporaries. The profile's groups are
heads of consecutive layers that are encoded together. One call of cuBLAS transforms several consecutive groups with
equal numbers of components. CPU and GPU decode each other's blocks, and encode equal integers to equal words. But a GPU
adds in a different order and rounds transformed numbers to fp16, so that one integer in some hundreds differs by 1.

The transformed numbers are encoded in parts: a coarse base, then refinements. With the last refinement, the
restored KV has the same bits as before; only the CPU writes and reads that part. Of a block that has it, a GPU decodes
the parts before. A block has exact sections (any opaque bytes, RoPE's part of all tokens for latents, and the first
`exact` tokens), and then one encoded section with the other tokens.
"""

import ctypes
from collections.abc import Iterator
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from manthan.codec.block import BlockFormat
from manthan.codec.cpu.klt import EXACT, MOST_K, PRESETS, streams_of
from manthan.codec.cpu.rans import VERSION
from manthan.codec.errors import ProfileError
from manthan.codec.gpu.cuda_codec import ALL, CudaCodec, Lossy, fields
from manthan.codec.gpu.nvrtc import ALONE
from manthan.codec.gpu.paged import Batch, Form, PagedLayout
from manthan.codec.profile import Group, Profile
from manthan.codec.tables import levels
from manthan.codec.tables.frequencies import SCALE

SCRATCH_BYTES = 256 * 2**20
"""Limit for the bytes of a run's temporaries, except arrays of a single call of cuBLAS. One block may exceed it."""
ENCODING, DECODING = 4, 2
"""Bytes of temporaries for each number of a block, to encode and to decode."""
PRODUCTS_AT_ONCE = 2**24
"""Limit for groups times components times tokens in one call of cuBLAS. One group may exceed it."""
NUMBERS_A_WORD = 4
"""A row has room for one 16-bit word per NUMBERS_A_WORD numbers. If a row needs more, the block's steps get coarser."""
LEVELS, TABLES = EXACT, levels.FALLING
BUCKETS = 128
"""Number of equal ranges of the SCALE slots of an rANS table.

A table for decoding has the index of the symbol at each range's first slot.
"""
ROW_THREADS = 1024
Bytes = npt.NDArray[np.uint8]
SOURCES = "common.cu", "exact.cu", "seal.cu", "coder.cu", "parts.cu", "quads.cu", "embedded.cu"


class LeveledSections(Lossy):
    """`struct LeveledSections` of parts.cu."""

    _fields_ = (
        *fields(ctypes.c_uint64, "ends groups vectors mean gain weigher offset table_of tables rows products numbers"),
        *fields(ctypes.c_uint64, "shifts steps levels words states sizes"),
        *fields(ctypes.c_int64, "tables_nbytes likely_at rest_at limit"),
        *fields(ctypes.c_int32, "all groups_count components streams first_group some width"),
    )

    def of(self, batch: Batch, buffer: Tensor, some: slice = ALL) -> Self:
        job = super().of(batch, buffer, some)
        job.ends, job.levels = batch.ends[some].data_ptr(), batch.levels[some].data_ptr()
        return job


class Model(NamedTuple):
    """Facts of a profile that the kernels use, on the device except `sizes`. parts.cu explains the other tensors.

    sizes: number of components (C) of each group. forward, inverse: the transforms and their inverses, a float16
    [groups, C, C] for each sequence of consecutive groups with equal C. gain, gain_back: factors of the numbers before
    the transform, and after the inverse. With them, the transforms, the inverses and the transformed numbers fit into
    float16.
    """

    sizes: list[int]
    groups: Tensor
    vectors: Tensor
    mean: Tensor
    gain: Tensor
    gain_back: Tensor
    weigher: Tensor
    offset: Tensor
    table_of: Tensor
    forward: list[Tensor]
    inverse: list[Tensor]

    @classmethod
    def of(cls, groups: tuple[Group, ...], kinds: int, device: torch.device) -> Self:
        """Return the facts of `groups`; the tensor `groups` is empty until `with_tokens`.

        kinds: 2 for keys and values, 1 for latents. Raises ProfileError for a singular transform.
        """
        vectors = [
            layer << 16 | kind << 15 | each
            for first, layers, head, heads in (group.place for group in groups)
            for layer in range(first, first + layers)
            for kind in range(kinds)
            for each in range(head, head + heads)
        ]
        sizes = [group.mean.size for group in groups]
        weighers = [np.split(group.weigher, [group.mean.size, len(group.weigher) - 1]) for group in groups]
        gains_back, forward, inverse = [], list[Tensor](), list[Tensor]()
        for group in groups:
            there = torch.from_numpy(group.inverse)
            largest = torch.exp2(torch.ceil(torch.log2(there.abs().amax(0))))
            gains_back.append(largest)
            inverse.append((there / largest).half())
            forward.append(torch.from_numpy(group.deviations[:, None] * group.forward).half())
        tables = np.concatenate([group.tables for group in groups]).astype(np.int16)
        widths = tables % np.int16(len(levels.WIDTHS))
        flat = {
            "vectors": np.array(vectors, np.uint32).view(np.int32),
            "mean": np.concatenate([group.mean for group in groups]),
            "gain": 1 / np.concatenate([group.deviations for group in groups]),
            "weigher": np.concatenate([weigher[part] for part in range(3) for weigher in weighers]),
            "offset": np.concatenate([(group.mean - group.center) / group.deviations for group in groups]),
            "table_of": tables - widths | widths << np.int16(8),  # first table of the same shape, and the width
        }
        arrays = {name: torch.from_numpy(np.ascontiguousarray(array)).to(device) for name, array in flat.items()}
        starts = [n for n in range(len(sizes)) if not n or sizes[n] != sizes[n - 1]]
        runs = [slice(start, end) for start, end in zip(starts, [*starts[1:], len(sizes)], strict=True)]
        return cls(
            sizes=sizes,
            groups=torch.empty(0),
            gain_back=torch.cat(gains_back).to(device),
            forward=[torch.stack(forward[run]).to(device) for run in runs],
            inverse=[torch.stack(inverse[run]).to(device) for run in runs],
            **arrays,
        )

    def with_tokens(self, tokens: int) -> Self:
        """Return a copy for sections of `tokens` tokens, with `groups` filled. All other tensors are shared."""
        streams = [streams_of(size * tokens) for size in self.sizes]
        told = zip(np.cumsum([0, *self.sizes]), self.sizes, streams, np.cumsum([0, *streams]), strict=False)
        return self._replace(groups=torch.tensor(list(told), dtype=torch.int32, device=self.vectors.device))


def device_nbytes(profile: Profile) -> int:
    """Return about how many bytes of GPU memory the codec takes for a rank's profile, with temporaries."""
    return 2 * SCRATCH_BYTES + 2 * sum(group.transform.nbytes for group in profile.groups)


class Tables(NamedTuple):
    """Tables of the entropy coder.

    there: uint8, on the device: tables of the base, tables of the refinements, and the rest. For encoding, the rest is
    the inverses of the frequencies; for decoding, `levels.centres`. likely_at, rest_at: byte offsets of the tables of
    the refinements, and of the rest.
    """

    there: Tensor
    likely_at: int
    rest_at: int

    @classmethod
    def of(cls, base: Bytes, rest: Any, device: torch.device) -> Self:
        """Return the tables `base`, the refinements' tables, which this computes, and `rest`."""
        parts = [np.ascontiguousarray(part).view(np.uint8).ravel() for part in (base, levels.edges(), rest)]
        parts = [np.pad(part, (0, -part.size % 16)) for part in parts]
        there = torch.from_numpy(np.concatenate(parts)).to(device)
        return cls(there, parts[0].size, parts[0].size + parts[1].size)


@lru_cache
def encoding_tables(device: torch.device) -> Tables:
    """Return the tables for encoding, equal for all models."""
    told, entries = list[int](), list[Any]()
    for often in levels.base().astype(np.uint32):
        symbols = np.flatnonzero(often)  # consecutive symbols, then the one that stands for all others
        told.append(sum(map(len, entries)) | int(symbols[0]) << 16 | len(symbols) - 1 << 24)
        entries.append((np.cumsum(often, dtype=np.uint32) - often << np.uint32(12) | often)[symbols])
    frequencies = np.arange(SCALE, dtype=np.uint64)
    inverses = np.minimum((1 << 32) // np.maximum(frequencies, 1), (1 << 32) - 1).astype(np.uint32)
    return Tables.of(np.concatenate([np.array(told, np.uint32), *entries]).view(np.uint8), inverses, device)


@lru_cache
def decoding_tables(device: torch.device) -> Tables:
    """Return the tables for decoding, equal for all models."""
    base, made = levels.base(), list[Bytes]()
    at = [4 * len(base)]
    for often in base:
        symbols = np.flatnonzero(often)
        before = np.append(0, np.cumsum(often[symbols], dtype=np.uint32)).astype(np.uint16)
        ranks = np.searchsorted(before, np.arange(0, SCALE, SCALE // BUCKETS), side="right") - 1
        head = np.array([symbols[0], len(symbols) - 1, *ranks], np.uint8)
        made.append(np.concatenate([head, before.view(np.uint8)]))
        at.append(at[-1] + made[-1].size)
    return Tables.of(np.concatenate([np.array(at[:-1], np.uint32).view(np.uint8), *made]), levels.centres(), device)


class KltPagedCodec(CudaCodec[tuple[LeveledSections, Model]]):
    """`PagedCodec` for calibrated codecs, on one CUDA device of compute capability 8.0 or newer.

    A block's status becomes 0 if it has infinities, NaNs, or numbers too far from the profile's mean. These exceed fp16
    when divided by the profile's deviations, or make the block too large even with the largest steps.

    Raises CompileError, ProfileError.
    """

    def __init__(self, layout: PagedLayout, format: BlockFormat) -> None:
        profile = format.facts.profile
        if not isinstance(profile, Profile) or not profile.groups:
            raise ProfileError(f"codec {format.codec} needs a profile of the model: run `manthan calibrate MODEL`.")
        self._level = PRESETS[format.codec].level
        if self._level == EXACT:
            raise ProfileError(f"codec {format.codec} has no GPU version: its last refinement is for the CPU only.")
        macros: dict[str, object] = {"BUCKETS": BUCKETS, "SECTION_VERSION": VERSION, "MOST_K": MOST_K, "LEVELS": LEVELS}
        macros |= {
            "TABLES": TABLES,
            "FINE": levels.FINE,
            "WIDTHS": len(levels.WIDTHS),
            "NUMBERS_A_WORD": NUMBERS_A_WORD,
        }
        super().__init__(layout, format, profile.info.rope, SOURCES, macros)
        self._profile = profile
        self._encoding, self._decoding = encoding_tables(self.device), decoding_tables(self.device)

    def _lossy(self, form: Form, exact: int) -> tuple[LeveledSections, Model]:
        model = self._model.with_tokens(self.layout.tokens - exact)
        job = LeveledSections.lossy(self.layout, self._addresses, form, exact, self._rope, form.starts[-1])
        job.limit, job.all, job.groups_count = form.sizes[-1], self._level + 1, len(model.sizes)
        job.components, job.streams = sum(model.sizes), int(model.groups[:, 2].sum())
        for name in ("groups", "vectors", "mean", "weigher", "offset", "table_of"):
            setattr(job, name, getattr(model, name).data_ptr())
        return job, model

    def _encode_lossy(self, lossy: tuple[LeveledSections, Model], batch: Batch, buffer: Tensor) -> None:
        with torch.inference_mode():
            for job in self._jobs(lossy[0], batch, buffer, ENCODING):
                self._encode(job, lossy[1])

    def _verify_lossy(self, lossy: tuple[LeveledSections, Model], batch: Batch, buffer: Tensor) -> None:
        job = lossy[0].of(batch, buffer)
        self._launch("find_parts", job, ALONE)
        self._launch("verify_parts", job, LEVELS * ALONE)

    def _decode_lossy(self, lossy: tuple[LeveledSections, Model], batch: Batch, buffer: Tensor) -> None:
        with torch.inference_mode():
            for job in self._jobs(lossy[0], batch, buffer, DECODING):
                self._decode(job, lossy[1])

    def _encode(self, job: LeveledSections, model: Model) -> None:
        numbers, _ = kept = self._books(job)
        room = job.n * LEVELS * (job.components * job.tokens // NUMBERS_A_WORD)
        words = torch.empty(room, dtype=torch.int16, device=self.device)
        job.words, job.gain = words.data_ptr(), model.gain.data_ptr()
        at = 0
        for some, forward, part in self._pieces(job, model.forward):
            size = forward.shape[1]
            rows = torch.empty((some, job.width, size), dtype=torch.float16, device=self.device)
            part.rows = rows.data_ptr()
            self._launch("gather", part, some * size // self._coded.head_dim)
            self._launch("weigh", part, some * job.tokens)
            out = numbers[at : at + some * size].view(some, size, job.width)
            torch.bmm(forward.transpose(1, 2), rows.transpose(1, 2), out=out)
            at += some * size
        self._launch_rows("encode_rows", job, self._encoding)
        self._kernels.launch("double_steps", job, job.n * (ROW_THREADS // 32), threads=ROW_THREADS)
        self._launch("lay_out", job, ALONE)
        self._launch("pack", job, job.all * job.groups_count)
        self._launch("seal_parts", job, job.all * ALONE)
        del kept

    def _decode(self, job: LeveledSections, model: Model) -> None:
        numbers, _ = kept = self._books(job)
        job.gain = model.gain_back.data_ptr()
        self._launch("find_rows", job, ALONE)
        self._launch_rows("decode_rows", job, self._decoding)
        at = 0
        for some, inverse, part in self._pieces(job, model.inverse):
            size = inverse.shape[1]
            placed = numbers[at : at + some * size].view(some, size, job.width)
            products = torch.empty((some, job.width, size), dtype=torch.float32, device=self.device)
            torch.bmm(placed.transpose(1, 2), inverse, out_dtype=torch.float32, out=products)
            part.products = products.data_ptr()
            self._launch("scatter", part, some * size // self._coded.head_dim)
            at += some * size
        del kept

    def _books(self, job: LeveledSections) -> tuple[Tensor, Tensor]:
        """Return two tensors that kernels share, to be kept until the last launch, and set their addresses in the job.

        Returns: components as float16 [components, width], where width is blocks times tokens, rounded up to a multiple
        of 8; bytes for the steps of blocks (k), the states of rANS streams, the sizes of rows, and the shifts. There is
        a shift j for each token and group, which makes the token's step 2**(j / 3) times as large.
        """
        job.width = -(-job.n * job.tokens // 8) * 8
        numbers = torch.empty((job.components, job.width), dtype=torch.float16, device=self.device)
        counts = job.n, job.groups_count * job.width, job.n * LEVELS * job.streams, job.n * LEVELS * job.groups_count
        books = torch.zeros(4 * (counts[0] + counts[2] + counts[3]) + counts[1], dtype=torch.uint8, device=self.device)
        job.numbers, job.steps = numbers.data_ptr(), books.data_ptr()
        job.states = job.steps + 4 * counts[0]
        job.sizes = job.states + 4 * counts[2]
        job.shifts = job.sizes + 4 * counts[3]
        return numbers, books

    def _pieces(self, job: LeveledSections, transforms: list[Tensor]) -> Iterator[tuple[int, Tensor, LeveledSections]]:
        """Yield the groups that cuBLAS transforms at once: number of groups, their transforms, and a job for them."""
        first = 0
        for run in transforms:
            at_once = max(1, PRODUCTS_AT_ONCE // (run.shape[1] * job.width))
            for start in range(0, len(run), at_once):
                part, some = LeveledSections.from_buffer_copy(job), run[start : start + at_once]
                part.first_group, part.some = first + start, len(some)
                yield len(some), some, part
            first += len(run)

    def _jobs(self, lossy: LeveledSections, batch: Batch, buffer: Tensor, each: int) -> Iterator[LeveledSections]:
        """Yield jobs for runs of about equal length, bounded by SCRATCH_BYTES. each: temporary bytes of a number."""
        numbers = lossy.components * lossy.tokens
        n, most = len(batch.block_ids), max(1, SCRATCH_BYTES // (numbers * each))
        runs = -(-n // most)
        for run in range(runs):
            yield lossy.of(batch, buffer, slice(run * n // runs, (run + 1) * n // runs))

    def _launch(self, name: str, job: LeveledSections, warps: int) -> None:
        """Launch a kernel. warps: maximum number of warps for one KV block of the batch."""
        self._kernels.launch(name, job, job.n * warps)

    def _launch_rows(self, name: str, job: LeveledSections, tables: Tables) -> None:
        """Launch a kernel in which a warp takes one group of one KV block, or of several if their streams fit in it.

        The kernel has a thread block for each group of each KV block, but at most as many as the device holds at once.
        Thus few warps of a thread block may have work, but all multiprocessors have some.
        """
        job.tables, job.tables_nbytes = tables.there.data_ptr(), tables.there.nbytes
        job.likely_at, job.rest_at = tables.likely_at, tables.rest_at
        warps = job.n * job.groups_count * (ROW_THREADS // 32)
        self._kernels.launch(name, job, warps, threads=ROW_THREADS, shared=tables.there.nbytes)

    @cached_property
    def _model(self) -> Model:
        return Model.of(self._profile.groups, len(self._coded.ats), self.device)
