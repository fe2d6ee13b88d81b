"""What an operator does with batches: find, list, describe, watch, follow, cancel, pause, resume, retry, set, purge.

Plain functions over the database: the command line prints what they return, and a server would render it.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from storage import queries, transitions
from storage.database import Connection, Database
from storage.errors import PromptmillError, StorageError
from storage.models import BatchStatus
from storage.purge import Purged, purge_rows, purge_text
from storage.queries import BatchRow, ResultRow, WorkerRow

LAST = "last"
PAUSED = "paused"
REPLAY = "replay-"  # how the fingerprints of replays begin: those are not what a person means by the last batch
# How far back the beginning of an id is looked for.
PREFIX_BATCHES = 5000
LEAST_PREFIX = 4  # characters; fewer would too easily mean another batch than was meant
# Rates are taken over the last so many seconds: long enough to be calm, short enough to follow.
RATE_WINDOW_S = 30.0
# The time left is told once so long was seen, in which so many requests ended (or a tenth of the batch, if less):
# before that one lucky group of short answers makes it jump.
LEAST_SEEN_S = 10.0
LEAST_SEEN_REQUESTS = 10
WATCH_S = 0.5
FOLLOW_S = 0.3
# What `cancel` spends itself on the requests that wait: some ten thousands. The longest batch whose files it writes.
CANCEL_S = 1.0
CANCEL_LINES = 50_000
if TYPE_CHECKING:
    from jobs.submit import SubmitProgress

Moved = TypeVar("Moved")

UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
# How far ahead a deadline or a key's end may lie, whichever way it comes in: far beyond any batch, and far from the
# year 9999, where calendars end. How far back an age may reach: beyond anything that is kept.
LONGEST_WINDOW_DAYS = 999
LONGEST_WINDOW_S = LONGEST_WINDOW_DAYS * UNITS_S["d"]
LONGEST_AGE_DAYS = 36_500
LAST_INSTANT = 253_402_300_799  # Unix seconds: the end of the year 9999
SHOWN_CHARACTERS = 60  # of a refused value, in a message


class SteeringError(PromptmillError):
    """What was asked for cannot be done."""


# --- finding -----------------------------------------------------------------------------------------------------


def find_batch(database: Database, named: str) -> BatchRow:
    """The batch of an id, of the beginning of one, or the newest (`last`). Raises SteeringError: batch_not_found."""
    with database.read() as connection:
        if named == LAST:
            newest = queries.list_batches(connection, PREFIX_BATCHES, with_interactive=False)
            found = next((batch for batch in newest if not batch.fingerprint.startswith(REPLAY)), None)
            if found is None:
                raise SteeringError("there is no batch yet; make one: promptmill submit INPUT", code="batch_not_found")
            return found
        found = queries.find_batch(connection, named)
        if found is not None:
            return found
        begins = named.removeprefix("batch_")
        if len(begins) < LEAST_PREFIX:
            raise SteeringError(
                f"{named!r} is too short to name a batch; write {LEAST_PREFIX} characters of its id or more, or {LAST}",
                code="batch_not_found",
            )
        near = [
            batch
            for batch in queries.list_batches(connection, PREFIX_BATCHES, with_interactive=False)
            if batch.public_id.startswith(f"batch_{begins}")
        ]
    if len(near) == 1:
        return near[0]
    if near:
        ids = ", ".join(batch.public_id for batch in near[:3])
        raise SteeringError(
            f"{named} may be {len(near)} batches ({ids}, ...); write more of it", code="batch_ambiguous"
        )
    raise SteeringError(f"there is no batch {named}; promptmill list shows those there are", code="batch_not_found")


def standing(batch: BatchRow) -> str:
    """A batch's status in a word, paused included."""
    return PAUSED if batch.paused_at is not None and not batch.is_final else batch.status.value


def list_batches(database: Database, *, stands: str | None = None, limit: int = 20) -> list[BatchRow]:
    """Batches, the newest first. stands: only those whose `standing` is that."""
    found: list[BatchRow] = []
    before: int | None = None
    while len(found) < limit:
        with database.read() as connection:
            page = queries.list_batches(connection, max(limit, 200), before, with_interactive=False)
        found += [batch for batch in page if stands is None or standing(batch) == stands]
        if not page or stands is None:
            break
        before = page[-1].id
    return found[:limit]


