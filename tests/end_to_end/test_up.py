"""`promptmill up` and the commands around it as a user runs them: one supervisor, one tiny model, many commands."""

from __future__ import annotations

import csv
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from jobs import steering
from storage import queries
from storage.models import WorkerStatus
from tests.end_to_end.conftest import Home, wait_for
from tests.end_to_end.test_run import answers, assert_everything_once, read_lines, story_lines


def start_up(home: Home, *options: str) -> object:
    process = home.start("up", "--model", home.artifact, *options)
    wait_for(lambda: process.poll() is not None or bool(ready_workers(home)), "a ready worker")
    assert process.poll() is None, process.communicate()
    return process


def ready_workers(home: Home) -> list[str]:
    if not (home.path / "promptmill.db").exists():
        return []
    try:
        with home.database() as database, database.read() as connection:
            return [row.name for row in queries.live_workers(connection, database.now())]
    except Exception:  # the schema is still being made
        return []


def close(home: Home) -> None:
    for process in home.processes:
        if process.poll() is None:
            process.kill()
        process.communicate()
    for leftover in home.descendants():
        leftover.kill()
    for pid in home.queue_server_pids():
        psutil.Process(pid).kill()


@pytest.fixture(scope="module")
def up(stories_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """A home where `promptmill up` serves the story teller."""
    folder = tmp_path_factory.mktemp("up")
    home = Home(folder / "home", stories_artifact, folder)
    start_up(home)
    yield home
    close(home)


def submit(home: Home, name: str, count: int, max_tokens: int = 20, *options: str) -> str:
    """Submit stories; the batch's id, which is all that standard output has."""
    path = home.write_lines(
        f"{name}.jsonl",
        [
            {**line, "custom_id": f"{name}-{n}"}
            for n, line in enumerate(
                dict(each)
                for each in story_lines(count, max_tokens)  # type: ignore[call-overload]
            )
        ],
    )
    done = home.run("submit", path, "--model", "stories", "--name", name, *options)
    assert done.returncode == 0, done.stderr
    (batch,) = done.stdout.splitlines()
    return batch


def shown(home: Home, batch: str) -> dict:
    done = home.run("show", batch, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def answered(home: Home, batch: str) -> int:
    """How many requests have an answer. Asked of the database: a command each time would take the workers' cores."""
    with home.database() as database:
        return steering.find_batch(database, batch).completed_requests


def wait_for_status(home: Home, batch: str, *statuses: str) -> dict:
    def has_it() -> bool:
        with home.database() as database:
            return steering.find_batch(database, batch).status.value in statuses

    wait_for(has_it, f"status {' or '.join(statuses)}")
    return shown(home, batch)


def test_a_job_is_submitted_watched_and_its_results_are_read(up: Home) -> None:
    """The everyday way, each command by itself."""
    batch = submit(up, "plain", 20)
    watched = up.run("watch", batch[:20])
    assert watched.returncode == 0, watched.stderr
    assert "20 answered" in watched.stderr
    written = up.run("results", batch, "-o", up.work / "plain.out.jsonl")
    assert written.returncode == 0, written.stderr
    got = answers(up.work / "plain.out.jsonl")
    assert list(got) == [f"plain-{n}" for n in range(20)]
    followed = up.run("results", batch, "--follow")
    assert {json.loads(line)["custom_id"] for line in followed.stdout.splitlines()} == set(got)
    shown_full = up.run("show", batch, "--full")
    assert "20 answered" in shown_full.stdout
    listed = up.run("list", "--json", "--status", "completed")
    assert batch in [json.loads(line)["id"] for line in listed.stdout.splitlines()]
    again = submit(up, "plain", 20)
    assert again == batch


def test_followed_results_come_as_they_land_and_go_on_from_a_cursor(up: Home) -> None:
    batch = submit(up, "followed", 30, 60)
    followed = up.run("results", batch, "--follow")
    assert followed.returncode == 0, followed.stderr
    names = [json.loads(line)["custom_id"] for line in followed.stdout.splitlines()]
    assert sorted(names) == sorted(f"followed-{n}" for n in range(30))
    with up.database() as database, database.read() as connection:
        found = queries.find_batch(connection, batch)
        assert found is not None
        tenth = queries.results_after(connection, found.id, 0)[9].result_id
    rest = up.run("results", batch, "--follow", "--after", str(tenth))
    assert [json.loads(line)["custom_id"] for line in rest.stdout.splitlines()] == names[10:]


def test_a_job_that_is_submitted_paused_begins_when_it_is_resumed(up: Home) -> None:
    batch = submit(up, "waiting", 5, 20, "--paused")
    assert shown(up, batch)["is_paused"]
    assert answered(up, batch) == 0
    assert up.run("resume", batch).returncode == 0
    assert wait_for_status(up, batch, "completed")["requests"]["completed"] == 5


def test_a_running_job_is_paused_resumed_made_urgent_and_cancelled(up: Home) -> None:
    lines = 5000  # more than any machine answers while these commands start up
    batch = submit(up, "steered", lines, 100)
    assert up.run("pause", batch).returncode == 0
    assert shown(up, batch)["is_paused"]

    def rests() -> bool:
        with up.database() as database, database.read() as connection:
            found = queries.find_batch(connection, batch)
            assert found is not None
            return not any(
                queries.count_requests(connection, found.id).get(status, 0)
                for status in queries.count_requests(connection, found.id)
                if status.value in ("running", "queued")
            )

    wait_for(rests, "rest after the pause")
    at_rest = shown(up, batch)["requests"]["completed"]
    time.sleep(1.0)
    assert shown(up, batch)["requests"]["completed"] == at_rest < lines
    assert up.run("resume", batch).returncode == 0
    done = up.run("set", batch, "--priority", "7", "--deadline", "2h")
    assert "priority 7" in done.stderr
    wait_for(lambda: answered(up, batch) > at_rest, "progress after the resume")
    assert up.run("cancel", batch).returncode == 0
    ended = wait_for_status(up, batch, "cancelled")
    assert ended["priority"] == 7
    assert 0 < ended["requests"]["completed"] < lines
    assert up.run("watch", batch).returncode == 1
    results = [json.loads(line) for line in up.run("results", batch).stdout.splitlines()]
    assert len(results) == lines
    assert {line["error"]["code"] for line in results if line["response"] is None} == {"batch_cancelled"}
    refused = up.run("pause", batch)
    assert refused.returncode == 2
    assert refused.stderr.strip().splitlines() == [f"error: {batch} is cancelled: it cannot be paused"]


def test_what_did_not_run_can_be_retried(up: Home) -> None:
    """The worker is frozen meanwhile, so that all of the batch still waits when it is cancelled."""
    (worker,) = up.worker_pids()
    os.kill(worker, signal.SIGSTOP)
    try:
        batch = submit(up, "retried", 50, 20)
        assert up.run("cancel", batch).returncode == 0
        assert shown(up, batch)["status"] == "cancelled"
    finally:
        os.kill(worker, signal.SIGCONT)
    retried = up.run("retry", batch, "--failed")
    assert "50 lines run again" in retried.stderr
    watched = up.run("watch", batch)
    assert watched.returncode == 0, watched.stderr
    assert shown(up, batch)["requests"] == {"total": 50, "completed": 50, "failed": 0}


def test_a_request_is_audited_and_replayed(up: Home) -> None:
    """By the id that its result line shows, and by its own; the answer is the same again."""
    batch = submit(up, "audited", 3, 30)
    up.run("watch", batch)
    line = json.loads(up.run("results", batch).stdout.splitlines()[1])
    for named in (line["id"], f"{batch}:audited-1", "last:audited-1"):
        found = up.run("audit", named, "--json", "--text")
        assert found.returncode == 0, found.stderr
        record = json.loads(found.stdout)
        assert (record["id"], record["custom_id"], record["batch"]) == (line["id"], "audited-1", batch)
    (attempt,) = record["attempts"]
    assert attempt["outcome"] == "completed"
    assert attempt["finish_reason"] == "length"
    assert attempt["completion_tokens"] == 30
    assert attempt["parameters"]["temperature"] == 0
    assert attempt["worker"] in ready_workers(up)
    assert {mate["custom_id"] for mate in attempt["ran_beside"]} <= {"audited-0", "audited-2"}
    assert record["response"] == line["response"]["body"]
    assert "ran beside" in up.run("audit", line["id"]).stdout or not attempt["ran_beside"]
    replayed = up.run("audit", line["id"], "--replay")
    assert replayed.returncode == 0, replayed.stderr
    assert "the same answer" in replayed.stderr
    told = json.loads(up.run("audit", line["id"], "--replay", "--json").stdout)
    assert told["is_same"]
    assert told["is_same_artifact"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["show", "batch_0000"], "there is no batch batch_0000"),
        (["watch", "nothing"], "there is no batch nothing"),
        (["audit", "batch_req_ffffff"], "there is no request batch_req_ffffff"),
        (["audit", "batch_req_zzz"], "there is no request batch_req_zzz"),
        (["audit", "word"], "BATCH:custom_id"),
        (["set", "last"], "nothing to set"),
        (["set", "last", "--deadline", "soon"], "--deadline 'soon' is no time"),
        (["purge", "--older-than", "ages", "--yes"], "is not a length of time"),
        (["submit", "IN", "--model", "gpt-4"], "gpt-4 is not an artifact"),
        (["export", "last", "-o", "no/such/folder/x.csv"], "cannot be written"),
    ],
)
def test_what_is_not_there_is_said_in_one_line(up: Home, arguments: list[str], said: str) -> None:
    submit(up, "one", 1, 2)
    path = str(up.write_lines("in.jsonl", story_lines(1)))
    done = up.run(*[path if argument == "IN" else argument for argument in arguments])
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stderr.startswith("error: ")
    assert said in done.stderr


