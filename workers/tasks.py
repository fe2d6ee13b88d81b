"""The Celery tasks: claim, run, record.

A chunk's task claims its requests, hands their prompts to the engine and waits: several chunks are in flight at once,
and the engine batches across them. What it could not finish it hands back. When it returns, everything it claimed is
final or back in the database's hands, and only then is the message acknowledged.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from queue import SimpleQueue

import structlog
from celery import Celery

from jobs.dispatch import top_up
from jobs.queue import RUN_CHUNK, QueueError
from jobs.settings import QueueSettings
from storage import queries
from storage.database import Database
from storage.errors import PromptmillError, StorageError
from storage.models import AttemptOutcome
from storage.transitions import ClaimedRequest, RequestOutcome, claim_requests, release_requests
from workers.answers import PreparedRequest, Served, answer, prepare, refusal
from workers.engine.engine import Engine
from workers.engine.request import Completion
from workers.leases import LeaseKeeper
from workers.recorder import Recorder
from workers.tokenizer import Tokenizer

log = structlog.get_logger()

# An attempt that failed in a way another try may cure is repeated, but not for ever.
MAX_ATTEMPTS = 3
PREFIXES_KEPT = 64


@dataclass
class WorkerContext:
    """What the tasks of one worker process share."""

    name: str
    app: Celery
    database: Database
    queue: QueueSettings
    engine: Engine
    tokenizer: Tokenizer
    served: Served
    recorder: Recorder
    leases: LeaseKeeper
    _prefixes: dict[int, str] = field(default_factory=dict)
    _prefixes_lock: threading.Lock = field(default_factory=threading.Lock)

    def prefix_texts(self, claimed: Sequence[ClaimedRequest]) -> dict[int, str]:
        """The shared beginnings of these requests; the last few are kept, as neighbours mostly share theirs."""
        wanted = {request.prefix_id for request in claimed if request.prefix_id is not None}
        with self._prefixes_lock:
            missing = wanted - self._prefixes.keys()
            if missing:
                with self.database.read() as connection:
                    self._prefixes |= queries.prefix_texts(connection, missing)
            found = {prefix_id: self._prefixes[prefix_id] for prefix_id in wanted}
            while len(self._prefixes) > PREFIXES_KEPT:
                self._prefixes.pop(next(iter(self._prefixes)))
        return found


@dataclass(slots=True)
class _Running:
    """A request in the engine. unfinished: choices still being generated."""

    prepared: PreparedRequest
    futures: list[Future[Completion]]
    submitted_at: float
    unfinished: int


def register_tasks(context: WorkerContext) -> None:
    """Put this worker's tasks on its Celery app."""

    @context.app.task(name=RUN_CHUNK)  # type: ignore[untyped-decorator]
    def run_chunk(request_ids: list[int]) -> None:
        run_requests(context, request_ids)
        _top_up(context)


def run_requests(context: WorkerContext, request_ids: Sequence[int]) -> None:
    """Claim these requests, run those that were free, and record how each ended."""
    claimed_at = time.monotonic()
    now = context.database.now()
    claimed = context.database.retry(
        lambda connection: claim_requests(
            connection, request_ids, worker=context.name, lease_s=context.leases.lease_s, now=now
        ),
        durable=False,  # a claim that a crash forgets is one that nobody has run
    )
    if not claimed:
        log.debug("chunk_skipped", requests=len(request_ids))
        return
    context.leases.hold(claimed)
    unrecorded = {request.id: request.attempt for request in claimed}
    try:
        _run(context, claimed, claimed_at, unrecorded)
    except StorageError as error:
        # The database stayed away too long: the leases run out, sweep returns the requests.
        log.error("chunk_not_recorded", requests=len(unrecorded), code=error.code, reason=error.message)
    finally:
        context.leases.let_go([request.id for request in claimed])


