"""Bytes to messages and back. Any bytes give messages or one typed error; nothing here trusts a length.

A frame is a 4-byte big-endian length and that many bytes of MessagePack. Before the peer has proven itself, frames are
bounded by `Limits.max_hello_bytes`.
"""

from __future__ import annotations

from typing import Final, final, get_args

import msgspec

from pdhandoff.errors import ErrorCode, RemoteError
from pdhandoff.protocol.messages import MAGIC, PROTOCOL_MAJOR, PROTOCOL_MINOR, Hello, Message

__all__ = ["LENGTH_BYTES", "FrameDecoder", "UnknownMessage", "decode_message", "encode_message", "version_mismatch"]

LENGTH_BYTES: Final = 4


def _plain(value: object) -> bytes:
    """Msgspec encodes bytes, not subclasses of it: our ids are such."""
    if isinstance(value, bytes):
        return bytes(value)
    raise TypeError(f"{type(value).__name__} is no part of any message")


_UNDECODABLE: Final = (msgspec.MsgspecError, ValueError, RecursionError, OverflowError)
"what decoding hostile bytes may raise"

_ENCODER: Final = msgspec.msgpack.Encoder(enc_hook=_plain)
_DECODER: Final = msgspec.msgpack.Decoder(Message)


class _Version(msgspec.Struct, frozen=True, tag_field="t", tag=Hello.__struct_config__.tag):
    """The part of HELLO that no version may change."""

    magic: bytes
    major: int
    minor: int


class _Tag(msgspec.Struct, frozen=True):
    """Enough of a message to tell whether its type is known."""

    t: int


_VERSION_DECODER: Final = msgspec.msgpack.Decoder(_Version)
_TAG_DECODER: Final = msgspec.msgpack.Decoder(_Tag)
_KNOWN_TAGS: Final = frozenset(kind.__struct_config__.tag for kind in get_args(Message))


@final
class UnknownMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A well-formed message of a type that a newer peer knows. Counted and dropped."""

    tag: int


def encode_message(message: Message) -> bytes:
    """One frame."""
    body = _ENCODER.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def decode_message(body: bytes | bytearray | memoryview) -> Message | UnknownMessage:
    """The message in one frame's body. Raises RemoteError that says what is wrong with it: MALFORMED, or VERSION."""
    try:
        return _DECODER.decode(body)
    except _UNDECODABLE as error:
        _check_version(body)
        tag = _tag_of(body)
        if tag is not None and tag not in _KNOWN_TAGS:
            return UnknownMessage(tag=tag)
        raise RemoteError(ErrorCode.MALFORMED, f"not a message of this protocol: {error}") from error


def version_mismatch(major: int, minor: int) -> RemoteError:
    """What to raise when the peer speaks another major version."""
    return RemoteError(
        ErrorCode.VERSION,
        f"the peer speaks protocol {major}.{minor}, this side {PROTOCOL_MAJOR}.{PROTOCOL_MINOR}: "
        "run the same major version on both sides",
    )


def _check_version(body: bytes | bytearray | memoryview) -> None:
    """A HELLO of another major version may look different, and is refused by its version all the same."""
    try:
        hello = _VERSION_DECODER.decode(body)
    except _UNDECODABLE:
        return
    if hello.magic == MAGIC and hello.major != PROTOCOL_MAJOR:
        raise version_mismatch(hello.major, hello.minor)


def _tag_of(body: bytes | bytearray | memoryview) -> int | None:
    try:
        return _TAG_DECODER.decode(body).t
    except _UNDECODABLE:
        return None


@final
class FrameDecoder:
    """Cuts a stream of bytes into messages. After an error it takes no more."""

    __slots__ = ("_broken", "_buffer", "last_body", "max_frame_bytes")

    def __init__(self, max_frame_bytes: int) -> None:
        self._buffer = bytearray()
        self._broken = False
        self.max_frame_bytes = max_frame_bytes
        "may be raised when the peer has proven itself"
        self.last_body = b""
        "of the message handed out last, to the byte"

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Append received bytes."""
        if not self._broken:
            self._buffer += data

    def next(self) -> Message | UnknownMessage | None:
        """The next whole message, None when more bytes are needed. Raises RemoteError on bytes that are none."""
        if self._broken or len(self._buffer) < LENGTH_BYTES:
            return None
        length = int.from_bytes(self._buffer[:LENGTH_BYTES], "big")
        if length > self.max_frame_bytes:
            self._break()
            raise RemoteError(
                ErrorCode.OVERSIZED, f"a message of {length} bytes exceeds the limit of {self.max_frame_bytes}"
            )
        end = LENGTH_BYTES + length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[LENGTH_BYTES:end])
        del self._buffer[:end]
        self.last_body = body
        try:
            return decode_message(body)
        except RemoteError:
            self._break()
            raise

    def _break(self) -> None:
        self._broken = True
        self._buffer.clear()
