"""Webhooks: written with the batch's end, signed as OpenAI's SDK verifies it, sent until taken, to public addresses."""

from __future__ import annotations

import ipaddress
import json
import random
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import openai
import pytest

from jobs import webhook_sender, webhooks
from jobs.settings import WebhookSettings
from jobs.webhook_sender import WebhookSender
from jobs.webhooks import EVENTS, AddressRefused, add_endpoint, is_public, parse_networks, parse_target, pause_s
from storage import outbox, transitions
from storage.database import Database
from storage.errors import InvalidRequest
from storage.models import BATCHES, BatchStatus
from storage.outbox import DeliveryRow, EndpointRow
from storage.purge import purge_rows, purge_text
from storage.transitions import NewBatch, NewRequest
from tests.conftest import wait_until

LOOPBACK = parse_networks("127.0.0.0/8")
QUICK = WebhookSettings(allowed_networks="127.0.0.0/8", timeout_s=20.0, first_retry_s=0.01)


@dataclass
class Receiver:
    """An HTTP server that answers as told. answers: statuses for the first calls; 200 after them."""

    answers: list[int] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    got: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    port: int = 0
    hold: threading.Event | None = None
    server: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    def start(self) -> None:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.got.append(({name.lower(): value for name, value in self.headers.items()}, body))
                if receiver.hold is not None:
                    receiver.hold.wait(60)
                self.send_response(receiver.answers.pop(0) if receiver.answers else 200)
                for name, value in receiver.headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", "2")
                self.end_headers()
                self.wfile.write(b"ok")

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                pass  # a sender that stopped waiting

        self.server = Server(("127.0.0.1", self.port), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def stop(self) -> None:
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()
            self.server = None


@pytest.fixture
def receive() -> Iterator[Callable[..., Receiver]]:
    started: list[Receiver] = []

    def start(**given: Any) -> Receiver:
        receiver = Receiver(**given)
        receiver.start()
        started.append(receiver)
        return receiver

    yield start
    for receiver in started:
        if receiver.hold is not None:
            receiver.hold.set()
        receiver.stop()


@pytest.fixture
def sending(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., WebhookSender]]:
    """Senders that look for what is due more often than in real life, where a second is soon enough."""
    monkeypatch.setattr(webhook_sender, "LOOK_S", 0.05)
    started: list[WebhookSender] = []

    def start(database: Database, settings: WebhookSettings = QUICK) -> WebhookSender:
        started.append(WebhookSender(database, settings).start())
        return started[-1]

    yield start
    for sender in started:
        sender.close()


def make_batch(database: Database, *, tenant: str = "acme", is_interactive: bool = False) -> int:
    new = NewBatch(
        public_id=f"batch_{uuid.uuid4().hex}",
        fingerprint="f",
        endpoint="/v1/completions",
        model="m",
        tenant=tenant,
        is_interactive=is_interactive,
    )
    with database.write() as connection:
        batch_id = transitions.create_batch(connection, new, database.now())
        transitions.add_requests(connection, batch_id, [NewRequest(1, "a", '{"prompt":"p"}')])
    return batch_id


def end_batch(database: Database, batch_id: int, status: BatchStatus) -> str:
    """Bring a batch to an end by the moves that the program makes. Returns its public id."""
    with database.write() as connection:
        now = database.now()
        if status is BatchStatus.FAILED:
            transitions.fail_batch(connection, batch_id, "bad", "bad input", now)
        else:
            transitions.start_batch(connection, batch_id, now)
            if status is BatchStatus.EXPIRED:
                transitions.prioritise_batch(connection, batch_id, expires_at=now - 1)
                assert transitions.expire_batches(connection, now) == [batch_id]
            else:
                transitions.cancel_batch(connection, batch_id, now)
            transitions.end_requests(connection, batch_id, now)
            assert transitions.publish_batch(connection, batch_id, now, output=None, errors=None)
    with database.read() as connection:
        return str(
            connection.execute(transitions.select(BATCHES.c.public_id).where(BATCHES.c.id == batch_id)).scalar_one()
        )


def deliveries(database: Database, endpoint: EndpointRow) -> list[DeliveryRow]:
    with database.read() as connection:
        return outbox.deliveries_of(connection, endpoint.id)


def unwrap(endpoint_secret: str, call: tuple[dict[str, str], bytes]) -> Any:
    """As the SDK's users do it: raises when the signature is wrong or its time is not now."""
    client = openai.OpenAI(api_key="none", webhook_secret=endpoint_secret)
    return client.webhooks.unwrap(call[1], call[0])