def describe(batch: BatchRow) -> dict[str, object]:
    """A batch as plain values, for scripts. Instants are Unix seconds."""
    return {
        "id": batch.public_id,
        "name": batch.name,
        "tenant": batch.tenant,
        "door": batch.door,
        "model": batch.model,
        "endpoint": batch.endpoint,
        "status": batch.status.value,
        "is_paused": batch.paused_at is not None,
        "priority": batch.priority,
        "requests": {
            "total": batch.total_requests,
            "completed": batch.completed_requests,
            "failed": batch.failed_requests,
        },
        "tokens": {
            "prompt": batch.prompt_tokens,
            "cached": batch.cached_tokens,
            "completion": batch.completion_tokens,
        },
        "metadata": json.loads(batch.metadata) if batch.metadata else None,
        "error": {"code": batch.error_code, "message": batch.error_message} if batch.error_code else None,
        **{f"{step}_at": finite(getattr(batch, f"{step}_at")) for step in _STEPS},
    }


def finite(at: float | None) -> float | None:
    """An instant for JSON, which knows no infinity: what never comes is None."""
    return at if at is not None and math.isfinite(at) else None


_STEPS = (
    "created",
    "in_progress",
    "paused",
    "finalizing",
    "completed",
    "failed",
    "cancelling",
    "cancelled",
    "expires",
    "expired",
)


def is_all_answered(batch: BatchRow) -> bool:
    return batch.status is BatchStatus.COMPLETED and batch.completed_requests == batch.total_requests


# --- progress ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Progress:
    """How a batch stands. worker: what serves its model, or is about to; None: nobody."""

    batch: BatchRow
    worker: WorkerRow | None


@dataclass(frozen=True, slots=True)
class Observer:
    """What is told while a batch is submitted and runs."""

    submitting: Callable[[SubmitProgress], None] = lambda _progress: None
    running: Callable[[Progress], None] = lambda _progress: None
    note: Callable[[str], None] = lambda _text: None


class Rates:
    """Requests and tokens a second over the last seconds, and the time left at that rate."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, int, int, int]] = []
        self._batch: BatchRow | None = None

    def add(self, now: float, batch: BatchRow) -> None:
        """now: monotonic seconds."""
        done = batch.completed_requests + batch.failed_requests
        self._seen.append((now, done, batch.completion_tokens, batch.prompt_tokens + batch.completion_tokens))
        self._batch = batch
        while len(self._seen) > 2 and now - self._seen[1][0] > RATE_WINDOW_S:
            self._seen.pop(0)

    @property
    def requests_per_s(self) -> float:
        return self._per_s(1)

    @property
    def tokens_per_s(self) -> float:
        """New tokens."""
        return self._per_s(2)

    @property
    def left_s(self) -> float | None:
        """By tokens, which flow more evenly than requests end: those that the open requests will take, at the rate of
        the last seconds. None as long as too little is known."""
        batch = self._batch
        if batch is None or batch.completed_requests == 0:
            return None
        first, last = self._seen[0], self._seen[-1]
        wanted = min(LEAST_SEEN_REQUESTS, batch.total_requests / 10)
        if last[0] - first[0] < LEAST_SEEN_S or last[1] - first[1] < wanted:
            return None
        open_requests = batch.total_requests - batch.completed_requests - batch.failed_requests
        each = (batch.prompt_tokens + batch.completion_tokens) / batch.completed_requests
        rate = self._per_s(3)
        return open_requests * each / rate if rate > 0 else None

    def _per_s(self, place: int) -> float:
        if not self._seen:
            return 0.0
        first, last = self._seen[0], self._seen[-1]
        seconds = last[0] - first[0]
        return (last[place] - first[place]) / seconds if seconds > 0 else 0.0


def watch_batch(database: Database, batch_id: int, *, pause_s: float = WATCH_S) -> Iterator[Progress]:
    """How a batch stands, again and again, until it has ended."""
    from jobs.worker_process import serving_workers  # nothing else here needs what it imports

    while True:
        with database.read() as connection:
            batch = queries.find_batch_by_id(connection, batch_id)
            assert batch is not None, f"there is no batch {batch_id}"
            serving = serving_workers(connection, batch.model, database.now())
        yield Progress(batch, next(iter(serving), None))
        if batch.is_final:
            return
        time.sleep(pause_s)


def follow_results(
    database: Database, batch_id: int, cursor: int = 0, *, pause_s: float = FOLLOW_S
) -> Iterator[ResultRow]:
    """Each result of a batch as it lands, from a cursor on, until the batch has ended. Every line comes once.

    Two transactions on Postgres may commit in another order than they took their numbers, so one may land behind the
    cursor: when the batch has ended, whatever was passed over that way is given too.
    """
    given = _Lines()
    began_at = cursor
    while True:
        with database.read() as connection:
            batch = queries.find_batch_by_id(connection, batch_id)
            rows = queries.results_after(connection, batch_id, cursor)
        assert batch is not None, f"there is no batch {batch_id}"
        for row in rows:
            cursor = row.result_id
            given.add(row.line)
            yield row
        if rows:
            continue
        if batch.is_final:
            break
        time.sleep(pause_s)
    if database.is_sqlite or (began_at == 0 and len(given) == _finished(batch)):
        return
    for row in queries.results_in_order(database, batch_id):
        if row.result_id > began_at and row.line not in given:
            yield row


class _Lines:
    """A set of line numbers, a bit for each."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self._count = 0

    def add(self, line: int) -> None:
        place, bit = divmod(line, 8)
        if place >= len(self._bits):
            self._bits.extend(bytes(max(place + 1, 2 * len(self._bits)) - len(self._bits)))
        self._count += not self._bits[place] >> bit & 1
        self._bits[place] |= 1 << bit

    def __contains__(self, line: int) -> bool:
        place, bit = divmod(line, 8)
        return place < len(self._bits) and bool(self._bits[place] >> bit & 1)

    def __len__(self) -> int:
        return self._count


