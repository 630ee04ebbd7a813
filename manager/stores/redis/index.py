"""The bookkeeping of one namespace in Redis: what is stored, for which sessions, and until when.

All of it waits for the server; `RedisDirectory` calls it on a thread of its own. Each script is one atomic step.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple, TypeVar

from manthan.manager.sessions.session import Stranger
from manthan.manager.stores.redis.client import Circuit, Client, pipelined
from manthan.manager.stores.redis.schema import BOOKKEEPING, Namespace, SessionRecord, StoredBlock, iso

T = TypeVar("T")

BATCH = 512
"""Commands in one pipeline, and block keys in one script, at most."""
PENDING_S = 300
"""How long a reservation lasts. A block that is not part of a saved session then is an orphan."""


class Grant(IntEnum):
    """What came of a reservation."""

    GRANTED = 0
    STORED = 1
    FULL = 2


class Saved(NamedTuple):
    """What came of saving a session: `saved`, `stale` or `conflict`; blocks that are not stored after all; sessions
    without a name that it goes on from."""

    verdict: str
    lost: list[bytes]
    absorbed: list[str]


class Collected(NamedTuple):
    """Sessions that have expired, and the blocks in use after all that has expired was removed."""

    expired: list[str]
    used: int


class _Known(NamedTuple):
    """What this engine last wrote of a session: its chain, how long it was, and when all its blocks were renewed."""

    signature: bytes
    blocks: int
    renewed: float


class RedisIndex:
    """Bookkeeping of one namespace, as one engine.

    owner: the engine's name. ranks: shards of a block. capacity: blocks in the namespace, at most. ttl_s: seconds that
    a session lives after its last use. Every method raises StoreDownError, and StoreOomError where it writes.
    """

    def __init__(
        self,
        client: Client,
        circuit: Circuit,
        namespace: Namespace,
        owner: str,
        ranks: int,
        capacity: int,
        ttl_s: float,
        pending_s: int = PENDING_S,
    ) -> None:
        self._client, self._circuit = client, circuit
        self.namespace, self.owner, self.capacity = namespace, owner, capacity
        self._ranks, self._ttl, self._pending = ranks, round(ttl_s), pending_s
        self._saved: dict[str, _Known] = {}

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

    def reserve(self, keys: Sequence[bytes]) -> tuple[list[Grant], int]:
        """Ask for room for blocks; what came of each, and the blocks in use."""
        answers, used = self._reserve(keys)
        stored = [key for key, answer in zip(keys, answers, strict=True) if answer is Grant.STORED]
        if gone := self._not_there(stored):  # the server may have evicted them by itself
            self.release(gone, force=True)
            again, used = self._reserve(gone)
            others = dict(zip(gone, again, strict=True))
            answers = [others.get(key, answer) for key, answer in zip(keys, answers, strict=True)]
        return answers, used

    def _reserve(self, keys: Sequence[bytes]) -> tuple[list[Grant], int]:
        answers: list[Grant] = []
        used = 0
        for some in batches(keys, BATCH):
            used, *codes = self._run("reserve", ["blocks", "pending"], self.capacity, self._pending, *hexed(some))
            answers += map(Grant, codes)
        return answers, used

    def _not_there(self, keys: Sequence[bytes]) -> list[bytes]:
        counts = self._pipelined([("EXISTS", *self._shards(key)) for key in keys])
        return [key for key, count in zip(keys, counts, strict=True) if count < self._ranks]

    def save(self, record: SessionRecord, facts: Mapping[str, object]) -> Saved:
        """Write a session; it and its blocks live for another ttl_s. facts: further fields of its record.

        A record that another engine has taken further is `stale`; one that has the name of another engine's different
        conversation is a `conflict`. Neither is written.
        """
        ns, chain, session_id = self.namespace, record.chain, record.session_id
        keys = [ns.session(session_id), ns.chain(session_id), *map(ns.key, _SAVE_PARTS)]
        fields = _fields(record, self.owner, facts)
        known, signature = self._saved.get(session_id), _signature(chain)
        late = known is None or time.monotonic() - known.renewed > self._ttl / 4
        if known is not None and not late and known.signature == signature:
            times = (self._ttl, self._slack)
            if self._run("touch", keys, session_id, self.owner, *times, len(chain), *fields):
                return Saved("saved", [], [])
        answer = self._run(
            "save",
            keys,
            session_id,
            self.owner,
            self._ttl,
            self._slack,
            len(fields) // 2,
            *fields,
            *("+-"[not block.stored] + block.key.hex() for block in chain),
        )
        verdict, expires, freed, lost, absorbed = answer
        self._delete(unhexed(freed))
        if verdict == b"saved":
            first = 0 if known is None or late else known.blocks
            self._renew([block.key for block in chain[first:] if block.stored], expires)
            renewed = time.monotonic() if known is None or late else known.renewed
            self._saved[session_id] = _Known(signature, len(chain), renewed)
        return Saved(verdict.decode(), unhexed(lost), [name.decode() for name in absorbed if name])

    def _renew(self, keys: Sequence[bytes], expires: int) -> None:
        """Let codes live as long as the session, and a quarter longer, so that not each use must say so."""
        until = expires + self._ttl // 4
        self._pipelined([("EXPIREAT", shard, until, "GT") for key in keys for shard in self._shards(key)])

    def forget(self, session_id: str, *, owned: bool = True, until: float | None = None) -> bool:
        """Remove a session, if it is (`owned`) this engine's, and if it is to expire no later than `until`."""
        ns = self.namespace
        removed, freed = self._run(
            "forget",
            [ns.session(session_id), ns.chain(session_id), *map(ns.key, ("sessions", "blocks", "users", "tips"))],
            session_id,
            self.owner if owned else "",
            "" if until is None else until,
        )
        self._delete(unhexed(freed))
        self._saved.pop(session_id, None)
        return bool(removed)

    def release(self, keys: Sequence[bytes], *, force: bool = False) -> None:
        """Delete blocks that no session holds; with `force`, because nobody can read them, also those that one does."""
        for some in batches(keys, BATCH):
            freed = self._run("release", ["blocks", "pending", "users"], int(force), *hexed(some))
            self._delete(unhexed(freed))

    def look_up(self, keys: Sequence[bytes]) -> int:
        """How many of these blocks are stored, from the first on without a gap. A miss costs one short question."""
        start, size = 0, 32
        while start < len(keys):
            some = keys[start : start + size]
            found = int(self._run("lookup", ["blocks"], *hexed(some)))
            start += found
            if found < len(some):
                break
            size = min(2 * size, BATCH)
        return start

    def collect(self) -> Collected:
        """Remove sessions that have expired, blocks that have, and what engines that died have left half written."""
        expired: list[str] = []
        while True:
            now, sessions, orphans, used = self._run("collect", ["sessions", "blocks", "pending", "users"], BATCH)
            self._delete(unhexed(orphans))
            names = [session.decode() for session in sessions]
            expired += [name for name in names if self.forget(name, owned=False, until=now)]
            if not sessions:
                return Collected(expired, used)

    def strangers(self, limit: int) -> list[Stranger]:
        """Other engines' sessions, the one to expire first first; last_used is in Unix seconds."""
        ns = self.namespace
        with self._circuit.guard():
            found = self._client.zrange(ns.key("sessions"), 0, limit - 1, withscores=True)
        names = [(name.decode(), expires) for name, expires in found]
        records = self._pipelined([("HMGET", ns.session(name), "owner", "blocks") for name, _ in names])
        return [
            Stranger(name, expires, int(blocks or 0), expires - self._ttl)
            for (name, expires), (owner, blocks) in zip(names, records, strict=True)
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

    def _delete(self, keys: Sequence[bytes]) -> None:
        self._pipelined([("UNLINK", *self._shards(key)) for key in keys])

    def _shards(self, key: bytes) -> list[str]:
        return [self.namespace.block(key, rank) for rank in range(self._ranks)]

    def _run(self, script: str, keys: Sequence[str], *args: object) -> Any:
        """Run a script; `keys` are full keys, or parts of BOOKKEEPING."""
        full = [self.namespace.key(key) if key in BOOKKEEPING else key for key in keys]
        with self._circuit.guard():
            return self._client.eval(_script(script), len(full), *full, *args)

    def _pipelined(self, commands: Sequence[tuple[object, ...]]) -> list[Any]:
        answers: list[Any] = []
        for some in batches(commands, BATCH):
            with self._circuit.guard():
                answers += pipelined(self._client, some)
        return answers


_SAVE_PARTS = ("sessions", "blocks", "pending", "users", "tips", "info")


@cache
def _script(name: str) -> str:
    return files("manthan.manager.stores.redis").joinpath("lua", f"{name}.lua").read_text(encoding="utf-8")


def _signature(chain: Sequence[StoredBlock]) -> bytes:
    """The same only for the same chain, in which the same blocks are stored: the last key covers all before it."""
    return chain[-1].key + bytes(block.stored for block in chain)


def _fields(record: SessionRecord, owner: str, facts: Mapping[str, object]) -> list[str]:
    """A session's hash, as names and values by turns."""
    stored = sum(block.stored for block in record.chain)
    values = {
        "id": record.session_id,
        "state": record.state,
        "tokens": stored * int(str(facts["block_tokens"])),
        "blocks": stored,
        "bytes": stored * int(str(facts["block_bytes"])),
        "codec": facts["codec"],
        "requests": record.requests,
        "created": iso(record.created),
        "last_used": iso(record.last_used),
        "owner": owner,
    }
    return [text for name, value in values.items() for text in (name, str(value))]


def hexed(keys: Iterable[bytes]) -> list[str]:
    return [key.hex() for key in keys]


def unhexed(keys: Iterable[bytes]) -> list[bytes]:
    return [bytes.fromhex(key.decode()) for key in keys]


def batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """The items in runs of at most `size`."""
    return (items[start : start + size] for start in range(0, len(items), size))
