"""Input lines -> rows, committed in groups; the same input and parameters find the same batch again.

Lines may run as soon as they are committed, while later ones are still being read (`runs_early`): what is wrong with a
line is known when it is written. A submission that was interrupted goes on after its last committed group when it is
repeated. Lines already read are read again, because a later line's custom id may repeat one of theirs, but never
written again.

One question is answered once where that is the same to the user:
- A batch that belongs to a job (`name`) takes over what earlier batches of that job have answered, line by line: same
  custom id, same text, same parameters, same model. Only lines that are new, changed or without an answer run.
- A deterministic line (temperature 0, or with a seed) that repeats an earlier one of its batch waits for that answer.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b

from jobs.custom_ids import DIGEST_BYTES, CustomIds, FirstLines
from jobs.inputs import InputLine, InputOptions, InputReader
from jobs.source import InputError, Source
from storage import queries, transitions
from storage.database import Connection, Database
from storage.errors import StorageError
from storage.models import BatchStatus
from storage.queries import BatchRow
from storage.transitions import NewBatch, NewRequest, RefusedLine

GROUP_LINES = 2000  # one statement's rows: a commit costs little beside them, and the write lock is held for < 0.1 s
FIRST_GROUP_LINES = 64  # a worker may begin with these while the others are read
GROUP_CHARACTERS = 8_000_000  # of bodies: bounds memory when lines are long
KNOWN_PREFIXES = 256  # prefixes whose row id is remembered while submitting
# What a token costs in characters, roughly, and how long an answer without a bound of its own is taken to be. Only
# shares and the size of chunks depend on it.
CHARACTERS_PER_TOKEN = 4
UNBOUNDED_ANSWER_TOKENS = 256
FINGERPRINT_VERSION = 1  # raise it when the same bytes and parameters come to mean other requests

# A batch that stands at one of these is what the same command means; from the others it starts anew.
FOUND_AGAIN = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING, BatchStatus.COMPLETED)


@dataclass(frozen=True)
class BatchOptions:
    """What concerns the batch as a whole, not its lines.

    name: of the job that this batch belongs to. metadata: JSON text. artifact_digest: of the model that is to answer,
    when known; the answers of another artifact of the same name are then not taken for this one's.
    idempotency_key: the same key means the same batch, for ever. Without one, the same input and parameters do, within
    `same_within_s` (None: for ever) and under the same name, if one is given.
    is_paused: a new batch waits until it is resumed.
    shares_duplicates, keeps_answers: the two savings above can be switched off.
    """

    tenant: str = "default"
    name: str | None = None
    priority: int = 0
    metadata: str | None = None
    expires_at: float | None = None
    artifact_digest: str = ""
    idempotency_key: str | None = None
    same_within_s: float | None = None
    is_paused: bool = False
    is_interactive: bool = False
    shares_duplicates: bool = True
    keeps_answers: bool = True


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
    before the failure, which the same submission continues (an input that changed meanwhile: `failed`, with the answers
    that it has by then). InputError(idempotency_key_reused): another input or other
    parameters were submitted under that key.
    """
    batch_options = batch_options or BatchOptions()
    reader = InputReader(source, options)
    fingerprint = make_fingerprint(source.sha256(), reader, options, batch_options)
    with database.read() as connection:
        batch = _find(connection, fingerprint, batch_options, database.now())
    if batch is not None and batch.status is not BatchStatus.VALIDATING:
        return Submission(batch, was_there=True, written=0)
    writer = _Writer(database, source, reader, options, batch_options, fingerprint)
    try:
        for group in _groups(reader, first_lines=FIRST_GROUP_LINES):
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
        found = _find_started(database, fingerprint, batch_options) if error.code == "illegal_move" else None
        if found is None:
            raise
        return Submission(found, was_there=True, written=0)
    with database.read() as connection:
        batch = queries.find_batch_by_id(connection, batch_id)
    assert batch is not None, "a batch that was just started is there"
    return Submission(batch, was_there=False, written=writer.written)


