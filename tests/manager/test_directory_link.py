"""Two managers and a real Redis between them: what one has stored of a chain and its anchors, the other finds."""

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import redis
from redis_server import running

from manthan.manager.config.model import RedisConfig
from manthan.manager.directory_link import DirectoryLink, Heard
from manthan.manager.observer import Observer
from manthan.manager.sessions.integrity import check_integrity
from manthan.manager.sessions.manager import SessionMemoryManager, SpillOrder
from manthan.manager.sessions.session import MemoryShape, Place
from manthan.manager.stores.redis.client import Circuit, connect
from manthan.manager.stores.redis.directory import RedisDirectory
from manthan.manager.stores.redis.index import RedisIndex
from manthan.manager.stores.redis.schema import Namespace
from manthan.policies import get_policy

CHAIN, WINDOW, STATE = 1, 0, 2
SHAPE = MemoryShape(16, 1000, {0: 100}, group=CHAIN, beside={WINDOW: {0: 50}, STATE: {0: 70}})
KEYS = [bytes([n]) * 32 for n in range(20)]
NAMESPACE = Namespace.of("manthan:", "tiny", {})
ANCHOR_NBYTES = 2 * 40 + 60
"""A block takes ten bytes less than was reserved for it."""


def beside(depth: int) -> Iterator[tuple[int, int]]:
    """The last two blocks of the window, and the last state."""
    yield from ((WINDOW, at) for at in range(max(0, depth - 2), depth))
    yield STATE, depth - 1


class Outcomes(Observer):
    """Of lookups."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def looked_up(self, outcome: str) -> None:
        self.said.append(outcome)


class One(NamedTuple):
    """An engine without the engine."""

    manager: SessionMemoryManager
    link: DirectoryLink
    outcomes: Outcomes
    raw: redis.Redis

    def ask(self, request: str, blocks: int) -> int:
        """A request of alice's; how many of its blocks can be restored."""
        self.manager.request_started(request, KEYS[:blocks], "alice", time.monotonic())
        self.link.look_up(request, KEYS[:blocks], time.monotonic())
        while self.link.awaits(request, time.monotonic()):
            self.link.hear(time.monotonic())
        check_integrity(self.manager)
        return self.manager.match(KEYS[:blocks])

    def finish(self, request: str, blocks: int) -> None:
        parts = [(group, KEYS[at], at) for group, at in beside(blocks)]
        self.manager.request_finished(request, KEYS[:blocks], time.monotonic(), places=[Place(blocks, parts)])
        self.store()

    def go_cold(self) -> None:
        self.manager.sweep(time.monotonic() + 1000)
        self.store()

    def store(self) -> None:
        """Carry out all orders, and say so."""
        self.tell()
        orders = {(CHAIN if order.group is None else order.group, order.key): order for order in self._orders()}
        self.link.reserve(orders.values())
        left = set(orders)
        until = time.monotonic() + 20
        while left:
            assert time.monotonic() < until
            heard: Heard = self.link.hear(time.monotonic())
            assert not heard.refused
            for group, key in heard.granted:
                order = orders[group, key]
                self.raw.set(NAMESPACE.block((group, key), 0), b"x")
                self.manager.spilled(key, order.nbytes - 10, time.monotonic(), order.group)
            for (group, key), nbytes in heard.stored:
                self.manager.spilled(key, nbytes, time.monotonic(), orders[group, key].group)
            left -= {*heard.granted, *(name for name, _ in heard.stored)}
        self.tell()

    def _orders(self) -> list[SpillOrder]:
        return self.manager.take_spills(1000)

    def tell(self) -> None:
        check_integrity(self.manager)
        self.link.tell(self.manager.take_drops(), time.monotonic())


@pytest.fixture
def raw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[redis.Redis]:
    for server in running(tmp_path_factory.mktemp("redis")):
        yield server.client


@pytest.fixture
def start(raw: redis.Redis) -> Iterator[Callable[[str], One]]:
    links = []

    def started(owner: str) -> One:
        manager = SessionMemoryManager(get_policy("lru"), SHAPE, 10_000, 10, min_tokens=16, is_shared=True, label=owner)
        circuit = Circuit()
        client = connect(RedisConfig(url=f"redis://127.0.0.1:{raw.connection_pool.connection_kwargs['port']}/0"))
        directory = RedisDirectory(
            lambda of: RedisIndex(client, circuit, of, owner, 1, 10_000, 1000),
            NAMESPACE,
            circuit,
            {"codec": "k3v3", "block_tokens": 16},
            lambda: None,
            collect_s=0.1,
        )
        outcomes = Outcomes()
        links.append(DirectoryLink(directory, manager, outcomes, 10, beside))
        links[-1].start()
        return One(manager, links[-1], outcomes, raw)

    yield started
    for link in links:
        link.close()


def wait(condition: Callable[[], object], what: str) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until, f"{what} did not come to pass"
        time.sleep(0.01)


def kept(raw: redis.Redis, nbytes: int) -> None:
    """So many bytes are stored, and nothing is only reserved."""
    info, pending = NAMESPACE.key("info"), NAMESPACE.key("pending")
    wait(lambda: raw.hget(info, "used_bytes") == str(nbytes) and not raw.zcard(pending), f"{nbytes} bytes")


def test_an_anchor_is_found_with_its_chain(start: Callable[[str], One], raw: redis.Redis) -> None:
    one = start("one")
    assert one.ask("r", 5) == 0
    one.finish("r", 6)
    kept(raw, ANCHOR_NBYTES)  # at once, while the session is hot
    two = start("two")
    assert two.ask("early", 8) == 0
    two.finish("early", 0)
    one.go_cold()
    kept(raw, 6 * 90 + ANCHOR_NBYTES)
    assert two.ask("r", 8) == 6
    assert two.outcomes.said == ["nothing", "found"]
    two.finish("r", 9)
    two.go_cold()
    kept(raw, 9 * 90 + ANCHOR_NBYTES)  # one's is nobody's any more
    assert one.ask("again", 11) == 9
    assert one.outcomes.said == ["nothing", "found"]


def test_a_chain_without_an_anchor_is_of_no_use(start: Callable[[str], One], raw: redis.Redis) -> None:
    one = start("one")
    one.ask("r", 5)
    one.finish("r", 6)
    one.go_cold()
    kept(raw, 6 * 90 + ANCHOR_NBYTES)
    for name in ("blocks", "sizes"):
        key = NAMESPACE.key(name)
        (raw.zrem if name == "blocks" else raw.hdel)(key, f"{KEYS[5].hex()}:{STATE}")
    two = start("two")
    assert two.ask("r", 8) == 0
    assert two.outcomes.said == ["nothing"]
