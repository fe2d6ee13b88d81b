"""An input file's verdict: what fails a batch, what fails a line, and who sees it through when a validator dies."""

from __future__ import annotations

import copy
import io
import json
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from jobs import forecast
from jobs.inputs import InputLine, InputOptions, InputReader
from jobs.protocol import Endpoint, parse_body
from jobs.settings import GatewaySettings, Settings
from jobs.source import Source
from jobs.validation import (
    LEASE_S,
    MAX_LISTED_ERRORS,
    InvalidLines,
    SubmitOptions,
    Validator,
    check_lines,
    find_digest,
    first_model,
    is_format_error,
    validate_next,
)
from storage import files, queries, transitions
from storage.database import Database
from storage.errors import InvalidRequest
from storage.models import BatchStatus, Door, FilePurpose, RequestStatus
from storage.queries import BatchRow
from storage.transitions import NewBatch, NewWorker
from tests.conftest import wait_until

MODEL = "tiny"


def line(custom_id: object = "a", **changes: Any) -> dict[str, Any]:
    """A good line, with some of its keys changed; None takes a key away."""
    whole = {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]},
        **changes,
    }
    return {key: value for key, value in whole.items() if value is not None}


def body(**changes: Any) -> dict[str, Any]:
    whole = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], **changes}
    return {key: value for key, value in whole.items() if value is not None}


def jsonl(lines: Sequence[object]) -> bytes:
    return b"".join((each if isinstance(each, bytes) else json.dumps(each).encode()) + b"\n" for each in lines)


class _File(io.BytesIO):
    """Bytes that have the file number of a file which does not change."""

    def fileno(self) -> int:
        return 0


def source_of(lines: Sequence[object] | bytes) -> Source:
    return Source(_File(lines if isinstance(lines, bytes) else jsonl(lines)), "in.jsonl")


@pytest.fixture
def settings_here(database: Database, tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "home")


def make_batch(database: Database, settings: Settings, lines: Sequence[object] | bytes, **fields: Any) -> BatchRow:
    """A batch with an uploaded input, as the gateway makes them; some worker has served its model."""
    contents = files.IncomingFile(settings.files_dir)
    contents.write(lines if isinstance(lines, bytes) else jsonl(lines))
    contents.put_in_place()
    upload = files.NewUpload(
        public_id=files.make_file_id(),
        tenant="default",
        purpose=FilePurpose.BATCH,
        filename="in.jsonl",
        path=contents.path,
        bytes=contents.bytes,
        lines=contents.lines,
        sha256=contents.sha256,
    )
    now = database.now()
    values = {
        "public_id": f"batch_{uuid.uuid4().hex}",
        "fingerprint": uuid.uuid4().hex,
        "endpoint": "/v1/chat/completions",
        "model": "",
        "door": Door.HTTP,
        "input_file_public_id": upload.public_id,
        "completion_window": "24h",
        "expires_at": now + 86_400,
        **fields,
    }
    with database.write() as connection:
        files.add_upload(connection, upload, now, same_within_s=0.0)
        transitions.register_worker(
            connection, NewWorker("w", "host", 1, MODEL, artifact_digest="d1", max_batch_size=8), now
        )
        batch_id = transitions.create_batch(connection, NewBatch(**values), now)
    return again(database, batch_id)


def again(database: Database, batch_id: int) -> BatchRow:
    with database.read() as connection:
        found = queries.find_batch_by_id(connection, batch_id)
    assert found is not None
    return found


def validated(database: Database, settings: Settings, lines: Sequence[object] | bytes, **fields: Any) -> BatchRow:
    batch = make_batch(database, settings, lines, **fields)
    assert validate_next(database, settings, "me")
    return again(database, batch.id)


def errors_of(batch: BatchRow) -> list[tuple[str, str | None, int | None]]:
    return [(each["code"], each["param"], each["line"]) for each in json.loads(batch.errors or "[]")]


