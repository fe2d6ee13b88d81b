"""The Celery consumer that survives malformed messages.

Stock Celery 5.7 answers a message without an id with an endless reconnect loop, and one with a two-element body by
putting it back and exiting, for ever: one such message stops every worker. What is no message at all (not JSON, not an
object, no properties) ends the process once, in kombu. Here all of them are dropped and logged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import structlog
from celery.utils.log import get_logger
from celery.worker.consumer import Consumer
from kombu.transport.redis import Channel, Transport

# What Celery and kombu raise while they take a malformed message apart.
MALFORMED = (KeyError, ValueError, TypeError, IndexError, AttributeError)

log = structlog.get_logger(__name__)


class GuardedChannel(Channel):  # type: ignore[misc]  # kombu has no types
    """Drops what is no message. It has left its list by then, and is in no other."""

    def _brpop_read(self, **options: Any) -> Any:
        try:
            return super()._brpop_read(**options)
        except MALFORMED as error:
            log.error("message_rejected", reason=f"{type(error).__name__}: {error}")
            return True


class GuardedTransport(Transport):  # type: ignore[misc]
    """kombu's transport for Redis with the channel above."""

    Channel = GuardedChannel


class GuardedConsumer(Consumer):  # type: ignore[misc]  # Celery has no types
    """Rejects what it cannot take apart, and what is no task of ours.

    Celery itself would log such messages whole; what was sent to the wrong queue may hold prompts and keys.
    """

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

    def on_unknown_message(self, _body: Any, message: Any) -> None:
        self._reject(message, "unknown_message")

    def on_unknown_task(self, _body: Any, message: Any, _error: Exception) -> None:
        self._reject(message, "unknown_task")

    def on_invalid_task(self, _body: Any, message: Any, _error: Exception) -> None:
        self._reject(message, "invalid_task")

    def on_decode_error(self, message: Any, _error: Exception) -> None:
        self._reject(message, "undecodable")

    def _reject(self, message: Any, reason: str) -> None:
        log.error("message_rejected", reason=reason, delivery_tag=str(getattr(message, "delivery_tag", None)))
        message.reject_log_error(get_logger(__name__), self.connection_errors)
