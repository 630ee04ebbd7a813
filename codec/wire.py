"""Compressed block, version 1: a KV block as stored (in RAM, on a disk, in Redis), with all that is needed to trust it.

    | header, 128 bytes | an entry of 64 bytes for each section | section | section | ... | refinement | ... |

A section holds some of the block's numbers in some codec, such as the keys of all layers, or all numbers of the first
four tokens, exact. Sections are padded with zeros to multiples of 16 bytes.

A refinement makes decoded numbers finer. The base is all that precedes refinements, and does not mention them. So a
block can be cut behind the base or behind any refinement, and stays a block.

Header, little-endian: magic "MNTH"; version u16; length of header and entries u16; xxh3-64 of the base without this
field, u64; fingerprint, 16 bytes; length of the base u64; position of the block's first token in the session u64; KV
cache group u16; number of sections u16; tokens u32; length of the block hash u8; mark u8; 6 zero bytes; block hash, 64
bytes.

Entry: kind u8; dtype u8; first layer, layers, heads, head size, first head, u16 each; index of the first token in the
block, tokens, u32 each; 4 zero bytes; length of the section in bytes u64; codec name, 24 bytes; 8 zero bytes. Shorter
names and hashes are filled up with zeros.

Refinement: number u8, from 1 on; 3 zero bytes; length of the body u32, a multiple of 16 and at least 160; xxh3-64 of
the block hash (64 bytes), the fingerprint, the refinement's first 8 bytes and the body, u64; the body, filled up with
zeros. A reader takes refinements up to the first damaged refinement.

A section decodes to numbers in the order of `Section.shape`.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from manthan.codec.base import ByteArray, Dtype, Section, SectionKind
from manthan.codec.errors import HeaderError, SizeError, WireError

MAGIC = b"MNTH"
VERSION = 1
HEADER = struct.Struct("<4sHHQ16sQQHHIBB6x64s")
ENTRY = struct.Struct("<BBHHHHHII4xQ24s8x")
REFINEMENT = struct.Struct("<B3xI8s")
LEAST_BODY = 160
CHECKSUM, FINGERPRINT, LENGTH = slice(8, 16), slice(16, 32), slice(32, 40)
KEY_AT, MARK_AT = 64, 57
KEY_MAX, FINGERPRINT_LEN, CODEC_NAME_MAX = 64, 16, 24
SECTIONS_MAX = 256
PLACE_MAX = 2**62  # last position in a session, beyond all real positions

Buffer = bytes | bytearray | memoryview | ByteArray


@dataclass(frozen=True)
class BlockHeader:
    """Header and entries of a compressed block."""

    key: bytes  # block hash, at most 64 bytes
    fingerprint: bytes  # 16 bytes, a digest of what decides how to decode the block, such as model and codec
    tokens: int
    sections: tuple[Section, ...]
    group: int = 0  # KV cache group
    first_token: int = 0  # position of the block's first token in the session
    mark: int = 0  # 0 for KV computed from exact KV alone, 1 if KV of earlier tokens had been decoded

    @property
    def nbytes(self) -> int:
        return HEADER.size + ENTRY.size * len(self.sections)


class EncodedBlock(NamedTuple):
    """Parsed block. The arrays are read-only views."""

    header: BlockHeader
    payloads: tuple[ByteArray, ...]  # each section's bytes
    refinements: tuple[ByteArray, ...] = ()  # bodies of those before the first damaged one
    ignored: int = 0  # number of bytes behind these


class Front(NamedTuple):
    """Fields of a header, in order."""

    magic: bytes
    version: int
    head_nbytes: int
    checksum: int
    fingerprint: bytes
    nbytes: int
    first_token: int
    group: int
    sections: int
    tokens: int
    key_len: int
    mark: int
    key: bytes


def align16(nbytes: int) -> int:
    """Round up to a multiple of 16."""
    return (nbytes + 15) & ~15


def block_nbytes(header: BlockHeader, sizes: Sequence[int]) -> int:
    """Return the bytes of a block without refinements, whose sections have `sizes` bytes."""
    return header.nbytes + sum(map(align16, sizes))


def starts(header: BlockHeader, sizes: Sequence[int]) -> list[int]:
    """Return the offset of each section in the block."""
    return list(accumulate(map(align16, sizes), initial=header.nbytes))[:-1]


def head(header: BlockHeader, sizes: Sequence[int]) -> ByteArray:
    """Return the encoded header and entries, uint8 [header.nbytes], with a checksum of zero. Raises HeaderError."""
    if len(header.key) > KEY_MAX:
        raise HeaderError(f"the block hash has {len(header.key)} bytes: at most {KEY_MAX} fit.")
    if len(header.fingerprint) != FINGERPRINT_LEN:
        raise HeaderError(f"the fingerprint has {len(header.fingerprint)} bytes: it must be {FINGERPRINT_LEN}.")
    if len(sizes) != len(header.sections) or len(sizes) > SECTIONS_MAX:
        raise HeaderError(
            f"{len(header.sections)} sections with {len(sizes)} sizes: each has one, and at most {SECTIONS_MAX} fit."
        )
    for section in header.sections:
        if not section.codec.isascii() or len(section.codec) > CODEC_NAME_MAX:
            raise HeaderError(f"codec name {section.codec!r} does not fit: at most {CODEC_NAME_MAX} ASCII letters do.")
    h, sections = header, header.sections
    shapes = [(s.first_layer, s.layers, s.heads, s.head_dim, s.first_head, s.first_token, s.tokens) for s in sections]
    place = (block_nbytes(h, sizes), h.first_token, h.group, len(sections), h.tokens)
    try:
        made = HEADER.pack(MAGIC, VERSION, h.nbytes, 0, h.fingerprint, *place, len(h.key), h.mark, h.key)
        for s, shape, size in zip(sections, shapes, sizes, strict=True):
            made += ENTRY.pack(s.kind, s.dtype, *shape, size, s.codec.encode())
    except struct.error as error:
        raise HeaderError(f"{header} does not fit the format: {error}.") from None
    return np.frombuffer(made, np.uint8)


def heads(
    header: BlockHeader,
    sizes: Sequence[int],
    keys: Sequence[bytes],
    first_tokens: Sequence[int] | npt.NDArray[np.int64],
) -> ByteArray:
    """Return `head` of blocks that differ only in block hash and position, uint8 [len(keys), header.nbytes].

    Raises HeaderError, also for block hashes of different lengths. keys: block hashes. first_tokens: positions.
    """
    if len(set(map(len, keys))) > 1:
        raise HeaderError("the block hashes are of different lengths: headers are made for one length at a time.")
    rows = np.tile(head(replace(header, key=keys[0] if keys else b""), sizes), (len(keys), 1))
    if keys:
        rows[:, KEY_AT : KEY_AT + len(keys[0])] = np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), -1)
        rows[:, 40:48] = np.asarray(first_tokens, "<u8").reshape(-1, 1).view(np.uint8)
    return rows


def seal(block: ByteArray) -> ByteArray:
    """Write the checksum into an otherwise complete block without refinements, uint8. Returns the block."""
    block[CHECKSUM] = np.frombuffer(checksum(block[: CHECKSUM.start], block[CHECKSUM.stop :]), np.uint8)
    return block


def refined(block: ByteArray, bodies: Sequence[ByteArray]) -> ByteArray:
    """Append refinements with these bodies to a sealed block without refinements. Return the new block."""
    made = [block]
    for number, coded in enumerate(bodies, 1):
        body = np.pad(coded, (0, body_nbytes(coded.size) - coded.size))
        front = REFINEMENT.pack(number, body.size, bytes(8))[:8]
        made += [np.frombuffer(front + _of_refinement(block, front, body), np.uint8), body]
    return np.concatenate(made)


def body_nbytes(nbytes: int) -> int:
    """Return the padded length of a refinement's body. xxh3 would hash less than LEAST_BODY by another algorithm."""
    return max(LEAST_BODY, align16(nbytes))


