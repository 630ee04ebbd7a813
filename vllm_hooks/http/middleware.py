"""ASGI middleware of vLLM's server: routes below /manthan, tenants in headers, and status 400 for refused streams."""

import asyncio
import ipaddress
import reprlib
from argparse import Namespace
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette._utils import get_route_path
from starlette.datastructures import Headers
from vllm.logger import init_logger

from manthan.vllm_hooks.compat import key_check
from manthan.vllm_hooks.http.api import ApiError, make_router
from manthan.vllm_hooks.http.hints import Incoming, keep
from manthan.vllm_hooks.http.page import PATHS, PREFIX, page_routes
from manthan.vllm_hooks.rechecks import Rechecker
from manthan.vllm_hooks.transfer_config import from_vllm_config, is_on

logger = init_logger("vllm.manthan")
App = Callable[..., Awaitable[None]]
Message = MutableMapping[str, Any]
LONGEST_BODY = 64 * 1024  # most bytes of the body of a request below /manthan
MOST_HELD = 8
"""Most messages of a stream to hold back. Some routes send several before vLLM makes the engine's request."""
HOLD_S = 30.0
"""Most seconds to hold a stream back, because some streams never reach the check of hints."""
SAFE = ("GET", "HEAD", "OPTIONS")


class Middleware:
    """Middleware that requests reach before vLLM's own middleware."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._has_begun = False
        self._rechecker = Rechecker()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: App) -> None:
        if not self._has_begun:  # the first call is the server's start: the app now has vLLM's flags
            self._has_begun = True
            if add_api(scope["app"]):
                self._rechecker.start(scope["app"].state)
        incoming = keep(scope["headers"]) if "headers" in scope else None  # WebSockets have headers, too
        if incoming is None or scope.get("method") != "POST":
            await self._app(scope, receive, send)
            return
        self._rechecker.make_way()
        answer = HeldAnswer(incoming, scope, receive, send)
        try:
            await self._app(scope, receive, answer.send)
        except Exception:
            await answer.go_on()
            if not answer.is_refused:
                raise


def add_api(app: FastAPI) -> bool:
    """Add the HTTP API and the live page to vLLM's app, if the server runs Manthan and `api.enabled` is true.

    Return True if added, and if the loss of restored KV is to be measured (`codec.guard`).
    """
    args = app.state.args
    if not is_on(args) or not (config := from_vllm_config(args)).api.enabled:
        return False
    hosts = {*config.api.hosts, getattr(args, "host", None) or ""} - {""}
    router: Any = app.router
    router.middleware_stack = Gate(  # behind vLLM's own middleware
        router.middleware_stack,
        has_key=key_check(args),
        hosts=frozenset(name.lower() for name in hosts),
        origins=frozenset(getattr(args, "allowed_origins", ())) - {"*"},
    )
    app.include_router(make_router(args))
    app.router.routes.extend(page_routes())
    if address := address_of(args):
        logger.info("Manthan: once the server has started, the live page is at %s%s/", address, PREFIX)
    return config.codec.guard


def address_of(args: Namespace) -> str:
    """Return the URL at which a browser on this machine reaches the server; empty for a Unix socket."""
    port, host = getattr(args, "port", None), getattr(args, "host", None) or ""
    if not port or getattr(args, "uds", None):
        return ""
    host = "127.0.0.1" if host in ("", "0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"http{'s' if getattr(args, 'ssl_keyfile', None) else ''}://{host}:{port}"


class HeldAnswer:
    """Answer to an HTTP request. A streamed answer is held back until Manthan has checked the request's hints.

    vLLM sends a stream's status 200 before it makes the engine's request, whose hints are checked. Without the delay a
    wrong hint could not be answered with status 400.
    """

    def __init__(self, incoming: Incoming, scope: dict[str, Any], receive: Any, send: App) -> None:
        self._incoming, self._scope, self._receive, self._send = incoming, scope, receive, send
        self._lock = asyncio.Lock()
        self._held: list[Message] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.is_refused = False
        """True once status 400 was sent instead of the stream."""

    async def send(self, message: Message) -> None:
        """Send or hold back an ASGI message of the answer. After a refusal, drop the message."""
        async with self._lock:
            kind = dict(message.get("headers", ())).get(b"content-type", b"")
            is_stream = message["type"] == "http.response.start" and kind.startswith(b"text/event-stream")
            if is_stream and not self._incoming.is_checked:
                self._held = [message]
                loop = asyncio.get_running_loop()
                self._incoming.then = lambda: loop.call_soon_threadsafe(loop.create_task, self.go_on())
                self._timer = loop.call_later(HOLD_S, lambda: loop.create_task(self.go_on()))
                return
            is_early = not self._incoming.is_checked and bool(message.get("more_body"))
            if self._held is not None and is_early and len(self._held) < MOST_HELD:
                self._held.append(message)
                return
            await self._release()
            if not self.is_refused:
                await self._send(message)

    async def go_on(self) -> None:
        """Send the held messages, or status 400 instead if the request's hints were refused."""
        async with self._lock:
            await self._release()

    async def _release(self) -> None:
        held, self._held = self._held, None
        if self._timer is not None:  # without this, the timer and `then` would keep the request in memory
            self._timer.cancel()
            self._timer, self._incoming.then = None, Incoming.then
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


