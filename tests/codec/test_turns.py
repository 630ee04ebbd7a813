"""Cosines and sines for a GPU's codec are numpy's, whichever blocks are asked for."""

import numpy as np
import pytest
import torch

from manthan.codec.gpu import turns
from manthan.codec.gpu.turns import Turns
from manthan.codec.rope import Rope

ROPE = Rope((1.0, 0.1, 0.001))
TOKENS = 16


def expected(first_tokens: list[int]) -> np.ndarray:
    return np.stack([np.stack(ROPE.tables(np.arange(at, at + TOKENS))) for at in first_tokens])


@pytest.mark.parametrize(
    "first_tokens",
    [
        [0],
        [0, 16, 32],
        [320, 336, 352, 368],
        [32, 16, 0],
        [16, 16],
        [0, 64, 16 * 5000, 16],
        [5, 21],
        [2**40, 0, 2**62],
    ],
)
@pytest.mark.parametrize("before", [[], [0, 16], [16 * 30]])
def test_they_are_those_of_the_places(first_tokens: list[int], before: list[int]) -> None:
    made = Turns(ROPE, TOKENS, pinned=False)
    made.of(before)
    found = made.of(first_tokens)
    assert found.dtype == torch.float32
    assert found.is_contiguous()
    np.testing.assert_array_equal(found.numpy(), expected(first_tokens))


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "KEPT_BYTES", 10 * 1024)
    made = Turns(ROPE, TOKENS, pinned=False)
    for first in range(0, 40):
        made.of([16 * first])
    assert len(made._kept) <= 10
    np.testing.assert_array_equal(made.of([16 * 9, 16 * 10]).numpy(), expected([16 * 9, 16 * 10]))


@pytest.mark.parametrize("rope", [None, Rope(())])
def test_without_rope_there_are_none(rope: Rope | None) -> None:
    made = Turns(rope, TOKENS, pinned=False)
    assert made.of([0, 16, 2**40]).shape == (3, 2, TOKENS, 0)
