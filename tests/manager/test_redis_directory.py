"""The thread that keeps the books, on a real server: what the engine asks, tells and hears."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import numpy as np
import pytest
import redis
from redis_data import session_info
from redis_server import RedisServer, running

from manthan.manager.config.model import RedisConfig
from manthan.manager.sessions.session import Drop, DropCause
from manthan.manager.stores.directory import Answers, Room
from manthan.manager.stores.redis.client import Circuit, connect
from manthan.manager.stores.redis.directory import RedisDirectory
from manthan.manager.stores.redis.index import RedisIndex
from manthan.manager.stores.redis.schema import BlockId, Namespace, SessionRecord, StoredChain
from manthan.manager.stores.redis.store import RedisStore

FACTS = {"model": "tiny", "codec": "k3v3", "block_tokens": 32}
GROUP, BOUND, NBYTES = 0, 6, 4
BUDGET = 8 * BOUND


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    yield from running(tmp_path_factory.mktemp("redis"))


@pytest.fixture
def raw(server: RedisServer) -> redis.Redis:
    return server.client


@dataclass
class One:
    """An engine's directory, and all that it has said."""

    directory: RedisDirectory
    store: RedisStore
    namespace: Namespace
    rung: threading.Event

    def __post_init__(self) -> None:
        self.heard = Answers()

    def hear(self, condition: Callable[[Answers], object]) -> Answers:
        """Collect answers until they are as wanted; later ones replace counts and are added to lists."""
        deadline = time.monotonic() + 20
        while not condition(self.heard):
            assert time.monotonic() < deadline, f"only heard {self.heard}"
            self.rung.wait(0.05)
            self.rung.clear()
            new = self.directory.take()
            for part in fields(Answers):
                old, value = getattr(self.heard, part.name), getattr(new, part.name)
                if part.name in ("used", "strangers"):
                    value = old if value is None else value
                elif isinstance(value, dict):
                    value = old | value
                else:
                    value = old + value if isinstance(value, list) else old or value
                setattr(self.heard, part.name, value)
        return self.heard

    def keep(self, text: str) -> None:
        """Reserve blocks and write what was granted."""
        self.directory.reserve(rooms(text))
        self.hear(lambda a: {*a.granted, *(block[:2] for block in a.stored)} >= {*ids(text)})
        assert self.store.put_all(GROUP, {key: codes(key) for _, key in self.heard.granted}) == {}

    def tell(self, *records: SessionRecord, drops: list[Drop] = []) -> None:  # noqa: B006
        self.directory.tell(records, drops, [])


@pytest.fixture
def start(server: RedisServer) -> Iterator[Callable[..., One]]:
    started = []

    def start_one(owner: str, ttl_s: float = 100) -> One:
        rung = threading.Event()
        circuit, config = Circuit(rung.set), RedisConfig(url=server.url, timeout_s=0.5)
        client, namespace = connect(config), Namespace.of("manthan:", "tiny", {})
        directory = RedisDirectory(
            lambda of: RedisIndex(client, circuit, of, owner, 1, BUDGET, ttl_s),
            namespace,
            circuit,
            FACTS,
            rung.set,
            collect_s=0.1,
        )
        directory.start()
        store = RedisStore(connect(config), Circuit(), namespace, 0, ttl_s)
        started.append(One(directory, store, namespace, rung))
        return started[-1]

    yield start_one
    for one in started:
        one.directory.close()
        one.store.close()


def keys(text: str) -> list[bytes]:
    return [text[: n + 1].encode() for n in range(len(text))]


def ids(text: str) -> list[BlockId]:
    return [(GROUP, key) for key in keys(text)]


def rooms(text: str) -> list[Room]:
    return [Room(key, GROUP, BOUND) for key in keys(text)]


def codes(key: bytes) -> np.ndarray:
    return np.frombuffer(key.ljust(4)[-4:], np.uint8)


def record(session_id: str, text: str) -> SessionRecord:
    now = time.time()
    named = tuple(keys(text))
    chain = StoredChain(GROUP, named, b"\1" * len(named), (NBYTES,) * len(named))
    return SessionRecord(session_id, session_info(session_id, now, now), chain)


