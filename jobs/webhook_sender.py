"""Sends what webhooks are due: one thread with an event loop of its own, so that a slow receiver holds up nothing.

Any number of processes may send; each delivery is claimed for the time that a try can take. A try is one POST over a
fresh connection to an address that was checked after the name was resolved; redirects are not followed, of the answer
only the status line and headers are read, and the whole has one time limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import random
import socket
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version

import structlog

from jobs.settings import WebhookSettings
from jobs.webhooks import (
    AddressRefused,
    Network,
    Target,
    event_headers,
    parse_networks,
    parse_target,
    pause_s,
    refuse_address,
)
from storage import outbox
from storage.database import Connection, Database
from storage.errors import InvalidRequest, PromptmillError
from storage.outbox import ClaimedDelivery, EndpointRow

# Between two looks for what is due: a read that finds nothing.
LOOK_S = 1.0
# Tries at once, each of another endpoint.
MOST_AT_ONCE = 16
MOST_THREADS = 4 * MOST_AT_ONCE
# A claim outlives the longest try by so much.
LEASE_MARGIN_S = 30.0
# Of an answer's status line and headers.
ANSWER_BYTES = 16 * 1024
MOST_ADDRESSES = 3  # of a name, tried one after the other
GONE = 410

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Try:
    """How one POST ended. status: HTTP's, if there was one. error None: it was taken."""

    status: int | None
    error: str | None


