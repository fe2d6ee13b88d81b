"""An input's lines -> checked requests, each as it will be stored, and refused lines; streaming, in constant memory.

Formats: OpenAI batch JSONL; plain JSONL (`prompt` or `messages` and body fields, decided line by line); plain text, a
prompt a line; CSV, TSV, Parquet (and JSONL) rows through a template. A bad line is refused alone; only a file that is
unusable as a whole raises InputError. Every line that is not blank ends as exactly one InputLine or RefusedLine.

Where `--system` and `--context` stand, the same bytes in every prompt so that they are computed once:
- chat: the system message is the system text, an empty line, the context. (Measured 2026-11-30 with SmolLM2-135M on
  forty questions about the example's handbook: 19 right with the context there, 12 to 16 with it before the question.)
- completions: context, an empty line, prompt.
They are for prompts that are made here (text, `prompt` lines, rows), not for lines that bring whole messages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, TypeVar, assert_never

from pydantic import ValidationError
from pydantic_core import from_json

from jobs import protocol
from jobs.custom_ids import CustomIds
from jobs.prefixes import MIN_CHARACTERS, PrefixFinder
from jobs.protocol import (
    Body,
    ChatBody,
    ChatLine,
    CompletionBody,
    CompletionLine,
    Endpoint,
    GenerationBody,
    Message,
    PlainChatLine,
    PlainCompletionLine,
    PlainPromptLine,
    show,
    show_names,
)
from jobs.source import MAX_LINE_BYTES, InputError, Source, decode
from jobs.tables import Row, Table, read_delimited, read_parquet
from jobs.template import CONTEXT_SEPARATOR, PromptTemplate
from storage.errors import InvalidRequest
from storage.transitions import RefusedLine

ID_COLUMNS = ("custom_id", "id")  # of a table, when none is named
KNOWN_FORMS = 64  # ways to ask, besides the prompt, that are kept in sight; a seed of its own in each line fits none
PROMPT_COLUMN = "prompt"  # of a table, when there is no template; what a template calls a line of plain text


class InputFormat(StrEnum):
    JSONL = "jsonl"
    TEXT = "text"
    CSV = "csv"
    TSV = "tsv"
    PARQUET = "parquet"


FORMATS_BY_EXTENSION: Mapping[str, InputFormat] = {
    ".jsonl": InputFormat.JSONL,
    ".ndjson": InputFormat.JSONL,
    ".json": InputFormat.JSONL,
    ".txt": InputFormat.TEXT,
    ".text": InputFormat.TEXT,
    ".csv": InputFormat.CSV,
    ".tsv": InputFormat.TSV,
    ".parquet": InputFormat.PARQUET,
    ".pq": InputFormat.PARQUET,
}


@dataclass(frozen=True)
class InputOptions:
    """How to read an input.

    model: the name that a line's `model` must equal. format: None goes by the name's extension. endpoint: None lets the
    first OpenAI line decide; plain formats then mean chat. defaults: fill what a line does not say.
    id_column: of a table or of templated JSONL; None takes `custom_id`, else `id`, else line numbers.
    only_batch_lines: JSONL must be an OpenAI batch file; plain lines are refused.
    """

    model: str
    format: InputFormat | None = None
    endpoint: Endpoint | None = None
    template: PromptTemplate | None = None
    context: str = ""
    system: str = ""
    id_column: str | None = None
    defaults: GenerationBody = field(default_factory=GenerationBody)
    max_line_bytes: int = MAX_LINE_BYTES
    only_batch_lines: bool = False


# What is made for each line is a tuple: a frozen dataclass takes three times as long to make.
class InputLine(NamedTuple):
    """A request to run. body: its normal form as JSON, its first message or prompt without the prefix."""

    line: int
    custom_id: str
    body: str
    prefix: str


class WholeLine(NamedTuple):
    """A line's request as it was asked. body: its normal form as JSON, or what is wrong with the line.

    is_text: it was made of a text alone; a context may stand before that, and a system message.
    """

    line: int
    custom_id: str | None
    body: str | InvalidRequest
    is_text: bool


# A line's number, its custom id if it has one, and what is wrong with it, if anything.
Verdict = tuple[int, str | None, InvalidRequest | None]


class _Form(NamedTuple):
    """How requests that differ in one text alone are written: the JSON before that text and after it.

    prefix: stands before the text, or is the system message. text_is_head: a prefix may be found in the text.
    """

    before: str
    after: str
    prefix: str
    text_is_head: bool


class _TextRequest(NamedTuple):
    """A request made of a text alone; written without a model of its own, which most of a line's time would go to."""

    form: _Form
    text: str

    @property
    def head(self) -> str | None:
        return self.text if self.form.text_is_head else None

    def with_head(self, head: str) -> _TextRequest:
        return _TextRequest(self.form, head)

    def to_json(self) -> str:
        return f"{self.form.before}{_json_text(self.text)}{self.form.after}"


