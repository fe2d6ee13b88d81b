"""The processes of docker-compose.yml started by hand: migrate, tick, worker, submit and results from another home,
on a Redis and a Postgres server of their own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
import yaml

from jobs.queue_server import QueueServerError, find_server
from storage import queries
from storage.database import open_database
from tests.conftest import PostgresServer, missing, wait_until
from tests.end_to_end.test_run import story_lines

ROOT = Path(__file__).parent.parent.parent


class Services:
    """Processes with one environment, as containers have."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str | Path, home: Path) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "jobs.cli", *map(str, arguments)],
            env={**self._environment, "PROMPTMILL_HOME": str(home)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def run(self, *arguments: str | Path, home: Path) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, home=home)
        out, err = process.communicate(timeout=90)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    """A server with the compose file's own options, on TCP."""
    try:
        binary = find_server()
    except QueueServerError as error:
        missing(error.message)
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    options = [option.replace("${REDIS_MAXMEMORY:-512mb}", "512mb") for option in services["redis"]["command"][1:]]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tmp_path / "redis"
    folder.mkdir()
    process = subprocess.Popen(
        [binary.path, "--port", str(port), "--bind", "127.0.0.1", *options], cwd=folder, stdout=subprocess.DEVNULL
    )

    def answers() -> bool:
        try:
            with redis.Redis(port=port) as client:
                return bool(client.ping())
        except redis.ConnectionError:
            return False

    wait_until(answers, what="the Redis server")
    yield f"redis://127.0.0.1:{port}/0"
    process.terminate()
    process.wait(60)


@pytest.fixture
def services(redis_url: str, postgres_server: PostgresServer) -> Iterator[Services]:
    """An empty database, as a new volume has: `migrate` makes its tables."""
    postgres_server.run("CREATE DATABASE pm_services")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PROMPTMILL_")} | {
        "PROMPTMILL_DATABASE_URL": postgres_server.url("pm_services"),
        "PROMPTMILL_QUEUE_URL": redis_url,
        "PROMPTMILL_ENGINE_CONTEXT_LENGTH": "512",
    }
    found = Services(environment)
    yield found
    for process in found.processes:
        if process.poll() is None:
            process.kill()
        process.communicate()
    postgres_server.run("DROP DATABASE pm_services WITH (FORCE)")


def test_the_services_of_the_compose_file_work_together(
    services: Services, postgres_server: PostgresServer, stories_artifact: Path, tmp_path: Path
) -> None:
    """Before the migration nothing works and says so; after it everything does, until each is told to stop."""
    served, user = tmp_path / "served", tmp_path / "user"
    early = services.run("list", home=user)
    assert early.returncode == 2
    assert "promptmill migrate" in early.stderr or "promptmill run" in early.stderr
    assert services.run("migrate", home=served).returncode == 0
    assert services.run("migrate", home=served).returncode == 0
    tick = services.start("tick", home=served)
    worker = services.start("worker", "--artifact", stories_artifact, home=served)
    with open_database(postgres_server.url("pm_services")) as database:

        def is_ready() -> bool:
            assert worker.poll() is None, worker.communicate()
            assert tick.poll() is None, tick.communicate()
            with database.read() as connection:
                return bool(queries.live_workers(connection, database.now()))

        wait_until(is_ready, seconds=60, what="the worker")
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in story_lines(50, 40)))
    # Another machine: it has no artifact, and knows the model by what the workers serve.
    submitted = services.run("submit", path, home=user)
    assert submitted.returncode == 0, submitted.stderr
    followed = services.run("results", submitted.stdout.strip(), "--follow", home=user)
    assert followed.returncode == 0, followed.stderr
    assert len({json.loads(line)["custom_id"] for line in followed.stdout.splitlines()}) == 50
    assert list((served / "run").glob(f"tick-{socket.gethostname()}.alive"))
    wait_until(lambda: list((served / "run").glob(f"worker-{socket.gethostname()}-*.alive")), what="a sign of life")
    for process in (worker, tick):
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=90)
        assert process.returncode == 0, err
    assert not list((served / "run").glob("*.alive"))
