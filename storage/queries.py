"""Every read: progress, latencies, results in input order or as they land, what dispatch and sweep look for.

Each function takes a connection inside `database.read()` (or a write transaction). What may be a million rows comes
in pages, each a short read of its own, so that memory and SQLite's log stay small: those functions take the database.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import Connection, and_, bindparam, func, or_, select

from storage.bulk import one_of
from storage.database import Database
from storage.models import (
    ANSWERS,
    API_KEYS,
    ATTEMPTS,
    BATCHES,
    FILES,
    FINAL_REQUEST_STATUSES,
    PREFIXES,
    REQUESTS,
    RESULTS,
    TENANTS,
    WORKERS,
    AttemptOutcome,
    BatchStatus,
    Door,
    RequestStatus,
    ServedFrom,
    WorkerStatus,
)
from storage.transitions import (
    IS_AT_WORK,
    IS_ENDING,
    IS_FINISHABLE,
    OPEN_BATCH,
    PENDING_DELAYED,
    PENDING_FRESH,
    PENDING_KINDS,
    PENDING_SAME,
    has_open_requests,
    spelled,
)

# Rows read at once where a whole batch is walked through: a few MB of answers.
PAGE_ROWS = 1000
# A worker beats every few seconds; one not seen for this long is taken for dead.
WORKER_SEEN_S = 60.0


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One batch with its counters; the columns of `storage.models.BATCHES`."""

    id: int
    public_id: str
    tenant: str
    name: str | None
    fingerprint: str
    endpoint: str
    model: str
    status: BatchStatus
    priority: int
    metadata: str | None
    error_code: str | None
    error_message: str | None
    total_requests: int
    completed_requests: int
    failed_requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    created_at: float
    in_progress_at: float | None
    finalizing_at: float | None
    completed_at: float | None
    failed_at: float | None
    expires_at: float | None
    expired_at: float | None
    cancelling_at: float | None
    cancelled_at: float | None
    idempotency_key: str | None = None
    artifact_digest: str | None = None
    is_interactive: bool = False
    paused_at: float | None = None
    retried_at: float | None = None
    text_purged_at: float | None = None
    rows_purged_at: float | None = None
    output_file_id: int | None = None
    error_file_id: int | None = None
    errors: str | None = None
    door: str = Door.CLI.value
    api_key_id: int | None = None
    reply_to: str | None = None
    input_file_public_id: str | None = None
    completion_window: str | None = None
    output_expires_after_s: float | None = None
    submit_options: str | None = None
    validated_by: str | None = None
    validation_lease_expires_at: float | None = None
    estimated_prompt_tokens: int = 0
    runs_early: bool = False
    retry_from_line: int | None = None

    @property
    def remaining_requests(self) -> int:
        """Requests that have no result yet, while the batch is in progress."""
        return self.total_requests - self.completed_requests - self.failed_requests

    @property
    def is_final(self) -> bool:
        return self.status in (BatchStatus.COMPLETED, BatchStatus.FAILED, BatchStatus.EXPIRED, BatchStatus.CANCELLED)


