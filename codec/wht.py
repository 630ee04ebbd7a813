"""Keys and values rotated, rounded to steps and entropy-coded, without a profile: the layout of such codes, and the
arithmetic that every backend reproduces bit for bit.

The Walsh-Hadamard transform makes the numbers of any vector look Gaussian, so that nothing need be known of the model.
An entropy coder behind a uniform quantizer is within a quarter of a bit of what is possible there (Gish and Pierce,
"Asymptotically efficient quantizing", 1968), and a bit or so better than a quantizer of fixed rate at the same bytes.
Keys are coded as they are before RoPE, less their block's mean. One step for all keys of a layer is best, because
errors in logits count alike whichever key they come from. Values are averaged, and have a step each.

Decoded numbers that are encoded again give the same whole numbers and the same steps, so that nothing drifts:

- A mean is subtracted as a whole number of steps. Whichever mean an encoder finds, key and mean together stay multiples
  of the same step.
- A key step has two bits of mantissa, so that the noise that rounding adds rarely moves it: one row in thirty gets
  another step the second time, and nearly none after that.
- A value's stored step is that for which the whole numbers have the vector's length along the vector. For a vector that
  is a multiple of whole numbers, this is the multiple.

A run is what one head of one layer has in a section: T vectors of D numbers at places p. A row is a layer's runs, of
keys or of values. All in float32, no step fused with another; fold, hadamard and w are those of `manthan.codec.base`.
A step below 2**-126 counts as none: its whole numbers are 0.

    keys:    u = x turned back, pairs as halves, as `manthan.codec.centred` has it
             y = hadamard(u * w)
             a = tokens(y) * (1 / T);  tokens adds t, t + 8, t + 16 ... in order for each t < 8, and folds the eight
             g = the step of a, bf16, and c = its whole numbers, as `manthan.codec.centred` has them;  m = c * g
             e = fold((y - m) * (y - m)) of each vector;  E = fold of the row's e, heads first
             s = sqrt(E * (1 / numbers of the row)) * key_step, at least the row's largest g * 2**-8, rounded to two
                 bits of mantissa, ties to even
             k = m / s rounded to a whole number, ties to even, within +-8191
             q = (y - k * s) / s, rounded likewise
    values:  y = hadamard(x * w);  e = fold(y * y)
             h = sqrt(e) * (1 / sqrt(D)) * value_step;  q = y / h, rounded likewise
             s = e / max(fold(y * q), 2**-126), rounded to bf16 and to a byte with its run's octave, as
                 `manthan.codec.centred` has it

    x^ = hadamard(q) * w * s for values, and hadamard(q + k) * w * s for keys, which are turned; q + k within 16 bits;
    numbers within +-bf16's largest, no negative zero; rounded to bf16, ties to even. Sums of q are whole numbers below
    2**24, and so the same in any order.

The whole numbers of a row, [heads, D, T], are coded by `manthan.codec.cpu.rans`. A run's table is that of `family()`
which is as wide: with S the sum of q * q over its n numbers, TABLES[j] for the j with as many LIMITS l <= S / n.

Codes, little-endian; a section of keys and values has keys first in each part, and one of keys or of values only what
is its own:

    | version u8, 2 | form u8 | 2 zero bytes |
    | keys: step of each run's mean, bf16 | planes of the means | step of each row, bf16 |
    | values: octave and T bytes of each run |
    | table of each run, u8 | zeros up to a multiple of 4 | rows as `manthan.codec.cpu.rows` has them |

Form 0 is this. The most that a section takes is 4 bytes and what the codec FALLBACK takes, or 9/8 of what is expected,
whichever is more. Where form 0 would be longer, as with numbers that no transform makes Gaussian, it is form 1: the
codes of FALLBACK, 4 bits a number and no mean, behind the first 4 bytes. Numbers of 2**LIMIT and more are refused like
those that are not finite: no sum overflows.
"""

import itertools
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import numpy as np
import numpy.typing as npt

from manthan.codec.base import CodecSpec, Section, SectionKind
from manthan.codec.tables.frequencies import DEVIATIONS, SHAPES


@dataclass(frozen=True)
class Preset:
    """Steps of a codec, in deviations: of all numbers of a layer's keys, and of a value vector's."""

    name: str
    key_step: np.float32
    value_step: np.float32


PRESETS = {
    preset.name: preset
    for preset in (
        Preset("wht-5x", np.float32(0.35), np.float32(0.76)),
        Preset("wht-4x", np.float32(0.22), np.float32(0.48)),
    )
}
NAME, FINER = PRESETS
FALLBACK = CodecSpec("k4v4", 4, 4, unbiased=True)
MEAN_BITS = 5
FINEST = np.float32(2.0**-8)
"""Of the largest mean's step, that a row's step is at least."""
MOST_STEPS = 8191
"""Of a mean."""
ROW_STEP_END = (127 + 64) << 7
"""bf16 bits that no encoder writes, nor any above: nothing overflows before numbers are turned."""
VERSION, CODED, CENTRED = 2, 0, 1
SLACK = 9, 8
"""A section may take this multiple of what is expected of it."""
START = 4
LIMIT = 40
LIMIT_BITS = (127 + LIMIT) << 23
"""Of float32, without the sign."""
SHAPE = SHAPES.index(2.0)
TABLES: npt.NDArray[np.uint8] = (SHAPE * len(DEVIATIONS) + np.arange(len(DEVIATIONS))).astype(np.uint8)
LIMITS: npt.NDArray[np.float64] = DEVIATIONS[:-1] * DEVIATIONS[1:] + 1 / 12
"""Mean squares, with what rounding adds to them, at which the next table is better."""


@dataclass(frozen=True)
class Parts:
    """Where the parts ahead of the rows are, in bytes from the codes' beginning; empty where the section has none.

    runs, rows: of keys or of values, of each as many.
    """

    kinds: tuple[SectionKind, ...]
    runs: int
    rows: int
    steps: slice
    means: slice
    row_steps: slice
    scales: slice
    tables: slice

    @classmethod
    @lru_cache
    def of(cls, section: Section) -> Self:
        """Raises KindError for a section without vectors."""
        kinds = tuple(SectionKind.KEYS if kind == "key" else SectionKind.VALUES for kind in section.vector_kinds)
        runs, rows = section.layers * section.heads, section.layers
        keys, values = SectionKind.KEYS in kinds, SectionKind.VALUES in kinds
        sizes = (
            2 * runs * keys,
            runs * MEAN_BITS * section.head_dim // 8 * keys,
            2 * rows * keys,
            runs * (1 + section.tokens) * values,
            runs * len(kinds),
        )
        ends = np.cumsum([START, *sizes]).tolist()
        return cls(kinds, runs, rows, *(slice(*pair) for pair in itertools.pairwise(ends)))

    @property
    def end(self) -> int:
        """Where the entropy-coded rows begin."""
        return -(-int(self.tables.stop) // 4) * 4


def table_numbers(squares: npt.NDArray[np.int64], n: int) -> npt.NDArray[np.uint8]:
    """The table of each run. squares: the sum of its q * q. n: how many they are."""
    return TABLES[np.searchsorted(LIMITS * n, squares.astype(np.float64), side="right")]
