"""Result files: each line once, in input order, whole or not at all."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from jobs.inputs import InputOptions
from jobs.results import OutputError, check_output, errors_path, summarise, write_results
from jobs.source import open_source
from jobs.submit import submit
from storage import queries, transitions
from storage.database import Database
from storage.models import RequestStatus
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
    assert summary.run_s >= 0
    assert summary.requests_per_s >= 0
