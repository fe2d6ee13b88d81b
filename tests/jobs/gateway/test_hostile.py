"""What hostile clients send: a 4xx each, nothing held, and nothing in the logs that should not be there."""

from __future__ import annotations

import errno
import gzip
import json
import random
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.keys import make_key
from jobs.settings import Settings
from storage.database import Database
from tests.conftest import wait_until
from tests.jobs.gateway.conftest import MODEL, PATIENCE_S, RunningGateway, chat_line, jsonl
from tests.jobs.gateway.processes import gateway_process

SECRET = "the-moon-is-a-harsh-mistress"


@pytest.fixture(scope="module")
def key(shared_gateway: RunningGateway) -> str:
    return shared_gateway.key("hostile")


@pytest.fixture
def http(shared_gateway: RunningGateway, key: str) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=shared_gateway.url, headers=headers, trust_env=False, timeout=60) as client:
        yield client


def posts(http: httpx.Client) -> list[str]:
    """Every route that takes a JSON body, with ids that there are not."""
    document: dict[str, Any] = http.get("/openapi.json").json()
    found = [
        re.sub(r"\{\w+\}", "x", path)
        for path, operations in document["paths"].items()
        if "application/json" in operations.get("post", {}).get("requestBody", {}).get("content", {})
    ]
    assert len(found) >= 7, found
    return found


def is_refused(answer: httpx.Response, what: object) -> None:
    assert 400 <= answer.status_code < 500, (what, answer.status_code, answer.text[:300])
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}, what
    assert SECRET not in answer.headers.get("location", "")


BODIES: dict[str, bytes] = {
    "nothing": b"",
    "null": b"null",
    "a list": b"[]",
    "a number": b"1e999",
    "half a body": b'{"model": "tiny", "messages": [',
    "two bodies": b'{"model": "tiny"}{"model": "tiny"}',
    "10,000 lists": b"[" * 10_000 + b"]" * 10_000,
    "10,000 objects": b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
    "10,000 deep in a field": b'{"model": "tiny", "metadata": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    "a number of 100,000 digits": b'{"priority": ' + b"9" * 100_000 + b"}",
    "a key of 100,000 characters": b'{"' + b"k" * 100_000 + b'": 1}',
    "10,000 keys": json.dumps({f"k{n}": n for n in range(10_000)}).encode(),
    "not UTF-8": b'{"model": "\xff\xfe"}',
    "UTF-16": '{"model": "tiny"}'.encode("utf-16"),
    "half a surrogate": b'{"model": "\\ud800", "prompt": "\\ud800", "url": "\\ud800"}',
    "NUL": b'{"model": "ti\\u0000ny", "prompt": "\\u0000", "name": "\\u0000"}',
    "the same key twice": b'{"model": "tiny", "model": "other"}',
    "NaN": b'{"temperature": NaN, "priority": NaN}',
    "a string for everything": json.dumps(
        dict.fromkeys(("model", "messages", "prompt", "url", "event_types", "priority", "input_file_id"), "x")
    ).encode(),
    "a list for everything": json.dumps(
        {name: [[]] for name in ("model", "messages", "prompt", "url", "event_types", "priority", "input_file_id")}
    ).encode(),
}


@pytest.mark.parametrize("what", BODIES)
def test_each_route_refuses_bodies_that_are_none(http: httpx.Client, what: str) -> None:
    for path in posts(http):
        answer = http.post(path, content=BODIES[what], headers={"content-type": "application/json"})
        if what in ("nothing", "the same key twice") and answer.status_code == 200:
            continue  # a route whose body may be left out
        is_refused(answer, (path, what))


@pytest.mark.parametrize(
    ("given", "code"),
    [(b"", "empty_string"), (b"k" * 256, "string_above_max_length"), (b"a\xadb", "invalid_value")],
)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/batches", {"input_file_id": "file-x", "endpoint": "/v1/completions", "completion_window": "24h"}),
        ("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"model": "tiny", "prompt": "a"}),
    ],
)
def test_a_key_that_is_none_is_refused_by_each_route_that_takes_one(
    http: httpx.Client, path: str, body: dict[str, Any], given: bytes, code: str
) -> None:
    answer = http.post(path, json=body, headers={b"Idempotency-Key": given})
    is_refused(answer, path)
    assert answer.json()["error"]["code"] == code
    assert answer.json()["error"]["param"] == "Idempotency-Key"


NO_JSON_OBJECTS = ("null", "a list", "a number", "half a body", "two bodies", "10,000 lists", "not UTF-8", "UTF-16")


@pytest.mark.parametrize("what", NO_JSON_OBJECTS)
def test_each_route_says_in_the_same_words_that_a_body_is_no_json_object(http: httpx.Client, what: str) -> None:
    answers = {path: http.post(path, content=BODIES[what]).json()["error"] for path in posts(http)}
    assert {error["code"] for error in answers.values()} == {"invalid_json"}, answers
    (message,) = {error["message"] for error in answers.values()}
    assert "write one JSON object" in message or "nested more than" in message
    assert "line" not in message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    ["model", "messages", "prompt", "max_tokens", "stop", "seed", "logit_bias", "n", "metadata", "url", "event_types",
     "input_file_id", "endpoint", "completion_window", "output_expires_after", "priority", "deadline", "max_new_tokens"]
)  # fmt: skip