def part_ends(block: Buffer) -> list[int]:
    """Return the offsets of the ends of the base and of each refinement. Checks no checksum. Raises WireError."""
    data = np.frombuffer(block, np.uint8)
    ends = _ends(data, peek(data).nbytes)
    if ends[-1] != data.size:
        raise WireError(f"the block has {data.size} bytes: its parts end at {ends}.", "trailing")
    return ends


def parse(buf: Buffer, *, key: bytes | None = None, fingerprint: bytes | None = None, group: int = 0) -> EncodedBlock:
    """Read a compressed block without copying. Raises WireError with the cause, if the base is wrong.

    Bytes behind the base are read as refinements, up to the first damaged refinement. The rest is ignored.

    key, fingerprint: values to expect in the block; None for any. group: KV cache group to expect.
    """
    data = np.frombuffer(buf, np.uint8)
    data.flags.writeable = False
    front = peek(data)
    of_base = checksum(data[: CHECKSUM.start], data[CHECKSUM.stop : front.nbytes])
    if front.checksum != int.from_bytes(of_base, "little"):
        raise WireError(f"the block's checksum is not the {front.checksum:#018x} that its header says.", "checksum")
    fits = front.head_nbytes == HEADER.size + ENTRY.size * front.sections <= front.nbytes
    if not fits or front.sections > SECTIONS_MAX or front.key_len > KEY_MAX:
        raise SizeError(
            f"a header of {front.head_nbytes} bytes with {front.sections} sections and a block hash of {front.key_len} "
            "bytes cannot be."
        )
    if front.mark > 1:
        raise SizeError(f"a block cannot have mark {front.mark}: 0 and 1 are all there are.")
    if front.first_token > PLACE_MAX:
        raise SizeError(f"a block cannot begin at token {front.first_token} of its session.")
    found = front.key[: front.key_len]
    if data[KEY_AT + front.key_len : HEADER.size].any():
        raise WireError("the header has other bytes than zeros behind the block hash.", "key")
    if key is not None and found != key:
        raise WireError(f"the block's hash is {found.hex()}, not {key.hex()}.", "key")
    if front.group != group:
        raise WireError(f"the block is of KV cache group {front.group}, not {group}.", "key")
    if fingerprint is not None and front.fingerprint != fingerprint:
        wrong = f"the block's fingerprint is {front.fingerprint.hex()}, not {fingerprint.hex()}."
        raise WireError(wrong, "fingerprint")
    entries = [_entry(data, HEADER.size + ENTRY.size * n) for n in range(front.sections)]
    sections, sizes = tuple(section for section, _ in entries), [size for _, size in entries]
    header = BlockHeader(found, front.fingerprint, front.tokens, sections, group, front.first_token, front.mark)
    if block_nbytes(header, sizes) != front.nbytes:
        raise SizeError(f"sections of {sizes} bytes do not make a block of {front.nbytes}.")
    if not np.array_equal(head(header, sizes)[CHECKSUM.stop :], data[CHECKSUM.stop : header.nbytes]):
        raise SizeError("the block's header has bytes that no header has.")
    payloads = (data[at : at + size] for at, size in zip(starts(header, sizes), sizes, strict=True))
    bodies, ends = list[ByteArray](), _ends(data, front.nbytes)
    for at, end in pairwise(ends):
        *_, expected = REFINEMENT.unpack_from(data.data, at)
        body = data[at + REFINEMENT.size : end]
        if expected != _of_refinement(data, data[at : at + 8], body):
            break
        bodies.append(body)
    return EncodedBlock(header, tuple(payloads), tuple(bodies), data.size - ends[len(bodies)])


