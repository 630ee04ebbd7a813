"""HTTP API and middleware without a server: several engines, dead ones, none at all, and streams that are held back."""

import asyncio
import math
from argparse import Namespace
from collections.abc import Sequence
from decimal import Decimal
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import logged
import pytest
from crowd import Crowd, made_app
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic_core import from_json, to_json

from manthan.vllm_hooks import kv_transfer_config
from manthan.vllm_hooks.http import api, hints, middleware
from manthan.vllm_hooks.http.api import ApiError, ask_about, summed, together
from manthan.vllm_hooks.http.middleware import Middleware, add_api
from manthan.vllm_hooks.http.models import Policy
from manthan.vllm_hooks.queries import Queries
from manthan.vllm_hooks.transfer_config import settings_of


@pytest.mark.parametrize(
    ("offset", "limit", "found"),
    [(0, 2, [("d", 1), ("a", 0)]), (1, 3, [("a", 0), ("b", 0), ("c", 1)]), (3, 9, [("c", 1)]), (9, 9, [])],
)
def test_pages_of_several_engines_are_one(offset: int, limit: int, found: list[tuple[str, int]]) -> None:
    answers: list[dict[str, Any]] = [
        {"total": total, "now": 1.0, "keys": rows, "sessions": [{"id": name} for _, name in rows]}
        for total, rows in ((2, [(9.0, "a"), (7.0, "b")]), (5, [(9.5, "d"), (1.0, "c")]))
    ]
    merged = together(answers, offset, limit, descending=True)
    assert [(row["id"], row["engine"]) for row in merged["sessions"]] == found
    assert merged["total"] == 7


def state(free: int, up: bool, order: list[str], engines: int = 1) -> dict[str, Any]:
    """State of some engines, `free` of all of them together."""
    tier = {"name": "host", "used_bytes": free, "budget_bytes": 9 * engines}
    pool = {"block_tokens": 32, "blocks": 10 * engines, "free_blocks": free, "bytes": 100 * engines}
    return {
        "now": 1.0,
        "policy": {"name": "lru", "options": {}, "order": order},
        "store": {"kind": "host", "up": up, "codec": "wht-5x", "tiers": [tier]},
        "pool": pool,
        "sessions": {"active": engines, "idle": 2 * engines, "cold": free},
        "totals": {"evictions": 3 * engines},
    }


def test_states_of_several_engines_add_up() -> None:
    one = state(4, True, ["a", "b", "c"])
    assert summed([one]) is one
    assert summed([one, state(5, False, ["d"])]) == state(9, False, ["a", "d", "b", "c"], engines=2)


def test_an_answer_can_always_be_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Policies of other packages may have options of any kind."""
    odd = SimpleNamespace(a=1)
    policy = Policy(name="odd", options={"of": Decimal("0.5"), "path": Path("a"), "it": odd}, order=[])
    monkeypatch.setattr(Queries, "answer", lambda self, what, asked: {"keys": [(math.inf, "a")], "policy": policy})
    told = from_json(object.__new__(Queries).reply("state", {}))
    assert told["keys"] == [[math.inf, "a"]]
    assert told["policy"]["options"] == {"of": "0.5", "path": "a", "it": str(odd)}


class Client:
    """Client of vLLM's whose engines give these answers, or are dead without one."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self.errored, self.engine_core, self._answers = not answers, self, answers

    async def call_utility_all_async(self, *_: Any) -> list[bytes]:
        return list(map(to_json, self._answers))


def served(client: Any) -> TestClient:
    return TestClient(made_app(client), base_url="http://localhost")


def test_of_several_engines_the_session_that_was_used_last_is_shown() -> None:
    def steered(*answers: dict[str, Any]) -> dict[str, Any]:
        return asyncio.run(ask_about(Client(*answers), "evict", {"id": "a", "bound": None}))

    unknown = {"refused": [404, "There is no session 'a'."]}
    assert steered({"id": "a", "last_used": 1.0}, {"id": "a", "last_used": 2.0}, unknown)["engine"] == 1
    answers = (unknown, {"refused": [409, "Not now."]}), ()
    for given, error in zip(answers, ((409, "Not now."), (503, "The engine is dead.")), strict=True):
        with pytest.raises(ApiError) as refused:
            steered(*given)
        assert (refused.value.status, str(refused.value)) == error


