"""Submit, queue, claim, renew, record, retry, release, pause, cancel, expire, publish: the only writer of statuses.

Each function takes a connection inside `database.write()` and the time as `now` (take `database.now()`: leases are
judged by it). Rows are locked in the order requests (by id), then batches (by id), so that writers wait for each other
and do not deadlock. Repeating a call changes nothing: rows that have moved on are left alone. Moves that can only be
somebody's mistake raise IllegalMove.

A worker holds a request as long as its row says running, this worker, this attempt: the fence. `held` maps request
ids to the attempt numbers that a worker believes to hold.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import (
    Connection,
    Double,
    Table,
    and_,
    bindparam,
    case,
    delete,
    exists,
    func,
    insert,
    literal_column,
    not_,
    or_,
    select,
    update,
)
from sqlalchemy import cast as cast_to

from storage.bulk import insert_rows, insert_values, one_of, storable
from storage.direct import run
from storage.errors import StorageError
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
    FilePurpose,
    RequestStatus,
    ServedFrom,
    WorkerStatus,
)
from storage.outbox import announce_end
from storage.retries import DEFAULT_LIMITS, Death, RetryLimits, judge

# From where a batch may come to a status. `failed` is left by no way, the other final statuses only by a retry.
BATCH_MOVES: Mapping[BatchStatus, tuple[BatchStatus, ...]] = {
    BatchStatus.IN_PROGRESS: (
        BatchStatus.VALIDATING,
        BatchStatus.COMPLETED,
        BatchStatus.EXPIRED,
        BatchStatus.CANCELLED,
    ),
    BatchStatus.FAILED: (BatchStatus.VALIDATING,),
    BatchStatus.FINALIZING: (BatchStatus.IN_PROGRESS,),  # passed through at once by interactive batches: no files
    BatchStatus.COMPLETED: (BatchStatus.FINALIZING,),
    BatchStatus.EXPIRED: (BatchStatus.FINALIZING,),
    BatchStatus.CANCELLING: (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS),
    BatchStatus.CANCELLED: (BatchStatus.CANCELLING,),
}

# Rows for one statement; keeps memory small and stays below the drivers' bounds on parameters (32,766 in SQLite).
STATEMENT_ROWS = 2000
# Lines of a batch that one transaction of a retry goes through; about as many as a large submission's takes time for.
RETRY_LINES = 5000
NO_LINE = 2**31 - 1
# What a failed attempt says when its request kept killing workers.
POISON_PROMPT = "poison_prompt"
QUOTAS = ("max_requests_per_minute", "max_queued_prompt_tokens", "max_running_batches", "max_storage_bytes")
# Whose attempts are those that nobody made: answers that were there when the line arrived, or came with another's.
NO_WORKER = "none"

_Row = TypeVar("_Row")


class IllegalMove(StorageError):
    """A status cannot follow the present one."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="illegal_move")


@dataclass(frozen=True, slots=True)
class NewBatch:
    """A batch as submitted. metadata: JSON text. runs_early: its lines need not wait until all are written.

    paused_at: not None when nothing of it is to run until it is resumed.
    """

    public_id: str
    fingerprint: str
    endpoint: str
    model: str
    tenant: str = "default"
    name: str | None = None
    priority: int = 0
    metadata: str | None = None
    expires_at: float | None = None
    idempotency_key: str | None = None
    artifact_digest: str | None = None
    is_interactive: bool = False
    runs_early: bool = False
    door: Door = Door.CLI
    api_key_id: int | None = None
    reply_to: str | None = None
    input_file_public_id: str | None = None
    completion_window: str | None = None
    output_expires_after_s: float | None = None
    submit_options: str | None = None
    paused_at: float | None = None

    def columns(self) -> dict[str, Any]:
        """As the table has them. (`asdict` copies deeply, which a call that somebody waits for need not pay for.)"""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True)
class NewApiKey:
    """A key as it is kept. sha256: of the whole key, which nobody keeps."""

    public_id: str
    tenant: str
    name: str
    sha256: str
    shown_prefix: str
    expires_at: float | None = None


class NewRequest(NamedTuple):
    """A line to run; a tuple, for submitting makes one for each line.

    body: JSON text without the prefix that `prefix_id` names.
    same_as: the line of this batch that asks the same; its answer serves both. source_id: a request of an earlier batch
    whose answer serves this line, if that still stands.
    """

    line: int
    custom_id: str | None
    body: str
    prefix_id: int | None = None
    estimated_tokens: int = 0
    estimated_prompt_tokens: int = 0
    question_hash: int | None = None
    same_as: int | None = None
    source_id: int | None = None


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
    isolation: int | None = None
    is_interactive: bool = False
    expires_at: float | None = None
    reply_to: str | None = None


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A request that nobody waits for any more. worker: who was running it, to be told; None: it had not begun."""

    worker: str | None


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """What a worker measured of one attempt: the columns of Attempt that are not known from the claim itself.

    served_from, source_request_id: of an answer that was not computed; its tokens are then not counted as work.
    """

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
    served_from: ServedFrom | None = None
    source_request_id: int | None = None


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """How a held request ended. status: completed or failed; response: JSON text, the body of the result line.

    answer_key: keep the answer under it for identical requests of later batches.
    """

    request_id: int
    batch_id: int
    attempt_number: int
    status: RequestStatus
    status_code: int | None
    response: str | None
    error_code: str | None = None
    error_message: str | None = None
    record: AttemptRecord = AttemptRecord()
    answer_key: str | None = None


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file that lies whole in the files folder. path: relative to that folder."""

    public_id: str
    filename: str
    path: str
    bytes: int
    lines: int


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
    """Write a batch, `validating` and empty, and its tenant if it is new. Returns its id."""
    _add_tenant(connection, batch.tenant)
    return int(
        connection.execute(
            insert(BATCHES).returning(BATCHES.c.id),
            {
                **batch.columns(),
                "status": BatchStatus.VALIDATING.value,
                "total_requests": 0,
                "completed_requests": 0,
                "failed_requests": 0,
                "prompt_tokens": 0,
                "cached_tokens": 0,
                "completion_tokens": 0,
                "estimated_prompt_tokens": 0,
                "created_at": now,
            },
        ).scalar_one()
    )


def lock_tenant(connection: Connection, tenant: str) -> None:
    """Until the transaction ends nobody else makes a batch of this tenant that begins with this call."""
    _add_tenant(connection, tenant)
    connection.execute(select(TENANTS.c.name).where(TENANTS.c.name == tenant).with_for_update())


def _add_tenant(connection: Connection, name: str, weight: float = 1.0) -> None:
    insert_rows(connection, TENANTS, [{"name": name, "weight": weight, "share_used": 0.0}], unless=("name",))


def save_prefix(connection: Connection, text: str) -> int:
    """Keep a text that many prompts begin with. Returns its id, the same for the same text."""
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
    insert_rows(connection, PREFIXES, [{"sha256": digest, "text": text}], unless=("sha256",))
    return int(connection.execute(select(PREFIXES.c.id).where(PREFIXES.c.sha256 == digest)).scalar_one())


_NEW_REQUEST_COLUMNS = (
    "batch_id",
    "line",
    "custom_id",
    "status",
    "prefix_id",
    "body",
    "attempt",
    "estimated_tokens",
    "question_hash",
    "same_as",
)


def add_requests(connection: Connection, batch_id: int, requests: Sequence[NewRequest]) -> int:
    """Write lines of a batch that is still validating, and count them. Returns how many were new.

    A line that is already there stays as it is, so an interrupted submission can be repeated from any line before
    the break.
    """
    added = prompt_tokens = 0
    for part in _parts(requests):
        # By place, not by name: with a million lines this is what writing them costs beside SQLite itself.
        rows = [
            (batch_id, line, custom_id, "pending", prefix_id, body, 0, tokens, question_hash, same_as)
            for line, custom_id, body, prefix_id, tokens, _prompt_tokens, question_hash, same_as, _source_id in part
        ]
        new = insert_values(connection, REQUESTS, _NEW_REQUEST_COLUMNS, rows, unless=("batch_id", "line"))
        added += new
        if new:
            prompt_tokens += sum(request.estimated_prompt_tokens for request in part) * new // len(part)
    if added:
        counts = {"total_requests": added, "estimated_prompt_tokens": prompt_tokens}
        _count(connection, batch_id, counts, only_in=BatchStatus.VALIDATING)
    return added


