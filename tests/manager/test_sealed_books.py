"""Books that are sealed: the journal on a disk, and sessions in a real Redis."""

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from key_files import write_keys
from redis_data import blocks_of
from redis_data import record as saved
from redis_server import RedisServer, running
from typer.testing import CliRunner

from manthan.manager.cli import app
from manthan.manager.config.model import RedisConfig
from manthan.manager.sessions.session import Drop, DropCause
from manthan.manager.stores.directory import Room
from manthan.manager.stores.disk.journal import Journal, JournalBlock, JournalChain, JournalSession
from manthan.manager.stores.keyring import KeyRing
from manthan.manager.stores.redis.client import Circuit, connect
from manthan.manager.stores.redis.directory import RedisDirectory
from manthan.manager.stores.redis.index import RedisIndex
from manthan.manager.stores.redis.reader import Reader
from manthan.manager.stores.redis.schema import Namespace, SessionRecord
from manthan.manager.stores.redis.store import RedisStore
from manthan.manager.stores.sealed import SealedStore, Sealer

PLACE = "tiny-0123456789ab"
KEYS = [f"key-{number:028d}".encode() for number in range(6)]
FACTS = {"model": "tiny", "codec": "k3v3", "block_tokens": 32, "ranks": 1}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_keys(tmp_path / "keys.yaml", "k1", tenants={"acme": ["a1"]})


# -- the journal --------------------------------------------------------------------------------------


def session(name: str, tenant: str = "", blocks: int = 3) -> JournalSession:
    chain = tuple(JournalBlock(KEYS[at], 1, at, 0) for at in range(blocks))
    notes = tuple(b"note of " + block.key for block in chain)
    return JournalSession(name, {"tenant": tenant, "asked_id": name}, JournalChain(chain), notes)


def journal(folder: Path, path: Path, place: str = PLACE) -> Journal:
    return Journal(folder, Sealer(KeyRing(path), place))


def found(folder: Path, path: Path, place: str = PLACE) -> dict[str, JournalSession]:
    made = journal(folder, path, place)
    sessions = {each.session_id: each for each in made.sessions()}
    made.close()
    return sessions


def rows(folder: Path) -> dict[str, tuple[bytes, ...]]:
    with sqlite3.connect(folder / "sessions.sqlite") as db:
        return {name: tuple(sealed) for name, *sealed in db.execute("SELECT id, facts, chain, notes FROM sessions")}


ALICE, BOB = session("acme/alice", "acme"), session("bob")


@pytest.fixture
def folder(tmp_path: Path, path: Path) -> Path:
    """A journal with two sessions."""
    folder = tmp_path / PLACE
    made = journal(folder, path)
    made.tell([ALICE, BOB])
    made.close()
    return folder


def test_sessions_come_back_and_nothing_of_them_is_to_be_seen(folder: Path, path: Path) -> None:
    kept = b"".join(file.read_bytes() for file in folder.iterdir())
    assert len(rows(folder)) == 2
    assert not any(word in kept for word in (b"alice", b"acme", b"bob", b"tenant", *KEYS))
    assert found(folder, path) == {"acme/alice": ALICE, "bob": BOB}


def test_facts_change_alone_and_sessions_go(folder: Path, path: Path) -> None:
    made = journal(folder, path)
    made.tell([JournalSession("bob", {"tenant": "", "asked_id": "robert"}, None), JournalSession("acme/alice")])
    made.close()
    assert found(folder, path) == {
        "bob": JournalSession("bob", {"tenant": "", "asked_id": "robert"}, BOB.chain, BOB.notes)
    }


def test_rows_do_not_open_in_each_other_s_place(folder: Path, path: Path) -> None:
    (first, one), (second, two) = rows(folder).items()
    with sqlite3.connect(folder / "sessions.sqlite") as db:
        db.execute("UPDATE sessions SET facts = ?, chain = ?, notes = ? WHERE id = ?", (*two, first))
        db.execute("UPDATE sessions SET facts = ? WHERE id = ?", (two[1], second))
    assert one != two
    assert found(folder, path) == {}
    assert rows(folder) == {}  # nobody could ever read them


