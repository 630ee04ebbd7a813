"""Vectors of many kinds."""

from types import SimpleNamespace

import numpy as np
import pytest


def to_bf16(x):
    """Round float32 to bf16 bits, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    """bf16 bits as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def cosine(x, y):
    """Each row's cosine similarity, in float64."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    return (x * y).sum(1) / np.sqrt((x * x).sum(1) * (y * y).sum(1))


def structured(head_dim, n=64, seed=0):
    """{name: [n, head_dim] float32}, vectors as unlike Gaussian noise as those of trained models.

    Channels are shuffled and signed vector by vector: one direction's mean would be its luck.
    """
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal((n, head_dim))
    outliers = np.zeros((n, head_dim))
    outliers[:, :3] = 40, -25, 15
    wave = np.cos(rng.uniform(0, 7, (n, 1)) * 10000.0 ** (-np.arange(head_dim) / head_dim))
    kinds = {
        "outlier channels": noise + rng.permuted(outliers, axis=1),
        "ramp": rng.permuted(np.arange(head_dim) - head_dim / 2.5 + 0.1 * noise, axis=1),
        "rope waves": rng.permuted(wave + 0.1 * noise, axis=1),
        "two values": rng.choice([-1, 3], (n, head_dim)) + 0.01 * noise,
        "heavy tails": np.sign(noise) * np.abs(noise) ** 4,
        "few non-zero": noise * (rng.random((n, head_dim)) < 0.1) + 1e-3 * noise,
        "geometric": rng.permuted(noise * 0.9 ** np.arange(head_dim), axis=1),
    }
    return {name: (x * rng.choice([-1, 1], x.shape)).astype(np.float32) for name, x in kinds.items()}


def edges(head_dim):
    """[n, head_dim] float32, all finite: zeros, one-hot, denormal, huge and mixed magnitudes."""
    rng = np.random.default_rng(1)
    noise, eye = rng.standard_normal((4, head_dim)), np.eye(head_dim)[[0, 1, head_dim // 2, head_dim - 1]]
    largest = float.fromhex("0x1.fep127")
    signs = np.sign(noise)
    groups = [
        np.zeros((1, head_dim)),
        -np.zeros((1, head_dim)),
        eye,
        -eye * largest,
        signs * largest,
        signs * 2.0**-126,
        signs * 2.0**-133,
        noise * 1e-38,
        noise * 1e-44,
        noise * 1e37,
        np.ones((1, head_dim)),
        np.full((1, head_dim), largest),
        np.full((1, head_dim), np.finfo(np.float32).max),
        noise * np.exp(rng.uniform(-80, 80, (4, head_dim))),
        np.where(np.arange(head_dim) < head_dim // 2, largest, 1e-45)[None],
        np.where(np.arange(head_dim) < head_dim - 8, 1e-3, 1e-40)[None],
    ]
    return np.concatenate(groups).astype(np.float32)


@pytest.fixture(scope="session")
def vectors():
    """The functions above: to_bf16, from_bf16, cosine, structured, edges."""
    return SimpleNamespace(to_bf16=to_bf16, from_bf16=from_bf16, cosine=cosine, structured=structured, edges=edges)
