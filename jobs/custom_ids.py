"""Which custom ids an input has had so far, for many millions of them in little memory.

A 16-byte digest stands for each id: two different ids with one digest are not to be expected before 10**18 of them, so
none is refused by mistake. About 20 to 45 bytes an id; a Python set of the ids themselves would take 100 to 200.
"""

from __future__ import annotations

import hashlib
from array import array

_FIRST_SLOTS = 1 << 10
_FULLEST = 0.6  # linear probing stays short below it
_DIGEST_BYTES = 16


class CustomIds:
    """A table of custom ids, each with the line it first stood on."""

    def __init__(self) -> None:
        self._count = 0
        self._make(_FIRST_SLOTS)

    def __len__(self) -> int:
        return self._count

    def first_line(self, custom_id: str, line: int) -> int:
        """The line that had this id first: `line` itself, which must be at least 1, when the id is new."""
        digest = hashlib.blake2b(custom_id.encode(), digest_size=_DIGEST_BYTES).digest()
        low, high = int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")
        slot = self._slot(low, high)
        if self._lines[slot]:
            return self._lines[slot]
        self._low[slot], self._high[slot], self._lines[slot] = low, high, line
        self._count += 1
        if self._count > _FULLEST * len(self._lines):
            self._grow()
        return line

    def _slot(self, low: int, high: int) -> int:
        """Where this digest stands, or the free slot where it belongs."""
        lines, lows, highs, mask = self._lines, self._low, self._high, len(self._lines) - 1
        slot = low & mask
        while lines[slot] and (lows[slot] != low or highs[slot] != high):
            slot = (slot + 1) & mask
        return slot

    def _make(self, slots: int) -> None:
        self._low = array("Q", bytes(8 * slots))
        self._high = array("Q", bytes(8 * slots))
        self._lines = array("I", bytes(4 * slots))  # 4 bytes wherever Python runs today

    def _grow(self) -> None:
        lows, highs, lines = self._low, self._high, self._lines
        self._make(2 * len(lines))
        for low, high, line in zip(lows, highs, lines, strict=True):
            if line:
                slot = self._slot(low, high)
                self._low[slot], self._high[slot], self._lines[slot] = low, high, line
