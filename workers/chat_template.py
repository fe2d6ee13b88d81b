"""Chat messages → one prompt text, by the checkpoint's own Jinja template in a sandbox.

The environment is the one the templates were written for (that of `transformers`): trimmed blocks, `raise_exception`,
`strftime_now`, `tojson` without escapes, loop controls, `{% generation %}`. The template writes BOS itself where the
model wants one. Templates come with downloaded checkpoints, so they run where they can reach nothing but the messages.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from storage.errors import InvalidRequest
from workers.models.description import ChatFormat
from workers.models.errors import ArtifactError

# Llama 2's format, as Meta's reference code has it: the system prompt inside the first user turn, BOS before each turn.
LLAMA2_TEMPLATE = """\
{%- if messages[0]['role'] == 'system' -%}
{%- set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' -%}
{%- set turns = messages[1:] -%}
{%- else -%}
{%- set system = '' -%}
{%- set turns = messages -%}
{%- endif -%}
{%- for message in turns -%}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{- raise_exception('roles must alternate user, assistant, user, ... after an optional system message') -}}
{%- endif -%}
{%- set content = system + message['content'] if loop.first else message['content'] -%}
{%- if message['role'] == 'user' -%}
{{- bos_token + '[INST] ' + content | trim + ' [/INST]' -}}
{%- elif message['role'] == 'assistant' -%}
{{- ' ' + message['content'] | trim + ' ' + eos_token -}}
{%- else -%}
{{- raise_exception('role ' ~ message['role'] ~ ' is not known to the Llama 2 format') -}}
{%- endif -%}
{%- endfor -%}
"""

# For base models, which know no format: a dialogue with names, as they have read many.
PLAIN_TEMPLATE = """\
{%- for message in messages -%}
{{- message['role'] | capitalize + ': ' + message['content'] | trim + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- 'Assistant:' -}}
{%- endif -%}
"""


class ChatTemplate:
    """A compiled template. Rendering is free of side effects and may be called from any thread."""

    def __init__(
        self,
        source: str,
        *,
        bos_token: str,
        eos_token: str,
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        """clock: what `strftime_now` reads. Raises ArtifactError where the template is not Jinja."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: clock().strftime(form)
        self._special = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = environment.from_string(source)
            # Jinja gives it a ChainMap, which it copies for each rendering, for half of what a short prompt costs.
            self._template.globals = dict(self._template.globals)
        except jinja2.TemplateError as error:
            raise ArtifactError(f"the chat template does not compile: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text. variables: further names a template may know, such as enable_thinking.

        Raises InvalidRequest where the template refuses the messages or does not fit them.
        """
        context = {
            **(variables or {}),
            **self._special,
            "messages": [_with_text(message) for message in messages],
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(context)
        # A template may call anything on a message, so any error is the message's or the template's, never ours.
        except Exception as error:
            raise InvalidRequest(
                f"the model's chat template does not accept these messages: {error}; check roles and their order",
                code="invalid_messages",
                param="body.messages",
            ) from error


def builtin_template(chat_format: ChatFormat) -> str:
    """The template of a checkpoint that brings none."""
    return LLAMA2_TEMPLATE if chat_format == "llama2" else PLAIN_TEMPLATE


class _Generation(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here it only passes its content on."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it without ClassVar

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _with_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """Join content given as parts; templates expect a text. Absent content (a tool call) reads as empty."""
    content = message.get("content")
    if isinstance(content, list):
        parts = []
        for index, part in enumerate(content):
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                raise InvalidRequest(
                    f"content part {index} has type {kind}; this model reads text only",
                    code="invalid_messages",
                    param=f"body.messages.content.{index}",
                )
            parts.append(part["text"])
        content = "".join(parts)
    return {**message, "content": "" if content is None else content}


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
