"""When the machine was slow, from how long a small piece of work took."""

from __future__ import annotations

from benchmarks.pace import slow_spans


def test_a_machine_that_is_always_as_fast_was_never_slow() -> None:
    assert slow_spans([]) == []
    assert slow_spans([(n * 0.005, 0.0001) for n in range(100)]) == []


def test_slow_pieces_in_a_row_are_one_span_and_a_single_one_is_none() -> None:
    pieces = [(float(n), 1.0) for n in range(10)]
    pieces += [(20.0, 9.0)]  # a core that had to wake up
    pieces += [(30.0, 4.0), (30.02, 1.0), (30.08, 3.0), (30.1, 9.0)]
    pieces += [(float(n), 1.0) for n in range(40, 50)]
    assert slow_spans(pieces) == [(29.995, 30.1)]
