"""`promptmill run` as a user runs it: real processes, a real queue server, a real model, real signals."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from storage import queries
from tests.end_to_end.conftest import Home, wait_for
from tests.shared_data import stories_folder

GREEDY = {"temperature": 0}


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def answers(path: Path) -> dict[str, str]:
    return {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in read_lines(path)}


def story_lines(count: int, max_tokens: int = 100) -> list[object]:
    names = ("Tom", "Lily", "Ben", "Sue", "a dog", "a cat", "a bird")
    return [
        {
            "custom_id": f"story-{n}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {
                "model": "stories",
                "prompt": f"Once {names[n % 7]} number {n}",
                "max_tokens": max_tokens,
                **GREEDY,
            },
        }
        for n in range(count)
    ]


def assert_everything_once(home: Home, total: int) -> None:
    """Each line of the only batch has one result, and no finished line was computed twice."""
    with home.database() as database, database.read() as connection:
        (batch,) = queries.list_batches(connection)
        assert batch.completed_requests == batch.total_requests == total
        finished = connection.exec_driver_sql(
            "SELECT request_id, COUNT(*) FROM attempts WHERE outcome = 'completed' GROUP BY request_id"
        ).all()
        results = connection.exec_driver_sql("SELECT COUNT(*), COUNT(DISTINCT request_id) FROM results").one()
    assert len(finished) == total
    assert all(count == 1 for _, count in finished)
    assert tuple(results) == (total, total)


def test_the_reference_stories_come_back_word_for_word(home: Home) -> None:
    """The whole path, text in and text out, reproduces what the reference implementation wrote."""
    known = [json.loads(line) for line in (stories_folder() / "greedy.jsonl").read_text().splitlines()]
    lines = [
        {"custom_id": f"g{n}", "prompt": each["prompt"], "max_tokens": len(each["completion_token_ids"]), **GREEDY}
        for n, each in enumerate(known)
    ]
    path = home.write_lines("known.jsonl", lines)
    done = home.run_job(path, "--endpoint", "/v1/completions")
    assert done.returncode == 0, done.stderr
    # A completion goes on from its prompt, so it keeps the space it begins with; the reference left that out.
    got = {name: text.removeprefix(" ") for name, text in answers(home.work / "known.jsonl.results.jsonl").items()}
    assert got == {f"g{n}": each["completion"] for n, each in enumerate(known)}
    assert "12 answered" in done.stderr
    assert "latency, first token" in done.stderr
    logged = [line["event"] for line in read_lines(home.path / "logs" / "worker.log")]
    assert "worker_ready" in logged
    assert logged.count("attempt_completed") == 12
    assert not (home.work / "known.jsonl.results.errors.jsonl").exists()
    assert home.descendants() == []
    assert home.queue_server_pids() == []


def test_bad_lines_fail_alone_each_with_its_reason(home: Home) -> None:
    good = story_lines(3, 10)
    lines = [
        good[0],
        "{broken",
        {**good[1], "body": {**good[1]["body"], "temperature": 7}},
        {**good[1], "body": {**good[1]["body"], "model": "gpt-4o"}},
        good[0],
        "",
        {**good[1], "custom_id": "long", "body": {**good[1]["body"], "prompt": "word " * 900}},
        {**good[1], "custom_id": "greedy for more", "body": {**good[1]["body"], "max_tokens": 100_000}},
        {**good[1], "custom_id": "typo", "body": {**good[1]["body"], "max_token": 5}},
        good[2],
    ]
    done = home.run_job(home.write_lines("mixed.jsonl", lines), "-o", home.work / "out.jsonl")
    assert done.returncode == 1, done.stderr
    assert set(answers(home.work / "out.jsonl")) == {"story-0", "story-2"}
    failures = read_lines(home.work / "out.errors.jsonl")
    codes = [line["response"]["body"]["error"]["code"] for line in failures]
    assert codes == [
        "invalid_json_line",
        "decimal_above_max_value",
        "model_not_found",
        "duplicate_custom_id",
        "context_length_exceeded",
        "max_tokens_exceeds_context",
        "unknown_parameter",
    ]
    messages = [line["response"]["body"]["error"]["message"] for line in failures]
    assert "max_tokens 100000" in messages[5]
    assert "did you mean max_tokens?" in messages[6]
    assert "7 " in done.stderr or "failed" in done.stderr


def test_standard_input_to_standard_output(home: Home) -> None:
    text = "".join(json.dumps(line) + "\n" for line in story_lines(4, 5))
    done = home.run("run", "-", "--model", home.artifact, stdin=text)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["custom_id"] for line in done.stdout.splitlines()] == [f"story-{n}" for n in range(4)]


def test_the_same_command_again_computes_nothing(home: Home) -> None:
    path = home.write_lines("in.jsonl", story_lines(5, 5))
    first = home.run_job(path)
    before = (home.work / "in.jsonl.results.jsonl").read_text()
    again = home.run_job(path)
    assert (first.returncode, again.returncode) == (0, 0)
    assert "nothing was computed again" in again.stderr
    assert (home.work / "in.jsonl.results.jsonl").read_text() == before
    assert_everything_once(home, 5)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_stops_cleanly_and_goes_on_where_it_stood(home: Home, signum: signal.Signals) -> None:
    path = home.write_lines("in.jsonl", story_lines(600))
    process = home.start_job(path)
    home.wait_for_results(60)
    process.send_signal(signum)
    _, err = process.communicate(timeout=90)
    assert process.returncode == 130, err
    assert "run the same command again" in err
    assert home.descendants() == []
    assert home.queue_server_pids() == []
    partial = answers(home.work / "in.jsonl.results.jsonl")
    assert 60 <= len(partial) < 600
    done = home.run_job(path)
    assert done.returncode == 0, done.stderr
    assert "nothing was computed" not in done.stderr
    complete = answers(home.work / "in.jsonl.results.jsonl")
    assert len(complete) == 600
    assert complete | partial == complete
    assert_everything_once(home, 600)


def test_a_job_that_is_cancelled_has_not_answered_all(home: Home) -> None:
    """The exit code says whether every line has its answer, not whether one failed."""
    process = home.start_job(home.write_lines("in.jsonl", story_lines(600)))
    home.wait_for_results(1)
    assert home.run("cancel", "last").returncode == 0
    _, err = process.communicate(timeout=90)
    assert process.returncode == 1, err


def test_a_killed_worker_is_replaced_and_nothing_is_lost_or_doubled(home: Home) -> None:
    path = home.write_lines("in.jsonl", story_lines(600))
    process = home.start_job(path)
    for results in (40, 200):
        home.wait_for_results(results)
        (pid,) = home.worker_pids()
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda pid=pid: home.worker_pids() not in ([], [pid]), "another worker")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "the worker died" in err
    assert_everything_once(home, 600)


def test_a_killed_queue_server_is_replaced_and_nothing_is_lost_or_doubled(home: Home) -> None:
    path = home.write_lines("in.jsonl", story_lines(600))
    process = home.start_job(path)
    home.wait_for_results(40)
    (pid,) = home.queue_server_pids()
    os.kill(pid, signal.SIGKILL)
    _, err = process.communicate(timeout=180)
    assert process.returncode == 0, err
    assert_everything_once(home, 600)


def test_killed_itself_it_leaves_nothing_behind_that_harms_the_next_run(home: Home) -> None:
    """SIGKILL of the command: its worker leaves by itself, its orphaned queue server is adopted and stopped later."""
    path = home.write_lines("in.jsonl", story_lines(600))
    process = home.start_job(path)
    home.wait_for_results(40)
    (worker,) = home.worker_pids()
    process.kill()
    process.communicate()
    wait_for(lambda: not psutil.pid_exists(worker), "the worker's end")
    done = home.run_job(path)
    assert done.returncode == 0, done.stderr
    assert_everything_once(home, 600)
    assert home.queue_server_pids() == []


def test_two_runs_share_one_home(home: Home) -> None:
    first = home.start_job(home.write_lines("a.jsonl", story_lines(100)))
    second = home.start_job(home.write_lines("b.jsonl", story_lines(101)))
    for process in (first, second):
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    assert len(answers(home.work / "a.jsonl.results.jsonl")) == 100
    assert len(answers(home.work / "b.jsonl.results.jsonl")) == 101
    assert home.queue_server_pids() == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "nowhere.jsonl", "--model", "ARTIFACT"], "nowhere.jsonl is not there"),
        (["run", "EMPTY", "--model", "ARTIFACT"], "empty"),
        (["run", "GOOD", "--model", "no-such-model"], "promptmill convert"),
        (["run", "GOOD", "--model", "ARTIFACT", "-o", "no/such/folder/out.jsonl"], "make the folder first"),
        (["run", "GOOD"], "promptmill convert demo"),
        (["run", "GOOD", "--model", "ARTIFACT", "--temperature", "9"], "temperature"),
    ],
)
def test_when_nothing_can_run_it_says_why_in_one_line(home: Home, arguments: list[str], said: str) -> None:
    stand_ins = {
        "ARTIFACT": str(home.artifact),
        "EMPTY": str(home.write_lines("empty.jsonl", [])),
        "GOOD": str(home.write_lines("good.jsonl", story_lines(1))),
    }
    done = home.run(*[stand_ins.get(argument, argument) for argument in arguments])
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.strip().splitlines()) == 1
    assert said in done.stderr


def test_doctor_names_what_there_is(home: Home) -> None:
    done = home.run("doctor", "--model", home.artifact)
    assert done.returncode == 0, done.stdout
    for subject in ("Python", "onnxruntime", "CPU provider", "queue", "database", "artifact"):
        assert subject in done.stdout
