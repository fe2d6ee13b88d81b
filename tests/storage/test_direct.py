"""Statements that SQLite's driver runs itself: they say and fail the same as by SQLAlchemy's way."""

from __future__ import annotations

import threading

import pytest
from sqlalchemy import bindparam, insert, select, update

from storage import transitions
from storage.bulk import one_of
from storage.database import Database
from storage.direct import run
from storage.errors import StorageError
from storage.models import BATCHES, REQUESTS, TENANTS, BatchStatus
from storage.transitions import NewBatch, NewRequest

NOW = 1_000_000.0
ADD = insert(TENANTS).values(name=bindparam("name"), weight=bindparam("weight"), share_used=0.0)
RAISE = (
    update(TENANTS)
    .where(TENANTS.c.name == bindparam("who"))
    .values(weight=TENANTS.c.weight + bindparam("more"))
    .returning(TENANTS.c.name, TENANTS.c.weight)
)
OF_WEIGHT = select(TENANTS.c.name).where(TENANTS.c.weight >= bindparam("least")).order_by(TENANTS.c.name)


def test_rows_have_their_columns_as_attributes(database: Database) -> None:
    with database.write() as connection:
        assert not run(connection, ADD, {"name": "a", "weight": 1.0})
        assert not run(connection, ADD, {"name": "b", "weight": 5})
        (raised,) = run(connection, RAISE, {"who": "a", "more": 2})
        assert (raised.name, raised.weight) == ("a", 3.0)
        assert [row.name for row in run(connection, OF_WEIGHT, {"least": 3})] == ["a", "b"]
        assert not run(connection, RAISE, {"who": "nobody", "more": 1})


def test_a_list_of_ids_is_one_parameter(database: Database) -> None:
    found = select(REQUESTS.c.line).where(one_of(REQUESTS.c.id, "ids")).order_by(REQUESTS.c.line)
    with database.write() as connection:
        batch_id = transitions.create_batch(connection, NewBatch("batch_1", "f", "/v1/completions", "tiny"), NOW)
        transitions.add_requests(connection, batch_id, [NewRequest(line, None, "{}") for line in (1, 2, 3)])
        ids = list(connection.execute(select(REQUESTS.c.id).order_by(REQUESTS.c.line)).scalars())
        assert [row.line for row in run(connection, found, {"ids": ids[1:]})] == [2, 3]
        assert not run(connection, found, {"ids": []})


def test_a_parameter_that_is_not_given_is_an_error_and_not_null(sqlite_database: Database) -> None:
    with sqlite_database.write() as connection, pytest.raises(KeyError, match="weight"):
        run(connection, ADD, {"name": "a"})


def test_what_the_driver_refuses_leaves_as_any_other_error(database: Database) -> None:
    with pytest.raises(StorageError) as raised, database.write() as connection:
        run(connection, ADD, {"name": "a", "weight": 1.0})
        run(connection, ADD, {"name": "a", "weight": 1.0})
    assert raised.value.code == "constraint_violated"
    with database.read() as connection:
        assert not connection.execute(select(TENANTS.c.name)).all()  # rolled back
    with database.write() as connection:
        run(connection, ADD, {"name": "a", "weight": 1.0})  # the next transaction is not harmed


def test_a_call_is_written_as_its_columns_say(database: Database) -> None:
    """Each column of the new batch goes to its own place, whatever kind it is of."""
    batch = NewBatch(
        "batch_1",
        "f",
        "/v1/chat/completions",
        "tiny",
        tenant="acme",
        expires_at=NOW + 5,
        idempotency_key="k",
        is_interactive=True,
        reply_to="channel",
    )
    with database.write() as connection:
        batch_id, request_id = transitions.create_interactive(
            connection, batch, NewRequest(1, "c", "{}", estimated_tokens=7, estimated_prompt_tokens=3), NOW
        )
        row = connection.execute(select(BATCHES).where(BATCHES.c.id == batch_id)).one()._mapping
        request = connection.execute(select(REQUESTS).where(REQUESTS.c.id == request_id)).one()
    assert {name: row[name] for name in batch.columns()} == batch.columns()
    assert (row["status"], row["total_requests"], row["estimated_prompt_tokens"]) == (BatchStatus.IN_PROGRESS, 1, 3)
    assert (row["created_at"], row["in_progress_at"]) == (NOW, NOW)
    assert (request.batch_id, request.line, request.custom_id, request.body) == (batch_id, 1, "c", "{}")
    assert (request.status, request.attempt, request.estimated_tokens, request.queued_at) == ("queued", 0, 7, NOW)


def test_writers_of_many_threads_take_turns_on_one_connection(sqlite_database: Database) -> None:
    """SQLite's writer keeps its connection, also when a transaction in between was broken off."""
    with sqlite_database.write() as connection:
        run(connection, ADD, {"name": "a", "weight": 0.0})

    def work() -> None:
        for number in range(20):
            try:
                with sqlite_database.write() as connection:
                    run(connection, RAISE, {"who": "a", "more": 1})
                    if number % 5 == 0:
                        raise ValueError
            except ValueError:
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with sqlite_database.read() as connection:
        assert connection.execute(select(TENANTS.c.weight)).scalar_one() == 4 * 16
