"""`promptmill run`: one job from its input to its output file, with all that it takes in between.

Starts the queue server if it is embedded and a worker if none serves the model, submits, keeps the queue filled and
swept, restarts a worker that dies, and writes the results. Everything it knows is in the database: stopped at any
point, the same command goes on where it stood.
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import structlog
from celery import Celery

from jobs.artifacts import FoundArtifact
from jobs.dispatch import top_up
from jobs.inputs import InputOptions
from jobs.queue import QueueError, make_app
from jobs.queue_server import QueueServer, open_queue_server
from jobs.results import BatchSummary, WrittenResults, check_output, summarise, write_results
from jobs.settings import Settings
from jobs.source import Source
from jobs.submit import BatchOptions, SubmitProgress, submit
from jobs.sweep import sweep
from jobs.worker_process import WorkerProcess
from storage import queries, transitions
from storage.database import Connection, Database, open_database, upgrade_schema
from storage.errors import PromptmillError, StorageError
from storage.models import WorkerStatus
from storage.queries import BatchRow, WorkerRow

log = structlog.get_logger()

TICK_S = 0.1
SWEEP_EVERY_S = 2.0
# A worker that dies is started again after a pause that doubles; one that never gets to work is given up.
FIRST_RESTART_PAUSE_S = 0.5
LONGEST_RESTART_PAUSE_S = 30.0
MOST_FAILED_STARTS = 3
# After its drain budget a worker that we started has this long to leave before it is killed.
STOP_PATIENCE_S = 15.0


class RunFailed(PromptmillError):
    """The job cannot go on."""


@dataclass(frozen=True, slots=True)
class RunProgress:
    """How a run stands. worker: what serves it, None before there is one."""

    batch: BatchRow
    worker: WorkerRow | None


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """written: None if there was nothing to write. is_interrupted: the user stopped it; the batch is not finished."""

    summary: BatchSummary
    written: WrittenResults
    is_interrupted: bool
    was_there: bool


@dataclass(frozen=True, slots=True)
class Observer:
    """What a run tells while it goes on."""

    submitting: Callable[[SubmitProgress], None] = lambda _progress: None
    running: Callable[[RunProgress], None] = lambda _progress: None
    note: Callable[[str], None] = lambda _text: None


def run_job(
    settings: Settings,
    source: Source,
    artifact: FoundArtifact,
    options: InputOptions,
    output: str | Path,
    *,
    input_path: Path | None = None,
    observer: Observer | None = None,
) -> RunOutcome:
    """Run a job to its end, or until interrupted (SIGINT, SIGTERM), and write what it has.

    Raises PromptmillError when nothing could run: a bad input file, no queue server, an unwritable output, ...
    """
    observer = observer or Observer()
    check_output(output, [input_path] if input_path else [])
    with _interruptible() as interrupted, open_database(settings.database.url) as database:
        upgrade_schema(database)

        def submitting(progress: SubmitProgress) -> None:
            if interrupted.is_set():
                raise KeyboardInterrupt  # between two commits: the same command goes on from here
            observer.submitting(progress)

        submission = submit(
            database, source, options, BatchOptions(artifact_digest=artifact.digest), progress=submitting
        )
        batch = submission.batch
        if not batch.is_final:
            with open_queue_server(settings) as server:
                served = settings.model_copy(
                    update={"queue": settings.queue.model_copy(update={"url": server.url})}
                )
                _Loop(served, database, server, artifact, batch.id, observer).run(interrupted)
        written = write_results(database, batch.id, output)
        summary = summarise(database, batch.id)
        return RunOutcome(summary, written, not summary.batch.is_final, submission.was_there)


class _Loop:
    """Keeps one batch going until it is final."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        server: QueueServer,
        artifact: FoundArtifact,
        batch_id: int,
        observer: Observer,
    ) -> None:
        # A worker of ours has nothing to wait for when we stop it: what is unfinished is done when we run again.
        self._settings = settings.model_copy(
            update={"worker": settings.worker.model_copy(update={"drain_s": 0.0})}
        )
        self._database = database
        self._server = server
        self._artifact = artifact
        self._batch_id = batch_id
        self._observer = observer
        self._app: Celery = make_app(settings.queue)
        self._worker: WorkerProcess | None = None
        self._failed_starts = 0
        self._restart_at = 0.0
        self._swept_at = 0.0

    def run(self, interrupted: threading.Event) -> None:
        try:
            while not interrupted.is_set():
                with self._database.read() as connection:
                    batch = queries.find_batch_by_id(connection, self._batch_id)
                    now = self._database.now()
                    serving = queries.live_workers(connection, now, model=self._artifact.model)
                    starting = self._own_row(connection)
                assert batch is not None
                self._observer.running(RunProgress(batch, serving[0] if serving else starting))
                if batch.is_final:
                    return
                self._look_after_worker(bool(serving))
                self._move_on(now)
                interrupted.wait(TICK_S)
        finally:
            if self._worker is not None:
                self._worker.stop(STOP_PATIENCE_S)
            self._app.close()

    def _move_on(self, now: float) -> None:
        """Top up the queue and, now and then, sweep. Trouble that may pass is left for the next round."""
        try:
            top_up(self._database, self._app, self._settings.queue, now)
            if time.monotonic() - self._swept_at >= SWEEP_EVERY_S:
                self._swept_at = time.monotonic()
                if self._server.ensure_running():
                    self._observer.note("the queue server had died and was started again")
                sweep(self._database, self._app, self._settings, now)
        except (QueueError, StorageError) as error:
            if not error.retryable:
                raise
            log.warning("tick_failed", code=error.code, reason=error.message)

    def _look_after_worker(self, is_served: bool) -> None:
        """Start a worker if nobody serves the model; start it again when it has died."""
        if self._worker is None:
            if not is_served and time.monotonic() >= self._restart_at:
                self._worker = WorkerProcess(self._settings, self._artifact.path)
            return
        code = self._worker.exit_code()
        if code is None:
            return
        words = self._worker.last_words()
        lived_s = time.monotonic() - self._worker.started_at
        name = self._forget_worker()
        self._failed_starts = 0 if name else self._failed_starts + 1
        if self._failed_starts >= MOST_FAILED_STARTS or code == 2:
            raise RunFailed(f"the worker cannot start (exit code {code}):\n{words}", code="worker_failed")
        pause_s = min(LONGEST_RESTART_PAUSE_S, FIRST_RESTART_PAUSE_S * 2**self._failed_starts)
        self._restart_at = time.monotonic() + pause_s
        log.warning("worker_died", exit_code=code, lived_s=round(lived_s, 1), last_words=words)
        self._observer.note(f"the worker died (exit code {code}) and is started again")

    def _forget_worker(self) -> str | None:
        """Take a dead worker's requests back now, not when their leases run out. Returns its name if it was ready."""
        worker, self._worker = self._worker, None
        assert worker is not None
        worker.stop(0.0)
        with self._database.read() as connection:
            row = _find_by_pid(connection, worker.pid)
        if row is None:
            return None
        now = self._database.now()
        with self._database.write() as connection:
            transitions.abandon_worker(connection, row.name, now)
            transitions.retire_worker(connection, row.name, now, status=WorkerStatus.FAILED, detail=row.detail)
        return row.name if row.ready_at is not None else None

    def _own_row(self, connection: Connection) -> WorkerRow | None:
        return None if self._worker is None else _find_by_pid(connection, self._worker.pid)


def _find_by_pid(connection: Connection, pid: int) -> WorkerRow | None:
    """The row of a worker on this host."""
    host = socket.gethostname()
    rows = queries.list_workers(connection, since=0.0)
    found = [row for row in rows if row.pid == pid and row.host == host]
    return max(found, key=lambda row: row.started_at, default=None)


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """SIGINT and SIGTERM set the event; a second SIGINT raises KeyboardInterrupt. Only in the main thread."""
    interrupted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield interrupted
        return

    def note(signum: int, frame: FrameType | None) -> None:
        if interrupted.is_set() and signum == signal.SIGINT:
            raise KeyboardInterrupt
        interrupted.set()

    before = {each: signal.signal(each, note) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupted
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