def _finished(batch: BatchRow) -> int:
    return batch.completed_requests + batch.failed_requests


# --- steering ----------------------------------------------------------------------------------------------------


def cancel(database: Database, batch: BatchRow, files_dir: Path) -> BatchRow:
    """Stop a batch for good. Workers stop what they run of it within a second or so, unless it is answered first.

    What waits gets its result here, and the batch its files, as far as that is quick: then nobody who sweeps is needed.
    Sweep does the rest.
    """
    begin_cancel(database, batch)
    finish_cancel(database, batch, files_dir)
    return _again(database, batch)


def begin_cancel(database: Database, batch: BatchRow) -> BatchRow:
    """The first step of `cancel`: nothing of the batch begins from now on. Raises SteeringError, code illegal_move."""
    try:
        _move(database, lambda connection, now: transitions.cancel_batch(connection, batch.id, now), batch)
    except SteeringError:
        raise cannot_cancel(_again(database, batch)) from None
    return _again(database, batch)


def cannot_cancel(batch: BatchRow) -> SteeringError:
    ends = "has ended" if batch.is_final else "is ending already"
    return SteeringError(f"{batch.public_id} is {batch.status}: it {ends} and cannot be cancelled", code="illegal_move")


def finish_cancel(database: Database, batch: BatchRow, files_dir: Path) -> None:
    """The second step, as far as that is quick: results for what waits, and the batch's files.

    Of this batch alone: others that have ended meanwhile are for whoever sweeps.
    """
    from jobs.finalize import finalize_batches  # with the formats of lines; the first step must not wait for them

    until = time.monotonic() + CANCEL_S
    while time.monotonic() < until and database.retry(
        lambda connection: transitions.end_requests(connection, batch.id, database.now())
    ):
        pass
    if batch.total_requests <= CANCEL_LINES:
        finalize_batches(database, files_dir, database.now(), batch_id=batch.id)


def pause(database: Database, batch: BatchRow) -> BatchRow:
    """Let nothing more of a batch begin; running requests finish."""
    _move(database, lambda connection, now: transitions.pause_batch(connection, batch.id, now), batch)
    return _again(database, batch)


def resume(database: Database, batch: BatchRow) -> BatchRow:
    _move(database, lambda connection, now: transitions.resume_batch(connection, batch.id, now), batch)
    return _again(database, batch)


