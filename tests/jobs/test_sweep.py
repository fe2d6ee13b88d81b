"""The periodic pass: what it brings back, what it ends, and what it leaves alone."""

from __future__ import annotations

import pytest
import redis
from celery import Celery

from jobs.finalize import Finalizer, finalize_batches
from jobs.queue import make_app, own_queue_name, queue_depth, used_places, waiting_ids
from jobs.settings import QueueSettings, Settings
from jobs.sweep import LOST_AFTER_S, Swept, sweep
from storage import queries, transitions
from storage.database import Database
from storage.models import BatchStatus, RequestStatus, WorkerStatus
from storage.transitions import AttemptRecord, NewBatch, NewRequest, NewWorker, RequestOutcome
from tests.conftest import wait_until

NOW = 1_000_000.0
LATER = NOW + LOST_AFTER_S + 1


def make_batch(database: Database, lines: int) -> int:
    with database.write() as connection:
        batch_id = transitions.create_batch(connection, NewBatch("batch_1", "f", "/v1/completions", "tiny"), NOW)
        transitions.add_requests(connection, batch_id, [NewRequest(line, None, "{}") for line in range(1, lines + 1)])
        transitions.start_batch(connection, batch_id, NOW)
    return batch_id


def counts(database: Database, batch_id: int) -> dict[RequestStatus, int]:
    with database.read() as connection:
        return queries.count_requests(connection, batch_id)


def status(database: Database, batch_id: int) -> BatchStatus:
    with database.read() as connection:
        batch = queries.find_batch_by_id(connection, batch_id)
    assert batch is not None
    return batch.status


def run_all(database: Database, app: Celery) -> None:
    """What a worker would do with all that waits."""
    ids = waiting_ids(app, ["tiny"]) or set()
    with database.write() as connection:
        held = transitions.claim_requests(connection, ids, worker="w", lease_s=60, now=NOW)
        outcomes = [
            RequestOutcome(c.id, c.batch_id, c.attempt, RequestStatus.COMPLETED, 200, "{}", record=AttemptRecord())
            for c in held
        ]
        transitions.record_outcomes(connection, outcomes, worker="w", now=NOW)


def test_a_pass_fills_the_queue_and_ends_what_is_done(database: Database, app: Celery, settings: Settings) -> None:
    batch_id = make_batch(database, 5)
    assert sweep(database, app, settings, NOW) == Swept(queued=5)
    run_all(database, app)
    assert sweep(database, app, settings, NOW) == Swept(finished_batches=1)
    assert status(database, batch_id) is BatchStatus.COMPLETED
    assert sweep(database, app, settings, NOW) == Swept()


def test_a_dead_workers_requests_are_sent_again(database: Database, app: Celery, settings: Settings) -> None:
    batch_id = make_batch(database, 5)
    sweep(database, app, settings, NOW)
    with database.write() as connection:
        ids = waiting_ids(app, ["tiny"])
        assert ids is not None
        transitions.claim_requests(connection, ids, worker="dead", lease_s=60, now=NOW)
    assert sweep(database, app, settings, NOW + 59) == Swept()
    assert sweep(database, app, settings, NOW + 61) == Swept(expired_leases=5, queued=5)
    assert counts(database, batch_id) == {RequestStatus.QUEUED: 5}


def make_prefixed_batch(database: Database, lines: int) -> None:
    with database.write() as connection:
        batch_id = transitions.create_batch(connection, NewBatch("batch_1", "f", "/v1/completions", "tiny"), NOW)
        prefix_id = transitions.save_prefix(connection, "a long document")
        requests = [NewRequest(line, None, "{}", prefix_id=prefix_id) for line in range(1, lines + 1)]
        transitions.add_requests(connection, batch_id, requests)
        transitions.start_batch(connection, batch_id, NOW)


def queue_one_prefix(database: Database, app: Celery, settings: Settings, *devices: str) -> None:
    """200 requests with one prefix are queued, with a worker on each device."""
    make_prefixed_batch(database, 200)
    for device in devices:
        be_ready(database, f"{device}@host-1", device)
    sweep(database, app, settings, NOW)


def be_ready(database: Database, name: str, device: str) -> None:
    with database.write() as connection:
        new = NewWorker(name, "host", 1, "tiny", device=device, max_batch_size=64)
        transitions.register_worker(connection, new, NOW)
        transitions.update_worker(connection, name, NOW, status=WorkerStatus.READY)


def die(database: Database, name: str) -> None:
    with database.write() as connection:
        transitions.retire_worker(connection, name, NOW, status=WorkerStatus.FAILED)


def test_what_waits_for_a_dead_worker_goes_to_others_at_the_next_pass(
    database: Database, app: Celery, settings: Settings
) -> None:
    queue_one_prefix(database, app, settings, "gpu0", "gpu1", "gpu2")
    (place,) = used_places(app, ["tiny"])["tiny"]
    die(database, f"{place}-1")
    swept = sweep(database, app, settings, NOW + 1)
    assert swept.taken_back == swept.queued > 0
    (another,) = used_places(app, ["tiny"])["tiny"]
    assert another != place
    assert sweep(database, app, settings, NOW + 2) == Swept()
    assert waiting_ids(app, ["tiny"]) == set(range(1, 201))


