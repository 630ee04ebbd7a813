"""Engines whose codes are sealed at rest: restarts, with keys that change meanwhile."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from key_files import write_keys
from redis_server import RedisServer, running
from vllm_engine import Engine, Table

GUESTS = {"alice-doe": "acme", "bob-poole": "", "carol-sue": "acme", "dave-smith": ""}


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    yield from running(tmp_path_factory.mktemp("redis"), "--rdbcompression", "no")


@contextmanager
def engine(kind: str, folder: Path, server: RedisServer) -> Iterator[Engine]:
    """It is killed at the end, not stopped."""
    store = {"kind": kind, "max_bytes": "64MiB", "encryption": {"key_file": str(folder / "keys")}}
    made = Engine(
        131,
        idle_after_s=0.2,
        cold_store=store,
        disk={"path": str(folder / "codes")} if kind == "disk" else {},
        redis={"url": server.url},
    )
    try:
        yield made
        made.kill()
    finally:
        made.stop()


def ask_all(engine: Engine) -> list[bool]:
    """Which guests have returned; answers are right in any case."""
    return [ask(engine, name) for name in GUESTS]


def ask(engine: Engine, name: str) -> bool:
    prompt, right = Table(sorted(GUESTS).index(name)).question(3)
    answer = engine.ask(prompt, name, tenant=GUESTS[name] or None)
    assert answer.text == right
    return answer.cached_tokens >= (answer.prompt_tokens - 1) // 32 * 32


def all_are_cold(engine: Engine) -> None:
    engine.wait(lambda: engine.sessions("cold") == len(GUESTS), "all sessions cold")


def at_rest(kind: str, folder: Path, server: RedisServer) -> bytes:
    """All that is on the disk, or in Redis."""
    if kind == "disk":
        return b"".join(path.read_bytes() for path in (folder / "codes").rglob("*") if path.is_file())
    raw = server.binary_client
    return b"".join(name + (raw.dump(name) or b"") for name in raw.scan_iter())


@pytest.mark.parametrize("kind", ["disk", pytest.param("redis", marks=pytest.mark.slow)])
def test_sessions_return_to_who_has_the_keys(kind: str, tmp_path: Path, redis_server: RedisServer) -> None:
    redis_server.client.flushall()
    path = tmp_path / "keys"
    write_keys(path, "k1")
    (tmp_path / "codes").mkdir()
    with engine(kind, tmp_path, redis_server) as first:
        assert ask_all(first) == [False] * 4
        all_are_cold(first)
    kept = at_rest(kind, tmp_path, redis_server)
    assert len(kept) > 100_000
    assert not any(word.encode() in kept for word in GUESTS)
    write_keys(path, "k2", "k1")
    with engine(kind, tmp_path, redis_server) as second:
        assert ask_all(second) == [True] * 4
        all_are_cold(second)
        assert second.failures() == 0
    write_keys(path, "k3")
    with engine(kind, tmp_path, redis_server) as third:
        assert ask_all(third) == [False] * 4
