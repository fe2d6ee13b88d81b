"""The moves of batches and requests: what each does, what none may do, and what holds whatever the order."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from sqlalchemy import select

from storage import queries, transitions
from storage.database import Database
from storage.models import REQUESTS, BatchStatus, RequestStatus, WorkerStatus
from storage.transitions import (
    AttemptRecord,
    ClaimedRequest,
    IllegalMove,
    NewBatch,
    NewFile,
    NewRequest,
    NewWorker,
    RefusedLine,
    RequestOutcome,
)

NOW = 1_000_000.0
LEASE_S = 60.0
BATCH = NewBatch(public_id="batch_1", fingerprint="f" * 64, endpoint="/v1/chat/completions", model="tiny")


def make_batch(database: Database, lines: int, *, start: bool = True, batch: NewBatch = BATCH) -> tuple[int, list[int]]:
    """A batch of that many lines; returns its id and its requests' ids in line order."""
    with database.write() as connection:
        batch_id = transitions.create_batch(connection, batch, NOW)
        transitions.add_requests(
            connection, batch_id, [NewRequest(line, f"c{line}", f'{{"n":{line}}}') for line in range(1, lines + 1)]
        )
        if start:
            transitions.start_batch(connection, batch_id, NOW)
    with database.read() as connection:
        ids = connection.execute(
            select(REQUESTS.c.id).where(REQUESTS.c.batch_id == batch_id).order_by(REQUESTS.c.line)
        ).scalars()
        return batch_id, list(ids)


def claim(database: Database, ids: list[int], worker: str = "w1", now: float = NOW) -> list[ClaimedRequest]:
    """Sweep, queue what is pending, and claim."""
    with database.write() as connection:
        transitions.expire_leases(connection, now)
        transitions.queue_requests(connection, ids, now)
        return transitions.claim_requests(connection, ids, worker=worker, lease_s=LEASE_S, now=now)


def outcome(claimed: ClaimedRequest, status: RequestStatus = RequestStatus.COMPLETED) -> RequestOutcome:
    completed = status is RequestStatus.COMPLETED
    return RequestOutcome(
        request_id=claimed.id,
        batch_id=claimed.batch_id,
        attempt_number=claimed.attempt,
        status=status,
        status_code=200 if completed else 500,
        response=f'{{"by":{claimed.attempt}}}' if completed else None,
        error_code=None if completed else "prompt_too_long",
        error_message=None if completed else "too long",
        record=AttemptRecord(device="cpu", prompt_tokens=10, cached_tokens=4, completion_tokens=3, total_s=0.5),
    )


def record(database: Database, outcomes: list[RequestOutcome], worker: str = "w1", now: float = NOW) -> list[int]:
    with database.write() as connection:
        return transitions.record_outcomes(connection, outcomes, worker=worker, now=now)


def publish(database: Database, batch_id: int, now: float = NOW) -> bool:
    with database.write() as connection:
        transitions.finish_batches(connection, now)
        return transitions.publish_batch(connection, batch_id, now, output=None, errors=None)


def get_batch(database: Database, batch_id: int) -> queries.BatchRow:
    with database.read() as connection:
        batch = queries.find_batch_by_id(connection, batch_id)
    assert batch is not None
    return batch


def statuses(database: Database, batch_id: int) -> dict[RequestStatus, int]:
    with database.read() as connection:
        return queries.count_requests(connection, batch_id)


def attempts(database: Database, request_id: int) -> list[tuple[int, str, str]]:
    with database.read() as connection:
        return [(row["number"], row["outcome"], row["worker"]) for row in queries.attempts_of(connection, request_id)]


# --- submitting --------------------------------------------------------------------------------------------------


