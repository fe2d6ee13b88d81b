"""`/v1/batches`: create, get, list, cancel, as OpenAI's Batch API has them.

Creating only writes the batch; its file is read behind the call (`jobs/validation.py`), and what is wrong with it turns
the batch `failed`, so that clients which only poll hear of it.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import structlog
from fastapi import APIRouter, BackgroundTasks, Query, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from jobs import steering
from jobs.forecast import Forecast, forecast
from jobs.gateway.bodies import WHOLE, describe_body, read_json
from jobs.gateway.errors import ApiError, not_found
from jobs.gateway.files import LEAST_LIFETIME_S, LONGEST_LIFETIME_S, is_public_id, render_list
from jobs.gateway.idempotency import IDEMPOTENCY_KEY, idempotency_key_of
from jobs.gateway.identity import KnownCaller
from jobs.gateway.schemas import BatchList, BatchObject
from jobs.gateway.state import Gateway, TheGateway
from jobs.keys import Caller
from jobs.protocol import Metadata, dump_json, show
from jobs.quotas import check_running_batches
from jobs.submit import FOUND_AGAIN
from jobs.validation import InvalidLines, SubmitOptions
from storage import queries, transitions
from storage.database import Connection
from storage.errors import PromptmillError
from storage.files import find_upload
from storage.models import BatchStatus, Door, FilePurpose
from storage.queries import BatchRow, FileRow
from storage.transitions import NewBatch

router = APIRouter(prefix="/v1/batches", tags=["batches"])
log = structlog.get_logger(__name__)

MAX_PAGE = 100
# The same batch asked for again within this time, without a key that says otherwise, is a repeated call: SDKs repeat
# one whose answer was lost within seconds. Later it is a new batch, as with OpenAI.
SAME_BATCH_S = 60.0
MAX_ID_CHARACTERS = 64
# From a minute to steering.LONGEST_WINDOW_DAYS; the pattern is the whole rule.
WINDOW = "^(([6-9][0-9]|[1-9][0-9]{2,6})s|[1-9][0-9]{0,4}m|[1-9][0-9]{0,3}h|[1-9][0-9]{0,2}d)$"
MAX_PRIORITY = 1_000_000
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_CANCELLABLE = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)
_IS_CANCELLED = (BatchStatus.CANCELLING, BatchStatus.CANCELLED, BatchStatus.FINALIZING)


class RequestBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


def _without_nul(name: str) -> str:
    if "\0" in name:
        raise PydanticCustomError("invalid_type", "has a NUL character; remove it")
    return name


class OutputExpiresAfter(RequestBody):
    """When the output files expire, counted from their creation."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=LEAST_LIFETIME_S, le=LONGEST_LIFETIME_S), WHOLE]


class CreateBatch(RequestBody):
    """The body of POST /v1/batches. What OpenAI does not have: windows other than 24h, and all from `name` on."""

    input_file_id: Annotated[str, Field(max_length=MAX_ID_CHARACTERS)]
    endpoint: Literal["/v1/chat/completions", "/v1/completions"]
    completion_window: Annotated[str, Field(json_schema_extra={"pattern": WINDOW})]
    metadata: Metadata | None = None
    output_expires_after: OutputExpiresAfter | None = None

    name: Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_without_nul)] | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY), WHOLE] | None = None
    paused: bool | None = None
    invalid_lines: Literal["fail_batch", "fail_line"] | None = None
    refuse_impossible_deadline: bool | None = None


@router.post("", summary="Create a batch", response_model=BatchObject, openapi_extra=describe_body(CreateBatch))
async def create_batch(http_request: Request, gateway: TheGateway, caller: KnownCaller) -> dict[str, Any]:
    """It is `validating` until its file is read. The same call again within a minute, or with the same
    `Idempotency-Key` at any time, gives the same batch."""
    body = await read_json(http_request, CreateBatch)
    key = idempotency_key_of(http_request)
    created = await run_in_threadpool(_create, gateway, caller, body, key)
    http_request.app.state.validator.wake()
    return created


@router.get("", summary="List batches, the newest first", response_model=BatchList)
def list_batches(
    gateway: TheGateway,
    caller: KnownCaller,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 20,
    after: Annotated[str | None, Query(description="The id of the last batch of the page before.")] = None,
) -> dict[str, Any]:
    with gateway.database.read() as connection:
        behind = None if after is None else find_own(connection, caller, after).id
        found = queries.list_batches(connection, limit + 1, behind, tenant=caller.tenant, with_interactive=False)
        data = render_batches(connection, found[:limit], gateway.database.now())
    return render_list(data, has_more=len(found) > limit)