def split(buf: Buffer) -> list[ByteArray]:
    """Cut apart the shards of a block, which follow each other. A shard is a block with a rank's part of the KV.

    If bytes do not begin a shard, all from there on stay with the shard before.
    """
    data, shards = np.frombuffer(buf, np.uint8), list[ByteArray]()
    while data.size:
        end = _ends(data, int.from_bytes(data[LENGTH].tobytes(), "little"))[-1]
        end = end if end and data[end : end + len(MAGIC)].tobytes() == MAGIC else data.size
        shards.append(data[:end])
        data = data[end:]
    return shards or [data]


def peek(data: ByteArray) -> Front:
    """Return the header of a block, uint8. Check magic, version and least length, but not the checksum.

    Raises WireError.
    """
    magic, version = data[:4].tobytes(), int.from_bytes(data[4:6].tobytes(), "little")
    if data.size >= 4 and magic != MAGIC:
        raise WireError(f"the block begins with {magic!r}, not {MAGIC!r}.", "magic")
    if data.size >= 6 and version != VERSION:
        raise WireError(f"format {version} cannot be read: it must be {VERSION}.", "version")
    if data.size < HEADER.size:
        raise WireError(f"{data.size} bytes are fewer than a header's {HEADER.size}.", "truncated")
    front = Front(*HEADER.unpack_from(data.data))
    if data.size < front.nbytes:
        raise WireError(f"the block has {data.size} bytes: its header says {front.nbytes}.", "truncated")
    return front


