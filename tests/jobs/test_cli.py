"""The command line's own rules: what it offers agrees with the code behind, and it starts quickly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
from click.testing import CliRunner

from jobs import cli
from jobs.inputs import InputFormat
from jobs.protocol import Endpoint
from storage.models import BatchStatus

ROOT = Path(__file__).parent.parent.parent


def test_the_choices_written_down_for_speed_are_those_of_the_code() -> None:
    assert tuple(each.value for each in InputFormat) == cli.FORMATS
    assert tuple(each.value for each in Endpoint) == cli.ENDPOINTS
    assert {each.value for each in BatchStatus} == set(cli.STATUSES)


def test_help_imports_nothing_heavy() -> None:
    """Typing `promptmill` wrong must not cost seconds."""
    heavy = ("celery", "sqlalchemy", "pydantic", "redis", "rich", "numpy", "structlog")
    code = f"import sys, jobs.cli; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


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


def test_nothing_to_set_is_an_error() -> None:
    done = CliRunner().invoke(cli.cli, ["set", "last"])
    assert done.exit_code == 2
    assert "nothing to set" in done.output
