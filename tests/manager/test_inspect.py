"""`manthan inspect` on a real redis-server, filled as engines fill it."""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from inspect_command import parsed, refusal, run, session_ids, shown
from redis_data import GROUP, TTL_S, Engine, ids, keys_of, redis_config, rooms
from redis_server import RedisServer, running

from manthan.manager.stores.redis import reader as redis_reader
from manthan.manager.stores.redis.schema import iso, member

NOW = time.time()


@pytest.fixture(scope="module")
def running_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    yield from running(tmp_path_factory.mktemp("redis"))


@pytest.fixture
def server(running_server: RedisServer) -> RedisServer:
    running_server.client.flushall()
    return running_server


@pytest.fixture
def engine(server: RedisServer) -> Engine:
    """Two sessions and a block that is being written, of two ranks."""
    engine = Engine(redis_config(server.url))
    engine.attach()
    engine.save("alice", keys_of("a", 5), last_used=NOW - 60, requests=3)
    engine.save("bob", keys_of("b", 7), last_used=NOW - 7200)
    engine.index.reserve(rooms(keys_of("c", 1)))
    return engine


# -- what is shown ------------------------------------------------------------------------------------


def test_namespaces_and_their_sessions(engine: Engine, server: RedisServer) -> None:
    other = Engine(redis_config(server.url), model="Qwen/Qwen3-8B", ranks=1, owner="engine-b")
    other.attach()
    theirs, ours = (space["namespace"]["created"] for space in parsed(server.url)["namespaces"])
    used, before = iso(NOW - 60), iso(NOW - 120)
    assert shown(server.url) == [
        [
            *("namespace", "model", "codec", "dtype", "block size", "ranks", "blocks", "bytes used", "pending"),
            *("sessions", "created"),
        ],
        [other.name, "Qwen/Qwen3-8B", "k3v3", "bfloat16", "16", "1", "0", "0B of 97.7KiB", "0", "0", theirs],
        [engine.name, "org/Tiny-1B", "k3v3", "bfloat16", "16", "2", "12", "25.9KiB of 195.3KiB", "1", "2", ours],
        [""],
        [f"No sessions in {other.name}"],
        [""],
        [f"Sessions in {engine.name}, the one used last first:"],
        [
            *("session", "state", "tokens", "blocks", "bytes", "codec", "requests", "created", "last used"),
            *("expires in", "owner"),
        ],
        ["alice", "cold", "80", "5", "9.8KiB", "k3v3", "3", before, used, "1d 0h", "engine-a"],
        ["bob", "cold", "112", "7", "13.7KiB", "k3v3", "1", iso(NOW - 7260), iso(NOW - 7200), "1d 0h", "engine-a"],
    ]


def test_the_same_for_machines(engine: Engine, server: RedisServer) -> None:
    [space] = parsed(server.url)["namespaces"]
    created = space["namespace"].pop("created")
    assert abs(time.mktime(time.strptime(created, "%Y-%m-%dT%H:%M:%SZ")) - time.timezone - time.time()) < 600
    assert space["namespace"] == {
        "name": engine.name,
        "model": "org/Tiny-1B",
        "codec": "k3v3",
        "dtype": "bfloat16",
        "block_tokens": 16,
        "ranks": 2,
        "blocks": 12,
        "used_bytes": 26_500,
        "budget_bytes": 200_000,
        "pending": 1,
        "sessions": 2,
    }
    alice, _ = space["sessions"]
    assert TTL_S - 600 < alice.pop("expires_in") <= TTL_S
    assert alice == {
        "namespace": engine.name,
        "id": "alice",
        "state": "cold",
        "tokens": 80,
        "blocks": 5,
        "bytes": 10_000,
        "codec": "k3v3",
        "requests": 3,
        "created": iso(NOW - 120),
        "last_used": iso(NOW - 60),
        "owner": "engine-a",
    }


def test_a_limit_says_how_many_more_there_are(engine: Engine, server: RedisServer) -> None:
    engine.save("carol", keys_of("carol", 2), last_used=NOW)
    order = {"bob": NOW + 7200, "alice": NOW + 7201, "carol": NOW + 7202}  # saved one after the other
    server.client.zadd(engine.index.namespace.key("sessions"), order)
    assert session_ids(server.url, "--limit", 2) == ["carol", "alice"]
    assert shown(server.url, "--limit", 2)[-1] == ["1 more: raise --limit to see them"]
    assert "more" not in run(server.url, "--limit", 3).stdout


def test_one_namespace(engine: Engine, server: RedisServer) -> None:
    other = Engine(redis_config(server.url), model="other")
    other.attach()
    rows = shown(server.url, "--namespace", engine.name)
    assert [row[0] for row in rows] == [
        *("namespace", engine.name, "", f"Sessions in {engine.name}, the one used last first:"),
        *("session", "alice", "bob"),
    ]


