"""The Celery app, queue names, sending ids, looking into the queue.

The queue carries request ids, never prompts, and the database is the truth: a message may be lost, or come twice. Each
model has two queues. Chunks of bulk work are Celery messages. Requests that somebody waits for are entries of a plain
Redis list, each a JSON list of ids, that a worker takes beside Celery (`InteractiveQueue`): so they wait neither for a
thread that a chunk holds nor for Celery's own milliseconds.

Beside its bulk queue a model has one for each place where a worker runs (gpu0@host), for chunks that this worker had
better run than another. A set in Redis names the places that have been sent something, so that whoever looks into the
queue sees those messages too, also where no worker is any more.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kombu
import redis
from celery import Celery
from kombu.exceptions import BatchPublishError, OperationalError
from kombu.transport import TRANSPORT_ALIASES

from jobs.settings import QueueSettings, check_queue_url
from storage.errors import PromptmillError

RUN_CHUNK = "promptmill.run_chunk"  # run_chunk(request_ids: list[int])

GIVE_UP = "promptmill_give_up"  # a worker's remote control command

# Messages for one pipeline. Our window is smaller than that; a repair may not be.
PUBLISH_BATCH = 500
# How long a worker waits for Redis to answer. Longer than any answer but a stalled server's.
SOCKET_TIMEOUT_S = 30
# Messages looked at by `waiting_ids`; dispatch keeps far fewer in the queue.
MOST_MESSAGES = 20_000

# Where kombu keeps messages that a worker has received and not yet acknowledged (for all queues of one Redis database).
_UNACKED = "unacked"
_UNACKED_INDEX = "unacked_index"  # when each of them was received
# As long as this key is there, Redis has not lost all that it had.
_MARK = "promptmill.mark"
# What Redis says to a wrong password, to none, and to one where it has none.
LOGIN_REFUSED = (
    "WRONGPASS",
    "NOAUTH",
    "invalid username-password",
    "Authentication required",
    "without any password configured",
)
# A worker claims what it receives at once. Who holds a message for longer and has not claimed its requests died in
# between, or still runs others alone; sending it again does no harm.
CLAIMED_WITHIN_S = 30.0


class QueueError(PromptmillError):
    """Redis refused or could not be reached."""

    @property
    def may_come(self) -> bool:
        """Whether this is a server that is only not there yet, or a URL that somebody has to mend."""
        return self.code == "queue_unreachable"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Requests of one model that travel in one message. place: whose own queue it goes to; None: the shared one."""

    model: str
    request_ids: tuple[int, ...]
    is_interactive: bool = False
    place: str | None = None


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """Messages of one model that wait, in workers' own queues too, and messages of all models that workers hold."""

    interactive: int
    bulk: int
    unacked: int

    @property
    def waiting(self) -> int:
        return self.interactive + self.bulk


def queue_name(model: str, *, is_interactive: bool) -> str:
    return f"promptmill.{model}.{'interactive' if is_interactive else 'bulk'}"


def own_queue_name(model: str, place: str) -> str:
    """The queue of the one worker at a place, such as gpu0@host: for chunks that it had better run than another."""
    return f"promptmill.{model}.at.{place}"


def queue_names(model: str) -> tuple[str, str]:
    """The queues of a model that all its workers share: interactive, bulk."""
    return queue_name(model, is_interactive=True), queue_name(model, is_interactive=False)


def _places_name(model: str) -> str:
    """The set of the places whose own queues may hold something."""
    return f"promptmill.{model}.places"


