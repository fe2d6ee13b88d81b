"""A batch as a table: one row for each line in input order, as JSONL, CSV or Parquet, beside the input's own columns.

Our columns come after the input's; an input column whose name one of ours has is written as `input.NAME`. Rows of the
input that have no result yet are there too, with the status `unfinished`. The file is put in place in one step.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from jobs.inputs import (
    ID_COLUMNS,
    InputFormat,
    InputOptions,
    InputReader,
    WholeLine,
    guess_format,
    line_id,
    row_id,
)
from jobs.protocol import (
    Body,
    ChatBody,
    CompletionBody,
    Endpoint,
    dump_json,
    load_body,
    restore_prefix,
    result_id,
    show,
)
from jobs.results import STDOUT, OutputError
from jobs.source import MAX_LINE_BYTES, InputError, Source, decode
from jobs.tables import read_delimited, read_parquet
from jobs.template import CONTEXT_SEPARATOR, PromptTemplate
from storage import audit, queries
from storage.database import Database
from storage.errors import InvalidRequest, PromptmillError
from storage.queries import BatchRow, ResultRow, StoredRequest

PAGE_ROWS = 1000
UNFINISHED = "unfinished"
TEXT_COLUMN = "prompt"  # of a plain text input

# Name -> kind, in order. The answer is the first choice's text.
COLUMNS: Mapping[str, type] = {
    "request_id": str,
    "line": int,
    "custom_id": str,
    "status": str,
    "answer": str,
    "finish_reason": str,
    "error_code": str,
    "error_message": str,
    "prompt_tokens": int,
    "cached_tokens": int,
    "completion_tokens": int,
    "attempts": int,
    "worker": str,
    "device": str,
    "artifact_digest": str,
    "served_from": str,
    "queue_s": float,
    "time_to_first_token_s": float,
    "total_s": float,
    "finished_at": float,
}
_FROM_ATTEMPT = (
    "finish_reason",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "worker",
    "device",
    "artifact_digest",
    "served_from",
    "queue_s",
    "time_to_first_token_s",
    "total_s",
)


class ExportFormat(StrEnum):
    JSONL = "jsonl"
    CSV = "csv"
    PARQUET = "parquet"


FORMATS_BY_EXTENSION: Mapping[str, ExportFormat] = {
    ".jsonl": ExportFormat.JSONL,
    ".ndjson": ExportFormat.JSONL,
    ".json": ExportFormat.JSONL,
    ".csv": ExportFormat.CSV,
    ".parquet": ExportFormat.PARQUET,
    ".pq": ExportFormat.PARQUET,
}


class ExportError(PromptmillError):
    """The batch cannot be written as that table."""


@dataclass(frozen=True, slots=True)
class InputTable:
    """The batch's input as rows. id_column: None takes `custom_id`, else `id`, where there is one.

    template: that made the prompts; None: there was none, or the prompts of its rows are not compared.
    """

    source: Source
    format: InputFormat | None = None
    id_column: str | None = None
    template: PromptTemplate | None = None


def export_batch(
    database: Database,
    batch: BatchRow,
    output: str | Path,
    format_: ExportFormat,
    *,
    joined: InputTable | None = None,
) -> int:
    """Write the table. Returns its rows.

    Raises ExportError when the input is not the batch's, OutputError when the file cannot be written.
    """
    columns: list[str] = []
    if joined is None:
        rows = export_rows(database, batch.id)
    else:
        check_input(database, batch, joined)
        format_of_input = joined.format or guess_format(joined.source)
        columns, input_rows = _input_rows(joined.source, format_of_input)
        id_columns = [joined.id_column] if joined.id_column else _id_columns(format_of_input, columns)
        rows = _join(columns, input_rows, export_rows(database, batch.id), id_columns)
    names = [_input_name(name) for name in columns]
    # The writer is closed before its file, also when a row cannot be written: Parquet's own end writes once more.
    with _replacing(output) as file, contextlib.closing(_writer(format_, file, names)) as writer:
        count = 0
        page: list[dict[str, Any]] = []
        for row in rows:
            page.append(row)
            count += 1
            if len(page) >= PAGE_ROWS:
                writer.write(page)
                page = []
        writer.write(page)
    return count


def guess_export_format(output: str | Path) -> ExportFormat:
    """By the name's extension; JSONL where there is none. Raises ExportError: unknown_format."""
    extension = Path(output).suffix.lower()
    if not extension:
        return ExportFormat.JSONL
    if extension not in FORMATS_BY_EXTENSION:
        raise ExportError(
            f"{output}: no format is known by '{extension}'; say it with --format, one of {', '.join(ExportFormat)}",
            code="unknown_format",
        )
    return FORMATS_BY_EXTENSION[extension]


