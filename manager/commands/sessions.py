"""`manthan sessions`: list, show, pin and release the sessions of a running server, over the HTTP API."""

import json
import os
import time
from collections.abc import Mapping
from datetime import datetime, timedelta
from http.client import HTTPException
from typing import Annotated, Any
from urllib.error import HTTPError
from urllib.parse import quote, urlencode
from urllib.request import ProxyHandler, Request, build_opener

import typer
from pydantic import ByteSize
from rich.table import Table
from rich.text import Text

from manthan.manager.commands.console import make_console
from manthan.manager.listing import Sort

KEY_ENV = "VLLM_API_KEY"
TIMEOUT_S = 30.0

Url = Annotated[str, typer.Option("--url", metavar="URL", help="Of vLLM's server.")]
Tenant = Annotated[str, typer.Option("--tenant", metavar="NAME", help="Tenant of the session.")]
Id = Annotated[str, typer.Argument(metavar="SESSION", help="Its id, as `list` shows it.")]
COLUMNS = (
    *("id", "parent", "tenant", "state", "tokens", "hot_bytes"),
    *("tiers", "exact", "level", "last_used", "requests", "pinned"),
)
LOCAL = "http://127.0.0.1:8000"


class AskError(Exception):
    """Error of a request to a server, in a single sentence."""


app = typer.Typer(no_args_is_help=True, help=f"Sessions of a running server; its API key is read from {KEY_ENV}.")


@app.command("list")
def list_(
    url: Url = LOCAL,
    state: Annotated[str, typer.Option(help="Only these, with commas: active, idle, cold.")] = "",
    tenant: Annotated[str, typer.Option(metavar="NAME", help="Only this tenant's.")] = "",
    sort: Annotated[Sort, typer.Option(help="By what.")] = Sort.LAST_USED,
    limit: Annotated[int, typer.Option(min=1, max=500, help="At most this many.")] = 100,
) -> None:
    """List the sessions of a server."""
    query = {"state": state, "tenant": tenant, "sort": str(sort), "limit": limit}
    answer = _ask(url, f"/sessions?{urlencode({name: value for name, value in query.items() if value})}")
    table = Table(*COLUMNS, box=None)
    for session in answer["sessions"]:
        table.add_row(*(Text(_value(name, session[name])) for name in COLUMNS))
    make_console().print(table)
    if len(answer["sessions"]) < answer["total"]:
        typer.echo(f"{len(answer['sessions'])} of {answer['total']} sessions.")


@app.command()
def show(session: Id, url: Url = LOCAL, tenant: Tenant = "") -> None:
    """Show a session and the session's history."""
    answer, table = _ask(url, _path(session, tenant)), Table(box=None, show_header=False)
    life = answer.pop("life")
    answer["age"] = str(timedelta(seconds=round(time.time() - answer["created"])))
    for name, value in answer.items():
        table.add_row(name, Text(_value(name, value)))
    for event in life:
        table.add_row(_value("at", event["at"]), Text(event["text"]))
    make_console().print(table)


@app.command()
def pin(
    session: Id,
    url: Url = LOCAL,
    seconds: Annotated[float | None, typer.Option(min=0.001, help="For how long; without it for good.")] = None,
    off: Annotated[bool, typer.Option("--off", help="Pin it no longer.")] = False,
    tenant: Tenant = "",
) -> None:
    """Keep a session's compressed blocks whatever comes."""
    action, body = ("unpin", {}) if off else ("pin", {"seconds": seconds})
    answer = _ask(url, f"{_path(session, tenant)}/{action}", body)
    typer.echo(f"{answer['id']} is {'pinned' if answer['pinned'] else 'not pinned'}; it is {answer['state']}.")


@app.command()
def release(session: Id, url: Url = LOCAL, tenant: Tenant = "") -> None:
    """Forget a session, resident and saved."""
    typer.echo(f"{_ask(url, f'{_path(session, tenant)}/release', {})['id']} is forgotten.")


def _ask(url: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """Return the server's answer, or end the program with a single sentence."""
    try:
        return ask(url, path, body)
    except AskError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


def ask(url: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """Return the answer of Manthan's API at server `url`. Raises AskError.

    Args:
        path: behind /manthan.
        body: of a POST; None for a GET.
    """
    headers, key = {"Content-Type": "application/json"}, os.environ.get(KEY_ENV)
    if key:
        headers["Authorization"] = f"Bearer {key}"
    try:
        address = f"{url.rstrip('/').removesuffix('/v1')}/manthan{path}"
        request = Request(address, data=None if body is None else json.dumps(body).encode(), headers=headers)
        with build_opener(ProxyHandler({})).open(request, timeout=TIMEOUT_S) as answer:  # no proxy in between
            return json.loads(answer.read())
    except HTTPError as error:
        try:
            told = str(json.loads(error.read())["error"]["message"])
        except (ValueError, LookupError, TypeError):  # an answer of a different program
            told = f"The server at {url} has no /manthan: is Manthan on, with its API? ({error})"
        raise AskError(told) from None
    except (OSError, HTTPException) as error:
        raise AskError(f"The server at {url} cannot be reached: {getattr(error, 'reason', error)}.") from None
    except ValueError as error:
        raise AskError(f"There is no server with Manthan at {url}: {error}.") from None


def _path(session: str, tenant: str) -> str:
    """Return the path of a session. A client with access to all tenants' sessions names the tenant as well."""
    return f"/sessions/{quote(f'{tenant}/{session}' if tenant else session, safe='')}"


def _value(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        return ByteSize(value).human_readable() if value else "0B"
    if value is None:
        return ""
    if name in ("at", "created", "last_used", "expected_return"):
        return datetime.fromtimestamp(value).strftime("%Y-%m-%d %H:%M:%S")
    if isinstance(value, dict):
        return " and ".join(f"{ByteSize(part['bytes']).human_readable()} {tier}" for tier, part in value.items())
    return str(value)
