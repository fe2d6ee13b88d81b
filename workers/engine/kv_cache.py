"""The book-keeping of the CPU flavour's KV cache: which slot holds which tokens, and for whom.

One slot is one row of the cache, `context_length` positions long. A slot whose request has ended keeps its rows
until it is given to another: they are the cache of prefixes. This file moves no memory; it says what to copy where.
Invariant: free plus used slots equal all slots, and `token_ids[:length]` of a slot are exactly the positions whose KV
rows are valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]


@dataclass(slots=True, eq=False)
class Slot:
    """One row of the cache. token_ids[:length] are computed; the rest of the array is room."""

    index: int
    token_ids: TokenIds
    length: int = 0
    is_free: bool = True
    last_used: int = 0


@dataclass(slots=True)
class SlotCache:
    """All slots of one engine. count: rows at most at once. context_length: positions per slot."""

    count: int
    context_length: int
    slots: list[Slot] = field(init=False)
    _clock: int = 0

    def __post_init__(self) -> None:
        self.slots = [Slot(index, np.empty(self.context_length, dtype=np.int32)) for index in range(self.count)]

    @property
    def free_count(self) -> int:
        return sum(slot.is_free for slot in self.slots)

    def longest_prefix(self, prompt: TokenIds) -> tuple[Slot | None, int]:
        """The slot whose valid rows begin with most of `prompt`, and how many tokens; free slots win ties.

        At least the last prompt token is always left to compute: its logits give the first new token.
        """
        best: Slot | None = None
        best_length = 0
        limit = len(prompt) - 1
        for slot in self.slots:
            usable = min(slot.length, limit)
            if usable < best_length or usable == 0:
                continue
            length = common_prefix(prompt[:usable], slot.token_ids[:usable])
            if length > best_length or (length == best_length and length > 0 and best is not None and slot.is_free):
                best, best_length = slot, length
        return best, best_length

    def take(self, preferred: Slot | None, below: int) -> Slot | None:
        """Take a free slot, `preferred` if it is free, else the least recently used with index under `below`.

        Low indices keep the decode bucket small; if none is free under `below`, the lowest free slot is taken.
        """
        if preferred is not None and preferred.is_free and preferred.index < below:
            chosen = preferred
        else:
            free = [slot for slot in self.slots if slot.is_free]
            if not free:
                return None
            low = [slot for slot in free if slot.index < below]
            chosen = min(low, key=lambda slot: (slot.last_used, slot.index)) if low else free[0]
        chosen.is_free = False
        self.touch(chosen)
        return chosen

    def give_back(self, slot: Slot) -> None:
        """Free a slot. Its rows stay valid as a prefix for others until the slot is taken again."""
        assert not slot.is_free, f"slot {slot.index} given back twice"
        slot.is_free = True
        self.touch(slot)

    def touch(self, slot: Slot) -> None:
        self._clock += 1
        slot.last_used = self._clock

    def truncate(self, slot: Slot, length: int) -> None:
        """Keep the first `length` positions; what lay behind is no longer valid."""
        slot.length = min(slot.length, length)

    def extend(self, slot: Slot, token_ids: Sequence[int] | TokenIds) -> None:
        """Note that KV rows for `token_ids` now follow the valid ones."""
        end = slot.length + len(token_ids)
        assert end <= self.context_length, f"slot {slot.index} overflows: {end} > {self.context_length}"
        slot.token_ids[slot.length : end] = token_ids
        slot.length = end

    def append(self, slot: Slot, token_id: int) -> None:
        assert slot.length < self.context_length, f"slot {slot.index} is full"
        slot.token_ids[slot.length] = token_id
        slot.length += 1

    def note_copy(self, source: Slot, target: Slot, length: int) -> None:
        """Note that the first `length` rows of `source` were copied to `target`."""
        target.token_ids[:length] = source.token_ids[:length]
        target.length = length

    def move(self, source: Slot, target: Slot) -> None:
        """Hand the request in `source` over to the free slot `target`, whose rows were copied from it."""
        assert target.is_free and not source.is_free
        self.note_copy(source, target, source.length)
        target.is_free = False
        self.touch(target)
        self.give_back(source)

    def check_integrity(self) -> None:
        """Raise AssertionError if a slot is in an impossible state; run when the engine closes, and in tests."""
        for index, slot in enumerate(self.slots):
            assert slot.index == index
            assert 0 <= slot.length <= self.context_length


def common_prefix(left: TokenIds, right: TokenIds) -> int:
    """How many leading tokens two arrays share."""
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and bool(differs[first]) else length