def make_app(settings: QueueSettings) -> Celery:
    """The Celery app for a queue URL; connects to nothing yet. Tasks are registered by `workers/tasks.py`.

    Why each setting is as it is: docs/decisions.md, "Celery".
    """
    check_queue_url(settings.url)
    # The one way to another transport class that also holds for a URL with a socket in it.
    TRANSPORT_ALIASES.update(dict.fromkeys(("redis", "rediss"), "jobs.queue_guard:GuardedTransport"))
    app = Celery("promptmill", broker=settings.url, set_as_current=False)
    app.conf.update(
        broker_transport_options={
            # Longer than the longest run of a chunk: until then Redis does not hand out its message again.
            "visibility_timeout": settings.visibility_timeout_s,
            "unacked_restore_interval": 10,  # look for overdue messages every 10 s, not every 100 s
            "unacked_restore_throttle": 1,
            "socket_timeout": SOCKET_TIMEOUT_S,
            "socket_connect_timeout": 5,
            "socket_keepalive": not settings.url.startswith("redis+socket:"),
            "health_check_interval": 10,
            "queue_order_strategy": "priority",  # the order in which a worker names its queues
            "priority_steps": [0],  # one list for each queue; we do not use priorities within one
            # A caller hears of a dead Redis at once and says so; the worker's own consumer tries for ever, see below.
            "max_retries": 1,
            "interval_start": 0.1,
            "interval_step": 0.1,
            # Never retry_on_timeout: it switches bulk publishing off.
        },
        broker_channel_error_retry=True,  # READONLY and OOM are survived
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,  # for ever
        broker_connection_timeout=5,
        task_acks_late=True,
        task_acks_on_failure=True,  # failures live in the database, not in Redis
        task_acks_on_timeout=True,
        task_ignore_result=True,
        task_store_errors_even_if_ignored=False,
        task_serializer="json",
        accept_content=["json"],
        worker_pool="threads",
        worker_consumer="jobs.queue_guard:GuardedConsumer",
        worker_prefetch_multiplier=1,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        worker_send_task_events=True,
        task_send_sent_event=False,
        worker_enable_remote_control=True,
        worker_hijack_root_logger=False,  # jobs/logs.py has set it up
        worker_redirect_stdouts=False,
    )
    return app


def redis_url(queue_url: str) -> str:
    """The queue's URL in the words of the redis package, for what is kept in Redis beside Celery's messages."""
    parts = urlsplit(queue_url)
    if parts.scheme != "redis+socket":
        return queue_url
    database = parse_qs(parts.query).get("virtual_host", ["0"])[0].strip("/") or "0"
    return f"unix://{parts.path}?db={database}"


def publish_chunks(app: Celery, chunks: Sequence[Chunk]) -> None:
    """Send one message for each chunk.

    Raises QueueError (retryable) when Redis did not take them all. Any part may then have been sent: return the
    requests to pending and send again; a request that travels twice is claimed once.
    """
    interactive = [chunk for chunk in chunks if chunk.is_interactive]
    if interactive:
        with _redis(app) as client:
            pipeline = client.pipeline(transaction=False)
            for chunk in interactive:
                pipeline.lpush(queue_name(chunk.model, is_interactive=True), interactive_entry(chunk.request_ids))
            pipeline.execute()
    bulk = [chunk for chunk in chunks if not chunk.is_interactive]
    if not bulk:
        return
    places = sorted({(chunk.model, chunk.place) for chunk in bulk if chunk.place is not None})
    if places:
        with _redis(app) as client:
            pipeline = client.pipeline(transaction=False)
            for model, place in places:  # before the messages: none must lie where nobody looks
                pipeline.sadd(_places_name(model), place)
            pipeline.execute()
    with (
        _translated(app),
        app.producer_pool.acquire(block=True, timeout=SOCKET_TIMEOUT_S) as producer,
        producer.batch(PUBLISH_BATCH),
    ):
        for chunk in bulk:
            app.send_task(
                RUN_CHUNK,
                args=[list(chunk.request_ids)],
                queue=(
                    queue_name(chunk.model, is_interactive=False)
                    if chunk.place is None
                    else own_queue_name(chunk.model, chunk.place)
                ),
                producer=producer,
                retry=False,
                argsrepr=f"({len(chunk.request_ids)} requests from {chunk.request_ids[0]})",
            )


def interactive_entry(request_ids: Sequence[int]) -> str:
    """What the interactive list carries for these requests."""
    return json.dumps(list(request_ids))


def tell_given_up(app: Celery, worker: str, request_ids: Sequence[int]) -> None:
    """Tell a worker that nobody waits for these requests. Nobody answers; one that does not hear it finds out anyway.

    Raises QueueError.
    """
    with _translated(app):
        app.control.broadcast(GIVE_UP, arguments={"request_ids": list(request_ids)}, destination=[worker])


