"""The engine and its transactions, from a URL it is given; the schema and its upgrades.

SQLite and Postgres behave alike to the callers: `write()` is one short transaction that commits at the end of its
block, `read()` sees one consistent state. On SQLite a write transaction takes the write lock when it begins, so two
writers wait for each other instead of failing half-way. Errors leave as StorageError; a URL is never shown with its
password, a statement never with its parameters (they hold prompts).
"""

from __future__ import annotations

import math
import os
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

from sqlalchemy import Connection as Connection
from sqlalchemy import Engine, create_engine, event, exc, inspect, text
from sqlalchemy.engine import URL, make_url

from storage.addresses import wrong_in_address
from storage.direct import run_sqlite
from storage.errors import StorageError

# The newest step in migrations/versions; a test holds the two together. Known here so that a start with an up-to-date
# schema costs one read and no import of Alembic.
SCHEMA_REVISION = "0003"

# How long a writer waits for another one. Our write transactions last milliseconds; 30 s outlives a backup's lock.
BUSY_TIMEOUT_S = 30.0
# Between two looks at SQLite's write lock while another process has it.
SHORTEST_LOCK_PAUSE_S, LONGEST_LOCK_PAUSE_S = 0.0003, 0.005
# A Postgres transaction that has said nothing for so long has lost its process, or the machine that this ran on: the
# server ends it, and with it the locks that everybody else waits for. Ours are silent for milliseconds.
SILENT_TRANSACTION_S = 60.0
# Idle for longer than this, a Postgres connection is tried out before it is used.
PING_AFTER_S = 1.0
# Every 30 s the offset between this host's steady clock and the database server's clock is measured anew.
CLOCK_REFRESH_S = 30.0
POSTGRES_URL = re.compile(r"(postgres|postgresql|postgresql\+psycopg)://")
# With less than this a disk is full: SQLite enlarges its files by 32 KiB and a page or two.
LEAST_FREE_BYTES = 1 << 17
# Any fixed numbers: they name our two advisory locks among all those of one Postgres database.
SCHEMA_LOCK = 0x70726F6D_01
DISPATCH_LOCK = 0x70726F6D_02

_Returned = TypeVar("_Returned")


