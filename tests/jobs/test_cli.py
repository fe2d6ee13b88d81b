"""The command line's own rules: what it offers agrees with the code behind, and it starts quickly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from jobs import cli, protocol, reception
from jobs.gateway import batches
from jobs.inputs import InputFormat, InputOptions
from jobs.protocol import Endpoint
from jobs.source import open_source
from jobs.submit import submit
from storage.database import Database
from storage.models import BatchStatus

ROOT = Path(__file__).parent.parent.parent


def test_the_choices_written_down_for_speed_are_those_of_the_code() -> None:
    assert tuple(each.value for each in InputFormat) == cli.FORMATS
    assert tuple(each.value for each in Endpoint) == cli.ENDPOINTS
    assert {each.value for each in BatchStatus} == set(cli.STATUSES)
    assert cli.MAX_INTEGER == protocol.MAX_INTEGER
    assert cli.MAX_PRIORITY == batches.MAX_PRIORITY == reception.MAX_PRIORITY


def test_help_imports_nothing_heavy() -> None:
    """Typing `promptmill` wrong must not cost seconds."""
    heavy = ("celery", "sqlalchemy", "pydantic", "redis", "rich", "numpy", "structlog")
    code = f"import sys, jobs.cli; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


# Runs commands one after another, and writes down what was imported for them.
COMMANDS = """
import json, sys
from pathlib import Path
from jobs.cli import cli

for arguments in json.loads(sys.argv[1]):
    try:
        cli(arguments, prog_name="promptmill")
    except SystemExit as ended:
        assert ended.code == 0, (arguments, ended.code)
Path(sys.argv[2]).write_text(json.dumps(sorted(sys.modules)))
"""
# What runs models, what serves, what takes work in, what makes or reads lines and logs.
MODELS = {"gguf", "numpy", "onnx", "onnxruntime", "pynvml", "tokenizers", "workers"}
SERVICES = {"celery", "fastapi", "httpx", "kombu", "prometheus_client", "redis", "uvicorn"}
SUBMISSIONS = {"jinja2", "jobs.inputs", "jobs.submit", "pyarrow"}
LINES = {"jobs.finalize", "jobs.protocol", "jobs.results", "jobs.worker_process", "psutil", "structlog"}
# Alembic is for a database of another version, and the mapper of objects is used by nobody.
NEVER = {"alembic", "sqlalchemy.orm"}
HEAVY = MODELS | SERVICES | SUBMISSIONS | NEVER


@pytest.mark.parametrize(
    ("commands", "spared"),
    [
        ([["list"], ["show", "last"]], HEAVY | LINES),
        ([["pause", "last"], ["set", "last", "--priority", "3"], ["resume", "last"]], HEAVY | LINES | {"rich"}),
        ([["cancel", "last"]], HEAVY),
    ],
    ids=["looking", "steering", "cancelling"],
)
def test_looking_at_a_batch_and_steering_it_import_no_more_than_they_need(
    sqlite_database: Database, tmp_path: Path, commands: list[list[str]], spared: set[str]
) -> None:
    """They must be there at once, also beside workers that use every core; nearly all of their time is imports."""
    path = tmp_path / "in.txt"
    path.write_text("one\ntwo\n")
    with open_source(path, tmp_path) as source:
        submit(sqlite_database, source, InputOptions(model="smol"))
    imported = tmp_path / "imported.json"
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps(commands), str(imported)], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert spared & set(json.loads(imported.read_text())) == set()


@pytest.mark.parametrize(
    ("module", "spared"),
    [
        ("jobs.up", MODELS | NEVER | {"fastapi", "pyarrow"}),
        ("jobs.gateway.server", MODELS | NEVER | {"httpx", "pyarrow"}),
        ("workers.worker", NEVER | {"fastapi", "gguf", "onnx", "pyarrow", "workers.models.convert"}),
    ],
)
def test_a_service_starts_without_what_only_others_need(module: str, spared: set[str]) -> None:
    code = f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert spared & set(json.loads(done.stdout)) == set()


def test_each_command_stands_in_one_section_and_has_a_summary() -> None:
    context = click.Context(cli.cli)
    named = cli.cli.list_commands(context)
    assert len(named) == len(set(named))
    assert set(named) == set(cli.cli.commands)
    for name in named:
        command = cli.cli.get_command(context, name)
        assert command is not None
        assert command.get_short_help_str(), name


def test_each_command_is_in_its_documentation() -> None:
    documented = (ROOT / "docs" / "cli.md").read_text()
    for name, command in cli.cli.commands.items():
        assert f"## promptmill {name}" in documented, name
        if name in ("convert", "verify", "worker"):
            continue  # `python -m workers` knows their options
        for parameter in command.params:
            if isinstance(parameter, click.Option) and parameter.opts[-1] != "--help":
                assert any(option in documented for option in parameter.opts), f"{name} {parameter.opts}"


def test_an_unknown_command_is_named() -> None:
    done = CliRunner().invoke(cli.cli, ["sumbit"])
    assert done.exit_code == 2
    assert "sumbit" in done.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("submit f --max-tokens abc", "--max-tokens is 'abc'; write a whole number"),
        ("submit f --max-tokens 0", "--max-tokens 0 is below 1; raise it"),
        ("submit f --max-tokens 99999999999", "--max-tokens 99999999999 exceeds 2,147,483,647; lower it"),
        ("run f --top-k 99999999999", "--top-k 99999999999 exceeds 2,147,483,647; lower it"),
        ("run f --temperature nan", "--temperature nan is below 0; raise it"),
        ("run f --temperature inf", "--temperature inf exceeds 2; lower it"),
        ("run f --top-p x", "--top-p is 'x'; write a number"),
        ("submit f --priority 99999999999999999999", "--priority 99999999999999999999 exceeds 1,000,000; lower it"),
        ("set b --priority -3000000", "--priority -3000000 is below -1,000,000; raise it"),
        ("results last --follow --after 9223372036854775808", "exceeds 9,223,372,036,854,775,807; lower it"),
        ("list --limit -3", "--limit -3 is below 1; raise it"),
        ("list --limit 99999999999999999999999", "--limit 99999999999999999999999 exceeds 1,000,000; lower it"),
        ("serve --port 80000", "--port 80000 exceeds 65,535; lower it"),
        ("tenant set t --weight nan", "--weight nan is below 0.01; raise it"),
        ("run f --format xml", "see promptmill run --help"),
        ("submit", "missing argument 'INPUT'; see promptmill submit --help"),
        ("list --frobnicate", "no such option"),
    ],
)
def test_a_wrong_option_is_told_in_one_line(
    arguments: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["promptmill", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    lines = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert len(lines) == 1 and lines[0].startswith("error: ") and said in lines[0], lines


def test_nothing_to_set_is_an_error() -> None:
    done = CliRunner().invoke(cli.cli, ["set", "last"])
    assert done.exit_code == 2
    assert "nothing to set" in done.output
