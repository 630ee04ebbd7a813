"""Codec, without calibration: rotates keys and values, rounds them to whole steps and encodes the integers by rANS.

A section is the keys or values of a compressed KV block. Below are its layout, and arithmetic equal bit for bit on
CPUs and GPUs. docs/codec.md outlines the arithmetic. An entropy coder behind a uniform quantizer is within a quarter
bit of the optimum (Gish and Pierce, 1968). Keys are encoded as they were before RoPE (Hooper et al., KVQuant, 2024).

A run is the keys, or the values, of one head in one layer of a section: T vectors of D numbers at positions p. A row is
the runs of a layer. The formulas are in float32, without fused multiply-add; `manthan.codec.base` defines fold, a sum,
and `manthan.codec.tables.rotation` hadamard and w. Where a step is below 2**-126, whole numbers are 0.

    keys:    x  in the order of `halves`: the first numbers x1 of RoPE's pairs, the second numbers x2, the rest
             u1 = x1 * cos + x2 * sin; u2 = x2 * cos - x1 * sin; the rest of u is that of x
             y = hadamard(u * w)
             a = tokens(y) * (1 / T);  tokens adds y of tokens t, t + 8, ... in order for t < 8, and folds the 8 sums
             g = max(|a|) * (1 / 15), rounded to bf16, ties to even; 0 where that is below 2**-126
             c = a / g rounded to a whole number, ties to even, within +-15; 0 where g is 0;  m = c * g
             e = fold((y - m) * (y - m)) of each vector;  E = fold of the row's e, [heads * T]
             s = sqrt(E * (1 / numbers of the row)) * key_step, at least the row's largest g * 2**-8, rounded to two
                 bits of mantissa, ties to even
             k = m / s rounded to a whole number, ties to even, within +-8191
             q = (y - k * s) / s rounded to a whole number, ties to even
    values:  y = hadamard(x * w);  e = fold(y * y)
             h = sqrt(e) * (1 / sqrt(D)) * value_step;  q = y / h rounded as above
             s = e / max(fold(y * q), 2**-126), rounded to bf16, and to a byte behind the run's octave; see below

cos and sin come from `Rope.tables`, without `Rope.scale`. `manthan.codec.cpu.rans` encodes the whole numbers q of a
row, [heads, D, T]. Its table of frequencies for a run is TABLES[j] of `family()`: with S the sum of q * q over the
run's n numbers, j is the number of LIMITS that are at most S / n.

If a section is longer than `max_nbytes`, all steps are doubled d times, until it fits: q / 2**d rounded to a whole
number, ties to even, is coded with TABLES[max(j - 3 * d, 0)]. No other field changes. d is 0 unless hadamard leaves
numbers far from Gaussian. A decoder reads the quotient, here again called q, and returns x^:

    x^ = hadamard(q) * w * (2**d * s) for values, and hadamard(2**d * q + k) * w * s for keys, then turned by RoPE

2**d * q + k is an int16. 2**d * s and decoded keys are clipped to +-bf16's largest number, and every x^ to the largest
of its dtype. Then -0 becomes 0, and x^ is rounded to its dtype, ties to even. All sums of whole numbers in hadamard are
at most 2**24, so the order does not matter.

A value's step in bf16 bits becomes a byte: r = min((bits + 4) >> 3, 4079) keeps the exponent and four bits of mantissa;
octave = max(r of the run's largest step >> 4, 15) - 15; byte = max(r - 16 * octave, 0).

Encoded section of keys or of values, little-endian:

    | version u8, 1 | d u8 | 2 zero bytes |
    | keys: g of each run, bf16 | 5 planes of c of each run | s of each row, bf16 |
    | values: octave and T bytes of each run |
    | j of each run's table, u8 | zeros up to a multiple of 4 | rows of `manthan.codec.cpu.rans` |

A plane is D/8 bytes; bit i (bit i % 8 of byte i // 8) belongs to element i. The first plane is the sign, 1 for
minus; the rest are the magnitude of c, highest bit first.

Magnitudes of 2**LIMIT and more are refused like infinities, so that no sum overflows.
"""

import itertools
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from manthan.codec.base import ByteArray, Codec, Dtype, Numbers, Positions, Section, check_head_dim
from manthan.codec.cpu.numbers import LARGEST_BF16, as_floats, as_numbers, bf16_bits, fold, kernels
from manthan.codec.cpu.rans import MOST_DOUBLINGS, START, VERSION, Coder, Integers, Rows, check_front, streams_of
from manthan.codec.errors import DamagedError, NonFiniteError, SizeError
from manthan.codec.model import NO_FACTS, ModelFacts
from manthan.codec.rope import Floats, Rope
from manthan.codec.tables.frequencies import DEVIATIONS, OCTAVE, SHAPES, UNIT, expected, family
from manthan.codec.tables.rotation import rotation

