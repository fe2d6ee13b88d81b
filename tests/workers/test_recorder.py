"""The recorder's groups: what is written together, and for what nothing waits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import workers.recorder as recorder_module
from storage import queries, transitions
from storage.database import Database
from storage.models import RequestStatus
from storage.transitions import AttemptRecord, NewBatch, NewRequest, RequestOutcome
from workers.recorder import Recorder


@pytest.fixture
def outcomes(sqlite_database: Database) -> list[RequestOutcome]:
    """Of four requests that the worker `w` holds."""
    database, now = sqlite_database, sqlite_database.now()
    with database.write() as connection:
        batch_id = transitions.create_batch(connection, NewBatch("batch_1", "f", "/v1/completions", "tiny"), now)
        lines = [NewRequest(line, f"c{line}", '{"prompt":"Tell me"}') for line in range(1, 5)]
        transitions.add_requests(connection, batch_id, lines)
        transitions.start_batch(connection, batch_id, now)
        ids = [request.id for request in queries.next_pending(connection, batch_id, 10)]
        transitions.queue_requests(connection, ids, now)
        transitions.claim_requests(connection, ids, worker="w", lease_s=60.0, now=now)
    return [
        RequestOutcome(
            request_id=request_id,
            batch_id=batch_id,
            attempt_number=1,
            status=RequestStatus.COMPLETED,
            status_code=200,
            response="{}",
            record=AttemptRecord(),
        )
        for request_id in ids
    ]


@pytest.fixture
def recorder(sqlite_database: Database, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """It would wait for company for ever."""
    monkeypatch.setattr(recorder_module, "GROUP_WAIT_S", 1e6)
    with Recorder(sqlite_database, "w") as recorder:
        yield recorder


def written_at(database: Database, outcomes: list[RequestOutcome]) -> list[float]:
    with database.read() as connection:
        return [queries.attempts_of(connection, outcome.request_id)[0]["finished_at"] for outcome in outcomes]


def test_what_nobody_can_join_waits_for_no_company(
    sqlite_database: Database, recorder: Recorder, outcomes: list[RequestOutcome]
) -> None:
    """The last answers of a job are committed at once; those before them wait for the ones still in hand."""
    recorder.expect(3)
    first = recorder.record(outcomes[:1])
    second = recorder.record(outcomes[1:3])
    assert first.result(60) | second.result(60) == {outcome.request_id for outcome in outcomes[:3]}
    assert len(set(written_at(sqlite_database, outcomes[:3]))) == 1
    recorder.expect(2)
    recorder.expect(-1)  # one was given up
    assert recorder.record(outcomes[3:]).result(60) == {outcomes[3].request_id}


def test_what_comes_while_others_make_answers_is_written_in_one_transaction(
    sqlite_database: Database, recorder: Recorder, outcomes: list[RequestOutcome]
) -> None:
    with recorder.turn:
        recorded = [recorder.record([outcome]) for outcome in outcomes]
    assert [future.result(60) for future in recorded] == [{outcome.request_id} for outcome in outcomes]
    assert len(set(written_at(sqlite_database, outcomes))) == 1


def test_what_somebody_waits_for_does_not_wait_for_its_turn(recorder: Recorder, outcomes: list[RequestOutcome]) -> None:
    with recorder.turn:
        assert recorder.record(outcomes[:1], is_urgent=True).result(60) == {outcomes[0].request_id}


def test_what_somebody_waits_for_is_written_by_who_hands_it_over(
    recorder: Recorder, outcomes: list[RequestOutcome]
) -> None:
    for outcome in outcomes:
        assert recorder.record([outcome], is_urgent=True).result(0) == {outcome.request_id}


def test_what_somebody_waits_for_takes_along_what_waits_for_its_turn(
    recorder: Recorder, outcomes: list[RequestOutcome]
) -> None:
    with recorder.turn:
        bulk = recorder.record(outcomes[1:])
        assert recorder.record(outcomes[:1], is_urgent=True).result(60) == {outcomes[0].request_id}
        assert bulk.result(60) == {outcome.request_id for outcome in outcomes[1:]}
