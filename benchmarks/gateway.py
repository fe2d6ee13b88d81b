"""What an upload costs: checking an input file, writing its rows, and the memory of a gateway that takes it in.

    python -m benchmarks.gateway            # all parts
    python -m benchmarks.gateway check      # lines checked a second, on one core
    python -m benchmarks.gateway write      # the same file -> rows on SQLite, lines a second, the check not counted
    python -m benchmarks.gateway upload     # 199 MB through a gateway process: seconds, and its largest resident set

Lines are chat requests of about 440 bytes: a system message and forty words. Each part prints a row, and the run ends
with one JSON line. No model is run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import uuid
from datetime import UTC, datetime
from pathlib import Path

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.cpu import hardware
from jobs.inputs import InputOptions, InputReader
from jobs.keys import make_key
from jobs.protocol import Endpoint
from jobs.settings import Settings, environment_of
from jobs.source import open_source
from jobs.submit import BatchOptions, write_lines
from jobs.validation import check_lines
from storage import queries, transitions
from storage.database import open_database, upgrade_schema
from storage.transitions import NewBatch

MODEL = "model"
LINES = 50_000
UPLOAD_BYTES = 199_000_000
WORDS = (
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "seven",
    "wizards",
    "brew",
    "jack",
)

console = Console()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="check, write, upload; all by default")
    options = parser.parse_args()
    parts = options.parts or ["check", "write", "upload"]
    measured: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="pmb") as folder:
        path = write_input(Path(folder))
        if "check" in parts:
            measured["check_lines_per_s"] = check(path)
        if "write" in parts:
            measured |= write(path)
        if "upload" in parts:
            measured |= upload(path)
    table = Table("measure", "value")
    for name, value in measured.items():
        table.add_row(name, f"{value:,.1f}")
    console.print(f"{hardware(1)}; {datetime.now(UTC):%Y-%m-%d %H:%M} UTC")
    console.print(table)
    print(json.dumps({"benchmark": "gateway", "hardware": hardware(1), **measured}))


def write_input(folder: Path) -> Path:
    rng = random.Random(1)
    path = folder / "input.jsonl"
    with path.open("w") as file:
        for number in range(LINES):
            messages = [
                {"role": "system", "content": "You are a helpful assistant."},
                {"role": "user", "content": " ".join(rng.choices(WORDS, k=40))},
            ]
            body = {"model": MODEL, "messages": messages, "max_tokens": 100}
            line = {"custom_id": f"request-{number}", "method": "POST", "url": Endpoint.CHAT.value, "body": body}
            file.write(json.dumps(line) + "\n")
    return path


def reads_as() -> InputOptions:
    return InputOptions(model=MODEL, endpoint=Endpoint.CHAT, only_batch_lines=True)


def check(path: Path) -> float:
    """Lines a second of processor time, in one thread: the best of three."""
    best = 0.0
    for _ in range(3):
        with open_source(path, path.parent) as source:
            began = time.process_time()
            findings = check_lines(InputReader(source, reads_as()), MODEL, max_lines=LINES, fails_lines=False)
            best = max(best, findings.lines / (time.process_time() - began))
        assert (findings.lines, findings.count) == (LINES, 0)
    return best


def write(path: Path) -> dict[str, float]:
    """Lines a second, on the clock and of processor time, from reading to the commit of the last group."""
    with open_database(f"sqlite:///{path.parent / 'write.db'}") as database:
        upgrade_schema(database)
        new = NewBatch(f"batch_{uuid.uuid4().hex}", "f", Endpoint.CHAT.value, MODEL)
        batch_id = database.retry(lambda connection: transitions.create_batch(connection, new, database.now()))
        with database.read() as connection:
            batch = queries.find_batch_by_id(connection, batch_id)
        assert batch is not None
        with open_source(path, path.parent) as source:
            began, began_cpu = time.perf_counter(), time.process_time()
            assert write_lines(database, source, reads_as(), BatchOptions(), batch, keep_on=lambda: True)
            seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - began_cpu
    return {"write_lines_per_s": LINES / seconds, "write_lines_per_cpu_s": LINES / cpu_seconds}


def upload(path: Path) -> dict[str, float]:
    """Through a real gateway process, by a client that streams."""
    large = path.with_name("large.jsonl")
    content = path.read_bytes()
    with large.open("wb") as file:
        while file.tell() + len(content) <= UPLOAD_BYTES:
            file.write(content)
    settings = Settings(home=path.parent / "home")
    settings = settings.model_copy(
        update={
            "database": settings.database.model_copy(update={"url": f"sqlite:///{path.parent / 'gateway.db'}"}),
            "gateway": settings.gateway.model_copy(update={"port": 0}),
        }
    )
    with open_database(settings.database.url) as database:
        upgrade_schema(database)
        key = make_key(database, tenant="default", name="benchmark").key
    process = subprocess.Popen(
        [sys.executable, "-m", "jobs.cli", "serve"],
        env={**os.environ, **environment_of(settings)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        url = next(line.split()[-1] for line in process.stderr if "serving http://" in line)
        began = time.perf_counter()
        with large.open("rb") as file:
            answer = httpx.post(
                f"{url}/files",
                data={"purpose": "batch"},
                files={"file": ("large.jsonl", file)},
                headers={"authorization": f"Bearer {key}"},
                timeout=600,
                trust_env=False,
            )
        seconds = time.perf_counter() - began
        answer.raise_for_status()
        peak = _peak_bytes(process.pid)
    finally:
        process.terminate()
        process.communicate()
    return {
        "upload_mb": answer.json()["bytes"] / 1e6,
        "upload_s": seconds,
        "gateway_peak_mb": peak / 1e6,
    }


def _peak_bytes(pid: int) -> int:
    """The largest resident set that a process has had, as Linux knows it; elsewhere the present one."""
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        return int(psutil.Process(pid).memory_info().rss)
    (peak,) = (row.split()[1] for row in status.read_text().splitlines() if row.startswith("VmHWM"))
    return int(peak) * 1024


if __name__ == "__main__":
    main()
