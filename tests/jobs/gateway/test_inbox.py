"""The Redis inbox: entries in, answers out, and what is no entry set aside."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import redis

from jobs import inbox
from jobs.inbox import Envelope
from jobs.keys import make_key
from jobs.settings import Settings
from storage import queries
from storage.database import Database, open_database
from tests.conftest import wait_until
from tests.jobs.gateway.conftest import MODEL, PATIENCE_S, StartWorker, chat_line
from tests.jobs.gateway.test_celery_door import _doors, door_process, sqlite_doors

__all__ = ["sqlite_doors"]  # a fixture

ROOT = Path(__file__).parent.parent.parent.parent


def entry(token: str, content: str = "Say it again.", **more: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 8}
    return {"token": token, "body": body, **more}


def put(client: redis.Redis, request: object) -> str:
    text = request if isinstance(request, str | bytes) else json.dumps(request)
    return str(client.xadd(inbox.STREAM, {"request": text}))


def reply(client: redis.Redis, name: str) -> dict[str, Any]:
    wait_until(lambda: client.llen(name), seconds=PATIENCE_S, what=f"a reply on {name}")
    found: dict[str, Any] = json.loads(str(client.lpop(name)))
    return found


def test_requests_and_batches_are_answered_on_the_list_that_they_name(
    sqlite_doors: Settings, start_worker: StartWorker, queue_client: redis.Redis
) -> None:
    """On SQLite; that the database's kind makes no difference here, the Celery door's tests show."""
    start_worker(sqlite_doors)
    with open_database(sqlite_doors.database.url) as database:
        key = make_key(database, tenant="acme", name="app")
        entry_id = put(
            queue_client, entry(key.key, custom_id="mine", reply_to="promptmill.reply.a", reply_expires_s=77)
        )
        put(queue_client, entry(key.key, "nobody waits for this one"))
        answer = reply(queue_client, "promptmill.reply.a")
        assert (answer["id"], answer["custom_id"], answer["status_code"], answer["error"]) == (
            entry_id,
            "mine",
            200,
            None,
        )
        assert answer["response"]["object"] == "chat.completion"
        put(
            queue_client,
            {
                "token": key.key,
                "batch": {"lines": [chat_line("a"), chat_line("b")], "metadata": {"by": "inbox"}},
                "reply_to": "promptmill.reply.b",
            },
        )
        batch = reply(queue_client, "promptmill.reply.b")["response"]
        assert (batch["object"], batch["status"], batch["metadata"]) == ("batch", "validating", {"by": "inbox"})

        def has_ended() -> bool:
            with database.read() as connection:
                found = queries.find_batch(connection, batch["id"])
            assert found is not None
            assert not found.is_final or found.completed_requests == 2, found
            return found.is_final

        wait_until(has_ended, seconds=PATIENCE_S, what="the batch's end")
        wait_until(lambda: not queue_client.hlen(inbox.OPEN), seconds=PATIENCE_S, what="all answers")
        assert queue_client.xlen(inbox.STREAM) == 0
        with database.read() as connection:
            made = queries.list_batches(connection)
        assert {(each.door, each.tenant, each.api_key_id) for each in made} == {("inbox", "acme", key.row.id)}
        assert len(made) == 3


def test_what_is_no_entry_is_set_aside_with_the_reason(
    sqlite_doors: Settings, sqlite_database: Database, queue_client: redis.Redis, capfd: pytest.CaptureFixture[str]
) -> None:
    key = make_key(sqlite_database, tenant="acme", name="app").key
    queue_client.rpush("promptmill.door.x", "untouched")
    wrong: list[tuple[Any, str]] = [
        ("garbage", "invalid_json"),
        ([], "invalid_json"),
        ("[" * 10_000, "invalid_json"),
        (b"\xff\xfe", "invalid_json"),
        ({}, "missing_required_parameter"),
        (entry(key, secret=1), "unknown_parameter"),
        ({"token": key}, "invalid_value"),
        (entry("pm-" + "A" * 43), "invalid_api_key"),
        (entry(key, custom_id=""), "empty_string"),
        ({**entry(key), "body": {"model": "gpt-4", "messages": [{"role": "user", "content": "x"}]}}, "model_not_found"),
        ({**entry(key), "body": {"model": MODEL, "messages": []}}, "empty_array"),
        (entry(key, reply_to="promptmill.door"), "invalid_value"),
        (entry(key, reply_to="promptmill.reply.\n"), "invalid_value"),
        ({"token": key, "batch": {"lines": []}}, "empty_array"),
        ({"token": key, "batch": {"lines": [chat_line("a")], "token": "x"}}, "invalid_api_key"),
    ]
    for request, _ in wrong[:-1]:
        put(queue_client, request)
    queue_client.xadd(inbox.STREAM, {"prompt": "a secret prompt"})
    wait_until(lambda: queue_client.xlen(inbox.DEAD) == len(wrong), seconds=PATIENCE_S, what="all letters")
    letters = [fields for _, fields in queue_client.xrange(inbox.DEAD)]
    assert [letter["code"] for letter in letters] == [code for _, code in wrong[:-1]] + ["missing_required_parameter"]
    assert not any(key in letter["entry"] for letter in letters)
    assert queue_client.xlen(inbox.STREAM) == 0
    assert queue_client.keys("promptmill.door*") == ["promptmill.door.x"] or not queue_client.llen("promptmill.door")
    said = "".join(capfd.readouterr())
    assert key not in said
    assert "secret prompt" not in said


def test_a_refused_entry_is_answered_too(
    sqlite_doors: Settings, sqlite_database: Database, queue_client: redis.Redis
) -> None:
    key = make_key(sqlite_database, tenant="acme", name="app").key
    refused = entry(key, reply_to="promptmill.reply.r", custom_id="mine")
    refused["body"]["temprature"] = 1
    put(queue_client, refused)
    answer = reply(queue_client, "promptmill.reply.r")
    assert (answer["status_code"], answer["response"], answer["custom_id"]) == (400, None, "mine")
    assert answer["error"]["code"] == "unknown_parameter"
    assert "did you mean temperature" in answer["error"]["message"]
    put(queue_client, {**refused, "body": {"model": "gpt-4", "messages": [{"role": "user", "content": "x"}]}})
    answer = reply(queue_client, "promptmill.reply.r")
    assert (answer["status_code"], answer["error"]["code"]) == (404, "model_not_found")
    assert answer["error"]["message"].startswith(f'there is no model "gpt-4", only {MODEL}; take one of these, ')
    put(queue_client, {"reply_to": "promptmill.reply.r", "token": 5})
    assert reply(queue_client, "promptmill.reply.r")["error"]["code"] == "invalid_type"


def test_replies_expire_and_dead_letters_are_bounded(
    sqlite_doors: Settings, sqlite_database: Database, queue_client: redis.Redis
) -> None:
    put(queue_client, {"reply_to": "promptmill.reply.r", "token": "x" * 20_000})
    wait_until(lambda: queue_client.exists("promptmill.reply.r"), what="the reply")
    assert 0 < queue_client.ttl("promptmill.reply.r") <= sqlite_doors.door.result_lifetime_s
    ((_, letter),) = queue_client.xrange(inbox.DEAD)
    assert len(letter["entry"]) <= 8192
    assert int(letter["bytes"]) > 20_000


@pytest.mark.drill
def test_a_killed_bridge_loses_nothing_and_answers_once(
    sqlite_settings: Settings, sqlite_database: Database, queue_client: redis.Redis, start_worker: StartWorker
) -> None:
    start_worker(sqlite_settings)
    key = make_key(sqlite_database, tenant="acme", name="app").key
    sent = []
    for _ in range(4):
        with door_process(sqlite_settings) as process:
            for _ in range(30):
                sent.append(put(queue_client, entry(key, f"call {len(sent)}", reply_to="promptmill.reply.all")))
            before = len(sent) - 30
            wait_until(lambda before=before: queue_client.llen("promptmill.reply.all") > before, seconds=PATIENCE_S)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
    with door_process(sqlite_settings):
        wait_until(
            lambda: queue_client.llen("promptmill.reply.all") >= len(sent), seconds=PATIENCE_S, what="all answers"
        )
        wait_until(lambda: not queue_client.xlen(inbox.STREAM), seconds=PATIENCE_S, what="an empty inbox")
        wait_until(lambda: not queue_client.hlen(inbox.OPEN), seconds=PATIENCE_S, what="nobody waiting")
    answers = [json.loads(text) for text in queue_client.lrange("promptmill.reply.all", 0, -1)]
    assert sorted(answer["id"] for answer in answers) == sorted(sent)
    assert {answer["status_code"] for answer in answers} == {200}
    with sqlite_database.read() as connection:
        assert len(queries.list_batches(connection, 1000)) == len(sent)


def test_what_a_dead_bridge_had_read_another_claims(
    sqlite_settings: Settings,
    sqlite_database: Database,
    queue_client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inbox, "CLAIM_S", 0.2)
    monkeypatch.setattr(inbox, "CLAIM_EVERY_S", 0.2)
    key = make_key(sqlite_database, tenant="acme", name="app").key
    queue_client.xgroup_create(inbox.STREAM, inbox.GROUP, id="0", mkstream=True)
    for n in range(5):
        put(queue_client, entry(key, f"call {n}"))
    queue_client.xreadgroup(inbox.GROUP, "dead", {inbox.STREAM: ">"}, count=5)
    for _ in _doors(sqlite_settings):
        wait_until(lambda: queue_client.hlen(inbox.OPEN) == 5, seconds=PATIENCE_S, what="five claimed")
        assert queue_client.xpending(inbox.STREAM, inbox.GROUP)["pending"] == 0


def test_an_inbox_that_was_removed_is_made_again(
    sqlite_doors: Settings, sqlite_database: Database, queue_client: redis.Redis
) -> None:
    key = make_key(sqlite_database, tenant="acme", name="app").key
    wait_until(lambda: queue_client.exists(inbox.STREAM), what="the inbox")
    queue_client.delete(inbox.STREAM)
    put(queue_client, entry(key))
    wait_until(lambda: queue_client.hlen(inbox.OPEN) == 1, seconds=PATIENCE_S, what="the request")


def test_what_waits_beyond_the_bound_waits_in_redis(
    sqlite_settings: Settings, sqlite_database: Database, queue_client: redis.Redis
) -> None:
    settings = sqlite_settings.model_copy(
        update={"door": sqlite_settings.door.model_copy(update={"max_open_calls": 5})}
    )
    key = make_key(sqlite_database, tenant="acme", name="app").key
    for n in range(30):
        put(queue_client, entry(key, f"call {n}"))
    for _ in _doors(settings):
        wait_until(lambda: queue_client.hlen(inbox.OPEN) == 5, what="five open")
        time.sleep(0.5)  # for what must not happen
        assert queue_client.hlen(inbox.OPEN) == 5
        assert queue_client.xlen(inbox.STREAM) == 25


def test_the_published_schema_is_the_one_that_is_checked() -> None:
    published = json.loads((ROOT / "docs" / "inbox.schema.json").read_text())
    fields = published["properties"]
    assert set(fields) == set(Envelope.model_fields)
    assert published["required"] == ["token"]
    assert published["additionalProperties"] is False
    assert fields["reply_to"]["pattern"] == r"^promptmill\.reply\.[A-Za-z0-9._:-]+$"


def test_a_shell_with_redis_cli_is_enough(
    sqlite_doors: Settings, sqlite_database: Database, queue_server_socket: Path, start_worker: StartWorker
) -> None:
    program = shutil.which("redis-cli") or shutil.which("valkey-cli")
    if program is None:
        pytest.skip("redis-cli is not installed")
    start_worker(sqlite_doors)
    key = make_key(sqlite_database, tenant="acme", name="app").key
    told = {"REDIS_CLI": f"{program} -s {queue_server_socket}", "MILL_KEY": key, "MODEL": MODEL}
    done = subprocess.run(
        ["bash", str(ROOT / "examples" / "inbox.sh"), 'Say "it" again.'],
        env=os.environ | told,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["response"]["object"] == "chat.completion"
    refused = subprocess.run(
        ["bash", str(ROOT / "examples" / "inbox.sh"), '"error":null} is what I ask.'],
        env=os.environ | told | {"MODEL": "gpt-4"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert json.loads(refused.stdout)["error"]["code"] == "model_not_found"
    assert refused.returncode == 1
