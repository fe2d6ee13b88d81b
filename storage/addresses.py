"""Host and port as URLs have them: what is wrong with one, in words.

Nothing that stands there is repeated: where an @ or a / of a password was not percent-encoded, it is a part of it.
"""

from __future__ import annotations

import ipaddress

HIGHEST_PORT = 65_535


def wrong_in_address(address: str) -> str | None:
    """address: what a URL has between user and path, such as db.example:5432 or [::1]; None: nothing is wrong."""
    if "@" in address:
        return "the user or the password has an @ in it as it is"
    if address.startswith("["):
        host, closing, rest = address[1:].partition("]")
        if not closing or not _is_ipv6(host) or (rest and not rest.startswith(":")):
            return "the host is not an IPv6 address in brackets, as in [::1]:1234"
        colon, port = rest[:1], rest[1:]
    else:
        host, colon, port = address.partition(":")
        if "[" in host or "]" in host:
            return "the host has a bracket in it"
        if _is_ipv6(address):
            return "the host is an IPv6 address without its brackets, as in [::1]:1234"
    if colon and not _is_port(port):
        return f"the port after the host is not a number from 1 to {HIGHEST_PORT:,}"
    return None


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def _is_port(text: str) -> bool:
    # len: int() itself refuses thousands of digits, by an error of its own.
    return text.isascii() and text.isdecimal() and len(text) <= 9 and 1 <= int(text) <= HIGHEST_PORT
