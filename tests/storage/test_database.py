"""Opening, transactions, schema, and what a broken database says."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import text

import storage.migrations
from storage.database import (
    DISPATCH_LOCK,
    SCHEMA_REVISION,
    Database,
    check_schema,
    open_database,
    schema_revision,
    upgrade_schema,
)
from storage.direct import run_sqlite
from storage.errors import StorageError
from storage.models import METADATA
from tests.conftest import wait_until


def test_the_migrations_make_exactly_the_tables_of_the_models(database: Database) -> None:
    """The steps are written by hand; this is what holds them to the models."""
    with database.read() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, METADATA) == []
        checks = {
            check for table in ("batches", "requests") for check in _check_constraints(database, connection, table)
        }
    assert checks == {"ck_batches_status", "ck_requests_status"}


def _check_constraints(database: Database, connection: object, table: str) -> set[str]:
    from sqlalchemy import inspect

    return {str(check["name"]) for check in inspect(connection).get_check_constraints(table)}  # type: ignore[attr-defined]


def test_partial_indexes_are_partial_in_the_database_too(database: Database) -> None:
    """Comparing metadata does not look at an index's condition, and without it they grow with the table."""
    if database.is_sqlite:
        question = "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL"
    else:
        question = "SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = 'public'"
    with database.read() as connection:
        partial = {name for name, sql in connection.execute(text(question)) if " where " in sql.lower()}
    wanted = {
        index.name
        for table in METADATA.tables.values()
        for index in table.indexes
        if index.dialect_kwargs.get("sqlite_where") is not None
    }
    assert partial == wanted
    assert "ix_requests_pending" in partial


def test_the_revision_in_the_code_is_the_newest_step() -> None:
    script = ScriptDirectory(str(Path(storage.migrations.__file__).parent))
    assert script.get_current_head() == SCHEMA_REVISION


def test_upgrading_twice_changes_nothing(database: Database) -> None:
    upgrade_schema(database)
    check_schema(database)
    assert schema_revision(database) == SCHEMA_REVISION


def _upgrade(url: str) -> None:
    with open_database(url) as database:
        upgrade_schema(database)


def test_processes_that_start_at_once_upgrade_once(tmp_path: Path) -> None:
    """`promptmill run` twice in one second, on a new machine."""
    url = f"sqlite:///{tmp_path / 'new' / 'promptmill.db'}"
    code = "import sys; from storage.database import *; upgrade_schema(open_database(sys.argv[1]))"
    processes = [
        subprocess.Popen([sys.executable, "-c", code, url], stderr=subprocess.PIPE, cwd=Path(__file__).parents[2])
        for _ in range(4)
    ]
    for process in processes:
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0, said.decode()
    with open_database(url) as database:
        check_schema(database)


def test_threads_that_start_at_once_upgrade_postgres_once(postgres_server: object) -> None:
    postgres_server.run("CREATE DATABASE pm_race")  # type: ignore[attr-defined]
    url = postgres_server.url("pm_race")  # type: ignore[attr-defined]
    failures: list[BaseException] = []

    def upgrade() -> None:
        try:
            _upgrade(url)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=upgrade) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    with open_database(url) as database:
        check_schema(database)


def test_a_schema_newer_than_the_code_is_refused_by_name(database: Database) -> None:
    with database.write() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    for call in (upgrade_schema, check_schema):
        with pytest.raises(
            StorageError, match=f"schema 9999, this promptmill knows schemas up to {SCHEMA_REVISION}"
        ) as e:
            call(database)
        assert e.value.code == "schema_too_new"
        assert "upgrade promptmill" in e.value.message


def test_an_empty_database_is_told_from_an_old_one(tmp_path: Path) -> None:
    with open_database(f"sqlite:///{tmp_path / 'empty.db'}") as database, pytest.raises(StorageError) as raised:
        check_schema(database)
    assert raised.value.code == "schema_missing"


