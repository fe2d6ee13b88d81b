"""The command line: `promptmill`.

Everything a person reads goes to standard error; standard output carries results alone. Commands that need the model
code (`convert`, `verify`, `worker`) are passed to `python -m workers`: this package knows no accelerator.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

import click
from rich.console import Console

from jobs.artifacts import find_artifact
from jobs.doctor import Finding, examine
from jobs.inputs import InputFormat, InputOptions
from jobs.logs import set_up_logs
from jobs.protocol import Endpoint, GenerationBody, dump_json, parse_as
from jobs.report import progress_display, summary_table
from jobs.results import STDOUT
from jobs.run import RunOutcome, run_job
from jobs.settings import Settings, load_settings
from jobs.source import STDIN, open_source
from jobs.template import read_context, read_template
from storage.errors import PromptmillError

EXIT_ALL_ANSWERED = 0
EXIT_SOME_FAILED = 1
EXIT_NOTHING_RAN = 2
EXIT_INTERRUPTED = 130  # as a shell reports a program ended by Ctrl-C

OUTPUT_SUFFIX = ".results.jsonl"

P = ParamSpec("P")
R = TypeVar("R")


def reports_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Let the command's known failures leave as one line and exit code 2."""

    @wraps(command)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except PromptmillError as error:
            fail(error.message)
        except KeyboardInterrupt:
            click.echo("stopped; the same command again goes on", err=True)
            raise SystemExit(EXIT_INTERRUPTED) from None

    return guarded


def fail(message: str) -> NoReturn:
    click.echo(f"error: {message}", err=True)
    raise SystemExit(EXIT_NOTHING_RAN)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="promptmill")
def cli() -> None:
    """Run very many prompts through a Llama-family model on this machine, and keep a record of each one."""


@cli.command()
@click.argument("input_path", metavar="INPUT")
@click.option("--model", "-m", metavar="ARTIFACT", help="Artifact folder, or its name in the home's artifacts folder.")
@click.option("--output", "-o", metavar="FILE", help="Where results go; - is standard output. [INPUT.results.jsonl]")
@click.option("--format", "format_", type=click.Choice([each.value for each in InputFormat]), help="[by extension]")
@click.option("--endpoint", type=click.Choice([each.value for each in Endpoint]), help="What plain lines ask for.")
@click.option("--template", type=click.Path(path_type=Path), help="Jinja template over a table's columns.")
@click.option("--context", type=click.Path(path_type=Path), multiple=True, help="Text placed first in each prompt.")
@click.option("--system", default="", help="System message for each prompt.")
@click.option("--id-column", help="Column that names each row. [custom_id, else id, else the row's number]")
@click.option("--max-tokens", type=int, help="New tokens at most, where a line does not say.")
@click.option("--temperature", type=float, help="0 is greedy; where a line does not say. [1]")
@click.option("--top-p", type=float)
@click.option("--top-k", type=int)
@click.option("--seed", type=int)
@click.option("--stop", multiple=True, help="Text that ends an answer; may be given several times.")
@click.option("--quiet", "-q", is_flag=True, help="No progress, no table.")
@reports_errors
def run(input_path: str, **given: Any) -> None:
    """Answer every prompt in INPUT (JSONL, text, CSV, TSV, Parquet; .gz is read; - is standard input).

    The same command again goes on where it stopped, and computes no finished line a second time.

    Exit code: 0 all answered, 1 some lines failed, 2 nothing could run, 130 interrupted.
    """
    settings = load_settings()
    set_up_logs("run", level=settings.log.level, file=settings.logs_dir / "run.log", console=False)
    console = Console(stderr=True, quiet=given["quiet"])
    artifact = find_artifact(given["model"], settings.artifacts_dir)
    output = given["output"] or _default_output(input_path)
    options = InputOptions(
        model=artifact.model,
        format=InputFormat(given["format_"]) if given["format_"] else None,
        endpoint=Endpoint(given["endpoint"]) if given["endpoint"] else None,
        template=read_template(given["template"]) if given["template"] else None,
        context=read_context(given["context"]),
        system=given["system"],
        id_column=given["id_column"],
        defaults=_defaults(given),
    )
    with open_source(input_path, settings.files_dir) as source, progress_display(console) as observer:
        outcome = run_job(
            settings,
            source,
            artifact,
            options,
            output,
            input_path=None if input_path == STDIN else Path(input_path),
            observer=observer,
        )
    _say_how_it_went(console, outcome)


