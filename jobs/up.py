"""`promptmill up`: the queue server if it is embedded, workers, and the periodic pass, under one supervisor.

It computes nothing and holds nothing that is not in the database: killed at any point, the next one goes on. One home
has one supervisor. The first signal drains (finish what fits into `drain_s`, hand the rest back), the second hands
back at once, the third kills.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import IO, TYPE_CHECKING

import psutil
import structlog

from jobs.artifacts import FoundArtifact
from jobs.dispatch import top_up
from jobs.finalize import Finalizer
from jobs.gpus import plan_gpus
from jobs.queue import QueueError, make_app, ping
from jobs.queue_server import QueueServer, open_queue_server
from jobs.settings import QueueSettings, Settings
from jobs.sweep import sweep
from jobs.validation import Validator
from jobs.webhook_sender import WebhookSender
from jobs.worker_process import STOP_PATIENCE_S, Crew
from storage import queries
from storage.changes import ChangeWatch
from storage.database import Database, open_database, upgrade_schema
from storage.errors import PromptmillError, StorageError
from storage.models import WorkerStatus
from storage.queries import WorkerRow

if TYPE_CHECKING:
    from jobs.doors import Doors

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

log = structlog.get_logger()

# Between two looks at the workers: how soon a death is noticed.
LOOK_S = 0.25
# Between two top-ups. Workers top up by themselves as they finish, so this is for what arrives in between.
TOP_UP_EVERY_S = 0.5
SWEEP_EVERY_S = 2.0
# Between two looks at whether the database has changed at all (SQLite): each is a wake-up and some microseconds.
NEWS_LOOK_S = 0.1
# Commits after so long without one are news, and so is their end after as long: work has come, work is done.
QUIET_S = 0.1
# When work comes, so many commits in a row are looked at: the first is the batch, those that follow have its lines.
NEWS_LOOKS = 6
# The same trouble is logged again after this time, not at each pass.
REPEAT_LOG_S = 60.0
# At the start a queue server may still be on its way: of the same compose file or the same boot. Most need seconds.
QUEUE_WAIT_S = 60.0
QUEUE_LOOK_S = 0.5
# After the second signal workers only hand back; then they are killed and their requests are given back for them.
HURRIED_PATIENCE_S = 3.0


class AlreadyRunning(PromptmillError):
    """Another supervisor looks after this home."""


class StopSignals:
    """How often the process was asked to stop: SIGINT, SIGTERM, SIGHUP (the terminal has gone)."""

    def __init__(self) -> None:
        self.count = 0
        self._event = threading.Event()

    def add(self) -> None:
        self.count += 1
        self._event.set()

    @property
    def is_set(self) -> bool:
        return self.count > 0

    def wait(self, seconds: float) -> bool:
        """Sleep, but not beyond the first signal. Returns whether there was one."""
        return self._event.wait(seconds)


@contextmanager
def stop_signals(*, second_raises: bool = False) -> Iterator[StopSignals]:
    """Count signals as long as the block lasts. Only in the main thread; elsewhere nothing arrives.

    second_raises: a second Ctrl-C is a KeyboardInterrupt, for whoever does not look at the count all the time.
    """
    signals = StopSignals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return

    def note(signum: int, _frame: FrameType | None) -> None:
        signals.add()
        if second_raises and signum == signal.SIGINT and signals.count > 1:
            raise KeyboardInterrupt

    wanted = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP"):
        wanted.append(signal.SIGHUP)
    before = {each: signal.signal(each, note) for each in wanted}
    try:
        yield signals
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


class News:
    """When commits are worth a look before the next one is due: where they begin, and where they have ended.

    In between workers commit all the time, and look after the queue themselves.
    """

    def __init__(self) -> None:
        self._changed_at = -float("inf")
        self._looks_left = 0
        self._is_quiet = True

    def note(self, has_changed: bool, now: float) -> bool:
        """Take in one look at the database; says whether it is worth a pass."""
        if has_changed:
            if self._is_quiet:
                self._looks_left = NEWS_LOOKS
            self._is_quiet, self._changed_at = False, now
            self._looks_left -= 1
            return self._looks_left >= 0
        if self._is_quiet or now - self._changed_at < QUIET_S:
            return False
        self._is_quiet = True
        return True


class Ticker:
    """The periodic pass: fill the queue, sweep, keep the embedded queue server alive. Call `tick` often; it is paced.

    is_strict: raise what will not pass by itself; a service logs it and goes on trying.
    """

    def __init__(
        self,
        database: Database,
        settings: Settings,
        server: QueueServer,
        note: Callable[[str], None],
        *,
        is_strict: bool,
        top_up_every_s: float = TOP_UP_EVERY_S,
    ) -> None:
        self._database = database
        self._settings = settings
        self._server = server
        self._note = note
        self._is_strict = is_strict
        self._top_up_every_s = top_up_every_s
        self._app = make_app(settings.queue)
        self._finalizer = Finalizer(database, settings.files_dir)
        self._changes = ChangeWatch(database)
        self._news = News()
        self._topped_up_at = -float("inf")
        self._swept_at = -float("inf")
        self._trouble: tuple[str, float] | None = None

    def wait(self, signals: StopSignals, seconds: float) -> None:
        """Sleep until the next `tick`, but not beyond a signal, nor beyond news that the next `tick` then looks at."""
        until = time.monotonic() + seconds
        while not signals.is_set and (left_s := until - time.monotonic()) > 0:
            signals.wait(min(NEWS_LOOK_S, left_s) if self._database.is_sqlite else left_s)
            if self._news.note(self._changes.has_changed(), time.monotonic()):
                self._topped_up_at = -float("inf")
                return

    def tick(self) -> bool:
        """Do what is due. Trouble that may pass is logged and left for the next call. Returns whether all is well."""
        steady = time.monotonic()
        if steady - self._topped_up_at < self._top_up_every_s:
            return self._trouble is None
        self._topped_up_at = steady
        try:
            now = self._database.now()
            if steady - self._swept_at >= SWEEP_EVERY_S or self._has_finished():
                self._swept_at = steady
                if self._server.ensure_running():
                    self._note("the queue server had died and was started again")
                sweep(self._database, self._app, self._settings, now, self._finalizer)  # tops up as well
            else:
                top_up(self._database, self._app, self._settings.queue, now)
        except PromptmillError as error:
            if self._is_strict and not error.retryable:
                raise
            self._log_trouble(error, steady)
        else:
            if self._trouble is not None:
                log.info("tick_recovered")
                self._note("the periodic pass goes on")
                self._trouble = None
        return self._trouble is None

    def close(self) -> None:
        self._changes.close()
        self._finalizer.close()
        self._app.close()

    def _has_finished(self) -> bool:
        """Whether a batch waits for its end."""
        with self._database.read() as connection:
            return queries.has_finishable_batch(connection)

    def _log_trouble(self, error: PromptmillError, steady: float) -> None:
        if self._trouble is None or self._trouble[0] != error.code or steady - self._trouble[1] > REPEAT_LOG_S:
            self._trouble = (error.code, steady)
            log.warning("tick_failed", code=error.code, reason=error.message)
            self._note(f"{error.message}; trying on")


@dataclass(frozen=True, slots=True)
class UpObserver:
    """What a supervisor tells. workers: how they stand, whenever that has changed."""

    note: Callable[[str], None] = lambda _text: None
    workers: Callable[[list[WorkerRow]], None] = lambda _rows: None


@dataclass(frozen=True, slots=True)
class UpOutcome:
    """How a supervisor ended. drain_s: from the first signal to the last worker's end; killed: workers it had to."""

    drain_s: float
    killed: int


