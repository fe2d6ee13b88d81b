"""API keys: made, shown once, kept as digests, and looked up by whoever takes work from outside.

A key is `pm-` and 256 random bits. Only its SHA-256 is kept: with that many random bits nothing slower is needed, and
a lookup by digest tells a guesser nothing through its time. Keys never appear in logs or messages.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
import uuid
from dataclasses import dataclass

import structlog

from storage import queries, transitions
from storage.database import Database
from storage.errors import PromptmillError, StorageError
from storage.queries import ApiKeyRow
from storage.transitions import NewApiKey

PREFIX = "pm-"
SECRET_BYTES = 32
SHOWN_CHARACTERS = len(PREFIX) + 6  # enough to tell keys apart, far too little to guess the rest
LONGEST_KEY = 200  # characters; ours have 46
# What a process knows of a key it holds for true for so long: a revoked key is refused everywhere within this time.
KNOWN_FOR_S = 2.0
MOST_KNOWN = 10_000
# `last_used_at` is kept to the minute: a write for each call would cost more than the call.
TOUCH_EVERY_S = 60.0

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls: a tenant, by one of its keys. No key: the gateway is open on loopback."""

    tenant: str
    api_key_id: int | None
    key_name: str | None


class KeyRefused(PromptmillError):
    """The key is unknown, revoked or expired. Which of them is told only to whoever has the key itself."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="invalid_api_key")


@dataclass(frozen=True, slots=True)
class MadeKey:
    """key: shown to its owner now, and never again."""

    key: str
    row: ApiKeyRow


def make_key(database: Database, *, tenant: str, name: str, expires_at: float | None = None) -> MadeKey:
    """Make a key for a tenant, which is made too if it is new."""
    key = PREFIX + secrets.token_urlsafe(SECRET_BYTES)
    new = NewApiKey(
        public_id=f"key_{uuid.uuid4().hex[:24]}",
        tenant=tenant,
        name=name,
        sha256=digest(key),
        shown_prefix=key[:SHOWN_CHARACTERS],
        expires_at=expires_at,
    )
    database.retry(lambda connection: transitions.create_api_key(connection, new, database.now()))
    with database.read() as connection:
        row = queries.find_api_key(connection, new.sha256)
    assert row is not None, "it was just written"
    return MadeKey(key, row)


def revoke_key(database: Database, named: str) -> tuple[ApiKeyRow, bool]:
    """End the key of that id, or of the beginning that is shown of it. Returns it, and whether it was alive.

    Raises PromptmillError: key_not_found, key_ambiguous.
    """
    with database.read() as connection:
        keys = queries.list_api_keys(connection)
    found = [key for key in keys if key.public_id == named]
    if not found and len(named) >= SHOWN_CHARACTERS:
        found = [key for key in keys if named.startswith(key.shown_prefix)]
    if not found:
        raise PromptmillError(
            f"there is no key {named[:SHOWN_CHARACTERS] if named.startswith(PREFIX) else named}; "
            "promptmill key list shows those there are",
            code="key_not_found",
        )
    if len(found) > 1:
        raise PromptmillError(
            f"{named[:SHOWN_CHARACTERS]} is the beginning of {len(found)} keys "
            f"({', '.join(key.public_id for key in found)}); name one by its id",
            code="key_ambiguous",
        )
    (key,) = found
    was_alive = database.retry(lambda connection: transitions.revoke_api_key(connection, key.id, database.now()))
    return key, was_alive


def digest(key: str) -> str:
    return hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()


class KeyRing:
    """Looks keys up, and remembers for two seconds what it found. Threads may share it."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._known: dict[str, tuple[float, float, ApiKeyRow]] = {}  # digest -> steady time, database time, key
        self._touched: dict[int, float] = {}
        self._lock = threading.Lock()

    def known(self, key: str) -> Caller | None:
        """The caller of a key that was looked up a moment ago; None: look it up. Costs no read. Raises KeyRefused."""
        found = self._known.get(digest(key))
        if found is None:
            return None
        looked_up_at, then, row = found
        age_s = time.monotonic() - looked_up_at
        return _admit(row, then + age_s) if age_s <= KNOWN_FOR_S else None

    def find(self, key: str) -> Caller:
        """The caller that a key stands for. Raises KeyRefused, and StorageError when the database is away."""
        if not key or len(key) > LONGEST_KEY:
            raise unknown_key()
        caller = self.known(key)
        if caller is not None:
            return caller
        sha256 = digest(key)
        with self._database.read() as connection:
            row = queries.find_api_key(connection, sha256)
        # Equal by the index already; compared once more so that no collation can make two keys one.
        if row is None or not hmac.compare_digest(row.sha256, sha256):
            raise unknown_key()
        now = self._database.now()
        with self._lock:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[sha256] = (time.monotonic(), now, row)
        caller = _admit(row, now)
        self._touch(row, now)
        return caller

    def _touch(self, row: ApiKeyRow, now: float) -> None:
        with self._lock:
            if now - max(self._touched.get(row.id, 0.0), row.last_used_at or 0.0) < TOUCH_EVERY_S:
                return
            self._touched[row.id] = now
        try:
            with self._database.write(durable=False) as connection:
                transitions.touch_api_key(connection, row.id, now, every_s=TOUCH_EVERY_S)
        except StorageError as error:
            if not error.retryable:
                raise
            log.warning("key_use_not_noted", key=row.public_id, code=error.code)  # nobody's call fails for that


def _admit(row: ApiKeyRow, now: float) -> Caller:
    if row.revoked_at is not None:
        raise KeyRefused(f"the key {row.shown_prefix}... was revoked; take another one")
    if row.expires_at is not None and row.expires_at <= now:
        raise KeyRefused(f"the key {row.shown_prefix}... has expired; take another one")
    return Caller(row.tenant, row.id, row.name)


def unknown_key() -> KeyRefused:
    return KeyRefused("the API key is not known here; check it, or have one made: promptmill key create")
