"""Logging set-up, called once by each entry point; all other code only does `structlog.get_logger()`.

Events are named in past tense (`attempt_completed`). Prompts and completions never appear. A worker writes JSON lines
into a file in the home folder; a terminal gets coloured lines, another standard error gets plain ones.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import traceback
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Literal

import structlog

from storage.errors import SettingsError

# Two files of 20 MB for each process: enough to look back over a day of warnings, never a full disk.
FILE_BYTES = 20_000_000
# Libraries that speak through standard logging; only what they warn of is ours to know.
QUIET_LIBRARIES = ("celery", "kombu", "amqp", "redis", "sqlalchemy", "alembic")

Level = Literal["debug", "info", "warning", "error"]


def set_up_logs(process: str, *, level: Level = "info", file: Path | None = None, console: bool = True) -> None:
    """Send structlog and standard logging to the same places.

    process: names this process in every line. file: JSON lines are appended to it, and it rotates.
    console: also write to standard error. Raises SettingsError when the file cannot be written.
    """
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
        _name(process),
    ]
    handlers: list[logging.Handler] = []
    if file is not None:
        handlers.append(_file_handler(file, shared))
    if console:
        terminal = logging.StreamHandler(sys.stderr)
        # Plain tracebacks: the prettier ones show local variables, and those hold prompts and keys.
        renderer = structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
        terminal.setFormatter(_formatter(shared, [renderer]))
        handlers.append(terminal)

    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
        if isinstance(old.formatter, structlog.stdlib.ProcessorFormatter):
            old.close()  # one of ours, from an earlier call
    for handler in handlers or [logging.NullHandler()]:
        root.addHandler(handler)
    root.setLevel(level.upper())
    for library in QUIET_LIBRARIES:
        logging.getLogger(library).setLevel(logging.WARNING)
    logging.captureWarnings(True)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )


def crash_facts(error: BaseException) -> dict[str, str]:
    """What may be logged of an unexpected error: its kind and where it came from, never its text: that may quote a
    prompt."""
    return {"kind": type(error).__name__, "traceback": "".join(traceback.format_tb(error.__traceback__))}


def _file_handler(file: Path, shared: list[Any]) -> logging.Handler:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # The file is made by the first line: most commands have nothing to say, and `logs` stays easy to look through.
        handler = RotatingFileHandler(file, maxBytes=FILE_BYTES, backupCount=1, encoding="utf-8", delay=True)
        if not os.access(file if file.exists() else file.parent, os.W_OK) or file.is_dir():
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise SettingsError(
            f"cannot write the log {file}: {error.strerror}; make it writable or choose another PROMPTMILL_HOME"
        ) from error
    handler.setFormatter(
        _formatter(
            shared, [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(ensure_ascii=False)]
        )
    )
    return handler


def _formatter(shared: list[Any], last: list[Any]) -> logging.Formatter:
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
    )


def _name(process: str) -> Any:
    def add(_logger: Any, _method: str, event: dict[str, Any]) -> dict[str, Any]:
        event["process"] = process
        return event

    return add
