"""Submitting: every line is written once, whatever interrupts it, and the same command finds the same batch."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs import submit as submit_module
from jobs.inputs import InputOptions
from jobs.protocol import Endpoint, GenerationBody, load_body
from jobs.source import InputError, open_source
from jobs.submit import BatchOptions, Submission, SubmitProgress, submit
from jobs.template import PromptTemplate
from storage import queries, transitions
from storage.database import Database
from storage.models import BatchStatus, RequestStatus

Progress = Callable[[SubmitProgress], None]


class Interrupted(Exception):
    """Stands for a crash between two groups."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "in.txt"


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit_module, "GROUP_LINES", 3)


def send(
    database: Database,
    path: Path,
    batch_options: BatchOptions | None = None,
    progress: Progress | None = None,
    **options: object,
) -> Submission:
    with open_source(path, path.parent / "spool") as source:
        return submit(
            database,
            source,
            InputOptions(model="smol", **options),  # type: ignore[arg-type]
            batch_options,
            progress=progress,
        )


def lines_of(database: Database, submission: Submission) -> list[tuple[int, str | None]]:
    """The lines that will run, in order, with their ids."""
    with database.read() as connection:
        pending = queries.next_pending(connection, submission.batch.id, 10_000)
    return sorted((request.line, None) for request in pending)


def test_a_file_becomes_a_batch_in_progress(database: Database, path: Path) -> None:
    path.write_text("one\n\ntwo\na\0b\n")
    seen: list[SubmitProgress] = []
    submission = send(database, path, BatchOptions(name="night", priority=3), seen.append)
    batch = submission.batch
    assert (submission.was_there, submission.written) == (False, 3)
    assert (batch.status, batch.total_requests, batch.failed_requests) == (BatchStatus.IN_PROGRESS, 3, 1)
    assert (batch.endpoint, batch.model, batch.name, batch.priority) == (Endpoint.CHAT, "smol", "night", 3)
    assert seen == [SubmitProgress(lines=3, refused=1, bytes_read=13, bytes_total=13)]
    assert lines_of(database, submission) == [(1, None), (3, None)]
    failure = queries.results_in_order(database, batch.id)
    assert [(row.line, row.custom_id, row.status_code, row.error_code) for row in failure] == [
        (4, None, 400, "nul_character")
    ]


def test_the_same_command_again_finds_the_same_batch(database: Database, path: Path) -> None:
    path.write_text("one\ntwo\n")
    first = send(database, path, defaults=GenerationBody(seed=1))
    again = send(database, path, defaults=GenerationBody(seed=1))
    assert again.batch.id == first.batch.id
    assert (again.was_there, again.was_finished, again.written) == (True, False, 0)


@pytest.mark.parametrize(
    "changed",
    [
        {"defaults": GenerationBody(seed=2)},
        {"defaults": GenerationBody(temperature=0.0)},
        {"context": "The book."},
        {"system": "Be brief."},
        {"endpoint": Endpoint.COMPLETIONS},
        {"batch_options": BatchOptions(artifact_digest="other")},
        {"batch_options": BatchOptions(tenant="other")},
    ],
)
def test_what_changes_the_answers_makes_another_batch(
    sqlite_database: Database, path: Path, changed: dict[str, object]
) -> None:
    path.write_text("one\n")
    first = send(sqlite_database, path)
    assert send(sqlite_database, path, **changed).batch.id != first.batch.id  # type: ignore[arg-type]


def test_the_name_of_the_file_changes_nothing(sqlite_database: Database, path: Path) -> None:
    path.write_text("one\n")
    first = send(sqlite_database, path)
    assert send(sqlite_database, path.rename(path.with_name("other.txt"))).batch.id == first.batch.id


@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_an_interrupted_submission_goes_on_where_it_stopped(database: Database, path: Path, groups: int) -> None:
    """No line is lost or written twice, and an id from before the break is still known after it."""
    lines = [{"prompt": f"question {i}", "custom_id": f"q{i}"} for i in range(7)] + [{"prompt": "x", "custom_id": "q0"}]
    path = path.with_suffix(".jsonl")
    path.write_text("\n".join(map(json.dumps, lines)))
    count = 0

    def stop_after(_: SubmitProgress) -> None:
        nonlocal count
        count += 1
        if count == groups:
            raise Interrupted

    with pytest.raises(Interrupted):
        send(database, path, progress=stop_after)
    submission = send(database, path)
    assert submission.written == max(0, 8 - 3 * groups)
    assert (submission.batch.total_requests, submission.batch.failed_requests) == (8, 1)
    assert submission.batch.status is BatchStatus.IN_PROGRESS
    assert [line for line, _ in lines_of(database, submission)] == list(range(1, 8))
    (refused,) = queries.results_in_order(database, submission.batch.id)
    assert (refused.line, refused.error_code) == (8, "duplicate_custom_id")
    with database.read() as connection:
        assert len(queries.list_batches(connection)) == 1


