"""What a codec is, the layout of its codes, and the arithmetic that every backend reproduces bit for bit.

`SectionCodec` is what the rest of the house uses: the numbers of a section of a block, all layers and heads at once,
with their places in the chain. `Codec` is for vectors that need nothing but themselves; `manthan.codec.cpu.vectors`
makes a `SectionCodec` of one.

Codes of n vectors of D = head_dim numbers at b bits, little-endian:

    | n scales, bf16 | pad to 16 | vector 0: b bit planes | vector 1: b bit planes | ... | pad to 16 |

A plane is D/8 bytes; its bit i (bit i % 8 of byte i // 8) belongs to element i of the rotated vector. The
first plane is the sign, 1 for minus; the others are the index of the magnitude, highest bit first. Padding is
zero.

Encoding a vector x, all in float32, no step fused with another:

    m  = the largest exponent field (bits 23 to 30) in x
    x1 = x * 2**(127 - m)      the factor's exponent field within 8 .. 254: no square overflows or vanishes
    y  = hadamard(x1 * w)      w: rotation.weights; the unrotated codec has y = x1
    r  = sqrt(fold(y * y)) * (1 / sqrt(D))
    k  = number of thresholds t with |y| > t * r;  q = levels[k];  the sign is y < 0
    s  = fold(|y| * q) / fold(q * q) * 2**(m - 127), rounded to bf16, ties to even, at most bf16's largest
    or, where the scale is the unbiased one,
    s  = fold(y * y) / max(fold(|y| * q), 2**-126) * 2**(m - 127), rounded in the same way

and decoding it:

    x^ = hadamard(±q) * w * s, within ±bf16's largest; a bf16 result is rounded, ties to even

fold adds the upper half of a sequence onto its lower half (the middle element of an odd one stays) until one
number is left; it is applied to each run of 8 elements, then to the D/8 results. The first s is the
least-squares scale: x^ has the least error, and is too short by as much as the quantizer loses. With the second
<x, x^> = <x, x>: x^ is longer by the same share, and inner products with it are right on average (RaBitQ, Gao and
Long, SIGMOD 2024). Decoding is the same. bf16 for s keeps float32's whole range; its rounding is invisible beside
the quantization's.

Accuracy ends with bf16's range: a vector whose scale falls below 2**-126 loses digits, below 2**-134 it
decodes to zeros.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from manthan.codec.errors import DtypeError, HeadDimError, KindError, NonFiniteError, ShapeError

Kind = Literal["key", "value"]
Vectors = npt.NDArray[np.float32] | npt.NDArray[np.uint16]
Numbers = npt.NDArray[Any]
"""As the cache has them: float16, float32, uint16 holding bf16 bits, or uint8 holding those of fp8, or any bytes."""
Positions = npt.NDArray[np.int64]
Codes = npt.NDArray[np.uint8]
DType = type[np.float32] | type[np.uint16] | np.dtype[np.float32] | np.dtype[np.uint16]


@dataclass(frozen=True)
class CodecSpec:
    """What a codec's name stands for. key_bits, value_bits: 2, 3 or 4 per number. rotated: False only for
    comparison. unbiased: which scale encoding stores. mean_bits: 0 where vectors are coded one by one, else of each
    number of the mean that keys are coded less of; see `manthan.codec.centred`."""

    name: str
    key_bits: int
    value_bits: int
    rotated: bool = True
    unbiased: bool = False
    mean_bits: int = 0

    def bits(self, kind: Kind) -> int:
        """Bits per number for keys or for values."""
        if kind not in get_args(Kind):
            raise KindError(f'kind {kind!r} is unknown: it is "key" or "value".')
        return self.key_bits if kind == "key" else self.value_bits


def align16(nbytes: int) -> int:
    """nbytes rounded up to a multiple of 16."""
    return (nbytes + 15) & ~15


def check_head_dim(head_dim: int) -> None:
    """Raise HeadDimError unless head_dim is a multiple of 8 from 32 to 512."""
    if not (isinstance(head_dim, int) and 32 <= head_dim <= 512 and head_dim % 8 == 0):
        raise HeadDimError(f"head_dim {head_dim!r} is not supported: a multiple of 8 from 32 to 512 is.")


class SectionKind(IntEnum):
    """What the numbers of a section are."""

    KEYS = 1
    VALUES = 2
    BOTH = 3
    """Keys, and then values."""
    STATE = 4
    """A recurrent layer's state."""
    RAW = 5
    """Bytes of the cache that nobody looks into."""
    LATENT = 6
    """Latents of MLA, in pieces that stand where heads do; coded as keys are that no RoPE turns."""


