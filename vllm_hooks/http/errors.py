"""Errors of the HTTP API: one sentence each, in the form of vLLM's own."""

import reprlib
from collections.abc import Callable, Coroutine, Mapping
from http import HTTPStatus
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.responses import Response

from manthan.manager.config.sentences import must_be


class ApiError(Exception):
    """A request that is not served, in a sentence. param: what of the request is wrong."""

    def __init__(self, status: int, sentence: str, param: str | None = None) -> None:
        super().__init__(sentence)
        self.status, self.sentence, self.param = status, sentence, param

    def response(self) -> JSONResponse:
        kind = HTTPStatus(self.status).phrase
        error = {"message": self.sentence, "type": kind, "param": self.param, "code": self.status}
        headers = {"WWW-Authenticate": "Bearer"} if self.status == HTTPStatus.UNAUTHORIZED else None
        return JSONResponse({"error": error}, self.status, headers)


def route_with(rights: Mapping[str, str]) -> type[APIRoute]:
    """Routes whose errors are those of this API. rights: what each parameter and field must be."""

    class Route(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def handled(request: Request) -> Response:
                try:
                    return await handle(request)
                except ApiError as error:
                    return error.response()
                except RequestValidationError as error:
                    return _mistake(error, rights).response()

            return handled

    return Route


def _mistake(error: RequestValidationError, rights: Mapping[str, str]) -> ApiError:
    """Of the first that is wrong."""
    first: Mapping[str, Any] = error.errors()[0]
    place = [str(part) for part in first["loc"][1:]]
    status = HTTPStatus.UNPROCESSABLE_ENTITY
    if first["type"] == "json_invalid":
        return ApiError(status, "The body is not valid JSON.", "body")
    if first["type"] == "value_error" and not place:
        return ApiError(status, str(first["ctx"]["error"]), "body")
    if not place:
        return ApiError(status, f"The body must be a JSON object, not {reprlib.repr(first['input'])}.", "body")
    name = place[0]
    if first["type"] == "extra_forbidden":
        return ApiError(status, f"The body has an unknown field {reprlib.repr(name)}.", name)
    right = rights.get(name, "something else")
    return ApiError(status, must_be(name, right, first["input"], show=reprlib.repr), name)
