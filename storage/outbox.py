"""Webhooks: where tenants want to hear of ended batches, and what is still to be sent there.

A delivery is written in the transaction that ends its batch, so that none is forgotten and none sent for an end that
did not happen. A sender claims it by moving `next_try_at` into the future: a sender that dies lets it come due again,
and two never send the same try. `attempts` is the fence behind which a try is recorded.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Connection, delete, func, insert, select, update

from storage.bulk import storable
from storage.models import BATCHES, DELIVERIES, ENDPOINTS, BatchStatus

# What a receiver said or a network error reads like; enough to understand it.
ERROR_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class NewEndpoint:
    """events: comma-separated event types."""

    public_id: str
    tenant: str
    name: str
    url: str
    secret: str
    events: str


@dataclass(frozen=True, slots=True)
class EndpointRow:
    """The columns of `storage.models.ENDPOINTS`."""

    id: int
    public_id: str
    tenant: str
    name: str
    url: str
    secret: str
    former_secret: str | None
    former_secret_until: float | None
    events: str
    created_at: float
    updated_at: float
    disabled_at: float | None


@dataclass(frozen=True, slots=True)
class DeliveryRow:
    """The columns of `storage.models.DELIVERIES`."""

    id: int
    public_id: str
    endpoint_id: int
    batch_id: int
    event: str
    payload: str
    attempts: int
    next_try_at: float | None
    delivered_at: float | None
    given_up_at: float | None
    last_status: int | None
    last_error: str | None
    created_at: float


@dataclass(frozen=True, slots=True)
class ClaimedDelivery:
    """One try that is now ours to make. attempt: its number, the fence."""

    id: int
    public_id: str
    attempt: int
    payload: str
    endpoint: EndpointRow


# --- a batch ends ------------------------------------------------------------------------------------------------


def announce_end(connection: Connection, batch_id: int, status: BatchStatus, now: float) -> int:
    """Write a delivery for each endpoint of the batch's tenant that wants to hear of it. Returns how many.

    Call it in the transaction that ends the batch. Single requests are nobody's event: their caller waits for them.
    """
    batch = connection.execute(
        select(BATCHES.c.public_id, BATCHES.c.tenant, BATCHES.c.is_interactive).where(BATCHES.c.id == batch_id)
    ).one()
    if batch.is_interactive:
        return 0
    event = f"batch.{status.value}"
    wanting = [
        endpoint_id
        for endpoint_id, events in connection.execute(
            select(ENDPOINTS.c.id, ENDPOINTS.c.events)
            .where(ENDPOINTS.c.tenant == batch.tenant, ENDPOINTS.c.disabled_at.is_(None))
            .order_by(ENDPOINTS.c.id)
        )
        if event in events.split(",")
    ]
    for endpoint_id in wanting:
        public_id = f"evt_{uuid.uuid4().hex}"
        connection.execute(
            insert(DELIVERIES),
            {
                "public_id": public_id,
                "endpoint_id": endpoint_id,
                "batch_id": batch_id,
                "event": event,
                "payload": render_event(public_id, event, batch.public_id, now),
                "attempts": 0,
                "next_try_at": now,
                "created_at": now,
            },
        )
    return len(wanting)


def render_event(public_id: str, event: str, batch: str, now: float) -> str:
    """The body of an event: the very text that is signed and sent."""
    return json.dumps(
        {"id": public_id, "object": "event", "created_at": int(now), "type": event, "data": {"id": batch}},
        separators=(",", ":"),
    )


# --- a tenant's endpoints ----------------------------------------------------------------------------------------


def add_endpoint(connection: Connection, endpoint: NewEndpoint, now: float) -> int:
    """Write an endpoint; its tenant must be there (`transitions.lock_tenant` makes it). Returns its id."""
    values = {**asdict(endpoint), "created_at": now, "updated_at": now}
    return int(connection.execute(insert(ENDPOINTS).returning(ENDPOINTS.c.id), values).scalar_one())


def change_endpoint(connection: Connection, endpoint_id: int, values: Mapping[str, Any], now: float) -> None:
    """Change columns of an endpoint. One that was disabled takes events again."""
    connection.execute(
        update(ENDPOINTS)
        .where(ENDPOINTS.c.id == endpoint_id)
        .values({**values, "updated_at": now, "disabled_at": None})
    )


def remove_endpoint(connection: Connection, endpoint_id: int) -> None:
    """Remove an endpoint and the record of its deliveries."""
    connection.execute(delete(DELIVERIES).where(DELIVERIES.c.endpoint_id == endpoint_id))
    connection.execute(delete(ENDPOINTS).where(ENDPOINTS.c.id == endpoint_id))


def disable_endpoint(connection: Connection, endpoint_id: int, now: float) -> None:
    """Its receiver is gone for good: what waits for it is given up, and no more is written."""
    connection.execute(
        update(ENDPOINTS)
        .where(ENDPOINTS.c.id == endpoint_id, ENDPOINTS.c.disabled_at.is_(None))
        .values(disabled_at=now)
    )
    connection.execute(
        update(DELIVERIES)
        .where(DELIVERIES.c.endpoint_id == endpoint_id, DELIVERIES.c.next_try_at.is_not(None))
        .values(next_try_at=None, given_up_at=now)
    )


def find_endpoint(connection: Connection, public_id: str) -> EndpointRow | None:
    row = connection.execute(select(ENDPOINTS).where(ENDPOINTS.c.public_id == public_id)).first()
    return None if row is None else EndpointRow(**row._mapping)


def list_endpoints(connection: Connection, tenant: str | None = None) -> list[EndpointRow]:
    """Endpoints, the newest first. tenant: only of that one."""
    statement = select(ENDPOINTS).order_by(ENDPOINTS.c.id.desc())
    if tenant is not None:
        statement = statement.where(ENDPOINTS.c.tenant == tenant)
    return [EndpointRow(**row._mapping) for row in connection.execute(statement)]


def deliveries_of(connection: Connection, endpoint_id: int, limit: int = 20) -> list[DeliveryRow]:
    """The last deliveries of an endpoint, the newest first."""
    rows = connection.execute(
        select(DELIVERIES).where(DELIVERIES.c.endpoint_id == endpoint_id).order_by(DELIVERIES.c.id.desc()).limit(limit)
    )
    return [DeliveryRow(**row._mapping) for row in rows]


# --- sending -----------------------------------------------------------------------------------------------------


def has_due(connection: Connection, now: float) -> bool:
    """Whether something is to be sent."""
    due = select(DELIVERIES.c.id).where(DELIVERIES.c.next_try_at.is_not(None), DELIVERIES.c.next_try_at <= now).limit(1)
    return connection.execute(due).first() is not None


def claim_deliveries(
    connection: Connection, now: float, *, lease_s: float, limit: int, busy: Collection[int] = ()
) -> list[ClaimedDelivery]:
    """Take what is due, the longest due first, one of each endpoint. busy: endpoints that are left alone.

    What is not recorded within `lease_s` comes due again.
    """
    first_of_each = (
        select(func.min(DELIVERIES.c.id))
        .where(
            DELIVERIES.c.next_try_at.is_not(None),
            DELIVERIES.c.next_try_at <= now,
            DELIVERIES.c.endpoint_id.not_in(list(busy)),
        )
        .group_by(DELIVERIES.c.endpoint_id)
    )
    ids = list(
        connection.execute(
            select(DELIVERIES.c.id)
            .where(
                DELIVERIES.c.id.in_(first_of_each),
                DELIVERIES.c.next_try_at.is_not(None),
                DELIVERIES.c.next_try_at <= now,
            )
            .order_by(DELIVERIES.c.next_try_at)
            .limit(limit)
            .with_for_update(skip_locked=True)
        ).scalars()
    )
    if not ids:
        return []
    connection.execute(
        update(DELIVERIES)
        .where(DELIVERIES.c.id.in_(ids))
        .values(next_try_at=now + lease_s, attempts=DELIVERIES.c.attempts + 1)
    )
    rows = connection.execute(
        select(DELIVERIES.c.id, DELIVERIES.c.public_id, DELIVERIES.c.attempts, DELIVERIES.c.payload, ENDPOINTS)
        .join_from(DELIVERIES, ENDPOINTS, ENDPOINTS.c.id == DELIVERIES.c.endpoint_id)
        .where(DELIVERIES.c.id.in_(ids))
        .order_by(DELIVERIES.c.id)
    ).all()
    return [ClaimedDelivery(row[0], row[1], row[2], row[3], EndpointRow(*row[4:])) for row in rows]


def record_try(
    connection: Connection,
    delivery: ClaimedDelivery,
    now: float,
    *,
    status: int | None,
    error: str | None,
    next_try_at: float | None,
) -> bool:
    """Write how a try ended. error None: delivered. next_try_at None: there will be no other.

    False: somebody else has taken the delivery since.
    """
    values: dict[str, Any] = {
        "last_status": status,
        "last_error": None if error is None else storable(error)[:ERROR_CHARACTERS],
        "next_try_at": None if error is None else next_try_at,
    }
    if error is None:
        values["delivered_at"] = now
    elif next_try_at is None:
        values["given_up_at"] = now
    recorded = connection.execute(
        update(DELIVERIES)
        .where(
            DELIVERIES.c.id == delivery.id,
            DELIVERIES.c.attempts == delivery.attempt,
            DELIVERIES.c.next_try_at.is_not(None),
        )
        .values(values)
    )
    return bool(recorded.rowcount == 1)
