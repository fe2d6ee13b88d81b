"""Every way an input can be written or be wrong: each line is accounted for, none takes others along."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import sys
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jobs.custom_ids import CustomIds
from jobs.inputs import InputFormat, InputLine, InputOptions, InputReader
from jobs.prefixes import PrefixFinder
from jobs.protocol import ChatBody, CompletionBody, Endpoint, GenerationBody, load_body
from jobs.source import GZIP_MAGIC, UTF16_MARKS, InputError, open_source
from jobs.template import PromptTemplate
from storage.transitions import RefusedLine

Write = Callable[[str, bytes], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(name: str, data: bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(data)
        return path

    return write_file


def read(path: Path | str, **options: object) -> list[InputLine | RefusedLine]:
    with open_source(path, Path(str(path)).parent / "spool") as source:
        return list(InputReader(source, InputOptions(model="smol", **options)))  # type: ignore[arg-type]


def openai_line(custom_id: object = "a", url: str = "/v1/chat/completions", **body: object) -> bytes:
    filled = {"model": "smol", "messages": [{"role": "user", "content": "hi"}]} | body
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": filled}).encode()


def texts(items: list[InputLine | RefusedLine], endpoint: Endpoint = Endpoint.CHAT) -> list[list[str]]:
    """The messages, or the prompt, that each line asks for, its prefix put back."""
    found = []
    for item in items:
        assert isinstance(item, InputLine), item
        body = load_body(endpoint, item.body, item.prefix)
        if isinstance(body, ChatBody):
            found.append([f"{message.role}: {message.content}" for message in body.messages])
        else:
            assert isinstance(body, CompletionBody)
            found.append([str(body.prompt)])
    return found


def own_id(item: InputLine | RefusedLine) -> str | None:
    """What a line brought itself; one made of its number differs with its place."""
    return None if item.custom_id == f"line-{item.line}" else item.custom_id


def refused(items: list[InputLine | RefusedLine]) -> list[tuple[int, str, str]]:
    return [(item.line, item.error_code, item.error_message) for item in items if isinstance(item, RefusedLine)]


class TestFormats:
    def test_an_openai_file_keeps_its_ids_and_bodies(self, write: Write) -> None:
        path = write("in.jsonl", openai_line("x", temperature=0) + b"\n" + openai_line("y") + b"\n")
        assert read(path) == [
            InputLine(
                1, "x", '{"model":"smol","temperature":0.0,"messages":[{"role":"user","content":"hi"}]}', prefix=""
            ),
            InputLine(2, "y", '{"model":"smol","messages":[{"role":"user","content":"hi"}]}', prefix=""),
        ]

    def test_the_first_openai_line_decides_the_endpoint(self, write: Write) -> None:
        line = {
            "custom_id": "a",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "smol", "prompt": [1, 2]},
        }
        path = write("in.jsonl", json.dumps(line).encode())
        with open_source(path, path.parent) as source:
            reader = InputReader(source, InputOptions(model="smol"))
            assert [item.line for item in reader] == [1]
            assert reader.endpoint is Endpoint.COMPLETIONS

    def test_plain_jsonl_is_told_apart_line_by_line(self, write: Write) -> None:
        lines = [
            {"prompt": "one", "max_tokens": 5},
            {"messages": [{"role": "user", "content": "two"}], "custom_id": "second"},
            json.loads(openai_line("third")),
            {"prompt": "four"},
        ]
        items = read(write("in.jsonl", "\n".join(map(json.dumps, lines)).encode()))
        assert texts(items) == [["user: one"], ["user: two"], ["user: hi"], ["user: four"]]
        assert [item.custom_id for item in items] == ["line-1", "second", "third", "line-4"]
        assert json.loads(items[0].body)["max_tokens"] == 5  # type: ignore[union-attr]

    def test_a_template_sees_a_line_of_text_as_its_prompt(self, write: Write) -> None:
        path = write("in.txt", b"What is tea?\n\nAnd milk?\n")
        items = read(path, template=PromptTemplate("Answer briefly: {{ prompt }}"))
        assert texts(items) == [["user: Answer briefly: What is tea?"], ["user: Answer briefly: And milk?"]]
        with pytest.raises(InputError, match="prompt") as caught:
            read(path, template=PromptTemplate("{{ question }}"))
        assert caught.value.code == "missing_column"

    def test_a_text_file_is_a_prompt_a_line(self, write: Write) -> None:
        items = read(write("in.txt", "first \r\n\n  \nschön\nno newline".encode()))
        assert [(item.line, item.custom_id) for item in items] == [(1, "line-1"), (4, "line-4"), (5, "line-5")]
        assert texts(items) == [["user: first "], ["user: schön"], ["user: no newline"]]

    def test_plain_lines_may_ask_for_completions(self, write: Write) -> None:
        items = read(write("in.txt", b"once upon\n"), endpoint=Endpoint.COMPLETIONS)
        assert texts(items, Endpoint.COMPLETIONS) == [["once upon"]]

    def test_the_command_line_fills_what_a_line_does_not_say(self, write: Write) -> None:
        path = write("in.jsonl", b'{"prompt":"a"}\n{"prompt":"b","max_completion_tokens":3,"temperature":0.5}\n')
        items = read(path, defaults=GenerationBody(max_tokens=9, temperature=0.0, seed=4))
        bodies = [load_body(Endpoint.CHAT, item.body).sampling() for item in items if isinstance(item, InputLine)]
        assert [(body.max_tokens, body.temperature, body.seed) for body in bodies] == [(9, 0.0, 4), (3, 0.5, 4)]

    def test_csv_rows_go_through_the_template(self, write: Write) -> None:
        data = b'id,question,topic\n7,"What, ""exactly""?\nAnd why?",law\n8,How?,\n'
        items = read(write("in.csv", data), template=PromptTemplate("[{{ topic }}] {{ question }}"))
        assert [(item.line, item.custom_id) for item in items] == [(2, "7"), (4, "8")]
        assert texts(items) == [['user: [law] What, "exactly"?\nAnd why?'], ["user: [] How?"]]

    def test_tsv_and_a_prompt_column_need_no_template(self, write: Write) -> None:
        items = read(write("in.tsv", b"prompt\tnote\nhello, you\tx\n"))
        assert [item.custom_id for item in items] == ["line-2"]
        assert texts(items) == [["user: hello, you"]]

    def test_parquet_rows_go_through_the_template(self, tmp_path: Path) -> None:
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        table = pyarrow.table({"id": [5, 6], "question": ["Why?", None], "unused": [b"x", b"y"]})
        parquet.write_table(table, tmp_path / "in.parquet")
        items = read(tmp_path / "in.parquet", template=PromptTemplate("{{ question or 'nothing' }}"))
        assert [(item.line, item.custom_id) for item in items] == [(1, "5"), (2, "6")]
        assert texts(items) == [["user: Why?"], ["user: nothing"]]

    def test_jsonl_records_go_through_the_template(self, write: Write) -> None:
        path = write("in.jsonl", b'{"id": 3, "tags": ["a", "b"]}\n{"id": 4}\n')
        items = read(path, template=PromptTemplate("{{ tags | join('+') }}"))
        assert texts(items[:1]) == [["user: a+b"]]
        assert refused(items) == [
            (
                2,
                "missing_column",
                "in.jsonl line 2: template line 1: column 'tags' is missing; columns there are: id",
            )
        ]
        assert items[1].custom_id == "4"

    def test_gzip_is_read_through_whatever_the_name(self, write: Write) -> None:
        packed = gzip.compress(b"one\ntwo\n")
        assert texts(read(write("in.txt.gz", packed))) == [["user: one"], ["user: two"]]
        assert texts(read(write("in.txt", packed))) == [["user: one"], ["user: two"]]
        assert texts(read(write("bare.txt.gz", b"one\n"))) == [["user: one"]]

    def test_standard_input_is_told_by_its_first_byte(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for data, expected in [(b'  {"prompt": "json"}\n', "user: json"), (b"text\n", "user: text")]:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
            with open_source("-", tmp_path / "spool") as source:
                assert texts(list(InputReader(source, InputOptions(model="smol")))) == [[expected]]
                assert source.sha256() == source.sha256()
        assert list((tmp_path / "spool").iterdir()) == []

    @pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
    def test_a_pipe_is_spooled_and_can_be_read_twice(self, tmp_path: Path) -> None:
        pipe = tmp_path / "pipe.txt"
        os.mkfifo(pipe)
        writer = threading.Thread(target=lambda: pipe.write_bytes(b"one\ntwo\n"))
        writer.start()
        with open_source(pipe, tmp_path / "spool") as source:
            writer.join()
            assert source.sha256() == hashlib.sha256(b"one\ntwo\n").hexdigest()
            assert texts(list(InputReader(source, InputOptions(model="smol")))) == [["user: one"], ["user: two"]]
        assert list((tmp_path / "spool").iterdir()) == []

    def test_a_disk_too_full_for_standard_input_is_said_so(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"text\n")))
        monkeypatch.setattr("shutil.copyfileobj", full)
        with pytest.raises(InputError) as caught:
            open_source("-", tmp_path / "spool")
        assert caught.value.code == "disk_full"
        assert caught.value.message == (
            f"standard input does not fit on the disk of {tmp_path / 'spool'}; free some space, or give a file instead"
        )

    def test_the_format_can_be_said(self, write: Write) -> None:
        assert texts(read(write("prompts.dat", b'{"prompt": 1}'), format=InputFormat.TEXT)) == [['user: {"prompt": 1}']]

    def test_a_byte_order_mark_is_dropped_at_the_start_alone(self, write: Write) -> None:
        items = read(write("in.txt", b"\xef\xbb\xbfone\n\xef\xbb\xbftwo\n"))
        assert texts(items) == [["user: one"], ["user: \ufefftwo"]]


class TestContext:
    """The context is the same bytes in every prompt and stored once, or it would be computed and kept each time."""

    def test_in_a_chat_it_is_the_system_message(self, write: Write) -> None:
        path = write("in.txt", b"why?\nhow?\n")
        items = read(path, context="The book.")
        assert texts(items) == [["system: The book.", "user: why?"], ["system: The book.", "user: how?"]]
        assert [item.prefix for item in items if isinstance(item, InputLine)] == ["The book.", "The book."]
        assert "The book." not in "".join(item.body for item in items if isinstance(item, InputLine))

    def test_a_system_text_comes_before_it(self, write: Write) -> None:
        path = write("in.txt", b"why?\n")
        assert texts(read(path, context="The book.", system="Be brief.")) == [
            ["system: Be brief.\n\nThe book.", "user: why?"]
        ]
        assert texts(read(path, system="Be brief.")) == [["system: Be brief.", "user: why?"]]

    def test_before_a_completion_it_is_the_beginning_of_the_prompt(self, write: Write) -> None:
        items = read(write("in.txt", b"why?\n"), context="The book.", endpoint=Endpoint.COMPLETIONS)
        assert texts(items, Endpoint.COMPLETIONS) == [["The book.\n\nwhy?"]]
        assert items[0].prefix == "The book.\n\n"  # type: ignore[union-attr]

    def test_lines_with_messages_of_their_own_are_refused(self, write: Write) -> None:
        (line,) = refused(read(write("in.jsonl", openai_line()), context="The book."))
        assert line == (
            1,
            "context_not_applicable",
            "in.jsonl line 1: --context and --system are for prompts made here, and this line brings its own; write "
            "them into its messages, or leave the options out",
        )


# A NUL is refused, in any text.
STORABLE = st.characters(exclude_characters="\0", exclude_categories=["Cs"])


class TestPromptsAlone:
    """A prompt with nothing special about it is written without a model of its own, and must come out the same."""

    @given(
        st.lists(st.text(STORABLE, min_size=1), min_size=1, max_size=4),
        st.fixed_dictionaries(
            {},
            optional={
                "temperature": st.floats(0, 2),
                "max_tokens": st.integers(1, 2**40),
                "max_completion_tokens": st.none() | st.integers(1, 9),
                "seed": st.integers(-(2**63), 2**63 - 1),
                "stop": st.text(STORABLE, min_size=1, max_size=5) | st.just([]),
                "user": st.just("") | st.text(STORABLE),
                "logit_bias": st.dictionaries(st.integers(0, 99).map(str), st.floats(-100, 100), max_size=2),
                "logprobs": st.just(True),
                "model": st.just("smol"),
            },
        ),
        st.sampled_from([{}, {"system": "Be brief."}, {"context": 'A "book".'}, {"system": "x", "context": "y"}]),
        st.sampled_from([GenerationBody(), GenerationBody(temperature=0.5, user="")]),
    )
    def test_a_prompt_line_is_the_chat_it_stands_for(
        self,
        tmp_path_factory: pytest.TempPathFactory,
        prompts: list[str],
        said: dict[str, object],
        placed: dict[str, str],
        defaults: GenerationBody,
    ) -> None:
        assume("max_tokens" not in said or said.get("max_completion_tokens") is None)
        path = tmp_path_factory.getbasetemp() / "prompts.jsonl"
        path.write_text("".join(json.dumps({"prompt": prompt, **said}) + "\n" for prompt in prompts))
        system = "\n\n".join(placed.values())
        messages = [{"role": "system", "content": system}] if system else []
        for prompt, item in zip(prompts, read(path, defaults=defaults, **placed), strict=True):
            assert isinstance(item, InputLine), item
            wanted = {"messages": [*messages, {"role": "user", "content": prompt}], **said}
            if wanted.get("max_completion_tokens"):
                wanted["max_tokens"] = wanted.pop("max_completion_tokens")
            filled = {"temperature": 0.5, "user": ""} if defaults.temperature else {}
            body = load_body(Endpoint.CHAT, item.body, item.prefix)
            assert body == ChatBody.model_validate_json(json.dumps(filled | wanted))
            assert item.body == load_body(Endpoint.CHAT, item.body).to_json()

    def test_what_a_line_says_wrong_is_refused_though_the_line_before_said_much_the_same(self, write: Write) -> None:
        lines: list[dict[str, object]] = [
            {"prompt": "a", "seed": 1},
            {"prompt": "", "seed": 1},
            {"prompt": "a", "seed": 1, "stream": True},
            {"prompt": "a", "seed": 1, "model": "other"},
            {"prompt": "b", "seed": 1},
        ]
        items = read(write("in.jsonl", "\n".join(map(json.dumps, lines)).encode()))
        assert [(line, code) for line, code, _ in refused(items)] == [
            (2, "empty_prompt"),
            (3, "unsupported_value"),
            (4, "model_not_found"),
        ]
        for endpoint in Endpoint:
            items = read(write("in.jsonl", "\n".join(map(json.dumps, lines)).encode()), endpoint=endpoint)
            good = [item for item in items if isinstance(item, InputLine)]
            assert [(item.line, load_body(endpoint, item.body).seed) for item in good] == [(1, 1), (5, 1)]

    def test_a_long_system_text_is_kept_once(self, write: Write) -> None:
        rules = "x" * 2000
        items = read(write("in.txt", b"why?\nhow?\n"), system=rules)
        assert texts(items) == [[f"system: {rules}", "user: why?"], [f"system: {rules}", "user: how?"]]
        assert [item.prefix for item in items if isinstance(item, InputLine)] == [rules, rules]


class TestPrefixes:
    """In files without `--context` a long beginning that repeats is found and stored once."""

    def test_a_document_before_each_question_is_found(self, write: Write) -> None:
        book = "A sentence of the book.\n" * 100
        lines = [{"prompt": f"{book}Question: What is {i}?"} for i in range(4)]
        items = read(write("in.jsonl", "\n".join(map(json.dumps, lines)).encode()))
        assert texts(items) == [[f"user: {book}Question: What is {i}?"] for i in range(4)]
        prefixes = [item.prefix for item in items if isinstance(item, InputLine)]
        assert prefixes == [book] * 4

    def test_lines_keep_their_order_while_one_waits_to_see_the_next(self, write: Write) -> None:
        """A long first line is held back for a moment; a refused one, a short one or the end lets it go as it is."""
        book = "A sentence of the book.\n" * 100
        prompts = [f"{book}one", "short", f"{book}two", 7, "x" * 3000, "y" * 3000]
        items = read(write("in.jsonl", "\n".join(json.dumps({"prompt": prompt}) for prompt in prompts).encode()))
        assert [item.line for item in items] == [1, 2, 3, 4, 5, 6]
        assert [isinstance(item, InputLine) for item in items] == [True, True, True, False, True, True]
        assert [item.prefix for item in items if isinstance(item, InputLine)] == ["", "", book, "", ""]

    def test_a_repeated_system_message_is_found_whole(self, write: Write) -> None:
        rules = "x" * 2000
        messages = [{"role": "system", "content": rules}, {"role": "user", "content": "hi"}]
        items = read(write("in.jsonl", b"\n".join(openai_line(str(i), messages=messages) for i in range(3))))
        assert [item.prefix for item in items if isinstance(item, InputLine)] == [rules] * 3
        assert texts(items) == [[f"system: {rules}", "user: hi"]] * 3

    def test_documents_that_take_turns_are_each_found(self) -> None:
        finder = PrefixFinder()
        first, second = "a" * 1500 + "\n", "b" * 3000 + "\n"
        found = [finder.find(f"{book}question {i}") for i, book in enumerate([first, second] * 3)]
        assert found == ["", "", first, second, first, second]

    @given(st.lists(st.text(alphabet="ab\n", max_size=40), max_size=12))
    def test_what_is_found_is_always_the_beginning(self, endings: list[str]) -> None:
        finder = PrefixFinder()
        for ending in endings:
            text = "x" * 1020 + ending * 3
            assert text.startswith(finder.find(text))

    def test_a_longer_shared_text_replaces_a_shorter_one(self) -> None:
        finder = PrefixFinder()
        rules = "r" * 1200 + "\n"
        book = rules + "b" * 9000 + "\n"
        finder.find(rules + "one")
        assert finder.find(rules + "two") == rules
        finder.find(book + "three")
        assert finder.find(book + "four") == book


class TestBadLines:
    """A bad line is refused with file, line, value, bound and way out; the lines around it go on."""

    @pytest.mark.parametrize(
        ("bad", "code", "message"),
        [
            (
                b'{"custom_id": "x", ',
                "invalid_json_line",
                "broken JSON: EOF while parsing a value at column 19; write one JSON object on one line",
            ),
            (b'"just text"', "invalid_json_line", 'the line is "just text"; write one JSON object on it'),
            (b'{"prompt": "a", "messages": []}', "invalid_value",
             "the line has both prompt and messages; write either, not both"),
            (b'{"prompt": "\xff"}', "invalid_encoding",
             "byte 13 (0xff) is not UTF-8; save the file as UTF-8 (is it Latin-1 or Windows-1252?)"),
            (
                b'{"prompt": "' + b"x" * 3000 + b'"}',
                "line_too_long",
                "the line has 3,014 bytes, which exceeds 2,000; is it a file without newlines? split it",
            ),
            (openai_line(url="/v1/embeddings"), "invalid_value",
             'url is "/v1/embeddings"; write /v1/chat/completions or /v1/completions'),
            (openai_line(url="/v1/completions"), "url_mismatch",
             "url /v1/completions is not that of this batch, /v1/chat/completions; put the line into a file of its "
             "own"),
            (openai_line().replace(b"POST", b"GET"), "invalid_value", "method is \"GET\"; write 'POST'"),
            (openai_line(5), "invalid_type", "custom_id is 5, a whole number; write a string"),
            (openai_line(""), "empty_string", 'custom_id is ""; write at least 1 character or remove it'),
            (
                openai_line("x" * 600),
                "string_above_max_length",
                "custom_id has 600 characters, which exceeds 512; shorten it",
            ),
            (openai_line().replace(b'"custom_id": "a", ', b""), "missing_required_parameter",
             "custom_id is missing; add it"),
            (openai_line(model="gpt-4"), "model_not_found",
             'model "gpt-4" is not served here, only "smol"; write that name, or choose another artifact'),
            (openai_line().replace(b'"model": "smol", ', b""), "missing_required_parameter",
             'model is missing; add "model": "smol"'),
            (openai_line(max_tokens=0), "integer_below_min_value", "body.max_tokens 0 is below 1; raise it"),
            (openai_line(stream=True), "unsupported_value",
             "stream is true, which only a call over HTTP of its own can do; remove it: the answer comes whole"),
            (openai_line(temprature=1), "unknown_parameter",
             "unknown field body.temprature = 1; did you mean temperature?"),
            (b'{"question": "why?"}', "missing_required_parameter",
             "the line has neither prompt nor messages nor body; its keys: question; add one, or say with --template "
             "how to make a prompt of it"),
            (b'{"prompt": "a", "temprature": 1}', "unknown_parameter",
             "unknown field temprature = 1; did you mean temperature?"),
            (b'{"prompt": ["a", "b"]}', "unsupported_value",
             "prompt is a list and a chat takes one text; write one line for each text, or ask for /v1/completions, "
             "which takes token ids"),
            (b'{"prompt": "a\\u0000b"}', "nul_character", "prompt has a NUL character at position 1; remove it"),
            (b'{"prompt": "a", "custom_id": "\\u0000"}', "nul_character",
             "custom_id has a NUL character at position 0; remove it"),
            (b'{"prompt": ""}', "empty_prompt",
             "prompt has no text: 0 tokens, and at least 1 is needed; write a prompt"),
            (b'{"prompt": "a", "temperature": NaN}', "invalid_value", "temperature is NaN; write a finite number"),
            (b'{"prompt": "\\udc00"}', "invalid_json_line",
             "broken JSON: half of a surrogate pair at column 18; write the whole character"),
            (b"[" * 1000, "invalid_json_line", "JSON is nested more than 200 deep; a request needs 5, flatten it"),
        ],
    )  # fmt: skip
    def test_a_bad_json_line_fails_alone(self, write: Write, bad: bytes, code: str, message: str) -> None:
        path = write("in.jsonl", openai_line("before") + b"\n" + bad + b"\n" + openai_line("after") + b"\n")
        items = read(path, max_line_bytes=2000)
        assert refused(items) == [(2, code, f"in.jsonl line 2: {message}")]
        assert [item.custom_id for item in items if isinstance(item, InputLine)] == ["before", "after"]

    def test_a_field_at_fault_is_named_from_the_line_s_top(self, write: Write) -> None:
        path = write("in.jsonl", openai_line("a", stream=True) + b"\n" + openai_line("b", max_tokens=-1))
        items = read(path)
        assert [(item.custom_id, item.param) for item in items if isinstance(item, RefusedLine)] == [
            ("a", "body.stream"),
            ("b", "body.max_tokens"),
        ]

    def test_the_second_of_two_equal_ids_is_refused_and_the_first_runs(self, write: Write) -> None:
        items = read(write("in.jsonl", b"\n".join([openai_line("a"), b"", openai_line("b"), openai_line("a")])))
        assert [(item.line, type(item)) for item in items] == [(1, InputLine), (3, InputLine), (4, RefusedLine)]
        assert refused(items) == [
            (
                4,
                "duplicate_custom_id",
                'in.jsonl line 4: custom_id "a" is that of line 1 already; give each line its own',
            )
        ]

    def test_a_huge_line_is_passed_over_without_being_held(self, write: Write) -> None:
        path = write("in.txt", b"before\n" + b"x" * 50_000_000 + b"\nafter\n")
        tracemalloc.start()
        items = read(path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert [item.line for item in items] == [1, 2, 3]
        assert refused(items)[0][:2] == (2, "line_too_long")
        assert peak < 35_000_000  # the bound of a line, read in pieces and joined; never the 50 MB

    def test_a_line_of_just_the_bound_is_read(self, write: Write) -> None:
        items = read(write("in.txt", b"x" * 100 + b"\n" + b"y" * 101 + b"\n" + b"z" * 100), max_line_bytes=100)
        assert [type(item) for item in items] == [InputLine, RefusedLine, InputLine]

    def test_a_truncated_gzip_runs_what_it_has_and_says_what_is_lost(self, write: Write) -> None:
        lines = b"".join(b"question number %d?\n" % i for i in range(5000))
        whole = gzip.compress(lines)
        items = read(write("in.txt.gz", whole[: len(whole) // 2]))
        good = [item for item in items if isinstance(item, InputLine)]
        assert len(good) > 1000
        assert refused(items) == [
            (
                len(good) + 1,
                "truncated_gzip",
                f"in.txt.gz line {len(good) + 1}: the gzip stream ends before its end mark, after {len(good)} whole "
                "lines; what follows is lost, copy or compress the file again",
            )
        ]

    def test_a_damaged_gzip_is_noticed_at_the_latest_by_its_checksum(self, write: Write) -> None:
        whole = bytearray(gzip.compress(b"one\ntwo\n"))
        whole[-5] ^= 1
        items = read(write("in.txt.gz", bytes(whole)))
        assert [item.line for item in items] == [1, 2, 3]
        assert refused(items)[0][1] == "truncated_gzip"

    def test_text_that_is_no_text_is_refused(self, write: Write) -> None:
        items = read(write("in.txt", b"fine\nnot \xe4 text\na\0b\n"))
        assert refused(items) == [
            (
                2,
                "invalid_encoding",
                "in.txt line 2: byte 5 (0xe4) is not UTF-8; save the file as UTF-8 (is it Latin-1 or Windows-1252?)",
            ),
            (3, "nul_character", "in.txt line 3: prompt has a NUL character at position 1; remove it"),
        ]


class TestIdsOfRefusedLines:
    """Whoever reads the error file looks for lines by their ids: a refused line has the one it would have had."""

    @pytest.mark.parametrize(
        ("name", "data", "ids"),
        [
            ("in.txt", b"one\n \xff\na\0b\n", ["line-1", "line-2", "line-3"]),
            ("in.csv", b"id,prompt\n,\n1\n,x,y\nb,\n,fine\n" + b"x" * 600 + b",long\n",
             ["line-2", "line-3", "line-4", "b", "line-6", "line-7"]),
            ("in.jsonl", b'{"prompt":""}\n{"prompt":"x","top":1}\n{"custom_id":"c","prompt":1}\n{broken\n7\n{}\n'
             b'{"prompt":"x","custom_id":3}\n',
             ["line-1", "line-2", "c", "line-4", "line-5", "line-6", "line-7"]),
            ("in.jsonl", b'{"body":{}}\n{"custom_id":"a","url":"/v1/x"}\n{"custom_id":"","method":"POST"}\n',
             [None, "a", None]),
        ],
    )  # fmt: skip
    def test_a_refused_line_has_the_id_of_an_accepted_one(
        self, write: Write, name: str, data: bytes, ids: list[str | None]
    ) -> None:
        assert [item.custom_id for item in read(write(name, data))] == ids

    def test_in_a_file_of_batch_lines_no_id_is_made_up(self, write: Write) -> None:
        """The gateway's callers name every line themselves."""
        items = read(write("in.jsonl", b'{broken\n{"prompt":"x"}\n\xff\n'), only_batch_lines=True)
        assert [item.custom_id for item in items] == [None, None, None]


