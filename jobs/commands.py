"""What most commands of `jobs/cli.py` do: call the plain functions, print what they return, say the exit code.

Logging, Celery, Jinja and the formats of lines are imported by the commands that need them: looking at a batch needs
none, and should feel immediate. A test holds which modules it imports.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from jobs import steering
from jobs.artifacts import FoundArtifact, ModelNotFound, find_artifact, known_artifacts
from jobs.report import (
    attempt_facts,
    batches_table,
    duration,
    facts,
    instant,
    progress_display,
    summary_table,
)
from jobs.settings import Settings, load_settings
from jobs.steering import standing
from jobs.summary import summarise
from storage import queries
from storage.database import Database, check_schema, open_database, upgrade_schema
from storage.errors import PromptmillError
from storage.models import WorkerStatus
from storage.queries import BatchRow, WorkerRow

if TYPE_CHECKING:
    from jobs.audit import RequestAudit
    from jobs.doctor import Finding
    from jobs.inputs import InputOptions
    from jobs.results import WrittenResults

EXIT_ALL_ANSWERED = 0
EXIT_SOME_FAILED = 1
EXIT_NOTHING_RAN = 2
EXIT_INTERRUPTED = 130

OUTPUT_SUFFIX = ".results.jsonl"
# `show` reads a whole batch of up to so many lines without being asked to: that takes a tenth of a second.
SMALL_BATCH = 10_000


# --- jobs --------------------------------------------------------------------------------------------------------


def run(input_path: str, given: Mapping[str, Any]) -> int:
    from jobs.run import run_job
    from jobs.source import STDIN, open_source

    settings = _settings("run")
    console = Console(stderr=True, quiet=given["quiet"])
    artifact = find_artifact(given["model"], settings.artifacts_dir)
    options = _input_options(artifact.model, given)
    with open_source(input_path, settings.files_dir) as source, progress_display(console) as observer:
        output = given["output"] or default_output(input_path)
        outcome = run_job(
            settings,
            source,
            artifact,
            options,
            output,
            input_path=None if input_path == STDIN else Path(input_path),
            observer=observer,
        )
    console.print(summary_table(outcome.summary))
    _say_written(console, outcome.written)
    if outcome.is_interrupted:
        console.print("stopped; run the same command again to go on", highlight=False)
        return EXIT_INTERRUPTED
    if outcome.was_finished:
        console.print("the same input was run before with these settings: nothing was computed again", soft_wrap=True)
    return EXIT_ALL_ANSWERED if steering.is_all_answered(outcome.summary.batch) else EXIT_SOME_FAILED


def submit(input_path: str, given: Mapping[str, Any]) -> int:
    from jobs.source import open_source
    from jobs.submit import BatchOptions
    from jobs.submit import submit as submit_batch
    from jobs.worker_process import serving_workers

    settings = _settings("submit")
    console = Console(stderr=True, quiet=given["quiet"])
    with _database(settings, make_tables=True) as database:
        target = _target(database, given["model"], settings)
        now = database.now()
        deadline = given["deadline"]
        options = _input_options(target.model, given)
        batch_options = BatchOptions(
            tenant=given["tenant"],
            name=given["name"],
            priority=given["priority"],
            metadata=_metadata(given["metadata"]),
            expires_at=None if deadline is None else steering.parse_deadline(deadline, now),
            artifact_digest=target.digest,
            idempotency_key=given["idempotency_key"],
            same_within_s=0.0 if given["again"] else None,
            is_paused=given["paused"],
            shares_duplicates=not given["compute_all"],
            keeps_answers=not given["compute_all"],
        )
        with open_source(input_path, settings.files_dir) as source, progress_display(console) as observer:
            submission = submit_batch(database, source, options, batch_options, progress=observer.submitting)
        batch = submission.batch
        print(batch.public_id, flush=True)
        said = "was submitted before" if submission.was_there else "submitted"
        console.print(
            f"{said}: {batch.total_requests:,} requests for {batch.model}, {standing(batch)}", highlight=False
        )
        if batch.is_final:
            return EXIT_ALL_ANSWERED
        with database.read() as connection:
            is_served = bool(serving_workers(connection, batch.model, database.now()))
        if not is_served:
            console.print(f"nobody serves {batch.model} yet; start it: promptmill up --model {given['model'] or ''}")
        return _watch(database, batch, console) if given["then_watch"] else EXIT_ALL_ANSWERED


def list_batches(status: str | None, limit: int, as_json: bool) -> int:
    with _database(load_settings()) as database:
        batches = steering.list_batches(database, stands=status, limit=limit)
        now = database.now()
    if as_json:
        for batch in batches:
            _print_json(steering.describe(batch))
    elif batches:
        _table_console().print(batches_table(batches, now))
    else:
        Console(stderr=True).print("no batches; make one: promptmill submit INPUT", highlight=False)
    return 0


def show(named: str, full: bool, as_json: bool) -> int:
    with _database(load_settings()) as database:
        batch = steering.find_batch(database, named)
        summary = summarise(database, batch.id) if full or batch.total_requests <= SMALL_BATCH else None
        now = database.now()
        with database.read() as connection:
            workers = queries.live_workers(connection, now, model=batch.model)
            key = None if batch.api_key_id is None else queries.find_api_key_by_id(connection, batch.api_key_id)
    if as_json:
        described = steering.describe(batch) | {"workers": [worker.name for worker in workers]}
        described |= {"api_key": key.public_id if key else None, "api_key_name": key.name if key else None}
        if summary is not None:
            described["failures"] = [
                {"code": each.code, "requests": each.count, "first_line": each.example_line}
                for each in summary.failures
            ]
            described["latencies"] = {
                measure: {"p50": found.p50, "p90": found.p90, "p99": found.p99, "maximum": found.maximum}
                for measure, found in summary.latencies.items()
            }
        _print_json(described)
        return 0
    done = batch.completed_requests + batch.failed_requests
    named_facts = [
        ("status", standing(batch) + (f": {batch.error_message}" if batch.error_message else "")),
        ("model", f"{batch.model}, {len(workers)} worker{'s' if len(workers) != 1 else ''} at work"),
        ("name", batch.name or ""),
        ("tenant", batch.tenant if batch.tenant != "default" else ""),
        ("came by", batch.door + (f", with the key {key.name} ({key.shown_prefix}...)" if key else "")),
        ("priority", str(batch.priority) if batch.priority else ""),
        ("submitted", instant(batch.created_at)),
        ("started", instant(batch.in_progress_at)),
        ("paused", instant(batch.paused_at)),
        ("deadline", instant(batch.expires_at)),
        ("ended", instant(batch.completed_at or batch.cancelled_at or batch.expired_at or batch.failed_at)),
        ("text purged", instant(batch.text_purged_at)),
        ("metadata", batch.metadata or ""),
    ]
    if summary is None:
        named_facts += [
            ("requests", f"{done:,} of {batch.total_requests:,} ended, {batch.failed_requests:,} failed"),
            ("tokens", f"{batch.prompt_tokens:,} of prompts, {batch.completion_tokens:,} new"),
            ("more", "failures by kind and latencies, read from the whole batch: --full"),
        ]
    print(facts(named_facts, batch.public_id))
    if summary is not None:
        _table_console().print(summary_table(summary, is_titled=False), highlight=False)
    return 0


def watch(named: str) -> int:
    with _database(_settings("watch", only_reads=True)) as database:
        return _watch(database, steering.find_batch(database, named), Console(stderr=True))


def _watch(database: Database, batch: BatchRow, console: Console) -> int:
    with progress_display(console) as observer:
        for progress in steering.watch_batch(database, batch.id):
            observer.running(progress)
    summary = summarise(database, batch.id)
    console.print(summary_table(summary))
    return EXIT_ALL_ANSWERED if steering.is_all_answered(summary.batch) else EXIT_SOME_FAILED


def results(named: str, output: str, follow: bool, cursor: int) -> int:
    from jobs.results import render_result, write_results

    console = Console(stderr=True)
    with _database(_settings("results", only_reads=True)) as database:
        batch = steering.find_batch(database, named)
        if batch.text_purged_at is not None:
            raise _purged(batch, batch.text_purged_at, "text")
        if not follow:
            if cursor:
                raise steering.SteeringError(
                    f"--after {cursor} goes with --follow: it is the cursor that an interrupted --follow names; leave "
                    "it out, or add --follow",
                    code="invalid_option",
                )
            written = write_results(database, batch.id, output)
            _say_written(console, written)
            if not batch.is_final:
                console.print(f"the batch is {standing(batch)}: this is what there is so far", highlight=False)
            return 0
        try:
            with _opened(output) as file:
                for row in steering.follow_results(database, batch.id, cursor):
                    file.write(render_result(row).encode() + b"\n")
                    file.flush()
                    cursor = max(cursor, row.result_id)
        except KeyboardInterrupt:
            console.print(f"stopped; go on with --follow --after {cursor}", highlight=False)
            return EXIT_INTERRUPTED
        return 0


def export(named: str, given: Mapping[str, Any]) -> int:
    from jobs.export import ExportFormat, InputTable, export_batch, guess_export_format
    from jobs.inputs import InputFormat
    from jobs.source import open_source
    from jobs.template import read_template

    settings = _settings("export", only_reads=True)
    output, input_path = given["output"], given["input_path"]
    format_ = ExportFormat(given["format_"]) if given["format_"] else guess_export_format(output)
    with _database(settings) as database, contextlib.ExitStack() as stack:
        batch = steering.find_batch(database, named)
        if batch.rows_purged_at is not None:
            raise _purged(batch, batch.rows_purged_at, "records")
        if batch.text_purged_at is not None:
            _note(Console(stderr=True))(
                f"note: {batch.public_id} was purged of its text on {instant(batch.text_purged_at)}; the table has its "
                "numbers, and no answers"
            )
        joined = None
        if input_path is not None:
            source = stack.enter_context(open_source(input_path, settings.files_dir))
            read_as = InputFormat(given["input_format"]) if given["input_format"] else None
            template = read_template(given["template"]) if given["template"] else None
            joined = InputTable(source, read_as, given["id_column"], template)
        rows = export_batch(database, batch, output, format_, joined=joined)
    Console(stderr=True).print(f"{rows:,} rows", highlight=False)
    return 0


def audit(named: str, is_replay: bool, model: str | None, text: bool, as_json: bool) -> int:
    from jobs.audit import audit_request, describe

    settings = _settings("audit", only_reads=not is_replay)
    with _database(settings) as database:
        found = audit_request(database, named)
        if is_replay:
            return _replay(settings, database, found, model, as_json)
    if as_json:
        _print_json(describe(found, with_text=text))
    else:
        _print_audit(found, text)
    return 0


def _replay(settings: Settings, database: Database, found: RequestAudit, model: str | None, as_json: bool) -> int:
    from jobs.audit import replay
    from jobs.up import stop_signals

    console = Console(stderr=True)
    artifact = _artifact_for_replay(settings, found, model)
    with stop_signals(second_raises=True) as signals, progress_display(console) as observer:
        done = replay(settings, database, found, artifact, observer, signals)
    former = next(each.values for each in reversed(found.attempts) if each.values["artifact_digest"])
    if as_json:
        _print_json(
            {
                "id": found.request_id,
                "replay": done.request_id,
                "batch": done.batch,
                "is_same": done.is_same,
                "differences": done.differences,
                "artifact_digest": done.attempt["artifact_digest"],
                "is_same_artifact": done.attempt["artifact_digest"] == former["artifact_digest"],
            }
        )
    else:
        word = "the same answer" if done.is_same else f"another answer: {'; '.join(done.differences)}"
        _note(console)(f"{word} ({done.request_id}, {done.attempt['worker']}, {done.attempt['device']})")
        if done.attempt["artifact_digest"] != former["artifact_digest"]:
            _note(console)("note: it was made by another artifact than the first one")
        if done.attempt["served_from"]:
            _note(console)(f"note: it was not computed again but taken from {done.attempt['served_from']}")
    return 0 if done.is_same else EXIT_SOME_FAILED


def _artifact_for_replay(settings: Settings, found: RequestAudit, model: str | None) -> FoundArtifact | None:
    """The one that is named, else the one in the home's artifacts that made the answer, if it is there."""
    if model is not None:
        return find_artifact(model, settings.artifacts_dir)
    made_by = {attempt.values["artifact_digest"] for attempt in found.attempts}
    for path in known_artifacts(settings.artifacts_dir):
        artifact = find_artifact(str(path), settings.artifacts_dir)
        if artifact.digest in made_by:
            return artifact
    return None


