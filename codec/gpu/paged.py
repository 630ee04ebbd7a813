"""Interface of the GPU codecs: blocks of a paged KV cache to encoded blocks in the same device's memory, and back.

A codec reads and writes the paged tensors of all layers directly. Encoded blocks are those of `manthan.codec.wire`:
header with checksum, sections (each some of a block's numbers in a codec), and refinements if the codec has any.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from manthan.codec.base import Dtype
from manthan.codec.block import BlockFormat, BlockShape, Scales
from manthan.codec.cpu.exact import EXACT
from manthan.codec.errors import ShapeError
from manthan.codec.rope import Rope
from manthan.codec.wire import MARK_AT, BlockHeader, block_nbytes, field_cause, heads, starts

GOOD = 2**31 - 1
"""Status of a block without a fault."""
ALIGNMENT = 16
"""Alignment of sections and blocks, in bytes."""
BAD_CHECKSUM = -1
BAD_HEADER = -2
"""Status of an unexpected header: BAD_HEADER minus the offset of the first unexpected byte."""

DTYPES = {torch.bfloat16: Dtype.BFLOAT16, torch.float16: Dtype.FLOAT16, torch.float32: Dtype.FLOAT32}
FP8 = {Dtype.FLOAT8_E4M3: torch.float8_e4m3fn, Dtype.FLOAT8_E5M2: torch.float8_e5m2}
Numbers: TypeAlias = Sequence[int] | npt.NDArray[np.int64]

KEPT_BYTES = 2**26
"""Most bytes of tables of cosines and sines kept. Tables of a session's later blocks are computed at each call."""
UNITS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@dataclass(frozen=True)
class PagedLayout:
    """Layout of the vectors of a paged cache.

    caches: a tensor for each layer, all of one dtype (bfloat16, float16, float32, or uint8 with fp8's bits) on one
    device. A vector is contiguous. In block i, the vector of head h and token t begins at element `at + i *
    block_stride + h * head_stride + t * token_stride`, where `at` is key_at or value_at. value_at: None without values.
    fp8: dtype of the numbers if fp8. latents: layout of the latents (MLA), each cut into pieces that stand as heads of
    keys; the outer layout's keys are then the part with RoPE. opaque: layout of further raw bytes in the same encoded
    blocks. scales: layout of the latents' scales, see `BlockShape`.
    """

    caches: tuple[torch.Tensor, ...]
    heads: int
    tokens: int
    head_dim: int
    block_stride: int
    head_stride: int
    token_stride: int
    key_at: int
    value_at: int | None
    fp8: Dtype | None = None
    latents: "PagedLayout | None" = None
    opaque: "RawLayout | None" = None
    scales: Scales | None = None

    @property
    def dtype(self) -> Dtype:
        """Dtype of the numbers."""
        return self.fp8 or DTYPES[self.caches[0].dtype]

    @property
    def number(self) -> torch.dtype:
        """Dtype of the numbers, as torch's."""
        return FP8[self.fp8] if self.fp8 else self.caches[0].dtype

    @property
    def shape(self) -> BlockShape:
        """Shape of the blocks."""
        latent = self.latents.heads * self.latents.head_dim if self.latents else 0
        opaque = self.opaque.shape if self.opaque else None
        numbers = len(self.caches), self.heads, self.tokens, self.head_dim
        return BlockShape(*numbers, self.dtype, latent, opaque, self.scales)

    @property
    def ats(self) -> tuple[int, ...]:
        """Offsets of a block's first key, and first value if any, in elements."""
        return (self.key_at,) if self.value_at is None else (self.key_at, self.value_at)

    @property
    def coded(self) -> "PagedLayout":
        """Layout of the vectors that a lossy codec encodes: the latents, or else keys and values."""
        return self.latents or self

    def kept(self, exact: int) -> "list[tuple[PagedLayout, int]]":
        """Return the layout and number of tokens of each exact section, if the first `exact` tokens are exact.

        Sections of raw bytes are left out.
        """
        rope = [(self, self.tokens)] if self.latents else []
        return [*rope, *([(self.coded, exact)] if exact else [])]

    def raw(self) -> "list[PagedLayout]":
        """Return a layout for each run of consecutive caches of `opaque` with rows of equal size and stride.

        A cache's bytes of a block stand as one key of one token, in the dtype of `caches`.
        """
        if self.opaque is None:
            return []
        caches = [cache.view(self.caches[0].dtype) for cache in self.opaque.caches]
        told: dict[str, Any] = {"key_at": 0, "value_at": None, "fp8": self.fp8}
        runs = groupby(caches, lambda cache: (cache.shape[1], cache.stride(0)))
        return [PagedLayout(tuple(run), 1, 1, size, stride, size, size, **told) for (size, stride), run in runs]


