"""KV caches of fp8, and of bytes that only vLLM reads: their blocks, and sessions of a real engine."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from paged_cache import BLOCKS, HEADS, LAYERS, PRINT, encode, shape_of
from scripts import run_sessions
from vllm import EngineArgs
from vllm.config import CacheConfig
from vllm.config.cache import _layout_from_name
from vllm.utils.torch_utils import nvfp4_kv_cache_full_dim, nvfp4_split_data_scale
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    KVQuantMode,
    UniformTypeKVCacheSpecs,
    get_kv_quant_mode,
)
from vllm.v1.worker.utils import allocate_kv_cache
from vllm_engine import MODEL

from manthan.codec.base import Dtype
from manthan.codec.cpu.numbers import as_floats
from manthan.vllm_hooks import kv_transfer_config
from manthan.vllm_hooks.fingerprint import fingerprint
from manthan.vllm_hooks.groups import KvCacheGroup, groups_of
from manthan.vllm_hooks.memory import Shards, block_format, block_shape, group_shape
from manthan.vllm_hooks.support import UnsupportedError, is_packed
from manthan.vllm_hooks.transfer_config import from_vllm_config
from manthan.vllm_hooks.worker.engine_cpu import CpuBlocks, PagedMemory
from manthan.vllm_hooks.worker.layout import placed_layers, probe_layers

WHAT = ["grow", "codecs"]
"""A session that goes cold and returns three times, and then goes cold once more."""
KEY = b"k" * 32
AVX512 = torch.cpu._is_avx512_supported()
without = pytest.mark.skipif(not AVX512, reason="vLLM has fp8 KV on x86 with AVX-512 only")


SPEC = FullAttentionSpec(
    block_size=32, num_kv_heads=HEADS, head_size=64, dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR
)


def fp8_cache(cache_dtype: str, spec: FullAttentionSpec, scale: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Caches and layers as the CPU worker builds them."""
    caches, layers = {}, {}
    for n in range(LAYERS):
        impl = CPUAttentionBackendImpl(2 * HEADS, spec.head_size, 1.0, HEADS, None, None, cache_dtype)
        layers[f"layer-{n}"] = SimpleNamespace(impl=impl, isa="vec", _k_scale_float=scale, _v_scale_float=scale)
        caches[f"layer-{n}"] = torch.zeros(BLOCKS, HEADS, spec.block_size, 2 * spec.head_size, dtype=torch.uint8)
    return caches, layers


@without
@pytest.mark.usefixtures("engine_config")
@pytest.mark.parametrize("scale", [1.0, 0.01, 3.0])
@pytest.mark.parametrize(("cache_dtype", "dtype"), [("fp8", Dtype.FLOAT8_E4M3), ("fp8_e5m2", Dtype.FLOAT8_E5M2)])
def test_a_block_that_vllm_wrote_is_found_whatever_the_scale(cache_dtype: str, dtype: Dtype, scale: float) -> None:
    spec = SPEC
    caches, layers = fp8_cache(cache_dtype, spec, scale)
    shape = shape_of(spec, cache_dtype)
    memory = PagedMemory(shape, probe_layers(caches, layers, BLOCKS, shape))
    # A scale of 0.01 reaches to 4.48 in e4m3, and vLLM writes that for all that is larger.
    data = torch.randn(2, LAYERS, spec.block_size, HEADS, spec.head_size).clamp(-4, 4).to(torch.bfloat16)
    slots = 3 * spec.block_size + torch.arange(spec.block_size)
    for n, (name, layer) in enumerate(layers.items()):
        layer.impl.do_kv_cache_update(layer, data[0, n], data[1, n], caches[name], slots)
    found = scale * as_floats(np.stack(memory.gather(3)), dtype)
    right = data.transpose(2, 3).float().numpy()
    # vLLM's CPU kernels cut bits off: by less than a step, which is 2**-3 or 2**-2 of the number.
    assert (np.abs(found - right) <= np.abs(right) * (0.126 if dtype is Dtype.FLOAT8_E4M3 else 0.251) + 0.01).all()

    group = KvCacheGroup(0, spec, LAYERS, cache_dtype=cache_dtype)
    blocks = CpuBlocks(memory, block_format("wht-5x", group, PRINT))
    assert blocks.format.shape.dtype is dtype
    before = np.stack(memory.gather(3))
    codes = encode(blocks, KEY, 3, exact=4)
    assert blocks.decode(KEY, 5, codes) is None
    after = np.stack(memory.gather(5))
    assert np.array_equal(before[:, :, :, :4], after[:, :, :, :4])
    assert not np.array_equal(before, after)
    assert np.square(as_floats(after, dtype) - as_floats(before, dtype)).mean() < 0.06 * np.square(found / scale).mean()


