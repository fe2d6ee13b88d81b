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
@pytest.mark.timeout(1200)
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
        for when in MOMENTS:
            path = mill.write_prompts(150)
            nth = 1
            while send(path, plan.environment(groups, point=point, nth=nth, when=when)) != 0:
                deaths += 1
                assert send(path, plan.environment(groups)) == 0
                path = mill.write_prompts(150)
                nth += 1
    assert deaths >= 10
    mill.up()
    mill.wait_until_done()
    record(mill, "submission dies at a commit", faults=deaths)


@pytest.mark.drill
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("plan", ["worker"], indirect=True)
@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_a_worker_dies_at_a_commit(make_mill: MakeMill, record: Record, database: str, plan: Plan) -> None:
    """One that has not died after a while is told to leave, so that it meets the commits of leaving too."""
    mill = make_mill(database, "log", settings=SETTINGS, seed=31)
    mill.start("tick")

    def live(environment: dict[str, str]) -> int:
        mill.keep_busy(1200)
        worker = mill.start("worker", "--artifact", mill.artifact, environment=environment)
        held = "SELECT COUNT(*) FROM attempts WHERE worker LIKE :name AND outcome = 'completed'"
        wait_unless_ended(mill, worker, lambda: mill.scalar(held, name=f"null%@%-{worker.pid}") >= 200, "its answers")
        return mill.end(worker, signal.SIGTERM)

    live(plan.environment())
    die_everywhere(mill, plan, OF_A_WORKER, live)
    mill.worker()
    mill.wait_until_done()
    record(mill, "worker dies at a commit")


@pytest.mark.drill
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("plan", ["up"], indirect=True)
@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_a_supervisor_dies_at_a_commit(make_mill: MakeMill, record: Record, database: str, plan: Plan) -> None:
    """It gets everything to do that it ever has to: batches that end, expire, are cancelled, ask the same twice; dead
    workers, its own and others'; messages that are lost."""
    slow = {"ENGINE_NULL_TOKEN_S": "0.02", "ENGINE_MAX_BATCH_SIZE": "16"}
    mill = make_mill(database, "log", settings=SETTINGS | slow, seed=32)

    def live(environment: dict[str, str]) -> int:
        """Each step waits for what the one before has brought about."""
        mill.submit(20, expires_at=time.time() + 1.0)
        mill.submit(20, twins=20)
        cancelled = mill.submit(20)
        mill.submit(150)
        supervisor = mill.start("up", "--model", mill.artifact, environment=environment)
        stranger = mill.worker()
        for provoke, what, holds in (
            (lambda: cancel(mill, cancelled), "a stranger at work", lambda: stranger.pid in mill.busy_workers()),
            (stranger.kill, "its own worker at work", lambda: set(mill.busy_workers()) - {stranger.pid}),
            (lambda: kill_worker_of(supervisor), "the stranger's leases' end", lambda: not held_by(mill, stranger.pid)),
            (mill.wipe, "another worker at work", mill.busy_workers),
        ):
            wait_unless_ended(mill, supervisor, lambda holds=holds: holds() or mill.keep_busy(200), what)
            provoke()
        wait_unless_ended(mill, supervisor, mill.is_done, "the end of all batches")
        stranger.kill()
        return mill.end(supervisor, signal.SIGTERM)

    live(plan.environment())
    die_everywhere(mill, plan, OF_A_SUPERVISOR, live)
    mill.up()
    mill.wait_until_done()
    record(mill, "supervisor dies at a commit", allowed_failures=["batch_cancelled", "batch_expired"])


def die_everywhere(mill: Mill, plan: Plan, wanted: tuple[str, ...], live: Callable[[dict[str, str]], int]) -> None:
    """A life for each commit point and moment; a point may be one that not every life comes to."""
    met = {point: (plan.folder / point).stat().st_size for point in check_points(plan, wanted)}
    for point, times in met.items():
        for when in MOMENTS if mill.postgres is None else MOMENTS[1:]:
            for nth in (mill.random.randint(1, min(3, times)), 1, 1, 1):
                at = time.time()
                if live(plan.environment(point=point, nth=nth, when=when)) == -signal.SIGKILL:
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


def wait_unless_ended(mill: Mill, process: subprocess.Popen[bytes], holds: Callable[[], object], what: str) -> None:
    mill.wait(lambda: process.poll() is not None or holds(), what)


def held_by(mill: Mill, pid: int) -> int:
    return mill.scalar(
        "SELECT COUNT(*) FROM requests WHERE status = 'running' AND worker LIKE :name", name=f"null%@%-{pid}"
    )


def cancel(mill: Mill, batch_id: int) -> None:
    with contextlib.suppress(IllegalMove), mill.database.write() as connection:  # it may have ended already
        transitions.cancel_batch(connection, batch_id, mill.database.now())


def kill_worker_of(supervisor: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(psutil.Error):  # the supervisor may have died before
        for child in psutil.Process(supervisor.pid).children():
            child.kill()
