"""What drills share: a tiny artifact, mills that are cleaned up, and the matrix that is printed at the end."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from jobs.queue_server import QueueServerError, find_server
from tests.checkpoints import DESCRIPTION, random_weights, save_huggingface
from tests.conftest import missing
from tests.drills.mill import Mill, Row, judge_drill
from tests.drills.servers import Postgres, QueueServer
from workers.models.convert import convert

_ROWS = pytest.StashKey[list[Row]]()

# Faults of each drill, as a part of what belongs into the matrix: for trying drills out.
SCALE = float(os.environ.get("DRILL_SCALE", "1"))

MakeMill = Callable[..., Mill]
Record = Callable[..., Row]


def scaled(times: int) -> int:
    return max(1, round(times * SCALE))


@pytest.fixture(scope="session")
def drill_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a byte-level tokenizer: 16 tokens are 16 bytes of the prompt."""
    folder = tmp_path_factory.mktemp("drill-artifact")
    source = save_huggingface(folder / "source", DESCRIPTION, random_weights(DESCRIPTION))
    return convert(str(source), folder / "drilled", dtype="float32", cache=folder).path


@pytest.fixture
def make_mill(drill_artifact: Path, tmp_path: Path) -> Iterator[MakeMill]:
    """Make a mill. database: `sqlite` or `postgres`; queue: `embedded`, `log` or `no log`; more as `Mill` takes it."""
    try:
        find_server()
    except QueueServerError as error:
        missing(error.message)
    with ExitStack() as stack:

        def make(database: str = "sqlite", queue: str = "embedded", **options: Any) -> Mill:
            postgres = Postgres() if database == "postgres" else None
            if postgres is not None:
                stack.callback(postgres.close)
            server = None if queue == "embedded" else QueueServer(keeps=queue == "log")
            if server is not None:
                stack.callback(server.close)
            mill = Mill(tmp_path, options.pop("artifact", drill_artifact), database=postgres, queue=server, **options)
            return stack.enter_context(mill)

        yield make


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Record:
    """Judge a drill, and keep its row for the table."""

    def add(mill: Mill, group: str, *, faults: int | None = None, **options: Any) -> Row:
        row = judge_drill(mill, group, **options)
        if faults is not None:
            row = replace(row, faults=faults)
        request.config.stash.setdefault(_ROWS, []).append(row)
        _say(request.config, " | ".join(_cells(row)))
        return row

    return add


@pytest.fixture(autouse=True)
def _announce(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("drill"):
        _say(request.config, f"... {request.node.name}")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    rows = config.stash.get(_ROWS, [])
    if not rows:
        return
    table = [_HEAD, *(_cells(row) for row in rows)]
    widths = [max(len(cells[column]) for cells in table) for column in range(len(_HEAD))]
    terminalreporter.section("crash matrix")
    for number, cells in enumerate(table):
        terminalreporter.write_line("| " + " | ".join(f"{c:<{w}}" for c, w in zip(cells, widths, strict=True)) + " |")
        if number == 0:
            terminalreporter.write_line("|" + "|".join("-" * (width + 2) for width in widths) + "|")
    if path := os.environ.get("DRILL_JSON"):
        Path(path).write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))


_HEAD = (
    *("group", "database", "queue", "requests", "faults", "lost", "doubled", "wrong"),
    *("reworked %", "recovery s, median", "most", "took s"),
)


def _cells(row: Row) -> list[str]:
    return ["" if value is None else str(value) for value in asdict(row).values()]


def _say(config: pytest.Config, line: str) -> None:
    """A line of progress on the terminal, past pytest's capture."""
    capture = config.pluginmanager.getplugin("capturemanager")
    reporter = config.pluginmanager.getplugin("terminalreporter")
    if capture is not None and reporter is not None:
        with capture.global_and_fixture_disabled():
            reporter.ensure_newline()
            reporter.write_line(line)
            reporter.flush()
