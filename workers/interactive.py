"""Takes requests that somebody waits for, beside Celery.

Celery's threads may all wait for chunks that take minutes, and then it fetches nothing more. So a thread of its own
takes from the interactive list, and each request gets a thread from a pool that bulk work never sees.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

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
        self._room = threading.Semaphore(most)
        self._pool = ThreadPoolExecutor(most, thread_name_prefix="interactive")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="interactive", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Take no more; what is in hand goes on. Safe in a signal handler."""
        self._stop.set()

    def close(self) -> None:
        """Take no more, and wait until nothing is in hand."""
        self.stop()
        if self._thread.ident is not None:
            self._thread.join()
        self._pool.shutdown(wait=True)
        self._queue.close()

    def _loop(self) -> None:
        is_away = False
        while not self._stop.is_set():
            if not self._room.acquire(timeout=TAKE_S):
                continue
            request_ids: list[int] = []
            try:
                request_ids = self._queue.take(TAKE_S)
                if is_away:
                    log.info("interactive_queue_back")
                is_away = False
                if request_ids and self._stop.is_set():
                    self._queue.put_back(request_ids)
                    request_ids = []
            except (redis.RedisError, OSError) as error:
                if not is_away:
                    log.warning("interactive_queue_away", reason=f"{type(error).__name__}: {error}")
                is_away = True
                self._stop.wait(AGAIN_S)
            if request_ids:
                self._pool.submit(self._work, request_ids)
            else:
                self._room.release()

    def _work(self, request_ids: Sequence[int]) -> None:
        try:
            self._run(request_ids)
        except Exception as error:
            # Their leases run out, or whoever waits sends them again.
            log.error("interactive_request_crashed", requests=len(request_ids), exc_info=error)
        finally:
            self._room.release()
