"""What is queued next, how much of it, and what happens when publishing fails."""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest
from celery import Celery
from hypothesis import given
from hypothesis import strategies as st

from jobs.dispatch import LEAST_WINDOW, Fleet, plan_chunks, top_up, wants_more, window
from jobs.queue import QueueError, make_app, queue_depth, waiting_ids
from jobs.settings import QueueSettings, Settings
from storage import queries, transitions
from storage.database import Database
from storage.models import RequestStatus, WorkerStatus
from storage.queries import PendingRequest
from storage.transitions import NewBatch, NewRequest, NewWorker

NOW = 1_000_000.0
MODEL = "tiny"


def pending(*prefix_ids: int | None) -> list[PendingRequest]:
    """Requests 1, 2, 3 ... with these prefixes."""
    return [PendingRequest(id=line, line=line, prefix_id=prefix_id) for line, prefix_id in enumerate(prefix_ids, 1)]


# --- the plan ----------------------------------------------------------------------------------------------------


def test_a_window_is_twice_what_the_workers_run_and_never_tiny() -> None:
    assert window(Fleet(workers=0, slots=0)) == LEAST_WINDOW
    assert window(Fleet(workers=1, slots=64)) == LEAST_WINDOW
    assert window(Fleet(workers=8, slots=8 * 256)) == 2 * 8 * 256


def test_a_top_up_is_worth_its_price_below_half_the_window() -> None:
    fleet = Fleet(workers=1, slots=256)
    assert wants_more(256, fleet)
    assert not wants_more(257, fleet)


def test_prompts_with_one_prefix_travel_together() -> None:
    chunks = plan_chunks(pending(1, 2, 1, 2, None, 1), fleet=Fleet(1, 64), chunk_size=3)
    assert chunks == [(1, 3, 6), (2, 4, 5)]


def test_one_worker_gets_full_chunks_to_the_end() -> None:
    chunks = plan_chunks(pending(*[None] * 70), fleet=Fleet(1, 64), chunk_size=32)
    assert [len(chunk) for chunk in chunks] == [32, 32, 6]


def test_chunks_shrink_near_the_end_so_that_all_workers_finish_together() -> None:
    chunks = plan_chunks(pending(*[None] * 256), fleet=Fleet(4, 256), chunk_size=32)
    sizes = [len(chunk) for chunk in chunks]
    assert sizes[0] == 32
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-2:] == [4, 3]


def test_chunks_do_not_shrink_while_the_job_has_more() -> None:
    chunks = plan_chunks(pending(*[None] * 64), fleet=Fleet(4, 256), chunk_size=32, remaining=100_000)
    assert [len(chunk) for chunk in chunks] == [32, 32]


@given(
    prefix_ids=st.lists(st.none() | st.integers(1, 4), max_size=300),
    workers=st.integers(0, 20),
    chunk_size=st.integers(1, 64),
    remaining=st.none() | st.integers(0, 10_000),
)
def test_every_request_is_planned_once_in_chunks_of_allowed_size(
    prefix_ids: list[int | None], workers: int, chunk_size: int, remaining: int | None
) -> None:
    chunks = plan_chunks(
        pending(*prefix_ids), fleet=Fleet(workers, 64 * workers), chunk_size=chunk_size, remaining=remaining
    )
    assert sorted(request_id for chunk in chunks for request_id in chunk) == list(range(1, len(prefix_ids) + 1))
    assert all(1 <= len(chunk) <= chunk_size for chunk in chunks)
    prefixes = [prefix_ids[request_id - 1] for chunk in chunks for request_id in chunk]
    changes = sum(left != right for left, right in pairwise(prefixes))
    assert changes == max(0, len(set(prefixes)) - 1)


# --- carrying it out ---------------------------------------------------------------------------------------------


def make_batch(database: Database, lines: int, *, model: str = MODEL, priority: int = 0) -> int:
    with database.write() as connection:
        new = NewBatch(f"batch_{model}_{priority}_{lines}", "f", "/v1/chat/completions", model, priority=priority)
        batch_id = transitions.create_batch(connection, new, NOW)
        transitions.add_requests(connection, batch_id, [NewRequest(line, None, "{}") for line in range(1, lines + 1)])
        transitions.start_batch(connection, batch_id, NOW)
    return batch_id


def make_worker(database: Database, name: str, slots: int, model: str = MODEL) -> None:
    with database.write() as connection:
        transitions.register_worker(connection, NewWorker(name, "host", 1, model, max_batch_size=slots), NOW)
        transitions.update_worker(connection, name, NOW, status=WorkerStatus.READY)


