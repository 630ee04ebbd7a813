"""One paged block to one encoded block and back on the CPU's cores, all layers at once; the cache may be on a GPU."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.logger import init_logger

from manthan.codec import Codec, CodecError, wire
from manthan.codec.exact import exact_nbytes
from manthan.codec.gpu.paged import PagedLayout
from manthan.vllm_hooks.worker.layout import Layer

logger = init_logger("vllm.manthan.worker")

Buffer = NDArray[np.uint8]
FLOAT16_MAX = 65504.0
BATCH = 16
"""Blocks in a call: the first is stored, or decoded, while others wait."""


class Blocks(ABC):
    """Encodes and decodes blocks of the paged KV cache of this rank. Safe to call from several threads.

    nbytes: of an encoded block. batch: how many blocks a call takes, at most.
    """

    nbytes: int
    batch: int

    @abstractmethod
    def encode_all(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> list[Buffer | str]:
        """The encoded blocks; for one that cannot be encoded, the cause, a metric label."""

    @abstractmethod
    def decode_all(
        self, keys: Sequence[bytes], block_ids: Sequence[int], bufs: Sequence[Buffer | None]
    ) -> list[str | None]:
        """Check encoded blocks and write them into the paged blocks; for one that cannot be used, the cause.

        What follows such a block may be left as it is, and without a cause. A paged block is written to only after
        every check of its codes has passed.
        """


class BlockCodec(Blocks):
    """On the CPU's cores, one block after the other.

    codec: runs on the caller's thread alone; the caller decides how many blocks go side by side. header: what all
    blocks have in common. dtype: the cache's. Vectors lie in an encoded block as [layers, heads, tokens, head_dim],
    keys first.
    """

    def __init__(self, codec: Codec, header: wire.BlockHeader, dtype: torch.dtype) -> None:
        self.codec = codec
        self.codec.threads = 1
        self.codec.warm_up()
        self.dtype = dtype
        self._header = header
        self.nbytes = wire.block_nbytes(header)
        self.batch = BATCH
        self.exact_nbytes = exact_nbytes(header, dtype.itemsize)

    def encode_all(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> list[Buffer | str]:
        encoded: list[Buffer | str] = []
        for key, block_id in zip(keys, block_ids, strict=True):
            try:
                encoded.append(self.encode(key, block_id))
            except CodecError as error:
                logger.warning("Manthan: a block is not kept cold: %s", error)
                encoded.append("encode")
        return encoded

    def decode_all(
        self, keys: Sequence[bytes], block_ids: Sequence[int], bufs: Sequence[Buffer | None]
    ) -> list[str | None]:
        causes: list[str | None] = [None] * len(keys)
        for n, (key, block_id, buf) in enumerate(zip(keys, block_ids, bufs, strict=True)):
            causes[n] = "missing" if buf is None else self.decode(key, block_id, buf)
            if causes[n] is not None:
                break
        return causes

    def encode(self, key: bytes, block_id: int) -> Buffer:
        """The encoded block; raises CodecError for KV that is not finite."""
        keys, values = (self._to_codec(rows) for rows in self._gather(block_id))
        block = wire.open_block(self.header_of(key))
        self.codec.encode(keys, "key", out=block.key_codes)
        self.codec.encode(values, "value", out=block.value_codes)
        return block.seal()

    def decode(self, key: bytes, block_id: int, buf: Buffer) -> str | None:
        """Check an encoded block and write it into the paged block; the cause if it cannot be used, or None.

        The paged block is written to only after every check has passed.
        """
        try:
            block = wire.parse(buf, key=key, fingerprint=self._header.fingerprint)
            if block.header != self.header_of(key):
                return "size"  # a shape or a codec that fits by chance
            n = self._header.vectors
            dtype = np.uint16 if self.dtype is torch.bfloat16 else np.float32
            keys = self.codec.decode(block.key_codes, n, "key", dtype)
            values = self.codec.decode(block.value_codes, n, "value", dtype)
        except wire.WireError as error:
            return error.cause
        except CodecError:
            return "decode"
        self._scatter(block_id, self._from_codec(keys), self._from_codec(values))
        return None

    def header_of(self, key: bytes) -> wire.BlockHeader:
        """What a block of that key says of itself."""
        return replace(self._header, key=key)

    def numbers(self, block_id: int) -> Buffer:
        """A block as it is, uint8 [exact_nbytes]: keys and then values, in the order of an encoded block."""
        return np.concatenate([rows.reshape(-1).view(np.uint8) for rows in self._gather(block_id)])

    def write(self, block_id: int, numbers: Buffer) -> None:
        """Make a block what it was when `numbers` gave this."""
        dtype = torch.empty(0, dtype=self.dtype)
        both = numbers.view(_as_numpy(dtype).dtype).reshape(2, self._header.layers, -1)
        self._scatter(block_id, both[0], both[1])

    @abstractmethod
    def _gather(self, block_id: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Keys and values of a block in the cache's dtype, bf16 as uint16: [layers, heads * tokens * head_dim]."""

    @abstractmethod
    def _scatter(self, block_id: int, keys: NDArray[Any], values: NDArray[Any]) -> None:
        """Write what `_gather` returns into a block."""

    def _to_codec(self, rows: NDArray[Any]) -> NDArray[Any]:
        vectors = rows.reshape(-1, self._header.head_dim)
        return vectors.astype(np.float32) if vectors.dtype == np.float16 else vectors

    def _from_codec(self, vectors: NDArray[Any]) -> NDArray[Any]:
        if self.dtype is torch.float16:
            vectors = np.clip(vectors, -FLOAT16_MAX, FLOAT16_MAX).astype(np.float16)
        return vectors.reshape(self._header.layers, -1)


