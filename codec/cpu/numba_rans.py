"""The entropy coder of `manthan.codec.cpu.rans` compiled by numba."""

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from manthan.codec.cpu.jit import jit
from manthan.codec.tables.frequencies import ESCAPE, LARGEST

LOWEST = np.uint32(1 << 16)
MASK = np.uint32(0xFFF)
Array = npt.NDArray[Any]


def _encode(
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
    at, number, component = len(words), len(numbers), len(tables)
    for row in range(len(components) - 1, -1, -1):
        end, state = at, states[row]
        state[:] = LOWEST
        place = components[row] * tokens
        for _ in range(components[row]):
            component -= 1
            table = encoding[tables[component]]
            for _ in range(tokens):
                number -= 1
                place -= 1
                value = np.int64(numbers[number])
                symbol = value + LARGEST if -LARGEST <= value <= LARGEST else ESCAPE
                if table[symbol] & np.uint32(0xFFFF) == 0:
                    symbol = ESCAPE
                f, c = table[symbol] & np.uint32(0xFFFF), table[symbol] >> np.uint32(16)
                stream = place & (streams - 1)
                x = state[stream]
                full = x >> np.uint32(20) >= f
                if at < np.int64(full) + np.int64(symbol == ESCAPE):
                    return -1
                if symbol == ESCAPE:
                    at -= 1
                    words[at] = np.uint16(value & 0xFFFF)
                if full:
                    at -= 1
                    words[at] = np.uint16(x & np.uint32(0xFFFF))
                    x >>= np.uint32(16)
                whole = x // f
                state[stream] = (whole << np.uint32(12)) + c + (x - whole * f)
        sizes[row] = end - at
    return at


def _decode(
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
    at, number, component = 0, 0, 0
    state = np.empty(streams, np.uint32)
    for row in range(len(components)):
        end, place = at + sizes[row], 0
        state[:] = states[row]
        for _ in range(components[row]):
            table = decoding[tables[component]]
            component += 1
            for _ in range(tokens):
                stream = place & (streams - 1)
                place += 1
                x = state[stream]
                entry = table[x & MASK]
                x = (entry >> np.uint32(12) & MASK) * (x >> np.uint32(12)) + (entry & MASK)
                if x < LOWEST:
                    if at >= end:
                        return False
                    x = x << np.uint32(16) | np.uint32(words[at])
                    at += 1
                state[stream] = x
                symbol = np.int64(entry >> np.uint32(24))
                if symbol == ESCAPE:
                    if at >= end:
                        return False
                    numbers[number] = np.int16(words[at])
                    at += 1
                else:
                    numbers[number] = np.int16(symbol - LARGEST)
                number += 1
        if at != end:
            return False
        for stream in range(streams):
            if state[stream] != LOWEST:
                return False
    return True


def _in(dtype: Any, dimensions: int) -> Any:
    """Declared read-only, which a writable array may stand for, but not the reverse."""
    return types.Array(dtype, dimensions, "C", readonly=True)


ROWS = (_in(types.int64, 1), _in(types.uint8, 1), types.int64, types.int64)

encode = jit(
    [
        types.int64(
            _in(types.int16, 1), *ROWS, _in(types.uint32, 2), types.uint32[:, ::1], types.int64[::1], types.uint16[::1]
        )
    ]
)(_encode)
decode = jit(
    [
        types.boolean(
            _in(types.uint32, 2),
            _in(types.int64, 1),
            _in(types.uint16, 1),
            *ROWS,
            _in(types.uint32, 2),
            types.int16[::1],
        )
    ]
)(_decode)
