"""A profile out of keys and values as they come by: second moments, and a few tokens held back to measure on.

What errors weigh is a metric: a matrix G for keys and one for values of a layer, with which an error e of a token
costs e G e^T. With G = L L^T (Cholesky), x @ L is a space in which all directions cost the same, and the eigenvectors U
of the covariance there give the transform L U: components that do not correlate. One step for all is then best (Goyal,
"Theoretical foundations of transform coding", 2001), of all layers, keys and values. Without metrics, keys stand for
the queries that nobody has seen: a direction weighs what keys differ in it. Nobody knows how layers compare: steps are
as their components' deviations then.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from manthan.codec.base import Dtype, Numbers, Positions
from manthan.codec.cpu.numbers import as_floats
from manthan.codec.cpu.rans import streams_of
from manthan.codec.errors import ProfileError
from manthan.codec.profile import PRESETS, Basis, LayerProfile, Profile, ProfileInfo, rank_heads
from manthan.codec.tables.frequencies import ESCAPE, LARGEST, costs, family

HELD_BACK = 5
"""Of so many tokens that come in one call, the last is held back."""
SAMPLE = 2048
"""Tokens that are held back at most, of each layer."""
BLOCK = 16
"""Tokens of the block that a preset's size is reckoned for: the smallest that is usual."""
HEADER = 256
"""Bytes of such a block's header and entries."""
MARGIN = 1.045
"""A preset is made so much smaller than its name says: another text takes a little more."""
EVEN = 0.001
"""What every direction weighs at least, of what they do on average."""
EVEN_OF_KEYS = 0.3
"""The same of keys, where they stand for queries."""
SHARES = (1.0, 2.0)
"""Steps of keys and of values without a metric, relative to the deviation of their layer's components."""
HALVINGS = 7
"""Of the interval in which a step is looked for."""
FEW = 8
"""A step is looked for with each eighth of the tokens held back, and then set right with all of them."""

Doubles = npt.NDArray[np.float64]
Floats = npt.NDArray[np.float32]


@dataclass
class _Moments:
    """Of rows x [C] of one layer's keys or values. asked: they are keys, which queries are compared with."""

    size: int
    asked: bool
    tokens: int = 0
    sums: Doubles = field(init=False)
    products: Doubles = field(init=False)
    weights: Doubles | None = None
    held: list[Floats] = field(default_factory=list)
    held_tokens: int = 0
    every: int = 1

    def __post_init__(self) -> None:
        self.sums, self.products = np.zeros(self.size), np.zeros((self.size, self.size))

    def add(self, x: Floats) -> None:
        kept = len(x) - len(x) // HELD_BACK
        rows = x[:kept].astype(np.float64)
        self.tokens += kept
        self.sums += rows.sum(0)
        self.products += rows.T @ rows
        self._hold(x[kept :: self.every])

    def _hold(self, rows: Floats) -> None:
        self.held.append(rows.copy())
        self.held_tokens += len(rows)
        if self.held_tokens > SAMPLE:
            thinner = np.concatenate(self.held)[::2]
            self.held, self.held_tokens, self.every = [thinner], len(thinner), 2 * self.every

    @property
    def mean(self) -> Doubles:
        made: Doubles = self.sums / self.tokens
        return made

    def weight(self, at: slice) -> float | None:
        """Of a number, on average; None where nobody knows."""
        return None if self.weights is None else float(np.trace(self.weights[at, at])) / (at.stop - at.start)

    def metric(self, at: slice) -> Doubles:
        """1 on average."""
        even = np.eye(at.stop - at.start)
        if self.weights is None:
            return _evened(self.covariance(at), EVEN_OF_KEYS) if self.asked else even
        return _evened(self.weights[at, at], EVEN)

    def covariance(self, at: slice) -> Doubles:
        mean = self.mean[at]
        made: Doubles = self.products[at, at] / self.tokens - np.outer(mean, mean)
        return made


def _evened(weights: Doubles, least: float) -> Doubles:
    """1 on average, and so much more in each direction."""
    mean = float(np.trace(weights)) / len(weights)
    made: Doubles = weights / (mean or 1.0) + least * np.eye(len(weights))
    return made