class KeptConnection:
    """A connection to Redis that is kept, for one command after another; not for several threads at once.

    The package's client takes one from its pool for each command, looks whether it is alive, and measures it: longer
    than the command itself. Here a dead one shows when a command fails, which is then sent once more: it may run twice.
    """

    def __init__(self, url: str, **options: float) -> None:
        """url, options: as the redis package takes them. Connects with the first command."""
        self._pool = redis.ConnectionPool.from_url(url, **options)
        self._connection: Any = None

    def run(self, *command: str | float) -> Any:
        """Redis's own answer. Raises redis.RedisError, OSError."""
        if self._connection is None:
            self._connection = self._pool.get_connection()
            return self._exchange(command)
        try:
            return self._exchange(command)
        except redis.ConnectionError:
            return self._exchange(command)  # over a new connection

    def close(self) -> None:
        self._pool.disconnect()

    def _exchange(self, command: Sequence[str | float]) -> Any:
        self._connection.send_command(*command)
        return self._connection.read_response()


class InteractiveQueue:
    """A worker's end of a model's interactive list, on a connection of its own.

    Taking removes an entry for good. A worker that dies with it has claimed its requests, and they come back as any
    dead worker's do, or has not, and they are found as lost messages are.
    """

    def __init__(self, settings: QueueSettings, model: str) -> None:
        self._name = queue_name(model, is_interactive=True)
        self._redis = KeptConnection(redis_url(settings.url), socket_timeout=SOCKET_TIMEOUT_S, socket_connect_timeout=5)

    def take(self, wait_s: float) -> list[int]:
        """The ids of the oldest entry; empty when none came. Raises redis.RedisError, OSError."""
        taken = self._redis.run("BRPOP", self._name, wait_s)
        return [] if taken is None else _ids_in(taken[1])

    def put_back(self, request_ids: Sequence[int]) -> None:
        """Return ids to the front. Raises redis.RedisError, OSError."""
        self._redis.run("RPUSH", self._name, interactive_entry(request_ids))

    def close(self) -> None:
        self._redis.close()


def queue_depth(app: Celery, model: str) -> QueueDepth:
    """Messages that wait for a model's workers, and messages that workers hold. Raises QueueError."""
    with _redis(app) as client:
        names = _all_names(client, [model])
        pipeline = client.pipeline(transaction=True)
        for name in names:
            pipeline.llen(name)
        pipeline.hlen(_UNACKED)
        interactive, *bulk, unacked = pipeline.execute()
    return QueueDepth(interactive, sum(bulk), unacked)


def used_places(app: Celery, models: Collection[str]) -> dict[str, dict[str, int]]:
    """model -> place -> messages that wait in its own queue, of places that were sent something. Raises QueueError."""
    with _redis(app) as client:
        found = [(model, place) for model in models for place in _places_of(client, model)]
        if not found:
            return {}
        pipeline = client.pipeline(transaction=False)
        for model, place in found:
            pipeline.llen(own_queue_name(model, place))
        lengths = pipeline.execute()
    used: dict[str, dict[str, int]] = {}
    for (model, place), length in zip(found, lengths, strict=True):
        used.setdefault(model, {})[place] = length
    return used


def empty_own_queue(app: Celery, model: str, place: str) -> list[int]:
    """Take all messages out of a place's own queue. Returns their request ids. Raises QueueError.

    A chunk that is being sent there meanwhile may lie where nobody looks until the next one is, or a worker comes; its
    requests are then found as those of lost messages are.
    """
    ids: list[int] = []
    name = own_queue_name(model, place)
    with _redis(app) as client:
        while messages := client.rpop(name, PUBLISH_BATCH):
            ids += [request_id for message in messages for request_id in _ids_in(message)]
        client.srem(_places_name(model), place)
        if client.llen(name):
            client.sadd(_places_name(model), place)
    return ids


def was_emptied(app: Celery) -> bool:
    """Whether Redis has lost what it had since anybody last asked: emptied, or started anew without its data.

    Also true the first time. Raises QueueError.
    """
    with _redis(app) as client:
        return bool(client.set(_MARK, "1", nx=True))


