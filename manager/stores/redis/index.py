"""The bookkeeping of one namespace in Redis: what is stored, for which sessions, and until when.

All of it waits for the server; `RedisDirectory` calls it on a thread of its own. Each script is one atomic step.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from functools import cache
from importlib.resources import files
from itertools import chain, islice, takewhile
from typing import Any, NamedTuple, TypeVar

from manthan.manager.sessions.session import Stranger
from manthan.manager.stores.directory import Anchored, Needed, Room
from manthan.manager.stores.keyring import PLAIN_NAMES, Names
from manthan.manager.stores.redis.client import Circuit, Client, pipelined
from manthan.manager.stores.redis.schema import (
    BOOKKEEPING,
    BlockId,
    Namespace,
    SessionRecord,
    iso,
    member,
    of_member,
)

T = TypeVar("T")

BATCH = 512
"""Commands in one pipeline, and blocks in one script, at most."""
PLACES = 64
"""Of a chain, about which one question is asked at most."""
PENDING_S = 300
"""How long a reservation lasts. A block that is not part of a saved session then is an orphan."""


class Grant(IntEnum):
    """What came of a reservation."""

    GRANTED = 0
    STORED = 1
    FULL = 2


class Reserved(NamedTuple):
    """What came of a reservation; and the bytes of a block that is stored already, or 0."""

    grant: Grant
    nbytes: int = 0


class Saved(NamedTuple):
    """What came of saving a session: `saved`, `stale` or `conflict`; blocks that are not stored after all; sessions
    without a name that it goes on from."""

    verdict: str
    lost: list[BlockId]
    absorbed: list[str]


class Collected(NamedTuple):
    """Sessions that have expired, and the bytes in use after all that has expired was removed."""

    expired: list[str]
    used: int


class _Known(NamedTuple):
    """What this engine last wrote of a session: its chain, how long it was, and when all its blocks were renewed."""

    signature: bytes
    blocks: int
    renewed: float


class RedisIndex:
    """Bookkeeping of one namespace, as one engine.

    owner: the engine's name. ranks: shards of a block. budget: bytes that blocks and reservations of the namespace may
    take, all ranks together. ttl_s: seconds that a session lives after its last use. names: what blocks are called
    there; sessions are given by what they are called. Every method raises StoreDownError, and StoreOomError where it
    writes.
    """

    def __init__(
        self,
        client: Client,
        circuit: Circuit,
        namespace: Namespace,
        owner: str,
        ranks: int,
        budget: int,
        ttl_s: float,
        pending_s: int = PENDING_S,
        names: Names = PLAIN_NAMES,
    ) -> None:
        self._names = names
        self._client, self._circuit = client, circuit
        self.namespace, self.owner, self.budget = namespace, owner, budget
        self._ranks, self._ttl, self._pending = ranks, round(ttl_s), pending_s
        self._saved: dict[str, _Known] = {}
        self._granted: set[BlockId] = set()
        """Blocks that this engine reserved, and whose real sizes it has not said yet."""

    def attach(self, facts: Mapping[str, object], incarnation: str) -> str:
        """Enter the namespace, and say what it is of. Returns its incarnation: another one than before means that all
        was lost."""
        info = self.namespace.key("info")
        with self._circuit.guard():
            self._client.sadd(self.namespace.all_names, self.namespace.name)
            self._client.hsetnx(info, "incarnation", incarnation)
            self._client.hsetnx(info, "created", iso(time.time()))
            self._client.hset(info, mapping={name: str(value) for name, value in facts.items()})
            self._client.expireat(info, round(time.time()) + 2 * self._slack, nx=True)
            found = self._client.hget(info, "incarnation")
            for name in self._client.smembers(self.namespace.all_names):
                other = Namespace(self.namespace.prefix, name.decode())
                if not self._client.exists(other.key("info")):  # nobody's for long
                    self._client.srem(self.namespace.all_names, name)
            return (found or b"").decode()

    def incarnation(self) -> str:
        """Empty if the namespace is."""
        with self._circuit.guard():
            return (self._client.hget(self.namespace.key("info"), "incarnation") or b"").decode()

    def reserve(self, rooms: Sequence[Room]) -> tuple[list[Reserved], int]:
        """Ask for room for blocks; what came of each, and the bytes in use."""
        answers, used = self._reserve(rooms)
        stored = [room for room, answer in zip(rooms, answers, strict=True) if answer.grant is Grant.STORED]
        if gone := self._not_there(stored):  # the server may have evicted them by itself
            self.release([(room.group, room.key) for room in gone], force=True)
            again, used = self._reserve(gone)
            others = dict(zip(gone, again, strict=True))
            answers = [others.get(room, answer) for room, answer in zip(rooms, answers, strict=True)]
        return answers, used

    def _reserve(self, rooms: Sequence[Room]) -> tuple[list[Reserved], int]:
        answers: list[Reserved] = []
        used = 0
        for some in batches(rooms, BATCH):
            asked = [word for room in some for word in (self._member((room.group, room.key)), room.nbytes)]
            used, *said = self._run("reserve", self.budget, self._pending, *asked)
            answers += [Reserved(Grant(grant), nbytes) for grant, nbytes in zip(said[::2], said[1::2], strict=True)]
        grants = zip(rooms, answers, strict=True)
        self._granted.update((room.group, room.key) for room, answer in grants if answer.grant is Grant.GRANTED)
        return answers, used

    def _not_there(self, rooms: Sequence[Room]) -> list[Room]:
        counts = self._pipelined([("EXISTS", *self._shards(self._called((room.group, room.key)))) for room in rooms])
        return [room for room, count in zip(rooms, counts, strict=True) if count < self._ranks]

    def save(self, record: SessionRecord, facts: Mapping[str, object]) -> Saved:
        """Write a session; it and its blocks live for another ttl_s. facts: further fields of its record.

        A record that another engine has taken further is `stale`; one that has the name of another engine's different
        conversation is a `conflict`. Neither is written. What was reserved for a block and not needed is free again.
        """
        session_id, fields = record.session_id, _fields(record, self.owner, facts)
        known, signature = self._saved.get(session_id), _signature(record)
        late = known is None or time.monotonic() - known.renewed > self._ttl / 4
        is_same = known is not None and known.signature == signature and not self._has_granted(record)
        if is_same and not late:
            count = len(record.beside) + len(record.chain)
            if self._run("touch", self.owner, self._ttl, self._slack, count, *fields, session=session_id):
                return Saved("saved", [], [])
        held = [*record.beside, *record.chain.blocks]  # the last one is the chain's
        answer = self._run(
            "save",
            self.owner,
            self._ttl,
            self._slack,
            len(fields) // 2,
            *fields,
            *(word for block in held for word in (self._member(block.id), block.nbytes if block.stored else 0)),
            session=session_id,
        )
        verdict, expires, freed, lost, absorbed = answer
        self._delete(_blocks(freed))
        if verdict == b"saved":
            first = 0 if known is None or late else known.blocks
            renewed_blocks = [*record.beside, *islice(record.chain.blocks, first, None)]
            self._renew([block.id for block in renewed_blocks if block.stored], expires)
            renewed = time.monotonic() if known is None or late else known.renewed
            self._saved[session_id] = _Known(b"" if lost else signature, len(record.chain), renewed)
            self._granted.difference_update(block.id for block in held)
        ids = {self._member(block.id): block.id for block in held} if lost else {}
        lost_blocks = [ids[name.decode()] for name in lost]
        return Saved(verdict.decode(), lost_blocks, [name.decode() for name in absorbed if name])

    def _has_granted(self, record: SessionRecord) -> bool:
        """Whether the real sizes of some of its blocks are not said yet."""
        ids = chain((block.id for block in record.beside), record.chain.ids)
        return bool(self._granted) and not self._granted.isdisjoint(ids)

    def _renew(self, blocks: Sequence[BlockId], expires: int) -> None:
        """Let codes live as long as the session, and a quarter longer, so that not each use must say so."""
        until = expires + self._ttl // 4
        shards = (shard for block in blocks for shard in self._shards(self._called(block)))
        self._pipelined([("EXPIREAT", shard, until, "GT") for shard in shards])

    def forget(self, session_id: str, *, owned: bool = True, until: float | None = None) -> bool:
        """Remove a session, if it is (`owned`) this engine's, and if it is to expire no later than `until`."""
        latest = "" if until is None else until
        removed, freed = self._run("forget", self.owner if owned else "", latest, session=session_id)
        self._delete(_blocks(freed))
        self._saved.pop(session_id, None)
        return bool(removed)

    def release(self, blocks: Sequence[BlockId], *, force: bool = False) -> None:
        """Delete blocks that no session holds; with `force`, because nobody can read them, also those that one does."""
        self._granted.difference_update(blocks)
        for some in batches(blocks, BATCH):
            self._delete(_blocks(self._run("release", int(force), *map(self._member, some))))

    def look_up(self, group: int, keys: Sequence[bytes]) -> list[int]:
        """The bytes of those of these blocks that are stored, from the first on without a gap. A miss costs one short
        question."""
        sizes: list[int] = []
        asked, size = 0, 32
        while asked < len(keys) and len(sizes) == asked:
            some = keys[asked : asked + size]
            sizes += takewhile(bool, self._sizes([(group, key) for key in some]))
            asked += len(some)
            size = min(2 * size, BATCH)
        return sizes

    def anchored(self, count: int, needed: Needed) -> Anchored | None:
        """The most blocks of a chain, up to so many, behind which all is stored that is needed there. Where a session
        ended is where it was stored: one short question, mostly; where it is not, the next ones are about more places
        each."""
        sizes: dict[BlockId, int] = {}
        places = 1
        while count > 0:
            some = {at: needed(at) for at in range(count, max(0, count - places), -1)}
            unknown = [block for block in dict.fromkeys(chain.from_iterable(some.values())) if block not in sizes]
            for asked in batches(unknown, BATCH):
                sizes |= zip(asked, self._sizes(asked), strict=True)
            for at, blocks in some.items():
                if blocks and all(sizes[block] for block in blocks):
                    return Anchored(at, [sizes[block] for block in blocks])
            count, places = count - places, min(4 * places, PLACES)
        return None

    def _sizes(self, blocks: Sequence[BlockId]) -> list[int]:
        """The bytes of each, 0 for one that is not stored."""
        found: list[int] = self._run("lookup", *map(self._member, blocks))
        return found

    def collect(self) -> Collected:
        """Remove sessions that have expired, blocks that have, and what engines that died have left half written."""
        expired: list[str] = []
        more = True
        while more:
            now, sessions, gone, used, more = self._run("collect", BATCH)
            self._delete(_blocks(gone))
            names = [session.decode() for session in sessions]
            expired += [name for name in names if self.forget(name, owned=False, until=now)]
        return Collected(expired, used)

    def strangers(self, limit: int) -> list[Stranger]:
        """Other engines' sessions, the one to expire first first; last_used is in Unix seconds."""
        ns = self.namespace
        with self._circuit.guard():
            found = self._client.zrange(ns.key("sessions"), 0, limit - 1, withscores=True)
        names = [(name.decode(), expires) for name, expires in found]
        records = self._pipelined([("HMGET", ns.session(name), "owner", "bytes") for name, _ in names])
        return [
            Stranger(name, expires, int(nbytes or 0), expires - self._ttl)
            for (name, expires), (owner, nbytes) in zip(names, records, strict=True)
            if owner is not None and owner.decode() != self.owner
        ]

    def leave(self, session_ids: Iterable[str]) -> None:
        """Remove sessions of this engine: what it would say of them is not true any more."""
        for session_id in session_ids:
            self.forget(session_id)

    # -- commands -------------------------------------------------------------------------------------

    @property
    def _slack(self) -> int:
        return max(60, self._ttl)

    def _called(self, block: BlockId) -> BlockId:
        """As it is called in the books."""
        group, key = block
        return group, self._names.block(key)

    def _member(self, block: BlockId) -> str:
        return member(self._called(block))

    def _delete(self, blocks: Sequence[BlockId]) -> None:
        """As they are called in the books."""
        self._pipelined([("UNLINK", *self._shards(block)) for block in blocks])

    def _shards(self, block: BlockId) -> list[str]:
        return [self.namespace.block(block, rank) for rank in range(self._ranks)]

    def _run(self, script: str, *args: object, session: str | None = None) -> Any:
        """Run a script. One about a session gets its id as the first argument, and the keys of its record and chain."""
        ns = self.namespace
        keys = [ns.key(part) for part in BOOKKEEPING]
        if session is not None:
            keys += [ns.session(session), ns.chain(session)]
            args = (session, *args)
        with self._circuit.guard():
            return self._client.eval(script_text(script), len(keys), *keys, *args)

    def _pipelined(self, commands: Sequence[tuple[object, ...]]) -> list[Any]:
        answers: list[Any] = []
        for some in batches(commands, BATCH):
            with self._circuit.guard():
                answers += pipelined(self._client, some)
        return answers


