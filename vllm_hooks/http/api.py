"""HTTP API below /manthan, on vLLM's server and behind its API key if it has one: shows and steers sessions.

A session is a conversation: the requests with one session id. The cold store has the compressed KV of idle sessions. A
question goes to all engine cores at once; a data-parallel engine has several, and some of them may know a session.
"""

import asyncio
import heapq
import reprlib
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from http import HTTPStatus
from importlib.metadata import version
from itertools import chain, islice, zip_longest
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from pydantic import BaseModel
from pydantic_core import from_json, to_json
from starlette.responses import Response
from vllm.logger import init_logger

from manthan.manager.config.resolve import must_be
from manthan.manager.listing import SessionInfo
from manthan.manager.session.hints import HintError
from manthan.vllm_hooks.compat import ask_cores
from manthan.vllm_hooks.http import models
from manthan.vllm_hooks.http.hints import tenant_in
from manthan.vllm_hooks.http.models import EngineState, SessionQuery, Sessions
from manthan.vllm_hooks.http.page import PREFIX
from manthan.vllm_hooks.queries import METHOD, ORDER, UNKNOWN, Answer
from manthan.vllm_hooks.transfer_config import from_vllm_config, settings_of

logger = init_logger("vllm.manthan")

ANSWERED_S = 30.0
"""Most seconds to wait for the engine cores. A core answers between two steps."""
EVERY_S, RARELY, MOST_OFTEN = 2.0, 3, 100
"""Seconds between rounds of the event stream `/changes`. With a `limit` above MOST_OFTEN, RARELY times as many."""
STATUSES = {
    401: "The API key is missing or wrong.",
    403: "The server has no API key, and `Host` is not one of the server's names, or another site's page steers.",
    404: "There is no such session, or it is another tenant's.",
    409: "Not possible now.",
    411: "The body's length is missing.",
    413: "The body is too long.",
    422: "A parameter or a body that cannot be used.",
    503: "The engine is missing, dead, asleep or silent.",
}
"""Description of each error, for the schema."""


class ApiError(Exception):
    """Refusal of a request, in one sentence. status: of HTTP. param: the wrong part of the request, if known."""

    def __init__(self, status: int, sentence: str, param: str | None = None) -> None:
        super().__init__(sentence)
        self.status, self.param = status, param

    def response(self) -> JSONResponse:
        """Return the answer to the request, with the same JSON fields as vLLM's own errors."""
        kind = HTTPStatus(self.status).phrase
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.status}
        headers = {"WWW-Authenticate": "Bearer"} if self.status == HTTPStatus.UNAUTHORIZED else None
        return JSONResponse({"error": error}, self.status, headers)


class ManthanRoute(APIRoute):
    """Route that answers an `ApiError` or an invalid request by `ApiError.response`, instead of FastAPI's own form."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handled(request: Request) -> Response:
            try:
                return await handle(request)
            except ApiError as error:
                return error.response()
            except RequestValidationError as error:
                return _mistake(error.errors()[0]).response()

        return handled


def _mistake(first: Mapping[str, Any]) -> ApiError:
    """Return the error that says what is wrong. first: pydantic's first error about the request."""
    if first["type"] == "json_invalid":
        return ApiError(422, "The body is not valid JSON.", "body")
    if len(first["loc"]) == 1:
        if first["type"] == "value_error":
            return ApiError(422, str(first["ctx"]["error"]), "body")
        return ApiError(422, f"The body must be a JSON object, not {reprlib.repr(first['input'])}.", "body")
    name = str(first["loc"][1])
    if first["type"] == "extra_forbidden":
        return ApiError(422, f"The body has an unknown field {reprlib.repr(name)}.", name)
    right = models.RIGHTS.get(name, "something else")
    return ApiError(422, must_be(name, right, first["input"], show=reprlib.repr), name)


# -- routes -------------------------------------------------------------------------------------------