class ProfileBuilder:
    """info: of the model whose KV comes; its tokens and ratios are filled in. sinks: first tokens of every chain that
    are kept exact, and so do not count."""

    def __init__(self, info: ProfileInfo, sinks: int = 4) -> None:
        self._info, self.sinks = info, sinks
        size = info.heads * info.head_dim
        self._layers = [(_Moments(size, True), _Moments(size, False)) for _ in range(info.layers)]

    @property
    def tokens(self) -> int:
        """That the layer with the fewest has seen, without those held back."""
        return min(keys.tokens for keys, _ in self._layers)

    def add(
        self, layer: int, keys: Numbers, values: Numbers, positions: Positions, dtype: Dtype = Dtype.BFLOAT16
    ) -> None:
        """Keys, as the cache has them, and values [heads, tokens, head_dim] of one layer. positions: [tokens], of one
        chain. dtype: see `as_floats`. Numbers that are not finite are left out with their token."""
        k, v = as_floats(keys, dtype), as_floats(values, dtype)
        if self._info.rope is not None:
            k = self._info.rope.turn_back(k, positions)
        rows = tuple(x.transpose(1, 0, 2).reshape(len(positions), -1) for x in (k, v))
        good = (positions >= self.sinks) & np.isfinite(rows[0]).all(1) & np.isfinite(rows[1]).all(1)
        for moments, x in zip(self._layers[layer], rows, strict=True):
            moments.add(x[good])

    def weigh(self, layer: int, keys: Doubles, values: Doubles) -> None:
        """Add to the metrics of a layer, [C, C]: of keys before RoPE, and of values; of all layers in one measure."""
        for moments, weights in zip(self._layers[layer], (keys, values), strict=True):
            moments.weights = weights + (0 if moments.weights is None else moments.weights)

    def finish(self, *, ranks: int = 1, presets: Mapping[str, float] = PRESETS) -> Profile:
        """presets: names, and how many times smaller than bf16 each is to be. ProfileError: too few tokens."""
        size = self._info.heads * self._info.head_dim
        if self.tokens < size:
            raise ProfileError(f"{self.tokens} tokens do not calibrate {size} numbers: at least as many tokens do.")
        made, sizes = [], dict.fromkeys(presets, 0.0)
        for rank in range(ranks):
            heads = rank_heads(self._info.heads, rank, ranks)
            at = slice(heads.start * self._info.head_dim, heads.stop * self._info.head_dim)
            sources = [
                _Source(_basis(moments, at), moments, at, share)
                for layer in self._layers
                for moments, share in zip(layer, SHARES, strict=True)
            ]
            for preset, ratio in presets.items():
                sizes[preset] += _set_steps(sources, preset, ratio) / ranks
            bases = [source.basis for source in sources]
            made.append([LayerProfile(*pair) for pair in zip(bases[::2], bases[1::2], strict=True)])
        ratios = {preset: 16 / bits for preset, bits in sizes.items()}
        return Profile.of(replace(self._info, tokens=self.tokens, ratios=ratios), family(), made)


class _Source:
    """A basis with the components of tokens that were held back. step: in proportion to the others'. front: bits of a
    token that a row takes beside its words."""

    def __init__(self, basis: Basis, moments: _Moments, at: slice, share: float) -> None:
        self.basis = basis
        held: Floats = np.concatenate(moments.held)[:, at]
        self.y = ((held - basis.mean) @ basis.forward).astype(np.float32)
        self.front = 8 * (2 + 4 * streams_of(BLOCK * self.y.shape[1])) / BLOCK
        deviation, weight = float(np.sqrt(np.square(self.y).mean())), moments.weight(at)
        self.step = (share * deviation if weight is None else weight and weight**-0.5) or 1.0

    def coded(self, step: float, every: int = 1) -> tuple[float, npt.NDArray[np.uint8]]:
        """Bits a token, and the cheapest tables, of each so-manieth token."""
        y = self.y[::every]
        q = np.rint(y / np.float32(step))
        symbols = np.where(np.abs(q) <= LARGEST, q + LARGEST, ESCAPE).astype(np.int64)
        size = q.shape[1]
        counts = np.bincount((symbols + 256 * np.arange(size)).ravel(), minlength=256 * size).reshape(size, 256)
        bits = counts @ _costs().T
        tables = bits.argmin(1).astype(np.uint8)
        return float(bits.min(1).sum() / len(y)), tables


@lru_cache
def _costs() -> Doubles:
    """Made when they are needed: it takes a second or two."""
    return costs(family())


def _basis(moments: _Moments, at: slice) -> Basis:
    root = np.linalg.cholesky(moments.metric(at))
    _, directions = np.linalg.eigh(root.T @ moments.covariance(at) @ root)
    forward = root @ directions[:, ::-1]
    scale = np.linalg.norm(forward, axis=1)
    transform = (forward / scale[:, None]).astype(np.float16)
    return Basis(moments.mean[at].astype(np.float32), scale.astype(np.float32), transform)


def _smallest(bits: Callable[[float], float], wanted: float, start: float, times: float) -> float:
    """The smallest factor that takes no more bits than are wanted; looked for in strides of so many times."""
    low = high = start
    while bits(high) > wanted:
        low, high = high, times * high
    while low > 0 and bits(low) <= wanted:
        low, high = low / times, low
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if bits(middle) > wanted else (low, middle)
    return high


def _set_steps(sources: Sequence[_Source], preset: str, ratio: float) -> float:
    """Give each basis its step and tables, all steps in proportion; bits a number."""
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
