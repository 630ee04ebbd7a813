"""KV cache groups of models that do not start on a CPU: their specs, grouped, laid out and looked up by vLLM itself."""

import importlib
from collections import defaultdict
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scaled_latents
import torch
from paged_cache import encode
from scaled_latents import V4, V32
from vllm import EngineArgs
from vllm.config import set_current_vllm_config
from vllm.config.cache import _layout_from_name
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator
from vllm.v1.core.kv_cache_utils import (
    KVCacheBlock,
    generate_scheduler_kv_cache_config,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    SparseCacheRole,
)
from vllm.v1.worker.utils import allocate_kv_cache
from vllm_engine import MODEL

from manthan.codec.block import Scales
from manthan.codec.fidelity import Sample, measure
from manthan.codec.gpu.cuda_codec import is_aligned
from manthan.vllm_hooks.doctor.families import families
from manthan.vllm_hooks.groups import Context, KvCacheGroup, groups_of, on_all_ranks
from manthan.vllm_hooks.memory import block_format, block_shape
from manthan.vllm_hooks.support import Latents
from manthan.vllm_hooks.worker.engine_cpu import CpuBlocks, PagedMemory
from manthan.vllm_hooks.worker.half import GroupCache, WorkerHalf
from manthan.vllm_hooks.worker.layout import placed_layers, probe_layers

PLANNING: Any = kv_cache_utils
if not hasattr(PLANNING, "get_kv_cache_groups"):  # of vLLM 0.33
    PLANNING = importlib.import_module("vllm.v1.core.kv_cache_planning")
