"""What the gateway has beyond OpenAI's Batch API."""

from __future__ import annotations

import csv
import io
import json
import time
from typing import Any

import httpx2  # what the SDK speaks HTTP with
import openai
import pytest

from jobs import forecast as forecast_module
from jobs.worker_process import WorkerProcess
from storage import queries, transitions
from storage.database import Database
from storage.models import RequestStatus, ServedFrom
from storage.transitions import AttemptRecord, RequestOutcome
from tests.conftest import wait_until
from tests.jobs.gateway.conftest import PATIENCE_S, RunningGateway, chat_line, upload, wait_for_status
from tests.jobs.gateway.test_batches import create, plain, prompt_line


def post(client: openai.OpenAI, path: str, **body: Any) -> Any:
    return client.post(path, body=body or None, cast_to=object)


def get(client: openai.OpenAI, path: str) -> Any:
    return client.get(path, cast_to=object)


def paused(client: openai.OpenAI, lines: list[Any], endpoint: str = "/v1/completions") -> str:
    """A batch that is in progress and does nothing."""
    made = create(client, lines, endpoint, extra_body={"paused": True})
    assert plain(made)["promptmill"]["is_paused"] is True
    wait_for_status(client, made.id, "in_progress")
    return str(made.id)


class TestSteering:
    def test_a_paused_batch_does_nothing_until_it_is_resumed(
        self, shared_client: openai.OpenAI, shared_worker: WorkerProcess
    ) -> None:
        batch = paused(shared_client, [prompt_line("a", "one"), prompt_line("b", "two")])
        assert shared_client.batches.retrieve(batch).request_counts.completed == 0
        assert post(shared_client, f"/batches/{batch}/pause")["promptmill"]["is_paused"] is True
        assert post(shared_client, f"/batches/{batch}/resume")["promptmill"]["is_paused"] is False
        assert wait_for_status(shared_client, batch, "completed").request_counts.completed == 2
        with pytest.raises(openai.BadRequestError) as caught:
            post(shared_client, f"/batches/{batch}/pause")
        assert caught.value.code == "illegal_move"
        assert batch in caught.value.message, "it is named by the id that the caller knows"

    def test_priority_and_deadline_can_be_changed(self, shared_client: openai.OpenAI) -> None:
        batch = paused(shared_client, [prompt_line("a", "one")])
        deadline = int(time.time()) + 5000
        changed = post(shared_client, f"/batches/{batch}", priority=7, deadline=deadline)
        assert (changed["promptmill"]["priority"], changed["expires_at"]) == (7, deadline)
        changed = post(shared_client, f"/batches/{batch}", priority=3)
        assert (changed["promptmill"]["priority"], changed["expires_at"]) == (3, deadline)
        changed = shared_client.post(f"/batches/{batch}", body={"deadline": None}, cast_to=object)
        assert plain_object(changed)["expires_at"] is None
        for wrong in ({"deadline": 5}, {"deadline": 2**50}, {"priority": "high"}, {"colour": "red"}):
            with pytest.raises(openai.BadRequestError) as caught:
                shared_client.post(f"/batches/{batch}", body=wrong, cast_to=object)
            assert caught.value.param == next(iter(wrong))
        with pytest.raises(openai.BadRequestError):
            shared_client.post(f"/batches/{batch}", body={}, cast_to=object)

    def test_failed_lines_run_again_with_a_new_window(
        self, shared_gateway: RunningGateway, shared_client: openai.OpenAI, shared_worker: WorkerProcess
    ) -> None:
        batch = paused(shared_client, [prompt_line("a", "one"), prompt_line("b", "two")])
        with pytest.raises(openai.BadRequestError):
            post(shared_client, f"/batches/{batch}/retry")
        shared_client.batches.cancel(batch)
        first = wait_for_status(shared_client, batch, "cancelled")
        again = post(shared_client, f"/batches/{batch}/retry")
        never_ran = 2 - first.request_counts.completed
        assert again["retried"] == never_ran
        assert again["batch"]["status"] == "in_progress"
        assert again["batch"]["expires_at"] > time.time() + 86_000
        done = wait_for_status(shared_client, batch, "completed")
        assert done.request_counts.completed == 2
        assert done.error_file_id is None
        assert (done.cancelling_at, done.cancelled_at) == (None, None)
        assert post(shared_client, f"/batches/{batch}/retry")["retried"] == 0

    def test_every_route_keeps_tenants_apart(
        self, shared_gateway: RunningGateway, shared_client: openai.OpenAI
    ) -> None:
        batch = paused(shared_client, [prompt_line("a", "one")])
        with shared_gateway.client("a-stranger") as stranger:
            for path in ("pause", "resume", "retry", "cancel"):
                with pytest.raises(openai.NotFoundError):
                    post(stranger, f"/batches/{batch}/{path}")
            with pytest.raises(openai.NotFoundError):
                post(stranger, f"/batches/{batch}", priority=1)
            for path in (f"batches/{batch}/results", f"batches/{batch}/table", f"requests/{batch}:a"):
                with pytest.raises(openai.NotFoundError):
                    get(stranger, f"/{path}")


