"""An input as bytes: a file, standard input or a pipe; its digest; its lines, one at a time and bounded.

What cannot be read twice is spooled to a file first, so that the digest can be known before the first line is
committed. A gzip stream is read through whatever its name says. Lines are split at newlines alone, as JSON Lines are;
what is in them is not looked at here, but for a byte-order mark. Memory stays near one line.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import os
import shutil
import stat
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePath
from types import TracebackType
from typing import BinaryIO, cast

from jobs.protocol import show_name
from storage.errors import InvalidRequest, PromptmillError

MAX_LINE_BYTES = 10_000_000  # a 2,000,000-token prompt fits; what is longer is a file without newlines, not a prompt
CHUNK_BYTES = 1 << 20
GZIP_MAGIC = b"\x1f\x8b"
UTF8_MARK = b"\xef\xbb\xbf"
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
STDIN = "-"

RawLine = tuple[int, bytes | InvalidRequest]


class InputError(PromptmillError):
    """The input as a whole cannot be used; no line of it runs."""


class Source:
    """An open input that can be read from its start as often as needed. Close it, or use `with`."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        """name: the file's own, without folders."""
        self.name = show_name(name, 120)  # as messages show it, and as it is stored with refused lines
        plain = name[:-3] if name.lower().endswith(".gz") else name
        self.extension = PurePath(plain).suffix.lower()
        self._file = file
        self._state = _file_state(file)

    def sha256(self) -> str:
        """The digest of the bytes as they lie there, compressed or not."""
        self._file.seek(0)
        try:
            digest = hashlib.sha256()
            while chunk := self._file.read(CHUNK_BYTES):
                digest.update(chunk)
        except OSError as error:
            raise _unreadable(self.name, error) from error
        return digest.hexdigest()

    def size_bytes(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def position_bytes(self) -> int:
        """How far the file has been read: for progress."""
        return self._file.tell()

    def binary(self) -> BinaryIO:
        """The bytes from the start, for formats that are not made of lines. Do not close it."""
        self._file.seek(0)
        return self._file

    def first_bytes(self, count: int = 64) -> bytes:
        """The beginning, decompressed, without a byte-order mark and leading white space."""
        try:
            head = self._open_plain().read(count + 4096)
        except (OSError, EOFError, zlib.error):
            return b""  # reading the lines will say what is wrong
        return head.removeprefix(UTF8_MARK).lstrip()[:count]

    def lines(self, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[RawLine]:
        """Each line with its number from 1 and its newline, or the reason why it could not be read.

        Raises InputError when the file cannot be read, is UTF-16, or changed since it was opened.
        """
        stream = self._open_plain()
        number = 0
        try:
            while data := stream.readline(max_line_bytes + 1):
                number += 1
                if len(data) > max_line_bytes and not data.endswith(b"\n"):
                    size = len(data) + _skip_line(stream)
                    yield number, _too_long(size, max_line_bytes)
                    continue
                if number == 1:
                    if data.startswith(UTF16_MARKS):
                        raise InputError(
                            f"{self.name} is UTF-16, and only UTF-8 is read; save it as UTF-8", code="invalid_encoding"
                        )
                    data = data.removeprefix(UTF8_MARK)
                yield number, data
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            reason = "ends before its end mark" if isinstance(error, EOFError) else f"is damaged ({error})"
            yield (
                number + 1,
                InvalidRequest(
                    f"the gzip stream {reason}, after {number} whole lines; what follows is lost, "
                    "copy or compress the file again",
                    code="truncated_gzip",
                ),
            )
        except OSError as error:
            raise _unreadable(self.name, error) from error
        self.check_unchanged()

    def check_unchanged(self) -> None:
        """Raise InputError when the file was written to since it was opened: its digest would name other lines."""
        if _file_state(self._file) != self._state:
            raise InputError(
                f"{self.name} changed while it was read; submit it again when nothing writes to it",
                code="input_changed",
            )

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_plain(self) -> BinaryIO:
        self._file.seek(0)
        magic = self._file.read(2)
        self._file.seek(0)
        return cast(BinaryIO, gzip.GzipFile(fileobj=self._file, mode="rb")) if magic == GZIP_MAGIC else self._file


def open_source(path: str | Path, spool_folder: Path) -> Source:
    """Open a file, or `-` for standard input. What is no regular file is spooled to `spool_folder` first.

    Raises InputError: input_not_found, unreadable_input, disk_full.
    """
    if str(path) == STDIN:
        return Source(_spool(sys.stdin.buffer, "standard input", spool_folder), "standard input")
    path = Path(path)
    try:
        file = path.open("rb")
    except FileNotFoundError as error:
        raise InputError(f"{path} is not there; check the name", code="input_not_found") from error
    except IsADirectoryError as error:
        raise InputError(f"{path} is a folder; name a file in it", code="unreadable_input") from error
    except OSError as error:
        raise _unreadable(str(path), error) from error
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return Source(file, path.name)
    with file:
        return Source(_spool(file, str(path), spool_folder), path.name)


def decode(data: bytes) -> str:
    """A line's text. Raises InvalidRequest naming the first byte that is not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"byte {error.start + 1} (0x{data[error.start]:02x}) is not UTF-8; save the file as UTF-8 (is it Latin-1 "
            "or Windows-1252?)",
            code="invalid_encoding",
        ) from None


def _spool(stream: BinaryIO, name: str, folder: Path) -> BinaryIO:
    """Copy a stream to a file without a name, which is gone when it is closed, however the process ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (the Source closes it)
    except OSError as error:
        raise InputError(
            f"{name} cannot be kept in {folder}: {error.strerror}; free or change the home folder",
            code="disk_full" if error.errno in _FULL else "unwritable_home",
        ) from error
    try:
        shutil.copyfileobj(stream, file, CHUNK_BYTES)
        file.flush()
    except OSError as error:
        file.close()
        if error.errno in _FULL:
            raise InputError(
                f"{name} does not fit on the disk of {folder}; free some space, or give a file instead",
                code="disk_full",
            ) from error
        raise _unreadable(name, error) from error
    return cast(BinaryIO, file)


_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def _skip_line(stream: BinaryIO) -> int:
    """Read to the end of a line without keeping it. Returns the bytes passed over, its newline not counted."""
    skipped = 0
    while part := stream.readline(CHUNK_BYTES):
        skipped += len(part)
        if part.endswith(b"\n"):
            return skipped - 1
    return skipped


def _too_long(size: int, bound: int) -> InvalidRequest:
    return InvalidRequest(
        f"the line has {size:,} bytes, which exceeds {bound:,}; is it a file without newlines? split it",
        code="line_too_long",
    )


def _unreadable(name: str, error: OSError) -> InputError:
    return InputError(
        f"{name} cannot be read: {error.strerror or error}; check its rights and the disk", code="unreadable_input"
    )


def _file_state(file: BinaryIO) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns
