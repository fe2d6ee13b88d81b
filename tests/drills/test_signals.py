"""Workers and supervisors that are told to stop, once, twice, in the wrong way, or not told at all."""

from __future__ import annotations

import signal
import time

import pytest

from tests.drills.conftest import MakeMill, Record, scaled
from tests.drills.mill import Mill


def keep_workers(mill: Mill, times: int, *signums: int) -> None:
    """End workers with these signals, shortly after each other, and start another for each."""
    workers = [mill.worker(), mill.worker()]
    for _ in range(times):
        mill.keep_busy()
        victim = mill.pick_busy_worker()
        (told,) = [worker for worker in workers if worker.pid == victim]
        mill.inject(lambda told=told: told.send_signal(signums[0]))
        for signum in signums[1:]:
            time.sleep(mill.random.uniform(0.1, 0.6))
            told.send_signal(signum)
        told.wait(60)
        workers = [worker for worker in workers if worker is not told] + [mill.worker()]


@pytest.mark.drill
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("database", "name", "signums"),
    [
        ("sqlite", "SIGTERM of a worker", [signal.SIGTERM]),
        ("postgres", "SIGTERM of a worker, twice", [signal.SIGTERM, signal.SIGTERM]),
        ("sqlite", "SIGTERM of a worker, then SIGKILL", [signal.SIGTERM, signal.SIGKILL]),
        ("sqlite", "SIGQUIT of a worker", [signal.SIGQUIT]),
        ("postgres", "SIGTERM of a worker, then SIGQUIT", [signal.SIGTERM, signal.SIGQUIT]),
    ],
)
def test_workers_told_to_stop(
    make_mill: MakeMill, record: Record, database: str, name: str, signums: list[int]
) -> None:
    mill = make_mill(database, "log", settings={"WORKER_LEASE_S": "3", "WORKER_DRAIN_S": "1"}, seed=4)
    mill.start("tick")
    keep_workers(mill, scaled(4), *signums)
    mill.wait_until_done()
    record(mill, name)


@pytest.mark.drill
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_the_supervisor_is_killed_and_started_again(make_mill: MakeMill, record: Record, database: str) -> None:
    """Its workers drain by themselves; the next supervisor adopts the embedded queue server."""
    mill = make_mill(database, "embedded", settings={"WORKER_DRAIN_S": "1"}, seed=5)
    supervisor = mill.up(workers=2)
    for _ in range(scaled(5)):
        mill.keep_busy()
        mill.pick_busy_worker()
        mill.inject(lambda supervisor=supervisor: mill.end(supervisor))
        supervisor = mill.up(workers=2)
    mill.wait_until_done()
    assert mill.events()["parent_gone"]
    record(mill, "SIGKILL of the supervisor")


@pytest.mark.drill
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("times", [1, 2, 3])
def test_the_supervisor_is_told_to_stop(make_mill: MakeMill, record: Record, times: int) -> None:
    """Once it drains, twice it hands back at once, thrice it kills."""
    mill = make_mill("sqlite", "embedded", settings={"WORKER_DRAIN_S": "1"}, seed=6)
    for _ in range(scaled(2)):
        supervisor = mill.up(workers=2)
        mill.keep_busy()
        mill.pick_busy_worker()

        def stop(supervisor: object = supervisor) -> None:
            for _ in range(times - 1):
                supervisor.send_signal(signal.SIGTERM)  # type: ignore[attr-defined]
                time.sleep(0.2)

        mill.inject(stop)
        assert mill.end(supervisor, signal.SIGTERM) in (0, -signal.SIGTERM)
        held = mill.scalar("SELECT COUNT(*) FROM requests WHERE status = 'running'")
        assert held == 0, f"{held} requests were not handed back"
    mill.up(workers=2)
    mill.wait_until_done()
    record(mill, f"SIGTERM of the supervisor, {times} time{'s' if times > 1 else ''}")