class TestBadTables:
    @pytest.mark.parametrize(
        ("rows", "line", "code", "message"),
        [
            (b"1\n", 2, "wrong_field_count", "the row has 1 fields and the header 2; add the missing ones"),
            (b"1,a,b\n", 2, "wrong_field_count",
             "the row has 3 fields and the header 2; put fields with delimiters in quotes"),
            (b'1,"open\n', 2, "invalid_csv",
             'a quote that opens in this row is not closed before the file ends; close it, or double it ("") inside a '
             "field"),
            (b'1,"closed" early\n', 2, "invalid_csv",
             "text follows the closing quote of field 2; double the quotes inside a field"),
            (b"1,\xff\n", 2, "invalid_encoding",
             "byte 3 (0xff) is not UTF-8; save the file as UTF-8 (is it Latin-1 or Windows-1252?)"),
            (b"1, \n", 2, "empty_prompt", "prompt has no text: 0 tokens, and at least 1 is needed; write a prompt"),
        ],
    )  # fmt: skip
    def test_a_bad_row_fails_alone(self, write: Write, rows: bytes, line: int, code: str, message: str) -> None:
        items = read(write("in.csv", b"id,prompt\n" + rows + b"9,fine\n"))
        assert refused(items) == [(line, code, f"in.csv line {line}: {message}")]
        assert texts([item for item in items if isinstance(item, InputLine)]) == [["user: fine"]]

    def test_an_open_quote_does_not_swallow_the_rows_after_it(self, write: Write) -> None:
        """The standard library's reader would take the rest of the file into one field."""
        rows = b"".join(b"%d,row %d\n" % (i, i) for i in range(3, 1000))
        items = read(write("in.csv", b'id,prompt\n1,one\n2,"two\n' + rows))
        assert [line for line, _, _ in refused(items)] == [3]
        assert len(items) == 999

    def test_quotes_inside_an_unquoted_field_are_characters(self, write: Write) -> None:
        items = read(write("in.csv", b'id,prompt\n1,a 5" pipe\n'))
        assert texts(items) == [['user: a 5" pipe']]

    @pytest.mark.parametrize(
        ("name", "data", "code", "message"),
        [
            ("in.csv", b"id,id\n1,2\n", "invalid_header",
             "in.csv line 1: 2 columns are named 'id'; rename all but one"),
            ("in.csv", b"id,,prompt\n1,2,3\n", "invalid_header",
             "in.csv line 1: column 2 of 3 has no name; name it, or remove the column"),
            ("in.csv", b'\n"id,prompt\n1,2\n', "invalid_header",
             'in.csv line 2: the header: a quote that opens in this row is not closed before the file ends; close it, '
             'or double it ("") inside a field'),
            ("in.csv", b"id,question\n1,2\n", "template_needed",
             "in.csv is a table without a column 'prompt'; say with --template how to make a prompt of its columns: "
             "id, question"),
            ("in.csv", b"", "empty_file", "in.csv is empty; write a header and at least one row"),
            ("in.csv", b"id,prompt\n", "empty_file", "in.csv is empty: it has no line to run; write at least one"),
            ("in.jsonl", b"", "empty_file", "in.jsonl is empty: it has no line to run; write at least one"),
            ("in.txt", b"\n \n", "empty_file", "in.txt is empty: it has no line to run; write at least one"),
            ("in.txt", "prompt\n".encode("utf-16"), "invalid_encoding",
             "in.txt is UTF-16, and only UTF-8 is read; save it as UTF-8"),
            ("in.json", b' [{"prompt": "a"}]', "json_array",
             "in.json is one JSON list; write one object on each line, for example with jq -c '.[]'"),
            ("in.xlsx", b"PK", "unknown_format",
             "in.xlsx: no format is known by '.xlsx'; say it with --format, one of jsonl, text, csv, tsv, parquet"),
            ("in.parquet", b"PAR1 no more", "invalid_parquet", None),
        ],
    )  # fmt: skip
    def test_a_file_that_is_unusable_as_a_whole_raises(
        self, write: Write, name: str, data: bytes, code: str, message: str | None
    ) -> None:
        with pytest.raises(InputError) as caught:
            read(write(name, data))
        assert caught.value.code == code
        if message is not None:
            assert caught.value.message == message

    def test_an_id_column_that_is_not_there_is_named(self, write: Write) -> None:
        with pytest.raises(InputError, match=r"in.csv has no id column 'key'; columns there are: id, prompt"):
            read(write("in.csv", b"id,prompt\n1,2\n"), id_column="key")

    def test_names_are_shown_on_one_line_and_can_be_stored(self, write: Write) -> None:
        """Names come from outside too; a NUL in a stored message would fail its whole group on Postgres."""
        path = write("in\n\udcff.jsonl", b'{"prompt": "a", "x\\u0000\\n": 1}')
        (item,) = read(path)
        assert isinstance(item, RefusedLine)
        assert item.error_message == ("in\\n\\udcff.jsonl line 1: unknown field x\\u0000\\n = 1; remove it")
        assert item.param == "x\\u0000\\n"

    def test_a_file_that_is_not_there_is_said_so(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="is not there; check the name"):
            read(tmp_path / "none.txt")
        with pytest.raises(InputError, match="is a folder; name a file in it"):
            read(tmp_path)

    def test_a_file_that_changes_while_it_is_read_is_refused(self, write: Write) -> None:
        """Its digest, by which the same command finds its batch again, would name other lines."""
        path = write("in.txt", b"one\ntwo\n")
        with open_source(path, path.parent) as source:
            reader = iter(InputReader(source, InputOptions(model="smol")))
            next(reader)
            with path.open("ab") as file:
                file.write(b"three\n")
            with pytest.raises(InputError) as caught:
                list(reader)
        assert caught.value.code == "input_changed"


