"""Latents (MLA) on two ranks: both have the same, one of the two stores each block, and both read all of them."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from latent_model import VOCAB, allow_prefix_caching, make_latent_model
from redis_server import RedisServer, running
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.platforms.cpu import CpuPlatform
from vllm_engine import Completion

from manthan.codec import wire
from manthan.manager.stores.cold_store import HostStore
from manthan.manager.stores.served import ServingStore

BLOCKS, BLOCK, ANSWER = 25, 16, 12
MANTHAN: dict[str, Any] = {
    "blocks": 131,
    "ranks": 2,
    "flags": {"skip_tokenizer_init": True, "block_size": BLOCK},
    "idle_after_s": 0.5,
    "sweep_interval_s": 0.1,
    "codec": {"window_tokens": 4096},  # all tokens exact
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", CpuPlatform.check_and_update_config)  # as it is, later
        allow_prefix_caching()
        yield make_latent_model(tmp_path_factory.mktemp("latents"))


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    yield from running(tmp_path_factory.mktemp("redis"))


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


def count_encoded(worker: Any) -> None:
    [blocks] = get_kv_transfer_group().worker.path.blocks.values()
    encode_all, blocks.encoded = blocks.encode_all, []

    def counting(spills: Any, *copies: Any) -> Any:
        blocks.encoded += [spill.key for spill in spills]
        return encode_all(spills, *copies)

    blocks.encode_all = counting


def encoded(worker: Any) -> list[bytes]:
    [blocks] = get_kv_transfer_group().worker.path.blocks.values()
    return list(blocks.encoded)


def stored(worker: Any) -> tuple[str, int, int]:
    """What a rank has of the store: of what kind it is, how many blocks in RAM, and bytes of how many."""
    store = get_kv_transfer_group().worker.path.store
    kept = getattr(store, "store", None)
    return (type(store).__name__, *((len(kept._blocks), kept.max_bytes) if isinstance(kept, HostStore) else (0, 0)))


def damage_the_first_block(worker: Any) -> None:
    store = get_kv_transfer_group().worker.path.store
    for group, key in list(store.store._blocks) if isinstance(store, ServingStore) else ():
        [codes] = store.read(group, [key])
        if wire.parse(codes).header.first_token == 0:
            codes[5000] ^= 1
            assert store.put_all(group, {key: codes}) == {}


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


def test_latents_are_in_ram_once_and_come_back_on_both_ranks(pair: Any) -> None:
    pair.on_workers(count_encoded)
    computed = go_and_return(pair, "duo", 1)
    first, second = pair.on_workers(stored)
    assert first[0] == "ServingStore"
    assert first[1] >= BLOCKS
    assert (first[2], second) == (64 << 20, ("RemoteStore", 0, 0)), "the whole budget is the one store's"
    one, other = pair.on_workers(encoded)
    assert min(len(one), len(other)) > 0, "the work is spread"
    assert not set(one) & set(other)
    assert len(one) + len(other) == first[1]
    pair.wait_until_cold(1)
    pair.on_worker(damage_the_first_block)
    again = pair.run(pair.complete(prompt_of(1), "duo", ANSWER))
    assert (again.tokens, again.cached_tokens) == (computed.tokens, 0), "neither rank uses what is damaged"
    assert pair.metric("manthan_failures_total", cause="checksum") == 1


@pytest.mark.slow
@pytest.mark.parametrize("tiers", [("disk",), ("host", "redis")])
def test_latents_that_two_ranks_have_stored_are_found_by_one(
    start_engine: Any, redis_server: RedisServer, model: str, tmp_path: Path, tiers: tuple[str, ...]
) -> None:
    """The first rank has the store and serves the other; the next engine has one rank."""
    kind = {"kind": tiers[0]} if len(tiers) == 1 else {"kind": "tiered", "tiers": tiers}
    options = MANTHAN | {
        "model": model,
        "cold_store": kind | {"max_bytes": "64MiB"},
        "redis": {"url": redis_server.url},
        "disk": str(tmp_path),
    }
    for engine in start_engine(**options):
        go_and_return(engine, "duo", 1)
        assert [name for name, *_ in engine.on_workers(stored)] == ["ServingStore", "RemoteStore"]
        engine.wait_until_cold(1)
        nbytes = engine.metric("manthan_cold_bytes")
    assert [folder.name for folder in tmp_path.glob("*/rank-*")] == (["rank-0"] if "disk" in tiers else [])
    for engine in start_engine(**options | {"ranks": 1}):
        found = engine.run(engine.complete(prompt_of(1), "duo", ANSWER))
        assert (found.cached_tokens, engine.failures()) == (BLOCKS * BLOCK, 0)
        engine.wait_until_cold(1)
        assert engine.metric("manthan_cold_bytes") == nbytes


@pytest.mark.slow
def test_latents_are_in_redis_once(start_engine: Any, redis_server: RedisServer, model: str) -> None:
    store = {"kind": "redis", "max_bytes": "64MiB"}
    for engine in start_engine(model=model, cold_store=store, redis={"url": redis_server.url}, **MANTHAN):
        go_and_return(engine, "duo", 1)
        engine.wait_until_cold(1)
        names = list(redis_server.client.scan_iter("*:block:*"))
        assert {name[-2:] for name in names} == {":0"}
        assert len(names) >= BLOCKS
        assert engine.metric("manthan_cold_bytes") == sum(map(redis_server.client.strlen, names))
