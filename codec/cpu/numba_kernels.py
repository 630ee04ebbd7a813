"""Kernels compiled by numba: the entropy coders of `manthan.codec.cpu.rans` and `manthan.codec.cpu.klt`, the transform
of `manthan.codec.wht` and `k3v3`, RoPE's rotation of keys, and a matrix product.

The transform works on LANES vectors at a time, transposed into a tile [head_dim, LANES] within the first-level cache,
so that every step is a SIMD loop over LANES. Tiles are flat, because the compiler then sees the constant row length.
Encoded bytes must be equal on all machines, so the compiler must neither reorder nor fuse float operations. Therefore
nothing is compiled with fastmath but `product`, which replaces a BLAS.

A run is a head of a layer, keys or values apart. The levels of `manthan.codec.cpu.klt` are numbered from 0, the base
and the coarsest, to 3, the finest lossy one; each further level refines the numbers of the level before.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
import numpy.typing as npt
from numba import boolean, float32, float64, int16, int32, int64, types, uint8, uint16, uint32, void

from manthan.codec.gpu.kernel_cache import cache_folder
from manthan.codec.rope import Floats
from manthan.codec.tables import levels
from manthan.codec.tables.frequencies import ESCAPE, LARGEST

LOWEST = np.uint32(1 << 16)
MASK = np.uint32(0xFFF)
LANES = 32
U = np.uint64
SPLITS, WIDTHS, FALLING, FURTHEST = levels.SPLITS, len(levels.WIDTHS), levels.FALLING, 32767
ZERO = np.float32(0)
ROWS_AT_ONCE, COLUMNS = 8, 768
HALVES = np.float32(2.0**112)
"""Ratio of a float16 to the float32 that has its sign, exponent and mantissa: 2 to the difference of the biases."""
Array = npt.NDArray[Any]
Sizes = npt.NDArray[np.int64]
F = TypeVar("F", bound=Callable[..., Any])


def jit(*signatures: Any, **more: Any) -> Callable[[F], F]:
    """Compile to code that releases the GIL and divides by zero as IEEE 754 does; cached on disk if possible.

    The cache has a folder of its own, because `pip uninstall` would leave files next to this one.
    """

    def compile_(function: F) -> F:
        options = {"nogil": True, "error_model": "numpy", **more}
        given = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = given or str(cache_folder().with_name("numba"))
        try:
            compiled: F = numba.njit(*signatures, cache=True, **options)(function)
        except RuntimeError:  # the user's cache and this folder are read-only
            compiled = numba.njit(*signatures, **options)(function)
        finally:
            numba.config.CACHE_DIR = given
        return compiled

    return compile_


def _in(dtype: Any, dimensions: int) -> Any:
    """Type of an input array: read-only, because writable arrays fit too."""
    return types.Array(dtype, dimensions, "C", readonly=True)


ROWS = _in(uint8, 2), int64
ROTATION = _in(float32, 1), _in(int64, 1)
TURNS = _in(float32, 2), _in(float32, 2)
MATRICES = float32[:, :, ::1]


@jit()
def _push(x: Any, f: Any, c: Any, words: Array, at: int) -> Any:
    """Put a symbol onto a state. f, c: its frequency, and the sum of the frequencies before. Returns the state and the
    index of the first word so far.
    """
    if x >> np.uint32(20) >= f:
        at -= 1
        words[at] = np.uint16(x & np.uint32(0xFFFF))
        x >>= np.uint32(16)
    whole = x // f
    return (whole << np.uint32(12)) + c + (x - whole * f), at


@jit()
def _push_symbol(x: Any, value: Any, table: Array, words: Array, at: int) -> Any:
    """Put a whole number of 16 bits onto a state, by a table of 256 symbols. Returns as `_push`."""
    symbol = value + LARGEST if -LARGEST <= value <= LARGEST else ESCAPE
    if table[symbol] & np.uint32(0xFFFF) == 0:
        symbol = ESCAPE
    if symbol == ESCAPE:
        at -= 1
        words[at] = np.uint16(value & 0xFFFF)
    return _push(x, table[symbol] & np.uint32(0xFFFF), table[symbol] >> np.uint32(16), words, at)


@jit()
def _pull(x: Any, table: Array, words: Array, at: int) -> Any:
    """Take a whole number from a state by a table for decoding. Returns it, the state, and the next word's index."""
    entry = table[x & MASK]
    x = (entry >> np.uint32(12) & MASK) * (x >> np.uint32(12)) + (entry & MASK)
    if x < LOWEST:
        x = x << np.uint32(16) | np.uint32(words[at] if at < len(words) else 0)
        at += 1
    value = np.int64(entry >> np.uint32(24)) - LARGEST
    if value == ESCAPE - LARGEST:
        value = np.int64(np.int16(words[at] if at < len(words) else 0))
        at += 1
    return value, x, at


