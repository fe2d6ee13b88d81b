"""A pass comes when work has come or is done, not only when the clock says so."""

from __future__ import annotations

from jobs.up import NEWS_LOOKS, QUIET_S, News
from storage import transitions
from storage.changes import ChangeWatch
from storage.database import Database, open_database
from storage.transitions import NewBatch


def test_work_that_comes_and_work_that_is_done_are_news_and_what_lies_between_is_not() -> None:
    news, now = News(), 0.0
    assert not news.note(False, now)
    looks = [news.note(True, now + n * QUIET_S / 2) for n in range(NEWS_LOOKS + 20)]
    assert looks == [True] * NEWS_LOOKS + [False] * 20
    last = now + (NEWS_LOOKS + 19) * QUIET_S / 2
    assert not news.note(False, last + QUIET_S / 2)
    assert news.note(False, last + QUIET_S)
    assert not news.note(False, last + 2 * QUIET_S)
    assert news.note(True, last + 3 * QUIET_S)


def test_commits_of_other_connections_are_seen_once(sqlite_database: Database) -> None:
    watch = ChangeWatch(sqlite_database)
    assert not watch.has_changed()
    with open_database(str(sqlite_database.engine.url)) as other, other.write() as connection:
        transitions.create_batch(connection, NewBatch("batch_1", "f", "/v1/completions", "tiny"), other.now())
    assert watch.has_changed()
    assert not watch.has_changed()
    with sqlite_database.write() as connection:
        transitions.create_batch(connection, NewBatch("batch_2", "f", "/v1/completions", "tiny"), 1.0)
    assert watch.has_changed()
    watch.close()
