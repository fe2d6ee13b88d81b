"""`promptmill serve`: the gateway in one process, by uvicorn, with bounds that keep slow and broken clients harmless.

More throughput comes from more processes behind a reverse proxy, which also brings TLS (docs/api.md).
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import socket
import sys
import threading
from types import FrameType
from typing import Any

import h11
import structlog
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from jobs.gateway.app import create_app
from jobs.gateway.errors import INVALID_REQUEST
from jobs.listening import BACKLOG, open_sockets
from jobs.settings import Settings
from jobs.up import await_queue, stop_signals

MAX_HEADER_BYTES = 32 * 1024
# Longer than the SDK's pool and most proxies keep an idle connection: whoever closes last causes no failed call.
KEEP_ALIVE_S = 75
# A thread that validates a file must not hold the event loop back for Python's default of 5 ms at each turn.
SWITCH_INTERVAL_S = 0.001
# A gateway that is told to stop while it starts may finish its start for so long, and close what it opened.
START_GRACE_S = 5.0

log = structlog.get_logger(__name__)


class PatientProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 with a deadline for headers, and with refusals in the API's own form.

    header_timeout_s: from connecting, or a further request's first byte, to the end of the headers.
    """

    header_timeout_s = 30.0
    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        elif self._header_timer is None:
            self._await_headers()  # of a further request on a kept connection

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        self._stop_waiting()
        self._refuse(400, f"{msg} Headers may take {MAX_HEADER_BYTES:,} bytes.", "invalid_http_request")

    def _await_headers(self) -> None:
        self._header_timer = self.loop.call_later(self.header_timeout_s, self._headers_overdue)

    def _stop_waiting(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _headers_overdue(self) -> None:
        self._header_timer = None
        if not self.transport.is_closing():
            self._refuse(408, f"The headers did not come within {self.header_timeout_s:g} s.", "request_timeout")

    def _refuse(self, status: int, message: str, code: str) -> None:
        error = {"message": message, "type": INVALID_REQUEST, "param": None, "code": code}
        body = json.dumps({"error": error}).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        for event in (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            sent = self.conn.send(event)
            if sent:
                self.transport.write(sent)
        self.transport.close()


class Server(uvicorn.Server):
    """Has its address before it opens anything else, tells where it listens once it does, and ends when it cannot."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, note: Any) -> None:
        super().__init__(config)
        self._app = app
        self._note = note

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until told to stop.

        Raises ListenError, and what kept the application from opening; uvicorn would log it and say nothing.
        """
        sockets = sockets or open_sockets(self.config.host, self.config.port)
        try:
            super().run(sockets)
        except SystemExit:
            failure = self._app.state.start_failure
            if failure is None:
                raise
            raise failure from None
        finally:
            for each in sockets:
                each.close()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            for server in self.servers:
                for each in server.sockets:
                    host, port = each.getsockname()[:2]
                    shown = f"[{host}]" if ":" in host else host
                    log.info("gateway_started", host=host, port=port)
                    self._note(f"serving http://{shown}:{port}/v1")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        if not self.started:
            # It would be looked at only when all is open, and a thread that waits for a database cannot be stopped.
            timer = threading.Timer(START_GRACE_S, self._leave, (sig,))
            timer.daemon = True
            timer.start()

    def _leave(self, sig: int) -> None:
        if not self.started:
            os._exit(128 + sig)


def make_server(settings: Settings, note: Any = lambda _text: None) -> Server:
    """A server that runs with `run()`. Raises SettingsError when its address needs keys that nobody is asked for."""
    protocol = type("Protocol", (PatientProtocol,), {"header_timeout_s": settings.gateway.receive_timeout_s})
    app = create_app(settings)
    config = uvicorn.Config(
        app,
        host=settings.gateway.host,
        port=settings.gateway.port,
        http=protocol,
        loop="auto",  # uvloop, where there is one
        ws="none",
        lifespan="on",
        log_config=None,  # jobs/logs.py has set it up
        access_log=False,  # the edge measures calls; addresses and paths of callers are not kept
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(settings.gateway.drain_s),
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        backlog=BACKLOG,
    )
    return Server(config, app, note)


def serve(settings: Settings, note: Any) -> int:
    """Run until SIGINT or SIGTERM; calls in hand get `drain_s`. Returns the exit code.

    Raises PromptmillError when it cannot start: ListenError, SettingsError, StorageError, QueueServerError, QueueError;
    SystemExit when that has a reason which nobody foresaw, and which is in the log.
    """
    if settings.queue.url:
        with stop_signals() as signals:
            if not await_queue(settings.queue, note, signals):
                return 0
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # what is wrong with an upload is told to its sender
    server = make_server(settings, note)
    # Modules, routes and models stay as long as the process; a full collection would walk them for 75 ms.
    gc.collect()
    gc.freeze()
    server.run()
    return 0 if server.started else 1
