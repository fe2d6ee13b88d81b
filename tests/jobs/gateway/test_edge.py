"""What every call passes through: refusals in one form, bounds, timeouts, measures, answers to all that is broken."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from jobs.gateway.errors import render, translate
from jobs.queue import QueueError
from jobs.settings import Settings
from storage.errors import InvalidRequest, PromptmillError, StorageError
from tests.conftest import wait_until
from tests.jobs.gateway.conftest import RunningGateway, changed, running_gateway

ERROR_KEYS = {"message", "type", "param", "code"}


@pytest.fixture(scope="module")
def small(shared_settings: Settings) -> Iterator[RunningGateway]:
    """A gateway that takes small bodies only."""
    with running_gateway(changed(shared_settings, gateway={"max_body_bytes": 20_000})) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def impatient(shared_settings: Settings) -> Iterator[RunningGateway]:
    """A gateway that waits for nobody longer than a second; on a busy machine that may hit anybody."""
    with running_gateway(changed(shared_settings, gateway={"receive_timeout_s": 1.0})) as gateway:
        yield gateway


@pytest.fixture
def http(small: RunningGateway) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {small.key()}"}
    with httpx.Client(base_url=small.url, headers=headers, trust_env=False, timeout=60) as client:
        yield client


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error of an answer, which has all that SDKs look for."""
    error = answer.json()["error"]
    assert set(error) == ERROR_KEYS
    assert isinstance(error["message"], str)
    assert error["message"]
    assert answer.headers["x-request-id"]
    return dict(error)


def speak(gateway: RunningGateway, sent: bytes) -> bytes:
    """Send bytes and read to the end."""
    host, _, port = gateway.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(sent)
        answer = b""
        while piece := connection.recv(65_536):
            answer += piece
        return answer


def statuses(answer: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3})", answer)]