class Database:
    """An open database. Threads may share it; processes open their own."""

    def __init__(self, engine: Engine, shown_url: str, file: Path | None) -> None:
        self.engine = engine
        self.shown_url = shown_url
        self.file = file  # SQLite's
        self.is_sqlite = engine.dialect.name == "sqlite"
        # SQLite has one writer. Threads of one process queue up here, which is fair and wakes at once; its own
        # busy handler, needed between processes, polls with growing sleeps.
        self._writer = threading.Lock()
        self._kept: Connection | None = None  # the writer's
        self._clock: tuple[float, float] | None = None  # (measured at, database time minus steady clock)

    @contextmanager
    def write(self, *, durable: bool = True) -> Iterator[Connection]:
        """One write transaction: committed at the end of the block, rolled back when it raises.

        durable False: do not wait for Postgres's disk. A crash of the server may then undo the transaction, with the
        later ones that did not wait either; right for claims and leases, which are made anew, wrong for results.
        """
        if not self.is_sqlite:
            with self._translated(), self.engine.connect() as connection, connection.begin():
                if not durable:
                    connection.exec_driver_sql("SET LOCAL synchronous_commit = off")
                yield connection
            return
        if not self._writer.acquire(timeout=BUSY_TIMEOUT_S):
            raise _busy(self.shown_url)
        try:
            with self._translated():
                connection = self._writers_connection()
                try:
                    _take_write_lock(connection)
                    yield connection
                    _end_sqlite(connection, "COMMIT")
                except BaseException as error:
                    self._undo(connection, is_sound=not isinstance(error, exc.DBAPIError | sqlite3.Error))
                    raise
        finally:
            self._writer.release()

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """One read transaction. Keep it short: on SQLite it holds back the log's truncation."""
        with self._translated(), self.engine.connect() as connection, connection.begin():
            if self.is_sqlite:
                run_sqlite(connection, "BEGIN")
            yield connection

    def retry(
        self, work: Callable[[Connection], _Returned], *, durable: bool = True, patience_s: float = 60.0
    ) -> _Returned:
        """Run `work` in a write transaction, again after retryable errors, until it passes or `patience_s` is over.

        The transitions may be repeated: one whose commit went through although its reply was lost changes nothing
        the second time (and says so in what it returns).
        """
        deadline = time.monotonic() + patience_s
        pause_s = 0.05
        while True:
            try:
                with self.write(durable=durable) as connection:
                    return work(connection)
            except StorageError as error:
                if not error.retryable or time.monotonic() + pause_s > deadline:
                    raise
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, 2.0)

    def try_lock(self, connection: Connection, key: int) -> bool:
        """Take one of our named locks until the write transaction ends; False when another process has it.

        On SQLite the write transaction itself is the lock.
        """
        if self.is_sqlite:
            return True
        return bool(connection.execute(text("SELECT pg_try_advisory_xact_lock(:key)"), {"key": key}).scalar_one())

    def now(self) -> float:
        """The database's time, UTC Unix seconds: the one clock that leases are judged by.

        SQLite's clock is this host's. Of Postgres the offset to our steady clock is kept, so that asking costs
        nothing and a jump of this host's clock changes nothing.
        """
        if self.is_sqlite:
            return time.time()
        steady = time.monotonic()
        if self._clock is None or steady - self._clock[0] > CLOCK_REFRESH_S:
            with self.read() as connection:
                server = float(connection.execute(text("SELECT extract(epoch FROM clock_timestamp())")).scalar_one())
            self._clock = (steady, server - (steady + time.monotonic()) / 2)
        return time.monotonic() + self._clock[1]

    def close(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.close()
        self.engine.dispose()

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Errors of the database leave the block as StorageError."""
        try:
            yield
        except exc.DBAPIError as error:
            raise explain(error, self.shown_url) from error
        except sqlite3.Error as error:  # of a statement that went to the driver directly
            raise _explain_sqlite(" ".join(str(error).split()), self.shown_url) from error
        except exc.TimeoutError as error:
            raise StorageError(
                f"database {self.shown_url}: no connection became free within {BUSY_TIMEOUT_S:.0f} s; "
                "this process holds too many at once",
                code="database_busy",
                retryable=True,
            ) from error

    def _undo(self, connection: Connection, *, is_sound: bool) -> None:
        """Roll back on SQLite. A connection with which something is the matter is not used again."""
        if is_sound:
            with suppress(exc.DBAPIError, sqlite3.Error):
                _end_sqlite(connection, "ROLLBACK")
                return
        self._kept = None
        connection.invalidate()
        connection.close()

    def _writers_connection(self) -> Connection:
        """SQLite's one writer keeps its connection: to get one from the pool costs as much as a small transaction.

        It has SQLite's own waiting switched off, which `_take_write_lock` replaces.
        """
        if self._kept is None:
            connection = self.engine.connect()
            run_sqlite(connection, "PRAGMA busy_timeout = 0")
            self._kept = connection
        return self._kept


def open_database(url: str) -> Database:
    """Open `sqlite:///path` or `postgresql://user:password@host/name`; nothing is created yet.

    Look at the schema first (`check_schema`, `upgrade_schema`): a connection to an SQLite file makes it.

    Raises StorageError: invalid_database_url, database_driver_missing, database_unreachable and the like.
    """
    parsed = _parse(url)
    shown = _shown(parsed)
    if parsed.get_backend_name() == "sqlite":
        file = Path(parsed.database or "").expanduser().absolute()
        return Database(_sqlite_engine(parsed.set(database=str(file))), shown, file)
    return Database(_postgres_engine(parsed, shown), shown, None)


def upgrade_schema(database: Database) -> None:
    """Bring the schema to this version's; safe when several processes start at once.

    Raises StorageError(schema_too_new) when a newer version of promptmill has already upgraded it.
    """
    if schema_revision(database) == SCHEMA_REVISION:
        return
    _make_folder(database)
    # Slow to import, and needed once per version.
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    with database.write() as connection:
        if not database.is_sqlite:
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": SCHEMA_LOCK})
        found = _revision(connection)  # again, now that nobody else can change it
        if found == SCHEMA_REVISION:
            return
        if found is not None and found not in known:
            raise _too_new(database, found)
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def check_schema(database: Database) -> None:
    """Raise StorageError unless the schema is exactly this version's."""
    found = schema_revision(database)
    if found is None:
        raise StorageError(
            f"database {database.shown_url} has no promptmill tables yet; `promptmill migrate` makes them",
            code="schema_missing",
        )
    if found != SCHEMA_REVISION:
        raise _too_new(database, found)


def schema_revision(database: Database) -> str | None:
    """The schema step that the database stands at; None: no tables yet."""
    if database.file is not None and not os.path.lexists(database.file):
        return None  # to look into it would make it
    with database.read() as connection:
        return _revision(connection)


def explain(error: exc.DBAPIError, shown_url: str) -> StorageError:
    """Turn a driver's error into one that names what is wrong and the way out."""
    cause = error.orig
    said = " ".join(str(cause).split())
    if isinstance(cause, sqlite3.Error):
        return _explain_sqlite(said, shown_url)
    return _explain_postgres(said, str(getattr(cause, "sqlstate", None) or ""), shown_url, error)


def _revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    revision = connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one_or_none()
    return None if revision is None else str(revision)


def _too_new(database: Database, found: str) -> StorageError:
    return StorageError(
        f"database {database.shown_url} has schema {found}, this promptmill knows schemas up to {SCHEMA_REVISION}; "
        "upgrade promptmill on this machine, or point PROMPTMILL_DATABASE_URL at another database",
        code="schema_too_new",
    )


def _parse(url: str) -> URL:
    wanted = "wanted: sqlite:///path/to/file.db or postgresql://user:password@host:5432/name"
    if POSTGRES_URL.match(url) and (wrong := _wrong_in_postgres_url(url)):
        raise StorageError(
            f"PROMPTMILL_DATABASE_URL: {wrong}; write it as postgresql://user:password@host:5432/name, with each of "
            "/ @ : ? # [ ] % in user and password percent-encoded (%2F %40 %3A %3F %23 %5B %5D %25)",
            code="invalid_database_url",
        )
    try:
        parsed = make_url(url)
    except (exc.ArgumentError, ValueError):
        # Without the cause: it quotes the URL.
        raise StorageError(f"the database URL cannot be read; {wanted}", code="invalid_database_url") from None
    if POSTGRES_URL.match(url):
        return parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername == "sqlite":
        if parsed.database in (None, "", ":memory:"):
            raise StorageError(
                "an in-memory SQLite database cannot be shared between processes; "
                "give a file, as in sqlite:///promptmill.db",
                code="invalid_database_url",
            )
        return parsed
    raise StorageError(
        f"database URL scheme {parsed.drivername!r} is not supported; {wanted}", code="invalid_database_url"
    )


def _wrong_in_postgres_url(url: str) -> str | None:
    """What is wrong with it, in words that repeat no part of it; None: nothing that shows before connecting.

    A password ends at the first @, as SQLAlchemy reads it: what follows would be shown, for it is taken for the host.
    """
    rest = url.partition("://")[2]
    login = re.match("[^:/]*(?::[^@]*)?@", rest)  # as SQLAlchemy has it
    rest = rest[login.end() :] if login else rest
    if "@" in rest:
        return "the user or the password has an @ in it as it is"
    address = re.split("[/?]", rest, maxsplit=1)[0]
    return wrong_in_address(address)


def _shown(url: URL) -> str:
    """The URL without passwords, wherever they stand."""
    hidden = {name: "hidden" for name in url.query if "password" in name}
    return url.update_query_dict(hidden).render_as_string(hide_password=True)


def _make_folder(database: Database) -> None:
    if database.file is None:
        return
    folder = database.file.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"database {database.shown_url}: cannot create the folder {folder}: {error.strerror}; "
            "choose another PROMPTMILL_HOME or PROMPTMILL_DATABASE_URL",
            code="database_unwritable",
        ) from error


