"""`promptmill door`: the Celery door and the inbox in one small process that runs no model. `promptmill up --door` has
them beside its workers."""

from __future__ import annotations

import contextlib
import socket

from jobs.celery_door import CeleryDoor
from jobs.inbox import Inbox
from jobs.queue import make_app
from jobs.queue_server import open_queue_server
from jobs.reception import Reception
from jobs.settings import Settings
from jobs.up import StopSignals, UpObserver, await_queue, with_queue_url
from jobs.validation import Validator
from storage.database import Database, open_database, upgrade_schema

TOUCH_S = 1.0
OPENED = "the Celery door and the inbox are open"


class Doors:
    """Both doors, open until they are closed. settings: with the queue's URL filled in."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._app = make_app(settings.queue)
        reception = Reception(database, self._app, settings)
        self._doors: tuple[CeleryDoor | Inbox, ...] = (
            CeleryDoor(reception, settings).start(),
            Inbox(reception, settings).start(),
        )

    def close(self) -> None:
        """Take nothing more. What waits for answers is the next one's to answer. Closing twice does nothing."""
        for door in self._doors:
            door.close()
        self._doors = ()
        self._app.close()


def serve_doors(settings: Settings, observer: UpObserver, signals: StopSignals) -> None:
    """Run until told to stop. Any number of such processes may stand side by side.

    As long as it lives it touches a file, for a health check from outside.
    """
    alive_file = settings.home / "run" / f"door-{socket.gethostname()}.alive"
    alive_file.parent.mkdir(parents=True, exist_ok=True)
    with open_database(settings.database.url) as database:
        upgrade_schema(database)
        with open_queue_server(settings) as server:
            settings = with_queue_url(settings, server.url)
            if not await_queue(settings.queue, observer.note, signals):
                return
            # Batches that come in here are read here too, where nobody else does it.
            with contextlib.closing(Doors(database, settings)), Validator(database, settings):
                observer.note(OPENED)
                try:
                    while not signals.is_set:
                        with contextlib.suppress(OSError):
                            alive_file.touch()
                        signals.wait(TOUCH_S)
                finally:
                    alive_file.unlink(missing_ok=True)
