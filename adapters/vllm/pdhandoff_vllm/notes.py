"""Short cuts for bad news: a worker tells the engine core at once that a handoff has failed.

What workers report through vLLM reaches the scheduler's side after the requests of the same step have been answered:
the answer to a short prompt could not say that its handoff has failed. A note may get lost, the report comes anyway.

Notes are datagrams to an abstract Unix address, which only processes of one machine reach. Each carries a secret that
travels with vLLM's own metadata.
"""

from __future__ import annotations

import hmac
import os
import socket
from contextlib import suppress
from typing import Final, NamedTuple, final

import msgspec

__all__ = ["Inbox", "Note", "Outbox", "Postbox"]

_MOST_BYTES: Final = 4096
_MOST_REASON: Final = 512
_MOST_NOTES: Final = 256
"read at once"
_SECRET_BYTES: Final = 16


class Postbox(NamedTuple):
    """Where notes go."""

    address: bytes = b""
    "empty: nowhere"
    secret: bytes = b""


@final
class Note(msgspec.Struct, frozen=True, array_like=True):
    """A handoff has failed."""

    secret: bytes
    request: str
    reason: str


_DECODER: Final = msgspec.msgpack.Decoder(Note)


def _new_socket() -> socket.socket | None:
    """A datagram socket that never waits; None where the system has none or gives none."""
    if not hasattr(socket, "AF_UNIX"):
        return None
    with suppress(OSError):
        made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        made.setblocking(False)  # noqa: FBT003 - the standard library's name for it
        return made
    return None


@final
class Inbox:
    """The engine core's end. Opened with the first handoff."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._postbox: Postbox | None = None

    @property
    def postbox(self) -> Postbox:
        """Where workers send notes."""
        if self._postbox is None:
            self._postbox = self._open()
        return self._postbox

    def read(self) -> list[Note]:
        """What has come. Bounded, never waits; what is no note of ours is dropped."""
        notes: list[Note] = []
        if self._socket is None or self._postbox is None:
            return notes
        for _ in range(_MOST_NOTES):
            try:
                data = self._socket.recv(_MOST_BYTES)
            except OSError:  # nothing more now
                break
            with suppress(msgspec.MsgspecError):
                note = _DECODER.decode(data)
                if hmac.compare_digest(note.secret, self._postbox.secret):
                    notes.append(note)
        return notes

    def close(self) -> None:
        """Take no more notes."""
        if self._socket is not None:
            self._socket.close()
        self._socket, self._postbox = None, Postbox()

    def _open(self) -> Postbox:
        self._socket = _new_socket()
        if self._socket is None:
            return Postbox()
        try:
            self._socket.bind("")  # Linux chooses an abstract address
            address = self._socket.getsockname()
        except OSError:
            address = None
        if not isinstance(address, bytes) or not address:
            self._socket.close()
            self._socket = None
            return Postbox()
        return Postbox(address, os.urandom(_SECRET_BYTES))


@final
class Outbox:
    """A worker's end. One thread opens and closes it, any may send."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None

    def open(self, postbox: Postbox) -> None:
        """Be ready to send to this postbox. Idempotent."""
        if self._socket is None and postbox.address:
            self._socket = _new_socket()

    def send(self, postbox: Postbox, request: str, reason: str) -> None:
        """Send a note, or drop it when that cannot be done at once."""
        opened = self._socket
        if opened is None or not postbox.address:
            return
        data = msgspec.msgpack.encode(Note(postbox.secret, request, reason[:_MOST_REASON]))
        with suppress(OSError):  # nobody reads, or not fast enough, or it has just been closed
            opened.sendto(data, postbox.address)

    def close(self) -> None:
        """Send no more."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
