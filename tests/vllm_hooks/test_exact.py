"""Exact tokens in a real engine: which of them come back bit for bit, and what their blocks take in the store."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from redis_server import RedisServer, running
from scripts import run_script
from vllm_engine import BLOCK

from manthan.codec.block import BlockFormat, BlockShape
from manthan.manager.stores.arena import room

SCRIPT = "exact_sessions.py"
SINK = BLOCK + 4
"""A whole block, and the beginning of the next."""
CODEC = "k3v3"
"""Of fixed rate: what a block takes is known."""
EXACT = {"name": CODEC, "sink_tokens": SINK, "guard": False}
FORM = BlockFormat(CODEC, BlockShape(4, 2, BLOCK, 128), bytes(16))
SMALL = 100 * room(FORM.max_nbytes(0))
"""Bytes for not quite five sessions."""


def run(*what: str, **manthan: Any) -> dict[str, Any]:
    """What an engine does with these jobs."""
    manthan = {"min_tokens": 64, "idle_after_s": 3600, "codec": EXACT} | manthan
    job = {"what": what, "blocks": 131, "manthan": manthan}
    out, _ = run_script(SCRIPT, job)
    report: dict[str, Any] = json.loads(out)
    return report


@pytest.fixture(scope="module")
def roomy() -> dict[str, Any]:
    return run("grow", "prefetch", "damage", cold_store={"max_bytes": "64MiB"})


@pytest.fixture(scope="module")
def crowded() -> dict[str, Any]:
    return run("crowd", cold_store={"max_bytes": SMALL})


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    yield from running(tmp_path_factory.mktemp("redis"))


@pytest.fixture(scope="module")
def in_redis(redis_server: RedisServer) -> dict[str, Any]:
    redis = {"url": f"{redis_server.url}?socket_timeout=30", "ttl_s": 36000}
    return run("grow", cold_store={"kind": "redis", "max_bytes": "64MiB"}, redis=redis)


def exact_of(blocks: int) -> list[int]:
    """How many tokens of each block of a session are exact."""
    return [BLOCK, SINK - BLOCK] + [0] * (blocks - 2)


def tokens_of(exact: list[int]) -> list[int]:
    """The places of the exact tokens."""
    return [depth * BLOCK + n for depth, tokens in enumerate(exact) for n in range(tokens)]


def sizes_of(exact: list[int]) -> list[int]:
    return [FORM.max_nbytes(tokens) for tokens in exact]


def test_the_first_tokens_come_back_bit_for_bit_and_no_others(roomy: dict[str, Any]) -> None:
    first = roomy["rounds"][0]
    assert first["restored"] == len(first["exact"]) > 16
    assert first["exact"] == exact_of(first["restored"])
    assert first["same"] == tokens_of(first["exact"])


def test_what_is_stored_is_what_the_manager_counts(roomy: dict[str, Any]) -> None:
    for now in roomy["rounds"]:
        assert now["exact_blocks"] == 2
        assert now["sizes"] == sizes_of(now["exact"])
        assert now["cold_bytes"] == now["used"] == sum(map(room, now["sizes"]))


def test_a_prefetched_session_is_exact_in_the_same_places(roomy: dict[str, Any]) -> None:
    now = roomy["prefetched"]
    assert now["blocks"] > 16
    assert now["same"] == tokens_of(exact_of(now["blocks"]))


def test_a_damaged_block_is_computed_anew_and_the_first_tokens_stay_exact(roomy: dict[str, Any]) -> None:
    now, blocks = roomy["damage"], roomy["damage"]["blocks"]
    assert roomy["failures"] == ["checksum"]  # and nothing else in any job
    assert now["same"] == now["as_first"] == list(range(SINK))  # the others are as their codes say
    assert now["exact"] == exact_of(len(now["exact"]))
    assert now["sizes"] == sizes_of(now["exact"])
    assert now["restored"] == [blocks, blocks]
    assert now["as_computed"] == list(range((blocks - 2) * BLOCK))


def test_every_answer_is_right(roomy: dict[str, Any], crowded: dict[str, Any], in_redis: dict[str, Any]) -> None:
    assert [len(report["right"]) for report in (roomy, crowded, in_redis)] == [8, 12, 4]
    assert all(roomy["right"] + crowded["right"] + in_redis["right"])
    assert crowded["failures"] == in_redis["failures"] == []


def test_a_store_that_is_too_small_is_never_over_its_budget(crowded: dict[str, Any]) -> None:
    whole = []
    for number, now in enumerate(crowded["rounds"]):
        wanted = exact_of(now["blocks"])
        whole.append([name for name, cold in now["sessions"].items() if cold["exact"] == wanted])
        sizes = []
        for cold in now["sessions"].values():
            assert cold["exact"] == wanted[: len(cold["exact"])]  # tails are dropped first
            assert cold["sizes"] == sizes_of(cold["exact"])
            sizes += cold["sizes"]
        assert now["cold_bytes"] == now["used"] == sum(map(room, sizes)) <= now["peak"] <= SMALL
        assert f"user-{number}" in whole[-1]
    assert [len(names) for names in whole] == [1, 2, 3, 4, 4, 4, 4, 4]
    assert whole[-1] == ["user-4", "user-5", "user-6", "user-7"]


def test_redis_holds_what_the_manager_counts(in_redis: dict[str, Any], redis_server: RedisServer) -> None:
    for now in in_redis["rounds"]:
        assert now["sizes"] == sizes_of(now["exact"])
        assert now["cold_bytes"] == sum(now["sizes"])
    redis = redis_server.client
    assert sum(redis.strlen(name) for name in redis.scan_iter("*:block:*")) == in_redis["rounds"][-1]["cold_bytes"]
