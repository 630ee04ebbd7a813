"""Models with several KV cache groups on the real engine: sessions go cold, and return as if they had stayed hot."""

import re
from pathlib import Path
from typing import Any

import group_models
import pytest
from conversation import EXACT, run

BATCHED = {"falcon-h1": 256}
"""vLLM's CPU build takes Mamba2 in no more at once than fits into a block."""


def families() -> list[Any]:
    """`make test` tries one with windows and one with states."""
    fast = ("gpt-oss", "qwen3-next")
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in group_models.FAMILIES]


@pytest.mark.parametrize("family", families())
def test_a_session_returns_as_if_it_had_stayed_hot(family: str, tmp_path: Path) -> None:
    model, batched = group_models.made(family, tmp_path / "model"), BATCHED.get(family, 2048)
    ours, log = run(model, EXACT, batched)
    hot, _ = run(model, None, batched, [turn["prompt"] for turn in ours])
    assert len(re.findall(r"restored (\d+) of \1 blocks", log)) >= 2  # the last is told of with the next step
    assert [turn["cached"] for turn in ours] == [turn["cached"] for turn in hot]
    assert all(turn["cached"] > 500 for turn in ours[1:])
    assert [turn["tokens"] for turn in ours] == [turn["tokens"] for turn in hot]
    assert [turn["logprobs"] for turn in ours] == [turn["logprobs"] for turn in hot]
    assert len({tuple(turn["tokens"]) for turn in ours}) == len(ours)
