"""Encoding and decoding fused into one pass over memory, compiled by numba; the bytes are the plain numpy
code's.

LANES vectors are worked on at a time, transposed into a tile [head_dim, LANES] that stays in the first-level
cache, so that every step is a SIMD loop over lanes. Tiles are flat, for the compiler to see the constant row
length. No fastmath: the compiler may neither reorder nor fuse the float operations that `manthan.codec.base`
prescribes.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from manthan.codec.cpu.jit import jit
from manthan.codec.tables.constants import Tables

LANES = 32
EXPONENT = np.uint32(0x7F800000)
MAGNITUDE = np.uint32(0x7FFFFFFF)
LARGEST_BF16_BITS = np.uint32(0x7F7F)
SMALLEST = np.float32(2.0**-126)

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]
Bytes = npt.NDArray[np.uint8]
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
def _load(x: Any, first: int, count: int, shift: np.uint32, words: Words) -> None:
    """Transpose `count` vectors to float32 bits; the lanes beyond them are zeros."""
    if count < LANES:
        words[:] = 0
    for v in range(count):
        for i in range(len(words) // LANES):
            words[i * LANES + v] = np.uint32(x[first + v, i]) << shift


@jit()
def _largest(words: Words, scratch: Words) -> None:
    """Row 0 of scratch becomes each lane's largest magnitude, as bits."""
    for i in range(len(words)):
        scratch[i] = words[i] & MAGNITUDE
    rows = len(words) // LANES
    while rows > 1:
        half = (rows + 1) // 2
        low, high = scratch[: (rows - half) * LANES], scratch[half * LANES : rows * LANES]
        for i in range(len(low)):
            low[i] = high[i] if high[i] > low[i] else low[i]
        rows = half


@jit()
def _prescale(top: Words, factor: Words, inverse: Words) -> int:
    """The bits of 2**(127 - m) and of 2**(m - 127) for each lane; returns the first lane that is not finite,
    or -1."""
    for v in range(LANES):
        if top[v] >= EXPONENT:
            return v
        wanted = 254 - np.int64(top[v] >> np.uint32(23))
        field = np.uint32(8 if wanted < 8 else wanted)
        factor[v] = field << np.uint32(23)
        # 2**-127, the inverse at field 254, is below the normal numbers: half of their first
        inverse[v] = (np.uint32(254) - field) << np.uint32(23) if field < 254 else np.uint32(1 << 22)
    return -1


