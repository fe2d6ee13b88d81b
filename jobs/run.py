"""`promptmill run`: one job from its input to its output file, with all that it takes in between.

Submits, waits for the answers and writes them; where no `up` serves the model it brings a worker, the periodic pass
and the embedded queue server itself. Everything it knows is in the database: stopped at any point, the same command
goes on where it stood.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jobs.artifacts import FoundArtifact
from jobs.gpus import plan_gpus
from jobs.inputs import InputOptions
from jobs.queue_server import QueueServer, open_queue_server
from jobs.results import WrittenResults, check_output, write_results
from jobs.settings import Settings
from jobs.source import Source
from jobs.steering import Observer, Progress
from jobs.submit import BatchOptions, SubmitProgress, submit
from jobs.summary import BatchSummary, summarise
from jobs.up import StopSignals, Ticker, await_queue, stop_signals, with_drain, with_queue_url
from jobs.worker_process import Crew, WorkerFailed, serving_workers
from storage import queries
from storage.database import Database, open_database, upgrade_schema

TICK_S = 0.25


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """written: None if there was nothing to write. is_interrupted: the user stopped it; the batch is not finished.
    was_finished: all answers were there before, and nothing was computed.
    """

    summary: BatchSummary
    written: WrittenResults
    is_interrupted: bool
    was_finished: bool


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
    with stop_signals(second_raises=True) as signals, open_database(settings.database.url) as database:
        upgrade_schema(database)

        def submitting(progress: SubmitProgress) -> None:
            if signals.is_set:
                raise KeyboardInterrupt  # between two commits: the same command goes on from here
            observer.submitting(progress)

        submission = submit(
            database, source, options, BatchOptions(artifact_digest=artifact.digest), progress=submitting
        )
        batch = submission.batch
        if not batch.is_final:
            with open_queue_server(settings) as server:
                served = with_queue_url(settings, server.url)
                see_through(served, database, server, artifact.model, artifact, batch.id, observer, signals)
        written = write_results(database, batch.id, output)
        summary = summarise(database, batch.id)
        return RunOutcome(summary, written, not summary.batch.is_final, submission.was_finished)


def see_through(
    settings: Settings,
    database: Database,
    server: QueueServer,
    model: str,
    artifact: FoundArtifact | None,
    batch_id: int,
    observer: Observer,
    signals: StopSignals,
) -> None:
    """Keep one batch going until it is final or a signal comes, with a worker of our own if nobody serves the model.

    artifact: what such a worker runs; None: somebody must serve the model. Raises WorkerFailed, QueueError.
    """
    # A worker of ours has nothing to wait for when we stop it: what is unfinished is done when we run again.
    settings = with_drain(settings, 0.0)
    ours: Crew | None = None
    await_queue(settings.queue, observer.note, signals)
    ticker = Ticker(database, settings, server, observer.note, is_strict=True)
    try:
        while not signals.is_set:
            with database.read() as connection:
                batch = queries.find_batch_by_id(connection, batch_id)
                serving = serving_workers(connection, model, database.now())
            assert batch is not None
            observer.running(Progress(batch, next(iter(serving), None)))
            if batch.is_final:
                return
            if ours is None and not serving:
                ours = _crew(settings, database, artifact, observer) if artifact else None
                if ours is None:
                    raise nobody_serves(model)
            if ours is not None:
                ours.look_after(start=not serving)
            ticker.tick()
            ticker.wait(signals, TICK_S)
    finally:
        if ours is not None:
            ours.stop()
        ticker.close()


def _crew(settings: Settings, database: Database, artifact: FoundArtifact, observer: Observer) -> Crew:
    """Workers of our own: one for each GPU, else one."""
    plan = plan_gpus(settings, artifact.path)
    if plan.reason and plan.has_gpu:
        observer.note(f"on the CPU: {plan.reason}")
    return Crew(settings, database, artifact.path, 1, observer.note, gives_up=True, gpus=plan.gpus)


def nobody_serves(model: str) -> WorkerFailed:
    return WorkerFailed(
        f"nobody serves {model}; start it (promptmill up), or name its artifact with --model", code="no_worker"
    )