class Dtype(IntEnum):
    """What the cache's numbers are, which codes are decoded to."""

    BFLOAT16 = 1
    FLOAT16 = 2
    FLOAT32 = 3
    UINT8 = 4
    """Bytes that stand for no number each."""
    FLOAT8_E4M3 = 5
    """Without infinities, as torch.float8_e4m3fn."""
    FLOAT8_E5M2 = 6

    @property
    def numpy(self) -> np.dtype[Any]:
        """What numpy holds such numbers in; bf16 and fp8 as their bits."""
        return np.dtype([np.uint16, np.float16, np.float32, np.uint8, np.uint8, np.uint8][self - 1])

    @property
    def is_fp8(self) -> bool:
        return self in (Dtype.FLOAT8_E4M3, Dtype.FLOAT8_E5M2)


@dataclass(frozen=True)
class Section:
    """What a section of an encoded block says of itself.

    codec: its name. first_layer, layers: of the KV cache group. first_token, tokens: of the block. heads (of this
    shard), head_dim: of bytes that are no numbers, how many runs a token has, and how long each is.
    """

    kind: SectionKind
    codec: str
    layers: int
    tokens: int
    heads: int
    head_dim: int
    dtype: Dtype = Dtype.BFLOAT16
    first_layer: int = 0
    first_token: int = 0

    @property
    def vectors(self) -> int:
        """How many vectors of keys, or of values, it holds."""
        return self.layers * self.heads * self.tokens

    @property
    def shape(self) -> tuple[int, ...]:
        """[layers, heads, tokens, head_dim], and ahead of that 2 where keys and values are together."""
        shape = (self.layers, self.heads, self.tokens, self.head_dim)
        return (2, *shape) if self.kind is SectionKind.BOTH else shape

    @property
    def vector_kinds(self) -> tuple[Kind, ...]:
        """What its vectors are, in order; raises KindError where it has none."""
        kinds: dict[SectionKind, tuple[Kind, ...]] = {
            SectionKind.KEYS: ("key",),
            SectionKind.VALUES: ("value",),
            SectionKind.BOTH: ("key", "value"),
            SectionKind.LATENT: ("key",),
        }
        if self.kind not in kinds:
            raise KindError(
                f"a section of kind {self.kind.name} holds no vectors: {', '.join(k.name for k in kinds)} do."
            )
        return kinds[self.kind]


class SectionCodec(ABC):
    """Numbers of a section of a block to bytes and back. Safe to call from several threads at once, on whose cores
    alone it works.

    x has the section's `shape` and dtype. positions: [tokens], the places of its tokens in the chain.
    """

    name: str
    varies: bool = False
    """Whether sections of one shape may take more or fewer bytes."""

    def warm_up(self) -> None:  # noqa: B027 most have nothing to compile
        """Do now what the first call would otherwise wait for, such as compiling."""

    @abstractmethod
    def max_nbytes(self, section: Section) -> int:
        """The most bytes that such a section can take: what it does take, where the codec has a fixed rate."""

    def expected_nbytes(self, section: Section) -> int:
        """About how many bytes such a section takes."""
        return self.max_nbytes(section)

    @abstractmethod
    def encode(self, x: Numbers, section: Section, positions: Positions, out: Codes) -> int:
        """Encode into the front of `out`, which has `max_nbytes`; returns how many bytes it took.

        Raises NonFiniteError and other CodecErrors for numbers that it cannot encode.
        """

    @abstractmethod
    def decode(self, codes: Codes, section: Section, positions: Positions) -> Numbers:
        """The numbers whose codes these are. Raises SizeError for codes of a length that cannot be, CodecError."""


