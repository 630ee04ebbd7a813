"""The encoded block: what goes in comes out, and each refusal."""

from dataclasses import replace

import numpy as np
import pytest

from manthan.codec import CodecError, get_codec, wire

HEADER = wire.BlockHeader("lloyd3", b"\1" * 32, bytes(range(16)), layers=4, heads=2, tokens=32, head_dim=128)


def block(header=HEADER, seed=0):
    """A valid block of random vectors."""
    rng = np.random.default_rng(seed)
    codec = get_codec(header.codec, header.head_dim)
    keys, values = rng.standard_normal((2, header.vectors, header.head_dim), np.float32)
    return wire.pack(header, codec.encode(keys, "key"), codec.encode(values, "value"))


def resealed(data, offset, replacement):
    """The block with some bytes replaced and a checksum that fits."""
    import xxhash

    data = bytearray(data)
    data[offset : offset + len(replacement)] = replacement
    data[8:16] = xxhash.xxh3_64_intdigest(bytes(data[:8] + data[16:])).to_bytes(8, "little")
    return bytes(data)


@pytest.mark.parametrize("codec", ["k3v3", "k4v2", "lloyd3", "k4v3", "lloyd4", "lloyd3-unrotated"])
@pytest.mark.parametrize("key", [b"", b"\0", b"k" * 32, b"\xff" * 64])
def test_what_goes_in_comes_out(codec, key):
    header = replace(HEADER, codec=codec, key=key, head_dim=80, tokens=5)
    data = block(header)
    for buf in (data, data.tobytes(), bytearray(data), memoryview(data)):
        found = wire.parse(buf, key=key, fingerprint=header.fingerprint)
        assert found.header == header
        keys, values = (get_codec(codec, 80).encoded_nbytes(40, kind) for kind in ("key", "value"))
        assert np.array_equal(found.key_codes, data[160 : 160 + keys])
        assert np.array_equal(found.value_codes, data[160 + keys :])
        assert found.value_codes.size == values


def test_views_are_read_only_and_share_memory():
    data = block()
    found = wire.parse(data)
    assert np.shares_memory(found.key_codes, data)
    assert np.shares_memory(found.value_codes, data)
    assert not found.key_codes.flags.writeable
    assert not found.value_codes.flags.writeable
    assert data.flags.writeable
    assert get_codec("lloyd3", 128).decode(found.key_codes, 256).shape == (256, 128)


def test_encoding_straight_into_the_block():
    codec = get_codec("lloyd3", 128)
    keys, values = np.random.default_rng(0).standard_normal((2, 256, 128), np.float32)
    arena = np.full(2 * wire.block_nbytes(HEADER), 255, np.uint8)
    opened = wire.open_block(HEADER, arena[: wire.block_nbytes(HEADER)])
    codec.encode(keys, "key", out=opened.key_codes)
    codec.encode(values, "value", out=opened.value_codes)
    sealed = opened.seal()
    assert np.shares_memory(sealed, arena)
    assert np.array_equal(sealed, block())
    assert (arena[wire.block_nbytes(HEADER) :] == 255).all()


def test_a_block_is_five_times_smaller_headers_included():
    bf16 = 2 * HEADER.vectors * HEADER.head_dim * 2
    assert len(block()) == wire.block_nbytes(HEADER)
    assert bf16 / wire.block_nbytes(HEADER) >= 5.05


def test_payloads_are_aligned():
    for head_dim in (32, 40, 72, 128):
        opened = wire.open_block(replace(HEADER, head_dim=head_dim, tokens=3))
        start = opened.buffer.ctypes.data
        assert (opened.key_codes.ctypes.data - start) % 16 == 0
        assert (opened.value_codes.ctypes.data - start) % 16 == 0


def test_the_header_has_not_changed():
    """Stores outlive processes."""
    data = bytes(block(replace(HEADER, layers=1, heads=2, tokens=3)))
    assert data[:8] == b"MNTH\x01\x00\xa0\x00"
    assert data[16:40] == b"lloyd3".ljust(24, b"\0")
    assert data[40:56] == bytes(range(16))
    assert data[56:68] == b"\1\0\0\0\2\0\0\0\3\0\0\0"
    assert data[68:72] == b"\x80\0\x20\x01"
    assert data[72:88] == (16 + 6 * 48).to_bytes(8, "little") * 2
    assert data[88:160] == b"\1" * 32 + bytes(40)


DATA = bytes(block())

