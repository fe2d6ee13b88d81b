"""Workers as child processes: restarts with growing pauses, deaths reported. A stand-in worker dies as told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs import worker_process
from jobs.gpus import Gpu, for_gpus
from jobs.settings import Settings
from jobs.up import share_cores
from jobs.worker_process import EXIT_GPU, Crew, WorkerFailed, explain_exit, restart_pause_s, serving_workers
from storage import transitions
from storage.database import Database
from storage.models import WorkerStatus
from storage.transitions import NewWorker
from tests.conftest import wait_until


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let workers run this Python code instead."""
    real = subprocess.Popen

    def use(code: str) -> None:
        def start(_command: list[str], **kwargs: object) -> subprocess.Popen[bytes]:
            return real([sys.executable, "-c", code], **kwargs)  # type: ignore[call-overload, no-any-return]

        monkeypatch.setattr(worker_process.subprocess, "Popen", start)

    return use


def crew_of(settings: Settings, database: Database, notes: list[str], *, gives_up: bool, count: int = 1) -> Crew:
    return Crew(settings, database, Path("artifact"), count, notes.append, gives_up=gives_up)


def test_one_that_cannot_start_is_not_started_for_ever(
    settings: Settings, sqlite_database: Database, stand_in: Callable[[str], None]
) -> None:
    """Its last words say why."""
    stand_in("import sys; sys.exit('error: the artifact is broken')")
    notes: list[str] = []
    crew = crew_of(settings, sqlite_database, notes, gives_up=False)
    with pytest.raises(WorkerFailed, match="the artifact is broken") as caught:
        wait_until(lambda: crew.look_after(), what="giving up")
    assert "exit code 1" in caught.value.message
    assert [note.rpartition(" in ")[2] for note in notes] == ["0.5 s", "1 s"]


def test_an_exit_code_that_says_so_ends_it_at_once(
    settings: Settings, sqlite_database: Database, stand_in: Callable[[str], None]
) -> None:
    stand_in("import sys; sys.exit(2)")
    crew = crew_of(settings, sqlite_database, [], gives_up=True)
    with pytest.raises(WorkerFailed):
        wait_until(lambda: crew.look_after(), what="giving up")


def test_a_death_is_reported_with_its_exit_code(
    settings: Settings, sqlite_database: Database, stand_in: Callable[[str], None]
) -> None:
    stand_in("import time; time.sleep(60)")
    crew = crew_of(settings, sqlite_database, [], gives_up=False)
    crew.look_after()
    (place,) = crew._places
    assert place.process is not None
    pid = place.process.pid
    with sqlite_database.write() as connection:
        now = sqlite_database.now()
        introduction = NewWorker(name="w", host=crew._host, pid=pid, model="stories")
        transitions.register_worker(connection, introduction, now)
        transitions.update_worker(connection, "w", now, status=WorkerStatus.READY)
    with sqlite_database.read() as connection:
        assert [row.name for row in serving_workers(connection, "stories", sqlite_database.now())] == ["w"]
    os.kill(pid, signal.SIGKILL)

    def dead() -> bool:
        crew.look_after(start=False)
        with sqlite_database.read() as connection:
            (row,) = [row for row in crew._our_rows(connection) if row.name == "w"]
        return row.status is WorkerStatus.FAILED and row.exit_code == -9 and row.detail == "exit code -9, SIGKILL"

    wait_until(dead, what="the report")
    with sqlite_database.read() as connection:
        assert serving_workers(connection, None, sqlite_database.now()) == []


def test_those_that_do_not_leave_are_killed(
    settings: Settings, sqlite_database: Database, stand_in: Callable[[str], None]
) -> None:
    stand_in("import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)")
    crew = crew_of(settings, sqlite_database, [], gives_up=False, count=2)
    crew.look_after()
    time.sleep(0.5)
    began = time.monotonic()
    crew.stop(0.3)
    assert crew.running == 0
    assert time.monotonic() - began < 50


