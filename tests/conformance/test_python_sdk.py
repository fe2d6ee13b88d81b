"""The gateway through the real `openai` package for Python: what an application that moves here relies on."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import httpx
import openai
import pytest

from jobs.gateway.files import SHOWN_PURPOSES
from storage import files, transitions
from storage.models import Door, FilePurpose
from storage.transitions import NewBatch
from tests.conformance.conftest import MODEL, served_client
from tests.conformance.losing_proxy import LosingProxy
from tests.conftest import wait_until
from tests.drills.served import ServedMill

# With the start of all processes, which the first test pays for.
pytestmark = pytest.mark.timeout(600)

COMPLETIONS: Final = "/v1/completions"
PATIENCE_S = 240.0
FINAL = ("completed", "failed", "expired", "cancelled")


def prompt_line(custom_id: str, prompt: str, **more: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 8}
    return {"custom_id": custom_id, "method": "POST", "url": COMPLETIONS, "body": body} | more


def upload(client: openai.OpenAI, lines: Sequence[Any]) -> Any:
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    return client.files.create(file=("input.jsonl", content), purpose="batch")


def ask(client: openai.OpenAI, text: str, **options: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": text}], **options)


# --- objects -------------------------------------------------------------------------------------------------------

INSTANT, TEXT, COUNT, OBJECT, LIST, NULL = "instant", "text", "count", "object", "list", "null"
JSON_KINDS: Sequence[tuple[type, str]] = ((str, TEXT), (dict, OBJECT), (list, LIST))
# Every field of OpenAI's batch object, and what each may be.
BATCH_FIELDS: Mapping[str, tuple[str, ...]] = {
    "id": (TEXT,),
    "object": (TEXT,),
    "endpoint": (TEXT,),
    "model": (TEXT, NULL),
    "errors": (OBJECT, NULL),
    "input_file_id": (TEXT,),
    "completion_window": (TEXT,),
    "status": (TEXT,),
    "output_file_id": (TEXT, NULL),
    "error_file_id": (TEXT, NULL),
    "created_at": (INSTANT,),
    "in_progress_at": (INSTANT, NULL),
    "expires_at": (INSTANT,),
    "finalizing_at": (INSTANT, NULL),
    "completed_at": (INSTANT, NULL),
    "failed_at": (INSTANT, NULL),
    "expired_at": (INSTANT, NULL),
    "cancelling_at": (INSTANT, NULL),
    "cancelled_at": (INSTANT, NULL),
    "request_counts": (OBJECT,),
    "usage": (OBJECT,),
    "metadata": (OBJECT, NULL),
}
# In each status: the instants that are set, and those that may be or may not; all others are null.
INSTANTS: Mapping[str, tuple[set[str], set[str]]] = {
    "validating": (set(), set()),
    "failed": ({"failed_at"}, set()),
    "in_progress": ({"in_progress_at"}, set()),
    "finalizing": ({"in_progress_at", "finalizing_at"}, set()),
    "completed": ({"in_progress_at", "finalizing_at", "completed_at"}, set()),
    "expired": ({"in_progress_at", "finalizing_at", "expired_at"}, set()),
    "cancelling": ({"cancelling_at"}, {"in_progress_at"}),
    "cancelled": ({"cancelling_at", "cancelled_at"}, {"in_progress_at", "finalizing_at"}),
}
FILE_FIELDS: Mapping[str, tuple[str, ...]] = {
    "id": (TEXT,),
    "object": (TEXT,),
    "bytes": (COUNT,),
    "created_at": (INSTANT,),
    "expires_at": (INSTANT, NULL),
    "filename": (TEXT,),
    "purpose": (TEXT,),
    "status": (TEXT,),
    "status_details": (TEXT, NULL),
}


def kind_of(value: Any) -> set[str]:
    if value is None:
        return {NULL}
    if isinstance(value, bool):
        return set()
    if isinstance(value, int):
        return {COUNT, *([INSTANT] if 1_000_000_000 < value < 10_000_000_000 else [])}
    return {next((kind for type_, kind in JSON_KINDS if isinstance(value, type_)), type(value).__name__)}


def check_fields(found: Mapping[str, Any], wanted: Mapping[str, tuple[str, ...]]) -> None:
    for name, kinds in wanted.items():
        assert name in found, f"{name} is left out"
        assert kind_of(found[name]) & set(kinds), f"{name} is {found[name]!r}, wanted: {kinds}"


def check_batch(batch: Any) -> dict[str, Any]:
    """All that the contract says of one batch object, as it was sent."""
    found = dict(batch.to_dict())
    check_fields(found, BATCH_FIELDS)
    assert set(found) == {*BATCH_FIELDS, "promptmill"}
    assert found["object"] == "batch"
    assert found["id"].startswith("batch_")
    must, may = INSTANTS[found["status"]]
    always = {"created_at", "expires_at"}
    is_set = {name for name in BATCH_FIELDS if name.endswith("_at") and found[name] is not None}
    assert must | always <= is_set <= must | may | always, f"{found['status']}: {sorted(is_set)}"
    counts, usage = found["request_counts"], found["usage"]
    assert {name: kind_of(value) for name, value in counts.items()} == {
        name: {COUNT} for name in ("total", "completed", "failed")
    }
    assert counts["completed"] + counts["failed"] <= counts["total"]
    if found["status"] == "validating":
        assert counts == {"total": 0, "completed": 0, "failed": 0}
    if found["status"] == "completed":
        assert counts["completed"] + counts["failed"] == counts["total"]
        assert (found["output_file_id"] is None) == (counts["completed"] == 0)
        assert (found["error_file_id"] is None) == (counts["failed"] == 0)
    if found["status"] not in FINAL:
        assert found["output_file_id"] is None
        assert found["error_file_id"] is None
    assert set(usage) == {
        "input_tokens",
        "input_tokens_details",
        "output_tokens",
        "output_tokens_details",
        "total_tokens",
    }
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert set(usage["input_tokens_details"]) == {"cached_tokens"}
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}
    assert (found["errors"] is not None) == (found["status"] == "failed")
    for entry in (found["errors"] or {"data": []})["data"]:
        check_fields(entry, {"code": (TEXT,), "message": (TEXT,), "param": (TEXT, NULL), "line": (COUNT, NULL)})
    openai.types.Batch.model_validate(found)  # strictly, unlike the SDK's own reading
    return found


def check_file(file: Any) -> dict[str, Any]:
    found = dict(file.to_dict())
    check_fields(found, FILE_FIELDS)
    assert set(found) == set(FILE_FIELDS)
    assert (found["object"], found["status"]) == ("file", "processed")
    assert found["id"].startswith("file-")
    assert found["purpose"] in SHOWN_PURPOSES.values()
    openai.types.FileObject.model_validate(found)
    return found


def watch(client: openai.OpenAI, batch_id: str) -> dict[str, Any]:
    """Look at a batch until it has ended, and check each object that comes. Returns the last one."""
    found: dict[str, Any] = {}

    def has_ended() -> bool:
        found.update(check_batch(client.batches.retrieve(batch_id)))
        return found["status"] in FINAL

    wait_until(has_ended, seconds=PATIENCE_S, what="the batch's end")
    return found


class TestObjects:
    """Each object of a batch's life is checked against the table above."""

    def make(self, client: openai.OpenAI, lines: Sequence[Any], **options: Any) -> dict[str, Any]:
        file = upload(client, lines)
        check_file(file)
        given: dict[str, Any] = {"endpoint": COMPLETIONS, "completion_window": "24h", **options}
        made = check_batch(client.batches.create(input_file_id=file.id, **given))
        assert made["input_file_id"] == file.id
        return made

    def test_of_a_batch_that_completes(self, client: openai.OpenAI) -> None:
        good = [prompt_line(f"r{number}", f"number {number}") for number in range(40)]
        bad = prompt_line("bad", "x" * 4000)
        made = self.make(client, [*good, bad], metadata={"of": "mine"}, output_expires_after=lifetime(7200))
        ended = watch(client, made["id"])
        assert ended["status"] == "completed"
        assert ended["model"] == MODEL
        assert ended["request_counts"] == {"total": 41, "completed": 40, "failed": 1}
        assert ended["metadata"] == {"of": "mine"}
        assert ended["usage"]["output_tokens"] == 40 * 8
        assert made["expires_at"] == made["created_at"] + 86_400
        output = check_file(client.files.retrieve(ended["output_file_id"]))
        errors = check_file(client.files.retrieve(ended["error_file_id"]))
        for file in (output, errors):
            assert file["purpose"] == "batch_output"
            assert file["bytes"] == len(client.files.content(file["id"]).content)
            assert file["expires_at"] == file["created_at"] + 7200
        assert check_batch(client.batches.list().data[0]) == ended
        with pytest.raises(openai.BadRequestError):
            client.batches.cancel(made["id"])

    def test_of_a_batch_whose_lines_all_fail(self, client: openai.OpenAI) -> None:
        made = self.make(client, [prompt_line("a", "x" * 4000), prompt_line("b", "y" * 4000)])
        ended = watch(client, made["id"])
        assert (ended["status"], ended["output_file_id"]) == ("completed", None)
        lines = [json.loads(row) for row in client.files.content(ended["error_file_id"]).text.splitlines()]
        assert {line["custom_id"]: line["response"]["status_code"] for line in lines} == {"a": 400, "b": 400}
        assert all(line["error"] is None for line in lines)

    def test_of_a_batch_whose_file_is_bad(self, client: openai.OpenAI) -> None:
        made = self.make(client, [prompt_line("a", "fine"), prompt_line("a", "again"), {"custom_id": 7}])
        ended = watch(client, made["id"])
        assert ended["status"] == "failed"
        assert ended["errors"]["object"] == "list"
        assert next((entry["line"], entry["code"]) for entry in ended["errors"]["data"]) == (2, "duplicate_custom_id")
        assert {entry["line"] for entry in ended["errors"]["data"]} == {2, 3}

    def test_of_a_batch_that_is_cancelled(self, client: openai.OpenAI) -> None:
        lines = [prompt_line(f"r{number}", f"number {number}") for number in range(3000)]
        made = self.make(client, lines, extra_body={"paused": True})  # no worker can be quicker than the call
        cancelled = check_batch(client.batches.cancel(made["id"]))
        assert cancelled["status"] in ("cancelling", "cancelled")
        ended = watch(client, made["id"])
        assert ended["status"] == "cancelled"
        assert check_batch(client.batches.cancel(made["id"]))["status"] == "cancelled"

    def test_of_a_batch_that_expires(self, client: openai.OpenAI) -> None:
        """Its deadline is brought forward, by an extension; it is made paused, so that it cannot be done."""
        lines = [prompt_line(f"r{number}", f"number {number}") for number in range(50)]
        made = self.make(client, lines, extra_body={"paused": True})
        wait_until(
            lambda: check_batch(client.batches.retrieve(made["id"]))["status"] != "validating",
            seconds=PATIENCE_S,
            what="the end of validation",
        )
        client.post(f"/batches/{made['id']}", body={"deadline": int(time.time()) + 2}, cast_to=object)
        ended = watch(client, made["id"])
        assert ended["status"] == "expired"
        lines = [json.loads(row) for row in client.files.content(ended["error_file_id"]).text.splitlines()]
        assert [(line["response"], line["error"]["code"]) for line in lines] == [(None, "batch_expired")] * 50


