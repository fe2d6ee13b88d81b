"""The sockets that the gateway listens on, opened before anything else: an address that cannot be had is said at once.

They listen from then on. Who connects while the gateway starts waits for it, and a second gateway finds the port taken.
"""

from __future__ import annotations

import errno
import os
import socket

from storage.errors import PromptmillError

# Connections that may wait while the event loop is busy, as uvicorn has it.
BACKLOG = 2048
CODES = {
    errno.EADDRINUSE: "port_taken",
    errno.EACCES: "port_forbidden",
    errno.EPERM: "port_forbidden",
    errno.EADDRNOTAVAIL: "host_not_here",
}


class ListenError(PromptmillError):
    """The gateway cannot listen where it is told to: port_taken, port_forbidden, host_not_here, host_unknown,
    address_refused."""


def open_sockets(host: str, port: int) -> list[socket.socket]:
    """One socket for each address that `host` stands for. Raises ListenError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ListenError(
            f"host {host} has no address ({reason}); choose another with --host or PROMPTMILL_GATEWAY_HOST",
            code="host_unknown",
        ) from None
    opened: list[socket.socket] = []
    absent: OSError | None = None
    try:
        for family, address in dict.fromkeys((each[0], each[4]) for each in found):
            try:
                opened.append(_listen(family, address))
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise explain(error, host, port) from None
                absent = error  # `localhost` where there is no IPv6: the others may do
    except BaseException:
        for each in opened:
            each.close()
        raise
    if not opened and absent is not None:
        raise explain(absent, host, port) from None
    return opened


def explain(error: OSError, host: str, port: int) -> ListenError:
    """Why an address cannot be listened on, and the way out."""
    code = CODES.get(error.errno or 0, "address_refused")
    match code:
        case "port_taken":
            message = f"port {port} of {host} is taken; choose another with --port or PROMPTMILL_GATEWAY_PORT"
        case "port_forbidden":
            message = (
                f"port {port} of {host} is not for this user to open, as those below 1024 mostly are not; choose "
                "another with --port or PROMPTMILL_GATEWAY_PORT, and let a reverse proxy have this one"
            )
        case "host_not_here":
            message = (
                f"host {host} is no address of this machine; choose another with --host or PROMPTMILL_GATEWAY_HOST: "
                "127.0.0.1 for this machine alone, 0.0.0.0 for all its networks"
            )
        case _:
            message = (
                f"cannot listen on port {port} of {host}: {error.strerror}; choose another with --host and --port, or "
                "PROMPTMILL_GATEWAY_HOST and PROMPTMILL_GATEWAY_PORT"
            )
    return ListenError(message, code=code)


def _listen(family: int, address: tuple[object, ...]) -> socket.socket:
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # elsewhere it would let two gateways share a port
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        opened.bind(address)
        opened.listen(BACKLOG)
    except BaseException:
        opened.close()
        raise
    return opened
