"""How things stand is read behind the calls, not before each."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from jobs.gateway import standing as standing_module
from jobs.gateway.standing import Standing
from storage.database import Database
from storage.models import WorkerStatus
from storage.transitions import NewWorker, register_worker, update_worker


def start_worker(database: Database) -> None:
    now = database.now()
    worker = NewWorker(name="w", host="here", pid=1, model="tiny", artifact_digest="0" * 64, device="cpu")
    with database.write() as connection:
        register_worker(connection, worker, now)
        update_worker(connection, "w", now, status=WorkerStatus.READY, max_batch_size=4)


def test_a_call_is_given_the_last_reading_while_the_next_is_under_way(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standing_module, "KNOWN_FOR_S", -1.0)
    monkeypatch.setattr(standing_module, "OLDEST_S", 3600.0)

    async def play() -> None:
        standing = Standing(database, tmp_path)
        assert await standing.models() == {}
        start_worker(database)
        assert await standing.models() == {}, "it waited for a new reading"
        await standing.close()
        assert (await standing.models())["tiny"].workers == 1
        await standing.close()

    asyncio.run(play())


def test_a_call_waits_for_a_reading_when_the_last_is_too_old(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standing_module, "KNOWN_FOR_S", -1.0)
    monkeypatch.setattr(standing_module, "OLDEST_S", -1.0)

    async def play() -> None:
        standing = Standing(database, tmp_path)
        assert await standing.models() == {}
        start_worker(database)
        assert (await standing.models())["tiny"].workers == 1
        await standing.close()

    asyncio.run(play())