BLOCKS, TOKENS = 8, 4096
LATENTS = Latents(512, 64)
BF16: dict[str, Any] = {"num_kv_heads": 1, "dtype": torch.bfloat16}
BYTES: dict[str, Any] = {"num_kv_heads": 1, "dtype": torch.uint8}
KV: dict[str, Any] = {"num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
INDEXER: dict[str, Any] = {"head_size": 132, "cache_role": SparseCacheRole.INDEXER, **BYTES}


def latents(block: int, **more: Any) -> MLAAttentionSpec:
    return MLAAttentionSpec(**{"block_size": block, "head_size": 576, **BF16, **more})


def compressed(ratio: int) -> MLAAttentionSpec:
    return MLAAttentionSpec(
        block_size=256,
        head_size=512,
        tokens_per_state=ratio,
        alignment=576,
        model_version="deepseek_v4",
        cache_dtype_str="fp8_ds_mla",
        state_content_bytes=584,
        **BYTES,
    )


def local(block: int, head_size: int, window: int, **more: Any) -> SlidingWindowMLASpec:
    """A window, or a compressor's state, of which the last tokens are needed."""
    return SlidingWindowMLASpec(
        block_size=block, num_kv_heads=1, head_size=head_size, sliding_window=window, alignment=576, **more
    )


def state(block: int, shape: tuple[int, ...], page: int) -> MambaSpec:
    return MambaSpec(
        block_size=block, shapes=(shape,), dtypes=(torch.float32,), page_size_padded=page, mamba_cache_mode="align"
    )


PAGE = latents(256).page_size_bytes
MODELS: dict[str, list[KVCacheSpec]] = {
    "DeepSeek V3.2, GLM-5": [latents(64), MLAAttentionSpec(block_size=64, **INDEXER)] * 3,
    "Hy4": [latents(64), MLAAttentionSpec(block_size=64, **INDEXER), latents(64), latents(64)] * 2,
    "DeepSeek V3.2, fp8_ds_mla": [
        latents(64, dtype=torch.uint8, cache_dtype_str="fp8_ds_mla", state_content_bytes=656),
        MLAAttentionSpec(block_size=64, **INDEXER),
    ]
    * 3,
    "DeepSeek V4": [
        local(64, 512, 128, dtype=torch.uint8, state_content_bytes=584),
        compressed(4),
        MLAAttentionSpec(block_size=256, head_size=132, tokens_per_state=4, alignment=576, **BYTES),
        local(4, 2048, 8, dtype=torch.float32),
        local(64, 512, 128, dtype=torch.uint8, state_content_bytes=584),
        compressed(128),
        local(8, 1024, 128, dtype=torch.float32),
    ]
    * 2,
    "DeepSeek V4.1": [
        local(64, 512, 128, dtype=torch.uint8, state_content_bytes=584, bounded_replay=True),
        compressed(4),
        CircularBufferSpec(block_size=8, num_kv_heads=1, head_size=512, head_size_v=0, dtype=torch.float32),
    ]
    * 2,
    "MiniMax M3": [
        FullAttentionSpec(block_size=64, **KV),
        MLAAttentionSpec(block_size=64, head_size=128, cache_role=SparseCacheRole.INDEXER, **BF16),
    ]
    * 3,
    "Qwen4-exp": [
        state(256, (8, 64, 64), PAGE),
        FullAttentionSpec(block_size=256, **KV),
        MLAAttentionSpec(block_size=256, head_size=128, tokens_per_state=16, **BF16),
        CircularBufferSpec(block_size=32, num_kv_heads=1, head_size=128, head_size_v=0, dtype=torch.bfloat16),
    ]
    * 2,
    "Kimi K3, Ling": [state(256, (16, 64, 64), PAGE)] * 6 + [latents(256)] * 2,
    "GLM-5.3-Flash": [
        *[state(256, (16, 64, 64), PAGE)] * 3,
        latents(256),
        CircularBufferSpec(block_size=16, num_kv_heads=2, head_size=64, head_size_v=0, dtype=torch.bfloat16),
    ],
    "dots3-note": [
        latents(64, head_size=1088, is_index_group_leader=True),
        MLAAttentionSpec(block_size=64, **INDEXER),
        *[SlidingWindowMLASpec(block_size=64, head_size=1088, sliding_window=512, **BF16)] * 3,
    ]
    * 2,
    "Step-5": [
        FullAttentionSpec(block_size=64, **KV),
        FullAttentionSpec(block_size=64, head_size=256, head_size_v=0, tokens_per_state=8, **BYTES),
        SlidingWindowSpec(block_size=64, sliding_window=512, **KV),
        CircularBufferSpec(block_size=64, num_kv_heads=1, head_size=256, head_size_v=0, dtype=torch.bfloat16),
    ]
    * 2,
    "Inkling": [
        FullAttentionSpec(block_size=64, **KV),
        SlidingWindowSpec(block_size=64, sliding_window=512, **KV),
        SlidingWindowSpec(
            block_size=4, num_kv_heads=2, head_size=512, head_size_v=0, dtype=torch.bfloat16, sliding_window=4
        ),
    ]
    * 2,
    "MiMo-V2": [
        FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=192, head_size_v=128, dtype=torch.bfloat16),
        *[
            SlidingWindowSpec(
                block_size=32, num_kv_heads=2, head_size=192, head_size_v=128, dtype=torch.bfloat16, sliding_window=128
            )
        ]
        * 3,
    ]
    * 2,
    "Llama 4": (
        [ChunkedLocalAttentionSpec(block_size=32, attention_chunk_size=512, **KV)] * 3
        + [FullAttentionSpec(block_size=32, **KV)]
    )
    * 2,
    "Unlimited-OCR": [RSWASpec(block_size=32, rswa_window=128, **KV)] * 2,
    "openPangu": [SinkFullAttentionSpec(block_size=32, sink_len=32, **KV)] * 2,
    "Nemotron-NAS": [FullAttentionSpec(block_size=32, **KV | {"num_kv_heads": heads}) for heads in (1, 2, 4)],
    "Whisper's decoder alone": [FullAttentionSpec(block_size=32, tokens_per_state=Fraction(1, 4), **KV)] * 2,
}


FAMILIES = {
    "DeepSeek V3.2, GLM-5": "DeepseekV32ForCausalLM",
    "Hy4": "HYV4ForCausalLM",
    "DeepSeek V4": "DeepseekV4ForCausalLM",
    "DeepSeek V4.1": "DeepseekV41ForCausalLM",
    "MiniMax M3": "MiniMaxM3SparseForCausalLM",
    "Qwen4-exp": "Qwen4ExpForCausalLM",
    "Kimi K3, Ling": "KimiK3ForConditionalGeneration",
    "GLM-5.3-Flash": "Glm5NextForCausalLM",
    "dots3-note": "Dots3NoteForCausalLM",
    "Step-5": "Step5ForCausalLM",
    "Inkling": "InklingForCausalLM",
    "MiMo-V2": "MiMoV2FlashForCausalLM",
    "Llama 4": "Llama4ForCausalLM",
    "Nemotron-NAS": "DeciLMForCausalLM",
}
"""Class in vLLM's registry. The others are refused, or no model of their own."""


