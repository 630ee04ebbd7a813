"""The encoded block: the codes of one KV block as cold stores keep them, and what is needed to trust them.

    | header, 160 bytes | key codes | value codes |

Header, little-endian: magic "MNTH"; version u16; header length u16; xxh3-64 of every other byte of the block,
u64; codec name, 24 bytes; fingerprint, 16 bytes; layers, heads, tokens, u32 each; head_dim u16; length of the
block key u8; dtype u8 (1 is bf16); lengths of the two payloads, u64 each; block key, 64 bytes; 8 zero bytes.
Shorter strings are filled up with zeros. Payloads are multiples of 16 bytes, so both start at one.

Vectors stand in the order [layers, heads, tokens], keys and values alike.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import xxhash

from manthan.codec.base import Codec, Codes
from manthan.codec.errors import (
    ChecksumError,
    CodecError,
    FingerprintMismatchError,
    HeaderError,
    KeyMismatchError,
    MagicError,
    SizeError,
    TrailingBytesError,
    TruncatedError,
    UnknownBlockCodecError,
    UnknownCodecError,
    VersionError,
    WireError,
)
from manthan.codec.registry import get_codec

__all__ = [
    "BlockHeader",
    "ChecksumError",
    "EncodedBlock",
    "FingerprintMismatchError",
    "HeaderError",
    "KeyMismatchError",
    "MagicError",
    "OpenBlock",
    "SizeError",
    "TrailingBytesError",
    "TruncatedError",
    "UnknownBlockCodecError",
    "VersionError",
    "WireError",
    "block_nbytes",
    "field_cause",
    "header_rows",
    "open_block",
    "pack",
    "parse",
]

MAGIC = b"MNTH"
VERSION = 1
BF16 = 1
HEADER = struct.Struct("<4sHHQ24s16sIIIHBBQQ64s8x")
CHECKSUM = slice(8, 16)
KEY_AT = 88
FIELD_ENDS = (
    ("magic", 4),
    ("version", 8),
    ("checksum", 16),
    ("codec", 40),
    ("fingerprint", 56),
    ("size", 70),
    ("key", 71),
    ("version", 72),
    ("size", KEY_AT),
    ("key", HEADER.size),
)
"""What the bytes of a header are about, as causes of refusal, each with the offset behind it."""
KEY_MAX, FINGERPRINT_LEN, CODEC_NAME_MAX = 64, 16, 24

Buffer = bytes | bytearray | memoryview | Codes


@dataclass(frozen=True)
class BlockHeader:
    """What an encoded block says of itself.

    codec: the codec's name. key: the block key, at most 64 bytes. fingerprint: 16 bytes that stand for model,
    dtype, codec and shard. layers, heads (KV heads of this shard), tokens, head_dim: the shape of keys and of
    values.
    """

    codec: str
    key: bytes
    fingerprint: bytes
    layers: int
    heads: int
    tokens: int
    head_dim: int

    @property
    def vectors(self) -> int:
        """How many key vectors the block holds, and how many value vectors."""
        return self.layers * self.heads * self.tokens


class EncodedBlock(NamedTuple):
    """A parsed block. key_codes, value_codes: read-only views into the buffer, for `Codec.decode`."""

    header: BlockHeader
    key_codes: Codes
    value_codes: Codes


class OpenBlock(NamedTuple):
    """A block being written: encode into key_codes and value_codes (`out=`), then seal.

    buffer: the whole block, uint8.
    """

    header: BlockHeader
    buffer: Codes
    key_codes: Codes
    value_codes: Codes

    def seal(self) -> Codes:
        """Write header and checksum; returns the finished block, the buffer itself."""
        _write_header(self.buffer, self.header)
        self.buffer[CHECKSUM] = np.frombuffer(_checksum(self.buffer), np.uint8)
        return self.buffer


def block_nbytes(header: BlockHeader) -> int:
    """Size in bytes of the whole encoded block, header included. Raises HeaderError."""
    return HEADER.size + sum(payload_sizes(header))


def open_block(header: BlockHeader, buffer: Codes | None = None) -> OpenBlock:
    """Lay out a block to encode into. buffer: uint8 [block_nbytes(header)] to use instead of a new one.

    Raises HeaderError.
    """
    keys, values = payload_sizes(header)
    nbytes = HEADER.size + keys + values
    if buffer is None:
        buffer = np.empty(nbytes, np.uint8)
    if buffer.dtype != np.uint8 or buffer.shape != (nbytes,):
        raise HeaderError(f"buffer is {buffer.dtype} of shape {buffer.shape}: the block takes uint8 of ({nbytes},).")
    payload = buffer[HEADER.size :]
    return OpenBlock(header, buffer, payload[:keys], payload[keys:])


def header_rows(header: BlockHeader, keys: Sequence[bytes]) -> Codes:
    """[len(keys), 160] uint8: the headers of blocks that differ only in their key, checksums left zero.

    The keys are of one length. Raises HeaderError.
    """
    if len({len(key) for key in keys}) > 1:
        raise HeaderError("the block keys are of different lengths: headers are made for one at a time.")
    template = np.zeros(HEADER.size, np.uint8)
    _write_header(template, replace(header, key=keys[0] if keys else b""))
    rows = np.tile(template, (len(keys), 1))
    if keys:
        rows[:, KEY_AT : KEY_AT + len(keys[0])] = np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), -1)
    return rows


def field_cause(offset: int) -> str:
    """The `WireError.cause` that fits a header whose byte at `offset` is not as expected."""
    return next(cause for cause, end in FIELD_ENDS if offset < end)


def pack(header: BlockHeader, key_codes: Codes, value_codes: Codes) -> Codes:
    """Build an encoded block from codes made elsewhere. Raises HeaderError."""
    block = open_block(header)
    for name, codes, place in (
        ("key", key_codes, block.key_codes),
        ("value", value_codes, block.value_codes),
    ):
        if codes.dtype != np.uint8 or codes.shape != place.shape:
            raise HeaderError(f"{name}_codes is {codes.dtype} {codes.shape}: the header says uint8 {place.shape}.")
        place[:] = codes
    return block.seal()


def parse(buf: Buffer, *, key: bytes | None = None, fingerprint: bytes | None = None) -> EncodedBlock:
    """Read an encoded block without copying it, or refuse it with the WireError that names the cause.

    key, fingerprint: what the block must carry, if given.
    """
    data = np.frombuffer(buf, np.uint8)
    data.flags.writeable = False
    if data.size < HEADER.size:
        raise TruncatedError(f"{data.size} bytes are fewer than a header's {HEADER.size}.")
    magic, version, header_len, checksum, name, found, *rest = HEADER.unpack_from(data.data)
    layers, heads, tokens, head_dim, key_len, dtype, keys, values, found_key = rest
    if magic != MAGIC:
        raise MagicError(f"the block begins with {magic!r}, not {MAGIC!r}.")
    if (version, header_len, dtype) != (VERSION, HEADER.size, BF16):
        raise VersionError(
            f"version {version} with a header of {header_len} bytes and dtype {dtype} cannot be read: "
            f"it must be {VERSION}, {HEADER.size} and {BF16}."
        )
    nbytes = HEADER.size + keys + values
    if data.size < nbytes:
        raise TruncatedError(f"the block has {data.size} bytes: its header says {nbytes}.")
    if data.size > nbytes:
        raise TrailingBytesError(f"the block has {data.size} bytes: its header says {nbytes}.")
    if checksum != int.from_bytes(_checksum(data), "little"):
        raise ChecksumError(f"the block's checksum is not the {checksum:#018x} that its header says.")
    if key_len > KEY_MAX:
        raise SizeError(f"the block key is said to have {key_len} bytes: at most {KEY_MAX} fit.")
    header = BlockHeader(_name(name), found_key[:key_len], found, layers, heads, tokens, head_dim)
    try:
        expected = payload_sizes(header)
    except HeaderError as error:
        raise SizeError(str(error)) from None
    if (keys, values) != expected:
        raise SizeError(f"payloads of {keys} and {values} bytes: the shapes ask for {expected[0]} and {expected[1]}.")
    if data[KEY_AT + key_len : HEADER.size].any():
        raise KeyMismatchError("the bytes behind the block key are not zero.")
    if key is not None and header.key != key:
        raise KeyMismatchError(f"the block is {header.key.hex()}, not {key.hex()}.")
    if fingerprint is not None and header.fingerprint != fingerprint:
        raise FingerprintMismatchError(f"the block's fingerprint is {found.hex()}, not {fingerprint.hex()}.")
    return EncodedBlock(header, data[HEADER.size : HEADER.size + keys], data[HEADER.size + keys :])


def _write_header(buffer: Codes, h: BlockHeader) -> None:
    """All of the header but its checksum, which becomes zero."""
    shape = (h.layers, h.heads, h.tokens, h.head_dim)
    fields = (h.codec.encode(), h.fingerprint, *shape, len(h.key), BF16, *payload_sizes(h), h.key)
    HEADER.pack_into(buffer.data, 0, MAGIC, VERSION, HEADER.size, 0, *fields)


def _checksum(data: Codes) -> bytes:
    """xxh3-64 of all but the checksum itself, as the 8 bytes to store."""
    digest = xxhash.xxh3_64(data[: CHECKSUM.start].data)
    digest.update(data[CHECKSUM.stop :].data)
    return digest.intdigest().to_bytes(8, "little")


def _name(field: bytes) -> str:
    return field.rstrip(b"\0").decode("ascii", "backslashreplace")


def payload_sizes(header: BlockHeader) -> tuple[int, int]:
    """Bytes of the key and of the value codes; raises what is wrong with the header."""
    shape = (header.layers, header.heads, header.tokens)
    if not all(0 <= size < 2**32 for size in shape):
        raise HeaderError(f"layers, heads and tokens {shape} do not fit: each must be from 0 to 2**32 - 1.")
    if len(header.key) > KEY_MAX:
        raise HeaderError(f"the block key has {len(header.key)} bytes: at most {KEY_MAX} fit.")
    if len(header.fingerprint) != FINGERPRINT_LEN:
        raise HeaderError(f"the fingerprint has {len(header.fingerprint)} bytes: it must be {FINGERPRINT_LEN}.")
    if not header.codec.isascii() or len(header.codec) > CODEC_NAME_MAX:
        raise HeaderError(f"codec name {header.codec!r} does not fit: at most {CODEC_NAME_MAX} ASCII letters do.")
    codec = _codec(header.codec, header.head_dim)
    return codec.encoded_nbytes(header.vectors, "key"), codec.encoded_nbytes(header.vectors, "value")


@lru_cache(maxsize=64)
def _codec(name: str, head_dim: int) -> Codec:
    """For its sizes."""
    try:
        return get_codec(name, head_dim)
    except UnknownCodecError as error:
        raise UnknownBlockCodecError(str(error)) from None
    except CodecError as error:
        raise HeaderError(str(error)) from None
