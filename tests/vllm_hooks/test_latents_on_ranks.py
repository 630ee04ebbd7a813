"""Latents (MLA) on two ranks: both have the same, and each stores its own."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
from latent_model import VOCAB, allow_prefix_caching, make_latent_model
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.platforms.cpu import CpuPlatform
from vllm_engine import Completion

from manthan.codec import wire

BLOCKS, BLOCK, ANSWER = 25, 16, 12
MANTHAN: dict[str, Any] = {
    "blocks": 131,
    "ranks": 2,
    "flags": {"skip_tokenizer_init": True, "block_size": BLOCK},
    "idle_after_s": 0.5,
    "codec": {"window_tokens": 4096},  # all tokens exact
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", CpuPlatform.check_and_update_config)  # as it is, later
        allow_prefix_caching()
        yield make_latent_model(tmp_path_factory.mktemp("latents"))


@pytest.fixture(scope="module")
def pair(start_engine: Any, model: str) -> Iterator[Any]:
    """Codes in RAM."""
    yield from start_engine(model=model, cold_store={"max_bytes": "64MiB"}, **MANTHAN)


def prompt_of(seed: int) -> list[int]:
    """One token is behind the last full block: the CPU's kernel for single tokens reads the paged cache."""
    rng = random.Random(seed)
    return [rng.randrange(10, VOCAB) for _ in range(BLOCKS * BLOCK + 1)]


def forget_latents(worker: Any) -> None:
    """Whatever is restored into the pool from now on, it is not what was there."""
    [blocks] = get_kv_transfer_group().worker.path.blocks.values()
    for rows, _, _ in blocks._memory._layers:
        rows[:] = 0


def damage_the_first_block(worker: Any) -> bool:
    store = get_kv_transfer_group().worker.path.store
    for group, key in list(store._blocks):
        [codes] = store.read(group, [key])
        if wire.parse(codes).header.first_token == 0:
            codes = codes.copy()
            codes[5000] ^= 1
            assert store.put_all(group, {key: codes}) == {}
            return True
    return False


def go_and_return(engine: Any, name: str, seed: int) -> Completion:
    """The same tokens as out of the hot cache, and nothing of the prompt computed but its last token. Returns what was
    answered when nothing was cached."""
    prompt = prompt_of(seed)
    computed = engine.run(engine.complete(prompt, name, ANSWER))
    hot = engine.run(engine.complete(prompt, name, ANSWER))
    engine.wait_until_cold(1)
    engine.on_workers(forget_latents)
    cold = engine.run(engine.complete(prompt, name, ANSWER))
    assert hot.cached_tokens == cold.cached_tokens == BLOCKS * BLOCK
    assert (cold.tokens, cold.logprobs) == (hot.tokens, hot.logprobs)
    assert engine.failures() == 0
    return computed


def test_latents_come_back_on_both_ranks(pair: Any) -> None:
    computed = go_and_return(pair, "duo", 1)
    pair.wait_until_cold(1)
    assert all(pair.on_workers(damage_the_first_block))
    again = pair.run(pair.complete(prompt_of(1), "duo", ANSWER))
    assert (again.tokens, again.cached_tokens) == (computed.tokens, 0), "neither rank uses what is damaged"
    assert pair.metric("manthan_failures_total", cause="checksum") >= 1
