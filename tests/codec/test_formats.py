"""Blocks of several formats side by side: each is read as what its header says it is, and as nothing else."""

import numpy as np
import pytest

from manthan.codec import ShapeError, UnknownCodecError, wire
from manthan.codec.block import BlockFormat, BlockShape
from manthan.codec.errors import ChecksumError, FingerprintMismatchError
from manthan.codec.formats import Formats

SHAPE = BlockShape(layers=2, heads=2, tokens=16, head_dim=64)
KEY = b"k" * 32
OLD, NEW = BlockFormat("k3v3", SHAPE, b"o" * 16), BlockFormat("lloyd4", SHAPE, b"n" * 16)


@pytest.fixture
def both(vectors):
    keys, values = vectors.to_bf16(np.random.default_rng(3).standard_normal((2, *SHAPE.numbers), np.float32))
    return keys, values


def encoded(formats, both, codec=""):
    return formats.encode(*both, key=KEY, first_token=32, exact=4, codec=codec)


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_new_blocks_are_in_the_format_in_use_and_old_ones_stay_readable(both):
    formats = Formats(OLD)
    before = encoded(formats, both)
    formats.use(NEW)
    after = encoded(formats, both)
    assert (wire.peek(before).fingerprint, wire.peek(after).fingerprint) == (OLD.fingerprint, NEW.fingerprint)
    for buf, form in ((before, OLD), (after, NEW)):
        assert same(formats.decode(buf, key=KEY), form.decode(buf, key=KEY))
    assert not same(formats.decode(before, key=KEY), formats.decode(after, key=KEY))


def test_a_format_that_is_only_read_is_written_where_its_codec_is_named(both):
    formats = Formats(OLD, NEW)
    assert formats.current is OLD
    assert wire.peek(encoded(formats, both)).fingerprint == OLD.fingerprint
    assert wire.peek(encoded(formats, both, "lloyd4")).fingerprint == NEW.fingerprint
    with pytest.raises(UnknownCodecError, match="no blocks are in codec 'k4v2' here: there are lloyd4, k3v3"):
        formats.named("k4v2")


def test_one_codec_with_two_profiles_is_two_formats(both):
    again = BlockFormat("k3v3", SHAPE, b"p" * 16)
    formats = Formats(OLD, again)
    assert formats.named("k3v3") is OLD
    formats.use(again)
    assert formats.named("k3v3") is again
    assert formats.of(OLD.encode(*both, key=KEY, first_token=0, exact=0)) is OLD
    formats.use(NEW)
    assert formats.named("k3v3") is again


def test_what_is_of_no_format_is_refused_for_its_cause(both):
    stranger = BlockFormat("k3v3", SHAPE, b"s" * 16).encode(*both, key=KEY, first_token=0, exact=0)
    formats = Formats(OLD, NEW)
    with pytest.raises(FingerprintMismatchError):
        formats.decode(stranger, key=KEY)
    damaged = encoded(formats, both)
    damaged[20] ^= 1  # of the fingerprint
    with pytest.raises(ChecksumError):
        formats.decode(damaged, key=KEY)


def test_blocks_of_another_shape_are_no_format_of_these():
    with pytest.raises(ShapeError, match="does not fit: the others are of"):
        Formats(OLD, BlockFormat("k3v3", BlockShape(2, 2, 32, 64), b"t" * 16))
