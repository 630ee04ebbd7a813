"""How an attention backend lays keys and values out inside a block, found by asking the backend itself.

Nothing here assumes a layout. At start, known numbers are written through the backend's own cache-write operation into
a scratch block, once a base-256 digit of each element's ordinal, since every cache dtype holds 0 to 255 exactly. Where
the digits turn up is where the element lies.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from manthan.vllm_hooks.support import UnsupportedError

Index = NDArray[np.int64]

SCRATCH_BLOCK = 1  # block 0 is vLLM's null block; no request owns any block yet


def probe_layout(cache: torch.Tensor, layer: Any, heads: int, tokens: int, head_dim: int) -> tuple[Index, Index]:
    """Positions of a block's keys and values among its elements.

    cache: a layer's paged cache, blocks first. layer: its attention module, with `impl`. Returns, for keys and for
    values, [heads * tokens * head_dim] offsets into a flattened block in the order head, token, element. Raises
    UnsupportedError if the elements cannot all be told.
    """
    size = heads * tokens * head_dim
    ordinals = torch.arange(2 * size).view(2, heads, tokens, head_dim)
    slots = SCRATCH_BLOCK * tokens + torch.arange(tokens)
    found = torch.zeros(cache[SCRATCH_BLOCK].numel(), dtype=torch.int64)
    for shift in range(0, int(2 * size - 1).bit_length(), 8):
        digits = ((ordinals >> shift) & 255).to(cache.dtype)
        key, value = (part.transpose(0, 1).contiguous().to(cache.device) for part in digits)
        layer.impl.do_kv_cache_update(layer, key, value, cache, slots.to(cache.device))
        found += cache[SCRATCH_BLOCK].reshape(-1).cpu().to(torch.int64) << shift
    cache[SCRATCH_BLOCK].zero_()
    order = torch.argsort(found, stable=True)
    if found.numel() != 2 * size or not torch.equal(found[order], torch.arange(2 * size)):
        raise UnsupportedError(
            f"Manthan cannot be used here: {type(layer.impl).__name__} lays KV blocks out in a way that cannot be read "
            f"back ({found.numel()} elements a block, {2 * size} expected)."
        )
    positions = order.numpy()
    return positions[:size], positions[size:]
