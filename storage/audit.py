"""Reads for audit and export: one request with all that is known of it, who ran beside it, attempts of many lines."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select

from storage.models import API_KEYS, ATTEMPTS, BATCHES, PREFIXES, REQUESTS, RESULTS, RequestStatus

# Attempts are numbered as they end, so those that ran beside one lie near it. Far more than a worker holds at once.
NEARBY_ATTEMPTS = 5000

# Line numbers have at most nine digits.
_LAST_NUMBER = re.compile(r"(?<!\d)\d{1,9}$")


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request, its batch, and its result if it has one. body: without `prefix`, the text it begins with.

    door, api_key: by which way it came, and with whose key; None: without one.
    """

    id: int
    batch_id: int
    batch: str
    tenant: str
    door: str
    api_key: str | None
    api_key_name: str | None
    model: str
    endpoint: str
    artifact_digest: str | None
    line: int
    custom_id: str | None
    status: RequestStatus
    attempt: int
    worker: str | None
    body: str | None
    prefix_id: int | None
    prefix: str | None
    created_at: float
    queued_at: float | None
    claimed_at: float | None
    lease_expires_at: float | None
    not_before: float | None
    isolation: int | None
    same_as: int | None
    status_code: int | None
    response: str | None
    error_code: str | None
    error_message: str | None
    finished_at: float | None


def find_request(connection: Connection, request_id: int) -> RequestRecord | None:
    """The request of that row id."""
    row = connection.execute(_RECORD.where(REQUESTS.c.id == request_id)).first()
    if row is None:
        return None
    values = dict(row._mapping)
    values["status"] = RequestStatus(values["status"])
    return RequestRecord(**values)


def request_named(connection: Connection, batch_id: int, custom_id: str) -> int | None:
    """The request of a batch with that custom id; of several the first, as the others were refused for it.

    An index that finds any id would cost a submission up to half its speed (11 to 16 µs a line where ids are random,
    measured 2026-11-30), for a question that a person asks now and then: reading a million lines takes 0.3 s. So ids
    that count, as most do, are looked for near the line that their number says, and the batch's lines are read only
    for others.
    """
    named = select(REQUESTS.c.id).where(REQUESTS.c.batch_id == batch_id, REQUESTS.c.custom_id == custom_id)
    number = _LAST_NUMBER.search(custom_id)
    if number is not None:
        # From 0 or from 1, and a line further down for the heading of a table.
        near = [int(number[0]) + step for step in range(3)]
        found = connection.execute(
            named.where(REQUESTS.c.line.in_(near), REQUESTS.c.body.is_not(None)).limit(1)
        ).scalar_one_or_none()
        if found is not None:
            return int(found)
    return connection.execute(named.order_by(REQUESTS.c.line).limit(1)).scalar_one_or_none()


def ran_beside(
    connection: Connection, attempt: Mapping[str, Any], limit: int = 1000, *, tenant: str | None = None
) -> list[tuple[int, str | None]]:
    """Requests that the same worker held during an attempt: (id, custom id), in the order in which they ended.

    tenant: only of that one's.
    """
    found = (
        select(ATTEMPTS.c.request_id, REQUESTS.c.custom_id)
        .join_from(ATTEMPTS, REQUESTS, REQUESTS.c.id == ATTEMPTS.c.request_id)
        .where(
            ATTEMPTS.c.id.between(attempt["id"] - NEARBY_ATTEMPTS, attempt["id"] + NEARBY_ATTEMPTS),
            ATTEMPTS.c.worker == attempt["worker"],
            ATTEMPTS.c.claimed_at < attempt["finished_at"],
            ATTEMPTS.c.finished_at > attempt["claimed_at"],
            ATTEMPTS.c.id != attempt["id"],
        )
        .order_by(ATTEMPTS.c.id)
        .limit(limit)
    )
    if tenant is not None:
        found = found.join(BATCHES, BATCHES.c.id == REQUESTS.c.batch_id).where(BATCHES.c.tenant == tenant)
    return [(row.request_id, row.custom_id) for row in connection.execute(found)]


def last_attempts(connection: Connection, request_ids: Collection[int]) -> dict[int, Mapping[str, Any]]:
    """Request id -> its last attempt; requests without one are not there."""
    rows = connection.execute(
        select(ATTEMPTS)
        .where(ATTEMPTS.c.request_id.in_(sorted(request_ids)))
        .order_by(ATTEMPTS.c.request_id, ATTEMPTS.c.number, ATTEMPTS.c.id)
    )
    return {row.request_id: dict(row._mapping) for row in rows}


_RECORD = (
    select(
        REQUESTS.c.id,
        REQUESTS.c.batch_id,
        BATCHES.c.public_id.label("batch"),
        BATCHES.c.tenant,
        BATCHES.c.door,
        API_KEYS.c.public_id.label("api_key"),
        API_KEYS.c.name.label("api_key_name"),
        BATCHES.c.model,
        BATCHES.c.endpoint,
        BATCHES.c.artifact_digest,
        REQUESTS.c.line,
        REQUESTS.c.custom_id,
        REQUESTS.c.status,
        REQUESTS.c.attempt,
        REQUESTS.c.worker,
        REQUESTS.c.body,
        REQUESTS.c.prefix_id,
        PREFIXES.c.text.label("prefix"),
        BATCHES.c.created_at,
        REQUESTS.c.queued_at,
        REQUESTS.c.claimed_at,
        REQUESTS.c.lease_expires_at,
        REQUESTS.c.not_before,
        REQUESTS.c.isolation,
        REQUESTS.c.same_as,
        RESULTS.c.status_code,
        RESULTS.c.response,
        RESULTS.c.error_code,
        RESULTS.c.error_message,
        RESULTS.c.finished_at,
    )
    .join_from(REQUESTS, BATCHES, BATCHES.c.id == REQUESTS.c.batch_id)
    .outerjoin(API_KEYS, API_KEYS.c.id == BATCHES.c.api_key_id)
    .outerjoin(PREFIXES, PREFIXES.c.id == REQUESTS.c.prefix_id)
    .outerjoin(RESULTS, RESULTS.c.request_id == REQUESTS.c.id)
)
