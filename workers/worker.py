"""A worker process's life: register, load the model, warm up, consume, renew leases, drain, stop.

It consumes nothing before the engine is warm. On SIGTERM (or when the process that started it is gone) it takes no
more chunks, finishes what it can within `drain_s`, hands the rest back and leaves; a second SIGTERM ends the waiting.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pynvml
import structlog
from celery import Celery, signals

from jobs.dispatch import take_back
from jobs.queue import InteractiveQueue, QueueError, make_app, own_queue_name, ping, queue_name, redis_url
from jobs.settings import QueueSettings, Settings
from storage import queries
from storage.database import Database, open_database, upgrade_schema
from storage.errors import PromptmillError, StorageError
from storage.models import WorkerStatus
from storage.retries import RetryLimits
from storage.transitions import NewWorker, note_device, register_worker, retire_worker, update_worker
from workers.answers import Served
from workers.devices import Device, DeviceMonitor
from workers.engine.flavour import cuda_trouble
from workers.engine.opening import open_engine
from workers.engine.request import AnyEngine
from workers.interactive import InteractiveLine
from workers.leases import LeaseKeeper
from workers.models.artifact import Artifact, load_artifact
from workers.neighbours import Neighbours
from workers.placement import Placement, place_worker
from workers.recorder import Recorder
from workers.replies import Replies
from workers.tasks import WorkerContext, register_tasks, run_requests
from workers.tokenizer import Tokenizer

log = structlog.get_logger()

# Chunks in flight beyond those that fill the slots: while one waits for its slowest prompt, the next keep rows busy.
SPARE_CHUNKS = 2
# Start-up progress is written to the database at most this often.
PROGRESS_PAUSE_S = 0.25
# After the grace budget, handing back must not take longer than this; then the process ends and the leases run out.
HAND_BACK_S = 10.0
# How often the engine's progress and the parent's life are looked at.
WATCH_S = 1.0
# A thread that comes back from the database or the model waits at most so long for the interpreter, not Python's 5 ms:
# with the null engine 3,000 requests a second instead of 2,460 (one run each).
SWITCH_INTERVAL_S = 0.0005
# The engine hangs or has died (EX_SOFTWARE).
EXIT_ENGINE = 70
# The GPU is lost or sick (EX_UNAVAILABLE): no use starting again on it before somebody has looked after it.
EXIT_GPU = 69
# What should have been handed back was not in time (EX_TEMPFAIL).
EXIT_OVERDUE = 75


def run_worker(
    settings: Settings,
    artifact_path: Path,
    model: str | None = None,
    parent_pid: int | None = None,
    gpu: str | None = None,
    number: int | None = None,
) -> int:
    """Be a worker until told to stop. Returns the process's exit code.

    model: the name that lines use, by default the artifact's. parent_pid: drain when that process is gone. gpu: the
    device to run on. number: which of this machine's workers on the CPU it is. Raises PromptmillError when it cannot
    start; the worker's row, once there is one, then says why.
    """

    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with open_database(settings.database.url) as database:
        upgrade_schema(database)
        _refuse_wrong_queue(settings.queue)
        artifact = load_artifact(artifact_path, check_digests=True)
        host = socket.gethostname()
        place = place_worker(gpu, settings.engine.flavour, artifact, os.environ, pynvml, cuda_trouble, number)
        # The process's number makes it this worker's alone: what is told of a dead one must not hit its successor.
        name = f"{place.name}@{host}-{os.getpid()}"
        served_name = model or artifact.model
        introduction = NewWorker(
            name=name, host=host, pid=os.getpid(), model=served_name, artifact_digest=artifact.digest, device=place.name
        )
        with database.write() as connection:
            register_worker(connection, introduction, database.now())
        structlog.contextvars.bind_contextvars(worker=name)
        try:
            with _watched_device(database, name, place.device) as device:
                engine = open_engine(artifact, settings.engine, place.flavour, _progress(database, name))
                code = _consume(settings, database, artifact, engine, name, served_name, parent_pid, place, device)
        except PromptmillError as error:
            _retire(database, name, WorkerStatus.FAILED, error.message)
            raise
        except BaseException as error:
            _retire(database, name, WorkerStatus.FAILED, f"{type(error).__name__}: {error}")
            raise
        if device.reason:
            _retire(database, name, WorkerStatus.FAILED, f"its GPU is not fit for work: {device.reason}")
        else:
            _retire(database, name, WorkerStatus.STOPPED, None)
        return code


def _refuse_wrong_queue(settings: QueueSettings) -> None:
    """Raise QueueError where the queue refuses us: Celery would ask it for ever. One that is away may come."""
    with contextlib.closing(make_app(settings)) as app:
        try:
            ping(app)
        except QueueError as error:
            if not error.may_come:
                raise


def _consume(
    settings: Settings,
    database: Database,
    artifact: Artifact,
    engine: AnyEngine,
    name: str,
    served_name: str,
    parent_pid: int | None,
    place: Placement,
    device: _WatchedDevice,
) -> int:
    app = make_app(settings.queue)
    own_place = f"{place.name}@{socket.gethostname()}"

    def hand_back() -> None:
        _hand_back_own_queue(database, app, served_name, own_place)

    def say_draining() -> None:
        _say_draining(database, name)
        hand_back()

    served = Served(
        model=served_name,
        artifact_digest=artifact.digest,
        device=place.name if place.flavour == "cuda" else place.flavour,
        context_length=engine.context_length,
        longest_context=artifact.context_length,
        vocab_size=artifact.description.vocab_size,
    )
    alive_file = settings.home / "run" / f"worker-{socket.gethostname()}-{os.getpid()}.alive"
    alive_file.parent.mkdir(parents=True, exist_ok=True)
    drain = _Drain(engine, settings.worker.drain_s, say_draining)
    watch = _Watch(engine, drain, settings.engine.watchdog_s, parent_pid, device.why_sick)
    leases = LeaseKeeper(database, name, settings.worker.lease_s, lambda: _touch(alive_file))
    tokenizer = Tokenizer(artifact)
    with Recorder(database, name) as recorder, Replies(redis_url(settings.queue.url), tokenizer) as replies:
        context = WorkerContext(
            name=name,
            app=app,
            database=database,
            queue=settings.queue,
            engine=engine,
            tokenizer=tokenizer,
            served=served,
            recorder=recorder,
            leases=leases,
            replies=replies,
            limits=RetryLimits(max_attempts=settings.worker.max_attempts, backoff_s=settings.worker.retry_backoff_s),
            answer_cache=settings.worker.answer_cache,
            on_device_failed=watch.end,
        )
        register_tasks(context)
        # Celery sets the root logger's level as it likes unless somebody says that logging is set up.
        signals.setup_logging.connect(_logging_is_set_up, weak=False)
        line = InteractiveLine(
            InteractiveQueue(settings.queue, served_name),
            lambda request_ids: run_requests(context, request_ids),
            most=engine.max_batch_size,
        )
        worker = app.Worker(
            hostname=name,
            pool="threads",
            concurrency=math.ceil(engine.max_batch_size / settings.queue.chunk_size) + SPARE_CHUNKS,
            # In the order in which they are emptied; those of other workers come after (neighbours.py).
            queues=[own_queue_name(served_name, own_place), queue_name(served_name, is_interactive=False)],
            loglevel="WARNING",
            without_gossip=True,
            without_mingle=True,
        )

        neighbours = Neighbours(database, served_name, own_place, lambda: worker.consumer)

        def announce(**_: object) -> None:
            with database.write() as connection:
                update_worker(
                    connection,
                    name,
                    database.now(),
                    status=WorkerStatus.READY,
                    max_batch_size=engine.max_batch_size,
                )
            line.start()
            neighbours.start()
            drain.take_signals()
            log.info("worker_ready", model=served_name, slots=engine.max_batch_size, context=engine.context_length)

        signals.worker_ready.connect(announce, weak=False)

        def leave(**_: object) -> None:
            line.stop()
            neighbours.stop()
            drain.begin()

        signals.worker_shutting_down.connect(leave, weak=False)
        # What is there now stays as long as the process: no collection need walk it again in the midst of a step.
        gc.collect()
        gc.freeze()
        device.on_sick = drain.abandon
        try:
            worker.start()
        finally:
            signals.worker_ready.disconnect(announce)
            signals.worker_shutting_down.disconnect(leave)
            neighbours.close()
            if drain.has_begun:
                line.close()  # what it has in hand ends, or is handed back when the grace budget is over
            engine.close()
            line.close()
    leases.close()
    watch.close()
    drain.settle()
    if drain.has_begun:
        hand_back()  # what Celery had received from there and not begun is in it again
    alive_file.unlink(missing_ok=True)
    code = int(drain.exit_code or worker.exitcode or 0)
    log.info("worker_stopped", exit_code=code)
    return code


class _WatchedDevice:
    """The GPU that this worker is pinned to, if any. on_sick: what then happens; before there is work, just the end."""

    def __init__(self) -> None:
        self.monitor: DeviceMonitor | None = None
        self.reason: str | None = None
        self.on_sick: Callable[[int], None] = os._exit

    def note_sick(self, reason: str) -> None:
        self.reason = reason
        self.on_sick(EXIT_GPU)

    def why_sick(self) -> str | None:
        return None if self.monitor is None else self.monitor.look()


@contextlib.contextmanager
def _watched_device(database: Database, name: str, device: Device | None) -> Iterator[_WatchedDevice]:
    """Watch a worker's GPU as long as the block lasts. Raises GpuError if it is not fit for work."""
    watched = _WatchedDevice()
    if device is None:
        yield watched
        return

    def record(reading: dict[str, Any]) -> None:
        try:
            with database.write(durable=False) as connection:
                note_device(connection, name, reading)
        except StorageError as error:
            log.warning("gpu_not_recorded", code=error.code, reason=error.message)

    watched.monitor = DeviceMonitor(pynvml, device, record, watched.note_sick)
    try:
        yield watched
    finally:
        watched.monitor.close()


