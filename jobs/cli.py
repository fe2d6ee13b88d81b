"""The command line: `promptmill`. What each command takes, and how its failures and its end look.

Everything a person reads goes to standard error; standard output carries results alone. Commands that need the model
code (`convert`, `verify`, `worker`) are passed to `python -m workers`: this package knows no accelerator. What a
command does is in `jobs/commands.py`, `steering_commands.py` and `access_commands.py`, imported when it runs:
`promptmill --help` must not take seconds.
"""

from __future__ import annotations

import atexit
import gc
import os
import subprocess
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

import click

from storage.errors import PromptmillError

EXIT_NOTHING_RAN = 2
EXIT_FORBIDDEN = 3  # the port of `serve` is not for this user to open
EXIT_INTERRUPTED = 130  # as a shell reports a program ended by Ctrl-C

# As the enums say; a test holds them together. Importing those would take as long as all the rest.
FORMATS = ("jsonl", "text", "csv", "tsv", "parquet")
ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
STATUSES = (
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
)

# As the protocol bounds them for lines and bodies, held together likewise.
MAX_INTEGER = 2**31 - 1
MAX_PRIORITY = 1_000_000

PAUSED = "paused"  # no status of its own, but what `list` shows of a batch at work that is paused

P = ParamSpec("P")
R = TypeVar("R")
Command = Callable[..., Any]


def reports_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Let the command's known failures leave as one line and exit code 2; an int it returns is its exit code."""

    @wraps(command)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            ended = command(*args, **kwargs)
        except PromptmillError as error:
            fail(error.message, EXIT_FORBIDDEN if error.code == "port_forbidden" else EXIT_NOTHING_RAN)
        except BrokenPipeError:
            say_no_more()
        except KeyboardInterrupt:
            click.echo("stopped; the same command again goes on", err=True)
            raise SystemExit(EXIT_INTERRUPTED) from None
        if isinstance(ended, int):
            raise SystemExit(ended)
        return ended

    return guarded


def say_no_more() -> NoReturn:
    """Whoever read our output has had enough (`| head`). Nothing more can be said there, at exit neither."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(0)


def fail(message: str, exit_code: int = EXIT_NOTHING_RAN) -> NoReturn:
    click.echo(f"error: {message}", err=True)
    raise SystemExit(exit_code)


class Name(click.ParamType[str]):
    """A text that names something: nothing at all, or white space, names nothing."""

    name = "text"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not value.strip():
            is_option = isinstance(param, click.Option)
            named = param.opts[0] if param is not None and is_option else "the name"
            fail(f"{named} is empty; write a name" + (", or leave it out" if is_option else ""))
        return value


NAME = Name()


class Number(click.ParamType[float]):
    """A number within bounds, refused in the words that the protocol has for a line's."""

    def __init__(self, least: float, most: float, *, is_whole: bool = True) -> None:
        self.least, self.most, self.is_whole = least, most, is_whole
        self.name = "integer" if is_whole else "float"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        named = param.opts[0] if param is not None else "the number"
        try:
            number = int(value) if self.is_whole else float(value)
        except ValueError:  # also what has thousands of digits
            fail(f"{named} is {str(value)[:40]!r}; write a {'whole number' if self.is_whole else 'number'}")
        if not number >= self.least:  # nor is what is no number at all
            fail(f"{named} {str(value)[:40]} is below {self.least:,}; raise it")
        if number > self.most:
            fail(f"{named} {str(value)[:40]} exceeds {self.most:,}; lower it")
        return number


PRIORITY = Number(-MAX_PRIORITY, MAX_PRIORITY)


class Sections(click.Group):
    """Commands in the order in which a person needs them, in sections."""

    sections = (
        ("Models", ("convert", "verify")),
        ("Jobs", ("run", "submit", "list", "show", "watch", "results", "export", "audit")),
        ("Steering", ("cancel", "pause", "resume", "retry", "set", "purge")),
        ("Access", ("key", "tenant", "webhook")),
        ("Services", ("up", "serve", "door", "worker", "tick", "migrate", "doctor")),
    )

    def main(self, *args: Any, **options: Any) -> Any:
        """As click has it, but what is wrong with a command line is told in one line, as all other errors are."""
        try:
            raise SystemExit(super().main(*args, **{**options, "standalone_mode": False}))
        except click.exceptions.NoArgsIsHelpError as asked:
            asked.show()
            raise SystemExit(EXIT_NOTHING_RAN) from None
        except click.UsageError as wrong:
            said = wrong.format_message().rstrip(".")
            command = wrong.ctx.command_path if wrong.ctx is not None else "promptmill"
            fail(f"{said[:1].lower()}{said[1:]}; see {command} --help")
        except click.Abort:  # at a question
            click.echo("stopped", err=True)
            raise SystemExit(1) from None
        except BrokenPipeError:  # of --help
            say_no_more()

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for _, names in self.sections for name in names]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, names in self.sections:
            with formatter.section(title):
                formatter.write_dl(
                    [
                        (name, command.get_short_help_str(90))
                        for name in names
                        if (command := self.get_command(ctx, name))
                    ]
                )


