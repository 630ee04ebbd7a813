"""The real engine on a GPU with its codes in Redis: encoded by the kernels, decoded by them, or by numpy elsewhere."""

from collections.abc import Callable, Iterator
from typing import Any

import gpu_worker
import numpy as np
import pytest
import xxhash
from redis_server import RedisServer
from redis_server import running as redis_running
from vllm_engine import BLOCK, Engine, Table, running

from manthan.codec import wire


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    yield from redis_running(tmp_path_factory.mktemp("redis"))


@pytest.fixture
def start(redis_server: RedisServer) -> Callable[..., Iterator[Engine]]:
    def start_one(kind: str, **more: Any) -> Iterator[Engine]:
        store = {"kind": "redis", "max_bytes": "64MiB", "host_bytes": "16MiB" if kind == "host, redis" else 0}
        options = {"blocks": 131, "idle_after_s": 0.3} | more
        yield from running(cold_store=store, redis={"url": redis_server.url}, **options)

    return start_one


def ask_all(engine: Engine, seeds: range, index: int, least: float) -> None:
    """Everybody asks for an entry of his table, and gets the right answer, with that share of full blocks restored."""
    for seed in seeds:
        prompt, right = Table(seed).question(index)
        answer = engine.ask(prompt, f"guest {seed}")
        assert answer.text == right
        assert answer.cached_tokens >= least * (answer.full_blocks - 1) * 32


@pytest.mark.parametrize("kind", ["redis", "host, redis"])
def test_sessions_return_at_the_same_engine_and_at_the_next(
    start: Callable[..., Iterator[Engine]], redis_server: RedisServer, kind: str
) -> None:
    redis_server.client.flushall()
    for engine in start(kind):
        assert engine.on_worker(gpu_worker.blocks_name) == "PagedBlocks"
        ask_all(engine, range(6), 0, 0)
        engine.wait_until_cold(6)
        ask_all(engine, range(6), 0, 0.95)
        engine.wait_until_cold(6)
        assert engine.failures() == 0
    for engine in start(kind):
        ask_all(engine, range(6), 1, 0.95)
        assert engine.metric("manthan_restored_blocks_total") >= 6 * 16
        assert engine.failures() == 0


def test_codes_of_the_kernels_are_read_by_numpy(
    start: Callable[..., Iterator[Engine]], redis_server: RedisServer
) -> None:
    redis_server.client.flushall()
    for engine in start("redis"):
        ask_all(engine, range(3), 0, 0)
        engine.wait_until_cold(3)
    for engine in start("redis", backend="numpy"):
        assert engine.on_worker(gpu_worker.blocks_name) == "CpuBlocks"
        ask_all(engine, range(3), 0, 0.95)
        assert engine.failures() == 0


@pytest.mark.parametrize("kind", ["redis", "host, redis"])
@pytest.mark.parametrize("backend", ["cuda", "numpy"])
def test_first_and_last_tokens_come_back_bit_for_bit(
    start: Callable[..., Iterator[Engine]], redis_server: RedisServer, kind: str, backend: str
) -> None:
    """Kernels write them, and kernels or numpy read them, at another engine."""
    redis_server.client.flushall()
    codec, (prompt, right) = {"sink_tokens": 4, "window_tokens": 40}, Table(7).question(3)
    for engine in start(kind, codec=codec):
        assert engine.ask(prompt, "exact").text == right
        whole, beginnings = (set(engine.on_worker(gpu_worker.digests, tokens)) for tokens in (BLOCK, 4))
        engine.wait_until_cold(1)
        assert engine.metric("manthan_exact_blocks") == 3
        encoded = engine.metric("manthan_encoded_blocks_total")
    for engine in start(kind, codec=codec, backend=backend):
        empty, no_beginnings = (set(engine.on_worker(gpu_worker.digests, tokens)) for tokens in (BLOCK, 4))
        assert engine.ask(prompt, "exact").text == right
        restored = engine.metric("manthan_restored_blocks_total")
        computed = int(encoded - restored)
        assert computed <= 1 < 15 < restored
        assert len(set(engine.on_worker(gpu_worker.digests, BLOCK)) & whole - empty) == 2 - computed
        assert len(set(engine.on_worker(gpu_worker.digests, 4)) & beginnings - no_beginnings) == 3 - computed
        assert engine.failures() == 0


def test_damaged_values_are_recomputed(start: Callable[..., Iterator[Engine]], redis_server: RedisServer) -> None:
    redis_server.client.flushall()
    raw = redis_server.binary_client
    for engine in start("redis"):
        ask_all(engine, range(4), 0, 0)
        engine.wait_until_cold(4)
        harms = {
            "truncated": lambda value: value[:-1],
            "trailing": lambda value: value + b"\0",
            "checksum": lambda value: value[:9000] + bytes([value[9000] ^ 1]) + value[9001:],
            "version": lambda value: sealed(value[:4] + b"\x63\x00" + value[6:]),
        }
        for seed, (cause, harm) in enumerate(harms.items()):
            first = {name for name in raw.scan_iter("*:block:*") if first_token(raw.get(name)) == 0}
            name = sorted(first)[seed]
            raw.set(name, harm(raw.get(name)), keepttl=True)
            ask_all(engine, range(4), 1, 0)
            wait_for_failure(engine, cause)


def first_token(value: bytes) -> int:
    return wire.parse(np.frombuffer(value, np.uint8)).header.first_token


def sealed(value: bytes) -> bytes:
    """With the right checksum: nothing but what was changed is wrong."""
    return value[:8] + xxhash.xxh3_64(value[:8] + value[16:]).intdigest().to_bytes(8, "little") + value[16:]


def wait_for_failure(engine: Engine, cause: str) -> None:
    engine.wait(lambda: engine.metric("manthan_failures_total", cause=cause) == 1, f"a failure by {cause}")