@jit()
def _quantize3(tile: Floats, q: Floats, codes: Bytes, cuts: Floats, levels: Floats) -> None:
    """y in tile becomes |y|, q its level, codes its sign bit and index."""
    l0, l1, l2, l3 = levels[0], levels[1], levels[2], levels[3]
    t1, t2, t3 = cuts[:LANES], cuts[LANES : 2 * LANES], cuts[2 * LANES :]
    for i in range(len(tile) // LANES):
        o = i * LANES
        y, level, code = tile[o : o + LANES], q[o : o + LANES], codes[o : o + LANES]
        for v in range(LANES):
            a = abs(y[v])
            o1, o2, o3 = a > t1[v], a > t2[v], a > t3[v]
            level[v] = (l3 if o3 else l2) if o2 else (l1 if o1 else l0)
            code[v] = np.uint8(y[v] < 0) * np.uint8(4) + np.uint8(o1) + np.uint8(o2) + np.uint8(o3)
            y[v] = a


@jit()
def _quantize4(tile: Floats, q: Floats, codes: Bytes, cuts: Floats, levels: Floats) -> None:
    """The same for 8 levels."""
    l0, l1, l2, l3 = levels[0], levels[1], levels[2], levels[3]
    l4, l5, l6, l7 = levels[4], levels[5], levels[6], levels[7]
    t1, t2, t3, t4 = cuts[:LANES], cuts[LANES : 2 * LANES], cuts[2 * LANES : 3 * LANES], cuts[3 * LANES : 4 * LANES]
    t5, t6, t7 = cuts[4 * LANES : 5 * LANES], cuts[5 * LANES : 6 * LANES], cuts[6 * LANES :]
    for i in range(len(tile) // LANES):
        o = i * LANES
        y, level, code = tile[o : o + LANES], q[o : o + LANES], codes[o : o + LANES]
        for v in range(LANES):
            a = abs(y[v])
            o1, o2, o3, o4, o5, o6, o7 = a > t1[v], a > t2[v], a > t3[v], a > t4[v], a > t5[v], a > t6[v], a > t7[v]
            lower = (l3 if o3 else l2) if o2 else (l1 if o1 else l0)
            upper = (l7 if o7 else l6) if o6 else (l5 if o5 else l4)
            level[v] = upper if o4 else lower
            low = np.uint8(o1) + np.uint8(o2) + np.uint8(o3) + np.uint8(o4)
            code[v] = np.uint8(y[v] < 0) * np.uint8(8) + low + np.uint8(o5) + np.uint8(o6) + np.uint8(o7)
            y[v] = a


@jit()
def _quantize(tile: Floats, q: Floats, codes: Bytes, cuts: Floats, levels: Floats) -> None:
    """The same for any number of levels, a pass for each threshold."""
    sign = np.uint8(len(levels))
    for i in range(len(tile) // LANES):
        o = i * LANES
        y, level, code = tile[o : o + LANES], q[o : o + LANES], codes[o : o + LANES]
        for v in range(LANES):
            code[v] = np.uint8(y[v] < 0) * sign
            y[v] = abs(y[v])
            level[v] = levels[0]
        for k in range(len(levels) - 1):
            above, cut = levels[k + 1], cuts[k * LANES : (k + 1) * LANES]
            for v in range(LANES):
                over = y[v] > cut[v]
                level[v] = above if over else level[v]
                code[v] += np.uint8(over)


@jit()
def _scale_least_squares(tile: Floats, q: Floats, scale: Floats) -> None:
    """From |y| and its levels; both are overwritten."""
    for i in range(len(tile)):
        tile[i] *= q[i]
        q[i] *= q[i]
    _fold(tile)
    _fold(q)
    for v in range(LANES):
        scale[v] = tile[v] / q[v] * scale[v]


@jit()
def _scale_unbiased(tile: Floats, q: Floats, square: Floats, scale: Floats) -> None:
    """From |y|, which is overwritten, its levels and the fold of its square."""
    for i in range(len(tile)):
        tile[i] *= q[i]
    _fold(tile)
    for v in range(LANES):
        scale[v] = square[v] / max(tile[v], SMALLEST) * scale[v]


@jit()
def _pack(codes: Bytes, bits: int, packed: Bytes) -> None:
    """[head_dim, LANES] codes to [plane bytes, LANES]."""
    groups = len(codes) // LANES // 8
    for p in range(bits):
        bit = np.uint8(1 << (bits - 1 - p))
        for g in range(groups):
            eight = codes[g * 8 * LANES : (g + 1) * 8 * LANES]
            row = packed[(p * groups + g) * LANES : (p * groups + g + 1) * LANES]
            for v in range(LANES):
                byte = np.uint8(0)
                for j in range(8):
                    byte |= np.uint8((eight[j * LANES + v] & bit) != 0) << np.uint8(j)
                row[v] = byte


@jit()
def _unpack(packed: Bytes, bits: int, levels: Floats, tile: Floats) -> None:
    """[plane bytes, LANES] to signed levels [head_dim, LANES]. Selects are several times faster than a table
    here."""
    groups = len(tile) // LANES // 8
    none = np.zeros(LANES, np.uint8)
    l0, l1, l2, l3 = levels[0], levels[1], levels[-2], levels[-1]  # of 2 bits twice the same, whatever `middle` says
    l4, l5, l6, l7 = l0, l1, l2, l3
    if bits == 4:
        l2, l3, l4, l5 = levels[2], levels[3], levels[4], levels[5]
    for g in range(groups):
        sign = packed[g * LANES : (g + 1) * LANES]
        high = packed[(groups + g) * LANES : (groups + g + 1) * LANES] if bits == 4 else none
        middle = packed[((bits - 2) * groups + g) * LANES : ((bits - 2) * groups + g + 1) * LANES]
        low = packed[((bits - 1) * groups + g) * LANES : ((bits - 1) * groups + g + 1) * LANES]
        for j in range(8):
            row = tile[(g * 8 + j) * LANES : (g * 8 + j + 1) * LANES]
            bit = np.uint8(1 << j)
            for v in range(LANES):
                b0, b1, b2 = (low[v] & bit) != 0, (middle[v] & bit) != 0, (high[v] & bit) != 0
                lower = (l3 if b0 else l2) if b1 else (l1 if b0 else l0)
                upper = (l7 if b0 else l6) if b1 else (l5 if b0 else l4)
                level = upper if b2 else lower
                row[v] = -level if (sign[v] & bit) != 0 else level


@jit()
def _round(bits: np.uint32) -> np.uint32:
    """The bf16 bits nearest to float32 bits, ties to even."""
    return (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)


def _encode(x: Any, bf16: bool, tables: Tables, bits: int, scales: Bytes, planes: Bytes) -> int:
    weights, blocks, levels, thresholds, root, _, unbiased = tables
    shift = np.uint32(16 if bf16 else 0)
    dim, width = len(weights), bits * len(weights) // 8
    words, words2 = np.empty(dim * LANES, np.uint32), np.empty(dim * LANES, np.uint32)
    tile, q = words.view(np.float32), words2.view(np.float32)
    codes, packed = np.empty(dim * LANES, np.uint8), np.empty(width * LANES, np.uint8)
    cuts = np.empty(len(thresholds) * LANES, np.float32)
    factor_bits, scale_bits = np.empty(LANES, np.uint32), np.empty(LANES, np.uint32)
    factor, scale = factor_bits.view(np.float32), scale_bits.view(np.float32)
    square = np.empty(LANES, np.float32)
    for first in range(0, len(x), LANES):
        count = min(LANES, len(x) - first)
        _load(x, first, count, shift, words)
        _largest(words, words2)
        bad = _prescale(words2, factor_bits, scale_bits)
        if bad >= 0:
            return first + bad
        for i in range(dim):
            row, weight = tile[i * LANES : (i + 1) * LANES], weights[i]
            for v in range(LANES):
                row[v] = row[v] * factor[v] * weight
        _hadamard(tile, blocks)
        for i in range(dim * LANES):
            q[i] = tile[i] * tile[i]
        _fold(q)
        for v in range(LANES):
            square[v] = q[v]
            rms = np.sqrt(q[v]) * root
            for k in range(len(thresholds)):
                cuts[k * LANES + v] = thresholds[k] * rms
        if bits == 3:
            _quantize3(tile, q, codes, cuts, levels)
        elif bits == 4:
            _quantize4(tile, q, codes, cuts, levels)
        else:
            _quantize(tile, q, codes, cuts, levels)
        _pack(codes, bits, packed)
        for v in range(count):
            for i in range(width):
                planes[(first + v) * width + i] = packed[i * LANES + v]
        if unbiased:
            _scale_unbiased(tile, q, square, scale)
        else:
            _scale_least_squares(tile, q, scale)
        for v in range(count):
            rounded = min(_round(scale_bits[v]), LARGEST_BF16_BITS)
            scales[2 * (first + v)] = rounded & np.uint32(255)
            scales[2 * (first + v) + 1] = rounded >> np.uint32(8)
    return -1


def _decode(scales: Bytes, planes: Bytes, tables: Tables, bits: int, bf16: bool, out: Any) -> int:
    weights, blocks, levels, _, _, largest, _ = tables
    dim, width = len(weights), bits * len(weights) // 8
    words, packed = np.empty(dim * LANES, np.uint32), np.zeros(width * LANES, np.uint8)
    tile = words.view(np.float32)
    scale_bits = np.zeros(LANES, np.uint32)
    scale = scale_bits.view(np.float32)
    for first in range(0, len(out), LANES):
        count = min(LANES, len(out) - first)
        for v in range(count):
            o = 2 * (first + v)
            scale_bits[v] = np.uint32(scales[o]) << np.uint32(16) | np.uint32(scales[o + 1]) << np.uint32(24)
            if scale_bits[v] & EXPONENT == EXPONENT:
                return first + v
            for i in range(width):
                packed[i * LANES + v] = planes[(first + v) * width + i]
        _unpack(packed, bits, levels, tile)
        _hadamard(tile, blocks)
        for i in range(dim):
            row, weight = tile[i * LANES : (i + 1) * LANES], weights[i]
            for v in range(LANES):
                # adding 0 leaves no negative zeros
                row[v] = min(max(row[v] * weight * scale[v], -largest), largest) + np.float32(0)
        if bf16:
            for i in range(dim * LANES):
                words[i] = _round(words[i])
        for v in range(count):
            for i in range(dim):
                out[first + v, i] = words[i * LANES + v]
    return -1


# Inputs are declared read-only, which a writable array may stand for, but not the reverse.
BYTES_IN = types.Array(types.uint8, 1, "C", readonly=True)
FLOATS_IN = types.Array(types.float32, 1, "C", readonly=True)
SIZES_IN = types.Array(types.int64, 1, "C", readonly=True)
TABLES = types.NamedTuple(
    (FLOATS_IN, SIZES_IN, FLOATS_IN, FLOATS_IN, types.float32, types.float32, types.boolean), Tables
)


def _encode_signature(word: Any) -> Any:
    x = types.Array(word, 2, "C", readonly=True)
    return types.int64(x, types.boolean, TABLES, types.int64, types.uint8[::1], types.uint8[::1])


def _decode_signature(word: Any) -> Any:
    return types.int64(BYTES_IN, BYTES_IN, TABLES, types.int64, types.boolean, word[:, ::1])


encode = jit([_encode_signature(types.uint16), _encode_signature(types.uint32)])(_encode)
decode = jit([_decode_signature(types.uint16), _decode_signature(types.uint32)])(_decode)
