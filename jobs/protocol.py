"""The OpenAI request, line and result formats: parsed and checked once, at the edge, into typed models.

Text in, text out; token ids only where a prompt is given as ids. Nothing here knows the tokenizer or the database:
what needs a tokenizer (prompt length, context) is checked by the worker, with the error constructors at the end, so
that the wording stands in one place.

What each field of a body does here. "Idle" is a value that asks for nothing (null always does); it is accepted.

| field | chat | completions | |
|---|---|---|---|
| model | used | used | must name the artifact; may be absent in plain formats |
| messages | used | | system, developer (read as system), user, assistant, tool; text or text parts |
| prompt | | used | text or a list of token ids; a list of texts is refused: one line, one prompt |
| max_tokens | used | used | at least 1; absent: up to the context (chat), 16 (completions) |
| max_completion_tokens | used | | another name of max_tokens |
| temperature, top_p, seed | used | used | 0 to 2; 0 to 1; 64 bits |
| stop, n | used | used | up to 16 texts; 1 to 16 |
| frequency_penalty, presence_penalty | used | used | -2 to 2 |
| logit_bias | used | used | up to 300 token ids, each -100 to 100 |
| logprobs | true or false | 0 to 5 | |
| top_logprobs | 0 to 20 | | |
| top_k, ignore_eos | used | used | extensions: 0 or -1 is off; go on after the end token |
| user, metadata, store, service_tier | kept, ignored | kept, ignored | no effect on the answer |
| safety_identifier, prompt_cache_key, prompt_cache_retention | kept, ignored | kept, ignored | as above |
| parallel_tool_calls | kept, ignored | | says nothing without tools |
| stream, stream_options | refused unless idle | refused unless idle | in a batch; the gateway takes them |
| tools, functions, tool_choice, function_call | refused unless idle | | the model would not heed them |
| response_format, modalities, audio, prediction | refused unless idle | | as above |
| reasoning_effort, verbosity, web_search_options | refused unless idle | | as above |
| best_of, echo, suffix | | refused unless idle | |
| anything else | refused | refused | `unknown_parameter`, with the nearest known name |
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo
from pydantic_core import PydanticCustomError

from storage.errors import InvalidRequest, PromptmillError

MAX_STOP_TEXTS = 16  # OpenAI takes 4; each costs a comparison per token and row, and 16 is still lost in the noise
MAX_STOP_CHARACTERS = 512  # the tail that must be held back while streaming is as long as the longest stop text
MAX_CHOICES = 16  # each choice is a row of its own; OpenAI takes 128, which would fill the whole forward batch
MAX_LOGIT_BIASES = 300  # OpenAI's bound
MAX_CUSTOM_ID_CHARACTERS = 512  # OpenAI's is said to be 64; a URL or a path as an id should fit
MAX_TOP_LOGPROBS = 20  # chat, as OpenAI
MAX_COMPLETION_LOGPROBS = 5  # completions, as OpenAI
COMPLETION_MAX_TOKENS = 16  # what OpenAI takes when a completions body does not say
MAX_INTEGER = 2**31 - 1  # far beyond any context or vocabulary, and what every database and language holds
MAX_TOKEN_ID = MAX_INTEGER
IMPOSSIBLE_LOGPROB = -9999.0
SHOWN_NAMES = 30  # a machine's table may have thousands of columns
SHOWN_CHARACTERS = 60  # of a refused value, in a message


class Endpoint(StrEnum):
    """What a batch's lines ask for."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


@dataclass(frozen=True)
class SamplingParameters:
    """What a request asks of sampling, with OpenAI's defaults filled in.

    max_tokens: None is "up to the context". top_k: 0 is off. top_p: 0 keeps the likeliest token alone.
    logprobs: alternatives wanted beside each chosen token; 0 is the chosen one alone, None is no log probabilities.
    """

    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stop: tuple[str, ...]
    logit_bias: Mapping[int, float]
    frequency_penalty: float
    presence_penalty: float
    logprobs: int | None
    n: int
    ignore_eos: bool


# --- Field types ---------------------------------------------------------------------------------------------------

