"""Which custom ids an input has had so far, for many millions of them in little memory.

A 16-byte digest stands for each id: two different ids with one digest are not to be expected before 10**18 of them, so
none is refused by mistake. About 20 to 45 bytes an id; a Python set of the ids themselves would take 100 to 200.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from hashlib import blake2b
from struct import Struct

DIGEST_BYTES = 16
_FIRST_SLOTS = 1 << 10
_FULLEST = 0.6  # linear probing stays short below it
_halves: Callable[[bytes], tuple[int, ...]] = Struct("<QQ").unpack


class FirstLines:
    """A table of digests, each with the line it first stood on. Each line looks here: its loops are written out."""

    def __init__(self) -> None:
        self._count = 0
        self._make(_FIRST_SLOTS)

    def __len__(self) -> int:
        return self._count

    def find(self, digest: bytes, line: int) -> int:
        """The line that had this digest of 16 bytes first: `line` itself, at least 1, when it is new."""
        low, high = _halves(digest)
        lines, lows, highs, mask = self._lines, self._low, self._high, self._mask
        slot = low & mask
        while first := lines[slot]:
            if lows[slot] == low and highs[slot] == high:
                return first
            slot = (slot + 1) & mask
        lows[slot], highs[slot], lines[slot] = low, high, line
        self._count += 1
        if self._count > self._most:
            self._grow()
        return line

    def _make(self, slots: int) -> None:
        self._low = array("Q", bytes(8 * slots))
        self._high = array("Q", bytes(8 * slots))
        self._lines = array("I", bytes(4 * slots))  # 4 bytes wherever Python runs today
        self._mask = slots - 1
        self._most = int(_FULLEST * slots)

    def _grow(self) -> None:
        old_lows, old_highs, old_lines = self._low, self._high, self._lines
        self._make(2 * len(old_lines))
        lines, lows, highs, mask = self._lines, self._low, self._high, self._mask
        for low, high, line in zip(old_lows, old_highs, old_lines, strict=True):
            if line:
                slot = low & mask
                while lines[slot]:
                    slot = (slot + 1) & mask
                lows[slot], highs[slot], lines[slot] = low, high, line


class CustomIds:
    """A table of custom ids, each with the line it first stood on."""

    def __init__(self) -> None:
        self._first = FirstLines()

    def __len__(self) -> int:
        return len(self._first)

    def first_line(self, custom_id: str, line: int) -> int:
        """The line that had this id first: `line` itself, which must be at least 1, when the id is new."""
        return self._first.find(blake2b(custom_id.encode(), digest_size=DIGEST_BYTES).digest(), line)
