"""`promptmill door`: the Celery door and the inbox in one small process that runs no model."""

from __future__ import annotations

import contextlib
import socket

from jobs.celery_door import CeleryDoor
from jobs.inbox import Inbox
from jobs.queue import make_app
from jobs.queue_server import open_queue_server
from jobs.reception import Reception
from jobs.settings import Settings
from jobs.up import StopSignals, UpObserver, with_queue_url
from jobs.validation import Validator
from storage.database import open_database, upgrade_schema

TOUCH_S = 1.0


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
            app = make_app(settings.queue)
            reception = Reception(database, app, settings)
            doors = (CeleryDoor(reception, settings).start(), Inbox(reception, settings).start())
            # Batches that come in here are read here, where nobody else does it.
            validator = Validator(database, settings).start()
            observer.note("the Celery door and the inbox are open")
            try:
                while not signals.is_set:
                    with contextlib.suppress(OSError):
                        alive_file.touch()
                    signals.wait(TOUCH_S)
            finally:
                for door in doors:
                    door.close()
                validator.close()
                app.close()
                alive_file.unlink(missing_ok=True)
