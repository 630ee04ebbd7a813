"""rANS in plain numpy: all streams of all rows take a step together. What a step is, `manthan.codec.cpu.rans` says."""

from typing import Any

import numpy as np
import numpy.typing as npt

SCALE_BITS = 12
LOWEST = 1 << 16
LARGEST = 127
ESCAPE = 255

Array = npt.NDArray[Any]


def encode(
    numbers: Array,
    components: Array,
    tables: Array,
    tokens: int,
    streams: int,
    encoding: Array,
    states: Array,
    sizes: Array,
    words: Array,
) -> int:
    """Fill states, sizes and the end of words; where in words the first is, or -1 where there is no room."""
    at, inside = _places(components, tokens, streams)
    values = numbers[at].astype(np.int64) if numbers.size else np.zeros(at.shape, np.int64)
    table = np.repeat(tables, tokens)[at].astype(np.int64) if numbers.size else values
    symbols = np.where(np.abs(values) <= LARGEST, values + LARGEST, ESCAPE)
    symbols = np.where(encoding[table, symbols] & 0xFFFF, symbols, ESCAPE)
    entries = encoding[table, symbols].astype(np.uint64)
    x = np.full(states.shape, LOWEST, np.uint64)
    written = np.zeros((*at.shape, 2), bool)  # a word of the state, and the number itself
    found = np.zeros((*at.shape, 2), np.uint16)
    written[..., 1] = inside & (symbols == ESCAPE)
    found[..., 1] = values.astype(np.uint16)
    for step in reversed(range(at.shape[1])):
        f, c = entries[:, step] & 0xFFFF, entries[:, step] >> 16
        full = inside[:, step] & (x >= f << 20)
        written[:, step, :, 0], found[:, step, :, 0] = full, x & 0xFFFF
        x = np.where(full, x >> 16, x)
        x = np.where(inside[:, step], (x // f << SCALE_BITS) + c + x % f, x)
    states[...] = x
    sizes[...] = written.reshape(len(components), -1).sum(1)
    taken = found[written]
    if taken.size > words.size:
        return -1
    words[words.size - taken.size :] = taken
    return words.size - taken.size


def decode(
    states: Array,
    sizes: Array,
    words: Array,
    components: Array,
    tables: Array,
    tokens: int,
    streams: int,
    decoding: Array,
    numbers: Array,
) -> bool:
    """Fill numbers; whether every row and state ended where it should."""
    at, inside = _places(components, tokens, streams)
    x, place = states.astype(np.uint64), np.cumsum(sizes) - sizes
    end, words = np.cumsum(sizes), np.append(words, np.uint16(0))
    for step in range(at.shape[1]):
        on = inside[:, step]
        entry = decoding[tables[at[:, step] // tokens], x & 0xFFF].astype(np.uint64)
        symbol = (entry >> 24).astype(np.int64)
        x = np.where(on, (entry >> 12 & 0xFFF) * (x >> SCALE_BITS) + (entry & 0xFFF), x)
        low, escaped = on & (x < LOWEST), on & (symbol == ESCAPE)
        taken = low.astype(np.int64) + escaped
        mine = place[:, None] + np.cumsum(taken, axis=1) - taken
        place = place + taken.sum(1)
        if (place > end).any():
            return False
        x = np.where(low, x << 16 | words[np.where(low, mine, -1)], x)
        raw = words[np.where(escaped, mine + low, -1)].view(np.int16)
        numbers[at[:, step][on]] = np.where(escaped, raw, symbol - LARGEST)[on]
    return bool((place == end).all() and (x == LOWEST).all())


def _places(components: Array, tokens: int, streams: int) -> tuple[Array, Array]:
    """[rows, steps, streams]: where in all numbers each stream's number of each step is, and whether there is one."""
    counts = components * tokens
    steps = -(-int(counts.max(initial=0)) // streams)
    within = np.arange(steps * streams).reshape(steps, streams)
    inside = within < counts[:, None, None]
    return np.where(inside, within + (np.cumsum(counts) - counts)[:, None, None], 0), inside
