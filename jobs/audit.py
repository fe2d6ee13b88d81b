"""One request with all that is known of it, and running it again to see whether the answer is the same.

A replay asks what the attempt's record says was asked, its seed included, in a batch of its own through the queue.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jobs.artifacts import FoundArtifact
from jobs.export import answer_text
from jobs.protocol import (
    REQUEST_NAMES_BEGIN,
    RESULT_ID_BEGINS,
    Endpoint,
    dump_json,
    load_body,
    named_request,
    result_id,
)
from jobs.queue_server import open_queue_server
from jobs.run import nobody_serves, see_through
from jobs.settings import Settings
from jobs.steering import REPLAY, Observer, cancel, find_batch
from jobs.up import StopSignals, with_queue_url
from jobs.worker_process import serving_workers
from storage import audit, queries, transitions
from storage.audit import RequestRecord
from storage.database import Connection, Database
from storage.errors import PromptmillError
from storage.models import AttemptOutcome
from storage.transitions import NewBatch, NewRequest

# How many answers one may have been handed on by: a job's batch, its earlier one, ...
MOST_SOURCES = 100


class AuditError(PromptmillError):
    """There is no such request, or it cannot be run again."""


@dataclass(frozen=True, slots=True)
class AttemptAudit:
    """One try. values: the columns of its row. mates: what its worker held besides, (id, custom id).

    Of an answer that was taken from another request, artifact and parameters are those it was computed with.
    """

    values: Mapping[str, Any]
    mates: list[tuple[str, str | None]]


@dataclass(frozen=True, slots=True)
class RequestAudit:
    """request_id: as result lines show it."""

    request_id: str
    record: RequestRecord
    attempts: list[AttemptAudit]


@dataclass(frozen=True, slots=True)
class Replay:
    """is_same: text, finish reason and number of new tokens of each choice. differences: what differs, in words."""

    batch: str
    request_id: str
    is_same: bool
    differences: list[str]
    attempt: Mapping[str, Any]


def audit_request(database: Database, named: str, *, tenant: str | None = None) -> RequestAudit:
    """All about a request, by the id of its result line or answer, or as BATCH:custom_id. Raises AuditError:
    request_not_found.

    tenant: whose it must be; of what ran beside it, too, only that tenant's is shown.
    """
    request_id = _resolve(database, named)
    with database.read() as connection:
        record = audit.find_request(connection, request_id)
        if record is None or tenant not in (None, record.tenant):
            raise _not_found(named)
        attempts = [
            AttemptAudit(
                _with_source(connection, values),
                [
                    (result_id(mate), custom_id)
                    for mate, custom_id in audit.ran_beside(connection, values, tenant=tenant)
                ],
            )
            for values in queries.attempts_of(connection, request_id)
        ]
    return RequestAudit(result_id(request_id), record, attempts)


def _with_source(connection: Connection, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """An attempt's columns. What an answer that was handed on does not have itself is that of who computed it."""
    source = values
    for _ in range(MOST_SOURCES):
        if source["source_request_id"] is None:
            break
        made = queries.attempts_of(connection, source["source_request_id"])
        if not made:
            break  # purged
        source = made[-1]
    of_source = {name: source[name] for name in ("artifact_digest", "parameters", "finish_reason")}
    return {**values, **{name: value for name, value in of_source.items() if values[name] is None}}


def describe(found: RequestAudit, *, with_text: bool) -> dict[str, object]:
    """As plain values, for scripts. with_text: prompt and answer too."""
    record = found.record
    described: dict[str, object] = {
        "id": found.request_id,
        "batch": record.batch,
        "line": record.line,
        "custom_id": record.custom_id,
        "model": record.model,
        "endpoint": record.endpoint,
        "tenant": record.tenant,
        "door": record.door,
        "api_key": record.api_key,
        "api_key_name": record.api_key_name,
        "status": record.status.value,
        "submitted_at": record.created_at,
        "finished_at": record.finished_at,
        "status_code": record.status_code,
        "error": {"code": record.error_code, "message": record.error_message} if record.error_code else None,
        "attempts": [_attempt(attempt) for attempt in found.attempts],
    }
    if with_text:
        described["body"] = None if record.body is None else json.loads(whole_body(record))
        described["response"] = json.loads(record.response) if record.response else None
    return described


def whole_body(record: RequestRecord) -> str:
    """The request's body as it was asked, its shared beginning put back."""
    assert record.body is not None, "the caller has looked"
    return load_body(Endpoint(record.endpoint), record.body, record.prefix or "").to_json()


