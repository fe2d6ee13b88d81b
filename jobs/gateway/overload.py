"""Whether one more request that somebody waits for is let in: a pure decision over how things stand.

Refusing early is kinder than a timeout: the client hears when to come back, and those inside are answered in time. Bulk
work is not bounded here; it waits in the database, and workers take requests that somebody waits for beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

LEAST_RETRY_S, LONGEST_RETRY_S = 1, 30


@dataclass(frozen=True, slots=True)
class Load:
    """waiting: requests for a model that no worker has taken yet, the oldest for `oldest_s` seconds. open_calls: calls
    that this gateway holds, of all models. workers: that are ready for the model; starting: that are about to be."""

    waiting: int
    oldest_s: float
    open_calls: int
    workers: int
    starting: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """See the settings of the same names."""

    max_waiting_requests: int
    max_wait_s: float
    max_open_calls: int


@dataclass(frozen=True, slots=True)
class Refusal:
    status: int
    code: str
    message: str
    retry_after_s: int


def judge(model: str, load: Load, limits: Limits) -> Refusal | None:
    """None: it is let in."""
    if load.open_calls >= limits.max_open_calls:
        return Refusal(
            503,
            "too_many_calls",
            f"this gateway holds {load.open_calls} calls and takes no more than {limits.max_open_calls} at once; "
            "come back in a moment, or raise PROMPTMILL_GATEWAY_MAX_OPEN_CALLS",
            LEAST_RETRY_S,
        )
    if not load.workers:
        state = "a worker is starting" if load.starting else "no worker is up"
        return Refusal(
            503,
            "no_worker_ready",
            f"{state} for model {model}; come back in a moment, or start one: promptmill up",
            2 if load.starting else 10,
        )
    if load.oldest_s > limits.max_wait_s:
        return Refusal(
            503,
            "overloaded",
            f"requests for model {model} wait {load.oldest_s:.0f} s for a worker and {limits.max_wait_s:g} s are "
            "allowed; come back later, start more workers, or raise PROMPTMILL_GATEWAY_MAX_WAIT_S",
            _retry_after(load.oldest_s),
        )
    if load.waiting >= limits.max_waiting_requests:
        return Refusal(
            429,
            "queue_full",
            f"{load.waiting} requests for model {model} wait for a worker and {limits.max_waiting_requests} may; come "
            "back later, start more workers, or raise PROMPTMILL_GATEWAY_MAX_WAITING_REQUESTS",
            _retry_after(load.oldest_s),
        )
    return None


def _retry_after(oldest_s: float) -> int:
    """About as long as the line takes."""
    return min(LONGEST_RETRY_S, max(LEAST_RETRY_S, round(oldest_s)))