# --- written with the end ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [BatchStatus.FAILED, BatchStatus.EXPIRED, BatchStatus.CANCELLED])
def test_each_end_of_a_batch_writes_its_event_in_the_same_transaction(database: Database, status: BatchStatus) -> None:
    mine = add_endpoint(database, tenant="acme", url="https://a.example/x")
    deaf = add_endpoint(database, tenant="acme", url="https://a.example/y", events=["batch.completed"])
    other = add_endpoint(database, tenant="other", url="https://b.example/x")
    batch = end_batch(database, make_batch(database), status)
    (delivery,) = deliveries(database, mine)
    assert delivery.event == f"batch.{status.value}"
    event = json.loads(delivery.payload)
    assert event == {
        "id": delivery.public_id,
        "object": "event",
        "created_at": int(delivery.created_at),
        "type": f"batch.{status.value}",
        "data": {"id": batch},
    }
    assert deliveries(database, deaf) == deliveries(database, other) == []


def test_an_end_that_is_rolled_back_is_not_told(sqlite_database: Database) -> None:
    endpoint = add_endpoint(sqlite_database, tenant="acme", url="https://a.example/x")
    batch_id = make_batch(sqlite_database)
    with pytest.raises(RuntimeError), sqlite_database.write() as connection:
        transitions.fail_batch(connection, batch_id, "bad", "bad input", 1.0)
        raise RuntimeError
    assert deliveries(sqlite_database, endpoint) == []


def test_single_requests_are_nobodys_event(sqlite_database: Database) -> None:
    endpoint = add_endpoint(sqlite_database, tenant="acme", url="https://a.example/x")
    end_batch(sqlite_database, make_batch(sqlite_database, is_interactive=True), BatchStatus.FAILED)
    assert deliveries(sqlite_database, endpoint) == []


# --- sent --------------------------------------------------------------------------------------------------------


def test_the_sdk_verifies_what_is_sent(
    database: Database, receive: Callable[..., Receiver], sending: Callable[..., WebhookSender]
) -> None:
    receiver = receive()
    endpoint = add_endpoint(database, tenant="acme", url=receiver.url, allowed=LOOPBACK)
    batch = end_batch(database, make_batch(database), BatchStatus.CANCELLED)
    sending(database)
    wait_until(lambda: deliveries(database, endpoint)[0].delivered_at, what="the delivery")
    (call,) = receiver.got
    event = unwrap(endpoint.secret, call)
    assert type(event).__name__ == "BatchCancelledWebhookEvent"
    assert (event.type, event.data.id, event.id) == ("batch.cancelled", batch, call[0]["webhook-id"])
    with pytest.raises(openai.InvalidWebhookSignatureError):
        unwrap(webhooks.make_secret(), call)
    with pytest.raises(openai.InvalidWebhookSignatureError):
        unwrap(endpoint.secret, (call[0], call[1].replace(b"cancelled", b"completed")))


def test_a_failed_try_is_recorded_and_made_again(
    database: Database, receive: Callable[..., Receiver], sending: Callable[..., WebhookSender]
) -> None:
    receiver = receive(answers=[500, 429, 302], headers={"location": "http://127.0.0.1:1/elsewhere"})
    endpoint = add_endpoint(database, tenant="acme", url=receiver.url, allowed=LOOPBACK)
    end_batch(database, make_batch(database), BatchStatus.FAILED)
    sending(database)
    wait_until(lambda: deliveries(database, endpoint)[0].delivered_at, seconds=60, what="the delivery")
    (delivery,) = deliveries(database, endpoint)
    assert (delivery.attempts, delivery.last_status, delivery.last_error) == (4, 200, None)
    assert len({call[0]["webhook-id"] for call in receiver.got}) == 1
    assert len({call[1] for call in receiver.got}) == 1
    assert all(unwrap(endpoint.secret, call).type == "batch.failed" for call in receiver.got)


