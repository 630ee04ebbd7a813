"""Small LoRA adapters with random weights, for models in folders."""

import json
from pathlib import Path

import torch
from draft_model import TINY
from safetensors.torch import load_file, save_file

RANK = 8
ADAPTED = ("q_proj", "v_proj")
"""Layers that an adapter changes, of each attention."""


def make_adapter(folder: Path, seed: int, model: str = str(TINY)) -> str:
    """Write an adapter of a model, and return its folder.

    Adapters of two seeds have different contents of the same size.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "bias": "none"}
    settings["target_modules"] = list(ADAPTED)  # type: ignore[assignment]
    random = torch.Generator().manual_seed(seed)
    adapted, weights = tuple(f".{name}.weight" for name in ADAPTED), {}
    for name, tensor in sorted(load_file(Path(model) / "model.safetensors").items()):
        if name.endswith(adapted):
            place, (outputs, inputs) = f"base_model.model.{name.removesuffix('.weight')}", tensor.shape
            weights[f"{place}.lora_A.weight"] = 0.05 * torch.randn(RANK, inputs, generator=random)
            weights[f"{place}.lora_B.weight"] = 0.05 * torch.randn(outputs, RANK, generator=random)
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(weights, folder / "adapter_model.safetensors")
    return str(folder)
