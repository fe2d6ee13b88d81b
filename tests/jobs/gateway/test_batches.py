"""`/v1/batches` from end to end: the SDK on one side, a worker process on the null engine on the other."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

import httpx2  # what the SDK speaks HTTP with
import openai
import pytest

from jobs.gateway import batches
from jobs.keys import make_key
from jobs.settings import Settings
from jobs.worker_process import WorkerProcess
from storage import queries, transitions
from storage.bulk import insert_rows
from storage.database import Database, open_database
from storage.models import FILES, BatchStatus, Door, FilePurpose
from storage.transitions import NewBatch
from tests.conftest import wait_until
from tests.jobs.gateway.conftest import (
    MODEL,
    MakeGateway,
    RunningGateway,
    StartWorker,
    changed,
    chat_line,
    upload,
    wait_for_status,
)
from tests.jobs.gateway.processes import gateway_process
from tests.jobs.gateway.test_files import listening_pid

CHAT = "/v1/chat/completions"
FIELDS = {
    "id",
    "object",
    "endpoint",
    "model",
    "errors",
    "input_file_id",
    "completion_window",
    "status",
    "output_file_id",
    "error_file_id",
    "created_at",
    "in_progress_at",
    "expires_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
    "request_counts",
    "usage",
    "metadata",
    "promptmill",
}
NO_USAGE = {
    "input_tokens": 0,
    "input_tokens_details": {"cached_tokens": 0},
    "output_tokens": 0,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 0,
}


def prompt_line(custom_id: str, prompt: str, **body: Any) -> dict[str, Any]:
    """The null engine answers with the end of the prompt: each answer can be told from the others."""
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": MODEL, "prompt": prompt, "max_tokens": 6, **body},
    }


def create(client: openai.OpenAI, lines: list[Any], endpoint: Any = CHAT, **options: Any) -> Any:
    given = {"completion_window": "24h", **options}
    return client.batches.create(input_file_id=upload(client, lines).id, endpoint=endpoint, **given)


def content(client: openai.OpenAI, file_id: str | None) -> dict[str, dict[str, Any]]:
    """custom_id -> the line of an output or error file."""
    assert file_id is not None
    found = [json.loads(row) for row in client.files.content(file_id).text.splitlines()]
    return {row["custom_id"]: row for row in found}


def plain(batch: Any) -> dict[str, Any]:
    return dict(batch.to_dict())


class TestEndToEnd:
    def test_a_batch_runs_and_its_object_says_so_at_each_step(
        self, served_settings: Settings, make_gateway: MakeGateway, start_worker: StartWorker
    ) -> None:
        """On both databases: every field of the object, before and after, and every answer to its own prompt."""
        gateway = make_gateway(served_settings)
        lines = [prompt_line(f"r{number}", f"number {number:06}") for number in range(40)]
        lines.append(prompt_line("bad", "x", max_tokens=0))
        with gateway.client() as client:
            before = int(time.time()) - 1
            made = plain(create(client, lines, "/v1/completions", metadata={"team": "a"}))
            assert set(made) == FIELDS
            assert made["id"].startswith("batch_")
            assert (made["object"], made["status"], made["endpoint"]) == ("batch", "validating", "/v1/completions")
            assert (made["completion_window"], made["metadata"]) == ("24h", {"team": "a"})
            assert made["request_counts"] == {"total": 0, "completed": 0, "failed": 0}
            assert made["usage"] == NO_USAGE
            assert made["created_at"] >= before
            assert made["expires_at"] == made["created_at"] + 86_400
            absent = FIELDS - {"id", "object", "endpoint", "input_file_id", "completion_window", "status", "created_at"}
            absent -= {"expires_at", "request_counts", "usage", "metadata", "promptmill"}
            assert {name: made[name] for name in absent} == dict.fromkeys(absent)

            running = plain(wait_for_status(client, made["id"], "in_progress"))
            assert (running["model"], running["request_counts"]["total"]) == (MODEL, 41)
            assert running["in_progress_at"] >= made["created_at"]
            assert running["promptmill"]["forecast"]["completes_at"] is None

            start_worker(served_settings)
            done = plain(wait_for_status(client, made["id"], "completed"))
            assert set(done) == FIELDS
            assert done["request_counts"] == {"total": 41, "completed": 40, "failed": 1}
            assert done["usage"]["output_tokens"] == 240
            assert done["usage"]["total_tokens"] == done["usage"]["input_tokens"] + 240
            assert done["in_progress_at"] <= done["finalizing_at"] <= done["completed_at"]
            assert done["promptmill"]["forecast"] is None
            for name in ("errors", "failed_at", "expired_at", "cancelling_at", "cancelled_at"):
                assert done[name] is None

            answers = content(client, done["output_file_id"])
            assert {key: row["response"]["body"]["choices"][0]["text"] for key, row in answers.items()} == {
                f"r{number}": f"{number:06}" for number in range(40)
            }
            for row in answers.values():
                assert set(row) == {"id", "custom_id", "response", "error"}
                assert row["id"].startswith("batch_req_")
                assert (row["response"]["status_code"], row["error"]) == (200, None)
                assert row["response"]["request_id"]
            (failed,) = content(client, done["error_file_id"]).values()
            assert (failed["custom_id"], failed["response"]["status_code"], failed["error"]) == ("bad", 400, None)
            assert set(failed["response"]["body"]["error"]) == {"message", "type", "param", "code"}

            output = client.files.retrieve(done["output_file_id"])
            assert (output.purpose, output.status, output.filename) == (
                "batch_output",
                "processed",
                f"{made['id']}_output.jsonl",
            )
            assert output.expires_at == output.created_at + 30 * 86_400
            assert {each.id for each in client.files.list(purpose="batch_output")} == {
                done["output_file_id"],
                done["error_file_id"],
            }
            client.files.delete(done["output_file_id"])
            assert client.batches.retrieve(made["id"]).output_file_id is None

    def test_a_batch_whose_every_line_failed_is_completed_with_an_error_file_alone(
        self, shared_client: openai.OpenAI, shared_worker: WorkerProcess
    ) -> None:
        lines = [chat_line("a", "x" * 500), chat_line("b", max_tokens=0)]
        batch = wait_for_status(shared_client, create(shared_client, lines).id, "completed")
        assert batch.output_file_id is None
        assert batch.request_counts.to_dict() == {"total": 2, "completed": 0, "failed": 2}
        errors = content(shared_client, batch.error_file_id)
        assert errors["a"]["response"]["body"]["error"]["code"] == "context_length_exceeded"
        assert errors["b"]["response"]["body"]["error"]["code"] == "integer_below_min_value"

    def test_output_files_expire_as_they_are_told_to(
        self, shared_client: openai.OpenAI, shared_worker: WorkerProcess
    ) -> None:
        made = create(shared_client, [chat_line("a")], output_expires_after={"anchor": "created_at", "seconds": 7200})
        batch = wait_for_status(shared_client, made.id, "completed")
        output = shared_client.files.retrieve(batch.output_file_id)
        assert output.expires_at == output.created_at + 7200

    def test_a_cancelled_batch_keeps_what_is_finished(
        self, shared_gateway: RunningGateway, shared_client: openai.OpenAI, shared_worker: WorkerProcess
    ) -> None:
        lines = [prompt_line("a", "one"), prompt_line("b", "two", max_tokens=0)]
        made = create(shared_client, lines, "/v1/completions", extra_body={"paused": True})
        wait_for_status(shared_client, made.id, "in_progress")
        cancelling = shared_client.batches.cancel(made.id)
        assert cancelling.status == "cancelling"
        assert cancelling.cancelling_at is not None
        batch = wait_for_status(shared_client, made.id, "cancelled")
        assert batch.cancelled_at is not None
        assert (batch.completed_at, batch.expired_at, batch.failed_at) == (None, None, None)
        assert batch.request_counts.to_dict() == {"total": 2, "completed": 0, "failed": 1}
        errors = content(shared_client, batch.error_file_id)
        assert (errors["a"]["response"], errors["a"]["error"]["code"]) == (None, "batch_cancelled")
        assert errors["b"]["response"]["status_code"] == 400
        assert shared_client.batches.cancel(made.id).status == "cancelled"

    def test_an_expired_batch_keeps_what_is_finished(
        self, shared_gateway: RunningGateway, shared_client: openai.OpenAI, shared_worker: WorkerProcess
    ) -> None:
        lines = [chat_line("a"), chat_line("b", max_tokens=0)]
        made = create(shared_client, lines, extra_body={"paused": True})
        wait_for_status(shared_client, made.id, "in_progress")
        database = shared_gateway.database
        with database.write() as connection:
            row = queries.find_batch(connection, made.id)
            assert row is not None
            transitions.prioritise_batch(connection, row.id, expires_at=database.now())
        batch = wait_for_status(shared_client, made.id, "expired")
        assert batch.expired_at is not None
        assert (batch.completed_at, batch.cancelled_at) == (None, None)
        assert batch.request_counts.to_dict() == {"total": 2, "completed": 0, "failed": 1}
        errors = content(shared_client, batch.error_file_id)
        assert (errors["a"]["response"], errors["a"]["error"]["code"]) == (None, "batch_expired")
        assert errors["b"]["response"]["status_code"] == 400

    def test_a_bad_file_fails_its_batch_after_it_was_created(self, shared_client: openai.OpenAI) -> None:
        made = create(shared_client, [chat_line("a"), b"{not json", chat_line("a")])
        assert made.status == "validating"
        batch = wait_for_status(shared_client, made.id, "failed")
        assert batch.failed_at is not None
        assert batch.request_counts.to_dict() == {"total": 0, "completed": 0, "failed": 0}
        found = plain(batch)["errors"]
        assert found["object"] == "list"
        assert [(each["code"], each["param"], each["line"]) for each in found["data"]] == [
            ("invalid_json_line", None, 2),
            ("duplicate_custom_id", "custom_id", 3),
        ]
        assert all(each["message"] for each in found["data"])


class TestCreate:
    @pytest.fixture(autouse=True)
    def _long_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """However long this machine takes, a repeated call is known as one."""
        monkeypatch.setattr(batches, "SAME_BATCH_S", 3600.0)

    @pytest.mark.parametrize(
        ("change", "param"),
        [
            ({"endpoint": "/v1/embeddings"}, "endpoint"),
            ({"completion_window": "1 day"}, "completion_window"),
            ({"completion_window": "10s"}, "completion_window"),
            ({"metadata": {"k": 1}}, "metadata.k"),
            ({"metadata": {str(number): "x" for number in range(17)}}, "metadata"),
            ({"output_expires_after": {"anchor": "created_at", "seconds": 60}}, "output_expires_after.seconds"),
            ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, "output_expires_after.anchor"),
            ({"input_file_id": 5}, "input_file_id"),
            ({"nonsense": 1}, "nonsense"),
            ({"priority": 10**9}, "priority"),
            ({"invalid_lines": "drop"}, "invalid_lines"),
            ({"name": "a\0b"}, "name"),
        ],
    )
    def test_a_wrong_field_is_named(self, shared_client: openai.OpenAI, change: dict[str, Any], param: str) -> None:
        body = {"input_file_id": "file-x", "endpoint": CHAT, "completion_window": "24h", **change}
        with pytest.raises(openai.BadRequestError) as caught:
            shared_client.post("/batches", body=body, cast_to=object)
        assert caught.value.param == param

    def test_an_input_that_is_not_there_or_of_another_kind_is_refused(self, shared_client: openai.OpenAI) -> None:
        for named in ("file-none", "", "\0", "x" * 64):
            with pytest.raises(openai.NotFoundError) as caught:
                shared_client.batches.create(input_file_id=named, endpoint=CHAT, completion_window="24h")
            assert (caught.value.code, caught.value.param) == ("file_not_found", "input_file_id")

    def test_a_repeated_call_gives_the_same_batch(self, gateway: RunningGateway, client: openai.OpenAI) -> None:
        """An SDK whose answer was lost sends the call again by itself."""
        file = upload(client, [chat_line("a")])
        first = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        again = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        assert again.id == first.id
        other = client.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"n": "2"}
        )
        assert other.id != first.id
        assert len(client.batches.list().data) == 2

    def test_after_a_minute_the_same_call_makes_a_new_batch(
        self, shared_gateway: RunningGateway, shared_client: openai.OpenAI
    ) -> None:
        file = upload(shared_client, [chat_line("a")])
        first = shared_client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        with shared_gateway.database.write() as connection:
            connection.exec_driver_sql("UPDATE batches SET created_at = created_at - 3601")
        second = shared_client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        assert second.id != first.id

    def test_an_idempotency_key_stands_for_one_batch_for_ever(self, shared_client: openai.OpenAI) -> None:
        file = upload(shared_client, [chat_line("a")])

        def make(key: str, **more: Any) -> Any:
            return shared_client.batches.create(
                input_file_id=file.id,
                endpoint=CHAT,
                completion_window="24h",
                extra_headers={"Idempotency-Key": key},
                **more,
            )

        first = make("k1")
        assert make("k1").id == first.id
        assert make("k2").id != first.id
        with pytest.raises(openai.BadRequestError) as caught:
            make("k1", metadata={"other": "body"})
        assert caught.value.code == "idempotency_key_reused"
        with pytest.raises(openai.BadRequestError):
            make("k" * 256)

    def test_a_post_whose_answer_is_lost_is_made_once(self, shared_gateway: RunningGateway, tenant: str) -> None:
        """The SDK's own retry: its first connection breaks after the server has done its work."""
        posts: list[int] = []

        def lose_the_first(answer: Any) -> None:
            if answer.request.method == "POST" and answer.request.url.path == "/v1/batches":
                posts.append(answer.status_code)
                if len(posts) == 1:
                    raise httpx2.ReadError("the connection broke", request=answer.request)

        losing = openai.DefaultHttpxClient(event_hooks={"response": [lose_the_first]})
        with shared_gateway.client(tenant, http_client=losing) as client:
            made = create(client, [chat_line("a")])
            assert posts == [200, 200]
            assert [batch.id for batch in client.batches.list()] == [made.id]