PIECES = st.one_of(
    st.binary(max_size=30),
    st.sampled_from(
        [
            b'{"prompt": "x"}',
            b'{"prompt": "x", "custom_id": "a"}',
            b'{"messages": [{"role": "user", "content": "x"}]}',
            openai_line("a"),
            openai_line("b", url="/v1/completions"),
            b'{"prompt": "x" ',
            b'"',
            b'a,"b',
            b"a,b",
            b"\xef\xbb\xbf",
            b"\xff\xfe",
            b" \t",
            b"\r",
            b"\0",
            b"\\u0000",
        ]
    ),
)


class TestAnyBytes:
    """Whatever the bytes: every line that is not blank ends as exactly one request or refusal, under its own number."""

    @given(
        st.lists(st.lists(PIECES, max_size=3).map(b"".join), max_size=8),
        st.sampled_from(["jsonl", "txt"]),
        st.booleans(),
    )
    @settings(max_examples=300)
    def test_each_line_is_accounted_for(self, tmp_path: Path, lines: list[bytes], kind: str, packed: bool) -> None:
        data = b"\n".join(lines)
        assume(packed or not data.startswith(GZIP_MAGIC))  # bytes that say they are gzip are read as such
        path = tmp_path / f"in.{kind}"
        path.write_bytes(gzip.compress(data) if packed else data)
        shown = data.removeprefix(b"\xef\xbb\xbf")
        expected = [number for number, line in enumerate(shown.split(b"\n"), start=1) if line.strip()]
        try:
            items = read(path, max_line_bytes=1000)
        except InputError as error:
            assert error.code == "invalid_encoding" or (error.code == "empty_file" and not expected)
            return
        assert [item.line for item in items] == expected
        for item in items:
            if isinstance(item, InputLine):
                load_body(
                    Endpoint.CHAT if b"/v1/completions" not in data else endpoint_of(item), item.body, item.prefix
                )
            else:
                assert item.error_message.startswith(f"in.{kind} line {item.line}: ")
        ids = [item.custom_id for item in items if isinstance(item, InputLine)]
        assert len(ids) == len(set(ids))

    @given(st.lists(PIECES, min_size=1, max_size=8))
    @settings(max_examples=150)
    def test_a_line_means_the_same_whatever_stands_before_it(self, tmp_path: Path, lines: list[bytes]) -> None:
        """The kind of the line before is tried first, for speed; that must never change what a line is."""
        lines = [line for line in lines if b"\n" not in line]
        together, alone = tmp_path / "in.jsonl", tmp_path / "alone.jsonl"
        together.write_bytes(b"\n".join(lines))
        try:
            items = {item.line: item for item in read(together, endpoint=Endpoint.CHAT)}
        except InputError:
            return
        for number, line in enumerate(lines[1:], start=2):  # a byte-order mark means something on the first alone
            if number not in items or line.startswith((b"\xef\xbb\xbf", *UTF16_MARKS, GZIP_MAGIC)):
                continue
            alone.write_bytes(line)
            (single,) = read(alone, endpoint=Endpoint.CHAT)
            found = items[number]
            if isinstance(found, InputLine):
                assert isinstance(single, InputLine)
                assert found.body == single.body
            elif found.error_code != "duplicate_custom_id":
                assert isinstance(single, RefusedLine)
                assert (found.error_code, own_id(found)) == (single.error_code, own_id(single))

    @given(st.lists(st.lists(PIECES, max_size=3).map(b"".join), max_size=8), st.sampled_from(["csv", "tsv", "parquet"]))
    @settings(max_examples=200)
    def test_tables_never_crash_and_number_rows_upwards(self, tmp_path: Path, lines: list[bytes], kind: str) -> None:
        path = tmp_path / f"in.{kind}"
        path.write_bytes(b"id,prompt\n" + b"\n".join(lines))
        try:
            items = read(path, max_line_bytes=1000)
        except InputError:
            return
        numbers = [item.line for item in items]
        assert numbers == sorted(set(numbers))

    @given(
        st.lists(
            st.lists(
                st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12),
                min_size=2,
                max_size=2,
            ),
            max_size=6,
        )
    )
    def test_csv_as_python_writes_it_is_read_back(self, tmp_path: Path, rows: list[list[str]]) -> None:
        """Round trip against the standard library's writer, newlines, quotes and all."""
        import csv

        path = tmp_path / "in.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n", quoting=csv.QUOTE_ALL)
            writer.writerow(["first", "second"])
            writer.writerows(rows)
        template = PromptTemplate("<{{ first }}|{{ second }}>")
        if not rows:
            return
        assert texts(read(path, template=template)) == [[f"user: <{first}|{second}>"] for first, second in rows]