def test_a_successor_takes_over_what_waits_for_its_place(
    database: Database, app: Celery, settings: Settings, queue_client: redis.Redis
) -> None:
    queue_one_prefix(database, app, settings, "gpu0", "gpu1")
    (place,) = used_places(app, ["tiny"])["tiny"]
    waiting = queue_client.llen(own_queue_name("tiny", place))
    die(database, f"{place}-1")
    be_ready(database, f"{place}-2", place.partition("@")[0])
    assert sweep(database, app, settings, NOW + 1) == Swept()
    assert queue_client.llen(own_queue_name("tiny", place)) == waiting > 0


def test_what_lies_unseen_in_an_own_queue_is_found_by_its_age(
    database: Database, app: Celery, settings: Settings, queue_client: redis.Redis
) -> None:
    """A chunk that was sent there while the queue of a worker that had gone was being emptied."""
    queue_one_prefix(database, app, settings, "gpu0", "gpu1")
    queue_client.delete("promptmill.tiny.places")
    lost = 200 - len(waiting_ids(app, ["tiny"]) or ())
    assert sweep(database, app, settings, NOW + 1) == Swept()
    assert sweep(database, app, settings, LATER).lost_messages == lost > 0


def test_a_queue_that_was_emptied_is_filled_again_at_once(
    database: Database, app: Celery, settings: Settings, queue_client: redis.Redis
) -> None:
    make_batch(database, 100)
    sweep(database, app, settings, NOW)
    queue_client.flushall()
    assert sweep(database, app, settings, NOW + 1) == Swept(lost_messages=100, queued=100)
    assert sweep(database, app, settings, NOW + 2) == Swept()
    assert waiting_ids(app, ["tiny"]) == set(range(1, 101))


def test_messages_in_a_dead_workers_hands_are_sent_again_at_once(
    database: Database, app: Celery, settings: Settings
) -> None:
    """Received and not yet claimed: only Redis knows of them, and would keep them for an hour."""
    make_batch(database, 64)
    sweep(database, app, settings, NOW)
    with app.connection_for_read() as connection:
        held = connection.default_channel.basic_get("promptmill.tiny.bulk")
        assert held is not None
        with database.write() as on:
            transitions.register_worker(on, NewWorker(name="w", host="h", pid=1, model="tiny"), NOW)
        assert sweep(database, app, settings, NOW + 1) == Swept()
        with database.write() as on:
            transitions.retire_worker(on, "w", NOW + 1, status=WorkerStatus.FAILED)
        assert sweep(database, app, settings, NOW + 2) == Swept(lost_messages=32, queued=32)
        assert sweep(database, app, settings, NOW + 3) == Swept()
        held.reject()


def test_messages_that_others_received_after_a_death_are_theirs(
    database: Database, app: Celery, settings: Settings
) -> None:
    make_batch(database, 64)
    sweep(database, app, settings, NOW)
    with database.write() as on:
        transitions.register_worker(on, NewWorker(name="w", host="h", pid=1, model="tiny"), NOW)
        transitions.retire_worker(on, "w", NOW + 1, status=WorkerStatus.FAILED)
    with app.connection_for_read() as connection:
        held = connection.default_channel.basic_get("promptmill.tiny.bulk")  # now, which is ten seconds after the death
        assert held is not None
        assert sweep(database, app, settings, NOW + 11) == Swept()
        held.reject()


def test_a_single_lost_message_is_found_among_the_others(
    database: Database, app: Celery, settings: Settings, queue_client: redis.Redis
) -> None:
    make_batch(database, 100)
    sweep(database, app, settings, NOW)
    queue_client.rpop("promptmill.tiny.bulk")
    assert sweep(database, app, settings, NOW + 1) == Swept()  # too early to tell it from one on its way
    assert sweep(database, app, settings, LATER).lost_messages == 32
    assert waiting_ids(app, ["tiny"]) == set(range(1, 101))


def test_a_long_backlog_is_not_taken_for_lost(database: Database, app: Celery, settings: Settings) -> None:
    """Looking only at the age of requests, or only at the lists, would send everything again and again."""
    make_batch(database, 64)
    sweep(database, app, settings, NOW)
    with app.connection_for_read() as connection:
        held = connection.default_channel.basic_get("promptmill.tiny.bulk")
        assert held is not None
        for hours in (1, 2, 3):
            assert sweep(database, app, settings, NOW + hours * 3600) == Swept()
        assert queue_depth(app, "tiny").waiting == 1
        held.reject()


def test_cancelled_requests_are_ended_and_the_batch_with_them(
    database: Database, app: Celery, settings: Settings
) -> None:
    batch_id = make_batch(database, 5000)
    sweep(database, app, settings, NOW)
    with database.write() as connection:
        transitions.cancel_batch(connection, batch_id, NOW)
    assert sweep(database, app, settings, NOW) == Swept(ended=5000, finished_batches=1)
    assert status(database, batch_id) is BatchStatus.CANCELLED
    assert counts(database, batch_id) == {RequestStatus.CANCELLED: 5000}


