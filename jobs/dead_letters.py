"""Where messages go that were nothing we could take, with the reason: a bounded stream in Redis, for a person to read.

Whatever looks like an API key is taken out first.
"""

from __future__ import annotations

import re
from typing import Any

# The last so many are kept; `~` lets Redis drop them in whole blocks.
MOST_LETTERS = 1000
# What is kept of one, to see what it was.
LETTER_CHARACTERS = 8192

_KEY = re.compile(rb"pm-[A-Za-z0-9_-]{16,}")


def bury(pipeline: Any, stream: str, entry: bytes, *, code: str, reason: str, entry_id: str = "") -> None:
    """Add a letter, in a pipeline of the redis package."""
    fields = {
        "code": code,
        "reason": reason,
        "bytes": len(entry),
        "entry": _KEY.sub(b"pm-***", entry).decode(errors="replace")[:LETTER_CHARACTERS],
    }
    if entry_id:
        fields["id"] = entry_id
    pipeline.xadd(stream, fields, maxlen=MOST_LETTERS, approximate=True)
