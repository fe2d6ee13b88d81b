"""Which requests go to the queue next, and how many may wait there.

The queue holds a bounded window for each model, about twice what its live workers run at once: a batch of millions
of lines never fills Redis, and cancelling, pausing or reprioritising acts at once. `choose` and `plan_chunks` decide,
over plain values; `top_up` carries it out. Any process may call `top_up` at any time; it costs two or three small reads
when there is nothing to do.

The next chunk comes from
1. an interactive batch (its requests travel alone, on a queue of their own that workers empty first),
2. else a batch in the last fifth of its time, the nearest deadline first,
3. else a batch of the highest priority,
4. else the tenant that has had the least so far, in tokens by its weight,
5. else the oldest batch. Within a batch: what comes back for another try, then prompts with one prefix together.

Where a model has several workers, prompts with one prefix go to one of them: the prefix's hash chooses among the places
of live workers (`preferred_place`), and the chunk goes to the queue that this worker empties before the shared one.
That is a preference and nothing more: only a worker's share of the window may wait in its own queue, and a worker that
has nothing else to do takes from those of the others (`workers/neighbours.py`).
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import structlog
from celery import Celery

from jobs.queue import Chunk, QueueError, empty_own_queue, publish_chunks, used_places
from jobs.settings import QueueSettings
from storage import queries, transitions
from storage.database import DISPATCH_LOCK, Connection, Database
from storage.queries import BatchRow, PendingRequest

# The window holds this many times what the live workers run at once: one in their hands' reach, one on its way.
WINDOW_PER_SLOT = 2
# Of workers that answer so fast that this is little, it holds what they answer in so many seconds.
WINDOW_S = 1.0
MOST_WINDOW = 50_000
# A chunk is worth at least so much of a worker's time, or the messages themselves would be what it spends it on. A
# worker has up to a dozen or two in its hands, which no new priority takes away: so no more. LARGEST_CHUNK bounds what
# that makes of the chunk size that is set.
CHUNK_S = 0.1
LARGEST_CHUNK = 256
# A window for workers that are still starting, and for small ones: a few chunks.
LEAST_WINDOW = 256
# Near the end of a job chunks shrink so that all workers share the rest, but not below this: a message has its price.
LEAST_CHUNK = 4
# A batch is urgent when no more than this part of its time, from submission to deadline, is left.
URGENT_PART = 0.2
# Rows of a batch that are read at once.
PAGE_ROWS = 1024

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Fleet:
    """What the live workers of a model run at once, and lately answered. workers 0: none has come up yet.

    places: where they run; several workers may name the same one.
    """

    workers: int
    slots: int
    requests_per_s: float = 0.0
    places: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A batch that has something to queue. window: how long it has from submission to deadline."""

    batch_id: int
    tenant: str
    priority: int = 0
    is_interactive: bool = False
    expires_at: float | None = None
    window_s: float | None = None


def window(fleet: Fleet) -> int:
    """Requests of a model that may wait in the queue."""
    return max(LEAST_WINDOW, WINDOW_PER_SLOT * fleet.slots, min(MOST_WINDOW, int(WINDOW_S * fleet.requests_per_s)))


def worthwhile_chunk(fleet: Fleet, chunk_size: int) -> int:
    """Requests for one message: as many as are set, or more for workers that are done with those in no time."""
    each_per_s = fleet.requests_per_s / max(1, fleet.workers)
    return max(chunk_size, min(LARGEST_CHUNK, int(CHUNK_S * each_per_s)))


def wants_more(queued: int, fleet: Fleet) -> bool:
    """Whether the queue is worth a top-up: below half its window, so that top-ups come seldom and in bulk."""
    return queued <= window(fleet) // 2


def is_urgent(candidate: Candidate, now: float) -> bool:
    """Whether a batch's deadline is so near that it goes before others."""
    if candidate.expires_at is None or candidate.window_s is None:
        return False
    return candidate.expires_at - now <= URGENT_PART * candidate.window_s


def choose(candidates: Sequence[Candidate], share_used: Mapping[str, float], now: float) -> Candidate:
    """The batch that the next chunk is taken from. share_used: tenant -> tokens it has had, each by its weight."""

    def rank(candidate: Candidate) -> tuple[bool, float, int, float, int]:
        deadline = candidate.expires_at if is_urgent(candidate, now) else None
        return (
            not candidate.is_interactive,
            float("inf") if deadline is None else deadline,
            -candidate.priority,
            share_used.get(candidate.tenant, 0.0),
            candidate.batch_id,
        )

    return min(candidates, key=rank)


