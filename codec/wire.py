"""The encoded block: one KV block as cold stores keep it, and what is needed to trust it. Version 2.

    | header, 128 bytes | an entry of 64 bytes for each section | section | section | ... |

A section holds some of the block's numbers in some codec: the keys of all layers as 3-bit codes, the first four tokens
as they are, a recurrent state. Sections begin at multiples of 16 bytes; what lies between them is zero.

Header, little-endian: magic "MNTH"; version u16; length of header and entries u16; xxh3-64 of every other byte of the
block, u64; fingerprint, 16 bytes; length of the block u64; place of the block's first token in its chain u64; KV cache
group u16; number of sections u16; tokens u32; length of the block key u8; 7 zero bytes; block key, 64 bytes.

Entry: kind u8; dtype u8; first layer, layers, heads, head size, u16 each; 2 zero bytes; first token of the block, tokens,
u32 each; 4 zero bytes; length in bytes u64; codec name, 24 bytes; 8 zero bytes. Shorter strings are filled with zeros.

Vectors stand in the order [layers, heads, tokens].
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import xxhash

from manthan.codec.base import Codes, align16
from manthan.codec.errors import (
    ChecksumError,
    FingerprintMismatchError,
    HeaderError,
    KeyMismatchError,
    MagicError,
    OldFormatError,
    SizeError,
    TrailingBytesError,
    TruncatedError,
    VersionError,
)

MAGIC = b"MNTH"
VERSION = 2
HEADER = struct.Struct("<4sHHQ16sQQHHIB7x64s")
ENTRY = struct.Struct("<BBHHHH2xII4xQ24s8x")
CHECKSUM = slice(8, 16)
KEY_AT = 64
KEY_MAX, FINGERPRINT_LEN, CODEC_NAME_MAX = 64, 16, 24
SECTIONS_MAX = 256

Buffer = bytes | bytearray | memoryview | Codes


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


class Dtype(IntEnum):
    """What the cache's numbers are, which codes are decoded to."""

    BFLOAT16 = 1
    FLOAT16 = 2
    FLOAT32 = 3
    UINT8 = 4


@dataclass(frozen=True)
class Section:
    """What a section says of itself.

    codec: its name. first_layer, layers: of the KV cache group. first_token, tokens: of the block. heads (of this
    shard), head_dim: 0 where the numbers are not vectors.
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


@dataclass(frozen=True)
class BlockHeader:
    """What an encoded block says of itself.

    key: the block key, at most 64 bytes. group: the KV cache group. fingerprint: 16 bytes that stand for the model,
    how it was loaded, the codec with its profile, and the shard. tokens: of the block. first_token: the place in the
    chain of the first of them.
    """

    key: bytes
    fingerprint: bytes
    tokens: int
    sections: tuple[Section, ...]
    group: int = 0
    first_token: int = 0

    @property
    def nbytes(self) -> int:
        """Of the header and the entries."""
        return HEADER.size + ENTRY.size * len(self.sections)


class EncodedBlock(NamedTuple):
    """A parsed block. payloads: a read-only view of each section's bytes."""

    header: BlockHeader
    payloads: tuple[Codes, ...]


def block_nbytes(header: BlockHeader, sizes: Sequence[int]) -> int:
    """Size in bytes of a block whose sections have these sizes."""
    return header.nbytes + sum(map(align16, sizes))


def starts(header: BlockHeader, sizes: Sequence[int]) -> list[int]:
    """Where each section begins in the block."""
    at, found = header.nbytes, []
    for size in sizes:
        found.append(at)
        at += align16(size)
    return found


def head(header: BlockHeader, sizes: Sequence[int]) -> Codes:
    """Header and entries, uint8 [header.nbytes], the checksum left zero. Raises HeaderError."""
    _check(header, sizes)
    h, total = header, block_nbytes(header, sizes)
    made = bytearray(
        HEADER.pack(
            MAGIC,
            VERSION,
            header.nbytes,
            0,
            h.fingerprint,
            total,
            h.first_token,
            h.group,
            len(h.sections),
            h.tokens,
            len(h.key),
            h.key,
        )
    )
    for s, size in zip(h.sections, sizes, strict=True):
        shape = (s.first_layer, s.layers, s.heads, s.head_dim, s.first_token, s.tokens)
        made += ENTRY.pack(s.kind, s.dtype, *shape, size, s.codec.encode())
    return np.frombuffer(made, np.uint8)


def heads(header: BlockHeader, sizes: Sequence[int], keys: Sequence[bytes], first_tokens: Sequence[int]) -> Codes:
    """[len(keys), header.nbytes] uint8: `head` of blocks that differ only in their key and place.

    The keys are of one length. Raises HeaderError.
    """
    if len({len(key) for key in keys}) > 1:
        raise HeaderError("the block keys are of different lengths: headers are made for one at a time.")
    rows = np.tile(head(replace(header, key=keys[0] if keys else b""), sizes), (len(keys), 1))
    if keys:
        rows[:, KEY_AT : KEY_AT + len(keys[0])] = np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), -1)
        rows[:, 40:48] = np.asarray(first_tokens, "<u8").reshape(-1, 1).view(np.uint8)
    return rows


def seal(block: Codes) -> Codes:
    """Write the checksum into a block that is whole otherwise, uint8; returns it."""
    block[CHECKSUM] = np.frombuffer(_checksum(block), np.uint8)
    return block


def pack(header: BlockHeader, payloads: Sequence[Codes]) -> Codes:
    """The block of these sections, uint8. Raises HeaderError."""
    sizes = [payload.nbytes for payload in payloads]
    block = np.zeros(block_nbytes(header, sizes), np.uint8)
    block[: header.nbytes] = head(header, sizes)
    for at, payload in zip(starts(header, sizes), payloads, strict=True):
        block[at : at + payload.nbytes] = payload
    return seal(block)


