"""TurboQuant (A. Zandieh et al., "TurboQuant: online vector quantization with near-optimal distortion rate", 2025,
arXiv 2504.19874), with QJL's residual (A. Zandieh et al., "QJL: 1-bit quantized Johnson-Lindenstrauss transform for KV
cache quantization", 2024).

A vector of D numbers is a length and a direction. A random rotation makes the direction's numbers nearly normal with
deviation 1 / sqrt(D), and each is quantized by the Lloyd-Max quantizer of the normal distribution. Because attention
needs keys' inner products without bias, each number of a key spends one of its bits on the residual r: the direction
less the quantized direction. Keys keep the length of r and the signs of S r, where S is a random normal matrix and S'
its transpose: S' sign(S r) * |r| * sqrt(pi / 2) / D is r on average.

    | lengths, fp16 | keys only: lengths of r, fp16 | indices of quantizer levels | keys only: signs of S r |
"""

import math
from functools import lru_cache, partial

import numpy as np

from manthan.benchmarks.peers import Floats, Peer, halves, pack, unpack
from manthan.codec.base import ByteArray, Kind

SEED = 20250428


@lru_cache
def rotation(dim: int) -> Floats:
    """Return a random orthogonal matrix [dim, dim], the same in each process."""
    q, r = np.linalg.qr(np.random.default_rng(SEED).standard_normal((dim, dim)))
    return (q * np.sign(np.diag(r))).astype(np.float32)


@lru_cache
def sketch(dim: int) -> Floats:
    """Return the matrix S [dim, dim] of QJL, the same in each process."""
    return np.random.default_rng(SEED + 1).standard_normal((dim, dim)).astype(np.float32)


@lru_cache
def centroids(bits: int) -> Floats:
    """Return the 2**bits levels of the Lloyd-Max quantizer of N(0, 1), ascending, computed on a fine grid."""
    x = np.linspace(-6, 6, 6001)
    weight = np.exp(-x * x / 2)
    levels = np.linspace(-2, 2, 2**bits)
    for _ in range(300):
        cell = np.searchsorted((levels[1:] + levels[:-1]) / 2, x)
        levels = np.bincount(cell, weight * x) / np.bincount(cell, weight)
    return levels.astype(np.float32)


def _nearest(y: Floats, bits: int) -> np.ndarray:
    levels = centroids(bits)
    return np.searchsorted((levels[1:] + levels[:-1]) / 2, y)


def encode(x: Floats, kind: Kind, bits: int) -> ByteArray:
    """Return the bytes of vectors [n, D]. bits: bits per number; a key's number spends one of these on the residual."""
    dim, bits = x.shape[1], bits - (kind == "key")
    lengths = np.float16(np.linalg.norm(x, axis=1)).astype(np.float32)
    unit = x / np.where(lengths == 0, 1, lengths)[:, None]
    q = _nearest(unit @ rotation(dim).T * math.sqrt(dim), bits)
    if kind == "value":
        return np.concatenate([halves(lengths), pack(q, bits)])
    left = unit - _directions(q, dim, bits)
    signs = left @ sketch(dim).T >= 0
    return np.concatenate([halves(lengths), halves(np.linalg.norm(left, axis=1)), pack(q, bits), pack(signs, 1)])


def decode(encoded: ByteArray, kind: Kind, shape: tuple[int, int], bits: int) -> Floats:
    """Undo `encode` of vectors with shape `shape`."""
    (n, dim), bits = shape, bits - (kind == "key")
    ends = np.cumsum([2 * n, 2 * n * (kind == "key"), -(-n * dim * bits // 8)])
    lengths, of_left, coded, signs_at = np.split(encoded, ends)
    lengths, of_left = (part.copy().view("<f2").astype(np.float32) for part in (lengths, of_left))
    unit = _directions(unpack(coded, bits, n * dim).reshape(n, dim), dim, bits)
    if kind == "key":
        signs = 2 * unpack(signs_at, 1, n * dim).reshape(n, dim).astype(np.float32) - 1
        unit = unit + signs @ sketch(dim) * (math.sqrt(math.pi / 2) / dim * of_left[:, None])
    return (unit * lengths[:, None]).astype(np.float32)


def _directions(q: np.ndarray, dim: int, bits: int) -> Floats:
    return (centroids(bits)[q] / math.sqrt(dim) @ rotation(dim)).astype(np.float32)


TURBOQUANT = {
    bits: Peer(f"turboquant-{bits}bit", partial(encode, bits=bits), partial(decode, bits=bits)) for bits in (3, 4)
}
