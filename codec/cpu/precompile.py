"""Compile the CPU's kernels into numba's cache on disk: python -m manthan.codec.cpu.precompile DTYPE CODEC ..."""

import sys
from collections.abc import Sequence

import numpy as np

from manthan.codec.base import Dtype
from manthan.codec.block import BlockFormat, BlockShape
from manthan.codec.calibration import ProfileBuilder
from manthan.codec.model import NO_FACTS, ModelFacts
from manthan.codec.profile import ProfileInfo
from manthan.codec.registry import needs_profile
from manthan.codec.rope import Rope

HEAD_DIM, TOKENS = 64, 256


def main(dtype: str, codecs: Sequence[str]) -> None:
    """Compile the CPU kernels of codecs, by name. Shapes and profiles do not matter. dtype: name of a `Dtype`."""
    shape = BlockShape(layers=1, heads=1, tokens=16, head_dim=HEAD_DIM, dtype=Dtype[dtype])
    for codec in codecs:
        facts = _facts() if needs_profile(codec) else NO_FACTS
        BlockFormat(codec, shape, bytes(16), facts=facts).warm_up()


def _facts() -> ModelFacts:
    """Return a RoPE, and a profile calibrated on random numbers."""
    rope = Rope(tuple(np.geomspace(1, 1e-4, HEAD_DIM // 2)))
    builder, chance = ProfileBuilder(ProfileInfo("", 1, 1, HEAD_DIM, rope, "none")), np.random.default_rng(0)
    parts = chance.standard_normal((2, 1, TOKENS, HEAD_DIM), np.float32)
    builder.add(0, np.arange(TOKENS), *parts)
    return ModelFacts(rope, builder.finish())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
