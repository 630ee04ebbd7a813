"""Codes in several tiers, each with a budget of its own: RAM, a disk, Redis."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from redis_server import RedisServer, running
from vllm_engine import Engine, Table

from manthan.vllm_hooks.http.cores import Cores

GUESTS = 8
SOURCES = {"host": "host", "disk": "disk", "redis": "external_unspecified"}
RAM, DISK = 1 << 20, 4 << 20
"""For two sessions, and for four: on disk a block takes whole pages."""


class Tier(NamedTuple):
    blocks: int
    used: int
    usable: int


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    yield from running(tmp_path_factory.mktemp("redis"))


@contextmanager
def engine(tiers: str, folder: Path, redis_server: RedisServer) -> Iterator[Engine]:
    """It is killed at the end, not stopped."""
    last = tiers.split(",")[-1]
    store = {"kind": last, "max_bytes": "64MiB"}
    store |= {"host_bytes": RAM} if "host" in tiers else {}
    store |= {"disk_bytes": DISK} if "disk" in tiers and last != "disk" else {}
    more: dict[str, Any] = {
        "disk": {"path": str(folder)},
        "redis": {"url": redis_server.url},
        "codec": {"guard": False},
    }
    made = Engine(131, idle_after_s=0.2, cold_store=store, **more)
    try:
        yield made
        made.kill()
    finally:
        made.stop()


def fronts(worker: Any) -> list[tuple[int, int, int]]:
    """Of each tier in front of another: blocks, bytes, and how many there may be."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    store, found = get_kv_transfer_group().worker.path.store, []
    while hasattr(store, "front"):
        found.append((len(store.front.names()), store.front.used, store.front.usable))
        store = store.behind
    return found


