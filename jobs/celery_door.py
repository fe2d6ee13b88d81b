"""The Celery door: `promptmill.generate` and `promptmill.submit_batch`, for applications that have only Celery.

A producer sends a task by name to the queue `promptmill.door`; its `AsyncResult` gets OpenAI's response body. What it
waits for is a request in the database like any other: no thread and no Celery worker is held meanwhile, and thousands
may wait. The door takes the messages out of Redis itself, one atomic move at a time, because Celery's own Redis
transport loses what a killed worker has just popped. A message that comes twice finds its request by the task's id.

    promptmill.door            the queue, as Celery's producers write it (and one list for each higher priority)
    promptmill.door.taken.NAME what a door has in its hands; another door returns it when that one has died
    promptmill.door.open       task id -> the request whose answer is to be stored as its result
    promptmill.door.dead       the last messages that were no task of ours, and why (`jobs/dead_letters.py`)
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import socket
import threading
import time
import traceback
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import redis
import structlog
from redis.exceptions import RedisError

from jobs.dead_letters import bury
from jobs.keys import KeyRefused
from jobs.protocol import dump_json
from jobs.queue import redis_url
from jobs.quotas import QuotaExceeded
from jobs.reception import ANSWER_S, AWAY_S, CALL_FIELDS, Outcome, Reception, refusal_of
from jobs.settings import Settings
from storage.errors import InvalidRequest, PromptmillError, StorageError
from storage.models import Door

QUEUE = "promptmill.door"
GENERATE = "promptmill.generate"
SUBMIT_BATCH = "promptmill.submit_batch"
TAKEN = "promptmill.door.taken."
ALIVE = "promptmill.door.alive."
NAMES = "promptmill.door.names"
OPEN = "promptmill.door.open"
DEAD = "promptmill.door.dead"
RESULT = "celery-task-meta-"  # of Celery's Redis backend

# kombu keeps a list for each of its priority steps; what has no priority is in the first.
QUEUES = (QUEUE, *(f"{QUEUE}\x06\x16{step}" for step in (3, 6, 9)))
LONGEST_TASK_ID = 255
# Messages in work at once; each is one write to the database.
TAKERS = 4
# How long one wait for a message lasts: also how late a door notices that it is to stop.
TAKE_S = 1.0
# A door that gave no sign for so long is dead: what it had in hand goes back to the queue.
ALIVE_S = 10
LOOK_AFTER_S = 2.0
# Beyond its time a request without an answer is given up here: its database was replaced.
OVERDUE_S = 300.0
SOCKET_TIMEOUT_S = 30

log = structlog.get_logger(__name__)


class NoTask(Exception):
    """A message is no task of ours. task_id: whom to tell, if it says that much."""

    def __init__(self, code: str, message: str, task_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.task_id = task_id


@dataclass(frozen=True, slots=True)
class Task:
    id: str
    name: str
    kwargs: dict[str, Any]
    expires_at: float | None


def render_result(task_id: str, state: str, result: object, now: float) -> str:
    """A result as Celery's producers read it. An exception travels by its name and text."""
    if isinstance(result, Exception):
        kind = type(result)
        result = {"exc_type": kind.__name__, "exc_message": list(result.args), "exc_module": kind.__module__}
    return dump_json(
        {
            "status": state,
            "result": result,
            "traceback": None,
            "children": [],
            "date_done": datetime.fromtimestamp(now, UTC).isoformat(),
            "task_id": task_id,
        }
    )


