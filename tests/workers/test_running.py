"""A chunk through a worker with an engine: answers kept for later batches, failures tried again, batches that end."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace

import pytest
from celery import Celery

from jobs.queue import redis_url
from jobs.settings import QueueSettings
from storage import queries, transitions
from storage.database import Database
from storage.models import BatchStatus, RequestStatus, ServedFrom
from storage.retries import RetryLimits
from storage.transitions import NewBatch, NewRequest
from tests.checkpoints import DESCRIPTION, random_weights, save_huggingface
from tests.conftest import wait_until
from workers.answers import Served
from workers.engine.null import NullEngine, _Row
from workers.engine.request import Completion, GenerationRequest, engine_failed
from workers.leases import LeaseKeeper
from workers.models.artifact import Artifact
from workers.models.convert import convert
from workers.recorder import Recorder
from workers.replies import Replies
from workers.tasks import WorkerContext, run_requests
from workers.tokenizer import Tokenizer

LIMITS = RetryLimits(max_attempts=3, backoff_s=0.0)
GREEDY = '{"prompt":"Tell me","max_tokens":4,"temperature":0}'
SAMPLED = '{"prompt":"Tell me","max_tokens":4}'


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("running")
    source = save_huggingface(folder / "source", DESCRIPTION, random_weights(DESCRIPTION))
    return convert(str(source), folder / "tiny", dtype="float32", cache=folder)


MakeContext = Callable[..., WorkerContext]


@pytest.fixture
def make_context(database: Database, app: Celery, queue_url: str, artifact: Artifact) -> Iterator[MakeContext]:
    """A worker's insides around an engine; the null engine unless another is given."""
    tokenizer = Tokenizer(artifact)
    engines: list[NullEngine] = []
    leases = LeaseKeeper(database, "w", 60.0)
    with Recorder(database, "w") as recorder, Replies(redis_url(queue_url), tokenizer) as replies:

        def make(engine: NullEngine | None = None, *, answer_cache: bool = False) -> WorkerContext:
            engine = engine or NullEngine(max_batch_size=8, context_length=64)
            engines.append(engine)
            return WorkerContext(
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
                    DESCRIPTION.vocab_size,
                ),
                recorder=recorder,
                leases=leases,
                replies=replies,
                limits=LIMITS,
                answer_cache=answer_cache,
            )

        yield make
        for engine in engines:
            engine.close()
    leases.close()


def make_batch(database: Database, public_id: str, bodies: list[str]) -> tuple[int, list[int]]:
    """A batch at work, all of it in the queue."""
    now = database.now()
    with database.write() as connection:
        batch_id = transitions.create_batch(connection, NewBatch(public_id, "f", "/v1/completions", "tiny"), now)
        lines = [NewRequest(line, f"c{line}", body) for line, body in enumerate(bodies, 1)]
        transitions.add_requests(connection, batch_id, lines)
        transitions.start_batch(connection, batch_id, now)
    return batch_id, queue_all(database, batch_id)


def queue_all(database: Database, batch_id: int) -> list[int]:
    """Everything that can be queued now, waited for or not."""
    now = database.now() + 1.0
    with database.write() as connection:
        waiting = queries.next_pending(connection, batch_id, 100) + queries.next_delayed(connection, batch_id, now, 100)
        return transitions.queue_requests(connection, [request.id for request in waiting], now)


def served_from(database: Database, request_id: int) -> list[str | None]:
    with database.read() as connection:
        return [attempt["served_from"] for attempt in queries.attempts_of(connection, request_id)]


def responses(database: Database, batch_id: int) -> list[tuple[int, int | None, str | None]]:
    return [(row.line, row.status_code, row.error_code) for row in queries.results_in_order(database, batch_id)]


class Counting(NullEngine):
    """Counts what it is asked."""

    def __init__(self) -> None:
        self.asked = 0
        super().__init__(max_batch_size=8, context_length=64)

    def submit(self, request: GenerationRequest) -> Future[Completion]:
        self.asked += 1
        return super().submit(request)


