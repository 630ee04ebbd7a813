"""`manthan inspect`: what is in a cold store in Redis, read without an engine and without writing.

What expires between two questions is shown as gone, or not at all.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, NoReturn

import typer
from pydantic import ByteSize
from rich.table import Table
from rich.text import Text

from manthan.manager.config import ConfigError, resolve_config
from manthan.manager.config_model import REDIS_PASSWORD, RedisConfig, nearest
from manthan.manager.console import make_console
from manthan.manager.redis_client import Client, RedisUnreachableError, check, connect, in_a_sentence, pipelined
from manthan.manager.redis_index import BATCH, batches
from manthan.manager.redis_schema import Namespace

LONGEST_HINT = 200
"""A store may have thousands of names: a longer list of what is valid helps nobody."""


@dataclass(frozen=True)
class NamespaceRow:
    """What a namespace is of, and counts of what has not expired."""

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


def inspect(
    url: Annotated[str, typer.Argument(metavar="URL", help="As redis.url: redis://HOST:PORT/DB and the like.")],
    namespace: Annotated[str, typer.Option(help="Show this namespace only.")] = "",
    session: Annotated[str, typer.Option(help="Show the session of this id, with its chain.")] = "",
    limit: Annotated[int, typer.Option(min=1, help="Sessions of a namespace, or blocks of a chain, at most.")] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with plain bytes and seconds.")] = False,
    username: Annotated[str, typer.Option(help="A Redis user, if not the default one.")] = "",
    password_file: Annotated[str, typer.Option(help="A file that holds the password.")] = "",
    password_env: Annotated[str, typer.Option(help="The environment variable that holds it.")] = REDIS_PASSWORD,
    prefix: Annotated[str, typer.Option(help="What all keys begin with.")] = RedisConfig().prefix,
    tls_ca_file: Annotated[str, typer.Option(help="The CA's certificate, if not one of the system's.")] = "",
    tls_cert_file: Annotated[str, typer.Option(help="A client certificate.")] = "",
    tls_key_file: Annotated[str, typer.Option(help="The client certificate's key.")] = "",
    timeout: Annotated[float, typer.Option(help="Seconds to wait for an answer.")] = RedisConfig().timeout_s,
) -> None:
    """Show the sessions in a Redis. Nothing is changed there."""
    values = {
        "url": url,
        "username": username,
        "password_file": password_file,
        "password_env": password_env,
        "prefix": prefix,
        "tls_ca_file": tls_ca_file,
        "tls_cert_file": tls_cert_file,
        "tls_key_file": tls_key_file,
        "timeout_s": timeout,
    }
    try:
        config = resolve_config(env={}, flags={f"redis.{key}": value for key, value in values.items()}).config.redis
        listings, wholes = _read(config, namespace, session, limit)
    except ConfigError as error:
        typer.echo(_in_options(error), err=True)
        raise typer.Exit(1) from None
    if as_json:
        rows = {"sessions": list(map(asdict, wholes))} if session else {"namespaces": list(map(asdict, listings))}
        typer.echo(json.dumps(rows, indent=2))
    elif session:
        _print_wholes(wholes)
    elif listings:
        _print_listings(listings)
    else:
        typer.echo(f"Redis at {url} holds no sessions under {prefix}")


def _in_options(error: ConfigError) -> str:
    """A sentence about the configuration's keys, in terms of the command line."""
    if isinstance(error, RedisUnreachableError):
        return f"{error.what}: correct URL, or start the server."
    keys = r"(?<![\w./])redis\.(" + "|".join(RedisConfig.model_fields) + r")\b"
    options = {"url": "URL", "timeout_s": "--timeout"}
    sentence = str(error).removeprefix("argument: ")
    return re.sub(keys, lambda key: options.get(key[1], "--" + key[1].replace("_", "-")), sentence)


def _read(config: RedisConfig, name: str, session_id: str, limit: int) -> tuple[list[Listing], list[Whole]]:
    """Namespaces with their sessions; or, with a session's id, that session wherever there is one of this id."""
    client = connect(config)
    try:
        check(client, config)
        with in_a_sentence(config):
            reader = Reader(client, config.prefix)
            all_rows = reader.namespaces()
            rows = [row for row in all_rows if name in ("", row.name)]
            if name and not rows:
                _refuse(config, "namespace", name, [row.name for row in all_rows])
            if not session_id:
                return [Listing(row, reader.sessions(row, limit)) for row in rows], []
            wholes = [whole for row in rows if (whole := reader.session(row, session_id, limit))]
            if not wholes:
                _refuse(config, "session", session_id, [s.id for row in rows for s in reader.sessions(row, BATCH)])
            return [], wholes
    finally:
        client.close()


def _refuse(config: RedisConfig, what: str, name: str, valid: Iterable[str]) -> NoReturn:
    hint = nearest(name, map(printable, valid))
    raise ConfigError(
        f"Redis at {config.url} has no {what} '{printable(name)}'{hint if len(hint) < LONGEST_HINT else ''}"
    )


# -- reading ------------------------------------------------------------------------------------------