@jit(int64(_in(int16, 1), *ROWS, _in(uint32, 2), uint32[:, ::1], int64[::1], uint16[::1]))
def encode(
    numbers: Array, tables: Array, tokens: int, encoding: Array, states: Array, sizes: Array, words: Array
) -> int:
    """Fill states, sizes and the end of words. Returns the index of the first word, or -1 if there is no room.

    Because a number takes two words at most, and room is tested behind each, the first two words are spare.
    """
    at, number, streams = len(words), len(numbers), states.shape[1]
    for row in range(len(tables) - 1, -1, -1):
        end, state, place = at, states[row], tables.shape[1] * tokens
        state[:] = LOWEST
        for component in range(tables.shape[1] - 1, -1, -1):
            table = encoding[tables[row, component]]
            for _ in range(tokens):
                number -= 1
                place -= 1
                stream = place & (streams - 1)
                state[stream], at = _push_symbol(state[stream], np.int64(numbers[number]), table, words, at)
                if at < 2:
                    return -1
        sizes[row] = end - at
    return at


@jit(boolean(_in(uint32, 2), _in(int64, 1), _in(uint16, 1), *ROWS, _in(uint32, 2), int16[::1]))
def decode(
    states: Array, sizes: Array, words: Array, tables: Array, tokens: int, decoding: Array, numbers: Array
) -> bool:
    """Fill numbers. Returns True if all words were used, and all states ended as an encoder's begin: LOWEST."""
    at, number, streams = 0, 0, states.shape[1]
    state = np.empty(streams, np.uint32)
    for row in range(len(tables)):
        end, place = at + sizes[row], 0
        state[:] = states[row]
        for component in range(tables.shape[1]):
            table = decoding[tables[row, component]]
            for _ in range(tokens):
                stream = place & (streams - 1)
                place += 1
                numbers[number], state[stream], at = _pull(state[stream], table, words, at)
                number += 1
        if at != end or (state != LOWEST).any():
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
    """Sum a flat tile's rows into row 0: each 8 rows by halves, then these sums by halves.

    The number of rows is a multiple of 8. Other rows are overwritten.
    """
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
    """Turn a vector by RoPE's angles. Pair i is the numbers i and len(cos) + i."""
    n = len(cos)
    for i in range(n):
        a, b, c, s = x[i], x[n + i], cos[i], sin[i]
        out[i] = a * c - b * s
        out[n + i] = b * c + a * s
    for i in range(2 * n, len(x)):
        out[i] = x[i]


@jit([MATRICES(_in(word, 3), boolean, *TURNS) for word in (uint16, uint32)])
def turned_back(words: Array, bf16: bool, cos: Floats, sin: Floats) -> Floats:
    """Rotate keys [runs, tokens, head_dim], given as bits of bf16 (uint16) or float32 (uint32), by RoPE's angles.

    cos, sin: [tokens, pairs] of the angles; with negated sines, keys are as before RoPE.
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
    """Rotate keys [runs, tokens, head_dim] by RoPE's angles; fill their bits as bf16 or float32, clamped to +-largest.

    A negative zero becomes positive; a negative number too near 0 for bf16 becomes a negative zero.
    """
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
    """Return sums of x * y over head_dim, in the order of `_fold`: [runs, tokens] of two [runs, head_dim, tokens]."""
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
    """Return y = hadamard(weights * x), [runs, head_dim, tokens] of [runs, tokens, head_dim], and sums of y * y over
    head_dim, [runs, tokens].
    """
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


# -- calibrated codecs: see manthan.codec.cpu.klt ---------------------------------------------------------


@jit()
def _at_level(finest: Any, level: int) -> Any:
    """Return the magnitude at `level`, given the magnitude at the finest level."""
    return finest if level == 3 else (finest + 1) // 3 >> (2 - level)


@jit()
def _table(table: Any, shift: Any) -> Any:
    """Return the index of the table for steps wider by `shift` thirds of an octave, given a component's own table."""
    return table // WIDTHS * WIDTHS + min(max(table % WIDTHS - shift, 0), WIDTHS - 1)


