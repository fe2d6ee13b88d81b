"""Which requests run together, in which shape: pure functions over plain values.

One turn of the engine is: admit waiting requests to free slots, prefill up to a budget of prompt tokens, decode one
token for every row that has its prompt computed. The budget is what keeps decoding rows from starving behind prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workers.engine.kv_cache import TokenIds, common_prefix

# A shared beginning shorter than this is cheaper to compute with its neighbours in one call than to copy, because
# a prompt that starts from copied rows must be run alone (GroupQueryAttention takes a past only for single rows).
MIN_REUSED_TOKENS = 32
# Rows of different length share a prefill call as long as the padding adds no more than this to the tokens computed.
MAX_PADDING_RATIO = 1.1


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """A row whose prompt is not fully computed. past: tokens already in its slot. remaining: prompt tokens to go."""

    slot: int
    past: int
    remaining: int


@dataclass(frozen=True, slots=True)
class PrefillCall:
    """One run of the model over prompt tokens.

    Either several fresh rows in neighbouring slots (past 0, whole prompts, right-padded to the longest), or one row
    and its next `lengths[0]` tokens.
    """

    first_slot: int
    lengths: tuple[int, ...]
    past: int

    @property
    def padded_length(self) -> int:
        return max(self.lengths)


def decode_buckets(max_batch_size: int) -> tuple[int, ...]:
    """Row counts a decode step may have: each up to 16, then steps of an eighth, so padding stays below 12.5 %."""
    buckets: list[int] = []
    size = 1
    while size < max_batch_size:
        buckets.append(size)
        size += max(1, 1 << max(0, size.bit_length() - 4))
    return (*buckets, max_batch_size)


def bucket_for(rows: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds `rows` rows."""
    for bucket in buckets:
        if bucket >= rows:
            return bucket
    raise AssertionError(f"{rows} rows exceed the largest bucket {buckets[-1]}")


def plan_prefill(rows: Sequence[PrefillRow], budget_tokens: int) -> list[PrefillCall]:
    """Spend at most `budget_tokens` on rows in the order given; the first row always gets a share.

    rows: oldest request first. Whole short prompts in neighbouring slots are run in one call.
    """
    calls: list[PrefillCall] = []
    left = budget_tokens
    planned: set[int] = set()
    by_slot = {row.slot: row for row in rows}
    for row in rows:
        if row.slot in planned:
            continue
        if left <= 0:
            break
        if row.past > 0 or row.remaining > left:
            length = min(row.remaining, left)
            calls.append(PrefillCall(row.slot, (length,), row.past))
            planned.add(row.slot)
            left -= length
            continue
        group = _grow_group(row, by_slot, planned, left)
        calls.append(PrefillCall(group[0].slot, tuple(member.remaining for member in group), 0))
        planned.update(member.slot for member in group)
        left -= max(member.remaining for member in group) * len(group)
    return calls


def _grow_group(seed: PrefillRow, by_slot: dict[int, PrefillRow], planned: set[int], budget: int) -> list[PrefillRow]:
    """Fresh rows in neighbouring slots that fit in one call with `seed`, in slot order."""
    group = [seed]
    for step in (-1, 1):
        slot = seed.slot + step
        while (row := by_slot.get(slot)) is not None and slot not in planned and row.past == 0:
            longest = max(row.remaining, *(member.remaining for member in group))
            computed = longest * (len(group) + 1)
            wanted = row.remaining + sum(member.remaining for member in group)
            if computed > budget or computed > wanted * MAX_PADDING_RATIO:
                break
            group.append(row)
            slot += step
    return sorted(group, key=lambda member: member.slot)


def waits_for_prefix(prompt: TokenIds, cached: int, being_computed: Sequence[TokenIds]) -> bool:
    """Whether a prompt had better wait for one that is being computed right now, and then copy its beginning.

    cached: tokens it could copy already. being_computed: prompts of the rows in prefill.
    """
    return any(
        min(common_prefix(prompt, other), len(prompt) - 1) - cached >= MIN_REUSED_TOKENS for other in being_computed
    )


def plan_moves(occupied: Sequence[int], buckets: Sequence[int]) -> list[tuple[int, int]]:
    """Moves (from slot, to slot) that let the next decode step run in a smaller bucket; empty if none would."""
    rows = sorted(occupied)
    if not rows or bucket_for(rows[-1] + 1, buckets) == bucket_for(len(rows), buckets):
        return []
    bound = bucket_for(len(rows), buckets)
    taken = set(rows)
    holes = (slot for slot in range(bound) if slot not in taken)
    return [(row, next(holes)) for row in reversed(rows) if row >= bound]
