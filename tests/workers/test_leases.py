"""What a worker holds, and what becomes of it when it no longer does."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from storage.database import Database
from storage.transitions import ClaimedRequest
from workers.engine.request import Completion
from workers.leases import LeaseKeeper


@pytest.fixture
def leases(sqlite_database: Database) -> Iterator[LeaseKeeper]:
    keeper = LeaseKeeper(sqlite_database, "w1", 3600.0)
    yield keeper
    keeper.close()


def claimed(request_id: int) -> ClaimedRequest:
    return ClaimedRequest(
        id=request_id,
        batch_id=1,
        line=1,
        custom_id=None,
        attempt=1,
        body="{}",
        prefix_id=None,
        endpoint="/v1/chat/completions",
        model="m",
        queued_at=None,
        claimed_at=0.0,
    )


def test_what_nobody_waits_for_is_cancelled_and_its_neighbours_run_on(leases: LeaseKeeper) -> None:
    futures: dict[int, Future[Completion]] = {number: Future() for number in (1, 2, 3)}
    leases.hold([claimed(number) for number in futures])
    for number, future in futures.items():
        leases.watch(number, [future])
    leases.give_up([1, 3, 99])
    assert [future.cancelled() for future in futures.values()] == [True, False, True]


def test_what_was_given_up_between_claim_and_engine_is_cancelled_as_it_enters(leases: LeaseKeeper) -> None:
    future: Future[Completion] = Future()
    leases.hold([claimed(1)])
    leases.give_up([1])
    leases.watch(1, [future])
    assert future.cancelled()