def test_a_block_that_raises_leaves_nothing_behind(database: Database) -> None:
    with pytest.raises(ZeroDivisionError), database.write() as connection:
        connection.execute(text("INSERT INTO prefixes (sha256, text) VALUES ('a', 'b')"))
        1 / 0  # noqa: B018
    with database.read() as connection:
        assert connection.execute(text("SELECT count(*) FROM prefixes")).scalar_one() == 0


def test_writers_wait_for_each_other_and_lose_no_update(database: Database) -> None:
    """A read followed by a write in one transaction: where locks are upgraded half-way, this fails as `locked`."""
    with database.write() as connection:
        connection.execute(text("INSERT INTO prefixes (id, sha256, text) VALUES (1, 'x', '0')"))

    def add() -> None:
        for _ in range(25):
            with database.write() as connection:
                suffix = "" if database.is_sqlite else " FOR UPDATE"
                value = connection.execute(text(f"SELECT text FROM prefixes WHERE id = 1{suffix}")).scalar_one()
                connection.execute(text("UPDATE prefixes SET text = :v WHERE id = 1"), {"v": str(int(value) + 1)})

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with database.read() as connection:
        assert connection.execute(text("SELECT text FROM prefixes WHERE id = 1")).scalar_one() == "100"


def test_readers_do_not_wait_for_a_writer(database: Database) -> None:
    with database.write() as writing:
        writing.execute(text("INSERT INTO prefixes (sha256, text) VALUES ('a', 'b')"))
        started = time.monotonic()
        with database.read() as reading:
            assert reading.execute(text("SELECT count(*) FROM prefixes")).scalar_one() == 0
        assert time.monotonic() - started < 25  # it would wait 30 s for the lock


def test_the_database_tells_the_time(database: Database) -> None:
    """Leases are judged by it; it agrees with this host's clock here because the server is on this host."""
    assert abs(database.now() - time.time()) < 2.0
    assert database.now() <= database.now()


def test_work_is_repeated_after_a_passing_error(sqlite_database: Database) -> None:
    calls = []

    def work(_connection: object) -> str:
        calls.append(1)
        if len(calls) < 3:
            raise StorageError("away", code="database_unreachable", retryable=True)
        return "done"

    assert sqlite_database.retry(work) == "done"
    assert len(calls) == 3


def test_work_is_not_repeated_after_a_lasting_error(sqlite_database: Database) -> None:
    calls = []

    def work(_connection: object) -> None:
        calls.append(1)
        raise StorageError("no", code="constraint_violated")

    with pytest.raises(StorageError):
        sqlite_database.retry(work)
    assert len(calls) == 1


# --- what goes wrong ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "code", "says"),
    [
        ("mysql://u:secret@h/d", "invalid_database_url", "'mysql' is not supported; wanted: sqlite:///"),
        ("not a url with secret", "invalid_database_url", "wanted: sqlite:///path/to/file.db"),
        ("sqlite://", "invalid_database_url", "give a file"),
        ("sqlite:///:memory:", "invalid_database_url", "give a file"),
    ],
)
def test_a_url_that_will_not_do_is_refused_with_the_wanted_form(url: str, code: str, says: str) -> None:
    with pytest.raises(StorageError) as raised:
        open_database(url)
    assert raised.value.code == code
    assert says in raised.value.message
    assert "secret" not in raised.value.message


def test_a_file_of_another_kind_is_named(tmp_path: Path) -> None:
    path = tmp_path / "notes.db"
    path.write_text("Dear diary, " * 200)
    with (
        open_database(f"sqlite:///{path}") as database,
        pytest.raises(StorageError, match=r"notes\.db.*another kind") as e,
    ):
        upgrade_schema(database)
    assert e.value.code == "not_a_database"


def test_a_damaged_file_is_named(sqlite_url: str) -> None:
    path = Path(sqlite_url.removeprefix("sqlite:///"))
    content = bytearray(path.read_bytes())
    content[100:4096] = os.urandom(3996)
    path.write_bytes(content)
    with open_database(sqlite_url) as database, pytest.raises(StorageError) as raised:
        upgrade_schema(database)
    assert raised.value.code == "database_damaged"


