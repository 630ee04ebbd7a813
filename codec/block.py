"""A block of the cache as an encoded block and back: which sections it has, in which codec."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from manthan.codec.base import Codes, Dtype, Numbers, Positions, Section, SectionKind, align16
from manthan.codec.cpu.exact import EXACT
from manthan.codec.cpu.fp8 import Fp8Sections
from manthan.codec.errors import CodecError, DtypeError, ShapeError, SizeError, UnknownBlockCodecError
from manthan.codec.model import NO_FACTS, ModelFacts
from manthan.codec.registry import section_codec
from manthan.codec.wire import BlockHeader, Buffer, block_nbytes, head, parse, seal


@dataclass(frozen=True)
class BlockShape:
    """Of one rank's block of one KV cache group. Where the dtype is UINT8, it is so many bytes that nobody looks into,
    however they lie: then the block has them as keys, and no values."""

    layers: int
    heads: int
    tokens: int
    head_dim: int
    dtype: Dtype = Dtype.BFLOAT16

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """The shape of its keys."""
        return (self.layers, self.heads, self.tokens, self.head_dim)

    @property
    def values(self) -> tuple[int, int, int, int]:
        """The shape of its values: that of the keys, or of nothing."""
        return (self.layers, self.heads, self.tokens, 0 if self.is_raw else self.head_dim)

    @property
    def is_raw(self) -> bool:
        """Whether its bytes stand for no numbers."""
        return self.dtype is Dtype.UINT8


@lru_cache(1024)
def sections(codec: str, shape: BlockShape, exact: int) -> tuple[Section, ...]:
    """The sections of a block whose first `exact` tokens, 0 to shape.tokens, are kept as they are, and the others in
    `codec`. Every number of the block is in one of them, and in one only. A block of bytes is one section, and exact.
    Raises ShapeError."""
    if not 0 <= exact <= shape.tokens:
        raise ShapeError(f"{exact} exact tokens cannot be: the block has {shape.tokens}.")

    def section(kind: SectionKind, codec: str, first_token: int, tokens: int) -> Section:
        return Section(kind, codec, shape.layers, tokens, shape.heads, shape.head_dim, shape.dtype, 0, first_token)

    if shape.is_raw:
        return (section(SectionKind.RAW, EXACT, 0, shape.tokens),)
    made = []
    if exact > 0:
        made.append(section(SectionKind.BOTH, EXACT, 0, exact))
    if exact < shape.tokens:
        made += [section(kind, codec, exact, shape.tokens - exact) for kind in (SectionKind.KEYS, SectionKind.VALUES)]
    return tuple(made)


class BlockFormat:
    """What the encoded blocks of one rank and KV cache group have in common. Safe to use from several threads.

    codec: its name. fingerprint: 16 bytes; see `wire.BlockHeader`. facts: of the model, for codecs that want them.
    Blocks of fp8 are kept exact as a whole, their own bytes, where that is smaller, or where the codec does not take
    them. Raises UnknownCodecError, HeadDimError.
    """

    def __init__(
        self, codec: str, shape: BlockShape, fingerprint: bytes, group: int = 0, facts: ModelFacts = NO_FACTS
    ) -> None:
        self.codec, self.shape, self.fingerprint, self.group, self.facts = codec, shape, fingerprint, group, facts
        self._codecs = {name: section_codec(name, shape.head_dim, facts) for name in (codec, EXACT)}
        if shape.dtype.is_fp8 and codec != EXACT:
            self._codecs[codec] = Fp8Sections(self._codecs[codec])

    def warm_up(self) -> None:
        """Do now what the first block would otherwise wait for."""
        for codec in self._codecs.values():
            codec.warm_up()

    def header(self, key: bytes, first_token: int, exact: int) -> BlockHeader:
        """What a block says of itself. Raises ShapeError."""
        made = sections(self.codec, self.shape, exact)
        return BlockHeader(key, self.fingerprint, self.shape.tokens, made, self.group, first_token)

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
        made = sections(self.codec, self.shape, exact)
        return self._may_be_whole(exact) or any(self._codecs[section.codec].varies for section in made)

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
                raise UnknownBlockCodecError(f"a section is in codec {section.codec!r}: the block's is {self.codec}.")
        exact = found[0].tokens if found and found[0].kind is SectionKind.BOTH else 0
        tokens = self.shape.tokens
        if header.tokens != tokens or exact > tokens or found != sections(self.codec, self.shape, exact):
            raise SizeError(f"{header.tokens} tokens in {found} are not a block of {self.shape}.")
        return exact

    def encode(self, keys: Numbers, values: Numbers, *, key: bytes, first_token: int, exact: int) -> Codes:
        """The encoded block of keys and values [layers, heads, tokens, head_dim] in the cache's numbers.

        first_token: the place of the block's first token in its chain. exact: how many of the first tokens are kept as
        they are, at least. Raises NonFiniteError, ShapeError, DtypeError, HeaderError.
        """
        if (keys.shape, values.shape) != (self.shape.numbers, self.shape.values):
            raise ShapeError(f"keys {keys.shape} and values {values.shape} are not a block of {self.shape}.")
        if {keys.dtype, values.dtype} != {self.shape.dtype.numpy}:
            raise DtypeError(f"keys {keys.dtype} and values {values.dtype} are not a block of {self.shape}.")
        if self._may_be_whole(exact):
            try:
                coded = self._encode(keys, values, key, first_token, exact)
            except CodecError:  # a NaN, or whatever else the codec does not take
                coded = None
            if coded is not None and coded.nbytes <= self._whole_nbytes:
                return coded
            exact = self.shape.tokens
        return self._encode(keys, values, key, first_token, exact)

    def _encode(self, keys: Numbers, values: Numbers, key: bytes, first_token: int, exact: int) -> Codes:
        """As `encode`, with so many tokens exact and no more."""
        header = self.header(key, first_token, exact)
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
        """Keys and values [layers, heads, tokens, head_dim] of an encoded block, however many tokens it keeps exact.

        They may be views of `buf`. Raises the WireError that names the cause, or another CodecError for codes that
        cannot be decoded.
        """
        block = parse(buf, key=key, fingerprint=self.fingerprint, group=self.group)
        self.exact_of(block.header)
        keys, values = [], []
        for section, codes in zip(block.header.sections, block.payloads, strict=True):
            x = self._codecs[section.codec].decode(codes, section, _positions(block.header, section))
            if section.kind is SectionKind.RAW:
                return x, np.empty(self.shape.values, np.uint8)
            if section.kind is SectionKind.BOTH:
                keys.append(x[0])
                values.append(x[1])
            else:
                (keys if section.kind is SectionKind.KEYS else values).append(x)
        return _joined(keys), _joined(values)


def _part(keys: Numbers, values: Numbers, section: Section) -> Numbers:
    """The numbers of a section, of its shape."""
    tokens = slice(section.first_token, section.first_token + section.tokens)
    if section.kind is SectionKind.BOTH:
        return np.stack([keys[:, :, tokens], values[:, :, tokens]])
    return (values if section.kind is SectionKind.VALUES else keys)[:, :, tokens]


def _positions(header: BlockHeader, section: Section) -> Positions:
    first = header.first_token + section.first_token
    return np.arange(first, first + section.tokens, dtype=np.int64)


def _joined(parts: Sequence[Numbers]) -> Numbers:
    """Runs of tokens, one behind the other."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=2)
