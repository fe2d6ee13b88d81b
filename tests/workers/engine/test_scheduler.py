"""Decisions about shapes, as pure functions."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from workers.engine.scheduler import (
    MAX_PADDING_RATIO,
    MIN_LAST_TOKENS,
    PrefillRow,
    bucket_for,
    decode_buckets,
    plan_moves,
    plan_prefill,
    waits_for_prefix,
)

ROWS = st.lists(
    st.tuples(st.integers(0, 31), st.sampled_from([0, 0, 0, 40]), st.integers(1, 300)),
    unique_by=lambda row: row[0],
    min_size=1,
    max_size=32,
).map(lambda rows: [PrefillRow(*row) for row in rows])


@given(st.integers(1, 600))
def test_buckets_end_at_the_maximum_and_pad_less_than_an_eighth(max_batch_size: int) -> None:
    buckets = decode_buckets(max_batch_size)
    assert list(buckets) == sorted(set(buckets))
    assert buckets[0] == 1
    assert buckets[-1] == max_batch_size
    for rows in range(1, max_batch_size + 1):
        assert rows <= bucket_for(rows, buckets) <= max(rows, rows * 1.125)


@given(ROWS, st.integers(1, 2048))
def test_a_prefill_plan_stays_in_budget_and_never_computes_a_token_twice(rows: list[PrefillRow], budget: int) -> None:
    by_slot = {row.slot: row for row in rows}
    calls = plan_prefill(rows, budget)
    computed: set[int] = set()
    for call in calls:
        slots = range(call.first_slot, call.first_slot + len(call.lengths))
        assert computed.isdisjoint(slots)
        computed.update(slots)
        for slot, length in zip(slots, call.lengths, strict=True):
            assert by_slot[slot].past == call.past
            assert length <= by_slot[slot].remaining
        if len(call.lengths) > 1:
            assert call.past == 0
            assert all(length == by_slot[slot].remaining for slot, length in zip(slots, call.lengths, strict=True))
            assert call.padded_length * len(call.lengths) <= sum(call.lengths) * MAX_PADDING_RATIO
    assert sum(call.padded_length * len(call.lengths) for call in calls) <= budget
    assert rows[0].slot in computed, "the oldest row always gets a share"


def test_short_prompts_in_neighbouring_slots_share_a_call() -> None:
    calls = plan_prefill([PrefillRow(slot, 0, 16) for slot in (2, 0, 1, 3, 7)], 512)
    assert [(call.first_slot, call.lengths) for call in calls] == [(0, (16,) * 4), (7, (16,))]


def test_a_long_prompt_is_cut_to_the_budget() -> None:
    (call,) = plan_prefill([PrefillRow(3, 512, 1000), PrefillRow(4, 0, 10)], 256)
    assert (call.first_slot, call.past, call.lengths) == (3, 512, (256,))


@given(ROWS, st.integers(2, 300))
def test_no_prompt_ends_in_a_piece_of_one_token(rows: list[PrefillRow], budget: int) -> None:
    """Turn after turn until all are computed: the last token is never left alone, and no turn goes by for nothing."""
    left = {row.slot: row for row in rows if row.remaining >= MIN_LAST_TOKENS}
    while left:
        calls = plan_prefill(list(left.values()), budget)
        assert calls
        for call in calls:
            for slot, length in enumerate(call.lengths, call.first_slot):
                row = left.pop(slot)
                assert 0 < length <= row.remaining
                if length < row.remaining:
                    assert row.remaining - length >= MIN_LAST_TOKENS
                    left[slot] = PrefillRow(slot, row.past + length, row.remaining - length)


@given(st.sets(st.integers(0, 63), min_size=1))
def test_moves_bring_rows_into_the_smallest_bucket_without_collisions(occupied: set[int]) -> None:
    buckets = decode_buckets(64)
    moved = set(occupied)
    for source, target in plan_moves(sorted(occupied), buckets):
        assert source in moved
        assert target not in moved
        moved.remove(source)
        moved.add(target)
    assert bucket_for(max(moved) + 1, buckets) == bucket_for(len(occupied), buckets)


def test_a_prompt_waits_only_for_a_beginning_worth_copying() -> None:
    long = np.arange(100, dtype=np.int32)
    assert waits_for_prefix(long, 0, [long])
    assert not waits_for_prefix(long, 90, [long])
    assert not waits_for_prefix(long[:20], 0, [long])
    assert not waits_for_prefix(long, 0, [long[::-1].copy()])
