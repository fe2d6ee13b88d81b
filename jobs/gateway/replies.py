"""Who waits for which request in this process, and what was heard of it.

Workers tell on a channel of this process's own, over one connection for all calls, and tell the answer too, once it is
recorded. That is a courtesy: once a second the database is asked about all that are waited for, in one read, so a
message that was lost, or a Redis that was away, costs a second and not the answer. The same look sends requests again
that no message stands for.
"""

from __future__ import annotations

import asyncio
import json
import threading
import uuid
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from types import TracebackType
from typing import Any, Self, TypeVar

import redis.asyncio
import structlog
from redis.exceptions import RedisError

from jobs import interactive
from jobs.gateway.state import Gateway
from jobs.interactive import Answer, Asked
from jobs.queue import KeptConnection, interactive_entry, queue_name
from storage import transitions
from storage.errors import StorageError

# How often the database is asked about all requests that are waited for.
LOOK_S = 1.0
# Threads for the database: SQLite has one writer, and a read takes a fraction of a millisecond.
THREADS = 8
LONGEST_PAUSE_S = 1.0
CANCEL_AGAIN_S = 0.1
# Redis takes an entry in a fraction of a millisecond. One that takes longer is away, and the call waits without it.
SEND_TIMEOUT_S = 2.0

log = structlog.get_logger(__name__)

_Returned = TypeVar("_Returned")


class CallerGone(Exception):
    """Nobody is there any more to be answered."""


class Wait:
    """What one call has heard of its request.

    heard: the text of each choice as far as it stands. differs: a second attempt tells another text than the first.
    """

    def __init__(self, request_id: int, choices: int) -> None:
        self.request_id = request_id
        self.heard = [""] * choices
        self.differs = False
        self.may_have_ended = False
        self.answer: Answer | None = None
        self.began_at = monotonic()
        self._attempt = 0
        self._is_caller_gone = False
        self._changed = asyncio.Event()

    def note(self, event: dict[str, Any]) -> None:
        """Take in what a worker told. What an earlier attempt told already is compared, not repeated."""
        if event["attempt"] < self._attempt:
            return
        self._attempt = event["attempt"]
        for choice, at, piece in event["text"]:
            heard = self.heard[choice]
            if at > len(heard):
                continue  # something was missed; it is in the answer
            again = heard[at : at + len(piece)]
            if not piece.startswith(again):
                self.differs = True
            self.heard[choice] = heard + piece[len(again) :]
        told = event.get("answer")
        if told is not None:
            self.take(Answer(self.request_id, **told))
        self.may_have_ended = self.may_have_ended or event["ended"]
        self._changed.set()

    def take(self, answer: Answer) -> None:
        self.answer = answer
        self._changed.set()

    def leave(self) -> None:
        """The caller went away."""
        self._is_caller_gone = True
        self._changed.set()

    async def news(self) -> None:
        """Wait until something is new. Raises CallerGone."""
        await self._changed.wait()
        self._changed.clear()
        if self._is_caller_gone:
            raise CallerGone


