"""Blocks of a GPU's paged cache to codes in this process's memory and back, for stores that the GPU cannot reach."""

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import groupby
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from manthan.codec import wire
from manthan.codec.block import exact_of
from manthan.codec.errors import SizeError, WireError
from manthan.codec.gpu.paged import ALIGNMENT, GOOD, Form, PagedCodec, status_cause
from manthan.manager.tiers.arena import Extent
from manthan.manager.tiers.tier import Buffer, Found
from manthan.manager.work import SpillBlock
from manthan.vllm_hooks.worker.blocks import Blocks, Copies, cause_of
from manthan.vllm_hooks.worker.capacity import STAGING_BYTES
from manthan.vllm_hooks.worker.intake import Intake
from manthan.vllm_hooks.worker.staging import Staging

Sizes: TypeAlias = NDArray[np.int64]
"""Numbers of each block of some, int64 [n]."""
SIZE_AT, PLACE_AT = 32, 40
"""Where a header says how long the block is, and where its first token stands in its chain."""


class Kind(NamedTuple):
    """What blocks have in common that are worked on together: the codec, and how many first tokens are kept exact."""

    codec: PagedCodec
    exact: int

    @property
    def nbytes(self) -> int:
        """Of an encoded block."""
        return self.codec.form(self.exact).nbytes


class Buffers(threading.local):
    """For codes on their way out, each thread's own. staging: on the device. host: uint8 of its size, pinned."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.staging = Staging(nbytes, device)
        self.host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


class Own(threading.local):
    """An intake for a thread that brings none."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.intake = Intake(nbytes, 1, nbytes, 1, device)


