"""A small Nemotron-NAS with random weights: its layers have different numbers of KV heads, and one has no attention."""

import json
from pathlib import Path

import torch
from group_models import COMMON
from safetensors.torch import save_file

HEADS = (4, 2, 0, 1, 2)
"""KV heads of each layer; 0 for one without attention."""
CONFIGURATION = """
from types import SimpleNamespace

from transformers import LlamaConfig


class DeciLMConfig(LlamaConfig):
    model_type = "nemotron-nas"

    def __init__(self, block_configs=None, **kwargs):
        super().__init__(**kwargs)
        self.block_configs = [
            SimpleNamespace(**{name: SimpleNamespace(**part) for name, part in block.items()})
            for block in block_configs or []
        ]

    def to_dict(self):
        return super().to_dict() | {"block_configs": None}
"""
"""What such models bring along, because Transformers has no class for their configuration."""


def make_nas_model(folder: Path) -> str:
    """Write configuration and weights; returns the folder. vLLM needs `trust_remote_code` for it."""
    width, inner, dim = COMMON["hidden_size"], COMMON["intermediate_size"], COMMON["head_dim"]
    queries = COMMON["num_attention_heads"]
    blocks = [
        {
            "attention": {"no_op": not heads, "n_heads_in_group": queries // heads if heads else None},
            "ffn": {"no_op": False, "intermediate_size": inner, "hidden_act": "silu"},
        }
        for heads in HEADS
    ]
    settings = COMMON | {
        "architectures": ["DeciLMForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_decilm.DeciLMConfig"},
        "model_type": "nemotron-nas",
        "num_hidden_layers": len(HEADS),
        "num_key_value_heads": None,
        "block_configs": blocks,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    shapes = {"model.embed_tokens": (COMMON["vocab_size"], width), "lm_head": (COMMON["vocab_size"], width)}
    norms = ["model.norm"]
    for layer, heads in enumerate(HEADS):
        name = f"model.layers.{layer}"
        norms.append(f"{name}.post_attention_layernorm")
        shapes |= {f"{name}.mlp.{part}_proj": (inner, width) for part in ("gate", "up")}
        shapes[f"{name}.mlp.down_proj"] = (width, inner)
        if heads:
            norms.append(f"{name}.input_layernorm")
            shapes |= {f"{name}.self_attn.{part}_proj": (heads * dim, width) for part in ("k", "v")}
            shapes |= {f"{name}.self_attn.q_proj": (queries * dim, width)}
            shapes |= {f"{name}.self_attn.o_proj": (width, queries * dim)}
    torch.manual_seed(0)
    weights = {f"{name}.weight": torch.randn(shape) * 0.06 for name, shape in shapes.items()}
    weights |= {f"{name}.weight": torch.ones(width) for name in norms}
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: each.to(torch.bfloat16) for name, each in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "configuration_decilm.py").write_text(CONFIGURATION, encoding="utf-8")
    return str(folder)
