"""Claim, renew, record, release, cancel: the only writer of status columns.

Each function takes a connection inside `database.write()` and the time as `now` (take `database.now()`: leases are
judged by it). Rows are locked in the order requests (by id), then batches (by id), so that writers wait for each other
and do not deadlock. Repeating a call changes nothing: rows that have moved on are left alone. Moves that can only be
our own mistake raise IllegalMove.

A worker holds a request as long as its row says running, this worker, this attempt: the fence. `held` maps request
ids to the attempt numbers that a worker believes to hold.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar, cast

from sqlalchemy import Connection, Table, bindparam, exists, insert, literal, or_, select, update

from storage.bulk import insert_rows, one_of, storable
from storage.errors import StorageError
from storage.models import (
    Attempt,
    AttemptOutcome,
    Batch,
    BatchStatus,
    Prefix,
    Request,
    RequestStatus,
    Result,
    Worker,
    WorkerStatus,
)

BATCHES = cast(Table, Batch.__table__)
PREFIXES = cast(Table, Prefix.__table__)
REQUESTS = cast(Table, Request.__table__)
ATTEMPTS = cast(Table, Attempt.__table__)
RESULTS = cast(Table, Result.__table__)
WORKERS = cast(Table, Worker.__table__)

# Batches whose requests may be queued and claimed.
DISPATCHED_BATCHES = (BatchStatus.IN_PROGRESS,)

# From where a batch may come to a status. Final statuses are left by no way.
BATCH_MOVES: Mapping[BatchStatus, tuple[BatchStatus, ...]] = {
    BatchStatus.IN_PROGRESS: (BatchStatus.VALIDATING,),
    BatchStatus.FAILED: (BatchStatus.VALIDATING,),
    BatchStatus.FINALIZING: (BatchStatus.IN_PROGRESS,),
    BatchStatus.COMPLETED: (BatchStatus.FINALIZING,),
    BatchStatus.CANCELLING: (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS),
    BatchStatus.CANCELLED: (BatchStatus.CANCELLING,),
}

# Rows for one statement; keeps memory small and stays below the drivers' bounds on parameters (32,766 in SQLite).
STATEMENT_ROWS = 2000

_Row = TypeVar("_Row")


class IllegalMove(StorageError):
    """A status cannot follow the present one."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="illegal_move")