class _Drain:
    """What happens between SIGTERM and the end: a grace budget, then what is unfinished is handed back."""

    def __init__(self, engine: AnyEngine, grace_s: float, announce: Callable[[], None]) -> None:
        self._engine = engine
        self._grace_s = grace_s
        self._announcing = threading.Thread(target=announce, name="announce", daemon=True)  # the database may be away
        self._begun = threading.Event()
        self._hurry = threading.Event()
        self.exit_code = 0

    @property
    def has_begun(self) -> bool:
        return self._begun.is_set()

    def take_signals(self) -> None:
        """Let Ctrl-C mean what SIGTERM means, and SIGQUIT the same in a hurry.

        In the main thread, once Celery has set its own handlers: those break off half-way, as a pool of threads cannot
        end what it runs.
        """

        def hurry(*_: object) -> None:
            signal.raise_signal(signal.SIGTERM)
            self._hurry.set()

        signal.signal(signal.SIGINT, lambda *_: signal.raise_signal(signal.SIGTERM))
        if hasattr(signal, "SIGQUIT"):
            signal.signal(signal.SIGQUIT, hurry)

    def begin(self, **_: object) -> None:
        """Called inside a signal handler: only start the thread that does the work. Called again: wait no longer."""
        if self._begun.is_set():
            self._hurry.set()
            return
        self._begun.set()
        threading.Thread(target=self._run, name="drain", daemon=True).start()

    def abandon(self, exit_code: int) -> None:
        """Hand everything back at once, and let the process end with this code. Called from any thread."""
        self.exit_code = exit_code
        self._hurry.set()
        os.kill(os.getpid(), signal.SIGTERM)

    def settle(self) -> None:
        """What comes after must not be overwritten by a late announcement."""
        if self._announcing.ident is not None:
            self._announcing.join(HAND_BACK_S)

    def _run(self) -> None:
        log.info("worker_draining", grace_s=self._grace_s)
        self._announcing.start()
        until = time.monotonic() + self._grace_s
        status = self._engine.status()
        while time.monotonic() < until and not self._hurry.is_set() and (status.running or status.waiting):
            self._hurry.wait(0.05)
            status = self._engine.status()
        overdue = threading.Timer(HAND_BACK_S, self._end)
        overdue.daemon = True
        overdue.start()
        self._engine.close()  # which may hang, where a device does

    def _end(self) -> None:
        log.error("drain_overdue", seconds=HAND_BACK_S)
        os._exit(self.exit_code or EXIT_OVERDUE)


