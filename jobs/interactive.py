"""A request that somebody waits for: asked, answered, given up.

It is a batch of one request on the interactive queue, so that it is claimed, fenced, retried and recorded as any other.
It has a deadline, so that nothing runs on for a caller who died, and no files: the transaction that records its answer
ends its batch. Whoever waits reads the answer from the database; a worker's message that it is there (`reply_to`) only
spares the polling.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass

import structlog
from celery import Celery

from jobs.protocol import Body, Endpoint
from jobs.queue import Chunk, QueueError, publish_chunks, queue_depth, tell_given_up
from jobs.submit import estimate_prompt_tokens, estimate_tokens
from storage import queries, transitions
from storage.database import Connection, Database
from storage.errors import InvalidRequest
from storage.models import BatchStatus, Door
from storage.queries import BatchRow
from storage.transitions import NewBatch, NewRequest

# A request in the queue for so long is looked for there, if its queue is empty: its message is lost.
LOST_AFTER_S = 2.0
# Keys of single calls and of whole batches may be the same words and are kept in one column.
KEY_PREFIX = "interactive:"

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was handed in. public_id: of its batch. is_new: False when its idempotency key was known."""

    batch_id: int
    request_id: int
    public_id: str
    model: str
    is_new: bool = True


@dataclass(frozen=True, slots=True)
class Answer:
    """How a request ended, as its caller is told. status_code: None: it was never executed; error_code says why."""

    request_id: int
    status_code: int | None
    response: str | None
    error_code: str | None


def write(
    database: Database,
    body: Body,
    *,
    endpoint: Endpoint,
    model: str,
    tenant: str,
    door: Door,
    timeout_s: float,
    api_key_id: int | None = None,
    custom_id: str | None = None,
    idempotency_key: str | None = None,
    reply_to: str | None = None,
    is_known_tenant: bool = False,
    check: Callable[[Connection], None] | None = None,
) -> Asked:
    """Write a request, committed; follow with `send` if it is new. body: checked already, in its normal form.

    timeout_s: it expires after so long. reply_to: a Redis channel on which its worker tells how it goes.
    is_known_tenant: the tenant has a row already. check: called in the transaction that writes the request, before
    anything is written; what it raises refuses the request.
    Raises InvalidRequest `idempotency_key_reused`, StorageError.
    """
    text = body.to_json()
    key = None if idempotency_key is None else KEY_PREFIX + idempotency_key
    fingerprint = hashlib.sha256(f"{endpoint}\n{model}\n{text}".encode(errors="surrogatepass")).hexdigest()
    request = NewRequest(
        line=1,
        custom_id=custom_id,
        body=text,
        estimated_tokens=estimate_tokens(text),
        estimated_prompt_tokens=estimate_prompt_tokens(text),
    )
    now = database.now()
    batch = NewBatch(
        public_id=f"batch_{uuid.uuid4().hex}",
        fingerprint=fingerprint,
        endpoint=endpoint.value,
        model=model,
        tenant=tenant,
        expires_at=now + timeout_s,
        idempotency_key=key,
        is_interactive=True,
        door=door,
        api_key_id=api_key_id,
        reply_to=reply_to,
    )
    with database.write() as connection:
        if key is not None:
            transitions.lock_tenant(connection, tenant)  # of two calls with one key the second finds the first
            known = queries.find_batch_by_idempotency_key(connection, key, tenant)
            if known is not None and is_worth_repeating(connection, known):
                return _again(connection, known, fingerprint)
            if known is not None:
                transitions.release_idempotency_key(connection, known.id)
        if check is not None:
            check(connection)
        batch_id, request_id = transitions.create_interactive(
            connection, batch, request, now, is_known_tenant=is_known_tenant
        )
    return Asked(batch_id, request_id, batch.public_id, model)


def is_worth_repeating(connection: Connection, batch: BatchRow) -> bool:
    """Whether a second call with the same key is given the first one's answer: it is on its way, or it stands.

    What was cancelled, ran out of time or failed on our side is done anew: that is why the caller asks again.
    """
    if not batch.is_final:
        return True
    if batch.status is not BatchStatus.COMPLETED:
        return False
    results = queries.results_of(connection, queries.request_ids(connection, batch.id))
    return any(result.status_code is not None and result.status_code < 500 for result in results)


def send(database: Database, celery: Celery, asked: Collection[Asked]) -> bool:
    """Publish written requests. False: the queue is away; they are kept, and sent once it is back."""
    ids = [each.request_id for each in asked]
    try:
        publish_chunks(celery, [Chunk(each.model, (each.request_id,), is_interactive=True) for each in asked])
    except QueueError as error:
        log.warning("request_not_sent", requests=len(ids), code=error.code, reason=error.message)
        database.retry(lambda connection: transitions.unqueue_requests(connection, ids))
        return False
    return True


def send_again(database: Database, celery: Celery, request_ids: Collection[int]) -> int:
    """Publish requests that no message stands for: a worker that died gave them back, or the queue lost them.

    Whoever waits for answers calls it now and then, so that they need not wait for the next sweep. Returns how many.
    """
    now = database.now()
    with database.read() as connection:
        stalled = queries.stalled_requests(connection, request_ids, now, now - LOST_AFTER_S)
    if not stalled:
        return 0
    try:
        is_empty = {model: not queue_depth(celery, model).interactive for model in {each.model for each in stalled}}
        due = [each for each in stalled if each.is_pending or is_empty[each.model]]
        pending = [each.id for each in due if each.is_pending]
        if pending:
            database.retry(lambda connection: transitions.queue_requests(connection, pending, now))
        publish_chunks(celery, [Chunk(each.model, (each.id,), is_interactive=True) for each in due])
    except QueueError as error:
        log.warning("request_not_sent", requests=len(stalled), code=error.code, reason=error.message)
        return 0
    return len(due)


def answers_of(database: Database, request_ids: Collection[int]) -> list[Answer]:
    """Of these requests, how those ended that are not open."""
    with database.read() as connection:
        rows = queries.results_of(connection, request_ids)
    return [Answer(row.request_id, row.status_code, row.response, row.error_code) for row in rows]


def give_up(database: Database, celery: Celery, request_id: int, *, has_expired: bool = False) -> bool:
    """End a request for whose answer nobody waits any more, whether it waits or runs. False: it had ended before.

    has_expired: its time was over, rather than its caller gone.
    """
    given_up = database.retry(
        lambda connection: transitions.give_up_request(connection, request_id, database.now(), has_expired=has_expired)
    )
    if given_up is None:
        return False
    if given_up.worker is not None:
        try:
            tell_given_up(celery, given_up.worker, [request_id])
        except QueueError as error:  # its worker finds out when it renews the lease
            log.warning("worker_not_told", code=error.code, reason=error.message)
    return True


def _again(connection: Connection, known: BatchRow, fingerprint: str) -> Asked:
    if known.fingerprint != fingerprint:
        raise InvalidRequest(
            "this Idempotency-Key stands for another request; give each request a key of its own",
            code="idempotency_key_reused",
        )
    (request_id,) = queries.request_ids(connection, known.id)
    return Asked(known.id, request_id, known.public_id, known.model, is_new=False)
