"""How a gateway starts, does not start, and is stopped in the midst of it: as a process, from its standard error."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from celery import Celery

from jobs.gateway.replies import Replies
from jobs.gateway.state import Gateway
from jobs.listening import ListenError, explain, open_sockets
from jobs.queue import redis_url
from jobs.settings import Settings, environment_of
from storage.database import Database
from tests.conftest import wait_until

fcntl = pytest.importorskip("fcntl")

PATIENCE_S = 120.0


@contextmanager
def serving(settings: Settings, *arguments: str, under: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    """`promptmill serve` with these settings; without a queue URL it has the embedded queue server."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PROMPTMILL_")}
    settings.home.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        [*under, sys.executable, "-m", "jobs.cli", "serve", *arguments],
        env=environment | environment_of(settings),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=settings.home,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ended(settings: Settings, *arguments: str, under: tuple[str, ...] = ()) -> tuple[int, str]:
    """The exit code and the last words of a gateway that does not start."""
    with serving(settings, *arguments, under=under) as process:
        _, said = process.communicate(timeout=PATIENCE_S)
        return process.returncode, said


def test_a_taken_port_is_said_before_anything_is_opened(home_settings: Settings) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        code, said = ended(home_settings, "--port", str(port))
    assert said == (
        f"error: port {port} of 127.0.0.1 is taken; choose another with --port or PROMPTMILL_GATEWAY_PORT\n"
    )
    assert code == 2
    assert not (home_settings.home / "promptmill.db").exists()
    assert not home_settings.queue_dir.exists()


def test_a_host_of_another_machine_is_said(home_settings: Settings) -> None:
    code, said = ended(home_settings, "--host", "203.0.113.1", "--port", "0")
    assert said.startswith("error: host 203.0.113.1 is no address of this machine; choose another with --host or ")
    assert code == 2


def test_a_port_that_this_user_may_not_open_has_an_exit_code_of_its_own(home_settings: Settings) -> None:
    first = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start")
    if not first.exists() or int(first.read_text()) <= 80:
        pytest.skip("every user may open every port here")
    under: tuple[str, ...] = ()
    if os.geteuid() == 0:
        found = shutil.which("setpriv")
        if found is None:
            pytest.skip("root may open every port, and there is no setpriv to give that up")
        under = (found, "--bounding-set=-net_bind_service", "--inh-caps=-net_bind_service")
    code, said = ended(home_settings, "--port", "80", under=under)
    assert said.startswith("error: port 80 of 127.0.0.1 is not for this user to open, ")
    assert code == 3


def test_what_else_keeps_it_from_starting_is_said_and_ends_it(home_settings: Settings) -> None:
    home_settings.home.mkdir(parents=True)
    (home_settings.home / "promptmill.db").write_bytes(b"no database at all\n" * 1000)
    code, said = ended(home_settings, "--port", "0")
    assert said.startswith("error: ") and str(home_settings.home / "promptmill.db") in said, said
    assert "Traceback" not in said
    assert code == 2


def test_a_reason_that_nobody_foresaw_is_in_the_log(home_settings: Settings) -> None:
    home_settings.home.mkdir(parents=True)
    home_settings.files_dir.write_text("no folder")
    code, said = ended(home_settings, "--port", "0")
    log = home_settings.logs_dir / "serve.log"
    assert said == f"error: the gateway could not start; {log} says why\n"
    assert "FileExistsError" in log.read_text()
    assert code == 2


def test_sigterm_ends_a_gateway_that_waits_for_something_while_it_starts(home_settings: Settings) -> None:
    home_settings.queue_dir.mkdir(parents=True)
    with (home_settings.queue_dir / "start.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as another process that is starting the queue server
        with serving(home_settings, "--port", "0") as process:
            users = home_settings.runtime_dir
            wait_until(users.exists, what="the gateway's look for the queue server")
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 128 + signal.SIGTERM


def test_sigterm_as_soon_as_it_serves_ends_it(home_settings: Settings) -> None:
    with serving(home_settings, "--port", "0") as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("serving http://127.0.0.1:")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode == -signal.SIGTERM


def test_what_listens_for_answers_ends_at_whatever_moment_it_is_told_to(
    settings: Settings, sqlite_database: Database, app: Celery
) -> None:
    """The redis package loses a cancellation in some moments of its connecting, for good."""
    gateway = Gateway(settings, sqlite_database, app, settings.files_dir)

    async def leave_after(turns: int) -> None:
        async with Replies(gateway, redis_url(settings.queue.url)):
            for _ in range(turns):
                await asyncio.sleep(0)

    async def try_all() -> None:
        for turns in range(80):
            await asyncio.wait_for(leave_after(turns), PATIENCE_S)

    asyncio.run(try_all())


def test_a_name_that_stands_for_several_addresses_is_listened_on_at_all_of_them() -> None:
    sockets = open_sockets("localhost", 0)
    try:
        assert {each.getsockname()[0] for each in sockets} <= {"127.0.0.1", "::1"}
        for each in sockets:
            with socket.create_connection(each.getsockname()[:2], timeout=PATIENCE_S):
                pass
    finally:
        for each in sockets:
            each.close()


@pytest.mark.parametrize(
    ("number", "code", "way_out"),
    [
        (errno.EADDRINUSE, "port_taken", "PROMPTMILL_GATEWAY_PORT"),
        (errno.EACCES, "port_forbidden", "PROMPTMILL_GATEWAY_PORT"),
        (errno.EADDRNOTAVAIL, "host_not_here", "PROMPTMILL_GATEWAY_HOST"),
        (errno.ENETDOWN, "address_refused", "PROMPTMILL_GATEWAY_HOST"),
    ],
)
def test_each_reason_not_to_listen_has_its_code_and_way_out(number: int, code: str, way_out: str) -> None:
    error = explain(OSError(number, os.strerror(number)), "10.0.0.9", 8000)
    assert isinstance(error, ListenError)
    assert error.code == code and way_out in error.message and "10.0.0.9" in error.message


def test_a_host_without_an_address_is_said() -> None:
    with pytest.raises(ListenError, match="host no host has no address") as refused:
        open_sockets("no host", 0)
    assert refused.value.code == "host_unknown"