class _Watch:
    """Looks at the engine and at the parent, whatever the database does meanwhile.

    Native code that hangs cannot be interrupted: the process ends, whoever started it starts another, and its requests
    go to others.
    """

    def __init__(
        self,
        engine: AnyEngine,
        drain: _Drain,
        limit_s: float,
        parent_pid: int | None,
        why_sick: Callable[[], str | None],
    ) -> None:
        self._engine = engine
        self._why_sick = why_sick
        self._drain = drain
        self._limit_s = limit_s
        self._parent_pid = parent_pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def end(self) -> None:
        """The engine has died: end the process, and say whether the GPU is to blame."""
        reason = self._why_sick()
        log.critical("engine_gone", gpu=reason)
        os._exit(EXIT_GPU if reason else EXIT_ENGINE)

    def _loop(self) -> None:
        while not self._stop.wait(WATCH_S):
            if self._parent_pid is not None and os.getppid() != self._parent_pid and not self._drain.has_begun:
                log.warning("parent_gone", parent=self._parent_pid)
                os.kill(os.getpid(), signal.SIGTERM)
            status = self._engine.status()
            if not status.is_alive and not self._drain.has_begun:
                self.end()
            age = time.monotonic() - status.last_step_at
            if status.running and age > self._limit_s:
                log.critical("engine_stuck", seconds=round(age), limit=self._limit_s)
                os._exit(EXIT_ENGINE)


