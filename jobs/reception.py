"""What comes in by Celery or by the inbox: plain JSON, checked as strictly as over HTTP, written to the database.

Both doors deliver a message at least once, so each call has a key of its own (the task's or entry's id): a message that
comes twice finds the request it has made before.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import structlog
from celery import Celery
from pydantic import BaseModel, ConfigDict, Field
from redis.exceptions import RedisError

from jobs import interactive
from jobs.interactive import Asked
from jobs.keys import Caller, KeyRefused, KeyRing
from jobs.protocol import (
    REFUSAL_STATUSES,
    CustomId,
    Endpoint,
    Metadata,
    dump_json,
    parse_as,
    parse_body,
    show,
    unknown_model,
)
from jobs.quotas import QuotaExceeded, check_queued_tokens, check_running_batches, check_storage
from jobs.settings import Settings
from jobs.steering import LONGEST_WINDOW_DAYS, LONGEST_WINDOW_S, UNITS_S
from jobs.submit import estimate_prompt_tokens
from jobs.validation import SubmitOptions, find_digest, known_models
from storage import files, queries, transitions
from storage.database import Connection, Database
from storage.errors import InvalidRequest, PromptmillError, StorageError
from storage.files import IncomingFile, NewUpload
from storage.models import Door, FilePurpose
from storage.queries import BatchRow, ResultRow
from storage.transitions import NewBatch

# What is no field of the OpenAI body.
CALL_FIELDS = ("token", "custom_id", "timeout_s")
LEAST_WINDOW_S = 60
MAX_PRIORITY = 1_000_000
# Between two looks for answers, while some are awaited and while none are.
ANSWER_S, IDLE_S = 0.05, 0.2
SEND_AGAIN_S = 2.0
# When the database or Redis is away.
AWAY_S = 1.0
# The same order again by another message is another order; the one message that comes twice is found by its key.
_WINDOW = re.compile(r"(\d{1,9})([smhd])")

log = structlog.get_logger(__name__)


class _Given(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class RequestCall(_Given):
    """What a request carries beside its body. timeout_s: after which it is not run any more."""

    token: str | None = None
    custom_id: CustomId | None = None
    timeout_s: Annotated[float, Field(gt=0, le=LONGEST_WINDOW_S)] | None = None


class BatchCall(_Given):
    """A batch: lines in OpenAI's form, or the id of a file that was uploaded over HTTP."""

    token: str | None = None
    lines: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    input_file_id: str | None = None
    endpoint: str | None = None
    completion_window: str = "24h"
    metadata: Metadata | None = None
    name: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    paused: bool | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended. body: of the response, None without one. code, message: None when it was answered."""

    status_code: int | None
    body: Any
    code: str | None = None
    message: str | None = None


class Reception:
    """Lets requests and batches in. Threads may share it."""

    def __init__(self, database: Database, celery: Celery, settings: Settings) -> None:
        self.database = database
        self.celery = celery
        self.settings = settings
        self._keys = KeyRing(database)

    def ask(self, door: Door, call: Mapping[str, Any], body: Mapping[str, Any], key: str) -> Asked:
        """Write a request and send it to the workers. call: token, custom_id, timeout_s; body: OpenAI's.

        Raises KeyRefused, InvalidRequest, QuotaExceeded; StorageError when the database is away.
        """
        given = parse_as(RequestCall, to_json(call))
        caller = self._caller(given.token)
        endpoint = Endpoint.COMPLETIONS if "prompt" in body and "messages" not in body else Endpoint.CHAT
        parsed = parse_body(endpoint, to_json(body))
        if parsed.model is None:
            raise InvalidRequest("model is missing; add it", code="missing_required_parameter", param="model")
        if find_digest(self.database, self.settings.artifacts_dir, parsed.model) is None:
            raise unknown_model(parsed.model, known_models(self.database, self.settings.artifacts_dir))
        tokens = estimate_prompt_tokens(parsed.to_json())
        asked = interactive.write(
            self.database,
            parsed,
            endpoint=endpoint,
            model=parsed.model,
            tenant=caller.tenant,
            door=door,
            timeout_s=given.timeout_s or self.settings.door.request_timeout_s,
            api_key_id=caller.api_key_id,
            custom_id=given.custom_id,
            idempotency_key=f"{door}:{key}",
            check=lambda connection: check_queued_tokens(connection, caller.tenant, adding=tokens),
        )
        if asked.is_new:
            interactive.send(self.database, self.celery, [asked])
        return asked

    def order(self, door: Door, call: Mapping[str, Any], key: str) -> dict[str, Any]:
        """Write a batch, whose lines are read behind the call. Returns it in OpenAI's form, as far as it is known.

        Raises as `ask`.
        """
        given = parse_as(BatchCall, to_json(call))
        caller = self._caller(given.token)
        window_s = _window(given.completion_window)
        if (given.lines is None) == (given.input_file_id is None):
            raise InvalidRequest(
                "a batch has either lines or input_file_id; give one of them",
                code="missing_required_parameter",
                param="lines",
            )
        endpoint = _endpoint(given)
        contents = self._write(given.lines) if given.lines is not None else None
        fingerprint = hashlib.sha256(
            json.dumps(
                [given.model_dump(mode="json", exclude={"token", "lines"}), contents.sha256 if contents else None],
                sort_keys=True,
            ).encode()
        ).hexdigest()
        is_kept = False

        def create(connection: Connection) -> tuple[BatchRow, bool]:
            now = self.database.now()
            transitions.lock_tenant(connection, caller.tenant)
            known = queries.find_batch_by_idempotency_key(connection, f"{door}:{key}", caller.tenant)
            if known is not None:
                return known, False
            check_running_batches(connection, caller.tenant)
            file_id = given.input_file_id
            if contents is not None:
                file_id = self._add_file(connection, caller, contents, now)
                check_storage(connection, caller.tenant, contents.bytes)
            else:
                _check_file(connection, caller, file_id or "")
            lifetime_s = self.settings.gateway.file_lifetime_s or None
            new = NewBatch(
                public_id=f"batch_{uuid.uuid4().hex}",
                fingerprint=fingerprint,
                endpoint=endpoint,
                model="",  # its lines say it
                tenant=caller.tenant,
                name=given.name,
                priority=given.priority or 0,
                metadata=None if given.metadata is None else dump_json(given.metadata),
                expires_at=now + window_s,
                idempotency_key=f"{door}:{key}",
                door=door,
                api_key_id=caller.api_key_id,
                input_file_public_id=file_id,
                completion_window=given.completion_window,
                output_expires_after_s=lifetime_s,
                submit_options=SubmitOptions().to_json(),
                paused_at=now if given.paused else None,
            )
            made = queries.find_batch_by_id(connection, transitions.create_batch(connection, new, now))
            assert made is not None, "it is there since the line above"
            return made, True

        try:
            if contents is not None:
                contents.put_in_place()
            batch, is_kept = self.database.retry(create)
        finally:
            if contents is not None and not is_kept:
                contents.discard()
        return render_order(batch)

    def outcomes(self, request_ids: Sequence[int]) -> dict[int, Outcome]:
        """Of these requests, those that have ended."""
        with self.database.read() as connection:
            rows = queries.results_of(connection, request_ids)
        return {row.request_id: outcome_of(row) for row in rows}

    def answer_forever(
        self,
        door: str,
        awaited: Callable[[], Mapping[bytes, bytes]],
        answer: Callable[[Mapping[bytes, bytes]], Sequence[int]],
        stop: threading.Event,
    ) -> None:
        """Look for answers until told to stop, and send again what no message stands for any more.

        door: names it in the log. awaited: what waits. answer: hands out what has ended, and returns the requests that
        are still open.
        """
        sent_again_at = time.monotonic()
        while not stop.is_set():
            waiting: Mapping[bytes, bytes] = {}
            try:
                waiting = awaited()
                left = answer(waiting)
                if left and time.monotonic() - sent_again_at > SEND_AGAIN_S:
                    sent_again_at = time.monotonic()
                    interactive.send_again(self.database, self.celery, left)
            except (RedisError, OSError, StorageError) as error:
                log.warning(f"{door}_answers_wait", reason=type(error).__name__)
                stop.wait(AWAY_S)
            except Exception as error:  # the thread must live
                log.error(f"{door}_crashed", kind=type(error).__name__)
                stop.wait(AWAY_S)
            stop.wait(ANSWER_S if waiting else IDLE_S)

    def _caller(self, token: str | None) -> Caller:
        if not token:
            raise KeyRefused("token is missing; give an API key (promptmill key create)")
        return self._keys.find(token)

    def _write(self, lines: Sequence[Mapping[str, Any]]) -> IncomingFile:
        contents = IncomingFile(self.settings.files_dir)
        try:
            for number, line in enumerate(lines, 1):
                try:
                    contents.write(to_json(line).encode() + b"\n")
                except InvalidRequest as error:
                    raise InvalidRequest(f"line {number}: {error.message}", code=error.code, param="lines") from None
                if contents.bytes > self.settings.gateway.max_upload_bytes:
                    raise InvalidRequest(
                        f"lines exceed {self.settings.gateway.max_upload_bytes} bytes; split the batch",
                        code="request_too_large",
                        param="lines",
                    )
        except BaseException:
            contents.discard()
            raise
        return contents

    def _add_file(self, connection: Connection, caller: Caller, contents: IncomingFile, now: float) -> str:
        lifetime_s = self.settings.gateway.file_lifetime_s
        new = NewUpload(
            public_id=files.make_file_id(),
            tenant=caller.tenant,
            purpose=FilePurpose.BATCH,
            filename="lines.jsonl",
            path=contents.path,
            bytes=contents.bytes,
            lines=contents.lines,
            sha256=contents.sha256,
            expires_at=now + lifetime_s if lifetime_s else None,
            api_key_id=caller.api_key_id,
        )
        return files.add_upload(connection, new, now, same_within_s=0.0).public_id


def to_json(value: object) -> str:
    """A parsed message as JSON again, for the one parser that explains what is wrong. Raises InvalidRequest."""
    try:
        return json.dumps(value, allow_nan=False)
    except (ValueError, TypeError):
        raise InvalidRequest(
            "a number is NaN or infinite, which JSON does not have; write a finite one", code="invalid_value"
        ) from None
    except RecursionError:
        raise InvalidRequest(
            "JSON is nested too deep; a request needs 5 levels, flatten it", code="invalid_json"
        ) from None


def outcome_of(row: ResultRow) -> Outcome:
    if row.status_code is None:
        return Outcome(None, None, row.error_code, row.error_message)
    body = None if row.response is None else json.loads(row.response)
    if row.status_code == 200:
        return Outcome(200, body)
    return Outcome(row.status_code, body, row.error_code, row.error_message)


def refusal_of(error: PromptmillError) -> Outcome:
    """A call that was not let in, in the form of one that was and failed."""
    status = {KeyRefused: 401, QuotaExceeded: 429}.get(type(error)) or REFUSAL_STATUSES.get(error.code, 400)
    param = error.param if isinstance(error, InvalidRequest) else None
    body = {"error": {"message": error.message, "type": "invalid_request_error", "param": param, "code": error.code}}
    return Outcome(status, body, error.code, error.message)


def render_order(batch: BatchRow) -> dict[str, Any]:
    """A batch that was just made. Its lines are not read yet: what is wrong with them shows later, as over HTTP."""
    return {
        "id": batch.public_id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "input_file_id": batch.input_file_public_id,
        "completion_window": batch.completion_window,
        "status": batch.status.value,
        "created_at": int(batch.created_at),
        "expires_at": None if batch.expires_at is None else int(batch.expires_at),
        "metadata": json.loads(batch.metadata) if batch.metadata else None,
        "name": batch.name,
    }


def _endpoint(given: BatchCall) -> Endpoint:
    """As it is given, else as the first line says."""
    named: object = given.endpoint
    if named is None and given.lines is not None:
        if "url" not in given.lines[0]:
            raise InvalidRequest(
                f"line 1: url is missing; add {' or '.join(Endpoint)}",
                code="missing_required_parameter",
                param="lines[0].url",
            )
        named = given.lines[0]["url"]
    if named is None and given.lines is None:
        raise InvalidRequest(
            f"endpoint is missing; add {' or '.join(Endpoint)}", code="missing_required_parameter", param="endpoint"
        )
    try:
        return Endpoint(str(named))
    except ValueError:
        raise InvalidRequest(
            f"endpoint is {show(named)}; write {' or '.join(Endpoint)}", code="invalid_value", param="endpoint"
        ) from None


def _window(text: str) -> float:
    found = _WINDOW.fullmatch(text)
    seconds = int(found[1]) * UNITS_S[found[2]] if found else 0
    if not LEAST_WINDOW_S <= seconds <= LONGEST_WINDOW_S:
        raise InvalidRequest(
            f'completion_window is {show(text)}; write "24h", or another such as "90m" or "7d", from 60s to '
            f"{LONGEST_WINDOW_DAYS}d",
            code="invalid_value",
            param="completion_window",
        )
    return float(seconds)


def _check_file(connection: Connection, caller: Caller, public_id: str) -> None:
    row = files.find_upload(connection, caller.tenant, public_id)
    if row is None or row.purpose != FilePurpose.BATCH:
        raise InvalidRequest(
            f"there is no input file {show(public_id)}; upload it first, or send lines",
            code="file_not_found",
            param="input_file_id",
        )
