"""Damaged blocks: none is accepted with other numbers, raises anything but WireError, or allocates wildly."""

import itertools
import random
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv import packed

from manthan.codec import wire
from manthan.codec.base import Dtype, Section, SectionKind
from manthan.codec.block import BlockFormat, BlockShape
from manthan.codec.errors import WireError

MUTATIONS = pytest.mark.parametrize("count", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
FORGERIES = pytest.mark.parametrize("count", [3_000, pytest.param(20_000, marks=pytest.mark.slow)])
SHAPES = [
    ("k3v3", BlockShape(1, 1, 4, 32), 0),
    ("k3v3", BlockShape(1, 1, 4, 32), 1),
    ("k3v3", BlockShape(2, 2, 8, 64), 8),
    ("k3v3", BlockShape(1, 2, 3, 80), 0),
    ("k3v3", BlockShape(1, 1, 2, 128), 1),
]


def valid_blocks():
    """Formats, keys and blocks of several codecs, shapes and forms."""
    made = []
    for seed, (name, shape, exact) in enumerate(SHAPES):
        form, key = BlockFormat(name, shape, bytes([seed % 3]) * 16), bytes([seed]) * 32
        keys, values = np.random.default_rng(seed).integers(0x3F00, 0x4000, (2, *shape.numbers), np.uint16)
        made.append((form, key, bytes(form.encode(keys, values, key=key, first_token=seed, exact=exact))))
    return made


def sealed(data):
    """Give a block its right checksum."""
    return bytes(wire.seal(np.frombuffer(data, np.uint8).copy()))


def flip_bits(rng, data, _):
    for _ in range(rng.choice([1, 1, 1, 2, 3, 8])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data


def truncate(rng, data, _):
    return data[: rng.randrange(len(data))]


def extend(rng, data, _):
    return data + rng.randbytes(rng.choice([1, 1, 16, 128, 999]))


def splice(rng, data, other):
    cut = rng.randrange(len(data) + 1)
    return data[:cut] + other[rng.choice([cut, rng.randrange(len(other) + 1)]) :]


def overwrite_header(rng, data, other):
    at = rng.randrange(128 + 64)
    length = rng.choice([1, 2, 4, 8, 16])
    fill = rng.choice([b"\0" * 16, b"\xff" * 16, rng.randbytes(16), bytes(other[at : at + 16])])
    data[at : at + length] = fill[:length]
    return data


MUTATORS = [flip_bits, truncate, extend, splice, overwrite_header]


@pytest.fixture
def rng():
    """Chance for a test that may use little memory."""
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    valid_blocks()  # imports compilers
    tracemalloc.start()
    yield random.Random(seed)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2_000_000


@MUTATIONS
@pytest.mark.invariant(1, "codec/wire.py", 'if front.checksum != int.from_bytes(of_base, "little"):', "if False:")
def test_no_mutation_is_accepted(rng, count):
    valid, causes = [block for _, _, block in valid_blocks()], set()
    for _ in range(count):
        data = valid[0]
        while data in valid:
            data = bytes(rng.choice(MUTATORS)(rng, bytearray(rng.choice(valid)), rng.choice(valid)))
        try:
            found = wire.parse(data)
        except WireError as refusal:
            causes.add(refusal.cause)
        else:
            assert found.ignored
            assert data[: len(data) - found.ignored] in valid, "a damaged block was accepted"
    assert causes >= {"truncated", "magic", "version", "checksum"}


@FORGERIES
def test_no_mutation_of_a_refinement_is_accepted(rng, count):
    valid = []
    for _, _, base in valid_blocks():
        bodies = [np.frombuffer(rng.randbytes(size), np.uint8) for size in (60, 16, 33)]
        whole = wire.refined(np.frombuffer(base, np.uint8), bodies).tobytes()
        valid.append([whole[:end] for end in wire.part_ends(whole)])
    prefixes, kept = set(itertools.chain(*valid)), set()
    for _ in range(count):
        parts = rng.choice(valid)
        data = bytearray(parts[-1])
        data[len(parts[0]) :] = rng.choice(MUTATORS)(rng, data[len(parts[0]) :], rng.choice(valid)[-1])
        found = wire.parse(bytes(data))
        assert bytes(data[: len(data) - found.ignored]) in prefixes
        kept.add(len(found.refinements))
    assert kept == {0, 1, 2, 3}


def test_bytes_behind_a_block_of_one_level_are_refused():
    form, key, data = valid_blocks()[0]
    for behind in (b"\0", wire.refined(np.frombuffer(data, np.uint8), [np.ones(9, np.uint8)])[len(data) :].tobytes()):
        with pytest.raises(WireError) as refusal:
            form.decode(data + behind, key=key)
        assert refusal.value.cause == "trailing"


@FORGERIES
def test_forged_headers_are_read_as_a_whole_block_or_refused(rng, count):
    """With the checksum made right again, only a header that covers the block asked for gets through."""
    valid, causes = valid_blocks(), set()
    for _ in range(count):
        which = rng.randrange(len(valid))
        form, key, block = valid[which]
        data = sealed(overwrite_header(rng, bytearray(block), rng.choice(valid)[2]))
        try:
            keys, values = form.decode(data, key=key)
        except WireError as refusal:
            causes.add(refusal.cause)
        else:
            found = wire.parse(data).header
            assert found == form.header(key, found.first_token, SHAPES[which][2])
            assert keys.shape == values.shape == form.shape.numbers
    assert causes >= {"size", "codec", "version", "truncated", "key", "fingerprint"}


@pytest.mark.parametrize("which", range(len(SHAPES)))
def test_no_byte_of_a_header_can_be_another_even_if_sealed(which):
    """But for the position in the session: the block hash stands for that."""
    form, key, data = valid_blocks()[which]
    for at in [*range(8), *range(16, 40), *range(48, wire.parse(data).header.nbytes)]:
        changed = bytearray(data)
        changed[at] ^= 1 << at % 8
        with pytest.raises(WireError):
            form.decode(sealed(changed), key=key)


SECTIONS = st.builds(
    Section,
    st.sampled_from(SectionKind),
    st.text("abcdefghijklmnopqrstuvwxyz0123456789-", max_size=24),
    st.integers(0, 2**16 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**16 - 1),
    st.integers(0, 2**16 - 1),
    st.sampled_from(Dtype),
    st.integers(0, 2**16 - 1),
    st.integers(0, 2**32 - 1),
)


@settings(deadline=None)
@given(
    sections=st.lists(st.tuples(SECTIONS, st.binary(max_size=70)), max_size=9),
    key=st.binary(max_size=64),
    fingerprint=st.binary(min_size=16, max_size=16),
    tokens=st.integers(0, 2**32 - 1),
    group=st.integers(0, 2**16 - 1),
    first_token=st.integers(0, wire.PLACE_MAX),
)
def test_whatever_is_packed_is_parsed(sections, key, fingerprint, tokens, group, first_token):
    header = wire.BlockHeader(key, fingerprint, tokens, tuple(s for s, _ in sections), group, first_token)
    block = packed(header, [np.frombuffer(payload, np.uint8) for _, payload in sections])
    found = wire.parse(block.tobytes(), key=key, fingerprint=fingerprint, group=group)
    assert found.header == header
    assert [payload.tobytes() for payload in found.payloads] == [payload for _, payload in sections]
