"""Which requests run together, in which shape: pure functions over plain values.

One turn of the engine on a CPU is: admit waiting requests to free slots, prefill up to a budget of prompt tokens,
decode one token for every row that has its prompt computed. The budget is what keeps decoding rows from starving behind
prompts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from workers.engine.kv_cache import TokenIds, common_prefix
from workers.engine.request import GenerationRequest

Int32s = npt.NDArray[np.int32]

# A shared beginning shorter than this is cheaper to compute with its neighbours in one call than to copy, because
# a prompt that starts from copied rows must be run alone (GroupQueryAttention takes a past only for single rows).
MIN_REUSED_TOKENS = 32
# The end of a prompt is not computed as a single token: a product with one row takes another kernel, which in int8
# rounds otherwise, so that the same prompt would give other logits than in one piece.
MIN_LAST_TOKENS = 2
# Rows of different length share a prefill call as long as the padding adds no more than this to the tokens computed.
MAX_PADDING_RATIO = 1.1


class WaitingRow(Protocol):
    """A request in an engine's waiting line."""

    @property
    def request(self) -> GenerationRequest: ...


AnyRow = TypeVar("AnyRow", bound=WaitingRow)


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

    rows: oldest request first. Whole short prompts in neighbouring slots are run in one call. Where a prompt is cut,
    its last piece keeps MIN_LAST_TOKENS, unless the budget is less.
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
            length = _piece(row.remaining, left, must_move=not calls)
            if not length:
                break
            calls.append(PrefillCall(row.slot, (length,), row.past))
            planned.add(row.slot)
            left -= length
            continue
        group = _grow_group(row, by_slot, planned, left)
        calls.append(PrefillCall(group[0].slot, tuple(member.remaining for member in group), 0))
        planned.update(member.slot for member in group)
        left -= max(member.remaining for member in group) * len(group)
    return calls


def _piece(remaining: int, left: int, *, must_move: bool) -> int:
    """How much of a prompt to compute with `left` tokens of the budget; 0: rather nothing than leave a last token."""
    length = min(remaining, left)
    if 0 < remaining - length < MIN_LAST_TOKENS:
        shorter = remaining - MIN_LAST_TOKENS
        return shorter if shorter > 0 or not must_move else length
    return length


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


def interactive_slots(max_batch_size: int) -> int:
    """Slots beyond the batch's that only interactive requests may take, so that these need not wait for a bulk row's
    end: one in sixteen costs that much more KV cache (on a GPU, where they are rows, none) and, as long as none comes,
    no time."""
    return max(1, max_batch_size // 16)


def line_up(waiting: deque[AnyRow], arrived: Iterable[AnyRow]) -> None:
    """Put arrived rows into the waiting line: interactive ones before all others, else in the order of arrival."""
    for row in arrived:
        if not row.request.is_interactive:
            waiting.append(row)
            continue
        waiting.insert(_interactive_ahead(waiting), row)


def put_back(waiting: deque[AnyRow], row: AnyRow) -> None:
    """Put a row that was admitted before back into the line, ahead of all others of its kind."""
    waiting.insert(0 if row.request.is_interactive else _interactive_ahead(waiting), row)


def _interactive_ahead(waiting: Iterable[AnyRow]) -> int:
    return sum(1 for _ in takewhile(lambda row: row.request.is_interactive, waiting))


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


# --- the paged engine -----------------------------------------------------------------------------------------------


def plan_pieces(remaining: Sequence[int], budget_tokens: int) -> list[int]:
    """How many tokens of each row's prompt the next prefill computes: oldest first, until the budget is spent."""
    pieces: list[int] = []
    for tokens in remaining:
        if budget_tokens <= 0:
            break
        pieces.append(min(tokens, budget_tokens))
        budget_tokens -= pieces[-1]
    return pieces


def prefers_prefill(*, can_prefill: bool, can_decode: bool, burst_left_tokens: int) -> bool:
    """Whether the next step is a prefill. Prompts go first, since more rows make decode steps cheaper for each, but
    decoding rows wait for no more than one burst of prompt tokens."""
    return can_prefill and (not can_decode or burst_left_tokens > 0)


def shared_prefix(
    tables: Int32s, lengths: Int32s, block_size: int, min_blocks: int, min_rows: int
) -> tuple[npt.NDArray[np.bool_], int]:
    """The rows that share a prefix worth reading once for all of them: where that saves most.

    tables: int32 [n, max_blocks]. lengths: int32 [n], positions computed. min_blocks: of a prefix, at least one. A
    block has one content and stands in the tables of those alone that share all before it, so rows with equal k-th
    blocks have k equal ones, and the longer a prefix, the fewer share it.
    Returns which rows, and how many blocks they share: 0 if too few rows share enough.
    """

    def most_alike(blocks: int) -> tuple[int, npt.NDArray[np.bool_]]:
        """The most rows that share so many blocks."""
        is_able = lengths >= blocks * block_size
        ends, counts = np.unique(tables[is_able, blocks - 1], return_counts=True)
        if not counts.size:
            return 0, is_able
        return int(counts.max()), is_able & (tables[:, blocks - 1] == ends[counts.argmax()])

    possible = range(min_blocks, tables.shape[1] + 1)
    if len(lengths) < min_rows or not possible:
        return np.zeros(len(lengths), dtype=bool), 0
    most, _ = most_alike(min_blocks)
    if most < min_rows:
        return np.zeros(len(lengths), dtype=bool), 0
    longest = bisect_right(possible, -min_rows, lo=1, key=lambda blocks: -most_alike(blocks)[0]) - 1
    best = (*most_alike(possible[longest]), possible[longest])
    if best[0] == most:
        return best[1], best[2]
    for blocks in possible[:longest]:  # shorter ones that more share
        rows, sharing = most_alike(blocks)
        if (rows - 1) * blocks > (best[0] - 1) * best[2]:
            best = rows, sharing, blocks
    return best[1], best[2]


def goes_first(*, rows: int, blocks: int, wanted_blocks: int, reserved_rows: int, all_blocks: int) -> bool:
    """Whether an interactive request is admitted at once, bulk rows being preempted if need be.

    rows, blocks: what interactive requests have. wanted_blocks: what this one is expected to take. Beyond the reserve,
    or half of the blocks, interactive requests take turns with bulk ones, so that neither keeps the other out for ever.
    """
    return rows < reserved_rows and blocks + wanted_blocks <= all_blocks // 2


def count_preempted(wanted_blocks: int, gains: Sequence[int]) -> int:
    """How many rows must be preempted to gain so many blocks, at least one: the fewest; 0 if all would not do.

    gains: blocks that each row's end makes available, the row that is to go first coming first.
    """
    assert wanted_blocks > 0
    for count, gained in enumerate(accumulate(gains), start=1):
        if gained >= wanted_blocks:
            return count
    return 0


def holds_admission(
    *, admissible: int, waiting: int, admissible_tokens: int, wanted_tokens: int, max_rows: int
) -> bool:
    """Whether to let room gather while rows decode: only where the room cannot take all that wait.

    A prefill of a few hundred tokens runs at half the speed of one of thousands (measured on an H200). But where
    prompts are short, a batch that waits for so many runs half empty: an eighth of its rows is enough.
    """
    is_enough = admissible_tokens >= wanted_tokens or admissible >= max(1, max_rows // 8)
    return admissible < waiting and not is_enough