class TestVerdicts:
    def test_a_good_file_starts_its_batch(self, database: Database, settings_here: Settings) -> None:
        batch = validated(database, settings_here, [line("a"), b"", line("b"), line("c")])
        assert batch.status is BatchStatus.IN_PROGRESS
        assert (batch.model, batch.artifact_digest, batch.total_requests) == (MODEL, "d1", 3)

    def test_a_long_system_message_is_kept_once_for_all_lines(
        self, database: Database, settings_here: Settings
    ) -> None:
        """So dispatch knows what belongs together, and sends it to one worker."""
        manual = {"role": "system", "content": "A rule of the house. " * 100}
        questions = [[manual, {"role": "user", "content": f"question {n}"}] for n in range(4)]
        batch = validated(
            database, settings_here, [line(f"q{n}", body=body(messages=asked)) for n, asked in enumerate(questions)]
        )
        with database.read() as connection:
            found = queries.next_pending(connection, batch.id, 10)
        assert len(found) == 4
        assert len({request.prefix_id for request in found}) == 1
        assert found[0].prefix_id is not None
        assert batch.errors is None
        assert batch.estimated_prompt_tokens > 0
        assert not validate_next(database, settings_here, "me")

    @pytest.mark.parametrize(
        ("bad", "expected"),
        [
            (b"{", ("invalid_json_line", None, 2)),
            (b"[1]", ("invalid_json_line", None, 2)),
            (b"\xff", ("invalid_encoding", None, 2)),
            (b"[" * 10_000, ("invalid_json_line", None, 2)),
            (line("a"), ("duplicate_custom_id", "custom_id", 2)),
            (line(custom_id=""), ("empty_string", "custom_id", 2)),
            ({"prompt": "hi"}, ("missing_required_parameter", "url", 2)),
            (line(7), ("invalid_type", "custom_id", 2)),
            (line("b", url=None), ("missing_required_parameter", "url", 2)),
            (line("b", url="/v1/completions"), ("url_mismatch", "url", 2)),
            (line("b", url="/v1/embeddings"), ("url_mismatch", "url", 2)),
            (line("b", method="GET"), ("invalid_value", "method", 2)),
            (line("b", body=None), ("missing_required_parameter", "body", 2)),
            (line("b", body=body(model="other")), ("model_mismatch", "body.model", 2)),
            (line("b", body=body(model=None)), ("missing_required_parameter", "body.model", 2)),
            (line("b", body=body(stream=True)), ("unsupported_value", "body.stream", 2)),
        ],
    )
    def test_a_format_error_fails_the_batch_and_names_the_line(
        self, sqlite_database: Database, tmp_path: Path, bad: object, expected: tuple[str, str, int]
    ) -> None:
        settings = Settings(home=tmp_path / "home")
        batch = validated(sqlite_database, settings, [line("a"), bad, line("z")])
        assert batch.status is BatchStatus.FAILED
        assert errors_of(batch) == [expected]
        assert (batch.total_requests, batch.failed_at is not None) == (0, True)
        assert batch.error_code == expected[0]

    def test_a_file_without_a_custom_id_names_it(self, sqlite_database: Database, tmp_path: Path) -> None:
        without = {key: value for key, value in line("a").items() if key != "custom_id"}
        batch = validated(sqlite_database, Settings(home=tmp_path / "home"), [without])
        assert errors_of(batch) == [("missing_required_parameter", "custom_id", 1)]

    @pytest.mark.parametrize(
        "bad",
        [
            body(messages=None),
            body(messages=[]),
            body(max_tokens=0),
            body(temperature=3),
            body(tools=[{"type": "function"}]),
            body(unheard_of=1),
            body(messages=[{"role": "user", "content": "a\0b"}]),
            body(messages=[{"role": "user", "content": ""}]),
        ],
    )
    def test_an_error_within_a_body_fails_that_line_alone(
        self, sqlite_database: Database, tmp_path: Path, bad: dict[str, Any]
    ) -> None:
        batch = validated(
            sqlite_database, Settings(home=tmp_path / "home"), [line("a"), line("b", body=bad), line("c")]
        )
        assert batch.status is BatchStatus.IN_PROGRESS
        assert (batch.total_requests, batch.failed_requests) == (3, 1)
        with sqlite_database.read() as connection:
            (result,) = queries.results_after(connection, batch.id, 0)
        assert (result.custom_id, result.status_code) == ("b", 400)
        assert json.loads(result.response or "")["error"]["param"].startswith("body.")

    @pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf"])
    def test_an_empty_file_fails_its_batch(self, sqlite_database: Database, tmp_path: Path, content: bytes) -> None:
        batch = validated(sqlite_database, Settings(home=tmp_path / "home"), content)
        assert batch.status is BatchStatus.FAILED
        assert errors_of(batch) == [("empty_file", None, None)]

    def test_a_model_that_nobody_has_fails_the_batch(self, sqlite_database: Database, tmp_path: Path) -> None:
        batch = validated(sqlite_database, Settings(home=tmp_path / "home"), [line("a", body=body(model="gpt-9"))])
        assert errors_of(batch) == [("model_not_found", "body.model", 1)]

    def test_a_models_name_is_never_a_path(self, sqlite_database: Database, tmp_path: Path) -> None:
        folder = tmp_path / "artifact"
        folder.mkdir()
        (folder / "manifest.json").write_text('{"model": "secret", "digest": "d"}')
        for named in (str(folder), "../artifact", "..", ""):
            assert find_digest(sqlite_database, tmp_path / "artifacts", named) is None

    def test_too_many_lines_fail_the_batch(self, sqlite_database: Database, tmp_path: Path) -> None:
        settings = Settings(home=tmp_path / "home", gateway=GatewaySettings(max_batch_lines=3))
        batch = validated(sqlite_database, settings, [line(str(number)) for number in range(4)])
        assert errors_of(batch) == [("too_many_tasks", None, None)]
        batch = validated(sqlite_database, settings, b"\n" * 13)
        assert errors_of(batch) == [("too_many_tasks", None, None)], "nobody reads on through endless blank lines"
        batch = validated(sqlite_database, settings, [line(str(number)) for number in range(3)])
        assert batch.status is BatchStatus.IN_PROGRESS

    def test_all_lines_are_checked_and_the_list_is_bounded(self, sqlite_database: Database, tmp_path: Path) -> None:
        batch = validated(
            sqlite_database, Settings(home=tmp_path / "home"), [line("a")] + [b"{"] * (MAX_LISTED_ERRORS + 50)
        )
        found = json.loads(batch.errors or "")
        assert len(found) == MAX_LISTED_ERRORS + 1
        assert [each["line"] for each in found[:3]] == [2, 3, 4]
        assert (found[-1]["code"], found[-1]["line"]) == ("too_many_errors", None)
        assert found[-1]["message"].startswith("50 more lines")

    def test_a_caller_may_have_format_errors_fail_their_lines_alone(
        self, database: Database, settings_here: Settings
    ) -> None:
        options = SubmitOptions(invalid_lines=InvalidLines.FAIL_LINE).to_json()
        batch = validated(database, settings_here, [line("a"), b"{", line("a"), line("b")], submit_options=options)
        assert batch.status is BatchStatus.IN_PROGRESS
        assert (batch.total_requests, batch.failed_requests) == (4, 2)

    def test_an_input_that_was_deleted_fails_its_batch(self, database: Database, settings_here: Settings) -> None:
        batch = make_batch(database, settings_here, [line("a")])
        with database.write() as connection:
            row = files.find_upload(connection, "default", batch.input_file_public_id or "")
            assert row is not None
            files.delete_rows(connection, [row.id])
        assert validate_next(database, settings_here, "me")
        assert errors_of(again(database, batch.id)) == [("file_not_found", "input_file_id", None)]

    def test_contents_that_lie_elsewhere_are_left_to_whoever_has_them(
        self, sqlite_database: Database, tmp_path: Path
    ) -> None:
        """Two hosts that share a database and no folder must not fail each other's batches."""
        here, there = Settings(home=tmp_path / "here"), Settings(home=tmp_path / "there")
        batch = make_batch(sqlite_database, there, [line("a")])
        out_of_reach: set[int] = set()
        assert validate_next(sqlite_database, here, "here", out_of_reach=out_of_reach)
        assert out_of_reach == {batch.id}
        assert not validate_next(sqlite_database, here, "here", out_of_reach=out_of_reach)
        assert validate_next(sqlite_database, there, "there")
        assert again(sqlite_database, batch.id).status is BatchStatus.IN_PROGRESS