# Field -> (values that ask for nothing, the way out for all others). None always asks for nothing.
_UNSUPPORTED: dict[str, tuple[tuple[object, ...], str]] = {
    "tools": (([],), "describe the tools in a message instead, or remove it"),
    "functions": (([],), "describe the functions in a message instead, or remove it"),
    "tool_choice": (("none", "auto"), "remove it"),
    "function_call": (("none", "auto"), "remove it"),
    "tool_calls": (([],), "write the call as text in content, or remove it"),
    "response_format": (({"type": "text"},), 'use {"type": "text"} and ask for the format in a message'),
    "modalities": ((["text"], []), 'use ["text"]'),
    "audio": ((), "remove it; only text is generated"),
    "prediction": ((), "remove it"),
    "reasoning_effort": (("none",), "remove it"),
    "verbosity": (("medium",), "remove it and ask for the length in a message"),
    "web_search_options": ((), "remove it"),
    "best_of": ((1,), "use n and choose yourself"),
    "echo": ((False,), "remove it and put the prompt before the answer yourself"),
    "suffix": (("",), "remove it; nothing can be inserted before a given text"),
    "refusal": (("",), "remove it"),
    "annotations": (([],), "remove it"),
}


def _refuse_unless_idle(value: object, info: ValidationInfo) -> None:
    """Let a field pass that asks for nothing, as SDKs send them; refuse one that the answer would not honour."""
    field = info.field_name or ""
    idle, way_out = _UNSUPPORTED[field]
    # `1 == True` must not let {"best_of": true} pass: compare types as well.
    if value is not None and not any(type(value) is type(known) and value == known for known in idle):
        raise PydanticCustomError("unsupported_parameter", "is not supported; {way_out}", {"way_out": way_out})


def _one_text(content: object) -> object:
    """Join a list of text parts; anything that is not text is refused by its type's name."""
    if not isinstance(content, list):
        return content
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            name = show(kind if isinstance(kind, str) else part)
            raise PydanticCustomError(
                "unsupported_value", 'has a part of type {name}; only parts of type "text" can be read', {"name": name}
            )
        text = part.get("text")
        if not isinstance(text, str):
            raise PydanticCustomError(
                "invalid_type", "has a text part with {text} as its text; write a string", {"text": show(text)}
            )
        texts.append(text)
    return "".join(texts)


def _one_prompt(prompt: object) -> object:
    """Text, or token ids; refuse the list-of-prompts forms, which one line cannot answer."""
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list):
        raise PydanticCustomError(
            "invalid_type", "is {value}; write text or a list of token ids", {"value": show(prompt)}
        )
    if prompt and isinstance(prompt[0], str | list):
        raise PydanticCustomError(
            "unsupported_value",
            "is a list of prompts (of {count}) and the bound is 1 a request; send one for each",
            {"count": len(prompt)},
        )
    for index, token_id in enumerate(prompt):
        if type(token_id) is not int or not 0 <= token_id <= MAX_TOKEN_ID:
            raise PydanticCustomError(
                "invalid_type",
                "has {value} at index {index}, which is no token id; write whole numbers from 0, or text",
                {"value": show(token_id), "index": index},
            )
    return tuple(prompt)


def _only_text(prompt: object) -> object:
    if isinstance(prompt, list):
        raise PydanticCustomError(
            "unsupported_value",
            "is a list and a chat takes one text; write one line for each text, or ask for /v1/completions, "
            "which takes token ids",
        )
    return prompt


def _stop_list(stop: object) -> object:
    if isinstance(stop, list):
        return tuple(stop)
    return (stop,) if isinstance(stop, str) else stop


def _as_system(role: object) -> object:
    """`developer` is OpenAI's newer name for `system`; chat templates know only the older one."""
    return "system" if role == "developer" else role


Unsupported = Annotated[None, BeforeValidator(_refuse_unless_idle)]
Text = Annotated[str, BeforeValidator(_one_text)]
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
Prompt = Annotated[str | tuple[int, ...], BeforeValidator(_one_prompt)]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Stop = Annotated[tuple[StopText, ...], Field(max_length=MAX_STOP_TEXTS), BeforeValidator(_stop_list)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
MessageRole = Annotated[Literal["system", "user", "assistant", "tool"], BeforeValidator(_as_system)]
CustomId = Annotated[str, Field(min_length=1, max_length=MAX_CUSTOM_ID_CHARACTERS)]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


# --- Bodies --------------------------------------------------------------------------------------------------------


class _Model(BaseModel):
    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=(), defer_build=False
    )


