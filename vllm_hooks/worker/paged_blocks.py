"""Blocks of a GPU's paged cache to codes in this process's memory and back, for stores that the GPU cannot reach."""

import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

import torch

from manthan.codec import wire
from manthan.codec.block import exact_of
from manthan.codec.errors import SizeError, WireError
from manthan.codec.formats import Formats
from manthan.codec.gpu.paged import ALIGNMENT, GOOD, PagedCodec, status_cause
from manthan.manager.stores.arena import Extent
from manthan.manager.stores.cold_store import Buffer, Found
from manthan.vllm_hooks.messages import SpillBlock
from manthan.vllm_hooks.worker.blocks import Blocks, cause_of
from manthan.vllm_hooks.worker.capacity import STAGING_BYTES
from manthan.vllm_hooks.worker.intake import Intake
from manthan.vllm_hooks.worker.staging import Staging

SECTIONS, MOST_KINDS = 4, 256
"""What is remembered of headers: of so many sections, and so many of them."""
SIZE_AND_PLACE = struct.Struct("<QQ")
"""The fields of a header from byte 32 on."""


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
        self.formats = Formats(codec.format, *(other.format for other in others))
        self._codecs = {each.format: each for each in (*others, codec)}
        self.batch = max(1, STAGING_BYTES // codec.form(0).nbytes)
        self._buffers = Buffers(max(STAGING_BYTES, self.largest), codec.device)
        self._own = Own(max(STAGING_BYTES, self.largest), codec.device)
        self._kinds: dict[bytes, Kind] = {}
        """By what headers say, but for what tells blocks of one kind apart."""

    @property
    def largest(self) -> int:
        """The most bytes that one block takes."""
        return self.codec.form(self.codec.layout.tokens).nbytes

    def encode_all(self, spills: Sequence[SpillBlock]) -> list[Buffer | str]:
        """They lie in a buffer that is used again by the next call of this thread."""
        encoded: list[Buffer | str] = ["encode"] * len(spills)
        runs = list(self._runs([self._kind(spill) for spill in spills]))
        for kind, some in runs:
            keys, _, block_ids, first_tokens, *_ = zip(*(spills[n] for n in some), strict=True)
            for n, made in zip(some, self._encode(kind, keys, block_ids, first_tokens), strict=True):
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
        causes: list[str | None] = [None] * len(bufs)
        fronts: list[tuple[Kind, int]] = []
        good: list[Buffer] = []
        for buf in bufs:
            front = cause_of(buf) if buf is None or isinstance(buf, str) else self._front(buf)
            if buf is None or isinstance(buf, str) or isinstance(front, str):
                causes[len(fronts)] = str(front)
                break
            fronts.append(front)
            good.append(buf)
        begun = []
        for part in _fitting([kind for kind, _ in fronts], [buf.nbytes for buf in good], intake.nbytes):
            kind, first_tokens = fronts[part.start][0], [first_token for _, first_token in fronts[part]]
            begun.append((part, self._decode(kind, keys[part], block_ids[part], first_tokens, good[part], intake)))

        def end() -> list[str | None]:
            for part, statuses in begun:
                causes[part] = [status_cause(status) for status in statuses()]
                if any(causes[part]):
                    break
            return causes

        return end

    def _kind(self, spill: SpillBlock) -> Kind:
        return Kind(self._codecs[self.formats.named(spill.codec)], spill.exact)

    def _encode(
        self, kind: Kind, keys: Sequence[bytes], block_ids: Sequence[int], first_tokens: Sequence[int]
    ) -> Iterator[Buffer | str]:
        """Encode blocks of one form, as many as fit into the staging buffer."""
        codec, codes, host = kind.codec, self._buffers.staging.codes, self._buffers.host
        places = [slice(start, start + size) for [(start, size)] in self._places(kind)[: len(keys)]]
        batch = codec.batch(kind.exact, keys, block_ids, first_tokens, [place.start for place in places])
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
        first_tokens: Sequence[int],
        bufs: Sequence[Buffer],
        intake: Intake,
    ) -> Callable[[], list[int]]:
        """Check and decode blocks of one form, as many as fit into a lane's buffer; what is returned waits for their
        statuses."""
        codec, lane = kind.codec, intake.next_lane()
        sizes = [buf.nbytes for buf in bufs]
        offsets = [0, *accumulate(map(_aligned, sizes))][:-1]
        with lane.used():
            intake.copy(bufs, offsets, lane)
            batch = codec.batch(kind.exact, keys, block_ids, first_tokens, offsets, sizes)
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

    def _front(self, buf: Buffer) -> tuple[Kind, int] | str:
        """What kind of encoded block it is, and the place of its first token in its chain. It is what the block says,
        and compared with the rest of it later; or the cause why it cannot be right."""
        mark = _mark(buf)
        kind = None if mark is None else self._kinds.get(mark)
        if kind is not None:
            nbytes, first_token = SIZE_AND_PLACE.unpack_from(buf.data, 32)
            if nbytes == buf.nbytes and first_token <= wire.PLACE_MAX and kind.codec.form(kind.exact).fits(nbytes):
                return kind, first_token
        found = self._look_into(buf)
        if mark is not None and not isinstance(found, str):
            if len(self._kinds) >= MOST_KINDS:
                self._kinds.clear()
            self._kinds[mark] = found[0]
        return found

    def _look_into(self, buf: Buffer) -> tuple[Kind, int] | str:
        try:
            front = wire.peek(buf)
        except WireError as error:
            return error.cause
        try:
            exact = exact_of(wire.peek_sections(buf, front))
        except SizeError:  # it is damaged, and the rest of it says how
            exact = 0
        codec = self._codecs[self.formats.of(buf)]
        fits = exact <= codec.layout.tokens and codec.form(exact).fits(len(buf))
        return (
            (Kind(codec, exact), front.first_token) if fits and front.first_token <= wire.PLACE_MAX else SizeError.cause
        )

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


def _fitting(kinds: Sequence[Kind], sizes: Sequence[int], nbytes: int) -> Iterator[slice]:
    """Blocks of one kind next to each other, as many as fit into so many bytes."""
    start = taken = 0
    for n, (kind, size) in enumerate(zip(kinds, sizes, strict=True)):
        if n > start and (kind != kinds[start] or taken + size > nbytes):
            yield slice(start, n)
            start, taken = n, 0
        taken += _aligned(size)
    if kinds:
        yield slice(start, len(kinds))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _mark(buf: Buffer) -> bytes | None:
    """What a header says but for checksum, sizes, place and key; None for one of many sections."""
    head = buf[: wire.HEADER.size + SECTIONS * wire.ENTRY.size].tobytes()
    sections = int.from_bytes(head[50:52], "little")
    if sections > SECTIONS:
        return None
    parts = [head[:8], head[16:32], head[48:57]]
    for at in range(wire.HEADER.size, wire.HEADER.size + sections * wire.ENTRY.size, wire.ENTRY.size):
        parts += [head[at : at + 24], head[at + 32 : at + 64]]
    return b"".join(parts)