@dataclass(frozen=True)
class RawLayout:
    """Layout of blocks of opaque bytes.

    caches: for each layer, uint8 [blocks, bytes of the layer in a block], all on one device; a row is contiguous, and
    layers may differ in size. shape: of the blocks.
    """

    caches: tuple[torch.Tensor, ...]
    shape: BlockShape

    @property
    def tokens(self) -> int:
        return self.shape.tokens

    @property
    def unit(self) -> torch.dtype:
        """Largest integer dtype whose size divides all layers' row sizes, strides and storage offsets."""
        numbers = [
            number for cache in self.caches for number in (cache.shape[1], cache.stride(0), cache.storage_offset())
        ]
        return next(unit for unit in UNITS if not any(number % unit.itemsize for number in numbers))


class Form(NamedTuple):
    """Facts that all encoded blocks with the same number of exact first tokens share.

    header: without block hash and position. sizes: bytes of each section; the most, if sections vary in size.
    starts: offset of each section in a block with these sizes. nbytes: bytes of a block with these sizes. varies: True
    if a block may be smaller.
    """

    header: BlockHeader
    sizes: tuple[int, ...]
    starts: tuple[int, ...]
    nbytes: int
    varies: bool

    def fits(self, nbytes: int) -> bool:
        """Return True if a block may have `nbytes` bytes."""
        return not self.unfit(np.array([nbytes]))

    def unfit(self, nbytes: npt.NDArray[np.int64]) -> list[int]:
        """Return the elements of `nbytes` that cannot be the size of a block of this form."""
        if not self.varies:
            return [int(size) for size in nbytes[nbytes != self.nbytes]]
        coded = sum(section.codec != EXACT for section in self.header.sections)
        least = self.starts[-coded] + coded * ALIGNMENT
        bad = (nbytes < least) | (nbytes > self.nbytes) | (nbytes % ALIGNMENT != 0)
        return [int(size) for size in nbytes[bad]]


class Batch(NamedTuple):
    """Blocks of one form, to be encoded, verified or decoded; all tensors on the caches' device.

    exact: number of exact first tokens. block_ids: int64 [n], of the paged cache. offsets: int64 [n], byte in the
    buffer at which each encoded block begins, a multiple of 16. nbytes: int64 [n], size of each encoded block;
    written by `encode` if sizes vary, read by `verify`. headers: uint8 [n, bytes of header and section entries], with
    the form's sizes. turns: cosines, then sines, of RoPE, float32 [n, 2, tokens, pairs]; no pairs without RoPE. status:
    int32 [n], written by all methods; `decode` reads it first. ends, levels: for codecs with refinements, which follow
    a coarse base and make the numbers finer; else 0. ends: int64 [n, 4], end in the encoded block of the base and of
    each refinement that leaves numbers lossy, 0 for missing ones. levels: int32 [n], number of these refinements that
    are usable, written by `verify`, and by `decode` if it finds fewer.
    """

    exact: int
    block_ids: torch.Tensor
    offsets: torch.Tensor
    nbytes: torch.Tensor
    headers: torch.Tensor
    turns: torch.Tensor
    status: torch.Tensor
    ends: torch.Tensor
    levels: torch.Tensor


class Turns:
    """Cosines and sines of RoPE for blocks of `tokens` tokens, kept in RAM. Safe to use from several threads.

    They are computed by numpy on the CPU, so that encoded blocks are equal on every device. rope: None for a codec
    without RoPE: the tables then have no pairs. pinned: True for pinned memory, from which copies are asynchronous.
    """

    def __init__(self, rope: Rope | None, tokens: int, *, pinned: bool) -> None:
        self._rope, self._tokens, self._pinned = rope or Rope(()), tokens, pinned
        self._shape = (2, tokens, len(self._rope.frequencies))
        self._most = KEPT_BYTES // max(1024, 4 * int(np.prod(self._shape)))
        self._kept = torch.empty((0, *self._shape))
        self._growing = threading.Lock()

    def of(self, first_tokens: Sequence[int] | npt.NDArray[np.int64]) -> torch.Tensor:
        """Return cosines, then sines, float32 [blocks, 2, tokens, pairs]. Do not write to the tensor: it may be shared.

        first_tokens: position of each block's first token.
        """
        places = np.array(first_tokens, np.int64)
        rows, inside = np.divmod(places, self._tokens)
        if not len(rows) or inside.any() or rows.max() >= self._most:
            return self._in_place(self._reckoned(places))
        kept = self._upto(int(rows.max()) + 1)
        if (np.diff(rows) == 1).all():  # consecutive blocks, as in a session: a view, no copy
            return kept[int(rows[0]) : int(rows[-1]) + 1]
        return self._in_place(kept[torch.from_numpy(rows)])

    def _upto(self, blocks: int) -> torch.Tensor:
        """Return the tables of at least a session's first `blocks` blocks, [blocks or more, 2, tokens, pairs]."""
        with self._growing:
            there = len(self._kept)
            if there < blocks:
                more = self._tokens * np.arange(there, min(max(blocks, 2 * there), self._most))
                self._kept = self._in_place(torch.cat([self._kept, self._reckoned(more)]))
            return self._kept

    def _reckoned(self, places: npt.NDArray[np.int64]) -> torch.Tensor:
        positions = (places[:, None] + np.arange(self._tokens)).ravel()
        tables = [table.reshape(len(places), *self._shape[1:]) for table in self._rope.tables(positions)]
        return torch.from_numpy(np.stack(tables, axis=1))

    def _in_place(self, made: torch.Tensor) -> torch.Tensor:
        return made.pin_memory() if self._pinned and made.numel() else made