@click.group(cls=Sections, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="promptmill")
def cli() -> None:
    """Run very many prompts through a Llama-family model on machines you own, and keep a record of each one."""


# --- options that several commands have --------------------------------------------------------------------------


def _options(*decorators: Callable[[Command], Command]) -> Callable[[Command], Command]:
    def decorate(command: Command) -> Command:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


_input_options = _options(
    click.argument("input_path", metavar="INPUT"),
    click.option("--model", "-m", metavar="ARTIFACT", help="Artifact folder, or its name in the home's artifacts."),
    click.option("--format", "format_", type=click.Choice(FORMATS), help="[by extension]"),
    click.option("--endpoint", type=click.Choice(ENDPOINTS), help="What plain lines ask for."),
    click.option("--template", type=click.Path(path_type=Path), help="Jinja template over a table's columns."),
    click.option("--context", type=click.Path(path_type=Path), multiple=True, help="Text placed first in each prompt."),
    click.option("--system", default="", help="System message for each prompt."),
    click.option("--id-column", type=NAME, help="Column that names each row. [custom_id, else id, else row number]"),
    click.option("--max-tokens", type=Number(1, MAX_INTEGER), help="New tokens at most, where a line does not say."),
    click.option(
        "--temperature", type=Number(0, 2, is_whole=False), help="0 is greedy; where a line does not say. [1]"
    ),
    click.option("--top-p", type=Number(0, 1, is_whole=False)),
    click.option("--top-k", type=Number(-1, MAX_INTEGER)),
    click.option("--seed", type=Number(-(2**63), 2**63 - 1)),
    click.option("--stop", multiple=True, help="Text that ends an answer; may be given several times."),
)
_batch_argument = click.argument("batch", metavar="BATCH")
_json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object a line, for scripts.")
_quiet_option = click.option("--quiet", "-q", is_flag=True, help="No progress, no table.")
_DEADLINE = "When the rest expires: 90s, 30m, 12h, 7d from now, an ISO time, or `none`."


# --- jobs --------------------------------------------------------------------------------------------------------


@cli.command()
@_input_options
@click.option("--output", "-o", metavar="FILE", help="Where results go; - is standard output. [INPUT.results.jsonl]")
@_quiet_option
@reports_errors
def run(input_path: str, **given: Any) -> int:
    """Answer every prompt in INPUT, and write the answers.

    INPUT is JSONL, text, CSV, TSV or Parquet; .gz is read; - is standard input. The same command again goes on where it
    stopped, and computes no finished line a second time. Where `promptmill up` serves the model, its workers do the
    work.

    Exit code: 0 all answered, 1 some lines failed, 2 nothing could run, 130 interrupted.
    """
    from jobs import commands

    return commands.run(input_path, given)


@cli.command()
@_input_options
@click.option("--name", type=NAME, help="The job's name: lines that an earlier batch of it answered are not run again.")
@click.option("--priority", type=PRIORITY, default=0, show_default=True, help="Higher goes first.")
@click.option("--deadline", help=_DEADLINE)
@click.option("--paused", is_flag=True, help="Run nothing of it until `promptmill resume`.")
@click.option("--tenant", type=NAME, default="default", show_default=True, help="Whose it is; tenants share fairly.")
@click.option("--idempotency-key", type=NAME, help="The same key, the same batch; with another input it is refused.")
@click.option("--again", is_flag=True, help="A new batch, even if the same was submitted before.")
@click.option("--compute-all", is_flag=True, help="Also lines that an identical line, or an earlier batch, answers.")
@click.option("--metadata", metavar="JSON", help="An object of yours, kept with the batch.")
@click.option("--watch", "then_watch", is_flag=True, help="Stay and show its progress.")
@_quiet_option
@reports_errors
def submit(input_path: str, **given: Any) -> int:
    """Hand INPUT over to the workers, and print the batch's id.

    The same file and options again give the same batch.
    """
    from jobs import commands

    return commands.submit(input_path, given)


