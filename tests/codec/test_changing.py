"""A codec that changes while it serves: each block is read as it was written, and none takes more than was reserved."""

import numpy as np
import profiles
import pytest

from manthan.codec import BlockFormat, BlockShape, NonFiniteError
from manthan.codec.base import Dtype
from manthan.codec.changing import ChangingFormat
from manthan.codec.cpu.numbers import as_numbers
from manthan.codec.errors import ChecksumError, FingerprintMismatchError, MagicError, TruncatedError
from manthan.codec.model import ModelFacts

TOKENS = 16
SHAPE = BlockShape(profiles.LAYERS, profiles.HEADS, TOKENS, profiles.HEAD_DIM)
FIRST, LATER = b"1" * 16, b"2" * 16


def formats(profile=None):
    facts = ModelFacts(profiles.ROPE, profile or profiles.built())
    first = BlockFormat("k4v2c", SHAPE, FIRST, facts=ModelFacts(profiles.ROPE))
    return first, BlockFormat("klt-6x", SHAPE, LATER, facts=facts)


def block(scale=1.0, seed=3):
    keys, values, _ = profiles.kv(TOKENS, seed=seed, first=64)
    return tuple(as_numbers(x * np.float32(scale), Dtype.BFLOAT16) for x in (keys, values))


@pytest.mark.parametrize("exact", [0, 4, TOKENS])
def test_blocks_of_before_and_after_are_read_as_they_were_written(exact):
    first, later = formats()
    both, kv = ChangingFormat(first), block()
    told = {"key": b"k", "first_token": 64, "exact": exact}
    before = both.encode(*kv, **told)
    assert np.array_equal(before, first.encode(*kv, **told))
    both.later = later
    after = both.encode(*kv, **told)
    assert np.array_equal(after, later.encode(*kv, **told))
    for made, form in ((before, first), (after, later)):
        for x, y in zip(both.decode(made, key=b"k"), form.decode(made, key=b"k"), strict=True):
            assert np.array_equal(x, y)


def test_a_block_never_takes_more_than_the_first_format_would():
    """Numbers that are far from the profile: the later format would need more than is reserved."""
    first, later = formats()
    both, kv = ChangingFormat(first), block(1e3)
    both.later = later
    told = {"key": b"k", "first_token": 64, "exact": 0}
    assert later.encode(*kv, **told).nbytes > first.max_nbytes(0)
    made = both.encode(*kv, **told)
    assert np.array_equal(made, first.encode(*kv, **told))
    both.decode(made, key=b"k")


def test_what_cannot_be_encoded_is_refused_as_before():
    first, later = formats()
    both, (keys, values) = ChangingFormat(first), block()
    both.later = later
    values[1, 1, 2, 3] = 0x7FC0
    with pytest.raises(NonFiniteError):
        both.encode(keys, values, key=b"k", first_token=0, exact=0)


def test_a_block_of_neither_is_a_miss():
    first, later = formats()
    both = ChangingFormat(first)
    both.later = later
    other = BlockFormat("klt-6x", SHAPE, b"3" * 16, facts=later.facts)
    made = other.encode(*block(), key=b"k", first_token=0, exact=0)
    with pytest.raises(FingerprintMismatchError):
        both.decode(made, key=b"k")
    mine = later.encode(*block(), key=b"k", first_token=0, exact=0)
    for at, error in ((0, MagicError), (20, ChecksumError), (700, ChecksumError)):
        damaged = mine.copy()
        damaged[at] ^= 1
        with pytest.raises((error, FingerprintMismatchError)):
            both.decode(damaged, key=b"k")
    with pytest.raises(TruncatedError):
        both.decode(mine[:50], key=b"k")