def wait(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_what_one_engine_stores_another_finds(start: Callable[..., One], raw: redis.Redis) -> None:
    one, two = start("one"), start("two")
    one.keep("abc")
    one.tell(record("alice", "abc"))
    wait(lambda: raw.exists(one.namespace.session("alice")))
    assert two.directory.look_up("r1", GROUP, keys("abcd"))
    assert two.hear(lambda a: a.found).found == {"r1": [NBYTES] * 3}
    assert [bytes(buf) for buf in two.store.read(GROUP, keys("abc")) if buf is not None] == [b"a   ", b"ab  ", b"abc "]
    two.keep("abcd")
    assert two.heard.stored == [(*block, NBYTES) for block in ids("abc")]
    assert two.heard.granted == [(GROUP, b"abcd")]
    strangers = two.hear(lambda a: a.strangers).strangers
    assert [(s.session_id, s.nbytes) for s in strangers or []] == [("alice", 3 * NBYTES)]


def test_strangers_that_have_to_go_make_room(start: Callable[..., One]) -> None:
    one, two = start("one"), start("two")
    one.keep("abcdef")
    one.tell(record("alice", "abcdef"))
    strangers = two.hear(lambda a: a.strangers).strangers
    two.directory.tell([], [], strangers or [])
    two.directory.reserve(rooms("uvwxyz"))
    assert two.hear(lambda a: len(a.granted) == 6).refused == []


def test_no_room_is_a_refusal(start: Callable[..., One]) -> None:
    one = start("one")
    one.keep("abcdef")
    one.directory.reserve(rooms("uvwxyz"))
    assert one.hear(lambda a: a.refused).refused == [(GROUP, key, "store_full") for key in keys("uvwxyz")[2:]]


def test_news_wait_for_a_server_that_is_down(start: Callable[..., One], server: RedisServer) -> None:
    one = start("one")
    one.keep("abc")
    server.pause()
    one.directory.reserve(rooms("xyz"))
    assert one.hear(lambda a: len(a.refused) == 3).refused[0] == (GROUP, b"x", "store_down")
    wait(lambda: not one.directory.is_up)
    assert not one.directory.look_up("r1", GROUP, keys("abc"))
    one.tell(record("alice", "ab"))
    one.tell(record("alice", "abc"))
    server.resume()
    wait(lambda: one.directory.is_up)
    asked = 3 * BOUND  # the server may have been given the question that nobody waited for
    one.hear(lambda a: a.used in (3 * NBYTES, 3 * NBYTES + asked))
    assert server.client.llen(one.namespace.chain("alice")) == 3


def test_a_server_that_came_back_empty_is_noticed(start: Callable[..., One], server: RedisServer) -> None:
    one = start("one")
    one.keep("abc")
    one.tell(record("alice", "abc"))
    wait(lambda: server.client.exists(one.namespace.session("alice")))
    server.kill()
    server.start()
    one.hear(lambda a: a.emptied)
    one.keep("xy")
    one.tell(record("bob", "xy"))
    wait(lambda: server.client.exists(one.namespace.session("bob")))
    assert not server.client.exists(one.namespace.session("alice"))


def test_what_a_server_persists_is_there_after_its_restart(start: Callable[..., One], server: RedisServer) -> None:
    server.client.config_set("appendonly", "yes")
    server.client.config_set("appendfsync", "always")
    server.flags += ["--appendonly", "yes"]
    one = start("one")
    one.keep("abc")
    one.tell(record("alice", "abc"))
    wait(lambda: server.client.exists(one.namespace.session("alice")))
    wait(lambda: server.client.info("persistence")["aof_rewrite_in_progress"] == 0)
    server.kill()
    server.start()
    one.heard = Answers()
    one.hear(lambda a: a.used == 3 * NBYTES)
    assert not one.heard.emptied
    assert one.directory.look_up("r1", GROUP, keys("abc"))
    assert one.hear(lambda a: a.found).found == {"r1": [NBYTES] * 3}


def test_a_session_that_expires_is_told(start: Callable[..., One], raw: redis.Redis) -> None:
    one = start("one", ttl_s=1)
    one.keep("abc")
    one.tell(record("alice", "abc"))
    assert one.hear(lambda a: a.expired).expired == ["alice"]
    wait(lambda: not list(raw.scan_iter("*:block:*")))


def test_two_conversations_of_one_name(start: Callable[..., One], raw: redis.Redis) -> None:
    one, two = start("one"), start("two")
    for engine, text in ((one, "ab"), (two, "xy")):
        engine.keep(text)
        engine.tell(record("alice", text))
        engine.hear(lambda a: a.used is not None)
    wait(lambda: raw.exists(two.namespace.session("alice~two")))
    assert raw.lindex(one.namespace.chain("alice"), 0) == f"{b'a'.hex()}:{GROUP}"
    two.tell(SessionRecord("alice"))
    wait(lambda: not raw.exists(two.namespace.session("alice~two")))
    assert raw.exists(one.namespace.session("alice"))


def test_an_anonymous_session_goes_on_under_one_name(start: Callable[..., One], raw: redis.Redis) -> None:
    one, two = start("one"), start("two")
    one.keep("ab")
    one.tell(record("anonymous-one-1", "ab"))
    wait(lambda: raw.exists(one.namespace.session("anonymous-one-1")))
    two.keep("abc")
    two.tell(record("anonymous-two-1", "abc"))
    wait(lambda: not raw.exists(one.namespace.session("anonymous-one-1")))
    assert raw.zcard(one.namespace.key("blocks")) == 3


def test_after_a_reset_nothing_is_shared_any_more(start: Callable[..., One], raw: redis.Redis) -> None:
    one, two = start("one"), start("two")
    for engine, name, text in ((one, "alice", "ab"), (two, "bob", "xy")):
        engine.keep(text)
        engine.tell(record(name, text))
    wait(lambda: raw.exists(one.namespace.session("alice"), one.namespace.session("bob")) == 2)
    place = one.directory.reset()
    wait(lambda: not raw.exists(one.namespace.session("alice")))
    assert raw.exists(one.namespace.session("bob"))
    assert place != one.namespace.name
    assert one.directory.look_up("r1", GROUP, keys("xy"))
    assert one.hear(lambda a: a.found).found == {"r1": []}
    one.heard = Answers()
    one.directory.reserve(rooms("xy"))
    assert one.hear(lambda a: a.granted).granted == ids("xy")
    apart = one.store.cleared(place)
    assert apart.put_all(GROUP, {b"x": codes(b"x")}) == {}
    assert raw.exists(Namespace("manthan:", place).block((GROUP, b"x"), 0))


def test_what_was_granted_before_a_reset_is_refused(start: Callable[..., One]) -> None:
    """Every block that was asked for gets an answer: the engine holds its bf16 copy until then."""
    one = start("one")
    one.directory.reserve(rooms("ab"))
    wait(lambda: one.directory._answers.granted)
    one.directory.reset()
    answers = one.hear(lambda a: a.refused)
    assert (answers.granted, answers.refused) == ([], [(GROUP, key, "reset") for key in keys("ab")])


def test_an_error_that_nobody_thought_of_costs_an_answer_and_not_the_thread(
    start: Callable[..., One], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = start("one")
    with monkeypatch.context() as patch:
        for name in ("look_up", "reserve", "collect"):
            patch.setattr(RedisIndex, name, lambda *args: 1 / 0)
        one.directory.look_up("r1", GROUP, keys("a"))
        one.directory.reserve(rooms("a"))
        answers = one.hear(lambda a: a.refused and a.found)
        assert (answers.refused, answers.found) == ([(GROUP, b"a", "internal")], {"r1": []})
    one.keep("ab")


def test_dropped_codes_leave_unless_a_session_holds_them(start: Callable[..., One], raw: redis.Redis) -> None:
    one = start("one")
    one.keep("abc")
    one.tell(record("alice", "ab"))
    one.tell(drops=[Drop(GROUP, keys("abc"), DropCause.ABANDONED)])
    wait(lambda: not raw.exists(one.namespace.block((GROUP, b"abc"), 0)))
    assert raw.exists(one.namespace.block((GROUP, b"ab"), 0))
    one.tell(drops=[Drop(GROUP, [b"ab"], DropCause.FAILED)])  # nobody can read it
    wait(lambda: not raw.exists(one.namespace.block((GROUP, b"ab"), 0)))