def carry_answers(connection: Connection, batch_id: int, requests: Sequence[NewRequest], now: float) -> int:
    """Give lines just added the answers that earlier requests (`source_id`) have. Returns how many were answered.

    Text is compared with text; a line whose source asked something else, or whose answer is gone, stays pending.
    """
    carried = 0
    for part in _parts([request for request in requests if request.source_id is not None]):
        sources = {
            row.id: row
            for row in connection.execute(_ANSWERED, {"ids": sorted({request.source_id or 0 for request in part})})
        }
        lines = {request.line: request for request in part}
        rows = connection.execute(
            select(REQUESTS.c.id, REQUESTS.c.line, REQUESTS.c.attempt, REQUESTS.c.batch_id).where(
                REQUESTS.c.batch_id == batch_id, REQUESTS.c.line.in_(list(lines)), _stands_at(RequestStatus.PENDING)
            )
        ).all()
        served = []
        for row in rows:
            wanted = lines[row.line]
            source = sources.get(wanted.source_id)
            if source is not None and (source.body, source.prefix_id) == (storable(wanted.body), wanted.prefix_id):
                served.append((row, source))
        carried += _serve(connection, served, ServedFrom.JOB, now)
    return carried


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
    """All lines are written: validating -> in_progress. A batch with no line to run is `finalizing` at once."""
    _move_batch(connection, batch_id, BatchStatus.IN_PROGRESS, since=BatchStatus.VALIDATING, in_progress_at=now)
    finish_batches(connection, now, batch_id=batch_id)


def create_interactive(
    connection: Connection, batch: NewBatch, request: NewRequest, now: float, *, is_known_tenant: bool = False
) -> tuple[int, int]:
    """Write a batch of one request that somebody waits for: in progress, its request queued, about to be published.

    is_known_tenant: its tenant has a row already. Returns (batch id, request id).
    """
    assert batch.is_interactive
    if not is_known_tenant:
        _add_tenant(connection, batch.tenant)
    prompt_tokens = request.estimated_prompt_tokens
    (created,) = run(
        connection,
        _CREATE_INTERACTIVE,
        {**batch.columns(), "estimated_prompt_tokens": prompt_tokens, "created_at": now, "in_progress_at": now},
    )
    line = {
        "batch_id": created.id,
        "line": request.line,
        "custom_id": request.custom_id,
        "queued_at": now,
        "body": storable(request.body),
        "estimated_tokens": request.estimated_tokens,
    }
    (queued,) = run(connection, _ADD_INTERACTIVE, line)
    return created.id, queued.id


def release_idempotency_key(connection: Connection, batch_id: int) -> None:
    """Let the next call under that key begin anew: this one ended without an answer that would be worth repeating."""
    connection.execute(update(BATCHES).where(BATCHES.c.id == batch_id).values(idempotency_key=None))


def claim_validation(
    connection: Connection, *, owner: str, lease_s: float, now: float, besides: Collection[int] = ()
) -> int | None:
    """Take the batch whose input file is to be read next: nobody has begun it, or its reader's lease ran out.

    besides: passed over. Returns its id; it is `owner`'s as long as `renew_validation` says so.
    """
    waiting = (
        select(BATCHES.c.id)
        .where(
            OPEN_BATCH,
            BATCHES.c.status == BatchStatus.VALIDATING.value,
            BATCHES.c.input_file_public_id.is_not(None),
            BATCHES.c.id.not_in(sorted(besides)),
            or_(BATCHES.c.validation_lease_expires_at.is_(None), BATCHES.c.validation_lease_expires_at < now),
        )
        .order_by(BATCHES.c.priority.desc(), BATCHES.c.id)
        .limit(1)
        .with_for_update(skip_locked=True)
    )
    batch_id = connection.execute(waiting).scalar_one_or_none()
    if batch_id is None:
        return None
    connection.execute(
        update(BATCHES)
        .where(BATCHES.c.id == batch_id)
        .values(validated_by=owner, validation_lease_expires_at=now + lease_s)
    )
    return int(batch_id)


def renew_validation(connection: Connection, batch_id: int, *, owner: str, lease_s: float, now: float) -> bool:
    """Extend the hold on a batch's validation. False: it is over (cancelled), or another reader's: stop."""
    renewed = (
        update(BATCHES)
        .where(
            BATCHES.c.id == batch_id,
            BATCHES.c.status == BatchStatus.VALIDATING.value,
            BATCHES.c.validated_by == owner,
        )
        .values(validation_lease_expires_at=now + lease_s)
    )
    return _rowcount(connection.execute(renewed)) == 1


def release_validation(connection: Connection, batch_id: int, *, owner: str) -> None:
    """Hand a batch's validation back unfinished: the next reader need not wait for the lease."""
    connection.execute(
        update(BATCHES)
        .where(BATCHES.c.id == batch_id, BATCHES.c.validated_by == owner)
        .values(validated_by=None, validation_lease_expires_at=None)
    )


def name_model(connection: Connection, batch_id: int, model: str, artifact_digest: str | None) -> None:
    """Write what the lines of a batch that is still validating ask for: known only once its file is read."""
    connection.execute(
        update(BATCHES)
        .where(BATCHES.c.id == batch_id, BATCHES.c.status == BatchStatus.VALIDATING.value)
        .values(model=model, artifact_digest=artifact_digest)
    )


def fail_batch(
    connection: Connection, batch_id: int, code: str, message: str, now: float, *, errors: str | None = None
) -> None:
    """The input as a whole is unusable: validating -> failed. Lines written so far will not run.

    errors: JSON text, all that is wrong with it, where `code` and `message` say the first.
    """
    told: dict[str, Any] = {"error_code": code, "error_message": storable(message), "errors": errors}
    _move_batch(connection, batch_id, BatchStatus.FAILED, failed_at=now, **told)
    unqueue_batch(connection, batch_id)  # of one that runs early
    announce_end(connection, batch_id, BatchStatus.FAILED, now)


# --- into the queue ----------------------------------------------------------------------------------------------


def queue_requests(connection: Connection, ids: Collection[int], now: float) -> list[int]:
    """pending -> queued, of batches at work: their ids are about to be published. Returns those that moved."""
    moved: list[int] = []
    for part in _parts(sorted(ids)):
        moved += connection.execute(_QUEUE, {"ids": part, "now": now}).scalars()
    return sorted(moved)


def unqueue_requests(connection: Connection, ids: Collection[int]) -> int:
    """queued -> pending: publishing failed, or the message was lost. Returns how many moved."""
    return sum(_rowcount(connection.execute(_UNQUEUE, {"ids": part})) for part in _parts(sorted(ids)))


def unqueue_batch(connection: Connection, batch_id: int) -> int:
    """queued -> pending for all of a batch: its messages in Redis become void. Returns how many moved."""
    return _rowcount(connection.execute(_UNQUEUE_BATCH, {"batch": batch_id}))


def charge_tenants(connection: Connection, used: Mapping[str, float]) -> None:
    """Write what each tenant has had of its share so far, as dispatch reckons it."""
    for name in sorted(used):
        connection.execute(update(TENANTS).where(TENANTS.c.name == name).values(share_used=used[name]))


def set_tenant(connection: Connection, name: str, weight: float) -> None:
    """Give a tenant a weight: twice the weight, twice the tokens while others wait. Raises IllegalMove below 0.01."""
    if not 0.01 <= weight <= 10_000:
        raise IllegalMove(f"tenant {name}: weight {weight:g} is not within 0.01 to 10000")
    _add_tenant(connection, name, weight)
    connection.execute(update(TENANTS).where(TENANTS.c.name == name).values(weight=weight))


# --- who may send work -------------------------------------------------------------------------------------------


def set_quotas(connection: Connection, name: str, quotas: Mapping[str, int | None]) -> None:
    """Bound what a tenant may do at once. quotas: columns of Tenant -> bound; None: no bound. The rest stays."""
    for quota, bound in quotas.items():
        if quota not in QUOTAS:
            raise IllegalMove(f"tenant {name}: there is no quota {quota}")
        most = 2**31 if quota == "max_requests_per_minute" else 2**63  # as wide as the column
        if bound is not None and not 0 <= bound < most:
            raise IllegalMove(f"tenant {name}: {quota} {bound} is not within 0 to {most - 1}; or take it away: none")
    _add_tenant(connection, name)
    if quotas:
        connection.execute(update(TENANTS).where(TENANTS.c.name == name).values(dict(quotas)))


