"""Retention: what users wrote and were answered goes after a time; the numbers of the audit stay.

`purge_text` empties prompts and answers of ended batches and keeps every row: who asked when, which attempts were made
with which parameters, token counts, times, errors. `purge_rows` removes the rows of requests, results and attempts too;
the batch with its counters stays, unless it was a single request that somebody waited for. Both drop the batch's
files; the caller unlinks what they name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, delete, select, update

from storage.bulk import one_of
from storage.database import Database
from storage.models import (
    ANSWERS,
    ATTEMPTS,
    BATCHES,
    DELIVERIES,
    FILES,
    PREFIXES,
    REQUESTS,
    RESULTS,
    BatchStatus,
)

# Lines of one transaction.
STEP_LINES = 5000
ENDED = (BatchStatus.COMPLETED, BatchStatus.FAILED, BatchStatus.EXPIRED, BatchStatus.CANCELLED)


@dataclass(frozen=True, slots=True)
class Purged:
    """batches: that were purged now. requests: their lines. paths: files to unlink, relative to the files folder."""

    batches: int
    requests: int
    paths: tuple[str, ...]


def purge_text(database: Database, *, ended_before: float, now: float, tenant: str | None = None) -> Purged:
    """Empty the prompts and answers of batches that ended before an instant; safe to interrupt and to repeat."""
    return _purge(database, ended_before, now, tenant, rows_too=False)


def purge_rows(database: Database, *, ended_before: float, now: float, tenant: str | None = None) -> Purged:
    """Remove the requests, results and attempts of batches that ended before an instant; safe to repeat."""
    return _purge(database, ended_before, now, tenant, rows_too=True)


def _purge(database: Database, ended_before: float, now: float, tenant: str | None, *, rows_too: bool) -> Purged:
    with database.read() as connection:
        batches = _due(connection, ended_before, tenant, rows_too)
    requests = 0
    paths: list[str] = []
    with database.read() as connection:
        single = _interactive_among(connection, batches)
    for start in range(0, len(single), STEP_LINES):
        with database.write() as connection:
            _purge_interactive(connection, single[start : start + STEP_LINES], now, rows_too)
    requests += len(single)
    for batch_id in sorted(set(batches) - set(single)):
        after = 0
        while True:
            with database.write() as connection:
                lines = connection.execute(
                    select(REQUESTS.c.line)
                    .where(REQUESTS.c.batch_id == batch_id, REQUESTS.c.line > after)
                    .order_by(REQUESTS.c.line)
                    .limit(STEP_LINES)
                ).scalars()
                step = list(lines)
                if not step:
                    break
                _purge_lines(connection, batch_id, step[0], step[-1], rows_too)
            after = step[-1]
            requests += len(step)
        with database.write() as connection:
            paths += _finish(connection, batch_id, now, rows_too)
    if batches:
        with database.write() as connection:
            _drop_unused_prefixes(connection)
    return Purged(len(batches), requests, tuple(paths))


def _due(connection: Connection, ended_before: float, tenant: str | None, rows_too: bool) -> list[int]:
    done = BATCHES.c.rows_purged_at if rows_too else BATCHES.c.text_purged_at
    ended = [
        (BatchStatus.COMPLETED, BATCHES.c.completed_at),
        (BatchStatus.FAILED, BATCHES.c.failed_at),
        (BatchStatus.EXPIRED, BATCHES.c.expired_at),
        (BatchStatus.CANCELLED, BATCHES.c.cancelled_at),
    ]
    found: list[int] = []
    for status, at in ended:
        statement = select(BATCHES.c.id).where(BATCHES.c.status == status.value, at < ended_before, done.is_(None))
        if tenant is not None:
            statement = statement.where(BATCHES.c.tenant == tenant)
        found += connection.execute(statement).scalars()
    return sorted(found)


def _interactive_among(connection: Connection, batches: list[int]) -> list[int]:
    statement = select(BATCHES.c.id).where(one_of(BATCHES.c.id, "ids"), BATCHES.c.is_interactive)
    return sorted(connection.execute(statement, {"ids": batches}).scalars())


def _purge_interactive(connection: Connection, batches: list[int], now: float, rows_too: bool) -> None:
    """Single requests, many at once. There may be millions, so with their rows their batches go too."""
    which = {"ids": batches}
    ids = select(REQUESTS.c.id).where(one_of(REQUESTS.c.batch_id, "ids"))
    connection.execute(delete(ANSWERS).where(ANSWERS.c.request_id.in_(ids)), which)
    if rows_too:
        connection.execute(delete(ATTEMPTS).where(ATTEMPTS.c.request_id.in_(ids)), which)
        connection.execute(delete(RESULTS).where(one_of(RESULTS.c.batch_id, "ids")), which)
        connection.execute(delete(REQUESTS).where(one_of(REQUESTS.c.batch_id, "ids")), which)
        connection.execute(delete(BATCHES).where(one_of(BATCHES.c.id, "ids")), which)
        return
    emptied: dict[str, Any] = {"body": None, "prefix_id": None, "question_hash": None}
    connection.execute(update(REQUESTS).where(one_of(REQUESTS.c.batch_id, "ids")).values(emptied), which)
    connection.execute(update(RESULTS).where(one_of(RESULTS.c.batch_id, "ids")).values(response=None), which)
    connection.execute(update(BATCHES).where(one_of(BATCHES.c.id, "ids")).values(text_purged_at=now), which)


def _purge_lines(connection: Connection, batch_id: int, first: int, last: int, rows_too: bool) -> None:
    ids = select(REQUESTS.c.id).where(REQUESTS.c.batch_id == batch_id, REQUESTS.c.line.between(first, last))
    connection.execute(delete(ANSWERS).where(ANSWERS.c.request_id.in_(ids)))
    mine = (REQUESTS.c.batch_id == batch_id, REQUESTS.c.line.between(first, last))
    if rows_too:
        connection.execute(delete(ATTEMPTS).where(ATTEMPTS.c.request_id.in_(ids)))
        connection.execute(delete(RESULTS).where(RESULTS.c.request_id.in_(ids)))
        connection.execute(delete(REQUESTS).where(*mine))
        return
    values: dict[str, Any] = {"body": None, "prefix_id": None, "question_hash": None}
    connection.execute(update(REQUESTS).where(*mine).values(values))
    connection.execute(update(RESULTS).where(RESULTS.c.request_id.in_(ids)).values(response=None))


def _finish(connection: Connection, batch_id: int, now: float, rows_too: bool) -> list[str]:
    """Mark the batch and drop its files. Returns their paths."""
    row = connection.execute(select(BATCHES).where(BATCHES.c.id == batch_id).with_for_update()).one()
    files = [file_id for file_id in (row.output_file_id, row.error_file_id) if file_id is not None]
    values: dict[str, Any] = {
        "text_purged_at": now if row.text_purged_at is None else row.text_purged_at,
        "output_file_id": None,
        "error_file_id": None,
    }
    if rows_too:
        values["rows_purged_at"] = now
        connection.execute(delete(DELIVERIES).where(DELIVERIES.c.batch_id == batch_id))
    connection.execute(update(BATCHES).where(BATCHES.c.id == batch_id).values(values))
    paths = list(connection.execute(select(FILES.c.path).where(FILES.c.id.in_(files))).scalars())
    connection.execute(delete(FILES).where(FILES.c.id.in_(files)))
    return paths


def _drop_unused_prefixes(connection: Connection) -> None:
    """Prefixes that no request begins with any more. A submission saves its prefix in the transaction that uses it."""
    used = select(REQUESTS.c.prefix_id).where(REQUESTS.c.prefix_id.is_not(None)).distinct()
    connection.execute(delete(PREFIXES).where(PREFIXES.c.id.not_in(used)))
