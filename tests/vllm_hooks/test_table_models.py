"""Small trained models of several KV cache groups on the real engine: chats that were cold are answered right."""

import re
from pathlib import Path
from typing import Any

import pytest
from conversation import told

MODELS = {"tiny-gemma3": 1000, "tiny-qwen3-next": 150}
"""And how many blocks the pool has: enough until chats are cold."""
MANTHAN = {"idle_after_s": 0.4, "min_tokens": 64, "cold_store": {"max_bytes": "128MiB"}}
CHATS = 8


def chats(model: str, manthan: dict[str, Any] | None, **engine: Any) -> tuple[list[Any], str]:
    folder = str(Path(__file__).parents[1] / "data" / model)
    job = {"model": folder, "manthan": manthan, "batched_tokens": 2048, "engine": engine}
    return told("table_chats.py", job)


@pytest.mark.parametrize("model", MODELS)
def test_chats_that_were_cold_are_answered_right(model: str) -> None:
    """With the default codec. What can be reused is what plain vLLM reuses where all stays in the pool."""
    answered_right(model, MODELS[model])


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_also_where_tokens_are_proposed_and_right(model: str) -> None:
    """A request has a block of states for each token that is proposed."""
    ngram = {"method": "ngram", "prompt_lookup_max": 3, "num_speculative_tokens": 3}
    assert answered_right(model, 2 * MODELS[model], speculative_config=ngram) > 10


def answered_right(model: str, blocks: int, **engine: Any) -> int:
    """blocks: of the pool. Returns how many tokens that were proposed were right."""
    cold, log = chats(model, MANTHAN, num_gpu_blocks_override=blocks, **engine)
    hot, _ = chats(model, None, **engine)
    assert len(cold) == len(hot) == 3 * CHATS
    assert all(turn["right"] for turn in hot)
    assert all(turn["right"] for turn in cold)
    for ours, reusable in zip(cold[CHATS:], hot[CHATS:], strict=True):
        assert ours["cached"] >= 0.9 * reusable["cached"] > 0.9 * 1000
    assert len(re.findall(r"restored (\d+) of \1 blocks", log)) >= CHATS
    assert "restored 0 of" not in log
    proposed: int = cold[0]["accepted"]
    return proposed