@pytest.fixture(scope="module")
def vllm_config() -> Any:
    config = EngineArgs(MODEL, skip_tokenizer_init=True, max_model_len=TOKENS).create_engine_config()
    config.cache_config.kv_cache_layout = "BLHNC"
    return config


def laid_out(vllm_config: Any, model: str) -> KVCacheConfig:
    specs = {f"{n}": spec for n, spec in enumerate(MODELS[model])}
    groups = PLANNING.get_kv_cache_groups(vllm_config, specs)
    config: KVCacheConfig = PLANNING.get_kv_cache_config_from_groups(vllm_config, groups, 2**25)
    return config


@pytest.mark.parametrize("model", MODELS)
def test_groups_with_prefixes_are_stored(vllm_config: Any, model: str) -> None:
    config = laid_out(vllm_config, model)
    mine = groups_of(config, vllm_config.cache_config, latents=LATENTS)
    assert on_all_ranks([mine]) == mine
    kept = {each.index for each in mine.stored}
    left_out = [each.kv_cache_spec for n, each in enumerate(config.kv_cache_groups) if n not in kept]
    assert not any(spec.prefix_cacheable for spec in left_out)
    assert len(left_out) == len(mine.unstored)
    assert mine.fails_whole == (len(config.kv_cache_groups) > 1), "vLLM raises on single bad blocks of several groups"


@pytest.mark.parametrize("model", FAMILIES)
def test_the_list_of_families_says_what_is_compressed(vllm_config: Any, model: str) -> None:
    groups = groups_of(laid_out(vllm_config, model), vllm_config.cache_config, latents=LATENTS)
    ways = {each.is_packed for each in groups.stored if not each.is_state}
    outcome = "partly" if len(ways) > 1 else "bytes" if ways == {True} else "coded"
    assert families()[FAMILIES[model]].outcome == outcome


@pytest.mark.parametrize("model", MODELS)
def test_blocks_come_back_bit_for_bit(vllm_config: Any, model: str) -> None:
    """Each group's, from vLLM's tensors and into them, and nothing else is touched."""
    config = laid_out(vllm_config, model)
    memory = allocate_kv_cache(config, torch.device("cpu"), _layout_from_name("BLHNC"))
    whole = next(iter(memory.values()))
    storage = (whole if isinstance(whole, torch.Tensor) else whole[0]).untyped_storage()
    raw = torch.empty(0, dtype=torch.uint8).set_(storage)
    raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8))
    groups = groups_of(config, vllm_config.cache_config, latents=LATENTS)
    for group in [part for each in groups.stored for part in (each, each.opaque) if part]:
        pages = dict(zip(group.names, group.layer_nbytes, strict=False)) or dict.fromkeys(
            group.names, group.spec.page_size_bytes
        )
        layers = placed_layers(memory, config, pages)
        packed = KvCacheGroup(
            group.index, group.spec, group.layers, group.names, "bytes", tuple(pages[name] for name in group.names)
        )
        form = block_format("exact", packed)
        blocks = CpuBlocks(PagedMemory(form.shape, (), layers), form)
        before = raw.clone()
        wanted = [layer.rows[3].clone() for layer in layers]
        assert blocks.decode(b"k" * 32, 5, encode(blocks, b"k" * 32, 3, 0)) is None
        for layer, row in zip(layers, wanted, strict=True):
            assert torch.equal(layer.rows[5], row)
            layer.rows[5] = torch.as_strided(before, (layer.rows.shape[1],), (1,), layer.rows[5].storage_offset())
        assert torch.equal(raw, before)


