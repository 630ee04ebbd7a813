"""Drafts to try: one that guesses well, random ones for any model, and models that have their own.

The EAGLE draft of the tiny model needs no training: it is the model's own layers, behind one that passes on what it
gets. EAGLE's first layer does without a norm, and the last one's output goes to the model's head without one: guesses
are those of the model, but for that norm's weights, and for the prompt's first token, which drafts do not see.
"""

import json
from pathlib import Path
from typing import Any

import group_models
import torch
from safetensors.torch import load_file, save_file

TINY = Path(__file__).parents[1] / "data" / "tiny-llama"
LAYERS = 5
SHAPE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
"""What a draft has as its model has it."""
MTP_NORMS = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")


def proposing(**options: Any) -> dict[str, Any]:
    return {"speculative_config": {"num_speculative_tokens": 3, **options}}


def proposed(kind: str, folder: Path) -> tuple[str, dict[str, Any]]:
    """A model, and what vLLM is told of it and its draft. kind: the model, and the method of --speculative-config. The
    draft's weights are random, but for that of the tiny model with method eagle."""
    family, method = kind.split()
    if family == "glm":
        return make_mtp_model(folder), {"load_format": "dummy", **proposing(method=method, num_speculative_tokens=1)}
    model = str(TINY) if family == "tiny-llama" else group_models.made(family, folder / "model")
    if method == "mtp":
        return add_mtp(model), proposing(method=method, num_speculative_tokens=1)
    if method == "ngram":
        return model, proposing(method=method, prompt_lookup_max=3)
    if method == "draft_model":
        return model, proposing(method=method, model=model)
    is_good = kind == "tiny-llama eagle"
    draft = make_draft(folder / "draft") if is_good else make_random_draft(folder / "draft", model, method)
    return model, proposing(method=method, model=draft)


def make_draft(folder: Path) -> str:
    """Write config.json and the weights of an EAGLE draft of the tiny model; returns the folder."""
    weights = load_file(TINY / "model.safetensors")
    settings = json.loads((TINY / "config.json").read_text())
    width = settings["hidden_size"]
    eye = torch.eye(width, dtype=torch.bfloat16)
    draft = {"fc.weight": torch.cat([eye, torch.zeros_like(eye)], 1)}  # the embedding, and nothing of the hidden state
    for name, tensor in weights.items():
        if not name.startswith("model.layers."):
            continue
        number, part = name.removeprefix("model.layers.").split(".", 1)
        draft[f"layers.{int(number) + 1}.{part}"] = tensor
        if number == "0" and part != "input_layernorm.weight":
            silent = part.endswith(("o_proj.weight", "down_proj.weight"))
            draft[f"layers.0.{part}"] = torch.zeros_like(tensor) if silent else tensor.clone()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(draft, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(settings | {"num_hidden_layers": LAYERS}))
    return str(folder)


def make_random_draft(folder: Path, model: str, method: str) -> str:
    """Write config.json and random weights of a draft of one layer with full attention, for method eagle or eagle3 and
    this model; returns the folder."""
    theirs = json.loads(Path(model, "config.json").read_text())
    shape = {name: theirs[name] for name in SHAPE}
    own = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1, "dtype": "bfloat16"}
    if method == "eagle3":
        aux = {"draft_vocab_size": shape["vocab_size"], "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
        own |= {"architectures": ["LlamaForCausalLMEagle3"], **aux}
    torch.manual_seed(0)
    weights = {name: torch.randn(size) * 0.05 for name, size in _sizes(shape, is_third=method == "eagle3").items()}
    weights |= {name: torch.ones_like(tensor) for name, tensor in weights.items() if "norm" in name}
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"rms_norm_eps": 1e-6, "rope_theta": 1e4} | shape | own))
    return str(folder)


def _sizes(shape: dict[str, int], is_third: bool) -> dict[str, tuple[int, ...]]:
    """Of a draft's weights."""
    width, inner, head = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    queries, keys = shape["num_attention_heads"] * head, shape["num_key_value_heads"] * head
    into = 2 * width if is_third else width
    layer = {
        "self_attn.q_proj": (queries, into),
        "self_attn.k_proj": (keys, into),
        "self_attn.v_proj": (keys, into),
        "self_attn.o_proj": (width, queries),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
        "post_attention_layernorm": (width,),
    }
    if not is_third:
        return {"fc.weight": (width, 2 * width)} | {f"layers.0.{name}.weight": size for name, size in layer.items()}
    layer |= {"input_layernorm": (width,), "hidden_norm": (width,)}
    ends = {"fc.weight": (width, 3 * width), "norm.weight": (width,), "lm_head.weight": (shape["vocab_size"], width)}
    return ends | {f"midlayer.{name}.weight": size for name, size in layer.items()}


def add_mtp(model: str) -> str:
    """Give a Qwen3-Next of `group_models` a layer for multi-token prediction, made of its last one; returns its
    folder."""
    folder = Path(model)
    settings = json.loads((folder / "config.json").read_text())
    last, width = f"model.layers.{settings['num_hidden_layers'] - 1}.", settings["hidden_size"]
    weights = load_file(folder / "model.safetensors")
    layer = {name.removeprefix(last): tensor for name, tensor in weights.items() if name.startswith(last)}
    own = {f"mtp.layers.0.{name}": tensor.clone() for name, tensor in layer.items()}
    own |= {f"mtp.{name}.weight": torch.zeros(width, dtype=torch.bfloat16) for name in MTP_NORMS}
    own["mtp.fc.weight"] = torch.eye(width, dtype=torch.bfloat16).repeat(1, 2)
    save_file(own, folder / "mtp.safetensors")
    (folder / "config.json").write_text(json.dumps(settings | {"num_nextn_predict_layers": 1}))
    return model


def make_mtp_model(folder: Path) -> str:
    """Write config.json of a small GLM with a layer for multi-token prediction, for weights that vLLM makes up."""
    from transformers import Glm4MoeConfig

    config = Glm4MoeConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        n_routed_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=4096,
    )
    of_vllm = {"architectures": ["Glm4MoeForCausalLM"], "dtype": "bfloat16", "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config.to_dict() | of_vllm, default=str))
    return str(folder)
