"""The whole path on a warm worker: submit, queue server, Celery worker process, engine, database."""

from __future__ import annotations

import json
import random
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from jobs.dispatch import top_up
from jobs.inputs import InputOptions
from jobs.protocol import Endpoint
from jobs.queue import make_app
from jobs.queue_server import open_queue_server
from jobs.settings import load_settings
from jobs.source import open_source
from jobs.submit import submit
from jobs.sweep import sweep
from jobs.worker_process import WorkerProcess
from storage import queries
from storage.database import open_database, upgrade_schema
from workers.models.artifact import Artifact

# Each look costs a few milliseconds of the same cores; workers top the queue up themselves.
POLL_S = 0.5
SWEEP_EVERY_S = 1.0


class PathBench:
    """A home of its own with a queue server and one worker that is warm when the block begins."""

    def __init__(self, artifact: Artifact, rows: int, threads: int) -> None:
        self._artifact = artifact
        self._folder = tempfile.TemporaryDirectory(prefix="pmb")
        settings = load_settings(env_file=None)
        home = Path(self._folder.name)
        settings = settings.model_copy(
            update={
                "home": home,
                "database": settings.database.model_copy(update={"url": f"sqlite:///{home / 'promptmill.db'}"}),
                "engine": settings.engine.model_copy(update={"max_batch_size": rows, "threads": threads}),
            }
        )
        self._server = open_queue_server(settings)
        queue = settings.queue.model_copy(update={"url": self._server.url})
        self._settings = settings.model_copy(update={"queue": queue})
        self._database = open_database(settings.database.url)
        upgrade_schema(self._database)
        self._app = make_app(self._settings.queue)
        self._worker = WorkerProcess(self._settings, artifact.path)

    def __enter__(self) -> Self:
        while True:
            with self._database.read() as connection:
                if queries.live_workers(connection, self._database.now(), model=self._artifact.model):
                    return self
            if self._worker.exit_code() is not None:
                raise RuntimeError(self._worker.last_words())
            time.sleep(POLL_S)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._worker.stop(15.0)
        self._app.close()
        self._database.close()
        self._server.stop()
        self._folder.cleanup()

    def requests_per_s(self, requests: int, prompt_tokens: int, new_tokens: int) -> float:
        """From the first byte read by submit to the commit of the last answer."""
        rng = random.Random(0)
        path = Path(self._folder.name) / "in.jsonl"
        with path.open("w") as file:
            for n in range(requests):
                prompt = [rng.randrange(100, self._artifact.description.vocab_size) for _ in range(prompt_tokens)]
                body = {"prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
                file.write(json.dumps({"custom_id": f"r{n}", **body}) + "\n")
        options = InputOptions(model=self._artifact.model, endpoint=Endpoint.COMPLETIONS)
        started = time.perf_counter()
        with open_source(path, path.parent) as source:
            batch = submit(self._database, source, options).batch
        swept = 0.0
        while batch.completed_requests + batch.failed_requests < batch.total_requests:
            now = self._database.now()
            top_up(self._database, self._app, self._settings.queue, now)
            if time.monotonic() - swept > SWEEP_EVERY_S:
                swept = time.monotonic()
                sweep(self._database, self._app, self._settings, now)
            time.sleep(POLL_S)
            with self._database.read() as connection:
                found = queries.find_batch_by_id(connection, batch.id)
            assert found is not None
            batch = found
        seconds = time.perf_counter() - started
        assert batch.completed_requests == requests, f"{batch.failed_requests} of {requests} failed"
        return requests / seconds
