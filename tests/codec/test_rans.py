"""Integers to words and back: what comes back, the same words from numba and numpy, and words that are damaged."""

import numpy as np
import plain_rans
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manthan.codec.cpu.rans import Coded, Coder, Rows
from manthan.codec.errors import DamagedError
from manthan.codec.tables.frequencies import DEVIATIONS, SCALE, costs, family


class PlainCoder(Coder):
    """The oracle: the same in numpy."""

    def _kernels(self):
        return plain_rans


CODERS = {"plain": PlainCoder(family()), "compiled": Coder(family())}
WIDE = int(np.searchsorted(DEVIATIONS, 4))
"""A table in which the sample's numbers are no escapes."""
each = pytest.mark.parametrize("name", CODERS)


@st.composite
def rows_with_numbers(draw):
    """Rows of any lengths, numbers that fit their tables or do not."""
    components = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    tokens, streams = draw(st.integers(1, 40)), draw(st.sampled_from([1, 2, 4, 8, 32]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tables = rng.integers(0, len(family()), sum(components)).astype(np.uint8)
    spread = draw(st.sampled_from([0.2, 3, 200, 40000]))
    numbers = np.clip(np.rint(rng.standard_normal(sum(components) * tokens) * spread), -32768, 32767)
    return numbers.astype(np.int16), Rows(np.array(components, np.int64), tables, tokens, streams)


def sample(seed=0, tokens=64, components=(24, 8)):
    rng = np.random.default_rng(seed)
    tables = np.full(sum(components), WIDE, np.uint8)
    numbers = np.rint(rng.standard_normal(sum(components) * tokens) * 4).astype(np.int16)
    return numbers, Rows(np.array(components, np.int64), tables, tokens, 4)


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@settings(deadline=None)
@given(rows_with_numbers())
def test_both_make_the_same_words_and_get_the_numbers_back(made):
    numbers, rows = made
    one, other = (coder.encode(numbers, rows, 4 * numbers.size + 4) for coder in CODERS.values())
    assert same(one, other)
    assert one.sizes.sum() == one.words.size
    assert all(np.array_equal(coder.decode(one, rows), numbers) for coder in CODERS.values())


@settings(deadline=None)
@given(rows_with_numbers(), st.integers(0, 2**32 - 1))
def test_damaged_words_are_refused_or_are_other_numbers(made, seed):
    """By both alike; and never is anything read that is not there."""
    numbers, rows = made
    rng = np.random.default_rng(seed)
    coded = CODERS["plain"].encode(numbers, rows, 4 * numbers.size + 4)
    words, states, sizes = coded.words.copy(), coded.states.copy(), coded.sizes.copy()
    if words.size and seed % 3 == 0:
        words[rng.integers(words.size)] ^= 1 << rng.integers(16)
    elif seed % 3 == 1:
        states.ravel()[rng.integers(states.size)] ^= 1 << rng.integers(32)
    else:
        sizes[rng.integers(sizes.size)] += rng.integers(-3, 4)
    found = []
    for coder in CODERS.values():
        try:
            found.append(coder.decode(Coded(states, sizes, words), rows))
        except DamagedError:
            found.append(None)
    assert (found[0] is None) == (found[1] is None)
    assert found[0] is None or np.array_equal(*found)


@each
@pytest.mark.parametrize("change", [-1, 1])
def test_words_too_few_or_too_many(name, change):
    numbers, rows = sample()
    coded = CODERS[name].encode(numbers, rows, 4 * numbers.size)
    words = coded.words[:-1] if change < 0 else np.append(coded.words, np.uint16(0))
    with pytest.raises(DamagedError, match="do not end where they should"):
        CODERS[name].decode(coded._replace(words=words), rows)
    sizes = coded.sizes + np.array([0, change])
    with pytest.raises(DamagedError, match="do not end where they should"):
        CODERS[name].decode(Coded(coded.states, sizes, words), rows)


@each
def test_what_finds_no_room(name):
    numbers, rows = sample()
    exact = CODERS[name].encode(numbers, rows, 4 * numbers.size).words.size
    assert CODERS[name].encode(numbers, rows, exact).words.size == exact
    assert CODERS[name].encode(numbers, rows, exact - 1) is None


def test_it_takes_what_the_tables_say():
    """Within a percent of the entropy, for numbers that are as their table says."""
    rng = np.random.default_rng(0)
    tables = np.arange(0, len(family()), 9, dtype=np.uint8)
    tokens = 4096
    likely = family()[tables].astype(float)
    likely[:, -1] = 0
    likely /= likely.sum(1, keepdims=True)
    numbers = np.concatenate([rng.choice(256, tokens, p=p) - 127 for p in likely]).astype(np.int16)
    coded = Coder(family()).encode(numbers, Rows(np.array([len(tables)]), tables, tokens, 4), numbers.size * 2)
    ideal = -(likely * np.log2(np.maximum(likely, 1e-300))).sum() * tokens
    assert 0.99 * ideal < 16 * coded.words.size < 1.01 * ideal


def test_the_family_of_tables():
    tables = family().astype(int)
    assert (tables.sum(1) == SCALE).all()
    assert (tables[:, -1] >= 1).all()
    assert (tables.max(1) < SCALE).all()
    assert len(tables) <= 256
    assert (np.abs(tables[:, :127][:, ::-1] - tables[:, 128:255]) <= 1).all()
    bits = costs(family())
    assert bits[0, 127] < 0.01
    assert bits[0, 0] == bits[0, 255] > 16