MEAN_BITS, MEAN_TOP = 5, 15
MEAN_INVERSE = np.float32(1 / MEAN_TOP)
STEP_END = (127 + 100 + 2) << 7  # upper bound of a mean's step, in bf16 bits
SCALE_MAX, SCALE_END = 0xFEF, 0xFF0  # the largest finite bf16 number, with four bits of mantissa, and infinity
FINITE_STEPS = 0x7F80  # bf16 bits of infinity: every step is below
FINEST = np.float32(2.0**-8)  # least step of a row, as a multiple of the largest step g of its runs' means
MOST_STEPS = 8191  # most whole steps k by which a mean is subtracted
ROW_STEP_END = (127 + 64) << 7
"""Upper bound of a row's step, in bf16 bits, so that nothing overflows before RoPE turns the decoded keys."""
SLACK = 27, 20
"""Bound of a section's bytes over its expected bytes, as a fraction: 27 / 20."""
LIMIT = 40
LIMIT_BITS = (127 + LIMIT) << 23  # bits of 2**LIMIT as float32
FIRST_NORMAL = np.float32(2.0**-126)
NO_ROPE = Rope(())
SHAPE = SHAPES.index(2.0)
TABLES: npt.NDArray[np.uint8] = (SHAPE * len(DEVIATIONS) + np.arange(len(DEVIATIONS))).astype(np.uint8)
LIMITS: npt.NDArray[np.float64] = DEVIATIONS[:-1] * DEVIATIONS[1:] + 1 / 12
"""Mean squares of a run's q, from which on the next table is better. 1 / 12 is the mean square of rounding errors."""


@dataclass(frozen=True)
class WhtPreset:
    """Named pair of factors for the steps of keys and of value vectors.

    key_step: step, as a multiple of the standard deviation of a layer's keys. value_step: step, as a multiple of the
    root mean square of a value vector's numbers.
    """

    name: str
    key_step: float
    value_step: float

    def codec(self, head_dim: int, facts: ModelFacts = NO_FACTS) -> "WhtCodec":
        """Return the codec on the CPU. Raises HeadDimError."""
        return WhtCodec(self, head_dim, facts.rope)


PRESETS = {preset.name: preset for preset in (WhtPreset("wht-5x", 0.35, 0.76), WhtPreset("wht-4x", 0.22, 0.48))}
NAME, FINER = PRESETS


