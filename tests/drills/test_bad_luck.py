"""Clocks that jump, wrong settings, a newer schema, two supervisors: no loss, and a clear word."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from sqlalchemy import text

from tests.drills.conftest import MakeMill, Record
from tests.drills.mill import Mill


@pytest.mark.drill
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("database", "roles", "by_s"),
    [
        ("sqlite", ["up", "worker"], 600.0),
        ("sqlite", ["up", "worker"], -600.0),
        ("postgres", ["worker"], 600.0),
        ("postgres", ["up"], 600.0),
        ("postgres", ["worker"], -600.0),
    ],
)
def test_a_clock_jumps_by_ten_minutes(
    make_mill: MakeMill, record: Record, tmp_path: Path, database: str, roles: list[str], by_s: float
) -> None:
    """With SQLite the whole host's, with Postgres that of one kind of process: leases go by the server's clock."""
    now = tmp_path / "now"
    jump = {"kind": "clock_jumps", "roles": roles, "by_s": by_s, "when_there_is": str(now)}
    mill = make_mill(database, "log", faults=[jump], seed=24)
    mill.up(workers=2)
    mill.keep_busy(4000)
    mill.pick_busy_worker()
    now.touch()
    mill.wait_until_done()
    times = [row.finished_at - time.time() for row in mill.rows("SELECT finished_at FROM results")]
    if database == "sqlite":
        assert max(times) > 300 if by_s > 0 else min(times) < -300
    else:
        assert max(map(abs, times)) < 300
        assert "leases_expired" not in mill.events()
    who = "host" if database == "sqlite" else {"up": "supervisor", "worker": "workers"}[roles[0]]
    record(mill, f"clock of the {who} jumps by {by_s:+.0f} s", faults=1)


@pytest.mark.drill
def test_a_second_supervisor_is_refused(make_mill: MakeMill, record: Record) -> None:
    mill = make_mill("sqlite", "embedded", seed=25)
    first = mill.up()
    mill.keep_busy(2000)
    mill.pick_busy_worker()
    code, said = mill.inject(lambda: mill.run("up", "--model", mill.artifact))
    assert code == 2
    assert f"already runs on {mill.home} (process {first.pid})" in said
    mill.wait_until_done()
    record(mill, "second supervisor on one home")


@pytest.mark.drill
@pytest.mark.parametrize("command", ["up", "submit", "worker", "tick", "list"])
def test_a_newer_schema_is_refused(make_mill: MakeMill, command: str) -> None:
    mill = make_mill("sqlite", "embedded")
    with mill.database.write() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    code, said = mill.run(*arguments_of(mill, command))
    assert code == 2, said
    assert "has schema 9999, this promptmill knows schemas up to" in said
    assert_is_one_error(said)


WRONG_QUEUES = {
    "redis://127.0.0.1:1/0": "cannot be reached",
    "redis://user:secret@127.0.0.1:1/0": "cannot be reached",
    "amqp://guest@127.0.0.1/": "begins with 'amqp'",
}


@pytest.mark.drill
@pytest.mark.parametrize("command", ["up", "submit", "worker", "tick", "list"])
def test_wrong_databases_are_named_without_their_password(make_mill: MakeMill, command: str) -> None:
    mill = make_mill("postgres", "log")
    assert mill.postgres is not None
    wrong = {
        mill.postgres.url_with_password("secret"): "refuses this user or password",
        mill.postgres.url_with_password("right").replace("/promptmill", "/nowhere"): "does not exist on that server",
        "postgresql://postgres:secret@127.0.0.1:1/promptmill": "cannot be reached",
        "mysql://root:secret@127.0.0.1/x": "is not supported",
        f"sqlite:///{mill.artifact / 'manifest.json'}": "file of another kind",
    }
    for url, message in wrong.items():
        code, said = mill.run(*arguments_of(mill, command), environment={"PROMPTMILL_DATABASE_URL": url})
        assert code == 2, said
        assert message in said
        assert "secret" not in said
        assert_is_one_error(said)


@pytest.mark.drill
@pytest.mark.parametrize("command", ["up", "tick", "worker"])
def test_a_wrong_queue_is_named_and_a_service_keeps_trying(make_mill: MakeMill, command: str) -> None:
    """A Redis that is not there yet may come; an URL that can never be right ends the command."""
    mill = make_mill("sqlite", "log", settings={"WORKER_DRAIN_S": "0"})
    mill.submit(10)
    code, said = mill.run(*arguments_of(mill, command), environment={"PROMPTMILL_QUEUE_URL": "amqp://me@127.0.0.1/"})
    assert code == 2, said
    assert "begins with 'amqp'" in said
    url = "redis://user:secret@127.0.0.1:1/0"
    process = mill.start(*arguments_of(mill, command), environment={"PROMPTMILL_QUEUE_URL": url})
    mill.wait(lambda: mill.says("cannot be reached") or mill.says("Cannot connect to redis"), "a word about the queue")
    assert process.poll() is None
    mill.end(process, signal.SIGTERM)
    assert not mill.says("secret")


def assert_is_one_error(said: str) -> None:
    """What went wrong in one line, the last one."""
    assert said.splitlines()[-1].startswith("error: "), said
    assert said.count("error: ") == 1, said
    assert "Traceback" not in said


def arguments_of(mill: Mill, command: str) -> list[str]:
    given = {
        "up": ["--model", str(mill.artifact)],
        "worker": ["--artifact", str(mill.artifact)],
        "submit": [str(mill.write_prompts(3)), "--model", str(mill.artifact)],
    }
    return [command, *given.get(command, [])]
