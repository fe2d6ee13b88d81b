"""Whether anybody has committed to the database, asked at next to no cost: so that looking often is no waste.

SQLite counts the commits of other connections (`PRAGMA data_version`), and telling the count takes some microseconds.
Of Postgres nothing is known here: whoever asks goes by the clock, as everybody does who asks nothing.
"""

from __future__ import annotations

import sqlite3
from typing import Any

from sqlalchemy import exc

from storage.database import Database


class ChangeWatch:
    """One connection that is kept for this question. Use it from one thread at a time."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._connection: Any = None
        self._seen: int | None = None

    def has_changed(self) -> bool:
        """Whether something was committed since the last call. The first one, and any in trouble, says no."""
        if not self._database.is_sqlite:
            return False
        try:
            if self._connection is None:
                self._connection = self._database.engine.raw_connection()
            version = int(self._connection.cursor().execute("PRAGMA data_version").fetchone()[0])
        except (sqlite3.Error, exc.SQLAlchemyError):
            self.close()  # whoever then reads the database meets the same trouble and says so
            return False
        has_changed = self._seen is not None and version != self._seen
        self._seen = version
        return has_changed

    def close(self) -> None:
        self._seen = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None
