"""A small model like DeepSeek-V3 with random weights: multi-head latent attention (MLA) of the usual sizes."""

import json
from pathlib import Path
from typing import Any

import torch

LAYERS, LATENT, TURNED, VOCAB = 3, 512, 64, 1024
CONFIG = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": LATENT,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": TURNED,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 4096,
}
GAIN = 1.5
"""Of the weights, so that what a token attends to shows in the answer."""


def make_latent_model(folder: Path, hidden: int = 256, gain: float = GAIN, decay: float = 1.0) -> str:
    """Write config.json and weights; returns the folder.

    hidden: numbers of a hidden state. Latents have no more directions.
    decay: ratio of each direction of latents to the one before.
    """
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(**CONFIG | {"hidden_size": hidden})
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.ndim >= 2:
                weights.normal_(0, gain / weights.shape[-1] ** 0.5)
        for layer in model.model.layers if decay < 1 else ():
            latents = layer.self_attn.kv_a_proj_with_mqa.weight[:LATENT]
            left, _, right = torch.linalg.svd(latents.float(), full_matrices=False)
            sizes = decay ** torch.arange(len(right), dtype=torch.float32)
            latents.copy_(left * (sizes * sizes.square().mean().rsqrt() * gain) @ right)
    model.save_pretrained(folder)
    of_vllm = {"architectures": ["DeepseekV3ForCausalLM"], "dtype": "bfloat16", "topk_method": "noaux_tc"}
    settings = config.to_dict() | of_vllm
    (folder / "config.json").write_text(json.dumps(settings, default=str))
    return str(folder)


def allow_prefix_caching() -> None:
    """vLLM's CPU build switches it off for such models; its kernel for single tokens does read what is cached."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def checked(cls: type, vllm_config: object) -> None:
        check(cls, vllm_config)
        vllm_config.cache_config.enable_prefix_caching = True  # type: ignore[attr-defined]

    CpuPlatform.check_and_update_config = classmethod(checked)  # type: ignore[method-assign]


INDEX = 132
"""Bytes of a token's index keys in a layer, as DeepSeek V3.2 has them."""


def add_index_keys() -> None:
    """Give each layer a cache of index keys, made of the first numbers of latents. vLLM's CPU build has no such model.

    It is registered ahead of the latents' cache, so that the scheduler is told its spec.
    """
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl
    from vllm.v1.kv_cache_interface import MLAAttentionSpec, SparseCacheRole

    class IndexKeys(AttentionLayerBase):
        def __init__(self, attention: Any, prefix: str) -> None:
            self.attention = attention
            get_current_vllm_config().compilation_config.static_forward_context[f"{prefix}.index"] = self

        def __getattr__(self, name: str) -> Any:
            return getattr(self.attention, name)

        def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
            self.kv_cache = kv_cache

        def get_attn_backend(self) -> Any:
            return self.attention.get_attn_backend()

        def get_kv_cache_spec(self, vllm_config: Any) -> MLAAttentionSpec:
            return MLAAttentionSpec(
                block_size=vllm_config.cache_config.block_size,
                num_kv_heads=1,
                max_tp_shards=1,
                head_size=INDEX,
                dtype=torch.uint8,
                cache_role=SparseCacheRole.INDEXER,
            )

    make, update = MLAAttention.__init__, CPUMLAImpl.do_kv_cache_update

    def made(self: Any, *args: Any, prefix: str = "", **more: Any) -> None:
        index = IndexKeys(self, prefix)
        make(self, *args, prefix=prefix, **more)
        self.impl.index = index

    def updated(
        self: Any, latents: torch.Tensor, k_pe: torch.Tensor, cache: Any, slots: torch.Tensor, *more: Any
    ) -> None:
        update(self, latents, k_pe, cache, slots, *more)
        index = getattr(self.index, "kv_cache", torch.empty(0))
        if index.numel():
            rows, valid = index.view(-1, INDEX), slots.flatten() >= 0
            rows[slots.flatten().long()[valid]] = latents[valid].contiguous().view(torch.uint8)[:, :INDEX]

    MLAAttention.__init__ = made  # type: ignore[method-assign]
    CPUMLAImpl.do_kv_cache_update = updated  # type: ignore[method-assign]
