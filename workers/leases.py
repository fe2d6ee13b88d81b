"""Keeps what this worker holds: one thread renews leases and tells the database that the worker lives.

A lease that could not be renewed means another worker may have the request by now: its generations are cancelled, and
whatever they still answer would be stopped by the fence. Generations of a batch that is being cancelled, or whose
deadline has passed, are cancelled too; the task that has them then gives such a request its end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import structlog

from storage import queries
from storage.database import Database
from storage.errors import StorageError
from storage.transitions import ClaimedRequest, renew_leases, update_worker
from workers.engine.request import Completion

log = structlog.get_logger()

# A lease is renewed this many times before it would run out, so one missed renewal is no harm.
RENEWALS_PER_LEASE = 4
LONGEST_PAUSE_S = 5.0
# Between two looks for batches that end: one small read a second, and none while nothing is held.
LOOK_S = 1.0
# A rate that has grown so much is told at once rather than with the next renewal: dispatch sizes its window by it.
TOLD_AGAIN = 1.5


@dataclass(slots=True)
class _Held:
    attempt: int
    batch_id: int
    futures: Sequence[Future[Completion]] = ()


class LeaseKeeper:
    """The requests in this worker's hands. check: called once a round, for what else should be looked at regularly."""

    def __init__(
        self, database: Database, worker: str, lease_s: float, check: Callable[[], None] = lambda: None
    ) -> None:
        self.lease_s = lease_s
        self._database = database
        self._worker = worker
        self._check = check
        self._held: dict[int, _Held] = {}
        self._let_go = 0  # requests, since the rate was last taken
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="leases", daemon=True)
        self._thread.start()

    def hold(self, claimed: Sequence[ClaimedRequest]) -> None:
        """Renew the leases of these requests from now on."""
        with self._lock:
            for request in claimed:
                self._held[request.id] = _Held(request.attempt, request.batch_id)

    def watch(self, request_id: int, futures: Sequence[Future[Completion]]) -> None:
        """Cancel these should the request's lease be lost, or if it was just now."""
        with self._lock:
            held = self._held.get(request_id)
            if held is not None:
                held.futures = futures
                return
        for future in futures:
            future.cancel()

    def give_up(self, request_ids: Sequence[int]) -> None:
        """Cancel what runs for these requests: nobody waits for them, and the database has said so already."""
        with self._lock:
            gone = [self._held.pop(request_id) for request_id in request_ids if request_id in self._held]
        for held in gone:
            for future in held.futures:
                future.cancel()

    def let_go(self, request_ids: Sequence[int]) -> None:
        with self._lock:
            self._let_go += len(request_ids)
            for request_id in request_ids:
                self._held.pop(request_id, None)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _loop(self) -> None:
        pause_s = min(self.lease_s / RENEWALS_PER_LEASE, LONGEST_PAUSE_S)
        renewed_at = looked_at = time.monotonic()
        told_per_s = 0.0
        while not self._stop.wait(min(pause_s, LOOK_S)):
            now = time.monotonic()
            with self._lock:
                requests_per_s, self._let_go = self._let_go / (now - looked_at), 0
            looked_at = now
            try:
                if now - renewed_at >= pause_s or requests_per_s > TOLD_AGAIN * max(1.0, told_per_s):
                    self._renew(requests_per_s)
                    self._check()
                    renewed_at, told_per_s = now, requests_per_s
                self._cancel_ending()
            except StorageError as error:
                log.warning("leases_not_renewed", code=error.code, reason=error.message)

    def _cancel_ending(self) -> None:
        with self._lock:
            batch_ids = {held.batch_id for held in self._held.values()}
        if not batch_ids:
            return
        with self._database.read() as connection:
            ending = queries.ending_batches(connection)
        if ending & batch_ids:
            with self._lock:
                futures = [f for held in self._held.values() if held.batch_id in ending for f in held.futures]
            cancelled = sum(future.cancel() for future in futures)
            if cancelled:
                log.info("generations_cancelled", generations=cancelled)

    def _renew(self, requests_per_s: float) -> None:
        with self._lock:
            held = {request_id: entry.attempt for request_id, entry in self._held.items()}
        now = self._database.now()
        with self._database.write(durable=False) as connection:
            update_worker(connection, self._worker, now, requests_per_s=requests_per_s)
            lost = renew_leases(connection, held, worker=self._worker, lease_s=self.lease_s, now=now) if held else set()
        with self._lock:
            gone = {request_id: self._held.pop(request_id) for request_id in lost if request_id in self._held}
        for request_id, entry in gone.items():
            # One that is answered already is being recorded, or was just now: that is how most leave.
            cancelled = [future.cancel() for future in entry.futures]
            if any(cancelled):
                log.warning("lease_lost", request=request_id)
