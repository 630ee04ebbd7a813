"""The paged codec in plain PyTorch, for GPUs on which the CUDA kernels cannot be compiled; it runs on any device.

Nothing here makes the host wait for the device.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from manthan.codec.base import Kind
from manthan.codec.block import BlockFormat
from manthan.codec.gpu import xxh3
from manthan.codec.gpu.paged import BAD_CHECKSUM, BAD_HEADER, GOOD, Batch, Form, PagedCodec, PagedLayout
from manthan.codec.gpu.torch_coders import Coder, coder
from manthan.codec.gpu.torch_vectors import cast
from manthan.codec.registry import CENTRED, SPECS
from manthan.codec.wire import CHECKSUM

NUMBERS_AT_ONCE = 2**22
"""Of keys or values: each temporary of encoding and decoding is about four times as many bytes."""
KINDS: tuple[Kind, ...] = ("key", "value")
BYTES_AT_ONCE = 2**25
"""Of encoded blocks: the checksums' temporaries are about five times as large."""


def checksums(blocks: Tensor) -> Tensor:
    """The xxh3-64 of each block but its checksum field, as the bits of int64 [n].

    blocks: uint8 [n, nbytes], nbytes a multiple of 16 and more than 256.
    """
    n, nbytes = blocks.shape
    assert nbytes % 16 == 0, nbytes
    assert nbytes > 256, nbytes
    device, length = blocks.device, nbytes - (CHECKSUM.stop - CHECKSUM.start)
    words = torch.cat((blocks[:, : CHECKSUM.start], blocks[:, CHECKSUM.stop :]), 1).view(torch.int64)
    secret = _int64(tuple(xxh3.SECRET[s + i] for s in range(16) for i in range(8)), device).view(16, 8)
    scramble = _int64(xxh3.SECRET[16:], device)
    kibibytes, stripes = (length - 1) // 1024, (length - 1) % 1024 // 64
    whole, rest = words[:, : 128 * kibibytes], words[:, 128 * kibibytes :][:, : 8 * stripes]
    sums = _int64(xxh3.START, device).expand(n, 8)
    for added in _stripes(whole.view(n, kibibytes, 16, 8), secret).transpose(0, 1).contiguous():
        sums = sums + added
        sums = (sums ^ _shift(sums, 47) ^ scramble) * xxh3.PRIME_32_1
    sums = sums + _stripes(rest.view(n, stripes, 8), secret[:stripes])
    sums = sums + _stripes(words[:, None, -8:], _int64(xxh3.LAST, device))
    keyed = (sums ^ _int64(xxh3.MERGE, device)).view(n, 4, 2)
    merged = _folded_product(keyed[..., 0], keyed[..., 1]).sum(1) + _signed(length * xxh3.PRIME_64_1)
    merged = (merged ^ _shift(merged, 37)) * _signed(xxh3.PRIME_MX1)
    return merged ^ _shift(merged, 32)


class _Kept(NamedTuple):
    """A section of numbers that stay as they are. views: [blocks, heads, tokens, head_dim] of all layers' keys, then of
    their values. start: its offset within an encoded block."""

    views: tuple[Tensor, ...]
    start: int


class _Half(NamedTuple):
    """Keys or values, those that are not kept exact. views: [blocks, heads, tokens, head_dim] of each layer's cache.
    start: the codes' offset within an encoded block."""

    views: tuple[Tensor, ...]
    coder: Coder
    start: int


class _Part(NamedTuple):
    """Layers `first` to `last` (not included) of one half: few enough to be worked on at once."""

    half: _Half
    first: int
    last: int


class _Plan(NamedTuple):
    """How blocks of one form are worked on. coded: how many tokens are."""

    form: Form
    exact: tuple[_Kept, ...]
    halves: tuple[_Half, ...]
    coded: int


