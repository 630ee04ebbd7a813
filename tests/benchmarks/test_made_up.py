"""A profile that nobody measured, and numbers that fit it."""

import numpy as np
import pytest
import torch

from manthan.benchmarks import made_up
from manthan.codec import BlockFormat, BlockShape
from manthan.codec.model import ModelFacts
from manthan.codec.profile import PRESETS

LAYERS, HEADS, HEAD_DIM, TOKENS = 2, 2, 64, 128


@pytest.mark.parametrize("preset", PRESETS)
def test_codes_are_about_as_small_as_the_codec_s_name_says(preset: str) -> None:
    rope = made_up.rope_of(HEAD_DIM)
    profile = made_up.profile(LAYERS, HEADS, HEAD_DIM, rope)
    shape = BlockShape(LAYERS, HEADS, TOKENS, HEAD_DIM)
    form = BlockFormat(preset, shape, bytes(16), facts=ModelFacts(rope, profile))
    keys, values = (x.bfloat16().view(torch.uint16).numpy() for x in made_up.kv(profile, TOKENS, torch.device("cpu")))
    block = form.encode(keys, values, key=b"k", first_token=0, exact=0)
    assert 0.9 < 4 * keys.size / len(block) / PRESETS[preset] < 1.1
    for x, y in zip((keys, values), form.decode(block, key=b"k"), strict=True):
        right, found = (torch.from_numpy(np.array(part)).view(torch.bfloat16).float() for part in (x, y))
        assert (right - found).square().mean() < 0.1 * right.square().mean()
