"""What a person sees of a run: a progress bar while it goes on, a table when it has ended. All on standard error."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.table import Table
from rich.text import Text

from jobs.results import BatchSummary
from jobs.run import Observer, RunProgress
from jobs.submit import SubmitProgress
from storage.queries import BatchRow

# Rates are taken over the last so many seconds: long enough to be calm, short enough to follow.
RATE_WINDOW_S = 30.0
# Where there is no terminal, one plain line this often.
PLAIN_EVERY_S = 10.0
LATENCIES = {"queue_s": "queue", "time_to_first_token_s": "first token", "total_s": "total"}


class _Rates:
    """Requests and tokens a second over the last seconds."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, int, int]] = []

    def add(self, now: float, requests: int, tokens: int) -> None:
        self._seen.append((now, requests, tokens))
        while len(self._seen) > 2 and now - self._seen[1][0] > RATE_WINDOW_S:
            self._seen.pop(0)

    @property
    def requests_per_s(self) -> float:
        return self._per_s(1)

    @property
    def tokens_per_s(self) -> float:
        return self._per_s(2)

    def _per_s(self, place: int) -> float:
        first, last = self._seen[0], self._seen[-1]
        seconds = last[0] - first[0]
        return (last[place] - first[place]) / seconds if seconds > 0 else 0.0


class _TimeLeft(ProgressColumn):
    """Time left at the present rate of requests."""

    def render(self, task: Task) -> Text:
        rate = task.fields.get("rate", 0.0)
        if not rate or task.total is None or task.completed >= task.total:
            return Text("")
        return Text(f"{duration((task.total - task.completed) / rate)} left", style="progress.remaining")


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
    rates = _Rates()
    with Progress(*columns, console=console, transient=True) as display:
        task = display.add_task("reading", total=None, speed="")

        def submitting(progress: SubmitProgress) -> None:
            share = progress.bytes_read / max(1, progress.bytes_total)
            expected = int(progress.lines / share) if share > 0 else None
            display.update(task, description="submitting", completed=progress.lines, total=expected)

        def running(progress: RunProgress) -> None:
            batch = progress.batch
            done = batch.completed_requests + batch.failed_requests
            rates.add(time.monotonic(), done, batch.completion_tokens)
            display.update(
                task,
                description=_doing(progress),
                completed=done,
                total=batch.total_requests,
                speed=_speed(batch, rates),
                rate=rates.requests_per_s,
            )

        yield Observer(submitting, running, lambda text: console.print(f"[yellow]note:[/] {text}"))


def _plain(console: Console) -> Observer:
    rates = _Rates()
    said_at = time.monotonic()

    def running(progress: RunProgress) -> None:
        nonlocal said_at
        batch = progress.batch
        done = batch.completed_requests + batch.failed_requests
        rates.add(time.monotonic(), done, batch.completion_tokens)
        if time.monotonic() - said_at >= PLAIN_EVERY_S:
            said_at = time.monotonic()
            left = (batch.total_requests - done) / rates.requests_per_s if rates.requests_per_s else None
            console.print(
                f"{_doing(progress)}: {done}/{batch.total_requests}, {_speed(batch, rates)}"
                + (f", {duration(left)} left" if left else ""),
                highlight=False,
            )

    return Observer(running=running, note=lambda text: console.print(f"note: {text}", highlight=False))


def _doing(progress: RunProgress) -> str:
    worker = progress.worker
    if worker is None:
        return "starting a worker"
    return worker.detail if worker.ready_at is None and worker.detail else "running"


def _speed(batch: BatchRow, rates: _Rates) -> str:
    failed = f"{batch.failed_requests} failed, " if batch.failed_requests else ""
    return f"{failed}{rates.requests_per_s:.1f} prompts/s, {rates.tokens_per_s:.0f} tokens/s"


def summary_table(summary: BatchSummary) -> Table:
    """The table that a run ends with: requests, failures by kind, tokens, throughput, latencies."""
    batch = summary.batch
    table = Table(title=f"{batch.public_id}  {batch.model}", title_justify="left", show_header=False, expand=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column()
    open_requests = batch.total_requests - batch.completed_requests - batch.failed_requests
    table.add_row("requests", f"{batch.total_requests:,}", f"{batch.completed_requests:,} answered")
    if open_requests:
        table.add_row("", f"{open_requests:,}", "not finished")
    for failure in summary.failures:
        where = f"first on line {failure.example_line}: {failure.example_message}"
        table.add_row("failed", f"{failure.count:,}", f"{failure.code} ({where})")
    cached = f"{batch.cached_tokens:,} of them reused from a shared beginning" if batch.cached_tokens else ""
    table.add_row("prompt tokens", f"{batch.prompt_tokens:,}", cached)
    table.add_row("new tokens", f"{batch.completion_tokens:,}", "")
    if summary.run_s > 0:
        table.add_row(
            "throughput",
            f"{summary.requests_per_s:.2f}",
            f"requests/s, {summary.prompt_tokens_per_s:,.0f} prompt and "
            f"{summary.completion_tokens_per_s:,.0f} new tokens/s over {duration(summary.run_s)}",
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