def parse_message(entry: bytes) -> Task:
    """Take a Celery message of either protocol version apart. Raises NoTask."""
    try:
        envelope = json.loads(entry)
        headers, properties = envelope.get("headers") or {}, envelope.get("properties") or {}
        if not isinstance(headers, dict) or not isinstance(properties, dict):
            raise TypeError
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise NoTask("malformed_message", "the message is not in Celery's form") from None
    task_id = headers.get("id")
    task_id = task_id if isinstance(task_id, str) and 0 < len(task_id) <= LONGEST_TASK_ID else None
    kind = envelope.get("content-type")
    if kind != "application/json":
        raise NoTask(
            "unsupported_content_type",
            f"only JSON is taken, not {str(kind)[:60]}; set task_serializer='json'",
            task_id,
        )
    if headers.get("compression"):
        raise NoTask("unsupported_compression", "compressed messages are not taken; unset task_compression", task_id)
    try:
        body = envelope["body"]
        if properties.get("body_encoding") == "base64":
            body = base64.b64decode(body, validate=True)
        content = json.loads(body)
        if isinstance(content, dict):  # protocol 1
            name, task_id, args, kwargs = content["task"], content["id"], content["args"], content["kwargs"]
            expires = content.get("expires")
            has_eta = content.get("eta") is not None
        else:
            args, kwargs, _ = content
            name, expires, has_eta = headers["task"], headers.get("expires"), headers.get("eta") is not None
    except (KeyError, ValueError, TypeError, binascii.Error, RecursionError):
        raise NoTask("malformed_message", "the message is not in Celery's form", task_id) from None
    if not isinstance(task_id, str) or not 0 < len(task_id) <= LONGEST_TASK_ID or "\0" in task_id:
        raise NoTask("malformed_message", f"the task's id is no text of 1 to {LONGEST_TASK_ID} characters")
    if name not in (GENERATE, SUBMIT_BATCH):
        raise NoTask("unknown_task", f"there is no task {str(name)[:60]}, only {GENERATE} and {SUBMIT_BATCH}", task_id)
    if args or not isinstance(kwargs, dict):
        raise NoTask(
            "invalid_arguments", "give everything by name, as kwargs; there are no positional arguments", task_id
        )
    if has_eta:
        raise NoTask("unsupported_eta", "eta and countdown are not supported; send the task when it is due", task_id)
    return Task(task_id, name, kwargs, _instant(expires, task_id))


def _instant(expires: object, task_id: str) -> float | None:
    if expires is None:
        return None
    try:
        instant = datetime.fromisoformat(str(expires))
    except ValueError:
        raise NoTask("malformed_message", "expires is no ISO time", task_id) from None
    return (instant if instant.tzinfo is not None else instant.replace(tzinfo=UTC)).timestamp()


def failure_of(outcome: Outcome) -> Exception:
    """A request that was not answered, as an exception that every Python has: the producer has none of ours.

    Its text begins with the code: `context_length_exceeded: the prompt has ...`.
    """
    text = f"{outcome.code}: {outcome.message}"
    if outcome.status_code is None:
        return TimeoutError(text) if outcome.code == "request_timed_out" else RuntimeError(text)
    if outcome.status_code in (401, 403):
        return PermissionError(text)
    return ValueError(text) if outcome.status_code < 500 and outcome.status_code != 429 else RuntimeError(text)


