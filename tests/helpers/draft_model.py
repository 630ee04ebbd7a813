"""An EAGLE draft of the tiny model that guesses well, without training: the tiny model's own layers, behind one that
passes on what it gets.

EAGLE's first layer does without a norm, and the last one's output goes to the model's head without one: guesses are
those of the model, but for that norm's weights, and for the prompt's first token, which drafts do not see.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

TINY = Path(__file__).parents[1] / "data" / "tiny-llama"
LAYERS = 5


def make_draft(folder: Path) -> str:
    """Write config.json and the weights; returns the folder."""
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