def test_a_gpus_cache_of_fp8_is_read_by_way_of_the_cpu() -> None:
    """As where the cache is a GPU's, whose kernels know no fp8."""

    class Impl:
        def do_kv_cache_update(self, layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
            numbers = torch.cat([key, value], -1).to(torch.float8_e4m3fn)
            cache.view(torch.uint8)[slots // 32, slots % 32] = numbers.view(torch.uint8)

    spec = SPEC
    caches = {f"layer-{n}": torch.zeros(BLOCKS, 32, HEADS, 128, dtype=torch.float8_e4m3fn) for n in range(LAYERS)}
    layers = {name: SimpleNamespace(impl=Impl()) for name in caches}
    shape = shape_of(spec, "fp8")
    memory = PagedMemory(shape, probe_layers(caches, layers, BLOCKS, shape))
    memory._is_host = False
    for cache in caches.values():
        cache.view(torch.uint8)[3] = torch.randint(0, 120, (32, HEADS, 128))
    blocks = CpuBlocks(memory, block_format("exact", KvCacheGroup(0, spec, LAYERS, cache_dtype="fp8"), PRINT))
    codes = encode(blocks, KEY, 3)
    assert blocks.decode(KEY, 5, codes) is None
    for cache in caches.values():
        assert torch.equal(cache.view(torch.uint8)[3], cache.view(torch.uint8)[5])
        assert cache.view(torch.uint8)[3].any()


def mixed(**options: Any) -> tuple[KVCacheConfig, CacheConfig]:
    """As turboquant has it: the first layer in bf16, the others packed into slots."""
    plain = FullAttentionSpec(block_size=32, num_kv_heads=HEADS, head_size=64, dtype=torch.bfloat16)
    packed = FullAttentionSpec(
        block_size=32, num_kv_heads=HEADS, head_size=64, dtype=torch.uint8, state_content_bytes=70
    )
    specs = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"a": plain, "b": packed, "c": packed})
    pages, size = (plain.page_size_bytes, packed.page_size_bytes), plain.page_size_bytes + 2 * packed.page_size_bytes
    tensors = [
        KVCacheTensor(8 * size, ["a"], 8 * pages[0], pages[0]),
        KVCacheTensor(8 * size, ["b", "c"], 8 * pages[1], pages[1], 8 * pages[0]),
    ]
    return KVCacheConfig(8, tensors, [KVCacheGroupSpec(["a", "b", "c"], specs)]), CacheConfig(**options)


def test_blocks_of_bytes_come_back_bit_for_bit_from_layers_of_different_sizes() -> None:
    config, cache_config = mixed(cache_dtype="turboquant_3bit_nc")
    group = groups_of(config, cache_config).main
    sizes = (HEADS * 32 * 256, HEADS * 32 * 70, HEADS * 32 * 70)
    assert (group.is_packed, group.layer_nbytes, group.page_nbytes) == (True, sizes, sum(sizes))
    caches = allocate_kv_cache(config, torch.device("cpu"), _layout_from_name("LBHNC"))
    for cache in caches.values():
        cache.copy_(torch.randint(0, 250, cache.shape))
    layers = placed_layers(caches, config, dict(zip(group.names, group.layer_nbytes, strict=True)))
    form = block_format("exact", group, PRINT)
    blocks = CpuBlocks(PagedMemory(form.shape, (), layers), form)
    codes = encode(blocks, KEY, 3, exact=4)
    assert sum(sizes) < len(codes) < sum(sizes) + 256
    before = {name: cache[3].clone() for name, cache in caches.items()}
    others = {name: cache[[0, 1, 2, 4, 6, 7]].clone() for name, cache in caches.items()}
    assert blocks.decode(KEY, 5, codes) is None
    for name, cache in caches.items():
        assert torch.equal(cache[5], before[name])
        assert torch.equal(cache[[0, 1, 2, 4, 6, 7]], others[name])
    moved = caches | {"c": caches["c"][1:]}
    with pytest.raises(UnsupportedError, match=r"the KV cache of c begins \d+ bytes into its memory; \d+ are expected"):
        placed_layers(moved, config, dict(zip(group.names, group.layer_nbytes, strict=True)))


