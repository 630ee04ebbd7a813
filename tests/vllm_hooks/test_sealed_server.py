"""`vllm serve` whose codes are sealed, and whose keys change while it is used."""

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from key_files import manthan_keys, write_keys
from redis_server import RedisServer, running
from server_sessions import failures, restored, wait_until_cold
from vllm_engine import Table

from manthan.benchmarks.server import VllmServer
from manthan.manager.stores.keyring import read_keys

pytestmark = pytest.mark.slow
MODEL = str(Path(__file__).parents[1] / "data" / "tiny-llama")
FLAGS = [
    *("--block-size", "32", "--num-gpu-blocks-override", "131", "--max-model-len", "2048"),
    *("--enforce-eager", "--enable-prompt-tokens-details"),
]
YAML = """
{{idle_after_s: 0.2, sweep_interval_s: 0.05, min_tokens: 64,
 cold_store: {{kind: {kind}, max_bytes: 64MiB, encryption: {{key_file: {keys}}}}},
 disk: {{path: {folder}}}, redis: {{url: "{url}"}}}}
"""
GUESTS, CLIENTS = 12, 3
BLOCKS = 17
"""Full ones of what a guest says before he asks."""
SLEEPERS = ("sleeper-1", "sleeper-2")
ROTATIONS = 5


class Traffic:
    """Guests who ask one after the other, several at a time; the pool is too small for them."""

    def __init__(self, server: VllmServer) -> None:
        self._server, self._done = server, threading.Event()
        self.wrong: list[str] = []
        self.rounds = Counter(range(CLIENTS))
        self._threads = [threading.Thread(target=self._ask, args=(client,)) for client in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _ask(self, client: int) -> None:
        while not self._done.is_set():
            for guest in range(client, GUESTS, CLIENTS):
                try:
                    ask(self._server, f"guest-{guest}", index=self.rounds[client] % 16)
                except Exception as error:
                    self.wrong.append(f"guest-{guest}: {error!r}")
            self.rounds[client] += 1

    def wait(self, rounds: int = 2) -> None:
        """Until each guest has asked so often again, and some of them were restored."""
        until, before = min(self.rounds.values()) + rounds, restored(self._server)
        self._server.wait_for(lambda: min(self.rounds.values()) >= until, 120, "answer all guests")
        self._server.wait_for(lambda: restored(self._server) >= before + 2 * BLOCKS, 120, "restore sessions")

    def stop(self) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join()


def ask(server: VllmServer, name: str, index: int = 0) -> int:
    """How many blocks of the prompt were not computed."""
    prompt, right = Table(sum(name.encode()) + 1000 * len(name)).question(index)
    reply = server.chat([{"role": "user", "content": prompt}], session_id=name, temperature=0, max_tokens=4)
    assert reply.text == right, f"{reply.text} is not {right}"
    return reply.cached_tokens // 32


def reads_again(server: VllmServer, current: str, count: int) -> None:
    said = f"{count}, current {current}"
    server.wait_for(lambda: any(said in line for line in server.new_log_lines()), 60, f"say {said!r}")


def marks_at_rest(kind: str, folder: Path, redis_server: RedisServer, keys: Path) -> set[str]:
    """The ids of the keys that something is sealed with, of those in the file."""
    if kind == "disk":
        kept = b"".join(path.read_bytes() for path in folder.rglob("*.seg"))
    else:
        raw = redis_server.binary_client
        kept = b"".join(raw.get(name) or b"" for name in raw.scan_iter("*:block:*"))
    return {key.id for mark, key in read_keys(keys).reading.items() if mark in kept}


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    yield from running(tmp_path_factory.mktemp("redis"))


@pytest.mark.parametrize("kind", ["disk", "redis"])
def test_keys_are_rotated_while_requests_run(kind: str, tmp_path: Path, redis_server: RedisServer) -> None:
    keys, folder = write_keys(tmp_path / "keys.yaml", "k1"), tmp_path / "codes"
    folder.mkdir()
    config = tmp_path / "manthan.yaml"
    config.write_text(YAML.format(kind=kind, keys=keys, folder=folder, url=redis_server.url))
    with VllmServer(MODEL, [*FLAGS, "--manthan-config", str(config)], tmp_path / "log") as server:
        server.wait_until_ready(600)
        for name in SLEEPERS:
            ask(server, name)
        wait_until_cold(server)
        traffic = Traffic(server)
        try:
            traffic.wait()
            for number in range(2, ROTATIONS + 2):
                manthan_keys("rotate", keys)
                reads_again(server, f"k{number}", count=number)
                traffic.wait()
            last = f"k{ROTATIONS + 1}"
            assert ask(server, SLEEPERS[0]) >= BLOCKS, "what the first key has sealed is read"
            assert not failures(server)
            assert {"k1", last} <= marks_at_rest(kind, folder, redis_server, keys)

            for number in range(1, ROTATIONS + 1):
                manthan_keys("remove", keys, f"k{number}")
                reads_again(server, last, count=ROTATIONS + 1 - number)
            assert ask(server, SLEEPERS[1]) == 0, "its key is gone"
            assert failures(server)["no_key"] > 0
            traffic.wait()
        finally:
            traffic.stop()
        assert not traffic.wrong
        wait_until_cold(server)
        before = failures(server)
        assert min(ask(server, f"guest-{guest}") for guest in range(GUESTS)) >= BLOCKS
        assert ask(server, SLEEPERS[1]) >= BLOCKS, "it is stored with another key"
        assert failures(server) == before
        assert {*before} == {"no_key"}
        server.kill()
