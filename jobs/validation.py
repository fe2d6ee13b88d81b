"""A batch's input file -> its verdict: rows and a start, or `failed` with what is wrong line by line.

A batch that came with an uploaded file begins as `validating`. Whoever has a validator running (gateways, `up`, `tick`)
claims it by a lease in the database, so that the work of one that died is taken up by another, from the last committed
line. First all lines are checked, which is fast; only when the file as a whole is good are they written, and only when
all are written does the batch start.

What is wrong with the file's form (a line that is no request of this batch at all) fails the batch, as with OpenAI.
What is wrong within one line's body fails that line alone. A caller may ask that format errors fail only their lines,
too.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

import structlog
from pydantic_core import from_json

from jobs.artifacts import find_artifact, known_artifacts
from jobs.forecast import model_rate, shortest_s
from jobs.inputs import InputOptions, InputReader
from jobs.logs import crash_facts
from jobs.protocol import Endpoint, show
from jobs.quotas import QuotaExceeded, check_queued_tokens
from jobs.settings import GatewaySettings, Settings
from jobs.source import InputError, Source
from jobs.submit import BatchOptions, write_lines
from storage import queries, transitions
from storage.database import Connection, Database
from storage.errors import InvalidRequest, PromptmillError, StorageError
from storage.files import find_upload, sweep_files
from storage.queries import BatchRow

# How long a validator's claim holds without a sign, and how often it gives one.
LEASE_S = 30.0
RENEW_EVERY_S = 5.0
# Between two looks for a batch to validate, where nobody says that there is one.
LOOK_EVERY_S = 1.0
SWEEP_FILES_EVERY_S = 60.0
# Errors that `errors.data` lists; all lines are checked, and a last entry says how many more there are.
MAX_LISTED_ERRORS = 100
# Newlines that a file may have for each line that a batch may have: endless blank lines are no input.
NEWLINES_A_LINE = 4
# A model that some worker has served within this time can be asked for while nobody serves it: it may come back.
MODEL_KNOWN_S = 30 * 86_400.0
INTERNAL_ERROR = "internal_error"
# A file whose contents are not in this host's files folder may be in another's; not for longer than this.
CONTENTS_PATIENCE_S = 600.0
CLOSE_S = 10.0

log = structlog.get_logger(__name__)


class InvalidLines(StrEnum):
    """What a format error fails."""

    FAIL_BATCH = "fail_batch"
    FAIL_LINE = "fail_line"


@dataclass(frozen=True, slots=True)
class SubmitOptions:
    """What else a caller asked of its batch; kept with it as JSON."""

    invalid_lines: InvalidLines = InvalidLines.FAIL_BATCH
    refuse_impossible_deadline: bool | None = None  # None: as the gateway is set

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | None) -> SubmitOptions:
        values = json.loads(text) if text else {}
        return cls(
            invalid_lines=InvalidLines(values.get("invalid_lines", InvalidLines.FAIL_BATCH)),
            refuse_impossible_deadline=values.get("refuse_impossible_deadline"),
        )


@dataclass(frozen=True, slots=True)
class FoundError:
    """An entry of `errors.data`. line: from 1; None: the file as a whole."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


@dataclass
class Findings:
    """What is wrong with an input's form: the first errors, and how many there are."""

    listed: list[FoundError] = field(default_factory=list)
    count: int = 0
    lines: int = 0

    def add(self, error: FoundError) -> None:
        self.count += 1
        if len(self.listed) < MAX_LISTED_ERRORS:
            self.listed.append(error)

    def entries(self) -> list[FoundError]:
        more = self.count - len(self.listed)
        if not more:
            return self.listed
        return [
            *self.listed,
            FoundError("too_many_errors", f"{more:,} more lines have errors; correct these first and look again"),
        ]


class _Rejected(Exception):
    """The batch fails, for these reasons."""

    def __init__(self, errors: list[FoundError]) -> None:
        super().__init__(errors[0].code)
        self.errors = errors


class _Lost(Exception):
    """The batch was cancelled, is somebody else's by now, or we are told to stop."""


class _ContentsElsewhere(Exception):
    """The input file is known, and its contents are not in our files folder."""


# --- policy ------------------------------------------------------------------------------------------------------


def is_format_error(error: InvalidRequest) -> bool:
    """Whether a line is not of this batch's form at all, rather than a request that cannot be answered.

    `body.model` and `body.stream` concern the batch: all lines have one model, and nobody listens to a stream.
    """
    return error.param is None or not error.param.startswith("body.") or error.param in ("body.model", "body.stream")


