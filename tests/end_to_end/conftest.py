"""A home with a real small model in it, and the `promptmill` command run as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from storage import queries
from storage.database import Database, open_database
from tests.shared_data import stories_folder
from workers.models.convert import convert

START_S = 180.0


@pytest.fixture(scope="session")
def stories_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The 260-thousand-parameter story teller in float32: small, trained, and its answers are known."""
    folder = tmp_path_factory.mktemp("artifacts")
    convert(str(stories_folder()), folder / "stories", dtype="float32", cache=folder / "cache")
    return folder / "stories"


@dataclass
class Home:
    """One PROMPTMILL_HOME, and what is done in it."""

    path: Path
    artifact: Path
    work: Path
    processes: list[subprocess.Popen[str]] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)  # beside what every command gets

    def write_lines(self, name: str, lines: list[object]) -> Path:
        """A JSONL file; a str is written as it is."""
        path = self.work / name
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return path

    def start(self, *arguments: str | Path, stdin: str | None = None) -> subprocess.Popen[str]:
        """Start `promptmill ARGUMENTS`."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PROMPTMILL_")}
        process = subprocess.Popen(
            [sys.executable, "-m", "jobs.cli", *map(str, arguments)],
            env={**environment, "PROMPTMILL_HOME": str(self.path), "PROMPTMILL_ENGINE_CONTEXT_LENGTH": "512"}
            | self.environment,
            stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def run(self, *arguments: str | Path, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run `promptmill ARGUMENTS` to its end."""
        process = self.start(*arguments, stdin=stdin)
        out, err = process.communicate(stdin, timeout=START_S)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def run_job(self, input_path: Path, *options: str | Path) -> subprocess.CompletedProcess[str]:
        return self.run("run", input_path, "--model", self.artifact, *options)

    def start_job(self, input_path: Path, *options: str | Path) -> subprocess.Popen[str]:
        return self.start("run", input_path, "--model", self.artifact, *options)

    def database(self) -> Database:
        return open_database(f"sqlite:///{self.path / 'promptmill.db'}")

    def wait_for_results(self, count: int) -> None:
        """Wait until a batch has this many answers."""

        def enough() -> bool:
            if not (self.path / "promptmill.db").exists():
                return False
            ended = [process for process in self.processes if process.poll() is not None]
            assert not ended, f"the command ended early: {ended[0].communicate()}"
            try:
                with self.database() as database, database.read() as connection:
                    return any(batch.completed_requests >= count for batch in queries.list_batches(connection))
            except Exception:  # the schema is still being made
                return False

        wait_for(enough, f"{count} results")

    def worker_pids(self) -> list[int]:
        return [process.pid for process in self.descendants() if "worker" in process.cmdline()]

    def queue_server_pids(self) -> list[int]:
        here = str(self.path)
        return [
            process.pid
            for process in psutil.process_iter()
            if "-server" in _name(process) and here in " ".join(_command(process))
        ]

    def descendants(self) -> list[psutil.Process]:
        """Processes of ours that run: workers are children of the command."""
        found = []
        for process in psutil.process_iter():
            try:
                home = process.environ().get("PROMPTMILL_HOME")
                if home == str(self.path) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found


def wait_for(holds: Callable[[], bool], what: str, seconds: float = START_S) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"{what} did not come within {seconds} s"
        time.sleep(0.02)


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.Error:
        return ""


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


@pytest.fixture
def home(stories_artifact: Path, tmp_path: Path) -> Iterator[Home]:
    found = Home(tmp_path / "home", stories_artifact, tmp_path)
    yield found
    for process in found.processes:
        if process.poll() is None:
            process.kill()
        process.communicate()
    for leftover in found.descendants():
        leftover.kill()
    for pid in found.queue_server_pids():
        psutil.Process(pid).kill()
