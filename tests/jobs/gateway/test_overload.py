"""Who is let in: a decision over plain values, each refusal with a time to come back."""

from __future__ import annotations

import pytest

from jobs.gateway.completions import gpu_number
from jobs.gateway.overload import LONGEST_RETRY_S, Limits, Load, judge

LIMITS = Limits(max_waiting_requests=10, max_wait_s=5.0, max_open_calls=100)


@pytest.mark.parametrize(
    ("load", "verdict"),
    [
        (Load(0, 0.0, 0, 1), None),
        (Load(9, 5.0, 99, 1), None),
        (Load(10, 5.0, 99, 1), (429, "queue_full", 5)),
        (Load(0, 5.1, 0, 1), (503, "overloaded", 5)),
        (Load(0, 0.0, 100, 1), (503, "too_many_calls", 1)),
        (Load(0, 0.0, 0, 0), (503, "no_worker_ready", 10)),
        (Load(0, 0.0, 0, 0, starting=1), (503, "no_worker_ready", 2)),
        (Load(999, 9999.0, 0, 1), (503, "overloaded", LONGEST_RETRY_S)),
        (Load(10, 0.0, 0, 1), (429, "queue_full", 1)),
    ],
)
def test_a_request_is_let_in_or_told_when_to_come_back(load: Load, verdict: tuple[int, str, int] | None) -> None:
    refusal = judge("m", load, LIMITS)
    assert (refusal and (refusal.status, refusal.code, refusal.retry_after_s)) == verdict
    assert refusal is None or ("model m" in refusal.message or "gateway" in refusal.message)


@pytest.mark.parametrize(
    ("device", "number"), [("gpu0", 0), ("gpu12", 12), ("cuda:1", 1), ("cpu", None), ("null", None), (None, None)]
)
def test_a_device_is_shown_by_its_number(device: str | None, number: int | None) -> None:
    assert gpu_number(device) == number
