"""One connection to the consumer under check: any bytes out, everything it says in."""

from __future__ import annotations

import hashlib
import hmac
import socket
import time
from collections.abc import Sequence
from typing import Final, final

from pdhandoff.errors import PdHandoffError, RemoteError
from pdhandoff.ids import Incarnation
from pdhandoff.limits import DEFAULT_LIMITS
from pdhandoff.protocol.codec import LENGTH_BYTES, FrameDecoder, UnknownMessage, encode_message
from pdhandoff.protocol.link import Link, LinkClosed, LinkEvent, LinkOpened, Side
from pdhandoff.protocol.messages import Bye, Hello, Message, Proof
from pdhandoff.runtime.channel import Channel

__all__ = ["Line", "frame_of", "prove"]

_READ_BYTES: Final = 1 << 18


def frame_of(body: bytes) -> bytes:
    """A frame around any bytes."""
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def prove(secret: bytes, prover: Side, dialled: bytes, listened: bytes) -> Proof:
    """The proof that the wire page defines, over the bodies of both HELLOs."""
    text = b"pdhandoff proof " + prover.value.encode() + b"\0" + dialled + listened
    return Proof(mac=hmac.new(secret, text, hashlib.sha256).digest())


@final
class Line:
    """A connection.

    Args:
        sock: connected.
        channel: nothing, or TLS.
        link: shakes hands and keeps the link alive; None: whoever checks says every byte.
        incarnation: as whom it is spoken.
        answer_s: how long sending may take.
    """

    def __init__(
        self, sock: socket.socket, channel: Channel, link: Link | None, incarnation: Incarnation, answer_s: float
    ) -> None:
        sock.settimeout(answer_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.incarnation = incarnation
        self.heard: list[Message | UnknownMessage] = []
        "everything that the consumer has said, in order"
        self.hello_body = b""
        "of the consumer's HELLO, to the byte"
        self.opened: LinkOpened | None = None
        self.ended = False
        "the consumer has closed the connection"
        self.fault = ""
        "what the consumer said that this protocol does not know"
        self.muted = False
        "say nothing by itself, whatever is due"
        self._channel = channel
        self._link = link
        self._tap = FrameDecoder(DEFAULT_LIMITS.max_frame_bytes)
        self._turn()

    @property
    def bye(self) -> Bye | None:
        """Why the consumer ended it; None when it did not say."""
        return next((message for message in self.heard if isinstance(message, Bye)), None)

    def say(self, *messages: Message) -> None:
        """Send messages, in one piece."""
        self.say_bytes(b"".join(map(encode_message, messages)))

    def say_bytes(self, data: bytes) -> None:
        """Send any bytes. What a consumer that has hung up does not take is lost."""
        if self.ended:
            return
        try:
            self.sock.sendall(self._channel.send(data))
        except OSError:
            self.ended = not self._readable()

    def tick(self) -> None:
        """Let time pass: say what keeps the link alive."""
        if self._link is not None and not self.muted and not self.ended:
            self._take(self._link.tick(time.monotonic()))
            self._turn()

    def receive(self) -> None:
        """Read what has come; called when there is something."""
        try:
            data = self.sock.recv(_READ_BYTES)
        except OSError:
            data = b""
        try:
            pieces, problem = self._channel.receive(data)
        except PdHandoffError as error:
            pieces, problem = [], error
        if problem is not None:
            self.fault = self.fault or problem.reason
        for piece in pieces:
            self._hear(piece)
        if not data:
            self.ended = True
        self._turn()

    def hang_up(self) -> None:
        """Without a word. Idempotent."""
        self.ended = True
        self.sock.close()

    # ---- inside

    def _readable(self) -> bool:
        """Whether the consumer's last words may still be there to read."""
        return self.sock.fileno() >= 0

    def _hear(self, piece: bytes) -> None:
        self._tap.feed(piece)
        try:
            while (message := self._tap.next()) is not None:
                self.heard.append(message)
                if isinstance(message, Hello):
                    self.hello_body = self._tap.last_body
        except RemoteError as error:
            self.fault = self.fault or error.reason
        if self._link is not None and piece:
            self._take(self._link.receive(piece, time.monotonic()))

    def _take(self, events: Sequence[LinkEvent]) -> None:
        for event in events:
            if isinstance(event, LinkOpened):
                self.opened = event
            elif isinstance(event, LinkClosed) and self.bye is None:
                self.fault = self.fault or event.reason

    def _turn(self) -> None:
        """Hand on what link and channel want to say."""
        data = b"" if self._link is None or self.muted else self._link.data_to_send()
        if not self.ended:
            self.say_bytes(data)
