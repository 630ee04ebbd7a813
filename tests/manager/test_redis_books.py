"""The bytes in use, as scripts count them: always what a recount says, and never above the budget."""

import time
from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from redis_data import session_info
from redis_server import RedisServer, running

from manthan.manager.stores.directory import Room
from manthan.manager.stores.redis.client import Circuit
from manthan.manager.stores.redis.index import Grant, RedisIndex
from manthan.manager.stores.redis.reader import Reader
from manthan.manager.stores.redis.schema import (
    BOOKKEEPING,
    BlockId,
    Namespace,
    SessionRecord,
    StoredChain,
    member,
    of_member,
)

FACTS = {"model": "tiny", "codec": "k3v3", "block_tokens": 32}
NAMESPACE = Namespace("manthan:", "tiny")
RANKS, BUDGET, TTL_S = 2, 1000, 1000
SIZES = st.integers(1, 300)
CONVERSATIONS = ("sabc", "sad", "xyz")
"""Chains of letters; what begins alike is shared."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    yield from running(tmp_path_factory.mktemp("redis"))


@pytest.fixture
def raw(server: RedisServer) -> redis.Redis:
    server.client.flushall()
    return server.client


def index(server: RedisServer, owner: str = "one", **options: int) -> RedisIndex:
    client = redis.Redis(port=server.port, protocol=2)
    made = RedisIndex(client, Circuit(), NAMESPACE, owner, RANKS, BUDGET, TTL_S, **options)
    made.attach(FACTS, "incarnation")
    return made


def block(text: str, group: int = 0) -> BlockId:
    return group, text.encode()


def room(text: str, nbytes: int, group: int = 0) -> Room:
    return Room(text.encode(), group, nbytes)


def record(session_id: str, sizes: dict[str, int], group: int = 0) -> SessionRecord:
    """A session of which a block has so many bytes; 0 if it is not stored."""
    keys, nbytes = tuple(text.encode() for text in sizes), tuple(sizes.values())
    chain = StoredChain(group, keys, bytes(size > 0 for size in nbytes), nbytes)
    return SessionRecord(session_id, session_info(session_id), chain)


def write(raw: redis.Redis, blocks: list[BlockId]) -> None:
    for one in blocks:
        for rank in range(RANKS):
            raw.set(NAMESPACE.block(one, rank), "codes")


def disagreement(raw: redis.Redis) -> str | None:
    with redis.Redis(port=raw.connection_pool.connection_kwargs["port"], protocol=2) as client:
        return Reader(client, "manthan:").disagreement(NAMESPACE.name)


def used(raw: redis.Redis) -> int:
    """Counted again here, beside what the books say and what they say of themselves."""
    sizes = {name: int(nbytes) for name, nbytes in raw.hgetall(NAMESPACE.key("sizes")).items()}
    stored, pending = (set(raw.zrange(NAMESPACE.key(books), 0, -1)) for books in ("blocks", "pending"))
    assert stored | pending == sizes.keys()
    assert not stored & pending
    said = int(raw.hget(NAMESPACE.key("info"), "used_bytes") or 0)
    assert said == sum(sizes.values()) <= BUDGET
    assert disagreement(raw) is None
    return said


# -- by example ---------------------------------------------------------------------------------------


def test_what_was_reserved_and_not_needed_is_free_when_a_session_is_saved(
    server: RedisServer, raw: redis.Redis
) -> None:
    one = index(server)
    assert one.reserve([room("a", 500), room("ab", 500), room("abc", 1)])[0][2].grant is Grant.FULL
    assert used(raw) == 1000
    one.save(record("alice", {"a": 120, "ab": 80}), FACTS)
    assert used(raw) == 200
    assert one.look_up(0, [b"a", b"ab"]) == [120, 80]
    assert one.reserve([room("x", 801), room("y", 800)])[1] == 1000
    one.forget("alice")
    one.release([block("y")])
    assert used(raw) == 0


def test_groups_are_kept_apart(server: RedisServer, raw: redis.Redis) -> None:
    one = index(server)
    one.reserve([room("a", 100, 0), room("a", 200, 3)])
    write(raw, [block("a", 0), block("a", 3)])
    one.save(record("alice", {"a": 100}), FACTS)
    assert (one.look_up(0, [b"a"]), one.look_up(3, [b"a"])) == ([100], [])
    one.save(record("bob", {"a": 150}, group=3), FACTS)
    assert (one.look_up(0, [b"a"]), one.look_up(3, [b"a"])) == ([100], [150])
    one.forget("alice")
    assert (one.look_up(0, [b"a"]), one.look_up(3, [b"a"])) == ([], [150])
    assert {name.split(":")[4] for name in raw.scan_iter("*:block:*")} == {"3}"}
    assert used(raw) == 150


def test_a_block_larger_than_its_reservation_is_not_kept(server: RedisServer, raw: redis.Redis) -> None:
    one = index(server)
    one.reserve([room("a", 500), room("ab", 500)])
    write(raw, [block("a"), block("ab")])
    assert one.save(record("alice", {"a": 500, "ab": 501}), FACTS).lost == [block("ab")]
    assert used(raw) == 500
    assert {of_member(name.split("{")[1].split("}")[0]) for name in raw.scan_iter("*:block:*")} == {block("a")}


def test_who_saves_a_shared_block_later_does_not_change_what_it_takes(server: RedisServer, raw: redis.Redis) -> None:
    one, two = index(server), index(server, "two")
    for engine in (one, two):
        engine.reserve([room("s", 300)])
    one.save(record("alice", {"s": 200}), FACTS)
    assert two.save(record("bob", {"s": 150}), FACTS).lost == []
    assert used(raw) == 200
    assert two.save(record("carol", {"s": 250}), FACTS).lost == [block("s")]  # nothing was reserved for that
    assert used(raw) == 0


def test_a_reservation_of_an_engine_that_died_comes_back(server: RedisServer, raw: redis.Redis) -> None:
    dead, one = index(server, "dead", pending_s=-1), index(server)
    dead.reserve([room("a", 900)])
    write(raw, [block("a")])
    assert one.reserve([room("x", 200)])[0][0].grant is Grant.FULL
    assert one.collect() == ([], 0)
    assert not list(raw.scan_iter("*:block:*"))
    assert one.reserve([room("x", 200)])[0][0].grant is Grant.GRANTED
    assert used(raw) == 200


def test_a_block_that_is_stored_again_between_two_saves_is_booked(server: RedisServer, raw: redis.Redis) -> None:
    """The chain is as it was, but what was reserved anew has to be committed."""
    one = index(server)
    one.reserve([room("a", 300)])
    one.save(record("alice", {"a": 200}), FACTS)
    one.release([block("a")], force=True)
    one.reserve([room("a", 300)])
    assert one.save(record("alice", {"a": 200}), FACTS).lost == []
    assert (used(raw), one.look_up(0, [b"a"])) == (200, [200])


def test_what_is_about_to_expire_is_written_again_and_counted_once(server: RedisServer, raw: redis.Redis) -> None:
    one = index(server)
    one.reserve([room("a", 600)])
    one.save(record("alice", {"a": 550}), FACTS)
    raw.zadd(NAMESPACE.key("blocks"), {member(block("a")): time.time() + 5})
    assert one.reserve([room("a", 600)]) == ([(Grant.GRANTED, 0)], 600)
    assert used(raw) == 600


def test_all_that_has_expired_is_collected_at_once(server: RedisServer, raw: redis.Redis) -> None:
    one = index(server, pending_s=-1)
    many = [f"{at:04}" for at in range(1000)]
    for start in (0, 500):
        one.reserve([room(text, 1) for text in many[start : start + 500]])
    assert one.collect().used == 0
    assert used(raw) == 0


def test_a_recount_says_what_is_wrong(server: RedisServer, raw: redis.Redis) -> None:
    one, names = index(server), NAMESPACE
    one.reserve([room("a", 100), room("b", 50)])
    one.save(record("alice", {"a": 90}), FACTS)
    assert disagreement(raw) is None
    a, b, c = (member(block(text)) for text in "abc")
    raw.hset(names.key("info"), "used_bytes", 141)
    assert disagreement(raw) == f"{names.key('info')} counts 141 bytes in use, but the sizes add up to 140."
    raw.hdel(names.key("info"), "used_bytes")
    assert disagreement(raw) == f"{names.key('info')} counts nothing in use, but the sizes add up to 140."
    raw.hset(names.key("sizes"), c, 5)
    assert disagreement(raw) == f"{names.key('sizes')} has {c}, which is neither stored nor pending."
    raw.hdel(names.key("sizes"), c)
    raw.zadd(names.key("blocks"), {b: time.time() + 100})
    assert disagreement(raw) == f"block {b} is stored and pending at once."
    raw.hdel(names.key("sizes"), a)
    assert disagreement(raw) == f"block {a} has no size in {names.key('sizes')}."


@pytest.mark.parametrize("lost", [("info",), ("blocks",), ("pending",), ("sizes",), ("blocks", "sizes"), BOOKKEEPING])
def test_books_that_the_server_has_evicted_are_made_up_again(
    server: RedisServer, raw: redis.Redis, lost: tuple[str, ...]
) -> None:
    one = index(server)
    one.reserve([room("a", 100), room("b", 200), room("p", 400)])
    write(raw, [block("a"), block("b"), block("p")])
    one.save(record("alice", {"a": 100, "b": 200}), FACTS)
    raw.delete(*map(NAMESPACE.key, lost))
    if lost != BOOKKEEPING:
        assert one.reserve([room("c", 1)])[0] == [(Grant.FULL, 0)]
    one.attach(FACTS, "again")
    left = {"info": 700, "blocks": 400, "pending": 300}.get(lost[0], 0) if len(lost) == 1 else 0
    assert one.collect().used == used(raw) == left
    if lost != BOOKKEEPING:  # what is in no book any more is not in Redis either
        kept = {("info",): "abp", ("blocks",): "p", ("pending",): "ab"}.get(lost, "")
        if lost == ("blocks", "sizes"):
            assert not raw.exists(NAMESPACE.block(block("p"), 0))
        else:
            assert {name for name in "abp" if raw.exists(NAMESPACE.block(block(name), 0))} == set(kept)
    assert one.reserve([room("c", 1)])[0] == [(Grant.GRANTED, 0)]
    assert used(raw) == left + 1


def test_a_count_that_is_lost_is_not_begun_in_the_middle(server: RedisServer, raw: redis.Redis) -> None:
    one = index(server)
    one.reserve([room("a", 100)])
    one.save(record("alice", {"a": 90}), FACTS)
    raw.delete(NAMESPACE.key("info"))
    one.forget("alice")
    assert not raw.exists(NAMESPACE.key("info"))
    assert one.collect().used == used(raw) == 0


def test_what_somebody_is_writing_stays_when_a_session_goes(server: RedisServer, raw: redis.Redis) -> None:
    one, two = index(server), index(server, "two")
    one.reserve([room("s", 100), room("sa", 100)])
    one.save(record("alice", {"s": 0, "sa": 100}), FACTS)
    write(raw, [block("s")])
    two.forget("alice", owned=False)
    assert raw.exists(NAMESPACE.block(block("s"), 0))
    assert one.save(record("bob", {"s": 80}), FACTS).lost == []
    assert used(raw) == 80


# -- by chance ----------------------------------------------------------------------------------------


class Books(RuleBasedStateMachine):
    """Two engines write, save, forget and release what they like, with sizes up to what they reserved and above it;
    time passes, and the server evicts books."""

    server: RedisServer

    def __init__(self) -> None:
        super().__init__()
        self.raw = self.server.client
        self.raw.flushall()
        self.engines = [index(self.server, owner) for owner in ("one", "two")]
        self.whole, self.evicted = True, False

    def teardown(self) -> None:
        """When everything is over, nothing is left; where books were evicted, codes end by themselves."""
        for books in ("sessions", "blocks", "pending"):
            self._pass_time(books)
        self.engines[0].collect()
        assert used(self.raw) == 0
        if not self.evicted:
            assert not list(self.raw.scan_iter("*:block:*"))
        for engine in self.engines:
            engine._client.close()
        self.raw.close()

    def _pass_time(self, books: str, count: int | None = None) -> None:
        names = self.raw.zrange(NAMESPACE.key(books), 0, -1)[:count]
        if names:
            self.raw.zadd(NAMESPACE.key(books), dict.fromkeys(names, time.time() - 1))

    @rule(who=st.integers(0, 1), chain=st.sampled_from(CONVERSATIONS), sizes=st.lists(SIZES, min_size=4, max_size=4))
    def reserve_and_write(self, who: int, chain: str, sizes: list[int]) -> None:
        rooms = [room(chain[: n + 1], nbytes) for n, nbytes in zip(range(len(chain)), sizes, strict=False)]
        is_sound = disagreement(self.raw) is None
        answers, total = self.engines[who].reserve(rooms)
        granted = [asked for asked, answer in zip(rooms, answers, strict=True) if answer.grant is Grant.GRANTED]
        assert total <= BUDGET
        assert is_sound or not granted
        write(self.raw, [(asked.group, asked.key) for asked in granted])

    @rule(
        who=st.integers(0, 1),
        chain=st.sampled_from(CONVERSATIONS),
        name=st.sampled_from(["alice", "bob", "anonymous-1"]),
        sizes=st.lists(st.one_of(st.just(0), SIZES), min_size=1, max_size=4),
    )
    def save(self, who: int, chain: str, name: str, sizes: list[int]) -> None:
        said = {chain[: n + 1]: nbytes for n, nbytes in zip(range(len(chain)), sizes, strict=False)}
        saved = self.engines[who].save(record(name, said), FACTS)
        stored = [text for text, nbytes in said.items() if nbytes and block(text) not in saved.lost]
        if saved.verdict == "saved" and self.whole:
            assert all(self.raw.zscore(NAMESPACE.key("blocks"), member(block(text))) for text in stored)

    @rule(who=st.integers(0, 1), name=st.sampled_from(["alice", "bob", "anonymous-1"]), owned=st.booleans())
    def forget(self, who: int, name: str, owned: bool) -> None:
        self.engines[who].forget(name, owned=owned)

    @rule(who=st.integers(0, 1), chain=st.sampled_from(CONVERSATIONS), count=st.integers(1, 4), force=st.booleans())
    def release(self, who: int, chain: str, count: int, force: bool) -> None:
        self.engines[who].release([block(chain[: n + 1]) for n in range(min(count, len(chain)))], force=force)

    @rule(who=st.integers(0, 1), chain=st.sampled_from(CONVERSATIONS))
    def look_up(self, who: int, chain: str) -> None:
        keys = [chain[: n + 1].encode() for n in range(len(chain))]
        sizes = self.engines[who].look_up(0, keys)
        booked = self.raw.hmget(NAMESPACE.key("sizes"), [member((0, key)) for key in keys])
        assert sizes == [int(nbytes) for nbytes in booked[: len(sizes)]]

    @rule(who=st.integers(0, 1), books=st.sampled_from(["sessions", "blocks", "pending"]), count=st.integers(1, 3))
    def expire(self, who: int, books: str, count: int) -> None:
        self._pass_time(books, count)
        assert self.engines[who].collect().used == used(self.raw)
        self.whole = True

    @rule(who=st.integers(0, 1), books=st.sampled_from(BOOKKEEPING), really=st.integers(0, 3))
    def evict(self, who: int, books: str, really: int) -> None:
        if not really:
            self.raw.delete(NAMESPACE.key(books))
            self.whole, self.evicted = False, True

    @invariant()
    def a_recount_says_the_same(self) -> None:
        if self.whole:
            used(self.raw)


def test_the_bytes_in_use_are_those_of_a_recount_at_every_step(server: RedisServer) -> None:
    class OfThisServer(Books):
        pass

    OfThisServer.server = server
    run_state_machine_as_test(
        OfThisServer,
        settings=settings(
            max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
