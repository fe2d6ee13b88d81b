"""Input lines -> rows, committed in groups; the same input and parameters find the same batch again.

A submission that was interrupted goes on after its last committed group when it is repeated. Lines already read are
read again, because a later line's custom id may repeat one of theirs, but never written again.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from jobs.inputs import InputLine, InputOptions, InputReader
from jobs.source import InputError, Source
from storage import queries, transitions
from storage.database import Connection, Database
from storage.errors import StorageError
from storage.models import BatchStatus
from storage.queries import BatchRow
from storage.transitions import NewBatch, NewRequest, RefusedLine

GROUP_LINES = 2000  # one statement's rows: a commit costs little beside them, and the write lock is held for < 0.1 s
GROUP_CHARACTERS = 8_000_000  # of bodies: bounds memory when lines are long
KNOWN_PREFIXES = 256  # prefixes whose row id is remembered while submitting
FINGERPRINT_VERSION = 1  # raise it when the same bytes and parameters come to mean other requests

# A batch that stands at one of these is what the same command means; from the others it starts anew.
FOUND_AGAIN = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING, BatchStatus.COMPLETED)


@dataclass(frozen=True)
class BatchOptions:
    """What concerns the batch as a whole, not its lines.

    metadata: JSON text. artifact_digest: of the model that is to answer, when known; the answers of another artifact of
    the same name are then not taken for this one's.
    """

    tenant: str = "default"
    name: str | None = None
    priority: int = 0
    metadata: str | None = None
    expires_at: float | None = None
    artifact_digest: str = ""


@dataclass(frozen=True)
class SubmitProgress:
    """lines: read so far, refused ones included. bytes_read of bytes_total: of the input as it lies on the disk."""

    lines: int
    refused: int
    bytes_read: int
    bytes_total: int


@dataclass(frozen=True)
class Submission:
    """batch: as it stood then. was_there: it had been submitted in whole before. written: lines that were added."""

    batch: BatchRow
    was_there: bool
    written: int

    @property
    def was_finished(self) -> bool:
        """All its answers were there already: nothing is computed."""
        return self.was_there and self.batch.is_final


def submit(
    database: Database,
    source: Source,
    options: InputOptions,
    batch_options: BatchOptions | None = None,
    *,
    progress: Callable[[SubmitProgress], None] | None = None,
) -> Submission:
    """Write a batch's lines and start it, or find the batch that has them.

    Raises InputError when the input as a whole cannot be used: then no batch is left behind, except one that was begun
    before the failure, which the same submission continues.
    """
    batch_options = batch_options or BatchOptions()
    reader = InputReader(source, options)
    fingerprint = make_fingerprint(source.sha256(), reader, options, batch_options)
    with database.read() as connection:
        batch = queries.find_batch_by_fingerprint(connection, fingerprint, batch_options.tenant)
    if batch is not None and batch.status in FOUND_AGAIN and batch.status is not BatchStatus.VALIDATING:
        return Submission(batch, was_there=True, written=0)
    writer = _Writer(database, source, reader, options, batch_options, fingerprint)
    try:
        for group in _groups(reader):
            writer.write(group)
            if progress is not None:
                progress(SubmitProgress(writer.lines, writer.refused, source.position_bytes(), source.size_bytes()))
        batch_id = writer.start()
    except InputError as error:
        if error.code == "input_changed":
            writer.give_up(error)
        raise
    except StorageError as error:
        # Somebody submitted the same at the same time and came to the end first.
        found = _find_started(database, fingerprint, batch_options.tenant) if error.code == "illegal_move" else None
        if found is None:
            raise
        return Submission(found, was_there=True, written=0)
    with database.read() as connection:
        batch = queries.find_batch_by_id(connection, batch_id)
    assert batch is not None, "a batch that was just started is there"
    return Submission(batch, was_there=False, written=writer.written)


def make_fingerprint(input_sha256: str, reader: InputReader, options: InputOptions, batch: BatchOptions) -> str:
    """SHA-256 over the input's bytes and all that changes what is asked: the same again means the same batch."""
    meaning = {
        "version": FINGERPRINT_VERSION,
        "input": input_sha256,
        "format": reader.format,
        "endpoint": options.endpoint,
        "model": options.model,
        "artifact": batch.artifact_digest,
        "template": options.template.text if options.template else None,
        "context": options.context,
        "system": options.system,
        "id_column": options.id_column,
        "defaults": json.loads(options.defaults.to_json()),
        "max_line_bytes": options.max_line_bytes,
    }
    return hashlib.sha256(json.dumps(meaning, sort_keys=True).encode()).hexdigest()


