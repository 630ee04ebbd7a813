"""Shapes of public models, for engines with made-up weights, because times depend on sizes alone.

A shape is the text part of the model's config.json, with vLLM's class for the text part as architecture. There is no
quantization, so that weights are bf16.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import typer

SPARE_BLOCKS = 8
"""Pool blocks for a KV cache group of recurrent states. A request uses two; the rest keeps states of ended requests."""


@dataclass(frozen=True)
class PublicShape:
    """Shape of a model. config: content of config.json. source: origin of the numbers.

    block_size: tokens of a block, as vLLM chooses for the model.
    """

    config: dict[str, Any]
    source: str
    block_size: int = 16

    def cut(self, layers: int) -> dict[str, Any]:
        """Return the configuration with only the first `layers` layers; with all layers for 0. Raises ValueError."""
        has = self.config["num_hidden_layers"]
        if not 0 <= layers <= has:
            raise ValueError(f"{layers} layers cannot be had: the model has {has}")
        if not layers:
            return self.config
        kinds = {"layer_types": self.config["layer_types"][:layers]} if "layer_types" in self.config else {}
        return self.config | {"num_hidden_layers": layers} | kinds


def every(count: int, layers: int, other: str) -> list[str]:
    """Return the types of `layers` layers: full attention in each count-th layer, and `other` in the rest."""
    return [other if (n + 1) % count else "full_attention" for n in range(layers)]


PUBLIC = {
    "qwen3-8b": PublicShape(
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "dtype": "bfloat16",
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "hidden_act": "silu",
            "attention_bias": False,
            "max_position_embeddings": 40960,
            "rope_theta": 1000000,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
        },
        "Qwen/Qwen3-8B",
    ),
    "qwen3.5-35b-a3b": PublicShape(
        {
            "architectures": ["Qwen3_5MoeForCausalLM"],
            "model_type": "qwen3_5_moe_text",
            "dtype": "bfloat16",
            "vocab_size": 248320,
            "hidden_size": 2048,
            "num_hidden_layers": 40,
            "layer_types": every(4, 40, "linear_attention"),
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "hidden_act": "silu",
            "attention_bias": False,
            "max_position_embeddings": 262144,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
            "rms_norm_eps": 1e-6,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "mamba_ssm_dtype": "float32",
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "tie_word_embeddings": False,
        },
        "Qwen/Qwen3.5-35B-A3B, text_config: Transformers' Qwen3_5MoeTextConfig, and the model's own positions and RoPE",
        block_size=1056,
    ),
    "gpt-oss-20b": PublicShape(
        {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "dtype": "bfloat16",
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 24,
            "layer_types": every(2, 24, "sliding_attention"),
            "sliding_window": 128,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "attention_bias": True,
            "hidden_act": "silu",
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "swiglu_limit": 7.0,
            "initial_context_length": 4096,
            "max_position_embeddings": 131072,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
        },
        "openai/gpt-oss-20b, whose experts are of MXFP4; Transformers' GptOssConfig has the defaults of the 120b",
    ),
    "gemma3-12b": PublicShape(
        {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "dtype": "bfloat16",
            "vocab_size": 262208,
            "hidden_size": 3840,
            "intermediate_size": 15360,
            "num_hidden_layers": 48,
            "layer_types": every(6, 48, "sliding_attention"),
            "sliding_window": 1024,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "attention_bias": False,
            "max_position_embeddings": 131072,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
        },
        "google/gemma-3-12b-it, text_config",
    ),
    "deepseek-v2-lite": PublicShape(
        {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "dtype": "bfloat16",
            "vocab_size": 102400,
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "hidden_act": "silu",
            "attention_bias": False,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 6,
            "topk_method": "greedy",
            "scoring_func": "softmax",
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "max_position_embeddings": 163840,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000,
                "factor": 40,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 0.707,
                "mscale_all_dim": 0.707,
                "original_max_position_embeddings": 4096,
            },
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
        },
        "deepseek-ai/DeepSeek-V2-Lite",
        block_size=64,
    ),
}
"""Shapes by name. Numbers are of the models' published config.json, written from memory and compared with
Transformers' classes."""
DEFAULT = "qwen3-8b"


def write_model(folder: Path, name: str = DEFAULT, layers: int = 0) -> Path:
    """Write a folder that vLLM loads as a model with made-up weights.

    layers: number of first layers to keep; 0 for all. Raises ValueError if the model has fewer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(PUBLIC[name].cut(layers), indent=2))
    return folder


def model_folder(model: Path | None, made_up_in: Path) -> Path | None:
    """Return the folder of an option --model. Write one below `made_up_in` for the name of a public shape.

    Raises BadParameter if `model` is neither a model's folder nor a name.
    """
    if model is None or (model / "config.json").exists():
        return model
    if str(model) not in PUBLIC:
        raise typer.BadParameter(
            f"--model {model} has no config.json: name the folder of a model, or a shape: {', '.join(PUBLIC)}"
        )
    return write_model(made_up_in / f"{model}-shape", str(model))


@dataclass(frozen=True)
class Shape:
    """Sizes of a model. vocabulary: number of token ids. positions: longest context.

    token_nbytes: bf16 bytes of a token's KV, as if all layers had full attention. groups: number of KV cache groups
    with sliding windows or recurrent states. window: tokens of a sliding window; 0 without windows. is_latent: True for
    latents (MLA), which compress less than keys and values.
    """

    vocabulary: int
    positions: int
    token_nbytes: int
    groups: int = 0
    window: int = 0
    is_latent: bool = False

    @classmethod
    def of(cls, model: Path) -> Self:
        config = json.loads((model / "config.json").read_text())
        if config.get("kv_lora_rank"):
            numbers = config["kv_lora_rank"] + config["qk_rope_head_dim"]
        else:
            heads = config.get("num_key_value_heads", config["num_attention_heads"])
            numbers = 2 * heads * (config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
        kinds = config.get("layer_types") or ["full_attention"]
        full = kinds.count("full_attention")
        return cls(
            config["vocab_size"],
            config["max_position_embeddings"],
            2 * config["num_hidden_layers"] * numbers,
            groups=math.ceil((len(kinds) - full) / full),
            window=config["sliding_window"] if "sliding_attention" in kinds else 0,
            is_latent=bool(config.get("kv_lora_rank")),
        )

    def further_blocks(self, block_size: int, batched_tokens: int) -> int:
        """Return the number of pool blocks that groups of windows and states use.

        A step has at most `batched_tokens` tokens, and vLLM schedules the next step before the first one ends.
        """
        each = math.ceil((self.window + 2 * batched_tokens) / block_size) + 2 if self.window else SPARE_BLOCKS
        return self.groups * each
