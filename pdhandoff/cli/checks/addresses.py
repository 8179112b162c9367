"""Where peers reach this machine. Only its own kernel is asked; no address elsewhere is contacted or probed."""

from __future__ import annotations

import ipaddress
import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Final

from pdhandoff.cli.checks.finding import Finding, Status
from pdhandoff.cli.checks.interfaces import IPAddress, LocalAddress
from pdhandoff.cli.checks.system import System
from pdhandoff.errors import ErrorCode, LocalError, PdHandoffError
from pdhandoff.runtime.address import Address, Resolved, listen, parse_address, resolve

__all__ = ["check_addresses", "check_listen", "resolve_within"]

_EVERY: Final = frozenset({"", "::", "0.0.0.0"})  # noqa: S104 - these are recognised, not bound
_UP_GATEWAY: Final = 0x3  # RTF_UP | RTF_GATEWAY, linux/route.h
_REJECT: Final = 0x200  # RTF_REJECT


def resolve_within(address: Address, within_s: float) -> list[Resolved]:
    """As `resolve`, with an end to the wait for a name server. Raises LocalError (LINK_LOST)."""
    answers: queue.SimpleQueue[list[Resolved] | PdHandoffError] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(resolve(address))
        except PdHandoffError as error:
            answers.put(error)

    threading.Thread(target=ask, name="pdhandoff-doctor-resolve", daemon=True).start()
    try:
        found = answers.get(timeout=within_s)
    except queue.Empty:
        raise LocalError(
            ErrorCode.LINK_LOST,
            f"{address.host!r} was not resolved within {within_s:g} s: is the name server reachable?",
        ) from None
    if isinstance(found, PdHandoffError):
        raise found
    return found


def check_addresses(system: System) -> Iterator[Finding]:
    """Every local address, by family, and the default route."""
    try:
        local = system.addresses()
    except OSError as error:
        says = f"the kernel does not list this machine's addresses: {error.strerror or error}"
        yield Finding(check="addresses", status=Status.SKIPPED, says=says, command="ip address")
        return
    far = [each for each in local if each.is_far_reaching]
    interfaces = sorted({each.interface for each in far})
    facts = {
        "ipv4": tuple(str(each.address) for each in local if each.address.version == 4),
        "ipv6": tuple(str(each.address) for each in local if each.address.version == 6),
        "interfaces": tuple(interfaces),
    }
    if not far:
        says = "there is no address but loopback and link-local ones: peers on other hosts cannot reach this one"
        yield Finding(check="addresses", status=Status.WARNING, says=says, command="ip address", facts=facts)
    else:
        several = len(interfaces) > 1
        yield Finding(
            check="addresses",
            status=Status.OK,
            says="; ".join(_of_interface(name, far) for name in interfaces),
            advice="several interfaces: nothing chooses one for you, so name the address that peers are to use"
            if several
            else "",
            facts=facts,
        )
    yield _default_route(system)


def _of_interface(name: str, addresses: Sequence[LocalAddress]) -> str:
    return f"{name}: {', '.join(str(each.address) for each in addresses if each.interface == name)}"


def _default_route(system: System) -> Finding:
    """Nothing depends on it; but it is what other software guesses an address from."""
    routes = {"ipv4": _routes_ipv4(system), "ipv6": _routes_ipv6(system)}
    facts = {family: tuple(sorted(set(names))) for family, names in routes.items()}
    if not any(routes.values()):
        says = "there is no default route, and none is needed: the address that is configured is the one peers use"
        return Finding(check="default-route", status=Status.OK, says=says, facts=facts)
    parts = [f"{family.replace('ip', 'IP')} by {', '.join(names)}" for family, names in facts.items() if names]
    says = (
        f"the default route ({'; '.join(parts)}) is not what addresses are chosen by: yours is used as it is configured"
    )
    return Finding(check="default-route", status=Status.OK, says=says, facts=facts)


def _routes_ipv4(system: System) -> list[str]:
    """Interfaces of routes to everything in /proc/net/route: Iface Destination Gateway Flags ... Mask."""
    found = []
    for line in system.lines("proc/net/route")[1:]:
        columns = line.split()
        if len(columns) > 7 and columns[1] == columns[7] == "00000000" and _leads_out(columns[3]):
            found.append(columns[0])
    return found


def _routes_ipv6(system: System) -> list[str]:
    """The same in /proc/net/ipv6_route: destination, its length, ..., flags and interface last."""
    found = []
    for line in system.lines("proc/net/ipv6_route"):
        columns = line.split()
        if len(columns) > 9 and columns[0] == "0" * 32 and columns[1] == "00" and _leads_out(columns[8]):
            found.append(columns[9])
    return found