def make_router(args: Namespace) -> APIRouter:
    """Return the routes below /manthan. args: the flags of `vllm serve`."""
    shown = [Depends(HTTPBearer(auto_error=False))]  # only for the schema: middleware checks the key
    errors: Any = {status: {"model": dict[str, models.Error], "description": text} for status, text in STATUSES.items()}
    router = APIRouter(prefix=PREFIX, tags=["manthan"], dependencies=shown, route_class=ManthanRoute, responses=errors)
    header = from_vllm_config(args).tenants.header

    def bound_by(request: Request) -> str | None:
        """Return the tenant that the header names, to whose sessions the request is bound; None without a header."""
        if not header or header not in request.headers:
            return None
        try:
            return tenant_in(header)
        except HintError as error:
            raise ApiError(422, str(error), header) from None

    Bound = Annotated[str | None, Depends(bound_by)]  # noqa: N806
    Id = Annotated[str, Path(description="id of the session, percent-encoded")]  # noqa: N806

    @router.get("/sessions", response_model=Sessions, summary="List sessions")
    async def sessions(request: Request, bound: Bound, asked: Annotated[SessionQuery, Query()]) -> Any:
        return await list_sessions(request.app.state.engine_client, asked.query(bound))

    @router.get("/sessions/{id:path}", response_model=models.SessionWithHistory, summary="Show a session")
    async def session(request: Request, id: Id, bound: Bound) -> Any:
        return await ask_about(request.app.state.engine_client, "session", {"id": id, "bound": bound})

    @router.get("/state", response_model=EngineState, summary="Show KV pool, cold store and eviction policy")
    async def state(request: Request, bound: Bound) -> Any:
        found = summed(await ask_all(request.app.state.engine_client, "state", {"bound": bound}))
        model = request.app.state.vllm_config.model_config
        name = model.served_model_name or model.model
        return found | {"version": version("manthan-kv"), "model": name if isinstance(name, str) else name[0]}

    @router.get("/changes", response_class=Changes, summary="Stream the state and a list of sessions as they change")
    async def changes(request: Request, bound: Bound, asked: Annotated[SessionQuery, Query()]) -> Changes:
        async def page() -> Sessions:
            return Sessions.model_validate(await sessions(request, bound, asked))

        async def whole() -> EngineState:
            return EngineState.model_validate(await state(request, bound))

        await whole()  # an error here is answered by a status, before the stream begins
        events = told({"state": whole, "sessions": page}, EVERY_S * (RARELY if asked.limit > MOST_OFTEN else 1))
        # The headers make proxies pass each event on at once.
        return Changes(events, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})

    @router.get("/config", response_model=dict[str, models.Setting], summary="Show the configuration as resolved")
    async def config(bound: Bound) -> Any:
        if bound is not None:
            raise ApiError(403, "The configuration is not shown to tenants.")
        return settings_of(args)

    def add(what: str, summary: str, status: int = 200, body: Any = models.Nothing, default: Any = None) -> None:
        given = body if default is ... else body | None
        path, name = f"/sessions/{{id:path}}/{what}", f"manthan_{what}"

        @router.post(path, status_code=status, response_model=SessionInfo, summary=summary, operation_id=name)
        async def act(request: Request, id: Id, bound: Bound, asked: given = default) -> Any:  # type: ignore[valid-type]
            said: dict[str, Any] = {} if asked is None else asked.model_dump()
            return await ask_about(request.app.state.engine_client, what, {"id": id, "bound": bound, **said})

    add("evict", "Compress and save a session now, as if it were idle for long enough", 202)
    add("prefetch", "Restore a session when there is room", 202)
    add("expect", "Announce when a session's client returns, or which tool it waits for", 200, models.Expect, ...)
    add("pin", "Keep a session's compressed blocks when others are dropped", 200, models.Pin)
    add("unpin", "End a pin")
    add("release", "Forget a session, and erase the blocks that only this session has")
    return router


class Changes(StreamingResponse):
    media_type = "text/event-stream"


async def told(parts: Mapping[str, Callable[[], Awaitable[BaseModel]]], every_s: float) -> AsyncIterator[str]:
    """Yield server-sent events: in each round the changed parts, then `now`. After a failure, `error` is the last.

    parts: by name of an event, a function that asks for its data. every_s: seconds between rounds.
    """
    last: dict[str, BaseModel] = {}
    try:
        while True:
            for name, ask in parts.items():
                found = await ask()
                same = found.model_copy(update={"now": 0.0})
                if same != last.get(name):
                    last[name] = same
                    yield f"event: {name}\ndata: {found.model_dump_json()}\n\n"
            yield f"event: now\ndata: {time.time()}\n\n"
            await asyncio.sleep(every_s)
    except Exception as error:
        said = str(error)
        if not isinstance(error, ApiError):
            logger.warning("Manthan: the stream of changes ends: %s: %s", type(error).__name__, error)
            said = "The engine's answer failed: the server's log says why."
        yield f"event: error\ndata: {to_json(said).decode()}\n\n"


