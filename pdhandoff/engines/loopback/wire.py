"""What a loopback mover writes into a grant, and reads from one: bounded, checked, and never trusted."""

from __future__ import annotations

from typing import Annotated, Final, final

import msgspec

from pdhandoff.engines.loopback.files import COOKIE_BYTES
from pdhandoff.engines.loopback.syscalls import PAGE
from pdhandoff.errors import ErrorCode, MoverError
from pdhandoff.limits import DEFAULT_LIMITS, Limits

__all__ = ["MAX_BYTES", "Description", "FileWire", "SegmentWire", "decode", "encode"]

MAX_BYTES: Final = 1 << 47
"addresses and sizes stay below this many bytes"

Cookie = Annotated[bytes, msgspec.Meta(min_length=COOKIE_BYTES, max_length=COOKIE_BYTES)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Size = Annotated[int, msgspec.Meta(ge=0, lt=MAX_BYTES)]


@final
class FileWire(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A shared file: see `files`."""

    fd: Number
    cookie: Cookie
    data_bytes: Size


@final
class SegmentWire(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A run of granted memory that one part of one file backs."""

    address: Size
    "in the granting process"
    length: Size
    file: Number
    "index into `Description.files`"
    offset: Size
    "bytes into the file's data"


@final
class Description(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="loop1"):
    """Who grants, and what."""

    pid: Number
    control_fd: Number
    incarnation: Cookie
    files: tuple[FileWire, ...] = ()
    segments: tuple[SegmentWire, ...] = ()


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Description)


def encode(description: Description, limits: Limits = DEFAULT_LIMITS) -> bytes:
    """Bytes for a grant. Raises MoverError (OVERSIZED) when they would not fit into one."""
    _check_counts(description, limits)
    encoded = _encoder.encode(description)
    _check_size(len(encoded), limits)
    return encoded


def decode(encoded: bytes, limits: Limits = DEFAULT_LIMITS) -> Description:
    """The description that a peer sent.

    Raises:
        MoverError: OVERSIZED above the limits, MALFORMED for anything that `encode` does not write.
    """
    _check_size(len(encoded), limits)
    try:
        description = _decoder.decode(encoded)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MoverError(ErrorCode.MALFORMED, f"no description of loopback memory: {error}") from error
    _check_counts(description, limits)
    _check_segments(description)
    return description


def _check_size(nbytes: int, limits: Limits) -> None:
    if nbytes > limits.max_descriptor_bytes:
        raise MoverError(
            ErrorCode.OVERSIZED,
            f"a description of {nbytes} bytes exceeds {limits.max_descriptor_bytes}: grant fewer or larger extents",
        )


def _check_counts(description: Description, limits: Limits) -> None:
    # A fence may cut an extent in parts, so there may be more segments than extents; they are bounded by the bytes.
    most = 4 * limits.max_extents
    if len(description.segments) > most or len(description.files) > most:
        raise MoverError(
            ErrorCode.OVERSIZED,
            f"a description with {len(description.segments)} segments in {len(description.files)} files exceeds {most}",
        )


def _check_segments(description: Description) -> None:
    """Whole pages, inside their file, sorted by address, disjoint."""
    for index, file in enumerate(description.files):
        if file.data_bytes % PAGE or not file.data_bytes:
            raise MoverError(
                ErrorCode.MALFORMED, f"file {index} has {file.data_bytes} bytes, which is no number of pages"
            )
    end = 0
    for index, segment in enumerate(description.segments):
        if segment.file >= len(description.files):
            raise MoverError(ErrorCode.MALFORMED, f"segment {index} names file {segment.file}, which is not described")
        if segment.address % PAGE or segment.length % PAGE or segment.offset % PAGE or not segment.length:
            raise MoverError(ErrorCode.MALFORMED, f"segment {index} is not made of whole pages of {PAGE} bytes")
        if segment.offset + segment.length > description.files[segment.file].data_bytes:
            raise MoverError(ErrorCode.MALFORMED, f"segment {index} reaches past the end of its file")
        if segment.address < end:
            raise MoverError(ErrorCode.MALFORMED, f"segment {index} overlaps the one before it, or is out of order")
        end = segment.address + segment.length
