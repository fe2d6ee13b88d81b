"""The Redis inbox: one stream for everything that can reach Redis and nothing else.

A producer adds an entry with one field, `request`, which holds JSON in the form of `docs/inbox.schema.json`. This
bridge checks it, writes it to the database, and answers on the list that the entry names, if it names one.

    promptmill.inbox           the stream; an entry is removed when it is in the database
    promptmill.reply.*         lists of answers, by the producer's choice of name; they expire
    promptmill.inbox.open      entry id -> the request whose answer is to be sent
    promptmill.inbox.dead      the last entries that could not be taken, and why (`jobs/dead_letters.py`)

Any number of bridges read the stream as one consumer group. What a dead one had in its hands another claims; an entry
that comes twice finds its request by its id, and an answer is pushed in the step that forgets who waits for it: once.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import traceback
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import redis
import structlog
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from redis.exceptions import RedisError, ResponseError

from jobs.dead_letters import bury
from jobs.keys import KeyRefused
from jobs.protocol import dump_json, parse_as
from jobs.queue import redis_url
from jobs.quotas import QuotaExceeded
from jobs.reception import ANSWER_S, AWAY_S, Outcome, Reception, refusal_of
from jobs.settings import Settings
from storage.errors import InvalidRequest, PromptmillError, StorageError
from storage.models import Door

STREAM = "promptmill.inbox"
GROUP = "promptmill"
FIELD = b"request"
REPLY_PREFIX = "promptmill.reply."
OPEN = "promptmill.inbox.open"
DEAD = "promptmill.inbox.dead"

# Entries for one read.
READ_ENTRIES = 32
# How long one wait for entries lasts: also how late a bridge notices that it is to stop.
READ_S = 1.0
# What a bridge has held for so long without a sign it has died with.
CLAIM_S = 15.0
CLAIM_EVERY_S = 2.0
OVERDUE_S = 300.0
SOCKET_TIMEOUT_S = 30
LONGEST_REPLY_S = 30 * 86_400

# Forget who waits and push the answer in one step, so that two bridges cannot both push it.
_REPLY = """
if redis.call('HDEL', KEYS[1], ARGV[1]) == 1 then
  redis.call('RPUSH', KEYS[2], ARGV[2])
  redis.call('EXPIRE', KEYS[2], ARGV[3])
  return 1
end
return 0
"""

log = structlog.get_logger(__name__)

ReplyName = Annotated[str, Field(max_length=255, pattern=r"^promptmill\.reply\.[A-Za-z0-9._:-]+$")]
_REPLY_NAME: TypeAdapter[str] = TypeAdapter(ReplyName)


class Envelope(BaseModel):
    """What every entry may say. The rest is `body` of a request, or `batch`."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    token: str
    custom_id: str | None = None
    timeout_s: float | None = None
    body: dict[str, Any] | None = None
    batch: dict[str, Any] | None = None
    reply_to: ReplyName | None = None
    reply_expires_s: Annotated[int, Field(ge=1, le=LONGEST_REPLY_S)] | None = None


@dataclass(frozen=True, slots=True)
class Awaited:
    """Who waits for the answer to an entry. reply_to None: nobody."""

    request_id: int
    until: float
    reply_to: str | None
    expires_s: int
    custom_id: str | None

    def to_json(self) -> str:
        return json.dumps([self.request_id, self.until, self.reply_to, self.expires_s, self.custom_id])

    @classmethod
    def from_json(cls, text: bytes) -> Awaited:
        request_id, until, reply_to, expires_s, custom_id = json.loads(text)
        return cls(int(request_id), float(until), reply_to, int(expires_s), custom_id)


def render_reply(entry_id: str, custom_id: str | None, outcome: Outcome) -> str:
    """An answer: `response` is OpenAI's body or null, `error` is null or says why there is no answer."""
    error = None if outcome.status_code == 200 else {"code": outcome.code, "message": outcome.message}
    return dump_json(
        {
            "id": entry_id,
            "custom_id": custom_id,
            "status_code": outcome.status_code,
            "response": outcome.body if outcome.status_code == 200 else None,
            "error": error,
        }
    )