def test_a_request_goes_from_its_line_to_its_result(database: Database) -> None:
    """The whole life once, with every column that the audit relies on."""
    batch_id, ids = make_batch(database, 2)
    with database.write() as connection:
        assert transitions.queue_requests(connection, ids, NOW + 1) == ids
    first, second = claim(database, ids, now=NOW + 2)
    assert (first.line, first.custom_id, first.attempt, first.body) == (1, "c1", 1, '{"n":1}')
    assert (first.model, first.endpoint, first.queued_at, first.claimed_at) == (
        "tiny",
        "/v1/chat/completions",
        NOW + 1,
        NOW + 2,
    )
    done = [outcome(first), outcome(second, RequestStatus.FAILED)]
    assert record(database, done, now=NOW + 3) == ids

    batch = get_batch(database, batch_id)
    assert (batch.total_requests, batch.completed_requests, batch.failed_requests) == (2, 1, 1)
    assert (batch.prompt_tokens, batch.cached_tokens, batch.completion_tokens) == (20, 8, 6)
    results = list(queries.results_in_order(database, batch_id))
    assert [(r.line, r.status, r.status_code, r.response, r.error_code) for r in results] == [
        (1, RequestStatus.COMPLETED, 200, '{"by":1}', None),
        (2, RequestStatus.FAILED, 500, None, "prompt_too_long"),
    ]
    with database.read() as connection:
        (attempt,) = queries.attempts_of(connection, ids[0])
    assert attempt["outcome"] == "completed"
    assert (attempt["queued_at"], attempt["claimed_at"], attempt["finished_at"]) == (NOW + 1, NOW + 2, NOW + 3)
    assert (attempt["device"], attempt["prompt_tokens"], attempt["total_s"]) == ("cpu", 10, 0.5)
    with database.write() as connection:
        assert transitions.finish_batches(connection, NOW + 4) == [batch_id]
    batch = get_batch(database, batch_id)
    assert (batch.status, batch.finalizing_at, batch.completed_at) == (BatchStatus.FINALIZING, NOW + 4, None)
    output = NewFile("file-1", "out.jsonl", "batch_1.jsonl", bytes=10, lines=1)
    with database.write() as connection:
        assert transitions.publish_batch(connection, batch_id, NOW + 5, output=output, errors=None)
        assert not transitions.publish_batch(connection, batch_id, NOW + 6, output=output, errors=None)
    batch = get_batch(database, batch_id)
    assert (batch.status, batch.completed_at, batch.error_file_id) == (BatchStatus.COMPLETED, NOW + 5, None)
    assert batch.output_file_id is not None
    with database.read() as connection:
        file = queries.find_file(connection, batch.output_file_id)
    assert file is not None
    assert (file.public_id, file.purpose, file.tenant, file.lines) == ("file-1", "batch_output", "default", 1)


def test_an_interrupted_submission_can_be_repeated(database: Database) -> None:
    """The same command again goes on where it was cut; lines that are there stay and are not counted twice."""
    batch_id, _ = make_batch(database, 3, start=False)
    with database.write() as connection:
        again = [NewRequest(line, f"other{line}", "{}") for line in (2, 3, 4)]
        assert transitions.add_requests(connection, batch_id, again) == 1
        assert transitions.add_requests(connection, batch_id, again) == 0
        refused = [RefusedLine(4, "x", "invalid_json", "broken"), RefusedLine(5, "y", "invalid_json", "broken")]
        assert transitions.refuse_lines(connection, batch_id, refused, NOW) == 1
        assert transitions.refuse_lines(connection, batch_id, refused, NOW) == 0
        assert queries.last_submitted_line(connection, batch_id) == 5
    batch = get_batch(database, batch_id)
    assert (batch.total_requests, batch.failed_requests) == (5, 1)
    assert list(queries.submitted_custom_ids(database, batch_id)) == ["c1", "c2", "c3", "other4", "y"]


def test_lines_beyond_one_statement_are_all_written(database: Database) -> None:
    batch_id, ids = make_batch(database, 2 * transitions.STATEMENT_ROWS + 1)
    assert len(ids) == 4001
    assert get_batch(database, batch_id).total_requests == 4001
    assert len(claim(database, ids)) == 4001


def test_a_refused_line_has_its_result_at_once(database: Database) -> None:
    batch_id, _ = make_batch(database, 0, start=False)
    with database.write() as connection:
        line = RefusedLine(7, None, "invalid_value", "max_tokens -1 is below 1", param="body.max_tokens")
        transitions.refuse_lines(connection, batch_id, [line], NOW)
    (result,) = queries.results_in_order(database, batch_id)
    assert (result.line, result.custom_id, result.status, result.status_code) == (7, None, RequestStatus.FAILED, 400)
    assert result.error_code == "invalid_value"
    assert result.response == (
        '{"error":{"message":"max_tokens -1 is below 1","type":"invalid_request_error",'
        '"param":"body.max_tokens","code":"invalid_value"}}'
    )


