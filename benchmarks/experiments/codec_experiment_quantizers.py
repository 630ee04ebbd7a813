"""Scales and quantizers for rotated vectors, most of them in no codec: what `codec_experiment` tries."""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from manthan.codec.tables.lloyd_max import lloyd_max

Quantizer = Callable[[Tensor], Tensor]
"""Rotated vectors of mean square 1, as rows, to their levels."""
Scale = Callable[[Tensor, Tensor], Tensor]
"""Rotated vectors and their levels to [..., 1], what the levels are multiplied by."""


# -- scales ---------------------------------------------------------------------------------------------


def least_squares(y: Tensor, q: Tensor) -> Tensor:
    """The least error; what comes back is shorter than what was stored."""
    return _dot(y, q) / _dot(q, q)


def same_norm(y: Tensor, q: Tensor) -> Tensor:
    """What comes back is as long as what was stored."""
    return (_dot(y, y) / _dot(q, q)).sqrt()


def unbiased(y: Tensor, q: Tensor) -> Tensor:
    """What comes back, projected on what was stored, is what was stored: the error is orthogonal to the vector.

    J. Gao, C. Long, "RaBitQ: quantizing high-dimensional vectors with a theoretical error bound for approximate
    nearest neighbor search", SIGMOD 2024.
    """
    return _dot(y, y) / _dot(y, q)


def times(factor: float) -> Scale:
    """The least-squares scale times this."""
    return lambda y, q: factor * least_squares(y, q)


# -- quantizers -----------------------------------------------------------------------------------------


def lloyd(bits: int) -> Quantizer:
    """2**bits levels for N(0, 1), as the codecs have them."""
    levels, thresholds = (torch.tensor(part) for part in lloyd_max(bits))

    def quantize(u: Tensor) -> Tensor:
        magnitude = levels[torch.bucketize(u.abs(), thresholds)] if len(thresholds) else levels.expand_as(u)
        return torch.copysign(magnitude, u)

    return quantize


def halves(first: int, second: int) -> Quantizer:
    """Lloyd-Max with another number of bits for each half of the rotated numbers."""
    one, other = lloyd(first), lloyd(second)
    return lambda u: torch.cat([one(u[..., : u.shape[-1] // 2]), other(u[..., u.shape[-1] // 2 :])], -1)


def dithered(bits: int) -> Quantizer:
    """Uniform levels under a subtractive dither, fixed for each position: the error does not depend on the number."""
    steps = torch.linspace(0.3, 1.5, 121)
    sample = torch.randn(1 << 16, generator=_seeded())

    def rounded(u: Tensor, step: Tensor, dither: Tensor) -> Tensor:
        top = 2 ** (bits - 1) - 0.5
        return (((u + dither) / step - 0.5).round() + 0.5).clamp(-top, top) * step - dither

    noise = torch.rand(sample.shape, generator=_seeded(1)) - 0.5
    best = min(steps, key=lambda step: float((rounded(sample, step, noise * step) - sample).square().mean()))
    return lambda u: rounded(u, best, best * (torch.rand(u.shape[-1], generator=_seeded(2)) - 0.5))


def entropy_coded(bits: float) -> Quantizer:
    """Uniform levels without end, of this entropy on N(0, 1): the codes are of variable length."""
    sample = torch.randn(1 << 20, generator=_seeded())

    def entropy(step: float) -> float:
        share = (sample / step).round().long().add(10_000).bincount().double() / len(sample)
        return -float((share * share.clamp(min=1e-300).log2()).sum())

    low, high = 0.01, 4.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if entropy(middle) > bits else (low, middle)
    return lambda u: (u / low).round() * low


def vectors_of(dims: int, bits: int) -> Quantizer:
    """2**(bits * dims) centroids for `dims` numbers at once (LBG: k-means over N(0, 1))."""
    centroids = _centroids(dims, 2 ** (bits * dims))

    def quantize(u: Tensor) -> Tensor:
        points = u.reshape(-1, dims)
        return torch.cat([centroids[_nearest(part, centroids)] for part in points.split(1 << 16)]).view(u.shape)

    return quantize


@lru_cache
def _centroids(dims: int, count: int) -> Tensor:
    sample = torch.randn((256 * count, dims), generator=_seeded())
    centroids = sample[:count].clone()
    for _ in range(60):
        nearest = torch.cat([_nearest(part, centroids) for part in sample.split(1 << 16)])
        sums = torch.zeros_like(centroids).index_add_(0, nearest, sample)
        found = nearest.bincount(minlength=count)[:, None]
        centroids = torch.where(found > 0, sums / found, centroids)
    return centroids


def _nearest(points: Tensor, centroids: Tensor) -> Tensor:
    return (centroids.square().sum(1) - 2 * points @ centroids.T).argmin(1)


TRELLIS = (
    (0, 0, 1, 2),
    (2, 1, 3, 3),
    (4, 2, 5, 0),
    (6, 3, 7, 1),
    (0, 2, 1, 0),
    (2, 3, 3, 1),
    (4, 0, 5, 2),
    (6, 1, 7, 3),
)
"""Of each state: the next one and the subset of levels, for a 0, then for a 1; Ungerboeck's, as in JPEG 2000 part 2."""


def trellis(bits: int) -> Quantizer:
    """Trellis-coded quantization with 8 states over the levels of one bit more, the best path by Viterbi's algorithm.

    M. W. Marcellin, T. R. Fischer, "Trellis coded quantization of memoryless and Gauss-Markov sources", IEEE Trans.
    Commun. 38 (1990).
    """
    positive = torch.tensor(lloyd_max(bits + 1).levels)
    subsets = torch.cat([-positive.flip(0), positive]).view(-1, 4).T.contiguous()
    branches = [(state, *TRELLIS[state][2 * bit : 2 * bit + 2]) for state in range(8) for bit in (0, 1)]
    arriving = [[(state, subset) for state, to, subset in branches if to == target] for target in range(8)]
    sources = torch.tensor([[state for state, _ in pair] for pair in arriving])
    wanted = torch.tensor([[subset for _, subset in pair] for pair in arriving])

    def quantize(u: Tensor) -> Tensor:
        rows = u.reshape(-1, u.shape[-1])
        cost = torch.full((len(rows), 8), 1e9)
        cost[:, 0] = 0
        path = []
        for x in rows.T.contiguous().unbind():
            middles = (subsets[:, 1:] + subsets[:, :-1]) / 2
            nearest = torch.stack([subsets[s][torch.bucketize(x, middles[s])] for s in range(4)], 1)
            total = cost[:, sources] + (x[:, None] - nearest).square()[:, wanted]
            cost, choice = total.min(2)
            path.append((choice, nearest))
        state, levels = cost.argmin(1), []
        for choice, nearest in reversed(path):
            taken = choice.gather(1, state[:, None])[:, 0]
            levels.append(nearest.gather(1, wanted[state, taken][:, None])[:, 0])
            state = sources[state, taken]
        return torch.stack(levels[::-1], 1).view(u.shape)

    return quantize


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(-1, keepdim=True)


def _seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
