"""Interface of a codec, and definition of a sum in codecs.

A compressed block has sections. A section holds some of a KV block's numbers, such as the keys of all layers and heads.
A `Codec` encodes and decodes a section. A preset is a named choice of options; its method `codec` makes a `Codec`. A
codec's CPU and GPU versions decode each other's blocks; `klt-exact` has no GPU version.

    fold(x)   the sum of a sequence in a prescribed order. The upper half is added onto the lower half, until one
              element is left. The middle element of an odd number of elements is left as it is. A vector of D numbers
              is folded in each run of 8 elements; then the D/8 results are folded.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from manthan.codec.errors import HeadDimError, ShapeError

Kind = Literal["key", "value"]
Numbers = npt.NDArray[Any]
"""Numbers of the KV cache: float16, float32, uint16 with bf16 bits, uint8 with fp8 bits, or any bytes."""
Positions = npt.NDArray[np.int64]
"""[tokens]: position of each token in its session, from 0."""
ByteArray = npt.NDArray[np.uint8]
"""[nbytes]: bytes of an encoded section, or of a whole compressed block."""


def check_head_dim(head_dim: int) -> None:
    """Raise HeadDimError unless head_dim is a multiple of 8 from 32 to 512."""
    if not (isinstance(head_dim, int) and 32 <= head_dim <= 512 and head_dim % 8 == 0):
        raise HeadDimError(f"head_dim {head_dim!r} is not supported: a multiple of 8 from 32 to 512 is.")


class SectionKind(IntEnum):
    """Kind of a section's numbers."""

    KEYS = 1
    VALUES = 2
    BOTH = 3  # keys, and then values
    RAW = 5  # opaque bytes: recurrent states, a whole KV block, or its part `BlockShape.opaque`
    LATENT = 6  # latents of MLA, cut into pieces that stand for heads; encoded like keys without RoPE


class Dtype(IntEnum):
    """Dtype of numbers in the KV cache."""

    BFLOAT16 = 1
    FLOAT16 = 2
    FLOAT32 = 3
    UINT8 = 4  # opaque bytes, such as recurrent states
    FLOAT8_E4M3 = 5  # without infinities, as torch.float8_e4m3fn
    FLOAT8_E5M2 = 6

    @cached_property
    def numpy(self) -> np.dtype[Any]:
        """numpy dtype that holds the numbers: uint16 for bf16's bits, and uint8 for fp8's bits."""
        return np.dtype([np.uint16, np.float16, np.float32, np.uint8, np.uint8, np.uint8][self - 1])

    @cached_property
    def is_fp8(self) -> bool:
        return self in (Dtype.FLOAT8_E4M3, Dtype.FLOAT8_E5M2)


@dataclass(frozen=True)
class Section:
    """Description of a section of a compressed block.

    codec: name of the codec.
    layers, first_layer: count of layers, and index of the first layer; Manthan writes 0.
    tokens, first_token: count of tokens, and index of the first token in the block.
    heads, head_dim: count of KV heads (or of a latent's pieces), and of numbers in a vector. Opaque bytes are
    layers * heads * tokens runs of `head_dim` bytes; `tokens` may then differ from the block's count of tokens.
    dtype: dtype of the numbers before encoding and after decoding.
    first_head: index of the first head among the KV heads of all tensor-parallel ranks.
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
    first_head: int = 0

    @property
    def vectors(self) -> int:
        return self.layers * self.heads * self.tokens

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """[layers, heads, tokens, head_dim]; with both keys and values, [2, layers, heads, tokens, head_dim]."""
        shape = (self.layers, self.heads, self.tokens, self.head_dim)
        return (2, *shape) if self.kind is SectionKind.BOTH else shape

    @property
    def vector_kind(self) -> Kind:
        """Kind of the vectors. Raises ShapeError for a section of both kinds or of none."""
        if len(self.vector_kinds) != 1:
            raise ShapeError(f"a section of kind {self.kind.name} holds keys and values, not one of the two.")
        return self.vector_kinds[0]

    @property
    def vector_kinds(self) -> tuple[Kind, ...]:
        """Kinds of the vectors, in order. Raises ShapeError if there are none."""
        if self.kind is SectionKind.RAW:
            raise ShapeError("a section of kind RAW holds no vectors: KEYS, VALUES, BOTH, LATENT do.")
        if self.kind is SectionKind.BOTH:
            return "key", "value"
        return ("value",) if self.kind is SectionKind.VALUES else ("key",)


class Codec(ABC):
    """Encodes the numbers of a section of a block to bytes, and decodes them.

    Several threads may call the methods at once. A call uses one core, but for matrix products of `klt` by BLAS.
    """

    name: str
    varies: bool = False
    """True if encoded sections of equal shape may differ in size."""
    scales_vectors: bool = False
    """True if a scale is stored with each vector. A common factor then changes only the scale, but for rounding."""
    takes_fp8: bool = False
    """True if fp8 sections are encoded as they are. Other codecs get float32 numbers; see `Fp8Codec`."""
    levels: int = 1
    """Number of levels: precisions to which a block can be decoded. The base, stored first, gives the coarsest level.

    Each refinement, stored behind the base, adds a finer level.
    """

    @abstractmethod
    def max_nbytes(self, section: Section) -> int:
        """Return the most bytes of an encoded section, refinements included; the exact number if not `varies`.

        Args:
            section: shape, kind and dtype of the numbers.

        Raises: SizeError or ShapeError for a section that the codec was not made for.
        """

    def expected_nbytes(self, section: Section) -> int:
        """Return the bytes of a typical encoded section, refinements included, at most `max_nbytes`.

        Args:
            section: see `max_nbytes`.
        """
        return self.max_nbytes(section)

    @abstractmethod
    def encode(self, x: Numbers, section: Section, positions: Positions, out: ByteArray) -> int:
        """Encode a section, without refinements, into the first bytes of `out`. Return the number of bytes written.

        Args:
            x: numbers of the section's `shape` and dtype. Keys are those of the cache, after RoPE.
            section: shape, kind and dtype of `x`.
            positions: int64 [tokens], position of each token in its session.
            out: uint8 [`max_nbytes`].

        Raises: CodecError, such as NonFiniteError, for numbers that cannot be encoded.
        """

    @abstractmethod
    def decode(self, encoded: ByteArray, section: Section, positions: Positions) -> Numbers:
        """Return the numbers, of the section's `shape` and dtype.

        Args:
            encoded: uint8, exactly the bytes that `encode` wrote.
            section, positions: as for `encode`.

        Raises: SizeError for an impossible length; another CodecError for damaged bytes.
        """

    def encode_parts(
        self, x: Numbers, section: Section, positions: Positions, out: ByteArray
    ) -> tuple[int, list[ByteArray]]:
        """Encode the base like `encode`. Return its number of bytes, and each refinement's bytes, coarsest first.

        Args:
            x, section, positions, out: as for `encode`. Refinements are not written into `out`.

        Raises: see `encode`.
        """
        return self.encode(x, section, positions, out), []

    def decode_parts(
        self, encoded: ByteArray, refinements: Sequence[ByteArray], section: Section, positions: Positions
    ) -> Numbers:
        """Decode the base and refinements. Return the numbers as `decode` does.

        Args:
            encoded, section, positions: as for `decode`.
            refinements: as `wire.parse` returns them, coarsest first. The last ones are missing if the block was cut.

        Raises: see `decode`.
        """
        return self.decode(encoded, section, positions)
