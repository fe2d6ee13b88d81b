"""The table beside its input: every input row once, foreign inputs refused, names that clash kept apart."""

from __future__ import annotations

import csv
import gc
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs import export, steering
from jobs.export import (
    COLUMNS,
    ExportError,
    ExportFormat,
    InputTable,
    answer_text,
    export_batch,
    guess_export_format,
)
from jobs.inputs import InputOptions
from jobs.protocol import Endpoint, GenerationBody
from jobs.source import open_source
from jobs.submit import submit
from jobs.template import PromptTemplate
from storage.database import Database
from storage.queries import BatchRow


def result(line: int, custom_id: str) -> dict[str, object]:
    return dict.fromkeys(COLUMNS) | {"line": line, "custom_id": custom_id, "status": "completed"}


def joined(rows: list[tuple[int, dict[str, object]]], results: list[dict[str, object]]) -> list[dict[str, object]]:
    columns = list(dict.fromkeys(name for _, values in rows for name in values))
    iterator: Iterator[dict[str, object]] = iter(results)
    return list(export._join(columns, iter(rows), iterator, ["id"]))


def test_lines_without_a_result_are_there_as_unfinished() -> None:
    rows = [(2, {"id": "a"}), (3, {"id": "b"}), (5, {"id": "c"})]
    got = joined(rows, [result(2, "a"), result(5, "c")])
    assert [(row["id"], row["status"], row["line"]) for row in got] == [
        ("a", "completed", 2),
        ("b", "unfinished", 3),
        ("c", "completed", 5),
    ]


def test_an_input_column_with_one_of_our_names_is_kept_apart() -> None:
    (row,) = joined([(1, {"status": "new", "id": "a"})], [result(1, "a")])
    assert (row["input.status"], row["status"]) == ("new", "completed")


@pytest.mark.parametrize(
    ("results", "said"),
    [
        ([result(1, "a"), result(2, "b")], "the input ends before it"),
        ([result(1, "z")], 'line 1 is "a" in the input and "z" in the batch'),
        ([result(0, "a")], "the input none"),
    ],
)
def test_another_input_is_refused(results: list[dict[str, object]], said: str) -> None:
    with pytest.raises(ExportError, match=said) as caught:
        joined([(1, {"id": "a"})], results)
    assert caught.value.code == "input_mismatch"


def test_the_answer_is_the_text_of_the_first_choice() -> None:
    assert answer_text('{"choices":[{"message":{"content":"chat"}},{"message":{"content":"second"}}]}') == "chat"
    assert answer_text('{"choices":[{"text":" completion"}]}') == " completion"
    assert answer_text(None) is None


def test_formats_go_by_the_extension() -> None:
    named = {"a.csv": "csv", "b.parquet": "parquet", "c.PQ": "parquet", "d.jsonl": "jsonl", "-": "jsonl", "e": "jsonl"}
    assert {name: guess_export_format(name).value for name in named} == named


@pytest.mark.parametrize("name", ["p.xyz", "answers.xlsx", "a.csv.gz", "b.tsv"])
def test_an_extension_of_no_known_format_is_refused(name: str) -> None:
    """JSON Lines in a file called table.xlsx open nowhere."""
    with pytest.raises(ExportError, match="say it with --format, one of jsonl, csv, parquet") as caught:
        guess_export_format(name)
    assert caught.value.code == "unknown_format"


INPUTS: dict[str, tuple[str, str]] = {
    "ids.csv": ("custom_id,id,prompt\n", "7,x,seven\n,y,no id\nc,z,three\n,,neither\n7,w,the same id\nwrong,count\n"),
    "id.csv": ("id,prompt\n", "1,one\n,empty\n3,three\n" + "x" * 600 + ",too long an id\n"),
    "none.tsv": ("prompt\n", "one\ntwo\n"),
    "plain.jsonl": (
        "",
        '{"prompt":"a"}\n\n{"prompt":"b","custom_id":"b"}\n{"prompt":"c","id":"unknown"}\n{broken\n7\n',
    ),
    "text.txt": ("", "one\n\nthree\nN\x00L\n"),
    "long.txt": ("", f"{'x' * 10_000_001}\nafter what is too long\n"),
}


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("format_", ["jsonl", "csv", "parquet"])
def test_a_batchs_own_input_is_never_taken_for_another(
    sqlite_database: Database, tmp_path: Path, name: str, format_: str
) -> None:
    """Whatever lines have for ids (empty, missing, numbers, twice, unusable): the file that was submitted is that of
    the batch, and each of its lines is a row."""
    path = tmp_path / name
    path.write_text("".join(INPUTS[name]))
    with open_source(path, tmp_path) as source:
        batch = submit(sqlite_database, source, InputOptions(model="smol")).batch
    steering.cancel(sqlite_database, batch, tmp_path)
    with open_source(path, tmp_path) as source:
        rows = export_batch(
            sqlite_database, batch, tmp_path / "out", ExportFormat(format_), joined=InputTable(source, None, None)
        )
    assert rows >= batch.total_requests > 0