@settings(max_examples=30)
@given(data=st.data())
def test_fuzzed_bodies_are_never_a_5xx(shared_gateway: RunningGateway, key: str, data: st.DataObject) -> None:
    """No worker serves the model, so that nothing can be asked by chance."""
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    with httpx.Client(base_url=shared_gateway.url, headers=headers, trust_env=False, timeout=60) as http:
        path = data.draw(st.sampled_from(posts(http)))
        body = data.draw(st.dictionaries(FIELDS, JSON, max_size=6))
        answer = http.post(path, content=json.dumps(body).encode())
        assert answer.status_code < 500, (path, body, answer.text)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/files/../../etc/passwd",
        "/v1/files/%2e%2e%2f%2e%2e%2fetc%2fpasswd/content",
        "/v1/files/..%5c..%5cpromptmill.db/content",
        "/v1/files/file-%00/content",
        "/v1/files/" + "x" * 8000,
        "/v1/files//content",
        "/v1/batches/%f0%28%8c%28",
        "/v1/batches/batch_%0d%0aset-cookie:x=y",
        "/v1/batches/' OR 1=1 --",
        "/v1/batches/%25s%25n",
        "/v1/requests/batch_req_-1",
        "/v1/requests/batch_req_" + "f" * 200,
        "/v1/requests/batch_req_7fffffffffffffff",
        "/v1/requests/last:a",
        "/v1/requests/batch_:a",
        "/v1/webhook_endpoints/%00",
        "/v1/batches?after=%00",
        "/v1/batches?limit=99999999999999999999999999",
        "/v1/batches?limit=-1",
        "/v1/batches/x/table?format=../../x",
        "/v1/batches/x/results?after=99999999999999999999999",
    ],
)
def test_tricks_with_paths_find_nothing(http: httpx.Client, path: str) -> None:
    answer = http.send(httpx.Request("GET", f"{http.base_url}{path}", headers=http.headers))
    is_refused(answer, path)
    assert "set-cookie" not in answer.headers
    assert "root:" not in answer.text


@pytest.mark.parametrize(
    "name", ["../../../evil", "..\\..\\evil", "/etc/passwd", "a\0b", "con", "x" * 5000, "\u202egnp.exe", '"; rm -rf /']
)
def test_tricks_with_filenames_make_no_other_file(
    shared_gateway: RunningGateway, http: httpx.Client, name: str
) -> None:
    folder = shared_gateway.settings.home.parent
    before = {path for path in folder.rglob("*") if "evil" in path.name or "passwd" in path.name}
    answer = http.post(
        "/v1/files", files={"file": (name, jsonl([chat_line("a", name[:50])]))}, data={"purpose": "batch"}
    )
    if answer.status_code == 200:
        shown = answer.json()["filename"]
        assert not set(shown) & set("/\\\0\r\n")
        content = http.get(f"/v1/files/{answer.json()['id']}/content")
        assert "\n" not in content.headers["content-disposition"]
    else:
        is_refused(answer, name)
    assert {path for path in folder.rglob("*") if "evil" in path.name or "passwd" in path.name} == before


def test_decompression_bombs_are_refused_unread(http: httpx.Client, shared_gateway: RunningGateway) -> None:
    """As a compressed body, and as a compressed file; a gigabyte of zeros each."""
    bomb = gzip.compress(gzip.compress(b"\0" * 50_000_000))
    process = psutil.Process()
    before = process.memory_info().rss
    for encoding in ("gzip", "deflate", "br", "zstd", "gzip, gzip", "GZIP"):
        answer = http.post("/v1/chat/completions", content=bomb, headers={"content-encoding": encoding})
        is_refused(answer, encoding)
        assert answer.status_code == 415
    answer = http.post("/v1/files", files={"file": ("in.jsonl.gz", bomb)}, data={"purpose": "batch"})
    is_refused(answer, "an upload")
    assert process.memory_info().rss - before < 40_000_000


def speak(gateway: RunningGateway, sent: bytes) -> bytes:
    """Send bytes and read what comes until the door is closed, gently or not."""
    host, _, port = gateway.url.removeprefix("http://").partition(":")
    answer = b""
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        try:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(65_536):
                answer += piece
        except OSError as error:
            # Not connected: the door was closed between the last byte and the shutdown.
            if not isinstance(error, ConnectionError) and error.errno != errno.ENOTCONN:
                raise
    return answer


