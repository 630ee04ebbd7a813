"""The live page at `/manthan/`: files of the folder `page`, served as they are.

They carry no data: the page asks the API for it. So they need no API key, and the page asks for one.
"""

from collections.abc import Callable
from importlib import resources
from pathlib import PurePath

from fastapi import APIRouter
from fastapi.responses import RedirectResponse, Response

PREFIX = "/manthan"
INDEX = "index.html"
HEADERS = {
    # Nothing is loaded from or sent to another host, no script stands in the HTML, and no site may frame the page.
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


def page_router() -> APIRouter:
    """The page and its files, for the server's app to include."""
    router = APIRouter(prefix=PREFIX, include_in_schema=False)
    router.add_api_route("", _to_the_page, methods=["GET"])
    router.add_api_route("/", _sender(INDEX), methods=["GET"])
    for name in FILES:
        router.add_api_route(f"/{name}", _sender(name), methods=["GET"])
    return router


def _to_the_page() -> RedirectResponse:
    """Relative, so that it holds behind a proxy that puts a path before."""
    return RedirectResponse("manthan/")


def _sender(name: str) -> Callable[[], Response]:
    kind = KINDS[PurePath(name).suffix]

    def send() -> Response:
        return Response(FILES[name], media_type=kind, headers=HEADERS)

    return send