@pytest.mark.usefixtures("small_groups")
def test_two_submitters_of_one_input_make_one_batch(database: Database, path: Path) -> None:
    """A retried upload, or an impatient user: the second comes to the end while the first is half-way."""
    path.write_text("".join(f"question {i}\n" for i in range(10)))
    inner: list[Submission] = []

    def meanwhile(_: SubmitProgress) -> None:
        if not inner:
            inner.append(send(database, path))

    outer = send(database, path, progress=meanwhile)
    assert outer.batch.id == inner[0].batch.id
    assert outer.was_there
    assert outer.batch.total_requests == 10
    assert len(lines_of(database, outer)) == 10


def test_an_unusable_input_leaves_no_batch(database: Database, path: Path) -> None:
    path.write_text("\n\n")
    with pytest.raises(InputError) as caught:
        send(database, path)
    assert caught.value.code == "empty_file"
    with database.read() as connection:
        assert queries.list_batches(connection) == []


@pytest.mark.usefixtures("small_groups")
def test_an_input_that_changes_fails_its_batch(sqlite_database: Database, path: Path) -> None:
    """Lines of the old and the new file would else run as one batch under the old one's digest."""
    path.write_text("one\ntwo\nthree\nfour\n")

    def change(_: SubmitProgress) -> None:
        path.write_text("five\n")

    with pytest.raises(InputError, match="changed while it was read"):
        send(sqlite_database, path, progress=change)
    with sqlite_database.read() as connection:
        (batch,) = queries.list_batches(connection)
    assert (batch.status, batch.error_code) == (BatchStatus.FAILED, "input_changed")


def test_a_batch_whose_every_line_is_refused_is_finished_at_once(database: Database, path: Path) -> None:
    path = path.with_suffix(".jsonl")
    path.write_text("no json\n")
    batch = send(database, path).batch
    assert (batch.status, batch.failed_requests) == (BatchStatus.COMPLETED, 1)
    assert send(database, path).was_finished


def test_a_cancelled_batch_is_not_found_again(database: Database, path: Path) -> None:
    path.write_text("one\n")
    first = send(database, path)
    with database.write() as connection:
        transitions.cancel_batch(connection, first.batch.id, database.now())
    again = send(database, path)
    assert again.batch.id != first.batch.id
    assert again.batch.status is BatchStatus.IN_PROGRESS


def test_a_context_is_kept_once_and_read_back_whole(database: Database, path: Path) -> None:
    path = path.with_suffix(".csv")
    path.write_text("id,question\n1,why?\n2,how?\n")
    context = "A page of the handbook.\n" * 50
    submission = send(database, path, context=context, template=PromptTemplate("Q: {{ question }}"))
    with database.write() as connection:
        pending = queries.next_pending(connection, submission.batch.id, 10)
        assert len({request.prefix_id for request in pending}) == 1
        texts = queries.prefix_texts(connection, {request.prefix_id for request in pending if request.prefix_id})
        assert list(texts.values()) == [context]
        transitions.queue_requests(connection, [request.id for request in pending], database.now())
        claimed = transitions.claim_requests(
            connection, [request.id for request in pending], worker="w", lease_s=60, now=database.now()
        )
    assert [request.custom_id for request in claimed] == ["1", "2"]
    for request, question in zip(claimed, ["why?", "how?"], strict=True):
        assert request.prefix_id is not None
        body = load_body(Endpoint(request.endpoint), request.body, texts[request.prefix_id])
        assert [message.content for message in body.messages] == [context, f"Q: {question}"]  # type: ignore[union-attr]
        assert context not in request.body


def test_bulk_goes_in_fast_enough(sqlite_database: Database, path: Path) -> None:
    """A fifth of what is wanted of 100,000 lines (20 s): well below it is a mistake, not a slow machine."""
    path.write_text("".join(f"What is the capital of country number {i}?\n" for i in range(20_000)))
    started = time.monotonic()
    submission = send(sqlite_database, path)
    took_s = time.monotonic() - started
    assert submission.batch.total_requests == 20_000
    assert took_s < 4.0 * 2
    with sqlite_database.read() as connection:
        assert queries.count_requests(connection, submission.batch.id) == {RequestStatus.PENDING: 20_000}
