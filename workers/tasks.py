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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue

import structlog
from celery import Celery
from celery.worker.control import control_command

from jobs.dispatch import top_up
from jobs.queue import GIVE_UP, RUN_CHUNK, QueueError
from jobs.settings import QueueSettings
from storage import queries
from storage.database import Connection, Database
from storage.errors import PromptmillError, StorageError
from storage.queries import StoredAnswer
from storage.retries import DEFAULT_LIMITS, RetryLimits
from storage.transitions import (
    ClaimedRequest,
    RequestOutcome,
    claim_requests,
    fail_requests,
    release_requests,
    stop_requests,
    unqueue_requests,
)
from workers.answers import PreparedRequest, Served, answer, prepare, refusal, serve_again
from workers.engine.request import DEVICE_FAILED, AnyEngine, Completion
from workers.leases import LeaseKeeper
from workers.recorder import Recorder
from workers.replies import Replies
from workers.tokenizer import Tokenizer

log = structlog.get_logger()

PREFIXES_KEPT = 64
# Attempts that get a log line of their own.
LINES_PER_S = 50
# The longest that a look for more work waits for answers that are being made or written.
TOP_UP_WAITS_S = 0.05


class AttemptsLog:
    """A line for each attempt, as long as there are not too many: beyond a rate, one line a second with their number.

    Each attempt has its row in the database; a line costs a tenth of a millisecond of the interpreter, which thousands
    a second of a small model cannot spare.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._second = 0
        self._lines = 0
        self._left_out = 0

    def write_all(self, attempts: list[tuple[ClaimedRequest, RequestOutcome]]) -> None:
        """Write a line for each, and empty the list."""
        for request, outcome in attempts:
            self.write(request, outcome)
        attempts.clear()

    def write(self, request: ClaimedRequest, outcome: RequestOutcome) -> None:
        with self._lock:
            second = int(time.monotonic())
            left_out = 0
            if second != self._second:
                left_out, self._second, self._lines, self._left_out = self._left_out, second, 0, 0
            self._lines += 1
            is_shown = self._lines <= LINES_PER_S
            self._left_out += not is_shown
        if left_out:
            log.info("attempts_completed", more=left_out)
        if is_shown:
            _log_attempt(request, outcome)


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
    replies: Replies
    limits: RetryLimits = DEFAULT_LIMITS
    answer_cache: bool = False
    on_device_failed: Callable[[], None] = lambda: None  # ends the process; who finds it dead gives its requests back
    company: Company = field(default_factory=Company)
    attempts_log: AttemptsLog = field(default_factory=AttemptsLog)
    topping_up: threading.Lock = field(default_factory=threading.Lock)
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

    @control_command(name=GIVE_UP)  # type: ignore[untyped-decorator]
    def give_up(_state: object, request_ids: list[int]) -> dict[str, int]:
        """Runs in Celery's main thread, between two messages."""
        context.leases.give_up(request_ids)
        log.info("requests_given_up", requests=len(request_ids))
        return {"ok": len(request_ids)}


def run_requests(context: WorkerContext, request_ids: Sequence[int]) -> None:
    """Claim these requests, run those that were free, and record how each ended."""
    with context.company.together():
        taken = _claim_and_run(context, request_ids, but_isolated=True)
    left = set(request_ids) - taken
    if not left:
        return
    with context.database.read() as connection:
        isolated = queries.isolated_requests(connection, left)
    if isolated:
        with context.company.alone():
            log.info("isolation_begun", requests=len(isolated))
            _claim_and_run(context, isolated)


