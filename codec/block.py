"""Encode a KV cache block into a compressed block, and decode a compressed block.

A compressed block has sections, each with a codec. A section holds some of the block's numbers, such as the keys of all
layers. A KV block may also have opaque bytes, kept exact as the first section. In multi-head latent attention (MLA) a
token has a latent and a part with RoPE. The array of keys then has the part with RoPE, kept exact. The array of values
has the latent, cut into pieces instead of heads. docs/codec.md says why.
"""

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from manthan.codec.base import ByteArray, Codec, Dtype, Numbers, Positions, Section, SectionKind
from manthan.codec.cpu.exact import EXACT
from manthan.codec.cpu.numbers import Floats, Fp8Codec, as_floats
from manthan.codec.cpu.state import STATE_CODECS
from manthan.codec.errors import CodecError, HeadDimError, ShapeError, SizeError, WireError
from manthan.codec.model import NO_FACTS, ModelFacts
from manthan.codec.registry import get_codec, needs_profile
from manthan.codec.wire import BlockHeader, Buffer, align16, block_nbytes, head, parse, refined, seal


@dataclass(frozen=True)
class Scales:
    """Layout of the scales of fp8 latents among a block's exact bytes. Each piece of a token's latent has a scale.

    A lossy codec encodes the numbers times their scales, so that all have one unit. Decoded numbers are divided by
    the scales. A codec that stores a scale with each vector ignores them. A scale that is not positive counts as 1.

    Args:
        row: bytes of a token's latent and RoPE's part in the paged cache.
        piece: count of numbers in a piece, which have a common scale.
        nbytes: bytes of a scale: 4 for float32, 1 for float32's exponent alone.
        stride: bytes from a token's scales to the next token's. The first token's scales begin the array.
        place: index of the array with the scales in `BlockShape.arrays`: 0 for RoPE's part, 2 for `BlockShape.opaque`.
        rope_at: byte offset of the bf16 numbers in RoPE's part of a token.
    """

    row: int
    piece: int
    nbytes: int
    stride: int
    place: int
    rope_at: int

    def of(self, arrays: Sequence[Numbers], shape: "BlockShape") -> Floats:
        """Return the scales, float32 [layers, pieces, tokens, 1], from a block's arrays."""
        layers, pieces, tokens, _ = shape.value_numbers
        rows = arrays[self.place].reshape(-1)[: layers * tokens * self.stride].reshape(layers, tokens, self.stride)
        found = np.ascontiguousarray(rows[..., : pieces * self.nbytes])
        exponents = found.astype(np.uint32) << np.uint32(23) if self.nbytes == 1 else found
        scales: Floats = exponents.view(np.float32).swapaxes(1, 2)[..., None]
        return np.where(scales > 0, scales, np.float32(1))