def export_rows(database: Database, batch_id: int) -> Iterator[dict[str, Any]]:
    """The finished lines of a batch in input order, as values by the names of COLUMNS."""
    page: list[ResultRow] = []
    for result in queries.results_in_order(database, batch_id):
        page.append(result)
        if len(page) >= PAGE_ROWS:
            yield from _values(database, page)
            page = []
    if page:
        yield from _values(database, page)


def _values(database: Database, page: Sequence[ResultRow]) -> Iterator[dict[str, Any]]:
    with database.read() as connection:
        attempts = audit.last_attempts(connection, [result.request_id for result in page])
    for result in page:
        attempt = attempts.get(result.request_id, {})
        yield {
            "request_id": result_id(result.request_id),
            "line": result.line,
            "custom_id": result.custom_id,
            "status": result.status.value,
            "answer": answer_text(result.response) if result.status_code == 200 else None,
            "error_code": result.error_code,
            "error_message": result.error_message,
            "attempts": attempt.get("number", 0),
            **{name: attempt.get(name) for name in _FROM_ATTEMPT},
            "finished_at": result.finished_at,
        }


def answer_text(response: str | None) -> str | None:
    """The text of the first choice of a stored response."""
    if not response:
        return None
    choices = json.loads(response).get("choices") or []
    if not choices:
        return None
    message = choices[0].get("message")
    text = choices[0].get("text") if message is None else message.get("content")
    return None if text is None else str(text)


# --- the input beside it -----------------------------------------------------------------------------------------

_InputRow = tuple[int, Mapping[str, object]]
_UNREADABLE: Mapping[str, object] = {}  # the values of a line that could not be read; an empty object is another one


def check_input(database: Database, batch: BatchRow, table: InputTable) -> None:
    """Compare each line of the input with the request that was made of it.

    Raises ExportError (input_mismatch) at the first line that differs; InputError when it cannot be read at all.
    What the stored request has besides (parameters, a context, a system message) may come from options of the
    submission, which are not kept: it is not compared. Nor is a line that was refused, or whose text was purged.
    """
    requests = queries.requests_in_order(database, batch.id)
    request = next(requests, None)
    for line in _whole_lines(batch, table):
        if request is not None and request.line < line.line:
            raise _foreign(f"the batch has a line {request.line}, the input none")
        if request is None or request.line > line.line:
            if batch.in_progress_at is None:
                return  # it was never submitted to its end: later lines are not there
            raise _foreign(f"the input has a line {line.line}, the batch none")
        if request.body is not None and (difference := _difference(batch, line, request, table)):
            raise _foreign(f"line {line.line} {difference}")
        request = next(requests, None)
    if request is not None:
        raise _foreign(f"the batch has a line {request.line}, the input ends before it")


def _whole_lines(batch: BatchRow, table: InputTable) -> Iterator[WholeLine]:
    options = InputOptions(
        model=batch.model,
        format=table.format,
        endpoint=Endpoint(batch.endpoint),
        template=table.template,
        id_column=table.id_column,
    )
    try:
        yield from InputReader(table.source, options).whole_lines()
    except InputError as error:
        if error.code != "template_needed":
            raise
        # Any template reads the rows and their ids.
        stand_in = replace(options, template=PromptTemplate(_STAND_IN))
        yield from (
            line._replace(body=line.body if isinstance(line.body, InvalidRequest) else _NO_PROMPT)
            for line in InputReader(table.source, stand_in).whole_lines()
        )


_STAND_IN = "-"
_NO_PROMPT = InvalidRequest("its prompt is made by a template", code="template_needed")


def _difference(batch: BatchRow, line: WholeLine, request: StoredRequest, table: InputTable) -> str | None:
    """How a line differs from its stored request, as the rest of a sentence; None: not at all."""
    if isinstance(line.body, InvalidRequest):
        if table.template is None and _has_no_prompt(line.body):
            return None if line.body is not _NO_PROMPT else _other_id(line, request)
        return f"is a request in the batch and none in the input ({line.body.message})"
    endpoint = Endpoint(batch.endpoint)
    assert request.body is not None, "the caller has seen to it"
    own = load_body(endpoint, request.body)
    stored = restore_prefix(own, request.prefix)
    asked = load_body(endpoint, line.body)
    return (
        _other_id(line, request)
        or _other_text(asked, own, stored, is_text=line.is_text)
        or _other_parameter(asked, stored)
    )