# -- engine cores -------------------------------------------------------------------------------------


async def ask_all(client: Any, what: str, asked: dict[str, Any]) -> list[Answer]:
    """Return the answer of each engine core, in the order of their numbers.

    client: vLLM's engine client; None for a server without an engine. what, asked: see `Queries.answer`.
    Raises ApiError 503 if there is no engine, or if it is dead or does not answer in time.
    """
    if client is None:
        raise ApiError(503, "This server has no engine.")
    try:
        found = await asyncio.wait_for(ask_cores(client, METHOD, what, asked), ANSWERED_S)
    except TimeoutError:
        raise ApiError(503, f"The engine has not answered within {ANSWERED_S:g} s.") from None
    if found is None:
        raise ApiError(503, "The engine is dead.")
    return [from_json(answer) for answer in found]


async def list_sessions(client: Any, asked: dict[str, Any]) -> Answer:
    """Return a page of all cores' sessions, with the fields of `Sessions`; see `ask_all`."""
    offset, limit = asked["offset"], asked["limit"]
    answers = await ask_all(client, "sessions", asked)
    if len(answers) == 1:
        return answers[0]
    answers = await ask_all(client, "sessions", asked | {"offset": 0, "limit": offset + limit})
    return together(answers, offset, limit, asked["descending"])


async def ask_about(client: Any, what: str, asked: dict[str, Any]) -> Answer:
    """Show a session or act on it, in each core that has it; see `ask_all`.

    Return the answer of the core that used the session last, with the core's index as `engine`. Raises ApiError as
    `ask_all` does; 404 if no core has the session; 409 or 503 if all cores that have it refuse.
    """
    answers = await ask_all(client, what, asked)
    known = [answer | {"engine": engine} for engine, answer in enumerate(answers) if "refused" not in answer]
    if known:
        return max(known, key=lambda answer: float(answer["last_used"]))
    status, why = min((answer["refused"] for answer in answers), key=lambda refused: bool(refused[0] == UNKNOWN))
    raise ApiError(status, why)


def together(answers: Sequence[Answer], offset: int, limit: int, descending: bool) -> Answer:
    """Return a page of all cores' sessions, from each core's first `offset + limit`, which are sorted already."""
    rows = [
        [(key, shown | {"engine": engine}) for key, shown in zip(answer["keys"], answer["sessions"], strict=True)]
        for engine, answer in enumerate(answers)
    ]
    merged = heapq.merge(*rows, key=lambda row: row[0], reverse=descending)
    page = [shown for _, shown in islice(merged, offset, offset + limit)]
    return {"total": sum(answer["total"] for answer in answers), "now": answers[0]["now"], "sessions": page}


def summed(answers: Sequence[Answer]) -> Answer:
    """Return several cores' states as one. The store is up if it is up in all cores.

    Tiers, pool, sessions and totals are summed, and eviction orders interleaved. All else is the first core's.
    """
    first = answers[0]
    if len(answers) == 1:
        return first
    orders = zip_longest(*(answer["policy"]["order"] for answer in answers))
    order = [session for session in chain.from_iterable(orders) if session is not None]
    tiers = [_added(parts) for parts in zip(*(answer["store"]["tiers"] for answer in answers), strict=True)]
    return first | {
        "policy": first["policy"] | {"order": order[:ORDER]},
        "store": first["store"] | {"up": all(answer["store"]["up"] for answer in answers), "tiers": tiers},
        "pool": _added(answer["pool"] for answer in answers) | {"block_tokens": first["pool"]["block_tokens"]},
        "sessions": _added(answer["sessions"] for answer in answers),
        "totals": _added(answer["totals"] for answer in answers),
    }


def _added(parts: Iterable[Answer]) -> Answer:
    """Return the sums of numbers of the same name, and the first part's texts."""
    first, *others = parts
    return {
        name: value if isinstance(value, str) else value + sum(other[name] for other in others)
        for name, value in first.items()
    }
