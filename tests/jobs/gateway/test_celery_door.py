"""The Celery door, from a process that has Celery and nothing of ours."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery

from jobs import celery_door, inbox
from jobs.audit import audit_request
from jobs.celery_door import NoTask, parse_message
from jobs.doors import serve_doors
from jobs.keys import make_key
from jobs.queue import queue_name
from jobs.settings import Settings, environment_of
from jobs.up import StopSignals, UpObserver
from storage import queries, transitions
from storage.database import Database, open_database
from storage.transitions import set_quotas
from tests.conftest import wait_until
from tests.jobs.gateway.conftest import MODEL, PATIENCE_S, StartWorker, chat_line

# What stands in for a machine without promptmill: its packages cannot be imported.
PRODUCER = """
import json, sys

class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("jobs", "storage", "workers", "pydantic", "sqlalchemy", "structlog"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Nothing())
from celery import Celery

url, calls = sys.argv[1], json.load(sys.stdin)
app = Celery(broker=url, backend=url)
sent = [app.send_task(name, kwargs=kwargs, queue="promptmill.door", **options) for name, kwargs, options in calls]
for result in sent:
    try:
        print(json.dumps({"answer": result.get(timeout=120)}))
    except Exception as error:
        print(json.dumps({"raised": type(error).__name__, "text": str(error)}))
"""


def produce(settings: Settings, *calls: tuple[str, dict[str, Any], dict[str, Any]]) -> list[dict[str, Any]]:
    """Send tasks from a process of its own and wait there for what becomes of them."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PRODUCER, settings.queue.url],
        input=json.dumps(calls),
        capture_output=True,
        text=True,
        timeout=200,
        cwd="/",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def chat(token: str | None, content: str = "Say it again.", **more: Any) -> dict[str, Any]:
    kwargs = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 8, **more}
    return kwargs if token is None else {**kwargs, "token": token}


@contextlib.contextmanager
def door_process(settings: Settings) -> Iterator[subprocess.Popen[str]]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PROMPTMILL_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "jobs.cli", "door"],
        env=environment | environment_of(settings),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=settings.home,
        start_new_session=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "are open" in line:
            break
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


@pytest.fixture
def doors(served_settings: Settings) -> Iterator[Settings]:
    """The doors in a thread, on either kind of database."""
    yield from _doors(served_settings)


@pytest.fixture
def sqlite_doors(sqlite_settings: Settings) -> Iterator[Settings]:
    yield from _doors(sqlite_settings)


def _doors(settings: Settings) -> Iterator[Settings]:
    import threading

    signals = StopSignals()
    opened = threading.Event()
    observer = UpObserver(note=lambda _text: opened.set())
    thread = threading.Thread(target=serve_doors, args=(settings, observer, signals))
    with pytest.MonkeyPatch.context() as patch:
        # Each door looks whether it is to close only when a read ends, with something or nothing.
        patch.setattr(celery_door, "TAKE_S", 0.1)
        patch.setattr(inbox, "READ_S", 0.1)
        thread.start()
        try:
            assert opened.wait(PATIENCE_S)
            yield settings
        finally:
            signals.add()
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


@dataclass(frozen=True)
class Sent:
    """A task that was sent. In this process results are read from Redis as they lie there: Celery's own waiting keeps
    a subscription that outlives the test's server."""

    id: str
    client: redis.Redis

    def ready(self) -> bool:
        return bool(self.client.exists(f"celery-task-meta-{self.id}"))

    def result(self) -> Any:
        """The answer, or `Exception: text`."""
        wait_until(self.ready, seconds=PATIENCE_S, what="the result")
        found = json.loads(str(self.client.get(f"celery-task-meta-{self.id}")))
        if found["status"] == "SUCCESS":
            return found["result"]
        return f"{found['result']['exc_type']}: {found['result']['exc_message'][0]}"


Send = Callable[..., Sent]


@pytest.fixture
def send(sqlite_settings: Settings, queue_client: redis.Redis) -> Iterator[Send]:
    app = Celery(broker=sqlite_settings.queue.url, set_as_current=False)

    def send_task(kwargs: dict[str, Any], name: str = celery_door.GENERATE, **options: Any) -> Sent:
        sent = app.send_task(name, kwargs=kwargs, queue=celery_door.QUEUE, ignore_result=True, **options)
        return Sent(sent.id, queue_client)

    yield send_task
    app.close()