@jit(
    int64(_in(int16, 2), _in(uint8, 1), _in(int64, 1), int64, _in(uint32, 2), _in(uint32, 3), uint32[::1], uint16[::1])
)
def write_level(
    q: Array, tables: Array, shifts: Array, level: int, base: Array, parts: Array, states: Array, words: Array
) -> int:
    """Write what `level` adds to the level before it, into states and the end of words.

    q: whole numbers at the finest level, [components, tokens]. Returns the index of the first word.
    """
    size, tokens = q.shape
    at, place = len(words), size * tokens
    states[:] = LOWEST
    for component in range(size - 1, -1, -1):
        for token in range(tokens - 1, -1, -1):
            place -= 1
            stream = place & (len(states) - 1)
            table, finest = _table(np.int64(tables[component]), shifts[token]), np.int64(q[component, token])
            magnitude = _at_level(abs(finest), level)
            if level == 0:
                value = -magnitude if finest < 0 else magnitude
                states[stream], at = _push_symbol(states[stream], value, base[table], words, at)
            else:
                so_far = _at_level(abs(finest), level - 1)
                told = magnitude - SPLITS[level - 1] * so_far
                if so_far == 0 and finest < 0:
                    told = -told
                likely, before = parts[table, min(so_far, 3)], np.uint32(0)
                for part in range(told + 1):
                    before += likely[part]
                states[stream], at = _push(states[stream], likely[told + 1], before, words, at)
    return at


@jit(
    [
        boolean(
            _in(uint8, 1), _in(int64, 1), _in(uint32, 2), _in(uint32, 3), uint32[:, ::1], int64[::1], _in(int64, 1),
            _in(uint16, 1), int64, _in(int32, 2), _in(int64, 1), floats[:, ::1],
        )
        for floats in (float32, float64)
    ]
)  # fmt: skip
def read_levels(
    tables: Array,
    shifts: Array,
    base: Array,
    parts: Array,
    states: Array,
    at: Array,
    ends: Array,
    words: Array,
    fine: int,
    centres: Array,
    scales: Array,
    out: Array,
) -> bool:
    """Read all levels of a group of components, and fill `out`, [components, tokens], like `places`.

    Returns True if each level used all of its words, and all states ended as an encoder's begin: LOWEST. But for the
    rare escape, no branch depends on numbers that are read, because the processor would mispredict it.

    Args:
        base: table for decoding of `manthan.codec.cpu.rans.Coder`, by table and slot.
        parts: see `manthan.codec.tables.levels.edges`.
        states: [levels, streams], overwritten.
        at: index of each level's first word, overwritten.
        ends: index behind each level's last word.
        words: of all levels, and behind them two for each token, which may be read but do not count.
    """
    levels, streams = states.shape
    size, tokens = out.shape
    told, chosen = np.empty(tokens, np.int64), np.empty(tokens, np.uint64)
    # numba tests signed indices for being negative, which takes a quarter of the time: these are flat and unsigned
    flat_base, flat_parts, flat_centres, flat_states = base.ravel(), parts.ravel(), centres.ravel(), states.ravel()
    for component in range(size):
        for token in range(tokens):
            chosen[token] = _table(np.int64(tables[component]), shifts[token])
        first, word = U(component * tokens), U(at[0])
        for token in range(tokens):
            stream = first + U(token) & U(streams - 1)
            x = U(flat_states[stream])
            entry = U(flat_base[chosen[token] << U(12) | x & U(MASK)])
            x = (entry >> U(12) & U(MASK)) * (x >> U(12)) + (entry & U(MASK))
            following, lower = x << U(16) | U(words[word]), x < U(LOWEST)
            flat_states[stream] = following if lower else x
            word += U(lower)
            told[token] = np.int64(entry >> U(24)) - LARGEST
            if told[token] == ESCAPE - LARGEST:
                told[token] = np.int64(np.int16(words[word]))
                word += U(1)
        at[0] = word
        for level in range(1, levels):
            word, begin, tables_begin = U(at[level]), U(level * streams), U((level - 1) * parts[0].size)
            for token in range(tokens):
                stream, so_far = begin + (first + U(token) & U(streams - 1)), told[token]
                x = U(flat_states[stream])
                edges = U(flat_parts[tables_begin + (chosen[token] << U(2)) + U(min(abs(so_far), 3))])
                slot, one, two = x & U(MASK), edges & U(0xFFFF), edges >> U(16)
                from_one, from_two = slot >= one, slot >= two
                start = two if from_two else (one if from_one else U(0))
                end = U(4096) if from_two else (two if from_one else one)
                x = (end - start) * (x >> U(12)) + slot - start
                following, lower = x << U(16) | U(words[word]), x < U(LOWEST)
                flat_states[stream] = following if lower else x
                word += U(lower)
                part = np.int64(from_one) + np.int64(from_two) - 1
                told[token] = SPLITS[level - 1] * so_far + (-part if so_far < 0 else part)
            at[level] = word
        for token in range(tokens):
            size_told = abs(told[token])
            position = np.int64(flat_centres[(chosen[token] << U(2)) + U(min(size_told, 3))])
            place = (size_told * fine + position) * scales[token]
            out[component, token] = -place if told[token] < 0 else place
        for level in range(levels):
            if at[level] > ends[level]:
                return False
    return bool((at == ends).all()) and bool((states == LOWEST).all())