def test_a_home_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        open_database(f"sqlite:///{tmp_path / 'file' / 'home' / 'promptmill.db'}") as database,
        pytest.raises(StorageError, match="cannot create the folder") as raised,
    ):
        upgrade_schema(database)
    assert raised.value.code == "database_unwritable"


def test_looking_at_a_database_that_is_not_there_makes_nothing(tmp_path: Path) -> None:
    """A misspelt path would leave an empty database behind, which then hides the mistake."""
    with open_database(f"sqlite:///{tmp_path / 'nofolder' / 'x.db'}") as database:
        assert schema_revision(database) is None
        with pytest.raises(StorageError, match="has no promptmill tables yet; `promptmill migrate` makes them"):
            check_schema(database)
    assert list(tmp_path.iterdir()) == []
    with open_database(f"sqlite:///{tmp_path / 'nofolder' / 'x.db'}") as database:
        upgrade_schema(database)
        check_schema(database)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everything")
def test_a_read_only_file_is_named(sqlite_url: str) -> None:
    Path(sqlite_url.removeprefix("sqlite:///")).chmod(0o444)
    _expect_read_only(sqlite_url)


def test_a_read_only_database_is_told_by_its_error(sqlite_database: Database) -> None:
    """The same message, made without file modes, which root passes by."""
    with pytest.raises(StorageError) as raised, sqlite_database.write() as connection:
        connection.exec_driver_sql("PRAGMA query_only = ON")
        connection.execute(text("INSERT INTO prefixes (sha256, text) VALUES ('a', 'b')"))
    sqlite_database.engine.dispose()
    assert raised.value.code == "database_read_only"
    assert "make it writable" in raised.value.message


def _expect_read_only(url: str) -> None:
    with open_database(url) as database, pytest.raises(StorageError) as raised, database.write() as connection:
        connection.execute(text("INSERT INTO prefixes (sha256, text) VALUES ('a', 'b')"))
    assert raised.value.code == "database_read_only"


def test_a_full_disk_is_a_passing_error_that_loses_nothing(sqlite_database: Database) -> None:
    """max_page_count makes SQLite answer as on a full disk."""
    with sqlite_database.write() as connection:
        connection.execute(text("INSERT INTO prefixes (sha256, text) VALUES ('a', 'kept')"))
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
    with pytest.raises(StorageError, match="disk is full") as raised, sqlite_database.write() as connection:
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
        connection.execute(text("INSERT INTO prefixes (sha256, text) VALUES ('b', :t)"), {"t": "x" * 500_000})
    assert (raised.value.code, raised.value.retryable) == ("disk_full", True)
    with sqlite_database.write() as connection:
        connection.exec_driver_sql("PRAGMA max_page_count = 1000000")
        assert connection.execute(text("SELECT text FROM prefixes")).scalars().all() == ["kept"]


@pytest.mark.parametrize("said", ["disk I/O error", "unable to open database file"])
@pytest.mark.parametrize(("free_blocks", "free_files", "is_full"), [(0, 9, True), (9999, 0, True), (9999, 9, False)])
def test_a_full_disk_is_named_however_sqlite_puts_it(
    sqlite_database: Database,
    monkeypatch: pytest.MonkeyPatch,
    said: str,
    free_blocks: int,
    free_files: int,
    is_full: bool,
) -> None:
    """Of the files beside the database it says something else, to whoever only reads too."""
    disk = SimpleNamespace(f_bavail=free_blocks, f_frsize=4096, f_files=100, f_favail=free_files)
    monkeypatch.setattr("storage.database.os.statvfs", lambda _folder: disk)
    with pytest.raises(StorageError) as raised, sqlite_database.read():
        raise sqlite3.OperationalError(said)
    assert (raised.value.code == "disk_full") == is_full
    assert ("the disk is full; free some space" in raised.value.message) == is_full
    if not is_full and "I/O" in said:
        assert "dmesg" in raised.value.message


