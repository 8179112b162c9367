"""Addresses as people write them: host:port, [::1]:5556, :0."""

from __future__ import annotations

import socket
from typing import NamedTuple, cast

from pdhandoff.errors import ErrorCode, LocalError

__all__ = ["Address", "Resolved", "SocketAddress", "listen", "parse_address", "resolve", "resolve_numeric"]

SocketAddress = tuple[str, int] | tuple[str, int, int, int]
Resolved = tuple[int, SocketAddress]
"address family and socket address"


class Address(NamedTuple):
    """A host name or IP address, without brackets, and a TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Read "host:port" or "[ipv6]:port". Raises LocalError(CONFIG) that shows the right form."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    number = int(port) if port.isascii() and port.isdigit() and len(port) <= 5 else -1
    if not colon or not 0 <= number <= 65535 or (":" in host and not bracketed):
        raise LocalError(
            ErrorCode.CONFIG, f"{text!r} is no address: write host:port, 127.0.0.1:5556 or [::1]:5556 (port 0: any)"
        )
    return Address(host, number)


def resolve(address: Address) -> list[Resolved]:
    """(family, socket address) pairs to try in order. May ask a name server, so never on an engine's thread.

    Raises LocalError (LINK_LOST) when the name is not known.
    """
    return _look_up(address)


def resolve_numeric(address: Address) -> list[Resolved]:
    """As `resolve`, without asking anybody: empty for a name."""
    try:
        return _look_up(address, socket.AI_NUMERICHOST)
    except LocalError:
        return []


def _look_up(address: Address, flags: int = 0) -> list[Resolved]:
    try:
        found = socket.getaddrinfo(address.host or None, address.port, type=socket.SOCK_STREAM, flags=flags)
    except (OSError, UnicodeError) as error:  # UnicodeError: no possible host name
        raise LocalError(ErrorCode.LINK_LOST, f"cannot resolve {address.host!r}: {error}") from error
    return [(int(family), cast("SocketAddress", where)) for family, _, _, _, where in found]


def listen(address: Address, *, backlog: int = 128) -> socket.socket:
    """A listening, non-blocking socket; without a host, on all addresses of both families where the machine has both.

    Raises LocalError(CONFIG) that names the address when the host is not known or the port is taken.
    """
    try:
        found = _look_up(address, socket.AI_PASSIVE)
    except LocalError as error:
        raise LocalError(ErrorCode.CONFIG, f"cannot listen on {address}: {error.reason}") from error
    if not address.host:
        found.sort(key=lambda pair: pair[0] != socket.AF_INET6)
    problem = "no address"
    for family, where in found:
        try:
            return _bound(family, where, every=address.host in {"", "::"}, backlog=backlog)
        except OSError as error:
            problem = error.strerror or str(error)
    raise LocalError(ErrorCode.CONFIG, f"cannot listen on {address}: {problem}; choose another port, or port 0 for any")


def _bound(family: int, where: SocketAddress, *, every: bool, backlog: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and every:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(where)
        sock.listen(backlog)
        sock.setblocking(False)  # noqa: FBT003 - the standard library's name for it
    except OSError:
        sock.close()
        raise
    return sock