@cache
def script_text(name: str) -> str:
    """A script as it is sent: behind its own first line, which may be its flags, what all of them begin with."""
    books, own = (
        files("manthan.manager.stores.redis").joinpath("lua", f"{part}.lua").read_text(encoding="utf-8")
        for part in ("books", name)
    )
    flags, rest = own.split("\n", 1) if own.startswith("#!") else ("", own)
    return f"{flags}\n{books}{rest}"


def _signature(record: SessionRecord) -> bytes:
    """The same only for the same chain, in which the same blocks are stored, and the same beside it: the last key
    covers all before it."""
    beside = "".join(member(block.id) for block in record.beside)
    return record.chain.keys[-1] + record.chain.stored + beside.encode()


def _fields(record: SessionRecord, owner: str, facts: Mapping[str, object]) -> list[str]:
    """A session's hash, as names and values by turns."""
    info, stored = record.info, sum(record.chain.stored)
    assert info is not None
    values = {
        "id": record.session_id,
        **({"sealed": facts["sealed"]} if "sealed" in facts else {}),
        "state": info.state,
        "tokens": stored * int(str(facts["block_tokens"])),
        "blocks": stored,
        "bytes": sum(block.nbytes for block in record.beside) + record.chain.stored_nbytes,
        "codec": facts["codec"],
        "requests": info.requests,
        "created": iso(info.created),
        "last_used": iso(info.last_used),
        "owner": owner,
    }
    return [text for name, value in values.items() for text in (name, str(value))]


def _blocks(members: Iterable[bytes]) -> list[BlockId]:
    return [of_member(name.decode()) for name in members]


def batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """The items in runs of at most `size`."""
    return (items[start : start + size] for start in range(0, len(items), size))