def test_an_application_with_only_celery_gets_openais_response(doors: Settings, start_worker: StartWorker) -> None:
    start_worker(doors)
    with open_database(doors.database.url) as database:
        key = make_key(database, tenant="acme", name="app")
        lines = [chat_line(f"line-{n}", f"number {n}") for n in range(3)]
        urgent = {"priority": 9}
        batch = {"token": key.key, "lines": lines}
        answers = produce(
            doors,
            (celery_door.GENERATE, chat(key.key, "one two three", custom_id="mine"), {}),
            (celery_door.GENERATE, {"model": MODEL, "prompt": "a b c", "token": key.key, "max_tokens": 4}, urgent),
            (celery_door.SUBMIT_BATCH, {**batch, "metadata": {"by": "celery"}, "paused": True}, {}),
            (celery_door.GENERATE, chat(key.key, temprature=1), {}),
            (celery_door.GENERATE, chat(key.key, "x" * 500), {}),
            (celery_door.GENERATE, chat(key.key, model="gpt-4"), {}),
            (celery_door.GENERATE, chat("pm-" + "A" * 43), {}),
            (celery_door.GENERATE, chat(None), {}),
            (celery_door.GENERATE, chat(key.key, stream=True), {}),
            (celery_door.SUBMIT_BATCH, {**batch, "input_file_id": "file-1"}, {}),
            (celery_door.SUBMIT_BATCH, {"token": key.key, "lines": [{"custom_id": "a"}]}, {}),
            (celery_door.SUBMIT_BATCH, {"token": key.key, "input_file_id": "file-1", "endpoint": lines[0]["url"]}, {}),
            ("promptmill.nothing", {}, {}),
        )
        chatted, completed, ordered, *refused = answers
        assert chatted["answer"]["object"] == "chat.completion"
        assert chatted["answer"]["choices"][0]["message"]["role"] == "assistant"
        assert completed["answer"]["object"] == "text_completion"
        assert completed["answer"]["usage"]["completion_tokens"] == 4
        assert ordered["answer"]["status"] == "validating"
        assert ordered["answer"]["metadata"] == {"by": "celery"}
        with database.write() as connection:
            ordered_batch = queries.find_batch(connection, ordered["answer"]["id"])
            assert ordered_batch is not None
            assert ordered_batch.paused_at is not None
            assert transitions.resume_batch(connection, ordered_batch.id, database.now())
        assert [(each["raised"], each["text"].partition(":")[0]) for each in refused] == [
            ("ValueError", "unknown_parameter"),
            ("ValueError", "context_length_exceeded"),
            ("ValueError", "model_not_found"),
            ("PermissionError", "invalid_api_key"),
            ("PermissionError", "invalid_api_key"),
            ("ValueError", "unsupported_value"),
            ("ValueError", "missing_required_parameter"),
            ("ValueError", "missing_required_parameter"),
            ("ValueError", "file_not_found"),
            ("ValueError", "unknown_task"),
        ]
        assert "did you mean temperature" in refused[0]["text"]
        assert refused[2]["text"] == (
            f'model_not_found: there is no model "gpt-4", only {MODEL}; take one of these, or convert it and start a '
            "worker: promptmill up"
        )
        assert refused[5]["text"] == (
            "unsupported_value: stream is true, which only a call over HTTP of its own can do; remove it: the answer "
            "comes whole"
        )
        assert refused[7]["text"] == (
            "missing_required_parameter: line 1: url is missing; add /v1/chat/completions or /v1/completions"
        )

        def has_ended() -> bool:
            with database.read() as connection:
                batch = queries.find_batch(connection, ordered["answer"]["id"])
            assert batch is not None
            assert not batch.is_final or batch.completed_requests == 3, batch
            return batch.is_final

        wait_until(has_ended, seconds=PATIENCE_S, what="the batch's end")
        with database.read() as connection:
            made = [batch for batch in queries.list_batches(connection) if batch.tenant == "acme"]
        assert {(batch.door, batch.api_key_id) for batch in made} == {("celery", key.row.id)}
        record = audit_request(database, chatted["answer"]["id"]).record
        assert (record.door, record.api_key, record.api_key_name) == ("celery", key.row.public_id, "app")
        assert (record.tenant, record.custom_id) == ("acme", "mine")


