"""A run's mean before RoPE, taken off and put back in one pass over memory, compiled by numba; the bytes are those of
`manthan.codec.cpu.centring`.

No fastmath: the compiler may neither reorder nor fuse the float operations that `manthan.codec.centred` prescribes.
"""

from typing import Any

import numpy as np
from numba import types

from manthan.codec.centred import LIMIT_BITS, Mean
from manthan.codec.cpu.jit import jit
from manthan.codec.cpu.numba_kernels import BYTES_IN, MAGNITUDE, Bytes, Floats, Words, _round
from manthan.codec.rope import Floats as Turns

TOO_LARGE = np.uint32(LIMIT_BITS)
FIRST_NORMAL = np.uint32(1 << 7)
ZERO = np.float32(0)


@jit()
def _turn(x: Floats, cos: Floats, sin: Floats, out: Floats) -> None:
    """One vector."""
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


@jit()
def _fold_tokens(rows: Floats) -> None:
    """The sum of [tokens, head_dim] is left in row 0; the others are overwritten."""
    n, dim = rows.shape
    while n > 1:
        half = (n + 1) // 2
        for t in range(n - half):
            low, high = rows[t], rows[half + t]
            for i in range(dim):
                low[i] += high[i]
        n = half


@jit()
def _quantize_mean(average: Floats, mean: Mean, words: Words, planes: Bytes) -> np.uint32:
    """The average becomes its codes times their step, whose bf16 bits are returned. words: room for one."""
    bits, top, inverse = mean
    largest = ZERO
    for i in range(len(average)):
        largest = max(largest, abs(average[i]))
    room = words.view(np.float32)
    room[0] = largest * inverse
    step = _round(words[0])
    step = np.uint32(0) if step < FIRST_NORMAL else step
    words[0] = step << np.uint32(16)
    width, most = len(average) // 8, np.float32(top)
    planes[:] = 0
    for i in range(len(average)):
        code = min(max(np.rint(average[i] / room[0]), -most), most) if step > 0 else ZERO
        whole = np.uint32(abs(code)) | np.uint32(code < 0) << np.uint32(bits - 1)
        for p in range(bits):
            planes[p * width + i // 8] |= np.uint8(
                ((whole >> np.uint32(bits - 1 - p)) & np.uint32(1)) << np.uint32(i % 8)
            )
        average[i] = code * room[0] + ZERO
    return step


@jit()
def _read_mean(steps: Bytes, planes: Bytes, bits: int, words: Words, out: Floats) -> None:
    words[0] = np.uint32(steps[0]) << np.uint32(16) | np.uint32(steps[1]) << np.uint32(24)
    step, width = words.view(np.float32)[0], len(out) // 8
    for i in range(len(out)):
        magnitude = 0
        for p in range(1, bits):
            magnitude = 2 * magnitude + ((planes[p * width + i // 8] >> np.uint8(i % 8)) & 1)
        code = np.float32(magnitude)
        minus = ((planes[i // 8] >> np.uint8(i % 8)) & 1) != 0
        out[i] = (-code if minus else code) * step


def _centre(x: Any, bf16: bool, cos: Turns, sin: Turns, mean: Mean, steps: Bytes, means: Bytes, out: Floats) -> int:
    runs, tokens, dim = x.shape
    shift, width = np.uint32(16 if bf16 else 0), mean.bits * dim // 8
    words, one = np.empty((tokens, dim), np.uint32), np.empty(1, np.uint32)
    keys, rows, each = words.view(np.float32), np.empty((tokens, dim), np.float32), np.float32(1 / tokens)
    for run in range(runs):
        for t in range(tokens):
            top, row, source = np.uint32(0), words[t], x[run, t]
            for i in range(dim):
                row[i] = np.uint32(source[i]) << shift
                top = max(top, row[i] & MAGNITUDE)
            if top >= TOO_LARGE:
                return int(run * tokens + t)
            _turn_back(keys[t], cos[t], sin[t], rows[t])
        _fold_tokens(rows)
        average = rows[0]
        for i in range(dim):
            average[i] *= each
        step = _quantize_mean(average, mean, one, means[run * width : (run + 1) * width])
        steps[2 * run], steps[2 * run + 1] = step & np.uint32(255), step >> np.uint32(8)
        for t in range(tokens):
            centred = out[run, t]
            _turn(average, cos[t], sin[t], centred)
            for i in range(dim):
                centred[i] = keys[t, i] - centred[i]
    return -1


def _uncentre(
    x: Floats,
    cos: Turns,
    sin: Turns,
    mean: Mean,
    steps: Bytes,
    means: Bytes,
    bf16: bool,
    largest: np.float32,
    out: Any,
) -> None:
    runs, tokens, dim = x.shape
    width = mean.bits * dim // 8
    kept, one = np.empty(dim, np.float32), np.empty(1, np.uint32)
    words = np.empty(dim, np.uint32)
    row = words.view(np.float32)
    for run in range(runs):
        _read_mean(steps[2 * run : 2 * run + 2], means[run * width : (run + 1) * width], mean.bits, one, kept)
        for t in range(tokens):
            source, target = x[run, t], out[run, t]
            _turn(kept, cos[t], sin[t], row)
            for i in range(dim):
                row[i] = min(max(source[i] + row[i], -largest), largest) + ZERO  # no negative zeros
            if bf16:
                for i in range(dim):
                    target[i] = _round(words[i])
            else:
                for i in range(dim):
                    target[i] = words[i]


TURNS = types.Array(types.float32, 2, "C", readonly=True)
NUMBERS_IN = types.Array(types.float32, 3, "C", readonly=True)
MEAN = types.NamedTuple((types.int64, types.int64, types.float32), Mean)


def _centre_signature(word: Any) -> Any:
    x = types.Array(word, 3, "C", readonly=True)
    return types.int64(
        x, types.boolean, TURNS, TURNS, MEAN, types.uint8[::1], types.uint8[::1], types.float32[:, :, ::1]
    )


def _uncentre_signature(word: Any) -> Any:
    return types.void(
        NUMBERS_IN,
        TURNS,
        TURNS,
        MEAN,
        BYTES_IN,
        BYTES_IN,
        types.boolean,
        types.float32,
        word[:, :, ::1],
    )


centre = jit([_centre_signature(types.uint16), _centre_signature(types.uint32)])(_centre)
uncentre = jit([_uncentre_signature(types.uint16), _uncentre_signature(types.uint32)])(_uncentre)