class Reader:
    """Asks many questions in one go. What has expired is decided by the server's clock."""

    def __init__(self, client: Client, prefix: str) -> None:
        self._client, self._prefix = client, prefix
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
        """None if the namespace has none of this id."""
        ns = self._at(row.name)
        [expires] = self._ask([("ZSCORE", ns.key("sessions"), session_id)])
        found = self._sessions(ns, {session_id: float(expires)}) if expires is not None else []
        if not found:
            return None
        chain = ns.chain(session_id)
        length, keys = self._ask([("LLEN", chain), ("LRANGE", chain, 0, limit - 1)])
        return Whole(found[0], length, self._blocks(ns, [bytes.fromhex(_text(key)) for key in keys], row.ranks))

    def _sessions(self, ns: Namespace, expires: Mapping[str, float]) -> list[SessionRow]:
        records = self._ask([("HGETALL", ns.session(session_id)) for session_id in expires])
        return [
            _session_row(ns.name, session_id, _record(record), math.ceil(until - self._now))
            for (session_id, until), record in zip(expires.items(), records, strict=True)
            if record
        ]

    def _blocks(self, ns: Namespace, keys: Sequence[bytes], ranks: int) -> list[BlockRow]:
        states = self._states(ns, [key.hex() for key in keys])
        shards = [ns.block(key, rank) for key in keys for rank in range(ranks)]
        sizes = [size or None for size in self._ask([("STRLEN", shard) for shard in shards])]
        times = [ttl if ttl >= 0 else None for ttl in self._ask([("TTL", shard) for shard in shards])]
        return [
            BlockRow(key.hex(), state, sizes[at : at + ranks], times[at : at + ranks])
            for key, state, at in zip(keys, states, range(0, len(keys) * ranks, ranks), strict=True)
        ]

    def _states(self, ns: Namespace, keys: Sequence[str]) -> Iterable[str]:
        stored, pending = (
            self._ask([("ZSCORE", ns.key(books), key) for key in keys]) for books in ("blocks", "pending")
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
        used_bytes=blocks * _number(info, "block_bytes"),
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


# -- printing -----------------------------------------------------------------------------------------


def _print_listings(listings: Sequence[Listing]) -> None:
    console = make_console()
    console.print(_namespaces_table([listing.namespace for listing in listings]))
    for listing in listings:
        namespace, sessions = listing.namespace, listing.sessions
        console.print()
        console.print(Text(f"Sessions in {printable(namespace.name)}, the one used last first:"))
        console.print(_sessions_table(sessions))
        if (more := namespace.sessions - len(sessions)) > 0:
            console.print(Text(f"{more} more: raise --limit to see them"))


def _print_wholes(wholes: Iterable[Whole]) -> None:
    console = make_console()
    for whole in wholes:
        facts = Table(box=None, show_header=False)
        for name, value in zip(_SESSION_COLUMNS, _session_cells(whole.session), strict=True):
            facts.add_row(name, value)
        facts.add_row("namespace", _cell(whole.session.namespace))
        facts.add_row("chain", _cell(f"{whole.length} blocks, {whole.session.blocks} of them stored"))
        console.print(facts)
        console.print()
        console.print(_chain_table(whole.chain))
        if (more := whole.length - len(whole.chain)) > 0:
            console.print(Text(f"{more} more: raise --limit to see them"))


def _namespaces_table(rows: Iterable[NamespaceRow]) -> Table:
    table = Table(
        *("namespace", "model", "codec", "dtype", "block size", "ranks", "blocks", "bytes used", "pending", "sessions"),
        "created",
        box=None,
    )
    for row in rows:
        used = f"{_size(row.used_bytes)} of {_size(row.budget_bytes)}"
        about = (row.name, row.model, row.codec, row.dtype, row.block_tokens, row.ranks)
        table.add_row(*map(_cell, (*about, row.blocks, used, row.pending, row.sessions, row.created)))
    return table


_SESSION_COLUMNS = (
    *("session", "state", "tokens", "blocks", "bytes", "codec", "requests"),
    *("created", "last used", "expires in", "owner"),
)


def _sessions_table(rows: Iterable[SessionRow]) -> Table:
    table = Table(*_SESSION_COLUMNS, box=None)
    for row in rows:
        table.add_row(*_session_cells(row))
    return table


def _session_cells(row: SessionRow) -> list[Text]:
    what = (row.id, row.state, row.tokens, row.blocks, _size(row.bytes), row.codec, row.requests)
    return [*map(_cell, (*what, row.created, row.last_used, _span(row.expires_in), row.owner))]


def _chain_table(rows: Iterable[BlockRow]) -> Table:
    table = Table("block", "key", "state", "bytes by rank", "expires in", box=None)
    for number, row in enumerate(rows):
        sizes = " ".join("-" if size is None else str(size) for size in row.bytes)
        soonest = min((ttl for ttl in row.expires_in if ttl is not None), default=None)
        expires = "-" if soonest is None else _span(soonest)
        table.add_row(*map(_cell, (number, row.key[:16], row.state, sizes, expires)))
    return table


def _cell(value: object) -> Text:
    """As it is: brackets are no markup."""
    return Text(printable(str(value)))


def printable(text: str) -> str:
    """Ids come from clients: nothing in them may move the cursor or begin a line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _size(nbytes: int) -> str:
    return ByteSize(nbytes).human_readable()


def _span(seconds: int) -> str:
    """1d 4h, 23h 59m, 4m 59s or 12s."""
    for unit, size, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if seconds >= size:
            return f"{seconds // size}{unit} {seconds % size // part}{smaller}"
    return f"{seconds}s"
