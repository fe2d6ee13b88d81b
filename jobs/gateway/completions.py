"""`/v1/chat/completions`, `/v1/completions` and `/api/v1/chat`: one request, answered while the caller waits.

A call writes its request, hears from the worker how it goes, and reads the answer from the database. A caller that goes
away, or whose time is over, ends its request, in the engine too. An answer that is streamed is the answer that is
recorded: what was sent is compared with it, and a stream that would have to take something back ends with an error.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field
from starlette.types import Receive, Scope, Send

from jobs import interactive, protocol
from jobs.gateway.bodies import WHOLE
from jobs.gateway.chunks import DONE, HEARTBEAT, Chunks, event
from jobs.gateway.errors import SERVER_ERROR, ApiError, answer_failure, error_body
from jobs.gateway.idempotency import IDEMPOTENCY_KEY, MAX_KEY_CHARACTERS, idempotency_key_of
from jobs.gateway.identity import BEARER_SECURITY, caller_of
from jobs.gateway.overload import Limits, Load, judge
from jobs.gateway.replies import CallerGone, Replies, Wait
from jobs.gateway.standing import ModelStanding, Standing
from jobs.gateway.state import Gateway
from jobs.interactive import Answer, Asked
from jobs.keys import Caller
from jobs.protocol import Body, ChatBody, Endpoint, Message
from jobs.quotas import TenantBook, check_queued_tokens
from jobs.submit import estimate_prompt_tokens
from storage import queries
from storage.database import Connection
from storage.errors import InvalidRequest, PromptmillError
from storage.models import Door


class DirectRoute(APIRoute):
    """A route whose endpoint is called with its request alone, and answers with a response.

    What FastAPI does to find an endpoint's parameters takes longer than all else between a call and its endpoint. Its
    path has no parameters, so that a call finds it without the router, too (`jobs/gateway/app.py`).
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
        return endpoint

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a call that is this route's."""
        scope["route"] = self
        try:
            response: Response = await self.endpoint(Request(scope, receive, send))
        except (ApiError, PromptmillError) as error:
            response = answer_failure(error)
        await response(scope, receive, send)


router = APIRouter(tags=["chat and completions"], route_class=DirectRoute)

# A streamed answer's status is held back for so long, so that a request that is refused, or fails at once, is answered
# with its own status rather than in the midst of a stream. Far below the time after which proxies lose patience.
STATUS_WAIT_S = 5.0
HEARTBEAT_S = 15.0
# Larger bodies are parsed in a thread: they would hold up other calls by more than a millisecond.
LONG_BODY_BYTES = 200_000
# nginx's word for a caller that went away; nobody sees it but the metrics.
CLIENT_CLOSED_REQUEST = 499
# What ended in one of these ways may well pass the next time.
TIMED_OUT = ("request_timed_out", "deadline_exceeded")

_Returned = TypeVar("_Returned")


@dataclass(frozen=True, slots=True)
class Calls:
    """What the routes of this module share, opened with the application."""

    gateway: Gateway
    replies: Replies
    standing: Standing
    tenants: TenantBook


def calls_of(http_request: Request) -> Calls:
    state = http_request.app.state
    return Calls(state.gateway, state.replies, state.standing, state.tenants)


def _description(model: type[BaseModel], *, takes_key: bool = True) -> dict[str, Any]:
    """What the OpenAPI document says of a direct route: its body, its header, that it wants an API key."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}", mode="validation")
    header = {
        "name": IDEMPOTENCY_KEY,
        "in": "header",
        "required": False,
        "schema": {"type": "string", "minLength": 1, "maxLength": MAX_KEY_CHARACTERS},
    }
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": _inline(schema)}}},
        "security": BEARER_SECURITY,
        **({"parameters": [header]} if takes_key else {}),
    }


def _inline(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with what it refers to put in its place."""
    definitions = schema.pop("$defs", {})

    def resolve(value: Any) -> Any:
        if isinstance(value, dict):
            if "$ref" in value:
                return resolve(definitions[value["$ref"].rpartition("/")[2]])
            return {key: resolve(each) for key, each in value.items()}
        return [resolve(each) for each in value] if isinstance(value, list) else value

    resolved: dict[str, Any] = resolve(schema)
    return resolved


class SimpleQuestion(BaseModel):
    """The body of `/api/v1/chat`."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    prompt: Annotated[str, Field(min_length=1)]
    max_new_tokens: Annotated[int, Field(ge=1), WHOLE] | None = None


class SimpleAnswer(BaseModel):
    """latency_ms: from the call's arrival to its answer. gpu_id: the number of the GPU that answered; null: no GPU."""

    response: str
    latency_ms: float
    gpu_id: int | None