def as_found(error: InvalidRequest, line: int, model: str) -> FoundError:
    """A line's format error in the words of the Batch API."""
    if error.code == "model_not_found":
        return FoundError(
            "model_mismatch",
            f"the line's model is not {show(model)}, which the first line asks for; all lines of a file have one model",
            error.param,
            line,
        )
    if error.code == "missing_required_parameter" and error.param == "body.model":
        return FoundError(error.code, "body.model is missing; name the model that is to answer", error.param, line)
    code = "url_mismatch" if error.param == "url" and error.code == "invalid_value" else error.code
    return FoundError(code, error.message, error.param, line)


def check_lines(
    reader: InputReader, model: str, *, max_lines: int, fails_lines: bool, keep_on: Callable[[], bool] = lambda: True
) -> Findings:
    """Read all lines and collect what is wrong with their form. fails_lines: nothing but the file as a whole counts.

    keep_on: asked at each line; False stops early. Raises InputError when the file as a whole cannot be used.
    """
    findings = Findings()
    for line, _custom_id, error in reader.check():
        findings.lines += 1
        if findings.lines > max_lines:
            findings.add(_too_many(max_lines))
            break
        if error is not None and not fails_lines and is_format_error(error):
            findings.add(as_found(error, line, model))
        if not keep_on():
            break
    return findings


def first_model(source: Source, max_lines: int) -> tuple[str, int] | None:
    """The model that the first readable line with one asks for, and the line's number; looks at `max_lines`."""
    for number, data in source.lines():
        if number > max_lines:
            break
        if isinstance(data, InvalidRequest) or not data.strip():
            continue
        try:
            value = from_json(data)
        except ValueError:
            continue
        body = value.get("body") if isinstance(value, dict) else None
        model = body.get("model") if isinstance(body, dict) else None
        if isinstance(model, str) and model and "\0" not in model:
            return model, number
    return None


def _too_many(max_lines: int) -> FoundError:
    return FoundError("too_many_tasks", f"the file has more than {max_lines:,} lines; split it into several batches")


# --- mechanism ---------------------------------------------------------------------------------------------------


def validate_next(
    database: Database,
    settings: Settings,
    owner: str,
    *,
    stopping: Callable[[], bool] = lambda: False,
    out_of_reach: set[int] | None = None,
) -> bool:
    """Claim the batch that waits for validation, if there is one, and see it through. Returns whether there was one.

    out_of_reach: batches whose files are not here, passed over; this adds to it.
    Raises StorageError when the database is away: the lease runs out, and somebody tries again.
    """
    besides = set() if out_of_reach is None else out_of_reach
    with database.read() as connection:
        if not queries.has_unclaimed_validation(connection, database.now(), besides=besides):
            return False
    batch_id = database.retry(
        lambda connection: transitions.claim_validation(
            connection, owner=owner, lease_s=LEASE_S, now=database.now(), besides=besides
        )
    )
    if batch_id is None:
        return False
    with database.read() as connection:
        batch = queries.find_batch_by_id(connection, batch_id)
    assert batch is not None, "batches are not removed"
    lease = _Lease(database, batch_id, owner, stopping)
    began = time.monotonic()
    try:
        lines = _validate(database, settings, batch, lease)
        log.info("batch_validated", batch=batch.public_id, lines=lines, seconds=round(time.monotonic() - began, 3))
    except _Rejected as rejected:
        _fail(database, batch, lease, rejected.errors)
    except _Lost:
        database.retry(lambda connection: transitions.release_validation(connection, batch_id, owner=owner))
        log.info("validation_left", batch=batch.public_id)
    except _ContentsElsewhere:
        besides.add(batch_id)
        database.retry(lambda connection: transitions.release_validation(connection, batch_id, owner=owner))
        log.error("input_file_not_here", batch=batch.public_id, folder=str(settings.files_dir))
    except StorageError:
        raise
    except Exception as error:
        # Ours to repair: trying again would only meet it again.
        log.error("validation_crashed", batch=batch.public_id, **crash_facts(error))
        _fail(
            database,
            batch,
            lease,
            [FoundError(INTERNAL_ERROR, f"the server failed while it read the file ({type(error).__name__})")],
        )
    return True


