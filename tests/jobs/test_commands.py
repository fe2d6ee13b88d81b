"""Commands as a person meets them: what they say, on which stream, with which exit code."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import pytest
import structlog
from click.testing import CliRunner, Result

from jobs import keys, steering
from jobs.artifacts import DEMO_NAME, ModelNotFound, find_artifact
from jobs.cli import NAME, cli
from jobs.commands import default_output
from jobs.inputs import InputOptions
from jobs.report import PLAIN_EVERY_S, PlainLines
from jobs.source import open_source
from jobs.submit import submit
from storage.database import Database
from storage.queries import BatchRow

ONE_LINE = re.compile(r"error: [^\n]+\n")


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(level)
    logging.captureWarnings(False)
    structlog.reset_defaults()


@pytest.fixture
def batch(sqlite_database: Database, tmp_path: Path) -> BatchRow:
    """A cancelled batch of two lines in the home's database."""
    path = tmp_path / "in.txt"
    path.write_text("one\ntwo\n")
    with open_source(path, tmp_path) as source:
        found = submit(sqlite_database, source, InputOptions(model="smol")).batch
    return steering.cancel(sqlite_database, found, tmp_path / "home" / "files")


def open_batch(database: Database, folder: Path) -> BatchRow:
    """A batch of one line that nobody runs."""
    path = folder / "open.txt"
    path.write_text("one\n")
    with open_source(path, folder) as source:
        return submit(database, source, InputOptions(model="smol")).batch


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    """As much of one as handing work over needs."""
    folder = tmp_path / "artifact"
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps({"model": "smol", "digest": "d"}))
    return folder


def command(*arguments: str | Path, stdin: str | None = None) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], input=stdin)


READING = [
    ["list"],
    ["show", "last"],
    ["watch", "last"],
    ["results", "last"],
    ["export", "last", "-o", "-"],
    ["audit", "batch_req_1"],
    ["key", "list"],
    ["tenant", "list"],
    ["webhook", "list"],
]


@pytest.mark.parametrize("arguments", READING, ids=" ".join)
def test_a_command_that_only_reads_makes_nothing(tmp_path: Path, arguments: list[str]) -> None:
    """A misspelt PROMPTMILL_HOME would leave an empty database behind, which then hides the mistake."""
    done = command(*arguments)
    assert done.exit_code == 2
    assert ONE_LINE.fullmatch(done.stderr)
    assert "has no promptmill tables yet" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", READING, ids=" ".join)
def test_a_command_that_only_reads_needs_no_log(batch: BatchRow, tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "home" / "logs").write_text("where no folder can be")
    done = command(*arguments)
    assert "log" not in done.stderr
    assert done.exit_code in (0, 1) or f"{arguments[-1]}" in done.stderr


def test_the_results_of_two_inputs_never_have_the_same_name() -> None:
    """`q.csv` and `q.jsonl` in one folder are two jobs."""
    inputs = ["q", "q.csv", "q.jsonl", "q.txt", "q.txt.gz", "q.jsonl.gz", "a/q.csv", "./q.csv", "q.results.jsonl"]
    outputs = [default_output(each) for each in inputs]
    assert len(set(outputs)) == len(inputs)
    assert default_output("a/q.csv") == "a/q.csv.results.jsonl"
    assert default_output("-") == "-"