def test_a_receiver_that_was_dead_hears_of_it_when_it_is_back(
    sqlite_database: Database, receive: Callable[..., Receiver], sending: Callable[..., WebhookSender]
) -> None:
    receiver = receive()
    endpoint = add_endpoint(sqlite_database, tenant="acme", url=receiver.url, allowed=LOOPBACK)
    receiver.stop()
    end_batch(sqlite_database, make_batch(sqlite_database), BatchStatus.CANCELLED)
    sending(sqlite_database, QUICK.model_copy(update={"first_retry_s": 0.1}))
    wait_until(lambda: deliveries(sqlite_database, endpoint)[0].attempts >= 2, what="a second try")
    assert "ConnectionRefusedError" in (deliveries(sqlite_database, endpoint)[0].last_error or "")
    receiver.start()
    wait_until(lambda: deliveries(sqlite_database, endpoint)[0].delivered_at, seconds=60, what="the delivery")
    assert len(receiver.got) == 1


def test_a_receiver_that_is_gone_is_told_no_more(
    sqlite_database: Database, receive: Callable[..., Receiver], sending: Callable[..., WebhookSender]
) -> None:
    receiver = receive(answers=[410])
    endpoint = add_endpoint(sqlite_database, tenant="acme", url=receiver.url, allowed=LOOPBACK)
    for _ in range(2):
        end_batch(sqlite_database, make_batch(sqlite_database), BatchStatus.CANCELLED)
    sending(sqlite_database)
    wait_until(lambda: webhooks.find_endpoint(sqlite_database, endpoint.public_id).disabled_at, what="the end")
    assert all(each.given_up_at is not None for each in deliveries(sqlite_database, endpoint))
    assert len(receiver.got) == 1
    end_batch(sqlite_database, make_batch(sqlite_database), BatchStatus.CANCELLED)
    assert len(deliveries(sqlite_database, endpoint)) == 2
    again = webhooks.change_endpoint(sqlite_database, endpoint, url=receiver.url, allowed=LOOPBACK)
    assert again.disabled_at is None


def test_a_slow_receiver_holds_up_nobody(
    sqlite_database: Database, receive: Callable[..., Receiver], sending: Callable[..., WebhookSender]
) -> None:
    slow, quick = receive(hold=threading.Event()), receive()
    add_endpoint(sqlite_database, tenant="acme", url=slow.url, allowed=LOOPBACK)
    endpoint = add_endpoint(sqlite_database, tenant="acme", url=quick.url, allowed=LOOPBACK)
    for _ in range(30):
        end_batch(sqlite_database, make_batch(sqlite_database), BatchStatus.CANCELLED)
    sending(sqlite_database)
    wait_until(lambda: all(each.delivered_at for each in deliveries(sqlite_database, endpoint)), seconds=60)
    assert len(quick.got) == 30
    assert len(slow.got) == 1


def test_several_senders_send_each_event_once(
    database: Database, receive: Callable[..., Receiver], sending: Callable[..., WebhookSender]
) -> None:
    receivers = [receive() for _ in range(4)]
    endpoints = [add_endpoint(database, tenant="acme", url=each.url, allowed=LOOPBACK) for each in receivers]
    for _ in range(5):
        end_batch(database, make_batch(database), BatchStatus.CANCELLED)
    for _ in range(3):
        sending(database)
    for receiver, endpoint in zip(receivers, endpoints, strict=True):
        wait_until(
            lambda endpoint=endpoint: all(each.delivered_at for each in deliveries(database, endpoint)), seconds=60
        )
        assert sorted(call[0]["webhook-id"] for call in receiver.got) == sorted(
            each.public_id for each in deliveries(database, endpoint)
        )


def test_what_a_sender_died_with_comes_due_again(database: Database) -> None:
    endpoint = add_endpoint(database, tenant="acme", url="https://a.example/x")
    end_batch(database, make_batch(database), BatchStatus.CANCELLED)
    now = database.now() + 1
    with database.write() as connection:
        (first,) = outbox.claim_deliveries(connection, now, lease_s=40, limit=10)
        assert outbox.claim_deliveries(connection, now + 39, lease_s=40, limit=10) == []
        (second,) = outbox.claim_deliveries(connection, now + 41, lease_s=40, limit=10)
    assert (first.attempt, second.attempt) == (1, 2)
    with database.write() as connection:
        assert not outbox.record_try(connection, first, now, status=200, error=None, next_try_at=None)
        assert outbox.record_try(connection, second, now + 42, status=200, error=None, next_try_at=None)
        assert not outbox.record_try(connection, second, now + 43, status=500, error="late", next_try_at=now)
    assert deliveries(database, endpoint)[0].delivered_at == now + 42


