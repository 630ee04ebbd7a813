"""Integers to words and back: what comes back, words as the format has them, and words that are damaged."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manthan.codec.cpu.rans import Coder, Rows
from manthan.codec.errors import DamagedError
from manthan.codec.tables.frequencies import ESCAPE, LARGEST, SCALE, family

CODER = Coder(family())


def encode(numbers, rows):
    out = np.empty(rows.front + 8 * numbers.size, np.uint8)
    doublings, nbytes = CODER.write(numbers, lambda _: rows, out)
    assert doublings == 0
    return out[:nbytes]


def parts_of(encoded, rows):
    """Return views of the counts of words, the states and the words."""
    at = len(rows.tables) * rows.counts.itemsize
    states = encoded[at : rows.front].view("<u4").reshape(-1, rows.streams)
    return encoded[:at].view(rows.counts), states, encoded[rows.front :].view("<u2")


def plain_decode(encoded, rows):
    """Decode as the format's description says, number by number; None for words that no encoder writes."""
    sizes, begins, words = parts_of(encoded, rows)
    if sizes.sum() != len(words) or (begins < 2**16).any():
        return None
    numbers, words, at = [], words.tolist(), 0
    for tables, size, states in zip(rows.tables, sizes.tolist(), begins.tolist(), strict=True):
        end = at + size
        for i in range(len(tables) * rows.tokens):
            f = family()[tables[i // rows.tokens]].astype(int)
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
        if at != end or set(states) - {2**16}:
            return None
    return np.array(numbers, np.int16)


@st.composite
def rows_with_numbers(draw):
    """Rows of any lengths, numbers that fit their tables or do not."""
    shape = draw(st.integers(1, 4)), draw(st.integers(0, 9))
    tokens, streams = draw(st.integers(1, 40)), draw(st.sampled_from([1, 2, 4, 8, 32]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tables = rng.integers(0, len(family()), shape).astype(np.uint8)
    spread = draw(st.sampled_from([0.2, 3, 200, 40000]))
    numbers = np.clip(np.rint(rng.standard_normal(tables.size * tokens) * spread), -32768, 32767)
    return numbers.astype(np.int16), Rows(tables, tokens, streams)


@settings(deadline=None)
@given(rows_with_numbers())
def test_words_are_as_the_format_has_them(made):
    numbers, rows = made
    encoded = encode(numbers, rows)
    assert np.array_equal(plain_decode(encoded, rows), numbers)
    assert np.array_equal(CODER.read(encoded, rows), numbers)


@settings(deadline=None)
@given(rows_with_numbers(), st.integers(0, 2**32 - 1))
def test_damaged_words_are_refused_or_are_other_numbers(made, seed):
    """The plain decoder says which. No word behind the end is read."""
    numbers, rows = made
    rng = np.random.default_rng(seed)
    damaged = encode(numbers, rows)
    sizes, states, words = parts_of(damaged, rows)
    if words.size and seed % 3 == 0:
        words[rng.integers(words.size)] ^= 1 << rng.integers(16)
    elif seed % 3 == 1:
        states.reshape(-1)[rng.integers(states.size)] ^= 1 << rng.integers(32)
    else:
        at = rng.integers(sizes.size)
        sizes[at] = (int(sizes[at]) + rng.integers(-3, 4)) % 2**16
    right = plain_decode(damaged, rows)
    if right is None:
        with pytest.raises(DamagedError, match="do not end where they should"):
            CODER.read(damaged, rows)
    else:
        assert np.array_equal(CODER.read(damaged, rows), right)
