"""The first handshake of a run: who the consumer is, what it takes, and which mover to write with."""

from __future__ import annotations

import os
import socket
import time
from typing import final

import msgspec

from pdhandoff.errors import ErrorCode, LocalError
from pdhandoff.ids import Incarnation
from pdhandoff.layouts import Layout, Policy, encode_layout
from pdhandoff.limits import DEFAULT_LIMITS
from pdhandoff.planner import Shard
from pdhandoff.protocol.link import Link, LinkOpened, Side
from pdhandoff.protocol.messages import Bye, Welcome
from pdhandoff.runtime.address import Address, Resolved, resolve
from pdhandoff.runtime.channel import PlainChannel, TlsChannel
from pdhandoff.runtime.meeting import decode_layouts, meet_consumer
from pdhandoff.runtime.tls import Tls
from pdhandoff.testing.peers.line import Line
from pdhandoff.testing.peers.visit import Target, Visit

__all__ = ["Met", "meet"]


@final
class Met(msgspec.Struct, frozen=True, kw_only=True):
    """What the first handshake showed."""

    target: Target
    layout: Layout
    "of the consumer's one rank"


def meet(address: Address, *, secret: bytes | None, tls: Tls | None, within_s: float) -> Met:
    """Shake hands once, as somebody who only asks.

    Raises LocalError that names the address when the consumer cannot be reached, ends the link, or has several ranks.
    """
    where = tuple(resolve(address))
    opened = _shake(address, where, secret, tls, within_s)
    layouts = decode_layouts(opened.welcome.consumes, DEFAULT_LIMITS)
    if len(layouts) != 1:
        has = f"has {len(layouts)} ranks" if layouts else "takes no handoffs: it is no consumer"
        raise LocalError(ErrorCode.CONFIG, f"{address} {has}; the rules are checked on a consumer of one rank")
    layout = layouts[0]
    link = meet_consumer(
        layout,
        Shard(0, 1),
        opened,
        replicas=None,
        mover=opened.welcome.mover,
        policy=Policy(),
        limits=DEFAULT_LIMITS,
    )
    target = Target(
        host=address.host,
        where=where,
        secret=secret,
        tls=tls,
        welcome=opened.welcome,
        produces=encode_layout(layout),
        template=link.template,
    )
    return Met(target=target, layout=layout)


def _shake(
    address: Address, where: tuple[Resolved, ...], secret: bytes | None, tls: Tls | None, within_s: float
) -> LinkOpened:
    problem = "it has no address"
    for family, place in where:
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.settimeout(within_s)
        try:
            sock.connect(place)
        except OSError as error:
            sock.close()
            problem = error.strerror or str(error)
            continue
        return _talk(address, sock, secret, tls, within_s)
    raise LocalError(ErrorCode.LINK_LOST, f"cannot connect to {address}: {problem}")


def _talk(address: Address, sock: socket.socket, secret: bytes | None, tls: Tls | None, within_s: float) -> LinkOpened:
    incarnation = Incarnation.mint()
    link = Link(
        Side.DIALLER,
        now=time.monotonic(),
        incarnation=incarnation,
        nonce=os.urandom(16),
        welcome=Welcome(name="pdhandoff conformance", mover=""),
        secret=secret,
    )
    channel = PlainChannel() if tls is None else TlsChannel(tls, Side.DIALLER, host=address.host)
    line = Line(sock, channel, link, incarnation, within_s)
    deadline = time.monotonic() + within_s
    try:
        while line.opened is None and not line.ended and not line.fault and time.monotonic() < deadline:
            line.receive()  # within the socket's own limit
        if line.opened is None:
            raise LocalError(ErrorCode.LINK_LOST, f"{address} did not let the check in: {Visit.last_words(line)}")
        line.say(Bye(reason="only a check"))
    finally:
        line.hang_up()
    return line.opened
