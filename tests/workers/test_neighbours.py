"""A worker that has nothing else to do takes what waits for another one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from celery import Celery

from jobs.queue import Chunk, own_queue_name, publish_chunks, queue_depth
from storage import queries, transitions
from storage.database import Database
from storage.models import RequestStatus, WorkerStatus
from storage.transitions import NewBatch, NewRequest, NewWorker
from tests.conftest import wait_until
from workers.neighbours import in_turn
from workers.worker import _hand_back_own_queue

MODEL = "tiny"
ROOT = Path(__file__).parents[2]

# A worker as workers/worker.py makes it, but for the engine. Its task notes what it was given and where it listens.
WORKER = """
import json, sys
from celery import signals
from jobs.queue import RUN_CHUNK, make_app, own_queue_name, queue_name
from jobs.settings import QueueSettings
from storage.database import open_database
from workers.neighbours import Neighbours

url, database_url, model, place = sys.argv[1:]
app = make_app(QueueSettings(url=url))

@app.task(name=RUN_CHUNK)
def run_chunk(request_ids):
    names = [queue.name for queue in worker.consumer.task_consumer.queues]
    with app.pool.acquire(block=True) as connection:
        client = connection.default_channel.client
        client.set("listening", json.dumps(names))
        client.rpush("received", *request_ids)

worker = app.Worker(
    concurrency=1, queues=[own_queue_name(model, place), queue_name(model, is_interactive=False)],
    loglevel="CRITICAL", without_mingle=True, without_gossip=True,
)
with open_database(database_url) as database:
    neighbours = Neighbours(database, model, place, lambda: worker.consumer)
    start = lambda **_: neighbours.start()
    stop = lambda **_: neighbours.stop()
    signals.worker_ready.connect(start)
    signals.worker_shutting_down.connect(stop)
    worker.start()
    neighbours.close()
sys.exit(worker.exitcode or 0)
"""


@contextmanager
def running_worker(queue_url: str, database_url: str, place: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", WORKER, queue_url, database_url, MODEL, place], cwd=ROOT)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def be_ready(database: Database, device: str) -> None:
    with database.write() as connection:
        transitions.register_worker(
            connection, NewWorker(f"{device}@a-1", "a", 1, MODEL, device=device), database.now()
        )
        transitions.update_worker(connection, f"{device}@a-1", database.now(), status=WorkerStatus.READY)


def test_what_waits_for_another_worker_is_taken_when_nothing_else_is_there(
    sqlite_database: Database, sqlite_url: str, app: Celery, queue_url: str, queue_client: redis.Redis
) -> None:
    """Its own queue, the shared one, then the other's, which never takes anything here; until that one is gone."""
    for device in ("gpu0", "gpu1"):
        be_ready(sqlite_database, device)
    own = [Chunk(MODEL, (number,), place="gpu0@a") for number in range(1, 4)]
    shared = [Chunk(MODEL, (number,)) for number in range(4, 7)]
    other = [Chunk(MODEL, (number,), place="gpu1@a") for number in range(7, 10)]
    publish_chunks(app, [*other, *shared, *own])
    with running_worker(queue_url, sqlite_url, "gpu0@a") as process:

        def all_run() -> bool:
            with sqlite_database.write(durable=False) as connection:  # it lives, however long the other takes to start
                transitions.update_worker(connection, "gpu1@a-1", sqlite_database.now())
            return queue_client.llen("received") == 9

        wait_until(all_run, what="the run of all messages")
        assert queue_client.lrange("received", 0, -1) == [str(number) for number in range(1, 10)]
        with sqlite_database.write() as connection:
            transitions.retire_worker(connection, "gpu1@a-1", sqlite_database.now())

        def listens_to_two() -> bool:
            if not queue_depth(app, MODEL).bulk:
                publish_chunks(app, [Chunk(MODEL, (10,))])
            return len(json.loads(queue_client.get("listening") or "[]")) == 2

        wait_until(listens_to_two, what="the end of listening to a worker that is gone")
        assert own_queue_name(MODEL, "gpu1@a") not in json.loads(queue_client.get("listening") or "[]")
        assert process.poll() is None
    assert process.returncode == 0


@pytest.mark.parametrize("has_companion", [False, True])
def test_a_worker_that_leaves_hands_back_what_waits_for_it_unless_another_has_its_place(
    sqlite_database: Database, app: Celery, queue_client: redis.Redis, has_companion: bool
) -> None:
    now = sqlite_database.now()
    with sqlite_database.write() as connection:
        batch_id = transitions.create_batch(connection, NewBatch("b", "f", "/v1/completions", MODEL), now)
        transitions.add_requests(connection, batch_id, [NewRequest(line, None, "{}") for line in range(1, 4)])
        transitions.start_batch(connection, batch_id, now)
        transitions.queue_requests(connection, [1, 2, 3], now)
    publish_chunks(app, [Chunk(MODEL, (1, 2), place="cpu@a"), Chunk(MODEL, (3,), place="gpu1@a")])
    if has_companion:
        be_ready(sqlite_database, "cpu")
    be_ready(sqlite_database, "gpu1")
    _hand_back_own_queue(sqlite_database, app, MODEL, "cpu@a")
    with sqlite_database.read() as connection:
        found = queries.count_requests(connection, batch_id)
    expected = {RequestStatus.QUEUED: 3} if has_companion else {RequestStatus.QUEUED: 1, RequestStatus.PENDING: 2}
    assert found == expected
    assert queue_client.llen(own_queue_name(MODEL, "cpu@a")) == has_companion
    assert queue_client.llen(own_queue_name(MODEL, "gpu1@a")) == 1


def test_not_all_help_the_same_one_first() -> None:
    places = {"a", "b", "c", "d"}
    assert in_turn(places, "b") == ["c", "d", "a"]
    assert in_turn(places, "d") == ["a", "b", "c"]
    assert in_turn({"a"}, "a") == []
