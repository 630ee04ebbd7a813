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
    """The functions above: to_bf16, from_bf16, edges."""
    return SimpleNamespace(to_bf16=to_bf16, from_bf16=from_bf16, edges=edges)
