"""Embedded codes: exact at the end, decoded from every prefix, checked part by part."""

import itertools
from functools import cache

import numpy as np
import pytest

from manthan.benchmarks.peers import embedded
from manthan.benchmarks.peers.embedded import LOSSLESS, STEPS, Embedded, Group
from manthan.codec.errors import DamagedError
from manthan.codec.rope import Rope

LAYERS, HEADS, DIM, TOKENS = 2, 2, 64, 16
SIZE = LAYERS * 2 * HEADS * DIM
ROPE = Rope(tuple(100.0 ** (-np.arange(DIM // 2) / 32)))
POSITIONS = np.arange(32, 32 + TOKENS)


def rows(tokens: int, seed: int) -> np.ndarray:
    """Numbers that correlate, with a mean."""
    mix = np.random.default_rng(7).standard_normal((SIZE, SIZE)) * 0.99 ** np.arange(SIZE)[:, None] / 16
    return (np.random.default_rng(seed).standard_normal((tokens, SIZE)) @ mix + 0.5).astype(np.float32)


@cache
def code() -> Embedded:
    x = rows(4096, 0)
    mean = x.mean(0)
    _, directions = np.linalg.eigh(np.cov((x - mean).T.astype(np.float64)))
    y, step = (x - mean) @ directions, 0.15
    widths = np.clip(np.rint(3 * np.log2(y.std(0) / (step * STEPS[0]))) + 24, 0, 47).astype(np.uint8)
    weigher = np.zeros(SIZE + SIZE // 64 + 1, np.float32)
    weigher[:8] = 1.0  # some tokens are finer
    errors = np.full(SIZE, round(3 * np.log2(step / 12**0.5 * 2**embedded.POINT)))
    directions = directions.astype(np.float32)
    group = Group(LAYERS, mean, directions / step, directions.T * step, widths, weigher, x.std(0), errors)
    return Embedded([group], HEADS, DIM, ROPE)


def block(seed: int) -> np.ndarray:
    x = rows(TOKENS, seed).reshape(TOKENS, LAYERS, 2, HEADS, DIM).transpose(1, 2, 3, 0, 4).copy()
    x[:, 0] = ROPE.turn(x[:, 0], POSITIONS)
    return bits(x)


def bits(x: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) + 0x8000 >> 16).astype(np.uint16)


def floats(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32)


def test_every_prefix_decodes_and_the_last_is_exact() -> None:
    kv = block(1)
    parts = code().encode(kv, POSITIONS, b"key")
    noise = [
        float(np.square(floats(code().decode(parts[:n], POSITIONS, b"key")) - floats(kv)).mean())
        for n in range(1, len(parts) + 1)
    ]
    assert all(after < 0.55 * before for before, after in itertools.pairwise(noise))
    assert np.array_equal(code().decode(parts, POSITIONS, b"key"), kv)


def test_numbers_of_any_size_are_exact() -> None:
    kv = block(2)
    flat = kv.reshape(-1)
    flat[:6] = 0x0000, 0x8000, 0x0001, 0x807F, 0x0080, 0x3F80  # zeros, the smallest ones
    flat[100] = bits(np.array([150.0]))[0]
    parts = code().encode(kv, POSITIONS, b"")
    assert np.array_equal(code().decode(parts, POSITIONS, b""), kv)
    assert sum(map(len, parts)) < kv.nbytes


def test_a_base_and_refinements_take_little_more_than_one_rate() -> None:
    """Of the finest lossy level, against its whole numbers in one row with a table for each component."""
    kv, one, all_parts = block(3), 0, 0
    (x,), (group,) = code().rows(kv, POSITIONS), code().groups
    j = group.shifts(x)
    q = group.finest(x, j)
    wider = embedded.shifted(group.tables, j) + round(3 * np.log2(STEPS[0] / STEPS[-1]))
    one = len(code()._written(0, [q], [np.minimum(wider, len(embedded.WIDTHS) - 1)])) + len(j) // 2
    all_parts = sum(map(len, code().encode(kv, POSITIONS, b"")[:LOSSLESS]))
    assert one < all_parts < 1.06 * (one + 128)


@pytest.mark.parametrize("part", range(LOSSLESS + 1))
def test_a_flipped_bit_is_refused_and_what_is_before_it_decodes(part: int) -> None:
    parts = code().encode(block(4), POSITIONS, b"key")
    whole = code().decode(parts[:part], POSITIONS, b"key") if part else None
    for at in (0, 2, 5, 9, len(parts[part]) // 2, len(parts[part]) - 1):
        damaged = bytearray(parts[part])
        damaged[at] ^= 4
        with pytest.raises(DamagedError):
            code().decode([*parts[:part], bytes(damaged)], POSITIONS, b"key")
    if part:
        assert np.array_equal(code().decode(parts[:part], POSITIONS, b"key"), whole)
    with pytest.raises(DamagedError):
        code().decode(parts[: part + 1], POSITIONS, b"other")
