"""Webhooks: which addresses may be told, how an event is signed, when it is sent again.

The form is Standard Webhooks, as OpenAI sends it and its SDKs verify it (`client.webhooks.unwrap`). A URL comes from a
tenant, and the sender stands inside the operator's network: so only addresses of the public internet are spoken to,
unless PROMPTMILL_WEBHOOK_ALLOWED_NETWORKS names others, and that is decided on the address that is connected to, not
on what its name resolved to earlier.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import random
import secrets
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

from storage import outbox, transitions
from storage.database import Connection, Database
from storage.errors import InvalidRequest, PromptmillError
from storage.outbox import EndpointRow, NewEndpoint

EVENTS = ("batch.completed", "batch.failed", "batch.expired", "batch.cancelled")
SECRET_PREFIX = "whsec_"
SECRET_BYTES = 32
LONGEST_URL = 2000
LONGEST_NAME = 200
MOST_ENDPOINTS = 20  # of a tenant: each batch's end writes a row for each
FORMER_SECRET_S = 24 * 3600.0
# The same endpoint asked for again within this time is a repeated call: SDKs repeat one whose answer was lost.
SAME_ENDPOINT_S = 60.0
# The pauses after the first, second, ... try that failed, in multiples of the setting `first_retry_s`: with its 5 s
# 5 s, 30 s, 2 min, 10 min, 30 min, 1 h, 2 h, 4 h, 8 h, 8 h, about a day.
PAUSES = (1, 6, 24, 120, 360, 720, 1440, 2880, 5760, 5760)
# Each pause is drawn from within so much of it to either side, so that what failed together does not come together.
SPREAD = 0.2

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# IPv6 networks whose addresses stand for an IPv4 one in their last 32 bits.
_NAT64 = (ipaddress.IPv6Network("64:ff9b::/96"), ipaddress.IPv6Network("64:ff9b:1::/48"))
# Where ipaddress calls global what no receiver of ours is at: former site-local and documentation addresses.
_NEVER = (ipaddress.IPv6Network("fec0::/10"), ipaddress.IPv6Network("3fff::/20"))


class AddressRefused(PromptmillError):
    """A receiver's address is none that may be spoken to."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="webhook_address_refused")


@dataclass(frozen=True, slots=True)
class Target:
    """A checked URL, taken apart. path: with its query."""

    is_secure: bool
    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        """As the Host header says it."""
        shown = f"[{self.host}]" if ":" in self.host else self.host
        return shown if self.port == (443 if self.is_secure else 80) else f"{shown}:{self.port}"


# --- addresses ---------------------------------------------------------------------------------------------------


def parse_target(url: str, allowed: Sequence[Network] = ()) -> Target:
    """Check a receiver's URL, as far as that goes without asking the network. Raises InvalidRequest.

    Plain http goes only to a literal address in an allowed network, or to a name that can only be there: whether it is
    shows when it is connected to.
    """
    if len(url) > LONGEST_URL:
        raise _bad_url(f"has {len(url)} characters, which exceeds {LONGEST_URL}; shorten it")
    if not url.isascii() or any(character <= " " or character == "\x7f" for character in url):
        raise _bad_url("has blanks, control characters or others that a URL writes as %XX; write them so")
    try:
        parts: SplitResult = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise _bad_url(f"cannot be read ({error}); write one such as https://example.com/hook") from None
    if parts.scheme not in ("https", "http") or not parts.hostname:
        raise _bad_url("is no https URL with a host; write one such as https://example.com/hook")
    if parts.scheme == "http" and not allowed:
        raise _bad_url(
            "is plain http, which shows events to everybody on the way; write https, or have the receiver's network "
            "allowed: PROMPTMILL_WEBHOOK_ALLOWED_NETWORKS"
        )
    if parts.username is not None or parts.password is not None:
        raise _bad_url("holds a name or password; events are signed, check that instead and leave it out")
    if port == 0:
        raise _bad_url("names port 0; write one from 1 to 65535")
    host = parts.hostname
    literal = _literal(host)
    if literal is not None:
        refuse_address(literal, allowed)
    elif host == "localhost" or host.endswith(".localhost"):
        refuse_address(ipaddress.IPv4Address("127.0.0.1"), allowed)
    is_secure = parts.scheme == "https"
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Target(is_secure, host, port or (443 if is_secure else 80), path)


