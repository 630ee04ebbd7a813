"""A budget in Redis that is too small for all, and RAM in front of it that is smaller still."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from redis_server import RedisServer, running
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm_engine import Engine, Table

CODE_NBYTES = 25_856
BUDGET, FRONT = 60, 20
"""In blocks; a session has 17 or 18."""


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    yield from running(tmp_path_factory.mktemp("redis"))


@pytest.fixture(scope="module")
def engine(redis_server: RedisServer, start_engine) -> Iterator[Engine]:
    yield from start_engine(
        blocks=131,
        idle_after_s=0.3,
        sweep_interval_s=0.05,
        cold_store={"kind": "tiered", "max_bytes": BUDGET * CODE_NBYTES, "host_bytes": FRONT * CODE_NBYTES},
        redis={"url": redis_server.url, "timeout_s": 0.5, "ttl_s": 1000},
    )


def in_ram(worker: Any) -> tuple[int, int]:
    """Bytes used, and at most."""
    ram = get_kv_transfer_group().worker.path.store.front
    return ram.used, ram.max_bytes


def ask(engine: Engine, seed: int) -> int:
    """How many blocks were not computed, of a session that gets the right answer."""
    prompt, right = Table(seed).question(4)
    answer = engine.ask(prompt, f"guest-{seed}")
    assert answer.text == right
    return answer.cached_tokens // 32


def wait_until_quiet(engine: Engine) -> None:
    engine.wait(lambda: not any(map(engine.sessions, ("hot", "idle", "evicting"))), "quiet")


def test_redis_never_holds_more_than_the_budget(engine: Engine, redis_server: RedisServer) -> None:
    most, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            most[0] = max(most[0], redis_server.blocks())

    watcher = threading.Thread(target=watch)
    watcher.start()
    for seed in range(8):
        assert ask(engine, seed) == 0
        wait_until_quiet(engine)
    done.set()
    watcher.join()
    assert 2 * 17 <= most[0] <= BUDGET
    assert ask(engine, 7) >= 17  # the last are kept, the first have gone
    assert ask(engine, 0) == 0
    assert engine.metric("manthan_dropped_blocks_total", cause="budget") > 0
    assert engine.failures() == 0


def test_ram_serves_what_went_cold_last_while_redis_is_away(engine: Engine, redis_server: RedisServer) -> None:
    wait_until_quiet(engine)
    for seed in (20, 21):
        ask(engine, seed)
        wait_until_quiet(engine)
    used, max_bytes = engine.on_worker(in_ram)
    assert 17 * CODE_NBYTES <= used <= max_bytes
    redis_server.pause()
    assert ask(engine, 21) >= 17
    assert engine.failures() == 0
    ask(engine, 20)  # most of it is not in RAM
    assert engine.metric("manthan_failures_total", cause="store_down") > 0
    redis_server.resume()
    engine.wait(lambda: engine.metric("manthan_cold_store_up") == 1, "a store that answers")
    wait_until_quiet(engine)
    for seed in (21, 20, 21):
        assert ask(engine, seed) >= 17
        wait_until_quiet(engine)


def test_other_engines_sessions_make_room_by_their_age(engine: Engine, redis_server: RedisServer, start_engine) -> None:
    """A second engine finds the budget full of what the first has left, and drops the oldest of it."""
    wait_until_quiet(engine)
    for other in start_engine(
        blocks=131,
        idle_after_s=0.3,
        sweep_interval_s=0.05,
        cold_store={"kind": "redis", "max_bytes": BUDGET * CODE_NBYTES},
        redis={"url": redis_server.url, "timeout_s": 0.5, "ttl_s": 1000},
    ):
        for seed in range(40, 46):
            ask(other, seed)
            wait_until_quiet(other)
            assert redis_server.blocks() <= BUDGET
        assert ask(other, 45) >= 17
        assert ask(other, 21) == 0
        owners = {redis_server.client.hget(name, "owner") for name in redis_server.client.scan_iter("*:session:*")}
        assert len(owners) == 1
