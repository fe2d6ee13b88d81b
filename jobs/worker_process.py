"""Workers as child processes: started with the same settings, watched, started again when they die, told to stop.

Each gets a process group of its own, so that Ctrl-C at the terminal reaches its parent alone, which stops it in order.
A dead worker's requests are given back at once, not when its leases run out.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil
import structlog

from jobs.gpus import Gpu, for_gpus
from jobs.settings import Settings, environment_of
from storage import queries, transitions
from storage.database import Connection, Database
from storage.errors import PromptmillError, StorageError
from storage.models import WorkerStatus
from storage.queries import WorkerRow

log = structlog.get_logger()

# What a dying worker last wrote to standard error that is worth showing.
TAIL_BYTES = 4000
TAIL_LINES = 12
# A worker that dies is started again after a pause that doubles. One that worked for a while starts the series anew.
FIRST_RESTART_PAUSE_S = 0.5
LONGEST_RESTART_PAUSE_S = 60.0
GOOD_LIFE_S = 60.0
# Workers that never got ready so many times in a row: something is wrong that no further start will cure.
MOST_FAILED_STARTS = 3
# A worker's own way to say that its settings or its artifact are wrong.
EXIT_CANNOT_START = 2
# Its GPU is lost or sick. It is not started in a tight loop: each start looks at the GPU first, and ends at once if
# that is still no good.
EXIT_GPU = 69
FIRST_GPU_PAUSE_S = 30.0
LONGEST_GPU_PAUSE_S = 600.0
# After its drain budget a worker has this long to leave before it is killed.
STOP_PATIENCE_S = 15.0


class WorkerFailed(PromptmillError):
    """No worker can be started."""


class WorkerProcess:
    """A running `promptmill worker`. artifact: the folder it serves. gpu: what it is pinned to, if anything.

    place: which of its parent's workers it is. is_numbered: whether it calls itself by that on the CPU (`cpu1`).
    log_file: where its standard error goes.
    """

    def __init__(
        self, settings: Settings, artifact: Path, place: int = 0, gpu: Gpu | None = None, *, is_numbered: bool = False
    ) -> None:
        settings.logs_dir.mkdir(parents=True, exist_ok=True)
        self.log_file = settings.logs_dir / f"worker-{os.getpid()}-{place}.stderr.log"
        self._log: IO[bytes] = self.log_file.open("ab")
        self._log_start = self._log.tell()
        self.started_at = time.monotonic()
        self.was_put_down = False
        self._seen_halted_at: float | None = None
        command = [sys.executable, "-m", "workers", "worker", "--artifact", str(artifact)]
        command += ["--parent-pid", str(os.getpid())]
        pin: dict[str, str] = {}
        if is_numbered:
            command += ["--number", str(place)]
        if gpu is not None:
            command += ["--gpu", gpu.uuid]
            pin = {"CUDA_VISIBLE_DEVICES": gpu.uuid}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, **environment_of(settings), **pin},
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.poll()

    def halted_s(self) -> float:
        """For how long it has been seen halted by a signal, as SIGSTOP does. One that a debugger holds is not."""
        try:
            is_halted = psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        except psutil.Error:
            is_halted = False
        if not is_halted:
            self._seen_halted_at = None
            return 0.0
        now = time.monotonic()
        self._seen_halted_at = now if self._seen_halted_at is None else self._seen_halted_at
        return now - self._seen_halted_at

    def ask_to_leave(self) -> None:
        """It drains and leaves; asked again, it hands back at once what it has."""
        if self._process.poll() is None:
            self._process.terminate()

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def put_down(self) -> None:
        """Kill it for no fault of what it runs, and do not wait for its end."""
        self.was_put_down = True
        self._process.kill()

    def stop(self, patience_s: float) -> None:
        """Ask it to leave; kill it when that takes longer than `patience_s`."""
        self.ask_to_leave()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        self.kill()
        self.forget()

    def last_words(self) -> str:
        """The end of what this process wrote to standard error."""
        data = self.log_file.read_bytes()[self._log_start :][-TAIL_BYTES:]
        return "\n".join(data.decode("utf-8", "replace").strip().splitlines()[-TAIL_LINES:])

    def forget(self) -> None:
        """Close the log of a process that has ended, and remove it when it is empty."""
        self._log.close()
        if self._log_start == 0 and self.log_file.exists() and not self.log_file.stat().st_size:
            self.log_file.unlink()


@dataclass(slots=True)
class _Place:
    """One of the workers that there should be. failed_starts: in a row."""

    number: int
    gpu: Gpu | None = None
    process: WorkerProcess | None = None
    restarts: int = 0  # in this series
    failed_starts: int = 0
    restart_at: float = 0.0  # monotonic seconds


@dataclass(frozen=True, slots=True)
class _Death:
    pid: int
    exit_code: int
    was_stopped: bool  # by us, or for its GPU's sake: no evidence against what it ran


class Crew:
    """So many workers for one artifact. Call `look_after` a few times a second; it never waits.

    gpus: a worker for each of them; with none, `count` workers on the CPU. note: told what a person should know.
    gives_up: raise WorkerFailed also when workers that once were ready cannot be started any more; a service goes on
    trying.
    """

    def __init__(
        self,
        settings: Settings,
        database: Database,
        artifact: Path,
        count: int,
        note: Callable[[str], None],
        *,
        gives_up: bool,
        gpus: Sequence[Gpu] = (),
    ) -> None:
        self._settings = for_gpus(settings, gpus)
        self._database = database
        self._artifact = artifact
        self._note = note
        self._gives_up = gives_up
        self._host = socket.gethostname()
        self._places = [_Place(number, gpu) for number, gpu in enumerate(gpus or [None] * count)]
        self._unreported: list[_Death] = []
        self._pids: set[int] = set()  # all that we ever started
        self._was_ready = False
        self._is_stopping = False
        self._began_at = database.now()

    def __len__(self) -> int:
        return len(self._places)

    @property
    def running(self) -> int:
        return sum(place.process is not None for place in self._places)

    def look_after(self, *, start: bool = True) -> None:
        """Bury who died, and start who is missing unless `start` is False. Raises WorkerFailed."""
        for place in self._places:
            if place.process is None:
                if start and time.monotonic() >= place.restart_at:
                    place.process = WorkerProcess(
                        self._settings,
                        self._artifact,
                        place.number,
                        place.gpu,
                        is_numbered=place.gpu is None and len(self._places) > 1,
                    )
                    self._pids.add(place.process.pid)
                continue
            code = place.process.exit_code()
            if code is not None:
                self._bury(place, code)
            else:
                self._put_down_if_halted(place.process)
        self._report_deaths()

    def rows(self, connection: Connection) -> list[WorkerRow]:
        """Our workers as they described themselves; one that has just begun to start has no row yet."""
        pids = {place.process.pid for place in self._places if place.process is not None}
        return [row for row in self._our_rows(connection) if row.pid in pids]

    def ask_to_leave(self) -> None:
        """SIGTERM to all: they drain. A second time: they hand back at once."""
        self._is_stopping = True
        for place in self._places:
            if place.process is not None:
                place.process.ask_to_leave()

    def has_left(self) -> bool:
        """Whether all have ended, which is noted for each."""
        for place in self._places:
            if place.process is not None and (code := place.process.exit_code()) is not None:
                self._forget(place, code)
        self._report_deaths()
        return not self.running

    def kill(self) -> None:
        """Whoever is still there ends now; what they held is given back."""
        self._is_stopping = True
        for place in self._places:
            if place.process is not None:
                place.process.kill()
        self.has_left()

    def stop(self, patience_s: float = STOP_PATIENCE_S) -> None:
        """Ask all to leave; kill those that take longer than `patience_s`."""
        self.ask_to_leave()
        deadline = time.monotonic() + patience_s
        while not self.has_left() and time.monotonic() < deadline:
            time.sleep(0.02)
        self.kill()

    def _put_down_if_halted(self, process: WorkerProcess) -> None:
        """Kill what has lost all it held, and may still hold SQLite's one write lock, which nobody else can take."""
        halted_s = process.halted_s()
        if halted_s >= self._settings.worker.lease_s and not process.was_put_down:
            log.warning("worker_halted", pid=process.pid, seconds=round(halted_s, 1))
            self._note(f"the worker {process.pid} has been halted by a signal for {halted_s:.0f} s and is killed")
            process.put_down()

    def _bury(self, place: _Place, code: int) -> None:
        assert place.process is not None
        lived_s = time.monotonic() - place.process.started_at
        words = place.process.last_words()
        pid = place.process.pid
        ready = self._pids_that_got_ready()
        was_ready = ready is None or pid in ready
        self._was_ready = self._was_ready or ready is None or bool(ready)
        self._forget(place, code)
        if was_ready:
            place.failed_starts = 0
        elif code != EXIT_GPU:
            place.failed_starts += 1
        place.restarts = 1 if was_ready and lived_s > GOOD_LIFE_S else place.restarts + 1
        log.warning("worker_died", pid=pid, exit_code=code, lived_s=round(lived_s, 1), last_words=words)
        is_hopeless = code == EXIT_CANNOT_START or place.failed_starts >= MOST_FAILED_STARTS
        is_last = code == EXIT_GPU and self._gives_up and not self.running
        if is_last or (is_hopeless and (self._gives_up or not self._was_ready)):
            raise WorkerFailed(f"the worker cannot start ({explain_exit(code)}):\n{words}", code="worker_failed")
        pause_s = restart_pause_s(code, place.restarts)
        place.restart_at = time.monotonic() + pause_s
        who = f"the worker of {place.gpu.name}" if place.gpu else "the worker"
        self._note(f"{who} died ({explain_exit(code)}) and is started again in {pause_s:g} s")

    def _forget(self, place: _Place, code: int) -> None:
        process, place.process = place.process, None
        assert process is not None
        was_stopped = self._is_stopping or process.was_put_down or code == EXIT_GPU
        self._unreported.append(_Death(process.pid, code, was_stopped))
        process.forget()

    def _pids_that_got_ready(self) -> set[int] | None:
        """None: not to be known now, and no reason to give up."""
        try:
            with self._database.read() as connection:
                return {row.pid for row in self._our_rows(connection) if row.ready_at is not None}
        except StorageError:
            return None

    def _report_deaths(self) -> None:
        """Tell the database who died and how; what it cannot hear now it hears at the next call."""
        while self._unreported:
            death = self._unreported[0]
            try:
                with self._database.read() as connection:
                    row = next((row for row in self._our_rows(connection) if row.pid == death.pid), None)
                if row is not None:
                    self._report(row, death)
            except StorageError as error:
                if not error.retryable:
                    raise
                log.warning("death_not_reported", pid=death.pid, code=error.code, reason=error.message)
                return
            self._unreported.pop(0)

    def _report(self, row: WorkerRow, death: _Death) -> None:
        from jobs.sweep import retry_limits  # brings Celery, which whoever only looks for workers does not need

        now = self._database.now()
        told = row.status in (WorkerStatus.STOPPED, WorkerStatus.FAILED)  # itself, and it knows best
        with self._database.write() as connection:
            given_back = transitions.abandon_worker(
                connection,
                row.name,
                now,
                exit_code=death.exit_code,
                was_stopped=death.was_stopped,
                limits=retry_limits(self._settings.worker),
            )
            transitions.retire_worker(
                connection,
                row.name,
                row.stopped_at or now,
                status=row.status if told else WorkerStatus.FAILED,
                detail=row.detail if told else explain_exit(death.exit_code),
                exit_code=death.exit_code,
            )
        if given_back:
            log.warning("requests_given_back", worker=row.name, requests=len(given_back))

    def _our_rows(self, connection: Connection) -> list[WorkerRow]:
        """All that we ever started and that came to describe itself, the newest first: a process id may come twice."""
        rows = queries.list_workers(connection, since=self._began_at - 5.0)
        ours = [row for row in rows if row.host == self._host and row.pid in self._pids]
        return sorted(ours, key=lambda row: -row.started_at)