def _sqlite_engine(url: URL) -> Engine:
    engine = create_engine(
        url,
        connect_args={"timeout": BUSY_TIMEOUT_S},
        hide_parameters=True,
        pool_size=8,
        max_overflow=64,
        pool_timeout=BUSY_TIMEOUT_S,
    )

    @event.listens_for(engine, "connect")
    def prepare(dbapi_connection: sqlite3.Connection, _record: object) -> None:
        dbapi_connection.isolation_level = None  # the driver begins nothing by itself; `Database` does
        _use_wal(dbapi_connection)
        for pragma in (
            "synchronous = NORMAL",  # with WAL: a power cut may lose the last transactions, never corrupts
            "foreign_keys = ON",
            "journal_size_limit = 67108864",
            "cache_size = -16000",  # 16 MB for each connection
        ):
            dbapi_connection.execute(f"PRAGMA {pragma}")

    return engine


def _end_sqlite(connection: Connection, how: Literal["COMMIT", "ROLLBACK"]) -> None:
    if connection.in_transaction():  # some statement went SQLAlchemy's way, which then noted a transaction of its own
        (connection.commit if how == "COMMIT" else connection.rollback)()
    else:
        run_sqlite(connection, how)


def _take_write_lock(connection: Connection) -> None:
    """Begin a write transaction as soon as no other process has one.

    Not by SQLAlchemy's transaction, which takes longer than a small one of SQLite's, nor by its event for a beginning:
    one that listens makes each statement of every transaction cost more.

    SQLite's own waiting looks again after 1, 2, 5, 10, ... 100 ms. Another process's transaction mostly lasts a
    millisecond or two, and who meets a few of them in a row would wait many times as long as they last.
    """
    deadline, pause_s = time.monotonic() + BUSY_TIMEOUT_S, SHORTEST_LOCK_PAUSE_S
    while True:
        try:
            run_sqlite(connection, "BEGIN IMMEDIATE")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, LONGEST_LOCK_PAUSE_S)