class TestReadAndCancel:
    def test_a_thousand_batches_come_in_pages(
        self, shared_gateway: RunningGateway, shared_client: openai.OpenAI, tenant: str
    ) -> None:
        made = add_batches(shared_gateway.database, tenant, 1000)
        assert [batch.id for batch in shared_client.batches.list(limit=100)] == made[::-1]
        page = plain(shared_client.batches.list())
        assert (len(page["data"]), page["has_more"]) == (20, True)
        assert (page["first_id"], page["last_id"]) == (made[-1], made[-20])
        last = shared_client.batches.list(limit=100, after=made[100])
        assert (len(last.data), last.has_more) == (100, False)
        assert shared_client.batches.list(after=made[0]).data == []

    def test_a_thousand_files_come_in_pages(
        self, shared_gateway: RunningGateway, shared_client: openai.OpenAI, tenant: str
    ) -> None:
        made = add_files(shared_gateway.database, tenant, 1000)
        assert [file.id for file in shared_client.files.list(limit=90)] == made[::-1]
        assert len(shared_client.files.list().data) == 1000

    def test_ids_of_others_are_not_there(self, gateway: RunningGateway, client: openai.OpenAI) -> None:
        made = create(client, [chat_line("a")])
        with gateway.client("another") as another:
            for ask in (another.batches.retrieve, another.batches.cancel):
                with pytest.raises(openai.NotFoundError) as caught:
                    ask(made.id)
                assert caught.value.code == "batch_not_found"
            with pytest.raises(openai.NotFoundError):
                another.batches.list(after=made.id)
            with pytest.raises(openai.NotFoundError):
                another.batches.create(input_file_id=made.input_file_id, endpoint=CHAT, completion_window="24h")
            assert another.batches.list().data == []

    @pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=many", "after=batch_none", "after=%00"])
    def test_a_wrong_page_is_refused(self, shared_client: openai.OpenAI, query: str) -> None:
        with pytest.raises((openai.BadRequestError, openai.NotFoundError)):
            shared_client.get(f"/batches?{query}", cast_to=object)

    def test_what_has_ended_cannot_be_cancelled(self, shared_client: openai.OpenAI) -> None:
        """A 400, which no SDK repeats."""
        made = create(shared_client, [b"{"])
        wait_for_status(shared_client, made.id, "failed")
        with pytest.raises(openai.BadRequestError) as caught:
            shared_client.batches.cancel(made.id)
        assert caught.value.code == "illegal_move"
        assert f"{made.id} is failed: it has ended and cannot be cancelled" in caught.value.message

    def test_a_batch_can_be_cancelled_while_it_is_validated(self, shared_client: openai.OpenAI) -> None:
        made = create(shared_client, [chat_line(str(number)) for number in range(3000)])
        assert shared_client.batches.cancel(made.id).status in ("cancelling", "cancelled")
        wait_for_status(shared_client, made.id, "cancelled")

    def test_interactive_calls_are_no_batches(self, shared_gateway: RunningGateway, tenant: str) -> None:
        database = shared_gateway.database
        with database.write() as connection:
            new = NewBatch("batch_single", "f", CHAT, MODEL, tenant=tenant, is_interactive=True, door=Door.HTTP)
            transitions.create_batch(connection, new, database.now())
        with shared_gateway.client(tenant) as client:
            assert client.batches.list().data == []
            with pytest.raises(openai.NotFoundError):
                client.batches.retrieve("batch_single")