def test_answers_are_exported_beside_their_inputs_columns(up: Home) -> None:
    table = up.work / "people.csv"
    table.write_text('id,name,status\n7,Tom,new\n9,"Lily, the\nsecond",old\n')
    (up.work / "p.j2").write_text("Once {{ name }}")
    done = up.run(
        "submit", table, "--model", "stories", "--template", up.work / "p.j2", "--max-tokens", "9",
        "--temperature", "0", "--watch", "--endpoint", "/v1/completions",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    batch = done.stdout.strip()
    assert up.run("export", batch, "-o", up.work / "out.csv", "--input", table).returncode == 0
    with (up.work / "out.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["id"], row["name"], row["input.status"]) for row in rows] == [
        ("7", "Tom", "new"),
        ("9", "Lily, the\nsecond", "old"),
    ]
    assert [row["status"] for row in rows] == ["completed", "completed"]
    assert [row["completion_tokens"] for row in rows] == ["9", "9"]
    assert all(row["answer"] for row in rows)
    assert up.run("export", batch, "-o", up.work / "out.jsonl", "--input", table).returncode == 0
    assert [line["answer"] for line in read_lines(up.work / "out.jsonl")] == [row["answer"] for row in rows]
    parquet = pytest.importorskip("pyarrow.parquet")
    assert up.run("export", batch, "-o", up.work / "out.parquet", "--input", table).returncode == 0
    written = parquet.read_table(up.work / "out.parquet").to_pylist()
    assert [(row["id"], row["answer"], row["completion_tokens"]) for row in written] == [
        (row["id"], row["answer"], 9) for row in rows
    ]
    other = up.work / "other.csv"
    other.write_text("id,name\n7,Tom\n8,Ben\n10,Sue\n")
    refused = up.run("export", batch, "-o", up.work / "wrong.csv", "--input", other)
    assert refused.returncode == 2
    assert "not that of this batch" in refused.stderr
    assert not (up.work / "wrong.csv").exists()


def test_a_run_uses_the_workers_that_are_there(up: Home) -> None:
    before = up.worker_pids()
    process = up.start_job(up.write_lines("run.jsonl", story_lines(40, 50)))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert len(answers(up.work / "run.jsonl.results.jsonl")) == 40
    assert up.worker_pids() == before


def test_a_second_supervisor_is_refused(up: Home) -> None:
    done = up.run("up", "--model", up.artifact)
    assert done.returncode == 2
    assert "promptmill up already runs on" in done.stderr.splitlines()[-1]


def test_purged_texts_are_gone_and_the_numbers_stay(up: Home) -> None:
    batch = submit(up, "purged", 2, 5)
    up.run("watch", batch)
    request = json.loads(up.run("results", batch).stdout.splitlines()[0])["id"]
    done = up.run("purge", "--older-than", "0s", "--yes")
    assert done.returncode == 0, done.stderr
    record = json.loads(up.run("audit", request, "--json", "--text").stdout)
    assert (record["body"], record["response"]) == (None, None)
    assert record["attempts"][0]["completion_tokens"] == 5
    refused = up.run("audit", request, "--replay")
    assert refused.returncode == 2
    assert "purged" in refused.stderr


def test_a_killed_worker_is_replaced_and_its_exit_recorded(up: Home) -> None:
    batch = submit(up, "killed", 300, 60)
    wait_for(lambda: answered(up, batch) > 20, "some answers")
    (pid,) = up.worker_pids()
    (name,) = ready_workers(up)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: up.worker_pids() not in ([], [pid]), "another worker")
    ended = wait_for_status(up, batch, "completed")
    assert ended["requests"] == {"total": 300, "completed": 300, "failed": 0}
    with up.database() as database, database.read() as connection:
        dead = queries.find_worker(connection, name)
        assert dead is not None
        assert dead.status is WorkerStatus.FAILED
        assert dead.exit_code == -signal.SIGKILL
        assert dead.stopped_at is not None


