"""Takes requests that somebody waits for, beside Celery.

Celery's threads may all wait for chunks that take minutes, and then it fetches nothing more. So threads of their own
take from the interactive list, one at a time, and the one that has taken an entry runs it: to hand it to another would
cost each request a change of thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import redis
import structlog

from jobs.queue import InteractiveQueue

log = structlog.get_logger()

# How long one look at the list waits for an entry; also how soon a worker that is to stop notices.
TAKE_S = 1.0
AGAIN_S = 0.5


class InteractiveLine:
    """run: claims and runs requests, and returns when they are recorded. most: in hand at once."""

    def __init__(self, queue: InteractiveQueue, run: Callable[[Sequence[int]], None], most: int) -> None:
        self._queue = queue
        self._run = run
        self._most = most
        self._stop = threading.Event()
        self._is_away = False
        self._taking = threading.Lock()  # held by the thread that waits at the list
        self._counting = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._running = 0

    def start(self) -> None:
        with self._counting:
            self._add_thread()

    def stop(self) -> None:
        """Take no more; what is in hand goes on. Safe in a signal handler."""
        self._stop.set()

    def close(self) -> None:
        """Take no more, and wait until nothing is in hand."""
        self.stop()
        with self._taking:  # then no thread is added any more
            threads = list(self._threads)
        for thread in threads:
            thread.join()
        self._queue.close()

    def _add_thread(self) -> None:
        thread = threading.Thread(target=self._loop, name=f"interactive_{len(self._threads)}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _loop(self) -> None:
        while True:
            with self._taking:
                request_ids = self._take()
                if not request_ids:
                    return
                with self._counting:
                    self._running += 1
                    if self._running == len(self._threads) < self._most:
                        self._add_thread()  # nobody else is there to take the next one
            self._work(request_ids)
            with self._counting:
                self._running -= 1

    def _take(self) -> list[int]:
        """The next entry; empty when the line is stopped."""
        while not self._stop.is_set():
            try:
                request_ids = self._queue.take(TAKE_S)
                if self._is_away:
                    log.info("interactive_queue_back")
                self._is_away = False
                if request_ids and not self._stop.is_set():
                    return request_ids
                if request_ids:
                    self._queue.put_back(request_ids)
            except (redis.RedisError, OSError) as error:
                if not self._is_away:
                    log.warning("interactive_queue_away", reason=f"{type(error).__name__}: {error}")
                self._is_away = True
                self._stop.wait(AGAIN_S)
        return []

    def _work(self, request_ids: Sequence[int]) -> None:
        try:
            self._run(request_ids)
        except Exception as error:
            # Their leases run out, or whoever waits sends them again.
            log.error("interactive_request_crashed", requests=len(request_ids), exc_info=error)
