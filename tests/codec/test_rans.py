"""Integers to words and back: what comes back, words as the format has them, and words that are damaged."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manthan.codec.cpu.rans import Coded, Coder, Rows
from manthan.codec.errors import DamagedError
from manthan.codec.tables.frequencies import ESCAPE, LARGEST, SCALE, family

CODER = Coder(family())


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