class Gate:
    """Middleware that refuses forbidden requests below /manthan, before the body is read.

    has_key: returns True for headers with a valid API key; None for a server without keys. Such a server accepts only
    `hosts`, localhost and IP addresses in `Host`, because a hostile page's name may resolve to it (DNS rebinding), and
    lets pages of its own and of `origins` change sessions.
    """

    def __init__(
        self, app: App, has_key: Callable[[Headers], bool] | None, hosts: frozenset[str], origins: frozenset[str]
    ) -> None:
        self._app, self._has_key, self._hosts, self._origins = app, has_key, hosts, origins

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        path = get_route_path(scope) if scope["type"] == "http" else ""  # without the root path, as routes see it
        if path == PREFIX or path.startswith(f"{PREFIX}/"):
            try:
                self._check(scope["method"], path, Headers(scope=scope))
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, method: str, path: str, headers: Headers) -> None:
        if self._has_key is not None:
            is_page = method in SAFE and path in PATHS  # a browser that opens a page sends no key
            if not is_page and not self._has_key(headers):
                raise ApiError(401, "The API key is missing or wrong: send it as `Authorization: Bearer KEY`.")
        else:
            self._check_host(headers.get("host", ""))
            if method not in SAFE:
                self._check_origin(headers)
        if "transfer-encoding" in headers:
            raise ApiError(411, "The body's length is missing: send it as `Content-Length`.", "Content-Length")
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit()) or int(length) > LONGEST_BODY:
            shown = reprlib.repr(length)
            raise ApiError(413, f"Content-Length must be at most {LONGEST_BODY} bytes, not {shown}.", "Content-Length")

    def _check_host(self, host: str) -> None:
        with suppress(ValueError):
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".").lower()
            if name in self._hosts or name == "localhost" or name.endswith(".localhost") or ipaddress.ip_address(name):
                return
        right = "set an --api-key, or name the host in api.hosts"
        raise ApiError(403, f"Host {reprlib.repr(host)} is not a name of this server: {right}.", "Host")

    def _check_origin(self, headers: Headers) -> None:
        """Raise ApiError if the request comes from a page of an origin that is not allowed."""
        # Browsers send `Sec-Fetch-Site` only with TLS or to localhost; see the standard Fetch Metadata.
        origin, site = headers.get("origin", ""), headers.get("sec-fetch-site")
        is_own = site in ("same-origin", "none") if site else origin.partition("://")[2] == headers.get("host")
        if origin and not is_own and origin not in self._origins:
            right = "set an --api-key, or name it in --allowed-origins"
            raise ApiError(403, f"Pages of {reprlib.repr(origin)} may not steer sessions: {right}.", "Origin")
