"""The encoded block: what goes in comes out, and each refusal."""

import struct
from dataclasses import replace

import numpy as np
import pytest
import xxhash
from kv import packed

from manthan.codec import errors, wire
from manthan.codec.base import Dtype, Section, SectionKind

KEYS = Section(SectionKind.KEYS, "k3v3", 4, 28, 2, 128, first_token=4)
SECTIONS = (
    replace(KEYS, kind=SectionKind.BOTH, codec="exact", tokens=4, first_token=0),
    KEYS,
    replace(KEYS, kind=SectionKind.VALUES),
)
HEADER = wire.BlockHeader(b"\1" * 32, bytes(range(16)), 32, SECTIONS, first_token=64)
SIZES = (40, 33, 16)


def payloads(sizes=SIZES, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, size, np.uint8) for size in sizes]


def block(header=HEADER, sizes=SIZES, seed=0):
    return packed(header, payloads(sizes, seed))


def resealed(data, offset, replacement):
    """The block with some bytes replaced and a checksum that fits."""
    data = bytearray(data)
    data[offset : offset + len(replacement)] = replacement
    return bytes(wire.seal(np.frombuffer(data, np.uint8)))


def test_views_are_read_only_and_share_memory():
    data = block()
    found = wire.parse(data)
    assert all(np.shares_memory(payload, data) and not payload.flags.writeable for payload in found.payloads)
    assert data.flags.writeable


def test_headers_of_many_blocks():
    keys, places = [bytes([n]) * 32 for n in range(5)], [0, 32, 64, 2**40, 1]
    rows = wire.heads(HEADER, SIZES, keys, places)
    for row, key, place in zip(rows, keys, places, strict=True):
        assert np.array_equal(row, wire.head(replace(HEADER, key=key, first_token=place), SIZES))
    assert wire.heads(HEADER, SIZES, [], []).shape == (0, HEADER.nbytes)
    with pytest.raises(errors.HeaderError, match="different lengths"):
        wire.heads(HEADER, SIZES, [b"a", b"bc"], [0, 1])


def test_the_format_has_not_changed():
    """Stores outlive processes."""
    header = replace(HEADER, sections=(replace(KEYS, first_layer=1, dtype=Dtype.FLOAT16),), group=7)
    data = bytes(block(header, (33,)))
    assert data[:8] == b"MNTH\1\0\xc0\0"
    assert data[8:16] == struct.pack("<Q", xxhash.xxh3_64_intdigest(data[:8] + data[16:]))
    assert data[16:32] == bytes(range(16))
    assert data[32:64] == struct.pack("<QQHHIB7x", 128 + 64 + 48, 64, 7, 1, 32, 32)
    assert data[64:128] == b"\1" * 32 + bytes(32)
    entry = struct.pack("<BBHHHH2xII4xQ24s8x", 1, 2, 1, 4, 2, 128, 4, 28, 33, b"k3v3")
    assert data[128:192] == entry
    assert data[225:] == bytes(15)


DATA = bytes(block())

REFUSED = {
    "empty": (b"", "truncated", "0 bytes are fewer than a header's 128"),
    "magic alone": (DATA[:4], "truncated", "4 bytes"),
    "header cut": (DATA[:127], "truncated", "127 bytes are fewer than a header's 128"),
    "payload cut": (DATA[:-1], "truncated", "431 bytes: its header says 432"),
    "magic": (b"X" + DATA[1:], "magic", "b'XNTH'"),
    "pickle": (b"\x80\x05" + DATA[2:], "magic", "not b'MNTH'"),
    "format 3": (resealed(DATA, 4, b"\3"), "version", "format 3 cannot be read"),
    "payload": (DATA[:-20] + bytes([DATA[-20] ^ 1]) + DATA[-19:], "checksum", "checksum is not"),
    "checksum": (DATA[:8] + b"\0" * 8 + DATA[16:], "checksum", "0x0000000000000000"),
    "header length": (resealed(DATA, 6, b"\xb0"), "size", "a header of 432 bytes with 3 sections"),
    "a section more": (resealed(DATA, 50, b"\4"), "size", "320 bytes with 4 sections"),
    "sections without end": (
        resealed(DATA, 6, b"\x80\xff" + DATA[8:50] + struct.pack("<H", 1022)),
        "size",
        "1022 sections",
    ),
    "block hash's length": (resealed(DATA, 56, b"\x41"), "size", "a block hash of 65 bytes"),
    "behind the block hash": (resealed(DATA, 127, b"\1"), "key", "other bytes than zeros"),
    "mark": (resealed(DATA, 57, b"\2"), "size", "cannot have mark 2"),
    "padding of the header": (resealed(DATA, 58, b"\1"), "size", "bytes that no header has"),
    "padding of a section": (resealed(DATA, 128 + 63, b"\1"), "size", "bytes that no header has"),
    "place": (resealed(DATA, 40, b"\xff" * 8), "size", "cannot begin at token 18446744073709551615"),
    "kind": (resealed(DATA, 128, b"\x09"), "size", "kind 9"),
    "dtype": (resealed(DATA, 129, b"\0"), "size", "dtype 0"),
    "codec": (resealed(DATA, 160, b"l\xf6yd3"), "size", "is unknown"),
    "payload length": (resealed(DATA, 152, b"\x28\1"), "size", "do not make a block of 432"),
    "endless payload": (resealed(DATA, 152, b"\xff" * 8), "size", "do not make a block of 432"),
}


