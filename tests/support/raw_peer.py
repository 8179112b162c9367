"""A peer made of a socket and the sans-IO link alone, for tests that need one that says anything, or nothing."""

from __future__ import annotations

import socket
import time
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from pdhandoff import Layout, Limits
from pdhandoff.ids import Incarnation
from pdhandoff.layouts import encode_layout
from pdhandoff.limits import DEFAULT_LIMITS
from pdhandoff.protocol.link import Link, LinkClosed, LinkOpened, MessageReceived, Side
from pdhandoff.protocol.messages import Message, Welcome
from pdhandoff.runtime.address import Address
from pdhandoff.runtime.meeting import encode_layouts
from support.engines import DEADLINE_S, LAYOUT

__all__ = ["RawPeer", "consumer_welcome", "listening", "producer_welcome"]

M = TypeVar("M")


def producer_welcome(description: bytes, layout: Layout = LAYOUT, **changes: Any) -> Welcome:
    """What a producer says of itself."""
    welcome = Welcome(
        name="raw producer", mover="loopback", description=description, produces=encode_layout(layout, DEFAULT_LIMITS)
    )
    return msgspec.structs.replace(welcome, **changes)


def consumer_welcome(description: bytes, layout: Layout = LAYOUT, **changes: Any) -> Welcome:
    """What a consumer says of itself."""
    welcome = Welcome(
        name="raw consumer",
        mover="loopback",
        description=description,
        consumes=encode_layouts([layout], DEFAULT_LIMITS),
    )
    return msgspec.structs.replace(welcome, **changes)


def listening() -> socket.socket:
    """A socket that somebody can dial."""
    sock = socket.create_server(("127.0.0.1", 0))
    sock.settimeout(DEADLINE_S)
    return sock


class RawPeer:
    """One end of a link, moved by hand."""

    def __init__(
        self,
        sock: socket.socket,
        welcome: Welcome,
        *,
        side: Side = Side.DIALLER,
        secret: bytes | None = None,
        limits: Limits = DEFAULT_LIMITS,
        incarnation: Incarnation | None = None,
    ) -> None:
        sock.settimeout(DEADLINE_S)
        self.sock = sock
        self.incarnation = incarnation or Incarnation.mint()
        self.link = Link(
            side,
            now=time.monotonic(),
            incarnation=self.incarnation,
            nonce=bytes(Incarnation.mint()),
            welcome=welcome,
            secret=secret,
            limits=limits,
        )
        self.opened: LinkOpened | None = None
        self.closed: LinkClosed | None = None
        self.heard = b""
        self._deadline = time.monotonic() + 2 * DEADLINE_S
        self.messages: list[Message] = []

    @classmethod
    def dial(cls, address: Address, welcome: Welcome, **options: Any) -> Self:
        """Connect and shake hands, as far as the other side lets us."""
        peer = cls(socket.create_connection((address.host, address.port), timeout=DEADLINE_S), welcome, **options)
        return peer.handshake()

    @classmethod
    def accept(cls, listener: socket.socket, welcome: Welcome, **options: Any) -> Self:
        """Take a connection and shake hands."""
        sock, _ = listener.accept()
        return cls(sock, welcome, side=Side.LISTENER, **options).handshake()

    def handshake(self) -> Self:
        """Until the link is open or closed."""
        while self.opened is None and self.closed is None:
            self.pump()
        return self

    def flush(self) -> None:
        """Send what the link wants to say."""
        data = self.link.data_to_send()
        if data:
            self.sock.sendall(data)

    def pump(self) -> None:
        """Take what comes, once."""
        assert time.monotonic() < self._deadline, "the other side says nothing of the kind"
        self.flush()
        try:
            data = self.sock.recv(1 << 16)
        except ConnectionError:
            data = b""
        self.heard += data
        for event in self.link.receive(data, time.monotonic()):
            if isinstance(event, LinkOpened):
                self.opened = event
            elif isinstance(event, LinkClosed):
                self.closed = event
            elif isinstance(event, MessageReceived):
                self.messages.append(event.message)
        if self.closed is None:
            self.flush()

    def send(self, *messages: Message) -> None:
        """Say something, all in one piece."""
        for message in messages:
            self.link.send(message, time.monotonic())
        self.flush()

    def wait_for(self, kind: type[M]) -> M:
        """The next message of a kind; others before it are dropped."""
        while True:
            while self.messages:
                message = self.messages.pop(0)
                if isinstance(message, kind):
                    return message
            assert self.closed is None, self.closed
            self.pump()

    def wait_closed(self) -> LinkClosed:
        """How the other side ended the link."""
        while self.closed is None:
            self.pump()
        return self.closed

    def close(self) -> None:
        """Without a word."""
        self.sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
