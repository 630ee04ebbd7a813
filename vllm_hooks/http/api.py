"""The HTTP API: sessions seen and steered below /manthan, on vLLM's own server and behind its API key."""

from argparse import Namespace
from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Path, Query, Request
from fastapi.security import HTTPBearer

from manthan.manager.listing import SessionInfo
from manthan.manager.session.hints import HintError
from manthan.vllm_hooks.compat import key_check
from manthan.vllm_hooks.http.cores import Cores
from manthan.vllm_hooks.http.errors import ApiError, route_with
from manthan.vllm_hooks.http.gate import Gate
from manthan.vllm_hooks.http.hints import tenant_header, tenant_in
from manthan.vllm_hooks.http.models import (
    RIGHTS,
    Asked,
    EngineState,
    Error,
    Expect,
    Nothing,
    Pin,
    Sessions,
    SessionWithLife,
    Setting,
)
from manthan.vllm_hooks.http.page import PATHS, PREFIX, page_router
from manthan.vllm_hooks.transfer_config import from_vllm_config, is_on, settings_of

STATUSES = {
    401: "No API key, or a wrong one.",
    403: "There is no API key, and the request's `Host` is not one of this server's.",
    411: "The body's length is missing.",
    413: "The body is too long.",
    422: "A parameter or a body that cannot be used.",
    503: "The engine is dead, or does not answer.",
}
OF_ONE = {404: "There is no such session, or it is another tenant's."}
STEERED = OF_ONE | {
    403: "A page of another site asks, and there is no API key.",
    409: "Not possible now.",
    503: "The engine is dead, or sleeps.",
}


def add_api(app: FastAPI) -> None:
    """Add the HTTP API and the live page to the server of an engine with Manthan, unless they are off.

    `Gate` lets nobody into the routes who may not ask.
    """
    args = app.state.args
    if not is_on(args) or not (config := from_vllm_config(args).api).enabled:
        return
    hosts = {*config.hosts, getattr(args, "host", None) or ""} - {""}
    router: Any = app.router
    router.middleware_stack = Gate(  # behind vLLM's own middleware
        router.middleware_stack,
        prefix=PREFIX,
        page=PATHS,
        has_key=key_check(args),
        hosts=frozenset(name.lower() for name in hosts),
        origins=frozenset(getattr(args, "allowed_origins", ())) - {"*"},
    )
    app.include_router(make_router(args))
    app.include_router(page_router())


def make_router(args: Namespace) -> APIRouter:
    """The routes of a server with these flags."""
    shown = [Depends(HTTPBearer(auto_error=False))]  # in the schema; the key is checked by the gate
    router = APIRouter(
        prefix=PREFIX, tags=["manthan"], dependencies=shown, route_class=route_with(RIGHTS), responses=_errors(STATUSES)
    )
    bound_by = _bound_by(tenant_header(args))
    Bound = Annotated[str | None, Depends(bound_by)]  # noqa: N806
    Id = Annotated[str, Path(description="of the session, percent-encoded")]  # noqa: N806

    @router.get("/sessions", response_model=Sessions, summary="List sessions")
    async def sessions(request: Request, bound: Bound, asked: Annotated[Asked, Query()]) -> Any:
        return await _cores(request).sessions(asked.query(bound))

    @router.get(
        "/sessions/{id:path}", response_model=SessionWithLife, responses=_errors(OF_ONE), summary="Show a session"
    )
    async def session(request: Request, id: Id, bound: Bound) -> Any:
        return await _cores(request).session("session", {"id": id, "bound": bound})

    @router.get("/state", response_model=EngineState, summary="Show the pool, the cold store and the policy")
    async def state(request: Request, bound: Bound) -> Any:
        found = await _cores(request).state(bound)
        model = request.app.state.vllm_config.model_config
        name = model.served_model_name or model.model
        about = {"version": version("manthan-kv"), "model": name if isinstance(name, str) else name[0]}
        return found | about

    @router.get(
        "/config",
        response_model=dict[str, Setting],
        responses=_errors({403: "A tenant asks."}),
        summary="Show the configuration as it was resolved",
    )
    async def config(bound: Bound) -> Any:
        if bound is not None:
            raise ApiError(403, "The configuration is not shown to tenants.")
        return settings_of(args)

    _add_actions(router, Bound, Id)
    return router


def _add_actions(router: APIRouter, Bound: Any, Id: Any) -> None:  # noqa: N803
    def add(what: str, summary: str, status: int, body: Any, default: Any = None) -> None:
        given = body if default is ... else body | None

        async def act(request: Request, id: Id, bound: Bound, asked: given = default) -> Any:  # type: ignore[valid-type]
            said: dict[str, Any] = {} if asked is None else asked.model_dump()
            return await _cores(request).session(what, {"id": id, "bound": bound, **said})

        router.add_api_route(
            f"/sessions/{{id:path}}/{what}",
            act,
            methods=["POST"],
            status_code=status,
            response_model=SessionInfo,
            responses=_errors(STEERED),
            summary=summary,
            operation_id=f"manthan_{what}",
        )

    add("evict", "Have a session go cold now, as if it were idle for long enough", 202, Nothing)
    add("prefetch", "Have a session come back when there is room", 202, Nothing)
    add("expect", "Say when a session's client will be back, or what tool it waits for", 200, Expect, ...)
    add("pin", "Keep a session's compressed blocks whatever comes", 200, Pin)
    add("unpin", "Keep them no longer", 200, Nothing)
    add("release", "Forget a session", 200, Nothing)


def _errors(statuses: dict[int, str]) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": Error, "description": text} for status, text in statuses.items()}


def _cores(request: Request) -> Cores:
    return Cores(request.app.state.engine_client)


def _bound_by(header: str) -> Callable[[Request], str | None]:
    def bound(request: Request) -> str | None:
        """The tenant to whose sessions a request is bound; None where nobody said one, who sees all."""
        if not header or header not in request.headers:
            return None
        try:
            return tenant_in(header)
        except HintError as error:
            raise ApiError(422, str(error), header) from None

    return bound
