"""The whole path on a warm worker: submit, queue server, Celery worker process, engine, database."""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

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
from workers.models.artifact import Artifact

# Each look costs a few milliseconds of the same cores; workers top the queue up themselves.
POLL_S = 0.5
SWEEP_EVERY_S = 1.0


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
        rng = random.Random(seed)
        path = self.home / "in.jsonl"
        with path.open("w") as file:
            for n in range(requests):
                prompt = [rng.randrange(100, self.artifact.description.vocab_size) for _ in range(prompt_tokens)]
                body = {"prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
                file.write(json.dumps({"custom_id": f"r{n}", **body}) + "\n")
        options = InputOptions(model=self.artifact.model, endpoint=Endpoint.COMPLETIONS)
        started = time.perf_counter()
        with open_source(path, path.parent) as source:
            batch = submit(self.database, source, options).batch
        swept = 0.0
        while batch.completed_requests + batch.failed_requests < batch.total_requests:
            now = self.database.now()
            top_up(self.database, self.app, self.settings.queue, now)
            if time.monotonic() - swept > SWEEP_EVERY_S:
                swept = time.monotonic()
                sweep(self.database, self.app, self.settings, now)
            time.sleep(poll_s)
            with self.database.read() as connection:
                found = queries.find_batch_by_id(connection, batch.id)
            assert found is not None
            batch = found
        seconds = time.perf_counter() - started
        assert batch.completed_requests == requests, f"{batch.failed_requests} of {requests} failed"
        return requests / seconds