def create_api_key(connection: Connection, key: NewApiKey, now: float) -> int:
    """Write a key, and its tenant if it is new. Returns its id."""
    _add_tenant(connection, key.tenant)
    values = {**asdict(key), "created_at": now}
    return int(connection.execute(insert(API_KEYS).returning(API_KEYS.c.id), values).scalar_one())


def revoke_api_key(connection: Connection, key_id: int, now: float) -> bool:
    """End a key for good. False: it was revoked before."""
    revoked = update(API_KEYS).where(API_KEYS.c.id == key_id, API_KEYS.c.revoked_at.is_(None)).values(revoked_at=now)
    return _rowcount(connection.execute(revoked)) == 1


def touch_api_key(connection: Connection, key_id: int, now: float, *, every_s: float) -> None:
    """Note that a key was used, unless that was noted less than `every_s` seconds ago."""
    connection.execute(
        update(API_KEYS)
        .where(
            API_KEYS.c.id == key_id,
            or_(API_KEYS.c.last_used_at.is_(None), API_KEYS.c.last_used_at <= now - every_s),
        )
        .values(last_used_at=now)
    )


# --- a worker has them -------------------------------------------------------------------------------------------


def claim_requests(
    connection: Connection,
    ids: Collection[int],
    *,
    worker: str,
    lease_s: float,
    now: float,
    but_isolated: bool = False,
) -> list[ClaimedRequest]:
    """Take requests: queued -> running, one attempt more, in id order.

    Those that somebody holds, that are final, that went back to pending, or whose batch is paused, past its deadline or
    not in progress are passed over: an empty list says that the message was a duplicate or has become void.
    Requests in isolation are taken only when all that is asked for fits into the smallest isolation, so that no old
    message brings them into larger company. The caller then runs nothing else beside them (`isolated_requests`).
    but_isolated: leave those in isolation alone, as others run beside what is claimed.
    """
    claimed: list[ClaimedRequest] = []
    for part in _parts(sorted(ids)):
        rows = run(connection, _CLAIMABLE, {"ids": part, "now": now})
        if any(row.isolation is not None for row in rows):
            smallest = min(row.isolation for row in rows if row.isolation is not None)
            if but_isolated or len(rows) > smallest:
                rows = [row for row in rows if row.isolation is None]
        if not rows:
            continue
        ids_taken = [row.id for row in rows]
        run(connection, _TAKE, {"ids": ids_taken, "owner": worker, "now": now, "expires_at": now + lease_s})
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
                isolation=row.isolation,
                is_interactive=bool(row.is_interactive),
                expires_at=row.expires_at,
                reply_to=row.reply_to,
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


def fail_requests(
    connection: Connection,
    outcomes: Sequence[RequestOutcome],
    *,
    worker: str,
    now: float,
    limits: RetryLimits,
) -> list[int]:
    """Attempts that went wrong in a way another try may cure: running -> pending, for after a pause that doubles.

    outcomes: how each would end if this were its last attempt; at the attempt limit that is recorded. Returns the ids
    that will be tried again. Like `record_outcomes` behind the fence: what is no longer held is left alone.
    """
    again: list[int] = []
    for part in _parts(outcomes):
        by_id = {outcome.request_id: outcome for outcome in part}
        rows = [
            row
            for row in connection.execute(_HELD, {"ids": sorted(by_id), "owner": worker})
            if row.attempt == by_id[row.id].attempt_number
        ]
        failed_before = _failures(connection, [row.id for row in rows])
        last = [by_id[row.id] for row in rows if failed_before.get(row.id, 0) + 1 >= limits.max_attempts]
        if last:
            _record(connection, last, worker, now)
        retried = [row for row in rows if failed_before.get(row.id, 0) + 1 < limits.max_attempts]
        if not retried:
            continue
        insert_rows(
            connection,
            ATTEMPTS,
            [_attempt(row, AttemptOutcome.FAILED, worker, now, by_id[row.id]) for row in retried],
        )
        by_pause: dict[float, list[int]] = defaultdict(list)
        for row in retried:
            by_pause[limits.pause_s(failed_before.get(row.id, 0) + 1)].append(row.id)
        for pause_s, ids in by_pause.items():
            _return(connection, ids, not_before=now + pause_s)
            again += ids
    return sorted(again)


def release_requests(connection: Connection, held: Mapping[int, int], *, worker: str, now: float) -> list[int]:
    """A draining worker hands held requests back unfinished: running -> pending. Returns the ids still held."""
    released: list[int] = []
    for part in _parts(sorted(held)):
        rows = [row for row in connection.execute(_HELD, {"ids": part, "owner": worker}) if row.attempt == held[row.id]]
        released += _give_back(connection, rows, now)
    return released


def stop_requests(connection: Connection, held: Mapping[int, int], *, worker: str, now: float) -> list[int]:
    """A worker has stopped running these, as their batch ends: running -> cancelled or expired, each with its result.

    Returns the ids. What is no longer held, or whose batch is at work after all, is left alone.
    """
    stopped: list[int] = []
    for part in _parts(sorted(held)):
        rows = [row for row in connection.execute(_HELD, {"ids": part, "owner": worker}) if row.attempt == held[row.id]]
        by_batch: dict[int, list[Any]] = defaultdict(list)
        for row in rows:
            by_batch[row.batch_id].append(row)
        for batch_id in sorted(by_batch):
            batch = _batch_for_update(connection, batch_id)
            ending = _ending(batch)
            if ending is None:
                continue
            insert_rows(
                connection,
                ATTEMPTS,
                [_attempt(row, AttemptOutcome.RELEASED, worker, now) for row in by_batch[batch_id]],
            )
            _end_unanswered(connection, by_batch[batch_id], ending, now)
            stopped += [row.id for row in by_batch[batch_id]]
            if batch.is_interactive:
                end_interactive(connection, [batch_id], now)
    return stopped


def expire_leases(
    connection: Connection, now: float, limit: int = STATEMENT_ROWS, *, limits: RetryLimits = DEFAULT_LIMITS
) -> list[int]:
    """running -> pending where the lease ran out: the worker is dead or cut off. Returns the ids, at most `limit`.

    It counts as a death of each worker that held them (`storage/retries.py`).
    """
    rows = connection.execute(_OVERDUE, {"now": now, "limit": limit}).all()
    if not rows:
        return []
    workers = {row.worker for row in rows}
    counted = connection.execute(
        select(REQUESTS.c.worker, func.count().label("requests"))
        .where(_is(RequestStatus.RUNNING), REQUESTS.c.worker.in_(workers))
        .group_by(REQUESTS.c.worker)
    )
    held = {row.worker: row.requests for row in counted}
    return _abandon(connection, rows, held, now, exit_code=None, limits=limits)


def abandon_worker(
    connection: Connection,
    worker: str,
    now: float,
    *,
    exit_code: int | None = None,
    was_stopped: bool = False,
    limits: RetryLimits = DEFAULT_LIMITS,
) -> list[int]:
    """running -> pending for all that a worker holds, known to have ended, without waiting for its leases. Returns ids.

    exit_code: of its process; a signal is negative. was_stopped: its parent ended it on purpose, which is no evidence
    against its requests. Else those that were there at a former death come back in ever smaller groups, and one whose
    worker keeps dying while it ran nothing else fails as a poison prompt.
    """
    rows = connection.execute(_OF_WORKER, {"owner": worker}).all()
    if was_stopped:
        return _give_back(connection, rows, now)
    return _abandon(connection, rows, {worker: len(rows)}, now, exit_code=exit_code, limits=limits)


# --- an operator steers ------------------------------------------------------------------------------------------


def pause_batch(connection: Connection, batch_id: int, now: float) -> bool:
    """Nothing of the batch is queued or claimed until it is resumed; running requests finish. False: it was paused.

    Raises IllegalMove when the batch is neither being submitted nor in progress.
    """
    batch = _batch_for_update(connection, batch_id)
    if batch.status not in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS):
        raise IllegalMove(f"batch {batch_id} is {batch.status}: it cannot be paused")
    if batch.paused_at is not None:
        return False
    connection.execute(update(BATCHES).where(BATCHES.c.id == batch_id).values(paused_at=now))
    unqueue_batch(connection, batch_id)
    return True