class Codec(ABC):
    """Vectors of one head_dim to codes and back. Safe to call from several threads at once.

    threads: how many threads one call may use; 1 keeps it on the caller's. Small calls never leave the
    caller's thread.
    """

    backend: str

    def __init__(self, spec: CodecSpec, head_dim: int) -> None:
        check_head_dim(head_dim)
        self.spec = spec
        self.name = spec.name
        self.head_dim = head_dim
        self.threads = 1

    def bits(self, kind: Kind = "key") -> int:
        """Bits per number for this kind, without the scale."""
        return self.spec.bits(kind)

    def encoded_nbytes(self, n: int, kind: Kind = "key") -> int:
        """Size in bytes of the codes of n vectors."""
        return align16(2 * n) + align16(n * self.bits(kind) * self.head_dim // 8)

    @property
    def ratio(self) -> float:
        """bf16 bytes per encoded byte, over keys and values in equal number."""
        planes = (self.spec.key_bits + self.spec.value_bits) * self.head_dim / 8
        return 4 * self.head_dim / (4 + planes)

    def encode(self, x: Vectors, kind: Kind = "key", *, out: Codes | None = None) -> Codes:
        """Encode [n, head_dim] float32, or uint16 holding bf16 bits, into `encoded_nbytes(n, kind)` bytes.

        out: a contiguous uint8 array of that size to write to; it is returned. Raises NonFiniteError at the
        first vector with a NaN or an infinity, DtypeError, ShapeError, KindError.
        """
        if not isinstance(x, np.ndarray) or x.dtype not in (np.float32, np.uint16):
            raise DtypeError(f"vectors of {_dtype(x)} cannot be encoded: float32, or uint16 holding bf16 bits.")
        if x.ndim != 2 or x.shape[1] != self.head_dim:
            raise ShapeError(f"vectors of shape {x.shape} cannot be encoded: it must be [n, {self.head_dim}].")
        n, nbytes = len(x), self.encoded_nbytes(len(x), kind)
        codes = np.empty(nbytes, np.uint8) if out is None else out
        self._check_codes(codes, n, kind)
        if n == 0:
            return codes
        scales, planes = self._split(codes, n, kind)
        codes[2 * n : align16(2 * n)] = 0
        codes[align16(2 * n) + planes.size :] = 0
        bad = self._encode(x, self.bits(kind), scales, planes)
        if bad >= 0:
            raise NonFiniteError(f"vector {bad} holds a NaN or an infinity and cannot be encoded.", bad)
        return codes

    def decode(
        self, buf: Codes, n: int, kind: Kind = "key", dtype: DType = np.float32, *, out: Vectors | None = None
    ) -> Vectors:
        """Decode n vectors to [n, head_dim] float32, or, with dtype uint16, to bf16 bits.

        out: a C-contiguous array of that shape and dtype to write to; it is returned. Raises NonFiniteError
        at the first scale that is a NaN or an infinity, DtypeError, ShapeError, KindError.
        """
        if dtype not in (np.float32, np.uint16):
            raise DtypeError(f"codes cannot be decoded to {dtype}: float32, or uint16 for bf16 bits.")
        self._check_codes(buf, n, kind)
        shape = (n, self.head_dim)
        x: Vectors = np.empty(shape, dtype) if out is None else out
        if x.shape != shape or x.dtype != dtype or not x.flags.c_contiguous:
            raise ShapeError(
                f"out is {x.dtype} of shape {x.shape}: it must be {np.dtype(dtype)} of {shape}, C-contiguous."
            )
        if n == 0:
            return x
        scales, planes = self._split(buf, n, kind)
        bad = self._decode(scales, planes, self.bits(kind), x)
        if bad >= 0:
            raise NonFiniteError(f"the scale of vector {bad} is not finite: the codes are damaged.", bad)
        return x

    @abstractmethod
    def warm_up(self) -> None:
        """Do now what the first call would otherwise wait for, such as compiling."""

    @abstractmethod
    def _encode(self, x: Vectors, bits: int, scales: Codes, planes: Codes) -> int:
        """Fill scales and planes; return the first non-finite vector's index, or -1."""

    @abstractmethod
    def _decode(self, scales: Codes, planes: Codes, bits: int, out: Vectors) -> int:
        """Fill out [n, head_dim]; return the first non-finite scale's index, or -1."""

    def _split(self, codes: Codes, n: int, kind: Kind) -> tuple[Codes, Codes]:
        start = align16(2 * n)
        return codes[: 2 * n], codes[start : start + n * self.bits(kind) * self.head_dim // 8]

    def _check_codes(self, codes: Codes, n: int, kind: Kind) -> None:
        nbytes = self.encoded_nbytes(n, kind)
        if not isinstance(codes, np.ndarray) or codes.dtype != np.uint8:
            raise DtypeError(f"codes of {_dtype(codes)} are not supported: they are a uint8 array.")
        if codes.shape != (nbytes,) or not codes.flags.c_contiguous:
            raise ShapeError(
                f"codes of shape {codes.shape} are not those of {n} {kind} vectors: {self.name} at head_dim "
                f"{self.head_dim} takes a contiguous run of {nbytes} bytes."
            )


def _dtype(x: Any) -> str:
    return str(x.dtype) if hasattr(x, "dtype") else type(x).__name__
