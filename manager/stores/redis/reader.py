"""What is in a cold store in Redis, as rows for `manthan inspect`: read without an engine and without writing.

What expires between two questions is shown as gone, or not at all.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from manthan.manager.stores.keyring import KeyRing
from manthan.manager.stores.redis.client import Client, pipelined
from manthan.manager.stores.redis.index import BATCH, batches, script_text
from manthan.manager.stores.redis.schema import BOOKKEEPING, SESSION, BlockId, Namespace, member, of_member
from manthan.manager.stores.sealed import Sealer, opened_text


@dataclass(frozen=True)
class NamespaceRow:
    """What a namespace is of, and counts of what has not expired. used_bytes: of blocks and reservations, as they count
    towards the budget: what has expired does until it is collected."""

    name: str
    model: str
    codec: str
    dtype: str
    block_tokens: int
    ranks: int
    blocks: int
    used_bytes: int
    budget_bytes: int
    pending: int
    sessions: int
    created: str


@dataclass(frozen=True)
class SessionRow:
    """A session's record; it expires in so many seconds."""

    namespace: str
    id: str
    state: str
    tokens: int
    blocks: int
    bytes: int
    codec: str
    requests: int
    created: str
    last_used: str
    expires_in: int
    owner: str


@dataclass(frozen=True)
class BlockRow:
    """One block of a chain; bytes and seconds to live by rank, None where there is nothing."""

    key: str
    group: int
    state: str
    bytes: list[int | None]
    expires_in: list[int | None]


@dataclass(frozen=True)
class Listing:
    """A namespace and its sessions, or the first of them."""

    namespace: NamespaceRow
    sessions: list[SessionRow]


@dataclass(frozen=True)
class Whole:
    """A session and its chain of `length` blocks, or the head of it."""

    session: SessionRow
    length: int
    chain: list[BlockRow]


