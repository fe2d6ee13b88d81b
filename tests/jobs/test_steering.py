"""What an operator does with batches, on both databases."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from jobs import steering
from jobs.finalize import finalize_batches
from storage import queries, transitions
from storage.database import Database
from storage.models import BatchStatus
from storage.queries import BatchRow
from storage.transitions import NewBatch, NewRequest


def make_batch(database: Database, public_id: str, lines: int = 3) -> BatchRow:
    new = NewBatch(public_id=public_id, fingerprint=public_id, endpoint="/v1/completions", model="stories")
    with database.write() as connection:
        batch_id = transitions.create_batch(connection, new, database.now())
        transitions.add_requests(
            connection, batch_id, [NewRequest(line, f"l-{line}", '{"prompt":"x"}') for line in range(1, lines + 1)]
        )
        transitions.start_batch(connection, batch_id, database.now())
        found = queries.find_batch_by_id(connection, batch_id)
    assert found is not None
    return found


def test_a_batch_is_found_by_its_id_the_beginning_of_it_and_as_the_last(database: Database) -> None:
    first = make_batch(database, "batch_aaaa1111")
    second = make_batch(database, "batch_aaaa2222")
    assert steering.find_batch(database, "batch_aaaa1111") == first
    assert steering.find_batch(database, "batch_aaaa1") == first
    assert steering.find_batch(database, "aaaa2") == second
    assert steering.find_batch(database, "last") == second
    for named, code in (("aaaa", "batch_ambiguous"), ("batch_b", "batch_not_found"), ("a", "batch_not_found")):
        with pytest.raises(steering.SteeringError) as caught:
            steering.find_batch(database, named)
        assert caught.value.code == code
    for short in ("a", "aaa", "batch_", "batch_aaa", ""):
        with pytest.raises(steering.SteeringError, match="too short to name a batch; write 4 characters"):
            steering.find_batch(database, short)


def test_batches_are_listed_newest_first_and_by_status(database: Database, tmp_path: Path) -> None:
    batches = [make_batch(database, f"batch_{n:08}") for n in range(5)]
    assert steering.cancel(database, batches[1], tmp_path).status is BatchStatus.CANCELLED
    assert [batch.id for batch in steering.list_batches(database, limit=2)] == [batches[4].id, batches[3].id]
    cancelled = steering.list_batches(database, stands=BatchStatus.CANCELLED, limit=2)
    assert [batch.id for batch in cancelled] == [batches[1].id]
    steering.pause(database, batches[3])
    paused = steering.list_batches(database, stands="paused")
    assert [(batch.id, steering.standing(batch)) for batch in paused] == [(batches[3].id, "paused")]
    at_work = steering.list_batches(database, stands=BatchStatus.IN_PROGRESS)
    assert [batch.id for batch in at_work] == [batches[4].id, batches[2].id, batches[0].id]


def test_a_batch_is_paused_resumed_and_made_urgent(database: Database) -> None:
    batch = make_batch(database, "batch_1")
    assert steering.pause(database, batch).paused_at is not None
    assert steering.describe(steering.pause(database, batch))["is_paused"] is True
    assert steering.resume(database, batch).paused_at is None
    changed = steering.set_urgency(database, batch, priority=9, expires_at=database.now() + 50)
    assert changed.priority == 9
    assert changed.expires_at is not None
    kept = steering.set_urgency(database, batch, clear_deadline=True)
    assert (kept.priority, kept.expires_at) == (9, None)


def test_an_illegal_move_is_explained_by_the_public_id(database: Database, tmp_path: Path) -> None:
    batch = steering.cancel(database, make_batch(database, "batch_xyz1"), tmp_path)
    with pytest.raises(steering.SteeringError, match="batch_xyz1 is cancelled"):
        steering.pause(database, batch)


def test_a_cancel_that_comes_too_late_says_how_the_batch_stands(database: Database, tmp_path: Path) -> None:
    batch = make_batch(database, "batch_xyz1")
    steering.set_urgency(database, batch, expires_at=1.0)
    with database.write() as connection:
        assert transitions.expire_batches(connection, 2.0) == [batch.id]
    for status, said in (("finalizing", "is ending already"), ("expired", "has ended")):
        with pytest.raises(steering.SteeringError) as refused:
            steering.cancel(database, batch, tmp_path)
        assert refused.value.message == f"batch_xyz1 is {status}: it {said} and cannot be cancelled"
        assert refused.value.code == "illegal_move"
        steering.finish_cancel(database, batch, tmp_path)


def test_a_cancel_ends_its_own_batch_and_leaves_others_to_whoever_sweeps(database: Database, tmp_path: Path) -> None:
    other, mine = make_batch(database, "batch_1"), make_batch(database, "batch_2")
    steering.begin_cancel(database, other)
    with database.write() as connection:
        assert transitions.end_requests(connection, other.id, database.now()) == 3
    assert steering.cancel(database, mine, tmp_path).status is BatchStatus.CANCELLED
    assert steering.find_batch(database, "batch_1").status is BatchStatus.CANCELLING


def test_the_files_of_a_long_cancelled_batch_are_left_to_whoever_sweeps(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who cancels does not wait while a million lines are written."""
    monkeypatch.setattr(steering, "CANCEL_LINES", 2)
    files_dir = tmp_path / "files"
    assert steering.cancel(database, make_batch(database, "batch_1"), files_dir).status is BatchStatus.CANCELLING
    assert not files_dir.exists()
    (published,) = finalize_batches(database, files_dir, database.now())
    assert steering.find_batch(database, "batch_1").id == published


