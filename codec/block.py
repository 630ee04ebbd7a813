"""A block of the cache as an encoded block and back: which sections it has, in which codec.

Models with multi-head latent attention (MLA) cache no keys and values, but a latent of each token, which both are made
of, and a part of the key that RoPE turns, the same for all heads. Here that part stands in the keys' place and the
latent in the values'. RoPE's part is kept exact: it is a ninth of the numbers, and every head's logits have its errors.
The latent is cut into pieces, so that codecs meet vectors of a size that they know; a piece stands where a head does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from manthan.codec.base import Codes, Dtype, Numbers, Positions, Section, SectionKind, align16
from manthan.codec.cpu.exact import EXACT
from manthan.codec.cpu.numbers import Fp8Codec
from manthan.codec.cpu.state import STATE_CODECS
from manthan.codec.errors import (
    CodecError,
    DtypeError,
    HeadDimError,
    ProfileError,
    ShapeError,
    SizeError,
    WireError,
)
from manthan.codec.model import NO_FACTS, ModelFacts
from manthan.codec.registry import get_codec, needs_profile
from manthan.codec.wire import BlockHeader, Buffer, block_nbytes, head, parse, seal


@dataclass(frozen=True)
class BlockShape:
    """Of one rank's block of one KV cache group.

    dtype: UINT8 stands for bytes that nobody looks into, however they lie: the block has them as keys, and no values.
    latent: how many numbers a token's latent has in a layer (MLA), 0 where there are values; heads is 1 then, and
    head_dim that of the key's part that RoPE turns.
    """

    layers: int
    heads: int
    tokens: int
    head_dim: int
    dtype: Dtype = Dtype.BFLOAT16
    latent: int = 0

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """The shape of its keys."""
        return (self.layers, self.heads, self.tokens, self.head_dim)

    @property
    def value_numbers(self) -> tuple[int, int, int, int]:
        """The shape of its values: that of the keys, of nothing, or of latents, [layers, pieces, tokens, numbers of a
        piece]. Raises HeadDimError."""
        if not self.latent:
            return (self.layers, self.heads, self.tokens, 0 if self.is_raw else self.head_dim)
        return (self.layers, self.latent // self.coded_dim, self.tokens, self.coded_dim)

    @property
    def coded_dim(self) -> int:
        """How many numbers the vectors have that are coded. Raises HeadDimError."""
        return piece_dim(self.latent) if self.latent else self.head_dim

    @property
    def is_raw(self) -> bool:
        """Whether its bytes stand for no numbers."""
        return self.dtype is Dtype.UINT8


PIECE = 128
"""Numbers of a piece of a latent, at most."""


def piece_dim(latent: int) -> int:
    """The numbers of a piece of such a latent: as few and as large pieces as there can be. Raises HeadDimError."""
    fitting = [size for size in range(PIECE, 31, -8) if latent % size == 0]
    if not fitting:
        raise HeadDimError(f"a latent of {latent} numbers is not supported: a multiple of 32 is.")
    return fitting[0]


@lru_cache(1024)
def sections(codec: str, shape: BlockShape, exact: int) -> tuple[Section, ...]:
    """The sections of a block whose first `exact` tokens, 0 to shape.tokens, are kept as they are, and the others in
    `codec`. Every number of the block is in one of them, and in one only. A block of bytes is one section, and exact
    unless it has states in a codec of states. Raises ShapeError."""
    if not 0 <= exact <= shape.tokens:
        raise ShapeError(f"{exact} exact tokens cannot be: the block has {shape.tokens}.")
    if shape.latent:
        return _latent_sections(codec, shape, exact)

    def section(kind: SectionKind, codec: str, first_token: int, tokens: int) -> Section:
        return Section(kind, codec, shape.layers, tokens, shape.heads, shape.head_dim, shape.dtype, 0, first_token)

    if shape.is_raw:
        return (section(SectionKind.RAW, codec if codec in STATE_CODECS.values() else EXACT, 0, shape.tokens),)
    made = []
    if exact > 0:
        made.append(section(SectionKind.BOTH, EXACT, 0, exact))
    if exact < shape.tokens:
        made += [section(kind, codec, exact, shape.tokens - exact) for kind in (SectionKind.KEYS, SectionKind.VALUES)]
    return tuple(made)


def _latent_sections(codec: str, shape: BlockShape, exact: int) -> tuple[Section, ...]:
    """RoPE's part of all tokens, and the latents of the first and of the others."""
    layers, pieces, tokens, piece = shape.value_numbers
    keys = Section(SectionKind.KEYS, EXACT, layers, tokens, shape.heads, shape.head_dim, shape.dtype)

    def latents(codec: str, first_token: int, end: int) -> Section:
        return Section(SectionKind.LATENT, codec, layers, end - first_token, pieces, piece, shape.dtype, 0, first_token)

    runs = [latents(EXACT, 0, exact), latents(codec, exact, tokens)]
    return (keys, *(run for run in runs if run.tokens))


