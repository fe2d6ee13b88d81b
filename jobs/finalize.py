"""A batch whose requests are all final -> its output and error file in the files folder, then its last status.

The files are written in pages beside their place, forced to the disk and put there in one step; then one transaction
writes the status and the rows of the files. A crash in between leaves files that the next try replaces: their names
come from the batch and the moment its work ended. Two processes that do it at once write the same bytes twice, and
one of them publishes.
"""

from __future__ import annotations

import contextlib
import uuid
from pathlib import Path

import structlog

from jobs.results import OutputError, write_results
from storage import queries, transitions
from storage.database import Database
from storage.errors import StorageError
from storage.queries import BatchRow
from storage.transitions import NewFile

log = structlog.get_logger(__name__)


def finalize_batches(database: Database, files_dir: Path, now: float) -> list[int]:
    """Publish all batches that wait for it. Returns their ids.

    A disk that is full is logged and left for the next pass. Raises StorageError when the database cannot be reached.
    """
    with database.read() as connection:
        waiting = [
            batch for batch in queries.unfinished_batches(connection) if queries.is_publishable(connection, batch)
        ]
    published: list[int] = []
    for batch in waiting:
        try:
            if finalize_batch(database, batch, files_dir, now):
                published.append(batch.id)
        except OutputError as error:
            log.error("batch_not_finalized", batch=batch.public_id, code=error.code, reason=error.message)
    return published


def finalize_batch(database: Database, batch: BatchRow, files_dir: Path, now: float) -> bool:
    """Write a batch's files and publish them with its last status. False: somebody else was first.

    Raises OutputError when the files cannot be written: the batch stays as it is.
    """
    if batch.is_interactive:
        return _publish(database, batch, None, None)
    files_dir.mkdir(parents=True, exist_ok=True)
    ended_at = batch.finalizing_at or batch.cancelling_at or now
    output = files_dir / f"{batch.public_id}-{ended_at:.0f}.jsonl"
    written = write_results(database, batch.id, output)
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
