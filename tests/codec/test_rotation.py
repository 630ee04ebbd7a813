"""The rotation: orthonormal, fixed, and its sign sequence as documented."""

from itertools import pairwise

import numpy as np
import pytest

from manthan.codec.tables.rotation import block_sizes, hadamard_, sign, weights

HEAD_DIMS = [32, 40, 64, 80, 96, 128, 192, 256, 504, 512]


def rotate(x):
    """[n, head_dim] rotated."""
    y = (x * weights(x.shape[1])).T.copy()
    hadamard_(y, np.empty_like(y), np.array(block_sizes(x.shape[1])))
    return y.T


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_it_is_orthonormal(head_dim):
    matrix = rotate(np.eye(head_dim, dtype=np.float32)).astype(np.float64)
    assert np.abs(matrix @ matrix.T - np.eye(head_dim)).max() < 1e-6


@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_the_transform_is_hadamards_in_natural_order(head_dim):
    matrix = np.array([[1.0]])
    while len(matrix) < head_dim:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    x = np.random.default_rng(0).standard_normal((5, head_dim)).astype(np.float32)
    expected = (x * [sign(i) for i in range(head_dim)]) @ matrix / np.sqrt(head_dim)
    assert np.abs(rotate(x) - expected).max() < 1e-5


def test_blocks_are_the_binary_expansion():
    assert block_sizes(96) == (64, 32)
    assert block_sizes(80) == (64, 16)
    assert block_sizes(256) == (256,)
    assert block_sizes(504) == (256, 128, 64, 32, 16, 8)


def test_signs_are_fixed_for_ever():
    """Stored blocks depend on them."""
    bits = "".join("-" if sign(i) < 0 else "+" for i in range(64))
    assert bits == "-++++--+-+--+-++-+++-+--+-+++-+---+++-+--+-+----+++++++--+++-+--"


def test_signs_are_balanced():
    signs = [sign(i) for i in range(512)]
    assert abs(sum(signs)) < 60
    assert abs(sum(a * b for a, b in pairwise(signs))) < 60
