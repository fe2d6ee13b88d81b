"""Every failure as OpenAI's error body, `{"error": {"message", "type", "param", "code"}}`, all four keys always there.

SDKs choose their exception class by the status and repeat 408, 409, 429 and 5xx by themselves: a refusal that will
stand is therefore never one of those, or says `x-should-retry: false`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from jobs.protocol import REFUSAL_STATUSES, show
from jobs.queue import QueueError
from jobs.quotas import QuotaExceeded
from jobs.results import OutputError
from storage.errors import InvalidRequest, PromptmillError, SettingsError, StorageError

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
RATE_LIMIT = "rate_limit_error"
# What a client waits before it asks again when the database or the queue is away.
RETRY_AFTER_S = 2
# Codes of our services' failures that pass, though nothing of ours can try again by itself.
UNAVAILABLE = ("disk_full",)
NO_ROUTE = "there is no such route; GET /openapi.json lists them"
# Statuses that SDKs repeat.
REPEATED = (408, 409, 429)

log = structlog.get_logger(__name__)


class ApiError(Exception):
    """A refusal as the client is to see it.

    type: invalid_request_error, rate_limit_error, server_error, ... headers: sent with it, such as Retry-After.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID_REQUEST,
        code: str | None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.code = code
        self.param = param
        self.headers = dict(headers or {})


def not_found(kind: str, named: str) -> ApiError:
    """kind: file, batch, request, model. What belongs to another tenant is not found either."""
    return ApiError(404, f"there is no {kind} {show(named)}", code=f"{kind}_not_found", param="id")


def error_body(error: ApiError) -> dict[str, Any]:
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def render(error: ApiError) -> JSONResponse:
    headers = dict(error.headers)
    names = {name.lower() for name in headers}
    will_pass = "retry-after" in names or "retry-after-ms" in names
    if (error.status in REPEATED or error.status >= 500) and not will_pass and "x-should-retry" not in names:
        headers["x-should-retry"] = "false"
    return JSONResponse(error_body(error), status_code=error.status, headers=headers)


def translate(error: PromptmillError) -> ApiError:
    """One of our own failures as a refusal.

    What is wrong with the caller's request is told as it is. What is wrong with our services names hosts and folders:
    the caller gets its code, the log the rest.
    """
    if isinstance(error, InvalidRequest):
        return ApiError(REFUSAL_STATUSES.get(error.code, 400), error.message, code=error.code, param=error.param)
    if isinstance(error, QuotaExceeded):
        wait_s = error.retry_after_s
        kind = RATE_LIMIT if wait_s is not None else error.code
        headers = {} if wait_s is None else {"Retry-After": f"{wait_s:.0f}"}
        return ApiError(429, error.message, type=kind, code=error.code, headers=headers)
    if error.retryable or error.code in UNAVAILABLE:
        return ApiError(
            503,
            f"the server cannot take this at the moment ({error.code}); ask again in a while",
            type=SERVER_ERROR,
            code=error.code,
            headers={"Retry-After": str(RETRY_AFTER_S)},
        )
    if isinstance(error, StorageError | QueueError | OutputError | SettingsError) and error.code != "illegal_move":
        return ApiError(
            500,
            f"the server is in no state to do this ({error.code}); its log says why",
            type=SERVER_ERROR,
            code=error.code,
        )
    if error.code in REFUSAL_STATUSES:
        return ApiError(REFUSAL_STATUSES[error.code], error.message, code=error.code)
    return ApiError(400, error.message, code=error.code)


def internal_error() -> ApiError:
    """Our own mistake. What it was stands in the log, under the request's id."""
    return ApiError(
        500,
        "the server failed; its log says why, under this answer's x-request-id",
        type=SERVER_ERROR,
        code="internal_error",
    )


def answer_failure(error: ApiError | PromptmillError) -> JSONResponse:
    """What a route that raised it answers."""
    if isinstance(error, ApiError):
        return render(error)
    refusal = translate(error)
    if refusal.status >= 500:
        log.warning("call_failed", code=error.code, reason=error.message)
    return render(refusal)


def add_error_handlers(app: FastAPI) -> None:
    """Unexpected exceptions are the edge's (`jobs/gateway/edge.py`)."""

    async def our_error(_request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ApiError | PromptmillError)
        return answer_failure(error)

    async def http_error(http_request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        refusal = _of_http(error)
        if refusal.status == 404:
            refusal.message = _no_route(http_request)
        elif refusal.status == 405:
            refusal.headers["Allow"] = ", ".join(_methods(http_request, http_request.url.path))
        return render(refusal)

    async def validation_error(_request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return render(_of_validation(error))

    app.add_exception_handler(ApiError, our_error)
    app.add_exception_handler(PromptmillError, our_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, validation_error)


def _of_http(error: HTTPException) -> ApiError:
    """What the router itself refuses."""
    match error.status_code:
        case 404:
            message, code = NO_ROUTE, "route_not_found"
        case 405:
            message, code = "the route does not take this method; GET /openapi.json lists them", "method_not_allowed"
        case _:
            message, code = str(error.detail), "invalid_request"
    return ApiError(error.status_code, message, code=code, headers=error.headers)


def _no_route(http_request: Request) -> str:
    """The commonest mistake is a base URL without its /v1, or a path that repeats it."""
    path = http_request.url.path
    nearest = path.removeprefix("/v1") if path.startswith("/v1/v1/") else f"/v1{path}"
    if not _methods(http_request, nearest):
        return NO_ROUTE
    return f"there is no route {show(path)}; did you mean {show(nearest)}? The base URL ends with /v1, once"


def _methods(http_request: Request, path: str) -> list[str]:
    """All methods that the API has at a path; the router itself names only one route's."""
    found: set[str] = set()
    for template, operations in http_request.app.openapi()["paths"].items():
        if re.fullmatch(re.sub(r"\\{\w+\\}", "[^/]+", re.escape(template)), path):
            found |= {method.upper() for method in operations}
    return sorted(found)


def _of_validation(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong with a path, a query or a header."""
    first = error.errors()[0]
    where, *names = first["loc"]
    param = ".".join(str(name) for name in names) or str(where)
    if first["type"] == "missing":
        return ApiError(400, f"{param} is missing; add it", code="missing_required_parameter", param=param)
    wanted = str(first["msg"]).removeprefix("Input should be ")
    return ApiError(400, f"{param} is {show(first.get('input'))}; wanted: {wanted}", code="invalid_value", param=param)