def _claim_and_run(context: WorkerContext, request_ids: Sequence[int], *, but_isolated: bool = False) -> set[int]:
    """Returns the requests that were claimed: none of them is in this worker's hands any more.

    but_isolated: leave those in isolation alone.
    """
    claimed_at = time.monotonic()
    now = context.database.now()
    tries = 0

    def claim(connection: Connection) -> list[ClaimedRequest]:
        nonlocal tries
        tries += 1
        return claim_requests(
            connection,
            request_ids,
            worker=context.name,
            lease_s=context.leases.lease_s,
            now=now,
            but_isolated=but_isolated,
        )

    claimed = context.database.retry(claim, durable=False)  # a claim that a crash forgets is one that nobody has run
    if tries > 1:
        _undo_unheard_claims(context, request_ids, claimed, now)
    if not claimed:
        log.debug("chunk_skipped", requests=len(request_ids))
        return set()
    context.leases.hold(claimed)
    context.recorder.expect(len(claimed))
    unrecorded = {request.id: request.attempt for request in claimed}
    handed_over: set[int] = set()
    answers: Mapping[int, RequestOutcome] = {}
    unlogged: list[tuple[ClaimedRequest, RequestOutcome]] = []
    try:
        answers = _run(context, claimed, claimed_at, unrecorded, handed_over, unlogged)
    except StorageError as error:
        # The database stayed away too long: the leases run out, sweep returns the requests.
        log.error("chunk_not_recorded", requests=len(unrecorded), code=error.code, reason=error.message)
        unlogged.clear()
    finally:
        context.recorder.expect(len(handed_over) - len(claimed))  # the others do not come
        context.leases.let_go([request.id for request in claimed])
        for request in claimed:
            context.replies.ended(request, answers.get(request.id))
    context.attempts_log.write_all(unlogged)  # what others wait for comes first
    return {request.id for request in claimed}


def _undo_unheard_claims(
    context: WorkerContext, request_ids: Sequence[int], claimed: Sequence[ClaimedRequest], now: float
) -> None:
    """Hand back what an earlier try claimed: its commit went through and the word of it did not arrive."""
    with context.database.read() as connection:
        ours = queries.claims_made(connection, request_ids, worker=context.name, claimed_at=now)
    heard = {request.id for request in claimed}
    unheard = {request_id: attempt for request_id, attempt in ours.items() if request_id not in heard}
    if unheard:
        context.database.retry(lambda connection: release_requests(connection, unheard, worker=context.name, now=now))
        log.warning("claims_unheard", requests=len(unheard))


