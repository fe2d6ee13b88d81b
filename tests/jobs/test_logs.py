"""Where events go, and in what form."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import structlog

from jobs.logs import set_up_logs
from storage.errors import SettingsError


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(level)
    logging.captureWarnings(False)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def lines(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_workers_events_are_json_lines_with_what_was_bound(tmp_path: Path) -> None:
    file = tmp_path / "logs" / "worker.log"
    set_up_logs("cpu@host-1", file=file, console=False)
    structlog.contextvars.bind_contextvars(batch="batch_1", request=7)
    structlog.get_logger("x").info("attempt_completed", prompt_tokens=3, model="tiñy")
    (line,) = lines(file)
    at = str(line.pop("at"))
    assert at.endswith("Z")
    assert line == {
        "event": "attempt_completed",
        "level": "info",
        "process": "cpu@host-1",
        "batch": "batch_1",
        "request": 7,
        "prompt_tokens": 3,
        "model": "tiñy",
    }


def test_libraries_speak_only_when_they_warn(tmp_path: Path) -> None:
    file = tmp_path / "log"
    set_up_logs("p", level="debug", file=file, console=False)
    logging.getLogger("celery.worker").info("chatter")
    logging.getLogger("kombu.connection").warning("broker %s is away", "redis")
    assert [(line["event"], line["level"]) for line in lines(file)] == [("broker redis is away", "warning")]


def test_a_traceback_is_part_of_its_line(tmp_path: Path) -> None:
    file = tmp_path / "log"
    set_up_logs("p", file=file, console=False)
    try:
        raise ValueError("out of range")
    except ValueError:
        structlog.get_logger("x").exception("task_failed")
    (line,) = lines(file)
    assert "ValueError: out of range" in str(line["exception"])


def test_what_is_below_the_level_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logs("p", level="warning")
    log = structlog.get_logger("x")
    log.info("request_claimed")
    log.warning("leases_expired", requests=2)
    said = capsys.readouterr()
    assert said.out == ""
    assert "leases_expired" in said.err
    assert "requests=2" in said.err
    assert "request_claimed" not in said.err
    assert "\x1b" not in said.err  # not a terminal: no colours


def test_a_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match=r"cannot write the log .*worker\.log"):
        set_up_logs("p", file=tmp_path / "file" / "worker.log")


@pytest.mark.parametrize(("flag", "says"), [(os.ST_RDONLY, "Read-only file system"), (0, "Permission denied")])
def test_the_reason_why_a_log_cannot_be_written_is_the_systems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: int, says: str
) -> None:
    """Nobody can change a permission on a file system that is mounted read-only."""
    monkeypatch.setattr("jobs.logs.os.access", lambda *_: False)
    monkeypatch.setattr("jobs.logs.os.statvfs", lambda _folder: SimpleNamespace(f_flag=flag))
    with pytest.raises(SettingsError, match=f"cannot write the log .*: {says}; make it writable"):
        set_up_logs("p", file=tmp_path / "logs" / "worker.log")


def test_whoever_only_reads_does_without_a_log(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    set_up_logs("results", file=tmp_path / "file" / "results.log", console=False, must_write=False)
    structlog.get_logger("x").warning("said_to_nobody")


def test_a_log_is_made_by_its_first_line(tmp_path: Path) -> None:
    """Most commands have nothing to say; an empty file for each would hide the logs that matter."""
    file = tmp_path / "logs" / "show.log"
    set_up_logs("show", file=file, console=False)
    assert not file.parent.exists()
    structlog.get_logger("x").warning("disk_nearly_full")
    assert len(lines(file)) == 1


def test_setting_up_twice_does_not_double_the_lines(tmp_path: Path) -> None:
    file = tmp_path / "log"
    set_up_logs("p", file=file, console=False)
    set_up_logs("p", file=file, console=False)
    structlog.get_logger("x").warning("once_said")
    assert len(lines(file)) == 1