@router.post(
    "/v1/chat/completions",
    summary="Answer a conversation",
    response_class=Response,
    openapi_extra=_description(ChatBody),
)
async def create_chat_completion(http_request: Request) -> Response:
    """As OpenAI's. With `stream: true` server-sent events, token by token."""
    return await _complete(Endpoint.CHAT, http_request)


@router.post(
    "/v1/completions",
    summary="Go on from a text",
    response_class=Response,
    openapi_extra=_description(protocol.CompletionBody),
)
async def create_completion(http_request: Request) -> Response:
    """As OpenAI's, one prompt to a call. With `stream: true` server-sent events, token by token."""
    return await _complete(Endpoint.COMPLETIONS, http_request)


@router.post(
    "/api/v1/chat",
    summary="Answer one prompt, for simple clients",
    response_model=SimpleAnswer,
    openapi_extra=_description(SimpleQuestion, takes_key=False),
)
async def chat_simply(http_request: Request) -> Response:
    """The model is the one that has workers; with several, use `/v1/chat/completions`."""
    began_at = monotonic()
    calls, caller = calls_of(http_request), await caller_of(http_request)
    question = protocol.parse_as(SimpleQuestion, await http_request.body())
    message = Message(role="user", content=question.prompt)
    models = await calls.standing.models()
    served = [model for model in models.values() if model.workers] or list(models.values())
    if len(served) != 1:
        raise ApiError(
            503 if not served else 400,
            f"this route takes the one model that is served, and there are {len(served)}; "
            "name the model: POST /v1/chat/completions",
            type=SERVER_ERROR if not served else "invalid_request_error",
            code="no_worker_ready" if not served else "model_ambiguous",
            headers={"Retry-After": "10"} if not served else None,
        )
    body = ChatBody(model=served[0].name, messages=(message,), max_tokens=question.max_new_tokens)
    protocol.refuse_nul(body)
    call = await _begin(Endpoint.CHAT, body, calls, caller, None)
    result = await call.outcome(http_request.receive)
    if result is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    text = _good(result)["choices"][0]["message"]["content"]
    device = await calls.replies.in_thread(lambda: _device(calls.gateway, result.request_id))
    took_ms = round((monotonic() - began_at) * 1000, 3)
    answer = SimpleAnswer(response=text, latency_ms=took_ms, gpu_id=gpu_number(device))
    return JSONResponse(answer.model_dump())


def gpu_number(device: str | None) -> int | None:
    """`gpu1` and `cuda:1` are 1; a CPU has no number."""
    digits = (device or "").removeprefix("gpu").removeprefix("cuda").removeprefix(":")
    return int(digits) if digits.isdecimal() else None


async def _complete(endpoint: Endpoint, http_request: Request) -> Response:
    calls, caller = calls_of(http_request), await caller_of(http_request)
    idempotency_key = idempotency_key_of(http_request)
    raw = await http_request.body()
    if len(raw) > LONG_BODY_BYTES:
        body = await run_in_threadpool(protocol.parse_body, endpoint, raw, allow_stream=True)
    else:
        body = protocol.parse_body(endpoint, raw, allow_stream=True)
    call = await _begin(endpoint, body, calls, caller, idempotency_key)
    if not body.stream:
        result = await call.outcome(http_request.receive)
        if result is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        _refuse_unexecuted(result)
        return Response(
            result.response,
            status_code=result.status_code or 500,
            media_type="application/json",
            headers={} if result.status_code == 200 else {"x-should-retry": "false"},
        )
    result = await call.first_news(http_request.receive)
    if result is not None and result.status_code != 200:
        call.end()
        _refuse_unexecuted(result)
        return Response(
            result.response,
            status_code=result.status_code or 500,
            media_type="application/json",
            headers={"x-should-retry": "false"},
        )
    return _Stream(call)


