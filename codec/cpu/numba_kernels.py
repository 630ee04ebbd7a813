"""Kernels compiled by numba: the entropy coder of `manthan.codec.cpu.rans` and the transform of `manthan.codec.wht`.

The transform works on LANES vectors at a time, transposed into a tile [head_dim, LANES] within the first-level cache,
so that every step is a SIMD loop over LANES. Tiles are flat, because the compiler then sees the constant row length.
There is no fastmath, because the compiler must neither reorder nor fuse the float operations of the format.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
import numpy.typing as npt
from numba import boolean, float32, int16, int64, types, uint8, uint16, uint32, void

from manthan.codec.rope import Floats
from manthan.codec.tables.frequencies import ESCAPE, LARGEST

LOWEST = np.uint32(1 << 16)
MASK = np.uint32(0xFFF)
LANES = 32
ZERO = np.float32(0)
Array = npt.NDArray[Any]
Sizes = npt.NDArray[np.int64]
F = TypeVar("F", bound=Callable[..., Any])


def jit(*signatures: Any) -> Callable[[F], F]:
    """Compile without the GIL and with IEEE division, cached on disk if possible."""

    def compile_(function: F) -> F:
        options = {"nogil": True, "error_model": "numpy"}
        try:
            compiled: F = numba.njit(*signatures, cache=True, **options)(function)
        except RuntimeError:  # this folder and the user's cache are read-only
            compiled = numba.njit(*signatures, **options)(function)
        return compiled

    return compile_


def _in(dtype: Any, dimensions: int) -> Any:
    """Type of an input array: read-only, because writable arrays fit too."""
    return types.Array(dtype, dimensions, "C", readonly=True)


ROWS = _in(int64, 1), _in(uint8, 1), int64, int64
ROTATION = _in(float32, 1), _in(int64, 1)
TURNS = _in(float32, 2), _in(float32, 2)
MATRICES = float32[:, :, ::1]


@jit(int64(_in(int16, 1), *ROWS, _in(uint32, 2), uint32[:, ::1], int64[::1], uint16[::1]))
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
    """Fill states, sizes and the end of words. Returns the index of the first word, or -1 if there is no room."""
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


@jit(boolean(_in(uint32, 2), _in(int64, 1), _in(uint16, 1), *ROWS, _in(uint32, 2), int16[::1]))
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
    """Fill numbers. Returns True if every row and state ended in an encoder's final state."""
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