@dataclass(frozen=True)
class Parts:
    """Slices of an encoded section's parts ahead of the rows; empty for parts that keys, or values, lack."""

    are_keys: bool
    runs: int
    steps: slice
    means: slice
    row_steps: slice
    scales: slice
    tables: slice

    @classmethod
    @lru_cache
    def of(cls, section: Section) -> Self:
        """Return the parts of a section. Raises ShapeError for a section with keys and values, or without vectors."""
        keys, runs = section.vector_kind == "key", section.layers * section.heads
        sizes = (
            2 * runs * keys,
            runs * MEAN_BITS * section.head_dim // 8 * keys,
            2 * section.layers * keys,
            runs * (1 + section.tokens) * (not keys),
            runs,
        )
        ends = np.cumsum([START, *sizes]).tolist()
        return cls(keys, runs, *(slice(*pair) for pair in itertools.pairwise(ends)))

    @property
    def end(self) -> int:
        """Offset of the entropy-coded rows."""
        return -(-int(self.tables.stop) // 4) * 4


class WhtCodec(Codec):
    """`Codec` of a preset, on the CPU. rope: of the model; None to encode keys as they are. Raises HeadDimError."""

    varies = True

    def __init__(self, preset: WhtPreset, head_dim: int, rope: Rope | None = None) -> None:
        check_head_dim(head_dim)
        self.name, self.head_dim = preset.name, head_dim
        self._key_step, self._value_step = np.float32(preset.key_step), np.float32(preset.value_step)
        self._rope, self._order = rope or NO_ROPE, halves(rope, head_dim)
        self._rotation = rotation(head_dim)

    def max_nbytes(self, section: Section) -> int:
        times, of = SLACK
        return -(-self.expected_nbytes(section) * times // of)

    def expected_nbytes(self, section: Section) -> int:
        parts, numbers = Parts.of(section), section.tokens * section.heads * section.head_dim
        bits = _expected(float(self._key_step if parts.are_keys else self._value_step))
        front = _rows(np.zeros(parts.runs, np.uint8), section, 0).front
        return parts.end + front + -(-section.layers * numbers * bits // (8 * UNIT))

    def encode(self, x: Numbers, section: Section, positions: Positions, out: ByteArray) -> int:
        """Raises NonFiniteError, also for magnitudes of 2**LIMIT and more."""
        self._check(x, section)
        parts, limit = Parts.of(section), self.max_nbytes(section)
        runs = x.reshape(parts.runs, section.tokens, section.head_dim)
        if runs.dtype == np.float16:
            runs = runs.astype(np.float32)
        whole = self._keys(runs, section, positions, parts, out) if parts.are_keys else self._values(runs, parts, out)
        rows = whole.reshape(parts.runs, -1).astype(np.float64)
        squares = np.einsum("rn,rn->r", rows, rows).astype(np.int64)  # exact: below 2**53
        chosen = table_numbers(squares, section.tokens * section.head_dim)
        out[parts.tables] = chosen
        out[parts.tables.stop : parts.end] = 0
        doublings, nbytes = self._coder.write(
            whole.ravel(), lambda doublings: _rows(chosen, section, doublings), out[parts.end : limit]
        )
        out[:START] = (VERSION, doublings, 0, 0)
        return parts.end + nbytes

    def decode(self, encoded: ByteArray, section: Section, positions: Positions) -> Numbers:
        """Raises SizeError, DamagedError; NonFiniteError for a negative or too large step."""
        limit, parts = self.max_nbytes(section), Parts.of(section)
        if not parts.end <= encoded.size <= limit:
            raise SizeError(f"{encoded.size} bytes do not encode {section}: {parts.end} to {limit} do.")
        doublings = check_front(encoded, section.codec, MOST_DOUBLINGS)
        chosen = encoded[parts.tables]
        if (chosen >= len(TABLES)).any():
            raise DamagedError("a run's index of a table is out of range: the block is damaged.")
        whole = self._coder.read(encoded[parts.end :], _rows(chosen, section, doublings))
        q = whole.reshape(parts.runs, section.head_dim, section.tokens)
        if parts.are_keys:
            made = self._keys_back(q, section, positions, parts, encoded, doublings)
        else:
            made = self._values_back(q, section, parts, encoded, doublings)
        return made.reshape(section.shape)

    def _keys(self, x: Numbers, section: Section, positions: Positions, parts: Parts, out: ByteArray) -> Integers:
        """Return the whole numbers q of all runs, [runs, head_dim, tokens]; write the steps and means into `out`."""
        bf16 = x.dtype == np.uint16
        ordered = np.require(x if self._order is None else x[:, :, self._order], requirements=["C", "A"])
        words = ordered if bf16 else ordered.view(np.uint32)
        cos, sin = self._rope.tables(positions)
        turned = kernels().turned_back(words, bf16, cos, -sin)
        y, _ = kernels().rotated(turned, self._rotation.weights, self._rotation.blocks)
        average = _over_tokens(y) * np.float32(1 / section.tokens)
        rounded = bf16_bits(np.abs(average).max(axis=1) * MEAN_INVERSE)
        mean_steps = np.where(rounded < 1 << 7, 0, rounded).astype(np.uint16)
        code = _whole(average, as_floats(mean_steps), MEAN_TOP)
        out[parts.steps], out[parts.means] = mean_steps.astype("<u2").view(np.uint8), _pack(code).ravel()
        means = code * as_floats(mean_steps)[:, None]
        left = y - means[:, :, None]
        total = fold(kernels().products(left, left).reshape(section.layers, -1).T.copy())
        numbers = section.heads * section.tokens * section.head_dim
        least = as_floats(mean_steps.reshape(section.layers, -1).max(axis=1)) * FINEST
        deviations = np.sqrt(total * np.float32(1 / numbers))
        row_steps = _coarse(np.maximum(deviations * self._key_step, least))
        out[parts.row_steps] = row_steps.astype("<u2").view(np.uint8)
        steps = np.repeat(as_floats(row_steps), section.heads)
        y -= (_whole(means, steps, MOST_STEPS) * steps[:, None])[:, :, None]
        return _divided(y, steps[:, None, None])

    def _values(self, x: Numbers, parts: Parts, out: ByteArray) -> Integers:
        floats = np.require(as_floats(x), requirements=["C", "A"])
        y, energies = kernels().rotated(floats, self._rotation.weights, self._rotation.blocks)
        steps = np.sqrt(energies) * self._rotation.root * self._value_step
        q = _divided(y.copy(), steps[:, None, :])
        kept = energies / np.maximum(kernels().products(y, q.astype(np.float32)), FIRST_NORMAL)
        out[parts.scales] = to_bytes(bf16_bits(kept)).ravel()
        return q

    def _keys_back(
        self, q: Integers, section: Section, positions: Positions, parts: Parts, encoded: ByteArray, doublings: int
    ) -> Numbers:
        mean_steps = encoded[parts.steps].view("<u2")
        rounded = encoded[parts.row_steps].view("<u2")
        _check_steps(mean_steps, STEP_END, "mean step")
        _check_steps(rounded, ROW_STEP_END)
        steps = np.repeat(as_floats(rounded), section.heads)
        code = _unpack(encoded[parts.means].reshape(parts.runs, MEAN_BITS, -1))
        whole = _whole(code * as_floats(mean_steps)[:, None], steps, MOST_STEPS).astype(np.int16)
        if doublings:
            q <<= doublings
        q += whole[:, :, None]
        of_tokens = np.ascontiguousarray(np.broadcast_to(steps[:, None], (parts.runs, section.tokens)))
        x = kernels().unrotated(q, of_tokens, self._rotation.weights, self._rotation.blocks)
        dtype = np.uint16 if section.dtype.numpy == np.uint16 else np.float32
        made: Numbers = np.empty(x.shape, dtype)
        words = made if dtype is np.uint16 else made.view(np.uint32)
        kernels().turned(x, *self._rope.tables(positions), dtype is np.uint16, LARGEST_BF16, words)
        if self._order is not None:
            ordered, made = made, np.empty_like(made)
            made[:, :, self._order] = ordered
        return made if dtype == section.dtype.numpy else as_numbers(made, section.dtype)

    def _values_back(self, q: Integers, section: Section, parts: Parts, encoded: ByteArray, doublings: int) -> Numbers:
        scales = from_bytes(encoded[parts.scales].reshape(parts.runs, 1 + section.tokens))
        _check_steps(scales)
        steps = np.minimum(as_floats(scales) * np.float32(1 << doublings), LARGEST_BF16)
        x = kernels().unrotated(q, steps, self._rotation.weights, self._rotation.blocks)
        if section.dtype is Dtype.BFLOAT16:
            made: Numbers = np.empty(x.shape, np.uint16)
            nowhere = NO_ROPE.tables(np.zeros(section.tokens, np.int64))
            kernels().turned(x, *nowhere, True, LARGEST_BF16, made)  # clip, round
            return made
        x += np.float32(0)  # no negative zeros
        return as_numbers(x, section.dtype)

    def _check(self, x: Numbers, section: Section) -> None:
        bits: Any = x.view(np.uint16 if x.dtype.itemsize == 2 else np.uint32)
        sign = np.iinfo(bits.dtype).max >> 1
        limit = {np.uint16: LIMIT_BITS >> 16, np.float32: LIMIT_BITS, np.float16: 0x7C00}[x.dtype.type]
        large = (bits & bits.dtype.type(sign)) >= limit
        if large.any():
            bad = int(large.reshape(-1, section.head_dim).any(1).argmax())
            raise NonFiniteError(
                f"vector {bad} holds a NaN, an infinity or a magnitude from 2**{LIMIT} on, and cannot be encoded."
            )

    @cached_property
    def _coder(self) -> Coder:
        return Coder(family())


def halves(rope: Rope | None, head_dim: int) -> npt.NDArray[np.int64] | None:
    """Return indices [head_dim] of RoPE's pairs' first numbers, then second ones, then the rest; None if none moves."""
    if rope is None or not rope.interleaved:
        return None
    numbers, (first, second) = np.arange(head_dim), rope.pairs
    rest = numbers[2 * len(rope.frequencies) :]
    order: npt.NDArray[np.int64] = np.concatenate([numbers[first], numbers[second], rest])
    return order


def to_bytes(scales: npt.NDArray[np.uint16]) -> ByteArray:
    """Return bf16 scales [runs, tokens], finite and not negative, as octaves and bytes, [runs, 1 + tokens]."""
    short = np.minimum((scales.astype(np.int32) + 4) >> 3, SCALE_MAX)
    octaves = np.maximum(short.max(axis=1, keepdims=True) >> 4, 15) - 15
    encoded: ByteArray = np.concatenate([octaves, np.maximum(short - 16 * octaves, 0)], axis=1).astype(np.uint8)
    return encoded


def from_bytes(encoded: ByteArray) -> npt.NDArray[np.uint16]:
    """Undo `to_bytes`. Bytes that stand for more than the largest finite scale give infinity."""
    octaves, steps = encoded[:, :1].astype(np.int32), encoded[:, 1:].astype(np.int32)
    return np.where(steps > 0, np.minimum(16 * octaves + steps, SCALE_END) << 3, 0).astype(np.uint16)


def table_numbers(squares: npt.NDArray[np.int64], n: int) -> npt.NDArray[np.uint8]:
    """Return j of each run's table. squares: sum of a run's q * q, [runs]. n: count of numbers in a run."""
    return np.searchsorted(LIMITS * n, squares.astype(np.float64), side="right").astype(np.uint8)


@lru_cache
def _expected(step: float) -> int:
    """Return the mean bits of a Gaussian number, in units of 1 / UNIT bit. step: in standard deviations."""
    table = table_numbers(np.array([round(1e6 / step**2)]), 10**6)
    return int(expected(family())[TABLES[table[0]]])


def _rows(chosen: ByteArray, section: Section, doublings: int) -> Rows:
    """Return the layout of the rows. chosen: j of each run's table before steps are doubled `doublings` times."""
    size = section.heads * section.head_dim
    narrower = np.maximum(chosen.astype(np.int64) - OCTAVE * doublings, 0)
    tables = np.repeat(TABLES[narrower], section.head_dim).reshape(-1, size)
    return Rows(tables, section.tokens, streams_of(section.tokens * size))


def _divided(y: Floats, steps: Floats) -> Integers:
    """Return y [runs, head_dim, tokens] in whole steps; 0 where a step is below FIRST_NORMAL. Overwrites y."""
    normal = steps >= FIRST_NORMAL
    y /= np.where(normal, steps, np.float32(1))
    np.rint(y, out=y)
    y *= normal
    return y.astype(np.int16)


def _whole(means: Floats, steps: Floats, most: int) -> Floats:
    """Return means [runs, head_dim] in whole steps of their run, within +-most; 0 for a step below FIRST_NORMAL."""
    normal = (steps >= FIRST_NORMAL)[:, None]
    with np.errstate(over="ignore"):
        whole: Floats = np.rint(means / np.where(normal, steps[:, None], np.float32(1)))
    np.clip(whole, -most, most, out=whole)
    whole *= normal
    whole += np.float32(0)  # no negative zeros
    return whole


def _pack(code: Floats) -> ByteArray:
    """Return whole numbers [runs, head_dim] as bit planes [runs, MEAN_BITS, head_dim / 8]."""
    whole = np.abs(code).astype(np.uint8) | ((code < 0).astype(np.uint8) << np.uint8(MEAN_BITS - 1))
    planes = [whole & np.uint8(1 << (MEAN_BITS - 1 - p)) for p in range(MEAN_BITS)]
    return np.packbits(np.stack(planes, axis=1), axis=2, bitorder="little")


def _unpack(planes: ByteArray) -> Floats:
    digits = np.unpackbits(planes, axis=2, bitorder="little")
    magnitude = np.packbits(digits[:, :0:-1], axis=1, bitorder="little")[:, 0].astype(np.float32)
    return np.where(digits[:, 0] > 0, -magnitude, magnitude)


def _over_tokens(y: Floats) -> Floats:
    """Return sums over tokens of [runs, head_dim, tokens], in the order of `tokens` in this file's docstring."""
    sums = np.zeros((*y.shape[:2], 8), np.float32)
    for first in range(0, y.shape[2], 8):
        eight = y[:, :, first : first + 8]
        sums[:, :, : eight.shape[2]] += eight
    for half in (4, 2, 1):
        sums[:, :, :half] += sums[:, :, half : 2 * half]
    return sums[:, :, 0]


def _coarse(x: Floats) -> npt.NDArray[np.uint16]:
    """Round to bf16 bits with two bits of mantissa, ties to even."""
    words = np.ascontiguousarray(x).view(np.uint32)
    return ((words + 0xFFFFF + (words >> 21 & 1)) >> 21 << 5).astype(np.uint16)


def _check_steps(bf16: npt.NDArray[np.unsignedinteger], end: int = FINITE_STEPS, what: str = "step") -> None:
    """Raise NonFiniteError for a negative step, or a step of bits `end` or more."""
    bad = bf16 >= end
    if bad.any():
        at = int(bad.argmax())
        raise NonFiniteError(f"{what} {at} is negative or too large: the block is damaged.")