def resume_batch(connection: Connection, batch_id: int, now: float) -> bool:
    """Undo `pause_batch`. False: it was not paused."""
    batch = _batch_for_update(connection, batch_id)
    if batch.paused_at is None:
        return False
    connection.execute(update(BATCHES).where(BATCHES.c.id == batch_id).values(paused_at=None))
    unqueue_batch(connection, batch_id)  # what a top-up queued at the moment of the pause: its messages are used up
    return True


def prioritise_batch(
    connection: Connection,
    batch_id: int,
    *,
    priority: int | None = None,
    expires_at: float | None = None,
    clear_deadline: bool = False,
) -> None:
    """Change a batch's priority or its deadline (clear_deadline: take it away), at once.

    What waits in the queue for its model goes back to pending, so that the next top-up fills the window in the new
    order. Raises IllegalMove when the batch has ended or is ending.
    """
    batch = _batch_for_update(connection, batch_id)
    if batch.status not in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS):
        raise IllegalMove(f"batch {batch_id} is {batch.status}: its priority and deadline no longer matter")
    values: dict[str, Any] = {}
    if priority is not None:
        values["priority"] = priority
    if expires_at is not None or clear_deadline:
        values["expires_at"] = expires_at
    if not values:
        return
    connection.execute(update(BATCHES).where(BATCHES.c.id == batch_id).values(values))
    connection.execute(_UNQUEUE_MODEL, {"model": batch.model})


def first_retriable_line(connection: Connection, batch_id: int) -> int:
    """The first line that a retry would run; NO_LINE when there is none.

    A read of its own, because a long batch takes a while to look through, and `retry_batch` holds up all writers.
    """
    line = connection.execute(_RETRIABLE.limit(1), {"batch": batch_id, "since": 0, "until": NO_LINE}).first()
    return NO_LINE if line is None else int(line.line)


def retry_batch(
    connection: Connection, batch_id: int, now: float, *, expires_at: float | None = None, from_line: int = 0
) -> int:
    """Run the lines of an ended batch that have no answer once more: final -> pending, the batch -> in_progress.

    Lines that were refused on arrival stay as they are. Attempts are kept, and the result of a failed line stays until
    the new one takes its place. expires_at: the new deadline; None keeps the old one unless it has passed.
    from_line: what `first_retriable_line` has found. A long batch is gone through in parts, so that nobody waits long
    for the database: this call makes the first; follow with `continue_retry` until it returns None. Returns how many
    lines of the first part will run; for 0 nothing changed, as every line has its answer. Raises IllegalMove while the
    batch has not ended.
    """
    batch = _batch_for_update(connection, batch_id)
    if batch.status not in (BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.CANCELLED):
        raise IllegalMove(f"batch {batch_id} is {batch.status}: only what has ended can be retried")
    place = {"batch": batch_id, "since": from_line, "until": NO_LINE}
    first = connection.execute(_RETRIABLE.limit(1), place).first()
    if first is None:
        return 0
    deadline = expires_at
    if deadline is None and batch.expires_at is not None and batch.expires_at > now:
        deadline = batch.expires_at
    _move_batch(
        connection,
        batch_id,
        BatchStatus.IN_PROGRESS,
        since=BatchStatus(batch.status),
        retried_at=now,
        retry_from_line=first.line,
        expires_at=deadline,
        paused_at=None,
        finalizing_at=None,
        completed_at=None,
        expired_at=None,
        cancelling_at=None,
        cancelled_at=None,
    )
    return continue_retry(connection, batch_id) or 0


def continue_retry(connection: Connection, batch_id: int) -> int | None:
    """The next part of a retry. Returns how many lines of it will run; None: there was none left, or the batch ends."""
    batch = _batch_for_update(connection, batch_id)
    since = batch.retry_from_line
    if since is None or batch.status != BatchStatus.IN_PROGRESS:
        return None
    until = since + RETRY_LINES
    rows = connection.execute(_RETRIABLE.with_for_update(), {"batch": batch_id, "since": since, "until": until}).all()
    failed = sum(row.status == RequestStatus.FAILED for row in rows)
    # What says only that a line never ran goes now: a first attempt looks for no result to replace.
    never_ran = sorted(row.id for row in rows if row.status != RequestStatus.FAILED)
    for part in _parts(never_ran):
        connection.execute(_DROP_RESULTS, {"ids": part})
    _return(connection, [row.id for row in rows], not_before=None)
    left = select(REQUESTS.c.id).where(REQUESTS.c.batch_id == batch_id, REQUESTS.c.line >= until).limit(1)
    is_last = connection.execute(left).first() is None
    connection.execute(
        update(BATCHES)
        .where(BATCHES.c.id == batch_id)
        .values(retry_from_line=None if is_last else until, failed_requests=BATCHES.c.failed_requests - failed)
    )
    return len(rows)


# --- a batch ends ------------------------------------------------------------------------------------------------


def cancel_batch(connection: Connection, batch_id: int, now: float) -> bool:
    """Stop a batch: nothing of it is queued or claimed from now on; who runs requests of it stops them
    (`stop_requests`) unless they finish first.

    Follow with `end_requests` until it returns 0 and `publish_batch`; sweep does both. Returns False when the batch
    was cancelled before. Raises IllegalMove when it has already ended in another way.
    """
    status = _batch_status(connection, batch_id)
    if status in (BatchStatus.CANCELLING, BatchStatus.CANCELLED):
        return False
    _move_batch(connection, batch_id, BatchStatus.CANCELLING, cancelling_at=now)
    return True


def give_up_request(
    connection: Connection, request_id: int, now: float, *, has_expired: bool = False
) -> GivenUp | None:
    """End an interactive request whose caller has gone (cancelled), or waited as long as it would (expired).

    Running or not: a worker that holds it is stopped by the fence, and by whoever tells it. None: it was final.
    """
    row = connection.execute(
        select(*_CLAIM_COLUMNS, REQUESTS.c.status).where(REQUESTS.c.id == request_id).with_for_update()
    ).first()
    if row is None or row.status in FINAL_REQUEST_STATUSES:
        return None
    batch = _batch_for_update(connection, row.batch_id)
    assert batch.is_interactive, "the lines of a batch are cancelled with it"
    is_running = row.status == RequestStatus.RUNNING
    if is_running:
        insert_rows(connection, ATTEMPTS, [_attempt(row, AttemptOutcome.RELEASED, row.worker, now)])
    if has_expired:
        ending = _TIMED_OUT
    else:
        ending = _Ending(
            RequestStatus.CANCELLED, "request_cancelled", "The caller went away before the request was answered."
        )
    connection.execute(_END, {"ids": [row.id], "new_status": ending.status.value})
    _put_results(
        connection,
        [
            {
                "request_id": row.id,
                "batch_id": row.batch_id,
                "status_code": None,
                "response": None,
                "error_code": ending.code,
                "error_message": ending.message,
                "finished_at": now,
            }
        ],
        replaced=[row.id] if row.attempt else [],
    )
    if batch.status == BatchStatus.IN_PROGRESS:
        if has_expired:
            _move_batch(connection, batch.id, BatchStatus.FINALIZING, finalizing_at=now, expired_at=now)
        else:
            _move_batch(connection, batch.id, BatchStatus.CANCELLING, cancelling_at=now)
    end_interactive(connection, [row.batch_id], now)
    return GivenUp(row.worker if is_running else None)


def end_interactive(connection: Connection, batch_ids: Collection[int], now: float) -> None:
    """The last move of interactive batches, in the transaction that made their only request final.

    in_progress -> completed, cancelling -> cancelled, finalizing -> expired or completed. They have no files, so
    nothing is left to do for them. Batches of other kinds, or with an open request, are left alone.
    """
    run(connection, _END_INTERACTIVE, {"ids": sorted(batch_ids), "now": now})


def expire_batches(connection: Connection, now: float) -> list[int]:
    """in_progress -> finalizing where the deadline has passed: what is finished is kept, the rest will expire.

    Follow with `end_requests` and `publish_batch`; running requests as in `cancel_batch`. Returns ids.
    """
    overdue = connection.execute(
        select(BATCHES.c.id)
        .where(OPEN_BATCH, BATCHES.c.status == BatchStatus.IN_PROGRESS.value, BATCHES.c.expires_at <= now)
        .order_by(BATCHES.c.id)
        .with_for_update()
    ).scalars()
    expired = list(overdue)
    for batch_id in expired:
        _move_batch(connection, batch_id, BatchStatus.FINALIZING, finalizing_at=now, expired_at=now)
    return expired


