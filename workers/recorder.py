"""Writes outcomes to the database in groups: one thread, one short transaction for whatever came together.

A chunk's task hands over its outcomes as they are ready and waits for all of them before it lets the message be
acknowledged. Grouping over all chunks of the process keeps the database at a few transactions a second.

Many chunks may end at the same time, hundreds of rows in one step of the engine. Then their tasks turn completions into
answers by turns, and what they handed over is written when it is the recorder's turn: all at once they would only take
the interpreter from each other, and SQLite's driver, which gives it up at every row, would get it back late each time.

What somebody waits for is written by whoever hands it over, unless more is to be written: two changes of thread less.
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
# Waiting for its turn, the recorder looks this often for an outcome that somebody waits for.
TURN_LOOK_S = 0.002


@dataclass(frozen=True, slots=True)
class _Entry:
    outcomes: Sequence[RequestOutcome]
    is_urgent: bool = False
    recorded: Future[set[int]] = field(default_factory=Future)


class Recorder:
    """Records outcomes for one worker. Use as `with Recorder(...) as recorder`.

    turn: held by whoever makes many answers, or writes them. What somebody waits for does without.
    """

    def __init__(self, database: Database, worker: str) -> None:
        self.turn = threading.Lock()
        self._database = database
        self._worker = worker
        self._expected = 0
        self._unwritten = 0  # entries
        self._counting = threading.Lock()
        self._pending: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="recorder", daemon=True)
        self._thread.start()

    def expect(self, requests: int) -> None:
        """So many more requests are in hand, and their outcomes will come; fewer, when negative.

        What nobody can join is written without waiting for company.
        """
        with self._counting:
            self._expected += requests

    def record(self, outcomes: Sequence[RequestOutcome], *, is_urgent: bool = False) -> Future[set[int]]:
        """Hand over outcomes. The future tells, once committed, which counted; others came too late (see fence).

        is_urgent: somebody waits for them, so they are written at once, with what is there; here, if nothing is.
        """
        entry = _Entry(outcomes, is_urgent)
        with self._counting:
            self._expected -= len(outcomes)
            is_alone = not self._unwritten
            self._unwritten += 1
        if is_urgent and is_alone:
            self._write([entry])
        else:
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
            group = [first]
            is_last = self._wait_for_company(group)
            has_turn = False
            while not has_turn and not _is_urgent(group):
                has_turn = self.turn.acquire(timeout=TURN_LOOK_S)
                is_last = is_last or self._add_all_there(group)
            try:
                self._write(group)
            finally:
                if has_turn:
                    self.turn.release()

    def _wait_for_company(self, group: list[_Entry]) -> bool:
        """Add entries to a group until it is worth a transaction. Returns whether they are the last."""
        until = time.monotonic() + GROUP_WAIT_S
        while not _is_urgent(group):
            wait_s = until - time.monotonic()
            if wait_s <= 0 or _size(group) >= GROUP_ENOUGH or self._expected <= 0:
                break
            try:
                entry = self._pending.get(timeout=wait_s)
            except queue.Empty:
                break
            if entry is None:
                return True
            group.append(entry)
        return self._add_all_there(group)

    def _add_all_there(self, group: list[_Entry]) -> bool:
        while _size(group) < GROUP_SIZE:
            try:
                entry = self._pending.get_nowait()
            except queue.Empty:
                break
            if entry is None:
                return True
            group.append(entry)
        return False

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
        finally:
            with self._counting:
                self._unwritten -= len(group)
        for entry in group:
            entry.recorded.set_result(recorded.intersection(outcome.request_id for outcome in entry.outcomes))


def _size(group: Sequence[_Entry]) -> int:
    return sum(len(entry.outcomes) for entry in group)


def _is_urgent(group: Sequence[_Entry]) -> bool:
    return any(entry.is_urgent for entry in group)
