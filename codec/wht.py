"""Keys and values rotated, rounded to steps and entropy-coded, without a profile: the layout of such codes, and the
arithmetic that every backend reproduces bit for bit.

The Walsh-Hadamard transform makes the numbers of any vector look Gaussian, so that nothing need be known of the model;
an entropy coder behind a uniform quantizer is within a quarter of a bit of what is possible there (Gish and Pierce,
"Asymptotically efficient quantizing", 1968), and a bit or so better than a quantizer of fixed rate at the same bytes.
Keys go without their block's mean before RoPE (`manthan.codec.centred`). One step for all keys of a layer is best, for
errors in logits count alike whichever key they come from; values are averaged, and have a step each.

A run is what one head of one layer has in a section: T vectors of D numbers at places p. A row is a layer's runs, of
keys or of values. All in float32, no step fused with another; fold, hadamard and w are those of `manthan.codec.base`.

    keys:    r = x less its run's mean, as `manthan.codec.centred` has it: the same steps and planes
             y = hadamard(r * w)
             e = fold(y * y) of each vector;  E = fold of the row's e, heads first
             s = sqrt(E * (1 / numbers of the row)) * KEY_STEP, rounded to bf16, ties to even
    values:  y = hadamard(x * w);  e = fold(y * y)
             scale = sqrt(e) * (1 / sqrt(D)), rounded to bf16 and to a byte with its run's octave, as
             `manthan.codec.centred` has it;  s = that * VALUE_STEP
    q = y / s rounded to a whole number, ties to even; 0 where s is below 2**-126

    x^ = hadamard(q) * w * s, and for keys the mean put back; values within +-bf16's largest, no negative zero; rounded
    to bf16, ties to even. Sums of q are whole numbers below 2**24, and so the same in any order.

The whole numbers of a row, [heads, D, T], are coded by `manthan.codec.cpu.rans`. A run's table is that of `family()`
which is as wide: with S the sum of q * q over its n numbers, TABLES[j] for the j with as many LIMITS l <= S / n.

Codes, little-endian; a section of keys and values has keys first in each part, and one of keys or of values only what
is its own:

    | version u8, 1 | form u8 | 2 zero bytes |
    | keys: step of each run's mean, bf16 | planes of the means | step of each row, bf16 |
    | values: octave and T bytes of each run |
    | table of each run, u8 | zeros up to a multiple of 4 | rows as `manthan.codec.cpu.rows` has them |

Form 0 is this. The most that a section takes is what the codec FALLBACK of `manthan.codec.centred` takes and 4 bytes;
where form 0 would be longer, as with numbers that no transform makes Gaussian, it is form 1: those codes, behind the
first 4 bytes. Numbers of 2**LIMIT and more are refused like those that are not finite: no sum overflows.
"""

import itertools
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import numpy as np
import numpy.typing as npt

from manthan.codec.base import Section, SectionKind
from manthan.codec.centred import K4V4C
from manthan.codec.tables.frequencies import DEVIATIONS, SHAPES

NAME = "wht-5x"
KEY_STEP, VALUE_STEP = np.float32(0.35), np.float32(0.76)
"""Steps in deviations: of all numbers of a layer's keys, and of a value vector's."""
FALLBACK = K4V4C
MEAN_BITS = FALLBACK.mean_bits
VERSION, CODED, CENTRED = 1, 0, 1
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
