"""Drafts to try: one that guesses well, and a model that has its own.

The EAGLE draft needs no training: it is the tiny model's own layers, behind one that passes on what it gets. EAGLE's
first layer does without a norm, and the last one's output goes to the model's head without one: guesses are those of
the model, but for that norm's weights, and for the prompt's first token, which drafts do not see.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

TINY = Path(__file__).parents[1] / "data" / "tiny-llama"
LAYERS = 5


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
