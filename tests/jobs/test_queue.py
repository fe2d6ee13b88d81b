"""Sending ids, looking into the queue, and a consumer that survives whatever is put there."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery

from jobs.queue import (
    RUN_CHUNK,
    Chunk,
    KeptConnection,
    QueueDepth,
    QueueError,
    empty_own_queue,
    make_app,
    own_queue_name,
    ping,
    publish_chunks,
    queue_depth,
    queue_names,
    redis_url,
    used_places,
    waiting_ids,
)
from jobs.settings import QueueSettings
from tests.conftest import wait_until

MODEL = "tiny model"
BULK = "promptmill.tiny model.bulk"
PLACE = "gpu0@host"
ROOT = Path(__file__).parents[2]


def test_each_model_has_two_queues() -> None:
    assert queue_names("m") == ("promptmill.m.interactive", "promptmill.m.bulk")


def test_a_kept_connection_that_was_cut_is_made_anew(queue_url: str, queue_client: redis.Redis) -> None:
    kept = KeptConnection(redis_url(queue_url))
    for number in range(3):
        assert kept.run("RPUSH", "list", number) == number + 1
        queue_client.client_kill_filter(_id=str(kept.run("CLIENT", "ID")))
    with pytest.raises(redis.ResponseError):
        kept.run("GET", "list")
    assert kept.run("LLEN", "list") == 3
    kept.close()
    with pytest.raises(redis.ConnectionError):
        KeptConnection("redis://127.0.0.1:1/0").run("PING")


def test_a_chunk_travels_as_one_message_with_its_ids_and_no_prompt(app: Celery, queue_client: redis.Redis) -> None:
    publish_chunks(app, [Chunk(MODEL, (1, 2, 3)), Chunk(MODEL, (4,), is_interactive=True)])
    (message,) = queue_client.lrange(BULK, 0, -1)
    envelope = json.loads(message)
    assert envelope["headers"]["task"] == RUN_CHUNK
    assert json.loads(base64.b64decode(envelope["body"]))[0] == [[1, 2, 3]]
    assert queue_depth(app, MODEL) == QueueDepth(interactive=1, bulk=1, unacked=0)
    assert waiting_ids(app, [MODEL]) == {1, 2, 3, 4}
    assert waiting_ids(app, ["another"]) == set()


def test_what_waits_in_a_workers_own_queue_is_seen(app: Celery, queue_client: redis.Redis) -> None:
    """Sweep must not take it for lost, and whoever looks at the depth must not think that all is done."""
    publish_chunks(app, [Chunk(MODEL, (1, 2)), Chunk(MODEL, (3,), place=PLACE), Chunk(MODEL, (4,), place="gpu1@host")])
    assert queue_client.llen(own_queue_name(MODEL, PLACE)) == 1
    assert queue_depth(app, MODEL) == QueueDepth(interactive=0, bulk=3, unacked=0)
    assert waiting_ids(app, [MODEL]) == {1, 2, 3, 4}
    assert used_places(app, [MODEL, "another"]) == {MODEL: {PLACE: 1, "gpu1@host": 1}}


def test_an_own_queue_is_emptied_with_what_nobody_wrote(app: Celery, queue_client: redis.Redis) -> None:
    publish_chunks(app, [Chunk(MODEL, (number,), place=PLACE) for number in range(600)])
    queue_client.lpush(own_queue_name(MODEL, PLACE), "garbage")
    assert sorted(empty_own_queue(app, MODEL, PLACE)) == list(range(600))
    assert used_places(app, [MODEL]) == {}
    assert empty_own_queue(app, MODEL, PLACE) == []


def test_publishing_nothing_needs_no_queue() -> None:
    publish_chunks(make_app(QueueSettings(url="redis://127.0.0.1:1/0")), [])


def test_a_message_that_a_worker_holds_is_still_seen(app: Celery) -> None:
    """Sweep must not take it for lost."""
    publish_chunks(app, [Chunk(MODEL, (1, 2)), Chunk(MODEL, (3,))])
    with app.connection_for_read() as connection:
        held = connection.default_channel.basic_get(BULK)
        assert held is not None
        assert queue_depth(app, MODEL) == QueueDepth(interactive=0, bulk=1, unacked=1)
        assert waiting_ids(app, [MODEL]) == {1, 2, 3}
        held.ack()
        assert waiting_ids(app, [MODEL]) == {3}


def test_foreign_messages_do_not_hinder_looking(app: Celery, queue_client: redis.Redis) -> None:
    publish_chunks(app, [Chunk(MODEL, (7,))])
    queue_client.lpush(BULK, "garbage", "[]", "5", json.dumps({"body": "!", "properties": {}}), b"\xff\xfe")
    queue_client.hset("unacked", "tag", "garbage")
    assert waiting_ids(app, [MODEL]) == {7}


def test_more_messages_than_are_sensible_to_read_are_not_read(
    app: Celery, queue_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.queue.MOST_MESSAGES", 2)
    publish_chunks(app, [Chunk(MODEL, (number,)) for number in range(3)])
    assert waiting_ids(app, [MODEL]) is None


def test_a_queue_that_is_away_is_named() -> None:
    app = make_app(QueueSettings(url="redis://:secret@127.0.0.1:1/0"))
    for call in (lambda: ping(app), lambda: publish_chunks(app, [Chunk("m", (1,))]), lambda: queue_depth(app, "m")):
        with pytest.raises(QueueError, match="cannot be reached") as raised:
            call()
        assert (raised.value.code, raised.value.retryable) == ("queue_unreachable", True)
        assert "secret" not in raised.value.message
    app.close()


def test_a_full_queue_is_named(app: Celery, queue_client: redis.Redis) -> None:
    """With `noeviction` Redis refuses to take more, and nothing is lost."""
    ping(app)
    queue_client.config_set("maxmemory", "1")
    try:
        with pytest.raises(QueueError, match="no memory left") as raised:
            publish_chunks(app, [Chunk(MODEL, (1,))])
    finally:
        queue_client.config_set("maxmemory", "0")
    assert (raised.value.code, raised.value.retryable) == ("queue_full", True)
    publish_chunks(app, [Chunk(MODEL, (1,))])


def test_ten_thousand_chunks_are_published_in_a_few_round_trips(app: Celery, queue_client: redis.Redis) -> None:
    """One by one they would take seconds."""
    before = queue_client.info("commandstats").get("cmdstat_lpush", {}).get("calls", 0)
    publish_chunks(app, [Chunk(MODEL, (number,)) for number in range(1200)])
    assert queue_client.info("commandstats")["cmdstat_lpush"]["calls"] - before == 1200
    assert queue_depth(app, MODEL).bulk == 1200


# --- a worker ----------------------------------------------------------------------------------------------------

# A worker with our app's configuration whose task notes in Redis what it was given.
WORKER = """
import sys
from jobs.queue import RUN_CHUNK, make_app, queue_names
from jobs.settings import QueueSettings