class _Parsed(NamedTuple):
    """One line's request, its prefix taken off already where it is known.

    custom_id: None is made from the number, unless the line is of OpenAI's form (`is_batch_line`) and must bring one.
    """

    custom_id: str | None
    body: Body | _TextRequest | InvalidRequest
    prefix: str = ""
    is_batch_line: bool = False


def _split_line(number: int, custom_id: str, body: Body | _TextRequest, prefix: str) -> InputLine:
    """The line with this prefix taken off, if it begins with it."""
    head = body.head
    if not prefix or head is None or not head.startswith(prefix):
        return InputLine(number, custom_id, body.to_json(), "")
    return InputLine(number, custom_id, body.with_head(head[len(prefix) :]).to_json(), prefix)


class InputReader:
    """Reads a source once, from its start. Iterate over it."""

    def __init__(self, source: Source, options: InputOptions) -> None:
        """Raises InputError: unknown_format, template_needed."""
        self.format = options.format or guess_format(source)
        self._source = source
        self._options = options
        self._endpoint = options.endpoint
        self._forms: dict[bytes, _Form] = {}
        said = options.defaults
        self._defaults = {name: getattr(said, name) for name in sorted(said.model_fields_set)}

    @property
    def endpoint(self) -> Endpoint:
        """What the lines ask for, as far as has been read: an OpenAI line may still decide it."""
        return self._endpoint or Endpoint.CHAT

    def __iter__(self) -> Iterator[InputLine | RefusedLine]:
        prefixes = PrefixFinder()
        # The first line with a long beginning, until the next one tells whether it is shared: or it alone would be
        # stored whole, and run wherever that beginning has to be computed once more.
        held: tuple[int, str, Body | _TextRequest] | None = None
        for number, custom_id, body, prefix in self._judged_lines():
            head = None if prefix or isinstance(body, InvalidRequest) else body.head
            if head is not None:
                prefix = prefixes.find(head)
            if held is not None:
                yield _split_line(*held, prefix if head is not None else "")
                held = None
            if isinstance(body, InvalidRequest):
                yield RefusedLine(
                    number, custom_id, body.code, f"{self._source.name} line {number}: {body.message}", body.param
                )
                continue
            assert custom_id is not None
            if head is None:
                yield InputLine(number, custom_id, body.to_json(), prefix)
            elif prefix or len(head) < MIN_CHARACTERS:
                yield _split_line(number, custom_id, body, prefix)
            else:
                held = number, custom_id, body
        if held is not None:
            yield _split_line(*held, "")

    def check(self) -> Iterator[Verdict]:
        """What iterating would say of each line, without making its request: half the work."""
        for number, custom_id, body, _prefix in self._judged_lines():
            yield number, custom_id, body if isinstance(body, InvalidRequest) else None

    def whole_lines(self) -> Iterator[WholeLine]:
        """Each line's request with nothing taken off, to be compared with what was stored of it."""
        for number, custom_id, body, _prefix in self._judged_lines():
            asked = body if isinstance(body, InvalidRequest) else body.to_json()
            yield WholeLine(number, custom_id, asked, isinstance(body, _TextRequest))

    def _judged_lines(self) -> Iterator[tuple[int, str | None, Body | _TextRequest | InvalidRequest, str]]:
        """Each line's number, custom id, request or what is wrong with it, and known prefix.

        Raises InputError (empty_file) at the end of an input without a line.
        """
        seen = CustomIds()
        is_empty = True
        for number, parsed in self._parsed_lines():
            is_empty = False
            custom_id, body, prefix, is_batch_line = parsed
            if custom_id is None and not is_batch_line:
                custom_id = line_id(number)
            if custom_id is not None:
                first = seen.first_line(custom_id, number)
                if first != number and not isinstance(body, InvalidRequest):
                    body = InvalidRequest(
                        f"custom_id {show(custom_id)} is that of line {first} already; give each line its own",
                        code="duplicate_custom_id",
                        param="custom_id",
                    )
            yield number, custom_id, body, prefix
        if is_empty:
            raise InputError(
                f"{self._source.name} is empty: it has no line to run; write at least one", code="empty_file"
            )

    def _parsed_lines(self) -> Iterator[tuple[int, _Parsed]]:
        match self.format:
            case InputFormat.JSONL:
                return self._jsonl_lines()
            case InputFormat.TEXT:
                return self._text_lines()
            case InputFormat.CSV | InputFormat.TSV:
                delimiter = "," if self.format is InputFormat.CSV else "\t"
                return self._table_rows(read_delimited(self._source, delimiter, self._options.max_line_bytes))
            case InputFormat.PARQUET:
                return self._table_rows(read_parquet(self._source, self._wanted_columns()))
            case _:
                assert_never(self.format)

    def _text_lines(self) -> Iterator[tuple[int, _Parsed]]:
        build, template = self._prompt_builder(), self._options.template
        if template is not None:
            template.check_columns([PROMPT_COLUMN])
        for number, data in self._source.lines(self._options.max_line_bytes):
            if isinstance(data, InvalidRequest):
                yield number, _Parsed(None, data)
            elif data.strip():
                try:
                    text = decode(data).rstrip("\r\n")
                    yield number, build(None, text if template is None else template.render({PROMPT_COLUMN: text}))
                except InvalidRequest as error:
                    yield number, _Parsed(None, error)

    def _table_rows(self, table: Table) -> Iterator[tuple[int, _Parsed]]:
        template, id_column = self._options.template, self._options.id_column
        if id_column is not None and id_column not in table.columns:
            raise InputError(
                f"{self._source.name} has no id column '{id_column}'; columns there are: {show_names(table.columns)}",
                code="missing_column",
            )
        if template is not None:
            template.check_columns(table.columns)
        elif PROMPT_COLUMN not in table.columns:
            raise InputError(
                f"{self._source.name} is a table without a column '{PROMPT_COLUMN}'; say with --template how to make "
                f"a prompt of its columns: {show_names(table.columns)}",
                code="template_needed",
            )
        return self._rows(table.rows, [id_column] if id_column else [n for n in ID_COLUMNS if n in table.columns][:1])

    def _rows(self, rows: Iterable[Row], id_columns: Iterable[str]) -> Iterator[tuple[int, _Parsed]]:
        build = self._prompt_builder()
        template = self._options.template
        id_columns = list(id_columns)
        for number, row in rows:
            custom_id = None
            try:
                if isinstance(row, InvalidRequest):
                    raise row
                custom_id = row_id(row, id_columns)
                text = template.render(row) if template is not None else row[PROMPT_COLUMN]
                if not isinstance(text, str):
                    raise InvalidRequest(
                        f"{PROMPT_COLUMN} is {show(text)}; write text", code="invalid_type", param=PROMPT_COLUMN
                    )
                yield number, build(custom_id, text)
            except InvalidRequest as error:
                yield number, _Parsed(custom_id, error)

    def _wanted_columns(self) -> list[str] | None:
        options = self._options
        if options.template is None:
            used = {PROMPT_COLUMN}
        else:
            used = set(options.template.columns)
        return sorted(used | ({options.id_column} if options.id_column else set(ID_COLUMNS)))

    def _jsonl_lines(self) -> Iterator[tuple[int, _Parsed]]:
        if self._options.template is not None:
            yield from self._rows(
                self._json_rows(), [self._options.id_column] if self._options.id_column else ID_COLUMNS
            )
            return
        kind: _LineModel | None = None
        for number, data in self._source.lines(self._options.max_line_bytes):
            if isinstance(data, InvalidRequest):
                yield number, _Parsed(None, data, is_batch_line=self._is_batch_line({}))
                continue
            # The kind of the line before is tried first: one pass over the bytes for nearly all lines.
            if kind is not None and b"\\u0000" not in data:
                try:
                    line = kind.model_validate_json(data)
                except ValidationError:
                    pass
                else:
                    yield number, self._accept(line)
                    continue
            if data.strip():
                kind, parsed = self._examine(data.rstrip(b"\r\n"), kind)
                yield number, parsed

    def _json_rows(self) -> Iterator[Row]:
        for number, data in self._source.lines(self._options.max_line_bytes):
            if isinstance(data, InvalidRequest):
                yield number, data
            elif data.strip():
                try:
                    yield number, _json_object(data)
                except InvalidRequest as error:
                    yield number, error

    def _examine(self, data: bytes, kind: _LineModel | None) -> tuple[_LineModel | None, _Parsed]:
        """Find out what kind of line this is, and parse it as that, or say what is wrong with it."""
        custom_id, is_batch_line = None, self._is_batch_line({})
        try:
            value = _json_object(data, allow_nan=True)  # which field has it is said better further down
            is_batch_line = self._is_batch_line(value)
            custom_id = _usable_id(value.get("custom_id"))
            kind = self._kind_of(value)
            line = protocol.parse_as(kind, data, is_line=True)
            if line.custom_id is not None and custom_id is None:
                raise protocol.nul_character("custom_id", line.custom_id.index("\0"))
            if isinstance(line, ChatLine | CompletionLine):
                protocol.refuse_nul(line.body, "body.")
            else:
                protocol.refuse_nul(line)
        except InvalidRequest as error:
            return kind, _Parsed(custom_id, error, is_batch_line=is_batch_line)
        return kind, self._accept(line)

    def _kind_of(self, value: Mapping[str, object]) -> _LineModel:
        """By its keys. The first OpenAI line decides the endpoint of all; a plain one before it decides for chat."""
        if self._is_batch_line(value):
            if "url" not in value:
                raise InvalidRequest(
                    f"url is missing; add {_one_of(Endpoint)}", code="missing_required_parameter", param="url"
                )
            url = value["url"]
            if url not in list(Endpoint):
                raise InvalidRequest(
                    f"url is {show(url)}; write {_one_of(Endpoint)}", code="invalid_value", param="url"
                )
            if self._endpoint is None:
                self._endpoint = Endpoint(str(url))
            if url != self._endpoint:
                raise InvalidRequest(
                    f"url {url} is not that of this batch, {self._endpoint}; put the line into a file of its own",
                    code="url_mismatch",
                    param="url",
                )
            return ChatLine if self._endpoint is Endpoint.CHAT else CompletionLine
        if "messages" in value and "prompt" in value:
            raise InvalidRequest(
                "the line has both prompt and messages; write either, not both", code="invalid_value", param="prompt"
            )
        if "messages" in value:
            if self._plain_endpoint() is not Endpoint.CHAT:
                raise InvalidRequest(
                    f"messages are for {Endpoint.CHAT} and this batch is for {self._endpoint}; write a prompt, or put "
                    "the line into a file of its own",
                    code="url_mismatch",
                    param="messages",
                )
            return PlainChatLine
        if "prompt" in value:
            return PlainPromptLine if self._plain_endpoint() is Endpoint.CHAT else PlainCompletionLine
        raise InvalidRequest(
            f"the line has neither prompt nor messages nor body; its keys: {show_names(list(value))}; "
            "add one, or say with --template how to make a prompt of it",
            code="missing_required_parameter",
            param="prompt",
        )

    def _is_batch_line(self, value: Mapping[str, object]) -> bool:
        """Whether a line is of OpenAI's form, by its keys."""
        return self._options.only_batch_lines or any(key in value for key in ("body", "url", "method"))

    def _plain_endpoint(self) -> Endpoint:
        if self._endpoint is None:
            self._endpoint = Endpoint.CHAT
        return self._endpoint

    def _accept(self, line: _AnyLine) -> _Parsed:
        """What a line of the right form asks for, if this batch can do it."""
        try:
            if isinstance(line, ChatLine | CompletionLine):
                return _Parsed(line.custom_id, self._accept_body(line.body))
            if not isinstance(line, PlainChatLine) and isinstance(line.prompt, str):
                return self._accept_prompt(line, line.prompt)
            self._check_model(line)
            self._refuse_context()
            own = line.model_copy(update={"custom_id": None})
            return _Parsed(line.custom_id, self._fill(protocol.normalise(own)))
        except InvalidRequest as error:
            return _Parsed(line.custom_id, error)

    def _accept_prompt(self, line: PlainPromptLine | PlainCompletionLine, text: str) -> _Parsed:
        """A prompt with what else the line says. Lines that say the same but for the prompt are looked at once."""
        said = b""
        if not line.model_fields_set <= _PROMPT_ALONE:
            said = line.__pydantic_serializer__.to_json(line, exclude=_PROMPT_ALONE, exclude_none=True)
        form = self._forms.get(said)
        if form is None or not text:
            self._check_model(line)
            if isinstance(line, PlainPromptLine):
                if not text:
                    raise protocol.empty_prompt()
                fields = {name: getattr(line, name) for name in line.model_fields_set - _PROMPT_ALONE}
                body: Body = _BLANK.model_copy(update={"messages": (_message(_USER, text),), **fields})
            else:
                body = line.model_copy(update={"custom_id": None})
            form = self._form(protocol.normalise(body))
            if len(self._forms) >= KNOWN_FORMS:
                self._forms.clear()
            self._forms[said] = form
        return _Parsed(line.custom_id, _TextRequest(form, text), form.prefix)

    def _check_model(self, line: GenerationBody) -> None:
        if line.model is not None and line.model != self._options.model:
            raise protocol.model_not_found(line.model, self._options.model)

    def _accept_body(self, body: Body) -> Body:
        """The body of an OpenAI line; what is wrong with it is named from the line's top."""
        try:
            if body.model is None:
                raise InvalidRequest(
                    f'model is missing; add "model": {show(self._options.model)}',
                    code="missing_required_parameter",
                    param="model",
                )
            if body.model != self._options.model:
                raise protocol.model_not_found(body.model, self._options.model)
            self._refuse_context()
            return self._fill(protocol.normalise(body))
        except InvalidRequest as error:
            param = None if error.param is None else f"body.{error.param}"
            raise InvalidRequest(error.message, code=error.code, param=param) from None

    def _refuse_context(self) -> None:
        if self._options.context or self._options.system:
            raise InvalidRequest(
                "--context and --system are for prompts made here, and this line brings its own; write them into its "
                "messages, or leave the options out",
                code="context_not_applicable",
            )

    def _prompt_builder(self) -> Callable[[str | None, str], _Parsed]:
        """How a prompt that is text alone becomes a request: the same for each, but for the text."""
        is_chat = self._plain_endpoint() is Endpoint.CHAT
        blank: Body = _BLANK if is_chat else CompletionBody.model_construct(prompt="")
        form: _Form | None = None

        def build(custom_id: str | None, text: str) -> _Parsed:
            nonlocal form
            if "\0" in text:
                raise protocol.nul_character("prompt", text.index("\0"))
            if not text.strip():
                raise protocol.empty_prompt()
            if form is None:
                form = self._form(blank)
            return _Parsed(custom_id, _TextRequest(form, text), form.prefix)

        return build

    def _form(self, body: Body) -> _Form:
        """How to write this request with any prompt in place of its own, the system text and the context added."""
        options = self._options
        own_system = ""
        if isinstance(body, CompletionBody):
            prefix = options.context + CONTEXT_SEPARATOR if options.context else ""
            if options.system:
                raise InvalidRequest(
                    f"--system is for {Endpoint.CHAT} and this batch is for {Endpoint.COMPLETIONS}; put it into the "
                    "context or the template",
                    code="context_not_applicable",
                )
            body = self._fill(body.model_copy(update={"prompt": ""}))
        else:
            prefix = CONTEXT_SEPARATOR.join(text for text in (options.system, options.context) if text)
            if not options.context and len(options.system) < MIN_CHARACTERS:
                prefix, own_system = "", options.system
            messages: tuple[Message, ...] = (_message(_USER, ""),)
            if options.context or options.system:
                messages = (_message(_SYSTEM, own_system), *messages)
            body = self._fill(body.model_copy(update={"messages": messages}))
        # The prompt is the last text in the normal form: only numbers and truth values come after it.
        before, _, after = body.to_json().rpartition('""')
        return _Form(before, after, prefix, text_is_head=not prefix and not own_system)

    def _fill(self, body: _FilledT) -> _FilledT:
        """Put the command line's parameters where the line says nothing."""
        missing = {name: value for name, value in self._defaults.items() if getattr(body, name) is None}
        return body.model_copy(update=missing) if missing else body


