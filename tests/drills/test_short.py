"""The drills that run with every test run: a few of each important kind. The matrix is `make drill`."""

from __future__ import annotations

import os
import signal

import pytest

from tests.drills.conftest import MakeMill, Record
from tests.drills.mill import PATIENCE_S
from tests.drills.test_commits import Plan
from tests.drills.test_commits import plan as plan  # the fixture
from tests.drills.test_worker_kills import (
    CHAPTER_SETTINGS,
    SOON,
    harm_workers_with_chapters,
    kill_busy_workers,
    submit_chapters,
)
from tests.drills.test_worker_kills import short_prefixes as short_prefixes  # the fixture

pytestmark = pytest.mark.timeout(900)  # a slow machine is no fault


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_nothing_is_lost_when_workers_and_servers_die(make_mill: MakeMill, record: Record, database: str) -> None:
    """Workers killed while busy, the queue wiped, the queue server killed, and Postgres crashed; then all is there."""
    mill = make_mill(database, "embedded" if database == "sqlite" else "log", faults=[SOON], seed=40)
    mill.submit(1200)
    mill.up(workers=1)
    kill_busy_workers(mill, 2, batch_of=800)
    mill.keep_busy(800)
    mill.pick_busy_worker(within_s=0.3, batch_of=800)
    mill.inject(mill.wipe)
    mill.wait_for_recovery()
    if mill.queue is None:
        mill.inject(lambda: os.kill(mill.queue_server_pid(), signal.SIGKILL))
    else:
        mill.inject(mill.queue.kill)
        mill.queue.start()
    mill.wait_for_recovery()
    if mill.postgres is not None:
        mill.inject(mill.postgres.stop)
        mill.postgres.start()
    mill.wait_until_done()
    record(mill, "worker kills, wipe, server kills (short)")


@pytest.mark.usefixtures("short_prefixes")
def test_nothing_is_lost_that_waits_for_a_worker_that_dies(make_mill: MakeMill, record: Record) -> None:
    """Prompts with common beginnings, two workers; one is killed, one is told to leave."""
    mill = make_mill("sqlite", "embedded", settings=CHAPTER_SETTINGS, faults=[SOON], seed=43)
    mill.up(workers=2)
    submit_chapters(mill, chapters=12)
    harm_workers_with_chapters(mill, [signal.SIGKILL, signal.SIGTERM], chapters=10)
    mill.wait_until_done()
    record(mill, "workers with queues of their own (short)")


@pytest.mark.parametrize("plan", ["submit"], indirect=True)
def test_a_submission_that_died_at_a_commit_is_repeated(make_mill: MakeMill, record: Record, plan: Plan) -> None:
    """Before and after the commit of its second group; the answers are counted when all is done."""
    mill = make_mill("sqlite", "embedded", settings={"ENGINE_NULL_TOKEN_S": "0"}, seed=41)
    groups = {"kind": "small_groups", "roles": ["submit"], "lines": 60}
    for when in ("before", "after"):
        path = mill.write_prompts(150)
        at = {"point": "jobs.submit:_Writer.write", "nth": 3, "when": when}
        command = ("submit", path, "--model", mill.artifact)
        code, said = mill.run(*command, environment=plan.environment(groups, **at))
        assert code == -signal.SIGKILL, said
        assert mill.scalar("SELECT COUNT(*) FROM requests") % 150 == (60 if when == "before" else 120)
        code, said = mill.run(*command)
        assert code == 0, said
    mill.up()
    mill.wait_until_done()
    record(mill, "submission dies at a commit (short)", faults=2)


@pytest.mark.parametrize("plan", ["worker"], indirect=True)
def test_a_worker_that_dies_after_it_has_recorded_costs_no_second_answer(
    make_mill: MakeMill, record: Record, plan: Plan
) -> None:
    """The answers are committed and the message is not yet acknowledged: it comes again and finds nothing to do."""
    settings = {"ENGINE_NULL_TOKEN_S": "0.005", "WORKER_LEASE_S": "5"}
    # Nobody reports its death, so that what it had received is found by its age alone.
    soon = {"kind": "looks_for_lost_messages_soon", "roles": ["tick"], "after_s": 5.0}
    mill = make_mill("sqlite", "log", settings=settings, faults=[soon], seed=42)
    mill.submit(600)
    mill.start("tick")
    at = {"point": "workers.recorder:Recorder._write", "nth": 2, "when": "after"}
    doomed = mill.start("worker", "--artifact", mill.artifact, environment=plan.environment(**at))
    assert doomed.wait(PATIENCE_S) == -signal.SIGKILL
    mill.worker()
    mill.wait_until_done()
    record(mill, "worker dies after a commit (short)", faults=1)