def keys_in_fronts(worker: Any) -> list[list[str]]:
    """Of each tier in front of another, the blocks."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    store, found = get_kv_transfer_group().worker.path.store, []
    while hasattr(store, "front"):
        found.append([key.hex() for _, key in store.front.names()])
        store = store.behind
    return found


def ask(engine: Engine, guest: int, **hints: Any) -> bool:
    """Whether the guest has returned."""
    prompt, right = Table(guest).question(2)
    answer = engine.ask(prompt, f"guest-{guest}", **hints)
    assert answer.text == right
    engine.wait(lambda: not any(map(engine.sessions, ("hot", "idle", "evicting"))), "only cold sessions")
    return answer.cached_tokens >= (answer.prompt_tokens - 1) // 32 * 32


def sources(engine: Engine) -> Counter[str]:
    """Restored tokens by where they came from, as vLLM counts them."""
    name, others = "prompt_tokens_cached_by_source_total", ("host", "disk", "p2p", "external_unspecified")
    return +Counter({source: int(engine.metric(name, source=source)) for source in others})


def restored_from(engine: Engine, guest: int) -> Counter[str]:
    before = sources(engine)
    assert ask(engine, guest)
    return sources(engine) - before


def check_what_is_told(engine: Engine, names: list[str], found: list[Tier]) -> None:
    """The API's books of each tier, beside what the worker has there. The books count bounds of what is being encoded,
    and no whole pages of a disk."""
    told = {name: told_of(engine, tier=name) for name in names}
    assert all(0 < len(told[near]) <= len(told[far]) for near, far in pairwise(names))
    everybody = told[names[-1]]
    assert len(everybody) == GUESTS
    for name, tier in zip(names[:-1], found, strict=True):
        assert all(session["tiers"].keys() >= {name} for session in told[name])
        parts = [session["tiers"][name] for session in everybody if name in session["tiers"]]
        assert abs(sum(part["blocks"] for part in parts) - tier.blocks) < 10, "of about 36, or 120"
        assert all(part["tokens"] == 32 * part["blocks"] and part["bytes"] > 0 for part in parts)
    tiers = engine.run(Cores(engine.llm).state(None))["store"]["tiers"]
    assert [tier["name"] for tier in tiers] == names
    assert [tier["budget_bytes"] >= tier["used_bytes"] > 0 for tier in tiers] == [True] * len(names)
    for session in everybody:
        all_of_it = {"tokens": session["tokens"], "blocks": session["blocks"], "bytes": session["cold_bytes"]}
        assert session["tiers"][names[-1]] == all_of_it
        if session["id"] == f"guest-{GUESTS - 1}":
            assert session["tiers"] == dict.fromkeys(names, all_of_it), "it was the last one"


def told_of(engine: Engine, **query: Any) -> list[dict[str, Any]]:
    """The sessions that the API lists."""
    asked = {"states": None, "bound": None, "tenant": None, "tier": None, "pinned": None, "prefix": ""}
    asked |= {"sort": "id", "descending": False, "limit": 100, "offset": 0}
    return engine.run(Cores(engine.llm).sessions(asked | query))["sessions"]


@pytest.mark.parametrize(
    "tiers",
    [
        pytest.param("host,disk", marks=pytest.mark.slow),
        pytest.param("disk,redis", marks=pytest.mark.slow),
        "host,disk,redis",
    ],
)
def test_sessions_come_from_whichever_has_them(tiers: str, tmp_path: Path, redis_server: RedisServer) -> None:
    redis_server.client.flushall()
    with engine(tiers, tmp_path, redis_server) as first:
        for guest in range(GUESTS):
            assert not ask(first, guest)
        found = [Tier(*each) for each in first.on_worker(fronts)]
        assert len(found) == tiers.count(",")
        for tier in found:
            assert tier.usable - 3 * 40_000 < tier.used <= tier.usable, "it is full"
            assert 0 < tier.blocks < 17 * GUESTS
        check_what_is_told(first, tiers.split(","), found)
        assert [ask(first, guest) for guest in range(GUESTS)] == [True] * GUESTS
        assert [tier.used <= tier.usable for tier in map(Tier._make, first.on_worker(fronts))] == [True] * len(found)
        near, far = (SOURCES[tier] for tier in (tiers.split(",")[0], tiers.split(",")[-1]))
        assert set(restored_from(first, GUESTS - 1)) == {near}
        before = first.on_worker(keys_in_fronts)
        assert restored_from(first, 0)[far] > 0, "of a tail at least"
        after = first.on_worker(keys_in_fronts)
        assert all(set(new) - set(old) for new, old in zip(after, before, strict=True)), "it is in every tier"
        assert [len({*map(str, s["tiers"].values())}) for s in told_of(first, prefix="guest-0")] == [1], "all of it"
        assert set(restored_from(first, 0)) == {near}
        prefetches = first.metric("manthan_prefetches_total")
        ask(first, 0, prefetch=["guest-1"])
        first.wait(lambda: first.metric("manthan_prefetches_total") > prefetches, "a prefetch")
        first.wait_until_cold(GUESTS)
        assert set(restored_from(first, 1)) == {near}, "it was expected"
        assert sum(sources(first).values()) == first.metric("external_prefix_cache_hits_total") > 0
    with engine(tiers, tmp_path, redis_server) as second:
        assert [ask(second, guest) for guest in range(GUESTS)] == [True] * GUESTS
        assert set(sources(second)) == {far}
        assert second.failures() == 0


@pytest.mark.slow
@pytest.mark.parametrize("tiers", ["host,disk", "host,disk,redis"])
def test_a_reset_empties_all_of_them(tiers: str, tmp_path: Path, redis_server: RedisServer) -> None:
    redis_server.client.flushall()
    with engine(tiers, tmp_path, redis_server) as first:
        for guest in range(4):
            ask(first, guest)
        first.wait(lambda: first.reset(cold=True), "a reset")
        first.ask("x")
        assert [blocks for blocks, _, _ in first.on_worker(fronts)] == [0] * tiers.count(",")
        assert [ask(first, guest) for guest in range(4)] == [False] * 4
        assert [ask(first, guest) for guest in range(4)] == [True] * 4
    with engine(tiers, tmp_path, redis_server) as second:
        found = [ask(second, guest) for guest in range(4)]
    assert found == [tiers.endswith("redis")] * 4, "what Redis had before is of all engines with these weights"