class TorchPagedCodec(PagedCodec):
    """A paged codec out of torch's own operations, on the device of the caches."""

    layout: PagedLayout

    def __init__(self, layout: PagedLayout, format: BlockFormat) -> None:
        self.spec = (SPECS | CENTRED)[format.codec]
        super().__init__(layout, format, format.facts.rope if self.spec.mean_bits else None)
        self._coded, self._plans = layout.coded, dict[int, _Plan]()

    def encode(self, batch: Batch, codes: Tensor) -> None:
        """As `PagedCodec.encode` says."""
        plan = self._plan(batch.exact)
        with torch.inference_mode():  # in which caches made in it may be written to as well
            for some in self._batches(plan, len(batch.block_ids)):
                rows, batch.status[some] = self._encode(plan, batch, some)
                places = _places(batch.offsets[some], plan.form.nbytes)
                _words(codes).index_copy_(0, places, rows.view(torch.int64).view(-1))

    def verify(self, batch: Batch, codes: Tensor) -> None:
        """As `PagedCodec.verify` says; scales that are not finite are found here already."""
        plan = self._plan(batch.exact)
        with torch.inference_mode():
            for some in self._batches(plan, len(batch.block_ids)):
                rows = _rows(codes, batch.offsets[some], plan.form.nbytes)
                batch.status[some] = self._check(plan, rows, batch.headers[some])

    def decode(self, batch: Batch, codes: Tensor) -> None:
        """As `PagedCodec.decode` says."""
        plan = self._plan(batch.exact)
        with torch.inference_mode():
            for some in self._batches(plan, len(batch.block_ids)):
                rows = _rows(codes, batch.offsets[some], plan.form.nbytes)
                self._restore(plan, rows, batch, some)

    def _plan(self, exact: int) -> _Plan:
        if exact not in self._plans:
            layout, form, tokens = self._coded, self.form(exact), self.layout.tokens - exact
            kept = [
                _Kept(tuple(view for at in each.ats for view in _views(each, at, 0, first)), start)
                for (each, first), start in zip(self.layout.kept(exact), form.starts, strict=False)
            ]
            starts = form.starts[-len(layout.ats) :] if tokens else ()
            halves = [
                self._half(kind, _views(layout, at, exact, tokens), start)
                for kind, at, start in zip(KINDS, layout.ats, starts, strict=False)
            ]
            self._plans[exact] = _Plan(form, tuple(kept), tuple(halves), tokens)
        return self._plans[exact]

    def _half(self, kind: Kind, views: tuple[Tensor, ...], start: int) -> _Half:
        """start: where the codes begin in an encoded block."""
        _, heads, tokens, head_dim = views[0].shape
        return _Half(views, coder(self.spec, kind, len(views) * heads, tokens, head_dim, self.format.facts.rope), start)

    def _batches(self, plan: _Plan, n: int) -> Iterator[slice]:
        """The n blocks in runs of as many as are worked on at once."""
        layout = self._coded
        numbers = layout.heads * layout.tokens * layout.head_dim
        step = max(1, min(NUMBERS_AT_ONCE // numbers, BYTES_AT_ONCE // plan.form.nbytes))
        return (slice(first, min(first + step, n)) for first in range(0, n, step))

    def _parts(self, plan: _Plan, n: int) -> Iterator[_Part]:
        """All layers' coded keys and values, in parts fit for n blocks."""
        layers = len(self.layout.caches)
        step = max(1, NUMBERS_AT_ONCE // max(1, n * self._per_layer(plan) * self._coded.head_dim))
        for half in plan.halves:
            for first in range(0, layers, step):
                yield _Part(half, first, min(first + step, layers))

    def _per_layer(self, plan: _Plan) -> int:
        """Coded vectors of one layer's keys, or values."""
        return self._coded.heads * plan.coded

    def _codes(self, rows: Tensor, part: _Part) -> list[Tensor]:
        """A part's codes as its coder has them: views [n, bytes] of encoded blocks [n, nbytes]."""
        half, heads = part.half, self._coded.heads
        first, last = part.first * heads, part.last * heads
        places = ((half.start + at, size) for at, size in half.coder.parts)
        return [rows[:, at + first * size : at + last * size] for at, size in places]

    def _turns(self, plan: _Plan, batch: Batch, some: slice) -> Tensor:
        """Of the coded tokens."""
        return batch.turns[some, :, self.layout.tokens - plan.coded :]

    def _exact(self, plan: _Plan, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each view of exact tokens, and its bytes as a view [n, bytes] of encoded blocks [n, nbytes]."""
        for views, at in plan.exact:
            for view in views:
                end = at + view[0].nbytes
                yield view, rows[:, at:end]
                at = end

    def _encode(self, plan: _Plan, batch: Batch, some: slice) -> tuple[Tensor, Tensor]:
        """Encoded blocks uint8 [n, nbytes], and their status."""
        block_ids, headers, turns = batch.block_ids[some], batch.headers[some], self._turns(plan, batch, some)
        n, device = len(block_ids), block_ids.device
        rows = torch.zeros((n, plan.form.nbytes), dtype=torch.uint8, device=device)
        status = torch.full((n,), GOOD, dtype=torch.int32, device=device)
        rows[:, : headers.shape[1]] = headers
        for view, place in self._exact(plan, rows):
            place.copy_(view.index_select(0, block_ids).view(n, -1).view(torch.uint8))
        for part in self._parts(plan, n):
            views = part.half.views[part.first : part.last]
            x = torch.stack([view.index_select(0, block_ids) for view in views], 1)
            x = x.view(self._coded.number).to(torch.float32)
            made, finite = part.half.coder.encode(x.view(n, -1, *x.shape[3:]), turns)
            for place, codes in zip(self._codes(rows, part), made, strict=True):
                place.copy_(codes)
            status = torch.minimum(status, _first_bad(finite, part.first * self._per_layer(plan)))
        rows[:, CHECKSUM] = checksums(rows).view(n, 1).view(torch.uint8)
        return rows, status

    def _check(self, plan: _Plan, rows: Tensor, headers: Tensor) -> Tensor:
        """The status of encoded blocks uint8 [n, nbytes]."""
        status = header_status(rows, headers)
        for half in plan.halves:
            finite = half.coder.finite(self._codes(rows, _Part(half, 0, len(half.views))))
            status = torch.minimum(status, _first_bad(finite, 0))
        return status

    def _restore(self, plan: _Plan, rows: Tensor, batch: Batch, some: slice) -> None:
        """Decode encoded blocks uint8 [n, nbytes] into the paged ones whose status is GOOD."""
        block_ids, good, turns = batch.block_ids[some], batch.status[some] == GOOD, self._turns(plan, batch, some)
        n, layout = len(block_ids), self._coded
        dtype = layout.caches[0].dtype
        for view, place in self._exact(plan, rows):
            _write(view, block_ids, place.contiguous().view(dtype).view(n, *view.shape[1:]), good)
        for part in self._parts(plan, n):
            x = part.half.coder.decode(self._codes(rows, part), turns)
            shape = (n, part.last - part.first, layout.heads, plan.coded, layout.head_dim)
            blocks = cast(x, layout.number).view(dtype).view(shape)
            for view, new in zip(part.half.views[part.first : part.last], blocks.unbind(1), strict=True):
                _write(view, block_ids, new, good)


def header_status(rows: Tensor, headers: Tensor) -> Tensor:
    """Of encoded blocks uint8 [n, nbytes] that are to have these headers: GOOD, BAD_CHECKSUM or BAD_HEADER."""
    end = headers.shape[1]
    offsets = torch.arange(end, dtype=torch.int32, device=rows.device)
    differs = rows[:, :end] != headers
    differs[:, CHECKSUM].fill_(False)
    first = torch.where(differs, offsets, end).amin(1)
    status = torch.where(first < end, BAD_HEADER - first, GOOD)
    right = checksums(rows) == rows[:, CHECKSUM].view(torch.int64).view(-1)
    return torch.where(right, status, BAD_CHECKSUM)


def _write(view: Tensor, block_ids: Tensor, new: Tensor, good: Tensor) -> None:
    """Write into the blocks of [blocks, heads, tokens, head_dim] for which good, bool [n], says so."""
    old = view.index_select(0, block_ids)
    view.index_copy_(0, block_ids, torch.where(good[:, None, None, None], new, old))


def _words(codes: Tensor) -> Tensor:
    """A buffer as int64, without what is left over at its end."""
    return codes[: len(codes) // 8 * 8].view(torch.int64)


def _places(offsets: Tensor, nbytes: int) -> Tensor:
    """The words of blocks that begin at these bytes, int64 [n * nbytes / 8]."""
    return (offsets[:, None] // 8 + torch.arange(nbytes // 8, device=offsets.device)).view(-1)


def _rows(codes: Tensor, offsets: Tensor, nbytes: int) -> Tensor:
    """Encoded blocks, uint8 [n, nbytes]."""
    return _words(codes).index_select(0, _places(offsets, nbytes)).view(torch.uint8).view(len(offsets), nbytes)


def _views(layout: PagedLayout, at: int, first: int, tokens: int) -> tuple[Tensor, ...]:
    """[blocks, heads, tokens, head_dim] of each layer's cache, from a block's token `first` on; `at`: the first key or
    value."""
    inside = (layout.heads, tokens, layout.head_dim)
    far = max(layout.ats)
    at += first * layout.token_stride
    strides = (layout.head_stride, layout.token_stride, 1)
    whole = zip((layout.heads, layout.tokens, layout.head_dim), strides, strict=True)
    block = sum((size - 1) * stride for size, stride in whole)
    views = []
    for cache in layout.caches:
        extent = sum((size - 1) * stride for size, stride in zip(cache.shape, cache.stride(), strict=True))
        blocks = 1 + (extent - far - block) // layout.block_stride
        view = cache.as_strided((blocks, *inside), (layout.block_stride, *strides), cache.storage_offset() + at)
        views.append(view)
    return tuple(views)


def _first_bad(finite: Tensor, first: int) -> Tensor:
    """int32 [n]: `first` plus the index of the first False of each row of bool [n, m]; GOOD if there is none."""
    indices = torch.arange(first, first + finite.shape[1], dtype=torch.int32, device=finite.device)
    return torch.where(finite, GOOD, indices).amin(1)


def _stripes(words: Tensor, secret: Tensor) -> Tensor:
    """What stripes add to the sums: int64 [..., stripes, 8] with [stripes, 8] to [..., 8]."""
    keyed = words ^ secret
    plain = words.sum(-2)
    swapped = plain.view(*plain.shape[:-1], 4, 2).flip(-1).view(plain.shape)
    return ((keyed & 0xFFFFFFFF) * _shift(keyed, 32)).sum(-2) + swapped


def _folded_product(x: Tensor, y: Tensor) -> Tensor:
    """The lower half of the 128-bit product xor the upper, by 32 bits at a time."""
    x0, x1, y0, y1 = x & 0xFFFFFFFF, _shift(x, 32), y & 0xFFFFFFFF, _shift(y, 32)
    first = x1 * y0 + _shift(x0 * y0, 32)
    second = x0 * y1 + (first & 0xFFFFFFFF)
    return x * y ^ (x1 * y1 + _shift(first, 32) + _shift(second, 32))


def _shift(x: Tensor, k: int) -> Tensor:
    """int64 shifted right by k as if unsigned."""
    return x >> k & (1 << (64 - k)) - 1


def _signed(word: int) -> int:
    """The int64 of the same lower 64 bits."""
    return (word + 2**63) % 2**64 - 2**63


# Constants are copied to a device once: such a copy makes the host wait.


@lru_cache(maxsize=64)
def _int64(words: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor([_signed(word) for word in words], dtype=torch.int64, device=device)
