"""Requests that somebody waits for get through, whatever bulk work does."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace

import redis
from celery import Celery

from jobs.queue import Chunk, InteractiveQueue, publish_chunks, queue_depth
from jobs.settings import QueueSettings
from tests.conftest import wait_until
from workers.engine.null import NullEngine
from workers.engine.request import GenerationRequest, SamplingParameters
from workers.engine.scheduler import line_up
from workers.interactive import InteractiveLine

MODEL = "tiny"


def send(app: Celery, *request_ids: int) -> None:
    publish_chunks(app, [Chunk(MODEL, (request_id,), is_interactive=True) for request_id in request_ids])


def test_each_entry_is_run_and_no_more_are_taken_than_there_is_room_for(app: Celery, queue_url: str) -> None:
    """What is not taken stays for other workers."""
    running: list[int] = []
    go_on = threading.Event()

    def run(request_ids: Sequence[int]) -> None:
        running.extend(request_ids)
        go_on.wait()

    line = InteractiveLine(InteractiveQueue(QueueSettings(url=queue_url), MODEL), run, most=2)
    line.start()
    send(app, 1, 2, 3, 4)
    wait_until(lambda: len(running) == 2, what="two at once")
    assert sorted(running) == [1, 2]
    assert queue_depth(app, MODEL).interactive == 2
    go_on.set()
    wait_until(lambda: len(running) == 4, what="the rest")
    line.close()
    assert sorted(running) == [1, 2, 3, 4]


def test_a_line_that_stops_finishes_what_it_has(app: Celery, queue_url: str) -> None:
    begun, go_on, done = threading.Event(), threading.Event(), threading.Event()

    def run(_request_ids: Sequence[int]) -> None:
        begun.set()
        go_on.wait()
        done.set()

    line = InteractiveLine(InteractiveQueue(QueueSettings(url=queue_url), MODEL), run, most=8)
    line.start()
    send(app, 1)
    assert begun.wait(60)
    line.stop()
    closing = threading.Thread(target=line.close)
    closing.start()
    go_on.set()
    closing.join(60)
    assert done.is_set()
    send(app, 2)
    assert queue_depth(app, MODEL).interactive == 1


def test_a_request_that_crashes_or_an_entry_that_is_none_stops_nobody(
    app: Celery, queue_url: str, queue_client: redis.Redis
) -> None:
    run: list[int] = []

    def work(request_ids: Sequence[int]) -> None:
        run.extend(request_ids)
        if request_ids == [1]:
            raise ValueError("broken")

    line = InteractiveLine(InteractiveQueue(QueueSettings(url=queue_url), MODEL), work, most=1)
    line.start()
    queue_client.lpush(f"promptmill.{MODEL}.interactive", "garbage", "{}", "[]", '["x"]')
    send(app, 1, 2)
    wait_until(lambda: run == [1, 2], what="both")
    line.close()


def ask(number: int, *, is_interactive: bool = False, max_tokens: int = 1) -> GenerationRequest:
    sampling = SamplingParameters(max_tokens=max_tokens)
    return GenerationRequest([number, number], sampling, is_interactive=is_interactive)


def test_the_line_has_interactive_rows_first_each_kind_in_its_order() -> None:
    waiting: deque[SimpleNamespace] = deque()
    arrivals = [(1, False), (2, True), (3, False), (4, True)]
    for number, is_interactive in arrivals:
        line_up(waiting, [SimpleNamespace(request=ask(number, is_interactive=is_interactive), number=number)])
    assert [row.number for row in waiting] == [2, 4, 1, 3]


def test_an_interactive_request_is_admitted_beside_rows_that_are_all_taken() -> None:
    """Bulk rows that last for ever in this test's terms hold every slot but those kept for such requests."""
    engine = NullEngine(max_batch_size=2, context_length=100, token_s=0.01, interactive_slots=1)
    hold = threading.Event()
    bulk = [
        engine.submit(
            GenerationRequest(
                list(range(16)), SamplingParameters(max_tokens=16), on_token=lambda _token: bool(hold.is_set())
            )
        )
        for _ in range(8)
    ]
    answers = [engine.submit(ask(number, is_interactive=True)) for number in (7, 8, 9)]
    assert [answer.result(60).completion_token_ids for answer in answers] == [(7,), (8,), (9,)]
    hold.set()
    assert all(future.result(60) for future in bulk)
    engine.close()