@dataclass(frozen=True, slots=True)
class ResultRow:
    """A line and its answer. result_id: the cursor for `results_after`. status_code None: never executed."""

    result_id: int
    request_id: int
    line: int
    custom_id: str | None
    status: RequestStatus
    status_code: int | None
    response: str | None
    error_code: str | None
    error_message: str | None
    finished_at: float


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of one measure, in seconds, over the attempts that have it; exact values, not estimates."""

    count: int
    p50: float
    p90: float
    p95: float
    p99: float
    maximum: float


@dataclass(frozen=True, slots=True)
class FailureCount:
    code: str
    count: int
    example_line: int
    example_message: str | None


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """A request that may be queued. isolation: at most so many may travel with it, itself included."""

    id: int
    line: int
    prefix_id: int | None
    estimated_tokens: int = 0
    isolation: int | None = None


@dataclass(frozen=True, slots=True)
class StalledRequest:
    """A request that waits for its message. is_pending: it has none; else it may have one."""

    id: int
    model: str
    is_pending: bool


@dataclass(frozen=True, slots=True)
class TenantRow:
    name: str
    weight: float
    share_used: float
    max_requests_per_minute: int | None = None
    max_queued_prompt_tokens: int | None = None
    max_running_batches: int | None = None
    max_storage_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """What a tenant holds right now. queued_prompt_tokens: estimated from lengths, of requests without an answer.

    running_batches: those that have not ended, single requests apart. storage_bytes: uploaded and result files.
    """

    queued_prompt_tokens: int
    running_batches: int
    storage_bytes: int


@dataclass(frozen=True, slots=True)
class ApiKeyRow:
    """A key; the columns of `storage.models.API_KEYS`."""

    id: int
    public_id: str
    tenant: str
    name: str
    sha256: str
    shown_prefix: str
    created_at: float
    expires_at: float | None
    revoked_at: float | None
    last_used_at: float | None


@dataclass(frozen=True, slots=True)
class FileRow:
    """A file; the columns of `storage.models.FILES`. path: relative to the files folder."""

    id: int
    public_id: str
    tenant: str
    purpose: str
    filename: str
    path: str
    bytes: int
    lines: int
    created_at: float
    sha256: str | None = None
    expires_at: float | None = None
    api_key_id: int | None = None


class StoredRequest(NamedTuple):
    """A line as it was stored. body: in its normal form, without the prefix; None: refused on arrival, or purged."""

    line: int
    custom_id: str | None
    body: str | None
    prefix: str


@dataclass(frozen=True, slots=True)
class AnsweredRequest:
    """A request of a job that has its answer: what it takes to give the same answer to the same question again."""

    id: int
    custom_id: str
    question_hash: int


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """An answer kept for identical requests: the result of `request_id`, and what its attempt said."""

    key: str
    request_id: int
    response: str
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None


@dataclass(frozen=True, slots=True)
class WorkerRow:
    name: str
    host: str
    pid: int
    status: WorkerStatus
    model: str
    artifact_digest: str | None
    device: str | None
    max_batch_size: int
    detail: str | None
    started_at: float
    ready_at: float | None
    last_seen_at: float
    stopped_at: float | None
    exit_code: int | None = None
    device_detail: dict[str, Any] | None = None
    requests_per_s: float = 0.0

    @property
    def place(self) -> str:
        """Where it runs, as its successor will: gpu0@host."""
        return f"{self.device}@{self.host}"


@dataclass(frozen=True, slots=True)
class RecentWork:
    """Requests that were answered lately, and when the first of them was."""

    requests: int
    first_at: float | None


@dataclass(frozen=True, slots=True)
class Throughput:
    """What ended between two instants."""

    requests: int
    prompt_tokens: int
    completion_tokens: int
    seconds: float


# --- batches -----------------------------------------------------------------------------------------------------


def find_batch(connection: Connection, public_id: str) -> BatchRow | None:
    """The batch of that public id."""
    return _batch(connection.execute(select(BATCHES).where(BATCHES.c.public_id == public_id)).first())


def find_batch_by_id(connection: Connection, batch_id: int) -> BatchRow | None:
    """The batch of that row id; also the progress of a running batch: its counters are kept up to date."""
    return _batch(connection.execute(select(BATCHES).where(BATCHES.c.id == batch_id)).first())


def find_batch_by_fingerprint(
    connection: Connection, fingerprint: str, tenant: str = "default", *, since: float = 0.0, name: str | None = None
) -> BatchRow | None:
    """The newest batch of that fingerprint, made since an instant, whatever its status. name: None for any."""
    statement = select(BATCHES).where(
        BATCHES.c.tenant == tenant, BATCHES.c.fingerprint == fingerprint, BATCHES.c.created_at >= since
    )
    if name is not None:
        statement = statement.where(BATCHES.c.name == name)
    return _batch(connection.execute(statement.order_by(BATCHES.c.id.desc()).limit(1)).first())


def find_batch_by_idempotency_key(connection: Connection, key: str, tenant: str = "default") -> BatchRow | None:
    """The batch that was submitted under that key."""
    return _batch(
        connection.execute(select(BATCHES).where(BATCHES.c.tenant == tenant, BATCHES.c.idempotency_key == key)).first()
    )


def batches_of_job(connection: Connection, name: str, tenant: str = "default") -> list[BatchRow]:
    """The batches of that name, the newest first."""
    rows = connection.execute(
        select(BATCHES).where(BATCHES.c.tenant == tenant, BATCHES.c.name == name).order_by(BATCHES.c.id.desc())
    )
    return [BatchRow(**_batch_values(row)) for row in rows]


def requests_in_order(database: Database, batch_id: int) -> Iterator[StoredRequest]:
    """All requests of a batch in input order, page by page, whether they have a result or not."""
    after = 0
    while True:
        with database.read() as connection:
            rows = connection.execute(
                select(REQUESTS.c.line, REQUESTS.c.custom_id, REQUESTS.c.body, REQUESTS.c.prefix_id)
                .where(REQUESTS.c.batch_id == batch_id, REQUESTS.c.line > after)
                .order_by(REQUESTS.c.line)
                .limit(PAGE_ROWS)
            ).all()
            prefixes = prefix_texts(connection, {row.prefix_id for row in rows if row.prefix_id is not None})
        if not rows:
            return
        yield from (StoredRequest(row.line, row.custom_id, row.body, prefixes.get(row.prefix_id, "")) for row in rows)
        after = rows[-1].line


def answered_requests(database: Database, batch_id: int) -> Iterator[AnsweredRequest]:
    """The requests of a batch that have an answer, in input order, page by page."""
    after = 0
    while True:
        with database.read() as connection:
            rows = connection.execute(
                select(
                    REQUESTS.c.id, REQUESTS.c.line, REQUESTS.c.custom_id, REQUESTS.c.question_hash, REQUESTS.c.status
                )
                .where(REQUESTS.c.batch_id == batch_id, REQUESTS.c.line > after)
                .order_by(REQUESTS.c.line)
                .limit(PAGE_ROWS * 10)
            ).all()
        if not rows:
            return
        yield from (
            AnsweredRequest(row.id, row.custom_id, row.question_hash)
            for row in rows
            if row.status == RequestStatus.COMPLETED and row.custom_id is not None and row.question_hash is not None
        )
        after = rows[-1].line


def find_file(connection: Connection, file_id: int) -> FileRow | None:
    """The file of that row id, such as a batch's `output_file_id`."""
    row = connection.execute(select(FILES).where(FILES.c.id == file_id)).first()
    return None if row is None else FileRow(**row._mapping)