def _defaults(given: dict[str, Any]) -> GenerationBody:
    names = ("max_tokens", "temperature", "top_p", "top_k", "seed")
    values = {name: given[name] for name in names if given[name] is not None}
    if given["stop"]:
        values["stop"] = list(given["stop"])
    return parse_as(GenerationBody, dump_json(values))


def _default_output(input_path: str) -> str:
    if input_path == STDIN:
        return STDOUT
    name = Path(input_path).name.removesuffix(".gz")
    return str(Path(input_path).with_name(Path(name).stem + OUTPUT_SUFFIX))


def _say_how_it_went(console: Console, outcome: RunOutcome) -> NoReturn:
    console.print(summary_table(outcome.summary))
    if outcome.written.output is not None:
        console.print(f"answers: {outcome.written.output}", highlight=False, soft_wrap=True)
    if outcome.written.errors is not None:
        console.print(f"errors:  {outcome.written.errors}", highlight=False, soft_wrap=True)
    if outcome.is_interrupted:
        console.print("stopped; run the same command again to go on", highlight=False)
        raise SystemExit(EXIT_INTERRUPTED)
    if outcome.was_there:
        console.print("the same input was run before with these settings: nothing was computed again", soft_wrap=True)
    raise SystemExit(EXIT_SOME_FAILED if outcome.summary.batch.failed_requests else EXIT_ALL_ANSWERED)


@cli.command()
@click.option("--model", "-m", metavar="ARTIFACT", help="Also look at this artifact.")
@reports_errors
def doctor(model: str | None) -> None:
    """Say what this machine has, and what to do about what is missing."""
    console = Console()
    findings = examine(_settings_or_defaults(console), model)
    for finding in findings:
        _print_finding(console, finding)
    raise SystemExit(EXIT_NOTHING_RAN if any(finding.level == "missing" for finding in findings) else 0)


def _settings_or_defaults(console: Console) -> Settings:
    try:
        return load_settings()
    except PromptmillError as error:
        _print_finding(console, Finding("missing", "settings", error.message))
        raise SystemExit(EXIT_NOTHING_RAN) from None


def _print_finding(console: Console, finding: Finding) -> None:
    mark = {"ok": "[green]ok     [/]", "note": "[yellow]note   [/]", "missing": "[red]missing[/]"}[finding.level]
    console.print(f"{mark} [bold]{finding.subject}[/]: ", end="", highlight=False)
    console.print(finding.text, highlight=False, markup=False, soft_wrap=True)
    if finding.way_out:
        console.print(f"        -> {finding.way_out}", highlight=False, markup=False, soft_wrap=True)


def _worker_command(name: str, summary: str) -> None:
    """A command that `python -m workers` carries out."""

    @cli.command(
        name,
        help=summary,
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def passed_on(arguments: tuple[str, ...]) -> None:
        command = [sys.executable, "-m", "workers", name, *arguments]
        process = subprocess.Popen(command)
        while True:
            try:
                raise SystemExit(process.wait())
            except KeyboardInterrupt:
                continue  # it had the same Ctrl-C, and ends in its own way


_worker_command("convert", "Make an artifact from a GGUF file, a Hugging Face folder, or `demo`.")
_worker_command("verify", "Check an artifact's digests, and its logits against a float64 reference.")
_worker_command("worker", "Serve one artifact: take chunks from the queue until told to stop.")


def main() -> None:
    cli(prog_name="promptmill")


if __name__ == "__main__":
    main()
