"""The constants that encoding and decoding need, one set for each head_dim, number of bits, rotation
and scale."""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from manthan.codec.tables.lloyd_max import lloyd_max
from manthan.codec.tables.rotation import block_sizes, weights

LARGEST_BF16 = np.float32(float.fromhex("0x1.fep127"))


class Tables(NamedTuple):
    """weights: [head_dim] float32. blocks: int64, the Hadamard blocks' sizes, none for the unrotated codec.
    levels, thresholds: float32, of magnitudes. root: 1 / sqrt(head_dim). largest: bf16's largest number.
    unbiased: whether encoding stores the unbiased scale, or the least-squares one.
    """

    weights: npt.NDArray[np.float32]
    blocks: npt.NDArray[np.int64]
    levels: npt.NDArray[np.float32]
    thresholds: npt.NDArray[np.float32]
    root: np.float32
    largest: np.float32
    unbiased: bool


@lru_cache
def tables(head_dim: int, bits: int, rotated: bool, unbiased: bool = False) -> Tables:
    """The constants of a quantizer with 2**bits levels. The arrays are read-only."""
    quantizer = lloyd_max(bits)
    made = Tables(
        weights(head_dim) if rotated else np.ones(head_dim, np.float32),
        np.array(block_sizes(head_dim) if rotated else (), np.int64),
        np.array(quantizer.levels, np.float32),
        np.array(quantizer.thresholds, np.float32),
        np.float32(1.0 / math.sqrt(head_dim)),
        LARGEST_BF16,
        unbiased,
    )
    for array in made[:4]:
        array.flags.writeable = False
    return made