def test_tries_end_after_about_a_day() -> None:
    draw = random.Random(1)
    pauses = [pause_s(attempt, 5.0, draw) for attempt in range(1, 13)]
    assert pauses[10:] == [None, None]
    known = [pause for pause in pauses if pause is not None]
    assert 4.0 <= known[0] <= 6.0
    assert 20 * 3600 < sum(known) < 30 * 3600


def test_a_rotated_secret_and_the_former_one_both_verify_for_a_day(sqlite_database: Database) -> None:
    endpoint = add_endpoint(sqlite_database, tenant="acme", url="https://a.example/x")
    rotated = webhooks.rotate_secret(sqlite_database, endpoint, keep_former=True)
    now = sqlite_database.now()
    payload = outbox.render_event("evt_1", "batch.failed", "batch_1", now).encode()
    headers = webhooks.event_headers(rotated, "evt_1", payload, now)
    for secret in (endpoint.secret, rotated.secret):
        assert unwrap(secret, (headers, payload)).type == "batch.failed"
    later = webhooks.event_headers(rotated, "evt_1", payload, now + 25 * 3600)
    assert len(later["webhook-signature"].split(" ")) == 1
    only_new = webhooks.rotate_secret(sqlite_database, rotated, keep_former=False)
    headers = webhooks.event_headers(only_new, "evt_1", payload, now)
    with pytest.raises(openai.InvalidWebhookSignatureError):
        unwrap(rotated.secret, (headers, payload))


# --- where to ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.9.9.9", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
        "100.100.100.200", "192.0.2.1", "198.18.0.1", "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255", "::",
        "::1", "fe80::1", "fc00::1", "fd00:ec2::254", "ff02::1", "2001:db8::1", "fec0::1", "::ffff:127.0.0.1",
        "::ffff:169.254.169.254", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2002:a00:1::", "::7f00:1",
        "2001:0:4136:e378:8000:63bf:80ff:fffe",
    ],
)  # fmt: skip
def test_addresses_that_are_not_of_the_public_internet_are_refused(address: str) -> None:
    found = ipaddress.ip_address(address)
    assert not is_public(found)
    shown = f"[{address}]" if ":" in address else address
    with pytest.raises(AddressRefused, match="not sent to"):
        parse_target(f"https://{shown}/hook")


