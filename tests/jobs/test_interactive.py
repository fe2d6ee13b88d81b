"""Requests that somebody waits for: asked, answered, given up, sent again."""

from __future__ import annotations

import json

import pytest
import redis
from celery import Celery
from sqlalchemy import select

from jobs import interactive, steering
from jobs.interactive import Answer, Asked
from jobs.protocol import Endpoint, parse_body
from jobs.queue import InteractiveQueue, make_app, queue_depth, waiting_ids
from jobs.settings import QueueSettings, Settings
from jobs.sweep import sweep
from storage import queries, transitions
from storage.database import Database
from storage.errors import InvalidRequest
from storage.models import REQUESTS, BatchStatus, Door, RequestStatus
from storage.purge import purge_rows, purge_text
from storage.queries import BatchRow, ResultRow
from storage.transitions import AttemptRecord, RequestOutcome

MODEL = "tiny"
BODY = parse_body(Endpoint.CHAT, json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}))


def ask(database: Database, app: Celery, **options: object) -> Asked:
    values: dict[str, object] = {
        "endpoint": Endpoint.CHAT,
        "model": MODEL,
        "tenant": "default",
        "door": Door.HTTP,
        "timeout_s": 60.0,
    }
    asked = interactive.write(database, BODY, **values | options)  # type: ignore[arg-type]
    if asked.is_new:
        interactive.send(database, app, [asked])
    return asked


def batch_of(database: Database, asked: Asked) -> BatchRow:
    with database.read() as connection:
        found = queries.find_batch_by_id(connection, asked.batch_id)
    assert found is not None
    return found


def result_of(database: Database, asked: Asked) -> ResultRow | None:
    with database.read() as connection:
        return next(iter(queries.results_of(connection, [asked.request_id])), None)


def status_of(database: Database, asked: Asked) -> str:
    with database.read() as connection:
        return str(connection.execute(select(REQUESTS.c.status).where(REQUESTS.c.id == asked.request_id)).scalar_one())


def claim(database: Database, asked: Asked, worker: str = "w1") -> int:
    """Returns the attempt."""
    with database.write() as connection:
        (claimed,) = transitions.claim_requests(
            connection, [asked.request_id], worker=worker, lease_s=60.0, now=database.now()
        )
    assert claimed.is_interactive
    return claimed.attempt


def record(database: Database, asked: Asked, attempt: int = 1, status_code: int = 200, worker: str = "w1") -> list[int]:
    is_good = status_code == 200
    outcome = RequestOutcome(
        request_id=asked.request_id,
        batch_id=asked.batch_id,
        attempt_number=attempt,
        status=RequestStatus.COMPLETED if is_good else RequestStatus.FAILED,
        status_code=status_code,
        response='{"choices": []}' if is_good else '{"error": {}}',
        error_code=None if is_good else "engine_failed",
        record=AttemptRecord(device="gpu1"),
    )
    with database.write() as connection:
        return transitions.record_outcomes(connection, [outcome], worker=worker, now=database.now())


def test_a_request_is_on_its_queue_at_once_and_its_answer_ends_its_batch(database: Database, app: Celery) -> None:
    """No sweep has to look after it, and no files are made."""
    asked = ask(database, app, custom_id="mine", reply_to="somewhere")
    assert queue_depth(app, MODEL).interactive == 1
    assert waiting_ids(app, [MODEL]) == {asked.request_id}
    before = batch_of(database, asked)
    assert (before.status, before.is_interactive, before.total_requests) == (BatchStatus.IN_PROGRESS, True, 1)
    assert before.expires_at is not None
    assert result_of(database, asked) is None
    assert record(database, asked, claim(database, asked)) == [asked.request_id]
    result = result_of(database, asked)
    (answer,) = interactive.answers_of(database, [asked.request_id])
    assert answer == Answer(asked.request_id, 200, '{"choices": []}', None)
    assert result is not None
    assert (result.status_code, result.response, result.custom_id) == (200, '{"choices": []}', "mine")
    after = batch_of(database, asked)
    assert (after.status, after.completed_requests, after.output_file_id) == (BatchStatus.COMPLETED, 1, None)
    assert after.completed_at is not None
    with database.read() as connection:
        assert queries.device_of(connection, asked.request_id) == "gpu1"


@pytest.mark.parametrize("is_running", [False, True])
@pytest.mark.parametrize("has_expired", [False, True])
def test_a_request_that_is_given_up_ends_at_once_whether_it_waits_or_runs(
    database: Database, app: Celery, is_running: bool, has_expired: bool
) -> None:
    asked = ask(database, app)
    if is_running:
        claim(database, asked)
    assert interactive.give_up(database, app, asked.request_id, has_expired=has_expired)
    assert not interactive.give_up(database, app, asked.request_id)
    batch, result = batch_of(database, asked), result_of(database, asked)
    assert result is not None
    assert result.status_code is None
    if has_expired:
        assert (batch.status, result.status, result.error_code) == (
            BatchStatus.EXPIRED,
            RequestStatus.EXPIRED,
            "request_timed_out",
        )
    else:
        assert (batch.status, result.status, result.error_code) == (
            BatchStatus.CANCELLED,
            RequestStatus.CANCELLED,
            "request_cancelled",
        )
    # Whoever ran it comes too late, and the message that is still in the queue is void.
    assert record(database, asked) == []
    with database.write() as connection:
        assert not transitions.claim_requests(
            connection, [asked.request_id], worker="w2", lease_s=60.0, now=database.now()
        )


