"""The path around the model at scale: throughput, a million lines, steering, idling. The engine is the null engine.

    python -m benchmarks.scale throughput                       # SQLite; --database URL for an empty Postgres one
    python -m benchmarks.scale million --lines 1000000 --plot docs/cost.svg
    python -m benchmarks.scale cancel --lines 1000000
    python -m benchmarks.scale idle

throughput: from a full database and an empty queue to the last committed result and attempt record.
million: `promptmill submit` while a worker is there: its speed, the first result, all memory, `show` and `list`,
pause and priority half-way, the processors' time for a request as the table grows (--plot draws it), the result files.
cancel: `promptmill cancel` when all lines wait and generations run. idle: `promptmill up` with nothing to do.

One worker process, the queue server and the periodic pass run on the same machine. Each part prints a table, and the
run ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table
from sqlalchemy import text

from benchmarks.cpu import demo_artifact, hardware
from benchmarks.path import PathBench
from benchmarks.plot import write_plot
from jobs.inputs import InputOptions
from jobs.settings import environment_of
from jobs.source import open_source
from jobs.submit import BatchOptions, submit
from jobs.up import LOOK_S as LOOK_AT_WORKERS_S
from jobs.up import StopSignals, Ticker
from storage import queries
from storage.models import BatchStatus
from storage.queries import BatchRow

# What a worker runs at once, as on a GPU with a small model.
ROWS = 256
LOOK_S = 0.1
MIB = 1 << 20
# Points of the plot, by completed requests.
MARKS = (10_000, 20_000, 50_000, 100_000, 200_000, 350_000, 500_000, 700_000, 850_000, 1_000_000)
IDLE_S = 60.0
# A job with less than this left would be done before anybody could steer it.
STEERED_LINES = 50_000

console = Console()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="throughput, million, cancel, idle; all by default")
    parser.add_argument("--requests", type=int, default=30_000, help="of the throughput part")
    parser.add_argument("--lines", type=int, default=1_000_000, help="of the parts million and cancel")
    parser.add_argument("--database", default="", help="URL of an empty database; by default SQLite in a new folder")
    parser.add_argument("--plot", type=Path, help="where the part million draws the cost of a request (SVG)")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "promptmill-bench")
    options = parser.parse_args()
    parts = {"throughput": throughput, "million": million, "cancel": cancel, "idle": idle}
    options.cache.mkdir(parents=True, exist_ok=True)
    console.print(f"{hardware(2)}; {datetime.now(UTC):%Y-%m-%d %H:%M} UTC")
    found: dict[str, Any] = {"hardware": hardware(2)}
    for name in options.parts or parts:
        found[name] = parts[name](options)
    print(json.dumps(found))


def throughput(options: argparse.Namespace) -> dict[str, Any]:
    """Every process on the same cores: the worker, the queue server, the periodic pass, the database server if any."""
    with Scale(options) as scale:
        batch = scale.submit(write_prompts(scale.home / "in.jsonl", options.requests))
        before, started = scale.cpu_s(), time.perf_counter()
        with scale.ticking():
            batch = scale.wait(batch, lambda row: row.remaining_requests == 0)
            seconds = time.perf_counter() - started
        assert batch.completed_requests == options.requests, f"{batch.failed_requests} failed"
        found = {
            "database": scale.kind,
            "requests": options.requests,
            "seconds": round(seconds, 1),
            "requests_per_s": round(options.requests / seconds),
            "cpu_ms_per_request": round((scale.cpu_s() - before) / options.requests * 1e3, 3),
        }
    show("throughput: short chat prompts, null engine, one worker process", found)
    return found


def million(options: argparse.Namespace) -> dict[str, Any]:
    """One large job from `promptmill submit` to its files, with a worker that is there from the start."""
    with Scale(options) as scale, scale.ticking():
        path = write_prompts(scale.home / "in.jsonl", options.lines)
        memory = scale.watch_memory()
        started_at, started = scale.database.now(), time.perf_counter()
        children_s = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
        submitter = scale.start_command("submit", str(path), "--model", str(scale.artifact.path), "--quiet")
        memory.add("submit", submitter.pid)
        cost = CostMeter(scale)
        batch = scale.wait_for_batch()
        first_s: float | None = None
        while submitter.poll() is None:
            batch = scale.read(batch)
            cost.note(batch)
            if first_s is None and batch.completed_requests:
                first_s = scale.database.now() - started_at
            time.sleep(LOOK_S)
        submit_s = time.perf_counter() - started
        submit_cpu_s = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - children_s
        assert submitter.returncode == 0, "submit failed"
        done_when_submitted = batch.completed_requests
        looks = scale.time_looks(batch)
        steering = steer(scale, batch) if scale.read(batch).remaining_requests > STEERED_LINES else {}
        batch = scale.wait(batch, lambda row: row.remaining_requests == 0, cost.note)
        ended = time.perf_counter()
        scale.wait(batch, lambda row: row.is_final)
        found = {
            "database": scale.kind,
            "lines": options.lines,
            "submit_lines_per_s": round(options.lines / submit_s),
            "submit_lines_per_cpu_s": round(options.lines / submit_cpu_s),
            "answered_meanwhile": done_when_submitted,
            "first_result_s": None if first_s is None else round(first_s, 2),
            **looks,
            **steering,
            "whole_s": round(ended - started, 1),
            "files_s": round(time.perf_counter() - ended, 1),
            **{f"most_{name}_mib": round(value) for name, value in memory.close().items()},
            "cpu_ms_per_request_at": {str(at): round(ms, 3) for at, ms in cost.points},
        }
    if options.plot:
        write_plot(
            options.plot,
            cost.points,
            title="Processor time of one request as the job grows (null engine)",
            x_label="requests completed",
            y_label="ms of all processes for a request",
        )
    show(f"a job of {options.lines:,} lines", found)
    return found


def cancel(options: argparse.Namespace) -> dict[str, Any]:
    """Cancel while all lines wait and generations of a minute run: when nothing of it runs, and when it has ended."""
    with Scale(options, token_s=4.0) as scale:
        batch = scale.submit(write_prompts(scale.home / "in.jsonl", options.lines))
        with scale.ticking():
            scale.wait_until(lambda: scale.running(batch) >= ROWS)
            asked_at, started = scale.database.now(), time.perf_counter()
            scale.command("cancel", batch.public_id)
            returned_s = time.perf_counter() - started
            scale.wait_until(lambda: scale.running(batch) == 0)
            stopped_s, stopped_at = time.perf_counter() - started, scale.database.now()
            scale.wait(batch, lambda row: row.is_final)
            found = {
                "database": scale.kind,
                "lines": options.lines,
                "command_s": round(returned_s, 2),
                "last_start_s": round(max(0.0, scale.last_start(batch) - asked_at), 2),
                "nothing_runs_s": round(stopped_s, 2),
                # The command's own start-up, which a busy machine draws out, left aside.
                "nothing_runs_after_its_commit_s": round(stopped_at - (scale.read(batch).cancelling_at or 0.0), 2),
                "ended_s": round(time.perf_counter() - started, 1),
            }
    show(f"cancel a job of {options.lines:,} lines, {ROWS} generations running", found)
    return found


def idle(options: argparse.Namespace) -> dict[str, Any]:
    """The share of a core that a service takes which has nothing to do, with a job behind it."""
    with Scale(options) as scale, scale.ticking():
        batch = scale.submit(write_prompts(scale.home / "in.jsonl", 1000))
        scale.wait(batch, lambda row: row.is_final)
        time.sleep(5.0)  # whatever is still settling
        before = scale.cpu_s()
        time.sleep(IDLE_S)
        share = (scale.cpu_s() - before) / IDLE_S
    found = {"database": scale.kind, "percent_of_a_core": round(100 * share, 2), "seconds": IDLE_S}
    show("idle: worker, queue server, periodic pass", found)
    return found


def steer(scale: Scale, batch: BatchRow) -> dict[str, float]:
    """Pause, resume and a small job that overtakes by priority, on a large job in full swing."""
    asked_at = scale.database.now()
    scale.command("pause", batch.public_id)
    paused_s = scale.database.now() - asked_at
    scale.wait_until(lambda: scale.running(batch) == 0)
    time.sleep(2.0)  # had anything more begun, it would have by now
    last_start_s = max(0.0, scale.last_start(batch) - (scale.read(batch).paused_at or 0.0))
    scale.command("resume", batch.public_id)
    path = write_prompts(scale.home / "small.jsonl", 100, "What is the cube of")
    small = scale.submit(path, priority=-1)
    time.sleep(1.0)
    asked_at = scale.database.now()
    scale.command("set", small.public_id, "--priority", "1")
    set_s = scale.database.now() - asked_at
    small = scale.wait(small, lambda row: row.remaining_requests == 0)
    return {
        "pause_command_s": round(paused_s, 2),
        "last_start_after_pauses_commit_s": round(last_start_s, 2),
        "priority_command_s": round(set_s, 2),
        "all_100_answered_after_priority_s": round(scale.database.now() - asked_at, 2),
    }


@dataclass
class CostMeter:
    """The processors' time for a request, between one mark and the next."""

    scale: Scale
    points: list[tuple[int, float]] = field(default_factory=list)
    _done: int = 0
    _cpu_s: float = 0.0

    def __post_init__(self) -> None:
        self._cpu_s = self.scale.cpu_s()

    def note(self, batch: BatchRow) -> None:
        marks = [mark for mark in MARKS if not self.points or mark > self.points[-1][0]]
        if marks and batch.completed_requests >= marks[0]:
            cpu_s, done = self.scale.cpu_s(), batch.completed_requests
            self.points.append((done, (cpu_s - self._cpu_s) / (done - self._done) * 1e3))
            self._done, self._cpu_s = done, cpu_s