def replay(
    settings: Settings,
    database: Database,
    found: RequestAudit,
    artifact: FoundArtifact | None,
    observer: Observer,
    signals: StopSignals,
) -> Replay:
    """Ask the same again through the queue and compare.

    artifact: run by a worker of our own where nobody serves the model; None: somebody must. Raises AuditError:
    text_purged, never_answered, no_worker, replay_failed; KeyboardInterrupt when a signal came first.
    """
    record = found.record
    before = next((each.values for each in reversed(found.attempts) if _was_computed(each.values)), None)
    if record.body is None:
        raise AuditError(f"the text of {found.request_id} is gone: purged, or refused on arrival", code="text_purged")
    if before is None or record.response is None:
        raise AuditError(f"{found.request_id} has no answer to compare with: {record.status}", code="never_answered")
    with database.read() as connection:
        if artifact is None and not serving_workers(connection, record.model, database.now()):
            raise nobody_serves(record.model)
    batch_id = database.retry(lambda connection: _ask_again(connection, found, before, database.now()))
    try:
        with open_queue_server(settings) as server:
            served = with_queue_url(settings, server.url)
            see_through(served, database, server, record.model, artifact, batch_id, observer, signals)
    except PromptmillError:
        _give_up(settings, database, batch_id)
        raise
    with database.read() as connection:
        batch = queries.find_batch_by_id(connection, batch_id)
        (row,) = queries.results_after(connection, batch_id, 0) or (None,)
        attempts = [] if row is None else queries.attempts_of(connection, row.request_id)
    assert batch is not None
    if not batch.is_final:
        _give_up(settings, database, batch_id)
        raise KeyboardInterrupt
    if row is None or row.status_code != 200 or not attempts:
        said = "it was not run" if row is None else row.error_message
        raise AuditError(f"the replay of {found.request_id} failed: {said}", code="replay_failed")
    differences = _compare(record.response, row.response or "{}")
    return Replay(batch.public_id, result_id(row.request_id), not differences, differences, attempts[-1])


def _give_up(settings: Settings, database: Database, batch_id: int) -> None:
    with database.read() as connection:
        batch = queries.find_batch_by_id(connection, batch_id)
    if batch is not None and not batch.is_final:
        cancel(database, batch, settings.files_dir)


def _was_computed(values: Mapping[str, Any]) -> bool:
    return bool(values["outcome"] == AttemptOutcome.COMPLETED.value and values["parameters"])


def _ask_again(connection: Connection, found: RequestAudit, before: Mapping[str, Any], now: float) -> int:
    record = found.record
    assert record.body is not None
    # A request without a seed got one derived from its id: now it is said.
    body = json.loads(record.body) | {"seed": json.loads(before["parameters"])["seed"]}
    batch = NewBatch(
        public_id=f"batch_{uuid.uuid4().hex}",
        fingerprint=f"{REPLAY}{uuid.uuid4().hex}",
        endpoint=record.endpoint,
        model=record.model,
        tenant=record.tenant,
        metadata=dump_json({"replay_of": found.request_id}),
        is_interactive=True,
    )
    batch_id = transitions.create_batch(connection, batch, now)
    transitions.add_requests(connection, batch_id, [NewRequest(1, record.custom_id, dump_json(body), record.prefix_id)])
    transitions.start_batch(connection, batch_id, now)
    return batch_id


def _compare(before: str, after: str) -> list[str]:
    """What differs, in words; nothing: the same answer."""
    old, new = json.loads(before), json.loads(after)
    differences: list[str] = []
    if len(old["choices"]) != len(new["choices"]):
        return [f"{len(old['choices'])} choices before, {len(new['choices'])} now"]
    for place, (first, second) in enumerate(zip(old["choices"], new["choices"], strict=True)):
        texts = [answer_text(dump_json({"choices": [choice]})) or "" for choice in (first, second)]
        where = f"choice {place}: " if len(old["choices"]) > 1 else ""
        if texts[0] != texts[1]:
            same = next((n for n, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
            differences.append(f"{where}the texts part after {same} of {len(texts[0])} characters")
        if first.get("finish_reason") != second.get("finish_reason"):
            differences.append(
                f"{where}finish reason {first.get('finish_reason')} before, {second.get('finish_reason')} now"
            )
    counts = [answer.get("usage", {}).get("completion_tokens") for answer in (old, new)]
    if counts[0] != counts[1]:
        differences.append(f"{counts[0]} new tokens before, {counts[1]} now")
    return differences


def _attempt(attempt: AttemptAudit) -> dict[str, object]:
    values = {name: value for name, value in attempt.values.items() if name not in ("id", "request_id")}
    if values.get("parameters"):
        values["parameters"] = json.loads(values["parameters"])
    if values.get("source_request_id") is not None:
        values["source_request_id"] = result_id(values["source_request_id"])
    return values | {"ran_beside": [{"id": mate, "custom_id": custom_id} for mate, custom_id in attempt.mates]}


def _resolve(database: Database, named: str) -> int:
    if named.startswith(REQUEST_NAMES_BEGIN):
        request_id = named_request(named)
        if request_id is None:
            raise _not_found(named)
        return request_id
    batch_name, colon, custom_id = named.partition(":")
    if not colon:
        raise AuditError(
            f"{named} names no request; write {RESULT_ID_BEGINS}... as result lines show it, chatcmpl-... or cmpl-... "
            "as answers do, or BATCH:custom_id",
            code="request_not_found",
        )
    batch = find_batch(database, batch_name)
    with database.read() as connection:
        request_id = audit.request_named(connection, batch.id, custom_id)
    if request_id is None:
        raise AuditError(f"{batch.public_id} has no request with the custom_id {custom_id}", code="request_not_found")
    return request_id


def _not_found(named: str) -> AuditError:
    return AuditError(f"there is no request {named}; result lines show the ids", code="request_not_found")
