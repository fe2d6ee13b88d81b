"""The Celery tasks: claim, run, record.

A chunk's task claims its requests, hands their prompts to the engine and waits: several chunks are in flight at once,
and the engine batches across them. What it could not finish it hands back. When it returns, everything it claimed is
final or back in the database's hands, and only then is the message acknowledged.

The claim is what says that an attempt is in flight: it is committed before the model sees the prompt, so that whoever
finds this process dead knows what it had in its hands. Requests in isolation, one of which may be the killer, are
claimed only when nothing else is in hand, and nothing else is claimed beside them.
"""

from __future__ import annotations

import hashlib
import threading
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from queue import SimpleQueue

import structlog
from celery import Celery

from jobs.dispatch import top_up
from jobs.queue import RUN_CHUNK, QueueError
from jobs.settings import QueueSettings
from storage import queries
from storage.database import Database
from storage.errors import PromptmillError, StorageError
from storage.queries import StoredAnswer
from storage.retries import DEFAULT_LIMITS, RetryLimits
from storage.transitions import ClaimedRequest, RequestOutcome, claim_requests, fail_requests, release_requests
from workers.answers import PreparedRequest, Served, answer, prepare, refusal, serve_again
from workers.engine.request import AnyEngine, Completion
from workers.leases import LeaseKeeper
from workers.recorder import Recorder
from workers.tokenizer import Tokenizer

log = structlog.get_logger()

PREFIXES_KEPT = 64


class Company:
    """Who may be in this worker's hands at once: many chunks together, or one in isolation and nothing else."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._together = 0
        self._is_alone = False
        self._want_alone = 0

    @property
    def is_awaited(self) -> bool:
        """Whether a chunk waits to run alone."""
        with self._changed:
            return self._want_alone > 0

    @contextmanager
    def together(self) -> Iterator[None]:
        """Wait while a chunk in isolation runs, or waits to run."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_alone and not self._want_alone)
            self._together += 1
        try:
            yield
        finally:
            with self._changed:
                self._together -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until nothing is in hand, and keep others out meanwhile."""
        with self._changed:
            self._want_alone += 1
            self._changed.wait_for(lambda: not self._is_alone and not self._together)
            self._want_alone -= 1
            self._is_alone = True
        try:
            yield
        finally:
            with self._changed:
                self._is_alone = False
                self._changed.notify_all()


@dataclass
class WorkerContext:
    """What the tasks of one worker process share."""

    name: str
    app: Celery
    database: Database
    queue: QueueSettings
    engine: AnyEngine
    tokenizer: Tokenizer
    served: Served
    recorder: Recorder
    leases: LeaseKeeper
    limits: RetryLimits = DEFAULT_LIMITS
    answer_cache: bool = False
    company: Company = field(default_factory=Company)
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
    with context.database.read() as connection:
        isolated = queries.isolated_requests(connection, request_ids)
    free = sorted(set(request_ids) - set(isolated))
    if free:
        with context.company.together():
            _claim_and_run(context, free)
    if isolated:
        with context.company.alone():
            log.info("isolation_begun", requests=len(isolated))
            _claim_and_run(context, isolated)


def _claim_and_run(context: WorkerContext, request_ids: Sequence[int]) -> None:
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
    failed: list[RequestOutcome] = []

    def record(outcome: RequestOutcome) -> None:
        recorded.append(context.recorder.record(outcome))
        unrecorded.pop(outcome.request_id, None)

    def fail(request: ClaimedRequest, error: PromptmillError) -> None:
        if error.code == "engine_closed":
            released[request.id] = request.attempt
        elif error.retryable:
            failed.append(refusal(request, error, context.served))
        else:
            record(refusal(request, error, context.served))

    running = 0
    finished: SimpleQueue[_Running] = SimpleQueue()  # an entry for each choice that ended
    prefixes = context.prefix_texts(claimed)
    ready: list[PreparedRequest] = []

    def submit(prepared: PreparedRequest) -> None:
        nonlocal running
        request = prepared.claimed
        try:
            submitted_at = time.monotonic()
            futures = [context.engine.submit(generation) for generation in prepared.generations]
        except PromptmillError as error:
            fail(request, error)
            return
        except Exception as error:
            fail(request, _internal_error(request, error))
            return
        context.leases.watch(request.id, futures)
        entry = _Running(prepared, futures, submitted_at, unfinished=len(futures))
        running += 1
        for future in futures:
            future.add_done_callback(lambda _future, entry=entry: finished.put(entry))  # type: ignore[misc]

    for request in claimed:
        try:
            prefix = prefixes[request.prefix_id] if request.prefix_id is not None else ""
            prepared = prepare(request, prefix, context.tokenizer, context.served, claimed_at)
        except PromptmillError as error:
            fail(request, error)
        except Exception as error:
            fail(request, _internal_error(request, error))
        else:
            if context.answer_cache:
                ready.append(prepared)  # all are looked up together
            else:
                submit(prepared)
    for prepared, known in _look_up(context, ready):
        if known is None:
            submit(prepared)
        else:
            outcome = serve_again(prepared, known, context.served)
            record(outcome)
            _log_attempt(prepared.claimed, outcome)

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
            if context.answer_cache:
                outcome = replace(outcome, answer_key=_answer_key(entry.prepared, context.served))
            record(outcome)
            _log_attempt(request, outcome)

    for written in recorded:
        written.result()
    _hand_back(context, released, failed, unrecorded)


def _hand_back(
    context: WorkerContext, released: dict[int, int], failed: Sequence[RequestOutcome], unrecorded: dict[int, int]
) -> None:
    """Return what this worker could not finish, for itself or another to try again."""
    if released:
        now = context.database.now()
        context.database.retry(lambda connection: release_requests(connection, released, worker=context.name, now=now))
        log.info("requests_released", requests=len(released))
    if failed:
        now = context.database.now()
        again = context.database.retry(
            lambda connection: fail_requests(connection, failed, worker=context.name, now=now, limits=context.limits)
        )
        for outcome in failed:
            log.warning(
                "attempt_failed",
                request=outcome.request_id,
                attempt=outcome.attempt_number,
                is_tried_again=outcome.request_id in again,
                code=outcome.error_code,
                reason=outcome.error_message,
            )
    for request_id in [*released, *(outcome.request_id for outcome in failed)]:
        unrecorded.pop(request_id, None)


def _look_up(
    context: WorkerContext, ready: Sequence[PreparedRequest]
) -> list[tuple[PreparedRequest, StoredAnswer | None]]:
    """Each with the answer that an identical request of an earlier run has, if it is deterministic and there is one."""
    keys = [_answer_key(prepared, context.served) for prepared in ready]
    wanted = {key for key in keys if key is not None}
    found: Mapping[str, StoredAnswer] = {}
    if wanted:
        with context.database.read() as connection:
            found = queries.stored_answers(connection, wanted)
    return [(prepared, found.get(key) if key else None) for prepared, key in zip(ready, keys, strict=True)]


def _answer_key(prepared: PreparedRequest, served: Served) -> str | None:
    """All that an answer depends on as one digest: artifact, endpoint, prompt token ids, parameters."""
    if prepared.question is None:
        return None
    digest = hashlib.sha256(f"{served.artifact_digest}\n{prepared.endpoint}\n{prepared.question}\n".encode())
    digest.update(array("q", prepared.generations[0].prompt_token_ids).tobytes())
    return digest.hexdigest()


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
