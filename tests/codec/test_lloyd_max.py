"""The quantizer against published figures and against the conditions it must meet."""

import math
from itertools import pairwise

import numpy as np
import pytest

from manthan.codec.tables.lloyd_max import lloyd_max


def mean_squared_error(bits):
    """By the trapezoid rule over the positive half of N(0, 1)."""
    levels, thresholds = lloyd_max(bits)
    x = np.linspace(0, 12, 1_200_001)
    error = (x - np.array(levels)[np.searchsorted(thresholds, x)]) ** 2
    return 2 * np.trapezoid(error * np.exp(-x * x / 2), x) / math.sqrt(2 * math.pi)


def test_two_bits_match_the_published_figures():
    """J. Max's table for 4 levels."""
    levels, thresholds = lloyd_max(2)
    assert levels == pytest.approx([0.4528, 1.510], abs=6e-4)
    assert thresholds == pytest.approx([0.9816], abs=6e-4)
    assert mean_squared_error(2) == pytest.approx(0.1175, abs=5e-5)


def test_three_bits_match_the_published_figures():
    levels, thresholds = lloyd_max(3)
    assert levels == pytest.approx([0.2451, 0.7560, 1.3439, 2.1520], abs=1e-4)
    assert thresholds == pytest.approx([0.5006, 1.0500, 1.7479], abs=1e-4)
    assert mean_squared_error(3) == pytest.approx(0.03455, abs=5e-6)


def test_four_bits_match_the_published_figures():
    """J. Max's table for 16 levels."""
    levels, thresholds = lloyd_max(4)
    assert levels == pytest.approx([0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733], abs=6e-4)
    assert thresholds == pytest.approx([0.2582, 0.5224, 0.7996, 1.099, 1.437, 1.844, 2.401], abs=6e-4)
    assert mean_squared_error(4) == pytest.approx(0.009497, abs=5e-6)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_no_small_move_of_a_level_lowers_the_error(bits, monkeypatch):
    best = mean_squared_error(bits)
    levels, _ = lloyd_max(bits)
    for k in range(len(levels)):
        for step in (-1e-3, 1e-3):
            moved = tuple(level + step * (i == k) for i, level in enumerate(levels))
            middles = tuple((a + b) / 2 for a, b in pairwise(moved))
            monkeypatch.setattr(f"{__name__}.lloyd_max", lambda bits, m=moved, t=middles: (m, t))
            assert mean_squared_error(bits) > best
            monkeypatch.undo()


def test_it_is_solved_once():
    assert lloyd_max(3) is lloyd_max(3)