@dataclass(frozen=True)
class BlockShape:
    """Shape of a block of a KV cache group on one rank.

    dtype: UINT8 stands for opaque bytes. They take the position of the keys, and there are no values.
    latent: count of numbers in a token's latent in a layer (MLA); 0 without latents. With a latent, `heads` is 1, and
    `head_dim` is RoPE's part, in elements of `dtype`.
    opaque: shape of further opaque bytes: of layers that no lossy codec can encode, or scales of latents; or None.
    scales: layout of the scales of fp8 latents, if each token has scales. RoPE's part is then bytes: bf16 numbers, and
    the scales if `Scales.place` is 0.
    """

    layers: int
    heads: int
    tokens: int
    head_dim: int
    dtype: Dtype = Dtype.BFLOAT16
    latent: int = 0
    opaque: "BlockShape | None" = None
    scales: Scales | None = None

    @cached_property
    def arrays(self) -> tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]:
        """Shape and dtype of a block's arrays: keys or RoPE's part, values or latents, and any bytes of `opaque`."""
        own = [(self.numbers, self.dtype.numpy), (self.value_numbers, self.dtype.numpy)]
        return tuple(own) if self.opaque is None else (*own, self.opaque.arrays[0])

    @cached_property
    def nbytes(self) -> int:
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.arrays)

    @cached_property
    def numbers(self) -> tuple[int, int, int, int]:
        return (self.layers, self.heads, self.tokens, self.head_dim)

    @cached_property
    def value_numbers(self) -> tuple[int, int, int, int]:
        """Shape of the values, or of latents: [layers, pieces, tokens, numbers of a piece].

        The last dimension is 0 if there are no values. Raises HeadDimError for an unsupported latent.
        """
        if not self.latent:
            return (self.layers, self.heads, self.tokens, 0 if self.is_raw else self.head_dim)
        return (self.layers, self.latent // self.coded_dim, self.tokens, self.coded_dim)

    def floats(self, arrays: Sequence[Numbers]) -> tuple[Floats, Floats]:
        """Return keys and values as float32; for MLA, RoPE's part, and the latents times any scales."""
        keys, values = arrays[:2]
        if self.scales is None:
            return as_floats(keys, self.dtype), as_floats(values, self.dtype)
        turned = np.ascontiguousarray(keys[..., self.scales.rope_at :]).view(np.uint16)
        return as_floats(turned), as_floats(values, self.dtype) * self.scales.of(arrays, self)

    @cached_property
    def coded_dim(self) -> int:
        """Count of numbers in a vector that a codec encodes: a head's or a piece's. Raises HeadDimError."""
        if self.scales is not None:
            return self.scales.piece
        return piece_dim(self.latent) if self.latent else self.head_dim

    @cached_property
    def is_raw(self) -> bool:
        """True for a block of opaque bytes."""
        return self.dtype is Dtype.UINT8


class DecodedShard(NamedTuple):
    """Decoded block of some of the model's heads."""

    first_head: int  # among the model's KV heads
    heads: int
    numbers: tuple[Numbers, ...]  # as in `BlockShape.arrays`
    ignored: int = 0  # count of bytes at the end that decoding did not use, see `wire`


PIECE = 128  # largest size of a latent's pieces


def piece_dim(latent: int) -> int:
    """Return the size of a latent's pieces: its largest divisor among the multiples of 8 from 32 to 128.

    Raises HeadDimError if there is no such divisor.
    """
    fitting = [size for size in range(PIECE, 31, -8) if latent % size == 0]
    if not fitting:
        raise HeadDimError(f"latents of {latent} numbers are not supported; multiples of 32 are.")
    return fitting[0]


@lru_cache(1024)
def sections(codec: str, shape: BlockShape, exact: int, first_head: int = 0) -> tuple[Section, ...]:
    """Return the sections of a block: the first `exact` tokens are kept exact, and `codec` encodes the other tokens.

    RoPE's part of MLA is exact for all tokens. The bytes of `shape.opaque` come first. A block of opaque bytes is a
    single section, kept exact unless `codec` is a codec of recurrent states. first_head: as in `Section`.

    Raises: ShapeError unless `exact` is between 0 and the block's count of tokens; HeadDimError.
    """
    if not 0 <= exact <= shape.tokens:
        raise ShapeError(f"exact is {exact}, but must be 0 to {shape.tokens}.")

    def section(kind: SectionKind, codec: str, first_token: int, end: int) -> Section:
        heads, dim = (shape.value_numbers[1], shape.coded_dim) if kind is SectionKind.LATENT else shape.numbers[1::2]
        of_block = (codec, shape.layers, end - first_token, heads, dim, shape.dtype, 0)
        return Section(kind, *of_block, first_token, first_head)

    if shape.opaque is not None:
        return (*sections(EXACT, shape.opaque, 0), *sections(codec, replace(shape, opaque=None), exact, first_head))
    if shape.is_raw:
        return (section(SectionKind.RAW, codec if codec in STATE_CODECS.values() else EXACT, 0, shape.tokens),)
    if shape.latent:
        made = [section(SectionKind.KEYS, EXACT, 0, shape.tokens)]
        kept, coded = SectionKind.LATENT, [SectionKind.LATENT]
    else:
        made, kept, coded = [], SectionKind.BOTH, [SectionKind.KEYS, SectionKind.VALUES]
        if needs_profile(codec):
            coded = [kept]
    if exact > 0:
        made.append(section(kept, EXACT, 0, exact))
    if exact < shape.tokens:
        made += [section(kind, codec, exact, shape.tokens) for kind in coded]
    return tuple(made)


class BlockFormat:
    """Format of the compressed blocks of one KV cache group on one rank. Safe to use from several threads.

    An fp8 block is kept exact as a whole if this is smaller, or if the codec refuses its numbers.

    Args:
        codec, shape: name of the codec, see `get_codec`, and shape of the blocks before encoding.
        fingerprint, group: see `wire.BlockHeader`.
        facts: the model's RoPE, profile (codec tables) and states' layout, if needed.
        first_head: index of the blocks' first head among the model's KV heads.

    Raises: UnknownCodecError, HeadDimError, ProfileError.
    """

    def __init__(
        self,
        codec: str,
        shape: BlockShape,
        fingerprint: bytes,
        group: int = 0,
        facts: ModelFacts = NO_FACTS,
        first_head: int = 0,
    ) -> None:
        self.codec, self.shape, self.fingerprint, self.group, self.facts = codec, shape, fingerprint, group, facts
        self.first_head = first_head
        self._codecs = {name: get_codec(name, shape.coded_dim, facts) for name in (codec, EXACT)}
        if shape.dtype.is_fp8 and codec != EXACT:
            self._codecs[codec] = Fp8Codec(self._codecs[codec])

    def without_bytes(self) -> "BlockFormat":
        """Return the format of the same blocks without the bytes of `shape.opaque`."""
        shape = replace(self.shape, opaque=None)
        return BlockFormat(self.codec, shape, self.fingerprint, self.group, self.facts, self.first_head)

    def warm_up(self, exacts: Sequence[int] = (0,)) -> None:
        """Encode and decode zeros for each number of exact tokens, so that no later block waits for a compiler."""
        numbers = [np.zeros(shape, dtype) for shape, dtype in self.shape.arrays]
        for exact in exacts:
            self.decode(self.encode(*numbers, key=b"", first_token=0, exact=exact), key=b"")

    def header(self, key: bytes, first_token: int, exact: int, mark: int = 0) -> BlockHeader:
        """Return the header of a block. Raises ShapeError; see `sections`."""
        made = sections(self.codec, self.shape, exact, self.first_head)
        return BlockHeader(key, self.fingerprint, self.shape.tokens, made, self.group, first_token, mark)

    def max_sizes(self, exact: int) -> tuple[int, ...]:
        """Return each section's largest size in bytes. A fixed-rate codec always writes this number."""
        made = sections(self.codec, self.shape, exact)
        return tuple(self._codecs[section.codec].max_nbytes(section) for section in made)

    def max_nbytes(self, exact: int) -> int:
        coded = block_nbytes(self.header(b"", 0, exact), self.max_sizes(exact))
        return max(coded, self._whole_nbytes) if self._may_be_whole(exact) else coded

    def expected_nbytes(self, exact: int) -> int:
        header = self.header(b"", 0, exact)
        sizes = [self._codecs[section.codec].expected_nbytes(section) for section in header.sections]
        coded = block_nbytes(header, sizes)
        return min(coded, self._whole_nbytes) if self._may_be_whole(exact) else coded

    def sizes_vary(self, exact: int) -> bool:
        """True if blocks with `exact` exact tokens may differ in size, not counting fp8 blocks kept exact whole."""
        return any(self._codecs[section.codec].varies for section in sections(self.codec, self.shape, exact))

    def _may_be_whole(self, exact: int) -> bool:
        """True if a block of which `exact` tokens must be exact may be kept exact as a whole."""
        return self.shape.dtype.is_fp8 and exact < self.shape.tokens

    @property
    def _whole_nbytes(self) -> int:
        """Bytes of a compressed block that is kept exact as a whole."""
        whole = self.shape.tokens
        return block_nbytes(self.header(b"", 0, whole), self.max_sizes(whole))

    def exact_of(self, header: BlockHeader) -> int:
        """Return the number of exact first tokens of a block, whichever heads it has.

        Raises: WireError if the block has a different format.
        """
        found, shape = header.sections, self.shape
        for section in found:
            if section.codec not in self._codecs:
                raise WireError(f"a section is in codec {section.codec!r}: this format's is {self.codec}.", "codec")
        exact, (first_head, heads) = exact_of(found), self._heads_of(header)
        shape = shape if heads == shape.heads else replace(shape, heads=heads)
        is_ours = exact <= shape.tokens and found == sections(self.codec, shape, exact, first_head)
        if header.tokens != shape.tokens or not is_ours:
            raise SizeError(f"{header.tokens} tokens in {found} are not a block of {shape}.")
        return exact

    def _heads_of(self, header: BlockHeader) -> tuple[int, int]:
        """Return a block's first head and number of heads: this format's for blocks with latents or opaque bytes."""
        if header.sections and not (self.shape.latent or self.shape.is_raw or self.shape.opaque):
            return header.sections[0].first_head, header.sections[0].heads
        return self.first_head, self.shape.heads

    def encode(self, *numbers: Numbers, key: bytes, first_token: int, exact: int, mark: int = 0) -> ByteArray:
        """Return the compressed block.

        Args:
            numbers: the block's arrays, as in `BlockShape.arrays`.
            key: block hash.
            first_token: position of the block's first token in the session.
            exact: least number of first tokens to keep exact.
            mark: see `wire.BlockHeader`.

        Raises: NonFiniteError, ShapeError, HeaderError.
        """
        if tuple((x.shape, x.dtype) for x in numbers) != self.shape.arrays:
            found = ", ".join(f"{x.dtype} {x.shape}" for x in numbers)
            raise ShapeError(f"arrays of {found} are not a block of {self.shape}.")
        if self._may_be_whole(exact):
            with suppress(CodecError):  # the codec refuses the numbers, such as a NaN
                coded = self._encode(numbers, key, first_token, exact, mark)
                if coded.nbytes <= self._whole_nbytes:
                    return coded
            exact = self.shape.tokens
        return self._encode(numbers, key, first_token, exact, mark)

    def _encode(self, numbers: Sequence[Numbers], key: bytes, first_token: int, exact: int, mark: int) -> ByteArray:
        """Encode with exactly `exact` exact tokens."""
        header = self.header(key, first_token, exact, mark)
        limits = self.max_sizes(exact)
        block = np.empty(block_nbytes(header, limits), np.uint8)
        sizes, refinements = list[int](), list[ByteArray]()
        at = header.nbytes
        for section, limit in zip(header.sections, limits, strict=True):
            tokens = slice(section.first_token, section.first_token + section.tokens)
            parts = [numbers[place][:, :, tokens] for place in _places(section, len(numbers))]
            part = parts[0] if len(parts) == 1 else np.stack(parts)
            codec, out = self._codec_of(section, numbers), block[at : at + limit]
            size, bodies = codec.encode_parts(part, section, _positions(header, section), out)
            refinements += bodies
            end = at + align16(size)
            block[at + size : end] = 0
            sizes.append(size)
            at = end
        block[: header.nbytes] = head(header, sizes)
        return refined(seal(block[:at]), refinements) if refinements else seal(block[:at])

    def decode(self, buf: Buffer, *, key: bytes) -> tuple[Numbers, ...]:
        """Return the arrays of a block with any number of exact tokens. The arrays may be read-only views of `buf`.

        Raises: WireError with the cause, or another CodecError for undecodable bytes.
        """
        return self.joined([self.decode_shard(buf, key=key)])

    def decode_shard(self, buf: Buffer, *, key: bytes) -> DecodedShard:
        """Decode a block, whichever heads it has. See `decode`."""
        block = parse(buf, key=key, fingerprint=self.fingerprint, group=self.group)
        behind = block.ignored + sum(body.size for body in block.refinements)
        if behind and not any(codec.levels > 1 for codec in self._codecs.values()):
            raise WireError(f"{behind} bytes follow a block of codec {self.codec}, which appends none.", "trailing")
        self.exact_of(block.header)
        arrays = self.shape.arrays
        found: list[list[Numbers]] = [[] for _ in arrays]
        for section, encoded in zip(block.header.sections, block.payloads, strict=True):
            kept = [parts[0] if parts else np.empty(0) for parts in found]
            codec, positions = self._codec_of(section, kept), _positions(block.header, section)
            x = codec.decode_parts(encoded, block.refinements, section, positions)
            places = _places(section, len(arrays))
            for place, part in zip(places, x if len(places) > 1 else [x], strict=True):
                found[place].append(part)
        numbers = tuple(
            (parts[0] if len(parts) == 1 else np.concatenate(parts, axis=2)) if parts else np.empty(*array)
            for parts, array in zip(found, arrays, strict=True)
        )
        return DecodedShard(*self._heads_of(block.header), numbers, block.ignored)

    def _codec_of(self, section: Section, arrays: Sequence[Numbers]) -> Codec:
        """Return the codec of a section. arrays: the block's arrays. The array with scales must be complete."""
        codec, scales = self._codecs[section.codec], self.shape.scales
        if scales is None or section.kind is not SectionKind.LATENT or not isinstance(codec, Fp8Codec):
            return codec
        first = section.first_token
        return codec.scaled(scales.of(arrays, self.shape)[:, :, first : first + section.tokens])

    def joined(self, shards: Iterable[DecodedShard]) -> tuple[Numbers, ...]:
        """Return the arrays of this format's heads.

        Raises SizeError unless each head is in exactly one shard, and each shard has some of these heads.
        """
        wanted, heads = sorted(shards, key=itemgetter(0)), self.shape.heads
        if [shard[:2] for shard in wanted] == [(self.first_head, heads)]:
            return wanted[0].numbers
        arrays = tuple(np.empty(*array) for array in self.shape.arrays)
        filled = 0
        for first, count, numbers, _ in wanted:
            here = slice(max(0, first - self.first_head), min(heads, first + count - self.first_head))
            if not filled == here.start < here.stop:
                filled = -1
                break
            there = slice(here.start + self.first_head - first, here.stop + self.first_head - first)
            for to, part in zip(arrays, numbers, strict=True):
                to[:, here] = part[:, there]
            filled = here.stop
        if filled != heads:
            found = [shard[:2] for shard in wanted]
            raise SizeError(
                f"shards of (first head, number of heads) {found} do not make up {heads} heads from {self.first_head}"
                " on."
            )
        return arrays


def _places(section: Section, arrays: int) -> tuple[int, ...]:
    """Return the indices of the arrays that hold a section's numbers. arrays: count of the block's arrays.

    Bytes of `BlockShape.opaque` are the third array. In a block of opaque bytes alone the bytes are the first array.
    """
    if section.kind is SectionKind.RAW:
        return (2,) if arrays > 2 else (0,)
    return {SectionKind.BOTH: (0, 1), SectionKind.KEYS: (0,)}.get(section.kind, (1,))


def exact_of(found: Sequence[Section]) -> int:
    """Return the number of exact first tokens of a block with these sections; 0 for opaque bytes."""
    runs = [section for section in found if section.kind in (SectionKind.BOTH, SectionKind.LATENT)]
    return runs[0].tokens if runs and runs[0].codec == EXACT else 0


def _positions(header: BlockHeader, section: Section) -> Positions:
    first = header.first_token + section.first_token
    return np.arange(first, first + section.tokens, dtype=np.int64)
