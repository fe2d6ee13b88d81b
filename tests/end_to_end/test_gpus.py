"""One worker for each GPU: real workers on pretended devices, with an engine that needs none.

What is tried here is everything around CUDA: who is pinned to what, how workers share a queue, and that a GPU that is
lost takes down its own worker alone.
"""

from __future__ import annotations

import os
import signal
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from storage import queries
from storage.models import WorkerStatus
from storage.queries import WorkerRow
from tests.end_to_end.conftest import START_S, Home, wait_for
from tests.end_to_end.test_run import read_lines
from tests.end_to_end.test_up import close, submit, wait_for_status
from tests.workers.nvml import Machine, gpu


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Three GPUs, of which a scheduler has left us two."""
    found = Machine(tmp_path / "nvml.json", [gpu(0), gpu(1), gpu(2)])
    found.write()
    return found


@pytest.fixture
def mill(stories_artifact: Path, machine: Machine, tmp_path: Path) -> Iterator[Home]:
    home = Home(tmp_path / "home", stories_artifact, tmp_path)
    home.environment |= machine.environment()
    home.environment |= {
        "CUDA_VISIBLE_DEVICES": f"{machine.devices[0]['uuid']},{machine.devices[2]['uuid']}",
        "PROMPTMILL_ENGINE_FLAVOUR": "null",
        "PROMPTMILL_ENGINE_NULL_TOKEN_S": "0.02",
        "PROMPTMILL_ENGINE_MAX_BATCH_SIZE": "8",
        "PROMPTMILL_QUEUE_CHUNK_SIZE": "4",
    }
    yield home
    close(home)


def workers(home: Home) -> list[WorkerRow]:
    """Every worker there ever was, by name."""
    with home.database() as database, database.read() as connection:
        return queries.list_workers(connection, since=0.0)


def ready(home: Home) -> dict[str, WorkerRow]:
    """Place -> the worker that is at work there."""
    return {str(row.device): row for row in workers(home) if row.status is WorkerStatus.READY}


def wait_for_both(home: Home) -> dict[str, WorkerRow]:
    def are_ready() -> bool:
        try:
            return set(ready(home)) == {"gpu0", "gpu2"}
        except Exception:  # the schema is still being made
            return False

    wait_for(are_ready, "a worker on each GPU")
    return ready(home)


def answered_by(home: Home, batch: str) -> Counter[str]:
    """Place -> how many requests of a batch were answered there."""
    statement = """SELECT workers.device, count(*) FROM attempts
        JOIN requests ON requests.id = attempts.request_id JOIN batches ON batches.id = requests.batch_id
        JOIN workers ON workers.name = attempts.worker
        WHERE batches.public_id = ? AND attempts.outcome = 'completed' GROUP BY workers.device"""
    with closing(sqlite3.connect(home.path / "promptmill.db")) as connection:
        return Counter(dict(connection.execute(statement, [batch])))


@pytest.mark.timeout(900)  # many processes, each waited for
def test_each_gpu_has_a_worker_and_a_lost_one_takes_down_its_own_alone(mill: Home, machine: Machine) -> None:
    up = mill.start("up", "--model", mill.artifact, "--gpus", "all")
    at = wait_for_both(mill)

    for place, number in (("gpu0", 0), ("gpu2", 2)):
        row, uuid = at[place], machine.devices[number]["uuid"]
        assert row.name.startswith(f"{place}@{row.host}-")
        assert psutil.Process(row.pid).environ()["CUDA_VISIBLE_DEVICES"] == uuid
        wait_for(lambda name=row.name: detail_of(mill, name) is not None, "a reading")  # type: ignore[misc]
        detail = detail_of(mill, row.name)
        assert detail is not None
        assert (detail["uuid"], detail["ailment"], detail["power_w"]) == (uuid, None, 300.0)

    # Both take from the one queue, though one of them dies in the midst of it.
    batch = submit(mill, "shared", 100, 16)
    wait_for(lambda: set(answered_by(mill, batch)) == {"gpu0", "gpu2"}, "answers of both")
    os.kill(at["gpu0"].pid, signal.SIGKILL)
    wait_for(lambda: ready(mill).get("gpu0", at["gpu0"]).pid != at["gpu0"].pid, "another worker on gpu0")
    assert set(ready(mill)) == {"gpu0", "gpu2"}
    wait_for_status(mill, batch, "completed")
    assert_answered_once(mill, batch, 100)

    # A GPU falls off the bus while its worker has work in hand.
    batch = submit(mill, "lost", 100, 16)
    wait_for(lambda: answered_by(mill, batch)["gpu2"] > 0, "an answer of gpu2")
    machine.devices[2] |= {"xids": [79], "is_lost": True}
    machine.write()
    wait_for_status(mill, batch, "completed")
    assert_answered_once(mill, batch, 100)
    wait_for(lambda: end_of(mill, at["gpu2"].name).exit_code is not None, "the end of gpu2's worker")
    gone = end_of(mill, at["gpu2"].name)
    assert (gone.status, gone.exit_code) == (WorkerStatus.FAILED, 69)
    assert gone.detail is not None and "fallen off the bus" in gone.detail
    assert set(ready(mill)) == {"gpu0"}, "it is not started again at once, and its neighbour works on"

    up.terminate()
    _, notes = up.communicate(timeout=START_S)
    assert up.returncode == 0, notes
    assert "the worker of gpu2 died (exit code 69, its GPU is lost or sick) and is started again in 30 s" in notes


def detail_of(home: Home, name: str) -> dict[str, object] | None:
    return end_of(home, name).device_detail


def end_of(home: Home, name: str) -> WorkerRow:
    return next(row for row in workers(home) if row.name == name)


def assert_answered_once(home: Home, batch: str, count: int) -> None:
    out = home.work / f"{batch}.jsonl"
    assert home.run("results", batch, "-o", out).returncode == 0
    lines = read_lines(out)
    assert len(lines) == len({line["custom_id"] for line in lines}) == count
    assert all(line["response"]["status_code"] == 200 for line in lines)


def test_gpus_that_are_not_there_or_cannot_be_used_are_refused(mill: Home, machine: Machine) -> None:
    """Before anything is started, and with what there is."""
    hidden = mill.run("up", "--model", mill.artifact, "--gpus", "1")
    assert hidden.returncode == 2
    assert "GPU '1' is not among those visible here: gpu0 (GPU-00000000" in hidden.stderr
    both = mill.run("up", "--model", mill.artifact, "--gpus", "0", "--workers", "2")
    assert both.returncode == 2
    assert "leave one of them out" in both.stderr
    mill.environment["PROMPTMILL_ENGINE_FLAVOUR"] = "auto"
    machine.more |= {"driver": "535.183.01", "cuda": 12020}
    machine.write()
    old = mill.run("up", "--model", mill.artifact, "--gpus", "0")
    assert old.returncode == 2
    assert "CUDA is asked for, and driver 535.183.01 serves CUDA 12.2 and 13.0 is needed" in old.stderr
    doctor = mill.run("doctor", "--model", mill.artifact)
    assert "there is a GPU, but driver 535.183.01 serves CUDA 12.2" in doctor.stdout
    assert "-> install driver 580 or newer" in doctor.stdout
