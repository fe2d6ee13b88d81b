"""Keeps what this worker holds: one thread renews leases and tells the database that the worker lives.

A lease that could not be renewed means another worker may have the request by now: its generations are cancelled, and
whatever they still answer would be stopped by the fence.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import structlog

from storage.database import Database
from storage.errors import StorageError
from storage.transitions import ClaimedRequest, renew_leases, update_worker
from workers.engine.request import Completion

log = structlog.get_logger()

# A lease is renewed this many times before it would run out, so one missed renewal is no harm.
RENEWALS_PER_LEASE = 4
LONGEST_PAUSE_S = 5.0


class LeaseKeeper:
    """The requests in this worker's hands. check: called once a round, for what else should be looked at regularly."""

    def __init__(
        self, database: Database, worker: str, lease_s: float, check: Callable[[], None] = lambda: None
    ) -> None:
        self.lease_s = lease_s
        self._database = database
        self._worker = worker
        self._check = check
        self._held: dict[int, tuple[int, Sequence[Future[Completion]]]] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="leases", daemon=True)
        self._thread.start()

    def hold(self, claimed: Sequence[ClaimedRequest]) -> None:
        """Renew the leases of these requests from now on."""
        with self._lock:
            for request in claimed:
                self._held[request.id] = (request.attempt, ())

    def watch(self, request_id: int, futures: Sequence[Future[Completion]]) -> None:
        """Cancel these should the request's lease be lost."""
        with self._lock:
            if request_id in self._held:
                self._held[request_id] = (self._held[request_id][0], futures)

    def let_go(self, request_ids: Sequence[int]) -> None:
        with self._lock:
            for request_id in request_ids:
                self._held.pop(request_id, None)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _loop(self) -> None:
        while not self._stop.wait(min(self.lease_s / RENEWALS_PER_LEASE, LONGEST_PAUSE_S)):
            try:
                self._renew()
                self._check()
            except StorageError as error:
                log.warning("leases_not_renewed", code=error.code, reason=error.message)

    def _renew(self) -> None:
        with self._lock:
            held = {request_id: attempt for request_id, (attempt, _) in self._held.items()}
        now = self._database.now()
        with self._database.write(durable=False) as connection:
            update_worker(connection, self._worker, now)
            lost = renew_leases(connection, held, worker=self._worker, lease_s=self.lease_s, now=now) if held else set()
        with self._lock:
            gone = [(request_id, *self._held.pop(request_id)) for request_id in lost if request_id in self._held]
        for request_id, _, futures in gone:
            # One that is answered already is being recorded, or was just now: that is how most leave.
            cancelled = [future.cancel() for future in futures]
            if any(cancelled):
                log.warning("lease_lost", request=request_id)