@jit()
def _hadamard(tile: Floats, blocks: Sizes) -> None:
    start = 0
    for size in blocks:
        stride = 1
        while stride < size:
            run = stride * LANES
            for pair in range(size // (2 * stride)):
                o = start * LANES + 2 * pair * run
                low, high = tile[o : o + run], tile[o + run : o + 2 * run]
                for i in range(run):
                    a, b = low[i], high[i]
                    low[i] = a + b
                    high[i] = a - b
            stride *= 2
        start += size


@jit()
def _fold(rows: Floats) -> None:
    """Fold each run of 8 rows, then the runs. The sums end in row 0, and all further rows are overwritten."""
    groups = len(rows) // LANES // 8
    for g in range(groups):
        eight = rows[g * 8 * LANES : (g + 1) * 8 * LANES]
        for i in range(4 * LANES):
            eight[i] += eight[4 * LANES + i]
        for i in range(2 * LANES):
            eight[i] += eight[2 * LANES + i]
        for i in range(LANES):
            rows[g * LANES + i] = eight[i] + eight[LANES + i]
    while groups > 1:
        half = (groups + 1) // 2
        low, high = rows[: (groups - half) * LANES], rows[half * LANES : groups * LANES]
        for i in range(len(low)):
            low[i] += high[i]
        groups = half


@jit()
def _turn(x: Floats, cos: Floats, sin: Floats, out: Floats) -> None:
    """Turn a vector by RoPE's angles."""
    n = len(cos)
    for i in range(n):
        a, b, c, s = x[i], x[n + i], cos[i], sin[i]
        out[i] = a * c - b * s
        out[n + i] = b * c + a * s
    for i in range(2 * n, len(x)):
        out[i] = x[i]


@jit([MATRICES(_in(word, 3), boolean, *TURNS) for word in (uint16, uint32)])
def turned_back(words: Array, bf16: bool, cos: Floats, sin: Floats) -> Floats:
    """Turn keys [runs, tokens, head_dim], bits of bf16 (uint16) or float32 (uint32), by angles with cosines and
    sines.
    """
    runs, tokens, dim = words.shape
    out = np.empty((runs, tokens, dim), np.float32)
    shift = np.uint32(16 if bf16 else 0)
    bits = np.empty(dim, np.uint32)
    row = bits.view(np.float32)
    for run in range(runs):
        for t in range(tokens):
            source = words[run, t]
            for i in range(dim):
                bits[i] = np.uint32(source[i]) << shift
            _turn(row, cos[t], sin[t], out[run, t])
    return out


@jit([void(_in(float32, 3), *TURNS, boolean, float32, word[:, :, ::1]) for word in (uint16, uint32)])
def turned(x: Floats, cos: Floats, sin: Floats, bf16: bool, largest: Any, out: Array) -> None:
    """Turn keys [runs, tokens, head_dim] to bits of bf16 or float32, within +-largest, without negative zeros."""
    runs, tokens, dim = x.shape
    bits = np.empty(dim, np.uint32)
    row = bits.view(np.float32)
    for run in range(runs):
        for t in range(tokens):
            target = out[run, t]
            _turn(x[run, t], cos[t], sin[t], row)
            for i in range(dim):
                row[i] = min(max(row[i], -largest), largest) + ZERO  # no negative zeros
            if bf16:
                for i in range(dim):
                    target[i] = (
                        bits[i] + np.uint32(0x7FFF) + ((bits[i] >> np.uint32(16)) & np.uint32(1))
                    ) >> np.uint32(16)
            else:
                for i in range(dim):
                    target[i] = bits[i]


@jit(float32[:, ::1](_in(float32, 3), _in(float32, 3)))
def products(x: Floats, y: Floats) -> Floats:
    """fold(x * y) of [runs, head_dim, tokens], [runs, tokens]."""
    runs, dim, tokens = x.shape
    made = np.empty((runs, tokens), np.float32)
    tile = np.zeros(dim * LANES, np.float32)
    for run in range(runs):
        for first in range(0, tokens, LANES):
            count = min(LANES, tokens - first)
            for i in range(dim):
                a, b = x[run, i, first : first + count], y[run, i, first : first + count]
                row = tile[i * LANES : (i + 1) * LANES]
                for t in range(count):
                    row[t] = a[t] * b[t]
            _fold(tile)
            for t in range(count):
                made[run, first + t] = tile[t]
    return made


@jit(types.Tuple((MATRICES, float32[:, ::1]))(_in(float32, 3), *ROTATION))
def rotated(x: Floats, weights: Floats, blocks: Sizes) -> tuple[Floats, Floats]:
    """Return y [runs, head_dim, tokens] of x [runs, tokens, head_dim], and fold(y * y), [runs, tokens]."""
    runs, tokens, dim = x.shape
    y, energies = np.empty((runs, dim, tokens), np.float32), np.empty((runs, tokens), np.float32)
    tile, square = np.empty(dim * LANES, np.float32), np.empty(dim * LANES, np.float32)
    for first in range(0, runs * tokens, LANES):
        count = min(LANES, runs * tokens - first)
        if count < LANES:
            tile[:] = 0
        for v in range(count):
            source = x[(first + v) // tokens, (first + v) % tokens]
            for i in range(dim):
                tile[i * LANES + v] = source[i] * weights[i]
        _hadamard(tile, blocks)
        for i in range(dim * LANES):
            square[i] = tile[i] * tile[i]
        _fold(square)
        for v in range(count):
            run, token = (first + v) // tokens, (first + v) % tokens
            energies[run, token] = square[v]
            target = y[run]
            for i in range(dim):
                target[i, token] = tile[i * LANES + v]
    return y, energies


@jit(MATRICES(_in(int16, 3), _in(float32, 2), *ROTATION))
def unrotated(q: npt.NDArray[np.int16], steps: Floats, weights: Floats, blocks: Sizes) -> Floats:
    """hadamard(q) * w * step, [runs, tokens, head_dim], of q [runs, head_dim, tokens] and steps [runs, tokens]."""
    runs, dim, tokens = q.shape
    x = np.empty((runs, tokens, dim), np.float32)
    tile = np.empty(dim * LANES, np.float32)
    for first in range(0, runs * tokens, LANES):
        count = min(LANES, runs * tokens - first)
        if count < LANES:
            tile[:] = 0
        for v in range(count):
            run, token = (first + v) // tokens, (first + v) % tokens
            source = q[run]
            for i in range(dim):
                tile[i * LANES + v] = source[i, token]
        _hadamard(tile, blocks)
        for v in range(count):
            run, token = (first + v) // tokens, (first + v) % tokens
            step, target = steps[run, token], x[run, token]
            for i in range(dim):
                target[i] = tile[i * LANES + v] * weights[i] * step
    return x