def peek_sections(data: ByteArray, front: Front) -> tuple[Section, ...]:
    """Return the sections that the entries of a block describe. The checksum is not checked. Raises SizeError."""
    if HEADER.size + ENTRY.size * front.sections > data.size:
        raise SizeError(f"a block of {data.size} bytes cannot have {front.sections} sections.")
    return tuple(_entry(data, HEADER.size + ENTRY.size * n)[0] for n in range(front.sections))


def field_cause(offset: int) -> str:
    """Return the `WireError.cause` for a header with a wrong byte at `offset`."""
    return next((cause for cause, end in FIELD_ENDS if offset < end), "size")


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
"""Causes of refusal for a wrong byte of header or entries. Each covers the bytes up to before its offset."""


def _entry(data: ByteArray, at: int) -> tuple[Section, int]:
    """Return the section of the entry at offset `at`, and the section's length in bytes."""
    kind, dtype, first_layer, layers, n_heads, head_dim, first_head, *others = ENTRY.unpack_from(data.data, at)
    first_token, tokens, size, name = others
    try:
        codec = name.rstrip(b"\0").decode("ascii")
        shape = (layers, tokens, n_heads, head_dim)
        return Section(SectionKind(kind), codec, *shape, Dtype(dtype), first_layer, first_token, first_head), size
    except ValueError as error:
        raise SizeError(f"a section of kind {kind} and dtype {dtype} in codec {name!r} is unknown ({error}).") from None


def _ends(data: ByteArray, base: int) -> list[int]:
    """Return the ends of the base and of the refinements before the first with a wrong front. base: its end."""
    ends = [base]
    while data.size >= (body := ends[-1] + REFINEMENT.size):
        number, size, _ = REFINEMENT.unpack_from(data.data, ends[-1])
        is_front = number == len(ends) and not data[ends[-1] + 1 : ends[-1] + 4].any() and size == body_nbytes(size)
        if not is_front or body + size > data.size:
            break
        ends.append(body + size)
    return ends


def checksum(*parts: Any) -> bytes:
    """Return the xxh3-64, little-endian, of arrays or bytes that follow each other."""
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.digest()[::-1]


def _of_refinement(block: ByteArray, front: Buffer, body: ByteArray) -> bytes:
    """Return the checksum of a refinement of `block`. front: the refinement's first 8 bytes."""
    return checksum(block[KEY_AT : HEADER.size], block[FINGERPRINT], front, body)