def test_a_retry_runs_failed_lines_and_says_so_when_there_are_none(database: Database, tmp_path: Path) -> None:
    batch = make_batch(database, "batch_1")
    with pytest.raises(steering.SteeringError, match="batch_1 is in_progress: only what has ended can be retried"):
        steering.retry_failed(database, batch)
    cancelled = steering.cancel(database, batch, tmp_path)
    assert steering.retry_failed(database, cancelled) == 3
    with database.read() as connection:
        assert transitions.first_retriable_line(connection, batch.id) == transitions.NO_LINE


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("30m", 1800), ("1.5h", 5400), ("7d", 604800), ("2 w", 1209600)]
)
def test_lengths_of_time(text: str, seconds: float) -> None:
    assert steering.parse_age(text) == seconds


def test_deadlines() -> None:
    now = datetime(2026, 11, 30, 12, tzinfo=UTC).timestamp()
    assert steering.parse_deadline("2h", now) == now + 7200
    assert steering.parse_deadline("none", now) is None
    assert steering.parse_deadline("2026-12-01", now) == now + 12 * 3600
    assert steering.parse_deadline("2026-11-30T14:00+01:00", now) == now + 3600
    assert steering.parse_deadline("999d", now) == now + 999 * 86_400


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("soon", "is no time"),
        ("", "is no time"),
        ("-3h", "is no time"),
        ("nan", "is no time"),
        ("inf", "is no time"),
        ("1e9d", "is no time"),
        ("0s", "has passed"),
        ("2026-11-30T11:00", "has passed"),
        ("0001-01-01", "has passed"),
        ("1000d", "exceeds 999d; write a shorter time"),
        ("99999999d", "exceeds 999d; write a shorter time"),
        ("9" * 400 + "w", "exceeds 999d; write a shorter time"),
        ("2029-12-24", "is more than 999 days ahead"),
        ("9999-12-31T23:59:59-23:59", "is more than 999 days ahead"),
    ],
)
def test_a_deadline_that_no_calendar_could_show_is_refused(text: str, said: str) -> None:
    now = datetime(2026, 11, 30, 12, tzinfo=UTC).timestamp()
    with pytest.raises(steering.SteeringError, match=f"^--deadline .*{said}") as caught:
        steering.parse_deadline(text, now)
    assert caught.value.code == "invalid_time"
    assert len(caught.value.message) < 200


def test_an_age_has_a_bound_too() -> None:
    assert steering.parse_age("5200w") == 5200 * 7 * 86_400
    with pytest.raises(steering.SteeringError, match="--older-than 36501d exceeds 36500d"):
        steering.parse_age("36501d")


def test_time_left_goes_by_tokens(database: Database) -> None:
    """Half the requests have ended, with 40 tokens each; 20 tokens a second flow now: 10 more take 20 s."""
    batch = replace(make_batch(database, "batch_1"), total_requests=20)
    rates = steering.Rates()
    assert rates.left_s is None
    rates.add(100.0, replace(batch, completed_requests=5, prompt_tokens=50, completion_tokens=150))
    assert rates.left_s is None
    rates.add(110.0, replace(batch, completed_requests=10, prompt_tokens=100, completion_tokens=300))
    assert rates.requests_per_s == 0.5
    assert rates.tokens_per_s == 15.0
    assert rates.left_s == 20.0


def test_no_time_left_is_told_before_enough_has_been_seen(database: Database) -> None:
    """One group of short answers at the start says little of the rest: the time left would jump between guesses."""
    batch = replace(make_batch(database, "batch_1"), total_requests=1000)
    rates = steering.Rates()
    for now, done in ((100.0, 0), (101.0, 64), (109.0, 128)):  # many, in a short time
        rates.add(now, replace(batch, completed_requests=done, completion_tokens=10 * done))
        assert rates.left_s is None
    slow = steering.Rates()
    for now, done in ((100.0, 0), (125.0, 9)):  # long, and little
        slow.add(now, replace(batch, completed_requests=done, completion_tokens=10 * done))
        assert slow.left_s is None
    rates.add(112.0, replace(batch, completed_requests=192, completion_tokens=1920))
    assert rates.left_s is not None


def test_a_set_of_lines_knows_what_it_was_given() -> None:
    lines = steering._Lines()
    for line in (1, 8, 1, 100_000, 7):
        lines.add(line)
    assert len(lines) == 4
    assert [line for line in (1, 2, 7, 8, 9, 99_999, 100_000, 10**7) if line in lines] == [1, 7, 8, 100_000]
