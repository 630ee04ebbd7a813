"""The transform of `manthan.codec.wht` in plain numpy: an oracle for what numba compiles."""

from typing import Any

import numpy as np
import numpy.typing as npt

from manthan.codec.k3v3 import fold_eights as _fold
from manthan.codec.rope import Floats
from manthan.codec.tables.rotation import hadamard_


def rotated(x: Floats, weights: Floats, blocks: npt.NDArray[np.int64]) -> tuple[Floats, Floats]:
    """[runs, tokens, head_dim] to y [runs, head_dim, tokens], and fold(y * y), [runs, tokens]."""
    runs, tokens, dim = x.shape
    y: Floats = np.ascontiguousarray(x.reshape(-1, dim).T) * weights[:, None]
    scratch = np.empty_like(y)
    hadamard_(y, scratch, blocks)
    energies = _fold(np.multiply(y, y, out=scratch)).reshape(runs, tokens)
    return np.ascontiguousarray(y.reshape(dim, runs, tokens).transpose(1, 0, 2)), energies


def unrotated(q: npt.NDArray[np.int16], steps: Floats, weights: Floats, blocks: npt.NDArray[np.int64]) -> Floats:
    """[runs, head_dim, tokens] to hadamard(q) * w * step, [runs, tokens, head_dim]. steps: [runs, tokens]."""
    runs, dim, tokens = q.shape
    x: Floats = np.ascontiguousarray(q.transpose(1, 0, 2)).reshape(dim, -1).astype(np.float32)
    hadamard_(x, np.empty_like(x), blocks)
    x *= weights[:, None]
    with np.errstate(over="ignore"):
        x *= steps.ravel()
    return np.ascontiguousarray(x.T).reshape(runs, tokens, dim)


def turned_back(words: Any, bf16: bool, cos: Floats, sin: Floats) -> Floats:
    """Turn keys [runs, tokens, head_dim], bits of bf16 (uint16) or float32 (uint32), by angles with these sines."""
    return _turned((words.astype(np.uint32) << np.uint32(16 * bf16)).view(np.float32), cos, sin)


def turned(x: Floats, cos: Floats, sin: Floats, bf16: bool, largest: np.float32, out: Any) -> None:
    """Keys [runs, tokens, head_dim] behind RoPE, as bits of bf16 or float32: within +-largest, no negative zeros."""
    with np.errstate(over="ignore", invalid="ignore"):
        y = _turned(x, cos, sin)
    np.clip(y, -largest, largest, out=y)
    y += np.float32(0)
    words = y.view(np.uint32)
    out[:] = _round(words) if bf16 else words


def products(x: Floats, y: Floats) -> Floats:
    """fold(x * y) of [runs, head_dim, tokens]."""
    runs, dim, tokens = x.shape
    return _fold(np.ascontiguousarray((x * y).transpose(1, 0, 2)).reshape(dim, -1)).reshape(runs, tokens)


def _turned(x: Floats, cos: Floats, sin: Floats) -> Floats:
    """Turn [runs, tokens, head_dim] by angles: a new array."""
    n = cos.shape[1]
    turned = x.copy()
    first, second = x[:, :, :n], x[:, :, n : 2 * n]
    turned[:, :, :n] = first * cos - second * sin
    turned[:, :, n : 2 * n] = second * cos + first * sin
    return turned


def _round(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """The bf16 bits nearest to float32 bits, ties to even."""
    return (words + np.uint32(0x7FFF) + ((words >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
