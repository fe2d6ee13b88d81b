"""Result files: each line once, in input order, whole or not at all."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from jobs import steering
from jobs.audit import audit_request
from jobs.inputs import InputOptions
from jobs.protocol import dump_json
from jobs.report import attempt_facts, batches_table, summary_table
from jobs.results import FormerResults, OutputError, check_output, errors_path, write_results
from jobs.source import open_source
from jobs.submit import submit
from jobs.summary import summarise
from storage import queries, transitions
from storage.database import Database
from storage.models import RequestStatus, ServedFrom
from storage.queries import BatchRow
from storage.transitions import AttemptRecord, RequestOutcome


def finished_batch(database: Database, folder: Path, lines: int = 4, *, failing: tuple[int, ...] = (2,)) -> int:
    """A batch of which some lines failed in the worker; their ids are `line-1` and so on. Answered last line first."""
    path = folder / "in.txt"
    path.write_text("".join(f"question {i}\n" for i in range(1, lines + 1)))
    with open_source(path, folder) as source:
        batch_id = submit(database, source, InputOptions(model="smol")).batch.id
    with database.write() as connection:
        ids = [request.id for request in queries.next_pending(connection, batch_id, lines)]
        transitions.queue_requests(connection, ids, database.now())
        claimed = transitions.claim_requests(connection, ids, worker="w", lease_s=60, now=database.now())
        for request in sorted(claimed, key=lambda each: -each.line):
            failed = request.line in failing
            answer = {"error": {"code": "engine_failed"}} if failed else {"id": f"chatcmpl-{request.line}"}
            transitions.record_outcomes(
                connection,
                [
                    RequestOutcome(
                        request_id=request.id,
                        batch_id=batch_id,
                        attempt_number=request.attempt,
                        status=RequestStatus.FAILED if failed else RequestStatus.COMPLETED,
                        status_code=500 if failed else 200,
                        response=json.dumps(answer),
                        error_code="engine_failed" if failed else None,
                        error_message="the engine failed" if failed else None,
                        record=AttemptRecord(
                            prompt_tokens=10,
                            completion_tokens=5,
                            queue_s=0.5,
                            time_to_first_token_s=float(request.line),
                            total_s=2.0 * request.line,
                        ),
                    )
                ],
                worker="w",
                now=database.now(),
            )
        transitions.finish_batches(connection, database.now())
        transitions.publish_batch(connection, batch_id, database.now(), output=None, errors=None)
    return batch_id


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_file() and "db" not in path.suffix)


def read_lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_and_failures_go_to_their_files_in_input_order(database: Database, tmp_path: Path) -> None:
    batch_id = finished_batch(database, tmp_path, failing=(2,))
    written = write_results(database, batch_id, tmp_path / "out.jsonl")
    assert (written.output_lines, written.error_lines) == (3, 1)
    assert written.output == tmp_path / "out.jsonl"
    assert written.errors == tmp_path / "out.errors.jsonl"
    answers = read_lines(tmp_path / "out.jsonl")
    assert [line["custom_id"] for line in answers] == ["line-1", "line-3", "line-4"]
    assert answers[0]["response"]["status_code"] == 200  # type: ignore[index]
    assert answers[0]["response"]["body"] == {"id": "chatcmpl-1"}  # type: ignore[index]
    assert answers[0]["error"] is None
    (failure,) = read_lines(tmp_path / "out.errors.jsonl")
    assert failure["custom_id"] == "line-2"
    assert failure["response"]["status_code"] == 500  # type: ignore[index]
    assert failure["response"]["body"] == {"error": {"code": "engine_failed"}}  # type: ignore[index]
    assert failure["error"] is None
    assert len({line["id"] for line in [*answers, failure]}) == 4
    assert files_in(tmp_path) == ["in.txt", "out.errors.jsonl", "out.jsonl"]


def test_lines_that_never_ran_say_so(database: Database, tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_text("one\n")
    with open_source(path, tmp_path) as source:
        batch_id = submit(database, source, InputOptions(model="smol")).batch.id
    with database.write() as connection:
        transitions.cancel_batch(connection, batch_id, database.now())
        transitions.end_requests(connection, batch_id, database.now())
    written = write_results(database, batch_id, tmp_path / "out.jsonl")
    (line,) = read_lines(tmp_path / "out.errors.jsonl")
    assert written.output_lines == 0
    assert line["response"] is None
    assert line["error"]["code"] == "batch_cancelled"  # type: ignore[index]


def test_without_failures_there_is_no_error_file_not_even_an_old_one(sqlite_database: Database, tmp_path: Path) -> None:
    batch_id = finished_batch(sqlite_database, tmp_path, failing=())
    (tmp_path / "out.errors.jsonl").write_text("of an earlier run")
    written = write_results(sqlite_database, batch_id, tmp_path / "out.jsonl")
    assert written.errors is None
    assert not (tmp_path / "out.errors.jsonl").exists()


def test_more_than_a_page_is_written_whole(sqlite_database: Database, tmp_path: Path) -> None:
    lines = queries.PAGE_ROWS + 7
    batch_id = finished_batch(sqlite_database, tmp_path, lines, failing=())
    write_results(sqlite_database, batch_id, tmp_path / "out.jsonl")
    ids = [line["custom_id"] for line in read_lines(tmp_path / "out.jsonl")]
    assert ids == [f"line-{i}" for i in range(1, lines + 1)]


def test_standard_output_takes_both_kinds(
    sqlite_database: Database, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    batch_id = finished_batch(sqlite_database, tmp_path)
    written = write_results(sqlite_database, batch_id, "-")
    assert (written.output, written.output_lines, written.error_lines) == (None, 3, 1)
    printed = [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()]
    assert [line["custom_id"] for line in printed] == ["line-1", "line-2", "line-3", "line-4"]


def test_a_failed_write_leaves_the_old_files_and_no_litter(
    sqlite_database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fills up half-way must not cost the results of the run before."""
    batch_id = finished_batch(sqlite_database, tmp_path)
    output = tmp_path / "out.jsonl"
    output.write_text("old\n")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError) as caught:
        write_results(sqlite_database, batch_id, output)
    assert caught.value.code == "disk_full"
    assert caught.value.message == (
        f"{output} does not fit on its disk; free some space and run the same command again (no answer is lost)"
    )
    assert output.read_text() == "old\n"
    assert files_in(tmp_path) == ["in.txt", "out.jsonl"]


