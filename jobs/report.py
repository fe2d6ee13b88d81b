"""What a person sees: a progress bar while a batch runs, a table when it has ended, lists of batches, one request's
audit record, the start of the workers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.progress import Progress as ProgressBar
from rich.table import Table
from rich.text import Text

from jobs.steering import Observer, Progress, Rates, standing
from jobs.summary import ENDINGS, BatchSummary
from storage.models import BatchStatus, ServedFrom
from storage.queries import BatchRow

if TYPE_CHECKING:
    from jobs.audit import AttemptAudit
    from jobs.submit import SubmitProgress

# Where there is no terminal, one plain line this often.
PLAIN_EVERY_S = 10.0
SHORT_ID = len("batch_") + 8
FACT_WIDTH = 18
MATES_SHOWN = 20
# The first runs until the claim, the other two from it.
LATENCIES = {"queue_s": "queue", "time_to_first_token_s": "first token", "total_s": "in worker"}
SERVED = {
    ServedFrom.DUPLICATE: "of them by an identical line; its tokens count once",
    ServedFrom.JOB: "of them by an earlier batch of this job; their tokens do not count",
    ServedFrom.CACHE: "of them from the answer cache; their tokens do not count",
}


class _TimeLeft(ProgressColumn):
    """Time left at the present rate of tokens."""

    def render(self, task: Task) -> Text:
        left_s = task.fields.get("left_s")
        return Text("" if left_s is None else f"{duration(left_s)} left", style="progress.remaining")


@contextmanager
def progress_display(console: Console) -> Iterator[Observer]:
    """Show a run's progress as long as the block lasts."""
    if console.is_terminal:
        with _bar(console) as observer:
            yield observer
    else:
        yield _plain(console)


@contextmanager
def _bar(console: Console) -> Iterator[Observer]:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        _TimeLeft(),
    )
    rates = Rates()
    with ProgressBar(*columns, console=console, transient=True) as display:
        task = display.add_task("reading", total=None, speed="")

        def submitting(progress: SubmitProgress) -> None:
            share = progress.bytes_read / max(1, progress.bytes_total)
            expected = int(progress.lines / share) if share > 0 else None
            display.update(task, description="submitting", completed=progress.lines, total=expected)

        def running(progress: Progress) -> None:
            batch = progress.batch
            done = batch.completed_requests + batch.failed_requests
            rates.add(time.monotonic(), batch)
            display.update(
                task,
                description=_doing(progress),
                completed=done,
                total=batch.total_requests,
                speed=_speed(batch, rates),
                left_s=rates.left_s,
            )

        yield Observer(submitting, running, lambda text: console.print(f"[yellow]note:[/] {text}"))


def _plain(console: Console) -> Observer:
    rates = Rates()
    lines = PlainLines(time.monotonic())

    def running(progress: Progress) -> None:
        batch = progress.batch
        done = batch.completed_requests + batch.failed_requests
        rates.add(time.monotonic(), batch)
        standing_now = f"{_doing(progress)}: {done}/{batch.total_requests}"
        if lines.is_due(time.monotonic(), standing_now):
            speed = _speed(batch, rates)
            left = f"{duration(rates.left_s)} left" if rates.left_s is not None else ""
            console.print(", ".join(filter(None, (standing_now, speed, left))), highlight=False)

    return Observer(running=running, note=lambda text: console.print(f"note: {text}", highlight=False))


class PlainLines:
    """When to write a line into a log: not too often, and only when there is something new."""

    def __init__(self, now: float) -> None:
        """now: monotonic seconds, as everywhere here."""
        self._said_at = now
        self._said = ""

    def is_due(self, now: float, standing_now: str) -> bool:
        """Whether to say how things stand; if so, it counts as said."""
        if now - self._said_at < PLAIN_EVERY_S or standing_now == self._said:
            return False
        self._said_at, self._said = now, standing_now
        return True


def _doing(progress: Progress) -> str:
    worker = progress.worker
    if progress.batch.status is not BatchStatus.IN_PROGRESS:
        return progress.batch.status.value
    if progress.batch.paused_at is not None:
        return "paused"
    if worker is None:
        return "starting a worker"
    return worker.detail if worker.ready_at is None and worker.detail else "running"


def _speed(batch: BatchRow, rates: Rates) -> str:
    """Tokens are counted when their request has ended: until one has, there is no speed to tell."""
    parts = [f"{batch.failed_requests} failed"] if batch.failed_requests else []
    if rates.requests_per_s > 0:
        parts.append(f"{rates.requests_per_s:.1f} prompts/s")
    if rates.tokens_per_s > 0:
        parts.append(f"{rates.tokens_per_s:.0f} tokens/s")
    return ", ".join(parts)


