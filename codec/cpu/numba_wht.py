"""The transform of `manthan.codec.wht` compiled by numba, LANES vectors at a time; the numbers are those of
`manthan.codec.cpu.plain_wht`."""

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from manthan.codec.cpu.jit import jit
from manthan.codec.cpu.numba_kernels import LANES, Sizes, _fold, _hadamard
from manthan.codec.rope import Floats


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