def test_one_session_with_its_chain(engine: Engine, server: RedisServer) -> None:
    keys = keys_of("a", 5)
    engine.save("alice", [*keys, *keys_of("more", 1)], last_used=NOW - 60, requests=3)
    engine.client.unlink(engine.index.namespace.block((GROUP, keys[1]), 1))
    engine.index.release(ids(keys[2:4]), force=True)
    engine.index.reserve(rooms(keys[3:4]))

    rows = shown(server.url, "--session", "alice", "--limit", 5)
    assert dict(row for row in rows if len(row) == 2) == {
        "session": "alice",
        "state": "cold",
        "tokens": "96",
        "blocks": "6",
        "bytes": "11.7KiB",
        "codec": "k3v3",
        "requests": "3",
        "created": iso(NOW - 120),
        "last used": iso(NOW - 60),
        "expires in": "1d 0h",
        "owner": "engine-a",
        "namespace": engine.name,
        "chain": "6 blocks, 6 of them stored when it was saved",
    }
    assert rows[-7:] == [
        ["block", "key", "group", "state", "bytes by rank", "expires in"],
        ["0", keys[0].hex()[:16], "0", "stored", "1000 1000", "1d 6h"],
        ["1", keys[1].hex()[:16], "0", "stored", "1000 -", "1d 6h"],
        ["2", keys[2].hex()[:16], "0", "not stored", "- -", "-"],
        ["3", keys[3].hex()[:16], "0", "pending", "- -", "-"],
        ["4", keys[4].hex()[:16], "0", "stored", "1000 1000", "1d 6h"],
        ["1 more: raise --limit to see them"],
    ]

    [whole] = parsed(server.url, "--session", "alice", "--limit", 2)["sessions"]
    assert (whole["session"]["id"], whole["length"]) == ("alice", 6)
    times = [whole["chain"][at].pop("expires_in") for at in (0, 1)]
    assert times[1][1] is None
    assert all(1.25 * TTL_S - 600 < ttl <= 1.25 * TTL_S for ttl in (*times[0], times[1][0]))
    assert whole["chain"] == [
        {"key": keys[0].hex(), "group": 0, "state": "stored", "bytes": [1000, 1000]},
        {"key": keys[1].hex(), "group": 0, "state": "stored", "bytes": [1000, None]},
    ]


def test_a_session_of_two_models_is_shown_twice(engine: Engine, server: RedisServer) -> None:
    other = Engine(redis_config(server.url), model="other", ranks=1)
    other.attach()
    other.save("alice", keys_of("a", 1))
    found = parsed(server.url, "--session", "alice")["sessions"]
    assert [(whole["session"]["namespace"], whole["length"]) for whole in found] == [(other.name, 1), (engine.name, 5)]
    [only] = parsed(server.url, "--session", "alice", "--namespace", engine.name)["sessions"]
    assert only["length"] == 5
    assert run(server.url, "--session", "alice").stdout.count("alice") == 2


@pytest.mark.parametrize(
    "session_id", ["[red]x[/red]", "[/]", "a\nb\r\tc", "\x1b[31mred", "ü 漢", "x" * 20_000, "a/b:c%{}"]
)
def test_whatever_a_client_calls_its_session_a_row_is_a_line(
    engine: Engine, server: RedisServer, session_id: str
) -> None:
    engine.save(session_id, keys_of("x", 1))
    lines = run(server.url).stdout.splitlines()
    assert len(lines) == 8
    written = session_id.encode("unicode_escape").decode() if not session_id.isprintable() else session_id
    assert sum(line.strip().startswith(f"{written} ") for line in lines) == 1
    assert f" {written}" in run(server.url, "--session", session_id).stdout.splitlines()[0]
    assert session_id in session_ids(server.url)