async def _begin(endpoint: Endpoint, body: Body, calls: Calls, caller: Caller, idempotency_key: str | None) -> _Call:
    """Let the request in, or not, and send it."""
    gateway = calls.gateway
    model = await _served_model(calls, body.model)
    limits = gateway.settings.gateway
    refusal = judge(
        model.name,
        Load(model.waiting, model.oldest_s, calls.replies.open_calls, model.workers, model.starting),
        Limits(limits.max_waiting_requests, limits.max_wait_s, limits.max_open_calls),
    )
    if refusal is not None:
        raise ApiError(
            refusal.status,
            refusal.message,
            type="rate_limit_error" if refusal.status == 429 else SERVER_ERROR,
            code=refusal.code,
            headers={"Retry-After": str(refusal.retry_after_s)},
        )
    known = calls.tenants.known(caller.tenant)
    tenant = known[0] if known is not None else await run_in_threadpool(calls.tenants.find, caller.tenant)
    has_quota = tenant is not None and tenant.max_queued_prompt_tokens is not None

    def check(connection: Connection) -> None:
        check_queued_tokens(connection, caller.tenant, adding=estimate_prompt_tokens(body.to_json()))

    def write() -> Asked:
        return interactive.write(
            gateway.database,
            body,
            endpoint=endpoint,
            model=model.name,
            tenant=caller.tenant,
            door=Door.HTTP,
            timeout_s=limits.request_timeout_s,
            api_key_id=caller.api_key_id,
            idempotency_key=idempotency_key,
            reply_to=calls.replies.channel,
            is_known_tenant=tenant is not None,
            check=check if has_quota else None,
        )

    until = monotonic() + limits.request_timeout_s
    asked, wait = await calls.replies.begin(write, body.n or 1)
    return _Call(endpoint, body, model, asked, wait, calls.replies, until, is_kept=idempotency_key is not None)


async def _served_model(calls: Calls, named: str | None) -> ModelStanding:
    if named is None:
        raise InvalidRequest(
            "model is missing; add it (GET /v1/models lists them)", code="missing_required_parameter", param="model"
        )
    models = await calls.standing.models()
    if named not in models:
        raise protocol.unknown_model(named, models)
    return models[named]


@dataclass(slots=True)
class _Call:
    """A request that was sent, and the caller who waits. until: monotonic seconds.

    is_kept: it has an idempotency key, and the same call again is given its answer: it runs on when this caller goes.
    """

    endpoint: Endpoint
    body: Body
    model: ModelStanding
    asked: Asked
    wait: Wait
    replies: Replies
    until: float
    is_kept: bool
    is_over: bool = False

    def end(self) -> None:
        self.replies.end(self.wait)

    def abandon(self) -> None:
        """The caller went away."""
        if not self.is_kept and self.wait.answer is None:
            self.replies.later(self._give_up())
        self.end()

    async def _give_up(self, *, has_expired: bool = False) -> None:
        await self.replies.give_up(self.wait, has_expired=has_expired)

    async def outcome(self, receive: Receive) -> Answer | None:
        """The answer. None: the caller went away. Raises ApiError 504 when the time is over."""
        try:
            async with asyncio.timeout(self._left_s()):
                return await self._while_there(self._answered(), receive)
        except CallerGone:
            self.abandon()
            return None
        except TimeoutError:
            await self._give_up(has_expired=True)
            raise timed_out() from None
        finally:
            self.end()

    async def first_news(self, receive: Receive) -> Answer | None:
        """Wait for the first sign of how it goes, for a while. The answer, if it has come already."""
        try:
            async with asyncio.timeout(min(STATUS_WAIT_S, self._left_s())):
                await self._while_there(self._stirred(), receive)
        except TimeoutError:
            return None
        except CallerGone:
            self.abandon()
            raise ApiError(CLIENT_CLOSED_REQUEST, "the caller went away", code="client_closed_request") from None
        except BaseException:
            self.abandon()
            raise
        return self.wait.answer

    async def _answered(self) -> Answer:
        while True:
            result = await self.replies.answer(self.wait)
            if result is not None:
                return result
            await self.wait.news()

    async def _stirred(self) -> None:
        while await self.replies.answer(self.wait) is None and not any(self.wait.heard):
            await self.wait.news()

    async def _while_there(self, work: Coroutine[Any, Any, _Returned], receive: Receive) -> _Returned:
        """Do what waits for news. They end with CallerGone when the caller goes away."""
        leaving = asyncio.create_task(_tell_of_leaving(receive, self.wait))
        try:
            return await work
        finally:
            leaving.cancel()

    def _left_s(self) -> float:
        return max(0.0, self.until - monotonic())

    async def stream(self) -> AsyncIterator[bytes]:
        """The answer as events. Follow with `close`."""
        async for piece in self._events():
            yield piece
        self.is_over = True

    def close(self) -> None:
        """The stream has ended; before its time, it gives the request up."""
        if self.is_over:
            self.end()
        else:
            self.abandon()

    async def _events(self) -> AsyncIterator[bytes]:
        choices = range(self.body.n or 1)
        prefix = "chatcmpl" if self.endpoint is Endpoint.CHAT else "cmpl"
        options = self.body.stream_options
        chunks = Chunks(
            endpoint=self.endpoint,
            id=f"{prefix}-{self.asked.request_id:x}",
            created=int(time.time()),
            model=self.model.name,
            system_fingerprint=f"fp_{self.model.digest[:12]}" if self.model.digest else None,
            with_usage=bool(options and options.include_usage),
        )
        # Log probabilities are of tokens, text is sent by whole characters: with them it is sent when it is complete.
        is_live = self.body.wanted_logprobs is None
        sent = [0 for _ in choices]
        for choice in choices:
            yield chunks.opening(choice)
        spoke_at = monotonic()
        while True:
            result = await self.replies.answer(self.wait)
            if self.wait.differs:
                yield event(error_body(text_differs()))
                return
            if result is not None:
                for piece in self._ending(chunks, result, sent, is_live):
                    yield piece
                return
            for choice in choices:
                text = self.wait.heard[choice]
                if is_live and len(text) > sent[choice]:
                    yield chunks.text(choice, text[sent[choice] :])
                    sent[choice] = len(text)
                    spoke_at = monotonic()
            left_s = self._left_s()
            if not left_s:
                await self._give_up(has_expired=True)
                yield event(error_body(timed_out()))
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, spoke_at + HEARTBEAT_S - monotonic())):
                    await self.wait.news()
            if monotonic() - spoke_at >= HEARTBEAT_S:
                yield HEARTBEAT
                spoke_at = monotonic()

    def _ending(self, chunks: Chunks, result: Answer, sent: list[int], is_live: bool) -> list[bytes]:
        """What is left to send once the answer is there."""
        try:
            answer = _good(result)
        except ApiError as error:
            return [event(error_body(error))]
        pieces: list[bytes] = []
        for choice, found in enumerate(answer["choices"]):
            text = found["text"] if self.endpoint is Endpoint.COMPLETIONS else found["message"]["content"]
            if not text.startswith(self.wait.heard[choice][: sent[choice]]):
                return [event(error_body(text_differs()))]
            if len(text) > sent[choice] or not is_live:
                pieces.append(chunks.text(choice, text[sent[choice] :], found["logprobs"]))
            pieces.append(chunks.finish(choice, found["finish_reason"]))
        if chunks.with_usage:
            pieces.append(chunks.usage(answer["usage"]))
        return [*pieces, DONE]