url, model, *own = sys.argv[1:]
app = make_app(QueueSettings(url=url))

@app.task(name=RUN_CHUNK)
def run_chunk(request_ids):
    with app.pool.acquire(block=True) as connection:
        connection.default_channel.client.rpush("received", *request_ids)

worker = app.Worker(concurrency=1, queues=[*own, queue_names(model)[1]], loglevel="CRITICAL", without_mingle=True,
                    without_gossip=True)
worker.start()
"""


@contextmanager
def running_worker(url: str, *own: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", WORKER, url, MODEL, *own], cwd=ROOT)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(20)


def message(args: Any, *, headers: dict[str, Any] | None = None, **properties: Any) -> str:
    return json.dumps(
        {
            "body": base64.b64encode(json.dumps(args).encode()).decode(),
            "content-encoding": "utf-8",
            "content-type": "application/json",
            "headers": {"task": RUN_CHUNK, "id": str(uuid.uuid4())} if headers is None else headers,
            "properties": {
                "delivery_tag": str(uuid.uuid4()),
                "delivery_info": {"exchange": "", "routing_key": BULK},
                "body_encoding": "base64",
                **properties,
            },
        }
    )


def test_malformed_messages_stop_no_worker(app: Celery, queue_url: str, queue_client: redis.Redis) -> None:
    """Stock Celery 5.7 reconnects for ever over the first, exits for ever over the second and once over the last."""
    good = [[[1]], {}, {}]
    queue_client.lpush(BULK, message(good, headers={"task": RUN_CHUNK}))  # no id
    queue_client.lpush(BULK, message([[[2]], {}]))  # two elements instead of three
    queue_client.lpush(BULK, message(good, headers={"task": "unknown", "id": "x"}))
    queue_client.lpush(BULK, message("text"))
    queue_client.lpush(BULK, b"garbage \x00\xff", "[]", "7", "", json.dumps({"body": "x"}))
    publish_chunks(app, [Chunk(MODEL, (number,)) for number in range(10, 20)])
    with running_worker(queue_url) as process:
        wait_until(lambda: queue_client.llen("received") >= 10, what="the good messages' run")
        assert process.poll() is None
        wait_until(lambda: queue_depth(app, MODEL) == QueueDepth(0, 0, 0), what="an empty queue")
    assert queue_client.lrange("received", 0, -1) == [str(number) for number in range(10, 20)]
    assert process.returncode == 0


def test_a_worker_empties_its_own_queue_first_and_then_the_shared_one(
    app: Celery, queue_url: str, queue_client: redis.Redis
) -> None:
    """Celery would take from them in turn. What waits in a worker's own queue is bounded, so neither starves."""
    publish_chunks(app, [Chunk(MODEL, (number,)) for number in range(20, 30)])
    publish_chunks(app, [Chunk(MODEL, (number,), place=PLACE) for number in range(10, 20)])
    with running_worker(queue_url, own_queue_name(MODEL, PLACE)):
        wait_until(lambda: queue_client.llen("received") >= 20, what="the run of all messages")
    assert queue_client.lrange("received", 0, -1) == [str(number) for number in range(10, 30)]