class CeleryDoor:
    """Takes tasks and stores their results, in threads of its own. Any number of doors may stand side by side."""

    def __init__(self, reception: Reception, settings: Settings) -> None:
        """settings: with the queue's URL filled in."""
        self._reception = reception
        self._most_open = settings.door.max_open_calls
        self._timeout_s = settings.door.request_timeout_s
        self._result_lifetime_s = settings.door.result_lifetime_s
        self._redis: Any = redis.Redis.from_url(
            redis_url(settings.queue.url), socket_timeout=SOCKET_TIMEOUT_S, socket_connect_timeout=5
        )
        self._name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._taken = TAKEN + self._name
        self._stop = threading.Event()
        self._is_unsure = threading.Event()  # something may lie in our hands that no thread of ours works on
        self._threads = [
            *(threading.Thread(target=self._take_forever, name=f"door-{n}", daemon=True) for n in range(TAKERS)),
            threading.Thread(target=self._answer_forever, name="door-answers", daemon=True),
            threading.Thread(target=self._look_after_forever, name="door-care", daemon=True),
        ]

    def start(self) -> CeleryDoor:
        for thread in self._threads:
            thread.start()
        return self

    def close(self) -> None:
        """Finish what is in hand; what waits for answers is another door's, or the next one's."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        try:
            self._return(self._name)
            self._redis.delete(ALIVE + self._name)
        except (RedisError, OSError) as error:
            log.warning("door_not_closed", reason=type(error).__name__)  # found by others within half a minute
        self._redis.close()

    # --- taking --------------------------------------------------------------------------------------------------

    def _take_forever(self) -> None:
        while not self._stop.is_set():
            try:
                if self._redis.hlen(OPEN) >= self._most_open:
                    self._stop.wait(ANSWER_S)
                    continue
                entry = self._take()
                if entry is not None:
                    self._handle(entry)
            except (RedisError, OSError) as error:
                log.warning("door_waits_for_redis", reason=type(error).__name__)
                self._is_unsure.set()
                self._stop.wait(AWAY_S)
            except Exception as error:  # the thread must live
                self._is_unsure.set()
                log.error("door_crashed", kind=type(error).__name__)
                self._stop.wait(AWAY_S)

    def _take(self) -> bytes | None:
        """Move the next message into our hands; None: there is none yet."""
        for name in QUEUES[1:]:
            entry: bytes | None = self._redis.lmove(name, self._taken, "RIGHT", "LEFT")
            if entry is not None:
                return entry
        moved: bytes | None = self._redis.blmove(QUEUE, self._taken, TAKE_S, "RIGHT", "LEFT")
        return moved

    def _handle(self, entry: bytes) -> None:
        """See a message through: it leaves our hands together with what became of it."""
        try:
            task = parse_message(entry)
        except NoTask as error:
            log.warning("door_message_refused", code=error.code)
            pipeline = self._redis.pipeline(transaction=True)
            if error.task_id is not None:
                self._store(pipeline, error.task_id, ValueError(f"{error.code}: {error.message}"))
            bury(pipeline, DEAD, entry, code=error.code, reason=error.message)
            pipeline.lrem(self._taken, 1, entry)
            pipeline.execute()
            return
        try:
            self._carry_out(task, entry)
        except (InvalidRequest, KeyRefused, QuotaExceeded) as error:
            self._refuse(task, entry, error)
        except StorageError as error:
            if not error.retryable:
                self._refuse(task, entry, error)
                return
            log.warning("door_waits_for_database", code=error.code)
            self._put_back(entry)
            self._stop.wait(AWAY_S)
        except (RedisError, OSError):
            raise
        except Exception as error:
            # Ours to repair: taken up again it would only fail again. What the error says may quote a prompt.
            frames = "".join(traceback.format_tb(error.__traceback__))
            log.error("door_task_crashed", task=task.id, kind=type(error).__name__, traceback=frames)
            self._end(task, entry, RuntimeError("internal_error: the server failed; its log says why"))

    def _carry_out(self, task: Task, entry: bytes) -> None:
        if task.name == SUBMIT_BATCH:
            self._end(task, entry, self._reception.order(Door.CELERY, task.kwargs, task.id))
            return
        left_s = None if task.expires_at is None else task.expires_at - time.time()
        if left_s is not None and left_s <= 0:
            self._end(task, entry, TimeoutError("expired: the task expired before it was taken"))
            return
        call = {name: task.kwargs[name] for name in CALL_FIELDS if name in task.kwargs}
        if left_s is not None:
            call.setdefault("timeout_s", left_s)
        body = {name: value for name, value in task.kwargs.items() if name not in CALL_FIELDS}
        asked = self._reception.ask(Door.CELERY, call, body, task.id)
        until = time.time() + float(call.get("timeout_s") or self._timeout_s) + OVERDUE_S
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.hset(OPEN, task.id, json.dumps([asked.request_id, until]))
        pipeline.lrem(self._taken, 1, entry)
        pipeline.execute()

    def _refuse(self, task: Task, entry: bytes, error: PromptmillError) -> None:
        log.info("door_task_refused", task=task.id, code=error.code)
        self._end(task, entry, failure_of(refusal_of(error)))

    def _end(self, task: Task, entry: bytes, result: object) -> None:
        """Store the result, and let the message go, in one step."""
        pipeline = self._redis.pipeline(transaction=True)
        self._store(pipeline, task.id, result)
        pipeline.lrem(self._taken, 1, entry)
        pipeline.execute()

    def _store(self, pipeline: Any, task_id: str, result: object) -> None:
        """Where Celery's Redis backend looks for it, and where it waits for the news."""
        state = "FAILURE" if isinstance(result, Exception) else "SUCCESS"
        key = RESULT + task_id
        text = render_result(task_id, state, result, time.time())
        pipeline.set(key, text, ex=self._result_lifetime_s)
        pipeline.publish(key, text)

    def _put_back(self, entry: bytes) -> None:
        """To the front of the queue."""
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.rpush(QUEUE, entry)
        pipeline.lrem(self._taken, 1, entry)
        pipeline.execute()

    # --- answering -----------------------------------------------------------------------------------------------

    def _answer_forever(self) -> None:
        self._reception.answer_forever("door", lambda: self._redis.hgetall(OPEN), self._answer, self._stop)

    def _answer(self, awaited: Mapping[bytes, bytes]) -> list[int]:
        """Store the results of what has ended. Returns the requests that are still open.

        Another door may do the same at the same time: the same result, stored twice.
        """
        by_request: dict[int, tuple[bytes, float]] = {}
        for task_id, value in awaited.items():
            try:
                request_id, until = json.loads(value)
                by_request[int(request_id)] = (task_id, float(until))
            except (ValueError, TypeError):
                self._redis.hdel(OPEN, task_id)
        if not by_request:
            return []
        outcomes = self._reception.outcomes(sorted(by_request))
        now = time.time()
        for request_id, (_, until) in by_request.items():
            if request_id not in outcomes and now > until:
                outcomes[request_id] = Outcome(None, None, "request_timed_out", "the request has no answer in its time")
        for request_id, outcome in outcomes.items():
            task_id = by_request[request_id][0]
            pipeline = self._redis.pipeline(transaction=True)
            result = outcome.body if outcome.status_code == 200 else failure_of(outcome)
            self._store(pipeline, task_id.decode(), result)
            pipeline.hdel(OPEN, task_id)
            pipeline.execute()
        return [request_id for request_id in by_request if request_id not in outcomes]

    # --- care for the dead ---------------------------------------------------------------------------------------

    def _look_after_forever(self) -> None:
        while not self._stop.is_set():
            try:
                pipeline = self._redis.pipeline(transaction=True)
                pipeline.set(ALIVE + self._name, "1", ex=ALIVE_S)
                pipeline.sadd(NAMES, self._name)
                pipeline.smembers(NAMES)
                *_, names = pipeline.execute()
                if self._is_unsure.is_set():
                    self._is_unsure.clear()
                    self._return(self._name)  # what a thread works on right now is then done twice, to no harm
                for name in names:
                    if not self._redis.exists(ALIVE + name.decode()):
                        self._return(name.decode())
            except (RedisError, OSError) as error:
                log.warning("door_waits_for_redis", reason=type(error).__name__)
            self._stop.wait(LOOK_AFTER_S)

    def _return(self, name: str) -> None:
        """What a door had in its hands goes back to the queue, to its front and in its order."""
        returned = 0
        while self._redis.lmove(TAKEN + name, QUEUE, "LEFT", "RIGHT") is not None:
            returned += 1
        self._redis.srem(NAMES, name)
        if returned:
            log.warning("door_tasks_returned", door=name, tasks=returned)
