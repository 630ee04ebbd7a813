"""Lloyd-Max quantizers of the standard normal distribution.

S. P. Lloyd, "Least squares quantization in PCM", IEEE Trans. Inf. Theory 28 (1982); J. Max, "Quantizing for
minimum distortion", IRE Trans. Inf. Theory 6 (1960). The quantizer is symmetric, so only its positive half is
kept: a number is its sign and the index of a magnitude.
"""

import math
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple


class Quantizer(NamedTuple):
    """The positive half of a symmetric quantizer with 2 * len(levels) levels.

    levels: centroids, ascending. thresholds: where a magnitude's index steps up, one less than levels;
    between equal signs only, for the threshold at 0 is the sign itself.
    """

    levels: tuple[float, ...]
    thresholds: tuple[float, ...]


def _density(x: float) -> float:
    return math.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)


def _upper_tail(x: float) -> float:
    return 0.5 * math.erfc(x / math.sqrt(2.0))


@lru_cache
def lloyd_max(bits: int) -> Quantizer:
    """Solve for the quantizer of N(0, 1) with 2**bits levels.

    Iterates Lloyd's two conditions until nothing moves by 1e-13: a threshold is the middle of its neighbours,
    a level is the mean of its cell.
    """
    count = 2 ** (bits - 1)
    levels = [3.0 * (k + 0.5) / count for k in range(count)]
    moved = 1.0
    while moved > 1e-13:
        edges = [0.0, *_middles(levels), math.inf]
        means = [(_density(a) - _density(b)) / (_upper_tail(a) - _upper_tail(b)) for a, b in pairwise(edges)]
        moved = max(abs(new - old) for new, old in zip(means, levels, strict=True))
        levels = means
    return Quantizer(tuple(levels), tuple(_middles(levels)))


def _middles(levels: list[float]) -> list[float]:
    return [(a + b) / 2.0 for a, b in pairwise(levels)]