class Reader:
    """Asks many questions in one go. What has expired is decided by the server's clock."""

    def __init__(self, client: Client, prefix: str, ring: KeyRing | None = None) -> None:
        """ring: the keys that names of sessions are sealed with, if they are to be told."""
        self._client, self._prefix, self._ring = client, prefix, ring
        self._now: int = self._ask([("TIME",)])[0][0]

    def namespaces(self) -> list[NamespaceRow]:
        """By name; without those whose books have expired."""
        [names] = self._ask([("SMEMBERS", self._at("").all_names)])
        rows = []
        for some in batches(sorted(map(_text, names)), BATCH // 4):
            answers = iter(self._ask([question for name in some for question in self._about(self._at(name))]))
            books = zip(some, answers, answers, answers, answers, strict=True)
            rows += [_namespace_row(name, _record(info), *counts) for name, info, *counts in books if info]
        return rows

    def _about(self, ns: Namespace) -> Iterable[tuple[Any, ...]]:
        yield "HGETALL", ns.key("info")
        for books in ("blocks", "pending", "sessions"):
            yield "ZCOUNT", ns.key(books), self._after_now, "+inf"

    def sessions(self, row: NamespaceRow, limit: int) -> list[SessionRow]:
        """The `limit` used last, the last one first."""
        ns = self._at(row.name)
        latest = ("ZRANGE", ns.key("sessions"), "+inf", self._after_now, "BYSCORE", "REV", "LIMIT", 0, limit)
        [found] = self._ask([(*latest, "WITHSCORES")])
        expires = dict(zip(map(_text, found[::2]), map(float, found[1::2]), strict=True))
        # They expire in the order in which they were saved, which is nearly that of their use.
        return sorted(self._sessions(ns, expires), key=lambda session: session.last_used, reverse=True)

    def session(self, row: NamespaceRow, session_id: str, limit: int) -> Whole | None:
        """None if the namespace has none of this id, be it what it is called in Redis."""
        if self._ring is not None and session_id != (name := self._ring.names.session(session_id)):
            return self._session(row, name, limit) or self._session(row, session_id, limit)
        return self._session(row, session_id, limit)

    def _session(self, row: NamespaceRow, session_id: str, limit: int) -> Whole | None:
        ns = self._at(row.name)
        [expires] = self._ask([("ZSCORE", ns.key("sessions"), session_id)])
        if expires is None or float(expires) <= self._now:
            return None
        found = self._sessions(ns, {session_id: float(expires)})
        if not found:
            return None
        chain = ns.chain(session_id)
        length, members = self._ask([("LLEN", chain), ("LRANGE", chain, 0, limit - 1)])
        return Whole(found[0], length, self._blocks(ns, [of_member(_text(name)) for name in members], row.ranks))

    def disagreement(self, name: str) -> str | None:
        """Count a namespace's books again, in one step; what disagrees in one sentence, or None."""
        ns = self._at(name)
        keys = [ns.key(part) for part in BOOKKEEPING]
        [answer] = self._ask([("EVAL_RO", script_text("check"), len(keys), *keys)])
        used, total, *members = answer
        without_size, without_block, twice = map(_text, members)
        if without_size:
            return f"block {without_size} has no size in {ns.key('sizes')}."
        if without_block:
            return f"{ns.key('sizes')} has {without_block}, which is neither stored nor pending."
        if twice:
            return f"block {twice} is stored and pending at once."
        if max(used, 0) != total:
            counted = "nothing" if used < 0 else f"{used} bytes"
            return f"{ns.key('info')} counts {counted} in use, but the sizes add up to {total}."
        return None

    def _sessions(self, ns: Namespace, expires: Mapping[str, float]) -> list[SessionRow]:
        records = self._ask([("HGETALL", ns.session(session_id)) for session_id in expires])
        return [
            _session_row(ns.name, self._told(ns, session_id, record), _record(record), math.ceil(until - self._now))
            for (session_id, until), record in zip(expires.items(), records, strict=True)
            if record
        ]

    def _told(self, ns: Namespace, name: str, record: Mapping[bytes, bytes]) -> str:
        """A session's id, as far as the keys tell it."""
        sealed = record.get(b"sealed")
        if self._ring is None or sealed is None:
            return name
        return opened_text(Sealer(self._ring, ns.name), sealed, *SESSION, name) or name

    def _blocks(self, ns: Namespace, blocks: Sequence[BlockId], ranks: int) -> list[BlockRow]:
        states = self._states(ns, list(map(member, blocks)))
        shards = [ns.block(block, rank) for block in blocks for rank in range(ranks)]
        sizes = [size or None for size in self._ask([("STRLEN", shard) for shard in shards])]
        times = [ttl if ttl >= 0 else None for ttl in self._ask([("TTL", shard) for shard in shards])]
        return [
            BlockRow(key.hex(), group, state, sizes[at : at + ranks], times[at : at + ranks])
            for (group, key), state, at in zip(blocks, states, range(0, len(blocks) * ranks, ranks), strict=True)
        ]

    def _states(self, ns: Namespace, members: Sequence[str]) -> Iterable[str]:
        stored, pending = (
            self._ask([("ZSCORE", ns.key(books), name) for name in members]) for books in ("blocks", "pending")
        )
        for expires, ends in zip(stored, pending, strict=True):
            is_stored = expires is not None and float(expires) > self._now
            yield "stored" if is_stored else "not stored" if ends is None else "pending"

    @property
    def _after_now(self) -> str:
        return f"({self._now}"

    def _at(self, name: str) -> Namespace:
        return Namespace(self._prefix, name)

    def _ask(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        return [answer for some in batches(commands, BATCH) for answer in pipelined(self._client, some)]


def _namespace_row(name: str, info: Mapping[str, str], blocks: int, pending: int, sessions: int) -> NamespaceRow:
    return NamespaceRow(
        name=name,
        model=info.get("model", ""),
        codec=info.get("codec", ""),
        dtype=info.get("dtype", ""),
        block_tokens=_number(info, "block_tokens"),
        ranks=_number(info, "ranks") or 1,
        blocks=blocks,
        used_bytes=_number(info, "used_bytes"),
        budget_bytes=_number(info, "budget_bytes"),
        pending=pending,
        sessions=sessions,
        created=info.get("created", ""),
    )


def _session_row(namespace: str, session_id: str, record: Mapping[str, str], expires_in: int) -> SessionRow:
    return SessionRow(
        namespace=namespace,
        id=session_id,
        state=record.get("state", ""),
        tokens=_number(record, "tokens"),
        blocks=_number(record, "blocks"),
        bytes=_number(record, "bytes"),
        codec=record.get("codec", ""),
        requests=_number(record, "requests"),
        created=record.get("created", ""),
        last_used=record.get("last_used", ""),
        expires_in=max(0, expires_in),
        owner=record.get("owner", ""),
    )


def _record(answer: Mapping[bytes, bytes]) -> dict[str, str]:
    return {_text(name): _text(value) for name, value in answer.items()}


def _number(record: Mapping[str, str], name: str) -> int:
    text = record.get(name, "")
    return int(text) if text.isdecimal() else 0


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")