def end_requests(connection: Connection, batch_id: int, now: float, limit: int = STATEMENT_ROWS) -> int:
    """pending or queued -> cancelled or expired, with a result each, of a batch that is being cancelled or has expired.

    At most `limit`; returns how many, 0 also for a batch at work.
    """
    batch = _batch_for_update(connection, batch_id)
    ending = _ending(batch)
    if ending is None:
        return 0
    rows: list[Any] = []
    for kind in (*PENDING_KINDS, _is(RequestStatus.QUEUED)):  # one at a time: each has its partial index
        if len(rows) < limit:
            rows += connection.execute(
                select(REQUESTS.c.id, REQUESTS.c.batch_id, REQUESTS.c.attempt)
                .where(REQUESTS.c.batch_id == batch_id, kind)
                .limit(limit - len(rows))
                .with_for_update(skip_locked=True)
            )
    _end_unanswered(connection, rows, ending, now)
    if batch.is_interactive:
        end_interactive(connection, [batch_id], now)
    return len(rows)


def answer_duplicates(
    connection: Connection,
    batch_id: int,
    now: float,
    *,
    lines: Collection[int] | None = None,
    limit: int = STATEMENT_ROWS,
) -> int:
    """Give requests that wait for an identical one (`same_as`) its result, once it has one. Returns how many.

    lines: look only at those that wait for these. At most `limit`: what is left, sweep takes up.
    """
    values: dict[str, Any] = {"batch": batch_id, "most": limit}
    if lines is None:
        rows = connection.execute(_DUPLICATES, values).all()
    else:
        rows = connection.execute(_DUPLICATES_OF, {**values, "lines": sorted(lines)}).all()
    return _serve(connection, [(row, row) for row in rows], ServedFrom.DUPLICATE, now)


def finish_batches(connection: Connection, now: float, *, batch_id: int | None = None) -> list[int]:
    """in_progress -> finalizing where all requests are final: it is time to publish. Returns the ids that moved."""
    candidates = select(BATCHES.c.id).where(OPEN_BATCH, IS_FINISHABLE).order_by(BATCHES.c.id)
    if batch_id is not None:
        candidates = candidates.where(BATCHES.c.id == batch_id)
    finished: list[int] = []
    for candidate in connection.execute(candidates.with_for_update()).scalars().all():
        if not has_open_requests(connection, candidate):
            _move_batch(connection, candidate, BatchStatus.FINALIZING, finalizing_at=now)
            finished.append(candidate)
    return finished


def publish_batch(
    connection: Connection, batch_id: int, now: float, *, output: NewFile | None, errors: NewFile | None
) -> bool:
    """finalizing -> completed or expired, cancelling -> cancelled, together with the rows of its files.

    The files lie in place already, whole. Returns False when the batch has ended before: somebody else published it.
    Raises IllegalMove while a request is open, or when the batch is still at work.
    """
    batch = _batch_for_update(connection, batch_id)
    if batch.status in (BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.CANCELLED):
        return False
    if has_open_requests(connection, batch_id):
        raise IllegalMove(f"batch {batch_id} has open requests: it cannot be published")
    former = [file_id for file_id in (batch.output_file_id, batch.error_file_id) if file_id is not None]
    values: dict[str, Any] = {
        "output_file_id": _add_file(connection, output, batch, FilePurpose.BATCH_OUTPUT, now),
        "error_file_id": _add_file(connection, errors, batch, FilePurpose.BATCH_ERRORS, now),
        "paused_at": None,
        "retry_from_line": None,
    }
    if batch.status == BatchStatus.CANCELLING:
        status = BatchStatus.CANCELLED
        _move_batch(connection, batch_id, status, cancelled_at=now, **values)
    elif batch.expired_at is not None:
        status = BatchStatus.EXPIRED
        _move_batch(connection, batch_id, status, **values)
    else:
        status = BatchStatus.COMPLETED
        _move_batch(connection, batch_id, status, completed_at=now, **values)
    announce_end(connection, batch_id, status, now)
    if former:
        connection.execute(delete(FILES).where(FILES.c.id.in_(former)))
    return True


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
    requests_per_s: float | None = None,
) -> None:
    """Note that a worker lives, and what changed about it. None: as before, but for `detail`: overwritten."""
    values: dict[str, Any] = {"last_seen_at": now, "detail": detail}
    if status is not None:
        values["status"] = status.value
        if status is WorkerStatus.READY:
            values["ready_at"] = now
    told = {
        "device": device,
        "artifact_digest": artifact_digest,
        "max_batch_size": max_batch_size,
        "requests_per_s": requests_per_s,
    }
    values |= {column: value for column, value in told.items() if value is not None}
    connection.execute(update(WORKERS).where(WORKERS.c.name == name).values(values))


def note_device(connection: Connection, name: str, reading: dict[str, Any]) -> None:
    """Keep the last reading of a worker's GPU."""
    statement = update(WORKERS).where(WORKERS.c.name == name)
    connection.execute(statement.values(device_detail=json.dumps(reading)))


def retire_worker(
    connection: Connection,
    name: str,
    now: float,
    *,
    status: WorkerStatus = WorkerStatus.STOPPED,
    detail: str | None = None,
    exit_code: int | None = None,
) -> None:
    """Note that a worker has ended: stopped, or failed with the reason as `detail`. exit_code: of its process."""
    values = {"status": status.value, "detail": detail, "last_seen_at": now, "stopped_at": now}
    if exit_code is not None:
        values["exit_code"] = exit_code
    connection.execute(update(WORKERS).where(WORKERS.c.name == name).values(values))


# --- statements, built once --------------------------------------------------------------------------------------


def spelled(status: RequestStatus | BatchStatus) -> Any:
    """A status as part of the statement's text, not a parameter: only so do the partial indexes apply."""
    return literal_column(f"'{status.value}'")


def _is(status: RequestStatus) -> Any:
    return REQUESTS.c.status == spelled(status)


def _stands_at(*statuses: RequestStatus) -> Any:
    """The same as a check of rows found by id. `|| ''` keeps Postgres, whose statistics lag behind a queue's rapid
    changes, from finding all rows of that status instead."""
    return REQUESTS.c.status.concat("").in_([spelled(status) for status in statuses])


OPEN_BATCH = BATCHES.c.status.in_(
    [
        spelled(status)
        for status in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING, BatchStatus.CANCELLING)
    ]
)
# What may be at its end: its counters say so.
IS_FINISHABLE = (
    (BATCHES.c.status == BatchStatus.IN_PROGRESS.value)
    & (BATCHES.c.total_requests <= BATCHES.c.completed_requests + BATCHES.c.failed_requests)
    & BATCHES.c.retry_from_line.is_(None)
)
# What is cancelled, or expired, and still has requests to end.
IS_ENDING = or_(
    BATCHES.c.status == BatchStatus.CANCELLING.value,
    and_(BATCHES.c.status == BatchStatus.FINALIZING.value, BATCHES.c.expired_at.is_not(None)),
)
# The three kinds of pending requests, each in the words of its partial index.
PENDING_FRESH = and_(_is(RequestStatus.PENDING), REQUESTS.c.not_before.is_(None), REQUESTS.c.same_as.is_(None))
PENDING_DELAYED = and_(_is(RequestStatus.PENDING), REQUESTS.c.not_before.is_not(None))
PENDING_SAME = and_(_is(RequestStatus.PENDING), REQUESTS.c.same_as.is_not(None))
PENDING_KINDS = (PENDING_FRESH, PENDING_DELAYED, PENDING_SAME)
# Batches whose requests may be queued and claimed.
IS_AT_WORK = and_(
    or_(
        BATCHES.c.status == BatchStatus.IN_PROGRESS.value,
        and_(BATCHES.c.status == BatchStatus.VALIDATING.value, BATCHES.c.runs_early),
    ),
    BATCHES.c.paused_at.is_(None),
    or_(BATCHES.c.expires_at.is_(None), BATCHES.c.expires_at > bindparam("now")),
)


def _locked_in_order(*conditions: Any) -> Any:
    """The requests that these hold for, locked by id before an UPDATE touches them in an order of its own.

    Two updates of the same rows would else wait for each other on Postgres; SQLite has one writer and locks nothing.
    """
    wanted = select(REQUESTS.c.id).where(*conditions).order_by(REQUESTS.c.id).with_for_update()
    return REQUESTS.c.id.in_(wanted.correlate(None))