class StreamOptions(_Model):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Message(_Model):
    """One message of a conversation, its text parts joined."""

    role: MessageRole
    content: Text
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Unsupported = None
    function_call: Unsupported = None
    refusal: Unsupported = None
    audio: Unsupported = None
    annotations: Unsupported = None


class GenerationBody(_Model):
    """A checked request in its normal form: what both endpoints share.

    The normal form is what is stored and what the worker reads back: nulls left out, `max_completion_tokens` written
    as `max_tokens`, `stop` a list, `developer` messages as `system`, text parts joined.
    """

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_INTEGER)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_INTEGER)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    logit_bias: (
        Annotated[
            dict[TokenId, Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=MAX_LOGIT_BIASES),
        ]
        | None
    ) = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    user: str | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @property
    def wanted_logprobs(self) -> int | None:
        """Alternatives wanted beside each chosen token; None: no log probabilities."""
        raise NotImplementedError

    @property
    def wanted_tokens(self) -> int | None:
        """The bound on new tokens; None: up to the context."""
        raise NotImplementedError

    @property
    def head(self) -> str | None:
        """The text that a shared prefix is the beginning of: the first message or the prompt; None for token ids."""
        raise NotImplementedError

    def with_head(self, head: str) -> Self:
        """The same request with another first message or prompt."""
        raise NotImplementedError

    def sampling(self) -> SamplingParameters:
        """What this request asks of sampling, OpenAI's defaults filled in."""
        return SamplingParameters(
            max_tokens=self.wanted_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),
            seed=self.seed,
            stop=self.stop or (),
            logit_bias=self.logit_bias or {},
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            logprobs=self.wanted_logprobs,
            n=self.n or 1,
            ignore_eos=bool(self.ignore_eos),
        )

    def to_json(self) -> str:
        """The normal form as stored: one line of JSON."""
        return self.model_dump_json(exclude_none=True)


class ChatBody(GenerationBody):
    """A body of `/v1/chat/completions`."""

    messages: Annotated[tuple[Message, ...], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_INTEGER)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    parallel_tool_calls: bool | None = None
    tools: Unsupported = None
    functions: Unsupported = None
    tool_choice: Unsupported = None
    function_call: Unsupported = None
    response_format: Unsupported = None
    modalities: Unsupported = None
    audio: Unsupported = None
    prediction: Unsupported = None
    reasoning_effort: Unsupported = None
    verbosity: Unsupported = None
    web_search_options: Unsupported = None

    @property
    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def head(self) -> str | None:
        return self.messages[0].content

    def with_head(self, head: str) -> Self:
        first = self.messages[0].model_copy(update={"content": head})
        return self.model_copy(update={"messages": (first, *self.messages[1:])})


class CompletionBody(GenerationBody):
    """A body of `/v1/completions`."""

    prompt: Prompt
    logprobs: Annotated[int, Field(ge=0, le=MAX_COMPLETION_LOGPROBS)] | None = None
    best_of: Unsupported = None
    echo: Unsupported = None
    suffix: Unsupported = None

    @property
    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def wanted_tokens(self) -> int | None:
        return COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def head(self) -> str | None:
        return self.prompt if isinstance(self.prompt, str) else None

    def with_head(self, head: str) -> Self:
        return self.model_copy(update={"prompt": head})


Body = ChatBody | CompletionBody
BodyT = TypeVar("BodyT", bound=GenerationBody)
ModelT = TypeVar("ModelT", bound=BaseModel)


# --- Lines of an input file ----------------------------------------------------------------------------------------


class _Line(BaseModel):
    # Keys beside the four are the user's own (a note, a row number): they change no answer and are left alone.
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)

    custom_id: CustomId
    method: Literal["POST"]


class ChatLine(_Line):
    """A line of an OpenAI batch file for `/v1/chat/completions`."""

    url: Literal["/v1/chat/completions"]
    body: ChatBody


class CompletionLine(_Line):
    """A line of an OpenAI batch file for `/v1/completions`."""

    url: Literal["/v1/completions"]
    body: CompletionBody


