"""Writes outcomes to the database in groups: one thread, one short transaction for whatever came together.

A chunk's task hands over its outcomes as they are ready and waits for all of them before it lets the message be
acknowledged. Grouping over all chunks of the process keeps the database at a few transactions a second.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import structlog

from storage.database import Database
from storage.transitions import RequestOutcome, record_outcomes

log = structlog.get_logger()

# How long the first outcomes of a group wait for company: well below any answer's own time, well above a commit's.
GROUP_WAIT_S = 0.02
# So many need no more company; what arrives while one group is written makes the next one anyway.
GROUP_ENOUGH = 128
GROUP_SIZE = 1024


@dataclass(frozen=True, slots=True)
class _Entry:
    outcomes: Sequence[RequestOutcome]
    is_urgent: bool = False
    recorded: Future[set[int]] = field(default_factory=Future)


class Recorder:
    """Records outcomes for one worker. Use as `with Recorder(...) as recorder`."""

    def __init__(self, database: Database, worker: str) -> None:
        self._database = database
        self._worker = worker
        self._pending: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="recorder", daemon=True)
        self._thread.start()

    def record(self, outcomes: Sequence[RequestOutcome], *, is_urgent: bool = False) -> Future[set[int]]:
        """Hand over outcomes. The future tells, once committed, which counted; others came too late (see fence).

        is_urgent: somebody waits for them, so they are written at once, with what is there.
        """
        entry = _Entry(outcomes, is_urgent)
        self._pending.put(entry)
        return entry.recorded

    def close(self) -> None:
        """Write what was handed over, then stop."""
        self._pending.put(None)
        self._thread.join()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _loop(self) -> None:
        is_last = False
        while not is_last:
            first = self._pending.get()
            if first is None:
                return
            group, is_last = self._collect(first)
            self._write(group)

    def _collect(self, first: _Entry) -> tuple[list[_Entry], bool]:
        """Entries to write together, and whether they are the last."""
        group, size, is_urgent = [first], len(first.outcomes), first.is_urgent
        until = time.monotonic() + GROUP_WAIT_S
        while size < GROUP_SIZE:
            wait_s = 0.0 if is_urgent or size >= GROUP_ENOUGH else until - time.monotonic()
            try:
                entry = self._pending.get(timeout=wait_s) if wait_s > 0 else self._pending.get_nowait()
            except queue.Empty:
                break
            if entry is None:
                return group, True
            group.append(entry)
            size += len(entry.outcomes)
            is_urgent = is_urgent or entry.is_urgent
        return group, False

    def _write(self, group: list[_Entry]) -> None:
        outcomes = [outcome for entry in group for outcome in entry.outcomes]
        try:
            now = self._database.now()
            recorded = set(
                self._database.retry(
                    lambda connection: record_outcomes(connection, outcomes, worker=self._worker, now=now)
                )
            )
        except Exception as error:
            # The leases run out and the requests are done again: late, but neither lost nor doubled.
            log.error("outcomes_not_recorded", requests=len(outcomes), exc_info=error)
            for entry in group:
                entry.recorded.set_exception(error)
            return
        for entry in group:
            entry.recorded.set_result(recorded.intersection(outcome.request_id for outcome in entry.outcomes))
