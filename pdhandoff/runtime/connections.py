"""TCP connections around `protocol.link.Link`: dialling, accepting, bytes in, bytes out. Runs on a `Loop`'s thread."""

from __future__ import annotations

import errno
import os
import selectors
import socket
from collections.abc import Callable
from typing import Final, Protocol, final

import msgspec

from pdhandoff.errors import ErrorCode, LocalError, PdHandoffError
from pdhandoff.ids import Incarnation
from pdhandoff.limits import Limits
from pdhandoff.protocol.link import Link, LinkClosed, LinkEvent, LinkOpened, LinkState, Side
from pdhandoff.protocol.messages import Message, Welcome
from pdhandoff.runtime.address import SocketAddress
from pdhandoff.runtime.loop import Loop

__all__ = ["Connections", "Identity", "LinkHandler"]

_READ_BYTES: Final = 1 << 18
_MAX_UNSENT: Final = 64 << 20
"bytes that a peer may leave unread before its link ends"
_ACCEPT_AGAIN_S: Final = 0.2
"pause after the process ran out of descriptors: the waiting peer would keep the loop busy"


@final
class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Who this endpoint is, on every link."""

    incarnation: Incarnation
    welcome: Welcome
    digest: bytes = b""
    secret: bytes | None = None


class LinkHandler(Protocol):
    """What an endpoint does with its links."""

    def link_opened(self, link: int, opened: LinkOpened) -> None:
        """The handshake is complete. Raise PdHandoffError to refuse the peer."""

    def link_message(self, link: int, message: Message, now: float) -> None:
        """A message for the handoffs."""

    def link_closed(self, link: int, closed: LinkClosed, now: float) -> None:
        """It has ended; also called for links that never opened."""


class _Connection:
    """A socket and its link."""

    __slots__ = ("connecting", "link", "number", "opened", "sock", "unsent", "watched")

    def __init__(self, number: int, sock: socket.socket, link: Link, *, connecting: bool) -> None:
        self.number = number
        self.sock = sock
        self.link = link
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
        self._next = 1
        self._listeners: list[socket.socket] = []
        self._accept_at: float | None = None
        "when to accept again"

    def listen(self, sock: socket.socket) -> None:
        """Accept connections from a listening socket."""
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

    def dial(self, number: int, family: int, where: SocketAddress) -> None:
        """Start to connect. The result comes as `link_opened` or `link_closed`, perhaps before this returns."""
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            closed = LinkClosed(code=ErrorCode.LINK_LOST, reason=error.strerror or str(error))
            self._handler.link_closed(number, closed, self._loop.clock())
            return
        sock.setblocking(False)  # noqa: FBT003 - the standard library's name for it
        answer = sock.connect_ex(where)
        connection = self._add(number, sock, Side.DIALLER, connecting=True)
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

    def _add(self, number: int, sock: socket.socket, side: Side, *, connecting: bool) -> _Connection:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        identity = self._identity
        link = Link(
            side,
            now=self._loop.clock(),
            incarnation=identity.incarnation,
            nonce=os.urandom(16),
            welcome=identity.welcome,
            secret=identity.secret,
            digest=identity.digest,
            limits=self._limits,
        )
        connection = self._all[number] = _Connection(number, sock, link, connecting=connecting)
        self._watch(connection)
        return connection

    def _watch_listener(self, sock: socket.socket) -> None:
        self._loop.watch(sock, selectors.EVENT_READ, lambda _events: self._accept(sock))

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError as error:
            if error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}:
                self._accept_at = self._loop.clock() + _ACCEPT_AGAIN_S
                for sock in self._listeners:
                    self._loop.unwatch(sock)
            return  # otherwise the peer is gone again
        sock.setblocking(False)  # noqa: FBT003 - the standard library's name for it
        self._add(self.new_link(), sock, Side.LISTENER, connecting=False)

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
        self._feed(connection, lambda link: link.receive(data, now), now)
        return connection.number in self._all

    def _flush(self, connection: _Connection) -> None:
        if connection.connecting or connection.number not in self._all:
            return
        connection.unsent += connection.link.data_to_send()
        while connection.unsent:
            try:
                sent = connection.sock.send(connection.unsent)
            except BlockingIOError:
                break
            except OSError as error:
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
            self._handler.link_opened(connection.number, event)
        except PdHandoffError as error:
            connection.opened = False
            self._handle(connection, connection.link.close(error.code, error.reason), now)

    def _end(self, connection: _Connection, closed: LinkClosed, now: float) -> None:
        if self._all.pop(connection.number, None) is None:
            return
        self._loop.unwatch(connection.sock)
        data = bytes(connection.unsent) + connection.link.data_to_send()
        try:
            if data and not connection.connecting:
                connection.sock.send(data)
        except OSError:
            pass  # the peer is gone: there is nobody to say goodbye to
        connection.sock.close()
        self._handler.link_closed(connection.number, closed, now)