class Replies:
    """One for each application. Use as `async with Replies(...) as replies`."""

    def __init__(self, gateway: Gateway, url: str) -> None:
        """url: of Redis, as the redis package writes it."""
        self.channel = f"promptmill.replies.{uuid.uuid4().hex}"
        self._database = gateway.database
        self._celery = gateway.celery
        self._client = redis.asyncio.Redis.from_url(url, socket_connect_timeout=5)
        self._senders = threading.local()  # a connection for each thread
        self._url = url
        self._waits: dict[int, set[Wait]] = {}
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="replies")
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loops: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._loops = [asyncio.create_task(self._listen()), asyncio.create_task(self._look())]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await _end(self._loops)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.aclose()
        self._threads.shutdown()

    @property
    def open_calls(self) -> int:
        return len(self._waits)

    async def in_thread(self, work: Callable[[], _Returned]) -> _Returned:
        """Run what talks to the database."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def begin(self, write: Callable[[], Asked], choices: int) -> tuple[Asked, Wait]:
        """Write a request, listen for it, send it. Follow with `end`. Raises what `write` raises."""

        def work() -> tuple[Asked, Wait]:
            asked = write()
            wait = Wait(asked.request_id, choices)
            self._waits.setdefault(asked.request_id, set()).add(wait)
            if asked.is_new:
                self._send(asked)
            else:
                wait.may_have_ended = True  # look at once
            return asked, wait

        return await self.in_thread(work)

    def end(self, wait: Wait) -> None:
        """Nobody waits any more, at least not here."""
        others = self._waits.get(wait.request_id, set())
        others.discard(wait)
        if not others:
            self._waits.pop(wait.request_id, None)

    async def answer(self, wait: Wait) -> Answer | None:
        """The answer, if it was told, or there is reason to look and it is there."""
        if wait.answer is None and wait.may_have_ended:
            wait.may_have_ended = False
            found = await self.in_thread(lambda: interactive.answers_of(self._database, [wait.request_id]))
            wait.answer = wait.answer or next(iter(found), None)
        return wait.answer

    async def give_up(self, wait: Wait, *, has_expired: bool) -> None:
        """End a request for whose answer nobody waits."""
        if self._waits.get(wait.request_id, set()) - {wait}:
            return  # another call with the same idempotency key
        try:
            await self.in_thread(
                lambda: interactive.give_up(self._database, self._celery, wait.request_id, has_expired=has_expired)
            )
        except StorageError as error:  # its deadline ends it
            log.warning("request_not_given_up", request=wait.request_id, code=error.code, reason=error.message)

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something although the call that wants it ends now."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _send(self, asked: Asked) -> None:
        """The message. One that cannot be sent is sent by the next look."""
        try:
            self._sender().run(
                "LPUSH", queue_name(asked.model, is_interactive=True), interactive_entry([asked.request_id])
            )
        except (RedisError, OSError) as error:
            log.warning("request_not_sent", request=asked.request_id, reason=type(error).__name__)
            self._database.retry(lambda connection: transitions.unqueue_requests(connection, [asked.request_id]))

    def _sender(self) -> KeptConnection:
        """This thread's connection; it is closed with its thread."""
        if not hasattr(self._senders, "connection"):
            self._senders.connection = KeptConnection(
                self._url, socket_timeout=SEND_TIMEOUT_S, socket_connect_timeout=SEND_TIMEOUT_S
            )
        sender: KeptConnection = self._senders.connection
        return sender

    async def _listen(self) -> None:
        """Hear what workers tell, for ever; a broken connection is made anew."""
        pause_s = 0.05
        while True:
            try:
                async with self._client.pubsub(ignore_subscribe_messages=True) as subscription:
                    await subscription.subscribe(self.channel)
                    pause_s = 0.05
                    async for message in subscription.listen():
                        self._hear(message["data"])
            except (RedisError, OSError) as error:
                log.warning("replies_not_heard", reason=type(error).__name__)
            await asyncio.sleep(pause_s)
            pause_s = min(LONGEST_PAUSE_S, pause_s * 2)

    def _hear(self, data: bytes) -> None:
        try:
            for event in json.loads(data):
                for wait in self._waits.get(event["request"], ()):
                    wait.note(event)
        except (ValueError, LookupError, TypeError) as error:
            log.error("reply_unreadable", reason=type(error).__name__)

    async def _look(self) -> None:
        """Ask the database about all that are waited for, now and then."""
        while True:
            await asyncio.sleep(LOOK_S)
            ids = [
                request_id
                for request_id, waits in list(self._waits.items())  # threads add to it
                if any(wait.answer is None and monotonic() - wait.began_at > LOOK_S for wait in waits)
            ]
            if not ids:
                continue
            try:
                answers = await self.in_thread(lambda ids=ids: self._ask_about(ids))  # type: ignore[misc]
            except StorageError as error:
                log.warning("answers_not_read", code=error.code, reason=error.message)
                continue
            except Exception as error:  # this loop is what a lost message is made good by: it must not end
                log.error("answers_not_read", exc_info=error)
                continue
            for answer in answers:
                for wait in self._waits.get(answer.request_id, ()):
                    wait.take(answer)

    def _ask_about(self, ids: list[int]) -> list[Answer]:
        answers = interactive.answers_of(self._database, ids)
        left = set(ids) - {answer.request_id for answer in answers}
        if left:
            interactive.send_again(self._database, self._celery, left)
        return answers


async def _end(loops: list[asyncio.Task[None]]) -> None:
    """Cancel until they have ended: the redis package loses a cancellation that comes while it connects."""
    while left := [loop for loop in loops if not loop.done()]:
        for loop in left:
            loop.cancel()
        await asyncio.wait(left, timeout=CANCEL_AGAIN_S)
