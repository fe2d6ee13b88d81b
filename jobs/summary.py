"""How a batch has gone so far, in numbers: rates, percentiles of latencies, failures by kind, answers not computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from storage import queries
from storage.database import Database
from storage.models import ServedFrom
from storage.queries import BatchRow, FailureCount, Percentiles

# A pause longer than this, in which no worker had a line of the batch, does not count as time it ran.
IDLE_S = 10.0
# The error codes of lines that had no answer when their batch ended -> what became of them.
ENDINGS = {"batch_cancelled": "cancelled", "batch_expired": "expired"}


@dataclass(frozen=True)
class BatchSummary:
    """How a batch went, as numbers: what the table at its end shows.

    run_s: how long workers were at it, long pauses (a retry on the next day) not counted. failures: by code, without
    the endings: lines that were cancelled or expired. served: answers that were not computed for it. latencies:
    queue_s, time_to_first_token_s, total_s, exact percentiles over its completed attempts; a measure that no attempt
    has is not there.
    """

    batch: BatchRow
    run_s: float
    failures: list[FailureCount]
    endings: list[FailureCount]
    served: Mapping[ServedFrom, int]
    latencies: Mapping[str, Percentiles]

    @property
    def open_requests(self) -> int:
        """Lines that may still be answered."""
        return max(0, self.batch.remaining_requests - sum(ending.count for ending in self.endings))

    @property
    def requests_per_s(self) -> float:
        return self.batch.completed_requests / self.run_s if self.run_s > 0 else 0.0

    @property
    def completion_tokens_per_s(self) -> float:
        return self.batch.completion_tokens / self.run_s if self.run_s > 0 else 0.0

    @property
    def prompt_tokens_per_s(self) -> float:
        return self.batch.prompt_tokens / self.run_s if self.run_s > 0 else 0.0


def summarise(database: Database, batch_id: int) -> BatchSummary:
    """How a batch has gone so far."""
    with database.read() as connection:
        batch = queries.find_batch_by_id(connection, batch_id)
        assert batch is not None, f"there is no batch {batch_id}"
        unanswered = queries.failures_by_code(connection, batch_id)
        return BatchSummary(
            batch,
            run_s=queries.worked_s(connection, batch_id, longest_pause_s=IDLE_S),
            failures=[each for each in unanswered if each.code not in ENDINGS],
            endings=[each for each in unanswered if each.code in ENDINGS],
            served=queries.served_counts(connection, batch_id),
            latencies=queries.latency_percentiles(connection, batch_id),
        )