def test_a_message_that_comes_twice_is_one_request(
    sqlite_doors: Settings, sqlite_database: Database, send: Send, queue_client: redis.Redis
) -> None:
    key = make_key(sqlite_database, tenant="acme", name="app").key
    for _ in range(3):
        send(chat(key), task_id="the-same")
        send({"token": key, "lines": [chat_line("a")]}, celery_door.SUBMIT_BATCH, task_id="the-same-batch")
    wait_until(lambda: not queue_client.exists(celery_door.QUEUE), what="the door's work")
    wait_until(Sent("the-same-batch", queue_client).ready, what="the batch")
    wait_until(lambda: not list(queue_client.scan_iter(f"{celery_door.TAKEN}*")), what="empty hands")
    with sqlite_database.read() as connection:
        batches = queries.list_batches(connection)
    assert sorted(batch.is_interactive for batch in batches) == [False, True]
    assert len(list(sqlite_doors.files_dir.glob("upload-*"))) == 1


def test_what_a_dead_door_had_in_its_hands_another_takes_up(
    sqlite_settings: Settings,
    sqlite_database: Database,
    send: Send,
    queue_client: redis.Redis,
) -> None:
    """In the order in which it came, and before what came later."""
    key = make_key(sqlite_database, tenant="acme", name="app").key
    sent = [send(chat(key, f"call {n}", temprature=n)) for n in range(4)]
    dead = celery_door.TAKEN + "dead"
    for _ in range(3):
        queue_client.lmove(celery_door.QUEUE, dead, "RIGHT", "LEFT")
    queue_client.sadd(celery_door.NAMES, "dead")
    for _ in _doors(sqlite_settings):
        assert all("unknown_parameter" in each.result() for each in sent)
        assert not queue_client.exists(dead)
        wait_until(lambda: not queue_client.sismember(celery_door.NAMES, "dead"), what="the end of the dead one")


@pytest.mark.drill
def test_a_killed_door_loses_no_task(
    sqlite_settings: Settings, sqlite_database: Database, send: Send, start_worker: StartWorker
) -> None:
    """Killed again and again while tasks come in: each gets its one answer."""
    start_worker(sqlite_settings)
    key = make_key(sqlite_database, tenant="acme", name="app").key
    results: list[Sent] = []
    for _ in range(4):
        with door_process(sqlite_settings) as process:
            results += [send(chat(key, f"call {len(results) + n}")) for n in range(40)]
            newest = results[-40:]
            wait_until(lambda newest=newest: any(result.ready() for result in newest), seconds=PATIENCE_S)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
    with door_process(sqlite_settings):
        for result in results:
            assert result.result()["object"] == "chat.completion"
    with sqlite_database.read() as connection:
        assert len(queries.list_batches(connection, 1000)) == len(results)


def test_what_waits_beyond_the_bound_waits_in_redis(
    sqlite_settings: Settings, sqlite_database: Database, send: Send, queue_client: redis.Redis
) -> None:
    """Nothing answers here, so the first few stay open and the rest stay where they are."""
    key = make_key(sqlite_database, tenant="acme", name="app").key
    settings = sqlite_settings.model_copy(
        update={"door": sqlite_settings.door.model_copy(update={"max_open_calls": 5})}
    )
    for n in range(50):
        send(chat(key, f"call {n}"))
    for _ in _doors(settings):
        wait_until(lambda: queue_client.hlen(celery_door.OPEN) >= 5, what="open calls")
        time.sleep(0.5)  # for what must not happen
        assert queue_client.hlen(celery_door.OPEN) <= 5 + celery_door.TAKERS
        assert queue_client.llen(celery_door.QUEUE) >= 50 - 5 - celery_door.TAKERS


