"""Interface of a codec, and arithmetic that several codecs share.

`Codec` takes the numbers of a section of a block, all layers and heads at once, with their places in the chain. A
preset is an instance of a frozen dataclass whose fields are its options; its `codec` makes a `Codec`. Every backend
writes the same bytes as the CPU's, and reads them.

    fold(x)   the sum of a sequence in a prescribed order: the upper half is added onto the lower half (the middle of an
              odd number of elements stays) until one is left; of a vector, first in each run of 8 elements, then over
              the D/8 results
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from manthan.codec.errors import HeadDimError, KindError

Kind = Literal["key", "value"]
Numbers = npt.NDArray[Any]
"""As the cache has them: float16, float32, uint16 holding bf16 bits, or uint8 holding those of fp8, or any bytes."""
Positions = npt.NDArray[np.int64]
Codes = npt.NDArray[np.uint8]


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
    def vector_kind(self) -> Kind:
        """Kind of the vectors. Raises KindError for a section of both kinds or of none."""
        if len(self.vector_kinds) != 1:
            raise KindError(f"a section of kind {self.kind.name} is not of one kind of vectors, keys or values.")
        return self.vector_kinds[0]

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


class Codec(ABC):
    """Numbers of a section of a block to bytes and back. Safe to call from several threads at once, on whose cores
    alone it works.

    x has the section's `shape` and dtype. positions: [tokens], the places of its tokens in the chain.
    """

    name: str
    varies: bool = False
    """Whether sections of one shape may take more or fewer bytes."""

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
