"""Sections of keys and values as models make them, and what comes back."""

import numpy as np

from manthan.codec import wire
from manthan.codec.base import Dtype
from manthan.codec.rope import Rope


def rope(turned, interleaved=False):
    """Llama's."""
    return Rope(tuple(10000.0 ** (-np.arange(0, turned, 2) / turned)), interleaved=interleaved)


ROPES = {
    "none": lambda head_dim: None,
    "halves": rope,
    "neighbours": lambda head_dim: rope(head_dim, interleaved=True),
    "partial": lambda head_dim: rope(head_dim // 4 * 2),
    "partial neighbours": lambda head_dim: rope(head_dim // 4 * 2, interleaved=True),
}


def places_from(first, tokens=16):
    return np.arange(first, first + tokens, dtype=np.int64)


def keys(section, turn=None, first=0, bias=0.0, seed=0):
    """As a model makes them: noise, and a bias in the slowest pairs before RoPE. float32."""
    x = np.random.default_rng(seed).standard_normal(section.shape, np.float32)
    dim = section.head_dim
    for pair in (1, 2, 3):
        x[..., dim // 2 - pair] += bias * (-1) ** pair
        x[..., dim - pair] += 0.7 * bias
    return x if turn is None else turn.turn(x, places_from(first, section.tokens))


def encoded(codec, x, section, positions):
    """Return the encoded bytes, which fit their bound though there is more room."""
    out = np.full(2 * codec.max_nbytes(section), 255, np.uint8)
    nbytes = codec.encode(x, section, positions, out)
    assert nbytes <= codec.max_nbytes(section)
    return out[:nbytes].copy()


def to_bf16(x):
    """Round float32 to bf16 bits, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def in_cache(x, dtype=Dtype.BFLOAT16):
    return to_bf16(x) if dtype is Dtype.BFLOAT16 else x.astype(dtype.numpy)


def as_floats(x):
    return (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x.astype(np.float32)


def error(x, y):
    """Relative, of the numbers' squares."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    return ((x - y) ** 2).sum() / (x**2).sum()


def integers(shape):
    """float32, the same in any language: sums of four bytes of splitmix64, and a bias in every eighth channel."""
    with np.errstate(over="ignore"):
        z = (np.arange(np.prod(shape), dtype=np.uint64) + 1) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    four = z.view(np.uint8).reshape(*shape, 8)[..., 4:].astype(np.float32)
    return four.sum(-1) - 510 + (np.arange(shape[-1]) % 8 == 3).astype(np.float32) * 3000


def packed(header, payloads):
    """Compressed block of these sections, uint8."""
    sizes = [payload.nbytes for payload in payloads]
    block = np.zeros(wire.block_nbytes(header, sizes), np.uint8)
    block[: header.nbytes] = wire.head(header, sizes)
    for at, payload in zip(wire.starts(header, sizes), payloads, strict=True):
        block[at : at + payload.nbytes] = payload
    return wire.seal(block)
