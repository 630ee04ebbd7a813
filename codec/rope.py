"""RoPE, the rotation of keys by position (Su et al., 2021), done and undone.

A head's first 2n numbers are n pairs. At position p, pair i is turned by p * frequencies[i] radians, and multiplied by
YaRN's `scale` (Peng et al., 2023). Numbers behind the pairs stay.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from manthan.codec.base import Positions

Floats = npt.NDArray[np.float32]

STEADY = ("default", "linear", "llama3", "yarn", "proportional")
"""Kinds of RoPE with frequencies independent of a prompt's length, by their names in Transformers."""


@dataclass(frozen=True)
class Rope:
    """RoPE of a model."""

    frequencies: tuple[float, ...]  # radians a token, of each pair
    scale: float = 1.0  # factor on turned pairs
    interleaved: bool = False  # True if a pair is two neighbours, False if it is number i of each half of 2n numbers

    @property
    def pairs(self) -> tuple[Any, Any]:
        """Indices of the first and of the second numbers of all pairs in [..., head_dim]."""
        n = len(self.frequencies)
        if self.interleaved:
            return np.s_[..., 0 : 2 * n : 2], np.s_[..., 1 : 2 * n : 2]
        return np.s_[..., :n], np.s_[..., n : 2 * n]

    def tables(self, positions: Positions) -> tuple[Floats, Floats]:
        """Return cosines and sines of the angles, [tokens, pairs] each, without the scale."""
        angles = positions[:, None] * np.array(self.frequencies, np.float64)
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def turn(self, x: Floats, positions: Positions) -> Floats:
        """Turn [..., tokens, head_dim] as the model does. Returns a new array."""
        cos, sin = self.tables(positions)
        return self._turned(x, cos * np.float32(self.scale), sin * np.float32(self.scale))

    def turn_back(self, x: Floats, positions: Positions) -> Floats:
        """Undo `turn`. Returns a new array."""
        cos, sin = self.tables(positions)
        return self._turned(x, cos / np.float32(self.scale), -sin / np.float32(self.scale))

    def average(self, weights: Any) -> None:
        """Set both numbers of each pair in `weights`, [..., head_dim], to their mean, because RoPE mixes them."""
        first, second = self.pairs
        weights[first] = weights[second] = (weights[first] + weights[second]) / 2

    def _turned(self, x: Floats, cos: Floats, sin: Floats) -> Floats:
        turned, (first, second) = x.copy(), self.pairs
        turned[first] = x[first] * cos - x[second] * sin
        turned[second] = x[second] * cos + x[first] * sin
        return turned

    @classmethod
    def of_config(cls, config: Any, head_dim: int, layer_type: str = "") -> Self | None:
        """Return the RoPE of a Transformers configuration. A pair is taken to be number i of each half, as in Llama.

        None for a model without RoPE, for M-RoPE (angles depend on the kind of input), and for a kind not in STEADY.

        config: of the model's text part. head_dim: numbers of a head; the kinds linear, llama3 and yarn read it from
        `config` instead. layer_type: such as sliding_attention. If RoPE differs by type, other types give None.
        """
        parameters = getattr(config, "rope_parameters", None) or {}
        of_layers = isinstance(parameters, Mapping) and isinstance(parameters.get(layer_type), Mapping)
        if of_layers:
            parameters = parameters[layer_type]
        if not isinstance(parameters, Mapping) or any(isinstance(value, Mapping) for value in parameters.values()):
            return None
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        base = parameters.get("rope_theta") or getattr(config, "rope_theta", None)
        if kind not in STEADY or base is None or "mrope_section" in parameters:
            return None
        share = parameters.get("partial_rotary_factor") or 1.0
        if kind == "proportional":  # pairs of the whole head; those from `turned` on stay as they are
            pairs, turned = np.arange(head_dim // 2, dtype=np.float64), int(share * head_dim // 2)
            found = float(base) ** (-2 * pairs / head_dim) / parameters.get("factor", 1.0) * (pairs < turned)
            return cls(tuple(map(float, found)))
        if kind != "default":
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            more = {"layer_type": layer_type} if of_layers else {}
            frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, None, **more)
            return cls(tuple(map(float, frequencies.double().tolist())), float(scale))
        turned = int(head_dim * share)
        return cls(tuple(float(base) ** (-np.arange(0, turned, 2, dtype=np.float64) / turned)))