def test_a_task_that_expired_or_runs_out_of_time_is_not_answered(
    sqlite_doors: Settings, sqlite_database: Database, send: Send, start_worker: StartWorker
) -> None:
    start_worker(sqlite_doors)
    key = make_key(sqlite_database, tenant="acme", name="app").key
    late = send(chat(key), expires=-10)
    assert late.result().startswith("TimeoutError: expired: ")
    assert "unsupported_eta" in str(send(chat(key), countdown=100).result())
    assert "unknown_parameter" not in str(send(chat(key, timeout_s=60), expires=60).result())


def test_a_request_whose_time_is_over_raises_a_timeout(
    sqlite_doors: Settings, sqlite_database: Database, send: Send, start_worker: StartWorker
) -> None:
    worker = start_worker(sqlite_doors)
    worker.stop(30.0)
    key = make_key(sqlite_database, tenant="acme", name="app").key
    error = send(chat(key, timeout_s=0.2)).result()
    assert error == (
        "TimeoutError: request_timed_out: The time that the caller allowed was over before the request was answered."
    )


def test_a_tenants_queued_tokens_bound_this_door_too(
    sqlite_doors: Settings, sqlite_database: Database, send: Send, queue_client: redis.Redis
) -> None:
    with sqlite_database.write() as connection:
        set_quotas(connection, "acme", {"max_queued_prompt_tokens": 60, "max_running_batches": 0})
    key = make_key(sqlite_database, tenant="acme", name="app").key
    send(chat(key, "x" * 80))
    wait_until(lambda: queue_client.hlen(celery_door.OPEN) == 1, what="the first one")
    error = send(chat(key, "y" * 80)).result()
    assert error.startswith("RuntimeError: token_limit_exceeded: ")
    error = send({"token": key, "lines": [chat_line("a")]}, celery_door.SUBMIT_BATCH).result()
    assert "rate_limit_exceeded" in str(error)


GOOD: dict[str, Any] = {
    "body": json.dumps([[], {"token": "pm-" + "a" * 43}, {}]),
    "content-type": "application/json",
    "headers": {"task": celery_door.GENERATE, "id": "an-id"},
    "properties": {},
}


@pytest.mark.parametrize(
    ("message", "code", "task_id"),
    [
        (b"", "malformed_message", None),
        (b"garbage \xff", "malformed_message", None),
        (b"[1, 2]", "malformed_message", None),
        (b"[" * 10_000, "malformed_message", None),
        ({**GOOD, "headers": {"task": celery_door.GENERATE}}, "malformed_message", None),
        ({**GOOD, "headers": {"task": celery_door.GENERATE, "id": "x" * 300}}, "malformed_message", None),
        ({**GOOD, "headers": []}, "malformed_message", None),
        ({**GOOD, "headers": 5}, "malformed_message", None),
        ({**GOOD, "body": "not json"}, "malformed_message", "an-id"),
        ({**GOOD, "body": "[[], {}]"}, "malformed_message", "an-id"),
        ({**GOOD, "body": "[" * 10_000}, "malformed_message", "an-id"),
        ({**GOOD, "properties": {"body_encoding": "base64"}, "body": "!!"}, "malformed_message", "an-id"),
        ({**GOOD, "content-type": "application/x-python-serialize"}, "unsupported_content_type", "an-id"),
        ({**GOOD, "headers": {**GOOD["headers"], "compression": "gzip"}}, "unsupported_compression", "an-id"),
        ({**GOOD, "headers": {"task": "os.system", "id": "an-id"}}, "unknown_task", "an-id"),
        ({**GOOD, "headers": {"task": [1], "id": "an-id"}}, "unknown_task", "an-id"),
        ({**GOOD, "body": '[["x"], {}, {}]'}, "invalid_arguments", "an-id"),
        ({**GOOD, "body": "[[], [], {}]"}, "invalid_arguments", "an-id"),
        ({**GOOD, "headers": {**GOOD["headers"], "expires": "soon"}}, "malformed_message", "an-id"),
        ({**GOOD, "headers": {**GOOD["headers"], "eta": "2030-01-01T00:00:00"}}, "unsupported_eta", "an-id"),
    ],
)  # fmt: skip
def test_messages_of_other_forms_are_told_apart(message: Any, code: str, task_id: str | None) -> None:
    with pytest.raises(NoTask) as refused:
        parse_message(message if isinstance(message, bytes) else json.dumps(message).encode())
    assert (refused.value.code, refused.value.task_id) == (code, task_id)