def test_only_the_writer_does_without_sqlites_own_waiting(sqlite_database: Database) -> None:
    """It looks at the lock by itself; others would fail at once where SQLite waits a moment."""
    with sqlite_database.write() as connection:
        assert connection.execute(text("PRAGMA busy_timeout")).scalar_one() == 0
    with pytest.raises(StorageError), sqlite_database.write() as connection:
        connection.execute(text("no SQL"))  # its connection is not used again
    for open_transaction in (sqlite_database.read, sqlite_database.engine.connect):
        with open_transaction() as connection:
            assert connection.execute(text("PRAGMA busy_timeout")).scalar_one() == 30_000


def test_statements_that_went_to_the_driver_directly_end_with_their_block(sqlite_database: Database) -> None:
    """SQLAlchemy knows of no transaction then."""
    insert = "INSERT INTO prefixes (sha256, text) VALUES (?, 'x')"
    with sqlite_database.write() as connection:
        run_sqlite(connection, insert, ["committed"])
    with pytest.raises(ZeroDivisionError), sqlite_database.write() as connection:
        run_sqlite(connection, insert, ["undone"])
        _ = 1 / 0
    with pytest.raises(StorageError), sqlite_database.write() as connection:
        run_sqlite(connection, insert, ["undone as well"])
        run_sqlite(connection, insert, ["committed"])
    with sqlite_database.write() as connection:
        run_sqlite(connection, insert, ["after"])
    with sqlite_database.read() as connection:
        assert set(connection.execute(text("SELECT sha256 FROM prefixes")).scalars()) == {"committed", "after"}


def test_a_file_locked_by_another_program_is_waited_for_then_named(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.database.BUSY_TIMEOUT_S", 0.2)
    other = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with open_database(sqlite_url) as database:
        with pytest.raises(StorageError, match="locked by another writer") as raised, database.write():
            pass
        assert (raised.value.code, raised.value.retryable) == ("database_busy", True)
        other.execute("ROLLBACK")
        with database.write():
            pass
    other.close()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("postgresql://postgres:hunter2@127.0.0.1:notaport/mill", "the port after the host is not a number from 1 to"),
        ("postgresql://postgres:hunter2@127.0.0.1:/mill", "the port after the host is not a number from 1 to 65,535"),
        ("postgresql://postgres:hunter2@127.0.0.1:99999/mill", "the port after the host is not a number from 1 to"),
        ("postgresql://postgres:hunter2@127.0.0.1:0/mill", "the port after the host is not a number from 1 to 65,535"),
        ("postgresql://postgres:hunter2@[::1/mill", "the host is not an IPv6 address in brackets"),
        ("postgresql://postgres:hunter2@::1/mill", "the host is an IPv6 address without its brackets"),
        ("postgres://postgres:hunter2@secret@127.0.0.1:54999/mill", "the user or the password has an @ in it"),
        ("postgresql+psycopg://postgres:a@hunter2:1@127.0.0.1/mill", "the user or the password has an @ in it"),
        ("postgresql://postgres:a@b/hunter2@127.0.0.1/mill", "the user or the password has an @ in it"),
        ("postgresql://postgres:a@b?hunter2@127.0.0.1/mill", "the user or the password has an @ in it"),
        ("postgresql://postgres:hunter2/mill", "the port after the host is not a number from 1 to 65,535"),
    ],
)
def test_a_postgres_url_that_is_none_is_refused_without_a_part_of_it(url: str, says: str) -> None:
    """What follows an unescaped @ of a password was taken for the host and shown."""
    with pytest.raises(StorageError) as raised:
        open_database(url)
    said = raised.value.message
    assert raised.value.code == "invalid_database_url"
    assert said.startswith(f"PROMPTMILL_DATABASE_URL: {says}")
    assert "write it as postgresql://user:password@host:5432/name" in said
    assert not any(part in said for part in ("hunter2", "secret", "127.0.0.1", "notaport"))
    assert raised.value.__cause__ is None


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:hunter2%40%2F%3A@127.0.0.1:5432/d",
        "postgresql://me:hunter2/#?:[x@127.0.0.1:5432/d",
        "postgresql://me@server:hunter2@127.0.0.1/d",
        "postgresql://me:hunter2@[::1]:5432/d",
        "postgresql:///d?host=/tmp&password=hunter2&sslpassword=hunter2",
    ],
)
def test_postgres_urls_that_can_be_read_are_taken_and_shown_without_password(url: str) -> None:
    with open_database(url) as database:
        assert "hunter2" not in database.shown_url
        assert "***" in database.shown_url or "password=hidden" in database.shown_url