SMUGGLED = b"GET /v1/usage HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer stolen\r\n\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 500,  # TLS to a plain port
        b"GET / HTTP/9.9\r\n\r\n",
        b"BREW /v1/chat/completions HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v1/files HTTP/1.1\r\nHost: x\r\n" + b"X: " + b"y" * 100_000 + b"\r\n\r\n",
        b"GET /v1/files HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X-%d: y\r\n" % n for n in range(20_000)) + b"\r\n",
        b"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999999\r\n\r\n",
        b"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"POST /v1/usage HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        + SMUGGLED,
        b"POST /v1/usage HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: xchunked\r\n\r\n" + SMUGGLED,
        b"POST /v1/files HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFF\r\n",
        b"POST /v1/files HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\nx\r\n",
        b"GET /v1/files\nHTTP/1.1\r\n\r\n",
        b"GET http://evil.example/v1/files HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"CONNECT evil.example:443 HTTP/1.1\r\nHost: evil.example:443\r\n\r\n",
        b"\r\n\r\n\r\n\r\n",
    ],
)
def test_what_is_no_http_gets_a_4xx_or_a_closed_door(shared_gateway: RunningGateway, sent: bytes) -> None:
    """And never an answer to what was hidden behind it."""
    answer = speak(shared_gateway, sent)
    statuses = re.findall(rb"HTTP/1\.1 (\d{3})", answer)
    assert all(status.startswith(b"4") for status in statuses), answer[:500]
    assert httpx.get(f"{shared_gateway.url}/healthz", trust_env=False).status_code == 200


def test_a_hundred_stalled_clients_hold_up_nobody_and_leave_nothing(
    shared_gateway: RunningGateway, http: httpx.Client
) -> None:
    """Half of them in the midst of their headers, half in the midst of an upload."""
    host, _, port = shared_gateway.url.removeprefix("http://").partition(":")
    key = http.headers["authorization"].encode()
    upload = (
        b"POST /v1/files HTTP/1.1\r\nHost: x\r\nAuthorization: " + key + b"\r\nContent-Length: 1000000\r\n"
        b"Content-Type: multipart/form-data; boundary=b\r\n\r\n--b\r\n"
        b'Content-Disposition: form-data; name="file"; filename="f"\r\n\r\n' + SECRET.encode()
    )
    files = shared_gateway.settings.files_dir

    def parts() -> list[str]:
        return [path.name for path in files.iterdir() if path.name.endswith(".part")]

    with ExitStack() as stack:
        for n in range(100):
            connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
            connection.sendall(upload if n % 2 else b"GET /v1/files HTTP/1.1\r\nHost")
        wait_until(lambda: len(parts()) == 50, seconds=PATIENCE_S, what="fifty uploads under way")
        assert http.get("/v1/usage").status_code == 200
        assert http.get("/healthz").status_code == 200
    wait_until(lambda: not parts(), seconds=PATIENCE_S, what="the end of all of them")


def test_neither_prompts_nor_keys_come_into_the_logs(sqlite_settings: Settings, sqlite_database: Database) -> None:
    """Whatever is wrong with a call, and however; a gateway of its own that logs all it can."""
    key = make_key(sqlite_database, tenant="hostile", name="k").key
    message = {"role": "user", "content": SECRET}
    with (
        gateway_process(sqlite_settings, {"PROMPTMILL_LOG_LEVEL": "debug"}) as url,
        httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, trust_env=False, timeout=60) as http,
    ):
        for body in (
            {"model": MODEL, "messages": [message]},
            {"model": "other", "messages": [message]},
            {"model": MODEL, "messages": [message], "temprature": 1},
            {"model": MODEL, "messages": [{**message, "role": SECRET}]},
            {"model": MODEL, "messages": [message], "stop": [SECRET] * 100},
            {"model": MODEL, "messages": [message], "metadata": {"\ud800": SECRET}},
            {"prompt": SECRET, "max_new_tokens": -1},
            {"model": MODEL, "messages": [{"role": "user", "content": SECRET + "\0"}]},
        ):
            for path in ("/v1/chat/completions", "/v1/completions", "/api/v1/chat"):
                answer = http.post(path, content=json.dumps(body).encode())
                assert answer.status_code in (400, 404, 503), (path, body, answer.text)
        broken = json.dumps({"model": MODEL, "messages": [message]}).encode()[:-3]
        http.post("/v1/chat/completions", content=broken)
        http.post("/v1/files", files={"file": (SECRET, jsonl([chat_line("a", SECRET)]))}, data={"purpose": SECRET})
        http.get("/v1/files", headers={"authorization": f"Bearer {key}{SECRET}"})
        http.get(f"/v1/files/{SECRET}")
        http.get("/v1/usage", headers={"x-request-id": SECRET * 100})
    said = "".join(path.read_text(errors="replace") for path in sqlite_settings.logs_dir.iterdir())
    assert "gateway_started" in said
    assert SECRET not in said
    assert key not in said


def test_random_bytes_are_survived(shared_gateway: RunningGateway) -> None:
    draw = random.Random(7)
    for _ in range(100):
        speak(shared_gateway, draw.randbytes(draw.randrange(1, 3000)))
    assert httpx.get(f"{shared_gateway.url}/healthz", trust_env=False).status_code == 200
