"""Writes outcomes to the database in small groups: one thread, one short transaction for whatever came together.

A chunk's task hands over each outcome as it is ready and waits for all of them before it lets the message be
acknowledged. Grouping over all chunks of the process keeps the database at a few transactions a second.
"""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import Future

import structlog

from storage.database import Database
from storage.transitions import RequestOutcome, record_outcomes

log = structlog.get_logger()

# How long the first outcome of a group waits for company: well below any answer's own time, well above a commit's.
GROUP_WAIT_S = 0.02
GROUP_SIZE = 512


class Recorder:
    """Records outcomes for one worker. Use as `with Recorder(...) as recorder`."""

    def __init__(self, database: Database, worker: str) -> None:
        self._database = database
        self._worker = worker
        self._pending: queue.SimpleQueue[tuple[RequestOutcome, Future[bool]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="recorder", daemon=True)
        self._thread.start()

    def record(self, outcome: RequestOutcome) -> Future[bool]:
        """Hand over an outcome. The future tells, once committed, whether it counted or came too late (see fence)."""
        future: Future[bool] = Future()
        self._pending.put((outcome, future))
        return future

    def close(self) -> None:
        """Write what was handed over, then stop."""
        self._pending.put(None)
        self._thread.join()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _loop(self) -> None:
        while True:
            first = self._pending.get()
            if first is None:
                return
            group, is_last = self._collect(first)
            self._write(group)
            if is_last:
                return

    def _collect(
        self, first: tuple[RequestOutcome, Future[bool]]
    ) -> tuple[list[tuple[RequestOutcome, Future[bool]]], bool]:
        group = [first]
        until = time.monotonic() + GROUP_WAIT_S
        while len(group) < GROUP_SIZE:
            try:
                entry = self._pending.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                break
            if entry is None:
                return group, True
            group.append(entry)
        return group, False

    def _write(self, group: list[tuple[RequestOutcome, Future[bool]]]) -> None:
        outcomes = [outcome for outcome, _ in group]
        try:
            now = self._database.now()
            recorded = set(
                self._database.retry(
                    lambda connection: record_outcomes(connection, outcomes, worker=self._worker, now=now)
                )
            )
        except Exception as error:
            # The leases run out and the requests are done again: late, but neither lost nor doubled.
            log.error("outcomes_not_recorded", requests=len(group), exc_info=error)
            for _, future in group:
                future.set_exception(error)
            return
        for outcome, future in group:
            future.set_result(outcome.request_id in recorded)
