"""Small models with several KV cache groups, random weights, made in a second or two."""

from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY = 1024
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
}
STATES = {"mamba_d_ssm": 512, "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_n_groups": 1}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
GATED = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "shared_expert_intermediate_size": 128,
}
PER_LAYER = {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 0}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {"num_hidden_layers": 12, "sliding_window": 64}),
    "gpt-oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            "num_hidden_layers": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 128,
            "initial_context_length": 4096,
        },
    ),
    "gemma3-full": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "num_hidden_layers": 12,
            "sliding_window": 64,
            "layer_types": ["full_attention", "full_attention", "sliding_attention"] * 4,
        },
    ),
    "llama4": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {
            "num_hidden_layers": 8,
            "attention_chunk_size": 192,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 256,
            "interleave_moe_layer_step": 2,
        },
    ),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"num_hidden_layers": 4, "sliding_window": 128}),
    "gemma4": (
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {"num_hidden_layers": 12, "sliding_window": 64, "global_head_dim": 128, **PER_LAYER},
    ),
    "gemma4-large": (
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {
            "num_hidden_layers": 12,
            "sliding_window": 64,
            "global_head_dim": 64,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            **PER_LAYER,
        },
    ),
    "gemma3n": (
        "Gemma3nTextConfig",
        "Gemma3nForCausalLM",
        {
            "num_hidden_layers": 10,
            "num_kv_shared_layers": 5,
            "sliding_window": 64,
            "laurel_rank": 16,
            "activation_sparsity_pattern": [0.0] * 10,
            **PER_LAYER,
            "hidden_size_per_layer_input": 32,
        },
    ),
    "qwen3-next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {"num_hidden_layers": 8, **GATED, **MIXTURE}),
    "qwen3-next-small-blocks": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            "num_hidden_layers": 8,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "max_position_embeddings": 16384,
            **GATED,
            **MIXTURE,
        },
    ),
    "falcon-h1": (
        "FalconH1Config",
        "FalconH1ForCausalLM",
        {"num_hidden_layers": 4, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 64, **STATES},
    ),
    "nemotron-h": (
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {
            "layers_block_type": ["mamba", "mlp", "mamba", "attention"] * 2,
            "mamba_num_heads": 8,
            "mamba_head_dim": 64,
            "ssm_state_size": 64,
            "n_groups": 1,
            "conv_kernel": 4,
            "chunk_size": 64,
        },
    ),
    "granite": (
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {
            "num_hidden_layers": 6,
            "layer_types": ["mamba", "mamba", "attention"] * 2,
            "shared_intermediate_size": 256,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_n_heads": 8,
            "mamba_d_head": 64,
            "mamba_d_state": 64,
            "mamba_n_groups": 1,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_chunk_size": 64,
            "position_embedding_type": "rope",
        },
    ),
}


def made(family: str, folder: Path) -> str:
    """A model of the family, in this folder."""
    config, model, more = FAMILIES[family]
    torch.manual_seed(0)
    built = getattr(transformers, model)(getattr(transformers, config)(**(COMMON | more)))
    for parameter in built.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.06)  # large enough that answers differ
    built.to(torch.bfloat16).save_pretrained(folder)
    return str(folder)
