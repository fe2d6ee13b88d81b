"""The database restarted, away, frozen, locked, and its disk full."""

from __future__ import annotations

import contextlib
import resource
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.drills.conftest import MakeMill, Record, scaled
from tests.drills.mill import Mill


@pytest.mark.drill
@pytest.mark.timeout(1200)
def test_postgres_crashes_and_comes_back(make_mill: MakeMill, record: Record) -> None:
    """An immediate shutdown is a crash: whatever was not yet written out is gone, claims among it."""
    mill = make_mill("postgres", "log", seed=13)
    mill.up(workers=2)
    assert mill.postgres is not None
    for _ in range(scaled(22)):
        mill.keep_busy()
        mill.pick_busy_worker()
        mill.inject(mill.postgres.stop)
        time.sleep(mill.random.uniform(0.0, 1.0))
        mill.postgres.start()
        mill.wait_for_recovery()
    mill.wait_until_done()
    record(mill, "Postgres crashes and restarts")


@pytest.mark.drill
@pytest.mark.timeout(1200)
def test_postgres_is_away_for_a_minute(make_mill: MakeMill, record: Record) -> None:
    mill = make_mill("postgres", "log", seed=14)
    mill.up(workers=2)
    assert mill.postgres is not None
    mill.keep_busy(4000)
    mill.pick_busy_worker()
    mill.inject(lambda: mill.postgres.stop(immediate=False))  # type: ignore[union-attr]
    time.sleep(61)
    mill.postgres.start()
    mill.wait_for_recovery()
    mill.wait_until_done()
    assert mill.says("database_unreachable")
    record(mill, "Postgres away for a minute")


@pytest.mark.drill
@pytest.mark.timeout(1200)
def test_postgres_is_frozen(make_mill: MakeMill, record: Record) -> None:
    mill = make_mill("postgres", "log", seed=15)
    mill.up(workers=2)
    assert mill.postgres is not None
    for _ in range(scaled(2)):
        mill.keep_busy(4000)
        mill.pick_busy_worker()
        mill.inject(lambda: mill.postgres.freeze(8))  # type: ignore[union-attr]
        mill.wait_for_recovery()
    mill.wait_until_done()
    record(mill, "Postgres frozen for 8 s")


@pytest.mark.drill
@pytest.mark.timeout(1200)
def test_the_sqlite_file_is_locked_for_half_a_minute(make_mill: MakeMill, record: Record) -> None:
    mill = make_mill("sqlite", "embedded", seed=16)
    mill.up(workers=2)
    mill.keep_busy(4000)
    mill.pick_busy_worker()
    other = sqlite3.connect(mill.home / "promptmill.db", isolation_level=None, timeout=30)
    with contextlib.closing(other):
        mill.inject(lambda: other.execute("BEGIN IMMEDIATE"))
        time.sleep(32)
        other.execute("ROLLBACK")
    mill.wait_for_recovery()
    mill.wait_until_done()
    assert mill.says("database_busy")
    record(mill, "SQLite file locked for 32 s")


@pytest.mark.drill
@pytest.mark.timeout(1200)
def test_the_disk_is_full(make_mill: MakeMill, record: Record, tmp_path: Path) -> None:
    """Everything of the home is on a disk that fills up: database, logs, the queue server's log, result files."""
    with small_disk(tmp_path / "home", megabytes=48):
        mill = make_mill("sqlite", "embedded", seed=17)
        mill.up(workers=2)
        for _ in range(scaled(2)):
            mill.keep_busy(4000)
            mill.pick_busy_worker()
            mill.inject(lambda: fill(mill.home / "ballast"))
            time.sleep(6)
            (mill.home / "ballast").unlink()
            mill.wait_for_recovery()
        mill.wait_until_done()
        assert mill.says("disk_full")
        record(mill, "disk full for 6 s")
        mill.close()


@pytest.mark.drill
@pytest.mark.timeout(1200)
def test_no_file_can_grow(make_mill: MakeMill, record: Record) -> None:
    """The same where no disk can be mounted: supervisor and workers may not make any file longer."""
    mill = make_mill("sqlite", "log", seed=18)
    mill.up(workers=2)
    for _ in range(scaled(2)):
        mill.keep_busy(4000)
        mill.pick_busy_worker()
        mill.inject(lambda: limit_files(mill, 4096))
        time.sleep(6)
        limit_files(mill, resource.RLIM_INFINITY)
        mill.wait_for_recovery()
    mill.wait_until_done()
    record(mill, "files cannot grow for 6 s")


@contextlib.contextmanager
def small_disk(folder: Path, *, megabytes: int) -> Iterator[None]:
    """A file system of its own at that folder; skips where this process may not mount one."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(b"\0" * 4096)


def limit_files(mill: Mill, size_bytes: int) -> None:
    for process in mill.leftovers():
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY))
