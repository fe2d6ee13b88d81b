"""Messages that come ten times, and messages that nobody should have sent."""

from __future__ import annotations

import base64
import json
import pickle
import uuid
from typing import Any

import pytest

from jobs.queue import RUN_CHUNK, queue_name
from tests.drills.conftest import MakeMill, Record, scaled


@pytest.mark.drill
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_each_message_comes_ten_times(make_mill: MakeMill, record: Record, database: str) -> None:
    """To two workers at once; half of the copies under the same delivery tag."""
    mill = make_mill(database, "log", seed=20)
    bulk = queue_name(mill.artifact.name, is_interactive=False)
    mill.up(workers=2)
    copied: set[bytes] = set()
    sent = 0
    for _ in range(scaled(15)):
        mill.keep_busy()
        mill.pick_busy_worker(within_s=0.3)
        with mill.queue_client() as client:
            waiting = [message for message in client.lrange(bulk, 0, -1) if message not in copied]
            copies = [copy for message in waiting for copy in copies_of(message, 9)]
            mill.random.shuffle(copies)
            copied |= {*waiting, *copies}
            if copies:
                sent += len(copies)
                client.lpush(bulk, *copies)
    mill.wait_until_done()
    assert sent >= 9
    record(mill, "each message ten times", faults=sent)


def copies_of(message: bytes, count: int) -> list[bytes]:
    copies = []
    for number in range(count):
        envelope = json.loads(message)
        if number % 2:
            envelope["properties"]["delivery_tag"] = str(uuid.uuid4())
        copies.append(json.dumps(envelope | {"copy": number}).encode())
    return copies


@pytest.mark.drill
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_malformed_messages_are_pushed_by_hand(make_mill: MakeMill, record: Record, database: str) -> None:
    """What stock Celery answers with endless loops and exits. Here no worker ends."""
    mill = make_mill(database, "log", seed=21)
    bulk = queue_name(mill.artifact.name, is_interactive=False)
    mill.up(workers=2)
    bad = malformed(bulk)
    for each in bad:
        mill.keep_busy()
        mill.pick_busy_worker(within_s=0.3)
        with mill.queue_client() as client:
            mill.inject(lambda client=client, each=each: client.rpush(bulk, each))
    mill.wait_until_done()
    assert mill.events()["message_rejected"] >= len(bad) // 2
    assert not mill.events()["worker_died"]
    record(mill, "malformed messages pushed by hand")


def malformed(queue: str) -> list[bytes]:
    good = [[[1]], {}, {}]
    return [
        message(queue, good, headers={"task": RUN_CHUNK}),  # no id
        message(queue, good, headers={"id": "x"}),  # no task
        message(queue, good, headers=None),
        message(queue, [[[1]], {}]),  # two elements instead of three
        message(queue, "text"),
        message(queue, [[], {}, {}]),  # no argument
        message(queue, [["text"], {}, {}]),
        message(queue, [[[None, "x", 1.5, {}]], {}, {}]),
        message(queue, [[[2**80, -1, 0]], {}, {}]),
        message(queue, [[list(range(10**6, 10**6 + 50_000))], {}, {}]),
        message(queue, [[[1]], {}, {}], headers={"task": "somebody.elses", "id": str(uuid.uuid4())}),
        message(queue, None, body="***not base64***"),
        message(queue, None, body=base64.b64encode(b"\xff\xfe not json").decode()),
        message(queue, None, body=base64.b64encode(pickle.dumps(good)).decode(), kind="application/x-python-serialize"),
        message(queue, [["x" * 10_000_000], {}, {}]),
        json.dumps({"body": "x"}).encode(),
        b"garbage \x00\xff\xfe",
        b"[]",
        b"7",
        b"",
    ]


def message(
    queue: str,
    arguments: Any,
    *,
    headers: dict[str, Any] | str | None = "usual",
    body: str | None = None,
    kind: str = "application/json",
) -> bytes:
    envelope: dict[str, Any] = {
        "body": base64.b64encode(json.dumps(arguments).encode()).decode() if body is None else body,
        "content-encoding": "utf-8",
        "content-type": kind,
        "headers": {"task": RUN_CHUNK, "id": str(uuid.uuid4())} if headers == "usual" else headers,
        "properties": {
            "delivery_tag": str(uuid.uuid4()),
            "delivery_info": {"exchange": "", "routing_key": queue},
            "body_encoding": "base64",
        },
    }
    return json.dumps({name: value for name, value in envelope.items() if value is not None}).encode()