class Stumbling(Counting):
    """Fails so many requests in a way that another try may cure."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        super().__init__()

    def submit(self, request: GenerationRequest) -> Future[Completion]:
        if self.asked < self.failures:
            self.asked += 1
            future: Future[Completion] = Future()
            future.set_exception(engine_failed(RuntimeError("out of memory")))
            return future
        return super().submit(request)


def test_an_answer_is_kept_for_the_same_question_of_a_later_batch(
    database: Database, make_context: MakeContext
) -> None:
    """Only where the answer is the same each time: a sampled one is drawn anew."""
    engine = Counting()
    context = make_context(engine, answer_cache=True)
    first, ids = make_batch(database, "batch_1", [GREEDY, SAMPLED])
    run_requests(context, ids)
    assert engine.asked == 2
    second, again = make_batch(database, "batch_2", [GREEDY, SAMPLED])
    run_requests(context, again)
    assert engine.asked == 3
    assert served_from(database, again[0]) == [ServedFrom.CACHE.value]
    assert served_from(database, again[1]) == [None]
    answers = [json.loads(next(queries.results_in_order(database, batch)).response or "") for batch in (first, second)]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert [answer["id"].partition("-")[2] for answer in answers] == [f"{ids[0]:x}", f"{again[0]:x}"]
    with database.read() as connection:
        batch = queries.find_batch_by_id(connection, second)
        source = queries.attempts_of(connection, again[0])[0]["source_request_id"]
    assert batch is not None
    assert batch.completed_requests == 2
    assert batch.completion_tokens == 4, "what was not computed is not counted as work"
    assert source == ids[0]


def test_without_the_cache_every_question_is_computed(database: Database, make_context: MakeContext) -> None:
    engine = Counting()
    context = make_context(engine)
    for number in (1, 2):
        _, ids = make_batch(database, f"batch_{number}", [GREEDY])
        run_requests(context, ids)
    assert engine.asked == 2


def test_a_failure_that_may_pass_is_tried_again(database: Database, make_context: MakeContext) -> None:
    context = make_context(Stumbling(failures=2))
    batch_id, ids = make_batch(database, "batch_1", [GREEDY])
    for _ in range(3):
        run_requests(context, ids)
        ids = queue_all(database, batch_id) or ids
    assert responses(database, batch_id) == [(1, 200, None)]
    with database.read() as connection:
        outcomes = [attempt["outcome"] for attempt in queries.attempts_of(connection, ids[0])]
    assert outcomes == ["failed", "failed", "completed"]


def test_a_failure_that_does_not_pass_ends_at_the_attempt_limit(database: Database, make_context: MakeContext) -> None:
    context = make_context(Stumbling(failures=99))
    batch_id, ids = make_batch(database, "batch_1", [GREEDY])
    for _ in range(5):
        run_requests(context, ids)
        queue_all(database, batch_id)
    assert responses(database, batch_id) == [(1, 500, "engine_failed")]
    with database.read() as connection:
        assert len(queries.attempts_of(connection, ids[0])) == LIMITS.max_attempts


def test_what_is_wrong_with_one_prompt_stays_with_it(database: Database, make_context: MakeContext) -> None:
    """Prompts of a chunk are tokenized together."""
    long = '{"prompt":"' + "Tell me more. " * 100 + '","max_tokens":4}'
    ids_given = '{"prompt":[5,6,7],"max_tokens":4}'
    unknown = '{"prompt":[5,99999999],"max_tokens":4}'
    batch_id, ids = make_batch(database, "batch_1", [GREEDY, long, ids_given, unknown, GREEDY])
    run_requests(make_context(), ids)
    found = responses(database, batch_id)
    assert [status for _, status, _ in found] == [200, 400, 200, 400, 200]
    assert found[1][2] == "context_length_exceeded"


class Endless(NullEngine):
    """Goes on with some prompts until they are cancelled."""

    PROMPT = "Count up from one."

    def _step(self, row: _Row, now: float, beside: int) -> bool:
        return len(row.request.prompt_token_ids) >= len(self.PROMPT) or super()._step(row, now, beside)


class Choking(Tokenizer):
    """Cannot make anything of one text."""

    def encode_many(self, texts: Sequence[str], *, add_bos: bool | None = None) -> list[list[int]]:
        if any("unspeakable" in text for text in texts):
            raise ValueError("no tokens for that")
        return super().encode_many(texts, add_bos=add_bos)


def test_a_text_whose_token_the_model_has_not_fails_alone(database: Database, make_context: MakeContext) -> None:
    """A tokenizer may have been given tokens, [PAD] for one, for which the embedding was given no rows."""
    context = make_context()
    last = max(context.tokenizer.encode("Tell me"))
    context = replace(context, served=replace(context.served, vocab_size=last))
    text = context.tokenizer.token_bytes(last).decode()
    bodies = [GREEDY, f'{{"prompt":[{last}],"max_tokens":4}}', '{"prompt":"' + "Te" + '","max_tokens":4}']
    batch_id, ids = make_batch(database, "batch_1", bodies)
    run_requests(context, ids)
    assert [code for _, _, code in responses(database, batch_id)] == ["token_out_of_vocabulary"] * 2 + [None]
    messages = [row.error_message for row in queries.results_in_order(database, batch_id)]
    assert messages[0] == (
        f'prompt contains "{text}", to the tokenizer token id {last}, and the model\'s vocabulary ends at {last - 1}; '
        "leave that text out, or convert a checkpoint whose model has the token"
    )
    assert messages[1] == (
        f"prompt has token id {last} and the model's vocabulary ends at {last - 1}; take ids of this model's tokenizer"
    )


def test_a_text_that_cannot_be_tokenized_fails_alone(
    database: Database, make_context: MakeContext, artifact: Artifact
) -> None:
    context = replace(make_context(), tokenizer=Choking(artifact))
    odd = '{"prompt":"unspeakable","max_tokens":4}'
    batch_id, ids = make_batch(database, "batch_1", [GREEDY, odd, GREEDY])
    run_requests(context, ids)
    assert responses(database, batch_id) == [(1, 200, None), (2, 500, "internal_error"), (3, 200, None)]


@contextmanager
def running(context: WorkerContext, ids: list[int]) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=run_requests, args=(context, ids))
    thread.start()
    yield thread
    thread.join(60)
    assert not thread.is_alive()


def status_of(database: Database, batch_id: int) -> dict[RequestStatus, int]:
    with database.read() as connection:
        return queries.count_requests(connection, batch_id)


@pytest.mark.parametrize("how", ["cancelled", "expired"])
def test_a_batch_that_ends_stops_what_runs_of_it_and_nothing_else(
    database: Database, make_context: MakeContext, how: str
) -> None:
    """A generation may have minutes to go. Each of its requests still gets its one result."""
    engine = Endless(max_batch_size=8, context_length=64, token_s=0.01)
    context = make_context(engine)
    body = f'{{"prompt":"{Endless.PROMPT}","max_tokens":16}}'
    ending, ids = make_batch(database, "batch_1", [body, body])
    other, beside = make_batch(database, "batch_2", [GREEDY])
    with running(context, [*ids, *beside]):
        wait_until(lambda: engine.status().running >= 2, what="all run")
        now = database.now()
        with database.write() as connection:
            if how == "cancelled":
                transitions.cancel_batch(connection, ending, now)
            else:
                transitions.prioritise_batch(connection, ending, expires_at=now - 1.0)
                transitions.expire_batches(connection, now)
    assert status_of(database, ending) == {RequestStatus(how): 2}
    assert responses(database, ending) == [(line, None, f"batch_{how}") for line in (1, 2)]
    assert responses(database, other) == [(1, 200, None)]
    with database.write() as connection:
        assert [a["outcome"] for a in queries.attempts_of(connection, ids[0])] == ["released"]
        assert transitions.publish_batch(connection, ending, database.now(), output=None, errors=None)
        batch = queries.find_batch_by_id(connection, ending)
    assert batch is not None
    assert batch.status is BatchStatus(how)