def serve(
    settings: Settings,
    artifact: FoundArtifact,
    workers: int | None,
    observer: UpObserver,
    signals: StopSignals,
    *,
    has_doors: bool = False,
) -> UpOutcome:
    """Run until told to stop. Raises PromptmillError when it cannot start, or no worker can.

    workers: processes for the artifact on the CPU, which share its cores; None: one, or one for each GPU.
    has_doors: also take Celery tasks and inbox entries.
    """
    with _only_supervisor(settings), open_database(settings.database.url) as database:
        upgrade_schema(database)
        if workers is not None:
            settings = with_gpus(settings, "none")
        plan, count = plan_gpus(settings, artifact.path), workers or 1
        with open_queue_server(settings) as server:
            settings = share_cores(with_queue_url(settings, server.url), len(plan.gpus) or count)
            if not await_queue(settings.queue, observer.note, signals):
                return UpOutcome(0.0, 0)
            observer.note(f"serving {artifact.model}")
            if plan.reason:
                observer.note(f"on the CPU: {plan.reason}")
            observer.note(f"queue: {'a private server in ' + str(settings.home) if server.is_embedded else 'ready'}")
            ticker = Ticker(database, settings, server, observer.note, is_strict=False)
            crew = Crew(settings, database, artifact.path, count, observer.note, gives_up=False, gpus=plan.gpus)
            teller = _Teller(database, crew, observer)
            sender = WebhookSender(database, settings.webhook).start()
            validator = Validator(database, settings).start()
            doors = _open_doors(database, settings, observer) if has_doors else None
            try:
                while not signals.is_set:
                    crew.look_after()
                    ticker.tick()
                    teller.tell()
                    ticker.wait(signals, LOOK_S)
                if doors is not None:
                    doors.close()
                return _drain(settings, crew, ticker, observer, signals)
            finally:
                if doors is not None:
                    doors.close()
                crew.kill()
                ticker.close()
                sender.close()
                validator.close()