BODIES = [np.random.default_rng(9).integers(0, 256, size, np.uint8) for size in (40, 16, 1, 0)]
REFINED = wire.refined(block(), BODIES)
LONG = [body.tobytes().ljust(160, b"\0") for body in BODIES]


def bodies_of(data):
    return [body.tobytes() for body in wire.parse(data).refinements]


def test_the_format_of_refinements_has_not_changed():
    """Stores outlive processes."""
    body = LONG[0]
    front = struct.pack("<B3xI", 1, 160)
    digest = xxhash.xxh3_64_intdigest(b"\1" * 32 + bytes(32) + bytes(range(16)) + front + body)
    assert REFINED[432 : 432 + 176].tobytes() == front + struct.pack("<Q", digest) + body
    assert REFINED[:432].tobytes() == DATA
    assert wire.part_ends(REFINED) == [432, 608, 784, 960, 1136]
    assert wire.part_ends(DATA) == [432]


def test_each_prefix_of_whole_parts_is_a_block_and_no_other_length_has_more():
    ends = wire.part_ends(REFINED)
    for size in range(len(REFINED) + 1):
        data, whole = REFINED[:size], sum(end <= size for end in ends)
        if not whole:
            with pytest.raises(errors.WireError):
                wire.parse(data)
            with pytest.raises(errors.WireError):
                wire.part_ends(data)
            continue
        found = wire.parse(data)
        assert [body.tobytes() for body in found.refinements] == LONG[: whole - 1]
        assert found.ignored == size - ends[whole - 1]
        if found.ignored:
            with pytest.raises(errors.WireError, match="its parts end at"):
                wire.part_ends(data)
        else:
            assert wire.part_ends(data) == ends[:whole]
    assert wire.parse(REFINED.tobytes() + b"more").ignored == 4


def test_a_flipped_bit_is_refused_or_drops_its_refinement_and_those_behind():
    ends = wire.part_ends(REFINED)
    for at in range(len(REFINED)):
        damaged = REFINED.copy()
        damaged[at] ^= 1 << at % 8
        if at < ends[0]:
            with pytest.raises(errors.WireError):
                wire.parse(damaged)
        else:
            good = sum(end <= at for end in ends) - 1
            found = wire.parse(damaged)
            assert [body.tobytes() for body in found.refinements] == LONG[:good]
            assert found.ignored == len(REFINED) - ends[good]


def test_a_refinement_is_of_one_block_and_one_place():
    for change in ({"key": b"\2" * 32}, {"fingerprint": bytes(16)}):
        other = block(replace(HEADER, **change))
        assert bodies_of(np.concatenate([other, REFINED[432:]])) == []
    second = REFINED[608:784].copy()
    assert bodies_of(np.concatenate([REFINED[:432], second])) == []
    second[0] = 1
    assert bodies_of(np.concatenate([REFINED[:432], second])) == []


def test_shards_with_refinements_are_cut():
    ends, other = wire.part_ends(REFINED), block(seed=1)
    for first, second in ((REFINED, other), (other, REFINED), (REFINED[: ends[2]], REFINED[: ends[1]])):
        shards = wire.split(np.concatenate([first, second]))
        assert [shard.tobytes() for shard in shards] == [first.tobytes(), second.tobytes()]
    assert [len(shard) for shard in wire.split(REFINED[:-1])] == [len(REFINED) - 1]


@pytest.mark.parametrize("what", REFUSED)
def test_anything_else_is_refused(what):
    data, cause, text = REFUSED[what]
    with pytest.raises(errors.WireError, match=text) as refusal:
        wire.parse(data)
    assert refusal.value.cause == cause


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"key": b"k" * 65}, "65 bytes: at most 64"),
        ({"fingerprint": b"f" * 15}, "15 bytes: it must be 16"),
        ({"tokens": 2**32}, "4294967296"),
        ({"first_token": -1}, "-1"),
        ({"group": 2**16}, "65536"),
        ({"sections": (replace(KEYS, layers=-1),) * 3}, "layers=-1"),
        ({"sections": (replace(KEYS, codec="x" * 25),) * 3}, "at most 24"),
        ({"sections": (replace(KEYS, codec="löyd3"),) * 3}, "ASCII"),
        ({"sections": ()}, "0 sections with 3 sizes"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(change, text):
    with pytest.raises(errors.HeaderError, match=text):
        wire.head(replace(HEADER, **change), SIZES)


def test_where_a_header_differs_is_a_cause():
    fields = {0: "magic", 4: "version", 8: "checksum", 16: "fingerprint", 32: "size", 40: "key", 48: "key", 50: "size"}
    fields |= {52: "size", 56: "key", 64: "key", 127: "key", 128: "size", HEADER.nbytes - 1: "size"}
    assert {offset: wire.field_cause(offset) for offset in fields} == fields
