"""The table beside its input: every input row once, foreign inputs refused, names that clash kept apart."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

import pytest

from jobs import export
from jobs.export import COLUMNS, ExportError, ExportFormat, answer_text, guess_export_format


def result(line: int, custom_id: str) -> dict[str, object]:
    return dict.fromkeys(COLUMNS) | {"line": line, "custom_id": custom_id, "status": "completed"}


def joined(rows: list[tuple[int, dict[str, object]]], results: list[dict[str, object]]) -> list[dict[str, object]]:
    columns = list(dict.fromkeys(name for _, values in rows for name in values))
    iterator: Iterator[dict[str, object]] = iter(results)
    return list(export._join(columns, iter(rows), iterator, None))


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
        ([result(1, "z")], "line 1 is 'a' in the input and 'z' in the batch"),
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
    named = {"a.csv": "csv", "b.parquet": "parquet", "c.PQ": "parquet", "d.jsonl": "jsonl", "-": "jsonl"}
    assert {name: guess_export_format(name).value for name in named} == named


def test_csv_survives_quotes_newlines_and_nested_values() -> None:
    file = io.BytesIO()
    writer = export._writer(ExportFormat.CSV, file, ["text", "tags"])
    writer.write([{"text": 'say "hi",\nthen go', "tags": ["a", "b"], **result(1, "é")}])
    writer.close()
    (row,) = csv.DictReader(io.StringIO(file.getvalue().decode(), newline=""))
    assert (row["text"], row["tags"], row["custom_id"], row["answer"]) == ('say "hi",\nthen go', '["a","b"]', "é", "")
