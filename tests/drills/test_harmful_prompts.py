"""Prompts that kill their worker or hang its engine, and a worker that comes back after its leases ran out."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import time
from pathlib import Path

import pytest

from tests.checkpoints import byte_level_tokenizer
from tests.drills.conftest import MakeMill, Record, scaled
from tests.drills.mill import Mill

# In no other prompt, and known to the planted fault by its bytes: the drills' tokenizer has one token for each.
DEADLY = "~~!!~~ "
DEADLY_TOKENS = byte_level_tokenizer().encode(DEADLY.strip(), add_special_tokens=False).ids
HELD = "SELECT COUNT(*) FROM requests WHERE status = 'running' AND worker LIKE :name"


@pytest.mark.drill
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("database", "kind"),
    [("sqlite", "dies"), ("postgres", "dies"), ("sqlite", "hangs"), ("sqlite", "loses_device")],
)
def test_a_prompt_that_ends_every_worker_fails_alone(
    make_mill: MakeMill, record: Record, database: str, kind: str
) -> None:
    mill = make_mill(database, "embedded", settings={"ENGINE_WATCHDOG_S": "2"}, seed=22)
    mill.planted = [
        {"kind": "restarts_soon", "roles": ["up"], "longest_s": 0.5},
        {"kind": f"engine_{kind}_on", "roles": ["worker"], "marker": DEADLY_TOKENS},
    ]
    mill.up(workers=2)
    places = [137, 600, 1999][: scaled(3)]
    mill.submit(2000, ends=dict.fromkeys(places, DEADLY))
    mill.wait_until_done()
    assert mill.says({"dies": "exit code 139", "hangs": "engine_stuck", "loses_device": "engine_gone"}[kind])
    row = record(
        mill,
        "prompt that hangs the engine" if kind == "hangs" else "prompt that kills its worker",
        faults=len(places),
        allowed_failures=["poison_prompt"],
    )
    failed = mill.rows(
        "SELECT requests.line FROM results JOIN requests ON requests.id = request_id WHERE error_code = 'poison_prompt'"
    )
    assert sorted(each.line for each in failed) == [place + 1 for place in places], row


@pytest.mark.drill
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_a_zombie_writes_after_its_leases_ran_out(make_mill: MakeMill, record: Record, database: str) -> None:
    """Frozen past its leases, it comes back while others do its work: the fence keeps its answers out."""
    mill = make_mill(database, "log", settings={"WORKER_LEASE_S": "3"}, seed=23)
    mill.start("tick")
    workers = [mill.worker(), mill.worker()]
    for _ in range(scaled(3)):
        mill.keep_busy(4000)
        victim = mill.pick_busy_worker()
        assert victim in [worker.pid for worker in workers]
        mill.inject(lambda victim=victim: freeze(mill, victim))
        name = f"null%@%-{victim}"
        mill.wait(lambda name=name: mill.scalar(HELD, name=name) == 0, "the end of its leases")
        time.sleep(mill.random.uniform(0.0, 1.0))
        os.kill(victim, signal.SIGCONT)
        mill.wait(lambda victim=victim: victim in mill.busy_workers() or mill.is_done(), "the zombie at work again")
    mill.wait_until_done()
    assert mill.events()["leases_expired"]
    record(mill, "zombie worker (SIGSTOP past its leases)")


def freeze(mill: Mill, pid: int) -> None:
    """Stop a process, but not in the midst of a write: it would keep SQLite's one write lock until it goes on."""
    while True:
        os.kill(pid, signal.SIGSTOP)
        if not mill.database.is_sqlite or may_be_written(mill.home / "promptmill.db"):
            return
        os.kill(pid, signal.SIGCONT)
        time.sleep(mill.random.uniform(0.0, 0.05))


def may_be_written(path: Path) -> bool:
    """Whether SQLite's write lock becomes free within a second."""
    with contextlib.closing(sqlite3.connect(path, timeout=1.0, isolation_level=None)) as connection:
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return False
        connection.execute("ROLLBACK")
        return True