@dataclass
class _Writer:
    """Writes groups of lines to one batch, which it makes with the first: an unusable input leaves none."""

    database: Database
    source: Source
    reader: InputReader
    options: InputOptions
    batch_options: BatchOptions
    fingerprint: str
    lines: int = 0
    refused: int = 0
    written: int = 0
    _batch_id: int | None = None
    _committed_line: int = 0  # lines up to here were written by an earlier submission
    _prefix_ids: dict[str, int] = field(default_factory=dict)

    def write(self, group: list[InputLine | RefusedLine]) -> None:
        if self._batch_id is None:
            self._batch_id, self._committed_line = self.database.retry(self._find_or_create)
        self.lines += len(group)
        self.refused += sum(isinstance(item, RefusedLine) for item in group)
        new = [item for item in group if item.line > self._committed_line]
        if new:
            batch_id = self._batch_id
            written, prefix_ids = self.database.retry(lambda connection: self._write(connection, batch_id, new))
            self.written += written
            self._prefix_ids.update(prefix_ids)  # only now is it certain that they are there
            if len(self._prefix_ids) > KNOWN_PREFIXES:
                self._prefix_ids.clear()

    def start(self) -> int:
        assert self._batch_id is not None, "an input without lines has raised empty_file"
        batch_id = self._batch_id
        self.database.retry(lambda connection: transitions.start_batch(connection, batch_id, self.database.now()))
        return batch_id

    def give_up(self, error: InputError) -> None:
        if self._batch_id is not None:
            batch_id = self._batch_id
            self.database.retry(
                lambda connection: transitions.fail_batch(
                    connection, batch_id, error.code, error.message, self.database.now()
                )
            )

    def _find_or_create(self, connection: Connection) -> tuple[int, int]:
        """The batch's id and its last committed line. One transaction, so that two submitters find the same."""
        batch = queries.find_batch_by_fingerprint(connection, self.fingerprint, self.batch_options.tenant)
        if batch is not None and batch.status is BatchStatus.VALIDATING:
            return batch.id, queries.last_submitted_line(connection, batch.id)
        new = NewBatch(
            public_id=f"batch_{uuid.uuid4().hex}",
            fingerprint=self.fingerprint,
            endpoint=self.reader.endpoint,
            model=self.options.model,
            tenant=self.batch_options.tenant,
            name=self.batch_options.name,
            priority=self.batch_options.priority,
            metadata=self.batch_options.metadata,
            expires_at=self.batch_options.expires_at,
        )
        return transitions.create_batch(connection, new, self.database.now()), 0

    def _write(
        self, connection: Connection, batch_id: int, group: list[InputLine | RefusedLine]
    ) -> tuple[int, dict[str, int]]:
        new_prefixes: dict[str, int] = {}
        requests: list[NewRequest] = []
        refused: list[RefusedLine] = []
        for item in group:
            if isinstance(item, RefusedLine):
                refused.append(item)
                continue
            prefix_id = None
            if item.prefix:
                prefix_id = self._prefix_ids.get(item.prefix) or new_prefixes.get(item.prefix)
                if prefix_id is None:
                    prefix_id = new_prefixes[item.prefix] = transitions.save_prefix(connection, item.prefix)
            requests.append(NewRequest(item.line, item.custom_id, item.body, prefix_id))
        written = transitions.add_requests(connection, batch_id, requests) if requests else 0
        if refused:
            written += transitions.refuse_lines(connection, batch_id, refused, self.database.now())
        return written, new_prefixes


def _groups(reader: InputReader) -> Iterator[list[InputLine | RefusedLine]]:
    """Lines in groups small enough for one transaction and for memory."""
    group: list[InputLine | RefusedLine] = []
    characters = 0
    for item in reader:
        group.append(item)
        characters += len(item.body) if isinstance(item, InputLine) else len(item.error_message)
        if len(group) >= GROUP_LINES or characters >= GROUP_CHARACTERS:
            yield group
            group, characters = [], 0
    if group:
        yield group


def _find_started(database: Database, fingerprint: str, tenant: str) -> BatchRow | None:
    with database.read() as connection:
        batch = queries.find_batch_by_fingerprint(connection, fingerprint, tenant)
    if batch is None or batch.status is BatchStatus.VALIDATING or batch.status not in FOUND_AGAIN:
        return None
    return batch
