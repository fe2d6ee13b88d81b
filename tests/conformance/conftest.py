"""One gateway and one worker for all conformance tests, as processes; tests keep apart by their tenants."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from jobs.queue_server import QueueServerError, find_server
from tests.checkpoints import DESCRIPTION, random_weights, save_huggingface
from tests.conftest import missing
from tests.drills.mill import Mill
from tests.drills.served import ServedMill
from workers.models.convert import convert

MODEL = "tiny"
# Webhooks may go to this machine, where their receiver stands.
SETTINGS = {"ENGINE_NULL_TOKEN_S": "0.002", "WEBHOOK_ALLOWED_NETWORKS": "127.0.0.1/32"}


@pytest.fixture(scope="session")
def live() -> Iterator[ServedMill]:
    """A supervisor with a worker on the null engine, and a gateway."""
    try:
        find_server()
    except QueueServerError as error:
        missing(error.message)
    folder = Path(tempfile.mkdtemp(prefix="pm-conf-"))  # a short path: sockets lie in it
    try:
        source = save_huggingface(folder / "source", DESCRIPTION, random_weights(DESCRIPTION))
        artifact = convert(str(source), folder / MODEL, dtype="float32", cache=folder).path
        with Mill(folder, artifact, settings=SETTINGS) as mill:
            served = ServedMill(mill)
            mill.up()
            served.serve()
            with served_client(served) as client:
                mill.wait(lambda: has_worker(client), "the worker's start")
            yield served
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def has_worker(client: openai.OpenAI) -> bool:
    return any(model.to_dict().get("workers") for model in client.models.list())


def served_client(served: ServedMill, tenant: str = "default", **options: Any) -> openai.OpenAI:
    return openai.OpenAI(**{"base_url": served.url, "api_key": served.key(tenant), **options})


_tenants = itertools.count(1)


@pytest.fixture
def tenant() -> str:
    """A tenant that nobody else is."""
    return f"conformance-{next(_tenants)}"


@pytest.fixture
def client(live: ServedMill, tenant: str) -> Iterator[openai.OpenAI]:
    with served_client(live, tenant) as client:
        yield client