def summary_table(summary: BatchSummary, *, is_titled: bool = True) -> Table:
    """The table that a run ends with: requests, failures by kind, tokens, throughput, latencies."""
    batch = summary.batch
    title = f"{batch.public_id}  {batch.model}" if is_titled else None
    table = Table(title=title, title_justify="left", show_header=False, expand=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column()
    table.add_row("requests", f"{batch.total_requests:,}", f"{batch.completed_requests:,} answered")
    for served_from, text in SERVED.items():
        if count := summary.served.get(served_from):
            table.add_row("", f"{count:,}", text)
    if summary.open_requests:
        table.add_row("", f"{summary.open_requests:,}", "not finished")
    for ending in summary.endings:
        where = f"without an answer, first on line {ending.example_line}"
        table.add_row(ENDINGS[ending.code], f"{ending.count:,}", where)
    for failure in summary.failures:
        where = f"first on line {failure.example_line}: {failure.example_message}"
        table.add_row("failed", f"{failure.count:,}", f"{failure.code} ({where})")
    cached = f"{batch.cached_tokens:,} of them reused from a shared beginning" if batch.cached_tokens else ""
    table.add_row("prompt tokens", f"{batch.prompt_tokens:,}", cached)
    table.add_row("new tokens", f"{batch.completion_tokens:,}", "")
    if (took_s := summary.run_s) > 0:
        table.add_row(
            "throughput",
            f"{summary.requests_per_s:.2f}",
            f"requests/s, {summary.prompt_tokens_per_s:,.0f} prompt and "
            f"{summary.completion_tokens_per_s:,.0f} new tokens/s over "
            f"{seconds(took_s) if took_s < 1 else duration(took_s)}",
        )
    for measure, label in LATENCIES.items():
        if (found := summary.latencies.get(measure)) is not None:
            table.add_row(
                f"latency, {label}",
                f"{seconds(found.p50)}",
                f"median; p90 {seconds(found.p90)}, p99 {seconds(found.p99)}, most {seconds(found.maximum)}",
            )
    return table


def seconds(value: float) -> str:
    """A latency, to three digits."""
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


def duration(value: float) -> str:
    """A stretch of time as a person says it."""
    whole = round(value)
    if whole < 60:
        return f"{value:.1f} s" if value < 10 else f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min"


# --- batches -----------------------------------------------------------------------------------------------------


def batches_table(batches: Sequence[BatchRow], now: float) -> Table:
    """What `list` prints. Ids are cut to what names them among a few thousand."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, justify in (("batch", "left"), ("name", "left"), ("model", "left"), ("status", "left")):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for name in ("done", "of", "failed", "not run", "new tokens", "age"):
        table.add_column(name, justify="right", no_wrap=True)
    for batch in batches:
        table.add_row(
            batch.public_id[:SHORT_ID],
            batch.name or "",
            batch.model,
            standing(batch),
            f"{batch.completed_requests + batch.failed_requests:,}",
            f"{batch.total_requests:,}",
            f"{batch.failed_requests:,}" if batch.failed_requests else "",
            f"{batch.remaining_requests:,}" if batch.is_final and batch.remaining_requests else "",
            f"{batch.completion_tokens:,}",
            duration(max(0.0, now - batch.created_at)),
        )
    return table


def facts(named: Sequence[tuple[str, str]], title: str) -> str:
    """Names and values under each other; those that are empty are left out."""
    lines = [title, *(f"  {name:<{FACT_WIDTH}}{value}" for name, value in named if value)]
    return "\n".join(lines)


def attempt_facts(attempt: AttemptAudit) -> str:
    """One try at a request, as `audit` prints it: who, with what, in whose company, when, and how it ended."""
    values = attempt.values
    ended = values["outcome"] + (f", {values['finish_reason']}" if values["finish_reason"] else "")
    mates = [custom_id or mate for mate, custom_id in attempt.mates]
    more = f" and {len(mates) - MATES_SHOWN} more" if len(mates) > MATES_SHOWN else ""
    measures = [
        f"{label} {seconds(values[name])}"
        for name, label in (
            ("queue_s", "queue"),
            ("tokenize_s", "tokenizing"),
            ("wait_s", "waiting for a row"),
            ("prefill_s", "prefill"),
            ("time_to_first_token_s", "first token"),
            ("decode_s", "decode"),
            ("total_s", "total"),
        )
        if values[name] is not None
    ]
    tokens = [
        f"{values[name]:,} {label}"
        for name, label in (("prompt_tokens", "prompt"), ("cached_tokens", "reused"), ("completion_tokens", "new"))
        if values[name] is not None
    ]
    from jobs.protocol import result_id  # lists and tables need nothing of the formats of lines

    served = f"{values['served_from']}, {result_id(values['source_request_id'])}" if values["served_from"] else ""
    error = f"{values['error_code']}: {values['error_message']}" if values["error_code"] else ""
    named = [
        ("outcome", ended),
        ("error", error),
        ("exit code", str(values["exit_code"]) if values["exit_code"] is not None else ""),
        ("served from", served),
        ("worker", f"{values['worker']}{', ' + values['device'] if values['device'] else ''}"),
        ("artifact", values["artifact_digest"] or ""),
        ("parameters", values["parameters"] or ""),
        ("tokens", ", ".join(tokens)),
        ("queued", instant(values["queued_at"])),
        ("claimed", instant(values["claimed_at"])),
        ("ended", instant(values["finished_at"])),
        ("times", ", ".join(measures)),
        ("rows, on average", f"{values['mean_batch_size']:.1f}" if values["mean_batch_size"] else ""),
        ("ran beside", ", ".join(mates[:MATES_SHOWN]) + more),
    ]
    return facts(named, f"attempt {values['number']}")


def instant(at: float | None) -> str:
    """A moment in the reader's own time; one that no calendar has, as an older version could write it, as a number."""
    if at is None:
        return ""
    try:
        return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
    except (ValueError, OverflowError, OSError):
        return f"{at:.0f} s after 1970"