def _has_no_prompt(error: InvalidRequest) -> bool:
    """Whether a line says nothing that could be its prompt, so that only a template can have made one of it."""
    return error is _NO_PROMPT or (error.code == "missing_required_parameter" and error.param == TEXT_COLUMN)


def _other_id(line: WholeLine, request: StoredRequest) -> str | None:
    if line.custom_id == request.custom_id:
        return None
    return f"is {show(line.custom_id)} in the input and {show(request.custom_id)} in the batch"


def _other_text(asked: Body, own: Body, stored: Body, *, is_text: bool) -> str | None:
    """own: the stored request without its prefix, which is the context where there was one."""
    if isinstance(asked, ChatBody) and isinstance(stored, ChatBody):
        same = asked.messages == stored.messages
        if is_text:
            *before, last = stored.messages
            same = (last,) == asked.messages and [message.role for message in before] in ([], ["system"])
        return None if same else "has other messages in the input than in the batch"
    assert isinstance(asked, CompletionBody) and isinstance(own, CompletionBody) and isinstance(stored, CompletionBody)
    same = asked.prompt == stored.prompt
    if is_text and isinstance(stored.prompt, str) and isinstance(own.prompt, str):
        shared = stored.prompt.removesuffix(own.prompt)
        same = same or (shared.endswith(CONTEXT_SEPARATOR) and asked.prompt == own.prompt)
    return None if same else "has another prompt in the input than in the batch"


def _other_parameter(asked: Body, stored: Body) -> str | None:
    """The first parameter that the line sets otherwise. What it does not say, an option may have filled."""
    for name in sorted(asked.model_fields_set - {"messages", "prompt"}):
        theirs, ours = getattr(asked, name), getattr(stored, name)
        if theirs is not None and theirs != ours:
            return f"has {name} {show(theirs)} in the input and {show(ours)} in the batch"
    return None


def _input_rows(source: Source, format_: InputFormat) -> tuple[list[str], Iterator[_InputRow]]:
    """The input's columns, and its rows by line number; lines that could not be read have no values."""
    match format_:
        case InputFormat.CSV | InputFormat.TSV:
            table = read_delimited(source, "," if format_ is InputFormat.CSV else "\t", MAX_LINE_BYTES)
        case InputFormat.PARQUET:
            table = read_parquet(source, None)
        case InputFormat.JSONL:
            columns: dict[str, None] = {}  # in the order in which they first appear
            for _, values in _json_rows(source):
                columns.update(dict.fromkeys(values))
            return list(columns), _json_rows(source)
        case InputFormat.TEXT:
            return [TEXT_COLUMN], _text_rows(source)
    return list(table.columns), (
        (number, _UNREADABLE if isinstance(values, InvalidRequest) else values) for number, values in table.rows
    )


def _json_rows(source: Source) -> Iterator[_InputRow]:
    for number, data in source.lines():
        if isinstance(data, InvalidRequest):
            yield number, _UNREADABLE
        elif data.strip():
            try:
                values = json.loads(data)
            except (ValueError, RecursionError):
                values = None
            yield number, values if isinstance(values, dict) else _UNREADABLE


def _text_rows(source: Source) -> Iterator[_InputRow]:
    for number, data in source.lines():
        if isinstance(data, InvalidRequest):
            yield number, _UNREADABLE
        elif data.strip():
            try:
                yield number, {TEXT_COLUMN: decode(data).rstrip("\r\n")}
            except InvalidRequest:
                yield number, _UNREADABLE


def _id_columns(format_: InputFormat, columns: Sequence[str]) -> Sequence[str]:
    """Where the input's ids may stand, as `InputReader` looks for them: in JSONL, each line has keys of its own."""
    found = [name for name in ID_COLUMNS if name in columns]
    return found if format_ is InputFormat.JSONL else found[:1]