def _run(
    context: WorkerContext, claimed: Sequence[ClaimedRequest], claimed_at: float, unrecorded: dict[int, int]
) -> None:
    """Run claimed requests. unrecorded: request id -> attempt, of those without a result yet; emptied on the way."""
    recorded: list[Future[bool]] = []
    released: dict[int, int] = {}
    failed: dict[int, PromptmillError] = {}

    def record(outcome: RequestOutcome) -> None:
        recorded.append(context.recorder.record(outcome))
        unrecorded.pop(outcome.request_id, None)

    def fail(request: ClaimedRequest, error: PromptmillError) -> None:
        if error.code == "engine_closed":
            released[request.id] = request.attempt
        elif error.retryable and request.attempt < MAX_ATTEMPTS:
            failed[request.id] = error
        else:
            record(refusal(request, error, context.served))

    running = 0
    finished: SimpleQueue[_Running] = SimpleQueue()  # an entry for each choice that ended
    prefixes = context.prefix_texts(claimed)
    for request in claimed:
        try:
            prefix = prefixes[request.prefix_id] if request.prefix_id is not None else ""
            prepared = prepare(request, prefix, context.tokenizer, context.served, claimed_at)
            submitted_at = time.monotonic()
            futures = [context.engine.submit(generation) for generation in prepared.generations]
        except PromptmillError as error:
            fail(request, error)
            continue
        except Exception as error:
            fail(request, _internal_error(request, error))
            continue
        context.leases.watch(request.id, futures)
        entry = _Running(prepared, futures, submitted_at, unfinished=len(futures))
        running += 1
        for future in futures:
            future.add_done_callback(lambda _future, entry=entry: finished.put(entry))  # type: ignore[misc]

    while running:
        entry = finished.get()
        entry.unfinished -= 1
        if entry.unfinished:
            continue
        running -= 1
        request = entry.prepared.claimed
        try:
            completions = [future.result() for future in entry.futures]
            outcome = answer(
                entry.prepared,
                completions,
                context.tokenizer,
                context.served,
                submitted_at=entry.submitted_at,
                now=time.time(),
            )
        except CancelledError:
            unrecorded.pop(request.id, None)  # the lease was lost: somebody else answers it
        except PromptmillError as error:
            fail(request, error)
        except Exception as error:
            fail(request, _internal_error(request, error))
        else:
            record(outcome)
            _log_attempt(request, outcome)

    for written in recorded:
        written.result()
    _hand_back(context, released, failed, unrecorded)


def _hand_back(
    context: WorkerContext,
    released: dict[int, int],
    failed: dict[int, PromptmillError],
    unrecorded: dict[int, int],
) -> None:
    """Return what this worker could not finish, for itself or another to try again."""
    if released:
        now = context.database.now()
        context.database.retry(
            lambda connection: release_requests(connection, released, worker=context.name, now=now)
        )
        log.info("requests_released", requests=len(released))
    for request_id, error in failed.items():
        now = context.database.now()
        with context.database.write() as connection:
            release_requests(
                connection,
                {request_id: unrecorded[request_id]},
                worker=context.name,
                now=now,
                outcome=AttemptOutcome.FAILED,
                error_code=error.code,
                error_message=error.message,
            )
        log.warning("attempt_failed", request=request_id, code=error.code, reason=error.message)


def _top_up(context: WorkerContext) -> None:
    """Refill the queue's window. Whoever else finds it low does the same, so a failure here may wait."""
    try:
        top_up(context.database, context.app, context.queue, context.database.now())
    except (QueueError, StorageError) as error:
        log.warning("queue_not_topped_up", code=error.code, reason=error.message)


def _internal_error(request: ClaimedRequest, error: Exception) -> PromptmillError:
    log.error("request_failed_internally", request=request.id, exc_info=error)
    return PromptmillError(
        f"the request could not be run ({type(error).__name__}); the worker's log has the traceback",
        code="internal_error",
    )


def _log_attempt(request: ClaimedRequest, outcome: RequestOutcome) -> None:
    record = outcome.record
    log.info(
        "attempt_completed",
        batch=request.batch_id,
        request=request.id,
        attempt=request.attempt,
        model=request.model,
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        completion_tokens=record.completion_tokens,
        mean_batch_size=round(record.mean_batch_size or 0.0, 1),
        queue_s=round(record.queue_s or 0.0, 4),
        time_to_first_token_s=round(record.time_to_first_token_s or 0.0, 4),
        total_s=round(record.total_s or 0.0, 4),
        finish_reason=record.finish_reason,
    )