class HostBlocks(BlockCodec):
    """The paged cache is in this machine's memory, in whatever order the CPU's attention kernels like."""

    def __init__(self, codec: Codec, header: wire.BlockHeader, layers: list[Layer]) -> None:
        super().__init__(codec, header, layers[0].rows.dtype)
        self._layers = [layer._replace(rows=_as_numpy(layer.rows)) for layer in layers]

    def _gather(self, block_id: int) -> tuple[NDArray[Any], NDArray[Any]]:
        first = self._layers[0]
        keys = np.empty((len(self._layers), first.keys.size), first.rows.dtype)
        values = np.empty_like(keys)
        for n, layer in enumerate(self._layers):
            # mode="clip" spares numpy a buffer; all positions are in range.
            np.take(layer.rows[block_id], layer.keys, out=keys[n], mode="clip")
            np.take(layer.rows[block_id], layer.values, out=values[n], mode="clip")
        return keys, values

    def _scatter(self, block_id: int, keys: NDArray[Any], values: NDArray[Any]) -> None:
        for n, layer in enumerate(self._layers):
            row = layer.rows[block_id]
            row[layer.keys] = keys[n]
            row[layer.values] = values[n]


class DeviceBlocks(BlockCodec):
    """The paged cache is a GPU's. Blocks are copied to the CPU's memory to be encoded, and back; each thread waits for
    its own copies only. For GPUs that share the CPU's memory, and for comparison."""

    def __init__(self, codec: Codec, header: wire.BlockHeader, layout: PagedLayout) -> None:
        super().__init__(codec, header, layout.caches[0].dtype)
        self._layout = layout

    def _gather(self, block_id: int) -> tuple[NDArray[Any], NDArray[Any]]:
        keys, values = (torch.stack(self._views(block_id, at)) for at in (self._layout.key_at, self._layout.value_at))
        both = _as_numpy(torch.stack([keys, values]).cpu())
        return both[0].reshape(len(keys), -1), both[1].reshape(len(keys), -1)

    def _scatter(self, block_id: int, keys: NDArray[Any], values: NDArray[Any]) -> None:
        for rows, at in ((keys, self._layout.key_at), (values, self._layout.value_at)):
            views = self._views(block_id, at)
            host = torch.from_numpy(np.ascontiguousarray(rows)).view(self.dtype).view(len(views), *views[0].shape)
            torch._foreach_copy_(views, list(host.to(views[0].device)))
        torch.cuda.current_stream(views[0].device).synchronize()

    def _views(self, block_id: int, at: int) -> list[torch.Tensor]:
        layout = self._layout
        shape = (layout.heads, layout.tokens, layout.head_dim)
        strides = (layout.head_stride, layout.token_stride, 1)
        start = block_id * layout.block_stride + at
        return [cache.as_strided(shape, strides, cache.storage_offset() + start) for cache in layout.caches]


def _as_numpy(tensor: torch.Tensor) -> NDArray[Any]:
    """The same memory; bf16 as its bits in uint16."""
    return (tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor).numpy()