REFUSED = {
    "empty": (b"", wire.TruncatedError, "truncated", "0 bytes"),
    "header cut": (DATA[:159], wire.TruncatedError, "truncated", "159 bytes are fewer than a header's 160"),
    "payload cut": (DATA[:-1], wire.TruncatedError, "truncated", "25759 bytes: its header says 25760"),
    "trailing": (DATA + b"\0", wire.TrailingBytesError, "trailing", "25761 bytes: its header says 25760"),
    "magic": (b"X" + DATA[1:], wire.MagicError, "magic", "b'XNTH'"),
    "pickle": (b"\x80\x05" + DATA[2:], wire.MagicError, "magic", "not b'MNTH'"),
    "version": (resealed(DATA, 4, b"\2"), wire.VersionError, "version", "version 2 "),
    "header length": (resealed(DATA, 6, b"\xb0"), wire.VersionError, "version", "header of 176"),
    "dtype": (resealed(DATA, 71, b"\2"), wire.VersionError, "version", "dtype 2"),
    "payload": (DATA[:-1] + bytes([DATA[-1] ^ 1]), wire.ChecksumError, "checksum", "checksum is not"),
    "checksum": (DATA[:8] + b"\0" * 8 + DATA[16:], wire.ChecksumError, "checksum", "0x0000000000000000"),
    "codec": (resealed(DATA, 16, b"lloyd9"), wire.UnknownBlockCodecError, "codec", "'lloyd9' is unknown"),
    "codec bytes": (resealed(DATA, 16, b"\xff\0\n"), wire.UnknownBlockCodecError, "codec", r"xff"),
    "other codec": (resealed(DATA, 16, b"lloyd4"), wire.SizeError, "size", "ask for 16896 and 16896"),
    "layers": (resealed(DATA, 56, b"\5"), wire.SizeError, "size", "12800 and 12800"),
    "huge shape": (resealed(DATA, 56, b"\xff" * 12), wire.SizeError, "size", "the shapes ask for"),
    "huge payload": (resealed(DATA, 72, b"\xff" * 16), wire.TruncatedError, "truncated", "header says 36893"),
    "payloads traded": (
        resealed(DATA, 72, (12784).to_bytes(8, "little") + (12816).to_bytes(8, "little")),
        wire.SizeError,
        "size",
        "12784 and 12816",
    ),
    "head_dim": (resealed(DATA, 68, b"\x81"), wire.SizeError, "size", "head_dim 129"),
    "key length": (resealed(DATA, 70, b"\x41"), wire.SizeError, "size", "65 bytes"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_anything_else_is_refused(what):
    data, error, cause, text = REFUSED[what]
    with pytest.raises(error, match=text) as refusal:
        wire.parse(data)
    assert refusal.value.cause == cause
    assert isinstance(refusal.value, wire.WireError)


def test_another_blocks_key_or_fingerprint_is_refused():
    assert wire.parse(DATA, key=HEADER.key, fingerprint=HEADER.fingerprint).header == HEADER
    with pytest.raises(wire.KeyMismatchError, match=r"0101.*, not 0202") as refusal:
        wire.parse(DATA, key=b"\2" * 32)
    assert refusal.value.cause == "key"
    with pytest.raises(wire.KeyMismatchError):
        wire.parse(DATA, key=b"\1" * 31)
    with pytest.raises(wire.FingerprintMismatchError, match=r"0001.*, not 7070") as mismatch:
        wire.parse(DATA, fingerprint=b"p" * 16)
    assert mismatch.value.cause == "fingerprint"


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"key": b"k" * 65}, wire.HeaderError, "65 bytes: at most 64"),
        ({"fingerprint": b"f" * 15}, wire.HeaderError, "15 bytes: it must be 16"),
        ({"layers": -1}, wire.HeaderError, "-1"),
        ({"tokens": 2**32}, wire.HeaderError, "4294967296"),
        ({"head_dim": 100}, wire.HeaderError, "head_dim 100"),
        ({"codec": "x" * 25}, wire.HeaderError, "at most 24"),
        ({"codec": "löyd3"}, wire.HeaderError, "ASCII"),
        ({"codec": "lloyd5"}, wire.UnknownBlockCodecError, "'lloyd5' is unknown"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(change, error, text):
    with pytest.raises(error, match=text):
        wire.block_nbytes(replace(HEADER, **change))


def test_codes_that_do_not_fit_are_refused():
    codes = np.zeros(12800, np.uint8)
    with pytest.raises(wire.HeaderError, match=r"value_codes is uint8 \(12799,\)"):
        wire.pack(HEADER, codes, codes[:-1])
    with pytest.raises(wire.HeaderError, match="buffer is uint8 of"):
        wire.open_block(HEADER, codes)


def test_causes_are_distinct_labels():
    kinds = wire.WireError.__subclasses__()
    causes = {kind.cause for kind in kinds}
    assert len(causes) == len(kinds)
    assert all(cause.isidentifier() for cause in causes)
    assert issubclass(wire.WireError, CodecError)