class WebhookSender:
    """The thread that sends. `close` waits for it; what it had in hand comes due again for others."""

    def __init__(self, database: Database, settings: WebhookSettings) -> None:
        self._database = database
        self._settings = settings
        self._allowed = parse_networks(settings.allowed_networks)
        self._draw = random.Random()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="webhooks", daemon=True)

    def start(self) -> WebhookSender:
        self._thread.start()
        return self

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        asyncio.run(self._send_forever())

    async def _send_forever(self) -> None:
        # Names are resolved in threads, and a resolver that hangs holds its thread beyond the try: with so many, none
        # of them keeps the database's work waiting.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(MOST_THREADS, "webhooks"))
        busy: dict[int, asyncio.Task[None]] = {}  # endpoint -> its try
        trouble: str | None = None
        while not self._stop.is_set():
            claimed: list[ClaimedDelivery] = []
            try:
                if len(busy) < MOST_AT_ONCE:
                    claimed = await asyncio.to_thread(self._claim, tuple(busy), MOST_AT_ONCE - len(busy))
                trouble = None
            except PromptmillError as error:
                if trouble != error.code:
                    log.warning("webhooks_not_read", code=error.code, reason=error.message)
                trouble = error.code
            for delivery in claimed:
                busy[delivery.endpoint.id] = asyncio.create_task(self._deliver(delivery))
            if busy:
                await asyncio.wait(busy.values(), timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                busy = {endpoint: task for endpoint, task in busy.items() if not task.done()}
            else:
                await asyncio.to_thread(self._stop.wait, LOOK_S)
        for task in busy.values():
            task.cancel()
        await asyncio.gather(*busy.values(), return_exceptions=True)

    def _claim(self, busy: tuple[int, ...], limit: int) -> list[ClaimedDelivery]:
        now = self._database.now()
        with self._database.read() as connection:
            if not outbox.has_due(connection, now):
                return []
        with self._database.write() as connection:
            return outbox.claim_deliveries(
                connection, now, lease_s=self._settings.timeout_s + LEASE_MARGIN_S, limit=limit, busy=busy
            )

    async def _deliver(self, delivery: ClaimedDelivery) -> None:
        endpoint = delivery.endpoint
        payload = delivery.payload.encode()
        try:
            tried = await send(
                endpoint,
                delivery.public_id,
                payload,
                now=self._database.now(),
                timeout_s=self._settings.timeout_s,
                allowed=self._allowed,
            )
            await asyncio.to_thread(self._record, delivery, tried)
        except PromptmillError as error:  # the database; the claim runs out and another try is made
            log.warning("webhook_not_recorded", event=delivery.public_id, code=error.code)
        except Exception:  # the end of a unit of work
            log.exception("webhook_crashed", delivery=delivery.public_id, endpoint=endpoint.public_id)

    def _record(self, delivery: ClaimedDelivery, tried: Try) -> None:
        now = self._database.now()
        pause = pause_s(delivery.attempt, self._settings.first_retry_s, self._draw)
        next_try_at = None if pause is None or tried.status == GONE else now + pause

        def write(connection: Connection) -> None:
            outbox.record_try(
                connection, delivery, now, status=tried.status, error=tried.error, next_try_at=next_try_at
            )
            if tried.status == GONE:
                outbox.disable_endpoint(connection, delivery.endpoint.id, now)

        self._database.retry(write)
        named = {"delivery": delivery.public_id, "endpoint": delivery.endpoint.public_id, "attempt": delivery.attempt}
        if tried.error is None:
            log.info("webhook_delivered", **named, status=tried.status)
        else:
            log.warning("webhook_failed", **named, status=tried.status, reason=tried.error, is_last=next_try_at is None)


async def send(
    endpoint: EndpointRow,
    event_id: str,
    payload: bytes,
    *,
    now: float,
    timeout_s: float,
    allowed: tuple[Network, ...],
) -> Try:
    """Make one try. Never raises for what the receiver or the network does."""
    try:
        target = parse_target(endpoint.url, allowed)
        async with asyncio.timeout(timeout_s):
            status = await _post(target, event_headers(endpoint, event_id, payload, now), payload, allowed)
    except (AddressRefused, InvalidRequest) as error:
        return Try(None, error.message)
    except TimeoutError:
        return Try(None, f"no answer within {timeout_s:g} s")
    except ssl.SSLError as error:
        return Try(None, f"TLS failed: {error.reason or error}")
    except (OSError, EOFError, ValueError) as error:
        return Try(None, f"{type(error).__name__}: {error}")
    if 200 <= status < 300:
        return Try(status, None)
    if 300 <= status < 400:
        return Try(status, f"answered {status}; redirects are not followed, register the address itself")
    return Try(status, f"answered {status}")


async def _post(target: Target, headers: dict[str, str], payload: bytes, allowed: tuple[Network, ...]) -> int:
    """The status of the answer."""
    reader, writer = await _connect(target, allowed)
    try:
        lines = [
            f"POST {target.path} HTTP/1.1",
            f"host: {target.authority}",
            f"user-agent: promptmill/{version('promptmill')}",
            "accept: */*",
            "connection: close",
            f"content-length: {len(payload)}",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode("ascii") + payload)
        await writer.drain()
        while True:
            head = await _read_head(reader)
            if not 100 <= head < 200:
                return head
    finally:
        writer.close()
        with contextlib.suppress(OSError, asyncio.CancelledError):
            writer.transport.abort()


async def _read_head(reader: asyncio.StreamReader) -> int:
    """Read a status line and its headers. Returns the status; raises ValueError for what is not HTTP."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise ValueError(f"its headers exceed {ANSWER_BYTES} bytes") from None
    except asyncio.IncompleteReadError:
        raise ValueError("the connection was closed before the answer was whole") from None
    words = head.split(b"\r\n", 1)[0].split(b" ", 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not (words[1].isdigit() and len(words[1]) == 3):
        raise ValueError("the answer is not HTTP/1.1")
    return int(words[1])


async def _connect(target: Target, allowed: tuple[Network, ...]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to an address that was checked: the name is resolved once, and the connection goes to what was found.

    One forbidden address among several refuses them all: no honest receiver has such a name.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(each[4][0]) for each in found))
    for address in addresses:
        refuse_address(ipaddress.ip_address(address.partition("%")[0]), allowed)
    context = ssl.create_default_context() if target.is_secure else None
    failure: OSError | None = None
    for address in addresses[:MOST_ADDRESSES]:
        try:
            return await asyncio.open_connection(
                address,
                target.port,
                ssl=context,
                server_hostname=target.host if context is not None else None,
                limit=ANSWER_BYTES,
            )
        except OSError as error:
            failure = error
    raise failure or OSError(f"{target.host} has no address")
