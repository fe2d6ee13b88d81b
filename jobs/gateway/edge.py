"""What every call passes through: its id, bounds on its body, a bound on silence, its measure, and the last catch.

A plain ASGI layer, so that uploads and streams pass through untouched. A body is bounded by what it says (refused
before a byte is read) and by what comes; a client that stops in the middle is answered 408 and cut off.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from time import monotonic

import structlog
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jobs.gateway.errors import ApiError, internal_error, render
from jobs.logs import crash_facts

log = structlog.get_logger(__name__)

REQUEST_ID_CHARACTERS = 200
# method, route, status, seconds to the end of the answer
Observe = Callable[[str, str, int, float], None]
# Slower than this, on average, nobody sends: what drips holds a connection and a file for ever.
LEAST_BYTES_PER_S = 1024
# What the upload's multipart frame may take beside the file itself.
FRAME_BYTES = 64 * 1024


class ResponseAborted(Exception):
    """An answer broke off after it had begun: the connection is closed, so that nobody takes it for whole."""


class Edge:
    """max_upload_bytes: of the file in a body of POST /v1/files; max_body_bytes: of every other body."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        max_body_bytes: int,
        max_upload_bytes: int,
        receive_timeout_s: float,
        observe: Observe,
    ) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._max_upload_bytes = max_upload_bytes
        self._receive_timeout_s = receive_timeout_s
        self._observe = observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = monotonic()
        headers = dict(scope["headers"])
        request_id = _request_id(headers.get(b"x-request-id"))
        scope.setdefault("state", {})["request_id"] = request_id
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id.encode())]}
            await send(message)

        body = _Body(receive, self._bound(scope), self._receive_timeout_s)
        structlog.contextvars.bind_contextvars(request_id=request_id)
        try:
            body.refuse_by_headers(headers)
            await self._app(scope, body.receive, send_with_id)
        except ApiError as error:
            if status:
                raise ResponseAborted from None
            await render(error)(scope, receive, send_with_id)
        except ClientDisconnect:
            log.info("client_left")  # in the midst of its request: there is nobody to answer
        except Exception as error:
            log.error("call_crashed", **crash_facts(error))
            if status:
                raise ResponseAborted from None
            await render(internal_error())(scope, receive, send_with_id)
        finally:
            route = getattr(scope.get("route"), "path", "none")
            self._observe(scope["method"], route, status, monotonic() - began)
            structlog.contextvars.unbind_contextvars("request_id")

    def _bound(self, scope: Scope) -> int:
        if scope["method"] == "POST" and scope["path"] == "/v1/files":
            return self._max_upload_bytes + FRAME_BYTES
        return self._max_body_bytes


class _Body:
    """A request's body as it comes in, bounded in size and in silence."""

    def __init__(self, receive: Receive, max_bytes: int, timeout_s: float) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._seen = 0
        self._is_whole = False
        self._began = monotonic()

    def refuse_by_headers(self, headers: dict[bytes, bytes]) -> None:
        """Raises ApiError 413, or 415 for a compressed body: what it unpacks to would be bounded by nothing."""
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_bytes:
            raise too_large(self._max_bytes)
        encoding = headers.get(b"content-encoding", b"identity").strip().lower()
        if encoding not in (b"identity", b""):
            raise ApiError(
                415,
                "bodies are taken uncompressed; leave Content-Encoding out",
                code="unsupported_content_encoding",
            )

    async def receive(self) -> Message:
        if self._is_whole:
            return await self._receive()  # waits for the client to go away, as long as the answer takes
        try:
            async with asyncio.timeout(self._timeout_s):
                message = await self._receive()
        except TimeoutError:
            raise _too_slow(f"nothing came for {self._timeout_s:g} s in the midst of the request") from None
        if monotonic() - self._began > self._timeout_s + self._seen / LEAST_BYTES_PER_S:
            raise _too_slow(f"the request comes at less than {LEAST_BYTES_PER_S} bytes/s")
        if message["type"] != "http.request":
            return message
        self._seen += len(message.get("body", b""))
        if self._seen > self._max_bytes:
            raise too_large(self._max_bytes)
        self._is_whole = not message.get("more_body", False)
        return message


def _too_slow(message: str) -> ApiError:
    return ApiError(
        408,
        f"{message}; send it again",
        code="request_timeout",
        headers={"Connection": "close", "x-should-retry": "true"},
    )


def too_large(max_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"the body exceeds {max_bytes:,} bytes; send less at once",
        code="request_too_large",
        headers={"Connection": "close"},
    )


def _request_id(given: bytes | None) -> str:
    """The caller's own, if it is one that can be logged and sent back; else a new one."""
    if given and len(given) <= REQUEST_ID_CHARACTERS and given.isascii() and given.decode().isprintable():
        return given.decode()
    return f"req_{uuid.uuid4().hex}"
