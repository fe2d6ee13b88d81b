"""A batch's results -> its output file and its error file, in input order.

HTTP 200 lines go to the output file, all others (refused, failed, never executed) to the error file, which is not
there when there are none. Each file is written beside its place, forced to the disk, and then put there in one step:
whoever reads it sees the whole of it or the one before. `-` is standard output, which takes both kinds of line.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from jobs.protocol import render_output_line, with_response_id
from storage import audit, queries
from storage.database import Database
from storage.errors import PromptmillError
from storage.queries import ResultRow

STDOUT = "-"
ERRORS_SUFFIX = ".errors.jsonl"
BUFFER_BYTES = 1 << 20
ASK_EVERY_LINES = 1000
# How our result lines begin. Far fewer bytes than a line may have: of whoever's file it is, little is read.
HEAD_BYTES = 8192
_HEAD = re.compile(rb'\{"id":"batch_req_([0-9a-f]{1,15})","custom_id":("(?:[^"\\]|\\.)*"|null),')


class WritingStopped(Exception):
    """Whoever asked for the results wants them no more."""


class OutputError(PromptmillError):
    """The results cannot be written where they were wanted."""


@dataclass(frozen=True, slots=True)
class FormerResults:
    """A file that was there before, and is not this batch's. batch: whose results it holds, if that is known."""

    path: Path
    batch: str | None


@dataclass(frozen=True)
class WrittenResults:
    """output, errors: where the lines went; None for standard output, and for errors when there are none.

    former: what stood where the output belongs. is_kept: it still stands there, for this batch has no answer to put in
    its place; output is None then.
    """

    output: Path | None
    errors: Path | None
    output_lines: int
    error_lines: int
    former: FormerResults | None = None
    is_kept: bool = False


def errors_path(output: Path) -> Path:
    """Where the error lines of an output file go: `answers.jsonl` -> `answers.errors.jsonl`."""
    stem = output.name.removesuffix(output.suffix) if output.suffix in (".jsonl", ".json", ".ndjson") else output.name
    return output.with_name(stem + ERRORS_SUFFIX)


def check_output(output: str | Path, inputs: Iterable[Path] = ()) -> None:
    """Find out before any work is done that results can be written. inputs: files that must not be overwritten.

    Raises OutputError: output_folder_missing, output_is_folder, output_not_writable, output_is_input, disk_full.
    """
    if str(output) == STDOUT:
        return
    output = Path(output)
    for path in (output, errors_path(output)):
        if path.is_dir():
            raise OutputError(f"{path} is a folder; name a file in it", code="output_is_folder")
        for read in inputs:
            if path.exists() and read.exists() and path.samefile(read):
                raise OutputError(f"{path} is read by this run; write to another file", code="output_is_input")
        if path.exists() and not os.access(path, os.W_OK):
            raise OutputError(
                f"{path} is read-only; change its rights or name another file", code="output_not_writable"
            )
    if _is_special(output):
        return
    folder = output.absolute().parent
    if not folder.is_dir():
        raise OutputError(f"{folder} is not there; make the folder first", code="output_folder_missing")
    probe = _temporary(output)
    with _explained(output):
        try:
            with probe.open("xb") as file:
                file.write(b"\n")
        finally:
            probe.unlink(missing_ok=True)