def file_public_ids(connection: Connection, file_ids: Collection[int]) -> dict[int, str]:
    """Files' row ids -> the ids that users know."""
    rows = connection.execute(select(FILES.c.id, FILES.c.public_id).where(FILES.c.id.in_(sorted(file_ids))))
    return {row.id: row.public_id for row in rows}


def tenants(connection: Connection) -> dict[str, TenantRow]:
    """All tenants by name."""
    return {row.name: TenantRow(**row._mapping) for row in connection.execute(select(TENANTS))}


def find_tenant(connection: Connection, name: str) -> TenantRow | None:
    row = connection.execute(select(TENANTS).where(TENANTS.c.name == name)).first()
    return None if row is None else TenantRow(**row._mapping)


def tenant_usage(connection: Connection, tenant: str) -> TenantUsage:
    """What a tenant holds of what its quotas bound."""
    batches, files = running_batches(connection, tenant), stored_bytes(connection, tenant)
    return TenantUsage(queued_prompt_tokens(connection, tenant), batches, files)


def queued_prompt_tokens(connection: Connection, tenant: str, *, up_to_batch_id: int | None = None) -> int:
    """Estimated prompt tokens of a tenant's requests that have no answer. up_to_batch_id: of batches made until then,
    so that of two that arrive together the first is let in."""
    left = BATCHES.c.total_requests - BATCHES.c.completed_requests - BATCHES.c.failed_requests
    tokens = BATCHES.c.estimated_prompt_tokens * 1.0 * left / func.nullif(BATCHES.c.total_requests, 0)
    statement = select(func.sum(tokens)).where(OPEN_BATCH, BATCHES.c.tenant == tenant)
    if up_to_batch_id is not None:
        statement = statement.where(BATCHES.c.id <= up_to_batch_id)
    return round(connection.execute(statement).scalar_one() or 0)


def running_batches(connection: Connection, tenant: str) -> int:
    """Batches of a tenant that have not ended, single requests apart."""
    counted = select(func.count()).where(OPEN_BATCH, BATCHES.c.tenant == tenant, BATCHES.c.is_interactive.is_(False))
    return int(connection.execute(counted).scalar_one())


def stored_bytes(connection: Connection, tenant: str) -> int:
    """Bytes of a tenant's files."""
    return int(connection.execute(select(func.sum(FILES.c.bytes)).where(FILES.c.tenant == tenant)).scalar_one() or 0)


def find_api_key(connection: Connection, sha256: str) -> ApiKeyRow | None:
    """The key with that digest, whatever its state."""
    row = connection.execute(select(API_KEYS).where(API_KEYS.c.sha256 == sha256)).first()
    return None if row is None else ApiKeyRow(**row._mapping)


def find_api_key_by_id(connection: Connection, key_id: int) -> ApiKeyRow | None:
    row = connection.execute(select(API_KEYS).where(API_KEYS.c.id == key_id)).first()
    return None if row is None else ApiKeyRow(**row._mapping)


def list_api_keys(connection: Connection, tenant: str | None = None) -> list[ApiKeyRow]:
    """Keys in the order in which they were made. tenant: only of that one."""
    statement = select(API_KEYS).order_by(API_KEYS.c.id)
    if tenant is not None:
        statement = statement.where(API_KEYS.c.tenant == tenant)
    return [ApiKeyRow(**row._mapping) for row in connection.execute(statement)]


def stored_answers(connection: Connection, keys: Collection[str]) -> dict[str, StoredAnswer]:
    """Of these keys, those that have an answer that can be given again."""
    rows = connection.execute(
        select(
            ANSWERS.c.key,
            ANSWERS.c.request_id,
            RESULTS.c.response,
            ATTEMPTS.c.finish_reason,
            ATTEMPTS.c.prompt_tokens,
            ATTEMPTS.c.completion_tokens,
        )
        .join_from(ANSWERS, RESULTS, RESULTS.c.request_id == ANSWERS.c.request_id)
        .join(
            ATTEMPTS,
            and_(ATTEMPTS.c.request_id == ANSWERS.c.request_id, ATTEMPTS.c.outcome == AttemptOutcome.COMPLETED.value),
        )
        .where(ANSWERS.c.key.in_(sorted(keys)), RESULTS.c.status_code == 200, RESULTS.c.response.is_not(None))
    )
    return {row.key: StoredAnswer(**row._mapping) for row in rows}


