"""Interface of a codec, and arithmetic common to several codecs.

`Codec` takes the numbers of a section of a block, all layers and heads at once, with their positions in the session. A
preset is an instance of a frozen dataclass with the options as fields; the method `codec` makes a `Codec`. Every
backend writes the same bytes as the CPU's, and reads them.

    fold(x)   the sum of a sequence in a prescribed order: the upper half is added onto the lower half (the middle of an
              odd number of elements stays) until one is left; of a vector, first in each run of 8 elements, then over
              the D/8 results
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
"""Numbers of the cache: float16, float32, uint16 with bf16 bits, uint8 with fp8 bits, or any bytes."""
Positions = npt.NDArray[np.int64]
Codes = npt.NDArray[np.uint8]


def check_head_dim(head_dim: int) -> None:
    """Raise HeadDimError unless head_dim is a multiple of 8 from 32 to 512."""
    if not (isinstance(head_dim, int) and 32 <= head_dim <= 512 and head_dim % 8 == 0):
        raise HeadDimError(f"head_dim {head_dim!r} is not supported: a multiple of 8 from 32 to 512 is.")


class SectionKind(IntEnum):
    """Kind of a section's numbers."""

    KEYS = 1
    VALUES = 2
    BOTH = 3
    """Keys, and then values."""
    STATE = 4
    """A recurrent layer's state."""
    RAW = 5
    """Opaque bytes of the cache: a whole block, or the layers without a codec."""
    LATENT = 6
    """Latents of MLA, in pieces instead of heads, coded like keys without RoPE."""


class Dtype(IntEnum):
    """Kind of the cache's numbers, the output of decoding."""

    BFLOAT16 = 1
    FLOAT16 = 2
    FLOAT32 = 3
    UINT8 = 4
    """Bytes that do not each stand for a number."""
    FLOAT8_E4M3 = 5
    """Without infinities, as torch.float8_e4m3fn."""
    FLOAT8_E5M2 = 6

    @cached_property
    def numpy(self) -> np.dtype[Any]:
        """numpy's dtype of the numbers; bf16 and fp8 as their bits."""
        return np.dtype([np.uint16, np.float16, np.float32, np.uint8, np.uint8, np.uint8][self - 1])

    @cached_property
    def is_fp8(self) -> bool:
        return self in (Dtype.FLOAT8_E4M3, Dtype.FLOAT8_E5M2)


@dataclass(frozen=True)
class Section:
    """Description of a section of a compressed block.

    codec: name of the codec.
    layers, first_layer: of the KV cache group.
    tokens, first_token: of the block.
    heads, head_dim: of this shard; of bytes, the number of a token's runs, and the length of a run.
    first_head: number of this shard's first head among the model's.
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
        """[layers, heads, tokens, head_dim], preceded by 2 where keys and values are together."""
        shape = (self.layers, self.heads, self.tokens, self.head_dim)
        return (2, *shape) if self.kind is SectionKind.BOTH else shape

    @property
    def vector_kind(self) -> Kind:
        """Kind of the vectors. Raises ShapeError for a section of both kinds or of none."""
        if len(self.vector_kinds) != 1:
            raise ShapeError(f"a section of kind {self.kind.name} is not of one kind of vectors, keys or values.")
        return self.vector_kinds[0]

    @property
    def vector_kinds(self) -> tuple[Kind, ...]:
        """Kinds of the vectors, in order. Raises ShapeError if there are none."""
        kinds: dict[SectionKind, tuple[Kind, ...]] = {
            SectionKind.KEYS: ("key",),
            SectionKind.VALUES: ("value",),
            SectionKind.BOTH: ("key", "value"),
            SectionKind.LATENT: ("key",),
        }
        if self.kind not in kinds:
            raise ShapeError(
                f"a section of kind {self.kind.name} holds no vectors: {', '.join(k.name for k in kinds)} do."
            )
        return kinds[self.kind]


class Codec(ABC):
    """Encodes the numbers of a section of a block to bytes, and decodes.

    Thread-safe, and works only on the callers' cores. `x` has the section's `shape` and dtype, and `positions` [tokens]
    are the tokens' positions in the session.
    """

    name: str
    varies: bool = False
    """True if sections of equal shape may differ in size."""
    levels: int = 1
    """Number of qualities of a block: the base's, and one more with each refinement."""

    @abstractmethod
    def max_nbytes(self, section: Section) -> int:
        """Most bytes of a section and all refinements; the exact bytes for a codec with a fixed rate."""

    def expected_nbytes(self, section: Section) -> int:
        return self.max_nbytes(section)

    @abstractmethod
    def encode(self, x: Numbers, section: Section, positions: Positions, out: Codes) -> int:
        """Encode into the front of `out`, of `max_nbytes` bytes. Returns the number of bytes written.

        Raises: CodecError, such as NonFiniteError, for unencodable numbers.
        """

    @abstractmethod
    def decode(self, codes: Codes, section: Section, positions: Positions) -> Numbers:
        """Decode to numbers. Raises SizeError for an impossible length, CodecError."""

    def encode_parts(self, x: Numbers, section: Section, positions: Positions, out: Codes) -> tuple[int, list[Codes]]:
        """Encode like `encode`. Returns also the bodies of the section's refinements."""
        return self.encode(x, section, positions, out), []

    def decode_parts(
        self, codes: Codes, refinements: Sequence[Codes], section: Section, positions: Positions
    ) -> Numbers:
        """Decode like `decode`, to the level of the last refinement present."""
        return self.decode(codes, section, positions)
