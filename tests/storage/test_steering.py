"""What operators do to a running job, what deadlines, deaths and twins do to it: each move with what it leaves."""

from __future__ import annotations

import pytest
from sqlalchemy import select

from storage import queries, transitions
from storage.database import Database
from storage.models import REQUESTS, BatchStatus, RequestStatus
from storage.purge import purge_rows, purge_text
from storage.retries import Death, RetryLimits, Sentence, judge
from storage.transitions import (
    AttemptRecord,
    ClaimedRequest,
    IllegalMove,
    NewBatch,
    NewFile,
    NewRequest,
    RequestOutcome,
)

NOW = 1_000_000.0
LIMITS = RetryLimits(max_attempts=3, backoff_s=2.0)


def make_batch(database: Database, requests: list[NewRequest] | int, name: str = "batch_1") -> tuple[int, list[int]]:
    if isinstance(requests, int):
        requests = [NewRequest(line, f"c{line}", "{}") for line in range(1, requests + 1)]
    with database.write() as connection:
        batch_id = transitions.create_batch(connection, NewBatch(name, name, "/v1/completions", "tiny"), NOW)
        transitions.add_requests(connection, batch_id, requests)
        transitions.start_batch(connection, batch_id, NOW)
        ids = connection.execute(
            select(REQUESTS.c.id).where(REQUESTS.c.batch_id == batch_id).order_by(REQUESTS.c.line)
        ).scalars()
        return batch_id, list(ids)


def claim(database: Database, ids: list[int], worker: str = "w", now: float = NOW) -> list[ClaimedRequest]:
    with database.write() as connection:
        transitions.queue_requests(connection, ids, now)
        return transitions.claim_requests(connection, ids, worker=worker, lease_s=60, now=now)


def finish(database: Database, held: list[ClaimedRequest], code: str | None = None, worker: str = "w") -> list[int]:
    with database.write() as connection:
        return transitions.record_outcomes(connection, [ending(each, code) for each in held], worker=worker, now=NOW)


def ending(held: ClaimedRequest, code: str | None = None) -> RequestOutcome:
    status = RequestStatus.COMPLETED if code is None else RequestStatus.FAILED
    return RequestOutcome(
        held.id,
        held.batch_id,
        held.attempt,
        status,
        200 if code is None else 500,
        f'{{"answer":{held.line}}}' if code is None else None,
        code,
        record=AttemptRecord(prompt_tokens=10),
    )


def die(database: Database, worker: str = "w", now: float = NOW, exit_code: int = -11) -> None:
    with database.write() as connection:
        transitions.abandon_worker(connection, worker, now, exit_code=exit_code, limits=LIMITS)


def publish(database: Database, batch_id: int) -> None:
    with database.write() as connection:
        transitions.finish_batches(connection, NOW)
        transitions.publish_batch(connection, batch_id, NOW, output=None, errors=None)


def get(database: Database, batch_id: int) -> queries.BatchRow:
    with database.read() as connection:
        batch = queries.find_batch_by_id(connection, batch_id)
    assert batch is not None
    return batch


def counts(database: Database, batch_id: int) -> dict[RequestStatus, int]:
    with database.read() as connection:
        return queries.count_requests(connection, batch_id)


# --- steering ----------------------------------------------------------------------------------------------------


def test_a_paused_batch_is_neither_queued_nor_claimed_and_its_messages_are_void(database: Database) -> None:
    batch_id, ids = make_batch(database, 3)
    with database.write() as connection:
        transitions.queue_requests(connection, ids[:2], NOW)
        assert transitions.pause_batch(connection, batch_id, NOW + 1)
        assert not transitions.pause_batch(connection, batch_id, NOW + 2)
    assert get(database, batch_id).paused_at == NOW + 1
    assert claim(database, ids) == []
    assert counts(database, batch_id) == {RequestStatus.PENDING: 3}
    with database.write() as connection:
        assert transitions.resume_batch(connection, batch_id, NOW + 3)
        assert not transitions.resume_batch(connection, batch_id, NOW + 3)
    assert len(claim(database, ids)) == 3