class TestResults:
    def test_results_come_by_cursor_each_once(self, shared_client: openai.OpenAI, shared_worker: WorkerProcess) -> None:
        lines = [prompt_line(f"r{number}", f"number {number:06}") for number in range(25)]
        lines.append(prompt_line("bad", "x", max_tokens=0))
        made = create(shared_client, lines, "/v1/completions")
        seen: list[str] = []
        cursor = [0]

        def has_all() -> bool:
            page = get(shared_client, f"/batches/{made.id}/results?after={cursor[0]}&limit=7")
            seen.extend(row["custom_id"] for row in page["data"])
            assert len(page["data"]) <= 7
            cursor[0] = page["cursor"]
            return bool(page["is_final"] and not page["data"])

        wait_until(has_all, seconds=PATIENCE_S, what="the end of the results")
        assert sorted(seen) == sorted([f"r{number}" for number in range(25)] + ["bad"])
        page = get(shared_client, f"/batches/{made.id}/results")
        assert page["status"] == "completed"
        bad = next(row for row in page["data"] if row["custom_id"] == "bad")
        assert bad["response"]["status_code"] == 400
        for wrong in ("after=-1", "after=x", "limit=0", "limit=1001"):
            with pytest.raises(openai.BadRequestError):
                get(shared_client, f"/batches/{made.id}/results?{wrong}")

    def test_tables_and_audit_records(
        self, shared_gateway: RunningGateway, shared_client: openai.OpenAI, shared_worker: WorkerProcess
    ) -> None:
        made = create(
            shared_client, [prompt_line("a", "number one"), prompt_line("b/ü 1", "number two")], "/v1/completions"
        )
        wait_for_status(shared_client, made.id, "completed")
        table = shared_client.get(f"/batches/{made.id}/table", cast_to=httpx2.Response)
        assert table.headers["content-type"] == "text/csv; charset=utf-8"
        rows = list(csv.DictReader(io.StringIO(table.text)))
        assert [(row["custom_id"], row["answer"]) for row in rows] == [("a", "er one"), ("b/ü 1", "er two")]
        table = shared_client.get(f"/batches/{made.id}/table?format=jsonl", cast_to=httpx2.Response)
        assert [json.loads(row)["line"] for row in table.text.splitlines()] == [1, 2]
        pytest.importorskip("pyarrow")
        table = shared_client.get(f"/batches/{made.id}/table?format=parquet", cast_to=httpx2.Response)
        assert table.content[:4] == b"PAR1"
        wait_until(
            lambda: (
                not any(path.name.startswith("upload-table") for path in shared_gateway.settings.files_dir.iterdir())
            ),
            what="the removal of the tables",
        )

        record = get(shared_client, f"/requests/{made.id}:a")
        assert (record["custom_id"], record["status"], record["body"], record["response"]) == (
            "a",
            "completed",
            None,
            None,
        )
        (attempt,) = record["attempts"]
        assert attempt["worker"]
        assert get(shared_client, f"/requests/{made.id}:b/ü 1")["line"] == 2
        assert get(shared_client, f"/requests/{record['id'].replace('batch_req_', 'cmpl-')}") == record
        with_text = get(shared_client, f"/requests/{record['id']}?text=true")
        assert with_text["body"]["prompt"] == "number one"
        assert with_text["response"]["choices"][0]["text"] == "er one"
        for named in (
            "batch_req_ffffffff",
            "batch_req_xyz",
            "chatcmpl-ffffffff",
            "cmpl-xyz",
            "nothing",
            f"{made.id}:none",
            f"{made.id[:20]}:a",
            "last:a",
        ):
            with pytest.raises(openai.NotFoundError) as caught:
                get(shared_client, f"/requests/{named}")
            assert caught.value.code in ("request_not_found", "batch_not_found")

    def test_a_running_batch_has_a_forecast(
        self, gateway: RunningGateway, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Four of ten lines were answered ten seconds ago: two by answers that there were, two with 12 tokens each."""
        monkeypatch.setattr(forecast_module, "WINDOW_S", 3600.0)  # a slow machine must not forget the rate
        made = create(client, [prompt_line(f"r{number}", "one") for number in range(10)], "/v1/completions")
        wait_for_status(client, made.id, "in_progress")
        unknown = plain(client.batches.retrieve(made.id))["promptmill"]["forecast"]
        assert unknown == {"requests_per_s": None, "remaining_s": None, "completes_at": None, "total_tokens": None}
        answer(gateway.database, made.id, requests=2, seconds_ago=10.0, record=SERVED)
        served_from_before = plain(client.batches.retrieve(made.id))["promptmill"]["forecast"]
        assert served_from_before["total_tokens"] is None
        answer(gateway.database, made.id, requests=2, seconds_ago=10.0, record=COMPUTED)
        forecast = plain(client.batches.retrieve(made.id))["promptmill"]["forecast"]
        assert forecast["total_tokens"] == 60
        assert 0 < forecast["requests_per_s"] <= 0.4
        assert forecast["remaining_s"] == pytest.approx(6 / forecast["requests_per_s"], rel=0.01)
        assert forecast["completes_at"] >= time.time() + 14
        post(client, f"/batches/{made.id}/pause")
        paused_forecast = plain(client.batches.retrieve(made.id))["promptmill"]["forecast"]
        assert paused_forecast["completes_at"] is None


SERVED = AttemptRecord(prompt_tokens=8, completion_tokens=4, served_from=ServedFrom.CACHE)
COMPUTED = AttemptRecord(prompt_tokens=8, completion_tokens=4)


def answer(
    database: Database, batch_id: str, *, requests: int, seconds_ago: float, record: AttemptRecord = COMPUTED
) -> None:
    """What a worker would have done."""
    with database.write() as connection:
        batch = queries.find_batch(connection, batch_id)
        assert batch is not None
        now = database.now() - seconds_ago
        ids = [each.id for each in queries.next_pending(connection, batch.id, requests)]
        transitions.queue_requests(connection, ids, now)
        held = transitions.claim_requests(connection, ids, worker="w", lease_s=60, now=now)
        outcomes = [
            RequestOutcome(each.id, batch.id, 1, RequestStatus.COMPLETED, 200, "{}", record=record) for each in held
        ]
        assert len(transitions.record_outcomes(connection, outcomes, worker="w", now=now)) == requests


def test_extension_fields_of_a_new_batch_are_kept(shared_gateway: RunningGateway, shared_client: openai.OpenAI) -> None:
    made = shared_client.batches.create(
        input_file_id=upload(shared_client, [chat_line("a"), b"{"]).id,
        endpoint="/v1/chat/completions",
        completion_window="90m",  # type: ignore[arg-type]
        extra_body={"name": "nightly", "priority": 4, "invalid_lines": "fail_line"},
    )
    said = plain(made)
    assert said["expires_at"] == said["created_at"] + 5400
    assert {name: said["promptmill"][name] for name in ("name", "priority", "invalid_lines", "door")} == {
        "name": "nightly",
        "priority": 4,
        "invalid_lines": "fail_line",
        "door": "http",
    }
    batch = wait_for_status(shared_client, made.id, "in_progress", "completed")
    assert batch.request_counts.total == 2
    with shared_gateway.database.read() as connection:
        row = queries.find_batch(connection, made.id)
    assert row is not None
    assert row.api_key_id is not None, "who enqueued it is on record"


def plain_object(value: Any) -> dict[str, Any]:
    return dict(value)
