"""Addresses of this machine, from its own kernel: nothing is sent to anybody, and no name server is asked.

The messages are RTM_GETADDR and RTM_NEWADDR of Linux's rtnetlink, as in linux/netlink.h, linux/rtnetlink.h and
linux/if_addr.h (Linux 6.1; unchanged since 2.6).
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

__all__ = ["IPAddress", "LocalAddress", "local_addresses"]

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

_HEADER: Final = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_ADDRESS: Final = struct.Struct("=BBBBI")  # ifaddrmsg: family, prefix length, flags, scope, interface
_ATTRIBUTE: Final = struct.Struct("=HH")  # rtattr: length, type
_GET_ADDRESSES: Final = 22  # RTM_GETADDR
_NEW_ADDRESS: Final = 20  # RTM_NEWADDR
_ERROR: Final = 2  # NLMSG_ERROR
_DONE: Final = 3  # NLMSG_DONE
_REQUEST_DUMP: Final = 0x301  # NLM_F_REQUEST | NLM_F_ROOT | NLM_F_MATCH
_PEER: Final = 1  # IFA_ADDRESS: of the other end on a point-to-point interface, else as IFA_LOCAL
_LOCAL: Final = 2  # IFA_LOCAL
_WAIT_S: Final = 2.0


class LocalAddress(NamedTuple):
    """An address that this machine answers to."""

    address: IPAddress
    interface: str

    @property
    def is_far_reaching(self) -> bool:
        """Whether another machine can use it as it is written."""
        return not (self.address.is_loopback or self.address.is_link_local)


def local_addresses() -> tuple[LocalAddress, ...]:
    """All of them, IPv4 first, in the kernel's order. Raises OSError when the kernel does not answer."""
    request = _HEADER.pack(_HEADER.size + _ADDRESS.size, _GET_ADDRESSES, _REQUEST_DUMP, 1, 0)
    found: list[LocalAddress] = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as sock:
        sock.settimeout(_WAIT_S)
        sock.bind((0, 0))
        sock.send(request + _ADDRESS.pack(socket.AF_UNSPEC, 0, 0, 0, 0))
        more = True
        while more:
            for kind, body in _messages(sock.recv(1 << 17)):
                if kind == _NEW_ADDRESS:
                    found += _address(body)
                elif kind in {_ERROR, _DONE}:
                    more = False
    return tuple(sorted(found, key=lambda each: each.address.version))


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(type, body) pairs of one datagram."""
    while len(data) >= _HEADER.size:
        length, kind, *_ = _HEADER.unpack_from(data)
        if not _HEADER.size <= length <= len(data):
            return
        yield kind, data[_HEADER.size : length]
        data = data[-(-length // 4) * 4 :]


def _address(body: bytes) -> Iterator[LocalAddress]:
    """The address in one RTM_NEWADDR."""
    family, _, _, _, index = _ADDRESS.unpack_from(body)
    attributes: dict[int, bytes] = {}
    rest = body[_ADDRESS.size :]
    while len(rest) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(rest)
        if not _ATTRIBUTE.size <= length <= len(rest):
            break
        attributes[kind] = rest[_ATTRIBUTE.size : length]
        rest = rest[-(-length // 4) * 4 :]
    packed = attributes.get(_LOCAL, attributes.get(_PEER))
    if packed is not None and family in {socket.AF_INET, socket.AF_INET6}:
        yield LocalAddress(ipaddress.ip_address(packed), _interface(index))


def _interface(index: int) -> str:
    try:
        return socket.if_indextoname(index)
    except OSError:  # it went away meanwhile
        return f"#{index}"
