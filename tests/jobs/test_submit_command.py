"""`promptmill submit` by its options: whose work it is, what is the same work, and whose turn comes next."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from celery import Celery
from click.testing import CliRunner, Result

from jobs.cli import cli
from jobs.dispatch import top_up
from jobs.queue import waiting_ids
from jobs.settings import load_settings
from storage import queries, transitions
from storage.database import Database, open_database, upgrade_schema
from storage.models import WorkerStatus
from storage.queries import BatchRow
from storage.transitions import NewWorker


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Database]:
    """The home's database, with a worker that serves the model: no artifact is needed to submit to it."""
    with open_database(load_settings(env_file=None).database.url) as database:
        upgrade_schema(database)
        now = database.now() + 3600.0
        with database.write() as connection:
            transitions.register_worker(connection, NewWorker("w", "host", 1, "tiny"), now)
            transitions.update_worker(connection, "w", now, status=WorkerStatus.READY, max_batch_size=64)
        yield database


def submit(path: Path, *options: str) -> Result:
    return CliRunner().invoke(cli, ["submit", str(path), "--model", "tiny", "--quiet", *options])


def submitted(database: Database, result: Result) -> BatchRow:
    assert result.exit_code == 0, result.output
    with database.read() as connection:
        batch = queries.find_batch(connection, result.stdout.split()[0])
    assert batch is not None
    return batch


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "in.txt"
    path.write_text("one\ntwo\n")
    return path


def test_an_idempotency_key_means_one_batch_for_ever(home: Database, prompts: Path) -> None:
    first = submitted(home, submit(prompts, "--idempotency-key", "k1"))
    assert submitted(home, submit(prompts, "--idempotency-key", "k1")).id == first.id
    assert submitted(home, submit(prompts, "--idempotency-key", "k2")).id != first.id
    prompts.write_text("something else\n")
    refused = submit(prompts, "--idempotency-key", "k1")
    assert refused.exit_code == 2
    assert "idempotency key 'k1' stands for another input" in " ".join(refused.output.split())


def test_the_same_input_is_the_same_batch_unless_it_is_to_run_again(home: Database, prompts: Path) -> None:
    first = submitted(home, submit(prompts))
    assert submitted(home, submit(prompts)).id == first.id
    assert submitted(home, submit(prompts, "--again")).id != first.id


def test_a_tenant_has_batches_and_keys_of_its_own(home: Database, prompts: Path) -> None:
    ours = submitted(home, submit(prompts, "--idempotency-key", "k"))
    theirs = submitted(home, submit(prompts, "--idempotency-key", "k", "--tenant", "lab", "--metadata", '{"a": 1}'))
    assert (ours.tenant, theirs.tenant) == ("default", "lab")
    assert ours.id != theirs.id
    assert json.loads(theirs.metadata or "") == {"a": 1}


def test_tenants_get_their_share_by_the_weight_that_the_command_set(
    home: Database, tmp_path: Path, app: Celery, queue_url: str
) -> None:
    """Two tenants with equal work, one with three times the weight of the other."""
    for tenant, weight in (("heavy", "3"), ("light", "1")):
        done = CliRunner().invoke(cli, ["tenant", "set", tenant, "--weight", weight])
        assert done.exit_code == 0, done.output
        path = tmp_path / f"{tenant}.txt"
        path.write_text("".join(f"question {number} of {tenant}\n" for number in range(2000)))
        submitted(home, submit(path, "--tenant", tenant))
    settings = load_settings(env_file=None).queue.model_copy(update={"url": queue_url})
    queued = top_up(home, app, settings, home.now())
    with home.read() as connection:
        batches = {batch.id: batch.tenant for batch in queries.list_batches(connection)}
        tenant_of = {
            request.id: tenant
            for batch_id, tenant in batches.items()
            for request in queries.next_pending(connection, batch_id, 5000)
        }
    waiting = waiting_ids(app, ["tiny"]) or set()
    assert len(waiting) == queued
    left = {tenant: list(tenant_of.values()).count(tenant) for tenant in ("heavy", "light")}
    had = {tenant: 2000 - count for tenant, count in left.items()}
    assert had["heavy"] == 3 * had["light"]