@router.get("/{batch_id}", summary="Get a batch", response_model=BatchObject)
def get_batch(batch_id: str, gateway: TheGateway, caller: KnownCaller) -> dict[str, Any]:
    with gateway.database.read() as connection:
        return show_batch(gateway, connection, find_own(connection, caller, batch_id))


@router.post("/{batch_id}/cancel", summary="Cancel a batch", response_model=BatchObject)
def cancel_batch(
    batch_id: str, gateway: TheGateway, caller: KnownCaller, background: BackgroundTasks
) -> dict[str, Any]:
    """What is finished is kept; the batch is `cancelled` within seconds. Cancelling it again changes nothing."""
    with gateway.database.read() as connection:
        batch = find_own(connection, caller, batch_id)
    if batch.status in _CANCELLABLE:
        try:
            batch = steering.begin_cancel(gateway.database, batch)
            background.add_task(_finish_cancel, gateway, batch)
        except steering.SteeringError:  # it has come to its end at this very moment
            with gateway.database.read() as connection:
                batch = find_own(connection, caller, batch_id)
    if batch.status not in _IS_CANCELLED:
        raise steering.cannot_cancel(batch)
    with gateway.database.read() as connection:
        return show_batch(gateway, connection, batch)


# --- what the extensions use too ---------------------------------------------------------------------------------


def find_own(connection: Connection, caller: Caller, public_id: str) -> BatchRow:
    """A tenant's batch. Raises ApiError 404, for another's too."""
    batch = queries.find_batch(connection, public_id) if is_public_id(public_id) else None
    if batch is None or batch.tenant != caller.tenant or batch.is_interactive:
        raise not_found("batch", public_id)
    return batch


def show_batch(gateway: Gateway, connection: Connection, batch: BatchRow) -> dict[str, Any]:
    """The object of one batch, as it was read."""
    (shown,) = render_batches(connection, [batch], gateway.database.now())
    return shown


def render_batches(connection: Connection, batches: Sequence[BatchRow], now: float) -> list[dict[str, Any]]:
    """The objects of several batches."""
    ids = {each for batch in batches for each in (batch.output_file_id, batch.error_file_id) if each is not None}
    file_ids = queries.file_public_ids(connection, ids) if ids else {}
    return [render_batch(batch, file_ids, forecast(connection, batch, now)) for batch in batches]


def render_batch(row: BatchRow, file_ids: Mapping[int, str], expected: Forecast | None) -> dict[str, Any]:
    """The batch object, with every field of OpenAI's; what is absent is null. file_ids: row ids -> public ids."""
    is_validating = row.status is BatchStatus.VALIDATING
    return {
        "id": row.public_id,
        "object": "batch",
        "endpoint": row.endpoint,
        "model": row.model or None,
        "errors": _errors(row),
        "input_file_id": row.input_file_public_id,
        "completion_window": row.completion_window,
        "status": row.status,
        "output_file_id": file_ids.get(row.output_file_id or 0),
        "error_file_id": file_ids.get(row.error_file_id or 0),
        "created_at": int(row.created_at),
        "in_progress_at": _instant(row.in_progress_at),
        "expires_at": _instant(row.expires_at),
        "finalizing_at": _instant(row.finalizing_at),
        "completed_at": _instant(row.completed_at),
        "failed_at": _instant(row.failed_at),
        # Set as soon as the deadline has passed; for the API it has expired when its files are there.
        "expired_at": _instant(row.expired_at) if row.status is BatchStatus.EXPIRED else None,
        "cancelling_at": _instant(row.cancelling_at),
        "cancelled_at": _instant(row.cancelled_at),
        "request_counts": {
            "total": 0 if is_validating else row.total_requests,
            "completed": 0 if is_validating else row.completed_requests,
            "failed": 0 if is_validating else row.failed_requests,
        },
        "usage": {
            "input_tokens": row.prompt_tokens,
            "input_tokens_details": {"cached_tokens": row.cached_tokens},
            "output_tokens": row.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": row.prompt_tokens + row.completion_tokens,
        },
        "metadata": json.loads(row.metadata) if row.metadata else None,
        "promptmill": {
            "name": row.name,
            "priority": row.priority,
            "is_paused": row.paused_at is not None,
            "invalid_lines": SubmitOptions.from_json(row.submit_options).invalid_lines,
            "door": row.door,
            "forecast": None if expected is None else _forecast(expected),
        },
    }


def parse_window(text: str) -> float:
    """A completion window in seconds. Raises ApiError."""
    if re.fullmatch(WINDOW, text) is None:
        raise ApiError(
            400,
            f'completion_window is {show(text)}; write "24h", or another one ("90m", "7d"), from "60s" to '
            f'"{steering.LONGEST_WINDOW_DAYS}d"',
            code="invalid_value",
            param="completion_window",
        )
    return float(text[:-1]) * _UNITS_S[text[-1]]


