"""Live page at `/manthan/`: files of the folder `page`, served unchanged.

The files need no API key, because they have no data. The page asks the user for the key, and the API for the data.
"""

from collections.abc import Callable
from importlib import resources
from pathlib import PurePath

from fastapi import APIRouter
from fastapi.responses import RedirectResponse, Response

PREFIX = "/manthan"
HEADERS = {
    # The page may load from and send to this server only, have no script within the HTML, and not be framed.
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
KINDS = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}
FILES = {
    file.name: file.read_bytes()
    for file in resources.files(__package__).joinpath("page").iterdir()
    if PurePath(file.name).suffix in KINDS
}
PATHS = frozenset({PREFIX, f"{PREFIX}/", *(f"{PREFIX}/{name}" for name in FILES)})
"""Paths of the page and its files: requests that only read them need no API key."""


def page_router() -> APIRouter:
    """Return the routes of the page and of the page's files."""
    router = APIRouter(prefix=PREFIX, include_in_schema=False)
    # The redirect is relative, because a proxy may serve this server below a path of its own.
    router.add_api_route("", lambda: RedirectResponse("manthan/"), methods=["GET"], response_model=None)
    router.add_api_route("/", _sender("index.html"), methods=["GET"])
    for name in FILES:
        router.add_api_route(f"/{name}", _sender(name), methods=["GET"])
    return router


def _sender(name: str) -> Callable[[], Response]:
    kind = KINDS[PurePath(name).suffix]

    def send() -> Response:
        return Response(FILES[name], media_type=kind, headers=HEADERS)

    return send