@pytest.mark.parametrize("model", ["DeepSeek V3.2, GLM-5", "Hy4", "MiniMax M3"])
def test_index_keys_are_opaque_bytes_with_what_is_coded(
    vllm_config: Any, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RoPE's part of latents and the index come back as they were; damage of either part is found, and nothing is
    written."""
    monkeypatch.setattr(vllm_config.cache_config, "kv_cache_layout", "LBHNC")  # which the CPU's backend can write
    config = laid_out(vllm_config, model)
    memory = allocate_kv_cache(config, torch.device("cpu"), _layout_from_name("LBHNC"))
    group = groups_of(config, vllm_config.cache_config, latents=LATENTS).main
    assert group.opaque is not None
    shape, index = block_shape(group), group.opaque
    with set_current_vllm_config(vllm_config):
        heads = CPUAttentionBackendImpl(4, 64, 1.0, 2, None, None, "auto")
    impl = CPUMLAImpl.__new__(CPUMLAImpl) if group.latent else heads
    module = SimpleNamespace(impl=impl, isa="vec", _k_scale_float=1.0, _v_scale_float=1.0)
    modules = dict.fromkeys(group.names, module)
    caches = {name: memory[name] for name in group.names}
    layers = probe_layers(caches, modules, config.num_blocks, shape)
    others = placed_layers(memory, config, dict(zip(index.names, index.layer_nbytes, strict=True)))
    cache = GroupCache(layers, [block_format("wht-4x", group, b"f" * 16)], [0], others)
    blocks = CpuBlocks(cache.memory, *cache.forms)
    for name in group.names:
        caches[name].copy_(torch.randn(caches[name].shape))
    for layer in others:
        layer.rows.copy_(torch.randint(0, 256, layer.rows.shape, dtype=torch.uint8))
    untouched = [[layer.rows[4].clone() for layer in part] for part in (layers, others)]
    buf = encode(blocks, b"k" * 32, 3, 0)
    assert len(buf) < group.page_nbytes / 2
    assert blocks.nbytes == group.page_nbytes
    for at in (-40, 400, 20_000):
        bad = buf.copy()
        bad[at] ^= 1
        assert blocks.decode(b"k" * 32, 4, bad) == "checksum"
    for part, before in zip((layers, others), untouched, strict=True):
        assert all(torch.equal(layer.rows[4], row) for layer, row in zip(part, before, strict=True))
    assert blocks.decode(b"k" * 32, 5, buf) is None
    assert all(torch.equal(layer.rows[5], layer.rows[3]) for layer in others)
    for cache_of_layer in caches.values():
        was, now = cache_of_layer[3].float(), cache_of_layer[5].float()
        assert not group.latent or torch.equal(was[..., 512:], now[..., 512:])
        assert 0 < (was - now).square().mean() < (0.01 if group.latent else 0.02)


@pytest.mark.parametrize(
    ("model", "scales", "ratio"),
    [("DeepSeek V3.2, fp8_ds_mla", V32, 1.4), ("DeepSeek V4", V4, 1.4), ("DeepSeek V4.1", V4, 1.55)],
)
def test_latents_with_scales_come_back_near_and_all_other_bytes_as_they_were(
    vllm_config: Any, model: str, scales: Scales, ratio: float
) -> None:
    """Rows of 656 bytes with an index; and states of four tokens, with an index and with states of 128 tokens."""
    config = laid_out(vllm_config, model)
    memory = allocate_kv_cache(config, torch.device("cpu"), _layout_from_name("BLHNC"))
    half = WorkerHalf.__new__(WorkerHalf)
    half._kv_cache_config = config
    group = groups_of(config, vllm_config.cache_config, latents=LATENTS if scales == V32 else Latents()).main
    assert (group.scales, group.states) == (scales, 64)
    layers, others = half._layers(group, memory), half._layers(group.opaque, memory) if group.opaque else []
    rng, tokens, end = np.random.default_rng(0), 64, 64 * scales.row
    raw = torch.empty(0, dtype=torch.uint8).set_(layers[0].rows.untyped_storage())
    raw.copy_(torch.from_numpy(rng.integers(0, 256, len(raw), np.uint8)))
    behind = others[: len(layers)] if scales.place else []
    pages = scaled_latents.page(*scaled_latents.made_up((len(layers), tokens), scales), scales)
    for layer, page in zip(layers, pages, strict=True):
        layer.rows[3] = torch.from_numpy(page[:end])
    for layer, page in zip(behind, pages, strict=bool(behind)):
        layer.rows[3] = torch.from_numpy(page[end : end + 8 * tokens])
    cache = GroupCache(layers, [block_format("wht-5x", group, b"f" * 16)], [0, 4], others)
    blocks, before = CpuBlocks(cache.memory, *cache.forms), raw.clone()
    assert blocks.nbytes == group.page_nbytes
    for exact in (0, 4):
        buf = encode(blocks, b"k" * 32, 3, exact)
        assert len(buf) < group.page_nbytes / ratio
        assert blocks.decode(b"k" * 32, 5, buf) is None
        now = np.stack([layer.rows[5].numpy() for layer in layers])
        if behind:
            now = np.concatenate([now, np.stack([layer.rows[5].numpy() for layer in behind])], 1)
        (was, kept), (found, now_kept) = (scaled_latents.read(each, tokens, scales) for each in (pages, now))
        assert all(map(np.array_equal, kept, now_kept)), "scales and RoPE's part"
        assert np.array_equal(was[:, :exact], found[:, :exact])
        assert 0 < np.square(was - found).sum() < 0.015 * np.square(was).sum()
        assert all(torch.equal(layer.rows[5], layer.rows[3]) for layer in others)
        for part in (layers, others):
            for layer in part:
                layer.rows[5] = torch.as_strided(before, (layer.rows.shape[1],), (1,), layer.rows[5].storage_offset())
        assert torch.equal(raw, before)
    assert cache.layout.shape == cache.shape
    assert is_aligned(cache.layout), "kernels copy 16 bytes at once"
    sources, forms = cache.measured
    assert measure(forms[0], [Sample(sources.gather_soon(3)(), 0)], None).is_faithful


ALONE = [(model, 1, None) for model in MODELS if model != "openPangu"]  # whose manager vLLM 0.32 cannot make
SPREAD = [(model, 2, None) for model in ("DeepSeek V3.2, GLM-5", "MiniMax M3", "Nemotron-NAS")]
DRAFTS = [
    (model, ranks, draft)
    for model, ranks, _ in ALONE + SPREAD
    for draft in ("one", "all")
    if (model, draft) != ("Llama 4", "all")  # which vLLM refuses: chunks and a draft in one group
]


@pytest.mark.parametrize(("model", "ranks", "draft"), ALONE + SPREAD + DRAFTS)
def test_resume_points_are_those_of_vllm_s_coordinator(
    vllm_config: Any, model: str, ranks: int, draft: str | None
) -> None:
    """Where all blocks are in its cache, it finds those that a resume point has, and no longer prefix.

    draft: of EAGLE or MTP. Its layers are in `one` group, that of the last layer with prefixes, or vLLM cannot tell.
    """
    config = generate_scheduler_kv_cache_config([laid_out(vllm_config, model)])
    if draft == "one":
        *_, last = (group for group in config.kv_cache_groups if attends(group.kv_cache_spec))
        last.is_eagle_group = True
    groups = groups_of(config, vllm_config.cache_config, LATENTS, Context(ranks))._replace(again=int(draft is not None))
    sizes = [each.kv_cache_spec.block_size * ranks for each in config.kv_cache_groups]
    coordinator = get_kv_cache_coordinator(
        kv_cache_config=config,
        max_model_len=TOKENS,
        max_in_flight_tokens=TOKENS,
        use_eagle=draft is not None,
        enable_caching=True,
        enable_kv_cache_events=False,
        dcp_world_size=ranks,
        pcp_world_size=1,
        scheduler_block_size=int(np.lcm.reduce(sizes)),
        hash_block_size=groups.hash_tokens,
    )
    null, found = coordinator.block_pool.null_block, KVCacheBlock(1)
    coordinator.block_pool.get_cached_block = lambda block_hash, ids: [found] * len(ids)
    hashes = [bytes([at % 256]) * 32 for at in range(TOKENS // groups.hash_tokens)]
    size = groups.main.tokens
    for depth in range(1, TOKENS // size + 1):
        hits, tokens, _ = coordinator.find_longest_cache_hit(hashes[: depth * size // groups.hash_tokens], depth * size)
        assert tokens == max(0, groups.deepest(depth) - groups.again) * size
        needed = defaultdict(list)
        for part in groups.parts(groups.deepest(depth)):
            needed[part.group].append(part.at)
        for group in groups.others:
            index = group.group.index
            looked_up = [at for at, block in enumerate(hits[index]) if block is not null]
            assert set(looked_up) <= set(needed[index])
            assert set(needed[index][1:]) <= set(looked_up), "but for one that vLLM allocates and does not look for"


def attends(spec: Any) -> bool:
    """True if a draft's layer may have such a cache: prefixes of it are cached, and it is no state."""
    return bool(spec.prefix_cacheable) and not isinstance(spec, (MambaSpec, ChunkedLocalAttentionSpec))
