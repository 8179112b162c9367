"""Allow-lists: from where a consumer takes connections, and which consumers a request may name to a producer.

Nobody is asked here: no name is looked up, so that a name on a request reaches no name server before it is allowed.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Final, final

from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff.runtime.address import Address

__all__ = ["Destinations", "Sources"]

_Network = IPv4Network | IPv6Network
_Host = IPv4Address | IPv6Address | str

_NAME: Final = re.compile(r"(?!-)[a-z0-9_-]{1,63}(\.(?!-)[a-z0-9_-]{1,63})*")
_NUMBER: Final = re.compile(r"(0x[0-9a-f]*|[0-9]+)")
"a last label of this form makes a name an address, in a spelling of old (2130706433, 0x7f.1)"
_MAPPED: Final = IPv6Network("::ffff:0:0/96")


@final
class Sources:
    """Addresses and networks that may connect.

    Args:
        entries: "10.1.0.0/16", "2001:db8::/32", "10.0.0.7". Names are not taken: an address does not tell one.

    Raises:
        LocalError: CONFIG, for an entry that is none of these.
    """

    def __init__(self, entries: Sequence[str]) -> None:
        self._networks = [_source(entry) for entry in _listed(entries)]

    def allows(self, host: str) -> bool:
        """Whether a peer at this numeric address may connect."""
        address = _canonical(host)
        return not isinstance(address, str) and any(_holds(network, address) for network in self._networks)


@final
class Destinations:
    """Consumers that may be dialled.

    Args:
        entries: names, addresses and networks, each with or without a port: "decode-7", "decode-7:5556",
            "10.1.0.0/16", "10.1.0.7:5556", "2001:db8::/32", "[2001:db8::7]:5556". Without a port, all ports. A name
            allows that name and not its addresses, an address not its names.

    Raises:
        LocalError: CONFIG, for an entry that is none of these.
    """

    def __init__(self, entries: Sequence[str]) -> None:
        self._rules = [_destination(entry) for entry in _listed(entries)]

    def check(self, address: Address) -> None:
        """Raise LocalError (NOT_ALLOWED) that names the host, unless it may be dialled."""
        host = _canonical(address.host)
        for allowed, port in self._rules:
            if port not in {None, address.port}:
                continue
            if host == allowed if isinstance(allowed, str) else _holds(allowed, host):
                return
        raise LocalError(
            ErrorCode.NOT_ALLOWED,
            f"{address} is not on this producer's allow-list and was not contacted: add it if requests may name it",
        )


def _listed(entries: Sequence[str]) -> Sequence[str]:
    if isinstance(entries, str):
        raise LocalError(ErrorCode.CONFIG, f"an allow-list is a list: write [{entries!r}]")
    return entries


def _source(entry: str) -> _Network:
    network = _network(entry)
    if network is None:
        raise _bad(entry, "an address or a network, such as 10.1.0.0/16 or 2001:db8::/32, without a port")
    return network


def _destination(entry: str) -> tuple[_Network | str, int | None]:
    whole = _network(entry)
    if whole is not None:
        return whole, None
    host, port = _split(entry)
    if host.startswith("[") and host.endswith("]"):
        inside = _network(host[1:-1])
        if inside is not None:
            return inside, port
        raise _bad(entry, "[2001:db8::7]:5556")
    network = _network(host) if ":" not in host else None
    if network is not None:
        return network, port
    name = _canonical(host)
    if not isinstance(name, str) or not _NAME.fullmatch(name) or _NUMBER.fullmatch(name.rpartition(".")[2]):
        raise _bad(entry, "a host name, an address or a network, with or without :port; no wildcards")
    return name, port


def _split(entry: str) -> tuple[str, int | None]:
    """Host and port, where there is one."""
    host, colon, port = entry.rpartition(":")
    if not colon or port.endswith("]"):
        return entry, None
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) <= 65535):
        raise _bad(entry, "a port from 1 to 65535 after the colon")
    return host, int(port)


def _bad(entry: str, form: str) -> LocalError:
    return LocalError(ErrorCode.CONFIG, f"{entry!r} cannot stand on an allow-list: write {form}")


def _network(text: str) -> _Network | None:
    """A network, or one address; an IPv4 one wrapped in IPv6 is unwrapped. None: neither."""
    try:
        network = ipaddress.ip_network(text)
    except ValueError:
        return None
    if isinstance(network, IPv6Network) and network.subnet_of(_MAPPED):
        return IPv4Network((int(network.network_address) & 0xFFFFFFFF, network.prefixlen - 96))
    return network


def _canonical(host: str) -> _Host:
    """An address, unwrapped, or a name in small letters without its trailing dot."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower().removesuffix(".") if host.isascii() else host
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def _holds(network: _Network, host: _Host) -> bool:
    return not isinstance(host, str) and host.version == network.version and host in network