class Inbox:
    """The bridge, in threads of its own."""

    def __init__(self, reception: Reception, settings: Settings) -> None:
        """settings: with the queue's URL filled in."""
        self._reception = reception
        self._settings = settings.door
        self._redis: Any = redis.Redis.from_url(
            redis_url(settings.queue.url), socket_timeout=SOCKET_TIMEOUT_S, socket_connect_timeout=5
        )
        self._push_reply = self._redis.register_script(_REPLY)
        self._name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._claimed_at = -float("inf")
        self._has_group = False
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._read_forever, name="inbox", daemon=True),
            threading.Thread(target=self._answer_forever, name="inbox-answers", daemon=True),
        ]

    def start(self) -> Inbox:
        for thread in self._threads:
            thread.start()
        return self

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._redis.close()

    # --- reading -------------------------------------------------------------------------------------------------

    def _read_forever(self) -> None:
        while not self._stop.is_set():
            try:
                self._make_group()
                room = self._settings.max_open_calls - self._redis.hlen(OPEN)
                if room <= 0:
                    self._stop.wait(ANSWER_S)
                    continue
                for entry_id, fields in self._next(min(room, READ_ENTRIES)):
                    if self._stop.is_set():
                        break  # what is left in hand is claimed by another bridge, or by us when we are back
                    self._handle(entry_id.decode(), fields)
            except ResponseError as error:
                self._has_group = False  # the stream was removed, or Redis was emptied
                log.warning("inbox_waits_for_redis", reason=str(error)[:200])
                self._stop.wait(AWAY_S)
            except (RedisError, OSError) as error:
                log.warning("inbox_waits_for_redis", reason=type(error).__name__)
                self._stop.wait(AWAY_S)
            except StorageError as error:
                log.warning("inbox_waits_for_database", code=error.code)
                self._claimed_at = -float("inf")  # what is in hand is taken up again
                self._stop.wait(AWAY_S)
            except Exception as error:  # the thread must live
                log.error("inbox_crashed", kind=type(error).__name__)
                self._stop.wait(AWAY_S)

    def _make_group(self) -> None:
        if self._has_group:
            return
        try:
            self._redis.xgroup_create(STREAM, GROUP, id="0", mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise
        self._has_group = True

    def _next(self, most: int) -> list[tuple[bytes, Mapping[bytes, bytes]]]:
        """Entries that nobody has, or that somebody died with."""
        if time.monotonic() - self._claimed_at > CLAIM_EVERY_S:
            self._claimed_at = time.monotonic()
            own = self._redis.xreadgroup(GROUP, self._name, {STREAM: "0"}, count=most)  # left from before trouble
            found = [entry for _, entries in own for entry in entries]
            if not found:
                _, found, _ = self._redis.xautoclaim(STREAM, GROUP, self._name, int(CLAIM_S * 1000), count=most)
                if found:
                    log.warning("inbox_entries_claimed", entries=len(found))
                self._drop_dead_consumers()
            if found:
                self._claimed_at = -float("inf")  # there may be more
                return [(entry_id, fields or {}) for entry_id, fields in found]
        read = self._redis.xreadgroup(GROUP, self._name, {STREAM: ">"}, count=most, block=int(READ_S * 1000))
        return [(entry_id, fields or {}) for _, entries in read for entry_id, fields in entries]

    def _drop_dead_consumers(self) -> None:
        """Bridges that ended leave a name behind; one that holds nothing and was not heard of for long goes."""
        for consumer in self._redis.xinfo_consumers(STREAM, GROUP):
            name = consumer["name"].decode()
            if name != self._name and consumer["pending"] == 0 and consumer["idle"] > 3600 * 1000:
                self._redis.xgroup_delconsumer(STREAM, GROUP, name)

    def _handle(self, entry_id: str, fields: Mapping[bytes, bytes]) -> None:
        """See an entry through: it leaves the stream together with what became of it. Raises when a server is away."""
        raw = fields.get(FIELD)
        envelope: Envelope | None = None
        try:
            if raw is None:
                raise InvalidRequest(
                    "the entry has no field `request`; put one JSON object there", code="missing_required_parameter"
                )
            envelope = parse_as(Envelope, raw)
            self._carry_out(entry_id, envelope)
        except (InvalidRequest, KeyRefused, QuotaExceeded) as error:
            self._refuse(entry_id, raw or b"", envelope, error)
        except StorageError as error:
            if error.retryable:
                raise
            self._refuse(entry_id, raw or b"", envelope, error)
        except (RedisError, OSError):
            raise
        except Exception as error:
            # Ours to repair: taken up again it would only fail again. What the error says may quote a prompt.
            frames = "".join(traceback.format_tb(error.__traceback__))
            log.error("inbox_entry_crashed", entry=entry_id, kind=type(error).__name__, traceback=frames)
            failed = PromptmillError("the server failed; its log says why", code="internal_error")
            self._refuse(entry_id, raw or b"", envelope, failed)

    def _carry_out(self, entry_id: str, envelope: Envelope) -> None:
        if (envelope.body is None) == (envelope.batch is None):
            raise InvalidRequest(
                "an entry has either body or batch; give one of them", code="invalid_value", param="body"
            )
        reply_s = envelope.reply_expires_s or self._settings.result_lifetime_s
        pipeline = self._redis.pipeline(transaction=True)
        if envelope.batch is not None:
            batch = self._reception.order(Door.INBOX, {**envelope.batch, "token": envelope.token}, entry_id)
            if envelope.reply_to is not None:
                reply = render_reply(entry_id, envelope.custom_id, Outcome(200, batch))
                pipeline.rpush(envelope.reply_to, reply)
                pipeline.expire(envelope.reply_to, reply_s)
        else:
            assert envelope.body is not None
            call = {"token": envelope.token, "custom_id": envelope.custom_id, "timeout_s": envelope.timeout_s}
            asked = self._reception.ask(Door.INBOX, call, envelope.body, entry_id)
            until = time.time() + (envelope.timeout_s or self._settings.request_timeout_s) + OVERDUE_S
            awaited = Awaited(asked.request_id, until, envelope.reply_to, reply_s, envelope.custom_id)
            pipeline.hset(OPEN, entry_id, awaited.to_json())
        self._remove(pipeline, entry_id)
        pipeline.execute()

    def _refuse(self, entry_id: str, raw: bytes, envelope: Envelope | None, error: PromptmillError) -> None:
        log.warning("inbox_entry_refused", entry=entry_id, code=error.code)
        pipeline = self._redis.pipeline(transaction=True)
        bury(pipeline, DEAD, raw, code=error.code, reason=error.message, entry_id=entry_id)
        reply_to = envelope.reply_to if envelope is not None else _reply_to(raw)
        if reply_to is not None:
            custom_id = envelope.custom_id if envelope is not None else None
            pipeline.rpush(reply_to, render_reply(entry_id, custom_id, refusal_of(error)))
            pipeline.expire(reply_to, self._settings.result_lifetime_s)
        self._remove(pipeline, entry_id)
        pipeline.execute()

    def _remove(self, pipeline: Any, entry_id: str) -> None:
        pipeline.xack(STREAM, GROUP, entry_id)
        pipeline.xdel(STREAM, entry_id)

    # --- answering -----------------------------------------------------------------------------------------------

    def _answer_forever(self) -> None:
        self._reception.answer_forever("inbox", lambda: self._redis.hgetall(OPEN), self._answer, self._stop)

    def _answer(self, waiting: Mapping[bytes, bytes]) -> list[int]:
        """Push the answers of what has ended. Returns the requests that are still open."""
        by_entry: dict[bytes, Awaited] = {}
        for entry_id, text in waiting.items():
            try:
                by_entry[entry_id] = Awaited.from_json(text)
            except (ValueError, TypeError):
                self._redis.hdel(OPEN, entry_id)
        if not by_entry:
            return []
        outcomes = self._reception.outcomes(sorted({each.request_id for each in by_entry.values()}))
        now = time.time()
        left = []
        for entry_id, each in by_entry.items():
            outcome = outcomes.get(each.request_id)
            if outcome is None and now > each.until:
                outcome = Outcome(None, None, "request_timed_out", "the request has no answer in its time")
            if outcome is None:
                left.append(each.request_id)
            elif each.reply_to is None:
                self._redis.hdel(OPEN, entry_id)
            else:
                reply = render_reply(entry_id.decode(), each.custom_id, outcome)
                self._push_reply(keys=[OPEN, each.reply_to], args=[entry_id, reply, each.expires_s])
        return left


def _reply_to(raw: bytes) -> str | None:
    """Where to say that an entry was refused, as far as it can be read."""
    try:
        return _REPLY_NAME.validate_python(json.loads(raw).get("reply_to"), strict=True)
    except (ValueError, AttributeError, RecursionError):  # pydantic's refusal is a ValueError
        return None