def _run(
    context: WorkerContext,
    claimed: Sequence[ClaimedRequest],
    claimed_at: float,
    unrecorded: dict[int, int],
    handed_over: set[int],
    unlogged: list[tuple[ClaimedRequest, RequestOutcome]],
) -> Mapping[int, RequestOutcome]:
    """Run claimed requests. unrecorded: request id -> attempt, of those without a result yet; emptied on the way.

    handed_over: filled with those that the recorder was given. unlogged: with those that the log is to have a line of.
    Returns, of those that somebody waits for, the outcomes that are recorded, by request id.
    """
    recorded: list[Future[set[int]]] = []
    awaited: dict[int, RequestOutcome] = {}
    released: dict[int, int] = {}
    failed: list[RequestOutcome] = []
    stopped: dict[int, int] = {}  # cancelled: the batch ends, or the lease was lost and somebody else answers it
    ended: list[RequestOutcome] = []  # to be recorded with the next group
    is_urgent = any(request.is_interactive for request in claimed)

    def fail(request: ClaimedRequest, error: Exception) -> None:
        if not isinstance(error, PromptmillError):
            error = _internal_error(request, error)
        if error.code == DEVICE_FAILED:
            context.on_device_failed()  # at once, so that it is known what ran: one of these may have done it
        if error.code == "engine_closed":
            released[request.id] = request.attempt
        elif error.retryable:
            failed.append(refusal(request, error, context.served))
        else:
            ended.append(refusal(request, error, context.served))

    def record() -> None:
        if ended:
            recorded.append(context.recorder.record(tuple(ended), is_urgent=is_urgent))
            for outcome in ended:
                unrecorded.pop(outcome.request_id, None)
                handed_over.add(outcome.request_id)
                if is_urgent:
                    awaited[outcome.request_id] = outcome
            ended.clear()

    running = 0
    finished: SimpleQueue[_Running] = SimpleQueue()  # an entry for each choice that ended
    ready: list[PreparedRequest] = []

    def submit(prepared: PreparedRequest) -> None:
        nonlocal running
        request = prepared.claimed
        try:
            submitted_at = time.monotonic()
            generations = context.replies.attend(prepared) if request.is_interactive else prepared.generations
            futures = [context.engine.submit(generation) for generation in generations]
        except Exception as error:
            fail(request, error)
            return
        context.leases.watch(request.id, futures)
        entry = _Running(prepared, futures, submitted_at, unfinished=len(futures))
        running += 1
        for future in futures:
            future.add_done_callback(lambda _future, entry=entry: finished.put(entry))  # type: ignore[misc]

    prefixes = context.prefix_texts(claimed)
    for request, prepared in prepare(claimed, prefixes, context.tokenizer, context.served, claimed_at):
        if isinstance(prepared, Exception):
            fail(request, prepared)
        elif context.answer_cache:
            ready.append(prepared)  # all are looked up together
        else:
            submit(prepared)
    for prepared, known in _look_up(context, ready):
        if known is None:
            submit(prepared)
        else:
            outcome = serve_again(prepared, known, context.served)
            ended.append(outcome)
            unlogged.append((prepared.claimed, outcome))
    record()

    while running:
        first = finished.get()
        with nullcontext() if is_urgent else context.recorder.turn:
            for entry in _all_there(first, finished):
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
                    stopped[request.id] = request.attempt
                except Exception as error:
                    fail(request, error)
                else:
                    if context.answer_cache:
                        outcome = replace(outcome, answer_key=_answer_key(entry.prepared, context.served))
                    ended.append(outcome)
                    unlogged.append((request, outcome))
            record()
        if running and finished.empty():
            context.attempts_log.write_all(unlogged)

    counted = {request_id for written in recorded for request_id in written.result()}
    _hand_back(context, released, failed, stopped, unrecorded)
    # Not held any more. When it was a crash of the database that has forgotten the claim, they stand there as queued,
    # and the message that they wait for is this one.
    forgotten = (handed_over - counted) | stopped.keys()
    if forgotten:
        context.database.retry(lambda connection: unqueue_requests(connection, forgotten))
    return {request_id: outcome for request_id, outcome in awaited.items() if request_id in counted}


def _all_there(first: _Running, finished: SimpleQueue[_Running]) -> Iterator[_Running]:
    """The first entry, then all that are there by then."""
    yield first
    while True:
        try:
            yield finished.get_nowait()
        except Empty:
            return


def _hand_back(
    context: WorkerContext,
    released: dict[int, int],
    failed: Sequence[RequestOutcome],
    stopped: dict[int, int],
    unrecorded: dict[int, int],
) -> None:
    """Return what this worker could not finish, for itself or another to try again; end what was stopped for good."""
    if stopped:
        now = context.database.now()
        ended = context.database.retry(
            lambda connection: stop_requests(connection, stopped, worker=context.name, now=now)
        )
        log.info("requests_stopped", requests=len(ended))
        # Of the others the lease was lost, or the batch goes on after all: handing back passes over the former.
        released = released | {request_id: stopped[request_id] for request_id in stopped.keys() - set(ended)}
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
    for request_id in [*released, *stopped, *(outcome.request_id for outcome in failed)]:
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
    if context.recorder.turn.acquire(timeout=TOP_UP_WAITS_S):  # chunks that are just ending go first
        context.recorder.turn.release()
    if not context.topping_up.acquire(blocking=False):
        return  # another chunk of this worker has just ended, and does it
    try:
        top_up(context.database, context.app, context.queue, context.database.now())
    except (QueueError, StorageError) as error:
        log.warning("queue_not_topped_up", code=error.code, reason=error.message)
    finally:
        context.topping_up.release()


def _internal_error(request: ClaimedRequest, error: Exception) -> PromptmillError:
    log.error("request_failed_internally", request=request.id, exc_info=error)
    return PromptmillError(
        f"the request could not be run ({type(error).__name__}); the worker's log has the traceback",
        code="internal_error",
    )
