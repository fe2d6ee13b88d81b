"""A batch whose requests are all final -> its output and error file in the files folder, then its last status.

The files are written in pages beside their place, forced to the disk and put there in one step; then one transaction
writes the status and the rows of the files. A crash in between leaves files that the next try replaces: their names
come from the batch and the moment its work ended. Two processes that do it at once write the same bytes twice, and
one of them publishes.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable
from pathlib import Path

import structlog

from jobs.results import OutputError, WritingStopped, write_results
from storage import queries, transitions
from storage.database import Database
from storage.errors import PromptmillError, StorageError
from storage.queries import BatchRow
from storage.transitions import NewFile

log = structlog.get_logger(__name__)


class Finalizer:
    """Publishes batches in a thread of its own: a million lines take a while, and everything else goes on meanwhile."""

    def __init__(self, database: Database, files_dir: Path) -> None:
        self._database = database
        self._files_dir = files_dir
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def begin(self, now: float) -> None:
        """Publish what waits for it, unless that is being done already. Raises StorageError."""
        if self._thread is not None and self._thread.is_alive():
            return
        if _waiting(self._database):
            self._thread = threading.Thread(target=self._run, args=(now,), name="finalizer", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop; what is half written is written anew by whoever comes next."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, now: float) -> None:
        try:
            finalize_batches(self._database, self._files_dir, now, lambda: not self._stop.is_set())
        except PromptmillError as error:
            log.warning("batches_not_finalized", code=error.code, reason=error.message)
        except Exception as error:
            log.error("batches_not_finalized", exc_info=error)


def finalize_batches(
    database: Database,
    files_dir: Path,
    now: float,
    keep_on: Callable[[], bool] = lambda: True,
    *,
    batch_id: int | None = None,
) -> list[int]:
    """Publish all batches that wait for it, or only one (`batch_id`). Returns the ids of those that it published.

    keep_on: asked at each page; False stops.
    A disk that is full is logged and left for the next pass. Raises StorageError when the database cannot be reached.
    """
    published: list[int] = []
    for batch in _waiting(database, batch_id):
        try:
            if finalize_batch(database, batch, files_dir, now, keep_on):
                published.append(batch.id)
        except WritingStopped:
            break
        except OutputError as error:
            log.error("batch_not_finalized", batch=batch.public_id, code=error.code, reason=error.message)
    return published


def _waiting(database: Database, batch_id: int | None = None) -> list[BatchRow]:
    with database.read() as connection:
        if batch_id is None:
            batches = queries.unfinished_batches(connection)
        else:
            batches = [batch for batch in [queries.find_batch_by_id(connection, batch_id)] if batch is not None]
        return [batch for batch in batches if queries.is_publishable(connection, batch)]


def finalize_batch(
    database: Database, batch: BatchRow, files_dir: Path, now: float, keep_on: Callable[[], bool] = lambda: True
) -> bool:
    """Write a batch's files and publish them with its last status. False: somebody else was first.

    Raises OutputError when the files cannot be written, WritingStopped when told to stop: the batch stays as it is.
    """
    if batch.is_interactive:
        return _publish(database, batch, None, None)
    files_dir.mkdir(parents=True, exist_ok=True)
    ended_at = batch.finalizing_at or batch.cancelling_at or now
    output = files_dir / f"{batch.public_id}-{ended_at:.0f}.jsonl"
    written = write_results(database, batch.id, output, keep_on)
    assert written.output is not None, "a path was given"
    good = _describe(written.output, written.output_lines, f"{batch.public_id}_output.jsonl")
    bad = _describe(written.errors, written.error_lines, f"{batch.public_id}_error.jsonl") if written.errors else None
    if good is None:
        written.output.unlink(missing_ok=True)
    with database.read() as connection:
        former = [
            queries.find_file(connection, file_id)
            for file_id in (batch.output_file_id, batch.error_file_id)
            if file_id is not None
        ]
    was_first = _publish(database, batch, good, bad)
    if was_first:
        kept = {file.path for file in (good, bad) if file is not None}
        for file in former:
            if file is not None and file.path not in kept:
                with contextlib.suppress(OSError):
                    (files_dir / file.path).unlink(missing_ok=True)
        log.info("batch_finished", batch=batch.public_id, answers=written.output_lines, errors=written.error_lines)
    return was_first


def _publish(database: Database, batch: BatchRow, good: NewFile | None, bad: NewFile | None) -> bool:
    try:
        return database.retry(
            lambda connection: transitions.publish_batch(connection, batch.id, database.now(), output=good, errors=bad)
        )
    except StorageError as error:
        if error.code != "illegal_move":
            raise
        return False  # retried, by an operator, while its files were written


def _describe(path: Path, lines: int, filename: str) -> NewFile | None:
    """What the database says of a file; None for one without a line."""
    if not lines:
        return None
    return NewFile(
        public_id=f"file-{uuid.uuid4().hex}",
        filename=filename,
        path=path.name,
        bytes=path.stat().st_size,
        lines=lines,
    )