def _print_audit(found: RequestAudit, text: bool) -> None:
    from jobs.audit import whole_body

    record = found.record
    named = [
        ("batch", f"{record.batch}, line {record.line}"),
        ("custom_id", record.custom_id or ""),
        ("model", f"{record.model}, {record.endpoint}"),
        ("came by", record.door + (f", with the key {record.api_key_name}" if record.api_key else "")),
        ("status", record.status.value),
        ("error", f"{record.error_code}: {record.error_message}" if record.error_code else ""),
        ("submitted", instant(record.created_at)),
        ("ended", instant(record.finished_at)),
        (
            "in the hands of",
            f"{record.worker} since {instant(record.claimed_at)}" if record.status == "running" else "",
        ),
        ("not before", instant(record.not_before)),
        ("isolated", f"with at most {record.isolation - 1} others" if record.isolation else ""),
    ]
    print(facts(named, found.request_id))
    for attempt in found.attempts:
        print(f"\n{attempt_facts(attempt)}")
    if text and record.body is not None:
        print(f"\nasked:\n{whole_body(record)}")
    if text and record.response is not None:
        print(f"\nanswered:\n{record.response}")


# --- services ----------------------------------------------------------------------------------------------------


def up(model: str | None, workers: int | None, gpus: str | None, has_doors: bool) -> int:
    from jobs.up import UpObserver, serve, stop_signals, with_gpus

    settings = _settings("up")
    if gpus is not None:
        settings = with_gpus(settings, gpus)
    console = Console(stderr=True)
    artifact = find_artifact(model, settings.artifacts_dir)
    told: dict[str, str] = {}

    def show_workers(rows: list[WorkerRow]) -> None:
        for row in rows:
            # A person at a terminal sees each step of the start, a log only that it began and that it ended.
            if row.status is WorkerStatus.READY:
                text = (
                    f"ready, {row.max_batch_size} rows, {duration((row.ready_at or row.started_at) - row.started_at)}"
                )
            else:
                text = row.detail if console.is_terminal and row.detail else row.status.value
            if told.get(row.name) != text:
                told[row.name] = text
                console.print(f"worker {row.name}: {text}", highlight=False)

    with stop_signals() as signals:
        observer = UpObserver(_note(console), show_workers)
        outcome = serve(settings, artifact, workers, observer, signals, has_doors=has_doors)
    killed = f", {outcome.killed} killed" if outcome.killed else ""
    console.print(f"stopped after {outcome.drain_s:.2f} s{killed}", highlight=False)
    return 0