@cli.command("list")
@click.option("--status", type=click.Choice((*STATUSES, PAUSED)), help="Only those that are listed as that.")
@click.option("--limit", type=Number(1, 1_000_000), default=20, show_default=True, help="The newest so many.")
@_json_option
@reports_errors
def list_(status: str | None, limit: int, as_json: bool) -> int:
    """Batches, the newest first."""
    from jobs import commands

    return commands.list_batches(status, limit, as_json)


@cli.command()
@_batch_argument
@click.option("--full", is_flag=True, help="Also what takes reading the whole batch: failures by kind, latencies.")
@_json_option
@reports_errors
def show(batch: str, full: bool, as_json: bool) -> int:
    """How BATCH stands.

    BATCH is an id, the beginning of one, or `last`.
    """
    from jobs import commands

    return commands.show(batch, full, as_json)


@cli.command()
@_batch_argument
@reports_errors
def watch(batch: str) -> int:
    """Show BATCH's progress until it has ended. Ctrl-C leaves it running.

    Exit code: 0 all answered, 1 some lines failed or did not run, 130 interrupted.
    """
    from jobs import commands

    return commands.watch(batch)


@cli.command()
@_batch_argument
@click.option("--output", "-o", metavar="FILE", default="-", show_default=True, help="Where results go.")
@click.option("--follow", "-f", is_flag=True, help="Lines as they land, until the batch has ended.")
@click.option(
    "--after",
    "cursor",
    type=Number(0, 2**63 - 1),
    default=0,
    metavar="CURSOR",
    help="Of --follow: go on where it stopped.",
)
@reports_errors
def results(batch: str, output: str, follow: bool, cursor: int) -> int:
    """Write BATCH's result lines, in input order or as they land.

    With --follow each line comes once. Interrupted, it names the cursor: how far it has come, in the order in which
    results landed (no line number). --after takes it.
    """
    from jobs import commands

    return commands.results(batch, output, follow, cursor)


@cli.command()
@_batch_argument
@click.option("--output", "-o", metavar="FILE", required=True, help="What to write; - is standard output.")
@click.option("--format", "format_", type=click.Choice(("jsonl", "csv", "parquet")), help="[by extension, else jsonl]")
@click.option("--input", "input_path", metavar="FILE", help="The batch's input: its columns stand beside the answers.")
@click.option("--input-format", type=click.Choice(FORMATS), help="[by extension]")
@click.option("--id-column", type=NAME, help="As it was given when the batch was submitted.")
@click.option("--template", type=click.Path(path_type=Path), help="As it was given: prompts are then compared too.")
@reports_errors
def export(batch: str, **given: Any) -> int:
    """Write BATCH as a table: JSONL, CSV or Parquet, beside the input's columns.

    One row for each line: answer, tokens, times, worker, and how it ended.
    """
    from jobs import commands

    return commands.export(batch, given)


@cli.command()
@click.argument("request", metavar="REQUEST")
@click.option("--replay", is_flag=True, help="Run it again, and say whether the answer is the same.")
@click.option("--model", "-m", metavar="ARTIFACT", help="Of --replay: what to run where no worker serves the model.")
@click.option("--text", is_flag=True, help="Also the prompt and the answer.")
@_json_option
@reports_errors
def audit(request: str, replay: bool, model: str | None, text: bool, as_json: bool) -> int:
    """Everything that is known of one REQUEST, each attempt included.

    By whom, with what, beside whom, when, and how it ended.

    REQUEST is the id of a result line (batch_req_...) or of an answer (chatcmpl-..., cmpl-...), or BATCH:custom_id.

    Exit code: 0; with --replay 0 the same answer, 1 another one.
    """
    from jobs import commands

    return commands.audit(request, replay, model, text, as_json)


# --- steering ----------------------------------------------------------------------------------------------------


@cli.command()
@_batch_argument
@reports_errors
def cancel(batch: str) -> int:
    """Stop BATCH for good; what is finished is kept."""
    from jobs import steering_commands

    return steering_commands.cancel(batch)