def _logging_is_set_up(**_: object) -> None:
    """Being there is enough: `jobs/logs.py` has done it."""


def _touch(alive_file: Path) -> None:
    """Leave a sign of life for a health check from outside. A full disk is no reason to stop renewing leases."""
    with contextlib.suppress(OSError):
        alive_file.touch()


def _say_draining(database: Database, name: str) -> None:
    """No more chunks are meant for this worker; dispatch then does not count it."""
    try:
        with database.write() as connection:
            update_worker(connection, name, database.now(), status=WorkerStatus.DRAINING)
    except StorageError as error:
        log.warning("worker_not_updated", code=error.code, reason=error.message)


def _hand_back_own_queue(database: Database, app: Celery, model: str, place: str) -> None:
    """What waits for this worker goes to others, unless one at the same place takes it. Sweep does it if we cannot."""
    try:
        with database.read() as connection:
            live = queries.live_workers(connection, database.now(), model=model)
        if place not in {worker.place for worker in live}:
            take_back(database, app, {model: [place]})
    except (QueueError, StorageError) as error:
        log.warning("own_queue_not_handed_back", code=error.code, reason=error.message)


def _progress(database: Database, name: str) -> Callable[[str, int, int], None]:
    """Report start-up in the worker's row, so that whoever waits can show it. It doubles as a sign of life."""
    last = 0.0

    def report(doing: str, done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last < PROGRESS_PAUSE_S and done < total:
            return
        last = time.monotonic()
        with database.write() as connection:
            update_worker(connection, name, database.now(), detail=f"{doing} {done}/{total}")

    return report


def _retire(database: Database, name: str, status: WorkerStatus, detail: str | None) -> None:
    try:
        with database.write() as connection:
            retire_worker(connection, name, database.now(), status=status, detail=detail)
    except StorageError as error:
        log.warning("worker_not_retired", code=error.code, reason=error.message)
