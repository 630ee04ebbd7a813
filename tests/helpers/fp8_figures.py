"""Sizes of a model's exact KV in fp8 and bf16: blocks of 16 tokens in `klt-exact`, decoded and compared bit for bit.

manthan calibrate MODEL --metric none --tokens 6144 --out PROFILE
python tests/helpers/fp8_figures.py MODEL PROFILE TEXT
"""

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from manthan.codec.base import Dtype
from manthan.codec.block import BlockFormat, BlockShape
from manthan.codec.cpu.numbers import FORMS, as_numbers
from manthan.codec.model import ModelFacts
from manthan.codec.profile import Profile

TOKENS, BLOCK = 1024, 16


def ratio(dtype: Dtype, keys: np.ndarray, values: np.ndarray, profile: Profile) -> float:
    """Return the KV's bytes over those of its compressed blocks. keys, values: float32, after RoPE."""
    layers, heads, tokens, head_dim = keys.shape
    shape = BlockShape(layers, heads, BLOCK, head_dim, dtype)
    of = BlockFormat("klt-exact", shape, bytes(16), facts=ModelFacts(profile.info.rope, profile))
    nbytes = 0
    for first in range(0, tokens, BLOCK):
        x = [as_numbers(kind[:, :, first : first + BLOCK].copy(), dtype) for kind in (keys, values)]
        block = of.encode(*x, key=b"", first_token=first, exact=0)
        assert all(map(np.array_equal, x, of.decode(block, key=b"")))
        nbytes += block.size
    return shape.nbytes * (tokens // BLOCK) / nbytes


def main(model: str, profile: str, text: str) -> None:
    """Print a line for each dtype."""
    tokens = AutoTokenizer.from_pretrained(model)(Path(text).read_text("utf-8"), return_tensors="pt").input_ids
    with torch.no_grad():
        cache = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(tokens[:, :TOKENS]).past_key_values
    keys, values = (np.stack([getattr(of, kind)[0].numpy() for of in cache.layers]) for kind in ("keys", "values"))
    for dtype in (Dtype.BFLOAT16, *FORMS):
        print(f"{dtype.name}: {ratio(dtype, keys, values, Profile.load(Path(profile))):.2f} times smaller, exact")


if __name__ == "__main__":
    main(*sys.argv[1:])