class PlainChatLine(ChatBody):
    """A body of `/v1/chat/completions` as a line of its own."""

    custom_id: CustomId | None = None


class PlainCompletionLine(CompletionBody):
    """A body of `/v1/completions` as a line of its own."""

    custom_id: CustomId | None = None


class PlainPromptLine(GenerationBody):
    """`prompt` and body fields as a line of its own, for a batch of chat: the prompt becomes the user's message."""

    prompt: Annotated[str, BeforeValidator(_only_text)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_INTEGER)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    custom_id: CustomId | None = None


def parse_body(endpoint: Endpoint, raw: bytes | str, *, allow_stream: bool = False) -> Body:
    """Parse and check a body as a user wrote it, once, and bring it to its normal form.

    raw: JSON. allow_stream: False in a batch, where nobody listens to a stream.
    Raises InvalidRequest naming field, value, bound and way out.
    """
    body: Body = parse_as(ChatBody, raw) if endpoint is Endpoint.CHAT else parse_as(CompletionBody, raw)
    refuse_nul(body)
    return normalise(body, allow_stream=allow_stream)


def load_body(endpoint: Endpoint, stored: str, prefix: str = "") -> Body:
    """Read back a body in its normal form, as the worker does, and put its shared prefix before it again."""
    if endpoint is Endpoint.CHAT:
        return restore_prefix(ChatBody.model_validate_json(stored), prefix)
    return restore_prefix(CompletionBody.model_validate_json(stored), prefix)


def split_prefix(body: BodyT, prefix: str) -> BodyT:
    """Take a shared prefix off the first message or prompt. The inverse of `restore_prefix`."""
    if not prefix:
        return body
    head = body.head
    assert head is not None and head.startswith(prefix), "the prefix must be the head's beginning"
    return body.with_head(head[len(prefix) :])


def restore_prefix(body: BodyT, prefix: str) -> BodyT:
    """Put a shared prefix before the first message or prompt again."""
    if not prefix:
        return body
    head = body.head
    assert head is not None, "a prompt of token ids has no prefix"
    return body.with_head(prefix + head)


def parse_as(model: type[ModelT], raw: bytes | str, *, is_line: bool = False) -> ModelT:
    """Parse JSON into one of the models above. Raises InvalidRequest for the first thing that is wrong with it.

    is_line: of an input; else it is a call's whole body.
    """
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise explain(error, model, is_line=is_line) from None


def normalise(body: BodyT, *, allow_stream: bool = False) -> BodyT:
    """Bring a checked body to its normal form, and check what concerns several fields or the text as a whole."""
    if body.stream and not allow_stream:
        raise InvalidRequest(
            "stream is true, which only a call over HTTP of its own can do; remove it: the answer comes whole",
            code="unsupported_value",
            param="stream",
        )
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest(
            "stream_options is given but stream is not true; remove it", code="invalid_value", param="stream_options"
        )
    if isinstance(body, ChatBody):
        return _normalise_chat(body)
    if isinstance(body, CompletionBody) and not body.prompt:
        raise empty_prompt()
    return body


def _normalise_chat(body: BodyT) -> BodyT:
    assert isinstance(body, ChatBody)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest(
            f'top_logprobs is {body.top_logprobs} but logprobs is not true; add "logprobs": true',
            code="invalid_value",
            param="top_logprobs",
        )
    if not any(message.content for message in body.messages):
        raise empty_prompt("messages")
    if body.max_completion_tokens is None:
        return body
    if body.max_tokens is not None and body.max_tokens != body.max_completion_tokens:
        raise InvalidRequest(
            f"max_tokens is {body.max_tokens} and max_completion_tokens is {body.max_completion_tokens}; "
            "they are two names of one bound, keep one",
            code="invalid_value",
            param="max_completion_tokens",
        )
    return body.model_copy(update={"max_tokens": body.max_completion_tokens, "max_completion_tokens": None})