def serve(host: str | None, port: int | None) -> int:
    try:
        from jobs.gateway.server import serve as serve_http
    except ModuleNotFoundError as error:
        raise PromptmillError(
            f"the gateway needs {error.name}; install it with: pip install 'promptmill[gateway]'",
            code="missing_dependency",
        ) from error

    settings = _settings("serve")
    given = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    settings = settings.model_copy(update={"gateway": settings.gateway.model_copy(update=given)})
    try:
        return serve_http(settings, _note(Console(stderr=True)))
    except SystemExit:
        raise PromptmillError(
            f"the gateway could not start; {settings.logs_dir / 'serve.log'} says why", code="gateway_not_started"
        ) from None


def door() -> int:
    from jobs.doors import serve_doors
    from jobs.up import UpObserver, stop_signals

    settings = _settings("door", console=True)
    with stop_signals() as signals:
        serve_doors(settings, UpObserver(_note(Console(stderr=True))), signals)
    return 0


def tick() -> int:
    from jobs.up import UpObserver, stop_signals, tick_forever

    settings = _settings("tick", console=True)
    with stop_signals() as signals:
        tick_forever(settings, UpObserver(), signals)
    return 0


def migrate() -> int:
    with _database(_settings("migrate"), make_tables=True) as database:
        shown_url = database.shown_url
    Console(stderr=True).print(f"{shown_url} has this version's schema", highlight=False, soft_wrap=True)
    return 0


