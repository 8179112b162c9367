"""TCP connections around `protocol.link.Link`: dialling, accepting, bytes in, bytes out. Runs on a `Loop`'s thread."""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import selectors
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, Protocol, Self, final

import msgspec

from pdhandoff.errors import ErrorCode, LocalError, PdHandoffError
from pdhandoff.ids import Incarnation
from pdhandoff.limits import Limits
from pdhandoff.protocol.codec import encode_message
from pdhandoff.protocol.link import Link, LinkClosed, LinkEvent, LinkOpened, LinkState, Side
from pdhandoff.protocol.messages import Bye, Message, Welcome
from pdhandoff.runtime.address import SocketAddress
from pdhandoff.runtime.allow import Sources
from pdhandoff.runtime.channel import Channel, PlainChannel, TlsChannel
from pdhandoff.runtime.complaints import Complaints
from pdhandoff.runtime.loop import Loop
from pdhandoff.runtime.tls import Tls, TlsConfig

__all__ = ["Connections", "Guard", "Identity", "LinkHandler"]

_LOG: Final = logging.getLogger("pdhandoff.runtime")

_READ_BYTES: Final = 1 << 18
_MAX_UNSENT: Final = 64 << 20
"bytes that a peer may leave unread before its link ends"
_ACCEPT_AGAIN_S: Final = 0.2
"pause after the process ran out of descriptors: the waiting peer would keep the loop busy"


