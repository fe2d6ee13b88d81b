"""What is to be expected of a batch: how long it will take yet, and how many tokens. Estimates, from the last minute.

Policy over plain values; the reads behind are short, whatever the size of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from storage import queries
from storage.database import Connection
from storage.models import BatchStatus
from storage.queries import BatchRow

# A rate is taken over results of the last so many seconds.
WINDOW_S = 60.0
# Fewer results say nothing about a rate.
LEAST_RESULTS = 2


@dataclass(frozen=True, slots=True)
class Forecast:
    """remaining_s: until the last line is answered. total_tokens: of the whole batch. None: nothing is known yet."""

    requests_per_s: float | None
    remaining_s: float | None
    completes_at: float | None
    total_tokens: int | None


def model_rate(connection: Connection, model: str, now: float) -> float | None:
    """Requests of a model, of all batches, that were answered a second within the last minute."""
    return _rate(queries.recent_work(connection, since=now - WINDOW_S, model=model), now)


def forecast(connection: Connection, batch: BatchRow, now: float) -> Forecast | None:
    """What to expect of an unfinished batch; None for one that has ended."""
    if batch.is_final:
        return None
    rate = None
    if batch.status is BatchStatus.IN_PROGRESS and batch.paused_at is None:
        rate = _rate(queries.recent_work(connection, since=now - WINDOW_S, batch_id=batch.id), now)
    remaining_s = None if rate is None else shortest_s(batch, rate)
    return Forecast(
        requests_per_s=rate,
        remaining_s=remaining_s,
        completes_at=None if remaining_s is None else now + remaining_s,
        total_tokens=expected_tokens(batch),
    )


def expected_tokens(batch: BatchRow) -> int | None:
    """Tokens of all a batch's lines, prompts and answers, going by those that have been answered; None before that, and
    while all of those were answered from answers that there were: they took none, and say nothing of the others."""
    tokens = batch.prompt_tokens + batch.completion_tokens
    if not batch.completed_requests or not tokens:
        return None
    each = tokens / batch.completed_requests
    return round(each * (batch.total_requests - batch.failed_requests))


def shortest_s(batch: BatchRow, requests_per_s: float) -> float:
    """How long the rest of a batch takes if its model's workers do nothing else."""
    return batch.remaining_requests / requests_per_s


def _rate(work: queries.RecentWork, now: float) -> float | None:
    if work.requests < LEAST_RESULTS or work.first_at is None:
        return None
    return work.requests / max(now - work.first_at, 0.001)
