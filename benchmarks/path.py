"""The whole path on a warm worker: submit, queue server, Celery worker process, engine, database.

    python -m benchmarks.path --repeat 10                       # SQLite; no GPU needed
    python -m benchmarks.path --step-s 0.012 --prefill-tokens-per-s 60000

One burst of 512 requests of 128 prompt tokens, 64 new, through the null engine at a GPU's pace: beside the time that
the same engine takes alone, and when which part of the path had its first and its last request. The defaults are the
pace of Llama-2-7B on an H200: 8 prefills of 8,192 tokens in 1.13 s, then 63 steps of 28.5 ms. Prints a table of the
runs' medians, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.table import Table
from sqlalchemy import text

from jobs.dispatch import top_up
from jobs.inputs import InputOptions
from jobs.protocol import Endpoint
from jobs.queue import make_app
from jobs.queue_server import open_queue_server
from jobs.settings import Settings, load_settings
from jobs.source import open_source
from jobs.submit import submit
from jobs.sweep import sweep
from jobs.worker_process import WorkerProcess
from storage import queries
from storage.database import open_database, upgrade_schema
from workers.engine.null import NullEngine
from workers.engine.request import GenerationRequest, SamplingParameters
from workers.models.artifact import Artifact

# Each look costs a part of the same cores.
POLL_S = 0.5
BURST_POLL_S = 0.005
# As `promptmill up` does it; workers top the queue up themselves.
TOP_UP_EVERY_S = 0.25
SWEEP_EVERY_S = 1.0
REQUESTS, PROMPT_TOKENS, NEW_TOKENS, ROWS = 512, 128, 64, 512


@dataclass(frozen=True)
class Timeline:
    """Seconds from the start of `submit` to what happened. What the worker did is from the attempts' latency records.

    dispatched: chunks were sent, of the first group of lines and of the last. submitted: `submit` has returned.
    handed_over: to the engine. answer: the engine gave a request's last token. recorded: the transaction that writes a
    result began. done: all results were seen to be committed.
    """

    first_dispatched: float
    submitted: float
    last_dispatched: float
    first_claim: float
    last_claim: float
    first_handed_over: float
    half_handed_over: float
    last_handed_over: float
    first_token: float
    first_answer: float
    last_answer: float
    first_recorded: float
    last_recorded: float
    done: float


def with_changes(settings: Settings, changes: Mapping[str, Mapping[str, object]]) -> Settings:
    """The settings with some fields changed. changes: group -> field -> value."""
    groups = {name: getattr(settings, name).model_copy(update=dict(fields)) for name, fields in changes.items()}
    return settings.model_copy(update=groups)


class PathBench:
    """A home of its own with a queue server and one worker that is warm when the block begins."""

    def __init__(self, artifact: Artifact, rows: int, threads: int, **settings: Mapping[str, object]) -> None:
        """settings: group -> its fields that differ from the defaults."""
        self.artifact = artifact
        self._folder = tempfile.TemporaryDirectory(prefix="pmb")
        self.home = Path(self._folder.name)
        changes: dict[str, dict[str, object]] = {
            "database": {"url": f"sqlite:///{self.home / 'promptmill.db'}"},
            "engine": {"max_batch_size": rows, "threads": threads},
        }
        loaded = with_changes(load_settings(env_file=None).model_copy(update={"home": self.home}), changes)
        loaded = with_changes(loaded, settings)
        self.server = open_queue_server(loaded)
        self.settings = with_changes(loaded, {"queue": {"url": self.server.url}})
        self.database = open_database(self.settings.database.url)
        upgrade_schema(self.database)
        self.app = make_app(self.settings.queue)
        self.worker = WorkerProcess(self.settings, artifact.path)

    def __enter__(self) -> Self:
        while True:
            with self.database.read() as connection:
                if queries.live_workers(connection, self.database.now(), model=self.artifact.model):
                    return self
            if self.worker.exit_code() is not None:
                raise RuntimeError(self.worker.last_words())
            time.sleep(POLL_S)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.worker.stop(15.0)
        self.app.close()
        self.database.close()
        self.server.stop()
        self._folder.cleanup()

    def requests_per_s(
        self, requests: int, prompt_tokens: int, new_tokens: int, *, seed: int = 0, poll_s: float = POLL_S
    ) -> float:
        """From the first byte read by submit to the commit of the last answer, seen up to `poll_s` late."""
        return requests / self.burst(requests, prompt_tokens, new_tokens, seed=seed, poll_s=poll_s).done

    def burst(
        self, requests: int, prompt_tokens: int, new_tokens: int, *, seed: int = 0, poll_s: float = BURST_POLL_S
    ) -> Timeline:
        """Submit so many requests at once and wait until all their answers are seen to be committed."""
        prompts = make_prompts(self.artifact.description.vocab_size, requests, prompt_tokens, seed)
        path = self.home / "in.jsonl"
        with path.open("w") as file:
            for n, prompt in enumerate(prompts):
                body = {"prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
                file.write(json.dumps({"custom_id": f"r{n}", **body}) + "\n")
        options = InputOptions(model=self.artifact.model, endpoint=Endpoint.COMPLETIONS)
        started_at, started = self.database.now(), time.perf_counter()
        dispatched: list[float] = []

        def dispatch(_: object = None) -> None:
            top_up(self.database, self.app, self.settings.queue, self.database.now())
            dispatched.append(time.perf_counter() - started)

        with open_source(path, path.parent) as source:
            batch = submit(
                self.database, source, options, progress=dispatch
            ).batch  # lines run as soon as they are there
        submitted = time.perf_counter() - started
        dispatch()
        swept_at = topped_up_at = time.monotonic()
        while batch.completed_requests + batch.failed_requests < batch.total_requests:
            steady = time.monotonic()
            if steady - swept_at > SWEEP_EVERY_S:
                swept_at = topped_up_at = steady
                sweep(self.database, self.app, self.settings, self.database.now())
            elif steady - topped_up_at > TOP_UP_EVERY_S:
                topped_up_at = steady
                top_up(self.database, self.app, self.settings.queue, self.database.now())
            time.sleep(poll_s)
            with self.database.read() as connection:
                found = queries.find_batch_by_id(connection, batch.id)
            assert found is not None
            batch = found
        done = time.perf_counter() - started
        assert batch.completed_requests == requests, f"{batch.failed_requests} of {requests} failed"
        worker = self._worker_times(batch.id, started_at)
        return Timeline(
            first_dispatched=dispatched[0], submitted=submitted, last_dispatched=dispatched[-1], done=done, **worker
        )

    def _worker_times(self, batch_id: int, since: float) -> dict[str, float]:
        """What the latency records say, in seconds after `since`."""
        columns = "a.claimed_at, a.wait_s, a.prefill_s, a.time_to_first_token_s, a.total_s, a.finished_at"
        with self.database.read() as connection:
            rows = connection.execute(
                text(
                    f"SELECT {columns} FROM attempts a JOIN requests r ON r.id = a.request_id WHERE r.batch_id = :batch"
                ),
                {"batch": batch_id},
            ).all()
        claimed = sorted(row.claimed_at - since for row in rows)
        first_tokens = sorted(row.claimed_at - since + row.time_to_first_token_s for row in rows)
        handed_over = sorted(
            row.claimed_at - since + row.time_to_first_token_s - row.prefill_s - row.wait_s for row in rows
        )
        answered = sorted(row.claimed_at - since + row.total_s for row in rows)
        recorded = sorted(row.finished_at - since for row in rows)
        return {
            "first_claim": claimed[0],
            "last_claim": claimed[-1],
            "first_handed_over": handed_over[0],
            "half_handed_over": handed_over[len(rows) // 2 - 1],
            "last_handed_over": handed_over[-1],
            "first_token": first_tokens[0],
            "first_answer": answered[0],
            "last_answer": answered[-1],
            "first_recorded": recorded[0],
            "last_recorded": recorded[-1],
        }


def make_prompts(vocab_size: int, requests: int, prompt_tokens: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(100, vocab_size) for _ in range(prompt_tokens)] for _ in range(requests)]


def engine_alone_s(prompts: Sequence[Sequence[int]], step_s: float, prefill_tokens_per_s: float) -> float:
    """The same requests through the same engine, handed over at once."""
    engine = NullEngine(
        max_batch_size=ROWS, context_length=2048, token_s=step_s, prefill_tokens_per_s=prefill_tokens_per_s
    )
    sampling = SamplingParameters(NEW_TOKENS, ignore_eos=True)
    started = time.perf_counter()
    for future in [engine.submit(GenerationRequest(prompt, sampling)) for prompt in prompts]:
        future.result()
    seconds = time.perf_counter() - started
    engine.close()
    return seconds


def main() -> None:
    from benchmarks.cpu import demo_artifact, hardware

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=10, help="bursts, after one that is not counted")
    parser.add_argument("--step-s", type=float, default=0.0285, help="what the engine takes for a decode step")
    parser.add_argument("--prefill-tokens-per-s", type=float, default=58_000)
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "promptmill-bench")
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    artifact = demo_artifact(options.cache)
    prompts = make_prompts(artifact.description.vocab_size, REQUESTS, PROMPT_TOKENS, 0)
    alone_s = statistics.median(engine_alone_s(prompts, options.step_s, options.prefill_tokens_per_s) for _ in range(3))
    engine = {
        "flavour": "null",
        "null_token_s": options.step_s,
        "null_prefill_tokens_per_s": options.prefill_tokens_per_s,
    }
    with PathBench(artifact, ROWS, 1, engine=engine) as bench:
        runs = [bench.burst(REQUESTS, PROMPT_TOKENS, NEW_TOKENS, seed=seed) for seed in range(options.repeat + 1)][1:]
    print_burst(runs, alone_s, hardware(2))


def print_burst(runs: Sequence[Timeline], alone_s: float, where: str) -> None:
    console = Console()
    console.print(f"{where}; {datetime.now(UTC):%Y-%m-%d %H:%M} UTC")
    table = Table(title=f"a burst of {REQUESTS} requests, null engine at a GPU's pace, medians of {len(runs)} runs")
    table.add_column("from the start of submit to")
    table.add_column("ms", justify="right")
    table.add_column("from the event before", justify="right")
    before_ms = 0.0
    medians = {field.name: statistics.median(getattr(run, field.name) for run in runs) for field in fields(Timeline)}
    for name, seconds in sorted(medians.items(), key=lambda item: item[1]):
        table.add_row(name.replace("_", " "), f"{seconds * 1e3:,.1f}", f"{seconds * 1e3 - before_ms:,.1f}")
        before_ms = seconds * 1e3
    console.print(table)
    ratios = sorted(alone_s / run.done for run in runs)
    found: dict[str, Any] = {
        "hardware": where,
        "engine_alone_s": round(alone_s, 4),
        "path_s": round(medians["done"], 4),
        "best_path_s": round(min(run.done for run in runs), 4),
        "ratio": round(statistics.median(ratios), 3),
        "best_ratio": round(ratios[-1], 3),
        "medians_ms": {name: round(seconds * 1e3, 1) for name, seconds in medians.items()},
        "runs": [{name: round(value, 4) for name, value in asdict(run).items()} for run in runs],
    }
    console.print(f"engine alone {alone_s:.3f} s; whole path / engine alone: {found['ratio']} of its rate")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