@jit(void(_in(int16, 2), _in(uint8, 1), _in(int64, 1), int64, _in(int32, 2), _in(int64, 1), float64[:, ::1]))
def places(q: Array, tables: Array, shifts: Array, fine: int, centres: Array, scales: Array, out: Array) -> None:
    """Fill `out` with sign(q) * (abs(q) * fine + centre) * scale, [components, tokens].

    fine: a step of the level of `q`, in units of `centres`. centres: mean of an interval's numbers, less
    abs(q) * fine, [tables, magnitudes]. scales: [tokens].
    """
    for component in range(q.shape[0]):
        for token in range(q.shape[1]):
            table = _table(np.int64(tables[component]), shifts[token])
            value: Any = np.int64(q[component, token])
            place = (abs(value) * fine + np.int64(centres[table, min(abs(value), 3)])) * scales[token]
            out[component, token] = -place if value < 0 else place


@jit(
    void(_in(float32, 2), _in(uint16, 2), _in(float32, 1), _in(float32, 1), float32[:, ::1]),
    fastmath={"contract", "nsz"},
)
def product(y: Array, halves: Array, scale: Array, mean: Array, out: Array) -> None:
    """Fill (y.T @ transform) * scale + mean, [tokens, C]. Components that are 0 for all tokens are skipped.

    y: components, [C, tokens]. halves: the transform [C, C], as bits of float16.
    """
    size, tokens = y.shape
    used = [row for row in range(size) if (y[row] != 0).any()]
    bits, some = np.zeros(ROWS_AT_ONCE * COLUMNS, np.uint32), np.empty((tokens, ROWS_AT_ONCE), np.float32)
    panel, sums = bits.view(np.float32), np.empty(tokens * COLUMNS, np.float32)
    for left in range(0, size, COLUMNS):
        width = min(COLUMNS, size - left)
        sums[:] = 0
        for first in range(0, len(used), ROWS_AT_ONCE):
            some[:] = 0
            for n in range(min(ROWS_AT_ONCE, len(used) - first)):
                row, start = used[first + n], n * COLUMNS
                source, to, numbers = halves[row, left : left + width], bits[start:], panel[start:]
                for i in range(width):
                    half = np.uint32(source[i])
                    to[i] = (half & np.uint32(0x7FFF)) << np.uint32(13) | (half & np.uint32(0x8000)) << np.uint32(16)
                for i in range(width):
                    numbers[i] *= HALVES
                some[:, n] = y[row]
            for token in range(tokens):
                a, b, c, d = some[token, 0], some[token, 1], some[token, 2], some[token, 3]
                e, f, g, h = some[token, 4], some[token, 5], some[token, 6], some[token, 7]
                target = sums[token * COLUMNS : token * COLUMNS + width]
                for i in range(width):
                    target[i] += (
                        a * panel[i] + b * panel[COLUMNS + i] + c * panel[2 * COLUMNS + i]
                        + d * panel[3 * COLUMNS + i] + e * panel[4 * COLUMNS + i] + f * panel[5 * COLUMNS + i]
                        + g * panel[6 * COLUMNS + i] + h * panel[7 * COLUMNS + i]
                    )  # fmt: skip
        for token in range(tokens):
            for i in range(width):
                out[token, left + i] = sums[token * COLUMNS + i] * scale[left + i] + mean[left + i]


@jit()
def _length(x: Any) -> Any:
    """Return the number of bits of a whole number below 2**53."""
    return np.int64(math.frexp(np.float64(x))[1])


