"""`manthan sessions`: list, show, pin and release the sessions of a running server, over its HTTP API."""

import json
import os
from collections.abc import Mapping
from datetime import datetime
from http.client import HTTPException
from typing import Annotated, Any, NoReturn
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlencode, urlsplit
from urllib.request import Request, urlopen

import typer
from pydantic import ByteSize
from rich.table import Table
from rich.text import Text

from manthan.manager.commands.console import make_console
from manthan.manager.sessions.listing import Sort

KEY_ENV = "VLLM_API_KEY"
TIMEOUT_S = 30.0
UNAUTHORIZED, NOT_FOUND = 401, 404

Url = Annotated[str, typer.Option("--url", metavar="URL", help="Of vLLM's server.")]
Tenant = Annotated[str, typer.Option("--tenant", metavar="NAME", help="Whose session it is.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print what the server answers.")]
Id = Annotated[str, typer.Argument(metavar="SESSION", help="Its id, as `list` shows it.")]
LOCAL = "http://127.0.0.1:8000"

app = typer.Typer(no_args_is_help=True, help=f"Sessions of a running server; its API key is read from {KEY_ENV}.")


@app.command("list")
def list_(
    url: Url = LOCAL,
    state: Annotated[str, typer.Option(help="Only these, with commas: hot, idle, evicting, cold.")] = "",
    tenant: Annotated[str, typer.Option(metavar="NAME", help="Only this tenant's.")] = "",
    prefix: Annotated[str, typer.Option(help="Only those whose id begins so.")] = "",
    sort: Annotated[Sort, typer.Option(help="By what.")] = Sort.LAST_USED,
    limit: Annotated[int, typer.Option(min=1, max=500, help="At most this many.")] = 100,
    offset: Annotated[int, typer.Option(min=0, help="Sessions to pass over.")] = 0,
    as_json: AsJson = False,
) -> None:
    """List the sessions that a server has, hot and cold."""
    said = {"state": state, "tenant": tenant, "prefix": prefix}
    query = {name: value for name, value in said.items() if value}
    answer = _ask(url, "GET", f"/sessions?{urlencode(query | {'sort': str(sort), 'limit': limit, 'offset': offset})}")
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
        return
    table = Table("session", "tenant", "state", "tokens", "hot", "cold", "last used", "requests", "", box=None)
    for session in answer["sessions"]:
        table.add_row(*map(Text, _row(session, answer["now"])))
    make_console().print(table)
    shown = len(answer["sessions"])
    if shown < answer["total"]:
        typer.echo(f"{shown} of {answer['total']} sessions; --offset {offset + shown} shows more.")


@app.command()
def show(session: Id, url: Url = LOCAL, tenant: Tenant = "", as_json: AsJson = False) -> None:
    """Show one session and what happened to it."""
    answer = _ask(url, "GET", _path(session, tenant))
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
        return
    console, life = make_console(), answer.pop("life")
    table = Table(box=None, show_header=False)
    for name, value in answer.items():
        table.add_row(name, Text(_value(name, value)))
    console.print(table)
    if life:
        events = Table("at", "", "what", box=None)
        for event in life:
            events.add_row(*map(Text, (_moment(event["at"]), event["kind"], event["text"])))
        console.print()
        console.print(events)


@app.command()
def pin(
    session: Id,
    url: Url = LOCAL,
    seconds: Annotated[float | None, typer.Option(min=0.001, help="For how long; without it for good.")] = None,
    off: Annotated[bool, typer.Option("--off", help="Pin it no longer.")] = False,
    tenant: Tenant = "",
) -> None:
    """Keep a session's compressed blocks whatever comes."""
    answer = _ask(
        url, "POST", f"{_path(session, tenant)}/{'unpin' if off else 'pin'}", {} if off else {"seconds": seconds}
    )
    until = "" if seconds is None else f" for {seconds:g} s"
    typer.echo(f"{answer['id']} is {'not pinned any more' if off else f'pinned{until}'}; it is {answer['state']}.")


@app.command()
def release(session: Id, url: Url = LOCAL, tenant: Tenant = "") -> None:
    """Forget a session, hot and cold."""
    typer.echo(f"{_ask(url, 'POST', f'{_path(session, tenant)}/release', {})['id']} is forgotten.")


def _ask(url: str, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """Return the server's answer, or end the program with one sentence."""
    if urlsplit(url).scheme not in ("http", "https"):
        _end(f"--url must be http://HOST:PORT or https://HOST:PORT, not {url!r}.")
    headers, key = {"Content-Type": "application/json"}, os.environ.get(KEY_ENV)
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    address = f"{url.rstrip('/').removesuffix('/v1')}/manthan{path}"
    try:
        with urlopen(Request(address, data=data, headers=headers, method=method), timeout=TIMEOUT_S) as answer:
            return json.loads(answer.read())
    except HTTPError as error:
        _end(_reason(url, error.code, error.read()))
    except (OSError, HTTPException) as error:
        why = error.reason if isinstance(error, URLError) else error
        said = (why.strerror if isinstance(why, OSError) else "") or why or type(why).__name__
        _end(f"The server at {url} cannot be reached: {said}.")
    except ValueError:
        _end(f"What answers at {url} is not a server with Manthan.")


def _reason(url: str, status: int, body: bytes) -> str:
    try:
        sentence = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        sentence = ""
    if status == UNAUTHORIZED:
        has = "has another key" if os.environ.get(KEY_ENV) else "is not set"
        return f"The server at {url} asks for its API key, and the variable {KEY_ENV} {has}."
    if status == NOT_FOUND and sentence in ("", "Not Found"):
        return f"The server at {url} has no /manthan: it runs without Manthan, or with --manthan-api off."
    return sentence or f"The server at {url} answers with status {status}."


def _path(session: str, tenant: str) -> str:
    """A client that sees all tenants' sessions finds them by both names."""
    return f"/sessions/{quote(f'{tenant}/{session}' if tenant else session, safe='')}"


def _row(session: Mapping[str, Any], now: float) -> list[str]:
    expected, tool = session["expected_return"], session["tool"]
    notes = (
        "pinned" if session["pinned"] else "",
        f"waits for {tool}" if tool else "",
        f"expected {_moment(expected)}" if expected else "",
    )
    return [
        session["id"],
        session["tenant"],
        session["state"],
        str(session["tokens"]),
        _size(session["hot_bytes"]),
        " and ".join(f"{_size(part['bytes'])} {tier}" for tier, part in session["tiers"].items()),
        _ago(now - session["last_used"]),
        str(session["requests"]),
        ", ".join(filter(None, notes)),
    ]


def _value(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        return _size(value) or "0B"
    if name in ("created", "last_used", "expected_return"):
        return "" if value is None else _moment(value)
    if isinstance(value, dict):
        return ", ".join(f"{_size(part['bytes'])} {tier} ({part['tokens']} tokens)" for tier, part in value.items())
    return str(value)


def _size(nbytes: int) -> str:
    return ByteSize(nbytes).human_readable() if nbytes else ""


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def _ago(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(0, seconds):.0f} s ago"


def _end(sentence: str) -> NoReturn:
    typer.echo(sentence, err=True)
    raise typer.Exit(1)
