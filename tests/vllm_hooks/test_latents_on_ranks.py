"""Latents (MLA) on two ranks: both have the same, and each stores its own."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import stored_codes
from latent_model import VOCAB, allow_prefix_caching, make_latent_model
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.platforms.cpu import CpuPlatform
from vllm_engine import Completion

BLOCKS, BLOCK, ANSWER = 25, 16, 12
MANTHAN: dict[str, Any] = {
    "blocks": 131,
    "ranks": 2,
    "flags": {"skip_tokenizer_init": True, "block_size": BLOCK},
    "idle": 0.5,
    "codec": {"sink_tokens": 4096},  # all tokens exact
}


@pytest.fixture
def model(tmp_path: Path) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", CpuPlatform.check_and_update_config)  # as it is, later
        allow_prefix_caching()
        yield make_latent_model(tmp_path)


@pytest.fixture
def pair(start_engine: Any, model: str) -> Iterator[Any]:
    """Codes in RAM."""
    yield from start_engine(model=model, tiers={"max_bytes": "64MiB"}, **MANTHAN)


def forget_latents(worker: Any) -> None:
    """Whatever is restored into the pool from now on, it is not what was there."""
    [blocks] = get_kv_transfer_group().worker.engine.blocks.values()
    for rows, _, _ in blocks._memory._layers:
        rows[:] = 0


@pytest.mark.slow
def test_latents_come_back_on_both_ranks(pair: Any) -> None:
    """As out of the hot cache. One token is behind the last full block: the CPU's kernel for single tokens reads the
    paged cache."""
    rng = random.Random(1)
    prompt = [rng.randrange(10, VOCAB) for _ in range(BLOCKS * BLOCK + 1)]

    def ask() -> Completion:
        return pair.run(pair.complete(prompt, "duo", ANSWER))

    computed, hot = ask(), ask()
    pair.wait_until_cold(1)
    pair.on_workers(forget_latents)
    cold = ask()
    assert hot.cached_tokens == cold.cached_tokens == BLOCKS * BLOCK
    assert (cold.tokens, cold.logprobs) == (hot.tokens, hot.logprobs)
    assert pair.failures() == 0
    pair.wait_until_cold(1)
    pair.on_workers(stored_codes.damage, 0)
    again = ask()
    assert (again.tokens, again.cached_tokens) == (computed.tokens, 0), "neither rank uses what is damaged"
    assert pair.metric("manthan_failures_total", cause="checksum") >= 1