def endpoint_of(item: InputLine) -> Endpoint:
    return Endpoint.CHAT if '"messages"' in item.body else Endpoint.COMPLETIONS


class TestCustomIds:
    @given(st.lists(st.text(max_size=3)))
    def test_the_first_line_of_each_id_is_known(self, ids: list[str]) -> None:
        known = CustomIds()
        first: dict[str, int] = {}
        for line, custom_id in enumerate(ids, start=1):
            assert known.first_line(custom_id, line) == first.setdefault(custom_id, line)
        assert len(known) == len(first)

    def test_a_million_ids_would_take_tens_of_megabytes(self) -> None:
        tracemalloc.start()
        known = CustomIds()
        for line in range(1, 50_001):
            known.first_line(f"request-{line}", line)
        size = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert len(known) == 50_000
        assert size / 50_000 < 70


ROOT = Path(__file__).parents[2]
CODE_SOURCES = ("source", "inputs", "tables", "template", "submit", "results", "protocol")
# Built of parts in `protocol.explain`.
COMPOSED_CODES = {f"{number}_{side}_value" for number in ("integer", "decimal") for side in ("below_min", "above_max")}
COMPOSED_CODES |= {"invalid_json_line"}


def test_every_code_is_in_the_docs_and_no_other() -> None:
    """A code is what a program can act on; one that is not written down cannot be relied on."""
    code = "".join((ROOT / "jobs" / f"{name}.py").read_text(encoding="utf-8") for name in CODE_SOURCES)
    raised = set(re.findall(r'(?:\bcode=|\brefuse\(\s*|PydanticCustomError\(\s*)"([a-z_]+)"', code))
    chosen = set(re.findall(r'\bcode(?: =|=)"?"([a-z_]+)" if [^"]+ else "([a-z_]+)"', code))
    raised |= {name for pair in chosen for name in pair} | COMPOSED_CODES
    rows = re.findall(r"^\| (`[a-z_`, ]+`) \|", (ROOT / "docs" / "input.md").read_text(encoding="utf-8"), re.MULTILINE)
    documented = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)}
    assert documented == raised