def start_shares(share_used: Mapping[str, float], active: Sequence[str], in_queue: Sequence[str]) -> dict[str, float]:
    """What tenants have had as they enter a round: who comes back after a pause has saved nothing up.

    active: tenants that have something to queue. in_queue: those of them that have something in the queue already. The
    newcomers start level with the one of these that has had least; with nobody there, all start level.
    """
    used = {tenant: share_used.get(tenant, 0.0) for tenant in active}
    floor = min((used[tenant] for tenant in in_queue), default=max(used.values(), default=0.0))
    return {tenant: max(used[tenant], floor) for tenant in active}


def preferred_place(prefix_id: int | None, places: Collection[str]) -> str | None:
    """Where prompts with this prefix are best run; None: anywhere.

    Rendezvous hashing: the place whose hash with the prefix is the greatest. It needs no memory, every process comes to
    the same answer, and when a worker goes only its own prefixes move.
    """
    if prefix_id is None or len(places) < 2:
        return None
    return max(places, key=lambda place: hashlib.blake2b(f"{prefix_id} {place}".encode(), digest_size=8).digest())


def chunk_place(chunk: Sequence[PendingRequest], places: Collection[str]) -> str | None:
    """Where a planned chunk is best run; None: anywhere, as is one in isolation, which is to meet another worker."""
    return None if chunk[0].isolation is not None else preferred_place(chunk[0].prefix_id, places)