def parse(buf: Buffer, *, key: bytes | None = None, fingerprint: bytes | None = None, group: int = 0) -> EncodedBlock:
    """Read an encoded block without copying it, or refuse it with the WireError that names the cause.

    key, fingerprint: what the block must carry, if given.
    """
    data = np.frombuffer(buf, np.uint8)
    data.flags.writeable = False
    _check_front(data)
    magic, _, head_nbytes, checksum, found, nbytes, first_token, of_group, count, tokens, key_len, found_key = (
        HEADER.unpack_from(data.data)
    )
    if data.size < nbytes:
        raise TruncatedError(f"the block has {data.size} bytes: its header says {nbytes}.")
    if data.size > nbytes:
        raise TrailingBytesError(f"the block has {data.size} bytes: its header says {nbytes}.")
    if checksum != int.from_bytes(_checksum(data), "little"):
        raise ChecksumError(f"the block's checksum is not the {checksum:#018x} that its header says.")
    if head_nbytes != HEADER.size + ENTRY.size * count or head_nbytes > nbytes or key_len > KEY_MAX:
        raise SizeError(f"a header of {head_nbytes} bytes with {count} sections and a key of {key_len} cannot be.")
    if data[KEY_AT + key_len : HEADER.size].any() or (key is not None and found_key[:key_len] != key):
        raise KeyMismatchError(f"the block is {found_key[:key_len].hex()}, not {key.hex() if key else 'of such a key'}.")
    if of_group != group:
        raise KeyMismatchError(f"the block is of KV cache group {of_group}, not {group}.")
    if fingerprint is not None and found != fingerprint:
        raise FingerprintMismatchError(f"the block's fingerprint is {found.hex()}, not {fingerprint.hex()}.")
    sections, sizes = [], []
    for entry in range(count):
        section, size = _section(data, HEADER.size + ENTRY.size * entry)
        sections.append(section)
        sizes.append(size)
    header = BlockHeader(found_key[:key_len], found, tokens, tuple(sections), of_group, first_token)
    if block_nbytes(header, sizes) != nbytes:
        raise SizeError(f"sections of {sizes} bytes do not make a block of {nbytes}.")
    payloads = (data[at : at + size] for at, size in zip(starts(header, sizes), sizes, strict=True))
    return EncodedBlock(header, tuple(payloads))


def field_cause(offset: int) -> str:
    """The `WireError.cause` that fits a header whose byte at `offset` is not as expected."""
    return next(cause for cause, end in FIELD_ENDS if offset < end)


FIELD_ENDS = (
    ("magic", 4),
    ("version", 8),
    ("checksum", 16),
    ("fingerprint", 32),
    ("size", 40),
    ("key", 50),
    ("size", 56),
    ("key", HEADER.size),
    ("size", HEADER.size + ENTRY.size * SECTIONS_MAX),
)
"""What the bytes of a header are about, as causes of refusal, each with the offset behind it."""


def _check_front(data: Codes) -> None:
    """Whether this is a block of a version that can be read."""
    if data.size < 8:
        raise TruncatedError(f"{data.size} bytes are fewer than a header's {HEADER.size}.")
    magic, version = data[:4].tobytes(), int.from_bytes(data[4:6].tobytes(), "little")
    if magic != MAGIC:
        raise MagicError(f"the block begins with {magic!r}, not {MAGIC!r}.")
    if version == 1:
        raise OldFormatError(f"the block has format 1, which an earlier Manthan wrote: it must be {VERSION}.")
    if version != VERSION:
        raise VersionError(f"format {version} cannot be read: it must be {VERSION}.")
    if data.size < HEADER.size:
        raise TruncatedError(f"{data.size} bytes are fewer than a header's {HEADER.size}.")


def _section(data: Codes, at: int) -> tuple[Section, int]:
    kind, dtype, first_layer, layers, n_heads, head_dim, first_token, tokens, size, name = ENTRY.unpack_from(
        data.data, at
    )
    try:
        codec = name.rstrip(b"\0").decode("ascii")
        section = Section(
            SectionKind(kind), codec, layers, tokens, n_heads, head_dim, Dtype(dtype), first_layer, first_token
        )
    except ValueError as error:
        raise SizeError(f"a section of kind {kind} and dtype {dtype} in codec {name!r} is unknown ({error}).") from None
    return section, size


def _check(header: BlockHeader, sizes: Sequence[int]) -> None:
    if len(header.key) > KEY_MAX:
        raise HeaderError(f"the block key has {len(header.key)} bytes: at most {KEY_MAX} fit.")
    if len(header.fingerprint) != FINGERPRINT_LEN:
        raise HeaderError(f"the fingerprint has {len(header.fingerprint)} bytes: it must be {FINGERPRINT_LEN}.")
    if len(sizes) != len(header.sections) or len(sizes) > SECTIONS_MAX:
        raise HeaderError(
            f"{len(header.sections)} sections with {len(sizes)} sizes: each has one, and at most {SECTIONS_MAX} fit."
        )
    for section in header.sections:
        if not section.codec.isascii() or len(section.codec) > CODEC_NAME_MAX:
            raise HeaderError(f"codec name {section.codec!r} does not fit: at most {CODEC_NAME_MAX} ASCII letters do.")


def _checksum(data: Codes) -> bytes:
    digest = xxhash.xxh3_64(data[: CHECKSUM.start].data)
    digest.update(data[CHECKSUM.stop :].data)
    return digest.digest()[::-1]
