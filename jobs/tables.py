"""CSV, TSV and Parquet as rows: a number and the values by column name, or why the row could not be read.

A row's number is the line it begins on (CSV, TSV) or its place from 1 (Parquet). CSV is read as spreadsheets write
it: a field in double quotes may hold delimiters, newlines and doubled quotes; a quote inside an unquoted field is a
character. A quote that is never closed costs the row it opens in, not the rest of the file. The standard library's
reader is not used because its field size limit belongs to the whole process and an open quote takes all that follows.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from jobs.protocol import show_name
from jobs.source import InputError, RawLine, Source, decode
from storage.errors import InvalidRequest

PARQUET_ROWS = 256  # turned into Python values at once

Row = tuple[int, Mapping[str, object] | InvalidRequest]


@dataclass(frozen=True)
class Table:
    """columns: in the file's order. rows: read once, as they come."""

    columns: tuple[str, ...]
    rows: Iterator[Row]


def read_delimited(source: Source, delimiter: str, max_row_bytes: int) -> Table:
    """A CSV or TSV file with a header. Raises InputError: empty_file, invalid_header."""
    records = _records(source.lines(max_row_bytes), delimiter, max_row_bytes)
    header = next(records, None)
    if header is None:
        raise InputError(f"{source.name} is empty; write a header and at least one row", code="empty_file")
    number, names = header
    if isinstance(names, InvalidRequest):
        raise InputError(f"{source.name} line {number}: the header: {names.message}", code="invalid_header")
    columns = tuple(name.strip() for name in names)
    _check_header(columns, f"{source.name} line {number}")
    return Table(columns, _rows(records, columns))


def read_parquet(source: Source, wanted: Sequence[str] | None) -> Table:
    """A Parquet file; of its columns only those wanted are read (None: all)."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise InputError(
            "reading Parquet needs pyarrow; install it with: pip install 'promptmill[parquet]'",
            code="missing_dependency",
        ) from error
    try:
        file = parquet.ParquetFile(source.binary())
    except (pa.ArrowException, OSError, ValueError) as error:
        raise InputError(
            f"{source.name} is not a whole Parquet file ({_first_line(error)}); write it again", code="invalid_parquet"
        ) from error
    columns = tuple(file.schema_arrow.names)
    _check_header(columns, source.name)

    def rows() -> Iterator[Row]:
        number = 0
        try:
            read = [name for name in columns if wanted is None or name in wanted]
            for page in file.iter_batches(batch_size=PARQUET_ROWS, columns=read):
                for values in page.to_pylist():
                    number += 1
                    yield number, values
        except (pa.ArrowException, OSError, ValueError) as error:
            yield (
                number + 1,
                InvalidRequest(
                    f"the Parquet file is damaged after {number} rows ({_first_line(error)}); what follows is lost, "
                    "write it again",
                    code="invalid_parquet",
                ),
            )
        source.check_unchanged()

    return Table(columns, rows())


def _check_header(columns: Sequence[str], where: str) -> None:
    for place, name in enumerate(columns, start=1):
        if not name:
            raise InputError(
                f"{where}: column {place} of {len(columns)} has no name; name it, or remove the column",
                code="invalid_header",
            )
    name, count = Counter(columns).most_common(1)[0]
    if count > 1:
        raise InputError(
            f"{where}: {count} columns are named '{show_name(name)}'; rename all but one", code="invalid_header"
        )


def _rows(records: Iterator[tuple[int, list[str] | InvalidRequest]], columns: tuple[str, ...]) -> Iterator[Row]:
    for number, fields in records:
        if isinstance(fields, InvalidRequest):
            yield number, fields
        elif len(fields) != len(columns):
            way_out = "add the missing ones" if len(fields) < len(columns) else "put fields with delimiters in quotes"
            message = f"the row has {len(fields)} fields and the header {len(columns)}; {way_out}"
            yield number, InvalidRequest(message, code="wrong_field_count")
        else:
            yield number, dict(zip(columns, fields, strict=True))


def _records(
    lines: Iterator[RawLine], delimiter: str, max_bytes: int
) -> Iterator[tuple[int, list[str] | InvalidRequest]]:
    """Physical lines -> records of fields. A record that goes wrong is given up at its first line."""
    again: deque[RawLine] = deque()  # lines that a failed record had taken

    def next_line() -> RawLine | None:
        return again.popleft() if again else next(lines, None)

    while (line := next_line()) is not None:
        start, data = line
        if isinstance(data, InvalidRequest):
            yield start, data
            continue
        if not data.strip():
            continue
        record = _Record(delimiter)
        size = len(data)
        taken: list[RawLine] = []
        try:
            complete = record.feed(decode(data))
            while not complete:
                following = next_line()
                if following is None:
                    raise _unclosed("before the file ends")
                taken.append(following)
                text = _continuation(following)
                size += len(text)
                if size > max_bytes:
                    raise _unclosed(f"within {max_bytes:,} characters")
                complete = record.feed(text)
        except InvalidRequest as error:
            yield start, error
            again.extendleft(reversed(taken))
        else:
            yield start, record.fields


def _continuation(line: RawLine) -> str:
    number, data = line
    if not isinstance(data, InvalidRequest):
        with suppress(InvalidRequest):
            return decode(data)
    raise _unclosed(f"before line {number}, which cannot be read")


class _Record:
    """One record as its physical lines come in."""

    def __init__(self, delimiter: str) -> None:
        self.fields: list[str] = []
        self._delimiter = delimiter
        self._quoted: list[str] | None = None  # pieces of a quoted field that is still open

    def feed(self, text: str) -> bool:
        """Take one physical line, its newline included. Returns whether the record is complete."""
        if self._quoted is None and '"' not in text:
            self.fields = text.rstrip("\r\n").split(self._delimiter)
            return True
        position = 0
        while True:
            if self._quoted is None and text.startswith('"', position):
                self._quoted = []
                position += 1
            if self._quoted is not None:
                end = self._read_quoted(text, position)
                if end is None:
                    return False
            else:
                found = text.find(self._delimiter, position)
                end = found if found >= 0 else len(text.rstrip("\r\n"))
                self.fields.append(text[position:end])
            if text.startswith(self._delimiter, end):
                position = end + 1
            elif not text[end:].strip("\r\n"):
                return True
            else:
                raise InvalidRequest(
                    f"text follows the closing quote of field {len(self.fields)}; double the quotes inside a field",
                    code="invalid_csv",
                )

    def _read_quoted(self, text: str, position: int) -> int | None:
        """Read on in a quoted field. Returns the position after its closing quote; None: it goes on."""
        assert self._quoted is not None
        while True:
            quote = text.find('"', position)
            if quote < 0:
                self._quoted.append(text[position:])
                return None
            self._quoted.append(text[position:quote])
            if not text.startswith('"', quote + 1):
                self.fields.append("".join(self._quoted))
                self._quoted = None
                return quote + 1
            self._quoted.append('"')
            position = quote + 2


def _unclosed(where: str) -> InvalidRequest:
    return InvalidRequest(
        f'a quote that opens in this row is not closed {where}; close it, or double it ("") inside a field',
        code="invalid_csv",
    )


def _first_line(error: Exception) -> str:
    return show_name(str(error).partition("\n")[0], 200) or type(error).__name__