def refuse_address(address: IpAddress, allowed: Sequence[Network]) -> None:
    """Raise AddressRefused unless an address is of the public internet, or in an allowed network."""
    real = _unwrap(address)
    if any(real.version == network.version and real in network for network in allowed):
        return
    if not is_public(real):
        raise AddressRefused(
            f"webhooks are not sent to {address}: it is private, of this host, or reserved; use a public address, or "
            "have its network allowed: PROMPTMILL_WEBHOOK_ALLOWED_NETWORKS"
        )


def is_public(address: IpAddress) -> bool:
    """Whether an address is one of the public internet: not private, loopback, link-local (where clouds keep their
    metadata), shared, multicast, unspecified or reserved, nor one that wraps such an address."""
    real = _unwrap(address)
    if isinstance(real, ipaddress.IPv6Address) and any(real in network for network in _NEVER):
        return False
    return real.is_global and not real.is_multicast and not real.is_reserved


def parse_networks(text: str) -> tuple[Network, ...]:
    """`10.0.0.0/8, fd00::/8`. Raises ValueError that names the one that is wrong."""
    networks: list[Network] = []
    for each in text.split(","):
        if each.strip():
            try:
                networks.append(ipaddress.ip_network(each.strip()))
            except ValueError as error:
                raise ValueError(f"networks such as 10.0.0.0/8, 127.0.0.1/32, separated by commas ({error})") from None
    return tuple(networks)


def _unwrap(address: IpAddress) -> IpAddress:
    """The IPv4 address that an IPv6 one stands for, if it does."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address.teredo is not None:
        return address.teredo[1]
    if any(address in network for network in _NAT64) or (int(address) >> 32 == 0 and int(address) > 1):
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def _literal(host: str) -> IpAddress | None:
    """The address that a host is written as. Forms that only some resolvers read (0x7f.1, 2130706433) are left to the
    one that is asked: its answer is checked."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _bad_url(problem: str) -> InvalidRequest:
    return InvalidRequest(f"url {problem}", code="invalid_webhook_url", param="url")


# --- signing -----------------------------------------------------------------------------------------------------


def make_secret() -> str:
    return SECRET_PREFIX + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()


def sign(secret: str, event_id: str, timestamp: int, payload: bytes) -> str:
    """`v1,<base64 of HMAC-SHA256 over id.timestamp.payload>`."""
    key = base64.b64decode(secret.removeprefix(SECRET_PREFIX))
    signed = f"{event_id}.{timestamp}.".encode() + payload
    return "v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()


def event_headers(endpoint: EndpointRow, event_id: str, payload: bytes, now: float) -> dict[str, str]:
    """The headers of one try. Its time is that of the try: receivers refuse what is more than five minutes old."""
    timestamp = int(now)
    signatures = [sign(endpoint.secret, event_id, timestamp, payload)]
    if endpoint.former_secret is not None and (endpoint.former_secret_until or 0.0) > now:
        signatures.append(sign(endpoint.former_secret, event_id, timestamp, payload))
    return {
        "content-type": "application/json",
        "webhook-id": event_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(signatures),
    }


def pause_s(attempt: int, first_retry_s: float, draw: random.Random) -> float | None:
    """How long to wait after a try that failed, the first being 1. None: it was the last."""
    if attempt > len(PAUSES):
        return None
    return PAUSES[attempt - 1] * first_retry_s * draw.uniform(1 - SPREAD, 1 + SPREAD)


# --- a tenant's endpoints ----------------------------------------------------------------------------------------


