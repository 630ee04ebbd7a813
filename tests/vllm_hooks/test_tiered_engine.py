"""Compressed blocks in several tiers, each with a budget of its own: RAM, a disk, Redis."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from redis_server import RedisServer
from vllm_engine import Engine, Table, running

from manthan.vllm_hooks.http.api import ask_all, list_sessions, summed

GUESTS = 6
TIERS = ["host", "disk", "redis"]
RAM, DISK = 1 << 20, 2 << 20
"""For two sessions, and for four: on disk a block takes whole pages."""


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    store = {"kind": "redis", "max_bytes": "64MiB", "host_bytes": RAM, "disk_bytes": DISK}
    (tmp_path / "redis").mkdir()
    (tmp_path / "disk").mkdir()
    with RedisServer(tmp_path / "redis", ()) as server:
        yield from running(
            blocks=131,
            idle=0.2,
            tiers=store | {"disk": str(tmp_path / "disk"), "redis": server.url},
            codec={"guard": False},
        )


def fronts(worker: Any) -> list[tuple[int, int, list[str]]]:
    """Of each tier in front of another: bytes, how many there may be, and keys of blocks."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    store, found = get_kv_transfer_group().worker.engine.store, []
    while hasattr(store := getattr(store, "own", store), "front"):
        keys = [key.hex() for _, key in store.front._blocks]
        found.append((store.front.used, store.front.usable, keys))
        store = store.behind
    return found


def ask(engine: Engine, guest: int, **hints: Any) -> bool:
    """Whether the guest has returned."""
    prompt, right = Table(guest).question(2)
    answer = engine.ask(prompt, f"guest-{guest}", **hints)
    assert answer.text == right
    engine.wait(lambda: not any(map(engine.sessions, ("active", "idle"))), "only cold sessions")
    if not hints:  # after a reset nothing is prefetched until somebody asks
        engine.empty_pool()
    return answer.cached_tokens >= (answer.prompt_tokens - 1) // 32 * 32


def sources(engine: Engine) -> Counter[str]:
    """Restored tokens by where they came from, as vLLM counts them."""
    name, others = "prompt_tokens_cached_by_source_total", ("host", "disk", "p2p", "external_unspecified")
    return +Counter({source: int(engine.metric(name, source=source)) for source in others})


def restored_from(engine: Engine, guest: int) -> Counter[str]:
    before = sources(engine)
    assert ask(engine, guest)
    return sources(engine) - before


def check_what_is_told(engine: Engine, found: list[int]) -> None:
    """The API's books of each tier, next to what the worker has there. The books count bounds of what is being encoded,
    and no whole pages of a disk."""
    names = TIERS
    told = {name: told_of(engine, tier=name) for name in names}
    assert all(0 < len(told[near]) <= len(told[far]) for near, far in pairwise(names))
    everybody = told[names[-1]]
    assert len(everybody) == GUESTS
    for name, blocks in zip(names[:-1], found, strict=True):
        assert all(session["tiers"].keys() >= {name} for session in told[name])
        parts = [session["tiers"][name] for session in everybody if name in session["tiers"]]
        assert abs(sum(part["blocks"] for part in parts) - blocks) < 10, "of about 36, or 70"
        assert all(part["tokens"] == 32 * part["blocks"] and part["bytes"] > 0 for part in parts)
    tiers = summed(engine.run(ask_all(engine.llm, "state", {"bound": None})))["store"]["tiers"]
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
    return engine.run(list_sessions(engine.llm, asked | query))["sessions"]


def test_sessions_come_from_whichever_has_them(engine: Engine) -> None:
    assert [ask(engine, guest) for guest in range(GUESTS)] == [False] * GUESTS
    found = engine.on_worker(fronts)
    assert len(found) == 2
    for used, usable, keys in found:
        assert usable - 3 * 40_000 < used <= usable, "it is full"
        assert 0 < len(keys) < 17 * GUESTS
    check_what_is_told(engine, [len(keys) for *_, keys in found])
    assert [ask(engine, guest) for guest in range(GUESTS)] == [True] * GUESTS
    assert all(used <= usable for used, usable, _ in engine.on_worker(fronts))
    assert set(restored_from(engine, GUESTS - 1)) == {"host"}
    before = engine.on_worker(fronts)
    assert restored_from(engine, 0)["external_unspecified"] > 0, "Redis has a tail at least"
    both = zip(engine.on_worker(fronts), before, strict=True)
    assert all(set(new) - set(old) for (*_, new), (*_, old) in both), "it is in every tier"
    assert [len({*map(str, s["tiers"].values())}) for s in told_of(engine, prefix="guest-0")] == [1], "all of it"
    assert set(restored_from(engine, 0)) == {"host"}
    prefetches = engine.metric("manthan_prefetches_total")
    ask(engine, 0, prefetch=["guest-1"])
    engine.wait(lambda: engine.metric("manthan_prefetches_total") > prefetches, "a prefetch")
    engine.wait_until_cold(GUESTS)
    assert set(restored_from(engine, 1)) == {"host"}, "it was expected"
    assert sum(sources(engine).values()) == engine.metric("external_prefix_cache_hits_total") > 0
    assert engine.failures() == 0
