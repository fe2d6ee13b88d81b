"""Chat and completions by the real SDK, against a live gateway and a worker process on the null engine.

The null engine answers with the last 16 tokens of the prompt, and the artifact's tokens are bytes: so an answer is
known, and a character of two bytes is split over two tokens.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from celery import Celery

from jobs import interactive
from jobs.gateway.replies import Wait
from jobs.interactive import Answer
from jobs.protocol import Endpoint, parse_body
from jobs.queue import GIVE_UP, make_app
from jobs.queue_server import open_queue_server
from jobs.settings import Settings
from jobs.worker_process import WorkerProcess
from storage import queries, transitions
from storage.database import Database, open_database, upgrade_schema
from storage.models import BatchStatus, Door, RequestStatus, WorkerStatus
from storage.queries import BatchRow
from storage.transitions import NewWorker
from tests.conftest import wait_until
from tests.drills.servers import QueueServer
from tests.jobs.gateway.conftest import (
    MODEL,
    PATIENCE_S,
    MakeGateway,
    RunningGateway,
    StartWorker,
    changed,
    chat_line,
    prepared,
    running_gateway,
    running_worker,
    upload,
)

PROMPT = "0123456789 zwölf Bögen"
ANSWER = "6789 zwölf Bögen"[-14:]  # 16 bytes


@pytest.fixture
def worked(shared_client: openai.OpenAI, shared_worker: WorkerProcess) -> openai.OpenAI:
    """The SDK for a gateway that has a worker."""
    return shared_client


def messages(content: str = PROMPT) -> list[Any]:
    return [{"role": "user", "content": content}]


def streamed(chunks: Any, choice: int = 0) -> str:
    """The text of one choice of a streamed chat or completion."""
    text = ""
    for chunk in chunks:
        for each in chunk.choices:
            if each.index == choice:
                text += (each.delta.content or "") if hasattr(each, "delta") else each.text
    return text


def interactive_batches(database: Database) -> list[BatchRow]:
    with database.read() as connection:
        found = (queries.find_batch_by_id(connection, number) for number in range(1, 50))
        return [batch for batch in found if batch is not None]


# --- the answer ----------------------------------------------------------------------------------------------------


def test_a_completion_is_answered_whole_and_in_pieces_alike(worked: openai.OpenAI) -> None:
    whole = worked.completions.create(model=MODEL, prompt=PROMPT, max_tokens=16)
    assert whole.choices[0].text == ANSWER
    assert (whole.object, whole.model, whole.choices[0].finish_reason) == ("text_completion", MODEL, "stop")
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 16
    chunks = list(worked.completions.create(model=MODEL, prompt=PROMPT, max_tokens=16, stream=True))
    assert streamed(chunks) == ANSWER
    assert {chunk.object for chunk in chunks} == {"text_completion"}
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-1])


def test_a_chat_is_answered_whole_and_in_pieces_alike(worked: openai.OpenAI) -> None:
    whole = worked.chat.completions.create(model=MODEL, messages=messages(), max_tokens=16, n=2)
    assert len(whole.choices) == 2
    chunks = list(
        worked.chat.completions.create(
            model=MODEL,
            messages=messages(),
            max_tokens=16,
            n=2,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    for choice in (0, 1):
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices and chunk.choices[0].index == choice]
        assert streamed(chunks, choice) == whole.choices[choice].message.content
        assert (mine[0].delta.role, mine[0].delta.content) == ("assistant", "")
        assert all(each.delta.role is None for each in mine[1:])
        assert [each.finish_reason for each in mine] == [None] * (len(mine) - 1) + ["stop"]
    *before, last = chunks
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (whole.usage.prompt_tokens, 32)
    assert all(chunk.usage is None for chunk in before)
    assert len({chunk.id for chunk in chunks}) == len({chunk.created for chunk in chunks}) == 1
    assert {chunk.system_fingerprint for chunk in chunks} == {whole.system_fingerprint}


def test_the_events_are_openais_to_the_letter(worked: openai.OpenAI, shared_gateway: RunningGateway) -> None:
    """What a reader sees that does not use the SDK."""
    answer = httpx.post(
        f"{shared_gateway.url}/v1/chat/completions",
        json={"model": MODEL, "messages": messages("abc"), "max_tokens": 2, "stream": True},
        headers={"Authorization": f"Bearer {worked.api_key}"},
        timeout=PATIENCE_S,
        trust_env=False,
    )
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    *events, end, rest = answer.text.split("\n\n")
    assert (end, rest) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    keys = {"id", "object", "created", "model", "system_fingerprint", "choices"}
    assert all(set(chunk) == keys and chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert all(set(chunk["choices"][0]) == {"index", "delta", "logprobs", "finish_reason"} for chunk in chunks)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert chunks[-1]["choices"][0]["delta"] == {}


@pytest.mark.parametrize("stop", ["Bö", ["xyz", "wölf "], " zw", "n"])
def test_no_part_of_a_stop_text_is_ever_sent(worked: openai.OpenAI, stop: Any) -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 16, "stop": stop}
    whole = worked.completions.create(**options).choices[0].text
    first = min(ANSWER.find(each) for each in ([stop] if isinstance(stop, str) else stop) if each in ANSWER)
    assert whole == ANSWER[:first]
    assert streamed(worked.completions.create(**options, stream=True)) == whole


def test_simple_clients_have_a_route_of_their_own(worked: openai.OpenAI, shared_gateway: RunningGateway) -> None:
    def post(body: object) -> httpx.Response:
        return httpx.post(
            f"{shared_gateway.url}/api/v1/chat",
            json=body,
            headers={"Authorization": f"Bearer {worked.api_key}"},
            timeout=PATIENCE_S,
            trust_env=False,
        )

    answer = post({"prompt": "hello", "max_new_tokens": 3})
    assert answer.status_code == 200, answer.text
    said = answer.json()
    assert set(said) == {"response", "latency_ms", "gpu_id"}
    chat = worked.chat.completions.create(model=MODEL, messages=messages("hello"), max_tokens=3)
    assert said["response"] == chat.choices[0].message.content
    assert said["latency_ms"] > 0
    assert said["gpu_id"] is None
    for wrong, param in (({}, "prompt"), ({"prompt": ""}, "prompt"), ({"prompt": "x", "max_new_tokens": 0}, "max_new")):
        refused = post(wrong)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"].startswith(param)


def test_models_are_listed_and_described(worked: openai.OpenAI) -> None:
    assert [model.id for model in worked.models.list()] == [MODEL]
    model = worked.models.retrieve(MODEL)
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "promptmill")
    assert model.created > 0
    with pytest.raises(openai.NotFoundError) as caught:
        worked.models.retrieve("org/another")
    assert caught.value.code == "model_not_found"
    assert f'there is no model "org/another", only {MODEL}; ' in caught.value.message


# --- what goes wrong -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "kind", "code"),
    [
        ({"model": "another"}, openai.NotFoundError, "model_not_found"),
        ({"messages": messages("x" * 500)}, openai.BadRequestError, "context_length_exceeded"),
        ({"max_tokens": 500}, openai.BadRequestError, "max_tokens_exceeds_context"),
        ({"temperature": 3}, openai.BadRequestError, "decimal_above_max_value"),
        ({"messages": []}, openai.BadRequestError, "empty_array"),
        ({"nonsense": 1}, openai.BadRequestError, "unknown_parameter"),
        ({"tools": [{"type": "function"}]}, openai.BadRequestError, "unsupported_parameter"),
        ({"model": None}, openai.BadRequestError, "missing_required_parameter"),
    ],
)
def test_a_bad_request_raises_the_right_exception(
    worked: openai.OpenAI, body: dict[str, Any], kind: type[openai.APIStatusError], code: str, stream: bool
) -> None:
    """Streamed or not: a stream that has not begun is refused by its status."""
    options: dict[str, Any] = {"model": MODEL, "messages": messages(), "stream": stream}
    more = {
        name: value for name, value in body.items() if name not in ("model", "messages", "temperature", "max_tokens")
    }
    with pytest.raises(kind) as caught:
        worked.chat.completions.create(
            **options | {name: value for name, value in body.items() if name not in more}, extra_body=more
        )
    assert caught.value.code == code
    assert caught.value.request_id


def test_a_key_is_asked_for(shared_gateway: RunningGateway) -> None:
    with (
        openai.OpenAI(base_url=f"{shared_gateway.url}/v1", api_key="pm-wrong") as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.chat.completions.create(model=MODEL, messages=messages())


def test_without_a_worker_a_client_is_told_when_to_come_back(
    sqlite_settings: Settings, make_gateway: MakeGateway
) -> None:
    gateway = make_gateway(sqlite_settings)
    with gateway.client(max_retries=0) as client, pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model=MODEL, messages=messages())
    assert (caught.value.status_code, caught.value.code) == (503, "no_worker_ready")
    assert int(caught.value.response.headers["retry-after"]) > 0
    assert interactive_batches(gateway.database) == []


def test_a_call_repeated_with_its_key_is_answered_once(worked: openai.OpenAI, shared_gateway: RunningGateway) -> None:
    def call(key: str, content: str = PROMPT, stream: bool = False) -> Any:
        return worked.chat.completions.create(
            model=MODEL, messages=messages(content), extra_headers={"Idempotency-Key": key}, stream=stream
        )

    first, second, third = call("one"), call("one"), call("two")
    assert first.id == second.id != third.id
    with pytest.raises(openai.BadRequestError) as caught:
        call("one", "another question")
    assert caught.value.code == "idempotency_key_reused"
    began, again = list(call("three", stream=True)), list(call("three", stream=True))
    assert streamed(began) == streamed(again) == first.choices[0].message.content
    assert began[0].id == again[0].id


# --- callers and workers that go -----------------------------------------------------------------------------------

# A token takes so long that an answer outlasts whatever the test does meanwhile.
SLOW = {"null_token_s": 0.4}


@pytest.fixture(scope="module")
def slow(tiny_artifact: Path) -> Iterator[RunningGateway]:
    """A gateway with a slow worker, for several tests. Each looks at the newest request, which is its own."""
    with contextlib.ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="pm-slow-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        url = f"sqlite:///{folder / 'promptmill.db'}"
        with open_database(url) as database:
            upgrade_schema(database)
        settings = changed(prepared(Settings(home=folder / "home"), url, tiny_artifact), engine=SLOW)
        gateway = stack.enter_context(running_gateway(settings))
        stack.enter_context(running_worker(settings, tiny_artifact))
        yield gateway


def newest_batch(database: Database) -> BatchRow:
    return interactive_batches(database)[-1]


def wait_until_running(database: Database, before: int) -> None:
    """before: requests that were there before."""

    def is_running() -> bool:
        with database.read() as connection:
            return any(
                queries.count_requests(connection, batch.id).get(RequestStatus.RUNNING)
                for batch in interactive_batches(database)[before:]
            )

    wait_until(is_running, seconds=PATIENCE_S, what="the request's start")


def wait_for_batch(database: Database, status: BatchStatus) -> None:
    wait_until(lambda: newest_batch(database).status is status, seconds=PATIENCE_S, what=f"a batch that is {status}")


@pytest.mark.parametrize("stream", [False, True])
def test_a_caller_that_goes_away_ends_its_request(slow: RunningGateway, stream: bool) -> None:
    """Whether it has heard anything yet or not."""
    body = json.dumps({"model": MODEL, "messages": messages(), "stream": stream, "max_tokens": 16}).encode()
    before = len(interactive_batches(slow.database))
    address = slow.url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1]))) as connection:
        connection.sendall(
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {slow.url}\r\nAuthorization: Bearer {slow.key()}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        wait_until_running(slow.database, before)
        if stream:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
    wait_for_batch(slow.database, BatchStatus.CANCELLED)


def test_a_worker_hears_that_nobody_waits(slow: RunningGateway) -> None:
    """What it does then: tests/workers/test_leases.py."""
    with open_queue_server(slow.settings) as server:
        app = make_app(slow.settings.queue.model_copy(update={"url": server.url}))
        told = app.control.broadcast(
            GIVE_UP, arguments={"request_ids": [1, 2]}, reply=True, limit=1, timeout=PATIENCE_S
        )
        app.close()
    (worker,) = told
    assert list(worker.values()) == [{"ok": 2}]


def test_a_repeatable_call_runs_on_when_its_caller_goes_away(slow: RunningGateway) -> None:
    """The call with the same key picks its answer up."""
    options: dict[str, Any] = {
        "model": MODEL,
        "messages": messages(),
        "max_tokens": 4,
        "extra_headers": {"Idempotency-Key": "k"},
    }
    with slow.client(max_retries=0) as client:
        with client.chat.completions.create(**options, stream=True) as stream:
            next(iter(stream))
        answer = client.chat.completions.create(**options, stream=True)
        assert len(streamed(answer)) > 0
    wait_for_batch(slow.database, BatchStatus.COMPLETED)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_takes_too_long_is_given_up(
    slow: RunningGateway, make_gateway: MakeGateway, stream: bool
) -> None:
    impatient = make_gateway(changed(slow.settings, gateway={"request_timeout_s": 2.0}))
    options: dict[str, Any] = {"model": MODEL, "messages": messages(), "max_tokens": 16}
    with impatient.client(max_retries=0) as client, pytest.raises(openai.APIError) as caught:
        if stream:
            streamed(client.chat.completions.create(**options, stream=True))
        else:
            client.chat.completions.create(**options)
    assert caught.value.code == "request_timed_out"
    if isinstance(caught.value, openai.APIStatusError):
        assert caught.value.status_code == 504
        assert caught.value.response.headers["retry-after"]
    wait_until(lambda: newest_batch(slow.database).is_final, seconds=PATIENCE_S, what="the request's end")
    batch = newest_batch(slow.database)
    assert batch.completed_requests == 0
    # On a busy machine its worker may notice the passed deadline before the gateway has said so.
    assert batch.status is BatchStatus.EXPIRED or batch.failed_requests == 1


def test_a_stream_goes_on_where_a_killed_worker_left_it(
    served_settings: Settings, make_gateway: MakeGateway, start_worker: StartWorker
) -> None:
    """Another worker computes the same; what was sent already is not sent twice."""
    settings = changed(served_settings, engine=SLOW)
    gateway = make_gateway(settings)
    start_worker(settings)
    start_worker(settings)
    with gateway.client(max_retries=0) as client:
        pieces: list[str] = []
        for chunk in client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=16, stream=True):
            pieces.append(chunk.choices[0].text)
            if len(pieces) == 2:
                kill_holder(gateway.database)
        assert "".join(pieces) == ANSWER
    batch = newest_batch(gateway.database)
    assert batch.status is BatchStatus.COMPLETED
    with gateway.database.read() as connection:
        (request_id,) = queries.request_ids(connection, batch.id)
        attempts = queries.attempts_of(connection, request_id)
    assert [attempt["outcome"] for attempt in attempts] == ["abandoned", "completed"]


def kill_holder(database: Database) -> None:
    """Kill the worker that runs the request, and say so as its supervisor would."""
    with database.read() as connection:
        holders = queries.live_workers(connection, database.now())
    with database.write() as connection:
        for worker in holders:
            held = transitions.abandon_worker(connection, worker.name, database.now(), exit_code=-9)
            if held:
                os.kill(worker.pid, signal.SIGKILL)


def test_a_second_attempt_that_answers_otherwise_ends_the_stream_with_an_error() -> None:
    """Never two answers in one text."""
    wait = Wait(7, 1)
    tell(wait, 1, 0, "Once upon")
    tell(wait, 2, 0, "Once")
    assert not wait.differs
    tell(wait, 2, 4, " upon a time")
    assert wait.heard == ["Once upon a time"]
    tell(wait, 1, 9, " the wrong attempt, long gone")
    assert wait.heard == ["Once upon a time"]
    tell(wait, 2, 99, "after a gap")
    assert wait.heard == ["Once upon a time"]
    assert not wait.differs
    tell(wait, 3, 0, "Twice")
    assert wait.differs


def test_an_answer_that_comes_with_the_end_is_the_answer() -> None:
    wait = Wait(7, 1)
    told = {"status_code": 200, "response": "{}", "error_code": None}
    wait.note({"request": 7, "attempt": 1, "text": [], "ended": True, "answer": told})
    assert wait.answer == Answer(7, 200, "{}", None)


def tell(wait: Wait, attempt: int, at: int, text: str) -> None:
    wait.note({"request": 7, "attempt": attempt, "text": [[0, at, text]], "ended": False})


def test_a_stream_outlives_a_restart_of_redis(
    sqlite_settings: Settings, make_gateway: MakeGateway, start_worker: StartWorker
) -> None:
    """Nothing is lost or repeated, and the next call finds its worker too."""
    server = QueueServer(keeps=False)
    try:
        settings = changed(sqlite_settings, engine=SLOW, queue={"url": server.url})
        gateway = make_gateway(settings)
        start_worker(settings)
        with gateway.client(max_retries=0) as client:
            pieces: list[str] = []
            for chunk in client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=16, stream=True):
                pieces.append(chunk.choices[0].text)
                if len(pieces) == 2:
                    server.kill()
                    server.start()
            assert "".join(pieces) == ANSWER
            again = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=2)
            assert again.choices[0].text == ANSWER[-2:]
    finally:
        server.close()


def test_calls_wait_out_a_redis_that_is_away(
    sqlite_settings: Settings, make_gateway: MakeGateway, start_worker: StartWorker
) -> None:
    """The request is in the database; it is sent when Redis is back, and the caller notices nothing but the time."""
    server = QueueServer(keeps=False)
    try:
        settings = changed(sqlite_settings, queue={"url": server.url})
        gateway = make_gateway(settings)
        start_worker(settings)
        answers: list[str] = []
        with gateway.client(max_retries=0) as client:

            def call() -> None:
                answers.append(client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=16).choices[0].text)

            server.kill()
            caller = threading.Thread(target=call)
            caller.start()
            wait_until(lambda: interactive_batches(gateway.database), seconds=PATIENCE_S, what="the request")
            server.start()
            caller.join(PATIENCE_S)
        assert answers == [ANSWER]
    finally:
        server.close()


def test_a_real_model_streams_what_it_answers(
    sqlite_settings: Settings, make_gateway: MakeGateway, start_worker: StartWorker
) -> None:
    """Random weights: its text has broken characters, whose pieces come in several tokens."""
    settings = changed(sqlite_settings, engine={"flavour": "cpu", "threads": 1, "max_batch_size": 4})
    gateway = make_gateway(settings)
    start_worker(settings)
    with gateway.client() as client:
        for options in ({"temperature": 0}, {"temperature": 1.2, "seed": 7}, {"temperature": 0, "stop": ["e", "zz"]}):
            chat: dict[str, Any] = {"model": MODEL, "messages": messages("Say it."), "max_tokens": 48, **options}
            whole = client.chat.completions.create(**chat)
            chunks = list(client.chat.completions.create(**chat, stream=True))
            assert streamed(chunks) == whole.choices[0].message.content
            assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
        chat = {"model": MODEL, "messages": messages("Say it."), "max_tokens": 4, "temperature": 0, "logprobs": True}
        whole = client.chat.completions.create(**chat)
        chunks = list(client.chat.completions.create(**chat, stream=True))
        assert streamed(chunks) == whole.choices[0].message.content
        (told,) = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
        assert whole.choices[0].logprobs is not None
        assert whole.choices[0].logprobs.content is not None
        assert len(whole.choices[0].logprobs.content) == 4
        assert told.model_dump() == whole.choices[0].logprobs.model_dump()


@pytest.mark.drill
def test_a_chat_is_answered_while_bulk_work_holds_every_thread_and_row(
    sqlite_settings: Settings, make_gateway: MakeGateway, start_worker: StartWorker
) -> None:
    """A bulk request takes 160 s here, and there are more than rows; a chat of one token is answered meanwhile."""
    settings = changed(sqlite_settings, engine={"null_token_s": 10.0, "max_batch_size": 4}, queue={"chunk_size": 4})
    gateway = make_gateway(settings)
    start_worker(settings)
    with gateway.client() as client:
        lines = [chat_line(f"c{number}", f"question {number}", max_tokens=16) for number in range(64)]
        batch = client.batches.create(
            input_file_id=upload(client, lines).id, endpoint="/v1/chat/completions", completion_window="24h"
        )

        def is_full() -> bool:
            with gateway.database.read() as connection:
                counts = queries.count_requests(connection, 1)
            return counts.get(RequestStatus.RUNNING, 0) >= 12  # in three chunks, one for each of Celery's threads

        wait_until(is_full, seconds=PATIENCE_S, what="bulk work in every thread")
        answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=1)
        assert answer.choices[0].text == PROMPT[-1]
        found = client.batches.retrieve(batch.id)
        assert found.request_counts is not None
        assert found.request_counts.completed == 0


def test_a_full_line_is_a_rate_limit_to_the_sdk(
    sqlite_settings: Settings, make_gateway: MakeGateway, app: Celery
) -> None:
    """A worker is there, and others wait for it already."""
    gateway = make_gateway(changed(sqlite_settings, gateway={"max_waiting_requests": 2}))
    with gateway.database.write() as connection:
        now = gateway.database.now()
        transitions.register_worker(connection, NewWorker("w1", "elsewhere", 1, MODEL), now)
        transitions.update_worker(connection, "w1", now, status=WorkerStatus.READY)
    body = parse_body(Endpoint.CHAT, json.dumps({"model": MODEL, "messages": messages()}))
    for _ in range(2):
        asked = interactive.write(
            gateway.database,
            body,
            endpoint=Endpoint.CHAT,
            model=MODEL,
            tenant="default",
            door=Door.INBOX,
            timeout_s=PATIENCE_S,
        )
        interactive.send(gateway.database, app, [asked])
    with gateway.client(max_retries=0) as client, pytest.raises(openai.RateLimitError) as caught:
        client.chat.completions.create(model=MODEL, messages=messages())
    assert caught.value.code == "queue_full"
    assert int(caught.value.response.headers["retry-after"]) > 0
    assert len(interactive_batches(gateway.database)) == 2