def retry_failed(database: Database, batch: BatchRow, *, window_s: float | None = None) -> int:
    """Run the lines of an ended batch again that have no answer, refused ones apart. Returns how many.

    window_s: the new deadline, from now; None keeps the old one unless it has passed.
    """

    with database.read() as connection:
        from_line = transitions.first_retriable_line(connection, batch.id)

    def move(connection: Connection, now: float) -> int:
        expires_at = None if window_s is None else now + window_s
        return transitions.retry_batch(connection, batch.id, now, expires_at=expires_at, from_line=from_line)

    moved = _move(database, move, batch)
    while True:  # in parts; where we are stopped, sweep goes on
        more = database.retry(lambda connection: transitions.continue_retry(connection, batch.id))
        if more is None:
            return moved
        moved += more


def set_urgency(
    database: Database,
    batch: BatchRow,
    *,
    priority: int | None = None,
    expires_at: float | None = None,
    clear_deadline: bool = False,
) -> BatchRow:
    """Change a batch's priority, or its deadline, or both; what is not given stays."""

    def move(connection: Connection, _now: float) -> None:
        transitions.prioritise_batch(
            connection, batch.id, priority=priority, expires_at=expires_at, clear_deadline=clear_deadline
        )

    _move(database, move, batch)
    return _again(database, batch)


def purge(database: Database, files_dir: Path, *, older_than_s: float, rows: bool = False) -> Purged:
    """Remove prompts and answers (rows: also the records) of batches that ended so long ago, and their files."""
    now = database.now()
    remove = purge_rows if rows else purge_text
    purged = remove(database, ended_before=now - older_than_s, now=now)
    for path in purged.paths:
        with contextlib.suppress(FileNotFoundError):
            (files_dir / path).unlink()
    return purged


def _move(database: Database, move: Callable[[Connection, float], Moved], batch: BatchRow) -> Moved:
    try:
        return database.retry(lambda connection: move(connection, database.now()))
    except StorageError as error:
        if error.code != "illegal_move":
            raise
        reason = error.message.replace(f"batch {batch.id} ", f"{batch.public_id} ")
        raise SteeringError(reason, code="illegal_move") from error


def _again(database: Database, batch: BatchRow) -> BatchRow:
    with database.read() as connection:
        found = queries.find_batch_by_id(connection, batch.id)
    assert found is not None, "batches are not removed"
    return found


# --- times as people write them ----------------------------------------------------------------------------------


def parse_age(text: str, option: str = "--older-than") -> float:
    """`30d`, `12h`, `90s` in seconds. Raises SteeringError."""
    return _parse_length(text, option, LONGEST_AGE_DAYS)


def parse_deadline(text: str, now: float, option: str = "--deadline") -> float | None:
    """A length of time from now, an ISO time (UTC where it names no zone), or `none`. Raises SteeringError."""
    if text.strip().lower() == "none":
        return None
    if _LENGTH.fullmatch(text.strip().lower()) is not None:
        instant = now + _parse_length(text, option, LONGEST_WINDOW_DAYS)
    else:
        instant = _parse_instant(text, option)
    if instant <= now:
        raise SteeringError(f"{option} {text} has passed; give a time to come", code="invalid_time")
    if instant > now + LONGEST_WINDOW_S:
        raise SteeringError(
            f"{option} {text} is more than {LONGEST_WINDOW_DAYS} days ahead; give an earlier time, or none",
            code="invalid_time",
        )
    return instant


_LENGTH = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([smhdw])")


def _parse_length(text: str, option: str, most_days: int) -> float:
    """Seconds. most_days: the bound, which also keeps what is as long as a book from being infinite."""
    found = _LENGTH.fullmatch(text.strip().lower())
    if found is None:
        raise SteeringError(
            f"{option} {_cut(text)!r} is not a length of time; write 90s, 30m, 12h or 7d", code="invalid_time"
        )
    length_s = float(found[1]) * UNITS_S[found[2]]
    if length_s > most_days * UNITS_S["d"]:
        raise SteeringError(f"{option} {_cut(text)} exceeds {most_days}d; write a shorter time", code="invalid_time")
    return length_s


def _parse_instant(text: str, option: str) -> float:
    """Unix seconds of an ISO time."""
    try:
        instant = datetime.fromisoformat(text.strip())
    except ValueError:
        raise SteeringError(
            f"{option} {_cut(text)!r} is no time; write 12h, 7d, a time such as 2026-12-24T18:00, or none",
            code="invalid_time",
        ) from None
    return (instant if instant.tzinfo is not None else instant.replace(tzinfo=UTC)).timestamp()


def _cut(text: str) -> str:
    """As much of a refused value as a message can take."""
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 3]}..."