def refuse_nul(body: GenerationBody, where: str = "") -> None:
    """Refuse NUL characters, which no tokenizer knows and no database keeps, naming the text that has one.

    where: what the text's path begins with.
    """
    texts: list[tuple[str, str]] = []
    if isinstance(body, ChatBody):
        texts += [(f"messages[{i}].content", message.content) for i, message in enumerate(body.messages)]
    elif isinstance(body, CompletionBody | PlainPromptLine) and isinstance(body.prompt, str):
        texts.append(("prompt", body.prompt))
    texts += [(f"stop[{i}]", text) for i, text in enumerate(body.stop or ())]
    for param, text in texts:
        if "\0" in text:
            raise nul_character(where + param, text.index("\0"))


# --- Results -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenLogprob:
    """One chosen token, or one alternative to it. text: as far as its bytes are characters of their own."""

    text: str
    logprob: float
    utf8: bytes
    alternatives: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Choice:
    """One answer. finish_reason: `stop` (end token or stop text) or `length`. logprobs: None when not asked for."""

    text: str
    finish_reason: str
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True)
class Usage:
    """cached_tokens: of the prompt's, those whose keys and values were copied instead of computed."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


def render_response(
    endpoint: Endpoint,
    *,
    id: str,
    created: int,
    model: str,
    choices: Sequence[Choice],
    usage: Usage,
    system_fingerprint: str | None = None,
) -> dict[str, object]:
    """The response body of either endpoint. id: without its kind's prefix. created: Unix seconds."""
    render = render_chat_response if endpoint is Endpoint.CHAT else render_completion_response
    return render(
        id=id, created=created, model=model, choices=choices, usage=usage, system_fingerprint=system_fingerprint
    )


def render_chat_response(
    *,
    id: str,
    created: int,
    model: str,
    choices: Sequence[Choice],
    usage: Usage,
    system_fingerprint: str | None = None,
) -> dict[str, object]:
    """A `chat.completion` object."""
    return {
        "id": f"chatcmpl-{id}",
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": _chat_logprobs(choice.logprobs),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ],
        "usage": _render_usage(usage),
        "system_fingerprint": system_fingerprint,
    }


