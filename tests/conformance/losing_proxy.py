"""A TCP proxy that loses answers: the server has done its work, and the client's connection breaks all the same."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

PIECE_BYTES = 65_536


class LosingProxy:
    """Stands before `root`. losses: answers that are lost before the first one comes through.

    Only calls of `method` are harmed. lost: how many were. Use as `with LosingProxy(...) as proxy`.
    """

    def __init__(self, root: str, *, losses: int, method: str = "POST") -> None:
        target = urlsplit(root)
        assert target.hostname is not None and target.port is not None
        self._target = (target.hostname, target.port)
        self._left = losses
        self._begins = f"{method} ".encode()
        self.lost = 0
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: set[socket.socket] = {self._listener}
        self._threads: list[threading.Thread] = []

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            for each in self._open:
                _shut(each)
        for thread in self._threads:
            thread.join(30)

    def _start(self, work: object, *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with self._listener:
            while True:
                try:
                    client, _ = self._listener.accept()
                except OSError:
                    return
                server = socket.create_connection(self._target)
                with self._lock:
                    self._open |= {client, server}
                asked = threading.Event()  # the client has sent a call that may be harmed
                self._start(self._carry_calls, client, server, asked)
                self._start(self._carry_answers, server, client, asked)

    def _carry_calls(self, client: socket.socket, server: socket.socket, asked: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while piece := client.recv(PIECE_BYTES):
                if piece.startswith(self._begins):
                    asked.set()
                server.sendall(piece)
        _shut(server)

    def _carry_answers(self, server: socket.socket, client: socket.socket, asked: threading.Event) -> None:
        with server, client:
            with contextlib.suppress(OSError):
                while piece := server.recv(PIECE_BYTES):
                    with self._lock:
                        loses = asked.is_set() and self._left > 0
                        self._left -= loses
                        self.lost += loses
                    if loses:
                        break
                    client.sendall(piece)
            _shut(client)
            _shut(server)
        with self._lock:
            self._open -= {server, client}


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
