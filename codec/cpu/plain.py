"""Encoding and decoding in plain numpy, for machines without numba; the formulas of `manthan.codec.base` in
their order.

CHUNK vectors at a time, transposed to [head_dim, CHUNK], so that the temporaries stay in the second-level
cache and each step runs over contiguous memory.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from manthan.codec.tables.constants import Tables
from manthan.codec.tables.rotation import hadamard_

CHUNK = 256
EXPONENT = np.uint32(0x7F800000)
MAGNITUDE = np.uint32(0x7FFFFFFF)
SMALLEST = np.float32(2.0**-126)

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]
Bytes = npt.NDArray[np.uint8]


def encode(x: Any, bf16: bool, tables: Tables, bits: int, scales: Bytes, planes: Bytes) -> int:
    """Encode [n, head_dim] uint16 or uint32, the bits of bf16 or float32; the first non-finite vector's
    index, or -1."""
    dim = len(tables.weights)
    all_scales, all_planes = scales.view("<u2"), planes.reshape(len(x), bits, dim // 8)
    magnitudes = np.concatenate([tables.levels, tables.levels])  # by code: the sign is its highest bit
    for first in range(0, len(x), CHUNK):
        part = slice(first, first + CHUNK)
        words = np.ascontiguousarray(x[part].T).astype(np.uint32) << np.uint32(16 * bf16)
        top = (words & MAGNITUDE).max(axis=0)
        if (top >= EXPONENT).any():
            return first + int((top >= EXPONENT).argmax())
        power = np.clip(254 - (top >> np.uint32(23)).astype(np.int32), 8, 254) - 127
        y, scratch = words.view(np.float32), np.empty(words.shape, np.float32)
        y *= np.ldexp(np.float32(1), power)
        y *= tables.weights[:, None]
        hadamard_(y, scratch, tables.blocks)
        square = _fold(np.multiply(y, y, out=scratch))
        rms = np.sqrt(square) * tables.root
        code = (y < 0).view(np.uint8) << np.uint8(bits - 1)
        np.abs(y, out=y)
        for threshold in tables.thresholds:
            code += y > threshold * rms
        q = np.take(magnitudes, code, out=scratch, mode="clip")
        y *= q
        q *= q
        ratio = square / np.maximum(_fold(y), SMALLEST) if tables.unbiased else _fold(y) / _fold(q)
        with np.errstate(over="ignore"):
            scale = ratio * np.ldexp(np.float32(1), -power)
        all_scales[part] = np.minimum(_round(scale.view(np.uint32)), 0x7F7F)
        rows = np.ascontiguousarray(code.T)
        for p in range(bits):
            all_planes[part, p] = np.packbits(rows & np.uint8(1 << (bits - 1 - p)), axis=1, bitorder="little")
    return -1


def decode(scales: Bytes, planes: Bytes, tables: Tables, bits: int, bf16: bool, out: Any) -> int:
    """Decode to [n, head_dim] uint16 or uint32, the bits of bf16 or float32; the first non-finite scale's
    index, or -1."""
    dim = len(tables.weights)
    all_scales = scales.view("<u2").astype(np.uint32) << np.uint32(16)
    infinite = (all_scales & EXPONENT) == EXPONENT
    if infinite.any():
        return int(infinite.argmax())
    all_planes = planes.reshape(len(out), bits, dim // 8)
    signed = np.concatenate([tables.levels, -tables.levels])
    for first in range(0, len(out), CHUNK):
        part = slice(first, first + CHUNK)
        code = np.zeros((len(out[part]), dim), np.uint8)
        for p in range(bits):
            code += code
            code += np.unpackbits(all_planes[part, p], axis=1, bitorder="little")
        x = np.take(signed, np.ascontiguousarray(code.T))
        hadamard_(x, np.empty_like(x), tables.blocks)
        x *= tables.weights[:, None]
        with np.errstate(over="ignore"):
            x *= all_scales[part].view(np.float32)
        np.clip(x, -tables.largest, tables.largest, out=x)
        x += np.float32(0)  # no negative zeros
        words = x.view(np.uint32)
        out[part] = (_round(words) if bf16 else words).T
    return -1


def _fold(rows: Floats) -> Floats:
    """Fold each run of 8 rows, then the runs. Overwrites rows; returns [columns]."""
    sums = rows.reshape(len(rows) // 8, 8, -1)
    for half in (4, 2, 1):
        sums[:, :half] += sums[:, half : 2 * half]
    sums = np.ascontiguousarray(sums[:, 0])
    while len(sums) > 1:
        half = (len(sums) + 1) // 2
        sums[: len(sums) - half] += sums[half:]
        sums = sums[:half]
    total: Floats = sums[0]
    return total


def _round(words: Words) -> Words:
    """The bf16 bits nearest to float32 bits, ties to even."""
    return (words + np.uint32(0x7FFF) + ((words >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
