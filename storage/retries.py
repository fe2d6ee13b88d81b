"""Whether a request that went wrong is tried again, when, and in what company; pure decisions over plain values.

A request that failed in a way another try may cure comes back after a pause that doubles, until the attempt limit.

When a worker dies, any of the requests in its hands may have killed it, or none: memory was short, the power went, a
hand was impatient. So after its first death a request comes back like any other. One that was there at a second crash
is under suspicion: it comes back in a group an eighth as large as the company it was in, alone on its worker, so that
a killer is in ever smaller company until it stands alone. Only deaths alone are evidence: a request whose worker died
that often while it ran nothing else is a poison prompt. Its neighbours, and requests that were met by chance, are not:
they would have to be met alone each time. A SIGKILL counts half, as does a lease that ran out: those come from outside,
though a prompt that takes all memory may be the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Suspects come back in groups this much smaller: a killer among 128 stands alone after the fourth death.
GROUP_DIVISOR = 8


# How much a death says, in halves: a crash of the process all, an end from outside half.
CRASH_WEIGHT = 2
OUTSIDE_WEIGHT = 1
# Below this a request was there by chance, most likely: it takes two crashes, or three ends from outside.
SUSPICIOUS_WEIGHT = 3
# Exit codes of an end from outside: SIGKILL, and none where nobody saw the process end.
FROM_OUTSIDE = (-9, None)


@dataclass(frozen=True, slots=True)
class RetryLimits:
    """max_attempts: of failed attempts, and of deaths alone. Pauses double from backoff_s up to longest_backoff_s."""

    max_attempts: int = 3
    backoff_s: float = 1.0
    longest_backoff_s: float = 60.0

    def pause_s(self, times: int) -> float:
        """The pause after something went wrong for the `times`-th time."""
        return min(self.longest_backoff_s, self.backoff_s * 2.0 ** min(times - 1, 30))


DEFAULT_LIMITS = RetryLimits()


@dataclass(frozen=True, slots=True)
class Death:
    """A worker that ended while it held the request. batch_mates: what else it held; None: not known."""

    worker: str
    at: float
    batch_mates: int | None
    exit_code: int | None = None


@dataclass(frozen=True, slots=True)
class Sentence:
    """What becomes of a request whose worker died. isolation None: it comes back like any other."""

    is_poison: bool
    isolation: int | None = None
    pause_s: float = 0.0


def judge(deaths: Sequence[Death], isolation: int | None, *, limits: RetryLimits) -> Sentence:
    """Decide over a request by the deaths it was there for, the latest last. isolation: the group it ran in."""
    alone = [death for death in deaths if death.batch_mates == 0]
    if sum(map(_weight, alone)) >= CRASH_WEIGHT * limits.max_attempts:
        return Sentence(is_poison=True)
    if sum(map(_weight, deaths)) < SUSPICIOUS_WEIGHT:
        return Sentence(is_poison=False)
    mates = deaths[-1].batch_mates
    group = isolation if mates is None else -(-(mates + 1) // GROUP_DIVISOR)
    if isolation is not None and group is not None:
        group = min(group, isolation)
    # Groups come back at once. One that stands alone comes back ever later, so that whatever kills workers by the clock
    # meets others in between.
    return Sentence(is_poison=False, isolation=group, pause_s=limits.pause_s(len(alone)) if alone else 0.0)


def _weight(death: Death) -> int:
    return OUTSIDE_WEIGHT if death.exit_code in FROM_OUTSIDE else CRASH_WEIGHT