class TestDeadlines:
    @pytest.fixture(autouse=True)
    def _long_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """However long this machine takes, the rate is still known."""
        monkeypatch.setattr(forecast, "WINDOW_S", 3600.0)

    def finished_batch(self, database: Database, settings: Settings, requests: int) -> None:
        """Some work of the model that ended a moment ago."""
        batch = validated(database, settings, [line(str(number)) for number in range(requests)])
        with database.write() as connection:
            now = database.now()
            ids = [each.id for each in queries.next_pending(connection, batch.id, requests)]
            transitions.queue_requests(connection, ids, now)
            claimed = transitions.claim_requests(connection, ids, worker="w", lease_s=60, now=now)
            outcomes = [
                transitions.RequestOutcome(each.id, batch.id, 1, RequestStatus.COMPLETED, 200, "{}") for each in claimed
            ]
            transitions.record_outcomes(connection, outcomes, worker="w", now=now - 10)

    @pytest.mark.parametrize("asked", [True, None, False])
    def test_an_impossible_one_is_refused_where_that_is_wanted(
        self, database: Database, settings_here: Settings, asked: bool | None
    ) -> None:
        """Twenty requests in ten seconds: a thousand lines do not fit into a minute."""
        self.finished_batch(database, settings_here, 20)
        options = SubmitOptions(refuse_impossible_deadline=asked).to_json()
        batch = validated(
            database,
            settings_here,
            [line(str(number)) for number in range(1000)],
            expires_at=database.now() + 60,
            submit_options=options,
        )
        if asked:
            assert errors_of(batch) == [("deadline_impossible", "completion_window", None)]
        else:
            assert batch.status is BatchStatus.IN_PROGRESS

    def test_a_possible_one_and_an_unknown_rate_are_let_pass(self, database: Database, settings_here: Settings) -> None:
        options = SubmitOptions(refuse_impossible_deadline=True).to_json()
        batch = validated(
            database, settings_here, [line("a")], expires_at=database.now() + 3600, submit_options=options
        )
        assert batch.status is BatchStatus.IN_PROGRESS
        self.finished_batch(database, settings_here, 20)
        batch = validated(
            database, settings_here, [line("a")], expires_at=database.now() + 3600, submit_options=options
        )
        assert batch.status is BatchStatus.IN_PROGRESS