class _Lease:
    """A validator's claim on a batch, renewed as time goes by."""

    def __init__(self, database: Database, batch_id: int, owner: str, stopping: Callable[[], bool]) -> None:
        self._database = database
        self._batch_id = batch_id
        self.owner = owner
        self._stopping = stopping
        self._renewed_at = time.monotonic()
        self.is_lost = False

    def keep(self) -> bool:
        """Call often. False: leave the batch alone."""
        if self._stopping():
            self.is_lost = True
        elif not self.is_lost and time.monotonic() - self._renewed_at > RENEW_EVERY_S:
            self.is_lost = not self._database.retry(self.renew)
            self._renewed_at = time.monotonic()
        return not self.is_lost

    def renew(self, connection: Connection) -> bool:
        return transitions.renew_validation(
            connection, self._batch_id, owner=self.owner, lease_s=LEASE_S, now=self._database.now()
        )


def _validate(database: Database, settings: Settings, batch: BatchRow, lease: _Lease) -> int:
    """Returns the batch's lines. Raises _Rejected, _Lost."""
    options = SubmitOptions.from_json(batch.submit_options)
    with _input_of(database, settings, batch) as source:
        try:
            return _read(database, settings, batch, options, source, lease)
        except InputError as error:
            raise _Rejected([FoundError(error.code, error.message)]) from None


def _read(
    database: Database, settings: Settings, batch: BatchRow, options: SubmitOptions, source: Source, lease: _Lease
) -> int:
    fails_lines = options.invalid_lines is InvalidLines.FAIL_LINE
    asked = first_model(source, settings.gateway.max_batch_lines)
    model, line = asked or ("", 0)
    digest = None if asked is None else find_digest(database, settings.artifacts_dir, model)
    if asked is not None and digest is None:
        raise _Rejected(
            [
                FoundError(
                    "model_not_found",
                    f"model {show(model)} is not served here; GET /v1/models lists those that are",
                    "body.model",
                    line,
                )
            ]
        )
    reads_as = InputOptions(model=model, endpoint=Endpoint(batch.endpoint), only_batch_lines=True)
    findings = check_lines(
        InputReader(source, reads_as),
        model,
        max_lines=settings.gateway.max_batch_lines,
        fails_lines=fails_lines,
        keep_on=lease.keep,
    )
    if lease.is_lost:
        raise _Lost
    if findings.count:
        raise _Rejected(findings.entries())
    database.retry(lambda connection: transitions.name_model(connection, batch.id, model, digest or None))
    batch_options = BatchOptions(tenant=batch.tenant, name=batch.name, artifact_digest=digest or "")
    try:
        if not write_lines(database, source, reads_as, batch_options, batch, keep_on=lease.keep):
            raise _Lost
        _start(database, settings.gateway, batch.id, options, lease)
    except StorageError as error:
        if error.code != "illegal_move":
            raise
        raise _Lost from None  # cancelled meanwhile, or started by somebody who was faster
    return findings.lines


def _start(database: Database, settings: GatewaySettings, batch_id: int, options: SubmitOptions, lease: _Lease) -> None:
    """All lines are written: let the batch run, if it may."""

    def start(connection: Connection) -> None:
        if not lease.renew(connection):
            raise _Lost
        batch = queries.find_batch_by_id(connection, batch_id)
        assert batch is not None
        try:
            check_queued_tokens(connection, batch.tenant, up_to_batch_id=batch.id)
        except QuotaExceeded as error:
            raise _Rejected([FoundError(error.code, error.message)]) from None
        now = database.now()
        refuses = options.refuse_impossible_deadline
        if settings.refuse_impossible_deadlines if refuses is None else refuses:
            _check_deadline(connection, batch, now)
        transitions.start_batch(connection, batch_id, now)

    database.retry(start)


def _check_deadline(connection: Connection, batch: BatchRow, now: float) -> None:
    """Raises _Rejected when the batch could not be done by its deadline even if nothing else ran."""
    rate = model_rate(connection, batch.model, now)
    if batch.expires_at is None or rate is None:
        return
    needed_s = shortest_s(batch, rate)
    left_s = batch.expires_at - now
    if needed_s > left_s:
        raise _Rejected(
            [
                FoundError(
                    "deadline_impossible",
                    f"{batch.total_requests:,} lines take about {needed_s:,.0f} s at the present "
                    f"{rate:.2f} requests/s of {show(batch.model)}, and the deadline is in "
                    f"{max(0.0, left_s):,.0f} s; allow more time, split the file, or start more workers",
                    "completion_window",
                )
            ]
        )


