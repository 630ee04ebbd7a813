"""Small paged caches, written to as vLLM's backends do, and what encodes their blocks."""

from types import SimpleNamespace
from typing import Any

import jobs
import numpy as np
import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.kv_cache_interface import FullAttentionSpec

from manthan.codec.block import BlockFormat, BlockShape
from manthan.vllm_hooks import memory
from manthan.vllm_hooks.groups import KvCacheGroup
from manthan.vllm_hooks.worker.engine_cpu import CpuBlocks, PagedMemory
from manthan.vllm_hooks.worker.layout import probe_layers

LAYERS, HEADS, BLOCKS = 3, 2, 8
PRINT = b"f" * 16
CODEC = "k3v3"


def paged(isa: str, dtype: torch.dtype, tokens: int, head_dim: int) -> tuple[dict, dict, FullAttentionSpec]:
    """Caches and attention layers as the CPU worker builds them."""
    caches, layers = {}, {}
    for n in range(LAYERS):
        impl = CPUAttentionBackendImpl(2 * HEADS, head_dim, 1.0, HEADS, None, None, "auto")
        layers[f"layer-{n}"] = SimpleNamespace(impl=impl, isa=isa, _k_scale_float=1.0, _v_scale_float=1.0)
        caches[f"layer-{n}"] = torch.zeros(BLOCKS, HEADS, tokens, 2 * head_dim, dtype=dtype)
    spec = FullAttentionSpec(block_size=tokens, num_kv_heads=HEADS, head_size=head_dim, dtype=dtype)
    return caches, layers, spec


def write(caches: dict, layers: dict, block: int, spec: FullAttentionSpec, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Fill a block with random vectors through the backend; returns keys and values as float32 vectors in order."""
    torch.manual_seed(seed)
    shape = (2, LAYERS, spec.block_size, HEADS, spec.head_size)
    data = torch.randn(shape).to(spec.dtype)
    slots = block * spec.block_size + torch.arange(spec.block_size)
    for n, (name, layer) in enumerate(layers.items()):
        layer.impl.do_kv_cache_update(layer, data[0, n], data[1, n], caches[name], slots)
    keys, values = data.transpose(2, 3).float().reshape(2, -1, spec.head_size).numpy()
    return keys, values


def encode(blocks: CpuBlocks, key: bytes, block: int, exact: int = 0, first_token: int = 96) -> Any:
    """Return a paged block's compressed block, whose first tokens are kept exact; the cause if it cannot be encoded."""
    job = jobs.store([key], [block], first_token, first_token + exact)
    [buf] = blocks.encode(job, blocks.gather(job))
    return buf


def shape_of(spec: FullAttentionSpec, cache_dtype: str = "auto") -> BlockShape:
    return memory.block_shape(KvCacheGroup(0, spec, LAYERS, cache_dtype=cache_dtype))


def block_format(caches: dict, spec: FullAttentionSpec, fingerprint: bytes = PRINT, group: int = 0) -> BlockFormat:
    return memory.block_format(CODEC, KvCacheGroup(group, spec, len(caches)), fingerprint)


def cpu_blocks(
    caches: dict,
    layers: dict,
    spec: FullAttentionSpec,
    fingerprint: bytes = PRINT,
    num_blocks: int = BLOCKS,
    group: int = 0,
    is_host: bool = True,
) -> CpuBlocks:
    """is_host: False for the way of a GPU's cache whose codec runs on the CPU."""
    memory = PagedMemory(shape_of(spec), probe_layers(caches, layers, num_blocks, shape_of(spec)))
    memory._is_host = is_host
    return CpuBlocks(memory, block_format(caches, spec, fingerprint, group))


def gpu_like(order: tuple[int, ...] = (0, 1, 2, 3)) -> tuple[dict, dict, FullAttentionSpec]:
    """As GPU backends lay blocks out, on the CPU: heads outside tokens, or tokens outside heads."""

    class Impl:
        def do_kv_cache_update(self, layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
            cache[slots // 16, :, slots % 16] = torch.cat([key, value], -1)

    shape = [(BLOCKS, HEADS, 16, 128)[axis] for axis in order]
    caches = {f"layer-{n}": torch.zeros(shape, dtype=torch.float16).permute(order) for n in range(LAYERS)}
    layers = {name: SimpleNamespace(impl=Impl()) for name in caches}
    return caches, layers, FullAttentionSpec(block_size=16, num_kv_heads=HEADS, head_size=64, dtype=torch.float16)
