"""The OpenAPI document against the live gateway, by schemathesis: calls made from it, well-formed and malformed ones.

No answer may be a 500, undocumented, or of another form than the document says; what the document forbids is refused,
and what it allows is taken.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from tests.conformance.conftest import MODEL, served_client
from tests.conftest import wait_until
from tests.drills.served import ServedMill

# With the start of all processes, should this be the first test.
pytestmark = pytest.mark.timeout(600)

PROGRAM = Path(sys.executable).with_name("schemathesis")
# Real ids are tried more often than made-up ones, which all end as 404.
CONFIG = """
[dictionaries]
models = {{ values = ["{model}"] }}
batches = {{ values = {batches} }}
files = {{ values = {files} }}
requests = {{ values = {requests} }}
webhooks = {{ values = {webhooks} }}

[parameters]
"path.model" = {{ dictionary = "models", probability = 0.7 }}
"path.batch_id" = {{ dictionary = "batches", probability = 0.8 }}
"path.file_id" = {{ dictionary = "files", probability = 0.8 }}
"path.request_id" = {{ dictionary = "requests", probability = 0.8 }}
"path.endpoint_id" = {{ dictionary = "webhooks", probability = 0.8 }}
"body.model" = {{ dictionary = "models", probability = 0.8 }}
"body.input_file_id" = {{ dictionary = "files", probability = 0.8 }}

# What a schema cannot say: a prompt that is longer than the model's context, options that exclude each other.
[[operations]]
include-path = ["/v1/chat/completions", "/v1/completions", "/api/v1/chat"]
checks.positive_data_acceptance.enabled = false
phases.coverage.enabled = {covers_chat}

# Nor this: addresses that are not spoken to, files that are no input, ended batches that cannot be paused.
[[operations]]
include-path-regex = "^/v1/(webhook_endpoints|batches)"
include-method = "POST"
checks.positive_data_acceptance.enabled = false
"""


@pytest.fixture(scope="module")
def objects(live: ServedMill) -> dict[str, list[str]]:
    with served_client(live, "fuzzed") as client:
        return make_objects(client)


def make_objects(client: openai.OpenAI) -> dict[str, list[str]]:
    """Several of each kind, in different states: calls that are tried may delete them."""
    files, batches, webhooks = [], [], []
    for number in range(4):
        line = {
            "custom_id": "one",
            "method": "POST",
            "url": "/v1/completions" if number < 3 else "/v1/wrong",
            "body": {"model": MODEL, "prompt": f"number {number}", "max_tokens": 4},
        }
        file = client.files.create(file=(f"{number}.jsonl", json.dumps(line).encode()), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata={"n": str(number)}
        )
        files.append(file.id)
        batches.append(batch.id)
        endpoint = client.webhooks.create(
            url=f"https://127.0.0.1:9/{number}", event_types=["batch.completed"], name=f"hook {number}"
        )
        webhooks.append(endpoint.id)
    for batch_id in batches:
        wait_until(
            lambda batch_id=batch_id: client.batches.retrieve(batch_id).status in ("completed", "failed"),
            seconds=120,
            what="the batch's end",
        )
    page = client.get(f"/batches/{batches[0]}/results", cast_to=object)
    assert isinstance(page, dict)
    requests = [line["id"] for line in page["data"]]
    return {"files": files, "batches": batches, "requests": requests, "webhooks": webhooks}


def run_schemathesis(
    live: ServedMill,
    folder: Path,
    objects: dict[str, list[str]],
    *options: str,
    covers_chat: bool,
    patience_s: float,
) -> None:
    """Fails with what it found. covers_chat: go through the many fields of chat calls one by one, too."""
    config, log = folder / "schemathesis.toml", folder / "schemathesis.log"
    ids = {kind: json.dumps(found) for kind, found in objects.items()}
    config.write_text(CONFIG.format(model=MODEL, covers_chat=json.dumps(covers_chat), **ids))
    command = [
        *(str(PROGRAM), "--config-file", str(config), "--no-color", "run", f"{live.root}/openapi.json"),
        *("--header", f"Authorization: Bearer {live.key('fuzzed')}", "--request-timeout", "60"),
        *("--continue-on-failure", "--generation-database", "none", *options),
    ]
    with log.open("wb") as out:
        ended = subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out, timeout=patience_s
        )
    assert ended.returncode == 0, log.read_text(errors="replace")[-20_000:]


def test_the_gateway_answers_as_its_openapi_document_says(
    live: ServedMill, objects: dict[str, list[str]], tmp_path: Path
) -> None:
    """The same calls each time; `make drill` tries others, for longer."""
    phases = ("--seed", "1", "--phases", "coverage,fuzzing", "-n", "4")
    run_schemathesis(live, tmp_path, objects, *phases, covers_chat=False, patience_s=500)


@pytest.mark.drill
@pytest.mark.timeout(1200)
def test_the_gateway_answers_as_its_openapi_document_says_for_long(
    live: ServedMill, objects: dict[str, list[str]], tmp_path: Path
) -> None:
    """Calls that follow each other, too: what one answers is what the next one asks for."""
    phases = ("--phases", "examples,coverage,fuzzing,stateful", "-n", "100", "--max-time", "300")
    run_schemathesis(live, tmp_path, objects, *phases, covers_chat=True, patience_s=1000)