def serving_workers(connection: Connection, model: str | None, now: float) -> list[WorkerRow]:
    """Workers that serve a model (None: any) or are about to, those at work first.

    One of this host whose process has gone does not count, whatever it last said.
    """
    host = socket.gethostname()
    rows = queries.list_workers(connection, since=now - queries.WORKER_SEEN_S)
    found = [
        row
        for row in rows
        if model in (None, row.model)
        and row.status in (WorkerStatus.READY, WorkerStatus.STARTING)
        and (row.host != host or psutil.pid_exists(row.pid))
    ]
    return sorted(found, key=lambda row: row.status is not WorkerStatus.READY)


def restart_pause_s(code: int, restarts: int) -> float:
    """How long a worker that ended is left dead. restarts: how many in this series, this one included."""
    if code == EXIT_GPU:
        return min(LONGEST_GPU_PAUSE_S, FIRST_GPU_PAUSE_S * 2.0 ** (restarts - 1))
    return min(LONGEST_RESTART_PAUSE_S, FIRST_RESTART_PAUSE_S * 2.0 ** (restarts - 1))


def explain_exit(code: int) -> str:
    """An exit code as a person reads it."""
    if code == EXIT_GPU:
        return f"exit code {code}, its GPU is lost or sick"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"exit code {code}, {signal.Signals(-code).name}"
    except ValueError:
        return f"exit code {code}"
