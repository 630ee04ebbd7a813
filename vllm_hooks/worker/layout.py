"""How an attention backend lays keys and values, or latents (MLA), out inside a block, found by asking the backend.

Nothing here assumes a layout. At start, known numbers are written through the backend's own cache-write operation into
a scratch block, once a base-256 digit of each element's ordinal, since every cache dtype holds 0 to 255 exactly. Where
the digits turn up is where the element lies.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from manthan.codec.gpu.paged import PagedLayout
from manthan.vllm_hooks.compat import write_kv, write_latents
from manthan.vllm_hooks.support import UnsupportedError

Index = NDArray[np.int64]
Shape = tuple[int, ...]
"""Heads, tokens, numbers of a vector."""

SCRATCH_BLOCK = 1  # block 0 is vLLM's null block; no request owns any block yet


class Layer(NamedTuple):
    """A layer's cache as [blocks, elements] in the order of memory, and where a block's keys and values are in a row.

    keys, values: [heads * tokens * head_dim] positions in the order head, token, element; of RoPE's part and of latents
    in pieces where there are latents.
    """

    name: str
    rows: torch.Tensor
    keys: Index
    values: Index


def probe_layers(
    caches: Mapping[str, torch.Tensor],
    modules: Mapping[str, Any],
    num_blocks: int,
    shape: Shape,
    latent_shape: Shape | None = None,
) -> list[Layer]:
    """The layers that have a cache of their own; some models share one between layers.

    caches: each layer's paged cache by layer name, blocks first. modules: the attention modules by the same names, with
    `impl`. shape: of a block's keys. latent_shape: of its latents in pieces, where there are no values. Raises
    UnsupportedError.
    """
    distinct = {cache.data_ptr(): name for name, cache in reversed(list(caches.items()))}
    names = [name for name in caches if name in distinct.values()]
    layers = []
    for name in names:
        rows = _block_rows(caches[name], num_blocks, name)
        layers.append(Layer(name, rows, *_probe(rows, caches[name], modules[name], shape, latent_shape)))
    return layers


def paged_layout(layers: list[Layer], shape: tuple[int, int, int]) -> PagedLayout:
    """The layers as strides, which GPU kernels want; raises UnsupportedError if they are not that regular."""
    heads, tokens, head_dim = shape
    first = layers[0]
    keys, values = (positions.reshape(shape) for positions in (first.keys, first.values))
    head_stride = int(keys[-1, 0, 0] - keys[0, 0, 0]) // max(1, heads - 1)
    token_stride = int(keys[0, -1, 0] - keys[0, 0, 0]) // max(1, tokens - 1)
    head, token, element = np.ogrid[:heads, :tokens, :head_dim]
    steps = head * head_stride + token * token_stride + element
    regular = all(np.array_equal(part, part[0, 0, 0] + steps) for part in (keys, values))
    alike = all(
        np.array_equal(layer.keys, first.keys)
        and np.array_equal(layer.values, first.values)
        and layer.rows.stride(0) == first.rows.stride(0)
        for layer in layers
    )
    if not (regular and alike):
        raise UnsupportedError(
            "Manthan cannot be used here: the attention backend does not lay each vector out in one piece, in all "
            "layers alike; choose another with --attention-backend, such as FLASH_ATTN."
        )
    return PagedLayout(
        caches=tuple(layer.rows for layer in layers),
        heads=heads,
        tokens=tokens,
        head_dim=head_dim,
        block_stride=first.rows.stride(0),
        head_stride=head_stride,
        token_stride=token_stride,
        key_at=int(keys[0, 0, 0]),
        value_at=int(values[0, 0, 0]),
    )


def _block_rows(cache: torch.Tensor, num_blocks: int, name: str) -> torch.Tensor:
    """A layer's cache as [blocks, elements] over the same memory, in its order."""
    numel = cache[0].numel()
    dense = 1
    for stride, size in sorted(zip(cache.stride()[1:], cache.shape[1:], strict=True)):
        dense = dense * size if stride == dense else 0
    if cache.shape[0] != num_blocks or dense != numel:
        raise UnsupportedError(
            f"Manthan cannot be used here: the KV cache of {name} has shape {tuple(cache.shape)} and strides "
            f"{cache.stride()}; {num_blocks} blocks, each in one piece, are expected."
        )
    return torch.as_strided(cache, (num_blocks, numel), (cache.stride(0), 1))


def _probe(
    rows: torch.Tensor, cache: torch.Tensor, module: Any, shape: Shape, latent_shape: Shape | None
) -> tuple[Index, Index]:
    shapes, tokens = (shape, latent_shape or shape), shape[1]
    key_size, value_size = map(math.prod, shapes)
    size = key_size + value_size
    slots = (SCRATCH_BLOCK * tokens + torch.arange(tokens)).to(cache.device)
    found = torch.zeros(rows.shape[1], dtype=torch.int64)
    for shift in range(0, int(size - 1).bit_length(), 8):
        digits = ((torch.arange(size) >> shift) & 255).to(cache.dtype).split((key_size, value_size))
        parts = (part.view(of).transpose(0, 1) for part, of in zip(digits, shapes, strict=True))
        key, value = (part.contiguous().to(cache.device) for part in parts)
        if latent_shape is None:
            write_kv(module, key, value, cache, slots)
        else:
            write_latents(module, value.flatten(1), key, cache, slots)
        found += rows[SCRATCH_BLOCK].cpu().to(torch.int64) << shift
    rows[SCRATCH_BLOCK].zero_()
    order = torch.argsort(found, stable=True)
    if found.numel() != size or not torch.equal(found[order], torch.arange(size)):
        raise UnsupportedError(
            f"Manthan cannot be used here: {type(module.impl).__name__} lays KV blocks out in a way that cannot be "
            f"read back ({found.numel()} elements a block, {size} expected)."
        )
    positions = order.numpy()
    return positions[:key_size], positions[key_size:]
