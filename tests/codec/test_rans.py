"""Integers to words and back: what comes back, words as the format has them, and words that are damaged."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manthan.codec.cpu.rans import Coded, Coder, Rows
from manthan.codec.errors import DamagedError
from manthan.codec.tables.frequencies import DEVIATIONS, ESCAPE, LARGEST, SCALE, costs, family

CODER = Coder(family())
WIDE = int(np.searchsorted(DEVIATIONS, 4))
"""A table in which the sample's numbers are no escapes."""


def plain_decode(coded, rows):
    """Decode as the format's description says, number by number; None for words that no encoder writes."""
    numbers, words, at, component = [], coded.words.tolist(), 0, 0
    if coded.sizes.sum() != len(words) or (coded.states < 2**16).any():
        return None
    for count, size, states in zip(rows.components.tolist(), coded.sizes.tolist(), coded.states.tolist(), strict=True):
        end = at + size
        for i in range(count * rows.tokens):
            f = family()[rows.tables[component + i // rows.tokens]].astype(int)
            c, stream = np.cumsum(f) - f, i % rows.streams
            x = states[stream]
            s = int(np.flatnonzero(c + f > x % SCALE)[0])
            x = int(f[s]) * (x // SCALE) + x % SCALE - int(c[s])
            needed = (x < 2**16) + (s == ESCAPE)
            if at + needed > end:
                return None
            if x < 2**16:
                x = x * 2**16 + words[at]
            states[stream] = x
            numbers.append(np.uint16(words[at + needed - 1]).astype(np.int16) if s == ESCAPE else s - LARGEST)
            at += needed
        component += count
        if at != end or set(states) - {2**16}:
            return None
    return np.array(numbers, np.int16)


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


@settings(deadline=None)
@given(rows_with_numbers())
def test_words_are_as_the_format_has_them(made):
    numbers, rows = made
    coded = CODER.encode(numbers, rows, 4 * numbers.size + 4)
    assert coded.sizes.sum() == coded.words.size
    assert np.array_equal(plain_decode(coded, rows), numbers)
    assert np.array_equal(CODER.decode(coded, rows), numbers)


@settings(deadline=None)
@given(rows_with_numbers(), st.integers(0, 2**32 - 1))
def test_damaged_words_are_refused_or_are_other_numbers(made, seed):
    """The plain decoder says which. No word behind the end is read."""
    numbers, rows = made
    rng = np.random.default_rng(seed)
    coded = CODER.encode(numbers, rows, 4 * numbers.size + 4)
    damaged = Coded(coded.states.copy(), coded.sizes.copy(), coded.words.copy())
    if coded.words.size and seed % 3 == 0:
        damaged.words[rng.integers(coded.words.size)] ^= 1 << rng.integers(16)
    elif seed % 3 == 1:
        damaged.states.ravel()[rng.integers(coded.states.size)] ^= 1 << rng.integers(32)
    else:
        damaged.sizes[rng.integers(coded.sizes.size)] += rng.integers(-3, 4)
    right = plain_decode(damaged, rows)
    if right is None:
        with pytest.raises(DamagedError, match="do not end where they should"):
            CODER.decode(damaged, rows)
    else:
        assert np.array_equal(CODER.decode(damaged, rows), right)


def test_words_too_few_or_too_many_and_no_room_for_them():
    rng = np.random.default_rng(0)
    rows = Rows(np.array([24, 8], np.int64), np.full(32, WIDE, np.uint8), 64, 4)
    numbers = np.rint(rng.standard_normal(32 * 64) * 4).astype(np.int16)
    coded = CODER.encode(numbers, rows, 4 * numbers.size)
    for change, words in ((-1, coded.words[:-1]), (1, np.append(coded.words, np.uint16(0)))):
        for sizes in (coded.sizes, coded.sizes + np.array([0, change])):
            with pytest.raises(DamagedError, match="do not end where they should"):
                CODER.decode(Coded(coded.states, sizes, words), rows)
    assert CODER.encode(numbers, rows, coded.words.size).words.size == coded.words.size
    assert CODER.encode(numbers, rows, coded.words.size - 1) is None


def test_it_takes_what_the_tables_say():
    """Within a percent of the entropy, for numbers that are as their table says."""
    rng = np.random.default_rng(0)
    tables = np.arange(0, len(family()), 9, dtype=np.uint8)
    tokens = 4096
    likely = family()[tables].astype(float)
    likely[:, -1] = 0
    likely /= likely.sum(1, keepdims=True)
    numbers = np.concatenate([rng.choice(256, tokens, p=p) - 127 for p in likely]).astype(np.int16)
    coded = CODER.encode(numbers, Rows(np.array([len(tables)]), tables, tokens, 4), numbers.size * 2)
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