# Copied where a model is needed: making one anew goes through all its fields.
_BLANK = ChatBody.model_construct(messages=())
_USER = Message.model_construct(role="user", content="")
_SYSTEM = Message.model_construct(role="system", content="")


def _message(blank: Message, text: str) -> Message:
    return blank.model_copy(update={"content": text})


_PROMPT_ALONE = {"prompt", "custom_id"}
_json_text = json.JSONEncoder(ensure_ascii=False).encode  # as pydantic writes a string, which a test holds together

_AnyLine = ChatLine | CompletionLine | PlainChatLine | PlainPromptLine | PlainCompletionLine
_LineModel = (
    type[ChatLine] | type[CompletionLine] | type[PlainChatLine] | type[PlainPromptLine] | type[PlainCompletionLine]
)
_FilledT = TypeVar("_FilledT", bound=GenerationBody)


def guess_format(source: Source) -> InputFormat:
    """By the extension, `.gz` aside; without one, by the first bytes.

    Raises InputError: unknown_format, json_array.
    """
    extension = source.extension
    head = source.first_bytes()
    if extension == ".json" and head.startswith(b"["):
        raise InputError(
            f"{source.name} is one JSON list; write one object on each line, for example with jq -c '.[]'",
            code="json_array",
        )
    if extension in FORMATS_BY_EXTENSION:
        return FORMATS_BY_EXTENSION[extension]
    if extension:
        raise InputError(
            f"{source.name}: no format is known by '{extension}'; say it with --format, one of "
            f"{', '.join(InputFormat)}",
            code="unknown_format",
        )
    if head.startswith(b"PAR1"):
        return InputFormat.PARQUET
    return InputFormat.JSONL if head.startswith(b"{") else InputFormat.TEXT


