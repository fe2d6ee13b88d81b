"""What is queued next, how much of it, and what happens when publishing fails."""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest
from celery import Celery
from hypothesis import given
from hypothesis import strategies as st

from jobs.dispatch import (
    LARGEST_CHUNK,
    LEAST_WINDOW,
    MOST_WINDOW,
    Candidate,
    Fleet,
    choose,
    chunk_place,
    most_in_own_queue,
    place_chunks,
    plan_chunks,
    preferred_place,
    start_shares,
    take_back,
    top_up,
    wants_more,
    window,
    worthwhile_chunk,
)
from jobs.queue import Chunk, QueueError, make_app, own_queue_name, queue_depth, used_places, waiting_ids
from jobs.settings import QueueSettings, Settings
from storage import queries, transitions
from storage.database import Database
from storage.models import RequestStatus, WorkerStatus
from storage.queries import PendingRequest
from storage.retries import RetryLimits
from storage.transitions import NewBatch, NewRequest, NewWorker, RequestOutcome

NOW = 1_000_000.0
MODEL = "tiny"


def pending(*prefix_ids: int | None) -> list[PendingRequest]:
    """Requests 1, 2, 3 ... with these prefixes."""
    return [PendingRequest(id=line, line=line, prefix_id=prefix_id) for line, prefix_id in enumerate(prefix_ids, 1)]


# --- the plan ----------------------------------------------------------------------------------------------------


def test_a_window_is_twice_what_the_workers_run_and_never_tiny() -> None:
    assert window(Fleet(workers=0, slots=0)) == LEAST_WINDOW
    assert window(Fleet(workers=1, slots=64)) == LEAST_WINDOW
    assert window(Fleet(workers=8, slots=8 * 256)) == 2 * 8 * 256


def test_workers_that_answer_fast_get_a_longer_window_and_larger_chunks() -> None:
    """Or the queue would run dry between two top-ups, and messages would be what their time goes into."""
    assert window(Fleet(workers=1, slots=64, requests_per_s=3000.0)) == 3000
    assert window(Fleet(workers=1, slots=64, requests_per_s=1e9)) == MOST_WINDOW
    assert worthwhile_chunk(Fleet(workers=1, slots=64, requests_per_s=5.0), 32) == 32
    assert worthwhile_chunk(Fleet(workers=2, slots=64, requests_per_s=2000.0), 32) == 100
    assert worthwhile_chunk(Fleet(workers=1, slots=64, requests_per_s=1e9), 32) == LARGEST_CHUNK
    assert worthwhile_chunk(Fleet(workers=0, slots=0), 1) == 1


def test_a_top_up_is_worth_its_price_below_half_the_window() -> None:
    fleet = Fleet(workers=1, slots=256)
    assert wants_more(256, fleet)
    assert not wants_more(257, fleet)


def test_prompts_with_one_prefix_travel_together() -> None:
    chunks = plan_chunks(pending(1, 2, 1, 2, None, 1), fleet=Fleet(1, 64), chunk_size=3)
    assert [[request.id for request in chunk] for chunk in chunks] == [[1, 3, 6], [2, 4, 5]]


def test_one_worker_gets_full_chunks_to_the_end() -> None:
    chunks = plan_chunks(pending(*[None] * 70), fleet=Fleet(1, 64), chunk_size=32)
    assert [len(chunk) for chunk in chunks] == [32, 32, 6]


def test_chunks_shrink_near_the_end_so_that_all_workers_finish_together() -> None:
    chunks = plan_chunks(pending(*[None] * 256), fleet=Fleet(4, 256), chunk_size=32)
    sizes = [len(chunk) for chunk in chunks]
    assert sizes[0] == 32
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-2:] == [4, 3]


def test_chunks_do_not_shrink_while_the_job_has_more() -> None:
    chunks = plan_chunks(pending(*[None] * 64), fleet=Fleet(4, 256), chunk_size=32, remaining=100_000)
    assert [len(chunk) for chunk in chunks] == [32, 32]


@given(
    prefix_ids=st.lists(st.none() | st.integers(1, 4), max_size=300),
    workers=st.integers(0, 20),
    chunk_size=st.integers(1, 64),
    remaining=st.none() | st.integers(0, 10_000),
)
def test_every_request_is_planned_once_in_chunks_of_allowed_size(
    prefix_ids: list[int | None], workers: int, chunk_size: int, remaining: int | None
) -> None:
    chunks = plan_chunks(
        pending(*prefix_ids), fleet=Fleet(workers, 64 * workers), chunk_size=chunk_size, remaining=remaining
    )
    assert sorted(request.id for chunk in chunks for request in chunk) == list(range(1, len(prefix_ids) + 1))
    assert all(1 <= len(chunk) <= chunk_size for chunk in chunks)
    prefixes = [request.prefix_id for chunk in chunks for request in chunk]
    changes = sum(left != right for left, right in pairwise(prefixes))
    assert changes == max(0, len(set(prefixes)) - 1)


