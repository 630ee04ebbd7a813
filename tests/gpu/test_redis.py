"""The real engine on a GPU with its codes in Redis: encoded by the kernels, decoded by them, or by numpy elsewhere."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import xxhash
from redis_server import RedisServer
from redis_server import running as redis_running
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm_engine import Engine, Table, running


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    yield from redis_running(tmp_path_factory.mktemp("redis"))


@pytest.fixture
def start(redis_server: RedisServer) -> Callable[..., Iterator[Engine]]:
    def start_one(kind: str, **more: Any) -> Iterator[Engine]:
        store = {"kind": kind, "max_bytes": "64MiB"}
        options = {"blocks": 131, "idle_after_s": 0.3, "sweep_interval_s": 0.1} | more
        yield from running(cold_store=store, redis={"url": redis_server.url}, **options)

    return start_one


def blocks_of(worker: Any) -> str:
    """What encodes and decodes the blocks of the one KV cache group."""
    [blocks] = get_kv_transfer_group().worker.path.blocks.values()
    return type(blocks).__name__


def ask_all(engine: Engine, seeds: range, index: int, least: float) -> None:
    """Everybody asks for an entry of his table, and gets the right answer, with that share of full blocks restored."""
    for seed in seeds:
        prompt, right = Table(seed).question(index)
        answer = engine.ask(prompt, f"guest {seed}")
        assert answer.text == right
        assert answer.cached_tokens >= least * (answer.full_blocks - 1) * 32


@pytest.mark.parametrize("kind", ["redis", "tiered"])
def test_sessions_return_at_the_same_engine_and_at_the_next(
    start: Callable[..., Iterator[Engine]], redis_server: RedisServer, kind: str
) -> None:
    redis_server.client.flushall()
    for engine in start(kind):
        assert engine.on_worker(blocks_of) == "PagedBlocks"
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
        assert engine.on_worker(blocks_of) == "CpuBlocks"
        ask_all(engine, range(3), 0, 0.95)
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
            [chain] = raw.scan_iter(f"*:chain:guest%20{seed}")
            [name] = raw.scan_iter(b"*:block:{%b}:0" % raw.lindex(chain, 3))
            raw.set(name, harm(raw.get(name)), keepttl=True)
            ask_all(engine, range(seed, seed + 1), 1, 0)
            wait_for_failure(engine, cause)


def sealed(value: bytes) -> bytes:
    """With the right checksum: nothing but what was changed is wrong."""
    return value[:8] + xxhash.xxh3_64(value[:8] + value[16:]).intdigest().to_bytes(8, "little") + value[16:]


def wait_for_failure(engine: Engine, cause: str) -> None:
    engine.wait(lambda: engine.metric("manthan_failures_total", cause=cause) == 1, f"a failure by {cause}")
