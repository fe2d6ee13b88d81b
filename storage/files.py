"""Uploaded files: their contents in the files folder and their rows, and the removal of what has expired.

Contents come first, the row last: a file that users see lies whole on the disk. A crash in between leaves contents
without a row, which `sweep_files` finds by their names. No name that a user gave ever becomes a path.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
import uuid
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path

from sqlalchemy import Connection, delete, insert, select, update

from storage.bulk import storable
from storage.database import Database
from storage.models import BATCHES, FILES, FilePurpose
from storage.queries import FileRow
from storage.transitions import lock_tenant

UPLOAD_BEGINS = "upload-"
PART_BEGINS = ".upload-"  # of contents that are still coming in
# Contents without a row, or an upload that does not grow, are an interrupted call's after this time.
LEFT_BEHIND_S = 3600.0
SWEEP_FILES = 500


@dataclass(frozen=True, slots=True)
class NewUpload:
    """A file whose contents lie in place. filename: as users see it. sha256: of the contents."""

    public_id: str
    tenant: str
    purpose: FilePurpose
    filename: str
    path: str
    bytes: int
    lines: int
    sha256: str
    expires_at: float | None = None
    api_key_id: int | None = None


class IncomingFile:
    """Contents on their way in: written beside their place, then kept or discarded. Memory: what `write` is given."""

    def __init__(self, files_dir: Path) -> None:
        files_dir.mkdir(parents=True, exist_ok=True)
        number = uuid.uuid4().hex
        self.path = f"{UPLOAD_BEGINS}{number}.jsonl"
        self.bytes = 0
        self.lines = 0
        self._files_dir = files_dir
        self._part = files_dir / f"{PART_BEGINS}{number}.part"
        self._digest = hashlib.sha256()
        self._file = self._part.open("xb")

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def write(self, data: bytes | bytearray) -> None:
        self._file.write(data)
        self._digest.update(data)
        self.bytes += len(data)
        self.lines += data.count(b"\n")

    def put_in_place(self) -> None:
        """Force the contents to the disk and give them their name."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._part.replace(self._files_dir / self.path)
        if os.name == "posix":
            folder = os.open(self._files_dir, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def discard(self) -> None:
        """Remove whatever there is. After `put_in_place` too: for a row that could not be written."""
        with contextlib.suppress(OSError):
            self._file.close()
        for path in (self._part, self._files_dir / self.path):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def make_file_id() -> str:
    return f"file-{uuid.uuid4().hex}"


def add_upload(connection: Connection, upload: NewUpload, now: float, *, same_within_s: float) -> FileRow:
    """Write an upload's row, or find the one that the same upload made a moment ago: then another id comes back.

    A client that did not get the answer sends the file again; it gets the same file, not a second one.
    """
    lock_tenant(connection, upload.tenant)  # the first of two that come at once is found by the second
    repeated = connection.execute(
        select(FILES)
        .where(
            FILES.c.tenant == upload.tenant,
            FILES.c.sha256 == upload.sha256,
            FILES.c.bytes == upload.bytes,
            FILES.c.filename == storable(upload.filename),
            FILES.c.purpose == upload.purpose.value,
            FILES.c.created_at >= now - same_within_s,
        )
        .order_by(FILES.c.id.desc())
        .limit(1)
    ).first()
    if repeated is not None:
        return FileRow(**repeated._mapping)
    values = {
        **asdict(upload),
        "purpose": upload.purpose.value,
        "filename": storable(upload.filename),
        "created_at": now,
    }
    row = connection.execute(insert(FILES).values(values).returning(*FILES.c)).one()
    return FileRow(**row._mapping)


def find_upload(connection: Connection, tenant: str, public_id: str) -> FileRow | None:
    """A tenant's file of any purpose."""
    row = connection.execute(select(FILES).where(FILES.c.public_id == public_id, FILES.c.tenant == tenant)).first()
    return None if row is None else FileRow(**row._mapping)


def list_files(
    connection: Connection,
    tenant: str,
    *,
    purposes: Collection[FilePurpose] = tuple(FilePurpose),
    limit: int,
    after: FileRow | None = None,
    newest_first: bool = True,
) -> list[FileRow]:
    """A tenant's files in the order in which they were made. after: go on behind that one."""
    statement = (
        select(FILES)
        .where(FILES.c.tenant == tenant, FILES.c.purpose.in_([purpose.value for purpose in purposes]))
        .order_by(FILES.c.id.desc() if newest_first else FILES.c.id)
        .limit(limit)
    )
    if after is not None:
        statement = statement.where(FILES.c.id < after.id if newest_first else FILES.c.id > after.id)
    return [FileRow(**row._mapping) for row in connection.execute(statement)]


def delete_rows(connection: Connection, ids: Collection[int]) -> int:
    """Remove files' rows; batches that name them as theirs no longer do. Unlink the contents afterwards."""
    if not ids:
        return 0
    for column in (BATCHES.c.output_file_id, BATCHES.c.error_file_id):
        connection.execute(update(BATCHES).where(column.in_(ids)).values({column: None}))
    return connection.execute(delete(FILES).where(FILES.c.id.in_(ids))).rowcount


def remove_contents(files_dir: Path, path: str) -> None:
    with contextlib.suppress(OSError):
        (files_dir / path).unlink(missing_ok=True)


def sweep_files(database: Database, files_dir: Path, now: float) -> int:
    """Remove files that have expired, and what interrupted uploads left behind. Returns how many of both.

    Safe to run anywhere at any time; any number of processes may.
    """
    removed = 0
    while True:
        with database.read() as connection:
            statement = select(FILES.c.id, FILES.c.path).where(FILES.c.expires_at <= now).limit(SWEEP_FILES)
            expired = connection.execute(statement).all()
        if not expired:
            break
        ids = [row.id for row in expired]
        database.retry(lambda connection, ids=ids: delete_rows(connection, ids))  # type: ignore[misc]
        for row in expired:
            remove_contents(files_dir, row.path)
        removed += len(expired)
    return removed + _remove_left_behind(database, files_dir)


def _remove_left_behind(database: Database, files_dir: Path) -> int:
    """By the host's own clock, which the folder's times are by."""
    old: list[str] = []
    try:
        with os.scandir(files_dir) as entries:
            for entry in entries:
                if not entry.name.startswith((UPLOAD_BEGINS, PART_BEGINS)):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    if time.time() - entry.stat().st_mtime > LEFT_BEHIND_S:
                        old.append(entry.name)
    except FileNotFoundError:
        return 0
    removed = 0
    for begin in range(0, len(old), SWEEP_FILES):
        names = old[begin : begin + SWEEP_FILES]
        with database.read() as connection:
            known = set(connection.execute(select(FILES.c.path).where(FILES.c.path.in_(names))).scalars())
        for name in names:
            if name not in known:
                remove_contents(files_dir, name)
                removed += 1
    return removed
