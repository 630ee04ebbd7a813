"""Compile the CPU's kernels into numba's cache on disk: python -m manthan.codec.cpu.precompile DTYPE CODEC ..."""

import sys
from collections.abc import Sequence

from manthan.codec.base import Dtype
from manthan.codec.block import BlockFormat, BlockShape
from manthan.codec.registry import needs_profile


def main(dtype: str, codecs: Sequence[str]) -> None:
    """Compile the kernels of all codecs without a profile.

    Args:
        dtype: name of the KV cache's dtype in `Dtype`.
    """
    shape = BlockShape(layers=1, heads=1, tokens=16, head_dim=128, dtype=Dtype[dtype])
    for codec in codecs:
        if not needs_profile(codec):
            BlockFormat(codec, shape, bytes(16)).warm_up()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