@pytest.mark.parametrize("other", ["keys", "place"])
def test_with_another_key_or_of_another_model_there_are_none(
    folder: Path, path: Path, tmp_path: Path, other: str
) -> None:
    if other == "keys":
        path = write_keys(tmp_path / "other.yaml", "k1", of="other")
    assert found(folder, path, PLACE if other == "keys" else "tiny-ba9876543210") == {}


def test_a_tenant_that_is_forgotten_has_no_sessions(folder: Path, path: Path) -> None:
    made = journal(folder, path)
    assert CliRunner().invoke(app, ["keys", "forget", str(path), "acme"]).exit_code == 0
    made.tell([JournalSession("acme/alice", {"tenant": "acme"}, None), session("acme/carol", "acme")])
    made.close()
    assert len(rows(folder)) == 1
    assert found(folder, path) == {"bob": BOB}


def test_what_is_not_sealed_is_not_taken(folder: Path, path: Path) -> None:
    with sqlite3.connect(folder / "sessions.sqlite") as db:
        db.execute("INSERT INTO sessions VALUES ('carol', '{\"id\": \"carol\"}', x'0000000000000000', x'')")
    assert set(found(folder, path)) == {"acme/alice", "bob"}


# -- Redis --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    yield from running(tmp_path_factory.mktemp("redis"))


@pytest.fixture
def server(one_server: RedisServer) -> RedisServer:
    one_server.client.flushall()
    return one_server


class One:
    """An engine's books and its store."""

    def __init__(self, server: RedisServer, path: Path, owner: str, ttl_s: float = 100) -> None:
        self.rung, circuit, ring = threading.Event(), Circuit(), KeyRing(path)
        client, namespace = connect(RedisConfig(url=server.url)), Namespace("manthan:", PLACE)
        sealer = Sealer(ring, PLACE)
        self.directory = RedisDirectory(
            lambda of: RedisIndex(client, circuit, of, owner, 1, 100_000, ttl_s, names=sealer.names),
            namespace,
            circuit,
            FACTS,
            self.rung.set,
            collect_s=0.1,
            sealer=sealer,
        )
        self.directory.start()
        self.store = SealedStore(RedisStore(client, Circuit(), namespace, 0, ttl_s), sealer, 0)

    def hear(self, what: Callable[[object], object]) -> object:
        """The first answer that has something of this."""
        deadline = time.monotonic() + 20
        while True:
            if told := what(self.directory.take()):
                return told
            assert time.monotonic() < deadline
            self.rung.wait(0.05)
            self.rung.clear()

    def keep(self, session_id: str, count: int, tenant: str = "") -> SessionRecord:
        """Store the first so many blocks, and say that they are this session's."""
        self.directory.reserve([Room(key, 0, 6000) for key in KEYS[:count]])
        self.hear(lambda answers: answers.granted or answers.stored)  # type: ignore[attr-defined]
        assert self.store.put_all(0, blocks_of(KEYS[:count], 0), tenant) == {}
        made = saved(session_id, KEYS[:count], ranks=1)
        assert made.info is not None
        made = made._replace(info=made.info._replace(tenant=tenant))
        self.directory.tell([made], [], [])
        return made

    def look_up(self, count: int) -> list[int]:
        assert self.directory.look_up("r", 0, KEYS[:count])
        return self.hear(lambda answers: "r" in answers.found and [answers.found["r"]])[0]  # type: ignore[attr-defined, index, no-any-return]

    def close(self) -> None:
        self.directory.close()
        self.store.close()


@pytest.fixture
def start(server: RedisServer, path: Path) -> Iterator[Callable[..., One]]:
    started: list[One] = []

    def start_one(owner: str, ttl_s: float = 100) -> One:
        started.append(One(server, path, owner, ttl_s))
        return started[-1]

    yield start_one
    for one in started:
        one.close()


