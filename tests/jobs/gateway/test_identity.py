"""Who may call, how much, and that nobody finds what is another tenant's."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import redis

from jobs import quotas
from jobs.audit import AuditError, audit_request
from jobs.gateway.app import create_app
from jobs.gateway.identity import check_binding, is_loopback
from jobs.keys import make_key, revoke_key
from jobs.quotas import RequestRate
from jobs.settings import Settings
from jobs.worker_process import WorkerProcess
from storage import queries, transitions
from storage.database import Database
from storage.errors import SettingsError
from storage.models import Door, RequestStatus
from tests.conftest import wait_until
from tests.jobs.gateway.conftest import (
    MODEL,
    PATIENCE_S,
    MakeGateway,
    RunningGateway,
    changed,
    chat_line,
    upload,
    wait_for_status,
)
from tests.jobs.gateway.processes import gateway_process


def call(url: str, key: str | None, method: str = "GET", path: str = "/v1/usage", **options: Any) -> httpx.Response:
    headers = {**({} if key is None else {"Authorization": f"Bearer {key}"}), **options.pop("headers", {})}
    # Plain http: without certificates to verify, a client costs next to nothing.
    return httpx.request(method, f"{url}{path}", headers=headers, timeout=60, trust_env=False, verify=False, **options)


# --- keys --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer pm-nothing"},
        {"Authorization": "Bearer " + "x" * 5000},
        {"Authorization": "Basic dXNlcjpwYXNz"},
        {"Authorization": "pm-no-scheme"},
        {"Authorization": "Bearer pm-\xff\xfe"},
        {"X-Api-Key": "pm-elsewhere"},
    ],
)
def test_a_call_without_a_good_key_is_401_in_openais_form(
    shared_gateway: RunningGateway, headers: dict[str, str]
) -> None:
    raw = {name: value.encode("latin-1") for name, value in headers.items()}
    answer = httpx.get(f"{shared_gateway.url}/v1/usage", headers=raw, trust_env=False)
    assert answer.status_code == 401
    error = answer.json()["error"]
    assert (error["code"], error["type"], error["param"]) == ("invalid_api_key", "invalid_request_error", None)
    assert answer.headers["www-authenticate"] == "Bearer"
    given = headers.get("Authorization", "").removeprefix("Bearer ")
    assert len(given) < 8 or given not in answer.text


def test_the_sdk_raises_its_authentication_error(shared_gateway: RunningGateway) -> None:
    with (
        openai.OpenAI(base_url=f"{shared_gateway.url}/v1", api_key="sk-openai") as client,
        pytest.raises(openai.AuthenticationError) as refused,
    ):
        client.files.list()
    assert refused.value.code == "invalid_api_key"


def test_every_route_but_health_asks_for_a_key(shared_gateway: RunningGateway) -> None:
    document = call(shared_gateway.url, None, path="/openapi.json").json()
    asked = 0
    for path, operations in document["paths"].items():
        for method in operations:
            if path in ("/healthz", "/readyz", "/metrics"):
                continue
            answer = call(shared_gateway.url, None, method.upper(), re.sub(r"\{\w+\}", "x", path))
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key"), (method, path)
            asked += 1
    assert asked >= 20


def test_a_revoked_key_is_refused_within_seconds(shared_gateway: RunningGateway) -> None:
    gateway = shared_gateway
    key = gateway.key()
    assert call(gateway.url, key).status_code == 200
    revoke_key(gateway.database, key[:9])
    wait_until(lambda: call(gateway.url, key).status_code == 401, what="the refusal")
    assert "revoked" in call(gateway.url, key).json()["error"]["message"]


def test_the_use_of_a_key_is_noted(shared_gateway: RunningGateway, tenant: str) -> None:
    key = make_key(shared_gateway.database, tenant=tenant, name="laptop")
    assert call(shared_gateway.url, key.key).json()["api_key"] == "laptop"
    with shared_gateway.database.read() as connection:
        (row,) = queries.list_api_keys(connection, tenant)
    assert row.last_used_at is not None


def test_an_open_gateway_needs_no_key_for_calls_straight_from_this_machine(
    sqlite_settings: Settings, make_gateway: MakeGateway
) -> None:
    """A proxy's calls are others' calls, and so are those of a web page whose name points here."""
    gateway = make_gateway(changed(sqlite_settings, gateway={"port": 0, "open_on_loopback": True}))
    assert call(gateway.url, None).json()["tenant"] == "default"
    assert call(gateway.url, "not-needed").json()["tenant"] == "default"
    assert call(gateway.url, gateway.key("acme")).json()["tenant"] == "acme"
    assert call(gateway.url, "pm-wrong").status_code == 401
    for headers in ({"X-Forwarded-For": "203.0.113.9"}, {"Forwarded": "for=x"}, {"Host": "evil.example"}, {"Via": "p"}):
        assert call(gateway.url, None, headers=headers).status_code == 401, headers
    port = gateway.url.rpartition(":")[2]
    assert call(gateway.url, None, headers={"Host": f"localhost:{port}"}).status_code == 200
    assert call(gateway.url, None, headers={"Host": f"[::1]:{port}"}).status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "gateway.example"])
def test_an_open_gateway_does_not_start_where_others_can_reach_it(sqlite_settings: Settings, host: str) -> None:
    with pytest.raises(SettingsError, match="OPEN_ON_LOOPBACK"):
        create_app(changed(sqlite_settings, gateway={"host": host, "open_on_loopback": True}))
    assert not check_binding(host, open_on_loopback=False)


def test_loopback_is_told_from_the_rest() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost", "LOCALHOST"))
    assert not any(is_loopback(host) for host in ("", "0.0.0.0", "::", "localhost.example", "128.0.0.1", "127.0.0.1.x"))


# --- quotas ------------------------------------------------------------------------------------------------------


def set_quotas(database: Database, tenant: str, **bounds: int | None) -> None:
    with database.write() as connection:
        transitions.set_quotas(connection, tenant, bounds)


def test_requests_a_minute_are_bounded_over_several_gateways(
    sqlite_settings: Settings, sqlite_database: Database, make_gateway: MakeGateway
) -> None:
    """Two processes, one count. The other tenant is not touched."""
    key, other = (make_key(sqlite_database, tenant=tenant, name="k").key for tenant in ("acme", "other"))
    set_quotas(sqlite_database, "acme", max_requests_per_minute=20)
    here = make_gateway(sqlite_settings)
    with gateway_process(sqlite_settings) as there:
        began = time.monotonic()
        answers = [call(url, key) for _ in range(20) for url in (here.url, there)]
        minutes = 1 + int((time.monotonic() - began) // 60)
        admitted = [answer for answer in answers if answer.status_code == 200]
        refused = [answer for answer in answers if answer.status_code == 429]
        assert len(admitted) + len(refused) == 40
        assert 20 <= len(admitted) <= 20 * minutes
        if minutes == 1:
            assert admitted[-1].json()["requests_per_minute"] == {"used": 20, "limit": 20}
        error = refused[-1].json()["error"]
        assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
        assert 1 <= int(refused[-1].headers["retry-after"]) <= 60
        assert "x-should-retry" not in refused[-1].headers
        assert all(call(url, other).status_code == 200 for url in (here.url, there))


def test_the_rate_slides(queue_url: str, queue_client: redis.Redis) -> None:
    """Calls leave the count a minute after they were made, not when a minute of the clock begins."""
    import asyncio

    seconds, _ = queue_client.time()
    key = quotas.rate_key("acme")
    queue_client.hset(key, mapping={str(seconds - 70): 5, str(seconds - 50): 3, str(seconds - 2): 2})

    async def admit() -> list[quotas.Admission]:
        rate = RequestRate(f"unix://{queue_url.removeprefix('redis+socket://')}")
        try:
            return [await rate.admit("acme", 6) for _ in range(2)]
        finally:
            await rate.close()

    first, second = asyncio.run(admit())
    assert (first.is_admitted, first.calls) == (True, 6)
    assert not second.is_admitted
    assert 1 <= second.retry_after_s <= 10  # when the three of 50 s ago leave
    assert str(seconds - 70) not in queue_client.hgetall(key)
    assert 0 < queue_client.ttl(key) <= quotas.WINDOW_S + 1


def test_the_rate_is_not_enforced_while_redis_is_away(tmp_path: Any) -> None:
    """What harms others for good is bounded in the database; an outage of the queue is none of the door."""
    import asyncio

    async def admit() -> quotas.Admission:
        rate = RequestRate(f"unix://{tmp_path}/nothing.sock")
        try:
            return await rate.admit("acme", 0)
        finally:
            await rate.close()

    assert asyncio.run(admit()).is_admitted


def test_running_batches_are_bounded(shared_gateway: RunningGateway, tenant: str) -> None:
    set_quotas(shared_gateway.database, tenant, max_running_batches=2)
    with shared_gateway.client(tenant, max_retries=0) as client:
        files = [upload(client, [chat_line("a", f"file {n}")]) for n in range(3)]

        def create(file_id: str) -> Any:
            return client.batches.create(
                input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h"
            )

        first = create(files[0].id)
        create(files[1].id)
        assert create(files[0].id).id == first.id  # a repeated call is no further batch
        with pytest.raises(openai.RateLimitError) as refused:
            create(files[2].id)
        assert refused.value.code == "rate_limit_exceeded"
        assert refused.value.response.headers["retry-after"] == "30"
        client.batches.cancel(first.id)
        wait_until(lambda: client.batches.retrieve(first.id).status == "cancelled", seconds=PATIENCE_S)
        create(files[2].id)


def test_a_batch_beyond_the_queued_tokens_fails_with_openais_code(
    shared_gateway: RunningGateway, shared_worker: WorkerProcess, tenant: str
) -> None:
    """Its creation succeeds: clients only poll. `line` and `param` are null, as OpenAI has them."""
    with shared_gateway.client(tenant) as client:
        small, large = (upload(client, [chat_line("a", "x" * size)]) for size in (40, 4000))
        set_quotas(shared_gateway.database, tenant, max_queued_prompt_tokens=100)
        made = [
            client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
            for file in (small, large)
        ]
        wait_for_status(client, made[0].id, "completed")
        wait_until(lambda: client.batches.retrieve(made[1].id).status == "failed", seconds=PATIENCE_S)
        errors = client.batches.retrieve(made[1].id).errors
        assert errors is not None
        assert errors.data is not None
        (error,) = errors.data
        assert (error.code, error.line, error.param) == ("token_limit_exceeded", None, None)
        used = call(shared_gateway.url, client.api_key).json()["queued_prompt_tokens"]
        assert used == {"used": 0, "limit": 100}  # what has run, and what was refused, is not queued


def test_storage_is_bounded_and_freed_by_deleting(shared_gateway: RunningGateway, tenant: str) -> None:
    with shared_gateway.client(tenant, max_retries=0) as client:
        first = upload(client, [chat_line("a", "x" * 3000)])
        set_quotas(shared_gateway.database, tenant, max_storage_bytes=first.bytes + 1000)
        with pytest.raises(openai.RateLimitError) as refused:
            upload(client, [chat_line("b", "y" * 3000)])
        assert refused.value.code == "insufficient_quota"
        assert refused.value.body["message"] == (  # type: ignore[index]
            f"tenant {tenant} stores {first.bytes} bytes, this adds {first.bytes}, and {first.bytes + 1000} are "
            "allowed; delete files, or have the quota raised: promptmill tenant set"
        )
        assert refused.value.response.headers["x-should-retry"] == "false"
        assert call(shared_gateway.url, client.api_key).json()["storage_bytes"] == {
            "used": first.bytes,
            "limit": first.bytes + 1000,
        }
        with shared_gateway.database.read() as connection:
            assert queries.stored_bytes(connection, tenant) == first.bytes
        client.files.delete(first.id)
        upload(client, [chat_line("b", "y" * 3000)])


def test_a_chat_call_beyond_the_queued_tokens_is_429(
    shared_gateway: RunningGateway, shared_worker: WorkerProcess, tenant: str
) -> None:
    set_quotas(shared_gateway.database, tenant, max_queued_prompt_tokens=30)
    with shared_gateway.client(tenant, max_retries=0) as client:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}], max_tokens=4)
        with pytest.raises(openai.RateLimitError) as refused:
            client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x" * 300}])
        assert refused.value.code == "token_limit_exceeded"


# --- isolation ---------------------------------------------------------------------------------------------------


@pytest.fixture
def possessions(shared_gateway: RunningGateway, shared_worker: WorkerProcess) -> Iterator[dict[str, list[str]]]:
    """What tenant `acme` has: ids of every kind."""
    gateway = shared_gateway
    with gateway.client("acme") as client:
        file = upload(client, [chat_line("mine-1", "acme's secret"), chat_line("mine-2", "x" * 500)])
        done = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"m": "acme's"}
        )
        done = wait_for_status(client, done.id, "completed")
        answer = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "acme's secret"}], max_tokens=4
        )
        with gateway.database.write() as connection:
            later = transitions.create_batch(
                connection,
                transitions.NewBatch(
                    public_id=f"batch_{'7' * 32}",
                    fingerprint="f",
                    endpoint="/v1/completions",
                    model=MODEL,
                    tenant="acme",
                    door=Door.CLI,
                ),
                1.0,
            )
            transitions.add_requests(connection, later, [transitions.NewRequest(1, "mine-3", '{"prompt":"p"}')])
            transitions.start_batch(connection, later, 1.0)
            transitions.pause_batch(connection, later, 1.0)
            interactive = [row for row in queries.list_batches(connection) if row.is_interactive]
        content = (
            client.files.content(done.output_file_id or "").text + client.files.content(done.error_file_id or "").text
        )
        lines = [json.loads(line)["id"] for line in content.splitlines()]
        endpoint = client.webhooks.create(
            url="https://acme.example/hook", name="acme's", event_types=["batch.completed"]
        )
        yield {
            "file": [file.id, done.output_file_id or "", done.error_file_id or ""],
            "batch": [done.id, f"batch_{'7' * 32}", *(row.public_id for row in interactive)],
            "request": [*lines, f"{done.id}:mine-1", "batch_req_" + answer.id.removeprefix("chatcmpl-")],
            "webhook": [endpoint.id],
        }


def test_another_tenants_key_finds_nothing_by_any_route(
    shared_gateway: RunningGateway, possessions: dict[str, list[str]]
) -> None:
    """Every route of the document, every kind of id in every place where an id can stand."""
    gateway = shared_gateway
    ids = [each for kind in possessions.values() for each in kind]
    assert len(ids) >= 10
    assert all(ids)
    own, other = gateway.key("acme"), gateway.key("other")
    document = call(gateway.url, None, path="/openapi.json").json()
    before = _snapshot(gateway, own, possessions)
    secrets = [*ids, "acme", "mine-1", "mine-2", "mine-3"]
    walked = 0

    def find_nothing(method: str, path: str, *, is_named: bool, **options: Any) -> None:
        nonlocal walked
        answer = call(gateway.url, other, method, path, **options)
        walked += 1
        asked = f"{method} {path} {options}"
        assert answer.status_code < 500, (asked, answer.text)
        if is_named:
            assert answer.status_code in (400, 404), (asked, answer.text)
            assert set(answer.json()) == {"error"}, asked
        said = answer.text
        for secret in secrets:
            if secret not in asked:
                assert secret not in said, asked

    for path, operations in document["paths"].items():
        if path in ("/healthz", "/readyz", "/metrics"):
            continue
        for method, operation in operations.items():
            parameters = [each["name"] for each in operation.get("parameters", []) if each["in"] == "path"]
            places = [each["name"] for each in operation.get("parameters", []) if each["in"] == "query"]
            bodies = _bodies(path) if method == "post" else [None]
            for body in bodies:
                sent = {} if body is None else {"json": body}
                if not parameters:
                    find_nothing(method.upper(), path, is_named=False, **sent)
                for each in ids:
                    if parameters:
                        named = re.sub(r"\{\w+\}", each, path)
                        find_nothing(method.upper(), named, is_named=True, **sent)
                    elif "after" in places:
                        find_nothing(method.upper(), path, is_named=True, params={"after": each})
    for each in possessions["file"]:
        body = {"input_file_id": each, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        find_nothing("POST", "/v1/batches", is_named=True, json=body)
    assert walked >= 150
    assert _snapshot(gateway, own, possessions) == before


def test_what_ran_beside_a_request_is_shown_of_its_own_tenant_alone(database: Database) -> None:
    """Tenants share workers and their forward batches; whose requests those were is not for everybody."""
    ids = []
    with database.write() as connection:
        for tenant in ("acme", "acme", "other"):
            new = transitions.NewBatch(
                public_id=f"batch_{len(ids)}", fingerprint="f", endpoint="/v1/completions", model="m", tenant=tenant
            )
            batch_id = transitions.create_batch(connection, new, 1.0)
            line = transitions.NewRequest(1, f"{tenant}-{len(ids)}", '{"prompt":"p"}')
            transitions.add_requests(connection, batch_id, [line])
            transitions.start_batch(connection, batch_id, 1.0)
            ids += queries.request_ids(connection, batch_id)
        transitions.queue_requests(connection, ids, 2.0)
        claimed = transitions.claim_requests(connection, ids, worker="w", lease_s=60, now=3.0)
        outcomes = [
            transitions.RequestOutcome(each.id, each.batch_id, 1, RequestStatus.COMPLETED, 200, "{}")
            for each in claimed
        ]
        transitions.record_outcomes(connection, outcomes, worker="w", now=4.0)
    everybody, own = (
        [mate for _, mate in audit_request(database, f"batch_req_{ids[0]:x}", tenant=tenant).attempts[0].mates]
        for tenant in (None, "acme")
    )
    assert (sorted(everybody), own) == (["acme-1", "other-2"], ["acme-1"])
    with pytest.raises(AuditError):
        audit_request(database, f"batch_req_{ids[0]:x}", tenant="other")


def test_keys_of_idempotency_are_each_tenants_own(shared_gateway: RunningGateway, shared_worker: WorkerProcess) -> None:
    """The same key and the same body of another tenant is another request."""
    gateway = shared_gateway
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 4}
    headers = {"Idempotency-Key": "the-same"}
    answers = [
        call(gateway.url, gateway.key(tenant), "POST", "/v1/chat/completions", json=body, headers=headers).json()
        for tenant in ("acme", "acme", "other")
    ]
    assert answers[0]["id"] == answers[1]["id"] != answers[2]["id"]


def _bodies(path: str) -> list[dict[str, Any]]:
    """A body that each route would take."""
    if path.endswith("/batches"):
        return [{"input_file_id": "file-none", "endpoint": "/v1/chat/completions", "completion_window": "24h"}]
    if path.endswith("/chat"):
        return [{"prompt": "hello"}]
    if path.endswith("completions"):
        return [{"model": MODEL, "prompt" if path == "/v1/completions" else "messages": "x"}]
    if path.endswith("/test"):
        return [{"event_type": "batch.completed"}]
    if path.endswith("/webhook_endpoints"):
        return [{"url": "http://127.0.0.1/", "event_types": ["batch.completed"], "name": "n"}]
    if path.endswith("/{endpoint_id}"):
        return [{"name": "stolen"}]
    if path.endswith("/{batch_id}"):
        return [{"priority": 3}]
    return [{}]


def _snapshot(gateway: RunningGateway, key: str, possessions: dict[str, list[str]]) -> list[str]:
    """All that a tenant has, as it sees it itself."""
    kinds = {"file": "files", "batch": "batches", "webhook": "webhook_endpoints", "request": "requests"}
    found = []
    for kind, route in kinds.items():
        for each in possessions[kind]:
            answer = call(gateway.url, key, path=f"/v1/{route}/{each}")
            shown = {name: value for name, value in answer.json().items() if name != "promptmill"}
            found.append(json.dumps([answer.status_code, shown]))
    return found
