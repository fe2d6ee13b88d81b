"""Lets a worker with nothing else to do take what waits for another one.

Dispatch sends prompts with one prefix to one worker, to the queue of its place. That is to save work and must not make
anybody wait: each worker also consumes the own queues of the others, after its own and the shared one. Celery asks
Redis for the first message of these lists in this order (`queue_order_strategy`), so the last ones are reached only
when the others are empty. It also means that what waits for a worker that has died is run before anybody notices.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import structlog

from jobs.queue import own_queue_name
from storage import queries
from storage.database import Database
from storage.errors import StorageError

log = structlog.get_logger()

# Between two looks at who is there. Until it is seen, a new worker empties its own queue by itself.
LOOK_S = 2.0


class Neighbours:
    """consumer: Celery's, once it is there. `start` begins to look, `stop` may be called in a signal handler."""

    def __init__(self, database: Database, model: str, place: str, consumer: Callable[[], Any]) -> None:
        self._database = database
        self._model = model
        self._place = place
        self._consumer = consumer
        self._listening: set[str] = set()  # touched in Celery's main thread alone
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="neighbours", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def close(self) -> None:
        self.stop()
        if self._thread.ident is not None:
            self._thread.join()

    def _loop(self) -> None:
        while not self._stop.is_set():
            try:
                with self._database.read() as connection:
                    live = queries.live_workers(connection, self._database.now(), model=self._model)
            except StorageError as error:
                log.warning("neighbours_not_seen", code=error.code, reason=error.message)
            else:
                places = in_turn({worker.place for worker in live}, self._place)
                consumer = self._consumer()
                # Consumers are added and cancelled in the thread that reads from Redis, between two messages.
                consumer.call_soon(self._listen, consumer, [own_queue_name(self._model, place) for place in places])
            self._stop.wait(LOOK_S)

    def _listen(self, consumer: Any, names: list[str]) -> None:
        if self._stop.is_set() or consumer.task_consumer is None:
            return  # it leaves, or is just connecting again
        for name in sorted(self._listening - set(names)):
            consumer.cancel_task_queue(name)
        for name in names:
            if name not in self._listening:
                consumer.add_task_queue(name)
        self._listening = set(names)


def in_turn(places: set[str], own: str) -> list[str]:
    """The other places, beginning behind this worker's own, so that not all help the same one first."""
    others = sorted(places - {own})
    return [place for place in others if place > own] + [place for place in others if place < own]