@cli.command()
@_batch_argument
@reports_errors
def pause(batch: str) -> int:
    """Let nothing more of BATCH begin until it is resumed."""
    from jobs import steering_commands

    return steering_commands.pause(batch)


@cli.command()
@_batch_argument
@reports_errors
def resume(batch: str) -> int:
    """Let a paused BATCH go on."""
    from jobs import steering_commands

    return steering_commands.resume(batch)


@cli.command()
@_batch_argument
@click.option("--failed", is_flag=True, required=True, help="The lines that failed, other than refused ones.")
@reports_errors
def retry(batch: str, failed: bool) -> int:
    """Run lines of BATCH again."""
    from jobs import steering_commands

    return steering_commands.retry_failed(batch)


@cli.command("set")
@_batch_argument
@click.option("--priority", type=PRIORITY, help="Higher goes first.")
@click.option("--deadline", help=_DEADLINE)
@reports_errors
def set_(batch: str, priority: int | None, deadline: str | None) -> int:
    """Change how urgent BATCH is."""
    from jobs import steering_commands

    if priority is None and deadline is None:
        fail("nothing to set; give --priority or --deadline")
    return steering_commands.set_urgency(batch, priority, deadline)


@cli.command()
@click.option("--older-than", required=True, metavar="AGE", help="Of batches that ended so long ago: 30d, 12h, 0d.")
@click.option("--rows", is_flag=True, help="Remove the records of requests too, not only prompts and answers.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@reports_errors
def purge(older_than: str, rows: bool, yes: bool) -> int:
    """Remove prompts and answers of batches that ended long ago."""
    from jobs import steering_commands

    return steering_commands.purge(older_than, rows, yes)


# --- access ------------------------------------------------------------------------------------------------------

_tenant_option = click.option("--tenant", type=NAME, default="default", show_default=True, help="Whose.")


@cli.group()
def key() -> None:
    """API keys: who may send work from outside, each for a tenant."""


@key.command("create")
@click.argument("name", type=NAME)
@_tenant_option
@click.option("--expires", metavar="WHEN", help="90d, 12h from now, or an ISO time. [never]")
@_json_option
@reports_errors
def create_key(name: str, tenant: str, expires: str | None, as_json: bool) -> int:
    """Make a key called NAME and print it, once: only its digest is kept."""
    from jobs import access_commands

    return access_commands.create_key(name, tenant, expires, as_json)


@key.command("list")
@click.option("--tenant", type=NAME, help="Only of that one.")
@_json_option
@reports_errors
def list_keys(tenant: str | None, as_json: bool) -> int:
    """Keys, by the beginning that is shown of them."""
    from jobs import access_commands

    return access_commands.list_keys(tenant, as_json)


@key.command("revoke")
@click.argument("named", metavar="KEY")
@reports_errors
def revoke_key(named: str) -> int:
    """End KEY for good: its id, or the beginning that is shown of it. Gateways refuse it within seconds."""
    from jobs import access_commands

    return access_commands.revoke_key(named)


@cli.group()
def tenant() -> None:
    """Tenants: whose work it is, how they share, and what they may do at once."""


_QUOTA = "A number, or `none`."


@tenant.command("set")
@click.argument("name", type=NAME)
@click.option(
    "--weight",
    type=Number(0.01, 10_000, is_whole=False),
    help="Twice the weight, twice the tokens while others wait. [1]",
)
@click.option("--requests-per-minute", metavar="N", help=_QUOTA)
@click.option("--queued-prompt-tokens", metavar="N", help=_QUOTA)
@click.option("--running-batches", metavar="N", help=_QUOTA)
@click.option("--storage-bytes", metavar="N", help=_QUOTA)
@reports_errors
def set_tenant(name: str, weight: float | None, **quotas: str | None) -> int:
    """Change tenant NAME; what is not given stays. A new name makes a new tenant."""
    from jobs import access_commands

    if weight is None and not any(bound is not None for bound in quotas.values()):
        fail("nothing to set; give --weight or a quota")
    return access_commands.set_tenant(name, weight, quotas)


@tenant.command("list")
@_json_option
@reports_errors
def list_tenants(as_json: bool) -> int:
    """Tenants with their quotas, and how much of each they use."""
    from jobs import access_commands

    return access_commands.list_tenants(as_json)


@cli.group()
def webhook() -> None:
    """Webhooks: who is told when a tenant's batches end."""


@webhook.command("add")
@click.argument("url")
@_tenant_option
@click.option("--event", "events", multiple=True, help="Such as batch.completed; may be given several times. [all]")
@_json_option
@reports_errors
def add_webhook(url: str, tenant: str, events: tuple[str, ...], as_json: bool) -> int:
    """Tell URL of each batch that ends, and print the secret that signs what is sent."""
    from jobs import access_commands

    return access_commands.add_webhook(url, tenant, events, as_json)


@webhook.command("list")
@click.option("--tenant", type=NAME, help="Only of that one.")
@click.option("--deliveries", is_flag=True, help="Also the last deliveries of each.")
@_json_option
@reports_errors
def list_webhooks(tenant: str | None, deliveries: bool, as_json: bool) -> int:
    """Endpoints, and how their deliveries went."""
    from jobs import access_commands

    return access_commands.list_webhooks(tenant, deliveries, as_json)


@webhook.command("remove")
@click.argument("named", metavar="ENDPOINT")
@reports_errors
def remove_webhook(named: str) -> int:
    """Send nothing more to ENDPOINT, an id such as we_..."""
    from jobs import access_commands

    return access_commands.remove_webhook(named)


# --- services ----------------------------------------------------------------------------------------------------


@cli.command()
@click.option("--model", "-m", metavar="ARTIFACT", help="What to serve. [the only one in the home's artifacts folder]")
@click.option("--workers", type=Number(1, 64), help="So many worker processes, on the CPU. [1, or one a GPU]")
@click.option("--gpus", metavar="WHICH", help="auto, all, none, or numbers and UUIDs: 0,1. [PROMPTMILL_WORKER_GPUS]")
@click.option("--door", "has_doors", is_flag=True, help="Also take Celery tasks and inbox entries, as `door` does.")
@reports_errors
def up(model: str | None, workers: int | None, gpus: str | None, has_doors: bool) -> int:
    """Serve a model on this machine until told to stop.

    Queue server (if none is set), workers and periodic pass under one supervisor. Ctrl-C or SIGTERM drains: what fits
    into PROMPTMILL_WORKER_DRAIN_S is finished, the rest is handed back. A second one hands back at once.
    """
    from jobs import commands

    if workers is not None and gpus not in (None, "none"):
        fail(f"--workers {workers} is for workers on the CPU, and --gpus gives each GPU one; leave one of them out")
    return commands.up(model, workers, gpus, has_doors)


@cli.command()
@click.option("--host", help="Address to listen on. [PROMPTMILL_GATEWAY_HOST]")
@click.option("--port", type=Number(0, 65_535), help="Its port; 0 is a free one. [PROMPTMILL_GATEWAY_PORT]")
@reports_errors
def serve(host: str | None, port: int | None) -> int:
    """Take work over HTTP, as the OpenAI API does, until told to stop.

    It runs no model: `promptmill up`, here or elsewhere, does the work. Callers need an API key (`promptmill key`),
    unless PROMPTMILL_GATEWAY_OPEN_ON_LOOPBACK lets this machine in without one.

    Exit code: 2 it cannot start, 3 its port is not for this user to open.
    """
    from jobs import commands

    return commands.serve(host, port)


@cli.command()
@reports_errors
def door() -> int:
    """Take work from Celery applications and from the Redis inbox, until told to stop.

    It runs no model. Any number of them may run.
    """
    from jobs import commands

    return commands.door()


@cli.command()
@reports_errors
def tick() -> int:
    """The periodic pass alone: fill the queue, sweep.

    For where workers are started by somebody else. Any number of them may run.
    """
    from jobs import commands

    return commands.tick()


@cli.command()
@reports_errors
def migrate() -> int:
    """Bring the database's schema to this version's, and end."""
    from jobs import commands

    return commands.migrate()


@cli.command()
@click.option("--model", "-m", metavar="ARTIFACT", help="Also look at this artifact.")
@reports_errors
def doctor(model: str | None) -> int:
    """Say what this machine has, and what to do about what is missing."""
    from jobs import commands

    return commands.doctor(model)


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
        if os.name == "posix":
            os.execv(sys.executable, command)  # signals then reach it, also where we are process 1 of a container
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
    # When it ends, the interpreter looks through all that was imported for garbage: 0.1 to 0.3 s for nothing.
    atexit.register(gc.freeze)
    cli(prog_name="promptmill")


if __name__ == "__main__":
    main()