@jit()
def _cell(near: int, wide: int) -> Any:
    """Return log2 of a cell's size, the expected cell, and the index of the table for the distance from it.

    A cell is an interval, 2**n units of `near` wide. wide: three times log2 of the expected error of `near` in units.
    """
    far = abs(near)
    lattice = _length(far) - 8
    size = max(wide // 3 - 1, lattice, 0)
    cell = (far + (1 << size >> 1) if lattice >= size else far) >> size
    return size, -1 - cell if near < 0 else cell, min(max(wide - 3 * size + 24, 0), WIDTHS - 1)


EXACT = _in(int64, 3), _in(int64, 2), _in(int64, 2), _in(int64, 1), _in(uint32, 2)


@jit(int64(_in(uint16, 3), *EXACT, uint32[::1], uint16[::1]))
def write_exact(
    bits: Array, near: Array, errors: Array, shifts: Array, points: Array, cells: Array, states: Array, words: Array
) -> int:
    """Write bf16 numbers into states and the end of words. Returns the first word's index; -1 for a number too far off.

    Args:
        bits: the numbers, [vectors, tokens, head_dim].
        near: their predictions, in units of 2**-points[vector].
        errors: three times log2 of the expected errors in these units, [vectors, head_dim].
        shifts: what a token adds to `errors`, [vectors, tokens].
        cells: `encoding` of the `Coder` of `manthan.codec.tables.levels.cells`.
    """
    at, place = len(words), bits.size
    states[:] = LOWEST
    for vector in range(bits.shape[0] - 1, -1, -1):
        for token in range(bits.shape[1] - 1, -1, -1):
            for i in range(bits.shape[2] - 1, -1, -1):
                place -= 1
                stream = place & (len(states) - 1)
                wide, point = errors[vector, i] + shifts[vector, token], points[vector]
                size, expected, table = _cell(near[vector, token, i], wide)
                word = np.int64(bits[vector, token, i])
                exponent, mantissa = word >> 7 & 0xFF, word & 0x7F
                shift = exponent - 134 + point - size
                if shift > 32:
                    return -1
                cell = (128 | mantissa) << shift if shift >= 0 else (128 | mantissa) >> min(-shift, 8)
                told = (-1 - cell if word >> 15 else cell) - expected
                if abs(told) > FURTHEST:
                    return -1
                raw = np.uint32(7 if cell == 0 else max(8 - _length(cell), 0))
                x = states[stream]
                if raw > 0:
                    f = np.uint32(4096) >> raw
                    x, at = _push(x, f, np.uint32(mantissa & (1 << raw) - 1) * f, words, at)
                if cell == 0:
                    x, at = _push_symbol(x, size - point + 126 - exponent, cells[FALLING], words, at)
                states[stream], at = _push_symbol(x, told, cells[table], words, at)
    return at


@jit(boolean(uint16[:, :, ::1], *EXACT, uint32[::1], _in(uint16, 1)))
def read_exact(
    bits: Array, near: Array, errors: Array, shifts: Array, points: Array, cells: Array, states: Array, words: Array
) -> bool:
    """Undo `write_exact`: fill bits. Returns True if all words were used, and all states ended as an encoder's begin.

    States are overwritten.
    """
    at, place = 0, 0
    for vector in range(bits.shape[0]):
        for token in range(bits.shape[1]):
            for i in range(bits.shape[2]):
                stream = place & (len(states) - 1)
                place += 1
                wide, point = errors[vector, i] + shifts[vector, token], points[vector]
                size, expected, table = _cell(near[vector, token, i], wide)
                told, x, at = _pull(states[stream], cells[table], words, at)
                signed = expected + told
                cell = -1 - signed if signed < 0 else signed
                length = _length(cell)
                if cell == 0:
                    fall, x, at = _pull(x, cells[FALLING], words, at)
                    word, raw = size - point + 126 - fall << 7, 7
                else:
                    top = cell >> length - 8 if length >= 8 else cell << 8 - length
                    word, raw = (length + size - point + 126 << 7) + (top & 0x7F), max(8 - length, 0)
                if raw > 0:
                    slot, f = x & MASK, np.uint32(4096) >> np.uint32(raw)
                    word += np.int64(slot // f)
                    x = f * (x >> np.uint32(12)) + slot % f
                    if x < LOWEST:
                        x = x << np.uint32(16) | np.uint32(words[at] if at < len(words) else 0)
                        at += 1
                states[stream] = x
                bits[vector, token, i] = np.uint16((word & 0x7FFF) | (0x8000 if signed < 0 else 0))
    return at == len(words) and bool((states == LOWEST).all())
