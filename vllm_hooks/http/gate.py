"""The gate in front of /manthan: who may ask, under what name of this server, and how long a body may be."""

import ipaddress
import reprlib
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from starlette._utils import get_route_path
from starlette.datastructures import Headers

from manthan.vllm_hooks.http.errors import ApiError

LONGEST_BODY = 64 * 1024
"""Bytes."""
SAFE = ("GET", "HEAD", "OPTIONS")
App = Callable[..., Awaitable[None]]


class Gate:
    """ASGI middleware that answers requests below `prefix` itself if they may not pass, before their body is read.

    Args:
        page: paths of the page, which has no data: who loads it need not have a key.
        has_key: True for headers with one of the server's API keys; None for a server without keys.
        hosts: names under which a server without keys may be asked, besides loopback and IP addresses. A page of
            another site whose name was made to lead here (DNS rebinding) has another one.
        origins: sites whose pages may steer sessions on a server without keys.
    """

    def __init__(
        self,
        app: App,
        prefix: str,
        page: frozenset[str],
        has_key: Callable[[Headers], bool] | None,
        hosts: frozenset[str],
        origins: frozenset[str],
    ) -> None:
        self._app, self._prefix, self._page = app, prefix, page
        self._has_key, self._hosts, self._origins = has_key, hosts, origins

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        path = get_route_path(scope) if scope["type"] == "http" else ""  # as the router reads it
        if path == self._prefix or path.startswith(f"{self._prefix}/"):
            try:
                self._check(scope["method"], path, Headers(scope=scope))
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, method: str, path: str, headers: Headers) -> None:
        """Raise ApiError for a request that may not pass."""
        if self._has_key is not None:
            is_page = method in SAFE and path in self._page  # a browser cannot send a key when it opens one
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
        name = _name(host)
        if name not in self._hosts and not _is_own(name):
            right = "set an --api-key, or name the host in api.hosts"
            raise ApiError(403, f"Host {reprlib.repr(host)} is not a name of this server: {right}.", "Host")

    def _check_origin(self, headers: Headers) -> None:
        """See the Fetch standard on `Origin`, and on `Sec-Fetch-Site`, which browsers leave out without TLS."""
        origin, site = headers.get("origin", ""), headers.get("sec-fetch-site")
        is_own = site in ("same-origin", "none") if site else urlsplit(origin).netloc == headers.get("host")
        if origin and not is_own and origin not in self._origins:
            right = "set an --api-key, or name it in --allowed-origins"
            raise ApiError(403, f"Pages of {reprlib.repr(origin)} may not steer sessions: {right}.", "Origin")


def _name(host: str) -> str:
    """Name or address in a Host header, without the port."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".").lower()
    except ValueError:
        return ""


def _is_own(name: str) -> bool:
    """True for a name that no other site can have: loopback, or an IP address."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
