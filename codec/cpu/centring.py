"""A run's mean before RoPE, taken off and put back, in plain numpy; the formulas of `manthan.codec.centred` in their
order.

CHUNK runs at a time, so that the temporaries stay in the second-level cache.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from manthan.codec.centred import LIMIT_BITS, Mean
from manthan.codec.rope import Floats

CHUNK = 16
MAGNITUDE = np.uint32(0x7FFFFFFF)
SMALLEST = np.float32(2.0**-126)

Bytes = npt.NDArray[np.uint8]


def centre(x: Any, bf16: bool, cos: Floats, sin: Floats, mean: Mean, steps: Bytes, means: Bytes, out: Floats) -> int:
    """Take the means off [runs, tokens, head_dim] uint16 or uint32, the bits of bf16 or float32; the first vector that
    is too large or not finite, or -1.

    cos, sin: [tokens, pairs]. steps, means: written, see `manthan.codec.centred`. out: of x's shape, written.
    """
    runs, tokens, dim = x.shape
    all_steps, all_means = steps.view("<u2"), means.reshape(runs, mean.bits, dim // 8)
    for first in range(0, runs, CHUNK):
        part = slice(first, first + CHUNK)
        words = x[part].astype(np.uint32) << np.uint32(16 * bf16)
        bad = ((words & MAGNITUDE) >= LIMIT_BITS).any(axis=2).ravel()
        if bad.any():
            return int(first * tokens + bad.argmax())
        keys = words.view(np.float32)
        average = _fold(_turned(keys, cos, -sin)) * np.float32(1 / tokens)
        rounded = _round((np.abs(average).max(axis=1) * mean.inverse).view(np.uint32))
        step = np.where(rounded < 1 << 7, 0, rounded).astype(np.uint16)
        code = _codes(average, step, mean)
        all_steps[part], all_means[part] = step, _pack(code, mean.bits)
        out[part] = keys - _turned((code * _wide(step)[:, None])[:, None], cos, sin)
    return -1


def uncentre(
    x: Floats,
    cos: Floats,
    sin: Floats,
    mean: Mean,
    steps: Bytes,
    means: Bytes,
    bf16: bool,
    largest: np.float32,
    out: Any,
) -> None:
    """Put the means back: [runs, tokens, head_dim] float32 to uint16 or uint32, the bits of bf16 or float32."""
    runs, _, dim = x.shape
    all_steps, all_means = steps.view("<u2"), means.reshape(runs, mean.bits, dim // 8)
    for first in range(0, runs, CHUNK):
        part = slice(first, first + CHUNK)
        kept = _unpack(all_means[part], mean.bits) * _wide(all_steps[part])[:, None]
        y = x[part] + _turned(kept[:, None], cos, sin)
        np.clip(y, -largest, largest, out=y)
        y += np.float32(0)  # no negative zeros
        words = y.view(np.uint32)
        out[part] = _round(words) if bf16 else words


def _turned(x: Floats, cos: Floats, sin: Floats) -> Floats:
    """[runs, tokens or 1, head_dim] turned: a new array of all tokens. With -sin, turned back."""
    n = cos.shape[1]
    turned = np.empty((len(x), len(cos), x.shape[2]), np.float32)
    first, second = x[:, :, :n], x[:, :, n : 2 * n]
    turned[:, :, :n] = first * cos - second * sin
    turned[:, :, n : 2 * n] = second * cos + first * sin
    turned[:, :, 2 * n :] = x[:, :, 2 * n :]
    return turned


def _fold(rows: Floats) -> Floats:
    """The sum over tokens, [runs, head_dim]. Overwrites rows."""
    n = rows.shape[1]
    while n > 1:
        half = (n + 1) // 2
        rows[:, : n - half] += rows[:, half:n]
        n = half
    total: Floats = rows[:, 0]
    return total


def _codes(average: Floats, step: npt.NDArray[np.uint16], mean: Mean) -> Floats:
    """Whole numbers, [runs, head_dim]."""
    code: Floats = np.rint(average / np.maximum(_wide(step), SMALLEST)[:, None])
    np.clip(code, -mean.top, mean.top, out=code)
    code[step == 0] = 0
    code += np.float32(0)  # no negative zeros
    return code


def _pack(code: Floats, bits: int) -> Bytes:
    """[runs, head_dim] to planes [runs, bits, head_dim / 8]."""
    whole = np.abs(code).astype(np.uint8) | ((code < 0).astype(np.uint8) << np.uint8(bits - 1))
    planes = [whole & np.uint8(1 << (bits - 1 - p)) for p in range(bits)]
    return np.packbits(np.stack(planes, axis=1), axis=2, bitorder="little")


def _unpack(planes: Bytes, bits: int) -> Floats:
    digits = np.unpackbits(planes, axis=2, bitorder="little")
    magnitude = np.zeros(digits[:, 0].shape, np.float32)
    for p in range(1, bits):
        magnitude = magnitude * np.float32(2) + digits[:, p]
    return np.where(digits[:, 0] > 0, -magnitude, magnitude)


def _wide(bf16: npt.NDArray[np.uint16]) -> Floats:
    return (bf16.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _round(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """The bf16 bits nearest to float32 bits, ties to even."""
    return (words + np.uint32(0x7FFF) + ((words >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