DOCUMENT = "".join(f"line {n} of a document that many prompts begin with\n" for n in range(40))
SHARED = [DOCUMENT + question for question in ("who?", "what?", "when?")]
PLAIN = [{"custom_id": f"id-{n}", "prompt": text, "seed": n} for n, text in enumerate(("one", "two", "three"))]
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"}]
ASKED: dict[str, tuple[str, list[dict[str, object]], dict[str, Any]]] = {
    "prompts": ("in.jsonl", PLAIN, {}),
    "context": ("in.jsonl", PLAIN, {"context": "A handbook.", "system": "Be brief."}),
    "system": ("in.jsonl", PLAIN, {"system": "Be brief.", "defaults": GenerationBody(max_tokens=5)}),
    "completions": ("in.jsonl", PLAIN, {"endpoint": Endpoint.COMPLETIONS, "context": "A handbook."}),
    "shared": ("in.jsonl", [{"prompt": text} for text in SHARED], {}),
    "shared completions": ("in.jsonl", [{"prompt": text} for text in SHARED], {"endpoint": Endpoint.COMPLETIONS}),
    "token ids": ("in.jsonl", [{"prompt": [1, 2, 3]}], {"endpoint": Endpoint.COMPLETIONS}),
    "messages": ("in.jsonl", [{"messages": CHAT, "stop": "x", "temperature": 0.5}], {}),
    "batch": (
        "in.jsonl",
        [
            {
                "custom_id": "a",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {"model": "smol", "messages": CHAT},
            }
        ],
        {},
    ),
    "table": ("in.csv", [{"id": "a", "prompt": "one"}, {"id": "b", "prompt": "two"}], {}),
    "template": ("in.csv", [{"id": "a", "topic": "one"}], {"template": PromptTemplate("About {{ topic }}")}),
    "other id": ("in.csv", [{"key": "a", "prompt": "one"}], {"id_column": "key"}),
}


def write_rows(path: Path, rows: list[dict[str, object]]) -> Path:
    with path.open("w", newline="") as file:
        if path.suffix == ".csv":
            table = csv.DictWriter(file, rows[0])
            table.writeheader()
            table.writerows(rows)
        else:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def submitted(database: Database, path: Path, options: dict[str, Any]) -> BatchRow:
    with open_source(path, path.parent) as source:
        return submit(database, source, InputOptions(model="smol", **options)).batch


def export_beside(database: Database, batch: BatchRow, path: Path, options: dict[str, Any]) -> int:
    """The batch beside an input, with those of its options that export takes."""
    with open_source(path, path.parent) as source:
        table = InputTable(source, None, options.get("id_column"), options.get("template"))
        return export_batch(database, batch, path.parent / "out.jsonl", ExportFormat.JSONL, joined=table)


@pytest.mark.parametrize("name", ASKED)
def test_the_input_is_known_again_whatever_was_put_around_its_prompts(
    sqlite_database: Database, tmp_path: Path, name: str
) -> None:
    filename, rows, options = ASKED[name]
    path = write_rows(tmp_path / filename, rows)
    batch = submitted(sqlite_database, path, options)
    assert export_beside(sqlite_database, batch, path, options) == len(rows)


def without(row: dict[str, object], *names: str) -> dict[str, object]:
    return {name: value for name, value in row.items() if name not in names}


