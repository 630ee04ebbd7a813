"""Distance of a model's predictions after a prefix's decompressed KV from its predictions after the exact KV."""

from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from manthan.benchmarks.quality_pieces import Piece

CHUNK = 64
FLOOR = 1e-9
"""Least probability of the bucket of remaining tokens, because a smaller rest is a rounding error of float32 sums."""

Floats = NDArray[np.floating[Any]]


class Figures(NamedTuple):
    """Figures of a piece, means over scored tokens.

    nll: negative log-likelihood, nats. kl: Kullback-Leibler divergence KL(exact || measured), nats, between the next
    token's distributions after the exact prefix and after the measured prefix. top1: share of positions at which both
    have the same likeliest token. recall: share of the answers' tokens that are likeliest after the measured prefix;
    None for a piece of a text. task, context: the piece's.
    """

    nll: float
    kl: float
    top1: float
    recall: float | None
    task: str
    context: int

    @classmethod
    def mean(
        cls,
        nll: Floats,
        kl: Floats,
        same: NDArray[np.bool_],
        right: NDArray[np.bool_],
        piece: Piece,
    ) -> Self:
        """Return the means of a piece's arrays, each [scored tokens].

        same: True where both distributions have the same likeliest token. right: True where the measured distribution's
        likeliest token is the actual token.
        """
        recall = float(right[np.array(piece.values) - 1].mean()) if piece.values else None
        return cls(float(nll.mean()), float(kl.mean()), float(same.mean()), recall, piece.task, piece.context)


class Top(NamedTuple):
    """Likeliest tokens at each of n positions, by vLLM.

    chosen: [n] log-probability of the actual token. rank: [n] the actual token's rank, 1 for the likeliest. ids, logs:
    [n, k] ids and log-probabilities of the k likeliest tokens, the likeliest first.
    """

    chosen: Floats
    rank: NDArray[np.integer[Any]]
    ids: NDArray[np.integer[Any]]
    logs: Floats

    def figures(self, exact: Self, vocabulary: int, piece: Piece) -> Figures:
        kl = [
            kl_of_top(*(part[at : at + CHUNK] for part in (exact.ids, exact.logs, self.ids, self.logs)), vocabulary)
            for at in range(0, len(self.chosen), CHUNK)
        ]
        same = self.ids[:, 0] == exact.ids[:, 0]
        return Figures.mean(-self.chosen.astype(np.float64), np.concatenate(kl), same, self.rank == 1, piece)


def kl_of_top(
    exact_ids: NDArray[Any], exact_logs: Floats, ids: NDArray[Any], logs: Floats, vocabulary: int
) -> NDArray[np.float64]:
    """Return KL(exact || second) [n], nats, of two distributions that are known for their k likeliest tokens.

    Tokens known in both count singly, and all remaining tokens as one bucket. Joining outcomes never adds divergence
    (the data processing inequality), so the result is a lower bound; with k = vocabulary the bound is exact.
    """
    n = np.arange(len(ids))[:, None]
    p, q = (np.full((len(ids), vocabulary), -np.inf) for _ in range(2))
    p[n, exact_ids] = exact_logs
    q[n, ids] = logs
    both = np.isfinite(p) & np.isfinite(q)
    p_both, q_both = np.exp(p, where=both, out=np.zeros_like(p)), np.exp(q, where=both, out=np.zeros_like(q))
    kl: NDArray[np.float64] = np.where(both, p_both * np.subtract(p, q, where=both, out=np.zeros_like(p)), 0).sum(1)
    if both.all():
        return kl
    p_rest, q_rest = (np.maximum(1 - part.sum(1), FLOOR) for part in (p_both, q_both))
    return kl + p_rest * np.log(p_rest / q_rest)