def test_both_versions_of_celerys_protocol_are_read() -> None:
    assert parse_message(json.dumps(GOOD).encode()).kwargs == {"token": "pm-" + "a" * 43}
    body = {"task": celery_door.GENERATE, "id": "old", "args": [], "kwargs": {"model": "m"}, "expires": None}
    old = parse_message(json.dumps({**GOOD, "headers": {}, "body": json.dumps(body)}).encode())
    assert (old.id, old.name, old.kwargs) == ("old", celery_door.GENERATE, {"model": "m"})


def test_malformed_messages_stop_nobody_and_are_kept_without_keys(
    sqlite_doors: Settings,
    sqlite_database: Database,
    send: Send,
    queue_client: redis.Redis,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A pickle, garbage, half a message: none of it is run, raised or logged, and the next task goes through."""
    key = make_key(sqlite_database, tenant="acme", name="app").key
    pickled = send(chat(key, "in a pickle"), serializer="pickle")
    for message in (b"garbage", json.dumps({"token": key}).encode(), b"[" * 50_000):
        queue_client.lpush(celery_door.QUEUE, message)
    assert "unsupported_content_type" in str(pickled.result())
    refused = send(chat(key, "a secret prompt", temprature=1), serializer="json")
    assert "unknown_parameter" in str(refused.result())
    wait_until(lambda: queue_client.xlen(celery_door.DEAD) == 4, what="four letters")
    letters = [fields for _, fields in queue_client.xrange(celery_door.DEAD)]
    assert {letter["code"] for letter in letters} == {"malformed_message", "unsupported_content_type"}
    assert not any(key in letter["entry"] for letter in letters)
    assert max(len(letter["entry"]) for letter in letters) <= 8192
    said = "".join(capfd.readouterr())
    assert key not in said
    assert "secret prompt" not in said


def test_a_task_for_the_door_that_was_sent_to_the_workers_is_dropped_and_not_logged(
    sqlite_settings: Settings, start_worker: StartWorker
) -> None:
    """Celery itself would log the whole message, the key and the prompt in it."""
    start_worker(sqlite_settings)
    key = "pm-" + "k" * 43
    app = Celery(broker=sqlite_settings.queue.url, set_as_current=False)
    for serializer in ("json", "pickle"):
        app.send_task(
            celery_door.GENERATE,
            kwargs=chat(key, "a secret prompt"),
            queue=queue_name(MODEL, is_interactive=False),
            serializer=serializer,
            ignore_result=True,
        )
    app.close()
    logs = sqlite_settings.logs_dir

    def logged() -> str:
        return "".join(path.read_text(errors="replace") for path in logs.glob("worker*"))

    told = '"event": "message_rejected"'  # in the JSON of worker.log
    wait_until(lambda: logged().count(told) == 2, seconds=PATIENCE_S, what="two refusals")
    assert key not in logged()
    assert "secret prompt" not in logged()


def test_a_door_waits_out_a_redis_that_was_emptied(
    sqlite_doors: Settings,
    sqlite_database: Database,
    send: Send,
    queue_client: redis.Redis,
    start_worker: StartWorker,
) -> None:
    start_worker(sqlite_doors)
    key = make_key(sqlite_database, tenant="acme", name="app").key
    queue_client.flushall()
    assert send(chat(key)).result()["object"] == "chat.completion"


def test_results_expire(sqlite_doors: Settings, sqlite_database: Database, send: Send, queue_client: Any) -> None:
    key = make_key(sqlite_database, tenant="acme", name="app").key
    sent = send(chat(key, temprature=1))
    sent.result()
    assert 0 < queue_client.ttl(f"celery-task-meta-{sent.id}") <= sqlite_doors.door.result_lifetime_s


def test_the_program_runs_as_a_command(sqlite_settings: Settings, tmp_path: Path) -> None:
    with door_process(sqlite_settings) as process:
        folder = sqlite_settings.home / "run"
        wait_until(lambda: list(folder.glob("door-*.alive")), what="a sign of life")
        alive = list(folder.glob("door-*.alive"))
        assert len(alive) == 1
        process.terminate()
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0
        assert not alive[0].exists()
