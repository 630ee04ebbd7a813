"""Latents (MLA) on two ranks: both have the same. Each has its own in RAM, and Redis has them once."""

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import stored_codes
from latent_model import VOCAB, allow_prefix_caching, make_latent_model
from redis_server import RedisServer
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.platforms.cpu import CpuPlatform
from vllm_engine import Completion, until_killed

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


@pytest.mark.slow
def test_redis_has_them_once_whatever_the_number_of_ranks(model: str, tmp_path: Path) -> None:
    """One rank reads what the first of two has written, and two read it, too."""
    rng, found = random.Random(2), list[Completion]()
    held: list[list[set[str]]] = []
    prompt = [rng.randrange(10, VOCAB) for _ in range(BLOCKS * BLOCK + 1)]
    with RedisServer(tmp_path) as server:
        for ranks in (2, 1, 2):
            with until_killed(
                model=model, tiers={"kind": "redis", "redis": server.url}, **MANTHAN | {"ranks": ranks, "idle": 0.2}
            ) as engine:
                found += [engine.run(engine.complete(prompt, "s", ANSWER)) for _ in range(2)]
                held.append(engine.on_workers(digests))
                assert engine.failures() == 0
                engine.wait_until_cold(1)
            names = list(server.client.scan_iter("manthan:*:block:*"))
            assert {name.rpartition(":")[2] for name in names} == {"0-of-1"}
            assert BLOCKS <= len(names) <= BLOCKS + 1, "with the answer's"
    computed, hot, one, _, two, _ = found
    assert computed.cached_tokens == 0
    assert one.cached_tokens == two.cached_tokens == BLOCKS * BLOCK
    assert (two.tokens, two.logprobs) == (hot.tokens, hot.logprobs)
    [written, same], [alone], [first, second] = held
    assert len(written & same & alone & first & second) >= BLOCKS


def digests(worker: Any) -> set[str]:
    """Of the blocks of the first layer that hold anything."""
    [blocks] = get_kv_transfer_group().worker.engine.blocks.values()
    rows = blocks._memory._rows[0]
    return {hashlib.sha256(row.tobytes()).hexdigest() for row in rows if row.any()}


def forget_latents(worker: Any) -> None:
    """Whatever is restored into the pool from now on, it is not what was there."""
    [blocks] = get_kv_transfer_group().worker.engine.blocks.values()
    for rows in blocks._memory._rows:
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