def test_many_are_asked_for_in_batches(engine: Engine, server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.save("long", keys_of("long", 30))
    for model in "abc":
        Engine(redis_config(server.url), model=model).attach()
    commands = (["--limit", "2"], ["--session", "long"], [])
    whole = [run(server.url, *args).stdout for args in commands]
    sizes, pipelined = [], redis_reader.pipelined

    def counted(client: Any, some: Any) -> list[Any]:
        sizes.append(len(some))
        return pipelined(client, some)

    monkeypatch.setattr(redis_reader, "pipelined", counted)
    monkeypatch.setattr(redis_reader, "BATCH", 8)
    assert [run(server.url, *args).stdout for args in commands] == whole
    assert max(sizes) == 8


# -- counted again -----------------------------------------------------------------------------------


def test_books_that_agree(engine: Engine, server: RedisServer) -> None:
    assert shown(server.url, "--check") == [[f"{engine.name}: the books agree: 25.9KiB in use."]]
    assert parsed(server.url, "--check") == {"checks": [{"namespace": engine.name, "disagreement": None}]}


def test_books_that_do_not_agree_are_told_in_a_sentence(engine: Engine, server: RedisServer) -> None:
    other = Engine(redis_config(server.url), model="other")
    other.attach()
    info = engine.index.namespace.key("info")
    server.client.hincrby(info, "used_bytes", 7)
    result = run(server.url, "--check")
    sentence = f"{info} counts 26507 bytes in use, but the sizes add up to 26500."
    assert (result.exit_code, result.stdout.splitlines()) == (
        1,
        [f"{other.name}: the books agree: 0B in use.", f"{engine.name}: {sentence}"],
    )
    result = run(server.url, "--check", "--json")
    assert (result.exit_code, json.loads(result.stdout)["checks"][1]["disagreement"]) == (1, sentence)
    assert run(server.url, "--check", "--namespace", other.name).exit_code == 0
    assert "has no namespace 'x'" in refusal(server.url, "--check", "--namespace", "x")


# -- what is not there, or goes -----------------------------------------------------------------------


def test_an_empty_store_is_not_a_mistake(server: RedisServer) -> None:
    assert shown(server.url) == [[f"Redis at {server.url} holds nothing under manthan:"]]
    assert parsed(server.url) == {"namespaces": []}


def test_another_prefix(engine: Engine, server: RedisServer) -> None:
    theirs = Engine(redis_config(server.url, prefix="team:"), model="theirs")
    theirs.attach()
    theirs.save("zoe", keys_of("z", 1))
    assert session_ids(server.url) == ["alice", "bob"]
    assert session_ids(server.url, "--prefix", "team:") == ["zoe"]


def test_a_namespace_whose_books_have_expired_is_skipped(engine: Engine, server: RedisServer) -> None:
    other = Engine(redis_config(server.url), model="other")
    other.attach()
    server.client.delete(engine.index.namespace.key("info"))
    assert [space["namespace"]["name"] for space in parsed(server.url)["namespaces"]] == [other.name]
    assert "has no namespace" in refusal(server.url, "--namespace", engine.name)


def test_what_has_expired_is_not_counted_before_it_is_collected(engine: Engine, server: RedisServer) -> None:
    ns, old = engine.index.namespace, time.time() - 1
    server.client.zadd(ns.key("sessions"), {"bob": old})
    server.client.zadd(ns.key("blocks"), {member(ids(keys_of(text, 1))[0]): old for text in "ba"})
    server.client.zadd(ns.key("pending"), {member(ids(keys_of("c", 1))[0]): old})
    [space] = parsed(server.url)["namespaces"]
    assert [space["namespace"][name] for name in ("sessions", "blocks", "pending")] == [1, 10, 0]
    assert space["namespace"]["used_bytes"] == 26_500  # of the budget, until it is collected
    assert session_ids(server.url) == ["alice"]
    assert "has no session 'bob'" in refusal(server.url, "--session", "bob")
    assert parsed(server.url, "--session", "alice")["sessions"][0]["chain"][0]["state"] == "not stored"
    engine.index.collect()
    [space] = parsed(server.url)["namespaces"]
    counts = [space["namespace"][name] for name in ("sessions", "blocks", "used_bytes", "pending")]
    assert counts == [1, 4, 8_000, 0]  # bob's other blocks went with him


@pytest.mark.parametrize(
    ("goes", "left"),
    [
        (lambda ns: ns.session("alice"), ["bob"]),
        (lambda ns: ns.chain("alice"), ["alice", "bob"]),
        (lambda ns: ns.key("sessions"), []),
        (lambda ns: ns.key("blocks"), ["alice", "bob"]),
        (lambda ns: ns.key("pending"), ["alice", "bob"]),
    ],
    ids=["session", "chain", "sessions", "blocks", "pending"],
)
def test_what_goes_while_it_is_read_is_left_out(
    engine: Engine, server: RedisServer, goes: Callable[[Any], str], left: list[str]
) -> None:
    server.client.delete(goes(engine.index.namespace))
    assert session_ids(server.url) == left
    if "alice" in left:
        run(server.url, "--session", "alice", "--json").stdout.index('"length"')
    else:
        assert "has no session 'alice'" in refusal(server.url, "--session", "alice")


def test_a_namespace_that_says_little_of_itself(server: RedisServer) -> None:
    engine = Engine(redis_config(server.url))
    engine.index.attach({"codec": "k3v3"}, "incarnation")
    engine.save("alice", keys_of("a", 2))
    [space] = parsed(server.url)["namespaces"]
    assert (space["namespace"]["model"], space["namespace"]["budget_bytes"]) == ("", 0)
    assert len(parsed(server.url, "--session", "alice")["sessions"][0]["chain"]) == 2
    run(server.url).stdout.index("alice")


def test_nothing_is_changed(engine: Engine, server: RedisServer) -> None:
    def everything() -> dict[str, Any]:
        with server.client as client:
            return {key: client.object("encoding", key) for key in sorted(client.keys("*"))} | {
                "changes": client.info("persistence")["rdb_changes_since_last_save"]
            }

    before = everything()
    for args in ([], ["--session", "alice"], ["--namespace", engine.name], ["--check"]):
        assert run(server.url, *args).exit_code == 0
    assert everything() == before
