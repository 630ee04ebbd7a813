"""Blocks of a GPU's paged cache to codes in this process's memory and back, for stores that the GPU cannot reach."""

import threading
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch

from manthan.codec import wire
from manthan.codec.block import exact_of
from manthan.codec.errors import SizeError, WireError
from manthan.codec.formats import Formats
from manthan.codec.gpu.paged import GOOD, PagedCodec, status_cause
from manthan.manager.stores.cold_store import Buffer, Found
from manthan.vllm_hooks.messages import SpillBlock
from manthan.vllm_hooks.worker.blocks import Blocks, cause_of
from manthan.vllm_hooks.worker.capacity import STAGING_BYTES
from manthan.vllm_hooks.worker.staging import Staging


class Kind(NamedTuple):
    """What blocks have in common that are worked on together: the codec, and how many first tokens are kept exact."""

    codec: PagedCodec
    exact: int

    @property
    def nbytes(self) -> int:
        """Of an encoded block."""
        return self.codec.form(self.exact).nbytes


class Buffers(threading.local):
    """Two for codes on their way, each thread's own. staging: on the device. host: uint8 of its size, pinned."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.staging = Staging(nbytes, device)
        self.host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


class PagedBlocks(Blocks):
    """Works on the caller's current stream, and waits for it: callers are threads beside the model's."""

    def __init__(self, codec: PagedCodec, *others: PagedCodec) -> None:
        """others: whose blocks can be read as well, and written where an order names their codec."""
        self.codec = codec
        self.formats = Formats(codec.format, *(other.format for other in others))
        self._codecs = {each.format: each for each in (*others, codec)}
        self.batch = max(1, STAGING_BYTES // codec.form(0).nbytes)
        self._buffers = Buffers(max(STAGING_BYTES, codec.form(codec.layout.tokens).nbytes), codec.device)

    def encode_all(self, spills: Sequence[SpillBlock]) -> list[Buffer | str]:
        encoded: list[Buffer | str] = ["encode"] * len(spills)
        for kind, some in self._runs([self._kind(spill) for spill in spills]):
            keys, _, block_ids, first_tokens, *_ = zip(*(spills[n] for n in some), strict=True)
            for n, made in zip(some, self._encode(kind, keys, block_ids, first_tokens), strict=True):
                encoded[n] = made
        return encoded

    def decode_all(self, keys: Sequence[bytes], block_ids: Sequence[int], bufs: Sequence[Found]) -> list[str | None]:
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
        for kind, some in self._runs([kind for kind, _ in fronts]):
            part = slice(some.start, some.stop)
            first_tokens = [first_token for _, first_token in fronts[part]]
            causes[part] = self._decode(kind, keys[part], block_ids[part], first_tokens, good[part])
            if any(causes[part]):
                break
        return causes

    def _kind(self, spill: SpillBlock) -> Kind:
        return Kind(self._codecs[self.formats.named(spill.codec)], spill.exact)

    def _encode(
        self, kind: Kind, keys: Sequence[bytes], block_ids: Sequence[int], first_tokens: Sequence[int]
    ) -> Iterator[Buffer | str]:
        """Encode blocks of one form, as many as fit into the staging buffer."""
        codec, codes, host = kind.codec, self._buffers.staging.codes, self._buffers.host
        places = self._places(kind, len(keys))
        batch = codec.batch(kind.exact, keys, block_ids, first_tokens, [place.start for place in places])
        codec.encode(batch, codes)
        host[: places[-1].stop].copy_(codes[: places[-1].stop], non_blocking=True)
        blocks = zip(places, batch.status.tolist(), batch.nbytes.tolist(), strict=True)  # waits
        for place, status, nbytes in blocks:
            yield host.numpy()[place][:nbytes].copy() if status == GOOD else "encode"

    def _decode(
        self,
        kind: Kind,
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        first_tokens: Sequence[int],
        bufs: Sequence[Buffer],
    ) -> list[str | None]:
        """Check and decode blocks of one form, as many as fit into the staging buffer; the causes of those that are
        bad."""
        codec, codes, host = kind.codec, self._buffers.staging.codes, self._buffers.host
        places = self._places(kind, len(keys))
        sizes = list(map(len, bufs))
        for place, buf, nbytes in zip(places, bufs, sizes, strict=True):
            host.numpy()[place][:nbytes] = buf
        codes[: places[-1].stop].copy_(host[: places[-1].stop], non_blocking=True)
        batch = codec.batch(kind.exact, keys, block_ids, first_tokens, [place.start for place in places], sizes)
        codec.verify(batch, codes)
        codec.decode(batch, codes)
        return [status_cause(status) for status in batch.status.tolist()]  # waits

    def _front(self, buf: Buffer) -> tuple[Kind, int] | str:
        """What kind of encoded block it is, and the place of its first token in its chain. It is what the block says,
        and compared with the rest of it later; or the cause why it cannot be right."""
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

    def _places(self, kind: Kind, n: int) -> list[slice]:
        """Where n blocks lie in the buffers."""
        places = self._buffers.staging.places(kind.nbytes)[:n]
        return [slice(start, start + nbytes) for [(start, nbytes)] in places]

    def _runs(self, kinds: Sequence[Kind]) -> Iterator[tuple[Kind, range]]:
        """Blocks of one kind next to each other, as many as fit into the staging buffer."""
        start = 0
        for kind, same in groupby(kinds):
            end = start + len(list(same))
            step = len(self._buffers.staging.places(kind.nbytes))
            for first in range(start, end, step):
                yield kind, range(first, min(first + step, end))
            start = end