def add_endpoint(
    database: Database,
    *,
    tenant: str,
    url: str,
    name: str | None = None,
    events: Collection[str] = EVENTS,
    allowed: Sequence[Network] = (),
) -> EndpointRow:
    """Register a receiver. The same again within a minute gives the same. Raises InvalidRequest, AddressRefused."""
    target = parse_target(url, allowed)
    new = NewEndpoint(
        public_id=f"we_{uuid.uuid4().hex[:24]}",
        tenant=tenant,
        name=_name(name if name is not None else target.host),
        url=url,
        secret=make_secret(),
        events=join_events(events),
    )

    def write(connection: Connection) -> str:
        transitions.lock_tenant(connection, tenant)
        now = database.now()
        there = outbox.list_endpoints(connection, tenant)
        for each in there:
            is_same = (each.url, each.name, each.events) == (new.url, new.name, new.events)
            if is_same and each.updated_at == each.created_at > now - SAME_ENDPOINT_S:
                return each.public_id
        if len(there) >= MOST_ENDPOINTS:
            raise InvalidRequest(
                f"tenant {tenant} has {MOST_ENDPOINTS} webhook endpoints, which is the bound; remove one",
                code="too_many_webhook_endpoints",
            )
        outbox.add_endpoint(connection, new, now)
        return new.public_id

    return find_endpoint(database, database.retry(write), tenant=tenant)


def change_endpoint(
    database: Database,
    endpoint: EndpointRow,
    *,
    url: str | None = None,
    name: str | None = None,
    events: Collection[str] | None = None,
    allowed: Sequence[Network] = (),
) -> EndpointRow:
    """Change what is given. An endpoint that was disabled is enabled again. Raises InvalidRequest, AddressRefused."""
    values: dict[str, Any] = {}
    if url is not None:
        parse_target(url, allowed)
        values["url"] = url
    if name is not None:
        values["name"] = _name(name)
    if events is not None:
        values["events"] = join_events(events)
    database.retry(lambda connection: outbox.change_endpoint(connection, endpoint.id, values, database.now()))
    return find_endpoint(database, endpoint.public_id, tenant=endpoint.tenant)


def rotate_secret(database: Database, endpoint: EndpointRow, *, keep_former: bool) -> EndpointRow:
    """Give an endpoint a new secret. keep_former: for a day both sign."""
    now = database.now()
    values = {
        "secret": make_secret(),
        "former_secret": endpoint.secret if keep_former else None,
        "former_secret_until": now + FORMER_SECRET_S if keep_former else None,
    }
    database.retry(lambda connection: outbox.change_endpoint(connection, endpoint.id, values, now))
    return find_endpoint(database, endpoint.public_id, tenant=endpoint.tenant)


def remove_endpoint(database: Database, endpoint: EndpointRow) -> None:
    database.retry(lambda connection: outbox.remove_endpoint(connection, endpoint.id))


def find_endpoint(database: Database, public_id: str, *, tenant: str | None = None) -> EndpointRow:
    """The endpoint of that id, if it is the tenant's (None: anybody's). Raises PromptmillError."""
    with database.read() as connection:
        found = outbox.find_endpoint(connection, public_id)
    if found is None or tenant not in (None, found.tenant):
        raise PromptmillError(
            f"there is no webhook endpoint {public_id[:60]}; the list shows those there are",
            code="webhook_endpoint_not_found",
        )
    return found


def join_events(events: Collection[str]) -> str:
    """Event types as they are kept. Raises InvalidRequest for none or an unknown one."""
    if not events:
        raise InvalidRequest(
            f"event_types is empty; name at least one of {', '.join(EVENTS)}", code="empty_array", param="event_types"
        )
    for event in events:
        if event not in EVENTS:
            raise InvalidRequest(
                f"event_types has {event[:60]!r}; this server sends {', '.join(EVENTS)}",
                code="invalid_value",
                param="event_types",
            )
    return ",".join(event for event in EVENTS if event in events)


def _name(name: str) -> str:
    if not name.strip() or len(name) > LONGEST_NAME or "\0" in name:
        raise InvalidRequest(
            f"name has {len(name)} characters; write 1 to {LONGEST_NAME}, without NUL",
            code="invalid_value",
            param="name",
        )
    return name