def _json_object(data: bytes, *, allow_nan: bool = False) -> dict[str, object]:
    try:
        value = from_json(data, allow_inf_nan=allow_nan)
    except ValueError as error:
        decode(data)
        raise protocol.broken_json(str(error), is_line=True) from None
    if not isinstance(value, dict):
        raise protocol.no_object(value, is_line=True)
    return value


def _usable_id(value: object) -> str | None:
    """A custom id that can stand beside a refusal."""
    is_usable = isinstance(value, str) and 0 < len(value) <= protocol.MAX_CUSTOM_ID_CHARACTERS and "\0" not in value
    return value if is_usable and isinstance(value, str) else None


def row_id(row: Mapping[str, object], columns: Iterable[str]) -> str | None:
    """The custom id of a row, if it has one. Raises InvalidRequest when what stands there cannot be an id."""
    column = next((name for name in columns if row.get(name) not in (None, "")), None)
    if column is None:
        return None
    value = row[column]
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    custom_id = _usable_id(text)
    if custom_id is None:
        raise InvalidRequest(
            f"{column} is {show(value)}; an id is text of 1 to {protocol.MAX_CUSTOM_ID_CHARACTERS} characters without "
            "NUL, choose another column with --id-column",
            code="invalid_value",
            param=column,
        )
    return custom_id


def line_id(number: int) -> str:
    """The custom id of a line that has none of its own."""
    return f"line-{number}"


def _one_of(values: Iterable[str]) -> str:
    return " or ".join(values)