@pytest.mark.parametrize("dtype", ["nvfp4", "nvfp4_4over6"])
def test_blocks_of_nvfp4_come_back_bit_for_bit_with_their_scales(dtype: str) -> None:
    """A head's slot has 4 bits a number and then, for each 16 of them, a scale of a byte, as vLLM lays them out."""
    slot = nvfp4_kv_cache_full_dim(SPEC.head_size)
    assert slot == 64 // 2 + 64 // 16
    quantized = replace(SPEC, kv_quant_mode=get_kv_quant_mode(dtype))
    spec = replace(quantized, num_head_slots=2 * HEADS, state_content_bytes=slot)  # FlashInfer's `customize_spec`
    page, names = 2 * HEADS * 32 * slot, ["a", "b"]
    tensors = [KVCacheTensor(2 * BLOCKS * page, names, BLOCKS * page, page)]
    config = KVCacheConfig(BLOCKS, tensors, [KVCacheGroupSpec(names, spec)])
    group = groups_of(config, CacheConfig(cache_dtype=dtype)).main
    assert (group.layer_nbytes, group.dtype_name) == ((page, page), dtype)
    caches = allocate_kv_cache(config, torch.device("cpu"), _layout_from_name("LBHNC"))
    for cache in caches.values():
        cache.copy_(torch.randint(0, 256, cache.shape))
    layers = placed_layers(caches, config, dict(zip(group.names, group.layer_nbytes, strict=True)))
    form = block_format("exact", group, PRINT)
    blocks = CpuBlocks(PagedMemory(form.shape, (), layers), form)
    before = {name: cache.clone() for name, cache in caches.items()}
    assert blocks.decode(KEY, 5, encode(blocks, KEY, 3)) is None
    for name, cache in caches.items():
        data, scales = nvfp4_split_data_scale(cache[5:6].transpose(1, 2))
        assert torch.equal(cache[5], before[name][3])
        assert (data.shape[-1], scales.shape[-1]) == (32, 4)
        assert torch.equal(cache[[0, 1, 2, 3, 4, 6, 7]], before[name][[0, 1, 2, 3, 4, 6, 7]])


@pytest.mark.parametrize("dtype", ["nvfp4", "nvfp4_4over6", "nvfp4_ds_mla"])
def test_no_codec_is_used_for_nvfp4(dtype: str) -> None:
    """Nor for latents in it. Blocks of one kind are never taken for those of another."""
    config = SimpleNamespace(cache_config=CacheConfig(cache_dtype=dtype), model_config=SimpleNamespace(use_mla=False))
    assert is_packed(config.cache_config)
    packed = KvCacheGroup(0, SPEC, LAYERS, cache_dtype=dtype, layer_nbytes=(4352,) * LAYERS)
    other = replace(packed, cache_dtype="int4_per_token_head")
    engine = EngineArgs(MODEL).create_engine_config()
    assert fingerprint(engine, packed, "exact") != fingerprint(engine, other, "exact")