def write_lines(
    database: Database,
    source: Source,
    options: InputOptions,
    batch_options: BatchOptions,
    batch: BatchRow,
    *,
    keep_on: Callable[[], bool],
) -> bool:
    """Write the lines of a batch that is there already and validating; go on after its last committed one.

    keep_on: asked after each group; False stops, and then False is returned. Does not start the batch.
    Raises InputError, and StorageError (illegal_move) when the batch no longer takes lines.
    """
    reader = InputReader(source, options)
    writer = _Writer(database, source, reader, options, batch_options, batch.fingerprint)
    with database.read() as connection:
        writer.adopt(batch.id, queries.last_submitted_line(connection, batch.id))
    for group in _groups(reader):
        writer.write(group)
        if not keep_on():
            return False
    return True


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
    _asking: dict[str, blake2b] = field(default_factory=dict)  # by prefix: a digest that lacks only the line's body
    _questions: FirstLines = field(default_factory=FirstLines)
    _earlier: _EarlierAnswers | None = None

    def adopt(self, batch_id: int, committed_line: int) -> None:
        """Write to this batch, whose lines up to `committed_line` are there."""
        self._batch_id, self._committed_line = batch_id, committed_line
        if self.batch_options.name is not None and self.batch_options.keeps_answers:
            self._earlier = _EarlierAnswers(self.database, self.batch_options, batch_id)

    def write(self, group: list[InputLine | RefusedLine]) -> None:
        if self._batch_id is None:
            self.adopt(*self.database.retry(self._find_or_create))
        assert self._batch_id is not None
        self.lines += len(group)
        requests: list[NewRequest] = []
        refused: list[RefusedLine] = []
        unsaved: dict[str, list[int]] = {}  # prefixes whose row is not known, and where in `requests` they are wanted
        for item in group:
            if isinstance(item, RefusedLine):
                self.refused += 1
                if item.line > self._committed_line:
                    refused.append(item)
                continue
            request = self._make_request(item)  # of lines written earlier too: a later one may repeat their question
            if item.line > self._committed_line:
                if item.prefix and request.prefix_id is None:
                    unsaved.setdefault(item.prefix, []).append(len(requests))
                requests.append(request)
        if requests or refused:
            batch_id = self._batch_id
            written, prefix_ids = self.database.retry(
                lambda connection: self._write(connection, batch_id, requests, refused, unsaved)
            )
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
        options = self.batch_options
        transitions.lock_tenant(connection, options.tenant)
        batch = _find(connection, self.fingerprint, options, self.database.now())
        if batch is not None:
            # One that has started meanwhile is found out about with the first line that is to be added to it.
            return batch.id, queries.last_submitted_line(connection, batch.id)
        now = self.database.now()
        new = NewBatch(
            public_id=f"batch_{uuid.uuid4().hex}",
            fingerprint=self.fingerprint,
            endpoint=self.reader.endpoint,
            model=self.options.model,
            tenant=options.tenant,
            name=options.name,
            priority=options.priority,
            metadata=options.metadata,
            expires_at=options.expires_at,
            idempotency_key=options.idempotency_key,
            artifact_digest=options.artifact_digest or None,
            is_interactive=options.is_interactive,
            runs_early=True,
            paused_at=now if options.is_paused else None,
        )
        return transitions.create_batch(connection, new, now), 0

    def _make_request(self, item: InputLine) -> NewRequest:
        line, custom_id, body, prefix = item
        asking = self._asking.get(prefix)
        if asking is None:
            asking = self._begin_asking(prefix)
        digest = asking.copy()
        digest.update(body.encode(errors="surrogatepass"))
        number = digest.digest()
        same_as = None
        if self.batch_options.shares_duplicates and is_deterministic(body):
            first = self._questions.find(number, line)
            same_as = first if first != line else None
        question = int.from_bytes(number[:8], signed=True)
        prompt_tokens = estimate_prompt_tokens(body, len(prefix))
        return NewRequest(
            line,
            custom_id,
            body,
            self._prefix_ids.get(prefix),
            estimate_tokens(body, len(prefix)),
            prompt_tokens,
            question,
            same_as,
            self._earlier.find(custom_id, question) if self._earlier else None,
        )

    def _begin_asking(self, prefix: str) -> blake2b:
        """The digest of what an answer depends on besides the body: endpoint, model and artifact, and the prefix."""
        scope = f"{self.reader.endpoint}\n{self.options.model}\n{self.batch_options.artifact_digest}"
        key = blake2b(scope.encode(), digest_size=32).digest()
        begun = b""
        if prefix:
            begun = blake2b(prefix.encode(errors="surrogatepass"), digest_size=DIGEST_BYTES).digest()
        if len(self._asking) > KNOWN_PREFIXES:
            self._asking.clear()
        self._asking[prefix] = blake2b(begun, digest_size=DIGEST_BYTES, key=key)
        return self._asking[prefix]

    def _write(
        self,
        connection: Connection,
        batch_id: int,
        requests: list[NewRequest],
        refused: list[RefusedLine],
        unsaved: dict[str, list[int]],
    ) -> tuple[int, dict[str, int]]:
        """One group, made ready before: the write lock is held for the statements alone."""
        prefix_ids = {prefix: transitions.save_prefix(connection, prefix) for prefix in unsaved}
        if unsaved:
            requests = list(requests)
            for prefix, places in unsaved.items():
                for place in places:
                    requests[place] = requests[place]._replace(prefix_id=prefix_ids[prefix])
        written = transitions.add_requests(connection, batch_id, requests) if requests else 0
        if self._earlier is not None:
            transitions.carry_answers(connection, batch_id, requests, self.database.now())
        if refused:
            written += transitions.refuse_lines(connection, batch_id, refused, self.database.now())
        return written, prefix_ids


