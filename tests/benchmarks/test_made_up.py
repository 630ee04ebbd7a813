"""The made-up profile: blocks of what vLLM's made-up weights compute are as small as their codec's name says."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from torch import linalg

from manthan.benchmarks import made_up
from manthan.benchmarks.shapes import PUBLIC, write_model
from manthan.codec.block import BlockFormat, BlockShape
from manthan.codec.model import ModelFacts
from manthan.codec.wire import part_ends

RATIOS = 20, 12, 8, 5


@pytest.mark.parametrize("numbers", ["even", "correlated"])
def test_blocks_have_their_codecs_sizes(numbers: str, tmp_path: Path) -> None:
    config = PUBLIC["qwen3-8b"].config
    heads, dim, tokens = config["num_key_value_heads"], config["head_dim"], 16
    if numbers == "even":
        profile = made_up.of_model(write_model(tmp_path, "qwen3-8b", layers=1))
        rng = np.random.default_rng(0)
        keys = rng.standard_normal((1, heads, tokens, dim), np.float32)
        weights = rng.uniform(-0.001, 0.001, config["hidden_size"])
        values = float(np.linalg.norm(weights)) * rng.permuted(keys, axis=3)
    else:
        profile = made_up.profile(1, heads, dim, made_up.rope_of(dim))
        keys, values = (part.numpy() for part in made_up.kv(profile, tokens, made_up.torch.device("cpu")))
    facts = ModelFacts(profile.info.rope, profile)
    form = BlockFormat("klt-5x", BlockShape(1, heads, tokens, dim), bytes(16), facts=facts)
    bf16 = [(np.ascontiguousarray(part).view(np.uint32) >> 16).astype(np.uint16) for part in (keys, values)]
    block = form.encode(*bf16, key=b"k", first_token=0, exact=0)
    for end, ratio in zip(part_ends(block), RATIOS, strict=True):
        assert ratio <= 2 * 2 * heads * tokens * dim / end <= 1.15 * ratio


def test_written_weights_give_keys_and_values_of_falling_variances(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "qwen3-8b", layers=1)
    config = json.loads((folder / "config.json").read_text())
    small = {"hidden_size": 256, "intermediate_size": 64, "vocab_size": 500, "num_key_value_heads": 2}
    (folder / "config.json").write_text(json.dumps(config | small | {"num_attention_heads": 2}))
    made_up.write_weights(folder, "cpu")
    weights = load_file(folder / "model.safetensors")
    for part, least in (("k_proj", 100), ("v_proj", 100), ("q_proj", 1)):
        of = weights[f"model.layers.0.self_attn.{part}.weight"].float()
        values = linalg.svdvals(of)
        assert of.std() == pytest.approx(0.02, rel=0.05)
        assert values[0] / values[200] > least * 2, part
    assert values[0] / values[200] < 10, "queries are even"
