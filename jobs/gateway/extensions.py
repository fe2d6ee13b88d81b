"""What OpenAI's Batch API lacks: pause, resume, retry, urgency, results while running, tables, audit records.

Thin over `jobs/steering.py`, `jobs/export.py` and `jobs/audit.py`, with the same scoping as the standard routes.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse
from pydantic import Field
from starlette.background import BackgroundTask

from jobs import steering
from jobs.audit import AuditError, audit_request, describe
from jobs.export import ExportFormat, export_batch
from jobs.gateway.batches import (
    MAX_PRIORITY,
    RequestBody,
    find_own,
    parse_window,
    show_batch,
)
from jobs.gateway.bodies import WHOLE, describe_body, read_json
from jobs.gateway.errors import ApiError, not_found
from jobs.gateway.identity import KnownCaller
from jobs.gateway.schemas import BatchObject, RequestRecord, ResultPage, RetriedBatch
from jobs.gateway.state import Gateway, TheGateway
from jobs.keys import Caller
from jobs.results import render_result
from storage import queries
from storage.files import UPLOAD_BEGINS
from storage.queries import BatchRow

router = APIRouter(prefix="/v1", tags=["extensions"])

MAX_RESULTS = 1000
MAX_CURSOR = 2**63 - 1
# On Postgres two transactions may commit in another order than they took their numbers. Results so young are held back
# while the batch runs, so that none lands behind a reader's cursor: our transactions take milliseconds.
SETTLED_S = 2.0
MEDIA_TYPES = {
    ExportFormat.JSONL: "application/jsonl",
    ExportFormat.CSV: "text/csv; charset=utf-8",
    ExportFormat.PARQUET: "application/vnd.apache.parquet",
}


class ChangeBatch(RequestBody, json_schema_extra={"minProperties": 1}):
    """The body of POST /v1/batches/{id}: what is not given stays. deadline: Unix seconds; null takes it away."""

    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY), WHOLE] | None = None
    deadline: Annotated[int, Field(ge=0, le=steering.LAST_INSTANT), WHOLE] | None = None


@router.post("/batches/{batch_id}/pause", summary="Let nothing more of a batch begin", response_model=BatchObject)
def pause_batch(batch_id: str, gateway: TheGateway, caller: KnownCaller) -> dict[str, Any]:
    """What runs finishes. `promptmill.is_paused` says so; the status stays."""
    return _shown(gateway, steering.pause(gateway.database, _own(gateway, caller, batch_id)))


@router.post("/batches/{batch_id}/resume", summary="Let a paused batch go on", response_model=BatchObject)
def resume_batch(batch_id: str, gateway: TheGateway, caller: KnownCaller) -> dict[str, Any]:
    return _shown(gateway, steering.resume(gateway.database, _own(gateway, caller, batch_id)))


@router.post(
    "/batches/{batch_id}/retry", summary="Run an ended batch's failed lines again", response_model=RetriedBatch
)
def retry_batch(batch_id: str, gateway: TheGateway, caller: KnownCaller) -> dict[str, Any]:
    """Lines that failed, expired or were cancelled run once more, with a new completion window; lines that were refused
    as they stand do not. What is answered is kept."""
    batch = _own(gateway, caller, batch_id)
    window_s = parse_window(batch.completion_window) if batch.completion_window else None
    lines = steering.retry_failed(gateway.database, batch, window_s=window_s)
    return {"retried": lines, "batch": _shown(gateway, _own(gateway, caller, batch_id))}


@router.post(
    "/batches/{batch_id}",
    summary="Change a batch's priority or deadline",
    response_model=BatchObject,
    openapi_extra=describe_body(ChangeBatch),
)
async def change_batch(
    batch_id: str, http_request: Request, gateway: TheGateway, caller: KnownCaller
) -> dict[str, Any]:
    """It acts at once, also on what waits in the queue."""
    body = await read_json(http_request, ChangeBatch)
    return await run_in_threadpool(_change, gateway, caller, batch_id, body)


@router.get("/batches/{batch_id}/results", summary="Results as they land", response_model=ResultPage)
def list_results(
    batch_id: str,
    gateway: TheGateway,
    caller: KnownCaller,
    after: Annotated[int, Query(ge=0, le=MAX_CURSOR, description="The `cursor` of the page before.")] = 0,
    limit: Annotated[int, Query(ge=1, le=MAX_RESULTS)] = 100,
) -> dict[str, Any]:
    """Lines as the output and error files will have them. Ask again with the page's `cursor`, until `is_final` and an
    empty page."""
    with gateway.database.read() as connection:
        batch = find_own(connection, caller, batch_id)
        rows = queries.results_after(connection, batch.id, after, limit + 1)
    if not batch.is_final and not gateway.database.is_sqlite:
        settled_before = gateway.database.now() - SETTLED_S
        young = next((place for place, row in enumerate(rows) if row.finished_at > settled_before), len(rows))
        rows = rows[:young]
    page = rows[:limit]
    return {
        "object": "list",
        "data": [json.loads(render_result(row)) for row in page],
        "has_more": len(rows) > limit,
        "cursor": page[-1].result_id if page else after,
        "status": batch.status,
        "is_final": batch.is_final,
    }


@router.get(
    "/batches/{batch_id}/table",
    summary="A batch as a table",
    response_class=FileResponse,
    responses={
        200: {"description": "One row for each finished line.", "content": {kind: {} for kind in MEDIA_TYPES.values()}},
        206: {
            "description": "The range asked for, or several of them.",
            "content": {kind: {} for kind in (*MEDIA_TYPES.values(), "multipart/byteranges")},
        },
        416: {"description": "The range is beyond the end.", "content": {"text/plain": {}}},
    },
)
def get_table(
    batch_id: str,
    gateway: TheGateway,
    caller: KnownCaller,
    format: Annotated[ExportFormat, Query(description="Parquet needs pyarrow on the server.")] = ExportFormat.CSV,
) -> Response:
    """Answer, tokens, times, worker and outcome of each line that has ended, in input order."""
    batch = _own(gateway, caller, batch_id)
    # Swept up like an interrupted upload, should we end before it is sent.
    path = gateway.files_dir / f"{UPLOAD_BEGINS}table-{uuid.uuid4().hex}"
    try:
        export_batch(gateway.database, batch, path, format)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return FileResponse(
        path,
        media_type=MEDIA_TYPES[format],
        headers={"content-disposition": f'attachment; filename="{batch.public_id}.{format.value}"'},
        background=BackgroundTask(_remove, path),
    )


# A custom_id may have slashes.
@router.get("/requests/{request_id:path}", summary="All that is known of one line", response_model=RequestRecord)
def get_request(
    request_id: str,
    gateway: TheGateway,
    caller: KnownCaller,
    text: Annotated[bool, Query(description="Also the prompt and the answer.")] = False,
) -> dict[str, Any]:
    """The audit record: each attempt with its worker, parameters, tokens and times.

    `request_id` is the `id` of a result line (`batch_req_...`) or of an answer (`chatcmpl-...`, `cmpl-...`), or
    `BATCH:custom_id` with a batch's whole id.
    """
    batch_id, colon, custom_id = request_id.partition(":")
    if colon:
        _own(gateway, caller, batch_id)  # and so by its whole id: beginnings of ids are the command line's
        if "\0" in custom_id:
            raise not_found("request", request_id)
    try:
        found = audit_request(gateway.database, request_id, tenant=caller.tenant)
    except AuditError:
        raise not_found("request", request_id) from None
    described = describe(found, with_text=text)
    described.setdefault("body", None)
    described.setdefault("response", None)
    return described


def _own(gateway: Gateway, caller: Caller, batch_id: str) -> BatchRow:
    with gateway.database.read() as connection:
        return find_own(connection, caller, batch_id)


def _shown(gateway: Gateway, batch: BatchRow) -> dict[str, Any]:
    with gateway.database.read() as connection:
        return show_batch(gateway, connection, batch)


def _change(gateway: Gateway, caller: Caller, batch_id: str, body: ChangeBatch) -> dict[str, Any]:
    if not body.model_fields_set:
        raise ApiError(
            400, "nothing to change; give priority or deadline", code="missing_required_parameter", param="priority"
        )
    batch = _own(gateway, caller, batch_id)
    clears = "deadline" in body.model_fields_set and body.deadline is None
    now = gateway.database.now()
    if body.deadline is not None and not now < body.deadline <= now + steering.LONGEST_WINDOW_S:
        raise ApiError(
            400,
            f"deadline is {body.deadline}, which is not within {int(now)} to {int(now) + steering.LONGEST_WINDOW_S}; "
            "write Unix seconds to come",
            code="invalid_value",
            param="deadline",
        )
    changed = steering.set_urgency(
        gateway.database,
        batch,
        priority=body.priority,
        expires_at=None if body.deadline is None else float(body.deadline),
        clear_deadline=clears,
    )
    return _shown(gateway, changed)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