class PagedCodec(ABC):
    """Encodes and decodes blocks of a paged cache, on the current CUDA stream, without waiting for the device.

    The methods' `buffer` has the encoded blocks: uint8 [nbytes], contiguous, on the caches' device, aligned to 16
    bytes. rope: RoPE that the codec undoes, or None. Raises ShapeError if `layout` and `format` have different shapes.
    """

    def __init__(self, layout: PagedLayout | RawLayout, format: BlockFormat, rope: Rope | None = None) -> None:
        if layout.shape != format.shape:
            raise ShapeError(f"the format is of {format.shape}: the paged cache has {layout.shape}.")
        self.layout: PagedLayout | RawLayout = layout
        self.format = format
        self.device = layout.caches[0].device
        self._forms: dict[int, Form] = {}
        self._place_turns = Turns(rope, layout.tokens, pinned=self.device.type == "cuda")

    def form(self, exact: int) -> Form:
        """Return the form of blocks with `exact` exact first tokens. Raises ShapeError."""
        if exact not in self._forms:
            header, sizes = self.format.header(b"", 0, exact), self.format.max_sizes(exact)
            varies = self.format.sizes_vary(exact)
            self._forms[exact] = Form(header, sizes, tuple(starts(header, sizes)), block_nbytes(header, sizes), varies)
        return self._forms[exact]

    def batch(
        self,
        exact: int,
        keys: Sequence[bytes],
        block_ids: Numbers,
        first_tokens: Numbers,
        offsets: Numbers,
        nbytes: Numbers | None = None,
        marks: Numbers = (),
    ) -> Batch:
        """Return the batch of the blocks with block hashes `keys`.

        exact: number of exact first tokens. block_ids, offsets: see `Batch`. first_tokens: position of each block's
        first token. nbytes: sizes of the encoded blocks, to verify or decode blocks of varying size. marks: see
        `wire.BlockHeader`; all 0 if empty. Raises HeaderError for hashes of different lengths, ShapeError for a size
        that no block of the form has.
        """
        n, form = len(keys), self.form(exact)
        numbers = np.full((3, n), form.nbytes, np.int64)
        numbers[0], numbers[1] = block_ids, offsets
        if nbytes is not None:
            numbers[2] = nbytes
            if unfit := form.unfit(numbers[2]):
                raise ShapeError(f"no block of {exact} exact tokens has {unfit[0]} bytes: {form.nbytes} are the most.")
        headers = heads(form.header, form.sizes, keys, first_tokens)
        headers[:, MARK_AT] = marks if len(marks) else 0
        turns = self._place_turns.of(first_tokens).to(self.device, non_blocking=True)
        host = torch.from_numpy(np.concatenate([part.ravel().view(np.uint8) for part in (numbers, headers)]))
        if self.device.type == "cuda":
            host = host.pin_memory()
        there = host.to(self.device, non_blocking=True)
        counts, heads_there = there.split([numbers.nbytes, headers.nbytes])
        ids, places, sizes = counts.view(torch.int64).view(3, n)
        status = torch.empty(n, dtype=torch.int32, device=self.device)
        ends, levels = status.new_zeros((n, 4), dtype=torch.int64), status.new_zeros(n)
        return Batch(exact, ids, places, sizes, heads_there.view(n, form.header.nbytes), turns, status, ends, levels)

    @abstractmethod
    def encode(self, batch: Batch, buffer: torch.Tensor) -> None:
        """Encode the paged blocks into `buffer`.

        A block's status becomes GOOD. If the codec cannot encode the numbers, such as infinities, the status is 0 to
        GOOD - 1, and the encoded block is invalid.
        """

    @abstractmethod
    def verify(self, batch: Batch, buffer: torch.Tensor) -> None:
        """Compare each encoded block's header with the batch's, and the checksum with the bytes.

        A block's status becomes GOOD, BAD_CHECKSUM, or BAD_HEADER or less.
        """

    @abstractmethod
    def decode(self, batch: Batch, buffer: torch.Tensor) -> None:
        """Decode the encoded blocks with status GOOD into their paged blocks. No other paged block changes.

        A block's status becomes 0 to GOOD - 1, and its paged block is of no use, if no encoder writes its bytes.
        """


def status_cause(status: int) -> str | None:
    """Return the fault that a status stands for, as a metric's label; None for GOOD."""
    if status == GOOD:
        return None
    if status >= 0:
        return "decode"
    return "checksum" if status == BAD_CHECKSUM else field_cause(BAD_HEADER - status)