class _Crash(BaseException):
    """As if the process had been killed: nothing of the validator's own runs any more."""


class TestTakeover:
    def crash_after(self, looks: int) -> Any:
        """A `stopping` that kills at the given look."""
        left = [looks]

        def stopping() -> bool:
            left[0] -= 1
            if left[0] < 0:
                raise _Crash
            return False

        return stopping

    # 2,500 lines: a look at each while they are checked, then one after each of two groups of rows.
    @pytest.mark.parametrize(("looks", "written"), [(100, 0), (2500, 2000)])
    def test_what_a_dead_validator_began_another_ends(
        self, database: Database, settings_here: Settings, looks: int, written: int
    ) -> None:
        """It dies while it checks, and between two groups of rows; each line is there once."""
        frozen = database.now()
        database.now = lambda: frozen  # type: ignore[method-assign]
        batch = make_batch(database, settings_here, [line(str(number)) for number in range(2500)])
        with pytest.raises(_Crash):
            validate_next(database, settings_here, "dead", stopping=self.crash_after(looks))
        left = again(database, batch.id)
        assert (left.status, left.total_requests) == (BatchStatus.VALIDATING, written)
        assert not validate_next(database, settings_here, "heir"), "the dead one's lease still holds"
        self.let_time_pass(database)
        assert validate_next(database, settings_here, "heir")
        after = again(database, batch.id)
        assert (after.status, after.total_requests, after.validated_by) == (BatchStatus.IN_PROGRESS, 2500, "heir")
        with database.read() as connection:
            assert queries.count_requests(connection, batch.id) == {RequestStatus.PENDING: 2500}

    def let_time_pass(self, database: Database) -> None:
        later = database.now() + LEASE_S + 1
        database.now = lambda: later  # type: ignore[method-assign]

    def test_a_validator_that_is_told_to_stop_hands_back_at_once(
        self, database: Database, settings_here: Settings
    ) -> None:
        batch = make_batch(database, settings_here, [line(str(number)) for number in range(300)])
        assert validate_next(database, settings_here, "leaving", stopping=lambda: True)
        assert again(database, batch.id).validated_by is None
        assert validate_next(database, settings_here, "heir")
        assert again(database, batch.id).status is BatchStatus.IN_PROGRESS

    def test_a_batch_that_is_cancelled_meanwhile_stays_cancelled(
        self, database: Database, settings_here: Settings
    ) -> None:
        batch = make_batch(database, settings_here, [line(str(number)) for number in range(300)])

        def cancel_then_go_on() -> bool:
            with database.write() as connection:
                transitions.cancel_batch(connection, batch.id, database.now())
            return False

        assert validate_next(database, settings_here, "me", stopping=cancel_then_go_on)
        after = again(database, batch.id)
        assert (after.status, after.total_requests) == (BatchStatus.CANCELLING, 0)

    def test_the_thread_takes_what_comes(self, database: Database, settings_here: Settings) -> None:
        with Validator(database, settings_here) as validator:
            batch = make_batch(database, settings_here, [line("a")])
            validator.wake()
            wait_until(lambda: again(database, batch.id).status is BatchStatus.IN_PROGRESS, what="the validation")