def list_batches(
    connection: Connection,
    limit: int = 50,
    before_id: int | None = None,
    *,
    tenant: str | None = None,
    with_interactive: bool = True,
) -> list[BatchRow]:
    """Batches, the newest first. tenant: only of that one. with_interactive: single calls too, and replays."""
    statement = select(BATCHES).order_by(BATCHES.c.id.desc()).limit(limit)
    if tenant is not None:
        statement = statement.where(BATCHES.c.tenant == tenant)
    if not with_interactive:
        statement = statement.where(BATCHES.c.is_interactive.is_(False))
    if before_id is not None:
        statement = statement.where(BATCHES.c.id < before_id)
    return [BatchRow(**_batch_values(row)) for row in connection.execute(statement)]


def open_batches(connection: Connection, status: BatchStatus) -> list[BatchRow]:
    """Batches that stand at an unfinished status, the most urgent first."""
    statement = select(BATCHES).where(OPEN_BATCH, BATCHES.c.status == status.value)
    rows = connection.execute(statement.order_by(BATCHES.c.priority.desc(), BATCHES.c.id))
    return [BatchRow(**_batch_values(row)) for row in rows]


def count_requests(connection: Connection, batch_id: int) -> dict[RequestStatus, int]:
    """Requests of a batch by status, counted row by row: for checks and details, not for progress."""
    rows = connection.execute(
        select(REQUESTS.c.status, func.count()).where(REQUESTS.c.batch_id == batch_id).group_by(REQUESTS.c.status)
    )
    return {RequestStatus(status): count for status, count in rows}


def last_submitted_line(connection: Connection, batch_id: int) -> int:
    """The highest line that is written; 0 for none. An interrupted submission goes on after it."""
    line = connection.execute(select(func.max(REQUESTS.c.line)).where(REQUESTS.c.batch_id == batch_id)).scalar_one()
    return int(line or 0)


def request_ids(connection: Connection, batch_id: int) -> list[int]:
    """The requests of a small batch, in input order."""
    return list(
        connection.execute(
            select(REQUESTS.c.id).where(REQUESTS.c.batch_id == batch_id).order_by(REQUESTS.c.line)
        ).scalars()
    )


def submitted_custom_ids(database: Database, batch_id: int) -> Iterator[str]:
    """The custom ids written so far, in input order."""
    after = 0
    while True:
        with database.read() as connection:
            rows = connection.execute(
                select(REQUESTS.c.line, REQUESTS.c.custom_id)
                .where(REQUESTS.c.batch_id == batch_id, REQUESTS.c.line > after)
                .order_by(REQUESTS.c.line)
                .limit(PAGE_ROWS * 10)
            ).all()
        if not rows:
            return
        yield from (row.custom_id for row in rows if row.custom_id is not None)
        after = rows[-1].line


def prefix_texts(connection: Connection, prefix_ids: Collection[int]) -> dict[int, str]:
    """Prefix ids -> texts."""
    rows = connection.execute(select(PREFIXES.c.id, PREFIXES.c.text).where(PREFIXES.c.id.in_(sorted(prefix_ids))))
    return {row.id: row.text for row in rows}


def has_unclaimed_validation(connection: Connection, now: float, *, besides: Collection[int] = ()) -> bool:
    """Whether a batch, besides these, waits for somebody to read its input file."""
    waiting = select(BATCHES.c.id).where(
        BATCHES.c.id.not_in(sorted(besides)),
        OPEN_BATCH,
        BATCHES.c.status == BatchStatus.VALIDATING.value,
        BATCHES.c.input_file_public_id.is_not(None),
        or_(BATCHES.c.validation_lease_expires_at.is_(None), BATCHES.c.validation_lease_expires_at < now),
    )
    return connection.execute(waiting.limit(1)).first() is not None


def recent_work(
    connection: Connection, *, since: float, model: str | None = None, batch_id: int | None = None, limit: int = 1000
) -> RecentWork:
    """The newest results, at most `limit` and none from before an instant: of one batch, or of a model's batches."""
    newest = select(RESULTS.c.request_id, RESULTS.c.batch_id, RESULTS.c.finished_at).order_by(RESULTS.c.id.desc())
    if batch_id is not None:
        newest = newest.where(RESULTS.c.batch_id == batch_id)
    recent = newest.limit(limit).subquery()
    statement = (
        select(func.count(), func.min(recent.c.finished_at))
        .select_from(recent)
        .join(
            ATTEMPTS,
            and_(ATTEMPTS.c.request_id == recent.c.request_id, ATTEMPTS.c.outcome == AttemptOutcome.COMPLETED.value),
        )
        .where(recent.c.finished_at >= since)
    )
    if model is not None:
        statement = statement.join(BATCHES, BATCHES.c.id == recent.c.batch_id).where(BATCHES.c.model == model)
    row = connection.execute(statement).one()
    return RecentWork(int(row[0]), row[1])


# --- results -----------------------------------------------------------------------------------------------------