def wait(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def names(server: RedisServer) -> list[str]:
    return server.client.zrange(f"manthan:{{{PLACE}}}:sessions", 0, -1)  # type: ignore[return-value]


def everything(server: RedisServer) -> bytes:
    """All names and values."""
    raw = server.binary_client
    return b"".join(name + (raw.dump(name) or b"") for name in raw.scan_iter())


def test_engines_share_what_only_they_can_read(start: Callable[..., One], server: RedisServer) -> None:
    server.client.config_set("list-compress-depth", 0)
    server.client.config_set("rdbcompression", "no")
    one, two = start("one"), start("two")
    one.keep("acme/alice", 4, "acme")
    wait(lambda: names(server))
    kept = everything(server)
    hidden = [word for key in KEYS for word in (key, key.hex().encode())]
    assert not any(word in kept for word in (b"alice", b"acme", *hidden))
    assert two.look_up(5) == [1000] * 4
    right = blocks_of(KEYS[:4], 0)
    for key, buf in zip(KEYS[:4], two.store.read(0, KEYS[:4], "acme"), strict=True):
        assert np.array_equal(buf, right[key])  # type: ignore[arg-type]


def test_blocks_that_are_lost_or_dropped_are_told_by_their_keys(start: Callable[..., One], server: RedisServer) -> None:
    one = start("one")
    made = one.keep("alice", 3)
    wait(lambda: names(server))
    called = server.client.zrange(f"manthan:{{{PLACE}}}:blocks", 0, -1)
    assert len(called) == server.blocks() == 3
    one.directory.tell([], [Drop(0, KEYS[2:3], DropCause.FAILED)], [])
    wait(lambda: server.blocks() == 2)
    longer = saved("alice", KEYS[:4], ranks=1)
    one.directory.tell([longer], [], [])
    assert one.hear(lambda answers: answers.lost) == [(0, KEYS[2]), (0, KEYS[3])]  # type: ignore[attr-defined]
    one.directory.tell([made._replace(info=None, chain=())], [], [])
    wait(lambda: not names(server) and not server.blocks())


def test_sessions_expire_by_their_ids(start: Callable[..., One], server: RedisServer) -> None:
    one = start("one", ttl_s=1)
    one.keep("alice", 2)
    assert one.hear(lambda answers: answers.expired) == ["alice"]  # type: ignore[attr-defined]


def test_who_goes_on_from_a_session_without_a_name_takes_it_over(
    start: Callable[..., One], server: RedisServer, path: Path
) -> None:
    one, two = start("one"), start("two")
    one.keep("anonymous-one-1", 2)
    wait(lambda: names(server))
    assert names(server)[0].startswith("anonymous-")
    two.keep("anonymous-two-1", 3)
    wait(lambda: len(names(server)) == 1 and server.blocks() == 3)
    assert KeyRing(path).names.session("anonymous-two-1") == names(server)[0]


def test_a_name_that_two_engines_use_is_two_sessions(start: Callable[..., One], server: RedisServer) -> None:
    one, two = start("one"), start("two")
    one.keep("alice", 3)
    wait(lambda: names(server))
    two.directory.tell([saved("alice", [b"another" * 4], ranks=1)], [], [])
    wait(lambda: len(names(server)) == 2)


def test_inspect_tells_ids_to_who_has_the_keys(start: Callable[..., One], server: RedisServer, path: Path) -> None:
    one = start("one")
    one.keep("acme/alice", 3, "acme")
    wait(lambda: names(server))
    client = connect(RedisConfig(url=server.url))
    plain, told = Reader(client, "manthan:"), Reader(client, "manthan:", KeyRing(path))
    [row] = plain.namespaces()
    assert [each.id for each in plain.sessions(row, 9)] == names(server)
    assert [each.id for each in told.sessions(row, 9)] == ["acme/alice"]
    whole = told.session(row, "acme/alice", 9)
    assert whole is not None
    assert (whole.session.id, whole.length, len(whole.chain)) == ("acme/alice", 3, 3)
    assert plain.session(row, "acme/alice", 9) is None
    result = CliRunner().invoke(app, ["inspect", server.url, "--encryption-key-file", str(path)])
    assert "acme/alice" in result.output
    result = CliRunner().invoke(app, ["inspect", server.url, "--encryption-key-file", str(path.parent / "none")])
    assert result.exit_code == 1
    assert result.output.startswith(f"{path.parent / 'none'} cannot be read: No such file")
    CliRunner().invoke(app, ["keys", "forget", str(path), "acme"])
    assert [each.id for each in told.sessions(row, 9)] == names(server)
    assert told.disagreement(PLACE) is None