# --- one verdict, whoever asks -----------------------------------------------------------------------------------

_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 30),
    st.floats(allow_nan=False, allow_infinity=False, width=16),
    st.text(max_size=4),
    st.sampled_from([[], {}, ["a"], "user", "/v1/completions", MODEL]),
)
_keys = st.sampled_from(
    [
        ("custom_id",),
        ("method",),
        ("url",),
        ("body",),
        ("note",),
        ("body", "model"),
        ("body", "messages"),
        ("body", "stream"),
        ("body", "max_tokens"),
        ("body", "temperature"),
        ("body", "stop"),
        ("body", "n"),
        ("body", "logprobs"),
        ("body", "top_logprobs"),
        ("body", "nonsense"),
        ("body", "messages", 0, "role"),
        ("body", "messages", 0, "content"),
    ]
)


@st.composite
def _lines(draw: st.DrawFn) -> bytes:
    """A line of a batch file with up to two things changed, or cut off."""
    made: Any = copy.deepcopy(line(draw(st.sampled_from(["a", "b", "c", "é"]))))
    for path in draw(st.lists(_keys, max_size=2)):
        place = made
        for key in path[:-1]:
            place = place[key] if isinstance(place, list) or (isinstance(place, dict) and key in place) else {}
            if isinstance(place, list) and not place:
                place = {}
        if isinstance(place, dict):
            place[path[-1]] = draw(_values)
    raw = json.dumps(made, ensure_ascii=draw(st.booleans())).encode(errors="surrogatepass")
    return raw[: draw(st.integers(0, len(raw)))] if draw(st.integers(0, 9)) == 0 else raw


@hypothesis_settings(max_examples=150)
@given(st.lists(_lines(), min_size=1, max_size=8))
def test_checking_says_what_reading_says_and_what_the_protocol_says(lines: list[bytes]) -> None:
    """The validator's quick pass must let through and refuse the very lines that become rows or refusals."""
    options = InputOptions(model=MODEL, endpoint=Endpoint.CHAT, only_batch_lines=True)
    content = b"\n".join(lines) + b"\n"
    try:
        checked = list(InputReader(source_of(content), options).check())
    except Exception as error:
        with pytest.raises(type(error)):
            list(InputReader(source_of(content), options))
        return
    read = list(InputReader(source_of(content), options))
    assert [each[0] for each in checked] == [each.line for each in read]
    for (_, custom_id, error), item in zip(checked, read, strict=True):
        assert custom_id == item.custom_id
        if isinstance(item, InputLine):
            assert error is None
            spoken = json.loads(lines[item.line - 1])
            assert parse_body(Endpoint.CHAT, json.dumps(spoken["body"])).to_json() == item.body
        else:
            assert error is not None
            assert (error.code, error.param) == (item.error_code, item.param)
            if not is_format_error(error):
                spoken = json.loads(lines[item.line - 1])
                with pytest.raises(InvalidRequest) as caught:
                    parse_body(Endpoint.CHAT, json.dumps(spoken["body"]))
                assert caught.value.code == error.code


def test_looking_for_the_model_passes_over_what_has_none() -> None:
    lines = [b"{", b"", [1], line("a", body=None), line("b")]
    assert first_model(source_of(lines), 10) == (MODEL, 5)
    assert first_model(source_of(lines), 4) is None
    assert first_model(source_of([b"{"]), 10) is None


def test_checking_stops_when_it_is_told_to() -> None:
    options = InputOptions(model=MODEL, endpoint=Endpoint.CHAT, only_batch_lines=True)
    reader = InputReader(source_of([line(str(number)) for number in range(1000)]), options)
    findings = check_lines(reader, MODEL, max_lines=10_000, fails_lines=False, keep_on=lambda: False)
    assert findings.lines < 1000
