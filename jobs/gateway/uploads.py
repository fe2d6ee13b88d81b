"""A multipart upload as it streams in: the file goes to its place in pieces, the fields are few and small.

The order of the parts does not matter, and memory stays near two pieces whatever the file's size.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from fastapi.concurrency import run_in_threadpool
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from jobs.gateway.edge import too_large
from jobs.gateway.errors import ApiError
from storage.files import IncomingFile

FILE_FIELD = "file"
PIECE_BYTES = 1 << 20
MAX_FIELD_BYTES = 4096
MAX_PARTS = 16
MAX_FILENAME_CHARACTERS = 255
UNNAMED = "upload"


@dataclass
class Upload:
    """fields: the other parts, by name. filename: the last part of what the client said, safe to show."""

    contents: IncomingFile
    filename: str = UNNAMED
    has_file: bool = False
    fields: dict[str, str] = field(default_factory=dict)


async def receive_upload(content_type: str, chunks: AsyncIterator[bytes], files_dir: Path, *, max_bytes: int) -> Upload:
    """Read a whole multipart body. The caller keeps or discards its contents.

    Raises ApiError: not multipart, broken, without a file, too large. What was written is then gone.
    """
    form = _Form(_boundary(content_type))
    upload = Upload(await run_in_threadpool(IncomingFile, files_dir))
    try:
        async for chunk in chunks:
            form.feed(chunk)
            if form.file_bytes > max_bytes:
                raise too_large(max_bytes)
            if len(form.piece) >= PIECE_BYTES:
                piece, form.piece = form.piece, bytearray()
                await run_in_threadpool(upload.contents.write, piece)
        form.finish()
        await run_in_threadpool(upload.contents.write, form.piece)
        if form.filename is None:
            raise ApiError(
                400,
                "file is missing; send it as the multipart part `file`",
                code="missing_required_parameter",
                param=FILE_FIELD,
            )
    except BaseException:
        upload.contents.discard()
        raise
    upload.filename = shown_filename(form.filename)
    upload.fields = {name: _text(name, value) for name, value in form.fields.items()}
    return upload


def shown_filename(given: str) -> str:
    """A name to show and to send back: no folders, no control characters, not endless."""
    name = re.split(r"[/\\]", given)[-1]
    name = "".join(character if character.isprintable() else "_" for character in name).strip()
    if name.strip(".") == "":
        return UNNAMED
    return name[:MAX_FILENAME_CHARACTERS]


def _boundary(content_type: str) -> bytes:
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if kind.lower() != b"multipart/form-data" or not boundary:
        raise ApiError(
            415,
            "the body is not multipart/form-data with a boundary; send the parts `purpose` and `file`",
            code="unsupported_media_type",
        )
    return boundary


def _broken(reason: str) -> ApiError:
    return ApiError(400, f"the multipart body is broken: {reason}; send it again", code="invalid_multipart")


def _text(name: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise ApiError(400, f"{name} is not UTF-8; write text", code="invalid_value", param=name) from None


class _Form:
    """The parts of one body. piece: bytes of the file that nobody has taken yet."""

    def __init__(self, boundary: bytes) -> None:
        self.piece = bytearray()
        self.file_bytes = 0
        self.filename: str | None = None
        self.fields: dict[str, bytes] = {}
        self._parts = 0
        self._is_whole = False
        self._header_name = bytearray()
        self._header_value = bytearray()
        self._disposition: dict[bytes, bytes] = {}
        self._name: str | None = None  # of the field that is being read; None: the file, or a part to pass over
        self._is_file = False
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin_part,
                    "on_part_data": self._take,
                    "on_header_field": self._add_header_name,
                    "on_header_value": self._add_header_value,
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._begin_data,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise _broken(str(error)) from None

    def feed(self, chunk: bytes) -> None:
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise _broken(str(error)) from None

    def finish(self) -> None:
        try:
            self._parser.finalize()
        except FormParserError as error:
            raise _broken(str(error)) from None
        if not self._is_whole:
            raise _broken("it ends before its last boundary")

    def _end(self) -> None:
        self._is_whole = True

    def _begin_part(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise _broken(f"it has more than {MAX_PARTS} parts")
        self._disposition = {}
        self._header_name.clear()
        self._header_value.clear()

    def _add_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _add_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        if bytes(self._header_name).lower() == b"content-disposition":
            _, self._disposition = parse_options_header(bytes(self._header_value))
        self._header_name.clear()
        self._header_value.clear()

    def _begin_data(self) -> None:
        name = self._disposition.get(b"name", b"").decode("utf-8", "replace")
        self._is_file, self._name = False, None
        if name == FILE_FIELD:
            if self.filename is not None:
                raise ApiError(400, "there is more than one file; send one a call", code="invalid_value", param="file")
            self.filename = self._disposition.get(b"filename", b"").decode("utf-8", "replace")
            self._is_file = True
        elif name:
            self._name = name[:MAX_FIELD_BYTES]
            self.fields[self._name] = b""

    def _take(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self.piece += memoryview(data)[start:end]
            self.file_bytes += end - start
        elif self._name is not None:
            value = self.fields[self._name] + data[start:end]
            if len(value) > MAX_FIELD_BYTES:
                raise ApiError(
                    400,
                    f"{self._name[:60]} exceeds {MAX_FIELD_BYTES} bytes; shorten it",
                    code="string_above_max_length",
                    param=self._name[:60],
                )
            self.fields[self._name] = value