def waiting_ids(app: Celery, models: Collection[str], *, held_s: float = CLAIMED_WITHIN_S) -> set[int] | None:
    """Request ids in all messages that wait for these models or that workers just received. Raises QueueError.

    None: more messages than are sensible to read. A message that is just being handed over is in neither place: look
    only for requests that were queued a while ago. What a worker received longer than `held_s` ago does not count: its
    requests are claimed, or it is dead.
    """
    with _redis(app) as client:
        names = _all_names(client, models)
        pipeline = client.pipeline(transaction=True)
        for name in names:
            pipeline.llen(name)
        pipeline.hlen(_UNACKED)
        if sum(pipeline.execute()) > MOST_MESSAGES:
            return None
        pipeline = client.pipeline(transaction=True)
        for name in names:
            pipeline.lrange(name, 0, -1)
        pipeline.hgetall(_UNACKED)
        pipeline.zrange(_UNACKED_INDEX, 0, -1, withscores=True)
        pipeline.time()
        *waiting, unacked, received, (seconds, microseconds) = pipeline.execute()
    since = seconds + microseconds / 1e6 - held_s
    old = {tag for tag, received_at in received if received_at < since}
    messages = [message for queue in waiting for message in queue]
    messages += [json.dumps(_first(envelope)) for tag, envelope in unacked.items() if tag not in old]
    return {request_id for message in messages for request_id in _ids_in(message)}


def ping(app: Celery) -> None:
    """Ask Redis for a sign of life. Raises QueueError."""
    with _redis(app) as client:
        client.ping()


@contextmanager
def _redis(app: Celery) -> Iterator[Any]:
    """kombu's own Redis client, of a pooled connection."""
    with _translated(app), app.pool.acquire(block=True, timeout=SOCKET_TIMEOUT_S) as connection:
        yield connection.default_channel.client


@contextmanager
def _translated(app: Celery) -> Iterator[None]:
    """Let failures of Redis leave as QueueError."""
    try:
        yield
    except (BatchPublishError, OperationalError, redis.RedisError, OSError) as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise QueueError(_reason(app, reason), code=_code(reason), retryable=True) from error


def _reason(app: Celery, reason: str) -> str:
    shown = kombu.Connection(app.conf.broker_url).as_uri()
    code = _code(reason)
    if code == "queue_full":
        return f"queue {shown} has no memory left; raise Redis's maxmemory, the work goes on by itself"
    if code == "queue_login_refused":
        return f"queue {shown} refuses this user or password; correct PROMPTMILL_QUEUE_URL"
    if code == "queue_database_missing":
        return f"queue {shown} has no database of that number; write a lower one at the end of PROMPTMILL_QUEUE_URL"
    if code == "queue_read_only":
        return f"queue {shown} is a read-only replica; point PROMPTMILL_QUEUE_URL at the primary"
    return f"queue {shown} cannot be reached ({reason}); check that Redis runs and that PROMPTMILL_QUEUE_URL is right"


def _code(reason: str) -> str:
    if "OOM" in reason or "maxmemory" in reason:
        return "queue_full"
    if any(word in reason for word in LOGIN_REFUSED):
        return "queue_login_refused"
    if "DB index" in reason:
        return "queue_database_missing"
    if "READONLY" in reason or "read only replica" in reason:
        return "queue_read_only"
    return "queue_unreachable"


def _places_of(client: Any, model: str) -> list[str]:
    return sorted(place.decode() for place in client.smembers(_places_name(model)))


def _all_names(client: Any, models: Collection[str]) -> list[str]:
    """The queues of these models: of each the interactive one, the bulk one, its workers' own."""
    return [
        name
        for model in models
        for name in (*queue_names(model), *(own_queue_name(model, place) for place in _places_of(client, model)))
    ]


def _first(envelope: bytes) -> Any:
    """The message in kombu's (message, exchange, routing key)."""
    try:
        return json.loads(envelope)[0]
    except (ValueError, LookupError, TypeError):
        return None


def _ids_in(message: bytes | str) -> list[int]:
    """The request ids in a message; none in one that we did not write."""
    try:
        envelope = json.loads(message)
        if isinstance(envelope, list):
            return [int(request_id) for request_id in envelope]
        body = envelope["body"]
        if envelope["properties"].get("body_encoding") == "base64":
            body = base64.b64decode(body)
        return [int(request_id) for request_id in json.loads(body)[0][0]]
    except (ValueError, LookupError, TypeError, AttributeError, binascii.Error):
        return []