def write_results(
    database: Database, batch_id: int, output: str | Path, keep_on: Callable[[], bool] = lambda: True
) -> WrittenResults:
    """Write all results that a batch has so far. A file that is not this batch's is replaced by answers, never by none.

    Raises OutputError; WritingStopped once `keep_on` says no, which is asked now and then: the files in place are then
    as they were.
    """
    if str(output) == STDOUT:
        return _write_to_stdout(database, batch_id)
    output = Path(output)
    if _is_special(output):
        with _explained(output), output.open("wb", buffering=BUFFER_BYTES) as file:
            good, bad = _write_lines(queries.results_in_order(database, batch_id), file, file)
        return WrittenResults(output, None, good, bad)
    output = output.resolve() if output.is_symlink() else output
    errors = errors_path(output)
    former = _former_results(database, batch_id, output)
    with _explained(output), _replacing(output) as good_file, _replacing(errors) as bad_file:
        good, bad = _write_lines(queries.results_in_order(database, batch_id), good_file.file, bad_file.file, keep_on)
        # The output file last: who finds it may take the error file for final.
        if bad:
            bad_file.put_in_place()
        else:
            errors.unlink(missing_ok=True)  # that of an earlier run would be taken for this one's
        written = WrittenResults(output, errors if bad else None, good, bad, former)
        if former is not None and not good:
            return replace(written, output=None, is_kept=True)
        good_file.put_in_place()
    return written


def render_result(row: ResultRow) -> str:
    """One line of an output or error file, without its newline."""
    return render_output_line(
        request_id=f"{row.request_id:x}",
        custom_id=row.custom_id,
        status_code=row.status_code,
        response=with_response_id(row.response, f"{row.request_id:x}") if row.response else None,
        error_code=row.error_code,
        error_message=row.error_message,
    )


def _former_results(database: Database, batch_id: int, path: Path) -> FormerResults | None:
    """What would be lost with a file; None: nothing, or what this batch itself wrote there."""
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError:
        return None  # not there; whether it can be written is found out by writing
    if not head:
        return None
    found = _HEAD.match(head)
    if found is not None:
        with database.read() as connection:
            record = audit.find_request(connection, int(found[1], 16))
        # The numbers of requests are those of one database: another home's are told by the custom id.
        if record is not None and record.custom_id == json.loads(found[2]):
            return None if record.batch_id == batch_id else FormerResults(path, record.batch)
    return FormerResults(path, None)


def _write_to_stdout(database: Database, batch_id: int) -> WrittenResults:
    out = sys.stdout.buffer
    good, bad = _write_lines(queries.results_in_order(database, batch_id), out, out)
    out.flush()
    return WrittenResults(None, None, good, bad)


def _write_lines(
    rows: Iterator[ResultRow], good_file: BinaryIO, bad_file: BinaryIO, keep_on: Callable[[], bool] = lambda: True
) -> tuple[int, int]:
    good = bad = 0
    for row in rows:
        if (good + bad) % ASK_EVERY_LINES == 0 and not keep_on():
            raise WritingStopped
        line = render_result(row).encode() + b"\n"
        if row.status_code == 200:
            good_file.write(line)
            good += 1
        else:
            bad_file.write(line)
            bad += 1
    return good, bad


class _Replacement:
    """A file written beside its place, with the rights of the one it replaces."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.temporary = _temporary(path)
        self.file = self.temporary.open("xb", buffering=BUFFER_BYTES)

    def put_in_place(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        if self.path.exists():
            shutil.copymode(self.path, self.temporary)
        self.temporary.replace(self.path)
        _sync_folder(self.path.absolute().parent)

    def discard(self) -> None:
        with contextlib.suppress(OSError):  # a full disk is reported by the write that failed first
            self.file.close()
        self.temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[_Replacement]:
    replacement = _Replacement(path)
    try:
        yield replacement
    finally:
        replacement.discard()


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OutputError(
                f"{path} does not fit on its disk; free some space and run the same command again (no answer is lost)",
                code="disk_full",
            ) from error
        raise OutputError(
            f"{path} cannot be written: {error.strerror or error}; name a file in a folder where you may write",
            code="output_not_writable",
        ) from error


def _is_special(path: Path) -> bool:
    """A device or a pipe: written to as it is, never replaced."""
    return path.exists() and not path.is_file()


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name[:200]}.{uuid.uuid4().hex[:12]}.tmp")


def _sync_folder(folder: Path) -> None:
    """Make a rename last through a power cut, where the system can (Windows opens no folders)."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