def test_a_packed_cache_settles_for_exact_and_says_its_own_size() -> None:
    for dtype, skipped in (("int8_per_token_head", []), ("fp8", ["0"])):
        args = EngineArgs(
            MODEL,
            kv_cache_dtype=dtype,
            kv_cache_dtype_skip_layers=skipped,
            kv_transfer_config=kv_transfer_config(codec="k3v3"),
        )
        codec = from_vllm_config(args.create_engine_config()).codec
        assert (codec.name, codec.sink_tokens, codec.guard) == ("exact", 0, False)
    group = groups_of(*mixed(cache_dtype="turboquant_3bit_nc")).main
    shape = group_shape(codec, group, Shards(2))
    assert shape.pool_nbytes == 2 * group.page_nbytes
    assert shape.pool_nbytes < shape.cold_nbytes < shape.pool_nbytes + 2 * 512
    once, alone = (group_shape(codec, group, shards) for shards in (Shards(8, copies=8), Shards(1)))
    assert (once.pool_nbytes, once.bounds, once.cold_nbytes) == (4 * shape.pool_nbytes, alone.bounds, alone.cold_nbytes)
    assert once.level == alone.level == shape.level, "of what a rank has"


def test_layers_of_a_packed_dtype_are_bytes_whatever_their_specs() -> None:
    """The scheduler, which is told one of the shapes, sees it by where the layers lie."""
    config, cache = mixed(cache_dtype="turboquant_3bit_nc")
    main = groups_of(config, cache).main
    config.kv_cache_groups[0].kv_cache_spec = main.spec
    assert main.is_packed
    assert groups_of(config, cache).main == main


def test_plain_layers_are_coded_with_those_of_another_dtype() -> None:
    config, cache = mixed()
    found = groups_of(config, cache).main
    assert (found.is_packed, found.names) == (False, ("a",))
    assert found.opaque is not None
    assert found.opaque.layer_nbytes == (HEADS * 32 * 70,) * 2


def test_kinds_of_fp8_are_not_taken_for_each_other() -> None:
    config, spec = EngineArgs(MODEL).create_engine_config(), SPEC
    groups = [KvCacheGroup(0, spec, LAYERS, cache_dtype=dtype) for dtype in ("fp8", "fp8_e4m3", "fp8_e5m2")]
    packed = KvCacheGroup(0, spec, LAYERS, cache_dtype="int8_per_token_head", layer_nbytes=(4352,) * LAYERS)
    opaque = [replace(groups[0], opaque=replace(packed, layer_nbytes=(size,) * LAYERS)) for size in (4352, 8704)]
    marks = [fingerprint(config, group, "wht-5x") for group in (*groups, packed, *opaque)]
    assert marks[0] == marks[1]
    assert len(set(marks)) == 5
    said = groups_of(KVCacheConfig(8, [], [KVCacheGroupSpec(["a"], spec)]), CacheConfig())  # by the model, not the flag
    assert block_shape(said.main).dtype is Dtype.FLOAT8_E4M3


@without
def test_sessions_of_fp8_return() -> None:
    found = run_sessions(WHAT, {"name": "wht-5x"}, vllm={"kv_cache_dtype": "fp8"})
    assert found["failures"] == []
    assert found["codecs"] == ["exact", "wht-5x"]
    assert all(found["right"])
    for now in found["rounds"]:
        assert now["restored"] > 16
        assert now["same"][:4] == [0, 1, 2, 3]
    assert len(found["rounds"][0]["same"]) < 64  # later they come from the same compressed blocks again
    assert 2.0 < found["gauges"]["compression_ratio"][""] < 2.6  # of fp8: half of what it is of bf16
    [line] = [line for line in found["log"] if "Manthan is on" in line]
    assert "codec wht-5x (2." in line


@without
@pytest.mark.slow
def test_sessions_of_layers_of_several_kinds_return_bit_for_bit() -> None:
    """The first layer is kept in bf16 by vLLM: blocks are bytes to us."""
    found = run_sessions(WHAT, {"name": "wht-5x"}, vllm={"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["0"]})
    assert found["failures"] == []
    assert found["codecs"] == ["exact"]
    assert all(found["right"])
    for now in found["rounds"]:
        assert now["restored"] > 16
        assert now["same"][: 32 * now["restored"]] == list(range(32 * now["restored"]))
    assert 0.95 < found["gauges"]["compression_ratio"][""] < 1.0
    [line] = [line for line in found["log"] if "Manthan is on" in line]
    assert "codec exact (1.00x" in line