_IDS = one_of(REQUESTS.c.id, "ids")
_CLAIM_COLUMNS = (
    REQUESTS.c.id,
    REQUESTS.c.batch_id,
    REQUESTS.c.line,
    REQUESTS.c.attempt,
    REQUESTS.c.worker,
    REQUESTS.c.queued_at,
    REQUESTS.c.claimed_at,
    REQUESTS.c.isolation,
)


def _inserting(table: Table, given: Sequence[str], **fixed: object) -> Any:
    """An INSERT whose columns `given` are parameters; it returns the row's id."""
    return insert(table).values({**{name: bindparam(name) for name in given}, **fixed}).returning(table.c.id)


_CREATE_INTERACTIVE = _inserting(
    BATCHES,
    [*(field.name for field in fields(NewBatch)), "estimated_prompt_tokens", "created_at", "in_progress_at"],
    status=BatchStatus.IN_PROGRESS.value,
    total_requests=1,
    completed_requests=0,
    failed_requests=0,
    prompt_tokens=0,
    cached_tokens=0,
    completion_tokens=0,
)
_ADD_INTERACTIVE = _inserting(
    REQUESTS,
    ["batch_id", "line", "custom_id", "queued_at", "body", "estimated_tokens"],
    status=RequestStatus.QUEUED.value,
    attempt=0,
)
_CLAIMABLE = (
    select(
        *_CLAIM_COLUMNS,
        REQUESTS.c.custom_id,
        REQUESTS.c.body,
        REQUESTS.c.prefix_id,
        BATCHES.c.endpoint,
        BATCHES.c.model,
        BATCHES.c.is_interactive,
        BATCHES.c.expires_at,
        BATCHES.c.reply_to,
    )
    .join_from(REQUESTS, BATCHES, REQUESTS.c.batch_id == BATCHES.c.id)
    .where(_IDS, _stands_at(RequestStatus.QUEUED), IS_AT_WORK)
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
    select(*_CLAIM_COLUMNS)
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
    .where(_locked_in_order(_IDS, _stands_at(RequestStatus.RUNNING), REQUESTS.c.worker == bindparam("owner")))
    .values(lease_expires_at=bindparam("expires_at"))
    .returning(REQUESTS.c.id, REQUESTS.c.attempt)
)
_END = update(REQUESTS).where(_IDS).values(status=bindparam("new_status"), lease_expires_at=None)
_QUEUE = (
    update(REQUESTS)
    .where(
        _locked_in_order(
            _IDS,
            _stands_at(RequestStatus.PENDING),
            REQUESTS.c.same_as.is_(None),
            or_(REQUESTS.c.not_before.is_(None), REQUESTS.c.not_before <= bindparam("now")),
            exists().where(BATCHES.c.id == REQUESTS.c.batch_id, IS_AT_WORK),
        )
    )
    .values(status=RequestStatus.QUEUED.value, queued_at=bindparam("now"), not_before=None)
    .returning(REQUESTS.c.id)
)
_UNQUEUE = (
    update(REQUESTS)
    .where(_locked_in_order(_IDS, _stands_at(RequestStatus.QUEUED)))
    .values(status=RequestStatus.PENDING.value, queued_at=None)
)
_UNQUEUE_BATCH = (
    update(REQUESTS)
    .where(_locked_in_order(_is(RequestStatus.QUEUED), REQUESTS.c.batch_id == bindparam("batch")))
    .values(status=RequestStatus.PENDING.value, queued_at=None)
)
_UNQUEUE_MODEL = (
    update(REQUESTS)
    .where(
        _locked_in_order(
            _is(RequestStatus.QUEUED),
            REQUESTS.c.batch_id.in_(
                select(BATCHES.c.id).where(
                    OPEN_BATCH, BATCHES.c.model == bindparam("model"), BATCHES.c.is_interactive.is_(False)
                )
            ),
        )
    )
    .values(status=RequestStatus.PENDING.value, queued_at=None)
)
_LEADER, _LEADERS_RESULT = REQUESTS.alias("leader"), RESULTS.alias("leaders_result")
_DUPLICATES = (
    select(
        REQUESTS.c.id,
        REQUESTS.c.batch_id,
        REQUESTS.c.attempt,
        _LEADER.c.id.label("source_id"),
        _LEADER.c.status.label("source_status"),
        _LEADERS_RESULT.c.status_code,
        _LEADERS_RESULT.c.response,
        _LEADERS_RESULT.c.error_code,
        _LEADERS_RESULT.c.error_message,
    )
    .join(_LEADER, and_(_LEADER.c.batch_id == REQUESTS.c.batch_id, _LEADER.c.line == REQUESTS.c.same_as))
    .join(_LEADERS_RESULT, _LEADERS_RESULT.c.request_id == _LEADER.c.id)
    .where(
        REQUESTS.c.batch_id == bindparam("batch"),
        PENDING_SAME,
        _LEADER.c.status.concat("").in_([RequestStatus.COMPLETED.value, RequestStatus.FAILED.value]),
    )
    .order_by(REQUESTS.c.same_as)
    .limit(bindparam("most"))
    .with_for_update(of=REQUESTS, skip_locked=True)
)
_DUPLICATES_OF = _DUPLICATES.where(one_of(REQUESTS.c.same_as, "lines"))
_SERVE = (
    update(REQUESTS).where(_IDS).values(status=bindparam("new_status"), attempt=REQUESTS.c.attempt + 1, not_before=None)
)
_DROP_RESULTS = delete(RESULTS).where(one_of(RESULTS.c.request_id, "ids"))
_ENDED_BADLY = (
    select(
        ATTEMPTS.c.request_id, ATTEMPTS.c.worker, ATTEMPTS.c.finished_at, ATTEMPTS.c.batch_mates, ATTEMPTS.c.exit_code
    )
    .join_from(ATTEMPTS, REQUESTS, REQUESTS.c.id == ATTEMPTS.c.request_id)
    .join(BATCHES, BATCHES.c.id == REQUESTS.c.batch_id)
    .where(
        one_of(ATTEMPTS.c.request_id, "ids"),
        ATTEMPTS.c.outcome == bindparam("outcome"),
        ATTEMPTS.c.finished_at >= func.coalesce(BATCHES.c.retried_at, 0.0),
    )
    .order_by(ATTEMPTS.c.id)
)
_GIVE_BACK = (
    update(REQUESTS)
    .where(_IDS)
    .values(
        status=RequestStatus.PENDING.value,
        worker=None,
        queued_at=None,
        claimed_at=None,
        lease_expires_at=None,
        not_before=bindparam("not_before"),
    )
)
_OPEN_REQUEST = exists().where(
    REQUESTS.c.batch_id == BATCHES.c.id,
    REQUESTS.c.status.concat("").not_in([spelled(s) for s in FINAL_REQUEST_STATUSES]),
)
_HAS_EXPIRED = and_(BATCHES.c.status == BatchStatus.FINALIZING.value, BATCHES.c.expired_at.is_not(None))
_IS_CANCELLING = BATCHES.c.status == BatchStatus.CANCELLING.value
_IS_DONE = and_(not_(_IS_CANCELLING), not_(_HAS_EXPIRED))
_NOW = cast_to(bindparam("now"), Double)
_END_INTERACTIVE = (
    update(BATCHES)
    .where(one_of(BATCHES.c.id, "ids"), BATCHES.c.is_interactive, OPEN_BATCH, not_(_OPEN_REQUEST))
    .where(BATCHES.c.status != BatchStatus.VALIDATING.value)
    .values(
        status=case(
            (_IS_CANCELLING, BatchStatus.CANCELLED.value),
            (_HAS_EXPIRED, BatchStatus.EXPIRED.value),
            else_=BatchStatus.COMPLETED.value,
        ),
        finalizing_at=case((_IS_DONE, func.coalesce(BATCHES.c.finalizing_at, _NOW)), else_=BATCHES.c.finalizing_at),
        completed_at=case((_IS_DONE, _NOW)),
        cancelled_at=case((_IS_CANCELLING, _NOW)),
        paused_at=None,
    )
)
_RETRIABLE = (
    select(REQUESTS.c.id, REQUESTS.c.line, REQUESTS.c.status)
    .where(
        REQUESTS.c.batch_id == bindparam("batch"),
        REQUESTS.c.line >= bindparam("since"),
        REQUESTS.c.line < bindparam("until"),
        _stands_at(RequestStatus.FAILED, RequestStatus.EXPIRED, RequestStatus.CANCELLED),
        REQUESTS.c.body.is_not(None),
    )
    .order_by(REQUESTS.c.line)
)
_ISOLATE = update(REQUESTS).where(_IDS).values(isolation=bindparam("group_size"))
_ANSWERED = (
    select(
        REQUESTS.c.id.label("source_id"),
        REQUESTS.c.id,
        REQUESTS.c.body,
        REQUESTS.c.prefix_id,
        REQUESTS.c.status.label("source_status"),
        RESULTS.c.status_code,
        RESULTS.c.response,
        RESULTS.c.error_code,
        RESULTS.c.error_message,
    )
    .join_from(REQUESTS, RESULTS, RESULTS.c.request_id == REQUESTS.c.id)
    .where(_IDS, _stands_at(RequestStatus.COMPLETED), RESULTS.c.status_code == 200, RESULTS.c.response.is_not(None))
)


