"""What a Mooncake mover writes into a grant, and reads from one: bounded, checked, and never trusted."""

from __future__ import annotations

from typing import Annotated, Final, final

import msgspec

from pdhandoff.engines.mooncake.library import Protocol
from pdhandoff.errors import ErrorCode, MoverError
from pdhandoff.ids import ID_BYTES
from pdhandoff.limits import DEFAULT_LIMITS, Limits

__all__ = ["Description", "ExtentWire", "decode", "encode", "split_segment"]

_MAX: Final = 1 << 57
"addresses and sizes stay below this many bytes"

Identity = Annotated[bytes, msgspec.Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
Size = Annotated[int, msgspec.Meta(ge=0, lt=_MAX)]
Length = Annotated[int, msgspec.Meta(ge=1, lt=_MAX)]
Segment = Annotated[str, msgspec.Meta(max_length=280, pattern=r"^(|(\[[0-9a-fA-F:.]+\]|[0-9A-Za-z.-]+):[0-9]{1,5})\Z")]


@final
class ExtentWire(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A run of granted memory."""

    address: Size
    "in the granting process"
    length: Length


@final
class Description(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="moon1"):
    """Who grants, and what."""

    incarnation: Identity
    protocol: Protocol
    segment: Segment = ""
    "host:port of the engine that the extents are registered with; empty without extents"
    extents: tuple[ExtentWire, ...] = ()


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Description)


def encode(description: Description, limits: Limits = DEFAULT_LIMITS) -> bytes:
    """Bytes for a grant. Raises MoverError (OVERSIZED) when they would not fit into one."""
    encoded = _encoder.encode(description)
    _check_bounds(len(encoded), len(description.extents), limits)
    return encoded


def decode(encoded: bytes, limits: Limits = DEFAULT_LIMITS) -> Description:
    """The description that a peer sent.

    Raises:
        MoverError: OVERSIZED above the limits, MALFORMED for anything that `encode` does not write.
    """
    _check_bounds(len(encoded), 0, limits)
    try:
        description = _decoder.decode(encoded)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MoverError(ErrorCode.MALFORMED, f"no description of Mooncake memory: {error}") from error
    _check_bounds(0, len(description.extents), limits)
    if bool(description.extents) != bool(description.segment):
        raise MoverError(ErrorCode.MALFORMED, "a description needs both extents and their engine, or neither")
    if description.segment and not 0 < split_segment(description.segment)[1] < 1 << 16:
        raise MoverError(ErrorCode.MALFORMED, f"{description.segment} names no port")
    return description


def split_segment(segment: str) -> tuple[str, int]:
    """Host, without brackets, and port."""
    host, _, port = segment.rpartition(":")
    return host.strip("[]"), int(port)


def _check_bounds(nbytes: int, extents: int, limits: Limits) -> None:
    if nbytes > limits.max_descriptor_bytes or extents > limits.max_extents:
        raise MoverError(
            ErrorCode.OVERSIZED,
            f"a description of {nbytes} bytes and {extents} extents exceeds {limits.max_descriptor_bytes} bytes or "
            f"{limits.max_extents} extents: grant fewer or larger extents",
        )