class _EarlierAnswers:
    """Which lines of a job's earlier batches have an answer: about 50 bytes a line, whatever the texts."""

    def __init__(self, database: Database, options: BatchOptions, batch_id: int) -> None:
        self._places = CustomIds()
        self._request_ids = array("q")
        assert options.name is not None
        with database.read() as connection:
            batches = queries.batches_of_job(connection, options.name, options.tenant)
        for batch in batches:  # the newest first: its answer is the one that counts
            if batch.id == batch_id or batch.text_purged_at is not None or not batch.completed_requests:
                continue
            for request in queries.answered_requests(database, batch.id):
                place = len(self._request_ids) + 1
                if self._places.first_line(_line_key(request.custom_id, request.question_hash), place) == place:
                    self._request_ids.append(request.id)
        self._count = len(self._request_ids)

    def find(self, custom_id: str, question: int) -> int | None:
        """The request that answered this line, if there is one."""
        if not self._count:
            return None
        place = self._places.first_line(_line_key(custom_id, question), self._count + 1)
        return self._request_ids[place - 1] if place <= self._count else None


def _line_key(custom_id: str, question: int) -> str:
    return f"{question}\n{custom_id}"


def estimate_tokens(body: str, prefix_characters: int = 0) -> int:
    """Tokens of prompt and answer, roughly."""
    bound = _MAX_TOKENS.search(body)
    answer = int(bound.group(1)) if bound else UNBOUNDED_ANSWER_TOKENS
    return min(estimate_prompt_tokens(body, prefix_characters) + answer, _MOST_TOKENS)


def estimate_prompt_tokens(body: str, prefix_characters: int = 0) -> int:
    """Tokens of the prompt, roughly."""
    return (len(body) + prefix_characters) // CHARACTERS_PER_TOKEN


# Within a text the quotes would be escaped.
_MAX_TOKENS = re.compile(r'"max_(?:completion_)?tokens":\s*(\d{1,9})')
_MOST_TOKENS = 2**31 - 1


def is_deterministic(body: str) -> bool:
    """Whether a body in its normal form gets the same answer each time: greedy, or with a seed of its own."""
    return _FIXED_SAMPLING.search(body) is not None


# As in `_MAX_TOKENS`; in `metadata`, the one place for keys of the user's own, values are texts.
_FIXED_SAMPLING = re.compile(r'"(?:temperature":-?0(?:\.0)?|seed":-?\d+)[,}]')


def _find(connection: Connection, fingerprint: str, options: BatchOptions, now: float) -> BatchRow | None:
    """The batch that the same submission has made, as far as it still means it."""
    if options.idempotency_key is not None:
        batch = queries.find_batch_by_idempotency_key(connection, options.idempotency_key, options.tenant)
        if batch is not None and batch.fingerprint != fingerprint:
            raise InputError(
                f"idempotency key {options.idempotency_key!r} stands for another input or other parameters "
                f"({batch.public_id}); give each submission a key of its own",
                code="idempotency_key_reused",
            )
        return batch
    since = 0.0 if options.same_within_s is None else now - options.same_within_s
    batch = queries.find_batch_by_fingerprint(connection, fingerprint, options.tenant, since=since, name=options.name)
    if batch is None or batch.status not in FOUND_AGAIN or batch.text_purged_at is not None:
        return None
    if options.name is not None and batch.status is BatchStatus.COMPLETED and batch.failed_requests:
        return None  # a job's lines that failed run again; the others keep their answers
    return batch


def _groups(reader: InputReader, *, first_lines: int | None = None) -> Iterator[list[InputLine | RefusedLine]]:
    """Lines in groups small enough for one transaction and for memory. first_lines: of the first, if it is smaller."""
    group: list[InputLine | RefusedLine] = []
    characters = 0
    most = min(first_lines or GROUP_LINES, GROUP_LINES)
    for item in reader:
        group.append(item)
        characters += len(item.body) if isinstance(item, InputLine) else len(item.error_message)
        if len(group) >= most or characters >= GROUP_CHARACTERS:
            yield group
            group, characters, most = [], 0, GROUP_LINES
    if group:
        yield group


def _find_started(database: Database, fingerprint: str, options: BatchOptions) -> BatchRow | None:
    with database.read() as connection:
        batch = _find(connection, fingerprint, options, database.now())
    return None if batch is None or batch.status is BatchStatus.VALIDATING else batch