def lifetime(seconds: int) -> Any:
    return {"anchor": "created_at", "seconds": seconds}


# --- lists -----------------------------------------------------------------------------------------------------------


def add_objects(live: ServedMill, tenant: str, count: int) -> tuple[list[str], list[str]]:
    """So many batches, all ended, and as many files: rows alone, without contents. Returns their ids, oldest first."""
    batches, uploads = [], []
    with live.mill.database.write() as connection:
        for number in range(count):
            public_id, now = f"batch_{tenant}_{number}", 1_700_000_000.0 + number // 3  # several of one second
            batch = NewBatch(
                public_id=public_id,
                fingerprint=public_id,
                endpoint=COMPLETIONS,
                model="",
                tenant=tenant,
                door=Door.HTTP,
                input_file_public_id="file-gone",
                completion_window="24h",
                expires_at=now + 86_400,
            )
            transitions.fail_batch(
                connection, transitions.create_batch(connection, batch, now), "empty_file", "the file is empty", now
            )
            batches.append(public_id)
            new = files.NewUpload(
                public_id=files.make_file_id(),
                tenant=tenant,
                purpose=FilePurpose.BATCH if number % 2 else FilePurpose.BATCH_OUTPUT,
                filename=f"{number}.jsonl",
                path=f"none-{tenant}-{number}",
                bytes=1,
                lines=1,
                sha256=f"{tenant}-{number}",
            )
            uploads.append(files.add_upload(connection, new, now, same_within_s=0.0).public_id)
    return batches, uploads