def _errors(row: BatchRow) -> dict[str, Any] | None:
    if row.errors:
        return {"object": "list", "data": json.loads(row.errors)}
    if row.error_code is None:
        return None
    entry = {"code": row.error_code, "message": row.error_message or "", "param": None, "line": None}
    return {"object": "list", "data": [entry]}


def _forecast(expected: Forecast) -> dict[str, Any]:
    return {
        "requests_per_s": _rounded(expected.requests_per_s),
        "remaining_s": _rounded(expected.remaining_s),
        "completes_at": _instant(expected.completes_at),
        "total_tokens": expected.total_tokens,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _instant(at: float | None) -> int | None:
    at = steering.finite(at)
    return None if at is None else int(at)


# --- creating ----------------------------------------------------------------------------------------------------


def _create(gateway: Gateway, caller: Caller, body: CreateBatch, key: str | None) -> dict[str, Any]:
    window_s = parse_window(body.completion_window)
    options = SubmitOptions(
        invalid_lines=InvalidLines(body.invalid_lines or InvalidLines.FAIL_BATCH),
        refuse_impossible_deadline=body.refuse_impossible_deadline,
    )
    meaning = body.model_dump(mode="json", exclude_none=True) | {"door": Door.HTTP.value}
    fingerprint = hashlib.sha256(json.dumps(meaning, sort_keys=True).encode()).hexdigest()
    default_lifetime_s = gateway.settings.gateway.file_lifetime_s or None
    database = gateway.database

    def create(connection: Connection) -> dict[str, Any]:
        now = database.now()
        transitions.lock_tenant(connection, caller.tenant)
        repeated = _find_repeated(connection, caller, fingerprint, key, now)
        if repeated is not None:
            return show_batch(gateway, connection, repeated)
        check_running_batches(connection, caller.tenant)
        _input_file(connection, caller, body.input_file_id)
        new = NewBatch(
            public_id=f"batch_{uuid.uuid4().hex}",
            fingerprint=fingerprint,
            endpoint=body.endpoint,
            model="",  # its lines say it
            tenant=caller.tenant,
            name=body.name,
            priority=body.priority or 0,
            metadata=None if body.metadata is None else dump_json(body.metadata),
            expires_at=now + window_s,
            idempotency_key=key,
            door=Door.HTTP,
            api_key_id=caller.api_key_id,
            input_file_public_id=body.input_file_id,
            completion_window=body.completion_window,
            output_expires_after_s=(
                default_lifetime_s if body.output_expires_after is None else float(body.output_expires_after.seconds)
            ),
            submit_options=options.to_json(),
            paused_at=now if body.paused else None,
        )
        made = queries.find_batch_by_id(connection, transitions.create_batch(connection, new, now))
        assert made is not None, "it is there since the line above"
        return show_batch(gateway, connection, made)  # as it begins, however soon it is validated

    return database.retry(create)


def _finish_cancel(gateway: Gateway, batch: BatchRow) -> None:
    """After the answer. What cannot be done now, the periodic pass does."""
    try:
        steering.finish_cancel(gateway.database, batch, gateway.files_dir)
    except PromptmillError as error:
        log.warning("cancel_left_to_sweep", batch=batch.public_id, code=error.code)


def _find_repeated(
    connection: Connection, caller: Caller, fingerprint: str, key: str | None, now: float
) -> BatchRow | None:
    """The batch that the same call has made before. Raises ApiError when its key stands for another one."""
    if key is None:
        batch = queries.find_batch_by_fingerprint(connection, fingerprint, caller.tenant, since=now - SAME_BATCH_S)
        return batch if batch is not None and batch.status in FOUND_AGAIN else None
    batch = queries.find_batch_by_idempotency_key(connection, key, caller.tenant)
    if batch is not None and batch.fingerprint != fingerprint:
        raise ApiError(
            400,
            f"the Idempotency-Key {show(key)} was given before with another body; give each batch a key of its own",
            code="idempotency_key_reused",
            param=IDEMPOTENCY_KEY,
        )
    return batch


def _input_file(connection: Connection, caller: Caller, public_id: str) -> FileRow:
    row = find_upload(connection, caller.tenant, public_id) if is_public_id(public_id) else None
    if row is None:
        raise ApiError(
            404, f"there is no file {show(public_id)}; upload it first", code="file_not_found", param="input_file_id"
        )
    if row.purpose != FilePurpose.BATCH:
        raise ApiError(
            400,
            f'file {public_id} has the purpose batch_output; upload input with the purpose "batch"',
            code="invalid_value",
            param="input_file_id",
        )
    return row