@final
class Guard(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer has to show before a link opens. None each: nothing."""

    secret: bytes | None = None
    tls: Tls | None = None
    sources: Sources | None = None
    "from where a listener takes connections"

    @classmethod
    def of(cls, secret: bytes | None, tls: TlsConfig | None, sources: Sequence[str] | None = None) -> Self:
        """From what an endpoint is given. Raises LocalError (CONFIG) that names the file or entry that is no good."""
        return cls(
            secret=secret,
            tls=None if tls is None else Tls(tls),
            sources=None if sources is None else Sources(sources),
        )


@final
class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Who this endpoint is, on every link."""

    incarnation: Incarnation
    welcome: Welcome
    digest: bytes = b""
    guard: Guard = Guard()


class LinkHandler(Protocol):
    """What an endpoint does with its links."""

    def link_opened(self, link: int, opened: LinkOpened) -> None:
        """The handshake is complete. Raise PdHandoffError to refuse the peer."""

    def link_message(self, link: int, message: Message, now: float) -> None:
        """A message for the handoffs."""

    def link_closed(self, link: int, closed: LinkClosed, now: float) -> None:
        """It has ended; also called for links that never opened."""


class _Connection:
    """A socket, its link, and what lies between them."""

    __slots__ = ("channel", "connecting", "link", "number", "opened", "sock", "unsent", "watched")

    def __init__(self, number: int, sock: socket.socket, link: Link, channel: Channel, *, connecting: bool) -> None:
        self.number = number
        self.sock = sock
        self.link = link
        self.channel = channel
        self.unsent = bytearray()
        self.connecting = connecting
        self.opened = False
        self.watched = 0


@final
class Connections:
    """All connections of one endpoint, by number."""

    def __init__(self, loop: Loop, handler: LinkHandler, identity: Identity, limits: Limits) -> None:
        self._loop = loop
        self._handler = handler
        self._identity = identity
        self._limits = limits
        self._all: dict[int, _Connection] = {}
        self._handshakes: dict[int, str] = {}
        "who has connected and not proven itself, by number: the oldest comes first"
        self._accepted: set[int] = set()
        "open links that others have dialled"
        self._complaints = Complaints()
        self._next = 1
        self._listeners: list[socket.socket] = []
        self._accept_at: float | None = None
        "when to accept again"

    def listen(self, sock: socket.socket) -> None:
        """Accept connections from a listening socket."""
        guard, where = self._identity.guard, sock.getsockname()[0]
        if guard.secret is None and guard.tls is None and not ipaddress.ip_address(where).is_loopback:
            _LOG.warning(
                "listening on %s with neither a secret nor TLS: whoever reaches it can hand off and write there", where
            )
        self._listeners.append(sock)
        self._watch_listener(sock)

    def stop_listening(self) -> None:
        """Accept no more."""
        self._accept_at = None
        for sock in self._listeners:
            self._loop.unwatch(sock)
            sock.close()
        self._listeners.clear()

    def new_link(self) -> int:
        """A number for a link to come."""
        number, self._next = self._next, self._next + 1
        return number

    def dial(self, number: int, family: int, where: SocketAddress, *, host: str) -> None:
        """Start to connect. The result comes as `link_opened` or `link_closed`, perhaps before this returns.

        `host` is what was asked for, and what a certificate has to carry.
        """
        try:
            channel = self._channel(Side.DIALLER, host)
            sock = socket.socket(family, socket.SOCK_STREAM)
        except LocalError as error:
            closed = LinkClosed(code=error.code, reason=error.reason)
            self._handler.link_closed(number, closed, self._loop.clock())
            return
        except OSError as error:
            closed = LinkClosed(code=ErrorCode.LINK_LOST, reason=error.strerror or str(error))
            self._handler.link_closed(number, closed, self._loop.clock())
            return
        sock.setblocking(False)  # noqa: FBT003 - the standard library's name for it
        answer = sock.connect_ex(where)
        connection = self._add(number, sock, Side.DIALLER, channel, connecting=True)
        if answer not in {0, errno.EINPROGRESS}:
            self._broken(connection, os.strerror(answer))

    def send(self, number: int, message: Message, now: float) -> None:
        """Send a message over an open link; dropped when it is not open.

        Raises LocalError (OVERSIZED) when the peer would not take its size; the link goes on.
        """
        connection = self._all.get(number)
        if connection is not None:
            connection.link.send(message, now)

    def flush(self) -> None:
        """Hand everything that was queued to the sockets."""
        for connection in list(self._all.values()):
            if connection.link.has_data:
                self._flush(connection)

    def close(self, number: int, code: int = 0, reason: str = "") -> None:
        """Say goodbye on one link."""
        connection = self._all.get(number)
        if connection is not None:
            self._handle(connection, connection.link.close(code, reason), self._loop.clock())

    def close_all(self, reason: str = "") -> None:
        """Say goodbye on every link and stop listening."""
        self.stop_listening()
        for number in list(self._all):
            self.close(number, 0, reason)

    @property
    def open_links(self) -> list[int]:
        """Numbers of the links whose handshake is complete."""
        return [number for number, connection in self._all.items() if connection.opened]

    def next_deadline(self) -> float | None:
        """The earliest of all links' deadlines."""
        deadlines = [self._accept_at, *(connection.link.next_deadline() for connection in self._all.values())]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def tick(self, now: float) -> None:
        """Let time pass on every link."""
        if self._accept_at is not None and self._accept_at <= now:
            self._accept_at = None
            for sock in self._listeners:
                self._watch_listener(sock)
        for connection in list(self._all.values()):
            self._feed(connection, lambda link: link.tick(now), now)

    # ---- inside

    def _channel(self, side: Side, host: str = "") -> Channel:
        tls = self._identity.guard.tls
        return PlainChannel() if tls is None else TlsChannel(tls, side, host=host)

    def _add(self, number: int, sock: socket.socket, side: Side, channel: Channel, *, connecting: bool) -> _Connection:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        identity = self._identity
        link = Link(
            side,
            now=self._loop.clock(),
            incarnation=identity.incarnation,
            nonce=os.urandom(16),
            welcome=identity.welcome,
            secret=identity.guard.secret,
            digest=identity.digest,
            limits=self._limits,
        )
        connection = self._all[number] = _Connection(number, sock, link, channel, connecting=connecting)
        self._watch(connection)
        return connection

    def _watch_listener(self, sock: socket.socket) -> None:
        self._loop.watch(sock, selectors.EVENT_READ, lambda _events: self._accept(sock))

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, where = listener.accept()
        except OSError as error:
            if error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}:
                self._accept_at = self._loop.clock() + _ACCEPT_AGAIN_S
                for sock in self._listeners:
                    self._loop.unwatch(sock)
            return  # otherwise the peer is gone again
        sock.setblocking(False)  # noqa: FBT003 - the standard library's name for it
        self._admit(sock, str(where[0]))

    def _admit(self, sock: socket.socket, host: str) -> None:
        sources = self._identity.guard.sources
        if sources is not None and not sources.allows(host):
            self._turn_away(sock, host)
            return
        if len(self._handshakes) >= self._limits.max_handshakes:
            # those that mean it are done within a few turns; whoever lingers makes room
            reason = f"more than {self._limits.max_handshakes} connections wait for their handshakes"
            self.close(next(iter(self._handshakes)), ErrorCode.BUSY, reason)
        number = self.new_link()
        self._handshakes[number] = host
        self._add(number, sock, Side.LISTENER, self._channel(Side.LISTENER), connecting=False)

    def _turn_away(self, sock: socket.socket, host: str) -> None:
        """Say why, in the open, before anything has been said or asked."""
        reason = f"{host} is not on the consumer's allow-list: add it there if it may connect"
        with sock, suppress(OSError):  # it may not have waited for the answer
            sock.send(encode_message(Bye(code=ErrorCode.NOT_ALLOWED, reason=reason)))
        self._complaints.about(host, ErrorCode.NOT_ALLOWED, reason, self._loop.clock())

    def _watch(self, connection: _Connection) -> None:
        events = selectors.EVENT_READ
        if connection.connecting or connection.unsent:
            events |= selectors.EVENT_WRITE
        if events != connection.watched:
            connection.watched = events
            self._loop.watch(connection.sock, events, self._callback(connection))

    def _callback(self, connection: _Connection) -> Callable[[int], None]:
        return lambda events: self._ready(connection, events)

    def _ready(self, connection: _Connection, events: int) -> None:
        if connection.number not in self._all:
            return  # what another socket brought in this turn has ended it
        if connection.connecting:
            error = connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                self._broken(connection, os.strerror(error))
                return
            connection.connecting = False
        if events & selectors.EVENT_READ and not self._read(connection):
            return
        self._flush(connection)

    def _read(self, connection: _Connection) -> bool:
        try:
            data = connection.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return True
        except OSError as error:
            self._broken(connection, error.strerror or str(error))
            return False
        now = self._loop.clock()
        pieces, problem = connection.channel.receive(data)
        for piece in pieces:
            self._feed(connection, partial(Link.receive, data=piece, now=now), now)
            if connection.number not in self._all:
                return False
        if problem is not None:
            self._handle(connection, connection.link.close(problem.code, problem.reason), now)
        return connection.number in self._all

    def _flush(self, connection: _Connection) -> None:
        if connection.connecting or connection.number not in self._all:
            return
        connection.unsent += connection.channel.send(connection.link.data_to_send())
        while connection.unsent:
            try:
                sent = connection.sock.send(connection.unsent)
            except BlockingIOError:
                break
            except OSError as error:
                if self._read(connection):  # why it has gone may still be there to read
                    self._broken(connection, error.strerror or str(error))
                return
            del connection.unsent[:sent]
        if len(connection.unsent) > _MAX_UNSENT:
            self._broken(connection, "the peer does not read")
            return
        self._watch(connection)

    def _broken(self, connection: _Connection, reason: str) -> None:
        self._handle(connection, connection.link.lost(reason), self._loop.clock())

    def _feed(self, connection: _Connection, step: Callable[[Link], list[LinkEvent]], now: float) -> None:
        """Let a link go on. A peer that takes not even the answer to a PING loses it."""
        try:
            events = step(connection.link)
        except LocalError as error:
            events = connection.link.close(error.code, error.reason)
        self._handle(connection, events, now)

    def _handle(self, connection: _Connection, events: list[LinkEvent], now: float) -> None:
        for event in events:
            if connection.number not in self._all:
                return  # the handler closed it
            if isinstance(event, LinkOpened):
                self._opened(connection, event, now)
            elif isinstance(event, LinkClosed):
                self._end(connection, event, now)
            elif connection.opened:
                self._handler.link_message(connection.number, event.message, now)
        if connection.link.state is LinkState.CLOSED and connection.number in self._all:
            self._end(connection, LinkClosed(code=ErrorCode.LINK_LOST, reason="closed"), now)

    def _opened(self, connection: _Connection, event: LinkOpened, now: float) -> None:
        connection.opened = True
        try:
            self._check_room(connection)
            self._handler.link_opened(connection.number, event)
        except PdHandoffError as error:
            connection.opened = False
            self._handle(connection, connection.link.close(error.code, error.reason), now)
        if self._handshakes.pop(connection.number, None) is not None:
            self._accepted.add(connection.number)

    def _check_room(self, connection: _Connection) -> None:
        if connection.link.side is Side.LISTENER and len(self._accepted) >= self._limits.max_links:
            raise LocalError(ErrorCode.BUSY, f"this listener keeps no more than {self._limits.max_links} links")

    def _end(self, connection: _Connection, closed: LinkClosed, now: float) -> None:
        if self._all.pop(connection.number, None) is None:
            return
        self._accepted.discard(connection.number)
        host = self._handshakes.pop(connection.number, None)
        if host is not None:
            self._complaints.about(host, closed.code, closed.reason, now)
        self._loop.unwatch(connection.sock)
        data = bytes(connection.unsent) + connection.channel.send(connection.link.data_to_send())
        try:
            if data and not connection.connecting:
                connection.sock.send(data)
        except OSError:
            pass  # the peer is gone: there is nobody to say goodbye to
        connection.sock.close()
        self._handler.link_closed(connection.number, closed, now)
