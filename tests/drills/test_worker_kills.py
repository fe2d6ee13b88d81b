"""SIGKILL of workers that have their hands full, at random times."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tests.drills.conftest import MakeMill, Record, scaled
from tests.drills.mill import Mill
from tests.shared_data import stories_folder
from workers.models.convert import convert

SOON = {"kind": "restarts_soon", "roles": ["up"], "longest_s": 0.5}


def kill_busy_workers(mill: Mill, times: int, *, batch_of: int = 2000) -> None:
    """Each at a random moment; whoever looks after the workers starts others."""
    for _ in range(times):
        mill.keep_busy(batch_of)
        pid = mill.pick_busy_worker(batch_of=batch_of)
        with contextlib.suppress(ProcessLookupError):
            mill.inject(lambda pid=pid: os.kill(pid, signal.SIGKILL))


@pytest.mark.drill
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_workers_killed_under_a_supervisor(make_mill: MakeMill, record: Record, database: str) -> None:
    mill = make_mill(database, "embedded", faults=[SOON], seed=1)
    mill.up(workers=3)
    kill_busy_workers(mill, scaled(65))
    mill.wait_until_done()
    assert mill.events()["worker_died"]
    record(mill, "SIGKILL of a worker, its supervisor sees it")


@pytest.mark.drill
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_workers_killed_where_nobody_sees_it(make_mill: MakeMill, record: Record, database: str) -> None:
    """Only their leases, of three seconds here, tell."""
    mill = make_mill(database, "log", settings={"WORKER_LEASE_S": "3"}, seed=2)
    mill.start("tick")
    workers = [mill.worker() for _ in range(3)]
    for _ in range(scaled(35)):
        mill.keep_busy()
        victim = mill.pick_busy_worker()
        (killed,) = [worker for worker in workers if worker.pid == victim]
        mill.inject(killed.kill)
        workers = [worker for worker in workers if worker is not killed] + [mill.worker()]
    mill.wait_until_done()
    assert mill.events()["leases_expired"]
    record(mill, "SIGKILL of a worker, only its leases tell")


@pytest.mark.drill
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_workers_halted_for_ever_under_a_supervisor(make_mill: MakeMill, record: Record, database: str) -> None:
    """At any moment, in the midst of a write too: the supervisor kills them once their leases are over."""
    settings = {"WORKER_LEASE_S": "3"}
    mill = make_mill(database, "embedded", settings=settings, faults=[SOON], seed=6)
    mill.up(workers=3)
    for _ in range(scaled(12)):
        mill.keep_busy(2000)
        pid = mill.pick_busy_worker()
        mill.inject(lambda pid=pid: os.kill(pid, signal.SIGSTOP))
        mill.wait(lambda pid=pid: not psutil.pid_exists(pid), "the end of the halted worker")
    mill.wait_until_done()
    assert mill.events()["worker_halted"]
    record(mill, "SIGSTOP of a worker for ever, its supervisor sees it")


@pytest.fixture
def short_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of the drill, which submits by itself, have a common beginning when they are of one chapter."""
    monkeypatch.setattr("jobs.prefixes.MIN_CHARACTERS", len("What comes after chapter 000"))


def submit_chapters(mill: Mill, chapters: int, each: int = 40) -> None:
    mill.submit(chapters * each, ends={place: f"chapter {place // each:03}\n" for place in range(chapters * each)})


# Small chunks: so that several wait for each worker.
CHAPTER_SETTINGS = {"QUEUE_CHUNK_SIZE": "8"}


def harm_workers_with_chapters(mill: Mill, signals: Sequence[signal.Signals], chapters: int) -> None:
    """Each signal goes to a busy worker while chunks wait in some worker's own queue."""

    def has_waiting() -> bool:
        if mill.scalar("SELECT COUNT(*) FROM requests WHERE status IN ('pending', 'queued')") < 400:
            submit_chapters(mill, chapters)  # while one worker is alone, all goes to the shared queue
        return any(mill.own_queues().values())

    for signum in signals:
        mill.wait(has_waiting, "chunks in a worker's own queue")
        pid = mill.pick_busy_worker(within_s=0.5, batch_of=0)
        with contextlib.suppress(ProcessLookupError):
            mill.inject(lambda pid=pid, signum=signum: os.kill(pid, signum))


@pytest.mark.drill
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("short_prefixes")
@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_workers_killed_that_chunks_wait_for(make_mill: MakeMill, record: Record, database: str) -> None:
    """What lies in a worker's own queue is run by its neighbour, by its successor, or is sent anew."""
    mill = make_mill(database, "embedded", settings=CHAPTER_SETTINGS, faults=[SOON], seed=4)
    mill.up(workers=2)
    signals = [signal.SIGTERM if number % 3 == 2 else signal.SIGKILL for number in range(scaled(30))]
    harm_workers_with_chapters(mill, signals, chapters=40)
    mill.wait_until_done()
    assert not any(mill.own_queues().values())
    record(mill, "SIGKILL, SIGTERM of a worker with a queue of its own")


@pytest.mark.drill
@pytest.mark.timeout(1200)
def test_workers_killed_while_a_real_engine_runs(make_mill: MakeMill, record: Record, tmp_path: Path) -> None:
    """A trained model of 260 thousand parameters; each answer is compared with that of a run without faults."""
    artifact = convert(str(stories_folder()), tmp_path / "stories", dtype="float32", cache=tmp_path).path
    settings = {"ENGINE_FLAVOUR": "cpu", "ENGINE_CONTEXT_LENGTH": "256", "ENGINE_MAX_BATCH_SIZE": "32"}
    mill = make_mill("sqlite", "embedded", artifact=artifact, settings=settings, faults=[SOON], seed=3)
    lines = [
        {"custom_id": f"s{n}", "prompt": f"Once upon a time number {n}", "max_tokens": 40, "temperature": 0}
        for n in range(1500)
    ]
    path = tmp_path / "stories.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    mill.up()
    asked = ("submit", path, "--model", artifact, "--endpoint", "/v1/completions")
    assert mill.run(*asked, "--name", "calm")[0] == 0
    mill.wait_until_done()
    mill.expected = texts(mill, "calm")
    assert mill.run(*asked, "--name", "harmed")[0] == 0
    for _ in range(scaled(6)):
        pid = mill.pick_busy_worker(within_s=1.0, batch_of=0)
        mill.inject(lambda pid=pid: os.kill(pid, signal.SIGKILL))
    mill.wait_until_done()
    record(mill, "SIGKILL of a worker, real engine")
    assert len(mill.expected) == len(texts(mill, "harmed")) == len(lines)


def texts(mill: Mill, job: str) -> dict[str, str]:
    """custom_id -> the answer's text."""
    rows = mill.rows(
        "SELECT custom_id, response FROM results JOIN requests ON requests.id = request_id "
        "JOIN batches ON batches.id = requests.batch_id WHERE batches.name = :name",
        name=job,
    )
    return {row.custom_id: json.loads(row.response)["choices"][0]["text"] for row in rows}