class _Stream(StreamingResponse):
    """A call's events. However the stream ends, begun or not, so does the wait."""

    def __init__(self, call: _Call) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(call.stream(), media_type="text/event-stream", headers=headers)
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._call.close()


async def _tell_of_leaving(receive: Receive, wait: Wait) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    wait.leave()


def _good(result: Answer) -> dict[str, Any]:
    """The response body of an answered request. Raises ApiError for one that was not."""
    _refuse_unexecuted(result)
    body: dict[str, Any] = json.loads(result.response or "{}")
    if result.status_code == 200:
        return body
    error = body["error"]
    raise ApiError(
        result.status_code or 500, error["message"], type=error["type"], code=error["code"], param=error["param"]
    )


def _refuse_unexecuted(result: Answer) -> None:
    """Raise ApiError for a request that came to no answer of its own: out of time, or cancelled by somebody else."""
    if result.error_code in TIMED_OUT:
        raise timed_out()
    if result.status_code is None:
        raise ApiError(
            503,
            "the request was cancelled before it was answered; send it again",
            type=SERVER_ERROR,
            code="request_cancelled",
            headers={"Retry-After": "1"},
        )


def timed_out() -> ApiError:
    return ApiError(
        504,
        "the request was not answered in the time that the gateway allows; send it again later, ask for fewer tokens, "
        "or raise PROMPTMILL_GATEWAY_REQUEST_TIMEOUT_S",
        type=SERVER_ERROR,
        code="request_timed_out",
        headers={"Retry-After": "1"},
    )


def text_differs() -> ApiError:
    """A second attempt, after a worker died, chose other words than were sent already."""
    return ApiError(
        500,
        "the answer had to be computed again and differs from what was sent; send the request again",
        type=SERVER_ERROR,
        code="stream_broken",
    )


def _device(gateway: Gateway, request_id: int) -> str | None:
    with gateway.database.read() as connection:
        return queries.device_of(connection, request_id)