def events(client: TestClient, number: int) -> list[tuple[str, Any]]:
    """Return so many events of the stream of changes, fewer if it ends."""
    with client.stream("GET", "/manthan/changes") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in islice(answer.iter_lines(), 3 * number) if line]
    pairs = zip(lines[::2], lines[1::2], strict=True)
    return [(name.removeprefix("event: "), from_json(data.removeprefix("data: "))) for name, data in pairs]


def test_what_is_as_before_is_not_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream ends in its third round, when the engine dies."""
    crowd, rounds = Crowd(30), count(1)
    client = served(crowd)

    async def rest(_: float) -> None:
        at = next(rounds)
        crowd.use("agent-00009") if at == 1 else None
        crowd.errored = at == 2

    monkeypatch.setattr(api.asyncio, "sleep", rest)
    found = events(client, 100)
    everything = ["state", "sessions", "now"]
    assert [name for name, _ in found] == [*everything, "state", "sessions", "now", "error"]
    told = [data for name, data in found if name == "sessions"]
    assert [page["sessions"][0]["id"] for page in told] == ["agent-00000", "agent-00009"]
    assert found[0][1]["totals"]["restored_tokens"] == 6_000_000
    assert found[-1][1] == "The engine is dead."


def test_a_stream_says_that_it_ends_after_an_unforeseen_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page shows the sentence of an event `error`. The log has the cause, which clients need not know."""
    crowd = Crowd(3)

    async def rest(_: float) -> None:
        crowd._state = lambda _: 1 / 0  # type: ignore[method-assign]

    monkeypatch.setattr(api.asyncio, "sleep", rest)
    with logged.warnings() as lines:
        found = events(served(crowd), 100)
    assert found[-2][0] == "now"
    assert found[-1] == ("error", "The engine's answer failed: the server's log says why.")
    assert lines == ["Manthan: the stream of changes ends: ZeroDivisionError: division by zero"]


def test_a_stream_that_cannot_begin_is_refused() -> None:
    reply = served(None).get("/manthan/changes")
    assert (reply.status_code, reply.json()["error"]["message"]) == (503, "This server has no engine.")
    assert served(Crowd(1)).get("/manthan/changes?limit=0").status_code == 422


def test_a_server_without_an_engine() -> None:
    client = gated()
    client.app.state.engine_client = None  # type: ignore[attr-defined]
    for method, path in (("GET", "sessions"), ("POST", "sessions/a/pin"), ("GET", "state")):
        reply = client.request(method, f"/manthan/{path}")
        assert (reply.status_code, reply.json()["error"]["message"]) == (503, "This server has no engine.")


@pytest.mark.parametrize(("options", "has_routes"), [({}, True), ({"api": {"enabled": False}}, False), (None, False)])
def test_it_is_there_unless_it_is_off(options: dict[str, Any] | None, has_routes: bool) -> None:
    server = FastAPI()
    transfer = None if options is None else kv_transfer_config(policy="lru", **options)
    server.state.args = Namespace(kv_transfer_config=transfer, api_key=None)
    add_api(server)
    assert any(path.startswith("/manthan/") for path in server.openapi()["paths"]) is has_routes


def test_where_values_are_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANTHAN_IDLE__MIN_TOKENS", "7")
    found = settings_of(Namespace(kv_transfer_config=kv_transfer_config(policy={"name": "returns", "prior": 60})))
    assert found["idle.min_tokens"] == {"value": 7, "from": "environment"}
    assert found["policy.prior"] == {"value": 60, "from": "argument"}
    assert found["codec.backend"] == {"value": "auto", "from": "default"}


