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


def set_up_logs(
    process: str,
    *,
    level: Level = "info",
    file: Path | None = None,
    console: bool = True,
    must_write: bool = True,
) -> None:
    """Send structlog and standard logging to the same places.

    process: names this process in every line. file: JSON lines are appended to it, and it rotates. console: also write
    to standard error. must_write: raise SettingsError when the file cannot be written; a command that only reads does
    without it.
    """
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
        _name(process),
    ]
    handlers: list[logging.Handler] = []
    if file is not None and (must_write or _why_unwritable(file) is None):
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
    if why := _why_unwritable(file):
        raise SettingsError(f"cannot write the log {file}: {why}; make it writable or choose another PROMPTMILL_HOME")
    handler = _LateFileHandler(file, maxBytes=FILE_BYTES, backupCount=1, encoding="utf-8", delay=True)
    handler.setFormatter(
        _formatter(
            shared, [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(ensure_ascii=False)]
        )
    )
    return handler


class _LateFileHandler(RotatingFileHandler):
    """The file and its folder are made by the first line: most commands have nothing to say, one that only reads should
    leave nothing behind, and `logs` stays easy to look through."""

    def _open(self) -> Any:
        Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
        return super()._open()


def _why_unwritable(file: Path) -> str | None:
    """Why a file cannot be appended to, or made, in the system's words; None: it can. Nothing is made to find out."""
    nearest = next(each for each in (file, *file.parents) if os.path.lexists(each))
    try:
        if nearest == file:
            with file.open("ab"):
                return None
        if not nearest.is_dir():
            return os.strerror(errno.ENOTDIR)
        if not os.access(nearest, os.W_OK | os.X_OK):
            is_read_only = hasattr(os, "statvfs") and os.statvfs(nearest).f_flag & os.ST_RDONLY
            return os.strerror(errno.EROFS if is_read_only else errno.EACCES)
    except OSError as error:
        return error.strerror or str(error)
    return None


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
