"""Profile of a model from the keys and values, or the latents: second moments, and tokens held back for measuring.

A metric gives the cost of errors: a matrix G for keys and a matrix for values of a layer. An error e of a token costs e
G e^T. With G = L L^T (Cholesky), all directions of x @ L cost the same. The eigenvectors U of the covariance of x @ L
give the transform L U, with uncorrelated components. A common step is then best for all layers, keys and values (Goyal,
"Theoretical foundations of transform coding", 2001). Without metrics, keys stand for the unseen queries: a direction
weighs by the keys' spread in the direction. Layers then cannot be compared, and steps are in proportion to their
components' deviations.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from manthan.codec.base import Positions
from manthan.codec.cpu.rans import streams_of
from manthan.codec.errors import ProfileError
from manthan.codec.profile import PRESETS, Basis, Profile, ProfileInfo, layers_of, rank_heads
from manthan.codec.tables.frequencies import ESCAPE, LARGEST, costs, family

SINKS = 4
"""First tokens of a text, kept exact and not counted."""
HELD_BACK = 5
"""Every fifth token of a call is held back."""
SAMPLE = 2048
"""Most held back tokens of a layer."""
BLOCK = 16
"""Tokens of the block for a preset's size: the smallest usual block."""
HEADER = 256
"""Bytes of the block's header and entries."""
MARGIN = 1.045
"""Factor by which a preset is smaller than the name says, because different texts take a little more."""
EVEN = 0.001
"""Least weight of a direction, in parts of the average."""
EVEN_OF_KEYS = 0.3
"""Least weight of a direction of keys as stand-ins for queries."""
SHARES = (1.0, 2.0)
"""Steps of keys and of values without a metric, in deviations of their layer's components."""
HALVINGS = 7
"""Halvings of the interval in the search of a step."""
FEW = 8
"""A step is searched with each eighth of the tokens held back, and then corrected with all."""

Doubles = npt.NDArray[np.float64]
Floats = npt.NDArray[np.float32]


class _Moments:
    """Moments of rows [C] of a layer's keys, values or latents. are_keys: True for rows that meet queries."""

    def __init__(self, size: int, are_keys: bool) -> None:
        self.are_keys, self.tokens, self.every = are_keys, 0, 1
        self.sums, self.products = np.zeros(size), np.zeros((size, size))
        self.held = np.zeros((0, size), np.float32)
        self.weights: Doubles | None = None

    def add(self, x: Floats) -> None:
        kept = len(x) - len(x) // HELD_BACK
        rows = x[:kept].astype(np.float64)
        self.tokens += kept
        self.sums += rows.sum(0)
        self.products += rows.T @ rows
        self.held = np.concatenate([self.held, x[kept :: self.every]])
        if len(self.held) > SAMPLE:
            self.held, self.every = self.held[::2], 2 * self.every

    def weight(self, at: slice) -> float | None:
        """Average weight of a number; None without a metric."""
        return None if self.weights is None else float(np.trace(self.weights[at, at])) / (at.stop - at.start)

    def metric(self, at: slice) -> Doubles:
        """Metric of the numbers at `at`, 1 on average."""
        if self.weights is not None:
            return _evened(self.weights[at, at], EVEN)
        return _evened(self.covariance(at), EVEN_OF_KEYS) if self.are_keys else np.eye(at.stop - at.start)

    def covariance(self, at: slice) -> Doubles:
        mean = self.sums[at] / self.tokens
        made: Doubles = self.products[at, at] / self.tokens - np.outer(mean, mean)
        return made


def _evened(weights: Doubles, least: float) -> Doubles:
    """Scale weights to 1 on average, and add `least` to each direction."""
    mean = float(np.trace(weights)) / len(weights)
    made: Doubles = weights / (mean or 1.0) + least * np.eye(len(weights))
    return made