def test_rights_and_links_of_the_file_before_are_kept(sqlite_database: Database, tmp_path: Path) -> None:
    batch_id = finished_batch(sqlite_database, tmp_path, failing=())
    real = tmp_path / "real.jsonl"
    real.write_text("old")
    real.chmod(0o640)
    link = tmp_path / "link.jsonl"
    link.symlink_to(real)
    write_results(sqlite_database, batch_id, link)
    assert link.is_symlink()
    assert len(read_lines(real)) == 4
    assert stat.S_IMODE(real.stat().st_mode) == 0o640


def test_a_device_is_written_to_and_not_replaced(sqlite_database: Database, tmp_path: Path) -> None:
    batch_id = finished_batch(sqlite_database, tmp_path)
    written = write_results(sqlite_database, batch_id, "/dev/null")
    assert (written.output_lines, written.error_lines) == (3, 1)
    assert not Path("/dev/null").is_file()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_device_is_said_so(sqlite_database: Database, tmp_path: Path) -> None:
    batch_id = finished_batch(sqlite_database, tmp_path)
    with pytest.raises(OutputError) as caught:
        write_results(sqlite_database, batch_id, "/dev/full")
    assert caught.value.code == "disk_full"


class TestCheckOutput:
    """A run of hours must not end at a path that could never have been written."""

    def test_a_new_file_in_a_writable_folder_is_fine(self, tmp_path: Path) -> None:
        check_output(tmp_path / "out.jsonl", [tmp_path / "in.txt"])
        check_output("-")
        check_output("/dev/null")
        assert list(tmp_path.iterdir()) == []

    def test_bad_places_are_told_apart(self, tmp_path: Path) -> None:
        with pytest.raises(OutputError) as caught:
            check_output(tmp_path)
        assert caught.value.code == "output_is_folder"
        with pytest.raises(OutputError) as caught:
            check_output(tmp_path / "none" / "out.jsonl")
        assert caught.value.code == "output_folder_missing"
        (tmp_path / "in.txt").write_text("x")
        with pytest.raises(OutputError) as caught:
            check_output(tmp_path / "in.txt", [tmp_path / "in.txt"])
        assert caught.value.code == "output_is_input"
        (tmp_path / "out.errors.jsonl").mkdir()
        with pytest.raises(OutputError) as caught:
            check_output(tmp_path / "out.jsonl")
        assert caught.value.code == "output_is_folder"

    @pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write everywhere")
    def test_read_only_places_are_refused(self, tmp_path: Path) -> None:
        folder = tmp_path / "locked"
        folder.mkdir(mode=0o500)
        with pytest.raises(OutputError) as caught:
            check_output(folder / "out.jsonl")
        assert caught.value.code == "output_not_writable"

    def test_a_folder_that_takes_no_file_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "open", refuse)
        with pytest.raises(OutputError) as caught:
            check_output(tmp_path / "out.jsonl")
        assert caught.value.code == "output_not_writable"
        assert caught.value.message == (
            f"{tmp_path / 'out.jsonl'} cannot be written: Permission denied; "
            "name a file in a folder where you may write"
        )