def _use_wal(connection: sqlite3.Connection) -> None:
    """Switch the file to write-ahead logging. SQLite does not wait for a lock here, so we do."""
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
                connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
        time.sleep(0.02)


def _postgres_engine(url: URL, shown: str) -> Engine:
    try:
        engine = create_engine(
            url,
            hide_parameters=True,
            pool_size=8,
            max_overflow=32,
            pool_timeout=BUSY_TIMEOUT_S,
            connect_args={
                "connect_timeout": 10,
                "application_name": "promptmill",
                # A peer that vanished without a word is noticed within about half a minute.
                "keepalives_idle": 10,
                "keepalives_interval": 5,
                "keepalives_count": 3,
                "tcp_user_timeout": 30000,
            },
        )
    except ModuleNotFoundError as error:
        raise StorageError(
            f"database {shown} needs the Postgres driver; install it with: pip install 'promptmill[postgres]'",
            code="database_driver_missing",
        ) from error

    @event.listens_for(engine, "connect")
    def prepare(dbapi_connection: Any, _record: object) -> None:
        # Not as an option of the connection, which PgBouncer refuses.
        dbapi_connection.autocommit = True
        dbapi_connection.execute(f"SET idle_in_transaction_session_timeout = {SILENT_TRANSACTION_S * 1000:.0f}")
        dbapi_connection.autocommit = False

    # A connection that has lain idle is tried before it is used, so that a restarted server costs a quiet reconnect.
    # Trying each time (SQLAlchemy's own pre-ping) would cost a round trip for every transaction.
    @event.listens_for(engine, "checkin")
    def note(_dbapi_connection: object, record: Any) -> None:
        record.info["returned_at"] = time.monotonic()

    @event.listens_for(engine, "checkout")
    def try_out(dbapi_connection: Any, record: Any, _proxy: object) -> None:
        if time.monotonic() - record.info.get("returned_at", math.inf) > PING_AFTER_S:
            try:
                dbapi_connection.execute("SELECT 1")
                dbapi_connection.rollback()
            except Exception as error:
                raise exc.DisconnectionError from error

    return engine


def _busy(shown: str) -> StorageError:
    return StorageError(
        f"database {shown} is locked by another writer for more than {BUSY_TIMEOUT_S:.0f} s; "
        "look for a backup or another program that holds the file open",
        code="database_busy",
        retryable=True,
    )