def _fail(database: Database, batch: BatchRow, lease: _Lease, errors: list[FoundError]) -> None:
    told = json.dumps([asdict(error) for error in errors])

    def fail(connection: Connection) -> bool:
        if not lease.renew(connection):
            return False
        first = errors[0]
        transitions.fail_batch(connection, batch.id, first.code, first.message, database.now(), errors=told)
        return True

    if database.retry(fail):
        log.info("batch_rejected", batch=batch.public_id, code=errors[0].code, errors=len(errors))


@contextmanager
def _input_of(database: Database, settings: Settings, batch: BatchRow) -> Iterator[Source]:
    """The batch's input file, open. Raises _Rejected when it is gone, or has far too many lines."""
    assert batch.input_file_public_id is not None
    with database.read() as connection:
        row = find_upload(connection, batch.tenant, batch.input_file_public_id)
    gone = FoundError(
        "file_not_found",
        f"the input file {batch.input_file_public_id} was deleted before it was read; upload it again",
        "input_file_id",
    )
    if row is None:
        raise _Rejected([gone])
    if row.lines > NEWLINES_A_LINE * settings.gateway.max_batch_lines:
        raise _Rejected([_too_many(settings.gateway.max_batch_lines)])
    try:
        file = (settings.files_dir / row.path).open("rb")
    except FileNotFoundError:
        if database.now() - batch.created_at < CONTENTS_PATIENCE_S:
            raise _ContentsElsewhere from None
        raise _Rejected([gone]) from None
    except OSError as error:
        raise _Rejected(
            [FoundError("unreadable_input", f"the input file cannot be read: {error.strerror}", "input_file_id")]
        ) from None
    with Source(file, row.filename) as source:
        yield source


def find_digest(database: Database, artifacts_dir: Path, model: str) -> str | None:
    """The digest of a model that can be asked for here, "" where it is not known; None: there is no such model.

    By the model's name alone, never as a path: it comes from a stranger's file.
    """
    with database.read() as connection:
        workers = queries.list_workers(connection, since=database.now() - MODEL_KNOWN_S)
    newest = max((row for row in workers if row.model == model), key=lambda row: row.last_seen_at, default=None)
    if newest is not None and newest.artifact_digest:
        return newest.artifact_digest
    for path in known_artifacts(artifacts_dir):
        try:
            artifact = find_artifact(str(path), artifacts_dir)
        except PromptmillError:
            continue  # damaged: its own commands say so
        if artifact.model == model:
            return artifact.digest
    return None if newest is None else ""


def known_models(database: Database, artifacts_dir: Path) -> set[str]:
    """The models for which `find_digest` has an answer."""
    with database.read() as connection:
        found = set(queries.served_models(connection, database.now() - MODEL_KNOWN_S))
    for path in known_artifacts(artifacts_dir):
        with contextlib.suppress(PromptmillError):  # damaged: its own commands say so
            found.add(find_artifact(str(path), artifacts_dir).model)
    return found


# --- a thread of its own -----------------------------------------------------------------------------------------


class Validator:
    """Validates batches as they come, and removes expired files, in a thread of its process. Close it."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._settings = settings
        self._owner = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._swept_at = -float("inf")
        self._out_of_reach: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="validator", daemon=True)

    def start(self) -> Validator:
        self._thread.start()
        return self

    def wake(self) -> None:
        """There is a batch to validate: look now."""
        self._wake.set()

    def close(self) -> None:
        """Stop at the next line; what is unfinished is handed back."""
        self._stop.set()
        self._wake.set()
        self._thread.join(CLOSE_S)  # longer only when the database is away; the lease then runs out

    def __enter__(self) -> Validator:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._wake.clear()
                if validate_next(
                    self._database,
                    self._settings,
                    self._owner,
                    stopping=self._stop.is_set,
                    out_of_reach=self._out_of_reach,
                ):
                    continue
                if time.monotonic() - self._swept_at > SWEEP_FILES_EVERY_S:
                    self._swept_at = time.monotonic()
                    self._out_of_reach.clear()  # the folder may have been mounted meanwhile
                    removed = sweep_files(self._database, self._settings.files_dir, self._database.now())
                    if removed:
                        log.info("files_removed", files=removed)
            except StorageError as error:
                log.warning("validation_waits", code=error.code, reason=error.message)
            except Exception as error:  # the thread must live: batches would wait for ever
                log.error("validator_failed", **crash_facts(error))
            self._wake.wait(LOOK_EVERY_S)
