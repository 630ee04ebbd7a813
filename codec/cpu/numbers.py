"""Convert the KV cache's numbers to float32, and float32 to the cache's numbers.

An fp8 number is a byte: the highest bit is the sign, the lowest `mantissa` bits are the fraction, and the bits between
are the exponent. A number with exponent 0 is zero or subnormal.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from manthan.codec.base import ByteArray, Codec, Dtype, Numbers, Positions, Section
from manthan.codec.errors import NonFiniteError

LARGEST = {Dtype.BFLOAT16: 3.3895313892515355e38, Dtype.FLOAT16: 65504.0, Dtype.FLOAT32: 3.4028234663852886e38}
LARGEST_BF16 = np.float32(LARGEST[Dtype.BFLOAT16])
SIGN = 0x80
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Fp8:
    """Format of 8-bit floats."""

    mantissa: int  # number of fraction bits
    least: int  # exponent of the smallest normal number, biased as in float32
    largest: float  # largest finite number


FORMS = {Dtype.FLOAT8_E4M3: Fp8(3, 127 - 6, 448.0), Dtype.FLOAT8_E5M2: Fp8(2, 127 - 14, 57344.0)}


def kernels() -> Any:
    """Return the module of numba's kernels. It is imported where it is used, because numba takes long to import."""
    from manthan.codec.cpu import numba_kernels

    return numba_kernels


def as_floats(x: Numbers, dtype: Dtype = Dtype.BFLOAT16) -> Floats:
    """Return the numbers as float32: `x` itself if it is float32. The conversion is exact.

    dtype: of the numbers. Only fp8 needs it, because uint8 does not tell which fp8 format.
    """
    if dtype.is_fp8:
        return np.take(table(dtype), x)
    if x.dtype == np.uint16:
        return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return x.astype(np.float32, copy=False)


def as_numbers(x: Floats, dtype: Dtype) -> Numbers:
    """Clip to a dtype's range, and round to its nearest numbers, ties to even. May overwrite or return x."""
    if dtype.is_fp8:
        form = FORMS[dtype]
        size = np.minimum(np.abs(x), np.float32(form.largest))
        exponent = np.maximum(size.view(np.uint32) >> 23, form.least)
        unit = ((exponent - form.mantissa) << 23).astype(np.uint32).view(np.float32)
        whole = np.rint(size / unit).astype(np.uint32)  # up to twice 2**mantissa, which carries into the exponent
        code = ((exponent - form.least) << form.mantissa) + whole
        return np.asarray(code | np.signbit(x) * np.uint32(SIGN), np.uint8)
    np.clip(x, -LARGEST[dtype], LARGEST[dtype], out=x)
    if dtype is Dtype.BFLOAT16:
        return bf16_bits(x)
    return x.astype(dtype.numpy, copy=False)


def bf16_bits(x: Floats) -> npt.NDArray[np.uint16]:
    """Round to bf16 bits, ties to even."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def fold(rows: Floats) -> Floats:
    """Return the sum of rows: add the upper half onto the lower, until a single row is left. Overwrites rows."""
    while len(rows) > 1:
        half = (len(rows) + 1) // 2
        rows[: len(rows) - half] += rows[half:]
        rows = rows[:half]
    total: Floats = rows[0]
    return total


def check_finite(x: Floats) -> None:
    """Raise NonFiniteError for the first vector of [..., head_dim] with a non-finite number."""
    finite = np.isfinite(x).all(axis=-1).ravel()
    if not finite.all():
        bad = int(finite.argmin())
        raise NonFiniteError(f"vector {bad} holds a NaN or an infinity and cannot be encoded.")


@lru_cache
def table(dtype: Dtype) -> Floats:
    """Return the number that each fp8 byte stands for, float32 [256]."""
    form = FORMS[dtype]
    code = np.arange(SIGN)
    exponent, fraction = code >> form.mantissa, code % (1 << form.mantissa)
    whole = fraction + (exponent > 0) * (1 << form.mantissa)
    made = np.ldexp(whole.astype(np.float64), np.maximum(exponent, 1) - 1 + form.least - 127 - form.mantissa)
    finite = made <= form.largest
    made[~finite] = np.nan
    if dtype is Dtype.FLOAT8_E5M2:
        made[np.flatnonzero(~finite)[0]] = np.inf
    both: Floats = np.concatenate([made, -made]).astype(np.float32)
    both.flags.writeable = False
    return both


def fp8_ranks(code: Numbers) -> npt.NDArray[np.int64]:
    """Return the ranks of fp8 bytes in the order of the numbers: 0 for 0, -1 for -0, at most 127, at least -128."""
    magnitude = (code & (SIGN - 1)).astype(np.int64)
    return np.where(code & SIGN, -1 - magnitude, magnitude)


def fp8_of_ranks(ranks: npt.NDArray[np.int64]) -> Numbers:
    """Undo `fp8_ranks`. Ranks out of range wrap around."""
    code: Numbers = np.where(ranks < 0, SIGN | (-1 - ranks) % SIGN, ranks % SIGN).astype(np.uint8)
    return code


def fp8_steps(code: Numbers, dtype: Dtype) -> npt.NDArray[np.int64]:
    """Return log2 of the distance from each fp8 number to the next one."""
    form = FORMS[dtype]
    exponents = ((code & (SIGN - 1)) >> form.mantissa).astype(np.int64)
    return np.maximum(exponents, 1) + (form.least - 128 - form.mantissa)


class Fp8Codec(Codec):
    """Codec of fp8 sections: another codec encodes the bytes if it `takes_fp8` and there are no scales, else float32.

    scales: float32 that broadcast to a section's shape. `codec` encodes the numbers times their scales, if any.
    """

    def __init__(self, codec: Codec, scales: Floats | None = None) -> None:
        self.name, self.varies, self.levels, self._codec = codec.name, codec.varies, codec.levels, codec
        self._scales, self._as_floats = scales, scales is not None or not codec.takes_fp8

    def scaled(self, scales: Floats) -> Codec:
        """Return the codec for numbers with `scales`. A codec that stores a scale with each vector ignores them."""
        return self if self._codec.scales_vectors else Fp8Codec(self._codec, scales)

    def max_nbytes(self, section: Section) -> int:
        return self._codec.max_nbytes(self._inner(section))

    def expected_nbytes(self, section: Section) -> int:
        return self._codec.expected_nbytes(self._inner(section))

    def encode(self, x: Numbers, section: Section, positions: Positions, out: ByteArray) -> int:
        return self.encode_parts(x, section, positions, out)[0]

    def decode(self, encoded: ByteArray, section: Section, positions: Positions) -> Numbers:
        return self.decode_parts(encoded, (), section, positions)

    def encode_parts(
        self, x: Numbers, section: Section, positions: Positions, out: ByteArray
    ) -> tuple[int, list[ByteArray]]:
        if self._as_floats:
            x = as_floats(x, section.dtype)
        if self._scales is not None:
            x = x * self._scales
        return self._codec.encode_parts(x, self._inner(section), positions, out)

    def decode_parts(
        self, encoded: ByteArray, refinements: Sequence[ByteArray], section: Section, positions: Positions
    ) -> Numbers:
        made = self._codec.decode_parts(encoded, refinements, self._inner(section), positions)
        if self._scales is not None:
            made = made / self._scales
        return as_numbers(made, section.dtype) if self._as_floats else made

    def _inner(self, section: Section) -> Section:
        return replace(section, dtype=Dtype.FLOAT32) if self._as_floats else section