@dataclass(frozen=True, slots=True)
class NewBatch:
    """A batch as submitted. metadata: JSON text."""

    public_id: str
    fingerprint: str
    endpoint: str
    model: str
    tenant: str = "default"
    name: str | None = None
    priority: int = 0
    metadata: str | None = None
    expires_at: float | None = None


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A line to run. body: JSON text without the prefix that `prefix_id` names."""

    line: int
    custom_id: str | None
    body: str
    prefix_id: int | None = None


@dataclass(frozen=True, slots=True)
class RefusedLine:
    """A line that failed on arrival. param: the field at fault, such as `body.max_tokens`."""

    line: int
    custom_id: str | None
    error_code: str
    error_message: str
    param: str | None = None


@dataclass(frozen=True, slots=True)
class ClaimedRequest:
    """A request that this worker now holds, with all that it takes to run it."""

    id: int
    batch_id: int
    line: int
    custom_id: str | None
    attempt: int
    body: str
    prefix_id: int | None
    endpoint: str
    model: str
    queued_at: float | None
    claimed_at: float


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """What a worker measured of one attempt: the columns of Attempt that are not known from the claim itself."""

    device: str | None = None
    artifact_digest: str | None = None
    parameters: str | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    mean_batch_size: float | None = None
    queue_s: float | None = None
    tokenize_s: float | None = None
    wait_s: float | None = None
    prefill_s: float | None = None
    time_to_first_token_s: float | None = None
    decode_s: float | None = None
    total_s: float | None = None


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """How a held request ended. status: completed or failed; response: JSON text, the body of the result line."""

    request_id: int
    batch_id: int
    attempt_number: int
    status: RequestStatus
    status_code: int | None
    response: str | None
    error_code: str | None = None
    error_message: str | None = None
    record: AttemptRecord = AttemptRecord()


@dataclass(frozen=True, slots=True)
class NewWorker:
    """A worker process as it introduces itself."""

    name: str
    host: str
    pid: int
    model: str
    artifact_digest: str | None = None
    device: str | None = None
    max_batch_size: int = 0


# --- a batch arrives ---------------------------------------------------------------------------------------------


def create_batch(connection: Connection, batch: NewBatch, now: float) -> int:
    """Write a batch, `validating` and empty. Returns its id."""
    return int(
        connection.execute(
            insert(BATCHES).returning(BATCHES.c.id),
            {
                **asdict(batch),
                "status": BatchStatus.VALIDATING.value,
                "total_requests": 0,
                "completed_requests": 0,
                "failed_requests": 0,
                "prompt_tokens": 0,
                "cached_tokens": 0,
                "completion_tokens": 0,
                "created_at": now,
            },
        ).scalar_one()
    )


def save_prefix(connection: Connection, text: str) -> int:
    """Keep a text that many prompts begin with. Returns its id, the same for the same text."""
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
    insert_rows(connection, PREFIXES, [{"sha256": digest, "text": text}], unless=("sha256",))
    return int(connection.execute(select(PREFIXES.c.id).where(PREFIXES.c.sha256 == digest)).scalar_one())


def add_requests(connection: Connection, batch_id: int, requests: Sequence[NewRequest]) -> int:
    """Write lines of a batch that is still validating, and count them. Returns how many were new.

    A line that is already there stays as it is, so an interrupted submission can be repeated from any line before
    the break.
    """
    added = 0
    for part in _parts(requests):
        rows = [
            {
                "batch_id": batch_id,
                "line": request.line,
                "custom_id": request.custom_id,
                "status": "pending",
                "prefix_id": request.prefix_id,
                "body": request.body,
                "attempt": 0,
            }
            for request in part
        ]
        added += insert_rows(connection, REQUESTS, rows, unless=("batch_id", "line"))
    if added:
        _count(connection, batch_id, {"total_requests": added}, only_in=BatchStatus.VALIDATING)
    return added


def refuse_lines(connection: Connection, batch_id: int, lines: Sequence[RefusedLine], now: float) -> int:
    """Write lines that failed on arrival, each with its result. Returns how many were new."""
    refused = 0
    for part in _parts(lines):
        there = set(
            connection.execute(
                select(REQUESTS.c.line).where(
                    REQUESTS.c.batch_id == batch_id, REQUESTS.c.line.in_([line.line for line in part])
                )
            ).scalars()
        )
        new = {line.line: line for line in part if line.line not in there}
        if not new:
            continue
        insert_rows(
            connection,
            REQUESTS,
            [
                {
                    "batch_id": batch_id,
                    "line": line.line,
                    "custom_id": line.custom_id,
                    "status": RequestStatus.FAILED.value,
                    "attempt": 0,
                }
                for line in new.values()
            ],
        )
        ids = connection.execute(
            select(REQUESTS.c.id, REQUESTS.c.line).where(REQUESTS.c.batch_id == batch_id, REQUESTS.c.line.in_(new))
        )
        insert_rows(
            connection,
            RESULTS,
            [
                {
                    "request_id": request_id,
                    "batch_id": batch_id,
                    "status_code": 400,
                    "response": _refusal(new[line]),
                    "error_code": new[line].error_code,
                    "error_message": new[line].error_message,
                    "finished_at": now,
                }
                for request_id, line in ids
            ],
        )
        refused += len(new)
    if refused:
        counts = {"total_requests": refused, "failed_requests": refused}
        _count(connection, batch_id, counts, only_in=BatchStatus.VALIDATING)
    return refused


def start_batch(connection: Connection, batch_id: int, now: float) -> None:
    """All lines are written: validating -> in_progress. A batch with no line to run is finished at once."""
    _move_batch(connection, batch_id, BatchStatus.IN_PROGRESS, now, in_progress_at=now)
    finish_batches(connection, now, batch_id=batch_id)


def fail_batch(connection: Connection, batch_id: int, code: str, message: str, now: float) -> None:
    """The input as a whole is unusable: validating -> failed. Lines written so far will not run."""
    told = {"error_code": code, "error_message": storable(message)}
    _move_batch(connection, batch_id, BatchStatus.FAILED, now, failed_at=now, **told)


# --- into the queue ----------------------------------------------------------------------------------------------


def queue_requests(connection: Connection, ids: Collection[int], now: float) -> list[int]:
    """pending -> queued, of batches in progress: their ids are about to be published. Returns those that moved."""
    moved: list[int] = []
    for part in _parts(sorted(ids)):
        moved += connection.execute(_QUEUE, {"ids": part, "now": now}).scalars()
    return sorted(moved)


def unqueue_requests(connection: Connection, ids: Collection[int]) -> int:
    """queued -> pending: publishing failed, or the message was lost. Returns how many moved."""
    return sum(_rowcount(connection.execute(_UNQUEUE, {"ids": part})) for part in _parts(sorted(ids)))


# --- a worker has them -------------------------------------------------------------------------------------------


def claim_requests(
    connection: Connection, ids: Collection[int], *, worker: str, lease_s: float, now: float
) -> list[ClaimedRequest]:
    """Take requests: queued, pending or left over by an expired lease -> running, one attempt more, in id order.

    Those that somebody holds, that are final, or whose batch is not in progress are passed over: an empty list says
    that the message was a duplicate. A former owner whose lease ran out gets an `abandoned` attempt.
    """
    claimed: list[ClaimedRequest] = []
    for part in _parts(sorted(ids)):
        rows = connection.execute(_CLAIMABLE, {"ids": part, "now": now}).all()
        if not rows:
            continue
        overdue = [row for row in rows if row.status == RequestStatus.RUNNING]
        if overdue:
            _write_attempts(connection, overdue, AttemptOutcome.ABANDONED, now)
        connection.execute(
            _TAKE, {"ids": [row.id for row in rows], "owner": worker, "now": now, "expires_at": now + lease_s}
        )
        claimed += [
            ClaimedRequest(
                id=row.id,
                batch_id=row.batch_id,
                line=row.line,
                custom_id=row.custom_id,
                attempt=row.attempt + 1,
                body=row.body,
                prefix_id=row.prefix_id,
                endpoint=row.endpoint,
                model=row.model,
                queued_at=row.queued_at,
                claimed_at=now,
            )
            for row in rows
        ]
    return claimed


def renew_leases(
    connection: Connection, held: Mapping[int, int], *, worker: str, lease_s: float, now: float
) -> set[int]:
    """Extend the leases of held requests. Returns the ids that are no longer held: stop working on them."""
    lost = set(held)
    for part in _parts(sorted(held)):
        still = connection.execute(_RENEW, {"ids": part, "owner": worker, "expires_at": now + lease_s})
        lost -= {request_id for request_id, attempt in still if held[request_id] == attempt}
    return lost


def record_outcomes(
    connection: Connection, outcomes: Sequence[RequestOutcome], *, worker: str, now: float
) -> list[int]:
    """running -> completed or failed, behind the fence, with result, attempt and batch counters in one transaction.

    Returns the ids recorded; the others were lost to another worker, cancelled, or recorded before.
    """
    recorded: list[int] = []
    for part in _parts(outcomes):
        recorded += _record(connection, part, worker, now)
    return recorded


def release_requests(
    connection: Connection,
    held: Mapping[int, int],
    *,
    worker: str,
    now: float,
    outcome: AttemptOutcome = AttemptOutcome.RELEASED,
    error_code: str | None = None,
    error_message: str | None = None,
) -> list[int]:
    """Hand held requests back unfinished: running -> pending. Returns the ids that were still held.

    outcome: released by a draining worker, or failed when the attempt went wrong in a way that another try may cure.
    """
    released: list[int] = []
    for part in _parts(sorted(held)):
        rows = [row for row in connection.execute(_HELD, {"ids": part, "owner": worker}) if row.attempt == held[row.id]]
        released += _give_back(connection, rows, outcome, now, error_code, error_message)
    return released


def expire_leases(connection: Connection, now: float, limit: int = STATEMENT_ROWS) -> list[int]:
    """running -> pending where the lease ran out: the worker is dead or cut off. Returns the ids, at most `limit`."""
    rows = connection.execute(_OVERDUE, {"now": now, "limit": limit}).all()
    return _give_back(connection, rows, AttemptOutcome.ABANDONED, now, None, None)


def abandon_worker(connection: Connection, worker: str, now: float) -> list[int]:
    """running -> pending for all that a worker holds, known to be dead, without waiting for its leases. Returns ids."""
    rows = connection.execute(_OF_WORKER, {"owner": worker}).all()
    return _give_back(connection, rows, AttemptOutcome.ABANDONED, now, None, None)


# --- a batch ends ------------------------------------------------------------------------------------------------


def cancel_batch(connection: Connection, batch_id: int, now: float) -> bool:
    """Stop a batch: nothing of it is queued or claimed from now on; running requests may still finish.

    Follow with `cancel_requests` until it returns 0 and `finish_batches`; sweep does both. Returns False when the batch
    was cancelled before. Raises IllegalMove when it has already ended in another way.
    """
    status = _batch_status(connection, batch_id)
    if status in (BatchStatus.CANCELLING, BatchStatus.CANCELLED):
        return False
    _move_batch(connection, batch_id, BatchStatus.CANCELLING, now, cancelling_at=now)
    return True


def cancel_requests(connection: Connection, batch_id: int, now: float, limit: int = STATEMENT_ROWS) -> int:
    """pending or queued -> cancelled, with a result each, of a batch being cancelled; at most `limit`."""
    if _batch_status(connection, batch_id) is not BatchStatus.CANCELLING:
        return 0
    ids: list[int] = []
    for status in (RequestStatus.PENDING, RequestStatus.QUEUED):  # one at a time: each has its partial index
        if len(ids) < limit:
            ids += connection.execute(
                select(REQUESTS.c.id)
                .where(REQUESTS.c.batch_id == batch_id, _is(status))
                .limit(limit - len(ids))
                .with_for_update(skip_locked=True)
            ).scalars()
    for part in _parts(ids):
        connection.execute(update(REQUESTS).where(REQUESTS.c.id.in_(part)).values(status=RequestStatus.CANCELLED.value))
        insert_rows(
            connection,
            RESULTS,
            [
                {
                    "request_id": request_id,
                    "batch_id": batch_id,
                    "error_code": "batch_cancelled",
                    "error_message": "The batch was cancelled before this request ran.",
                    "finished_at": now,
                }
                for request_id in part
            ],
        )
    return len(ids)


def finish_batches(connection: Connection, now: float, *, batch_id: int | None = None) -> list[int]:
    """in_progress -> finalizing -> completed, cancelling -> cancelled, if all requests are final. Returns ids."""
    candidates = select(BATCHES.c.id, BATCHES.c.status).where(OPEN_BATCH, IS_FINISHABLE).order_by(BATCHES.c.id)
    if batch_id is not None:
        candidates = candidates.where(BATCHES.c.id == batch_id)
    finished: list[int] = []
    for row in connection.execute(candidates.with_for_update()).all():
        if _has_open_requests(connection, row.id):
            continue
        if row.status == BatchStatus.CANCELLING:
            _move_batch(connection, row.id, BatchStatus.CANCELLED, now, cancelled_at=now)
        else:
            _move_batch(connection, row.id, BatchStatus.FINALIZING, now, finalizing_at=now)
            _move_batch(connection, row.id, BatchStatus.COMPLETED, now, completed_at=now)
        finished.append(row.id)
    return finished


# --- workers -----------------------------------------------------------------------------------------------------


def register_worker(connection: Connection, worker: NewWorker, now: float) -> None:
    """Write a worker that begins to start; a former row of that name is replaced."""
    connection.execute(WORKERS.delete().where(WORKERS.c.name == worker.name))
    connection.execute(
        insert(WORKERS),
        {**asdict(worker), "status": WorkerStatus.STARTING.value, "started_at": now, "last_seen_at": now},
    )


def update_worker(
    connection: Connection,
    name: str,
    now: float,
    *,
    status: WorkerStatus | None = None,
    detail: str | None = None,
    device: str | None = None,
    artifact_digest: str | None = None,
    max_batch_size: int | None = None,
) -> None:
    """Note that a worker lives, and what changed about it. None: as before, but for `detail`: overwritten."""
    values: dict[str, Any] = {"last_seen_at": now, "detail": detail}
    if status is not None:
        values["status"] = status.value
        if status is WorkerStatus.READY:
            values["ready_at"] = now
    told = {"device": device, "artifact_digest": artifact_digest, "max_batch_size": max_batch_size}
    values |= {column: value for column, value in told.items() if value is not None}
    connection.execute(update(WORKERS).where(WORKERS.c.name == name).values(values))


def retire_worker(
    connection: Connection,
    name: str,
    now: float,
    *,
    status: WorkerStatus = WorkerStatus.STOPPED,
    detail: str | None = None,
) -> None:
    """Note that a worker has ended: stopped, or failed with the reason as `detail`."""
    connection.execute(
        update(WORKERS)
        .where(WORKERS.c.name == name)
        .values(status=status.value, detail=detail, last_seen_at=now, stopped_at=now)
    )


# --- statements, built once --------------------------------------------------------------------------------------


def _is(status: RequestStatus) -> Any:
    """`status = 'x'` spelled out, not as a parameter: only so do the partial indexes apply."""
    return REQUESTS.c.status == literal(status.value, literal_execute=True)


def _stands_at(*statuses: RequestStatus) -> Any:
    """The same as a check of rows found by id. `|| ''` keeps Postgres, whose statistics lag behind a queue's rapid
    changes, from finding all rows of that status instead."""
    return REQUESTS.c.status.concat("").in_([status.value for status in statuses])


OPEN_BATCH = BATCHES.c.status.in_(
    [
        literal(status.value, literal_execute=True)
        for status in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING, BatchStatus.CANCELLING)
    ]
)
# What may be at its end: its counters say so, or it is being cancelled.
IS_FINISHABLE = or_(
    (BATCHES.c.status == BatchStatus.IN_PROGRESS.value)
    & (BATCHES.c.total_requests <= BATCHES.c.completed_requests + BATCHES.c.failed_requests),
    BATCHES.c.status == BatchStatus.CANCELLING.value,
)
_IDS = one_of(REQUESTS.c.id, "ids")
_IS_DISPATCHED = BATCHES.c.status.in_([status.value for status in DISPATCHED_BATCHES])
_CLAIM_COLUMNS = (REQUESTS.c.id, REQUESTS.c.attempt, REQUESTS.c.worker, REQUESTS.c.queued_at, REQUESTS.c.claimed_at)

_CLAIMABLE = (
    select(
        *_CLAIM_COLUMNS,
        REQUESTS.c.status,
        REQUESTS.c.batch_id,
        REQUESTS.c.line,
        REQUESTS.c.custom_id,
        REQUESTS.c.body,
        REQUESTS.c.prefix_id,
        BATCHES.c.endpoint,
        BATCHES.c.model,
    )
    .join_from(REQUESTS, BATCHES, REQUESTS.c.batch_id == BATCHES.c.id)
    .where(
        _IDS,
        or_(
            _stands_at(RequestStatus.PENDING, RequestStatus.QUEUED),
            _stands_at(RequestStatus.RUNNING) & (REQUESTS.c.lease_expires_at < bindparam("now")),
        ),
        _IS_DISPATCHED,
    )
    .order_by(REQUESTS.c.id)
    .with_for_update(of=REQUESTS)
)
_TAKE = (
    update(REQUESTS)
    .where(_IDS)
    .values(
        status=RequestStatus.RUNNING.value,
        attempt=REQUESTS.c.attempt + 1,
        worker=bindparam("owner"),
        claimed_at=bindparam("now"),
        lease_expires_at=bindparam("expires_at"),
    )
)
_HELD = (
    select(*_CLAIM_COLUMNS, REQUESTS.c.batch_id)
    .where(_IDS, _stands_at(RequestStatus.RUNNING), REQUESTS.c.worker == bindparam("owner"))
    .order_by(REQUESTS.c.id)
    .with_for_update()
)
_OF_WORKER = (
    select(*_CLAIM_COLUMNS)
    .where(_is(RequestStatus.RUNNING), REQUESTS.c.worker == bindparam("owner"))
    .order_by(REQUESTS.c.lease_expires_at)  # by id, SQLite would walk through the whole table
    .with_for_update(skip_locked=True)
)
_OVERDUE = (
    select(*_CLAIM_COLUMNS)
    .where(_is(RequestStatus.RUNNING), REQUESTS.c.lease_expires_at < bindparam("now"))
    .order_by(REQUESTS.c.lease_expires_at)
    .limit(bindparam("limit"))
    .with_for_update(skip_locked=True)
)
_RENEW = (
    update(REQUESTS)
    .where(_IDS, _stands_at(RequestStatus.RUNNING), REQUESTS.c.worker == bindparam("owner"))
    .values(lease_expires_at=bindparam("expires_at"))
    .returning(REQUESTS.c.id, REQUESTS.c.attempt)
)
_END = update(REQUESTS).where(_IDS).values(status=bindparam("new_status"), lease_expires_at=None)
_QUEUE = (
    update(REQUESTS)
    .where(
        _IDS,
        _stands_at(RequestStatus.PENDING),
        exists().where(BATCHES.c.id == REQUESTS.c.batch_id, _IS_DISPATCHED),
    )
    .values(status=RequestStatus.QUEUED.value, queued_at=bindparam("now"))
    .returning(REQUESTS.c.id)
)
_UNQUEUE = (
    update(REQUESTS)
    .where(_IDS, _stands_at(RequestStatus.QUEUED))
    .values(status=RequestStatus.PENDING.value, queued_at=None)
)
_GIVE_BACK = (
    update(REQUESTS)
    .where(_IDS)
    .values(status=RequestStatus.PENDING.value, worker=None, queued_at=None, claimed_at=None, lease_expires_at=None)
)


def _record(connection: Connection, outcomes: Sequence[RequestOutcome], worker: str, now: float) -> list[int]:
    held = {
        row.id: row
        for row in connection.execute(_HELD, {"ids": [outcome.request_id for outcome in outcomes], "owner": worker})
    }
    attempts: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    ended: dict[str, list[int]] = defaultdict(list)
    sums: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for outcome in outcomes:
        if outcome.status not in (RequestStatus.COMPLETED, RequestStatus.FAILED):
            raise IllegalMove(f"request {outcome.request_id}: a worker cannot record it as {outcome.status}")
        row = held.get(outcome.request_id)
        if row is None or row.attempt != outcome.attempt_number:
            continue
        del held[outcome.request_id]  # the same request twice in one call counts once
        status = outcome.status.value
        record = outcome.record
        ended[status].append(row.id)
        attempts.append(
            {
                "request_id": row.id,
                "number": row.attempt,
                "outcome": status,
                "worker": worker,
                "device": record.device,
                "artifact_digest": record.artifact_digest,
                "parameters": record.parameters,
                "finish_reason": record.finish_reason,
                "error_code": outcome.error_code,
                "error_message": outcome.error_message,
                "prompt_tokens": record.prompt_tokens,
                "cached_tokens": record.cached_tokens,
                "completion_tokens": record.completion_tokens,
                "mean_batch_size": record.mean_batch_size,
                "queued_at": row.queued_at,
                "claimed_at": row.claimed_at,
                "finished_at": now,
                "queue_s": record.queue_s,
                "tokenize_s": record.tokenize_s,
                "wait_s": record.wait_s,
                "prefill_s": record.prefill_s,
                "time_to_first_token_s": record.time_to_first_token_s,
                "decode_s": record.decode_s,
                "total_s": record.total_s,
            }
        )
        results.append(
            {
                "request_id": row.id,
                "batch_id": row.batch_id,
                "status_code": outcome.status_code,
                "response": outcome.response,
                "error_code": outcome.error_code,
                "error_message": outcome.error_message,
                "finished_at": now,
            }
        )
        counts = sums[row.batch_id]
        counts[f"{status}_requests"] += 1
        counts["prompt_tokens"] += record.prompt_tokens or 0
        counts["cached_tokens"] += record.cached_tokens or 0
        counts["completion_tokens"] += record.completion_tokens or 0
    if not results:
        return []
    for status, ids in ended.items():
        connection.execute(_END, {"ids": ids, "new_status": status})
    insert_rows(connection, ATTEMPTS, attempts)
    insert_rows(connection, RESULTS, results)
    for batch_id in sorted(sums):
        _count(connection, batch_id, sums[batch_id])
    return [result["request_id"] for result in results]


def _give_back(
    connection: Connection,
    rows: Sequence[Any],
    outcome: AttemptOutcome,
    now: float,
    error_code: str | None,
    error_message: str | None,
) -> list[int]:
    """End the attempts of locked running rows without a result: running -> pending."""
    if not rows:
        return []
    _write_attempts(connection, rows, outcome, now, error_code, error_message)
    ids = [row.id for row in rows]
    for part in _parts(ids):
        connection.execute(_GIVE_BACK, {"ids": part})
    return ids


def _write_attempts(
    connection: Connection,
    rows: Sequence[Any],
    outcome: AttemptOutcome,
    now: float,
    error_code: str | None = None,
    error_message: str | None = None,
) -> None:
    """Write down attempts of which nothing was measured; the rows still name their owner."""
    insert_rows(
        connection,
        ATTEMPTS,
        [
            {
                "request_id": row.id,
                "number": row.attempt,
                "outcome": outcome.value,
                "worker": row.worker,
                "error_code": error_code,
                "error_message": error_message,
                "queued_at": row.queued_at,
                "claimed_at": row.claimed_at,
                "finished_at": now,
            }
            for row in rows
        ],
    )


def _count(
    connection: Connection, batch_id: int, added: Mapping[str, int], *, only_in: BatchStatus | None = None
) -> None:
    """Raise a batch's counters. only_in: the status that alone allows it."""
    statement = (
        update(BATCHES)
        .where(BATCHES.c.id == batch_id)
        .values({column: BATCHES.c[column] + amount for column, amount in added.items() if amount})
    )
    if only_in is not None:
        statement = statement.where(BATCHES.c.status == only_in.value)
    if _rowcount(connection.execute(statement)) != 1:
        raise IllegalMove(f"batch {batch_id} takes no more lines: it is {_batch_status(connection, batch_id)}")