def test_a_caller_that_died_leaves_nothing_for_ever(database: Database, app: Celery, settings: Settings) -> None:
    waiting, running = ask(database, app, timeout_s=10.0), ask(database, app, timeout_s=10.0)
    attempt = claim(database, running)
    sweep(database, app, settings, database.now() + 11.0)
    assert (batch_of(database, waiting).status, status_of(database, waiting)) == (BatchStatus.EXPIRED, "expired")
    assert batch_of(database, running).status is not BatchStatus.EXPIRED  # until its worker is done with it, or dead
    record(database, running, attempt)
    assert batch_of(database, running).status is BatchStatus.EXPIRED
    assert not list(settings.files_dir.glob("*"))


def test_the_queue_may_be_away_when_a_request_is_asked(database: Database, app: Celery) -> None:
    """It waits in the database, and whoever waits for its answer sends it when the queue is back."""
    away = make_app(QueueSettings(url="redis://127.0.0.1:1/0"))
    asked = ask(database, away)
    assert status_of(database, asked) == "pending"
    assert interactive.send_again(database, away, [asked.request_id]) == 0
    assert interactive.send_again(database, app, [asked.request_id]) == 1
    assert status_of(database, asked) == "queued"
    assert waiting_ids(app, [MODEL]) == {asked.request_id}


def test_a_message_that_redis_lost_is_sent_again_and_one_that_waits_is_not(
    database: Database, app: Celery, queue_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interactive, "LOST_AFTER_S", 0.0)
    asked = ask(database, app)
    assert interactive.send_again(database, app, [asked.request_id]) == 0
    queue_client.flushall()
    assert interactive.send_again(database, app, [asked.request_id]) == 1
    claim(database, asked)
    queue_client.flushall()
    assert interactive.send_again(database, app, [asked.request_id]) == 0


def test_the_same_key_gives_the_same_request_as_long_as_its_answer_is_worth_repeating(
    database: Database, app: Celery
) -> None:
    first = ask(database, app, idempotency_key="k")
    again = ask(database, app, idempotency_key="k")
    assert (again.request_id, again.is_new) == (first.request_id, False)
    assert queue_depth(app, MODEL).interactive == 1
    assert ask(database, app, idempotency_key="k", tenant="another").request_id != first.request_id
    record(database, first, claim(database, first))
    assert ask(database, app, idempotency_key="k").request_id == first.request_id
    with pytest.raises(InvalidRequest) as raised:
        ask(database, app, idempotency_key="k", model="other")
    assert raised.value.code == "idempotency_key_reused"


@pytest.mark.parametrize("end", ["given up", "failed on our side"])
def test_a_key_whose_request_came_to_nothing_begins_anew(database: Database, app: Celery, end: str) -> None:
    first = ask(database, app, idempotency_key="k")
    if end == "given up":
        interactive.give_up(database, app, first.request_id)
    else:
        record(database, first, claim(database, first), status_code=500)
    second = ask(database, app, idempotency_key="k")
    assert second.is_new
    assert second.request_id != first.request_id


def test_a_check_that_refuses_leaves_nothing_behind(database: Database, app: Celery) -> None:
    def refuse(_connection: object) -> None:
        raise InvalidRequest("no", code="no")

    with pytest.raises(InvalidRequest):
        ask(database, app, check=refuse)
    with database.read() as connection:
        assert queries.unfinished_batches(connection) == []
    assert queue_depth(app, MODEL).interactive == 0


def test_a_worker_takes_the_oldest_entry_and_can_put_it_back(app: Celery, database: Database, queue_url: str) -> None:
    first, second = ask(database, app), ask(database, app)
    line = InteractiveQueue(QueueSettings(url=queue_url), MODEL)
    assert line.take(1.0) == [first.request_id]
    line.put_back([first.request_id])
    assert [line.take(1.0), line.take(1.0)] == [[first.request_id], [second.request_id]]
    line.close()


def test_single_requests_stay_out_of_lists_and_go_with_the_others(database: Database, app: Celery) -> None:
    """Millions of them must not be in the way, and what people wrote is kept no longer than in a batch."""
    answered, open_ = ask(database, app, idempotency_key="k"), ask(database, app)
    record(database, answered, claim(database, answered))
    assert steering.list_batches(database) == []
    with database.read() as connection:
        assert queries.batches_at_work(connection, database.now()) == []  # its request is on its way
    later = database.now() + 1.0
    purged = purge_text(database, ended_before=later, now=later)
    assert (purged.batches, purged.requests) == (1, 1)
    result = result_of(database, answered)
    assert result is not None
    assert (result.status_code, result.response) == (200, None)
    assert purge_text(database, ended_before=later, now=later).batches == 0
    assert purge_rows(database, ended_before=later, now=later).requests == 1
    with database.read() as connection:
        assert queries.find_batch_by_id(connection, answered.batch_id) is None
        assert queries.find_batch_by_id(connection, open_.batch_id) is not None
    assert ask(database, app, idempotency_key="k").is_new


def test_a_dead_workers_request_is_sent_again_with_its_deadline(database: Database, app: Celery) -> None:
    asked = ask(database, app)
    claim(database, asked)
    with database.write() as connection:
        assert transitions.abandon_worker(connection, "w1", database.now(), exit_code=-9) == [asked.request_id]
    with database.read() as connection:
        assert [batch.id for batch in queries.batches_at_work(connection, database.now())] == [asked.batch_id]
    assert interactive.send_again(database, app, [asked.request_id]) == 1
    assert claim(database, asked, "w2") == 2