def test_a_batch_without_a_line_to_run_waits_only_for_its_files(database: Database) -> None:
    batch_id, _ = make_batch(database, 0, start=False)
    with database.write() as connection:
        transitions.refuse_lines(connection, batch_id, [RefusedLine(1, None, "invalid_json", "broken")], NOW)
        transitions.start_batch(connection, batch_id, NOW + 1)
    batch = get_batch(database, batch_id)
    assert (batch.status, batch.in_progress_at, batch.completed_at) == (BatchStatus.FINALIZING, NOW + 1, None)


def test_characters_that_no_database_stores_do_not_stop_a_submission(database: Database) -> None:
    """JSON can spell NUL and half of a surrogate pair; Postgres takes neither, SQLite's driver not the latter."""
    batch_id, _ = make_batch(database, 0, start=False)
    spelled = '{"prompt": "NUL \\u0000, half \\ud83d, whole \\ud83d\\ude00"}'  # escapes in a body are kept as they are
    with database.write() as connection:
        lines = [
            NewRequest(1, "a\x00b", spelled),
            NewRequest(2, "half \ud83d", "{}"),
            NewRequest(3, "ok \U0001f600", "{}"),
        ]
        transitions.add_requests(connection, batch_id, lines)
        transitions.refuse_lines(connection, batch_id, [RefusedLine(4, None, "x", "value 'a\x00\udc00' is bad")], NOW)
        prefix_id = transitions.save_prefix(connection, "half \ud83d")
        assert queries.prefix_texts(connection, [prefix_id]) == {prefix_id: "half \ufffd"}
        transitions.start_batch(connection, batch_id, NOW)
    with database.read() as connection:
        ids = [request.id for request in queries.next_pending(connection, batch_id, 3)]
    claimed = claim(database, ids)
    assert claimed[0].body == spelled
    assert claimed[0].custom_id in ("a\x00b", "a\ufffdb")  # SQLite can, Postgres cannot
    assert [c.custom_id for c in claimed[1:]] == ["half \ufffd", "ok \U0001f600"]


def test_a_prefix_is_kept_once(database: Database) -> None:
    with database.write() as connection:
        first = transitions.save_prefix(connection, "the handbook")
        assert transitions.save_prefix(connection, "the handbook") == first
        second = transitions.save_prefix(connection, "another")
        assert queries.prefix_texts(connection, {first, second}) == {first: "the handbook", second: "another"}


def test_prompts_with_one_prefix_wait_together(database: Database) -> None:
    batch_id, _ = make_batch(database, 0, start=False)
    with database.write() as connection:
        a, b = transitions.save_prefix(connection, "a"), transitions.save_prefix(connection, "b")
        lines = [NewRequest(line, None, "{}", prefix_id=(a, b)[line % 2]) for line in range(1, 7)]
        transitions.add_requests(connection, batch_id, lines)
        transitions.start_batch(connection, batch_id, NOW)
    with database.read() as connection:
        assert [request.line for request in queries.next_pending(connection, batch_id, 10)] == [2, 4, 6, 1, 3, 5]
        assert [request.line for request in queries.next_pending(connection, batch_id, 4)] == [2, 4, 6, 1]


# --- illegal moves -----------------------------------------------------------------------------------------------


def test_lines_cannot_be_added_to_a_batch_that_has_started(database: Database) -> None:
    """Its total is promised by then."""
    batch_id, _ = make_batch(database, 1)
    with pytest.raises(IllegalMove, match="in_progress"), database.write() as connection:
        transitions.add_requests(connection, batch_id, [NewRequest(9, None, "{}")])
    assert get_batch(database, batch_id).total_requests == 1
    assert statuses(database, batch_id) == {RequestStatus.PENDING: 1}