@pytest.mark.parametrize("address", ["1.1.1.1", "8.8.8.8", "2606:4700::1111", "64:ff9b::808:808"])
def test_public_addresses_are_not(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://example.com/hook", "plain http"),
        ("http://10.0.0.8/hook", "PROMPTMILL_WEBHOOK_ALLOWED_NETWORKS"),
        ("ftp://example.com/", "no https URL"),
        ("https://", "no https URL"),
        ("example.com/hook", "no https URL"),
        ("https://user:secret@example.com/", "name or password"),
        ("https://example.com/a b", "blanks"),
        ("https://example.com/\r\nx: y", "blanks"),
        ("https://exämple.com/", "%XX"),
        ("https://example.com:99999/", "cannot be read"),
        ("https://[::1/", "cannot be read"),
        ("https://example.com:0/", "port 0"),
        ("https://example.com/" + "x" * 2000, "exceeds 2000"),
    ],
)
def test_urls_of_other_kinds_are_refused_without_repeating_secrets(url: str, said: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_target(url)
    assert said in refused.value.message
    assert "secret" not in refused.value.message
    assert refused.value.code == "invalid_webhook_url"


def test_a_name_that_resolves_to_a_private_address_is_not_connected_to(
    sqlite_database: Database,
    receive: Callable[..., Receiver],
    sending: Callable[..., WebhookSender],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The address is judged when it is connected to: a name that was public when it was registered may not be now."""
    receiver = receive()
    resolve = socket.getaddrinfo
    asked = []

    def rebound(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        if host == "rebound.example":
            asked.append(host)
            public = resolve("1.1.1.1", port, *args, **kwargs)
            return [*public, *resolve("127.0.0.1", receiver.port, *args, **kwargs)]
        return resolve(host, port, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", rebound)
    endpoint = add_endpoint(sqlite_database, tenant="acme", url=f"https://rebound.example:{receiver.port}/hook")
    end_batch(sqlite_database, make_batch(sqlite_database), BatchStatus.CANCELLED)
    sending(sqlite_database, WebhookSettings(first_retry_s=0.01))
    wait_until(lambda: deliveries(sqlite_database, endpoint)[0].last_error, what="a refusal")
    assert "not sent to 127.0.0.1" in (deliveries(sqlite_database, endpoint)[0].last_error or "")
    assert asked
    assert receiver.got == []


def test_an_answer_without_end_is_cut_off(sqlite_database: Database, sending: Callable[..., WebhookSender]) -> None:
    """One that drips headers is stopped by the clock, one that floods them by their size."""
    stop = threading.Event()

    def flood(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n")
        while not stop.is_set():
            connection.sendall(b"x: " + b"y" * 4096 + b"\r\n")

    def drip(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nx: ")
        while not stop.wait(0.05):
            connection.sendall(b"y")

    endpoints = []
    for answer in (flood, drip):
        listener = socket.create_server(("127.0.0.1", 0))

        def serve(listener: socket.socket = listener, answer: Callable[[socket.socket], None] = answer) -> None:
            with listener:
                while not stop.is_set():
                    listener.settimeout(0.1)
                    try:
                        connection, _ = listener.accept()
                        with connection:
                            connection.settimeout(20)
                            answer(connection)
                    except OSError:
                        continue

        threading.Thread(target=serve, daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        endpoints.append(add_endpoint(sqlite_database, tenant="acme", url=url, allowed=LOOPBACK))
    end_batch(sqlite_database, make_batch(sqlite_database), BatchStatus.CANCELLED)
    sending(sqlite_database, QUICK.model_copy(update={"timeout_s": 1.0}))
    try:
        for endpoint, said in zip(endpoints, ("headers exceed 16384", "no answer within 1 s"), strict=True):
            wait_until(
                lambda endpoint=endpoint, said=said: (
                    said in (deliveries(sqlite_database, endpoint)[0].last_error or "")
                ),
                what=said,
            )
    finally:
        stop.set()


def test_an_endpoint_has_a_known_event_and_a_tenant_has_a_bounded_number(sqlite_database: Database) -> None:
    for events in ([], ["batch.done"], ["response.completed"]):
        with pytest.raises(InvalidRequest):
            add_endpoint(sqlite_database, tenant="acme", url="https://a.example/", events=events)
    for n in range(webhooks.MOST_ENDPOINTS):
        add_endpoint(sqlite_database, tenant="acme", url=f"https://a.example/{n}")
    with pytest.raises(InvalidRequest) as refused:
        add_endpoint(sqlite_database, tenant="acme", url="https://a.example/")
    assert refused.value.code == "too_many_webhook_endpoints"
    assert add_endpoint(sqlite_database, tenant="other", url="https://a.example/").events == ",".join(EVENTS)


def test_the_same_endpoint_asked_for_again_at_once_is_the_same(sqlite_database: Database) -> None:
    """SDKs repeat a call whose answer was lost: two endpoints would hear of each batch twice."""
    first = add_endpoint(sqlite_database, tenant="acme", url="https://a.example/")
    assert add_endpoint(sqlite_database, tenant="acme", url="https://a.example/") == first
    assert add_endpoint(sqlite_database, tenant="other", url="https://a.example/").id != first.id
    assert add_endpoint(sqlite_database, tenant="acme", url="https://a.example/", name="b").id != first.id
    webhooks.rotate_secret(sqlite_database, first, keep_former=False)
    assert add_endpoint(sqlite_database, tenant="acme", url="https://a.example/").id != first.id


def test_purging_a_batchs_rows_removes_the_record_of_its_events(sqlite_database: Database) -> None:
    endpoint = add_endpoint(sqlite_database, tenant="acme", url="https://a.example/")
    end_batch(sqlite_database, make_batch(sqlite_database), BatchStatus.CANCELLED)
    now = sqlite_database.now() + 10
    purge_text(sqlite_database, ended_before=now, now=now)
    assert len(deliveries(sqlite_database, endpoint)) == 1
    purge_rows(sqlite_database, ended_before=now, now=now)
    assert deliveries(sqlite_database, endpoint) == []


def test_a_removed_endpoint_is_gone_with_what_waited_for_it(sqlite_database: Database) -> None:
    endpoint = add_endpoint(sqlite_database, tenant="acme", url="https://a.example/")
    end_batch(sqlite_database, make_batch(sqlite_database), BatchStatus.CANCELLED)
    webhooks.remove_endpoint(sqlite_database, endpoint)
    with sqlite_database.read() as connection:
        assert outbox.list_endpoints(connection, "acme") == []
        assert not outbox.has_due(connection, sqlite_database.now() + 1)