def _record(connection: Connection, outcomes: Sequence[RequestOutcome], worker: str, now: float) -> list[int]:
    held = {
        row.id: row
        for row in run(connection, _HELD, {"ids": [outcome.request_id for outcome in outcomes], "owner": worker})
    }
    attempts: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    answers: list[dict[str, Any]] = []
    replaced: list[int] = []
    ended: dict[str, list[int]] = defaultdict(list)
    lines: dict[int, list[int]] = defaultdict(list)
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
        attempts.append(_attempt(row, AttemptOutcome(status), worker, now, outcome))
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
        lines[row.batch_id].append(row.line)
        if row.attempt > 1:
            replaced.append(row.id)  # a failed line that is retried still has its old result
        if outcome.answer_key is not None and outcome.status is RequestStatus.COMPLETED:
            answers.append({"key": outcome.answer_key, "request_id": row.id, "created_at": now})
        counts = sums[row.batch_id]
        counts[f"{status}_requests"] += 1
        if record.served_from is None:
            counts["prompt_tokens"] += record.prompt_tokens or 0
            counts["cached_tokens"] += record.cached_tokens or 0
            counts["completion_tokens"] += record.completion_tokens or 0
    if not results:
        return []
    for status, ids in ended.items():
        run(connection, _END, {"ids": ids, "new_status": status})
    insert_rows(connection, ATTEMPTS, attempts)
    _put_results(connection, results, replaced)
    insert_rows(connection, ANSWERS, answers, unless=("key",))
    interactive: list[int] = []
    for batch_id in sorted(sums):
        if _count(connection, batch_id, sums[batch_id]):
            interactive.append(batch_id)
        else:
            answer_duplicates(connection, batch_id, now, lines=lines[batch_id])
    if interactive:
        end_interactive(connection, interactive, now)
    return [result["request_id"] for result in results]


@dataclass(frozen=True, slots=True)
class _Ending:
    """What becomes of the requests of a batch that ends before they were answered."""

    status: RequestStatus
    code: str
    message: str


_CANCELLED = _Ending(
    RequestStatus.CANCELLED, "batch_cancelled", "The batch was cancelled before this request was answered."
)
_EXPIRED = _Ending(
    RequestStatus.EXPIRED, "batch_expired", "The batch's deadline passed before this request was answered."
)
# Of a request that is no line of a batch: who asked knows of none.
_TIMED_OUT = _Ending(
    RequestStatus.EXPIRED,
    "request_timed_out",
    "The time that the caller allowed was over before the request was answered.",
)


def _ending(batch: Any) -> _Ending | None:
    """None: the batch is at work, or ends in another way."""
    if batch.status == BatchStatus.CANCELLING:
        return _CANCELLED
    if batch.status != BatchStatus.FINALIZING or batch.expired_at is None:
        return None
    return _TIMED_OUT if batch.is_interactive else _EXPIRED


def _end_unanswered(connection: Connection, rows: Sequence[Any], ending: _Ending, now: float) -> None:
    """Give locked rows (id, batch_id, attempt) of an ending batch their last status and their result."""
    for part in _parts(rows):
        connection.execute(_END, {"ids": sorted(row.id for row in part), "new_status": ending.status.value})
        _put_results(
            connection,
            [
                {
                    "request_id": row.id,
                    "batch_id": row.batch_id,
                    "status_code": None,
                    "response": None,
                    "error_code": ending.code,
                    "error_message": ending.message,
                    "finished_at": now,
                }
                for row in part
            ],
            replaced=[row.id for row in part if row.attempt],
        )


def _give_back(connection: Connection, rows: Sequence[Any], now: float) -> list[int]:
    """End the attempts of locked running rows without a result and without suspicion: running -> pending."""
    if not rows:
        return []
    insert_rows(connection, ATTEMPTS, [_attempt(row, AttemptOutcome.RELEASED, row.worker, now) for row in rows])
    ids = [row.id for row in rows]
    _return(connection, ids, not_before=None)
    return ids


def _return(connection: Connection, ids: Sequence[int], *, not_before: float | None) -> None:
    """running -> pending, of rows that this transaction has locked."""
    for part in _parts(sorted(ids)):
        connection.execute(_GIVE_BACK, {"ids": part, "not_before": not_before})


def _abandon(
    connection: Connection,
    rows: Sequence[Any],
    held: Mapping[str, int],
    now: float,
    *,
    exit_code: int | None,
    limits: RetryLimits,
) -> list[int]:
    """End the attempts of locked running rows whose worker is gone. held: worker -> requests it had in its hands.

    Returns their ids, poison prompts included.
    """
    if not rows:
        return []
    mates = {worker: count - 1 for worker, count in held.items()}
    insert_rows(
        connection,
        ATTEMPTS,
        [
            {
                **_attempt(row, AttemptOutcome.ABANDONED, row.worker, now),
                "exit_code": exit_code,
                "batch_mates": mates.get(row.worker),
            }
            for row in rows
        ],
    )
    deaths = _deaths(connection, [row.id for row in rows])
    by_pause: dict[float | None, list[int]] = defaultdict(list)
    by_group: dict[int, list[int]] = defaultdict(list)
    poisonous: list[Any] = []
    for row in rows:
        sentence = judge(deaths[row.id], row.isolation, limits=limits)
        if sentence.is_poison:
            poisonous.append(row)
            continue
        if sentence.isolation is None:
            by_pause[None].append(row.id)
        else:
            by_group[sentence.isolation].append(row.id)
            by_pause[now + sentence.pause_s].append(row.id)
    for not_before, ids in by_pause.items():
        _return(connection, ids, not_before=not_before)
    for group_size, ids in by_group.items():
        for part in _parts(sorted(ids)):
            connection.execute(_ISOLATE, {"ids": part, "group_size": group_size})
    if poisonous:
        _end_poison(connection, poisonous, deaths, now)
    return [row.id for row in rows]


def _end_poison(connection: Connection, rows: Sequence[Any], deaths: Mapping[int, Sequence[Death]], now: float) -> None:
    """running -> failed, with the evidence as the message; the attempts are written already."""
    results = []
    lines: dict[int, list[int]] = defaultdict(list)
    for row in rows:
        alone = [death for death in deaths[row.id] if death.batch_mates == 0]
        message = (
            f"this request ended {len(alone)} workers while each ran nothing else: "
            + "; ".join(_testimony(death) for death in alone)
            + "; it is not run again"
        )
        lines[row.batch_id].append(row.line)
        results.append(
            {
                "request_id": row.id,
                "batch_id": row.batch_id,
                "status_code": 500,
                "response": _error_body(message, "server_error", None, POISON_PROMPT),
                "error_code": POISON_PROMPT,
                "error_message": message,
                "finished_at": now,
            }
        )
    connection.execute(
        _END, {"ids": sorted(result["request_id"] for result in results), "new_status": RequestStatus.FAILED.value}
    )
    _put_results(connection, results, replaced=[result["request_id"] for result in results])
    for batch_id in sorted(lines):
        _count(connection, batch_id, {"failed_requests": len(lines[batch_id])})
        answer_duplicates(connection, batch_id, now, lines=lines[batch_id])
    end_interactive(connection, lines, now)


