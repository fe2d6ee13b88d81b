"""The periodic pass: overdue leases, lost messages, cancelled and finished batches, a dry queue.

Any number of processes may run it; each step is a short transaction that does nothing when it was done already. What
one pass leaves, the next one takes up.
"""

from __future__ import annotations

from dataclasses import dataclass

import structlog
from celery import Celery

from jobs.dispatch import top_up
from jobs.queue import QueueError, waiting_ids
from jobs.settings import Settings
from storage import queries, transitions
from storage.database import Database
from storage.models import BatchStatus

# A request in the queue for this long is looked for there. Far longer than a message takes from commit to Redis or
# from Redis to a claim, so that none is taken for lost while it is on its way.
LOST_AFTER_S = 30.0
# Rows for one step, so that no transaction holds the write lock for long.
STEP_ROWS = 2000
# Steps of one kind in a pass, a second or so: a million cancelled rows must not keep the queue from being filled.
MOST_STEPS = 25

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Swept:
    """What one pass did: requests, except where it says batches."""

    expired_leases: int = 0
    lost_messages: int = 0
    cancelled: int = 0
    finished_batches: int = 0
    queued: int = 0


def sweep(database: Database, app: Celery, settings: Settings, now: float) -> Swept:
    """Make one pass. A queue that cannot be reached is logged and left for the next pass; the database's part is done.

    Raises StorageError when the database cannot be reached.
    """
    expired = _expire_leases(database, now)
    cancelled = _cancel(database, now)
    finished = _finish(database, now)
    lost = queued = 0
    try:
        lost = _find_lost(database, app, now)
        queued = top_up(database, app, settings.queue, now)
    except QueueError as error:
        log.warning("queue_not_reached", code=error.code, reason=error.message)
    return Swept(expired, lost, cancelled, finished, queued)


def _expire_leases(database: Database, now: float) -> int:
    with database.read() as connection:
        overdue = queries.overdue_leases(connection, now)
    expired = 0
    for _ in range(min(MOST_STEPS, -(-overdue // STEP_ROWS))):
        with database.write() as connection:
            expired += len(transitions.expire_leases(connection, now, STEP_ROWS))
    if expired:
        log.warning("leases_expired", requests=expired)
    return expired


def _cancel(database: Database, now: float) -> int:
    with database.read() as connection:
        batches = queries.open_batches(connection, BatchStatus.CANCELLING)
    cancelled = 0
    for batch in batches:
        for _ in range(MOST_STEPS):
            with database.write() as connection:
                step = transitions.cancel_requests(connection, batch.id, now, STEP_ROWS)
            cancelled += step
            if step < STEP_ROWS:
                break
    return cancelled


def _finish(database: Database, now: float) -> int:
    with database.read() as connection:
        if not queries.finishable_batches(connection):
            return 0
    with database.write() as connection:
        finished = transitions.finish_batches(connection, now)
    for batch_id in finished:
        log.info("batch_finished", batch=batch_id)
    return len(finished)


def _find_lost(database: Database, app: Celery, now: float) -> int:
    """Requests that are marked as queued but in no message go back to pending, to be published anew.

    Messages in workers' hands count as present: looking at the lists alone would send those again and again.
    """
    with database.read() as connection:
        waiting = queries.queued_before(connection, now - LOST_AFTER_S, STEP_ROWS)
    if not waiting:
        return 0
    present = waiting_ids(app, sorted({model for _, model in waiting}))
    if present is None:
        return 0
    lost = [request_id for request_id, _ in waiting if request_id not in present]
    if not lost:
        return 0
    with database.write() as connection:
        returned = transitions.unqueue_requests(connection, lost)
    log.warning("messages_lost", requests=returned)
    return returned
