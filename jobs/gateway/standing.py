"""How things stand, read at most twice a second however many calls come: models, their workers, their waiting lines.

Calls do not wait for a reading while the last one is fresh enough: it goes on behind them.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog
from fastapi.concurrency import run_in_threadpool

from jobs.artifacts import ModelNotFound, find_artifact, known_artifacts
from jobs.validation import MODEL_KNOWN_S
from storage import queries
from storage.database import Database
from storage.models import WorkerStatus

# A model that appears, or a line that grows, is noticed so soon.
KNOWN_FOR_S = 0.5
# While a new reading is under way the last one serves, up to this age.
OLDEST_S = 1.0

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ModelStanding:
    """digest: of the artifact that answers, if all workers run the same. created_at: since when it is known here."""

    name: str
    created_at: float
    digest: str | None = None
    workers: int = 0
    starting: int = 0
    waiting: int = 0
    oldest_s: float = 0.0


class Standing:
    """One for each application."""

    def __init__(self, database: Database, artifacts_dir: Path) -> None:
        self._database = database
        self._artifacts_dir = artifacts_dir
        self._seen: dict[str, float] | None = None  # models that had workers once -> since when
        self._models: Mapping[str, ModelStanding] = {}
        self._read_at = float("-inf")
        self._reading: asyncio.Task[None] | None = None

    async def models(self) -> Mapping[str, ModelStanding]:
        """By name: models that have workers or lately had, and those whose artifact lies in the home.

        Raises StorageError.
        """
        age_s = time.monotonic() - self._read_at
        if age_s > KNOWN_FOR_S:
            if self._reading is None or self._reading.done():
                self._reading = asyncio.create_task(self._read_anew())
                self._reading.add_done_callback(_note_failure)
            if age_s > OLDEST_S:
                await asyncio.shield(self._reading)  # a caller who goes away does not end it for the others
        return self._models

    async def close(self) -> None:
        """Wait for the reading that is under way."""
        if self._reading is not None:
            await asyncio.wait([self._reading])

    async def _read_anew(self) -> None:
        began_at = time.monotonic()
        self._models = await run_in_threadpool(self._read)
        self._read_at = began_at

    def _read(self) -> Mapping[str, ModelStanding]:
        now = self._database.now()
        with self._database.read() as connection:
            workers = queries.list_workers(connection, since=now - queries.WORKER_SEEN_S)
            lines = queries.interactive_load(connection)
            if self._seen is None:
                self._seen = queries.served_models(connection, now - MODEL_KNOWN_S)
        for row in workers:
            self._seen.setdefault(row.model, row.started_at)
        # Workers that have died, or are stopped for an upgrade, come back: their model is away, not unknown.
        found = {model: ModelStanding(model, since) for model, since in self._seen.items()}
        for path in known_artifacts(self._artifacts_dir):
            try:
                artifact = find_artifact(str(path), self._artifacts_dir)
            except ModelNotFound:
                continue  # damaged: the operator's business, and no model
            created_at = (path / "manifest.json").stat().st_mtime
            found[artifact.model] = ModelStanding(artifact.model, created_at, artifact.digest)
        ready = Counter(row.model for row in workers if row.status is WorkerStatus.READY)
        starting = Counter(row.model for row in workers if row.status is WorkerStatus.STARTING)
        for model in sorted({*ready, *starting}):
            mine = [row for row in workers if row.model == model]
            digests = {row.artifact_digest for row in mine if row.status is WorkerStatus.READY}
            waiting, since = lines.get(model, (0, now))
            found[model] = ModelStanding(
                name=model,
                created_at=found[model].created_at,
                digest=next(iter(digests)) if len(digests) == 1 else None,
                workers=ready[model],
                starting=starting[model],
                waiting=waiting,
                oldest_s=max(0.0, now - since),
            )
        return found


def _note_failure(reading: asyncio.Task[None]) -> None:
    """Whoever waits is told what went wrong. With nobody waiting the next call tries again."""
    if not reading.cancelled() and reading.exception() is not None:
        log.warning("standing_not_read", reason=type(reading.exception()).__name__)
