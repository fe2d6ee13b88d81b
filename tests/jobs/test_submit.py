"""Submitting: every line is written once, whatever interrupts it, and the same command finds the same batch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import text

from jobs import submit as submit_module
from jobs.inputs import InputOptions
from jobs.protocol import ChatBody, Endpoint, GenerationBody, load_body
from jobs.source import InputError, open_source
from jobs.submit import BatchOptions, Submission, SubmitProgress, estimate_tokens, is_deterministic, submit
from jobs.template import PromptTemplate
from storage import audit, queries, transitions
from storage.database import Database
from storage.errors import StorageError
from storage.models import BatchStatus, RequestStatus
from storage.transitions import NewBatch, NewRequest, RequestOutcome

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
        (4, "line-4", 400, "nul_character")
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
    assert (batch.status, batch.failed_requests) == (BatchStatus.FINALIZING, 1)
    assert send(database, path).batch.id == batch.id


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


def test_an_input_of_many_groups_is_written_whole(sqlite_database: Database, path: Path) -> None:
    path.write_text("".join(f"What is the capital of country number {i}?\n" for i in range(20_000)))
    submission = send(sqlite_database, path)
    assert submission.batch.total_requests == 20_000
    with sqlite_database.read() as connection:
        assert queries.count_requests(connection, submission.batch.id) == {RequestStatus.PENDING: 20_000}


# --- one answer for one question ---------------------------------------------------------------------------------


def answer_all(database: Database, batch_id: int, failing: tuple[str, ...] = ()) -> list[str]:
    """Be the worker, then end the batch. Returns the custom ids that had to be computed."""
    with database.write() as connection:
        ids = [request.id for request in queries.next_pending(connection, batch_id, 100)]
        transitions.queue_requests(connection, ids, database.now())
        held = transitions.claim_requests(connection, ids, worker="w", lease_s=60, now=database.now())
        outcomes = [
            transitions.RequestOutcome(
                request.id,
                batch_id,
                request.attempt,
                RequestStatus.FAILED if request.custom_id in failing else RequestStatus.COMPLETED,
                500 if request.custom_id in failing else 200,
                f'{{"to":"{request.custom_id}"}}',
            )
            for request in held
        ]
        transitions.record_outcomes(connection, outcomes, worker="w", now=database.now())
        transitions.finish_batches(connection, database.now())
        transitions.publish_batch(connection, batch_id, database.now(), output=None, errors=None)
    return [str(request.custom_id) for request in held]


def write_lines(path: Path, lines: dict[str, str], **fields: object) -> Path:
    path = path.with_suffix(".jsonl")
    path.write_text("\n".join(json.dumps({"custom_id": i, "prompt": text, **fields}) for i, text in lines.items()))
    return path


@pytest.mark.usefixtures("small_groups")
def test_a_job_sent_again_pays_only_for_lines_that_are_new_changed_or_failed(database: Database, path: Path) -> None:
    job = BatchOptions(name="handbook")
    path = write_lines(path, {"a": "one", "b": "two", "c": "three", "d": "four"})
    first = send(database, path, batch_options=job)
    assert answer_all(database, first.batch.id, failing=("d",)) == ["a", "b", "c", "d"]
    write_lines(path, {"new": "zero", "a": "one", "b": "changed", "c": "three", "d": "four"})
    second = send(database, path, batch_options=job)
    assert (second.batch.total_requests, second.batch.completed_requests) == (5, 2)
    assert answer_all(database, second.batch.id) == ["new", "b", "d"]
    third = send(database, path, batch_options=job)
    assert third.was_finished  # nothing failed: it is the same batch
    other_model = send(database, path, batch_options=BatchOptions(name="handbook", artifact_digest="other"))
    assert other_model.batch.completed_requests == 0


def test_a_job_with_failed_lines_sent_again_unchanged_runs_those(database: Database, path: Path) -> None:
    job = BatchOptions(name="handbook")
    path = write_lines(path, {"a": "one", "b": "two"})
    first = send(database, path, batch_options=job)
    answer_all(database, first.batch.id, failing=("b",))
    second = send(database, path, batch_options=job)
    assert second.batch.id != first.batch.id
    assert answer_all(database, second.batch.id) == ["b"]


def test_without_a_name_nothing_is_taken_from_other_batches(database: Database, path: Path) -> None:
    path = write_lines(path, {"a": "one"})
    answer_all(database, send(database, path).batch.id)
    write_lines(path, {"a": "one", "b": "two"})
    assert send(database, path).batch.completed_requests == 0


def test_one_idempotency_key_is_one_batch(database: Database, path: Path) -> None:
    keyed = BatchOptions(idempotency_key="k1")
    path.write_text("one\n")
    first = send(database, path, batch_options=keyed)
    assert send(database, path, batch_options=keyed).batch.id == first.batch.id
    assert send(database, path, batch_options=BatchOptions(idempotency_key="k2")).batch.id != first.batch.id
    path.write_text("another\n")
    with pytest.raises(InputError, match="'k1' stands for another input") as caught:
        send(database, path, batch_options=keyed)
    assert caught.value.code == "idempotency_key_reused"


def test_the_same_input_means_the_same_batch_only_within_its_window(database: Database, path: Path) -> None:
    path.write_text("one\n")
    first = send(database, path)
    assert send(database, path, batch_options=BatchOptions(same_within_s=60.0)).batch.id == first.batch.id
    assert send(database, path, batch_options=BatchOptions(same_within_s=0.0)).batch.id != first.batch.id


@pytest.mark.usefixtures("small_groups")
def test_deterministic_lines_that_ask_the_same_wait_for_one_answer(database: Database, path: Path) -> None:
    lines = {"a": "one", "b": "two", "c": "one", "d": "three", "e": "one"}
    greedy = send(database, write_lines(path, lines, temperature=0))
    assert answer_all(database, greedy.batch.id) == ["a", "b", "d"]
    assert [row.response for row in queries.results_in_order(database, greedy.batch.id)] == [
        '{"to":"a"}',
        '{"to":"b"}',
        '{"to":"a"}',
        '{"to":"d"}',
        '{"to":"a"}',
    ]
    sampled = send(database, write_lines(path, lines))
    assert answer_all(database, sampled.batch.id) == ["a", "b", "c", "d", "e"]
    each = BatchOptions(shares_duplicates=False, tenant="other")
    apart = send(database, write_lines(path, lines, temperature=0), batch_options=each)
    assert answer_all(database, apart.batch.id) == ["a", "b", "c", "d", "e"]


def test_tokens_are_estimated_from_text_and_bound() -> None:
    assert estimate_tokens('{"prompt":"' + "x" * 388 + '"}') == 100 + 256
    assert estimate_tokens('{"prompt":"say \\"max_tokens\\":9","max_tokens":5}', 400) == 117


@given(
    st.text(),
    st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.sampled_from([0, 0.0, -0.0, 1e-300, 0.05, 1]),
            "seed": st.none() | st.integers(-(2**63), 2**63 - 1),
            "user": st.sampled_from(['"seed":1,', '"temperature":0.0}', "seed"]),
            "metadata": st.just({"seed": "1", "temperature": "0", "a": '"seed":1,'}),
            "stop": st.just(['"seed":1}', "seed"]),
            "logit_bias": st.just({"0": 0}),
        },
    ),
)
def test_what_always_gets_the_same_answer_is_told_from_the_text_of_a_body(prompt: str, said: dict[str, object]) -> None:
    """Each line is asked; reading its JSON for that would cost a tenth of all that a line costs."""
    for content in (prompt, f'{prompt}","seed":1,"temperature":0.0}}'):
        body = ChatBody.model_validate_json(json.dumps({"messages": [{"role": "user", "content": content}], **said}))
        assert is_deterministic(body.to_json()) == (said.get("temperature") == 0 or said.get("seed") is not None)


def test_a_question_is_the_same_number_in_every_version(sqlite_database: Database, path: Path) -> None:
    """What a job has answered before an upgrade is found by it."""
    book = "A sentence of the book.\n" * 60
    path = path.with_suffix(".jsonl")
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in ("a", f"{book}b", f"{book}c")))
    batch = send(sqlite_database, path, batch_options=BatchOptions(artifact_digest="sha256:1")).batch
    scope = hashlib.blake2b(f"/v1/chat/completions\n{batch.model}\nsha256:1".encode(), digest_size=32).digest()
    with sqlite_database.read() as connection:
        pending = queries.next_pending(connection, batch.id, 10)
        rows = [row for request in pending if (row := audit.find_request(connection, request.id)) is not None]
        hashes = {row.line: row.question_hash for row in connection.execute(text("SELECT * FROM requests"))}
    for row in rows:
        assert row.body is not None
        digest = hashlib.blake2b(row.prefix.encode(), digest_size=16).digest() if row.prefix else b""
        whole = hashlib.blake2b(digest + row.body.encode(), digest_size=16, key=scope).digest()
        assert hashes[row.line] == int.from_bytes(whole[:8], "big", signed=True)
    assert sorted(bool(row.prefix) for row in rows) == [False, True, True]


# --- lines that run while later ones are read ----------------------------------------------------------------------


def run_what_is_there(database: Database, batch_id: int) -> int:
    """What dispatch and a worker do with the lines written so far. Returns how many were answered."""
    now = database.now()
    with database.write() as connection:
        ids = [request.id for request in queries.next_pending(connection, batch_id, 100)]
        transitions.queue_requests(connection, ids, now)
        held = transitions.claim_requests(connection, ids, worker="w", lease_s=60.0, now=now)
        outcomes = [
            RequestOutcome(one.id, one.batch_id, one.attempt, RequestStatus.COMPLETED, 200, "{}") for one in held
        ]
        return len(transitions.record_outcomes(connection, outcomes, worker="w", now=now))


@pytest.mark.usefixtures("small_groups")
def test_lines_run_while_later_ones_are_read_and_the_batch_ends_with_the_last(database: Database, path: Path) -> None:
    """The first answers of a million lines are there long before the last line is."""
    path.write_text("".join(f"question {i}\n" for i in range(7)))
    answered: list[int] = []

    def meanwhile(_: SubmitProgress) -> None:
        with database.write() as connection:
            (batch,) = queries.batches_at_work(connection, database.now())
            assert batch.status is BatchStatus.VALIDATING
            assert transitions.finish_batches(connection, database.now()) == []
        answered.append(run_what_is_there(database, batch.id))

    submission = send(database, path, progress=meanwhile)
    assert answered == [3, 3, 1]
    assert submission.batch.status is BatchStatus.FINALIZING
    assert submission.batch.completed_requests == submission.batch.total_requests == 7


def test_a_batch_that_is_submitted_paused_begins_when_it_is_resumed(database: Database, path: Path) -> None:
    path.write_text("one\ntwo\n")
    submission = send(database, path, BatchOptions(is_paused=True))
    assert (submission.batch.status, submission.batch.paused_at is None) == (BatchStatus.IN_PROGRESS, False)
    with database.write() as connection:
        assert transitions.queue_requests(connection, [1, 2], database.now()) == []
    assert send(database, path).batch.id == submission.batch.id, "whether it waits is no part of what is asked"
    with database.write() as connection:
        assert transitions.resume_batch(connection, submission.batch.id, database.now())
    assert run_what_is_there(database, submission.batch.id) == 2


@pytest.mark.usefixtures("small_groups")
def test_a_line_that_repeats_one_answered_already_gets_that_answer(database: Database, path: Path) -> None:
    path.write_text("same\nother\nthird\nsame\n")

    def meanwhile(progress: SubmitProgress) -> None:
        with database.read() as connection:
            (batch,) = queries.batches_at_work(connection, database.now())
        run_what_is_there(database, batch.id)

    batch = send(database, path, progress=meanwhile, defaults=GenerationBody(temperature=0.0)).batch
    assert batch.completed_requests == 3
    with database.write() as connection:
        assert queries.has_stalled_duplicates(connection, batch.id)
        assert transitions.answer_duplicates(connection, batch.id, database.now()) == 1
        assert transitions.finish_batches(connection, database.now()) == [batch.id]


@pytest.mark.usefixtures("small_groups")
def test_a_batch_that_is_cancelled_while_it_is_submitted_takes_no_more_lines(database: Database, path: Path) -> None:
    path.write_text("".join(f"question {i}\n" for i in range(7)))

    def cancel(_: SubmitProgress) -> None:
        with database.write() as connection:
            (batch,) = queries.unfinished_batches(connection)
            transitions.cancel_batch(connection, batch.id, database.now())

    with pytest.raises(StorageError, match="cancelling"):
        send(database, path, progress=cancel)
    with database.write() as connection:
        (batch,) = queries.unfinished_batches(connection)
        assert transitions.end_requests(connection, batch.id, database.now()) == 3
        assert transitions.publish_batch(connection, batch.id, database.now(), output=None, errors=None)


@pytest.mark.usefixtures("small_groups")
def test_what_runs_of_a_batch_whose_input_changed_is_no_longer_queued(database: Database, path: Path) -> None:
    path.write_text("one\ntwo\nthree\nfour\n")

    def change(_: SubmitProgress) -> None:
        with database.write() as connection:
            (batch,) = queries.batches_at_work(connection, database.now())
            ids = [request.id for request in queries.next_pending(connection, batch.id, 100)]
            assert len(transitions.queue_requests(connection, ids, database.now())) == 3
        path.write_text("one\ntwo\nthree\nfourteen\n")

    with pytest.raises(InputError):
        send(database, path, progress=change)
    with database.read() as connection:
        (batch,) = queries.list_batches(connection)
        assert batch.status is BatchStatus.FAILED
        assert queries.queued_counts(connection) == {}
        assert queries.batches_at_work(connection, database.now()) == []


def test_a_batch_that_waits_for_its_whole_validation_runs_nothing_before(database: Database) -> None:
    """As the API promises: a file with an error fails without any output."""
    now = database.now()
    with database.write() as connection:
        batch_id = transitions.create_batch(connection, NewBatch("batch_1", "f", Endpoint.CHAT, "smol"), now)
        transitions.add_requests(connection, batch_id, [NewRequest(1, "c1", "{}")])
        (request,) = queries.next_pending(connection, batch_id, 10)
        assert queries.batches_at_work(connection, now) == []
        assert transitions.queue_requests(connection, [request.id], now) == []
