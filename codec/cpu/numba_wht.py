"""The transform of `manthan.codec.wht` compiled by numba.

LANES vectors are worked on at a time, transposed into a tile [head_dim, LANES] that stays in the first-level cache, so
that every step is a SIMD loop over lanes. Tiles are flat, because the compiler sees the constant row length then. No
fastmath: the compiler may neither reorder nor fuse the float operations that the format prescribes.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from manthan.codec.cpu.jit import jit
from manthan.codec.rope import Floats

LANES = 32
ZERO = np.float32(0)
TURNS = types.Array(types.float32, 2, "C", readonly=True)
Sizes = npt.NDArray[np.int64]


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
    """Fold each run of 8 rows, then the runs; the sums are left in row 0. The other rows are overwritten."""
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
def _round(bits: np.uint32) -> Any:
    """The bf16 bits nearest to float32 bits, ties to even."""
    return (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)


@jit()
def _turn(x: Floats, cos: Floats, sin: Floats, out: Floats) -> None:
    """Turn one vector by RoPE's angles."""
    n = len(cos)
    for i in range(n):
        a, b, c, s = x[i], x[n + i], cos[i], sin[i]
        out[i] = a * c - b * s
        out[n + i] = b * c + a * s
    for i in range(2 * n, len(x)):
        out[i] = x[i]


@jit()
def _turn_back(x: Floats, cos: Floats, sin: Floats, out: Floats) -> None:
    n = len(cos)
    for i in range(n):
        a, b, c, s = x[i], x[n + i], cos[i], sin[i]
        out[i] = a * c + b * s
        out[n + i] = b * c - a * s
    for i in range(2 * n, len(x)):
        out[i] = x[i]


def rotated(x: Floats, weights: Floats, blocks: Sizes) -> tuple[Floats, Floats]:
    """[runs, tokens, head_dim] to y [runs, head_dim, tokens], and fold(y * y), [runs, tokens]."""
    runs, tokens, dim = x.shape
    y, energies = np.empty((runs, dim, tokens), np.float32), np.empty((runs, tokens), np.float32)
    _rotate(np.require(x, requirements=["C", "A"]), weights, blocks, y, energies)
    return y, energies


def unrotated(q: npt.NDArray[np.int16], steps: Floats, weights: Floats, blocks: Sizes) -> Floats:
    """[runs, head_dim, tokens] to hadamard(q) * w * step, [runs, tokens, head_dim]. steps: [runs, tokens]."""
    runs, dim, tokens = q.shape
    x = np.empty((runs, tokens, dim), np.float32)
    _unrotate(q, steps, weights, blocks, x)
    return x


def turned_back(words: Any, bf16: bool, cos: Floats, sin: Floats) -> Floats:
    """The bits of keys, [runs, tokens, head_dim] uint16 of bf16 or uint32 of float32, as they are before RoPE."""
    out = np.empty(words.shape, np.float32)
    _back(words, bf16, cos, sin, out)
    return out


def energies(y: Floats, means: Floats) -> Floats:
    """fold of the squares of [runs, head_dim, tokens] less their means, [runs, head_dim]."""
    made = np.empty((y.shape[0], y.shape[2]), np.float32)
    _energies(y, means, made)
    return made


def products(y: Floats, q: npt.NDArray[np.int16]) -> Floats:
    """fold(y * q) of [runs, head_dim, tokens]."""
    made = np.empty((y.shape[0], y.shape[2]), np.float32)
    _products(y, q, made)
    return made


def _back_(x: Any, bf16: bool, cos: Any, sin: Any, out: Any) -> None:
    runs, tokens, dim = x.shape
    shift = np.uint32(16 if bf16 else 0)
    words = np.empty(dim, np.uint32)
    row = words.view(np.float32)
    for run in range(runs):
        for t in range(tokens):
            source = x[run, t]
            for i in range(dim):
                words[i] = np.uint32(source[i]) << shift
            _turn_back(row, cos[t], sin[t], out[run, t])


def _turned_(x: Any, cos: Any, sin: Any, bf16: bool, largest: Any, out: Any) -> None:
    runs, tokens, dim = x.shape
    words = np.empty(dim, np.uint32)
    row = words.view(np.float32)
    for run in range(runs):
        for t in range(tokens):
            target = out[run, t]
            _turn(x[run, t], cos[t], sin[t], row)
            for i in range(dim):
                row[i] = min(max(row[i], -largest), largest) + ZERO  # no negative zeros
            if bf16:
                for i in range(dim):
                    target[i] = _round(words[i])
            else:
                for i in range(dim):
                    target[i] = words[i]


def _energies_(y: Any, means: Any, made: Any) -> None:
    runs, dim, tokens = y.shape
    tile = np.zeros(dim * LANES, np.float32)
    for run in range(runs):
        for first in range(0, tokens, LANES):
            count = min(LANES, tokens - first)
            for i in range(dim):
                source, mean, row = y[run, i, first : first + count], means[run, i], tile[i * LANES : (i + 1) * LANES]
                for t in range(count):
                    left = source[t] - mean
                    row[t] = left * left
            _fold(tile)
            for t in range(count):
                made[run, first + t] = tile[t]


def _products_(y: Any, q: Any, made: Any) -> None:
    runs, dim, tokens = y.shape
    tile = np.zeros(dim * LANES, np.float32)
    for run in range(runs):
        for first in range(0, tokens, LANES):
            count = min(LANES, tokens - first)
            for i in range(dim):
                source, whole = y[run, i, first : first + count], q[run, i, first : first + count]
                row = tile[i * LANES : (i + 1) * LANES]
                for t in range(count):
                    row[t] = source[t] * np.float32(whole[t])
            _fold(tile)
            for t in range(count):
                made[run, first + t] = tile[t]


def _rotate_(x: Any, weights: Any, blocks: Any, y: Any, energies: Any) -> None:
    runs, tokens, dim = x.shape
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


def _unrotate_(q: Any, steps: Any, weights: Any, blocks: Any, x: Any) -> None:
    runs, dim, tokens = q.shape
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


def _in(dtype: Any, dimensions: int) -> Any:
    return types.Array(dtype, dimensions, "C", readonly=True)


TABLES = (_in(types.float32, 1), _in(types.int64, 1))
_rotate = jit([types.void(_in(types.float32, 3), *TABLES, types.float32[:, :, ::1], types.float32[:, ::1])])(_rotate_)
_unrotate = jit([types.void(_in(types.int16, 3), _in(types.float32, 2), *TABLES, types.float32[:, :, ::1])])(_unrotate_)
_energies = jit([types.void(_in(types.float32, 3), _in(types.float32, 2), types.float32[:, ::1])])(_energies_)
_products = jit([types.void(_in(types.float32, 3), _in(types.int16, 3), types.float32[:, ::1])])(_products_)


def _back_signature(word: Any) -> Any:
    return types.void(_in(word, 3), types.boolean, TURNS, TURNS, types.float32[:, :, ::1])


def _turned_signature(word: Any) -> Any:
    return types.void(_in(types.float32, 3), TURNS, TURNS, types.boolean, types.float32, word[:, :, ::1])


_back = jit([_back_signature(types.uint16), _back_signature(types.uint32)])(_back_)
turned = jit([_turned_signature(types.uint16), _turned_signature(types.uint32)])(_turned_)
"""Keys [runs, tokens, head_dim] behind RoPE, as bits of bf16 or float32: within +-largest, no negative zeros."""
