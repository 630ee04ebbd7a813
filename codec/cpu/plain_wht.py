"""The transform of `manthan.codec.wht` in plain numpy."""

import numpy as np
import numpy.typing as npt

from manthan.codec.cpu.plain import _fold
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