class BlockFormat:
    """What the encoded blocks of one rank and KV cache group have in common. Safe to use from several threads.

    codec: its name. fingerprint: 16 bytes; see `wire.BlockHeader`. facts: of the model, for codecs that want them.
    Blocks of fp8 are kept exact as a whole, their own bytes, where that is smaller, or where the codec does not take
    them. Raises UnknownCodecError, HeadDimError, ProfileError.
    """

    def __init__(
        self, codec: str, shape: BlockShape, fingerprint: bytes, group: int = 0, facts: ModelFacts = NO_FACTS
    ) -> None:
        self.codec, self.shape, self.fingerprint, self.group, self.facts = codec, shape, fingerprint, group, facts
        if shape.latent and needs_profile(codec):
            raise ProfileError(f"codec {codec} is calibrated, and latents (MLA) take no profile: use wht-5x or wht-4x.")
        self._codecs = {name: get_codec(name, shape.coded_dim, facts) for name in (codec, EXACT)}
        if shape.dtype.is_fp8 and codec != EXACT:
            self._codecs[codec] = Fp8Codec(self._codecs[codec])

    def warm_up(self, exacts: Sequence[int] = (0,)) -> None:
        """Encode and decode a block of zeros, so that no later block waits for a compiler or a table.

        Args:
            exacts: numbers of first tokens that are kept exact, one for each kind of block.
        """
        dtype = self.shape.dtype.numpy
        keys, values = (np.zeros(shape, dtype) for shape in (self.shape.numbers, self.shape.value_numbers))
        for exact in exacts:
            self.decode(self.encode(keys, values, key=b"", first_token=0, exact=exact), key=b"")

    def header(self, key: bytes, first_token: int, exact: int, mark: int = 0) -> BlockHeader:
        """What a block says of itself. Raises ShapeError."""
        made = sections(self.codec, self.shape, exact)
        return BlockHeader(key, self.fingerprint, self.shape.tokens, made, self.group, first_token, mark)

    def max_sizes(self, exact: int) -> tuple[int, ...]:
        """The most bytes that each section can take: what it does take, where the codec has a fixed rate."""
        made = sections(self.codec, self.shape, exact)
        return tuple(self._codecs[section.codec].max_nbytes(section) for section in made)

    def max_nbytes(self, exact: int) -> int:
        """The most bytes that a block can take."""
        coded = block_nbytes(self.header(b"", 0, exact), self.max_sizes(exact))
        return max(coded, self._whole_nbytes) if self._may_be_whole(exact) else coded

    def expected_nbytes(self, exact: int) -> int:
        """About how many bytes a block takes."""
        made = sections(self.codec, self.shape, exact)
        sizes = [self._codecs[section.codec].expected_nbytes(section) for section in made]
        coded = block_nbytes(self.header(b"", 0, exact), sizes)
        return min(coded, self._whole_nbytes) if self._may_be_whole(exact) else coded

    def varies(self, exact: int) -> bool:
        """Whether blocks may be of different sizes."""
        return self._may_be_whole(exact) or self.codes_vary(exact)

    def codes_vary(self, exact: int) -> bool:
        """The same of blocks of which no more is exact than that."""
        return any(self._codecs[section.codec].varies for section in sections(self.codec, self.shape, exact))

    def _may_be_whole(self, exact: int) -> bool:
        """Whether a block may be kept exact as a whole, of which no more is asked than its first tokens."""
        return self.shape.dtype.is_fp8 and exact < self.shape.tokens

    @property
    def _whole_nbytes(self) -> int:
        """Of a block that is exact as a whole."""
        whole = self.shape.tokens
        return block_nbytes(self.header(b"", 0, whole), self.max_sizes(whole))

    def exact_of(self, header: BlockHeader) -> int:
        """How many of a block's first tokens are exact. Raises the WireError of a block that is not of this format."""
        found = header.sections
        for section in found:
            if section.codec not in self._codecs:
                raise WireError(f"a section is in codec {section.codec!r}: the block's is {self.codec}.", "codec")
        exact = exact_of(found)
        tokens = self.shape.tokens
        if header.tokens != tokens or exact > tokens or found != sections(self.codec, self.shape, exact):
            raise SizeError(f"{header.tokens} tokens in {found} are not a block of {self.shape}.")
        return exact

    def encode(
        self, keys: Numbers, values: Numbers, *, key: bytes, first_token: int, exact: int, mark: int = 0
    ) -> Codes:
        """The encoded block of keys and values [layers, heads, tokens, head_dim] in the cache's numbers; of RoPE's part
        and latents, as `BlockShape` has them, where there are latents.

        first_token: the place of the block's first token in its chain. exact: how many of the first tokens are kept as
        they are, at least. mark: see `wire.BlockHeader`. Raises NonFiniteError, ShapeError, DtypeError, HeaderError.
        """
        if (keys.shape, values.shape) != (self.shape.numbers, self.shape.value_numbers):
            raise ShapeError(f"keys {keys.shape} and values {values.shape} are not a block of {self.shape}.")
        if {keys.dtype, values.dtype} != {self.shape.dtype.numpy}:
            raise DtypeError(f"keys {keys.dtype} and values {values.dtype} are not a block of {self.shape}.")
        if self._may_be_whole(exact):
            try:
                coded = self._encode(keys, values, key, first_token, exact, mark)
            except CodecError:  # a NaN, or whatever else the codec does not take
                coded = None
            if coded is not None and coded.nbytes <= self._whole_nbytes:
                return coded
            exact = self.shape.tokens
        return self._encode(keys, values, key, first_token, exact, mark)

    def _encode(self, keys: Numbers, values: Numbers, key: bytes, first_token: int, exact: int, mark: int) -> Codes:
        """As `encode`, with so many tokens exact and no more."""
        header = self.header(key, first_token, exact, mark)
        limits = self.max_sizes(exact)
        block = np.empty(block_nbytes(header, limits), np.uint8)
        sizes: list[int] = []
        at = header.nbytes
        for section, limit in zip(header.sections, limits, strict=True):
            part, positions = _part(keys, values, section), _positions(header, section)
            size = self._codecs[section.codec].encode(part, section, positions, block[at : at + limit])
            end = at + align16(size)
            block[at + size : end] = 0
            sizes.append(size)
            at = end
        block[: header.nbytes] = head(header, sizes)
        return seal(block[:at])

    def decode(self, buf: Buffer, *, key: bytes) -> tuple[Numbers, Numbers]:
        """What `encode` was given, of an encoded block, however many tokens it keeps exact.

        They may be views of `buf`. Raises the WireError that names the cause, or another CodecError for codes that
        cannot be decoded.
        """
        block = parse(buf, key=key, fingerprint=self.fingerprint, group=self.group)
        self.exact_of(block.header)
        keys, values = [], []
        for section, codes in zip(block.header.sections, block.payloads, strict=True):
            x = self._codecs[section.codec].decode(codes, section, _positions(block.header, section))
            if section.kind is SectionKind.BOTH:
                keys.append(x[0])
                values.append(x[1])
            else:
                (keys if section.kind in AS_KEYS else values).append(x)
        return _joined(keys), _joined(values or [np.empty(self.shape.value_numbers, x.dtype)])


AS_KEYS = (SectionKind.KEYS, SectionKind.RAW)
"""What stands in the keys' place; values and latents stand in the values'."""


def exact_of(found: Sequence[Section]) -> int:
    """How many of the first tokens are exact, if these sections are a block's."""
    runs = [section for section in found if section.kind in (SectionKind.BOTH, SectionKind.LATENT)]
    return runs[0].tokens if runs and runs[0].codec == EXACT else 0


def _part(keys: Numbers, values: Numbers, section: Section) -> Numbers:
    """The numbers of a section, of its shape."""
    tokens = slice(section.first_token, section.first_token + section.tokens)
    if section.kind is SectionKind.BOTH:
        return np.stack([keys[:, :, tokens], values[:, :, tokens]])
    return (keys if section.kind in AS_KEYS else values)[:, :, tokens]


def _positions(header: BlockHeader, section: Section) -> Positions:
    first = header.first_token + section.first_token
    return np.arange(first, first + section.tokens, dtype=np.int64)


def _joined(parts: Sequence[Numbers]) -> Numbers:
    """Runs of tokens, one behind the other."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=2)
