"""What the gateway adds to a chat call: everything but the engine, which is the null engine.

    python -m benchmarks.gateway_chat latency            # 50 calls/s: client, gateway, queue server, worker, SQLite
    python -m benchmarks.gateway_chat streams            # memory of a gateway that holds 500 idle streams
    python -m benchmarks.gateway_chat bulk               # chat while a worker is full of bulk work
    python -m benchmarks.gateway_chat bulk --model       # the same with the model: SmolLM2-135M, int8

Each part prints a table, and the run ends with one JSON line. The client is part of the load: it is a bare socket that
sends at fixed times, whether or not earlier calls have ended, and measures from the time a call was due.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.cpu import demo_artifact, hardware
from benchmarks.pace import Pace
from benchmarks.path import PathBench
from jobs.dispatch import top_up
from jobs.inputs import InputOptions
from jobs.protocol import Endpoint
from jobs.settings import environment_of
from jobs.source import open_source
from jobs.submit import submit
from storage import queries
from workers.models.artifact import Artifact, load_artifact

PROMPT = "Which of the four seasons do you like best, and what is it that you like about it?"
BULK_PROMPT = "Tell a story of a heron that finds a key by the river and wonders what it opens."

console = Console()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="latency, streams, bulk; all by default")
    parser.add_argument("--rate", type=float, default=50.0, help="calls a second, of the latency part")
    parser.add_argument("--seconds", type=float, default=30.0, help="of the latency and the bulk part")
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--model", action="store_true", help="run the model in the bulk part")
    parser.add_argument("--artifact", type=Path, help="what to serve; by default SmolLM2-135M-Instruct, int8")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "promptmill-bench")
    options = parser.parse_args()
    parts = options.parts or ["latency", "streams", "bulk"]
    options.cache.mkdir(parents=True, exist_ok=True)
    artifact = (
        load_artifact(options.artifact, check_digests=False) if options.artifact else demo_artifact(options.cache)
    )
    console.print(f"{hardware(2)}; {datetime.now(UTC):%Y-%m-%d %H:%M} UTC")
    found: dict[str, Any] = {"hardware": hardware(2)}
    if "latency" in parts:
        found["latency"] = measure_latency(artifact, options.rate, options.seconds)
    if "streams" in parts:
        found["streams"] = measure_streams(artifact, options.streams)
    if "bulk" in parts:
        found["bulk"] = measure_bulk(artifact, options.seconds, with_model=options.model)
    print(json.dumps(found))


def measure_latency(artifact: Artifact, rate: float, seconds: float) -> dict[str, Any]:
    """Calls at a fixed rate, an answer of 16 tokens that costs nothing to make."""
    with (
        PathBench(artifact, 64, 2, engine={"flavour": "null"}, log={"level": "warning"}) as bench,
        gateway(bench) as (port, process),
    ):
        asyncio.run(call_at_rate(port, artifact.model, 20.0, 3.0))  # warm up
        before = _cpu_seconds(process, bench)
        with Pace() as pace:
            calls = asyncio.run(call_at_rate(port, artifact.model, rate, seconds))
        after = _cpu_seconds(process, bench)
        inside = _recorded(bench, list(calls))
    times = [call.took_s for call in calls.values()]
    busy = {name: round((after[name] - before[name]) / len(times) * 1000, 2) for name in before}
    at_speed = [call.took_s for call in calls.values() if not pace.is_slow(call.due)]
    machine = {
        "slow_machine_share": round(1 - len(at_speed) / len(times), 3),
        "at_speed": percentiles_ms(at_speed) if at_speed else None,
    }
    figures = {"calls": len(times), "rate": rate, **percentiles_ms(times), "cpu_ms_a_call": busy, **inside, **machine}
    table = Table("", "ms", title=f"a chat call at {rate:g} calls/s, null engine")
    for name in ("p50_ms", "p90_ms", "p99_ms", "most_ms"):
        table.add_row(name.removesuffix("_ms"), f"{figures[name]:.1f}")
    if at_speed:
        row = percentiles_ms(at_speed)
        table.add_row(f"p50, p99 of the {len(at_speed) / len(times):.0%} that", "")
        table.add_row("met the machine at its speed", f"{row['p50_ms']:.1f}, {row['p99_ms']:.1f}")
    for name, value in busy.items():
        table.add_row(f"CPU a call, {name}", f"{value:.1f}")
    for name, value in inside.items():
        table.add_row(name.removesuffix("_ms"), f"{value:.1f}")
    console.print(table)
    return figures


def measure_streams(artifact: Artifact, count: int) -> dict[str, Any]:
    """Streams that have begun and then hear nothing for ten seconds a token."""
    engine = {"flavour": "null", "null_token_s": 10.0, "max_batch_size": count}
    with (
        PathBench(artifact, count, 2, engine=engine, log={"level": "warning"}) as bench,
        gateway(bench) as (port, process),
    ):
        idle = process.memory_info().rss
        held = asyncio.run(hold_streams(port, artifact.model, count, process))
    figures = {"streams": count, "idle_mb": round(idle / 1e6, 1), "rss_mb": round(held / 1e6, 1)}
    table = Table("", "MB resident", title="a gateway's memory")
    table.add_row("no calls", f"{figures['idle_mb']}")
    table.add_row(f"{count} idle streams", f"{figures['rss_mb']}")
    console.print(table)
    return figures


def measure_bulk(artifact: Artifact, seconds: float, *, with_model: bool) -> dict[str, Any]:
    """One chat call after the other, of 8 tokens, alone and while bulk requests fill the worker."""
    engine: dict[str, object] = {} if with_model else {"flavour": "null", "null_token_s": 0.05}
    with (
        PathBench(artifact, 64, 2, engine=engine, log={"level": "warning"}) as bench,
        gateway(bench) as (port, _),
    ):
        asyncio.run(call_in_turn(port, artifact.model, 2.0))
        alone = asyncio.run(call_in_turn(port, artifact.model, seconds / 3))
        bulk = _submit_bulk(bench)
        done_before, began = _done(bench, bulk), time.monotonic()
        beside = asyncio.run(call_in_turn(port, artifact.model, seconds))
        bulk_rate = (_done(bench, bulk) - done_before) / (time.monotonic() - began)
    rows = {"alone": percentiles_ms(alone), "beside bulk": percentiles_ms(beside)}
    engine_shown = "model" if with_model else "null, 50 ms a token"
    figures = {"engine": engine_shown, **rows, "bulk_requests_per_s": round(bulk_rate, 2)}
    table = Table("", "p50 ms", "p90 ms", "most ms", title="a chat call of 8 tokens: all of it, the engine included")
    for name, row in rows.items():
        table.add_row(name, f"{row['p50_ms']:.0f}", f"{row['p90_ms']:.0f}", f"{row['most_ms']:.0f}")
    console.print(table)
    return figures


@contextmanager
def gateway(bench: PathBench) -> Iterator[tuple[int, psutil.Process]]:
    """A gateway process beside the bench's worker. Gives its port."""
    environment = {**os.environ, **environment_of(bench.settings)}
    environment |= {"PROMPTMILL_GATEWAY_PORT": "0", "PROMPTMILL_GATEWAY_OPEN_ON_LOOPBACK": "true"}
    process = subprocess.Popen(
        [sys.executable, "-m", "jobs.cli", "serve"], env=environment, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if "serving http://" in line:
            break
    else:
        raise RuntimeError(said)
    try:
        yield int(line.strip().removesuffix("/v1").rpartition(":")[2]), psutil.Process(process.pid)
    finally:
        process.terminate()
        process.communicate()


class TimedCall(NamedTuple):
    """due: `time.perf_counter` seconds. took_s: from then to its answer."""

    due: float
    took_s: float


async def call_at_rate(port: int, model: str, rate: float, seconds: float) -> dict[int, TimedCall]:
    """By request id. Connections are kept and taken in turn."""
    connections: asyncio.Queue[Connection] = asyncio.Queue()
    for _ in range(32):
        connections.put_nowait(await Connection.open(port))
    message = request_of("/v1/chat/completions", chat(model, max_tokens=16))
    times: dict[int, TimedCall] = {}

    async def call(due: float) -> None:
        connection = await connections.get()
        body = await connection.call(message)
        took = time.perf_counter() - due
        times[int(json.loads(body)["id"].rpartition("-")[2], 16)] = TimedCall(due, took)
        connections.put_nowait(connection)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as calls:
        for number in range(int(rate * seconds)):
            due = began + number / rate
            await asyncio.sleep(due - time.perf_counter())
            calls.create_task(call(due))
    while not connections.empty():
        connections.get_nowait().close()
    return times


async def call_in_turn(port: int, model: str, seconds: float) -> list[float]:
    connection = await Connection.open(port)
    message = request_of("/v1/chat/completions", chat(model, max_tokens=8))
    times: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        began = time.perf_counter()
        await connection.call(message)
        times.append(time.perf_counter() - began)
    connection.close()
    return times


async def hold_streams(port: int, model: str, count: int, process: psutil.Process) -> int:
    """The most memory that the gateway has while it holds these streams, each of which has begun."""
    message = request_of("/v1/chat/completions", chat(model, max_tokens=16, stream=True))
    held = [await Connection.open(port) for _ in range(count)]
    most = 0
    for connection in held:
        connection.writer.write(message)
    for connection in held:
        head = await connection.reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head.split(b"\r\n")[0]:
            raise RuntimeError(head.decode())
    for _ in range(10):
        most = max(most, process.memory_info().rss)
        await asyncio.sleep(0.5)
    for connection in held:
        connection.close()
    return most


class Connection:
    """HTTP/1.1, as little of it as the measurement needs."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, port: int) -> Connection:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def call(self, message: bytes) -> bytes:
        self.writer.write(message)
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line.partition(b":")[2]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
        )
        body = await self.reader.readexactly(length)
        if b" 200 " not in head.split(b"\r\n")[0]:
            raise RuntimeError(body.decode())
        return body

    def close(self) -> None:
        self.writer.close()


def chat(model: str, **options: object) -> Mapping[str, object]:
    return {"model": model, "messages": [{"role": "user", "content": PROMPT}], "temperature": 0, **options}


def request_of(path: str, body: Mapping[str, object]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def percentiles_ms(times: list[float]) -> dict[str, float]:
    ranked = sorted(times)
    found = {f"p{p}_ms": round(ranked[-(-len(ranked) * p // 100) - 1] * 1000, 2) for p in (50, 90, 99)}
    return {**found, "most_ms": round(ranked[-1] * 1000, 2)}


def _cpu_seconds(process: psutil.Process, bench: PathBench) -> dict[str, float]:
    worker = psutil.Process(bench.worker.pid)
    return {"gateway": sum(process.cpu_times()[:2]), "worker": sum(worker.cpu_times()[:2])}


def _recorded(bench: PathBench, request_ids: list[int]) -> dict[str, float]:
    """What the records say: from the commit of a request to its claim, and from there to its last token."""
    with bench.database.read() as connection:
        rows = [queries.attempts_of(connection, request_id)[-1] for request_id in request_ids]
    queued = percentiles_ms([row["queue_s"] for row in rows])
    running = percentiles_ms([row["total_s"] for row in rows])
    return {
        "queue_p50_ms": queued["p50_ms"],
        "queue_p99_ms": queued["p99_ms"],
        "run_p50_ms": running["p50_ms"],
        "run_p99_ms": running["p99_ms"],
    }


def _submit_bulk(bench: PathBench) -> int:
    """A batch that keeps the worker's rows full for longer than the measurement. Returns its id."""
    path = bench.home / "bulk.jsonl"
    with path.open("w") as file:
        for number in range(20_000):
            file.write(json.dumps({"prompt": f"{number}: {BULK_PROMPT}", "max_tokens": 64, "temperature": 0}) + "\n")
    options = InputOptions(model=bench.artifact.model, endpoint=Endpoint.CHAT)
    with open_source(path, path.parent) as source:
        batch = submit(bench.database, source, options).batch
    top_up(bench.database, bench.app, bench.settings.queue, bench.database.now())
    while _done(bench, batch.id) < 64:  # its rows are full, and chunks wait behind them
        time.sleep(0.2)
    return batch.id


def _done(bench: PathBench, batch_id: int) -> int:
    with bench.database.read() as connection:
        batch = queries.find_batch_by_id(connection, batch_id)
    assert batch is not None
    if batch.is_final:
        raise RuntimeError("the bulk work ended before the measurement")
    return batch.completed_requests


if __name__ == "__main__":
    main()