def test_a_batch_starts_once(database: Database) -> None:
    batch_id, _ = make_batch(database, 1)
    with (
        pytest.raises(IllegalMove, match="is in_progress: it cannot become in_progress"),
        database.write() as connection,
    ):
        transitions.start_batch(connection, batch_id, NOW)


def test_a_batch_fails_only_while_it_is_read(database: Database) -> None:
    batch_id, _ = make_batch(database, 1, start=False)
    with database.write() as connection:
        transitions.fail_batch(connection, batch_id, "empty_input", "no lines", NOW)
    batch = get_batch(database, batch_id)
    assert (batch.status, batch.error_code, batch.failed_at) == (BatchStatus.FAILED, "empty_input", NOW)
    with pytest.raises(IllegalMove), database.write() as connection:
        transitions.fail_batch(connection, batch_id, "again", "again", NOW)


def test_a_worker_cannot_record_anything_but_completed_and_failed(database: Database) -> None:
    _, ids = make_batch(database, 1)
    (held,) = claim(database, ids)
    with pytest.raises(IllegalMove, match="cancelled"):
        record(database, [replace(outcome(held), status=RequestStatus.CANCELLED)])


def test_a_batch_that_is_not_there_is_named(database: Database) -> None:
    with pytest.raises(IllegalMove, match="no batch 4711"), database.write() as connection:
        transitions.start_batch(connection, 4711, NOW)


# --- claiming ----------------------------------------------------------------------------------------------------


def test_a_message_that_comes_twice_is_claimed_once(database: Database) -> None:
    _, ids = make_batch(database, 3)
    assert len(claim(database, ids, "w1")) == 3
    assert claim(database, ids, "w2") == []
    assert claim(database, ids, "w1") == []


def test_what_is_final_is_not_claimed_again(database: Database) -> None:
    _, ids = make_batch(database, 2)
    record(database, [outcome(claimed) for claimed in claim(database, ids)])
    assert claim(database, ids, "w2", now=NOW + 10 * LEASE_S) == []


def test_requests_of_a_batch_that_is_still_read_are_not_claimed(database: Database) -> None:
    _, ids = make_batch(database, 1, start=False)
    assert claim(database, ids) == []


def test_unknown_ids_are_passed_over(database: Database) -> None:
    """Anybody who reaches Redis can send any number."""
    _, ids = make_batch(database, 1)
    assert [claimed.id for claimed in claim(database, [999_999, *ids])] == ids


def test_an_expired_lease_passes_to_the_next_worker_with_its_story(database: Database) -> None:
    _, ids = make_batch(database, 1)
    claim(database, ids, "dead")
    assert claim(database, ids, "w2", now=NOW + LEASE_S - 1) == []
    (claimed,) = claim(database, ids, "w2", now=NOW + LEASE_S + 1)
    assert claimed.attempt == 2
    assert attempts(database, ids[0]) == [(1, "abandoned", "dead")]