def tick_forever(settings: Settings, observer: UpObserver, signals: StopSignals) -> None:
    """The periodic pass alone, for where workers are somebody else's to look after. Any number of them may run.

    As long as it reaches the database and the queue it touches a file, for a health check from outside.
    """
    alive_file = settings.home / "run" / f"tick-{socket.gethostname()}.alive"
    alive_file.parent.mkdir(parents=True, exist_ok=True)
    with open_database(settings.database.url) as database:
        upgrade_schema(database)
        with open_queue_server(settings) as server:
            settings = with_queue_url(settings, server.url)
            if not await_queue(settings.queue, observer.note, signals):
                return
            ticker = Ticker(database, settings, server, observer.note, is_strict=False)
            sender = WebhookSender(database, settings.webhook).start()
            validator = Validator(database, settings).start()
            try:
                while not signals.is_set:
                    if ticker.tick():
                        with contextlib.suppress(OSError):
                            alive_file.touch()
                    ticker.wait(signals, TOP_UP_EVERY_S)
            finally:
                ticker.close()
                sender.close()
                validator.close()
                alive_file.unlink(missing_ok=True)


def await_queue(settings: QueueSettings, note: Callable[[str], None], signals: StopSignals) -> bool:
    """At the start: whether the queue answers and lets us in; False: a signal came first. One that goes away later is
    waited for without an end, by whoever needs it.

    Raises QueueError at once where waiting would not help, and after QUEUE_WAIT_S where the server has not come.
    """
    deadline = time.monotonic() + QUEUE_WAIT_S
    is_said = False
    with contextlib.closing(make_app(settings)) as app:
        while not signals.is_set:
            try:
                ping(app)
                return True
            except QueueError as error:
                if not error.may_come or time.monotonic() > deadline:
                    raise
                if not is_said:
                    is_said = True
                    log.warning("queue_awaited", up_to_s=QUEUE_WAIT_S, reason=error.message)
                    note(f"waiting up to {QUEUE_WAIT_S:g} s: {error.message}")
            signals.wait(QUEUE_LOOK_S)
    return False


