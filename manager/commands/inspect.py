"""`manthan inspect`: what is in a cold store in Redis, for people and for machines."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, NoReturn

import typer
from pydantic import ByteSize
from rich.table import Table
from rich.text import Text

from manthan.manager.commands.console import make_console
from manthan.manager.config.model import REDIS_PASSWORD, EncryptionConfig, RedisConfig
from manthan.manager.config.resolve import ConfigError, resolve_config
from manthan.manager.config.sentences import nearest
from manthan.manager.stores.keyring import FIELD, KeyRing, ring_of
from manthan.manager.stores.redis.client import RedisUnreachableError, check, connect, in_a_sentence
from manthan.manager.stores.redis.index import BATCH
from manthan.manager.stores.redis.reader import BlockRow, Listing, NamespaceRow, Reader, SessionRow, Whole

LONGEST_HINT = 200
"""A store may have thousands of names: a longer list of what is valid helps nobody."""


def inspect(
    url: Annotated[str, typer.Argument(metavar="URL", help="As redis.url: redis://HOST:PORT/DB and the like.")],
    namespace: Annotated[str, typer.Option(help="Show this namespace only.")] = "",
    session: Annotated[str, typer.Option(help="Show the session of this id, with its chain.")] = "",
    limit: Annotated[int, typer.Option(min=1, help="Sessions of a namespace, or blocks of a chain, at most.")] = 50,
    recount: Annotated[
        bool, typer.Option("--check", help="Count the bytes in use again; 1 if the books are off.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with plain bytes and seconds.")] = False,
    username: Annotated[str, typer.Option(help="A Redis user, if not the default one.")] = "",
    password_file: Annotated[str, typer.Option(help="A file that holds the password.")] = "",
    password_env: Annotated[str, typer.Option(help="The environment variable that holds it.")] = REDIS_PASSWORD,
    prefix: Annotated[str, typer.Option(help="What all keys begin with.")] = RedisConfig().prefix,
    tls_ca_file: Annotated[str, typer.Option(help="The CA's certificate, if not one of the system's.")] = "",
    tls_cert_file: Annotated[str, typer.Option(help="A client certificate.")] = "",
    tls_key_file: Annotated[str, typer.Option(help="The client certificate's key.")] = "",
    encryption_key_file: Annotated[str, typer.Option(help="The keys that sessions' ids are sealed with.")] = "",
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
        ring = ring_of(EncryptionConfig(key_file=encryption_key_file))
        if recount:
            raise typer.Exit(_check(config, namespace, as_json))
        listings, wholes = _read(config, ring, namespace, session, limit)
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
        typer.echo(f"Redis at {url} holds nothing under {prefix}")


def _in_options(error: ConfigError) -> str:
    """A sentence about the configuration's keys, in terms of the command line."""
    if isinstance(error, RedisUnreachableError):
        return f"{error.what}: correct URL, or start the server."
    keys = r"(?<![\w./])redis\.(" + "|".join(RedisConfig.model_fields) + r")\b"
    options = {"url": "URL", "timeout_s": "--timeout"}
    sentence = str(error).removeprefix("argument: ").removeprefix(f"{FIELD}: ")
    return re.sub(keys, lambda key: options.get(key[1], "--" + key[1].replace("_", "-")), sentence)


def _read(
    config: RedisConfig, ring: KeyRing | None, name: str, session_id: str, limit: int
) -> tuple[list[Listing], list[Whole]]:
    """Namespaces with their sessions; or, with a session's id, that session wherever there is one of this id."""
    with _reader(config, ring) as reader:
        rows = _namespaces(config, reader, name)
        if not session_id:
            return [Listing(row, reader.sessions(row, limit)) for row in rows], []
        wholes = [whole for row in rows if (whole := reader.session(row, session_id, limit))]
        if not wholes:
            _refuse(config, "session", session_id, [s.id for row in rows for s in reader.sessions(row, BATCH)])
        return [], wholes


def _check(config: RedisConfig, name: str, as_json: bool) -> int:
    """Print of each namespace whether its books agree with themselves; returns the exit status."""
    with _reader(config) as reader:
        rows = _namespaces(config, reader, name)
        found = {row.name: reader.disagreement(row.name) for row in rows}
    if as_json:
        checks = [{"namespace": space, "disagreement": sentence} for space, sentence in found.items()]
        typer.echo(json.dumps({"checks": checks}, indent=2))
    else:
        for row in rows:
            agree = f"the books agree: {_size(row.used_bytes)} in use."
            typer.echo(printable(f"{row.name}: {found[row.name] or agree}"))
    return int(any(found.values()))


@contextmanager
def _reader(config: RedisConfig, ring: KeyRing | None = None) -> Iterator[Reader]:
    """Ask in this context; raises ConfigError for whatever is wrong with the server."""
    client = connect(config)
    try:
        check(client, config)
        with in_a_sentence(config):
            yield Reader(client, config.prefix, ring)
    finally:
        client.close()


def _namespaces(config: RedisConfig, reader: Reader, name: str) -> list[NamespaceRow]:
    """All, or the one of this name."""
    every = reader.namespaces()
    rows = [row for row in every if name in ("", row.name)]
    if name and not rows:
        _refuse(config, "namespace", name, [row.name for row in every])
    return rows


def _refuse(config: RedisConfig, what: str, name: str, valid: Iterable[str]) -> NoReturn:
    hint = nearest(name, map(printable, valid))
    raise ConfigError(
        f"Redis at {config.url} has no {what} '{printable(name)}'{hint if len(hint) < LONGEST_HINT else ''}"
    )


# -- printing -----------------------------------------------------------------------------------------


def _print_listings(listings: Sequence[Listing]) -> None:
    console = make_console()
    console.print(_namespaces_table([listing.namespace for listing in listings]))
    for listing in listings:
        namespace, sessions = listing.namespace, listing.sessions
        console.print()
        if not sessions:
            console.print(Text(f"No sessions in {printable(namespace.name)}"))
            continue
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
        facts.add_row("chain", _cell(f"{whole.length} blocks, {whole.session.blocks} of them stored when it was saved"))
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
    table = Table("block", "key", "group", "state", "bytes by rank", "expires in", box=None)
    for number, row in enumerate(rows):
        sizes = " ".join("-" if size is None else str(size) for size in row.bytes)
        soonest = min((ttl for ttl in row.expires_in if ttl is not None), default=None)
        expires = "-" if soonest is None else _span(soonest)
        table.add_row(*map(_cell, (number, row.key[:16], row.group, row.state, sizes, expires)))
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