def test_a_new_priority_takes_back_what_waits_in_the_queue(database: Database) -> None:
    """Else the new order would begin only after the old window."""
    batch_id, ids = make_batch(database, 2)
    other, other_ids = make_batch(database, 2, "batch_2")
    with database.write() as connection:
        transitions.queue_requests(connection, [*ids, *other_ids], NOW)
        transitions.prioritise_batch(connection, batch_id, priority=7, expires_at=NOW + 9)
        assert transitions.claim_requests(connection, other_ids, worker="w", lease_s=60, now=NOW) == []
    assert counts(database, other) == {RequestStatus.PENDING: 2}
    assert (get(database, batch_id).priority, get(database, batch_id).expires_at) == (7, NOW + 9)


def test_a_deadline_keeps_what_is_finished_and_expires_the_rest(database: Database) -> None:
    batch_id, ids = make_batch(database, 3)
    done, running = claim(database, ids[:2])
    finish(database, [done])
    with database.write() as connection:
        transitions.prioritise_batch(connection, batch_id, expires_at=NOW + 5)
        assert transitions.expire_batches(connection, NOW + 4) == []
        assert transitions.expire_batches(connection, NOW + 5) == [batch_id]
        assert transitions.end_requests(connection, batch_id, NOW + 5) == 1
    assert get(database, batch_id).status is BatchStatus.FINALIZING
    finish(database, [running])  # it may still report
    publish(database, batch_id)
    batch = get(database, batch_id)
    assert (batch.status, batch.completed_requests, batch.expired_at) == (BatchStatus.EXPIRED, 2, NOW + 5)
    assert [row.error_code for row in queries.results_in_order(database, batch_id)] == [None, None, "batch_expired"]


def test_failed_lines_run_again_and_their_new_results_replace_the_old(database: Database) -> None:
    batch_id, ids = make_batch(database, 3)
    held = claim(database, ids)
    finish(database, held[:1])
    finish(database, held[1:], "engine_failed")
    with pytest.raises(IllegalMove, match="only what has ended"), database.write() as connection:
        transitions.retry_batch(connection, batch_id, NOW)
    publish(database, batch_id)
    with database.write() as connection:
        assert transitions.retry_batch(connection, batch_id, NOW + 1) == 2
    batch = get(database, batch_id)
    assert (batch.status, batch.failed_requests, batch.completed_at) == (BatchStatus.IN_PROGRESS, 0, None)
    assert len(list(queries.results_in_order(database, batch_id))) == 3  # the old ones stand until then
    finish(database, claim(database, ids, now=NOW + 2))
    publish(database, batch_id)
    rows = list(queries.results_in_order(database, batch_id))
    assert [row.status_code for row in rows] == [200, 200, 200]
    with database.read() as connection:
        assert [row["outcome"] for row in queries.attempts_of(connection, ids[1])] == ["failed", "completed"]
        # Who follows results by cursor sees the new ones as new.
        assert {row.line for row in queries.results_after(connection, batch_id, rows[0].result_id)} == {2, 3}


