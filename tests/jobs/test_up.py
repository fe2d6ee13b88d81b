"""What services do at their start about a queue that is not theirs to start."""

from __future__ import annotations

import contextlib
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from jobs import up
from jobs.artifacts import FoundArtifact
from jobs.doors import serve_doors
from jobs.gateway.server import serve as serve_http
from jobs.queue import QueueError
from jobs.queue_server import QueueServerError, find_server
from jobs.settings import QueueSettings, Settings
from jobs.up import StopSignals, UpObserver, await_queue, tick_forever
from tests.conftest import missing, wait_until
from workers.worker import run_worker

Start = Callable[[], None]


def _serve_up(settings: Settings, observer: UpObserver, signals: StopSignals) -> None:
    up.serve(settings, FoundArtifact(Path("nowhere"), "m", "0" * 64), 1, observer, signals)


def _serve_http(settings: Settings, observer: UpObserver, _signals: StopSignals) -> None:
    serve_http(settings, observer.note)


def _work(settings: Settings, _observer: UpObserver, _signals: StopSignals) -> None:
    run_worker(settings, Path("nowhere"))


SERVICES = [_serve_up, tick_forever, serve_doors, _serve_http]


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def start(port: int, tmp_path: Path) -> Iterator[Start]:
    """Start a queue server with a password on that port."""
    try:
        binary = find_server().path
    except QueueServerError as error:
        missing(error.message)
    processes: list[subprocess.Popen[bytes]] = []

    def begin() -> None:
        options = ["--port", str(port), "--bind", "127.0.0.1", "--requirepass", "right", "--save", ""]
        processes.append(subprocess.Popen([binary, *options], cwd=tmp_path, stdout=subprocess.DEVNULL))

    yield begin
    for process in processes:
        process.terminate()
        process.wait(60)


@pytest.mark.parametrize("service", [*SERVICES, _work])
@pytest.mark.parametrize(
    ("login", "database", "code"),
    [(":wrong@", 0, "queue_login_refused"), ("", 0, "queue_login_refused"), (":right@", 99, "queue_database_missing")],
)
def test_a_queue_that_refuses_us_is_named_at_once(
    home_settings: Settings, start: Start, port: int, service: Callable[..., None], login: str, database: int, code: str
) -> None:
    """`queue: ready`, and then nothing for as long as anybody looks, is the alternative."""
    start()
    with redis.Redis(port=port, password="right") as client:
        wait_until(lambda: _answers(client), what="the queue server")
    said: list[str] = []
    with pytest.raises(QueueError, match="PROMPTMILL_QUEUE_URL") as raised:
        service(
            up.with_queue_url(home_settings, f"redis://{login}127.0.0.1:{port}/{database}"),
            UpObserver(said.append),
            StopSignals(),
        )
    assert raised.value.code == code
    assert "wrong" not in raised.value.message
    assert said == []


@pytest.mark.parametrize("service", SERVICES)
def test_a_queue_that_does_not_come_is_named_when_it_was_waited_for(
    home_settings: Settings, monkeypatch: pytest.MonkeyPatch, service: Callable[..., None]
) -> None:
    monkeypatch.setattr(up, "QUEUE_WAIT_S", 0.2)
    said: list[str] = []
    with pytest.raises(QueueError, match="cannot be reached") as raised:
        service(
            up.with_queue_url(home_settings, "redis://:secret@127.0.0.1:1/0"), UpObserver(said.append), StopSignals()
        )
    assert said == [f"waiting up to 0.2 s: {raised.value.message}"]
    assert "secret" not in raised.value.message


def test_a_queue_server_may_come_later_than_we(start: Start, port: int) -> None:
    """As after a reboot, where nothing says which of them is first."""
    waited: list[str] = []

    def note(text: str) -> None:
        waited.append(text)
        start()

    assert await_queue(QueueSettings(url=f"redis://:right@127.0.0.1:{port}/0"), note, StopSignals())
    assert len(waited) == 1


def test_a_signal_ends_the_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    signals = StopSignals()
    assert not await_queue(QueueSettings(url="redis://127.0.0.1:1/0"), lambda _text: signals.add(), signals)


def _answers(client: redis.Redis) -> bool:
    with contextlib.suppress(redis.ConnectionError):
        return bool(client.ping())
    return False