_RESULT_COLUMNS = (
    RESULTS.c.id.label("result_id"),
    REQUESTS.c.id.label("request_id"),
    REQUESTS.c.line,
    REQUESTS.c.custom_id,
    REQUESTS.c.status,
    RESULTS.c.status_code,
    RESULTS.c.response,
    RESULTS.c.error_code,
    RESULTS.c.error_message,
    RESULTS.c.finished_at,
)


def results_in_order(database: Database, batch_id: int, *, page_rows: int = PAGE_ROWS) -> Iterator[ResultRow]:
    """All results of a batch in input order, page by page."""
    after = 0
    while True:
        with database.read() as connection:
            rows = connection.execute(
                select(*_RESULT_COLUMNS)
                .join_from(REQUESTS, RESULTS, RESULTS.c.request_id == REQUESTS.c.id)
                .where(REQUESTS.c.batch_id == batch_id, REQUESTS.c.line > after)
                .order_by(REQUESTS.c.line)
                .limit(page_rows)
            ).all()
        if not rows:
            return
        yield from (_result(row) for row in rows)
        after = rows[-1].line


def results_after(connection: Connection, batch_id: int, result_id: int, limit: int = PAGE_ROWS) -> list[ResultRow]:
    """Results of a batch that landed after a cursor (0: from the first), in the order they landed.

    On Postgres two transactions may commit in another order than they took their ids; a follower that must see each one
    reads `results_in_order` when the batch has ended.
    """
    rows = connection.execute(
        select(*_RESULT_COLUMNS)
        .join_from(RESULTS, REQUESTS, RESULTS.c.request_id == REQUESTS.c.id)
        .where(RESULTS.c.batch_id == batch_id, RESULTS.c.id > result_id)
        .order_by(RESULTS.c.id)
        .limit(limit)
    )
    return [_result(row) for row in rows]


def results_of(connection: Connection, request_ids: Collection[int]) -> list[ResultRow]:
    """The results of these requests, as far as there are any."""
    return [_result(row) for row in connection.execute(_RESULTS_OF, {"ids": sorted(request_ids)})]


_RESULTS_OF = (
    select(*_RESULT_COLUMNS)
    .join_from(RESULTS, REQUESTS, RESULTS.c.request_id == REQUESTS.c.id)
    .where(one_of(RESULTS.c.request_id, "ids"), REQUESTS.c.status.in_([spelled(s) for s in FINAL_REQUEST_STATUSES]))
)


def device_of(connection: Connection, request_id: int) -> str | None:
    """Where the answer to a request was computed."""
    return connection.execute(
        select(ATTEMPTS.c.device)
        .where(ATTEMPTS.c.request_id == request_id, ATTEMPTS.c.outcome == AttemptOutcome.COMPLETED.value)
        .order_by(ATTEMPTS.c.id.desc())
        .limit(1)
    ).scalar_one_or_none()


def failures_by_code(connection: Connection, batch_id: int) -> list[FailureCount]:
    """Lines without an answer by error code, the most frequent first, each with its first line as an example."""
    rows = connection.execute(
        select(RESULTS.c.error_code, func.count().label("lines"), func.min(RESULTS.c.request_id).label("example_id"))
        .where(RESULTS.c.batch_id == batch_id, RESULTS.c.error_code.is_not(None))
        .group_by(RESULTS.c.error_code)
        .order_by(func.count().desc(), RESULTS.c.error_code)
    ).all()
    examples = {
        row.id: row
        for row in connection.execute(
            select(REQUESTS.c.id, REQUESTS.c.line, RESULTS.c.error_message)
            .join_from(REQUESTS, RESULTS, RESULTS.c.request_id == REQUESTS.c.id)
            .where(REQUESTS.c.id.in_([row.example_id for row in rows]))
        )
    }
    return [
        FailureCount(
            code=row.error_code,
            count=row.lines,
            example_line=examples[row.example_id].line,
            example_message=examples[row.example_id].error_message,
        )
        for row in rows
    ]


def latency_percentiles(
    connection: Connection,
    batch_id: int,
    measures: Sequence[str] = ("queue_s", "time_to_first_token_s", "total_s"),
) -> dict[str, Percentiles]:
    """Exact percentiles (nearest rank) over a batch's completed attempts; a measure that none has is left out."""
    values = [array("d") for _ in measures]
    rows = connection.execution_options(yield_per=5000).execute(
        select(*(ATTEMPTS.c[measure] for measure in measures))
        .join_from(REQUESTS, ATTEMPTS, ATTEMPTS.c.request_id == REQUESTS.c.id)
        .where(REQUESTS.c.batch_id == batch_id, ATTEMPTS.c.outcome == AttemptOutcome.COMPLETED.value)
    )
    for row in rows:
        for measured, value in zip(values, row, strict=True):
            if value is not None:
                measured.append(value)
    return {
        measure: _percentiles(sorted(measured)) for measure, measured in zip(measures, values, strict=True) if measured
    }


