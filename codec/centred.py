"""Keys less their block's mean before RoPE: the layout of such codes, and the arithmetic that every backend reproduces
bit for bit.

The keys of a head have much in common: a bias of the projection, or what all tokens share. RoPE turns that by each
token's place, so only before RoPE is it one vector (Hooper et al., KVQuant, 2024, quantize keys there). Taken off, what
is left is smaller and has no large channels; a bias of any size costs no bits.

A run is what one head of one layer has in a section: T vectors of D numbers at places p. Codes of keys, or of values,
in n runs, at b bits; only keys have the parts in brackets, M = mean_bits planes of D/8 bytes each:

    [ n steps, bf16 | pad to 16 | run 0: M planes | run 1: ... | pad to 16 ]
    run 0: octave, T scales, a byte each | run 1: ... | pad to 16 | vector 0: b planes | vector 1: ... | pad to 16

Planes are those of `manthan.codec.base`; padding is zero. Keys of one run, all in float32, no step fused with another:

    x  as `halves` puts it: first numbers of the pairs that RoPE turns, then the second ones, then the others
    u  = x turned back: u1 = x1 * cos + x2 * sin; u2 = x2 * cos - x1 * sin; the others are x
    a  = fold(u) * (1 / T)       over tokens, with fold of `manthan.codec.base`
    s  = max(|a|) * (1 / (2**(M-1) - 1)), rounded to bf16, ties to even; 0 where that is below 2**-126
    c  = a / s rounded to a whole number, ties to even, within +-(2**(M-1) - 1); 0 where s is 0
    m  = c * s, turned: m1 * cos - m2 * sin; m2 * cos + m1 * sin; the others as they are
    r  = x - m

and r is coded by `manthan.codec.base`, as values are without all this. Its bf16 scale becomes a byte: of exponent and
mantissa, (bits + 4) >> 3 keeps four bits of mantissa, at most 4079; octave = max(of the run >> 4, 15) - 15; byte =
max(that - 16 * octave, 0). A byte of 0 is a scale of 0: the vector is less than 2**-15 of the run's largest.

Decoding: (16 * octave + byte) << 3 is the bf16 scale; r is decoded to float32; x^ = r + m, within +-bf16's largest, no
negative zero; a bf16 result is rounded, ties to even.

cos and sin come from `Rope.tables`, without the rope's factor, which the mean does not feel: numpy reckons them in
float64 and rounds them once, and all backends are handed these. Two libraries' float64 cosines may differ in the last
bit; after rounding that is seen about once in 2**28 numbers, and then moves a decoded number by its own last bit.

Keys of 2**LIMIT and more are refused like those that are not finite: no sum overflows, no square of r either.
"""

from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from manthan.codec.base import CodecSpec, Codes, Kind, align16
from manthan.codec.rope import Rope

LIMIT = 100
LIMIT_BITS = (127 + LIMIT) << 23
"""Of float32, without the sign."""
STEP_END = (127 + LIMIT + 2) << 7
"""bf16 bits that no step reaches: none is more than sqrt(2) * 2**LIMIT."""
SCALE_MAX = 0xFEF
"""The largest finite bf16 number, with four bits of mantissa."""
SCALE_END = 0xFF0

K4V2C = CodecSpec("k4v2c", 4, 2, unbiased=True, mean_bits=5)
K4V4C = CodecSpec("k4v4c", 4, 4, unbiased=True, mean_bits=5)

Order = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Places:
    """Where the parts of the codes of keys, or of values, are, in bytes from their beginning.

    steps, means: empty where there is no mean. scales: of all runs, with their octaves.
    """

    steps: slice
    means: slice
    scales: slice
    planes: slice
    nbytes: int

    @classmethod
    def of(cls, spec: CodecSpec, kind: Kind, runs: int, tokens: int, head_dim: int) -> Self:
        """runs: layers times heads."""
        bits, mean_bits = spec.bits(kind), spec.mean_bits if kind == "key" else 0
        sizes = (
            2 * runs * bool(mean_bits),
            runs * mean_bits * head_dim // 8,
            runs * (1 + tokens),
            runs * tokens * bits * head_dim // 8,
        )
        parts, at = [], 0
        for size in sizes:
            parts.append(slice(at, at + size))
            at += align16(size)
        steps, means, scales, planes = parts
        return cls(steps, means, scales, planes, at)


class Mean(NamedTuple):
    """How a mean is quantized. top: the largest code. inverse: 1 / top."""

    bits: int
    top: int
    inverse: np.float32

    @classmethod
    def of(cls, bits: int) -> Self:
        top = 2 ** (bits - 1) - 1
        return cls(bits, top, np.float32(1 / top))


def halves(rope: Rope | None, head_dim: int) -> Order | None:
    """Which number of a vector comes where, [head_dim]; None where they stay: pairs are halves already."""
    if rope is None or not rope.interleaved:
        return None
    turned = 2 * len(rope.frequencies)
    order: Order = np.concatenate([np.arange(0, turned, 2), np.arange(1, turned, 2), np.arange(turned, head_dim)])
    return order


def to_bytes(scales: npt.NDArray[np.uint16]) -> Codes:
    """bf16 scales [runs, tokens], finite and not negative, as octave and bytes [runs, 1 + tokens]."""
    short = np.minimum((scales.astype(np.int32) + 4) >> 3, SCALE_MAX)
    octaves = np.maximum(short.max(axis=1, keepdims=True) >> 4, 15) - 15
    codes: Codes = np.concatenate([octaves, np.maximum(short - 16 * octaves, 0)], axis=1).astype(np.uint8)
    return codes


def from_bytes(codes: Codes) -> npt.NDArray[np.uint16]:
    """The opposite; what is not finite comes out as such."""
    octaves, steps = codes[:, :1].astype(np.int32), codes[:, 1:].astype(np.int32)
    return np.where(steps > 0, np.minimum(16 * octaves + steps, SCALE_END) << 3, 0).astype(np.uint16)
