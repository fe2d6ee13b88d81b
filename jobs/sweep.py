"""The periodic pass: overdue leases, lost and abandoned messages, cancelled, expired and finished batches, a dry queue.

Any number of processes may run it; each step is a short transaction that does nothing when it was done already. What
one pass leaves, the next one takes up. Where no batch is open there is nothing to look after, and a pass is one read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import structlog
from celery import Celery

from jobs.dispatch import take_back, top_up
from jobs.finalize import Finalizer, finalize_batches
from jobs.queue import CLAIMED_WITHIN_S, QueueError, used_places, waiting_ids, was_emptied
from jobs.settings import Settings, WorkerSettings
from storage import queries, transitions
from storage.database import Database
from storage.models import BatchStatus
from storage.queries import BatchRow
from storage.retries import RetryLimits

# A request in the queue for this long is looked for there. Far longer than a message takes from commit to Redis or
# from Redis to a claim, so that none is taken for lost while it is on its way.
LOST_AFTER_S = 30.0
# By how much the clocks of hosts may differ when a message's receipt is compared with a worker's death.
CLOCKS_DIFFER_S = 1.0
# Rows for one step, so that no transaction holds the write lock for long.
STEP_ROWS = 2000
# Steps of one kind in a pass, a second or so: a million cancelled rows must not keep the queue from being filled.
MOST_STEPS = 25

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Swept:
    """What one pass did: requests, except where it says batches. ended: cancelled or expired. taken_back: from the own
    queues of workers that are no more.

    finished_batches: those it published itself.
    """

    expired_leases: int = 0
    lost_messages: int = 0
    ended: int = 0
    answered_duplicates: int = 0
    expired_batches: int = 0
    finished_batches: int = 0
    queued: int = 0
    taken_back: int = 0


def retry_limits(settings: WorkerSettings) -> RetryLimits:
    """When a request that goes wrong is tried again, and when no more."""
    return RetryLimits(max_attempts=settings.max_attempts, backoff_s=settings.retry_backoff_s)


def sweep(database: Database, app: Celery, settings: Settings, now: float, finalizer: Finalizer | None = None) -> Swept:
    """Make one pass. A queue that cannot be reached is logged and left for the next one; the database's part is done.

    finalizer: publishes finished batches by itself; without one the pass ends with that.

    Raises StorageError when the database cannot be reached.
    """
    with database.read() as connection:
        batches = queries.unfinished_batches(connection)
    if not batches:
        return Swept()
    expired = _expire_leases(database, retry_limits(settings.worker), now)
    expired_batches = _expire_batches(database, batches, now)
    ended = _end_requests(database, now)
    _continue_retries(database, batches)
    answered = _answer_duplicates(database, batches, now)
    _finish(database, now)
    lost = queued = taken_back = 0
    try:
        taken_back = _take_back_abandoned(database, app, batches, now)
        lost = _find_lost(database, app, now, leases_ran_out=expired > 0)
        queued = top_up(database, app, settings.queue, now)
    except QueueError as error:
        log.warning("queue_not_reached", code=error.code, reason=error.message)
    finished: list[int] = []
    if finalizer is None:
        finished = finalize_batches(database, settings.files_dir, now)  # last: a million lines take a while
    else:
        finalizer.begin(now)
    return Swept(expired, lost, ended, answered, expired_batches, len(finished), queued, taken_back)


def _expire_leases(database: Database, limits: RetryLimits, now: float) -> int:
    with database.read() as connection:
        overdue = queries.overdue_leases(connection, now)
    expired = 0
    for _ in range(min(MOST_STEPS, -(-overdue // STEP_ROWS))):
        with database.write() as connection:
            expired += len(transitions.expire_leases(connection, now, STEP_ROWS, limits=limits))
    if expired:
        log.warning("leases_expired", requests=expired)
    return expired


def _expire_batches(database: Database, batches: Sequence[BatchRow], now: float) -> int:
    if not any(
        batch.status is BatchStatus.IN_PROGRESS and batch.expires_at is not None and batch.expires_at <= now
        for batch in batches
    ):
        return 0
    with database.write() as connection:
        expired = transitions.expire_batches(connection, now)
    for batch_id in expired:
        log.warning("batch_expired", batch=batch_id)
    return len(expired)


def _end_requests(database: Database, now: float) -> int:
    """What waits of cancelled and expired batches gets its result."""
    with database.read() as connection:
        ending = [
            batch.id
            for batch in queries.unfinished_batches(connection)
            if batch.status is BatchStatus.CANCELLING
            or (batch.status is BatchStatus.FINALIZING and batch.expired_at is not None)
        ]
        ending = [batch_id for batch_id in ending if queries.has_waiting(connection, batch_id)]
    ended = 0
    for batch_id in ending:
        for _ in range(MOST_STEPS):
            with database.write() as connection:
                moved = transitions.end_requests(connection, batch_id, now, STEP_ROWS)
            ended += moved
            if moved < STEP_ROWS:
                break
    return ended


def _continue_retries(database: Database, batches: Sequence[BatchRow]) -> None:
    """What whoever asked for a retry did not come to."""
    for batch in batches:
        if batch.retry_from_line is None:
            continue
        for _ in range(MOST_STEPS):
            with database.write() as connection:
                if transitions.continue_retry(connection, batch.id) is None:
                    break


def _answer_duplicates(database: Database, batches: Sequence[BatchRow], now: float) -> int:
    """What identical requests still wait for when nothing else of their batch is open."""
    answered = 0
    for batch in batches:
        if batch.status is not BatchStatus.IN_PROGRESS:
            continue
        with database.read() as connection:
            if not queries.has_stalled_duplicates(connection, batch.id):
                continue
        for _ in range(MOST_STEPS):
            with database.write() as connection:
                moved = transitions.answer_duplicates(connection, batch.id, now, limit=STEP_ROWS)
            answered += moved
            if moved < STEP_ROWS:
                break
    return answered


def _finish(database: Database, now: float) -> None:
    with database.read() as connection:
        if not queries.has_finishable_batch(connection):
            return
    with database.write() as connection:
        transitions.finish_batches(connection, now)


def _take_back_abandoned(database: Database, app: Celery, batches: Sequence[BatchRow], now: float) -> int:
    """What waits in the own queues of places where no worker is (any more) goes back to pending.

    A worker that is just starting there gets other chunks; that costs a prefix, and waiting for it could cost more.
    """
    used = used_places(app, sorted({batch.model for batch in batches}))
    if not used:
        return 0
    with database.read() as connection:
        live = {(worker.model, worker.place) for worker in queries.live_workers(connection, now)}
    return take_back(
        database,
        app,
        {model: [place for place in places if (model, place) not in live] for model, places in used.items()},
    )


def _find_lost(database: Database, app: Celery, now: float, *, leases_ran_out: bool) -> int:
    """Requests that are marked as queued but in no message go back to pending, to be published anew.

    Messages in workers' hands count as present: looking at the lists alone would send those again and again. After a
    worker's death those that were received before it count no more, as they may have been in its hands; after a loss
    of all that Redis had, nothing is waited for. One that was on its way after all then comes twice, which is no harm.
    """
    with database.read() as connection:
        died_at = now if leases_ran_out else queries.last_death_at(connection, now - LOST_AFTER_S)
    sent_before, held_s = now - LOST_AFTER_S, CLAIMED_WITHIN_S
    if died_at is not None:
        sent_before, held_s = died_at, min(held_s, max(0.0, now - died_at - CLOCKS_DIFFER_S))
    if was_emptied(app):
        sent_before = math.inf  # not `now`: a server that comes back late was asked later than that
    with database.read() as connection:
        waiting = queries.queued_before(connection, sent_before, STEP_ROWS)
    if not waiting:
        return 0
    present = waiting_ids(app, sorted({model for _, model in waiting}), held_s=held_s)
    if present is None:
        return 0
    lost = [request_id for request_id, _ in waiting if request_id not in present]
    if not lost:
        return 0
    with database.write() as connection:
        returned = transitions.unqueue_requests(connection, lost)
    if returned:  # none: they were taken meanwhile
        log.warning("messages_lost", requests=returned)
    return returned