def render_completion_response(
    *,
    id: str,
    created: int,
    model: str,
    choices: Sequence[Choice],
    usage: Usage,
    system_fingerprint: str | None = None,
) -> dict[str, object]:
    """A `text_completion` object. `text_offset` counts characters of the answer, from 0."""
    return {
        "id": f"cmpl-{id}",
        "object": "text_completion",
        "created": created,
        "model": model,
        "choices": [
            {
                "index": index,
                "text": choice.text,
                "logprobs": _completion_logprobs(choice.logprobs),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ],
        "usage": _render_usage(usage),
        "system_fingerprint": system_fingerprint,
    }


def render_error_body(error: PromptmillError) -> dict[str, object]:
    """OpenAI's error body: all four keys are always there."""
    kind = "invalid_request_error" if isinstance(error, InvalidRequest) else "server_error"
    param = error.param if isinstance(error, InvalidRequest) else None
    return {"error": {"message": error.message, "type": kind, "param": param, "code": error.code}}


def render_output_line(
    *,
    request_id: str,
    custom_id: str | None,
    status_code: int | None,
    response: str | None,
    error_code: str | None = None,
    error_message: str | None = None,
) -> str:
    """One line of an output or error file, without its newline.

    response: the body as JSON text, put in as it stands. status_code None: never executed, the error says why.
    """
    if status_code is None:
        answer = "null"
        error = dump_json({"code": error_code, "message": error_message})
    else:
        answer = f'{{"status_code":{status_code},"request_id":{dump_json(request_id)},"body":{response or "null"}}}'
        error = "null"
    return (
        f'{{"id":{dump_json(f"{RESULT_ID_BEGINS}{request_id}")},"custom_id":{dump_json(custom_id)},'
        f'"response":{answer},"error":{error}}}'
    )


RESULT_ID_BEGINS = "batch_req_"


def result_id(request_id: int) -> str:
    """What result lines call a request."""
    return f"{RESULT_ID_BEGINS}{request_id:x}"


# Ids of result lines, and of the answers themselves.
REQUEST_NAMES_BEGIN = (RESULT_ID_BEGINS, "chatcmpl-", "cmpl-")
_REQUEST_NAME = re.compile(rf"(?:{'|'.join(REQUEST_NAMES_BEGIN)})([0-9a-f]{{1,15}})")  # what fits into a row's id


def named_request(name: str) -> int | None:
    """The request whose result line or answer has that id; None: no request can have it."""
    found = _REQUEST_NAME.fullmatch(name)
    return None if found is None else int(found[1], 16)


_RESPONSE_ID = re.compile(r'\A\{"id":"(chatcmpl|cmpl)-[^"]*"')


def with_response_id(response: str, request_id: str) -> str:
    """A stored response under the id of the request it answers: one that was taken from another request has its id."""
    return _RESPONSE_ID.sub(rf'{{"id":"\g<1>-{request_id}"', response)


# Made once: `json.dumps` with options makes one for each call.
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def dump_json(value: object) -> str:
    """JSON as it is stored and sent: compact, on one line, readable in any script.

    The three line separators that some readers of JSON Lines split at are escaped. NaN is our own mistake.
    """
    text = _ENCODER.encode(value)
    if text.isascii():
        return text
    return text.replace("\u0085", "\\u0085").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _render_usage(usage: Usage) -> dict[str, object]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _chat_logprobs(logprobs: Sequence[TokenLogprob] | None) -> dict[str, object] | None:
    if logprobs is None:
        return None
    return {
        "content": [
            {**_chat_token(token), "top_logprobs": [_chat_token(other) for other in token.alternatives]}
            for token in logprobs
        ],
        "refusal": None,
    }


def _chat_token(token: TokenLogprob) -> dict[str, object]:
    return {"token": token.text, "logprob": _finite(token.logprob), "bytes": list(token.utf8)}


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes -9999 for a token that could not be."""
    return max(logprob, IMPOSSIBLE_LOGPROB)


def _completion_logprobs(logprobs: Sequence[TokenLogprob] | None) -> dict[str, object] | None:
    if logprobs is None:
        return None
    offsets, offset = [], 0
    for token in logprobs:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [token.text for token in logprobs],
        "token_logprobs": [_finite(token.logprob) for token in logprobs],
        "top_logprobs": [{other.text: _finite(other.logprob) for other in token.alternatives} for token in logprobs],
        "text_offset": offsets,
    }


# --- What is wrong with a request ----------------------------------------------------------------------------------

# Codes of refusals that are no 400 -> HTTP's status, by whatever door the request came.
REFUSAL_STATUSES: Mapping[str, int] = {
    "batch_not_found": 404,
    "file_not_found": 404,
    "request_not_found": 404,
    "model_not_found": 404,
    "input_not_found": 404,
}


def empty_prompt(param: str = "prompt") -> InvalidRequest:
    return InvalidRequest(
        f"{param} has no text: 0 tokens, and at least 1 is needed; write a prompt", code="empty_prompt", param=param
    )


def context_length_exceeded(
    prompt_tokens: int, context_length: int, param: str = "messages", *, longest: int = 0
) -> InvalidRequest:
    """The prompt alone leaves no room for an answer. longest: the context that the artifact allows."""
    return InvalidRequest(
        f"the prompt has {prompt_tokens} tokens and the model's context is {context_length}, of which at least 1 is "
        f"for the answer; shorten the prompt by {prompt_tokens - context_length + 1} tokens or take a model with a "
        f"longer context{_longer_context(context_length, longest)}",
        code="context_length_exceeded",
        param=param,
    )


def max_tokens_exceeds_context(
    max_tokens: int, prompt_tokens: int, context_length: int, *, longest: int = 0
) -> InvalidRequest:
    """The prompt fits, but not together with as many new tokens as were asked for. longest: as above."""
    return InvalidRequest(
        f"max_tokens {max_tokens} and the prompt's {prompt_tokens} tokens exceed the model's context of "
        f"{context_length}; lower max_tokens to {context_length - prompt_tokens} or less"
        f"{_longer_context(context_length, longest)}",
        code="max_tokens_exceeds_context",
        param="max_tokens",
    )


def _longer_context(context_length: int, longest: int) -> str:
    """What the operator can do, where a worker runs the model with less than it allows."""
    if longest <= context_length:
        return ""
    return f", or have the workers' context raised, to {longest} at most: PROMPTMILL_ENGINE_CONTEXT_LENGTH"


def token_out_of_vocabulary(token_id: int, vocabulary_size: int, param: str) -> InvalidRequest:
    """A token id given by number (prompt, logit_bias) that the model does not have."""
    return InvalidRequest(
        f"{param} has token id {token_id} and the model's vocabulary ends at {vocabulary_size - 1}; "
        "take ids of this model's tokenizer",
        code="token_out_of_vocabulary",
        param=param,
    )


def text_out_of_vocabulary(text: str, token_id: int, vocabulary_size: int, param: str) -> InvalidRequest:
    """A text that the tokenizer has a token for and the model has not."""
    return InvalidRequest(
        f"{param} contains {show(text)}, to the tokenizer token id {token_id}, and the model's vocabulary ends at "
        f"{vocabulary_size - 1}; leave that text out, or convert a checkpoint whose model has the token",
        code="token_out_of_vocabulary",
        param=param,
    )


def model_not_found(model: str, served: str) -> InvalidRequest:
    return InvalidRequest(
        f"model {show(model)} is not served here, only {show(served)}; write that name, or choose another artifact",
        code="model_not_found",
        param="model",
    )


def unknown_model(named: str, known: Collection[str]) -> InvalidRequest:
    """A request of its own asks for a model that nobody has."""
    return InvalidRequest(
        f"there is no model {show(named)}, only {show_names(sorted(known))}; take one of these, or convert it and "
        "start a worker: promptmill up",
        code="model_not_found",
        param="model",
    )


def nul_character(param: str, position: int) -> InvalidRequest:
    return InvalidRequest(
        f"{param} has a NUL character at position {position}; remove it", code="nul_character", param=param
    )


def show(value: object) -> str:
    """A refused value for a message: JSON, cut to a readable length."""
    if isinstance(value, str):
        value = value[: SHOWN_CHARACTERS + 1]
    elif isinstance(value, list | tuple):
        value = list(value[:SHOWN_CHARACTERS])
    try:
        text = json.dumps(value, ensure_ascii=False, default=repr)
    except (ValueError, RecursionError):  # an integer of more than 4,300 digits, or nested too deep to print
        text = f"a very large {_json_type(value)}"
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"


def show_name(name: str, characters: int = SHOWN_CHARACTERS) -> str:
    """A field's, column's or file's name for a message: on one line, without control characters, not too long."""
    text = name if name.isprintable() else json.dumps(name[: characters + 1])[1:-1]
    return text if len(text) <= characters else text[: characters - 1] + "…"


def show_names(names: Sequence[str]) -> str:
    """Names for a message, a readable number of them."""
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return ", ".join(map(show_name, names[:SHOWN_NAMES])) + more or "none"


def explain(error: ValidationError, model: type[BaseModel], *, is_line: bool = False) -> InvalidRequest:
    """The first of a validation's findings as an error with OpenAI's code, naming field, value, bound and way out."""
    found = error.errors(include_url=False)
    # An unknown field next to a missing one is usually the missing one, misspelt: say that first.
    first = next((each for each in found if each["type"] == "extra_forbidden"), found[0])
    kind, value, bounds = first["type"], first["input"], first.get("ctx", {})
    if kind == "json_invalid":
        return broken_json(str(bounds.get("error", "not JSON")), is_line=is_line)
    if not first["loc"] and kind in _NO_OBJECT:
        return no_object(value, is_line=is_line)
    param = _path(first["loc"])

    def refuse(code: str, message: str) -> InvalidRequest:
        return InvalidRequest(message, code=code, param=param or None)

    if kind == "extra_forbidden":
        nearest = difflib.get_close_matches(str(first["loc"][-1]), _fields_at(model, first["loc"]), n=1, cutoff=0.6)
        way_out = f"did you mean {nearest[0]}?" if nearest else "remove it"
        return refuse("unknown_parameter", f"unknown field {param} = {show(value)}; {way_out}")
    if kind == "missing":
        return refuse("missing_required_parameter", f"{param} is missing; add it")
    if kind == "unsupported_parameter":
        return refuse(kind, f"{param} is {show(value)}, which {first['msg']}")
    if kind in ("unsupported_value", "invalid_type"):
        return refuse(kind, f"{param} {first['msg']}")
    if kind == "int_parsing" or (first["loc"] and first["loc"][-1] == "[key]"):
        return refuse("invalid_type", f"{param} has no token id as its key; write whole numbers from 0 as keys")
    if kind in _NUMERIC_BOUNDS:
        side, key, relation, way_out = _NUMERIC_BOUNDS[kind]
        bound = bounds[key]
        number = "integer" if isinstance(bound, int) else "decimal"
        return refuse(f"{number}_{side}_value", f"{param} {show(value)} {relation} {_round(bound)}; {way_out}")
    if kind == "too_long":
        return refuse(
            "array_above_max_length",
            f"{param} has {bounds['actual_length']} entries, which exceeds {bounds['max_length']}; remove some",
        )
    if kind == "too_short":
        return refuse("empty_array", f"{param} is empty and needs at least {bounds['min_length']}; add one")
    if kind == "string_too_long":
        length = len(value) if isinstance(value, str) else "too many"
        return refuse(
            "string_above_max_length",
            f"{param} has {length} characters, which exceeds {bounds['max_length']}; shorten it",
        )
    if kind == "string_too_short":
        return refuse("empty_string", f'{param} is ""; write at least {bounds["min_length"]} character or remove it')
    if kind == "string_pattern_mismatch":
        return refuse("invalid_value", f"{param} is {show(value)}; write what matches {bounds['pattern']}")
    if kind == "literal_error":
        return refuse("invalid_value", f"{param} is {show(value)}; write {bounds['expected']}")
    if kind == "finite_number":
        return refuse("invalid_value", f"{param} is {show(value)}; write a finite number")
    shown = "null" if value is None else f"{show(value)}, {_json_type(value)}"
    wanted = _WANTED.get(kind, "another type")
    return refuse("invalid_type", f"{param or 'the JSON'} is {shown}; write {wanted}")


def broken_json(detail: str, *, is_line: bool) -> InvalidRequest:
    """detail: what the JSON parser says, with line and column. is_line: of an input, where a line is a whole text."""
    code = _JSON_CODES[is_line]
    if "recursion limit" in detail:
        return InvalidRequest("JSON is nested more than 200 deep; a request needs 5, flatten it", code=code)
    where = re.search(r" at (line \d+ )?(column \d+)$", detail)
    shown = "" if where is None else f" at {where[2]}" if is_line or where[1] == "line 1 " else where[0]
    if "surrogate" in detail or "unexpected end of hex escape" in detail:
        return InvalidRequest(f"broken JSON: half of a surrogate pair{shown}; write the whole character", code=code)
    reason = detail if where is None else detail[: where.start()]
    return InvalidRequest(
        f"broken JSON: {reason}{shown}; write one JSON object{' on one line' if is_line else ''}", code=code
    )


def no_object(value: object, *, is_line: bool) -> InvalidRequest:
    """JSON, but a list, a text or a number."""
    if is_line:
        message = f"the line is {show(value)}; write one JSON object on it"
    else:
        message = f"the JSON is {show(value)}; write one JSON object"
    return InvalidRequest(message, code=_JSON_CODES[is_line])


# Whether it is a line -> the code.
_JSON_CODES = {True: "invalid_json_line", False: "invalid_json"}
_NO_OBJECT = ("dict_type", "model_type", "model_attributes_type")


_NUMERIC_BOUNDS = {
    "greater_than_equal": ("below_min", "ge", "is below", "raise it"),
    "less_than_equal": ("above_max", "le", "exceeds", "lower it"),
}

# pydantic's error type -> what to write instead.
_WANTED = {
    "string_type": "a string",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}


def _round(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def _json_type(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int():
            return "a whole number"
        case float():
            return "a decimal number"
        case str():
            return "a string"
        case list() | tuple():
            return "a list"
        case _:
            return "an object"


def _path(loc: tuple[int | str, ...]) -> str:
    """`('messages', 0, 'content')` as `messages[0].content`, without pydantic's mark for keys."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part != "[key]":
            path += f".{show_name(part)}" if path else show_name(part)
    return path


def _fields_at(model: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    """The known names where an unknown one stood."""
    if "messages" in loc[:-1]:
        return list(Message.model_fields)
    if "stream_options" in loc[:-1]:
        return list(StreamOptions.model_fields)
    if "body" in loc[:-1]:
        field: Any = model.model_fields["body"].annotation
        return list(field.model_fields)
    return list(model.model_fields)
