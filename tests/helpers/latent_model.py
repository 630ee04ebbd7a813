"""A small model like DeepSeek-V3 with random weights: multi-head latent attention (MLA) of the usual sizes."""

import json
from pathlib import Path

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


def make_latent_model(folder: Path, with_weights: bool = True) -> str:
    """Write config.json, and the weights if they are wanted; returns the folder."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(**CONFIG)
    if with_weights:
        torch.manual_seed(0)
        model = DeepseekV3ForCausalLM(config).to(torch.bfloat16)
        with torch.no_grad():
            for weights in model.parameters():
                if weights.ndim >= 2:
                    weights.normal_(0, GAIN / weights.shape[-1] ** 0.5)
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