def served_counts(connection: Connection, batch_id: int) -> dict[ServedFrom, int]:
    """How many answers of a batch were not computed for it, by where they came from."""
    rows = connection.execute(
        select(ATTEMPTS.c.served_from, func.count())
        .join_from(REQUESTS, ATTEMPTS, ATTEMPTS.c.request_id == REQUESTS.c.id)
        .where(
            REQUESTS.c.batch_id == batch_id,
            ATTEMPTS.c.outcome == AttemptOutcome.COMPLETED.value,
            ATTEMPTS.c.served_from.is_not(None),
        )
        .group_by(ATTEMPTS.c.served_from)
    )
    return {ServedFrom(served_from): count for served_from, count in rows}


def worked_s(connection: Connection, batch_id: int, *, longest_pause_s: float) -> float:
    """How long workers were at a batch: from each claim to the end of its attempt, what overlaps counted once, and
    pauses between them up to a bound counted in."""
    rows = connection.execution_options(yield_per=5000).execute(
        select(ATTEMPTS.c.claimed_at, ATTEMPTS.c.finished_at)
        .join_from(REQUESTS, ATTEMPTS, ATTEMPTS.c.request_id == REQUESTS.c.id)
        .where(REQUESTS.c.batch_id == batch_id, ATTEMPTS.c.claimed_at.is_not(None))
        .order_by(ATTEMPTS.c.claimed_at)
    )
    total, began_at, ended_at = 0.0, None, 0.0
    for claimed_at, finished_at in rows:
        if began_at is None or claimed_at > ended_at + longest_pause_s:
            total += 0.0 if began_at is None else ended_at - began_at
            began_at, ended_at = claimed_at, finished_at
        ended_at = max(ended_at, finished_at)
    return total if began_at is None else total + ended_at - began_at


