"""One connection to a running endpoint: the handshake, PING, goodbye."""

from __future__ import annotations

import os
import socket
import time
from typing import Final, NamedTuple, final

from pdhandoff.errors import ErrorCode, LocalError, RemoteError
from pdhandoff.ids import Incarnation
from pdhandoff.limits import DEFAULT_LIMITS
from pdhandoff.protocol.codec import FrameDecoder
from pdhandoff.protocol.link import Link, LinkClosed, LinkEvent, LinkOpened, Side
from pdhandoff.protocol.messages import Bye, Hello, Ping, Pong, Welcome
from pdhandoff.runtime.address import Resolved

__all__ = ["Meeting", "meet"]

_READ_BYTES: Final = 1 << 16
_FIRST_PING: Final = 1 << 32
"a number that the link's own heartbeats do not reach"
_SECOND_PING: Final = _FIRST_PING + 1
"the first may be answered by a peer that then looks at who asks, and ends the link"


@final
class Meeting(NamedTuple):
    """How far it went."""

    connect_s: float
    "until TCP was connected"
    hello: Hello | None = None
    opened: LinkOpened | None = None
    ping_s: float | None = None
    "from PING to PONG; None: no answer came"
    ended: LinkClosed | None = None
    "before there was an answer"
    by_peer: bool = False
    "it is the peer that ended it, and its words are in `ended`"


def meet(where: Resolved, welcome: Welcome, *, secret: bytes | None, within_s: float) -> Meeting:
    """Connect, shake hands, PING, and say goodbye. Raises LocalError (LINK_LOST) when there is no connection."""
    deadline = time.monotonic() + within_s
    family, address = where
    started = time.monotonic()
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.settimeout(within_s)
        try:
            sock.connect(address)
        except OSError as error:
            reason = error.strerror or str(error)
            raise LocalError(
                ErrorCode.LINK_LOST, f"cannot connect to {address[0]} port {address[1]}: {reason}"
            ) from error
        connect_s = time.monotonic() - started
        return _Talk(sock, welcome, secret, deadline).run(connect_s)


@final
class _Talk:
    """What is said on one connection."""

    def __init__(self, sock: socket.socket, welcome: Welcome, secret: bytes | None, deadline: float) -> None:
        self._sock = sock
        self._deadline = deadline
        self._link = Link(
            Side.DIALLER,
            now=time.monotonic(),
            incarnation=Incarnation.mint(),
            nonce=os.urandom(16),
            welcome=welcome,
            secret=secret,
        )
        self._tap = FrameDecoder(DEFAULT_LIMITS.max_frame_bytes)
        "reads along: the link keeps HELLO, PONG and BYE to itself"
        self._hello: Hello | None = None
        self._opened: LinkOpened | None = None
        self._ended: LinkClosed | None = None
        self._by_peer = False
        self._pinged_at = 0.0
        self._ping_s: float | None = None

    def run(self, connect_s: float) -> Meeting:
        """Until there is an answer to the last PING, or an end."""
        while self._ended is None and self._ping_s is None:
            self._handle(self._turn())
        self._handle(self._link.close(reason="only a check"))
        self._flush()
        return Meeting(connect_s, self._hello, self._opened, self._ping_s, self._ended, self._by_peer)

    def _turn(self) -> list[LinkEvent]:
        """Send what is due, and read once."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            return self._link.lost("no answer in time")
        self._sock.settimeout(left)
        try:
            self._sock.sendall(self._link.data_to_send())
            data = self._sock.recv(_READ_BYTES)
        except TimeoutError:
            return self._link.lost("no answer in time")
        except OSError as error:
            return self._link.lost(error.strerror or str(error))
        now = time.monotonic()
        self._read_along(data, now)
        return self._link.receive(data, now)

    def _read_along(self, data: bytes, now: float) -> None:
        self._tap.feed(data)
        try:
            while (message := self._tap.next()) is not None:
                if isinstance(message, Hello):
                    self._hello = message
                elif isinstance(message, Pong):
                    self._take_pong(message.number, now)
                elif isinstance(message, Bye):
                    self._by_peer = True
        except RemoteError:
            pass  # the link reads the same bytes, and says what is wrong with them

    def _ping(self, number: int) -> None:
        self._pinged_at = time.monotonic()
        self._link.send(Ping(number=number), self._pinged_at)

    def _take_pong(self, number: int, now: float) -> None:
        if number == _FIRST_PING:
            self._ping(_SECOND_PING)
        elif number == _SECOND_PING:
            self._ping_s = now - self._pinged_at

    def _handle(self, events: list[LinkEvent]) -> None:
        for event in events:
            if isinstance(event, LinkOpened):
                self._opened = event
                self._ping(_FIRST_PING)
            elif isinstance(event, LinkClosed) and self._ping_s is None:
                self._ended = event

    def _flush(self) -> None:
        """Say goodbye, if anybody still listens."""
        try:
            self._sock.settimeout(max(0.001, self._deadline - time.monotonic()))
            self._sock.sendall(self._link.data_to_send())
        except OSError:
            pass  # nobody does, and everything is known already