def most_in_own_queue(fleet: Fleet, chunk_size: int) -> int:
    """Messages that may wait in one worker's own queue: its share of the window, in chunks of full size.

    Near the end of a job chunks are smaller, and so more of it lies where every worker takes it from.
    """
    return max(1, window(fleet) // (max(1, fleet.workers) * chunk_size))


def place_chunks(chunks: Iterable[Chunk], waiting: Mapping[str, int], fleet: Fleet, chunk_size: int) -> list[Chunk]:
    """Send chunks to the shared queue where the worker that they are for has enough waiting in its own.

    chunks: of one model. waiting: place -> messages in its own queue.
    """
    most = most_in_own_queue(fleet, chunk_size)
    waits = Counter(waiting)
    placed = []
    for chunk in chunks:
        if chunk.place is not None and waits[chunk.place] >= most:
            chunk = replace(chunk, place=None)
        if chunk.place is not None:
            waits[chunk.place] += 1
        placed.append(chunk)
    return placed


def plan_chunks(
    pending: Sequence[PendingRequest],
    *,
    fleet: Fleet,
    chunk_size: int,
    chunk_tokens: int | None = None,
    remaining: int | None = None,
) -> list[tuple[PendingRequest, ...]]:
    """Cut pending requests into chunks: prompts with one prefix together, in input order.

    Prompts that are best run in different places (`fleet.places`) are in different chunks, whose order is that of their
    first prompts; a chunk may have several prefixes of one place.
    A chunk has at most `chunk_size` requests and, from two on, at most `chunk_tokens` estimated tokens.
    remaining: requests that the job still has, these included. When that is less than two full chunks for each worker,
    the chunks get smaller, so that no worker idles while another has the last ones.
    Requests in isolation come first, in groups no larger than their isolation, never with others.
    """
    isolated = sorted(
        (request for request in pending if request.isolation is not None),
        key=lambda request: (-(request.isolation or 0), request.id),
    )
    free = sorted(
        (request for request in pending if request.isolation is None),
        key=lambda request: (request.prefix_id is None, request.prefix_id or 0, request.line),
    )
    left = max(remaining or 0, len(pending))
    chunks: list[tuple[PendingRequest, ...]] = []
    start = 0
    while start < len(isolated):
        size = isolated[start].isolation or 1
        while any((request.isolation or 1) < size for request in isolated[start : start + size]):
            size -= 1
        chunks.append(_fitting(isolated, start, min(size, chunk_size), chunk_tokens))
        start += len(chunks[-1])
        left -= len(chunks[-1])
    position = {request.id: number for number, request in enumerate(free)}
    lines = _by_place(free, fleet.places)
    while lines:
        line = min(lines, key=lambda line: position[line[0].id])
        size = chunk_size
        if fleet.workers > 1:
            share = -(-left // (2 * fleet.workers))
            size = max(min(LEAST_CHUNK, chunk_size), min(chunk_size, share))
        chunks.append(_fitting(line, 0, size, chunk_tokens))
        del line[: len(chunks[-1])]
        left -= len(chunks[-1])
        lines = [line for line in lines if line]
    return chunks


def _by_place(requests: Sequence[PendingRequest], places: Collection[str]) -> list[list[PendingRequest]]:
    """Requests in the order of their prefixes, parted by where they are best run."""
    found: dict[str | None, list[PendingRequest]] = defaultdict(list)
    for prefix_id, alike in groupby(requests, key=lambda request: request.prefix_id):
        found[preferred_place(prefix_id, places)].extend(alike)
    return list(found.values())


def _fitting(
    requests: Sequence[PendingRequest], start: int, size: int, chunk_tokens: int | None
) -> tuple[PendingRequest, ...]:
    """From `start` on as many as `size` and `chunk_tokens` allow, at least one."""
    if chunk_tokens is None:
        return tuple(requests[start : start + size])
    end, tokens = start, 0
    while end < len(requests) and end - start < size:
        tokens += requests[end].estimated_tokens
        if tokens > chunk_tokens and end > start:
            break
        end += 1
    return tuple(requests[start:end])


def top_up(database: Database, app: Celery, settings: QueueSettings, now: float) -> int:
    """Fill the queue's windows from the batches in progress. Returns how many requests were queued.

    Rows are marked and committed before their ids are published; when publishing fails they go back to pending, and
    QueueError is raised. A process that dies in between leaves rows for `sweep` to find.
    """
    with database.read() as connection:
        if not _hungry(connection, now):
            return 0
    chunks: list[Chunk] = []
    fleets: dict[str, Fleet] = {}
    with database.write() as connection:
        if not database.try_lock(connection, DISPATCH_LOCK):
            return 0  # another process is at it
        for (model, is_interactive), hunger in _hungry(connection, now).items():  # again: what was read may be old
            chunks += _queue_next(connection, model, is_interactive, hunger, settings, now)
            fleets[model] = hunger.fleet
    ids = [request_id for chunk in chunks for request_id in chunk.request_ids]
    try:
        publish_chunks(app, _within_bounds(app, chunks, fleets, settings))
    except QueueError:
        database.retry(lambda connection: transitions.unqueue_requests(connection, ids))
        raise
    if ids:
        log.debug("requests_queued", requests=len(ids), chunks=len(chunks))
    return len(ids)


def take_back(database: Database, app: Celery, abandoned: Mapping[str, Collection[str]]) -> int:
    """Return what waits for places without a worker to pending, to be queued for others. Returns how many requests.

    abandoned: model -> places. Their messages are taken out of the queue first: who dies before the rows are changed
    leaves what looks like lost messages, which it is. Raises QueueError.
    """
    ids = [
        request_id
        for model, places in sorted(abandoned.items())
        for place in sorted(places)
        for request_id in empty_own_queue(app, model, place)
    ]
    if not ids:
        return 0
    taken = database.retry(lambda connection: transitions.unqueue_requests(connection, ids))
    if taken:  # none: they were void
        log.info("requests_taken_back", requests=taken)
    return taken


def _within_bounds(
    app: Celery, chunks: Sequence[Chunk], fleets: Mapping[str, Fleet], settings: QueueSettings
) -> list[Chunk]:
    """The chunks, with those in the shared queue for which there is too much in a worker's own. Raises QueueError."""
    models = sorted({chunk.model for chunk in chunks if chunk.place is not None})
    if not models:
        return list(chunks)
    waiting = used_places(app, models)
    placed = [chunk for chunk in chunks if chunk.model not in models]
    for model in models:
        ours = [chunk for chunk in chunks if chunk.model == model]
        size = worthwhile_chunk(fleets[model], settings.chunk_size)
        placed += place_chunks(ours, waiting.get(model, {}), fleets[model], size)
    return placed


@dataclass(frozen=True, slots=True)
class _Hunger:
    """A window with room, and the batches that can fill it."""

    fleet: Fleet
    room: int
    batches: tuple[BatchRow, ...]


def _hungry(connection: Connection, now: float) -> dict[tuple[str, bool], _Hunger]:
    """(model, is interactive) -> what to do, where something can be queued and there is room for it."""
    batches = [batch for batch in queries.batches_at_work(connection, now) if batch.remaining_requests > 0]
    if not batches:
        return {}
    fleets = _fleets(connection, now)
    queued = queries.queued_counts(connection)
    found: dict[tuple[str, bool], _Hunger] = {}
    for key in sorted({(batch.model, batch.is_interactive) for batch in batches}):
        fleet = fleets.get(key[0], Fleet(0, 0))
        if not wants_more(queued.get(key, 0), fleet):
            continue
        having = tuple(
            batch
            for batch in batches
            if (batch.model, batch.is_interactive) == key and queries.has_pending(connection, batch.id, now)
        )
        if having:
            found[key] = _Hunger(fleet, window(fleet) - queued.get(key, 0), having)
    return found


def _fleets(connection: Connection, now: float) -> dict[str, Fleet]:
    fleets: dict[str, Fleet] = {}
    for worker in queries.live_workers(connection, now):
        fleet = fleets.get(worker.model, Fleet(0, 0))
        fleets[worker.model] = Fleet(
            fleet.workers + 1,
            fleet.slots + worker.max_batch_size,
            fleet.requests_per_s + worker.requests_per_s,
            fleet.places | {worker.place},
        )
    return fleets


@dataclass(slots=True)
class _Supply:
    """What is left of a batch, cut into chunks page by page. chunks: each with the place that it is for."""

    batch: BatchRow
    chunks: list[tuple[tuple[PendingRequest, ...], str | None]] = field(default_factory=list)
    read: int = 0
    is_dry: bool = False


def _queue_next(
    connection: Connection, model: str, is_interactive: bool, hunger: _Hunger, settings: QueueSettings, now: float
) -> list[Chunk]:
    """Fill one window, chunk by chunk, each from the batch that the policy chooses."""
    supplies = {batch.id: _Supply(batch) for batch in hunger.batches}
    candidates = {batch.id: _candidate(batch) for batch in hunger.batches}
    tenants = queries.tenants(connection)
    active = sorted({candidate.tenant for candidate in candidates.values()})
    share_used = start_shares(
        {name: tenant.share_used for name, tenant in tenants.items()},
        active,
        [name for name in queries.waiting_tenants(connection) if name in active],
    )
    before = dict(share_used)
    chosen: list[tuple[tuple[PendingRequest, ...], str | None]] = []
    room = hunger.room
    while candidates and room > 0:
        candidate = choose(list(candidates.values()), share_used, now)
        supply = supplies[candidate.batch_id]
        if not supply.chunks and not supply.is_dry:
            _restock(connection, supply, hunger, settings, now, room)
        if not supply.chunks:
            del candidates[candidate.batch_id]
            continue
        chunk, place = supply.chunks.pop(0)
        chunk = chunk[:room]
        chosen.append((chunk, place))
        room -= len(chunk)
        tenant = tenants.get(candidate.tenant)
        tokens = sum(max(1, request.estimated_tokens) for request in chunk)
        share_used[candidate.tenant] += tokens / (tenant.weight if tenant else 1.0)
    moved = set(transitions.queue_requests(connection, [request.id for chunk, _ in chosen for request in chunk], now))
    transitions.charge_tenants(connection, {name: used for name, used in share_used.items() if used != before[name]})
    published = ((tuple(request.id for request in chunk if request.id in moved), place) for chunk, place in chosen)
    return [Chunk(model, ids, is_interactive, place) for ids, place in published if ids]


def _restock(
    connection: Connection, supply: _Supply, hunger: _Hunger, settings: QueueSettings, now: float, room: int
) -> None:
    """Read the next page of a batch and cut it into chunks.

    What comes back for another try goes to any worker: it may have been the one before that is to blame.
    """
    batch, rows = supply.batch, min(room, PAGE_ROWS)
    delayed = queries.next_delayed(connection, batch.id, now, rows) if supply.read == 0 else []
    fresh = queries.next_pending(connection, batch.id, rows, skip=supply.read)
    supply.read += len(fresh)
    supply.is_dry = len(fresh) < rows
    left = len(delayed) + len(fresh) if supply.is_dry else batch.remaining_requests - supply.read + len(fresh)
    chunk_size = 1 if batch.is_interactive else worthwhile_chunk(hunger.fleet, settings.chunk_size)
    anywhere = frozenset[str]()
    for pending, places in ((delayed, anywhere), (fresh, anywhere if batch.is_interactive else hunger.fleet.places)):
        chunks = plan_chunks(
            pending,
            fleet=replace(hunger.fleet, places=places),
            chunk_size=chunk_size,
            chunk_tokens=settings.chunk_tokens,
            remaining=left,
        )
        supply.chunks += [(chunk, chunk_place(chunk, places)) for chunk in chunks]
        left -= len(pending)


def _candidate(batch: BatchRow) -> Candidate:
    return Candidate(
        batch_id=batch.id,
        tenant=batch.tenant,
        priority=batch.priority,
        is_interactive=batch.is_interactive,
        expires_at=batch.expires_at,
        window_s=None if batch.expires_at is None else batch.expires_at - batch.created_at,
    )
