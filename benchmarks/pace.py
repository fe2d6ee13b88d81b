"""How fast the machine itself is while something else is measured.

A virtual machine may run at a fraction of its speed for a tenth of a second now and then, without a word in
`/proc/stat`: its host is at other work. A process of its own does the same small piece of work every few milliseconds
and notes what each took of the processor. Where several in a row took far more than the median, the machine was slow.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from types import TracebackType
from typing import Self

# A piece takes about 0.1 ms: two hundredths of a processor, so that it disturbs little what is measured.
EVERY_S = 0.005
ROUNDS = 3000
# A busy sibling of the core costs a factor of two; an idle core that has to wake up makes a single piece slow.
SLOW_FACTOR = 2.5
LEAST_IN_A_ROW = 3
# Slow pieces that are no further apart belong together; what has piled up is worked off in about as long.
JOINED_S = 0.1

Span = tuple[float, float]


class Pace:
    """Use as `with Pace() as pace:`; afterwards `pace.slow` has the slow spans, in `time.perf_counter` seconds."""

    def __init__(self) -> None:
        self.slow: list[Span] = []
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._said = tempfile.TemporaryFile("w+")  # a pipe would fill up
        self._process = subprocess.Popen([sys.executable, "-m", "benchmarks.pace"], stdout=self._said)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait()
        with self._said:
            self._said.seek(0)
            self.slow = slow_spans([(at, took_s) for at, took_s in map(json.loads, self._said)])

    def is_slow(self, at: float) -> bool:
        """Whether the machine was slow at that time, or just before."""
        return any(begin <= at <= end + JOINED_S for begin, end in self.slow)


def slow_spans(pieces: list[tuple[float, float]]) -> list[Span]:
    """pieces: (when, seconds of the processor), in order."""
    if not pieces:
        return []
    median_s = sorted(took_s for _, took_s in pieces)[len(pieces) // 2]
    spans: list[list[float]] = []
    for at, took_s in pieces:
        if took_s <= SLOW_FACTOR * median_s:
            continue
        if spans and at - spans[-1][-1] <= JOINED_S:
            spans[-1].append(at)
        else:
            spans.append([at])
    return [(span[0] - EVERY_S, span[-1]) for span in spans if len(span) >= LEAST_IN_A_ROW]


def main() -> None:
    while True:
        began, sum_ = time.thread_time(), 0
        for number in range(ROUNDS):
            sum_ += number
        print(json.dumps((time.perf_counter(), time.thread_time() - began)), flush=True)
        time.sleep(EVERY_S)


if __name__ == "__main__":
    main()