def doctor(model: str | None) -> int:
    from jobs.doctor import Finding, examine

    console = Console()
    try:
        settings = load_settings()
    except PromptmillError as error:
        _print_finding(console, Finding("missing", "settings", error.message))
        return EXIT_NOTHING_RAN
    findings = list(examine(settings, model))
    for finding in findings:
        _print_finding(console, finding)
    return EXIT_NOTHING_RAN if any(finding.level == "missing" for finding in findings) else 0


def _print_finding(console: Console, finding: Finding) -> None:
    mark = {"ok": "[green]ok     [/]", "note": "[yellow]note   [/]", "missing": "[red]missing[/]"}[finding.level]
    console.print(f"{mark} [bold]{finding.subject}[/]: ", end="", highlight=False)
    console.print(finding.text, highlight=False, markup=False, soft_wrap=True)
    if finding.way_out:
        console.print(f"        -> {finding.way_out}", highlight=False, markup=False, soft_wrap=True)


# --- what they share ---------------------------------------------------------------------------------------------


def _settings(command: str, *, console: bool = False, only_reads: bool = False) -> Settings:
    """The settings, for commands that have something to log; one that only reads does without where it cannot."""
    from jobs.logs import set_up_logs  # with structlog, which whoever only looks at a batch does not need

    settings = load_settings()
    file = settings.logs_dir / f"{command}.log"
    set_up_logs(command, level=settings.log.level, file=file, console=console, must_write=not only_reads)
    return settings


