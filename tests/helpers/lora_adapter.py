"""A small LoRA adapter of the tiny model with random weights."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK, WIDTH, LAYERS = 8, 192, 4
OUTPUTS = {"q_proj": 512, "k_proj": 256, "v_proj": 256}
"""Numbers that the adapted layers give."""


def make_adapter(folder: Path, seed: int, gain: float = 0.05) -> str:
    """Write its two files anew; returns the folder. Two seeds, two contents of as many bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "bias": "none"}
    settings["target_modules"] = list(OUTPUTS)  # type: ignore[assignment]
    random = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(LAYERS):
        for name, outputs in OUTPUTS.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{place}.lora_A.weight"] = gain * torch.randn(RANK, WIDTH, generator=random)
            weights[f"{place}.lora_B.weight"] = gain * torch.randn(outputs, RANK, generator=random)
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(weights, folder / "adapter_model.safetensors")
    return str(folder)
