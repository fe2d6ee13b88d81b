"""What a chunk's task does with requests that slipped from its hands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from celery import Celery

from jobs.queue import redis_url
from jobs.settings import QueueSettings
from storage import queries, transitions
from storage.database import Connection, Database
from storage.errors import StorageError
from storage.models import REQUESTS, RequestStatus
from storage.transitions import ClaimedRequest, NewBatch, NewRequest
from tests.checkpoints import DESCRIPTION, random_weights, save_huggingface
from workers.answers import Served
from workers.engine.null import NullEngine
from workers.leases import LeaseKeeper
from workers.models.artifact import Artifact
from workers.models.convert import convert
from workers.recorder import Recorder
from workers.replies import Replies
from workers.tasks import WorkerContext, run_requests
from workers.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("tasks")
    source = save_huggingface(folder / "source", DESCRIPTION, random_weights(DESCRIPTION))
    return convert(str(source), folder / "tiny", dtype="float32", cache=folder)


class Forgetful(LeaseKeeper):
    """The database crashes after the claim and has forgotten it, as commits that do not wait for its disk may be."""

    def hold(self, claimed: Sequence[ClaimedRequest]) -> None:
        super().hold(claimed)
        with self._database.write() as connection:
            connection.execute(
                REQUESTS.update()
                .where(REQUESTS.c.id.in_([request.id for request in claimed]))
                .values(status="queued", attempt=0, worker=None, claimed_at=None, lease_expires_at=None)
            )


@pytest.fixture
def ids(database: Database) -> list[int]:
    """Three requests whose message is about to arrive."""
    now = database.now()
    with database.write() as connection:
        batch_id = transitions.create_batch(connection, NewBatch("batch_1", "f", "/v1/completions", "tiny"), now)
        body = '{"model":"tiny","prompt":"Tell me","max_tokens":4}'
        transitions.add_requests(connection, batch_id, [NewRequest(line, f"c{line}", body) for line in (1, 2, 3)])
        transitions.start_batch(connection, batch_id, now)
    with database.read() as connection:
        found = [request.id for request in queries.next_pending(connection, batch_id, 10)]
    with database.write() as connection:
        transitions.queue_requests(connection, found, now)
    return found


def run(
    database: Database, app: Celery, queue_url: str, artifact: Artifact, leases: LeaseKeeper, ids: list[int]
) -> None:
    engine = NullEngine(max_batch_size=8, context_length=64)
    tokenizer = Tokenizer(artifact)
    with Recorder(database, "w") as recorder, Replies(redis_url(queue_url), tokenizer) as replies:
        context = WorkerContext(
            name="w",
            app=app,
            database=database,
            queue=QueueSettings(url=queue_url),
            engine=engine,
            tokenizer=tokenizer,
            served=Served(
                "tiny",
                artifact.digest,
                "null",
                engine.context_length,
                artifact.context_length,
                artifact.description.vocab_size,
            ),
            recorder=recorder,
            leases=leases,
            replies=replies,
        )
        run_requests(context, ids)
    engine.close()
    leases.close()


class Company:
    """Notes who is in the worker's hands together."""

    def __init__(self, leases: LeaseKeeper) -> None:
        self.hands: list[list[int]] = []
        self._hold = leases.hold
        leases.hold = self.note  # type: ignore[method-assign]

    def note(self, claimed: Sequence[ClaimedRequest]) -> None:
        self.hands.append([request.id for request in claimed])
        self._hold(claimed)


def standing(database: Database) -> dict[RequestStatus, int]:
    with database.read() as connection:
        return queries.count_requests(connection, 1)


def test_requests_whose_claim_the_database_forgot_do_not_wait_for_a_message_that_never_comes(
    database: Database, app: Celery, queue_url: str, artifact: Artifact, ids: list[int]
) -> None:
    """The message is used up by this very task; without a word from it they would be found by their age alone."""
    run(database, app, queue_url, artifact, Forgetful(database, "w", 60.0), ids)
    assert standing(database) == {RequestStatus.PENDING: 3}


def test_a_claim_whose_commit_went_through_unheard_is_handed_back(
    database: Database,
    app: Celery,
    queue_url: str,
    artifact: Artifact,
    ids: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second try finds them claimed, by the first: nobody would run them until the lease ran out."""
    write, unheard = Database.write, []

    @contextmanager
    def write_and_lose_the_first_reply(database: Database, *, durable: bool = True) -> Iterator[Connection]:
        with write(database, durable=durable) as connection:
            yield connection
        if not durable and not unheard:
            unheard.append(standing(database))
            raise StorageError("the server has gone away", code="database_unreachable", retryable=True)

    monkeypatch.setattr(Database, "write", write_and_lose_the_first_reply)
    run(database, app, queue_url, artifact, LeaseKeeper(database, "w", 60.0), ids)
    assert unheard == [{RequestStatus.RUNNING: 3}]
    assert standing(database) == {RequestStatus.PENDING: 3}


def test_a_suspect_of_a_message_runs_after_the_others_and_alone(
    database: Database, app: Celery, queue_url: str, artifact: Artifact, ids: list[int]
) -> None:
    with database.write() as connection:
        connection.execute(REQUESTS.update().where(REQUESTS.c.id == ids[1]).values(isolation=1))
    leases = LeaseKeeper(database, "w", 60.0)
    company = Company(leases)
    run(database, app, queue_url, artifact, leases, ids)
    assert company.hands == [[ids[0], ids[2]], [ids[1]]]
    assert standing(database) == {RequestStatus.COMPLETED: 3}