class PagedBlocks(Blocks):
    """Works on the caller's current stream, and on an intake's streams behind it: callers are threads beside the
    model's."""

    def __init__(self, codec: PagedCodec, *others: PagedCodec) -> None:
        """others: whose blocks can be read as well, and written where an order names their codec."""
        self.codec = codec
        self.formats = (codec.format, *(other.format for other in others))
        self._codecs = {each.format: each for each in (*others, codec)}
        self.batch = max(1, STAGING_BYTES // codec.form(0).nbytes)
        self._buffers = Buffers(max(STAGING_BYTES, self.largest), codec.device)
        self._own = Own(max(STAGING_BYTES, self.largest), codec.device)

    @property
    def largest(self) -> int:
        """The most bytes that one block takes."""
        return self.codec.form(self.codec.layout.tokens).nbytes

    def encode_all(self, spills: Sequence[SpillBlock], copies: Copies | None = None) -> list[Buffer | str]:
        """They lie in a buffer that is used again by the next call of this thread."""
        encoded: list[Buffer | str] = ["encode"] * len(spills)
        runs = list(self._runs([self._kind(spill) for spill in spills]))
        for kind, some in runs:
            for n, made in zip(some, self._encode(kind, [spills[n] for n in some]), strict=True):
                encoded[n] = made.copy() if len(runs) > 1 and not isinstance(made, str) else made
        return encoded

    def decode_all(self, keys: Sequence[bytes], block_ids: Sequence[int], bufs: Sequence[Found]) -> list[str | None]:
        intake = self._own.intake
        try:
            return self.begin(keys, block_ids, bufs, intake)()
        finally:
            intake.clear()

    def begin(
        self, keys: Sequence[bytes], block_ids: Sequence[int], bufs: Sequence[Found], intake: Intake
    ) -> Callable[[], list[str | None]]:
        """Copy, check and decode encoded blocks without waiting for it; what is returned waits, and gives what
        `decode_all` gives."""
        good, cause = _up_to_a_cause(bufs)
        begun: list[tuple[slice, Callable[[], list[int]]]] = []
        at = 0
        while at < len(good) and not isinstance(found := self._alike(good[at:]), str):
            kind, first_tokens, sizes, marks = found
            for part in _fitting(sizes, intake.nbytes):
                some = slice(at + part.start, at + part.stop)
                told = keys[some], block_ids[some], first_tokens[part]
                begun.append((some, self._decode(kind, *told, good[some], sizes[part], marks[part], intake)))
            at += len(sizes)
        if at < len(good):
            cause = str(found)
        causes: list[str | None] = [None] * len(bufs)
        if cause is not None:
            causes[at] = cause

        def end() -> list[str | None]:
            for part, statuses in begun:
                causes[part] = [status_cause(status) for status in statuses()]
                if any(causes[part]):
                    break
            return causes

        return end

    def _kind(self, spill: SpillBlock) -> Kind:
        return Kind(self._codecs[self.format_named(spill.codec)], spill.exact)

    def _encode(self, kind: Kind, spills: Sequence[SpillBlock]) -> Iterator[Buffer | str]:
        """Encode blocks of one form, as many as fit into the staging buffer."""
        codec, codes, host = kind.codec, self._buffers.staging.codes, self._buffers.host
        places = [slice(start, start + size) for [(start, size)] in self._places(kind)[: len(spills)]]
        told = zip(*((s.key, s.block_id, s.first_token, s.mark) for s in spills), strict=True)
        keys, block_ids, first_tokens, marks = told
        offsets = [place.start for place in places]
        batch = codec.batch(kind.exact, keys, block_ids, first_tokens, offsets, marks=marks)
        codec.encode(batch, codes)
        host[: places[-1].stop].copy_(codes[: places[-1].stop], non_blocking=True)
        blocks = zip(places, batch.status.tolist(), batch.nbytes.tolist(), strict=True)  # waits
        for place, status, nbytes in blocks:
            yield host.numpy()[place][:nbytes] if status == GOOD else "encode"

    def _decode(
        self,
        kind: Kind,
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        first_tokens: Sizes,
        bufs: Sequence[Buffer],
        sizes: Sizes,
        marks: Sizes,
        intake: Intake,
    ) -> Callable[[], list[int]]:
        """Check and decode blocks of one form, as many as fit into a lane's buffer; what is returned waits for their
        statuses."""
        codec, lane = kind.codec, intake.next_lane()
        offsets = np.cumsum(_aligned(sizes)) - _aligned(sizes)
        with lane.used():
            intake.copy(bufs, sizes, offsets, lane)
            numbers = first_tokens.tolist(), offsets.tolist(), sizes.tolist()
            batch = codec.batch(kind.exact, keys, block_ids, *numbers, marks)
            codec.verify(batch, lane.staging.codes)
            codec.decode(batch, lane.staging.codes)
            status = torch.empty(len(keys), dtype=torch.int32, pin_memory=codec.device.type == "cuda")
            status.copy_(batch.status, non_blocking=True)
            done = lane.record()

        def statuses() -> list[int]:
            if done is not None:
                done.synchronize()
            found: list[int] = status.tolist()
            return found

        return statuses

    def _alike(self, bufs: Sequence[Buffer]) -> tuple[Kind, Sizes, Sizes, Sizes] | str:
        """The first of these blocks and those behind it that are of its kind: the places of their first tokens in
        their chains, their sizes, and their marks, int64 [n]. It is what they say, and compared with the rest of them
        later; or the cause why the first cannot be right."""
        kind = self._look_into(bufs[0])
        if isinstance(kind, str):
            return kind
        front = wire.peek(bufs[0])
        sizes = np.fromiter((buf.nbytes for buf in bufs), np.int64, len(bufs))
        nbytes = wire.HEADER.size + wire.ENTRY.size * front.sections
        short = (sizes < nbytes).nonzero()[0]
        some = bufs[: short[0]] if len(short) else bufs
        heads = np.concatenate([buf[:nbytes] for buf in some]).reshape(len(some), nbytes)
        same = _same(front.sections)
        told, places = (heads[:, at : at + 8].copy().view("<u8")[:, 0] for at in (SIZE_AT, PLACE_AT))
        are_alike = (heads[:, same] == heads[0, same]).all(axis=1) & (told == sizes[: len(some)])
        are_alike &= places <= wire.PLACE_MAX
        are_alike &= _fit(kind.codec.form(kind.exact), sizes[: len(some)])
        n = len(some) if are_alike.all() else max(1, int(are_alike.argmin()))
        return kind, places[:n].astype(np.int64), sizes[:n], heads[:n, wire.MARK_AT].astype(np.int64)

    def _look_into(self, buf: Buffer) -> Kind | str:
        """What kind of encoded block it is, or why it cannot be one."""
        try:
            front = wire.peek(buf)
        except WireError as error:
            return error.cause
        try:
            exact = exact_of(wire.peek_sections(buf, front))
        except SizeError:  # it is damaged, and the rest of it says how
            exact = 0
        codec = self._codecs[self.format_of(buf)]
        fits = exact <= codec.layout.tokens and codec.form(exact).fits(len(buf))
        return Kind(codec, exact) if fits and front.first_token <= wire.PLACE_MAX else "size"

    def _places(self, kind: Kind) -> Sequence[tuple[Extent]]:
        """Where blocks lie in the buffers."""
        return self._buffers.staging.places(kind.nbytes)

    def _runs(self, kinds: Sequence[Kind]) -> Iterator[tuple[Kind, range]]:
        """Blocks of one kind next to each other, as many as fit into the staging buffer."""
        start = 0
        for kind, same in groupby(kinds):
            end = start + len(list(same))
            step = len(self._places(kind))
            for first in range(start, end, step):
                yield kind, range(first, min(first + step, end))
            start = end


def _up_to_a_cause(bufs: Sequence[Found]) -> tuple[list[Buffer], str | None]:
    """The blocks before the first that is none, and why it is none."""
    good: list[Buffer] = []
    for buf in bufs:
        if buf is None or isinstance(buf, str):
            return good, cause_of(buf)
        good.append(buf)
    return good, None


def _fit(form: Form, sizes: Sizes) -> NDArray[np.bool_]:
    """Whether blocks of the form may have these sizes. Of one form, all that are aligned do between two that do."""
    if form.fits(int(sizes.min())) and form.fits(int(sizes.max())):
        return np.equal(sizes % ALIGNMENT, 0)
    return np.isin(sizes, [size for size in set(sizes.tolist()) if form.fits(size)])


def _fitting(sizes: Sizes, nbytes: int) -> Iterator[slice]:
    """Blocks next to each other, as many as fit into so many bytes."""
    ends, start = np.cumsum(_aligned(sizes)), 0
    while start < len(sizes):
        before = ends[start - 1] if start else 0
        end = max(start + 1, int(np.searchsorted(ends, before + nbytes, side="right")))
        yield slice(start, end)
        start = end


def _aligned(nbytes: Sizes) -> Sizes:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@cache
def _same(sections: int) -> NDArray[np.int64]:
    """The bytes of a header of so many sections that blocks of one kind have in common: all but checksum, sizes, place
    and key."""
    entries = range(wire.HEADER.size, wire.HEADER.size + wire.ENTRY.size * sections, wire.ENTRY.size)
    fronts = [range(wire.CHECKSUM.start), range(wire.CHECKSUM.stop, SIZE_AT), range(PLACE_AT + 8, wire.KEY_AT - 7)]
    parts = [part for at in entries for part in (range(at, at + 24), range(at + 32, at + wire.ENTRY.size))]
    return np.concatenate([np.arange(part.start, part.stop) for part in (*fronts, *parts)])