class MemoryWatch:
    """The most resident memory that each process had, in MiB."""

    def __init__(self, processes: Mapping[str, int]) -> None:
        self._processes = {name: psutil.Process(pid) for name, pid in processes.items()}
        self._most: dict[str, float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def add(self, name: str, pid: int) -> None:
        self._processes = {**self._processes, name: psutil.Process(pid)}

    def close(self) -> dict[str, float]:
        self._stop.set()
        self._thread.join()
        return self._most

    def _loop(self) -> None:
        while not self._stop.wait(LOOK_S):
            for name, process in self._processes.items():
                try:
                    self._most[name] = max(self._most.get(name, 0.0), process.memory_info().rss / MIB)
                except psutil.NoSuchProcess:
                    continue


class Scale(PathBench):
    """A home with a queue server and a worker with the null engine. token_s: what a token takes."""

    def __init__(self, options: argparse.Namespace, token_s: float = 0.0) -> None:
        changes: dict[str, Mapping[str, object]] = {"engine": {"flavour": "null", "null_token_s": token_s}}
        if options.database:
            changes["database"] = {"url": options.database}
        super().__init__(demo_artifact(options.cache), ROWS, 1, **changes)
        self.kind = "sqlite" if self.database.is_sqlite else "postgres"

    @contextmanager
    def ticking(self) -> Iterator[None]:
        """The periodic pass, as `promptmill up` makes it."""
        ticker = Ticker(self.database, self.settings, self.server, console.print, is_strict=False)
        signals = StopSignals()

        def tick() -> None:
            while not signals.is_set:
                ticker.wait(signals, LOOK_AT_WORKERS_S)
                ticker.tick()

        thread = threading.Thread(target=tick, daemon=True)
        thread.start()
        try:
            yield
        finally:
            signals.add()
            thread.join()
            ticker.close()

    def submit(self, path: Path, priority: int = 0) -> BatchRow:
        with open_source(path, self.home) as source:
            options = InputOptions(model=self.artifact.model)
            return submit(self.database, source, options, BatchOptions(priority=priority)).batch

    def start_command(self, *arguments: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, **environment_of(self.settings)}
        command = [sys.executable, "-m", "jobs.cli", *arguments]
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)

    def command(self, *arguments: str) -> float:
        """Run a command of the project. Returns its seconds, start-up included."""
        started = time.perf_counter()
        code = self.start_command(*arguments).wait()
        assert code == 0, f"{arguments} ended with {code}"
        return time.perf_counter() - started

    def time_looks(self, batch: BatchRow) -> dict[str, float]:
        """`show` and `list`: what they ask the database, and the whole commands, in milliseconds (medians)."""
        asked: dict[str, Callable[[Any], object]] = {
            "show": lambda connection: queries.find_batch(connection, batch.public_id),
            "list": lambda connection: queries.list_batches(connection, 20),
        }
        found: dict[str, float] = {}
        for name, ask in asked.items():
            seconds = []
            for _ in range(20):
                started = time.perf_counter()
                with self.database.read() as connection:
                    ask(connection)
                seconds.append(time.perf_counter() - started)
            found[f"{name}_query_ms"] = round(statistics.median(seconds) * 1e3, 1)
        commands = {"show": ("show", batch.public_id), "list": ("list",)}
        for name, arguments in commands.items():
            found[f"{name}_command_ms"] = round(statistics.median(self.command(*arguments) for _ in range(3)) * 1e3)
        return found

    def read(self, batch: BatchRow) -> BatchRow:
        with self.database.read() as connection:
            found = queries.find_batch_by_id(connection, batch.id)
        assert found is not None
        return found

    def wait(
        self,
        batch: BatchRow,
        holds: Callable[[BatchRow], bool],
        meanwhile: Callable[[BatchRow], None] = lambda _batch: None,
    ) -> BatchRow:
        while not holds(batch):
            time.sleep(LOOK_S)
            batch = self.read(batch)
            meanwhile(batch)
        return batch

    def wait_until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            time.sleep(LOOK_S)

    def wait_for_batch(self) -> BatchRow:
        """The batch that somebody else is submitting."""
        while True:
            with self.database.read() as connection:
                found = queries.open_batches(connection, BatchStatus.VALIDATING)
            if found:
                return found[0]
            time.sleep(LOOK_S)

    def running(self, batch: BatchRow) -> int:
        running = text("SELECT count(*) FROM requests WHERE status = 'running' AND batch_id + 0 = :batch")
        with self.database.read() as connection:
            return int(connection.execute(running, {"batch": batch.id}).scalar_one())

    def last_start(self, batch: BatchRow) -> float:
        """When the last of its requests was claimed; all of them have ended."""
        last = text(
            "SELECT max(a.claimed_at) FROM "
            "(SELECT claimed_at, request_id FROM attempts ORDER BY id DESC LIMIT 10000) a "
            "JOIN requests r ON r.id = a.request_id WHERE r.batch_id = :batch"
        )
        with self.database.read() as connection:
            return float(connection.execute(last, {"batch": batch.id}).scalar_one() or 0.0)

    def watch_memory(self) -> MemoryWatch:
        return MemoryWatch({"worker": self.worker.pid, "up": os.getpid(), "queue_server": self.queue_server_pid()})

    def queue_server_pid(self) -> int:
        return next(child.pid for child in psutil.Process().children() if child.name().endswith("-server"))

    def cpu_s(self) -> float:
        """Processor seconds so far: this process, the worker, the queue server, a Postgres server on this machine."""
        processes = [psutil.Process(pid) for pid in (os.getpid(), self.worker.pid, self.queue_server_pid())]
        if not self.database.is_sqlite:
            processes += [each for each in psutil.process_iter(["name"]) if each.info["name"] == "postgres"]
        total = 0.0
        for process in processes:
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += times.user + times.system
        return total


def write_prompts(path: Path, lines: int, question: str = "What is the square of") -> Path:
    with path.open("w") as file:
        for n in range(lines):
            file.write(json.dumps({"custom_id": f"q{n}", "prompt": f"{question} {n}?"}) + "\n")
    return path


def show(title: str, found: Mapping[str, Any]) -> None:
    table = Table(title=title)
    table.add_column("what")
    table.add_column("measured", justify="right")
    for name, value in found.items():
        shown: Sequence[Any] = [f"{at}: {ms}" for at, ms in value.items()] if isinstance(value, dict) else [value]
        table.add_row(
            name.replace("_", " "), "\n".join(f"{each:,}" if isinstance(each, int) else str(each) for each in shown)
        )
    console.print(table)


if __name__ == "__main__":
    main()
