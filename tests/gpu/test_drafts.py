"""Speculative decoding on a GPU: a draft's KV goes cold with the model's into its memory or pinned RAM, and returns."""

from pathlib import Path
from typing import Any

import pytest
from draft_model import proposed
from scripts import run_alone

EXACT = {"name": "k3v3", "sink_tokens": 100_000, "guard": False}
"""All tokens of any session are kept as they are."""
GROUPS = {
    "tiny-llama eagle": 1,
    "tiny-llama eagle3": 1,
    "tiny-llama draft_model": 1,
    "gemma3 eagle": 5,
    "gpt-oss eagle": 2,
    "qwen3-next mtp": 3,
    "gpt-oss ngram": 2,
    "qwen3-next ngram": 4,
}
"""By model and method: KV cache groups, the draft's layers being in one of them."""
DEVICES = {"host": "cpu", "device": "cuda"}
VLLM = {"qwen3-next": {"gdn_prefill_backend": "triton"}}  # vLLM's own choice on Hopper needs flashinfer


@pytest.mark.parametrize("store", DEVICES)
@pytest.mark.parametrize("kind", GROUPS)
def test_a_session_returns_with_a_draft_as_if_it_had_stayed_hot(kind: str, store: str, tmp_path: Path) -> None:
    model, options = proposed(kind, tmp_path)
    manthan = {"tiers": {"kind": store, "max_bytes": "128MiB"}, "codec": EXACT}
    vllm = options | VLLM.get(kind.split()[0], {})
    said: dict[str, Any] = run_alone(
        "path_sessions.py", {"model": model, "what": "come_back", "manthan": manthan, "vllm": vllm}
    )
    assert said["engine"] == "CudaEngine"
    again = not kind.endswith(("ngram", "draft_model"))  # the last block found
    cached = (said["prompt"] // said["block"] - again) * said["block"]
    assert said["hot"]["cached"] == said["cold"]["cached"] == said["again"]["cached"] == cached
    assert said["cold"] == said["again"] == said["hot"], "the answer, and how much of it was proposed"
    assert said["zeros"]["first"] != said["hot"]["first"], "the answer is made of the cache"
    assert said["causes"] == []
    assert len(said["stored"]) == GROUPS[kind]
    assert all(blocks > 0 and where == [DEVICES[store]] for _, blocks, where in said["stored"].values())
    assert said["hot"]["accepted"] > 0 or kind not in ("tiny-llama eagle", "tiny-llama draft_model")
