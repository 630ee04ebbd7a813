"""Configurations of small models, one for each kind of KV cache, to be built without weights."""

import json
from pathlib import Path
from typing import Any

import transformers
from group_models import COMMON
from group_models import FAMILIES as SEVERAL
from latent_model import CONFIG as LATENTS

STATES = {"state_size": 16, "num_hidden_layers": 2, "hidden_size": 256, "num_heads": 8, "head_dim": 64, "n_groups": 1}
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    model: (config, COMMON | more)
    for config, model, more in reversed(SEVERAL.values())
    if model != "MistralForCausalLM"
} | {
    "LlamaForCausalLM": ("LlamaConfig", COMMON | {"num_hidden_layers": 4}),
    "DeepseekV3ForCausalLM": ("DeepseekV3Config", LATENTS | {"topk_method": "noaux_tc"}),
    "Mamba2ForCausalLM": ("Mamba2Config", STATES | {"vocab_size": COMMON["vocab_size"]}),
    "Llama4ForCausalLM": (
        "Llama4TextConfig",
        COMMON | {"num_hidden_layers": 4, "num_local_experts": 4, "attention_chunk_size": 128},
    ),
    "WhisperForConditionalGeneration": (
        "WhisperConfig",
        {"d_model": 256, "encoder_layers": 2, "decoder_layers": 2}
        | dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    ),
}
"""Configuration's class and its arguments, by the class of vLLM's registry."""


def small_config(name: str, folder: Path, **more: Any) -> str:
    """Write config.json of a small model of this class; returns the folder. more: keys instead of its own."""
    kind, arguments = SMALL[name]
    settings = getattr(transformers, kind)(**arguments).to_dict() | arguments | {"dtype": "bfloat16"}
    settings |= {"architectures": [name], **more}
    (folder / "config.json").write_text(json.dumps(settings, default=str), encoding="utf-8")
    return str(folder)
