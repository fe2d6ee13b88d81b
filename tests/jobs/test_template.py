"""Templates and context: mistakes are named by line and column, and a template can reach nothing but its row."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.source import InputError
from jobs.template import PromptTemplate, read_context, read_template
from storage.errors import InvalidRequest


def test_a_row_becomes_a_prompt() -> None:
    template = PromptTemplate("Topic: {{ topic }}\n{% if hint %}Hint: {{ hint }}\n{% endif %}{{ question | upper }}\n")
    assert template.render({"topic": "law", "hint": "", "question": "why?"}) == "Topic: law\nWHY?"
    assert template.columns == {"topic", "hint", "question"}


def test_a_missing_column_is_found_before_the_first_row() -> None:
    """A million rows would otherwise be refused one by one for one slip of the pen."""
    template = PromptTemplate("{{ topic }}\n\n{{ qestion }}", "q.j2")
    with pytest.raises(InputError) as caught:
        template.check_columns(["topic", "question"])
    assert caught.value.code == "missing_column"
    assert caught.value.message == "q.j2 line 3: column 'qestion' is missing; columns there are: topic, question"


def test_a_missing_column_of_one_record_is_named_with_its_template_line() -> None:
    template = PromptTemplate("a\nb {{ topic }}\n{{ question }}", "q.j2")
    with pytest.raises(InvalidRequest) as caught:
        template.render({"topic": "x"})
    assert caught.value.message == "q.j2 line 3: column 'question' is missing; columns there are: topic"
    assert caught.value.code == "missing_column"


@pytest.mark.parametrize("text", ["{% if x is defined %}{{ x }}{% endif %}.", "{{ x | default('none') }}"])
def test_a_column_that_the_template_asks_about_may_be_missing(text: str) -> None:
    template = PromptTemplate(text)
    template.check_columns(["y"])
    assert template.render({"y": 1}) in (".", "none")


def test_a_syntax_error_names_its_line() -> None:
    with pytest.raises(InputError, match=r"^q.j2 line 2: "):
        PromptTemplate("fine\n{{ broken ", "q.j2")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n{{ 1 // n }}", "template line 2: integer division or modulo by zero; correct the template or the row"),
        ("{{ n.x }}", "template line 1: 'int object' has no attribute 'x'; correct the template or the row"),
        (
            "{{ n.__class__.__mro__ }}",
            "template line 1: access to attribute '__class__' of 'int' object is unsafe; "
            "correct the template or the row",
        ),
        ("{{ range(10000000) | list }}", None),
        ("{% include 'x' %}", None),
    ],
)
def test_what_goes_wrong_in_a_template_fails_the_row_alone(text: str, message: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        PromptTemplate(text).render({"n": 0})
    assert caught.value.code == "template_error"
    if message is not None:
        assert caught.value.message == message


@pytest.mark.parametrize("text", ["{{ a", "{% for x in y %}", "{{ a }} }}{% end %}", "{% if %}"])
def test_a_template_that_cannot_be_read_is_said_in_one_sentence(text: str) -> None:
    """Jinja ends its own sentences; ours go on."""
    with pytest.raises(InputError) as caught:
        PromptTemplate(text)
    assert caught.value.message.endswith("; correct the template")
    assert ".;" not in caught.value.message


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        PromptTemplate(" {{ a }}\n").render({"a": ""})
    assert caught.value.code == "empty_prompt"


def test_columns_are_data_and_not_templates() -> None:
    assert PromptTemplate("{{ a }}").render({"a": "{{ b }} <&>"}) == "{{ b }} <&>"


def test_context_files_are_joined_in_order(tmp_path: Path) -> None:
    for name, text in [("a", "\ufeffone\n\n"), ("b", "  "), ("c", "three\n")]:
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert read_context([tmp_path / "c", tmp_path / "b", tmp_path / "a"]) == "three\n\none"


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    binary = tmp_path / "x.bin"
    binary.write_bytes(b"ab\xff")
    with pytest.raises(InputError, match=r"x.bin: byte 3 is not UTF-8; save the file as UTF-8"):
        read_context([binary])
    with pytest.raises(InputError, match="is not there; check the name"):
        read_template(tmp_path / "none.j2")
    binary.write_bytes(b"a\0")
    with pytest.raises(InputError, match="has a NUL character at position 1"):
        read_template(binary)


@given(st.text(max_size=40))
def test_any_text_is_a_template_or_a_named_error(text: str) -> None:
    try:
        template = PromptTemplate(text)
        template.render({})
    except (InputError, InvalidRequest) as error:
        assert error.message
