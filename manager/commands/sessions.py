"""`manthan sessions`: sessions of a running server, seen and steered over its HTTP API."""

import json
import os
from collections.abc import Callable, Mapping
from datetime import datetime
from enum import StrEnum, auto
from http.client import HTTPException
from typing import Annotated, Any, NamedTuple, NoReturn
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
UNAUTHORIZED, NOT_FOUND = 401, 404


class Order(StrEnum):
    ASC = auto()
    DESC = auto()


Url = Annotated[str, typer.Option("--url", metavar="URL", help="Of vLLM's server.")]
KeyEnv = Annotated[str, typer.Option("--api-key-env", metavar="NAME", help="The variable that holds the API key.")]
Tenant = Annotated[str, typer.Option("--tenant", metavar="NAME", help="Whose session it is.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print what the server answers.")]
Timeout = Annotated[float, typer.Option(min=0.001, help="Seconds to wait for an answer.")]
Id = Annotated[str, typer.Argument(metavar="SESSION", help="Its id, as `list` shows it.")]
LOCAL, PATIENCE_S = "http://127.0.0.1:8000", 30.0


class Server(NamedTuple):
    """A server with Manthan, and what it asks for."""

    url: str
    key_env: str
    timeout_s: float

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """What it answers; ends the program with a sentence where that is an error."""
        url = self.url.rstrip("/").removesuffix("/v1")
        if urlsplit(url).scheme not in ("http", "https"):
            _end(f"--url must be http://HOST:PORT or https://HOST:PORT, not {self.url!r}.")
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(self.key_env):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        request = Request(f"{url}/manthan{path}", data=data, headers=headers, method=method)
        try:
            with urlopen(request, timeout=self.timeout_s) as answer:
                return json.loads(answer.read())
        except HTTPError as error:
            _end(self._in_a_sentence(error.code, error.read()))
        except TimeoutError:
            _end(f"The server at {self.url} has not answered within {self.timeout_s:g} s.")
        except (OSError, HTTPException) as error:
            why = error.reason if isinstance(error, URLError) else error
            if isinstance(why, TimeoutError):
                _end(f"The server at {self.url} has not answered within {self.timeout_s:g} s.")
            said = (why.strerror if isinstance(why, OSError) else "") or why or type(why).__name__
            _end(f"The server at {self.url} cannot be reached: {said}.")
        except ValueError:
            _end(f"What answers at {self.url} is not a server with Manthan.")

    def _in_a_sentence(self, status: int, body: bytes) -> str:
        try:
            sentence = str(json.loads(body)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            sentence = ""
        if status == UNAUTHORIZED:
            has = "has another key" if os.environ.get(self.key_env) else "is not set"
            return f"The server at {self.url} asks for its API key, and the variable {self.key_env} {has}."
        if status == NOT_FOUND and sentence in ("", "Not Found"):
            return f"The server at {self.url} has no /manthan: it runs without Manthan, or with --manthan-api off."
        return sentence or f"The server at {self.url} answers with status {status}."


def list_(
    url: Url = LOCAL,
    state: Annotated[str, typer.Option(help="Only these, with commas: hot, idle, evicting, cold.")] = "",
    tenant: Annotated[str, typer.Option(metavar="NAME", help="Only this tenant's.")] = "",
    tier: Annotated[str, typer.Option(help="Only those with codes in this tier, such as host.")] = "",
    pinned: Annotated[bool | None, typer.Option(help="Only those that are, or that are not.")] = None,
    prefix: Annotated[str, typer.Option(help="Only those whose id begins so.")] = "",
    sort: Annotated[Sort, typer.Option(help="By what.")] = Sort.LAST_USED,
    order: Annotated[Order | None, typer.Option(help="How; ids rise, and sizes fall, by themselves.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=500, help="So many at most.")] = 100,
    offset: Annotated[int, typer.Option(min=0, help="Behind so many.")] = 0,
    api_key_env: KeyEnv = KEY_ENV,
    as_json: AsJson = False,
    timeout: Timeout = PATIENCE_S,
) -> None:
    """List the sessions that a server has, hot and cold."""
    said = {"state": state, "tenant": tenant, "tier": tier, "prefix": prefix, "order": order and str(order)}
    if pinned is not None:
        said["pinned"] = str(pinned).lower()
    query = {name: value for name, value in said.items() if value} | {
        "sort": str(sort),
        "limit": limit,
        "offset": offset,
    }
    answer = Server(url, api_key_env, timeout).ask("GET", f"/sessions?{urlencode(query)}")
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


def show(
    session: Id,
    url: Url = LOCAL,
    tenant: Tenant = "",
    api_key_env: KeyEnv = KEY_ENV,
    as_json: AsJson = False,
    timeout: Timeout = PATIENCE_S,
) -> None:
    """Show one session and what happened to it."""
    answer = Server(url, api_key_env, timeout).ask("GET", _path(session, tenant))
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


def action(what: str, done: str, text: str) -> Callable[..., None]:
    """The command for what needs no more than a session. text: its help."""

    def act(
        session: Id,
        url: Url = LOCAL,
        tenant: Tenant = "",
        api_key_env: KeyEnv = KEY_ENV,
        as_json: AsJson = False,
        timeout: Timeout = PATIENCE_S,
    ) -> None:
        _act(what, done, session, tenant, Server(url, api_key_env, timeout), as_json)

    act.__doc__ = text
    return act


def pin(
    session: Id,
    url: Url = LOCAL,
    seconds: Annotated[float | None, typer.Option(min=0.001, help="For so long; for good if it is not said.")] = None,
    tenant: Tenant = "",
    api_key_env: KeyEnv = KEY_ENV,
    as_json: AsJson = False,
    timeout: Timeout = PATIENCE_S,
) -> None:
    """Keep a session's codes whatever comes."""
    server, until = Server(url, api_key_env, timeout), "" if seconds is None else f" for {seconds:g} s"
    _act("pin", f"is pinned{until}", session, tenant, server, as_json, {"seconds": seconds})


def expect(
    session: Id,
    url: Url = LOCAL,
    seconds: Annotated[float | None, typer.Option(min=0.001, help="Until its client is back.")] = None,
    tool: Annotated[str, typer.Option(metavar="NAME", help="The tool that it waits for.")] = "",
    tenant: Tenant = "",
    api_key_env: KeyEnv = KEY_ENV,
    as_json: AsJson = False,
    timeout: Timeout = PATIENCE_S,
) -> None:
    """Say when a session's client will be back, or what tool it waits for."""
    if seconds is None and not tool:
        _end("--seconds or --tool must be given.")
    server, said = Server(url, api_key_env, timeout), {"seconds": seconds, "tool": tool}
    when = f"when {tool} is done" if seconds is None else f"in {seconds:g} s"
    _act("expect", f"is expected back {when}", session, tenant, server, as_json, said)


def _act(
    what: str,
    done: str,
    session: str,
    tenant: str,
    server: Server,
    as_json: bool,
    body: Mapping[str, Any] | None = None,
) -> None:
    answer = server.ask("POST", f"{_path(session, tenant)}/{what}", body or {})
    typer.echo(json.dumps(answer, indent=2) if as_json else f"{answer['id']} {done}; it is {answer['state']}.")


def _path(session: str, tenant: str) -> str:
    """Whoever sees all tenants' sessions finds them by both names."""
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


app = typer.Typer(no_args_is_help=True, help="See and steer the sessions of a running server.")
app.command("list")(list_)
app.command("show")(show)
app.command("evict")(action("evict", "goes cold", "Have a session go cold now."))
app.command("prefetch")(
    action("prefetch", "comes back when there is room", "Have a session come back when there is room.")
)
app.command("expect")(expect)
app.command("pin")(pin)
app.command("unpin")(action("unpin", "is not pinned any more", "Keep a session's codes no longer."))
app.command("release")(action("release", "is forgotten", "Forget a session, hot and cold."))
