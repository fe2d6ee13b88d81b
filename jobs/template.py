"""A row of a table, a template and a shared context -> the text of a prompt.

The template is Jinja in its sandbox: it can read the columns and nothing else. A column that is not there is an
error, never an empty text. The context is not part of the template: it is placed before every prompt, the same bytes
each time, so that its keys and values are computed once (see `jobs/inputs.py` for where it stands).
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from jinja2 import StrictUndefined, TemplateSyntaxError, UndefinedError, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jobs.protocol import show_name, show_names
from jobs.source import InputError
from storage.errors import InvalidRequest

MAX_TEMPLATE_BYTES = 1_000_000  # a template is written by hand; what is longer is the wrong file
CONTEXT_SEPARATOR = "\n\n"  # between context files, and between the context and a prompt


class PromptTemplate:
    """A template and the columns it reads."""

    def __init__(self, text: str, name: str = "template") -> None:
        """Raises InputError `template_error` naming the line at fault."""
        self.text = text
        self.name = show_name(name)
        environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=False)
        try:
            tree = environment.parse(text)
            self._template = environment.from_string(text)
        except TemplateSyntaxError as error:
            raise InputError(
                f"{name} line {error.lineno}: {_said(error)}; correct the template", code="template_error"
            ) from error
        self.columns = frozenset(find_undeclared_variables(tree)) - frozenset(environment.globals)
        self._excused = _names_with_a_fallback(tree)
        self._lines = {node.name: node.lineno for node in tree.find_all(nodes.Name) if node.ctx == "load"}

    def check_columns(self, columns: Sequence[str]) -> None:
        """Raise InputError `missing_column` for the first column that the table as a whole does not have."""
        missing = self.columns - frozenset(columns) - self._excused
        if missing:
            column = min(missing, key=lambda name: (self._lines.get(name, 0), name))
            raise InputError(
                f"{self.name} line {self._lines.get(column, 1)}: {_no_column(column, columns)}", code="missing_column"
            )

    def render(self, row: Mapping[str, object]) -> str:
        """The prompt of one row. Raises InvalidRequest: missing_column, template_error, empty_prompt."""
        try:
            text = self._template.render(row)
            text.encode()
        except UndefinedError as error:
            missing = sorted(self.columns - row.keys())
            detail = (
                _no_column(missing[0], list(row)) if missing else f"{_said(error)}; correct the template or the row"
            )
            code = "missing_column" if missing else "template_error"
            raise InvalidRequest(f"{self.name} line {_template_line(error)}: {detail}", code=code) from None
        except UnicodeEncodeError:
            raise InvalidRequest(
                f"{self.name} makes half of a surrogate pair of this row; correct the template", code="template_error"
            ) from None
        except (
            TemplateError,
            SecurityError,
            ArithmeticError,
            LookupError,
            TypeError,
            ValueError,
            MemoryError,
        ) as error:
            raise InvalidRequest(
                f"{self.name} line {_template_line(error)}: {_said(error)}; correct the template or the row",
                code="template_error",
            ) from None
        if not text.strip():
            raise InvalidRequest(
                f"{self.name} makes an empty prompt of this row; fill its columns or remove the row",
                code="empty_prompt",
            )
        return text


def read_template(path: Path) -> PromptTemplate:
    """Raises InputError: template_error, or the file's own failure."""
    return PromptTemplate(_read_text(path, MAX_TEMPLATE_BYTES), path.name)


def read_context(paths: Iterable[Path]) -> str:
    """The texts of the context files in the order given, each without the white space around it."""
    return CONTEXT_SEPARATOR.join(text for path in paths if (text := _read_text(path).strip()))


def _read_text(path: Path, max_bytes: int | None = None) -> str:
    try:
        if max_bytes is not None and path.stat().st_size > max_bytes:
            raise InputError(
                f"{path} has {path.stat().st_size:,} bytes, which exceeds {max_bytes:,}; is it the right file?",
                code="template_error",
            )
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise InputError(f"{path} is not there; check the name", code="input_not_found") from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: byte {error.start + 1} is not UTF-8; save the file as UTF-8", code="invalid_encoding"
        ) from error
    except OSError as error:
        raise InputError(
            f"{path} cannot be read: {error.strerror}; check its rights", code="unreadable_input"
        ) from error
    if "\0" in text:
        raise InputError(
            f"{path} has a NUL character at position {text.index(chr(0))}; is it a text file?", code="nul_character"
        )
    return text


def _said(error: Exception) -> str:
    """What an error says, to stand within a sentence of ours."""
    return show_name(str(error).rstrip(". "), 200)


def _no_column(column: str, columns: Sequence[str]) -> str:
    return f"column '{column}' is missing; columns there are: {show_names(columns)}"


def _names_with_a_fallback(tree: nodes.Template) -> frozenset[str]:
    """Names that the template asks about before it needs them: `is defined`, `| default(..)`."""
    asked = [test.node for test in tree.find_all(nodes.Test) if test.name in ("defined", "undefined")]
    asked += [use.node for use in tree.find_all(nodes.Filter) if use.name in ("default", "d") and use.node is not None]
    return frozenset(node.name for node in asked if isinstance(node, nodes.Name))


def _template_line(error: BaseException) -> int:
    """The template's line that raised: Jinja rewrites tracebacks so that they point into the template."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    return (lines[-1] if lines else None) or 1
