"""Numbers of eight bits: fp8 as float32, float32 as fp8, and sections of fp8 in a codec that knows nothing of it.

Of a byte, the highest bit is the sign, the next ones are the exponent, and the `mantissa` lowest ones the fraction.
Below the first exponent numbers are subnormal.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from manthan.codec.base import Codec, Codes, Dtype, Numbers, Positions, Section

Floats = npt.NDArray[np.float32]
SIGN = 0x80


@dataclass(frozen=True)
class Fp8:
    """A kind of fp8. mantissa: bits of the fraction. least: the exponent of the smallest normal number, as float32 has
    it. largest: of the finite numbers."""

    mantissa: int
    least: int
    largest: float


FORMS = {Dtype.FLOAT8_E4M3: Fp8(3, 127 - 6, 448.0), Dtype.FLOAT8_E5M2: Fp8(2, 127 - 14, 57344.0)}


@lru_cache
def table(dtype: Dtype) -> Floats:
    """The number that each byte stands for, [256]."""
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


def widened(x: Numbers, dtype: Dtype) -> Floats:
    """What the bytes stand for, of any shape; exact."""
    made: Floats = table(dtype)[x]
    return made


def narrowed(x: Floats, dtype: Dtype) -> Numbers:
    """Finite numbers of any shape as bytes: rounded once, ties to even, within the largest."""
    form = FORMS[dtype]
    size = np.minimum(np.abs(x), np.float32(form.largest))
    exponent = np.maximum(size.view(np.uint32) >> 23, form.least)
    unit = ((exponent - form.mantissa) << 23).astype(np.uint32).view(np.float32)
    whole = np.rint(size / unit).astype(np.uint32)  # up to twice 2**mantissa, which carries into the exponent
    code = ((exponent - form.least) << form.mantissa) + whole
    made: Numbers = (code | np.signbit(x) * np.uint32(SIGN)).astype(np.uint8)
    return made


class Fp8Codec(Codec):
    """Sections of fp8 in a codec of float32: every fp8 number is one of float32, and what comes back is rounded to
    fp8. A scale that the cache's numbers have is none of its business: codes are of the numbers as they are."""

    def __init__(self, codec: Codec) -> None:
        self.name, self.varies, self._codec = codec.name, codec.varies, codec

    def max_nbytes(self, section: Section) -> int:
        return self._codec.max_nbytes(_wide(section))

    def expected_nbytes(self, section: Section) -> int:
        return self._codec.expected_nbytes(_wide(section))

    def encode(self, x: Numbers, section: Section, positions: Positions, out: Codes) -> int:
        return self._codec.encode(widened(x, section.dtype), _wide(section), positions, out)

    def decode(self, codes: Codes, section: Section, positions: Positions) -> Numbers:
        return narrowed(self._codec.decode(codes, _wide(section), positions), section.dtype)


@lru_cache
def _wide(section: Section) -> Section:
    return replace(section, dtype=Dtype.FLOAT32)
