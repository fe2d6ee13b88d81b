"""Reads: what they return, and that none walks through a table that grows with the work done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import event

from storage import queries, transitions
from storage.database import Database
from storage.direct import run_sqlite
from storage.models import BatchStatus, RequestStatus
from storage.queries import FailureCount, Percentiles, Throughput
from storage.transitions import AttemptRecord, NewBatch, NewRequest, RequestOutcome

NOW = 1_000_000.0


def make_batch(database: Database, lines: int, *, public_id: str = "batch_1", fingerprint: str = "f") -> int:
    with database.write() as connection:
        batch_id = transitions.create_batch(
            connection, NewBatch(public_id, fingerprint, "/v1/completions", "tiny"), NOW
        )
        transitions.add_requests(
            connection, batch_id, [NewRequest(line, f"c{line}", "{}") for line in range(1, lines + 1)]
        )
        transitions.start_batch(connection, batch_id, NOW)
    return batch_id


def run(database: Database, batch_id: int, records: dict[int, AttemptRecord | str], now: float = NOW) -> None:
    """Record lines: completed with that record, or failed with that error code."""
    with database.write() as connection:
        ids = {request.line: request.id for request in queries.next_pending(connection, batch_id, 10_000)}
        wanted = [ids[line] for line in records]
        transitions.queue_requests(connection, wanted, now)
        held = transitions.claim_requests(connection, wanted, worker="w", lease_s=60, now=now)
        outcomes = []
        for claimed in held:
            record = records[claimed.line]
            if isinstance(record, str):
                outcomes.append(
                    RequestOutcome(
                        claimed.id,
                        batch_id,
                        claimed.attempt,
                        RequestStatus.FAILED,
                        400,
                        None,
                        error_code=record,
                        error_message=f"line {claimed.line} failed",
                    )
                )
            else:
                outcomes.append(
                    RequestOutcome(
                        claimed.id, batch_id, claimed.attempt, RequestStatus.COMPLETED, 200, "{}", record=record
                    )
                )
        order = {line: place for place, line in enumerate(records)}
        outcomes.sort(key=lambda outcome: order[next(c.line for c in held if c.id == outcome.request_id)])
        transitions.record_outcomes(connection, outcomes, worker="w", now=now)


def test_a_batch_is_found_by_its_public_id_and_the_newest_by_its_fingerprint(database: Database) -> None:
    first = make_batch(database, 1, public_id="batch_a", fingerprint="same")
    second = make_batch(database, 2, public_id="batch_b", fingerprint="same")
    with database.read() as connection:
        found = queries.find_batch(connection, "batch_a")
        assert found is not None
        assert (found.id, found.status, found.total_requests) == (first, BatchStatus.IN_PROGRESS, 1)
        newest = queries.find_batch_by_fingerprint(connection, "same")
        assert newest is not None
        assert newest.id == second
        assert queries.find_batch(connection, "batch_c") is None
        assert queries.find_batch_by_fingerprint(connection, "same", tenant="another") is None
        assert [batch.public_id for batch in queries.list_batches(connection)] == ["batch_b", "batch_a"]
        assert [batch.id for batch in queries.list_batches(connection, before_id=second)] == [first]


def test_results_come_in_input_order_and_as_they_landed(database: Database) -> None:
    batch_id = make_batch(database, 5)
    run(database, batch_id, {4: AttemptRecord(), 2: AttemptRecord()})
    run(database, batch_id, {5: "prompt_too_long", 1: AttemptRecord()})
    assert [r.line for r in queries.results_in_order(database, batch_id)] == [1, 2, 4, 5]
    assert [r.line for r in queries.results_in_order(database, batch_id, page_rows=1)] == [1, 2, 4, 5]
    with database.read() as connection:
        landed = queries.results_after(connection, batch_id, 0, limit=3)
        assert [r.line for r in landed] == [4, 2, 5]
        assert [r.line for r in queries.results_after(connection, batch_id, landed[-1].result_id)] == [1]
        assert queries.results_after(connection, batch_id, landed[-1].result_id + 1) == []


def test_failures_are_counted_by_code_with_an_example_each(database: Database) -> None:
    batch_id = make_batch(database, 6)
    run(database, batch_id, {1: "rare", 2: "common", 3: "common", 4: AttemptRecord(), 6: "common"})
    with database.read() as connection:
        assert queries.failures_by_code(connection, batch_id) == [
            FailureCount("common", 3, 2, "line 2 failed"),
            FailureCount("rare", 1, 1, "line 1 failed"),
        ]
        assert queries.failures_by_code(connection, batch_id + 1) == []


def test_percentiles_are_exact_and_leave_out_what_was_not_measured(database: Database) -> None:
    batch_id = make_batch(database, 100)
    run(
        database,
        batch_id,
        {line: AttemptRecord(total_s=float(101 - line), queue_s=1.5 if line == 7 else None) for line in range(1, 101)},
    )
    with database.read() as connection:
        assert queries.latency_percentiles(connection, batch_id) == {
            "queue_s": Percentiles(1, 1.5, 1.5, 1.5, 1.5, 1.5),
            "total_s": Percentiles(100, 50.0, 90.0, 95.0, 99.0, 100.0),
        }
        assert queries.latency_percentiles(connection, batch_id + 1) == {}


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_a_percentile_is_the_smallest_value_that_covers_its_share(values: list[float]) -> None:
    found = queries._percentiles(sorted(values))
    for percent, value in ((50, found.p50), (90, found.p90), (95, found.p95), (99, found.p99)):
        assert value in values
        assert sum(v <= value for v in values) * 100 >= percent * len(values)
        assert sum(v < value for v in values) * 100 < percent * len(values)


def test_throughput_counts_what_was_completed_between_two_instants(database: Database) -> None:
    batch_id = make_batch(database, 3)
    record = AttemptRecord(prompt_tokens=10, completion_tokens=2)
    run(database, batch_id, {1: record}, now=NOW + 1)
    run(database, batch_id, {2: record, 3: "failed"}, now=NOW + 5)
    with database.read() as connection:
        assert queries.throughput(connection, batch_id, NOW, NOW + 5) == Throughput(1, 10, 2, 5.0)
        assert queries.throughput(connection, batch_id, NOW, NOW + 6) == Throughput(2, 20, 4, 6.0)


def test_a_dead_workers_requests_can_be_taken_from_it_at_once(database: Database) -> None:
    """Its supervisor saw it die: no need to wait for the leases."""
    batch_id = make_batch(database, 3)
    with database.write() as connection:
        ids = [request.id for request in queries.next_pending(connection, batch_id, 3)]
        transitions.queue_requests(connection, ids, NOW)
        transitions.claim_requests(connection, ids[:2], worker="dead", lease_s=60, now=NOW)
        transitions.claim_requests(connection, ids[2:], worker="alive", lease_s=60, now=NOW)
        assert sorted(transitions.abandon_worker(connection, "dead", NOW)) == ids[:2]
        assert queries.count_requests(connection, batch_id) == {RequestStatus.PENDING: 2, RequestStatus.RUNNING: 1}
        assert [row["outcome"] for row in queries.attempts_of(connection, ids[0])] == ["abandoned"]


# --- what they cost ----------------------------------------------------------------------------------------------


@contextmanager
def statements_of(database: Database) -> Iterator[dict[str, Any]]:
    """The statements that run meanwhile, each with its last parameters."""
    seen: dict[str, Any] = {}

    def note(_connection: Any, _cursor: Any, statement: str, parameters: Any, _context: Any, many: bool) -> None:
        if not many and statement.startswith(("SELECT", "UPDATE", "DELETE")):
            seen[statement] = parameters

    def run_noted(connection: Any, statement: str, parameters: Any = ()) -> Any:
        note(None, None, statement, tuple(parameters), None, False)
        return run_sqlite(connection, statement, parameters)

    event.listen(database.engine, "before_cursor_execute", note)
    try:
        with patch("storage.direct.run_sqlite", run_noted):
            yield seen
    finally:
        event.remove(database.engine, "before_cursor_execute", note)


def test_no_statement_of_everyday_work_walks_through_a_table(sqlite_database: Database) -> None:
    """At a million rows such a walk takes seconds, and the cost of a request must not grow with the job."""
    database = sqlite_database
    with statements_of(database) as seen:
        batch_id = make_batch(database, 3)
        with database.write() as connection:
            ids = [request.id for request in queries.next_pending(connection, batch_id, 3)]
            transitions.queue_requests(connection, ids, NOW)
            transitions.unqueue_requests(connection, ids[2:])
            held = transitions.claim_requests(connection, ids, worker="w", lease_s=60, now=NOW)
            fence = {claimed.id: claimed.attempt for claimed in held}
            transitions.renew_leases(connection, fence, worker="w", lease_s=60, now=NOW)
            transitions.release_requests(connection, {ids[0]: 1}, worker="w", now=NOW)
            transitions.expire_leases(connection, NOW + 100, limit=1)
            transitions.abandon_worker(connection, "w", NOW)
        run(database, batch_id, {1: AttemptRecord(), 2: "failed"})
        with database.write() as connection:
            transitions.finish_batches(connection, NOW)
            transitions.cancel_batch(connection, batch_id, NOW)
            transitions.end_requests(connection, batch_id, NOW)
            transitions.publish_batch(connection, batch_id, NOW, output=None, errors=None)
            transitions.retry_batch(connection, batch_id, NOW)
            transitions.pause_batch(connection, batch_id, NOW)
            transitions.resume_batch(connection, batch_id, NOW)
            transitions.prioritise_batch(connection, batch_id, priority=3)
            transitions.expire_batches(connection, NOW)
            transitions.answer_duplicates(connection, batch_id, NOW)
            transitions.end_interactive(connection, [batch_id], NOW)
        with database.read() as connection:
            queries.batches_at_work(connection, NOW)
            queries.queued_counts(connection)
            queries.waiting_tenants(connection)
            queries.has_pending(connection, batch_id, NOW)
            queries.has_waiting(connection, batch_id)
            queries.has_stalled_duplicates(connection, batch_id)
            queries.isolated_requests(connection, ids)
            queries.queued_before(connection, NOW, 10)
            queries.overdue_leases(connection, NOW)
            queries.unfinished_batches(connection)
            queries.has_finishable_batch(connection)
            queries.find_batch_by_id(connection, batch_id)
            queries.last_submitted_line(connection, batch_id)
            queries.results_after(connection, batch_id, 0)
        list(queries.results_in_order(database, batch_id))
    assert len(seen) > 20
    in_hand = ("ix_requests_queued", "ix_requests_running", "ix_requests_pending")  # as small as the work in hand
    with database.read() as connection:
        for statement, parameters in seen.items():
            for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters):
                step = row[3]
                if step.startswith("SCAN") and not step.startswith("SCAN json_each"):
                    assert any(index in step for index in in_hand), (step, statement)


@pytest.mark.parametrize(
    ("status", "indexes"),
    [
        (RequestStatus.PENDING, ["ix_requests_pending", "ix_requests_delayed", "ix_requests_same"]),
        (RequestStatus.QUEUED, ["ix_requests_queued"]),
        (RequestStatus.RUNNING, ["ix_requests_running"]),
    ],
)
def test_looking_for_open_requests_reads_only_those(
    sqlite_database: Database, status: RequestStatus, indexes: list[str]
) -> None:
    """Finishing a batch asks this each time it looks; by the batch's own index it would read the whole batch."""
    with statements_of(sqlite_database) as seen, sqlite_database.read() as connection:
        transitions.has_open_requests(connection, 1)
        steps = [
            row[3]
            for statement in seen
            if f"status = '{status.value}'" in statement
            for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", seen[statement])
        ]
    assert [step.split(" INDEX ")[1].split()[0] for step in steps] == indexes