def _join(
    columns: Sequence[str],
    input_rows: Iterator[_InputRow],
    results: Iterator[dict[str, Any]],
    id_columns: Sequence[str],
) -> Iterator[dict[str, Any]]:
    """Both come by ascending line. Raises ExportError when they cannot belong together."""
    result = next(results, None)
    for line, values in input_rows:
        if result is not None and result["line"] < line:
            raise _foreign(f"the batch has a line {result['line']}, the input none")
        row = {_input_name(name): values.get(name) for name in columns}
        if result is None or result["line"] > line:
            yield row | dict.fromkeys(COLUMNS) | {"line": line, "status": UNFINISHED}
            continue
        theirs = _own_id(values, id_columns)
        # A line without a usable id of its own has one made of its number, or none.
        if values is not _UNREADABLE and result["custom_id"] not in (theirs, line_id(line), None):
            raise _foreign(f"line {line} is {show(theirs)} in the input and {show(result['custom_id'])} in the batch")
        yield row | result
        result = next(results, None)
    if result is not None:
        raise _foreign(f"the batch has a line {result['line']}, the input ends before it")


def _own_id(values: Mapping[str, object], id_columns: Sequence[str]) -> str | None:
    with contextlib.suppress(InvalidRequest):
        return row_id(values, id_columns)
    return None


def _foreign(difference: str) -> ExportError:
    return ExportError(
        f"the input is not that of this batch: {difference}; give the file that was submitted, its --id-column and its "
        "--template",
        code="input_mismatch",
    )


def _input_name(name: str) -> str:
    return f"input.{name}" if name in COLUMNS else name


# --- writing -----------------------------------------------------------------------------------------------------


class _Writer(Protocol):
    def write(self, rows: Sequence[Mapping[str, Any]]) -> None: ...

    def close(self) -> None: ...


def _writer(format_: ExportFormat, file: BinaryIO, input_columns: Sequence[str]) -> _Writer:
    match format_:
        case ExportFormat.JSONL:
            return _JsonLines(file)
        case ExportFormat.CSV:
            return _Csv(file, [*input_columns, *COLUMNS])
        case ExportFormat.PARQUET:
            return _Parquet(file, input_columns)


class _JsonLines:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._file.writelines(json.dumps(row, ensure_ascii=False, default=str).encode() + b"\n" for row in rows)

    def close(self) -> None:
        pass


class _Csv:
    """As spreadsheets read it: lines end in CR LF, nothing is an empty field."""

    def __init__(self, file: BinaryIO, columns: Sequence[str]) -> None:
        self._text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
        self._writer = csv.DictWriter(self._text, columns)
        self._writer.writeheader()

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._writer.writerows({name: _plain(value) for name, value in row.items()} for row in rows)

    def close(self) -> None:
        self._text.flush()
        self._text.detach()


class _Parquet:
    """Our columns have their types; the input's are text."""

    def __init__(self, file: BinaryIO, input_columns: Sequence[str]) -> None:
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError as error:
            raise ExportError(
                "writing Parquet needs pyarrow; install it with: pip install 'promptmill[parquet]'",
                code="missing_dependency",
            ) from error
        kinds = {str: pyarrow.string(), int: pyarrow.int64(), float: pyarrow.float64()}
        fields = [(name, pyarrow.string()) for name in input_columns]
        fields += [(name, kinds[kind]) for name, kind in COLUMNS.items()]
        self._schema = pyarrow.schema(fields)
        self._as_text = set(input_columns)
        self._pyarrow = pyarrow
        self._file = parquet.ParquetWriter(file, self._schema)

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        if not rows:
            return
        plain = [
            {name: _text(value) if name in self._as_text else value for name, value in row.items()} for row in rows
        ]
        self._file.write_table(self._pyarrow.Table.from_pylist(plain, schema=self._schema))

    def close(self) -> None:
        self._file.close()


def _plain(value: object) -> object:
    return dump_json(value) if isinstance(value, dict | list) else value


def _text(value: object) -> str | None:
    plain = _plain(value)
    return None if plain is None else str(plain)


@contextlib.contextmanager
def _replacing(output: str | Path) -> Iterator[BinaryIO]:
    """A file that takes its place when it is whole; standard output is written as it comes."""
    if str(output) == STDOUT:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    path = Path(output)
    temporary = path.with_name(f".{path.name[:200]}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
        temporary.replace(path)
    except OSError as error:
        raise OutputError(
            f"{path} cannot be written: {error.strerror or error}; free some space or name another file",
            code="output_not_writable",
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