def test_a_thousand_objects_come_each_once_in_either_order(
    live: ServedMill, client: openai.OpenAI, tenant: str
) -> None:
    """The SDKs go on behind the last id of a page; both clients, the plain and the asynchronous one."""
    batches, uploads = add_objects(live, tenant, 1000)
    for batch in client.batches.list(limit=3).data:
        check_batch(batch)
    assert [file.id for file in client.files.list(limit=97)] == uploads[::-1]
    assert [file.id for file in client.files.list(limit=333, order="asc")] == uploads
    assert [file.id for file in client.files.list(limit=99, order="asc", purpose="batch")] == uploads[1::2]
    assert [file.id for file in client.files.list(order="asc", after=uploads[900])] == uploads[901:]

    async def ids() -> list[str]:
        async with openai.AsyncOpenAI(base_url=live.url, api_key=live.key(tenant)) as other:
            return [batch.id async for batch in other.batches.list(limit=64)]

    assert asyncio.run(ids()) == batches[::-1]


# --- calls whose answer is lost --------------------------------------------------------------------------------------


def test_a_lost_answer_is_asked_for_again_and_nothing_is_there_twice(live: ServedMill, tenant: str) -> None:
    """By the SDK itself, as it comes: it repeats POSTs whose connection broke, and sends no idempotency key."""
    with served_client(live, tenant) as client, LosingProxy(live.root, losses=1) as proxy:
        with served_client(live, tenant, base_url=f"{proxy.root}/v1") as losing:
            file = upload(losing, [prompt_line("a", "one")])
        assert proxy.lost == 1
        assert [each.id for each in client.files.list()] == [file.id]
    with served_client(live, tenant) as client, LosingProxy(live.root, losses=2) as proxy:
        with served_client(live, tenant, base_url=f"{proxy.root}/v1") as losing:
            batch = losing.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h")
        assert proxy.lost == 2
        assert [each.id for each in client.batches.list()] == [batch.id]
        assert watch(client, batch.id)["request_counts"] == {"total": 1, "completed": 1, "failed": 0}


