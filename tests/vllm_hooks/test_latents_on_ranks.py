"""Latents (MLA) on two ranks: both have the same. RAM, a disk and Redis have them once."""

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from latent_model import VOCAB, allow_prefix_caching, make_latent_model
from redis_server import RedisServer
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.platforms.cpu import CpuPlatform
from vllm_engine import Completion, until_killed

from manthan.manager.tiers.disk import found_in
from manthan.manager.tiers.joined import Shard

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
    """Compressed blocks in RAM."""
    yield from start_engine(model=model, tiers={"max_bytes": "64MiB"}, **MANTHAN)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["redis", "disk"])
def test_what_lasts_has_them_once_whatever_the_number_of_ranks(model: str, tmp_path: Path, kind: str) -> None:
    """One rank reads what the first of two has written, and two read it, too."""
    rng, found = random.Random(2), list[Completion]()
    held: list[list[set[str]]] = []
    prompt = [rng.randrange(10, VOCAB) for _ in range(BLOCKS * BLOCK + 1)]
    (folder := tmp_path / "disk").mkdir()
    with RedisServer(tmp_path) as server:
        tiers = {"kind": kind, "redis": server.url, "max_bytes": "64MiB", "disk": {"path": str(folder)}}
        for ranks in (2, 1, 2):
            with until_killed(model=model, tiers=tiers, **MANTHAN | {"ranks": ranks, "idle": 0.2}) as engine:
                found += [engine.run(engine.complete(prompt, "s", ANSWER)) for _ in range(2)]
                held.append(engine.on_workers(digests))
                assert engine.failures() == 0
                engine.wait_until_cold(1)
        names = [name.rpartition(":")[2] for name in server.client.scan_iter("manthan:*:block:*")]
    files = list(folder.glob("*/rank-*/blocks"))
    if kind == "redis":
        assert {*names} == {"0-of-1"}
        assert BLOCKS <= len(names) <= BLOCKS + 1, "with the answer's"
    else:
        assert [file.parent.name for file in files] == ["rank-0-of-1"]
        assert BLOCKS <= len(found_in(files[0].parents[1], Shard(0, 1))) <= BLOCKS + 1
    computed, hot, one, _, two, _ = found
    assert computed.cached_tokens == 0
    assert one.cached_tokens == two.cached_tokens == BLOCKS * BLOCK
    assert (two.tokens, two.logprobs) == (hot.tokens, hot.logprobs)
    [written, same], [alone], [first, second] = held
    assert len(written & same & alone & first & second) >= BLOCKS


def digests(worker: Any) -> set[str]:
    """Of the blocks of the first layer that hold anything."""
    [blocks] = get_kv_transfer_group().worker.engine.blocks.values()
    rows = blocks._memory._rows[0].view(torch.uint8).numpy()
    return {hashlib.sha256(row.tobytes()).hexdigest() for row in rows if row.any()}


def forget_latents(worker: Any) -> None:
    """Whatever is restored into the pool from now on, it is not what was there."""
    [blocks] = get_kv_transfer_group().worker.engine.blocks.values()
    for rows in blocks._memory._rows:
        rows[:] = 0


def kept(worker: Any) -> tuple[int, int] | None:
    """Blocks, and their bytes, in a rank's RAM; None if it has no tier of its own."""
    store = get_kv_transfer_group().worker.engine.store
    return (len(store._blocks), store.used) if hasattr(store, "_blocks") else None


def change(worker: Any, what: str) -> None:
    """Have the first rank damage or lose a session's first block, or answer the other rank no more."""
    from manthan.codec import wire

    half = get_kv_transfer_group().worker
    if worker.rank:
        return
    store = half.engine.store
    found = [(*name, next(store.read(name[0], [name[1]]))) for name in list(store._blocks)]
    group, key, buf = min(found, key=lambda each: wire.parse(each[2]).header.first_token)
    if what == "damaged":
        buf[5000] ^= 1
        store.put_all(group, {key: buf})
    elif what == "lost":
        store.drop(group, [key])
    else:
        half._server.close()


def start_afresh(pair: Any) -> None:
    """Have nothing resident and nothing saved."""
    pair.wait(lambda: pair.reset(cold=True), "a reset")
    pair.run(pair.complete([10, 11], "other", 1))  # the reset reaches the metrics with the next step
    pair.wait(lambda: pair.metric("manthan_cold_bytes") == 0, "an empty store")


@pytest.mark.slow
def test_latents_are_kept_once_and_come_back_on_both_ranks(pair: Any) -> None:
    """As out of the hot cache. One token is behind the last full block: the CPU's kernel for single tokens reads the
    paged cache. What the rank that keeps them has damaged or lost, or does not give, is computed again."""
    rng = random.Random(1)
    prompt = [rng.randrange(10, VOCAB) for _ in range(BLOCKS * BLOCK + 1)]

    def ask() -> Completion:
        return pair.run(pair.complete(prompt, "duo", ANSWER))

    computed, hot = ask(), ask()
    for _ in range(2):
        pair.wait_until_cold(1)
        first, second = pair.on_workers(kept)
        assert second is None
        assert BLOCKS <= first[0] <= BLOCKS + 1, "with the answer's"
        assert pair.metric("manthan_cold_bytes") == first[1]
        pair.on_workers(forget_latents)
        cold = ask()
        assert hot.cached_tokens == cold.cached_tokens == BLOCKS * BLOCK
        assert (cold.tokens, cold.logprobs) == (hot.tokens, hot.logprobs)
        assert pair.failures() == 0
        assert len(set.intersection(*pair.on_workers(digests))) >= BLOCKS
        start_afresh(pair)
        assert pair.on_workers(kept) == [(0, 0), None]
        computed = ask()
        assert computed.cached_tokens == 0
    for what, cause in (("damaged", "checksum"), ("lost", "missing"), ("silent", "store_down")):
        pair.wait_until_cold(1)
        pair.on_workers(change, what)
        again = ask()
        assert (again.tokens, again.cached_tokens) == (computed.tokens, 0), what
        assert pair.metric("manthan_failures_total", cause=cause) >= 1
        if what != "silent":
            start_afresh(pair)
            ask()