def test_a_chunk_ends_before_it_has_too_many_tokens_but_a_long_prompt_still_travels() -> None:
    requests = [
        PendingRequest(id=n, line=n, prefix_id=None, estimated_tokens=t) for n, t in enumerate((40, 40, 40, 500, 1))
    ]
    chunks = plan_chunks(requests, fleet=Fleet(1, 64), chunk_size=32, chunk_tokens=100)
    assert [[request.id for request in chunk] for chunk in chunks] == [[0, 1], [2], [3], [4]]


def test_requests_in_isolation_travel_first_and_in_no_larger_company_than_they_may() -> None:
    isolation = [None, 4, 4, 1, 4, None, 2]
    requests = [PendingRequest(id=n, line=n, prefix_id=None, isolation=i) for n, i in enumerate(isolation)]
    chunks = plan_chunks(requests, fleet=Fleet(1, 64), chunk_size=32)
    assert [[request.id for request in chunk] for chunk in chunks] == [[1, 2, 4], [6], [3], [0, 5]]


# --- to the worker that has the prefix ----------------------------------------------------------------------------

PLACES = st.sets(st.sampled_from([f"gpu{n}@{host}" for n in range(8) for host in ("a", "b")]), max_size=8)


@given(prefix_ids=st.lists(st.integers(1, 10**6), min_size=1, max_size=50, unique=True), places=PLACES)
def test_a_prefix_keeps_its_place_when_other_workers_come_and_go(prefix_ids: list[int], places: set[str]) -> None:
    """Only what a worker that goes had moves, and what moves when one comes moves to it."""
    before = {prefix_id: preferred_place(prefix_id, frozenset(places)) for prefix_id in prefix_ids}
    assert all(place in places if len(places) > 1 else place is None for place in before.values())
    after = {prefix_id: preferred_place(prefix_id, [*places, "new@c"]) for prefix_id in prefix_ids}
    if len(places) > 1:
        assert all(after[each] in (before[each], "new@c") for each in prefix_ids)


def test_prefixes_are_spread_over_the_places() -> None:
    places = [f"gpu{n}@host" for n in range(4)]
    counts = [sum(preferred_place(number, places) == place for number in range(4000)) for place in places]
    assert min(counts) > 800


@given(
    prefix_ids=st.lists(st.none() | st.integers(1, 20), max_size=300),
    places=PLACES,
    chunk_size=st.integers(1, 64),
    remaining=st.none() | st.integers(0, 10_000),
)
def test_prompts_for_different_places_travel_in_different_chunks(
    prefix_ids: list[int | None], places: set[str], chunk_size: int, remaining: int | None
) -> None:
    fleet = Fleet(len(places), 64 * len(places), places=frozenset(places))
    chunks = plan_chunks(pending(*prefix_ids), fleet=fleet, chunk_size=chunk_size, remaining=remaining)
    assert sorted(request.id for chunk in chunks for request in chunk) == list(range(1, len(prefix_ids) + 1))
    assert all(1 <= len(chunk) <= chunk_size for chunk in chunks)
    for chunk in chunks:
        assert {preferred_place(request.prefix_id, places) for request in chunk} == {chunk_place(chunk, places)}


@given(
    wanted=st.lists(st.none() | st.sampled_from(["gpu0@a", "gpu1@a", "gpu2@a"]), max_size=200),
    waiting=st.dictionaries(st.sampled_from(["gpu0@a", "gpu1@a", "gone@a"]), st.integers(0, 40)),
    chunk_size=st.integers(1, 64),
    slots=st.integers(1, 1024),
)
def test_no_more_than_a_workers_share_waits_in_its_own_queue(
    wanted: list[str | None], waiting: dict[str, int], chunk_size: int, slots: int
) -> None:
    """Each chunk goes where it was meant to go, or to the shared queue; none is dropped or reordered."""
    fleet = Fleet(3, slots, places=frozenset({"gpu0@a", "gpu1@a", "gpu2@a"}))
    chunks = [Chunk(MODEL, (number,), place=place) for number, place in enumerate(wanted)]
    placed = place_chunks(chunks, waiting, fleet, chunk_size)
    assert [chunk.request_ids for chunk in placed] == [chunk.request_ids for chunk in chunks]
    most = most_in_own_queue(fleet, chunk_size)
    for place in fleet.places:
        sent = [chunk for chunk in placed if chunk.place == place]
        asked = [chunk for chunk in chunks if chunk.place == place]
        assert len(sent) == min(len(asked), max(0, most - waiting.get(place, 0)))
    assert all(chunk.place in (None, before.place) for chunk, before in zip(placed, chunks, strict=True))


