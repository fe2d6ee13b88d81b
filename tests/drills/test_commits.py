"""Processes that die at a commit: just before it, with all statements made, and just after it.

The commit points are not listed here: a run without faults finds them, and each must then have been died at.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from storage import transitions
from storage.transitions import IllegalMove
from tests.drills.conftest import MakeMill, Record
from tests.drills.mill import Mill

MOMENTS = ("before", "after")
# Commit points that the drill must have met, by the beginnings of their names: else it drills less than it says.
OF_A_SUBMISSION = ("jobs.submit:",)
OF_A_WORKER = ("workers.tasks:", "workers.recorder:", "workers.leases:", "workers.worker:", "jobs.dispatch:")
OF_A_SUPERVISOR = ("jobs.dispatch:", "jobs.sweep:", "jobs.finalize:", "jobs.worker_process:")
SETTINGS = {"WORKER_LEASE_S": "3", "WORKER_DRAIN_S": "0", "ENGINE_NULL_TOKEN_S": "0.005"}


@dataclass(frozen=True)
class Plan:
    """The faults planted in processes of one role."""

    role: str
    folder: Path

    def environment(self, *more: dict[str, Any], **at: Any) -> dict[str, str]:
        crash = {"kind": "crash_at_commit", "roles": [self.role], "log": str(self.folder), **at}
        return {"DRILL_FAULTS": json.dumps([crash, *more])}

    def met(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


@pytest.fixture
def plan(tmp_path: Path, request: pytest.FixtureRequest) -> Plan:
    folder = tmp_path / "met"
    folder.mkdir()
    return Plan(request.param, folder)


@pytest.mark.drill
@pytest.mark.timeout(600)
@pytest.mark.parametrize("plan", ["submit"], indirect=True)
@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_a_submission_dies_and_is_repeated(make_mill: MakeMill, record: Record, database: str, plan: Plan) -> None:
    """Three groups of lines each; the same command again adds what is missing, and nothing twice."""
    mill = make_mill(database, "embedded", settings=SETTINGS, seed=30)
    groups = {"kind": "small_groups", "roles": ["submit"], "lines": 60}

    def send(path: Path, environment: dict[str, str]) -> int:
        code, said = mill.run("submit", path, "--model", mill.artifact, environment=environment)
        assert code in (0, -signal.SIGKILL), said
        return code

    assert send(mill.write_prompts(150), plan.environment(groups)) == 0
    deaths = 0
    for point in check_points(plan, OF_A_SUBMISSION):
        for nth in (1, 2, 3, 4):
            for when in MOMENTS:
                path = mill.write_prompts(150)
                if send(path, plan.environment(groups, point=point, nth=nth, when=when)) != 0:
                    deaths += 1
                    assert send(path, plan.environment(groups)) == 0
    assert deaths >= 10
    mill.up()
    mill.wait_until_done()
    record(mill, "submission dies at a commit", faults=deaths)


@pytest.mark.drill
@pytest.mark.timeout(900)
@pytest.mark.parametrize("plan", ["worker"], indirect=True)
@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_a_worker_dies_at_a_commit(make_mill: MakeMill, record: Record, database: str, plan: Plan) -> None:
    """One that has not died after a while is told to leave, so that it meets the commits of leaving too."""
    mill = make_mill(database, "log", settings=SETTINGS, seed=31)
    mill.start("tick")

    def live(environment: dict[str, str]) -> int:
        if mill.scalar("SELECT COUNT(*) FROM requests WHERE status IN ('pending', 'queued')") < 500:
            mill.submit(1500)
        worker = mill.start("worker", "--artifact", mill.artifact, environment=environment)
        wait_for_end(worker, 7.0)
        return mill.end(worker, signal.SIGTERM)

    live(plan.environment())
    die_everywhere(mill, plan, OF_A_WORKER, live)
    mill.worker()
    mill.wait_until_done()
    record(mill, "worker dies at a commit")


@pytest.mark.drill
@pytest.mark.timeout(900)
@pytest.mark.parametrize("plan", ["up"], indirect=True)
@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_a_supervisor_dies_at_a_commit(make_mill: MakeMill, record: Record, database: str, plan: Plan) -> None:
    """It gets everything to do that it ever has to: batches that end, expire, are cancelled, ask the same twice; dead
    workers, its own and others'; messages that are lost."""
    slow = {"ENGINE_NULL_TOKEN_S": "0.02", "ENGINE_MAX_BATCH_SIZE": "16"}
    mill = make_mill(database, "log", settings=SETTINGS | slow, seed=32)

    def live(environment: dict[str, str]) -> int:
        stranger = mill.worker()
        mill.submit(100)
        mill.submit(20, twins=20)
        mill.submit(20, expires_at=time.time() + 3.0)
        cancelled = mill.submit(20)
        supervisor = mill.start("up", "--model", mill.artifact, environment=environment)
        for provoke in (lambda: cancel(mill, cancelled), stranger.kill, lambda: kill_worker_of(supervisor), mill.wipe):
            wait_for_end(supervisor, 2.0)
            provoke()
        wait_for_end(supervisor, 6.0)
        return mill.end(supervisor, signal.SIGTERM)

    live(plan.environment())
    die_everywhere(mill, plan, OF_A_SUPERVISOR, live)
    mill.up()
    mill.wait_until_done()
    record(mill, "supervisor dies at a commit", allowed_failures=["batch_cancelled", "batch_expired"])


def die_everywhere(mill: Mill, plan: Plan, wanted: tuple[str, ...], live: Callable[[dict[str, str]], int]) -> None:
    """A life for each commit point and moment; a point may be one that not every life comes to."""
    for point in check_points(plan, wanted):
        for when in MOMENTS:
            for _ in range(3):
                at = time.time()
                if live(plan.environment(point=point, nth=mill.random.choice((1, 1, 2)), when=when)) == -signal.SIGKILL:
                    mill.faults.append(at)
                    break
            else:
                raise AssertionError(f"no life came to {point}")


def check_points(plan: Plan, wanted: tuple[str, ...]) -> list[str]:
    """The commit points that a life without faults has met."""
    met = plan.met()
    for beginning in wanted:
        assert any(point.startswith(beginning) for point in met), f"no commit of {beginning} among {met}"
    return met


def wait_for_end(process: subprocess.Popen[bytes], seconds: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def cancel(mill: Mill, batch_id: int) -> None:
    with contextlib.suppress(IllegalMove), mill.database.write() as connection:  # it may have ended already
        transitions.cancel_batch(connection, batch_id, mill.database.now())


def kill_worker_of(supervisor: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(psutil.Error):  # the supervisor may have died before
        for child in psutil.Process(supervisor.pid).children():
            child.kill()
