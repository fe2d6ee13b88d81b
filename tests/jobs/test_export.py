"""The table beside its input: every input row once, foreign inputs refused, names that clash kept apart."""

from __future__ import annotations

import csv
import gc
import io
from collections.abc import Iterator
from pathlib import Path

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
from jobs.source import open_source
from jobs.submit import submit
from storage.database import Database


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
