"""What the commands do that steer batches: cancel, pause, resume, retry, set, purge.

They must act at once, beside workers that use every core: nothing is imported that they can do without, and logging is
set up only where something is logged.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from jobs import steering
from jobs.settings import Settings, load_settings
from storage.database import Database, check_schema, open_database
from storage.queries import BatchRow


def cancel(named: str) -> int:
    from jobs.logs import set_up_logs

    settings = load_settings()
    set_up_logs("cancel", level=settings.log.level, file=settings.logs_dir / "cancel.log", console=False)
    with _database(settings) as database:
        _say(steering.cancel(database, steering.find_batch(database, named), settings.files_dir))
    return 0


def pause(named: str) -> int:
    with _database(load_settings()) as database:
        _say(steering.pause(database, steering.find_batch(database, named)))
    return 0


def resume(named: str) -> int:
    with _database(load_settings()) as database:
        _say(steering.resume(database, steering.find_batch(database, named)))
    return 0


def retry_failed(named: str) -> int:
    with _database(load_settings()) as database:
        batch = steering.find_batch(database, named)
        lines = steering.retry_failed(database, batch)
    click.echo(f"{batch.public_id}: {lines:,} lines run again", err=True)
    return 0


def set_urgency(named: str, priority: int | None, deadline: str | None) -> int:
    with _database(load_settings()) as database:
        batch = steering.find_batch(database, named)
        expires_at = None if deadline is None else steering.parse_deadline(deadline, database.now())
        clears = deadline is not None and expires_at is None
        batch = steering.set_urgency(database, batch, priority=priority, expires_at=expires_at, clear_deadline=clears)
    until = ""
    if batch.expires_at is not None:
        from jobs.report import instant  # with the tables of a terminal

        until = f", deadline {instant(batch.expires_at)}"
    _say(batch, f", priority {batch.priority}{until}")
    return 0


def purge(older_than: str, rows: bool, yes: bool) -> int:
    settings = load_settings()
    older_than_s = steering.parse_age(older_than)
    what = "all records of requests" if rows else "prompts and answers"
    if not yes and not _confirms(f"remove {what} of batches that ended more than {older_than} ago?"):
        click.echo("nothing was purged", err=True)
        return 0
    with _database(settings) as database:
        purged = steering.purge(database, settings.files_dir, older_than_s=older_than_s, rows=rows)
    click.echo(f"purged {what} of {purged.batches:,} batches, {purged.requests:,} requests", err=True)
    return 0


@contextmanager
def _database(settings: Settings) -> Iterator[Database]:
    with open_database(settings.database.url) as database:
        check_schema(database)
        yield database


def _confirms(question: str) -> bool:
    try:
        return click.confirm(question, err=True)
    except click.Abort:  # Ctrl-C, or standard input has ended
        click.echo(err=True)  # the question's line has no end yet
        if sys.stdin.isatty():
            raise KeyboardInterrupt from None
        raise steering.SteeringError(
            "nobody answered, so nothing was done; give --yes where nobody can be asked", code="not_confirmed"
        ) from None


def _say(batch: BatchRow, more: str = "") -> None:
    click.echo(f"{batch.public_id}: {steering.standing(batch)}{more}", err=True)
