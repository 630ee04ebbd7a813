"""A real engine on a GPU with its tier in Redis: encoded by the kernels, decoded by these or by numpy."""

from collections.abc import Callable, Iterator
from typing import Any

import gpu_worker
import pytest
from redis_server import RedisServer
from redis_server import running as redis_running
from vllm_engine import Engine, Table, running


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    yield from redis_running(tmp_path_factory.mktemp("redis"))


@pytest.fixture
def start(redis_server: RedisServer) -> Callable[..., Iterator[Engine]]:
    def start_one(kind: str, **more: Any) -> Iterator[Engine]:
        store = {"kind": "redis", "max_bytes": "64MiB", "host_bytes": "16MiB" if kind == "host, redis" else 0}
        options = {"blocks": 131, "idle": 0.3} | more
        yield from running(tiers=store | {"redis": redis_server.url}, **options)

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
        assert engine.on_worker(gpu_worker.engine_name) == "CudaEngine"
        ask_all(engine, range(6), 0, 0)
        engine.wait_until_cold(6)
        ask_all(engine, range(6), 0, 0.95)
        engine.wait_until_cold(6)
        assert engine.failures() == 0
    for engine in start(kind):
        ask_all(engine, range(6), 1, 0.95)
        assert engine.metric("manthan_restored_blocks_total") >= 6 * 16
        assert engine.failures() == 0