def test_error_files_are_named_after_their_output() -> None:
    assert errors_path(Path("a/out.jsonl")) == Path("a/out.errors.jsonl")
    assert errors_path(Path("out.v2")) == Path("out.v2.errors.jsonl")


def test_a_summary_has_the_numbers_of_the_closing_table(database: Database, tmp_path: Path) -> None:
    batch_id = finished_batch(database, tmp_path, lines=11, failing=(2,))
    summary = summarise(database, batch_id)
    assert (summary.batch.total_requests, summary.batch.completed_requests, summary.batch.failed_requests) == (
        11,
        10,
        1,
    )
    assert [(failure.code, failure.count, failure.example_line) for failure in summary.failures] == [
        ("engine_failed", 1, 2)
    ]
    assert summary.batch.completion_tokens == 55
    latencies = summary.latencies["time_to_first_token_s"]
    assert (latencies.count, latencies.p50, latencies.p90, latencies.p99) == (10, 6.0, 10.0, 11.0)
    assert summary.latencies["queue_s"].p50 == 0.5
    assert (summary.endings, summary.open_requests, summary.served) == ([], 0, {})
    assert summary.run_s >= 0
    assert summary.requests_per_s >= 0


def shown(table: Table) -> list[list[str]]:
    """A table's rows as texts: its cells where it has lines between them, else its words."""
    console = Console(width=200, no_color=True)
    with console.capture() as capture:
        console.print(table)
    rows = [line.strip() for line in capture.get().splitlines()]
    return [[cell.strip() for cell in row[1:-1].split("│")] if row.startswith("│") else row.split() for row in rows]


def submitted(database: Database, folder: Path, name: str, text: str, **options: object) -> BatchRow:
    path = folder / name
    path.write_text(text)
    with open_source(path, folder) as source:
        return submit(database, source, InputOptions(model="smol", **options)).batch  # type: ignore[arg-type]


def test_lines_that_will_never_run_are_not_called_unfinished_and_counted_once(
    database: Database, tmp_path: Path
) -> None:
    """Of a cancelled batch every line is answered, failed or cancelled, and `list` says the same as `show`."""
    batch = submitted(database, tmp_path, "in.jsonl", '{"prompt":"a"}\n{"prompt":"b"}\n{broken\n')
    summary = summarise(database, batch.id)
    assert summary.open_requests == 2
    assert ["", "2", "not finished"] in shown(summary_table(summary))
    cancelled = steering.cancel(database, batch, tmp_path)
    summary = summarise(database, batch.id)
    assert (summary.open_requests, [(each.code, each.count) for each in summary.endings]) == (
        0,
        [("batch_cancelled", 2)],
    )
    assert [(each.code, each.count) for each in summary.failures] == [("invalid_json_line", 1)]
    rows = shown(summary_table(summary))
    assert ["cancelled", "2", "without an answer, first on line 1"] in rows
    assert not any("not finished" in row for row in rows)
    heads, listed = shown(batches_table([cancelled], database.now()))
    assert heads[4:9] == ["done", "of", "failed", "not", "run"]
    assert listed[2:7] == ["cancelled", "1", "3", "1", "2"]


def test_time_in_which_nothing_of_a_batch_ran_does_not_lower_its_throughput(database: Database, tmp_path: Path) -> None:
    """A line that is retried on the next day must not make a batch of a minute one of a day."""
    batch_id = finished_batch(database, tmp_path, lines=3, failing=(2,))
    with database.write() as connection:
        # Claimed at 100 and 101, both until 110; the retry came a day later and took 5 s.
        for line, (claimed, finished) in {1: (100.0, 110.0), 2: (101.0, 109.0), 3: (86500.0, 86505.0)}.items():
            connection.exec_driver_sql(
                f"UPDATE attempts SET claimed_at = {claimed}, finished_at = {finished} WHERE request_id = "
                f"(SELECT id FROM requests WHERE batch_id = {batch_id} AND line = {line})"
            )
    assert summarise(database, batch_id).run_s == 15.0


