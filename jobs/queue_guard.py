"""The Celery consumer that survives malformed messages.

Stock Celery 5.7 answers a message without an id with an endless reconnect loop, and one with a two-element body by
putting it back and exiting, for ever: one such message stops every worker. Here it is rejected and logged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import structlog
from celery.utils.log import get_logger
from celery.worker.consumer import Consumer

# What Celery raises while it takes a malformed message apart.
MALFORMED = (KeyError, ValueError, TypeError, IndexError, AttributeError)

log = structlog.get_logger(__name__)


class GuardedConsumer(Consumer):  # type: ignore[misc]  # Celery has no types
    """Rejects what it cannot take apart."""

    def create_task_handler(self, *args: Any, **kwargs: Any) -> Callable[[Any], None]:
        handle = super().create_task_handler(*args, **kwargs)

        def guarded(message: Any) -> None:
            try:
                handle(message)
            except MALFORMED as error:
                log.error(
                    "message_rejected",
                    reason=f"{type(error).__name__}: {error}",
                    delivery_tag=str(getattr(message, "delivery_tag", None)),
                )
                message.reject_log_error(get_logger(__name__), self.connection_errors)

        return guarded