def _percentiles(ranked: Sequence[float]) -> Percentiles:
    count = len(ranked)
    p50, p90, p95, p99 = (ranked[-(-count * percent // 100) - 1] for percent in (50, 90, 95, 99))
    return Percentiles(count, p50, p90, p95, p99, ranked[-1])


def throughput(connection: Connection, batch_id: int, since: float, until: float) -> Throughput:
    """What a batch completed between two instants; reads the whole batch.

    While it runs, take differences of the batch's counters instead: those cost one row.
    """
    row = connection.execute(
        select(func.count(), func.sum(ATTEMPTS.c.prompt_tokens), func.sum(ATTEMPTS.c.completion_tokens))
        .join_from(RESULTS, ATTEMPTS, ATTEMPTS.c.request_id == RESULTS.c.request_id)
        .where(
            RESULTS.c.batch_id == batch_id,
            ATTEMPTS.c.outcome == "completed",
            ATTEMPTS.c.finished_at >= since,
            ATTEMPTS.c.finished_at < until,
        )
    ).one()
    return Throughput(int(row[0]), int(row[1] or 0), int(row[2] or 0), until - since)


def attempts_of(connection: Connection, request_id: int) -> list[Mapping[str, Any]]:
    """Every attempt at a request, in order: columns of `storage.models.ATTEMPTS` -> values."""
    rows = connection.execute(
        select(ATTEMPTS).where(ATTEMPTS.c.request_id == request_id).order_by(ATTEMPTS.c.number, ATTEMPTS.c.id)
    )
    return [dict(row._mapping) for row in rows]


# --- dispatch and sweep ------------------------------------------------------------------------------------------


def batches_at_work(connection: Connection, now: float) -> list[BatchRow]:
    """Batches whose requests may be queued: in progress, not paused, before their deadline; by id.

    Interactive ones only if they have a pending request: there may be hundreds, and theirs are mostly on their way.
    """
    statement = select(BATCHES).where(OPEN_BATCH, IS_AT_WORK, or_(BATCHES.c.is_interactive.is_(False), _HAS_PENDING))
    rows = connection.execute(statement.order_by(BATCHES.c.id), {"now": now})
    return [BatchRow(**_batch_values(row)) for row in rows]


_HAS_PENDING = or_(
    *(select(REQUESTS.c.id).where(kind, REQUESTS.c.batch_id == BATCHES.c.id).exists() for kind in PENDING_KINDS)
)


def queued_counts(connection: Connection) -> dict[tuple[str, bool], int]:
    """(model, is interactive) -> requests whose ids are in the queue."""
    rows = connection.execute(
        select(BATCHES.c.model, BATCHES.c.is_interactive, func.count().label("requests"))
        .join_from(REQUESTS, BATCHES, REQUESTS.c.batch_id == BATCHES.c.id)
        .where(_is(RequestStatus.QUEUED), BATCHES.c.paused_at.is_(None))
        .group_by(BATCHES.c.model, BATCHES.c.is_interactive)
    )
    return {(row.model, bool(row.is_interactive)): row.requests for row in rows}


def interactive_load(connection: Connection) -> dict[str, tuple[int, float]]:
    """model -> interactive requests that no worker has taken yet, and since when the oldest waits."""
    rows = connection.execute(
        select(BATCHES.c.model, func.count().label("requests"), func.min(REQUESTS.c.queued_at).label("since"))
        .join_from(REQUESTS, BATCHES, REQUESTS.c.batch_id == BATCHES.c.id)
        .where(_is(RequestStatus.QUEUED), BATCHES.c.is_interactive, BATCHES.c.paused_at.is_(None))
        .group_by(BATCHES.c.model)
    )
    return {row.model: (row.requests, row.since) for row in rows}


def stalled_requests(
    connection: Connection, ids: Collection[int], now: float, queued_before: float
) -> list[StalledRequest]:
    """Of these requests, those that could be sent (again): pending, or in the queue since before an instant."""
    rows = connection.execute(_STALLED, {"ids": sorted(ids), "now": now, "before": queued_before})
    return [StalledRequest(row.id, row.model, row.status == RequestStatus.PENDING) for row in rows]


_STALLED = (
    select(REQUESTS.c.id, REQUESTS.c.status, BATCHES.c.model)
    .join_from(REQUESTS, BATCHES, REQUESTS.c.batch_id == BATCHES.c.id)
    .where(
        one_of(REQUESTS.c.id, "ids"),
        IS_AT_WORK,
        or_(
            and_(
                REQUESTS.c.status.concat("") == RequestStatus.PENDING.value,
                func.coalesce(REQUESTS.c.not_before, 0.0) <= bindparam("now"),
            ),
            and_(
                REQUESTS.c.status.concat("") == RequestStatus.QUEUED.value, REQUESTS.c.queued_at < bindparam("before")
            ),
        ),
    )
)


def waiting_tenants(connection: Connection) -> list[str]:
    """Tenants that have requests in the queue."""
    rows = connection.execute(
        select(BATCHES.c.tenant)
        .join_from(REQUESTS, BATCHES, REQUESTS.c.batch_id == BATCHES.c.id)
        .where(_is(RequestStatus.QUEUED))
        .distinct()
    )
    return sorted(rows.scalars())


_PENDING_COLUMNS = (
    REQUESTS.c.id,
    REQUESTS.c.line,
    REQUESTS.c.prefix_id,
    REQUESTS.c.estimated_tokens,
    REQUESTS.c.isolation,
)


def next_pending(connection: Connection, batch_id: int, limit: int, *, skip: int = 0) -> list[PendingRequest]:
    """The next fresh requests of a batch to queue: those with one prefix together, then in input order."""
    rows = connection.execute(
        select(*_PENDING_COLUMNS)
        .where(PENDING_FRESH, REQUESTS.c.batch_id == batch_id)
        .order_by(REQUESTS.c.prefix_id, REQUESTS.c.line)
        .limit(limit)
        .offset(skip)
    )
    return [PendingRequest(**row._mapping) for row in rows]


def next_delayed(connection: Connection, batch_id: int, now: float, limit: int) -> list[PendingRequest]:
    """Requests of a batch whose pause after a failure or a worker's death is over, the longest over first."""
    rows = connection.execute(
        select(*_PENDING_COLUMNS)
        .where(PENDING_DELAYED, REQUESTS.c.batch_id == batch_id, REQUESTS.c.not_before <= now)
        .order_by(REQUESTS.c.not_before)
        .limit(limit)
    )
    return [PendingRequest(**row._mapping) for row in rows]


def has_pending(connection: Connection, batch_id: int, now: float) -> bool:
    """Whether a batch has a request that can be queued now."""
    return bool(next_pending(connection, batch_id, 1) or next_delayed(connection, batch_id, now, 1))


_ISOLATED = select(REQUESTS.c.id).where(
    one_of(REQUESTS.c.id, "ids"),
    REQUESTS.c.isolation.is_not(None),
    REQUESTS.c.status.concat("") == RequestStatus.QUEUED.value,
)


def claims_made(connection: Connection, ids: Collection[int], *, worker: str, claimed_at: float) -> dict[int, int]:
    """Of these requests, those that a worker claimed at that very instant and still holds -> their attempt."""
    rows = connection.execute(
        select(REQUESTS.c.id, REQUESTS.c.attempt).where(
            one_of(REQUESTS.c.id, "ids"),
            REQUESTS.c.status.concat("") == RequestStatus.RUNNING.value,
            REQUESTS.c.worker == worker,
            REQUESTS.c.claimed_at == claimed_at,
        ),
        {"ids": sorted(ids)},
    )
    return {row.id: row.attempt for row in rows}


def isolated_requests(connection: Connection, ids: Collection[int]) -> list[int]:
    """Of these, those that wait in the queue in isolation: to be claimed with nothing else in the worker's hands."""
    return sorted(connection.execute(_ISOLATED, {"ids": sorted(ids)}).scalars())


def queued_before(connection: Connection, instant: float, limit: int) -> list[tuple[int, str]]:
    """Requests that have been in the queue since before an instant, the oldest first: (id, model)."""
    rows = connection.execute(
        select(REQUESTS.c.id, BATCHES.c.model)
        .join_from(REQUESTS, BATCHES, REQUESTS.c.batch_id == BATCHES.c.id)
        .where(_is(RequestStatus.QUEUED), REQUESTS.c.queued_at < instant)
        .order_by(REQUESTS.c.queued_at)
        .limit(limit)
    )
    return [(row.id, row.model) for row in rows]


def unfinished_batches(connection: Connection) -> list[BatchRow]:
    """Batches that are not final, by id: all that sweep may have to look after. Without one there is no work at all."""
    rows = connection.execute(select(BATCHES).where(OPEN_BATCH).order_by(BATCHES.c.id))
    return [BatchRow(**_batch_values(row)) for row in rows]


def ending_batches(connection: Connection) -> set[int]:
    """Batches that are being cancelled or whose deadline has passed, and that have not ended: their ids."""
    rows = connection.execute(select(BATCHES.c.id).where(OPEN_BATCH, IS_ENDING))
    return set(rows.scalars())


def has_finishable_batch(connection: Connection) -> bool:
    """Whether the counters of some batch say that it is at its end."""
    return connection.execute(select(BATCHES.c.id).where(OPEN_BATCH, IS_FINISHABLE).limit(1)).first() is not None


def has_waiting(connection: Connection, batch_id: int) -> bool:
    """Whether a request of the batch is pending or queued."""
    return any(
        connection.execute(select(REQUESTS.c.id).where(kind, REQUESTS.c.batch_id == batch_id).limit(1)).first()
        for kind in (*PENDING_KINDS, _is(RequestStatus.QUEUED))
    )


def is_publishable(connection: Connection, batch: BatchRow) -> bool:
    """Whether a batch is at its end but for its files."""
    return batch.status in (BatchStatus.FINALIZING, BatchStatus.CANCELLING) and not has_open_requests(
        connection, batch.id
    )


def has_stalled_duplicates(connection: Connection, batch_id: int) -> bool:
    """Whether requests wait for an identical one while nothing else of the batch is open: their answer is there."""
    waiting = select(REQUESTS.c.id).where(PENDING_SAME, REQUESTS.c.batch_id == batch_id).limit(1)
    return connection.execute(waiting).first() is not None and not has_open_requests(
        connection, batch_id, besides_duplicates=True
    )


def overdue_leases(connection: Connection, now: float) -> int:
    """Running requests whose lease has run out."""
    return int(
        connection.execute(
            select(func.count()).where(_is(RequestStatus.RUNNING), REQUESTS.c.lease_expires_at < now)
        ).scalar_one()
    )


# --- workers -----------------------------------------------------------------------------------------------------


def live_workers(
    connection: Connection, now: float, *, model: str | None = None, seen_s: float = WORKER_SEEN_S
) -> list[WorkerRow]:
    """Workers that are ready and were seen within the last `seen_s` seconds."""
    statement = select(WORKERS).where(
        WORKERS.c.status == WorkerStatus.READY.value, WORKERS.c.last_seen_at > now - seen_s
    )
    if model is not None:
        statement = statement.where(WORKERS.c.model == model)
    return [_worker(row) for row in connection.execute(statement.order_by(WORKERS.c.name))]


def list_workers(connection: Connection, *, since: float) -> list[WorkerRow]:
    """Workers of any status seen since an instant, by name."""
    statement = select(WORKERS).where(WORKERS.c.last_seen_at >= since).order_by(WORKERS.c.name)
    return [_worker(row) for row in connection.execute(statement)]


def served_models(connection: Connection, since: float) -> dict[str, float]:
    """Models that some worker has served since then -> when its first one started."""
    first = func.min(WORKERS.c.started_at).label("first")
    statement = select(WORKERS.c.model, first).where(WORKERS.c.last_seen_at >= since).group_by(WORKERS.c.model)
    return {row.model: row.first for row in connection.execute(statement)}


def last_death_at(connection: Connection, since: float) -> float | None:
    """When the last worker ended that did not do so in good order, if that was after `since`."""
    latest = connection.execute(
        select(func.max(WORKERS.c.stopped_at)).where(
            WORKERS.c.status == WorkerStatus.FAILED.value, WORKERS.c.stopped_at > since
        )
    ).scalar_one()
    return None if latest is None else float(latest)


def find_worker(connection: Connection, name: str) -> WorkerRow | None:
    row = connection.execute(select(WORKERS).where(WORKERS.c.name == name)).first()
    return None if row is None else _worker(row)


# --- rows to values ----------------------------------------------------------------------------------------------


def _is(status: RequestStatus) -> Any:
    return REQUESTS.c.status == spelled(status)


def _batch(row: Any) -> BatchRow | None:
    return None if row is None else BatchRow(**_batch_values(row))


def _batch_values(row: Any) -> dict[str, Any]:
    values = dict(row._mapping)
    values["status"] = BatchStatus(values["status"])
    return values


def _result(row: Any) -> ResultRow:
    values = dict(row._mapping)
    values["status"] = RequestStatus(values["status"])
    return ResultRow(**values)


def _worker(row: Any) -> WorkerRow:
    values = dict(row._mapping)
    del values["id"]
    values["status"] = WorkerStatus(values["status"])
    values["device_detail"] = json.loads(values["device_detail"]) if values["device_detail"] else None
    return WorkerRow(**values)
