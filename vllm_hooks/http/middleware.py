"""Middleware of a server with Manthan. It adds /manthan, stores request headers, and answers refused streams by 400."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse

from manthan.vllm_hooks.http.api import add_gate, make_router
from manthan.vllm_hooks.http.hints import Incoming, keep
from manthan.vllm_hooks.http.page import PATHS, page_router
from manthan.vllm_hooks.transfer_config import from_vllm_config, is_on

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
MOST_HELD = 8
"""Messages of a stream that are held back at most: some routes announce an answer before they make it."""
HOLD_S = 30.0
"""Seconds after which a stream goes on although nobody has checked a request: it may have none for the engine."""


class Middleware:
    """ASGI middleware, outside of vLLM's own, of the server of an engine with Manthan."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        self._has_begun = False

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Send) -> None:
        if not self._has_begun:  # the server's start: routes can be added, and its flags are known
            self._has_begun = True
            add_api(scope["app"])
        incoming = keep(scope["headers"]) if "headers" in scope else None  # of a WebSocket, too
        if incoming is not None and scope.get("method") == "POST":
            answer = Answer(incoming, scope, receive, send)
            try:
                await self._app(scope, receive, answer.send)
            except Exception:
                await answer.go_on()
                if not answer.is_refused:
                    raise
        else:
            await self._app(scope, receive, send)


class Answer:
    """An answer, whose beginning waits until the request is checked if it is a stream.

    vLLM begins a streamed answer, with status 200, before it makes the engine's request.
    """

    def __init__(self, incoming: Incoming, scope: dict[str, Any], receive: Any, send: Send) -> None:
        self._incoming, self._scope, self._receive, self._send = incoming, scope, receive, send
        self._lock = asyncio.Lock()
        self._held: list[Message] | None = None
        self.is_refused = False
        """True if the request was refused in place of the stream."""

    async def send(self, message: Message) -> None:
        async with self._lock:
            if message["type"] == "http.response.start" and _is_stream(message) and not self._incoming.is_checked:
                self._held = [message]
                loop = asyncio.get_running_loop()
                self._incoming.then = lambda: loop.call_soon_threadsafe(loop.create_task, self.go_on())
                loop.call_later(HOLD_S, lambda: loop.create_task(self.go_on()))
                return
            is_early = not self._incoming.is_checked and bool(message.get("more_body"))
            if self._held is not None and is_early and len(self._held) < MOST_HELD:
                self._held.append(message)
                return
            await self._release()
            if not self.is_refused:
                await self._send(message)

    async def go_on(self) -> None:
        """Send what was held back."""
        async with self._lock:
            await self._release()

    async def _release(self) -> None:
        held, self._held = self._held, None
        refusal = self._incoming.refusal
        if held and refusal is not None:
            self.is_refused = True
            error = {"message": str(refusal), "type": "BadRequestError", "param": None, "code": 400}
            answer = JSONResponse({"error": error}, 400)
            answer.raw_headers += [pair for pair in held[0]["headers"] if not pair[0].startswith(b"content-")]  # CORS
            await answer(self._scope, self._receive, self._send)
            return
        for message in held or ():
            await self._send(message)


def _is_stream(message: Message) -> bool:
    headers = dict(message.get("headers", ()))
    return bool(headers.get(b"content-type", b"").startswith(b"text/event-stream"))


def add_api(app: FastAPI) -> None:
    """Add the HTTP API and the live page to the server of an engine with Manthan, unless they are off."""
    args = app.state.args
    if not is_on(args) or not from_vllm_config(args).api.enabled:
        return
    add_gate(app, args, PATHS)
    app.include_router(make_router(args))
    app.include_router(page_router())