@pytest.mark.parametrize("key", [None, "the-same"])
def test_a_chat_call_whose_answer_is_lost_is_answered(live: ServedMill, tenant: str, key: str | None) -> None:
    """With a key it is computed once; without one twice, as with OpenAI, and the caller gets one answer."""
    headers = {"Idempotency-Key": key} if key else {}
    with (
        LosingProxy(live.root, losses=1) as proxy,
        served_client(live, tenant, base_url=f"{proxy.root}/v1") as losing,
    ):
        answer = ask(losing, "What is the end of this?", max_tokens=8, extra_headers=headers)
        assert proxy.lost == 1
    assert answer.choices[0].finish_reason in ("stop", "length")
    requests = live.mill.rows(
        "SELECT results.id AS result FROM requests JOIN batches ON batches.id = requests.batch_id "
        "LEFT JOIN results ON results.request_id = requests.id WHERE batches.tenant = :tenant",
        tenant=tenant,
    )
    assert len(requests) == (1 if key else 2)
    assert all(row.result is not None for row in requests)


# --- what else clients do --------------------------------------------------------------------------------------------


def test_contents_and_streams_can_be_read_piece_by_piece(client: openai.OpenAI) -> None:
    lines = [prompt_line(f"r{number}", "words " * 200) for number in range(300)]
    file = upload(client, lines)
    with client.files.with_streaming_response.content(file.id) as answer:
        assert sum(len(piece) for piece in answer.iter_bytes(10_000)) == file.bytes
    with client.files.with_streaming_response.content(file.id) as answer:
        assert [json.loads(row) for row in answer.iter_lines()] == lines
    with client.chat.completions.with_streaming_response.create(
        model=MODEL, messages=[{"role": "user", "content": "Go on."}], max_tokens=8, stream=True
    ) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [line for line in answer.iter_lines() if line]
    assert events[-1] == "data: [DONE]"
    assert all(json.loads(event.removeprefix("data: "))["object"] == "chat.completion.chunk" for event in events[:-1])
    assert client.files.wait_for_processing(file.id, poll_interval=0.01).status == "processed"


