"""Whatever the order: workers and operators that do anything at any time lose and double nothing."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from sqlalchemy import select, text

from storage import queries, transitions
from storage.database import Connection, Database
from storage.models import ATTEMPTS, REQUESTS, RESULTS, BatchStatus, RequestStatus
from storage.retries import RetryLimits
from storage.transitions import (
    AttemptRecord,
    ClaimedRequest,
    IllegalMove,
    NewBatch,
    NewRequest,
    RequestOutcome,
)

NOW = 1_000_000.0
LEASE_S = 60.0
LIMITS = RetryLimits(max_attempts=2, backoff_s=1.0)
LINES = 8
# Written before the others, which come while these may run already.
FIRST_LINES = 4
# Lines 7 and 8 ask what lines 1 and 2 ask.
TWINS = {7: 1, 8: 2}
WORKERS = ("w1", "w2", "w3")
FINAL = ("completed", "failed", "cancelled", "expired")
some_lines = st.sets(st.integers(0, LINES - 1), min_size=1)
some_worker = st.sampled_from(WORKERS)


def new_requests(first: int, last: int) -> list[NewRequest]:
    return [NewRequest(line, f"c{line}", "{}", same_as=TWINS.get(line)) for line in range(first, last + 1)]


def make_batch(database: Database, lines: int) -> tuple[int, list[int]]:
    with database.write() as connection:
        new = NewBatch("batch_1", "f" * 64, "/v1/chat/completions", "tiny")
        batch_id = transitions.create_batch(connection, new, NOW)
        transitions.add_requests(
            connection, batch_id, [NewRequest(line, f"c{line}", "{}") for line in range(1, lines + 1)]
        )
        transitions.start_batch(connection, batch_id, NOW)
        ids = connection.execute(
            select(REQUESTS.c.id).where(REQUESTS.c.batch_id == batch_id).order_by(REQUESTS.c.line)
        ).scalars()
        return batch_id, list(ids)


def outcome(claimed: ClaimedRequest, status: RequestStatus = RequestStatus.COMPLETED) -> RequestOutcome:
    is_good = status is RequestStatus.COMPLETED
    return RequestOutcome(
        request_id=claimed.id,
        batch_id=claimed.batch_id,
        attempt_number=claimed.attempt,
        status=status,
        status_code=200 if is_good else 500,
        response="{}" if is_good else None,
        error_code=None if is_good else "engine_failed",
        record=AttemptRecord(prompt_tokens=10),
    )


class Interleavings(RuleBasedStateMachine):
    """Workers that claim, renew, report, fail, hand back, die and come back from the dead; an operator who steers."""

    is_interactive = False

    def __init__(self, database: Database) -> None:
        super().__init__()
        self.database = database
        with database.write() as connection:
            for table in ("attempts", "results", "requests", "batches"):
                connection.execute(text(f"DELETE FROM {table}"))
            new = NewBatch("batch_1", "f" * 64, "/v1/chat/completions", "tiny", runs_early=True)
            new = replace(new, is_interactive=self.is_interactive)
            self.batch_id = transitions.create_batch(connection, new, NOW)
        self.written = 0
        self.write_lines(FIRST_LINES)
        self.now = NOW
        # All that each worker ever held and has not given up by itself: it may believe in it for ever.
        self.believed: dict[str, list[ClaimedRequest]] = {worker: [] for worker in WORKERS}
        self.completed: set[int] = set()  # by a worker

    @property
    def ids(self) -> list[int]:
        """By line; those of lines that are not written yet are nobody's."""
        with self.database.read() as connection:
            rows = connection.execute(select(REQUESTS.c.id).order_by(REQUESTS.c.line)).scalars().all()
        return [*rows, *range(-LINES + len(rows), 0)]

    # --- whoever submits

    def write_lines(self, count: int) -> None:
        with self.database.write() as connection:
            lines = new_requests(self.written + 1, self.written + count)
            assert transitions.add_requests(connection, self.batch_id, lines) == count
        self.written += count

    @rule(count=st.integers(1, 2))
    def submit_more(self, count: int) -> None:
        """As long as the batch takes lines; also one that was there before, by a submission that is repeated."""
        count = min(count, LINES - self.written)
        batch = self.batch()
        if batch.status is BatchStatus.VALIDATING:
            if count:
                self.write_lines(count)
            else:
                with self.database.write() as connection:
                    again = transitions.add_requests(connection, self.batch_id, new_requests(1, LINES))
                    assert again == 0
                    transitions.start_batch(connection, self.batch_id, self.now)
        elif count:
            try:
                with self.database.write() as connection:
                    transitions.add_requests(connection, self.batch_id, new_requests(self.written + 1, LINES))
            except IllegalMove:
                return
            raise AssertionError(f"a batch that is {batch.status} took lines")

    def batch(self) -> queries.BatchRow:
        with self.database.read() as connection:
            found = queries.find_batch_by_id(connection, self.batch_id)
        assert found is not None
        return found

    # --- workers and dispatch

    @rule(lines=some_lines)
    def queue(self, lines: set[int]) -> None:
        with self.database.write() as connection:
            transitions.queue_requests(connection, [self.ids[line] for line in lines], self.now)

    @rule(lines=some_lines)
    def unqueue(self, lines: set[int]) -> None:
        with self.database.write() as connection:
            transitions.unqueue_requests(connection, [self.ids[line] for line in lines])

    @rule(lines=some_lines, worker=some_worker, also_queue=st.booleans())
    def deliver(self, lines: set[int], worker: str, also_queue: bool) -> None:
        batch, ids = self.batch(), [self.ids[line] for line in lines]
        with self.database.write() as connection:
            if also_queue:
                transitions.queue_requests(connection, ids, self.now)
            claimed = transitions.claim_requests(connection, ids, worker=worker, lease_s=LEASE_S, now=self.now)
        if claimed:
            assert batch.status in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)
            assert batch.paused_at is None
            assert batch.expires_at is None or batch.expires_at > self.now
            smallest = min((c.isolation for c in claimed if c.isolation), default=LINES)
            assert len(claimed) <= smallest
        self.believed[worker] += claimed

    @rule(worker=some_worker, data=st.data(), status=st.sampled_from([RequestStatus.COMPLETED, RequestStatus.FAILED]))
    def report(self, worker: str, data: st.DataObject, status: RequestStatus) -> None:
        outcomes = [outcome(claimed, status) for claimed in self.choose(worker, data)]
        with self.database.write() as connection:
            recorded = transitions.record_outcomes(connection, outcomes, worker=worker, now=self.now)
        if status is RequestStatus.COMPLETED:
            assert not self.completed & set(recorded)
            self.completed |= set(recorded)

    @rule(worker=some_worker, data=st.data())
    def fail(self, worker: str, data: st.DataObject) -> None:
        outcomes = [outcome(claimed, RequestStatus.FAILED) for claimed in self.choose(worker, data)]
        with self.database.write() as connection:
            again = transitions.fail_requests(connection, outcomes, worker=worker, now=self.now, limits=LIMITS)
        assert not set(again) & self.completed

    def choose(self, worker: str, data: st.DataObject) -> list[ClaimedRequest]:
        believed = self.believed[worker]
        if not believed:
            return []
        return data.draw(st.lists(st.sampled_from(believed), min_size=1, unique_by=lambda c: c.id))

    @rule(worker=some_worker)
    def renew(self, worker: str) -> None:
        held = {claimed.id: claimed.attempt for claimed in self.believed[worker]}
        with self.database.write() as connection:
            lost = transitions.renew_leases(connection, held, worker=worker, lease_s=LEASE_S, now=self.now)
        assert lost >= set(held) & self.completed

    @rule(worker=some_worker)
    def hand_back(self, worker: str) -> None:
        held = {claimed.id: claimed.attempt for claimed in self.believed[worker]}
        with self.database.write() as connection:
            released = transitions.release_requests(connection, held, worker=worker, now=self.now)
        assert not set(released) & self.completed
        self.believed[worker] = []

    @rule(worker=some_worker)
    def stop(self, worker: str) -> None:
        """The worker has seen, rightly or not, that the batch ends, and runs nothing of it any more."""
        held = {claimed.id: claimed.attempt for claimed in self.believed[worker]}
        with self.database.write() as connection:
            stopped = transitions.stop_requests(connection, held, worker=worker, now=self.now)
        assert not set(stopped) & self.completed
        assert not stopped or self.batch().status in (BatchStatus.CANCELLING, BatchStatus.FINALIZING)

    @rule(worker=some_worker, exit_code=st.sampled_from([-9, 70]), was_stopped=st.booleans())
    def die(self, worker: str, exit_code: int, was_stopped: bool) -> None:
        with self.database.write() as connection:
            transitions.abandon_worker(
                connection, worker, self.now, exit_code=exit_code, was_stopped=was_stopped, limits=LIMITS
            )

    @rule(seconds=st.sampled_from([1.0, 30.0, 61.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def sweep(self) -> None:
        with self.database.write() as connection:
            sweep(connection, self.batch_id, self.now)

    # --- an operator

    @rule()
    def pause(self) -> None:
        self.steer(transitions.pause_batch)

    @rule()
    def resume(self) -> None:
        self.steer(transitions.resume_batch)

    @precondition(lambda self: self.now > NOW + 100)  # late, so that most runs get somewhere
    @rule()
    def cancel(self) -> None:
        self.steer(transitions.cancel_batch)

    @rule()
    def retry(self) -> None:
        self.steer(transitions.retry_batch)

    @rule()
    def go_on_retrying(self) -> None:
        with self.database.write() as connection:
            transitions.continue_retry(connection, self.batch_id)

    @precondition(lambda self: self.now > NOW + 60)
    @rule(seconds=st.sampled_from([-1.0, 20.0]), priority=st.integers(-1, 1))
    def prioritise(self, seconds: float, priority: int) -> None:
        deadline = self.now + seconds
        self.steer(
            lambda connection, batch_id, _now: transitions.prioritise_batch(
                connection, batch_id, priority=priority, expires_at=deadline
            )
        )

    def steer(self, move: object) -> None:
        """An operator may ask for anything; what cannot be is refused as a whole."""
        assert callable(move)
        try:
            with self.database.write() as connection:
                move(connection, self.batch_id, self.now)
        except IllegalMove:
            pass

    # --- what always holds

    @invariant()
    def every_final_request_has_one_result_and_one_good_attempt(self) -> None:
        with self.database.read() as connection:
            requests = connection.execute(select(REQUESTS)).all()
            results = Counter(connection.execute(select(RESULTS.c.request_id)).scalars())
            tries = connection.execute(select(ATTEMPTS.c.request_id, ATTEMPTS.c.number, ATTEMPTS.c.outcome)).all()
        was_retried = self.batch().retried_at is not None
        assert len(requests) == self.written
        for row in requests:
            assert results[row.id] <= 1
            if row.status in FINAL:
                assert results[row.id] == 1
            elif not was_retried:
                assert results[row.id] == 0
            is_twin = row.line in TWINS
            if not is_twin:
                assert (row.id in self.completed) == (row.status == "completed")
            good = sum(outcome == "completed" for id_, _, outcome in tries if id_ == row.id)
            assert good == (1 if row.status == "completed" else 0)
            # Each attempt is written down once, when it has ended.
            ended = row.attempt - (1 if row.status == "running" else 0)
            assert sorted(number for id_, number, _ in tries if id_ == row.id) == list(range(1, ended + 1))
            assert not (is_twin and row.status in ("queued", "running"))

    @invariant()
    def counters_equal_counts(self) -> None:
        batch = self.batch()
        with self.database.read() as connection:
            counts = queries.count_requests(connection, self.batch_id)
        assert batch.total_requests == sum(counts.values()) == self.written
        assert batch.completed_requests == counts.get(RequestStatus.COMPLETED, 0)
        assert batch.failed_requests == counts.get(RequestStatus.FAILED, 0)
        assert batch.prompt_tokens >= 10 * len(self.completed)
        if batch.is_final:
            assert sum(counts.get(RequestStatus(status), 0) for status in FINAL) == self.written

    def teardown(self) -> None:
        """Whatever happened: going on with one healthy worker ends the batch, each line with one result."""
        while self.batch().status is BatchStatus.VALIDATING:
            self.submit_more(LINES)
        for _ in range(4 * LINES):
            self.now += 2 * LEASE_S
            self.steer(transitions.resume_batch)
            with self.database.write() as connection:
                sweep(connection, self.batch_id, self.now)
                for request_id in self.ids[: self.written]:  # one by one: isolation is kept by itself
                    transitions.queue_requests(connection, [request_id], self.now)
                    held = transitions.claim_requests(
                        connection, [request_id], worker="last", lease_s=LEASE_S, now=self.now
                    )
                    transitions.record_outcomes(
                        connection, [outcome(claimed) for claimed in held], worker="last", now=self.now
                    )
                sweep(connection, self.batch_id, self.now)
            if self.batch().is_final:
                break
        assert self.batch().is_final
        assert len(list(queries.results_in_order(self.database, self.batch_id))) == self.written


class InteractiveInterleavings(Interleavings):
    """The same for a batch that somebody waits for, with callers who lose their patience or go away."""

    is_interactive = True

    @precondition(lambda self: self.now > NOW + 60)
    @rule(line=st.integers(0, LINES - 1), has_expired=st.booleans())
    def give_up(self, line: int, has_expired: bool) -> None:
        if self.batch().status is BatchStatus.VALIDATING:
            return  # nobody waits for a request that is still being submitted
        with self.database.write() as connection:
            given_up = transitions.give_up_request(connection, self.ids[line], self.now, has_expired=has_expired)
        assert given_up is None or self.ids[line] not in self.completed

    @invariant()
    def its_end_waits_for_nobody(self) -> None:
        """Twins apart, which only a batch of several lines has, the last result ends the batch."""
        batch = self.batch()
        with self.database.read() as connection:
            is_open = transitions.has_open_requests(connection, self.batch_id)
        if not is_open and batch.status is not BatchStatus.VALIDATING and batch.completed_requests == LINES:
            assert batch.is_final or batch.retried_at is not None


def sweep(connection: Connection, batch_id: int, now: float) -> None:
    transitions.expire_leases(connection, now, limits=LIMITS)
    transitions.expire_batches(connection, now)
    transitions.end_requests(connection, batch_id, now)
    while transitions.continue_retry(connection, batch_id) is not None:
        pass
    transitions.answer_duplicates(connection, batch_id, now)
    transitions.finish_batches(connection, now)
    batch = queries.find_batch_by_id(connection, batch_id)
    assert batch is not None
    if queries.is_publishable(connection, batch):
        transitions.publish_batch(connection, batch_id, now, output=None, errors=None)


def test_no_order_of_events_loses_or_doubles_a_result(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transitions, "RETRY_LINES", 3)
    run_state_machine_as_test(
        lambda: Interleavings(database),
        settings=hypothesis_settings(max_examples=20, stateful_step_count=30, deadline=None),
    )


def test_nor_does_it_where_callers_wait_and_give_up(database: Database) -> None:
    run_state_machine_as_test(
        lambda: InteractiveInterleavings(database),
        settings=hypothesis_settings(max_examples=10, stateful_step_count=25, deadline=None),
    )


def test_workers_that_race_for_real_lose_and_double_nothing(database: Database) -> None:
    """The same with threads: short leases run out under the workers while they claim, report and sweep."""
    batch_id, ids = make_batch(database, 300)
    recorded: list[int] = []

    def run(worker: str) -> None:
        while True:
            with database.read() as connection:
                left = list(
                    connection.execute(
                        select(REQUESTS.c.id).where(REQUESTS.c.status.in_(["pending", "queued", "running"])).limit(20)
                    ).scalars()
                )
            if not left:
                return
            with database.write() as connection:
                transitions.queue_requests(connection, left, database.now() + 100.0)
            for part in (left, left[:1]):  # those in isolation only come alone
                with database.write() as connection:
                    held = transitions.claim_requests(
                        connection, part, worker=worker, lease_s=0.005, now=database.now()
                    )
                with database.write() as connection:
                    transitions.expire_leases(
                        connection, database.now(), limit=5, limits=RetryLimits(max_attempts=1000, backoff_s=0.0)
                    )
                with database.write() as connection:
                    recorded.extend(
                        transitions.record_outcomes(
                            connection, [outcome(c) for c in held], worker=worker, now=database.now()
                        )
                    )

    threads = [threading.Thread(target=run, args=(f"w{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(recorded) == ids
    with database.read() as connection:
        batch = queries.find_batch_by_id(connection, batch_id)
    assert batch is not None
    assert (batch.completed_requests, batch.prompt_tokens) == (300, 3000)
    assert len(list(queries.results_in_order(database, batch_id, page_rows=7))) == 300