CHANGES: dict[str, tuple[str, Callable[[dict[str, object]], dict[str, object]], str]] = {
    "ids removed": ("prompts", lambda row: without(row, "custom_id"), 'is "line-1" in the input and "id-0" in the'),
    "another prompt": ("prompts", lambda row: row | {"prompt": f"{row['prompt']}!"}, "has other messages"),
    "beside a context": ("context", lambda row: row | {"prompt": f"{row['prompt']}!"}, "has other messages"),
    "of completions": ("completions", lambda row: row | {"prompt": f"a {row['prompt']}"}, "has another prompt"),
    "of a shared one": ("shared", lambda row: {"prompt": str(row["prompt"])[: len(DOCUMENT)]}, "has other messages"),
    "the shared part": ("shared", lambda row: {"prompt": str(row["prompt"])[len(DOCUMENT) :]}, "has other messages"),
    "token ids": ("token ids", lambda row: {"prompt": [1, 2, 4]}, "has another prompt"),
    "a parameter": ("prompts", lambda row: row | {"seed": 7}, "has seed 7 in the input and 0 in the batch"),
    "a new parameter": ("messages", lambda row: row | {"n": 2}, "has n 2 in the input and null in the batch"),
    "a message less": ("messages", lambda row: row | {"messages": CHAT[1:]}, "has other messages"),
    "no request": ("messages", lambda row: row | {"n": "two"}, "is a request in the batch and none in the input"),
    "a cell": ("table", lambda row: row | {"prompt": "?"}, "has other messages"),
    "ids of a table": ("table", lambda row: without(row, "id"), 'is "line-2" in the input and "a" in the batch'),
    "no prompts left": ("table", lambda row: {"id": "z", "topic": "?"}, 'is "z" in the input and "a" in the batch'),
    "a cell of a template": ("template", lambda row: row | {"topic": "?"}, "has other messages"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_input_that_asks_something_else_is_refused(sqlite_database: Database, tmp_path: Path, change: str) -> None:
    """Prompts stood beside answers to others: with the same ids, or with none at all."""
    name, changed, said = CHANGES[change]
    filename, rows, options = ASKED[name]
    batch = submitted(sqlite_database, write_rows(tmp_path / filename, rows), options)
    other = write_rows(tmp_path / f"other-{filename}", [changed(row) for row in rows])
    with pytest.raises(ExportError, match=f"line {2 if filename.endswith('csv') else 1} {re.escape(said)}") as caught:
        export_beside(sqlite_database, batch, other, options)
    assert caught.value.code == "input_mismatch"
    assert not (tmp_path / "out.jsonl").exists()


def test_a_line_too_many_or_too_few_is_named(sqlite_database: Database, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "in.jsonl", PLAIN)
    batch = submitted(sqlite_database, path, {})
    for rows, said in (
        (PLAIN[:2], "a line 3, the input ends"),
        ([*PLAIN, {"prompt": "x"}], "a line 4, the batch none"),
    ):
        with pytest.raises(ExportError, match=said):
            export_beside(sqlite_database, batch, write_rows(tmp_path / "other.jsonl", rows), {})


def test_rows_of_a_template_that_is_not_given_are_compared_by_their_ids(
    sqlite_database: Database, tmp_path: Path
) -> None:
    filename, rows, options = ASKED["template"]
    batch = submitted(sqlite_database, write_rows(tmp_path / filename, rows), options)
    assert export_beside(sqlite_database, batch, tmp_path / filename, {}) == 1
    write_rows(tmp_path / filename, [{"id": "b", "topic": "one"}])
    with pytest.raises(ExportError, match='line 2 is "b" in the input and "a" in the batch'):
        export_beside(sqlite_database, batch, tmp_path / filename, {})


def test_a_table_that_cannot_be_written_leaves_no_file_and_no_complaint_behind(
    sqlite_database: Database, tmp_path: Path
) -> None:
    """Parquet's writer must not write its end into a file that is closed: Python would say so beside the error."""
    path = tmp_path / "in.txt"
    path.write_text("one\ntwo\n")
    with open_source(path, tmp_path) as source:
        batch = submit(sqlite_database, source, InputOptions(model="smol")).batch
    steering.cancel(sqlite_database, batch, tmp_path)
    path.write_text("one\n")
    for format_ in ExportFormat:
        with open_source(path, tmp_path) as source, pytest.raises(ExportError, match="the input ends before it"):
            export_batch(sqlite_database, batch, tmp_path / "out", format_, joined=InputTable(source))
        gc.collect()  # what is unclosed speaks up here, and warnings are errors
    assert not list(tmp_path.glob("*out*"))


def test_csv_survives_quotes_newlines_and_nested_values() -> None:
    file = io.BytesIO()
    writer = export._writer(ExportFormat.CSV, file, ["text", "tags"])
    writer.write([{"text": 'say "hi",\nthen go', "tags": ["a", "b"], **result(1, "é")}])
    writer.close()
    (row,) = csv.DictReader(io.StringIO(file.getvalue().decode(), newline=""))
    assert (row["text"], row["tags"], row["custom_id"], row["answer"]) == ('say "hi",\nthen go', '["a","b"]', "é", "")
