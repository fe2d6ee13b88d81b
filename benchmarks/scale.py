"""The path around the model at scale: throughput, a million lines, steering, idling. The engine is the null engine.

    python -m benchmarks.scale throughput                       # SQLite; add --database URL for an empty Postgres one
    python -m benchmarks.scale million --lines 1000000          # submit, memory, first result, cost by size
    python -m benchmarks.scale steer --lines 1000000            # pause, priority, cancel on a job of that size
    python -m benchmarks.scale idle

Each part prints a table, and the run ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.cpu import demo_artifact, hardware
from benchmarks.path import PathBench
from jobs.dispatch import top_up
from jobs.inputs import InputOptions
from jobs.source import open_source
from jobs.submit import submit
from jobs.sweep import sweep
from storage import queries
from storage.queries import BatchRow

# As `promptmill up` does it.
TOP_UP_EVERY_S = 0.5
SWEEP_EVERY_S = 2.0
# What a worker runs at once, as on a GPU with a small model.
ROWS = 256

console = Console()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="throughput, million, steer, idle; all by default")
    parser.add_argument("--requests", type=int, default=30_000, help="of the throughput part")
    parser.add_argument("--lines", type=int, default=1_000_000, help="of the other parts")
    parser.add_argument("--database", default="", help="URL of an empty database; by default SQLite in a new folder")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "promptmill-bench")
    options = parser.parse_args()
    parts = options.parts or ["throughput", "million", "steer", "idle"]
    options.cache.mkdir(parents=True, exist_ok=True)
    console.print(f"{hardware(2)}; {datetime.now(UTC):%Y-%m-%d %H:%M} UTC")
    found: dict[str, Any] = {"hardware": hardware(2)}
    if "throughput" in parts:
        found["throughput"] = throughput(options)
    print(json.dumps(found))


def throughput(options: argparse.Namespace) -> dict[str, Any]:
    """From a full database and an empty queue to the last committed result; one worker process, the queue server, the
    periodic pass and (on Postgres) the database server on the same cores."""
    with open_bench(options) as bench:
        batch = submit_prompts(bench, write_prompts(bench.home / "in.jsonl", options.requests))
        started = time.perf_counter()
        batch = see_through(bench, batch)
        seconds = time.perf_counter() - started
        assert batch.completed_requests == options.requests, f"{batch.failed_requests} failed"
        kind = "sqlite" if bench.database.is_sqlite else "postgres"
    rate = options.requests / seconds
    table = Table(title=f"throughput: {options.requests:,} short chat prompts, null engine, one worker process")
    for heading in ("database", "seconds", "requests/s"):
        table.add_column(heading, justify="right")
    table.add_row(kind, f"{seconds:.1f}", f"{rate:,.0f}")
    console.print(table)
    return {"database": kind, "requests": options.requests, "seconds": seconds, "requests_per_s": rate}


def open_bench(options: argparse.Namespace) -> PathBench:
    changes: dict[str, Mapping[str, object]] = {"engine": {"flavour": "null", "max_batch_size": ROWS}}
    if options.database:
        changes["database"] = {"url": options.database}
    return PathBench(demo_artifact(options.cache), ROWS, 1, **changes)


def write_prompts(path: Path, lines: int) -> Path:
    with path.open("w") as file:
        for n in range(lines):
            file.write(json.dumps({"custom_id": f"q{n}", "prompt": f"What is the square of {n}?"}) + "\n")
    return path


def submit_prompts(bench: PathBench, path: Path) -> BatchRow:
    with open_source(path, bench.home) as source:
        return submit(bench.database, source, InputOptions(model=bench.artifact.model)).batch


def see_through(bench: PathBench, batch: BatchRow) -> BatchRow:
    """Make the periodic pass until the batch has its answers."""
    swept = 0.0
    while batch.remaining_requests:
        now = bench.database.now()
        if time.monotonic() - swept > SWEEP_EVERY_S:
            swept = time.monotonic()
            sweep(bench.database, bench.app, bench.settings, now)
        else:
            top_up(bench.database, bench.app, bench.settings.queue, now)
        time.sleep(TOP_UP_EVERY_S if batch.remaining_requests > 5000 else 0.05)
        with bench.database.read() as connection:
            found = queries.find_batch_by_id(connection, batch.id)
        assert found is not None
        batch = found
    return batch


if __name__ == "__main__":
    main()