def test_a_workers_share_of_the_window_is_counted_in_messages() -> None:
    assert most_in_own_queue(Fleet(2, 128), 32) == LEAST_WINDOW // 2 // 32
    assert most_in_own_queue(Fleet(8, 8 * 256), 32) == 2 * 256 // 32
    assert most_in_own_queue(Fleet(400, 400), 256) == 1


def candidate(batch_id: int, tenant: str = "a", **values: object) -> Candidate:
    return Candidate(batch_id, tenant, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        (candidate(9, is_interactive=True), candidate(1, priority=5, expires_at=NOW + 1, window_s=100)),
        (candidate(9, expires_at=NOW + 20, window_s=100), candidate(1, priority=5)),
        (candidate(9, expires_at=NOW + 10, window_s=100), candidate(1, expires_at=NOW + 20, window_s=100)),
        (candidate(9, priority=1), candidate(1, expires_at=NOW + 21, window_s=100)),
        (candidate(9, priority=1), candidate(1)),
        (candidate(9, "poor"), candidate(1, "rich")),
        (candidate(1), candidate(9)),
    ],
)
def test_what_goes_before_what(better: Candidate, worse: Candidate) -> None:
    """Interactive, then a deadline that is near, then priority, then the tenant that had least, then the oldest."""
    assert choose([worse, better], {"rich": 100.0, "poor": 5.0}, NOW) is better


def test_a_tenant_that_comes_back_has_saved_nothing_up() -> None:
    assert start_shares({"a": 500.0, "b": 700.0, "c": 3.0}, ["a", "b", "c"], ["a", "b"]) == {
        "a": 500,
        "b": 700,
        "c": 500,
    }
    assert start_shares({"a": 500.0, "c": 3.0}, ["a", "c"], []) == {"a": 500.0, "c": 500.0}
    assert start_shares({}, [], []) == {}


@given(
    weights=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    tokens=st.lists(st.integers(1, 400), min_size=4, max_size=4),
)
def test_tenants_that_wait_get_tokens_in_proportion_to_their_weights(weights: list[int], tokens: list[int]) -> None:
    names = [f"t{n}" for n in range(len(weights))]
    used, served = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0)
    candidates = [candidate(n, name) for n, name in enumerate(names)]
    for _ in range(400):
        chosen = choose(candidates, used, NOW)
        size = tokens[chosen.batch_id]
        served[chosen.tenant] += size
        used[chosen.tenant] += size / weights[chosen.batch_id]
    shares = [served[name] / weight for name, weight in zip(names, weights, strict=True)]
    assert max(shares) - min(shares) <= 2 * max(tokens)  # within two chunks, whatever the chunks' sizes


# --- carrying it out ---------------------------------------------------------------------------------------------


def make_batch(database: Database, lines: int, *, model: str = MODEL, priority: int = 0) -> int:
    with database.write() as connection:
        new = NewBatch(f"batch_{model}_{priority}_{lines}", "f", "/v1/chat/completions", model, priority=priority)
        batch_id = transitions.create_batch(connection, new, NOW)
        transitions.add_requests(connection, batch_id, [NewRequest(line, None, "{}") for line in range(1, lines + 1)])
        transitions.start_batch(connection, batch_id, NOW)
    return batch_id


def make_worker(database: Database, name: str, slots: int, model: str = MODEL, device: str = "cpu") -> None:
    with database.write() as connection:
        new = NewWorker(name, "host", 1, model, device=device, max_batch_size=slots)
        transitions.register_worker(connection, new, NOW)
        transitions.update_worker(connection, name, NOW, status=WorkerStatus.READY)


