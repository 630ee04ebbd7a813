"""One paged block to one encoded block and back, all layers at once."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from manthan.codec import CodecError, get_codec, wire
from manthan.vllm_hooks.paged_layout import Index, probe_layout
from manthan.vllm_hooks.support import UnsupportedError

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

Buffer = NDArray[np.uint8]


class BlockCodec:
    """Encodes and decodes blocks of the paged KV cache of this rank. Safe to call from several threads.

    caches: each layer's paged cache by layer name, on the CPU, blocks first. layers: the attention modules by the same
    names. Vectors lie in an encoded block as [layers, heads, tokens, head_dim], keys first.
    """

    def __init__(
        self,
        codec_name: str,
        backend: str,
        caches: Mapping[str, torch.Tensor],
        layers: Mapping[str, Any],
        spec: "FullAttentionSpec",
        num_blocks: int,
        fingerprint: bytes,
    ) -> None:
        distinct = {cache.data_ptr(): name for name, cache in reversed(caches.items())}
        names = [name for name in caches if name in distinct.values()]  # layers may share one cache
        heads, tokens, head_dim = spec.num_kv_heads, spec.block_size, spec.head_size
        self.dtype = spec.dtype
        self.codec = get_codec(codec_name, head_dim, backend)
        self.codec.threads = 1  # the caller's own; it decides how many blocks go side by side
        self.codec.warm_up()
        self._flat: list[NDArray[Any]] = []
        self._where: list[tuple[Index, Index]] = []
        for name in names:
            self._flat.append(_as_rows(caches[name], num_blocks, name))
            self._where.append(probe_layout(caches[name], layers[name], heads, tokens, head_dim))
        self._shape = (len(names), heads * tokens, head_dim)
        self._header = wire.BlockHeader(codec_name, b"", fingerprint, len(names), heads, tokens, head_dim)
        self.nbytes = wire.block_nbytes(self._header)

    def encode(self, key: bytes, block_id: int) -> Buffer:
        """The encoded block; raises CodecError for KV that is not finite."""
        keys, values = self._gather(block_id)
        block = wire.open_block(replace(self._header, key=key))
        self.codec.encode(keys, "key", out=block.key_codes)
        self.codec.encode(values, "value", out=block.value_codes)
        return block.seal()

    def decode(self, key: bytes, block_id: int, buf: Buffer) -> str | None:
        """Check an encoded block and write it into the paged block; the cause if it cannot be used, or None.

        The paged block is written to only after every check has passed.
        """
        try:
            block = wire.parse(buf, key=key, fingerprint=self._header.fingerprint)
            n = self._header.vectors
            dtype = np.uint16 if self.dtype is torch.bfloat16 else np.float32
            keys = self.codec.decode(block.key_codes, n, "key", dtype)
            values = self.codec.decode(block.value_codes, n, "value", dtype)
        except wire.WireError as error:
            return error.cause
        except CodecError:
            return "decode"
        self._scatter(block_id, keys, values)
        return None

    def _gather(self, block_id: int) -> tuple[NDArray[Any], NDArray[Any]]:
        dtype = self._flat[0].dtype
        layers, rows, head_dim = self._shape
        keys = np.empty((layers, rows * head_dim), dtype)
        values = np.empty_like(keys)
        for layer, (flat, (key_at, value_at)) in enumerate(zip(self._flat, self._where, strict=True)):
            # mode="clip" spares numpy a buffer; all positions are in range.
            np.take(flat[block_id], key_at, out=keys[layer], mode="clip")
            np.take(flat[block_id], value_at, out=values[layer], mode="clip")
        return self._to_codec(keys), self._to_codec(values)

    def _scatter(self, block_id: int, keys: NDArray[Any], values: NDArray[Any]) -> None:
        layers = self._shape[0]
        key_rows, value_rows = self._from_codec(keys, layers), self._from_codec(values, layers)
        for layer, (flat, (key_at, value_at)) in enumerate(zip(self._flat, self._where, strict=True)):
            row = flat[block_id]
            row[key_at] = key_rows[layer]
            row[value_at] = value_rows[layer]

    def _to_codec(self, rows: NDArray[Any]) -> NDArray[Any]:
        vectors = rows.reshape(-1, self._shape[2])
        return vectors.astype(np.float32) if vectors.dtype == np.float16 else vectors

    def _from_codec(self, vectors: NDArray[Any], layers: int) -> NDArray[Any]:
        return vectors.astype(self._flat[0].dtype, copy=False).reshape(layers, -1)


def _as_rows(cache: torch.Tensor, num_blocks: int, name: str) -> NDArray[Any]:
    """A layer's cache as [blocks, elements] over the same memory; bf16 as its bits in uint16."""
    if cache.shape[0] != num_blocks or not cache.is_contiguous():
        raise UnsupportedError(
            f"Manthan cannot be used here: the KV cache of {name} has shape {tuple(cache.shape)} and strides "
            f"{cache.stride()}; {num_blocks} contiguous blocks are expected."
        )
    rows = cache.view(num_blocks, -1)
    return (rows.view(torch.uint16) if rows.dtype is torch.bfloat16 else rows).numpy()
