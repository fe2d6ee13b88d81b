"""The compose file, as far as it can be checked without a Docker engine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
FILES = ("docker-compose.yml", "deploy/docker-compose.gpu.yml")


@pytest.fixture(scope="module")
def services() -> dict:
    return yaml.safe_load((ROOT / FILES[0]).read_text())["services"]


def test_each_variable_is_explained_in_the_example() -> None:
    used = set(re.findall(r"\$\{(\w+)", (ROOT / FILES[0]).read_text()))
    explained = set(re.findall(r"^#?(\w+)=", (ROOT / ".env.example").read_text(), re.MULTILINE))
    assert used == explained


def test_what_runs_on_is_restarted_and_looked_at(services: dict) -> None:
    running = {name: service for name, service in services.items() if service.get("restart") == "unless-stopped"}
    assert set(running) == {"redis", "postgres", "worker", "tick", "gateway", "door", "flower"}
    assert all("healthcheck" in service for service in running.values())


def test_the_schema_comes_before_whoever_writes(services: dict) -> None:
    assert services["migrate"]["command"] == ["migrate"]
    for name in ("worker", "tick", "gateway", "door", "cli"):
        assert services[name]["depends_on"]["migrate"] == {"condition": "service_completed_successfully"}


def test_nothing_is_open_to_the_network_and_flower_asks_for_a_password(services: dict) -> None:
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert ":?" in services["flower"]["environment"]["FLOWER_BASIC_AUTH"]


def test_redis_keeps_a_log_and_evicts_nothing(services: dict) -> None:
    command = services["redis"]["command"]
    assert command[command.index("--appendonly") + 1] == "yes"
    assert command[command.index("--maxmemory-policy") + 1] == "noeviction"


def test_the_image_runs_as_nobody_in_particular() -> None:
    lines = (ROOT / "deploy" / "Dockerfile").read_text().splitlines()
    users = [line for line in lines if line.startswith("USER ")]
    assert users == ["USER promptmill"]
    assert lines.index(users[0]) < next(n for n, line in enumerate(lines) if line.startswith("ENTRYPOINT"))


def test_docker_compose_accepts_the_files() -> None:
    """Debian's docker-compose checks a file against the specification's schema without an engine."""
    program = shutil.which("docker-compose")
    if program is None:
        pytest.skip("docker-compose is not installed")
    environment = {"PATH": os.environ["PATH"], "POSTGRES_PASSWORD": "secret", "FLOWER_BASIC_AUTH": "a:b"}
    for files in (FILES[:1], FILES):
        command = [program, *(part for file in files for part in ("-f", file)), "config", "--quiet"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    del environment["POSTGRES_PASSWORD"]
    done = subprocess.run([program, "config", "--quiet"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert "set POSTGRES_PASSWORD in .env" in done.stderr
