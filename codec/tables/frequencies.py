"""Tables of symbol frequencies for the entropy coder, of rounded numbers from generalized Gaussian distributions.

The distribution of numbers, rotated or transformed, is somewhere between Gaussian and Laplacian, or has heavier tails.
The generalized Gaussian's density is proportional to exp(-|x|**shape), scaled to a standard deviation. There is a table
for each of a few shapes and many deviations. Deviations are in steps of the quantizer.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

SHAPES = (2.0, 1.4, 1.0, 0.7)
OCTAVE = 3
"""Number of tables of each shape for each doubling of the standard deviation."""
DEVIATIONS = 2.0 ** (np.arange(-10, 18) / OCTAVE)
"""Standard deviations of the tables, in steps of the quantizer: 0.1 to 51."""
SCALE = 1 << 12
LARGEST = 127
ESCAPE = 255
"""Symbol of all numbers without a frequency; the number follows in 16 bits."""
RAREST = 0.5 / SCALE
"""Least probability of a number that gets a frequency, so that it needs no escape."""
UNIT = 256
"""Number of units in a bit: sizes are counted in 1 / UNIT of a bit."""


@lru_cache
def family() -> npt.NDArray[np.uint16]:
    """Return frequencies [tables, 256] of the numbers -127 to 127, and last of ESCAPE, at least 1. The sum is SCALE."""
    made = np.array(
        [as_frequencies(_masses(each, deviation)) for each in map(_density, SHAPES) for deviation in DEVIATIONS],
        np.uint16,
    )
    made.flags.writeable = False
    return made


def expected(frequencies: npt.NDArray[np.uint16]) -> npt.NDArray[np.int64]:
    """Return the expected bits of a number with the table's distribution, in units of 1 / UNIT bit, [tables].

    A number without a frequency costs an escape and 16 bits.
    """
    with np.errstate(divide="ignore"):
        bits = np.log2(SCALE) - np.log2(frequencies.astype(np.float64))
    bits[:, -1] += 16
    bits = np.where(np.isinf(bits), bits[:, -1:], bits)
    found: npt.NDArray[np.int64] = np.rint((bits * (frequencies / SCALE)).sum(1) * UNIT).astype(np.int64)
    return found


def as_frequencies(likely: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Return frequencies of probabilities [n], and the escape's, [n + 1]. The sum is SCALE."""
    counts = np.where(likely < RAREST, 0, np.maximum(1, np.rint(likely * SCALE))).astype(np.int64)
    escape = max(1, round((1 - likely[counts > 0].sum()) * SCALE))
    excess = int(counts.sum()) + escape - SCALE  # of rounding; taken from the likeliest numbers
    order = np.argsort(-counts, kind="stable")[: max(1, int((counts > 1).sum()))]
    counts[order] -= excess // len(order)
    counts[order[: excess % len(order)]] -= 1
    return np.append(counts, escape)


def _masses(density: npt.NDArray[np.float64], deviation: float) -> npt.NDArray[np.float64]:
    """Return the probabilities of the numbers -127 to 127, from the points of `_density`."""
    points = np.linspace(0, 24 * deviation, len(density))
    right = np.bincount(np.minimum(np.rint(points), LARGEST + 1).astype(np.int64), density, LARGEST + 2)
    right[0] *= 2
    both = np.concatenate([right[LARGEST:0:-1], right[: LARGEST + 1]])
    shares: npt.NDArray[np.float64] = both / (2 * right.sum() - right[0])
    return shares


def _density(shape: float) -> npt.NDArray[np.float64]:
    """Return the density, not normalized, at points from 0 to 24 standard deviations."""
    x = np.linspace(0, 60 ** (1 / shape), 400_001)
    density: npt.NDArray[np.float64] = np.exp(-(x**shape))
    deviation = np.sqrt((density * x * x).sum() / density.sum())
    density = np.exp(-((np.linspace(0, 24, 400_001) * deviation) ** shape))
    return density