def statuses(database: Database, batch_id: int) -> dict[RequestStatus, int]:
    with database.read() as connection:
        return queries.count_requests(connection, batch_id)


def queued(database: Database, batch_id: int) -> int:
    return statuses(database, batch_id).get(RequestStatus.QUEUED, 0)


def test_no_more_than_the_window_goes_into_the_queue(database: Database, app: Celery, settings: Settings) -> None:
    batch_id = make_batch(database, 1000)
    assert top_up(database, app, settings.queue, NOW) == LEAST_WINDOW
    assert queue_depth(app, MODEL).bulk == LEAST_WINDOW // 32
    assert len(waiting_ids(app, [MODEL]) or ()) == LEAST_WINDOW
    assert top_up(database, app, settings.queue, NOW) == 0
    assert queued(database, batch_id) == LEAST_WINDOW


def test_the_window_follows_the_workers(database: Database, app: Celery, settings: Settings) -> None:
    batch_id = make_batch(database, 2000)
    make_worker(database, "a", 256)
    make_worker(database, "b", 128)
    make_worker(database, "other model", 4096, model="other")
    assert top_up(database, app, settings.queue, NOW) == 768
    assert queued(database, batch_id) == 768


def test_what_workers_took_is_filled_up_in_bulk(database: Database, app: Celery, settings: Settings) -> None:
    make_batch(database, 1000)
    top_up(database, app, settings.queue, NOW)
    ids = sorted(waiting_ids(app, [MODEL]) or ())
    with database.write() as connection:
        transitions.claim_requests(connection, ids[:100], worker="w", lease_s=60, now=NOW)
    assert top_up(database, app, settings.queue, NOW) == 0  # more than half is still there
    with database.write() as connection:
        transitions.claim_requests(connection, ids[100:200], worker="w", lease_s=60, now=NOW)
    assert top_up(database, app, settings.queue, NOW) == 200


def test_the_more_urgent_batch_goes_first_and_the_rest_fills_up(
    database: Database, app: Celery, settings: Settings
) -> None:
    relaxed = make_batch(database, 300)
    urgent = make_batch(database, 200, priority=5)
    top_up(database, app, settings.queue, NOW)
    assert (queued(database, urgent), queued(database, relaxed)) == (200, 56)


def test_each_model_has_a_window_of_its_own(database: Database, app: Celery, settings: Settings) -> None:
    one, other = make_batch(database, 300), make_batch(database, 300, model="other")
    assert top_up(database, app, settings.queue, NOW) == 512
    assert (queued(database, one), queued(database, other)) == (256, 256)
    assert (queue_depth(app, MODEL).bulk, queue_depth(app, "other").bulk) == (8, 8)


def test_a_batch_that_is_being_cancelled_sends_nothing(database: Database, app: Celery, settings: Settings) -> None:
    batch_id = make_batch(database, 10)
    with database.write() as connection:
        transitions.cancel_batch(connection, batch_id, NOW)
    assert top_up(database, app, settings.queue, NOW) == 0


def test_publishing_that_fails_leaves_the_requests_pending(database: Database, settings: Settings) -> None:
    """The next top-up sends them; that is how an outage of Redis ends without a hand."""
    batch_id = make_batch(database, 10)
    away = make_app(QueueSettings(url="redis://127.0.0.1:1/0"))
    with pytest.raises(QueueError):
        top_up(database, away, settings.queue, NOW)
    assert statuses(database, batch_id) == {RequestStatus.PENDING: 10}
    away.close()


def test_processes_that_top_up_at_once_send_each_request_once(
    database: Database, app: Celery, settings: Settings
) -> None:
    batch_id = make_batch(database, 1000)
    barrier = threading.Barrier(4)
    counts: list[int] = []

    def run() -> None:
        barrier.wait()
        counts.append(top_up(database, app, settings.queue, NOW))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(counts) == queued(database, batch_id) == LEAST_WINDOW
    assert queue_depth(app, MODEL).bulk == LEAST_WINDOW // 32


def test_with_nothing_to_do_nothing_is_written_or_asked_of_redis(database: Database, settings: Settings) -> None:
    """Workers call it after each chunk, and an idle system calls it for ever."""
    away = make_app(QueueSettings(url="redis://127.0.0.1:1/0"))
    with database.write():  # nobody else could write now; on SQLite a write would wait for 30 s
        assert top_up(database, away, settings.queue, NOW) == 0
    away.close()
