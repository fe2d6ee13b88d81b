"""A worker on a real GPU, from `promptmill up --gpus 0` to answers in the database."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import psutil
import pytest

from storage import queries
from storage.models import WorkerStatus
from storage.queries import WorkerRow
from tests.end_to_end.conftest import Home, wait_for
from tests.end_to_end.test_run import answers
from tests.end_to_end.test_up import close, wait_for_status
from tests.shared_data import stories_folder
from workers.engine.flavour import cuda_trouble
from workers.models.artifact import Artifact
from workers.models.convert import convert
from workers.tokenizer import Tokenizer

pytestmark = pytest.mark.gpu

# Of the characters that the float32 reference answers, those that come before a first difference (float16 rounds near
# ties the other way now and then).
LEAST_SHARE = 0.8


@pytest.fixture(scope="module")
def half_artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    if reason := cuda_trouble():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("artifacts")
    return convert(str(stories_folder()), folder / "stories", dtype="float16", cache=folder / "cache")


@pytest.fixture
def mill(half_artifact: Artifact, tmp_path: Path) -> Iterator[Home]:
    home = Home(tmp_path / "home", half_artifact.path, tmp_path)
    home.environment["PROMPTMILL_ENGINE_KV_CACHE_MIB"] = "256"
    yield home
    close(home)


def the_worker(home: Home) -> WorkerRow | None:
    try:
        with home.database() as database, database.read() as connection:
            return next(iter(queries.live_workers(connection, database.now())), None)
    except Exception:  # the schema is still being made
        return None


def submit_cases(home: Home, name: str, cases: list[dict[str, object]], times: int) -> str:
    lines = [
        {
            "custom_id": f"{name}-{turn}-{number}",
            "prompt": case["prompt_token_ids"],
            "max_tokens": max(1, len(case["completion_token_ids"])),  # type: ignore[arg-type]
            "temperature": 0,
        }
        for turn in range(times)
        for number, case in enumerate(cases)
    ]
    path = home.write_lines(f"{name}.jsonl", list(lines))
    options = ("--endpoint", "/v1/completions", "--name", name, "--compute-all")
    done = home.run("submit", path, "--model", "stories", *options)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def texts(home: Home, batch: str) -> dict[str, str]:
    out = home.work / f"{batch}.out.jsonl"
    assert home.run("results", batch, "-o", out).returncode == 0
    return answers(out)


def test_a_worker_answers_on_the_gpu_as_the_reference_does(mill: Home, half_artifact: Artifact) -> None:
    """Pinned, named, watched by NVML; greedy stories against float32; killed and started again; drained."""
    cases = [json.loads(line) for line in (stories_folder() / "greedy.jsonl").read_text().splitlines()]
    up = mill.start("up", "--model", mill.artifact, "--gpus", "0")
    wait_for(lambda: up.poll() is not None or the_worker(mill) is not None, "the worker", 180)
    assert up.poll() is None, up.communicate()
    worker = the_worker(mill)
    assert worker is not None
    assert worker.name.startswith("gpu0@") and worker.device == "gpu0"
    wait_for(lambda: getattr(the_worker(mill), "device_detail", None) is not None, "a reading")
    worker = the_worker(mill)
    assert worker is not None and worker.device_detail is not None
    pinned = psutil.Process(worker.pid).environ()["CUDA_VISIBLE_DEVICES"]
    assert pinned == worker.device_detail["uuid"]
    assert worker.device_detail["ailment"] is None
    assert worker.device_detail["memory_used_bytes"] > 0
    print(f"gpu0: {worker.device_detail}")

    batch = submit_cases(mill, "first", cases, 10)
    wait_for_status(mill, batch, "completed")
    tokenizer = Tokenizer(half_artifact)
    same = total = 0
    for custom_id, text in texts(mill, batch).items():
        case = cases[int(custom_id.rpartition("-")[2])]
        wanted = tokenizer.decode_answer(case["completion_token_ids"])
        total += len(wanted)
        same += sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(text, wanted, strict=False)))
    print(f"{same} of {total} characters before a first difference")
    assert same >= LEAST_SHARE * total

    batch = submit_cases(mill, "second", cases, 40)
    first_pid = worker.pid
    os.kill(first_pid, signal.SIGKILL)
    wait_for_status(mill, batch, "completed")
    assert len(texts(mill, batch)) == 40 * len(cases)
    again = the_worker(mill)
    assert again is not None and again.pid != first_pid and again.device == "gpu0"

    up.terminate()
    _, said = up.communicate(timeout=120)
    assert up.returncode == 0, said
    with mill.database() as database, database.read() as connection:
        rows = queries.list_workers(connection, since=0.0)
    assert {row.status for row in rows if row.pid == again.pid} == {WorkerStatus.STOPPED}
