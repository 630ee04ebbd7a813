"""Layout of keys and values, or latents (MLA), inside a KV block, found by a probe of the attention backend.

At start, the backend's own operation writes each element's index into a block that nothing uses yet. Each write has one
digit of the indices in base 256, because every dtype but fp8 holds 0 to 255 exactly. For fp8, each write has one bit.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.kv_cache_interface import KVCacheConfig

from manthan.codec.block import BlockShape
from manthan.codec.gpu.paged import PagedLayout, RawLayout
from manthan.vllm_hooks.compat import write_latents
from manthan.vllm_hooks.support import UnsupportedError

Index = NDArray[np.int64]

SCRATCH_BLOCK = 1  # block 0 is vLLM's null block; no request owns any block yet
ONE = 16.0
"""Number written for a bit of 1 in fp8. Divided by any usual scale of a layer, the number does not become 0."""
NOWHERE: Index = np.empty(0, np.int64)  # for layers stored as bytes: no positions are known


class Layer(NamedTuple):
    """Cache of a layer, and the positions of a block's keys and values.

    rows: [blocks, elements] in the order of memory; fp8 and bytes as uint8. keys, values: index in a row of each
    of their elements, in the order head, token, element. With latents, `keys` is of the key's part with RoPE, and
    `values` of the latents, cut into pieces instead of heads.
    """

    name: str
    rows: torch.Tensor
    keys: Index
    values: Index


def probe_layers(
    caches: Mapping[str, torch.Tensor], modules: Mapping[str, Any], num_blocks: int, shape: BlockShape
) -> list[Layer]:
    """Return one layer for each distinct cache, because in some models several layers share a cache.

    caches, modules: by name of the layer, the paged cache [blocks, ...] and vLLM's attention module. shape: of a block;
    the number of layers is ignored. Raises UnsupportedError for a layout that the probe cannot find.
    """
    distinct, layers = set[int](), list[Layer]()
    for name, cache in caches.items():
        if cache.data_ptr() in distinct:
            continue
        distinct.add(cache.data_ptr())
        numel, dense = cache[0].numel(), 1
        for stride, size in sorted(zip(cache.stride()[1:], cache.shape[1:], strict=True)):
            dense = dense * size if stride == dense else 0
        if cache.shape[0] != num_blocks or dense != numel:
            raise UnsupportedError(
                f"Manthan cannot be used here: the KV cache of {name} has shape {tuple(cache.shape)} and strides "
                f"{cache.stride()}; {num_blocks} blocks, each in one piece, are expected."
            )
        rows = torch.as_strided(cache, (num_blocks, numel), (cache.stride(0), 1))
        rows = rows.view(torch.uint8) if rows.element_size() == 1 else rows
        layers.append(Layer(name, rows, *_probe(rows, cache, modules[name], shape)))
    return layers


def placed_layers(
    caches: Mapping[str, Any], config: KVCacheConfig, nbytes: Mapping[str, int], starts: Mapping[str, int] = {}
) -> list[Layer]:
    """Return layers as bytes of vLLM's allocation, at the addresses that vLLM's configuration says.

    caches, nbytes, starts: by name of the layer, vLLM's view or views of the layer's cache, number of bytes to store of
    each block, and offset of these bytes in the layer's part of the block, 0 if absent. Raises UnsupportedError if a
    layer's first view begins at a different address.
    """
    places = {name: (each, at) for each in config.kv_cache_tensors for at, name in enumerate(each.layers)}
    layers = []
    for name, size in nbytes.items():
        cache, (tensor, at) = caches[name], places[name]
        first = cache if isinstance(cache, torch.Tensor) else cache[0]
        storage = first.untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        start = tensor.offset + at * tensor.layer_stride
        rows = whole.as_strided((config.num_blocks, size), (tensor.block_stride, 1), start + starts.get(name, 0))
        if whole.data_ptr() + start != first.data_ptr():
            raise UnsupportedError(
                f"Manthan cannot be used here: the KV cache of {name} begins {first.data_ptr() - storage.data_ptr()} "
                f"bytes into its memory; {start} are expected."
            )
        layers.append(Layer(name, rows, NOWHERE, NOWHERE))
    return layers


def rows_of(layers: Sequence[Layer], shape: BlockShape) -> list[Layer]:
    """Add positions to the layers. A token's bytes: its latent (`values`), then RoPE's part with any scales (`keys`).

    No probe is needed, because the layout of a shape with `BlockShape.scales` is known byte for byte.
    """
    places = np.arange(shape.tokens * (shape.latent + shape.head_dim)).reshape(shape.tokens, -1)
    latents = places[:, : shape.latent].reshape(shape.tokens, -1, shape.coded_dim).swapaxes(0, 1)
    keys, values = places[:, shape.latent :].ravel(), latents.ravel()
    return [layer._replace(keys=keys, values=values) for layer in layers]


def paged_layout(layers: Sequence[Layer], shape: BlockShape, opaque: Sequence[Layer] = ()) -> PagedLayout:
    """Return the layout of layers for GPU kernels. opaque: layers stored as bytes in the same compressed blocks.

    Raises UnsupportedError for irregular strides, or if layers, or K and V (not MLA), differ.
    """
    first = layers[0]
    keys, values = _run(first.keys, shape.numbers), _run(first.values, shape.value_numbers)
    alike = all(
        np.array_equal(layer.keys, first.keys)
        and np.array_equal(layer.values, first.values)
        and layer.rows.stride(0) == first.rows.stride(0)
        for layer in layers
    )
    if keys is None or values is None or not alike or not (shape.latent or keys[1:] == values[1:]):
        raise UnsupportedError(
            "Manthan cannot be used here: the attention backend splits vectors, or its strides differ between layers "
            "or K and V; choose another with --attention-backend, such as FLASH_ATTN, or FLASH_ATTN_MLA for latents."
        )

    def laid_out(numbers: tuple[int, int, int, int], run: tuple[int, int, int], value_at: int | None) -> PagedLayout:
        (_, heads, tokens, head_dim), (at, head_stride, token_stride) = numbers, run
        caches, fp8 = tuple(layer.rows for layer in layers), shape.dtype if shape.dtype.is_fp8 else None
        strides = (first.rows.stride(0), head_stride, token_stride)
        return PagedLayout(caches, heads, tokens, head_dim, *strides, at, value_at, fp8)

    others = RawLayout(tuple(layer.rows for layer in opaque), shape.opaque) if shape.opaque else None
    if not shape.latent:
        return replace(laid_out(shape.numbers, keys, values[0]), opaque=others)
    latents = laid_out(shape.value_numbers, values, None)
    return replace(laid_out(shape.numbers, keys, None), latents=latents, opaque=others, scales=shape.scales)


def _run(positions: Index, numbers: tuple[int, int, int, int]) -> tuple[int, int, int] | None:
    """Return the first vector's position in a row, and the strides to the next head and token; None if irregular.

    All are in elements. positions: of a layer's keys or values. numbers: see `BlockShape.numbers`.
    """
    _, heads, tokens, head_dim = numbers
    found = positions.reshape(heads, tokens, head_dim)
    at = int(found[0, 0, 0])
    head_stride = int(found[-1, 0, 0] - at) // max(1, heads - 1)
    token_stride = int(found[0, -1, 0] - at) // max(1, tokens - 1)
    head, token, element = np.ogrid[:heads, :tokens, :head_dim]
    steps = head * head_stride + token * token_stride + element
    return (at, head_stride, token_stride) if np.array_equal(found, at + steps) else None


def _probe(rows: torch.Tensor, cache: torch.Tensor, module: Any, shape: BlockShape) -> tuple[Index, Index]:
    shapes = (shape.numbers[1:], shape.value_numbers[1:])
    sizes = [math.prod(each) for each in shapes]
    size = sum(sizes)
    slots = (SCRATCH_BLOCK * shape.tokens + torch.arange(shape.tokens)).to(cache.device)
    found = torch.zeros(rows.shape[1], dtype=torch.int64)
    is_fp8 = rows.dtype is torch.uint8
    bits, dtype, one = (1, torch.bfloat16, ONE) if is_fp8 else (8, cache.dtype, 1.0)
    for shift in range(0, int(size - 1).bit_length(), bits):
        digits = (((torch.arange(size) >> shift) & (1 << bits) - 1) * one).to(dtype).split(sizes)
        parts = (part.view(of).transpose(0, 1) for part, of in zip(digits, shapes, strict=True))
        key, value = (part.contiguous().to(cache.device) for part in parts)
        if shape.latent:
            write_latents(module, value.flatten(1), key, cache, slots)
        else:
            module.impl.do_kv_cache_update(module, key, value, cache, slots)
        read = rows[SCRATCH_BLOCK].cpu()
        found += (read.bool() if is_fp8 else read).to(torch.int64) << shift
    rows[SCRATCH_BLOCK].zero_()
    order = torch.argsort(found, stable=True)
    if found.numel() != size or not torch.equal(found[order], torch.arange(size)):
        raise UnsupportedError(
            f"Manthan cannot be used here: {type(module.impl).__name__} lays KV blocks out in a way that cannot be "
            f"read back ({found.numel()} elements a block, {size} expected)."
        )
    positions = order.numpy()
    return positions[: sizes[0]], positions[sizes[0] :]