def _open_doors(database: Database, settings: Settings, observer: UpObserver) -> Doors:
    from jobs.doors import OPENED, Doors  # which need this module

    doors = Doors(database, settings)
    observer.note(OPENED)
    return doors


def with_queue_url(settings: Settings, url: str) -> Settings:
    return settings.model_copy(update={"queue": settings.queue.model_copy(update={"url": url})})


def with_drain(settings: Settings, drain_s: float) -> Settings:
    return settings.model_copy(update={"worker": settings.worker.model_copy(update={"drain_s": drain_s})})


def with_gpus(settings: Settings, gpus: str) -> Settings:
    return settings.model_copy(update={"worker": settings.worker.model_copy(update={"gpus": gpus})})


def share_cores(settings: Settings, workers: int) -> Settings:
    """Unless the threads are set: give each of several workers its share of the cores, not all of them."""
    if workers <= 1 or settings.engine.threads:
        return settings
    threads = max(1, (psutil.cpu_count(logical=False) or os.cpu_count() or 1) // workers)
    return settings.model_copy(update={"engine": settings.engine.model_copy(update={"threads": threads})})


def _drain(settings: Settings, crew: Crew, ticker: Ticker, observer: UpObserver, signals: StopSignals) -> UpOutcome:
    """Let the workers leave. Meanwhile finished batches are still closed, and dead workers' requests given back."""
    began = time.monotonic()
    observer.note(
        f"stopping: workers finish what fits into {settings.worker.drain_s:g} s; again (Ctrl-C) to hand back at once"
    )
    asked, patience_until = 0, began + settings.worker.drain_s + STOP_PATIENCE_S
    killed = 0
    while not crew.has_left():
        if asked < min(signals.count, 2):
            asked += 1
            crew.ask_to_leave()
            if asked == 2:
                observer.note("handing back what runs")
                patience_until = time.monotonic() + HURRIED_PATIENCE_S
        if signals.count > 2 or time.monotonic() > patience_until:
            killed = crew.running
            crew.kill()
            break
        ticker.tick()
        time.sleep(0.02)
    drain_s = time.monotonic() - began
    log.info("drained", seconds=round(drain_s, 2), killed=killed)
    return UpOutcome(drain_s, killed)


class _Teller:
    """Shows the observer how the workers stand: often while one starts, seldom when all are at work."""

    def __init__(self, database: Database, crew: Crew, observer: UpObserver) -> None:
        self._database = database
        self._crew = crew
        self._observer = observer
        self._shown: list[tuple[str, str, str | None]] = []
        self._all_ready = False
        self._looked_at = -float("inf")

    def tell(self) -> None:
        if self._all_ready and time.monotonic() - self._looked_at < SWEEP_EVERY_S:
            return
        self._looked_at = time.monotonic()
        try:
            with self._database.read() as connection:
                rows = self._crew.rows(connection)
        except StorageError:
            return  # the ticker says what is wrong
        self._all_ready = len(rows) == len(self._crew) and all(row.status is WorkerStatus.READY for row in rows)
        shown = [(row.name, row.status.value, row.detail) for row in rows]
        if shown != self._shown:
            self._shown = shown
            self._observer.workers(rows)


@contextmanager
def _only_supervisor(settings: Settings) -> Iterator[None]:
    """Hold the home's lock, which the kernel drops however we end. Raises AlreadyRunning."""
    path = settings.home / "up.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file: IO[str] = path.open("a+")
    except OSError as error:
        raise PromptmillError(
            f"{path} cannot be written: {error.strerror}; choose another PROMPTMILL_HOME", code="unwritable_home"
        ) from error
    with file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                who = file.read().strip() or "unknown"
                raise AlreadyRunning(
                    f"promptmill up already runs on {settings.home} (process {who}); "
                    "submit to that one, stop it first, or choose another PROMPTMILL_HOME",
                    code="already_running",
                ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                file.truncate(0)