def _leads_out(flags: str) -> bool:
    number = int(flags, 16)
    return bool(number & _UP_GATEWAY) and not number & _REJECT


def check_listen(text: str, system: System, within_s: float) -> Iterator[Finding]:
    """What a listener on this address would be reached by, and whether its port is free.

    Raises LocalError (CONFIG) when it is no address.
    """
    address = parse_address(text)
    try:
        local = system.addresses()
    except OSError:
        local = ()
    try:
        found = [] if address.host in _EVERY else resolve_within(address, within_s)
    except LocalError as error:
        command = f"getent ahosts {address.host}"
        yield Finding(check="listen.address", status=Status.PROBLEM, says=error.reason, command=command)
        return
    finding = _named(address, _ips(found), local) if found else _every(address, local)
    yield finding
    if finding.status is not Status.PROBLEM:
        yield _port(address)


def _ips(found: Sequence[Resolved]) -> list[IPAddress]:
    return list(dict.fromkeys(ipaddress.ip_address(where[0]) for _, where in found))


def _every(address: Address, local: Sequence[LocalAddress]) -> Finding:
    """A listener on all addresses has none that it could tell to anybody."""
    far = [each for each in local if each.is_far_reaching and (address.host != "0.0.0.0" or each.address.version == 4)]  # noqa: S104
    reached = tuple(str(Address(str(each.address), address.port)) for each in far)
    interfaces = {each.interface for each in far}
    says = f"{address} listens on every address"
    facts = {"reached_by": reached, "advertised": None}
    if not far:
        says += ", of which other hosts can use none"
        return Finding(check="listen.address", status=Status.WARNING, says=says, facts=facts)
    if len(interfaces) > 1:
        return Finding(
            check="listen.address",
            status=Status.WARNING,
            says=f"{says} of {len(interfaces)} interfaces, and cannot know which one peers are to use: "
            f"{', '.join(reached)}",
            advice="name the one on the network that the bytes are to take; give movers that bind an address the same",
            command=f"pdhandoff doctor --listen {reached[0]}",
            facts=facts,
        )
    return Finding(
        check="listen.address",
        status=Status.OK,
        says=f"{says}; tell peers {' or '.join(reached)}",
        facts=facts,
    )


def _named(address: Address, ips: Sequence[IPAddress], local: Sequence[LocalAddress]) -> Finding:
    """A listener on an address that was chosen: that one is advertised, whatever the routes are."""
    ip = ips[0]
    of_ip = {each.address: each.interface for each in local}
    bare = ipaddress.ip_address(str(ip).partition("%")[0])
    by = str(Address(str(ip), address.port))
    facts = {"reached_by": (by,), "advertised": by, "interface": of_ip.get(bare)}
    if local and bare not in of_ip and not ip.is_loopback:
        return Finding(
            check="listen.address",
            status=Status.PROBLEM,
            says=f"{ip} is no address of this machine: a listener cannot be bound to it",
            advice="behind a load balancer or a container's port mapping, listen on the address that this machine has, "
            "and give peers the outer one",
            command="ip address",
            facts=facts,
        )
    where = f"{by} ({of_ip.get(bare, 'interface unknown')})"
    if ip.is_loopback and address.host not in {str(ip), "localhost"}:
        says = f"{address.host} means {ip} on this machine: peers on other hosts cannot reach a listener there"
        advice = "many distributions write the host's own name into /etc/hosts so: give the address itself"
        command = f"getent ahosts {address.host}"
        return Finding(
            check="listen.address", status=Status.WARNING, says=says, advice=advice, command=command, facts=facts
        )
    if ip.is_loopback:
        says = f"peers reach this side at {where}, from this machine only"
        return Finding(check="listen.address", status=Status.OK, says=says, facts=facts)
    if ip.is_link_local:
        says = f"{ip} is link-local: it means nothing without the interface that the peer has to name"
        return Finding(check="listen.address", status=Status.WARNING, says=says, facts=facts)
    says = f"peers reach this side at {where}, as it is configured"
    return Finding(check="listen.address", status=Status.OK, says=says, facts=facts)


def _port(address: Address) -> Finding:
    """Listen for a moment, as a consumer does at its start."""
    try:
        listen(address).close()
    except LocalError as error:
        return Finding(
            check="listen.port",
            status=Status.PROBLEM,
            says=error.reason,
            advice="a consumer would fail at its start, with this sentence",
            command=f"ss -ltnp 'sport = :{address.port}'" if address.port else "",
            facts={"port": address.port},
        )
    says = f"port {address.port} is free" if address.port else "port 0: the kernel chooses a free one at each start"
    return Finding(check="listen.port", status=Status.OK, says=says, facts={"port": address.port})
