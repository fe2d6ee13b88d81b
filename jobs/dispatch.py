"""Which requests go to the queue next, and how many may wait there.

The queue holds a bounded window for each model, about twice what its live workers run at once: a batch of millions
of lines never fills Redis, and cancelling or reprioritising acts at once. `plan_chunks` decides, over plain values;
`top_up` carries it out. Any process may call `top_up` at any time; it costs two or three small reads when there is
nothing to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import structlog
from celery import Celery

from jobs.queue import Chunk, QueueError, publish_chunks
from jobs.settings import QueueSettings
from storage import queries, transitions
from storage.database import DISPATCH_LOCK, Connection, Database
from storage.queries import PendingRequest

# The window holds this many times what the live workers run at once: one in their hands' reach, one on its way.
WINDOW_PER_SLOT = 2
# A window for workers that are still starting, and for small ones: a few chunks.
LEAST_WINDOW = 256
# Near the end of a job chunks shrink so that all workers share the rest, but not below this: a message has its price.
LEAST_CHUNK = 4

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Fleet:
    """What the live workers of a model run at once. workers 0: none has come up yet."""

    workers: int
    slots: int


def window(fleet: Fleet) -> int:
    """Requests of a model that may wait in the queue."""
    return max(LEAST_WINDOW, WINDOW_PER_SLOT * fleet.slots)


def wants_more(queued: int, fleet: Fleet) -> bool:
    """Whether the queue is worth a top-up: below half its window, so that top-ups come seldom and in bulk."""
    return queued <= window(fleet) // 2


def plan_chunks(
    pending: Sequence[PendingRequest], *, fleet: Fleet, chunk_size: int, remaining: int | None = None
) -> list[tuple[int, ...]]:
    """Cut pending requests into chunks: prompts with one prefix together, in input order.

    remaining: requests that the job still has, these included. When that is less than two full chunks for each worker,
    the chunks get smaller, so that no worker idles while another has the last ones. Returns request ids.
    """
    ordered = sorted(pending, key=lambda request: (request.prefix_id is None, request.prefix_id or 0, request.line))
    left = max(remaining or 0, len(ordered))
    chunks: list[tuple[int, ...]] = []
    start = 0
    while start < len(ordered):
        size = chunk_size
        if fleet.workers > 1:
            share = -(-left // (2 * fleet.workers))
            size = max(min(LEAST_CHUNK, chunk_size), min(chunk_size, share))
        chunk = ordered[start : start + size]
        chunks.append(tuple(request.id for request in chunk))
        start += len(chunk)
        left -= len(chunk)
    return chunks


def top_up(database: Database, app: Celery, settings: QueueSettings, now: float) -> int:
    """Fill the queue's windows from the batches in progress. Returns how many requests were queued.

    Rows are marked and committed before their ids are published; when publishing fails they go back to pending, and
    QueueError is raised. A process that dies in between leaves rows for `sweep` to find.
    """
    with database.read() as connection:
        if not _hungry(connection, now):
            return 0
    chunks: list[Chunk] = []
    with database.write() as connection:
        if not database.try_lock(connection, DISPATCH_LOCK):
            return 0  # another process is at it
        for model, fleet in _hungry(connection, now).items():  # again: what was read may be old
            chunks += _queue_next(connection, model, fleet, settings.chunk_size, now)
    ids = [request_id for chunk in chunks for request_id in chunk.request_ids]
    try:
        publish_chunks(app, chunks)
    except QueueError:
        database.retry(lambda connection: transitions.unqueue_requests(connection, ids))
        raise
    if ids:
        log.debug("requests_queued", requests=len(ids), chunks=len(chunks))
    return len(ids)


def _hungry(connection: Connection, now: float) -> dict[str, Fleet]:
    """Models that have something to queue and room for it."""
    batches = queries.dispatched_batches(connection)
    if not batches:
        return {}
    fleets = _fleets(connection, now)
    queued = queries.queued_by_model(connection)
    found: dict[str, Fleet] = {}
    for batch in batches:
        fleet = fleets.get(batch.model, Fleet(0, 0))
        if (
            batch.model not in found
            and wants_more(queued.get(batch.model, 0), fleet)
            and queries.has_pending(connection, batch.id)
        ):
            found[batch.model] = fleet
    return found


def _fleets(connection: Connection, now: float) -> dict[str, Fleet]:
    fleets: dict[str, Fleet] = {}
    for worker in queries.live_workers(connection, now):
        fleet = fleets.get(worker.model, Fleet(0, 0))
        fleets[worker.model] = Fleet(fleet.workers + 1, fleet.slots + worker.max_batch_size)
    return fleets


def _queue_next(connection: Connection, model: str, fleet: Fleet, chunk_size: int, now: float) -> list[Chunk]:
    """Fill the window of one model from its batches, the most urgent first."""
    room = window(fleet) - queries.queued_by_model(connection).get(model, 0)
    chunks: list[Chunk] = []
    for batch in queries.dispatched_batches(connection):
        if room <= 0:
            break
        if batch.model != model:
            continue
        pending = queries.next_pending(connection, batch.id, room)
        if not pending:
            continue
        moved = set(transitions.queue_requests(connection, [request.id for request in pending], now))
        pending = [request for request in pending if request.id in moved]
        left = batch.total_requests - batch.completed_requests - batch.failed_requests
        remaining = left if len(pending) == room else None
        chunks += [
            Chunk(model, ids) for ids in plan_chunks(pending, fleet=fleet, chunk_size=chunk_size, remaining=remaining)
        ]
        room -= len(pending)
    return chunks
