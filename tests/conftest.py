"""Real services for every test: a private queue server, and a database on SQLite and on a private Postgres.

A database is fresh for each test, copied from a migrated template; the queue is emptied before each test. A service
that this machine lacks skips its tests on a laptop and fails them in CI.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest
import redis
from celery import Celery
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings

from jobs.queue import make_app
from jobs.queue_server import QueueServerError, find_server
from jobs.settings import QueueSettings, Settings, load_settings
from storage.database import Database, open_database, upgrade_schema

START_S = 90.0

# Tests start hundreds of our processes. Where this is set, as it often is in containers, each of them would compile our
# packages anew, for a quarter of a second or more.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Times vary on shared machines: a slow example is not a wrong one. A check of a change tries the same examples each
# time; new ones are looked for at home.
hypothesis_settings.register_profile(
    "promptmill",
    deadline=None,
    derandomize=os.environ.get("HYPOTHESIS_DERANDOMIZE") == "1",
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
hypothesis_settings.load_profile("promptmill")


def missing(what: str) -> NoReturn:
    """Skip here, fail in CI."""
    if os.environ.get("CI"):
        pytest.fail(what)
    pytest.skip(what)


def wait_until(holds: object, *, seconds: float = START_S, what: str = "it") -> None:
    """Poll a callable until it returns something true."""
    assert callable(holds)
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test sees the settings of whoever runs it, nor touches their home folder."""
    for name in list(os.environ):
        if name.upper().startswith("PROMPTMILL_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PROMPTMILL_HOME", str(tmp_path / "home"))


# --- settings ----------------------------------------------------------------------------------------------------


@pytest.fixture
def settings(queue_url: str) -> Iterator[Settings]:
    """Settings with a home of their own and the tests' queue server."""
    loaded = load_settings(env_file=None)
    yield loaded.model_copy(update={"queue": loaded.queue.model_copy(update={"url": queue_url})})
    _remove_runtime_dir(loaded)


@pytest.fixture
def home_settings() -> Iterator[Settings]:
    """Settings with a home of their own and no queue URL: they ask for the embedded server."""
    loaded = load_settings(env_file=None)
    yield loaded
    _remove_runtime_dir(loaded)


def _remove_runtime_dir(loaded: Settings) -> None:
    if not loaded.runtime_dir.is_relative_to(loaded.home):
        shutil.rmtree(loaded.runtime_dir, ignore_errors=True)


# --- queue -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def queue_server_socket() -> Iterator[Path]:
    """The socket of a private queue server that keeps nothing on disk."""
    try:
        binary = find_server()
    except QueueServerError as error:
        missing(error.message)
    folder = Path(tempfile.mkdtemp(prefix="pm-queue-"))
    path = folder / "queue.sock"
    process = subprocess.Popen(
        [binary.path, "--port", "0", "--unixsocket", str(path), "--save", "", "--appendonly", "no"],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_until(path.exists, what="the queue server's start")
        yield path
    finally:
        process.terminate()
        process.wait(60)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def queue_url(queue_server_socket: Path) -> str:
    """An empty queue."""
    with redis.Redis(unix_socket_path=str(queue_server_socket)) as client:
        client.flushall()
    return f"redis+socket://{queue_server_socket}"


@pytest.fixture
def queue_client(queue_url: str, queue_server_socket: Path) -> Iterator[redis.Redis]:
    """Redis itself, to look at what our code did."""
    with redis.Redis(unix_socket_path=str(queue_server_socket), decode_responses=True) as client:
        yield client


@pytest.fixture
def app(queue_url: str) -> Iterator[Celery]:
    app = make_app(QueueSettings(url=queue_url))
    yield app
    app.close()


# --- databases ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PostgresServer:
    """A private server. Over its socket user `postgres` needs no password; over TCP it has one."""

    socket_dir: Path
    port: int
    process: subprocess.Popen[bytes]

    def url(self, name: str) -> str:
        return f"postgresql://postgres@/{name}?host={self.socket_dir}&port={self.port}"

    def run(self, *statements: str) -> None:
        import psycopg

        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "template.db"
    with open_database(f"sqlite:///{path}") as database:
        upgrade_schema(database)
    return path  # closing the last connection has folded the log into the file


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    bin_dir = _postgres_binaries()
    if bin_dir is None:
        missing("no Postgres server on this machine (initdb and postgres on PATH or in /usr/lib/postgresql)")
    pytest.importorskip("psycopg", reason="the extra `postgres` is not installed")
    folder = Path(tempfile.mkdtemp(prefix="pm-pg-"))
    as_user: dict[str, object] = {}
    if os.getuid() == 0:  # Postgres refuses to run as root
        owner = _unprivileged_user()
        os.chown(folder, owner.pw_uid, owner.pw_gid)
        as_user = {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []}
    log_file = folder / "log"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    data = folder / "data"
    made = subprocess.run(  # type: ignore[call-overload]
        [bin_dir / "initdb", "-D", data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"],
        capture_output=True,
        text=True,
        cwd=folder,
        **as_user,
    )
    if made.returncode != 0:
        shutil.rmtree(folder, ignore_errors=True)
        missing(f"initdb failed: {made.stderr[-500:]}")
    (data / "pg_hba.conf").write_text("local all all trust\nhost all all 127.0.0.1/32 scram-sha-256\n")
    options = {
        "unix_socket_directories": str(folder),
        "listen_addresses": "127.0.0.1",
        "port": str(port),
        "fsync": "off",
        "max_connections": "200",
        "autovacuum": "off",
    }
    with log_file.open("wb") as log:
        process = subprocess.Popen(  # type: ignore[call-overload]
            [bin_dir / "postgres", "-D", data, *(f"--{name}={value}" for name, value in options.items())],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
            **as_user,
        )
    server = PostgresServer(folder, port, process)
    try:
        _wait_for_postgres(server, log_file)
        server.run("ALTER USER postgres PASSWORD 'right'", "CREATE DATABASE pm_template")
        with open_database(server.url("pm_template")) as database:
            upgrade_schema(database)
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)  # fast shutdown
        process.wait(20)
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for_postgres(server: PostgresServer, log_file: Path) -> None:
    import psycopg

    deadline = time.monotonic() + START_S
    while True:
        if server.process.poll() is not None or time.monotonic() > deadline:
            missing(f"Postgres did not start: {log_file.read_text(errors='replace')[-500:]}")
        try:
            server.run("SELECT 1")
            return
        except psycopg.OperationalError:
            time.sleep(0.05)


def _postgres_binaries() -> Path | None:
    found = shutil.which("postgres")
    folders = [Path(found).resolve().parent] if found else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in folders if (folder / "initdb").exists()), None)


def _unprivileged_user() -> pwd.struct_passwd:
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    missing("running as root, and there is no user to start Postgres as")


_numbers = itertools.count(1)


@pytest.fixture
def sqlite_url(sqlite_template: Path, tmp_path: Path) -> str:
    path = tmp_path / "home" / "promptmill.db"
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(sqlite_template, path)
    return f"sqlite:///{path}"


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    name = f"pm_test_{next(_numbers)}"
    postgres_server.run(f"CREATE DATABASE {name} TEMPLATE pm_template")
    yield postgres_server.url(name)
    postgres_server.run(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest) -> str:
    """A migrated, empty database of either kind; a test that takes it runs twice."""
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    with open_database(database_url) as database:
        yield database


@pytest.fixture
def sqlite_database(sqlite_url: str) -> Iterator[Database]:
    """For tests of what does not depend on the database's kind."""
    with open_database(sqlite_url) as database:
        yield database
