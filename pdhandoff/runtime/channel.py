"""What lies between a socket and a link: nothing, or TLS. Bytes in and bytes out; never a socket, so never a wait."""

from __future__ import annotations

import ssl
from typing import Final, NamedTuple, Protocol, final

from pdhandoff.errors import ErrorCode, PdHandoffError, RemoteError
from pdhandoff.limits import DEFAULT_LIMITS
from pdhandoff.protocol.codec import FrameDecoder
from pdhandoff.protocol.link import Side
from pdhandoff.protocol.messages import Bye
from pdhandoff.runtime.tls import Tls, failure_sentence

__all__ = ["Channel", "Heard", "PlainChannel", "TlsChannel"]

_READ_BYTES: Final = 1 << 16
_TLS_TYPES: Final = range(0x14, 0x18)
"the first byte of a TLS record (RFC 8446, 5.1). The length of a first frame never starts so: it is too small"


class Heard(NamedTuple):
    """What came of bytes from the socket."""

    pieces: list[bytes]
    "for the link, in order; an empty one: the peer has closed the connection"
    problem: PdHandoffError | None = None
    "why nothing more will come, after the pieces"


class Channel(Protocol):
    """One connection's."""

    def receive(self, data: bytes) -> Heard:
        """Take what the socket gave; empty bytes mean that the peer has closed it."""

    def send(self, data: bytes) -> bytes:
        """What the socket is to send for these bytes of the link, and for what `receive` has to answer."""


@final
class PlainChannel:
    """Hands everything on, but for a peer that speaks TLS: that one is told why it cannot be understood."""

    def __init__(self) -> None:
        self._first = True

    def receive(self, data: bytes) -> Heard:
        """See `Channel`."""
        if self._first and data:
            self._first = False
            if data[0] in _TLS_TYPES:
                return Heard([], _misunderstood("one side of the link speaks TLS, the other does not"))
        return Heard([data])

    def send(self, data: bytes) -> bytes:
        """See `Channel`."""
        return data


@final
class TlsChannel:
    """TLS in memory. The link's bytes wait until the peer's certificate has been checked.

    Args:
        tls: this endpoint's.
        side: who dialled.
        host: what was dialled.

    Raises:
        LocalError: the host cannot be named in a certificate.
    """

    def __init__(self, tls: Tls, side: Side, *, host: str = "") -> None:
        self._tls = tls
        self._side = side
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._object = tls.wrap(side, self._incoming, self._outgoing, host=host)
        self._waiting = bytearray()
        self._first = True
        self._complete = False
        self._plain = False
        "the peer speaks no TLS"
        self._failed = False
        if side is Side.DIALLER:
            self._shake()

    def receive(self, data: bytes) -> Heard:
        """See `Channel`."""
        if self._plain or self._failed:
            return Heard([])
        if self._first and data:
            self._first = False
            if data[0] not in _TLS_TYPES:
                self._plain = True
                words = _plain_words(data)
                return Heard([], _misunderstood(f"one side of the link speaks TLS, the other does not{words}"))
        pieces: list[bytes] = []
        try:
            if data:
                self._incoming.write(data)
            else:
                self._incoming.write_eof()
            if self._complete or self._shake():
                self._read(pieces)
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            pieces.append(b"")
        except ssl.SSLError as error:
            self._failed = True
            return Heard(pieces, RemoteError(ErrorCode.AUTHENTICATION, failure_sentence(error)))
        except RemoteError as error:
            return Heard(pieces, error)
        return Heard(pieces)

    def send(self, data: bytes) -> bytes:
        """See `Channel`. A peer without TLS gets the listener's BYE in the open, and from a dialler nothing at all."""
        if self._plain:
            return data if self._side is Side.LISTENER else b""
        if not self._failed:
            self._waiting += data
            if self._complete:
                self._write()
        return self._outgoing.read()

    # ---- inside

    def _shake(self) -> bool:
        """Go on with the handshake; True once it is complete. Raises SSLError, and RemoteError for a name."""
        try:
            self._object.do_handshake()
        except ssl.SSLWantReadError:
            return False
        self._complete = True
        try:
            other = Side.LISTENER if self._side is Side.DIALLER else Side.DIALLER
            self._tls.check_name(other, self._object.getpeercert())
        except RemoteError:
            self._waiting.clear()  # the goodbye that follows is all that this peer gets
            raise
        self._write()
        return True

    def _read(self, pieces: list[bytes]) -> None:
        while True:
            try:
                piece = self._object.read(_READ_BYTES)
            except ssl.SSLWantReadError:
                return
            pieces.append(piece)
            if not piece:
                return

    def _write(self) -> None:
        if self._waiting:
            self._object.write(self._waiting)
            self._waiting.clear()


def _misunderstood(what: str) -> RemoteError:
    return RemoteError(ErrorCode.AUTHENTICATION, f"{what}: give TLS settings to both, or to neither")


def _plain_words(data: bytes) -> str:
    """What a peer without TLS says in its goodbye. Nobody vouches for it, so it is shown and not acted on."""
    frames = FrameDecoder(DEFAULT_LIMITS.max_hello_bytes)
    frames.feed(data)
    try:
        message = frames.next()
    except RemoteError:
        return ""
    return f" (it says: {message.reason!r})" if isinstance(message, Bye) and message.reason else ""