class ProfileBuilder:
    """Builds the profile of the model of `info`, and fills in tokens and ratios."""

    def __init__(self, info: ProfileInfo) -> None:
        self._info = info
        size = info.heads * info.head_dim
        kinds = (False,) if info.latent else (True, False)
        self._layers = [[_Moments(size, are_keys) for are_keys in kinds] for _ in range(info.layers)]

    @property
    def tokens(self) -> int:
        """Tokens seen by the layer with the fewest, without held back tokens."""
        return min(moments[0].tokens for moments in self._layers)

    def add(self, layer: int, positions: Positions, *parts: Floats) -> None:
        """Add keys and values of a layer, or latents. Tokens with a non-finite number are left out.

        Args:
            layer: number of the layer.
            positions: [tokens], of a single text.
            parts: keys and values, or latents, [heads, tokens, head_dim], keys behind RoPE as in the cache.
        """
        first, *others = parts
        turned_back = first if self._info.rope is None else self._info.rope.turn_back(first, positions)
        rows = [x.transpose(1, 0, 2).reshape(len(positions), -1) for x in (turned_back, *others)]
        good = (positions >= SINKS) & np.logical_and.reduce([np.isfinite(x).all(1) for x in rows])
        for moments, x in zip(self._layers[layer], rows, strict=True):
            moments.add(x[good])

    def weigh(self, layer: int, *metrics: Doubles) -> None:
        """Set the metrics of a layer, [C, C]: of keys before RoPE and of values, or of latents.

        All layers are in the same measure.
        """
        for moments, weights in zip(self._layers[layer], metrics, strict=True):
            moments.weights = weights

    def finish(self, *, ranks: int = 1, presets: Mapping[str, float] = PRESETS) -> Profile:
        """Make the profile. Raises ProfileError for too few tokens.

        Args:
            ranks: number of tensor-parallel ranks. Latents are the same on all ranks.
            presets: by name, the target ratio of bf16 bytes to encoded bytes.
        """
        size = self._info.heads * self._info.head_dim
        if self.tokens < size:
            raise ProfileError(f"{self.tokens} tokens do not calibrate {size} numbers: at least as many tokens do.")
        made, sizes, ranks = [], dict.fromkeys(presets, 0.0), 1 if self._info.latent else ranks
        for rank in range(ranks):
            heads = rank_heads(self._info.heads, rank, ranks)
            at = slice(heads.start * self._info.head_dim, heads.stop * self._info.head_dim)
            sources = [
                _Source(moments, at, share)
                for layer in self._layers
                for moments, share in zip(layer, SHARES, strict=False)
            ]
            for preset, ratio in presets.items():
                sizes[preset] += _set_steps(sources, preset, ratio) / ranks
            made.append(layers_of([source.basis for source in sources], self._info))
        ratios = {preset: 16 / bits for preset, bits in sizes.items()}
        return Profile.of(replace(self._info, tokens=self.tokens, ratios=ratios), family(), made)


class _Source:
    """Basis of some numbers, and the components y of the held back tokens.

    step: in proportion to all sources' steps.
    front: bits of a token in a row ahead of the words.
    """

    def __init__(self, moments: _Moments, at: slice, share: float) -> None:
        root = np.linalg.cholesky(moments.metric(at))
        _, directions = np.linalg.eigh(root.T @ moments.covariance(at) @ root)
        forward = root @ directions[:, ::-1]
        scale = np.linalg.norm(forward, axis=1)
        transform = (forward / scale[:, None]).astype(np.float16)
        mean = (moments.sums / moments.tokens)[at].astype(np.float32)
        self.basis = Basis(mean, scale.astype(np.float32), transform)
        self.y = ((moments.held[:, at] - mean) @ self.basis.forward).astype(np.float32)
        self.front = 8 * (2 + 4 * streams_of(BLOCK * self.y.shape[1])) / BLOCK
        deviation, weight = float(np.sqrt(np.square(self.y).mean())), moments.weight(at)
        self.step = (share * deviation if weight is None else weight and weight**-0.5) or 1.0

    def coded(self, step: float, every: int = 1) -> tuple[float, npt.NDArray[np.uint8]]:
        """Return bits a token and the cheapest tables, by each `every`-th token."""
        y = self.y[::every]
        q = np.rint(y / np.float32(step))
        symbols = np.where(np.abs(q) <= LARGEST, q + LARGEST, ESCAPE).astype(np.int64)
        size = q.shape[1]
        counts = np.bincount((symbols + 256 * np.arange(size)).ravel(), minlength=256 * size).reshape(size, 256)
        bits = counts @ _costs().T
        return float(bits.min(1).sum() / len(y)), bits.argmin(1).astype(np.uint8)


@lru_cache
def _costs() -> Doubles:
    """Costs of all tables, made on demand because the computation takes a second or two."""
    return costs(family())


def _smallest(bits: Callable[[float], float], wanted: float, start: float, stride: float) -> float:
    """Return the smallest factor within the wanted bits, searched from `start` by factors of `stride`."""
    low = high = start
    while bits(high) > wanted:
        low, high = high, stride * high
    while low > 0 and bits(low) <= wanted:
        low, high = low / stride, low
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if bits(middle) > wanted else (low, middle)
    return high


def _set_steps(sources: Sequence[_Source], preset: str, ratio: float) -> float:
    """Give each basis a step and tables, with all steps in proportion. Returns bits a number."""
    numbers = sum(source.y.shape[1] for source in sources)
    wanted = 16 / (ratio * MARGIN)

    def bits(factor: float, every: int = 1) -> float:
        coded = sum(source.coded(factor * source.step, every)[0] + source.front for source in sources)
        return float((coded + 8 * HEADER / BLOCK) / numbers)

    def some(factor: float) -> float:
        return bits(factor, FEW)

    high = _smallest(some, wanted, 0.5, 2)
    hidden = bits(high) - some(high)  # tables fit a few tokens better than they fit all
    high = _smallest(some, wanted - hidden, high, 1.05)
    for source in sources:
        step = float(np.float32(high * source.step))
        steps, tables = source.basis.steps | {preset: step}, source.basis.tables | {preset: source.coded(step)[1]}
        source.basis = replace(source.basis, steps=steps, tables=tables)
    return bits(high)
