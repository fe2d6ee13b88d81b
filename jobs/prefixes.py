"""Which beginning a request shares with its neighbours, so that it is stored once and dispatched together.

A prefix is only how a request is kept: prefix + own text is the user's text, byte for byte, and forgetting all
prefixes would change no answer. In a run with `--context` the context is the prefix; everywhere else it is found here.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

MIN_CHARACTERS = 1024  # what is shorter costs less than the row that would hold it
MAX_CHARACTERS = 1 << 18  # looked at of each text: bounds memory, whatever the input
REMEMBERED = 32  # different beginnings kept in sight, for inputs that take turns between a few documents


@dataclass(slots=True)
class _Beginning:
    """What is known of the texts that share their first MIN_CHARACTERS."""

    last: str
    prefix: str = ""


class PrefixFinder:
    """Finds the beginning that a text shares with earlier ones."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, _Beginning] = OrderedDict()

    def find(self, text: str) -> str:
        """The shared beginning of this text, at least MIN_CHARACTERS long, or "" when it shares none."""
        if len(text) < MIN_CHARACTERS:
            return ""
        text = text[:MAX_CHARACTERS]
        key = text[:MIN_CHARACTERS]
        known = self._known.get(key)
        if known is None:
            self._known[key] = _Beginning(text)
            if len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
            return ""
        self._known.move_to_end(key)
        prefix = known.prefix
        # Keep the prefix in use while it fits, so that few are stored, unless the neighbour shares twice as much.
        if not prefix or not text.startswith(prefix) or _shares(text, known.last, 2 * len(prefix)):
            prefix = known.prefix = _whole_lines(text, _shared_length(text, known.last))
        known.last = text
        return prefix


def _shares(text: str, other: str, length: int) -> bool:
    return len(text) >= length and text[:length] == other[:length]


def _shared_length(text: str, other: str) -> int:
    """How many characters two texts begin with in common."""
    low, high = MIN_CHARACTERS, min(len(text), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if text[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _whole_lines(text: str, length: int) -> str:
    """Cut back to the end of a line: two questions that happen to begin alike are not part of the document."""
    if length == len(text):
        return text
    end = text.rfind("\n", MIN_CHARACTERS - 1, length) + 1
    return text[: end or length]