def test_two_workers_that_claim_at_the_same_moment_share_nothing(database: Database) -> None:
    _, ids = make_batch(database, 200)
    got: dict[str, list[int]] = {}
    barrier = threading.Barrier(4)

    def run(worker: str) -> None:
        barrier.wait()
        got[worker] = [claimed.id for claimed in claim(database, ids, worker)]

    threads = [threading.Thread(target=run, args=(f"w{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(request_id for part in got.values() for request_id in part) == ids


def test_a_renewed_lease_is_kept(database: Database) -> None:
    _, ids = make_batch(database, 2)
    held = {claimed.id: claimed.attempt for claimed in claim(database, ids, "w1")}
    with database.write() as connection:
        assert transitions.renew_leases(connection, held, worker="w1", lease_s=LEASE_S, now=NOW + 50) == set()
    assert claim(database, ids, "w2", now=NOW + 100) == []


def test_renewing_tells_what_was_lost(database: Database) -> None:
    """The worker then stops computing what somebody else computes now."""
    _, ids = make_batch(database, 2)
    held = {claimed.id: claimed.attempt for claimed in claim(database, ids, "w1")}
    with database.write() as connection:
        transitions.renew_leases(connection, {ids[1]: 1}, worker="w1", lease_s=LEASE_S, now=NOW + 50)
    claim(database, ids[:1], "w2", now=NOW + LEASE_S + 1)
    with database.write() as connection:
        lost = transitions.renew_leases(connection, held, worker="w1", lease_s=LEASE_S, now=NOW + LEASE_S + 2)
    assert lost == {ids[0]}


# --- the fence ---------------------------------------------------------------------------------------------------


def test_a_zombie_cannot_overwrite_its_successor(database: Database) -> None:
    """A worker that was stopped past its lease wakes up and reports; the answer on record stays."""
    batch_id, ids = make_batch(database, 1)
    (old,) = claim(database, ids, "zombie")
    (new,) = claim(database, ids, "w2", now=NOW + LEASE_S + 1)
    assert record(database, [outcome(old)], "zombie") == []
    assert record(database, [outcome(new)], "w2") == ids
    assert record(database, [outcome(old)], "zombie") == []
    (result,) = queries.results_in_order(database, batch_id)
    assert result.response == '{"by":2}'
    assert attempts(database, ids[0]) == [(1, "abandoned", "zombie"), (2, "completed", "w2")]
    assert get_batch(database, batch_id).completed_requests == 1


def test_a_worker_that_lost_and_regained_a_request_reports_only_for_its_last_attempt(database: Database) -> None:
    _, ids = make_batch(database, 1)
    (old,) = claim(database, ids, "w1")
    (new,) = claim(database, ids, "w1", now=NOW + LEASE_S + 1)
    assert record(database, [outcome(old)], "w1") == []
    assert record(database, [outcome(new)], "w1") == ids


def test_recording_twice_changes_nothing(database: Database) -> None:
    """The commit went through and its reply was lost: the worker says it again."""
    batch_id, ids = make_batch(database, 2)
    outcomes = [outcome(claimed) for claimed in claim(database, ids)]
    assert record(database, [outcomes[0], outcomes[0]]) == ids[:1]
    assert record(database, outcomes) == ids[1:]
    assert record(database, outcomes) == []
    batch = get_batch(database, batch_id)
    assert (batch.completed_requests, batch.prompt_tokens) == (2, 20)


def test_a_lease_that_ran_out_unnoticed_still_lets_its_owner_report(database: Database) -> None:
    """Nobody else has taken it, so the work is not thrown away."""
    _, ids = make_batch(database, 1)
    (held,) = claim(database, ids)
    assert record(database, [outcome(held)], now=NOW + 10 * LEASE_S) == ids


# --- handing back ------------------------------------------------------------------------------------------------


def test_a_draining_worker_hands_its_requests_back(database: Database) -> None:
    batch_id, ids = make_batch(database, 2)
    held = {claimed.id: claimed.attempt for claimed in claim(database, ids, "w1")}
    with database.write() as connection:
        assert transitions.release_requests(connection, held, worker="w1", now=NOW + 1) == ids
        assert transitions.release_requests(connection, held, worker="w1", now=NOW + 1) == []
    assert statuses(database, batch_id) == {RequestStatus.PENDING: 2}
    assert attempts(database, ids[0]) == [(1, "released", "w1")]
    assert [claimed.attempt for claimed in claim(database, ids, "w2")] == [2, 2]


def test_a_dead_workers_requests_come_back(database: Database) -> None:
    batch_id, ids = make_batch(database, 3)
    claim(database, ids, "dead")
    with database.write() as connection:
        assert transitions.expire_leases(connection, NOW + LEASE_S - 1) == []
        assert len(transitions.expire_leases(connection, NOW + LEASE_S + 1, limit=2)) == 2
        assert len(transitions.expire_leases(connection, NOW + LEASE_S + 1)) == 1
    assert statuses(database, batch_id) == {RequestStatus.PENDING: 3}
    assert attempts(database, ids[0]) == [(1, "abandoned", "dead")]


def test_publishing_that_failed_is_undone(database: Database) -> None:
    batch_id, ids = make_batch(database, 3)
    with database.write() as connection:
        assert transitions.queue_requests(connection, ids, NOW) == ids
        assert transitions.queue_requests(connection, ids, NOW) == []
        claimed = transitions.claim_requests(connection, ids[:1], worker="w1", lease_s=LEASE_S, now=NOW)
        assert len(claimed) == 1
        assert transitions.unqueue_requests(connection, ids) == 2  # not the one that a worker has
    assert statuses(database, batch_id) == {RequestStatus.PENDING: 2, RequestStatus.RUNNING: 1}


# --- cancelling --------------------------------------------------------------------------------------------------


def test_cancelling_keeps_what_is_done_and_ends_the_rest(database: Database) -> None:
    batch_id, ids = make_batch(database, 5)
    done, running = claim(database, ids[:2])
    record(database, [outcome(done)])
    with database.write() as connection:
        transitions.queue_requests(connection, ids[2:3], NOW)
        assert not transitions.end_requests(connection, batch_id, NOW)
        assert transitions.cancel_batch(connection, batch_id, NOW + 1)
        assert not transitions.cancel_batch(connection, batch_id, NOW + 1)
    assert claim(database, ids, "w2") == []
    with database.write() as connection:
        assert transitions.queue_requests(connection, ids, NOW + 1) == []
        assert transitions.end_requests(connection, batch_id, NOW + 1, limit=2) == 2
        assert transitions.end_requests(connection, batch_id, NOW + 1) == 1
        assert transitions.end_requests(connection, batch_id, NOW + 1) == 0
    with pytest.raises(IllegalMove, match="open requests"), database.write() as connection:
        transitions.publish_batch(connection, batch_id, NOW + 1, output=None, errors=None)
    assert record(database, [outcome(running)]) == [running.id]
    publish(database, batch_id, NOW + 2)
    batch = get_batch(database, batch_id)
    assert (batch.status, batch.completed_requests, batch.cancelled_at) == (BatchStatus.CANCELLED, 2, NOW + 2)
    results = list(queries.results_in_order(database, batch_id))
    assert [result.error_code for result in results] == [None, None, *["batch_cancelled"] * 3]
    assert {result.status_code for result in results[2:]} == {None}


def test_a_finished_batch_cannot_be_cancelled(database: Database) -> None:
    batch_id, _ = make_batch(database, 0)
    publish(database, batch_id)
    with pytest.raises(IllegalMove, match="is completed"), database.write() as connection:
        transitions.cancel_batch(connection, batch_id, NOW)


def test_a_batch_with_open_requests_is_not_finished(database: Database) -> None:
    batch_id, ids = make_batch(database, 2)
    record(database, [outcome(claimed) for claimed in claim(database, ids[:1])])
    with database.write() as connection:
        assert transitions.finish_batches(connection, NOW) == []
    assert get_batch(database, batch_id).status is BatchStatus.IN_PROGRESS


# --- workers -----------------------------------------------------------------------------------------------------


def test_a_worker_is_live_from_ready_until_it_stops_or_falls_silent(database: Database) -> None:
    with database.write() as connection:
        transitions.register_worker(connection, NewWorker("cpu@host-1", "host", 1, "tiny", max_batch_size=8), NOW)
        assert queries.live_workers(connection, NOW) == []
        transitions.update_worker(connection, "cpu@host-1", NOW + 1, status=WorkerStatus.READY, max_batch_size=16)
        (worker,) = queries.live_workers(connection, NOW + 2, model="tiny")
        assert (worker.max_batch_size, worker.ready_at, worker.last_seen_at) == (16, NOW + 1, NOW + 1)
        assert queries.live_workers(connection, NOW + 2, model="other") == []
        assert queries.live_workers(connection, NOW + 200) == []
        transitions.update_worker(connection, "cpu@host-1", NOW + 200)
        assert len(queries.live_workers(connection, NOW + 201)) == 1
        transitions.retire_worker(connection, "cpu@host-1", NOW + 202, status=WorkerStatus.FAILED, detail="no memory")
        assert queries.live_workers(connection, NOW + 203) == []
        found = queries.find_worker(connection, "cpu@host-1")
        assert found is not None
        assert (found.status, found.detail, found.stopped_at) == (WorkerStatus.FAILED, "no memory", NOW + 202)
        transitions.register_worker(connection, NewWorker("cpu@host-1", "host", 1, "tiny"), NOW + 300)
        (again,) = queries.list_workers(connection, since=NOW)
        assert (again.status, again.stopped_at) == (WorkerStatus.STARTING, None)
