"""The tiny model with what Qwen2.5 has: a bias of the keys in the pairs that turn slowest."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from vllm_engine import MODEL


def with_biased_keys(folder: Path, bias: float) -> str:
    """Make it in this folder, which is empty, and return its name."""
    for file in Path(MODEL).iterdir():
        shutil.copy(file, folder)
    config = json.loads((folder / "config.json").read_text())
    heads, dim = config["num_key_value_heads"], config["head_dim"]
    config["attention_bias"] = True
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    sizes = {"q": dim * config["num_attention_heads"], "v": heads * dim, "o": config["hidden_size"]}
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}.self_attn"
        for which, size in sizes.items():
            weights[f"{name}.{which}_proj.bias"] = torch.zeros(size, dtype=torch.bfloat16)
        of_keys = torch.zeros(heads, dim)
        for pair in (1, 2, 3):
            of_keys[:, dim // 2 - pair], of_keys[:, dim - pair] = bias * (-1) ** pair, 0.7 * bias
        weights[f"{name}.k_proj.bias"] = of_keys.flatten().to(torch.bfloat16)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return str(folder)