def test_a_halted_worker_is_killed_once_its_leases_are_over(
    settings: Settings, sqlite_database: Database, stand_in: Callable[[str], None]
) -> None:
    """One that goes on in time is left alone. What the other ran is not held against it."""
    stand_in("import time; time.sleep(60)")
    short = settings.model_copy(update={"worker": settings.worker.model_copy(update={"lease_s": 3.0})})
    notes: list[str] = []
    crew = crew_of(short, sqlite_database, notes, gives_up=False, count=2)
    crew.look_after()
    halted, other = [place.process for place in crew._places]
    assert halted is not None
    assert other is not None
    for process in (halted, other):
        os.kill(process.pid, signal.SIGSTOP)
        wait_until(lambda process=process: process.halted_s() > 0, what="being seen halted")
    os.kill(other.pid, signal.SIGCONT)
    wait_until(lambda: other.halted_s() == 0, what="going on")
    with sqlite_database.write() as connection:
        now = sqlite_database.now()
        transitions.register_worker(
            connection, NewWorker(name="w", host=crew._host, pid=halted.pid, model="stories"), now
        )
        transitions.update_worker(connection, "w", now, status=WorkerStatus.READY)
    reported: list[bool] = []
    crew._report = lambda _row, death: reported.append(death.was_stopped)  # type: ignore[method-assign]
    wait_until(lambda: crew.look_after(start=False) or reported, what="the halted one's death")
    assert notes[0].startswith(f"the worker {halted.pid} has been halted by a signal for ")
    assert notes[1] == "the worker died (exit code -9, SIGKILL) and is started again in 0.5 s"
    assert reported == [True]
    assert other.exit_code() is None
    crew.kill()


def test_a_worker_whose_gpu_is_sick_is_left_alone_for_longer(
    settings: Settings, sqlite_database: Database, stand_in: Callable[[str], None]
) -> None:
    """Each start looks at the GPU, so they may come seldom; its neighbours go on, and a service never gives it up."""
    stand_in("import os, sys, time\nif os.environ['CUDA_VISIBLE_DEVICES'] == 'GPU-1': sys.exit(69)\ntime.sleep(60)")
    notes: list[str] = []
    gpus = (Gpu("gpu0", "GPU-0"), Gpu("gpu1", "GPU-1"))
    crew = Crew(settings, sqlite_database, Path("artifact"), 1, notes.append, gives_up=True, gpus=gpus)
    assert len(crew) == 2
    wait_until(lambda: crew.look_after() or notes, what="the death")
    crew.look_after()
    assert crew.running == 1
    assert notes == [
        "the worker of gpu1 died (exit code 69, its GPU is lost or sick) and is started again in 30 s",
    ]
    crew.kill()
    assert [restart_pause_s(EXIT_GPU, n) for n in (1, 2, 3, 9)] == [30, 60, 120, 600]
    assert [restart_pause_s(-9, n) for n in (1, 2, 3, 9)] == [0.5, 1, 2, 60]


def test_a_job_does_not_wait_for_ever_for_its_only_gpu(
    settings: Settings, sqlite_database: Database, stand_in: Callable[[str], None]
) -> None:
    stand_in("import sys; print('error: gpu0 is not fit for work', file=sys.stderr); sys.exit(69)")
    gpus = (Gpu("gpu0", "GPU-0"),)
    crew = Crew(settings, sqlite_database, Path("artifact"), 1, lambda _note: None, gives_up=True, gpus=gpus)
    with pytest.raises(WorkerFailed, match="gpu0 is not fit for work"):
        wait_until(lambda: crew.look_after(), what="giving up")


def test_workers_with_a_gpu_use_it_and_others_look_for_none(settings: Settings) -> None:
    assert settings.engine.flavour == "auto"
    assert for_gpus(settings, [Gpu("gpu0", "GPU-0")]).engine.flavour == "cuda"
    assert for_gpus(settings, []).engine.flavour == "cpu"
    null = settings.model_copy(update={"engine": settings.engine.model_copy(update={"flavour": "null"})})
    assert for_gpus(null, [Gpu("gpu0", "GPU-0")]) == null


def test_exit_codes_are_explained() -> None:
    assert explain_exit(70) == "exit code 70"
    assert explain_exit(-15) == "exit code -15, SIGTERM"
    assert explain_exit(-250) == "exit code -250"


def test_several_workers_share_the_cores(settings: Settings) -> None:
    assert share_cores(settings, 1) == settings
    assert share_cores(settings, 1000).engine.threads == 1


@pytest.mark.parametrize(("count", "numbers"), [(1, []), (3, ["0", "1", "2"])])
def test_several_workers_on_the_cpu_get_a_number_each(
    settings: Settings,
    sqlite_database: Database,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    numbers: list[str],
) -> None:
    """It is part of their place, by which chunks are sent to them."""
    real, commands = subprocess.Popen, []

    def start(command: list[str], **kwargs: object) -> subprocess.Popen[bytes]:
        commands.append(command)
        return real([sys.executable, "-c", ""], **kwargs)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(worker_process.subprocess, "Popen", start)
    crew = crew_of(settings, sqlite_database, [], gives_up=False, count=count)
    crew.look_after()
    crew.stop()
    given = [command[command.index("--number") + 1] for command in commands if "--number" in command]
    assert (len(commands), given) == (count, numbers)
