"""Fixed randomized Hadamard rotation: x -> H S x, orthonormal, the same for every vector, process and machine.

S flips signs; H is the Walsh-Hadamard transform in natural order times 1/sqrt(size). If head_dim is no power of two, H
is block-diagonal, a block for each power of two in head_dim's binary expansion, largest first (96 = 64 + 32). The order
of additions is part of the format: strides 1, 2, 4, ... up to half the block. Codecs' docstrings call H without the
factor hadamard, and the signs with the factor w.

The sign of element i is the top bit of splitmix64's i-th output from SEED, set for minus:

    z = SEED + (i + 1) * 0x9E3779B97F4A7C15                (all modulo 2**64)
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
"""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

SEED = 0x4D616E7468616E  # "Manthan"
_MASK = 2**64 - 1


def sign(i: int) -> int:
    """Return the sign of element i of a vector, +1 or -1."""
    z = (SEED + (i + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return -1 if (z ^ (z >> 31)) >> 63 else 1


def block_sizes(head_dim: int) -> tuple[int, ...]:
    """Return the powers of two whose sum is head_dim, largest first."""
    return tuple(1 << k for k in reversed(range(head_dim.bit_length())) if head_dim >> k & 1)


class Rotation(NamedTuple):
    """Constants of a head size. To rotate, multiply by the weights, then transform each block; back in reverse."""

    weights: npt.NDArray[np.float32]  # [head_dim], each element's sign over the square root of its block's size
    blocks: npt.NDArray[np.int64]  # see `block_sizes`
    root: np.float32  # 1 / sqrt(head_dim)


@lru_cache
def rotation(head_dim: int) -> Rotation:
    """Return the constants of a head size. The arrays are read-only."""
    sizes = block_sizes(head_dim)
    weights = np.concatenate([np.full(size, size**-0.5) for size in sizes]) * [sign(i) for i in range(head_dim)]
    made = Rotation(weights.astype(np.float32), np.array(sizes, np.int64), np.float32(1 / math.sqrt(head_dim)))
    for array in made[:2]:
        array.flags.writeable = False
    return made