class TestKilledGateway:
    @pytest.mark.drill
    def test_a_gateway_killed_in_mid_validation_is_replaced(
        self, served_settings: Settings, make_gateway: MakeGateway
    ) -> None:
        """SIGKILL while rows are written; another gateway goes on after the last group, once the lease is over."""
        lines = [chat_line(str(number)) for number in range(40_000)]
        settings = changed(served_settings, gateway={"max_batch_lines": 100_000})
        with gateway_process(settings) as url, open_database(settings.database.url) as database:
            key = make_key(database, tenant="default", name="drill").key
            with openai.OpenAI(base_url=f"{url}/v1", api_key=key) as client:
                made = create(client, lines)

            def has_rows() -> bool:
                with database.read() as connection:
                    batch = queries.find_batch(connection, made.id)
                    return batch is not None and queries.last_submitted_line(connection, batch.id) > 0

            wait_until(has_rows, seconds=60, what="the first rows")
            os.kill(listening_pid(url), signal.SIGKILL)
            with database.read() as connection:
                batch = queries.find_batch(connection, made.id)
            assert batch is not None
            assert batch.status is BatchStatus.VALIDATING, "it was too quick to be killed in the middle"
        gateway = make_gateway(settings)
        with gateway.client() as client:
            done = wait_for_status(client, made.id, "in_progress")
            assert done.request_counts.total == 40_000


def add_batches(database: Database, tenant: str, count: int) -> list[str]:
    """Batches in the order in which they were made."""
    ids = [f"batch_{number:022x}{hash(tenant) % 10**10:010d}" for number in range(count)]
    with database.write() as connection:
        for public_id in ids:
            new = NewBatch(public_id, public_id, CHAT, MODEL, tenant=tenant, door=Door.HTTP, completion_window="24h")
            transitions.create_batch(connection, new, database.now())
    return ids


def add_files(database: Database, tenant: str, count: int) -> list[str]:
    """Files' rows, without contents, in the order in which they were made."""
    rows = [
        {
            "public_id": f"file-{number:022x}{hash(tenant) % 10**10:010d}",
            "tenant": tenant,
            "purpose": FilePurpose.BATCH.value,
            "filename": "in.jsonl",
            "path": "nowhere",
            "bytes": 1,
            "lines": 1,
            "created_at": database.now(),
        }
        for number in range(count)
    ]
    with database.write() as connection:
        insert_rows(connection, FILES, rows)
    return [str(row["public_id"]) for row in rows]
