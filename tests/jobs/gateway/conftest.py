"""A gateway in a thread of the tests' process, real in all else: uvicorn, database, queue server, worker process."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import structlog
from celery import Celery

from jobs.gateway.server import Server, make_server
from jobs.keys import make_key
from jobs.queue import make_app
from jobs.queue_server import open_queue_server
from jobs.settings import Settings
from jobs.sweep import sweep
from jobs.up import with_queue_url
from jobs.worker_process import WorkerProcess
from storage import queries
from storage.database import Database, open_database, upgrade_schema
from tests.checkpoints import DESCRIPTION, random_weights, save_huggingface
from tests.conftest import wait_until
from workers.models.convert import convert

MODEL = "tiny"
PATIENCE_S = 120.0


@pytest.fixture(scope="session")
def tiny_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a byte-level tokenizer, for workers on the null engine."""
    folder = tmp_path_factory.mktemp("gateway-artifact")
    source = save_huggingface(folder / "source", DESCRIPTION, random_weights(DESCRIPTION))
    return convert(str(source), folder / MODEL, dtype="float32", cache=folder).path


@dataclass(frozen=True)
class RunningGateway:
    """A gateway that listens. url: without /v1."""

    url: str
    settings: Settings
    database: Database
    server: Server

    def key(self, tenant: str = "default") -> str:
        return make_key(self.database, tenant=tenant, name="tests").key

    def client(self, tenant: str = "default", **options: Any) -> openai.OpenAI:
        """The SDK with a key of that tenant."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.key(tenant), **options)


MakeGateway = Callable[..., RunningGateway]


@pytest.fixture
def served_settings(settings: Settings, database_url: str, tiny_artifact: Path) -> Settings:
    """Settings of a home that has the tiny model, on either kind of database."""
    return prepared(settings, database_url, tiny_artifact)


@pytest.fixture
def sqlite_settings(settings: Settings, sqlite_url: str, tiny_artifact: Path) -> Settings:
    """The same where the kind of database does not matter."""
    return prepared(settings, sqlite_url, tiny_artifact)


def prepared(settings: Settings, url: str, artifact: Path) -> Settings:
    settings.artifacts_dir.mkdir(parents=True, exist_ok=True)
    (settings.artifacts_dir / MODEL).symlink_to(artifact, target_is_directory=True)
    return changed(
        settings,
        database={"url": url},
        engine={"flavour": "null", "context_length": 128, "max_batch_size": 16},
        gateway={"port": 0},
    )


def changed(settings: Settings, **groups: dict[str, Any]) -> Settings:
    """The settings with some fields of some groups changed."""
    made = {name: getattr(settings, name).model_copy(update=fields) for name, fields in groups.items()}
    return settings.model_copy(update=made)


@pytest.fixture
def make_gateway() -> Iterator[MakeGateway]:
    """Start gateways; they are stopped at the end."""
    with contextlib.ExitStack() as stack:

        def make(settings: Settings) -> RunningGateway:
            return stack.enter_context(running_gateway(settings))

        yield make


@contextlib.contextmanager
def running_gateway(settings: Settings) -> Iterator[RunningGateway]:
    server = make_server(settings)
    thread = threading.Thread(target=server.run, name="gateway")
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive(), what="the gateway's start")
        assert server.started, "the gateway ended at once"
        port = server.servers[0].sockets[0].getsockname()[1]
        with open_database(settings.database.url) as database:
            yield RunningGateway(f"http://127.0.0.1:{port}", settings, database, server)
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive(), "the gateway did not stop"


@pytest.fixture
def gateway(served_settings: Settings, make_gateway: MakeGateway) -> RunningGateway:
    """On SQLite and on Postgres."""
    return make_gateway(served_settings)


@pytest.fixture(scope="module")
def shared_settings(tiny_artifact: Path) -> Iterator[Settings]:
    """A home on SQLite with its own queue server, for all tests of a module; tests keep apart by their tenants."""
    folder = Path(tempfile.mkdtemp(prefix="pm-gw-"))
    url = f"sqlite:///{folder / 'promptmill.db'}"
    try:
        with open_database(url) as database:
            upgrade_schema(database)
        yield prepared(Settings(home=folder / "home"), url, tiny_artifact)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def shared_gateway(shared_settings: Settings) -> Iterator[RunningGateway]:
    """Started once for a module. Give each test a tenant of its own."""
    with running_gateway(shared_settings) as gateway:
        yield gateway


@pytest.fixture
def tenant() -> str:
    return f"tenant-{next(_tenants)}"


_tenants = itertools.count(1)


@pytest.fixture
def client(gateway: RunningGateway) -> Iterator[openai.OpenAI]:
    with gateway.client() as client:
        yield client


@pytest.fixture
def shared_client(shared_gateway: RunningGateway, tenant: str) -> Iterator[openai.OpenAI]:
    """The SDK for a tenant that nobody else is."""
    with shared_gateway.client(tenant) as client:
        yield client


StartWorker = Callable[[Settings], WorkerProcess]


@pytest.fixture
def start_worker(tiny_artifact: Path) -> Iterator[StartWorker]:
    """Start a worker process on the null engine, with the periodic pass beside it, and wait until it is ready."""
    with contextlib.ExitStack() as stack:
        yield lambda settings: stack.enter_context(running_worker(settings, tiny_artifact))


@pytest.fixture(scope="module")
def shared_worker(shared_gateway: RunningGateway, tiny_artifact: Path) -> Iterator[WorkerProcess]:
    """A worker for the shared gateway."""
    with running_worker(shared_gateway.settings, tiny_artifact) as worker:
        yield worker


@contextlib.contextmanager
def running_worker(settings: Settings, artifact: Path) -> Iterator[WorkerProcess]:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(open_queue_server(settings))
        settings = with_queue_url(settings, server.url)
        database = stack.enter_context(open_database(settings.database.url))
        app = make_app(settings.queue)
        stack.callback(app.close)
        worker = WorkerProcess(settings, artifact)
        stack.callback(worker.stop, 15.0)
        stack.enter_context(_sweeper(database, app, settings))

        def is_ready() -> bool:
            assert worker.exit_code() is None, worker.last_words()
            with database.read() as connection:
                return bool(queries.live_workers(connection, database.now(), model=MODEL))

        wait_until(is_ready, seconds=PATIENCE_S, what="the worker's start")
        yield worker


@contextlib.contextmanager
def _sweeper(database: Database, app: Celery, settings: Settings) -> Iterator[None]:
    """The periodic pass of `promptmill up`."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(0.1):
            try:
                sweep(database, app, settings, database.now())
            except Exception:  # the queue server of a test may go before us
                structlog.get_logger().warning("test_sweep_failed")

    thread = threading.Thread(target=run, name="sweeper")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(60)


def chat_line(custom_id: str, content: str = "Say it again.", **body: Any) -> dict[str, Any]:
    """A line of a batch file for chat."""
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 8, **body},
    }


def jsonl(lines: Sequence[object]) -> bytes:
    """Lines of a file; what is bytes already is taken as it is."""
    return b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)


def upload(client: openai.OpenAI, lines: Sequence[object], name: str = "input.jsonl") -> Any:
    return client.files.create(file=(name, jsonl(lines)), purpose="batch")


def wait_for_status(client: openai.OpenAI, batch_id: str, *statuses: str) -> Any:
    """Poll a batch until it has one of these; a final one that is none of them fails the test."""
    final = ("completed", "failed", "expired", "cancelled")
    found: list[Any] = []

    def has_it() -> bool:
        batch = client.batches.retrieve(batch_id)
        found[:] = [batch]
        assert batch.status in statuses or batch.status not in final, f"{batch.status}: {batch.errors}"
        return batch.status in statuses

    wait_until(has_it, seconds=PATIENCE_S, what=f"status {' or '.join(statuses)}")
    return found[0]