def _testimony(death: Death) -> str:
    at = datetime.fromtimestamp(death.at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    how = "lease ran out" if death.exit_code is None else f"exit code {death.exit_code}"
    return f"{death.worker} at {at} ({how})"


def _deaths(connection: Connection, ids: Sequence[int]) -> dict[int, list[Death]]:
    """The abandoned attempts of these requests since their batch was last retried, in order."""
    found: dict[int, list[Death]] = defaultdict(list)
    for part in _parts(sorted(ids)):
        for row in connection.execute(_ENDED_BADLY, {"ids": part, "outcome": AttemptOutcome.ABANDONED.value}):
            found[row.request_id].append(Death(row.worker, row.finished_at, row.batch_mates, row.exit_code))
    return found


def _failures(connection: Connection, ids: Sequence[int]) -> Counter[int]:
    """How many failed attempts each of these requests has, since its batch was last retried."""
    return Counter(
        row.request_id
        for part in _parts(sorted(ids))
        for row in connection.execute(_ENDED_BADLY, {"ids": part, "outcome": AttemptOutcome.FAILED.value})
    )


def _serve(connection: Connection, served: Sequence[tuple[Any, Any]], served_from: ServedFrom, now: float) -> int:
    """Give locked pending rows the results of others: (row, source with `source_id`, `source_status` and a result)."""
    if not served:
        return 0
    attempts: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    by_status: dict[str, list[int]] = defaultdict(list)
    sums: dict[int, Counter[str]] = defaultdict(Counter)
    for row, source in served:
        by_status[source.source_status].append(row.id)
        sums[row.batch_id][f"{source.source_status}_requests"] += 1
        attempts.append(
            {
                "request_id": row.id,
                "number": row.attempt + 1,
                "outcome": source.source_status,
                "worker": NO_WORKER,
                "error_code": source.error_code,
                "error_message": source.error_message,
                "served_from": served_from.value,
                "source_request_id": source.source_id,
                "claimed_at": now,
                "finished_at": now,
            }
        )
        results.append(
            {
                "request_id": row.id,
                "batch_id": row.batch_id,
                "status_code": source.status_code,
                "response": source.response,
                "error_code": source.error_code,
                "error_message": source.error_message,
                "finished_at": now,
            }
        )
    for status, ids in by_status.items():
        for part in _parts(sorted(ids)):
            connection.execute(_SERVE, {"ids": part, "new_status": status})
    insert_rows(connection, ATTEMPTS, attempts)
    _put_results(connection, results, replaced=[row.id for row, _ in served if row.attempt])
    for batch_id in sorted(sums):
        _count(connection, batch_id, sums[batch_id])
    return len(served)


def _put_results(connection: Connection, rows: Sequence[Mapping[str, Any]], replaced: Sequence[int]) -> None:
    """Write results. replaced: requests that may have an old one; it goes, so that followers see the new one as new."""
    if replaced:
        connection.execute(_DROP_RESULTS, {"ids": sorted(replaced)})
    insert_rows(connection, RESULTS, rows)


def _attempt(
    row: Any, status: AttemptOutcome, worker: str, now: float, outcome: RequestOutcome | None = None
) -> dict[str, Any]:
    """The columns of an attempt at a locked running row. outcome: what was measured of it, if anything."""
    values: dict[str, Any] = {
        "request_id": row.id,
        "number": row.attempt,
        "outcome": status.value,
        "worker": worker,
        "queued_at": row.queued_at,
        "claimed_at": row.claimed_at,
        "finished_at": now,
    }
    if outcome is None:
        return values
    record = outcome.record
    return values | {
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
        "queue_s": record.queue_s,
        "tokenize_s": record.tokenize_s,
        "wait_s": record.wait_s,
        "prefill_s": record.prefill_s,
        "time_to_first_token_s": record.time_to_first_token_s,
        "decode_s": record.decode_s,
        "total_s": record.total_s,
        "served_from": None if record.served_from is None else record.served_from.value,
        "source_request_id": record.source_request_id,
    }


def _add_file(connection: Connection, file: NewFile | None, batch: Any, purpose: FilePurpose, now: float) -> int | None:
    if file is None:
        return None
    lifetime_s = batch.output_expires_after_s
    values = {
        **asdict(file),
        "tenant": batch.tenant,
        "purpose": purpose.value,
        "created_at": now,
        "expires_at": None if lifetime_s is None else now + lifetime_s,
        "api_key_id": batch.api_key_id,
    }
    return int(connection.execute(insert(FILES).returning(FILES.c.id), values).scalar_one())


def _count(
    connection: Connection, batch_id: int, added: Mapping[str, int], *, only_in: BatchStatus | None = None
) -> bool:
    """Raise a batch's counters. only_in: the status that alone allows it. Returns whether the batch is interactive."""
    amounts = {column: amount for column, amount in added.items() if amount}
    values = {"batch": batch_id, **{f"more_{column}": amount for column, amount in amounts.items()}}
    counted = run(connection, _counting(tuple(sorted(amounts)), only_in), values)
    if not counted:
        raise IllegalMove(f"batch {batch_id} takes no more lines: it is {_batch_status(connection, batch_id)}")
    return bool(counted[0].is_interactive)


@lru_cache(maxsize=128)
def _counting(columns: tuple[str, ...], only_in: BatchStatus | None) -> Any:
    """The statement that raises these counters: putting it together costs more than running it."""
    statement = update(BATCHES).where(BATCHES.c.id == bindparam("batch"))
    if only_in is not None:
        statement = statement.where(BATCHES.c.status == only_in.value)
    more = {column: BATCHES.c[column] + bindparam(f"more_{column}") for column in columns}
    return statement.values(more).returning(BATCHES.c.is_interactive)


def _move_batch(
    connection: Connection, batch_id: int, to: BatchStatus, *, since: BatchStatus | None = None, **values: Any
) -> None:
    """since: the one status to come from, where BATCH_MOVES allows several."""
    allowed = BATCH_MOVES[to] if since is None else (since,)
    assert set(allowed) <= set(BATCH_MOVES[to])
    moved = connection.execute(
        update(BATCHES)
        .where(BATCHES.c.id == batch_id, BATCHES.c.status.in_([status.value for status in allowed]))
        .values(status=to.value, **values)
    )
    if _rowcount(moved) != 1:
        raise IllegalMove(f"batch {batch_id} is {_batch_status(connection, batch_id)}: it cannot become {to}")


def _batch_status(connection: Connection, batch_id: int) -> BatchStatus:
    status = connection.execute(select(BATCHES.c.status).where(BATCHES.c.id == batch_id)).scalar_one_or_none()
    if status is None:
        raise IllegalMove(f"there is no batch {batch_id}")
    return BatchStatus(status)


def _batch_for_update(connection: Connection, batch_id: int) -> Any:
    row = connection.execute(select(BATCHES).where(BATCHES.c.id == batch_id).with_for_update()).first()
    if row is None:
        raise IllegalMove(f"there is no batch {batch_id}")
    return row


def has_open_requests(connection: Connection, batch_id: int, *, besides_duplicates: bool = False) -> bool:
    """Whether a request of the batch is not final; besides_duplicates: one that does not just wait for its twin."""
    kinds = (PENDING_FRESH, PENDING_DELAYED) if besides_duplicates else PENDING_KINDS
    waiting = (
        select(REQUESTS.c.id).where(kind, REQUESTS.c.batch_id == batch_id).limit(1)
        for kind in (*kinds, _is(RequestStatus.QUEUED))
    )
    # Through the partial index of what runs, which is little: `+ 0` keeps SQLite from walking through the whole batch.
    running = select(REQUESTS.c.id).where(_is(RequestStatus.RUNNING), REQUESTS.c.batch_id + 0 == batch_id).limit(1)
    return any(connection.execute(question).first() for question in (*waiting, running))


def _refusal(line: RefusedLine) -> str:
    return _error_body(line.error_message, "invalid_request_error", line.param, line.error_code)


def _error_body(message: str, kind: str, param: str | None, code: str) -> str:
    """As `jobs.protocol` writes JSON: compact, without the line separators that some readers of JSON Lines split at."""
    body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).translate(_LINE_SEPARATORS)


_LINE_SEPARATORS = {ord(character): f"\\u{ord(character):04x}" for character in "\u0085\u2028\u2029"}


def _parts(rows: Sequence[_Row]) -> list[Sequence[_Row]]:
    return [rows[start : start + STATEMENT_ROWS] for start in range(0, len(rows), STATEMENT_ROWS)]


def _rowcount(result: Any) -> int:
    count: int = result.rowcount
    assert count >= 0, "the driver did not count"
    return count
