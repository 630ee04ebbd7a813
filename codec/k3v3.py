"""Codec with three bits for each number: rotated vectors in the Lloyd-Max quantizer of the normal distribution.

S. P. Lloyd, "Least squares quantization in PCM", IEEE Trans. Inf. Theory 28 (1982); J. Max, "Quantizing for minimum
distortion", IRE Trans. Inf. Theory 6 (1960). The encoded size is fixed. At equal size, predictions of a real model
diverge less than a quarter as much with the codec `wht-5x`. `k3v3` is of no use for keys that have a large mean.

Encoded section (such as all keys of a KV block) of n vectors of D = head_dim numbers, little-endian:

    | n scales, bf16 | pad to 16 | vector 0: 3 bit planes | vector 1: 3 bit planes | ... | pad to 16 |

A plane is D/8 bytes; bit i (bit i % 8 of byte i // 8) belongs to element i of the rotated vector. The first plane is
the sign, 1 for minus; the next two are the index k of the magnitude, highest bit first. Padding is zero.

Encoding a vector x, all in float32, without fused multiply-add; fold is the sum that `manthan.codec.base` defines:

    p  = 127 minus the largest exponent field (bits 23 to 30) in x, at least -119
    x1 = x * 2**p              so that the largest square neither overflows nor vanishes
    y  = hadamard(x1 * w)      see `manthan.codec.tables.rotation`
    r  = sqrt(fold(y * y)) * (1 / sqrt(D))
    k  = number of thresholds t with |y| > t * r;  q = levels[k];  the sign is y < 0
    s  = fold(y * y) / max(fold(|y| * q), 2**-126) * 2**-p, rounded to bf16, ties to even, at most bf16's largest

and decoding:

    x^ = hadamard(+-q) * w * s, clipped to +-bf16's largest; then -0 becomes 0, and x^ is rounded to its dtype

With this scale, <x, x^> = <x, x>: inner products with x^ are right on average (RaBitQ, Gao and Long, SIGMOD 2024). A
vector whose s falls below 2**-126 loses digits; below 2**-134 it decodes to zeros.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from manthan.codec.base import ByteArray, Codec, Numbers, Positions, Section, check_head_dim
from manthan.codec.cpu.numbers import LARGEST_BF16, as_floats, as_numbers, bf16_bits, check_finite, kernels
from manthan.codec.errors import NonFiniteError, SizeError
from manthan.codec.model import NO_FACTS, ModelFacts
from manthan.codec.rope import Floats
from manthan.codec.tables.rotation import rotation
from manthan.codec.wire import align16

BITS = 3
EXPONENT, MAGNITUDE = np.uint32(0x7F800000), np.uint32(0x7FFFFFFF)
SMALLEST = np.float32(2.0**-126)
LEVELS: Floats = np.array([0.24509418, 0.7560053, 1.3439093, 2.1519456], np.float32)
"""Magnitudes of the Lloyd-Max quantizer of N(0, 1) with 2**BITS levels: each is the mean of a cell."""
THRESHOLDS: Floats = np.array([0.50054973, 1.0499573, 1.7479275], np.float32)  # thresholds halfway between these levels


@dataclass(frozen=True)
class K3v3Preset:
    """Preset: three bits for each number, and a scale for each vector."""

    name: str = "k3v3"

    def codec(self, head_dim: int, facts: ModelFacts = NO_FACTS) -> "K3v3Codec":
        """Return the codec on the CPU. Raises HeadDimError."""
        return K3v3Codec(self.name, head_dim)


K3V3 = K3v3Preset()


class K3v3Codec(Codec):
    """`Codec` of the preset, on the CPU."""

    scales_vectors = True

    def __init__(self, name: str, head_dim: int) -> None:
        check_head_dim(head_dim)
        self.name, self.head_dim = name, head_dim

    def max_nbytes(self, section: Section) -> int:
        n = math.prod(section.shape[:-1])
        return align16(2 * n) + align16(n * BITS * section.head_dim // 8)

    def encode(self, x: Numbers, section: Section, positions: Positions, out: ByteArray) -> int:
        """Raises NonFiniteError."""
        vectors = as_floats(x).reshape(-1, section.tokens, section.head_dim)
        n = vectors[..., 0].size
        encoded = out[: self.max_nbytes(section)]
        encoded[:] = 0
        check_finite(vectors)
        scales, planes = _encoded(vectors)
        encoded[: 2 * n], encoded[align16(2 * n) :][: planes.size] = scales.astype("<u2").view(np.uint8), planes.ravel()
        return encoded.size

    def decode(self, encoded: ByteArray, section: Section, positions: Positions) -> Numbers:
        """Raises SizeError; NonFiniteError for a scale that is infinite or a NaN."""
        n, dim = math.prod(section.shape[:-1]), section.head_dim
        if encoded.size != self.max_nbytes(section):
            raise SizeError(f"{encoded.size} bytes do not encode {section}: {self.max_nbytes(section)} do.")
        scales = encoded[: 2 * n].copy().view("<u2").astype(np.uint32) << np.uint32(16)
        infinite = (scales & EXPONENT) == EXPONENT
        if infinite.any():
            bad = int(infinite.argmax())
            raise NonFiniteError(f"the scale of vector {bad} is not finite: the block is damaged.")
        planes = encoded[align16(2 * n) :][: n * BITS * dim // 8].reshape(-1, section.tokens, BITS, dim // 8)
        return as_numbers(_decoded(scales.view(np.float32), planes).reshape(section.shape), section.dtype)


def _encoded(x: Floats) -> tuple[npt.NDArray[np.uint16], ByteArray]:
    """Return scales, bf16 bits [n], and planes [n, BITS, head_dim / 8] of n finite vectors [-1, tokens, head_dim]."""
    constants = rotation(x.shape[2])
    words = np.ascontiguousarray(x).view(np.uint32)
    power = np.clip(254 - ((words & MAGNITUDE).max(axis=2) >> np.uint32(23)).astype(np.int32), 8, 254) - 127
    scaled = words.view(np.float32) * np.ldexp(np.float32(1), power)[:, :, None]
    y, square = kernels().rotated(scaled, constants.weights, constants.blocks)
    rms = (np.sqrt(square) * constants.root)[:, None]
    code = (y < 0).astype(np.uint8) << np.uint8(BITS - 1)
    np.abs(y, out=y)
    for threshold in THRESHOLDS:
        code += y > threshold * rms
    ratio = square / np.maximum(kernels().products(y, LEVELS[code & 3]), SMALLEST)
    with np.errstate(over="ignore"):
        scales = np.minimum(bf16_bits(ratio * np.ldexp(np.float32(1), -power)), 0x7F7F)
    of_vectors = np.ascontiguousarray(code.transpose(0, 2, 1)).reshape(-1, 1, x.shape[2])
    digits = of_vectors >> np.arange(BITS - 1, -1, -1, dtype=np.uint8)[:, None] & np.uint8(1)
    return scales.ravel(), np.packbits(digits, axis=2, bitorder="little")


def _decoded(scales: Floats, planes: ByteArray) -> Floats:
    """Undo `_encoded`. scales: float32. planes: [-1, tokens, BITS, head_dim / 8]. Returns [-1, tokens, head_dim]."""
    digits = np.unpackbits(planes, axis=3, bitorder="little")
    code = digits[:, :, 0] << np.uint8(2) | digits[:, :, 1] << np.uint8(1) | digits[:, :, 2]
    constants = rotation(digits.shape[3])
    levels = np.take(np.concatenate([LEVELS, -LEVELS]), code)
    x: Floats = kernels().rotated(levels, np.ones_like(constants.weights), constants.blocks)[0]
    x *= constants.weights[:, None]
    with np.errstate(over="ignore"):
        x *= scales.reshape(len(x), 1, -1)
    np.clip(x, -LARGEST_BF16, LARGEST_BF16, out=x)
    x += np.float32(0)  # no negative zeros
    return np.ascontiguousarray(x.transpose(0, 2, 1))
