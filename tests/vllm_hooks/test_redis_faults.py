"""Redis goes away, comes back empty, freezes, fills up or lies, while sessions come and go: answers stay right."""

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from redis_server import RedisServer, running
from vllm_engine import Engine, Table

GUESTS = 6
CODE_NBYTES = 29_000


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    yield from running(tmp_path_factory.mktemp("redis"))


@pytest.fixture(scope="module")
def shared_engine(redis_server: RedisServer, start_engine) -> Iterator[Engine]:
    """Sessions go cold after a fifth of a second; the pool has room for seven of them."""
    yield from start_engine(
        blocks=131,
        idle=0.2,
        tiers={"kind": "redis", "max_bytes": "64MiB", "redis": f"{redis_server.url}?socket_timeout=0.5"},
    )


@pytest.fixture
def engine(shared_engine: Engine, redis_server: RedisServer) -> Iterator[Engine]:
    """Nothing is left of an earlier test, and Redis is well."""
    yield shared_engine
    redis_server.resume()
    if not redis_server.is_running:
        redis_server.start()
    redis_server.client.config_set("maxmemory", "0")
    redis_server.client.flushall()
    shared_engine.wait(lambda: shared_engine.metric("manthan_cold_store_up") == 1, "a store that answers")
    shared_engine.start_afresh()


class Traffic:
    """Guests who ask again and again, about what they said at first, each under a name of his own."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine = engine
        self.tables = [Table(100 * seed + guest) for guest in range(GUESTS)]
        self.names = [f"guest-{seed}-{guest}" for guest in range(GUESTS)]
        self.rng = random.Random(seed)
        self.wrong: list[str] = []
        self.asked = 0

    def ask(self, guest: int) -> None:
        prompt, right = self.tables[guest].question(self.rng.randrange(16))
        answer = self.engine.ask(prompt, self.names[guest])  # raises if it takes two minutes
        self.asked += 1
        if answer.text != right:
            self.wrong.append(f"{self.names[guest]}: {answer} is not {right}")

    def ask_all(self) -> None:
        for guest in range(GUESTS):
            self.ask(guest)

    def flow(self, seconds: float, until: Callable[[], bool] = lambda: True) -> None:
        """Two at a time, with pauses in which sessions go cold. The pool is emptied, so that they return from Redis."""
        end = time.monotonic() + seconds
        with ThreadPoolExecutor(2) as pool:
            while time.monotonic() < end or not until():
                assert time.monotonic() < end + 60, "this never ends"
                list(pool.map(self.ask, self.rng.sample(range(GUESTS), 2)))
                time.sleep(self.rng.uniform(0, 0.5))
                self.engine.reset()


@pytest.fixture
def traffic(engine: Engine, request: pytest.FixtureRequest) -> Iterator[Traffic]:
    """Everybody has been here once and is cold; at the end, nobody has got a wrong answer."""
    traffic = Traffic(engine, sum(request.node.name.encode()))
    traffic.ask_all()
    wait_until_cold(engine)
    yield traffic
    assert traffic.wrong == []


def wait_until_cold(engine: Engine) -> None:
    """All sessions are: each guest's, and its forks, for other questions end in other blocks."""
    engine.wait(
        lambda: engine.sessions("cold") >= GUESTS and not any(map(engine.sessions, ("active", "idle"))),
        "only cold sessions",
    )


def restores(engine: Engine) -> float:
    return engine.metric("manthan_restored_blocks_total")


def failures(engine: Engine, cause: str) -> float:
    return engine.metric("manthan_failures_total", cause=cause)


def is_up(engine: Engine) -> bool:
    return engine.metric("manthan_cold_store_up") == 1


def assert_sessions_go_cold_and_return(engine: Engine, traffic: Traffic) -> None:
    """Redis is in use again, and nothing leaks."""
    engine.wait(lambda: is_up(engine), "a store that answers")
    traffic.ask_all()

    def all_return() -> bool:
        wait_until_cold(engine)
        engine.empty_pool()
        before = restores(engine)
        traffic.ask_all()
        return restores(engine) - before >= GUESTS * 16

    engine.wait(all_return, "a round in which everybody's session returns")


@pytest.mark.slow
def test_redis_stops_for_ten_seconds(engine: Engine, traffic: Traffic, redis_server: RedisServer) -> None:
    redis_server.kill()
    before = traffic.asked
    traffic.flow(10)
    assert traffic.asked - before >= 4
    engine.wait(lambda: not is_up(engine), "a store that is known to be down")
    assert failures(engine, "store_down") > 0
    redis_server.start()
    assert_sessions_go_cold_and_return(engine, traffic)


@pytest.mark.slow
def test_redis_freezes(engine: Engine, traffic: Traffic, redis_server: RedisServer) -> None:
    redis_server.pause()
    before = traffic.asked
    traffic.flow(6)
    assert traffic.asked - before >= 2
    assert failures(engine, "store_down") > 0
    redis_server.resume()
    assert_sessions_go_cold_and_return(engine, traffic)


@pytest.mark.slow
def test_redis_is_full(engine: Engine, traffic: Traffic, redis_server: RedisServer) -> None:
    used = redis_server.client.info("memory")["used_memory"]
    redis_server.client.config_set("maxmemory", used + 4 * CODE_NBYTES)
    other = Traffic(engine, 77)
    other.ask_all()
    traffic.flow(3, until=lambda: failures(engine, "store_full") > 0)
    other.ask_all()
    assert other.wrong == []
    assert is_up(engine)
    assert redis_server.client.info("stats")["evicted_keys"] == 0
    redis_server.client.config_set("maxmemory", "0")
    assert_sessions_go_cold_and_return(engine, traffic)
