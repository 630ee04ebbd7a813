"""The server's middleware: what it holds back of a streamed answer, until when, and what it keeps of a request."""

import asyncio
from typing import Any

import pytest

from manthan.vllm_hooks.http import hints, middleware
from manthan.vllm_hooks.http.middleware import Middleware

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
