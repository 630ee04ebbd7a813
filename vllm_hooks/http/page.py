"""Live page at `/manthan/`: files of the folder `page`, served unchanged.

The files need no API key, because they have no data. The page asks the user for the key, and the API for the data.
"""

from functools import partial
from importlib import resources
from pathlib import PurePath

from fastapi import Request
from fastapi.responses import RedirectResponse, Response
from starlette.routing import Route

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


def page_routes() -> list[Route]:
    """Return the routes of the page and of the page's files."""
    # The redirect is relative, because a proxy may serve this server below a path of its own.
    routes = [Route(PREFIX, lambda _: RedirectResponse("manthan/")), Route(f"{PREFIX}/", partial(_send, "index.html"))]
    return routes + [Route(f"{PREFIX}/{name}", partial(_send, name)) for name in FILES]


def _send(name: str, _: Request) -> Response:
    return Response(FILES[name], media_type=KINDS[PurePath(name).suffix], headers=HEADERS)