def test_a_statement_that_fails_does_not_show_its_parameters(database: Database) -> None:
    """They hold prompts, and errors are logged."""
    with database.write() as connection:
        connection.execute(text("INSERT INTO prefixes (sha256, text) VALUES ('a', 'b')"))
    with pytest.raises(StorageError) as raised, database.write() as connection:
        connection.execute(text("INSERT INTO prefixes (sha256, text) VALUES ('a', :t)"), {"t": "my private prompt"})
    assert raised.value.code == "constraint_violated"
    assert "private" not in raised.value.message
    assert "private" not in str(raised.value.__cause__)


def test_a_postgres_server_that_is_away_is_named() -> None:
    with (
        open_database("postgresql://me:secret@127.0.0.1:1/d") as database,
        pytest.raises(StorageError, match="cannot be reached") as raised,
    ):
        upgrade_schema(database)
    assert (raised.value.code, raised.value.retryable) == ("database_unreachable", True)
    assert "secret" not in raised.value.message


def test_a_wrong_password_is_named_and_not_shown(postgres_server: object) -> None:
    port = postgres_server.port  # type: ignore[attr-defined]
    with (
        open_database(f"postgres://postgres:secret@127.0.0.1:{port}/pm_template") as database,
        pytest.raises(StorageError, match="refuses this user or password") as raised,
    ):
        upgrade_schema(database)
    assert raised.value.code == "database_login_refused"
    assert "secret" not in raised.value.message
    with open_database(f"postgres://postgres:right@127.0.0.1:{port}/pm_template") as database:
        check_schema(database)


def test_a_postgres_database_that_is_not_there_is_named(postgres_server: object) -> None:
    url = postgres_server.url("nowhere")  # type: ignore[attr-defined]
    with open_database(url) as database, pytest.raises(StorageError, match="createdb") as raised:
        upgrade_schema(database)
    assert raised.value.code == "database_missing"


def test_an_idle_connection_that_postgres_cut_is_replaced(
    postgres_url: str, postgres_server: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart of the server while nothing happens goes unnoticed."""
    monkeypatch.setattr("storage.database.PING_AFTER_S", 0.0)
    with open_database(postgres_url) as database:
        with database.read() as connection:
            connection.execute(text("SELECT 1"))
        postgres_server.run(  # type: ignore[attr-defined]
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'promptmill'"
        )
        with database.read() as connection:
            connection.execute(text("SELECT 1"))


def test_a_connection_cut_in_the_middle_is_a_passing_error(postgres_url: str, postgres_server: object) -> None:
    with (
        open_database(postgres_url) as database,
        pytest.raises(StorageError) as raised,
        database.write() as connection,
    ):
        connection.execute(text("SELECT 1"))
        postgres_server.run(  # type: ignore[attr-defined]
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'promptmill'"
        )
        connection.execute(text("SELECT 1"))
    assert (raised.value.code, raised.value.retryable) == ("database_unreachable", True)


def test_a_transaction_whose_process_is_frozen_lets_go_of_its_locks(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.database.SILENT_TRANSACTION_S", 0.5)
    with open_database(postgres_url) as frozen, open_database(postgres_url) as other:
        with pytest.raises(StorageError) as raised, frozen.write() as connection:
            assert frozen.try_lock(connection, DISPATCH_LOCK)

            def is_free() -> bool:
                with other.write() as waiting:
                    return other.try_lock(waiting, DISPATCH_LOCK)

            assert not is_free()
            wait_until(is_free, what="the end of the silent transaction")
            connection.execute(text("SELECT 1"))
        assert (raised.value.code, raised.value.retryable) == ("database_unreachable", True)
        with frozen.write() as connection:
            assert frozen.try_lock(connection, DISPATCH_LOCK), "the next transaction is as good as ever"