class TestRefusals:
    def test_unknown_routes_and_methods_answer_in_the_apis_form(self, http: httpx.Client) -> None:
        answer = http.get("/v1/nothing")
        assert (answer.status_code, error_of(answer)["code"]) == (404, "route_not_found")
        assert error_of(answer)["message"] == "there is no such route; GET /openapi.json lists them"
        answer = http.put("/v1/files")
        assert (answer.status_code, error_of(answer)["code"]) == (405, "method_not_allowed")
        assert answer.headers["allow"] == "GET, POST"
        assert http.head("/v1/files").status_code == 405

    @pytest.mark.parametrize(
        ("path", "nearest"),
        [
            ("/chat/completions", "/v1/chat/completions"),
            ("/files", "/v1/files"),
            ("/batches/batch_1", "/v1/batches/batch_1"),
            ("/models/tiny", "/v1/models/tiny"),
            ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ],
    )
    def test_a_base_url_without_its_v1_or_with_two_is_told_so(
        self, http: httpx.Client, path: str, nearest: str
    ) -> None:
        answer = http.post(path, json={})
        assert (answer.status_code, error_of(answer)["code"]) == (404, "route_not_found")
        assert error_of(answer)["message"] == (
            f'there is no route "{path}"; did you mean "{nearest}"? The base URL ends with /v1, once'
        )

    def test_a_wrong_parameter_is_named(self, http: httpx.Client) -> None:
        answer = http.get("/v1/batches?limit=many")
        assert answer.status_code == 400
        assert error_of(answer)["param"] == "limit"

    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b"{",
            b"[]",
            b"null",
            b'"text"',
            b"\xff\xfe",
            b'{"a":' * 3000,
            b"[" * 10_000,
            b'{"input_file_id": "\\ud800"}',
            b'{"priority": 1e400}',
            b'{"priority": ' + b"9" * 5000 + b"}",
        ],
    )
    def test_broken_json_is_a_400(self, http: httpx.Client, body: bytes) -> None:
        answer = http.post("/v1/batches", content=body)
        assert answer.status_code == 400
        assert error_of(answer)["type"] == "invalid_request_error"

    def test_a_body_that_is_too_large_or_compressed_is_refused(self, http: httpx.Client) -> None:
        answer = http.post("/v1/batches", content=b" " * 20_001)
        assert (answer.status_code, error_of(answer)["code"]) == (413, "request_too_large")
        answer = http.post("/v1/batches", content=iter([b" " * 5000] * 10))
        assert answer.status_code == 413
        answer = http.post("/v1/batches", content=b"{}", headers={"content-encoding": "gzip"})
        assert (answer.status_code, error_of(answer)["code"]) == (415, "unsupported_content_encoding")

    def test_the_callers_own_request_id_comes_back_if_it_can_be_logged(self, http: httpx.Client) -> None:
        assert http.get("/healthz", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
        for odd in ("x" * 201, "täg".encode()):
            answer = http.get("/healthz", headers={"x-request-id": odd})
            assert answer.headers["x-request-id"].startswith("req_")

    def test_no_key_is_a_401(self, small: RunningGateway) -> None:
        for path in ("/v1/files", "/v1/batches", "/v1/requests/x", "/v1/batches/x/table"):
            answer = httpx.get(f"{small.url}{path}", trust_env=False)
            assert answer.status_code == 401
            error_of(answer)

    def test_statuses_become_the_sdks_exception_classes(self, small: RunningGateway) -> None:
        stranger = openai.OpenAI(base_url=f"{small.url}/v1", api_key="pm-wrong", max_retries=0)
        with stranger, pytest.raises(openai.AuthenticationError):
            stranger.files.list()
        with small.client(max_retries=0) as client:
            with pytest.raises(openai.NotFoundError) as missing:
                client.files.retrieve("file-none")
            assert missing.value.request_id
            with pytest.raises(openai.BadRequestError):
                client.files.list(limit=0)

    @pytest.mark.parametrize(
        ("error", "status", "repeats"),
        [
            (InvalidRequest("m", code="invalid_value", param="p"), 400, None),
            (InvalidRequest("m", code="model_not_found"), 404, None),
            (StorageError("password@host", code="database_unreachable", retryable=True), 503, "retry-after"),
            (QueueError("password@host", code="queue_unreachable", retryable=True), 503, "retry-after"),
            (StorageError("/etc/secret", code="database_error"), 500, "x-should-retry"),
            (StorageError("batch 3 is failed", code="illegal_move"), 400, None),
            (PromptmillError("m", code="batch_not_found"), 404, None),
        ],
    )
    def test_our_own_failures_become_statuses_and_hosts_stay_inside(
        self, error: PromptmillError, status: int, repeats: str | None
    ) -> None:
        refusal = translate(error)
        answer = render(refusal)
        assert answer.status_code == status
        assert "password@host" not in refusal.message
        assert "/etc/secret" not in refusal.message
        assert repeats is None or repeats in answer.headers


class TestBrokenClients:
    def test_what_is_no_http_is_a_400(self, small: RunningGateway) -> None:
        answer = speak(small, b"\x16\x03\x01 this is TLS\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 400")
        assert set(json.loads(answer.partition(b"\r\n\r\n")[2])["error"]) == ERROR_KEYS

    def test_headers_without_end_are_cut_off(self, small: RunningGateway) -> None:
        answer = speak(small, b"GET /healthz HTTP/1.1\r\nX: " + b"a" * 100_000)
        assert answer.startswith(b"HTTP/1.1 4")

    def test_headers_that_do_not_come_are_not_waited_for(self, impatient: RunningGateway) -> None:
        assert speak(impatient, b"GET /healthz HTT").startswith(b"HTTP/1.1 408")

    @pytest.mark.parametrize("hosts", [b"", b"Host: a\r\nHost: b\r\n"])
    def test_a_request_names_one_host(self, small: RunningGateway, hosts: bytes) -> None:
        assert statuses(speak(small, b"GET /healthz HTTP/1.1\r\n" + hosts + b"\r\n")) == [400]

    @pytest.mark.parametrize("endless", [b"5;x=", b"0\r\nX: "], ids=["a chunk's extension", "a trailer"])
    def test_what_goes_on_for_ever_around_a_body_is_cut_off(self, small: RunningGateway, endless: bytes) -> None:
        head = b"POST /v1/batches HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nTransfer-Encoding: chunked\r\n\r\n"
        host, _, port = small.url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(head % small.key().encode() + endless)
            with pytest.raises(ConnectionError):
                for _ in range(10_000):
                    connection.sendall(b"y" * 10_000)

    def test_trailers_change_nothing(self, small: RunningGateway) -> None:
        sent = b"POST /v1/batches HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
        trailers = b"X-Request-Id: of-a-trailer\r\nAuthorization: Bearer %s\r\n" % small.key().encode()
        answer = speak(small, sent + b"2\r\n{}\r\n0\r\n" + trailers + b"\r\n")
        assert statuses(answer) == [401]
        assert b"of-a-trailer" not in answer

    @pytest.mark.parametrize("method", [b"GET", b"POST"])
    def test_who_offers_another_protocol_is_answered_in_this_one(self, small: RunningGateway, method: bytes) -> None:
        """As Java's client does with every call."""
        head = b"%s /v1/batches HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n" % (method, small.key().encode())
        head += b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"
        host, _, port = small.url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            for _ in range(2):
                connection.sendall(head + (b"\r\n" if method == b"GET" else b"Content-Length: 2\r\n\r\n{}"))
                answer = connection.recv(65_536)
                assert statuses(answer) == [200 if method == b"GET" else 400]
                assert b"invalid_json" not in answer

    def test_a_body_that_does_not_come_is_not_waited_for(self, impatient: RunningGateway) -> None:
        head = (
            f"POST /v1/batches HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {impatient.key()}\r\n"
            "Content-Length: 100\r\n\r\n{"
        )
        answer = speak(impatient, head.encode())
        assert answer.startswith(b"HTTP/1.1 408")
        assert b'"code":"request_timeout"' in answer

    def test_a_body_that_drips_is_cut_off(self, impatient: RunningGateway) -> None:
        """A byte each time before the patience ends would hold a connection for ever."""
        host, _, port = impatient.url.removeprefix("http://").partition(":")
        head = (
            f"POST /v1/files HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {impatient.key()}\r\n"
            "Content-Type: multipart/form-data; boundary=x\r\nContent-Length: 100000\r\n\r\n"
            '--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        )
        with socket.create_connection((host, int(port)), timeout=0.1) as connection:
            connection.sendall(head.encode())
            answer = b""

            def is_answered() -> bool:
                nonlocal answer
                with contextlib.suppress(TimeoutError, ConnectionError):
                    connection.sendall(b"x")
                with contextlib.suppress(TimeoutError, ConnectionError):
                    answer += connection.recv(65_536)
                return b"request_timeout" in answer

            wait_until(is_answered, seconds=60, what="an end of the server's patience")

    def test_slow_clients_do_not_hold_up_others(self, small: RunningGateway, http: httpx.Client) -> None:
        host, _, port = small.url.removeprefix("http://").partition(":")
        slow = [socket.create_connection((host, int(port))) for _ in range(50)]
        try:
            for connection in slow:
                connection.sendall(b"POST /v1/files HTTP/1.1\r\n")
            assert http.get("/healthz").status_code == 200
        finally:
            for connection in slow:
                connection.close()


class TestHealth:
    def test_it_lives_and_is_ready(self, http: httpx.Client) -> None:
        assert http.get("/healthz").json() == {"status": "ok"}
        answer = http.get("/readyz")
        assert answer.status_code == 200
        assert answer.json() == {"status": "ok", "checks": {"database": "ok", "queue": "ok"}}

    def test_it_is_not_ready_without_its_queue(self, sqlite_settings: Settings) -> None:
        settings = changed(sqlite_settings, queue={"url": "redis://127.0.0.1:1/0"})
        with running_gateway(settings) as gateway:
            answer = httpx.get(f"{gateway.url}/readyz", trust_env=False)
            assert answer.status_code == 503
            assert answer.json() == {
                "status": "unavailable",
                "checks": {"database": "ok", "queue": "queue_unreachable"},
            }
            assert httpx.get(f"{gateway.url}/healthz", trust_env=False).status_code == 200
            assert "promptmill_reachable" in httpx.get(f"{gateway.url}/metrics", trust_env=False).text

    def test_calls_are_measured_by_route_and_status(self, http: httpx.Client) -> None:
        http.get("/v1/files/file-none")
        http.get("/v1/nothing/at/all")
        assert error_of(http.post("/v1/chat/completions", json={}))["code"] == "missing_required_parameter"
        text = http.get("/metrics").text
        assert 'promptmill_http_requests_total{method="GET",route="/v1/files/{file_id}",status="404"} ' in text
        assert 'promptmill_http_requests_total{method="GET",route="none",status="404"} ' in text
        assert 'promptmill_http_requests_total{method="POST",route="/v1/chat/completions",status="400"} ' in text
        assert 'promptmill_http_request_duration_seconds_bucket{le="0.1",method="GET",route="/healthz"}' in text
        assert 'promptmill_batches{status="in_progress"} ' in text
        assert 'promptmill_reachable{service="queue"} 1.0' in text
        assert "file-none" not in text

    def test_a_gateway_that_is_told_to_stop_ends_its_calls_first(self, sqlite_settings: Settings) -> None:
        """An upload that is under way when SIGTERM comes is still answered."""
        with running_gateway(sqlite_settings) as gateway:
            going = threading.Event()

            def pieces() -> Iterator[bytes]:
                yield b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x\r\n'
                yield b'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
                gateway.server.should_exit = True
                going.set()
                yield b"{}\r\n--x--\r\n"

            answer = httpx.post(
                f"{gateway.url}/v1/files",
                content=pieces(),
                headers={
                    "authorization": f"Bearer {gateway.key()}",
                    "content-type": "multipart/form-data; boundary=x",
                },
                trust_env=False,
                timeout=60,
            )
            assert going.is_set()
            assert answer.status_code == 200