def _explain_sqlite(said: str, shown: str) -> StorageError:
    lowered = said.lower()
    if "locked" in lowered or "busy" in lowered:
        return _busy(shown)
    if "disk is full" in lowered or (_may_mean_full(lowered) and _is_full(shown)):
        return StorageError(
            f"database {shown}: the disk is full; free some space, the work goes on by itself",
            code="disk_full",
            retryable=True,
        )
    if "readonly" in lowered or "read-only" in lowered:
        return StorageError(
            f"database {shown} cannot be written (read-only file, folder or file system); "
            "make it writable or choose another PROMPTMILL_DATABASE_URL",
            code="database_read_only",
        )
    if "not a database" in lowered:
        return StorageError(
            f"{shown} is a file of another kind, not an SQLite database; "
            "move it away or choose another PROMPTMILL_DATABASE_URL",
            code="not_a_database",
        )
    if "malformed" in lowered:
        return StorageError(
            f"database {shown} is damaged ({said}); restore it from a backup, or move it away to start afresh",
            code="database_damaged",
        )
    if "unable to open" in lowered:
        return StorageError(
            f"database {shown} cannot be opened; check that its folder exists and that you may write there",
            code="database_unwritable",
        )
    if "disk i/o" in lowered:
        return StorageError(
            f"database {shown}: the disk failed to read or write ({said}); see whether your quota of it is used up, "
            "and what the system's log (dmesg) says of it",
            code="database_io",
            retryable=True,
        )
    if "constraint" in lowered:
        return StorageError(f"database {shown}: {said}", code="constraint_violated")
    return StorageError(f"database {shown}: {said}", code="database_error")


def _may_mean_full(lowered: str) -> bool:
    """Whether SQLite says so on a full disk too: of the files beside the database, which it maps into memory."""
    return "disk i/o" in lowered or "unable to open" in lowered


def _is_full(shown: str) -> bool:
    """Whether the file system of an SQLite database has no room for another page, or for another file."""
    try:
        found = os.statvfs(Path(make_url(shown).database or "").expanduser().absolute().parent)
    except (OSError, AttributeError):  # not there; Windows has no such call
        return False
    # Some file systems know no number of files: it is 0 of 0 then.
    return found.f_bavail * found.f_frsize < LEAST_FREE_BYTES or (found.f_files > 0 and found.f_favail == 0)


def _explain_postgres(said: str, sqlstate: str, shown: str, error: exc.DBAPIError) -> StorageError:
    lowered = said.lower()
    if sqlstate.startswith("28") or "password authentication failed" in lowered or "no password supplied" in lowered:
        return StorageError(
            f"database {shown} refuses this user or password; correct PROMPTMILL_DATABASE_URL",
            code="database_login_refused",
        )
    if sqlstate == "3D000" or ("database" in lowered and "does not exist" in lowered and not sqlstate):
        return StorageError(
            f"database {shown} does not exist on that server; create it (createdb NAME) or correct "
            "PROMPTMILL_DATABASE_URL",
            code="database_missing",
        )
    if sqlstate == "53100":
        return StorageError(
            f"database {shown}: the server's disk is full; free some space, the work goes on by itself",
            code="disk_full",
            retryable=True,
        )
    if sqlstate == "25006":
        return StorageError(
            f"database {shown} is read-only (a standby?); point PROMPTMILL_DATABASE_URL at the primary",
            code="database_read_only",
            retryable=True,
        )
    if sqlstate in ("40001", "40P01", "55P03"):
        return StorageError(f"database {shown}: {said}", code="database_busy", retryable=True)
    if sqlstate.startswith("23"):
        return StorageError(f"database {shown}: {said.split(' DETAIL:')[0]}", code="constraint_violated")
    # Class 08: connection; 57P0x: the server is shutting down or starting up; 53300: too many connections; 25P03: the
    # transaction was silent for too long.
    lost = error.connection_invalidated or sqlstate[:2] in ("08", "53", "57") or sqlstate == "25P03"
    if lost or (not sqlstate and isinstance(error, exc.OperationalError)):
        return StorageError(
            f"database {shown} cannot be reached ({said}); check that the server runs and that PROMPTMILL_DATABASE_URL "
            "is right",
            code="database_unreachable",
            retryable=True,
        )
    return StorageError(f"database {shown}: {said}", code="database_error")
