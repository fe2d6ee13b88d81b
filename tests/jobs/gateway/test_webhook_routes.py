"""`/v1/webhook_endpoints` as the real SDK uses it, and the path from a batch's end to the SDK's `unwrap`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import httpx
import openai
import pytest

from jobs.settings import Settings, WebhookSettings
from jobs.webhook_sender import WebhookSender
from jobs.worker_process import WorkerProcess
from tests.conftest import wait_until
from tests.jobs.gateway.conftest import (
    PATIENCE_S,
    RunningGateway,
    changed,
    chat_line,
    running_gateway,
    running_worker,
    upload,
    wait_for_status,
)
from tests.jobs.test_webhooks import Receiver, receive, unwrap

__all__ = ["receive"]  # a fixture

ALL = ["batch.completed", "batch.failed", "batch.expired", "batch.cancelled"]


@pytest.fixture(scope="module")
def lenient(shared_settings: Settings) -> Iterator[RunningGateway]:
    """A gateway that lets receivers on this host be told."""
    webhook = WebhookSettings(allowed_networks="127.0.0.0/8", timeout_s=20.0, first_retry_s=0.05)
    with running_gateway(changed(shared_settings, webhook=webhook.model_dump())) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def worker(lenient: RunningGateway, tiny_artifact: object) -> Iterator[WorkerProcess]:
    with running_worker(lenient.settings, tiny_artifact) as worker:  # type: ignore[arg-type]
        yield worker


def test_the_sdk_manages_endpoints(shared_gateway: RunningGateway, tenant: str) -> None:
    with shared_gateway.client(tenant) as client:
        made = client.webhooks.create(url="https://a.example/hook", name="mine", event_types=["batch.completed"])
        assert made.object == "webhook_endpoint"
        assert made.signing_secret.startswith("whsec_")
        assert made.signing_secret_hint == f"whsec_...{made.signing_secret[-4:]}"
        found = client.webhooks.retrieve(made.id)
        assert (found.url, found.name, found.event_types) == ("https://a.example/hook", "mine", ["batch.completed"])
        assert "signing_secret" not in found.to_dict()
        again = client.webhooks.update(made.id, url="https://b.example/hook", event_types=["batch.failed"])
        assert (again.url, again.name, again.event_types) == ("https://b.example/hook", "mine", ["batch.failed"])
        rotated = client.webhooks.rotate_secret(made.id)
        assert rotated.signing_secret not in ("", made.signing_secret)
        more = [
            client.webhooks.create(url=f"https://a.example/{n}", name=f"n{n}", event_types=["batch.failed"])
            for n in range(5)
        ]
        listed = [endpoint.id for endpoint in client.webhooks.list(limit=2)]
        assert listed == [*(endpoint.id for endpoint in reversed(more)), made.id]
        assert client.webhooks.event_types.list().data == ALL
        gone = client.webhooks.delete(made.id)
        assert (gone.id, gone.deleted, gone.object) == (made.id, True, "webhook_endpoint.deleted")
        for refused in (
            lambda: client.webhooks.retrieve(made.id),
            lambda: client.webhooks.delete(made.id),
            lambda: client.webhooks.rotate_secret(made.id),
            lambda: client.webhooks.test(made.id, event_type="batch.failed"),
        ):
            with pytest.raises(openai.NotFoundError) as error:
                refused()
            assert error.value.code == "webhook_endpoint_not_found"


@pytest.mark.parametrize(
    ("given", "code", "param"),
    [
        ({"url": "http://a.example/"}, "invalid_webhook_url", "url"),
        ({"url": "https://127.0.0.1/"}, "webhook_address_refused", None),
        ({"url": "https://169.254.169.254/latest/meta-data"}, "webhook_address_refused", None),
        ({"url": "https://[::ffff:10.0.0.1]/"}, "webhook_address_refused", None),
        ({"url": "https://localhost:8000/"}, "webhook_address_refused", None),
        ({"url": 5}, "invalid_type", "url"),
        ({"event_types": []}, "empty_array", "event_types"),
        ({"event_types": ["response.completed"]}, "invalid_value", "event_types"),
        ({"name": ""}, "invalid_value", "name"),
        ({"name": "x" * 201}, "invalid_value", "name"),
        ({"secret": "mine"}, "unknown_parameter", "secret"),
    ],
)
def test_what_is_wrong_with_an_endpoint_is_named(
    shared_gateway: RunningGateway, given: dict[str, object], code: str, param: str | None
) -> None:
    body = {"url": "https://a.example/", "name": "n", "event_types": ["batch.failed"], **given}
    answer = httpx.post(
        f"{shared_gateway.url}/v1/webhook_endpoints",
        json=body,
        headers={"authorization": f"Bearer {shared_gateway.key('refused')}"},
        trust_env=False,
    )
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (code, param)


def test_a_batchs_end_reaches_the_sdks_unwrap(
    lenient: RunningGateway, worker: WorkerProcess, receive: Callable[..., Receiver], tenant: str
) -> None:
    """The first answer is a failure, so that the event is sent again."""
    receiver = receive(answers=[503])
    with lenient.client(tenant) as client:
        endpoint = client.webhooks.create(url=receiver.url, name="n", event_types=["batch.completed", "batch.failed"])
        good = upload(client, [chat_line("a")])
        bad = upload(client, [b"no json"])
        made = [
            client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
            for file in (good, bad)
        ]
        wait_for_status(client, made[0].id, "completed")
        wait_until(lambda: client.batches.retrieve(made[1].id).status == "failed", seconds=PATIENCE_S)
        sender = WebhookSender(lenient.database, lenient.settings.webhook).start()
        try:
            wait_until(lambda: len(receiver.got) >= 3, seconds=PATIENCE_S, what="both events, one of them twice")
        finally:
            sender.close()
        events = {unwrap(endpoint.signing_secret, got).id: unwrap(endpoint.signing_secret, got) for got in receiver.got}
        assert {(event.type, event.data.id) for event in events.values()} == {
            ("batch.completed", made[0].id),
            ("batch.failed", made[1].id),
        }
        listed = httpx.get(
            f"{lenient.url}/v1/webhook_endpoints/{endpoint.id}/deliveries",
            headers={"authorization": f"Bearer {client.api_key}"},
            trust_env=False,
        ).json()
        assert sorted(each["attempts"] for each in listed["data"]) == [1, 2]


def test_a_sample_event_is_sent_at_once(lenient: RunningGateway, receive: Callable[..., Receiver], tenant: str) -> None:
    receiver = receive(answers=[200, 418])
    with lenient.client(tenant) as client:
        endpoint = client.webhooks.create(url=receiver.url, name="n", event_types=["batch.completed"])
        tried = client.webhooks.test(endpoint.id, event_type="batch.expired")
        assert (tried.status_code, tried.success, tried.event_type) == (200, True, "batch.expired")
        assert unwrap(endpoint.signing_secret, receiver.got[0]).type == "batch.expired"
        assert client.webhooks.test(endpoint.id, event_type="batch.failed").status_code == 418
        receiver.stop()
        with pytest.raises(openai.BadRequestError) as refused:
            client.webhooks.test(endpoint.id, event_type="batch.failed")
        assert refused.value.code == "webhook_not_reached"
        with pytest.raises(openai.BadRequestError):
            client.webhooks.test(endpoint.id, event_type="response.completed")