@pytest.mark.parametrize("folder", [".", "..", "/", "sub", "sub/"])
def test_a_folder_is_no_input(artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    done = command("run", folder, "--model", artifact)
    assert done.exit_code == 2
    assert ONE_LINE.fullmatch(done.stderr)
    assert "is a folder; name a file in it" in done.stderr


def test_what_was_purged_is_said_so_and_not_shown_as_empty_answers(
    sqlite_database: Database, batch: BatchRow, tmp_path: Path
) -> None:
    steering.purge(sqlite_database, tmp_path, older_than_s=-60.0)
    for arguments in (["results", "last"], ["results", "last", "--follow"]):
        done = command(*arguments)
        assert (done.exit_code, done.stdout) == (2, "")
        assert ONE_LINE.fullmatch(done.stderr)
        assert f"{batch.public_id} was purged of its text on " in done.stderr
    done = command("export", "last", "-o", tmp_path / "out.csv")
    assert done.exit_code == 0
    assert f"note: {batch.public_id} was purged of its text on " in done.stderr
    steering.purge(sqlite_database, tmp_path, older_than_s=-60.0, rows=True)
    done = command("export", "last", "-o", tmp_path / "out2.csv")
    assert done.exit_code == 2
    assert f"{batch.public_id} was purged of its records on " in done.stderr
    assert not (tmp_path / "out2.csv").exists()


def test_the_demo_that_is_not_there_yet_is_made_by_its_own_command(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound) as missing:
        find_artifact(DEMO_NAME, tmp_path)
    assert missing.value.message.endswith(f"convert the model first: promptmill convert demo {tmp_path / DEMO_NAME}")
    with pytest.raises(ModelNotFound) as missing:
        find_artifact("another", tmp_path)
    assert missing.value.message.endswith(f"convert the model first: promptmill convert SOURCE {tmp_path / 'another'}")


FAR = ("99999999d", "99999999999d", "9999-12-31")


@pytest.mark.parametrize("when", FAR)
def test_a_time_beyond_the_bound_is_refused_before_anything_is_written(
    sqlite_database: Database, artifact: Path, tmp_path: Path, when: str
) -> None:
    """A key was kept, its text lost, and no key could be listed any more."""
    (tmp_path / "in.txt").write_text("one\n")
    batch = open_batch(sqlite_database, tmp_path)
    for arguments in (
        ["key", "create", "ann", "--expires", when],
        ["submit", tmp_path / "in.txt", "--model", artifact, "--deadline", when],
        ["set", batch.public_id, "--deadline", when],
    ):
        done = command(*arguments)
        assert (done.exit_code, done.stdout) == (2, "")
        assert ONE_LINE.fullmatch(done.stderr)
        assert "999d" in done.stderr or "999 days" in done.stderr
    assert command("key", "list").stderr == "no keys; make one: promptmill key create NAME\n"
    (kept,) = steering.list_batches(sqlite_database)
    assert kept.expires_at is None


@pytest.mark.parametrize("at", [8.64e12, -8.64e12, 1e300, float("inf")])
def test_a_time_that_no_calendar_has_is_shown_all_the_same(
    sqlite_database: Database, tmp_path: Path, at: float
) -> None:
    """An older version could write one: no list and no batch must be out of sight for it."""
    batch = open_batch(sqlite_database, tmp_path)
    steering.set_urgency(sqlite_database, batch, expires_at=at)
    keys.make_key(sqlite_database, tenant="default", name="ann", expires_at=at)
    for arguments in (["show", "last"], ["show", "last", "--json"], ["key", "list"], ["key", "list", "--json"]):
        assert command(*arguments).exit_code == 0, arguments
    assert "s after 1970" in command("show", "last").stdout


@pytest.mark.usefixtures("batch")
def test_a_purge_that_is_not_wanted_does_nothing_and_says_so(sqlite_database: Database) -> None:
    done = command("purge", "--older-than", "0d", stdin="n\n")
    assert done.exit_code == 0
    assert done.stderr.endswith("nothing was purged\n")
    unanswered = command("purge", "--older-than", "0d", stdin="")
    assert unanswered.exit_code == 2
    assert "error: nobody answered, so nothing was done; give --yes" in unanswered.stderr
    assert "Aborted" not in unanswered.stderr
    (kept,) = steering.list_batches(sqlite_database)
    assert kept.text_purged_at is None


def test_what_list_prints_as_a_status_it_takes_as_one(sqlite_database: Database, tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_text("one\n")
    with open_source(path, tmp_path) as source:
        found = submit(sqlite_database, source, InputOptions(model="smol")).batch
    steering.pause(sqlite_database, found)
    assert "paused" in command("list").stdout
    assert found.public_id[:14] in command("list", "--status", "paused").stdout
    assert "no batches" in command("list", "--status", "in_progress").stderr
    (described,) = command("list", "--status", "paused", "--json").stdout.splitlines()
    assert (json.loads(described)["status"], json.loads(described)["is_paused"]) == ("in_progress", True)


def named_parameters() -> list[tuple[list[str], click.Parameter]]:
    """Every parameter of every command that names something by a text."""
    found: list[tuple[list[str], click.Parameter]] = []

    def look(at: click.Command, path: list[str]) -> None:
        for name, inner in getattr(at, "commands", {}).items():
            look(inner, [*path, name])
        found.extend((path, parameter) for parameter in at.params if parameter.name in NAMED)

    look(cli, [])
    return found


NAMED = ("name", "tenant", "idempotency_key", "id_column")


@pytest.mark.parametrize(
    ("path", "parameter"),
    [pytest.param(path, each, id=f"{' '.join(path)} {each.name}") for path, each in named_parameters()],
)
def test_an_empty_name_is_refused_wherever_one_is_given(path: Sequence[str], parameter: click.Parameter) -> None:
    """A tenant or job called "" could never be named again."""
    assert parameter.type is NAME
    for nothing in ("", "  "):
        given = [parameter.opts[0], nothing] if isinstance(parameter, click.Option) else [nothing]
        done = command(*path, *given)
        assert done.exit_code == 2
        assert ONE_LINE.fullmatch(done.stderr)
        assert "is empty; write a name" in done.stderr


def test_a_cursor_without_follow_is_explained(batch: BatchRow) -> None:
    done = command("results", batch.public_id, "--after", "7")
    assert done.exit_code == 2
    assert "it is the cursor that an interrupted --follow names" in done.stderr


def test_commands_that_have_nothing_to_log_leave_no_log(batch: BatchRow, tmp_path: Path) -> None:
    for arguments in (["list"], ["show", batch.public_id], ["results", batch.public_id]):
        assert command(*arguments).exit_code == 0
    assert list((tmp_path / "home" / "logs").glob("*")) == []


def test_a_log_of_progress_has_no_line_twice() -> None:
    """Half an hour of a slow model is not fifty times the same line."""
    lines = PlainLines(0.0)
    assert not lines.is_due(PLAIN_EVERY_S / 2, "running: 0/40")
    assert lines.is_due(PLAIN_EVERY_S, "running: 0/40")
    assert not any(lines.is_due(PLAIN_EVERY_S * n, "running: 0/40") for n in range(2, 50))
    assert lines.is_due(PLAIN_EVERY_S * 50, "running: 1/40")
    assert not lines.is_due(PLAIN_EVERY_S * 50 + 1, "running: 2/40")