def test_a_replay_brings_its_own_worker_where_none_is(home: Home) -> None:
    assert home.run_job(home.write_lines("in.jsonl", story_lines(1, 20))).returncode == 0
    refused = home.run("audit", "last:story-0", "--replay")
    assert refused.returncode == 2
    assert "nobody serves stories" in refused.stderr
    done = home.run("audit", "last:story-0", "--replay", "--model", home.artifact)
    assert done.returncode == 0, done.stderr
    assert "the same answer" in done.stderr
    assert home.descendants() == []


def test_told_to_stop_twice_it_hands_back_at_once_and_the_next_one_goes_on(home: Home) -> None:
    process = start_up(home)
    batch = submit(home, "handed", 400, 100)
    wait_for(lambda: answered(home, batch) > 20, "some answers")
    process.send_signal(signal.SIGTERM)  # type: ignore[attr-defined]
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)  # type: ignore[attr-defined]
    began = time.monotonic()
    _, err = process.communicate(timeout=90)  # type: ignore[attr-defined]
    assert process.returncode == 0, err  # type: ignore[attr-defined]
    assert time.monotonic() - began < 20.0, "the grace of 30 s was not cut short"
    assert "handing back" in err
    assert home.descendants() == []
    assert home.queue_server_pids() == []
    with home.database() as database, database.read() as connection:
        found = queries.find_batch(connection, batch)
        assert found is not None
        assert "running" not in [status.value for status in queries.count_requests(connection, found.id)]
    start_up(home)
    assert home.run("watch", batch).returncode == 0
    assert_everything_once(home, 400)