@pytest.mark.parametrize("of_another", [True, False])
def test_a_file_of_something_else_is_replaced_by_answers_only_and_named(
    sqlite_database: Database, tmp_path: Path, of_another: bool
) -> None:
    """Results that took hours must not be gone because a batch of refused lines came to the same file."""
    output = tmp_path / "out.jsonl"
    former: FormerResults | None = None
    if of_another:
        (tmp_path / "first").mkdir()
        first = finished_batch(sqlite_database, tmp_path / "first", failing=())
        assert write_results(sqlite_database, first, output).former is None
        assert write_results(sqlite_database, first, output).former is None  # its own, again
        with sqlite_database.read() as connection:
            row = queries.find_batch_by_id(connection, first)
        assert row is not None
        former = FormerResults(output, row.public_id)
    else:
        output.write_text('{"id":"batch_req_1","custom_id":"of another home","response":null}\n')
        former = FormerResults(output, None)
    before = output.read_text()
    refused = submitted(sqlite_database, tmp_path, "refused.jsonl", "{broken\n")
    written = write_results(sqlite_database, refused.id, output)
    assert (written.former, written.is_kept, written.output, written.error_lines) == (former, True, None, 1)
    assert output.read_text() == before
    answered = finished_batch(sqlite_database, tmp_path, 5, failing=())
    written = write_results(sqlite_database, answered, output)
    assert (written.former, written.is_kept, written.output, written.output_lines) == (former, False, output, 5)


def test_each_line_has_a_body_with_an_id_of_its_own_also_where_another_had_the_answer(
    database: Database, tmp_path: Path
) -> None:
    """OpenAI's ids are unique: whoever collects answers by them must not lose the twins."""
    text = "".join(json.dumps({"prompt": "the same", "temperature": 0}) + "\n" for _ in range(3))
    batch = submitted(database, tmp_path, "in.jsonl", text)
    with database.write() as connection:
        (leader,) = [request.id for request in queries.next_pending(connection, batch.id, 10)]
        transitions.queue_requests(connection, [leader], database.now())
        (claimed,) = transitions.claim_requests(connection, [leader], worker="w", lease_s=60, now=database.now())
        record = AttemptRecord(
            artifact_digest="d" * 64, parameters='{"seed":7}', finish_reason="stop", completion_tokens=4
        )
        answer = f'{{"id":"chatcmpl-{leader:x}","choices":[],"note":"{{\\"id\\":\\"chatcmpl-x\\""}}'
        transitions.record_outcomes(
            connection,
            [RequestOutcome(leader, batch.id, claimed.attempt, RequestStatus.COMPLETED, 200, answer, record=record)],
            worker="w",
            now=database.now(),
        )
    write_results(database, batch.id, tmp_path / "out.jsonl")
    bodies = [line["response"]["body"] for line in read_lines(tmp_path / "out.jsonl")]  # type: ignore[index]
    ids = [line["id"].removeprefix("batch_req_") for line in read_lines(tmp_path / "out.jsonl")]  # type: ignore[attr-defined]
    assert [body["id"] for body in bodies] == [f"chatcmpl-{each}" for each in ids]
    assert len(set(ids)) == 3
    assert {body["note"] for body in bodies} == {'{"id":"chatcmpl-x"'}
    summary = summarise(database, batch.id)
    assert (summary.served, summary.batch.completion_tokens) == ({ServedFrom.DUPLICATE: 2}, 4)
    rows = shown(summary_table(summary))
    assert ["", "2", "of them by an identical line; its tokens count once"] in rows
    # The audit of a twin: what its answer was computed with, and by which name to ask for that request.
    twin = audit_request(database, f"batch_req_{ids[1]}")
    assert twin.attempts[-1].values["artifact_digest"] == "d" * 64
    assert twin.attempts[-1].values["parameters"] == '{"seed":7}'
    printed = attempt_facts(twin.attempts[-1])
    assert f"served from       duplicate, batch_req_{leader:x}" in printed
    assert audit_request(database, f"batch_req_{leader:x}").record.line == 1


def test_error_bodies_are_spelled_alike_whoever_refused_the_line(sqlite_database: Database, tmp_path: Path) -> None:
    """Compact, in any script, on one line whatever a reader takes for a line's end."""
    batch = submitted(sqlite_database, tmp_path, "in.jsonl", '{"prompt":"a","temperature":"grüße\u2028"}\n')
    (row,) = queries.results_in_order(sqlite_database, batch.id)
    assert row.response == dump_json(json.loads(row.response or ""))
    assert "grüße" in row.response
    assert "\u2028" not in row.response
