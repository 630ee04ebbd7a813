"""The part of a codec that takes the keys' means off and puts them back; see `manthan.codec.centred`."""

from functools import lru_cache
from types import ModuleType

import numpy as np

from manthan.codec.base import Codes, Numbers, Positions
from manthan.codec.centred import LIMIT, STEP_END, Mean, halves
from manthan.codec.cpu import centring
from manthan.codec.errors import NonFiniteError
from manthan.codec.rope import Floats, Rope
from manthan.codec.tables.constants import LARGEST_BF16

NO_ROPE = Rope(())


class Means:
    """Of keys before RoPE, mean_bits a number. rope: how the model turns its keys; with None, the mean is that of the
    keys as they are. fused: True for the numba kernels, False for plain numpy,
    None for whichever is there."""

    def __init__(self, mean_bits: int, head_dim: int, rope: Rope | None, *, fused: bool | None = None) -> None:
        self.mean = Mean.of(mean_bits)
        self._rope = rope or NO_ROPE
        self._order = halves(rope, head_dim)
        self._fused = fused

    def warm_up(self) -> None:
        """Compile the kernels, or load them from numba's cache."""
        self._kernels()

    def take_off(self, x: Numbers, positions: Positions, steps: Codes, planes: Codes) -> Floats:
        """Keys [runs, tokens, head_dim], uint16 holding bf16 or float32, without their means, pairs of numbers as
        halves. steps, planes: written. Raises NonFiniteError, for keys of 2**LIMIT and more too."""
        cos, sin = self._rope.tables(positions)
        ordered = np.require(x if self._order is None else x[:, :, self._order], requirements=["C", "A"])
        bf16 = x.dtype == np.uint16
        out = np.empty(x.shape, np.float32)
        words = ordered if bf16 else ordered.view(np.uint32)
        bad = self._kernels().centre(words, bf16, cos, sin, self.mean, steps, planes, out)
        if bad >= 0:
            raise NonFiniteError(
                f"vector {bad} holds a NaN, an infinity or a number of 2**{LIMIT} and more, and cannot be encoded.", bad
            )
        return out

    def put_back(self, x: Floats, positions: Positions, steps: Codes, planes: Codes, out: Numbers) -> None:
        """The opposite, into `out`. Raises NonFiniteError for a step that no encoder writes."""
        bad = steps.view("<u2") >= STEP_END
        if bad.any():
            run = int(bad.argmax())
            raise NonFiniteError(f"the mean of run {run} is not finite, or too large: the codes are damaged.", run)
        made = out if self._order is None else np.empty_like(out)
        bf16 = out.dtype == np.uint16
        words = made if bf16 else made.view(np.uint32)
        tables = self._rope.tables(positions)
        self._kernels().uncentre(x, *tables, self.mean, steps, planes, bf16, LARGEST_BF16, words)
        if self._order is not None:
            out[:, :, self._order] = made

    def _kernels(self) -> ModuleType:
        return centring if self._fused is False else _numba_centring() or centring


@lru_cache
def _numba_centring() -> ModuleType | None:
    try:
        from manthan.codec.cpu import numba_centring
    except ImportError:
        return None
    return numba_centring