def _move_batch(connection: Connection, batch_id: int, to: BatchStatus, now: float, **values: Any) -> None:
    moved = connection.execute(
        update(BATCHES)
        .where(BATCHES.c.id == batch_id, BATCHES.c.status.in_([status.value for status in BATCH_MOVES[to]]))
        .values(status=to.value, **values)
    )
    if _rowcount(moved) != 1:
        raise IllegalMove(f"batch {batch_id} is {_batch_status(connection, batch_id)}: it cannot become {to}")


def _batch_status(connection: Connection, batch_id: int) -> BatchStatus:
    status = connection.execute(select(BATCHES.c.status).where(BATCHES.c.id == batch_id)).scalar_one_or_none()
    if status is None:
        raise IllegalMove(f"there is no batch {batch_id}")
    return BatchStatus(status)


def _has_open_requests(connection: Connection, batch_id: int) -> bool:
    waiting = (
        select(REQUESTS.c.id).where(_is(status), REQUESTS.c.batch_id == batch_id).limit(1)
        for status in (RequestStatus.PENDING, RequestStatus.QUEUED)
    )
    # Through the partial index of what runs, which is little: `+ 0` keeps SQLite from walking through the whole batch.
    running = select(REQUESTS.c.id).where(_is(RequestStatus.RUNNING), REQUESTS.c.batch_id + 0 == batch_id).limit(1)
    return any(connection.execute(question).first() for question in (*waiting, running))


def _refusal(line: RefusedLine) -> str:
    error = {
        "message": line.error_message,
        "type": "invalid_request_error",
        "param": line.param,
        "code": line.error_code,
    }
    return json.dumps({"error": error})


def _parts(rows: Sequence[_Row]) -> list[Sequence[_Row]]:
    return [rows[start : start + STATEMENT_ROWS] for start in range(0, len(rows), STATEMENT_ROWS)]


def _rowcount(result: Any) -> int:
    count: int = result.rowcount
    assert count >= 0, "the driver did not count"
    return count