def test_a_finished_batch_gets_its_files_with_its_status(database: Database, app: Celery, settings: Settings) -> None:
    batch_id = make_batch(database, 3)
    sweep(database, app, settings, NOW)
    run_all(database, app)
    assert sweep(database, app, settings, NOW).finished_batches == 1
    with database.read() as connection:
        batch = queries.find_batch_by_id(connection, batch_id)
        assert batch is not None
        assert (batch.status, batch.error_file_id) == (BatchStatus.COMPLETED, None)
        assert batch.output_file_id is not None
        file = queries.find_file(connection, batch.output_file_id)
    assert file is not None
    content = (settings.files_dir / file.path).read_bytes()
    assert (file.lines, file.bytes, content.count(b"\n")) == (3, len(content), 3)
    assert [path.name for path in settings.files_dir.iterdir()] == [file.path]


def test_a_batch_past_its_deadline_expires_with_what_it_has(
    database: Database, app: Celery, settings: Settings
) -> None:
    batch_id = make_batch(database, 300)
    sweep(database, app, settings, NOW)
    run_all(database, app)
    with database.write() as connection:
        transitions.prioritise_batch(connection, batch_id, expires_at=NOW + 10)
    swept = sweep(database, app, settings, NOW + 10)
    assert swept == Swept(ended=44, expired_batches=1, finished_batches=1)
    assert status(database, batch_id) is BatchStatus.EXPIRED
    assert counts(database, batch_id) == {RequestStatus.COMPLETED: 256, RequestStatus.EXPIRED: 44}


def test_twins_left_over_are_answered_when_nothing_else_is_open(
    database: Database, app: Celery, settings: Settings
) -> None:
    """All lines of a job the same: one computation, and its transaction does not answer a million others."""
    with database.write() as connection:
        batch_id = transitions.create_batch(connection, NewBatch("batch_1", "f", "/v1/completions", "tiny"), NOW)
        lines = [NewRequest(line, None, "{}", same_as=None if line == 1 else 1) for line in range(1, 4502)]
        transitions.add_requests(connection, batch_id, lines)
        transitions.start_batch(connection, batch_id, NOW)
    assert sweep(database, app, settings, NOW) == Swept(queued=1)
    run_all(database, app)
    assert sweep(database, app, settings, NOW) == Swept(answered_duplicates=2500, finished_batches=1)
    assert counts(database, batch_id) == {RequestStatus.COMPLETED: 4501}


def test_with_no_batch_open_a_pass_is_one_read(database: Database, settings: Settings) -> None:
    away = make_app(QueueSettings(url="redis://127.0.0.1:1/0"))
    with database.write():  # on SQLite nobody else could write now
        assert sweep(database, away, settings, NOW) == Swept()
    away.close()


def test_without_redis_the_databases_part_is_done(database: Database, settings: Settings) -> None:
    batch_id = make_batch(database, 3)
    with database.write() as connection:
        transitions.queue_requests(connection, [1, 2, 3], NOW)
        transitions.claim_requests(connection, [1, 2, 3], worker="dead", lease_s=60, now=NOW)
    away = make_app(QueueSettings(url="redis://127.0.0.1:1/0"))
    assert sweep(database, away, settings, NOW + 61) == Swept(expired_leases=3)
    assert counts(database, batch_id) == {RequestStatus.PENDING: 3}
    away.close()


def test_a_finalizer_publishes_beside_the_pass(database: Database, app: Celery, settings: Settings) -> None:
    """A million lines take a while; leases, other batches and the queue do not wait for them."""
    batch_id = make_batch(database, 3)
    sweep(database, app, settings, NOW)
    run_all(database, app)
    finalizer = Finalizer(database, settings.files_dir)
    assert sweep(database, app, settings, NOW, finalizer) == Swept()
    wait_until(lambda: status(database, batch_id) is BatchStatus.COMPLETED, what="the batch's end")
    finalizer.close()


def test_writing_that_is_stopped_leaves_no_file_behind_and_is_done_anew(
    database: Database, app: Celery, settings: Settings
) -> None:
    batch_id = make_batch(database, 3)
    sweep(database, app, settings, NOW)
    run_all(database, app)
    with database.write() as connection:
        transitions.finish_batches(connection, NOW)
    assert finalize_batches(database, settings.files_dir, NOW, lambda: False) == []
    assert status(database, batch_id) is BatchStatus.FINALIZING
    assert list(settings.files_dir.iterdir()) == []
    assert finalize_batches(database, settings.files_dir, NOW) == [batch_id]


def test_a_retry_that_was_left_half_way_is_continued(
    database: Database, app: Celery, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asked for it may be gone."""
    monkeypatch.setattr(transitions, "RETRY_LINES", 2)
    batch_id = make_batch(database, 5)
    with database.write() as connection:
        transitions.cancel_batch(connection, batch_id, NOW)
    sweep(database, app, settings, NOW)
    assert status(database, batch_id) is BatchStatus.CANCELLED
    with database.write() as connection:
        assert transitions.retry_batch(connection, batch_id, NOW) == 2
    assert sweep(database, app, settings, NOW).queued == 5