@contextmanager
def _database(settings: Settings, *, make_tables: bool = False) -> Iterator[Database]:
    with open_database(settings.database.url) as database:
        if make_tables:
            upgrade_schema(database)
        else:
            check_schema(database)
        yield database


def _input_options(model: str, given: Mapping[str, Any]) -> InputOptions:
    from jobs.inputs import InputFormat, InputOptions
    from jobs.protocol import Endpoint, GenerationBody, dump_json, parse_as
    from jobs.template import read_context, read_template

    names = ("max_tokens", "temperature", "top_p", "top_k", "seed")
    values = {name: given[name] for name in names if given[name] is not None}
    if given["stop"]:
        values["stop"] = list(given["stop"])
    return InputOptions(
        model=model,
        format=InputFormat(given["format_"]) if given["format_"] else None,
        endpoint=Endpoint(given["endpoint"]) if given["endpoint"] else None,
        template=read_template(given["template"]) if given["template"] else None,
        context=read_context(given["context"]),
        system=given["system"],
        id_column=given["id_column"],
        defaults=parse_as(GenerationBody, dump_json(values)),
    )


def default_output(input_path: str) -> str:
    """Beside the input, under its whole name: `q.csv` and `q.jsonl` do not share their results."""
    from jobs.results import STDOUT
    from jobs.source import STDIN

    return STDOUT if input_path == STDIN else input_path + OUTPUT_SUFFIX


def _say_written(console: Console, written: WrittenResults) -> None:
    say = _note(console)
    if written.output is not None:
        say(f"answers: {written.output}")
    if written.errors is not None:
        say(f"errors:  {written.errors}")
    if (former := written.former) is None:
        return
    if former.batch is None:
        whose, way_back = "other contents", ""
    else:
        whose = f"the results of {former.batch}"
        way_back = f"; they can be had again: promptmill results {former.batch} --output FILE"
    if written.is_kept:
        say(f"note: there is no answer, and {former.path} still holds {whose}")
    else:
        say(f"note: {former.path} held {whose} before{way_back}")


def _purged(batch: BatchRow, at: float, what: str) -> steering.SteeringError:
    return steering.SteeringError(
        f"{batch.public_id} was purged of its {what} on {instant(at)}; the same run or submit computes everything anew",
        code="text_purged",
    )


def _target(database: Database, named: str | None, settings: Settings) -> FoundArtifact:
    """What a submission is for: an artifact here, or a model that workers serve, wherever they are."""
    from jobs.worker_process import serving_workers

    try:
        return find_artifact(named, settings.artifacts_dir)
    except ModelNotFound:
        with database.read() as connection:
            workers = serving_workers(connection, None, database.now())
        served = {worker.model: worker.artifact_digest or "" for worker in workers}
        if named is None and len(served) == 1:
            named = next(iter(served))
        if named in served:
            return FoundArtifact(Path(), named, served[named])
        raise


def _metadata(text: str | None) -> str | None:
    from jobs.protocol import dump_json

    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise steering.SteeringError(
            f"--metadata is not JSON ({error}); write an object", code="invalid_metadata"
        ) from None
    if not isinstance(value, dict):
        raise steering.SteeringError("--metadata is not an object; write {...}", code="invalid_metadata")
    return dump_json(value)


def _note(console: Console) -> Any:
    return lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True)


def _table_console() -> Console:
    """Standard output. Into a file or a pipe tables are as wide as they need."""
    console = Console()
    return console if console.is_terminal else Console(width=200)


def _print_json(value: object) -> None:
    from jobs.protocol import dump_json

    print(dump_json(value))


@contextmanager
def _opened(output: str) -> Iterator[Any]:
    from jobs.results import STDOUT

    if output == STDOUT:
        yield sys.stdout.buffer
        return
    try:
        file = Path(output).open("ab")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise steering.SteeringError(
            f"{output} cannot be written: {error.strerror or error}; name another file", code="output_not_writable"
        ) from error
    with file:
        yield file
