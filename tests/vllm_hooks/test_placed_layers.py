"""Where vLLM puts the layers of several KV cache groups in its one allocation, and their blocks as bytes."""

import pytest
import torch
from vllm.config.cache import _layout_from_name
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, MambaSpec
from vllm.v1.worker.utils import allocate_kv_cache

from manthan.vllm_hooks.groups import page_nbytes
from manthan.vllm_hooks.worker.layout import placed_layers

BLOCKS, TOKENS = 8, 16
FULL = FullAttentionSpec(block_size=TOKENS, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
PAGE = FULL.page_size_bytes
STATE = MambaSpec(block_size=TOKENS, shapes=((8, 64),), dtypes=(torch.float32,), page_size_padded=PAGE)
GROUPS = [KVCacheGroupSpec(["s0", "s1"], STATE), KVCacheGroupSpec(["k0", "k1"], FULL)]


def placed(layout: str) -> KVCacheConfig:
    """Both groups in the same memory, layer by layer or block by block."""
    strides = (PAGE * BLOCKS, PAGE) if layout.startswith("L") else (PAGE, 2 * PAGE)
    tensors = [KVCacheTensor(2 * BLOCKS * PAGE, list(group.layer_names), *strides) for group in GROUPS]
    return KVCacheConfig(BLOCKS, tensors, GROUPS)


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
def test_a_block_s_bytes_are_those_that_vllm_s_views_show(layout: str) -> None:
    config = placed(layout)
    caches = allocate_kv_cache(config, torch.device("cpu"), _layout_from_name(layout))
    assert set(page_nbytes(config).values()) == {PAGE}
    layers = placed_layers(caches, config, dict.fromkeys(("k0", "k1"), PAGE))
    assert [layer.name for layer in layers] == ["k0", "k1"]
    for n, layer in enumerate(layers):
        assert layer.rows.shape == (BLOCKS, PAGE)
        for block in range(BLOCKS):
            caches[layer.name][block] = n * BLOCKS + block + 1
    for n, layer in enumerate(layers):
        numbers = layer.rows.contiguous().view(torch.bfloat16)
        assert torch.equal(numbers, (n * BLOCKS + torch.arange(BLOCKS) + 1.0).bfloat16()[:, None].expand_as(numbers))
    states = placed_layers(caches, config, dict.fromkeys(("s0", "s1"), PAGE))
    for mine, theirs in zip(states, layers, strict=True):
        assert torch.equal(mine.rows, theirs.rows), "the groups lie in each other"