def test_many_streams_at_once_keep_apart(live: ServedMill, tenant: str) -> None:
    """The asynchronous client; each caller gets the answer to its own question, token by token and whole alike.

    The null engine answers with the end of the prompt, sixteen characters here.
    """

    async def one(client: openai.AsyncOpenAI, number: int) -> tuple[str, str]:
        question: list[Any] = [{"role": "user", "content": f"What comes after no. {number:02d}"}]
        stream = await client.chat.completions.create(model=MODEL, messages=question, max_tokens=40, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
        whole = await client.chat.completions.create(model=MODEL, messages=question, max_tokens=40)
        return text, whole.choices[0].message.content or ""

    async def all_of_them() -> list[tuple[str, str]]:
        async with openai.AsyncOpenAI(base_url=live.url, api_key=live.key(tenant)) as client:
            return list(await asyncio.gather(*(one(client, number) for number in range(30))))

    for number, (text, whole) in enumerate(asyncio.run(all_of_them())):
        assert text == whole
        assert f"{number:02d}" in text


def test_a_client_that_waits_no_longer_raises_a_timeout(live: ServedMill, tenant: str) -> None:
    """A hundred tokens take 0.2 s on this worker at the least, and this client waits a hundredth of a second.

    A stream's tokens come every two milliseconds: who waits for half of one does not hear four hundred of them. Once a
    stream has begun, the SDK hands on what its HTTP client raises.
    """
    with (
        served_client(live, tenant, timeout=openai.Timeout(60.0, read=0.01), max_retries=0) as client,
        pytest.raises(openai.APITimeoutError),
    ):
        client.completions.create(model=MODEL, prompt="x" * 20, max_tokens=100)
    with (
        served_client(live, tenant, timeout=openai.Timeout(60.0, read=0.0005), max_retries=0) as client,
        pytest.raises((openai.APITimeoutError, httpx.ReadTimeout)),
    ):
        for _ in client.completions.create(model=MODEL, prompt="x" * 20, max_tokens=400, stream=True):
            pass


def test_failures_raise_the_sdks_own_exceptions(live: ServedMill, client: openai.OpenAI, tenant: str) -> None:
    with served_client(live, api_key="pm-wrong") as stranger, pytest.raises(openai.AuthenticationError) as refused:
        stranger.models.list()
    assert refused.value.code == "invalid_api_key"
    with pytest.raises(openai.NotFoundError) as missing_file:
        client.files.retrieve("file-none")
    assert missing_file.value.code == "file_not_found"
    with pytest.raises(openai.NotFoundError) as missing_batch:
        client.batches.retrieve("batch_none")
    assert (missing_batch.value.code, missing_batch.value.param) == ("batch_not_found", "id")
    with pytest.raises(openai.BadRequestError) as bad:
        ask(client, "Hello", max_tokens=100_000)
    assert bad.value.code == "max_tokens_exceeds_context"
    assert bad.value.request_id == bad.value.response.headers["x-request-id"]
    with live.mill.database.write() as connection:
        transitions.set_quotas(connection, tenant, {"max_requests_per_minute": 1})
    with served_client(live, tenant, max_retries=0) as hasty:

        def is_refused() -> bool:
            """Quotas are known to a gateway for a moment."""
            try:
                hasty.models.list()
            except openai.RateLimitError as error:
                assert error.type == "rate_limit_error"
                assert float(error.response.headers["retry-after"]) > 0
                return True
            return False

        wait_until(is_refused, what="the quota's effect")


def test_a_batch_script_moves_here_by_its_base_url(live: ServedMill, tenant: str) -> None:
    """A script that knows only OpenAI, as a process: what is set is where it looks and with which key."""
    script = Path(__file__).parents[2] / "examples" / "openai_batch.py"
    questions = ["Which is no. 11", "Which is no. 22", "x" * 4000]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "PROMPTMILL_"))}
    environment |= {"OPENAI_BASE_URL": live.url, "OPENAI_API_KEY": live.key(tenant)}

    def run(model: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(script), "--model", model, "--max-tokens", "40", *questions],
            cwd=live.mill.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )

    ran = run(MODEL)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "completed, 2 of 3 answered, 1 failed" in ran.stdout
    for question in questions[:2]:
        _, _, answer = ran.stdout.partition(f"+ {question}\n")
        assert question[-2:] in answer.splitlines()[0]
    assert "refused: " in ran.stdout
    failed = run("gpt-4")
    assert failed.returncode == 1, failed.stdout + failed.stderr
    assert "line 1: model_not_found: " in failed.stdout