@pytest.mark.parametrize(
    ("headers", "is_refused"),
    [
        ({}, False),
        ({"Origin": "http://localhost"}, False),
        ({"Origin": "https://evil.example"}, True),
        ({"Origin": "null"}, True),
        ({"Origin": "http://[half"}, True),
        ({"Origin": "http://localhost:81"}, True),
        ({"Origin": "https://behind-a-proxy.example", "Sec-Fetch-Site": "same-origin"}, False),
        ({"Origin": "http://localhost", "Sec-Fetch-Site": "cross-site"}, True),
        ({"Origin": "https://board.example"}, False),
    ],
)
def test_pages_of_other_sites_do_not_steer_where_there_is_no_key(headers: dict[str, str], is_refused: bool) -> None:
    client = gated(origins=("*", "https://board.example"))
    reply = client.post("/manthan/sessions/alice/release", headers=headers)
    assert reply.status_code == (403 if is_refused else 503)
    assert ("may not steer sessions" in reply.text) is is_refused
    assert client.get("/manthan/sessions", headers=headers).status_code == 503


HOST = "is not a name of this server: set an --api-key, or name the host in api.hosts."


@pytest.mark.parametrize(
    ("host", "is_served"),
    [
        *[(own, True) for own in ("localhost:8000", "127.0.0.1:8000", "[::1]:8000", "10.1.2.3", "a.localhost")],
        *[(named, True) for named in ("gpu7.example.org:8000", "GPU7.example.org.", "bound.example")],
        *[(other, False) for other in ("evil.example:8000", "", "127.0.0.1.evil.example", "[::1", "gpu8.example.org")],
    ],
)
def test_a_server_without_a_key_answers_to_its_own_names_only(host: str, is_served: bool) -> None:
    client = gated(api={"hosts": ["gpu7.example.org"]})
    replies = [client.get("/manthan/sessions", headers={"Host": host})]
    replies += [client.post("/manthan/sessions/a/pin", headers={"Host": host})]
    assert [reply.status_code for reply in replies] == [503 if is_served else 403] * 2
    assert is_served or all(reply.json()["error"]["message"].endswith(HOST) for reply in replies)


@pytest.mark.parametrize(
    ("nbytes", "status"), [(str(64 * 1024 + 1), 413), ("-1", 413), ("1e3", 413), (str(64 * 1024), 422)]
)
def test_a_body_is_refused_by_its_length(nbytes: str, status: int) -> None:
    headers = {"Content-Length": nbytes, "Content-Type": "application/json"}
    assert gated().post("/manthan/sessions/a/pin", headers=headers, content=b"[").status_code == status


def gated(origins: Sequence[str] = (), **options: Any) -> TestClient:
    """A server with the API and without a key, whose engine is dead."""
    app, args = FastAPI(), {"kv_transfer_config": kv_transfer_config(**options), "api_key": None}
    app.state.args = Namespace(**args, allowed_origins=[*origins], host="bound.example")
    app.state.engine_client = Client()
    add_api(app)
    return TestClient(app, base_url="http://localhost")


START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream"), (b"access-control-allow-origin", b"*")],
}


def asked(app: Any, kind: str = "http", **scope: Any) -> list[dict[str, Any]]:
    """What a server with this application sends."""
    made, sent = Middleware(app), list[dict[str, Any]]()
    made._has_begun = True

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(made({"type": kind, "headers": [(b"x-tenant", b"acme")]} | scope, None, send))
    return sent


def test_a_websocket_s_headers_are_at_hand_too() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert hints.tenant_in("X-Tenant") == "acme"
        await send({"type": "websocket.accept"})

    assert asked(app, "websocket") == [{"type": "websocket.accept"}]


def test_a_refused_stream_keeps_the_headers_of_the_answer() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        incoming = hints._incoming.get()
        incoming.refusal, incoming.is_checked = hints.RequestHintError("no"), True
        await send({"type": "http.response.body", "body": b"data: x", "more_body": False})

    start, body = asked(app, method="POST")
    assert start["status"] == 400
    assert (b"access-control-allow-origin", b"*") in start["headers"]
    assert [value for name, value in start["headers"] if name == b"content-type"] == [b"application/json"]
    assert b"no" in body["body"]


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_stream_without_a_request_for_the_engine_is_not_held_for_ever(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(middleware, "HOLD_S", 0.05)
    released = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        await send({"type": "http.response.body", "body": b"data: x", "more_body": True})
        await asyncio.sleep(0.5)
        released.set()

    assert [message["type"] for message in asked(app, method=method)] == ["http.response.start", "http.response.body"]
    assert released.is_set()