def test_a_long_retry_goes_in_parts_and_ends_when_the_last_part_has_run(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first part brought back may be answered before the second is looked at."""
    monkeypatch.setattr(transitions, "RETRY_LINES", 2)
    batch_id, ids = make_batch(database, 5)
    held = claim(database, ids)
    finish(database, held[:1])
    finish(database, held[1:], "engine_failed")
    publish(database, batch_id)
    with database.write() as connection:
        assert transitions.retry_batch(connection, batch_id, NOW + 1) == 2  # lines 2 and 3
    finish(database, claim(database, ids, now=NOW + 2))
    with database.write() as connection:
        assert transitions.finish_batches(connection, NOW + 3) == []
    assert get(database, batch_id).failed_requests == 2
    with database.write() as connection:
        assert transitions.continue_retry(connection, batch_id) == 2
        assert transitions.continue_retry(connection, batch_id) is None
    finish(database, claim(database, ids, now=NOW + 4))
    publish(database, batch_id)
    assert get(database, batch_id).completed_requests == 5
    with database.write() as connection:
        assert transitions.retry_batch(connection, batch_id, NOW + 5) == 0
    assert get(database, batch_id).status is BatchStatus.COMPLETED


def test_a_failure_that_may_pass_is_tried_after_growing_pauses_and_then_given_up(database: Database) -> None:
    batch_id, ids = make_batch(database, 1)
    for attempt, pause_s in ((1, 2.0), (2, 4.0)):
        (held,) = claim(database, ids, now=NOW + 100 * attempt)
        with database.write() as connection:
            again = transitions.fail_requests(
                connection, [ending(held, "oom")], worker="w", now=NOW + 100 * attempt, limits=LIMITS
            )
        assert again == ids
        assert claim(database, ids, now=NOW + 100 * attempt + pause_s - 0.1) == []
        assert list(queries.results_in_order(database, batch_id)) == []
    (held,) = claim(database, ids, now=NOW + 300)
    with database.write() as connection:
        again = transitions.fail_requests(connection, [ending(held, "oom")], worker="w", now=NOW + 300, limits=LIMITS)
    assert again == []
    assert [row.error_code for row in queries.results_in_order(database, batch_id)] == ["oom"]


# --- poison ------------------------------------------------------------------------------------------------------


def test_suspicion_shrinks_the_group_until_deaths_alone_convict() -> None:
    first = Death("w", NOW, batch_mates=127, exit_code=-11)
    assert judge([first], None, limits=LIMITS) == Sentence(False)  # one death is no ground for suspicion
    second = [first, Death("w", NOW, batch_mates=120, exit_code=-11)]
    assert judge(second, None, limits=LIMITS) == Sentence(False, isolation=16)
    third = [*second, Death("w", NOW, batch_mates=15)]
    assert judge(third, 16, limits=LIMITS) == Sentence(False, isolation=2)
    crash = Death("w", NOW, batch_mates=0, exit_code=-11)
    alone = [*third, Death("w", NOW, batch_mates=1), crash, crash]
    assert judge(alone, 1, limits=LIMITS) == Sentence(False, isolation=1, pause_s=4.0)
    assert judge([*alone, crash], 1, limits=LIMITS) == Sentence(True)


def test_an_end_from_outside_is_half_the_evidence_of_a_crash() -> None:
    """A hand, the kernel, the power: a request that was met alone by chance must not be taken for a killer soon."""
    for exit_code in (-9, None):
        killed = Death("w", NOW, batch_mates=0, exit_code=exit_code)
        assert judge([killed] * 2, None, limits=LIMITS) == Sentence(False)
        assert judge([killed] * 3, None, limits=LIMITS).isolation == 1
        assert not judge([killed] * 5, 1, limits=LIMITS).is_poison
        assert judge([killed] * 6, 1, limits=LIMITS).is_poison


def test_the_request_that_kills_workers_is_found_and_all_others_finish(database: Database) -> None:
    batch_id, ids = make_batch(database, 32)
    culprit, now, deaths = ids[17], NOW, 0
    while True:
        with database.read() as connection:
            open_ids = list(
                connection.execute(
                    select(REQUESTS.c.id).where(REQUESTS.c.status == "pending").order_by(REQUESTS.c.id)
                ).scalars()
            )
            groups = {row.id: row.isolation for row in connection.execute(select(REQUESTS))}
        if not open_ids:
            break
        now += 100
        size = min((groups[each] or 32) for each in open_ids)
        held = claim(database, open_ids[:size], f"w{deaths}", now)
        if any(each.id == culprit for each in held):
            die(database, f"w{deaths}", now)
            deaths += 1
        else:
            finish(database, held, worker=f"w{deaths}")
        assert deaths < 10
    assert deaths == 6  # twice among 32, once among 4, then three times alone
    (poison,) = (row for row in queries.results_in_order(database, batch_id) if row.status_code != 200)
    assert (poison.request_id, poison.error_code) == (culprit, "poison_prompt")
    assert poison.error_message is not None
    for worker in ("w3", "w4", "w5"):
        assert f"{worker} at 1970-01-12T14:0" in poison.error_message
    assert "exit code -11" in poison.error_message
    assert get(database, batch_id).completed_requests == 31
    with database.read() as connection:
        tries = queries.attempts_of(connection, culprit)
    assert [(row["batch_mates"], row["exit_code"]) for row in tries] == [
        *((31, -11), (31, -11), (3, -11)),
        *((0, -11), (0, -11), (0, -11)),
    ]


def test_an_old_message_does_not_bring_suspects_into_larger_company(database: Database) -> None:
    _, ids = make_batch(database, 10)
    for _ in range(2):
        claim(database, ids[:8])
        die(database)
    with database.read() as connection:
        assert queries.isolated_requests(connection, ids) == []  # not queued
    with database.write() as connection:
        transitions.queue_requests(connection, ids[:1], NOW + 1)
        suspect = transitions.claim_requests(
            connection, ids[:1], worker="busy", lease_s=60, now=NOW + 1, but_isolated=True
        )
        assert suspect == [], "it would run beside what that worker has in hand"
        transitions.unqueue_requests(connection, ids[:1])
    held = claim(database, ids, now=NOW + 1)  # all ten at once, as an old message might
    assert [each.id for each in held] == ids[8:]
    assert [each.id for each in claim(database, ids[:1], now=NOW + 2)] == ids[:1]


# --- one answer for one question ---------------------------------------------------------------------------------


def test_identical_requests_are_computed_once_and_answered_each(database: Database) -> None:
    lines = [NewRequest(1, "a", "{}"), NewRequest(2, "b", "{}", same_as=1), NewRequest(3, "c", "{}", same_as=1)]
    batch_id, ids = make_batch(database, lines)
    held = claim(database, ids)
    assert [each.id for each in held] == ids[:1]
    finish(database, held)
    batch = get(database, batch_id)
    assert (batch.completed_requests, batch.prompt_tokens) == (3, 10)
    assert {row.response for row in queries.results_in_order(database, batch_id)} == {'{"answer":1}'}
    with database.read() as connection:
        (attempt,) = queries.attempts_of(connection, ids[1])
    assert (attempt["served_from"], attempt["source_request_id"]) == ("duplicate", ids[0])


def test_answers_of_an_earlier_batch_are_carried_over_when_text_equals_text(database: Database) -> None:
    _, ids = make_batch(database, [NewRequest(1, "a", '{"p":1}'), NewRequest(2, "b", '{"p":2}')])
    finish(database, claim(database, ids))
    with database.write() as connection:
        batch_id = transitions.create_batch(connection, NewBatch("batch_2", "g", "/v1/completions", "tiny"), NOW)
        lines = [
            NewRequest(1, "a", '{"p":1}', source_id=ids[0]),
            NewRequest(2, "b", '{"p":"changed"}', source_id=ids[1]),
            NewRequest(3, "c", '{"p":1}', source_id=999_999),
        ]
        transitions.add_requests(connection, batch_id, lines)
        assert transitions.carry_answers(connection, batch_id, lines, NOW) == 1
    batch = get(database, batch_id)
    assert (batch.completed_requests, batch.prompt_tokens, batch.total_requests) == (1, 0, 3)
    assert [(row.line, row.response) for row in queries.results_in_order(database, batch_id)] == [(1, '{"answer":1}')]


def test_an_answer_is_kept_under_its_key_and_found_by_it(database: Database) -> None:
    _, ids = make_batch(database, 1)
    (held,) = claim(database, ids)
    with database.write() as connection:
        kept = RequestOutcome(
            held.id, held.batch_id, held.attempt, RequestStatus.COMPLETED, 200, '{"x":1}', answer_key="k" * 64
        )
        transitions.record_outcomes(connection, [kept], worker="w", now=NOW)
        found = queries.stored_answers(connection, ["k" * 64, "other"])
    assert {key: (answer.request_id, answer.response) for key, answer in found.items()} == {
        "k" * 64: (ids[0], '{"x":1}')
    }


# --- retention ---------------------------------------------------------------------------------------------------


def test_text_goes_and_the_numbers_of_the_audit_stay_until_the_rows_go_too(database: Database) -> None:
    batch_id, ids = make_batch(database, 2)
    finish(database, claim(database, ids))
    with database.write() as connection:
        transitions.finish_batches(connection, NOW)
        file = NewFile("file-1", "out.jsonl", "out.jsonl", bytes=3, lines=1)
        transitions.publish_batch(connection, batch_id, NOW, output=file, errors=None)
    assert purge_text(database, ended_before=NOW, now=NOW).batches == 0
    purged = purge_text(database, ended_before=NOW + 1, now=NOW + 2)
    assert (purged.batches, purged.requests, purged.paths) == (1, 2, ("out.jsonl",))
    assert purge_text(database, ended_before=NOW + 1, now=NOW + 2).batches == 0
    assert {row.response for row in queries.results_in_order(database, batch_id)} == {None}
    with database.read() as connection:
        assert queries.attempts_of(connection, ids[0])[0]["prompt_tokens"] == 10
    assert purge_rows(database, ended_before=NOW + 1, now=NOW + 3).requests == 2
    batch = get(database, batch_id)
    assert (batch.completed_requests, batch.rows_purged_at, batch.output_file_id) == (2, NOW + 3, None)
    assert counts(database, batch_id) == {}