def make_prefixed_batch(database: Database, prefixes: int, each: int) -> int:
    """Lines that begin with one of so many texts."""
    with database.write() as connection:
        new = NewBatch(f"batch_{prefixes}_{each}", "f", "/v1/chat/completions", MODEL)
        batch_id = transitions.create_batch(connection, new, NOW)
        ids = [transitions.save_prefix(connection, f"document {number}") for number in range(prefixes)]
        lines = [NewRequest(n + 1, None, "{}", prefix_id=ids[n // each]) for n in range(prefixes * each)]
        transitions.add_requests(connection, batch_id, lines)
        transitions.start_batch(connection, batch_id, NOW)
    return batch_id


def statuses(database: Database, batch_id: int) -> dict[RequestStatus, int]:
    with database.read() as connection:
        return queries.count_requests(connection, batch_id)


def queued(database: Database, batch_id: int) -> int:
    return statuses(database, batch_id).get(RequestStatus.QUEUED, 0)


def test_no_more_than_the_window_goes_into_the_queue(database: Database, app: Celery, settings: Settings) -> None:
    batch_id = make_batch(database, 1000)
    assert top_up(database, app, settings.queue, NOW) == LEAST_WINDOW
    assert queue_depth(app, MODEL).bulk == LEAST_WINDOW // 32
    assert len(waiting_ids(app, [MODEL]) or ()) == LEAST_WINDOW
    assert top_up(database, app, settings.queue, NOW) == 0
    assert queued(database, batch_id) == LEAST_WINDOW


def test_the_window_follows_the_workers(database: Database, app: Celery, settings: Settings) -> None:
    batch_id = make_batch(database, 2000)
    make_worker(database, "a", 256)
    make_worker(database, "b", 128)
    make_worker(database, "other model", 4096, model="other")
    assert top_up(database, app, settings.queue, NOW) == 768
    assert queued(database, batch_id) == 768


def test_what_workers_took_is_filled_up_in_bulk(database: Database, app: Celery, settings: Settings) -> None:
    make_batch(database, 1000)
    top_up(database, app, settings.queue, NOW)
    ids = sorted(waiting_ids(app, [MODEL]) or ())
    with database.write() as connection:
        transitions.claim_requests(connection, ids[:100], worker="w", lease_s=60, now=NOW)
    assert top_up(database, app, settings.queue, NOW) == 0  # more than half is still there
    with database.write() as connection:
        transitions.claim_requests(connection, ids[100:200], worker="w", lease_s=60, now=NOW)
    assert top_up(database, app, settings.queue, NOW) == 200


def test_the_more_urgent_batch_goes_first_and_the_rest_fills_up(
    database: Database, app: Celery, settings: Settings
) -> None:
    relaxed = make_batch(database, 300)
    urgent = make_batch(database, 200, priority=5)
    top_up(database, app, settings.queue, NOW)
    assert (queued(database, urgent), queued(database, relaxed)) == (200, 56)


def test_each_model_has_a_window_of_its_own(database: Database, app: Celery, settings: Settings) -> None:
    one, other = make_batch(database, 300), make_batch(database, 300, model="other")
    assert top_up(database, app, settings.queue, NOW) == 512
    assert (queued(database, one), queued(database, other)) == (256, 256)
    assert (queue_depth(app, MODEL).bulk, queue_depth(app, "other").bulk) == (8, 8)


def test_a_batch_that_is_being_cancelled_sends_nothing(database: Database, app: Celery, settings: Settings) -> None:
    batch_id = make_batch(database, 10)
    with database.write() as connection:
        transitions.cancel_batch(connection, batch_id, NOW)
    assert top_up(database, app, settings.queue, NOW) == 0


def test_a_paused_batch_sends_nothing_and_goes_on_when_resumed(
    database: Database, app: Celery, settings: Settings
) -> None:
    batch_id = make_batch(database, 10)
    with database.write() as connection:
        transitions.pause_batch(connection, batch_id, NOW)
    assert top_up(database, app, settings.queue, NOW) == 0
    with database.write() as connection:
        transitions.resume_batch(connection, batch_id, NOW)
    assert top_up(database, app, settings.queue, NOW) == 10


def test_a_failed_request_waits_for_its_pause(database: Database, app: Celery, settings: Settings) -> None:
    make_batch(database, 1)
    top_up(database, app, settings.queue, NOW)
    with database.write() as connection:
        (held,) = transitions.claim_requests(connection, [1], worker="w", lease_s=60, now=NOW)
        failed = RequestOutcome(held.id, held.batch_id, held.attempt, RequestStatus.FAILED, 500, None, "oom")
        limits = RetryLimits(backoff_s=5.0)
        transitions.fail_requests(connection, [failed], worker="w", now=NOW, limits=limits)
    assert top_up(database, app, settings.queue, NOW + 4) == 0
    assert top_up(database, app, settings.queue, NOW + 5) == 1


def test_two_tenants_share_the_window_by_weight(database: Database, app: Celery, settings: Settings) -> None:
    ids = {}
    for tenant, weight in (("big", 3.0), ("small", 1.0)):
        with database.write() as connection:
            transitions.set_tenant(connection, tenant, weight)
            new = NewBatch(f"batch_{tenant}", tenant, "/v1/chat/completions", MODEL, tenant=tenant)
            ids[tenant] = transitions.create_batch(connection, new, NOW)
            lines = [NewRequest(line, None, "{}", estimated_tokens=100) for line in range(1, 1001)]
            transitions.add_requests(connection, ids[tenant], lines)
            transitions.start_batch(connection, ids[tenant], NOW)
    assert top_up(database, app, settings.queue, NOW) == LEAST_WINDOW
    assert (queued(database, ids["big"]), queued(database, ids["small"])) == (192, 64)


def test_interactive_requests_travel_alone_on_their_own_queue(
    database: Database, app: Celery, settings: Settings
) -> None:
    make_batch(database, 100)
    with database.write() as connection:
        new = NewBatch("batch_i", "i", "/v1/chat/completions", MODEL, is_interactive=True)
        batch_id = transitions.create_batch(connection, new, NOW)
        transitions.add_requests(connection, batch_id, [NewRequest(line, None, "{}") for line in (1, 2, 3)])
        transitions.start_batch(connection, batch_id, NOW)
    top_up(database, app, settings.queue, NOW)
    depth = queue_depth(app, MODEL)
    assert (depth.interactive, depth.bulk) == (3, 4)


def test_publishing_that_fails_leaves_the_requests_pending(database: Database, settings: Settings) -> None:
    """The next top-up sends them; that is how an outage of Redis ends without a hand."""
    batch_id = make_batch(database, 10)
    away = make_app(QueueSettings(url="redis://127.0.0.1:1/0"))
    with pytest.raises(QueueError):
        top_up(database, away, settings.queue, NOW)
    assert statuses(database, batch_id) == {RequestStatus.PENDING: 10}
    away.close()


def test_processes_that_top_up_at_once_send_each_request_once(
    database: Database, app: Celery, settings: Settings
) -> None:
    batch_id = make_batch(database, 1000)
    barrier = threading.Barrier(4)
    counts: list[int] = []

    def run() -> None:
        barrier.wait()
        counts.append(top_up(database, app, settings.queue, NOW))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(counts) == queued(database, batch_id) == LEAST_WINDOW
    assert queue_depth(app, MODEL).bulk == LEAST_WINDOW // 32


def test_with_nothing_to_do_nothing_is_written_or_asked_of_redis(database: Database, settings: Settings) -> None:
    """Workers call it after each chunk, and an idle system calls it for ever."""
    away = make_app(QueueSettings(url="redis://127.0.0.1:1/0"))
    with database.write():  # nobody else could write now; on SQLite a write would wait for 30 s
        assert top_up(database, away, settings.queue, NOW) == 0
    away.close()


TWO = ("gpu0@host", "gpu1@host")


def waiting_at(app: Celery, place: str) -> int:
    return used_places(app, [MODEL]).get(MODEL, {}).get(place, 0)


def make_two_workers(database: Database) -> None:
    for number in range(2):
        make_worker(database, f"w{number}", 64, device=f"gpu{number}")


def test_prompts_with_one_prefix_go_to_one_worker_as_far_as_its_share_goes(
    database: Database, app: Celery, settings: Settings
) -> None:
    make_two_workers(database)
    batch_id = make_prefixed_batch(database, prefixes=1, each=1000)
    assert top_up(database, app, settings.queue, NOW) == LEAST_WINDOW
    own = own_queue_name(MODEL, preferred_place(1, TWO) or "")
    with app.connection_for_read() as connection:
        client = connection.default_channel.client
        lengths = client.llen(own), client.llen(f"promptmill.{MODEL}.bulk")
    assert lengths == (4, 4)  # of 32 each: half of the window is that worker's share, the other takes the rest
    assert queue_depth(app, MODEL).bulk == 8
    assert len(waiting_ids(app, [MODEL]) or ()) == queued(database, batch_id) == LEAST_WINDOW


def test_many_prefixes_are_spread_and_no_queue_holds_more_than_its_share(
    database: Database, app: Celery, settings: Settings
) -> None:
    make_two_workers(database)
    make_prefixed_batch(database, prefixes=100, each=10)
    assert top_up(database, app, settings.queue, NOW) == LEAST_WINDOW
    assert all(1 <= waiting_at(app, place) <= 4 for place in TWO)
    assert len(waiting_ids(app, [MODEL]) or ()) == LEAST_WINDOW


def test_with_one_worker_everything_goes_to_the_shared_queue(
    database: Database, app: Celery, settings: Settings
) -> None:
    make_worker(database, "w", 64, device="gpu0")
    make_prefixed_batch(database, prefixes=4, each=50)
    assert top_up(database, app, settings.queue, NOW) == 200
    assert used_places(app, [MODEL]) == {}
    assert queue_depth(app, MODEL).bulk == 7


def test_what_comes_back_for_another_try_goes_to_any_worker(
    database: Database, app: Celery, settings: Settings
) -> None:
    """So does what is suspected of killing workers: it is to meet another one."""
    make_two_workers(database)
    make_prefixed_batch(database, prefixes=1, each=3)
    top_up(database, app, settings.queue, NOW)
    assert sum(waiting_at(app, place) for place in TWO) == 1
    with database.write() as connection:
        held = transitions.claim_requests(connection, [1, 2, 3], worker="w", lease_s=60, now=NOW)
        failed = [RequestOutcome(c.id, c.batch_id, c.attempt, RequestStatus.FAILED, 500, None, "oom") for c in held]
        transitions.fail_requests(connection, failed, worker="w", now=NOW, limits=RetryLimits(backoff_s=0.0))
    assert top_up(database, app, settings.queue, NOW + 1) == 3
    assert sum(waiting_at(app, place) for place in TWO) == 1
    isolated = [PendingRequest(id=1, line=1, prefix_id=1, isolation=4)]
    assert chunk_place(isolated, TWO) is None


def test_what_waits_for_a_worker_that_is_gone_is_taken_back(
    database: Database, app: Celery, settings: Settings
) -> None:
    make_two_workers(database)
    batch_id = make_prefixed_batch(database, prefixes=1, each=100)
    top_up(database, app, settings.queue, NOW)
    place = preferred_place(1, TWO) or ""
    with database.write() as connection:  # one of them is in a worker's hands by then
        transitions.claim_requests(connection, [1], worker="w", lease_s=60, now=NOW)
    assert take_back(database, app, {MODEL: [place]}) > 0
    assert used_places(app, [MODEL]) == {}
    found = statuses(database, batch_id)
    assert found[RequestStatus.RUNNING] == 1
    assert found.get(RequestStatus.QUEUED, 0) == len(waiting_ids(app, [MODEL]) or ())
    assert take_back(database, app, {MODEL: [place]}) == 0


def test_who_has_no_prefix_is_not_starved_by_who_has(
    sqlite_database: Database, app: Celery, settings: Settings
) -> None:
    """Workers empty their own queues before the shared one; the window keeps what is sent to them in proportion."""
    database = sqlite_database
    make_two_workers(database)
    with_prefix = make_prefixed_batch(database, prefixes=20, each=50)
    with database.write() as connection:
        new = NewBatch("batch_plain", "plain", "/v1/chat/completions", MODEL, tenant="another")
        without = transitions.create_batch(connection, new, NOW)
        transitions.add_requests(connection, without, [NewRequest(line, None, "{}") for line in range(1, 1001)])
        transitions.start_batch(connection, without, NOW)
    queues = [[own_queue_name(MODEL, place), f"promptmill.{MODEL}.bulk"] for place in TWO]
    for _ in range(25):
        top_up(database, app, settings.queue, NOW)
        for names in queues:
            take_a_chunk(database, app, names)
        taken = [1000 - left(database, with_prefix), 1000 - left(database, without)]
        assert abs(taken[0] - taken[1]) <= LEAST_WINDOW
    assert min(taken) > 600


def take_a_chunk(database: Database, app: Celery, names: list[str]) -> None:
    """What a worker would take next, claimed."""
    with app.connection_for_read() as connection:
        message = next((found for name in names if (found := connection.default_channel.basic_get(name))), None)
        assert message is not None
        message.ack()
    with database.write() as on:
        transitions.claim_requests(on, message.decode()[0][0], worker="w", lease_s=60, now=NOW)


def left(database: Database, batch_id: int) -> int:
    found = statuses(database, batch_id)
    return found.get(RequestStatus.PENDING, 0) + found.get(RequestStatus.QUEUED, 0)
