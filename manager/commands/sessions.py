"""`manthan sessions`: list, show, pin and release a server's sessions (conversations), over the HTTP API."""

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
from rich.table import Table
from rich.text import Text

from manthan.manager.commands import make_console
from manthan.manager.config.resolve import human_bytes
from manthan.manager.listing import Sort
from manthan.manager.session.table import qualified

KEY_ENV = "VLLM_API_KEY"
TIMEOUT_S = 30.0

Url = Annotated[str, typer.Option("--url", metavar="URL", help="Address of vLLM's server.")]
Tenant = Annotated[str, typer.Option("--tenant", metavar="NAME", help="Tenant of the session.")]
Id = Annotated[str, typer.Argument(metavar="SESSION", help="Id from `list`, or with --tenant the session's name.")]
COLUMNS = (
    *("id", "parent", "tenant", "state", "tokens", "hot_bytes"),
    *("tiers", "exact", "level", "last_used", "requests", "pinned"),
)
LOCAL = "http://127.0.0.1:8000"


class AskError(Exception):
    """A server refused a request or did not answer. The message is one sentence for the user."""


app = typer.Typer(no_args_is_help=True, help=f"Sessions of a running server; its API key is read from {KEY_ENV}.")


@app.command("list")
def list_(
    url: Url = LOCAL,
    state: Annotated[str, typer.Option(help="List only these states, with commas: active, idle, cold.")] = "",
    tenant: Annotated[str, typer.Option(metavar="NAME", help="List only this tenant's sessions.")] = "",
    sort: Annotated[Sort, typer.Option(help="Order of the list.")] = Sort.LAST_USED,
    limit: Annotated[int, typer.Option(min=1, max=500, help="List at most this many.")] = 100,
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
    store = _ask(url, "/state")["store"]
    if store["kind"] == "redis" and not answer["total"] and not (state or tenant):
        typer.echo("Sessions in Redis are listed from their first request to this server on.")
    if not store["up"]:
        typer.echo(f"The cold store, {store['kind']}, does not answer: returns are computed again.")
    if waits := measuring(store):
        typer.echo(f"Codec: {waits}.")
    elif store["verdict"] in ("slow", "unfaithful"):
        typer.echo(f"Codec: {store['codec']}, because the configured one is {store['verdict']} on this model.")


@app.command()
def show(session: Id, url: Url = LOCAL, tenant: Tenant = "") -> None:
    """Show a session, and its history."""
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
    seconds: Annotated[float | None, typer.Option(min=0.001, help="End the pin after this time.")] = None,
    off: Annotated[bool, typer.Option("--off", help="End the pin now.")] = False,
    tenant: Tenant = "",
) -> None:
    """Pin a session: its compressed blocks are not dropped to make room."""
    action, body = ("unpin", {}) if off else ("pin", {"seconds": seconds})
    answer = _ask(url, f"{_path(session, tenant)}/{action}", body)
    typer.echo(f"{answer['id']} is {'pinned' if answer['pinned'] else 'not pinned'}; it is {answer['state']}.")


@app.command()
def release(session: Id, url: Url = LOCAL, tenant: Tenant = "") -> None:
    """Forget a session, and erase its resident and compressed blocks that nothing else uses."""
    typer.echo(f"{_ask(url, f'{_path(session, tenant)}/release', {})['id']} is forgotten.")


def _ask(url: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """Return the server's answer. On an error print one sentence, and end the program with status 1."""
    try:
        return ask(url, path, body)
    except AskError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


def ask(url: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """Send a request to Manthan's API, with the API key of VLLM_API_KEY. Return the answer's JSON.

    Args:
        url: address of vLLM's server, with or without /v1.
        path: path below /manthan, such as /sessions.
        body: JSON object to POST; None for a GET.

    Raises: AskError for a refusal, or if no server with Manthan answers.
    """
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(KEY_ENV):
        headers["Authorization"] = f"Bearer {key}"
    try:
        address = f"{url.rstrip('/').removesuffix('/v1')}/manthan{path}"
        request = Request(address, data=None if body is None else json.dumps(body).encode(), headers=headers)
        with build_opener(ProxyHandler({})).open(request, timeout=TIMEOUT_S) as answer:  # not through a proxy
            return json.loads(answer.read())
    except HTTPError as error:
        try:
            told = str(json.loads(error.read())["error"]["message"])
        except (ValueError, LookupError, TypeError):  # another program, or vLLM without Manthan, has answered
            told = f"The server at {url} has no /manthan: is Manthan on, with its API? ({error})"
        raise AskError(told) from None
    except (OSError, HTTPException) as error:
        raise AskError(f"The server at {url} cannot be reached: {getattr(error, 'reason', error)}.") from None
    except ValueError as error:
        raise AskError(f"There is no server with Manthan at {url}: {error}.") from None


def measuring(store: Mapping[str, Any]) -> str:
    """Return the progress of measuring the configured codec's loss; empty if none is under way. store: from /state."""
    if not (waits := store["measuring"]):
        return ""
    return f"{waits['codec']} measured on {waits['blocks']} of {waits['of']} blocks; {store['codec']} until then"


def _path(session: str, tenant: str) -> str:
    """Return the path of a session below /manthan. session: its id, or with a tenant the name that the tenant gave."""
    return f"/sessions/{quote(qualified(session, tenant) if tenant else session, safe='')}"


def _value(name: str, value: Any) -> str:
    """Return a field of the API as text to show."""
    if name.endswith("_bytes"):
        return human_bytes(value) if value else "0B"
    if value is None:
        return ""
    if name in ("at", "created", "last_used", "expected_return"):
        return datetime.fromtimestamp(value).strftime("%Y-%m-%d %H:%M:%S")
    if isinstance(value, dict):
        return " and ".join(f"{human_bytes(part['bytes'])} {tier}" for tier, part in value.items())
    return str(value)
